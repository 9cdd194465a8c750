"""What relative positions add to a score: slopes, tables, kernels and small networks.

These are modifiers as those of `mods`, where users find them. All that they are bound to can learn:
``wrt=("score_mod.table",)``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    """Subtract a multiple of the distance: ``score - slopes[b, h] * |q_idx - kv_idx|``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    slopes : ndarray
        ``(B, Hq)``, for example ``np.broadcast_to(alibi_slopes(Hq), (B, Hq))``.

    Returns
    -------
    array
        The score with the bias.

    Notes
    -----
    ``nattn.attention(..., alibi_slopes=)`` is this function, called after every other modifier.
    Slopes can learn: by ``wrt=("alibi_slopes",)`` those of the argument, by ``"score_mod.slopes"``
    those that are bound here.

    Formula: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
    Input Length Extrapolation" (ICLR 2022).

    Examples
    --------
    >>> float(alibi(1.0, 0, 0, 7, 4, slopes=np.array([[0.25]])))
    0.25
    """
    return score - slopes[b, h] * abs(q_idx - kv_idx)


def alibi_slopes(n_heads: int) -> NDArray[np.float32]:
    """Return the slopes of ALiBi for any number of heads.

    Parameters
    ----------
    n_heads : int
        Number of query heads, 0 or more.

    Returns
    -------
    ndarray
        ``(n_heads,)`` float32.

    Raises
    ------
    TypeError
        If `n_heads` is not an integer.
    ValueError
        If it is negative.

    Notes
    -----
    For a power of two the slopes are ``2**(-8 / n), 2**(-16 / n), ..., 2**-8``. For any other
    count the paper takes the slopes of the next lower power of two ``p``, then every second of the
    slopes for ``2 p``: those that lie between. Source: Press, Smith and Lewis, "Train Short, Test
    Long" (ICLR 2022) and the code published with it.

    Examples
    --------
    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    expected = "n_heads: expected a number of heads, 0 or more"
    if isinstance(n_heads, bool | np.bool_):
        raise TypeError(f"{expected}, got {n_heads!r}")
    try:
        n = operator.index(n_heads)
    except TypeError:
        raise TypeError(f"{expected}, got {n_heads!r} ({type(n_heads).__name__})") from None
    if n < 0:
        raise ValueError(f"{expected}, got {n}")
    power = 1 << max(n.bit_length() - 1, 0)
    own = np.arange(1, power + 1) / power
    between = np.arange(1, 2 * power, 2) / (2 * power)
    return np.exp2(-8.0 * np.concatenate([own, between])[:n]).astype(np.float32)


def relative_position_bias(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any, reach: Any
) -> Any:
    """Add a bias that depends on the head and on ``kv_idx - q_idx``, read from a table.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    table : ndarray
        ``(Hq, 2 * reach + 1)``: ``table[h, reach + d]`` is the bias of a key at distance ``d``
        behind the query (``d < 0``: before it).
    reach : int
        Farther keys get the bias of the first or the last column.

    Returns
    -------
    array
        The score with the bias.

    Notes
    -----
    Clipped relative positions: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position
    Representations" (2018). `t5_bias` makes such a table of T5's buckets.

    Examples
    --------
    >>> table = np.array([[-2.0, -1.0, 0.0, 10.0, 20.0]])
    >>> relative_position_bias(0.0, 0, 0, 5, np.array([0, 4, 5, 6, 9]), table, reach=2)
    array([-2., -1.,  0., 10., 20.])
    """
    return score + table[h, np.clip(kv_idx - q_idx, -reach, reach) + reach]


