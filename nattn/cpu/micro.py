"""The micro-kernel: both products of attention are sums of outer products in registers.

A product fills a tile of NR rows by MV vectors: ``tile[j, i] = sum_k x[k, j] * a[k, i]``, where
a[k] are vectors over the query rows (they lie in scratch, one row after the other) and x[k, j]
scalars of keys or values, read where they lie.
"""

from __future__ import annotations

from ..lanes import outer_fma, outer_fma_visible, rescale_add_tile, store_tile, zeros
from .jit import device


@device
def dot_keys(tile, queries, depth, key, key_stride, dest):
    """Write the scores of NR keys for all lanes: ``dest[j] = sum_d key[j, d] * queries[d]``."""
    row = tile.lanes * tile.itemsize
    acc = zeros(tile)
    for d in range(depth):
        acc = outer_fma(tile, acc, queries + d * row, key + d * tile.itemsize, key_stride)
    store_tile(tile, acc, dest)


@device
def add_values(tile, probs, rows, value, value_stride, alpha, dest):
    """Add NR columns of the output: ``dest[j] = dest[j] * alpha + sum_n value[n, j] probs[n]``."""
    row = tile.lanes * tile.itemsize
    acc = zeros(tile)
    for n in range(rows):
        acc = outer_fma(tile, acc, probs + n * row, value + n * value_stride, tile.itemsize)
    rescale_add_tile(tile, acc, dest, alpha)


@device
def add_visible_values(tile, probs, rows, value, value_stride, alpha, dest):
    """Do as `add_values` does, and keep the values of hidden probabilities (-0.0) out."""
    row = tile.lanes * tile.itemsize
    acc = zeros(tile)
    for n in range(rows):
        at = value + n * value_stride
        acc = outer_fma_visible(tile, acc, probs + n * row, at, tile.itemsize)
    rescale_add_tile(tile, acc, dest, alpha)
