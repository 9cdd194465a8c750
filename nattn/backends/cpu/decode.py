"""The decode kernel: few query rows and many keys, which are read once, at the speed of memory.

Where a key head has few query rows, the head dimension lies in lanes. A task is a split of the keys
of one key head, for all rows of its group of query heads; splits follow from the item's own sizes.
It goes through blocks of keys, in chunks that stay in the first-level cache:

    S = Q K^T    [row][key], W sums over lanes at a time       P = exp(S - row_max)
    O += P V     [row][column], outer products of a column of P with a row of V

and leaves a state: O, and for each row its maximum and its sum. The worker that ends the last split
of a key head merges its states in their order, so that results do not depend on who was first.

What modifies or hides scores works on tiles with a query row in each lane (`score`): for those a
block of scores is transposed, and back. Chunks that do not lie in memory as the products want them
(of 16 bits or less, of a head dimension that fills no vector, or across the end of a page) are
copied to scratch, once for all rows. Of 8-bit keys and values the scales of a row, one for each
key, are factors of the scores and of the probabilities.

Hidden keys have the probability -0.0. As in the forward kernel the first run of a split is the
plain product; if it leaves something that is not finite, a second keeps hidden values out.
"""

from __future__ import annotations

import numpy as np

from ...vectors.lanes import (
    Struct,
    Tile,
    add_dots,
    add_outer_stored,
    add_outer_unless_hidden,
    add_tile,
    address_of,
    atomic_add,
    exp2_nonpositive,
    gather_words,
    lane_of,
    load,
    load_old,
    load_stored,
    prefetch,
    read,
    read_int64,
    read_stored,
    scatter_transposed,
    splat,
    store,
    store_dots,
    store_stored,
    view,
    write,
    write_int64,
    write_stored,
    zero_dots,
    zeros,
)
from .arrays import PAGES, STRIDED, lie_together, row_at, rows_of
from .jit import device, kernel
from .jobs import enter, job_record, leave, stopped, take_task
from .packing import copy_row, row_of
from .score import FUNCTIONS, apply
from .softmax import LOG2E, is_hidden
from .tables import TABLE, find_task
from .visibility import (
    VISIBLE,
    assign_rows,
    find_block_rows,
    find_ranges,
    select_keys,
    select_tile,
)
from .workspace import OF_A_TILE, SHARED, context_of, lay_out

CHUNK = 16
"""Keys that are read together: at least as many as a vector has lanes."""

ARGS = job_record(
    "DecodeArgs",
    (
        *(("q", STRIDED), ("k", STRIDED), ("v", STRIDED), ("out", STRIDED), ("lse", STRIDED)),
        # the output before it is rounded (address 0: not wanted); scales of 8-bit keys and values
        *(("exact", STRIDED), ("k_scales", STRIDED), ("v_scales", STRIDED)),
        ("pages", PAGES),
        # the tasks of each item: a table of `ITEM`
        ("tasks", TABLE),
        # addresses: of the states of all tasks; of an int64 for each item and key head, the number
        # of splits that are done
        *("states_ptr", "done_ptr"),
        # rows past those of an item are written, too: as those that see nothing
        "pads",
        # address of the plan
        "plan_ptr",
        ("visible", VISIBLE),
        *(("score_functions", FUNCTIONS), ("mask_functions", FUNCTIONS)),
        *(("prob_functions", FUNCTIONS), "sinks_ptr", "mask_ptr"),
    ),
    ("scale", "kept"),
)
"""What a worker gets."""

ITEM = Struct("DecodeItem", ("first_task", "b", "n_splits", "split_keys"))
"""An item: its first task, which it is, the splits of its keys, keys of one."""

PLAN = Struct(
    "DecodePlan",
    (
        *("Hkv", "group", "Nq", "Nk", "D", "Dv", "block_kv"),
        # the head dimensions, completed to whole vectors and to whole register tiles; bytes from
        # one row of scores to the next
        *("padded_D", "padded_Dv", "scores_stride"),
        # most rows of a head's group, completed to NR and to whole tiles; bytes of a state
        *("most_rows", "padded_rows", "state_bytes"),
        *("image_ptr", "image_words"),
    ),
)
"""What follows from sizes alone."""

