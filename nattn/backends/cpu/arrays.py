"""Where arrays lie: how kernels are told of one, and where its rows begin."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...vectors.lanes import Struct
from .jit import device

STRIDED = Struct("Strided", ("ptr", "stride_b", "stride_h", "stride_n", "stride_d"))
"""An array over (item, head, row, column): its address, and bytes from one to the next."""


def strided(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the fields of `STRIDED` for a 4-D array."""
    return (array.ctypes.data, *array.strides)


@device
def rows_of(array, b, head):
    """Return the address of the first row of an item's head."""
    return array.ptr + b * array.stride_b + head * array.stride_h
