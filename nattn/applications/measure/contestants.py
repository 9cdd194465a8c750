"""Contestants in processes of their own.

Thread pools that spin while they wait slow down whoever comes next, and two OpenMP runtimes in one
process fight for the processors.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

from ... import backends
from .cases import Case
from .clock import Call, timed
from .memory import PeakMemory
from .peers import Unsupported, prepare


class Contestant:
    """A contestant in a process of its own, asked over a pipe.

    Parameters
    ----------
    name : str
        A key of `PREPARE`.
    threads : int
        Threads that it may use.
    environment : mapping of str to str, optional
        Environment variables of its process.

    Notes
    -----
    Use it as a context manager: the process ends with the block. A case that it cannot do raises
    `Unsupported`; a process that dies raises RuntimeError.
    """

    def __init__(
        self, name: str, threads: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        threading = dict.fromkeys(THREAD_VARIABLES, str(threads))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, threads), daemon=True)
        with _environment(threading | dict(environment or {})):
            self._process.start()
        theirs.close()

    def prepare(self, case: Case) -> None:
        """Make a case ready and check its result; forget the case before."""
        self._ask("prepare", case)

    def sample(self, at_least: float = 0.05) -> float:
        """Return the seconds one call takes, repeating for `at_least` seconds."""
        return float(self._ask("sample", at_least))

    def extra_memory(self) -> int:
        """Return the bytes by which one call's memory peak exceeds inputs and output."""
        return int(self._ask("memory", None))

    def peak(self, dtype: str = "float32") -> float:
        """Return the processor's FMA peak for its threads and instruction set, in GFLOP/s."""
        return float(self._ask("peak", dtype))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, what: str, argument: Any) -> Any:
        try:
            self._pipe.send((what, argument))
            reply = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise RuntimeError(
                f"{self.name}: its process ended with code {self._process.exitcode}"
            ) from None
        if isinstance(reply, Exception):
            raise reply
        return reply


THREAD_VARIABLES = (
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Environment variables that libraries read their number of threads from, on import."""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that a block starts."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _serve(pipe: Connection, name: str, threads: int) -> None:
    """Answer requests until the pipe closes; an exception is sent as an answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this
    call: Call = _nothing_prepared
    while True:
        try:
            what, argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if what == "prepare":
                call = _nothing_prepared  # frees the last case before the next is made
                call = prepare(name, argument, threads)
                reply: Any = None
            elif what == "sample":
                reply = timed(call, argument)()
            elif what == "memory":
                reply = _extra_memory(call)
            else:
                reply = backends.load("cpu").fma_peak(argument, threads)
        except (Unsupported, ArithmeticError) as error:
            reply = error
        except Exception as error:  # a library's own type may not be picklable
            reply = RuntimeError(f"{name}: {type(error).__name__}: {error}")
        pipe.send(reply)


def _nothing_prepared() -> Any:
    raise RuntimeError("no case is prepared")


def _extra_memory(call: Call) -> int:
    with PeakMemory() as memory:
        out = call()
    return max(0, memory.bytes - int(out.nbytes))
