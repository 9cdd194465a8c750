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


MOST = max(len(labels(group)) for group in GROUPS)


@dataclass(frozen=True)
class Results:
    """What dual numbers gave for a group, for each label and sample, and what lanes gave."""

    kinds: list[str]
    values: Array
    tangents: Array
    expected: Array
    expected_kinds: list[str]


@functools.cache
def compiled(tile: Tile) -> Callable[..., None]:
    one = Tile(tile.dtype, 1, 1, 1)
    W, size = tile.W, tile.itemsize
    pitch = 8 + 2 * W * size
    step = pitch * (MOST + 1)
    f0, f1, f2, f3, f4, f5 = (numba.njit(g, inline="always") for g in GROUPS)

    def run(n: int, data: int, width_one: int, s: float, k: int, out: int) -> None:
        for i in range(data, data + n * size, W * size):
            x = dual.dual(lanes.load(tile, i), lanes.load(tile, i + n * size))
            y = dual.dual(lanes.load(tile, i + 2 * n * size), lanes.load(tile, i + 3 * n * size))
            u = dual.dual(lanes.load(tile, i + 4 * n * size), lanes.load(tile, i + 5 * n * size))
            v = dual.dual(lanes.load(tile, i + 6 * n * size), lanes.load(tile, i + 7 * n * size))
            c, o = lanes.load(tile, i + 8 * n * size), lanes.load(one, width_one)
            store_each(tile, out, pitch, f0(x, y, u, v, c, o, s, k))
            store_each(tile, out + step, pitch, f1(x, y, u, v, c, o, s, k))
            store_each(tile, out + 2 * step, pitch, f2(x, y, u, v, c, o, s, k))
            store_each(tile, out + 3 * step, pitch, f3(x, y, u, v, c, o, s, k))
            store_each(tile, out + 4 * step, pitch, f4(x, y, u, v, c, o, s, k))
            store_each(tile, out + 5 * step, pitch, f5(x, y, u, v, c, o, s, k))
            a, b, d, e = value(tile, x), value(tile, y), value(tile, u), value(tile, v)
            store_each(tile, out + 6 * step, pitch, f0(a, b, d, e, c, o, s, k))
            store_each(tile, out + 7 * step, pitch, f1(a, b, d, e, c, o, s, k))
            store_each(tile, out + 8 * step, pitch, f2(a, b, d, e, c, o, s, k))
            store_each(tile, out + 9 * step, pitch, f3(a, b, d, e, c, o, s, k))
            store_each(tile, out + 10 * step, pitch, f4(a, b, d, e, c, o, s, k))
            store_each(tile, out + 11 * step, pitch, f5(a, b, d, e, c, o, s, k))
            out += 12 * step

    return jit(run, types.void(*[types.int64] * 3, types.float64, types.int64, types.int64))
