"""Sizes: the register tile of a processor, blocks of keys, and what one task takes.

Results must not depend on the number of threads or on batch-mates: what decides the order of
arithmetic here (the tile, `block_kv`) follows from the item's own sizes and the processor alone.
`tiles_per_task` decides only which tiles share one read of a key block.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba.core.registry import cpu_target

from ...vectors.lanes import Tile
from .jit import compiling

STATE_BYTES = 96
CONTEXT_BYTES = 128
"""Room for the records `forward.STATE` and `score.CONTEXT`."""

AREAS = (
    *("queries", "acc", "row_max", "row_sum", "lane_lo", "lane_hi", "lane_head", "lane_row"),
    *("block_rows", "states", "scores", "marks", "keys", "values"),
    *("alpha", "top", "bounds", "table", "context", "temp"),
)
"""A worker's scratch areas: see `scratch_layout`."""

TASKS_PER_THREAD = 16
"""A problem is cut into so many tasks for each thread, if it has so many tiles: while one thread
is at its last task, the others have nothing to do."""

L1_SHARE = 18 * 1024
"""Bytes of first-level cache for the scores of one tile; processors have 32 KiB or more."""

L2_SHARE = 384 * 1024
"""Bytes of second-level cache that one task may fill; today's processors have 512 KiB or more."""


@dataclass(frozen=True)
class Cpu:
    """What the code generator is told of the processor."""

    name: str
    features: frozenset[str]
    vector_bytes: int
    registers: int
    fma: bool


@functools.cache
def cpu() -> Cpu:
    """Describe the processor that Numba compiles for (which NUMBA_CPU_FEATURES may change)."""
    with compiling:  # the first time, Numba imports half of itself here: a fork has to wait
        triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    have = frozenset(f[1:] for f in features.split(",") if f.startswith("+"))
    if "avx512f" in have:
        return Cpu(name, have, 64, 32, True)
    if "avx" in have:
        return Cpu(name, have, 32, 16, "fma" in have)
    if triple.startswith(("aarch64", "arm64")):
        return Cpu(name, have, 16, 32, True)
    return Cpu(name, have, 16, 16, "fma" in have)


@functools.cache
def choose_tile(dtype: str, rows: int) -> Tile:
    """Return the register tile for a stream of so many query rows.

    The wide tile keeps MV * NR accumulators, MV vectors and one broadcast in registers; without
    FMA the product needs one more. Few rows take one vector and more keys at a time.
    """
    c = cpu()
    width = c.vector_bytes // (4 if dtype == "float32" else 8)
    if c.registers >= 32:
        wide, narrow = (3, 8), (1, 16)
    elif c.fma:
        wide, narrow = (3, 4), (1, 8)
    else:
        wide, narrow = (2, 4), (1, 8)
    return Tile(dtype, width, *(narrow if rows <= width else wide))


