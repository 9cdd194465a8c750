"""Arrays that users' functions are bound to: every lane reads where its own indices say.

Nothing outside of an array is ever read. An index that lies there sets the error flag of its lane.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import (
    intrinsic,
    lower_builtin,
    make_attribute_wrapper,
    models,
    register_model,
)

from ..storage import STORED
from ..vector import I32, I64, Vector, constant, extract, insert, on_gpu, vector_type
from .conversions import as_lanes, broadcast
from .memory import emit_load_constant
from .operators import typed
from .strided import from_storage
from .types import Lanes


class BoundArrayType(types.Type):
    """The Numba type of an array that a function is bound to.

    Its elements are read by lanes of indices. What lies outside is not read: it sets error flags.
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
            ("error_flags", types.CPointer(types.int32)),
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


@intrinsic
def new_outside(typingctx: Any, tile: Any) -> Any:
    """Return a place for the error flag of each lane: whether an index lay outside of its array."""
    to = types.CPointer(types.int32)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = cgutils.alloca_once(b, vector_type(I32, tile.real.width))
        return b.bitcast(place, I32.as_pointer())

    return to(tile), codegen


@intrinsic
def clear_outside(typingctx: Any, tile: Any, error_flags: Any) -> Any:
    """Clear the error flags of all lanes."""
    ty = vector_type(I32, tile.real.width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(constant(ty, 0), b.bitcast(args[1], ty.as_pointer()))
        return context.get_dummy_value()

    return types.void(tile, error_flags), codegen


@intrinsic
def outside_bits(typingctx: Any, tile: Any, error_flags: Any) -> Any:
    """Return the error flags as an int64: bit l is set if an index of lane l lay outside."""
    ty = vector_type(I32, tile.real.width)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        flags = Vector(b, b.load(b.bitcast(args[1], ty.as_pointer())))
        bits = b.bitcast(flags.cmp("!=", 0).value, ir.IntType(flags.width))
        return b.zext(bits, I64)

    return types.int64(tile, error_flags), codegen


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


def index_width(array: BoundArrayType, index: Any) -> int:
    """Return how many lanes an index has, or raise what is wrong with it."""
    given = _indices(array, index)
    return max((ty.width for ty in given if isinstance(ty, Lanes)), default=1)


@typed(operator.getitem)
def _type_getitem(array: Any, index: Any) -> Any:
    if not isinstance(array, BoundArrayType):
        return None
    return array.element(index_width(array, index))


@lower_builtin(operator.getitem, BoundArrayType, types.Any)
def _gather(context: Any, b: Any, sig: Any, args: Any) -> Any:
    """Read an element for every lane; nothing outside of the array is ever read.

    A negative index counts from the end. Lanes whose index is outside read element 0, or 0 where
    there is none, and their error flags are set.
    """
    to = sig.return_type
    indices = indices_within(context, b, sig.args, args, to.width)
    return read_elements(context, b, sig.args[0], args[0], indices, to)


def indices_within(context: Any, b: Any, kinds: Any, values: Any, width: int) -> list[Vector]:
    """Return int64 indices that lie within an array, one for each of its axes.

    Parameters
    ----------
    context, b
        Those of the lowering.
    kinds, values : tuple
        Types and values of the array and of the index.
    width : int
        Lanes of the index.

    Returns
    -------
    list of Vector
        Negative ones count from the end; 0 in lanes whose index is outside, of which the error
        flags are set.
    """
    ty = kinds[0]
    array = cgutils.create_struct_proxy(ty)(context, b, values[0])
    several = isinstance(kinds[1], types.BaseTuple)
    narrow = Lanes(types.int32, width, ty.real.dtype)
    wide = narrow.of(types.int64)
    found: list[Vector] = []
    outside = None
    for axis, kind in enumerate(_indices(ty, kinds[1])):
        value = b.extract_value(values[1], axis) if several else values[1]
        size = b.extract_value(array.shape, axis)
        small = not ty.far and isinstance(kind, Lanes) and kind.dtype == types.int32
        i = as_lanes(context, b, value, kind, narrow if small else wide)
        n = Vector(b, broadcast(b, b.trunc(size, I32) if small else size, width))
        i = i.cmp("<", 0).where(i + n, i)
        beyond = Vector(b, b.icmp_unsigned(">=", i.value, n.value))
        i = beyond.where(0, i)
        found.append(Vector(b, b.sext(i.value, wide.llvm)) if small else i)
        outside = beyond if outside is None else outside | beyond
    assert outside is not None
    _set_error_flags(b, array.error_flags, outside, ty.real.width)
    return found


def read_elements(
    context: Any, b: Any, ty: Any, value: Any, indices: list[Vector], to: Lanes
) -> Any:
    """Return the elements of an array at indices that `indices_within` has found."""
    array = cgutils.create_struct_proxy(ty)(context, b, value)
    # An empty array has no element 0: every offset is 0, and the address that of a zero.
    empty = ir.Constant(ir.IntType(1), 0)
    for axis in range(ty.ndim):
        size = b.extract_value(array.shape, axis)
        empty = b.or_(empty, b.icmp_signed("==", size, I64(0)))
    offsets = None
    for axis, i in enumerate(indices):
        stride = b.select(empty, I64(0), b.extract_value(array.strides, axis))
        if not ty.far:  # says so to LLVM, which has a cheap product for it
            stride = b.sext(b.trunc(stride, I32), I64)
        offset = i * Vector(b, broadcast(b, stride, to.width))
        offsets = offset if offsets is None else offsets + offset
    assert offsets is not None
    base = b.select(empty, b.ptrtoint(_nothing(b), I64), array.address)
    stored = STORED.get(ty.stored) or ir.IntType(getattr(types, ty.stored).bitwidth)

    def each() -> Any:
        x = ir.Constant(vector_type(stored, to.width), ir.Undefined)
        for lane in range(to.width):
            at = b.add(base, extract(b, offsets.value, lane))
            x = insert(b, x, emit_load_constant(b, at, stored), lane)
        return x

    wide = isinstance(to.dtype, types.Float) and to.width > 1 and not on_gpu(b)
    x = _side_by_side(b, base, offsets, stored, each) if wide else each()
    if isinstance(to.dtype, types.Float):
        return from_storage(b, x, ty.stored, to)
    if isinstance(to.dtype, types.Boolean):
        return Vector(b, x).cmp("!=", 0).value
    element = getattr(types, ty.stored)
    if element.bitwidth == to.dtype.bitwidth:
        return x
    return (b.sext if element.signed else b.zext)(x, to.llvm)


def _side_by_side(b: Any, base: Any, offsets: Vector, stored: Any, each: Callable[[], Any]) -> Any:
    """Read elements at once if they lie side by side, in either order, or are one; else by `each`.

    In tables of distances they do, for the positions of a vector's lanes follow each other; where a
    distance is clipped all lanes read the same.
    """
    width = offsets.width
    size = {ir.HalfType: 2, ir.FloatType: 4, ir.DoubleType: 8}.get(type(stored), 0)
    if isinstance(stored, ir.IntType):
        size = stored.width // 8
    first = extract(b, offsets.value, 0)
    apart = b.sub(offsets.value, broadcast(b, first, width))
    ty = vector_type(stored, width)
    found: list[tuple[Any, Any]] = []
    end = b.append_basic_block("read")
    for step in (size, -size, 0):
        ladder = ir.Constant(offsets.type, [step * lane for lane in range(width)])
        differs = b.bitcast(b.icmp_signed("!=", apart, ladder), ir.IntType(width))
        follow, other = b.append_basic_block("follow"), b.append_basic_block("other")
        b.cbranch(b.icmp_signed("==", differs, ir.Constant(differs.type, 0)), follow, other)
        b.position_at_end(follow)
        lowest = b.sub(first, I64(size * (width - 1))) if step < 0 else first
        at = b.add(base, lowest)
        if step == 0:
            x = broadcast(b, emit_load_constant(b, at, stored), width)
        else:
            x = emit_load_constant(b, at, ty)
        if step < 0:
            order = ir.Constant(ir.VectorType(I32, width), list(reversed(range(width))))
            x = b.shuffle_vector(x, x, order)
        found.append((x, b.block))
        b.branch(end)
        b.position_at_end(other)
    found.append((each(), b.block))
    b.branch(end)
    b.position_at_end(end)
    joined = b.phi(ty)
    for x, block in found:
        joined.add_incoming(x, block)
    return joined


def _nothing(b: Any) -> Any:
    """Return the address of 8 bytes that are 0, whatever runs."""
    name = "nattn_nothing"
    if name not in b.module.globals:
        zero = ir.GlobalVariable(b.module, I64, name, addrspace=1 if on_gpu(b) else 0)
        zero.initializer, zero.global_constant, zero.linkage = I64(0), True, "internal"
    return b.module.globals[name]


def _set_error_flags(b: Any, place: Any, outside: Vector, width: int) -> None:
    """Set the error flags of the lanes whose index was outside; the others stay as they are."""
    ty = vector_type(I32, width)
    value = outside.value
    if outside.width != width:
        value = broadcast(b, extract(b, value, 0), width)
    at = b.bitcast(place, ty.as_pointer())
    b.store(b.or_(b.load(at), b.sext(value, ty)), at)
