"""What attention means: the dense float64 computation, one head at a time, written to be read.

It builds the whole ``Nq x Nk`` matrix and hurries nothing. Every other backend is tested against
it, so it imports nothing fast and shares no code with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..call.problem import Problem
from ..call.progress import Progress
from ..functions.binding import Combination
from ..functions.dropout import keep
from ..functions.learning import PREFIX, Place, leaves
from ..functions.on_arrays import ArrayFunction

Float64Array = NDArray[np.float64]


OFFERS = frozenset({"forward", "backward", "jvp", "observe", "weights"})
KEEPS_EXACT = True
LEARNS = True


def refusals(problem: Problem, task: str, arrays: dict[str, Any]) -> list[str]:
    """Return why the backend cannot do a call: it can do all."""
    return []


def forward(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    exact: NDArray[Any] | None = None,
    progress: Progress | None = None,
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
    exact : ndarray, optional
        As `out`, of the compute dtype and 0; written, too.
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
    problem = problem.gathered(np.dtype(np.float64))
    # NaN, Inf and overflow are data here, whatever the caller's np.seterr says
    with np.errstate(all="ignore"):
        for b in range(problem.B):
            at, n = problem.q_place(b)
            for h in range(problem.Hq):
                rows, own_lse = _one_head(problem, b, h)
                out[at, h, n], lse[at, h, n] = rows, own_lse
                if exact is not None:
                    exact[at, h, n] = rows
                if progress is not None:
                    progress((b * problem.Hq + h + 1) / (problem.B * problem.Hq))
        nothing = np.broadcast_to(~problem.exists[:, None], lse.shape)
        out[nothing], lse[nothing] = 0.0, -np.inf


def backward(
    problem: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
    *,
    exact: bool = False,
    progress: Progress | None = None,
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
        Among "q", "k", "v", "bias", "sinks", "alibi_slopes" and names of what the score_mod is
        bound to.
    exact : bool, default False
        All gradients are exact here, whatever it is.
    progress : callable, optional
        Called with the fraction that is done after each head.

    Returns
    -------
    dict
        A gradient for each name: like q, k and v; of the bias ``problem.bias_shape``; ``(Hq,)``;
        ``(B, Hq)``; that of what is bound.
    """
    p = problem
    shapes = {"q": p.q.shape, "k": p.k.shape, "v": p.v.shape, "bias": p.bias_shape or ()}
    shapes |= {"sinks": (p.Hq,), "alibi_slopes": (p.B, p.Hq)}
    bound = {name: p.place_of(name) for name in wrt if name.startswith(PREFIX)}
    functions = [f for tree in p.score_mods for f in leaves(tree)]
    shapes |= {x: np.shape(functions[at.leaf].values[at.value]) for x, at in bound.items()}
    total = {name: np.zeros(shapes[name]) for name in wrt}
    with np.errstate(all="ignore"):
        for b in range(p.B):
            (at_q, n_q), (at_kv, n_kv) = p.q_place(b), p.kv_place(b)
            for h in range(p.Hq):
                rows = [x[at_q, h, n_q].astype(np.float64) for x in (dout, out, lse)]
                rows.append(np.zeros(len(rows[0])))
                if dlse is not None:
                    rows[3] += dlse[at_q, h, n_q]
                found = _one_head_backward(p, b, h, *rows)
                kv = h // p.group  # summed over the heads of a group
                places: dict[str, Any]
                places = {"q": (at_q, h, n_q), "k": (at_kv, kv, n_kv), "v": (at_kv, kv, n_kv)}
                places |= {"sinks": h, "alibi_slopes": (b, h)}
                for name in wrt - {"bias"} - bound.keys():
                    total[name][places[name]] += found[name]
                for name, place in bound.items():
                    _add_bound(p, b, h, place, found["bias"], total[name])
                if "bias" in wrt:
                    _add_broadcast(total["bias"], b, h, found["bias"])
                if progress is not None:
                    progress((b * p.Hq + h + 1) / (p.B * p.Hq))
    return total


