"""Classifying the blocks of a mask: which are empty, which full, which have to be looked at.

The mask's tile function, the same one that attention runs, hides scores of 0; what is left tells
the kind of the block. A task is a row of blocks of one head, and only a tile of scores is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...functions.binding import Tree
from ...functions.masks import EMPTY, FULL, MIXED
from ...vectors.lanes import (
    Tile,
    call_tile_function,
    load,
    read,
    read_int64,
    splat,
    store,
    view,
    write_int8,
    write_int64,
)
from . import score, tiles
from .jit import device, kernel
from .jobs import enter, job_record, leave, run_job, stopped, take_task, thread_count
from .score import CONTEXT, OUT_OF_RANGE

ARGS = job_record(
    "ClassifyArgs",
    (
        # the mask's tile function, and what it is bound to
        *("function", "params_ptr"),
        # address of the kinds, contiguous (B, H, blocks of rows, blocks of keys); sizes
        *("kinds_ptr", "H", "Nq", "Nk", "rows_of_blocks", "blocks", "block_size"),
        # address of int64 (B,)
        "q_offset_ptr",
    ),
)
"""What a worker gets."""

VECTORS = 4
"""Vectors of rows in a tile."""

KEYS = 128
"""Keys of a tile at most: it lies in the first-level cache."""

VISIBLE, HIDDEN = 1, 2


def _areas(tile: Tile) -> tuple[int, int, int, int, int]:
    """Return the offsets of what lies behind the scores in scratch, and its end.

    The largest and the smallest of them, rows and heads of the lanes, the context.
    """
    lanes = VECTORS * tile.W
    tile_max = KEYS * lanes * tile.itemsize
    rows = tile_max + 2 * lanes * tile.itemsize
    heads = rows + 8 * lanes
    context = heads + 8 * lanes
    return tile_max, rows, heads, context, -(-(context + CONTEXT.size + 16 * lanes) // 64) * 64


@device
def look(tile, scores, count, tile_max):
    """Return VISIBLE if there is a score of 0, HIDDEN if there is one of -inf.

    The vectors at address `tile_max` hold the largest of each lane; they are overwritten.
    """
    size = tile.itemsize
    most, least = load(tile, tile_max), splat(tile, 0.0)
    for v in range(1, VECTORS):
        most = np.maximum(most, load(tile, tile_max + v * tile.W * size))
    for m in range(count * VECTORS):
        least = np.minimum(least, load(tile, scores + m * tile.W * size))
    store(tile_max, most)
    store(tile_max + tile.W * size, least)
    found = 0
    for lane in range(tile.W):
        if read(tile, tile_max + lane * size) == 0.0:
            found |= VISIBLE
        if read(tile, tile_max + (tile.W + lane) * size) != 0.0:
            found |= HIDDEN
    return found


@kernel("void(int64, int64)")
def classify_worker(tile):
    """Classify rows of blocks until there are none left."""
    max_at, rows_at, heads_at, context_at, _ = _areas(tile)
    lanes, size, context_size = VECTORS * tile.W, tile.itemsize, CONTEXT.size

    def worker(slot, args):
        a = view(ARGS, args)
        scratch, error_flags = enter(a.job_ptr, slot), 0
        if scratch == 0:
            return
        context = view(CONTEXT, scratch + context_at)
        context.tile_max_ptr, context.mask_ptr = scratch + max_at, 0
        context.rows_ptr, context.heads_ptr = scratch + rows_at, scratch + heads_at
        bounds = scratch + context_at + context_size
        context.lane_lo_ptr, context.lane_hi_ptr = bounds, bounds + 8 * lanes
        context.vectors = VECTORS
        while not stopped(a.job_ptr):
            task = take_task(a.job_ptr)
            if task < 0:
                break
            item = task // a.rows_of_blocks
            first_row = (task - item * a.rows_of_blocks) * a.block_size
            end_row = min(a.Nq, first_row + a.block_size)
            context.batch = item // a.H
            context.offset = read_int64(a.q_offset_ptr + 8 * context.batch)
            for block in range(a.blocks):
                if stopped(a.job_ptr):
                    break
                begin = block * a.block_size
                end = min(a.Nk, begin + a.block_size)
                found = 0
                i = first_row
                while i < end_row and found != VISIBLE | HIDDEN:
                    context.n_valid = min(lanes, end_row - i)
                    for lane in range(lanes):
                        write_int64(context.rows_ptr + 8 * lane, i + min(lane, context.n_valid - 1))
                        write_int64(context.heads_ptr + 8 * lane, item - context.batch * a.H)
                        write_int64(context.lane_lo_ptr + 8 * lane, 0)
                        write_int64(context.lane_hi_ptr + 8 * lane, a.Nk)
                    n = begin
                    while n < end and found != VISIBLE | HIDDEN:
                        count = min(KEYS, end - n)
                        for m in range(count * VECTORS):
                            store(scratch + m * tile.W * size, splat(tile, 0.0))
                        context.first_key, context.n_keys = n, count
                        where = scratch + context_at
                        flags = call_tile_function(a.function, scratch, 0, where, a.params_ptr)
                        error_flags |= flags & OUT_OF_RANGE
                        found |= look(tile, scratch, count, context.tile_max_ptr)
                        n += count
                    i += lanes
                kind = MIXED
                if found != VISIBLE | HIDDEN:
                    kind = FULL if found == VISIBLE else EMPTY
                write_int8(a.kinds_ptr + task * a.blocks + block, np.int8(kind))
        leave(a.job_ptr, slot, error_flags)

    return worker


def classify(
    mask_mod: Tree,
    B: int,
    H: int,
    Nq: int,
    Nk: int,
    q_offset: NDArray[np.int64],
    block_size: int,
) -> NDArray[np.uint8]:
    """Return the kinds of a mask's blocks, in parallel.

    Parameters
    ----------
    mask_mod : Bound or Combination
        The mask.
    B, H, Nq, Nk : int
        Sizes.
    q_offset : ndarray
        ``(B,)`` int64.
    block_size : int
        Rows and keys of a block.

    Returns
    -------
    ndarray
        ``(B, H, ceil(Nq / block_size), ceil(Nk / block_size))`` uint8.
    """
    rows, columns = -(-Nq // block_size), -(-Nk // block_size)
    kinds = np.zeros((B, H, rows, columns), np.uint8)
    if kinds.size == 0:
        return kinds
    tile = tiles.choose_tile("float32", 1 << 20)
    far = int(np.abs(q_offset).max()) + max(Nq, Nk)
    mask = score.user_function("mask_mod", mask_mod, tile, far, False)
    tile = Tile(tile.dtype, tile.W, 1, 1)
    n_tasks = B * H * rows
    pairs = float(B * H) * Nq * Nk
    *_, scratch_bytes = _areas(tile)
    fields = {
        "function": mask.address,
        "params_ptr": mask.params.ctypes.data,
        "kinds_ptr": kinds.ctypes.data,
        "H": H,
        "Nq": Nq,
        "Nk": Nk,
        "rows_of_blocks": rows,
        "blocks": columns,
        "block_size": block_size,
        "q_offset_ptr": q_offset.ctypes.data,
    }
    error_flags = run_job(
        classify_worker(tile),
        ARGS,
        fields,
        n_tasks=n_tasks,
        n_threads=1 if pairs < 1e5 else thread_count(),
        scratch_bytes=scratch_bytes,
        flops=20 * pairs,
        keepalive=(mask, kinds, q_offset),
    )
    score.raise_for_flags(("mask_mod",), error_flags)
    return kinds
