"""Between the caller's arrays and scratch: queries, keys and values in, results out.

This is where numbers change from the type that is stored to the type that is computed in.
"""

from __future__ import annotations

from ...vectors.lanes import (
    Struct,
    gather_transposed,
    load,
    load_lanes,
    read,
    read_int64,
    scatter_transposed,
    splat,
    store,
    store_panels,
    write,
)
from .jit import device
from .micro import dot_keys
from .score import lane_offsets

KEY_BLOCK = Struct("KeyBlock", ("rows_ptr", "stride_n", "packed_ptr", "packed_from"))
"""Where the keys of a block lie. Row n is at ``rows_ptr + n * stride_n``, up to the first that is
packed; from `packed_from` on rows lie close together from `packed_ptr` on. Who wants keys to lie
elsewhere, or stored otherwise, changes `fetch_keys` and `dot_block`."""


@device
def readable_in_place(tile, array, depth, shared):
    """Return whether the micro-kernel reads the rows of an array where they lie.

    Others are packed. Where tiles share the copy, it costs less than what the micro-kernel loses on
    rows far apart, which compete for the same lines of the cache. In place it reads only the type
    that it computes in.
    """
    size = tile.itemsize
    if array.stride_d != size or tile.storage_size != size:
        return False
    return not shared or abs(array.stride_n) <= 2 * depth * size


@device
def fetch_keys(tile, block, array, rows, depth, n_rows, in_place, begin, end, packed):
    """Say where rows `begin` to `end` lie; those that are not read in place are copied to `packed`.

    The micro-kernel reads NR whole rows at a time: a last group of fewer is completed with zeros.
    """
    nr, size, stored, width = tile.NR, tile.itemsize, tile.storage_size, tile.W
    stride_n, stride_d = array.stride_n, array.stride_d
    first = n_rows // nr * nr if in_place else begin
    for n in range(first, (end + nr - 1) // nr * nr):
        at, to = rows + n * stride_n, packed + (n - first) * depth * size
        d = 0
        if n < n_rows and stride_d == stored:
            while d + width <= depth:
                store(to + d * size, load(tile, at + d * stored))
                d += width
        while d < depth:
            write(tile, to + d * size, read(tile, at + d * stride_d) if n < n_rows else 0.0)
            d += 1
    block.rows_ptr, block.stride_n, block.packed_ptr, block.packed_from = (
        rows,
        stride_n,
        packed,
        first,
    )


@device
def dot_block(tile, queries, depth, block, start, groups, dest, tile_max):
    """Write the scores of groups of NR keys, from key `start` on: `micro.dot_keys`."""
    nr, size, row = tile.NR, tile.itemsize, tile.lanes * tile.itemsize
    direct = min(groups, max(0, (block.packed_from - start) // nr))
    keys = block.rows_ptr + start * block.stride_n
    dot_keys(tile, queries, depth, keys, block.stride_n, direct, dest, tile_max)
    first = start + direct * nr
    keys = block.packed_ptr + (first - block.packed_from) * depth * size
    dest += direct * nr * row
    dot_keys(tile, queries, depth, keys, depth * size, groups - direct, dest, tile_max)


@device
def pack_values(tile, array, rows, depth, whole, begin, end, dest, panel):
    """Copy the columns from `whole` on in panels of NR columns, the last completed with zeros.

    The micro-kernel then reads each panel from its beginning to its end.
    """
    nr, size, stored, width = tile.NR, tile.itemsize, tile.storage_size, tile.W
    stride_n, stride_d = array.stride_n, array.stride_d
    columns = (depth - whole + nr - 1) // nr * nr
    for n in range(begin, end):
        at = rows + n * stride_n + whole * stride_d
        row = dest + (n - begin) * nr * size
        d = 0
        if stride_d == stored:
            while d + width <= depth - whole:
                to = row + d // nr * panel + d % nr * size
                store_panels(tile, to, load(tile, at + d * stored), panel)
                d += width
        while d < columns:
            x = read(tile, at + d * stride_d) if d < depth - whole else 0.0
            write(tile, row + d // nr * panel + d % nr * size, x)
            d += 1


@device
def pack_transposed(tile, context, array, depth, scale, dest):
    """Write the rows of a tile's lanes, times a scale, as ``[depth][lanes]``."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    stored = tile.storage_size
    lane_offsets(tile, context, array.stride_h, array.stride_n)
    source, stride_d = array.ptr + context.batch * array.stride_b, array.stride_d
    factor = splat(tile, scale)
    for i in range(tile.MV):
        table = context.table_ptr + 8 * i * width
        to = dest + i * width * size
        done = 0
        if stride_d == stored:
            while done + width <= depth:
                gather_transposed(tile, tile, source + done * stored, table, to + done * row, row)
                done += width
        for d in range(done, depth):
            store(to + d * row, load_lanes(tile, tile, source + d * stride_d, table))
        for d in range(depth):
            store(to + d * row, load(tile, to + d * row) * factor)


@device
def pack_rows(tile, context, array, depth, width, scale, dest):
    """Write the rows of a tile's lanes, times a scale, as ``[lanes][width]``, 0 past `depth`."""
    source = array.ptr + context.batch * array.stride_b
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads_ptr + 8 * lane), read_int64(context.rows_ptr + 8 * lane)
        at = source + head * array.stride_h + i * array.stride_n
        to = dest + lane * width * tile.itemsize
        copy_row(tile, at, array.stride_d, depth, width, scale, to)


@device
def copy_row(tile, source, stride, depth, width, scale, dest):
    """Copy a row, times a scale, and fill it up with 0 to `width`."""
    size, stored = tile.itemsize, tile.storage_size
    factor = splat(tile, scale)
    d = 0
    if stride == stored:
        while d + tile.W <= depth:
            store(dest + d * size, load(tile, source + d * stored) * factor)
            d += tile.W
    while d < width:
        write(tile, dest + d * size, read(tile, source + d * stride) * scale if d < depth else 0.0)
        d += 1


@device
def write_transposed(tile, context, source, depth, n_valid, dest, stride_d):
    """Write ``[depth][lanes]`` to rows; the context's table says where that of each lane begins."""
    size, width, row = tile.itemsize, tile.W, tile.lanes * tile.itemsize
    stored = tile.storage_size
    for i in range(tile.MV):
        count = min(n_valid - i * width, width)
        vectors, table = source + i * width * size, context.table_ptr + 8 * i * width
        done = 0
        if stride_d == stored:
            while done + width <= depth:
                to = dest + done * stored
                scatter_transposed(tile, vectors + done * row, row, to, table, count)
                done += width
        for d in range(done, depth):
            for lane in range(count):
                x = read(tile, vectors + d * row + lane * size)
                write(tile, dest + read_int64(table + 8 * lane) + d * stride_d, x)
