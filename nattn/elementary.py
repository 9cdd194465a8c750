"""LLVM vectors with Python's operators, and the elementary functions written with them.

`Vector` is an LLVM vector under construction: its operators emit instructions, so that a formula
below reads as such. Every function takes and returns `Vector` and works for any width, in float32
and float64. `lanes` offers them to Numba under NumPy's names, `dual` differentiates them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

I32 = ir.IntType(32)
I64 = ir.IntType(64)


class Vector:
    """An LLVM vector under construction: operators emit instructions."""

    def __init__(self, b: ir.IRBuilder, value: Any) -> None:
        self.b = b
        self.value = value
        self.type = value.type
        self.element = value.type.element
        self.is_float = not isinstance(self.element, ir.IntType)

    def const(self, x: Any) -> Vector:
        """Broadcast a Python number (or pass a `Vector`) to this type."""
        if isinstance(x, Vector):
            return x
        if self.is_float:
            x = float(np.float32(x)) if isinstance(self.element, ir.FloatType) else float(x)
        return Vector(self.b, ir.Constant(self.type, [x] * self.type.count))

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
        if self.is_float:
            return Vector(self.b, self.b.fneg(self.value))
        return self.const(0) - self

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
        operands = [self.value] + [self.const(a).value for a in args]
        suffix = {"float": "f32", "double": "f64"}.get(str(self.element), str(self.element))
        fn = cgutils.get_or_insert_function(
            self.b.module,
            ir.FunctionType(self.type, [self.type] * len(operands)),
            f"llvm.{name}.v{self.type.count}{suffix}",
        )
        return Vector(self.b, self.b.call(fn, operands))

    def fma(self, y: Any, z: Any) -> Vector:
        """Return self * y + z, fused where the processor can."""
        return self.call("fmuladd", y, z)

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
        return Vector(self.b, self.b.bitcast(self.value, ir.VectorType(integer, self.type.count)))

    def as_float(self) -> Vector:
        """Return integer bits as a float vector."""
        real = ir.FloatType() if self.element == I32 else ir.DoubleType()
        return Vector(self.b, self.b.bitcast(self.value, ir.VectorType(real, self.type.count)))

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
    (log(m) - 2 s) / s**3 in s**2 with s = (m - 1) / (m + 1) for 1/sqrt(2) <= m <= sqrt(2). Their
    errors are at most 0.1 units in the last place. fast_exp2 is like exp2, on 0 <= f <= 1 and of a
    lower degree, with the least absolute error of 2**f: 1 and 1.4 units.
    """

    mantissa: int
    bias: int
    max_exp: float  # exp overflows above ln of the largest number: a bound just past it
    ln2_hi: float  # ln 2 with enough low bits zero that n * ln2_hi is exact
    ln2_lo: float
    exp2: tuple[float, ...]
    fast_exp2: tuple[float, ...]
    expm1: tuple[float, ...]
    log: tuple[float, ...]
    tanh_one: float  # 2 |x| from which tanh rounds to 1

    @property
    def magic(self) -> float:
        """Adding it rounds to an integer n and leaves n + bias in the low bits."""
        return 1.5 * 2.0**self.mantissa + self.bias


_FORMATS = {
    "float": _Format(
        mantissa=23,
        bias=127,
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
        tanh_one=20.0,
    ),
    "double": _Format(
        mantissa=52,
        bias=1023,
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
    """p * 2**n, in two halves so that neither factor overflows; subnormal results become 0."""
    half, half_bits = _round_to_int(n * 0.5)
    _, rest_bits = _round_to_int(n - half)
    y = p * _power_of_two(half_bits, k) * _power_of_two(rest_bits, k)
    return y.cmp("<", 2.0 ** (1 - k.bias)).where(0.0, y)


def _clamp(x: Vector, lo: float, hi: float) -> Vector:
    """Limit x, and let NaN pass."""
    x = x.cmp("<", lo).where(lo, x)
    return x.cmp(">", hi).where(hi, x)


def exp2(x: Vector) -> Vector:
    """2**x."""
    k = _format(x)
    p, n, _ = _exp2_reduced(_clamp(x, -k.bias - 2.0, k.bias + 2.0))
    return _scale(p, n, k)


def _reduce_exp(x: Vector) -> tuple[Vector, Vector]:
    """Write e**x as 2**n e**r with |r| <= ln(2)/2 (Cody and Waite's two-part ln 2)."""
    k = _format(x)
    n, _ = _round_to_int(x * math.log2(math.e))
    r = (-n).fma(k.ln2_lo, (-n).fma(k.ln2_hi, x))
    return n, r


def exp(x: Vector) -> Vector:
    """e**x."""
    k = _format(x)
    x = _clamp(x, -k.max_exp, k.max_exp)
    n, r = _reduce_exp(x)
    return _scale((r * r).fma(r.poly(k.expm1), r) + 1.0, n, k)


def tanh(x: Vector) -> Vector:
    """tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1, which keeps full precision near 0."""
    k = _format(x)
    a = x.abs()
    y = (a + a).cmp(">", k.tanh_one).where(k.tanh_one, a + a)
    n, r = _reduce_exp(y)
    em1 = (r * r).fma(r.poly(k.expm1), r)
    two_n = _power_of_two(_round_to_int(n)[1], k)
    e = two_n.fma(em1, two_n - 1.0)
    return (e / (e + 2.0)).call("copysign", x)


def log(x: Vector) -> Vector:
    """log(2**e m) = e ln 2 + 2 atanh((m - 1) / (m + 1)) with m near 1."""
    k = _format(x)
    tiny = x.cmp("<", 2.0 ** (1 - k.bias))
    y = tiny.where(x * 2.0 ** (k.mantissa + 1), x)
    # Subtracting the bits of 1/sqrt(2) moves the exponent's step there.
    root = np.array(math.sqrt(0.5), np.float32 if k.mantissa == 23 else np.float64)
    root_bits = int(root.view(f"i{root.itemsize}"))
    steps = (y.bits() - root_bits) >> k.mantissa
    m = (y.bits() - (steps << k.mantissa)).as_float()
    e = Vector(x.b, x.b.sitofp(steps.value, x.type)) - tiny.where(y.const(k.mantissa + 1.0), 0.0)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # log m = 2 s + s z g(z), summed from the small end; e ln2_hi is exact.
    small = e.fma(k.ln2_lo, s * z * z.poly(k.log))
    y = e.fma(k.ln2_hi, small + (s + s))
    y = x.cmp("==", math.inf).where(math.inf, y)
    y = x.cmp("==", 0.0).where(-math.inf, y)
    return (x.cmp("<", 0.0) | x.isnan()).where(math.nan, y)


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
    b, ratio = x.b, x / y
    r = Vector(b, b.frem(x.value, y.value))
    q = (x - r) / y
    other_sign = r.cmp("!=", 0.0) & (r.cmp("<", 0.0) ^ y.cmp("<", 0.0))
    q, r = other_sign.where(q - 1.0, q), other_sign.where(r + y, r)
    r = r.cmp("==", 0.0).where(r.const(0.0).call("copysign", y), r)
    floor = q.call("floor")
    floor = (q - floor).cmp(">", 0.5).where(floor + 1.0, floor)
    floor = q.cmp("==", 0.0).where(q.const(0.0).call("copysign", ratio), floor)
    return y.cmp("==", 0.0).where(ratio, floor), r
