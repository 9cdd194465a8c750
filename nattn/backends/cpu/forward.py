"""The forward kernel: one task streams the keys past a few tiles of query rows.

Queries live in lanes: a tile holds one query row in each SIMD lane, so the softmax never crosses
lanes. A task owns `tiles_per_task` neighbouring tiles of one stream of rows and reads each block
of keys and values once for all of them. For a tile and a block:

    S = K Q     scores, [key][lane]          P = exp(S - row_max)      in place
    S = tile functions(S); hidden: -inf      O = O * alpha + V P       [column][lane]

Which keys a tile visits is decided by causal, window and lengths, and by the kinds of the blocks of
a block mask: what is empty is skipped, and where all is visible the mask's function does not run.

A stream is the rows of one query head. Where a head has few rows, the heads that share a key head
form one stream, so that their rows fill the lanes together.

Hidden keys must not reach a result, even through 0 * NaN. A tile first runs on the plain product;
if a result is then not finite, it runs once more with hidden probabilities marked (-0.0) and kept
out of the product. So finite data never pays for it.
"""

from __future__ import annotations

import numpy as np

from ...functions.masks import EMPTY, FULL
from ...vectors.lanes import (
    Struct,
    gather_transposed,
    load,
    load_int32,
    load_lanes,
    load_old,
    read,
    read_int8,
    read_int64,
    scatter_transposed,
    splat,
    store,
    store_panels,
    view,
    write,
    write_int32,
    write_int64,
)
from .jit import device, kernel
from .micro import add_values, dot_keys
from .score import CONTEXT, TOPPED, apply, lane_offsets
from .softmax import mark_hidden, note_hidden, running_softmax
from .threads import enter, leave, stopped, take_task
from .tiles import AREAS, STATE_BYTES

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
        # keys of a block
        "block",
        # streams of an item, heads in one, its rows
        *("streams", "heads", "rows"),
        # what is computed: streams from this one on, counted over all items, of each the tiles from
        # `first_tile` to before `tiles`, and how they form tasks
        *("first_stream", "first_tile", "tiles", "tiles_per_task", "tasks_per_stream"),
        # what is visible: addresses of int64 (B,), and numbers (left, right: -1 is open)
        *("q_offset", "q_lens", "kv_lens", "causal", "left", "right"),
        # tile functions: address of (function, params) pairs, and their number: for scores, for
        # hiding scores where a block is mixed, and for probabilities (to drop or observe them);
        # whether hidden probabilities are to be marked at once
        *("functions", "n_functions", "masks", "n_masks", "drops", "n_drops", "careful"),
        # addresses: of the logit of each head's sink, and the params of the argument mask (0: none)
        *("sinks", "mask"),
        # block mask: address of its kinds (0: none), bytes over item, head and row of blocks, rows
        # and keys of a block
        *("blocks", "blocks_b", "blocks_h", "blocks_i", "block_size"),
        # control: address of the job's shared state
        "control",
        # scratch: address, bytes for each worker, offsets of the areas in it
        *("scratch", "scratch_bytes", *AREAS),
    ),
    # kept: the share of the probabilities that dropout keeps
    ("scale", "kept"),
)
"""What a worker gets."""

STATE = Struct(
    "TileState",
    (
        # the keys lo <= j < hi that causal, window and lengths leave to some lane, and to all
        *("lo", "hi", "full_lo", "full_hi"),
        # lanes that hold a row; rows of the block mask that the tile meets; whether it is written
        *("valid", "n_block_rows", "done"),
        # in the block of keys at hand: those to visit, and those of them that a mask function hides
        *("begin", "end", "mixed_begin", "mixed_end"),
    ),
)
"""Kept for each tile of a task."""


