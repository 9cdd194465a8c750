"""SIMD vectors for Numba, and the few machine operations that kernels need.

Numba compiles scalars; whether a loop over them becomes vector code is up to LLVM's
auto-vectoriser, and a register tile is more than it will find. So this module gives Numba a vector
type: ``Lanes(dtype, width)`` lowers to LLVM's ``<width x dtype>``, and arithmetic, comparisons and
the NumPy functions listed below work on it as they do on scalars, with scalars broadcast:

    + - * / // %   unary -   < <= > >= == !=   & | ^ ~   abs min max
    np.where  np.minimum  np.maximum  np.abs  np.sqrt  np.exp  np.exp2  np.log  np.tanh

    array[lanes]   a gather: an element of a one-dimensional array for every lane

LLVM splits a vector that is wider than the processor's registers and pads one that is narrower, so
every width works on every machine and one process can test them all.

A kernel says which vectors it works on with a `Tile`: a compile-time value (it has no bits at run
time) that carries the float type, the width W and the shape of the register tile. Memory is
reached by byte address, with no alignment asked for: ``load(tile, address)``.

No operation here carries fast-math flags: NaN and Inf keep their meaning. ``fma`` is
``llvm.fmuladd``: one instruction where the processor has it and two where it has not
(``llvm.fma`` would call a library function there, 60 times slower).

This is the one file on the CPU side that speaks LLVM.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
    type_callable,
    typeof_impl,
)

I32 = ir.IntType(32)
I64 = ir.IntType(64)
_LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: I32,
    types.int64: I64,
    types.boolean: ir.IntType(1),
}


class Lanes(types.Type):
    """The Numba type of `width` values of one scalar type in one SIMD value.

    Parameters
    ----------
    dtype : numba type
        float32, float64, int32, int64 or boolean.
    width : int
        Number of lanes.
    real : numba type, optional
        The float type that a division or a function such as exp makes of integer lanes; for float
        lanes it is `dtype` itself. Eight lanes of int32 alone would not tell.
    """

    def __init__(self, dtype: Any, width: int, real: Any = None) -> None:
        self.dtype = dtype
        self.width = width
        self.real = dtype if isinstance(dtype, types.Float) else (real or types.float64)
        super().__init__(name=f"Lanes({dtype} x {width}, {self.real})")

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two lane types one."""
        return (self.dtype, self.width, self.real)

    def of(self, dtype: Any) -> Lanes:
        """Return the type of as many lanes of another scalar type."""
        return Lanes(dtype, self.width, self.real)

    @property
    def llvm(self) -> ir.VectorType:
        """The LLVM vector type."""
        return ir.VectorType(_LLVM[self.dtype], self.width)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Lanes) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


@dataclass(frozen=True)
class Tile:
    """The vectors and the register tile that a kernel is compiled for.

    Attributes
    ----------
    dtype : str
        "float32" or "float64".
    W : int
        Lanes of one vector.
    MV : int
        Vectors side by side: a tile is ``MV * W`` lanes wide.
    NR : int
        Broadcast scalars of the outer product: ``MV * NR`` vectors accumulate in registers.
    """

    dtype: str
    W: int
    MV: int
    NR: int

    @property
    def lanes(self) -> int:
        """Lanes of the whole tile, one query row each."""
        return self.W * self.MV

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 8


class TileType(types.Opaque):
    """The Numba type of a `Tile`; the type is the value."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        super().__init__(name=repr(tile))

    @property
    def real(self) -> Lanes:
        """Float lanes of this tile."""
        return Lanes(getattr(types, self.tile.dtype), self.tile.W)


@typeof_impl.register(Tile)
def _typeof_tile(val: Tile, c: Any) -> TileType:
    return TileType(val)


register_model(TileType)(models.OpaqueModel)


@lower_constant(TileType)
def _constant_tile(context: Any, builder: Any, ty: Any, pyval: Any) -> Any:
    return context.get_dummy_value()


@infer_getattr
class _TileAttributes(AttributeTemplate):
    key = TileType

    def generic_resolve(self, typ: Any, attr: str) -> Any:
        return types.int64 if attr in ("W", "MV", "NR", "lanes", "itemsize") else None


@lower_getattr_generic(TileType)
def _tile_attribute(context: Any, builder: Any, typ: Any, value: Any, attr: str) -> Any:
    return I64(getattr(typ.tile, attr))


@dataclass(frozen=True)
class Struct:
    """A record of 8-byte fields at some address, which kernels read and write by name.

    In a kernel ``view(struct, address)`` has an attribute for each field. A plain type for it,
    unlike NumPy's records in Numba, keeps the names of compiled functions short.

    Attributes
    ----------
    name : str
        Name of the type, unique.
    integers, reals : tuple of str
        Names of the int64 fields, and of the float64 fields that follow.
    """

    name: str
    integers: tuple[str, ...]
    reals: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The record as a NumPy dtype."""
        return np.dtype([(n, "i8") for n in self.integers] + [(n, "f8") for n in self.reals])

    def field(self, name: str) -> tuple[int, Any]:
        """Return the byte offset and the Numba type of a field; KeyError if there is none."""
        if name in self.integers:
            return 8 * self.integers.index(name), types.int64
        if name in self.reals:
            return 8 * (len(self.integers) + self.reals.index(name)), types.float64
        raise KeyError(name)


