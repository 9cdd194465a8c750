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
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba.np.ufunc import parallel as numba_parallel
from numpy.typing import NDArray

from ..lanes import Tile
from ..problem import Problem
from . import score, tiles
from .forward import ARGS, forward_worker

Progress = Callable[[float], object]

SHORT = 5e9
"""Floating-point operations up to which the calling thread works itself instead of waiting: it
cannot be interrupted for some hundredths of a second, and one thread less has to be woken."""

TINY = 5e6
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


def new_control(n_tasks: int) -> Control:
    """Return the shared state of workers that are to run so many tasks."""
    return (ctypes.c_int64 * 2)(0, n_tasks)


def thread_count() -> int:
    """Return the number of threads to use: what ``numba.set_num_threads`` says.

    Asking Numba starts its threading layer; before anyone has, its default holds.
    """
    if getattr(numba_parallel, "_is_initialized", False):
        return int(numba.get_num_threads())
    return int(numba.config.NUMBA_NUM_THREADS)


MOST_SPARE = 1 << 24
"""Bytes of scratch that a thread keeps between calls at most."""

Control = ctypes.Array[ctypes.c_int64]
"""Shared by the workers: the next task, and the number of tasks (0 stops everyone)."""

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)
_pack = struct.Struct(f"{len(ARGS.integers)}q{len(ARGS.reals)}d").pack


@functools.cache
def _callable(address: int) -> Any:
    """Return a compiled worker as a function that releases the GIL."""
    return _WORKER(address)


def _job(worker: Callable[[int, bytes], None], slot: int, args: bytes, keep: object) -> None:
    """Run a worker; `keep` holds whatever its addresses point to, as long as it runs."""
    worker(slot, args)


def run(
    address: int,
    args: bytes,
    control: Control,
    threads: int,
    flops: float,
    *,
    keep: object,
    progress: Progress | None = None,
) -> None:
    """Run a worker on several threads until its tasks are done.

    A KeyboardInterrupt stops the workers at their next block of keys, and is raised when the last
    one has stopped: nobody writes afterwards.

    Parameters
    ----------
    address : int
        Of a compiled ``void(slot, args)``.
    args : bytes
        The record that every worker gets.
    control : Control
        The shared state that `args` points to.
    threads : int
        Workers; each gets its own slot, from 0 on.
    flops : float
        About how much there is to do: decides whether the calling thread works or waits.
    keep : object
        Kept alive until the last worker is done.
    progress : callable, optional
        Called from the calling thread with the fraction that is done.
    """
    worker = _callable(address)
    if threads == 1 and flops < SHORT:
        worker(0, args)
        return
    main = threading.current_thread() is threading.main_thread()
    waits = flops >= SHORT and (main or progress is not None)
    futures: list[Future[None]] = []
    try:
        try:
            pool = _executor()
            slots = range(0 if waits else 1, threads)
            futures.extend(pool.submit(_job, worker, slot, args, keep) for slot in slots)
        except RuntimeError:
            pass  # the interpreter shuts down and starts no more threads
        if not (waits and futures):
            worker(0, args)
        _wait(futures, control, progress)
    except BaseException:
        control[1] = 0
        _settle(futures)
        raise


def _wait(futures: list[Future[None]], control: Control, progress: Progress | None) -> None:
    total = control[1]
    while wait(futures, timeout=0.1).not_done:
        if progress is not None:
            progress(max(0.0, min(1.0, (control[0] - len(futures)) / total)))
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


@dataclass(frozen=True)
class Plan:
    """How a problem of certain sizes is cut up."""

    tile: Tile
    worker: int
    sizes: tuple[int, ...]  # the fields of ARGS from Hq to tasks_per_stream
    areas: tuple[int, ...]
    scratch_bytes: int
    n_tasks: int


@functools.lru_cache(maxsize=4096)
def plan(
    dtype: str, B: int, Hq: int, group: int, Nq: int, Nk: int, D: int, Dv: int, threads: int
) -> Plan:
    """Choose tiles, tasks and scratch; compile the kernel if need be."""
    # Heads that share their keys form one stream where together they fit in one tile: separately
    # each would leave most lanes empty.
    packed = group > 1 and Nq * 2 <= tiles.choose_tile(dtype, group * Nq).lanes
    heads = group if packed else 1
    streams, rows = Hq // heads, Nq * heads
    tile = tiles.choose_tile(dtype, rows)
    block = tiles.block_kv(tile, D)
    n_tiles = -(-rows // tile.lanes)
    per_task = tiles.tiles_per_task(tile, block, D, Dv, n_tiles, B * streams, threads)
    tasks_per_stream = -(-n_tiles // per_task)
    layout = tiles.scratch_layout(tile, block, per_task, D, Dv)
    return Plan(
        tile,
        forward_worker(tile, block),
        (Hq, group, Nq, Nk, D, Dv, streams, heads, rows, n_tiles, per_task, tasks_per_stream),
        tuple(layout[name] for name in tiles.AREAS),
        layout["end"],
        B * streams * tasks_per_stream,
    )


class _Scratch(threading.local):
    """Scratch memory that the calling thread keeps for its next call."""

    def __init__(self) -> None:
        self.spare: NDArray[np.uint8] | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return at least `size` bytes; a call from within a call (progress) gets its own."""
        spare, self.spare = self.spare, None
        return spare if spare is not None and spare.size >= size else np.empty(size, np.uint8)

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep it, unless it is large."""
        if memory.size <= MOST_SPARE:
            self.spare = memory


_scratch = _Scratch()


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
    dtype = "float32" if p.dtype.itemsize == 4 else "float64"
    flops = 2.0 * p.B * p.Hq * p.Nq * p.Nk * (p.D + p.Dv)
    threads = 1 if flops < TINY else thread_count()
    todo = plan(dtype, p.B, p.Hq, p.group, p.Nq, p.Nk, p.D, p.Dv, threads)
    threads = min(threads, todo.n_tasks)
    scratch = _scratch.take(threads * todo.scratch_bytes + 64)
    control = new_control(todo.n_tasks)
    bound = [
        score.operand_function(todo.tile, operand)
        for operand in (p.bias, p.mask)
        if operand is not None
    ]
    functions = np.array([(f, params.ctypes.data) for f, params in bound], np.int64)
    left, right = p.window
    args = _pack(
        *(p.q.ctypes.data, *p.q.strides),
        *(p.k.ctypes.data, *p.k.strides),
        *(p.v.ctypes.data, *p.v.strides),
        *(out.ctypes.data, *out.strides),
        lse.ctypes.data,
        *todo.sizes,
        *(p.q_offset.ctypes.data, p.q_lens.ctypes.data, p.kv_lens.ctypes.data),
        *(p.causal, -1 if left is None else left, -1 if right is None else right),
        *(functions.ctypes.data, len(bound)),
        ctypes.addressof(control),
        *(-(-scratch.ctypes.data // 64) * 64, todo.scratch_bytes),
        *todo.areas,
        p.scale,
    )
    keep = (problem, out, lse, scratch, control, bound, functions)
    run(todo.worker, args, control, threads, flops, keep=keep, progress=progress)
    _scratch.give_back(scratch)
