"""The yardstick: how many multiply-adds the processor can do, measured now.

Of bfloat16 they are those that attention is made of: in float32, or dot products of pairs.

The loop touches registers only. Its result is the ceiling that no kernel passes, and since
processors change their speed, a kernel's share of it means something only in the same run.
"""

from __future__ import annotations

import time

from ...vectors.lanes import chained, splat, store, view
from . import tiles
from .jit import kernel
from .jobs import LINE, enter, job_record, leave, run_job, thread_count

_CHAINS = 12

ARGS = job_record("PeakArgs", ("repetitions",))


@kernel("void(int64, int64)")
def multiply_add(tile):
    """Run 12 chains of multiply-adds on each thread, and leave their sum in its scratch."""

    def worker(slot, args):
        own = view(ARGS, args)
        repetitions = own.repetitions
        scratch = enter(own.job_ptr, slot)
        if scratch == 0:
            return
        x, y = splat(tile, 0.5), splat(tile, 1.0)  # as pairs: (0, 0.5), (0, 1.0)
        a = b = c = d = e = f = g = h = i = j = k = m = splat(tile, 0.25 * slot)
        for _ in range(repetitions):
            a, b, c = chained(tile, a, x, y), chained(tile, b, x, y), chained(tile, c, x, y)
            d, e, f = chained(tile, d, x, y), chained(tile, e, x, y), chained(tile, f, x, y)
            g, h, i = chained(tile, g, x, y), chained(tile, h, x, y), chained(tile, i, x, y)
            j, k, m = chained(tile, j, x, y), chained(tile, k, x, y), chained(tile, m, x, y)
        total = a + b + c + d + e + f + g + h + i + j + k + m
        store(scratch, total)
        leave(own.job_ptr, slot, 0)

    return worker


def fma_peak(dtype: str = "float32", threads: int | None = None, seconds: float = 0.05) -> float:
    """Measure the processor's multiply-add limit.

    Parameters
    ----------
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    threads : int, optional
        Threads to run at once; by default those that attention would use.
    seconds : float
        About how long to measure.

    Returns
    -------
    float
        GFLOP/s of all threads together; a multiply-add counts as two, a dot product of pairs as
        four.

    Examples
    --------
    >>> from nattn.backends.cpu.door import fma_peak
    >>> fma_peak(seconds=0.01) > 1
    True
    """
    tile = tiles.choose_tile(dtype, 1 << 20)
    threads = threads or thread_count()
    address = multiply_add(tile)
    # 2 * width operations a cycle, about 3e9 cycles a second: near enough to choose a length.
    repetitions = max(1, int(seconds * 3e9 * 2 / _CHAINS))
    begin = time.perf_counter()
    run_job(
        address,
        ARGS,
        {"repetitions": repetitions},
        n_tasks=threads,
        n_threads=threads,
        scratch_bytes=LINE,
        flops=1e12,
        keepalive=None,
    )
    elapsed = time.perf_counter() - begin
    return 2.0 * tile.per_word * _CHAINS * tile.W * repetitions * threads / elapsed / 1e9
