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

from ...vectors.lanes import (
    Struct,
    Tile,
    address_of,
    atomic_add,
    read_int64,
    view,
    write_int64,
)
from .arrays import PAGES, STRIDED, lie_together, row_at
from .decode_steps import (
    CHUNK,
    add_chunk,
    add_lanes,
    clear_state,
    copy_chunk,
    dot_chunk,
    hide_outside,
    merge_splits,
    read_scales,
    scale_rows,
    softmax_rows,
    turn,
    turn_back,
)
from .jit import kernel
from .jobs import enter, job_record, leave, stopped, take_task
from .packing import finite, pack_rows
from .score import FUNCTIONS, apply
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
        # sizes; whether rows past those of an item are written: as those that see nothing
        *("Nq", "Nk", "pads"),
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
        *("Hkv", "group", "D", "Dv", "block_kv"),
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
    # rows, completed to NR; queries [row][padded_D]; sums for each row, one for each lane of a
    # vector; for the task at hand: addresses of the outputs [row][padded_Dv] and of the running
    # maxima
    (*OF_A_TILE, "rows", "queries_ptr", "row_sums_ptr", "acc_ptr", "row_max_ptr"),
)
"""A tile of query rows and its running state."""


@kernel("void(int64, int64)")
def decode_worker(tile, wide, cached):
    """Run tasks until there are none left.

    Parameters
    ----------
    tile : Tile
        One vector of query rows, and no pairs; of its storage are q and out.
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
                find_ranges(tile, a.visible, a.Nk, context, t)
                find_block_rows(a.visible.blocks, b, t)
                t.lo, t.hi = max(t.lo, split_lo), min(t.hi, split_hi)
                t.rows = (t.n_valid + nr - 1) // nr * nr
                if t.lo < t.hi:
                    lo, hi = min(lo, t.lo), max(hi, t.hi)
                    pack_rows(tile, context, a.q, plan.D, padded_D, a.scale, t.rows, t.queries_ptr)
                t.acc_ptr = state + n * width * padded_Dv * size
                t.row_max_ptr = state + plan.most_rows * padded_Dv * size + n * vector

            skip_hidden = False
            while True:
                for n in range(n_tiles):
                    t = view(TILE, w.tiles_ptr + n * tile_size)
                    clear_state(tile, t, padded_Dv)
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
                        rows = t.rows
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
                                False,
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
                            scale_rows(
                                tile,
                                w.scores_ptr,
                                line,
                                t.n_valid,
                                first - n0,
                                last - n0,
                                w.v_scales_ptr,
                                True,
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
                for n in range(n_tiles):
                    t = view(TILE, w.tiles_ptr + n * tile_size)
                    if not finite(tile, t.acc_ptr, t.n_valid * padded_Dv):
                        skip_hidden = True
                if not skip_hidden:
                    break

            for n in range(n_tiles):
                t = view(TILE, w.tiles_ptr + n * tile_size)
                add_lanes(tile, t, t.row_max_ptr + plan.padded_rows * size)
            done = a.done_ptr + 8 * (b * plan.Hkv + kv_head)
            if atomic_add(done, 1) == item.n_splits - 1:
                merge_splits(tile, a, plan, w, state - split * plan.state_bytes, item, kv_head)
        leave(a.job_ptr, slot, error_flags)

    return worker
