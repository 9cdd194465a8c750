"""Arithmetic that is no one instruction: signs, rounding, extremes, Python's // and %."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..vector import Vector


def sign(x: Vector) -> Vector:
    """NumPy's sign: -1, 0 or 1, and NaN for NaN."""
    y = x.cmp("<", 0).where(-1, x)
    y = y.cmp(">", 0).where(1, y)
    return y + 0.0 if x.is_float else y  # of -0.0 this makes 0.0


def _rounding(name: str, doc: str) -> Callable[[Vector], Vector]:
    def emit(x: Vector) -> Vector:
        return x.call(name) if x.is_float else x

    emit.__doc__ = doc
    return emit


floor = _rounding("floor", "Round down; integers stay.")

ceil = _rounding("ceil", "Round up; integers stay.")

trunc = _rounding("trunc", "Round towards 0; integers stay.")

rint = _rounding("rint", "Round to the nearest integer, halves to the even one; integers stay.")


def isnan(x: Vector) -> Vector:
    """Return where x is NaN: nowhere among integers."""
    return x.cmp("!=", x)


def isinf(x: Vector) -> Vector:
    """Return where x is an infinity: nowhere among integers."""
    return x.abs().cmp("==", math.inf) if x.is_float else x.cmp("!=", x)


def isfinite(x: Vector) -> Vector:
    """Return where x is a number: everywhere among integers."""
    return x.abs().cmp("<", math.inf) if x.is_float else x.cmp("==", x)


def maximum(x: Vector, y: Vector) -> Vector:
    """NumPy's maximum: a NaN on either side wins."""
    keep = x.cmp(">", y)
    return (keep | x.isnan() if x.is_float else keep).where(x, y)


def minimum(x: Vector, y: Vector) -> Vector:
    """NumPy's minimum: a NaN on either side wins."""
    keep = x.cmp("<", y)
    return (keep | x.isnan() if x.is_float else keep).where(x, y)


def python_max(x: Vector, y: Vector) -> Vector:
    """Python's max: the first argument unless the second is greater."""
    return y.cmp(">", x).where(y, x)


def python_min(x: Vector, y: Vector) -> Vector:
    """Python's min: the first argument unless the second is less."""
    return y.cmp("<", x).where(y, x)


def floor_divide(x: Vector, y: Vector) -> Vector:
    """Floor as Python does; an integer divisor of 0 gives 0.

    The divisors 0 and -1 never reach the divide instruction, which would kill the process.
    """
    if x.is_float:
        return _float_divmod(x, y)[0]
    b = x.b
    safe = (y.cmp("==", 0) | y.cmp("==", -1)).where(1, y)
    q = Vector(b, b.sdiv(x.value, safe.value))
    r = x - q * safe
    q = (r.cmp("!=", 0) & (r ^ safe).cmp("<", 0)).where(q - 1, q)
    q = y.cmp("==", -1).where(-x, q)
    return y.cmp("==", 0).where(0, q)


def remainder(x: Vector, y: Vector) -> Vector:
    """Return the remainder with the divisor's sign, as Python's % does."""
    if x.is_float:
        return _float_divmod(x, y)[1]
    b = x.b
    safe = (y.cmp("==", 0) | y.cmp("==", -1)).where(1, y)
    r = Vector(b, b.srem(x.value, safe.value))
    return (r.cmp("!=", 0) & (r ^ safe).cmp("<", 0)).where(r + safe, r)


def _float_divmod(x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """Return x // y and x % y: the quotient is taken of what the exact remainder leaves.

    The floor of a rounded x / y would be wrong: 1 // 0.1 is 9.
    """
    ratio = x / y
    r = x.rem(y)
    q = (x - r) / y
    other_sign = r.cmp("!=", 0.0) & (r.cmp("<", 0.0) ^ y.cmp("<", 0.0))
    q, r = other_sign.where(q - 1.0, q), other_sign.where(r + y, r)
    r = r.cmp("==", 0.0).where(r.const(0.0).call("copysign", y), r)
    floor = q.call("floor")
    floor = (q - floor).cmp(">", 0.5).where(floor + 1.0, floor)
    floor = q.cmp("==", 0.0).where(q.const(0.0).call("copysign", ratio), floor)
    return y.cmp("==", 0.0).where(ratio, floor), r
