"""The micro-kernel: both products of attention are sums of outer products in registers.

A product fills a tile of NR rows by MV vectors: ``tile[j, i] = sum_k x[k, j] * a[k, i]``, where
a[k] are vectors over the query rows (they lie in scratch, one row after the other) and x[k, j]
scalars of keys or values, read where they lie.
"""

from __future__ import annotations

from ..lanes import outer_fma, outer_fma_visible, rescale_add_tile, store_tile, zeros
from .jit import device


@device
def dot_keys(tile, queries, depth, keys, key_stride, groups, dest):
    """Write the scores of groups of NR keys: ``dest[j] = sum_d keys[j, d] * queries[d]``."""
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        key = keys + g * tile.NR * key_stride
        acc = zeros(tile)
        for d in range(depth):
            acc = outer_fma(tile, acc, queries + d * row, key + d * tile.itemsize, key_stride)
        store_tile(tile, acc, dest + g * tile.NR * row)


@device
def add_values(tile, probs, rows, values, value_stride, groups, alpha, dest):
    """Add groups of NR columns: ``dest[j] = dest[j] * alpha + sum_n values[n, j] * probs[n]``."""
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        value = values + g * tile.NR * tile.itemsize
        acc = zeros(tile)
        for n in range(rows):
            acc = outer_fma(tile, acc, probs + n * row, value + n * value_stride, tile.itemsize)
        rescale_add_tile(tile, acc, dest + g * tile.NR * row, alpha)


@device
def add_visible_values(tile, probs, rows, values, value_stride, groups, alpha, dest):
    """Do as `add_values` does, and keep the values of hidden probabilities (-0.0) out."""
    row = tile.lanes * tile.itemsize
    for g in range(groups):
        value = values + g * tile.NR * tile.itemsize
        acc = zeros(tile)
        for n in range(rows):
            at = value + n * value_stride
            acc = outer_fma_visible(tile, acc, probs + n * row, at, tile.itemsize)
        rescale_add_tile(tile, acc, dest + g * tile.NR * row, alpha)
