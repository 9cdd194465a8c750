"""Lanes of any kind from memory, and to memory with their kind: for the tests of lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nattn.vectors import lanes
from nattn.vectors.lanes import Lanes, Tile
from nattn.vectors.lanes.memory import emit_load, emit_store
from nattn.vectors.vector import I64, constant, vector_type

Array = NDArray[Any]

WIDTHS = (16, 8, 4, 2)
"""Those of AVX-512, AVX, SSE and NEON: of float64 the last two have two."""

TILES = [Tile(dtype, W, 2, 3) for dtype in ("float32", "float64") for W in WIDTHS]

KINDS = ("bool", "int32", "int64", "float32", "float64")

tile_of_each_kind = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.dtype}x{t.W}")

dtype_of_each_kind = pytest.mark.parametrize("dtype", ["float32", "float64"])


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
            return b.trunc(emit_load(b, args[2], vector_type(I64, to.width)), to.llvm)
        if name != "bool":
            return emit_load(b, args[2], to.llvm)
        stored = vector_type(ir.IntType(8), to.width)
        return b.icmp_signed("!=", emit_load(b, args[2], stored), constant(stored, 0))

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
            emit_store(b, at, I64(KINDS.index(str(ty.dtype)) + (ty.width << 32)))
            emit_store(b, b.add(at, I64(8)), value)
            at = b.add(at, args[1])
        emit_store(b, at, I64(-1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, results), codegen


load_as = intrinsic(prefer_literal=True)(_load_as)

store_each = intrinsic(_store_each)


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


def compile_only(function: Callable[[int], Any]) -> None:
    inner = jit(function)

    def run(at: int) -> None:
        inner(at)

    jit(run, types.void(types.int64))
