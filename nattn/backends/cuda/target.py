"""The one place that speaks to numba.cuda: how kernels are made, launched and compiled, and memory.

A kernel is a plain Python function over ints and floats. It reaches memory by byte address, as the
CPU's kernels do, through the functions below. Compiled, they are a few LLVM instructions; in
numba-cuda's simulator, which runs kernels as plain Python and has no intrinsics, each is its twin
in `twins`. Helpers of kernels are made with `device`.

float16 and bfloat16 are storage: what is read of them is a float32, and what is written is rounded
to the nearest, halves to even.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from llvmlite import ir
from numba import cuda, types
from numba.core import config
from numba.core.errors import NumbaPerformanceWarning

from ...vectors import elementary
from ...vectors.storage import SIZES, STORED, decode, encode
from ...vectors.vector import I32, I64, Vector
from . import twins

SIMULATED = bool(config.ENABLE_CUDASIM)
"""Whether kernels run as plain Python, on the host's memory."""

_configuring = threading.Lock()

if SIMULATED:
    twins.make_shared_arrays_once()

STORAGE = {name: SIZES[name] for name in ("float16", "bfloat16", "float32", "float64")}
"""How floats may be stored, and the bytes that one takes."""


def compute_type(storage: str) -> Any:
    """Return the Numba type in which a stored float is computed with."""
    return types.float64 if storage == "float64" else types.float32


