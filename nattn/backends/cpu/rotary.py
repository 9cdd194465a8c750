"""Rotating pairs of columns by angles that grow with the position, in one pass over the array.

The angle of pair ``c`` at position ``p`` is ``p * frequencies[c]``. A sine for each would take
longer than the rotation itself, so a position is split, ``p = LOW * high + low``: cosines and sines
of both parts are computed in float64, for all ``low`` once and for each ``high`` there is, and a
product of two complex numbers, in float64 too, gives those of ``p``. A task does that for a block
of positions, rounds the result to a table that stays in the first-level cache, and turns these rows
of all heads with it. What is memory bound then stays so.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from ...vectors.lanes import (
    Tile,
    as_score,
    join_pairs,
    load,
    part_pairs,
    prefetch,
    read,
    read_int64,
    store,
    view,
    write,
)
from . import jobs, tiles
from .arrays import STRIDED, strided
from .jit import device, inlined, kernel
from .jobs import enter, job_record, leave, run_job, stopped, take_task

ARGS = job_record(
    "RotaryArgs",
    (
        # x and out (B, H, N, D)
        *(("x", STRIDED), ("out", STRIDED)),
        # sizes: heads, positions, columns, pairs that turn; columns that are copied
        *("H", "N", "half", "kept"),
        # addresses of float64 (rows, 2, half): cosines, sines; of int64 (items, N): their rows
        *("high_ptr", "low_ptr", "high_rows_ptr", "low_rows_ptr"),
        # (b, h) planes of an item, of a task; tasks side by side; blocks of positions, their size
        *("planes", "planes_per_task", "groups", "blocks", "n_rows"),
        # whether the last axes are contiguous; whether heads of a position lie nearer than rows
        *("contiguous", "rows_first"),
    ),
)
"""What a worker gets."""

LOW = 128
"""Positions that share a row of the table of high parts."""

TABLE_BYTES = 64 * 1024
"""Bytes of cosines and sines of a task: a part of the second-level cache. Smaller tables mean
shorter stretches of memory, and processors read long ones ahead."""

AHEAD = 2048
"""Bytes: how far ahead of what is read memory is asked for."""

TASKS_PER_THREAD = 8

SMALL = 1 << 18
"""Bytes up to which one thread is as fast as several."""


@device
def fill(tile, wide, table, high, low, half):
    """Write the cosines and sines of one position: the product of those of its parts."""
    size, step = tile.itemsize, tile.W
    whole = half // step * step
    sines = 8 * half
    for c in range(0, whole, step):
        at = 8 * c
        a, b = load(wide, high + at), load(wide, high + sines + at)
        x, y = load(wide, low + at), load(wide, low + sines + at)
        # as_score rounds lanes to the tile's type, whatever they stand for.
        store(table + c * size, as_score(tile, a * x - b * y))
        store(table + (half + c) * size, as_score(tile, b * x + a * y))
    for c in range(whole, half):
        at = 8 * c
        a, b = read(wide, high + at), read(wide, high + sines + at)
        x, y = read(wide, low + at), read(wide, low + sines + at)
        write(tile, table + c * size, a * x - b * y)
        write(tile, table + (half + c) * size, b * x + a * y)


@inlined
def turned(a, b, cos, sin):
    """Return the two columns of a pair, or of as many pairs as there are lanes, turned."""
    return a * cos - b * sin, b * cos + a * sin


@inlined
def turn_halves(tile, x, out, table, half):
    """Turn column c with column c + half, in a contiguous row."""
    size, step = tile.itemsize, tile.W
    whole = half // step * step
    far = half * size
    for at in range(0, whole * size, step * size):
        prefetch(x + at + AHEAD)
        prefetch(x + far + at + AHEAD)
        cos, sin = load(tile, table + at), load(tile, table + far + at)
        a, b = turned(load(tile, x + at), load(tile, x + far + at), cos, sin)
        store(out + at, a)
        store(out + far + at, b)
    turn_pairs(tile, x, out, table, whole, half, (size, far), (size, far))


@inlined
def turn_neighbours(tile, x, out, table, half):
    """Turn column 2c with column 2c + 1, in a contiguous row."""
    size, step = tile.itemsize, tile.W
    whole = half // step * step
    far = half * size
    for at in range(0, whole * size, step * size):
        cos, sin = load(tile, table + at), load(tile, table + far + at)
        first = x + 2 * at
        prefetch(first + AHEAD)
        prefetch(first + step * size + AHEAD)
        a, b = part_pairs(tile, load(tile, first), load(tile, first + step * size))
        a, b = turned(a, b, cos, sin)
        a, b = join_pairs(tile, a, b)
        store(out + 2 * at, a)
        store(out + 2 * at + step * size, b)
    turn_pairs(tile, x, out, table, whole, half, (2 * size, size), (2 * size, size))


@inlined
def turn_pairs(tile, x, out, table, first, half, x_steps, out_steps):
    """Turn the pairs from `first` on, one by one.

    The steps are the bytes from one pair to the next, and from its first column to its second.
    """
    size = tile.itemsize
    for c in range(first, half):
        cos, sin = read(tile, table + c * size), read(tile, table + (half + c) * size)
        from_, to = x + c * x_steps[0], out + c * out_steps[0]
        a, b = turned(read(tile, from_), read(tile, from_ + x_steps[1]), cos, sin)
        write(tile, to, a)
        write(tile, to + out_steps[1], b)


@device
def copy(tile, x, out, count, x_step, out_step, contiguous):
    """Copy columns."""
    size = tile.itemsize
    whole = count // tile.W * tile.W if contiguous else 0
    for at in range(0, whole * size, tile.W * size):
        store(out + at, load(tile, x + at))
    for d in range(whole, count):
        write(tile, out + d * out_step, read(tile, x + d * x_step))


@kernel("void(int64, int64)")
def rotary_worker(tile, interleaved):
    """Turn rows until there are none left."""
    wide = Tile("float64", tile.W, 1, 1)

    def worker(slot, args):
        a = view(ARGS, args)
        # What is stored could be fields, for all LLVM knows: those of the inner loop are read here.
        H, half, kept, contiguous = a.H, a.half, a.kept, a.contiguous
        x_d, out_d = a.x.stride_d, a.out.stride_d
        size = tile.itemsize
        row_bytes = 2 * half * size
        record = 16 * half
        table = enter(a.job_ptr, slot)
        x_steps, out_steps = (x_d, half * x_d), (out_d, half * out_d)
        if interleaved:
            x_steps, out_steps = (2 * x_d, x_d), (2 * out_d, out_d)
        if table == 0:
            return
        while not stopped(a.job_ptr):
            task = take_task(a.job_ptr)
            if task < 0:
                break
            place = task // a.blocks
            begin = (task - place * a.blocks) * a.n_rows
            rows = min(a.n_rows, a.N - begin)
            item = place // a.groups
            first = (place - item * a.groups) * a.planes_per_task
            planes = min(a.planes_per_task, a.planes - first)
            first += item * a.planes
            where = 8 * (item * a.N + begin)
            for r in range(rows):
                high = a.high_ptr + read_int64(a.high_rows_ptr + where + 8 * r) * record
                low = a.low_ptr + read_int64(a.low_rows_ptr + where + 8 * r) * record
                fill(tile, wide, table + r * row_bytes, high, low, half)
            for b in range(first // H, (first + planes - 1) // H + 1):
                h = max(0, first - b * H)
                heads = min(H, first + planes - b * H) - h
                x = a.x.ptr + b * a.x.stride_b + h * a.x.stride_h + begin * a.x.stride_n
                to_b, to_h, to_n = a.out.stride_b, a.out.stride_h, a.out.stride_n
                out = a.out.ptr + b * to_b + h * to_h + begin * to_n
                # Memory is read in the order in which it lies.
                counts, x_far, out_far = (heads, rows), (a.x.stride_h, a.x.stride_n), (to_h, to_n)
                t_far = (0, row_bytes)
                if a.rows_first:
                    counts, x_far, out_far = (
                        (rows, heads),
                        (a.x.stride_n, a.x.stride_h),
                        (to_n, to_h),
                    )
                    t_far = (row_bytes, 0)
                for i in range(counts[0]):
                    for j in range(counts[1]):
                        from_ = x + i * x_far[0] + j * x_far[1]
                        to = out + i * out_far[0] + j * out_far[1]
                        angles = table + i * t_far[0] + j * t_far[1]
                        if not contiguous:
                            turn_pairs(tile, from_, to, angles, 0, half, x_steps, out_steps)
                        elif interleaved:
                            turn_neighbours(tile, from_, to, angles, half)
                        else:
                            turn_halves(tile, from_, to, angles, half)
                        if kept:
                            from_ += 2 * half * x_d
                            to += 2 * half * out_d
                            copy(tile, from_, to, kept, x_d, out_d, contiguous)
        leave(a.job_ptr, slot, 0)

    return worker


def _angles(p: NDArray[np.int64], frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``(len(p), 2, pairs)``: cosines and sines."""
    angles = p.astype(np.float64)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@functools.lru_cache(maxsize=16)
