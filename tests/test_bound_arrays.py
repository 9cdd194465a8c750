"""What users' functions are bound to and called with, on lanes: against NumPy, lane by lane."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from lane_tools import (
    KINDS,
    Array,
    compile_only,
    dtype_of_each_kind,
    in_turn,
    jit,
    load_as,
    store_each,
)

from nattn.vectors import lanes
from nattn.vectors.lanes import Layout, Tile

STORED_AS = ("bool", *(f"{u}int{n}" for n in (8, 16, 32, 64) for u in ("", "u")))
STORED_AS += ("float16", "float32", "float64")


def becomes(name: str, dtype: str) -> str:
    """Return the kind of the lanes that an element of an array gives."""
    if name == "bool":
        return name
    if name.startswith("float"):
        return dtype
    return "int64" if name in ("uint32", "int64", "uint64") else "int32"


def words_of(*values: Any) -> Array:
    """Return what is bound as words, in the way that `Layout` describes."""
    words: list[int] = []
    for x in values:
        if isinstance(x, np.ndarray):
            words += [x.ctypes.data, *x.shape, *x.strides]
        else:
            words += np.array([x], "f8" if isinstance(x, float) else "i8").view("i8").tolist()
    return np.array(words, np.int64)


class Reader:
    """An array as lanes read it, on NumPy."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = array.shape
        self.outside: Any = False

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Array:
        inside = []
        self.outside = False
        for x, n in zip(index if isinstance(index, tuple) else (index,), self.shape, strict=True):
            x = np.asarray(x)
            miss = (x < -n) | (x >= n)
            self.outside = self.outside | miss
            inside.append(np.where(miss, 0, np.where(x < 0, x + n, x)))
        shape = np.broadcast_shapes(*(x.shape for x in inside))
        found = self.array[tuple(inside)] if self.array.size else np.zeros((), self.array.dtype)
        if found.dtype.kind in "iu":
            found = found.astype(np.int64)
        return np.broadcast_to(found, shape)


def reading(tile: Tile, layout: Layout, picks: list[Callable[..., Any]]) -> Callable[..., None]:
    """Compile functions of (short, long, number, *bound) into one.

    The indices are W narrow ones, W of 64 bits, and a narrow one for all lanes. For each function
    are stored what it returned and the lanes that were noted.
    """
    pitch = 8 + 8 * tile.W

    def one(pick: Any) -> Callable[..., int]:
        function = pick if hasattr(pick, "py_func") else jit(pick)

        def run(args: Any, out: int) -> int:
            params, short, long, number = args
            indices = (
                load_as(tile, "narrow", short),
                load_as(tile, "int64", long),
                load_as(tile, "one narrow", number),
            )
            outside = lanes.new_outside(tile)
            lanes.clear_outside(tile, outside)
            arguments = lanes.call_arguments(tile, layout, indices, params, outside)
            store_each(out, pitch, (function(*arguments),))
            lanes.write_int64(out + pitch, lanes.outside_bits(tile, outside))
            return out + 2 * pitch

        return jit(run)

    all_of_them = in_turn([one(pick) for pick in picks])
    return jit(
        lambda params, short, long, number, out: all_of_them((params, short, long, number), out)
    )


def check_reading(
    tile: Tile,
    layout: Layout,
    picks: list[Callable[..., Any]],
    run: Callable[..., None],
    bound: list[Any],
    index: tuple[Array, Array, Array],
) -> None:
    """Run what `reading` made for one vector of indices, and compare it with NumPy."""
    W, pitch = tile.W, 8 + 8 * tile.W
    short, long, number = (np.ascontiguousarray(x, np.int64) for x in index)
    out = np.zeros((2 * len(picks) + 1, pitch), np.uint8)
    words = np.concatenate([np.full(layout.first, -1), words_of(*bound)])
    run(*(x.ctypes.data for x in (words, short, long, number, out)))
    for n, pick in enumerate(picks):
        readers = [Reader(x) if isinstance(x, np.ndarray) else x for x in bound]
        with np.errstate(over="ignore"):
            expected = np.asarray(pick(short, long, number, *readers))
        kind, width = out[2 * n, :8].view(np.int32).tolist()
        name = KINDS[kind]
        got = out[2 * n, 8 : 8 + width * np.dtype(name).itemsize].view(name)
        assert width == (1 if expected.shape in ((), (1,)) else W), n
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, np.broadcast_to(expected, width).astype(name))
        noted = out[2 * n + 1, :8].view(np.int64)[0]
        missed = [x.outside for x in readers if isinstance(x, Reader)]
        lanes_outside = np.broadcast_to(functools.reduce(np.logical_or, missed), W)
        assert noted == sum(1 << int(lane) for lane in np.flatnonzero(lanes_outside)), (n, index)


