"""Sizes: the register tile of a processor, blocks of keys, and what one task takes.

Results must not depend on the number of threads or on batch-mates: what decides the order of
arithmetic here (the tile, `block_kv`) follows from the item's own sizes and the processor alone.
`tiles_per_task` decides only which tiles share one read of a key block.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...vectors.dtypes import compute_dtype
from ...vectors.lanes import Tile
from ...vectors.processor import processor
from ...vectors.storage import SIZES
from .jit import compiling

STORAGE = ("float16", "bfloat16", "float32", "float64")
"""How arrays may be stored."""

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
        found = processor()
    if found.is_arm:
        family = "NEON"
    elif "avx512f" in found.features:
        family = "AVX-512"
    elif "avx" in found.features:
        family = "AVX2" if "fma" in found.features else "AVX"
    else:
        family = "SSE2"
    return Cpu(found.name, found.features, family)


BFLOAT16_PRODUCTS = {"float32": "fma", "pairs": "pairs", "emulated": "emulated pairs"}
"""How bfloat16 numbers may be multiplied, by the value of NATTN_BFLOAT16 that asks for it."""


@functools.cache
def bfloat16_product() -> str:
    """Return how bfloat16 numbers are multiplied: one of `vectors.lanes.types.PRODUCTS`.

    In pairs where that is faster than float32's multiply-add. Intel's processors with AVX512-BF16
    have it for the sake of AMX: they do one dot product in the time of four multiply-adds, half the
    work (measured, Emerald Rapids). AMD's do twice the work. The environment variable
    NATTN_BFLOAT16 overrides that.

    Raises
    ------
    ValueError
        If NATTN_BFLOAT16 is neither empty nor a key of `BFLOAT16_PRODUCTS`.
    RuntimeError
        If it asks for an instruction that the processor does not have.
    """
    c = cpu()
    has_pairs = {"avx512bf16", "avx512vl"} <= c.features
    asked = os.environ.get("NATTN_BFLOAT16", "")
    if not asked:
        asked = "pairs" if has_pairs and c.name.startswith("znver") else "float32"
    if asked not in BFLOAT16_PRODUCTS:
        expected = ", ".join(map(repr, BFLOAT16_PRODUCTS))
        raise ValueError(f"NATTN_BFLOAT16: expected {expected} or nothing, got {asked!r}")
    if asked == "pairs" and not has_pairs:
        raise RuntimeError(
            "NATTN_BFLOAT16: expected 'float32' or 'emulated' on a processor without AVX512-BF16, "
            f"got 'pairs' on {c.name}"
        )
    return BFLOAT16_PRODUCTS[asked]


def _tile(storage: str, MV: int, NR: int) -> Tile:
    """Return a register tile for arrays that are stored so.

    The tile of emulated pairs is small: it is for tests, and what lanes do takes long to compile.
    """
    dtype = compute_dtype(storage).name
    product = bfloat16_product() if storage == "bfloat16" else "fma"
    if product == "emulated pairs":
        MV, NR = 1, 4
    return Tile(dtype, cpu().vector_bytes // SIZES[dtype], MV, NR, storage, product)


def _wide_shape() -> tuple[int, int]:
    """Return MV and NR of the tile for many rows.

    It keeps MV * NR accumulators, MV vectors and one broadcast in registers; without FMA the
    product needs one more.
    """
    c = cpu()
    if c.registers >= 32:
        return 3, 8
    return (3, 4) if c.fma else (2, 4)


@functools.cache
def choose_tile(storage: str, rows: int) -> Tile:
    """Return the register tile for a stream of so many query rows.

    Few rows take one vector and more keys at a time.
    """
    wide = _tile(storage, *_wide_shape())
    return wide if rows > wide.W else _tile(storage, 1, 16 if cpu().registers >= 32 else 8)


@functools.cache
def decode_tile(storage: str, rows: int) -> Tile:
    """Return the register tile of decoding: NR rows with keys, or with MV vectors of columns."""
    few = _tile(storage, 4 if cpu().registers >= 32 or rows == 1 else 2, 1)
    return Tile(few.dtype, few.W, few.MV, 1 if rows == 1 else min(4, few.W))


MOST_DECODED_ROWS = 32
"""Query rows of a key head, of all heads of its group together, up to which its keys are split and
the head dimension lies in lanes. Measured, there the forward kernel is as fast."""


@functools.cache
def block_kv(storage: str, D: int) -> int:
    """Return the number of keys in a block.

    The scores of one wide tile take a good half of the first-level cache, and the keys and values
    of the block less than half of the second. Between 128 and 256 keys speed hardly changes. All
    tiles of a storage type use the same blocks: with the order of additions, so do the bits of a
    row.
    """
    size = SIZES[compute_dtype(storage).name]
    lanes = cpu().vector_bytes // size * _wide_shape()[0]
    by_scores = max(128, L1_SHARE // (lanes * size))
    by_keys = max(64, L2_SHARE // (4 * D * size))
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


def wide_tile(storage: str) -> Tile:
    """Return the register tile of the products that have the head dimension in lanes."""
    return _tile(storage, 2, 8 if cpu().registers >= 32 else 4)


@functools.cache
def backward_block_kv(storage: str, D: int, Dv: int) -> int:
    """Return the number of keys in a block of the backward pass."""
    size = SIZES[compute_dtype(storage).name]
    return max(64, min(128, 128 * 1024 // (2 * (D + Dv) * size) // 64 * 64))


def padded(depth: int, wide: Tile) -> int:
    """Return a head dimension, completed to whole widths of a register tile."""
    return -(-depth // wide.lanes) * wide.lanes


def split_keys(kv_lens: NDArray[np.int64], block_kv: int) -> NDArray[np.int64]:
    """Return the keys of a split of the backward pass: whole blocks, at most 8 splits of an item.

    They follow from the item's own length, not from its padding.
    """
    blocks = -(-kv_lens // block_kv)
    splits = np.maximum(1, np.minimum(8, kv_lens // 1024))
    keys: NDArray[np.int64] = np.maximum(1, -(-blocks // splits)) * block_kv
    return keys
