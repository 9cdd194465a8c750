"""Bound values that learn: where a function reads one, and the derivative by what it read.

A function may read an array in several places, each at indices of its own. A *site* is one such
reading, counted as the function runs. The function runs once for each site, on values that are dual
numbers: what that site reads has the derivative 1, everything else has none, and where it lies in
the array's gradient is noted. So a gradient costs one more run of the function for each site, no
matter how large the array is.

What sites share is a *tape* behind the error flags of bound arrays, in the same block of memory:

    count       how many sites the function has passed
    wanted      the number of the one that is looked for
    base        the address of the gradients
    places      for each lane, the address of the element's gradient
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, make_attribute_wrapper, models, register_model

from .dual import Dual, Tangent, pair
from .lanes.bound_arrays import BoundArrayType, index_width, indices_within, read_elements
from .lanes.conversions import broadcast
from .lanes.operators import typed
from .lanes.types import Lanes
from .lanes.user_functions import ARGUMENTS, Argument, Outside
from .vector import I32, I64, Vector, constant, extract, vector_type

COUNT, WANTED, BASE, PLACES = 0, 8, 16, 24
"""Where the fields of a tape lie."""


class LearntArrayType(types.Type):
    """The Numba type of a bound array of floats whose gradient is wanted.

    Parameters
    ----------
    plain : BoundArrayType
        The type of the same array without.
    """

    def __init__(self, plain: BoundArrayType) -> None:
        self.plain = plain
        super().__init__(name=f"Learnt({plain})")


@register_model(LearntArrayType)
class _LearntArrayModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: LearntArrayType) -> None:
        plain = fe_type.plain
        # the array; of its gradient the offset from the base, and byte strides
        members = [("plain", plain), ("offset", types.int64), ("strides", plain.axes)]
        members.append(("shape", plain.axes))
        super().__init__(dmm, fe_type, members)


make_attribute_wrapper(LearntArrayType, "shape", "shape")


@typed(len)
def _type_len(x: Any) -> Any:
    return types.int64 if isinstance(x, LearntArrayType) else None


@lower_builtin(len, LearntArrayType)
def _len(context: Any, b: Any, sig: Any, args: Any) -> Any:
    array = cgutils.create_struct_proxy(sig.args[0])(context, b, args[0])
    return b.extract_value(array.shape, 0)


# The tape


def _behind_flags(width: int) -> int:
    """Return where the tape begins, in bytes."""
    return -(-4 * width // 8) * 8


def _field(b: Any, error_flags: Any, width: int, field: int) -> Any:
    """Return the address of a field as a pointer to int64."""
    start = b.ptrtoint(error_flags, I64)
    return b.inttoptr(b.add(start, I64(_behind_flags(width) + field)), I64.as_pointer())


@intrinsic
def new_tape(typingctx: Any, tile: Any) -> Any:
    """Return what `new_outside` does, with a tape behind it."""
    to = types.CPointer(types.int32)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        width = tile.real.width
        size = _behind_flags(width) + PLACES + 8 * width
        flags = vector_type(I32, width)
        place = cgutils.alloca_once(b, ir.ArrayType(flags, -(-size // (4 * width))))
        return b.bitcast(place, I32.as_pointer())

    return to(tile), codegen


@intrinsic
def look_for_site(typingctx: Any, tile: Any, tape: Any, site: Any, base: Any) -> Any:
    """Begin a run of a function: which site is wanted, and the address of the gradients."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for field, x in ((COUNT, I64(0)), (WANTED, args[2]), (BASE, args[3])):
            b.store(x, _field(b, args[1], tile.real.width, field))
        return context.get_dummy_value()

    return types.void(tile, tape, types.int64, types.int64), codegen


@intrinsic
def sites_passed(typingctx: Any, tile: Any, tape: Any) -> Any:
    """Return how many sites the last run has passed."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(_field(b, args[1], tile.real.width, COUNT))

    return types.int64(tile, tape), codegen


@intrinsic
def places_of(typingctx: Any, tile: Any, tape: Any) -> Any:
    """Return the address of an int64 for each lane: the address of its element's gradient."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.ptrtoint(_field(b, args[1], tile.real.width, PLACES), I64)

    return types.int64(tile, tape), codegen


SCATTERED, ONE, RISING, FALLING = range(4)
"""How the places of a vector's lanes lie: anywhere, all in one, side by side, or from the back."""


