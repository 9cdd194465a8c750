"""A call on the device: its arrays are brought there, tiles chosen, kernels launched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...call.device_arrays import DeviceArray
from ...call.problem import Problem
from ...call.results import new_gradient
from ...functions import mods, on_lanes
from ...functions.learning import leaves
from ...vectors import dtypes
from . import backward, diagnosis, forward, operands, tiles
from .memory import COPY_ARGS, DeviceBuffer, DeviceMemory, SmallArrays, copy_kernel
from .specialization import functions_of
from .target import SIMULATED, STORAGE, Kernel


class DeviceCall:
    """What the kernels of one call share: arrays on the device, and numbers about them.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    derive : bool
        Whether modifiers are differentiated.
    **others : ndarray or None
        What the call reads or writes beside the arrays of the problem.
    """

    def __init__(self, problem: Problem, derive: bool, **others: NDArray[Any] | None) -> None:
        p = self.problem = problem
        self.memory = DeviceMemory(0 if p.allocator is None else p.allocator.stream)
        arrays = [x for x in others.values() if isinstance(x, DeviceArray)]
        self._streams = {x.source.stream for x in arrays if x.source.stream is not None}
        for other in sorted({*p.streams, *self._streams}):
            _order(other, self.memory.handle)
        self.functions = functions_of(p, derive)
        self.fields: dict[str, Any] = {}
        for name in ("q", "k", "v"):
            self.array(name, getattr(p, name))
        left, right = p.window
        self.set(
            B=p.B,
            Hq=p.Hq,
            Hkv=p.Hkv,
            group=p.group if p.Hq else 0,
            Nq=p.Nq,
            Nk=p.Nk,
            D=p.D,
            Dv=p.Dv,
            causal=int(p.causal),
            left=-1 if left is None else left,
            right=-1 if right is None else right,
            scale=float(p.scale),
            keep_prob=1.0 - p.dropout_p,
        )
        self.small_arrays = SmallArrays(self.memory)
        self.offsets: dict[str, int] = {}
        self.number("q_offset", p.q_offset)
        self.number("q_lens", p.q_lens)
        self.number("kv_lens", p.kv_lens)
        if p.sinks is not None:
            self.number("sinks", p.sinks)
        n = len(self.functions.names)
        self.error_flags = self.memory.zeros((n,), np.int64) if n else None
        error_flags_ptr = 0 if self.error_flags is None else self.error_flags.ptr
        values = operands.arguments(p, self.memory, error_flags_ptr)
        self.set(**dict(zip(operands.FIELDS, values, strict=True)))

    def set(self, **fields: Any) -> None:
        """Set fields of the kernels' arguments."""
        self.fields.update(fields)

    def array(self, name: str, x: NDArray[Any]) -> None:
        """Set address and strides of a 4-D array, which is brought to the device."""
        self.strided(name, *self.memory.view(x))

    def strided(self, name: str, ptr: int, strides: tuple[int, ...]) -> None:
        """Set address and strides of a 4-D array that is there."""
        axes = "bhij" if name in ("mask", "bias", "dbias") else "bhnd"
        self.set(**{f"{name}_ptr": ptr})
        self.set(**{f"{name}_{axis}": s for axis, s in zip(axes, strides, strict=True)})

    def numbers_of_rows(self, name: str, x: NDArray[Any]) -> None:
        """Set the address of a contiguous (B, Hq, Nq) array, which is brought to the device."""
        if isinstance(x, DeviceArray) and not x.flags.c_contiguous:
            dense = self.memory.empty(x.shape, x.dtype)
            self.set(**{f"{name}_ptr": dense.ptr})
            copy = copy_kernel(dtypes.compute_name(x.dtype))
            args = COPY_ARGS(dense.ptr, *x.shape, self.memory.upload(x), *x.strides)
            copy.launch((math.prod(x.shape[:2]),), args, self.memory.stream)
        else:
            self.set(**{f"{name}_ptr": self.memory.upload(x)})

    def gradient(
        self, name: str, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Set where a gradient is written."""
        if name == "sinks":
            self.set(dsinks_ptr=ptr, dsinks_h=strides[0])
        elif name == "alibi_slopes":
            self.set(dslopes_ptr=ptr, dslopes_h=strides[-1], slopes_B=1)
            if len(shape) == 2:
                self.set(dslopes_b=strides[0], slopes_B=shape[0])
        else:
            self.strided(f"d{name}", ptr, strides)
            if name == "bias":
                self.set(**{f"bias_{axis}": n for axis, n in zip("BHIJ", shape, strict=True)})

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: Any) -> None:
        """Run a kernel.

        Raises
        ------
        TypeError
            If scalars cannot express a users' function: the text names the line and the remedy.
        """
        try:
            kernel.launch(grid, args, self.memory.stream)
        except on_lanes.COMPILER_ERRORS as error:
            raise diagnosis.explained(self.functions, error) from error

    def number(self, name: str, x: NDArray[Any]) -> None:
        """Let a small array travel with the others."""
        self.offsets[f"{name}_ptr"] = self.small_arrays.add(x)

    def upload(self) -> None:
        """Send the small arrays; after that `args` can be made."""
        base = self.small_arrays.upload()
        self.set(**{name: base + at for name, at in self.offsets.items()})

    def args(self, cls: Any, **fields: Any) -> Any:
        """Return the arguments of a kernel; a field that was never set is 0."""
        found = self.fields | fields
        return cls._make(
            float(found[name]) if name in ("scale", "keep_prob") else int(found.get(name, 0))
            for name in cls._fields
        )

    def wide(self, *names: str) -> bool:
        """Whether rows of arrays can be read four elements at a time."""
        size = STORAGE[self.problem.storage]
        step = min(16, 4 * size)
        for name in names:
            numbers = [
                self.fields[f"{name}_ptr"],
                *(self.fields[f"{name}_{axis}"] for axis in "bhn"),
            ]
            if self.fields[f"{name}_d"] != size or any(n % step for n in numbers):
                return False
        return True

    def end(self) -> None:
        """Let others wait for the results, and raise what users' functions could only flag.

        Raises
        ------
        IndexError
            If a bound array was indexed out of range for a visible pair.
        """
        for other in sorted(self._streams):
            _order(self.memory.handle, other)
        if self.error_flags is not None and _may_miss(self.problem):
            operands.raise_for_flags(self.functions, self.error_flags.to_host())


def _may_miss(p: Problem) -> bool:
    """Whether a users' function reads an array: only then is there a reason to wait for the end."""
    every = (*p.score_mods, *(() if p.mask_mod is None else (p.mask_mod,)))
    return any(
        isinstance(value, np.ndarray) and leaf.function is not mods.alibi
        for tree in every
        for leaf in leaves(tree)
        for value in leaf.values
    )


def _order(first: int, then: int) -> None:
    """Let a stream wait for what another holds; 0 and 1 are both the default one."""
    if (first or 1) != (then or 1) and not SIMULATED:
        event = cuda.event(timing=False)
        event.record(cuda.external_stream(first or 1))
        event.wait(cuda.external_stream(then or 1))


def _few(p: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items with few queries, by their own lengths, and the others."""
    few = p.group * p.q_lens <= tiles.FEW_ROWS
    return np.flatnonzero(few), np.flatnonzero(~few)


class Items(NamedTuple):
    """The items of one launch of the forward kernel.

    Attributes
    ----------
    ptr : int
        Address of their numbers, int64.
    n_items : int
        How many there are.
    n_rows : int
        The first rows of each, which are computed.
    n_splits : int
        Into how many their keys are split at most.
    """

    ptr: int
    n_items: int
    n_rows: int
    n_splits: int


def attend(p: Problem, out: NDArray[Any], lse: NDArray[Any]) -> None:
    """Write the attention of a problem, as `door.forward` says; there are rows."""
    call = DeviceCall(p, derive=False, out=out, lse=lse)
    memory = call.memory
    new_out: DeviceBuffer | None = None
    new_lse: DeviceBuffer | None = None
    if isinstance(out, DeviceArray):
        call.array("out", out)
        call.set(lse_ptr=memory.upload(lse))
    else:
        new_out, new_lse = memory.empty(out.shape, p.dtype), memory.empty(lse.shape, p.compute)
        call.strided("out", new_out.ptr, new_out.strides)
        call.set(lse_ptr=new_lse.ptr)
    few, many = _few(p)
    n_splits = 1
    if few.size:
        split_keys = np.array([tiles.split_keys(int(n)) for n in p.kv_lens], np.int64)
        n_splits = max(1, int((-(-p.kv_lens // split_keys))[few].max()))
        call.number("split_keys", split_keys)
    call.number("few", few.astype(np.int64))
    call.number("many", many.astype(np.int64))
    call.upload()
    wide = call.wide("q", "k", "v")
    if many.size:
        items = Items(call.fields["many_ptr"], many.size, n_rows=p.Nq, n_splits=1)
        _launch_forward(call, wide, items)
    if few.size:
        # Only rows that exist have partial results: what is padded may be many more.
        n_rows = max(1, int(p.q_lens[few].max()))
        shape = (n_splits, few.size, p.Hq, n_rows)
        partial_out = memory.empty((*shape, p.Dv), p.compute)
        partial_max, partial_sum = (memory.empty(shape, p.compute) for _ in range(2))
        call.set(
            partial_out_ptr=partial_out.ptr,
            partial_max_ptr=partial_max.ptr,
            partial_sum_ptr=partial_sum.ptr,
            partial_n_rows=n_rows,
        )
        items = Items(call.fields["few_ptr"], few.size, n_rows, n_splits)
        _launch_forward(call, wide, items)
        args = call.args(forward.ARGS, items_ptr=items.ptr, n_items=items.n_items)
        call.launch(forward.merge_kernel(p.storage), (few.size * p.Hq * p.Nq,), args)
    if new_out is not None and new_lse is not None:
        result, rows = new_out.to_host(), new_lse.to_host()
        call.end()
        out[...] = result
        lse[...] = rows
    else:
        call.end()


def _launch_forward(call: DeviceCall, wide: bool, items: Items) -> None:
    p = call.problem
    tile = tiles.query_tile(p.storage, p.Dv, wide, few="partial_max_ptr" in call.fields)
    n_tiles = math.ceil(p.group * items.n_rows / tile.rows)
    n_chunks = max(1, math.ceil(p.Dv / tile.width))
    args = call.args(
        forward.ARGS,
        items_ptr=items.ptr,
        n_items=items.n_items,
        n_tiles=n_tiles,
        n_splits=items.n_splits,
        Nq=items.n_rows,
    )
    grid = (n_tiles * items.n_splits * p.Hkv * items.n_items, n_chunks)
    call.launch(forward.forward_kernel(tile, call.functions), grid, args)


def gradients(
    p: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
) -> dict[str, NDArray[Any]]:
    """Return the gradients of a problem, as `door.backward` says."""
    call = DeviceCall(p, derive=True, dout=dout, out=out, lse=lse, dlse=dlse)
    memory = call.memory
    call.array("dout", dout)
    call.array("out", out)
    call.numbers_of_rows("lse", lse)
    if dlse is not None:
        call.numbers_of_rows("dlse", dlse)
    call.set(delta_ptr=memory.empty(lse.shape, p.compute).ptr)
    if "alibi_slopes" in wrt:
        call.set(distance_sum_ptr=memory.empty(lse.shape, p.compute).ptr)
    call.upload()
    shapes = {
        "q": (p.B, p.Hq, p.Nq, p.D),
        "k": (p.B, p.Hkv, p.Nk, p.D),
        "v": (p.B, p.Hkv, p.Nk, p.Dv),
        "bias": p.bias_shape,
        "sinks": (p.Hq,),
        "alibi_slopes": (p.B, p.Hq),
    }
    results: dict[str, Any] = {}
    stored: dict[str, str] = {}
    for name in wrt:
        if p.allocator is not None:
            new: Any = new_gradient(p, name)
            ptr = memory.upload(new)
        else:
            shape = shapes[name]
            assert shape is not None
            new = memory.empty(shape, p.dtype if name in ("q", "k", "v") else p.compute)
            ptr = new.ptr
        results[name] = new
        stored[name] = dtypes.storage_name(new.dtype) or ""
        if math.prod(new.shape):
            call.gradient(name, ptr, new.shape, new.strides)
    args = call.args(backward.ARGS)
    wanted = backward.Wanted(
        storage=p.storage,
        wide=call.wide("q", "k", "v", "dout"),
        functions=call.functions,
        bias=stored.get("bias", ""),
        sinks=stored.get("sinks", ""),
        slopes=stored.get("alibi_slopes", ""),
    )
    for kernel, grid in backward.gradient_launches(args, wanted):
        call.launch(kernel, grid, args)
    call.end()
    if p.allocator is not None:
        return results
    return {name: new.to_host() for name, new in results.items()}
