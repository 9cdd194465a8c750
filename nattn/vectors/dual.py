"""Dual numbers over lanes: the derivative of a user's function, from the function itself.

A `Dual` is a value and its tangent, the derivative of the value with respect to the score (forward
mode: A. Griewank and A. Walther, "Evaluating Derivatives", 2nd edition, SIAM 2008, chapter 3). The
user's function runs on it unchanged: every operation that `lanes` knows works on dual numbers too,
mixed with lanes and scalars in any place. The value has the same bits, for the same code computes
it; what is added is a rule for the tangent, one for each function, in the table `RULES`.

Where a derivative does not exist, or floating point cannot tell it:

- Lanes and scalars have no tangent at all. Comparisons look at values and give plain lanes, and so
  do floor, ceil, sign and //, whose derivative is 0 wherever there is one.
- ``np.where`` selects tangents: that of the branch not taken is nowhere in the result, NaN or not.
- abs has the derivative 0 at 0. Maximum and minimum follow the first argument at a tie, and clip
  follows its argument at a bound.
- 0 times anything is 0: where one factor of the chain rule is exactly 0, the other may have
  overflowed, or be the infinite slope of a square root at 0. And a product that overflows is the
  largest number, which a later division can still make small. So a sigmoid written with exp has
  the derivative 0 far from 0, and a gate that is shut lets no NaN out.
- The derivative of ``x ** y`` with respect to y is 0 where x is 0.
- A score of -inf hides its key: its derivative is 0.

In a kernel ``r = f(seed(score), ...)`` runs a function, `value` and `tangent` take r apart,
whatever it is, and `chain` multiplies by the derivative.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer, infer_global
from numba.extending import intrinsic, lower_builtin, lower_cast, models, register_model

from . import elementary
from .lanes.conversions import as_lanes
from .lanes.operators import BINARY, COMPARISON, TERNARY, UNARY
from .lanes.types import Lanes, common
from .vector import Vector, constant


class Dual(types.Type):
    """The Numba type of float lanes together with their derivatives.

    Parameters
    ----------
    lanes : Lanes
        The type of the value and of the tangent.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        super().__init__(name=f"Dual({lanes})")

    @property
    def key(self) -> Any:
        """What makes two types one."""
        return self.lanes

    def unify(self, typingctx: Any, other: Any) -> Dual | None:
        """Return the type of a variable that is assigned both."""
        to = common((self.lanes, _plain(other)))
        return None if to is None else Dual(to)


@register_model(Dual)
class _DualModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: Dual) -> None:
        super().__init__(dmm, fe_type, [("value", fe_type.lanes), ("tangent", fe_type.lanes)])


# ---------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------


class Tangent:
    """A derivative under construction: operators emit instructions.

    Parameters
    ----------
    vector : Vector or None
        None is the tangent of a constant: terms with it vanish.
    """

    def __init__(self, vector: Vector | None) -> None:
        self.vector = vector

    def __bool__(self) -> bool:
        return self.vector is not None

    def __neg__(self) -> Tangent:
        return self if self.vector is None else Tangent(-self.vector)

    def __add__(self, o: Tangent) -> Tangent:
        if self.vector is None or o.vector is None:
            return self if o.vector is None else o
        return Tangent(self.vector + o.vector)

    def __sub__(self, o: Tangent) -> Tangent:
        return self + -o

    def __mul__(self, factor: Vector) -> Tangent:
        """Multiply by a partial derivative; 0 times anything is 0, and nothing overflows."""
        if self.vector is None:
            return self
        nothing = self.vector.cmp("==", 0.0) | factor.cmp("==", 0.0)
        product = elementary.clamp(self.vector * factor, -_largest(factor), _largest(factor))
        return Tangent(nothing.where(0.0, product))

    def __truediv__(self, divisor: Vector) -> Tangent:
        """Multiply by 1 / divisor: 0 divided by anything is 0, and so is what infinity divides."""
        if self.vector is None:
            return self
        nothing = self.vector.cmp("==", 0.0) | divisor.abs().cmp("==", math.inf)
        return Tangent(nothing.where(0.0, self.vector / divisor))


NONE = Tangent(None)


def _largest(x: Vector) -> float:
    return float(np.finfo(np.float32 if isinstance(x.element, ir.FloatType) else np.float64).max)


