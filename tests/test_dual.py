"""Dual numbers: tangents against differences of the same functions on NumPy, values against lanes.

The same plain function runs on dual numbers, on lanes and, in the widest float type there is, on
NumPy's scalars. One compiled function per float type and width evaluates everything.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pytest
import registry
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nattn.backends.cpu import score
from nattn.functions import binding, mods, on_lanes
from nattn.vectors import dual, lanes
from nattn.vectors.dual import Dual, chain, seed, tangent, value
from nattn.vectors.lanes import Lanes, Tile
from nattn.vectors.lanes.conversions import as_lanes
from nattn.vectors.lanes.memory import emit_store
from nattn.vectors.vector import I64

Array = NDArray[Any]

TILES = [Tile(dtype, W, 1, 1) for dtype in ("float32", "float64") for W in (16, 8, 4, 2, 1)]

tile_of_each_kind = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.dtype}x{t.W}")
dtype_of_each_kind = pytest.mark.parametrize("dtype", ["float32", "float64"])

KINDS = ("bool", "lanes", "dual")


def _store_each(typingctx: Any, tile: Any, address: Any, pitch: Any, results: Any) -> Any:
    """Store every result of a tuple, `pitch` bytes apart: its kind (int64), value and tangent.

    After the last one in memory goes a -1.
    """
    real = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at, size = args[1], tile.tile.itemsize * real.width
        for n, ty in enumerate(results.types):
            x = b.extract_value(args[3], n)
            plain = ty.lanes if isinstance(ty, Dual) else ty
            assert isinstance(plain, Lanes)
            kind = "dual" if isinstance(ty, Dual) else "lanes"
            if plain.dtype == types.boolean:
                kind = "bool"
            emit_store(b, at, I64(KINDS.index(kind)))
            parts = [b.extract_value(x, 0), b.extract_value(x, 1)] if kind == "dual" else [x]
            for m, part in enumerate(parts):
                wide = as_lanes(context, b, part, plain, real).value
                emit_store(b, b.add(at, I64(8 + m * size)), wide)
            at = b.add(at, args[2])
        emit_store(b, at, I64(-1))
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64, results), codegen


store_each = intrinsic(_store_each)


def jit(function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(*signature, error_model="numpy")(function)
    return compiled


# ---------------------------------------------------------------------------------------------
# What is compared
#
# x and y are dual numbers and so are u > 0 and v > 0; c is lanes, o lanes of width 1, s a float
# and k an integer. In the reference all are scalars.
# ---------------------------------------------------------------------------------------------


def arithmetic(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(x + y, x + c, c + x, x + o, o + x, x + s, s + x, x + k, k + x),
        *(x - y, x - c, c - x, x - o, o - x, x - s, s - x, x - k, k - x),
        *(x * y, x * c, c * x, x * o, o * x, x * s, s * x, x * k, k * x),
        *(x / y, x / c, c / x, x / o, o / x, x / s, s / x, x / k, k / x),
        *(-x, +x, x + True, x * x, x / x, x - x, 2 * x + 1, 1.5 - x / 4),
    )


def steps(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(x % y, x % c, c % x, x % o, o % x, x % s, s % x, x % k, k % x),
        *(x // y, c // x, x // s, k // x, np.floor(x), np.ceil(x), np.trunc(x), np.rint(x)),
        *(np.sign(x), np.sign(x) * y),
    )


def smooth(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(np.exp(x), np.exp2(x), np.expm1(x), np.tanh(x), np.sin(x), np.cos(y)),
        *(np.log(u), np.log1p(u), np.log1p(-0.2 * x), np.sqrt(u), abs(x), np.abs(x)),
    )


def powers(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(u**v, u**c, u**o, u**s, u**k, u**0.5, 2.0**x, abs(c) ** x, abs(o) ** x, abs(s) ** x),
        *(x**k, x**0, x**1, x**2, x**3, x**4, x**5, x**-1, x**2.0, x**True),
        *(np.power(u, x), np.power(x, k), np.power(3, x), np.square(x)),
    )


def selection(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(min(x, y), max(x, y), min(x, c), max(c, x), min(o, x), max(x, o), min(x, s), max(k, x)),
        *(np.minimum(x, y), np.maximum(x, y), np.minimum(x, c), np.maximum(c, x)),
        *(np.minimum(o, x), np.maximum(x, o), np.minimum(x, s), np.maximum(k, x)),
        *(np.where(x < y, x, y), np.where(x > s, c, x), np.where(c > o, x, k)),
        *(np.where(o > s, y, x), np.where(c < k, o, x), np.where(x >= y, s, y * x)),
        *(np.clip(x, -1, 1), np.clip(x, s, y), np.clip(c, x, y), np.clip(y, o, x)),
    )


def plain(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(x < y, x <= y, x > y, x >= y, x == y, x != y, x < c, o >= x, x > s, k != x, x == 1),
        *((x > 0) & (y < 1), (x > 0) | (y < 1), ~(x < c)),
        *(np.logical_and(x, y < 1), np.logical_or(c > o, x), np.logical_not(x)),
        *(np.isfinite(x), np.isnan(x), np.isinf(x)),
    )


def in_place(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    a = b = d = e = f = g = x
    a += y
    b -= c
    d *= y
    e /= s
    f %= y
    g //= y
    n = c
    n *= x
    total = 0.0
    for m in range(3):
        total = total + x * m
    return a, b, d, e, f, g, n, total


GROUPS = (arithmetic, steps, smooth, powers, selection, plain, in_place)


@functools.cache
def labels(group: Callable[..., Any]) -> list[str]:
    """Return each result as it is written."""
    source = textwrap.dedent(inspect.getsource(group))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.FunctionDef)
    last = body.body[-1]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    found: list[ast.expr] = []
    for e in last.value.elts:
        found += (
            e.value.elts if isinstance(e, ast.Starred) and isinstance(e.value, ast.Tuple) else [e]
        )
    return [ast.get_source_segment(source, e) or "" for e in found]


RESULT = 8
"""Bytes before each result: its kind."""


@functools.cache
def compiled(tile: Tile, group: Callable[..., Any]) -> Callable[..., None]:
    """Compile a group for a tile: on dual numbers, and then on their values."""
    one = Tile(tile.dtype, 1, 1, 1)
    W, size, count = tile.W, tile.itemsize, len(labels(group)) + 1
    pitch = RESULT + 2 * W * size
    evaluate = numba.njit(group, inline="always")

    def run(n: int, data: int, width_one: int, s: float, k: int, out: int) -> None:
        for i in range(data, data + n * size, W * size):
            a, b = lanes.load(tile, i), lanes.load(tile, i + 2 * n * size)
            d, e = lanes.load(tile, i + 4 * n * size), lanes.load(tile, i + 6 * n * size)
            x = dual.dual(a, lanes.load(tile, i + n * size))
            y = dual.dual(b, lanes.load(tile, i + 3 * n * size))
            u = dual.dual(d, lanes.load(tile, i + 5 * n * size))
            v = dual.dual(e, lanes.load(tile, i + 7 * n * size))
            c, o = lanes.load(tile, i + 8 * n * size), lanes.load(one, width_one)
            store_each(tile, out, pitch, evaluate(x, y, u, v, c, o, s, k))
            store_each(tile, out + count * pitch, pitch, evaluate(a, b, d, e, c, o, s, k))
            out += 2 * count * pitch

    return jit(run, types.void(*[types.int64] * 3, types.float64, types.int64, types.int64))


OPERANDS = ("x", "dx", "y", "dy", "u", "du", "v", "dv", "c")


@dataclass(frozen=True)
class Inputs:
    """Samples: nine rows in the order of `OPERANDS`, and three numbers."""

    data: Array
    o: float
    s: float
    k: int


@dataclass(frozen=True)
class Results:
    """What a group gave: for each label its kind, and a value and tangent for each sample."""

    kinds: list[str]
    values: Array
    tangents: Array


def evaluate(tile: Tile, group: Callable[..., Any], inputs: Inputs) -> tuple[Results, Results]:
    """Return what a group gives on dual numbers, and on lanes."""
    W, size = tile.W, tile.itemsize
    count, n = len(labels(group)), inputs.data.shape[1]
    padded = np.pad(inputs.data, ((0, 0), (0, -n % W)), constant_values=1)
    padded = np.ascontiguousarray(padded, tile.dtype)
    blocks = padded.shape[1] // W
    out = np.zeros((blocks, 2, count + 1, RESULT + 2 * W * size), np.uint8)
    o = np.array([inputs.o], tile.dtype)
    addresses = padded.ctypes.data, o.ctypes.data
    compiled(tile, group)(padded.shape[1], *addresses, inputs.s, inputs.k, out.ctypes.data)
    both = []
    for part in out.transpose(1, 2, 0, 3):
        kinds = part[:, 0, :RESULT].copy().view(np.int64).ravel()
        assert kinds[-1] == -1
        numbers = part[:-1, :, RESULT:].copy().view(tile.dtype)
        value = numbers[..., :W].reshape(count, -1)[:, :n]
        slope = numbers[..., W:].reshape(count, -1)[:, :n]
        both.append(Results([KINDS[m] for m in kinds[:-1]], value, slope))
    return both[0], both[1]


def assert_same(got: Array, expected: Array, what: str = "") -> None:
    """Assert that all bits are the same, but for those of NaN."""
    np.testing.assert_array_equal(got, expected, err_msg=what)
    numbers = ~np.isnan(expected)
    signs = np.signbit(got[numbers]), np.signbit(expected[numbers])
    np.testing.assert_array_equal(*signs, err_msg=what)


# ---------------------------------------------------------------------------------------------
# Tangents against differences
# ---------------------------------------------------------------------------------------------

WIDE = np.longdouble
RATIO = float(np.finfo(WIDE).eps) ** (1 / 7)
"""Relative step of a difference of order 6: it errs as RATIO**6, and by rounding as eps / RATIO."""

WEIGHTS = {1: 3 / WIDE(4), 2: -3 / WIDE(20), 3: 1 / WIDE(60)}


def difference(f: Callable[[Any], Any], step: Any) -> Any:
    """Return the derivative of f at 0 from f at up to 3 steps on both sides."""
    return sum(w * (f(m * step) - f(-m * step)) for m, w in WEIGHTS.items()) / step


@functools.cache
def samples(dtype: str) -> tuple[Inputs, ...]:
    """Return random operands away from where a derivative jumps, in two sets."""
    rng = np.random.default_rng(0)
    sets = []
    for o, s, k in ((-1.25, 0.75, 3), (2.5, -1.625, -2)):
        x, y, c = (rng.uniform(0.3, 4, 4000) * rng.choice([-1, 1], 4000) for _ in range(3))
        dx, dy, du, dv = rng.standard_normal((4, 4000))
        data = np.array([x, dx, y, dy, abs(x), du, abs(y), dv, c]).astype(dtype)
        x, y, c = data[[0, 2, 8]].astype(float)
        others = [y, c, *(np.full_like(x, v) for v in (o, s, k, 1.0, -1.0, 2.0, -2.0))]
        ratios = [ratio for v in others for ratio in (x / v, v / x)] + [y / c, 2 * x]
        near = [abs(ratio - np.rint(ratio)) < 0.05 for ratio in ratios]
        near += [abs(v - w) < 0.05 for v in (y, c) for w in (o, s, k)]
        data = data[:, ~np.any(near, axis=0)][:, :48]
        assert data.shape[1] == 48
        sets.append(Inputs(data, o, s, k))
    return tuple(sets)


def on_numpy(group: Callable[..., Any], inputs: Inputs, sample: int) -> Callable[..., Array]:
    """Return a group's results on NumPy at one sample, as a function of steps in x and y."""
    x, dx, y, dy, u, du, v, dv, c = inputs.data[:, sample].astype(WIDE)
    o, s = WIDE(inputs.o), WIDE(inputs.s)

    def at(tx: Any, ty: Any) -> Array:
        operands = x + tx * dx, y + ty * dy, u + tx * du, v + ty * dv
        return np.array([WIDE(r) for r in group(*operands, c, o, s, inputs.k)])

    return at


