"""Lanes against NumPy, lane by lane, for every width in one process.

The same plain function runs on lanes, compiled, and on NumPy's scalars, one lane after the other.
One compiled function per float type and width evaluates everything that is compared.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pytest
from lane_tools import (
    KINDS,
    WIDTHS,
    Array,
    compile_only,
    dtype_of_each_kind,
    in_turn,
    jit,
    load_as,
    store_each,
    tile_of_each_kind,
)
from numba import types

from nattn.vectors import lanes
from nattn.vectors.lanes import Lanes, Tile
from nattn.vectors.lanes.operators import BINARY, TERNARY, UNARY, Operation


def real_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x + y, x - y, x * y, x / y, x // y, x % y),
        *(x + s, s + x, x - s, s - x, x * s, s * x, x / s, s / x, x // s, s // x, x % s, s % x),
        *(x + k, k - x, x * k, k / x, x // k, k % x, x + 1, 2.5 - x, x * True, False + x),
        *(-x, +x, abs(x), np.abs(x), np.sqrt(x), np.float64(x)),
    )


def real_selection(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(min(x, y), max(x, y), min(x, s), max(s, x), min(k, x), max(x, k)),
        *(np.minimum(x, y), np.maximum(x, y), np.minimum(x, s), np.maximum(s, x)),
        *(np.minimum(k, x), np.maximum(x, k), np.maximum(x, True)),
        *(np.where(x < y, x, y), np.where(x < y, s, x), np.where(x < y, x, k)),
        *(np.where(x < y, s, k), np.where(x < y, k, s), np.where(x < y, x < s, y)),
        *(np.where(x < y, True, x), np.where(x < y, x, False), np.where(x < y, 0.5, True)),
        *(np.clip(x, -1, 2.5), np.clip(s, x, y), np.clip(x, y, k), np.clip(k, s, x), np.sign(x)),
    )


def real_in_place(x: Any, y: Any, s: Any, k: Any) -> Any:
    a = b = c = d = e = f = g = h = x
    a += y
    b -= y
    c *= y
    d /= y
    e //= y
    f %= y
    g += s
    h *= k
    return a, b, c, d, e, f, g, h


def real_in_loops(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Assign what begins as a number, or as lanes of another type."""
    a, b, c, d, e = 0.0, 1, s, k, x
    for n in range(3):
        a = a + x
        b = b * y
        c = np.where(x < y, c, y)
        d = d - x * n
        e = min(e, y)
    return a, b, c, d, e


def comparison(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x < y, x <= y, x > y, x >= y, x == y, x != y),
        *(x < s, x <= s, x > s, x >= s, x == s, x != s),
        *(s < x, s <= x, s > x, s >= x, s == x, s != x),
        *(x < k, x <= k, x > k, x >= k, k == x, k != x, x == True, x < 1),  # noqa: E712
        *(np.logical_and(x, y), np.logical_or(x, s), np.logical_not(x), np.logical_or(k, x)),
    )