WORK = Struct(
    "DecodeWork",
    (
        *SHARED,
        # scores [row][block_kv]; the same, transposed; an int64 for each lane: where its row begins
        *("scores_ptr", "tile_ptr", "offsets_ptr"),
        # a chunk of keys and one of values; scales of a block
        *("keys_ptr", "values_ptr", "k_scales_ptr", "v_scales_ptr"),
        # a row of results
        "row_ptr",
        # rows of all heads of the group, as `assign_rows` wants to know them
        *("Nq", "n_rows"),
    ),
)
"""What the tiles of a task share: see `workspace`."""

TILE = Struct(
    "DecodeTile",
    # queries [row][padded_D]; sums for each row, one for each lane of a vector; for the task at
    # hand: addresses of the outputs [row][padded_Dv] and of the running maxima
    (*OF_A_TILE, "queries_ptr", "row_sums_ptr", "acc_ptr", "row_max_ptr"),
)
"""A tile of query rows and its running state."""


@kernel("void(int64, int64)")
def decode_worker(tile, wide, cached):
    """Run tasks until there are none left.

    Parameters
    ----------
    tile : Tile
        One vector of query rows; of its storage are q and out.
    wide : Tile
        The register tiles: dot products of its NR rows with as many keys as make a vector; outer
        products of NR rows with MV vectors of columns.
    cached : Tile
        Of its storage are k and v.
    """
    size, width, nr = tile.itemsize, tile.W, wide.NR
    tile_size, vector = TILE.size, tile.W * tile.itemsize
    converts = cached.storage != tile.dtype
    scaled = cached.storage == "int8"
    stored = cached.storage_size
    plain, scales = tile.compute, Tile(tile.dtype, width, 1, 1, "float32")

    def worker(slot, args):
        a = view(ARGS, args)
        scratch, error_flags = enter(a.job_ptr, slot), 0
        if scratch == 0:
            return
        plan = view(PLAN, a.plan_ptr)
        lay_out(scratch, plan.image_ptr, plan.image_words)
        w = view(WORK, scratch)
        context = context_of(tile, w, a.mask_ptr)
        block_kv, line = plan.block_kv, plan.scores_stride
        padded_D, padded_Dv = plan.padded_D, plan.padded_Dv
        k_in_place = a.k.stride_d == stored and padded_D == plan.D
        v_in_place = a.v.stride_d == stored and padded_Dv == plan.Dv
        for lane in range(width):
            write_int64(w.offsets_ptr + 8 * lane, lane * line)
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
            item = view(ITEM, find_task(a.tasks, task))
            local = task - item.first_task
            kv_head = local // item.n_splits
            split = local - kv_head * item.n_splits
            b = item.b
            q_len = read_int64(a.visible.q_lens_ptr + 8 * b)
            kv_len = read_int64(a.visible.kv_lens_ptr + 8 * b)
            split_lo = min(kv_len, split * item.split_keys)
            split_hi = min(kv_len, split_lo + item.split_keys)
            w.Nq, w.n_rows = q_len, q_len * plan.group
            n_tiles = (w.n_rows + width - 1) // width
            context.batch = b
            context.offset = read_int64(a.visible.q_offset_ptr + 8 * b)
            state = a.states_ptr + task * plan.state_bytes

            lo, hi = split_hi, split_lo
            for n in range(n_tiles):
                t = view(TILE, w.tiles_ptr + n * tile_size)
                assign_rows(tile, w, t, kv_head * plan.group, n * width)
                select_tile(context, t)
                find_ranges(tile, a.visible, plan.Nk, context, t)
                find_block_rows(a.visible.blocks, b, t)
                t.lo, t.hi = max(t.lo, split_lo), min(t.hi, split_hi)
                if t.lo < t.hi:
                    lo, hi = min(lo, t.lo), max(hi, t.hi)
                    rows = (t.n_valid + nr - 1) // nr * nr
                    pack_queries(tile, context, a.q, plan.D, padded_D, a.scale, rows, t)
                t.acc_ptr = state + n * width * padded_Dv * size
                t.row_max_ptr = state + plan.most_rows * padded_Dv * size + n * vector

            skip_hidden = False
            while True:
                for n in range(n_tiles):
                    t = view(TILE, w.tiles_ptr + n * tile_size)
                    clear_state(tile, t, (t.n_valid + nr - 1) // nr * nr, padded_Dv)
                for n0 in range(lo // block_kv * block_kv, hi, block_kv):
                    if stopped(a.job_ptr):
                        break
                    if scaled:
                        n1 = min(n0 + block_kv, split_hi)
                        read_scales(
                            scales,
                            a.pages,
                            a.k_scales,
                            b,
                            kv_head,
                            n0,
                            n1,
                            w.k_scales_ptr,
                        )
                        read_scales(
                            scales,
                            a.pages,
                            a.v_scales,
                            b,
                            kv_head,
                            n0,
                            n1,
                            w.v_scales_ptr,
                        )
                    for n in range(n_tiles):
                        t = view(TILE, w.tiles_ptr + n * tile_size)
                        select_keys(a.visible.blocks, a.mask_functions.count, block_kv, t, n0)
                        begin, end = t.begin, t.end
                        if begin >= end:
                            continue
                        rows = (t.n_valid + nr - 1) // nr * nr
                        # For many rows a chunk is converted once.
                        direct = not converts or rows <= 2 * nr
                        for c in range(begin // CHUNK * CHUNK, end, CHUNK):
                            k_end = min(c + CHUNK, split_hi)
                            together = lie_together(a.pages, c, c + CHUNK)
                            at, ahead = row_at(a.pages, a.k, b, kv_head, c), 0
                            if n == 0 and c + CHUNK < split_hi:
                                ahead = row_at(a.pages, a.k, b, kv_head, c + CHUNK) - at
                            to = w.scores_ptr + (c - n0) * size
                            if k_in_place and direct and together and k_end == c + CHUNK:
                                dot_chunk(
                                    wide,
                                    cached,
                                    t.queries_ptr,
                                    padded_D,
                                    rows,
                                    at,
                                    a.k.stride_n,
                                    to,
                                    line,
                                    ahead,
                                )
                            else:
                                copy_chunk(
                                    cached,
                                    a.pages,
                                    a.k,
                                    b,
                                    kv_head,
                                    c,
                                    k_end,
                                    plan.D,
                                    padded_D,
                                    w.keys_ptr,
                                    ahead,
                                )
                                dot_chunk(
                                    wide,
                                    plain,
                                    t.queries_ptr,
                                    padded_D,
                                    rows,
                                    w.keys_ptr,
                                    padded_D * size,
                                    to,
                                    line,
                                    0,
                                )

                        first = begin // width * width
                        last = (end + width - 1) // width * width
                        if scaled:
                            scale_rows(
                                tile,
                                w.scores_ptr,
                                line,
                                t.n_valid,
                                first - n0,
                                last - n0,
                                w.k_scales_ptr,
                            )
                        mixed_begin, mixed = t.mixed_begin, t.mixed_end - t.mixed_begin
                        if a.score_functions.count or mixed > 0 or a.prob_functions.count:
                            select_tile(context, t)
                        if a.score_functions.count or mixed > 0:
                            turn(tile, w, first - n0, last - n0)
                            if a.score_functions.count:
                                context.first_key, context.n_keys = begin, end - begin
                                at = w.tile_ptr + (begin - n0) * vector
                                flags = apply(a.score_functions, at, 0, address_of(context))
                                error_flags |= flags >> 2
                            if mixed > 0:
                                context.first_key, context.n_keys = mixed_begin, mixed
                                at = w.tile_ptr + (mixed_begin - n0) * vector
                                flags = apply(a.mask_functions, at, 0, address_of(context))
                                error_flags |= flags >> 2 << a.score_functions.count
                            turn_back(tile, w, t.n_valid, first - n0, last - n0)
                        hide_outside(tile, w, t, n0, first, last)
                        softmax_rows(tile, w, t, padded_Dv, first - n0, last - n0)
                        if a.prob_functions.count:
                            turn(tile, w, first - n0, last - n0)
                            context.first_key, context.n_keys = begin, end - begin
                            at = w.tile_ptr + (begin - n0) * vector
                            apply(a.prob_functions, at, 0, address_of(context))
                            turn_back(tile, w, t.n_valid, first - n0, last - n0)
                        if scaled:
                            scale_visible(
                                tile,
                                w.scores_ptr,
                                line,
                                t.n_valid,
                                first - n0,
                                last - n0,
                                w.v_scales_ptr,
                            )

                        for c in range(begin // CHUNK * CHUNK, end, CHUNK):
                            v_end = min(c + CHUNK, split_hi)
                            at, ahead = row_at(a.pages, a.v, b, kv_head, c), 0
                            if n == 0 and c + CHUNK < split_hi:
                                ahead = row_at(a.pages, a.v, b, kv_head, c + CHUNK) - at
                            next_v = a.v.stride_n
                            together = lie_together(a.pages, c, v_end)
                            p_begin, p_end = max(begin, c), min(end, v_end)
                            p = w.scores_ptr + (p_begin - n0) * size
                            if (
                                v_in_place
                                and direct
                                and together
                                and not (converts and skip_hidden)
                            ):
                                at += (p_begin - c) * next_v
                                add_chunk(
                                    wide,
                                    cached,
                                    p,
                                    line,
                                    rows,
                                    at,
                                    next_v,
                                    p_end - p_begin,
                                    padded_Dv,
                                    t.acc_ptr,
                                    skip_hidden,
                                    ahead,
                                )
                            else:
                                copy_chunk(
                                    cached,
                                    a.pages,
                                    a.v,
                                    b,
                                    kv_head,
                                    c,
                                    v_end,
                                    plan.Dv,
                                    padded_Dv,
                                    w.values_ptr,
                                    ahead,
                                )
                                at = w.values_ptr + (p_begin - c) * padded_Dv * size
                                add_chunk(
                                    wide,
                                    plain,
                                    p,
                                    line,
                                    rows,
                                    at,
                                    padded_Dv * size,
                                    p_end - p_begin,
                                    padded_Dv,
                                    t.acc_ptr,
                                    skip_hidden,
                                    0,
                                )
                if skip_hidden or stopped(a.job_ptr):
                    break
                skip_hidden = True
                for n in range(n_tiles):
                    t = view(TILE, w.tiles_ptr + n * tile_size)
                    if not finite_rows(tile, t.acc_ptr, t.n_valid * padded_Dv):
                        skip_hidden = False
                if skip_hidden:
                    break
                skip_hidden = True

            for n in range(n_tiles):
                t = view(TILE, w.tiles_ptr + n * tile_size)
                add_lanes(tile, t, t.row_max_ptr + plan.padded_rows * size)
            done = a.done_ptr + 8 * (b * plan.Hkv + kv_head)
            if atomic_add(done, 1) == item.n_splits - 1:
                merge_splits(tile, a, plan, w, state - split * plan.state_bytes, item, kv_head)
        leave(a.job_ptr, slot, error_flags)

    return worker


@device
def pack_queries(tile, context, array, depth, width, scale, rows, t):
    """Copy rows of a tile, times the scale, completed with 0; past the last row it repeats."""
    size, source = tile.itemsize, rows_of(array, context.batch, 0)
    factor = splat(tile, scale)
    for lane in range(rows):
        to = t.queries_ptr + lane * width * size
        at = row_of(context, array, source, lane)
        copy_row(tile, at, array.stride_d, depth, width, to)
        for d in range(0, width, tile.W):
            store(to + d * size, load(tile, to + d * size) * factor)


@device
def clear_state(tile, t, rows, padded_Dv):
    """Set a tile's running state to that of no key at all."""
    size, width = tile.itemsize, tile.W
    for n in range(0, rows * padded_Dv, width):
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
        prefetch(row + line)


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
def scale_rows(tile, scores, line, rows, begin, end, factors):
    """Multiply the scores of each key by its factor."""
    size = tile.itemsize
    for n in range(begin, end, tile.W):
        factor = load(tile, factors + n * size)
        for r in range(rows):
            at = scores + r * line + n * size
            store(at, load(tile, at) * factor)


@device
def scale_visible(tile, probs, line, rows, begin, end, factors):
    """Multiply probabilities by factors; that of a hidden key stays as it is."""
    size = tile.itemsize
    for n in range(begin, end, tile.W):
        factor = load(tile, factors + n * size)
        for r in range(rows):
            at = probs + r * line + n * size
            p = load_old(tile, at)
            store(at, np.where(is_hidden(p), p, p * factor))


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
def finite_rows(tile, at, count):
    """Return whether all of the numbers, whole vectors of them, are finite."""
    test = splat(tile, 0.0)
    for n in range(0, count, tile.W):
        test += load(tile, at + n * tile.itemsize) * 0.0
    total = 0.0
    for lane in range(tile.W):
        total += lane_of(tile, test, lane)
    return total == 0.0


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
            for i in range(w.Nq, plan.Nq):
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
