"""The forward kernel of the CPU backend: its code, its bits and what happens around it."""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import instruction_sets
import numpy as np
import pytest
from cases import CASES, Case, check, qkv, random_bias, random_mask
from numpy.typing import NDArray
from processors import bfloat16_as

import nattn
from nattn.api.functional import _attend
from nattn.backends.cpu import jobs, launch, tiles
from nattn.backends.cpu.door import fma_peak
from nattn.vectors.dtypes import storage_dtype

Array = NDArray[Any]

# ---------------------------------------------------------------------------------------------
# The code for each instruction set
# ---------------------------------------------------------------------------------------------

x86 = pytest.mark.skipif(not instruction_sets.is_x86(), reason="x86 instruction sets")


@pytest.fixture(scope="module")
def compiled() -> Callable[[str], dict[str, Any]]:
    """Compile for an instruction set in a child, run checks there if this machine can."""
    done: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in done:
            child = subprocess.run(
                instruction_sets.command(name),
                env=instruction_sets.environment(name),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert child.returncode == 0, child.stdout + child.stderr
            done[name] = json.loads(child.stdout)
        return done[name]

    return run


@x86
def test_code_for_avx512(compiled: Callable[[str], dict[str, Any]]) -> None:
    code = compiled("avx512")
    assert code["vector_bytes"] == 64
    assert code["zmm"]
    assert code["highest register"] > 15
    assert_products(code)


@x86
def test_code_for_avx2(compiled: Callable[[str], dict[str, Any]]) -> None:
    code = compiled("avx2")
    assert code["vector_bytes"] == 32
    assert code["ymm"]
    assert not code["zmm"]
    assert code["highest register"] <= 15
    assert_products(code)


@x86
def test_code_without_fma(compiled: Callable[[str], dict[str, Any]]) -> None:
    """A product and a sum, two instructions: a library's fma would take 60 times longer."""
    code = compiled("no fma")
    assert code["vector_bytes"] == 32
    assert not code["fma"]
    assert code["fma instructions"] == 0
    assert code["calls of fma"] == 0
    assert not code["zmm"]
    assert_products(code)


@x86
def test_code_for_the_first_64_bit_processors(compiled: Callable[[str], dict[str, Any]]) -> None:
    code = compiled("sse2")
    assert code["vector_bytes"] == 16
    assert code["vex"] == code["fma instructions"] == code["calls of fma"] == 0
    assert not code["ymm"]
    assert code["highest register"] <= 15
    assert_products(code)


@x86
def test_code_for_dot_products_of_pairs(compiled: Callable[[str], dict[str, Any]]) -> None:
    """Both products forward and all five backward, in registers, with a broadcast for each word."""
    code = compiled("pairs")
    assert code["product"] == "pairs"
    for name, shapes in (("forward", [(3, 8)] * 2), ("gradients", [(3, 8)] * 2 + [(2, 8)])):
        found = []
        for loop in code[name]:
            MV, NR = next(x for x in ((3, 8), (2, 8)) if loop["products"] % (x[0] * x[1]) == 0)
            rounds = loop["products"] // (MV * NR)
            if rounds != 4:  # what is left over, or without what is hidden
                continue
            found.append((MV, NR))
            assert loop["broadcast"] == rounds * NR, loop
            assert loop["loads"] == rounds * MV, loop
            assert loop["stack"] == 0, f"spilled: {loop}"
            assert loop["length"] <= loop["products"] + loop["broadcast"] + loop["loads"] + 8, loop
        assert all(found.count(shape) >= shapes.count(shape) for shape in shapes), code[name]


def assert_products(code: dict[str, Any]) -> None:
    """Assert that both products are loops that compute in registers only."""
    _, MV, NR = code["tile"]
    products = "fma" if code["fma"] else "mul"
    most = max(loop[products] for loop in code["loops"])
    loops = [loop for loop in code["loops"] if loop[products] == most]  # not what is left over
    assert len(loops) >= 2  # keys and values
    rounds, rest = divmod(most, MV * NR)
    assert rest == 0
    for loop in loops:
        if not code["fma"]:
            assert loop["add"] == loop["mul"], loop
        if code["vector_bytes"] > 16:
            assert loop["broadcast"] == rounds * NR, loop
        assert loop["stack"] == 0, f"spilled: {loop}"


# ---------------------------------------------------------------------------------------------
# Bits
# ---------------------------------------------------------------------------------------------

BITS = [
    Case("plain", Hq=3, Nq=500, Nk=700, D=32),
    Case("causal", Hq=2, Nq=500, D=32, options={"causal": True}),
    Case(
        "everything",
        B=2,
        Hq=4,
        Hkv=2,
        Nq=300,
        Nk=400,
        D=24,
        Dv=37,
        options={
            "window_size": (150, 40),
            "mask": random_mask(0.8),
            "bias": random_bias("f4", 0.1, 0),
            "kv_lens": [400, 250],
        },
    ),
    Case("few queries", Hq=8, Hkv=2, Nq=3, Nk=3000, D=64),
]


def attend(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Return out and lse together, so that all bits are compared."""
    out, lse = nattn.attention(q, k, v, return_lse=True, backend="cpu", **options)
    return np.concatenate([out, lse[..., None]], axis=-1)


def assert_same_bits(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    assert got.tobytes() == expected.tobytes() or np.isnan(expected).any()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a test change what `plan` decides."""
    launch.plan.cache_clear()
    yield monkeypatch
    launch.plan.cache_clear()


@pytest.mark.parametrize("case", BITS, ids=lambda c: c.name)
def test_bits_whatever_the_threads_and_tasks(case: Case, sizes: pytest.MonkeyPatch) -> None:
    q, k, v, options = case.make(np.float32)
    expected = attend(q, k, v, **options)
    for count in (1, 2, 3):
        sizes.setattr(jobs, "thread_count", lambda n=count: n)
        for per_task in range(1, 9):
            sizes.setattr(tiles, "tiles_per_task", lambda *_, n=per_task, **__: n)
            launch.plan.cache_clear()
            assert_same_bits(attend(q, k, v, **options), expected)


# ---------------------------------------------------------------------------------------------
# Hidden and visible values that are not finite: the careful run
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("per_task", [1, 3, 8])
def test_careful_hidden_values_leave_no_trace(
    per_task: int, poison: float, sizes: pytest.MonkeyPatch
) -> None:
    """Bits are those of hidden zeros, in the tiles that run again and in those that do not."""
    sizes.setattr(tiles, "tiles_per_task", lambda *_, **__: per_task)
    N = 600
    q, k, v = qkv(1, 2, N, N, 16, 21)
    mask = np.random.default_rng(0).random((2, N, N)) < 0.7
    mask[..., 250:260] = False
    bias = np.where(np.arange(N) % 90 == 5, -np.inf, 0.25).astype("f4")
    for options, hidden in (
        ({"mask": mask}, slice(250, 260)),
        ({"bias": bias}, slice(5, None, 90)),
        ({"kv_lens": [411]}, slice(411, None)),
        ({"causal": True, "q_offset": -200}, slice(N - 200, None)),
        ({"window_size": (30, None), "q_offset": 100}, slice(0, 70)),
    ):
        zeros, poisoned = v.copy(), v.copy()
        zeros[:, :, hidden], poisoned[:, :, hidden] = 0, poison
        expected = attend(q, k, zeros, **options)
        assert np.isfinite(expected[..., :-1]).all()
        assert_same_bits(attend(q, k, poisoned, **options), expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("j", [0, 130, 131, 599])
def test_careful_a_visible_value_shows_where_it_is_seen(j: int, poison: float) -> None:
    """In the rows that see it and in its own column; all other bits stay."""
    N = 600
    q, k, v = qkv(1, 2, N, N, 16, 21)
    expected = attend(q, k, v, causal=True)
    v[0, 1, j, 7] = poison
    got = attend(q, k, v, causal=True)
    touched = np.zeros(got.shape, bool)
    touched[0, 1, j:, 7] = True
    assert_same_bits(got[~touched], expected[~touched])
    assert not np.isfinite(got[touched]).any()


def test_careful_a_hidden_value_beside_a_visible_one() -> None:
    """A row that sees Inf stays Inf; NaN, which it does not see, does not get in."""
    q, k, v = qkv(1, 1, 200, 200, 16)
    v[0, 0, 50, 3], v[0, 0, 60, 3] = np.inf, np.nan
    mask = np.ones((200, 200), bool)
    mask[::2, 60] = mask[::3, 50] = False
    got = attend(q, k, v, mask=mask)[0, 0, :, 3]
    sees_inf, sees_nan = mask[:, 50], mask[:, 60]
    assert np.isnan(got[sees_nan]).all()
    assert np.all(got[sees_inf & ~sees_nan] == np.inf)
    assert np.isfinite(got[~sees_inf & ~sees_nan]).all()


# ---------------------------------------------------------------------------------------------
# Few queries
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("Hkv", [1, 2])
@pytest.mark.parametrize("Nq", range(1, 17))
def test_few_queries_of_a_group_share_the_lanes(Nq: int, Hkv: int) -> None:
    case = Case(
        "few",
        B=2,
        Hq=6,
        Hkv=Hkv,
        Nq=Nq,
        Nk=150,
        D=24,
        Dv=20,
        options={
            "causal": True,
            "q_offset": [100, 149 - Nq],
            "window_size": (110, -1),
            "mask": random_mask(0.7),
            "bias": random_bias("f4", 0.1),
            "q_lens": [Nq, max(1, Nq - 2)],
            "kv_lens": [150, 120],
        },
    )
    q, k, v, options = case.make(np.float32)
    check("cpu", q, k, v, **options)
    check("cpu", q, k, v)


# ---------------------------------------------------------------------------------------------
# Memory: nothing beside an array is read or written
# ---------------------------------------------------------------------------------------------


def guarded(x: Array, at_end: bool) -> Array:
    """Copy an array to memory with a page before and one behind that may not be touched."""
    page = mmap.PAGESIZE
    middle = -(-max(x.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, middle + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (start, start + page + middle):
        assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
    offset = page + (middle - x.nbytes if at_end else 0)
    copy = np.frombuffer(memory, x.dtype, x.size, offset).reshape(x.shape)
    copy[...] = x
    return copy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fault must end a child, not the tests")
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "bfloat16", "pairs"])
def test_nothing_beside_the_arrays_is_touched(dtype: str, at_end: bool) -> None:
    with bfloat16_as("emulated" if dtype == "pairs" else "float32"):
        touch_nothing(storage_dtype("bfloat16" if dtype == "pairs" else dtype), at_end)


def touch_nothing(dtype: np.dtype, at_end: bool) -> None:
    shapes = [(1, 1, 1, 1), (5, 3, 1, 2), (25, 131, 33, 7), (100, 195, 65, 30), (9, 193, 8, 67)]
    nattn.attention(*qkv(1, 1, 2, 2, 8, dtype=dtype))  # compiled before the fork
    with warnings.catch_warnings():  # of threads that the child does not have: it needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        for Nq, Nk, D, Dv in shapes:
            q, k, _ = qkv(1, 2, Nq, Nk, D, dtype=dtype)
            v = qkv(1, 2, Nq, Nk, Dv, dtype=dtype)[2]
            mask = np.random.default_rng(0).random((Nq, Nk)) < 0.7
            bias = np.zeros((2, 1, Nk), dtype)
            arrays = [
                guarded(x, at_end)
                for x in (q, k, v, mask, bias, np.empty_like(q, shape=(1, 2, Nq, Dv)))
            ]
            nattn.attention(*arrays[:3], mask=arrays[3], bias=arrays[4], out=arrays[5])
            nattn.attention(*arrays[:3], causal=True, window_size=(40, 3), out=arrays[5])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_few_queries_fill_the_lanes() -> None:
    """Decoding with many heads on one key head takes one tile, not one for each, nor too wide."""
    narrow, wide = (tiles.choose_tile("float32", rows).lanes for rows in (1, 1 << 20))
    assert narrow < wide
    for rows in (2, narrow, narrow + 1, wide):
        one = launch.plan("float32", 1, rows, rows, 1, 100, 64, 64, 1)
        assert one.n_tasks == 1
        assert one.tile.lanes == (narrow if rows <= narrow else wide)


# ---------------------------------------------------------------------------------------------
# Progress, exceptions, calls within calls
# ---------------------------------------------------------------------------------------------


@functools.cache
def long() -> int:
    """Return how many queries and keys keep this machine busy for some tenths of a second."""
    return int((0.35 * fma_peak() * 1e9 / (4 * 2 * 64)) ** 0.5)


def with_progress(progress: Callable[[float], object]) -> Array:
    q, k, v = qkv(1, 2, long(), long(), 64)
    out = np.full_like(q, np.nan)
    _attend(q, k, v, backend="cpu", out=out, progress=progress)
    return out


def test_progress_grows_to_one() -> None:
    seen: list[float] = []
    with_progress(seen.append)
    assert len(seen) >= 2
    assert all(0 <= x <= 1 for x in seen)
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert seen[0] < 1


def test_progress_that_raises_stops_the_workers() -> None:
    class Stopped(Exception):
        pass

    def stop(done: float) -> None:
        raise Stopped

    q, k, v = qkv(1, 2, 3 * long(), 3 * long(), 64)
    out = np.full_like(q, np.nan)
    with pytest.raises(Stopped):
        _attend(q, k, v, backend="cpu", out=out, progress=stop)
    assert np.isnan(out).any()  # it did stop
    before = out.copy()
    time.sleep(0.2)
    assert out.tobytes() == before.tobytes()  # and nobody writes afterwards
    # The next call is none the worse.
    check("cpu", *qkv(1, 2, 200, 300, 32))


def test_progress_may_call_attention() -> None:
    """A call within a call has scratch of its own, and so has the next one."""
    inner = qkv(1, 2, 150, 200, 32, seed=7)
    large = qkv(1, 4, 700, 700, 64, seed=8)
    expected = attend(*inner, causal=True), attend(*large, causal=True)
    results = []

    def call(done: float) -> None:
        results.append((attend(*inner, causal=True), attend(*large, causal=True)))

    outer = with_progress(call)
    assert len(results) >= 2
    for got in results:
        for x, y in zip(got, expected, strict=True):
            assert_same_bits(x, y)
    assert_same_bits(outer, with_progress(lambda done: None))
    for arrays, y in zip((inner, large), expected, strict=True):
        assert_same_bits(attend(*arrays, causal=True), y)


def test_calls_of_all_sizes_in_turn_from_several_threads() -> None:
    """Each thread keeps scratch; no size inherits what another left there."""
    names = ["plain", "one query", "odd sizes", "D=512", "few queries of a group", "lengths"]
    inputs = [c.make(np.float32) for c in CASES if c.name in names]
    assert len(inputs) == len(names)
    expected = [attend(*x[:3], **x[3]) for x in inputs]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in np.random.default_rng(seed).integers(0, len(inputs), 40):
                q, k, v, options = inputs[n]
                assert_same_bits(attend(q, k, v, **options), expected[n])
        except BaseException as failure:  # raised again below
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
