"""The backward kernels whose threads own query rows: of dq, and of the gradient of a bias."""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import cuda, types

from . import score
from .prologue import dout_rows, key_numbers, key_rows, prologue, query_rows, value_rows
from .specialization import Functions
from .steps import LOG2E, PAD, products, score_product, scores_size, stage_size, weighted_sum
from .target import Kernel, device, exp2, load, read_int64, record, store
from .tiles import BlockTile
from .visibility import keys_of, keys_of_packed_rows, keys_of_rows, packed_row

Row = record("Row", ("head", "i", "pos", "lo", "hi", "lse", "delta"))
"""A query row: its head, number and position, the keys lo <= j < hi, its lse and delta."""


@functools.cache
def row_loader(dtype: str) -> Any:
    """Return ``load_row(a, b, head, i)``: a `Row`, with no keys where it sees nothing."""
    number, itemsize = getattr(types, dtype), 8 if dtype == "float64" else 4
    read_row, inf = load(dtype), number(math.inf)

    def load_row(a, b, head, i):
        pos, lo, hi = keys_of(a, b, i)
        lse, delta = number(0.0), number(0.0)
        if lo < hi:
            at = ((b * a.Hq + head) * a.Nq + i) * itemsize
            lse, delta = read_row(a.lse_ptr + at), read_row(a.delta_ptr + at)
            if lse == -inf:
                hi = 0  # it sees nothing
        return Row(head, i, pos, lo, hi, lse, delta)

    return device(load_row)


