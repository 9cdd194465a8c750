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
from .arrays import NOWHERE, strided
from .backward import ARGS, PLAN, TILE, WORK, backward_worker
from .launch import forward
from .learning import Learning
from .schedule import DQ_PTR, Sizes, schedule
from .tables import table_fields
from .totals import add_up, first_rows
from .visibility import visible
from .workspace import Image, common_areas, image

MOST_PARTIALS = 1 << 26
"""Bytes of partial dq that are kept at once, if more than one key head has to be."""

KEY_ROOM = 16
"""Rows of dk and dv are made in multiples of this: of NR of any tile."""

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
def plan_backward(storage: str, group: int, Nq: int, Nk: int, D: int, Dv: int) -> BackwardPlan:
    """Choose tiles and scratch; compile the kernel if need be."""
    tile, wide = tiles.choose_tile(storage, 1 << 20), tiles.wide_tile(storage)
    block_kv = tiles.backward_block_kv(storage, D, Dv)
    at_once = max(1, min(TILES_AT_ONCE, -(-Nq // tile.lanes)))
    fields = {
        "group": group,
        "Nq": Nq,
        "Nk": Nk,
        "D": D,
        "Dv": Dv,
        "block_kv": block_kv,
        "n_rows": Nq,
        "tiles_at_once": at_once,
        "dq_columns": -(-D // tile.NR) * tile.NR,
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
        **dict.fromkeys(("raw_ptr", "derivs_ptr", "plain_ptr", "hidden_ptr"), f["probs_stride"]),
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
    rows = ("lse_row_ptr", "delta_row_ptr", "sums_ptr")
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
        may be of the compute dtype, as `forward` leaves it in `exact`. Of a packed call
        ``(1, Hq, Tq, Dv)``, and so on.
    lse, dlse : ndarray
        ``(B, Hq, Nq)``, contiguous: the log-sum-exp, and its gradient if it has one.
    wrt : frozenset of str
        Among "q", "k", "v", "bias", "sinks", "alibi_slopes" and names of what the score_mod is
        bound to.
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
    if out.dtype != p.compute and wrt <= {"v"}:
        out = out.astype(p.compute)  # which does not matter to dv
    elif out.dtype != p.compute:
        out = _unrounded(p, out, lse, None if progress is None else part_of(progress, 0.0, 2 / 7))
        progress = None if progress is None else part_of(progress, 2 / 7, 1.0)
    found: dict[str, NDArray[Any]] = {}
    # Of a row that sees nothing, out is 0; the kernel writes the others.
    delta = np.zeros(lse.shape, p.compute) if dlse is None else -dlse
    plan = plan_backward(p.storage, p.group, p.Nq, p.Nk, p.D, p.Dv)
    storage = dtypes.compute_name(p.dtype) if exact else p.storage
    dtype = dtypes.storage_dtype(storage)
    dq = np.zeros(p.q.shape, dtype) if "q" in wrt else None
    rooms, room_starts = _rooms(p)
    dk, dv = (
        np.zeros((*rooms, plan.fields[depth]), p.compute) if name in wrt else None
        for name, depth in (("k", "padded_D"), ("v", "padded_Dv"))
    )
    dbias, columns = None, False
    strides: tuple[int, ...] = (0, 0, 0, 0)
    # Items, and heads, that add to the same elements run one after the other.
    items_apart = heads_apart = by_row = False
    if "bias" in wrt:
        assert p.bias_shape is not None
        shape = p.bias_shape
        by_row = shape[3] == 1 and p.Nk != 1
        if not by_row:
            dbias = np.zeros(shape, p.compute)
            columns = shape[2] == 1 and p.Nq != 1
            strides = tuple(0 if n == 1 else s for n, s in zip(shape, dbias.strides, strict=True))
            items_apart, heads_apart = shape[0] < p.B, shape[1] < p.Hq
    learnt = Learning(p, wrt, plan.tile)
    runs, n_splits = schedule(
        Sizes(
            shape=p.q.shape,
            Hkv=p.Hkv,
            q_lens=p.q_lens.tobytes(),
            kv_lens=p.kv_lens.tobytes(),
            q_starts=None if p.q_starts is None else p.q_starts.tobytes(),
            lanes=plan.tile.lanes,
            block_kv=plan.fields["block_kv"],
            itemsize=p.compute.itemsize,
            dq_itemsize=0 if dq is None else dq.itemsize,
            rounded=dtype != p.compute,
            most_partials=MOST_PARTIALS,
            items_apart=items_apart,
            heads_apart=heads_apart,
            learnt_bytes=learnt.n_bytes,
        )
    )
    sums = (int(n_splits.max(initial=1)), *lse.shape)
    row_sum = np.zeros(sums, p.compute) if by_row else None
    functions = tile_functions.bind(p, plan.tile, packed=False, derive=True)
    each = 10 * (p.D + p.Dv) + 100
    fields = {
        "q": strided(p.q, p.q_starts),
        "k": strided(p.k, p.kv_starts),
        "v": strided(p.v, p.kv_starts),
        "dout": strided(dout, p.q_starts),
        "out": strided(out, p.q_starts),
        "lse": strided(lse[..., None], p.q_starts),
        "dlse": NOWHERE if dlse is None else strided(dlse[..., None], p.q_starts),
        "delta": strided(delta[..., None], p.q_starts),
        "wants_dq": dq is not None,
        "dk": NOWHERE if dk is None else strided(dk, room_starts),
        "dv": NOWHERE if dv is None else strided(dv, room_starts),
        "dbias_ptr": jobs.address(dbias),
        **dict(zip(("dbias_b", "dbias_h", "dbias_i", "dbias_j"), strides, strict=True)),
        "bias_columns": columns,
        "row_sum": NOWHERE if row_sum is None else strided(row_sum[0][..., None], p.q_starts),
        "sums_part": lse.nbytes,
        "learn_functions": learnt.functions,
        "plan_ptr": plan.record.ctypes.data,
        "visible": visible(p),
        "scale": p.scale,
        "kept": 1.0 - p.dropout_p,
        **functions.fields,
    }
    keepalive = (p, dout, out, lse, dlse, delta, dk, dv, room_starts, dbias, row_sum, learnt)
    for run in runs:
        table = run.table.copy()
        partials = np.zeros(run.room, p.compute) if run.room else None
        table[:, DQ_PTR] += np.where(run.partial, jobs.address(partials), jobs.address(dq))
        flops = float(p.group * run.pairs) * each
        tables = learnt.tables(run.n_tasks, MOST_PARTIALS)
        alone = flops < jobs.TINY or (run.n_tasks > 1 and len(tables) == 1)
        error_flags = jobs.run_job(
            plan.worker,
            ARGS,
            fields
            | {
                "tasks": table_fields(table),
                "learnt_ptr": tables.ctypes.data,
                "learnt_task": tables.strides[0] if len(tables) == run.n_tasks else 0,
            },
            n_tasks=run.n_tasks,
            n_threads=1 if alone else jobs.thread_count(),
            scratch_bytes=plan.image.n_bytes,
            flops=flops,
            keepalive=(keepalive, dq, partials, table, plan, functions, tables),
            progress=progress,
        )
        score.raise_for_flags(functions.names, error_flags)
        learnt.add(tables)
        if dq is not None and partials is not None:
            add_up(
                **run.sums | {"total_ptr": run.sums["total_ptr"] + dq.ctypes.data},
                D=p.D,
                part_row=p.D * p.compute.itemsize,
                total_row=dq.strides[2],
                storage=storage,
                keepalive=(partials, dq),
                parts_ptr=table[run.partial, DQ_PTR],
            )
    if dq is not None:
        found["q"] = dq
    for name, x, like in (("k", dk, p.k), ("v", dv, p.v)):
        if x is None:
            continue
        if dtype == p.compute and p.kv_starts is None:
            found[name] = np.ascontiguousarray(x[:, :, : like.shape[2], : like.shape[3]])
            continue
        total = found[name] = np.zeros(like.shape, dtype)
        every = np.arange(p.B)
        add_up(
            p.kv_lens,
            heads=p.Hkv,
            D=like.shape[3],
            part_row=x.strides[2],
            total_row=total.strides[2],
            storage=storage,
            keepalive=(x, total),
            parts_ptr=first_rows(x, every, room_starts),
            part_head=x.strides[1],
            part_bytes=0,
            n_parts=1,
            total_ptr=first_rows(total, every, p.kv_starts),
            total_head=total.strides[1],
        )
    with np.errstate(all="ignore"):
        if "sinks" in wrt:
            found["sinks"] = _sink_gradient(p, lse, delta)
        if dbias is not None:
            found["bias"] = dbias
        if row_sum is not None:
            found["bias"] = _bias_of_rows(p, row_sum)
    found |= learnt.gradients()
    return found


def _rooms(p: Problem) -> tuple[tuple[int, int, int], NDArray[np.int64] | None]:
    """Return the shape of what dk and dv are added up in, but for columns, and where items begin.

    Keys are written in whole groups: each item has room for its last one.
    """
    if p.kv_starts is None:
        return (p.B, p.Hkv, -(-p.Nk // KEY_ROOM) * KEY_ROOM), None
    ends = np.cumsum(-(-p.kv_lens // KEY_ROOM) * KEY_ROOM)
    return (1, p.Hkv, int(ends[-1]) if p.B else 0), np.concatenate([[0], ends[:-1]])


def _bias_of_rows(p: Problem, row_sum: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of a bias that is the same for all keys, from sums over them."""
    assert p.bias_shape is not None
    total = row_sum.sum(axis=0)[..., None]
    if p.q_starts is None:
        axes = tuple(n for n in range(3) if p.bias_shape[n] == 1 and total.shape[n] != 1)
        whole: NDArray[Any] = total.sum(axis=axes, keepdims=True) if axes else total
        return whole
    gradient = np.zeros(p.bias_shape, p.compute)
    for b in range(p.B):
        at, rows = p.q_place(b)
        own = total[at, :, rows]
        axes = tuple(n for n in range(2) if p.bias_shape[n + 1] == 1)
        own = own.sum(axis=axes, keepdims=True) if axes else own
        gradient[b if p.bias_shape[0] > 1 else 0, :, : own.shape[1]] += own
    return gradient


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
    exists = p.exists[:, None]
    weight = np.exp(np.where(exists, p.sinks[None, :, None] - lse, -np.inf))
    share = np.where(exists & (p.sinks != -np.inf)[None, :, None], -weight * delta, 0.0)
    gradient: NDArray[Any] = share.sum(axis=(0, 2), dtype=np.float64).astype(p.compute)
    return gradient
