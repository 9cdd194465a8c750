"""Tensors of torch in host memory: NumPy views of them, and results that are tensors.

They share their memory with NumPy arrays, so that the core works on those alone; what it returns is
a tensor where q was one. torch is not imported here: who has a tensor has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

from numpy.typing import NDArray

from ..vectors import dtypes
from .device_arrays import is_torch


def view_of(name: str, tensor: Any) -> NDArray[Any]:
    """View a tensor in host memory as an array, without a copy; its gradient is not recorded.

    Raises
    ------
    TypeError
        If it is sparse, on another device, or stands for other tensors, as those do that torch
        traces and transforms.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{name}: expected a tensor outside of torch.compile, got one that is traced; what "
            "torch compiles are calls of nattn.integrations.torch"
        )
    try:
        plain = tensor.detach()
        if tensor.dtype is torch.bfloat16:  # which torch does not hand to NumPy
            bits: NDArray[Any] = plain.view(torch.int16).numpy()
            return bits.view(dtypes.bfloat16())
        found: NDArray[Any] = plain.numpy()
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name}: expected a dense tensor in host memory or on a GPU of NVIDIA, got one that "
            f"cannot be viewed as an array: {error}; what torch compiles and transforms are calls "
            "of nattn.integrations.torch"
        ) from error
    return found


def bound_view(name: str, value: Any) -> NDArray[Any] | None:
    """View a tensor in host memory as an array that functions may be bound to; None of all else.

    Of bfloat16, which they do not read, it is a copy in float32.
    """
    return dtypes.widen(view_of(name, value)) if is_torch(value) else None


def as_tensor(x: Any) -> Any:
    """Return an array as a tensor of the same memory; a tensor as it is."""
    if is_torch(x):
        return x
    torch = sys.modules["torch"]
    if dtypes.storage_name(x.dtype) == "bfloat16":
        return torch.from_numpy(x.view("i2")).view(torch.bfloat16)
    return torch.from_numpy(x)


def like(q: Any, *found: Any) -> tuple[Any, ...]:
    """Return results as tensors if q is a tensor in host memory, otherwise as they are."""
    if is_torch(q) and not q.is_cuda:
        return tuple(map(as_tensor, found))
    return found
