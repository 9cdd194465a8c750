"""Classifying the blocks of a mask: which are empty, which full, which have to be looked at.

The mask's tile function, the same one that attention runs, hides scores of 0; what is left tells
the kind of the block. A task is a row of blocks of one head, and only a tile of scores is kept.
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np
from numpy.typing import NDArray

from ...functions.binding import Tree
from ...functions.masks import EMPTY, FULL, MIXED
from ...vectors.lanes import (
    Struct,
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
from . import score, threads, tiles
from .jit import device, kernel
from .score import CONTEXT, OUTSIDE
from .threads import enter, leave, stopped, take_task

ARGS = Struct(
    "ClassifyArgs",
    (
        # address of the mask's (function, params) pair; of the kinds, contiguous (B, H, blocks of
        # rows, blocks of keys); sizes
        *("mask", "kinds", "H", "Nq", "Nk", "rows_of_blocks", "blocks", "block_size"),
        # address of int64 (B,); of the job's shared state; scratch and its bytes for each worker
        *("q_offset", "control", "scratch", "scratch_bytes"),
    ),
)
"""What a worker gets."""

VECTORS = 4
"""Vectors of rows in a tile."""

KEYS = 128
"""Keys of a tile at most: it lies in the first-level cache."""

VISIBLE, HIDDEN = 1, 2

_pack = struct.Struct(f"{len(ARGS.integers)}q").pack


def _areas(tile: Tile) -> tuple[int, int, int, int, int]:
    """Return the offsets of what lies behind the scores in scratch, and its end.

    The largest and the smallest of them, rows and heads of the lanes, the context.
    """
    lanes = VECTORS * tile.W
    top = KEYS * lanes * tile.itemsize
    rows = top + 2 * lanes * tile.itemsize
    heads = rows + 8 * lanes
    context = heads + 8 * lanes
    return top, rows, heads, context, -(-(context + tiles.CONTEXT_BYTES + 16 * lanes) // 64) * 64


@device
def look(tile, scores, count, top):
    """Return VISIBLE if there is a score of 0, HIDDEN if there is one of -inf.

    The vectors at address `top` hold the largest of each lane; they are overwritten.
    """
    size = tile.itemsize
    most, least = load(tile, top), splat(tile, 0.0)
    for v in range(1, VECTORS):
        most = np.maximum(most, load(tile, top + v * tile.W * size))
    for m in range(count * VECTORS):
        least = np.minimum(least, load(tile, scores + m * tile.W * size))
    store(top, most)
    store(top + tile.W * size, least)
    found = 0
    for lane in range(tile.W):
        if read(tile, top + lane * size) == 0.0:
            found |= VISIBLE
        if read(tile, top + (tile.W + lane) * size) != 0.0:
            found |= HIDDEN
    return found


@kernel("void(int64, int64)")
def classify_worker(tile):
    """Classify rows of blocks until there are none left."""
    top_at, rows_at, heads_at, context_at, _ = _areas(tile)
    lanes, size = VECTORS * tile.W, tile.itemsize

    def worker(slot, args):
        a = view(ARGS, args)
        scratch = a.scratch + slot * a.scratch_bytes
        context = view(CONTEXT, scratch + context_at)
        context.top, context.mask = scratch + top_at, 0
        context.rows, context.heads = scratch + rows_at, scratch + heads_at
        bounds = scratch + context_at + tiles.CONTEXT_BYTES
        context.lane_lo, context.lane_hi = bounds, bounds + 8 * lanes
        context.vectors = VECTORS
        function, params = read_int64(a.mask), read_int64(a.mask + 8)
        trouble = 0
        enter(a.control)
        while not stopped(a.control):
            task = take_task(a.control)
            if task < 0:
                break
            item = task // a.rows_of_blocks
            first_row = (task - item * a.rows_of_blocks) * a.block_size
            end_row = min(a.Nq, first_row + a.block_size)
            context.batch = item // a.H
            context.offset = read_int64(a.q_offset + 8 * context.batch)
            for block in range(a.blocks):
                if stopped(a.control):
                    break
                begin = block * a.block_size
                end = min(a.Nk, begin + a.block_size)
                found = 0
                i = first_row
                while i < end_row and found != VISIBLE | HIDDEN:
                    context.valid = min(lanes, end_row - i)
                    for lane in range(lanes):
                        write_int64(context.rows + 8 * lane, i + min(lane, context.valid - 1))
                        write_int64(context.heads + 8 * lane, item - context.batch * a.H)
                        write_int64(context.lane_lo + 8 * lane, 0)
                        write_int64(context.lane_hi + 8 * lane, a.Nk)
                    n = begin
                    while n < end and found != VISIBLE | HIDDEN:
                        count = min(KEYS, end - n)
                        for m in range(count * VECTORS):
                            store(scratch + m * tile.W * size, splat(tile, 0.0))
                        context.first_key, context.n_keys = n, count
                        where = scratch + context_at
                        said = call_tile_function(function, scratch, 0, where, params)
                        trouble |= said & OUTSIDE
                        found |= look(tile, scratch, count, context.top)
                        n += count
                    i += lanes
                kind = MIXED
                if found != VISIBLE | HIDDEN:
                    kind = FULL if found == VISIBLE else EMPTY
                write_int8(a.kinds + task * a.blocks + block, np.int8(kind))
        leave(a.control, slot, trouble)

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
    workers = 1 if pairs < 1e5 else min(threads.thread_count(), n_tasks)
    *_, size = _areas(tile)
    scratch = np.empty(workers * size + 64, np.uint8)
    control = threads.new_control(n_tasks)
    pair = np.array([mask.address, mask.params.ctypes.data], np.int64)
    args = _pack(
        *(pair.ctypes.data, kinds.ctypes.data, H, Nq, Nk, rows, columns, block_size),
        *(q_offset.ctypes.data, ctypes.addressof(control)),
        *(-(-scratch.ctypes.data // 64) * 64, size),
    )
    keep = (mask, pair, kinds, q_offset, scratch, control)
    threads.run(classify_worker(tile), args, control, workers, 20 * pairs, keep=keep)
    score.raise_for_flags(("mask_mod",), threads.troubles(control))
    return kinds
