"""Keys and values that lie in pages: which page holds which keys of which sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checks import host_array


class Pages(NamedTuple):
    """Where keys and values lie that are spread over pages of a pool.

    Key ``j`` of item ``b`` is row ``j % page_size`` of page ``table[b, j // page_size]``. Of an
    item's row of the table only the pages of its keys are looked at.

    Attributes
    ----------
    table : ndarray of int64
        ``(B, n)``, any strides; 0 along the second axis makes a ring of one page.
    page_size : int
        Keys of a page.
    """

    table: NDArray[np.int64]
    page_size: int

    def of_keys(self, b: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the pages of some keys of an item, of which there is at least one."""
        return self.table[b, begin // self.page_size : (end - 1) // self.page_size + 1]


def pages_of(lengths: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Return how many pages so many keys take."""
    return -(-lengths // page_size)


def check_table(value: Any, B: int) -> NDArray[np.integer[Any]]:
    """Return a block table if it is ``(B, n)`` integers, whatever they are."""
    table = host_array("block_table", value)
    if table.dtype.kind not in "iu":
        raise TypeError(f"block_table: expected integers, got dtype {table.dtype}")
    if table.ndim != 2 or table.shape[0] != B:
        raise ValueError(f"block_table: expected shape ({B}, n), got {table.shape}")
    return table


def check_pages(
    table: NDArray[np.integer[Any]], n_pages: int, page_size: int, lengths: NDArray[np.int64]
) -> Pages:
    """Check a block table up to the lengths of its sequences, whatever lies behind them.

    Parameters
    ----------
    table : ndarray of integers
        ``(B, n)``.
    n_pages, page_size : int
        Of the pool.
    lengths : ndarray of int64
        ``(B,)``; the table has columns for them.

    Raises
    ------
    ValueError
        If a page that is needed is none of the pool.
    """
    needed = pages_of(lengths, page_size)
    most = int(needed.max(initial=0))
    used = table[:, :most]
    wrong = ((used < 0) | (used >= n_pages)) & (np.arange(most) < needed[:, None])
    if wrong.any():
        b, n = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"block_table: expected pages from 0 to {n_pages - 1}, got {used[b, n]} in column {n} "
            f"of item {b}, which has {lengths[b]} keys in pages of {page_size}"
        )
    return Pages(table.astype(np.int64, copy=False), page_size)


def gather(x: NDArray[Any], pages: Pages | None, b: int, begin: int, end: int) -> NDArray[Any]:
    """Return some keys of an item, from ``(pages or B, Hkv, N, ...)``, as ``(Hkv, n, ...)``."""
    if pages is None:
        view: NDArray[Any] = x[b, :, begin:end]
        return view
    rows = np.moveaxis(x[pages.of_keys(b, begin, end)], 0, 1)
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    first = begin - begin % pages.page_size
    return rows[:, begin - first : end - first]
