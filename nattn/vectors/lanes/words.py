"""Numbers as they are stored, and the words that products are made of.

A word is what a product takes as one scalar, or as one lane: a number of the type that is computed
in, or a pair of bfloat16 numbers, side by side in the 32 bits of a float32, the first in the lower
half. Where the types differ `load_words` and its like convert; words of pairs are copied as they
are. Kernels are written once, in words.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..pairs import add_dot, join, round_halves, round_to_pairs
from ..storage import I16, STORED, decode, encode
from ..vector import I32, I64, Vector, insert, vector_type
from .conversions import broadcast
from .memory import emit_load, emit_store
from .strided import emit_gather_transposed, lane_address
from .types import LLVM, Lanes

BOTH = -1
"""Which numbers of a pair `load_rows` keeps: the bits of a word that are not set to 0."""


def _stored(b: Any, tile: Any, address: Any, width: int) -> Vector:
    """Read adjacent numbers, as the floats that are computed with."""
    x = Vector(b, emit_load(b, address, vector_type(STORED[tile.tile.storage], width)))
    return decode(x, tile.tile.storage, vector_type(LLVM[tile.real.dtype], width))


def _as_words(b: Any, bits: Any, width: int) -> Any:
    """Return 32 bits each as the float32 that words of pairs travel as."""
    return b.bitcast(bits, vector_type(ir.FloatType(), width))


def emit_load_stored(b: Any, tile: Any, address: Any) -> Any:
    """Write the load of W adjacent numbers of an array, as floats."""
    return _stored(b, tile, address, tile.real.width).value


@intrinsic
def load_stored(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W adjacent numbers of an array as floats."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return emit_load_stored(b, tile, args[1])

    return tile.real(tile, types.int64), codegen


@intrinsic
def read_stored(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return one number of an array as a float."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _stored(b, tile, args[1], 1).value

    return tile.real.dtype(tile, types.int64), codegen


@intrinsic
def write_stored(typingctx: Any, tile: Any, address: Any, x: Any) -> Any:
    """Write one float to an array, rounded to what it stores."""
    of = tile.real.dtype

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = Vector(b, context.cast(b, args[2], sig.args[2], of))
        emit_store(b, args[1], encode(value, tile.tile.storage).value)
        return context.get_dummy_value()

    return types.void(tile, types.int64, x), codegen


@intrinsic
def store_stored(typingctx: Any, tile: Any, address: Any, x: Any) -> Any:
    """Write W adjacent floats to an array, rounded to what it stores."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        emit_store(b, args[1], encode(Vector(b, args[2]), tile.tile.storage).value)
        return context.get_dummy_value()

    return types.void(tile, types.int64, tile.real), codegen


# Words from neighbours in a row


