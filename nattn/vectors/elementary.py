"""LLVM vectors with Python's operators, and the elementary functions written with them.

`Vector` is an LLVM vector under construction: its operators emit instructions, so that a formula
below reads as such. Every function takes and returns `Vector` and works for any width, in float32
and float64. `lanes` offers them to Numba under NumPy's names, `dual` differentiates them.

A vector of width 1 is a plain LLVM scalar: that is what each thread of a GPU works on, where there
are no others. What the two targets spell differently `Vector` knows, and nothing else here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

I32 = ir.IntType(32)
I64 = ir.IntType(64)


def on_gpu(b: Any) -> bool:
    """Whether code is for NVIDIA's processors, of which NVVM is the compiler."""
    return str(b.module.triple).startswith("nvptx")


def vector_type(element: Any, width: int) -> Any:
    """Return the LLVM type of so many numbers: of one, the scalar type itself."""
    return element if width == 1 else ir.VectorType(element, width)


def constant(ty: Any, x: Any) -> Any:
    """Return a number in all lanes of a vector type."""
    return ir.Constant(ty, [x] * ty.count if isinstance(ty, ir.VectorType) else x)


def insert(b: Any, vector: Any, x: Any, lane: int) -> Any:
    """Return a vector of which one lane is changed."""
    if isinstance(vector.type, ir.VectorType):
        return b.insert_element(vector, x, I32(lane))
    return x


def extract(b: Any, vector: Any, lane: Any) -> Any:
    """Return one lane of a vector; its number may be a value."""
    if isinstance(vector.type, ir.VectorType):
        return b.extract_element(vector, I32(lane) if isinstance(lane, int) else lane)
    return vector


_LIBDEVICE = {"fabs", "trunc", "rint", "fmod"}
"""Exact functions that NVVM has in its library, under the names of C, and not as intrinsics."""


