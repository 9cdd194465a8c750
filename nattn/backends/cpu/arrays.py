"""Where arrays lie: how kernels are told of one, and where its rows begin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...vectors.lanes import Struct, read_int64
from .jit import device

STRIDED = Struct("Strided", ("ptr", "stride_b", "stride_h", "stride_n", "stride_d", "starts_ptr"))
"""An array over (item, head, row, column): its address, and bytes from one to the next. Where the
items lie one behind the other, along the axis of rows, `starts_ptr` is the address of an int64 for
each, the number of its first row; else it is 0."""


NOWHERE = (0,) * len(STRIDED.names)
"""The fields of `STRIDED` where there is no array."""


def strided(array: NDArray[Any], starts: NDArray[np.int64] | None = None) -> tuple[int, ...]:
    """Return the fields of `STRIDED` for a 4-D array, of which `starts` says where items begin."""
    return (array.ctypes.data, *array.strides, 0 if starts is None else starts.ctypes.data)


@device
def rows_of(array, b, head):
    """Return the address of the first row of an item's head."""
    return item_of(array, b) + head * array.stride_h


@device
def item_of(array, b):
    """Return the address of an item's first row, of its first head."""
    if array.starts_ptr:
        return array.ptr + read_int64(array.starts_ptr + 8 * b) * array.stride_n
    return array.ptr + b * array.stride_b
