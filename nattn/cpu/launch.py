"""The door of the CPU backend: choose sizes, lay out scratch, run the workers."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..lanes import Tile
from ..problem import Problem
from . import score, threads, tiles
from .classify import classify
from .forward import ARGS, forward_worker

__all__ = ["classify", "forward"]

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
    worker: int
    sizes: tuple[int, ...]  # the fields of ARGS from Hq to tasks_per_stream
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
        forward_worker(tile),
        (
            *(Hq, group, Nq, Nk, D, Dv, block),
            *(streams, heads, rows, n_tiles, per_task, tasks_per_stream),
        ),
        tuple(layout[name] for name in tiles.AREAS),
        layout["end"],
        B * streams * tasks_per_stream,
    )


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
    p = problem
    if lse.size == 0:
        return
    if p.Nk == 0:
        _without_keys(p, out, lse)
        return
    dtype = "float32" if p.dtype.itemsize == 4 else "float64"
    # The softmax and each tile function are work, too: some operations for every score.
    operands = (p.bias is not None) + (p.mask is not None)
    extras = operands + len(p.score_mods) + (p.mask_mod is not None) + 2 * (p.dropout_p > 0)
    flops = float(p.B * p.Hq * p.Nq * p.Nk) * (2 * (p.D + p.Dv) + 40 + 60 * extras)
    workers = 1 if flops < TINY else threads.thread_count()
    todo = plan(dtype, p.B, p.Hq, p.group, p.Nq, p.Nk, p.D, p.Dv, workers)
    workers = min(workers, todo.n_tasks)
    bound = _tile_functions(p, todo) if extras else _NO_FUNCTIONS
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
        *(p.q_offset.ctypes.data, p.q_lens.ctypes.data, p.kv_lens.ctypes.data),
        *(p.causal, -1 if left is None else left, -1 if right is None else right),
        *bound.words,
        *(0 if p.sinks is None else p.sinks.ctypes.data, bound.mask),
        *_blocks(p),
        ctypes.addressof(control),
        *(-(-scratch.ctypes.data // 64) * 64, todo.scratch_bytes),
        *todo.areas,
        *(p.scale, 1.0 - p.dropout_p),
    )
    keep = (problem, out, lse, scratch, control, bound)
    threads.run(todo.worker, args, control, workers, flops, keep=keep, progress=progress)
    _scratch.give_back(scratch)
    score.raise_outside(bound.names, threads.troubles(control))


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


def _tile_functions(p: Problem, todo: Plan) -> _Functions:
    """Compile and bind what happens to the scores and probabilities of a call."""
    tile = todo.tile
    far = int(np.abs(p.q_offset).max(initial=0)) + max(p.Nq, p.Nk)
    scores = [score.user_function("score_mod", mod, tile, far, todo.packed) for mod in p.score_mods]
    if p.bias is not None:
        scores.append(score.operand_function(tile, p.bias))
    mask = None if p.mask is None else score.operand_function(tile, p.mask)
    if mask is not None:
        scores.append(mask)
    masks = []
    if p.mask_mod is not None:
        masks.append(score.user_function("mask_mod", p.mask_mod, tile, far, todo.packed))
    drops = []
    if p.dropout_p > 0.0:
        drops.append(score.drop_function(tile, p.dropout_p, p.seed, todo.packed))
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