class StructType(types.Opaque):
    """The Numba type of a `Struct` itself."""

    def __init__(self, struct: Struct) -> None:
        self.struct = struct
        super().__init__(name=f"Struct({struct.name})")


class ViewType(types.Type):
    """The Numba type of a `Struct` at an address."""

    def __init__(self, struct: Struct) -> None:
        self.struct = struct
        super().__init__(name=f"View({struct.name})")


@register_model(ViewType)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: ViewType) -> None:
        super().__init__(dmm, fe_type, I64)


@typeof_impl.register(Struct)
def _typeof_struct(val: Struct, c: Any) -> StructType:
    return StructType(val)


register_model(StructType)(models.OpaqueModel)


@lower_constant(StructType)
def _constant_struct(context: Any, builder: Any, ty: Any, pyval: Any) -> Any:
    return context.get_dummy_value()


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = ViewType

    def generic_resolve(self, typ: Any, attr: str) -> Any:
        try:
            return typ.struct.field(attr)[1]
        except KeyError:
            return None


@lower_getattr_generic(ViewType)
def _view_get(context: Any, builder: Any, typ: Any, value: Any, attr: str) -> Any:
    offset, ty = typ.struct.field(attr)
    return _load(builder, builder.add(value, I64(offset)), _LLVM[ty])


@lower_setattr_generic(ViewType)
def _view_set(context: Any, builder: Any, sig: Any, args: Any, attr: str) -> Any:
    offset, ty = sig.args[0].struct.field(attr)
    _store(
        builder, builder.add(args[0], I64(offset)), context.cast(builder, args[1], sig.args[1], ty)
    )


@intrinsic
def view(typingctx: Any, struct: Any, address: Any) -> Any:
    """Return the record of type `struct` at a byte address (an int64)."""
    return ViewType(struct.struct)(struct, types.int64), lambda context, b, sig, args: args[1]


# ---------------------------------------------------------------------------------------------
# Writing LLVM: a vector value with Python's operators, so that the formulas below read as such
# ---------------------------------------------------------------------------------------------


class _V:
    """An LLVM vector under construction: operators emit instructions."""

    def __init__(self, b: ir.IRBuilder, value: Any) -> None:
        self.b = b
        self.value = value
        self.type = value.type
        self.element = value.type.element
        self.is_float = not isinstance(self.element, ir.IntType)

    def const(self, x: Any) -> _V:
        """Broadcast a Python number (or pass a `_V`) to this type."""
        if isinstance(x, _V):
            return x
        if self.is_float:
            x = float(np.float32(x)) if isinstance(self.element, ir.FloatType) else float(x)
        return _V(self.b, ir.Constant(self.type, [x] * self.type.count))

    def _op(self, name: str, other: Any) -> _V:
        prefix = "f" if self.is_float else ""
        emit = getattr(self.b, prefix + name)
        return _V(self.b, emit(self.value, self.const(other).value))

    def __add__(self, o: Any) -> _V:
        return self._op("add", o)

    def __sub__(self, o: Any) -> _V:
        return self._op("sub", o)

    def __mul__(self, o: Any) -> _V:
        return self._op("mul", o)

    def __truediv__(self, o: Any) -> _V:
        return self._op("div", o)

    def __neg__(self) -> _V:
        if self.is_float:
            return _V(self.b, self.b.fneg(self.value))
        return self.const(0) - self

    def _bitwise(self, name: str, o: Any) -> _V:
        return _V(self.b, getattr(self.b, name)(self.value, self.const(o).value))

    def __and__(self, o: Any) -> _V:
        return self._bitwise("and_", o)

    def __or__(self, o: Any) -> _V:
        return self._bitwise("or_", o)

    def __xor__(self, o: Any) -> _V:
        return self._bitwise("xor", o)

    def __invert__(self) -> _V:
        return _V(self.b, self.b.not_(self.value))

    def __lshift__(self, o: Any) -> _V:
        return self._bitwise("shl", o)

    def __rshift__(self, o: Any) -> _V:
        return self._bitwise("ashr", o)

    def cmp(self, op: str, o: Any) -> _V:
        """Compare as NumPy does: with a NaN only ``!=`` is true."""
        y = self.const(o).value
        if not self.is_float:
            return _V(self.b, self.b.icmp_signed(op, self.value, y))
        emit = self.b.fcmp_unordered if op == "!=" else self.b.fcmp_ordered
        return _V(self.b, emit(op, self.value, y))

    def where(self, x: Any, y: Any) -> _V:
        """Select by this boolean vector; one of x and y may be a number."""
        x = x if isinstance(x, _V) else y.const(x)
        y = x.const(y)
        return _V(self.b, self.b.select(self.value, x.value, y.value))

    def call(self, name: str, *args: Any) -> _V:
        """Call an LLVM intrinsic on vectors of this type."""
        operands = [self.value] + [self.const(a).value for a in args]
        suffix = {"float": "f32", "double": "f64"}.get(str(self.element), str(self.element))
        fn = cgutils.get_or_insert_function(
            self.b.module,
            ir.FunctionType(self.type, [self.type] * len(operands)),
            f"llvm.{name}.v{self.type.count}{suffix}",
        )
        return _V(self.b, self.b.call(fn, operands))

    def fma(self, y: Any, z: Any) -> _V:
        """Return self * y + z, fused where the processor can."""
        return self.call("fmuladd", y, z)

    def abs(self) -> _V:
        """Return the magnitude."""
        if self.is_float:
            return self.call("fabs")
        return self.cmp("<", 0).where(-self, self)

    def isnan(self) -> _V:
        """Return where the value is NaN."""
        return self.cmp("!=", self)

    def bits(self) -> _V:
        """Return the float's bits as an integer vector."""
        integer = I32 if isinstance(self.element, ir.FloatType) else I64
        return _V(self.b, self.b.bitcast(self.value, ir.VectorType(integer, self.type.count)))

    def as_float(self) -> _V:
        """Return integer bits as a float vector."""
        real = ir.FloatType() if self.element == I32 else ir.DoubleType()
        return _V(self.b, self.b.bitcast(self.value, ir.VectorType(real, self.type.count)))

    def poly(self, coefficients: tuple[float, ...]) -> _V:
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


