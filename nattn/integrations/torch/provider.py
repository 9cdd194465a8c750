"""nattn in torch's registry of attention backends: a whole process, unchanged, runs on it.

torch lets others implement the operators that its attention function ends in. Those for the CPU
are replaced while the provider is active; what nattn does not take is handed to torch's own.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ...api import attention, attention_backward
from .sdpa import arguments

NAME = "NATTN"
"""What torch calls this provider."""

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def register_provider() -> None:
    """Add nattn to torch's registry of attention backends, under the name "NATTN".

    Nothing changes before ``torch.nn.attention.activate_flash_attention_impl("NATTN")``, which
    makes every call in the process for which torch would take its fused CPU kernel run on nattn,
    also those of C++; ``restore_flash_attention_impl()`` ends that.

    Notes
    -----
    torch takes its fused kernel for 4-D tensors of one batch size, with as many columns in v as in
    q, a last axis of stride 1, no dropout and no gradient of the mask. `sdpa` sees the other calls
    too.

    Examples
    --------
    >>> import torch
    >>> from nattn.integrations.torch import register_provider
    >>> register_provider()
    >>> torch.nn.attention.activate_flash_attention_impl("NATTN")
    >>> q, k, v = torch.randn(3, 1, 8, 100, 64)
    >>> torch.nn.functional.scaled_dot_product_attention(q, k, v).shape
    torch.Size([1, 8, 100, 64])
    >>> torch.nn.attention.restore_flash_attention_impl()
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


class _Active:
    """Our implementations, until they are removed."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that torch's kernel is replaced is what is meant
            warnings.filterwarnings("ignore", message=r"[\s\S]*[Oo]verrid")
            self._library.impl(_FORWARD, _forward, "CPU")
            self._library.impl(_BACKWARD, _backward, "CPU")

    def remove(self) -> None:
        """Give torch its own implementations back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _activate(*args: Any, **kwargs: Any) -> _Active:
    return _Active()


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: expected 0.0 in the operator for the CPU, got {dropout_p}; call "
            "nattn.integrations.torch.scaled_dot_product_attention"
        )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out, with query's strides, and lse as torch's backward pass wants to get it."""
    _refuse_dropout(dropout_p)
    out = torch.empty_like(query)
    args = arguments(attn_mask, is_causal, scale)
    _, lse = attention(query, key, value, out=out, return_lse=True, **args)
    rows = torch.empty_like(lse.transpose(1, 2), memory_format=torch.contiguous_format)
    return out, rows.transpose(1, 2).copy_(lse)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    _refuse_dropout(dropout_p)
    args = arguments(attn_mask, is_causal, scale)
    found: Any = attention_backward(grad_out, query, key, value, out, logsumexp, **args)
    return found.dq, found.dk, found.dv
