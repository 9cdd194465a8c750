"""The door of the CPU backend: what it offers to those above, and nothing else of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...functions import binding, masks, mods
from ...vectors.lanes import Tile
from ...vectors.storage import SIZES
from . import score, tiles
from .cache import cache_folder, clear_cache
from .classify import classify, classify_worker
from .forward import forward_worker
from .gelu import gelu
from .jobs import thread_count
from .launch import forward, jvp
from .launch_backward import backward
from .launch_decode import plan_decode
from .looking import observe
from .peak import fma_peak, multiply_add, read_memory
from .rotary import rotate

__all__ = [
    "backward",
    "classify",
    "clear_cache",
    "fma_peak",
    "forward",
    "gelu",
    "info",
    "jvp",
    "observe",
    "read_memory",
    "rotate",
    "warmup",
]

KEEPS_EXACT = True
LEARNS = True


def info() -> dict[str, Any]:
    """Describe what the backend does on this machine.

    Returns
    -------
    dict
        ``cpu`` and ``features`` (what code is generated for), ``fma``, ``vector_bits``,
        ``threads``, ``cache_folder`` (None if nothing can be written) and ``tiles``: for each
        dtype what its ``products`` are, the lane width ``W``, the register tile ``MV`` x ``NR``,
        ``block_q`` (query rows of a tile) and ``block_kv`` (keys of a block).

    Examples
    --------
    >>> from nattn.backends.cpu.door import info
    >>> sorted(info()["tiles"])
    ['bfloat16', 'float16', 'float32', 'float64']
    """
    cpu = tiles.cpu()
    chosen = {}
    for dtype in tiles.STORAGE:
        tile = tiles.choose_tile(dtype, 1 << 20)
        chosen[dtype] = {
            "products": f"{tile.dtype} {tile.product}",
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

    That is attention with masks and biases, ALiBi, softcap, dropout and the common mask functions.

    Parameters
    ----------
    dtypes : tuple of str
        Among "float16", "bfloat16", "float32" and "float64".
    """
    doc, slopes = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    bound = (
        ("score_mod", functools.partial(mods.softcap, cap=1.0)),
        ("score_mod", functools.partial(mods.alibi, slopes=slopes)),
        ("mask_mod", masks.causal),
        ("mask_mod", functools.partial(masks.sliding_window, left=1, right=1)),
        ("mask_mod", functools.partial(masks.document, doc=doc)),
    )
    parameters = {"score_mod": binding.SCORE_MOD, "mask_mod": binding.MASK_MOD}
    for dtype in dtypes:
        wide = tiles.choose_tile(dtype, 1 << 20)
        for tile in (wide, tiles.choose_tile(dtype, 1)):
            forward_worker(tile)
            for storage in ("bool", dtype):
                score.add_operand(tile, storage, SIZES[storage])
        for rows in (1, 4):
            plan_decode(dtype, dtype, 1, 1, 64, 64, rows)
        for name, function in bound:
            tree = binding.resolve(name, function, parameters[name])
            score.user_function(name, tree, wide, 0, packed=False)
        score.drop_function(wide, 0.5, 0, packed=False)
        multiply_add(wide)
    classify_worker(Tile("float32", tiles.choose_tile("float32", 1 << 20).W, 1, 1))
