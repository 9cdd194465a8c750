"""Attention of a batch of sequences of one length: ``(B, N, H, D)``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..torch import attention
from .options import arguments, check_flags, check_tensor, results


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, with the signature of flash-attention 2 and torch's gradients.

    Parameters
    ----------
    q : Tensor
        Queries, ``(B, Nq, H, D)`` of float16, bfloat16, float32 or float64.
    k, v : Tensor
        Keys ``(B, Nk, Hkv, D)`` and values ``(B, Nk, Hkv, Dv)``; ``H % Hkv == 0``.
    dropout_p : float, default 0.0
        Probability that a weight is dropped; ``torch.manual_seed`` rules which.
    softmax_scale : float, optional
        ``1 / sqrt(D)`` by default.
    causal : bool, default False
        Query ``i`` sees no key behind ``i + Nk - Nq``: the last query sits on the last key.
    window_size : (int, int), default (-1, -1)
        How many keys it sees before and behind that one; -1 for all.
    softcap : float, default 0.0
        If it is not 0 scores are ``softcap * tanh(score / softcap)``.
    alibi_slopes : Tensor, optional
        ``(H,)`` or ``(B, H)``: the slope times ``|i + Nk - Nq - j|`` is taken from a score.
    deterministic : bool, default False
        Makes no difference: equal input gives equal bits.
    return_attn_probs : bool, default False
        Return ``(out, lse, None)``. There is no matrix of probabilities to return.

    Returns
    -------
    out : Tensor
        ``(B, Nq, H, Dv)`` of q's dtype, 0 in rows that see no key.
    lse : Tensor, only with ``return_attn_probs=True``
        ``(B, H, Nq)``, the logarithm of the sum of exponentials, which has a gradient, too. In rows
        that see no key it is -inf, where flash-attention has inf.

    Raises
    ------
    ValueError, TypeError
        For bad input, before anything is computed.

    Examples
    --------
    >>> import torch
    >>> from nattn.integrations.flash_attn import flash_attn_func
    >>> q = torch.randn(1, 3, 8, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 1, 100, 2, 64)
    >>> flash_attn_func(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 3, 8, 64])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, "B, N, H, D")
    check_flags(deterministic, return_attn_probs)
    args = arguments(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    out, lse = attention(q, k, v, return_lse=True, layout="bnhd", **args)
    return results(out, lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_func` does, of keys and values in one tensor ``(B, Nk, 2, Hkv, D)``."""
    check_tensor("kv", kv, "B, N, 2, H, D")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_func` does, of all three in one tensor ``(B, N, 3, H, D)``."""
    check_tensor("qkv", qkv, "B, N, 3, H, D")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
