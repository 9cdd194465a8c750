"""The public functions: check a call, choose a backend, give results back in the caller's form."""

from .diagnostics import (
    RowStats,
    attention_map,
    attention_weights,
    key_mass,
    plot_attention,
    row_stats,
)
from .forward_mode import attention_jvp
from .functional import Gradients, attention, attention_backward, attention_vjp
from .generation import attention_with_kvcache
from .merging import merge_states
from .streaming import attention_stream
from .varlen import attention_varlen, attention_varlen_vjp

__all__ = [
    "Gradients",
    "RowStats",
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
    "merge_states",
    "plot_attention",
    "row_stats",
]
