"""Tile functions: what happens to a tile of scores between the two products.

After the first product a tile of scores lies in L1. What a call does to the scores or hides is
one compiled function over that tile, called by address, so that the kernel is compiled once
whatever is passed, and a call composes any list of them:

    flags = function(scores, deriv, context, params)

All four are addresses. `scores` is the tile, ``[n_keys][lanes]``, changed in place; -inf hides a
key. `deriv` is 0, or a tile that is multiplied by the derivative. `context` holds the integers
named below; `params` what was bound: addresses, strides, numbers. A tile function cannot raise:
its flags say what went wrong (`OUT_OF_RANGE`) and what it did beyond (`TILE_MAX_KNOWN`).

A user's function is plain Python for one score; here it runs on lanes, with a loop over the tile
around it (`modify`, `restrict`). It is compiled once for its code and the types of what it is bound
to. Dropout is a tile function over the probabilities. A boolean mask is a bias of 0 and -inf, so
mask and bias are one function, for each type in which they are stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...functions import dropout
from ...functions.binding import Tree
from ...functions.on_lanes import (
    COMPILER_ERRORS,
    Tools,
    UserCode,
    compilable,
    evaluator,
    explained,
    words,
)
from ...functions.on_lanes import (
    raise_for_flags as raise_for_flags,  # for the callers of tile functions
)
from ...vectors.dtypes import storage_name
from ...vectors.dual import as_dual, chain, seed
from ...vectors.dual import value as value_of
from ...vectors.lanes import (
    INDEX_BOUND,
    Struct,
    Tile,
    as_condition,
    as_score,
    call_arguments,
    call_tile_function,
    clear_outside,
    gather_transposed,
    load,
    load_index,
    load_lanes,
    load_old,
    load_splat,
    new_outside,
    outside_bits,
    read_int8,
    read_int64,
    splat,
    store,
    uniform_index,
    view,
    write_int64,
)
from ...vectors.storage import SIZES
from .jit import device, fleeting, inlined, kernel

SIGNATURE = "int64(int64, int64, int64, int64)"

OUT_OF_RANGE = 1
"""Flag: for a key that its row sees, a bound array was indexed where it has no element."""

TILE_MAX_KNOWN = 2
"""Flag: the vectors at ``context.tile_max_ptr`` hold the largest score of each lane, as it is."""

CONTEXT = Struct(
    "Context",
    (
        # the batch item; addresses of an int64 for each lane: its head and its query row (lanes
        # from `n_valid` on repeat the last row: nothing may be read for them beyond that)
        *("batch", "heads_ptr", "rows_ptr", "n_valid"),
        # what is added to a row to get its position; addresses of an int64 for each lane: the keys
        # lo <= j < hi that causal, window and lengths leave to it
        *("offset", "lane_lo_ptr", "lane_hi_ptr"),
        # the keys of the tile; its vectors of lanes
        *("first_key", "n_keys", "vectors"),
        # addresses: of a vector for each of those, where largest scores are left; of the params of
        # the mask that hides a pair from users' functions too (0: none)
        *("tile_max_ptr", "mask_ptr"),
        # scratch: addresses of an int64 for each lane, and of W x W floats
        *("table_ptr", "temp_ptr"),
        # of probabilities: address of the vectors that they are relative to; of gradients: address
        # of those of what functions are bound to
        *("row_max_ptr", "learnt_ptr"),
    ),
)
"""Which scores a tile holds."""


FUNCTIONS = Struct("Functions", ("ptr", "count"))
"""A list of tile functions: address of (function, params) pairs, and their number."""


class TileFunction(NamedTuple):
    """A compiled tile function, and what it is bound to.

    Attributes
    ----------
    address : int
        Of the compiled code.
    params : ndarray of int64
        The words that it gets.
    keepalive : tuple
        What must live as long as the address, and the words, which hold addresses too.
    """

    address: int
    params: NDArray[np.int64]
    keepalive: tuple[Any, ...] = ()


@device
def apply(functions, scores, deriv, context):
    """Run a list of tile functions, of which the `FUNCTIONS` record tells, over a tile.

    Returns
    -------
    flags : int
        TILE_MAX_KNOWN if the last function set it; bit n + 2 if the n-th set OUT_OF_RANGE.
    """
    flags = 0
    for n in range(functions.count):
        pair = functions.ptr + 16 * n
        function, params = read_int64(pair), read_int64(pair + 8)
        own = call_tile_function(function, scores, deriv, context, params)
        flags = (
            (flags & ~TILE_MAX_KNOWN) | (own & TILE_MAX_KNOWN) | ((own & OUT_OF_RANGE) << (n + 2))
        )
    return flags


@device
def lane_offsets(tile, context, stride_h, stride_i):
    """Write each lane's byte offset in an array over (head, row); return whether all are equal."""
    equal = True
    for lane in range(tile.lanes):
        head, i = read_int64(context.heads_ptr + 8 * lane), read_int64(context.rows_ptr + 8 * lane)
        offset = head * stride_h + i * stride_i
        write_int64(context.table_ptr + 8 * lane, offset)
        equal &= offset == read_int64(context.table_ptr)
    return equal


