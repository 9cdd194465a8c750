"""Powers: x**y of floats, as exact as a logarithm in two parts makes it, and of integers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llvmlite import ir

from ..vector import Vector
from .arithmetic import floor
from .exponentials import exp
from .formats import clamp, format_of, narrow, round_to_int, scale, to_float, widen
from .logarithms import log, log_reduced, normal


class _Pair(NamedTuple):
    """A double-precision number in two parts, about 77 bits together.

    The head has at most 26 bits: products of heads are exact, with or without fused instructions.
    """

    head: Vector
    tail: Vector

    @staticmethod
    def of(high: Vector, low: Any = 0.0) -> _Pair:
        """Return high + low, of which low is much the smaller."""
        total = high + low
        head = (total.bits() & -(1 << 27)).as_float()
        return _Pair(head, (high - head) + low)

    def times(self, o: _Pair) -> _Pair:
        """Return the product, to about 75 bits."""
        low = self.head.fma(o.tail, self.tail * (o.head + o.tail))
        return _Pair.of(self.head * o.head, low)


# log2((1 + s) / (1 - s)) / s in z = s**2 up to ((sqrt(2) - 1) / (sqrt(2) + 1))**2: the first two
# terms of the series, 2 / ln 2 and a third of that, as exact heads with tails; for the others a
# minimax fit, of which the error is 2**-73 of the whole.
_LOG2_0 = (2.885390043258667, 3.851925982253235e-8)

_LOG2_1 = (0.9617966860532761, 7.872699542894897e-9)

_LOG2 = (
    0.5770780163555850382,
    0.4121985831113710265,
    0.3205988979077240107,
    0.262308199185443733,
    0.2219522390403769012,
    0.1924023900630941272,
    0.1684320269328270151,
    0.1729649064261549326,
)


def _log2_pair(x: Vector) -> _Pair:
    """log2 of positive float64, to about 66 bits."""
    y, added = normal(x)
    e, m = log_reduced(y)
    # s = (m - 1) / (m + 1): the quotient's head, then what the exact remainder adds.
    f, over = m - 1.0, x.const(1.0) / (m + 1.0)
    divisor = _Pair.of(m + 1.0).head
    head = _Pair.of(f * over).head
    s = _Pair(head, ((f - head * divisor) - head * (m - (divisor - 1.0))) * over)
    z = s.times(s)
    w = z.times(_Pair(*map(x.const, _LOG2_1)))
    short = z.head + z.tail
    rest = w.tail + short * short * short.poly(_LOG2) + _LOG2_0[1]
    log2_m = s.times(_add_to(x.const(_LOG2_0[0]), _Pair(w.head, rest)))
    return _add_to(to_float(e, x) - added, log2_m)


def _add_to(x: Vector, y: _Pair) -> _Pair:
    """Return x + y where x is 0 or the larger: the sum with the head is exact in two parts."""
    high = x + y.head
    return _Pair.of(high, (y.head - (high - x)) + y.tail)


def _power_float64(x: Vector, y: Vector) -> Vector:
    """x**y = 2**(y log2 x) for positive finite x and |y| <= 2**65."""
    t = _Pair.of(y).times(_log2_pair(x))
    k, end = format_of(x), 1100.0
    head = clamp(t.head, -end, end)
    tail = t.head.abs().cmp("<", end).where(t.tail, 0.0)
    n, _ = round_to_int(head)
    f = (head - n) + tail
    return scale(f.fma(f.poly(k.exp2), f.const(1.0)), n, k)


def power(x: Vector, y: Vector) -> Vector:
    """x**y as C's pow and NumPy have it: also for zeros, infinities, NaN and negative x."""
    a = x.abs()
    limit = 2.0**65  # beyond it no power is any different
    if isinstance(x.element, ir.FloatType):
        z = narrow(exp(widen(clamp(y, -limit, limit)) * log(widen(a))), x)
    else:
        z = _power_float64(a, clamp(y, -limit, limit))
    half = y * 0.5
    whole = y.cmp("==", floor(y))
    odd = whole & half.cmp("!=", floor(half))
    end = a.cmp("==", 0.0) | a.cmp("==", math.inf)
    z = end.where((a.cmp("==", 0.0) ^ y.cmp("<", 0.0)).where(x.const(0.0), math.inf), z)
    z = (x.bits().cmp("<", 0) & odd).where(-z, z)
    z = (x.cmp("<", 0.0) & ~(whole | end)).where(math.nan, z)
    z = (x.isnan() | y.isnan()).where(math.nan, z)
    return (x.cmp("==", 1.0) | y.cmp("==", 0.0)).where(1.0, z)


def int_power(x: Vector, n: Vector) -> Vector:
    """x**n for integers, wrapping; a negative n gives 0 unless x is 1 or -1.

    Squares for as long as an exponent has bits left.
    """
    b = x.b
    before, loop = b.block, b.append_basic_block("power")
    end = b.append_basic_block("power.end")
    b.branch(loop)
    b.position_at_end(loop)
    phis = [b.phi(x.type) for _ in range(3)]
    result, base, left = (Vector(b, phi) for phi in phis)
    following = (
        (left & 1).cmp("!=", 0).where(result * base, result),
        base * base,
        Vector(b, b.lshr(left.value, left.const(1).value)),
    )
    for phi, first, then in zip(phis, (x.const(1), x, n), following, strict=True):
        phi.add_incoming(first.value, before)
        phi.add_incoming(then.value, loop)
    go_on = b.bitcast(following[2].cmp("!=", 0).value, ir.IntType(x.width))
    b.cbranch(b.icmp_unsigned("!=", go_on, ir.Constant(go_on.type, 0)), loop, end)
    b.position_at_end(end)
    # Of 1 and -1 the powers alternate as those with n's last bits do.
    unit = x.cmp("==", 1) | x.cmp("==", -1)
    return (n.cmp("<", 0) & ~unit).where(0, following[0])


def constant_power(x: Vector, n: int) -> Vector:
    """x**n for an n that is known when this is compiled: as products where those are as good.

    Each factor adds half a unit in the last place to the error. Of `int_power` the compiler
    leaves just the products.
    """
    if not x.is_float:
        return int_power(x, x.const(n))
    square = x * x
    products = {-1: x.const(1.0) / x, 1: x, 2: square, 3: square * x, 4: square * square}
    return products[n] if n in products else power(x, x.const(n))
