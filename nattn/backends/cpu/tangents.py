"""The forward pass and its directional derivative, in one pass over the keys.

As `forward`, of numbers that move: where q, k and v change by dq, dk and dv, out and lse change by
what is computed beside them. For a tile and a block, with S and P as there:

    dS = dQ K + Q dK                        [key][lane], one product of twice the depth
    dS = dS * d score_mod / d score         by the tile functions; 0 where hidden
    mean = mean * alpha + sum(P * dS)       what lse changes by, times row_sum
    dO   = dO * alpha + V (P * dS) + dV P

and in the end ``dout = dO / row_sum - dlse * out``. A tangent that is 0 is not passed, and what it
would be multiplied by is not computed. All products are of floats: those of pairs round P * dS.
"""

from __future__ import annotations

import numpy as np

from ...vectors.lanes import (
    Struct,
    address_of,
    load,
    load_old,
    read,
    read_int64,
    splat,
    store,
    view,
    write,
)
from .arrays import STRIDED, item_of, rows_of
from .forward import ITEM, PLAN, reset_tile
from .gradients import fill
from .jit import device, kernel
from .jobs import enter, job_record, leave, stopped, take_task
from .micro import add_values, dot_keys
from .packing import copy_row, pack_transposed, pack_values, row_of, write_rows
from .score import FUNCTIONS, TILE_MAX_KNOWN, apply
from .softmax import is_hidden, mark_hidden, note_hidden, running_softmax
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
    "TangentArgs",
    (
        *(("q", STRIDED), ("k", STRIDED), ("v", STRIDED), ("out", STRIDED), ("lse", STRIDED)),
        # the tangents (address 0: it is 0), and those of the results
        *(("dq", STRIDED), ("dk", STRIDED), ("dv", STRIDED), ("dout", STRIDED), ("dlse", STRIDED)),
        # as in `forward.ARGS`
        *("plan_ptr", ("tasks", TABLE)),
        ("visible", VISIBLE),
        *(("score_functions", FUNCTIONS), ("mask_functions", FUNCTIONS)),
        *(("prob_functions", FUNCTIONS), "sinks_ptr", "mask_ptr"),
    ),
    ("scale", "kept"),
)
"""What a worker gets."""

WORK = Struct(
    "TangentWork",
    (
        *SHARED,
        # scores, their tangents and which are hidden, [block_kv][lanes]; rows of keys and, if they
        # move, their tangents beside them; values and their tangents, in panels; a factor for each
        # lane, and one that is 1
        *("scores_ptr", "dscores_ptr", "hidden_ptr", "keys_ptr", "values_ptr", "dvalues_ptr"),
        *("alpha_ptr", "ones_ptr"),
    ),
)
"""What the tiles of a task share: see `workspace`."""

TILE = Struct(
    "TangentTile",
    # tangents of the queries, if they move, and behind them the queries, [D][lanes]; accumulators
    # of both results [padded_Dv][lanes]; running maxima, sums, and sums of P * dS [lanes]
    (*OF_A_TILE, "queries_ptr", "acc_ptr", "dacc_ptr", "row_max_ptr", "row_sum_ptr", "mean_ptr"),
)
"""A tile of query rows and its running state."""


