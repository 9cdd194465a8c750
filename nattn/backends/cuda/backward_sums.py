"""The backward kernels that add up: delta of rows, and the gradients of sinks and slopes."""

from __future__ import annotations

import functools
import math

from numba import cuda, types

from .steps import LOG2E, tree_sum
from .target import Kernel, exp2, load, read_int64, store
from .tiles import DELTA_LANES, DELTA_ROWS, SUM_THREADS


@functools.lru_cache(maxsize=16)
def delta_kernel(storage: str) -> Kernel:
    """Return the kernel that writes ``rowsum(dout * out) - dlse``; a few threads share a row.

    Of a row that sees nothing `out` is 0, and not even a dout of NaN matters.
    """
    name = "float64" if storage == "float64" else "float32"
    dtype, itemsize = getattr(types, name), 8 if storage == "float64" else 4
    read, read_row, write_row = load(storage), load(name), store(name)
    n_rows, lanes = DELTA_ROWS, DELTA_LANES
    threads = n_rows * lanes

    def kernel(a):
        partial_sums = cuda.shared.array(threads, dtype)
        partial_sizes = cuda.shared.array(threads, dtype)
        t = cuda.threadIdx.x & (threads - 1)
        lane = t % lanes
        row = cuda.blockIdx.x * n_rows + t // lanes
        i = row % a.Nq
        head = row // a.Nq % a.Hq
        b = row // (a.Nq * a.Hq)
        exists = False
        if b < a.B:
            exists = i < read_int64(a.q_lens_ptr + 8 * b)
        delta, size = dtype(0.0), dtype(0.0)
        if exists:
            out_ptr = a.out_ptr + b * a.out_b + head * a.out_h + i * a.out_n
            dout_ptr = a.dout_ptr + b * a.dout_b + head * a.dout_h + i * a.dout_n
            for d in range(lane, a.Dv, lanes):
                x = read(out_ptr + d * a.out_d)
                delta += read(dout_ptr + d * a.dout_d) * x
                size += abs(x)
        partial_sums[t] = delta
        partial_sizes[t] = size
        cuda.syncthreads()
        if lane == 0 and b < a.B:
            for other in range(1, lanes):
                delta += partial_sums[t + other]
                size += partial_sizes[t + other]
            if size == dtype(0.0):
                delta = dtype(0.0)
            if exists and a.dlse_ptr != 0:
                delta -= read_row(a.dlse_ptr + row * itemsize)
            write_row(a.delta_ptr + row * itemsize, delta)

    return Kernel(kernel, threads)


@functools.lru_cache(maxsize=16)
def sink_kernel(storage: str, result: str) -> Kernel:
    """Return the kernel of the gradient of the sinks, a block each.

    A sink adds to each row's sum, but has no value: ``-exp(sink - lse) * delta`` over all rows.
    """
    name = "float64" if storage == "float64" else "float32"
    dtype, itemsize, threads = getattr(types, name), 8 if storage == "float64" else 4, SUM_THREADS
    read, write, power, add_up = load(name), store(result), exp2(name), tree_sum(threads)
    inf, log2e, float64 = dtype(math.inf), dtype(LOG2E), types.float64

    def kernel(a):
        sums = cuda.shared.array(threads, float64)
        t = cuda.threadIdx.x & (threads - 1)
        head = cuda.blockIdx.x
        sink = read(a.sinks_ptr + head * itemsize)
        total = float64(0.0)
        if sink != -inf:
            for b in range(a.B):
                for i in range(t, read_int64(a.q_lens_ptr + 8 * b), threads):
                    at = ((b * a.Hq + head) * a.Nq + i) * itemsize
                    weight = power((sink - read(a.lse_ptr + at)) * log2e)
                    total -= float64(weight * read(a.delta_ptr + at))
        sums[t] = total
        add_up(sums, t)
        if t == 0:
            write(a.dsinks_ptr + head * a.dsinks_h, dtype(sums[0]))

    return Kernel(kernel, threads)


@functools.lru_cache(maxsize=16)
def slope_kernel(storage: str, result: str) -> Kernel:
    """Return the kernel of the gradient of ALiBi's slopes from the rows' sums, a block each."""
    name = "float64" if storage == "float64" else "float32"
    dtype, itemsize, threads = getattr(types, name), 8 if storage == "float64" else 4, SUM_THREADS
    read, write, add_up = load(name), store(result), tree_sum(threads)
    float64 = types.float64

    def kernel(a):
        sums = cuda.shared.array(threads, float64)
        t = cuda.threadIdx.x & (threads - 1)
        head, own = cuda.blockIdx.x % a.Hq, cuda.blockIdx.x // a.Hq
        last = own + 1 if a.slopes_B == a.B else a.B
        total = float64(0.0)
        for b in range(own, last):
            for i in range(t, read_int64(a.q_lens_ptr + 8 * b), threads):
                at = ((b * a.Hq + head) * a.Nq + i) * itemsize
                total -= float64(read(a.distance_sum_ptr + at))
        sums[t] = total
        add_up(sums, t)
        if t == 0:
            write(a.dslopes_ptr + own * a.dslopes_b + head * a.dslopes_h, dtype(sums[0]))

    return Kernel(kernel, threads)
