"""Checks of single arguments: each raises with what was expected and what was got."""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..vectors import dtypes
from . import device_arrays, tensors
from .device_arrays import CudaArray, DeviceArray, DLPackArray
from .optional import require

HostArray = ArrayLike | DLPackArray
Array = HostArray | CudaArray
Integers = int | Array
Scale = float | np.floating[Any] | NDArray[Any]
Window = tuple[int | None, int | None]
Mod = Callable[..., Any]

FAR = 1 << 59
"""Farther than any array reaches; an int64 holds the sum of fifteen such numbers."""


def check_flag(name: str, value: object) -> bool:
    """Return a bool; refuse what is merely truthy, such as the string "False"."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {show(value)}")


def check_name(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise unless a string is among those that are known."""
    expected = ", ".join(map(repr, known[:-1])) + f" or {known[-1]!r}"
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected {expected}, got {show(value)}")
    if value not in known:
        raise ValueError(f"{name}: expected {expected}, got {show(value)}")


def show(value: object) -> str:
    """Describe what was got, briefly."""
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{type(value).__name__} of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"  # one of 4300 digits has no repr
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Convert what NumPy converts faithfully to an ndarray; refuse the rest."""
    if type(value) is np.ndarray:
        return value if value.dtype.kind != "V" else _as_bfloat16(name, value)
    if _is_masked(value):
        raise TypeError(
            f"{name}: expected a plain array, got a masked array, whose mask would be ignored; "
            "pass .data, and what is visible as the argument mask"
        )
    found = device_arrays.describe(name, value)
    if found is not None:
        return found
    if device_arrays.is_torch(value):
        return _as_bfloat16(name, tensors.view_of(name, value))
    if _has_dlpack_alone(value):
        return _from_dlpack(name, value)
    try:
        return _as_bfloat16(name, np.asarray(value))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: expected an array, got {show(value)}: {error}") from error


def _as_bfloat16(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """View bfloat16 under any name, and `dtypes.BFLOAT16_BITS`, as what ml_dtypes calls it."""
    if dtypes.storage_name(x.dtype) != "bfloat16":
        return x
    dtype = dtypes.bfloat16()
    if dtype == dtypes.BFLOAT16_BITS:
        raise TypeError(
            f"{name}: expected the package ml_dtypes beside bfloat16 in host memory, got none that "
            'can be imported; install it with pip install "nattn[bfloat16]"'
        )
    return x if x.dtype == dtype else x.view(dtype)


def _is_masked(value: Any) -> bool:
    """Whether something is a masked array, or a list that holds one."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_masked, value))
    return isinstance(value, np.ma.MaskedArray)


def _has_dlpack_alone(value: Any) -> bool:
    """Whether an array has no other way to NumPy than DLPack, which `np.asarray` does not take."""
    kind = type(value)
    if not (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
        return False
    others = ("__array__", "__array_interface__", "__array_struct__", "__buffer__")
    return not any(hasattr(value, name) for name in others)


def _from_dlpack(name: str, value: Any) -> NDArray[Any]:
    """View an array in host memory through DLPack, without a copy."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError) as error:  # another device, a dtype that NumPy has not
        raise TypeError(
            f"{name}: expected an array in host memory and of NumPy's own dtypes, or on a GPU of "
            f"NVIDIA, got {type(value).__name__} with DLPack: {error}"
        ) from error


def host_array(name: str, value: Any) -> NDArray[Any]:
    """Convert to an ndarray where only those in host memory will do."""
    array = as_array(name, value)
    if isinstance(array, DeviceArray):
        raise TypeError(f"{name}: expected an array in host memory, got one {array.source}")
    return array


def float_dtype(name: str, value: Any, *, narrow: bool = False) -> np.dtype:
    """Return native float32 or float64, with `narrow` float16 or bfloat16 too."""
    names = (*(("float16", "bfloat16") if narrow else ()), "float32", "float64")
    found = dtypes.storage_dtype(value) if isinstance(value, str) else np.dtype(value)
    storage = dtypes.storage_name(found)
    if storage is None or storage not in names or not found.isnative:
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        raise TypeError(f"{name}: expected {expected}, got {dtypes.show(found)}")
    dtype = dtypes.storage_dtype(storage)
    if dtype == dtypes.BFLOAT16_BITS:
        require("ml_dtypes", "bfloat16", f"{name} bfloat16")
    return dtype


def in_host_memory(name: str, value: Any) -> NDArray[Any]:
    """Convert to an ndarray whose numbers can be read, which takes a copy of those on a GPU."""
    array = as_array(name, value)
    return device_arrays.copied(array) if isinstance(array, DeviceArray) else array


def is_real(value: object) -> bool:
    """Whether a value is a real number; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def finite_float(name: str, value: Any, expected: str) -> float:
    """Return a float from a real number that is finite in float64."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if type(value) is not float and not is_real(value):
        raise TypeError(f"{name}: expected {expected}, got {show(value)}")
    try:
        exact = float(value)
        if exact - exact == 0.0:  # neither NaN nor infinite
            return exact
    except OverflowError:
        pass
    raise ValueError(f"{name}: expected {expected}, got {show(value)}")


def check_integer(name: str, value: Any, expected: str = "an integer") -> int:
    """Return a Python int; a bool is none, and nothing is rounded."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected {expected}, got {show(value)}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return a Python int of at least so much."""
    expected = f"an integer of at least {least}"
    n = check_integer(name, value, expected)
    if n < least:
        raise ValueError(f"{name}: expected {expected}, got {show(n)}")
    return n


def check_integers(name: str, value: Any, B: int) -> list[int]:
    """Return one Python int of any size for each batch item."""
    expected = f"an integer or {B} of them, one for each batch item"
    if isinstance(value, int):
        return [check_integer(name, value, expected)] * B
    if not isinstance(value, (list, tuple)):
        array = in_host_memory(name, value)
        if array.dtype.kind not in "iuO":
            raise TypeError(f"{name}: expected {expected}, got {show(value)}")
        if array.ndim == 0:
            return [check_integer(name, array[()], expected)] * B
        if array.ndim != 1:
            raise ValueError(f"{name}: expected {expected}, got shape {array.shape}")
        value = array.tolist()
    if len(value) != B:
        raise ValueError(f"{name}: expected {expected}, got {len(value)}")
    return [check_integer(f"{name}[{b}]", x) for b, x in enumerate(value)]


def overlaps_itself(x: NDArray[Any]) -> bool:
    """Whether two elements may share memory; never for a view that slicing can make."""
    if x.size == 0:
        return False
    extent = x.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (n - 1)
    return False


def share_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two arrays share an element, or may, where finding out takes long."""
    try:
        # exact, so that interleaved slices of one packed array pass; the general question is NP
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
