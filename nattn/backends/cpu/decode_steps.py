"""The steps of the decode kernel: on chunks of keys and values, on rows of scores, on states.

Scores lie as ``[row][key]``, one query row after the other (`DecodeWork.offsets_ptr` says where).
"""

from __future__ import annotations

import numpy as np

from ...vectors.lanes import (
    add_dots,
    add_outer_stored,
    add_outer_unless_hidden,
    add_tile,
    exp2_nonpositive,
    gather_words,
    lane_of,
    load,
    load_old,
    load_stored,
    prefetch_far,
    read,
    read_int64,
    read_stored,
    scatter_transposed,
    splat,
    store,
    store_dots,
    store_stored,
    write,
    write_stored,
    zero_dots,
    zeros,
)
from .arrays import lie_together, row_at, rows_of
from .jit import device
from .packing import copy_row
from .softmax import LOG2E, is_hidden

CHUNK = 16
"""Keys that are read together: at least as many as a vector has lanes."""


@device
def clear_state(tile, t, padded_Dv):
    """Set a tile's running state to that of no key at all."""
    size, width = tile.itemsize, tile.W
    for n in range(0, t.rows * padded_Dv, width):
        store(t.acc_ptr + n * size, splat(tile, 0.0))
    for n in range(width):
        store(t.row_sums_ptr + n * width * size, splat(tile, 0.0))
    store(t.row_max_ptr, splat(tile, -np.inf))


@device
def fetch_ahead(row, n_bytes):
    """Ask for a row of the next chunk, while this one is computed.

    It is done a few rows at a time, between the products: many hints at once wait for each other.
    """
    for line in range(0, n_bytes, 64):
        prefetch_far(row + line)


@device
def copy_chunk(cached, pages, array, b, head, begin, end, depth, width, dest, ahead):
    """Copy rows to scratch as floats, completed to `width`; rows from `end` on are 0."""
    size = cached.itemsize
    together = lie_together(pages, begin, end)
    rows = row_at(pages, array, b, head, begin)
    for n in range(CHUNK):
        to = dest + n * width * size
        if begin + n < end:
            at = rows + n * array.stride_n
            if not together:
                at = row_at(pages, array, b, head, begin + n)
            if ahead:
                fetch_ahead(at + ahead, depth * cached.storage_size)
            copy_row(cached, at, array.stride_d, depth, width, to)
        else:
            for d in range(0, width, cached.W):
                store(to + d * size, splat(cached, 0.0))


@device
def read_scales(scales, pages, array, b, head, begin, end, dest):
    """Copy the scales of keys, a chunk at a time; those from `end` on are 0.

    They are stored as the tile `scales` says.
    """
    size, stored = scales.itemsize, scales.storage_size
    for c in range(begin, end, CHUNK):
        to, last = dest + (c - begin) * size, c + CHUNK
        if array.stride_n == stored and last <= end and lie_together(pages, c, last):
            at = row_at(pages, array, b, head, c)
            for n in range(0, CHUNK, scales.W):
                store(to + n * size, load_stored(scales, at + n * stored))
            continue
        for n in range(CHUNK):
            x = 0.0
            if c + n < end:
                x = read_stored(scales, row_at(pages, array, b, head, c + n))
            write(scales, to + n * size, x)


@device
def dot_chunk(wide, source, queries, depth, rows, keys, next_key, dest, line, ahead):
    """Write the scores of a chunk of keys with each row: ``dest[row][key]``."""
    size, nr = wide.itemsize, wide.NR
    count = wide.W // nr
    for n in range(0, CHUNK, count):
        at = keys + n * next_key
        if ahead:
            for m in range(count):
                fetch_ahead(at + ahead + m * next_key, depth * source.storage_size)
        for r in range(0, rows, nr):
            q = queries + r * depth * size
            acc = zero_dots(wide)
            for d in range(0, depth, wide.W):
                x = at + d * source.storage_size
                acc = add_dots(wide, source, acc, q + d * size, depth * size, x, next_key)
            store_dots(wide, acc, dest + r * line + n * size, line)


