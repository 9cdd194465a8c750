"""The rows of the benchmark, each with what is asked for, and the run that measures them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

from ..measure import Case, Unsupported
from ..progress_bar import ProgressBar
from . import snippets
from .rows import Contestants, ExtraMemory, Ratio, Result, Row, Snippet, Speed
from .settings import FAST_PEERS, BenchError, Settings

_SSE = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16"
_AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": f"{_SSE},+avx,+avx2,+fma,+bmi,+bmi2"}
_NO_FMA = {"NUMBA_CPU_NAME": "sandybridge", "NUMBA_CPU_FEATURES": f"{_SSE},+avx"}

LONG = 32_768
"""Queries and keys of the long rows."""

_X86_ROWS: tuple[Row, ...] = (
    Speed("avx2", "N=4096 D=64 compiled for AVX2", Case(), 70, peers=(), environment=_AVX2),
    Speed(
        "no-fma",
        "N=2048 D=64 compiled for a processor without FMA",
        Case(N=2048),
        peers=(),
        environment=_NO_FMA,
        gflops=60,
    ),
)

ROWS: tuple[Row, ...] = (
    Speed("d64", "N=4096 D=64", Case(), 85, {"torch": 1.35, "openvino": 1.1}),
    Speed("d128", "N=4096 D=128", Case(D=128), 85, {"torch": 1.15, "openvino": 1.1}),
    Speed(
        "causal-d64",
        "N=4096 D=64 causal",
        Case(causal=True),
        78,
        {"torch": 1.4, "openvino": 2},
    ),
    Speed(
        "causal-d128",
        "N=4096 D=128 causal",
        Case(D=128, causal=True),
        78,
        {"torch": 1.25, "openvino": 2},
    ),
    Speed("long-d64", "one head, N=32768 D=64", Case(H=1, N=LONG), 82, peers=FAST_PEERS),
    Speed("long-d128", "one head, N=32768 D=128", Case(H=1, N=LONG, D=128), 82, peers=FAST_PEERS),
    Speed(
        "long-causal-d64",
        "one head, N=32768 D=64 causal",
        Case(H=1, N=LONG, causal=True),
        78,
        peers=FAST_PEERS,
    ),
    Speed(
        "long-causal-d128",
        "one head, N=32768 D=128 causal",
        Case(H=1, N=LONG, D=128, causal=True),
        78,
        peers=FAST_PEERS,
    ),
    Speed("short", "N=512 D=64", Case(N=512), 70),
    Speed("float64", "float64, N=2048 D=64", Case(N=2048, dtype="float64"), 75),
    Speed("d80", "N=2048 D=80", Case(N=2048, D=80), 70),
    Speed("d96", "N=2048 D=96", Case(N=2048, D=96), 70),
    Speed("d40", "N=2048 D=40", Case(N=2048, D=40), 70),
    Speed("dv", "N=2048 D=192 Dv=128", Case(N=2048, D=192, Dv=128), 70),
    Speed(
        "window",
        "N=16384 D=64 window (256, 0)",
        Case(N=16_384, window=(256, 0)),
        55,
        {"flex": 2.5},
        peers=(*FAST_PEERS, "flex"),
    ),
    Speed("mask", "N=4096 D=64 dense mask, half hidden", Case(mask="random"), 45),
    *(
        Speed(name, what, case, None, {"flex": 2.5}, peers=("flex",))
        for name, what, case in (
            ("softcap-speed", "N=4096 D=64 softcap", Case(mod="softcap")),
            ("alibi-speed", "N=4096 D=64 ALiBi", Case(mod="ALiBi")),
            (
                "documents-speed",
                "N=16384 D=64, 16 documents, BlockMask",
                Case(N=16_384, mod="documents"),
            ),
        )
    ),
    Speed(
        "backward-d64",
        "gradients, N=2048 D=64",
        Case(N=2048, backward=True),
        66,
        {"torch": 1.3},
        peers=("torch",),
    ),
    Speed(
        "backward-d128",
        "gradients, N=2048 D=128",
        Case(N=2048, D=128, backward=True),
        66,
        {"torch": 1.2},
        peers=("torch",),
    ),
    Speed(
        "backward-causal-d64",
        "gradients, N=2048 D=64 causal",
        Case(N=2048, causal=True, backward=True),
        58,
        {"torch": 1.4},
        peers=("torch",),
    ),
    Speed(
        "backward-causal-d128",
        "gradients, N=2048 D=128 causal",
        Case(N=2048, D=128, causal=True, backward=True),
        58,
        {"torch": 1.2},
        peers=("torch",),
    ),
    *(
        Speed(
            f"{dtype}-{name}",
            f"{dtype}, N=4096 {what}",
            Case(D=D, dtype=dtype, causal="causal" in name),
            peers=FAST_PEERS if dtype == "bfloat16" else ("torch",),
        )
        for dtype, name, what, D in (
            ("bfloat16", "d64", "D=64", 64),
            ("bfloat16", "d128", "D=128", 128),
            ("bfloat16", "causal-d64", "D=64 causal", 64),
            ("bfloat16", "causal-d128", "D=128 causal", 128),
            ("float16", "d64", "D=64", 64),
            ("float16", "d128", "D=128", 128),
        )
    ),
    *(
        Speed(
            f"backward-{dtype}-d{D}",
            f"gradients, {dtype}, N=2048 D={D}",
            Case(N=2048, D=D, dtype=dtype, backward=True),
            peers=("torch",),
        )
        for dtype in ("bfloat16", "float16")
        for D in (64, 128)
    ),
    *(_X86_ROWS if platform.machine().lower() in ("x86_64", "amd64") else ()),
    Ratio(
        "hiding",
        "a mask that hides something in each tile, against one that hides nothing",
        Case(mask="sparse"),
        Case(mask="open"),
        0.85,
    ),
    Ratio("threads", "all threads against one", Case(), Case(), 1.85, threads=1),
    *(
        Ratio(form, f"{form} inputs against contiguous ones", Case(form=form), Case(), 0.85)
        for form in ("packed", "reversed", "strided", "read-only", "unaligned")
    ),
    Ratio("softcap", "softcap against none", Case(mod="softcap"), Case(), 0.85),
    Ratio("alibi", "ALiBi against none", Case(mod="ALiBi"), Case(), 0.93),
    Ratio(
        "gate",
        "a score_mod of one tanh and one np.where against none",
        Case(mod="gate"),
        Case(),
        0.82,
    ),
    Ratio("dropout", "dropout against none", Case(mod="dropout"), Case(), 0.7),
    Ratio(
        "causal-mod",
        "causal as a mask_mod with its BlockMask against causal=True",
        Case(mod="causal"),
        Case(causal=True),
        0.85,
    ),
    Ratio(
        "documents",
        "16 documents in N=16384, with BlockMask against without",
        Case(N=16_384, mod="documents"),
        Case(N=16_384, mod="documents", skip=False),
        10,
    ),
    Ratio(
        "prefix",
        "prefix-LM at N=16384 against no mask, for each score of a visible block",
        Case(N=16_384, mod="prefix"),
        Case(N=16_384),
        0.7,
        by_work=True,
    ),
    Ratio(
        "local",
        "local-plus-global at N=16384 against no mask, for each score of a visible block",
        Case(N=16_384, mod="local"),
        Case(N=16_384),
        0.7,
        by_work=True,
    ),
    Ratio(
        "backward-threads",
        "gradients of one head, N=8192 D=64: all threads against one",
        Case(H=1, N=8192, backward=True),
        Case(H=1, N=8192, backward=True),
        1.7,
        threads=1,
    ),
    Ratio(
        "backward-groups",
        "gradients, 8 query heads on 2 key heads against 8",
        Case(N=2048, Hkv=2, backward=True),
        Case(N=2048, backward=True),
        0.9,
    ),
    Ratio(
        "backward-softcap",
        "gradients with softcap against none",
        Case(N=2048, mod="softcap", backward=True),
        Case(N=2048, backward=True),
        0.6,
    ),
    Ratio(
        "backward-gate",
        "gradients with a score_mod of one tanh and one np.where against none",
        Case(N=2048, mod="gate", backward=True),
        Case(N=2048, backward=True),
        0.6,
    ),
    Ratio(
        "backward-bias",
        "gradients with that of a bias (1, H, N, N) against none",
        Case(N=2048, bias="full", backward=True),
        Case(N=2048, backward=True),
        0.55,
    ),
    Ratio(
        "backward-key-bias",
        "gradients with that of a bias (1, H, 1, N) against none",
        Case(N=2048, bias="keys", backward=True),
        Case(N=2048, backward=True),
        0.7,
    ),
    ExtraMemory(
        "backward-memory",
        "gradients of one head, N=32768 D=64: memory beyond inputs and dq",
        Case(H=1, N=LONG, backward=True),
        96,
    ),
    ExtraMemory(
        "memory",
        "one head, N=65536 D=64 causal: memory beyond inputs and output",
        Case(H=1, N=65_536, causal=True),
        32,
    ),
    Snippet("import", "import nattn, after import numba", snippets.IMPORT, 0.3),
    Snippet("second", "first call in a process, kernels from the cache", snippets.FIRST, 0.8),
    Snippet("first", "first call ever, kernels compiled", snippets.FIRST, 6.0, cold=True),
    Snippet("new-mod", "first call with a new function", snippets.NEW, 0.8),
    Snippet(
        "rebound", "new arrays bound to a known function", snippets.REBOUND, 0, unit="compilations"
    ),
    Snippet("later", "built-ins in a later process", snippets.LATER, 0, unit="compilations"),
    Snippet("tiny", "a warm call on (1, 1, 16, 64)", snippets.WARM, 60e-6),
)

QUICK = ("d64", "causal-d64", "short", "tiny")
"""Rows of ``--quick``."""


def select(names: Iterable[str] | None) -> list[Row]:
    """Return rows by name, all of them for None.

    Raises
    ------
    BenchError
        If there is no such row.
    """
    if names is None:
        return list(ROWS)
    known = {row.name: row for row in ROWS}
    names = list(names)
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"rows: no {', '.join(unknown)}; known are {', '.join(known)}")
    return [known[name] for name in names]


def run(
    rows: Iterable[Row], settings: Settings, tell: Callable[[Result], object] = lambda result: None
) -> list[Result]:
    """Measure rows, one after the other.

    Parameters
    ----------
    rows : iterable of rows
        What to measure.
    settings : Settings
        How much to measure.
    tell : callable, optional
        Called with each result as soon as it is measured.

    Returns
    -------
    list of Result
        In the order of the rows.
    """
    results = []
    with Contestants(settings) as contestants:
        for row in rows:
            try:
                with ProgressBar(row.what) as progress:
                    result = row.measure(contestants, progress)
            except Unsupported as reason:  # a dtype that is not installed
                result = Result(row.what, {}, notes=(f"nattn: {reason}",))
            except (ArithmeticError, RuntimeError) as error:  # the other rows go on
                result = Result(row.what, {}, notes=(f"failed: {error}",))
            tell(result)
            results.append(result)
    return results
