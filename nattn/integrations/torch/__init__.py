"""Attention for PyTorch: its own functions' signatures and meaning, computed by nattn.

Nothing of torch is changed on import. `sdpa` and `register_provider` make programs use nattn that
do not know of it.
"""

from .autograd import attention
from .flex import flex_attention
from .provider import register_provider
from .sdpa import scaled_dot_product_attention, sdpa
from .translate import translate

__all__ = [
    "attention",
    "flex_attention",
    "register_provider",
    "scaled_dot_product_attention",
    "sdpa",
    "translate",
]
