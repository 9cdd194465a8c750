"""Sums of the partial results of a gradient, rounded to what is stored."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...vectors.lanes import load, read, store_stored, view, write_stored
from . import jobs, tiles
from .arrays import STRIDED, rows_of, strided
from .jit import kernel
from .jobs import enter, job_record, leave, take_task

ARGS = job_record(
    "TotalArgs",
    (
        # partial results, and bytes from one to the next; their sum
        *(("parts", STRIDED), "n_parts", "part_bytes", ("total", STRIDED)),
        # sizes of the sum; rows of a head that make a task, tasks of a head
        *("H", "N", "D", "rows_per_task", "tasks_per_head"),
    ),
)

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
            head = task // a.tasks_per_head
            begin = (task - head * a.tasks_per_head) * a.rows_per_task
            b = head // a.H
            source = rows_of(a.parts, b, head - b * a.H)
            dest = rows_of(a.total, b, head - b * a.H)
            for n in range(begin, min(begin + a.rows_per_task, a.N)):
                at, to = source + n * a.parts.stride_n, dest + n * a.total.stride_n
                d = 0
                while d + width <= a.D:
                    x = load(tile, at + d * size)
                    for m in range(1, a.n_parts):
                        x += load(tile, at + d * size + m * a.part_bytes)
                    store_stored(tile, to + d * stored, x)
                    d += width
                while d < a.D:
                    y = read(tile, at + d * size)
                    for m in range(1, a.n_parts):
                        y += read(tile, at + d * size + m * a.part_bytes)
                    write_stored(tile, to + d * stored, y)
                    d += 1
        leave(a.job_ptr, slot, 0)

    return worker


def add_up(parts: NDArray[Any], out: NDArray[Any], storage: str) -> None:
    """Write the sum of partial results.

    Parameters
    ----------
    parts : ndarray
        ``(parts, B, H, N', D')`` of the type that is computed in, rows contiguous; with N' and D'
        at least those of `out`: the rest is left out.
    out : ndarray
        ``(B, H, N, D)``, contiguous rows of the storage type; written.
    storage : str
        Its name.
    """
    B, H, N, D = out.shape
    if out.size == 0:
        return
    rows = max(1, TASK_NUMBERS // D)
    tasks_per_head = -(-N // rows)
    flops = 8.0 * parts.shape[0] * out.size
    jobs.run_job(
        total_worker(tiles.choose_tile(storage, 1)),
        ARGS,
        {
            "parts": strided(parts[0]),
            "n_parts": parts.shape[0],
            "part_bytes": parts.strides[0],
            "total": strided(out),
            "H": H,
            "N": N,
            "D": D,
            "rows_per_task": rows,
            "tasks_per_head": tasks_per_head,
        },
        n_tasks=B * H * tasks_per_head,
        n_threads=1 if flops < 1e6 else jobs.thread_count(),
        flops=flops,
        keepalive=(parts, out),
    )