def relative_position_bias_2d(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any
) -> Any:
    """Add a bias that depends on the head, and on how many rows and columns lie between.

    Tokens are the patches of an image, or of a window of one, row by row.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    table : ndarray
        ``(Hq, 2 * height - 1, 2 * width - 1)``: ``table[h, height - 1 + y, width - 1 + x]`` is the
        bias of a key that lies y rows above and x columns left of the query. Its shape tells the
        window's; token n stands in row ``n // width`` and column ``n % width``.

    Returns
    -------
    array
        The score with the bias.

    Notes
    -----
    Formula: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows"
    (ICCV 2021). Its ``relative_position_bias_table`` is ``((2 * height - 1) * (2 * width - 1),
    Hq)``: pass ``x.T.reshape(Hq, 2 * height - 1, 2 * width - 1)``, and windows as batch items.

    Examples
    --------
    >>> table = np.arange(15.0).reshape(1, 3, 5)  # of 2 rows and 3 columns
    >>> relative_position_bias_2d(0.0, 0, 0, 4, np.arange(6), table)  # query: row 1, column 1
    array([13., 12., 11.,  8.,  7.,  6.])
    """
    rows, columns = table.shape[1], table.shape[2]
    width = columns // 2 + 1
    y = q_idx // width - kv_idx // width + rows // 2
    return score + table[h, y, q_idx % width - kv_idx % width + columns // 2]


def t5_bias(
    table: ArrayLike, bidirectional: bool = True, max_distance: int = 128
) -> Callable[..., Any]:
    """Return T5's relative position bias: `relative_position_bias`, bound to T5's buckets.

    Parameters
    ----------
    table : array_like
        ``(num_buckets, Hq)`` floats, as ``relative_attention_bias.weight`` of Hugging Face's T5
        stores them; 32 buckets as a rule.
    bidirectional : bool, default True
        True as in T5's encoder: half of the buckets are for keys behind the query. False as in its
        decoder, where keys behind the query share bucket 0.
    max_distance : int, default 128
        From here on everything shares the last bucket.

    Returns
    -------
    functools.partial
        A score_mod. T5 does not scale its scores: pass ``scale=1.0`` along with it.

    Raises
    ------
    TypeError
        If the table is not of float16, float32 or float64, or `max_distance` not an integer.
    ValueError
        If the table is not two-dimensional, or has too few buckets, or `max_distance` is not
        beyond the buckets of one distance each.

    Notes
    -----
    Of the buckets for one direction the first half hold one distance each, the others grow
    exponentially up to `max_distance`. The formula, ``exact + floor(log(n / exact) /
    log(max_distance / exact) * (buckets - exact))``, is evaluated here in integers, once for every
    distance. A library that takes the logarithm in float32 can disagree where the exact result is
    an integer (with 32 buckets at the distances 16, 32 and 64), if its logarithm is rounded down;
    NumPy's is not, in float32 and float64. Source: Raffel et al., "Exploring the Limits of
    Transfer Learning with a Unified Text-to-Text Transformer" (JMLR 2020) and its code.

    Examples
    --------
    >>> bias = t5_bias(np.arange(8.0)[:, None], bidirectional=False, max_distance=16)
    >>> bias(0.0, 0, 0, np.array([0, 3, 4, 7, 8, 11, 12, 99]), 0)
    array([0., 3., 4., 5., 6., 6., 7., 7.])
    """
    weights = np.asarray(table)
    if weights.dtype.newbyteorder("=").char not in "efd":
        raise TypeError(
            f"table: expected dtype float16, float32 or float64, got {weights.dtype.name}"
        )
    if weights.ndim != 2:
        raise ValueError(f"table: expected shape (num_buckets, n_heads), got {weights.shape}")
    least = 4 if bidirectional else 2
    if len(weights) < least:
        raise ValueError(
            f"table: expected at least {least} buckets with bidirectional={bidirectional}, "
            f"got shape {weights.shape}"
        )
    buckets = t5_buckets(len(weights), bidirectional, max_distance)
    columns = np.ascontiguousarray(weights[buckets].T)
    return functools.partial(relative_position_bias, table=columns, reach=len(buckets) // 2)


def t5_buckets(num_buckets: int, bidirectional: bool, max_distance: int) -> NDArray[np.int64]:
    """Return the buckets of ``kv_idx - q_idx`` from -reach to reach, where the last one begins."""
    count = num_buckets // 2 if bidirectional else num_buckets  # for one direction
    exact = count // 2
    steps = count - exact
    try:
        last = operator.index(max_distance)
    except TypeError:
        raise TypeError(f"max_distance: expected an integer, got {max_distance!r}") from None
    if last <= exact:
        raise ValueError(
            f"max_distance: expected more than the {exact} distances that have a bucket of their "
            f"own, got {last}"
        )
    starts = list(range(exact + 1))
    for k in range(1, steps):  # the least n with (n / exact) ** steps >= (last / exact) ** k
        least = last**k * exact ** (steps - k)
        n = round(exact * (last / exact) ** (k / steps))
        while n**steps < least:
            n += 1
        while (n - 1) ** steps >= least:
            n -= 1
        starts.append(n)
    reach = starts[-1]
    bucket_of = np.searchsorted(starts, np.arange(reach + 1), side="right") - 1
    behind = bucket_of[1:] + count if bidirectional else np.zeros(reach, np.int64)
    return np.concatenate([bucket_of[::-1], behind])


# Kernels of the distance, and a network


def kerple_log(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, r1: Any, r2: Any) -> Any:
    """Add KERPLE's logarithmic kernel: ``score - r1[h] * log(1 + r2[h] * |q_idx - kv_idx|)``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    r1, r2 : ndarray
        ``(Hq,)``, above 0. Who learns them keeps them so, for example by learning their logarithms
        and multiplying the gradients by r1 and r2.

    Returns
    -------
    array
        The score with the bias.

    Notes
    -----
    Formula: Chi, Fan, Ramadge and Rudnicky, "KERPLE: Kernelized Relative Positional Embedding for
    Length Extrapolation" (NeurIPS 2022). `distance_decay` is one such kernel for all heads.

    Examples
    --------
    >>> one, two = np.array([1.0]), np.array([2.0])
    >>> np.round(np.exp(kerple_log(0.0, 0, 0, 3, np.array([0, 2, 3]), r1=two, r2=one)), 4)
    array([0.0625, 0.25  , 1.    ])
    """
    return score - r1[h] * np.log1p(r2[h] * abs(q_idx - kv_idx))


def kerple_power(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, r1: Any, r2: Any) -> Any:
    """Add KERPLE's power kernel: ``score - r1[h] * |q_idx - kv_idx| ** r2[h]``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    r1, r2 : ndarray
        ``(Hq,)``: factors above 0, and exponents above 0, up to 2. Exponents of 1 make it `alibi`.

    Returns
    -------
    array
        The score with the bias.

    Notes
    -----
    Formula: Chi, Fan, Ramadge and Rudnicky, "KERPLE: Kernelized Relative Positional Embedding for
    Length Extrapolation" (NeurIPS 2022).

    Examples
    --------
    >>> r1, r2 = np.array([0.25]), np.array([0.5])
    >>> kerple_power(0.0, 0, 0, 9, np.array([0, 5, 9]), r1, r2)
    array([-0.75, -0.5 ,  0.  ])
    """
    distance = 1.0 * abs(q_idx - kv_idx)  # a float: no power of integers overflows
    return score - r1[h] * distance ** r2[h]


def fire(
    score: Any,
    b: Any,
    h: Any,
    q_idx: Any,
    kv_idx: Any,
    c: Any,
    threshold: Any,
    w1: Any,
    b1: Any,
    w2: Any,
    b2: Any,
) -> Any:
    """Add FIRE's bias: a small network of the distance, as a share of the query's position.

    With ``psi(x) = log(1 + c * x)`` and ``x = psi(|q_idx - kv_idx|) / psi(max(threshold, q_idx))``
    the bias of a head is ``b2[h] + sum(w2[h] * relu(w1 * x + b1))``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    c : float
        Above 0: how much the logarithm tells near positions apart.
    threshold : float
        Above 0; the paper's L. Queries before it are treated as if they stood there.
    w1, b1 : ndarray
        ``(width,)``: the hidden layer, which all heads share.
    w2, b2 : ndarray
        ``(Hq, width)`` and ``(Hq,)``: the last layer, with an output for each head. What b2 adds
        to all keys alike moves no weight, but the lse.

    Returns
    -------
    array
        The score with the bias.

    Notes
    -----
    Formula: Li et al., "Functional Interpolation for Relative Positions Improves Long Context
    Transformers" (ICLR 2024; arXiv 2023), where the width is 32, for causal attention. Of torch's
    ``Linear(1, width)`` and ``Linear(width, Hq)``, w1 is ``weight[:, 0]`` and w2 ``weight``.

    The network runs for every pair, and learning w1, b1 or w2 runs it once more for each hidden
    unit. So small widths pay.

    Examples
    --------
    >>> one, two = np.array([1.0, -1.0]), np.array([[3.0, 5.0]])
    >>> bias = functools.partial(fire, c=1.0, threshold=3.0, w1=one, b1=-0.5 * one)
    >>> bias(0.0, 0, 0, 2, np.array([2, 1, 0]), w2=two, b2=np.array([0.25])).round(3)
    array([2.75 , 0.25 , 1.127])
    """
    x = np.log1p(c * abs(q_idx - kv_idx)) / np.log1p(c * np.maximum(threshold, q_idx))
    total = score + b2[h]
    for n in range(len(w1)):
        total = total + w2[h, n] * np.maximum(w1[n] * x + b1[n], 0.0)
    return total


def untied_positions(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, p_q: Any, p_k: Any, scale: Any = 1.0
) -> Any:
    """Add products of positions: ``score + scale * (p_q[h, q_idx] @ p_k[h, kv_idx])``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    p_q, p_k : ndarray
        ``(Hq, N, rank)``: vectors of the positions, projected for queries and for keys. Both count
        positions on the key axis.
    scale : float, default 1.0
        Factor of the products.

    Returns
    -------
    array
        The score with the product.

    Notes
    -----
    The untied positional correlation of TUPE: Ke, He and Liu, "Rethinking Positional Encoding in
    Language Pre-training" (ICLR 2021), without its special treatment of ``[CLS]``. There `scale` is
    ``1 / sqrt(2 * d)``, and so is that of `nattn.attention`. A matrix of positions is never made.

    The product is summed up for every pair, and learning runs it once more for each of `rank`. It
    is meant for small ranks; a large one is faster as further columns of q and k, which
    then have to carry their factors.

    Examples
    --------
    >>> p_q = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    >>> p_k = np.array([[[3.0, 4.0], [5.0, 6.0]]])
    >>> untied_positions(0.0, 0, 0, np.array([[0], [1]]), np.array([0, 1]), p_q, p_k, scale=0.5)
    array([[1.5, 2.5],
           [4. , 6. ]])
    """
    total = score
    for n in range(p_q.shape[2]):
        total = total + scale * p_q[h, q_idx, n] * p_k[h, kv_idx, n]
    return total
