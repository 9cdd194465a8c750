"""Lanes against NumPy, lane by lane, for every width in one process.

The same plain function runs on lanes, compiled, and on NumPy's scalars, one lane after the other.
One compiled function per float type and width evaluates everything that is compared.
"""

from __future__ import annotations

import ctypes
import decimal
import functools
import math
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

from nattn import lanes
from nattn.cpu import tiles
from nattn.lanes import Lanes, Struct, Tile, view

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
    """Load lanes of a kind given by name; booleans lie in bytes."""
    name = kind.literal_value
    to = tile.real if name == "real" else tile.real.of(getattr(types, name))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if name != "boolean":
            return lanes._load(b, args[2], to.llvm)
        stored = ir.VectorType(ir.IntType(8), to.width)
        return b.icmp_signed(
            "!=", lanes._load(b, args[2], stored), ir.Constant(stored, [0] * to.width)
        )

    return to(tile, kind, types.int64), codegen


def _store_each(typingctx: Any, address: Any, pitch: Any, results: Any) -> Any:
    """Store every lanes value of a tuple, `pitch` bytes apart.

    Before it in memory goes an int64 that tells its kind, after the last one a -1.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at = args[0]
        for n, ty in enumerate(results.types):
            assert isinstance(ty, Lanes)
            value = b.extract_value(args[2], n)
            if ty.dtype == types.boolean:
                value = b.zext(value, ir.VectorType(ir.IntType(8), ty.width))
            lanes._store(b, at, lanes.I64(KINDS.index(str(ty.dtype))))
            lanes._store(b, b.add(at, lanes.I64(8)), value)
            at = b.add(at, args[1])
        lanes._store(b, at, lanes.I64(-1))
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
        *(-x, abs(x), np.abs(x), np.sqrt(x)),
    )


def real_selection(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(min(x, y), max(x, y), min(x, s), max(s, x), min(k, x), max(x, k)),
        *(np.minimum(x, y), np.maximum(x, y), np.minimum(x, s), np.maximum(s, x)),
        *(np.minimum(k, x), np.maximum(x, k), np.maximum(x, True)),
        *(np.where(x < y, x, y), np.where(x < y, s, x), np.where(x < y, x, k)),
        *(np.where(x < y, s, k), np.where(x < y, k, s), np.where(x < y, x < s, y)),
        *(np.where(x < y, True, x), np.where(x < y, x, False), np.where(x < y, 0.5, True)),
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


def comparison(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x < y, x <= y, x > y, x >= y, x == y, x != y),
        *(x < s, x <= s, x > s, x >= s, x == s, x != s),
        *(s < x, s <= x, s > x, s >= x, s == x, s != x),
        *(x < k, x <= k, x > k, x >= k, k == x, k != x, x == True, x < 1),  # noqa: E712
    )


def integer_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    a = b = c = d = e = f = g = x
    a += y
    b -= y
    c //= y
    d %= y
    e &= y
    f |= y
    g ^= y
    return (
        *(x + y, x - y, x // y, x % y, x & y, x | y, x ^ y, a, b, c, d, e, f, g),
        *(-x, ~x, abs(x), np.abs(x)),
        *(min(x, y), max(x, y), np.minimum(x, y), np.maximum(x, y), np.where(x < y, x, y)),
    )


def wide_arithmetic(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what is 64 bits wide whatever the lanes are: products and 64-bit scalars."""
    a = b = x
    a *= y
    b += k
    return (
        *(x * y, x * k, k * x, x * x, a, b, x + 1, 1 - x),
        *(x + k, k - x, x // k, k // x, x % k, k % x, x & k, k | x, x ^ k),
        *(min(x, k), max(k, x), np.minimum(x, k), np.maximum(k, x), np.where(x < y, k, x)),
    )


def integer_as_real(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what makes floats of integers: the kernel's own floats, whatever the scalar's are."""
    a = x
    a /= y
    return (
        *(x / y, x / k, k / x, x + s, s - x, x * s, s / x, x // s, s % x, a),
        *(np.sqrt(x), min(x, s), np.maximum(s, x), np.where(x < s, x, s)),
    )


def integer_comparison(x: Any, y: Any, s: Any, k: Any) -> Any:
    return (
        *(x < y, x <= y, x > y, x >= y, x == y, x != y),
        *(x < k, k <= x, x > k, k >= x, x == k, k != x),
    )


def boolean(x: Any, y: Any, s: Any, k: Any) -> Any:
    a = b = c = x
    a &= y
    b |= y
    c ^= y
    return (
        *(x & y, x | y, x ^ y, ~x, a, b, c, x == y, x != y, x < y, x >= y),
        *(x & True, False | x, x ^ True, np.where(x, y, x), np.where(x, False, y)),
        *(np.where(x, True, False), np.where(x, y, True), x == (k != 0)),
    )


def boolean_as_integer(x: Any, y: Any, s: Any, k: Any) -> Any:
    """Return what counts booleans as 0 and 1."""
    return (
        *(x + y, x - y, x // y, x % y, -x, abs(x), min(x, y), max(x, y)),
        *(np.minimum(x, y), np.maximum(x, y)),
    )


def boolean_as_wide(x: Any, y: Any, s: Any, k: Any) -> Any:
    return x * y, x + k, k - x, x & k, k ^ x, np.where(x != 0, k, 7), np.where(x != 0, y, k)


def boolean_as_real(x: Any, y: Any, s: Any, k: Any) -> Any:
    return x / y, x + s, s * x, np.where(x != 0, s, 1.5), np.where(x != 0, s, y), np.sqrt(x)


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
    Comparison(comparison, "real", "real", "bool"),
    Comparison(integer_arithmetic, "int32", "int32", "int32"),
    Comparison(wide_arithmetic, "int32", "int64", "int64"),
    Comparison(integer_as_real, "int32", "real", "real"),
    Comparison(integer_comparison, "int32", "int64", "bool"),
    Comparison(integer_arithmetic, "int64", "int64", "int64"),
    Comparison(wide_arithmetic, "int64", "int64", "int64"),
    Comparison(integer_as_real, "int64", "real", "real"),
    Comparison(integer_comparison, "int64", "int64", "bool"),
    Comparison(boolean, "bool", "bool", "bool"),
    Comparison(boolean_as_integer, "bool", "int32", "int32"),
    Comparison(boolean_as_wide, "bool", "int64", "int64"),
    Comparison(boolean_as_real, "bool", "real", "real"),
]
MOST_RESULTS = 40
REAL = [n for n, c in enumerate(COMPARISONS) if "real" in (c.lanes, c.result)]
INTEGER = [n for n in range(len(COMPARISONS)) if n not in REAL]

SCALARS = [(0.75, 3), (-2.5, -1), (math.nan, 0), (-0.0, np.iinfo("i8").min), (math.inf, -7)]
"""Values of s and k."""


ALL_PAIRS = 1600
"""A multiple of every width, and at least every pair of the values below."""


@functools.cache
def operands(kind: str) -> Array:
    """Return x and y as rows: every pair of the values at which something can go wrong."""
    some: list[Any]
    if kind == "bool":
        values = np.array([False, True])
    elif kind.startswith("int"):
        end = np.iinfo(kind)
        some = [0, 1, 2, 3, 7, 8, 46341, 2**20 + 1, 2**31 - 1, end.max // 2]
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


@functools.cache
def numpy_results(n: int, scalars: int, dtype: str) -> list[Array]:
    """Evaluate a comparison's function lane by lane on NumPy's scalars."""
    c = COMPARISONS[n]
    s, k = SCALARS[scalars]
    number = np.dtype(dtype).type if c.numpy == "real" else np.int64
    with np.errstate(all="ignore"):
        x, y = operands(real(c.lanes, dtype)).astype(real(c.numpy, dtype))
        arguments = np.dtype(dtype).type(s), number(k)
        rows = [c.function(*pair, *arguments) for pair in zip(x, y, strict=True)]
    return [np.array(column).astype(real(c.result, dtype)) for column in zip(*rows, strict=True)]


def operations(tile: Tile, chosen: list[int]) -> Callable[..., None]:
    """Compile the chosen comparisons for a tile: REAL or INTEGER."""
    W, size, pitch = tile.W, tile.itemsize, 8 + 8 * tile.W
    step = pitch * MOST_RESULTS
    f = [numba.njit(c.function, inline="always") for c in COMPARISONS]
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15 = f

    def run_real(n: int, x: Any, i: Any, j: Any, p: Any, s: float, k: int, out: int) -> None:
        for m in range(0, n, W):
            x0, x1 = load_as(tile, "real", x + m * size), load_as(tile, "real", x + (n + m) * size)
            store_each(out, pitch, f0(x0, x1, s, k))
            store_each(out + step, pitch, f1(x0, x1, s, k))
            store_each(out + 2 * step, pitch, f2(x0, x1, s, k))
            store_each(out + 3 * step, pitch, f3(x0, x1, s, k))
            i0, i1 = load_as(tile, "int32", i + m * 4), load_as(tile, "int32", i + (n + m) * 4)
            store_each(out + 4 * step, pitch, f6(i0, i1, s, k))
            j0, j1 = load_as(tile, "int64", j + m * 8), load_as(tile, "int64", j + (n + m) * 8)
            store_each(out + 5 * step, pitch, f10(j0, j1, s, k))
            p0, p1 = load_as(tile, "boolean", p + m), load_as(tile, "boolean", p + n + m)
            store_each(out + 6 * step, pitch, f15(p0, p1, s, k))
            out += 7 * step

    def run_integer(n: int, x: Any, i: Any, j: Any, p: Any, s: float, k: int, out: int) -> None:
        for m in range(0, n, W):
            i0, i1 = load_as(tile, "int32", i + m * 4), load_as(tile, "int32", i + (n + m) * 4)
            store_each(out, pitch, f4(i0, i1, s, k))
            store_each(out + step, pitch, f5(i0, i1, s, k))
            store_each(out + 2 * step, pitch, f7(i0, i1, s, k))
            j0, j1 = load_as(tile, "int64", j + m * 8), load_as(tile, "int64", j + (n + m) * 8)
            store_each(out + 3 * step, pitch, f8(j0, j1, s, k))
            store_each(out + 4 * step, pitch, f9(j0, j1, s, k))
            store_each(out + 5 * step, pitch, f11(j0, j1, s, k))
            p0, p1 = load_as(tile, "boolean", p + m), load_as(tile, "boolean", p + n + m)
            store_each(out + 6 * step, pitch, f12(p0, p1, s, k))
            store_each(out + 7 * step, pitch, f13(p0, p1, s, k))
            store_each(out + 8 * step, pitch, f14(p0, p1, s, k))
            out += 9 * step

    run = {7: run_real, 9: run_integer}[len(chosen)]
    signature = types.void(*[types.int64] * 5, types.float64, types.int64, types.int64)
    return jit(run, signature)


def jit(function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(*signature, error_model="numpy")(function)
    return compiled


def compare(tile: Tile, chosen: list[int]) -> None:
    run = operations(tile, chosen)
    W = tile.W
    x, i, j, p = (operands(kind) for kind in (tile.dtype, "int32", "int64", "bool"))
    out = np.zeros((ALL_PAIRS // W, len(chosen), MOST_RESULTS, 8 + 8 * W), np.uint8)
    for scalars, (s, k) in enumerate(SCALARS):
        out[...] = 0
        run(ALL_PAIRS, *(a.ctypes.data for a in (x, i, j, p)), s, k, out.ctypes.data)
        for slot, n in enumerate(chosen):
            c = COMPARISONS[n]
            expected = numpy_results(n, scalars, tile.dtype)
            kinds = out[0, slot, : len(expected) + 1, :8].copy().view(np.int64).ravel()
            kind = real(c.result, tile.dtype)
            assert list(kinds) == [KINDS.index(kind)] * len(expected) + [-1], c
            size = np.dtype(kind).itemsize * W
            for m, wanted in enumerate(expected):
                got = out[:, slot, m, 8 : 8 + size].copy().view(kind).ravel()
                bad = (got != wanted) & ((got == got) | (wanted == wanted))
                if kind == tile.dtype and c.function is not real_selection:
                    # Which of two zeros a selection returns is left open.
                    bad |= (np.signbit(got) != np.signbit(wanted)) & (wanted == wanted)
                at = int(bad.argmax())
                assert not bad.any(), (
                    f"{c.function.__name__} of {c.lanes}, result {m}, "
                    f"x = {operands(real(c.lanes, tile.dtype))[0, at]!r}, "
                    f"y = {operands(real(c.lanes, tile.dtype))[1, at]!r}, s = {s}, k = {k}: "
                    f"{got[at]!r}, and NumPy {wanted[at]!r}"
                )


@tile_of_each_kind
def test_floats_and_conversions_to_them(tile: Tile) -> None:
    compare(tile, REAL)


@pytest.mark.parametrize("W", WIDTHS)
def test_integers_and_booleans(W: int) -> None:
    compare(Tile("float32", W, 1, 1), INTEGER)


def test_what_has_no_meaning_is_refused() -> None:
    """Already when it is compiled, by Numba's own error."""
    tile, other = Tile("float32", 8, 1, 1), Tile("float32", 4, 1, 1)
    refused: list[Callable[[int], Any]] = [
        lambda at: lanes.load(tile, at) + lanes.load(other, at),
        lambda at: ~lanes.load(tile, at),
        lambda at: lanes.load(tile, at) & lanes.load_int32(tile, at),
        lambda at: np.where(lanes.load(tile, at), 1.0, 2.0),
        lambda at: np.zeros(3)[lanes.load(tile, at)],
        lambda at: np.zeros((3, 3))[lanes.load_int32(tile, at)],
        lambda at: np.zeros(3)[lanes.load_int32(tile, at) > 0],
    ]
    for function in refused:
        with pytest.raises(numba.TypingError):
            numba.njit(types.void(types.int64))(_discard(function))


def _discard(function: Callable[[int], Any]) -> Callable[[int], None]:
    inner = numba.njit(function)

    def run(at: int) -> None:
        inner(at)

    return run


# ---------------------------------------------------------------------------------------------
# Accuracy of the elementary functions
# ---------------------------------------------------------------------------------------------

FUNCTIONS = {"exp": 2, "exp2": 4, "log": 4, "tanh": 4, "sqrt": 4, "exp2_nonpositive": 3}
"""Names, and how far they may be from the exact result in units in the last place.

exp2_nonpositive promises a relative error: its unit is the machine epsilon of the exact result.
"""


@functools.cache
def elementary(tile: Tile) -> Callable[[Array], dict[str, Array]]:
    """Compile all functions of a tile into one."""
    W, size = tile.W, tile.itemsize

    def run(n: int, x: int, out: int) -> None:
        for i in range(0, n * size, W * size):
            a = lanes.load(tile, x + i)
            lanes.store(out + i, np.exp(a))
            lanes.store(out + n * size + i, np.exp2(a))
            lanes.store(out + 2 * n * size + i, np.log(a))
            lanes.store(out + 3 * n * size + i, np.tanh(a))
            lanes.store(out + 4 * n * size + i, np.sqrt(a))
            lanes.store(out + 5 * n * size + i, lanes.exp2_nonpositive(a))
            lanes.store(out + 6 * n * size + i, math.exp(a))
            lanes.store(out + 7 * n * size + i, math.log(a))
            lanes.store(out + 8 * n * size + i, math.tanh(a))
            lanes.store(out + 9 * n * size + i, math.sqrt(a))

    function = jit(run, types.void(*[types.int64] * 3))
    names = [*FUNCTIONS, "math.exp", "math.log", "math.tanh", "math.sqrt"]

    def evaluate(x: Array) -> dict[str, Array]:
        assert x.dtype == tile.dtype
        padded = np.concatenate([x, np.ones(-len(x) % W, tile.dtype)])
        out = np.empty((len(names), len(padded)), tile.dtype)
        function(len(padded), padded.ctypes.data, out.ctypes.data)
        return dict(zip(names, out[:, : len(x)], strict=True))

    return evaluate


@functools.cache
def samples(dtype: str) -> Array:
    """Return numbers of every exponent and both signs, and many where the functions bend."""
    f = np.finfo(dtype)
    integer = np.dtype(f"u{f.dtype.itemsize}")
    count = 1 << 19
    bits = np.linspace(0, 2.0 ** (8 * f.dtype.itemsize), count, endpoint=False).astype(integer)
    rng = np.random.default_rng(0)
    bits |= rng.integers(0, 1 << (f.nmant - 11), count, integer)  # all low bits, not only zeros
    top = f.maxexp * math.log(2)
    ranges = [(-top * 1.05, top * 1.05), (-1.6 * f.maxexp, 1.1 * f.maxexp), (-3, 3), (0.3, 3)]
    ranges += [(-1e-3, 1e-3), (1 - 1e-3, 1 + 1e-3), (-25, 25)]
    dense = [rng.uniform(*ends, count >> 2) for ends in ranges]
    around = np.array([0, 1, -1, 2, math.log(2) / 2, math.sqrt(0.5), top, f.minexp, f.maxexp])
    around = np.append(around, [math.log(f.tiny), math.log(f.tiny) - f.nmant * math.log(2)])
    near = (
        around.astype(dtype)[:, None]
        + np.arange(-40, 41) * np.spacing(around.astype(dtype))[:, None]
    )
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, f.max, -f.max, f.tiny, -f.tiny]
    special += [f.smallest_subnormal, -f.smallest_subnormal]
    whole = np.arange(-1100, 1100)
    parts = [bits.view(dtype), *dense, near.ravel(), special, whole]
    return np.concatenate([np.asarray(part).astype(dtype) for part in parts])


def wider(dtype: str) -> Any:
    """Return a float type with at least 10 more bits, or None where there is none."""
    wide = np.float64 if dtype == "float32" else np.longdouble
    return wide if np.finfo(wide).nmant >= np.finfo(dtype).nmant + 10 else None


def domain(name: str, x: Array) -> Array:
    return x[~(x > 0)] if name == "exp2_nonpositive" else x


def assert_accurate(name: str, got: Array, exact: Array) -> None:
    """Assert that results are as near the exact ones as promised; `exact` is of a wider type."""
    f = np.finfo(got.dtype)
    ulps = FUNCTIONS[name]
    exponential = name.startswith("exp")
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(rounded))
        assert np.array_equal(np.signbit(got)[got == got], np.signbit(exact)[got == got])
        # One ulp beyond the largest number is as long as one below it: there inf stands for
        # the power of two that would come next.
        end = exact.dtype.type(2.0) ** f.maxexp
        unit = np.spacing(np.minimum(np.abs(rounded), f.max)).astype(exact.dtype)
        if name == "exp2_nonpositive":
            unit = f.eps * exact
        value = np.where(np.isinf(got), np.copysign(end, got), got.astype(exact.dtype))
        target = np.clip(exact, -end, end)
        if name == "log":
            value, target = np.where(np.isinf(got), got, value), exact
        error = np.where(value == target, 0, np.abs(value - target) / unit)
        if exponential:
            # No subnormal number is ever a result: 0 instead.
            assert not np.any((got != 0) & (np.abs(got) < f.tiny))
            small = exact < f.tiny * (1 - ulps * f.eps)
            assert not np.any(got[small])
            error[exact < f.tiny * (1 + ulps * f.eps)] = 0
    worst = np.nanargmax(error)
    assert error[worst] <= ulps, f"{name}: {got[worst]!r} for {exact[worst]!r}: {error[worst]} ulp"


