"""The micro-kernel: both products of attention are sums of outer products in registers.

A product fills a tile of NR rows by MV vectors: ``tile[j, i] = sum_k x[k, j] * a[k, i]``, where
a[k] are vectors over the query rows (they lie in scratch, one row after the other) and x[k, j]
scalars of keys or values.
"""

from __future__ import annotations

from ...vectors.lanes import (
    add_tile,
    outer_fma,
    outer_fma_unless_hidden,
    outer_fma_visible,
    rescale_add_tile,
    store_tile,
    zeros,
)
from .jit import device


@device
def dot_keys(tile, queries, depth, keys, key_stride, groups, dest, tile_max):
    """Write the scores of groups of NR keys: ``dest[j] = sum_d keys[j, d] * queries[d]``.

    The vectors at address `tile_max` keep the largest score of each lane.
    """
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        key = keys + g * tile.NR * key_stride
        acc = zeros(tile)
        for d in range(0, depth - 3, 4):
            a, x = queries + d * row, key + d * tile.itemsize
            acc = outer_fma(tile, acc, a, x, key_stride)
            acc = outer_fma(tile, acc, a + row, x + tile.itemsize, key_stride)
            acc = outer_fma(tile, acc, a + 2 * row, x + 2 * tile.itemsize, key_stride)
            acc = outer_fma(tile, acc, a + 3 * row, x + 3 * tile.itemsize, key_stride)
        for d in range(depth // 4 * 4, depth):
            acc = outer_fma(tile, acc, queries + d * row, key + d * tile.itemsize, key_stride)
        store_tile(tile, acc, dest + g * tile.NR * row, tile_max)


@device
def add_values(tile, probs, n_keys, values, stride_n, stride_g, groups, alpha, dest, skip_hidden):
    """Add groups of NR columns: ``dest[j] = dest[j] * alpha + sum_n values[n, j] * probs[n]``.

    A column group begins `stride_g` bytes after the one before, a row `stride_n`. With
    `skip_hidden` the values of hidden probabilities (-0.0) stay out.
    """
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        at = values + g * stride_g
        acc = zeros(tile)
        if skip_hidden:
            for n in range(n_keys):
                value = at + n * stride_n
                acc = outer_fma_visible(tile, acc, probs + n * row, value, tile.itemsize)
        else:
            for n in range(0, n_keys - 3, 4):
                a, x = probs + n * row, at + n * stride_n
                acc = outer_fma(tile, acc, a, x, tile.itemsize)
                acc = outer_fma(tile, acc, a + row, x + stride_n, tile.itemsize)
                acc = outer_fma(tile, acc, a + 2 * row, x + 2 * stride_n, tile.itemsize)
                acc = outer_fma(tile, acc, a + 3 * row, x + 3 * stride_n, tile.itemsize)
            for n in range(n_keys // 4 * 4, n_keys):
                acc = outer_fma(tile, acc, probs + n * row, at + n * stride_n, tile.itemsize)
        rescale_add_tile(tile, acc, dest + g * tile.NR * row, alpha)


@device
def add_rows(tile, wide, probs, next_probs, rows, tiles, groups, width, dest, skip_hidden):
    """Add to groups of NR keys: ``dest[n] += sum_i probs[n, i] * rows[i]`` over all tiles' lanes.

    This is the product turned round: the columns of `rows`, `width` of them, lie in the vectors of
    the register tile `wide`, and the probabilities are the scalars. `next_probs` is the number of
    bytes from one tile's to the next; rows lie one after the other, and they and dest are padded to
    whole vectors. With `skip_hidden` the rows of hidden probabilities (-0.0) stay out.
    """
    size, lanes = tile.itemsize, tile.lanes
    row, line, step = lanes * size, width * size, wide.W * wide.MV * size
    for g in range(groups):
        at = g * wide.NR
        for c in range(0, line, step):
            acc = zeros(wide)
            for t in range(tiles):
                a, x = rows + t * lanes * line + c, probs + t * next_probs + at * row
                if skip_hidden:
                    for lane in range(lanes):
                        acc = outer_fma_unless_hidden(
                            wide, acc, a + lane * line, x + lane * size, row
                        )
                    continue
                for lane in range(0, lanes - 3, 4):
                    acc = outer_fma(wide, acc, a + lane * line, x + lane * size, row)
                    acc = outer_fma(wide, acc, a + (lane + 1) * line, x + (lane + 1) * size, row)
                    acc = outer_fma(wide, acc, a + (lane + 2) * line, x + (lane + 2) * size, row)
                    acc = outer_fma(wide, acc, a + (lane + 3) * line, x + (lane + 3) * size, row)
                for lane in range(lanes // 4 * 4, lanes):
                    acc = outer_fma(wide, acc, a + lane * line, x + lane * size, row)
            add_tile(wide, acc, dest + at * line + c, line)
