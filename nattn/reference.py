"""What attention means: the dense float64 computation, one head at a time, written to be read.

It builds the whole ``Nq x Nk`` matrix and hurries nothing. Every other backend is tested against
it, so it imports nothing fast and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """
    # NaN, Inf and overflow are data here, whatever the caller's np.seterr says
    with np.errstate(all="ignore"):
        for b in range(problem.B):
            n = int(problem.q_lens[b])
            out[b, :, n:] = 0.0
            lse[b, :, n:] = -np.inf
            for h in range(problem.Hq):
                out[b, h, :n], lse[b, h, :n] = _one_head(problem, b, h)
                if progress is not None:
                    progress((b * problem.Hq + h + 1) / (problem.B * problem.Hq))


def _one_head(p: Problem, b: int, h: int) -> tuple[Float64Array, Float64Array]:
    n_q, n_kv = int(p.q_lens[b]), int(p.kv_lens[b])  # what lies behind does not exist
    kv = h // p.group
    q = np.array(p.q[b, h, :n_q], np.float64, order="C")
    k = np.array(p.k[b, kv, :n_kv], np.float64, order="C")
    v = np.array(p.v[b, kv, :n_kv], np.float64, order="C")

    i = np.arange(n_q)[:, None]
    j = np.arange(n_kv)[None, :]
    lo, hi = p.visible_range(b, i)
    visible = (lo <= j) & (j < hi)
    if p.mask is not None:
        visible &= p.mask[b, h, :n_q, :n_kv]

    s = p.scale * (q @ k.T)
    visible &= s != -np.inf
    if p.bias is not None:
        bias = p.bias[b, h, :n_q, :n_kv].astype(p.dtype).astype(np.float64)
        visible &= bias != -np.inf  # selected, not added: it hides a NaN score too
        s = s + bias
        visible &= s != -np.inf
    s = np.where(visible, s, -np.inf)

    # exp(s - lse) would lose the digits of a large s: take out the maximum first
    row_max = s.max(axis=1, keepdims=True, initial=-np.inf)
    row_max = np.where(row_max == -np.inf, 0.0, row_max)  # an empty row has none
    weight = np.exp(s - row_max)  # 0 where hidden
    row_sum = weight.sum(axis=1, keepdims=True)
    lse = row_max + np.log(row_sum)
    p_ij = np.where(visible, weight / row_sum, 0.0)

    return _weighted_sum(p_ij, v, visible), lse[:, 0]


def _weighted_sum(p: Float64Array, v: Float64Array, visible: NDArray[np.bool_]) -> Float64Array:
    """Return ``sum_j p[i, j] * v[j]`` over the visible keys, where ``0 * NaN`` counts as seen."""
    finite = np.isfinite(v)
    out: Float64Array = p @ np.where(finite, v, 0.0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        seen = visible[:, j, None] & ~finite[j]
        out += np.where(seen, p[:, j, None] * v[j], 0.0)
    return out