@dtype_of_each_kind
@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name: str, dtype: str) -> None:
    wide = wider(dtype)
    if wide is None:
        pytest.skip("no float type here is wider than float64: see test_accuracy_in_decimals")
    x = domain(name, samples(dtype))
    got = elementary(Tile(dtype, 8, 2, 3))(x)[name]
    with np.errstate(all="ignore"):
        function = getattr(np, name.removesuffix("_nonpositive"))
        assert_accurate(name, got, function(x.astype(wide)))


DECIMAL_FUNCTIONS: dict[str, Callable[[decimal.Decimal], decimal.Decimal]] = {
    "exp": lambda x: x.exp(),
    "exp2": lambda x: decimal.Decimal(2) ** x,
    "log": lambda x: x.ln(),
    "sqrt": lambda x: x.sqrt(),
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1),
}


@dtype_of_each_kind
@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy_in_decimals(name: str, dtype: str) -> None:
    """The same against decimal arithmetic, which every machine has: fewer numbers."""
    f = np.finfo(dtype)
    function = DECIMAL_FUNCTIONS[name.removesuffix("_nonpositive")]
    x = domain(name, samples(dtype)[:: 1 << 10])
    x = x[np.isfinite(x)]
    # Where nothing can overflow or vanish, the ratio to the exact result tells all.
    if name.startswith("exp"):
        bound = (-f.minexp - 1) * (math.log(2) if name == "exp" else 1)
        x = x[np.abs(x) < bound]
    elif name == "tanh":
        x = x[(np.abs(x) < 50) & (np.abs(x) > f.tiny)]
    else:
        x = x[x > 0]
    got = elementary(Tile(dtype, 8, 2, 3))(x)[name]
    assert len(x) > 300
    with decimal.localcontext(prec=400 if name == "tanh" and dtype == "float64" else 80):
        for a, y in zip(x.tolist(), got, strict=True):
            exact = function(decimal.Decimal(a))
            error = abs(decimal.Decimal(float(y)) - exact)
            if name == "exp2_nonpositive":
                unit = decimal.Decimal(float(f.eps)) * exact
            else:
                # The spacing of the numbers below the exact result.
                unit = decimal.Decimal(float(np.spacing(np.dtype(dtype).type(abs(exact)))))
                assert y or not exact
            assert error <= FUNCTIONS[name] * unit, (name, a, y, exact)


