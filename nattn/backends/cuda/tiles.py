"""Tile sizes: what a block owns, streams and keeps in registers."""

from __future__ import annotations

from dataclasses import dataclass

from .target import SIMULATED


@dataclass(frozen=True)
class BlockTile:
    """How a block is cut.

    Threads form a grid of `ty` times `tx`. Each owns ``rows / ty`` times ``columns / tx`` scores
    and, of what is accumulated over the streamed side, ``rows / ty`` times ``width / tx`` sums.

    Attributes
    ----------
    storage : str
        How q, k, v are stored.
    rows : int
        Rows that a block owns: queries, or keys where those are owned.
    columns : int
        Rows of the other side that one step streams, a multiple of 4.
    ty, tx : int
        Threads along rows and columns.
    depth : int
        Terms of a dot product, or streamed rows, in shared memory at once.
    width : int
        Columns of the sums: the head dimension, rounded up, or a chunk of it.
    wide : bool
        Whether rows of q, k, v may be read four elements at a time.
    """

    storage: str
    rows: int
    columns: int
    ty: int
    tx: int
    depth: int
    width: int
    wide: bool

    @property
    def dtype(self) -> str:
        """The type in which is computed."""
        return "float64" if self.storage == "float64" else "float32"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.ty * self.tx

    @property
    def itemsize(self) -> int:
        """Bytes of a number in shared memory."""
        return 8 if self.storage == "float64" else 4

    @property
    def threads_per_row(self) -> int:
        """Threads that share a row where one thread changes the scores of a row."""
        return self.threads // self.rows


def rounded(D: int) -> int:
    """Return the width of the sums for a head dimension; larger ones go in chunks of 256."""
    if SIMULATED:
        return 4 if D <= 4 else 8
    return next((n for n in (32, 64, 96, 128, 192) if n >= D), 256)


def query_tile(storage: str, Dv: int, wide: bool, few: bool) -> BlockTile:
    """Return how blocks are cut that own queries, in the forward pass.

    Parameters
    ----------
    storage : str
        How q, k and v are stored.
    Dv : int
        Head dimension of the values.
    wide : bool
        Whether rows may be read four elements at a time.
    few : bool
        Whether there are few queries, so that reading the keys is what takes the time.
    """
    width = rounded(Dv)
    if SIMULATED:
        sizes = (2, 4, 1, 4, 4) if few else (4, 4, 2, 2, 4)
    elif few:
        sizes = (16, 128, 4, 32, 8 if storage == "float64" else 16)
    elif storage != "float64":
        sizes = (128, 64, 16, 8, 16) if width <= 64 else (128, 64, 16, 16, 16)
        if width > 128:
            sizes = (64, 64, 16, 16, 16)
    else:
        sizes = (64, 64, 16, 8, 8) if width <= 64 else (64, 64, 16, 16, 8)
        if width > 128:
            sizes = (32, 64, 8, 16, 8)
    return BlockTile(storage, *sizes, width, wide)


FEW_ROWS = 2 if SIMULATED else 16
"""Query rows of a key head up to which they count as few."""


def split_keys(kv_len: int) -> int:
    """Return how many keys of an item one block streams where queries are few.

    By the item's own length alone, so that its bits depend on nothing else; at most 64 blocks.
    """
    if SIMULATED:
        return 8
    return 1024 * max(1, -(-kv_len // (64 * 1024)))


# The backward pass: two tiles of scores in shared memory


def row_tile(storage: str, D: int, wide: bool) -> BlockTile:
    """Return how blocks are cut that own queries, for the gradient of q."""
    width = rounded(D)
    if SIMULATED:
        sizes = (2, 4, 1, 4, 4)
    elif storage != "float64":
        sizes = (64, 64, 8, 16, 16) if width <= 128 else (64, 64, 16, 16, 8)
    else:
        sizes = (32, 64, 8, 16, 8 if width <= 128 else 4)
    return BlockTile(storage, *sizes, width, wide)


def key_tile(storage: str, D: int, wide: bool) -> BlockTile:
    """Return how blocks are cut that own keys; D is the larger of both head dimensions.

    A thread holds its sums for dk and for dv: more than 128 columns, or 64 of float64, go in
    chunks, for both to stay in registers.
    """
    width = rounded(D)
    if SIMULATED:
        sizes = (4, 4, 2, 2, 4)
    else:
        width = min(width, 64 if storage == "float64" else 128)
        sizes = (64, 64, 8, 16, 16) if width <= 64 else (64, 64, 16, 16, 16)
        if storage == "float64":
            sizes = (32, 64, 8, 16, 8)
    return BlockTile(storage, *sizes, width, wide)


def pair_tile(storage: str, wide: bool) -> BlockTile:
    """Return how blocks are cut that own pairs of queries and keys, for the gradient of a bias."""
    if SIMULATED:
        sizes = (4, 4, 2, 2, 4)
    else:
        # Of float64 4 x 4 scores and as many sums would be more than registers hold.
        sizes = (64, 64, 16, 16, 16) if storage != "float64" else (32, 32, 8, 16, 8)
    return BlockTile(storage, *sizes, 4 * sizes[3], wide)


DELTA_ROWS, DELTA_LANES = (2, 2) if SIMULATED else (16, 8)
"""Rows of a block of the kernel that adds up ``dout * out``, and threads of a row."""

SUM_THREADS = 2 if SIMULATED else 256
"""Threads of a block that adds up one number."""
