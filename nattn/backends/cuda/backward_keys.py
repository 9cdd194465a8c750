"""The backward kernel whose blocks own keys: of dk and dv."""

from __future__ import annotations

import functools
import math

from numba import cuda, types

from . import score
from .backward_queries import row_loader
from .prologue import dout_rows, key_rows, prologue, query_rows, value_rows
from .specialization import Functions
from .steps import LOG2E, PAD, products, score_product, scores_size, stage_size, weighted_sum
from .target import Kernel, exp2, read_int64
from .tiles import BlockTile
from .visibility import packed_row, rows_of_keys


@functools.lru_cache(maxsize=256)
def key_kernel(tile: BlockTile, functions: Functions) -> Kernel:
    """Return the kernel of dk and dv: a block owns keys and streams the queries of their group."""
    R, N, threads = tile.rows, tile.columns, tile.threads
    width, dtype = tile.width, getattr(types, tile.dtype)
    begin, p, steps = prologue(tile), products(tile), score.steps(functions)
    RM, row_of, clear, times = p.RM, p.row_of, p.clear, p.times
    load_row, sees_block = row_loader(tile.dtype), score.sees_block
    multiply, add = score_product(tile), weighted_sum(tile)
    change_and_derive, random = steps.change_and_derive, steps.words4
    dropout, blocks = functions.dropout, functions.blocks
    power, put = exp2(tile.dtype), p.put_rows(tile.storage)
    size, n_x = stage_size(tile), scores_size(tile)
    n_scores, n_sums = RM * p.RN, RM * p.RD
    lead_x = R + PAD
    # Random words come for four neighbouring keys, which one thread then takes together.
    each = 4 if dropout else 1
    lanes = R // each
    per_lane = threads // lanes
    inf, log2e = dtype(math.inf), dtype(LOG2E)

    def kernel(a):
        x = cuda.shared.array(n_x, dtype, alignment=16)
        y = cuda.shared.array(n_x, dtype, alignment=16)
        stage = cuda.shared.array(size, dtype, alignment=16)
        k_heads = cuda.shared.array(R, types.int32)
        k_rows = cuda.shared.array(R, types.int32)
        q_heads = cuda.shared.array(N, types.int32)
        q_rows = cuda.shared.array(N, types.int32)
        los = cuda.shared.array(N, types.int32)
        his = cuda.shared.array(N, types.int32)
        lses = cuda.shared.array(N, dtype)
        deltas = cuda.shared.array(N, dtype)
        acc_k = cuda.local.array(n_sums, dtype)
        acc_v = cuda.local.array(n_sums, dtype)
        s = cuda.local.array(n_scores, dtype)
        row_ptrs = cuda.local.array(RM, types.int64)
        place = begin(1, (a.Nk + R - 1) // R, a.Hkv)
        t, k0, kv_head, b = place.t, place.tile * R, place.head, place.item
        first_column = cuda.blockIdx.y * width
        wants_k = a.dk_ptr != 0 and first_column < a.D
        wants_v = a.dv_ptr != 0 and first_column < a.Dv
        q, dout = query_rows(a, b, q_heads, q_rows), dout_rows(a, b, q_heads, q_rows)
        k = key_rows(a, b, kv_head, k_heads, k_rows)
        v = value_rows(a, b, kv_head, k_heads, k_rows)
        offset = read_int64(a.q_offset_ptr + 8 * b)
        k1 = min(k0 + R, read_int64(a.kv_lens_ptr + 8 * b))
        for m in range(t, R, threads):
            k_heads[m] = 0
            k_rows[m] = k0 + m if k0 + m < k1 else -1
        i_lo, i_hi = rows_of_keys(a, b, k0, k1)
        n_rows = a.group * a.Nq
        if k0 >= k1 or i_lo >= i_hi or not (wants_k or wants_v):
            n_rows = 0

        inverse = dtype(1.0) / dtype(a.keep_prob)
        lane, nth = t % lanes, t // lanes
        clear(acc_k, n_sums)
        clear(acc_v, n_sums)
        first = 0
        while first < n_rows:
            first_head = first // a.Nq
            i_first = first - first_head * a.Nq
            i_last = min(first + N, n_rows) - 1 - first_head * a.Nq
            if (i_first >= i_hi or i_last < i_lo) and i_last < a.Nq:
                first += N  # rows of one head that see none of these keys
                continue
            some = 0
            for n in range(t, N, threads):
                head, i = packed_row(a, kv_head, first + n)
                row = load_row(a, b, head, i)
                lo, hi = max(row.lo, k0), min(row.hi, k1)
                if blocks and lo < hi and sees_block(a, b, head, i, lo, hi) == 0:
                    hi = lo
                if lo < hi:
                    some = 1
                else:
                    lo, hi, i = 0, 0, -1
                q_heads[n] = head
                q_rows[n] = i
                los[n] = lo
                his[n] = hi
                lses[n] = row.lse
                deltas[n] = row.delta
            if not cuda.syncthreads_or(types.int32(some)):
                first += N
                continue
            multiply(s, x, stage, dtype(a.scale), a.D, k, q, place)
            if wants_k:
                multiply(s, y, stage, dtype(1.0), a.Dv, v, dout, place)
            cuda.syncthreads()

            # Each thread has one key or four, of some of the rows.
            for n in range(nth, N, per_lane):
                head, i = types.int64(q_heads[n]), types.int64(q_rows[n])
                lo, hi = los[n], his[n]
                lse, delta = lses[n], deltas[n]
                if dropout:
                    w0, w1, w2, w3 = random(a, b, head, i, (k0 + lane * each) // 4)
                for u in range(each):
                    m = lane * each + u
                    key = k0 + m
                    at = n * lead_x + m
                    weight, gradient = dtype(-0.0), dtype(-0.0)
                    if lo <= key and key < hi:
                        score_, slope = change_and_derive(a, b, head, i, i + offset, key, x[at])
                        if score_ != -inf:
                            prob = power((score_ - lse) * log2e)
                            dp = y[at] if wants_k else dtype(0.0)
                            weight = prob
                            if dropout:
                                word = w0 if u == 0 else w1 if u == 1 else w2 if u == 2 else w3
                                weight, dp = prob * inverse, dp * inverse
                                if word < a.threshold:
                                    weight, dp = dtype(-0.0), dtype(0.0)
                            gradient = prob * (dp - delta) * slope
                            if gradient == dtype(0.0):
                                gradient = dtype(0.0)  # and not -0.0
                    x[at] = weight
                    y[at] = gradient
            cuda.syncthreads()
            if wants_v:
                add(acc_v, x, stage, dout, first_column, a.Dv, place)
            if wants_k:
                add(acc_k, y, stage, q, first_column, a.D, place)
            first += N

        if wants_v:
            for m_ in range(RM):
                key = k0 + row_of(place.ty, m_)
                at = a.dv_ptr + b * a.dv_b + kv_head * a.dv_h + key * a.dv_n
                row_ptrs[m_] = at if key < a.Nk else 0
            put(acc_v, row_ptrs, a.dv_d, first_column, a.Dv, place.tx)
        if wants_k:
            times(acc_k, dtype(a.scale))
            for m_ in range(RM):
                key = k0 + row_of(place.ty, m_)
                at = a.dk_ptr + b * a.dk_b + kv_head * a.dk_h + key * a.dk_n
                row_ptrs[m_] = at if key < a.Nk else 0
            put(acc_k, row_ptrs, a.dk_d, first_column, a.D, place.tx)

    return Kernel(kernel, threads, blocks=1)
