"""Exact attention in Python, at the speed of the machine."""

from . import masks, mods
from .api import attention
from .blockmask import BlockMask
from .masks import mask
from .mods import alibi_slopes

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "__version__",
    "alibi_slopes",
    "attention",
    "mask",
    "masks",
    "mods",
]
