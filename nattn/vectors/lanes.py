"""SIMD vectors for Numba, and the few machine operations that kernels need.

Numba compiles scalars; whether a loop over them becomes vector code is up to LLVM's
auto-vectoriser, and a register tile is more than it will find. So this module gives Numba a vector
type: ``Lanes(dtype, width)`` lowers to LLVM's ``<width x dtype>``, and arithmetic, comparisons and
the NumPy functions listed below work on it as they do on scalars, with scalars broadcast:

    + - * / // % **   unary + -   < <= > >= == !=   & | ^ ~ << >>   abs min max
    np.where  np.minimum  np.maximum  np.clip  np.logical_and  np.logical_or  np.logical_not
    np.abs  np.sign  np.sqrt  np.square  np.power  np.exp  np.exp2  np.expm1  np.log  np.log1p
    np.tanh  np.sin  np.cos  np.floor  np.ceil  np.trunc  np.rint
    np.isfinite  np.isinf  np.isnan  np.float32  np.float64, and math's twins of these

    array[lanes]   a gather: an element of an array that a function is bound to, for every lane

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

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import lower_constant
from numba.core.typing.templates import (
    AttributeTemplate,
    CallableTemplate,
    infer,
    infer_global,
)
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_cast,
    lower_getattr_generic,
    lower_setattr_generic,
    make_attribute_wrapper,
    models,
    register_model,
    typeof_impl,
)

from . import elementary
from .elementary import I32, I64, Vector, constant, extract, insert, on_gpu, vector_type

_LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: I32,
    types.int64: I64,
    types.boolean: ir.IntType(1),
}


_INT32 = 1 << 31


class Lanes(types.Type):
    """The Numba type of `width` values of one scalar type in one SIMD value.

    Lanes of width 1 stand for a scalar that is the same in all lanes: they meet wider lanes by
    broadcast, and like those they are no condition that an ``if`` could test.

    Parameters
    ----------
    dtype : numba type
        float32, float64, int32, int64 or boolean.
    width : int
        Number of lanes.
    real : numba type, optional
        The float type that a division or a function such as exp makes of integer lanes; for float
        lanes it is `dtype` itself. Eight lanes of int32 alone would not tell.
    bound : int, optional
        The largest magnitude that int32 lanes can have. Where the result of an operation could
        exceed 32 bits it is computed in 64: nothing wraps silently, and what is known to be small
        stays in the narrow vectors.
    """

    def __init__(self, dtype: Any, width: int, real: Any = None, bound: int | None = None) -> None:
        self.dtype = dtype
        self.width = width
        self.real = dtype if isinstance(dtype, types.Float) else (real or types.float64)
        self.bound = None
        if dtype == types.int32:
            self.bound = _INT32 if bound is None else min(bound, _INT32)
        limit = f", at most {self.bound}" if self.bound not in (None, _INT32) else ""
        super().__init__(name=f"Lanes({dtype} x {width}, {self.real}{limit})")

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two lane types one."""
        return (self.dtype, self.width, self.real, self.bound)

    def of(self, dtype: Any, bound: int | None = None) -> Lanes:
        """Return the type of as many lanes of another scalar type."""
        return Lanes(dtype, self.width, self.real, bound)

    @property
    def llvm(self) -> Any:
        """The LLVM vector type; of one lane, the scalar type."""
        return vector_type(_LLVM[self.dtype], self.width)

    def unify(self, typingctx: Any, other: Any) -> Lanes | None:
        """Return the type of a variable that is assigned both."""
        to = _common((self, other))
        # Not the larger bound: in a loop it would grow by each assignment until it is full.
        return to.of(to.dtype) if to is not None else None


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
    as soon as one of them needs 64.
    """
    lanes = [a for a in args if isinstance(a, Lanes)]
    if not lanes or not all(isinstance(a, Lanes) or _is_scalar(a) for a in args):
        return None
    widest = max(lanes, key=lambda x: x.width)
    if any(x.width not in (1, widest.width) or x.real != widest.real for x in lanes):
        return None
    kinds = [a.dtype if isinstance(a, Lanes) else a for a in args]
    if any(isinstance(k, types.Float) for k in kinds):
        return widest.of(widest.real)
    if all(isinstance(k, types.Boolean) for k in kinds):
        return widest.of(types.boolean)
    bound = max(map(_bound, args))
    return widest.of(types.int32, bound) if bound <= _INT32 else widest.of(types.int64)


def _bound(ty: Any) -> int:
    """Return the largest magnitude of an integer or boolean, scalar or lanes."""
    if isinstance(ty, types.IntegerLiteral):
        value = int(ty.literal_value)
        return abs(value) + (value == _INT32)  # of which only the negative fits 32 bits
    if isinstance(ty, Lanes) and ty.bound is not None:
        return ty.bound
    kind = ty.dtype if isinstance(ty, Lanes) else ty
    if isinstance(kind, types.Boolean):
        return 1
    return 1 << (kind.bitwidth - kind.signed) if isinstance(kind, types.Integer) else 0


def _operand(context: Any, b: Any, value: Any, ty: Any, to: Lanes) -> Vector:
    """Convert a scalar or lanes to lanes of type `to`."""
    if not isinstance(ty, Lanes):
        return Vector(b, _broadcast(b, context.cast(b, value, ty, to.dtype), to.width))
    if ty.width != to.width:  # a scalar in all lanes
        one = Lanes(to.dtype, 1, to.real)
        value = _operand(context, b, value, ty, one).value
        return Vector(b, _broadcast(b, extract(b, value, 0), to.width))
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
    return Vector(b, (b.sext if to.dtype == types.int64 else b.trunc)(value, to.llvm))


@lower_cast(Lanes, Lanes)
@lower_cast(types.Number, Lanes)
@lower_cast(types.Boolean, Lanes)
def _cast_to_lanes(context: Any, b: Any, fromty: Any, toty: Any, value: Any) -> Any:
    """Give a variable that is assigned more than once its one type."""
    return _operand(context, b, value, fromty, toty).value


def _broadcast(b: Any, x: Any, width: int) -> Any:
    if width == 1:
        return x
    undefined = ir.Constant(ir.VectorType(x.type, width), ir.Undefined)
    first = b.insert_element(undefined, x, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, width), [0] * width))


Typer = Callable[..., Any]  # of the types of the arguments: Lanes, or None
Limit = Callable[..., int]  # of the bounds of the arguments


def typed(function: Any) -> Callable[[Typer], Typer]:
    """Teach Numba the type of a function's result.

    As `numba.extending.type_callable`, but a literal argument keeps its value: that a number is
    small is what lets int32 lanes stay int32.
    """

    def decorate(typer: Typer) -> Typer:
        members = {"key": function, "generic": lambda self: typer, "prefer_literal": True}
        template = type(f"Lanes_{function.__name__}", (CallableTemplate,), members)
        infer(template)
        infer_global(function, types.Function(template))
        return typer

    return decorate


def kinds_of_operands(arity: int) -> list[tuple[Any, ...]]:
    """Return the classes of arguments of which one at least is lanes."""
    kinds = (Lanes, types.Number, types.Boolean)
    return [c for c in itertools.product(kinds, repeat=arity) if Lanes in c]


@dataclass(frozen=True)
class Operation:
    """What a function does with lanes.

    Attributes
    ----------
    emit : callable
        Writes the code, from one `Vector` for each argument.
    meet : callable
        The lane type to which the arguments are converted (None: not for these).
    result : numba type, optional
        The scalar type of the result; that in which the arguments meet by default.
    limit : callable, optional
        The bound of an integer result, from the bounds of the arguments. If it does not fit
        32 bits the arguments meet in 64. Without it the result is as large as its type.
    selects : bool
        The result is one of the arguments: what they fit, it fits.
    """

    emit: Callable[..., Vector]
    meet: Typer
    result: Any = None
    limit: Limit | None = None
    selects: bool = False

    def types(self, args: tuple[Any, ...]) -> tuple[Lanes, Lanes] | None:
        """Return the type in which arguments meet and that of the result; None if none."""
        to = self.meet(*args)
        if to is None:
            return None
        if self.result is not None:
            return to, to.of(self.result)
        if to.dtype != types.int32 or self.limit is None:
            return to, to.of(to.dtype)
        bound = self.limit(*map(_bound, args))
        fits = bound < _INT32 + self.selects
        to = to.of(types.int32, bound) if fits else to.of(types.int64)
        return to, to


def _define(
    fn: Any, operation: Operation, arity: int, special: Callable[..., Any] = lambda *args: None
) -> None:
    """Teach Numba an operation on lanes; `special` may write the code of its own for some types."""

    def typer(*args: Any) -> Any:
        found = operation.types(args)
        return None if found is None else found[1]

    typed(fn)(_with_arity(typer, arity))

    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        done = special(context, b, fn, sig, args)
        if done is not None:
            return done
        found = operation.types(sig.args)
        assert found is not None
        operands = [
            _operand(context, b, a, t, found[0]) for a, t in zip(args, sig.args, strict=True)
        ]
        return operation.emit(*operands).value

    for kinds in kinds_of_operands(arity):
        lower_builtin(fn, *kinds)(lower)


def _with_arity(typer: Typer, arity: int) -> Typer:
    """Give a typer as many parameters as Numba is to look for."""
    if arity == 1:
        return lambda x: typer(x)
    return (lambda x, y: typer(x, y)) if arity == 2 else (lambda x, y, z: typer(x, y, z))


def _numeric(*args: Any) -> Lanes | None:
    """Meet as numbers: booleans count as integers."""
    to = _common(args)
    return to.of(types.int32, 1) if to is not None and to.dtype == types.boolean else to


def _integers(*args: Any) -> Lanes | None:
    """Meet as 64-bit integers."""
    to = _common(args)
    return None if to is None or isinstance(to.dtype, types.Float) else to.of(types.int64)


def _real(*args: Any) -> Lanes | None:
    """Meet as floats."""
    to = _common(args)
    return None if to is None else to.of(to.real)


def _bits(*args: Any) -> Lanes | None:
    """Meet for a bitwise operation: booleans or integers."""
    to = _common(args)
    return None if to is None or isinstance(to.dtype, types.Float) else to


def _number(*args: Any) -> Lanes | None:
    """Meet as floats if there is one, and else as 64-bit integers."""
    to = _common(args)
    return to if to is None or isinstance(to.dtype, types.Float) else to.of(types.int64)


def _any(*args: Any) -> Lanes | None:
    """Meet as whatever it is: booleans, integers or floats."""
    return _common(args)


def _largest(*bounds: int) -> int:
    return max(bounds)


def _comparison(symbol: str) -> Callable[[Vector, Vector], Vector]:
    return lambda x, y: x.cmp(symbol, y)


def _compare_narrow(context: Any, b: Any, fn: Any, sig: Any, args: Any) -> Any:
    """Compare int32 lanes with one 64-bit integer, without widening the lanes.

    The one integer is often a bound number or a position. Brought to the ends of 32 bits, which the
    lanes do not reach, it compares with them as before; in a loop that happens once.
    """
    for n in (0, 1):
        x, y = sig.args[n], sig.args[1 - n]
        one = y.dtype if isinstance(y, Lanes) and y.width == 1 else y
        if (
            isinstance(x, Lanes)
            and x.dtype == types.int32
            and _bound(x) < _INT32 - 1
            and (x.width > 1 or not isinstance(y, Lanes))
            and isinstance(one, types.Integer)
            and one.bitwidth == 64
            and _bound(y) > _INT32
        ):
            break
    else:
        return None
    value = args[1 - n]
    if isinstance(y, Lanes):
        value = extract(b, value, 0)
    elif not one.signed:
        value = b.select(b.icmp_signed("<", value, I64(0)), I64(_INT32 - 1), value)
    value = b.select(b.icmp_signed(">", value, I64(_INT32 - 1)), I64(_INT32 - 1), value)
    value = b.select(b.icmp_signed("<", value, I64(-_INT32)), I64(-_INT32), value)
    spread = Vector(b, _broadcast(b, b.trunc(value, I32), x.width))
    operands = [Vector(b, args[n]), spread]
    return COMPARISON[fn].emit(*(operands if n == 0 else reversed(operands))).value


def _sqrt(x: Vector) -> Vector:
    return x.call("sqrt")


def _square(x: Vector) -> Vector:
    return x * x


def _shift_left(x: Vector, y: Vector) -> Vector:
    """Shift 64-bit integers; by as many bits as they have, nothing is left."""
    inside = y.cmp(">=", 0) & y.cmp("<", 64)
    return inside.where(x << inside.where(y, 0), 0)


def _shift_right(x: Vector, y: Vector) -> Vector:
    """Shift 64-bit integers; by as many bits as they have, the sign is left."""
    return x >> (y.cmp(">=", 0) & y.cmp("<", 64)).where(y, 63)


def _power(x: Vector, y: Vector) -> Vector:
    return elementary.power(x, y) if x.is_float else elementary.int_power(x, y)


def _constant_power(context: Any, b: Any, fn: Any, sig: Any, args: Any) -> Any:
    """Write a power with a literal exponent, which may be but a product."""
    base, exponent = sig.args
    if not isinstance(exponent, types.IntegerLiteral):
        return None
    x = _operand(context, b, args[0], base, sig.return_type)
    return elementary.constant_power(x, exponent.literal_value).value


def _is_true(x: Vector) -> Vector:
    return x.cmp("!=", 0) if x.is_float or x.element.width > 1 else x


def _clip(x: Vector, lo: Vector, hi: Vector) -> Vector:
    return elementary.minimum(elementary.maximum(x, lo), hi)


BINARY: dict[Any, Operation] = {
    operator.add: Operation(operator.add, _numeric, limit=operator.add),
    operator.sub: Operation(operator.sub, _numeric, limit=operator.add),
    operator.mul: Operation(operator.mul, _numeric, limit=operator.mul),
    operator.truediv: Operation(operator.truediv, _real),
    operator.floordiv: Operation(elementary.floor_divide, _numeric, limit=lambda x, y: x),
    operator.mod: Operation(elementary.remainder, _numeric, limit=lambda x, y: max(y - 1, 0)),
    operator.and_: Operation(operator.and_, _bits),
    operator.or_: Operation(operator.or_, _bits),
    operator.xor: Operation(operator.xor, _bits),
    operator.lshift: Operation(_shift_left, _integers),
    operator.rshift: Operation(_shift_right, _integers),
    operator.pow: Operation(_power, _number),
    np.power: Operation(_power, _number),
    np.logical_and: Operation(lambda x, y: _is_true(x) & _is_true(y), _any, types.boolean),
    np.logical_or: Operation(lambda x, y: _is_true(x) | _is_true(y), _any, types.boolean),
    np.minimum: Operation(elementary.minimum, _numeric, limit=_largest, selects=True),
    np.maximum: Operation(elementary.maximum, _numeric, limit=_largest, selects=True),
    min: Operation(elementary.python_min, _numeric, limit=_largest, selects=True),
    max: Operation(elementary.python_max, _numeric, limit=_largest, selects=True),
}
"""What takes two arguments."""

COMPARISON: dict[Any, Operation] = {
    operator.lt: Operation(_comparison("<"), _numeric, types.boolean),
    operator.le: Operation(_comparison("<="), _numeric, types.boolean),
    operator.gt: Operation(_comparison(">"), _numeric, types.boolean),
    operator.ge: Operation(_comparison(">="), _numeric, types.boolean),
    operator.eq: Operation(_comparison("=="), _numeric, types.boolean),
    operator.ne: Operation(_comparison("!="), _numeric, types.boolean),
}
"""What compares two numbers."""

UNARY: dict[Any, Operation] = {
    operator.neg: Operation(operator.neg, _numeric, limit=_largest),
    operator.pos: Operation(lambda x: x, _numeric, limit=_largest),
    operator.invert: Operation(operator.invert, _bits),
    np.logical_not: Operation(lambda x: ~_is_true(x), _any, types.boolean),
    abs: Operation(Vector.abs, _numeric, limit=_largest),
    np.abs: Operation(Vector.abs, _numeric, limit=_largest),
    np.square: Operation(_square, _number),
    np.sqrt: Operation(_sqrt, _real),
    np.exp: Operation(elementary.exp, _real),
    np.exp2: Operation(elementary.exp2, _real),
    np.expm1: Operation(elementary.expm1, _real),
    np.log: Operation(elementary.log, _real),
    np.log1p: Operation(elementary.log1p, _real),
    np.tanh: Operation(elementary.tanh, _real),
    np.sin: Operation(elementary.sin, _real),
    np.cos: Operation(elementary.cos, _real),
    np.sign: Operation(elementary.sign, _numeric, limit=_largest, selects=True),
    np.floor: Operation(elementary.floor, _real),
    np.ceil: Operation(elementary.ceil, _real),
    np.trunc: Operation(elementary.trunc, _real),
    np.rint: Operation(elementary.rint, _real),
    np.isfinite: Operation(elementary.isfinite, _real, types.boolean),
    np.isinf: Operation(elementary.isinf, _real, types.boolean),
    np.isnan: Operation(elementary.isnan, _real, types.boolean),
    math.sqrt: Operation(_sqrt, _real),
    math.exp: Operation(elementary.exp, _real),
    math.expm1: Operation(elementary.expm1, _real),
    math.log: Operation(elementary.log, _real),
    math.log1p: Operation(elementary.log1p, _real),
    math.tanh: Operation(elementary.tanh, _real),
    math.sin: Operation(elementary.sin, _real),
    math.cos: Operation(elementary.cos, _real),
}
"""What takes one argument."""

TERNARY: dict[Any, Operation] = {
    np.clip: Operation(_clip, _numeric, limit=_largest, selects=True),
}
"""What takes three arguments; `np.where` is on its own."""

_POWERS = (operator.pow, np.power)
for _op, _operation in BINARY.items():
    _special = [_constant_power] if _op in _POWERS else []
    _define(_op, _operation, 2, *_special)
    _inplace = getattr(operator, f"i{_op.__name__.strip('_')}", None)
    if _inplace is not None:
        _define(_inplace, _operation, 2, *_special)
for _op, _operation in COMPARISON.items():
    _define(_op, _operation, 2, _compare_narrow)
for _op, _operation in UNARY.items():
    _define(_op, _operation, 1)
for _op, _operation in TERNARY.items():
    _define(_op, _operation, 3)


def _define_conversion(number: Any) -> None:
    """Teach Numba ``np.float32(lanes)`` or ``np.float64(lanes)``.

    Either way the result has the kernel's own float type, as has every float.
    """

    def typer(x: Any) -> Any:
        return x.of(x.real) if isinstance(x, Lanes) else None

    members = {"key": types.NumberClass(number), "generic": lambda self: typer}
    infer(type(f"Lanes_{number}", (CallableTemplate,), members))


@lower_builtin(types.NumberClass, Lanes)
def _convert(context: Any, b: Any, sig: Any, args: Any) -> Any:
    to = sig.return_type
    return _operand(context, b, args[0], sig.args[0], to).value


_define_conversion(types.float32)
_define_conversion(types.float64)


@typed(np.where)
def _type_where(condition: Any, x: Any, y: Any) -> Any:
    # An integer is true if it is not 0, and one number decides for all lanes at once. A float is
    # refused: a score as a condition is a comparison forgotten.
    kind = condition.dtype if isinstance(condition, Lanes) else condition
    if not isinstance(kind, types.Boolean | types.Integer):
        return None
    plain = condition.of(types.boolean) if isinstance(condition, Lanes) else types.boolean
    # With two scalars the condition alone tells the width and the float type.
    branches = [t for t in (x, y) if isinstance(t, Lanes) or not isinstance(t, types.Boolean)]
    return _common((plain, *branches)) if branches else _common((plain, types.boolean))


def _lower_where(context: Any, b: Any, sig: Any, args: Any) -> Any:
    to, ty = sig.return_type, sig.args[0]
    if isinstance(ty, Lanes):
        found = _is_true(Vector(b, args[0]))
        truth = ty.of(types.boolean)
    else:
        found = _is_true(_operand(context, b, args[0], ty, _one_lane(ty, to)))
        truth = Lanes(types.boolean, 1, to.real)
    choice = _operand(context, b, found.value, truth, to.of(types.boolean))
    x, y = (_operand(context, b, args[i], sig.args[i], to) for i in (1, 2))
    return choice.where(x, y).value


def _one_lane(ty: Any, like: Lanes) -> Lanes:
    """Return the type of a scalar as lanes of width 1."""
    if isinstance(ty, types.Boolean):
        return Lanes(types.boolean, 1, like.real)
    return Lanes(types.int64, 1, like.real)


for _kinds in kinds_of_operands(3):
    lower_builtin(np.where, *_kinds)(_lower_where)


@typed(operator.not_)
@typed(bool)
def _type_bool(x: Any) -> None:
    if isinstance(x, Lanes):
        raise TypingError(
            "the lanes of a vector differ: no `if`, `while`, `and`, `or`, `not` or conditional "
            "expression can test them all at once; use np.where(condition, x, y), and & | ~ "
            "between conditions"
        )


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


@intrinsic
def lane_of(typingctx: Any, tile: Any, x: Any, lane: Any) -> Any:
    """Return one of the float lanes of a tile."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return extract(b, args[1], args[2])

    return x.dtype(tile, x, types.int64), codegen


