"""The door of the CPU backend: choose sizes, lay out scratch, run the workers.

Workers are compiled functions without the GIL, run by Python threads; they take tasks from a
shared counter, so that a slow core does not hold up the others. The thread that calls waits for
them (or works itself, if the job is short) and so stays open to Ctrl-C. Numba's own threading
layers are not involved: a fork, a process pool or another thread's parallel kernel is no danger.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numba
import numpy as np
from numba.np.ufunc import parallel as numba_parallel
from numpy.typing import NDArray

from ..problem import Problem
from . import forward as forward_kernel
from . import score, tiles

Progress = Callable[[float], object]

SHORT = 2e8
"""Floating-point operations from which waking a second thread pays many times over is far
exceeded, while the calling thread may still work itself: a few hundredths of a second."""

TINY = 2e6
"""Below this the calling thread is done before another one would have begun."""

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    """Threads do not survive a fork: the child starts its own."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            limit = max(numba.config.NUMBA_NUM_THREADS, os.cpu_count() or 1)
            _pool = ThreadPoolExecutor(limit, thread_name_prefix="nattn")
        return _pool


def thread_count() -> int:
    """Return the number of threads to use: what ``numba.set_num_threads`` says.

    Asking Numba starts its threading layer; before anyone has, its default holds.
    """
    if getattr(numba_parallel, "_is_initialized", False):
        return int(numba.get_num_threads())
    return int(numba.config.NUMBA_NUM_THREADS)


_ARGS = forward_kernel.ARGS.dtype
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)


@functools.cache
def _callable(address: int) -> Any:
    """Return a compiled worker as a function that releases the GIL."""
    return _WORKER(address)


def run(
    address: int,
    args: NDArray[Any],
    control: NDArray[np.int64],
    threads: int,
    flops: float,
    progress: Progress | None,
) -> None:
    """Run a worker on several threads until its tasks are done.

    `control` is (next task, number of tasks). A KeyboardInterrupt stops the workers at their next
    block of keys, and is raised when the last one has stopped: nobody writes afterwards.
    """
    worker, data = _callable(address), args.ctypes.data
    if threads == 1 and flops < SHORT:
        worker(0, data)
        return
    main = threading.current_thread() is threading.main_thread()
    waits = flops >= SHORT and (main or progress is not None)
    pool = _executor()
    futures = [pool.submit(worker, slot, data) for slot in range(0 if waits else 1, threads)]
    try:
        if not waits:
            worker(0, data)
        _wait(futures, control, progress)
    except BaseException:
        control[1] = 0
        _settle(futures)
        raise


def _wait(
    futures: list[Future[None]], control: NDArray[np.int64], progress: Progress | None
) -> None:
    total = int(control[1])
    while wait(futures, timeout=0.1).not_done:
        if progress is not None:
            progress(max(0.0, min(1.0, (int(control[0]) - len(futures)) / total)))
    for future in futures:
        future.result()
    if progress is not None:
        progress(1.0)


def _settle(futures: list[Future[None]]) -> None:
    """Wait for workers that have been told to stop, through further interrupts."""
    while True:
        try:
            wait(futures)
            return
        except KeyboardInterrupt:
            continue


@functools.cache
def _layout(tile: Any, block: int, count: int, D: int, Dv: int) -> tuple[int, ...]:
    areas = tiles.scratch_layout(tile, block, count, D, Dv)
    return (*(areas[name] for name in tiles.AREAS), areas["end"])


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
        ``(B, Hq, Nq)``, contiguous; written.
    progress : callable, optional
        Called now and then with the fraction that is done.
    """
    p = problem
    if lse.size == 0:
        return
    if p.Nk == 0:
        out[...] = 0
        lse[...] = -np.inf
        return
    # Heads that share their keys go into one stream while together they fill fewer rows than
    # separate tiles would.
    dtype = p.dtype.name
    packed = p.group > 1 and p.Nq < tiles.choose_tile(dtype, p.group * p.Nq).lanes
    heads = p.group if packed else 1
    streams, rows = p.Hq // heads, p.Nq * heads
    tile = tiles.choose_tile(dtype, rows)
    block = tiles.block_kv(tile, p.D)
    address = forward_kernel.forward_worker(tile, block)

    n_tiles = -(-rows // tile.lanes)
    per_task = tiles.tiles_per_task(tile, block, p.D, p.Dv, n_tiles, p.B * streams)
    tasks_per_stream = -(-n_tiles // per_task)
    n_tasks = p.B * streams * tasks_per_stream
    flops = 2.0 * p.B * p.Hq * p.Nq * p.Nk * (p.D + p.Dv)
    threads = 1 if flops < TINY else min(thread_count(), n_tasks)

    *areas, scratch_bytes = _layout(tile, block, per_task, p.D, p.Dv)
    scratch = np.empty(threads * scratch_bytes + 64, np.uint8)
    scratch_at = -(-scratch.ctypes.data // 64) * 64
    control = np.array([0, n_tasks], np.int64)
    bound = [score.operand_function(tile, x) for x in (p.bias, p.mask) if x is not None]
    functions = np.array([(f, params.ctypes.data) for f, params in bound], np.int64)
    left, right = (-1 if w is None else w for w in p.window)
    args = np.array(
        [
            (
                *(p.q.ctypes.data, *p.q.strides),
                *(p.k.ctypes.data, *p.k.strides),
                *(p.v.ctypes.data, *p.v.strides),
                *(out.ctypes.data, *out.strides),
                lse.ctypes.data,
                *(p.Hq, p.group, p.Nq, p.Nk, p.D, p.Dv),
                *(streams, heads, rows, n_tiles, per_task, tasks_per_stream),
                *(p.q_offset.ctypes.data, p.q_lens.ctypes.data, p.kv_lens.ctypes.data),
                *(int(p.causal), left, right),
                *(functions.ctypes.data, len(bound)),
                control.ctypes.data,
                *(scratch_at, scratch_bytes),
                *areas,
                p.scale,
            )
        ],
        _ARGS,
    )
    run(address, args, control, threads, flops, progress)
