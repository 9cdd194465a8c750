"""Observers: tile functions that look at the probabilities of the forward pass and change nothing.

Where values are not wanted, the forward kernel streams the keys past the queries without its second
product, and an observer adds up what it sees of each tile of probabilities while that lies in L1.
These are relative to the running maximum of their row. So an observer keeps, beside each sum, the
maximum that it is relative to, and shrinks what it has when that grows. What it adds up belongs to
one query row, so that the number of threads changes no bit. In the end, each row is divided by its
own sum.

State lies as the tiles do: ``[stream][tile][...][lane]``. A stream is the rows of one query head,
or of several that fill a tile together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...vectors.lanes import (
    Struct,
    Tile,
    exp2_nonpositive,
    lane_of,
    load,
    read,
    read_int64,
    splat,
    store,
    view,
    write_int64,
)
from .jit import device, kernel
from .score import CONTEXT, SIGNATURE, TileFunction
from .softmax import LOG2E, is_hidden

_PLACE = (
    # address of the state; streams of an item, heads in one, query rows of a head
    *("state_ptr", "streams", "heads", "Nq"),
    # what has state: the first stream of all items; its first tile, and their number; bytes of one
    *("first_stream", "first_tile", "tiles", "tile_bytes"),
)


@device
def state_of(c, p, lanes):
    """Return the address of the state of the tile that the context describes."""
    head = read_int64(c.heads_ptr)
    stream = head // p.heads
    row = (head - stream * p.heads) * p.Nq + read_int64(c.rows_ptr)
    n = (c.batch * p.streams + stream - p.first_stream) * p.tiles + row // lanes - p.first_tile
    return p.state_ptr + n * p.tile_bytes


COLUMNS = Struct("ColumnSums", (*_PLACE, "Nk", "columns", "count"))
"""Params of `add_columns`; with `count` it counts visible keys and adds no probabilities."""

ROWS = Struct("RowSums", (*_PLACE, "argmax_ptr"))
"""Params of `add_rows_up`: `argmax_ptr` is the address of an int64 for each row, placed alike."""


@kernel(SIGNATURE)
def add_columns(tile):
    """Add up the probabilities in each block of columns: key j is in block j * columns // Nk."""
    size, width = tile.itemsize, tile.W

    def function(probs, deriv, context, params):
        c, p = view(CONTEXT, context), view(COLUMNS, params)
        row = c.vectors * width * size
        state = state_of(c, p, c.vectors * width)
        key, end = c.first_key, c.first_key + c.n_keys
        column = key * p.columns // p.Nk
        while key < end:
            stop = min(end, ((column + 1) * p.Nk + p.columns - 1) // p.columns)
            for i in range(c.vectors):
                at = probs + (key - c.first_key) * row + i * width * size
                total = splat(tile, 0.0)
                if p.count:
                    for n in range(stop - key):
                        hidden = is_hidden(load(tile, at + n * row))
                        total += np.where(hidden, splat(tile, 0.0), splat(tile, 1.0))
                else:
                    for n in range(stop - key):
                        total += load(tile, at + n * row)
                sums = state + column * 2 * row + i * width * size
                largest = load(tile, c.row_max_ptr + i * width * size)
                shrink = shrinkage(tile, load(tile, sums + row), largest)
                if p.count:
                    shrink = splat(tile, 1.0)
                store(sums, load(tile, sums) * shrink + total)
                store(sums + row, largest)
            key, column = stop, column + 1
        return 0

    return function


@kernel(SIGNATURE)
def add_rows_up(tile):
    """Keep each row's sum, sum of p * log(p), largest p and the key of that."""
    size, width = tile.itemsize, tile.W

    def function(probs, deriv, context, params):
        c, p = view(CONTEXT, context), view(ROWS, params)
        row = c.vectors * width * size
        state = state_of(c, p, c.vectors * width)
        argmax = p.argmax_ptr + (state - p.state_ptr) // p.tile_bytes * c.vectors * width * 8
        for i in range(c.vectors):
            at = state + i * width * size
            ref, old_total = load(tile, at), load(tile, at + row)
            old_products, old_best = load(tile, at + 2 * row), load(tile, at + 3 * row)
            largest = load(tile, c.row_max_ptr + i * width * size)
            shrink = shrinkage(tile, ref, largest)
            # log(p) of what has been added falls by so much; of nothing it does not matter
            fall = np.where(shrink == 0.0, splat(tile, 0.0), ref - largest)
            best = old_best * shrink
            total, products, most = splat(tile, 0.0), splat(tile, 0.0), splat(tile, 0.0)
            column = probs + i * width * size
            for n in range(c.n_keys):
                x = load(tile, column + n * row)
                total += x
                products += x * np.log(np.where(x == 0.0, splat(tile, 1.0), x))
                most = np.where(x > most, x, most)
            for lane in range(width):
                found = lane_of(tile, most, lane)
                # The maximum may have grown by less than shows in a quotient.
                grown = lane_of(tile, largest, lane) > lane_of(tile, ref, lane) and found > 0.0
                if found > lane_of(tile, best, lane) or grown:
                    n = 0
                    while read(tile, column + n * row + lane * size) != found:
                        n += 1
                    write_int64(argmax + 8 * (i * width + lane), c.first_key + n)
            store(at, largest)
            store(at + row, old_total * shrink + total)
            store(at + 2 * row, (old_products + old_total * fall) * shrink + products)
            store(at + 3 * row, np.where(most > best, most, best))
        return 0

    return function


@device
def shrinkage(tile, ref, largest):
    """Return the factor that makes sums relative to `ref` relative to `largest`."""
    return exp2_nonpositive((ref - np.where(largest == -np.inf, splat(tile, 0.0), largest)) * LOG2E)


class Rows(NamedTuple):
    """The query rows of some tiles of some streams.

    Attributes
    ----------
    tile : Tile
        What the lanes of a tile are.
    streams, heads, Nq : int
        Streams of an item, heads in a stream, query rows of a head.
    first_stream, end_stream : int
        Which streams of all items.
    first_tile, end_tile : int
        Which tiles of each.
    """

    tile: Tile
    streams: int
    heads: int
    Nq: int
    first_stream: int
    end_stream: int
    first_tile: int
    end_tile: int

    @property
    def place(self) -> slice:
        """Which rows of a stream these are."""
        lanes = self.tile.lanes
        end = min(self.end_tile * lanes, self.heads * self.Nq)
        return slice(self.first_tile * lanes, end)

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        each: int = self.place.stop - self.place.start
        return (self.end_stream - self.first_stream) * each

    def new_state(self, *shape: int) -> NDArray[Any]:
        """Return zeros of ``(streams, tiles, *shape, lanes)``."""
        n_streams, n_tiles = self.end_stream - self.first_stream, self.end_tile - self.first_tile
        return np.zeros((n_streams, n_tiles, *shape, self.tile.lanes), self.tile.dtype)

    def words(self, state: NDArray[Any]) -> tuple[int, ...]:
        """Return the params that say where a tile's state lies."""
        n_tiles = self.end_tile - self.first_tile
        numbers = (self.streams, self.heads, self.Nq, self.first_stream, self.first_tile, n_tiles)
        return (state.ctypes.data, *numbers, state.strides[1])

    def in_order(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return ``(streams, tiles, ..., lanes)`` as ``(streams, rows, ...)``, contiguous.

        The order in memory decides that of sums, which must not depend on the number of tiles.
        """
        x = np.ascontiguousarray(np.moveaxis(x, -1, 2))
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        return np.ascontiguousarray(x[:, : self.place.stop - self.place.start])

    def of_streams(self, x: NDArray[Any]) -> NDArray[Any]:
        """View these rows of an array over (B, Hq, Nq) as ``(streams, rows)``."""
        streams = x.reshape(-1, self.heads * self.Nq)
        return streams[self.first_stream : self.end_stream, self.place]


class Columns:
    """The weights of some rows, added up in blocks of columns.

    Parameters
    ----------
    rows : Rows
        Which rows.
    Nk, columns : int
        Keys, and the blocks that they form.
    count : bool, default False
        Count the visible keys of each block, of probabilities in which hidden ones are -0.0.
    """

    def __init__(self, rows: Rows, Nk: int, columns: int, count: bool = False) -> None:
        self.rows = rows
        self.state = rows.new_state(columns, 2)
        self.state[:, :, :, 1] = -np.inf
        params = np.array([*rows.words(self.state), Nk, columns, count], np.int64)
        self.function = TileFunction(add_columns(_one(rows.tile)), params, (self.state,))

    def counts(self) -> NDArray[Any]:
        """Return the number of visible keys, ``(streams, rows, columns)``."""
        return self.rows.in_order(self.state[:, :, :, 0])

    def weights(self, sinks: NDArray[Any] | None) -> NDArray[Any]:
        """Return the sums of weights, ``(streams, rows, columns)``.

        Parameters
        ----------
        sinks : ndarray or None
            The sink of each of the rows, ``(streams, rows)``.
        """
        sums, refs = self.state[:, :, :, 0], self.state[:, :, :, 1]
        largest = self.rows.in_order(refs.max(axis=2, initial=-np.inf))
        weights = self.rows.in_order(refs) - _finite(_larger(largest, sinks))[:, :, None]
        np.exp(weights, out=weights)
        weights *= self.rows.in_order(sums)
        total = weights.sum(axis=2)
        if sinks is not None:
            total += np.exp(sinks - _finite(_larger(largest, sinks)))
        total[total == 0.0] = 1.0
        found: NDArray[Any] = weights
        found /= total[:, :, None]
        return found


class RowSums:
    """What one row's weights are like: their entropy, and the largest.

    Parameters
    ----------
    rows : Rows
        Which rows.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.state = rows.new_state(4)
        self.state[:, :, 0] = -np.inf
        self.argmax = np.full(self.state[:, :, 0].shape, -1, np.int64)
        params = np.array([*rows.words(self.state), self.argmax.ctypes.data], np.int64)
        keepalive = (self.state, self.argmax)
        self.function = TileFunction(add_rows_up(_one(rows.tile)), params, keepalive)

    def stats(
        self, sinks: NDArray[Any] | None
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Return entropy, largest weight and its key, each ``(streams, rows)``.

        With w = p / total the entropy -sum(w log w) is log(total) sum(w) - sum(p log p) / total. A
        row that sees nothing has 0, 0 and -1.
        """
        ref, found, products, best = np.moveaxis(self.rows.in_order(self.state), 2, 0)
        argmax = self.rows.in_order(self.argmax)
        seen = argmax >= 0
        # relative to the sink, if that is larger
        largest = _larger(ref, sinks)
        fall = np.where(seen, ref - largest, np.zeros_like(ref))
        shrink = np.exp(fall)
        fall[shrink == 0.0] = 0.0  # of nothing; it may be -inf
        total = found * shrink
        if sinks is not None:
            total = total + np.exp(sinks - _finite(largest))
        total = np.where(seen, total, np.ones_like(total))
        entropy = shrink * (found * (np.log(total) - fall) - products) / total
        return (
            np.where(entropy < 0.0, np.zeros_like(entropy), entropy),  # of rounding
            shrink * best / total,
            argmax,
        )


def _larger(x: NDArray[Any], sinks: NDArray[Any] | None) -> NDArray[Any]:
    return x if sinks is None else np.maximum(x, sinks)


def sum_of_rows(weights: NDArray[Any], rows: Rows, blocks: int, total: NDArray[Any]) -> None:
    """Add the weights of rows to those of the blocks of rows that they are in.

    Rows of a few tiles are added up first. Where these groups end, the sizes of a stream alone say.

    Parameters
    ----------
    weights : ndarray
        ``(streams, rows, columns)``.
    rows : Rows
        Which rows.
    blocks : int
        Row i of a head is in block i * blocks // Nq.
    total : ndarray of float64
        ``(streams, heads * blocks, columns)``, changed.
    """
    r = np.arange(rows.place.start, rows.place.stop)
    block = r // rows.Nq * blocks + r % rows.Nq * blocks // rows.Nq
    new = (np.diff(block, prepend=-1) != 0) | (r % (TILES_TOGETHER * rows.tile.lanes) == 0)
    starts = np.flatnonzero(new)
    if starts.size:
        sums = np.add.reduceat(weights, starts, axis=1, dtype=np.float64)
        for n, at in enumerate(block[starts]):
            total[:, at] += sums[:, n]


TILES_TOGETHER = 4
"""Tiles whose rows are added up before they are added to others: windows are multiples of it."""


def _one(tile: Tile) -> Tile:
    """Return what an observer is compiled for: it takes the number of vectors as it comes."""
    return Tile(tile.dtype, tile.W, 1, 1)


def _finite(x: NDArray[Any]) -> NDArray[Any]:
    return np.where(x == -np.inf, np.array(0.0, x.dtype), x)
