"""Making lanes; memory, scattered or not; the register tile; what only kernels call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
from lane_tools import Array, jit, tile_of_each_kind
from numba import types

from nattn.backends.cpu import tiles
from nattn.vectors import lanes
from nattn.vectors.lanes import Tile


@tile_of_each_kind
def test_what_only_kernels_call(tile: Tile) -> None:
    """fma rounds once where the processor has the instruction, and twice where it has not."""

    def run(x: int, y: int, z: int, out: int) -> None:
        a, b, c = lanes.load(tile, x), lanes.load(tile, y), lanes.load(tile, z)
        lanes.store(out, lanes.fma(a, b, c))
        lanes.store(out + tile.W * tile.itemsize, lanes.fma(a, 2, 0.5))
        lanes.store(out + 2 * tile.W * tile.itemsize, lanes.exp2_nonpositive(c))

    eps = np.finfo(tile.dtype).eps
    x, y, z = (np.full(tile.W, v, tile.dtype) for v in (1 + eps, 1 - eps, -1))
    out = np.empty((3, tile.W), tile.dtype)
    jit(run)(*(a.ctypes.data for a in (x, y, z, out)))
    expected = -eps * eps if tiles.cpu().fma else (x * y + z)[0]
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[1], x * 2 + out.dtype.type(0.5))
    np.testing.assert_array_equal(out[2], 0.5)


def at_odd_addresses(rows: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return bytes in which the rows lie scattered and unaligned, and their offsets."""
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    room = data.shape[1] + 3
    offsets = rng.permutation(len(rows)) * room + 1
    memory = np.full(len(rows) * room + 1, 0xFF, np.uint8)
    for offset, row in zip(offsets, data, strict=True):
        memory[offset : offset + len(row)] = row
    return memory, offsets.astype(np.int64)


@tile_of_each_kind
def test_splat_read_and_write(tile: Tile) -> None:
    W, size = tile.W, tile.itemsize

    def run(source: int, out: int, integers: int, number: float, count: int, flag: bool) -> None:
        lanes.store(out, lanes.splat(tile, number))
        lanes.store(out + W * size, lanes.splat(tile, count))
        lanes.store(out + 2 * W * size, lanes.splat(tile, flag))
        lanes.store(out + 3 * W * size, lanes.load(tile, source))
        for lane in range(W):
            x = lanes.read(tile, source + lane * size)
            lanes.write(tile, out + (4 * W + lane) * size, x + x)
        lanes.write(tile, out + 5 * W * size, count)
        for lane in range(W):
            lanes.write_int32(integers + 4 * lane, np.int32(count + lane))
        lanes.store(integers + W * 4, lanes.load_int32(tile, integers))
        lanes.write_int32(integers + W * 8, np.int32(-7))
        lanes.write_int64(integers + W * 8 + 4, lanes.read_int64(integers) + 1)
        lanes.write_int8(integers + W * 8 + 12, lanes.read_int8(integers + W * 8 + 3))
        lanes.store(out + 6 * W * size, lanes.load_old(tile, source))

    x = np.arange(1, W + 1).astype(tile.dtype) / 3
    source = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:]  # unaligned
    out, integers = np.zeros(7 * W, tile.dtype), np.zeros(2 * W + 4, np.int32)
    jit(run)(source.ctypes.data, out.ctypes.data, integers.ctypes.data, 0.1, -5, True)
    expected = [0.1] * W + [-5] * W + [1] * W + [*x] + [*(x + x)] + [-5] + [0] * (W - 1) + [*x]
    np.testing.assert_array_equal(out, np.array(expected, tile.dtype))
    steps = np.arange(-5, W - 5)
    np.testing.assert_array_equal(integers[: 2 * W], np.tile(steps, 2))
    assert integers[2 * W] == -7
    first = int(steps[:2].astype("i4").view("i8")[0])
    assert integers[2 * W + 1 :][:2].copy().view("i8")[0] == first + 1
    assert integers[2 * W + 3 :].view("i1").tolist() == [-1, 0, 0, 0]  # the top byte of -7


STORED = {
    "float16": np.arange(1 << 16).astype("u2").view("f2"),  # all of them
    "float32": np.array([0, -0.0, 1 / 3, 1e-42, -1e38, math.inf, -math.inf, math.nan], "f4"),
    "float64": np.array([0, -0.0, 1 / 3, 1e-42, -1e300, math.inf, 5e-324, math.nan], "f8"),
    "bool": np.array([True, False, False, True]),
}


