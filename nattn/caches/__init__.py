"""Caches of keys and values, to which generation adds step by step."""

from ..call.quantised import CacheError
from .contiguous import KVCache
from .paged import PagedKVCache, PagedView

__all__ = ["CacheError", "KVCache", "PagedKVCache", "PagedView"]