@functools.cache
def expected(group: Callable[..., Any], dtype: str) -> list[tuple[Array, Array, Array]]:
    """Return for each set the values, the two parts of the tangents, and how far off those may be.

    The difference errs by its step to the 6th times the seventh derivative / 140, which is largest,
    in units of the operands and of the first derivative, for x**-4: 5 * 6 * 7 * 8 * 9 * 10 / 140.
    """
    found = []
    for inputs in samples(dtype):
        columns = []
        for sample in range(inputs.data.shape[1]):
            f = on_numpy(group, inputs, sample)
            x, dx, y, dy, _, du, _, dv, _ = abs(inputs.data[:, sample].astype(WIDE))
            scale = min(x, y, WIDE(1))
            steps = RATIO * scale / max(dx, du), RATIO * scale / max(dy, dv)
            center = f(WIDE(0), WIDE(0))
            in_x, in_y = functools.partial(f, ty=WIDE(0)), functools.partial(f, WIDE(0))
            parts = difference(in_x, steps[0]), difference(in_y, steps[1])
            error = RATIO**6 * sum(
                1080 * abs(part) + abs(center) * RATIO / step
                for part, step in zip(parts, steps, strict=True)
            )
            columns.append((center, np.stack(parts), error))
        rows = [np.stack(row, axis=-1) for row in zip(*columns, strict=True)]
        found.append((rows[0], rows[1], rows[2]))
    return found


