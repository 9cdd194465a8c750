"""The micro-kernel: both products of attention are sums of outer products in registers.

A product fills a tile of NR rows by MV vectors: ``tile[j, i] = sum_k x[k, j] * a[k, i]``, where
a[k] are vectors over the query rows (they lie in scratch, one row after the other) and x[k, j]
scalars of keys or values. Lanes and scalars are words (`vectors.lanes.words`): numbers of the type
that is computed in or, with the dot product of pairs, two bfloat16 numbers of neighbouring k, which
makes a sum of half as many steps. Nothing here knows which.
"""

from __future__ import annotations

from ...vectors.lanes import (
    add_outer,
    add_outer_unless_hidden,
    add_outer_visible,
    add_tile,
    rescale_add_tile,
    store_tile,
    zeros,
)
from .jit import device


@device
def dot_keys(tile, queries, depth, keys, key_stride, groups, factor, dest, tile_max):
    """Write the scores of groups of NR keys: ``dest[j] = sum_d keys[j, d] * queries[d]``.

    The sum is over `depth` words; `factor` is for those that do not have it in them. The vectors at
    address `tile_max` keep the largest score of each lane.
    """
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        key = keys + g * tile.NR * key_stride
        acc = zeros(tile)
        for d in range(0, depth - 3, 4):
            a, x = queries + d * row, key + d * tile.itemsize
            acc = add_outer(tile, acc, a, x, key_stride)
            acc = add_outer(tile, acc, a + row, x + tile.itemsize, key_stride)
            acc = add_outer(tile, acc, a + 2 * row, x + 2 * tile.itemsize, key_stride)
            acc = add_outer(tile, acc, a + 3 * row, x + 3 * tile.itemsize, key_stride)
        for d in range(depth // 4 * 4, depth):
            acc = add_outer(tile, acc, queries + d * row, key + d * tile.itemsize, key_stride)
        store_tile(tile, acc, dest + g * tile.NR * row, tile_max, factor)


@device
def add_values(tile, probs, words, values, stride_n, stride_g, groups, alpha, dest, skip_hidden):
    """Add groups of NR columns: ``dest[j] = dest[j] * alpha + sum_n values[n, j] * probs[n]``.

    The sum is over rows of words, each of one key or of a pair. A column group begins `stride_g`
    bytes after the one before, a row `stride_n`. With `skip_hidden` the values of hidden
    probabilities (-0.0) stay out.
    """
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        at = values + g * stride_g
        acc = zeros(tile)
        if skip_hidden:
            for n in range(words):
                value = at + n * stride_n
                acc = add_outer_visible(tile, acc, probs + n * row, value, tile.itemsize)
        else:
            for n in range(0, words - 3, 4):
                a, x = probs + n * row, at + n * stride_n
                acc = add_outer(tile, acc, a, x, tile.itemsize)
                acc = add_outer(tile, acc, a + row, x + stride_n, tile.itemsize)
                acc = add_outer(tile, acc, a + 2 * row, x + 2 * stride_n, tile.itemsize)
                acc = add_outer(tile, acc, a + 3 * row, x + 3 * stride_n, tile.itemsize)
            for n in range(words // 4 * 4, words):
                acc = add_outer(tile, acc, probs + n * row, at + n * stride_n, tile.itemsize)
        rescale_add_tile(tile, acc, dest + g * tile.NR * row, alpha)


@device
def add_rows(tile, wide, probs, next_probs, rows, tiles, groups, width, factor, dest, skip_hidden):
    """Add to groups of NR keys: ``dest[n] += sum_i probs[n, i] * rows[i]`` over all tiles' lanes.

    This is the product turned round: the columns of `rows`, `width` of them, lie in the vectors of
    the register tile `wide`, and the probabilities are the scalars, of which a word holds those of
    neighbouring lanes. `next_probs` is the number of bytes from one tile's to the next; rows lie
    one after the other, and they and dest are padded to whole vectors. With `skip_hidden` the rows
    of hidden probabilities (-0.0) stay out.
    """
    size, words = tile.itemsize, tile.lanes // tile.per_word
    row, line, step = words * size, width * size, wide.W * wide.MV * size
    for g in range(groups):
        at = g * wide.NR
        for c in range(0, line, step):
            acc = zeros(wide)
            for t in range(tiles):
                a, x = rows + t * words * line + c, probs + t * next_probs + at * row
                if skip_hidden:
                    for n in range(words):
                        acc = add_outer_unless_hidden(wide, acc, a + n * line, x + n * size, row)
                    continue
                for n in range(0, words - 3, 4):
                    acc = add_outer(wide, acc, a + n * line, x + n * size, row)
                    acc = add_outer(wide, acc, a + (n + 1) * line, x + (n + 1) * size, row)
                    acc = add_outer(wide, acc, a + (n + 2) * line, x + (n + 2) * size, row)
                    acc = add_outer(wide, acc, a + (n + 3) * line, x + (n + 3) * size, row)
                for n in range(words // 4 * 4, words):
                    acc = add_outer(wide, acc, a + n * line, x + n * size, row)
            add_tile(wide, acc, dest + at * line + c, line, factor)