@tile_of_each_kind
def test_every_width_computes_the_same_bits(tile: Tile) -> None:
    x = samples(tile.dtype)[::7]
    expected = elementary(Tile(tile.dtype, 8, 2, 3))(x)
    for name, got in elementary(tile)(x).items():
        inside = ~(x > 0) if name == "exp2_nonpositive" else np.full(len(x), True)
        reference = expected[name.removeprefix("math.")]
        np.testing.assert_array_equal(got[inside], reference[inside], err_msg=name)
        numbers = inside & ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(reference[numbers]))


@dtype_of_each_kind
def test_special_values(dtype: str) -> None:
    f = np.finfo(dtype)
    inf, nan = math.inf, math.nan
    below = math.log(f.tiny) - 1
    tiny, most, least = f.tiny, f.max, f.smallest_subnormal
    expected: dict[str, dict[Any, Any]] = {
        "exp": {-inf: 0, inf: inf, nan: nan, 0: 1, below: 0, 0.7 * f.maxexp: inf, -most: 0},
        "exp2": {-inf: 0, inf: inf, nan: nan, 5: 32, f.minexp: tiny, f.minexp - 1: 0, 1.5e4: inf},
        "log": {-0.0: -inf, inf: inf, nan: nan, 1: 0, -1: nan, -inf: nan, -tiny: nan},
        "tanh": {0: 0, inf: 1, -inf: -1, nan: nan, 1e3: 1, -most: -1, tiny: tiny, least: least},
        "sqrt": {0: 0, inf: inf, nan: nan, -1: nan, -inf: nan, 2.25: 1.5, -least: nan},
        "exp2_nonpositive": {0: 1, -inf: 0, nan: nan, f.minexp: tiny, f.minexp - 1: 0, -1: 0.5},
    }
    evaluate = elementary(Tile(dtype, 8, 2, 3))
    for name, pairs in expected.items():
        got = evaluate(np.array(list(pairs), dtype))[name]
        np.testing.assert_array_equal(got, np.array(list(pairs.values()), dtype), err_msg=name)
        assert not np.signbit(got[got == 0]).any(), name
    # The sign of zero survives where the function is odd.
    zeros = evaluate(np.array([-0.0, 0.0], dtype))
    assert np.all(zeros["log"] == -inf)
    assert list(np.signbit(zeros["tanh"])) == list(np.signbit(zeros["sqrt"])) == [True, False]


