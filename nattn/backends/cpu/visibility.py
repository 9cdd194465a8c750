"""Which keys a tile of query rows sees: by causal, window and lengths, and by a block mask.

The steps work on the record of a tile (`workspace.OF_A_TILE`), which both passes share.
"""

from __future__ import annotations

import numpy as np

from ...call.problem import Problem
from ...functions.masks import EMPTY, FULL
from ...vectors.lanes import (
    Struct,
    load_int32,
    load_old,
    read_int8,
    read_int64,
    splat,
    store,
    write_int32,
    write_int64,
)
from .jit import device

BLOCKS = Struct("BlockKinds", ("ptr", "stride_b", "stride_h", "stride_i", "block_size"))
"""Kinds of the blocks of a block mask: address (0: there is none), bytes over item, head and row of
blocks; rows and keys of a block."""

VISIBLE = Struct(
    "Visible",
    (
        # addresses of int64 (B,), and numbers (left, right: -1 is open)
        *("q_offset_ptr", "q_lens_ptr", "kv_lens_ptr", "causal", "left", "right"),
        ("blocks", BLOCKS),
    ),
)
"""What decides which keys a row sees, but for functions."""


def visible(p: Problem) -> tuple[int, ...]:
    """Return the fields of `VISIBLE`."""
    left, right = p.window
    blocks = (0, 0, 0, 0, 0)
    if p.block_mask is not None:
        kinds = p.block_mask.kinds
        b, h, i, _ = kinds.strides
        b, h = b if kinds.shape[0] > 1 else 0, h if kinds.shape[1] > 1 else 0
        blocks = (kinds.ctypes.data, b, h, i, p.block_mask.block_size)
    return (
        p.q_offset.ctypes.data,
        p.q_lens.ctypes.data,
        p.kv_lens.ctypes.data,
        p.causal,
        -1 if left is None else left,
        -1 if right is None else right,
        *blocks,
    )


@device
def assign_rows(tile, plan, t, first_head, first_row):
    """Give each lane of a tile its head and query row; lanes past the last row repeat it."""
    head, i = first_head + first_row // plan.Nq, first_row % plan.Nq
    n_valid = min(tile.lanes, plan.n_rows - first_row)
    for lane in range(tile.lanes):
        write_int64(t.lane_head_ptr + 8 * lane, head)
        write_int64(t.lane_row_ptr + 8 * lane, i)
        if lane < n_valid - 1:
            i += 1
            if i == plan.Nq:
                head, i = head + 1, 0
    t.n_valid, t.done = n_valid, 0


@device
def end_rows(tile, visible, b, t, first_row):
    """Let a tile end with the rows that exist: lanes past those repeat the last one."""
    q_len = read_int64(visible.q_lens_ptr + 8 * b)
    t.n_valid = max(0, min(t.n_valid, q_len - first_row))
    if t.n_valid:
        for lane in range(t.n_valid, tile.lanes):
            write_int64(t.lane_row_ptr + 8 * lane, first_row + t.n_valid - 1)


@device
def select_tile(context, t):
    """Point the context at the rows of a tile."""
    context.heads_ptr, context.rows_ptr = t.lane_head_ptr, t.lane_row_ptr
    context.lane_lo_ptr, context.lane_hi_ptr = t.lane_lo_ptr, t.lane_hi_ptr
    context.n_valid = t.n_valid


@device
def find_ranges(tile, visible, Nk, context, t):
    """Find the keys lo <= j < hi that each lane sees, and those that some and all lanes see."""
    offset = context.offset
    q_len = read_int64(visible.q_lens_ptr + 8 * context.batch)
    kv_len = read_int64(visible.kv_lens_ptr + 8 * context.batch)
    t.lo, t.hi, t.full_lo, t.full_hi = Nk, 0, 0, Nk
    for lane in range(tile.lanes):
        i = read_int64(t.lane_row_ptr + 8 * lane)
        position = i + offset
        lo, hi = 0, kv_len
        if visible.left >= 0:
            lo = max(lo, position - visible.left)
        if visible.right >= 0:
            hi = min(hi, position + visible.right + 1)
        if visible.causal:
            hi = min(hi, position + 1)
        if hi <= lo or i >= q_len:
            lo, hi = 0, 0
        else:
            t.lo, t.hi = min(t.lo, lo), max(t.hi, hi)
        t.full_lo, t.full_hi = max(t.full_lo, lo), min(t.full_hi, hi)
        write_int64(t.lane_lo_ptr + 8 * lane, lo)
        write_int64(t.lane_hi_ptr + 8 * lane, hi)