def jvp(
    problem: Problem,
    directions: tuple[NDArray[Any] | None, ...],
    out: NDArray[Any],
    lse: NDArray[Any],
    dout: NDArray[Any],
    dlse: NDArray[Any],
    *,
    progress: Progress | None = None,
) -> None:
    """Write the attention of a problem, and what it changes by along a direction.

    Parameters
    ----------
    problem : Problem
        The call.
    directions : tuple of (ndarray or None)
        What q, k and v change by, like these; None for what does not change.
    out, lse, dout, dlse : ndarray
        The results and their changes, as in `forward`; written.
    progress : callable, optional
        Called with the fraction that is done after each head.

    Raises
    ------
    TypeError, IndexError
        As `forward` does.
    """
    p = problem
    dq, dk, dv = (
        np.broadcast_to(np.float64(0.0), like.shape) if x is None else x
        for x, like in zip(directions, (p.q, p.k, p.v), strict=True)
    )
    forward(p, out, lse, progress=progress)
    dout[...], dlse[...] = 0.0, 0.0
    with np.errstate(all="ignore"):
        for b in range(p.B):
            (at_q, n_q), (at_kv, n_kv) = p.q_place(b), p.kv_place(b)
            for h in range(p.Hq):
                kv = h // p.group
                own = dq[at_q, h, n_q], dk[at_kv, kv, n_kv], dv[at_kv, kv, n_kv]
                exact = (np.array(x, np.float64, order="C") for x in own)
                dout[at_q, h, n_q], dlse[at_q, h, n_q] = _one_head_jvp(p, b, h, *exact)


