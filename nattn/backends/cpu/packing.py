"""Between the caller's arrays and scratch: queries, keys and values in, results out.

This is where numbers change from the type that is stored to what products take: floats of the type
that is computed in or, of bfloat16, pairs as they are (`vectors.lanes.words`).
"""

from __future__ import annotations

from ...vectors.lanes import (
    BOTH,
    Struct,
    gather_words,
    lane_of,
    load,
    load_rows,
    load_stored,
    load_word_lanes,
    load_words,
    read,
    read_int64,
    read_rows,
    read_stored,
    read_word,
    scatter_transposed,
    splat,
    store,
    store_panels,
    write,
    write_stored,
)
from .arrays import item_of
from .jit import device
from .micro import dot_keys
from .score import lane_offsets

KEY_BLOCK = Struct("KeyBlock", ("rows_ptr", "stride_n", "packed_ptr", "packed_from"))
"""Where the keys of a block lie. Row n is at ``rows_ptr + n * stride_n``, up to the first that is
packed; from `packed_from` on rows lie close together from `packed_ptr` on. Who wants keys to lie
elsewhere, or stored otherwise, changes `fetch_keys` and `dot_block`."""


@device
def words_of(tile, numbers):
    """Return how many words so many numbers take."""
    return (numbers + tile.per_word - 1) // tile.per_word


@device
def readable_in_place(tile, array, depth, shared):
    """Return whether the micro-kernel reads the rows of an array where they lie.

    Others are packed. Where tiles share the copy, it costs less than what the micro-kernel loses on
    rows far apart, which compete for the same lines of the cache. In place it reads only words.
    """
    size, stored = tile.itemsize, tile.storage_size
    if stored * tile.per_word != size or array.stride_d != stored or depth % tile.per_word:
        return False
    return not shared or abs(array.stride_n) <= 2 * depth * stored


