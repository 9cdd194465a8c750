"""Measuring: what is counted, who takes turns, and that a figure is what it says."""

from __future__ import annotations

import doctest
import itertools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nattn.applications import measure
from nattn.applications.measure import (
    MODIFIERS,
    Case,
    Contestant,
    PeakMemory,
    Samples,
    Unsupported,
    clock,
    interleave,
    memory,
    peers,
    timed,
)
from nattn.vectors import dtypes

SMALL = Case(B=1, H=2, N=96, D=16)


@pytest.mark.parametrize("module", [clock, memory])
def test_examples(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted > 0


# Counting


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (5, 0), (3, 7), (-1, 2), (100, 100)])
def test_visible_scores(causal: bool, window: tuple[int, int] | None) -> None:
    n = 23
    count = 0
    for i, j in itertools.product(range(n), range(n)):
        seen = j <= i or not causal
        if window is not None:
            left, right = window
            seen &= (left == -1 or i - j <= left) and (right == -1 or j - i <= right)
        count += seen
    case = Case(B=2, H=3, N=n, causal=causal, window=window)
    assert case.visible() == 6 * count


def test_flops_are_those_of_both_products() -> None:
    assert Case(B=1, H=8, N=4096, D=64).flops() == 4 * 8 * 4096**2 * 64
    assert Case(B=1, H=1, N=10, D=4, Dv=6).flops() == 2 * 100 * (4 + 6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mod", ["causal", "documents", "prefix", "local"])
def test_scores_of_blocks_that_are_skipped_do_not_count(mod: str, causal: bool) -> None:
    n, size = 700, 128
    case = Case(B=2, H=3, N=n, mod=mod, causal=causal)
    i, j = np.arange(n)[:, None], np.arange(n)
    seen = np.broadcast_to(case.arrays()[3]["mask_mod"](0, 0, i, j), (n, n))
    count = 0
    for block in itertools.product(range(0, n, size), repeat=2):
        rows, keys = (slice(first, first + size) for first in block)
        inside = (j <= i if causal else np.ones((n, n), bool))[rows, keys]
        count += int(inside.sum()) if seen[rows, keys].any() else 0
    assert case.visible() == 6 * count
    every = Case(B=2, H=3, N=n, causal=causal).visible()
    assert Case(B=2, H=3, N=n, mod=mod, causal=causal, skip=False).visible() == every
    assert count < n * n


def test_documents_are_about_as_long_but_end_within_blocks() -> None:
    lengths = np.bincount(measure.document_numbers(16_384))
    assert len(lengths) == 16
    assert (abs(lengths - 1024) < 256).all()
    assert (np.cumsum(lengths)[:-1] % 128 != 0).all()


@pytest.mark.parametrize("form", ["packed", "reversed", "strided", "read-only", "unaligned"])
def test_forms_lie_in_memory_as_they_say(form: str) -> None:
    for x in Case(H=2, N=8, D=4, Dv=3, form=form).arrays()[:3]:
        assert x.shape in ((1, 2, 8, 4), (1, 2, 8, 3))
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
        assert x.flags.writeable == (form != "read-only")
        assert x.flags.aligned == (form != "unaligned")
        assert (x.strides[2] < 0) == (form == "reversed")
        assert (x.strides[3] == 8) == (form == "strided")
        assert (x.strides[2] > x.strides[1]) == (form == "packed")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype: str) -> None:
    case = Case(H=2, N=8, D=4, dtype=dtype, bias="keys")
    q, k, v, options = case.arrays()
    for x in (q, k, v, options["bias"], case.dout()):
        assert x.dtype == case.storage
        assert x.dtype.name == dtype
    assert case.compute == ("float64" if dtype == "float64" else "float32")
    assert case.flops() == Case(H=2, N=8, D=4).flops()


