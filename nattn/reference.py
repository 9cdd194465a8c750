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
        ``(B, Hq, Nq, Dv)``, written: rounded to its dtype in the end, and nothing before.
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


def backward(
    problem: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
    *,
    progress: Callable[[float], object] | None = None,
) -> dict[str, Float64Array]:
    """Return the gradients of a problem, in float64.

    They are as exact as `out` and `lse` are: those of `forward`, in float64, make an oracle.

    Parameters
    ----------
    problem : Problem
        The call.
    dout, out : ndarray
        ``(B, Hq, Nq, Dv)``: the gradient and the value of the output.
    lse, dlse : ndarray
        ``(B, Hq, Nq)``: the log-sum-exp, and its gradient if it has one.
    wrt : frozenset of str
        Among "q", "k", "v", "bias", "sinks" and "alibi_slopes".
    progress : callable, optional
        Called with the fraction that is done after each head.

    Returns
    -------
    dict
        A gradient for each name: like q, k and v; of the bias ``problem.bias_shape``; ``(Hq,)``;
        ``(B, Hq)``.
    """
    p = problem
    shapes = {"q": p.q.shape, "k": p.k.shape, "v": p.v.shape, "bias": p.bias_shape or ()}
    shapes |= {"sinks": (p.Hq,), "alibi_slopes": (p.B, p.Hq)}
    total = {name: np.zeros(shapes[name]) for name in wrt}
    with np.errstate(all="ignore"):
        for b in range(p.B):
            n_q, n_kv = int(p.q_lens[b]), int(p.kv_lens[b])
            for h in range(p.Hq):
                rows = [x[b, h, :n_q].astype(np.float64) for x in (dout, out, lse)]
                rows.append(np.zeros(n_q) if dlse is None else dlse[b, h, :n_q].astype(np.float64))
                found = _one_head_backward(p, b, h, *rows)
                kv = h // p.group  # summed over the heads of a group
                places: dict[str, Any]
                places = {"q": (b, h, slice(n_q)), "k": (b, kv, slice(n_kv)), "sinks": h}
                places |= {"v": (b, kv, slice(n_kv)), "alibi_slopes": (b, h)}
                for name in wrt - {"bias"}:
                    total[name][places[name]] += found[name]
                if "bias" in wrt:
                    _add_broadcast(total["bias"], b, h, found["bias"])
                if progress is not None:
                    progress((b * p.Hq + h + 1) / (p.B * p.Hq))
    return total


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

    p_ij = weight / row_sum
    kept = _kept(p, b, h, visible)
    out = _weighted_sum(np.where(kept, p_ij / (1.0 - p.dropout_p), 0.0), v, kept)
    # NaN in a row's lse shows, also where no key is left to carry it
    return np.where(np.isnan(lse), np.nan, out), lse[:, 0]


