"""Attention of transformers' models: ``attn_implementation="nattn"``, computed by nattn.

Nothing of transformers is changed on import; `register` adds a name, which models may then ask for.
"""

from .attention import attention_forward
from .caches import CachedRows, KVCacheLayer, NattnCache
from .masks import LazyMask, lazy_mask
from .models import Layer, Report, enable, register, report

__all__ = [
    "CachedRows",
    "KVCacheLayer",
    "Layer",
    "LazyMask",
    "NattnCache",
    "Report",
    "attention_forward",
    "enable",
    "lazy_mask",
    "register",
    "report",
]