def test_masks() -> None:
    n = 64
    sparse = Case(N=n, mask="sparse").arrays()[3]["mask"]
    assert (~sparse).sum() == n * n // 16
    tiles = (~sparse).reshape(n // 16, 16, n // 16, 16).any(axis=(1, 3))
    assert tiles.all()  # every tile hides something
    assert Case(N=n, mask="open").arrays()[3]["mask"].all()
    assert 0.4 < Case(N=n, mask="random").arrays()[3]["mask"].mean() < 0.6


@pytest.mark.parametrize("mod", MODIFIERS)
def test_modifiers_change_the_result(mod: str) -> None:
    """Were a modifier lost on the way, its cost would be, too."""
    plain, changed = (Case(H=2, N=400, D=16, mod=m) for m in (None, mod))
    out = measure.prepare("nattn", changed, 1)()
    with pytest.raises(ArithmeticError, match="wrong by"):
        measure.check(plain, out)
    every = Case(H=2, N=400, D=16, mod=mod, skip=False)
    np.testing.assert_array_equal(out, measure.prepare("nattn", every, 1)())


# Taking turns


def test_contestants_take_turns_in_an_order_that_rotates() -> None:
    seen: list[str] = []

    def sampler(name: str) -> Callable[[], float]:
        def sample() -> float:
            seen.append(name)
            return float(len(seen))

        return sample

    done: list[float] = []
    samples = interleave(
        {name: sampler(name) for name in "abc"}, rounds=3, warmup=1, pause=0.0, progress=done.append
    )
    assert "".join(seen) == "abcbcacababc"
    assert samples.values == {"a": (6.0, 8.0, 10.0), "b": (4.0, 9.0, 11.0), "c": (5.0, 7.0, 12.0)}
    assert done == pytest.approx([(i + 1) / 12 for i in range(12)])


def test_ratios_are_paired_within_a_round() -> None:
    # b takes twice as long as a in every round, while the machine slows down and recovers
    samples = Samples({"a": (1.0, 4.0, 1.0, 2.0, 8.0), "b": (2.0, 8.0, 2.0, 4.0, 16.0)})
    assert samples.ratio("b", "a") == 2.0
    assert samples.median("a") == 2.0


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 1), (1, -1)])
def test_no_round_to_count(rounds: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="rounds, warmup"):
        interleave({"a": lambda: 1.0}, rounds=rounds, warmup=warmup)


def test_short_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 0.25

    monkeypatch.setattr("nattn.applications.measure.clock.time.perf_counter", lambda: now[0])
    assert timed(call, at_least=1.0)() == 0.25
    assert now[0] == 1.0
    assert timed(call, at_least=0.1)() == 0.25
    assert now[0] == 1.25


# Memory


def test_peak_memory_is_that_of_the_block() -> None:
    size = 64 << 20
    np.ones(2 * size, np.uint8)  # an earlier, higher peak that must not count
    with PeakMemory() as memory:
        np.ones(size, np.uint8)  # gone before the block ends
    assert memory.method
    if sys.platform == "linux":
        assert abs(memory.bytes - size) < 4 << 20
    with PeakMemory() as memory:
        pass
    assert memory.bytes < 4 << 20


# Contestants


def test_a_contestant_that_is_not_installed_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match="not installed"):
        measure.prepare("torch", SMALL, 1)


def test_a_dense_matrix_that_is_too_large_is_not_built() -> None:
    with pytest.raises(Unsupported, match="16 GiB"):
        measure.prepare("numpy", Case(H=1, N=65_536), 1)


def test_bfloat16_sits_out_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "bfloat16", lambda: dtypes.BFLOAT16_BITS)
    with pytest.raises(Unsupported, match="bfloat16 needs ml_dtypes, which is not installed"):
        measure.prepare("nattn", Case(H=2, N=96, D=16, dtype="bfloat16"), 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
def test_what_16_bit_numbers_may_be_wrong_by(dtype: str, backward: bool) -> None:
    """A few units of the last place, not more; and what is not a number never."""
    case = Case(H=2, N=96, D=16, dtype=dtype, backward=backward)
    right = measure.prepare("nattn", case, 1)().astype(np.float32)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    measure.check(case, right * (1 + 4 * unit))
    for factor in (1 + 20 * unit, np.nan):
        with pytest.raises(ArithmeticError, match="wrong by"):
            measure.check(case, right * factor)


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    right = measure.PREPARE["numpy"]

    def wrong(case: Case, threads: int) -> Callable[[], Any]:
        call = right(case, threads)
        return lambda: factor * call()

    monkeypatch.setitem(measure.PREPARE, "numpy", wrong)
    with pytest.raises(ArithmeticError, match="wrong by"):
        measure.prepare("numpy", SMALL, 1)


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Case(H=2, N=96, D=16, causal=True),
        Case(H=2, N=96, D=16, dtype="float64"),
        Case(H=2, N=96, D=16, dtype="float16", causal=True),
        Case(H=2, N=96, D=16, dtype="bfloat16", mask="random"),
        Case(H=2, N=96, D=16, Dv=24),
        Case(H=2, N=96, D=16, window=(20, 0)),
        Case(H=2, N=96, D=16, mask="random"),
        Case(H=2, N=96, D=16, mask="random", causal=True, mod="dropout"),
    ],
    ids=["plain", "causal", "float64", "float16", "bfloat16", "Dv", "window", "mask", "dropout"],
)
@pytest.mark.parametrize("name", ["nattn", "numpy", "reference"])
def test_prepared_calls_are_right(name: str, case: Case) -> None:
    if case.mod is not None and name == "numpy":
        with pytest.raises(Unsupported, match="no functions of scores"):
            measure.prepare(name, case, 1)
        return
    if case.dtype != case.compute and name == "numpy":
        with pytest.raises(Unsupported, match="float32 and float64 only"):
            measure.prepare(name, case, 1)
        return
    assert measure.prepare(name, case, 1)().shape == (1, 2, case.N, case.width)