class Vector:
    """An LLVM vector under construction: operators emit instructions."""

    def __init__(self, b: ir.IRBuilder, value: Any) -> None:
        self.b = b
        self.value = value
        self.type = value.type
        several = isinstance(value.type, ir.VectorType)
        self.width = value.type.count if several else 1
        self.element = value.type.element if several else value.type
        self.is_float = not isinstance(self.element, ir.IntType)

    def const(self, x: Any) -> Vector:
        """Broadcast a Python number (or pass a `Vector`) to this type."""
        if isinstance(x, Vector):
            return x
        if self.is_float:
            x = float(np.float32(x)) if isinstance(self.element, ir.FloatType) else float(x)
        return Vector(self.b, constant(self.type, x))

    def literal(self) -> Any:
        """Return the number that all lanes are known to hold, None if there is none."""
        if not isinstance(self.value, ir.Constant):
            return None
        return self.value.constant if self.width == 1 else self.value.constant[0].constant

    def _op(self, name: str, other: Any) -> Vector:
        prefix = "f" if self.is_float else ""
        emit = getattr(self.b, prefix + name)
        return Vector(self.b, emit(self.value, self.const(other).value))

    def __add__(self, o: Any) -> Vector:
        return self._op("add", o)

    def __sub__(self, o: Any) -> Vector:
        return self._op("sub", o)

    def __mul__(self, o: Any) -> Vector:
        return self._op("mul", o)

    def __truediv__(self, o: Any) -> Vector:
        return self._op("div", o)

    def __neg__(self) -> Vector:
        if not self.is_float:
            return self.const(0) - self
        if on_gpu(self.b):  # NVVM's LLVM is older than fneg
            return self.const(-0.0) - self
        return Vector(self.b, self.b.fneg(self.value))

    def _bitwise(self, name: str, o: Any) -> Vector:
        return Vector(self.b, getattr(self.b, name)(self.value, self.const(o).value))

    def __and__(self, o: Any) -> Vector:
        return self._bitwise("and_", o)

    def __or__(self, o: Any) -> Vector:
        return self._bitwise("or_", o)

    def __xor__(self, o: Any) -> Vector:
        return self._bitwise("xor", o)

    def __invert__(self) -> Vector:
        return Vector(self.b, self.b.not_(self.value))

    def __lshift__(self, o: Any) -> Vector:
        return self._bitwise("shl", o)

    def __rshift__(self, o: Any) -> Vector:
        return self._bitwise("ashr", o)

    def cmp(self, op: str, o: Any) -> Vector:
        """Compare as NumPy does: with a NaN only ``!=`` is true."""
        y = self.const(o).value
        if not self.is_float:
            return Vector(self.b, self.b.icmp_signed(op, self.value, y))
        emit = self.b.fcmp_unordered if op == "!=" else self.b.fcmp_ordered
        return Vector(self.b, emit(op, self.value, y))

    def where(self, x: Any, y: Any) -> Vector:
        """Select by this boolean vector; one of x and y may be a number."""
        x = x if isinstance(x, Vector) else y.const(x)
        y = x.const(y)
        return Vector(self.b, self.b.select(self.value, x.value, y.value))

    def call(self, name: str, *args: Any) -> Vector:
        """Call an LLVM intrinsic on vectors of this type."""
        if on_gpu(self.b) and name in _LIBDEVICE:
            return self._call(f"__nv_{name}" + "f" * isinstance(self.element, ir.FloatType), args)
        suffix = {"float": "f32", "double": "f64"}.get(str(self.element), str(self.element))
        if self.width > 1:
            suffix = f"v{self.width}{suffix}"
        return self._call(f"llvm.{name}.{suffix}", args)

    def _call(self, function: str, args: tuple[Any, ...]) -> Vector:
        operands = [self.value] + [self.const(a).value for a in args]
        ty = ir.FunctionType(self.type, [self.type] * len(operands))
        fn = cgutils.get_or_insert_function(self.b.module, ty, function)
        return Vector(self.b, self.b.call(fn, operands))

    def fma(self, y: Any, z: Any) -> Vector:
        """Return self * y + z, fused where the processor can."""
        return self.call("fma" if on_gpu(self.b) else "fmuladd", y, z)

    def rem(self, y: Vector) -> Vector:
        """Return the exact remainder of floats, with the sign of self: C's fmod."""
        if on_gpu(self.b):  # which has no instruction for it, and no C library
            return self.call("fmod", y)
        return Vector(self.b, self.b.frem(self.value, y.value))

    def abs(self) -> Vector:
        """Return the magnitude."""
        if self.is_float:
            return self.call("fabs")
        return self.cmp("<", 0).where(-self, self)

    def isnan(self) -> Vector:
        """Return where the value is NaN."""
        return self.cmp("!=", self)

    def bits(self) -> Vector:
        """Return the float's bits as an integer vector."""
        integer = I32 if isinstance(self.element, ir.FloatType) else I64
        return Vector(self.b, self.b.bitcast(self.value, vector_type(integer, self.width)))

    def as_float(self) -> Vector:
        """Return integer bits as a float vector."""
        real = ir.FloatType() if self.element == I32 else ir.DoubleType()
        return Vector(self.b, self.b.bitcast(self.value, vector_type(real, self.width)))

    def poly(self, coefficients: tuple[float, ...]) -> Vector:
        """Evaluate ``c[0] + c[1] x + ...``.

        Short polynomials by Horner's rule; long ones in pieces of four terms, which do not wait
        for each other. Measured: more pieces cost more multiplications than they save in time.
        """
        pieces = [coefficients]
        if len(coefficients) > 6:
            pieces = [coefficients[n : n + 4] for n in range(0, len(coefficients), 4)]
        values = []
        for piece in pieces:
            p = self.const(piece[-1])
            for c in reversed(piece[:-1]):
                p = p.fma(self, c)
            values.append(p)
        if len(values) > 1:
            square = self * self
            fourth = square * square
            while len(values) > 1:
                high, low = values.pop(), values.pop()
                values.append(high.fma(fourth, low))
        return values[0]


