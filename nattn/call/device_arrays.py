"""Arrays on a GPU, described by NumPy views that nothing reads.

Shapes, strides, broadcasting, layouts and overlaps are the same questions in host memory and on a
GPU, so a GPU array becomes a NumPy array of its device address: a `DeviceArray`, which can be
viewed and broadcast, and raises TypeError where its numbers would be read. `describe` makes one of
whatever library's array, and `allocator_like` tells how to allocate a result of the same kind.

No library for GPUs is imported here before one of its arrays is seen.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..vectors import dtypes


class CudaArray(Protocol):
    """What has a CUDA array interface: arrays of Numba, CuPy and torch on a GPU, for three."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Address, shape, strides and type of the array."""


class DLPackArray(Protocol):
    """What another library can read in place: arrays of most libraries."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule that describes the memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of the device and its number."""


@dataclass(frozen=True, eq=False)
class DeviceSource:
    """Where a `DeviceArray` comes from.

    Attributes
    ----------
    owner : object
        The array as it was passed, kept alive.
    library : {"torch", "cupy", "numba"}
        What allocates arrays like it; "numba" for all but arrays of torch and CuPy.
    device : int or None
        Which GPU; None if the array does not tell.
    stream : int or None
        Handle of the stream whose work the array waits for, if its interface names one.
    keepalive : object
        What else must live as long.
    """

    owner: Any
    library: str
    device: int | None
    stream: int | None = None
    keepalive: Any = None

    def __str__(self) -> str:
        return "on a GPU" if self.device is None else f"on GPU {self.device}"


class DeviceArray(np.ndarray):
    """A view of device memory that knows its shape and is never read.

    Transposing, slicing, adding axes, reshaping without a copy, `np.broadcast_to` and
    `np.shares_memory` work and give a `DeviceArray`; all else raises TypeError. NumPy asks no one
    before `np.asarray`, `np.array`, `memoryview` and ``host[...] = device``: do not do that.

    Attributes
    ----------
    source : DeviceSource
        Where it comes from.
    """

    source: DeviceSource

    __array_ufunc__ = None  # type: ignore[assignment]

    def __array_finalize__(self, obj: Any) -> None:
        self.source = getattr(obj, "source", None)  # type: ignore[assignment]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.broadcast_to:
            return super().__array_function__(func, types, args, {**kwargs, "subok": True})
        if func in (np.shares_memory, np.may_share_memory, np.shape, np.ndim, np.size):
            return func(*(plain(x) if isinstance(x, DeviceArray) else x for x in args), **kwargs)
        raise TypeError(f"np.{func.__name__} cannot read {self!r}")

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={dtypes.show(self.dtype)}, {self.source})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            basic = part is None or part is Ellipsis or isinstance(part, int | np.integer | slice)
            if not basic or isinstance(part, bool):
                raise TypeError(f"only integers, slices and new axes index {self!r}, got {part!r}")
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, Ellipsis)  # which makes a view of a single element, too
        return super().__getitem__(parts)

    def reshape(self, *shape: Any) -> Any:  # type: ignore[override]
        """Return a view of another shape; TypeError where that takes a copy."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        try:
            if _RESHAPE_MAY_BE_TOLD:
                return np.ndarray.reshape(self, wanted, copy=False)
            view = self.view()
            view.shape = wanted  # never copies
        except (AttributeError, ValueError) as error:
            raise TypeError(f"cannot view {self!r} as one of shape {wanted}: {error}") from None
        return view

    def view(self) -> Self:  # type: ignore[override]
        """Return another view of the same memory."""
        return np.ndarray.view(self)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the array itself if it has the dtype."""
        if np.dtype(dtype) != self.dtype:
            raise TypeError(f"cannot convert {self!r} to {dtype} without reading it")
        return self


_RESHAPE_MAY_BE_TOLD = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # not to copy

_HARMLESS = {
    *("T", "base", "ctypes", "dtype", "flags", "itemsize", "mT", "nbytes", "ndim", "shape", "size"),
    *("squeeze", "strides", "swapaxes", "transpose"),
    *("__array_priority__", "__array_wrap__", "__class_getitem__", "__len__", "__sizeof__"),
}
"""What an array may be asked that lies on a GPU, beside what every object has."""


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: DeviceArray, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{name} cannot read {self!r}")

    return refuse


_UNTOUCHED = {"__new__", "__doc__", "__hash__", *_HARMLESS, *vars(DeviceArray)}
for _name, _own in vars(np.ndarray).items():
    if _name not in _UNTOUCHED:
        _new = _refused(_name)
        setattr(DeviceArray, _name, _new if callable(_own) else property(_new))
del _name, _own, _new


def plain(x: DeviceArray) -> NDArray[Any]:
    """Return an ordinary NumPy array of the same memory, to be passed on with great care."""
    return np.ndarray.view(x, np.ndarray)


@dataclass(frozen=True)
class _Address:
    """Memory as NumPy takes it."""

    __array_interface__: dict[str, Any]


