"""Dropout: which probabilities are kept, as a pure function of the seed and the place.

Every backend draws the bits from the same counter-based generator, so a probability is dropped or
not whatever the tiles, the threads and the order in which they come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _philox_round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Mix four words; only the low 32 bits of what goes in and comes out count.

    A product is wanted modulo 2**64, to which int64 wraps, and of a factor only the low 32 bits
    enter: with the upper half seen to be 0 the compiler takes the short multiplication. Nothing
    else needs a mask: what an arithmetic shift brings in, or a low word carries along, is above.
    """
    p0 = _MULTIPLIERS[0] * (c0 & _WORD)
    p1 = _MULTIPLIERS[1] * (c2 & _WORD)
    return (p1 >> 32) ^ (c1 ^ k0), p1, (p0 >> 32) ^ (c3 ^ k1), p0


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return four random words for a counter of four words and a key of two: Philox4x32-10.

    Parameters
    ----------
    c0, c1, c2, c3 : int64
        The counter, scalars and lanes or arrays; their low 32 bits count. NumPy's scalars warn of
        the overflow that is meant here, so pass arrays of at least one element.
    k0, k1 : int
        The key, likewise.

    Returns
    -------
    tuple of int64
        Four words from 0 to 2**32 - 1.

    Notes
    -----
    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). No
    loop: the counter's words may be scalars that become lanes as they are mixed.

    Examples
    --------
    >>> [hex(word[0]) for word in philox(*np.zeros((6, 1), np.int64))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    s0, s1 = _KEY_STEPS
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + s0, k1 + s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 2 * s0, k1 + 2 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 3 * s0, k1 + 3 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 4 * s0, k1 + 4 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 5 * s0, k1 + 5 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 6 * s0, k1 + 6 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 7 * s0, k1 + 7 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 8 * s0, k1 + 8 * s1)
    c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0 + 9 * s0, k1 + 9 * s1)
    return c0 & _WORD, c1 & _WORD, c2 & _WORD, c3 & _WORD


def drop_threshold(dropout_p: float) -> int:
    """Return the number below which a random word of 32 bits drops a probability.

    ``dropout_p * 2**32``, rounded, but never so that all would be dropped.

    Examples
    --------
    >>> drop_threshold(0.25) == 2**30
    True
    """
    return min(round(dropout_p * 2**32), _WORD)


def keep(b: Any, h: Any, i: Any, j: Any, seed: int, dropout_p: float) -> NDArray[np.bool_]:
    """Tell which probabilities dropout keeps: a pure function of (seed, b, h, i, j).

    Parameters
    ----------
    b, h, i, j : array_like of int
        Batch item, query head, row and key, each below 2**32, broadcast against each other.
    seed : int
        ``0 <= seed < 2**64``.
    dropout_p : float
        ``0 <= dropout_p < 1``.

    Returns
    -------
    ndarray of bool
        Of the broadcast shape. Kept probabilities are scaled by ``1 / (1 - dropout_p)``.

    Notes
    -----
    Key ``j`` takes word ``j % 4`` of ``philox`` for the counter ``(j // 4, i, h, b)`` and the key
    ``(seed % 2**32, seed // 2**32)``, and is kept if that word is not below `drop_threshold`. One
    evaluation serves four neighbouring keys.

    Examples
    --------
    >>> kept = keep(0, 0, np.arange(100)[:, None], np.arange(100), seed=1, dropout_p=0.1)
    >>> kept.shape, round(float(kept.mean()), 3)
    ((100, 100), 0.901)
    """
    indices = [np.asarray(x, np.int64) for x in (b, h, i, j)]
    shape = np.broadcast_shapes(*(x.shape for x in indices))
    b, h, i, j = map(np.atleast_1d, indices)  # arrays wrap in silence, where scalars warn
    words = philox(j // 4, i, h, b, seed & _WORD, seed >> 32)
    n = j % 4
    word = np.where(n == 0, words[0], np.where(n == 1, words[1], words[2]))
    word = np.where(n == 3, words[3], word)
    kept: NDArray[np.bool_] = word >= drop_threshold(dropout_p)
    return kept.reshape(shape)
