"""The register tile of dot products: W sums over the lanes, of NR rows with W / NR others each.

Where rows are few, lanes hold the head dimension: nothing is transposed, and the sums over the
lanes, which cost a step for each pair of them, are made for W dot products together.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import I32, I64, Vector, constant
from .memory import emit_load, emit_store
from .words import emit_load_stored


@intrinsic
def zero_dots(typingctx: Any, tile: Any) -> Any:
    """Return W vectors of 0, in which dot products are summed up: a tuple."""
    count = tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        zero = constant(tile.real.llvm, 0.0)
        return ir.Constant(ir.ArrayType(tile.real.llvm, count), [zero] * count)

    return types.UniTuple(tile.real, count)(tile), codegen


@intrinsic
def add_dots(
    typingctx: Any, tile: Any, source: Any, acc: Any, a: Any, next_a: Any, x: Any, next_x: Any
) -> Any:
    """Add products, lane by lane: ``acc[j, i] += a[j] * x[i]``.

    a[j] are NR vectors of floats, `next_a` bytes apart, the first at byte address `a`; x[i] are
    W / NR vectors at `x`, `next_x` bytes apart, stored as the tile `source` says.
    """
    nr, to = tile.tile.NR, tile.real
    count = to.width // nr

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, _, acc_, a_, next_a_, x_, next_x_ = args

        def places(first: Any, stride: Any, n: int) -> list[Any]:
            return [b.add(first, b.mul(stride, I64(i))) for i in range(n)]

        others = [Vector(b, emit_load_stored(b, source, at)) for at in places(x_, next_x_, count)]
        out = acc_
        for j, at in enumerate(places(a_, next_a_, nr)):
            row = Vector(b, emit_load(b, at, to.llvm))
            for i, other in enumerate(others):
                n = j * count + i
                new = row.fma(other, Vector(b, b.extract_value(acc_, n)))
                out = b.insert_value(out, new.value, n)
        return out

    return acc(tile, source, acc, *[types.int64] * 4), codegen


@intrinsic
def store_dots(typingctx: Any, tile: Any, acc: Any, address: Any, stride: Any) -> Any:
    """Write the sums over the lanes: NR rows of W / NR numbers, `stride` bytes apart."""
    nr, width = tile.tile.NR, tile.real.width
    count = width // nr

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        sums = _sums(b, [b.extract_value(args[1], n) for n in range(width)])
        for j in range(nr):
            row = sums
            if nr > 1:
                lanes = range(j * count, (j + 1) * count)
                row = b.shuffle_vector(
                    sums, sums, ir.Constant(ir.VectorType(I32, count), list(lanes))
                )
            emit_store(b, b.add(args[2], b.mul(args[3], I64(j))), row)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64), codegen


def _sums(b: Any, vectors: list[Any]) -> Any:
    """Return the sum of the lanes of each of W vectors, in the lane of its number.

    Two vectors become one that holds, where bit `step` of the lane's number is 0, sums of two lanes
    of the first, and elsewhere of the second: a blend and a shuffle.
    """
    width, step = len(vectors), 1
    while len(vectors) > 1:
        own = [lane + width * (lane // step % 2) for lane in range(width)]
        other = [(lane ^ step) + width * (lane // step % 2) for lane in range(width)]
        own_mask, other_mask = (
            ir.Constant(ir.VectorType(I32, width), lanes) for lanes in (own, other)
        )
        vectors = [
            b.fadd(b.shuffle_vector(x, y, own_mask), b.shuffle_vector(x, y, other_mask))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        step *= 2
    return vectors[0]
