"""The backward kernels: gradients from the scores, computed again tile by tile from q, k and lse.

    S = scale * Q K     P = exp(change(S) - lse)     dP = dO V     dS = P * (dP - delta)
    dQ = scale * dS' K     dK = scale * dS' Q     dV = P dO     dS' = dS * derivative of change

Each kernel owns what it writes and streams past all that adds to it, in one order: query rows own
dq and stream keys, keys own dk and dv and stream the query rows of their group, an element of the
bias owns its gradient and streams whatever it was broadcast along. So nothing is added by two
blocks, and no partial sum lies in memory. The price is that S and dP are computed by each.

A hidden pair is -0.0 in a tile, as in the forward pass, a visible one never.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from . import operands, visibility
from .backward_keys import key_kernel
from .backward_queries import bias_kernel, query_kernel
from .backward_sums import delta_kernel, sink_kernel, slope_kernel
from .specialization import Functions
from .target import Kernel, record
from .tiles import DELTA_ROWS, BlockTile, key_tile, pair_tile, row_tile

ARGS = record(
    "BackwardArgs",
    (
        # arrays: byte address, and byte strides over item, head, row, column
        *("q_ptr", "q_b", "q_h", "q_n", "q_d"),
        *("k_ptr", "k_b", "k_h", "k_n", "k_d"),
        *("v_ptr", "v_b", "v_h", "v_n", "v_d"),
        *("dout_ptr", "dout_b", "dout_h", "dout_n", "dout_d"),
        *("out_ptr", "out_b", "out_h", "out_n", "out_d"),
        # results, written whole; address 0 where one is not wanted
        *("dq_ptr", "dq_b", "dq_h", "dq_n", "dq_d"),
        *("dk_ptr", "dk_b", "dk_h", "dk_n", "dk_d"),
        *("dv_ptr", "dv_b", "dv_h", "dv_n", "dv_d"),
        # the gradient of the bias, and its own shape: 1 where it was broadcast
        *("dbias_ptr", "dbias_b", "dbias_h", "dbias_i", "dbias_j"),
        *("bias_B", "bias_H", "bias_I", "bias_J"),
        # (Hq,), and (slopes_B, Hq), where slopes_B is B, or 1 for slopes that all items share
        *("dsinks_ptr", "dsinks_h"),
        *("dslopes_ptr", "dslopes_b", "dslopes_h", "slopes_B"),
        # addresses of contiguous (B, Hq, Nq) in the compute dtype: lse; dlse or 0; what
        # `delta_kernel` writes; what `query_kernel` adds up for the slopes, or 0
        *("lse_ptr", "dlse_ptr", "delta_ptr", "distance_sum_ptr"),
        # address of contiguous (Hq,) in the compute dtype
        "sinks_ptr",
        *("B", "Hq", "Hkv", "group", "Nq", "Nk", "D", "Dv"),
        *visibility.FIELDS,
        *operands.FIELDS,
        *("scale", "keep_prob"),
    ),
)
"""What a kernel gets: ints, but for the last two."""


def _ceil(n: int, step: int) -> int:
    return -(-n // step)


def delta_grid(a: Any) -> tuple[int, ...]:
    """Return the blocks of `delta_kernel` for what it gets."""
    return (_ceil(a.B * a.Hq * a.Nq, DELTA_ROWS),)


def query_grid(a: Any, tile: BlockTile) -> tuple[int, ...]:
    """Return the blocks of `query_kernel`."""
    return (a.B * a.Hkv * _ceil(a.group * a.Nq, tile.rows), max(1, _ceil(a.D, tile.width)))


def key_grid(a: Any, tile: BlockTile) -> tuple[int, ...]:
    """Return the blocks of `key_kernel`."""
    return (a.B * a.Hkv * _ceil(a.Nk, tile.rows), max(1, _ceil(max(a.D, a.Dv), tile.width)))


def bias_grid(a: Any, tile: BlockTile) -> tuple[int, ...]:
    """Return the blocks of `bias_kernel`."""
    return (a.bias_B * a.bias_H * _ceil(a.bias_I, tile.rows) * _ceil(a.bias_J, tile.columns),)


class Wanted(NamedTuple):
    """What the kernels of a call's gradients are compiled for.

    Attributes
    ----------
    storage : str
        How q, k, v and dout are stored.
    wide : bool
        Whether rows of q, k, v and dout may be read four elements at a time.
    functions : Functions
        What happens to scores, with derivatives.
    bias, sinks, slopes : str
        How their gradients are stored, of those that are wanted.
    """

    storage: str
    wide: bool
    functions: Functions
    bias: str = ""
    sinks: str = ""
    slopes: str = ""


class Launch(NamedTuple):
    """A kernel and the grid of its blocks."""

    kernel: Kernel
    grid: tuple[int, ...]


def gradient_launches(a: Any, wanted: Wanted) -> list[Launch]:
    """Return what writes the gradients of a call, in order.

    Parameters
    ----------
    a : ARGS
        What all kernels get. Results whose address is 0 are left out.
    wanted : Wanted
        What they are compiled for.

    Returns
    -------
    list of Launch
        Empty if there is nothing to write.
    """
    storage, wide, functions = wanted.storage, wanted.wide, wanted.functions
    launches = [Launch(delta_kernel(storage), delta_grid(a))]
    if a.dq_ptr != 0 or a.dslopes_ptr != 0:
        tile = row_tile(storage, a.D, wide)
        launches.append(Launch(query_kernel(tile, functions), query_grid(a, tile)))
    if a.dk_ptr != 0 or a.dv_ptr != 0:
        tile = key_tile(storage, max(a.D, a.Dv), wide)
        launches.append(Launch(key_kernel(tile, functions), key_grid(a, tile)))
    if a.dbias_ptr != 0:
        tile = pair_tile(storage, wide)
        launches.append(Launch(bias_kernel(tile, functions, wanted.bias), bias_grid(a, tile)))
    if a.dsinks_ptr != 0:
        launches.append(Launch(sink_kernel(storage, wanted.sinks), (a.Hq,)))
    if a.dslopes_ptr != 0:
        launches.append(Launch(slope_kernel(storage, wanted.slopes), (a.slopes_B * a.Hq,)))
    return [launch for launch in launches if math.prod(launch.grid)]