def _format(x: _V) -> _Format:
    return _FORMATS[str(x.element)]


def _round_to_int(x: _V) -> tuple[_V, _V]:
    """Split x into its nearest integer: (n as a float, bits of which the low end is n + bias)."""
    t = x + _format(x).magic
    return t - _format(x).magic, t.bits()


def _power_of_two(n_plus_bias: _V, k: _Format) -> _V:
    """Return 2**n from n + bias; n = -bias gives exactly 0."""
    return (n_plus_bias << k.mantissa).as_float()


def _exp2_reduced(x: _V) -> tuple[_V, _V, _V]:
    """Write 2**x as 2**f 2**n with |f| <= 1/2: (2**f, n as a float, the bits of n)."""
    n, bits = _round_to_int(x)
    f = x - n
    return f.fma(f.poly(_format(x).exp2), f.const(1.0)), n, bits


def _exp2_nonpositive(x: _V) -> _V:
    """2**x for x <= 0 or NaN, exactly 0 below the smallest normal number and 1 at 0.

    The running softmax spends most of its time here, so this is not `_exp2`: a shorter polynomial
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


def _scale(p: _V, n: _V, k: _Format) -> _V:
    """p * 2**n, in two halves so that neither factor overflows; subnormal results become 0."""
    half, half_bits = _round_to_int(n * 0.5)
    _, rest_bits = _round_to_int(n - half)
    y = p * _power_of_two(half_bits, k) * _power_of_two(rest_bits, k)
    return y.cmp("<", 2.0 ** (1 - k.bias)).where(0.0, y)


def _clamp(x: _V, lo: float, hi: float) -> _V:
    """Limit x, and let NaN pass."""
    x = x.cmp("<", lo).where(lo, x)
    return x.cmp(">", hi).where(hi, x)


def _exp2(x: _V) -> _V:
    k = _format(x)
    p, n, _ = _exp2_reduced(_clamp(x, -k.bias - 2.0, k.bias + 2.0))
    return _scale(p, n, k)


def _reduce_exp(x: _V) -> tuple[_V, _V]:
    """Write e**x as 2**n e**r with |r| <= ln(2)/2 (Cody and Waite's two-part ln 2)."""
    k = _format(x)
    n, _ = _round_to_int(x * math.log2(math.e))
    r = (-n).fma(k.ln2_lo, (-n).fma(k.ln2_hi, x))
    return n, r


def _exp(x: _V) -> _V:
    k = _format(x)
    x = _clamp(x, -k.max_exp, k.max_exp)
    n, r = _reduce_exp(x)
    return _scale((r * r).fma(r.poly(k.expm1), r) + 1.0, n, k)


def _tanh(x: _V) -> _V:
    """tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1, which keeps full precision near 0."""
    k = _format(x)
    a = x.abs()
    y = (a + a).cmp(">", k.tanh_one).where(k.tanh_one, a + a)
    n, r = _reduce_exp(y)
    em1 = (r * r).fma(r.poly(k.expm1), r)
    two_n = _power_of_two(_round_to_int(n)[1], k)
    e = two_n.fma(em1, two_n - 1.0)
    return (e / (e + 2.0)).call("copysign", x)


def _log(x: _V) -> _V:
    """log(2**e m) = e ln 2 + 2 atanh((m - 1) / (m + 1)) with m near 1."""
    k = _format(x)
    tiny = x.cmp("<", 2.0 ** (1 - k.bias))
    y = tiny.where(x * 2.0 ** (k.mantissa + 1), x)
    # Subtracting the bits of 1/sqrt(2) moves the exponent's step there.
    root = np.array(math.sqrt(0.5), np.float32 if k.mantissa == 23 else np.float64)
    root_bits = int(root.view(f"i{root.itemsize}"))
    steps = (y.bits() - root_bits) >> k.mantissa
    m = (y.bits() - (steps << k.mantissa)).as_float()
    e = _V(x.b, x.b.sitofp(steps.value, x.type)) - tiny.where(y.const(k.mantissa + 1.0), 0.0)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # log m = 2 s + s z g(z), summed from the small end; e ln2_hi is exact.
    small = e.fma(k.ln2_lo, s * z * z.poly(k.log))
    y = e.fma(k.ln2_hi, small + (s + s))
    y = x.cmp("==", math.inf).where(math.inf, y)
    y = x.cmp("==", 0.0).where(-math.inf, y)
    return (x.cmp("<", 0.0) | x.isnan()).where(math.nan, y)


def _maximum(x: _V, y: _V) -> _V:
    """NumPy's maximum: a NaN on either side wins."""
    keep = x.cmp(">", y)
    return (keep | x.isnan() if x.is_float else keep).where(x, y)


def _minimum(x: _V, y: _V) -> _V:
    keep = x.cmp("<", y)
    return (keep | x.isnan() if x.is_float else keep).where(x, y)


def _python_max(x: _V, y: _V) -> _V:
    """Python's max: the first argument unless the second is greater."""
    return y.cmp(">", x).where(y, x)


def _python_min(x: _V, y: _V) -> _V:
    return y.cmp("<", x).where(y, x)


def _floor_divide(x: _V, y: _V) -> _V:
    """Floor as Python does; an integer divisor of 0 gives 0.

    The divisors 0 and -1 never reach the divide instruction, which would kill the process.
    """
    if x.is_float:
        return _float_divmod(x, y)[0]
    b = x.b
    safe = (y.cmp("==", 0) | y.cmp("==", -1)).where(1, y)
    q = _V(b, b.sdiv(x.value, safe.value))
    r = x - q * safe
    q = (r.cmp("!=", 0) & (r ^ safe).cmp("<", 0)).where(q - 1, q)
    q = y.cmp("==", -1).where(-x, q)
    return y.cmp("==", 0).where(0, q)


def _remainder(x: _V, y: _V) -> _V:
    """Return the remainder with the divisor's sign, as Python's % does."""
    if x.is_float:
        return _float_divmod(x, y)[1]
    b = x.b
    safe = (y.cmp("==", 0) | y.cmp("==", -1)).where(1, y)
    r = _V(b, b.srem(x.value, safe.value))
    return (r.cmp("!=", 0) & (r ^ safe).cmp("<", 0)).where(r + safe, r)


def _float_divmod(x: _V, y: _V) -> tuple[_V, _V]:
    """Return x // y and x % y: the quotient is taken of what the exact remainder leaves.

    The floor of a rounded x / y would be wrong: 1 // 0.1 is 9.
    """
    b, ratio = x.b, x / y
    r = _V(b, b.frem(x.value, y.value))
    q = (x - r) / y
    other_sign = r.cmp("!=", 0.0) & (r.cmp("<", 0.0) ^ y.cmp("<", 0.0))
    q, r = other_sign.where(q - 1.0, q), other_sign.where(r + y, r)
    r = r.cmp("==", 0.0).where(r.const(0.0).call("copysign", y), r)
    floor = q.call("floor")
    floor = (q - floor).cmp(">", 0.5).where(floor + 1.0, floor)
    floor = q.cmp("==", 0.0).where(q.const(0.0).call("copysign", ratio), floor)
    return y.cmp("==", 0.0).where(ratio, floor), r


# ---------------------------------------------------------------------------------------------
# Operators and NumPy functions on lanes
# ---------------------------------------------------------------------------------------------


def _is_scalar(t: Any) -> bool:
    return isinstance(t, types.Integer | types.Float | types.Boolean)


def _common(args: tuple[Any, ...]) -> Lanes | None:
    """Return the lane type in which lanes and scalars meet; None if that is not ours to say.

    Floats take the kernel's own float type, whatever a scalar's type was; integers take 64 bits
    as soon as one of them has 64.
    """
    lanes = [a for a in args if isinstance(a, Lanes)]
    if not lanes or not all(isinstance(a, Lanes) or _is_scalar(a) for a in args):
        return None
    first = lanes[0]
    if any(x.width != first.width for x in lanes):
        return None
    kinds = [a.dtype if isinstance(a, Lanes) else a for a in args]
    if any(isinstance(k, types.Float) for k in kinds):
        real = next((x.dtype for x in lanes if isinstance(x.dtype, types.Float)), first.real)
        return first.of(real)
    if all(isinstance(k, types.Boolean) for k in kinds):
        return first.of(types.boolean)
    wide = any(isinstance(k, types.Integer) and k.bitwidth > 32 for k in kinds)
    return first.of(types.int64 if wide else types.int32)


def _operand(context: Any, b: Any, value: Any, ty: Any, to: Lanes) -> _V:
    """Convert a scalar or lanes to lanes of type `to`."""
    if not isinstance(ty, Lanes):
        return _V(b, _broadcast(b, context.cast(b, value, ty, to.dtype), to.width))
    if ty.dtype == to.dtype:
        return _V(b, value)
    if isinstance(to.dtype, types.Float):
        if isinstance(ty.dtype, types.Boolean):
            return _V(b, b.uitofp(value, to.llvm))
        if isinstance(ty.dtype, types.Integer):
            return _V(b, b.sitofp(value, to.llvm))
        return _V(b, (b.fpext if to.dtype == types.float64 else b.fptrunc)(value, to.llvm))
    if isinstance(ty.dtype, types.Boolean):
        return _V(b, b.zext(value, to.llvm))
    return _V(b, b.sext(value, to.llvm))


def _broadcast(b: Any, x: Any, width: int) -> Any:
    undefined = ir.Constant(ir.VectorType(x.type, width), ir.Undefined)
    first = b.insert_element(undefined, x, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, width), [0] * width))


