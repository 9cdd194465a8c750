"""Arrays whose rows lie anywhere, in any storage type: each lane has a byte offset of its own."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import I32, I64, Vector, constant, insert, vector_type
from .conversions import broadcast
from .memory import emit_load, emit_store
from .types import Lanes, TileType

STORAGE = {
    "bool": ir.IntType(8),
    "float16": ir.IntType(16),
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}


def _storage_name(storage: Any) -> str:
    """Return how elements are stored: a literal says so, a tile means its own float type."""
    name: str = storage.tile.dtype if isinstance(storage, TileType) else storage.literal_value
    return name


def from_storage(b: Any, x: Any, storage: str, to: Lanes) -> Any:
    """Convert a vector as it is stored to the tile's floats; True is 0 and False -inf."""
    v = Vector(b, x)
    if storage == "bool":
        zero = Vector(b, constant(to.llvm, 0.0))
        return v.cmp("!=", 0).where(zero, -math.inf).value
    if storage == "float16":
        return _half_to_float(v, to).value
    if storage == str(to.dtype):
        return x
    return (b.fpext if storage == "float32" else b.fptrunc)(x, to.llvm)


def _half_to_float(x: Vector, to: Lanes) -> Vector:
    """Convert half floats by their bits: not every processor has the instruction.

    Moved to float32's place the exponent is 112 too small: one exact product mends it, for
    subnormal numbers too. Inf and NaN get the full exponent.
    """
    b = x.b
    wide = Vector(b, b.zext(x.value, vector_type(I32, to.width)))
    magnitude = ((wide & 0x7FFF) << 13).as_float() * 2.0**112
    special = (wide & 0x7C00).cmp("==", 0x7C00).where(0x7F800000, wide.const(0))
    sign = (wide & 0x8000) << 16
    y = (magnitude.bits() | special | sign).as_float()
    return Vector(b, b.fpext(y.value, to.llvm)) if to.dtype == types.float64 else y


def _lane_address(b: Any, base: Any, offsets: Any, lane: int) -> Any:
    return b.add(base, emit_load(b, b.add(offsets, I64(8 * lane)), I64))


def _transpose(b: Any, rows: list[Any]) -> list[Any]:
    """Turn W vectors of W lanes: element c of row r becomes element r of row c.

    In steps of 1, 2, 4, ... pairs of rows swap the blocks off the diagonal.
    """
    width = len(rows)
    step = 1
    while step < width:
        first = [n if not n & step else width + n - step for n in range(width)]
        second = [n + step if not n & step else width + n for n in range(width)]
        masks = [ir.Constant(ir.VectorType(I32, width), m) for m in (first, second)]
        for r in range(width):
            if not r & step:
                x, y = rows[r], rows[r | step]
                rows[r] = b.shuffle_vector(x, y, masks[0])
                rows[r | step] = b.shuffle_vector(x, y, masks[1])
        step *= 2
    return rows


