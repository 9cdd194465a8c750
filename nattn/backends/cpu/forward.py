"""The forward kernel: one task streams the keys past a few tiles of query rows.

Queries live in lanes: a tile holds one query row in each SIMD lane, so the softmax never crosses
lanes. A task owns `tiles_per_task` neighbouring tiles of one stream of rows and reads each block
of keys and values once for all of them. For a tile and a block:

    S = K Q     scores, [key][lane]          P = exp(S - row_max)      in place
    S = tile functions(S); hidden: -inf      O = O * alpha + V P       [column][lane]

With the dot product of pairs S sums over pairs of the head dimension, and V P over pairs of keys,
for which P is rounded to bfloat16; all else is the same.

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

from ...vectors.lanes import (
    Struct,
    address_of,
    load,
    read,
    read_int64,
    splat,
    store,
    view,
    write,
)
from .arrays import STRIDED, item_of, rows_of
from .jit import device, kernel
from .jobs import enter, job_record, leave, stopped, take_task
from .micro import add_values
from .packing import (
    KEY_BLOCK,
    dot_block,
    fetch_keys,
    pack_transposed,
    pack_values,
    readable_in_place,
    row_of,
    words_of,
    write_rows,
)
from .score import FUNCTIONS, TILE_MAX_KNOWN, apply
from .softmax import join_keys, mark_hidden, note_hidden, running_softmax
from .tables import TABLE, find_task
from .visibility import (
    VISIBLE,
    assign_rows,
    end_rows,
    find_block_rows,
    find_ranges,
    hide,
    select_keys,
    select_tile,
)
from .workspace import OF_A_TILE, SHARED, context_of, lay_out

ARGS = job_record(
    "ForwardArgs",
    (
        *(("q", STRIDED), ("k", STRIDED), ("v", STRIDED), ("out", STRIDED), ("lse", STRIDED)),
        # the output as it is before it is rounded to what is stored (address 0: not wanted)
        ("exact", STRIDED),
        # address of the plan; the tasks, if they are those of a table of `ITEM`s
        *("plan_ptr", ("tasks", TABLE)),
        ("visible", VISIBLE),
        # tile functions for scores, for hiding scores where a block is mixed, and for probabilities
        # (to drop or observe them); whether hidden probabilities are to be marked at once
        *(("score_functions", FUNCTIONS), ("mask_functions", FUNCTIONS)),
        *(("prob_functions", FUNCTIONS), "skip_hidden"),
        # addresses: of the logit of each head's sink, and the params of the argument mask (0: none)
        *("sinks_ptr", "mask_ptr"),
    ),
    # kept: the share of the probabilities that dropout keeps
    ("scale", "kept"),
)
"""What a worker gets."""

PLAN = Struct(
    "ForwardPlan",
    (
        *("Hq", "group", "Nq", "Nk", "D", "Dv"),
        # keys of a block; columns of the values, completed to whole groups of NR
        *("block_kv", "padded_Dv"),
        # streams of an item, heads in one, its rows
        *("n_streams", "n_heads", "n_rows"),
        # what is computed where no table says it: streams from this one on, counted over all items,
        # of each the tiles from `first_tile` to before `end_tile`, and how they form tasks
        *("first_stream", "first_tile", "end_tile", "tiles_per_task", "tasks_per_stream"),
        # image of a worker's scratch: address, words
        *("image_ptr", "image_words"),
    ),
)
"""What follows from sizes alone."""

ITEM = Struct(
    "ForwardItem",
    # of an item in a table: its first task, its number, its tiles, how these form tasks
    ("first_task", "item", "n_tiles", "tiles_per_task", "tasks_per_stream"),
)
"""What follows from the length of an item, where lengths differ."""

WORK = Struct(
    "ForwardWork",
    (
        *SHARED,
        # scores and hidden ones of them, [block_kv][lanes]; keys and values of the block, packed;
        # a factor for each lane
        *("scores_ptr", "hidden_ptr", "keys_ptr", "values_ptr", "alpha_ptr"),
        ("k_block", KEY_BLOCK),
    ),
)
"""What the tiles of a task share: see `workspace`."""

TILE = Struct(
    "ForwardTile",
    # queries [D][lanes], accumulators [padded_Dv][lanes], running maxima and sums [lanes]
    (*OF_A_TILE, "queries_ptr", "acc_ptr", "row_max_ptr", "row_sum_ptr"),
)
"""A tile of query rows and its running state."""


@kernel("void(int64, int64)")
def forward_worker(tile):
    """Run tasks until there are none left; `slot` numbers the worker, for its scratch.

    All loops are in this one function and the steps are leaves: LLVM optimises a function again
    in each of its callers, so that every level more would cost a second of compile time.
    """
    nr, size, row, per = tile.NR, tile.itemsize, tile.lanes * tile.itemsize, tile.per_word
    tile_size, converts = TILE.size, tile.storage != tile.dtype

    def worker(slot, args):
        a = view(ARGS, args)
        scratch, error_flags = enter(a.job_ptr, slot), 0
        if scratch == 0:
            return
        plan = view(PLAN, a.plan_ptr)
        lay_out(scratch, plan.image_ptr, plan.image_words)
        w = view(WORK, scratch)
        context = context_of(tile, w, a.mask_ptr)
        block_kv, padded_Dv = plan.block_kv, plan.padded_Dv
        scores, alpha, tile_max = w.scores_ptr, w.alpha_ptr, w.tile_max_ptr
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
            # Under a causal mask the last rows see most keys: they come first, so that short
            # tasks end the list.
            if a.tasks.count:
                item = view(ITEM, find_task(a.tasks, task))
                task -= item.first_task
                b, stream = item.item, task // item.tasks_per_stream
                part = item.tasks_per_stream - 1 - (task - stream * item.tasks_per_stream)
                first_tile = part * item.tiles_per_task
                n_tiles = min(item.tiles_per_task, item.n_tiles - first_tile)
            else:
                stream = task // plan.tasks_per_stream
                part = plan.tasks_per_stream - 1 - (task - stream * plan.tasks_per_stream)
                stream += plan.first_stream
                b = stream // plan.n_streams
                stream -= b * plan.n_streams
                first_tile = plan.first_tile + part * plan.tiles_per_task
                n_tiles = min(plan.tiles_per_task, plan.end_tile - first_tile)
            first_head = stream * plan.n_heads
            k = rows_of(a.k, b, first_head // plan.group)
            v = rows_of(a.v, b, first_head // plan.group)
            kv_len = read_int64(a.visible.kv_lens_ptr + 8 * b)
            context.batch = b
            context.offset = read_int64(a.visible.q_offset_ptr + 8 * b)
            # Columns of the values are read where they lie, too, unless tiles share the copy.
            shared = n_tiles >= 4
            in_place = readable_in_place(tile, a.k, plan.D, shared)
            whole = plan.Dv // nr * nr
            if converts or shared or a.v.stride_d != size:
                whole = 0

            lo, hi = plan.Nk, 0
            for n in range(n_tiles):
                t = view(TILE, w.tiles_ptr + n * tile_size)
                assign_rows(tile, plan, t, first_head, (first_tile + n) * tile.lanes)
                if a.q.starts_ptr:  # of another item are the rows behind
                    end_rows(tile, a.visible, b, t, (first_tile + n) * tile.lanes)
                select_tile(context, t)
                find_ranges(tile, a.visible, plan.Nk, context, t)
                find_block_rows(a.visible.blocks, b, t)
                pack_transposed(tile, context, a.q, plan.D, a.scale, t.queries_ptr)
                reset_tile(tile, a, context, t, padded_Dv)
                lo, hi = min(lo, t.lo), max(hi, t.hi)

            skip_hidden, pending = a.skip_hidden != 0, n_tiles
            while pending:
                for n0 in range(lo // block_kv * block_kv, hi, block_kv):
                    if stopped(a.job_ptr):
                        break
                    begin, end = hi, lo
                    for n in range(n_tiles):
                        t = view(TILE, w.tiles_ptr + n * tile_size)
                        select_keys(a.visible.blocks, a.mask_functions.count, block_kv, t, n0)
                        if t.begin < t.end:
                            begin, end = min(begin, t.begin), max(end, t.end)
                    if begin >= end:
                        continue
                    start = begin - (begin - n0) % nr
                    fetch_keys(
                        tile, w.k_block, a.k, k, plan.D, kv_len, in_place, start, end, w.keys_ptr
                    )
                    first = begin // per
                    values, panel = w.values_ptr, (words_of(tile, end) - first) * nr * size
                    pack_values(tile, a.v, v, plan.Dv, whole, begin, end, values, panel)
                    for n in range(n_tiles):
                        t = view(TILE, w.tiles_ptr + n * tile_size)
                        t_lo, t_hi = t.begin, t.end
                        if t_lo >= t_hi:
                            continue
                        start = t_lo - (t_lo - n0) % nr
                        groups = (t_hi - start + nr - 1) // nr
                        for i in range(tile.MV):
                            store(tile_max + i * tile.W * size, splat(tile, -np.inf))
                        dot_block(
                            tile,
                            t.queries_ptr,
                            plan.D,
                            w.k_block,
                            start,
                            groups,
                            a.scale,
                            scores,
                            tile_max,
                        )

                        # Keys before t_lo are seen by no lane: leave them out from here on.
                        p, n_keys = scores + (t_lo - start) * row, t_hi - t_lo
                        hides = t_lo < t.full_lo or t_hi > t.full_hi
                        max_known = n_keys == groups * nr
                        mixed_begin, mixed = t.mixed_begin, t.mixed_end - t.mixed_begin
                        if a.score_functions.count or mixed > 0 or a.prob_functions.count:
                            select_tile(context, t)
                        if a.score_functions.count:
                            context.first_key, context.n_keys = t_lo, n_keys
                            flags = apply(a.score_functions, p, 0, address_of(context))
                            max_known = flags & TILE_MAX_KNOWN != 0
                            error_flags |= flags >> 2
                        if mixed > 0:
                            context.first_key, context.n_keys = mixed_begin, mixed
                            at = p + (mixed_begin - t_lo) * row
                            flags = apply(a.mask_functions, at, 0, address_of(context))
                            max_known = mixed == n_keys
                            error_flags |= flags >> 2 << a.score_functions.count
                        if hides:
                            hide(tile, w.bounds_ptr, t, p, t_lo, n_keys)
                            max_known = False
                        rows, n_rows = p, n_keys
                        if per == 2:
                            rows, n_rows = whole_pairs(tile, p, t_lo, n_keys)
                        if skip_hidden:
                            note_hidden(tile, rows, n_rows, w.hidden_ptr)
                        joins = not skip_hidden and a.prob_functions.count == 0
                        running_softmax(
                            tile,
                            rows,
                            n_rows,
                            max_known,
                            joins,
                            tile_max,
                            t.row_max_ptr,
                            t.row_sum_ptr,
                            alpha,
                        )
                        if skip_hidden:
                            mark_hidden(tile, rows, n_rows, w.hidden_ptr)
                        if a.prob_functions.count:
                            context.first_key, context.n_keys = t_lo, n_keys
                            context.row_max_ptr = t.row_max_ptr
                            apply(a.prob_functions, p, 0, address_of(context))
                        if per == 2 and not joins:
                            join_keys(tile, rows, n_rows, rows)

                        words = n_rows // per
                        add_values(
                            tile,
                            rows,
                            words,
                            v + t_lo * a.v.stride_n,
                            a.v.stride_n,
                            nr * size,
                            whole // nr,
                            alpha,
                            t.acc_ptr,
                            skip_hidden,
                        )
                        add_values(
                            tile,
                            rows,
                            words,
                            values + (t_lo // per - first) * nr * size,
                            nr * size,
                            panel,
                            (padded_Dv - whole) // nr,
                            alpha,
                            t.acc_ptr + whole * row,
                            skip_hidden,
                        )

                pending = 0
                if stopped(a.job_ptr):
                    break
                for n in range(n_tiles):
                    t = view(TILE, w.tiles_ptr + n * tile_size)
                    if not t.done:
                        select_tile(context, t)
                        if not finish_tile(tile, a, plan, context, t, scores, alpha, skip_hidden):
                            reset_tile(tile, a, context, t, padded_Dv)
                            pending += 1
                skip_hidden = True
        leave(a.job_ptr, slot, error_flags)

    return worker


@device
def whole_pairs(tile, scores, key, n_keys):
    """Return where the scores of whole pairs of keys begin, and how many: those beyond are hidden.

    A pair is an even key and the next, so that rounding does not depend on what a tile visits.
    """
    row, hidden = tile.lanes * tile.itemsize, splat(tile, -np.inf)
    if key % 2:
        scores -= row
        n_keys += 1
        for i in range(tile.MV):
            store(scores + i * tile.W * tile.itemsize, hidden)
    if n_keys % 2:
        for i in range(tile.MV):
            store(scores + n_keys * row + i * tile.W * tile.itemsize, hidden)
        n_keys += 1
    return scores, n_keys


@device
def reset_tile(tile, a, context, t, padded_Dv):
    """Set a tile's running state to that of no key at all, or of its sink, which has no value."""
    size, width = tile.itemsize, tile.W
    for n in range(padded_Dv * tile.MV):
        store(t.acc_ptr + n * width * size, splat(tile, 0.0))
    for i in range(tile.MV):
        store(t.row_max_ptr + i * width * size, splat(tile, -np.inf))
        store(t.row_sum_ptr + i * width * size, splat(tile, 0.0))
    if a.sinks_ptr:
        q_len = read_int64(a.visible.q_lens_ptr + 8 * context.batch)
        for lane in range(tile.lanes):
            if read_int64(t.lane_row_ptr + 8 * lane) < q_len:
                sink = read(tile, a.sinks_ptr + read_int64(t.lane_head_ptr + 8 * lane) * size)
                write(tile, t.row_max_ptr + lane * size, sink)
                if sink != -np.inf:
                    # one, or NaN for a sink that is not finite
                    write(tile, t.row_sum_ptr + lane * size, sink - sink + 1.0)


