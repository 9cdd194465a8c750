"""Attention as a layer, in NumPy: projections around `nattn.attention`, with gradients."""

from .layers import MultiHeadAttention, SelfAttention

__all__ = ["MultiHeadAttention", "SelfAttention"]
