"""The steps of the backward pass on one tile: what it needs, ds, sums, and dq."""

from __future__ import annotations

import numpy as np

from ...vectors.lanes import (
    exp2_nonpositive,
    lane_of,
    load,
    load_old,
    read,
    read_int64,
    scatter_add_transposed,
    sign_bit,
    splat,
    store,
    write,
)
from .arrays import item_of
from .jit import device
from .packing import copy_row, pack_rows, pack_transposed, row_of, write_transposed
from .score import lane_offsets
from .softmax import LOG2E, is_hidden

TINY = 2.0**-126
"""The smallest normal float32 and bfloat16 number."""


@device
def load_tile(tile, a, plan, w, context, t, n):
    """Copy what the n-th tile needs: q and dout both ways round, lse and delta."""
    size, words = tile.itemsize, tile.lanes // tile.per_word
    padded_D, padded_Dv = plan.padded_D, plan.padded_Dv
    pack_transposed(tile, context, a.q, plan.D, a.scale, t.queries_ptr)
    pack_transposed(tile, context, a.dout, plan.Dv, 1.0, t.douts_ptr)
    query_rows = w.query_rows_ptr + n * words * padded_D * size
    dout_rows = w.dout_rows_ptr + n * words * padded_Dv * size
    pack_rows(tile, context, a.q, plan.D, padded_D, a.scale, tile.lanes, query_rows)
    pack_rows(tile, context, a.dout, plan.Dv, padded_Dv, 1.0, tile.lanes, dout_rows)
    # Row by row, always in this order: the sum must not depend on how dout and out lie in memory.
    dout, out = item_of(a.dout, context.batch), item_of(a.out, context.batch)
    lses, dlses = item_of(a.lse, context.batch), item_of(a.dlse, context.batch)
    deltas = item_of(a.delta, context.batch)
    for lane in range(tile.lanes):
        at = row_of(context, a.dout, dout, lane)
        copy_row(tile, at, a.dout.stride_d, plan.Dv, padded_Dv, w.dout_row_ptr)
        at = row_of(context, a.out, out, lane)
        copy_row(tile.compute, at, a.out.stride_d, plan.Dv, padded_Dv, w.out_row_ptr)
        products, sizes = splat(tile, 0.0), splat(tile, 0.0)
        for d in range(0, padded_Dv, tile.W):
            x = load(tile, w.out_row_ptr + d * size)
            products += load(tile, w.dout_row_ptr + d * size) * x
            sizes += abs(x)
        delta, some = 0.0, 0.0
        for m in range(tile.W):
            delta += lane_of(tile, products, m)
            some += lane_of(tile, sizes, m)
        if some == 0.0:  # as where nothing is visible: not even a dout of NaN matters
            delta = 0.0
        if a.dlse.ptr:
            delta -= read(tile, row_of(context, a.dlse, dlses, lane))
        lse = read(tile, row_of(context, a.lse, lses, lane))
        # A row that sees nothing: any number will do.
        write(tile, t.lse_row_ptr + lane * size, 0.0 if lse == -np.inf else lse)
        write(tile, t.delta_row_ptr + lane * size, delta)
        write(tile, row_of(context, a.delta, deltas, lane), delta)


@device
def differentiate(tile, scores, dprobs, n_keys, lse, delta):
    """Turn scores into probabilities, and their gradient dP into that of the scores, in place."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * tile.W * size
        end, mean = load(tile, lse + at), load(tile, delta + at)
        for n in range(n_keys):
            s = load(tile, scores + at + n * row)
            p = exp2_nonpositive((s - end) * LOG2E)
            store(scores + at + n * row, p)
            # A hidden key has no gradient, whatever its value is.
            ds = p * (load(tile, dprobs + at + n * row) - mean)
            store(dprobs + at + n * row, np.where(s == -np.inf, splat(tile, 0.0), ds))


@device
def keep_plain(tile, scores, n_keys, lse, plain):
    """Turn scores into probabilities, in place and in `plain`; there a hidden one is -0.0."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * tile.W * size
        end = load(tile, lse + at)
        for n in range(n_keys):
            s = load(tile, scores + at + n * row)
            p = exp2_nonpositive((s - end) * LOG2E)
            store(scores + at + n * row, p)
            store(plain + at + n * row, np.where(s == -np.inf, splat(tile, -0.0), p))


