"""Tables of tasks: what a worker is to do, where the items of a job differ in length.

A table is an array of records, one for each item, whose first field is the number of the item's
first task. A worker finds the record of the task that it has taken by halving.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...vectors.lanes import Struct, read_int64
from .jit import device

TABLE = Struct("Table", ("ptr", "count", "bytes"))
"""Where the records lie, their number and the size of one; without any there is no table."""

NO_TABLE = (0, 0, 0)
"""The fields of `TABLE` where there is none."""


@device
def find_task(table, task):
    """Return the address of the record that a task belongs to."""
    low, high = 0, table.count
    while high - low > 1:
        middle = (low + high) // 2
        if read_int64(table.ptr + middle * table.bytes) <= task:
            low = middle
        else:
            high = middle
    return table.ptr + low * table.bytes


def make_table(record: Struct, n_tasks: NDArray[np.int64], **fields: Any) -> NDArray[np.int64]:
    """Make a table of tasks.

    Parameters
    ----------
    record : Struct
        What a record is, all of it integers.
    n_tasks : ndarray of int64
        The tasks of each item, at least one.
    **fields : ndarray or int
        All fields of the record but the first, for all items.

    Returns
    -------
    ndarray of int64
        ``(items, fields)``.
    """
    table = np.empty((len(n_tasks), len(record.names)), np.int64)
    table[:1, 0] = 0
    np.cumsum(n_tasks[:-1], out=table[1:, 0])
    for n, name in enumerate(record.names[1:], 1):
        table[:, n] = fields[name]
    return table


def table_fields(table: NDArray[np.int64]) -> tuple[int, int, int]:
    """Return the fields of `TABLE` for a table, which must live as long as the job."""
    return table.ctypes.data, len(table), table.strides[0]