@dataclass(frozen=True)
class _Format:
    """The numbers behind the elementary functions of one float format.

    Polynomials are minimax fits (Remez exchange, relative error): exp2 holds (2**f - 1) / f on
    |f| <= 1/2, expm1 holds (e**r - 1 - r) / r**2 on |r| <= ln(2)/2, log holds
    (log(m) - 2 s) / s**3 in s**2 with s = (m - 1) / (m + 1) for 1/sqrt(2) <= m <= sqrt(2), sin
    holds sin(r) / r and cos cos(r), both in r**2, on |r| <= pi/4. Their errors are at most 0.1
    units in the last place. fast_exp2 is like exp2, on 0 <= f <= 1 and of a lower degree, with the
    least absolute error of 2**f: 1 and 1.4 units.
    """

    mantissa: int
    bias: int
    min_exp: float  # exp is 0 below ln of half the smallest number: a bound just past it
    max_exp: float  # and overflows above ln of the largest
    ln2_hi: float  # ln 2 with enough low bits zero that n * ln2_hi is exact
    ln2_lo: float
    exp2: tuple[float, ...]
    fast_exp2: tuple[float, ...]
    expm1: tuple[float, ...]
    log: tuple[float, ...]
    sin: tuple[float, ...]
    cos: tuple[float, ...]
    tanh_one: float  # 2 |x| from which tanh rounds to 1

    @property
    def magic(self) -> float:
        """Adding it rounds to an integer n and leaves n + bias in the low bits."""
        return 1.5 * 2.0**self.mantissa + self.bias


_FORMATS = {
    "float": _Format(
        mantissa=23,
        bias=127,
        min_exp=-104.0,
        max_exp=89.0,
        ln2_hi=0.693359375,
        ln2_lo=-2.12194440e-4,
        exp2=(
            0.6931472028495415294,
            0.2402264791458266147,
            0.05550332478834952884,
            0.009618437260951800683,
            0.001339887211301415275,
            0.0001535338550226672634,
        ),
        fast_exp2=(
            0.6931524666024186883,
            0.2401528465828159484,
            0.05583582286719485186,
            0.008973492093952894208,
            0.001885253799630546739,
        ),
        expm1=(
            0.500000006191551739,
            0.166665430054116658,
            0.0416662820733005721,
            0.0083665826746382088,
            0.00139464476073637626,
        ),
        log=(
            0.666666656416912698,
            0.400003361495028002,
            0.285372420152704036,
            0.235835080435567105,
        ),
        sin=(
            1.0,
            -0.1666665460226678156,
            0.008332160291382622017,
            -0.0001951521805688636706,
        ),
        cos=(
            1.0,
            -0.5,
            0.04166664567010896576,
            -0.001388731561452419354,
            0.00002443308248685867562,
        ),
        tanh_one=20.0,
    ),
    "double": _Format(
        mantissa=52,
        bias=1023,
        min_exp=-746.0,
        max_exp=710.0,
        ln2_hi=0.69314718036912381649,
        ln2_lo=1.90821492927058770002e-10,
        exp2=(
            0.6931471805599453258,
            0.2402265069591013124,
            0.05550410866482008415,
            0.00961812910759412694,
            0.001333355814677447008,
            0.0001540353045710444698,
            0.00001525273349323143044,
            1.321543528576019463e-6,
            1.017819953992926162e-7,
            7.073782703314706358e-9,
            4.434774879930105293e-10,
        ),
        fast_exp2=(
            0.693147180559896917,
            0.2402265069614444358,
            0.05550410862556106865,
            0.009618129432894054307,
            0.001333354268628335434,
            0.0001540398388999080479,
            0.00001524425942627046024,
            1.331631898299861894e-6,
            9.443244685513519693e-8,
            9.988903537544724458e-9,
        ),
        expm1=(
            0.5,
            0.166666666666666766,
            0.0416666666666667013,
            0.00833333333332161907,
            0.00138888888888668556,
            0.000198412698861510476,
            0.0000248015873605193485,
            2.75572441889184747e-6,
            2.75572427926017765e-7,
            2.51090426009112634e-8,
            2.09244327409294441e-9,
        ),
        log=(
            0.666666666666666609,
            0.400000000000062807,
            0.28571428569074562,
            0.222222226485526454,
            0.181817755219791277,
            0.153870971388067413,
            0.132499722585920799,
            0.132526712105804267,
        ),
        sin=(
            1.0,
            -0.1666666666666663069,
            0.008333333333322107319,
            -0.0001984126982958015501,
            2.755731361801314044e-6,
            -2.505074721750213822e-8,
            1.589619759461624426e-10,
        ),
        cos=(
            1.0,
            -0.5,
            0.04166666666666659283,
            -0.001388888888887304034,
            0.00002480158728884137878,
            -2.755731417623460434e-7,
            2.087570041539533747e-9,
            -1.135851391771874165e-11,
        ),
        tanh_one=44.0,
    ),
}


