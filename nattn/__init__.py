"""Exact attention in Python, at the speed of the machine."""

from . import nn, positional
from .api import (
    Gradients,
    RowStats,
    attention,
    attention_backward,
    attention_jvp,
    attention_map,
    attention_stream,
    attention_varlen,
    attention_varlen_vjp,
    attention_vjp,
    attention_weights,
    attention_with_kvcache,
    key_mass,
    merge_states,
    plot_attention,
    row_stats,
)
from .caches import CacheError, KVCache, PagedKVCache
from .call.block_mask import BlockMask
from .functions import masks, mods
from .functions.masks import mask
from .functions.mods import alibi_slopes

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "CacheError",
    "Gradients",
    "KVCache",
    "PagedKVCache",
    "RowStats",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_map",
    "attention_stream",
    "attention_varlen",
    "attention_varlen_vjp",
    "attention_vjp",
    "attention_weights",
    "attention_with_kvcache",
    "key_mass",
    "mask",
    "masks",
    "merge_states",
    "mods",
    "nn",
    "plot_attention",
    "positional",
    "row_stats",
]
