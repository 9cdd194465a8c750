"""The forward kernel: one task streams the keys past a few tiles of query rows.

Queries live in lanes: a tile holds one query row in each SIMD lane, so the softmax never crosses
lanes. A task owns `tiles_per_task` neighbouring tiles of one stream of rows and reads each block
of keys and values once for all of them. For a tile and a block:

    S = K Q     scores, [key][lane]          P = exp(S - row_max)      in place
    S = tile functions(S); hidden: -inf      O = O * alpha + V P       [column][lane]

A stream is the rows of one query head. Where a head has few rows, the heads that share a key head
form one stream, so that their rows fill the lanes together.

Hidden keys must not reach a result, even through 0 * NaN. A tile first runs on the plain product;
if a result is then not finite, it runs once more with hidden probabilities marked (-0.0) and kept
out of the product. So finite data never pays for it.
"""

from __future__ import annotations

import numpy as np

from ..lanes import (
    Struct,
    gather_transposed,
    load,
    load_int32,
    load_lanes,
    read,
    read_int64,
    scatter_transposed,
    splat,
    store,
    take_ticket,
    view,
    write,
    write_int32,
    write_int64,
)
from . import score
from .jit import device, kernel
from .micro import add_values, add_visible_values, dot_keys
from .score import CONTEXT
from .softmax import running_softmax
from .tiles import AREAS, RANGES_BYTES

ARGS = Struct(
    "ForwardArgs",
    (
        # arrays: byte address, and byte strides over item, head, row, column
        *("q", "q_b", "q_h", "q_n", "q_d"),
        *("k", "k_b", "k_h", "k_n", "k_d"),
        *("v", "v_b", "v_h", "v_n", "v_d"),
        *("out", "out_b", "out_h", "out_n", "out_d"),
        # lse: address of a contiguous (B, Hq, Nq)
        "lse",
        # sizes
        *("Hq", "group", "Nq", "Nk", "D", "Dv"),
        # streams of an item, heads in one, its rows and tiles; how the tiles form tasks
        *("streams", "heads", "rows", "tiles", "tiles_per_task", "tasks_per_stream"),
        # what is visible: addresses of int64 (B,), and numbers (left, right: -1 is open)
        *("q_offset", "q_lens", "kv_lens", "causal", "left", "right"),
        # tile functions: address of (function, params) pairs, and their number
        *("functions", "n_functions"),
        # control: address of the next task and the number of tasks (0 stops all workers)
        "control",
        # scratch: address, bytes for each worker, offsets of the areas in it
        *("scratch", "scratch_bytes", *AREAS),
    ),
    ("scale",),
)
"""What a worker gets."""

RANGES = Struct("Ranges", ("lo", "hi", "full_lo", "full_hi", "done"))
"""Kept for each tile: keys that some lane sees, that all lanes see; is the result written?"""

@kernel("void(int64, int64)")
def forward_worker(tile, block):
    """Run tasks until there are none left; `slot` numbers the worker, for its scratch."""

    def worker(slot, args):
        a = view(ARGS, args)
        scratch = a.scratch + slot * a.scratch_bytes
        while True:
            task = take_ticket(a.control)
            if task >= read_int64(a.control + 8):
                break
            run_task(tile, block, a, task, scratch)

    return worker