@kernel("void(int64, int64)")
def forward_worker(tile):
    """Run tasks until there are none left; `slot` numbers the worker, for its scratch.

    All loops are in this one function and the steps are leaves: LLVM optimises a function again
    in each of its callers, so that every level more would cost a second of compile time.
    """
    nr, size, row = tile.NR, tile.itemsize, tile.lanes * tile.itemsize

    def worker(slot, args):
        a = view(ARGS, args)
        block = a.block
        scratch = a.scratch + slot * a.scratch_bytes
        context = view(CONTEXT, scratch + a.context)
        columns = (a.Dv + nr - 1) // nr * nr
        scores, alpha, top = scratch + a.scores, scratch + a.alpha, scratch + a.top
        keys, values = scratch + a.keys, scratch + a.values
        trouble = 0
        enter(a.control)
        while True:
            task = take_task(a.control)
            if task < 0:
                break
            stream = task // a.tasks_per_stream
            # Under a causal mask the last rows see most keys: they come first, so that short
            # tasks end the list.
            part = a.tasks_per_stream - 1 - (task - stream * a.tasks_per_stream)
            stream += a.first_stream
            b = stream // a.streams
            first_head = (stream - b * a.streams) * a.heads
            k = a.k + b * a.k_b + first_head // a.group * a.k_h
            v = a.v + b * a.v_b + first_head // a.group * a.v_h
            first_tile = a.first_tile + part * a.tiles_per_task
            n_tiles = min(a.tiles_per_task, a.tiles - first_tile)
            context.batch = b
            context.offset = read_int64(a.q_offset + 8 * b)
            context.vectors, context.top, context.mask = tile.MV, top, a.mask
            context.table, context.temp = scratch + a.table, scratch + a.temp
            # Keys and columns of the values that are read where they lie; others are packed. Where
            # tiles share the copy, it costs less than what the micro-kernel loses on rows far
            # apart (which compete for the same lines of the cache) or on columns of any array.
            shared = n_tiles >= 4
            near = a.k_d == size and (not shared or abs(a.k_n) <= 2 * a.D * size)
            whole = 0 if shared or a.v_d != size else a.Dv // nr * nr

            lo, hi = a.Nk, 0
            for t in range(n_tiles):
                assign_rows(tile, a, scratch, t, first_head, (first_tile + t) * tile.lanes)
                select_tile(tile, a, scratch, context, t)
                find_ranges(tile, a, scratch, context, t)
                find_block_rows(tile, a, scratch, context, t)
                queries, q = scratch + a.queries + t * a.D * row, a.q + b * a.q_b
                pack_transposed(tile, context, q, a.q_h, a.q_n, a.q_d, a.D, a.scale, queries)
                reset_tile(tile, a, scratch, context, t, columns)
                state = tile_state(a, scratch, t)
                lo, hi = min(lo, state.lo), max(hi, state.hi)

            careful, pending = a.careful != 0, n_tiles
            while pending:
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
                    packed_from = pack_keys(
                        tile, k, a.k_n, a.k_d, a.D, a.Nk, near, start, end, keys
                    )
                    panel = (end - begin) * nr * size
                    pack_values(tile, v, a.v_n, a.v_d, a.Dv, whole, begin, end, values, panel)
                    for t in range(n_tiles):
                        state = tile_state(a, scratch, t)
                        t_lo, t_hi = state.begin, state.end
                        if t_lo >= t_hi:
                            continue
                        queries = scratch + a.queries + t * a.D * row
                        start = t_lo - (t_lo - n0) % nr
                        groups = (t_hi - start + nr - 1) // nr
                        direct = min(groups, max(0, (packed_from - start) // nr))
                        first = start + direct * nr
                        packed = keys + (first - packed_from) * a.D * size
                        for i in range(tile.MV):
                            store(top + i * tile.W * size, splat(tile, -np.inf))
                        dot_keys(tile, queries, a.D, k + start * a.k_n, a.k_n, direct, scores, top)
                        dot_keys(
                            tile,
                            queries,
                            a.D,
                            packed,
                            a.D * size,
                            groups - direct,
                            scores + direct * nr * row,
                            top,
                        )

                        # Keys before t_lo are seen by no lane: leave them out from here on.
                        p, rows = scores + (t_lo - start) * row, t_hi - t_lo
                        hides = t_lo < state.full_lo or t_hi > state.full_hi
                        topped = rows == groups * nr
                        mixed_begin, mixed = state.mixed_begin, state.mixed_end - state.mixed_begin
                        if a.n_functions or mixed > 0 or a.n_drops:
                            select_tile(tile, a, scratch, context, t)
                        if a.n_functions:
                            context.first_key, context.n_keys = t_lo, rows
                            said = apply(a.functions, a.n_functions, p, 0, scratch + a.context)
                            topped = said & TOPPED != 0
                            trouble |= said >> 2
                        if mixed > 0:
                            context.first_key, context.n_keys = mixed_begin, mixed
                            at = p + (mixed_begin - t_lo) * row
                            said = apply(a.masks, a.n_masks, at, 0, scratch + a.context)
                            topped = mixed == rows
                            trouble |= said >> 2 << a.n_functions
                        if hides:
                            hide(tile, a, scratch, t, p, t_lo, rows)
                            topped = False
                        row_max = scratch + a.row_max + t * row
                        row_sum = scratch + a.row_sum + t * row
                        if careful:
                            note_hidden(tile, p, rows, scratch + a.marks)
                        running_softmax(tile, p, rows, topped, top, row_max, row_sum, alpha)
                        if careful:
                            mark_hidden(tile, p, rows, scratch + a.marks)
                        if a.n_drops:
                            context.first_key, context.n_keys = t_lo, rows
                            context.row_max = row_max
                            apply(a.drops, a.n_drops, p, 0, scratch + a.context)

                        acc = scratch + a.acc + t * columns * row
                        add_values(
                            tile,
                            p,
                            rows,
                            v + t_lo * a.v_n,
                            a.v_n,
                            nr * size,
                            whole // nr,
                            alpha,
                            acc,
                            careful,
                        )
                        add_values(
                            tile,
                            p,
                            rows,
                            values + (t_lo - begin) * nr * size,
                            nr * size,
                            panel,
                            (columns - whole) // nr,
                            alpha,
                            acc + whole * row,
                            careful,
                        )

                pending = 0
                if stopped(a.control):
                    break
                for t in range(n_tiles):
                    if not tile_state(a, scratch, t).done:
                        select_tile(tile, a, scratch, context, t)
                        if not finish_tile(tile, a, scratch, context, t, columns, careful):
                            reset_tile(tile, a, scratch, context, t, columns)
                            pending += 1
                careful = True
        leave(a.control, slot, trouble)

    return worker


@device
def tile_state(a, scratch, t):
    """Return the state of tile t of the task."""
    return view(STATE, scratch + a.states + t * STATE_BYTES)


@device
def assign_rows(tile, a, scratch, t, first_head, first_row):
    """Give each lane of a tile its head and query row; lanes past the last row repeat it."""
    heads = scratch + a.lane_head + t * tile.lanes * 8
    rows = scratch + a.lane_row + t * tile.lanes * 8
    head, i = first_head + first_row // a.Nq, first_row % a.Nq
    valid = min(tile.lanes, a.rows - first_row)
    for lane in range(tile.lanes):
        write_int64(heads + 8 * lane, head)
        write_int64(rows + 8 * lane, i)
        if lane < valid - 1:
            i += 1
            if i == a.Nq:
                head, i = head + 1, 0
    state = tile_state(a, scratch, t)
    state.valid, state.done = valid, 0


@device
def select_tile(tile, a, scratch, context, t):
    """Point the context at the rows of tile t of the task."""
    context.heads = scratch + a.lane_head + t * tile.lanes * 8
    context.rows = scratch + a.lane_row + t * tile.lanes * 8
    context.lane_lo = scratch + a.lane_lo + t * tile.lanes * 8
    context.lane_hi = scratch + a.lane_hi + t * tile.lanes * 8
    context.valid = tile_state(a, scratch, t).valid


@device
def find_ranges(tile, a, scratch, context, t):
    """Find the keys lo <= j < hi that each lane sees, and those that some and all lanes see."""
    offset = context.offset
    q_len = read_int64(a.q_lens + 8 * context.batch)
    kv_len = read_int64(a.kv_lens + 8 * context.batch)
    lane_lo = scratch + a.lane_lo + t * tile.lanes * 8
    lane_hi = scratch + a.lane_hi + t * tile.lanes * 8
    state = tile_state(a, scratch, t)
    state.lo, state.hi, state.full_lo, state.full_hi = a.Nk, 0, 0, a.Nk
    for lane in range(tile.lanes):
        i = read_int64(context.rows + 8 * lane)
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
            state.lo, state.hi = min(state.lo, lo), max(state.hi, hi)
        state.full_lo, state.full_hi = max(state.full_lo, lo), min(state.full_hi, hi)
        write_int64(lane_lo + 8 * lane, lo)
        write_int64(lane_hi + 8 * lane, hi)


@device
def find_block_rows(tile, a, scratch, context, t):
    """Find the rows of the block mask that a tile meets: the addresses of their kinds."""
    state = tile_state(a, scratch, t)
    count, last = 0, -1
    if a.blocks:
        table = scratch + a.block_rows + t * tile.lanes * 8
        for lane in range(context.valid):
            head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
            at = a.blocks + context.batch * a.blocks_b + head * a.blocks_h
            at += i // a.block_size * a.blocks_i
            if at != last:
                write_int64(table + 8 * count, at)
                count, last = count + 1, at
    state.n_block_rows = count


@device
def select_keys(tile, a, scratch, t, n0):
    """Choose the keys to visit in the block from n0 on, and those that a mask is asked about."""
    state = tile_state(a, scratch, t)
    lo, hi = max(state.lo, n0), min(state.hi, n0 + a.block)
    if state.done:
        hi = lo
    begin, end = lo, hi
    mixed_begin, mixed_end = lo, hi if a.n_masks else lo
    if a.blocks and lo < hi:
        table = scratch + a.block_rows + t * tile.lanes * 8
        begin, end, mixed_begin, mixed_end, gap = hi, lo, hi, lo, hi
        for block in range(lo // a.block_size, (hi - 1) // a.block_size + 1):
            least, most = FULL, EMPTY
            for n in range(state.n_block_rows):
                kind = read_int8(read_int64(table + 8 * n) + block)
                least, most = min(least, kind), max(most, kind)
            first = max(lo, block * a.block_size)
            if most == EMPTY:
                gap = min(gap, first)
            else:
                # What is empty between two that are not has to be hidden.
                if begin < gap < hi:
                    mixed_begin, mixed_end = min(mixed_begin, gap), first
                gap = hi
                begin, end = min(begin, first), min(hi, (block + 1) * a.block_size)
                if least != FULL:
                    mixed_begin, mixed_end = min(mixed_begin, first), end
    state.begin, state.end = begin, end
    state.mixed_begin, state.mixed_end = mixed_begin, mixed_end


@device
def pack_transposed(tile, context, source, stride_h, stride_n, stride_d, depth, scale, dest):
    """Write the rows of a tile's lanes, times a scale, as ``[depth][lanes]``."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    lane_offsets(tile, context, stride_h, stride_n)
    factor = splat(tile, scale)
    for i in range(tile.MV):
        table = context.table + 8 * i * width
        to = dest + i * width * size
        done = 0
        if stride_d == size:
            while done + width <= depth:
                gather_transposed(tile, tile, source + done * size, table, to + done * row, row)
                done += width
        for d in range(done, depth):
            store(to + d * row, load_lanes(tile, tile, source + d * stride_d, table))
        for d in range(depth):
            store(to + d * row, load(tile, to + d * row) * factor)


@device
def reset_tile(tile, a, scratch, context, t, columns):
    """Set a tile's running state to that of no key at all, or of its sink, which has no value."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    for n in range(columns * tile.MV):
        store(scratch + a.acc + t * columns * row + n * width * size, splat(tile, 0.0))
    for i in range(tile.MV):
        store(scratch + a.row_max + t * row + i * width * size, splat(tile, -np.inf))
        store(scratch + a.row_sum + t * row + i * width * size, splat(tile, 0.0))
    if a.sinks:
        q_len = read_int64(a.q_lens + 8 * context.batch)
        for lane in range(tile.lanes):
            if read_int64(context.rows + 8 * lane) < q_len:
                sink = read(tile, a.sinks + read_int64(context.heads + 8 * lane) * size)
                at = t * row + lane * size
                write(tile, scratch + a.row_max + at, sink)
                if sink != -np.inf:
                    # one, or NaN for a sink that is not finite
                    write(tile, scratch + a.row_sum + at, sink - sink + 1.0)


@device
def pack_keys(tile, source, stride_n, stride_d, depth, n_keys, near, begin, end, dest):
    """Copy those keys that the micro-kernel does not read where they lie; return the first.

    It reads NR whole rows at a time: a last group of fewer rows is completed with zeros.
    """
    nr, size, width = tile.NR, tile.itemsize, tile.W
    first = n_keys // nr * nr if near else begin
    for n in range(first, (end + nr - 1) // nr * nr):
        at, to = source + n * stride_n, dest + (n - first) * depth * size
        d = 0
        if n < n_keys and stride_d == size:
            while d + width <= depth:
                store(to + d * size, load(tile, at + d * size))
                d += width
        while d < depth:
            write(tile, to + d * size, read(tile, at + d * stride_d) if n < n_keys else 0.0)
            d += 1
    return first


@device
def pack_values(tile, source, stride_n, stride_d, depth, whole, begin, end, dest, panel):
    """Copy the columns from `whole` on in panels of NR columns, the last completed with zeros.

    The micro-kernel then reads each panel from its beginning to its end.
    """
    nr, size, width = tile.NR, tile.itemsize, tile.W
    columns = (depth - whole + nr - 1) // nr * nr
    for n in range(begin, end):
        at = source + n * stride_n + whole * stride_d
        row = dest + (n - begin) * nr * size
        d = 0
        if stride_d == size:
            while d + width <= depth - whole:
                to = row + d // nr * panel + d % nr * size
                store_panels(tile, to, load(tile, at + d * size), panel)
                d += width
        while d < columns:
            x = read(tile, at + d * stride_d) if d < depth - whole else 0.0
            write(tile, row + d // nr * panel + d % nr * size, x)
            d += 1


@device
def hide(tile, a, scratch, t, scores, n0, rows):
    """Set the scores of the keys from n0 on to -inf in the lanes that do not see them."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    bounds = scratch + a.bounds
    for lane in range(tile.lanes):
        at = (t * tile.lanes + lane) * 8
        lo = read_int64(scratch + a.lane_lo + at) - n0
        hi = read_int64(scratch + a.lane_hi + at) - n0
        write_int32(bounds + lane * 4, np.int32(min(max(lo, 0), rows)))
        write_int32(bounds + (tile.lanes + lane) * 4, np.int32(min(max(hi, 0), rows)))
    # From clear_from to clear_to every lane sees every key.
    state = tile_state(a, scratch, t)
    clear_from = min(max(state.full_lo - n0, 0), rows)
    clear_to = min(max(state.full_hi - n0, clear_from), rows)
    for i in range(tile.MV):
        lo = load_int32(tile, bounds + i * width * 4)
        hi = load_int32(tile, bounds + (tile.lanes + i * width) * 4)
        n = 0
        while n < rows:
            if n == clear_from:
                n = clear_to
                if n == rows:
                    break
            at = scores + n * row + i * width * size
            seen = (lo <= np.int32(n)) & (hi > np.int32(n))
            store(at, np.where(seen, load_old(tile, at), splat(tile, -np.inf)))
            n += 1


@device
def finish_tile(tile, a, scratch, context, t, columns, careful):
    """Divide by the sums and write a tile's rows; return False if it must run again, carefully."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    acc = scratch + a.acc + t * columns * row
    valid = context.valid
    probe, lse = scratch + a.alpha, scratch + a.scores
    for i in range(tile.MV):
        at = i * width * size
        total = load(tile, scratch + a.row_sum + t * row + at)
        divisor = np.where(total == 0.0, splat(tile, 1.0), total) * splat(tile, a.kept)
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
                return False

    for lane in range(valid):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        at = a.lse + ((context.batch * a.Hq + head) * a.Nq + i) * size
        write(tile, at, read(tile, lse + lane * size))
    lane_offsets(tile, context, a.out_h, a.out_n)
    out = a.out + context.batch * a.out_b
    for i in range(tile.MV):
        count = min(valid - i * width, width)
        source, table = acc + i * width * size, context.table + 8 * i * width
        done = 0
        if a.out_d == size:
            while done + width <= a.Dv:
                scatter_transposed(tile, source + done * row, row, out + done * size, table, count)
                done += width
        for d in range(done, a.Dv):
            for lane in range(count):
                x = read(tile, source + d * row + lane * size)
                write(tile, out + read_int64(table + 8 * lane) + d * a.out_d, x)
    tile_state(a, scratch, t).done = 1
    return True
