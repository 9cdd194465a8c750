"""The door of the CPU backend: choose sizes, lay out scratch, run the workers."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...call.progress import part_of
from ...vectors.dtypes import compute_name
from ...vectors.lanes import Tile
from . import backward as back
from . import score, threads, tiles
from .classify import classify
from .forward import ARGS, forward_worker
from .observe import TILES_TOGETHER, Columns, Rows, RowSums, sum_of_rows

__all__ = ["backward", "classify", "forward", "observe"]

TINY = 5e6
"""Below this the calling thread is done before another one would have begun."""

MOST_SPARE = 1 << 24
"""Bytes of scratch that a thread keeps between calls at most."""

_pack = struct.Struct(f"{len(ARGS.integers)}q{len(ARGS.reals)}d").pack


@dataclass(frozen=True)
class Plan:
    """How a problem of certain sizes is cut up."""

    tile: Tile
    packed: bool  # whether the lanes of a tile belong to several heads
    streams: int
    heads: int  # of a stream
    tiles: int
    worker: int
    sizes: tuple[int, ...]  # the fields of ARGS from Hq to rows
    tasks: tuple[int, ...]  # the fields of ARGS from first_stream to tasks_per_stream
    areas: tuple[int, ...]
    scratch_bytes: int
    n_tasks: int


@functools.lru_cache(maxsize=4096)
def plan(
    dtype: str, B: int, Hq: int, group: int, Nq: int, Nk: int, D: int, Dv: int, workers: int
) -> Plan:
    """Choose tiles, tasks and scratch; compile the kernel if need be."""
    # Heads that share their keys form one stream where together they fit in one tile: separately
    # each would leave most lanes empty.
    packed = group > 1 and Nq * 2 <= tiles.choose_tile(dtype, group * Nq).lanes
    heads = group if packed else 1
    streams, rows = Hq // heads, Nq * heads
    tile = tiles.choose_tile(dtype, rows)
    block = tiles.block_kv(dtype, D)
    n_tiles = -(-rows // tile.lanes)
    per_task = tiles.tiles_per_task(tile, block, D, Dv, n_tiles, B * streams, workers)
    tasks_per_stream = -(-n_tiles // per_task)
    layout = tiles.scratch_layout(tile, block, per_task, D, Dv)
    return Plan(
        tile,
        packed,
        streams,
        heads,
        n_tiles,
        forward_worker(tile),
        (Hq, group, Nq, Nk, D, Dv, block, streams, heads, rows),
        (0, 0, n_tiles, per_task, tasks_per_stream),
        tuple(layout[name] for name in tiles.AREAS),
        layout["end"],
        B * streams * tasks_per_stream,
    )


def _part(whole: Plan, rows: Rows, workers: int) -> Plan:
    """Return the plan of some tiles of some streams."""
    n_streams, n_tiles = rows.end_stream - rows.first_stream, rows.end_tile - rows.first_tile
    share = -(-n_tiles * n_streams // (tiles.TASKS_PER_THREAD * workers))
    _, _, _, most, _ = whole.tasks
    per_task = max(1, min(most, share))
    tasks_per_stream = -(-n_tiles // per_task)
    tasks = (rows.first_stream, rows.first_tile, rows.end_tile, per_task, tasks_per_stream)
    return replace(whole, tasks=tasks, n_tasks=n_streams * tasks_per_stream)


class _Scratch(threading.local):
    """Scratch memory that the calling thread keeps for its next call."""

    def __init__(self) -> None:
        self.spare: NDArray[np.uint8] | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return at least `size` bytes; a call from within a call (progress) gets its own."""
        spare, self.spare = self.spare, None
        return spare if spare is not None and spare.size >= size else np.empty(size, np.uint8)

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep it, unless it is large."""
        if memory.size <= MOST_SPARE:
            self.spare = memory


_scratch = _Scratch()


def forward(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    progress: threads.Progress | None = None,
) -> None:
    """Write the attention of a problem to `out` and its log-sum-exp to `lse`.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype, any strides; written.
    lse : ndarray
        ``(B, Hq, Nq)``, contiguous; written.
    progress : callable, optional
        Called now and then with the fraction that is done.
    """
    if lse.size == 0:
        return
    if problem.Nk == 0:
        _without_keys(problem, out, lse)
        return
    _run(problem, out, lse, progress=progress)


def _run(
    p: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    rows: Rows | None = None,
    observers: tuple[score.TileFunction, ...] = (),
    careful: bool = False,
    progress: threads.Progress | None = None,
) -> None:
    """Do what `forward` does, for some of the rows if so asked.

    `observers` are tile functions that get the probabilities; with `careful` hidden ones are -0.0.
    """
    dtype = compute_name(p.dtype)
    # The softmax and each tile function are work, too: some operations for every score.
    operands = (p.bias is not None) + (p.mask is not None) + len(observers)
    extras = operands + len(p.score_mods) + (p.mask_mod is not None) + 2 * (p.dropout_p > 0)
    n_rows = p.B * p.Hq * p.Nq if rows is None else rows.n_rows
    flops = float(n_rows * p.Nk) * (2 * (p.D + p.Dv) + 40 + 60 * extras)
    workers = 1 if flops < TINY else threads.thread_count()
    todo = plan(dtype, p.B, p.Hq, p.group, p.Nq, p.Nk, p.D, p.Dv, workers)
    if rows is not None:
        todo = _part(todo, rows, workers)
    workers = min(workers, todo.n_tasks)
    bound = _NO_FUNCTIONS
    if extras:
        bound = _tile_functions(p, todo.tile, todo.packed, observers=observers)
    scratch = _scratch.take(workers * todo.scratch_bytes + 64)
    control = threads.new_control(todo.n_tasks)
    left, right = p.window
    args = _pack(
        *(p.q.ctypes.data, *p.q.strides),
        *(p.k.ctypes.data, *p.k.strides),
        *(p.v.ctypes.data, *p.v.strides),
        *(out.ctypes.data, *out.strides),
        lse.ctypes.data,
        *todo.sizes,
        *todo.tasks,
        *(p.q_offset.ctypes.data, p.q_lens.ctypes.data, p.kv_lens.ctypes.data),
        *(p.causal, -1 if left is None else left, -1 if right is None else right),
        *bound.words,
        careful,
        *(0 if p.sinks is None else p.sinks.ctypes.data, bound.mask),
        *_blocks(p),
        ctypes.addressof(control),
        *(-(-scratch.ctypes.data // 64) * 64, todo.scratch_bytes),
        *todo.areas,
        *(p.scale, 1.0 - p.dropout_p),
    )
    keep = (p, out, lse, scratch, control, bound)
    threads.run(todo.worker, args, control, workers, flops, keep=keep, progress=progress)
    _scratch.give_back(scratch)
    score.raise_for_flags(bound.names, threads.troubles(control))


def _without_keys(p: Problem, out: NDArray[Any], lse: NDArray[Any]) -> None:
    """Write what a problem without keys gives: nothing, or the sinks alone."""
    out[...] = 0
    lse[...] = -np.inf
    if p.sinks is None:
        return
    exists = (np.arange(p.Nq) < p.q_lens[:, None, None])[..., None]
    sinks = p.sinks[None, :, None]
    with np.errstate(invalid="ignore"):
        # a sink that is not finite makes its rows NaN
        none = np.where(sinks == -np.inf, 0.0, sinks - sinks).astype(p.dtype)
        lse[...] = np.where(exists[..., 0], sinks + none, lse)
        out[...] = np.where(exists, none[..., None], out)


@dataclass(frozen=True)
class _Functions:
    """The tile functions of a call.

    Attributes
    ----------
    words : tuple of int
        The fields of ARGS from `functions` to `n_drops`.
    mask : int
        Address of the params of the argument mask, or 0.
    names : tuple of str
        What to call those that may index an array out of range.
    keep : tuple
        What must live while they run.
    """

    words: tuple[int, ...]
    mask: int
    names: tuple[str, ...]
    keep: tuple[Any, ...]


_NO_FUNCTIONS = _Functions((0,) * 6, 0, (), ())


def _tile_functions(
    p: Problem,
    tile: Tile,
    packed: bool,
    derive: bool = False,
    observers: tuple[score.TileFunction, ...] = (),
) -> _Functions:
    """Compile and bind what happens to the scores and probabilities of a call.

    With `derive` the modifiers give their derivative too.
    """
    far = int(np.abs(p.q_offset).max(initial=0)) + max(p.Nq, p.Nk)
    scores = [
        score.user_function("score_mod", mod, tile, far, packed, derive) for mod in p.score_mods
    ]
    if p.bias is not None:
        scores.append(score.operand_function(tile, p.bias))
    mask = None if p.mask is None else score.operand_function(tile, p.mask)
    if mask is not None:
        scores.append(mask)
    masks = []
    if p.mask_mod is not None:
        masks.append(score.user_function("mask_mod", p.mask_mod, tile, far, packed))
    drops = list(observers)
    if p.dropout_p > 0.0:
        drops.append(score.drop_function(tile, p.dropout_p, p.seed, packed))
    words: list[int] = []
    keep: list[Any] = []
    for functions in (scores, masks, drops):
        table = np.array([(f.address, f.params.ctypes.data) for f in functions], np.int64)
        words += [table.ctypes.data, len(functions)]
        keep += [table, functions]
    others = ["bias"] * (p.bias is not None) + ["mask"] * (p.mask is not None)
    names = ["score_mod"] * len(p.score_mods) + others + ["mask_mod"] * len(masks)
    address = 0 if mask is None else mask.params.ctypes.data
    return _Functions(tuple(words), address, tuple(names), tuple(keep))


def _blocks(p: Problem) -> tuple[int, ...]:
    """Return the fields of ARGS from `blocks` to `block_size`."""
    if p.block_mask is None:
        return (0,) * 5
    kinds = p.block_mask.kinds
    b, h, i, _ = kinds.strides
    return (
        kinds.ctypes.data,
        b if kinds.shape[0] > 1 else 0,
        h if kinds.shape[1] > 1 else 0,
        i,
        p.block_mask.block_size,
    )


# Looking at the weights

MOST_STATE = 8 << 20
"""Bytes that the sums of a map may take at once, if more than a few rows need them."""


def observe(
    problem: Problem,
    *,
    size: tuple[int, int] | None = None,
    stats: bool = False,
    progress: threads.Progress | None = None,
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
    whole = plan(compute_name(p.dtype), p.B, p.Hq, p.group, p.Nq, p.Nk, p.D, 0, 1)
    n_streams, n_tiles = p.B * whole.streams, whole.tiles
    streams, tiles_at_once = _at_once(n_streams, n_tiles, size, whole.tile)
    done = 0
    for first in range(0, n_streams, streams):
        end = min(n_streams, first + streams)
        total = None
        if size is not None:
            total = np.zeros((end - first, whole.heads * size[0], size[1]))
        for tile in range(0, n_tiles, tiles_at_once):
            end_tile = min(n_tiles, tile + tiles_at_once)
            rows = Rows(whole.tile, whole.streams, whole.heads, p.Nq, first, end, tile, end_tile)
            part = None
            if progress is not None:
                part = part_of(progress, done / lse.size, (done + rows.n_rows) / lse.size)
            done += rows.n_rows
            _look(p, rows, out, sinks, size, found, total, part)
        if size is not None and total is not None:
            heads = slice(first * whole.heads, end * whole.heads)
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
    progress: threads.Progress | None,
) -> None:
    """Write what there is to see in some rows to `found`, and add their map to `total`."""
    sums = RowSums(rows) if "entropy" in found else None
    columns = None if size is None else Columns(rows, p.Nk, size[1])
    both = tuple(x.function for x in (columns, sums) if x is not None)
    _run(p, out, found["lse"], rows=rows, observers=both, progress=progress)
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
                _run(p, out, again, rows=rows, observers=(seen.function,), careful=True)
                weights[nan] = np.where(seen.counts()[nan] > 0, np.nan, 0.0)
            sum_of_rows(weights, rows, size[0], total)


# The backward pass

MOST_SHARES = 1 << 26
"""Bytes of shares of dq that are kept at once, if more than one key head has to be."""

_pack_backward = struct.Struct(f"{len(back.ARGS.integers)}q{len(back.ARGS.reals)}d").pack


def backward(
    problem: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
    *,
    progress: threads.Progress | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the gradients of a problem.

    The keys of an item are cut into at most eight parts, by their number alone. Each part of each
    key head is one task, which owns dk and dv there and leaves a share of dq: with one head there
    is work for eight threads, and the price is up to eight arrays of the size of dq, of as many
    heads at a time as `MOST_SHARES` allows. Shares are added in the order of the parts.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    dout, out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype: the gradient and the value of the output.
    lse, dlse : ndarray
        ``(B, Hq, Nq)``, contiguous: the log-sum-exp, and its gradient if it has one.
    wrt : frozenset of str
        Among "q", "k", "v", "bias", "sinks" and "alibi_slopes".
    progress : callable, optional
        Called now and then with the fraction that is done.

    Returns
    -------
    dict
        A gradient for each name: like q, k and v; of the bias ``problem.bias_shape``; ``(Hq,)``;
        ``(B, Hq)``.
    """
    p = problem
    dtype = compute_name(p.dtype)
    found: dict[str, NDArray[Any]] = {}
    # Of a row that sees nothing, out is 0; the kernel writes the others.
    delta = np.zeros(lse.shape, p.dtype) if dlse is None else -dlse
    tile, wide = tiles.choose_tile(dtype, 1 << 20), tiles.wide_tile(dtype)
    block = tiles.backward_block(dtype, p.D, p.Dv)
    part_keys = np.array([tiles.part_keys(int(n), block) for n in p.kv_lens], np.int64)
    counts = -(-p.kv_lens // part_keys)
    parts = max(1, int(counts.max(initial=1)))
    n_tiles = -(-p.Nq // tile.lanes)
    at_once = max(1, min(TILES_AT_ONCE, n_tiles))
    groups = -(-n_tiles // at_once)
    layout = tiles.backward_layout(tile, wide, block, at_once, p.D, p.Dv, back.AREAS)
    padded_Nk = -(-p.Nk // 16) * 16
    padded_D, padded_Dv = tiles.padded(p.D, wide), tiles.padded(p.Dv, wide)

    def made(name: str, *shape: int) -> NDArray[Any] | None:
        return np.zeros(shape, p.dtype) if name in wrt else None

    items = p.B * p.Hkv
    dq = made("q", p.B, p.Hq, p.Nq, p.D)
    dk = made("k", p.B, p.Hkv, padded_Nk, padded_D)
    dv = made("v", p.B, p.Hkv, padded_Nk, padded_Dv)
    dbias, row_sum, columns = None, None, False
    strides: tuple[int, ...] = (0, 0, 0, 0)
    one_by_one = False
    if "bias" in wrt:
        assert p.bias_shape is not None
        shape = p.bias_shape
        if shape[3] == 1 and p.Nk != 1:
            row_sum = np.zeros((parts, p.B, p.Hq, p.Nq), p.dtype)
        else:
            dbias = np.zeros(shape, p.dtype)
            columns = shape[2] == 1 and p.Nq != 1
            strides = tuple(0 if n == 1 else s for n, s in zip(shape, dbias.strides, strict=True))
            # Items that add to the same elements run one after the other.
            one_by_one = shape[0] < p.B or shape[1] < p.Hq
    distance_sum = made("alibi_slopes", parts, p.B, p.Hq, p.Nq)
    # How many key heads run together: as many as their shares leave room for.
    at_a_time = max(items, 1)
    if dq is not None and parts > 1:
        at_a_time = max(1, MOST_SHARES // (parts * p.group * p.Nq * p.D * dq.itemsize or 1))
    if one_by_one:
        at_a_time = 1
    bound = _tile_functions(p, tile, packed=False, derive=True)
    left, right = p.window
    pairs = float(p.group * p.Nq) * p.Nk * (10 * (p.D + p.Dv) + 100)
    worker = back.backward_worker(tile, wide)
    for first in range(0, items if p.Hq * p.Nq * p.Nk else 0, at_a_time):
        count = min(at_a_time, items - first)
        own = shares = None
        if dq is not None:
            own = dq.reshape(items, p.group, p.Nq, p.D)[first : first + count]
            # A single share is the gradient itself.
            shares = own[None] if parts == 1 else np.zeros((parts, *own.shape), p.dtype)
        n_tasks = count * parts
        flops = count * pairs
        workers = min(1 if flops < TINY else threads.thread_count(), n_tasks)
        scratch = _scratch.take(workers * layout["end"] + 64)
        control = threads.new_control(n_tasks)
        args = _pack_backward(
            *(p.q.ctypes.data, *p.q.strides),
            *(p.k.ctypes.data, *p.k.strides),
            *(p.v.ctypes.data, *p.v.strides),
            *(dout.ctypes.data, *dout.strides),
            *(out.ctypes.data, *out.strides),
            *(lse.ctypes.data, _address(dlse), delta.ctypes.data),
            *(_address(shares), _address(dk), _address(dv), padded_Nk, padded_D, padded_Dv),
            *(_address(dbias), *strides, columns),
            *(_address(row_sum), _address(distance_sum)),
            *(p.Hq, p.Hkv, p.group, p.Nq, p.Nk, p.D, p.Dv, block),
            *(p.B, first, count, parts, part_keys.ctypes.data),
            *(p.Nq, n_tiles, groups, at_once),
            *(p.q_offset.ctypes.data, p.q_lens.ctypes.data, p.kv_lens.ctypes.data),
            *(p.causal, -1 if left is None else left, -1 if right is None else right),
            *bound.words,
            bound.mask,
            *_blocks(p),
            ctypes.addressof(control),
            *(-(-scratch.ctypes.data // 64) * 64, layout["end"]),
            *(layout[name] for name in back.AREAS),
            *(p.scale, 1.0 - p.dropout_p),
        )
        keep = (p, dout, out, lse, dlse, delta, part_keys, shares, dk, dv, dbias, row_sum)
        threads.run(
            worker,
            args,
            control,
            workers,
            flops,
            keep=(*keep, distance_sum, scratch, control, bound),
            progress=progress,
        )
        _scratch.give_back(scratch)
        score.raise_for_flags(bound.names, threads.troubles(control))
        if own is not None and shares is not None and parts > 1:
            with np.errstate(all="ignore"):
                np.add.reduce(shares, axis=0, out=own)
    if dq is not None:
        found["q"] = dq
    if dk is not None:
        found["k"] = np.ascontiguousarray(dk[:, :, : p.Nk, : p.D])
    if dv is not None:
        found["v"] = np.ascontiguousarray(dv[:, :, : p.Nk, : p.Dv])
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


TILES_AT_ONCE = 4
"""Query tiles that share one pass over the keys in the backward pass."""


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _sink_gradient(p: Problem, lse: NDArray[Any], delta: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of each head's sink, which has a share of the sum but no value."""
    assert p.sinks is not None
    exists = np.arange(p.Nq) < p.q_lens[:, None, None]
    weight = np.exp(np.where(exists, p.sinks[None, :, None] - lse, -np.inf))
    share = np.where(exists & (p.sinks != -np.inf)[None, :, None], -weight * delta, 0.0)
    gradient: NDArray[Any] = share.sum(axis=(0, 2), dtype=np.float64).astype(p.dtype)
    return gradient