def _choose(condition: Vector, dx: Tangent, dy: Tangent) -> Tangent:
    """Select between two tangents."""
    if not dx and not dy:
        return NONE
    return Tangent(condition.where(dx.vector or 0.0, dy.vector or 0.0))


def _abs(z: Vector, x: Vector, dx: Tangent) -> Tangent:
    return _choose(x.cmp("==", 0.0), NONE, _choose(x.cmp("<", 0.0), -dx, dx))


def _tanh(z: Vector, x: Vector, dx: Tangent) -> Tangent:
    return dx * ((z + 1.0) * (z.const(1.0) - z))


def _remainder(z: Vector, x: Vector, dx: Tangent, y: Vector, dy: Tangent) -> Tangent:
    return dx - dy * elementary.floor_divide(x, y) if dy else dx


def _power(z: Vector, x: Vector, dx: Tangent, y: Vector, dy: Tangent) -> Tangent:
    if dx:  # the factor y makes it 0 where y is 0, at x = 0 too
        dx = dx * y * _one_less(x, y)
    if dy:
        dy = dy * x.cmp("==", 0.0).where(0.0, z * elementary.log(x))
    return dx + dy


def _one_less(x: Vector, y: Vector) -> Vector:
    """x**(y - 1); for literal squares, cubes and fourth powers as a product."""
    literal = y.literal()
    if literal not in (1, 2, 3, 4):
        return elementary.power(x, y - 1.0)
    z = x.const(1.0)
    for _ in range(int(literal) - 1):
        z = z * x
    return z


def _minimum(z: Vector, x: Vector, dx: Tangent, y: Vector, dy: Tangent) -> Tangent:
    return _choose(x.cmp("<=", y) | x.isnan(), dx, dy)


def _maximum(z: Vector, x: Vector, dx: Tangent, y: Vector, dy: Tangent) -> Tangent:
    return _choose(x.cmp(">=", y) | x.isnan(), dx, dy)


def _clip(
    z: Vector, x: Vector, dx: Tangent, low: Vector, dlow: Tangent, high: Vector, dhigh: Tangent
) -> Tangent:
    raised = elementary.maximum(x, low)
    return _minimum(z, raised, _maximum(z, x, dx, low, dlow), high, dhigh)


Rule = Callable[..., Tangent]

RULES: dict[str, Rule | None] = {
    # z = f(x): from z, x and the tangent of x that of z
    "neg": lambda z, x, dx: -dx,
    "pos": lambda z, x, dx: dx,
    "abs": _abs,
    "square": lambda z, x, dx: dx * (x + x),
    "sqrt": lambda z, x, dx: dx / (z + z),
    "exp": lambda z, x, dx: dx * z,
    "exp2": lambda z, x, dx: dx * (z * math.log(2)),
    "expm1": lambda z, x, dx: dx * (z + 1.0),
    "log": lambda z, x, dx: dx / x,
    "log1p": lambda z, x, dx: dx / (x + 1.0),
    "tanh": _tanh,
    "sin": lambda z, x, dx: dx * elementary.cos(x),
    "cos": lambda z, x, dx: -(dx * elementary.sin(x)),
    "sign": None,
    **dict.fromkeys(("floor", "ceil", "trunc", "rint")),
    # z = f(x, y)
    "add": lambda z, x, dx, y, dy: dx + dy,
    "sub": lambda z, x, dx, y, dy: dx - dy,
    "mul": lambda z, x, dx, y, dy: dx * y + dy * x,
    "truediv": lambda z, x, dx, y, dy: (dx - dy * z) / y,
    "floordiv": None,
    "mod": _remainder,
    "pow": _power,
    "minimum": _minimum,
    "maximum": _maximum,
    "min": lambda z, x, dx, y, dy: _choose(y.cmp("<", x), dy, dx),
    "max": lambda z, x, dx, y, dy: _choose(y.cmp(">", x), dy, dx),
    # z = f(x, y, w); the condition has become 0 or 1
    "where": lambda z, x, dx, y, dy, w, dw: _choose(x.cmp("!=", 0.0), dy, dw),
    "clip": _clip,
}
"""How each function of floats that gives floats is differentiated, by its name.

None says that the derivative is 0: the result is plain lanes.
"""

_TWINS = {"absolute": "abs", "fabs": "abs", "power": "pow"}


def rule_name(function: Any) -> str:
    """Return the name under which `RULES` holds a function."""
    name: str = function.__name__.strip("_")
    return _TWINS.get(name, name)


