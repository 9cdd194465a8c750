"""The steps that all kernels share: staging in shared memory, and products of register tiles.

A thread (ty, tx) owns some rows and some columns of a tile (`owned`): groups of adjacent ones,
which shared memory delivers in one step, far enough apart for the threads of a warp to read from
different banks.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

from numba import cuda, types

from .target import copy_group, device, is_hidden, load, load4, store
from .tiles import BlockTile

PAD = 4
"""Elements between rows in shared memory: what is written transposed falls on different banks."""


def group_of(count: int, lanes: int) -> int:
    """Return how many rows of `owned` lie side by side."""
    each = count // lanes
    return 4 if each % 4 == 0 else 2 if each % 2 == 0 else 1


def owned(count: int, lanes: int) -> Any:
    """Return ``f(lane, n)``: the n-th of `count` rows that a lane of `lanes` owns."""
    group = group_of(count, lanes)
    stride = group * lanes

    def of(lane, n):
        return n // group * stride + lane * group + n % group

    return device(of)


@functools.cache
def stager(tile: BlockTile, n_rows: int) -> Any:
    """Return what copies a chunk of rows into shared memory, columns first.

    ``stage(to, at, lead, source, d0, D, t)`` writes element ``d0 + d`` of row n of `source`, which
    are `Rows`, to ``to[at + d * lead + n]``: 0 past D, and for rows that are not there.
    """
    threads, wide, quads = tile.threads, tile.wide, tile.depth // 4
    total = n_rows * quads
    read, read4 = load(tile.storage), load4(tile.storage)
    zero = getattr(types, tile.dtype)(0.0)

    def stage(to, at, lead, source, d0, D, t):
        for e in range(t, total, threads):
            n = e // quads
            d = e % quads * 4
            index = at + d * lead + n
            row = source.rows[n]
            first = d0 + d
            row_ptr = source.ptr + source.heads[n] * source.stride_h + row * source.stride_n
            address = row_ptr + first * source.stride_d
            if wide and row >= 0 and first + 4 <= D:
                four = read4(address)
                to[index] = four[0]
                to[index + lead] = four[1]
                to[index + 2 * lead] = four[2]
                to[index + 3 * lead] = four[3]
            else:
                for m in range(4):
                    value = zero
                    if row >= 0 and first + m < D:
                        value = read(address + m * source.stride_d)
                    to[index + m * lead] = value

    return device(stage)


@functools.cache
def row_stager(tile: BlockTile) -> Any:
    """Return what copies a chunk of rows into shared memory as they are.

    ``stage(to, source, first, d0, D, t)`` writes element ``d0 + d`` of row ``first + n`` to
    ``to[n * width + d]``, as `stager` does, and returns whether something that it read is not
    finite.
    """
    threads, wide, width, quads = tile.threads, tile.wide, tile.width, tile.width // 4
    total = tile.depth * quads
    read, read4 = load(tile.storage), load4(tile.storage)
    zero = getattr(types, tile.dtype)(0.0)

    def stage(to, source, first, d0, D, t):
        odd = False
        for e in range(t, total, threads):
            n = e // quads
            d = e % quads * 4
            index = n * width + d
            row = source.rows[first + n]
            column = d0 + d
            row_ptr = source.ptr + source.heads[first + n] * source.stride_h + row * source.stride_n
            address = row_ptr + column * source.stride_d
            if wide and row >= 0 and column + 4 <= D:
                four = read4(address)
                to[index] = four[0]
                to[index + 1] = four[1]
                to[index + 2] = four[2]
                to[index + 3] = four[3]
                # 0 times a finite number is 0; one sum tells for all four
                rest = (four[0] * zero + four[1] * zero) + (four[2] * zero + four[3] * zero)
                odd = odd or rest != zero
            else:
                for m in range(4):
                    value = zero
                    if row >= 0 and column + m < D:
                        value = read(address + m * source.stride_d)
                    to[index + m] = value
                    odd = odd or value * zero != zero
        return odd

    return device(stage)


@functools.cache
def products(tile: BlockTile) -> SimpleNamespace:
    """Return the register-tile products of a tile, and who owns what.

    Returns
    -------
    namespace
        ``RM``, ``RN``, ``RD``: rows, columns and columns of the sums that a thread owns;
        ``row_of(ty, i)``: which rows;
        ``clear(acc, count)``;
        ``multiply(acc, stage, ty, tx)``: ``acc[i * RN + j] += sum_d rows[d, i] * columns[d, j]``,
        of the two chunks in `stage`, rows first;
        ``accumulate(acc, x, n0, stage, ty, tx)``: ``acc[i * RD + j] += sum_n x[n0 + n, i] *
        y[n, j]``, of the chunk of rows y in `stage`;
        ``accumulate_visible``: the same, leaving out where x is -0.0;
        ``put_scores(x, s, scale, ty, tx)``: write scores to a tile x, times a scale;
        ``add_scores(s, x, ty, tx)``: add a tile x to what would be put there;
        ``rescale(acc, factors, ty)``, ``times(acc, factor)``: multiply the sums of each row, or
        all;
        ``put_rows(storage)``: what writes sums to memory.
    """
    rows, columns, ty_, tx_ = tile.rows, tile.columns, tile.ty, tile.tx
    depth, width, dtype = tile.depth, tile.width, getattr(types, tile.dtype)
    RM, RN, RD = rows // ty_, columns // tx_, width // tx_
    GM, GN, GD = group_of(rows, ty_), group_of(columns, tx_), group_of(width, tx_)
    lead_a, lead_b, lead_x = rows + PAD, columns + PAD, rows + PAD
    second = depth * lead_a
    copy_m, copy_n, copy_d = copy_group(GM), copy_group(GN), copy_group(GD)
    groups_m, groups_n, groups_d = RM // GM, RN // GN, RD // GD
    step_m, step_n, step_d = GM * ty_, GN * tx_, GD * tx_

    def clear(acc, count):
        for n in range(count):
            acc[n] = dtype(0.0)

    def multiply(acc, stage, ty, tx):
        u = cuda.local.array(RM, dtype)
        w = cuda.local.array(RN, dtype)
        for d in range(depth):
            for g in range(groups_m):
                copy_m(u, g * GM, stage, d * lead_a + g * step_m + ty * GM)
            for g in range(groups_n):
                copy_n(w, g * GN, stage, second + d * lead_b + g * step_n + tx * GN)
            for i in range(RM):
                for j in range(RN):
                    acc[i * RN + j] += u[i] * w[j]

    def accumulator(visible):
        def accumulate(acc, x, n0, stage, ty, tx):
            u = cuda.local.array(RM, dtype)
            w = cuda.local.array(RD, dtype)
            for n in range(depth):
                for g in range(groups_m):
                    copy_m(u, g * GM, x, (n0 + n) * lead_x + g * step_m + ty * GM)
                for g in range(groups_d):
                    copy_d(w, g * GD, stage, n * width + g * step_d + tx * GD)
                for i in range(RM):
                    # A product with what is hidden is not made: 0 * NaN would be NaN.
                    hidden = visible and is_hidden(u[i])
                    for j in range(RD):
                        new = acc[i * RD + j] + u[i] * w[j]
                        acc[i * RD + j] = acc[i * RD + j] if hidden else new

        return device(accumulate)

    # Small bodies, so that these loops are unrolled too: a thread's array lives in registers only
    # where every index is a constant in the end.

    def put_scores(x, s, scale, ty, tx):
        for j in range(RN):
            at = of_column(tx, j) * lead_x
            for i in range(RM):
                x[at + of_row(ty, i)] = s[i * RN + j] * scale

    def add_scores(s, x, ty, tx):
        for j in range(RN):
            at = of_column(tx, j) * lead_x
            for i in range(RM):
                s[i * RN + j] += x[at + of_row(ty, i)]

    def times(acc, factor):
        for n in range(RM * RD):
            acc[n] *= factor

    def rescale(acc, factors, ty):
        for i in range(RM):
            factor = factors[of_row(ty, i)]
            for j in range(RD):
                acc[i * RD + j] *= factor

    def put_rows(storage):
        write = store(storage)

        def put(acc, row_ptrs, stride, first, end, tx):
            for j in range(RD):
                column = first + of_width(tx, j)
                if column < end:
                    for i in range(RM):
                        if row_ptrs[i] != 0:
                            write(row_ptrs[i] + column * stride, acc[i * RD + j])

        return device(put)

    of_row, of_column, of_width = owned(rows, ty_), owned(columns, tx_), owned(width, tx_)

    return SimpleNamespace(
        put_scores=device(put_scores),
        add_scores=device(add_scores),
        rescale=device(rescale),
        times=device(times),
        RM=RM,
        RN=RN,
        RD=RD,
        row_of=of_row,
        put_rows=put_rows,
        clear=device(clear),
        multiply=device(multiply),
        accumulate=accumulator(visible=False),
        accumulate_visible=accumulator(visible=True),
    )


@functools.cache
def score_product(tile: BlockTile) -> Any:
    """Return what writes a tile of products of rows of two arrays to shared memory.

    ``product(s, x, stage, scale, D, rows, columns, place)`` writes ``scale * sum_d row[d] *
    column[d]`` to x, through s and `stage`. Rows and columns are `Rows`, and place is a `Place`.
    Threads must meet before x is read, and where D may be 0 before it is written.
    """
    depth, second = tile.depth, tile.depth * (tile.rows + PAD)
    lead_a, lead_b = tile.rows + PAD, tile.columns + PAD
    p = products(tile)
    n_scores, clear, multiply, put_scores = p.RM * p.RN, p.clear, p.multiply, p.put_scores
    stage_a, stage_b = stager(tile, tile.rows), stager(tile, tile.columns)

    def product(s, x, stage, scale, D, rows, columns, place):
        clear(s, n_scores)
        for d0 in range(0, D, depth):
            cuda.syncthreads()
            stage_a(stage, 0, lead_a, rows, d0, D, place.t)
            stage_b(stage, second, lead_b, columns, d0, D, place.t)
            cuda.syncthreads()
            multiply(s, stage, place.ty, place.tx)
        put_scores(x, s, scale, place.ty, place.tx)

    return device(product)


@functools.cache
def weighted_sum(tile: BlockTile) -> Any:
    """Return what adds products of a tile x with the rows of an array to a thread's sums.

    ``add(acc, x, stage, rows, d0, D, place)`` makes ``acc[i, j] += sum_n x[n, i] * row[n, d0 + j]``
    over all columns n of a tile, leaving out where x is -0.0. Threads meet before x or `stage` is
    used again.
    """
    columns, depth = tile.columns, tile.depth
    p = products(tile)
    accumulate, accumulate_visible = p.accumulate, p.accumulate_visible
    stage_rows = row_stager(tile)

    def add(acc, x, stage, rows, d0, D, place):
        for n0 in range(0, columns, depth):
            odd = stage_rows(stage, rows, n0, d0, D, place.t)
            # Only what is not finite makes more of 0 than 0.
            if cuda.syncthreads_or(types.int32(odd)):
                accumulate_visible(acc, x, n0, stage, place.ty, place.tx)
            else:
                accumulate(acc, x, n0, stage, place.ty, place.tx)
            cuda.syncthreads()

    return device(add)


@functools.cache
def tree_sum(threads: int) -> Any:
    """Return ``add_up(sums, t)``: leave the sum of all in the first; threads are 2**n."""

    def add_up(sums, t):
        step = threads // 2
        while step > 0:
            cuda.syncthreads()
            if t < step:
                sums[t] += sums[t + step]
            step //= 2

    return device(add_up)


def stage_size(tile: BlockTile) -> int:
    """Return the elements of shared memory for what `products` works on, but for x."""
    two = tile.depth * (tile.rows + PAD + tile.columns + PAD)
    return max(two, tile.depth * tile.width)


def scores_size(tile: BlockTile) -> int:
    """Return the elements of shared memory for x, one tile of scores."""
    return tile.columns * (tile.rows + PAD)


LOG2E = math.log2(math.e)