@device
def add_or_hide(tile, at, x):
    """Add x to the scores at an address; -inf on either side hides the key, whatever the other."""
    s = load_old(tile, at)
    store(at, np.where((s == -np.inf) | (x == -np.inf), splat(tile, -np.inf), s + x))


OPERAND = Struct("Operand", ("ptr", "stride_b", "stride_h", "stride_i", "stride_j"))
"""Params of an array broadcast to (B, Hq, Nq, Nk): its address and byte strides."""


@kernel(SIGNATURE)
def add_operand(tile, storage, itemsize):
    """Add an array broadcast to (B, Hq, Nq, Nk), whatever its strides."""
    width, vectors, size, row = tile.W, tile.MV, tile.itemsize, tile.lanes * tile.itemsize

    def function(scores, deriv, context, params):
        c = view(CONTEXT, context)
        p = view(OPERAND, params)
        base = p.ptr + c.batch * p.stride_b + c.first_key * p.stride_j
        if lane_offsets(tile, c, p.stride_h, p.stride_i):
            base += read_int64(c.table_ptr)
            for n in range(c.n_keys):
                x = load_splat(tile, storage, base + n * p.stride_j)
                for i in range(vectors):
                    add_or_hide(tile, scores + n * row + i * width * size, x)
            return 0
        for i in range(vectors):
            column = scores + i * width * size
            lanes = c.table_ptr + 8 * i * width
            done = 0
            if p.stride_j == itemsize:
                while done + width <= c.n_keys:
                    at = base + done * p.stride_j
                    gather_transposed(tile, storage, at, lanes, c.temp_ptr, width * size)
                    for n in range(width):
                        x = load(tile, c.temp_ptr + n * width * size)
                        add_or_hide(tile, column + (done + n) * row, x)
                    done += width
            for n in range(done, c.n_keys):
                x = load_lanes(tile, storage, base + n * p.stride_j, lanes)
                add_or_hide(tile, column + n * row, x)
        return 0

    return function


def operand_function(tile: Tile, operand: NDArray[Any]) -> TileFunction:
    """Return the tile function that adds a broadcast view to the scores."""
    storage = storage_name(operand.dtype) or "bool"
    address = add_operand(tile, storage, SIZES[storage])
    params = np.array([operand.ctypes.data, *operand.strides], np.int64)
    return TileFunction(address, params, (operand,))


# Users' functions

TOOLS = Tools(fleeting, inlined, call_arguments, as_condition)


@device
def seen_outside(c, bits, first_lane, key):
    """Return OUT_OF_RANGE if, in one of the lanes that `bits` name, the row sees the key."""
    lane = first_lane
    while bits:
        if bits & 1 and lane < c.n_valid:
            lo, hi = read_int64(c.lane_lo_ptr + 8 * lane), read_int64(c.lane_hi_ptr + 8 * lane)
            if lo <= key < hi and not masked(c, lane, key):
                return OUT_OF_RANGE
        bits >>= 1
        lane += 1
    return 0