def _one_head_backward(
    p: Problem,
    b: int,
    h: int,
    dout: Float64Array,
    out: Float64Array,
    lse: Float64Array,
    dlse: Float64Array,
) -> dict[str, Any]:
    """Go through `_one_head` and `scores` from their last line to the first."""
    s, visible, slope = _scores(p, b, h, derive=True)
    q, k = _queries_and_keys(p, b, h)
    v = np.array(p.v[b, h // p.group, : int(p.kv_lens[b])], np.float64, order="C")
    lse, dlse = lse[:, None], dlse[:, None]

    # out = p_ij / (1 - dropout_p) @ v, where kept
    p_ij = np.where(visible, np.exp(s - lse), 0.0)
    kept = _kept(p, b, h, visible)
    dv = _weighted_sum(np.where(kept, p_ij / (1.0 - p.dropout_p), 0.0).T, dout, kept.T)
    dp = np.where(kept, dout @ v.T / (1.0 - p.dropout_p), 0.0)

    # p_ij = exp(s - lse), and each p_ij is in lse. Of a row that sees nothing no dout counts, be it
    # NaN: out is 0 there
    delta = np.where(out.any(axis=1), (dout * out).sum(axis=1), 0.0)[:, None]
    ds = np.where(visible, p_ij * (dp - delta + dlse), 0.0)

    # lse = log(sum(exp(s)) + exp(sink))
    sink = -np.inf if p.sinks is None else float(p.sinks[h])
    seen = np.exp(sink - lse) * (dlse - delta)
    dsink = 0.0 if sink == -np.inf else float(seen.sum())

    # s = s - slope * |pos - j| + bias
    i, j = np.arange(s.shape[0])[:, None], np.arange(s.shape[1])
    dslope = -(ds * np.abs(i + p.q_offset[b] - j)).sum()
    dbias = ds

    # s = score_mod(scale * (q @ k.T))
    ds = np.where(visible, ds * slope, 0.0)
    dq = p.scale * _weighted_sum(ds, k, visible)
    dk = p.scale * _weighted_sum(ds.T, q, visible.T)
    one = {"q": dq, "k": dk, "v": dv}
    return one | {"bias": dbias, "sinks": dsink, "alibi_slopes": dslope}


def _kept(p: Problem, b: int, h: int, visible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which visible keys dropout keeps: the value of one that it drops is not read."""
    if p.dropout_p == 0.0:
        return visible
    i, j = np.arange(visible.shape[0])[:, None], np.arange(visible.shape[1])
    return visible & keep(b, h, i, j, p.seed, p.dropout_p)


def _add_broadcast(total: Float64Array, b: int, h: int, x: Float64Array) -> None:
    """Add what one head does to an array that was broadcast to ``(B, Hq, Nq, Nk)``."""
    place = total[b if total.shape[0] > 1 else 0, h if total.shape[1] > 1 else 0]
    for axis, n in enumerate(place.shape):
        if n == 1:
            x = x.sum(axis=axis, keepdims=True)
    place[: x.shape[0], : x.shape[1]] += x


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
    s, visible, _ = _scores(p, b, h)
    return s, visible


def _queries_and_keys(p: Problem, b: int, h: int) -> tuple[Float64Array, Float64Array]:
    n_q, n_kv = int(p.q_lens[b]), int(p.kv_lens[b])  # what lies behind does not exist
    q = np.array(p.q[b, h, :n_q], np.float64, order="C")
    k = np.array(p.k[b, h // p.group, :n_kv], np.float64, order="C")
    return q, k


def _scores(
    p: Problem, b: int, h: int, derive: bool = False
) -> tuple[Float64Array, NDArray[np.bool_], Any]:
    """Return what `scores` does, and the derivative of s by ``scale * q @ k.T`` if it is wanted."""
    q, k = _queries_and_keys(p, b, h)
    n_q, n_kv = len(q), len(k)
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
    slope: Any = 1.0
    seen = visible.copy()  # where an index that is out of range is an error
    if p.mask_mod is not None:
        mask_mod = Dense("mask_mod", p.mask_mod, p.compute)
        visible &= mask_mod(item, head, pos, j)
        mask_mod.check_indices(seen)
    for tree in p.score_mods:
        score_mod = Dense("score_mod", tree, p.compute)
        if derive:
            s, own = score_mod.derive(s, item, head, pos, j)
            slope = np.where((slope == 0.0) | (own == 0.0), 0.0, slope * own)
        else:
            s = score_mod(s, item, head, pos, j)
        score_mod.check_indices(seen)
    visible &= s != -np.inf
    if p.bias is not None:
        bias = p.bias[b, h, :n_q, :n_kv].astype(p.compute).astype(np.float64)
        visible &= bias != -np.inf  # selected, not added: it hides a NaN score too
        s = s + bias
        visible &= s != -np.inf
    return np.where(visible, s, -np.inf), visible, slope


def _weighted_sum(p: Float64Array, v: Float64Array, visible: NDArray[np.bool_]) -> Float64Array:
    """Return ``sum_j p[i, j] * v[j]`` over the visible keys, where ``0 * NaN`` counts as seen."""
    finite = np.isfinite(v)
    out: Float64Array = p @ np.where(finite, v, 0.0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        seen = visible[:, j, None] & ~finite[j]
        out += np.where(seen, p[:, j, None] * v[j], 0.0)
    return out
