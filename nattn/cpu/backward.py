"""The backward kernel: gradients from the scores, computed again tile by tile from q, k and lse.

A task owns a part of the keys of one key head: it alone writes their dk and dv, so nothing is
added by two threads. It streams past all queries of the head's group, a few tiles at a time:

    S = K Q       P = exp(S - lse)       dP = V dO       dS = P * (dP - delta) * derivative
    dV += P dO    dK += dS Q             dQ += K dS

The first, the second and the last product have queries in lanes, as in the forward pass; the two
between have the head dimension in lanes, so that no matrix is transposed in memory. The keys of an
item form at most eight parts, by their number alone; each part leaves its share of dq in memory of
its own, and the shares are added in order.
"""

from __future__ import annotations

import numpy as np

from ..lanes import (
    Struct,
    exp2_nonpositive,
    load,
    load_lanes,
    load_old,
    read,
    read_int64,
    scatter_transposed,
    splat,
    store,
    view,
    write,
    write_int64,
)
from .forward import (
    find_block_rows,
    find_ranges,
    hide,
    pack_keys,
    pack_transposed,
    pack_values,
    select_keys,
    select_tile,
    tile_state,
    assign_rows,
)
from .jit import device, kernel
from .micro import add_rows, add_values, dot_keys
from .score import CONTEXT, apply, lane_offsets
from .softmax import LOG2E
from .threads import enter, leave, stopped, take_task

AREAS = (
    *("queries", "douts", "query_rows", "dout_rows", "dq_acc", "lse_rows", "deltas"),
    *("lane_lo", "lane_hi", "lane_head", "lane_row", "block_rows", "states"),
    *("probs", "dscores", "derivs", "keys", "values", "panels", "ones", "top", "bounds"),
    *("table", "context", "temp"),
)
"""A worker's scratch areas."""

ARGS = Struct(
    "BackwardArgs",
    (
        # arrays: byte address, and byte strides over item, head, row, column
        *("q", "q_b", "q_h", "q_n", "q_d"),
        *("k", "k_b", "k_h", "k_n", "k_d"),
        *("v", "v_b", "v_h", "v_n", "v_d"),
        *("dout", "dout_b", "dout_h", "dout_n", "dout_d"),
        # addresses of contiguous (B, Hq, Nq): lse, and rowsum(dout * out) - dlse
        *("lse", "delta"),
        # results: addresses of contiguous (parts, items, group, Nq, D), (B, Hkv, padded Nk,
        # padded D or Dv); the padded sizes
        *("dq", "dk", "dv", "padded_Nk", "padded_D", "padded_Dv"),
        # sizes
        *("Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv", "block"),
        # items of this run: the first (item, key head), and their number; the key blocks of a part
        *("first_item", "items", "parts", "part_blocks", "rows", "tiles", "tiles_at_once"),
        # what is visible: as in the forward pass
        *("q_offset", "q_lens", "kv_lens", "causal", "left", "right"),
        *("functions", "n_functions", "masks", "n_masks", "drops", "n_drops"),
        "mask",
        *("blocks", "blocks_b", "blocks_h", "blocks_i", "block_size"),
        "control",
        *("scratch", "scratch_bytes", *AREAS),
    ),
    ("scale", "kept"),
)
"""What a worker gets."""