@device
def masked(c, lane, key):
    """Return whether the argument `mask` hides a key from the row of a lane."""
    if c.mask_ptr == 0:
        return False
    p = view(OPERAND, c.mask_ptr)
    at = p.ptr + c.batch * p.stride_b + read_int64(c.heads_ptr + 8 * lane) * p.stride_h
    at += read_int64(c.rows_ptr + 8 * lane) * p.stride_i + key * p.stride_j
    return read_int8(at) == 0


def head_reader(packed, index):
    """Return how a tile function reads the heads of a vector of lanes: one, or one for each."""
    if packed:

        def head(tile, c, lane):
            return load_index(tile, index, c.heads_ptr + 8 * lane, 0)

    else:

        def head(tile, c, lane):
            return uniform_index(tile, index, read_int64(c.heads_ptr))

    return fleeting(head)


def _over_tile(tile, index, packed, step):
    """Return the tile function that runs a step on every vector of a tile.

    ``step(tile, params, outside, at, deriv, args)`` changes the vector at address `at` (and the
    derivative, at address `deriv`) and returns it; `args` is (b, h, q_idx, kv_idx). `index` is
    "int32", or "int64" where positions may be large; with `packed` the lanes of a tile belong to
    several heads.
    """
    head = head_reader(packed, index)
    size, width = tile.itemsize, tile.W

    def function(scores, deriv, context, params):
        c = view(CONTEXT, context)
        row = c.vectors * width * size
        outside = new_outside(tile)
        batch = uniform_index(tile, index, c.batch)
        flags = TILE_MAX_KNOWN
        for i in range(c.vectors):
            lane = i * width
            h = head(tile, c, lane)
            position = load_index(tile, index, c.rows_ptr + 8 * lane, c.offset)
            largest = splat(tile, -np.inf)
            for n in range(c.n_keys):
                offset = n * row + lane * size
                clear_outside(tile, outside)
                key = uniform_index(tile, index, c.first_key + n)
                args = (batch, h, position, key)
                s = step(tile, params, outside, scores + offset, deriv + offset, args)
                bits = outside_bits(tile, outside)
                if bits:
                    flags |= seen_outside(c, bits, lane, c.first_key + n)
                largest = np.where(s > largest, s, largest)
            store(c.tile_max_ptr + lane * size, largest)
        return flags

    return function


@kernel(SIGNATURE)
def modify(tile, source, index, packed):
    """Give each score what a modifier makes of it; for the parameters see `_over_tile`."""
    evaluate, _ = evaluator(source.tree, 0, TOOLS, as_score)

    def step(tile, params, outside, at, deriv, args):
        s = as_score(tile, evaluate(tile, params, outside, (load_old(tile, at), *args)))
        store(at, s)
        return s

    return _over_tile(tile, index, packed, fleeting(step))


@kernel(SIGNATURE)
def modify_and_derive(tile, source, index, packed):
    """Do what `modify` does, and multiply the derivatives by that of the modifier."""
    evaluate, _ = evaluator(source.tree, 0, TOOLS, as_dual)

    def step(tile, params, outside, at, deriv, args):
        r = as_dual(tile, evaluate(tile, params, outside, (seed(load_old(tile, at)), *args)))
        s = value_of(tile, r)
        store(at, s)
        store(deriv, chain(tile, load(tile, deriv), r))
        return s

    return _over_tile(tile, index, packed, fleeting(step))


@kernel(SIGNATURE)
def restrict(tile, source, index, packed):
    """Hide the keys for which a mask function is false; for the parameters see `_over_tile`."""
    evaluate, _ = evaluator(source.tree, 0, TOOLS, as_score)

    def step(tile, params, outside, at, deriv, args):
        visible = as_condition(tile, evaluate(tile, params, outside, args))
        s = np.where(visible, load_old(tile, at), splat(tile, -np.inf))
        store(at, s)
        return s

    return _over_tile(tile, index, packed, fleeting(step))


