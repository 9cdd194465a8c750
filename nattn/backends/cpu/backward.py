"""The backward kernel: gradients from the scores, computed again tile by tile from q, k and lse.

A task owns a split of the keys of one key head: it alone writes their dk and dv, so nothing is
added by two threads. It streams past all queries of the head's group, a few tiles at a time:

    S = K Q       P = exp(S - lse)       dP = V dO       dS = P * (dP - delta) * derivative
    dV += P dO    dK += dS Q             dQ += K dS

The first, the second and the last product have queries in lanes, as in the forward pass; the two
between have the head dimension in lanes, so that no matrix is transposed in memory. With the dot
product of pairs P and dS are rounded to bfloat16, and sums run over pairs: the first two over those
of the head dimension, the next two over those of lanes, the last over those of keys. The keys of an
item form at most eight splits, by their number alone; each leaves a partial dq in memory of its
own, and these are added in order.

Hidden pairs must not reach a result, even through 0 * NaN. As in the forward pass a task first runs
on the plain products; if a result is then not finite, it runs once more, with what is hidden marked
(-0.0) and kept out of them. Both make the same products in the same order: a result that does not
depend on what is hidden has the same bits.
"""

from __future__ import annotations

from ...vectors.lanes import (
    Struct,
    address_of,
    load,
    read_int64,
    splat,
    store,
    view,
)
from .arrays import STRIDED, rows_of
from .gradients import (
    add_sums,
    clear,
    copy,
    differentiate,
    differentiate_dropped,
    fill,
    keep_plain,
    load_tile,
    mark_pairs,
    reset_sums,
    write_dq,
    write_sums,
    zero,
)
from .jit import kernel
from .jobs import enter, job_record, leave, stopped, take_task
from .micro import add_rows, add_values
from .packing import (
    KEY_BLOCK,
    dot_block,
    fetch_keys,
    finite,
    pack_values,
    readable_in_place,
    words_of,
)
from .score import FUNCTIONS, apply
from .softmax import join_keys, join_lanes, note_hidden
from .tables import TABLE, find_task
from .visibility import (
    VISIBLE,
    assign_rows,
    end_rows,
    find_block_rows,
    find_ranges,
    forget_lanes,
    hide,
    select_keys,
    select_tile,
)
from .workspace import OF_A_TILE, SHARED, context_of, lay_out

ARGS = job_record(
    "BackwardArgs",
    (
        # out is of the type that is computed in
        *(("q", STRIDED), ("k", STRIDED), ("v", STRIDED), ("dout", STRIDED), ("out", STRIDED)),
        # a number for each row: lse; dlse (address 0: none); rowsum(dout * out) - dlse, which is
        # written for rows that see a key
        *(("lse", STRIDED), ("dlse", STRIDED), ("delta", STRIDED)),
        # results: whether dq is wanted, whose place the table of tasks has; dk and dv, with rows of
        # padded_D and padded_Dv columns, and room for whole groups of keys (address 0: not wanted)
        *("wants_dq", ("dk", STRIDED), ("dv", STRIDED)),
        # sums of the gradient of the scores: address and byte strides of the bias's own (stride 0
        # along a row: one for all; address 0: not wanted); whether it has one row for all queries;
        # sums over keys, and bytes from those of a split to the next
        *("dbias_ptr", "dbias_b", "dbias_h", "dbias_i", "dbias_j", "bias_columns"),
        *(("row_sum", STRIDED), "sums_part"),
        # gradients of what functions are bound to: address of those of the first task, bytes from
        # one task's to the next
        *(("learn_functions", FUNCTIONS), "learnt_ptr", "learnt_task"),
        # address of the plan; a table of `ITEM`s
        *("plan_ptr", ("tasks", TABLE)),
        ("visible", VISIBLE),
        *(("score_functions", FUNCTIONS), ("mask_functions", FUNCTIONS)),
        *(("prob_functions", FUNCTIONS), "mask_ptr"),
    ),
    ("scale", "kept"),
)
"""What a worker gets."""

PLAN = Struct(
    "BackwardPlan",
    (
        *("group", "Nq", "Nk", "D", "Dv", "block_kv"),
        # rows of a head, tiles that share one pass over the keys
        *("n_rows", "tiles_at_once"),
        # sizes completed: D to whole groups of NR; D and Dv to the other register tile
        *("dq_columns", "padded_D", "padded_Dv"),
        # of the probabilities of a tile: bytes to those of the next one
        "probs_stride",
        # image of a worker's scratch: address, words
        *("image_ptr", "image_words"),
    ),
)
"""What follows from sizes alone."""