@functools.lru_cache(maxsize=256)
def differentiator(tile: BlockTile, functions: Functions, derive: bool) -> Any:
    """Return what turns scores into their gradient, where threads own query rows.

    ``differentiate(a, x, y, b, row, n0, place)`` does so with the scores of a `Row` in x, of the
    keys from n0 on; y holds dP. With `derive` it is the gradient of what comes before the
    modifiers. The sum over keys of the gradient times the distance is returned.
    """
    per_row, quads, dtype = tile.threads_per_row, tile.columns // 4, getattr(types, tile.dtype)
    steps = score.steps(functions)
    change, change_and_derive, random = steps.change, steps.change_and_derive, steps.words4
    dropout = functions.dropout
    power = exp2(tile.dtype)
    lead_x = tile.rows + PAD
    inf, log2e = dtype(math.inf), dtype(LOG2E)

    def differentiate(a, x, y, b, row, n0, place):
        head, i, pos = row.head, row.i, row.pos
        inverse = dtype(1.0) / dtype(a.keep_prob)
        distances = dtype(0.0)
        for g in range(place.nth, quads, per_row):
            if dropout:
                w0, w1, w2, w3 = random(a, b, head, i, (n0 + 4 * g) // 4)
            for u in range(4):
                key = n0 + 4 * g + u
                at = (4 * g + u) * lead_x + place.m
                gradient = dtype(-0.0)
                if row.lo <= key and key < row.hi:
                    if derive:
                        s, slope = change_and_derive(a, b, head, i, pos, key, x[at])
                    else:
                        s = change(a, b, head, i, pos, key, x[at])
                    if s != -inf:
                        dp = y[at]
                        if dropout:
                            word = w0 if u == 0 else w1 if u == 1 else w2 if u == 2 else w3
                            dp = dtype(0.0) if word < a.threshold else dp * inverse
                        ds = power((s - row.lse) * log2e) * (dp - row.delta)
                        if a.distance_sum_ptr != 0:
                            distances += ds * dtype(abs(pos - key))
                        gradient = ds * slope if derive else ds
                        if gradient == dtype(0.0):
                            gradient = dtype(0.0)  # and not -0.0
                x[at] = gradient
        return distances

    return device(differentiate)


@functools.lru_cache(maxsize=256)
def query_kernel(tile: BlockTile, functions: Functions) -> Kernel:
    """Return the kernel of dq, and of each row's sum for the slopes: a block owns query rows."""
    R, N, width, per_row = tile.rows, tile.columns, tile.width, tile.threads_per_row
    dtype, itemsize = getattr(types, tile.dtype), tile.itemsize
    begin, number_keys, p = prologue(tile), key_numbers(tile), products(tile)
    RM, row_of, clear, times = p.RM, p.row_of, p.clear, p.times
    load_row, sees_block = row_loader(tile.dtype), score.sees_block
    differentiate = differentiator(tile, functions, derive=True)
    multiply, add = score_product(tile), weighted_sum(tile)
    put, write_row = p.put_rows(tile.storage), store(tile.dtype)
    blocks = functions.blocks
    size, n_x, n_stats = stage_size(tile), scores_size(tile), R * per_row
    n_scores, n_sums = RM * p.RN, RM * p.RD

    def kernel(a):
        x = cuda.shared.array(n_x, dtype, alignment=16)
        y = cuda.shared.array(n_x, dtype, alignment=16)
        stage = cuda.shared.array(size, dtype, alignment=16)
        stats = cuda.shared.array(n_stats, dtype)
        q_heads = cuda.shared.array(R, types.int32)
        q_rows = cuda.shared.array(R, types.int32)
        k_heads = cuda.shared.array(N, types.int32)
        k_rows = cuda.shared.array(N, types.int32)
        acc = cuda.local.array(n_sums, dtype)
        s = cuda.local.array(n_scores, dtype)
        row_ptrs = cuda.local.array(RM, types.int64)
        n_tiles = (a.group * a.Nq + R - 1) // R
        place = begin(1, n_tiles, a.Hkv)
        nth, m, kv_head, b = place.nth, place.m, place.head, place.item
        # The last tiles first: under a causal mask they are the longest.
        first = (n_tiles - 1 - place.tile) * R
        first_column = cuda.blockIdx.y * width
        q, dout = query_rows(a, b, q_heads, q_rows), dout_rows(a, b, q_heads, q_rows)
        k = key_rows(a, b, kv_head, k_heads, k_rows)
        v = value_rows(a, b, kv_head, k_heads, k_rows)

        head, i = packed_row(a, kv_head, first + m)
        row = load_row(a, b, head, i)
        lo, hi = row.lo, row.hi
        if nth == 0:
            q_heads[m] = head
            q_rows[m] = i if lo < hi else -1
        block_lo, block_hi = keys_of_packed_rows(a, b, first, R)

        distances = dtype(0.0)
        clear(acc, n_sums)
        n0 = block_lo // N * N
        while n0 < block_hi:
            if blocks:
                some = sees_block(a, b, head, i, max(n0, lo), min(n0 + N, hi))
                if not cuda.syncthreads_or(types.int32(some)):
                    n0 += N
                    continue
            number_keys(k_heads, k_rows, n0, block_hi, place.t)
            multiply(s, x, stage, dtype(a.scale), a.D, q, k, place)
            multiply(s, y, stage, dtype(1.0), a.Dv, dout, v, place)
            cuda.syncthreads()
            distances += differentiate(a, x, y, b, row, n0, place)
            cuda.syncthreads()
            if a.dq_ptr != 0:
                add(acc, x, stage, k, first_column, a.D, place)
            n0 += N

        if a.distance_sum_ptr != 0 and first_column == 0:
            stats[nth * R + m] = distances
            cuda.syncthreads()
            if nth == 0 and i >= 0:
                for other in range(1, per_row):
                    distances += stats[other * R + m]
                write_row(a.distance_sum_ptr + ((b * a.Hq + head) * a.Nq + i) * itemsize, distances)
        if a.dq_ptr != 0:
            times(acc, dtype(a.scale))
            for m_ in range(RM):
                head, i = packed_row(a, kv_head, first + row_of(place.ty, m_))
                address = 0
                if i >= 0:
                    address = a.dq_ptr + b * a.dq_b + head * a.dq_h + i * a.dq_n
                row_ptrs[m_] = address
            put(acc, row_ptrs, a.dq_d, first_column, a.D, place.tx)

    return Kernel(kernel, tile.threads, blocks=1)


@functools.lru_cache(maxsize=256)
def bias_kernel(tile: BlockTile, functions: Functions, storage: str) -> Kernel:
    """Return the kernel of the gradient of a bias that is stored as `storage` says.

    A block owns a tile of the bias's own elements, with one row, column or both where it was
    broadcast along those. There it adds tile upon tile first, and rows and columns in the end.
    """
    R, N, threads, dtype = tile.rows, tile.columns, tile.threads, getattr(types, tile.dtype)
    begin, number_keys, p = prologue(tile), key_numbers(tile), products(tile)
    clear, add_scores, put_scores = p.clear, p.add_scores, p.put_scores
    load_row, sees_block = row_loader(tile.dtype), score.sees_block
    differentiate = differentiator(tile, functions, derive=False)
    multiply = score_product(tile)
    write, blocks = store(storage), functions.blocks
    size, n_x, n_scores, lead_x = stage_size(tile), scores_size(tile), p.RM * p.RN, R + PAD

    def kernel(a):
        x = cuda.shared.array(n_x, dtype, alignment=16)
        y = cuda.shared.array(n_x, dtype, alignment=16)
        stage = cuda.shared.array(size, dtype, alignment=16)
        q_heads = cuda.shared.array(R, types.int32)
        q_rows = cuda.shared.array(R, types.int32)
        k_heads = cuda.shared.array(N, types.int32)
        k_rows = cuda.shared.array(N, types.int32)
        sums = cuda.local.array(n_scores, dtype)
        s = cuda.local.array(n_scores, dtype)
        # The keys of the bias are split, in tiles of keys.
        place = begin((a.bias_J + N - 1) // N, (a.bias_I + R - 1) // R, a.bias_H)
        t, m = place.t, place.m
        # What this block owns: from first to before last, all of what it was broadcast along.
        j_first, j_last = place.split * N, place.split * N + N
        i_first, i_last = place.tile * R, place.tile * R + R
        own_h, own_b = place.head, place.item
        h_first, h_last, b_first, b_last = own_h, own_h + 1, own_b, own_b + 1
        if a.bias_J == 1:
            j_last = a.Nk
        if a.bias_I == 1:
            i_last = a.Nq
        if a.bias_H == 1:
            h_last = a.Hq
        if a.bias_B == 1:
            b_last = a.B

        clear(sums, n_scores)
        for item in range(b_first, b_last):
            b = types.int64(item)
            i_end = min(i_last, read_int64(a.q_lens_ptr + 8 * b))
            for head in range(h_first, h_last):
                kv_head = head // a.group
                q, dout = query_rows(a, b, q_heads, q_rows), dout_rows(a, b, q_heads, q_rows)
                k = key_rows(a, b, kv_head, k_heads, k_rows)
                v = value_rows(a, b, kv_head, k_heads, k_rows)
                for i0 in range(i_first, i_end, R):
                    block_lo, block_hi = keys_of_rows(a, b, i0, i0 + R - 1)
                    block_lo, block_hi = max(block_lo, j_first), min(block_hi, j_last)
                    if block_lo >= block_hi:
                        continue
                    i = i0 + m if i0 + m < i_end else -1
                    row = load_row(a, b, head, i)
                    lo, hi = row.lo, row.hi
                    if place.nth == 0:
                        q_heads[m] = head
                        q_rows[m] = i if lo < hi else -1
                    n0 = block_lo // N * N
                    while n0 < block_hi:
                        if blocks:
                            some = sees_block(a, b, head, i, max(n0, lo), min(n0 + N, hi))
                            if not cuda.syncthreads_or(types.int32(some)):
                                n0 += N
                                continue
                        number_keys(k_heads, k_rows, n0, block_hi, t)
                        multiply(s, x, stage, dtype(a.scale), a.D, q, k, place)
                        multiply(s, y, stage, dtype(1.0), a.Dv, dout, v, place)
                        cuda.syncthreads()
                        differentiate(a, x, y, b, row, n0, place)
                        cuda.syncthreads()
                        add_scores(sums, x, place.ty, place.tx)
                        n0 += N

        cuda.syncthreads()
        put_scores(x, sums, dtype(1.0), place.ty, place.tx)
        if a.bias_I == 1:
            cuda.syncthreads()
            for n in range(t, N, threads):
                for other in range(1, R):
                    x[n * lead_x] += x[n * lead_x + other]
        if a.bias_J == 1:
            cuda.syncthreads()
            for n in range(t, R, threads):
                for other in range(1, N):
                    x[n] += x[other * lead_x + n]
        cuda.syncthreads()
        first_ptr = a.dbias_ptr + own_b * a.dbias_b + own_h * a.dbias_h
        for e in range(t, R * N, threads):
            r, n = e // N, e % N
            if i_first + r < a.bias_I and j_first + n < a.bias_J:
                at = (i_first + r) * a.dbias_i + (j_first + n) * a.dbias_j
                write(first_ptr + at, x[n * lead_x + r])

    return Kernel(kernel, threads, blocks=1)
