"""The yardsticks: how many multiply-adds the processor can do, and how fast memory is read, now.

Of bfloat16 they are those that attention is made of: in float32, or dot products of pairs.

That loop touches registers only, the other one does nothing but load. Their results are ceilings
that no kernel passes, and since machines change their speed, a kernel's share of one means
something only in the same run.
"""

from __future__ import annotations

import time
from typing import Any

from numpy.typing import NDArray

from ...vectors.lanes import Tile, chained, load, splat, store, view
from . import tiles
from .jit import kernel
from .jobs import LINE, enter, job_record, leave, run_job, take_task, thread_count

_CHAINS = 12

ARGS = job_record("PeakArgs", ("repetitions",))


@kernel("void(int64, int64)")
def multiply_add(tile):
    """Run 12 chains of multiply-adds on each thread, and leave their sum in its scratch."""

    def worker(slot, args):
        own = view(ARGS, args)
        repetitions = own.repetitions
        scratch = enter(own.job_ptr, slot)
        if scratch == 0:
            return
        x, y = splat(tile, 0.5), splat(tile, 1.0)  # as pairs: (0, 0.5), (0, 1.0)
        a = b = c = d = e = f = g = h = i = j = k = m = splat(tile, 0.25 * slot)
        for _ in range(repetitions):
            a, b, c = chained(tile, a, x, y), chained(tile, b, x, y), chained(tile, c, x, y)
            d, e, f = chained(tile, d, x, y), chained(tile, e, x, y), chained(tile, f, x, y)
            g, h, i = chained(tile, g, x, y), chained(tile, h, x, y), chained(tile, i, x, y)
            j, k, m = chained(tile, j, x, y), chained(tile, k, x, y), chained(tile, m, x, y)
        total = a + b + c + d + e + f + g + h + i + j + k + m
        store(scratch, total)
        leave(own.job_ptr, slot, 0)

    return worker


def fma_peak(dtype: str = "float32", threads: int | None = None, seconds: float = 0.05) -> float:
    """Measure the processor's multiply-add limit.

    Parameters
    ----------
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    threads : int, optional
        Threads to run at once; by default those that attention would use.
    seconds : float
        About how long to measure.

    Returns
    -------
    float
        GFLOP/s of all threads together; a multiply-add counts as two, a dot product of pairs as
        four.

    Examples
    --------
    >>> from nattn.backends.cpu.door import fma_peak
    >>> fma_peak(seconds=0.01) > 1
    True
    """
    tile = tiles.choose_tile(dtype, 1 << 20)
    threads = threads or thread_count()
    address = multiply_add(tile)
    # 2 * width operations a cycle, about 3e9 cycles a second: near enough to choose a length.
    repetitions = max(1, int(seconds * 3e9 * 2 / _CHAINS))
    begin = time.perf_counter()
    run_job(
        address,
        ARGS,
        {"repetitions": repetitions},
        n_tasks=threads,
        n_threads=threads,
        scratch_bytes=LINE,
        flops=1e12,
        keepalive=None,
    )
    elapsed = time.perf_counter() - begin
    return 2.0 * tile.per_word * _CHAINS * tile.W * repetitions * threads / elapsed / 1e9


READ_ARGS = job_record("ReadArgs", ("ptr", "bytes_per_task"))

_PIECE = 1 << 18
"""Bytes that a thread reads at a time."""


@kernel("void(int64, int64)")
def read_worker(tile):
    """Add up pieces of memory, in four vectors that do not wait for each other."""
    step = tile.W * tile.itemsize

    def worker(slot, args):
        a = view(READ_ARGS, args)
        scratch = enter(a.job_ptr, slot)
        if scratch == 0:
            return
        w = x = y = z = splat(tile, 0.0)
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
            begin = a.ptr + task * a.bytes_per_task
            for at in range(begin, begin + a.bytes_per_task, 4 * step):
                w += load(tile, at)
                x += load(tile, at + step)
                y += load(tile, at + 2 * step)
                z += load(tile, at + 3 * step)
        store(scratch, w + x + y + z)
        leave(a.job_ptr, slot, 0)

    return worker


def read_memory(array: NDArray[Any]) -> float:
    """Read an array once, on all threads, as fast as plain loads can.

    Parameters
    ----------
    array : ndarray
        Contiguous; what is left over behind the last 256 KiB is not read.

    Returns
    -------
    float
        Bytes per second. Larger than the caches it is the bandwidth of memory.

    Examples
    --------
    >>> import numpy as np
    >>> from nattn.backends.cpu.door import read_memory
    >>> read_memory(np.ones(1 << 20, np.float32)) > 1e6
    True
    """
    own = tiles.choose_tile("float32", 1)
    address = read_worker(Tile("float32", own.W, 1, 1))
    n_tasks = array.nbytes // _PIECE
    begin = time.perf_counter()
    run_job(
        address,
        READ_ARGS,
        {"ptr": array.ctypes.data, "bytes_per_task": _PIECE},
        n_tasks=n_tasks,
        n_threads=thread_count(),
        scratch_bytes=LINE,
        flops=1.0,
        keepalive=array,
    )
    return n_tasks * _PIECE / (time.perf_counter() - begin)