ITEM = Struct(
    "BackwardItem",
    (
        # of an item in the table: its first task, its number, the first of the key heads that form
        # tasks, tiles of a head, splits of the keys, keys of one
        *("first_task", "item", "first_kv_head", "n_tiles", "n_splits", "split_keys"),
        # partial dq: address of that of the first head and split, bytes from one to the next
        *("dq_ptr", "dq_head", "dq_part"),
    ),
)
"""What follows from the lengths of an item."""

WORK = Struct(
    "BackwardWork",
    (
        *SHARED,
        # one after the other for all tiles: probabilities, later what dv is made of, and dp, later
        # ds; rows of q and dout, [lanes][padded]
        *("probs_ptr", "dscores_ptr", "query_rows_ptr", "dout_rows_ptr"),
        # of the tile at hand: scores before the modifiers, their derivatives, probabilities before
        # dropout, what is hidden
        *("raw_ptr", "derivs_ptr", "plain_ptr", "hidden_ptr"),
        # keys and values of the block packed by rows, and the keys by panels; a row of dout, and of
        # out; ones
        *("keys_ptr", "values_ptr", "panels_ptr", "dout_row_ptr", "out_row_ptr", "ones_ptr"),
        # if words are pairs: those of ds, of pairs of keys
        "ds_pairs_ptr",
        *(("k_block", KEY_BLOCK), ("v_block", KEY_BLOCK)),
    ),
)
"""What the tiles of a task share: see `workspace`."""

TILE = Struct(
    "BackwardTile",
    (
        *OF_A_TILE,
        # queries [D][lanes], dout [Dv][lanes], sums for dq [dq_columns][lanes]; for each lane: lse,
        # delta, sums of ds
        *("queries_ptr", "douts_ptr", "dq_acc_ptr"),
        *("lse_row_ptr", "delta_row_ptr", "sums_ptr"),
    ),
)
"""A tile of query rows, and what is summed up for it."""


