"""Threads that run compiled workers.

A job is a compiled worker without the GIL and a list of tasks; every thread takes the next task
from a shared counter, so that a slow core does not hold up the others. The thread that calls
works itself if the job is short, and else waits, open to Ctrl-C. Numba's own threading layers are
not involved: a fork, a process pool or another thread's parallel kernel is no danger.

Why not `concurrent.futures`: a future, its lock and the wait for it take a tenth of a call of
three milliseconds. Here a short call waits for nothing but the other workers' last tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from _thread import LockType
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numba
from numba.np.ufunc import parallel as numba_parallel

from ...vectors.lanes import atomic_add, atomic_or, read_int64
from .jit import device

Progress = Callable[[float], object]

SHORT = 5e9
"""Floating-point operations up to which the calling thread works itself instead of waiting: it
cannot be interrupted for some hundredths of a second, and one thread less has to be woken."""

_SPINS = 10_000
"""How often a worker that is done looks whether the others are: about a tenth of a millisecond,
which is less than it takes to go to sleep and be woken."""

_MOST_THREADS = 8 * max(os.cpu_count() or 1, numba.config.NUMBA_NUM_THREADS)

Control = ctypes.Array[ctypes.c_int64]
"""The shared state of a job: next task, number of tasks (0 stops all), workers at work, and bits
that say what went wrong."""

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)


def new_control(n_tasks: int) -> Control:
    """Return the state of a job of so many tasks that nobody has begun."""
    return (ctypes.c_int64 * 4)(0, n_tasks, 0, 0)


# What a worker does with the address of its job's control:


@device
def enter(control):
    """Say that a worker begins; until it has a task it may touch nothing but the control."""
    atomic_add(control + 16, 1)


@device
def take_task(control):
    """Return the number of the next task, or -1 when there is none left."""
    task = atomic_add(control, 1)
    return task if task < read_int64(control + 8) else -1


@device
def stopped(control):
    """Return whether the job has been interrupted."""
    return read_int64(control + 8) == 0


@device
def leave(control, slot, trouble):
    """Say that a worker is done, and what went wrong; the first one waits a moment for the others.

    The bits of `trouble` are those that `troubles` returns.
    """
    if trouble:
        atomic_or(control + 24, trouble)
    atomic_add(control + 16, -1)
    if slot == 0:
        for _ in range(_SPINS):
            if atomic_add(control + 16, 0) == 0:
                break


def troubles(control: Control) -> int:
    """Return the bits of all that went wrong in a job."""
    return int(control[3])


class _Pool:
    """Daemon threads that wait for work, started when they are first needed."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._count = 0
        self._pending = 0  # queued or running
        self._lock = threading.Lock()

    def submit(
        self, worker: Any, slots: range, args: bytes, keep: object, doors: list[LockType]
    ) -> None:
        """Queue a worker for each slot; add locks to `doors` that open when they are done."""
        with self._lock, contextlib.suppress(RuntimeError):  # no new threads at shutdown
            # Another thread's jobs may keep ours busy: a call must not wait for those.
            while self._count < min(self._pending + len(slots), _MOST_THREADS):
                threading.Thread(target=self._serve, name="nattn", daemon=True).start()
                self._count += 1
        if self._count == 0:
            return
        for slot in slots:
            door = threading.Lock()
            door.acquire()
            with self._lock:
                self._pending += 1
            doors.append(door)
            self._jobs.put((worker, slot, args, keep, door))

    def _serve(self) -> None:
        while True:
            worker, slot, args, keep, door = self._jobs.get()
            worker(slot, args)
            door.release()
            with self._lock:
                self._pending -= 1
            del worker, args, keep, door  # hold no memory while idle


_pool = _Pool()


def _forget_threads() -> None:
    """Threads do not survive a fork: the child starts its own."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def thread_count() -> int:
    """Return the number of threads to use: what ``numba.set_num_threads`` says.

    Asking Numba starts its threading layer; before anyone has, its default holds.
    """
    if getattr(numba_parallel, "_is_initialized", False):
        return int(numba.get_num_threads())
    return int(numba.config.NUMBA_NUM_THREADS)


@functools.cache
def _callable(address: int) -> Any:
    """Return a compiled worker as a function that releases the GIL."""
    return _WORKER(address)


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
    doors: list[LockType] = []
    try:
        _pool.submit(worker, range(0 if waits else 1, threads), args, keep, doors)
        if not (waits and doors):
            worker(0, args)
        # A worker that comes late finds no task: there is no need to wait for it.
        while control[0] < control[1] or control[2]:
            if _opened(doors, 0.1 if waits else 0.002):
                break
            if progress is not None:
                progress(max(0.0, min(1.0, (control[0] - len(doors)) / control[1])))
        if progress is not None:
            progress(1.0)
    except BaseException:
        control[1] = 0
        _settle(doors, control)
        raise


def _opened(doors: list[LockType], timeout: float) -> bool:
    """Wait until all workers are done, or one of them takes longer than the timeout."""
    while doors:
        if not doors[-1].acquire(timeout=timeout):
            return False
        doors.pop()
    return True


def _settle(doors: list[LockType], control: Control) -> None:
    """Wait for workers that have been told to stop, through further interrupts."""
    settled = False
    while not settled:
        with contextlib.suppress(KeyboardInterrupt):
            if not _opened(doors, 0.1) or control[2]:
                time.sleep(0.001)
            settled = control[2] == 0