@pytest.mark.parametrize("name", ["torch", "openvino", "onnxruntime", "jax"])
def test_peers_compute_the_same_or_sit_out(name: str) -> None:
    """`prepare` checks the result; an ArithmeticError here is a wrong adapter."""
    done = 0
    with Contestant(name, 1) as peer:
        for case in (SMALL, Case(H=2, N=96, D=16, causal=True), Case(N=96, D=16, window=(20, 0))):
            try:
                peer.prepare(case)
            except Unsupported as reason:
                if "not installed" in str(reason):
                    pytest.skip(str(reason))
            else:
                assert peer.sample(0.0) > 0
                done += 1
    assert done >= 2


def test_torch_takes_16_bit_numbers_as_they_lie_in_memory() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float16", "bfloat16"):
        x = Case(H=2, N=8, D=4, dtype=dtype).arrays()[0]
        tensor = peers._to_torch(x)
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.data_ptr() == x.ctypes.data
        back = peers._from_torch(tensor, x.dtype)
        assert back.ctypes.data == x.ctypes.data
        np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("name", ["torch", "openvino"])
def test_peers_of_16_bit_numbers_compute_the_same_or_sit_out(name: str) -> None:
    with Contestant(name, 1) as peer:
        for dtype, causal, backward in itertools.product(
            ("bfloat16", "float16"), (False, True), (False, True)
        ):
            case = Case(H=2, N=96, D=16, dtype=dtype, causal=causal, backward=backward)
            try:
                peer.prepare(case)
            except Unsupported as reason:
                if "not installed" in str(reason):
                    pytest.skip(str(reason))
                assert name == "openvino"
            else:
                assert peer.sample(0.0) > 0


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(mod="gate"), "not written for it"),
        (Case(mask="open"), "not written for it"),
        (Case(mod="softcap", dtype="float64"), "float32 only"),
    ],
)
def test_flex_sits_out(case: Case, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        measure.prepare("flex", case, 1)


def test_flex_computes_the_same_or_sits_out() -> None:
    """Each case compiles for half a minute, so they are few: every argument once."""
    with Contestant("flex", 1) as peer:
        for case in (
            Case(H=2, N=200, D=16, mod="softcap", window=(20, 0)),
            Case(H=2, N=200, D=16, mod="ALiBi", causal=True),
            Case(H=2, N=200, D=16, mod="documents"),
        ):
            try:
                peer.prepare(case)
            except Unsupported as reason:
                pytest.skip(str(reason))
            assert peer.sample(0.0) > 0


def test_a_contestant_in_its_own_process() -> None:
    before = dict(os.environ)
    with Contestant("numpy", 1, {"NATTN_TEST": "1"}) as numpy:
        assert dict(os.environ) == before
        numpy.prepare(Case(H=2, N=1024, D=16))
        assert numpy.sample(0.001) > 0
        dense = 2 * 1024 * 1024 * 4
        if sys.platform == "linux":
            assert dense * 0.9 < numpy.extra_memory() < dense * 4
        with pytest.raises(Unsupported, match="GiB"):
            numpy.prepare(Case(H=1, N=65_536))
        with pytest.raises(RuntimeError, match="no case is prepared"):
            numpy.sample()
        numpy.prepare(SMALL)  # it goes on after a refusal
        numpy._process.kill()
        with pytest.raises(RuntimeError, match="its process ended"):
            numpy.sample()


def test_nattn_and_the_peak_in_one_process() -> None:
    with Contestant("nattn", 1) as ours:
        ours.prepare(SMALL)
        assert ours.sample(0.001) > 0
        peak = {dtype: max(ours.peak(dtype) for _ in range(5)) for dtype in ("float32", "float64")}
        assert peak["float32"] > peak["float64"] * 1.2
