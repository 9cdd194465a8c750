"""Exact attention in Python, at the speed of the machine."""

from . import masks, mods
from .api import Gradients, attention, attention_backward, attention_vjp
from .blockmask import BlockMask
from .masks import mask
from .mods import alibi_slopes

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "Gradients",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_vjp",
    "mask",
    "masks",
    "mods",
]