ULPS = 16
"""Roundings in a rule, elementary functions with up to 4 ulp included, in units of eps."""


@dtype_of_each_kind
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_tangents(group: Callable[..., Any], dtype: str) -> None:
    tile = Tile(dtype, 8 if dtype == "float32" else 4, 1, 1)
    eps = float(np.finfo(dtype).eps)
    for inputs, (_, parts, errors) in zip(samples(dtype), expected(group, dtype), strict=True):
        got, on_lanes = evaluate(tile, group, inputs)
        assert_same(got.values, on_lanes.values)
        exact = parts.sum(axis=0)
        # Rounding errors are relative to the parts of a sum, and for functions that saturate,
        # such as tanh, to their largest slope.
        sizes = abs(inputs.data[1::2]).max(axis=0).astype(WIDE)
        allowed = ULPS * eps * (abs(parts).sum(axis=0) + sizes) + errors
        for n, label in enumerate(labels(group)):
            if got.kinds[n] != "dual":
                assert np.all(exact[n] == 0), label
                continue
            assert got.kinds[n] == "dual" != on_lanes.kinds[n]
            bad = abs(got.tangents[n] - exact[n]) > allowed[n]
            at = int(bad.argmax())
            assert not bad.any(), (
                f"{label} with {dict(zip(OPERANDS, inputs.data[:, at], strict=True))}, "
                f"{inputs.o=}, {inputs.s=}, {inputs.k=}: {got.tangents[n][at]!r}, "
                f"and by differences {exact[n][at]!r}, within {allowed[n][at]}"
            )