def _low_table(frequencies: bytes) -> NDArray[np.float64]:
    return _angles(np.arange(1 - LOW, LOW), np.frombuffer(frequencies))


def _high_table(
    high: NDArray[np.int64], frequencies: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the table of the high parts, and the row of each."""
    least, most = int(high.min()), int(high.max())
    if most - least < high.size:
        found, rows = np.arange(least, most + 1), high - least
    else:
        found, rows = np.unique(high, return_inverse=True)
        rows = rows.reshape(high.shape)
    return _angles(LOW * found, frequencies), np.ascontiguousarray(rows, np.int64)


def rotate(
    x: NDArray,
    out: NDArray,
    positions: NDArray[np.int64],
    frequencies: NDArray[np.float64],
    *,
    factor: float = 1.0,
    inverse: bool = False,
    interleaved: bool = False,
) -> None:
    """Turn the first ``2 * len(frequencies)`` columns, and copy the others.

    Parameters
    ----------
    x, out : ndarray
        ``(B, H, N, D)`` of one dtype, float32 or float64; any strides. `out` may be `x` itself, and
        shares no other memory with it.
    positions : ndarray
        ``(1, N)`` or ``(B, N)`` int64, of magnitude up to 2**53.
    frequencies : ndarray
        Radians for each position, of each pair of columns; not empty.
    factor : float
        What the turned columns are multiplied by.
    inverse : bool
        Turn back; the factor stays.
    interleaved : bool
        Pair columns ``2c`` and ``2c + 1`` instead of ``c`` and ``c + len(frequencies)``.
    """
    if x.size == 0:
        return
    B, H, N, D = x.shape
    half = len(frequencies)
    turns = -frequencies if inverse else frequencies
    low = _low_table(turns.tobytes())
    # Both parts have the sign of the whole, so that neither angle is larger than theirs.
    parts = np.sign(positions) * (abs(positions) // LOW)
    low_rows = np.ascontiguousarray(positions - LOW * parts + (LOW - 1))
    high, high_rows = _high_table(parts, turns)
    high *= factor
    tile = tiles.choose_tile(x.dtype.name, 1 << 20)
    tile = Tile(tile.dtype, tile.W, 1, 1)
    count = jobs.thread_count() if x.nbytes > SMALL else 1
    items = len(positions)
    planes = B * H // items
    row_bytes = 2 * half * tile.itemsize
    rows = min(N, max(1, TABLE_BYTES // row_bytes))
    blocks = -(-N // rows)
    groups = min(planes, max(1, TASKS_PER_THREAD * count // (items * blocks))) if count > 1 else 1
    planes_per_task = -(-planes // groups)
    groups = -(-planes // planes_per_task)
    n_tasks = items * groups * blocks
    size = tile.itemsize
    fields = {
        "x": strided(x),
        "out": strided(out),
        "H": H,
        "N": N,
        "half": half,
        "kept": 0 if out.ctypes.data == x.ctypes.data else D - 2 * half,
        "high_ptr": high.ctypes.data,
        "low_ptr": low.ctypes.data,
        "high_rows_ptr": high_rows.ctypes.data,
        "low_rows_ptr": low_rows.ctypes.data,
        "planes": planes,
        "planes_per_task": planes_per_task,
        "groups": groups,
        "blocks": blocks,
        "n_rows": rows,
        "contiguous": x.strides[3] == out.strides[3] == size,
        "rows_first": abs(x.strides[1]) < abs(x.strides[2]),
    }
    run_job(
        rotary_worker(tile, interleaved),
        ARGS,
        fields,
        n_tasks=n_tasks,
        n_threads=count,
        scratch_bytes=rows * row_bytes,
        flops=10.0 * x.nbytes,  # as long as so many operations takes what memory delivers
        keepalive=(x, out, high, low, high_rows, low_rows),
    )