def one_axis(name: str, n: int, step: int, odd: int = 0) -> Array:
    """Return an array with that step between its elements, and others before and behind it."""
    size = np.dtype(name).itemsize
    count = 2 + n * max(abs(step), 1)
    if name == "bool":
        x = np.arange(count) % 3 == 0
    elif name.startswith("float"):
        x = np.linspace(-1, 1, count).astype(name)
    else:
        x = np.random.default_rng(n).integers(0, 256, size * count, np.uint8).view(name)
    memory = np.frombuffer(b"\xff" * odd + x.tobytes(), np.uint8)[odd:]
    array = memory.view(name)[1:-1]
    if step == 0:
        return np.broadcast_to(array[:1], (n,))
    return array[::step][:n]


def indices_of(n: int, W: int) -> list[tuple[Array, Array, Array]]:
    """Return vectors of indices around the ends of an axis of n, and beyond all of them."""
    far = lanes.INDEX_BOUND
    ends = [0, n - 1, -1, -n, n, -n - 1, 2 * n, -3 * n, far, -far, far - 1]
    short = np.array([*ends, *range(-n - 3, n + 3)])
    most = np.iinfo(np.int64)
    long = np.where(np.abs(short) == far, np.where(short > 0, most.max, most.min), short)
    short, long = (np.resize(x, -(-len(x) // W) * W) for x in (short, long))
    number = itertools.cycle([0, -1, n, n // 2, -n - 1, far, -far])
    return [
        (short[at : at + W], long[at : at + W], np.array([next(number)]))
        for at in range(0, len(short), W)
    ]


@pytest.mark.parametrize(("dtype", "W"), [("float32", 16), ("float64", 4), ("float64", 2)])
def test_bound_arrays_of_every_dtype(dtype: str, W: int) -> None:
    """``array[lanes]``: any strides, whether far or not, and never from beyond the ends."""
    tile = Tile(dtype, W, 1, 1)
    picks: list[Callable[..., Any]] = [
        lambda i, j, o, x: x[i],
        lambda i, j, o, x: x[j],
        lambda i, j, o, x: x[o],
    ]
    for position, name in enumerate(STORED_AS):
        far = position % 2 == (dtype == "float64")
        layout = Layout((0, 1, 2, -1), (("array", name, 1, far),), position % 3)
        assert layout.words == 3
        run = reading(tile, layout, picks)
        arrays = [one_axis(name, *shape) for shape in ((1, 1), (13, 1), (13, 3), (13, 1, 1))]
        arrays += [one_axis(name, 40, -1, 3), one_axis(name, 13, 0), one_axis(name, 9, -7)]
        for x in arrays:
            for index in indices_of(len(x), tile.W):
                check_reading(tile, layout, picks, run, [x], index)
        out = np.zeros((7, 8 + 8 * tile.W), np.uint8)
        words = np.concatenate([np.full(layout.first, -1), words_of(x)])
        zeros = np.zeros(tile.W, np.int64)
        run(*(a.ctypes.data for a in (words, *[zeros] * 3, out)))
        assert KINDS[out[0, :4].view(np.int32)[0]] == becomes(name, tile.dtype)


@pytest.mark.parametrize(
    ("tile", "far"), [(Tile("float32", 8, 1, 1), False), (Tile("float64", 4, 1, 1), True)]
)
def test_bound_arrays_of_several_axes(tile: Tile, far: bool) -> None:
    picks: list[Callable[..., Any]] = [
        lambda i, j, o, x, y: x[i, j],
        lambda i, j, o, x, y: x[j, i],
        lambda i, j, o, x, y: x[i, o],
        lambda i, j, o, x, y: x[o, j],
        lambda i, j, o, x, y: x[o, o],
        lambda i, j, o, x, y: x[1, i],
        lambda i, j, o, x, y: x[j, -1],
        lambda i, j, o, x, y: x[-2, 0],
        lambda i, j, o, x, y: x[o, 99],
        lambda i, j, o, x, y: y[i, j, o],
        lambda i, j, o, x, y: y[o, 0, i],
        lambda i, j, o, x, y: y[o, o + 1, i - 1],
        lambda i, j, o, x, y: x[o, o] * len(x) + x.shape[1] - y.shape[2],
        lambda i, j, o, x, y: x[x[i, j], y[j, 0, o] % 3],
    ]
    # The outer reading of the last one hides what Reader saw of the inner one.
    nested = picks.pop()
    layout = Layout((0, 1, 2, -1, -2), (("array", "int16", 2, far), ("array", "int8", 3, far)), 2)
    assert layout.words == 12
    run = reading(tile, layout, picks)
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**15), 2**15, (11, 14), np.int16)
    y = rng.integers(-128, 128, (12, 9, 10), np.int8)
    pairs = [(x[1:-1, 2:-2], y[2:-2, 1:-1, 1:-1]), (x.T[2:-2, ::-1], y.transpose(2, 0, 1)[::-1])]
    pairs += [(np.broadcast_to(x[3], (5, 14)), np.broadcast_to(y[:, 2:3, :1], (12, 9, 4)))]
    pairs += [(x[:0], y[:, :0]), (x[:, :0], y[..., :0]), (x[:1, :1], y[:1, :1, :1])]
    for pair in pairs:
        for n in (9, 3):
            for index in indices_of(n, tile.W):
                shifted = index[0], index[1][::-1], index[2]
                check_reading(tile, layout, picks, run, list(pair), shifted)
    small = (x % 5).astype(np.int16), y
    run = reading(tile, layout, [nested])
    i = rng.integers(0, 9, tile.W)
    check_reading(tile, layout, [nested], run, list(small), (i, i[::-1], i[:1]))


@pytest.mark.skipif(sys.platform != "linux", reason="needs files with holes")
def test_a_bound_array_beyond_31_bits(tmp_path: Any) -> None:
    """Byte offsets are 64 bits wide, and an index too."""
    tile = Tile("float32", 8, 1, 1)
    stride = (1 << 31) + 4096
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(2 * stride + 4096)
        memory = np.memmap(file, np.uint8, "r+")
    for n in range(3):
        memory[n * stride : n * stride + 4] = np.array([n + 1], "f4").view(np.uint8)
    x = np.lib.stride_tricks.as_strided(memory[:4].view("f4"), (3,), (stride,))
    picks: list[Callable[..., Any]] = [lambda i, j, o, x: x[i], lambda i, j, o, x: x[j]]
    layout = Layout((0, 1, 2, -1), (("array", "float32", 1, True),), 0)
    run = reading(tile, layout, picks)
    for index in indices_of(3, tile.W):
        check_reading(tile, layout, picks, run, [x], index)
        check_reading(tile, layout, picks, run, [x[::-1]], index)
    # Each byte of a view that is longer than an int32 counts.
    layout = Layout((0, 1, 2, -1), (("array", "uint8", 1, True),), 0)
    run = reading(tile, layout, picks)
    at = np.array([0, stride, 2 * stride + 2, -1, 2 * stride + 4096, -2 * stride - 4096, 3, 2])
    check_reading(tile, layout, picks, run, [memory], (np.zeros(8), at, at[:1]))


def test_nothing_is_read_from_an_empty_array() -> None:
    """Such an array may point anywhere."""
    tile = Tile("float32", 8, 1, 1)
    nowhere = np.ctypeslib.as_array((ctypes.c_float * 0).from_address(8))
    assert nowhere.size == 0
    picks: list[Callable[..., Any]] = [lambda i, j, o, x: x[i], lambda i, j, o, x: x[o]]
    layout = Layout((0, 1, 2, -1), (("array", "float32", 1, False),), 0)
    run = reading(tile, layout, picks)
    for index in indices_of(1, tile.W):
        check_reading(tile, layout, picks, run, [nowhere], index)


@dtype_of_each_kind
def test_bound_numbers_in_every_place(dtype: str) -> None:
    """Numbers keep their kind and arrays their place, whatever the order of the parameters."""
    tile = Tile(dtype, 8, 1, 1)
    kinds = (("int",), ("float",), ("bool",), ("array", "int32", 1, False))
    table = np.arange(10, 19, dtype=np.int32)
    bound: list[Any] = [(1 << 40) + 1, 0.1, True, table]
    i = np.array([0, 8, -1, 3, 4, 5, -9, 7])
    index = (i, i[::-1].copy(), np.array([-2]))

    def result(i: Any, j: Any, o: Any, n: Any, f: Any, flag: Any, x: Any) -> Any:
        return np.where((i + n > n) & flag, x[j] * f, x[o]) + f * f + f

    inner = jit(result)
    orders: dict[tuple[int, ...], Callable[..., Any]] = {
        (0, 1, 2, -1, -2, -3, -4): inner,
        (-1, 0, -2, -3, 1, -4, 2): lambda n, i, f, flag, j, x, o: inner(i, j, o, n, f, flag, x),
        (-4, -3, -2, -1, 2, 1, 0): lambda x, flag, f, n, o, j, i: inner(i, j, o, n, f, flag, x),
        (2, -2, -4, 0, -1, 1, -3): lambda o, f, x, i, n, j, flag: inner(i, j, o, n, f, flag, x),
    }
    f = np.dtype(dtype).type(0.1)
    x = Reader(table)
    expected = np.where(i > 0, x[i[::-1]].astype(dtype) * f, x[-2].astype(dtype)) + f * f + f
    assert expected.dtype == dtype
    for order, function in orders.items():
        run = reading(tile, Layout(order, kinds, 1), [function])
        out = np.zeros((3, 8 + 8 * tile.W), np.uint8)
        words = np.append([-1], words_of(*bound))
        run(*(a.ctypes.data for a in (words, *index, out)))
        got = out[0, 8 : 8 + tile.W * tile.itemsize].view(dtype)
        np.testing.assert_array_equal(got, expected)
        assert not out[1, :8].any()


def test_wrong_indices_are_refused() -> None:
    """By an error that says what an index is."""
    tile = Tile("float32", 8, 1, 1)
    layout = Layout((0, 1, 2, -1), (("array", "float32", 2, False),), 0)
    refused: list[tuple[Callable[..., Any], str | None]] = [
        (lambda i, j, o, x: x[i + 0.5, j], "integers"),
        (lambda i, j, o, x: x[i > 0, j], "integers"),
        (lambda i, j, o, x: x[i, 1.0], "integers"),
        (lambda i, j, o, x: x[i, True], "integers"),
        (lambda i, j, o, x: x[i, :], "integers"),
        (lambda i, j, o, x: x[:, o], "integers"),
        (lambda i, j, o, x: x[i], "2 axes"),
        (lambda i, j, o, x: x[1], "2 axes"),
        (lambda i, j, o, x: x[i, j, o], "2 axes"),
        (lambda i, j, o, x: x[i, None], "integers"),
        (lambda i, j, o, x: i + x, None),
        (lambda i, j, o, x: np.exp(x), None),
        (lambda i, j, o, x: np.where(x == 0, i, j), None),
        (lambda i, j, o, x: x.nonsense, "nonsense"),
    ]
    at = np.zeros(8, np.int64).ctypes.data
    for pick, message in refused:
        with pytest.raises(numba.TypingError, match=message):
            reading(tile, layout, [pick])(at, at, at, at, at)


def test_what_is_returned() -> None:
    """as_score and as_condition take lanes, one number for all, and plain numbers."""
    tile = Tile("float32", 4, 1, 1)
    pitch = 8 + 8 * tile.W

    def run(x: int, i: int, p: int, out: int) -> None:
        store_each(
            out,
            pitch,
            (
                lanes.as_score(tile, load_as(tile, "real", x)),
                lanes.as_score(tile, load_as(tile, "one real", x)),
                lanes.as_score(tile, load_as(tile, "int32", i)),
                lanes.as_score(tile, load_as(tile, "one int32", i)),
                lanes.as_score(tile, 3),
                lanes.as_score(tile, 0.1),
                lanes.as_condition(tile, load_as(tile, "bool", p)),
                lanes.as_condition(tile, load_as(tile, "one bool", p)),
                lanes.as_condition(tile, True),
                lanes.as_condition(tile, i == 0),
            ),
        )

    x = np.array([0.5, -1, np.nan, 7], "f4")
    i = np.array([-5, 0, 1, 2**31 - 1], "i4")
    p = np.array([True, False, True, False])
    out = np.zeros((11, pitch), np.uint8)
    jit(run)(*(a.ctypes.data for a in (x, i, p, out)))
    assert out[:, :8].copy().view("i4").tolist() == [[3, 4]] * 6 + [[0, 4]] * 4 + [[-1, -1]]
    scores = [row[8:24].view("f4").tolist() for row in out[:6]]
    np.testing.assert_array_equal(
        scores, [x, [0.5] * 4, i.astype("f4"), [-5] * 4, [3] * 4, [np.float32(0.1)] * 4]
    )
    conditions = [row[8:12].view("?").tolist() for row in out[6:10]]
    assert conditions == [p.tolist(), [True] * 4, [True] * 4, [False] * 4]
    refused: list[Callable[[int], Any]] = [
        lambda at: lanes.as_score(tile, load_as(tile, "bool", at)),
        lambda at: lanes.as_score(tile, True),
        lambda at: lanes.as_score(tile, None),
        lambda at: lanes.as_score(tile, (1.0, 2.0)),
        lambda at: lanes.as_score(tile, 1j),
        lambda at: lanes.as_condition(tile, load_as(tile, "real", at)),
        lambda at: lanes.as_condition(tile, load_as(tile, "one int32", at)),
        lambda at: lanes.as_condition(tile, 1),
        lambda at: lanes.as_condition(tile, None),
    ]
    for function in refused:
        with pytest.raises(numba.TypingError, match="to be returned"):
            compile_only(function)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_indices(index: str) -> None:
    """load_index and uniform_index, and what they become where they may be large."""
    tile = Tile("float64", 4, 1, 1)
    pitch = 8 + 8 * tile.W

    def run(at: int, offset: int, n: int, out: int) -> None:
        q, k = lanes.load_index(tile, index, at, offset), lanes.uniform_index(tile, index, n)
        store_each(out, pitch, (q, k, q - k, k - q, k + 1, k * k, (q - k) * (q - k)))

    large = index == "int64"
    rows = np.array([0, 5, 9, 2**28 - 3])
    offset, n = (2**33, 2**40) if large else (-(2**28) + 3, 2**28 - 1)
    out = np.zeros((8, pitch), np.uint8)
    jit(run)(rows.ctypes.data, offset, n, out.ctypes.data)
    q = rows + offset
    results = (q, [n], q - n, n - q, [n + 1], [n * n % 2**64], (q - n) * (q - n))
    for row, expected in zip(out, results, strict=False):
        kind, width = row[:8].view("i4").tolist()
        got = row[8 : 8 + width * np.dtype(KINDS[kind]).itemsize].view(KINDS[kind])
        np.testing.assert_array_equal(got, np.array(expected).astype(np.uint64).view("i8"))
    kinds = ["int64"] * 7 if large else ["int32"] * 5 + ["int64"] * 2
    assert [KINDS[row[:4].view("i4")[0]] for row in out[:7]] == kinds
