"""Dot products of pairs of bfloat16 numbers, added to a float32: what AVX512-BF16 is made for.

``acc + x1 * y1 + x0 * y0``: first the products of the upper halves are added, then those of the
lower ones, each with one rounding, to nearest even, and as if the exponent had no lower end.
Subnormal numbers count as 0 of their sign, among the operands, in between and as a result. No
state of the processor changes that, and NaN and Inf propagate (Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 2, VDPBF16PS).

Each function has two forms, which differ in no bit (but for the payload of NaN): that of the
instruction, and one that every processor can run.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .storage import I16, encode
from .vector import I32, Vector, constant, vector_type


class BFloatType(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    null = "0.0"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


_NO_TINY = 2.0**-126 * (1 - 2.0**-25)
"""What is smaller rounds to a subnormal number, of 24 bits that is, whatever its exponent."""


def _call(name: str, returns: Any, args: list[Any], b: Any) -> Any:
    ty = ir.FunctionType(returns, [x.type for x in args])
    return b.call(cgutils.get_or_insert_function(b.module, ty, f"llvm.x86.avx512bf16.{name}"), args)


def _halves(words: Vector) -> tuple[Vector, Vector]:
    """Return both numbers of each word as float32, the lower first."""
    return (words << 16).as_float(), (words & -65536).as_float()


def _flushed(x: Vector) -> Vector:
    """Return a float32, or 0 of the same sign for a subnormal one."""
    bits = x.bits()
    return (bits & 0x7F800000).cmp("==", 0).where(bits & (-1 << 31), bits).as_float()


def join(low: Vector, high: Vector) -> Vector:
    """Return words of 32 bits, of two halves of 16."""
    b, wide = low.b, vector_type(I32, low.width)
    return Vector(b, b.zext(low.value, wide)) | (Vector(b, b.zext(high.value, wide)) << 16)


def add_dot(acc: Vector, x: Vector, y: Vector, product: str) -> Vector:
    """Add to each float32 of `acc` the dot product of a pair of `x` and one of `y`.

    `x` and `y` are words of 32 bits; `product` is "pairs" or "emulated pairs".
    """
    b, width = acc.b, acc.width
    if product == "pairs":
        pairs = vector_type(BFloatType(), 2 * width)
        args = [acc.value, *(b.bitcast(v.value, pairs) for v in (x, y))]
        return Vector(b, _call(f"dpbf16ps.{32 * width}", acc.type, args, b))
    for one, other in reversed(list(zip(_halves(x), _halves(y), strict=True))):
        acc = _add_product(_flushed(acc), _flushed(one), _flushed(other))
    return acc


def _add_product(acc: Vector, x: Vector, y: Vector) -> Vector:
    """Return acc + x * y, rounded once and flushed.

    In float64 the product is exact. The sum is made odd in its last bit where it is not exact
    (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd", 2008): then rounding it once more gives what rounding once would have.
    """
    b = acc.b
    double = vector_type(ir.DoubleType(), acc.width)
    p, c = (Vector(b, b.fpext(v.value, double)) for v in (x, acc))
    p = p * Vector(b, b.fpext(y.value, double))
    total = p + c
    other = total - p
    error = (p - (total - other)) + (c - other)
    bits = total.bits()
    towards_zero = error.cmp(">", 0.0) ^ total.cmp(">", 0.0)
    inexact = error.cmp("<", 0.0) | error.cmp(">", 0.0)  # where Inf is involved it is NaN
    even = inexact & (bits & 1).cmp("==", 0)
    bits = even.where(towards_zero.where(bits - 1, bits + 1), bits)
    total = bits.as_float()
    sign = Vector(b, b.and_(total.bits().value, constant(bits.type, -1 << 63))).as_float()
    total = total.abs().cmp("<", _NO_TINY).where(sign, total)
    return Vector(b, b.fptrunc(total.value, acc.type))


def round_to_pairs(low: Vector, high: Vector, product: str) -> Vector:
    """Round floats to bfloat16 numbers and return them as words of pairs, lane by lane.

    To nearest even; subnormal numbers become 0 of their sign.
    """
    b, width = low.b, low.width
    if product == "pairs":
        pairs = vector_type(BFloatType(), 2 * width)
        both = _call(f"cvtne2ps2bf16.{32 * width}", pairs, [high.value, low.value], b)
        both = b.bitcast(both, vector_type(I16, 2 * width))
        places = [start + n for n in range(width) for start in (0, width)]
        mask = ir.Constant(ir.VectorType(I32, 2 * width), places)
        mixed = b.shuffle_vector(both, both, mask)
        return Vector(b, b.bitcast(mixed, vector_type(I32, width)))
    return join(*(round_halves(v, product) for v in (low, high)))


def round_halves(x: Vector, product: str) -> Vector:
    """Round floats to bfloat16 numbers, of 16 bits each, as `round_to_pairs` does."""
    b = x.b
    if product == "pairs":
        # LLVM has the instruction for it, which flushes.
        half = b.fptrunc(x.value, vector_type(BFloatType(), x.width))
        return Vector(b, b.bitcast(half, vector_type(I16, x.width)))
    return encode(_flushed(x), "bfloat16")
