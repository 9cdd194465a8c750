"""Arrays whose rows lie anywhere, in any storage type: each lane has a byte offset of its own."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..storage import STORED, decode, encode
from ..vector import I32, I64, Vector, insert, vector_type
from .conversions import broadcast
from .memory import emit_load, emit_store
from .types import Lanes


def from_storage(b: Any, x: Any, storage: str, to: Lanes) -> Any:
    """Convert a vector as it is stored to the tile's floats; True is 0 and False -inf."""
    return decode(Vector(b, x), storage, to.llvm).value


def lane_address(b: Any, base: Any, offsets: Any, lane: int) -> Any:
    """Return the byte address of a lane: ``base + offsets[lane]``."""
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


def emit_gather_transposed(
    b: Any, to: Lanes, storage: str, base: Any, offsets: Any, dest: Any, stride: Any
) -> None:
    """Write what `gather_transposed` does."""
    ty = vector_type(STORED[storage], to.width)
    rows = [emit_load(b, lane_address(b, base, offsets, n), ty) for n in range(to.width)]
    for n, column in enumerate(_transpose(b, rows)):
        at = b.add(dest, b.mul(stride, I64(n)))
        emit_store(b, at, from_storage(b, column, storage, to))


@intrinsic(prefer_literal=True)
def gather_transposed(
    typingctx: Any, tile: Any, storage: Any, base: Any, offsets: Any, dest: Any, stride: Any
) -> Any:
    """Read W adjacent elements for every lane and write them as W vectors over the lanes.

    Lane l reads at byte address ``base + offsets[l]`` (`offsets` is the address of int64); vector
    c goes to ``dest + c * stride``. The storage type is a literal, "float16", "bfloat16",
    "float32", "float64" or "bool" (of which True becomes 0 and False -inf).
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        emit_gather_transposed(b, tile.real, storage.literal_value, *args[2:])
        return context.get_dummy_value()

    return types.void(tile, storage, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def load_lanes(typingctx: Any, tile: Any, storage: Any, base: Any, offsets: Any) -> Any:
    """Read one element for every lane, at byte address ``base + offsets[lane]``."""
    to, name = tile.real, storage.literal_value

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x = ir.Constant(vector_type(STORED[name], to.width), ir.Undefined)
        for n in range(to.width):
            value = emit_load(b, lane_address(b, args[2], args[3], n), STORED[name])
            x = insert(b, x, value, n)
        return from_storage(b, x, name, to)

    return to(tile, storage, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_splat(typingctx: Any, tile: Any, storage: Any, address: Any) -> Any:
    """Read one element at a byte address into every lane."""
    to, name = tile.real, storage.literal_value

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = emit_load(b, args[2], STORED[name])
        return from_storage(b, broadcast(b, value, to.width), name, to)

    return to(tile, storage, types.int64), codegen


@intrinsic
def scatter_transposed(
    typingctx: Any, tile: Any, source: Any, stride: Any, base: Any, offsets: Any, count: Any
) -> Any:
    """Write W vectors over the lanes as W adjacent elements for each of the first lanes.

    `gather_transposed` turned round: vector c is at ``source + c * stride``, lane l writes at the
    byte address ``base + offsets[l]``, as the tile's arrays are stored, and only lanes below
    `count` write.
    """
    return types.void(tile, *[types.int64] * 5), _scatter(tile, False)


@intrinsic
def scatter_add_transposed(
    typingctx: Any, tile: Any, source: Any, stride: Any, base: Any, offsets: Any, count: Any
) -> Any:
    """Add what `scatter_transposed` would write, to numbers of the type that is computed in."""
    return types.void(tile, *[types.int64] * 5), _scatter(tile, True)


def _scatter(tile: Any, add: bool) -> Any:
    to, width = tile.real, tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors = [
            emit_load(b, b.add(args[1], b.mul(args[2], I64(n))), to.llvm) for n in range(width)
        ]
        for n, row in enumerate(_transpose(b, vectors)):
            with b.if_then(b.icmp_signed("<", I64(n), args[5])):
                at, x = lane_address(b, args[3], args[4], n), Vector(b, row)
                if add:
                    x = Vector(b, emit_load(b, at, to.llvm)) + x
                else:
                    x = encode(x, tile.tile.storage)
                emit_store(b, at, x.value)
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