def as_read(x: Array, dtype: str) -> Array:
    """Return what stored numbers become: True is 0, False -inf."""
    # Among all halves are signalling NaNs, whose cast warns where the processor notes them: on ARM.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(x, 0.0, -np.inf).astype(dtype) if x.dtype == bool else x.astype(dtype)


def assert_same(got: Array, expected: Array) -> None:
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


@tile_of_each_kind
def test_elements_from_anywhere(tile: Tile) -> None:
    """load_lanes, load_splat and gather_transposed, for everything that can be stored."""
    W, size = tile.W, tile.itemsize

    def one(storage: str) -> Callable[..., None]:
        def run(n: int, base: int, offsets: int, out: int, spread: int) -> None:
            for i in range(0, n, W):
                x = lanes.load_lanes(tile, storage, base, offsets + i * 8)
                lanes.store(out + i * size, x)
            first = base + lanes.read_int64(offsets)
            lanes.store(spread, lanes.load_splat(tile, storage, first))

        return run

    def many(storage: str) -> Callable[..., None]:
        def run(base: int, offsets: int, out: int) -> None:
            lanes.gather_transposed(tile, storage, base, offsets, out, 2 * W * size)

        return run

    def own(base: int, offsets: int, out: int) -> None:
        lanes.gather_words(tile, base, offsets, out, 2 * W * size)

    rng = np.random.default_rng(0)
    for storage, values in STORED.items():
        x = np.resize(values, max(len(values), 4 * W))
        memory, offsets = at_odd_addresses(x, rng)
        out, spread = np.empty(len(x), tile.dtype), np.empty(W, tile.dtype)
        addresses = [a.ctypes.data for a in (memory, offsets, out, spread)]
        jit(one(storage))(len(x), *addresses)
        assert_same(out, as_read(x, tile.dtype))
        assert_same(spread, np.full(W, as_read(x[:1], tile.dtype)))

        rows = rng.permutation(np.resize(values[:: max(1, len(values) >> 7)], W * W)).reshape(W, W)
        memory, offsets = at_odd_addresses(rows, rng)
        functions = [many(storage)] + [own] * (storage == tile.dtype)
        for function in functions:
            columns = np.full((W, 2 * W), 7, tile.dtype)
            jit(function)(memory.ctypes.data, offsets.ctypes.data, columns.ctypes.data)
            assert_same(columns[:, :W], as_read(rows, tile.dtype).T)
            assert np.all(columns[:, W:] == 7)


@tile_of_each_kind
def test_scatter_transposed(tile: Tile) -> None:
    W, size = tile.W, tile.itemsize

    def run(source: int, base: int, offsets: int, count: int) -> None:
        lanes.scatter_transposed(tile, source, 2 * W * size, base, offsets, count)

    scatter = jit(run)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((W, 2 * W)).astype(tile.dtype)
    for count in (0, 1, W - 1, W):
        expected, offsets = at_odd_addresses(vectors[:, :W].T, rng)
        for offset in offsets[count:]:
            expected[offset : offset + W * size] = 0xFF
        memory = np.full_like(expected, 0xFF)
        addresses = [a.ctypes.data for a in (vectors, memory, offsets)]
        scatter(*addresses, count)
        np.testing.assert_array_equal(memory, expected)


