"""Where arrays lie: how kernels are told of one, and where its rows begin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
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


def forward_arrays(
    p: Problem, out: NDArray[Any], lse: NDArray[Any], exact: NDArray[Any] | None
) -> dict[str, tuple[int, ...]]:
    """Return the fields of the arrays that a forward pass reads and writes."""
    return {
        "q": strided(p.q, p.q_starts),
        "k": strided(p.k, p.kv_starts),
        "v": strided(p.v, p.kv_starts),
        "out": strided(out, p.q_starts),
        "lse": strided(lse[..., None], p.q_starts),
        "exact": NOWHERE if exact is None else strided(exact, p.q_starts),
    }


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


PAGES = Struct("Pages", ("table_ptr", "stride_b", "stride_page", "page_size"))
"""In which pages the keys of an item lie: address of int64 (B, pages of an item), bytes from one to
the next, keys of a page. The arrays of keys and values have pages for items then. Without pages all
is 0."""


@device
def row_at(pages, array, b, head, n):
    """Return the address of row n of an item's head."""
    if pages.table_ptr:
        page = n // pages.page_size
        item = read_int64(pages.table_ptr + b * pages.stride_b + page * pages.stride_page)
        n -= page * pages.page_size
        return array.ptr + item * array.stride_b + head * array.stride_h + n * array.stride_n
    return rows_of(array, b, head) + n * array.stride_n


@device
def lie_together(pages, begin, end):
    """Return whether rows lie one behind the other, `stride_n` bytes apart."""
    return pages.table_ptr == 0 or begin // pages.page_size == (end - 1) // pages.page_size
