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

from ...vectors.lanes import (
    Struct,
    exp2_nonpositive,
    lane_of,
    load,
    load_index,
    read,
    read_int64,
    scatter_add_transposed,
    scatter_transposed,
    sign_bit,
    splat,
    store,
    view,
    write,
    write_int64,
)
from .forward import (
    assign_rows,
    find_block_rows,
    find_ranges,
    hide,
    pack_keys,
    pack_transposed,
    pack_values,
    select_keys,
    select_tile,
    tile_state,
)
from .jit import device, kernel
from .micro import add_rows, add_values, dot_keys
from .score import CONTEXT, apply, lane_offsets
from .softmax import LOG2E, is_hidden, note_hidden
from .threads import enter, leave, stopped, take_task

AREAS = (
    *("queries", "douts", "query_rows", "dout_rows", "dq_acc", "lse_rows", "deltas", "out_row"),
    *("lane_lo", "lane_hi", "lane_head", "lane_row", "block_rows", "states"),
    *("row_sums", "distance_sums", "probs", "dscores", "derivs", "plain", "marks"),
    *("keys", "values", "panels", "ones", "top", "bounds"),
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
        *("out", "out_b", "out_h", "out_n", "out_d"),
        # addresses of contiguous (B, Hq, Nq): lse; dlse (0: none); rowsum(dout * out) - dlse, which
        # is written for rows that see a key
        *("lse", "dlse", "delta"),
        # results: addresses of contiguous (parts, items, group, Nq, D), (B, Hkv, padded Nk,
        # padded D or Dv), or 0 where one is not wanted; the padded sizes
        *("dq", "dk", "dv", "padded_Nk", "padded_D", "padded_Dv"),
        # sums of the gradient of the scores: address and byte strides of the bias's own (stride 0
        # along a row: one for all); whether it has one row for all queries; addresses of contiguous
        # (parts, B, Hq, Nq) sums over keys, plain and times the distance; each 0 if not wanted
        *("dbias", "dbias_b", "dbias_h", "dbias_i", "dbias_j", "bias_columns"),
        *("row_sum", "distance_sum"),
        # sizes
        *("Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv", "block"),
        # items of this run: the first (item, key head), and their number; parts of the keys, and
        # the address of int64 (B,): keys of one; rows and tiles of a head, groups of tiles that
        # share one pass over the keys
        *(
            "B",
            "first_item",
            "items",
            "parts",
            "part_keys",
            "rows",
            "tiles",
            "groups",
            "tiles_at_once",
        ),
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
    """Run tasks until there are none left; `wide` is the register tile over the head dimension.

    Flat, as `forward_worker` is and for the same reason: to share their steps beyond the leaves
    costs each half a second of compile time, and the forward pass one percent.
    """
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
        sums = a.dbias != 0 or a.row_sum != 0 or a.distance_sum != 0
        wants_scores = a.dq != 0 or a.dk != 0 or sums
        wants_products = wants_scores or a.dv != 0
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
            part_keys = read_int64(a.part_keys + 8 * b)
            part_lo = min(a.Nk, part * part_keys)
            part_hi = min(a.Nk, part_lo + part_keys)
            context.batch = b
            context.offset = read_int64(a.q_offset + 8 * b)
            context.vectors, context.top, context.mask = tile.MV, top, a.mask
            context.table, context.temp = scratch + a.table, scratch + a.temp
            near_k = a.k_d == size and abs(a.k_n) <= 2 * a.D * size
            near_v = a.v_d == size and abs(a.v_n) <= 2 * a.Dv * size

            careful = False
            while True:
                for group in range(a.group * a.groups):
                    if stopped(a.control):
                        break
                    head = kv_head * a.group + group // a.groups
                    first_tile = group % a.groups * a.tiles_at_once
                    n_tiles, lo, hi = 0, part_hi, part_lo
                    for t in range(first_tile, min(first_tile + a.tiles_at_once, a.tiles)):
                        # What sees nothing of this part gets no place among the tiles.
                        assign_rows(tile, a, scratch, n_tiles, head, t * tile.lanes)
                        end_rows(tile, a, scratch, b, n_tiles, t * tile.lanes)
                        select_tile(tile, a, scratch, context, n_tiles)
                        find_ranges(tile, a, scratch, context, n_tiles)
                        state = tile_state(a, scratch, n_tiles)
                        state.lo, state.hi = max(state.lo, part_lo), min(state.hi, part_hi)
                        if state.lo < state.hi:
                            lo, hi = min(lo, state.lo), max(hi, state.hi)
                            forget_lanes(tile, a, scratch, context, n_tiles)
                            find_block_rows(tile, a, scratch, context, n_tiles)
                            load_tile(tile, a, scratch, context, n_tiles)
                            reset_sums(tile, a, scratch, n_tiles, columns)
                            n_tiles += 1
                    if not wants_products:
                        hi = lo

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
                        if a.dq:
                            pack_values(tile, k, a.k_n, a.k_d, a.D, 0, start, end, panels, panel)
                        k_direct = min(groups, max(0, (k_from - start) // nr))
                        v_direct = min(groups, max(0, (v_from - start) // nr))
                        for t in range(n_tiles):
                            probs = scratch + a.probs + t * padded_rows * row
                            dscores = scratch + a.dscores + t * padded_rows * row
                            state = tile_state(a, scratch, t)
                            t_lo, t_hi = state.begin, state.end
                            if t_lo >= t_hi:
                                clear(tile, probs, dscores, 0, groups * nr)
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
                            if wants_scores:
                                dot_keys(
                                    tile,
                                    douts,
                                    a.Dv,
                                    v + start * a.v_n,
                                    a.v_n,
                                    v_direct,
                                    dscores,
                                    top,
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
                            mixed_begin = state.mixed_begin
                            mixed = state.mixed_end - mixed_begin
                            select_tile(tile, a, scratch, context, t)
                            if a.n_functions:
                                fill(tile, derivs, rows, 1.0)
                                context.first_key, context.n_keys = t_lo, rows
                                where = scratch + a.context
                                said = apply(a.functions, a.n_functions, p, derivs, where)
                                trouble |= said >> 2
                            if mixed > 0:
                                context.first_key, context.n_keys = mixed_begin, mixed
                                at = p + (mixed_begin - t_lo) * row
                                said = apply(a.masks, a.n_masks, at, 0, scratch + a.context)
                                trouble |= said >> 2 << a.n_functions
                            if t_lo < state.full_lo or t_hi > state.full_hi:
                                hide(tile, a, scratch, t, p, t_lo, rows)
                            if careful:
                                note_hidden(tile, p, rows, scratch + a.marks)
                            lse = scratch + a.lse_rows + t * row
                            delta = scratch + a.deltas + t * row
                            if a.n_drops:
                                keep_plain(tile, p, rows, lse, scratch + a.plain)
                                context.first_key, context.n_keys = t_lo, rows
                                apply(a.drops, a.n_drops, p, 0, scratch + a.context)
                                differentiate_dropped(
                                    tile, p, ds, rows, delta, scratch + a.plain, 1.0 / a.kept
                                )
                            else:
                                differentiate(tile, p, ds, rows, lse, delta)
                            if sums and not careful:
                                context.first_key, context.n_keys = t_lo, rows
                                add_sums(tile, a, scratch, context, t, ds)
                            if a.n_functions:
                                for n in range(rows * tile.MV):
                                    at = ds + n * tile.W * size
                                    slope = load(tile, derivs + n * tile.W * size)
                                    store(at, load(tile, at) * slope)
                            if careful:
                                add_carefully(
                                    tile, a, scratch, context, t, p, ds, k, t_lo, rows, dk, dv
                                )
                                continue
                            clear(tile, probs, dscores, 0, t_lo - start)
                            clear(tile, probs, dscores, t_hi - start, groups * nr)
                            if a.dq:
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
                        if a.dv and not careful:
                            add_rows(
                                tile,
                                wide,
                                scratch + a.probs,
                                gap,
                                scratch + a.dout_rows,
                                tile.lanes * a.padded_Dv * size,
                                n_tiles,
                                groups * nr // wide.NR,
                                a.padded_Dv,
                                dv + start * a.padded_Dv * size,
                            )
                        if a.dk and not careful:
                            add_rows(
                                tile,
                                wide,
                                scratch + a.dscores,
                                gap,
                                scratch + a.query_rows,
                                tile.lanes * a.padded_D * size,
                                n_tiles,
                                groups * nr // wide.NR,
                                a.padded_D,
                                dk + start * a.padded_D * size,
                            )
                    for t in range(n_tiles):
                        select_tile(tile, a, scratch, context, t)
                        if a.dq:
                            write_dq(tile, a, scratch, context, t, columns, dq, kv_head * a.group)
                        if sums and not careful:
                            write_sums(tile, a, scratch, context, t, part)
                if careful or stopped(a.control):
                    break
                dk_part = dk + part_lo * a.padded_D * size
                dv_part = dv + part_lo * a.padded_Dv * size
                n_dk = (part_hi - part_lo) * a.padded_D if a.dk else 0
                n_dv = (part_hi - part_lo) * a.padded_Dv if a.dv else 0
                n_dq = a.group * a.Nq * a.D if a.dq else 0
                if (
                    finite(tile, dk_part, n_dk)
                    and finite(tile, dv_part, n_dv)
                    and finite(tile, dq, n_dq)
                ):
                    break
                # Something hidden may have reached a sum, as 0 * NaN: once more, pair by pair.
                zero(tile, dk_part, n_dk)
                zero(tile, dv_part, n_dv)
                careful = True
        leave(a.control, slot, trouble)

    return worker


@device
def end_rows(tile, a, scratch, b, t, first_row):
    """Let a tile end with the rows that exist: lanes past those repeat the last one."""
    q_len = read_int64(a.q_lens + 8 * b)
    state = tile_state(a, scratch, t)
    state.valid = max(0, min(state.valid, q_len - first_row))
    if state.valid:
        rows = scratch + a.lane_row + t * tile.lanes * 8
        for lane in range(state.valid, tile.lanes):
            write_int64(rows + 8 * lane, first_row + state.valid - 1)


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
    pack_rows(tile, context, dout, a.dout_h, a.dout_n, a.dout_d, a.Dv, a.padded_Dv, 1.0, dout_rows)
    # Row by row, always in this order: the sum must not depend on how dout and out lie in memory.
    out, row_of_out = a.out + context.batch * a.out_b, scratch + a.out_row
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        source = out + head * a.out_h + i * a.out_n
        copy_row(tile, source, a.out_d, a.Dv, a.padded_Dv, 1.0, row_of_out)
        products, sizes = splat(tile, 0.0), splat(tile, 0.0)
        for d in range(0, a.padded_Dv, tile.W):
            x = load(tile, row_of_out + d * size)
            products += load(tile, dout_rows + (lane * a.padded_Dv + d) * size) * x
            sizes += abs(x)
        delta, some = 0.0, 0.0
        for n in range(tile.W):
            delta += lane_of(tile, products, n)
            some += lane_of(tile, sizes, n)
        if some == 0.0:  # as where nothing is visible: not even a dout of NaN matters
            delta = 0.0
        at = ((context.batch * a.Hq + head) * a.Nq + i) * size
        if a.dlse:
            delta -= read(tile, a.dlse + at)
        lse = read(tile, a.lse + at)
        # A row that sees nothing: any number will do.
        write(tile, scratch + a.lse_rows + t * row + lane * size, 0.0 if lse == -np.inf else lse)
        write(tile, scratch + a.deltas + t * row + lane * size, delta)
        write(tile, a.delta + at, delta)


@device
def copy_row(tile, source, stride, depth, width, scale, dest):
    """Copy a row, times a scale, and fill it up with 0 to `width`."""
    size = tile.itemsize
    factor = splat(tile, scale)
    d = 0
    if stride == size:
        while d + tile.W <= depth:
            store(dest + d * size, load(tile, source + d * size) * factor)
            d += tile.W
    while d < width:
        write(tile, dest + d * size, read(tile, source + d * stride) * scale if d < depth else 0.0)
        d += 1


@device
def pack_rows(tile, context, source, stride_h, stride_n, stride_d, depth, width, scale, dest):
    """Write the rows of a tile's lanes, times a scale, as ``[lanes][width]``, 0 past `depth`."""
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        at = source + head * stride_h + i * stride_n
        copy_row(tile, at, stride_d, depth, width, scale, dest + lane * width * tile.itemsize)


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
def keep_plain(tile, scores, rows, lse, plain):
    """Turn scores into probabilities, in place and in `plain`; there a hidden one is -0.0."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * tile.W * size
        end = load(tile, lse + at)
        for n in range(rows):
            s = load(tile, scores + at + n * row)
            p = exp2_nonpositive((s - end) * LOG2E)
            store(scores + at + n * row, p)
            store(plain + at + n * row, np.where(s == -np.inf, splat(tile, -0.0), p))


@device
def differentiate_dropped(tile, probs, dprobs, rows, delta, plain, factor):
    """Do what `differentiate` does where dropout has made some of the probabilities -0.0."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    nothing = splat(tile, 0.0)
    for i in range(tile.MV):
        at = i * tile.W * size
        mean = load(tile, delta + at)
        for n in range(rows):
            kept = load(tile, probs + at + n * row)
            p = load(tile, plain + at + n * row)
            dp = np.where(sign_bit(kept), nothing, load(tile, dprobs + at + n * row) * factor)
            ds = np.where(is_hidden(p), nothing, p * (dp - mean))
            store(dprobs + at + n * row, ds)
            store(probs + at + n * row, kept * factor)


@device
def fill(tile, at, rows, x):
    """Set rows of a tile to a number."""
    for n in range(rows * tile.MV):
        store(at + n * tile.W * tile.itemsize, splat(tile, x))


@device
def clear(tile, probs, dscores, begin, end):
    """Set rows of both tiles to 0."""
    row = tile.lanes * tile.itemsize
    fill(tile, probs + begin * row, end - begin, 0.0)
    fill(tile, dscores + begin * row, end - begin, 0.0)


@device
def finite(tile, at, count):
    """Return whether all of `count` numbers are finite."""
    total, n = splat(tile, 0.0), 0
    while n + tile.W <= count:
        total += load(tile, at + n * tile.itemsize) * 0.0
        n += tile.W
    rest = 0.0
    while n < count:
        rest += read(tile, at + n * tile.itemsize) * 0.0
        n += 1
    for lane in range(tile.W):
        rest += lane_of(tile, total, lane)
    return rest == 0.0


@device
def zero(tile, at, count):
    """Set `count` numbers to 0."""
    for n in range(count):
        write(tile, at + n * tile.itemsize, 0.0)


@device
def reset_sums(tile, a, scratch, t, columns):
    """Set what a tile adds up to 0."""
    row = tile.lanes * tile.itemsize
    fill(tile, scratch + a.dq_acc + t * columns * row, columns, 0.0)
    fill(tile, scratch + a.row_sums + t * row, 1, 0.0)
    fill(tile, scratch + a.distance_sums + t * row, 1, 0.0)


@device
def add_sums(tile, a, scratch, context, t, ds):
    """Add the gradient of a tile of scores to that of the bias, and to the sums over keys."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    n_keys = context.n_keys
    if a.row_sum or a.distance_sum:
        for i in range(tile.MV):
            at = i * width * size
            plain = load(tile, scratch + a.row_sums + t * row + at)
            weighted = load(tile, scratch + a.distance_sums + t * row + at)
            position = load_index(tile, "int64", context.rows + 8 * i * width, context.offset)
            for n in range(n_keys):
                x = load(tile, ds + n * row + at)
                plain += x
                if a.distance_sum:
                    weighted += x * np.abs(position - (context.first_key + n))
            store(scratch + a.row_sums + t * row + at, plain)
            store(scratch + a.distance_sums + t * row + at, weighted)
    if a.dbias == 0:
        return
    base = a.dbias + context.batch * a.dbias_b + context.first_key * a.dbias_j
    if a.bias_columns:
        for lane in range(context.valid):
            head = read_int64(context.heads + 8 * lane)
            # Lanes of one head lie side by side: each head's are added up before they are written.
            if lane == 0 or head != read_int64(context.heads + 8 * (lane - 1)):
                last = lane
                while last < context.valid and read_int64(context.heads + 8 * last) == head:
                    last += 1
                for n in range(n_keys):
                    at = base + head * a.dbias_h + n * a.dbias_j
                    total = sum_lanes(tile, ds + n * row, lane, last)
                    write(tile, at, read(tile, at) + total)
        return
    lane_offsets(tile, context, a.dbias_h, a.dbias_i)
    for i in range(tile.MV):
        count = min(context.valid - i * width, width)
        source, table = ds + i * width * size, context.table + 8 * i * width
        n = 0
        if a.dbias_j == size:
            while n + width <= n_keys:
                to = base + n * size
                scatter_add_transposed(tile, source + n * row, row, to, table, count)
                n += width
        while n < n_keys:
            for lane in range(count):
                at = base + read_int64(table + 8 * lane) + n * a.dbias_j
                write(tile, at, read(tile, at) + read(tile, source + n * row + lane * size))
            n += 1


@device
def sum_lanes(tile, at, first, last):
    """Return the sum of the numbers from `first` to before `last` in a row of a tile."""
    if first == 0 and last == tile.lanes:
        total = load(tile, at)
        for i in range(1, tile.MV):
            total += load(tile, at + i * tile.W * tile.itemsize)
        result = lane_of(tile, total, 0)
        for lane in range(1, tile.W):
            result += lane_of(tile, total, lane)
        return result
    result = read(tile, at + first * tile.itemsize)
    for lane in range(first + 1, last):
        result += read(tile, at + lane * tile.itemsize)
    return result


@device
def write_sums(tile, a, scratch, context, t, part):
    """Write a tile's sums over the keys of a part."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    for lane in range(context.valid):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        at = (((part * a.B + context.batch) * a.Hq + head) * a.Nq + i) * size
        offset = t * row + lane * size
        if a.row_sum:
            write(tile, a.row_sum + at, read(tile, scratch + a.row_sums + offset))
        if a.distance_sum:
            write(tile, a.distance_sum + at, read(tile, scratch + a.distance_sums + offset))


@device
def add_carefully(tile, a, scratch, context, t, p, ds, k, first_key, rows, dk, dv):
    """Add the products of those pairs that are visible, one by one.

    Slow, and only needed where something is not finite: a hidden pair must not be multiplied.
    """
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    columns = (a.D + tile.NR - 1) // tile.NR * tile.NR
    query_rows = scratch + a.query_rows + t * tile.lanes * a.padded_D * size
    dout_rows = scratch + a.dout_rows + t * tile.lanes * a.padded_Dv * size
    acc = scratch + a.dq_acc + t * columns * row
    for n in range(rows):
        key = first_key + n
        for lane in range(context.valid):
            at = n * row + lane * size
            if read(tile, scratch + a.marks + at) != 0.0:
                continue
            prob, dscore = read(tile, p + at), read(tile, ds + at)
            dropped = prob == 0.0 and 1.0 / prob < 0.0
            if a.dv and not dropped:
                source = dout_rows + lane * a.padded_Dv * size
                add_multiple(tile, dv + key * a.padded_Dv * size, source, prob, a.padded_Dv)
            if a.dk:
                source = query_rows + lane * a.padded_D * size
                add_multiple(tile, dk + key * a.padded_D * size, source, dscore, a.padded_D)
            if a.dq:
                for d in range(a.D):
                    to = acc + d * row + lane * size
                    product = dscore * read(tile, k + key * a.k_n + d * a.k_d)
                    write(tile, to, read(tile, to) + product)


@device
def add_multiple(tile, dest, source, factor, count):
    """Add a multiple of `count` numbers, a multiple of W, to others."""
    f = splat(tile, factor)
    for n in range(0, count, tile.W):
        at = n * tile.itemsize
        store(dest + at, load(tile, dest + at) + load(tile, source + at) * f)


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