def _format(x: Vector) -> _Format:
    return _FORMATS[str(x.element)]


def _round_to_int(x: Vector) -> tuple[Vector, Vector]:
    """Split x into its nearest integer: (n as a float, bits of which the low end is n + bias)."""
    t = x + _format(x).magic
    return t - _format(x).magic, t.bits()


def _power_of_two(n_plus_bias: Vector, k: _Format) -> Vector:
    """Return 2**n from n + bias; n = -bias gives exactly 0."""
    return (n_plus_bias << k.mantissa).as_float()


def _exp2_reduced(x: Vector) -> tuple[Vector, Vector, Vector]:
    """Write 2**x as 2**f 2**n with |f| <= 1/2: (2**f, n as a float, the bits of n)."""
    n, bits = _round_to_int(x)
    f = x - n
    return f.fma(f.poly(_format(x).exp2), f.const(1.0)), n, bits


def exp2_nonpositive(x: Vector) -> Vector:
    """2**x for x <= 0 or NaN, exactly 0 below the smallest normal number and 1 at 0.

    The running softmax spends most of its time here, so this is not `exp2`: a shorter polynomial
    (relative error at most 2 eps), and floor(x) in place of the nearest integer. That leaves a
    factor 1 <= 2**f <= 2, so whatever has a power of two other than 0 is a normal number and
    nothing needs a select.
    """
    k = _format(x)
    x = x.const(-k.bias).cmp(">", x).where(-float(k.bias), x)  # one instruction; NaN passes
    n = x.call("floor")
    f = x - n
    p = f.fma(f.poly(k.fast_exp2), f.const(1.0))
    return p * _power_of_two((n + k.magic).bits(), k)


def _scale(p: Vector, n: Vector, k: _Format) -> Vector:
    """p * 2**n, in two halves so that neither factor overflows; it rounds once, at the end."""
    half, half_bits = _round_to_int(n * 0.5)
    _, rest_bits = _round_to_int(n - half)
    return p * _power_of_two(half_bits, k) * _power_of_two(rest_bits, k)


def _clamp(x: Vector, lo: float, hi: float) -> Vector:
    """Limit x, and let NaN pass."""
    x = x.cmp("<", lo).where(lo, x)
    return x.cmp(">", hi).where(hi, x)


def exp2(x: Vector) -> Vector:
    """2**x."""
    k = _format(x)
    p, n, _ = _exp2_reduced(_clamp(x, -k.bias - k.mantissa - 2.0, k.bias + 2.0))
    return _scale(p, n, k)


def _reduce_exp(x: Vector) -> tuple[Vector, Vector]:
    """Write e**x as 2**n e**r with |r| <= ln(2)/2 (Cody and Waite's two-part ln 2)."""
    k = _format(x)
    n, _ = _round_to_int(x * math.log2(math.e))
    r = (-n).fma(k.ln2_lo, (-n).fma(k.ln2_hi, x))
    return n, r