def user_function(
    name: str,
    tree: Tree,
    tile: Tile,
    positions: int,
    packed: bool,
    derive: bool = False,
) -> TileFunction:
    """Compile what a user passed as `score_mod` or `mask_mod`, and bind it.

    Parameters
    ----------
    name : {"score_mod", "mask_mod"}
        Which it is.
    tree : Bound or Combination
        The function.
    tile : Tile
        What it runs on; only the dtype and W matter.
    positions : int
        The largest magnitude of a position or key.
    packed : bool
        Whether the lanes of a tile belong to several heads.
    derive : bool, default False
        Of a modifier, compile what gives its derivative too.

    Raises
    ------
    TypeError
        If lanes cannot express it: the text names the line and the remedy.
    """
    make = restrict if name == "mask_mod" else modify_and_derive if derive else modify
    return compiled(name, make, tree, tile, positions, packed)


def compiled(
    name: str, make: Any, tree: Tree, tile: Tile, positions: int, *more: Any
) -> TileFunction:
    """Compile a tile function of a user's, made by ``make(tile, source, index, *more)``; bind it.

    For the parameters see `user_function`.
    """
    one = Tile(tile.dtype, tile.W, 1, 1)  # of all storage types
    index = "int32" if positions < INDEX_BOUND else "int64"
    try:
        code = make.compiled(one, UserCode.of(tree), index, *more)
    except COMPILER_ERRORS as error:
        raise explained(name, tree, error) from error
    return TileFunction(code.address, np.array(words(tree), np.int64), (tree, code))


# Dropout


@device
def drop_below(tile, at, word, threshold):
    """Write -0.0, which is no key at all, where a random word is below the threshold."""
    store(at, np.where(word < threshold, splat(tile, -0.0), load_old(tile, at)))


@kernel(SIGNATURE)
def drop(tile, packed):
    """Drop probabilities: those for which `nattn.mods.keep` is false become -0.0.

    One counter gives the words of four neighbouring keys. Params: the seed's words, the threshold.
    """
    head = head_reader(packed, "int64")
    size, width = tile.itemsize, tile.W
    philox = compilable(dropout.philox, inlined, inlined)

    def function(probs, deriv, context, params):
        c = view(CONTEXT, context)
        row = c.vectors * width * size
        low, high = read_int64(params), read_int64(params + 8)
        threshold = read_int64(params + 16)
        batch = uniform_index(tile, "int64", c.batch)
        end = c.first_key + c.n_keys
        for i in range(c.vectors):
            lane = i * width
            h = head(tile, c, lane)
            rows = load_index(tile, "int64", c.rows_ptr + 8 * lane, 0)
            for key in range(c.first_key // 4 * 4, end, 4):
                four = uniform_index(tile, "int64", key // 4)
                w0, w1, w2, w3 = philox(four, rows, h, batch, low, high)
                at = probs + (key - c.first_key) * row + lane * size
                if key >= c.first_key:
                    drop_below(tile, at, w0, threshold)
                if c.first_key <= key + 1 < end:
                    drop_below(tile, at + row, w1, threshold)
                if c.first_key <= key + 2 < end:
                    drop_below(tile, at + 2 * row, w2, threshold)
                if key + 3 < end:
                    drop_below(tile, at + 3 * row, w3, threshold)
        return 0

    return function


def drop_function(tile: Tile, dropout_p: float, seed: int, packed: bool) -> TileFunction:
    """Return the tile function that drops probabilities."""
    words = seed & 0xFFFFFFFF, seed >> 32, dropout.drop_threshold(dropout_p)
    address = drop(Tile(tile.dtype, tile.W, 1, 1), packed)
    return TileFunction(address, np.array(words, np.int64))