Typer = Callable[..., Any]  # Lanes, or None


def _define(fn: Any, meet: Typer, result: Typer, emit: Callable[..., _V], arity: int) -> None:
    """Teach Numba the function `fn` on lanes.

    `meet` gives the lane type to which the arguments are converted, `result` the type of the
    result, `emit` the code.
    """

    def resolve(*args: Any) -> Lanes | None:
        return result(*args) if meet(*args) is not None else None

    @type_callable(fn)
    def typing(context: Any) -> Any:
        if arity == 1:
            return lambda x: resolve(x)
        return lambda x, y: resolve(x, y)

    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        to = meet(*sig.args)
        operands = [_operand(context, b, a, t, to) for a, t in zip(args, sig.args, strict=True)]
        return emit(*operands).value

    if arity == 1:
        lower_builtin(fn, Lanes)(lower)
        return
    for pair in (
        (Lanes, Lanes),
        (Lanes, types.Number),
        (types.Number, Lanes),
        (Lanes, types.Boolean),
        (types.Boolean, Lanes),
    ):
        lower_builtin(fn, *pair)(lower)


def _numeric(*args: Any) -> Lanes | None:
    """Meet as numbers: booleans count as integers."""
    to = _common(args)
    return to.of(types.int32) if to is not None and to.dtype == types.boolean else to


