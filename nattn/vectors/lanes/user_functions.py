"""Calling users' functions on lanes: what they are called with, and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl

from ..vector import I32, I64, Vector
from .bound_arrays import BoundArrayType
from .conversions import as_lanes, broadcast
from .memory import emit_load, emit_load_constant
from .types import Lanes

INDEX_BOUND = 1 << 28
"""Magnitude up to which indices are int32 lanes: sums and differences of several still fit."""


class Argument:
    """A way in which a value that a function is bound to reaches it."""

    def type_of(self, kind: tuple[Any, ...], real: Lanes) -> Any:
        """Return the Numba type of the value, for a kernel's float lanes."""
        raise NotImplementedError

    def words(self, kind: tuple[Any, ...]) -> int:
        """Return of how many 8-byte words it is made."""
        return 1

    def make(self, context: Any, b: Any, ty: Any, read: Any, outside: Outside) -> Any:
        """Emit the value: ``read()`` returns its next word as an int64, ``read(T)`` as a T."""
        raise NotImplementedError


class Outside(NamedTuple):
    """Where functions say what was out of range: a `new_outside`, and the float lanes it is for."""

    value: Any
    real: Lanes


class _Number(Argument):
    def __init__(self, ty: Any) -> None:
        self._type = ty

    def type_of(self, kind: tuple[Any, ...], real: Lanes) -> Any:
        return self._type

    def make(self, context: Any, b: Any, ty: Any, read: Any, outside: Outside) -> Any:
        return read() if ty == types.int64 else b.icmp_signed("!=", read(), I64(0))


class _Float(Argument):
    def type_of(self, kind: tuple[Any, ...], real: Lanes) -> Any:
        return real.dtype

    def make(self, context: Any, b: Any, ty: Any, read: Any, outside: Outside) -> Any:
        return context.cast(b, read(ir.DoubleType()), types.float64, ty)


class _Array(Argument):
    def type_of(self, kind: tuple[Any, ...], real: Lanes) -> Any:
        stored, ndim, far = kind[1:]
        return BoundArrayType(stored, ndim, far, real)

    def words(self, kind: tuple[Any, ...]) -> int:
        return 1 + 2 * int(kind[2])

    def make(self, context: Any, b: Any, ty: Any, read: Any, outside: Outside) -> Any:
        array = cgutils.create_struct_proxy(ty)(context, b)
        array.address = read()
        for axes in ("shape", "strides"):
            numbers = [read() for _ in range(ty.ndim)]
            setattr(array, axes, context.make_tuple(b, ty.axes, numbers))
        array.error_flags = outside.value
        return array._getvalue()


ARGUMENTS: dict[str, Argument] = {
    "int": _Number(types.int64),
    "bool": _Number(types.boolean),
    "float": _Float(),
    "array": _Array(),
}
"""What a function can be bound to, by the first of a kind (`Layout`)."""


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
        return sum(ARGUMENTS[kind[0]].words(kind) for kind in self.kinds)


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


@intrinsic
def call_arguments(
    typingctx: Any, tile: Any, layout: Any, args: Any, params: Any, error_flags: Any
) -> Any:
    """Return the arguments of a function as a tuple, in the order of its parameters.

    `args` is the tuple of what it is called with, `params` the address of the words of what it is
    bound to, `error_flags` a `new_outside`.
    """
    lay, real = layout.layout, tile.real

    bound = [ARGUMENTS[kind[0]].type_of(kind, real) for kind in lay.kinds]
    to = types.Tuple([args.types[n] if n >= 0 else bound[-1 - n] for n in lay.order])

    def codegen(context: Any, b: Any, sig: Any, values: Any) -> Any:
        word = lay.first

        def read(ty: Any = I64) -> Any:
            nonlocal word
            word += 1
            return emit_load_constant(b, b.add(values[3], I64(8 * (word - 1))), ty)

        outside = Outside(values[4], real)
        made = [
            ARGUMENTS[kind[0]].make(context, b, ty, read, outside)
            for kind, ty in zip(lay.kinds, bound, strict=True)
        ]
        out = [b.extract_value(values[2], n) if n >= 0 else made[-1 - n] for n in lay.order]
        return context.make_tuple(b, to, out)

    return to(tile, layout, args, params, error_flags), codegen


@intrinsic
def call_tile_function(
    typingctx: Any, function: Any, scores: Any, deriv: Any, ctx: Any, params: Any
) -> Any:
    """Call the tile function at an address: int64 (scores, deriv, ctx, params), all addresses."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fn = b.inttoptr(args[0], ir.FunctionType(I64, [I64] * 4).as_pointer())
        return b.call(fn, args[1:])

    return types.int64(*[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def uniform_index(typingctx: Any, tile: Any, dtype: Any, x: Any) -> Any:
    """Return an index that is the same for all lanes, as "int32" (it must be small) or "int64"."""
    to = Lanes(getattr(types, dtype.literal_value), 1, tile.real.dtype, INDEX_BOUND)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = context.cast(b, args[2], sig.args[2], types.int64)
        return broadcast(b, b.trunc(value, I32) if to.dtype == types.int32 else value, 1)

    return to(tile, dtype, types.unliteral(x)), codegen


@intrinsic(prefer_literal=True)
def load_index(typingctx: Any, tile: Any, dtype: Any, address: Any, offset: Any) -> Any:
    """Return W int64 from a byte address, plus an offset, as "int32" or "int64" index lanes."""
    to = Lanes(getattr(types, dtype.literal_value), tile.real.width, tile.real.dtype, INDEX_BOUND)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        wide = Vector(b, emit_load(b, args[2], to.of(types.int64).llvm))
        value = (wide + Vector(b, broadcast(b, args[3], to.width))).value
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
        return as_lanes(context, b, args[1], sig.args[1], to).value

    return to(tile, x), codegen


@intrinsic
def as_condition(typingctx: Any, tile: Any, x: Any) -> Any:
    """Convert what a mask function returned to boolean lanes."""
    to = tile.real.of(types.boolean)
    kind = x.dtype if isinstance(x, Lanes) else x
    if not isinstance(kind, types.Boolean):
        raise TypingError(f"expected True or False to be returned, got {x}")

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return as_lanes(context, b, args[1], sig.args[1], to).value

    return to(tile, x), codegen