def record(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class of named tuples: a kernel gets one, field by field."""
    make: Any = namedtuple
    return make(name, fields)


def device(function: Callable[..., Any]) -> Any:
    """Let kernels call a function: its code becomes part of theirs."""
    if SIMULATED:
        # What does not name cuda has nothing that the simulator would put in its place.
        names = "cuda" in function.__code__.co_names
        return cuda.jit(device=True)(function) if names else function
    from numba.cuda.extending import register_jitable

    return register_jitable(function)


def _intrinsic(emit: Callable[..., Any], twin: Callable[..., Any]) -> Any:
    """Return an intrinsic of Numba's, or in the simulator its twin."""
    if SIMULATED:
        return twin
    from numba.cuda.extending import intrinsic

    return intrinsic(emit)


class Kernel:
    """A kernel, compiled when it is first launched.

    Parameters
    ----------
    function : function
        The plain Python function of one argument: a NamedTuple of ints and floats.
    threads : int
        Of a block.
    blocks : int, optional
        How many of them a multiprocessor must be able to hold. Left to itself ptxas aims at a
        number of its own, even where a thread's registers then do not suffice.
    """

    def __init__(self, function: Callable[..., None], threads: int, blocks: int = 0) -> None:
        self.function = function
        self.threads = threads
        self._bounds = (threads, blocks) if blocks else threads
        options = {} if SIMULATED else {"launch_bounds": self._bounds}
        self._compiled = cuda.jit(**options)(function)

    def launch(self, grid: tuple[int, ...], args: Any, stream: Any) -> None:
        """Run it on a grid of blocks, after what the stream already holds."""
        if not SIMULATED:
            with _configuring, warnings.catch_warnings():
                # that few blocks leave most of a GPU idle: a short call is no mistake
                warnings.simplefilter("ignore", NumbaPerformanceWarning)
                configured = self._compiled[grid, self.threads, stream]
            configured(args)
            return
        with twins.quick_switches():
            self._compiled[grid, self.threads](args)

    def ptx(self, args: Any, cc: tuple[int, int]) -> str:
        """Compile it for a compute capability; this takes no GPU and no driver."""
        dispatcher = importlib.import_module("numba.cuda.dispatcher")
        device = SimpleNamespace(compute_capability=cc)
        signature = types.void(_typeof(args))
        # Helpers of kernels ask the current device what to be compiled for.
        with mock.patch.object(dispatcher, "get_current_device", return_value=device):
            code, _ = cuda.compile(
                self.function,
                signature,
                device=False,
                abi="numba",
                cc=cc,
                output="ptx",
                launch_bounds=self._bounds,
            )
        text: str = code if isinstance(code, str) else code.decode()
        return text


def _typeof(args: Any) -> Any:
    return importlib.import_module("numba.cuda.typing.typeof").typeof(args)


# Memory by address

_GLOBAL = 1  # the address space that is not a thread's own, nor shared by a block


def _pointer(b: Any, address: Any, ty: Any) -> Any:
    return b.inttoptr(address, ir.PointerType(ty, _GLOBAL))


def _read(b: Any, address: Any, ty: Any, align: int) -> Any:
    """Load what the kernel does not write itself."""
    value = b.load(_pointer(b, address, ty))
    value.align = align
    value.set_metadata("invariant.load", b.module.add_metadata([]))
    return value


def _decode(b: Any, x: Any, storage: str) -> Any:
    """Turn what is stored into a float."""
    to = ir.DoubleType() if storage == "float64" else ir.FloatType()
    return decode(Vector(b, x), storage, to).value


@functools.cache
def load(storage: str) -> Any:
    """Return ``load(address)``: the float stored there, in float32 or float64."""
    ty, to = STORED[storage], compute_type(storage)

    def emit(typingctx, address):
        def codegen(context, b, sig, args):
            return _decode(b, _read(b, args[0], ty, STORAGE[storage]), storage)

        return to(types.int64), codegen

    return _intrinsic(emit, twins.load(storage))


@functools.cache
def load4(storage: str) -> Any:
    """Return ``load4(address)``: four adjacent floats, at a multiple of their bytes or of 16."""
    ty, to = ir.VectorType(STORED[storage], 4), types.UniTuple(compute_type(storage), 4)
    align = min(16, 4 * STORAGE[storage])

    def emit(typingctx, address):
        def codegen(context, b, sig, args):
            four = _read(b, args[0], ty, align)
            floats = [_decode(b, b.extract_element(four, I32(n)), storage) for n in range(4)]
            return context.make_tuple(b, to, floats)

        return to(types.int64), codegen

    return _intrinsic(emit, twins.load4(storage, STORAGE[storage]))


@functools.cache
def store(storage: str) -> Any:
    """Return ``store(address, x)``, which rounds a float to what is stored."""
    of = compute_type(storage)

    def emit(typingctx, address, x):
        def codegen(context, b, sig, args):
            value = encode(Vector(b, context.cast(b, args[1], sig.args[1], of)), storage).value
            b.store(value, _pointer(b, args[0], value.type)).align = STORAGE[storage]
            return context.get_dummy_value()

        return types.void(types.int64, x), codegen

    return _intrinsic(emit, twins.store(storage))


def _integer_reader(ty: Any, twin: Any) -> Any:
    def emit(typingctx, address):
        def codegen(context, b, sig, args):
            value = _read(b, args[0], ty, ty.width // 8)
            return value if ty is I64 else b.zext(value, I64)

        return types.int64(types.int64), codegen

    return _intrinsic(emit, twin)


read_int64 = _integer_reader(I64, twins.read_int64)
read_uint8 = _integer_reader(ir.IntType(8), twins.read_uint8)


def _emit_write_int64(typingctx, address, x):
    def codegen(context, b, sig, args):
        value = context.cast(b, args[1], sig.args[1], types.int64)
        b.store(value, _pointer(b, args[0], I64)).align = 8
        return context.get_dummy_value()

    return types.void(types.int64, x), codegen


write_int64 = _intrinsic(_emit_write_int64, twins.write_int64)


# Arrays within a kernel


@functools.cache
def copy_group(count: int) -> Any:
    """Return ``copy_group(to, n, shared, at)``: copy `count` adjacent elements in one step.

    They go from a shared array to a thread's own. `at` is a multiple of `count`, which is 1, 2 or
    4, and the shared array is aligned to 16 bytes.
    """

    def emit(typingctx, to, n, shared, at):
        def codegen(context, b, sig, args):
            own, data = (
                context.make_array(sig.args[i])(context, b, value=args[i]).data for i in (0, 2)
            )
            first, at = (context.cast(b, args[i], sig.args[i], types.int64) for i in (1, 3))
            ty = ir.VectorType(data.type.pointee, count)
            source = b.bitcast(b.gep(data, [at]), ir.PointerType(ty, data.type.addrspace))
            value = b.load(source)
            value.align = min(16, count * shared.dtype.bitwidth // 8)
            for m in range(count):
                b.store(b.extract_element(value, I32(m)), b.gep(own, [b.add(first, I64(m))]))
            return context.get_dummy_value()

        return types.void(to, n, shared, at), codegen

    return _intrinsic(emit, twins.copy_group(count))


def _emit_is_hidden(typingctx, x):
    def codegen(context, b, sig, args):
        ty = I64 if sig.args[0] == types.float64 else I32
        return b.icmp_signed("==", b.bitcast(args[0], ty), ty(-1 << (ty.width - 1)))

    return types.boolean(x), codegen


is_hidden = _intrinsic(_emit_is_hidden, twins.is_hidden)
"""Tell whether a number is -0.0, which stands for a pair that is hidden."""


# Arithmetic


@functools.cache
def exp2(dtype: str) -> Any:
    """Return ``exp2(x)`` for x <= 0 or NaN, within two units in the last place.

    0 below the smallest normal number. In float32 it is one instruction of the hardware: CUDA C++
    Programming Guide, "Mathematical Functions", of ``ex2.approx.ftz.f32``.
    """
    of = getattr(types, dtype)

    def emit(typingctx, x):
        def codegen(context, b, sig, args):
            if dtype == "float64":
                return elementary.exp2_nonpositive(Vector(b, args[0])).value
            ty = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
            name = "llvm.nvvm.ex2.approx.ftz.f"
            known = b.module.globals.get(name) or ir.Function(b.module, ty, name)
            return b.call(known, [args[0]])

        return of(of), codegen

    return _intrinsic(emit, twins.exp2(dtype))