@device
def run_task(tile, block, a, task, scratch):
    """Compute the rows of one task, a run of tiles of one stream."""
    stream = task // a.tasks_per_stream
    # Under a causal mask the last rows see most keys: they come first, short tasks end the list.
    part = a.tasks_per_stream - 1 - (task - stream * a.tasks_per_stream)
    b = stream // a.streams
    first_head = (stream - b * a.streams) * a.heads
    first_tile = part * a.tiles_per_task
    n_tiles = min(a.tiles_per_task, a.tiles - first_tile)

    context = view(CONTEXT, scratch + a.context)
    context.batch = b
    context.first_head = first_head
    context.rows_per_head = a.Nq
    context.table = scratch + a.table
    context.temp = scratch + a.temp

    lo, hi = a.Nk, 0
    for t in range(n_tiles):
        select_rows(tile, a, context, first_tile + t)
        pack_queries(tile, a, scratch, context, t, b)
        find_ranges(tile, a, scratch, context, t, b)
        reset_tile(tile, a, scratch, t)
        ranges = tile_ranges(a, scratch, t)
        lo, hi = min(lo, ranges.lo), max(hi, ranges.hi)

    careful = False
    while True:
        for n0 in range(lo // block * block, hi, block):
            if read_int64(a.control + 8) == 0:
                return  # interrupted
            stream_block(
                tile, block, a, scratch, context, b, first_head, first_tile, n_tiles, n0, lo, hi,
                careful,
            )
        again = False
        for t in range(n_tiles):
            if not tile_ranges(a, scratch, t).done:
                select_rows(tile, a, context, first_tile + t)
                if finish_tile(tile, a, scratch, context, t, b, careful):
                    reset_tile(tile, a, scratch, t)
                    again = True
        if not again:
            return
        careful = True


@device
def select_rows(tile, a, context, index):
    """Point the context at the rows of tile `index` of the stream."""
    context.first_row = index * tile.lanes
    context.valid_rows = min(tile.lanes, a.rows - context.first_row)


@device
def tile_ranges(a, scratch, t):
    """Return the key ranges of tile t of the task."""
    return view(RANGES, scratch + a.ranges + t * RANGES_BYTES)


@device
def pack_queries(tile, a, scratch, context, t, b):
    """Write the scaled queries of a tile as ``[D][lanes]``."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    score.lane_offsets(tile, context, a.q_h, a.q_n)
    base = a.q + b * a.q_b
    scale = splat(tile, a.scale)
    for i in range(tile.MV):
        table = scratch + a.table + 8 * i * width
        dest = scratch + a.queries + t * a.D * row + i * width * size
        done = 0
        if a.q_d == size:
            while done + width <= a.D:
                gather_transposed(tile, tile, base + done * size, table, dest + done * row, row)
                done += width
        for d in range(done, a.D):
            store(dest + d * row, load_lanes(tile, tile, base + d * a.q_d, table))
        for d in range(a.D):
            store(dest + d * row, load(tile, dest + d * row) * scale)


@device
def find_ranges(tile, a, scratch, context, t, b):
    """Find the keys lo <= j < hi that each lane sees, and those that some and all lanes see."""
    offset = read_int64(a.q_offset + 8 * b)
    q_len = read_int64(a.q_lens + 8 * b)
    kv_len = read_int64(a.kv_lens + 8 * b)
    lane_lo = scratch + a.lane_lo + t * tile.lanes * 8
    lane_hi = scratch + a.lane_hi + t * tile.lanes * 8
    first = context.first_row
    last = first + context.valid_rows - 1
    some_lo, some_hi, all_lo, all_hi = a.Nk, 0, 0, a.Nk
    for lane in range(tile.lanes):
        i = min(first + lane, last) % a.Nq
        position = i + offset
        lo, hi = 0, kv_len
        if a.left >= 0:
            lo = max(lo, position - a.left)
        if a.right >= 0:
            hi = min(hi, position + a.right + 1)
        if a.causal:
            hi = min(hi, position + 1)
        if hi <= lo or i >= q_len:
            lo, hi = 0, 0
        else:
            some_lo, some_hi = min(some_lo, lo), max(some_hi, hi)
        all_lo, all_hi = max(all_lo, lo), min(all_hi, hi)
        write_int64(lane_lo + 8 * lane, lo)
        write_int64(lane_hi + 8 * lane, hi)
    ranges = tile_ranges(a, scratch, t)
    ranges.lo, ranges.hi = some_lo, some_hi
    ranges.full_lo, ranges.full_hi = all_lo, all_hi
    ranges.done = 0


@device
def reset_tile(tile, a, scratch, t):
    """Set a tile's running state to that of no key at all."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    columns = (a.Dv + tile.NR - 1) // tile.NR * tile.NR
    for n in range(columns * tile.MV):
        store(scratch + a.acc + t * columns * row + n * width * size, splat(tile, 0.0))
    for i in range(tile.MV):
        store(scratch + a.row_max + t * row + i * width * size, splat(tile, -np.inf))
        store(scratch + a.row_sum + t * row + i * width * size, splat(tile, 0.0))


@device
def pack(tile, source, stride_n, stride_d, rows, columns, dest, pitch):
    """Copy a block to scratch, with `pitch` elements from row to row and zeros at its right."""
    size = tile.itemsize
    for n in range(rows):
        for d in range(columns):
            x = read(tile, source + n * stride_n + d * stride_d)
            write(tile, dest + (n * pitch + d) * size, x)
        for d in range(columns, pitch):
            write(tile, dest + (n * pitch + d) * size, 0.0)


@device
def stream_block(
    tile, block, a, scratch, context, b, first_head, first_tile, n_tiles, n0, lo, hi, careful
):
    """Let the tiles of a task attend to the keys lo <= j < hi of the block at n0.

    Keys and values are read where they lie. What the micro-kernel cannot read so is packed:
    a last group of fewer than NR keys or columns, and blocks whose columns are not adjacent.
    """
    size, nr, row = tile.itemsize, tile.NR, tile.lanes * tile.itemsize
    columns = (a.Dv + nr - 1) // nr * nr
    kv_head = first_head // a.group
    k = a.k + b * a.k_b + kv_head * a.k_h
    v = a.v + b * a.v_b + kv_head * a.v_h
    keys, values = scratch + a.keys, scratch + a.values

    # Packed keys begin at packed_from; before it they are read in place.
    packed_from = a.Nk // nr * nr
    if a.k_d != size:
        packed_from = n0 + (max(lo, n0) - n0) // nr * nr
    last = min(a.Nk, n0 + block, n0 + (hi - n0 + nr - 1) // nr * nr)
    if last > packed_from:
        source = k + packed_from * a.k_n
        pack(tile, source, a.k_n, a.k_d, last - packed_from, a.D, keys, a.D)
        for n in range((last - packed_from) * a.D, (last - packed_from + nr - 1) // nr * nr * a.D):
            write(tile, keys + n * size, 0.0)

    # Packed values are whole rows, or only the last columns: those from packed_column on.
    first, end = max(lo, n0), min(hi, n0 + block)
    packed_column = 0 if a.v_d != size else a.Dv // nr * nr
    pitch = columns - packed_column
    if pitch:
        source = v + first * a.v_n + packed_column * a.v_d
        dest = values + (first - n0) * pitch * size
        pack(tile, source, a.v_n, a.v_d, end - first, a.Dv - packed_column, dest, pitch)

    for t in range(n_tiles):
        ranges = tile_ranges(a, scratch, t)
        t_lo = max(ranges.lo, n0)
        t_hi = min(ranges.hi, n0 + block)
        if t_lo >= t_hi or ranges.done:
            continue
        start = n0 + (t_lo - n0) // nr * nr
        scores, alpha = scratch + a.scores, scratch + a.alpha
        queries = scratch + a.queries + t * a.D * row
        for n in range(start, t_hi, nr):
            at, stride = k + n * a.k_n, a.k_n
            if n >= packed_from:
                at, stride = keys + (n - packed_from) * a.D * size, a.D * size
            dot_keys(tile, queries, a.D, at, stride, scores + (n - start) * row)

        # Rows before t_lo are seen by no lane; the values of none of them may be read.
        skip = t_lo - start
        scores += skip * row
        rows = t_hi - t_lo
        if a.n_functions:
            select_rows(tile, a, context, first_tile + t)
            context.first_key, context.n_keys = t_lo, rows
            score.apply(a.functions, a.n_functions, scores, 0, scratch + a.context)
        if t_lo < ranges.full_lo or t_hi > ranges.full_hi:
            hide(tile, a, scratch, t, scores, t_lo, t_hi, ranges.full_lo, ranges.full_hi)

        row_max, row_sum = scratch + a.row_max + t * row, scratch + a.row_sum + t * row
        running_softmax(tile, scores, rows, row_max, row_sum, alpha, careful)

        for d in range(0, columns, nr):
            at, stride = v + t_lo * a.v_n + d * size, a.v_n
            if d >= packed_column:
                stride = pitch * size
                at = values + (t_lo - n0) * stride + (d - packed_column) * size
            dest = scratch + a.acc + (t * columns + d) * row
            if careful:
                add_visible_values(tile, scores, rows, at, stride, alpha, dest)
            else:
                add_values(tile, scores, rows, at, stride, alpha, dest)


@device
def hide(tile, a, scratch, t, scores, n0, end, full_lo, full_hi):
    """Set the scores of keys n0 <= j < end to -inf in the lanes that do not see them."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    rows = end - n0
    bounds = scratch + a.bounds
    for lane in range(tile.lanes):
        at = (t * tile.lanes + lane) * 8
        lo = read_int64(scratch + a.lane_lo + at) - n0
        hi = read_int64(scratch + a.lane_hi + at) - n0
        write_int32(bounds + lane * 4, np.int32(min(max(lo, 0), rows)))
        write_int32(bounds + (tile.lanes + lane) * 4, np.int32(min(max(hi, 0), rows)))
    # Between these two rows every lane sees every key.
    clear_from = min(max(full_lo - n0, 0), rows)
    clear_to = min(max(full_hi - n0, clear_from), rows)
    for i in range(tile.MV):
        lo = load_int32(tile, bounds + i * width * 4)
        hi = load_int32(tile, bounds + (tile.lanes + i * width) * 4)
        column = scores + i * width * size
        for n in range(clear_from):
            at = column + n * row
            seen = (lo <= np.int32(n)) & (hi > np.int32(n))
            store(at, np.where(seen, load(tile, at), splat(tile, -np.inf)))
        for n in range(clear_to, rows):
            at = column + n * row
            seen = (lo <= np.int32(n)) & (hi > np.int32(n))
            store(at, np.where(seen, load(tile, at), splat(tile, -np.inf)))


@device
def finish_tile(tile, a, scratch, context, t, b, careful):
    """Divide by the sums and write a tile's rows; return True if it must run again, carefully."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    columns = (a.Dv + tile.NR - 1) // tile.NR * tile.NR
    acc = scratch + a.acc + t * columns * row
    first, valid = context.first_row, context.valid_rows
    probe, lse = scratch + a.alpha, scratch + a.scores
    for i in range(tile.MV):
        at = i * width * size
        total = load(tile, scratch + a.row_sum + t * row + at)
        divisor = np.where(total == 0.0, splat(tile, 1.0), total)
        test = splat(tile, 0.0)
        for d in range(a.Dv):
            o = load(tile, acc + d * row + at) / divisor
            store(acc + d * row + at, o)
            test += o * 0.0
        store(probe + at, test)
        store(lse + at, load(tile, scratch + a.row_max + t * row + at) + np.log(total))
    if not careful:
        for lane in range(valid):
            if read(tile, probe + lane * size) != 0.0:
                return True

    table = scratch + a.table
    for lane in range(valid):
        r = first + lane
        head = context.first_head + r // a.Nq
        i = r % a.Nq
        write(tile, a.lse + ((b * a.Hq + head) * a.Nq + i) * size, read(tile, lse + lane * size))
        write_int64(table + 8 * lane, a.out + b * a.out_b + head * a.out_h + i * a.out_n)
    for i in range(tile.MV):
        count = min(valid - i * width, width)
        source = acc + i * width * size
        done = 0
        if a.out_d == size:
            while done + width <= a.Dv:
                at = table + 8 * i * width
                scatter_transposed(tile, source + done * row, row, at, done * size, count)
                done += width
        for d in range(done, a.Dv):
            for lane in range(count):
                x = read(tile, source + d * row + lane * size)
                write(tile, read_int64(table + 8 * (i * width + lane)) + d * a.out_d, x)
    tile_ranges(a, scratch, t).done = 1
    return False
