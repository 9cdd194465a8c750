"""The door of the CUDA backend: bring a problem to the device, choose tiles, launch kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numba import cuda
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from ...call.device_arrays import DeviceArray, on_device
from ...call.problem import Problem
from ...call.results import new_gradient
from ...functions import mods, on_lanes
from ...vectors import dtypes
from . import backward as back
from . import score, tiles
from .forward import ARGS, forward_kernel, merge_kernel
from .memory import COPY_ARGS, Memory, Numbers, Scratch, copy_kernel
from .target import SIMULATED, STORAGE, Kernel

__all__ = ["backward", "check_usable", "forward"]

Progress = Callable[[float], object]


@functools.cache  # what raised is tried again
def check_usable() -> None:
    """Raise if there is no GPU that can be used.

    Raises
    ------
    RuntimeError
        The text says what is missing.
    """
    if SIMULATED or cuda.is_available():
        return
    try:
        cuda.detect()
        reason = "CUDA reports no device"
    except Exception as error:  # whatever the driver, or its absence, makes of it
        reason = " ".join(str(error).split()).removesuffix(":").rstrip(" .")
    raise RuntimeError(
        "backend: expected an NVIDIA GPU and its driver for 'cuda', got none that can be used: "
        f"{reason}"
    )


class _Call:
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
        self.memory = Memory(0 if p.allocator is None else p.allocator.stream)
        arrays = [x for x in others.values() if isinstance(x, DeviceArray)]
        self._streams = {x.source.stream for x in arrays if x.source.stream is not None}
        for other in sorted({*p.streams, *self._streams}):
            _order(other, self.memory.handle)
        self.functions = score.functions_of(p, derive)
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
            kept=1.0 - p.dropout_p,
        )
        self.numbers = Numbers(self.memory)
        self.later: dict[str, int] = {}
        self.number("q_offset", p.q_offset)
        self.number("q_lens", p.q_lens)
        self.number("kv_lens", p.kv_lens)
        if p.sinks is not None:
            self.number("sinks", p.sinks)
        count = len(self.functions.names)
        self.trouble = self.memory.zeros((count,), np.int64) if count else None
        address = 0 if self.trouble is None else self.trouble.address
        values = score.arguments(p, self.memory, address)
        self.set(**dict(zip(score.FIELDS, values, strict=True)))

    def set(self, **fields: Any) -> None:
        """Set fields of the kernels' arguments."""
        self.fields.update(fields)

    def array(self, name: str, x: NDArray[Any]) -> None:
        """Set address and strides of a 4-D array, which is brought to the device."""
        address, strides = self.memory.view(x)
        self.place(name, address, strides)

    def place(self, name: str, address: int, strides: tuple[int, ...]) -> None:
        """Set address and strides of a 4-D array that is there."""
        axes = "bhij" if name in ("mask", "bias", "dbias") else "bhnd"
        self.set(**{name: address})
        self.set(**{f"{name}_{axis}": s for axis, s in zip(axes, strides, strict=True)})

    def rows(self, name: str, x: NDArray[Any]) -> None:
        """Set the address of a contiguous (B, Hq, Nq) array, which is brought to the device."""
        if isinstance(x, DeviceArray) and not x.flags.c_contiguous:
            dense = self.memory.empty(x.shape, x.dtype)
            self.set(**{name: dense.address})
            copy = copy_kernel(dtypes.compute_name(x.dtype))
            args = COPY_ARGS(dense.address, *x.shape, self.memory.upload(x), *x.strides)
            copy.launch((math.prod(x.shape[:2]),), args, self.memory.stream)
        else:
            self.set(**{name: self.memory.upload(x)})

    def gradient(
        self, name: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Set where a gradient is written."""
        if name == "sinks":
            self.set(dsinks=address, dsinks_h=strides[0])
        elif name == "alibi_slopes":
            self.set(dslopes=address, dslopes_h=strides[-1], slopes_B=1)
            if len(shape) == 2:
                self.set(dslopes_b=strides[0], slopes_B=shape[0])
        else:
            self.place(f"d{name}", address, strides)
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
        except NumbaError as error:
            raise score.explained(self.functions, error) from error

    def number(self, name: str, x: NDArray[Any]) -> None:
        """Let a small array travel with the others."""
        self.later[name] = self.numbers.add(x)

    def upload(self) -> None:
        """Send the small arrays; after that `args` can be made."""
        base = self.numbers.upload()
        self.set(**{name: base + at for name, at in self.later.items()})

    def args(self, cls: Any, **fields: Any) -> Any:
        """Return the arguments of a kernel; a field that was never set is 0."""
        found = self.fields | fields
        return cls._make(
            float(found[name]) if name in ("scale", "kept") else int(found.get(name, 0))
            for name in cls._fields
        )

    def wide(self, *names: str) -> bool:
        """Whether rows of arrays can be read four elements at a time."""
        size = STORAGE[self.problem.storage]
        step = min(16, 4 * size)
        for name in names:
            numbers = [self.fields[name], *(self.fields[f"{name}_{axis}"] for axis in "bhn")]
            if self.fields[f"{name}_d"] != size or any(n % step for n in numbers):
                return False
        return True

    def end(self) -> None:
        """Let others wait for the results, and raise what users' functions could only note.

        Raises
        ------
        IndexError
            If a bound array was indexed out of range for a visible pair.
        """
        for other in sorted(self._streams):
            _order(self.memory.handle, other)
        if self.trouble is not None and _may_miss(self.problem):
            score.raise_outside(self.functions, self.trouble.to_host())


def _may_miss(p: Problem) -> bool:
    """Whether a users' function reads an array: only then is there a reason to wait for the end."""
    every = (*p.score_mods, *(() if p.mask_mod is None else (p.mask_mod,)))
    return any(
        isinstance(value, np.ndarray) and leaf.function is not mods.alibi
        for tree in every
        for leaf in on_lanes.leaves(tree)
        for value in leaf.values
    )


def _device_of(p: Problem) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of a problem's arrays is the current one."""
    return on_device(None if p.allocator is None else p.allocator.device)


def _order(first: int, then: int) -> None:
    """Let a stream wait for what another holds; 0 and 1 are both the default one."""
    if (first or 1) != (then or 1) and not SIMULATED:
        event = cuda.event(timing=False)
        event.record(cuda.external_stream(first or 1))
        event.wait(cuda.external_stream(then or 1))


def _few(p: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items with few queries, by their own lengths, and the others."""
    few = p.group * p.q_lens <= tiles.FEW
    return np.flatnonzero(few), np.flatnonzero(~few)


def forward(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    progress: Progress | None = None,
) -> None:
    """Write the attention of a problem to `out` and its log-sum-exp to `lse`.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype, any strides; written.
    lse : ndarray
        ``(B, Hq, Nq)`` of its compute dtype, contiguous; written.
    progress : callable, optional
        Called with the fraction that is done: a GPU does not tell before the end.

    Notes
    -----
    Arrays on a GPU are read and written where they are, on the stream of their library. NumPy
    arrays are copied there and back, and the call returns when that is done.
    """
    if lse.size:
        with _device_of(problem):
            _forward(problem, out, lse)
    if progress is not None:
        progress(1.0)


def _forward(p: Problem, out: NDArray[Any], lse: NDArray[Any]) -> None:
    call = _Call(p, derive=False, out=out, lse=lse)
    memory = call.memory
    new_out: Scratch | None = None
    new_lse: Scratch | None = None
    if isinstance(out, DeviceArray):
        call.array("out", out)
        call.set(lse=memory.upload(lse))
    else:
        new_out, new_lse = memory.empty(out.shape, p.dtype), memory.empty(lse.shape, p.compute)
        call.place("out", new_out.address, new_out.strides)
        call.set(lse=new_lse.address)
    few, many = _few(p)
    spans = 1
    if few.size:
        span = np.array([tiles.span(int(n)) for n in p.kv_lens], np.int64)
        spans = max(1, int((-(-p.kv_lens // span))[few].max()))
        call.number("span", span)
    call.number("few", few.astype(np.int64))
    call.number("many", many.astype(np.int64))
    call.upload()
    wide = call.wide("q", "k", "v")
    if many.size:
        _attend(call, wide, many.size, call.fields["many"], 1, p.Nq)
    if few.size:
        # Only rows that exist have a share: what is padded may be many more.
        share_rows = max(1, int(p.q_lens[few].max()))
        shape = (spans, few.size, p.Hq, share_rows)
        share = memory.empty((*shape, p.Dv), p.compute)
        top, total = memory.empty(shape, p.compute), memory.empty(shape, p.compute)
        call.set(share=share.address, share_max=top.address, share_sum=total.address)
        call.set(spans=spans, share_rows=share_rows)
        _attend(call, wide, few.size, call.fields["few"], spans, share_rows)
        args = call.args(ARGS, items=call.fields["few"], n_items=few.size)
        call.launch(merge_kernel(p.storage), (few.size * p.Hq * p.Nq,), args)
    if new_out is not None and new_lse is not None:
        result, rows = new_out.to_host(), new_lse.to_host()
        call.end()
        out[...] = result
        lse[...] = rows
    else:
        call.end()


def _attend(call: _Call, wide: bool, count: int, items: int, spans: int, rows: int) -> None:
    """Launch the forward kernel for some items and the first rows of each."""
    p = call.problem
    tile = tiles.query_tile(p.storage, p.Dv, wide, few="share" in call.fields)
    n_tiles = math.ceil(p.group * rows / tile.rows)
    chunks = max(1, math.ceil(p.Dv / tile.width))
    kernel = forward_kernel(tile, call.functions)
    args = call.args(ARGS, items=items, n_items=count, tiles=n_tiles, spans=spans, Nq=rows)
    call.launch(kernel, (n_tiles * spans * p.Hkv * count, chunks), args)


def backward(
    problem: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
    *,
    progress: Progress | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the gradients of a problem.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    dout, out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype: the gradient and the value of the output.
    lse, dlse : ndarray
        ``(B, Hq, Nq)`` of its compute dtype: the log-sum-exp, and its gradient if it has one.
    wrt : frozenset of str
        Among "q", "k", "v", "bias", "sinks" and "alibi_slopes".
    progress : callable, optional
        Called with the fraction that is done: a GPU does not tell before the end.

    Returns
    -------
    dict
        A gradient for each name. Of NumPy arrays: like q, k and v; of the bias
        ``problem.bias_shape``; ``(Hq,)``; ``(B, Hq)``. Of arrays on a GPU what
        `nattn.call.results.new_gradient` made.
    """
    with _device_of(problem):
        found = _gradients(problem, dout, out, lse, dlse, wrt)
    if progress is not None:
        progress(1.0)
    return found


def _gradients(
    p: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
) -> dict[str, NDArray[Any]]:
    call = _Call(p, derive=True, dout=dout, out=out, lse=lse, dlse=dlse)
    memory = call.memory
    call.array("dout", dout)
    call.array("out", out)
    call.rows("lse", lse)
    if dlse is not None:
        call.rows("dlse", dlse)
    call.set(delta=memory.empty(lse.shape, p.compute).address)
    if "alibi_slopes" in wrt:
        call.set(distance_sum=memory.empty(lse.shape, p.compute).address)
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
            address = memory.upload(new)
        else:
            shape = shapes[name]
            assert shape is not None
            new = memory.empty(shape, p.dtype if name in ("q", "k", "v") else p.compute)
            address = new.address
        results[name] = new
        stored[name] = dtypes.storage_name(new.dtype) or ""
        if math.prod(new.shape):
            call.gradient(name, address, new.shape, new.strides)
    args = call.args(back.ARGS)
    launches = back.gradient_launches(
        args,
        p.storage,
        call.wide("q", "k", "v", "dout"),
        call.functions,
        stored.get("bias", ""),
        stored.get("sinks", ""),
        stored.get("alibi_slopes", ""),
    )
    for kernel, grid in launches:
        call.launch(kernel, grid, args)
    call.end()
    if p.allocator is not None:
        return results
    return {name: new.to_host() for name, new in results.items()}
