"""Decoding: which items have few rows, how their keys are split, and the run of the workers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...call.progress import Progress
from ...vectors.lanes import Tile
from ...vectors.storage import SIZES
from . import jobs, score, tile_functions, tiles
from .arrays import NOWHERE, forward_arrays, strided
from .decode import ARGS, PLAN, TILE, WORK, decode_worker
from .decode_steps import CHUNK
from .tables import table_fields
from .visibility import visible
from .workspace import Image, common_areas, image

FLOPS_PER_BYTE = 20.0
"""How many operations take the time in which a byte comes from memory."""

BLOCK_KV = 256
"""Keys of a block: their scores, of a vector of rows, fit in the first-level cache."""

BLOCKS_PER_SPLIT = 2
"""Blocks of a split at least."""

MOST_SPLITS = 64
"""Splits of a key head's keys at most: enough for many threads, few enough to be merged quickly."""


class DecodePlan(NamedTuple):
    """How decoding cuts up problems of certain sizes.

    Attributes
    ----------
    worker : int
        Address of the kernel.
    tile : Tile
        A vector of query rows.
    state_bytes : int
        Bytes of the state that a split leaves.
    record : ndarray
        The fields of `decode.PLAN` as the workers get them.
    image : Image
        A worker's scratch.
    """

    worker: int
    tile: Tile
    state_bytes: int
    record: NDArray[np.uint8]
    image: Image


@functools.lru_cache(maxsize=4096)
def plan_decode(
    storage: str,
    kv_storage: str,
    Hkv: int,
    group: int,
    D: int,
    Dv: int,
    rows: int,
) -> DecodePlan:
    """Choose tiles and scratch for at most so many rows; compile the kernel if need be."""
    tile = replace(tiles.choose_tile(storage, 1), product="fma")
    wide = tiles.decode_tile(storage, rows)
    size, width = tile.itemsize, tile.W
    padded_D, padded_Dv = -(-D // width) * width, -(-Dv // wide.lanes) * wide.lanes
    most_rows = -(-rows // wide.NR) * wide.NR
    padded_rows = -(-most_rows // width) * width
    state_bytes = (most_rows * padded_Dv + 2 * padded_rows) * size
    line = (BLOCK_KV + CHUNK) * size
    shared, each = common_areas(tile)
    shared |= {
        "scores_ptr": width * line,
        "tile_ptr": BLOCK_KV * width * size,
        "offsets_ptr": 8 * width,
        "keys_ptr": CHUNK * padded_D * size,
        "values_ptr": CHUNK * padded_Dv * size,
        **dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), BLOCK_KV * size),
        "row_ptr": padded_Dv * size,
    }
    each |= {"queries_ptr": width * padded_D * size, "row_sums_ptr": width * width * size}
    scratch = image(WORK, shared, TILE, each, padded_rows // width)
    fields = {
        "Hkv": Hkv,
        "group": group,
        "D": D,
        "Dv": Dv,
        "block_kv": BLOCK_KV,
        "padded_D": padded_D,
        "padded_Dv": padded_Dv,
        "scores_stride": line,
        "most_rows": most_rows,
        "padded_rows": padded_rows,
        "state_bytes": state_bytes,
        "image_ptr": scratch.words.ctypes.data,
        "image_words": scratch.words.size,
    }
    cached = Tile(tile.dtype, width, 1, 1, kv_storage)
    worker = decode_worker(tile, wide, cached)
    record = np.frombuffer(PLAN.pack(fields), np.uint8)
    return DecodePlan(worker, tile, state_bytes, record, scratch)


def items_of_few_rows(p: Problem) -> list[int]:
    """Return which items are to be decoded: by their own sizes alone."""
    most = tiles.MOST_DECODED_ROWS // p.group
    return [b for b, q_len in enumerate(p.q_lens.tolist()) if q_len <= most]


def task_table(p: Problem, items: list[int], kv_lens: list[int]) -> tuple[NDArray[np.int64], int]:
    """Return a table of `decode.ITEM` for some items, and the number of tasks.

    A split is whole blocks of keys, and how many there are follows from the item's own length.
    Mostly it is about one item, for which NumPy would take a third of a short call.
    """
    records, first = [], 0
    for b in items:
        blocks = -(-kv_lens[b] // BLOCK_KV)
        each = max(BLOCKS_PER_SPLIT, -(-blocks // MOST_SPLITS))
        n_splits = max(1, -(-blocks // each))
        records.append((first, b, n_splits, each * BLOCK_KV))
        first += n_splits * p.Hkv
    return np.array(records, np.int64), first


def pages(p: Problem) -> tuple[int, ...]:
    """Return the fields of `arrays.PAGES`."""
    if p.pages is None:
        return (0, 0, 0, 0)
    table = p.pages.table
    return (table.ctypes.data, *table.strides, p.pages.page_size)


def decode(
    p: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    items: list[int],
    *,
    exact: NDArray[Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the attention of items that have few rows.

    Parameters
    ----------
    p : Problem
        The call, checked, with keys.
    out, lse, exact, progress
        As in `launch.forward`.
    items : list of int
        Which items.
    """
    q_lens, kv_lens = p.q_lens.tolist(), p.kv_lens.tolist()
    rows = max(q_lens[b] for b in items) * p.group
    chosen = plan_decode(p.storage, p.kv_storage, p.Hkv, p.group, p.D, p.Dv, max(1, rows))
    table, n_tasks = task_table(p, items, kv_lens)
    functions = tile_functions.NONE
    extras = tile_functions.count(p)
    if extras:
        functions = tile_functions.bind(p, chosen.tile, packed=p.group > 1)
    keys = float(sum(kv_lens[b] for b in items)) * p.Hkv
    n_bytes = keys * (p.D + p.Dv) * SIZES[p.kv_storage]
    flops = max(keys * rows * (2 * (p.D + p.Dv) + 40 + 60 * extras), FLOPS_PER_BYTE * n_bytes)
    states = np.empty(n_tasks * chosen.state_bytes, np.uint8)
    done = np.zeros(p.B * p.Hkv, np.int64)
    fields = {
        **forward_arrays(p, out, lse, exact),
        "k_scales": NOWHERE if p.k_scales is None else strided(p.k_scales[..., None]),
        "v_scales": NOWHERE if p.v_scales is None else strided(p.v_scales[..., None]),
        "pages": pages(p),
        "tasks": table_fields(table),
        "states_ptr": states.ctypes.data,
        "done_ptr": done.ctypes.data,
        "Nq": p.Nq,
        "Nk": p.Nk,
        "pads": p.q_starts is None,
        "plan_ptr": chosen.record.ctypes.data,
        "visible": visible(p),
        "sinks_ptr": jobs.address(p.sinks),
        "scale": p.scale,
        "kept": 1.0 - p.dropout_p,
        **functions.fields,
    }
    error_flags = jobs.run_job(
        chosen.worker,
        ARGS,
        fields,
        n_tasks=n_tasks,
        n_threads=1 if flops < jobs.TINY else jobs.thread_count(),
        scratch_bytes=chosen.image.n_bytes,
        flops=flops,
        keepalive=(p, out, lse, exact, chosen, functions, table, states, done),
        progress=progress,
    )
    if error_flags:
        score.raise_for_flags(functions.names, error_flags)