@intrinsic
def pattern_of(typingctx: Any, tile: Any, tape: Any) -> Any:
    """Return how the places lie: `ONE`, `RISING`, `FALLING`, or `SCATTERED`."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        real = tile.real
        width, size = real.width, real.dtype.bitwidth // 8
        wide = vector_type(I64, width)
        at = b.bitcast(_field(b, args[1], width, PLACES), wide.as_pointer())
        places = Vector(b, b.load(at, align=8))
        first = Vector(b, broadcast(b, extract(b, places.value, 0), width))
        apart = (places - first).value
        found = I64(SCATTERED)
        for kind, step in ((FALLING, -size), (RISING, size), (ONE, 0)):
            ladder = ir.Constant(wide, [step * lane for lane in range(width)])
            differs = b.icmp_signed("!=", apart, ladder)
            none = b.icmp_signed("==", b.bitcast(differs, ir.IntType(width)), ir.IntType(width)(0))
            found = b.select(none, I64(kind), found)
        return found

    return types.int64(tile, tape), codegen


@intrinsic
def reverse(typingctx: Any, tile: Any, x: Any) -> Any:
    """Return lanes in the order from the last to the first."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        width = tile.real.width
        order = ir.Constant(ir.VectorType(I32, width), list(reversed(range(width))))
        return b.shuffle_vector(args[1], args[1], order)

    return x(tile, x), codegen


# Reading


def _pass_site(b: Any, error_flags: Any, real: Lanes, place: Any) -> Any:
    """Count a site; if it is the one looked for, note where it reads. Return whether it is.

    ``place()`` emits the address of the gradient of what it reads, in lanes or as one for all,
    relative to the base.
    """
    count = _field(b, error_flags, real.width, COUNT)
    passed = b.load(count)
    b.store(b.add(passed, I64(1)), count)
    hit = b.icmp_signed("==", passed, b.load(_field(b, error_flags, real.width, WANTED)))
    with b.if_then(hit):
        base = b.load(_field(b, error_flags, real.width, BASE))
        offsets = place()
        if not isinstance(offsets.type, ir.VectorType):
            offsets = broadcast(b, offsets, real.width)
        places = b.add(offsets, broadcast(b, base, real.width))
        to = _field(b, error_flags, real.width, PLACES)
        b.store(places, b.bitcast(to, places.type.as_pointer()), align=8)
    return hit


def _seeded(b: Any, value: Any, hit: Any) -> Any:
    """Return a dual number with the derivative 1 if `hit`, else 0."""
    x = Vector(b, value)
    one, nothing = constant(x.type, 1.0), constant(x.type, 0.0)
    return pair(x, Tangent(Vector(b, b.select(hit, one, nothing))))


@typed(operator.getitem)
def _type_getitem(array: Any, index: Any) -> Any:
    if not isinstance(array, LearntArrayType):
        return None
    element = array.plain.element(index_width(array.plain, index))
    return Dual(element)


@lower_builtin(operator.getitem, LearntArrayType, types.Any)
def _gather(context: Any, b: Any, sig: Any, args: Any) -> Any:
    """Read as from any bound array, and pass a site."""
    ty, to = sig.args[0], sig.return_type.lanes
    array = cgutils.create_struct_proxy(ty)(context, b, args[0])
    kinds, values = (ty.plain, sig.args[1]), (array.plain, args[1])
    indices = indices_within(context, b, kinds, values, to.width)
    value = read_elements(context, b, ty.plain, array.plain, indices, to)
    plain = cgutils.create_struct_proxy(ty.plain)(context, b, array.plain)

    def place() -> Any:
        offsets = Vector(b, broadcast(b, array.offset, to.width))
        for axis, i in enumerate(indices):
            stride = broadcast(b, b.extract_value(array.strides, axis), to.width)
            offsets = offsets + i * Vector(b, stride)
        return offsets.value

    hit = _pass_site(b, plain.error_flags, ty.plain.real, place)
    return _seeded(b, value, hit)


# What functions are called with


class _LearntArray(Argument):
    """``("learnt array", dtype name, ndim, far)``: the words of an array; offset and strides."""

    def type_of(self, kind: tuple[Any, ...], real: Lanes) -> Any:
        stored, ndim, far = kind[1:]
        return LearntArrayType(BoundArrayType(stored, ndim, far, real))

    def words(self, kind: tuple[Any, ...]) -> int:
        return 2 + 3 * int(kind[2])

    def make(self, context: Any, b: Any, ty: Any, read: Any, outside: Outside) -> Any:
        plain = ARGUMENTS["array"].make(context, b, ty.plain, read, outside)
        array = cgutils.create_struct_proxy(ty)(context, b)
        array.plain = plain
        array.shape = cgutils.create_struct_proxy(ty.plain)(context, b, plain).shape
        array.offset = read()
        numbers = [read() for _ in range(ty.plain.ndim)]
        array.strides = context.make_tuple(b, ty.plain.axes, numbers)
        return array._getvalue()


class _LearntFloat(Argument):
    """``("learnt float",)``: the number, and the offset of its gradient."""

    def type_of(self, kind: tuple[Any, ...], real: Lanes) -> Any:
        return Dual(Lanes(real.dtype, 1))

    def words(self, kind: tuple[Any, ...]) -> int:
        return 2

    def make(self, context: Any, b: Any, ty: Any, read: Any, outside: Outside) -> Any:
        number = context.cast(b, read(ir.DoubleType()), types.float64, ty.lanes.dtype)
        offset = read()
        hit = _pass_site(b, outside.value, outside.real, lambda: offset)
        return _seeded(b, number, hit)


ARGUMENTS["learnt array"] = _LearntArray()
ARGUMENTS["learnt float"] = _LearntFloat()
