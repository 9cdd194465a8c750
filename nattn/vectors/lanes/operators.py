"""Operators and NumPy's functions on lanes: their types, and the code that each one becomes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.core.typing.templates import CallableTemplate, infer, infer_global
from numba.extending import intrinsic, lower_builtin

from .. import elementary
from ..vector import I32, I64, Vector, extract
from .conversions import as_lanes, broadcast, one_lane
from .types import INT32, Lanes, bound_of, common

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
        bound = self.limit(*map(bound_of, args))
        fits = bound < INT32 + self.selects
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
            as_lanes(context, b, a, t, found[0]) for a, t in zip(args, sig.args, strict=True)
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
    to = common(args)
    return to.of(types.int32, 1) if to is not None and to.dtype == types.boolean else to


def _integers(*args: Any) -> Lanes | None:
    """Meet as 64-bit integers."""
    to = common(args)
    return None if to is None or isinstance(to.dtype, types.Float) else to.of(types.int64)


def _real(*args: Any) -> Lanes | None:
    """Meet as floats."""
    to = common(args)
    return None if to is None else to.of(to.real)


def _bits(*args: Any) -> Lanes | None:
    """Meet for a bitwise operation: booleans or integers."""
    to = common(args)
    return None if to is None or isinstance(to.dtype, types.Float) else to


def _number(*args: Any) -> Lanes | None:
    """Meet as floats if there is one, and else as 64-bit integers."""
    to = common(args)
    return to if to is None or isinstance(to.dtype, types.Float) else to.of(types.int64)


def _any(*args: Any) -> Lanes | None:
    """Meet as whatever it is: booleans, integers or floats."""
    return common(args)


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
            and bound_of(x) < INT32 - 1
            and (x.width > 1 or not isinstance(y, Lanes))
            and isinstance(one, types.Integer)
            and one.bitwidth == 64
            and bound_of(y) > INT32
        ):
            break
    else:
        return None
    value = args[1 - n]
    if isinstance(y, Lanes):
        value = extract(b, value, 0)
    elif not one.signed:
        value = b.select(b.icmp_signed("<", value, I64(0)), I64(INT32 - 1), value)
    value = b.select(b.icmp_signed(">", value, I64(INT32 - 1)), I64(INT32 - 1), value)
    value = b.select(b.icmp_signed("<", value, I64(-INT32)), I64(-INT32), value)
    spread = Vector(b, broadcast(b, b.trunc(value, I32), x.width))
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
    x = as_lanes(context, b, args[0], base, sig.return_type)
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
    return common((plain, *branches)) if branches else common((plain, types.boolean))


def _lower_where(context: Any, b: Any, sig: Any, args: Any) -> Any:
    to, ty = sig.return_type, sig.args[0]
    if isinstance(ty, Lanes):
        found = _is_true(Vector(b, args[0]))
        truth = ty.of(types.boolean)
    else:
        found = _is_true(as_lanes(context, b, args[0], ty, one_lane(ty, to)))
        truth = Lanes(types.boolean, 1, to.real)
    choice = as_lanes(context, b, found.value, truth, to.of(types.boolean))
    x, y = (as_lanes(context, b, args[i], sig.args[i], to) for i in (1, 2))
    return choice.where(x, y).value


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
        v = [as_lanes(context, b, a, t, to) for a, t in zip(args, sig.args, strict=True)]
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