@device
def finish_tile(tile, a, plan, context, t, lse, probe, skip_hidden):
    """Divide by the sums and write a tile's rows; return False if hidden keys must be skipped.

    That is so where a result is not finite. `lse` and `probe` are room for a number for each lane.
    """
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    n_valid = t.n_valid
    for i in range(tile.MV):
        at = i * width * size
        total = load(tile, t.row_sum_ptr + at)
        divisor = np.where(total == 0.0, splat(tile, 1.0), total) * splat(tile, a.kept)
        test = splat(tile, 0.0)
        for d in range(plan.Dv):
            o = load(tile, t.acc_ptr + d * row + at) / divisor
            store(t.acc_ptr + d * row + at, o)
            test += o * 0.0
        store(probe + at, test)
        store(lse + at, load(tile, t.row_max_ptr + at) + np.log(total))
    if not skip_hidden:
        for lane in range(n_valid):
            if read(tile, probe + lane * size) != 0.0:
                return False

    rows = item_of(a.lse, context.batch)
    for lane in range(n_valid):
        write(tile, row_of(context, a.lse, rows, lane), read(tile, lse + lane * size))
    write_rows(tile, context, t.acc_ptr, plan.Dv, n_valid, a.out)
    if a.exact.ptr:
        write_rows(tile.compute, context, t.acc_ptr, plan.Dv, n_valid, a.exact)
    t.done = 1
    return True
