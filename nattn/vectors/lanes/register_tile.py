"""The register tile: MV x NR vectors in a tuple, which LLVM keeps in registers through a loop."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..pairs import add_dot
from ..storage import I16
from ..vector import I32, I64, Vector, constant, vector_type
from .conversions import as_lanes, broadcast
from .memory import emit_load, emit_store
from .types import LLVM
from .words import emit_load_stored


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
def add_outer(typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any) -> Any:
    """Add an outer product: ``acc[j, i] += a[i] * x[j]``.

    a[i] are MV adjacent vectors of words at byte address `a`; x[j] are NR words `stride` bytes
    apart, the first at byte address `x`. The product of words of pairs is their dot product.
    """
    return acc(tile, acc, types.int64, types.int64, types.int64), _outer(tile, "")


@intrinsic
def add_outer_stored(
    typingctx: Any, tile: Any, source: Any, acc: Any, a: Any, x: Any, stride: Any
) -> Any:
    """Add an outer product as `add_outer` does; a[i] are stored as the tile `source` says."""
    codegen = _outer(tile, "", source)

    def without_source(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return codegen(context, b, sig, (args[0], *args[2:]))

    return acc(tile, source, acc, types.int64, types.int64, types.int64), without_source


@intrinsic
def add_outer_visible(typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any) -> Any:
    """Add an outer product as `add_outer` does, without what is -0.0 in a[i].

    That is what is hidden; 0 * NaN would be NaN. Negative numbers and a NaN with a sign are not.
    """
    return acc(tile, acc, types.int64, types.int64, types.int64), _outer(tile, "a")


@intrinsic
def add_outer_unless_hidden(
    typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any
) -> Any:
    """Add an outer product as `add_outer` does, without what is -0.0 in x[j].

    It is `add_outer_visible` where the scalars are what may be hidden.
    """
    return acc(tile, acc, types.int64, types.int64, types.int64), _outer(tile, "x")


def _outer(tile: Any, hidden: str, source: Any = None) -> Any:
    """Return what writes an outer product; `hidden` says which factor is -0.0 if it is hidden."""
    mv, nr, to, pairs = tile.tile.MV, tile.tile.NR, tile.real, tile.tile.per_word == 2
    size, mark = tile.tile.itemsize * to.width, _hidden_halves if pairs else _is_negative_zero

    def product(old: Vector, a: Vector, x: Vector, unseen: Any) -> Vector:
        if not pairs:
            new = a.fma(x, old)
            return new if unseen is None else unseen.where(old, new)
        if unseen is not None:  # a product with 0 of any sign adds nothing
            a, x = (a, x & ~unseen) if hidden == "a" else (a & ~unseen, x)
        return add_dot(old, a, x, tile.tile.product)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, acc_, a_, x_, stride_ = args
        words = vector_type(I32, to.width) if pairs else to.llvm
        scalar = I32 if pairs else LLVM[to.dtype]
        if source is None:
            vectors = [Vector(b, emit_load(b, b.add(a_, I64(i * size)), words)) for i in range(mv)]
        else:
            step = source.tile.storage_size * to.width
            places = [b.add(a_, I64(i * step)) for i in range(mv)]
            vectors = [Vector(b, emit_load_stored(b, source, at)) for at in places]
        unseen = [mark(v) if hidden == "a" else None for v in vectors]
        out = acc_
        for j in range(nr):
            word = emit_load(b, b.add(x_, b.mul(stride_, I64(j))), scalar)
            spread = Vector(b, broadcast(b, word, to.width))
            if hidden == "x":
                unseen = [mark(spread)] * mv
            for i in range(mv):
                old = Vector(b, b.extract_value(acc_, j * mv + i))
                new = product(old, vectors[i], spread, unseen[i])
                out = b.insert_value(out, new.value, j * mv + i)
        return out

    return codegen


def _is_negative_zero(x: Vector) -> Vector:
    return x.bits().cmp("<", 0) & x.cmp("==", 0.0)


def _hidden_halves(words: Vector) -> Vector:
    """Return a mask of the halves of words that are -0.0."""
    b = words.b
    halves = Vector(b, b.bitcast(words.value, vector_type(I16, 2 * words.width)))
    same = halves.cmp("==", -(1 << 15))
    mask = b.sext(same.value, halves.type)
    return Vector(b, b.bitcast(mask, words.type))


@intrinsic
def store_tile(typingctx: Any, tile: Any, acc: Any, address: Any, top: Any, factor: Any) -> Any:
    """Write the register tile row by row: NR rows of MV vectors, without a gap.

    Products of pairs are multiplied by `factor` first; other words have it in them. The MV vectors
    at address `top` become the maximum of themselves and the rows (a NaN is passed over): while
    the tile is in registers and waits to be written, that costs nothing.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        found = [Vector(b, b.extract_value(args[1], n)) for n in range(mv * nr)]
        if tile.tile.per_word == 2:
            spread = as_lanes(context, b, args[4], sig.args[4], to)
            found = [x * spread for x in found]
        for n, x in enumerate(found):
            emit_store(b, b.add(args[2], I64(n * size)), x.value)
        for i in range(mv):
            at = b.add(args[3], I64(i * size))
            largest = Vector(b, emit_load(b, at, to.llvm))
            for x in found[i::mv]:
                largest = x.cmp(">", largest).where(x, largest)
            emit_store(b, at, largest.value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64, factor), codegen


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
def add_tile(typingctx: Any, tile: Any, acc: Any, address: Any, stride: Any, factor: Any) -> Any:
    """Add the register tile to memory whose rows lie `stride` bytes apart.

    As in `store_tile`, products of pairs are multiplied by `factor`.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size, spread = tile.tile.itemsize * to.width, None
        if tile.tile.per_word == 2:
            spread = as_lanes(context, b, args[4], sig.args[4], to)
        for j in range(nr):
            row = b.add(args[2], b.mul(args[3], I64(j)))
            for i in range(mv):
                at = b.add(row, I64(i * size))
                old = Vector(b, emit_load(b, at, to.llvm))
                new = Vector(b, b.extract_value(args[1], j * mv + i))
                new = old + new if spread is None else new.fma(spread, old)
                emit_store(b, at, new.value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64, factor), codegen
