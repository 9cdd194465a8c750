"""Lanes and single numbers from memory, and to memory: by byte address, with no alignment."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..vector import I32, I64, on_gpu
from .conversions import as_lanes
from .types import LLVM


def _pointer(b: Any, address: Any, ty: Any) -> Any:
    # On a GPU an address is one of global memory.
    return b.inttoptr(address, ty.as_pointer(1 if on_gpu(b) else 0))


def emit_load(b: Any, address: Any, ty: Any) -> Any:
    """Write the load of an LLVM type from a byte address."""
    value = b.load(_pointer(b, address, ty))
    if not on_gpu(b):  # where what is not aligned is read byte by byte
        value.align = 1
    return value


def emit_store(b: Any, address: Any, value: Any) -> None:
    """Write the store of a value to a byte address."""
    b.store(value, _pointer(b, address, value.type)).align = 1


def emit_load_constant(b: Any, address: Any, ty: Any) -> Any:
    """Write the load of what no kernel writes: in a loop that does not change the address, once."""
    value = emit_load(b, address, ty)
    value.set_metadata("invariant.load", b.module.add_metadata([]))
    return value


@intrinsic
def splat(typingctx: Any, tile: Any, x: Any) -> Any:
    """Return the scalar x, converted to the tile's float type, in every lane."""
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return as_lanes(context, b, args[1], sig.args[1], to).value

    return to(tile, x), codegen


@intrinsic
def load(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W floats from a byte address."""
    to = tile.real
    return to(tile, types.int64), lambda context, b, sig, args: emit_load(b, args[1], to.llvm)


@intrinsic
def load_old(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W floats from where a selection between them and new ones will be stored.

    LLVM would make it a masked store, for which AMD's processors take some forty steps; it does
    not see that a frozen value is still that of the load.
    """
    to = tile.real

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = emit_load(b, args[1], to.llvm)
        frozen = ir.Instruction(b.block, value.type, "freeze", [value])
        b._insert(frozen)
        return frozen

    return to(tile, types.int64), codegen


@intrinsic
def load_int32(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return W 32-bit integers from a byte address."""
    to = tile.real.of(types.int32)
    return to(tile, types.int64), lambda context, b, sig, args: emit_load(b, args[1], to.llvm)


@intrinsic
def store(typingctx: Any, address: Any, x: Any) -> Any:
    """Write lanes to a byte address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        emit_store(b, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, x), codegen


def _prefetch(locality: int, doc: str) -> Any:
    @intrinsic
    def fetch(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            pointer = ir.IntType(8).as_pointer()
            ty = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
            ask = cgutils.get_or_insert_function(b.module, ty, "llvm.prefetch.p0")
            b.call(ask, [b.inttoptr(args[0], pointer), I32(0), I32(locality), I32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    fetch.__doc__ = doc
    return fetch


prefetch = _prefetch(3, "Ask for the cache line at an address, which may lie outside any array.")
prefetch_far = _prefetch(
    2,
    """Ask for a line as `prefetch` does, to the second-level cache.

    That has room for more requests at a time: more comes while something else is computed.
    """,
)


@intrinsic
def read(typingctx: Any, tile: Any, address: Any) -> Any:
    """Return one float of the tile's type from a byte address."""
    to = tile.real.dtype
    return to(tile, types.int64), lambda context, b, sig, args: emit_load(b, args[1], LLVM[to])


@intrinsic
def write(typingctx: Any, tile: Any, address: Any, x: Any) -> Any:
    """Write one float of the tile's type to a byte address."""
    to = tile.real.dtype

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        emit_store(b, args[1], context.cast(b, args[2], sig.args[2], to))
        return context.get_dummy_value()

    return types.void(tile, types.int64, x), codegen


def _integer_access(name: str, ty: Any, numba_type: Any) -> Any:
    @intrinsic
    def access(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return emit_load(b, args[0], ty)

        return numba_type(types.int64), codegen

    access.__doc__ = f"Return one {name} from a byte address."
    return access


read_int8 = _integer_access("int8", ir.IntType(8), types.int8)
read_int64 = _integer_access("int64", I64, types.int64)


def _integer_write(name: str, numba_type: Any) -> Any:
    @intrinsic
    def access(typingctx: Any, address: Any, x: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            emit_store(b, args[0], args[1])
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
