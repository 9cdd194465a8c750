"""The CPU backend: streaming attention in SIMD kernels compiled by Numba.

The door for attention itself is `nattn.cpu.launch.forward`.
"""

from __future__ import annotations

from typing import Any

from . import tiles
from .forward import forward_worker
from .jit import cache_folder, clear_cache
from .peak import fma_peak, multiply_add
from .score import add_operand
from .threads import thread_count

__all__ = ["clear_cache", "fma_peak", "info", "warmup"]


def info() -> dict[str, Any]:
    """Describe what the backend does on this machine.

    Returns
    -------
    dict
        ``cpu`` and ``features`` (what code is generated for), ``fma``, ``vector_bits``,
        ``threads``, ``cache_folder`` (None if nothing can be written) and ``tiles``: for each
        dtype the lane width ``W``, the register tile ``MV`` x ``NR``, ``block_q`` (query rows of
        a tile) and ``block_kv`` (keys of a block).

    Examples
    --------
    >>> from nattn.cpu import info
    >>> sorted(info()["tiles"])
    ['float32', 'float64']
    """
    cpu = tiles.cpu()
    chosen = {}
    for dtype in ("float32", "float64"):
        tile = tiles.choose_tile(dtype, 1 << 20)
        chosen[dtype] = {
            "W": tile.W,
            "MV": tile.MV,
            "NR": tile.NR,
            "block_q": tile.lanes,
            "block_kv": tiles.block_kv(dtype, 64),
        }
    folder = cache_folder()
    return {
        "cpu": cpu.name,
        "features": sorted(cpu.features),
        "fma": cpu.fma,
        "vector_bits": 8 * cpu.vector_bytes,
        "threads": thread_count(),
        "threading": "Python threads around compiled workers (any Numba layer, fork-safe)",
        "cache_folder": None if folder is None else str(folder),
        "tiles": chosen,
    }


def warmup(dtypes: tuple[str, ...] = ("float32", "float64")) -> None:
    """Compile the common kernels, or load them from the disk cache.

    Parameters
    ----------
    dtypes : tuple of str
        "float32", "float64" or both.
    """
    for dtype in dtypes:
        for rows in (1, 1 << 20):
            tile = tiles.choose_tile(dtype, rows)
            forward_worker(tile)
            for storage, itemsize in (("bool", 1), (dtype, 4 if dtype == "float32" else 8)):
                add_operand(tile, storage, itemsize)
        multiply_add(tiles.choose_tile(dtype, 1 << 20))
