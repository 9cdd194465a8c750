"""The yardstick: how many multiply-adds the processor can do, measured now.

The loop touches registers only. Its result is the ceiling that no kernel passes, and since
processors change their speed, a kernel's share of it means something only in the same run.
"""

from __future__ import annotations

import ctypes
import struct
import time

import numpy as np

from ...vectors.lanes import fma, read_int64, splat, store
from . import tiles
from .jit import kernel
from .threads import enter, leave, new_control, run, thread_count

_CHAINS = 12


@kernel("void(int64, int64)")
def multiply_add(tile):
    """Run 12 chains of multiply-adds; args: (repetitions, address to write to, control)."""

    def worker(slot, args):
        control = read_int64(args + 16)
        enter(control)
        x, y = splat(tile, 0.5), splat(tile, 1.0)
        a = b = c = d = e = f = g = h = i = j = k = m = splat(tile, 0.25 * slot)
        for _ in range(read_int64(args)):
            a, b, c = fma(a, x, y), fma(b, x, y), fma(c, x, y)
            d, e, f = fma(d, x, y), fma(e, x, y), fma(f, x, y)
            g, h, i = fma(g, x, y), fma(h, x, y), fma(i, x, y)
            j, k, m = fma(j, x, y), fma(k, x, y), fma(m, x, y)
        total = a + b + c + d + e + f + g + h + i + j + k + m
        store(read_int64(args + 8) + slot * 256, total)
        leave(control, slot, 0)

    return worker


def fma_peak(dtype: str = "float32", threads: int | None = None, seconds: float = 0.05) -> float:
    """Measure the processor's multiply-add limit.

    Parameters
    ----------
    dtype : str
        "float32" or "float64".
    threads : int, optional
        Threads to run at once; by default those that attention would use.
    seconds : float
        About how long to measure.

    Returns
    -------
    float
        GFLOP/s of all threads together; a multiply-add counts as two.

    Examples
    --------
    >>> from nattn.backends.cpu import fma_peak
    >>> fma_peak(seconds=0.01) > 1
    True
    """
    tile = tiles.choose_tile(dtype, 1 << 20)
    threads = threads or thread_count()
    address = multiply_add(tile)
    out = np.empty(256 * threads, np.uint8)
    # 2 * width operations a cycle, about 3e9 cycles a second: near enough to choose a length.
    repetitions = max(1, int(seconds * 3e9 * 2 / _CHAINS))
    control = new_control(threads)
    args = struct.pack("3q", repetitions, out.ctypes.data, ctypes.addressof(control))
    begin = time.perf_counter()
    run(address, args, control, threads, 1e12, keep=(out, control))
    elapsed = time.perf_counter() - begin
    return 2.0 * _CHAINS * tile.W * repetitions * threads / elapsed / 1e9