@tile_of_each_kind
def test_fma(tile: Tile) -> None:
    """One rounding where the processor has the instruction, two where it has not."""

    def run(x: int, y: int, z: int, out: int) -> None:
        a, b, c = lanes.load(tile, x), lanes.load(tile, y), lanes.load(tile, z)
        lanes.store(out, lanes.fma(a, b, c))
        lanes.store(out + tile.W * tile.itemsize, lanes.fma(a, 2, 0.5))

    eps = np.finfo(tile.dtype).eps
    x, y, z = (np.full(tile.W, v, tile.dtype) for v in (1 + eps, 1 - eps, -1))
    out = np.empty((2, tile.W), tile.dtype)
    jit(run)(*(a.ctypes.data for a in (x, y, z, out)))
    expected = -eps * eps if tiles.cpu().fma else (x * y + z)[0]
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[1], x * 2 + out.dtype.type(0.5))


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

    x = np.arange(1, W + 1).astype(tile.dtype) / 3
    source = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:]  # unaligned
    out, integers = np.zeros(6 * W, tile.dtype), np.zeros(2 * W + 3, np.int32)
    jit(run)(source.ctypes.data, out.ctypes.data, integers.ctypes.data, 0.1, -5, True)
    expected = [0.1] * W + [-5] * W + [1] * W + [*x] + [*(x + x)] + [-5] + [0] * (W - 1)
    np.testing.assert_array_equal(out, np.array(expected, tile.dtype))
    steps = np.arange(-5, W - 5)
    np.testing.assert_array_equal(integers[: 2 * W], np.tile(steps, 2))
    assert integers[2 * W] == -7
    first = int(steps[:2].astype("i4").view("i8")[0])
    assert integers[2 * W + 1 :].copy().view("i8")[0] == first + 1


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


