"""The CPU backend: streaming attention in SIMD kernels compiled by Numba."""

from .launch import forward
from .peak import fma_peak

__all__ = ["fma_peak", "forward"]