# ---------------------------------------------------------------------------------------------
# Numba
# ---------------------------------------------------------------------------------------------


def _plain(ty: Any) -> Any:
    """Return the type of the value."""
    return ty.lanes if isinstance(ty, Dual) else ty


def _value(b: Any, x: Any, ty: Any) -> Any:
    return b.extract_value(x, 0) if isinstance(ty, Dual) else x


def _tangent(context: Any, b: Any, x: Any, ty: Any, to: Lanes) -> Tangent:
    if not isinstance(ty, Dual):
        return NONE
    return Tangent(as_lanes(context, b, b.extract_value(x, 1), ty.lanes, to))


def pair(value: Vector, tangent: Tangent) -> Any:
    """Return a dual number of a value and its tangent."""
    b, t = value.b, value.type
    second = (tangent.vector or value.const(0.0)).value
    nothing = ir.Constant(ir.LiteralStructType([t, t]), ir.Undefined)
    return b.insert_value(b.insert_value(nothing, value.value, 0), second, 1)


def _on_values(context: Any, function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the function as Numba knows it, and its signature for the values."""
    known = context.resolve_value_type(function)
    return known, known.get_call_type(context, tuple(map(_plain, args)), {})


def _teach(function: Any, typer: Callable[..., Any]) -> None:
    """Teach Numba the type of a function's result; `typer` gets the typing context too."""

    def generic(self: Any, args: Any, kws: Any) -> Any:
        result = None if kws else typer(self.context, *args)
        return None if result is None else signature(result, *args)

    members = {"key": function, "generic": generic, "prefer_literal": True}
    template = type(f"Dual_{function.__name__}", (AbstractTemplate,), members)
    infer(template)
    infer_global(function, types.Function(template))


def _define(function: Any, arity: int, rule: Rule | None) -> None:
    """Teach Numba a function of dual numbers: what it does with values, and the rule."""

    def typer(context: Any, *args: Any) -> Any:
        if len(args) != arity or not any(isinstance(a, Dual) for a in args):
            return None
        result = _on_values(context, function, args)[1].return_type
        return result if rule is None else Dual(result)

    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        known, values = _on_values(context.typing_context, function, sig.args)
        plain = [
            context.cast(b, _value(b, a, t), _plain(t), to)
            for a, t, to in zip(args, sig.args, values.args, strict=True)
        ]
        z = context.get_function(known, values)(b, plain)
        if rule is None:
            return z
        to = sig.return_type.lanes
        operands: list[Any] = []
        for a, t in zip(args, sig.args, strict=True):
            x = as_lanes(context, b, _value(b, a, t), _plain(t), to)
            literal = isinstance(t, types.IntegerLiteral)
            operands += [x.const(t.literal_value) if literal else x, _tangent(context, b, a, t, to)]
        z = Vector(b, z)
        return pair(z, rule(z, *operands))

    _teach(function, typer)
    kinds = (Dual, Lanes, types.Number, types.Boolean)
    for classes in itertools.product(kinds, repeat=arity):
        if Dual in classes:
            lower_builtin(function, *classes)(lower)


def functions() -> Iterator[tuple[Any, int, bool]]:
    """Yield what lanes can do with floats: function, number of arguments, whether it gives floats.

    Those that give floats need a rule.
    """
    some = Lanes(types.float32, 8)
    tables = (UNARY, 1), (BINARY, 2), (COMPARISON, 2), (TERNARY, 3)
    for table, arity in tables:
        for function, operation in table.items():
            found = operation.types((some,) * arity)
            if found is not None:
                yield function, arity, isinstance(found[1].dtype, types.Float)
    yield np.where, 3, True


for _function, _arity, _real in functions():
    _name = rule_name(_function)
    if _real and _name not in RULES:
        continue  # a test says so
    _rule = RULES[_name] if _real else None
    _define(_function, _arity, _rule)
    _inplace = getattr(operator, f"i{_name}", None) if _arity == 2 else None
    if _inplace is not None:
        _define(_inplace, _arity, _rule)


def _define_conversion(number: Any) -> None:
    """Teach Numba ``np.float32(dual)``: it is of the kernel's own float type, as every float."""

    def generic(self: Any, args: Any, kws: Any) -> Any:
        return signature(args[0], *args) if len(args) == 1 and isinstance(args[0], Dual) else None

    members = {"key": types.NumberClass(number), "generic": generic}
    infer(type(f"Dual_{number}", (AbstractTemplate,), members))


@lower_builtin(types.NumberClass, Dual)
def _convert(context: Any, b: Any, sig: Any, args: Any) -> Any:
    return args[0]


_define_conversion(types.float32)
_define_conversion(types.float64)


def _refuse_condition(context: Any, *args: Any) -> None:
    if len(args) == 1 and isinstance(args[0], Dual):
        raise TypingError(
            "the lanes of a vector differ: no `if`, `while`, `and`, `or`, `not` or conditional "
            "expression can test a score; use np.where(condition, x, y), and & | ~ between "
            "conditions"
        )


def _refuse_index(context: Any, *args: Any) -> None:
    if len(args) != 2:
        return
    indices = args[1] if isinstance(args[1], types.BaseTuple) else args[1:]
    if any(isinstance(index, Dual) for index in indices):
        raise TypingError("an index cannot depend on the score: it must be an integer")


_teach(bool, _refuse_condition)
_teach(operator.not_, _refuse_condition)
_teach(operator.getitem, _refuse_index)


@lower_cast(Dual, Dual)
@lower_cast(Lanes, Dual)
@lower_cast(types.Number, Dual)
@lower_cast(types.Boolean, Dual)
def _cast_to_dual(context: Any, b: Any, fromty: Any, toty: Any, value: Any) -> Any:
    """Give a variable that is assigned more than once its one type."""
    to = toty.lanes
    plain = as_lanes(context, b, _value(b, value, fromty), _plain(fromty), to)
    return pair(plain, _tangent(context, b, value, fromty, to))


# ---------------------------------------------------------------------------------------------
# In kernels
# ---------------------------------------------------------------------------------------------


@intrinsic
def dual(typingctx: Any, value: Any, tangent: Any) -> Any:
    """Return the dual number of float lanes and their derivative; that may be a scalar."""
    if not isinstance(value, Lanes) or not isinstance(value.dtype, types.Float):
        return None

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        slope = as_lanes(context, b, args[1], sig.args[1], value)
        return pair(Vector(b, args[0]), Tangent(slope))

    return Dual(value)(value, tangent), codegen


@intrinsic
def seed(typingctx: Any, score: Any) -> Any:
    """Return float lanes as the variable by which is differentiated: their derivative is 1."""
    if not isinstance(score, Lanes) or not isinstance(score.dtype, types.Float):
        return None

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x = Vector(b, args[0])
        return pair(x, Tangent(x.const(1.0)))

    return Dual(score)(score), codegen


@intrinsic
def as_dual(typingctx: Any, tile: Any, x: Any) -> Any:
    """Convert what a modifier returned to a dual number of a tile's float lanes."""
    to = tile.real
    kind = _plain(x).dtype if isinstance(x, Dual | Lanes) else x
    if not isinstance(kind, types.Integer | types.Float):
        raise TypingError(f"expected a number to be returned, got {x}")

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _cast_to_dual(context, b, x, Dual(to), args[1])

    return Dual(to)(tile, x), codegen


@intrinsic
def value(typingctx: Any, tile: Any, x: Any) -> Any:
    """Return the value of a dual number, lanes or a scalar as float lanes of a tile."""
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return as_lanes(context, b, _value(b, args[1], x), _plain(x), to).value

    return to(tile, x), codegen


def _slope(context: Any, b: Any, x: Any, ty: Any, to: Lanes) -> Vector:
    """Return the derivative of what a function returned; 0 where that hides a key."""
    slope = _tangent(context, b, x, ty, to).vector
    if slope is None:
        return Vector(b, constant(to.llvm, 0.0))
    plain = as_lanes(context, b, _value(b, x, ty), _plain(ty), to)
    return plain.cmp("==", -math.inf).where(0.0, slope)


@intrinsic
def tangent(typingctx: Any, tile: Any, x: Any) -> Any:
    """Return the derivative of a dual number as float lanes of a tile; 0 where its value is -inf.

    That of lanes and scalars, which do not depend on the score, is 0.
    """
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _slope(context, b, args[1], x, to).value

    return to(tile, x), codegen


@intrinsic
def chain(typingctx: Any, tile: Any, deriv: Any, x: Any) -> Any:
    """Return ``deriv * tangent(tile, x)``; where one factor is 0 that is 0, whatever the other."""
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        product = Tangent(Vector(b, args[1])) * _slope(context, b, args[2], x, to)
        assert product.vector is not None
        return product.vector.value

    return to(tile, to, x), codegen
