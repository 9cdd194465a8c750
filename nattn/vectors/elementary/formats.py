"""The numbers behind the elementary functions of each float format, and what takes floats apart."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from ..vector import Vector, vector_type


@dataclass(frozen=True)
class Format:
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
    "float": Format(
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
    "double": Format(
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


def format_of(x: Vector) -> Format:
    """Return the numbers behind the float format of a vector."""
    return _FORMATS[str(x.element)]


def itemsize_of(x: Vector) -> int:
    """Return the bytes of one of its floats."""
    return 4 if isinstance(x.element, ir.FloatType) else 8


def round_to_int(x: Vector) -> tuple[Vector, Vector]:
    """Split x into its nearest integer: (n as a float, bits of which the low end is n + bias)."""
    t = x + format_of(x).magic
    return t - format_of(x).magic, t.bits()


def power_of_two(n_plus_bias: Vector, k: Format) -> Vector:
    """Return 2**n from n + bias; n = -bias gives exactly 0."""
    return (n_plus_bias << k.mantissa).as_float()


def scale(p: Vector, n: Vector, k: Format) -> Vector:
    """p * 2**n, in two halves so that neither factor overflows; it rounds once, at the end."""
    half, half_bits = round_to_int(n * 0.5)
    _, rest_bits = round_to_int(n - half)
    return p * power_of_two(half_bits, k) * power_of_two(rest_bits, k)


def clamp(x: Vector, lo: float, hi: float) -> Vector:
    """Limit x, and let NaN pass."""
    x = x.cmp("<", lo).where(lo, x)
    return x.cmp(">", hi).where(hi, x)


def to_float(n: Vector, like: Vector) -> Vector:
    """Convert integers to the floats of another vector."""
    return Vector(n.b, n.b.sitofp(n.value, like.type))


def widen(x: Vector) -> Vector:
    """Convert float32 to float64."""
    return Vector(x.b, x.b.fpext(x.value, vector_type(ir.DoubleType(), x.width)))


def narrow(x: Vector, like: Vector) -> Vector:
    """Round float64 to the floats of another vector."""
    return Vector(x.b, x.b.fptrunc(x.value, like.type))


def two_sum(x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """Return x + y rounded, and exactly what the rounding lost (Knuth)."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)
