"""Jobs: compiled workers without the GIL, on threads of our own.

A job is a worker, a record of what it works on and a number of tasks; every thread takes the next
task from a shared counter, so that a slow core does not hold up the others. The thread that calls
works itself if the job is short, and else waits, open to Ctrl-C. Numba's own threading layers are
not involved: a fork, a process pool or another thread's parallel kernel is no danger.

A call does not wait for workers that come late, and its scratch memory serves the next call. So a
worker may touch nothing but its own record and the job's state until it is known that the job is
not over. That is not left to the kernels: the record of a job (`job_record`) says nothing of
scratch, and the only way to its address is `enter`, which first counts the worker in and then
looks whether there is a task left. A job on which a worker is counted does not end.

    def worker(slot, args):
        a = view(ARGS, args)
        scratch, error_flags = enter(a.job_ptr, slot), 0
        if scratch == 0:
            return
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
            ...
        leave(a.job_ptr, slot, error_flags)

Why not `concurrent.futures`: a future, its lock and the wait for it take a tenth of a call of
three milliseconds. Here a short call waits for nothing but the other workers' last tasks.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
import threading
import time
from _thread import LockType
from queue import SimpleQueue
from typing import Any

import numba
import numpy as np
from numba.np.ufunc import parallel as numba_parallel
from numpy.typing import NDArray

from ...call.progress import Progress
from ...vectors.lanes import Struct, atomic_add, atomic_or, view
from .jit import device

TINY = 5e6
"""Floating-point operations up to which the calling thread is done before another had begun."""

SHORT = 5e9
"""Floating-point operations up to which the calling thread works itself instead of waiting: it
cannot be interrupted for some hundredths of a second, and one thread less has to be woken."""

MOST_SPARE = 1 << 24
"""Bytes of scratch that a thread keeps between calls at most."""

LINE = 64
"""Bytes of a cache line: each worker's scratch begins on one."""

_SPINS = 10_000
"""How often a worker that is done looks whether the others are: about a tenth of a millisecond,
which is less than it takes to go to sleep and be woken."""

_MOST_THREADS = 8 * max(os.cpu_count() or 1, numba.config.NUMBA_NUM_THREADS)

JOB = Struct(
    "Job",
    # the next task; their number, 0 stops all; workers at work; what went wrong, a bit for each
    # that can; scratch: its address, and bytes for each worker
    ("next_task", "n_tasks", "n_workers", "error_flags", "scratch_ptr", "scratch_bytes"),
)
"""The state that the workers of a job share."""

_NEXT_TASK, _N_TASKS, _N_WORKERS, _ERROR_FLAGS = (JOB.names.index(n) for n in JOB.names[:4])
_STATE = ctypes.c_int64 * len(JOB.names)

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)


def job_record(
    name: str, integers: tuple[str | tuple[str, Struct], ...], reals: tuple[str, ...] = ()
) -> Struct:
    """Return the record that the workers of a job get: `run_job` fills in the first field."""
    return Struct(name, ("job_ptr", *integers), reals)


# What a worker does with the address of its job:


@device
def enter(job_ptr, slot):
    """Begin: return the address of the worker's scratch, or 0 if there is nothing left to do.

    The order matters: once the worker is counted, a job that has a task left does not end before it
    leaves, and the scratch is its own until then. (A job without scratch gets some address.)
    """
    job = view(JOB, job_ptr)
    atomic_add(job_ptr + 8 * _N_WORKERS, 1)
    if atomic_add(job_ptr + 8 * _NEXT_TASK, 0) >= job.n_tasks:
        atomic_add(job_ptr + 8 * _N_WORKERS, -1)
        return 0
    return job.scratch_ptr + slot * job.scratch_bytes


@device
def take_task(job_ptr):
    """Return the number of the next task, or -1 when there is none left."""
    task = atomic_add(job_ptr + 8 * _NEXT_TASK, 1)
    return task if task < view(JOB, job_ptr).n_tasks else -1


@device
def stopped(job_ptr):
    """Return whether the job has been interrupted."""
    return view(JOB, job_ptr).n_tasks == 0


@device
def leave(job_ptr, slot, error_flags):
    """End; the first worker waits a moment for the others."""
    if error_flags:
        atomic_or(job_ptr + 8 * _ERROR_FLAGS, error_flags)
    atomic_add(job_ptr + 8 * _N_WORKERS, -1)
    if slot == 0:
        for _ in range(_SPINS):
            if atomic_add(job_ptr + 8 * _N_WORKERS, 0) == 0:
                break


# What the host does


