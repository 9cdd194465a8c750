"""How numbers are stored: what turns them into the floats that are computed with, and back.

All that is read or written of a caller's arrays, on the CPU and on a GPU, comes through here.
Rounding is to the nearest, ties to even; subnormal numbers are kept, and NaN stays NaN.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from .processor import processor
from .vector import I32, Vector, constant, on_gpu, vector_type

I16 = ir.IntType(16)

STORED = {
    "bool": ir.IntType(8),
    "int8": ir.IntType(8),
    "float16": I16,
    "bfloat16": I16,
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}
"""The LLVM type of what lies in memory; of 16-bit floats, their bits."""

SIZES = {"bool": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number."""


def decode(x: Vector, storage: str, to: Any) -> Vector:
    """Return stored numbers as floats of the LLVM type `to`; True is 0 and False -inf."""
    b = x.b
    if storage == "bool":
        return x.cmp("!=", 0).where(Vector(b, constant(to, 0.0)), -math.inf)
    if storage == "int8":
        return Vector(b, b.sitofp(x.value, to))
    if storage == "float16":
        x = _half_to_float(x)
    elif storage == "bfloat16":
        x = (_unsigned(x) << 16).as_float()
    if x.type == to:
        return x
    widens = isinstance(x.element, ir.FloatType)
    return Vector(b, (b.fpext if widens else b.fptrunc)(x.value, to))


def encode(x: Vector, storage: str) -> Vector:
    """Round floats of the type that a storage type is computed in to what is stored."""
    if storage == "float16":
        return _float_to_half(x)
    if storage == "bfloat16":
        bits = x.bits()
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        # Of NaN the payload could vanish.
        return _narrow(x.isnan().where(bits | 0x400000, rounded) >> 16)
    return x


def _unsigned(x: Vector) -> Vector:
    """Return 16 bits as the lower half of 32."""
    return Vector(x.b, x.b.zext(x.value, vector_type(I32, x.width)))


def _narrow(x: Vector) -> Vector:
    """Return the lower half of 32 bits."""
    return Vector(x.b, x.b.trunc(x.value, vector_type(I16, x.width)))


def _converts_halves(b: Any) -> bool:
    return on_gpu(b) or processor().converts_halves


def _half_to_float(x: Vector) -> Vector:
    """Convert half floats, where there is no instruction by their bits.

    Moved to float32's place the exponent is 112 too small: one exact product mends it, for
    subnormal numbers too. Inf and NaN get the full exponent.
    """
    b = x.b
    if _converts_halves(b):
        half = b.bitcast(x.value, vector_type(ir.HalfType(), x.width))
        return Vector(b, b.fpext(half, vector_type(ir.FloatType(), x.width)))
    wide = _unsigned(x)
    magnitude = ((wide & 0x7FFF) << 13).as_float() * 2.0**112
    special = (wide & 0x7C00).cmp("==", 0x7C00).where(0x7F800000, wide.const(0))
    sign = (wide & 0x8000) << 16
    return (magnitude.bits() | special | sign).as_float()


def _float_to_half(x: Vector) -> Vector:
    """Round to half floats, where there is no instruction by their bits.

    Of a normal number the bits below the last one are rounded away, and a carry goes on to the
    exponent, up to that of Inf. Subnormal ones are multiples of 2**-24: so are all sums with 0.5.
    """
    b = x.b
    if _converts_halves(b):
        half = b.fptrunc(x.value, vector_type(ir.HalfType(), x.width))
        return Vector(b, b.bitcast(half, vector_type(I16, x.width)))
    bits, size = x.bits(), x.abs()
    magnitude = size.bits()
    normal = (magnitude + ((magnitude >> 13) & 1) + (0xFFF - (112 << 23))) >> 13
    subnormal = (size + 0.5).bits() - 0x3F000000
    found = size.cmp("<", 2.0**-14).where(subnormal, normal)
    found = size.cmp(">=", 2.0**16).where(0x7C00, found)
    found = x.isnan().where(0x7E00, found)
    return _narrow(found | ((bits >> 16) & 0x8000))
