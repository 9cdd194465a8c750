"""pytest-benchmark: nattn, the reference, NumPy and the peers that are installed, side by side.

Run all with ``python -m pytest bench``, some with ``-k "causal and not jax"``; compare two states
of the code with ``--benchmark-autosave`` and ``--benchmark-compare``. `python -m nattn bench` makes
the tables of the documentation: there contestants take turns, which is the fairer comparison.

The cases are those of the tests that every contestant can run, and sizes at which speed counts.
Each contestant works in a process of its own; a request takes about 0.1 ms. The tests' cases with
modifiers and masks are for nattn and the reference only, in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import cases
import pytest

import nattn
from nattn.applications.measure import PREPARE, Case, Contestant, Unsupported, processors

LARGE = {
    "N=512": Case(N=512),
    "N=2048": Case(N=2048),
    "N=2048, D=128": Case(N=2048, D=128),
    "N=2048, causal": Case(N=2048, causal=True),
    "N=2048, float64": Case(N=2048, dtype="float64"),
    "N=2048, window": Case(N=2048, window=(256, 0)),
    "N=2048, mask": Case(N=2048, mask="random"),
    "N=2048, softcap": Case(N=2048, mod="softcap"),
    "N=2048, ALiBi": Case(N=2048, mod="ALiBi"),
    "N=2048, documents": Case(N=2048, mod="documents"),
    "N=2048, documents, no blocks": Case(N=2048, mod="documents", skip=False),
    "N=2048, dropout": Case(N=2048, mod="dropout"),
}


def convert(case: cases.Case) -> Case | None:
    """Return a tested case in the form that peers understand, None if they cannot run it."""
    plain = set(case.options) <= {"causal", "window_size"}
    if not plain or case.Hkv not in (None, case.Hq) or case.Nk not in (None, case.Nq):
        return None
    window = case.options.get("window_size")
    if window is not None and not all(side is not None and side >= 0 for side in window):
        return None
    causal = bool(case.options.get("causal", False))
    return Case(case.B, case.Hq, case.Nq, case.D, case.Dv, causal=causal, window=window)


SHARED = {case.name: made for case in cases.CASES if (made := convert(case)) is not None}
OWN = [
    case
    for case in cases.CASES
    if {"softcap", "alibi_slopes", "sinks", "score_mod", "mask_mod", "dropout_p"} & {*case.options}
]
assert min(len(SHARED), len(OWN)) >= 4, "the tests' cases have changed: none is left to compare"


@pytest.fixture(scope="session")
def contestants() -> Iterator[dict[str, Contestant]]:
    """Start each contestant once, when it is first asked for."""
    with ExitStack() as stack:

        class Started(dict[str, Contestant]):
            def __missing__(self, name: str) -> Contestant:
                self[name] = stack.enter_context(Contestant(name, processors()))
                return self[name]

        yield Started()


@pytest.mark.parametrize("contestant", PREPARE)
@pytest.mark.parametrize("name", [*SHARED, *LARGE])
def test_forward(
    name: str, contestant: str, contestants: dict[str, Contestant], benchmark: Any
) -> None:
    """Time one call; preparing has compiled everything and checked the result."""
    benchmark.group = name
    case = (SHARED | LARGE)[name]
    if contestant == "flex" and case.mod is None and case.window is None:
        pytest.skip("it compiles for half a minute")
    try:
        contestants[contestant].prepare(case)
    except Unsupported as reason:
        pytest.skip(str(reason))
    call = contestants[contestant].sample
    benchmark.pedantic(call, kwargs={"at_least": 0.0}, rounds=7, warmup_rounds=1)
    benchmark.extra_info["GFLOP/s"] = case.flops() / benchmark.stats.stats.median / 1e9


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_modified(case: cases.Case, backend: str, benchmark: Any) -> None:
    """Time one small call, most of which is the work around the kernel."""
    benchmark.group = case.name
    q, k, v, options = case.make("float32")
    benchmark(nattn.attention, q, k, v, backend=backend, **options)