def _one_head_jvp(
    p: Problem, b: int, h: int, dq: Float64Array, dk: Float64Array, dv: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Differentiate `_one_head`, line by line."""
    s, visible, slope = _scores(p, b, h, derive=True)
    (q, k), v = _queries_and_keys(p, b, h), _values(p, b, h)
    ds = p.scale * (dq @ k.T + q @ dk.T)
    ds = np.where(visible & (slope != 0.0) & (ds != 0.0), ds * slope, 0.0)
    p_ij, lse = _softmax(p, h, s)
    # lse = log(sum(exp(s)) + exp(sink)), and p_ij = exp(s - lse)
    dlse = np.where(visible, p_ij * ds, 0.0).sum(axis=1)
    dp = np.where(visible, p_ij * (ds - dlse[:, None]), 0.0)
    # out = p_ij / (1 - dropout_p) @ v, where kept
    kept = _kept(p, b, h, visible)
    dp, p_ij = (np.where(kept, x / (1.0 - p.dropout_p), 0.0) for x in (dp, p_ij))
    dout = _weighted_sum(dp, v, kept) + _weighted_sum(p_ij, dv, kept)
    nan = np.isnan(lse)
    return np.where(nan[:, None], np.nan, dout), np.where(nan, np.nan, dlse)


def weights(problem: Problem, rows: NDArray[np.int64]) -> Float64Array:
    """Return the softmax's weights of chosen rows, before dropout.

    Parameters
    ----------
    problem : Problem
        The call; its values are not read.
    rows : ndarray of int64
        ``(R,)`` row numbers from 0 to ``Nq - 1``, in any order, some of them several times.

    Returns
    -------
    ndarray of float64
        ``(B, Hq, R, Nk)``. 0 at hidden keys, in rows past q_lens too; NaN at the visible keys of a
        row whose log-sum-exp is NaN.

    Raises
    ------
    TypeError, IndexError
        As `forward` does for a score_mod or mask_mod.
    """
    p = problem
    found = np.zeros((p.B, p.Hq, len(rows), p.Nk))
    with np.errstate(all="ignore"):
        for b in range(p.B):
            exist = rows < p.q_lens[b]
            for h in range(p.Hq):
                s, visible = scores(p, b, h, rows[exist])
                w, _ = _softmax(p, h, s)
                found[b, h, exist, : int(p.kv_lens[b])] = np.where(visible, w, 0.0)
    return found


def observe(
    problem: Problem,
    *,
    size: tuple[int, int] | None,
    stats: bool,
    progress: Progress | None = None,
) -> dict[str, NDArray[Any]]:
    """Return what there is to see of the softmax's weights, before dropout.

    Parameters
    ----------
    problem : Problem
        The call; its values are not read.
    size : tuple of int or None
        ``(s0, s1)``: into how many blocks the rows and the keys are cut, at most as many as there
        are. Row ``i`` is in block ``i * s0 // Nq``, key ``j`` in block ``j * s1 // Nk``.
    stats : bool
        Whether to describe each row.
    progress : callable, optional
        Called with the fraction that is done after each head.

    Returns
    -------
    dict
        In the compute dtype: "lse", ``(B, Hq, Nq)``; with `size` "map", ``(B, Hq, s0, s1)``, the
        sum of the weights of each block; with `stats` "entropy" and "max_weight", ``(B, Hq, Nq)``,
        and beside them "argmax" in int64, the first key of the largest score. They are 0, 0 and -1
        of a row that sees no key, and NaN, NaN and -1 of one whose log-sum-exp is NaN.

    Raises
    ------
    TypeError, IndexError
        As `forward` does for a score_mod or mask_mod.
    """
    p = problem
    rows = (p.B, p.Hq, p.Nq)
    found: dict[str, NDArray[Any]] = {"lse": np.full(rows, -np.inf, p.compute)}
    if size is not None:
        found["map"] = np.zeros((p.B, p.Hq, *size), p.compute)
    if stats:
        found |= {name: np.zeros(rows, p.compute) for name in ("entropy", "max_weight")}
        found["argmax"] = np.full(rows, -1, np.int64)
    with np.errstate(all="ignore"):
        for b in range(p.B):
            n_q, n_kv = int(p.q_lens[b]), int(p.kv_lens[b])
            at: tuple[Any, ...]
            for h in range(p.Hq):
                at = (b, h, slice(n_q))
                s, visible = scores(p, b, h)
                w, lse = _softmax(p, h, s)
                w = np.where(visible, w, 0.0)
                found["lse"][at] = lse
                if size is not None and all(size):
                    whole = np.zeros((p.Nq, p.Nk))
                    whole[:n_q, :n_kv] = w
                    found["map"][b, h] = _block_sums(whole, size)
                if stats:
                    bad = np.isnan(lse)
                    terms = np.where(w == 0.0, 0.0, w * np.log(w))
                    found["entropy"][at] = np.where(bad, np.nan, 0.0 - terms.sum(axis=1))
                    found["max_weight"][at] = np.where(bad, np.nan, w.max(axis=1, initial=0.0))
                    none = bad | ~visible.any(axis=1)
                    # by score: of a row with a large sink all weights may underflow to 0
                    found["argmax"][at] = np.where(none, -1, s.argmax(axis=1)) if n_kv else -1
                if progress is not None:
                    progress((b * p.Hq + h + 1) / (p.B * p.Hq))
    return found


def _block_sums(x: Float64Array, size: tuple[int, int]) -> Float64Array:
    """Add up what lies in each block of rows and columns; there are no more blocks than those."""
    for axis, blocks in enumerate(size):
        n = x.shape[axis]
        first = -(-np.arange(blocks) * n // blocks)  # the smallest i with i * blocks // n == block
        x = np.add.reduceat(x, first, axis=axis)
    return x


def _softmax(p: Problem, h: int, s: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the weights of scores and the log-sum-exp of each row.

    Of an empty row, and at hidden keys of one that is NaN, the weights mean nothing.
    """
    # exp(s - lse) would lose the digits of a large s: take out the maximum first
    sink = -np.inf if p.sinks is None else float(p.sinks[h])
    row_max = np.maximum(s.max(axis=1, keepdims=True, initial=-np.inf), sink)
    row_max = np.where(row_max == -np.inf, 0.0, row_max)  # an empty row has none
    weight = np.exp(s - row_max)  # 0 where hidden
    row_sum = weight.sum(axis=1, keepdims=True) + np.exp(sink - row_max)
    lse = row_max + np.log(row_sum)
    return weight / row_sum, lse[:, 0]


def _one_head(p: Problem, b: int, h: int) -> tuple[Float64Array, Float64Array]:
    s, visible = scores(p, b, h)
    v = _values(p, b, h)
    p_ij, lse = _softmax(p, h, s)
    kept = _kept(p, b, h, visible)
    out = _weighted_sum(np.where(kept, p_ij / (1.0 - p.dropout_p), 0.0), v, kept)
    # NaN in a row's lse shows, also where no key is left to carry it
    return np.where(np.isnan(lse)[:, None], np.nan, out), lse


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
    v = _values(p, b, h)
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
    distance = np.abs(i + p.q_offset[b] - j)
    dslope = -np.where(distance == 0, 0.0, ds * distance).sum()  # 0 times inf is 0 here
    dbias = ds

    # s = score_mod(scale * (q @ k.T))
    ds = np.where(visible, ds * slope, 0.0)
    dq = p.scale * _weighted_sum(ds, k, visible)
    dk = p.scale * _weighted_sum(ds.T, q, visible.T)
    one = {"q": dq, "k": dk, "v": dv}
    return one | {"bias": dbias, "sinks": dsink, "alibi_slopes": dslope}


def _add_bound(
    p: Problem, b: int, h: int, place: Place, ds: Float64Array, total: Float64Array
) -> None:
    """Add what one head's scores say of a bound value, where the modifiers read it.

    ``total[index] += ds * d(score) / d(value[index])``, for one reading after the other.
    """
    q, k = _queries_and_keys(p, b, h)
    j = np.arange(len(k))[None, :]
    pos = np.arange(len(q))[:, None] + p.q_offset[b]
    every = ArrayFunction("score_mod", Combination("compose", p.score_mods), p.compute, place)
    item, head = np.full((1, 1), b), np.full((1, 1), h)
    for slope, index in every.readings(p.scale * (q @ k.T), item, head, pos, j):
        share = np.where((ds == 0.0) | (slope == 0.0), 0.0, ds * slope)
        if index:
            np.add.at(total, tuple(np.broadcast_to(i, ds.shape) for i in index), share)
        else:
            total += share.sum()


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


def scores(
    p: Problem, b: int, h: int, rows: NDArray[np.int64] | None = None
) -> tuple[Float64Array, NDArray[np.bool_]]:
    """Return the scores of one head and which keys each row sees.

    Parameters
    ----------
    p : Problem
        The call.
    b, h : int
        Batch item and query head.
    rows : ndarray of int64, optional
        Which rows, each below the item's q_len; all of them by default.

    Returns
    -------
    s : ndarray of float64
        ``(q_len, kv_len)``, after modifiers, ALiBi and bias; -inf where hidden. Of chosen rows
        ``(R, kv_len)``.
    visible : ndarray of bool
        As s.
    """
    s, visible, _ = _scores(p, b, h, rows=rows)
    return s, visible


def _queries_and_keys(
    p: Problem, b: int, h: int, rows: NDArray[np.int64] | None = None
) -> tuple[Float64Array, Float64Array]:
    (at_q, n_q), (at_kv, n_kv) = p.q_place(b), p.kv_place(b)  # what lies behind does not exist
    q = p.q[at_q, h, n_q] if rows is None else p.q[at_q, h, n_q][rows]
    k = np.array(p.k[at_kv, h // p.group, n_kv], np.float64, order="C")
    return np.array(q, np.float64, order="C"), k


def _values(p: Problem, b: int, h: int) -> Float64Array:
    at, n = p.kv_place(b)
    return np.array(p.v[at, h // p.group, n], np.float64, order="C")


def _scores(
    p: Problem, b: int, h: int, derive: bool = False, rows: NDArray[np.int64] | None = None
) -> tuple[Float64Array, NDArray[np.bool_], Any]:
    """Return what `scores` does, and the derivative of s by ``scale * q @ k.T`` if it is wanted."""
    q, k = _queries_and_keys(p, b, h, rows)
    n_kv = len(k)
    rows = np.arange(len(q)) if rows is None else rows
    i = rows[:, None]
    j = np.arange(n_kv)[None, :]
    lo, hi = p.visible_range(b, i)
    visible = (lo <= j) & (j < hi)
    if p.mask is not None:
        visible &= p.mask[b, h, rows, :n_kv]

    # one element each, not numbers: an array broadcasts, and a Python `if` on it is refused
    item, head = np.full((1, 1), b), np.full((1, 1), h)
    pos = i + p.q_offset[b]
    s = p.scale * (q @ k.T)
    slope: Any = 1.0
    seen = visible.copy()  # where an index that is out of range is an error
    if p.mask_mod is not None:
        mask_mod = ArrayFunction("mask_mod", p.mask_mod, p.compute)
        visible &= mask_mod(item, head, pos, j)
        mask_mod.check_indices(seen)
    for tree in p.score_mods:
        score_mod = ArrayFunction("score_mod", tree, p.compute)
        if derive:
            s, own = score_mod.derive(s, item, head, pos, j)
            slope = np.where((slope == 0.0) | (own == 0.0), 0.0, slope * own)
        else:
            s = score_mod(s, item, head, pos, j)
        score_mod.check_indices(seen)
    visible &= s != -np.inf
    if p.bias is not None:
        bias = p.bias[b, h, rows, :n_kv].astype(p.compute).astype(np.float64)
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
