"""The backward kernels: gradients from the scores, computed again tile by tile from q, k and lse.

    S = scale * Q K     P = exp(change(S) - lse)     dP = dO V     dS = P * (dP - delta)
    dQ = scale * dS' K     dK = scale * dS' Q     dV = P dO     dS' = dS * derivative of change

Each kernel owns what it writes and streams past all that adds to it, in one order: query rows own
dq and stream keys, keys own dk and dv and stream the query rows of their group, an element of the
bias owns its gradient and streams whatever it was broadcast along. So nothing is added by two
blocks, and no share of a sum lies in memory. The price is that S and dP are computed by each.

A hidden pair is -0.0 in a tile, as in the forward pass, a visible one never.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

from numba import cuda, types

from . import rows as query_rows
from . import score
from .rows import keys_of, keys_of_packed_rows, keys_of_rows, packed_row
from .steps import (
    LOG2E,
    PAD,
    products,
    score_product,
    scores_size,
    stage_size,
    tree_sum,
    weighted_sum,
)
from .target import Kernel, device, exp2, load, read_int64, record, store
from .tiles import DELTA_LANES, DELTA_ROWS, SUM_THREADS, Tile, key_tile, pair_tile, row_tile

ARGS = record(
    "BackwardArgs",
    (
        # arrays: byte address, and byte strides over item, head, row, column
        *("q", "q_b", "q_h", "q_n", "q_d"),
        *("k", "k_b", "k_h", "k_n", "k_d"),
        *("v", "v_b", "v_h", "v_n", "v_d"),
        *("dout", "dout_b", "dout_h", "dout_n", "dout_d"),
        *("out", "out_b", "out_h", "out_n", "out_d"),
        # results, written whole; address 0 where one is not wanted
        *("dq", "dq_b", "dq_h", "dq_n", "dq_d"),
        *("dk", "dk_b", "dk_h", "dk_n", "dk_d"),
        *("dv", "dv_b", "dv_h", "dv_n", "dv_d"),
        # the gradient of the bias, and its own shape: 1 where it was broadcast
        *("dbias", "dbias_b", "dbias_h", "dbias_i", "dbias_j"),
        *("bias_B", "bias_H", "bias_I", "bias_J"),
        # (Hq,), and (slopes_B, Hq), where slopes_B is B, or 1 for slopes that all items share
        *("dsinks", "dsinks_h", "dslopes", "dslopes_b", "dslopes_h", "slopes_B"),
        # addresses of contiguous (B, Hq, Nq) in the compute dtype: lse; dlse or 0; what
        # `delta_kernel` writes; what `query_kernel` adds up for the slopes, or 0
        *("lse", "dlse", "delta", "distance_sum"),
        # address of contiguous (Hq,) in the compute dtype
        "sinks",
        *("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv"),
        *query_rows.FIELDS,
        *score.FIELDS,
        *("scale", "kept"),
    ),
)
"""What a kernel gets: ints, but for the last two."""


def _ceil(n: int, step: int) -> int:
    return -(-n // step)


def delta_grid(a: Any) -> tuple[int, ...]:
    """Return the blocks of `delta_kernel` for what it gets."""
    return (_ceil(a.B * a.Hq * a.Nq, DELTA_ROWS),)


def query_grid(a: Any, tile: Tile) -> tuple[int, ...]:
    """Return the blocks of `query_kernel`."""
    return (a.B * a.Hkv * _ceil(a.group * a.Nq, tile.rows), max(1, _ceil(a.D, tile.width)))


def key_grid(a: Any, tile: Tile) -> tuple[int, ...]:
    """Return the blocks of `key_kernel`."""
    return (a.B * a.Hkv * _ceil(a.Nk, tile.rows), max(1, _ceil(max(a.D, a.Dv), tile.width)))


def bias_grid(a: Any, tile: Tile) -> tuple[int, ...]:
    """Return the blocks of `bias_kernel`."""
    return (a.bias_B * a.bias_H * _ceil(a.bias_I, tile.rows) * _ceil(a.bias_J, tile.columns),)


def gradient_launches(
    a: Any,
    storage: str,
    wide: bool,
    functions: score.Functions,
    bias: str = "",
    sinks: str = "",
    slopes: str = "",
) -> list[tuple[Kernel, tuple[int, ...]]]:
    """Return the kernels that write the gradients of a call, in order, and their grids.

    Parameters
    ----------
    a : ARGS
        What all of them get. Results whose address is 0 are left out.
    storage : str
        How q, k, v and dout are stored.
    wide : bool
        Whether rows of q, k, v and dout may be read four elements at a time.
    functions : score.Functions
        What happens to scores, with derivatives.
    bias, sinks, slopes : str
        How their gradients are stored, of those that are wanted.

    Returns
    -------
    list of (Kernel, tuple)
        None of them if there is nothing to write.
    """
    launches = [(delta_kernel(storage), delta_grid(a))]
    if a.dq != 0 or a.dslopes != 0:
        tile = row_tile(storage, a.D, wide)
        launches.append((query_kernel(tile, functions), query_grid(a, tile)))
    if a.dk != 0 or a.dv != 0:
        tile = key_tile(storage, max(a.D, a.Dv), wide)
        launches.append((key_kernel(tile, functions), key_grid(a, tile)))
    if a.dbias != 0:
        tile = pair_tile(storage, wide)
        launches.append((bias_kernel(tile, functions, bias), bias_grid(a, tile)))
    if a.dsinks != 0:
        launches.append((sink_kernel(storage, sinks), (a.Hq,)))
    if a.dslopes != 0:
        launches.append((slope_kernel(storage, slopes), (a.slopes_B * a.Hq,)))
    return [(kernel, grid) for kernel, grid in launches if math.prod(grid)]


@functools.lru_cache(maxsize=16)
def delta_kernel(storage: str) -> Kernel:
    """Return the kernel that writes ``rowsum(dout * out) - dlse``; a few threads share a row.

    Of a row that sees nothing `out` is 0, and not even a dout of NaN matters.
    """
    name = "float64" if storage == "float64" else "float32"
    dtype, itemsize = getattr(types, name), 8 if storage == "float64" else 4
    read, read_row, write_row = load(storage), load(name), store(name)
    rows, lanes = DELTA_ROWS, DELTA_LANES
    threads = rows * lanes

    def kernel(a):
        shares = cuda.shared.array(threads, dtype)
        sizes = cuda.shared.array(threads, dtype)
        t = cuda.threadIdx.x & (threads - 1)
        lane = t % lanes
        row = cuda.blockIdx.x * rows + t // lanes
        i = row % a.Nq
        head = row // a.Nq % a.Hq
        b = row // (a.Nq * a.Hq)
        exists = False
        if b < a.B:
            exists = i < read_int64(a.q_lens + 8 * b)
        share, size = dtype(0.0), dtype(0.0)
        if exists:
            out = a.out + b * a.out_b + head * a.out_h + i * a.out_n
            dout = a.dout + b * a.dout_b + head * a.dout_h + i * a.dout_n
            for d in range(lane, a.Dv, lanes):
                x = read(out + d * a.out_d)
                share += read(dout + d * a.dout_d) * x
                size += abs(x)
        shares[t] = share
        sizes[t] = size
        cuda.syncthreads()
        if lane == 0 and b < a.B:
            for other in range(1, lanes):
                share += shares[t + other]
                size += sizes[t + other]
            if size == dtype(0.0):
                share = dtype(0.0)
            if exists and a.dlse != 0:
                share -= read_row(a.dlse + row * itemsize)
            write_row(a.delta + row * itemsize, share)

    return Kernel(kernel, threads)


@functools.lru_cache(maxsize=256)
def row_steps(tile: Tile, functions: score.Functions, derive: bool) -> SimpleNamespace:
    """Return what kernels do whose threads own query rows.

    Returns
    -------
    namespace
        ``load_row(a, b, head, i)``: the position, keys lo <= j < hi, lse and delta of a row;
        ``differentiate(a, x, y, b, head, i, pos, lo, hi, end, delta, n0, m, part)``: turn the
        scores in row m of x into their gradient, that of what comes before the modifiers if
        `derive`; y holds dP. The sum over keys of the gradient times the distance is returned.
    """
    parts, quads = tile.parts, tile.columns // 4
    dtype, itemsize = getattr(types, tile.dtype), tile.itemsize
    steps = score.steps(functions)
    change, change_and_derive, random = steps.change, steps.change_and_derive, steps.words4
    dropout = functions.dropout
    power, read_row = exp2(tile.dtype), load(tile.dtype)
    lead_x = tile.rows + PAD
    inf, log2e = dtype(math.inf), dtype(LOG2E)

    def load_row(a, b, head, i):
        pos, lo, hi = keys_of(a, b, i)
        end, delta = dtype(0.0), dtype(0.0)
        if lo < hi:
            at = ((b * a.Hq + head) * a.Nq + i) * itemsize
            end, delta = read_row(a.lse + at), read_row(a.delta + at)
            if end == -inf:
                hi = 0  # it sees nothing
        return pos, lo, hi, end, delta

    def differentiate(a, x, y, b, head, i, pos, lo, hi, end, delta, n0, m, part):
        inverse = dtype(1.0) / dtype(a.kept)
        distances = dtype(0.0)
        for g in range(part, quads, parts):
            if dropout:
                w0, w1, w2, w3 = random(a, b, head, i, (n0 + 4 * g) // 4)
            for u in range(4):
                key = n0 + 4 * g + u
                at = (4 * g + u) * lead_x + m
                gradient = dtype(-0.0)
                if lo <= key and key < hi:
                    if derive:
                        s, slope = change_and_derive(a, b, head, i, pos, key, x[at])
                    else:
                        s = change(a, b, head, i, pos, key, x[at])
                    if s != -inf:
                        dp = y[at]
                        if dropout:
                            word = w0 if u == 0 else w1 if u == 1 else w2 if u == 2 else w3
                            dp = dtype(0.0) if word < a.threshold else dp * inverse
                        ds = power((s - end) * log2e) * (dp - delta)
                        if a.distance_sum != 0:
                            distances += ds * dtype(abs(pos - key))
                        gradient = ds * slope if derive else ds
                        if gradient == dtype(0.0):
                            gradient = dtype(0.0)  # and not -0.0
                x[at] = gradient
        return distances

    return SimpleNamespace(
        load_row=device(load_row),
        differentiate=device(differentiate),
    )


@functools.lru_cache(maxsize=256)
def query_kernel(tile: Tile, functions: score.Functions) -> Kernel:
    """Return the kernel of dq, and of each row's sum for the slopes: a block owns query rows."""
    R, N, TX, threads = tile.rows, tile.columns, tile.tx, tile.threads
    width, parts = tile.width, tile.parts
    dtype, itemsize = getattr(types, tile.dtype), tile.itemsize
    p, own = products(tile), row_steps(tile, functions, True)
    RM, row_of, clear, times = p.RM, p.row_of, p.clear, p.times
    load_row, sees_block = own.load_row, score.sees_block
    differentiate = own.differentiate
    multiply, add = score_product(tile), weighted_sum(tile)
    put, write_row = p.put_rows(tile.storage), store(tile.dtype)
    blocks = functions.blocks
    size, n_x, n_stats = stage_size(tile), scores_size(tile), R * parts
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
        places = cuda.local.array(RM, types.int64)
        t = cuda.threadIdx.x & (threads - 1)
        ty, tx = t // TX, t % TX
        # The last tiles first: under a causal mask they are the longest.
        tiles = (a.group * a.Nq + R - 1) // R
        index = cuda.blockIdx.x
        first = (tiles - 1 - index % tiles) * R
        index = index // tiles
        kv_head = index % a.Hkv
        b = types.int64(index // a.Hkv)
        column0 = cuda.blockIdx.y * width
        q, dout = a.q + b * a.q_b, a.dout + b * a.dout_b
        k = a.k + b * a.k_b + kv_head * a.k_h
        v = a.v + b * a.v_b + kv_head * a.v_h

        part, m = t // R, t % R
        head, i = packed_row(a, kv_head, first + m)
        pos, lo, hi, end, delta = load_row(a, b, head, i)
        if part == 0:
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
            for n in range(t, N, threads):
                k_heads[n] = 0
                k_rows[n] = n0 + n if n0 + n < block_hi else -1
            rows = (q, q_heads, q_rows, a.q_h, a.q_n, a.q_d)
            columns = (k, k_heads, k_rows, 0, a.k_n, a.k_d)
            multiply(s, x, stage, dtype(a.scale), a.D, rows, columns, ty, tx, t)
            rows = (dout, q_heads, q_rows, a.dout_h, a.dout_n, a.dout_d)
            columns = (v, k_heads, k_rows, 0, a.v_n, a.v_d)
            multiply(s, y, stage, dtype(1.0), a.Dv, rows, columns, ty, tx, t)
            cuda.syncthreads()
            distances += differentiate(a, x, y, b, head, i, pos, lo, hi, end, delta, n0, m, part)
            cuda.syncthreads()
            if a.dq != 0:
                add(acc, x, stage, k, k_heads, k_rows, 0, a.k_n, a.k_d, column0, a.D, ty, tx, t)
            n0 += N

        if a.distance_sum != 0 and column0 == 0:
            stats[part * R + m] = distances
            cuda.syncthreads()
            if part == 0 and i >= 0:
                for other in range(1, parts):
                    distances += stats[other * R + m]
                write_row(a.distance_sum + ((b * a.Hq + head) * a.Nq + i) * itemsize, distances)
        if a.dq != 0:
            times(acc, dtype(a.scale))
            for m_ in range(RM):
                head, i = packed_row(a, kv_head, first + row_of(ty, m_))
                address = 0
                if i >= 0:
                    address = a.dq + b * a.dq_b + head * a.dq_h + i * a.dq_n
                places[m_] = address
            put(acc, places, a.dq_d, column0, a.D, tx)

    return Kernel(kernel, threads, blocks=1)


@functools.lru_cache(maxsize=256)
def key_kernel(tile: Tile, functions: score.Functions) -> Kernel:
    """Return the kernel of dk and dv: a block owns keys and streams the queries of their group."""
    R, N, TX, threads = tile.rows, tile.columns, tile.tx, tile.threads
    width, dtype = tile.width, getattr(types, tile.dtype)
    p, steps = products(tile), score.steps(functions)
    own = row_steps(tile, functions, True)
    RM, row_of, clear, times = p.RM, p.row_of, p.clear, p.times
    load_row, sees_block = own.load_row, score.sees_block
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
    parts = threads // lanes
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
        ends = cuda.shared.array(N, dtype)
        deltas = cuda.shared.array(N, dtype)
        acc_k = cuda.local.array(n_sums, dtype)
        acc_v = cuda.local.array(n_sums, dtype)
        s = cuda.local.array(n_scores, dtype)
        places = cuda.local.array(RM, types.int64)
        t = cuda.threadIdx.x & (threads - 1)
        ty, tx = t // TX, t % TX
        tiles = (a.Nk + R - 1) // R
        index = cuda.blockIdx.x
        k0 = index % tiles * R
        index = index // tiles
        kv_head = index % a.Hkv
        b = types.int64(index // a.Hkv)
        column0 = cuda.blockIdx.y * width
        wants_k = a.dk != 0 and column0 < a.D
        wants_v = a.dv != 0 and column0 < a.Dv
        q, dout = a.q + b * a.q_b, a.dout + b * a.dout_b
        k = a.k + b * a.k_b + kv_head * a.k_h
        v = a.v + b * a.v_b + kv_head * a.v_h
        offset = read_int64(a.q_offset + 8 * b)
        k1 = min(k0 + R, read_int64(a.kv_lens + 8 * b))
        for m in range(t, R, threads):
            k_heads[m] = 0
            k_rows[m] = k0 + m if k0 + m < k1 else -1
        # The rows of a head that may see some of these keys.
        i_lo, i_hi = 0, read_int64(a.q_lens + 8 * b)
        if a.causal:
            i_lo = max(i_lo, k0 - offset)
        if a.right >= 0:
            i_lo = max(i_lo, k0 - a.right - offset)
        if a.left >= 0:
            i_hi = min(i_hi, k1 + a.left - offset)
        total = a.group * a.Nq
        if k0 >= k1 or i_lo >= i_hi or not (wants_k or wants_v):
            total = 0

        inverse = dtype(1.0) / dtype(a.kept)
        lane, part = t % lanes, t // lanes
        clear(acc_k, n_sums)
        clear(acc_v, n_sums)
        first = 0
        while first < total:
            first_head = first // a.Nq
            i_first = first - first_head * a.Nq
            i_last = min(first + N, total) - 1 - first_head * a.Nq
            if (i_first >= i_hi or i_last < i_lo) and i_last < a.Nq:
                first += N  # rows of one head that see none of these keys
                continue
            some = 0
            for n in range(t, N, threads):
                head, i = packed_row(a, kv_head, first + n)
                _, lo, hi, end, delta = load_row(a, b, head, i)
                lo, hi = max(lo, k0), min(hi, k1)
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
                ends[n] = end
                deltas[n] = delta
            if not cuda.syncthreads_or(types.int32(some)):
                first += N
                continue
            rows = (k, k_heads, k_rows, 0, a.k_n, a.k_d)
            columns = (q, q_heads, q_rows, a.q_h, a.q_n, a.q_d)
            multiply(s, x, stage, dtype(a.scale), a.D, rows, columns, ty, tx, t)
            if wants_k:
                rows = (v, k_heads, k_rows, 0, a.v_n, a.v_d)
                columns = (dout, q_heads, q_rows, a.dout_h, a.dout_n, a.dout_d)
                multiply(s, y, stage, dtype(1.0), a.Dv, rows, columns, ty, tx, t)
            cuda.syncthreads()

            # Each thread has one key or four, of some of the rows.
            for n in range(part, N, parts):
                head, i = types.int64(q_heads[n]), types.int64(q_rows[n])
                lo, hi = los[n], his[n]
                end, delta = ends[n], deltas[n]
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
                            prob = power((score_ - end) * log2e)
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
                h, n, d = a.dout_h, a.dout_n, a.dout_d
                add(acc_v, x, stage, dout, q_heads, q_rows, h, n, d, column0, a.Dv, ty, tx, t)
            if wants_k:
                h, n, d = a.q_h, a.q_n, a.q_d
                add(acc_k, y, stage, q, q_heads, q_rows, h, n, d, column0, a.D, ty, tx, t)
            first += N

        if wants_v:
            for m_ in range(RM):
                key = k0 + row_of(ty, m_)
                at = a.dv + b * a.dv_b + kv_head * a.dv_h + key * a.dv_n
                places[m_] = at if key < a.Nk else 0
            put(acc_v, places, a.dv_d, column0, a.Dv, tx)
        if wants_k:
            times(acc_k, dtype(a.scale))
            for m_ in range(RM):
                key = k0 + row_of(ty, m_)
                at = a.dk + b * a.dk_b + kv_head * a.dk_h + key * a.dk_n
                places[m_] = at if key < a.Nk else 0
            put(acc_k, places, a.dk_d, column0, a.D, tx)

    return Kernel(kernel, threads, blocks=1)


@functools.lru_cache(maxsize=256)
def bias_kernel(tile: Tile, functions: score.Functions, storage: str) -> Kernel:
    """Return the kernel of the gradient of a bias that is stored as `storage` says.

    A block owns a tile of the bias's own elements, with one row, column or both where it was
    broadcast along those. There it adds tile upon tile first, and rows and columns in the end.
    """
    R, N, TX, threads = tile.rows, tile.columns, tile.tx, tile.threads
    dtype = getattr(types, tile.dtype)
    p, own = products(tile), row_steps(tile, functions, False)
    clear, add_scores, put_scores = p.clear, p.add_scores, p.put_scores
    load_row, sees_block = own.load_row, score.sees_block
    differentiate, multiply = own.differentiate, score_product(tile)
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
        t = cuda.threadIdx.x & (threads - 1)
        ty, tx = t // TX, t % TX
        part, m = t // R, t % R
        # What this block owns: from first to before last, all of what it was broadcast along.
        index = cuda.blockIdx.x
        tiles = (a.bias_J + N - 1) // N
        j_first, j_last = index % tiles * N, index % tiles * N + N
        index = index // tiles
        tiles = (a.bias_I + R - 1) // R
        i_first, i_last = index % tiles * R, index % tiles * R + R
        index = index // tiles
        own_h, own_b = index % a.bias_H, index // a.bias_H
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
            i_end = min(i_last, read_int64(a.q_lens + 8 * b))
            for head in range(h_first, h_last):
                kv_head = head // a.group
                q, dout = a.q + b * a.q_b, a.dout + b * a.dout_b
                k = a.k + b * a.k_b + kv_head * a.k_h
                v = a.v + b * a.v_b + kv_head * a.v_h
                for i0 in range(i_first, i_end, R):
                    block_lo, block_hi = keys_of_rows(a, b, i0, i0 + R - 1)
                    block_lo, block_hi = max(block_lo, j_first), min(block_hi, j_last)
                    if block_lo >= block_hi:
                        continue
                    i = i0 + m if i0 + m < i_end else -1
                    pos, lo, hi, end, delta = load_row(a, b, head, i)
                    if part == 0:
                        q_heads[m] = head
                        q_rows[m] = i if lo < hi else -1
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
                        rows = (q, q_heads, q_rows, a.q_h, a.q_n, a.q_d)
                        columns = (k, k_heads, k_rows, 0, a.k_n, a.k_d)
                        multiply(s, x, stage, dtype(a.scale), a.D, rows, columns, ty, tx, t)
                        rows = (dout, q_heads, q_rows, a.dout_h, a.dout_n, a.dout_d)
                        columns = (v, k_heads, k_rows, 0, a.v_n, a.v_d)
                        multiply(s, y, stage, dtype(1.0), a.Dv, rows, columns, ty, tx, t)
                        cuda.syncthreads()
                        differentiate(a, x, y, b, head, i, pos, lo, hi, end, delta, n0, m, part)
                        cuda.syncthreads()
                        add_scores(sums, x, ty, tx)
                        n0 += N

        cuda.syncthreads()
        put_scores(x, sums, dtype(1.0), ty, tx)
        if a.bias_I == 1:
            cuda.syncthreads()
            for n in range(t, N, threads):
                for other in range(1, R):
                    x[n * lead_x] += x[n * lead_x + other]
        if a.bias_J == 1:
            cuda.syncthreads()
            for row in range(t, R, threads):
                for other in range(1, N):
                    x[row] += x[other * lead_x + row]
        cuda.syncthreads()
        first = a.dbias + own_b * a.dbias_b + own_h * a.dbias_h
        for e in range(t, R * N, threads):
            row, n = e // N, e % N
            if i_first + row < a.bias_I and j_first + n < a.bias_J:
                at = (i_first + row) * a.dbias_i + (j_first + n) * a.dbias_j
                write(first + at, x[n * lead_x + row])

    return Kernel(kernel, threads, blocks=1)


@functools.lru_cache(maxsize=16)
def sink_kernel(storage: str, result: str) -> Kernel:
    """Return the kernel of the gradient of the sinks, a block each.

    A sink has a share of each row's sum, but no value: ``-exp(sink - lse) * delta`` over all rows.
    """
    name = "float64" if storage == "float64" else "float32"
    dtype, itemsize, threads = getattr(types, name), 8 if storage == "float64" else 4, SUM_THREADS
    read, write, power, add_up = load(name), store(result), exp2(name), tree_sum(threads)
    inf, log2e, float64 = dtype(math.inf), dtype(LOG2E), types.float64

    def kernel(a):
        sums = cuda.shared.array(threads, float64)
        t = cuda.threadIdx.x & (threads - 1)
        head = cuda.blockIdx.x
        sink = read(a.sinks + head * itemsize)
        total = float64(0.0)
        if sink != -inf:
            for b in range(a.B):
                for i in range(t, read_int64(a.q_lens + 8 * b), threads):
                    at = ((b * a.Hq + head) * a.Nq + i) * itemsize
                    weight = power((sink - read(a.lse + at)) * log2e)
                    total -= float64(weight * read(a.delta + at))
        sums[t] = total
        add_up(sums, t)
        if t == 0:
            write(a.dsinks + head * a.dsinks_h, dtype(sums[0]))

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
            for i in range(t, read_int64(a.q_lens + 8 * b), threads):
                at = ((b * a.Hq + head) * a.Nq + i) * itemsize
                total -= float64(read(a.distance_sum + at))
        sums[t] = total
        add_up(sums, t)
        if t == 0:
            write(a.dslopes + own * a.dslopes_b + head * a.dslopes_h, dtype(sums[0]))

    return Kernel(kernel, threads)
