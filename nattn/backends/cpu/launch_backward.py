"""The backward pass: choose splits and sizes, scratch, run the workers, add what they left."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...call.progress import Progress, part_of
from ...vectors import dtypes
from ...vectors.lanes import Tile
from . import jobs, score, tile_functions, tiles
from .arrays import strided
from .backward import ARGS, PLAN, TILE, WORK, backward_worker
from .launch import TINY, forward
from .totals import add_up
from .visibility import visible
from .workspace import Image, common_areas, image

MOST_PARTIALS = 1 << 26
"""Bytes of partial dq that are kept at once, if more than one key head has to be."""

TILES_AT_ONCE = 4
"""Query tiles that share one pass over the keys."""


class BackwardPlan(NamedTuple):
    """How the backward pass cuts up a problem of certain sizes.

    Attributes
    ----------
    worker : int
        Address of the kernel.
    tile : Tile
        The register tile that has queries in lanes.
    fields : dict
        The fields of `backward.PLAN`.
    record : ndarray
        These as the workers get them.
    image : Image
        A worker's scratch.
    """

    worker: int
    tile: Tile
    fields: dict[str, int]
    record: NDArray[np.uint8]
    image: Image


@functools.lru_cache(maxsize=4096)
def plan_backward(
    storage: str, B: int, Hq: int, Hkv: int, group: int, Nq: int, Nk: int, D: int, Dv: int
) -> BackwardPlan:
    """Choose tiles and scratch; compile the kernel if need be."""
    tile, wide = tiles.choose_tile(storage, 1 << 20), tiles.wide_tile(storage)
    block_kv = tiles.backward_block_kv(storage, D, Dv)
    n_tiles = -(-Nq // tile.lanes)
    at_once = max(1, min(TILES_AT_ONCE, n_tiles))
    fields = {
        "B": B,
        "Hq": Hq,
        "Hkv": Hkv,
        "group": group,
        "Nq": Nq,
        "Nk": Nk,
        "D": D,
        "Dv": Dv,
        "block_kv": block_kv,
        "n_rows": Nq,
        "n_tiles": n_tiles,
        "tile_groups": -(-n_tiles // at_once),
        "tiles_at_once": at_once,
        "dq_columns": -(-D // tile.NR) * tile.NR,
        "padded_Nk": -(-Nk // 16) * 16,
        "padded_D": tiles.padded(D, wide),
        "padded_Dv": tiles.padded(Dv, wide),
        "probs_stride": (block_kv + tile.NR) * tile.lanes * tile.itemsize,
    }
    scratch = _image(tile, at_once, fields)
    fields |= {"image_ptr": scratch.words.ctypes.data, "image_words": scratch.words.size}
    record = np.frombuffer(PLAN.pack(fields), np.uint8)
    return BackwardPlan(backward_worker(tile, wide), tile, fields, record, scratch)


def _image(tile: Tile, n_tiles: int, f: dict[str, int]) -> Image:
    """Lay out a worker's scratch: the areas that `backward.WORK` and `backward.TILE` name."""
    size, lanes = tile.itemsize, tile.lanes
    n_rows = f["block_kv"] + tile.NR
    shared, each = common_areas(tile)
    shared |= {
        **dict.fromkeys(("probs_ptr", "dscores_ptr"), n_tiles * f["probs_stride"]),
        "query_rows_ptr": n_tiles * lanes // tile.per_word * f["padded_D"] * size,
        "dout_rows_ptr": n_tiles * lanes // tile.per_word * f["padded_Dv"] * size,
        **dict.fromkeys(("derivs_ptr", "plain_ptr", "hidden_ptr"), f["probs_stride"]),
        "keys_ptr": n_rows * f["D"] * size,
        "values_ptr": n_rows * f["Dv"] * size,
        "panels_ptr": n_rows * f["dq_columns"] * size,
        **dict.fromkeys(("dout_row_ptr", "out_row_ptr"), f["padded_Dv"] * size),
        "ds_pairs_ptr": f["probs_stride"] // 2 * (tile.per_word - 1),
        "ones_ptr": lanes * size,
    }
    each |= {
        "queries_ptr": f["D"] * lanes * size,
        "douts_ptr": f["Dv"] * lanes * size,
        "dq_acc_ptr": f["dq_columns"] * lanes * size,
    }
    rows = ("lse_row_ptr", "delta_row_ptr", "sums_ptr", "distance_sums_ptr")
    each |= dict.fromkeys(rows, lanes * size)
    return image(WORK, shared, TILE, each, n_tiles)


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
) -> dict[str, NDArray[Any]]:
    """Return the gradients of a problem.

    The keys of an item are cut into at most eight splits, by their number alone. Each split of
    each key head is one task, which owns dk and dv there and leaves a partial dq: with one head
    there is work for eight threads, and the price is up to eight arrays of the size of dq, of as
    many heads at a time as `MOST_PARTIALS` allows. Partial dq are added in the order of the splits.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    dout, out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype: the gradient and the value of the output; this
        may be of the compute dtype, as `forward` leaves it in `exact`.
    lse, dlse : ndarray
        ``(B, Hq, Nq)``, contiguous: the log-sum-exp, and its gradient if it has one.
    wrt : frozenset of str
        Among "q", "k", "v", "bias", "sinks" and "alibi_slopes".
    exact : bool, default False
        Whether the gradients of q, k and v are wanted in the compute dtype, not rounded.
    progress : callable, optional
        Called now and then with the fraction that is done.

    Returns
    -------
    dict
        A gradient for each name: like q, k and v; in the compute dtype that of the bias, of
        ``problem.bias_shape``; ``(Hq,)``; ``(B, Hq)``.

    Notes
    -----
    ``delta = dot(dout, out)`` is subtracted from every element of a row of dP. What rounding `out`
    to 16 bits adds to it does not average out over the keys, as what rounding does to P and dS
    does: dq would be off by that error times the mean of the keys. So with a rounded `out` a
    forward pass comes first, and what it finds takes its place.
    """
    p = problem
    if out.dtype != p.compute:
        out = _unrounded(p, out, lse, None if progress is None else part_of(progress, 0.0, 2 / 7))
        progress = None if progress is None else part_of(progress, 2 / 7, 1.0)
    found: dict[str, NDArray[Any]] = {}
    # Of a row that sees nothing, out is 0; the kernel writes the others.
    delta = np.zeros(lse.shape, p.compute) if dlse is None else -dlse
    plan = plan_backward(p.storage, p.B, p.Hq, p.Hkv, p.group, p.Nq, p.Nk, p.D, p.Dv)
    block_kv = plan.fields["block_kv"]
    split_keys = np.array([tiles.split_keys(int(n), block_kv) for n in p.kv_lens], np.int64)
    n_splits = max(1, int((-(-p.kv_lens // split_keys)).max(initial=1)))

    def made(name: str, *shape: int) -> NDArray[Any] | None:
        return np.zeros(shape, p.compute) if name in wrt else None

    items, padded_Nk = p.B * p.Hkv, plan.fields["padded_Nk"]
    storage = dtypes.compute_name(p.dtype) if exact else p.storage
    dtype = dtypes.storage_dtype(storage)
    dq = np.zeros((p.B, p.Hq, p.Nq, p.D), dtype) if "q" in wrt else None
    # A single partial dq is the gradient itself, if it is not to be rounded.
    direct = n_splits == 1 and dtype == p.compute
    dk = made("k", p.B, p.Hkv, padded_Nk, plan.fields["padded_D"])
    dv = made("v", p.B, p.Hkv, padded_Nk, plan.fields["padded_Dv"])
    dbias, row_sum, columns = None, None, False
    strides: tuple[int, ...] = (0, 0, 0, 0)
    one_by_one = False
    if "bias" in wrt:
        assert p.bias_shape is not None
        shape = p.bias_shape
        if shape[3] == 1 and p.Nk != 1:
            row_sum = np.zeros((n_splits, p.B, p.Hq, p.Nq), p.compute)
        else:
            dbias = np.zeros(shape, p.compute)
            columns = shape[2] == 1 and p.Nq != 1
            strides = tuple(0 if n == 1 else s for n, s in zip(shape, dbias.strides, strict=True))
            # Items that add to the same elements run one after the other.
            one_by_one = shape[0] < p.B or shape[1] < p.Hq
    distance_sum = made("alibi_slopes", n_splits, p.B, p.Hq, p.Nq)
    # How many key heads run together: as many as their partial dq leave room for.
    at_a_time = max(items, 1)
    if dq is not None and not direct:
        size = n_splits * p.group * p.Nq * p.D * p.compute.itemsize
        at_a_time = max(1, MOST_PARTIALS // (size or 1))
    if one_by_one:
        at_a_time = 1
    functions = tile_functions.bind(p, plan.tile, packed=False, derive=True)
    pairs = float(p.group * p.Nq) * p.Nk * (10 * (p.D + p.Dv) + 100)
    fields = {
        "q": strided(p.q),
        "k": strided(p.k),
        "v": strided(p.v),
        "dout": strided(dout),
        "out": strided(out),
        "lse_ptr": lse.ctypes.data,
        "dlse_ptr": jobs.address(dlse),
        "delta_ptr": delta.ctypes.data,
        "dk_ptr": jobs.address(dk),
        "dv_ptr": jobs.address(dv),
        "dbias_ptr": jobs.address(dbias),
        **dict(zip(("dbias_b", "dbias_h", "dbias_i", "dbias_j"), strides, strict=True)),
        "bias_columns": columns,
        "row_sum_ptr": jobs.address(row_sum),
        "distance_sum_ptr": jobs.address(distance_sum),
        "n_splits": n_splits,
        "split_keys_ptr": split_keys.ctypes.data,
        "plan_ptr": plan.record.ctypes.data,
        "visible": visible(p),
        "scale": p.scale,
        "kept": 1.0 - p.dropout_p,
        **functions.fields,
    }
    keepalive = (p, dout, out, lse, dlse, delta, dk, dv, dbias, row_sum, distance_sum)
    for first in range(0, items if p.Hq * p.Nq * p.Nk else 0, at_a_time):
        count = min(at_a_time, items - first)
        own = partials = None
        if dq is not None:
            own = dq.reshape(items, p.group, p.Nq, p.D)[first : first + count]
            partials = own[None] if direct else np.zeros((n_splits, *own.shape), p.compute)
        flops = count * pairs
        error_flags = jobs.run_job(
            plan.worker,
            ARGS,
            fields | {"dq_ptr": jobs.address(partials), "first_item": first, "items": count},
            n_tasks=count * n_splits,
            n_threads=1 if flops < TINY else jobs.thread_count(),
            scratch_bytes=plan.image.n_bytes,
            flops=flops,
            keepalive=(keepalive, split_keys, partials, plan, functions),
            progress=progress,
        )
        score.raise_for_flags(functions.names, error_flags)
        if own is not None and partials is not None and not direct:
            add_up(partials, own, storage)
    if dq is not None:
        found["q"] = dq
    for name, x, like in (("k", dk, p.k), ("v", dv, p.v)):
        if x is None:
            continue
        if dtype == p.compute:
            found[name] = np.ascontiguousarray(x[:, :, : like.shape[2], : like.shape[3]])
        else:
            found[name] = np.empty(like.shape, dtype)
            add_up(x[None], found[name], storage)
    with np.errstate(all="ignore"):
        if "sinks" in wrt:
            found["sinks"] = _sink_gradient(p, lse, delta)
        if dbias is not None:
            found["bias"] = dbias
        if row_sum is not None:
            assert p.bias_shape is not None
            total = row_sum.sum(axis=0)[..., None]
            axes = tuple(n for n in range(3) if p.bias_shape[n] == 1 and total.shape[n] != 1)
            found["bias"] = total.sum(axis=axes, keepdims=True) if axes else total
        if distance_sum is not None:
            found["alibi_slopes"] = -distance_sum.sum(axis=(0, 3))
    return found


def _unrounded(
    p: Problem, out: NDArray[Any], lse: NDArray[Any], progress: Progress | None
) -> NDArray[Any]:
    """Return the output as it was before it was rounded, of rows whose lse is that of this problem.

    Others saw more keys than these: of them the rounded one is all there is.
    """
    exact = np.zeros(out.shape, p.compute)
    again, own_lse = np.empty(out.shape, p.dtype), np.empty(lse.shape, p.compute)
    forward(p, again, own_lse, exact=exact, progress=progress)
    same = np.isclose(own_lse, lse, rtol=0.0, atol=0.0, equal_nan=True)
    if not same.all():
        with np.errstate(all="ignore"):
            exact = np.where(same[..., None], exact, out.astype(p.compute))
    return exact


def _sink_gradient(p: Problem, lse: NDArray[Any], delta: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of each head's sink, which has a share of the sum but no value."""
    assert p.sinks is not None
    exists = np.arange(p.Nq) < p.q_lens[:, None, None]
    weight = np.exp(np.where(exists, p.sinks[None, :, None] - lse, -np.inf))
    share = np.where(exists & (p.sinks != -np.inf)[None, :, None], -weight * delta, 0.0)
    gradient: NDArray[Any] = share.sum(axis=(0, 2), dtype=np.float64).astype(p.compute)
    return gradient
