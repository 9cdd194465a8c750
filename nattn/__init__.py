"""Exact attention in Python, at the speed of the machine."""

from .api import attention

__version__ = "0.1.0"
__all__ = ["__version__", "attention"]