def some(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    """Use every way in which a rule meets lanes, lanes of width 1 and scalars."""
    return (
        *(x + y, c - x, x * o, x / s, k % x, o // x, np.tanh(x), np.sqrt(u), abs(x) + o),
        *(max(o, x), np.minimum(y, s), np.where(o < s, x, c), np.where(x < c, o, y), x < o),
    )


@dtype_of_each_kind
def test_every_width_computes_the_same_bits(dtype: str) -> None:
    inputs = samples(dtype)[0]
    first: Results | None = None
    for W in (16, 8, 4, 1):
        got, on_lanes = evaluate(Tile(dtype, W, 1, 1), some, inputs)
        assert_same(got.values, on_lanes.values)
        if first is None:
            first = got
        assert got.kinds == first.kinds
        for n, label in enumerate(labels(some)):
            assert_same(got.values[n], first.values[n], label)
            assert_same(got.tangents[n], first.tangents[n], label)


def twins(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    """Return pairs that are the same; float types are all that of the lanes."""
    return (
        *(np.float32(x), x, np.float64(x), x),
        *(math.exp(x), np.exp(x), math.log(u), np.log(u), math.sqrt(u), np.sqrt(u)),
        *(math.tanh(x), np.tanh(x), math.sin(x), np.sin(x), math.cos(x), np.cos(x)),
        *(math.expm1(x), np.expm1(x), math.log1p(u), np.log1p(u)),
    )


@dtype_of_each_kind
def test_twins(dtype: str) -> None:
    got, _ = evaluate(Tile(dtype, 4, 1, 1), twins, samples(dtype)[0])
    for results in (got.values, got.tangents):
        assert_same(results[::2], results[1::2])
    assert set(got.kinds) == {"dual"}


# ---------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------

inf, nan = math.inf, math.nan

EDGES: list[tuple[Callable[..., Any], str, dict[str, float], float | str]] = [
    # |x|' = 0 at 0
    (smooth, "abs(x)", {"x": 0.0, "dx": 3}, 0),
    (smooth, "abs(x)", {"x": -0.0, "dx": 3}, 0),
    (smooth, "np.abs(x)", {"x": -2, "dx": 3}, -3),
    (smooth, "np.abs(x)", {"x": inf, "dx": 3}, 3),
    # the first argument at a tie
    (selection, "min(x, y)", {"x": 1, "dx": 2, "y": 1, "dy": 3}, 2),
    (selection, "max(x, y)", {"x": 1, "dx": 2, "y": 1, "dy": 3}, 2),
    (selection, "np.minimum(x, y)", {"x": 1, "dx": 2, "y": 1, "dy": 3}, 2),
    (selection, "np.maximum(x, y)", {"x": 1, "dx": 2, "y": 1, "dy": 3}, 2),
    (selection, "np.maximum(x, y)", {"x": 0.0, "dx": 2, "y": -0.0, "dy": 3}, 2),
    (selection, "np.maximum(c, x)", {"x": 1, "dx": 2, "c": 1}, 0),
    (selection, "max(c, x)", {"x": 1, "dx": 2, "c": 1}, 0),
    (selection, "np.minimum(x, c)", {"x": 1, "dx": 2, "c": 1}, 2),
    (selection, "min(x, c)", {"x": 1, "dx": 2, "c": 1}, 2),
    (selection, "np.clip(x, -1, 1)", {"x": 1, "dx": 2}, 2),
    (selection, "np.clip(x, -1, 1)", {"x": -1, "dx": 2}, 2),
    (selection, "np.clip(x, -1, 1)", {"x": 1.5, "dx": nan}, 0),
    (selection, "np.clip(x, -1, 1)", {"x": nan, "dx": 2}, 2),
    (selection, "np.clip(x, s, y)", {"x": 3, "dx": 2, "y": 3, "dy": 5}, 2),
    (selection, "np.clip(x, s, y)", {"x": 4, "dx": 2, "y": 3, "dy": 5}, 5),
    # the argument that is the result, where there is a NaN
    (selection, "np.maximum(x, y)", {"x": nan, "dx": 2, "y": 1, "dy": 3}, 2),
    (selection, "np.maximum(x, y)", {"x": 1, "dx": 2, "y": nan, "dy": 3}, 3),
    (selection, "np.minimum(x, y)", {"x": nan, "dx": 2, "y": 1, "dy": 3}, 2),
    (selection, "np.minimum(x, y)", {"x": 1, "dx": 2, "y": nan, "dy": 3}, 3),
    (selection, "max(x, y)", {"x": 1, "dx": 2, "y": nan, "dy": 3}, 2),
    (selection, "min(x, y)", {"x": nan, "dx": 2, "y": 1, "dy": 3}, 2),
    # what is not selected may be NaN
    (selection, "np.where(x < y, x, y)", {"x": 1, "dx": 2, "y": 3, "dy": nan}, 2),
    (selection, "np.where(x < y, x, y)", {"x": 4, "dx": nan, "y": 3, "dy": 5}, 5),
    (selection, "np.where(x < y, x, y)", {"x": nan, "dx": 2, "y": 3, "dy": 5}, 5),
    (selection, "np.where(x > s, c, x)", {"x": 1e9, "dx": nan, "c": 3}, 0),
    # slopes that are infinite, and what they are multiplied by
    (smooth, "np.sqrt(u)", {"u": 0, "du": 1}, inf),
    (smooth, "np.sqrt(u)", {"u": 0, "du": 0}, 0),
    (smooth, "np.sqrt(u)", {"u": inf, "du": inf}, 0),
    (smooth, "np.log(u)", {"u": 0, "du": -2}, -inf),
    (smooth, "np.log(u)", {"u": 0, "du": 0}, 0),
    (smooth, "np.log(u)", {"u": inf, "du": inf}, 0),
    (smooth, "np.exp(x)", {"x": -inf, "dx": 1}, 0),
    (smooth, "np.exp(x)", {"x": -1e4, "dx": inf}, 0),
    (smooth, "np.exp(x)", {"x": 1e4, "dx": -1}, "-max"),
    (arithmetic, "x * s", {"x": 1e-9, "dx": inf}, "max"),
    (smooth, "np.exp(x)", {"x": 1e4, "dx": 0}, 0),
    (smooth, "np.exp2(x)", {"x": -1e5, "dx": -inf}, 0),
    (smooth, "np.tanh(x)", {"x": 0, "dx": 1}, 1),
    (smooth, "np.tanh(x)", {"x": -inf, "dx": 1}, 0),
    (smooth, "np.tanh(x)", {"x": inf, "dx": inf}, 0),
    (arithmetic, "x * y", {"x": 0, "dx": inf, "y": 0, "dy": 1}, 0),
    (arithmetic, "x * c", {"x": 3, "dx": nan, "c": 0}, 0),
    (arithmetic, "x * c", {"x": 3, "dx": 0, "c": inf}, 0),
    (arithmetic, "x / y", {"x": 1, "dx": 0, "y": inf, "dy": inf}, 0),
    (arithmetic, "x / y", {"x": 1, "dx": 1, "y": -inf, "dy": inf}, 0),
    (arithmetic, "x / y", {"x": 1, "dx": inf, "y": -inf}, 0),
    (arithmetic, "c / x", {"x": inf, "dx": -inf, "c": 1}, 0),
    (arithmetic, "c / x", {"x": 1e30, "dx": 1e30, "c": 1}, -1e-30),
    (arithmetic, "c / x", {"x": 0, "dx": 1, "c": 1}, -inf),
    (arithmetic, "x / c", {"x": 0, "dx": 0, "c": 0}, 0),
    (arithmetic, "x / c", {"x": 5, "dx": 1, "c": inf}, 0),
    # 0**0 is 1, and nothing is NaN for the logarithm of 0
    (powers, "x**0", {"x": 0}, 0),
    (powers, "x**1", {"x": 0}, 1),
    (powers, "x**2", {"x": 0}, 0),
    (powers, "x**2", {"x": -3, "dx": 5}, -30),
    (powers, "x**3", {"x": -2}, 12),
    (powers, "x**4", {"x": -2}, -32),
    (powers, "x**5", {"x": -2}, 80),
    (powers, "x**-1", {"x": -2}, -0.25),
    (powers, "x**-1", {"x": 0}, "-max"),
    (powers, "x**k", {"x": -2}, 12),
    (powers, "x**k", {"x": 0}, 0),
    (powers, "2.0**x", {"x": -inf}, 0),
    (powers, "u**v", {"u": 0, "v": 0}, 0),
    (powers, "u**v", {"u": 0, "v": 1, "du": 3}, 3),
    (powers, "u**v", {"u": 0, "v": 2, "du": 3}, 0),
    (powers, "u**v", {"u": 0, "v": 0.5, "du": 0}, 0),
    (powers, "u**v", {"u": 0, "v": 0.5, "du": 1}, "max"),
    (powers, "u**v", {"u": 1, "v": 7, "du": 0, "dv": 5}, 0),
    (powers, "u**v", {"u": -2, "v": 3, "du": 1, "dv": 0}, 12),
    (powers, "u**c", {"u": 0, "c": 0}, 0),
    (powers, "abs(c) ** x", {"c": 0, "x": 2}, 0),
    (powers, "abs(c) ** x", {"c": 0, "x": 0}, 0),
    # x - (x // y) y
    (steps, "x % y", {"x": 7, "dx": 1, "y": 2, "dy": 10}, 1 - 30),
    (steps, "x % y", {"x": -7, "dx": 1, "y": 2, "dy": 10}, 1 + 40),
    (steps, "x % y", {"x": 4, "dx": 1, "y": 2, "dy": 10}, 1 - 20),
    (steps, "x % y", {"x": 3, "dx": 1, "y": inf, "dy": 1}, 1),
    (steps, "c % x", {"x": 2, "dx": 10, "c": 7}, -30),
]
"""Group, label, operands (1 where not given) and the tangent; "max" is the largest number."""


@dtype_of_each_kind
def test_edges(dtype: str) -> None:
    tile = Tile(dtype, 8 if dtype == "float32" else 4, 1, 1)
    most = float(np.finfo(dtype).max)
    for group in GROUPS:
        cases = [case[1:] for case in EDGES if case[0] is group]
        if not cases:
            continue
        data = np.array([[given.get(name, 1) for _, given, _ in cases] for name in OPERANDS])
        got, on_lanes = evaluate(tile, group, Inputs(data, -1.25, 0.75, 3))
        assert_same(got.values, on_lanes.values)
        for n, (label, given, wanted) in enumerate(cases):
            slope = got.tangents[labels(group).index(label), n]
            exact = float(wanted.replace("max", str(most))) if isinstance(wanted, str) else wanted
            np.testing.assert_allclose(
                slope, exact, rtol=4 * float(np.finfo(dtype).eps), err_msg=f"{label} at {given}"
            )


@dtype_of_each_kind
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_values_are_those_of_lanes(group: Callable[..., Any], dtype: str) -> None:
    """Also where something special happens."""
    f = np.finfo(dtype)
    values: list[Any] = [
        0.0,
        -0.0,
        1,
        -1,
        0.1,
        -2.5,
        7.3,
        3,
        inf,
        -inf,
        nan,
        f.max,
        f.tiny,
        -f.tiny,
    ]
    values += [f.smallest_subnormal, -f.max, 1e-30, -90, 90]
    x, y = (a.ravel() for a in np.meshgrid(values, values))
    ones = np.ones_like(x)
    data = np.array([x, ones, y, ones, abs(x), ones, y, ones, y[::-1]])
    tile = Tile(dtype, 8 if dtype == "float32" else 4, 1, 1)
    for o, s, k in ((-1.25, 0.75, 3), (inf, nan, 0)):
        got, on_lanes = evaluate(tile, group, Inputs(data, o, s, k))
        for n, label in enumerate(labels(group)):
            assert_same(got.values[n], on_lanes.values[n], label)


def used(group: Callable[..., Any]) -> set[str]:
    """Return the names of the functions and operators that a group uses."""
    operators: dict[type[ast.AST], str] = {
        ast.Mult: "mul",
        ast.Div: "truediv",
        ast.USub: "neg",
        ast.UAdd: "pos",
        ast.NotEq: "ne",
        ast.LtE: "le",
        ast.GtE: "ge",
    }
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(group)))):
        if isinstance(node, ast.Call):
            names.add(node.func.attr if isinstance(node.func, ast.Attribute) else "")
            names.add(node.func.id if isinstance(node.func, ast.Name) else "")
        kind = type(node)
        names.add(operators.get(kind, kind.__name__.lower()))
    return names


