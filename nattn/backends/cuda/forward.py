"""The forward kernel: a block owns query rows and streams the keys past them.

    S = scale * Q K     X = change(S)     P = exp(X - row_max)     O = O * alpha + P V

The products are register tiles. Between them the scores lie in shared memory, where one thread for
each row, or a few, changes them: a row's maximum and sum never leave the threads that own it. The
heads that share a key head share its blocks too: rows are numbered through all of them.

Where queries are few, the keys are cut into spans, one block each, whose results `merge_kernel`
puts together in order, by the maximum and the sum of each: their logarithm would round away what
tells huge scores apart.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, types

from ...functions.masks import FULL
from . import rows, score
from .rows import keys_of, keys_of_packed_rows, packed_row
from .steps import LOG2E, PAD, products, score_product, scores_size, stage_size, weighted_sum
from .target import SIMULATED, Kernel, exp2, load, read_int64, record, store
from .tiles import Tile

ARGS = record(
    "ForwardArgs",
    (
        # arrays: byte address, and byte strides over item, head, row, column
        *("q", "q_b", "q_h", "q_n", "q_d"),
        *("k", "k_b", "k_h", "k_n", "k_d"),
        *("v", "v_b", "v_h", "v_n", "v_d"),
        *("out", "out_b", "out_h", "out_n", "out_d"),
        # addresses: contiguous (B, Hq, Nq) lse; (Hq,) sinks or 0
        *("lse", "sinks"),
        # the items of this launch: address of int64, and how many; tiles of rows of a key head
        *("items", "n_items", "tiles"),
        # where the keys are cut into spans: how many at most; the rows of an item that exist, at
        # most; addresses of contiguous (spans, n_items, Hq, share_rows, Dv) of what each span gave,
        # and two of (spans, n_items, Hq, share_rows): its row_max, or 0 without spans, and row_sum
        *("spans", "share_rows", "share", "share_max", "share_sum"),
        *("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv"),
        # int64 (B,): keys of a span
        "span",
        *rows.FIELDS,
        *score.FIELDS,
        *("scale", "kept"),
    ),
)
"""What a kernel gets: ints, but for the last two."""


@functools.lru_cache(maxsize=256)
def forward_kernel(tile: Tile, functions: score.Functions) -> Kernel:
    """Return the kernel for a tile and for what happens to scores."""
    R, N, TX, threads = tile.rows, tile.columns, tile.tx, tile.threads
    width, parts, quads = tile.width, tile.parts, tile.columns // 4
    dtype = getattr(types, tile.dtype)
    p, steps = products(tile), score.steps(functions)
    RM, RN, RD = p.RM, p.RN, p.RD
    row_of, clear, rescale = p.row_of, p.clear, p.rescale
    put_sums, put_out = p.put_rows(tile.dtype), p.put_rows(tile.storage)
    multiply, add = score_product(tile), weighted_sum(tile)
    power = exp2(tile.dtype)
    change, change_full = steps.change, steps.change_full
    random, kind, sees_block = steps.words4, score.kind, score.sees_block
    dropout, blocks = functions.dropout, functions.blocks
    write_row, read_row, itemsize = store(tile.dtype), load(tile.dtype), tile.itemsize
    size, lead_x = stage_size(tile), R + PAD
    n_scores, n_sums, n_x, n_stats = RM * RN, RM * RD, scores_size(tile), R * parts
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
        places = cuda.local.array(RM, types.int64)
        t = cuda.threadIdx.x & (threads - 1)
        ty, tx = t // TX, t % TX
        # The last tiles first: under a causal mask they are the longest.
        index = cuda.blockIdx.x
        n_span = index % a.spans
        index = index // a.spans
        tile_index = a.tiles - 1 - index % a.tiles
        index = index // a.tiles
        kv_head = index % a.Hkv
        slot = index // a.Hkv
        b = read_int64(a.items + 8 * slot)
        first_column = cuda.blockIdx.y * width
        q = a.q + b * a.q_b
        k = a.k + b * a.k_b + kv_head * a.k_h
        v = a.v + b * a.v_b + kv_head * a.v_h

        # A thread's own row, one of those that packs all heads of the group.
        part, m = t // R, t % R
        first = tile_index * R
        head, i = packed_row(a, kv_head, first + m)
        pos, lo, hi = keys_of(a, b, i)
        if part == 0:
            q_heads[m] = head
            q_rows[m] = i if lo < hi else -1
        block_lo, block_hi = keys_of_packed_rows(a, b, first, R)
        if a.share_max != 0:
            span = read_int64(a.span + 8 * b)
            block_lo = max(block_lo, n_span * span)
            block_hi = min(block_hi, (n_span + 1) * span)

        row_max, row_sum = -inf, dtype(0.0)
        clear(acc, n_sums)
        n0 = block_lo // N * N
        while n0 < block_hi:
            if blocks:
                some = sees_block(a, b, head, i, max(n0, lo), min(n0 + N, hi))
                if not cuda.syncthreads_or(types.int32(some)):
                    n0 += N
                    continue
            for n in range(t, N, threads):
                k_heads[n] = 0
                k_rows[n] = n0 + n if n0 + n < block_hi else -1
            queries = (q, q_heads, q_rows, a.q_h, a.q_n, a.q_d)
            keys = (k, k_heads, k_rows, 0, a.k_n, a.k_d)
            multiply(s, x, stage, dtype(a.scale), a.D, queries, keys, ty, tx, t)
            cuda.syncthreads()

            # A row's own threads change its scores, four neighbouring keys at a time.
            largest = -inf
            for g in range(part, quads, parts):
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
                    if score_ > largest:
                        largest = score_
            if parts > 1:
                stats[part * R + m] = largest
                cuda.syncthreads()
                for other in range(parts):
                    if stats[other * R + m] > largest:
                        largest = stats[other * R + m]
                cuda.syncthreads()
            new_max = largest if largest > row_max else row_max
            base = dtype(0.0) if new_max == -inf else new_max
            alpha = power((row_max - base) * log2e)
            row_max = new_max
            row_sum = row_sum * alpha
            for g in range(part, quads, parts):
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
            if part == 0:
                stats[m] = alpha
            cuda.syncthreads()
            rescale(acc, stats, ty)

            add(acc, x, stage, v, k_heads, k_rows, 0, a.v_n, a.v_d, first_column, a.Dv, ty, tx, t)
            n0 += N

        # The sums of a row's threads, in order; then the sink, a score without a value.
        if parts > 1:
            stats[part * R + m] = row_sum
            cuda.syncthreads()
            row_sum = stats[m]
            for other in range(1, parts):
                row_sum += stats[other * R + m]
            cuda.syncthreads()
        inverse = dtype(0.0)
        if i >= 0 and i < read_int64(a.q_lens + 8 * b):
            factor = dtype(1.0)
            if a.sinks != 0 and a.share_max == 0:
                sink = read_row(a.sinks + head * itemsize)
                if sink != -inf:
                    top = sink if not (sink <= row_max) else row_max
                    # where nothing is visible, row_max - top is -inf: nothing is left of row_sum
                    factor = power((row_max - top) * log2e)
                    row_sum = row_sum * factor + power((sink - top) * log2e)
                    row_max = top
            if row_sum != dtype(0.0):
                inverse = factor / (row_sum * dtype(a.kept))
        if part == 0:
            stats[m] = inverse
            if i >= 0 and first_column == 0:
                if a.share_max != 0:
                    at = ((n_span * a.n_items + slot) * a.Hq + head) * a.share_rows + i
                    write_row(a.share_max + at * itemsize, row_max)
                    write_row(a.share_sum + at * itemsize, row_sum)
                else:
                    at = (b * a.Hq + head) * a.Nq + i
                    end = -inf if row_sum == dtype(0.0) else row_max + math.log(row_sum)
                    write_row(a.lse + at * itemsize, end)
        cuda.syncthreads()
        rescale(acc, stats, ty)
        for m_ in range(RM):
            row = first + row_of(ty, m_)
            address = 0
            head, i = packed_row(a, kv_head, row)
            if i >= 0:
                if a.share_max != 0:
                    at = ((n_span * a.n_items + slot) * a.Hq + head) * a.share_rows + i
                    address = a.share + at * a.Dv * itemsize
                else:
                    address = a.out + b * a.out_b + head * a.out_h + i * a.out_n
            places[m_] = address
        if a.share_max != 0:
            put_sums(acc, places, itemsize, first_column, a.Dv, tx)
        else:
            put_out(acc, places, a.out_d, first_column, a.Dv, tx)

    return Kernel(kernel, threads, blocks=1)


MERGE_THREADS = 2 if SIMULATED else 128


@functools.lru_cache(maxsize=16)
def merge_kernel(storage: str, threads: int = MERGE_THREADS) -> Kernel:
    """Return the kernel that puts together what the spans of keys gave; a block has one row."""
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
        b = read_int64(a.items + 8 * slot)
        place = (slot * a.Hq + head) * a.share_rows + i
        step = a.n_items * a.Hq * a.share_rows
        span = read_int64(a.span + 8 * b)
        count = (read_int64(a.kv_lens + 8 * b) + span - 1) // span
        if i >= a.share_rows:  # past the item's last row
            count = 0
        sink = -inf
        if a.sinks != 0 and i < read_int64(a.q_lens + 8 * b):
            sink = read(a.sinks + head * itemsize)
        top = sink
        for n in range(count):
            largest = read(a.share_max + (n * step + place) * itemsize)
            if largest > top:
                top = largest
        base = dtype(0.0) if top == -inf else top
        total = power((sink - base) * log2e)
        for n in range(count):
            at = (n * step + place) * itemsize
            weight = power((read(a.share_max + at) - base) * log2e)
            total += weight * read(a.share_sum + at)
        if cuda.threadIdx.x == 0:
            end = -inf if total == dtype(0.0) else top + math.log(total)
            write_row(a.lse + ((b * a.Hq + head) * a.Nq + i) * itemsize, end)
        for column in range(cuda.threadIdx.x, a.Dv, threads):
            value = dtype(0.0)
            for n in range(count):
                at = n * step + place
                weight = power((read(a.share_max + at * itemsize) - base) * log2e)
                weight = weight * read(a.share_sum + at * itemsize)
                value += weight * read(a.share + (at * a.Dv + column) * itemsize)
            if total != dtype(0.0):
                value = value / total
            at = b * a.out_b + head * a.out_h + i * a.out_n + column * a.out_d
            write(a.out + at, value)

    return Kernel(kernel, threads, blocks=1)