def _product(*args: Any) -> Lanes | None:
    """Meet for a product: 32-bit integers widen first, so that (q - k) ** 2 cannot wrap."""
    to = _numeric(*args)
    return to.of(types.int64) if to is not None and to.dtype == types.int32 else to


def _real(*args: Any) -> Lanes | None:
    """Meet as floats."""
    to = _common(args)
    return None if to is None else to.of(to.real)


def _bits(*args: Any) -> Lanes | None:
    """Meet for a bitwise operation: booleans or integers."""
    to = _common(args)
    return None if to is None or isinstance(to.dtype, types.Float) else to


def _truth(*args: Any) -> Lanes | None:
    to = _common(args)
    return None if to is None else to.of(types.boolean)


_op: Any
for _op, _emit, _meet in (
    (operator.add, operator.add, _numeric),
    (operator.sub, operator.sub, _numeric),
    (operator.mul, operator.mul, _product),
    (operator.truediv, operator.truediv, _real),
    (operator.floordiv, _floor_divide, _numeric),
    (operator.mod, _remainder, _numeric),
    (operator.and_, operator.and_, _bits),
    (operator.or_, operator.or_, _bits),
    (operator.xor, operator.xor, _bits),
    (np.minimum, _minimum, _numeric),
    (np.maximum, _maximum, _numeric),
    (min, _python_min, _numeric),
    (max, _python_max, _numeric),
):
    _define(_op, _meet, _meet, _emit, 2)
    _inplace = getattr(operator, f"i{_op.__name__.strip('_')}", None)
    if _inplace is not None:
        _define(_inplace, _meet, _meet, _emit, 2)


def _comparison(symbol: str) -> Callable[[_V, _V], _V]:
    return lambda x, y: x.cmp(symbol, y)


for _op, _symbol in (
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.eq, "=="),
    (operator.ne, "!="),
):
    _define(_op, _numeric, _truth, _comparison(_symbol), 2)

for _op, _unary, _meet in (
    (operator.neg, operator.neg, _numeric),
    (operator.invert, operator.invert, _bits),
    (abs, _V.abs, _numeric),
    (np.abs, _V.abs, _numeric),
    (np.sqrt, lambda x: x.call("sqrt"), _real),
    (np.exp, _exp, _real),
    (np.exp2, _exp2, _real),
    (np.log, _log, _real),
    (np.tanh, _tanh, _real),
    (math.sqrt, lambda x: x.call("sqrt"), _real),
    (math.exp, _exp, _real),
    (math.log, _log, _real),
    (math.tanh, _tanh, _real),
):
    _define(_op, _meet, _meet, _unary, 1)


@type_callable(np.where)
def _type_where(context: Any) -> Any:
    def typer(condition: Any, x: Any, y: Any) -> Any:
        if not isinstance(condition, Lanes) or condition.dtype != types.boolean:
            return None
        # With two scalars the condition alone tells the width and the float type.
        branches = [t for t in (x, y) if isinstance(t, Lanes) or not isinstance(t, types.Boolean)]
        return _common((condition, *branches)) if branches else condition

    return typer


def _lower_where(context: Any, b: Any, sig: Any, args: Any) -> Any:
    to = sig.return_type
    x, y = (_operand(context, b, args[i], sig.args[i], to) for i in (1, 2))
    return _V(b, args[0]).where(x, y).value


for _x in (Lanes, types.Number, types.Boolean):
    for _y in (Lanes, types.Number, types.Boolean):
        lower_builtin(np.where, Lanes, _x, _y)(_lower_where)


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z on lanes, fused where the processor can; scalars are broadcast."""
    to = _real(x, y, z)
    if to is None:
        return None

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        v = [_operand(context, b, a, t, to) for a, t in zip(args, sig.args, strict=True)]
        return v[0].fma(v[1], v[2]).value

    return to(x, y, z), codegen


@intrinsic
def exp2_nonpositive(typingctx: Any, x: Any) -> Any:
    """Return 2**x for lanes that are <= 0 or NaN: the exponential of a running softmax.

    The relative error is at most 2 eps; exactly 1 at 0, and exactly 0 where 2**x is below the
    smallest normal number.
    """
    return x(x), lambda context, b, sig, args: _exp2_nonpositive(_V(b, args[0])).value


# ---------------------------------------------------------------------------------------------
# Making lanes, and memory
# ---------------------------------------------------------------------------------------------


def _pointer(b: Any, address: Any, ty: Any) -> Any:
    return b.inttoptr(address, ty.as_pointer())


def _load(b: Any, address: Any, ty: Any) -> Any:
    value = b.load(_pointer(b, address, ty))
    value.align = 1
    return value


def _store(b: Any, address: Any, value: Any) -> None:
    b.store(value, _pointer(b, address, value.type)).align = 1


@intrinsic
def splat(typingctx: Any, tile: Any, x: Any) -> Any:
    """Return the scalar x, converted to the tile's float type, in every lane."""
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _operand(context, b, args[1], sig.args[1], to).value

    return to(tile, x), codegen