def test_every_function_has_a_rule_and_is_tested() -> None:
    tested = set().union(*map(used, GROUPS))
    for function, _, real in dual.functions():
        name = dual.rule_name(function)
        assert name in dual.RULES or not real, f"no rule for {function}"
        assert name in tested or function.__name__ in tested, f"no test of {function}"


# ---------------------------------------------------------------------------------------------
# In kernels
# ---------------------------------------------------------------------------------------------


@tile_of_each_kind
def test_constructors_and_accessors(tile: Tile) -> None:
    one, row = Tile(tile.dtype, 1, 1, 1), tile.W * tile.itemsize

    def run(x: int, dx: int, n: int, out: int) -> None:
        d = dual.dual(lanes.load(tile, x), lanes.load(tile, dx))
        first = dual.dual(lanes.load(one, x), 3)
        lanes.store(out, value(tile, d))
        lanes.store(out + row, tangent(tile, d))
        lanes.store(out + 2 * row, value(tile, first))
        lanes.store(out + 3 * row, tangent(tile, first))
        lanes.store(out + 4 * row, tangent(tile, seed(lanes.load(tile, x))))
        lanes.store(out + 5 * row, chain(tile, lanes.load(tile, dx), d))
        lanes.store(out + 6 * row, value(tile, dual.as_dual(tile, first)))
        lanes.store(out + 7 * row, tangent(tile, dual.as_dual(tile, first)))
        # what does not depend on the score
        lanes.store(out + 8 * row, value(tile, lanes.load(tile, x)))
        lanes.store(out + 9 * row, tangent(tile, lanes.load(tile, x)))
        lanes.store(out + 10 * row, value(tile, lanes.load_int32(tile, n)))
        lanes.store(out + 11 * row, tangent(tile, dual.as_dual(tile, lanes.load_int32(tile, n))))
        lanes.store(out + 12 * row, value(tile, 7))
        lanes.store(out + 13 * row, chain(tile, lanes.load(tile, dx), 0.5))

    x = np.arange(1, tile.W + 1).astype(tile.dtype)
    x[-1] = -inf
    dx = np.where(np.arange(tile.W) % 3 == 1, 0, x - 7).astype(tile.dtype)
    out = np.full((14, tile.W), nan, tile.dtype)
    count = np.arange(5, tile.W + 5, dtype=np.int32)
    addresses = (a.ctypes.data for a in (x, dx, count, out))
    jit(run, types.void(*[types.int64] * 4))(*addresses)
    hidden = x == -inf
    slope = np.where(hidden, 0, dx)
    with np.errstate(invalid="ignore"):
        product = np.where(hidden, 0, dx * dx)
    first = 0 if tile.W == 1 else 3  # that of a hidden key is 0
    expected = [x, slope, x[0], first, ~hidden, product, x[0], first, x, 0, count, 0, 7, 0]
    np.testing.assert_array_equal(out, [np.broadcast_to(e, tile.W) for e in expected])


