"""The forward pass: choose sizes, lay out scratch, run the workers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...call.progress import Progress
from ...vectors.lanes import Tile
from . import jobs, score, tangents, tile_functions, tiles
from .arrays import NOWHERE, forward_arrays, strided
from .forward import ARGS, ITEM, PLAN, TILE, WORK, forward_worker
from .launch_decode import decode, items_of_few_rows
from .observe import Rows
from .tables import NO_TABLE, make_table, table_fields
from .visibility import visible
from .workspace import Image, common_areas, image


@dataclass(frozen=True)
class Plan:
    """How the forward pass cuts up a problem of certain sizes.

    Attributes
    ----------
    worker : int
        Address of the kernel.
    tile : Tile
        Its register tile.
    packed : bool
        Whether the lanes of a tile belong to several heads.
    fields : dict
        The fields of `forward.PLAN`.
    image : Image
        A worker's scratch.
    n_tasks : int
        Number of tasks.
    """

    worker: int
    tile: Tile
    packed: bool
    fields: dict[str, int]
    image: Image
    n_tasks: int

    @functools.cached_property
    def record(self) -> NDArray[np.uint8]:
        """What the workers get of it."""
        return np.frombuffer(PLAN.pack(self.fields), np.uint8)

    @functools.cached_property
    def ptr(self) -> int:
        """Address of `record`."""
        return int(self.record.ctypes.data)

    def of_rows(self, rows: Rows, n_threads: int) -> Plan:
        """Return the plan of some tiles of some streams."""
        n_streams, n_tiles = rows.end_stream - rows.first_stream, rows.end_tile - rows.first_tile
        enough_tasks = -(-n_tiles * n_streams // (tiles.TASKS_PER_THREAD * n_threads))
        per_task = max(1, min(self.fields["tiles_per_task"], enough_tasks))
        tasks_per_stream = -(-n_tiles // per_task)
        tasks = {
            "first_stream": rows.first_stream,
            "first_tile": rows.first_tile,
            "end_tile": rows.end_tile,
            "tiles_per_task": per_task,
            "tasks_per_stream": tasks_per_stream,
        }
        return replace(self, fields=self.fields | tasks, n_tasks=n_streams * tasks_per_stream)


@functools.lru_cache(maxsize=4096)
def plan(
    storage: str,
    B: int,
    Hq: int,
    group: int,
    Nq: int,
    Nk: int,
    D: int,
    Dv: int,
    n_threads: int,
    apart: bool = False,
    moves: bool = False,
) -> Plan:
    """Choose tiles, tasks and scratch; compile the kernel if need be.

    With `apart` each head is a stream of its own, as a table of tasks takes them. With `moves` it
    is the plan of `jvp`, whose tiles and blocks hold twice as much.
    """
    # Heads that share their keys form one stream where together they fit in one tile: separately
    # each would leave most lanes empty.
    packed = group > 1 and Nq * 2 <= tiles.choose_tile(storage, group * Nq).lanes and not apart
    heads = group if packed else 1
    n_streams, n_rows = Hq // heads, Nq * heads
    tile = tiles.choose_tile(storage, n_rows)
    block_kv, twice = tiles.block_kv(storage, D), 1
    if moves:
        tile, block_kv, twice = replace(tile, product="fma"), max(64, block_kv // 128 * 64), 2
    n_tiles = -(-n_rows // tile.lanes)
    per_task = tiles.tiles_per_task(
        tile, block_kv, twice * D, twice * Dv, n_tiles, B * n_streams, n_threads
    )
    tasks_per_stream = -(-n_tiles // per_task)
    padded_Dv = -(-Dv // tile.NR) * tile.NR
    scratch = (_tangent_image if moves else _image)(tile, block_kv, per_task, D, padded_Dv)
    fields = {
        "Hq": Hq,
        "group": group,
        "Nq": Nq,
        "Nk": Nk,
        "D": D,
        "Dv": Dv,
        "block_kv": block_kv,
        "padded_Dv": padded_Dv,
        "n_streams": n_streams,
        "n_heads": heads,
        "n_rows": n_rows,
        "first_stream": 0,
        "first_tile": 0,
        "end_tile": n_tiles,
        "tiles_per_task": per_task,
        "tasks_per_stream": tasks_per_stream,
        "image_ptr": scratch.words.ctypes.data,
        "image_words": scratch.words.size,
    }
    n_tasks = B * n_streams * tasks_per_stream
    worker = tangents.tangent_worker(tile) if moves else forward_worker(tile)
    return Plan(worker, tile, packed, fields, scratch, n_tasks)


def task_table(
    p: Problem, plan: Plan, n_threads: int, items: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], int]:
    """Return the tasks of some items, those that take longest first.

    Parameters
    ----------
    p : Problem
        The call.
    plan : Plan
        Its plan, in which heads are apart.
    n_threads : int
        Number of threads.
    items : ndarray of int64, optional
        Which items; all by default. Rows of the others are not written.

    Returns
    -------
    table : ndarray of int64
        A table of `forward.ITEM`, of items that have rows.
    n_tasks : int
        Number of tasks.
    """
    # Rows past the length of an item are written as 0, but where they are those of the next.
    rows = p.q_lens if p.q_starts is not None else np.full(p.B, p.Nq, np.int64)
    items = np.flatnonzero(rows) if items is None else items[rows[items] > 0]
    n_tiles = -(-rows[items] // plan.tile.lanes)
    enough = -(-int(n_tiles.sum()) * p.Hq // (tiles.TASKS_PER_THREAD * n_threads))
    most = np.minimum(n_tiles, max(1, min(plan.fields["tiles_per_task"], enough)))
    per_task = -(-n_tiles // -(-n_tiles // most))
    order = np.argsort(-per_task * p.kv_lens[items], kind="stable")
    items, n_tiles, per_task = items[order], n_tiles[order], per_task[order]
    tasks_per_stream = -(-n_tiles // per_task)
    n_tasks = p.Hq * tasks_per_stream
    table = make_table(
        ITEM,
        n_tasks,
        item=items,
        n_tiles=n_tiles,
        tiles_per_task=per_task,
        tasks_per_stream=tasks_per_stream,
    )
    return table, int(n_tasks.sum())


def _image(tile: Tile, block_kv: int, n_tiles: int, D: int, padded_Dv: int) -> Image:
    """Lay out a worker's scratch: the areas that `forward.WORK` and `forward.TILE` name."""
    lanes, size = tile.lanes, tile.itemsize
    shared, each = common_areas(tile)
    shared |= {
        "scores_ptr": block_kv * lanes * size,
        "hidden_ptr": block_kv * lanes * size,
        "keys_ptr": block_kv * D * size,
        "values_ptr": block_kv * padded_Dv * size,
        "alpha_ptr": lanes * size,
    }
    each |= {
        "queries_ptr": D * lanes * size,
        "acc_ptr": padded_Dv * lanes * size,
        "row_max_ptr": lanes * size,
        "row_sum_ptr": lanes * size,
    }
    return image(WORK, shared, TILE, each, n_tiles)


