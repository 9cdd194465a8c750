"""The code of each intrinsic of cuda/target.py, compiled for the CPU, against its twin.

What a kernel does with numbers and memory is LLVM code on a GPU and plain Python in the simulator.
That code means the same on any processor, but for the float32 `exp2`, an instruction of the GPU's:
so here it runs on this one, over as many bit patterns as there are.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

import numba
from numba.core import config
from numba.extending import intrinsic

from nattn.backends.cuda import target
from nattn.backends.error_budget import UNIT

Array = NDArray[Any]

if target.SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)


def as_simulated() -> ModuleType:
    """Load the module once more as it is in the simulator: there each intrinsic is its twin."""
    name = "nattn.backends.cuda.simulated_target"
    spec = importlib.util.spec_from_file_location(name, target.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(config, "ENABLE_CUDASIM", 1):
        spec.loader.exec_module(module)
    assert module.SIMULATED
    return module


TWINS = as_simulated()
STORAGE = sorted(target.STORAGE)
N = 1 << 16


def on_cpu(of_gpu: Any) -> Any:
    """Return the intrinsic for the CPU that has the same code."""
    return intrinsic(of_gpu._defn)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = numba.njit(error_model="numpy")(function)
    return made


def computed(storage: str) -> Any:
    """Return the NumPy type in which a stored float is computed with."""
    return np.float64 if storage == "float64" else np.float32


def stored_bits(storage: str) -> Array:
    """Return bit patterns: all of the 16-bit types, else random ones and the special numbers."""
    size = target.STORAGE[storage]
    if size == 2:
        return np.arange(N, dtype=np.uint16)
    rng = np.random.default_rng(0)
    number, unsigned = np.dtype(storage), np.dtype(f"u{size}")
    bits = rng.integers(0, 1 << 63, N, np.uint64).astype(unsigned)
    bits[: N // 2] ^= unsigned.type(1 << (8 * size - 1))
    info = np.finfo(number)
    ends = [0.0, info.smallest_subnormal, info.tiny, 1.0, info.max, np.inf, np.nan]
    special = np.array([*ends, *(-x for x in ends)], number)
    bits[: special.size] = special.view(unsigned)
    return bits


def numbers_near(storage: str) -> Array:
    """Return floats around all that the storage has: themselves, ties and what is beside them."""
    bits = stored_bits(storage)
    if storage == "float64":
        return bits.view(np.float64)
    if storage == "float32":
        return bits.view(np.float32)
    rng = np.random.default_rng(1)
    if storage == "bfloat16":
        low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
        wide = [(bits.astype(np.uint32) << 16) | np.uint32(x) for x in low]
        return np.concatenate([*wide, rng.integers(0, 1 << 32, N, np.uint32)]).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = bits.view(np.float16).astype(np.float32)
        up = np.nextafter(bits.view(np.float16), np.float16(np.inf)).astype(np.float32)
        up[np.isinf(up) & np.isfinite(exact)] = 2.0**16  # what would come after the largest
        tie = exact + (up - exact) / np.float32(2)
        around = [exact, tie]
        around += [
            np.nextafter(x, np.float32(to)) for x in (exact, tie) for to in (-np.inf, np.inf)
        ]
    tiny = rng.uniform(-(2.0**-23), 2.0**-23, N).astype(np.float32)  # between subnormals
    return np.concatenate([*around, tiny, rng.integers(0, 1 << 32, N, np.uint32).view(np.float32)])


def assert_same(got: Array, expected: Array) -> None:
    """Assert equality to the last bit, but for the payload of what is not a number."""
    assert got.dtype == expected.dtype
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    bits = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(bits)[number], expected.view(bits)[number])


def meaning(storage: str, bits: Array) -> Array:
    """Return the numbers that bits stand for, by NumPy or by definition."""
    if storage == "bfloat16":
        wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
        return wide
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return bits.view(storage).astype(computed(storage))


@pytest.mark.parametrize("storage", STORAGE)
def test_load(storage: str) -> None:
    bits, size, read = stored_bits(storage), target.STORAGE[storage], on_cpu(target.load(storage))

    @compiled
    def run(address, out):  # type: ignore[no-untyped-def]
        for n in range(out.size):
            out[n] = read(address + n * size)

    out = np.empty(bits.size, computed(storage))
    run(bits.ctypes.data, out)
    assert_same(out, meaning(storage, bits))
    twin = TWINS.load(storage)
    found = [twin(bits.ctypes.data + n * size) for n in range(bits.size)]
    assert {type(x) for x in found} == {computed(storage)}
    assert_same(np.array(found), out)


@pytest.mark.parametrize("storage", STORAGE)
def test_load4(storage: str) -> None:
    bits, size = stored_bits(storage), target.STORAGE[storage]
    room = np.zeros(bits.nbytes + 16, np.uint8)  # aligned as a GPU's memory is
    start = -room.ctypes.data % 16
    room[start : start + bits.nbytes] = bits.view(np.uint8)
    read4, address = on_cpu(target.load4(storage)), room.ctypes.data + start

    @compiled
    def run(address, out):  # type: ignore[no-untyped-def]
        for n in range(out.size // 4):
            four = read4(address + 4 * n * size)
            for m in range(4):
                out[4 * n + m] = four[m]

    out = np.empty(bits.size, computed(storage))
    run(address, out)
    assert_same(out, meaning(storage, bits))
    twin = TWINS.load4(storage)
    found = np.concatenate([twin(address + n * size) for n in range(0, bits.size, 4)])
    assert_same(found, out)


@pytest.mark.parametrize("storage", STORAGE)
def test_store(storage: str) -> None:
    x, size, write = numbers_near(storage), target.STORAGE[storage], on_cpu(target.store(storage))

    @compiled
    def run(address, x):  # type: ignore[no-untyped-def]
        for n in range(x.size):
            write(address + n * size, x[n])

    dtype = np.dtype(f"u{size}")
    got, twins = np.zeros(x.size + 1, dtype), np.zeros(x.size + 1, dtype)
    run(got.ctypes.data, x)
    twin, address = TWINS.store(storage), twins.ctypes.data
    for n, y in enumerate(x):
        twin(address + n * size, y)
    assert got[-1] == twins[-1] == 0  # nothing is written beyond
    assert_same(meaning(storage, got), meaning(storage, twins))
    other = pytest.importorskip("ml_dtypes").bfloat16 if storage == "bfloat16" else storage
    with np.errstate(all="ignore"):
        expected = x.astype(other).astype(x.dtype)
    assert_same(meaning(storage, got[:-1]), expected)


def test_all_numbers_of_16_bits_return_to_their_bits() -> None:
    for storage in ("float16", "bfloat16"):
        x, write = meaning(storage, stored_bits(storage)), TWINS.store(storage)
        back = np.zeros(N, np.uint16)
        for n, y in enumerate(x):
            write(back.ctypes.data + 2 * n, y)
        number = ~np.isnan(x)
        np.testing.assert_array_equal(back[number], stored_bits(storage)[number])
        assert np.isnan(meaning(storage, back[~number])).all()
        assert UNIT[storage] == float((x[x > 1].min() - 1) / 2)


@pytest.mark.parametrize("of", [np.float32, np.float64, np.int64])
def test_store_takes_other_numbers(of: Any) -> None:
    # scalars of a kernel are float64 and int64; they are rounded to what is computed with first
    write = on_cpu(target.store("float32"))

    @compiled
    def run(address, x):  # type: ignore[no-untyped-def]
        write(address, x)

    for x in (of(3), of(0.1), of(-7.25), of(2**30 + 1)):
        out = np.zeros(2, np.float32)
        run(out.ctypes.data, x)
        TWINS.store("float32")(out.ctypes.data + 4, x)
        assert out.tolist() == [np.float32(x)] * 2


@pytest.mark.parametrize("name", ["read_int64", "read_uint8"])
def test_reading_integers(name: str) -> None:
    dtype = np.dtype(name.removeprefix("read_"))
    ends = [0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min]
    rng = np.random.default_rng(0)
    x = rng.integers(ends[3], ends[2], 1000, dtype, endpoint=True)
    x[:4] = ends
    read, size = on_cpu(getattr(target, name)), dtype.itemsize

    @compiled
    def run(address, out):  # type: ignore[no-untyped-def]
        for n in range(out.size):
            out[n] = read(address + n * size)

    out = np.zeros(x.size, np.int64)
    run(x.ctypes.data, out)
    np.testing.assert_array_equal(out, x)
    twin = getattr(TWINS, name)
    found = [twin(x.ctypes.data + n * size) for n in range(x.size)]
    assert {type(y) for y in found} == {np.int64}
    np.testing.assert_array_equal(found, x)


def test_writing_integers() -> None:
    write = on_cpu(target.write_int64)

    @compiled
    def run(address, x):  # type: ignore[no-untyped-def]
        for n in range(x.size):
            write(address + 8 * n, x[n])

    for dtype in (np.int64, np.int32, np.bool_):
        x = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 100).astype(dtype)
        out = np.zeros((2, 101), np.int64)
        run(out[0].ctypes.data, x)
        for n, y in enumerate(x):
            TWINS.write_int64(out[1].ctypes.data + 8 * n, y)
        np.testing.assert_array_equal(out, np.broadcast_to([*x.astype(np.int64), 0], (2, 101)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_copy_group(count: int, dtype: Any) -> None:
    copy = on_cpu(target.copy_group(count))

    @compiled
    def run(to, n, shared, at):  # type: ignore[no-untyped-def]
        copy(to, n, shared, at)

    room = np.arange(36, dtype=dtype)
    start = -room.ctypes.data % 16 // room.itemsize
    shared = room[start : start + 32]
    for at in range(0, 32, count):
        for n in range(8 - count + 1):
            expected = np.full(8, -1, dtype)
            expected[n : n + count] = shared[at : at + count]
            got, twins = np.full(8, -1, dtype), np.full(8, -1, dtype)
            run(got, n, shared, at)
            TWINS.copy_group(count)(twins, n, shared, at)
            np.testing.assert_array_equal(got, expected)
            np.testing.assert_array_equal(twins, expected)


@pytest.mark.parametrize("storage", ["float32", "float64"])
def test_is_hidden(storage: str) -> None:
    hidden, x = on_cpu(target.is_hidden), stored_bits(storage).view(storage)

    @compiled
    def run(x, out):  # type: ignore[no-untyped-def]
        for n in range(x.size):
            out[n] = hidden(x[n])

    out = np.zeros(x.size, bool)
    run(x, out)
    np.testing.assert_array_equal(out, (x == 0) & np.signbit(x))
    assert out.any()
    np.testing.assert_array_equal([TWINS.is_hidden(y) for y in x], out)


def test_exp2() -> None:
    power, rng = on_cpu(target.exp2("float64")), np.random.default_rng(0)

    @compiled
    def run(x, out):  # type: ignore[no-untyped-def]
        for n in range(x.size):
            out[n] = power(x[n])

    ends = [0.0, -0.0, -1.0, -1022.0, -1021.5, -1023.0, -2000.0, np.finfo("f8").min, -np.inf]
    whole = -np.arange(1100.0)
    small = [rng.uniform(-limit, 0.0, N // 4) for limit in (1e-300, 1.0, 1100.0)]
    x = np.concatenate([ends, whole, np.nextafter(whole, -np.inf), *small])
    got = np.empty(x.size)
    run(x, got)
    twin = TWINS.exp2("float64")
    expected = np.array([twin(y) for y in x])
    # each within two units in the last place; at the smallest normal number one may say 0
    edge = np.abs(x + 1022.0) < 1e-12
    far = np.abs(got - expected) > 4 * np.spacing(expected)
    assert not far[~edge].any()
    assert np.all((got[edge] == 0.0) | ~far[edge])
    assert np.all(got[x < -1022.5] == 0.0)
    assert got[0] == got[1] == 1.0
    nan = np.empty(1)
    run(np.array([np.nan]), nan)
    assert np.isnan(nan[0])
    assert np.isnan(twin(np.float64(np.nan)))
    twin = TWINS.exp2("float32")
    assert [type(twin(np.float32(y))) for y in (0.0, -3.5)] == [np.float32] * 2
    assert twin(np.float32(-126.0)) == np.finfo("f4").tiny
    assert twin(np.float32(-126.5)) == twin(np.float32(-np.inf)) == 0.0
