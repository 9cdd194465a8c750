"""The streaming softmax of one tile of scores: every lane is one query row.

``row_max`` and ``row_sum`` run along the keys; ``alpha`` is the factor by which what has been
summed so far shrinks when the maximum grows.
"""

from __future__ import annotations

import math

import numpy as np

from ...vectors.lanes import (
    exp2_nonpositive,
    load,
    load_old,
    pair_up,
    sign_bit,
    splat,
    store,
    store_halves,
)
from .jit import device

LOG2E = math.log2(math.e)


@device
def running_softmax(tile, scores, n_keys, max_known, joins, tile_max, row_max, row_sum, alpha):
    """Turn scores into probabilities relative to the running maximum, in place.

    With `max_known` the vectors at address `tile_max` hold the largest of these scores. -inf is a
    hidden key, of probability 0. A row that has seen nothing yet keeps row_max = -inf, and no
    difference of two infinities is ever taken for it. NaN in a score, or a score of +inf, makes
    row_sum NaN, and that stays. With `joins` the probabilities become words of pairs
    (`join_keys`), once they have been added up.
    """
    row = tile.lanes * tile.itemsize
    for i in range(tile.MV):
        at = i * tile.W * tile.itemsize
        column = scores + at
        old = load(tile, row_max + at)
        largest = old
        if max_known:
            s = load(tile, tile_max + at)
            largest = np.where(s > largest, s, largest)
        else:
            for n in range(n_keys):
                s = load(tile, column + n * row)
                largest = np.where(s > largest, s, largest)
        store(row_max + at, largest)
        largest = np.where(largest == -np.inf, splat(tile, 0.0), largest)
        shrink = exp2_nonpositive((old - largest) * LOG2E)
        store(alpha + at, shrink)
        total = splat(tile, 0.0)
        if tile.per_word == 2 and joins:
            for n in range(0, n_keys, 2):
                p = exp2_nonpositive((load(tile, column + n * row) - largest) * LOG2E)
                total += p
                other = exp2_nonpositive((load(tile, column + (n + 1) * row) - largest) * LOG2E)
                total += other
                store(column + n // 2 * row, pair_up(tile, p, other))
        else:
            for n in range(n_keys):
                p = exp2_nonpositive((load(tile, column + n * row) - largest) * LOG2E)
                total += p
                store(column + n * row, p)
        store(row_sum + at, load(tile, row_sum + at) * shrink + total)


@device
def join_keys(tile, source, n_keys, dest):
    """Round the rows of an even number of keys to words of pairs of keys; in place, too."""
    row, size = tile.lanes * tile.itemsize, tile.W * tile.itemsize
    for n in range(0, n_keys, 2):
        for i in range(tile.MV):
            at = source + n * row + i * size
            words = pair_up(tile, load(tile, at), load(tile, at + row))
            store(dest + n // 2 * row + i * size, words)


@device
def join_lanes(tile, rows, n_keys):
    """Round rows in place to words of pairs of neighbouring lanes, which lie close together."""
    size = tile.W * tile.itemsize
    for n in range(n_keys * tile.MV):
        store_halves(tile, rows + n * size // 2, load(tile, rows + n * size))


@device
def note_hidden(tile, scores, n_keys, hidden):
    """Write 1 where a score is that of a hidden key, before it becomes a probability."""
    size = tile.W * tile.itemsize
    for n in range(n_keys * tile.MV):
        s = load(tile, scores + n * size)
        store(hidden + n * size, np.where(s == -np.inf, splat(tile, 1.0), splat(tile, 0.0)))


@device
def mark_hidden(tile, probs, n_keys, hidden):
    """Make the probability of hidden keys -0.0; one that has underflowed stays +0.0.

    Apart from `running_softmax`, which this keeps to one loop with its constants in registers.
    """
    size = tile.W * tile.itemsize
    for n in range(n_keys * tile.MV):
        noted = load(tile, hidden + n * size) > 0.0
        p = load_old(tile, probs + n * size)
        store(probs + n * size, np.where(noted, splat(tile, -0.0), p))


@device
def is_hidden(p):
    """Return which probabilities are those of hidden keys, as `mark_hidden` leaves them.

    The sign alone does not tell: NaN may have it, too.
    """
    return sign_bit(p) & (p == 0.0)
