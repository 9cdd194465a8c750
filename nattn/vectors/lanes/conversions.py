"""Conversions: a scalar or lanes as lanes of another type."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import CallableTemplate, infer
from numba.extending import lower_builtin, lower_cast

from ..vector import I32, Vector, extract
from .types import Lanes


def as_lanes(context: Any, b: Any, value: Any, ty: Any, to: Lanes) -> Vector:
    """Convert a scalar or lanes to lanes of type `to`."""
    if not isinstance(ty, Lanes):
        return Vector(b, broadcast(b, context.cast(b, value, ty, to.dtype), to.width))
    if ty.width != to.width:  # a scalar in all lanes
        one = Lanes(to.dtype, 1, to.real)
        value = as_lanes(context, b, value, ty, one).value
        return Vector(b, broadcast(b, extract(b, value, 0), to.width))
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
    return as_lanes(context, b, value, fromty, toty).value


def broadcast(b: Any, x: Any, width: int) -> Any:
    """Return one value in every lane."""
    if width == 1:
        return x
    undefined = ir.Constant(ir.VectorType(x.type, width), ir.Undefined)
    first = b.insert_element(undefined, x, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, width), [0] * width))


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
    return as_lanes(context, b, args[0], sig.args[0], to).value


_define_conversion(types.float32)
_define_conversion(types.float64)


def one_lane(ty: Any, like: Lanes) -> Lanes:
    """Return the type of a scalar as lanes of width 1."""
    if isinstance(ty, types.Boolean):
        return Lanes(types.boolean, 1, like.real)
    return Lanes(types.int64, 1, like.real)
