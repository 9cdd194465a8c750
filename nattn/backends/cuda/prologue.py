"""What each kernel begins with: where a block and a thread stand, and which rows they read."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from .target import device, record
from .tiles import BlockTile

Place = record(
    "Place",
    (
        # the thread in its block; in the grid of products; and as the nth of those that have row m
        # of a tile of scores
        *("t", "ty", "tx", "m", "nth"),
        # the block in its launch
        *("split", "tile", "head", "item"),
    ),
)
"""Where a thread stands."""

Rows = record("Rows", ("ptr", "heads", "rows", "stride_h", "stride_n", "stride_d"))
"""Rows of an array: the n-th begins at byte ``ptr + heads[n] * stride_h + rows[n] * stride_n``.

Where ``rows[n] < 0`` there is none.
"""


@functools.cache
def prologue(tile: BlockTile) -> Any:
    """Return ``begin(n_splits, n_tiles, n_heads)``: the `Place` of a thread.

    Blocks are numbered item by item, then head by head, tile by tile and split by split.
    """
    R, TX, threads = tile.rows, tile.tx, tile.threads

    def begin(n_splits, n_tiles, n_heads):
        t = cuda.threadIdx.x & (threads - 1)
        index = cuda.blockIdx.x
        split = index % n_splits
        index = index // n_splits
        n_tile = index % n_tiles
        index = index // n_tiles
        head, item = index % n_heads, types.int64(index // n_heads)
        return Place(t, t // TX, t % TX, t % R, t // R, split, n_tile, head, item)

    return device(begin)


@device
def query_rows(a, b, heads, rows):
    """Return the rows of q."""
    return Rows(a.q_ptr + b * a.q_b, heads, rows, a.q_h, a.q_n, a.q_d)


@device
def dout_rows(a, b, heads, rows):
    """Return the rows of dout."""
    return Rows(a.dout_ptr + b * a.dout_b, heads, rows, a.dout_h, a.dout_n, a.dout_d)


@device
def key_rows(a, b, kv_head, heads, rows):
    """Return the rows of a head of k; `heads` are 0."""
    return Rows(a.k_ptr + b * a.k_b + kv_head * a.k_h, heads, rows, 0, a.k_n, a.k_d)


@device
def value_rows(a, b, kv_head, heads, rows):
    """Return the rows of a head of v; `heads` are 0."""
    return Rows(a.v_ptr + b * a.v_b + kv_head * a.v_h, heads, rows, 0, a.v_n, a.v_d)


@functools.cache
def key_numbers(tile: BlockTile) -> Any:
    """Return ``number(heads, rows, n0, end, t)``: the keys from n0 on, as many as a tile streams.

    None is there from `end` on. Threads must meet before they are read.
    """
    N, threads = tile.columns, tile.threads

    def number(heads, rows, n0, end, t):
        for n in range(t, N, threads):
            heads[n] = 0
            rows[n] = n0 + n if n0 + n < end else -1

    return device(number)
