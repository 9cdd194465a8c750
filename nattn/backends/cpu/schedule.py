"""The order of the backward pass: which tasks run together, and where their partial dq lie.

It follows from sizes alone, and is kept: the calls of a training loop find it ready.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import tiles
from .backward import ITEM
from .tables import make_table

DQ_PTR = ITEM.names.index("dq_ptr")
"""The column of a table that holds addresses of dq."""


class Sizes(NamedTuple):
    """What a schedule depends on.

    Attributes
    ----------
    shape : tuple of int
        That of q and of dq, which is contiguous.
    Hkv : int
        Key heads.
    q_lens, kv_lens, q_starts : bytes
        Those of the problem, which are int64; `q_starts` may be None.
    lanes, block_kv : int
        Rows of a tile, keys of a block.
    itemsize, dq_itemsize : int
        Bytes of a number that is computed with, and of one of dq; 0 if that is not wanted.
    rounded : bool
        Whether dq is rounded in the end, so that not even a single partial dq can be dq itself.
    most_partials : int
        Bytes of partial dq that are kept at once, if more than one key head has to be.
    items_apart, heads_apart : bool
        Whether items, or even key heads, add to the same elements of a gradient.
    learnt_bytes : int
        Bytes of the gradients of bound values, which each task has of its own.
    """

    shape: tuple[int, ...]
    Hkv: int
    q_lens: bytes
    kv_lens: bytes
    q_starts: bytes | None
    lanes: int
    block_kv: int
    itemsize: int
    dq_itemsize: int
    rounded: bool
    most_partials: int
    items_apart: bool
    heads_apart: bool
    learnt_bytes: int


class Run(NamedTuple):
    """Tasks that run together.

    Attributes
    ----------
    table : ndarray of int64
        A table of `backward.ITEM`. Its addresses of dq count from the beginning of dq, or of the
        partial dq of the run where an item has some.
    n_tasks, pairs : int
        Number of tasks; of pairs of rows and keys, in all key heads.
    room : int
        Numbers of partial dq.
    partial : ndarray of bool
        Which items have some.
    sums : dict
        What `totals.add_up` takes of those; `total_ptr` counts from the beginning of dq.
    """

    table: NDArray[np.int64]
    n_tasks: int
    pairs: int
    room: int
    partial: NDArray[np.bool_]
    sums: dict[str, Any]


@functools.lru_cache(maxsize=64)
def schedule(sizes: Sizes) -> tuple[tuple[Run, ...], NDArray[np.int64]]:
    """Return the runs of a backward pass, and the number of splits of each item's keys.

    The tasks that take longest come first, in each run and of all runs.
    """
    z = sizes
    q_lens, kv_lens = np.frombuffer(z.q_lens, np.int64), np.frombuffer(z.kv_lens, np.int64)
    split_keys = tiles.split_keys(kv_lens, z.block_kv)
    n_splits = np.maximum(1, -(-kv_lens // split_keys))
    Hq, N, D = z.shape[1:]
    group = Hq // z.Hkv if z.Hkv else 1
    first_rows = np.arange(len(q_lens)) * Hq * N
    if z.q_starts is not None:
        first_rows = np.frombuffer(z.q_starts, np.int64)
    head_numbers = group * D * n_splits * q_lens
    if not z.dq_itemsize:
        head_numbers = np.zeros_like(q_lens)
    elif not z.rounded:
        head_numbers = np.where(n_splits == 1, 0, head_numbers)

    work = q_lens * kv_lens
    order = np.flatnonzero(work) if Hq else np.zeros(0, np.int64)
    order = order[np.argsort(-(work // n_splits)[order], kind="stable")]
    own = head_numbers * z.itemsize + n_splits * z.learnt_bytes
    sizes_in_order = own[order] * z.Hkv
    made = []
    for begin, end, first, heads in _runs(sizes_in_order.tolist(), z):
        of = order[begin:end]
        itself = (first_rows[of] + first * group * N) * D * z.dq_itemsize
        # partial dq of an item: (splits, heads, rows, D)
        room = head_numbers[of] * heads
        ends = np.cumsum(room)
        row = D * z.itemsize
        partial = room > 0
        where = {
            "dq_ptr": np.where(partial, (ends - room) * z.itemsize, itself),
            "dq_head": np.where(partial, q_lens[of] * row, N * D * z.dq_itemsize),
            "dq_part": np.where(partial, q_lens[of] * row * group * heads, 0),
        }
        n_tasks = heads * n_splits[of]
        table = make_table(
            ITEM,
            n_tasks,
            item=of,
            first_kv_head=first,
            n_tiles=-(-q_lens[of] // z.lanes),
            n_splits=n_splits[of],
            split_keys=split_keys[of],
            **where,
        )
        sums = {
            "n_rows": q_lens[of][partial],
            "heads": heads * group,
            "part_head": where["dq_head"][partial],
            "part_bytes": where["dq_part"][partial],
            "n_parts": n_splits[of][partial],
            "total_ptr": itself[partial],
            "total_head": N * D * z.dq_itemsize,
        }
        pairs = heads * int(work[of].sum())
        made.append(Run(table, int(n_tasks.sum()), pairs, int(ends[-1]), partial, sums))
    return tuple(made), n_splits


def _runs(sizes: list[int], z: Sizes) -> Iterator[tuple[int, int, int, int]]:
    """Yield what runs together: the first item and the end, the first key head and their number.

    As many as there is room for, where `sizes` are the bytes of partial dq of all key heads of
    each item; of what is apart one at a time.
    """
    begin, taken = 0, 0
    for n, size in enumerate(sizes):
        if begin < n and (z.items_apart or z.heads_apart or taken + size > z.most_partials):
            yield begin, n, 0, z.Hkv
            begin, taken = n, 0
        taken += size
        if z.heads_apart or size > z.most_partials:
            at_once = 1 if z.heads_apart else max(1, z.most_partials * z.Hkv // size)
            for first in range(0, z.Hkv, at_once):
                yield n, n + 1, first, min(at_once, z.Hkv - first)
            begin, taken = n + 1, 0
    if begin < len(sizes):
        yield begin, len(sizes), 0, z.Hkv