@tile_of_each_kind
def test_register_tile(tile: Tile) -> None:
    """The outer products and what is done with their sums; small integers, so all is exact."""
    W, MV, NR, size = tile.W, tile.MV, tile.NR, tile.itemsize
    row = tile.lanes * size

    def run(depth: int, a: int, x: int, stride: int, alpha: int, out: int, top: int) -> None:
        acc, seen = lanes.zeros(tile), lanes.zeros(tile)
        for n in range(depth):
            acc = lanes.add_outer(tile, acc, a + n * row, x + n * size, stride)
            seen = lanes.add_outer_visible(tile, seen, a + n * row, x + n * size, stride)
        lanes.store_tile(tile, acc, out, top, 1.0)
        lanes.store_tile(tile, seen, out + NR * row, top + row, 1.0)
        lanes.rescale_add_tile(tile, acc, out + 2 * NR * row, alpha)

    depth, pitch = 5, 9
    rng = np.random.default_rng(0)
    a = rng.integers(0, 9, (depth, MV * W)).astype(tile.dtype)
    x = rng.integers(-9, 9, (NR, pitch)).astype(tile.dtype)
    alpha = rng.integers(-3, 4, MV * W).astype(tile.dtype)
    out = rng.integers(-9, 9, (3, NR, MV * W)).astype(tile.dtype)
    before = out[2].copy()
    top = np.full((2, MV * W), -5, tile.dtype)
    # The last column of x is NaN, and all lanes hide it; some hide another one.
    hidden = np.full((depth, MV * W), False)
    hidden[2, ::3] = hidden[4] = True
    a[hidden] = -0.0
    x[:, 4] = np.nan
    function = jit(run)
    ad = [y.ctypes.data for y in (a, x, alpha, out, top)]
    addresses = *ad[:2], pitch * size, *ad[2:]
    function(depth, *addresses)
    np.testing.assert_array_equal(out[1], x[:, :4] @ a[:4])
    assert np.isnan(out[0]).all()
    assert np.isnan(out[2]).all()
    np.testing.assert_array_equal(top[0], -5)  # NaN is passed over
    np.testing.assert_array_equal(top[1], np.maximum(out[1].max(axis=0), -5))
    x[:, 4] = 7
    out[2] = before
    function(depth, *addresses)
    np.testing.assert_array_equal(out[0], x[:, :depth] @ a)
    np.testing.assert_array_equal(out[1], out[0])
    np.testing.assert_array_equal(out[2], before * alpha + out[0])
    np.testing.assert_array_equal(top[0], np.maximum(out[0].max(axis=0), -5))


@tile_of_each_kind
@pytest.mark.parametrize("NR", [4, 8, 16])
def test_store_panels(tile: Tile, NR: int) -> None:
    tile = Tile(tile.dtype, tile.W, 1, NR)
    W, size = tile.W, tile.itemsize

    def run(out: int, x: int) -> None:
        lanes.store_panels(tile, out, lanes.load(tile, x), 100 * size)

    x = np.arange(1, W + 1).astype(tile.dtype)
    expected = np.zeros(400, tile.dtype)
    for n, value in enumerate(x):
        expected[n // NR * 100 + n % NR] = value
    out = np.zeros_like(expected)
    jit(run)(out.ctypes.data, x.ctypes.data)
    np.testing.assert_array_equal(out, expected)


def test_atomic_add_gives_each_number_once() -> None:
    def run(n: int, counter: int, out: Any) -> None:
        for i in range(n):
            out[i] = lanes.atomic_add(counter, 1)

    n, threads = 20_000, 4
    counter, out = np.array([5]), np.empty((threads, n), np.int64)
    work = numba.njit(types.void(types.int64, types.int64, types.int64[::1]), nogil=True)(run)
    start = threading.Barrier(threads)

    def one(slot: int) -> None:
        start.wait()
        work(n, counter.ctypes.data, out[slot])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(threads)))
    np.testing.assert_array_equal(np.sort(out, axis=None), np.arange(5, 5 + n * threads))
    assert np.all(np.diff(out, axis=1) > 0)
    assert counter[0] == 5 + n * threads


def test_atomic_or_loses_no_bit() -> None:
    def run(first: int, word: int, out: Any) -> None:
        for n in range(first, 64, 4):
            out[n] = lanes.atomic_or(word, 1 << n)

    word, out = np.zeros(1, np.int64), np.zeros(64, np.int64)
    work = numba.njit(types.void(types.int64, types.int64, types.int64[::1]), nogil=True)(run)
    start = threading.Barrier(4)

    def one(first: int) -> None:
        start.wait()
        work(first, word.ctypes.data, out)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    assert word[0] == -1
    # Every bit but the last was seen by those that came after it.
    assert sorted(int(x).bit_count() for x in out.view(np.uint64)) == list(range(64))


def test_tile_attributes_are_constants() -> None:
    tile = Tile("float64", 4, 3, 2)

    def run() -> tuple[int, int, int, int, int]:
        return tile.W, tile.MV, tile.NR, tile.lanes, tile.itemsize

    assert jit(run)() == run() == (4, 3, 2, 12, 8)


def test_call_tile_function() -> None:
    def digits(scores: int, deriv: int, context: int, params: int) -> int:
        return 1000 * scores + 100 * deriv + 10 * context + params

    compiled = numba.cfunc(types.int64(*[types.int64] * 4))(digits)

    def run(address: int) -> int:
        return lanes.call_tile_function(address, 1, 2, 3, 4)  # type: ignore[no-any-return]

    assert jit(run)(compiled.address) == 1234