@device
def forget_lanes(tile, t):
    """Let the lanes past the last row see nothing: they repeat it, and must not count twice."""
    for lane in range(t.n_valid, tile.lanes):
        write_int64(t.lane_lo_ptr + 8 * lane, 0)
        write_int64(t.lane_hi_ptr + 8 * lane, 0)
        t.full_hi = 0


@device
def find_block_rows(blocks, b, t):
    """Find the rows of the block mask that a tile meets: the addresses of their kinds."""
    count, last = 0, -1
    if blocks.ptr:
        for lane in range(t.n_valid):
            head, i = read_int64(t.lane_head_ptr + 8 * lane), read_int64(t.lane_row_ptr + 8 * lane)
            at = blocks.ptr + b * blocks.stride_b + head * blocks.stride_h
            at += i // blocks.block_size * blocks.stride_i
            if at != last:
                write_int64(t.block_rows_ptr + 8 * count, at)
                count, last = count + 1, at
    t.n_block_rows = count


@device
def select_keys(blocks, has_mask_mod, block_kv, t, n0):
    """Choose the keys to visit in the block from n0 on, and those that a mask is asked about."""
    lo, hi = max(t.lo, n0), min(t.hi, n0 + block_kv)
    if t.done:
        hi = lo
    begin, end = lo, hi
    mixed_begin, mixed_end = lo, hi if has_mask_mod else lo
    if blocks.ptr and lo < hi:
        size = blocks.block_size
        begin, end, mixed_begin, mixed_end, gap = hi, lo, hi, lo, hi
        for block in range(lo // size, (hi - 1) // size + 1):
            least, most = FULL, EMPTY
            for n in range(t.n_block_rows):
                kind = read_int8(read_int64(t.block_rows_ptr + 8 * n) + block)
                least, most = min(least, kind), max(most, kind)
            first = max(lo, block * size)
            if most == EMPTY:
                gap = min(gap, first)
            else:
                # What is empty between two that are not has to be hidden.
                if begin < gap < hi:
                    mixed_begin, mixed_end = min(mixed_begin, gap), first
                gap = hi
                begin, end = min(begin, first), min(hi, (block + 1) * size)
                if least != FULL:
                    mixed_begin, mixed_end = min(mixed_begin, first), end
    t.begin, t.end = begin, end
    t.mixed_begin, t.mixed_end = mixed_begin, mixed_end


@device
def hide(tile, bounds, t, scores, n0, n_keys):
    """Set the scores of the keys from n0 on to -inf in the lanes that do not see them."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    for lane in range(tile.lanes):
        lo = read_int64(t.lane_lo_ptr + 8 * lane) - n0
        hi = read_int64(t.lane_hi_ptr + 8 * lane) - n0
        write_int32(bounds + lane * 4, np.int32(min(max(lo, 0), n_keys)))
        write_int32(bounds + (tile.lanes + lane) * 4, np.int32(min(max(hi, 0), n_keys)))
    # From clear_from to clear_to every lane sees every key.
    clear_from = min(max(t.full_lo - n0, 0), n_keys)
    clear_to = min(max(t.full_hi - n0, clear_from), n_keys)
    for i in range(tile.MV):
        lo = load_int32(tile, bounds + i * width * 4)
        hi = load_int32(tile, bounds + (tile.lanes + i * width) * 4)
        n = 0
        while n < n_keys:
            if n == clear_from:
                n = clear_to
                if n == n_keys:
                    break
            at = scores + n * row + i * width * size
            seen = (lo <= np.int32(n)) & (hi > np.int32(n))
            store(at, np.where(seen, load_old(tile, at), splat(tile, -np.inf)))
            n += 1