def test_a_score_that_is_hidden_has_no_derivative() -> None:
    """Whatever the slope is, and whatever the derivative was so far."""
    tile = Tile("float32", 4, 1, 1)

    def run(x: int, dx: int, deriv: int, out: int) -> None:
        r = dual.dual(lanes.load(tile, x), lanes.load(tile, dx))
        lanes.store(out, tangent(tile, r))
        lanes.store(out + 16, chain(tile, lanes.load(tile, deriv), r))

    x = np.array([-inf, -inf, 1, inf], np.float32)
    dx, deriv = np.array([inf, nan, 0, 3], np.float32), np.array([1, nan, inf, 2], np.float32)
    out = np.empty((2, 4), np.float32)
    jit(run, types.void(*[types.int64] * 4))(*(a.ctypes.data for a in (x, dx, deriv, out)))
    np.testing.assert_array_equal(out, [[0, 0, 0, 3], [0, 0, 0, 6]])


def test_what_has_no_meaning_is_refused() -> None:
    tile, other = Tile("float32", 8, 1, 1), Tile("float32", 4, 1, 1)

    def score(t: Any, at: int) -> Any:
        return seed(lanes.load(t, at))

    score = numba.njit(score)

    def test_if(at: int) -> Any:
        return 1.0 if score(tile, at) else 2.0

    def test_if_not(at: int) -> Any:
        if not score(tile, at):
            return 1.0
        return 2.0

    def test_and(at: int) -> Any:
        return score(tile, at) and True

    index, condition = "an index cannot depend on the score", r"use np\.where\(condition, x, y\)"
    refused: list[tuple[Callable[[int], Any], str | None]] = [
        (test_if, condition),
        (test_if_not, condition),
        (test_and, condition),
        (lambda at: np.zeros(3)[score(tile, at)], index),
        (lambda at: np.zeros((3, 3))[1, score(tile, at)], index),
        (lambda at: score(tile, at) + score(other, at), None),
        (lambda at: ~score(tile, at), None),
        (lambda at: score(tile, at) & True, None),
        (lambda at: np.where(score(tile, at), 1.0, 2.0), None),
        (lambda at: seed(lanes.load_int32(tile, at)), None),
        (lambda at: dual.dual(score(tile, at), 1.0), None),
        (lambda at: dual.as_dual(tile, score(tile, at) > 0), "expected a number"),
        (lambda at: dual.as_dual(tile, True), "expected a number"),
    ]
    for function, text in refused:
        with pytest.raises(numba.TypingError, match=text):
            numba.njit(types.void(types.int64))(_discard(function))