@kernel("void(int64, int64)")
def tangent_worker(tile):
    """Run tasks until there are none left, as `forward.forward_worker` does."""
    nr, size, row, tile_size = tile.NR, tile.itemsize, tile.lanes * tile.itemsize, TILE.size

    def worker(slot, args):
        a = view(ARGS, args)
        scratch, error_flags = enter(a.job_ptr, slot), 0
        if scratch == 0:
            return
        plan = view(PLAN, a.plan_ptr)
        lay_out(scratch, plan.image_ptr, plan.image_words)
        w = view(WORK, scratch)
        context = context_of(tile, w, a.mask_ptr)
        block_kv, D, padded_Dv = plan.block_kv, plan.D, plan.padded_Dv
        scores, dscores, alpha, tile_max = w.scores_ptr, w.dscores_ptr, w.alpha_ptr, w.tile_max_ptr
        fill(tile, w.ones_ptr, 1, 1.0)
        # A row of keys is k or [k, dk], and the queries are q or [dq, q]: with both, one product.
        moves_q, moves_k, moves_v = a.dq.ptr != 0, a.dk.ptr != 0, a.dv.ptr != 0
        moves = moves_q or moves_k
        key_row = (2 * D if moves_k else D) * size
        queries_at = D * row if moves_q else 0
        depth = 2 * D if moves_q and moves_k else D
        dkeys_at = 0 if moves_q else D * size
        while True:
            task = take_task(a.job_ptr)
            if task < 0:
                break
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
                b = stream // plan.n_streams
                stream -= b * plan.n_streams
                first_tile = part * plan.tiles_per_task
                n_tiles = min(plan.tiles_per_task, plan.end_tile - first_tile)
            first_head = stream * plan.n_heads
            kv_head = first_head // plan.group
            k, v = rows_of(a.k, b, kv_head), rows_of(a.v, b, kv_head)
            dk, dv = rows_of(a.dk, b, kv_head), rows_of(a.dv, b, kv_head)
            kv_len = read_int64(a.visible.kv_lens_ptr + 8 * b)
            context.batch = b
            context.offset = read_int64(a.visible.q_offset_ptr + 8 * b)

            lo, hi = plan.Nk, 0
            for n in range(n_tiles):
                t = view(TILE, w.tiles_ptr + n * tile_size)
                assign_rows(tile, plan, t, first_head, (first_tile + n) * tile.lanes)
                if a.q.starts_ptr:  # of another item are the rows behind
                    end_rows(tile, a.visible, b, t, (first_tile + n) * tile.lanes)
                select_tile(context, t)
                find_ranges(tile, a.visible, plan.Nk, context, t)
                find_block_rows(a.visible.blocks, b, t)
                pack_transposed(tile, context, a.q, D, a.scale, t.queries_ptr + queries_at)
                if moves_q:
                    pack_transposed(tile, context, a.dq, D, a.scale, t.queries_ptr)
                reset(tile, a, context, t, padded_Dv)
                lo, hi = min(lo, t.lo), max(hi, t.hi)

            skip_hidden, pending = False, n_tiles
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
                    first = begin - (begin - n0) % nr
                    copy_keys(tile, a.k, k, D, kv_len, first, end, w.keys_ptr, key_row)
                    if moves_k:
                        to = w.keys_ptr + D * size
                        copy_keys(tile, a.dk, dk, D, kv_len, first, end, to, key_row)
                    panel = (end - begin) * nr * size
                    pack_values(tile, a.v, v, plan.Dv, 0, begin, end, w.values_ptr, panel)
                    if moves_v:
                        pack_values(tile, a.dv, dv, plan.Dv, 0, begin, end, w.dvalues_ptr, panel)
                    for n in range(n_tiles):
                        t = view(TILE, w.tiles_ptr + n * tile_size)
                        t_lo, t_hi = t.begin, t.end
                        if t_lo >= t_hi:
                            continue
                        start = t_lo - (t_lo - n0) % nr
                        groups = (t_hi - start + nr - 1) // nr
                        keys = w.keys_ptr + (start - first) * key_row
                        p, n_keys = scores + (t_lo - start) * row, t_hi - t_lo
                        ds = dscores + (t_lo - start) * row
                        if moves:
                            dot_keys(
                                tile,
                                t.queries_ptr,
                                depth,
                                keys + dkeys_at,
                                key_row,
                                groups,
                                a.scale,
                                dscores,
                                alpha,
                            )
                        else:
                            fill(tile, ds, n_keys, 0.0)
                        fill(tile, tile_max, 1, -np.inf)
                        dot_keys(
                            tile,
                            t.queries_ptr + queries_at,
                            D,
                            keys,
                            key_row,
                            groups,
                            a.scale,
                            scores,
                            tile_max,
                        )
                        hides = t_lo < t.full_lo or t_hi > t.full_hi
                        max_known = n_keys == groups * nr
                        mixed_begin, mixed = t.mixed_begin, t.mixed_end - t.mixed_begin
                        select_tile(context, t)
                        if a.score_functions.count:
                            context.first_key, context.n_keys = t_lo, n_keys
                            flags = apply(a.score_functions, p, ds, address_of(context))
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
                        if skip_hidden:
                            note_hidden(tile, p, n_keys, w.hidden_ptr)
                        if moves and (hides or mixed > 0 or a.score_functions.count):
                            stop_hidden(tile, p, n_keys, ds)
                        running_softmax(
                            tile,
                            p,
                            n_keys,
                            max_known,
                            False,
                            tile_max,
                            t.row_max_ptr,
                            t.row_sum_ptr,
                            alpha,
                        )
                        if moves:
                            weigh(tile, p, n_keys, alpha, ds, t.mean_ptr)
                        if skip_hidden:
                            mark_hidden(tile, p, n_keys, w.hidden_ptr)
                        if a.prob_functions.count:
                            context.first_key, context.n_keys = t_lo, n_keys
                            context.row_max_ptr = t.row_max_ptr
                            apply(a.prob_functions, p, 0, address_of(context))
                        if moves and (skip_hidden or a.prob_functions.count):
                            mark_like(tile, p, n_keys, ds)
                        values_at = (t_lo - begin) * nr * size
                        columns = padded_Dv // nr
                        add_values(
                            tile,
                            p,
                            n_keys,
                            w.values_ptr + values_at,
                            nr * size,
                            panel,
                            columns,
                            alpha,
                            t.acc_ptr,
                            skip_hidden,
                        )
                        if moves:
                            add_values(
                                tile,
                                ds,
                                n_keys,
                                w.values_ptr + values_at,
                                nr * size,
                                panel,
                                columns,
                                alpha,
                                t.dacc_ptr,
                                skip_hidden,
                            )
                        if moves_v:
                            add_values(
                                tile,
                                p,
                                n_keys,
                                w.dvalues_ptr + values_at,
                                nr * size,
                                panel,
                                columns,
                                w.ones_ptr if moves else alpha,
                                t.dacc_ptr,
                                skip_hidden,
                            )

                pending = 0
                if stopped(a.job_ptr):
                    break
                for n in range(n_tiles):
                    t = view(TILE, w.tiles_ptr + n * tile_size)
                    if not t.done:
                        select_tile(context, t)
                        if not finish(tile, a, plan, context, t, scores, alpha, skip_hidden):
                            reset(tile, a, context, t, padded_Dv)
                            pending += 1
                skip_hidden = True
        leave(a.job_ptr, slot, error_flags)

    return worker


