"""Sums of the partial results of a gradient, rounded to what is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...vectors.lanes import Struct, load, read, store_stored, view, write_stored
from . import jobs, tiles
from .jit import kernel
from .jobs import enter, job_record, leave, take_task
from .tables import TABLE, find_task, make_table, table_fields

ARGS = job_record(
    "TotalArgs",
    (
        # a table of `ITEM`s; columns, rows that make a task
        *(("tasks", TABLE), "D", "rows_per_task"),
        # bytes from a row to the next, of partial results and of their sum
        *("part_row", "total_row"),
    ),
)

ITEM = Struct(
    "TotalItem",
    (
        # of an item in the table: its first task, rows of a head, tasks of a head
        *("first_task", "n_rows", "tasks_per_head"),
        # partial results: address, bytes from a head to the next, and from a part; their number
        *("parts_ptr", "part_head", "part_bytes", "n_parts"),
        # their sum: address, bytes from a head to the next
        *("total_ptr", "total_head"),
    ),
)
"""Of what, and where to, partial results are added up."""

TASK_NUMBERS = 1 << 15
"""Numbers that a task adds up, about: some hundredths of a millisecond."""


@kernel("void(int64, int64)")
def total_worker(tile):
    """Add up the partial results in their order, row by row."""
    size, stored, width = tile.itemsize, tile.storage_size, tile.W

    def worker(slot, args):
        a = view(ARGS, args)
        if enter(a.job_ptr, slot) == 0:
            return
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
            item = view(ITEM, find_task(a.tasks, task))
            task -= item.first_task
            head = task // item.tasks_per_head
            begin = (task - head * item.tasks_per_head) * a.rows_per_task
            source = item.parts_ptr + head * item.part_head
            dest = item.total_ptr + head * item.total_head
            for n in range(begin, min(begin + a.rows_per_task, item.n_rows)):
                at, to = source + n * a.part_row, dest + n * a.total_row
                d = 0
                while d + width <= a.D:
                    x = load(tile, at + d * size)
                    for m in range(1, item.n_parts):
                        x += load(tile, at + d * size + m * item.part_bytes)
                    store_stored(tile, to + d * stored, x)
                    d += width
                while d < a.D:
                    y = read(tile, at + d * size)
                    for m in range(1, item.n_parts):
                        y += read(tile, at + d * size + m * item.part_bytes)
                    write_stored(tile, to + d * stored, y)
                    d += 1
        leave(a.job_ptr, slot, 0)

    return worker


def first_rows(
    x: NDArray[Any], items: NDArray[np.int64], starts: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return where the first rows of items of a 4-D array lie, as `arrays.strided` has it."""
    where = items * x.strides[0] if starts is None else starts[items] * x.strides[2]
    addresses: NDArray[np.int64] = x.ctypes.data + where
    return addresses


def add_up(
    n_rows: NDArray[np.int64],
    *,
    heads: int,
    D: int,
    part_row: int,
    total_row: int,
    storage: str,
    keepalive: object,
    **fields: Any,
) -> None:
    """Write the sums of the partial results of items.

    Parameters
    ----------
    n_rows : ndarray of int64
        Rows of a head of each item.
    heads, D : int
        Heads of an item, columns.
    part_row, total_row : int
        Bytes from one row to the next: of partial results, of the type that is computed in, and of
        the sums.
    storage : str
        Name of the type that the sums are stored as.
    keepalive : object
        Whose memory it is.
    **fields : ndarray or int
        The fields of `ITEM` from `parts_ptr` on.
    """
    numbers = int(n_rows.sum()) * heads * D
    if numbers == 0:
        return
    rows = max(1, TASK_NUMBERS // D)
    tasks_per_head = -(-n_rows // rows)
    there = tasks_per_head > 0
    if not there.all():  # each record of a table has a task
        n_rows, tasks_per_head = n_rows[there], tasks_per_head[there]
        fields = {x: y[there] if isinstance(y, np.ndarray) else y for x, y in fields.items()}
    table = make_table(
        ITEM, heads * tasks_per_head, n_rows=n_rows, tasks_per_head=tasks_per_head, **fields
    )
    flops = 8.0 * float(np.max(fields["n_parts"])) * numbers
    jobs.run_job(
        total_worker(tiles.choose_tile(storage, 1)),
        ARGS,
        {
            "tasks": table_fields(table),
            "D": D,
            "rows_per_task": rows,
            "part_row": part_row,
            "total_row": total_row,
        },
        n_tasks=heads * int(tasks_per_head.sum()),
        n_threads=1 if flops < 1e6 else jobs.thread_count(),
        flops=flops,
        keepalive=(keepalive, table),
    )