def _discard(function: Callable[[int], Any]) -> Callable[[int], None]:
    inner = numba.njit(function)

    def run(at: int) -> None:
        inner(at)

    return run


# ---------------------------------------------------------------------------------------------
# Modifiers
# ---------------------------------------------------------------------------------------------


def sigmoid_gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Saturate on both sides: exp overflows on one."""
    return score / (1.0 + np.exp(-40.0 * (score - 0.25)))


def polynomial(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((0.125 * score - 0.5) * score + 2.0) * score - 1.0


def leaky(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, leak: Any) -> Any:
    return np.maximum(score, 0.0) + leak * np.minimum(0.0, score)


def root_gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Take a square root of 0 where the gate is shut, and of a negative number nowhere."""
    return np.sqrt(np.maximum(0, score)) - 0.5 * np.sqrt(np.maximum(-score, 0))


def log_magnitude(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Let logarithms of negative numbers be in the branch that is not taken."""
    return np.where(score > 0.0, np.log(1.0 + score), np.where(score < 0, -np.log(1 - score), 0.0))


def steep(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide low scores, near keys excepted."""
    return np.where((score < -1.0) & (abs(q_idx - kv_idx) > 2), -np.inf, 1.5 * score)


def distance_scale(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score / (1 + abs(q_idx - kv_idx)) + (kv_idx % 3) * score


def ratio(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (score * score - 1.0) / (abs(score) + (2 + h)) + 3.0 / (4.0 + score * score)


def gaussian_bump(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, center: Any) -> Any:
    off = score - center[h]
    return score + np.exp(-0.5 * off * off) + np.exp2(-abs(score))


def sawtooth(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score % 2.0 + score // 1.0 + (score + kv_idx) % (h + 1)


def ignores_the_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return -0.25 * abs(q_idx - kv_idx)


def constant(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2


def in_a_loop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    total = 0.0
    power = 1.0
    for n in range(4):
        power = power * (0.5 * score)
        total = total + power / (n + 1 + h)
    return total


bind = functools.partial

USERS: dict[str, Callable[..., Any]] = {
    "sigmoid_gate": sigmoid_gate,
    "polynomial": polynomial,
    "leaky": bind(leaky, leak=0.125),
    "root_gate": root_gate,
    "log_magnitude": log_magnitude,
    "steep": steep,
    "distance_scale": distance_scale,
    "ratio": ratio,
    "gaussian_bump": bind(gaussian_bump, center=np.array([0.5, -1.25])),
    "sawtooth": sawtooth,
    "ignores_the_score": ignores_the_score,
    "constant": constant,
    "in_a_loop": in_a_loop,
    "composed": mods.compose(bind(mods.softcap, cap=3.0), bind(leaky, leak=0.25), sigmoid_gate),
    "composed after a constant": mods.compose(ignores_the_score, polynomial),
}
"""Their derivatives jump at multiples of 1/2 only."""

SIZES = registry.Sizes(B=2, H=2, Nq=16, Nk=11)
ITEM = 1, 1
"""b and h."""


@functools.cache
def modifiers() -> dict[str, Callable[..., Any]]:
    known = {
        name: mod.build(SIZES, registry.generator(name)) for name, mod in registry.MODS.items()
    }
    return {**known, **USERS}


def built_in() -> set[str]:
    """Return the names of all modifiers that mods offers."""
    return {
        name
        for name, f in vars(mods).items()
        if inspect.isfunction(f) and next(iter(inspect.signature(f).parameters), "") == "score"
    }


def test_every_built_in_is_tested() -> None:
    assert {"softcap", "alibi", "gaussian_window"} <= built_in() <= set(registry.MODS)


@functools.cache
def derivatives(tile: Tile, name: str) -> Array:
    """Return the derivatives of a modifier at `scores`, keys first."""
    tree = binding.resolve(name, modifiers()[name], binding.SCORE_MOD)
    evaluate, _ = on_lanes.evaluator(tree, 0, score.TOOLS, dual.as_dual)
    W, size, Nq, Nk = tile.W, tile.itemsize, SIZES.Nq, SIZES.Nk
    item, head = ITEM

    def run(params: int, rows: int, scores: int, out: int) -> None:
        outside = lanes.new_outside(tile)
        b = lanes.uniform_index(tile, "int32", item)
        h = lanes.uniform_index(tile, "int32", head)
        for n in range(Nk):
            j = lanes.uniform_index(tile, "int32", n)
            for i in range(0, Nq, W):
                at = (n * Nq + i) * size
                q_idx = lanes.load_index(tile, "int32", rows + 8 * i, 0)
                x = seed(lanes.load(tile, scores + at))
                r = dual.as_dual(tile, evaluate(tile, params, outside, (x, b, h, q_idx, j)))
                lanes.store(out + at, chain(tile, lanes.splat(tile, 2.0), r))

    words = np.array([*on_lanes.words(tree), 0], np.int64)
    rows, x = np.arange(SIZES.Nq), np.ascontiguousarray(scores(tile.dtype).T)
    out = np.empty_like(x)
    addresses = (a.ctypes.data for a in (words, rows, x, out))
    jit(run, types.void(*[types.int64] * 4))(*addresses)
    result: Array = out.T / 2
    return result


def scores(dtype: str) -> Array:
    """Return scores away from multiples of 1/2, where a derivative may jump."""
    x: Array = np.random.default_rng(0).normal(0, 3, 2 * SIZES.Nq * SIZES.Nk).astype(dtype)
    x = x[abs(2 * x - np.rint(2 * x)) > 0.05]
    return x[: SIZES.Nq * SIZES.Nk].reshape(SIZES.Nq, SIZES.Nk)


ROUNDINGS = 64
"""In the longest of the functions and its rules, elementary functions with up to 4 ulp included."""


def cases() -> list[Any]:
    """Yield dtypes and modifiers; float64 without those of the registry that are not built in."""
    mine = [*USERS, *(name for name in registry.MODS if name.split(",")[0] in built_in())]
    every = [*registry.MODS, *USERS]
    return [("float32", name) for name in every] + [("float64", name) for name in mine]


@pytest.mark.parametrize(("dtype", "name"), cases())
def test_derivatives_of_modifiers(dtype: str, name: str) -> None:
    tile = Tile(dtype, 8 if dtype == "float32" else 4, 1, 1)
    eps, step = float(np.finfo(dtype).eps), WIDE(RATIO / 32)
    x, mod = scores(dtype).astype(WIDE), modifiers()[name]
    positions = np.arange(SIZES.Nq)[:, None], np.arange(SIZES.Nk)

    def f(t: Any) -> Array:
        return np.broadcast_to(mod(x + t, *ITEM, *positions), x.shape)

    with np.errstate(all="ignore"):
        hidden = f(0) == -inf
        exact = np.where(hidden, 0, difference(f, step))
        bend = np.where(hidden, 0, (f(step) - 2 * f(0) + f(-step)) / step**2)
        size = np.where(hidden, 0, abs(f(0)))
    # An error of an intermediate value moves the derivative as an error of the score does, or is
    # one of a factor. The differences: these functions change over 1/32 as others over 1.
    largest = abs(exact).max()
    allowed = ROUNDINGS * eps * (abs(exact) + abs(x * bend) + largest)
    allowed += 100 * RATIO**6 * largest + 2 * np.finfo(WIDE).eps / step * size
    got = derivatives(tile, name)
    bad = ~(abs(got - exact) <= np.where(hidden, 0, allowed))
    at = np.unravel_index(bad.argmax(), bad.shape)
    assert not bad.any(), (
        f"{name} at the score {x[at]}, q_idx, kv_idx = {at}: {got[at]!r}, and by differences "
        f"{exact[at]!r}, within {allowed[at]}"
    )
