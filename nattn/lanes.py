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

With `elementary`, which holds the formulas, and `dual`, which differentiates them, this is the one
file on the CPU side that speaks LLVM.
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

from . import elementary
from .elementary import I32, I64, Vector

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


def _operand(context: Any, b: Any, value: Any, ty: Any, to: Lanes) -> Vector:
    """Convert a scalar or lanes to lanes of type `to`."""
    if not isinstance(ty, Lanes):
        return Vector(b, _broadcast(b, context.cast(b, value, ty, to.dtype), to.width))
    if ty.dtype == to.dtype:
        return Vector(b, value)
    if isinstance(to.dtype, types.Float):
        if isinstance(ty.dtype, types.Boolean):
            return Vector(b, b.uitofp(value, to.llvm))
        if isinstance(ty.dtype, types.Integer):
            return Vector(b, b.sitofp(value, to.llvm))
        return Vector(b, (b.fpext if to.dtype == types.float64 else b.fptrunc)(value, to.llvm))
    if isinstance(ty.dtype, types.Boolean):
        return Vector(b, b.zext(value, to.llvm))
    return Vector(b, b.sext(value, to.llvm))


def _broadcast(b: Any, x: Any, width: int) -> Any:
    undefined = ir.Constant(ir.VectorType(x.type, width), ir.Undefined)
    first = b.insert_element(undefined, x, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, width), [0] * width))


Typer = Callable[..., Any]  # Lanes, or None


def _define(fn: Any, meet: Typer, result: Typer, emit: Callable[..., Vector], arity: int) -> None:
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


def _comparison(symbol: str) -> Callable[[Vector, Vector], Vector]:
    return lambda x, y: x.cmp(symbol, y)


def _sqrt(x: Vector) -> Vector:
    return x.call("sqrt")


BINARY: dict[Any, tuple[Callable[[Vector, Vector], Vector], Typer]] = {
    operator.add: (operator.add, _numeric),
    operator.sub: (operator.sub, _numeric),
    operator.mul: (operator.mul, _product),
    operator.truediv: (operator.truediv, _real),
    operator.floordiv: (elementary.floor_divide, _numeric),
    operator.mod: (elementary.remainder, _numeric),
    operator.and_: (operator.and_, _bits),
    operator.or_: (operator.or_, _bits),
    operator.xor: (operator.xor, _bits),
    np.minimum: (elementary.minimum, _numeric),
    np.maximum: (elementary.maximum, _numeric),
    min: (elementary.python_min, _numeric),
    max: (elementary.python_max, _numeric),
}
"""What takes two arguments: the code, and the type in which they meet, also that of the result."""

COMPARISON: dict[Any, Callable[[Vector, Vector], Vector]] = {
    operator.lt: _comparison("<"),
    operator.le: _comparison("<="),
    operator.gt: _comparison(">"),
    operator.ge: _comparison(">="),
    operator.eq: _comparison("=="),
    operator.ne: _comparison("!="),
}
"""What gives booleans for two numbers."""

UNARY: dict[Any, tuple[Callable[[Vector], Vector], Typer]] = {
    operator.neg: (operator.neg, _numeric),
    operator.invert: (operator.invert, _bits),
    abs: (Vector.abs, _numeric),
    np.abs: (Vector.abs, _numeric),
    np.sqrt: (_sqrt, _real),
    np.exp: (elementary.exp, _real),
    np.exp2: (elementary.exp2, _real),
    np.log: (elementary.log, _real),
    np.tanh: (elementary.tanh, _real),
    math.sqrt: (_sqrt, _real),
    math.exp: (elementary.exp, _real),
    math.log: (elementary.log, _real),
    math.tanh: (elementary.tanh, _real),
}
"""What takes one argument, likewise."""

for _op, (_emit, _meet) in BINARY.items():
    _define(_op, _meet, _meet, _emit, 2)
    _inplace = getattr(operator, f"i{_op.__name__.strip('_')}", None)
    if _inplace is not None:
        _define(_inplace, _meet, _meet, _emit, 2)
for _op, _emit in COMPARISON.items():
    _define(_op, _numeric, _truth, _emit, 2)
for _op, (_emit, _meet) in UNARY.items():
    _define(_op, _meet, _meet, _emit, 1)


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
    return Vector(b, args[0]).where(x, y).value


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
    return x(x), lambda context, b, sig, args: elementary.exp2_nonpositive(Vector(b, args[0])).value


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
        vectors = [Vector(b, _load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        out = acc_
        for j in range(nr):
            scalar = _load(b, b.add(x_, b.mul(stride_, I64(j))), _LLVM[to.dtype])
            spread = Vector(b, _broadcast(b, scalar, to.width))
            for i in range(mv):
                old = Vector(b, b.extract_value(acc_, j * mv + i))
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
            largest = Vector(b, _load(b, at, to.llvm))
            for j in range(nr):
                x = Vector(b, b.extract_value(args[1], j * mv + i))
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
        vectors = [Vector(b, _load(b, b.add(a_, I64(i * size)), to.llvm)) for i in range(mv)]
        hidden = [v.bits().cmp("<", 0) for v in vectors]
        out = acc_
        for j in range(nr):
            scalar = _load(b, b.add(x_, b.mul(stride_, I64(j))), _LLVM[to.dtype])
            spread = Vector(b, _broadcast(b, scalar, to.width))
            for i in range(mv):
                old = Vector(b, b.extract_value(acc_, j * mv + i))
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
        factors = [Vector(b, _load(b, b.add(args[3], I64(i * size)), to.llvm)) for i in range(mv)]
        for n in range(mv * nr):
            at = b.add(args[2], I64(n * size))
            old = Vector(b, _load(b, at, to.llvm))
            new = old.fma(factors[n % mv], Vector(b, b.extract_value(args[1], n)))
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
    v = Vector(b, x)
    if storage == "bool":
        zero = Vector(b, ir.Constant(to.llvm, [0.0] * to.width))
        return v.cmp("!=", 0).where(zero, -math.inf).value
    if storage == "float16":
        return _half_to_float(v, to).value
    if storage == str(to.dtype):
        return x
    return (b.fpext if storage == "float32" else b.fptrunc)(x, to.llvm)


def _half_to_float(x: Vector, to: Lanes) -> Vector:
    """Convert half floats by their bits: not every processor has the instruction.

    Moved to float32's place the exponent is 112 too small: one exact product mends it, for
    subnormal numbers too. Inf and NaN get the full exponent.
    """
    b = x.b
    wide = Vector(b, b.zext(x.value, ir.VectorType(I32, to.width)))
    magnitude = ((wide & 0x7FFF) << 13).as_float() * 2.0**112
    special = (wide & 0x7C00).cmp("==", 0x7C00).where(0x7F800000, wide.const(0))
    sign = (wide & 0x8000) << 16
    y = (magnitude.bits() | special | sign).as_float()
    return Vector(b, b.fpext(y.value, to.llvm)) if to.dtype == types.float64 else y


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
    n, step = (Vector(b, _broadcast(b, x, to.width)) for x in (count, stride))
    i = elementary.minimum(i.cmp("<", 0).where(i + n, i), n - 1)
    offsets = (elementary.maximum(i, i.const(0)) * step).value
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
        return Vector(b, x).cmp("!=", 0).value
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
