"""Lanes against NumPy, lane by lane, for every width in one process.

The same plain function runs on lanes, compiled, and on NumPy's scalars, one lane after the other.
One compiled function per float type and width evaluates everything that is compared.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nattn.backends.cpu import tiles
from nattn.vectors import lanes
from nattn.vectors.elementary import I64, constant, vector_type
from nattn.vectors.lanes import Lanes, Layout, Struct, Tile, view

Array = NDArray[Any]

WIDTHS = (16, 8, 4)
TILES = [Tile(dtype, W, 2, 3) for dtype in ("float32", "float64") for W in WIDTHS]
KINDS = ("bool", "int32", "int64", "float32", "float64")

tile_of_each_kind = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.dtype}x{t.W}")
dtype_of_each_kind = pytest.mark.parametrize("dtype", ["float32", "float64"])


# ---------------------------------------------------------------------------------------------
# Lanes of any kind from memory, and to memory with their kind
# ---------------------------------------------------------------------------------------------


def _load_as(typingctx: Any, tile: Any, kind: Any, address: Any) -> Any:
    """Load lanes of a kind given by name; booleans lie in bytes.

    "narrow" is int32 from a memory of int64, known to be at most `lanes.INDEX_BOUND`; "inner" is
    int32 known to be at most 2**31 - 2. A name after "one " means one number for all lanes.
    """
    *one, name = kind.literal_value.split(" ")
    to = tile.real if not one else Lanes(tile.real.dtype, 1)
    if name == "narrow":
        to = to.of(types.int32, lanes.INDEX_BOUND)
    elif name == "inner":
        to = to.of(types.int32, 2**31 - 2)
    elif name != "real":
        to = to.of(types.boolean if name == "bool" else getattr(types, name))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if name == "narrow":
            return b.trunc(lanes._load(b, args[2], vector_type(I64, to.width)), to.llvm)
        if name != "bool":
            return lanes._load(b, args[2], to.llvm)
        stored = vector_type(ir.IntType(8), to.width)
        return b.icmp_signed("!=", lanes._load(b, args[2], stored), constant(stored, 0))

    return to(tile, kind, types.int64), codegen


def _store_each(typingctx: Any, address: Any, pitch: Any, results: Any) -> Any:
    """Store every lanes value of a tuple, `pitch` bytes apart.

    Before it in memory go two int32, its kind and its width; after the last one comes a -1.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at = args[0]
        for n, ty in enumerate(results.types):
            assert isinstance(ty, Lanes)
            value = b.extract_value(args[2], n)
            if ty.dtype == types.boolean:
                value = b.zext(value, vector_type(ir.IntType(8), ty.width))
            lanes._store(b, at, I64(KINDS.index(str(ty.dtype)) + (ty.width << 32)))
            lanes._store(b, b.add(at, I64(8)), value)
            at = b.add(at, args[1])
        lanes._store(b, at, I64(-1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, results), codegen


load_as = intrinsic(prefer_literal=True)(_load_as)
store_each = intrinsic(_store_each)


# ---------------------------------------------------------------------------------------------
# What is compared: each function returns results of one kind
# ---------------------------------------------------------------------------------------------


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


def jit(function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(*signature, error_model="numpy")(function)
    return compiled


def in_turn(steps: list[Callable[..., int]]) -> Callable[..., int]:
    """Return one compiled function that calls several, each with the address the last returned."""
    if len(steps) == 1:
        return steps[0]
    first, second = in_turn(steps[: len(steps) // 2]), in_turn(steps[len(steps) // 2 :])

    def run(args: Any, out: int) -> int:
        return second(args, first(args, out))

    return jit(run)


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


def compile_only(function: Callable[[int], Any]) -> None:
    inner = jit(function)

    def run(at: int) -> None:
        inner(at)

    jit(run, types.void(types.int64))


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


# ---------------------------------------------------------------------------------------------
# What is registered
# ---------------------------------------------------------------------------------------------

OPERATIONS = [
    (function, operation, arity)
    for arity, table in enumerate((lanes.UNARY, lanes.BINARY, lanes.TERNARY), start=1)
    for function, operation in table.items()
]

ON_ARRAYS: dict[Any, Any] = {abs: np.abs, min: np.minimum, max: np.maximum, math.pow: np.power}
"""NumPy's names for what Python calls otherwise, where the two differ."""


def test_every_function_is_registered_under_its_name() -> None:
    """Whether `np.log` is a logarithm: how exact one is, is the matter of test_elementary."""
    dtype = "float32"
    tile = Tile(dtype, 4, 1, 1)
    W, pitch = tile.W, 8 + 8 * tile.W

    def one(function: Any, operation: Any, arity: int) -> Callable[..., int]:
        if operation.meet in (lanes._bits, lanes._integers):
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
        integer = operation.meet in (lanes._bits, lanes._integers)
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
    assert {getattr(np, name) for name in names.split()} <= set(lanes.UNARY)
    names = "power minimum maximum logical_and logical_or"
    assert {getattr(np, name) for name in names.split()} <= set(lanes.BINARY)
    assert {operator.pow, min, max} <= set(lanes.BINARY)
    assert {abs, operator.neg, operator.invert} <= set(lanes.UNARY)
    assert np.clip in lanes.TERNARY


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


# ---------------------------------------------------------------------------------------------
# Making lanes, and memory
# ---------------------------------------------------------------------------------------------


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
def test_splat_iota_read_and_write(tile: Tile) -> None:
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
        lanes.store(integers, lanes.iota(tile, count))
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
    with np.errstate(over="ignore"):
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
        lanes.gather_transposed(tile, tile, base, offsets, out, 2 * W * size)

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


# ---------------------------------------------------------------------------------------------
# What functions are bound to
# ---------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("tile", [TILES[0], TILES[5]], ids=lambda t: f"{t.dtype}x{t.W}")
def test_bound_arrays_of_every_dtype(tile: Tile) -> None:
    """``array[lanes]``: any strides, whether far or not, and never from beyond the ends."""
    picks: list[Callable[..., Any]] = [
        lambda i, j, o, x: x[i],
        lambda i, j, o, x: x[j],
        lambda i, j, o, x: x[o],
    ]
    for position, name in enumerate(STORED_AS):
        far = position % 2 == TILES.index(tile) % 2
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


@tile_of_each_kind
def test_register_tile(tile: Tile) -> None:
    """The outer products and what is done with their sums; small integers, so all is exact."""
    W, MV, NR, size = tile.W, tile.MV, tile.NR, tile.itemsize
    row = tile.lanes * size

    def run(depth: int, a: int, x: int, stride: int, alpha: int, out: int, top: int) -> None:
        acc, seen = lanes.zeros(tile), lanes.zeros(tile)
        for n in range(depth):
            acc = lanes.outer_fma(tile, acc, a + n * row, x + n * size, stride)
            seen = lanes.outer_fma_visible(tile, seen, a + n * row, x + n * size, stride)
        lanes.store_tile(tile, acc, out, top)
        lanes.store_tile(tile, seen, out + NR * row, top + row)
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


RECORD = Struct("TestRecord", ("first", "second"), ("third",))


def test_struct() -> None:
    assert RECORD.dtype == np.dtype([("first", "i8"), ("second", "i8"), ("third", "f8")])
    with pytest.raises(KeyError):
        RECORD.field("fourth")

    def run(address: int) -> float:
        r = view(RECORD, address)
        r.second = r.first + 1
        r.third, total = 3, r.third + r.second
        return float(total)

    record = np.array([(41, 0, 0.5)], RECORD.dtype)
    assert jit(run)(record.ctypes.data) == 42.5
    assert record[0].tolist() == (41, 42, 3.0)

    def wrong(address: int) -> int:
        return view(RECORD, address).fourth  # type: ignore[no-any-return]

    with pytest.raises(numba.TypingError, match="fourth"):
        jit(wrong)(record.ctypes.data)


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