@dtype_of_each_kind
@pytest.mark.parametrize("W", WIDTHS)
def test_gather(W: int, dtype: str) -> None:
    """``array[lanes]``: from every dtype and any strides, and never from beyond the ends."""
    tile = Tile(dtype, W, 1, 1)
    pitch = 8 + 8 * W

    def run(i: int, j: int, out: int, f4: Any, f8: Any, i1: Any, u1: Any, i2: Any, u2: Any,
            i4: Any, u4: Any, i8: Any, u8: Any, b1: Any) -> None:  # fmt: skip
        short, long = load_as(tile, "int32", i), load_as(tile, "int64", j)
        store_each(out, pitch, (
            f4[short], f8[short], i1[short], u1[short], i2[short], u2[short], i4[short],
            u4[short], i8[short], u8[short], b1[short], f8[long], i1[long], u4[long], b1[long],
        ))  # fmt: skip

    names = ["float32", "float64", "int8", "uint8", "int16", "uint16", "int32"]
    names += ["uint32", "int64", "uint64", "bool", "float64", "int8", "uint32", "bool"]
    gather = jit(run)

    def becomes(name: str) -> str:
        if name == "bool":
            return name
        if name.startswith("float"):
            return dtype
        return "int64" if name in ("uint32", "int64", "uint64") else "int32"

    def array(name: str, n: int, step: int) -> Array:
        x: Array
        bits = np.random.default_rng(n).integers(0, 256, 24 * n, np.uint8)
        if name == "bool":
            x = np.arange(3 * n) % 3 == 0
        elif name.startswith("float"):
            x = np.linspace(-1, 1, 3 * n).astype(name)
        else:
            x = bits.view(name)[: 3 * n]
        # What lies before and behind the array must not be read.
        return x[n : 2 * n][::step] if step < 0 else x[::step][:n]

    for n, step in ((1, 1), (13, 1), (13, 3), (40, -1)):
        arrays = [array(name, n, step) for name in names[:11]]
        ends = np.array([0, n - 1, -1, -n, n, -n - 1, 2 * n, -3 * n, 2**31 - 1, -(2**31)])
        index = np.concatenate([ends, np.arange(-n - 3, n + 3)])
        far = np.where(np.abs(index) == 2**31 - 1, np.iinfo("i8").max, index)
        far = np.where(far == -(2**31), np.iinfo("i8").min, far)
        for at in range(0, len(index) - W + 1, W - 1):
            i, j = index[at : at + W].astype("i4"), far[at : at + W].copy()
            out = np.zeros((len(names) + 1, pitch), np.uint8)
            gather(*(a.ctypes.data for a in (i, j, out)), *arrays)
            where = np.clip(np.where(i < 0, i.astype("i8") + n, i), 0, n - 1)
            sources = [*arrays, *arrays[1:3], arrays[7], arrays[10]]
            for row, name, source in zip(out, names, sources, strict=False):
                kind = becomes(name)
                assert row[:8].view("i8")[0] == KINDS.index(kind), name
                got = row[8 : 8 + W * np.dtype(kind).itemsize].view(kind)
                np.testing.assert_array_equal(got, source[where].astype(kind), err_msg=name)


def test_gather_from_an_empty_array() -> None:
    """Nothing is read: such an array may point anywhere."""
    tile = Tile("float32", 8, 1, 1)
    nowhere = np.ctypeslib.as_array((ctypes.c_float * 0).from_address(8))
    assert nowhere.size == 0

    def run(x: Any, out: int) -> None:
        lanes.store(out, x[lanes.iota(tile, -3)])

    out = np.ones(8, np.float32)
    jit(run)(nowhere, out.ctypes.data)
    np.testing.assert_array_equal(out, 0)


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