@device
def fetch_keys(tile, block, array, rows, depth, n_rows, in_place, begin, end, packed):
    """Say where rows `begin` to `end` lie; those that are not read in place are copied to `packed`.

    The micro-kernel reads NR whole rows at a time: a last group of fewer is completed with zeros.
    """
    nr, size, width, per = tile.NR, tile.itemsize, tile.W, tile.per_word
    stored, words = tile.storage_size, words_of(tile, depth)
    stride_n, stride_d = array.stride_n, array.stride_d
    first = n_rows // nr * nr if in_place else begin
    for n in range(first, (end + nr - 1) // nr * nr):
        at, to = rows + n * stride_n, packed + (n - first) * words * size
        w = 0
        if n < n_rows and stride_d == stored:
            while (w + width) * per <= depth:
                store(to + w * size, load_words(tile, at + w * per * stored))
                w += width
        while w < words:
            if n < n_rows:
                left = depth - w * per
                x = read_word(tile, at + w * per * stride_d, stride_d, left)
                write(tile, to + w * size, x)
            else:
                write(tile, to + w * size, 0.0)
            w += 1
    block.rows_ptr, block.stride_n, block.packed_ptr, block.packed_from = (
        rows,
        stride_n,
        packed,
        first,
    )


@device
def dot_block(tile, queries, depth, block, start, groups, factor, dest, tile_max):
    """Write the scores of groups of NR keys, from key `start` on: `micro.dot_keys`."""
    nr, size, row = tile.NR, tile.itemsize, tile.lanes * tile.itemsize
    words = words_of(tile, depth)
    direct = min(groups, max(0, (block.packed_from - start) // nr))
    keys = block.rows_ptr + start * block.stride_n
    dot_keys(tile, queries, words, keys, block.stride_n, direct, factor, dest, tile_max)
    first = start + direct * nr
    keys = block.packed_ptr + (first - block.packed_from) * words * size
    dest += direct * nr * row
    dot_keys(tile, queries, words, keys, words * size, groups - direct, factor, dest, tile_max)


@device
def kept_rows(tile, n, begin, end):
    """Return which of the rows of a word, from n on, are between `begin` and `end`: a mask."""
    if tile.per_word == 1 or (begin <= n and n + 1 < end):
        return BOTH
    return 0xFFFF if begin <= n else -1 << 16


@device
def pack_values(tile, array, rows, depth, whole, begin, end, dest, panel):
    """Copy the columns from `whole` on in panels of NR columns, the last completed with zeros.

    The micro-kernel then reads each panel from its beginning to its end. Where words are of two
    rows, these are an even one and the next: what is not between `begin` and `end` is 0.
    """
    nr, size, stored, width = tile.NR, tile.itemsize, tile.storage_size, tile.W
    stride_n, stride_d, per = array.stride_n, array.stride_d, tile.per_word
    columns = (depth - whole + nr - 1) // nr * nr
    first = begin // per * per
    for n in range(first, end, per):
        keep = kept_rows(tile, n, begin, end)
        at = rows + max(n, begin) * stride_n + whole * stride_d
        below = rows + min(n + per - 1, end - 1) * stride_n + whole * stride_d
        row = dest + (n - first) // per * nr * size
        d = 0
        if stride_d == stored:
            while d + width <= depth - whole:
                to = row + d // nr * panel + d % nr * size
                x = load_rows(tile, at + d * stored, below + d * stored, keep)
                store_panels(tile, to, x, panel)
                d += width
        while d < columns:
            to = row + d // nr * panel + d % nr * size
            if d < depth - whole:
                write(tile, to, read_rows(tile, at + d * stride_d, below + d * stride_d, keep))
            else:
                write(tile, to, 0.0)
            d += 1


@device
def pack_transposed(tile, context, array, depth, scale, dest):
    """Write the rows of a tile's lanes as ``[words of depth][lanes]``.

    Floats are multiplied by the scale. Of pairs the products are, by who adds them up.
    """
    size, width, row, per = tile.itemsize, tile.W, tile.lanes * tile.itemsize, tile.per_word
    stored, words = tile.storage_size, words_of(tile, depth)
    lane_offsets(tile, context, array.stride_h, array.stride_n)
    source, stride_d = item_of(array, context.batch), array.stride_d
    factor = splat(tile, scale)
    for i in range(tile.MV):
        table = context.table_ptr + 8 * i * width
        to = dest + i * width * size
        done = 0
        if stride_d == stored:
            while (done + width) * per <= depth:
                at = source + done * per * stored
                gather_words(tile, at, table, to + done * row, row)
                done += width
        for w in range(done, words):
            at, left = source + w * per * stride_d, depth - w * per
            store(to + w * row, load_word_lanes(tile, at, table, stride_d, left))
        if per == 1:
            for d in range(depth):
                store(to + d * row, load(tile, to + d * row) * factor)


@device
def pack_rows(tile, context, array, depth, width, scale, rows, dest):
    """Write the rows of a tile's first lanes as ``[words of lanes][width]``, 0 past `depth`.

    Floats are multiplied by the scale, as in `pack_transposed`.
    """
    source, size, per = item_of(array, context.batch), tile.itemsize, tile.per_word
    stride_d, stored = array.stride_d, tile.storage_size
    factor = splat(tile, scale)
    for lane in range(0, rows, per):
        at, last = row_of(context, array, source, lane), lane + per - 1
        below = row_of(context, array, source, last)
        to = dest + lane // per * width * size
        d = 0
        if stride_d == stored:
            while d + tile.W <= depth:
                x = load_rows(tile, at + d * stored, below + d * stored, BOTH)
                if per == 1:
                    x = x * factor
                store(to + d * size, x)
                d += tile.W
        while d < width:
            if d >= depth:
                write(tile, to + d * size, 0.0)
            elif per == 1:
                write(tile, to + d * size, read_stored(tile, at + d * stride_d) * scale)
            else:
                x = read_rows(tile, at + d * stride_d, below + d * stride_d, BOTH)
                write(tile, to + d * size, x)
            d += 1


@device
def row_of(context, array, source, lane):
    """Return the address of a lane's row."""
    head, i = read_int64(context.heads_ptr + 8 * lane), read_int64(context.rows_ptr + 8 * lane)
    return source + head * array.stride_h + i * array.stride_n


@device
def finite(tile, at, count):
    """Return whether all of `count` numbers are finite."""
    total, n = splat(tile, 0.0), 0
    while n + tile.W <= count:
        total += load(tile, at + n * tile.itemsize) * 0.0
        n += tile.W
    rest = 0.0
    while n < count:
        rest += read(tile, at + n * tile.itemsize) * 0.0
        n += 1
    for lane in range(tile.W):
        rest += lane_of(tile, total, lane)
    return rest == 0.0


@device
def copy_row(tile, source, stride, depth, width, dest):
    """Copy a row as floats that are computed with, and fill it up with 0 to `width`."""
    size, stored = tile.itemsize, tile.storage_size
    d = 0
    if stride == stored:
        while d + tile.W <= depth:
            store(dest + d * size, load_stored(tile, source + d * stored))
            d += tile.W
    while d < width:
        if d < depth:
            write(tile, dest + d * size, read_stored(tile, source + d * stride))
        else:
            write(tile, dest + d * size, 0.0)
        d += 1


@device
def write_rows(tile, context, source, depth, n_valid, array):
    """Write ``[depth][lanes]`` to the rows of an array that the lanes stand for."""
    lane_offsets(tile, context, array.stride_h, array.stride_n)
    dest = item_of(array, context.batch)
    write_transposed(tile, context, source, depth, n_valid, dest, array.stride_d)


@device
def write_transposed(tile, context, source, depth, n_valid, dest, stride_d):
    """Write ``[depth][lanes]`` to rows; the context's table says where that of each lane begins.

    Numbers are rounded to what the tile's arrays store.
    """
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
                write_stored(tile, dest + read_int64(table + 8 * lane) + d * stride_d, x)
