"""Arrays on the device: a call's copies of host arrays, its buffers, its stream.

In the simulator the device's memory is the host's.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...call.device_arrays import DeviceArray
from .target import SIMULATED, Kernel, load, record, store


class DeviceMemory:
    """What one call holds on the device, on one stream.

    Parameters
    ----------
    stream : int
        Handle of the stream that the call's work is queued on, 0 for the default one.
    """

    def __init__(self, stream: int = 0) -> None:
        self.handle = stream
        self.stream: Any = cuda.external_stream(stream) if stream and not SIMULATED else 0
        self._keepalive: list[Any] = []

    def upload(self, array: NDArray[Any]) -> int:
        """Return the address of a contiguous copy of a host array; that of a device array."""
        if isinstance(array, DeviceArray):
            self._keepalive.append(array)
            return int(array.ctypes.data)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if SIMULATED:
            copy = np.empty(raw.size + 16, np.uint8)
            start = -copy.ctypes.data % 16  # as a GPU aligns what it allocates
            copy[start : start + raw.size] = raw
            self._keepalive.append(copy)
            return int(copy.ctypes.data) + start
        device = cuda.to_device(raw, stream=self.stream) if raw.size else None
        self._keepalive.append(device)
        return _address(device)

    def view(self, array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
        """Return address and byte strides of an array on the device; a host array is copied.

        What is broadcast is not copied more than once.
        """
        if isinstance(array, DeviceArray):
            return self.upload(array), array.strides
        once = array[tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)]
        copy = np.ascontiguousarray(once)
        strides = tuple(
            0 if old == 0 else new for old, new in zip(array.strides, copy.strides, strict=True)
        )
        return self.upload(copy), strides

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceBuffer:
        """Return an uninitialised contiguous array."""
        made = DeviceBuffer(self, shape, np.dtype(dtype))
        self._keepalive.append(made)
        return made

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceBuffer:
        """Return a contiguous array of zeros."""
        made = self.empty(shape, dtype)
        made.clear()
        return made


class DeviceBuffer:
    """A contiguous array on the device."""

    def __init__(self, memory: DeviceMemory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype, self._stream = shape, dtype, memory.stream
        self.strides = tuple(np.cumprod([dtype.itemsize, *shape[:0:-1]])[::-1].tolist())
        size = int(np.prod(shape)) * dtype.itemsize
        if SIMULATED:
            self._array: Any = np.empty(size, np.uint8)
            self.ptr = int(self._array.ctypes.data) if size else 0
        else:
            self._array = cuda.device_array(size, np.uint8, stream=self._stream) if size else None
            self.ptr = _address(self._array)

    def clear(self) -> None:
        """Set all elements to 0."""
        if SIMULATED:
            self._array[:] = 0
        elif self._array is not None:
            cuda.cudadrv.driver.device_memset(
                self._array, 0, self._array.nbytes, stream=self._stream
            )

    def to_host(self) -> NDArray[Any]:
        """Return a copy, when everything before it on the stream is done."""
        if SIMULATED:
            raw = self._array.copy()
        elif self._array is None:
            raw = np.empty(0, np.uint8)
        else:
            raw = self._array.copy_to_host(stream=self._stream)
            if self._stream:
                self._stream.synchronize()
        result: NDArray[Any] = raw.view(self.dtype).reshape(self.shape)
        return result


def _address(array: Any) -> int:
    if array is None:
        return 0
    return int(array.__cuda_array_interface__["data"][0])


class SmallArrays:
    """Small host arrays that reach the device together, in one copy."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._chunks: list[NDArray[np.uint8]] = []
        self._size = 0

    def add(self, array: NDArray[Any]) -> int:
        """Add an array; return its place, from where `upload` says that they begin."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = self._size
        self._chunks += [raw, np.zeros(-raw.size % 16, np.uint8)]
        self._size += raw.size + -raw.size % 16
        return at

    def upload(self) -> int:
        """Return the address at which they begin."""
        return self._memory.upload(np.concatenate(self._chunks))


COPY_ARGS = record("CopyArgs", ("to_ptr", "B", "H", "N", "from_ptr", "b", "h", "n"))
"""Address of a contiguous (B, H, N) array; address and byte strides of what is copied there."""


@functools.cache
def copy_kernel(name: str) -> Kernel:
    """Return the kernel that copies (B, H, N) floats; a block has one head."""
    threads = 2 if SIMULATED else 256
    itemsize = 8 if name == "float64" else 4
    read, write = load(name), store(name)

    def kernel(a):
        index = cuda.blockIdx.x
        row_ptr = a.from_ptr + index // a.H * a.b + index % a.H * a.h
        for n in range(cuda.threadIdx.x, a.N, threads):
            write(a.to_ptr + (index * a.N + n) * itemsize, read(row_ptr + n * a.n))

    return Kernel(kernel, threads)