def integer_selection(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what is no larger than the arguments: of their own width."""
    a = b = c = d = x
    e = f = x
    a %= y
    b &= y
    c |= y
    d ^= y
    for _ in range(2):
        e = min(e, y)
        f = f ^ (y & 5)
    return (
        *(x % y, x & y, x | y, x ^ y, a, b, c, d, e, f, ~x, x % 7, x & 255, x | True),
        *(min(x, y), max(x, y), np.minimum(x, y), np.maximum(x, y), np.where(x < y, x, y)),
        *(min(x, -2147483648), max(2147483647, x), np.where(x < y, -5, y), np.clip(x, -9, y)),
        np.sign(x),
    )


def integer_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what can exceed the arguments: 64 bits wide whatever they are, where they are full."""
    a = b = c = x
    d, e = 0, x
    a += y
    b -= y
    c //= y
    for _ in range(3):
        d = d + x
        e = e - y
    return x + y, x - y, x // y, -x, abs(x), np.abs(x), x + 1, 1 - x, x // -1, a, b, c, d, e


def wide_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what is 64 bits wide whatever the lanes are: products and 64-bit scalars."""
    a = b = x
    a *= y
    b += k
    return (
        *(x * y, x * k, k * x, x * x, a, b, x * 2, True - x * 3),
        *(x + k, k - x, x // k, k // x, x % k, k % x, x & k, k | x, x ^ k),
        *(min(x, k), max(k, x), np.minimum(x, k), np.maximum(k, x), np.where(x < y, k, x)),
        *(np.clip(x, k, y), np.clip(k, x, y)),
    )


def beyond_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Meet literals that an int32 just does not hold."""
    return (
        *(x + 2147483648, x - 2147483648, 2147483648 - x, x * 2147483648),
        *(x // 2147483648, x % 2147483648, x & 2147483648, x | 2147483648, x ^ 2147483648),
        *(min(x, 2147483648), np.maximum(2147483648, x), np.where(x < y, x, 2147483648)),
        *(x // -2147483649, x % -2147483649, max(x, -2147483649), np.clip(x, 0, 2147483648)),
    )


def shift(x: Any, y: Any, s: Any, k: Any) -> Any:
    a = b = x
    a <<= y
    b >>= y
    return (
        *(x << y, x >> y, a, b, x << k, x >> k, k << x, k >> x),
        *(x << 3, x >> 3, x << 63, x >> 63, x << 64, x >> 64, x << -1, x >> -1, 1 << y, -5 >> y),
    )


def integer_power(x: Any, y: Any, s: Any, k: Any) -> Any:
    a = x
    a **= 3
    return (
        *(x**2, x**3, x**0, x**1, x**5, a, np.power(x, 2), np.square(x), (x - y) ** 2),
        *(x ** (y & 7), 2 ** (y & 63), np.power(x, y & 1), x ** (k & 3), k ** (x & 3)),
    )


def integer_as_real(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what makes floats of integers: the kernel's own floats, whatever the scalar's are."""
    a = x
    a /= y
    b = 0.0
    for _ in range(2):
        b = b + x
    return (
        *(x / y, x / k, k / x, x + s, s - x, x * s, s / x, x // s, s % x, a, b),
        *(np.sqrt(x), min(x, s), np.maximum(s, x), np.where(x < s, x, s), np.clip(x, s, k)),
        np.float64(x),
    )


def integer_comparison(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x < y, x <= y, x > y, x >= y, x == y, x != y),
        *(x < k, k <= x, x > k, k >= x, x == k, k != x),
        *(x < 2147483648, x >= 2147483648, x > -2147483648, x == 2147483648, x != -2147483649),
        *(np.logical_and(x, y), np.logical_or(x, k), np.logical_not(x)),
    )


def narrow_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what stays in 32 bits, since indices are known to be small."""
    a = x
    a += y
    return (
        *(x - y, x + y, x + 5, 5 - x, abs(x - y), x % 7, x // 3, x // y, x % y, 2 * x, x * -7),
        *(-x, +x, np.abs(x), (x - y) * 3, x + y - (y - x), a, x + True, x // 8 % 5, x & 7, ~x),
        *(min(x, y) + 1, np.maximum(x, 3) - y, np.where(x < y, x, y) - 9, np.clip(y - x, -4, 4)),
        *(x * (x < y), (x < y) + x),
    )


def narrow_products(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what need not fit 32 bits."""
    a, b = x, x
    for _ in range(40):
        a = a + x
        b = b * 3
    return (
        *((x - y) * (x - y), x * x, x * 4096, x * 8, 4 * (x - y), x + 2147483647, x * y, a, b),
        *((x & 7) + 1, x - k, (x - y) * k, x << 2, (x - y) >> 1, x // k),
    )


def boolean(x: Any, y: Any, s: Any, k: Any) -> Any:
    a = b = c = d = x
    a &= y
    b |= y
    c ^= y
    for _ in range(2):
        d = d & ~y
    return (
        *(x & y, x | y, x ^ y, ~x, a, b, c, d, x == y, x != y, x < y, x >= y),
        *(x & True, False | x, x ^ True, np.where(x, y, x), np.where(x, False, y)),
        *(np.where(x, True, False), np.where(x, y, True), x == (k != 0)),
        *(np.logical_and(x, y), np.logical_or(x, True), np.logical_not(x), np.logical_and(k, x)),
    )


def boolean_as_integer(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what counts booleans as 0 and 1."""
    return (
        *(x + y, x - y, x * y, x // y, x % y, -x, +x, abs(x), min(x, y), max(x, y)),
        *(np.minimum(x, y), np.maximum(x, y), x + 1, 5 - x, x * 3, x + x + y, x & 1, x | 6),
    )


def boolean_as_wide(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x + k, k - x, x & k, k ^ x, np.where(x != 0, k, 7), np.where(x != 0, y, k)),
        *(x << y, x >> y, x << 5),
    )


def boolean_as_real(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x / y, x + s, s * x, np.where(x != 0, s, 1.5), np.where(x != 0, s, y), np.sqrt(x)),
        np.float64(x),
    )


@dataclass(frozen=True)
class Comparison:
    """A function, the kind of its lanes, of NumPy's operands for it, and of its results.

    Where the last two differ from the first, the conversion is what is tested.
    """

    function: Callable[..., Any]
    lanes: str
    numpy: str
    result: str


COMPARISONS = [
    Comparison(real_arithmetic, "real", "real", "real"),
    Comparison(real_selection, "real", "real", "real"),
    Comparison(real_in_place, "real", "real", "real"),
    Comparison(real_in_loops, "real", "real", "real"),
    Comparison(comparison, "real", "real", "bool"),
    Comparison(integer_as_real, "int32", "real", "real"),
    Comparison(integer_as_real, "int64", "real", "real"),
    Comparison(boolean_as_real, "bool", "real", "real"),
    Comparison(integer_selection, "int32", "int64", "int32"),
    Comparison(integer_arithmetic, "int32", "int64", "int64"),
    Comparison(wide_arithmetic, "int32", "int64", "int64"),
    Comparison(beyond_arithmetic, "int32", "int64", "int64"),
    Comparison(shift, "int32", "int64", "int64"),
    Comparison(integer_power, "int32", "int64", "int64"),
    Comparison(integer_comparison, "int32", "int64", "bool"),
    Comparison(narrow_arithmetic, "narrow", "int64", "int32"),
    Comparison(narrow_products, "narrow", "int64", "int64"),
    Comparison(integer_power, "narrow", "int64", "int64"),
    Comparison(integer_selection, "int64", "int64", "int64"),
    Comparison(integer_arithmetic, "int64", "int64", "int64"),
    Comparison(wide_arithmetic, "int64", "int64", "int64"),
    Comparison(beyond_arithmetic, "int64", "int64", "int64"),
    Comparison(shift, "int64", "int64", "int64"),
    Comparison(integer_comparison, "int64", "int64", "bool"),
    Comparison(boolean, "bool", "bool", "bool"),
    Comparison(boolean_as_integer, "bool", "int64", "int32"),
    Comparison(boolean_as_wide, "bool", "int64", "int64"),
]

MOST_RESULTS = 40

REAL = [n for n, c in enumerate(COMPARISONS) if "real" in (c.lanes, c.result)]

INTEGER = [n for n in range(len(COMPARISONS)) if n not in REAL]

SCALARS = [(0.75, 3), (-2.5, -1), (math.nan, 0), (-0.0, np.iinfo("i8").min), (math.inf, -7)]
"""Values of s and k."""

ALL_PAIRS = 1600
"""A multiple of every width, and at least every pair of the values below."""

MEMORY = ("float32", "float64", "int32", "int64", "narrow", "bool")
"""What operands lie in memory, in this order."""


@functools.cache
def operands(kind: str) -> Array:
    """Return x and y as rows: every pair of the values at which something can go wrong."""
    some: list[Any]
    if kind == "bool":
        values = np.array([False, True])
    elif kind == "narrow":
        some = [0, 1, 2, 3, 7, 8, 100, 46341, 65537, lanes.INDEX_BOUND - 1, lanes.INDEX_BOUND]
        values = np.array([*some, *(-x for x in some)])
    elif kind.startswith("int"):
        end = np.iinfo(kind)
        some = [0, 1, 2, 3, 7, 8, 31, 64, 46341, 2**20 + 1, 2**31 - 1, end.max // 2]
        values = np.array([*some, *(-x for x in some), end.max, end.min, end.min + 1], kind)
    else:
        f = np.finfo(kind)
        some = [0.0, 1.0, 0.1, 0.75, 2.5, 3, 7.3, 1e-30, f.smallest_subnormal, f.tiny, 1e15, 1e-3]
        some += [f.tiny * 1.25, f.max, f.max / 3, math.inf, math.nan, 1 + f.eps]
        values = np.array([*some, *(-x for x in some)], kind)
    pairs = np.stack([np.repeat(values, len(values)), np.tile(values, len(values))])
    assert pairs.shape[1] <= ALL_PAIRS
    return np.ascontiguousarray(np.take(pairs, range(ALL_PAIRS), axis=1, mode="wrap"))


def real(kind: str, dtype: str) -> str:
    return dtype if kind == "real" else kind


def spread(x: Array, W: int) -> Array:
    """Give all lanes of each vector what the first one has."""
    return np.repeat(x[::W], W)


@functools.cache
def numpy_results(n: int, scalars: int, dtype: str, x_step: int = 1, y_step: int = 1) -> Any:
    """Evaluate a comparison's function lane by lane on NumPy's scalars."""
    c = COMPARISONS[n]
    s, k = SCALARS[scalars]
    number = np.dtype(dtype).type if c.numpy == "real" else np.int64
    with np.errstate(all="ignore"):
        pair = operands(real(c.lanes, dtype)).astype(real(c.numpy, dtype))
        x, y = spread(pair[0], x_step), spread(pair[1], y_step)
        arguments = np.dtype(dtype).type(s), number(k)
        rows = [c.function(*xy, *arguments) for xy in zip(x, y, strict=True)]
    return [np.array(column).astype(real(c.result, dtype)) for column in zip(*rows, strict=True)]


def step(tile: Tile, c: Comparison, x_one: str, y_one: str) -> Callable[..., int]:
    """Return a function that runs one comparison."""
    function = jit(c.function)
    kind, pitch = c.lanes, 8 + 8 * tile.W
    x_kind, y_kind = x_one + kind, y_one + kind
    slot = MEMORY.index(real(kind, tile.dtype))
    size = 8 if kind == "narrow" else np.dtype(real(kind, tile.dtype)).itemsize

    def run(args: Any, out: int) -> int:
        n, m, operands, s, k = args
        at = lanes.read_int64(operands + 8 * slot)
        x = load_as(tile, x_kind, at + m * size)
        y = load_as(tile, y_kind, at + (n + m) * size)
        store_each(out, pitch, function(x, y, s, k))
        return out + pitch * MOST_RESULTS

    return jit(run)


def operations(tile: Tile, chosen: list[int], x_one: str, y_one: str) -> Callable[..., None]:
    """Compile the chosen comparisons for a tile into one function."""
    W = tile.W
    all_of_them = in_turn([step(tile, COMPARISONS[n], x_one, y_one) for n in chosen])

    def run(n: int, operands: int, s: float, k: int, out: int) -> None:
        for m in range(0, n, W):
            out = all_of_them((n, m, operands, s, k), out)

    return jit(run, types.void(*[types.int64] * 2, types.float64, types.int64, types.int64))


def compare(
    tile: Tile, chosen: list[int], x_one: str = "", y_one: str = "", scalars: Any = None
) -> None:
    """Compare lanes with NumPy; "one " makes x or y a number that is the same in all lanes."""
    run = operations(tile, chosen, x_one, y_one)
    W = tile.W
    memory = [operands(kind) for kind in MEMORY]
    addresses = np.array([x.ctypes.data for x in memory])
    out = np.zeros((ALL_PAIRS // W, len(chosen), MOST_RESULTS, 8 + 8 * W), np.uint8)
    steps = (W if x_one else 1), (W if y_one else 1)
    widths = {1} if x_one and y_one else {1, W} if x_one or y_one else {W}
    for scalar in range(len(SCALARS)) if scalars is None else scalars:
        s, k = SCALARS[scalar]
        out[...] = 0
        run(ALL_PAIRS, addresses.ctypes.data, s, k, out.ctypes.data)
        for slot, n in enumerate(chosen):
            c = COMPARISONS[n]
            expected = numpy_results(n, scalar, tile.dtype, *steps)
            kinds = out[0, slot, : len(expected) + 1, :8].copy().view(np.int32).reshape(-1, 2)
            kind = real(c.result, tile.dtype)
            assert kinds[:, 0].tolist() == [KINDS.index(kind)] * len(expected) + [-1], c
            assert {*kinds[:-1, 1].tolist()} <= widths, c
            for m, wanted in enumerate(expected):
                width = int(kinds[m, 1])
                size = np.dtype(kind).itemsize * width
                got = out[:, slot, m, 8 : 8 + size].copy().view(kind)
                got = np.repeat(got, W // width, axis=1).ravel()
                bad = (got != wanted) & ((got == got) | (wanted == wanted))
                if kind == tile.dtype and c.function is not real_selection:
                    # Which of two zeros a selection returns is left open.
                    bad |= (np.signbit(got) != np.signbit(wanted)) & (wanted == wanted)
                at = int(bad.argmax())
                x, y = operands(real(c.lanes, tile.dtype))
                assert not bad.any(), (
                    f"{c.function.__name__} of {c.lanes}, result {m}, "
                    f"x = {spread(x, steps[0])[at]!r}, "
                    f"y = {spread(y, steps[1])[at]!r}, s = {s}, k = {k}: "
                    f"{got[at]!r}, and NumPy {wanted[at]!r}"
                )


@tile_of_each_kind
def test_floats_and_conversions_to_them(tile: Tile) -> None:
    compare(tile, REAL)


@pytest.mark.parametrize("W", [16, 4])
def test_integers_and_booleans(W: int) -> None:
    compare(Tile("float32", W, 1, 1), INTEGER)


ONES = [("one ", ""), ("", "one "), ("one ", "one ")]


@pytest.mark.parametrize("ones", ONES, ids=["x", "y", "both"])
@pytest.mark.parametrize(
    ("tile", "chosen"),
    [(Tile("float32", 8, 1, 1), REAL), (Tile("float64", 4, 1, 1), INTEGER)],
    ids=["real", "integer"],
)
def test_a_number_that_stands_for_all_lanes(
    tile: Tile, chosen: list[int], ones: tuple[str, str]
) -> None:
    """It meets wide lanes on either side as a scalar does; alone it stays one number."""
    compare(tile, chosen, *ones, scalars=(0,))


ENDS = [e + d for e in (-(2**31), 0, 2**31) for d in (-2, -1, 0, 1)] + [2**32, -(2**32), 2**40]
ENDS += [2**32 + 5, 5 - 2**32, *(2**63 - 1 - n for n in (0, 2**32 - 6)), -(2**63)]


@pytest.mark.parametrize("W", WIDTHS)
def test_int32_lanes_against_64_bits(W: int) -> None:
    """Comparisons at and beyond the ends of int32, with a scalar or one number for all lanes."""
    tile, pitch = Tile("float32", W, 1, 1), 8 + 8 * W

    def both(x: Any, y: Any) -> Any:
        return (
            *(x < y, x <= y, x > y, x >= y, x == y, x != y),
            *(y < x, y <= x, y > x, y >= x, y == x, y != x),
        )

    compare_all = jit(both)

    def run(x: int, k: int, u: Any, k_at: int, out: int) -> None:
        number = load_as(tile, "one int64", k_at)
        inner, one_inner = load_as(tile, "inner", x), load_as(tile, "one inner", x)
        any_of_them, one = load_as(tile, "int32", x), load_as(tile, "one int32", x)
        store_each(out, pitch, compare_all(inner, k))
        store_each(out + 13 * pitch, pitch, compare_all(inner, number))
        store_each(out + 26 * pitch, pitch, compare_all(inner, u))
        store_each(out + 39 * pitch, pitch, compare_all(any_of_them, k))
        store_each(out + 52 * pitch, pitch, compare_all(any_of_them, number))
        store_each(out + 65 * pitch, pitch, compare_all(one_inner, k))
        store_each(out + 78 * pitch, pitch, compare_all(one_inner, number))
        store_each(out + 91 * pitch, pitch, compare_all(one, k))
        store_each(out + 104 * pitch, pitch, compare_all(one, number))

    function = jit(run)
    middle = [-5, -1, 0, 1, 2, 5, 1 << 30, -(1 << 30), *(3**n for n in range(8))]
    for full, ends in ((True, [1 - 2**31, 2**31 - 1, -(2**31)]), (False, [2 - 2**31, 2**31 - 2])):
        x = np.resize(np.array([*ends, *middle], np.int32), 2 * W)
        out = np.zeros((117, pitch), np.uint8)
        for k, at in itertools.product(ENDS, (0, W)):
            number, part = np.array([k]), x[at : at + W]
            unsigned = np.uint64(k % 2**64)
            function(part.ctypes.data, k, unsigned, number.ctypes.data, out.ctypes.data)
            for n in (3, 4, 7, 8) if full else range(9):
                y, width = int(unsigned) if n == 2 else k, W if n < 5 else 1
                for m, wanted in enumerate(zip(*(both(int(v), y) for v in part), strict=True)):
                    row = out[13 * n + m]
                    assert row[:8].view(np.int32).tolist() == [0, width]
                    got = row[8 : 8 + width].view(bool)
                    np.testing.assert_array_equal(got, wanted[:width], f"{n} {m} {y}")


def test_what_has_no_meaning_is_refused() -> None:
    """Already when it is compiled, by Numba's own error."""
    tile, other = Tile("float32", 8, 1, 1), Tile("float32", 4, 1, 1)
    double = Tile("float64", 8, 1, 1)
    refused: list[Callable[[int], Any]] = [
        lambda at: lanes.load(tile, at) + lanes.load(other, at),
        lambda at: lanes.load(tile, at) + lanes.load(double, at),
        lambda at: load_as(tile, "one real", at) + lanes.load(double, at),
        lambda at: ~lanes.load(tile, at),
        lambda at: lanes.load(tile, at) & lanes.load_int32(tile, at),
        lambda at: lanes.load(tile, at) << 2,
        lambda at: np.where(lanes.load(tile, at), 1.0, 2.0),
        lambda at: np.zeros(3)[lanes.load_int32(tile, at)],
        lambda at: lanes.load(tile, at) + 1j,
    ]
    for function in refused:
        with pytest.raises(numba.TypingError):
            compile_only(function)


def test_a_condition_is_not_tested() -> None:
    """Neither that of many lanes nor that of one number for all; the error names the remedy."""
    tile = Tile("float32", 8, 1, 1)

    def branch(x: Any) -> Any:
        if x > 0:
            return x
        return x + x

    def loop(x: Any) -> Any:
        while x > 0:
            x = x - 1
        return x

    def chained(x: Any) -> Any:
        return np.where(0 < x < 1, x, 2 * x)

    refused: list[Callable[[Any], Any]] = [branch, loop, chained]
    refused += [
        lambda x: x if x > 0 else -x,
        lambda x: (x > 0) and (x < 1),
        lambda x: (x > 0) or (x < 1),
        lambda x: not x > 0,
        lambda x: np.where(not x > 0, x, -x),
        lambda x: bool(x > 0),
        lambda x: x if x else -x,
    ]
    for function, kind in itertools.product(refused, ("real", "one int32")):
        condition = jit(function)
        with pytest.raises(numba.TypingError, match=r"np\.where"):
            compile_only(applied(tile, condition, kind))


@dtype_of_each_kind
def test_a_conversion_gives_the_kernels_own_floats(dtype: str) -> None:
    """Whatever it is called: as every float result."""
    tile, pitch = Tile(dtype, 8, 1, 1), 8 + 8 * 8

    def run(x: int, i: int, out: int) -> None:
        a, b, c = load_as(tile, "real", x), load_as(tile, "int64", i), load_as(tile, "one int64", i)
        floats = np.float32(a), np.float64(a), np.float32(b), np.float64(b), np.float32(c)
        truths = np.float32(a > 0), np.float64(c > 0)
        store_each(out, pitch, (*floats, *truths, np.float32(a) / 3, np.float64(b) * np.float32(a)))

    x, i = np.linspace(-0.7, 9, 8).astype(dtype), (1 << 40) + 3 ** np.arange(8)
    out = np.zeros((10, pitch), np.uint8)
    jit(run)(x.ctypes.data, i.ctypes.data, out.ctypes.data)
    y = i.astype(dtype)
    for row, expected in zip(out, (x, x, y, y, y[:1], x > 0, [1], x / 3, y * x), strict=False):
        assert KINDS[row[:4].view(np.int32)[0]] == dtype
        got = row[8:].view(dtype)[: len(expected)]
        np.testing.assert_array_equal(got, np.asarray(expected).astype(dtype))


def test_where_takes_a_condition_that_is_no_lanes() -> None:
    """A bound number decides for all lanes at once; integers are true unless 0, as in NumPy."""
    tile, pitch = Tile("float32", 8, 1, 1), 8 + 8 * 8

    def run(x: int, i: int, flag: bool, n: int, out: int) -> None:
        a, b = load_as(tile, "real", x), load_as(tile, "int32", i)
        results = np.where(flag, a, -a), np.where(n > 3, b, a), np.where(not flag, 1.0, a)
        store_each(out, pitch, (*results, np.where(b & 1, a, 2 * a), np.where(n, a, 0.0)))

    x, i = np.arange(1, 9, dtype="f4"), np.arange(8, dtype="i4")
    out = np.zeros((6, pitch), np.uint8)
    function = jit(run)
    for flag, n in ((True, 3), (False, 4), (True, 0)):
        function(x.ctypes.data, i.ctypes.data, flag, n, out.ctypes.data)
        expected = [x if flag else -x, i if n > 3 else x, x if flag else np.ones(8)]
        expected += [np.where(i & 1, x, 2 * x), x if n else 0 * x]
        np.testing.assert_array_equal([row[8:40].view("f4") for row in out[:5]], expected)


def applied(tile: Tile, function: Any, kind: str) -> Callable[[int], Any]:
    return lambda at: function(load_as(tile, kind, at))


OPERATIONS = [
    (function, operation, arity)
    for arity, table in enumerate((UNARY, BINARY, TERNARY), start=1)
    for function, operation in table.items()
]

ON_ARRAYS: dict[Any, Any] = {abs: np.abs, min: np.minimum, max: np.maximum, math.pow: np.power}
"""NumPy's names for what Python calls otherwise, where the two differ."""


def takes_integers(operation: Operation, arity: int) -> bool:
    """Whether a function has no meaning for floats."""
    return operation.types((Lanes(types.float32, 4),) * arity) is None


def test_every_function_is_registered_under_its_name() -> None:
    """Whether `np.log` is a logarithm: how exact one is, is the matter of test_elementary."""
    dtype = "float32"
    tile = Tile(dtype, 4, 1, 1)
    W, pitch = tile.W, 8 + 8 * tile.W

    def one(function: Any, operation: Any, arity: int) -> Callable[..., int]:
        if takes_integers(operation, arity):
            kind, slot, step = "int64", 1, 8 * W
        else:
            kind, slot, step = "real", 0, tile.itemsize * W

        def unary(operands: int, out: int) -> int:
            at = lanes.read_int64(operands + 8 * slot)
            store_each(out, pitch, (function(load_as(tile, kind, at)),))
            return out + pitch

        def binary(operands: int, out: int) -> int:
            at = lanes.read_int64(operands + 8 * slot)
            x, y = load_as(tile, kind, at), load_as(tile, kind, at + step)
            store_each(out, pitch, (function(x, y),))
            return out + pitch

        def ternary(operands: int, out: int) -> int:
            at = lanes.read_int64(operands + 8 * slot)
            x, y = load_as(tile, kind, at), load_as(tile, kind, at + step)
            z = load_as(tile, kind, at + 2 * step)
            store_each(out, pitch, (function(x, y, z),))
            return out + pitch

        return jit((unary, binary, ternary)[arity - 1])

    all_of_them = in_turn([one(*described) for described in OPERATIONS])
    rng = np.random.default_rng(0)
    reals = rng.uniform(0.4, 3, (3, W)).astype(dtype)
    reals[:, ::2] *= np.array([1, -1, 1], dtype)[:, None]
    integers = rng.integers(0, 9, (3, W))
    addresses = np.array([reals.ctypes.data, integers.ctypes.data])
    out = np.zeros((len(OPERATIONS) + 1, pitch), np.uint8)
    all_of_them(addresses.ctypes.data, out.ctypes.data)
    for row, (function, operation, arity) in zip(out, OPERATIONS, strict=False):
        integer = takes_integers(operation, arity)
        operands = (integers if integer else reals.astype(np.float64))[:arity]
        name = function.__name__
        on_arrays = ON_ARRAYS.get(function)
        if on_arrays is None:
            on_arrays = getattr(np, name) if function.__module__ == "math" else function
        with np.errstate(invalid="ignore"):
            expected = np.asarray(on_arrays(*operands))
        kind = KINDS[row[:4].view(np.int32)[0]]
        assert (kind == "bool") == (expected.dtype == bool), name
        got = row[8 : 8 + W * np.dtype(kind).itemsize].view(kind)
        tolerance = 64 * float(np.finfo(dtype).eps)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=0, err_msg=name)


def test_what_users_may_call_is_registered() -> None:
    names = "exp exp2 expm1 log log1p tanh sqrt sin cos abs sign floor isfinite logical_not"
    assert {getattr(np, name) for name in names.split()} <= set(UNARY)
    names = "power minimum maximum logical_and logical_or"
    assert {getattr(np, name) for name in names.split()} <= set(BINARY)
    assert {operator.pow, min, max} <= set(BINARY)
    assert {abs, operator.neg, operator.invert} <= set(UNARY)
    assert np.clip in TERNARY
