"""Exponentials: 2**x, e**x, e**x - 1 and tanh."""

from __future__ import annotations

import math

from llvmlite import ir

from ..vector import Vector
from .formats import clamp, format_of, power_of_two, round_to_int, scale


def _exp2_reduced(x: Vector) -> tuple[Vector, Vector, Vector]:
    """Write 2**x as 2**f 2**n with |f| <= 1/2: (2**f, n as a float, the bits of n)."""
    n, bits = round_to_int(x)
    f = x - n
    return f.fma(f.poly(format_of(x).exp2), f.const(1.0)), n, bits


def exp2_nonpositive(x: Vector) -> Vector:
    """2**x for x <= 0 or NaN, exactly 0 below the smallest normal number and 1 at 0.

    The running softmax spends most of its time here, so this is not `exp2`: a shorter polynomial
    (relative error at most 2 eps), and floor(x) in place of the nearest integer. That leaves a
    factor 1 <= 2**f <= 2, so whatever has a power of two other than 0 is a normal number and
    nothing needs a select.
    """
    k = format_of(x)
    x = x.const(-k.bias).cmp(">", x).where(-float(k.bias), x)  # one instruction; NaN passes
    n = x.call("floor")
    f = x - n
    p = f.fma(f.poly(k.fast_exp2), f.const(1.0))
    return p * power_of_two((n + k.magic).bits(), k)


def exp2(x: Vector) -> Vector:
    """2**x."""
    k = format_of(x)
    p, n, _ = _exp2_reduced(clamp(x, -k.bias - k.mantissa - 2.0, k.bias + 2.0))
    return scale(p, n, k)


def _reduce_exp(x: Vector) -> tuple[Vector, Vector]:
    """Write e**x as 2**n e**r with |r| <= ln(2)/2 (Cody and Waite's two-part ln 2)."""
    k = format_of(x)
    n, _ = round_to_int(x * math.log2(math.e))
    r = (-n).fma(k.ln2_lo, (-n).fma(k.ln2_hi, x))
    return n, r


def _expm1_reduced(r: Vector) -> Vector:
    """e**r - 1 for |r| <= ln(2)/2."""
    return (r * r).fma(r.poly(format_of(r).expm1), r)


def exp(x: Vector) -> Vector:
    """e**x."""
    k = format_of(x)
    n, r = _reduce_exp(clamp(x, k.min_exp, k.max_exp))
    return scale(_expm1_reduced(r) + 1.0, n, k)


def expm1(x: Vector) -> Vector:
    """e**x - 1 = 2**n (e**r - 1) + (2**n - 1), which keeps full precision near 0."""
    k = format_of(x)
    n, r = _reduce_exp(clamp(x, -k.tanh_one, k.max_exp))
    # Where 2**n itself overflows, a part of it waits until the end.
    most = float(k.bias - 1)
    m = n.cmp(">", most).where(most, n)
    two_m, rest = (power_of_two(round_to_int(i)[1], k) for i in (m, n - m))
    return (two_m.fma(_expm1_reduced(r), two_m - 1.0) * rest).call("copysign", x)


def tanh(x: Vector) -> Vector:
    """tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1, which keeps full precision near 0."""
    if isinstance(x.element, ir.FloatType):
        return _tanh_float32(x)
    k = format_of(x)
    a = x.abs()
    y = (a + a).cmp(">", k.tanh_one).where(k.tanh_one, a + a)
    n, r = _reduce_exp(y)
    two_n = power_of_two(round_to_int(n)[1], k)
    e = two_n.fma(_expm1_reduced(r), two_n - 1.0)
    return (e / (e + 2.0)).call("copysign", x)


# tanh(x/2) = (x/2) (1 + p z) / (1 + q z) in z = x**2 on |x| <= 9.3: p and q are the polynomials
# whose largest error, times the 1 / cosh(x) by which it reaches tanh(x), is least: 2**-27.
_TANH_P = (0.029765197395040563, 0.00011406573333040516)

_TANH_Q = (0.11309849406693587, 0.0012056451941369636, 1.2249823435013977e-6)

_TANH_ONE = 9.3


def _tanh_float32(x: Vector) -> Vector:
    """tanh x = 2 u / (1 + u**2) = a b / ((b - |a|/2)**2 + |a| b) with u = tanh(x/2) = (a/2) / b.

    Near 1 that forgives errors in u, so a rational function of low degree does, and the square
    vanishes beside |a| b. a is x and b, d and d's square are 1 with something added that is small
    where its own rounding would count. No float32 gives more than 1 (all were tried).
    """
    x = clamp(x, -_TANH_ONE, _TANH_ONE)
    z = x * x
    a = (x * z).fma(z.poly(_TANH_P), x)
    t = z * z.poly(_TANH_Q)  # b - 1
    ab = a.fma(t, a)
    g = a.abs().fma(-0.5, t)
    d = g + 1.0
    return ab / (d + d.fma(g, ab.abs()))