@intrinsic(prefer_literal=True)
def gather_transposed(
    typingctx: Any, tile: Any, storage: Any, base: Any, offsets: Any, dest: Any, stride: Any
) -> Any:
    """Read W adjacent elements for every lane and write them as W vectors over the lanes.

    Lane l reads at byte address ``base + offsets[l]`` (`offsets` is the address of int64); vector
    c goes to ``dest + c * stride``. The storage type is a literal, "float16", "float32",
    "float64" or "bool" (of which True becomes 0 and False -inf), or a tile for its own floats.
    """
    to, name, width = tile.real, _storage_name(storage), tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        ty = vector_type(STORAGE[name], width)
        rows = [emit_load(b, _lane_address(b, args[2], args[3], n), ty) for n in range(width)]
        for n, column in enumerate(_transpose(b, rows)):
            at = b.add(args[4], b.mul(args[5], I64(n)))
            emit_store(b, at, from_storage(b, column, name, to))
        return context.get_dummy_value()

    return types.void(tile, storage, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def load_lanes(typingctx: Any, tile: Any, storage: Any, base: Any, offsets: Any) -> Any:
    """Read one element for every lane, at byte address ``base + offsets[lane]``."""
    to, name = tile.real, _storage_name(storage)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x = ir.Constant(vector_type(STORAGE[name], to.width), ir.Undefined)
        for n in range(to.width):
            value = emit_load(b, _lane_address(b, args[2], args[3], n), STORAGE[name])
            x = insert(b, x, value, n)
        return from_storage(b, x, name, to)

    return to(tile, storage, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_splat(typingctx: Any, tile: Any, storage: Any, address: Any) -> Any:
    """Read one element at a byte address into every lane."""
    to, name = tile.real, _storage_name(storage)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = emit_load(b, args[2], STORAGE[name])
        return from_storage(b, broadcast(b, value, to.width), name, to)

    return to(tile, storage, types.int64), codegen


@intrinsic
def scatter_transposed(
    typingctx: Any, tile: Any, source: Any, stride: Any, base: Any, offsets: Any, count: Any
) -> Any:
    """Write W vectors over the lanes as W adjacent elements for each of the first lanes.

    `gather_transposed` turned round: vector c is at ``source + c * stride``, lane l writes at the
    byte address ``base + offsets[l]``, and only lanes below `count` write.
    """
    return types.void(tile, *[types.int64] * 5), _scatter(tile, False)


@intrinsic
def scatter_add_transposed(
    typingctx: Any, tile: Any, source: Any, stride: Any, base: Any, offsets: Any, count: Any
) -> Any:
    """Add what `scatter_transposed` would write."""
    return types.void(tile, *[types.int64] * 5), _scatter(tile, True)


def _scatter(tile: Any, add: bool) -> Any:
    to, width = tile.real, tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors = [
            emit_load(b, b.add(args[1], b.mul(args[2], I64(n))), to.llvm) for n in range(width)
        ]
        for n, row in enumerate(_transpose(b, vectors)):
            with b.if_then(b.icmp_signed("<", I64(n), args[5])):
                at = _lane_address(b, args[3], args[4], n)
                if add:
                    row = (Vector(b, emit_load(b, at, to.llvm)) + Vector(b, row)).value
                emit_store(b, at, row)
        return context.get_dummy_value()

    return codegen


@intrinsic
def store_panels(typingctx: Any, tile: Any, address: Any, x: Any, panel: Any) -> Any:
    """Write a vector in pieces of at most NR elements, `panel` bytes from piece to piece."""
    width = tile.real.width
    piece = min(tile.tile.NR, width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for n in range(width // piece):
            lanes = ir.Constant(ir.VectorType(I32, piece), list(range(n * piece, (n + 1) * piece)))
            part = b.shuffle_vector(args[2], args[2], lanes) if width > 1 else args[2]
            emit_store(b, b.add(args[1], b.mul(args[3], I64(n))), part)
        return context.get_dummy_value()

    return types.void(tile, types.int64, x, types.int64), codegen


def _shuffled(b: Any, x: Any, y: Any, width: int, lanes: range | list[int]) -> Any:
    """Return those lanes of two vectors, counted from the first of x to the last of y."""
    if width == 1:
        return (x, y)[lanes[0]]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, width), list(lanes)))


@intrinsic
def part_pairs(typingctx: Any, tile: Any, x: Any, y: Any) -> Any:
    """Return the even lanes of two vectors, one after the other, and the odd ones."""
    width = x.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        parts = [_shuffled(b, args[1], args[2], width, range(i, 2 * width, 2)) for i in (0, 1)]
        return context.make_tuple(b, sig.return_type, parts)

    return types.UniTuple(x, 2)(tile, x, y), codegen


@intrinsic
def join_pairs(typingctx: Any, tile: Any, x: Any, y: Any) -> Any:
    """Return two vectors in which the lanes of x and y alternate: what undoes `part_pairs`."""
    width = x.width
    lanes = [start + n for n in range(width) for start in (0, width)]

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        halves = [_shuffled(b, args[1], args[2], width, lanes[i : i + width]) for i in (0, width)]
        return context.make_tuple(b, sig.return_type, halves)

    return types.UniTuple(x, 2)(tile, x, y), codegen
