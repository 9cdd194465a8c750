"""Sine and cosine."""

from __future__ import annotations

import math

from llvmlite import ir

from ..vector import Vector
from .formats import clamp, format_of, itemsize_of, narrow, round_to_int, two_sum, widen

# pi/2 in parts of 33 bits, whose products with an integer below 2**20 are exact, and the rest.
_PIO2 = (
    1.5707963267341256,
    6.077100506303966e-11,
    2.0222662487111665e-21,
    8.4784276603689e-32,
)


def _reduce_trig(x: Vector) -> tuple[Vector, Vector]:
    """Write x as n pi/2 + r with |r| <= pi/4: (r, bits of which the low two are n - 1).

    r is good to its last bit for |x| <= 1e6. Beyond, and in the end all the more, r is that of a
    number which differs from x by some units in the last place.
    """
    wide = widen(x) if isinstance(x.element, ir.FloatType) else x
    n, bits = round_to_int(wide * (2 / math.pi))
    r = (-n).fma(_PIO2[0], wide)  # exact
    if wide is x:
        # Near a multiple of pi/2 little is left: what each sum rounds off is kept.
        r, lost = two_sum(r, -n * _PIO2[1])
        r, more = two_sum(r, -n * _PIO2[2])
        r = r + (-n).fma(_PIO2[3], lost + more)
    else:
        r = (-n).fma(_PIO2[1] + _PIO2[2], r)
    r = clamp(r, -math.pi / 4, math.pi / 4)
    if wide is not x:
        r = narrow(r, x)
        bits = Vector(x.b, x.b.trunc(bits.value, r.bits().type))
    return r, bits


def _sin_of_quadrant(r: Vector, n: Vector) -> Vector:
    """sin(r + n pi/2) for |r| <= pi/4."""
    k = format_of(r)
    z = r * r
    y = (n & 1).cmp("==", 0).where(r * z.poly(k.sin), z.poly(k.cos))
    sign = (n & 2) << (8 * itemsize_of(r) - 2)
    return (y.bits() ^ sign).as_float()


def sin(x: Vector) -> Vector:
    """sin x, with all digits for |x| <= 1e6."""
    r, bits = _reduce_trig(x)
    return x.cmp("==", 0.0).where(x, _sin_of_quadrant(r, bits + 1))  # -0.0 too


def cos(x: Vector) -> Vector:
    """cos x = sin(x + pi/2), with all digits for |x| <= 1e6."""
    r, bits = _reduce_trig(x)
    return _sin_of_quadrant(r, bits + 2)