@functools.cache
def block_kv(dtype: str, D: int) -> int:
    """Return the number of keys in a block.

    The scores of one wide tile take a good half of the first-level cache, and the keys and values
    of the block less than half of the second. Between 128 and 256 keys speed hardly changes. All
    tiles of a dtype use the same blocks: with the order of additions, so do the bits of a row.
    """
    tile = choose_tile(dtype, 1 << 20)
    by_scores = max(128, L1_SHARE // (tile.lanes * tile.itemsize))
    by_keys = max(64, L2_SHARE // (4 * D * tile.itemsize))
    return min(by_scores, by_keys, 256) // 64 * 64


def _offsets(order: tuple[str, ...], sizes: dict[str, int]) -> dict[str, int]:
    """Return the byte offset of each area, on a cache line, and where they end as "end"."""
    layout, at = {}, 0
    for name in order:
        layout[name] = at
        at += -(-sizes[name] // 64) * 64
    layout["end"] = at
    return layout


def _common_areas(tile: Tile, tiles: int) -> dict[str, int]:
    """Return the sizes of the areas that every pass over the keys needs.

    For each tile: first and last visible key, head and query row ``[lanes]``, rows of a block mask,
    state. For all: one value for each lane, and what tile functions get.
    """
    lanes, size = tile.lanes, tile.itemsize
    per_lane = ("lane_lo", "lane_hi", "lane_head", "lane_row", "block_rows")
    return {
        **dict.fromkeys(per_lane, tiles * lanes * 8),
        "states": tiles * STATE_BYTES,
        "top": lanes * size,
        "bounds": 2 * lanes * 4,
        "table": lanes * 8,
        "context": CONTEXT_BYTES,
        "temp": tile.W * tile.W * size,
    }


def scratch_layout(tile: Tile, block: int, tiles: int, D: int, Dv: int) -> dict[str, int]:
    """Return the byte offset of each of a task's scratch areas, and their size as "end".

    Beside `_common_areas`, per tile of the task: queries ``[D][lanes]``, accumulators
    ``[Dv][lanes]``, running maxima and sums ``[lanes]``. Shared by the tiles: scores and marks
    ``[block][lanes]``, packed keys and values of the block, a factor for each lane.
    """
    size, lanes = tile.itemsize, tile.lanes
    columns = -(-Dv // tile.NR) * tile.NR
    sizes = _common_areas(tile, tiles) | {
        "queries": tiles * D * lanes * size,
        "acc": tiles * columns * lanes * size,
        "row_max": tiles * lanes * size,
        "row_sum": tiles * lanes * size,
        "scores": block * lanes * size,
        "marks": block * lanes * size,
        "keys": block * D * size,
        "values": block * columns * size,
        "alpha": lanes * size,
    }
    return _offsets(AREAS, sizes)


def tiles_per_task(
    tile: Tile, block: int, D: int, Dv: int, tiles: int, streams: int, threads: int
) -> int:
    """Return how many query tiles share one pass over the keys.

    As many as the second-level cache holds beside the block, at most 16 (more saves nothing), and
    few enough that all threads stay busy.
    """
    room = L2_SHARE - block * (D + Dv) * tile.itemsize
    fit = room // ((D + Dv) * tile.lanes * tile.itemsize)
    share = -(-tiles * streams // (TASKS_PER_THREAD * threads))
    most = max(1, min(16, fit, share, tiles))
    return -(-tiles // -(-tiles // most))


def wide_tile(dtype: str) -> Tile:
    """Return the register tile of the products that have the head dimension in lanes."""
    c = cpu()
    width = c.vector_bytes // (4 if dtype == "float32" else 8)
    return Tile(dtype, width, 2, 8 if c.registers >= 32 else 4)


@functools.cache
def backward_block(dtype: str, D: int, Dv: int) -> int:
    """Return the number of keys in a block of the backward pass."""
    size = 4 if dtype == "float32" else 8
    return max(64, min(128, 128 * 1024 // (2 * (D + Dv) * size) // 64 * 64))


def padded(depth: int, wide: Tile) -> int:
    """Return a head dimension, completed to whole widths of a register tile."""
    return -(-depth // wide.lanes) * wide.lanes


def backward_layout(
    tile: Tile, wide: Tile, block: int, tiles: int, D: int, Dv: int, areas: tuple[str, ...]
) -> dict[str, int]:
    """Return the byte offset of each area of `backward.AREAS`, and their size as "end"."""
    size, lanes = tile.itemsize, tile.lanes
    columns = -(-D // tile.NR) * tile.NR
    rows = block + tile.NR
    sizes = _common_areas(tile, tiles) | {
        "queries": tiles * D * lanes * size,
        "douts": tiles * Dv * lanes * size,
        "query_rows": tiles * lanes * padded(D, wide) * size,
        "dout_rows": tiles * lanes * padded(Dv, wide) * size,
        "out_row": padded(Dv, wide) * size,
        "dq_acc": tiles * columns * lanes * size,
        **dict.fromkeys(("lse_rows", "deltas"), tiles * lanes * size),
        **dict.fromkeys(("row_sums", "distance_sums"), tiles * lanes * size),
        **dict.fromkeys(("probs", "dscores"), tiles * rows * lanes * size),
        **dict.fromkeys(("derivs", "plain", "marks"), rows * lanes * size),
        "keys": rows * D * size,
        "values": rows * Dv * size,
        "panels": rows * columns * size,
        "ones": lanes * size,
    }
    return _offsets(areas, sizes)


def part_keys(kv_len: int, block: int) -> int:
    """Return the number of keys in a part of the backward pass: whole blocks, at most eight parts.

    It follows from the item's own length, not from its padding.
    """
    blocks = -(-kv_len // block)
    parts = max(1, min(8, kv_len // 1024))
    return max(1, -(-blocks // parts)) * block
