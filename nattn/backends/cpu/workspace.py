"""The scratch of a worker: records of ready addresses, and the areas that they point to.

At its beginning lies one record for what all tiles of a task share, and behind it one for each
tile. The host knows where everything lies relative to the beginning: that is the image of the
records, made once for a plan. A worker copies it and adds the address of its own scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...vectors.lanes import Struct, Tile, read_int64, view, write_int64
from .jit import device
from .score import CONTEXT

SHARED = ("tiles_ptr", "tile_max_ptr", "bounds_ptr", "table_ptr", "temp_ptr", "context_ptr")
"""What every workspace has: the tiles' records; a value for each lane; what `visibility.hide` and
tile functions (`score.CONTEXT`) get."""

OF_A_TILE = (
    # addresses of an int64 for each lane: its head, its query row, the keys lo <= j < hi that it
    # sees; and of the kinds of each row of the block mask that the tile meets
    *("lane_head_ptr", "lane_row_ptr", "lane_lo_ptr", "lane_hi_ptr", "block_rows_ptr"),
    # the keys lo <= j < hi that causal, window and lengths leave to some lane, and to all
    *("lo", "hi", "full_lo", "full_hi"),
    # lanes that hold a row; rows of the block mask that the tile meets; whether it is written
    *("n_valid", "n_block_rows", "done"),
    # in the block of keys at hand: those to visit, and those of them that a mask function hides
    *("begin", "end", "mixed_begin", "mixed_end"),
)
"""What the record of every tile has; the steps of `visibility` read and write it."""


class Image(NamedTuple):
    """A workspace, relative to its beginning.

    Attributes
    ----------
    words : ndarray of int64
        The records, in which addresses are offsets.
    n_bytes : int
        The size of the whole workspace.
    """

    words: NDArray[np.int64]
    n_bytes: int


def common_areas(tile: Tile) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of the areas that all tiles share, and of those of each, in every pass."""
    lanes, size = tile.lanes, tile.itemsize
    shared = {
        "tile_max_ptr": lanes * size,
        "bounds_ptr": 2 * lanes * 4,
        "table_ptr": lanes * 8,
        "temp_ptr": tile.W * tile.W * size,
        "context_ptr": CONTEXT.size,
    }
    each = ("lane_head_ptr", "lane_row_ptr", "lane_lo_ptr", "lane_hi_ptr", "block_rows_ptr")
    return shared, dict.fromkeys(each, lanes * 8)


def image(
    work: Struct, shared: dict[str, int], tile: Struct, each: dict[str, int], n_tiles: int
) -> Image:
    """Place the areas of a workspace, each on a cache line.

    Parameters
    ----------
    work, tile : Struct
        The record for all tiles, and that of each.
    shared, each : dict
        Bytes of the area that each address of theirs points to. Other fields begin with 0.
    n_tiles : int
        Number of tiles.
    """
    end = work.size + n_tiles * tile.size

    def place(record: Struct, areas: dict[str, int]) -> list[int]:
        nonlocal end
        words = [0] * (record.size // 8)
        for name, size in areas.items():
            offset, _ = record.field(name)
            end = -(-end // 64) * 64
            words[offset // 8] = end
            end += size
        return words

    words = place(work, shared)
    words[work.field("tiles_ptr")[0] // 8] = work.size
    for _ in range(n_tiles):
        words += place(tile, each)
    return Image(np.array(words, np.int64), end)


@device
def lay_out(scratch, image_ptr, n_words):
    """Make the records of a workspace: addresses of what were offsets."""
    for n in range(n_words):
        write_int64(scratch + 8 * n, read_int64(image_ptr + 8 * n) + scratch)


@device
def context_of(tile, work, mask_ptr):
    """Return what the tile functions of a workspace get, with what is the same for all tiles."""
    context = view(CONTEXT, work.context_ptr)
    context.vectors, context.mask_ptr = tile.MV, mask_ptr
    context.tile_max_ptr = work.tile_max_ptr
    context.table_ptr, context.temp_ptr = work.table_ptr, work.temp_ptr
    return context
