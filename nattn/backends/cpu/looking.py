"""Looking at the weights: the forward pass with observers, a part of the rows at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...call.progress import Progress, part_of
from ...vectors.lanes import Tile
from .launch import attend, forward, plan
from .observe import TILES_TOGETHER, Columns, Rows, RowSums, sum_of_rows

MOST_STATE = 8 << 20
"""Bytes that the sums of a map may take at once, if more than a few rows need them."""


def observe(
    problem: Problem,
    *,
    size: tuple[int, int] | None = None,
    stats: bool = False,
    progress: Progress | None = None,
) -> dict[str, NDArray[Any]]:
    """Return what the weights of a problem are like, in one pass over its keys.

    Values are not read, and nothing is dropped. Where a row of a map is NaN, its part of the rows
    takes a second pass.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    size : (int, int), optional
        For a map: row i is in block ``i * size[0] // Nq``, key j in ``j * size[1] // Nk``.
    stats : bool, default False
        Whether each row's statistics are wanted.
    progress : callable, optional
        Called now and then with the fraction that is done.

    Returns
    -------
    dict
        ``lse`` (B, Hq, Nq); ``map`` (B, Hq, *size), the sums of the weights in each block;
        ``entropy``, ``max_weight`` and ``argmax`` (int64, -1 without one), (B, Hq, Nq).
    """
    # The running maximum, too, is one of keys; sinks come in at the end.
    p = replace(problem, v=problem.v[..., :0], Dv=0, dropout_p=0.0, sinks=None)
    pairs = (p.B, p.Hq, p.Nq)
    out, lse = np.empty((*pairs, 0), p.dtype), np.empty(pairs, p.compute)
    found: dict[str, NDArray[Any]] = {"lse": lse}
    if stats:
        found |= {name: np.zeros(pairs, p.compute) for name in ("entropy", "max_weight")}
        found["argmax"] = np.full(pairs, -1, np.int64)
    if size is not None:
        found["map"] = np.zeros((p.B, p.Hq, *size), p.compute)
    if lse.size == 0 or p.Nk == 0:
        forward(replace(p, sinks=problem.sinks), out, lse)
        if stats:  # of a sink that is not finite
            found["entropy"][np.isnan(lse)] = found["max_weight"][np.isnan(lse)] = np.nan
        return found

    sinks = None
    if problem.sinks is not None:
        exists = np.arange(p.Nq) < p.q_lens[:, None, None]
        # a sink of +inf makes its rows NaN, as one of NaN does
        finite = np.where(problem.sinks == np.inf, np.nan, problem.sinks).astype(p.compute)
        sinks = np.where(exists, finite[:, None], np.array(-np.inf, p.compute))
    whole = plan(p.storage, p.B, p.Hq, p.group, p.Nq, p.Nk, p.D, 0, 1)
    n_heads = whole.fields["n_heads"]
    n_streams, n_tiles = p.B * whole.fields["n_streams"], whole.fields["end_tile"]
    streams, tiles_at_once = _at_once(n_streams, n_tiles, size, whole.tile)
    done = 0
    for first in range(0, n_streams, streams):
        end = min(n_streams, first + streams)
        total = None
        if size is not None:
            total = np.zeros((end - first, n_heads * size[0], size[1]))
        for tile in range(0, n_tiles, tiles_at_once):
            end_tile = min(n_tiles, tile + tiles_at_once)
            rows = Rows(
                whole.tile, whole.fields["n_streams"], n_heads, p.Nq, first, end, tile, end_tile
            )
            part = None
            if progress is not None:
                part = part_of(progress, done / lse.size, (done + rows.n_rows) / lse.size)
            done += rows.n_rows
            _look(p, rows, out, sinks, size, found, total, part)
        if size is not None and total is not None:
            heads = slice(first * n_heads, end * n_heads)
            found["map"].reshape(p.B * p.Hq, *size)[heads] = total.reshape(-1, *size)
    return found


def _at_once(
    n_streams: int, n_tiles: int, size: tuple[int, int] | None, tile: Tile
) -> tuple[int, int]:
    """Return of how many streams, and how many tiles of each, a map is made at once.

    So many that `MOST_STATE` bytes are enough, if they can be; of a part of a stream's tiles whole
    groups that `sum_of_rows` adds up first.
    """
    if size is None or size[1] == 0:
        return n_streams, n_tiles
    most = MOST_STATE // (2 * size[1] * tile.lanes * tile.itemsize)
    streams = max(1, min(n_streams, most // min(n_tiles, TILES_TOGETHER)))
    return streams, max(1, most // streams // TILES_TOGETHER) * TILES_TOGETHER


def _look(
    p: Problem,
    rows: Rows,
    out: NDArray[Any],
    all_sinks: NDArray[Any] | None,
    size: tuple[int, int] | None,
    found: dict[str, NDArray[Any]],
    total: NDArray[np.float64] | None,
    progress: Progress | None,
) -> None:
    """Write what there is to see in some rows to `found`, and add their map to `total`."""
    sums = RowSums(rows) if "entropy" in found else None
    columns = None if size is None else Columns(rows, p.Nk, size[1])
    both = tuple(x.function for x in (columns, sums) if x is not None)
    attend(p, out, found["lse"], rows=rows, observers=both, progress=progress)
    sinks = None if all_sinks is None else rows.of_streams(all_sinks)
    with np.errstate(all="ignore"):
        lse = rows.of_streams(found["lse"])
        if sinks is not None:
            np.logaddexp(lse, sinks, out=lse)
        nan = np.isnan(lse)
        if sums is not None:
            entropy, largest, argmax = sums.stats(sinks)
            rows.of_streams(found["entropy"])[...] = np.where(nan, np.nan, entropy)
            rows.of_streams(found["max_weight"])[...] = np.where(nan, np.nan, largest)
            rows.of_streams(found["argmax"])[...] = np.where(nan, -1, argmax)
        if size is not None and columns is not None and total is not None:
            weights = columns.weights(sinks)
            if nan.any():
                # NaN shows where the row sees a key, whatever has become of its weight.
                seen = Columns(rows, p.Nk, size[1], count=True)
                again = np.empty_like(found["lse"])
                attend(p, out, again, rows=rows, observers=(seen.function,), skip_hidden=True)
                weights[nan] = np.where(seen.counts()[nan] > 0, np.nan, 0.0)
            sum_of_rows(weights, rows, size[0], total)