@device
def scale_rows(tile, rows_ptr, line, rows, begin, end, factors, keeps_hidden):
    """Multiply what each key has in rows by its factor; if so asked, but what is hidden (-0.0)."""
    size = tile.itemsize
    for n in range(begin, end, tile.W):
        factor = load(tile, factors + n * size)
        for r in range(rows):
            at = rows_ptr + r * line + n * size
            x = load_old(tile, at)
            scaled = x * factor
            if keeps_hidden:
                scaled = np.where(is_hidden(x), x, scaled)
            store(at, scaled)


@device
def turn(tile, w, begin, end):
    """Copy scores from [row][key] to [key][lane]; lanes without a row hold anything."""
    size, vector = tile.itemsize, tile.W * tile.itemsize
    for n in range(begin, end, tile.W):
        to = w.tile_ptr + n * vector
        gather_words(tile.compute, w.scores_ptr + n * size, w.offsets_ptr, to, vector)


@device
def turn_back(tile, w, n_valid, begin, end):
    """Copy scores back from [key][lane] to [row][key]."""
    size, vector = tile.itemsize, tile.W * tile.itemsize
    for n in range(begin, end, tile.W):
        at = w.tile_ptr + n * vector
        scatter_transposed(
            tile.compute, at, vector, w.scores_ptr + n * size, w.offsets_ptr, n_valid
        )


@device
def hide_outside(tile, w, t, n0, first, last):
    """Set the scores of keys that a row does not see to -inf, by its range."""
    for r in range(t.n_valid):
        row = w.scores_ptr + read_int64(w.offsets_ptr + 8 * r)
        lo = max(read_int64(t.lane_lo_ptr + 8 * r), t.begin)
        hi = min(read_int64(t.lane_hi_ptr + 8 * r), t.end)
        for n in range(first, min(lo, last)):
            write(tile, row + (n - n0) * tile.itemsize, -np.inf)
        for n in range(max(first, hi), last):
            write(tile, row + (n - n0) * tile.itemsize, -np.inf)


@device
def softmax_rows(tile, w, t, padded_Dv, begin, end):
    """Turn scores into probabilities relative to the running maximum, in place.

    As in `softmax.running_softmax`; what rows have summed up so far shrinks at once.
    """
    size, width, vector = tile.itemsize, tile.W, tile.W * tile.itemsize
    hidden, nothing = splat(tile, -np.inf), splat(tile, -0.0)
    for r in range(t.n_valid):
        row = w.scores_ptr + read_int64(w.offsets_ptr + 8 * r)
        largest = hidden
        for n in range(begin, end, width):
            s = load(tile, row + n * size)
            largest = np.where(s > largest, s, largest)
        old = read(tile, t.row_max_ptr + r * size)
        new = old
        for lane in range(width):
            s = lane_of(tile, largest, lane)
            new = s if s > new else new
        write(tile, t.row_max_ptr + r * size, new)
        top = splat(tile, new)
        top = np.where(top == hidden, splat(tile, 0.0), top)
        shrink = exp2_nonpositive((splat(tile, old) - top) * LOG2E)
        total = load(tile, t.row_sums_ptr + r * vector) * shrink
        for n in range(begin, end, width):
            s = load(tile, row + n * size)
            p = exp2_nonpositive((s - top) * LOG2E)
            total += p
            store(row + n * size, np.where(s == hidden, nothing, p))
        store(t.row_sums_ptr + r * vector, total)
        if not (new == old or old == -np.inf):
            acc = t.acc_ptr + r * padded_Dv * size
            for d in range(0, padded_Dv, width):
                store(acc + d * size, load(tile, acc + d * size) * shrink)


@device
def add_chunk(
    wide, source, probs, line, rows, values, next_v, n_keys, padded_Dv, acc_ptr, skip_hidden, ahead
):
    """Add the values of a chunk of keys to the rows."""
    size, nr = wide.itemsize, wide.NR
    columns, next_acc = wide.lanes, padded_Dv * size
    for column in range(0, padded_Dv, columns):
        first = values + column * source.storage_size
        for r in range(0, rows, nr):
            p = probs + r * line
            acc = zeros(wide)
            if skip_hidden:
                for n in range(n_keys):
                    v = first + n * next_v
                    acc = add_outer_unless_hidden(wide, acc, v, p + n * size, line)
            elif ahead and r == 0:
                for n in range(n_keys):
                    v = first + n * next_v
                    fetch_ahead(v + ahead, columns * source.storage_size)
                    acc = add_outer_stored(wide, source, acc, v, p + n * size, line)
            else:
                for n in range(n_keys):
                    v = first + n * next_v
                    acc = add_outer_stored(wide, source, acc, v, p + n * size, line)
            add_tile(wide, acc, acc_ptr + r * next_acc + column * size, next_acc, 1.0)