def run_job(
    worker: int,
    record: Struct,
    fields: dict[str, Any],
    *,
    n_tasks: int,
    n_threads: int = 1,
    scratch_bytes: int = 0,
    flops: float,
    keepalive: object,
    progress: Progress | None = None,
) -> int:
    """Run a compiled worker on several threads until its tasks are done.

    A KeyboardInterrupt stops the workers at their next look at `stopped` or `take_task`, and is
    raised when the last one has stopped: nobody writes afterwards.

    Parameters
    ----------
    worker : int
        Address of a compiled ``void(slot, args)``.
    record : Struct
        What the worker gets, made by `job_record`.
    fields : dict
        A value for each of its fields but the first, which is added.
    n_tasks : int
        Number of tasks.
    n_threads : int, default 1
        Workers at most; each gets its own slot, from 0 on.
    scratch_bytes : int, default 0
        What each worker gets of scratch memory.
    flops : float
        About how much there is to do: decides whether the calling thread works or waits.
    keepalive : object
        What the fields point to; kept until the last worker is done.
    progress : callable, optional
        Called from the calling thread with the fraction that is done.

    Returns
    -------
    int
        The error flags that the workers have left.

    Raises
    ------
    TypeError
        If a field is missing, or there is one that the record does not have.
    """
    n_threads = min(n_threads, n_tasks)
    each = -(-scratch_bytes // LINE) * LINE
    scratch = _scratch.take(n_threads * each + LINE)
    start = -(-scratch.ctypes.data // LINE) * LINE
    state = _STATE(0, n_tasks, 0, 0, start, each)
    fields["job_ptr"] = ctypes.addressof(state)
    args = record.pack(fields)
    _run(worker, args, state, n_threads, flops, (keepalive, scratch, state), progress)
    _scratch.give_back(scratch)
    return state[_ERROR_FLAGS]


def address(array: NDArray[Any] | None) -> int:
    """Return where an array begins, or 0 if there is none."""
    return 0 if array is None else int(array.ctypes.data)


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


class _Pool:
    """Threads that wait for work, started when they are first needed.

    A signal handler or a ``__del__`` may call attention at any moment, in the middle of `submit`
    too. So no lock is held here that the same thread could meet again: the only one is reentrant,
    and threads are started without those that `threading.Thread` takes. They end with the process.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._count = 0
        self._pending = 0  # queued or running
        self._lock = threading.RLock()

    def submit(
        self, worker: Any, slots: range, args: bytes, keepalive: object, doors: list[LockType]
    ) -> None:
        """Queue a worker for each slot; add locks to `doors` that open when they are done."""
        with self._lock, contextlib.suppress(RuntimeError):  # no new threads at shutdown
            # Another thread's jobs may keep ours busy: a call must not wait for those.
            while self._count < min(self._pending + len(slots), _MOST_THREADS):
                self._count += 1
                try:
                    _thread.start_new_thread(self._serve, ())
                except BaseException:
                    self._count -= 1
                    raise
        if self._count == 0:
            return
        for slot in slots:
            door = threading.Lock()
            door.acquire()
            with self._lock:
                self._pending += 1
            doors.append(door)
            self._jobs.put((worker, slot, args, keepalive, door))

    def _serve(self) -> None:
        while True:
            worker, slot, args, keepalive, door = self._jobs.get()
            worker(slot, args)
            door.release()
            with self._lock:
                self._pending -= 1
            del worker, args, keepalive, door  # hold no memory while idle


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


def _run(
    address: int,
    args: bytes,
    state: Any,
    n_threads: int,
    flops: float,
    keepalive: object,
    progress: Progress | None,
) -> None:
    worker = _callable(address)
    if n_threads == 1 and flops < SHORT:
        worker(0, args)
        return
    main = threading.current_thread() is threading.main_thread()
    waits = flops >= SHORT and (main or progress is not None)
    doors: list[LockType] = []
    try:
        _pool.submit(worker, range(0 if waits else 1, n_threads), args, keepalive, doors)
        if not (waits and doors):
            worker(0, args)
        # A worker that comes late finds no task: there is no need to wait for it.
        while state[_NEXT_TASK] < state[_N_TASKS] or state[_N_WORKERS]:
            if _opened(doors, 0.1 if waits else 0.002):
                break
            if progress is not None:
                done = (state[_NEXT_TASK] - len(doors)) / state[_N_TASKS]
                progress(max(0.0, min(1.0, done)))
        if progress is not None:
            progress(1.0)
    except BaseException:
        state[_N_TASKS] = 0
        _settle(doors, state)
        raise


def _opened(doors: list[LockType], timeout: float) -> bool:
    """Wait until all workers are done, or one of them takes longer than the timeout."""
    while doors:
        if not doors[-1].acquire(timeout=timeout):
            return False
        doors.pop()
    return True


def _settle(doors: list[LockType], state: Any) -> None:
    """Wait for workers that have been told to stop, through further interrupts."""
    settled = False
    while not settled:
        with contextlib.suppress(KeyboardInterrupt):
            if not _opened(doors, 0.1) or state[_N_WORKERS]:
                time.sleep(0.001)
            settled = state[_N_WORKERS] == 0