def _view(
    name: str,
    source: DeviceSource,
    address: int,
    shape: Any,
    strides: Any,
    dtype: np.dtype,
    readonly: bool = False,
) -> DeviceArray:
    """Describe memory; strides are in bytes, None for those of C order."""
    if not dtype.isnative:
        raise TypeError(f"{name}: expected native byte order {source}, got {dtype.str}")
    shape = tuple(map(int, shape))
    if address == 0 and 0 not in shape:
        raise TypeError(f"{name}: expected the address of an array of shape {shape}, got none")
    bits = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(dtype.itemsize)
    if bits is None or dtype.hasobject:
        raise TypeError(f"{name}: expected numbers, got dtype {dtype}")
    interface = {
        "version": 3,
        "shape": shape,
        "strides": None if strides is None else tuple(map(int, strides)),
        "typestr": np.dtype(bits).str,
        "data": (address, bool(readonly)),
    }
    found = np.asarray(_Address(interface)).view(dtype).view(DeviceArray)
    found.source = source
    return found


# Arrays of all libraries

_HOST = (np.ndarray, np.generic, int, float, complex, str, bytes, list, tuple, type(None))
_CUDA_OF_DLPACK = (2, 13)  # a GPU's own memory, and memory that it shares with the host
_LEGACY_STREAM = 1


def describe(name: str, value: Any) -> DeviceArray | None:
    """Return a view of an array on a GPU, None for anything else.

    Parameters
    ----------
    name : str
        What to call it in an error.
    value : object
        An array with a CUDA array interface (version 2 or 3), a torch tensor, of bfloat16 and with
        a gradient too, or an array with DLPack alone.

    Raises
    ------
    TypeError
        If it is an array on a GPU that cannot be taken as it is.
    """
    if type(value) is DeviceArray:
        return value
    if isinstance(value, _HOST):
        return None
    if is_torch(value):
        return _describe_torch(name, value) if value.is_cuda else None
    interface, failure = None, None
    try:
        interface = value.__cuda_array_interface__
    except AttributeError:
        if getattr(type(value), "__cuda_ndarray__", False):  # of Numba's simulator
            interface = {**value.__array_interface__, "strides": value.strides}
    except Exception as error:  # of JAX for bfloat16, which DLPack can express
        failure = error
    if interface is not None:
        return _describe_interface(name, value, interface)
    if hasattr(value, "__dlpack_device__"):
        device, number = value.__dlpack_device__()
        return _describe_dlpack(name, value, number) if device in _CUDA_OF_DLPACK else None
    if failure is not None:
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}: {failure}")
    return None


def is_torch(value: Any) -> bool:
    """Whether something is a torch tensor; torch need not be there to tell."""
    kind = type(value)
    found = _is_tensor.get(kind)
    if found is None:
        found = any(c.__name__ == "Tensor" and c.__module__ == "torch" for c in kind.__mro__)
        _is_tensor[kind] = found
    return found


_is_tensor: dict[type, bool] = {}
"""What is known of types; a dict, for torch's compiler looks into functions that are cached."""


_OF_TORCH = {"bool", "float16", "bfloat16", "float32", "float64"}
_OF_TORCH |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _describe_torch(name: str, tensor: Any) -> DeviceArray:
    """Read a tensor's address itself: its own interface knows no bfloat16 and no gradients."""
    if str(tensor.layout) != "torch.strided" or tensor.is_neg():
        raise TypeError(
            f"{name}: expected a dense tensor that is no lazy negative, got {tensor.layout}; pass "
            f"{name}.to_dense() or {name}.resolve_neg()"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _OF_TORCH:
        raise TypeError(f"{name}: expected a tensor of real numbers, got {tensor.dtype}")
    found = dtypes.storage_dtype(dtype)
    strides = [n * found.itemsize for n in tensor.stride()]
    source = DeviceSource(tensor, "torch", tensor.device.index)
    return _view(name, source, tensor.data_ptr(), tensor.shape, strides, found)


def _describe_interface(name: str, value: Any, interface: Any) -> DeviceArray:
    version = interface.get("version")
    if version not in (2, 3):
        raise TypeError(
            f"{name}: expected version 2 or 3 of the CUDA array interface, got {version}"
        )
    if interface.get("mask") is not None:
        raise TypeError(
            f"{name}: expected a plain array, got a masked array, whose mask would be ignored"
        )
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V" and dtype.itemsize == 2:  # what is not NumPy's own is void there
        named = getattr(value, "dtype", None)
        if getattr(named, "name", str(named)) == "bfloat16" or named == dtypes.BFLOAT16_BITS:
            dtype = dtypes.bfloat16()
    address, readonly = interface["data"]
    library = "cupy" if _is_cupy(value) else "numba"
    source = DeviceSource(value, library, _device(value), interface.get("stream"))
    shape, strides = interface["shape"], interface.get("strides")
    return _view(name, source, address or 0, shape, strides, dtype, readonly)


def _is_cupy(value: Any) -> bool:
    return any(c.__module__.split(".")[0] == "cupy" for c in type(value).__mro__)


def _device(value: Any) -> int | None:
    """Return the number of the GPU that an array lies on, if CuPy or Numba tells."""
    for path in (("device", "id"), ("gpu_data", "context", "device", "id")):
        found = value
        for attribute in path:
            found = getattr(found, attribute, None)
        if type(found) is int:
            return found
    return None


def _describe_dlpack(name: str, value: Any, device: int) -> DeviceArray:
    try:
        view_class = importlib.import_module("cuda.core.utils").StridedMemoryView
    except ImportError as error:
        raise TypeError(
            f"{name}: expected an array with __cuda_array_interface__, got {type(value).__name__}, "
            f"which has DLPack alone: that takes the package cuda-core ({error})"
        ) from None
    try:
        # what is pending on the array comes before what the default stream gets
        view = view_class.from_dlpack(value, stream_ptr=_LEGACY_STREAM)
        dtype = view.dtype
    except (BufferError, NotImplementedError) as error:
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}: {error}") from None
    source = DeviceSource(value, "numba", device, stream=_LEGACY_STREAM, keepalive=view)
    strides = view.strides
    if strides is not None:
        strides = [n * dtype.itemsize for n in strides]
    return _view(name, source, view.ptr, view.shape, strides, dtype, view.readonly)


