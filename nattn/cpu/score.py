"""Tile functions: what happens to a tile of scores between the two products.

After the first product a tile of scores lies in L1. What a call adds to the scores or hides is
one compiled function over that tile, called by address, so that the kernel is compiled once
whatever is passed, and a call composes any list of them:

    flags = function(scores, deriv, context, params)

All four are addresses. `scores` is the tile, ``[n_keys][lanes]``, changed in place; -inf hides a
key. `deriv` is 0, or a tile that is multiplied by the derivative. `context` holds the integers
named below; `params` what was bound: addresses and strides. A tile function cannot raise: the
flags say what went wrong, and 0 that nothing did.

A boolean mask is a bias of 0 and -inf, so mask and bias are one function, for each type in which
they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..lanes import (
    Struct,
    Tile,
    call_tile_function,
    gather_transposed,
    load,
    load_lanes,
    load_splat,
    read_int64,
    splat,
    store,
    view,
    write_int64,
)
from .jit import device, kernel

SIGNATURE = "int64(int64, int64, int64, int64)"

CONTEXT = Struct(
    "Context",
    (
        # the batch item; addresses of an int64 for each lane: its head and its query row (lanes
        # from `valid` on repeat the last row: nothing may be read for them beyond that)
        *("batch", "heads", "rows", "valid"),
        # the keys of the tile
        *("first_key", "n_keys"),
        # scratch: addresses of an int64 for each lane, and of W x W floats
        *("table", "temp"),
    ),
)
"""Which scores a tile holds."""


@device
def apply(functions, count, scores, deriv, context):
    """Run the list of (function, params) pairs at address `functions` over a tile."""
    flags = 0
    for n in range(count):
        function, params = read_int64(functions + 16 * n), read_int64(functions + 16 * n + 8)
        flags |= call_tile_function(function, scores, deriv, context, params)
    return flags


@device
def lane_offsets(tile, context, stride_h, stride_i):
    """Write each lane's byte offset in an array over (head, row); return whether all are equal."""
    equal = True
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads + 8 * lane), read_int64(context.rows + 8 * lane)
        offset = head * stride_h + i * stride_i
        write_int64(context.table + 8 * lane, offset)
        equal &= offset == read_int64(context.table)
    return equal


@device
def add_or_hide(tile, at, x):
    """Add x to the scores at an address; -inf on either side hides the key, whatever the other."""
    s = load(tile, at)
    store(at, np.where((s == -np.inf) | (x == -np.inf), splat(tile, -np.inf), s + x))


OPERAND = Struct("Operand", ("address", "stride_b", "stride_h", "stride_i", "stride_j"))
"""Params of an array broadcast to (B, Hq, Nq, Nk): its address and byte strides."""


@kernel(SIGNATURE)
def add_operand(tile, storage, itemsize):
    """Add an array broadcast to (B, Hq, Nq, Nk), whatever its strides."""
    width, vectors, size, row = tile.W, tile.MV, tile.itemsize, tile.lanes * tile.itemsize

    def function(scores, deriv, context, params):
        c = view(CONTEXT, context)
        p = view(OPERAND, params)
        base = p.address + c.batch * p.stride_b + c.first_key * p.stride_j
        if lane_offsets(tile, c, p.stride_h, p.stride_i):
            base += read_int64(c.table)
            for n in range(c.n_keys):
                x = load_splat(tile, storage, base + n * p.stride_j)
                for i in range(vectors):
                    add_or_hide(tile, scores + n * row + i * width * size, x)
            return 0
        for i in range(vectors):
            column = scores + i * width * size
            lanes = c.table + 8 * i * width
            done = 0
            if p.stride_j == itemsize:
                while done + width <= c.n_keys:
                    at = base + done * p.stride_j
                    gather_transposed(tile, storage, at, lanes, c.temp, width * size)
                    for n in range(width):
                        x = load(tile, c.temp + n * width * size)
                        add_or_hide(tile, column + (done + n) * row, x)
                    done += width
            for n in range(done, c.n_keys):
                x = load_lanes(tile, storage, base + n * p.stride_j, lanes)
                add_or_hide(tile, column + n * row, x)
        return 0

    return function


def operand_function(tile: Tile, operand: NDArray[Any]) -> tuple[int, NDArray[np.int64]]:
    """Return the tile function and the params that add a broadcast view to the scores."""
    dtype = operand.dtype
    address = add_operand(tile, dtype.name, dtype.itemsize)
    return address, np.array([operand.ctypes.data, *operand.strides], np.int64)
