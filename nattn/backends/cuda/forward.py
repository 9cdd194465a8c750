"""The forward kernel: a block owns query rows and streams the keys past them.

    S = scale * Q K     X = change(S)     P = exp(X - row_max)     O = O * alpha + P V

The products are register tiles. Between them the scores lie in shared memory, where one thread for
each row, or a few, changes them: a row's maximum and sum never leave the threads that own it. The
heads that share a key head share its blocks too: rows are numbered through all of them.

Where queries are few, the keys are cut into splits, one block each, whose partial results
`merge_kernel` puts together in order, by the maximum and the sum of each: their logarithm would
round away what tells huge scores apart.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, types

from ...functions.masks import FULL
from . import operands, score, visibility
from .prologue import key_numbers, key_rows, prologue, query_rows, value_rows
from .specialization import Functions
from .steps import LOG2E, PAD, products, score_product, scores_size, stage_size, weighted_sum
from .target import SIMULATED, Kernel, exp2, load, read_int64, record, store
from .tiles import BlockTile
from .visibility import keys_of, keys_of_packed_rows, packed_row

ARGS = record(
    "ForwardArgs",
    (
        # arrays: byte address, and byte strides over item, head, row, column
        *("q_ptr", "q_b", "q_h", "q_n", "q_d"),
        *("k_ptr", "k_b", "k_h", "k_n", "k_d"),
        *("v_ptr", "v_b", "v_h", "v_n", "v_d"),
        *("out_ptr", "out_b", "out_h", "out_n", "out_d"),
        # addresses: contiguous (B, Hq, Nq) lse; (Hq,) sinks or 0
        *("lse_ptr", "sinks_ptr"),
        # the items of this launch: address of int64, and how many; tiles of rows of a key head
        *("items_ptr", "n_items", "n_tiles"),
        # where the keys are split: into how many at most; the rows of an item that exist, at most;
        # addresses of contiguous (n_splits, n_items, Hq, partial_n_rows, Dv) of what each split
        # gave, and two of (n_splits, n_items, Hq, partial_n_rows): its row_max, 0 where the keys
        # are not split, and row_sum
        *("n_splits", "partial_n_rows", "partial_out_ptr", "partial_max_ptr", "partial_sum_ptr"),
        *("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv"),
        # address of int64 (B,): keys of a split
        "split_keys_ptr",
        *visibility.FIELDS,
        *operands.FIELDS,
        *("scale", "keep_prob"),
    ),
)
"""What a kernel gets: ints, but for the last two."""


@functools.lru_cache(maxsize=256)
def forward_kernel(tile: BlockTile, functions: Functions) -> Kernel:
    """Return the kernel for a tile and for what happens to scores."""
    R, N, width, quads = tile.rows, tile.columns, tile.width, tile.columns // 4
    per_row = tile.threads_per_row
    dtype = getattr(types, tile.dtype)
    p, steps = products(tile), score.steps(functions)
    RM, RN, RD = p.RM, p.RN, p.RD
    row_of, clear, rescale = p.row_of, p.clear, p.rescale
    put_sums, put_out = p.put_rows(tile.dtype), p.put_rows(tile.storage)
    begin, number_keys = prologue(tile), key_numbers(tile)
    multiply, add = score_product(tile), weighted_sum(tile)
    power = exp2(tile.dtype)
    change, change_full = steps.change, steps.change_full
    random, kind, sees_block = steps.words4, score.kind, score.sees_block
    dropout, blocks = functions.dropout, functions.blocks
    write_row, read_row, itemsize = store(tile.dtype), load(tile.dtype), tile.itemsize
    size, lead_x = stage_size(tile), R + PAD
    n_scores, n_sums, n_x, n_stats = RM * RN, RM * RD, scores_size(tile), R * per_row
    inf, log2e = dtype(math.inf), dtype(LOG2E)

    def kernel(a):
        x = cuda.shared.array(n_x, dtype, alignment=16)
        stage = cuda.shared.array(size, dtype, alignment=16)
        stats = cuda.shared.array(n_stats, dtype, alignment=16)
        q_heads = cuda.shared.array(R, types.int32)
        q_rows = cuda.shared.array(R, types.int32)
        k_heads = cuda.shared.array(N, types.int32)
        k_rows = cuda.shared.array(N, types.int32)
        acc = cuda.local.array(n_sums, dtype)
        s = cuda.local.array(n_scores, dtype)
        row_ptrs = cuda.local.array(RM, types.int64)
        place = begin(a.n_splits, a.n_tiles, a.Hkv)
        nth, m, kv_head = place.nth, place.m, place.head
        b = read_int64(a.items_ptr + 8 * place.item)
        # The last tiles first: under a causal mask they are the longest.
        first = (a.n_tiles - 1 - place.tile) * R
        first_column = cuda.blockIdx.y * width
        queries = query_rows(a, b, q_heads, q_rows)
        keys = key_rows(a, b, kv_head, k_heads, k_rows)
        values = value_rows(a, b, kv_head, k_heads, k_rows)

        # A thread's own row, one of those that packs all heads of the group.
        head, i = packed_row(a, kv_head, first + m)
        pos, lo, hi = keys_of(a, b, i)
        if nth == 0:
            q_heads[m] = head
            q_rows[m] = i if lo < hi else -1
        block_lo, block_hi = keys_of_packed_rows(a, b, first, R)
        if a.partial_max_ptr != 0:
            split_keys = read_int64(a.split_keys_ptr + 8 * b)
            block_lo = max(block_lo, place.split * split_keys)
            block_hi = min(block_hi, (place.split + 1) * split_keys)

        row_max, row_sum = -inf, dtype(0.0)
        clear(acc, n_sums)
        n0 = block_lo // N * N
        while n0 < block_hi:
            if blocks:
                some = sees_block(a, b, head, i, max(n0, lo), min(n0 + N, hi))
                if not cuda.syncthreads_or(types.int32(some)):
                    n0 += N
                    continue
            number_keys(k_heads, k_rows, n0, block_hi, place.t)
            multiply(s, x, stage, dtype(a.scale), a.D, queries, keys, place)
            cuda.syncthreads()

            # A row's own threads change its scores, four neighbouring keys at a time.
            tile_max = -inf
            for g in range(nth, quads, per_row):
                for u in range(4):
                    key = n0 + 4 * g + u
                    at = (4 * g + u) * lead_x + m
                    score_ = -inf
                    if lo <= key and key < hi and key < block_hi:
                        if blocks and kind(a, b, head, i, key) == FULL:
                            score_ = change_full(a, b, head, i, pos, key, x[at])
                        else:
                            score_ = change(a, b, head, i, pos, key, x[at])
                    x[at] = score_
                    if score_ > tile_max:
                        tile_max = score_
            if per_row > 1:
                stats[nth * R + m] = tile_max
                cuda.syncthreads()
                for other in range(per_row):
                    if stats[other * R + m] > tile_max:
                        tile_max = stats[other * R + m]
                cuda.syncthreads()
            new_max = tile_max if tile_max > row_max else row_max
            base = dtype(0.0) if new_max == -inf else new_max
            alpha = power((row_max - base) * log2e)
            row_max = new_max
            row_sum = row_sum * alpha
            for g in range(nth, quads, per_row):
                if dropout:
                    w0, w1, w2, w3 = random(a, b, head, i, (n0 + 4 * g) // 4)
                for u in range(4):
                    at = (4 * g + u) * lead_x + m
                    score_ = x[at]
                    weight = power((score_ - base) * log2e)
                    row_sum += weight
                    if score_ == -inf:
                        weight = dtype(-0.0)
                    if dropout:
                        word = w0 if u == 0 else w1 if u == 1 else w2 if u == 2 else w3
                        if word < a.threshold:
                            weight = dtype(-0.0)
                    x[at] = weight
            if nth == 0:
                stats[m] = alpha
            cuda.syncthreads()
            rescale(acc, stats, place.ty)

            add(acc, x, stage, values, first_column, a.Dv, place)
            n0 += N

        # The sums of a row's threads, in order; then the sink, a score without a value.
        if per_row > 1:
            stats[nth * R + m] = row_sum
            cuda.syncthreads()
            row_sum = stats[m]
            for other in range(1, per_row):
                row_sum += stats[other * R + m]
            cuda.syncthreads()
        inverse = dtype(0.0)
        if i >= 0 and i < read_int64(a.q_lens_ptr + 8 * b):
            factor = dtype(1.0)
            if a.sinks_ptr != 0 and a.partial_max_ptr == 0:
                sink = read_row(a.sinks_ptr + head * itemsize)
                if sink != -inf:
                    new_max = sink if not (sink <= row_max) else row_max
                    # nothing visible: row_max - new_max is -inf, and nothing is left of row_sum
                    factor = power((row_max - new_max) * log2e)
                    row_sum = row_sum * factor + power((sink - new_max) * log2e)
                    row_max = new_max
            if row_sum != dtype(0.0):
                inverse = factor / (row_sum * dtype(a.keep_prob))
        if nth == 0:
            stats[m] = inverse
            if i >= 0 and first_column == 0:
                if a.partial_max_ptr != 0:
                    at = place.split * a.n_items + place.item
                    at = (at * a.Hq + head) * a.partial_n_rows + i
                    write_row(a.partial_max_ptr + at * itemsize, row_max)
                    write_row(a.partial_sum_ptr + at * itemsize, row_sum)
                else:
                    at = (b * a.Hq + head) * a.Nq + i
                    end = -inf if row_sum == dtype(0.0) else row_max + math.log(row_sum)
                    write_row(a.lse_ptr + at * itemsize, end)
        cuda.syncthreads()
        rescale(acc, stats, place.ty)
        for m_ in range(RM):
            row = first + row_of(place.ty, m_)
            address = 0
            head, i = packed_row(a, kv_head, row)
            if i >= 0:
                if a.partial_max_ptr != 0:
                    at = place.split * a.n_items + place.item
                    at = (at * a.Hq + head) * a.partial_n_rows + i
                    address = a.partial_out_ptr + at * a.Dv * itemsize
                else:
                    address = a.out_ptr + b * a.out_b + head * a.out_h + i * a.out_n
            row_ptrs[m_] = address
        if a.partial_max_ptr != 0:
            put_sums(acc, row_ptrs, itemsize, first_column, a.Dv, place.tx)
        else:
            put_out(acc, row_ptrs, a.out_d, first_column, a.Dv, place.tx)

    return Kernel(kernel, tile.threads, blocks=1)


MERGE_THREADS = 2 if SIMULATED else 128


@functools.lru_cache(maxsize=16)
def merge_kernel(storage: str, threads: int = MERGE_THREADS) -> Kernel:
    """Return the kernel that puts together what splits of keys gave; a block has one row."""
    dtype = types.float64 if storage == "float64" else types.float32
    name = "float64" if storage == "float64" else "float32"
    itemsize = 8 if storage == "float64" else 4
    read, write_row, write, power = load(name), store(name), store(storage), exp2(name)
    inf, log2e = dtype(math.inf), dtype(LOG2E)

    def kernel(a):
        row = cuda.blockIdx.x
        i = row % a.Nq
        head = row // a.Nq % a.Hq
        slot = row // (a.Nq * a.Hq)
        b = read_int64(a.items_ptr + 8 * slot)
        index = (slot * a.Hq + head) * a.partial_n_rows + i
        step = a.n_items * a.Hq * a.partial_n_rows
        split_keys = read_int64(a.split_keys_ptr + 8 * b)
        n_splits = (read_int64(a.kv_lens_ptr + 8 * b) + split_keys - 1) // split_keys
        if i >= a.partial_n_rows:  # past the item's last row
            n_splits = 0
        sink = -inf
        if a.sinks_ptr != 0 and i < read_int64(a.q_lens_ptr + 8 * b):
            sink = read(a.sinks_ptr + head * itemsize)
        row_max = sink
        for n in range(n_splits):
            split_max = read(a.partial_max_ptr + (n * step + index) * itemsize)
            if split_max > row_max:
                row_max = split_max
        base = dtype(0.0) if row_max == -inf else row_max
        total = power((sink - base) * log2e)
        for n in range(n_splits):
            at = (n * step + index) * itemsize
            weight = power((read(a.partial_max_ptr + at) - base) * log2e)
            total += weight * read(a.partial_sum_ptr + at)
        if cuda.threadIdx.x == 0:
            end = -inf if total == dtype(0.0) else row_max + math.log(total)
            write_row(a.lse_ptr + ((b * a.Hq + head) * a.Nq + i) * itemsize, end)
        for column in range(cuda.threadIdx.x, a.Dv, threads):
            value = dtype(0.0)
            for n in range(n_splits):
                at = n * step + index
                weight = power((read(a.partial_max_ptr + at * itemsize) - base) * log2e)
                weight = weight * read(a.partial_sum_ptr + at * itemsize)
                value += weight * read(a.partial_out_ptr + (at * a.Dv + column) * itemsize)
            if total != dtype(0.0):
                value = value / total
            at = b * a.out_b + head * a.out_h + i * a.out_n + column * a.out_d
            write(a.out_ptr + at, value)

    return Kernel(kernel, threads, blocks=1)
