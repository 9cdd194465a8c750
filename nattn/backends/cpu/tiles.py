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

TASKS_PER_THREAD = 16
"""A problem is cut into so many tasks for each thread, if it has so many tiles: while one thread
is at its last task, the others have nothing to do."""

L1_SHARE = 18 * 1024
"""Bytes of first-level cache for the scores of one tile; processors have 32 KiB or more."""

L2_SHARE = 384 * 1024
"""Bytes of second-level cache that one task may fill; today's processors have 512 KiB or more."""


@dataclass(frozen=True)
class Cpu:
    """What the code generator is told of the processor.

    Attributes
    ----------
    name : str
        That of the model.
    features : frozenset of str
        Its instruction sets.
    family : str
        A key of `FAMILIES`.
    vector_bytes, registers, fma
        As `FAMILIES` has them.
    """

    name: str
    features: frozenset[str]
    family: str

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector register."""
        return FAMILIES[self.family][0]

    @property
    def registers(self) -> int:
        """The number of vector registers."""
        return FAMILIES[self.family][1]

    @property
    def fma(self) -> bool:
        """Whether a multiply-add is one instruction."""
        return FAMILIES[self.family][2]


FAMILIES = {
    "AVX-512": (64, 32, True),
    "AVX2": (32, 16, True),
    "AVX": (32, 16, False),
    "SSE2": (16, 16, False),
    "NEON": (16, 32, True),
}
"""Bytes of a vector, number of registers, and whether there is a fused multiply-add: all that tiles
are chosen by. The tests run the kernels with the tiles of every family, on any processor."""


@functools.cache
def cpu() -> Cpu:
    """Describe the processor that Numba compiles for (which NUMBA_CPU_FEATURES may change)."""
    with compiling:  # the first time, Numba imports half of itself here: a fork has to wait
        triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    have = frozenset(f[1:] for f in features.split(",") if f.startswith("+"))
    if triple.startswith(("aarch64", "arm64")):
        family = "NEON"
    elif "avx512f" in have:
        family = "AVX-512"
    elif "avx" in have:
        family = "AVX2" if "fma" in have else "AVX"
    else:
        family = "SSE2"
    return Cpu(name, have, family)


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


def tiles_per_task(
    tile: Tile, block_kv: int, D: int, Dv: int, tiles: int, streams: int, threads: int
) -> int:
    """Return how many query tiles share one pass over the keys.

    As many as the second-level cache holds beside the block, at most 16 (more saves nothing), and
    few enough that all threads stay busy.
    """
    room = L2_SHARE - block_kv * (D + Dv) * tile.itemsize
    fit = room // ((D + Dv) * tile.lanes * tile.itemsize)
    enough_tasks = -(-tiles * streams // (TASKS_PER_THREAD * threads))
    most = max(1, min(16, fit, enough_tasks, tiles))
    return -(-tiles // -(-tiles // most))


def wide_tile(dtype: str) -> Tile:
    """Return the register tile of the products that have the head dimension in lanes."""
    c = cpu()
    width = c.vector_bytes // (4 if dtype == "float32" else 8)
    return Tile(dtype, width, 2, 8 if c.registers >= 32 else 4)


@functools.cache
def backward_block_kv(dtype: str, D: int, Dv: int) -> int:
    """Return the number of keys in a block of the backward pass."""
    size = 4 if dtype == "float32" else 8
    return max(64, min(128, 128 * 1024 // (2 * (D + Dv) * size) // 64 * 64))


def padded(depth: int, wide: Tile) -> int:
    """Return a head dimension, completed to whole widths of a register tile."""
    return -(-depth // wide.lanes) * wide.lanes


def split_keys(kv_len: int, block_kv: int) -> int:
    """Return the number of keys of a split of the backward pass: whole blocks, at most 8 splits.

    It follows from the item's own length, not from its padding.
    """
    blocks = -(-kv_len // block_kv)
    splits = max(1, min(8, kv_len // 1024))
    return max(1, -(-blocks // splits)) * block_kv
