"""The register tile: MV x NR vectors in a tuple, which LLVM keeps in registers through a loop."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import I64, Vector, constant
from .conversions import broadcast
from .memory import emit_load, emit_store
from .types import LLVM


@intrinsic
def zeros(typingctx: Any, tile: Any) -> Any:
    """Return the register tile's accumulators, all 0: a tuple of MV * NR lanes."""
    count = tile.tile.MV * tile.tile.NR
    to = types.UniTuple(tile.real, count)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        zero = constant(tile.real.llvm, 0.0)
        return ir.Constant(ir.ArrayType(tile.real.llvm, count), [zero] * count)

    return to(tile), codegen


@intrinsic
def outer_fma(typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any) -> Any:
    """Add an outer product: ``acc[j, i] += a[i] * x[j]``.

    a[i] are MV adjacent vectors at byte address `a`; x[j] are NR scalars `stride` bytes apart,
    the first at byte address `x`.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, acc_, a_, x_, stride_ = args
        size = tile.tile.itemsize * to.width
        vectors = [Vector(b, emit_load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        out = acc_
        for j in range(nr):
            scalar = emit_load(b, b.add(x_, b.mul(stride_, I64(j))), LLVM[to.dtype])
            spread = Vector(b, broadcast(b, scalar, to.width))
            for i in range(mv):
                old = Vector(b, b.extract_value(acc_, j * mv + i))
                out = b.insert_value(out, vectors[i].fma(spread, old).value, j * mv + i)
        return out

    return acc(tile, acc, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_tile(typingctx: Any, tile: Any, acc: Any, address: Any, top: Any) -> Any:
    """Write the register tile row by row: NR rows of MV vectors, without a gap.

    The MV vectors at address `top` become the maximum of themselves and the rows (a NaN is
    passed over): while the tile is in registers and waits to be written, that costs nothing.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        for n in range(mv * nr):
            emit_store(b, b.add(args[2], I64(n * size)), b.extract_value(args[1], n))
        for i in range(mv):
            at = b.add(args[3], I64(i * size))
            largest = Vector(b, emit_load(b, at, to.llvm))
            for j in range(nr):
                x = Vector(b, b.extract_value(args[1], j * mv + i))
                largest = x.cmp(">", largest).where(x, largest)
            emit_store(b, at, largest.value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64), codegen


def _is_negative_zero(x: Vector) -> Vector:
    return x.bits().cmp("<", 0) & x.cmp("==", 0.0)


@intrinsic
def outer_fma_visible(typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any) -> Any:
    """Add an outer product as `outer_fma` does, and leave acc as it is where a[i] is -0.0.

    That is what is hidden; 0 * NaN would be NaN. Negative numbers and a NaN with a sign are not.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, acc_, a_, x_, stride_ = args
        size = tile.tile.itemsize * to.width
        vectors = [Vector(b, emit_load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        hidden = [_is_negative_zero(v) for v in vectors]
        out = acc_
        for j in range(nr):
            scalar = emit_load(b, b.add(x_, b.mul(stride_, I64(j))), LLVM[to.dtype])
            spread = Vector(b, broadcast(b, scalar, to.width))
            for i in range(mv):
                old = Vector(b, b.extract_value(acc_, j * mv + i))
                new = hidden[i].where(old, vectors[i].fma(spread, old))
                out = b.insert_value(out, new.value, j * mv + i)
        return out

    return acc(tile, acc, types.int64, types.int64, types.int64), codegen


@intrinsic
def outer_fma_unless_hidden(
    typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any
) -> Any:
    """Add an outer product as `outer_fma` does, and leave acc[j] as it is where x[j] is -0.0.

    It is `outer_fma_visible` where the scalars are what may be hidden.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, acc_, a_, x_, stride_ = args
        size = tile.tile.itemsize * to.width
        vectors = [Vector(b, emit_load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        out = acc_
        for j in range(nr):
            scalar = emit_load(b, b.add(x_, b.mul(stride_, I64(j))), LLVM[to.dtype])
            spread = Vector(b, broadcast(b, scalar, to.width))
            hidden = _is_negative_zero(spread)
            for i in range(mv):
                old = Vector(b, b.extract_value(acc_, j * mv + i))
                new = hidden.where(old, vectors[i].fma(spread, old))
                out = b.insert_value(out, new.value, j * mv + i)
        return out

    return acc(tile, acc, types.int64, types.int64, types.int64), codegen


@intrinsic
def rescale_add_tile(typingctx: Any, tile: Any, acc: Any, address: Any, alpha: Any) -> Any:
    """Add the register tile to memory: ``m[j, i] = m[j, i] * alpha[i] + acc[j, i]``."""
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        factors = [
            Vector(b, emit_load(b, b.add(args[3], I64(i * size)), to.llvm)) for i in range(mv)
        ]
        for n in range(mv * nr):
            at = b.add(args[2], I64(n * size))
            old = Vector(b, emit_load(b, at, to.llvm))
            new = old.fma(factors[n % mv], Vector(b, b.extract_value(args[1], n)))
            emit_store(b, at, new.value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64), codegen


@intrinsic
def add_tile(typingctx: Any, tile: Any, acc: Any, address: Any, stride: Any) -> Any:
    """Add the register tile to memory whose rows lie `stride` bytes apart."""
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        for j in range(nr):
            row = b.add(args[2], b.mul(args[3], I64(j)))
            for i in range(mv):
                at = b.add(row, I64(i * size))
                old = Vector(b, emit_load(b, at, to.llvm))
                emit_store(b, at, (old + Vector(b, b.extract_value(args[1], j * mv + i))).value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64), codegen
