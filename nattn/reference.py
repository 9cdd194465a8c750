"""What attention means: the dense float64 computation, one head at a time, written to be read.

It builds the whole ``Nq x Nk`` matrix and hurries nothing. Every other backend is tested against
it, so it imports nothing fast and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dense import Dense
from .mods import keep
from .problem import Problem

Float64Array = NDArray[np.float64]


def forward(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    progress: Callable[[float], object] | None = None,
) -> None:
    """Write the attention of a problem to `out` and `lse`.

    Parameters
    ----------
    problem : Problem
        The call.
    out : ndarray
        ``(B, Hq, Nq, Dv)``, written.
    lse : ndarray
        ``(B, Hq, Nq)``, written.
    progress : callable, optional
        Called with the fraction that is done after each head.

    Raises
    ------
    TypeError
        If a score_mod or mask_mod cannot work on arrays or returns the wrong type; nothing is
        written.
    IndexError
        If one indexes a bound array out of range where a pair is visible.
    """
    # NaN, Inf and overflow are data here, whatever the caller's np.seterr says
    with np.errstate(all="ignore"):
        for b in range(problem.B):
            n = int(problem.q_lens[b])
            for h in range(problem.Hq):
                out[b, h, :n], lse[b, h, :n] = _one_head(problem, b, h)
                out[b, h, n:], lse[b, h, n:] = 0.0, -np.inf
                if progress is not None:
                    progress((b * problem.Hq + h + 1) / (problem.B * problem.Hq))


def _one_head(p: Problem, b: int, h: int) -> tuple[Float64Array, Float64Array]:
    s, visible = scores(p, b, h)
    v = np.array(p.v[b, h // p.group, : int(p.kv_lens[b])], np.float64, order="C")

    # exp(s - lse) would lose the digits of a large s: take out the maximum first
    sink = -np.inf if p.sinks is None else float(p.sinks[h])
    row_max = np.maximum(s.max(axis=1, keepdims=True, initial=-np.inf), sink)
    row_max = np.where(row_max == -np.inf, 0.0, row_max)  # an empty row has none
    weight = np.exp(s - row_max)  # 0 where hidden
    row_sum = weight.sum(axis=1, keepdims=True) + np.exp(sink - row_max)
    lse = row_max + np.log(row_sum)

    kept = visible
    p_ij = weight / row_sum
    if p.dropout_p > 0.0:
        i, j = np.arange(s.shape[0])[:, None], np.arange(s.shape[1])
        kept = visible & keep(b, h, i, j, p.seed, p.dropout_p)  # a dropped value is not read
        p_ij = p_ij / (1.0 - p.dropout_p)
    out = _weighted_sum(np.where(kept, p_ij, 0.0), v, kept)
    # NaN in a row's lse shows, also where no key is left to carry it
    return np.where(np.isnan(lse), np.nan, out), lse[:, 0]


def scores(p: Problem, b: int, h: int) -> tuple[Float64Array, NDArray[np.bool_]]:
    """Return the scores of one head and which keys each row sees.

    Parameters
    ----------
    p : Problem
        The call.
    b, h : int
        Batch item and query head.

    Returns
    -------
    s : ndarray of float64
        ``(q_len, kv_len)``, after modifiers, ALiBi and bias; -inf where hidden.
    visible : ndarray of bool
        ``(q_len, kv_len)``.
    """
    n_q, n_kv = int(p.q_lens[b]), int(p.kv_lens[b])  # what lies behind does not exist
    q = np.array(p.q[b, h, :n_q], np.float64, order="C")
    k = np.array(p.k[b, h // p.group, :n_kv], np.float64, order="C")

    i = np.arange(n_q)[:, None]
    j = np.arange(n_kv)[None, :]
    lo, hi = p.visible_range(b, i)
    visible = (lo <= j) & (j < hi)
    if p.mask is not None:
        visible &= p.mask[b, h, :n_q, :n_kv]

    # one element each, not numbers: an array broadcasts, and a Python `if` on it is refused
    item, head = np.full((1, 1), b), np.full((1, 1), h)
    pos = i + p.q_offset[b]
    s = p.scale * (q @ k.T)
    seen = visible.copy()  # where an index that is out of range is an error
    if p.mask_mod is not None:
        mask_mod = Dense("mask_mod", p.mask_mod, p.dtype)
        visible &= mask_mod(item, head, pos, j)
        mask_mod.check_indices(seen)
    for tree in p.score_mods:
        score_mod = Dense("score_mod", tree, p.dtype)
        s = score_mod(s, item, head, pos, j)
        score_mod.check_indices(seen)
    visible &= s != -np.inf
    if p.bias is not None:
        bias = p.bias[b, h, :n_q, :n_kv].astype(p.dtype).astype(np.float64)
        visible &= bias != -np.inf  # selected, not added: it hides a NaN score too
        s = s + bias
        visible &= s != -np.inf
    return np.where(visible, s, -np.inf), visible


def _weighted_sum(p: Float64Array, v: Float64Array, visible: NDArray[np.bool_]) -> Float64Array:
    """Return ``sum_j p[i, j] * v[j]`` over the visible keys, where ``0 * NaN`` counts as seen."""
    finite = np.isfinite(v)
    out: Float64Array = p @ np.where(finite, v, 0.0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        seen = visible[:, j, None] & ~finite[j]
        out += np.where(seen, p[:, j, None] * v[j], 0.0)
    return out