@intrinsic
def sign_bit(typingctx: Any, x: Any) -> Any:
    """Return where float lanes have a sign bit: numbers below 0, and -0.0."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return Vector(b, args[0]).bits().cmp("<", 0).value

    return x.of(types.boolean)(x), codegen


# ---------------------------------------------------------------------------------------------
# Making lanes, and memory
# ---------------------------------------------------------------------------------------------


def _pointer(b: Any, address: Any, ty: Any) -> Any:
    # On a GPU an address is one of global memory.
    return b.inttoptr(address, ty.as_pointer(1 if on_gpu(b) else 0))


def _load(b: Any, address: Any, ty: Any) -> Any:
    value = b.load(_pointer(b, address, ty))
    if not on_gpu(b):  # where what is not aligned is read byte by byte
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
        steps = list(range(to.width)) if to.width > 1 else 0
        return b.add(first, ir.Constant(to.llvm, steps))

    return to(tile, types.int64), codegen


@intrinsic
def load(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W floats from a byte address."""
    to = tile.real
    return to(tile, types.int64), lambda context, b, sig, args: _load(b, args[1], to.llvm)


@intrinsic
def load_old(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W floats from where a selection between them and new ones will be stored.

    LLVM would make it a masked store, for which AMD's processors take some forty steps; it does
    not see that a frozen value is still that of the load.
    """
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = _load(b, args[1], to.llvm)
        frozen = ir.Instruction(b.block, value.type, "freeze", [value])
        b._insert(frozen)
        return frozen

    return to(tile, types.int64), codegen


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
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which may lie outside any array."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        ty = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        fetch = cgutils.get_or_insert_function(b.module, ty, "llvm.prefetch.p0")
        b.call(fetch, [b.inttoptr(args[0], pointer), I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


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
        zero = constant(tile.real.llvm, 0.0)
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


@intrinsic
def add_tile(typingctx: Any, tile: Any, acc: Any, address: Any, stride: Any) -> Any:
    """Add the register tile to memory whose rows lie `stride` bytes apart."""
    mv, nr, to = tile.tile.MV, tile.tile.NR, tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        size = tile.tile.itemsize * to.width
        for j in range(nr):
            row = b.add(args[2], b.mul(args[3], I64(j)))
            for i in range(mv):
                at = b.add(row, I64(i * size))
                old = Vector(b, _load(b, at, to.llvm))
                _store(b, at, (old + Vector(b, b.extract_value(args[1], j * mv + i))).value)
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
        zero = Vector(b, constant(to.llvm, 0.0))
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
    wide = Vector(b, b.zext(x.value, vector_type(I32, to.width)))
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
        ty = vector_type(_STORAGE[name], width)
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
        x = ir.Constant(vector_type(_STORAGE[name], to.width), ir.Undefined)
        for n in range(to.width):
            value = _load(b, _lane_address(b, args[2], args[3], n), _STORAGE[name])
            x = insert(b, x, value, n)
        return _from_storage(b, x, name, to)

    return to(tile, storage, types.int64, types.int64), codegen


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
    return types.void(tile, *[types.int64] * 5), _scatter(tile, False)


@intrinsic
def scatter_add_transposed(
    typingctx: Any, tile: Any, source: Any, stride: Any, base: Any, offsets: Any, count: Any
) -> Any:
    """Add what `scatter_transposed` would write."""
    return types.void(tile, *[types.int64] * 5), _scatter(tile, True)


def _scatter(tile: Any, add: bool) -> Any:
    to, width = tile.real, tile.real.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors = [_load(b, b.add(args[1], b.mul(args[2], I64(n))), to.llvm) for n in range(width)]
        for n, row in enumerate(_transpose(b, vectors)):
            with b.if_then(b.icmp_signed("<", I64(n), args[5])):
                at = _lane_address(b, args[3], args[4], n)
                if add:
                    row = (Vector(b, _load(b, at, to.llvm)) + Vector(b, row)).value
                _store(b, at, row)
        return context.get_dummy_value()

    return codegen


@intrinsic
def store_panels(typingctx: Any, tile: Any, address: Any, x: Any, panel: Any) -> Any:
    """Write a vector in pieces of at most NR elements, `panel` bytes from piece to piece."""
    width = tile.real.width
    piece = min(tile.tile.NR, width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for n in range(width // piece):
            lanes = ir.Constant(ir.VectorType(I32, piece), list(range(n * piece, (n + 1) * piece)))
            part = b.shuffle_vector(args[2], args[2], lanes) if width > 1 else args[2]
            _store(b, b.add(args[1], b.mul(args[3], I64(n))), part)
        return context.get_dummy_value()

    return types.void(tile, types.int64, x, types.int64), codegen


def _shuffled(b: Any, x: Any, y: Any, width: int, lanes: range | list[int]) -> Any:
    """Return those lanes of two vectors, counted from the first of x to the last of y."""
    if width == 1:
        return (x, y)[lanes[0]]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, width), list(lanes)))


@intrinsic
def part_pairs(typingctx: Any, tile: Any, x: Any, y: Any) -> Any:
    """Return the even lanes of two vectors, one after the other, and the odd ones."""
    width = x.width

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        parts = [_shuffled(b, args[1], args[2], width, range(i, 2 * width, 2)) for i in (0, 1)]
        return context.make_tuple(b, sig.return_type, parts)

    return types.UniTuple(x, 2)(tile, x, y), codegen


@intrinsic
def join_pairs(typingctx: Any, tile: Any, x: Any, y: Any) -> Any:
    """Return two vectors in which the lanes of x and y alternate: what undoes `part_pairs`."""
    width = x.width
    lanes = [start + n for n in range(width) for start in (0, width)]

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        halves = [_shuffled(b, args[1], args[2], width, lanes[i : i + width]) for i in (0, width)]
        return context.make_tuple(b, sig.return_type, halves)

    return types.UniTuple(x, 2)(tile, x, y), codegen


def _integer_access(name: str, ty: Any, numba_type: Any) -> Any:
    @intrinsic
    def access(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return _load(b, args[0], ty)

        return numba_type(types.int64), codegen

    access.__doc__ = f"Return one {name} from a byte address."
    return access


read_int8 = _integer_access("int8", ir.IntType(8), types.int8)
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


write_int8 = _integer_write("int8", types.int8)
write_int64 = _integer_write("int64", types.int64)
write_int32 = _integer_write("int32", types.int32)


def _atomic(operation: str, doc: str) -> Any:
    @intrinsic
    def update(typingctx: Any, address: Any, operand: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.atomic_rmw(operation, _pointer(b, args[0], I64), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    update.__doc__ = f"""{doc} the int64 at an address, atomically, and return what was there.

    What a thread wrote before is seen by those that read the new number.
    """
    return update


atomic_add = _atomic("add", "Add to")
atomic_or = _atomic("or", "Set bits of")


@intrinsic
def call_tile_function(
    typingctx: Any, function: Any, scores: Any, deriv: Any, ctx: Any, params: Any
) -> Any:
    """Call the tile function at an address: int64 (scores, deriv, ctx, params), all addresses."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fn = b.inttoptr(args[0], ir.FunctionType(I64, [I64] * 4).as_pointer())
        return b.call(fn, args[1:])

    return types.int64(*[types.int64] * 5), codegen


# ---------------------------------------------------------------------------------------------
# Calling users' functions on lanes: their arguments, and the arrays they are bound to
# ---------------------------------------------------------------------------------------------

INDEX_BOUND = 1 << 28
"""Magnitude up to which indices are int32 lanes: sums and differences of several still fit."""


@dataclass(frozen=True)
class Layout:
    """How the parameters of a function are passed, and what it is bound to lies in memory.

    Attributes
    ----------
    order : tuple of int
        For each parameter n, if it is argument n of the call, or -1 - m: it is bound value m.
    kinds : tuple
        For each bound value ("int",), ("float",), ("bool",) or ("array", dtype name, ndim, far).
        A number takes one 8-byte word (a float as float64); an array 1 + 2 ndim: its address,
        shape and byte strides. An array that is not `far` has fewer than 2**31 elements along
        each axis and strides that fit 32 bits.
    first : int
        Number of the first word.
    """

    order: tuple[int, ...]
    kinds: tuple[tuple[Any, ...], ...]
    first: int

    @property
    def words(self) -> int:
        """Number of words of the bound values."""
        return sum(1 + 2 * kind[2] if kind[0] == "array" else 1 for kind in self.kinds)


class LayoutType(types.Opaque):
    """The Numba type of a `Layout`; the type is the value."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        super().__init__(name=repr(layout))


@typeof_impl.register(Layout)
def _typeof_layout(val: Layout, c: Any) -> LayoutType:
    return LayoutType(val)


register_model(LayoutType)(models.OpaqueModel)


@lower_constant(LayoutType)
def _constant_layout(context: Any, builder: Any, ty: Any, pyval: Any) -> Any:
    return context.get_dummy_value()


class BoundArrayType(types.Type):
    """The Numba type of an array that a function is bound to.

    Its elements are read by lanes of indices, and what lies outside is not read but noted.
    """

    def __init__(self, stored: str, ndim: int, far: bool, real: Lanes) -> None:
        self.stored = stored
        self.ndim = ndim
        self.far = far
        self.real = real
        self.axes = types.UniTuple(types.int64, ndim)
        super().__init__(name=f"BoundArray({stored}, {ndim}, {far}, {real.dtype} x {real.width})")

    def element(self, width: int) -> Lanes:
        """Return the lanes that reading this array gives."""
        real = self.real.dtype
        if self.stored == "bool":
            return Lanes(types.boolean, width, real)
        if self.stored.startswith("float"):
            return Lanes(real, width)
        stored = getattr(types, self.stored)
        bits = stored.bitwidth + (not stored.signed)
        if bits > 32:
            return Lanes(types.int64, width, real)
        return Lanes(types.int32, width, real, 1 << (stored.bitwidth - stored.signed))


@register_model(BoundArrayType)
class _BoundArrayModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: BoundArrayType) -> None:
        members = [
            ("address", types.int64),
            ("shape", fe_type.axes),
            ("strides", fe_type.axes),
            ("outside", types.CPointer(types.int32)),
        ]
        super().__init__(dmm, fe_type, members)


make_attribute_wrapper(BoundArrayType, "shape", "shape")


@typed(len)
def _type_len(x: Any) -> Any:
    return types.int64 if isinstance(x, BoundArrayType) else None


@lower_builtin(len, BoundArrayType)
def _len(context: Any, b: Any, sig: Any, args: Any) -> Any:
    array = cgutils.create_struct_proxy(sig.args[0])(context, b, args[0])
    return b.extract_value(array.shape, 0)


def _load_constant(b: Any, address: Any, ty: Any) -> Any:
    """Load what no kernel writes: in a loop that does not change the address, once."""
    value = _load(b, address, ty)
    value.set_metadata("invariant.load", b.module.add_metadata([]))
    return value


@intrinsic
def call_arguments(
    typingctx: Any, tile: Any, layout: Any, args: Any, params: Any, outside: Any
) -> Any:
    """Return the arguments of a function as a tuple, in the order of its parameters.

    `args` is the tuple of what it is called with, `params` the address of the words of what it is
    bound to, `outside` a `new_outside`.
    """
    lay, real = layout.layout, tile.real

    def type_of(kind: tuple[Any, ...]) -> Any:
        if kind[0] == "array":
            return BoundArrayType(kind[1], kind[2], kind[3], real)
        return {"int": types.int64, "float": real.dtype, "bool": types.boolean}[kind[0]]

    bound = [type_of(kind) for kind in lay.kinds]
    to = types.Tuple([args.types[n] if n >= 0 else bound[-1 - n] for n in lay.order])

    def codegen(context: Any, b: Any, sig: Any, values: Any) -> Any:
        word = lay.first

        def read(ty: Any = I64) -> Any:
            nonlocal word
            word += 1
            return _load_constant(b, b.add(values[3], I64(8 * (word - 1))), ty)

        made = []
        for kind, ty in zip(lay.kinds, bound, strict=True):
            if kind[0] == "float":
                number = read(ir.DoubleType())
                made.append(context.cast(b, number, types.float64, real.dtype))
            elif kind[0] == "int":
                made.append(read())
            elif kind[0] == "bool":
                made.append(b.icmp_signed("!=", read(), I64(0)))
            else:
                array = cgutils.create_struct_proxy(ty)(context, b)
                array.address = read()
                for axes in ("shape", "strides"):
                    numbers = [read() for _ in range(ty.ndim)]
                    setattr(array, axes, context.make_tuple(b, ty.axes, numbers))
                array.outside = values[4]
                made.append(array._getvalue())
        out = [b.extract_value(values[2], n) if n >= 0 else made[-1 - n] for n in lay.order]
        return context.make_tuple(b, to, out)

    return to(tile, layout, args, params, outside), codegen


@intrinsic
def new_outside(typingctx: Any, tile: Any) -> Any:
    """Return a place that notes for each lane whether an index lay outside of its array."""
    to = types.CPointer(types.int32)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = cgutils.alloca_once(b, vector_type(I32, tile.real.width))
        return b.bitcast(place, I32.as_pointer())

    return to(tile), codegen


@intrinsic
def clear_outside(typingctx: Any, tile: Any, outside: Any) -> Any:
    """Note that no index lay outside."""
    ty = vector_type(I32, tile.real.width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(constant(ty, 0), b.bitcast(args[1], ty.as_pointer()))
        return context.get_dummy_value()

    return types.void(tile, outside), codegen


@intrinsic
def outside_bits(typingctx: Any, tile: Any, outside: Any) -> Any:
    """Return an int64 of which bit l is set if an index of lane l lay outside."""
    ty = vector_type(I32, tile.real.width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        noted = Vector(b, b.load(b.bitcast(args[1], ty.as_pointer())))
        bits = b.bitcast(noted.cmp("!=", 0).value, ir.IntType(noted.width))
        return b.zext(bits, I64)

    return types.int64(tile, outside), codegen


def _indices(array: BoundArrayType, index: Any) -> list[Any]:
    """Return the types of the indices into an array, or raise what is wrong with them."""
    given = list(index.types) if isinstance(index, types.BaseTuple) else [index]
    for ty in given:
        kind = ty.dtype if isinstance(ty, Lanes) else ty
        if not isinstance(kind, types.Integer):
            raise TypingError(
                f"an array is indexed by integers, one for each of its axes, not by {ty}"
            )
    if len(given) != array.ndim:
        raise TypingError(
            f"an array of {array.ndim} axes takes {array.ndim} indices, not {len(given)}"
        )
    return given


@typed(operator.getitem)
def _type_getitem(array: Any, index: Any) -> Any:
    if not isinstance(array, BoundArrayType):
        return None
    given = _indices(array, index)
    return array.element(max((ty.width for ty in given if isinstance(ty, Lanes)), default=1))


@lower_builtin(operator.getitem, BoundArrayType, types.Any)
def _gather(context: Any, b: Any, sig: Any, args: Any) -> Any:
    """Read an element for every lane; nothing outside of the array is ever read.

    A negative index counts from the end. Lanes whose index is outside read element 0, or 0 where
    there is none, and are noted.
    """
    ty, to = sig.args[0], sig.return_type
    array = cgutils.create_struct_proxy(ty)(context, b, args[0])
    several = isinstance(sig.args[1], types.BaseTuple)
    narrow = Lanes(types.int32, to.width, to.real)
    wide = narrow.of(types.int64)
    # An empty array has no element 0: every offset is 0, and the address that of a zero.
    empty = ir.Constant(ir.IntType(1), 0)
    for axis in range(ty.ndim):
        size = b.extract_value(array.shape, axis)
        empty = b.or_(empty, b.icmp_signed("==", size, I64(0)))
    offsets = outside = None
    for axis, kind in enumerate(_indices(ty, sig.args[1])):
        value = b.extract_value(args[1], axis) if several else args[1]
        size = b.extract_value(array.shape, axis)
        stride = b.select(empty, I64(0), b.extract_value(array.strides, axis))
        small = not ty.far and isinstance(kind, Lanes) and kind.dtype == types.int32
        if not ty.far:  # says so to LLVM, which has a cheap product for it
            stride = b.sext(b.trunc(stride, I32), I64)
        i = _operand(context, b, value, kind, narrow if small else wide)
        n = Vector(b, _broadcast(b, b.trunc(size, I32) if small else size, to.width))
        i = i.cmp("<", 0).where(i + n, i)
        beyond = Vector(b, b.icmp_unsigned(">=", i.value, n.value))
        i = beyond.where(0, i)
        if small:
            i = Vector(b, b.sext(i.value, wide.llvm))
        offset = i * Vector(b, _broadcast(b, stride, to.width))
        offsets = offset if offsets is None else offsets + offset
        outside = beyond if outside is None else outside | beyond
    assert offsets is not None
    assert outside is not None
    _note_outside(b, array.outside, outside, ty.real.width)
    base = b.select(empty, b.ptrtoint(_nothing(b), I64), array.address)
    stored = _STORAGE.get(ty.stored) or ir.IntType(getattr(types, ty.stored).bitwidth)
    x = ir.Constant(vector_type(stored, to.width), ir.Undefined)
    for lane in range(to.width):
        at = b.add(base, extract(b, offsets.value, lane))
        x = insert(b, x, _load_constant(b, at, stored), lane)
    if isinstance(to.dtype, types.Float):
        return _from_storage(b, x, ty.stored, to)
    if isinstance(to.dtype, types.Boolean):
        return Vector(b, x).cmp("!=", 0).value
    element = getattr(types, ty.stored)
    if element.bitwidth == to.dtype.bitwidth:
        return x
    return (b.sext if element.signed else b.zext)(x, to.llvm)


def _nothing(b: Any) -> Any:
    """Return the address of 8 bytes that are 0, whatever runs."""
    name = "nattn_nothing"
    if name not in b.module.globals:
        zero = ir.GlobalVariable(b.module, I64, name, addrspace=1 if on_gpu(b) else 0)
        zero.initializer, zero.global_constant, zero.linkage = I64(0), True, "internal"
    return b.module.globals[name]


def _note_outside(b: Any, place: Any, outside: Vector, width: int) -> None:
    """Add to the lanes that were outside."""
    ty = vector_type(I32, width)
    value = outside.value
    if outside.width != width:
        value = _broadcast(b, extract(b, value, 0), width)
    at = b.bitcast(place, ty.as_pointer())
    b.store(b.or_(b.load(at), b.sext(value, ty)), at)


@intrinsic(prefer_literal=True)
def uniform_index(typingctx: Any, tile: Any, dtype: Any, x: Any) -> Any:
    """Return an index that is the same for all lanes, as "int32" (it must be small) or "int64"."""
    to = Lanes(getattr(types, dtype.literal_value), 1, tile.real.dtype, INDEX_BOUND)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = context.cast(b, args[2], sig.args[2], types.int64)
        return _broadcast(b, b.trunc(value, I32) if to.dtype == types.int32 else value, 1)

    return to(tile, dtype, types.unliteral(x)), codegen


@intrinsic(prefer_literal=True)
def load_index(typingctx: Any, tile: Any, dtype: Any, address: Any, offset: Any) -> Any:
    """Return W int64 from a byte address, plus an offset, as "int32" or "int64" index lanes."""
    to = Lanes(getattr(types, dtype.literal_value), tile.real.width, tile.real.dtype, INDEX_BOUND)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        wide = Vector(b, _load(b, args[2], to.of(types.int64).llvm))
        value = (wide + Vector(b, _broadcast(b, args[3], to.width))).value
        return b.trunc(value, to.llvm) if to.dtype == types.int32 else value

    return to(tile, dtype, types.int64, types.int64), codegen


@intrinsic
def as_score(typingctx: Any, tile: Any, x: Any) -> Any:
    """Convert what a modifier returned to the tile's float lanes."""
    to = tile.real
    kind = x.dtype if isinstance(x, Lanes) else x
    if not isinstance(kind, types.Integer | types.Float) or isinstance(kind, types.Boolean):
        raise TypingError(f"expected a number to be returned, got {x}")

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _operand(context, b, args[1], sig.args[1], to).value

    return to(tile, x), codegen


@intrinsic
def as_condition(typingctx: Any, tile: Any, x: Any) -> Any:
    """Convert what a mask function returned to boolean lanes."""
    to = tile.real.of(types.boolean)
    kind = x.dtype if isinstance(x, Lanes) else x
    if not isinstance(kind, types.Boolean):
        raise TypingError(f"expected True or False to be returned, got {x}")

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _operand(context, b, args[1], sig.args[1], to).value

    return to(tile, x), codegen