@intrinsic
def load_words(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W words, of adjacent numbers of an array."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if tile.tile.per_word == 2:
            return emit_load(b, args[1], tile.real.llvm)
        return _stored(b, tile, args[1], tile.real.width).value

    return tile.real(tile, types.int64), codegen


def _pair(b: Any, address: Any, stride: Any, count: Any) -> Any:
    """Read two numbers, `stride` bytes apart, as 32 bits; the second is 0 if it does not exist."""
    exists = b.icmp_signed(">", count, I64(1))
    low = emit_load(b, address, I16)
    high = emit_load(b, b.select(exists, b.add(address, stride), address), I16)
    high = b.select(exists, b.zext(high, I32), I32(0))
    return b.or_(b.zext(low, I32), b.shl(high, I32(16)))


@intrinsic
def read_word(typingctx: Any, tile: Any, address: Any, stride: Any, count: Any) -> Any:
    """Return one word, of numbers `stride` bytes apart in a row of which `count` are left."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if tile.tile.per_word == 2:
            return _as_words(b, _pair(b, *args[1:]), 1)
        return _stored(b, tile, args[1], 1).value

    return tile.real.dtype(tile, *[types.int64] * 3), codegen


@intrinsic
def gather_words(typingctx: Any, tile: Any, base: Any, offsets: Any, dest: Any, stride: Any) -> Any:
    """Read W words of adjacent numbers for every lane, and write them as W vectors over the lanes.

    Lanes and addresses are as in `gather_transposed`.
    """
    storage = "float32" if tile.tile.per_word == 2 else tile.tile.storage

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        emit_gather_transposed(b, tile.real, storage, *args[1:])
        return context.get_dummy_value()

    return types.void(tile, *[types.int64] * 4), codegen


@intrinsic
def load_word_lanes(
    typingctx: Any, tile: Any, base: Any, offsets: Any, stride: Any, count: Any
) -> Any:
    """Read one word for every lane: `read_word` at byte address ``base + offsets[lane]``."""
    to: Lanes = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, base_, offsets_, stride_, count_ = args
        pairs = tile.tile.per_word == 2
        element = I32 if pairs else STORED[tile.tile.storage]
        x = ir.Constant(vector_type(element, to.width), ir.Undefined)
        for lane in range(to.width):
            at = lane_address(b, base_, offsets_, lane)
            value = _pair(b, at, stride_, count_) if pairs else emit_load(b, at, element)
            x = insert(b, x, value, lane)
        if pairs:
            return _as_words(b, x, to.width)
        return decode(Vector(b, x), tile.tile.storage, to.llvm).value

    return to(tile, *[types.int64] * 4), codegen


# Words from neighbours in a column


def _row_words(b: Any, tile: Any, args: Any, width: int) -> Any:
    """Return words from one row, or from two of which `keep` says what counts."""
    _, first, second, keep = args
    if tile.tile.per_word == 1:
        return _stored(b, tile, first, width).value
    low, high = (emit_load(b, at, vector_type(I16, width)) for at in (first, second))
    words = join(Vector(b, low), Vector(b, high))
    kept = Vector(b, broadcast(b, b.trunc(keep, I32), width))
    return _as_words(b, (words & kept).value, width)


@intrinsic
def load_rows(typingctx: Any, tile: Any, first: Any, second: Any, keep: Any) -> Any:
    """Return W words, one for each column: of one row or, if words are pairs, of two.

    `keep` is a mask of 32 bits: where it is 0 so are the numbers, whatever lies there. Both
    addresses have to be those of some row.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _row_words(b, tile, args, tile.real.width)

    return tile.real(tile, *[types.int64] * 3), codegen


@intrinsic
def read_rows(typingctx: Any, tile: Any, first: Any, second: Any, keep: Any) -> Any:
    """Return the word of one column, as `load_rows` does."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _row_words(b, tile, args, 1)

    return tile.real.dtype(tile, *[types.int64] * 3), codegen


# Words from floats


@intrinsic
def pair_up(typingctx: Any, tile: Any, x: Any, y: Any) -> Any:
    """Return words of pairs, lane by lane of x and of y, rounded; of a tile without pairs, x."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if tile.tile.per_word == 1:
            return args[1]
        x, y = (Vector(b, v) for v in args[1:])
        words = round_to_pairs(x, y, tile.tile.product)
        return _as_words(b, words.value, tile.real.width)

    return tile.real(tile, tile.real, tile.real), codegen


@intrinsic
def store_halves(typingctx: Any, tile: Any, address: Any, x: Any) -> Any:
    """Write lanes side by side, as W/2 words of pairs, rounded; without pairs as they are."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x = Vector(b, args[2])
        if tile.tile.per_word == 2:
            x = round_halves(x, tile.tile.product)
        emit_store(b, args[1], x.value)
        return context.get_dummy_value()

    return types.void(tile, types.int64, tile.real), codegen


@intrinsic
def chained(typingctx: Any, tile: Any, acc: Any, x: Any, y: Any) -> Any:
    """Return ``acc * x + y``, or acc with the dot product of pairs added: what takes most time."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, x, y = (Vector(b, v) for v in args[1:])
        if tile.tile.per_word == 2:
            return add_dot(acc, x.bits(), y.bits(), tile.tile.product).value
        return acc.fma(x, y).value

    return tile.real(tile, tile.real, tile.real, tile.real), codegen