@kernel("void(int64, int64)")
def backward_worker(tile, wide):
    """Run tasks until there are none left; `wide` is the register tile over the head dimension.

    Flat, as `forward_worker` is and for the same reason: to share their steps beyond the leaves
    costs each half a second of compile time, and the forward pass one percent.
    """
    nr, size, row, per = tile.NR, tile.itemsize, tile.lanes * tile.itemsize, tile.per_word
    tile_size = TILE.size

    def worker(slot, args):
        a = view(ARGS, args)
        scratch, error_flags = enter(a.job_ptr, slot), 0
        if scratch == 0:
            return
        plan = view(PLAN, a.plan_ptr)
        lay_out(scratch, plan.image_ptr, plan.image_words)
        w = view(WORK, scratch)
        context = context_of(tile, w, a.mask_ptr)
        for i in range(tile.MV):
            store(w.ones_ptr + i * tile.W * size, splat(tile, 1.0))
        block_kv, derivs = plan.block_kv, w.derivs_ptr
        sums, learns = a.dbias_ptr != 0 or a.row_sum.ptr != 0, a.learn_functions.count > 0
        wants_scores = a.wants_dq != 0 or a.dk.ptr != 0 or sums or learns
        wants_products = wants_scores or a.dv.ptr != 0
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
            item = view(ITEM, find_task(a.tasks, task))
            context.learnt_ptr = a.learnt_ptr + task * a.learnt_task
            task -= item.first_task
            b, kv_head = item.item, task // item.n_splits
            split = task - kv_head * item.n_splits
            dq = item.dq_ptr + kv_head * plan.group * item.dq_head + split * item.dq_part
            kv_head += item.first_kv_head
            k, v = rows_of(a.k, b, kv_head), rows_of(a.v, b, kv_head)
            dk, dv = rows_of(a.dk, b, kv_head), rows_of(a.dv, b, kv_head)
            q_len = read_int64(a.visible.q_lens_ptr + 8 * b)
            kv_len = read_int64(a.visible.kv_lens_ptr + 8 * b)
            split_lo = min(kv_len, split * item.split_keys)
            split_hi = min(kv_len, split_lo + item.split_keys)
            tile_groups = (item.n_tiles + plan.tiles_at_once - 1) // plan.tiles_at_once
            context.batch = b
            context.offset = read_int64(a.visible.q_offset_ptr + 8 * b)
            k_in_place = readable_in_place(tile, a.k, plan.D, True)
            v_in_place = readable_in_place(tile, a.v, plan.Dv, True)

            skip_hidden = False
            while True:
                for group in range(plan.group * tile_groups):
                    if stopped(a.job_ptr):
                        break
                    head = kv_head * plan.group + group // tile_groups
                    first_tile = group % tile_groups * plan.tiles_at_once
                    end_tile = min(first_tile + plan.tiles_at_once, item.n_tiles)
                    n_tiles, lo, hi = 0, split_hi, split_lo
                    for n in range(first_tile, end_tile):
                        # What sees nothing of this split gets no place among the tiles.
                        t = view(TILE, w.tiles_ptr + n_tiles * tile_size)
                        assign_rows(tile, plan, t, head, n * tile.lanes)
                        end_rows(tile, a.visible, b, t, n * tile.lanes)
                        select_tile(context, t)
                        find_ranges(tile, a.visible, plan.Nk, context, t)
                        t.lo, t.hi = max(t.lo, split_lo), min(t.hi, split_hi)
                        if t.lo < t.hi:
                            lo, hi = min(lo, t.lo), max(hi, t.hi)
                            forget_lanes(tile, t)
                            find_block_rows(a.visible.blocks, b, t)
                            load_tile(tile, a, plan, w, context, t, n_tiles)
                            reset_sums(tile, plan, t)
                            n_tiles += 1
                    if not wants_products:
                        hi = lo

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
                        groups = (end - start + nr - 1) // nr
                        fetch_keys(
                            tile,
                            w.k_block,
                            a.k,
                            k,
                            plan.D,
                            kv_len,
                            k_in_place,
                            start,
                            end,
                            w.keys_ptr,
                        )
                        fetch_keys(
                            tile,
                            w.v_block,
                            a.v,
                            v,
                            plan.Dv,
                            kv_len,
                            v_in_place,
                            start,
                            end,
                            w.values_ptr,
                        )
                        words = words_of(tile, end - start)
                        panel = words * nr * size
                        if a.wants_dq:
                            pack_values(tile, a.k, k, plan.D, 0, start, end, w.panels_ptr, panel)
                        for n in range(n_tiles):
                            t = view(TILE, w.tiles_ptr + n * tile_size)
                            probs = w.probs_ptr + n * plan.probs_stride
                            dscores = w.dscores_ptr + n * plan.probs_stride
                            t_lo, t_hi = t.begin, t.end
                            if t_lo >= t_hi:
                                clear(tile, probs, dscores, 0, groups * nr, skip_hidden)
                                if per == 2:
                                    join_lanes(tile, probs, groups * nr)
                                    join_lanes(tile, dscores, groups * nr)
                                continue
                            tile_max = w.tile_max_ptr
                            dot_block(
                                tile,
                                t.queries_ptr,
                                plan.D,
                                w.k_block,
                                start,
                                groups,
                                a.scale,
                                probs,
                                tile_max,
                            )
                            if wants_scores:
                                dot_block(
                                    tile,
                                    t.douts_ptr,
                                    plan.Dv,
                                    w.v_block,
                                    start,
                                    groups,
                                    1.0,
                                    dscores,
                                    tile_max,
                                )
                            p, n_keys = probs + (t_lo - start) * row, t_hi - t_lo
                            ds = dscores + (t_lo - start) * row
                            mixed_begin, mixed = t.mixed_begin, t.mixed_end - t.mixed_begin
                            select_tile(context, t)
                            if a.score_functions.count:
                                fill(tile, derivs, n_keys, 1.0)
                                context.first_key, context.n_keys = t_lo, n_keys
                                if learns:
                                    copy(tile, p, n_keys, w.raw_ptr)
                                flags = apply(a.score_functions, p, derivs, address_of(context))
                                error_flags |= flags >> 2
                            if mixed > 0:
                                context.first_key, context.n_keys = mixed_begin, mixed
                                at = p + (mixed_begin - t_lo) * row
                                flags = apply(a.mask_functions, at, 0, address_of(context))
                                error_flags |= flags >> 2 << a.score_functions.count
                            if t_lo < t.full_lo or t_hi > t.full_hi:
                                hide(tile, w.bounds_ptr, t, p, t_lo, n_keys)
                            if skip_hidden:
                                note_hidden(tile, p, n_keys, w.hidden_ptr)
                            lse, delta = t.lse_row_ptr, t.delta_row_ptr
                            if a.prob_functions.count:
                                keep_plain(tile, p, n_keys, lse, w.plain_ptr)
                                context.first_key, context.n_keys = t_lo, n_keys
                                apply(a.prob_functions, p, 0, address_of(context))
                                differentiate_dropped(
                                    tile, p, ds, n_keys, delta, w.plain_ptr, 1.0 / a.kept
                                )
                            else:
                                differentiate(tile, p, ds, n_keys, lse, delta)
                            if sums and not skip_hidden:
                                context.first_key, context.n_keys = t_lo, n_keys
                                add_sums(tile, a, context, t, ds)
                            if learns and not skip_hidden:
                                context.first_key, context.n_keys = t_lo, n_keys
                                apply(a.learn_functions, w.raw_ptr, ds, address_of(context))
                            if a.score_functions.count:
                                for m in range(n_keys * tile.MV):
                                    at = ds + m * tile.W * size
                                    slope = load(tile, derivs + m * tile.W * size)
                                    store(at, load(tile, at) * slope)
                            if skip_hidden:
                                mark_pairs(tile, p, ds, n_keys, w.hidden_ptr)
                            clear(tile, probs, dscores, 0, t_lo - start, skip_hidden)
                            clear(tile, probs, dscores, t_hi - start, groups * nr, skip_hidden)
                            by_keys = dscores
                            if per == 2:
                                by_keys = w.ds_pairs_ptr
                                join_keys(tile, dscores, groups * nr, by_keys)
                                join_lanes(tile, probs, groups * nr)
                                join_lanes(tile, dscores, groups * nr)
                            if a.wants_dq:
                                add_values(
                                    tile,
                                    by_keys,
                                    words,
                                    w.panels_ptr,
                                    nr * size,
                                    panel,
                                    plan.dq_columns // nr,
                                    w.ones_ptr,
                                    t.dq_acc_ptr,
                                    skip_hidden,
                                )
                        if a.dv.ptr:
                            add_rows(
                                tile,
                                wide,
                                w.probs_ptr,
                                plan.probs_stride,
                                w.dout_rows_ptr,
                                n_tiles,
                                groups * nr // wide.NR,
                                plan.padded_Dv,
                                1.0,
                                dv + start * plan.padded_Dv * size,
                                skip_hidden,
                            )
                        if a.dk.ptr:
                            add_rows(
                                tile,
                                wide,
                                w.dscores_ptr,
                                plan.probs_stride,
                                w.query_rows_ptr,
                                n_tiles,
                                groups * nr // wide.NR,
                                plan.padded_D,
                                a.scale,
                                dk + start * plan.padded_D * size,
                                skip_hidden,
                            )
                    for n in range(n_tiles):
                        t = view(TILE, w.tiles_ptr + n * tile_size)
                        select_tile(context, t)
                        if a.wants_dq:
                            at = dq - kv_head * plan.group * item.dq_head
                            write_dq(tile, a, plan, context, t, at, item.dq_head)
                        if sums and not skip_hidden:
                            write_sums(tile, a, context, t, split)
                if skip_hidden or stopped(a.job_ptr):
                    break
                dk_part = dk + split_lo * plan.padded_D * size
                dv_part = dv + split_lo * plan.padded_Dv * size
                n_dk = (split_hi - split_lo) * plan.padded_D if a.dk.ptr else 0
                n_dv = (split_hi - split_lo) * plan.padded_Dv if a.dv.ptr else 0
                skip_hidden = not (finite(tile, dk_part, n_dk) and finite(tile, dv_part, n_dv))
                for n in range(plan.group if a.wants_dq else 0):
                    if not finite(tile, dq + n * item.dq_head, q_len * plan.D):
                        skip_hidden = True
                if not skip_hidden:
                    break
                # Something hidden may have reached a sum, as 0 * NaN: once more, without it.
                zero(tile, dk_part, n_dk)
                zero(tile, dv_part, n_dv)
        leave(a.job_ptr, slot, error_flags)

    return worker