@kernel("void(int64, int64)")
def backward_worker(tile, wide):
    """Run tasks until there are none left; `wide` is the register tile over the head dimension."""
    nr, size, row = tile.NR, tile.itemsize, tile.lanes * tile.itemsize

    def worker(slot, args):
        a = view(ARGS, args)
        block = a.block
        scratch = a.scratch + slot * a.scratch_bytes
        context = view(CONTEXT, scratch + a.context)
        columns = (a.D + nr - 1) // nr * nr
        padded_rows = block + nr
        keys, values, panels = scratch + a.keys, scratch + a.values, scratch + a.panels
        ones, top, derivs = scratch + a.ones, scratch + a.top, scratch + a.derivs
        for i in range(tile.MV):
            store(ones + i * tile.W * size, splat(tile, 1.0))
        trouble = 0
        enter(a.control)
        while True:
            task = take_task(a.control)
            if task < 0:
                break
            item = task // a.parts
            part = task - item * a.parts
            b = (a.first_item + item) // a.Hkv
            kv_head = a.first_item + item - b * a.Hkv
            k = a.k + b * a.k_b + kv_head * a.k_h
            v = a.v + b * a.v_b + kv_head * a.v_h
            dk = a.dk + (a.first_item + item) * a.padded_Nk * a.padded_D * size
            dv = a.dv + (a.first_item + item) * a.padded_Nk * a.padded_Dv * size
            dq = a.dq + (part * a.items + item) * a.group * a.Nq * a.D * size
            part_lo = part * a.part_blocks * block
            part_hi = min(a.Nk, part_lo + a.part_blocks * block)
            context.batch = b
            context.offset = read_int64(a.q_offset + 8 * b)
            context.vectors, context.top, context.mask = tile.MV, top, a.mask
            context.table, context.temp = scratch + a.table, scratch + a.temp
            near_k = a.k_d == size and abs(a.k_n) <= 2 * a.D * size
            near_v = a.v_d == size and abs(a.v_n) <= 2 * a.Dv * size

            for first_tile in range(0, a.tiles, a.tiles_at_once):
                if stopped(a.control):
                    break
                n_tiles = min(a.tiles_at_once, a.tiles - first_tile)
                lo, hi = part_hi, part_lo
                for t in range(n_tiles):
                    assign_rows(
                        tile, a, scratch, t, kv_head * a.group, (first_tile + t) * tile.lanes
                    )
                    select_tile(tile, a, scratch, context, t)
                    find_ranges(tile, a, scratch, context, t)
                    forget_lanes(tile, a, scratch, context, t)
                    find_block_rows(tile, a, scratch, context, t)
                    state = tile_state(a, scratch, t)
                    state.lo, state.hi = max(state.lo, part_lo), min(state.hi, part_hi)
                    if state.lo < state.hi:
                        lo, hi = min(lo, state.lo), max(hi, state.hi)
                        load_tile(tile, a, scratch, context, t)
                    dq_t = scratch + a.dq_acc + t * columns * row
                    for n in range(columns * tile.MV):
                        store(dq_t + n * tile.W * size, splat(tile, 0.0))

                for n0 in range(lo // block * block, hi, block):
                    if stopped(a.control):
                        break
                    begin, end = hi, lo
                    for t in range(n_tiles):
                        select_keys(tile, a, scratch, t, n0)
                        state = tile_state(a, scratch, t)
                        if state.begin < state.end:
                            begin, end = min(begin, state.begin), max(end, state.end)
                    if begin >= end:
                        continue
                    start = begin - (begin - n0) % nr
                    groups = (end - start + nr - 1) // nr
                    k_from = pack_keys(
                        tile, k, a.k_n, a.k_d, a.D, a.Nk, near_k, start, end, keys
                    )
                    v_from = pack_keys(
                        tile, v, a.v_n, a.v_d, a.Dv, a.Nk, near_v, start, end, values
                    )
                    panel = (end - start) * nr * size
                    pack_values(tile, k, a.k_n, a.k_d, a.D, 0, start, end, panels, panel)
                    k_direct = min(groups, max(0, (k_from - start) // nr))
                    v_direct = min(groups, max(0, (v_from - start) // nr))
                    for t in range(n_tiles):
                        probs = scratch + a.probs + t * padded_rows * row
                        dscores = scratch + a.dscores + t * padded_rows * row
                        state = tile_state(a, scratch, t)
                        t_lo, t_hi = state.begin, state.end
                        if t_lo >= t_hi:
                            for n in range(groups * nr * tile.MV):
                                store(probs + n * tile.W * size, splat(tile, 0.0))
                                store(dscores + n * tile.W * size, splat(tile, 0.0))
                            continue
                        queries = scratch + a.queries + t * a.D * row
                        douts = scratch + a.douts + t * a.Dv * row
                        dot_keys(
                            tile, queries, a.D, k + start * a.k_n, a.k_n, k_direct, probs, top
                        )
                        dot_keys(
                            tile,
                            queries,
                            a.D,
                            keys + (start + k_direct * nr - k_from) * a.D * size,
                            a.D * size,
                            groups - k_direct,
                            probs + k_direct * nr * row,
                            top,
                        )
                        dot_keys(
                            tile, douts, a.Dv, v + start * a.v_n, a.v_n, v_direct, dscores, top
                        )
                        dot_keys(
                            tile,
                            douts,
                            a.Dv,
                            values + (start + v_direct * nr - v_from) * a.Dv * size,
                            a.Dv * size,
                            groups - v_direct,
                            dscores + v_direct * nr * row,
                            top,
                        )
                        p, rows = probs + (t_lo - start) * row, t_hi - t_lo
                        ds = dscores + (t_lo - start) * row
                        hides = t_lo < state.full_lo or t_hi > state.full_hi
                        mixed_begin, mixed = state.mixed_begin, state.mixed_end - state.mixed_begin
                        if a.n_functions or mixed > 0 or a.n_drops:
                            select_tile(tile, a, scratch, context, t)
                        if a.n_functions:
                            for n in range(rows * tile.MV):
                                store(derivs + n * tile.W * size, splat(tile, 1.0))
                            context.first_key, context.n_keys = t_lo, rows
                            where = scratch + a.context
                            said = apply(a.functions, a.n_functions, p, derivs, where)
                            trouble |= said >> 2
                        if mixed > 0:
                            context.first_key, context.n_keys = mixed_begin, mixed
                            at = p + (mixed_begin - t_lo) * row
                            said = apply(a.masks, a.n_masks, at, 0, scratch + a.context)
                            trouble |= said >> 2 << a.n_functions
                        if hides:
                            hide(tile, a, scratch, t, p, t_lo, rows)
                        lse, delta = scratch + a.lse_rows + t * row, scratch + a.deltas + t * row
                        differentiate(tile, p, ds, rows, lse, delta)
                        if a.n_functions:
                            for n in range(rows * tile.MV):
                                at = ds + n * tile.W * size
                                store(at, load(tile, at) * load(tile, derivs + n * tile.W * size))
                        clear(tile, probs, dscores, 0, t_lo - start)
                        clear(tile, probs, dscores, t_hi - start, groups * nr)
                        add_values(
                            tile,
                            dscores,
                            end - start,
                            panels,
                            nr * size,
                            panel,
                            columns // nr,
                            ones,
                            scratch + a.dq_acc + t * columns * row,
                            False,
                        )
                    gap = padded_rows * row
                    add_rows(
                        tile,
                        wide,
                        scratch + a.probs,
                        gap,
                        scratch + a.dout_rows,
                        tile.lanes * a.padded_Dv * size,
                        n_tiles,
                        (end - start + wide.NR - 1) // wide.NR,
                        a.padded_Dv,
                        dv + start * a.padded_Dv * size,
                    )
                    add_rows(
                        tile,
                        wide,
                        scratch + a.dscores,
                        gap,
                        scratch + a.query_rows,
                        tile.lanes * a.padded_D * size,
                        n_tiles,
                        (end - start + wide.NR - 1) // wide.NR,
                        a.padded_D,
                        dk + start * a.padded_D * size,
                    )
                for t in range(n_tiles):
                    select_tile(tile, a, scratch, context, t)
                    write_dq(tile, a, scratch, context, t, columns, dq, kv_head * a.group)
        leave(a.control, slot, trouble)

    return worker


@device
def forget_lanes(tile, a, scratch, context, t):
    """Let the lanes past the last row see nothing: they repeat it, and must not count twice."""
    state = tile_state(a, scratch, t)
    for lane in range(context.valid, tile.lanes):
        write_int64(context.lane_lo + 8 * lane, 0)
        write_int64(context.lane_hi + 8 * lane, 0)
        state.full_hi = 0


@device
def load_tile(tile, a, scratch, context, t):
    """Copy what a tile needs: q and dout both ways round, lse and delta."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    q, dout = a.q + context.batch * a.q_b, a.dout + context.batch * a.dout_b
    queries, douts = scratch + a.queries + t * a.D * row, scratch + a.douts + t * a.Dv * row
    pack_transposed(tile, context, q, a.q_h, a.q_n, a.q_d, a.D, a.scale, queries)
    pack_transposed(tile, context, dout, a.dout_h, a.dout_n, a.dout_d, a.Dv, 1.0, douts)
    query_rows = scratch + a.query_rows + t * tile.lanes * a.padded_D * size
    dout_rows = scratch + a.dout_rows + t * tile.lanes * a.padded_Dv * size
    pack_rows(tile, context, q, a.q_h, a.q_n, a.q_d, a.D, a.padded_D, a.scale, query_rows)
    pack_rows(
        tile, context, dout, a.dout_h, a.dout_n, a.dout_d, a.Dv, a.padded_Dv, 1.0, dout_rows
    )
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        at = ((context.batch * a.Hq + head) * a.Nq + i) * size
        lse = read(tile, a.lse + at)
        # A row that sees nothing: any number will do.
        write(tile, scratch + a.lse_rows + t * row + lane * size, 0.0 if lse == -np.inf else lse)
        write(tile, scratch + a.deltas + t * row + lane * size, read(tile, a.delta + at))


@device
def pack_rows(tile, context, source, stride_h, stride_n, stride_d, depth, width, scale, dest):
    """Write the rows of a tile's lanes, times a scale, as ``[lanes][width]``, 0 past `depth`."""
    size = tile.itemsize
    factor = splat(tile, scale)
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        at, to = source + head * stride_h + i * stride_n, dest + lane * width * size
        d = 0
        if stride_d == size:
            while d + tile.W <= depth:
                store(to + d * size, load(tile, at + d * size) * factor)
                d += tile.W
        while d < width:
            write(tile, to + d * size, read(tile, at + d * stride_d) * scale if d < depth else 0.0)
            d += 1


@device
def differentiate(tile, scores, dprobs, rows, lse, delta):
    """Turn scores into probabilities, and their gradient dP into that of the scores, in place."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * tile.W * size
        end, mean = load(tile, lse + at), load(tile, delta + at)
        for n in range(rows):
            s = load(tile, scores + at + n * row)
            p = exp2_nonpositive((s - end) * LOG2E)
            store(scores + at + n * row, p)
            # A hidden key has no gradient, whatever its value is.
            ds = p * (load(tile, dprobs + at + n * row) - mean)
            store(dprobs + at + n * row, np.where(s == -np.inf, splat(tile, 0.0), ds))


@device
def clear(tile, probs, dscores, begin, end):
    """Set rows of both tiles to 0."""
    size = tile.W * tile.itemsize
    for n in range(begin * tile.MV, end * tile.MV):
        store(probs + n * size, splat(tile, 0.0))
        store(dscores + n * size, splat(tile, 0.0))


@device
def write_dq(tile, a, scratch, context, t, columns, dq, first_head):
    """Write a tile's part of dq, times the scale."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    acc = scratch + a.dq_acc + t * columns * row
    factor = splat(tile, a.scale)
    for n in range(a.D * tile.MV):
        store(acc + n * width * size, load(tile, acc + n * width * size) * factor)
    lane_offsets(tile, context, a.Nq * a.D * size, a.D * size)
    out = dq - first_head * a.Nq * a.D * size
    for i in range(tile.MV):
        count = min(context.valid - i * width, width)
        source, table = acc + i * width * size, context.table + 8 * i * width
        done = 0
        while done + width <= a.D:
            scatter_transposed(tile, source + done * row, row, out + done * size, table, count)
            done += width
        for d in range(done, a.D):
            for lane in range(count):
                x = read(tile, source + d * row + lane * size)
                write(tile, out + read_int64(table + 8 * lane) + d * size, x)