@intrinsic
def iota(typingctx: Any, tile: Any, start: Any) -> Any:
    """Return int32 lanes start, start + 1, ... (start must fit)."""
    to = tile.real.of(types.int32)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        first = _operand(context, b, args[1], sig.args[1], to).value
        return b.add(first, ir.Constant(to.llvm, list(range(to.width))))

    return to(tile, types.int64), codegen


@intrinsic
def load(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W floats from a byte address."""
    to = tile.real
    return to(tile, types.int64), lambda context, b, sig, args: _load(b, args[1], to.llvm)


@intrinsic
def load_int32(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W 32-bit integers from a byte address."""
    to = tile.real.of(types.int32)
    return to(tile, types.int64), lambda context, b, sig, args: _load(b, args[1], to.llvm)


@intrinsic
def store(typingctx: Any, address: Any, x: Any) -> Any:
    """Write lanes to a byte address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _store(b, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, x), codegen


@intrinsic
def read(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return one float of the tile's type from a byte address."""
    to = tile.real.dtype
    return to(tile, types.int64), lambda context, b, sig, args: _load(b, args[1], _LLVM[to])


@intrinsic
def write(typingctx: Any, tile: Any, address: Any, x: Any) -> Any:
    """Write one float of the tile's type to a byte address."""
    to = tile.real.dtype

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _store(b, args[1], context.cast(b, args[2], sig.args[2], to))
        return context.get_dummy_value()

    return types.void(tile, types.int64, x), codegen


# ---------------------------------------------------------------------------------------------
# The register tile: MV x NR vectors in a tuple, which LLVM keeps in registers through a loop
# ---------------------------------------------------------------------------------------------


@intrinsic
def zeros(typingctx: Any, tile: Any) -> Any:
    """Return the register tile's accumulators, all 0: a tuple of MV * NR lanes."""
    count = tile.tile.MV * tile.tile.NR
    to = types.UniTuple(tile.real, count)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        zero = ir.Constant(tile.real.llvm, [0.0] * tile.real.width)
        return ir.Constant(ir.ArrayType(tile.real.llvm, count), [zero] * count)

    return to(tile), codegen


@intrinsic
def outer_fma(typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any) -> Any:
    """Add an outer product: ``acc[j, i] += a[i] * x[j]``.

    a[i] are MV adjacent vectors at byte address `a`; x[j] are NR scalars `stride` bytes apart,
    the first at byte address `x`.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, acc_, a_, x_, stride_ = args
        size = tile.tile.itemsize * to.width
        vectors = [_V(b, _load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        out = acc_
        for j in range(nr):
            scalar = _load(b, b.add(x_, b.mul(stride_, I64(j))), _LLVM[to.dtype])
            spread = _V(b, _broadcast(b, scalar, to.width))
            for i in range(mv):
                old = _V(b, b.extract_value(acc_, j * mv + i))
                out = b.insert_value(out, vectors[i].fma(spread, old).value, j * mv + i)
        return out

    return acc(tile, acc, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_tile(typingctx: Any, tile: Any, acc: Any, address: Any, top: Any) -> Any:
    """Write the register tile row by row: NR rows of MV vectors, without a gap.

    The MV vectors at address `top` become the maximum of themselves and the rows (a NaN is
    passed over): while the tile is in registers and waits to be written, that costs nothing.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        for n in range(mv * nr):
            _store(b, b.add(args[2], I64(n * size)), b.extract_value(args[1], n))
        for i in range(mv):
            at = b.add(args[3], I64(i * size))
            largest = _V(b, _load(b, at, to.llvm))
            for j in range(nr):
                x = _V(b, b.extract_value(args[1], j * mv + i))
                largest = x.cmp(">", largest).where(x, largest)
            _store(b, at, largest.value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64), codegen


@intrinsic
def outer_fma_visible(typingctx: Any, tile: Any, acc: Any, a: Any, x: Any, stride: Any) -> Any:
    """Add an outer product as `outer_fma` does, and leave acc as it is where a[i] has a sign bit.

    A hidden probability is stored as -0.0. The product 0 * NaN would be NaN; this one is not made.
    """
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, acc_, a_, x_, stride_ = args
        size = tile.tile.itemsize * to.width
        vectors = [_V(b, _load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        hidden = [v.bits().cmp("<", 0) for v in vectors]
        out = acc_
        for j in range(nr):
            scalar = _load(b, b.add(x_, b.mul(stride_, I64(j))), _LLVM[to.dtype])
            spread = _V(b, _broadcast(b, scalar, to.width))
            for i in range(mv):
                old = _V(b, b.extract_value(acc_, j * mv + i))
                new = hidden[i].where(old, vectors[i].fma(spread, old))
                out = b.insert_value(out, new.value, j * mv + i)
        return out

    return acc(tile, acc, types.int64, types.int64, types.int64), codegen


@intrinsic
def rescale_add_tile(typingctx: Any, tile: Any, acc: Any, address: Any, alpha: Any) -> Any:
    """Add the register tile to memory: ``m[j, i] = m[j, i] * alpha[i] + acc[j, i]``."""
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        factors = [_V(b, _load(b, b.add(args[3], I64(i * size)), to.llvm)) for i in range(mv)]
        for n in range(mv * nr):
            at = b.add(args[2], I64(n * size))
            old = _V(b, _load(b, at, to.llvm))
            new = old.fma(factors[n % mv], _V(b, b.extract_value(args[1], n)))
            _store(b, at, new.value)
        return context.get_dummy_value()

    return types.void(tile, acc, types.int64, types.int64), codegen


# ---------------------------------------------------------------------------------------------
# Arrays whose rows lie anywhere: lane l reads at its own byte offset
# ---------------------------------------------------------------------------------------------

_STORAGE = {
    "bool": ir.IntType(8),
    "float16": ir.IntType(16),
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}


def _storage_name(storage: Any) -> str:
    """Return how elements are stored: a literal says so, a tile means its own float type."""
    name: str = storage.tile.dtype if isinstance(storage, TileType) else storage.literal_value
    return name


def _from_storage(b: Any, x: Any, storage: str, to: Lanes) -> Any:
    """Convert a vector as it is stored to the tile's floats; True is 0 and False -inf."""
    v = _V(b, x)
    if storage == "bool":
        zero = _V(b, ir.Constant(to.llvm, [0.0] * to.width))
        return v.cmp("!=", 0).where(zero, -math.inf).value
    if storage == "float16":
        return _half_to_float(v, to).value
    if storage == str(to.dtype):
        return x
    return (b.fpext if storage == "float32" else b.fptrunc)(x, to.llvm)


def _half_to_float(x: _V, to: Lanes) -> _V:
    """Convert half floats by their bits: not every processor has the instruction.

    Moved to float32's place the exponent is 112 too small: one exact product mends it, for
    subnormal numbers too. Inf and NaN get the full exponent.
    """
    b = x.b
    wide = _V(b, b.zext(x.value, ir.VectorType(I32, to.width)))
    magnitude = ((wide & 0x7FFF) << 13).as_float() * 2.0**112
    special = (wide & 0x7C00).cmp("==", 0x7C00).where(0x7F800000, wide.const(0))
    sign = (wide & 0x8000) << 16
    y = (magnitude.bits() | special | sign).as_float()
    return _V(b, b.fpext(y.value, to.llvm)) if to.dtype == types.float64 else y


def _lane_address(b: Any, base: Any, offsets: Any, lane: int) -> Any:
    return b.add(base, _load(b, b.add(offsets, I64(8 * lane)), I64))


def _transpose(b: Any, rows: list[Any]) -> list[Any]:
    """Turn W vectors of W lanes: element c of row r becomes element r of row c.

    In steps of 1, 2, 4, ... pairs of rows swap the blocks off the diagonal.
    """
    width = len(rows)
    step = 1
    while step < width:
        first = [n if not n & step else width + n - step for n in range(width)]
        second = [n + step if not n & step else width + n for n in range(width)]
        masks = [ir.Constant(ir.VectorType(I32, width), m) for m in (first, second)]
        for r in range(width):
            if not r & step:
                x, y = rows[r], rows[r | step]
                rows[r] = b.shuffle_vector(x, y, masks[0])
                rows[r | step] = b.shuffle_vector(x, y, masks[1])
        step *= 2
    return rows


@intrinsic(prefer_literal=True)
def gather_transposed(
    typingctx: Any, tile: Any, storage: Any, base: Any, offsets: Any, dest: Any, stride: Any
) -> Any:
    """Read W adjacent elements for every lane and write them as W vectors over the lanes.

    Lane l reads at byte address ``base + offsets[l]`` (`offsets` is the address of int64); vector
    c goes to ``dest + c * stride``. The storage type is a literal, "float16", "float32",
    "float64" or "bool" (of which True becomes 0 and False -inf), or a tile for its own floats.
    """
    to, name, width = tile.real, _storage_name(storage), tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        ty = ir.VectorType(_STORAGE[name], width)
        rows = [_load(b, _lane_address(b, args[2], args[3], n), ty) for n in range(width)]
        for n, column in enumerate(_transpose(b, rows)):
            at = b.add(args[4], b.mul(args[5], I64(n)))
            _store(b, at, _from_storage(b, column, name, to))
        return context.get_dummy_value()

    return types.void(tile, storage, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def load_lanes(typingctx: Any, tile: Any, storage: Any, base: Any, offsets: Any) -> Any:
    """Read one element for every lane, at byte address ``base + offsets[lane]``."""
    to, name = tile.real, _storage_name(storage)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x = ir.Constant(ir.VectorType(_STORAGE[name], to.width), ir.Undefined)
        for n in range(to.width):
            value = _load(b, _lane_address(b, args[2], args[3], n), _STORAGE[name])
            x = b.insert_element(x, value, I32(n))
        return _from_storage(b, x, name, to)

    return to(tile, storage, types.int64, types.int64), codegen


def _type_gather(array: Any, index: Any) -> Lanes | None:
    """Return the lanes of ``array[index]``; None where it is not a gather."""
    if not isinstance(array, types.Array) or array.ndim != 1 or not isinstance(index, Lanes):
        return None
    if not isinstance(index.dtype, types.Integer):
        return None
    dtype = array.dtype
    if isinstance(dtype, types.Boolean):
        return index.of(types.boolean)
    if isinstance(dtype, types.Float):
        return index.of(index.real)
    if isinstance(dtype, types.Integer):
        return index.of(types.int32 if dtype.bitwidth + (not dtype.signed) <= 32 else types.int64)
    return None


@type_callable(operator.getitem)
def _type_getitem(context: Any) -> Any:
    return lambda array, index: _type_gather(array, index)


@lower_builtin(operator.getitem, types.Array, Lanes)
def _gather(context: Any, b: Any, sig: Any, args: Any) -> Any:
    """Read ``array[index]`` for every lane; nothing outside the array is ever read.

    A negative index counts from the end, what is still outside takes the nearest element, and an
    empty array gives 0.
    """
    to, dtype = sig.return_type, sig.args[0].dtype
    array = context.make_array(sig.args[0])(context, b, args[0])
    count, stride = (b.extract_value(x, 0) for x in (array.shape, array.strides))
    i = _operand(context, b, args[1], sig.args[1], to.of(types.int64))
    n, step = (_V(b, _broadcast(b, x, to.width)) for x in (count, stride))
    i = _minimum(i.cmp("<", 0).where(i + n, i), n - 1)
    offsets = (_maximum(i, i.const(0)) * step).value
    nothing = cgutils.alloca_once_value(b, I64(0))
    base = b.select(
        b.icmp_signed(">", count, I64(0)),
        b.ptrtoint(array.data, I64),
        b.ptrtoint(nothing, I64),
    )
    integer = isinstance(dtype, types.Integer)
    stored = ir.IntType(dtype.bitwidth) if integer else _STORAGE[str(dtype)]
    x = ir.Constant(ir.VectorType(stored, to.width), ir.Undefined)
    for lane in range(to.width):
        at = b.add(base, b.extract_element(offsets, I32(lane)))
        x = b.insert_element(x, _load(b, at, stored), I32(lane))
    if isinstance(dtype, types.Float):
        return _from_storage(b, x, str(dtype), to)
    if not integer:
        return _V(b, x).cmp("!=", 0).value
    if dtype.bitwidth == to.dtype.bitwidth:
        return x
    return (b.sext if dtype.signed else b.zext)(x, to.llvm)


@intrinsic(prefer_literal=True)
def load_splat(typingctx: Any, tile: Any, storage: Any, address: Any) -> Any:
    """Read one element at a byte address into every lane."""
    to, name = tile.real, _storage_name(storage)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = _load(b, args[2], _STORAGE[name])
        return _from_storage(b, _broadcast(b, value, to.width), name, to)

    return to(tile, storage, types.int64), codegen


@intrinsic
def scatter_transposed(
    typingctx: Any, tile: Any, source: Any, stride: Any, base: Any, offsets: Any, count: Any
) -> Any:
    """Write W vectors over the lanes as W adjacent elements for each of the first lanes.

    `gather_transposed` turned round: vector c is at ``source + c * stride``, lane l writes at the
    byte address ``base + offsets[l]``, and only lanes below `count` write.
    """
    to, width = tile.real, tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors = [_load(b, b.add(args[1], b.mul(args[2], I64(n))), to.llvm) for n in range(width)]
        for n, row in enumerate(_transpose(b, vectors)):
            with b.if_then(b.icmp_signed("<", I64(n), args[5])):
                _store(b, _lane_address(b, args[3], args[4], n), row)
        return context.get_dummy_value()

    return types.void(tile, *[types.int64] * 5), codegen


@intrinsic
def store_panels(typingctx: Any, tile: Any, address: Any, x: Any, panel: Any) -> Any:
    """Write a vector in pieces of at most NR elements, `panel` bytes from piece to piece."""
    width = tile.real.width
    piece = min(tile.tile.NR, width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for n in range(width // piece):
            lanes = ir.Constant(ir.VectorType(I32, piece), list(range(n * piece, (n + 1) * piece)))
            part = b.shuffle_vector(args[2], args[2], lanes)
            _store(b, b.add(args[1], b.mul(args[3], I64(n))), part)
        return context.get_dummy_value()

    return types.void(tile, types.int64, x, types.int64), codegen


def _integer_access(name: str, ty: Any, numba_type: Any) -> Any:
    @intrinsic
    def access(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return _load(b, args[0], ty)

        return numba_type(types.int64), codegen

    access.__doc__ = f"Return one {name} from a byte address."
    return access


read_int64 = _integer_access("int64", I64, types.int64)


def _integer_write(name: str, numba_type: Any) -> Any:
    @intrinsic
    def access(typingctx: Any, address: Any, x: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            _store(b, args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    access.__doc__ = f"Write one {name} to a byte address."
    return access


write_int64 = _integer_write("int64", types.int64)
write_int32 = _integer_write("int32", types.int32)


@intrinsic
def atomic_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address, atomically, and return what was there.

    What a thread wrote before is seen by those that read the new number.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _pointer(b, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call_tile_function(
    typingctx: Any, function: Any, scores: Any, deriv: Any, ctx: Any, params: Any
) -> Any:
    """Call the tile function at an address: int64 (scores, deriv, ctx, params), all addresses."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fn = b.inttoptr(args[0], ir.FunctionType(I64, [I64] * 4).as_pointer())
        return b.call(fn, args[1:])

    return types.int64(*[types.int64] * 5), codegen