@device
def add_lanes(tile, t, dest):
    """Write the sum of each row."""
    vector = tile.W * tile.itemsize
    for r in range(tile.W):
        sums = load(tile, t.row_sums_ptr + r * vector)
        total = lane_of(tile, sums, 0)
        for lane in range(1, tile.W):
            total += lane_of(tile, sums, lane)
        write(tile, dest + r * tile.itemsize, total)


@device
def merge_splits(tile, a, plan, w, states, item, kv_head):
    """Write the rows of a key head: the states of all splits, merged in their order."""
    size, b = tile.itemsize, item.b
    maxima = plan.most_rows * plan.padded_Dv * size
    sums = maxima + plan.padded_rows * size
    for r in range(w.n_rows):
        member = r // w.Nq
        head, i = kv_head * plan.group + member, r - member * w.Nq
        largest = -np.inf
        sink = -np.inf
        if a.sinks_ptr:
            sink = read(tile, a.sinks_ptr + head * size)
            largest = sink
        for s in range(item.n_splits):
            x = read(tile, states + s * plan.state_bytes + maxima + r * size)
            largest = x if x > largest else largest
        for d in range(0, plan.padded_Dv, tile.W):
            store(w.row_ptr + d * size, splat(tile, 0.0))
        total = 0.0
        if sink != -np.inf:
            # NaN for a sink that is not finite
            total = (sink - sink) + lane_of(
                tile, exp2_nonpositive((splat(tile, sink) - splat(tile, largest)) * LOG2E), 0
            )
        for s in range(item.n_splits):
            state = states + s * plan.state_bytes
            x = read(tile, state + maxima + r * size)
            added = read(tile, state + sums + r * size)
            if x == -np.inf and added == 0.0:
                continue
            weight = splat(tile, 1.0)
            if x != largest:
                weight = exp2_nonpositive((splat(tile, x) - splat(tile, largest)) * LOG2E)
            total += lane_of(tile, weight, 0) * added
            acc = state + r * plan.padded_Dv * size
            for d in range(0, plan.padded_Dv, tile.W):
                at = w.row_ptr + d * size
                store(at, load(tile, at) + load(tile, acc + d * size) * weight)
        divisor = splat(tile, 1.0 if total == 0.0 else total) * splat(tile, a.kept)
        for d in range(0, plan.padded_Dv, tile.W):
            store(w.row_ptr + d * size, load(tile, w.row_ptr + d * size) / divisor)
        end = lane_of(tile, splat(tile, largest) + np.log(splat(tile, total)), 0)
        write_row(tile, a, plan, b, head, i, w.row_ptr, end)
    if a.pads:
        for d in range(0, plan.padded_Dv, tile.W):
            store(w.row_ptr + d * size, splat(tile, 0.0))
        for member in range(plan.group):
            for i in range(w.Nq, a.Nq):
                write_row(tile, a, plan, b, kv_head * plan.group + member, i, w.row_ptr, -np.inf)


@device
def write_row(tile, a, plan, b, head, i, row, lse):
    """Write a row of results and its log-sum-exp."""
    write(tile, rows_of(a.lse, b, head) + i * a.lse.stride_n, lse)
    out = rows_of(a.out, b, head) + i * a.out.stride_n
    store_row(tile, row, out, a.out.stride_d, plan.Dv)
    if a.exact.ptr:
        exact = rows_of(a.exact, b, head) + i * a.exact.stride_n
        store_row(tile.compute, row, exact, a.exact.stride_d, plan.Dv)


@device
def store_row(tile, row, dest, stride, depth):
    """Write a row of floats, rounded to what is stored."""
    size, stored, d = tile.itemsize, tile.storage_size, 0
    if stride == stored:
        while d + tile.W <= depth:
            store_stored(tile, dest + d * stored, load(tile, row + d * size))
            d += tile.W
    while d < depth:
        write_stored(tile, dest + d * stride, read(tile, row + d * size))
        d += 1
