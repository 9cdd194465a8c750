"""What numba-cuda's simulator runs in place of each intrinsic of `target`, and two mends of it.

The simulator runs kernels as plain Python on the host's memory. A twin takes what its intrinsic
takes, reads and writes the same bytes, with ctypes, and rounds as it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba.np import numpy_support

# Memory by address


def load(storage: str) -> Callable[[int], Any]:
    """Return the twin of ``target.load(storage)``."""
    return functools.partial(_load, storage)


def load4(storage: str, size: int) -> Callable[[int], tuple[Any, ...]]:
    """Return the twin of ``target.load4(storage)``, of floats of `size` bytes."""
    return lambda address: tuple(_load(storage, address + n * size) for n in range(4))


def store(storage: str) -> Callable[[int, Any], None]:
    """Return the twin of ``target.store(storage)``."""
    return functools.partial(_store, storage)


def read_int64(address: int) -> np.int64:
    """Read an int64."""
    return np.int64(ctypes.c_int64.from_address(int(address)).value)


def read_uint8(address: int) -> np.int64:
    """Read a byte."""
    return np.int64(ctypes.c_uint8.from_address(int(address)).value)


def write_int64(address: int, x: int) -> None:
    """Write an int64."""
    ctypes.c_int64.from_address(int(address)).value = int(x)


def _load(storage: str, address: int) -> Any:
    if storage == "float64":
        return np.float64(ctypes.c_double.from_address(int(address)).value)
    if storage == "float32":
        return np.float32(ctypes.c_float.from_address(int(address)).value)
    bits = ctypes.c_uint16.from_address(int(address)).value
    if storage == "bfloat16":
        return np.uint32(bits << 16).view(np.float32)
    return np.float32(np.uint16(bits).view(np.float16))


def _store(storage: str, address: int, x: Any) -> None:
    if storage == "float64":
        ctypes.c_double.from_address(int(address)).value = float(x)
        return
    with np.errstate(over="ignore"):
        x = np.float32(x)
        if storage == "float32":
            ctypes.c_float.from_address(int(address)).value = x
            return
        bits = int(np.float16(x).view(np.uint16) if storage == "float16" else _bfloat16_bits(x))
    ctypes.c_uint16.from_address(int(address)).value = bits


def _bfloat16_bits(x: Any) -> int:
    bits = int(np.float32(x).view(np.uint32))
    if x != x:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16) & 0xFFFF


# Within a kernel


def copy_group(count: int) -> Callable[[Any, int, Any, int], None]:
    """Return the twin of ``target.copy_group(count)``."""

    def copy(to: Any, n: int, shared: Any, at: int) -> None:
        for m in range(count):
            to[n + m] = shared[at + m]

    return copy


def is_hidden(x: Any) -> bool:
    """Tell whether a number is -0.0."""
    return bool(x == 0 and np.signbit(x))


def exp2(dtype: str) -> Callable[[Any], Any]:
    """Return the twin of ``target.exp2(dtype)``."""
    number = getattr(np, dtype)
    tiny = np.finfo(number).tiny

    def power(x: Any) -> Any:
        y = np.exp2(number(x))
        return number(0) if y < tiny else y

    return power


def in_silence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of NumPy's scalars that does not warn, as a GPU does not."""

    def silent(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return silent


# Mends of the simulator

_turn = threading.Lock()


def make_shared_arrays_once() -> None:
    """Let the threads of a block share their shared arrays whatever the moment they ask for them.

    The simulator looks for one and makes it in two steps: two threads that do so at once get one
    each, and share nothing. Here they take turns. It also refuses to align one.
    """

    def shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        caller = sys._getframe(1)
        place = caller.f_code.co_filename, caller.f_lineno
        with _turn:
            found = self._allocations.get(place)
            if found is None:
                found = np.empty(shape, numpy_support.as_dtype(dtype))
                self._allocations[place] = found
        return found

    api = importlib.import_module("numba.cuda.simulator.kernelapi")
    api.FakeCUDAShared.array = shared_array


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Let Python switch threads often: the simulator's scheduler spins while it waits."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # four times faster so
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