@device
def copy_keys(tile, array, rows, depth, n_rows, begin, end, dest, stride):
    """Copy rows to scratch, `stride` bytes apart; a last group of less than NR ends with zeros."""
    for n in range(begin, begin + (end - begin + tile.NR - 1) // tile.NR * tile.NR):
        to = dest + (n - begin) * stride
        if n < n_rows:
            copy_row(tile, rows + n * array.stride_n, array.stride_d, depth, depth, to)
        else:
            for d in range(depth):
                write(tile, to + d * tile.itemsize, 0.0)


@device
def stop_hidden(tile, scores, n_keys, dscores):
    """Set the tangents of hidden scores to 0, whatever they were."""
    size = tile.W * tile.itemsize
    for n in range(n_keys * tile.MV):
        s, ds = load(tile, scores + n * size), load_old(tile, dscores + n * size)
        store(dscores + n * size, np.where(s == -np.inf, splat(tile, 0.0), ds))


@device
def weigh(tile, probs, n_keys, alpha, dscores, mean):
    """Multiply the tangents of scores by the probabilities, in place, and add them up."""
    size, row = tile.itemsize, tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * tile.W * size
        total = splat(tile, 0.0)
        for n in range(n_keys):
            x = load(tile, probs + n * row + at) * load(tile, dscores + n * row + at)
            total += x
            store(dscores + n * row + at, x)
        store(mean + at, load(tile, mean + at) * load(tile, alpha + at) + total)


@device
def mark_like(tile, probs, n_keys, dprobs):
    """Make -0.0 what belongs to a hidden or dropped probability, and nothing else."""
    size = tile.W * tile.itemsize
    for n in range(n_keys * tile.MV):
        p, x = load_old(tile, probs + n * size), load_old(tile, dprobs + n * size)
        plain = np.where(x == 0.0, splat(tile, 0.0), x)
        store(dprobs + n * size, np.where(is_hidden(p), splat(tile, -0.0), plain))


@device
def reset(tile, a, context, t, padded_Dv):
    """Set a tile's running state to that of no key at all, or of its sink, which does not move."""
    reset_tile(tile, a, context, t, padded_Dv)
    fill(tile, t.dacc_ptr, padded_Dv, 0.0)
    fill(tile, t.mean_ptr, 1, 0.0)


@device
def finish(tile, a, plan, context, t, lse, probe, skip_hidden):
    """Divide by the sums and write a tile's rows, as `forward.finish_tile` does."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * width * size
        total = load(tile, t.row_sum_ptr + at)
        sum_ = np.where(total == 0.0, splat(tile, 1.0), total)
        divisor = sum_ * splat(tile, a.kept)
        mean = load(tile, t.mean_ptr + at) / sum_
        store(t.mean_ptr + at, mean)
        test = splat(tile, 0.0)
        for d in range(plan.Dv):
            o = load(tile, t.acc_ptr + d * row + at) / divisor
            do = load(tile, t.dacc_ptr + d * row + at) / divisor - mean * o
            store(t.acc_ptr + d * row + at, o)
            store(t.dacc_ptr + d * row + at, do)
            test += (o + do) * 0.0
        store(probe + at, test)
        store(lse + at, load(tile, t.row_max_ptr + at) + np.log(total))
    if not skip_hidden:
        for lane in range(t.n_valid):
            if read(tile, probe + lane * size) != 0.0:
                return False

    rows, drows = item_of(a.lse, context.batch), item_of(a.dlse, context.batch)
    for lane in range(t.n_valid):
        write(tile, row_of(context, a.lse, rows, lane), read(tile, lse + lane * size))
        write(tile, row_of(context, a.dlse, drows, lane), read(tile, t.mean_ptr + lane * size))
    write_rows(tile, context, t.acc_ptr, plan.Dv, t.n_valid, a.out)
    write_rows(tile, context, t.dacc_ptr, plan.Dv, t.n_valid, a.dout)
    t.done = 1
    return True
