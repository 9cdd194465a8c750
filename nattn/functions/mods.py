"""What happens to a score: the built-in modifiers and ALiBi's slopes.

A modifier is one plain function in NumPy's style, ``score_mod(score, b, h, q_idx, kv_idx, ...)``.
The reference calls it with arrays and the kernels compile it for SIMD lanes, so there is one
definition of each. What it needs besides is bound with `functools.partial`:

    nattn.attention(q, k, v, score_mod=functools.partial(nattn.mods.softcap, cap=30.0))

In every modifier `b` is the batch item, `h` the query head, `q_idx` the position of the query on
the key axis and `kv_idx` the key. Whatever is added to a score multiplies its weight: ``score +
log(w)`` weighs a key by ``w``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import binding
from .dropout import drop_threshold as drop_threshold  # users find the bits of dropout here
from .dropout import keep as keep
from .dropout import philox as philox


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, cap: Any) -> Any:
    """Keep scores between ``-cap`` and ``cap``: ``cap * tanh(score / cap)``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    cap : float
        The bound, above 0. Small scores pass nearly unchanged.

    Returns
    -------
    array
        The capped score.

    Notes
    -----
    ``nattn.attention(..., softcap=cap)`` is this function, called before any other modifier.
    Formula: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024).

    Examples
    --------
    >>> np.round(softcap(np.array([0.5, 1000.0]), 0, 0, 0, 0, cap=20.0), 4)
    array([ 0.4999, 20.    ])
    """
    return cap * np.tanh(score * (1.0 / cap))  # one division, not one for each score


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


# Soft windows: near keys weigh more


def soft_window(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, width: Any, softness: Any
) -> Any:
    """Weigh keys by a window with soft edges: ``sigmoid((width - |q_idx - kv_idx|) / softness)``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    width : float
        Distance at which a key's weight is halved.
    softness : float
        Over how many positions the edge spreads, above 0. Far outside a key's weight falls by a
        factor of e for every `softness` positions.

    Returns
    -------
    array
        The score plus the logarithm of the sigmoid, which is finite at any distance.

    Examples
    --------
    >>> added = soft_window(0.0, 0, 0, 100, np.array([100, 90, 50]), width=10, softness=2.0)
    >>> np.round(np.exp(added), 4)
    array([0.9933, 0.5   , 0.    ])
    """
    x = (width - abs(q_idx - kv_idx)) / softness
    # log(sigmoid(x)), of which the exponential only ever underflows
    return score + (np.minimum(x, 0.0) - np.log1p(np.exp(-abs(x))))


def adaptive_span(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, span: Any, ramp: Any) -> Any:
    """Weigh keys by 1 within a span, then by a ramp down to 0; what lies behind it is hidden.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    span : ndarray
        ``(Hq,)``: up to this distance the head sees keys in full.
    ramp : float
        Length of the ramp, above 0.

    Returns
    -------
    array
        The score plus the logarithm of the weight, -inf where that is 0.

    Notes
    -----
    Formula: Sukhbaatar, Grave, Bojanowski and Joulin, "Adaptive Attention Span in Transformers"
    (ACL 2019).

    Examples
    --------
    >>> added = adaptive_span(0.0, 0, 0, 9, np.arange(4, 10), span=np.array([2.0]), ramp=2.0)
    >>> np.round(np.exp(added), 4)
    array([0. , 0. , 0.5, 1. , 1. , 1. ])
    """
    weight = np.clip((span[h] + ramp - abs(q_idx - kv_idx)) / ramp, 0.0, 1.0)
    seen = weight > 0.0
    return np.where(seen, score + np.log(np.where(seen, weight, 1.0)), -np.inf)


def gaussian_window(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, sigma: Any) -> Any:
    """Weigh keys by a Gaussian of their distance: ``exp(-(q_idx - kv_idx)**2 / (2 sigma**2))``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    sigma : float
        Standard deviation in positions, above 0.

    Returns
    -------
    array
        The score plus the logarithm of the Gaussian.

    Notes
    -----
    Formula: Yang et al., "Modeling Localness for Self-Attention Networks" (EMNLP 2018), centred on
    the query.

    Examples
    --------
    >>> gaussian_window(1.0, 0, 0, 8, np.array([4, 8, 10]), sigma=2.0)
    array([-1. ,  1. ,  0.5])
    """
    distance = (q_idx - kv_idx) / sigma  # a float before it is squared: no integer overflows
    return score - 0.5 * distance * distance


def distance_decay(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, rate: Any, length: Any = 1.0
) -> Any:
    """Weigh keys by a power of their distance: ``(1 + |q_idx - kv_idx| / length) ** -rate``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    rate : float
        The exponent; 0 weighs all keys alike.
    length : float, default 1.0
        Distance at which the decay sets in, above 0.

    Returns
    -------
    array
        The score plus the logarithm of the weight.

    Notes
    -----
    The logarithmic kernel of Chi, Fan, Ramadge and Rudnicky, "KERPLE: Kernelized Relative
    Positional Embedding for Length Extrapolation" (NeurIPS 2022).

    Examples
    --------
    >>> np.round(np.exp(distance_decay(0.0, 0, 0, 3, np.array([0, 2, 3]), rate=1.0)), 4)
    array([0.25, 0.5 , 1.  ])
    """
    return score - rate * np.log1p(abs(q_idx - kv_idx) / length)


def compose(*mods: Callable[..., Any]) -> binding.Combination:
    """Put modifiers one after the other: ``compose(f, g)`` gives g the score that f returned.

    Parameters
    ----------
    *mods : callable
        Modifiers with their parameters bound, at least one.

    Returns
    -------
    Combination
        A score_mod, callable like any other.

    Raises
    ------
    TypeError
        If something is no modifier, or nothing was given.

    Examples
    --------
    >>> def double(score, b, h, q_idx, kv_idx): return 2 * score
    >>> both = compose(double, functools.partial(gaussian_window, sigma=1.0))
    >>> float(both(3.0, 0, 0, 5, 4))
    5.5
    """
    if not mods:
        raise TypeError("compose: expected at least one modifier")
    parts: list[Callable[..., Any]] = []
    for mod in mods:
        if isinstance(mod, binding.Combination):
            if mod.operator != "compose":
                raise TypeError(f"compose: expected modifiers of scores, got the mask {mod!r}")
            parts += mod.parts
        elif callable(mod):
            parts.append(mod)
        else:
            raise TypeError(
                f"compose: expected modifiers score_mod(score, b, h, q_idx, kv_idx), "
                f"got {type(mod).__name__}"
            )
    return binding.Combination("compose", tuple(parts))
