"""Exact attention in Python, at the speed of the machine."""

from . import masks, mods, nn, positional
from .api import Gradients, attention, attention_backward, attention_vjp
from .blockmask import BlockMask
from .diagnostics import (
    RowStats,
    attention_map,
    attention_weights,
    key_mass,
    plot_attention,
    row_stats,
)
from .masks import mask
from .mods import alibi_slopes

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "Gradients",
    "RowStats",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_map",
    "attention_vjp",
    "attention_weights",
    "key_mass",
    "mask",
    "masks",
    "mods",
    "nn",
    "plot_attention",
    "positional",
    "row_stats",
]
