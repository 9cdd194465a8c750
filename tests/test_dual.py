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
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nattn import dual, lanes, mods
from nattn.dual import Dual, chain, seed, tangent, value
from nattn.lanes import Lanes, Tile

Array = NDArray[Any]

TILES = [Tile(dtype, W, 1, 1) for dtype in ("float32", "float64") for W in (16, 8, 4, 1)]

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
            lanes._store(b, at, lanes.I64(KINDS.index(kind)))
            parts = [b.extract_value(x, 0), b.extract_value(x, 1)] if kind == "dual" else [x]
            for m, part in enumerate(parts):
                wide = lanes._operand(context, b, part, plain, real).value
                lanes._store(b, b.add(at, lanes.I64(8 + m * size)), wide)
            at = b.add(at, args[2])
        lanes._store(b, at, lanes.I64(-1))
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
        *(x // y, c // x, x // s, k // x),
    )


def smooth(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(np.exp(x), np.exp2(x), np.tanh(x), np.log(u), np.sqrt(u)),
        *(abs(x), np.abs(x)),
    )


def selection(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(min(x, y), max(x, y), min(x, c), max(c, x), min(o, x), max(x, o), min(x, s), max(k, x)),
        *(np.minimum(x, y), np.maximum(x, y), np.minimum(x, c), np.maximum(c, x)),
        *(np.minimum(o, x), np.maximum(x, o), np.minimum(x, s), np.maximum(k, x)),
        *(np.where(x < y, x, y), np.where(x > s, c, x), np.where(c > o, x, k)),
        *(np.where(o > s, y, x), np.where(c < k, o, x), np.where(x >= y, s, y * x)),
    )


def plain(x: Any, y: Any, u: Any, v: Any, c: Any, o: Any, s: Any, k: Any) -> Any:
    return (
        *(x < y, x <= y, x > y, x >= y, x == y, x != y, x < c, o >= x, x > s, k != x, x == 1),
        *((x > 0) & (y < 1), (x > 0) | (y < 1), ~(x < c)),
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


GROUPS = (arithmetic, steps, smooth, selection, plain, in_place)


@functools.cache
def labels(group: Callable[..., Any]) -> list[str]:
    """Return each result as it is written."""
    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(body, ast.FunctionDef)
    last = body.body[-1]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    found: list[str] = []
    for e in last.value.elts:
        several = e.value.elts if isinstance(e, ast.Starred) else [e]  # type: ignore[attr-defined]
        found += map(ast.unparse, several)
    return found


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
"""Step of a difference of order 6, relative: it errs as RATIO**6, and by rounding as eps / RATIO."""

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
        ratios = [ratio for v in others for ratio in (x / v, v / x)] + [y / c, x / 1]
        near = [abs(ratio - np.rint(ratio)) < 0.05 for ratio in ratios]
        near += [abs(v - w) < 0.05 for v, w in ((c, o), (c, np.full_like(c, k)))]
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

    Of the order of RATIO**6: the seventh derivatives of what is compared are at most some hundred
    times as large as the first, in units of the operands.
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
            parts = (
                difference(lambda t, f=f: f(t, WIDE(0)), steps[0]),
                difference(lambda t, f=f: f(WIDE(0), t), steps[1]),
            )
            error = RATIO**6 * sum(
                100 * abs(part) + abs(center) * RATIO / step
                for part, step in zip(parts, steps, strict=True)
            )
            columns.append((center, np.stack(parts), error))
        values, parts, errors = (np.stack(rows, axis=-1) for rows in zip(*columns, strict=True))
        found.append((values, parts, errors))
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