def _expm1_reduced(r: Vector) -> Vector:
    """e**r - 1 for |r| <= ln(2)/2."""
    return (r * r).fma(r.poly(_format(r).expm1), r)


def exp(x: Vector) -> Vector:
    """e**x."""
    k = _format(x)
    n, r = _reduce_exp(_clamp(x, k.min_exp, k.max_exp))
    return _scale(_expm1_reduced(r) + 1.0, n, k)


def expm1(x: Vector) -> Vector:
    """e**x - 1 = 2**n (e**r - 1) + (2**n - 1), which keeps full precision near 0."""
    k = _format(x)
    n, r = _reduce_exp(_clamp(x, -k.tanh_one, k.max_exp))
    # Where 2**n itself overflows, a part of it waits until the end.
    most = float(k.bias - 1)
    m = n.cmp(">", most).where(most, n)
    two_m, rest = (_power_of_two(_round_to_int(i)[1], k) for i in (m, n - m))
    return (two_m.fma(_expm1_reduced(r), two_m - 1.0) * rest).call("copysign", x)


def tanh(x: Vector) -> Vector:
    """tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1, which keeps full precision near 0."""
    if isinstance(x.element, ir.FloatType):
        return _tanh_float32(x)
    k = _format(x)
    a = x.abs()
    y = (a + a).cmp(">", k.tanh_one).where(k.tanh_one, a + a)
    n, r = _reduce_exp(y)
    two_n = _power_of_two(_round_to_int(n)[1], k)
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
    x = _clamp(x, -_TANH_ONE, _TANH_ONE)
    z = x * x
    a = (x * z).fma(z.poly(_TANH_P), x)
    t = z * z.poly(_TANH_Q)  # b - 1
    ab = a.fma(t, a)
    g = a.abs().fma(-0.5, t)
    d = g + 1.0
    return ab / (d + d.fma(g, ab.abs()))


def _log_reduced(y: Vector) -> tuple[Vector, Vector]:
    """Write normal numbers as 2**e m with 1/sqrt(2) <= m <= sqrt(2): (e as an integer, m)."""
    k = _format(y)
    # Subtracting the bits of 1/sqrt(2) moves the exponent's step there.
    root = np.array(math.sqrt(0.5), np.float32 if k.mantissa == 23 else np.float64)
    root_bits = int(root.view(f"i{root.itemsize}"))
    e = (y.bits() - root_bits) >> k.mantissa
    return e, (y.bits() - (e << k.mantissa)).as_float()


def _normal(x: Vector) -> tuple[Vector, Vector]:
    """Scale subnormal numbers up: (x or x 2**(mantissa + 1), the exponent that this added)."""
    k = _format(x)
    tiny = x.cmp("<", 2.0 ** (1 - k.bias))
    return (
        tiny.where(x * 2.0 ** (k.mantissa + 1), x),
        tiny.where(x.const(k.mantissa + 1.0), 0.0),
    )


def _to_float(n: Vector, like: Vector) -> Vector:
    return Vector(n.b, n.b.sitofp(n.value, like.type))


def _log(e: Vector, f: Vector, x: Vector) -> Vector:
    """log(2**e (1 + f)) = e ln 2 + 2 atanh(f / (2 + f)), and what log has at the ends of x."""
    k = _format(x)
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
    y, added = _normal(x)
    e, m = _log_reduced(y)
    return _log(_to_float(e, x) - added, m - 1.0, x)


