"""What happens to a score: the built-in modifiers, those of relative positions among them.

A modifier is one plain function in NumPy's style, ``score_mod(score, b, h, q_idx, kv_idx, ...)``.
The reference calls it with arrays and the kernels compile it for SIMD lanes, so there is one
definition of each. What it needs besides is bound with `functools.partial`:

    nattn.attention(q, k, v, score_mod=functools.partial(nattn.mods.softcap, cap=30.0))

In every modifier `b` is the batch item, `h` the query head, `q_idx` the position of the query on
the key axis and `kv_idx` the key. Whatever is added to a score multiplies its weight: ``score +
log(w)`` weighs a key by ``w``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import binding
from .dropout import drop_threshold as drop_threshold  # users find the bits of dropout here
from .dropout import keep as keep
from .dropout import philox as philox
from .positions import alibi as alibi  # and what relative positions add
from .positions import alibi_slopes as alibi_slopes
from .positions import fire as fire
from .positions import kerple_log as kerple_log
from .positions import kerple_power as kerple_power
from .positions import relative_position_bias as relative_position_bias
from .positions import relative_position_bias_2d as relative_position_bias_2d
from .positions import t5_bias as t5_bias
from .positions import t5_buckets as t5_buckets
from .positions import untied_positions as untied_positions


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


def logit_scale(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, scale: Any) -> Any:
    """Multiply scores by a number for each head, the inverse of a temperature: ``scale[h]``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    scale : ndarray
        ``(Hq,)``. It multiplies what attention's own ``scale`` has multiplied.

    Returns
    -------
    array
        The scaled score.

    Notes
    -----
    The name is that of Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution" (CVPR
    2022), where q and k have length 1: pass ``scale=1.0`` to `nattn.attention`, then, and
    ``np.exp(np.minimum(logit_scale, np.log(100.0)))`` here.

    Examples
    --------
    >>> logit_scale(np.array([-2.0, 3.0]), 0, 1, 0, 0, scale=np.array([1.0, 0.5]))
    array([-1. ,  1.5])
    """
    return score * scale[h]


def token_weights(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, log_weights: Any) -> Any:
    """Weigh each token, whatever the query: ``score + log_weights[b, kv_idx]``.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    log_weights : ndarray
        ``(B, Nk)``, logarithms of the weights. 0 leaves a token as it is, and -inf hides it.
        Logarithms, as any of them will do while they learn, and none is taken at each pair.

    Returns
    -------
    array
        The score plus the logarithm.

    Notes
    -----
    With ``np.log(sizes)`` a token that stands for several counts as so many: the proportional
    attention of Bolya et al., "Token Merging: Your ViT But Faster" (ICLR 2023).

    Examples
    --------
    >>> sizes = np.array([[1.0, 3.0]])
    >>> np.exp(token_weights(0.0, 0, 0, 5, np.arange(2), log_weights=np.log(sizes))).round(4)
    array([1., 3.])
    """
    return score + log_weights[b, kv_idx]


def forget_gates(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, cumulative: Any) -> Any:
    """Weigh keys by the product of the forget gates after them, up to the query.

    Parameters
    ----------
    score, b, h, q_idx, kv_idx
        What every modifier is called with.
    cumulative : ndarray
        ``(B, Hq, Nk)``: ``np.cumsum(log_gates, axis=2)`` of the logarithms of the gates, one for
        each head and position of a key.

    Returns
    -------
    array
        ``score + cumulative[b, h, q_idx] - cumulative[b, h, kv_idx]``.

    Notes
    -----
    Formula: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (ICLR 2025),
    with ``causal=True``: keys behind the query would grow. From the gradient of the sums, ``d``,
    that of `log_gates` is ``np.flip(np.cumsum(np.flip(d, 2), axis=2), 2)``.

    Differences of large sums lose digits: in float32 take gates in moderation, or float64.

    Examples
    --------
    >>> gates = np.array([[[1.0, 0.5, 0.25, 0.5]]])
    >>> sums = np.cumsum(np.log(gates), axis=2)
    >>> np.exp(forget_gates(0.0, 0, 0, 3, np.arange(4), cumulative=sums)).round(4)
    array([0.0625, 0.125 , 0.5   , 1.    ])
    """
    return score + (cumulative[b, h, q_idx] - cumulative[b, h, kv_idx])


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
    >>> from functools import partial
    >>> both = compose(double, partial(gaussian_window, sigma=1.0))
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