def _tangent_image(tile: Tile, block_kv: int, n_tiles: int, D: int, padded_Dv: int) -> Image:
    """Lay out what `tangents.WORK` and `tangents.TILE` name."""
    lanes, size = tile.lanes, tile.itemsize
    shared, each = common_areas(tile)
    shared |= dict.fromkeys(("scores_ptr", "dscores_ptr", "hidden_ptr"), block_kv * lanes * size)
    shared |= {"keys_ptr": block_kv * 2 * D * size}
    shared |= dict.fromkeys(("values_ptr", "dvalues_ptr"), block_kv * padded_Dv * size)
    shared |= dict.fromkeys(("alpha_ptr", "ones_ptr"), lanes * size)
    each |= {"queries_ptr": 2 * D * lanes * size}
    each |= dict.fromkeys(("acc_ptr", "dacc_ptr"), padded_Dv * lanes * size)
    each |= dict.fromkeys(("row_max_ptr", "row_sum_ptr", "mean_ptr"), lanes * size)
    return image(tangents.WORK, shared, tangents.TILE, each, n_tiles)


def forward(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    exact: NDArray[Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the attention of a problem to `out` and its log-sum-exp to `lse`.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype, any strides; written. Of a packed call
        ``(1, Hq, Tq, Dv)``, and so on.
    lse : ndarray
        ``(B, Hq, Nq)``, contiguous; written.
    exact : ndarray, optional
        Of the shape of `out`, in the compute dtype and contiguous: the output as it is before it is
        rounded to the problem's dtype; written.
    progress : callable, optional
        Called now and then with the fraction that is done.
    """
    if lse.size == 0:
        return
    if problem.q_starts is not None:
        first, end = problem.q_extent
        for rows in (slice(first), slice(end, None)):
            out[:, :, rows], lse[:, :, rows] = 0, -np.inf
        if first == end:
            return
    elif problem.Nk == 0:
        _without_keys(problem, out, lse)
        if exact is not None:
            exact[...] = out
        return
    few = items_of_few_rows(problem)
    if len(few) < problem.B:
        items = np.setdiff1d(np.arange(problem.B), few) if few else None
        if problem.pages is None and problem.k_scales is None:
            attend(problem, out, lse, exact=exact, items=items, progress=progress)
        else:
            _attend_gathered(problem, out, lse, items, exact=exact, progress=progress)
    if few:
        decode(problem, out, lse, few, exact=exact, progress=progress)


def _attend_gathered(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    items: NDArray[np.int64] | None,
    *,
    exact: NDArray[Any] | None,
    progress: Progress | None,
) -> None:
    """Do what `attend` does, of keys and values that are brought together first.

    The copy takes time and memory like one query row, and here there are many. It may be of a wider
    dtype than `out`.
    """
    p = problem.gathered()
    if p.dtype == out.dtype:
        attend(p, out, lse, exact=exact, items=items, progress=progress)
        return
    wide = np.empty(out.shape, p.dtype) if exact is None else exact
    attend(p, wide, lse, items=items, progress=progress)
    chosen = slice(None) if items is None else items
    with np.errstate(all="ignore"):
        out[chosen] = wide[chosen]


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
        The call, checked.
    directions : tuple of (ndarray or None)
        What q, k and v change by, like these; None for what does not change.
    out, lse, dout, dlse : ndarray
        The results and their changes, as in `forward`; written.
    progress : callable, optional
        Called now and then with the fraction that is done.
    """
    if lse.size == 0:
        return
    if problem.Nk == 0:
        _without_keys(problem, out, lse)
        nan = np.isnan(lse)  # of a sink that is not finite
        dlse[...] = np.where(nan, np.nan, 0.0)
        dout[...] = np.where(nan[..., None], np.nan, 0.0)
        return
    attend(problem, out, lse, moving=Moving(directions, dout, dlse), progress=progress)


class Moving(NamedTuple):
    """What q, k and v change by (None: not at all), and where the results' changes go."""

    directions: tuple[NDArray[Any] | None, ...]
    dout: NDArray[Any]
    dlse: NDArray[Any]

    def fields(self, p: Problem) -> dict[str, tuple[int, ...]]:
        """Return the fields of `tangents.ARGS` that tell of them."""
        found = {"dout": strided(self.dout, p.q_starts)}
        found["dlse"] = strided(self.dlse[..., None], p.q_starts)
        starts = (p.q_starts, p.kv_starts, p.kv_starts)
        for name, x, start in zip(("dq", "dk", "dv"), self.directions, starts, strict=True):
            found[name] = NOWHERE if x is None else strided(x, start)
        return found


def attend(
    p: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    exact: NDArray[Any] | None = None,
    rows: Rows | None = None,
    items: NDArray[np.int64] | None = None,
    observers: tuple[score.TileFunction, ...] = (),
    skip_hidden: bool = False,
    moving: Moving | None = None,
    progress: Progress | None = None,
) -> None:
    """Do what `forward` does, of a problem with keys, and for some of the rows if so asked.

    `items` are those to compute, by default all. `observers` are tile functions that get the
    probabilities; with `skip_hidden` hidden ones are -0.0. With `moving` it is what `jvp` does.
    """
    # The softmax and each tile function are work, too: some operations for every score.
    extras = tile_functions.count(p) + len(observers)
    n_rows = p.B * p.Hq * p.Nq if rows is None else rows.n_rows
    apart = p.q_starts is not None or items is not None
    pairs = n_rows * p.Nk
    if apart:
        every = slice(None) if items is None else items
        pairs = p.Hq * int(p.q_lens[every] @ p.kv_lens[every])
    flops = float(pairs) * (2 * (p.D + p.Dv) + 40 + 60 * extras) * (1 if moving is None else 3)
    n_threads = 1 if flops < jobs.TINY else jobs.thread_count()
    sizes = p.storage, p.B, p.Hq, p.group, p.Nq, p.Nk, p.D, p.Dv
    chosen = plan(*sizes, n_threads, apart, moving is not None)
    if rows is not None:
        chosen = chosen.of_rows(rows, n_threads)
    table, n_tasks, tasks = None, chosen.n_tasks, NO_TABLE
    if apart:
        table, n_tasks = task_table(p, chosen, n_threads, items)
        tasks = table_fields(table)
        if n_tasks == 0:
            return
    functions = tile_functions.NONE
    if extras:
        functions = tile_functions.bind(
            p,
            chosen.tile,
            packed=chosen.packed,
            derive=moving is not None,
            observers=observers,
        )
    fields = {
        **forward_arrays(p, out, lse, exact),
        "plan_ptr": chosen.ptr,
        "tasks": tasks,
        "visible": visible(p),
        "sinks_ptr": jobs.address(p.sinks),
        "scale": p.scale,
        "kept": 1.0 - p.dropout_p,
        **functions.fields,
    }
    record = ARGS
    if moving is None:
        fields["skip_hidden"] = skip_hidden
    else:
        record = tangents.ARGS
        fields |= moving.fields(p)
        del fields["exact"]
    error_flags = jobs.run_job(
        chosen.worker,
        record,
        fields,
        n_tasks=n_tasks,
        n_threads=n_threads,
        scratch_bytes=chosen.image.n_bytes,
        flops=flops,
        keepalive=(p, out, lse, exact, moving, chosen, table, functions),
        progress=progress,
    )
    if error_flags:
        score.raise_for_flags(functions.names, error_flags)


def _without_keys(p: Problem, out: NDArray[Any], lse: NDArray[Any]) -> None:
    """Write what a problem without keys gives: nothing, or the sinks alone."""
    out[...] = 0
    lse[...] = -np.inf
    if p.sinks is None:
        return
    exists = p.exists[:, None, :, None]
    sinks = p.sinks[None, :, None]
    with np.errstate(invalid="ignore"):
        # a sink that is not finite makes its rows NaN
        none = np.where(sinks == -np.inf, 0.0, sinks - sinks).astype(p.compute)
        lse[...] = np.where(exists[..., 0], sinks + none, lse)
        out[...] = np.where(exists, none[..., None], 0.0)