# Results of the same kind, and numbers that are needed here


@dataclass(frozen=True, eq=False)
class Allocator:
    """How the results of a call with device arrays are made: like its q.

    Attributes
    ----------
    source : DeviceSource
        Where q comes from.
    """

    source: DeviceSource

    @property
    def name(self) -> str:
        """The library that allocates: "torch", "cupy" or "numba"."""
        return self.source.library

    @property
    def device(self) -> int | None:
        """Which GPU, if it is known."""
        return self.source.device

    @property
    def stream(self) -> int:
        """Handle of the stream to work on: the library's current one, or that of q, or 0."""
        if self.name == "torch":
            stream = sys.modules["torch"].cuda.current_stream(self.source.owner.device)
            return int(stream.cuda_stream)
        if self.name == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device):
                return int(cupy.cuda.get_current_stream().ptr)
        return self.source.stream or 0

    def empty(self, shape: tuple[int, ...], storage: str) -> Any:
        """Return a new array on the same device, in C order, with undefined contents."""
        shape = tuple(map(int, shape))
        if self.name == "torch":
            torch = sys.modules["torch"]
            dtype = getattr(torch, storage)
            return torch.empty(shape, dtype=dtype, device=self.source.owner.device)
        if self.name == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device):
                return cupy.empty(shape, dtypes.storage_dtype(storage))
        cuda = importlib.import_module("numba.cuda")
        # That the array names the stream makes others wait for what is queued there.
        stream = cuda.external_stream(self.stream) if self.stream else 0
        with on_device(self.device):
            return cuda.device_array(shape, dtypes.storage_dtype(storage), stream=stream)


def on_device(number: int | None) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is Numba's current one; None leaves that as it is."""
    if number is None:
        return nullcontext()
    found: AbstractContextManager[Any] = importlib.import_module("numba.cuda").gpus[number]
    return found


def allocator_like(x: DeviceArray) -> Allocator:
    """Return how to make arrays like the one that a view describes."""
    return Allocator(x.source)


def copied(x: DeviceArray) -> NDArray[Any]:
    """Return the numbers of a small array, copied from the GPU once they are computed."""
    owner, library = x.source.owner, x.source.library
    if library == "torch":
        owner = owner.detach()
        if dtypes.storage_name(x.dtype) == "bfloat16":  # which torch does not hand to NumPy
            owner = owner.view(sys.modules["torch"].int16)
        return np.asarray(owner.cpu().numpy()).view(x.dtype)
    if library == "cupy":
        return np.asarray(sys.modules["cupy"].asnumpy(owner)).view(x.dtype)
    if x.size == 0:
        return np.empty(x.shape, x.dtype)
    first, end = np.lib.array_utils.byte_bounds(plain(x))
    data = _bytes(x.source, first, end - first)
    offset = x.ctypes.data - first
    return np.ndarray(x.shape, x.dtype, data, offset, x.strides).copy()


def _bytes(source: DeviceSource, address: int, size: int) -> bytes:
    """Copy memory of a GPU."""
    cuda = importlib.import_module("numba.cuda")
    if not hasattr(cuda, "from_cuda_array_interface"):  # its simulator keeps all in host memory
        return ctypes.string_at(address, size)
    interface = {"version": 3, "shape": (size,), "strides": None, "typestr": "|u1"}
    interface |= {"data": (address, False), "stream": source.stream}
    with on_device(source.device):
        there = cuda.from_cuda_array_interface(interface, owner=source.owner)
        found: NDArray[np.uint8] = there.copy_to_host()
    return found.tobytes()
