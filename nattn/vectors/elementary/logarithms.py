"""Logarithms: log x and log(1 + x)."""

from __future__ import annotations

import math

import numpy as np

from ..vector import Vector
from .arithmetic import minimum
from .formats import format_of, to_float, two_sum


def log_reduced(y: Vector) -> tuple[Vector, Vector]:
    """Write normal numbers as 2**e m with 1/sqrt(2) <= m <= sqrt(2): (e as an integer, m)."""
    k = format_of(y)
    # Subtracting the bits of 1/sqrt(2) moves the exponent's step there.
    root = np.array(math.sqrt(0.5), np.float32 if k.mantissa == 23 else np.float64)
    root_bits = int(root.view(f"i{root.itemsize}"))
    e = (y.bits() - root_bits) >> k.mantissa
    return e, (y.bits() - (e << k.mantissa)).as_float()


def normal(x: Vector) -> tuple[Vector, Vector]:
    """Scale subnormal numbers up: (x or x 2**(mantissa + 1), the exponent that this added)."""
    k = format_of(x)
    tiny = x.cmp("<", 2.0 ** (1 - k.bias))
    return (
        tiny.where(x * 2.0 ** (k.mantissa + 1), x),
        tiny.where(x.const(k.mantissa + 1.0), 0.0),
    )


def _log(e: Vector, f: Vector, x: Vector) -> Vector:
    """log(2**e (1 + f)) = e ln 2 + 2 atanh(f / (2 + f)), and what log has at the ends of x."""
    k = format_of(x)
    s = f / (f + 2.0)
    z = s * s
    # log(1 + f) = 2 s + s z g(z), summed from the small end; e ln2_hi is exact.
    small = e.fma(k.ln2_lo, s * z * z.poly(k.log))
    y = e.fma(k.ln2_hi, small + (s + s))
    y = x.cmp("==", math.inf).where(math.inf, y)
    y = x.cmp("==", 0.0).where(-math.inf, y)
    return (x.cmp("<", 0.0) | x.isnan()).where(math.nan, y)


def log(x: Vector) -> Vector:
    """Natural logarithm."""
    y, added = normal(x)
    e, m = log_reduced(y)
    return _log(to_float(e, x) - added, m - 1.0, x)


def log1p(x: Vector) -> Vector:
    """log(1 + x): what the rounding of 1 + x loses joins again where 1 is subtracted."""
    k = format_of(x)
    u, lost = two_sum(x, x.const(1.0))
    e, m = log_reduced(u)
    # Where 2**-e is out of range, what is lost is nothing beside 2**e.
    scale = minimum(e, e.const(k.bias - 1))
    scale = ((e.const(k.bias) - scale) << k.mantissa).as_float()
    y = _log(to_float(e, x), lost.fma(scale, m - 1.0), u)
    return x.abs().cmp("<", 2.0 ** (-k.mantissa - 2)).where(x, y)