@device
def differentiate_dropped(tile, probs, dprobs, n_keys, delta, plain, factor):
    """Do what `differentiate` does where dropout has made some of the probabilities -0.0."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    nothing = splat(tile, 0.0)
    for i in range(tile.MV):
        at = i * tile.W * size
        mean = load(tile, delta + at)
        for n in range(n_keys):
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
def copy(tile, at, rows, to):
    """Copy rows of a tile."""
    for n in range(rows * tile.MV):
        store(to + n * tile.W * tile.itemsize, load(tile, at + n * tile.W * tile.itemsize))


@device
def clear(tile, probs, dscores, begin, end, skip_hidden):
    """Set rows of both tiles to 0, or to what is hidden."""
    row = tile.lanes * tile.itemsize
    nothing = -0.0 if skip_hidden else 0.0
    fill(tile, probs + begin * row, end - begin, nothing)
    fill(tile, dscores + begin * row, end - begin, nothing)


@device
def mark_pairs(tile, probs, dscores, n_keys, hidden):
    """Make p and ds -0.0 where a pair is hidden, and there only: what is visible gets a 0 of +0.0.

    A probability is -0.0 already where dropout says so: its value stays out as well.
    """
    size = tile.W * tile.itemsize
    # What pairs flush to 0 must not become -0.0 by that.
    least = TINY if tile.per_word == 2 else 0.0
    for n in range(n_keys * tile.MV):
        noted = load(tile, hidden + n * size) > 0.0
        p, ds = load_old(tile, probs + n * size), load_old(tile, dscores + n * size)
        store(probs + n * size, np.where(noted, splat(tile, -0.0), p))
        ds = np.where(np.abs(ds) <= least, splat(tile, 0.0), ds)
        store(dscores + n * size, np.where(noted, splat(tile, -0.0), ds))


@device
def zero(tile, at, count):
    """Set `count` numbers to 0."""
    for n in range(count):
        write(tile, at + n * tile.itemsize, 0.0)


@device
def reset_sums(tile, plan, t):
    """Set what a tile adds up to 0."""
    fill(tile, t.dq_acc_ptr, plan.dq_columns, 0.0)
    fill(tile, t.sums_ptr, 1, 0.0)


@device
def add_sums(tile, a, context, t, ds):
    """Add the gradient of a tile of scores to that of the bias, and to the sums over keys."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    n_keys = context.n_keys
    if a.row_sum.ptr:
        for i in range(tile.MV):
            at = i * width * size
            plain = load(tile, t.sums_ptr + at)
            for n in range(n_keys):
                plain += load(tile, ds + n * row + at)
            store(t.sums_ptr + at, plain)
    if a.dbias_ptr == 0:
        return
    base = a.dbias_ptr + context.batch * a.dbias_b + context.first_key * a.dbias_j
    if a.bias_columns:
        for lane in range(context.n_valid):
            head = read_int64(context.heads_ptr + 8 * lane)
            # Lanes of one head lie side by side: each head's are added up before they are written.
            if lane == 0 or head != read_int64(context.heads_ptr + 8 * (lane - 1)):
                last = lane
                while last < context.n_valid and read_int64(context.heads_ptr + 8 * last) == head:
                    last += 1
                for n in range(n_keys):
                    at = base + head * a.dbias_h + n * a.dbias_j
                    total = sum_lanes(tile, ds + n * row, lane, last)
                    write(tile, at, read(tile, at) + total)
        return
    lane_offsets(tile, context, a.dbias_h, a.dbias_i)
    for i in range(tile.MV):
        count = min(context.n_valid - i * width, width)
        source, table = ds + i * width * size, context.table_ptr + 8 * i * width
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
def write_sums(tile, a, context, t, split):
    """Write a tile's sums over the keys of a split."""
    if a.row_sum.ptr == 0:
        return
    plain = item_of(a.row_sum, context.batch) + split * a.sums_part
    for lane in range(t.n_valid):
        at = row_of(context, a.row_sum, plain, lane)
        write(tile, at, read(tile, t.sums_ptr + lane * tile.itemsize))


@device
def write_dq(tile, a, plan, context, t, dq, stride_h):
    """Write a tile's partial dq, times the scale; `dq` is the address of head 0."""
    size, width = tile.itemsize, tile.W
    factor = splat(tile, a.scale)
    for n in range(plan.D * tile.MV):
        at = t.dq_acc_ptr + n * width * size
        store(at, load(tile, at) * factor)
    lane_offsets(tile, context, stride_h, plan.D * size)
    write_transposed(tile.compute, context, t.dq_acc_ptr, plan.D, t.n_valid, dq, size)