def _two_sum(x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """Return x + y rounded, and exactly what the rounding lost (Knuth)."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)


def log1p(x: Vector) -> Vector:
    """log(1 + x): what the rounding of 1 + x loses joins again where 1 is subtracted."""
    k = _format(x)
    u, lost = _two_sum(x, x.const(1.0))
    e, m = _log_reduced(u)
    # Where 2**-e is out of range, what is lost is nothing beside 2**e.
    scale = minimum(e, e.const(k.bias - 1))
    scale = ((e.const(k.bias) - scale) << k.mantissa).as_float()
    y = _log(_to_float(e, x), lost.fma(scale, m - 1.0), u)
    return x.abs().cmp("<", 2.0 ** (-k.mantissa - 2)).where(x, y)


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
    y, added = _normal(x)
    e, m = _log_reduced(y)
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
    return _add_to(_to_float(e, x) - added, log2_m)


def _add_to(x: Vector, y: _Pair) -> _Pair:
    """Return x + y where x is 0 or the larger: the sum with the head is exact in two parts."""
    high = x + y.head
    return _Pair.of(high, (y.head - (high - x)) + y.tail)


def _power_float64(x: Vector, y: Vector) -> Vector:
    """x**y = 2**(y log2 x) for positive finite x and |y| <= 2**65."""
    t = _Pair.of(y).times(_log2_pair(x))
    k, end = _format(x), 1100.0
    head = _clamp(t.head, -end, end)
    tail = t.head.abs().cmp("<", end).where(t.tail, 0.0)
    n, _ = _round_to_int(head)
    f = (head - n) + tail
    return _scale(f.fma(f.poly(k.exp2), f.const(1.0)), n, k)


def _widen(x: Vector) -> Vector:
    return Vector(x.b, x.b.fpext(x.value, vector_type(ir.DoubleType(), x.width)))


def _narrow(x: Vector, like: Vector) -> Vector:
    return Vector(x.b, x.b.fptrunc(x.value, like.type))


def power(x: Vector, y: Vector) -> Vector:
    """x**y as C's pow and NumPy have it: also for zeros, infinities, NaN and negative x."""
    a = x.abs()
    limit = 2.0**65  # beyond it no power is any different
    if isinstance(x.element, ir.FloatType):
        z = _narrow(exp(_widen(_clamp(y, -limit, limit)) * log(_widen(a))), x)
    else:
        z = _power_float64(a, _clamp(y, -limit, limit))
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
    wide = _widen(x) if isinstance(x.element, ir.FloatType) else x
    n, bits = _round_to_int(wide * (2 / math.pi))
    r = (-n).fma(_PIO2[0], wide)  # exact
    if wide is x:
        # Near a multiple of pi/2 little is left: what each sum rounds off is kept.
        r, lost = _two_sum(r, -n * _PIO2[1])
        r, more = _two_sum(r, -n * _PIO2[2])
        r = r + (-n).fma(_PIO2[3], lost + more)
    else:
        r = (-n).fma(_PIO2[1] + _PIO2[2], r)
    r = _clamp(r, -math.pi / 4, math.pi / 4)
    if wide is not x:
        r = _narrow(r, x)
        bits = Vector(x.b, x.b.trunc(bits.value, r.bits().type))
    return r, bits


def _sin_of_quadrant(r: Vector, n: Vector) -> Vector:
    """sin(r + n pi/2) for |r| <= pi/4."""
    k = _format(r)
    z = r * r
    y = (n & 1).cmp("==", 0).where(r * z.poly(k.sin), z.poly(k.cos))
    sign = (n & 2) << (8 * _itemsize(r) - 2)
    return (y.bits() ^ sign).as_float()


def _itemsize(x: Vector) -> int:
    return 4 if isinstance(x.element, ir.FloatType) else 8


def sin(x: Vector) -> Vector:
    """sin x, with all digits for |x| <= 1e6."""
    r, bits = _reduce_trig(x)
    return x.cmp("==", 0.0).where(x, _sin_of_quadrant(r, bits + 1))  # -0.0 too


def cos(x: Vector) -> Vector:
    """cos x = sin(x + pi/2), with all digits for |x| <= 1e6."""
    r, bits = _reduce_trig(x)
    return _sin_of_quadrant(r, bits + 2)


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
