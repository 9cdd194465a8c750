"""Attention of sequences of different lengths, one behind the other: ``(T, H, D)``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...api.varlen import attention_varlen, attention_varlen_vjp
from ...call.checks import check_integer, in_host_memory
from ...call.pages import check_pages, check_table
from .options import arguments, check_flags, check_tensor, results


@torch.compiler.disable(reason="flash_attn_varlen_func of nattn is not compiled, but called")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences, with the signature of flash-attention 2 and torch's gradients.

    Parameters
    ----------
    q : Tensor
        Queries of all sequences, ``(Tq, H, D)``, in host memory.
    k, v : Tensor
        Keys ``(Tk, Hkv, D)`` and values ``(Tk, Hkv, Dv)``; with a block table
        ``(pages, page_size, Hkv, D)`` and the same with ``Dv``.
    cu_seqlens_q, cu_seqlens_k : Tensor
        ``(B + 1,)`` integers: where each sequence begins and the last one ends. Sequences may be
        empty.
    max_seqlen_q, max_seqlen_k : int
        At least the length of the longest sequence. Nothing else depends on them.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_func`, with the lengths of each sequence.
    return_attn_probs : bool, default False
        Return ``(out, lse, None)``.
    block_table : Tensor, optional
        ``(B, n)`` integers: key ``j`` of sequence ``b`` is row ``j % page_size`` of page
        ``block_table[b, j // page_size]``. The keys are copied out of their pages;
        `flash_attn_with_kvcache` reads single queries' where they are.

    Returns
    -------
    out : Tensor
        ``(Tq, H, Dv)`` of q's dtype, 0 in rows of no sequence and in those that see no key.
    lse : Tensor, only with ``return_attn_probs=True``
        ``(H, Tq)``, with a gradient; -inf where `out` is 0 for that.

    Raises
    ------
    ValueError, TypeError
        For bad input, before anything is computed.
    NotImplementedError
        For tensors on a GPU.

    Examples
    --------
    >>> import torch
    >>> from nattn.integrations.flash_attn import flash_attn_varlen_func
    >>> q = torch.randn(100, 8, 64)
    >>> k, v = torch.randn(2, 100, 2, 64)
    >>> cu = torch.tensor([0, 30, 35, 100], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu, cu, 65, 65, causal=True).shape
    torch.Size([100, 8, 64])
    """
    check_tensor("q", q, "T, H, D")
    of_keys = "T, H, D" if block_table is None else "pages, page_size, H, D"
    check_tensor("k", k, of_keys)
    check_tensor("v", v, of_keys)
    check_flags(deterministic, return_attn_probs)
    _check_longest("q", max_seqlen_q, cu_seqlens_q)
    _check_longest("k", max_seqlen_k, cu_seqlens_k)
    if block_table is not None:
        k, v, cu_seqlens_k = _in_order(k, v, cu_seqlens_k, block_table)
    args = arguments(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    if dropout_p:
        args["seed"] = int(torch.randint(2**63 - 1, ()))
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, alibi_slopes)
    ):
        out, lse = _Varlen.apply(q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k, args)
    else:
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **args)
    return results(out, lse, return_attn_probs)


class _Varlen(torch.autograd.Function):
    """(q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k, args) to (out, lse)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Any, cu_q: Any, cu_k: Any, args: Any
    ) -> Any:
        (out, lse), ctx.vjp = attention_varlen_vjp(q, k, v, cu_q, cu_k, return_lse=True, **args)
        # which holds views of them: torch tells whether one has been changed since
        ctx.save_for_backward(q, k, v, slopes, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        out = ctx.saved_tensors[4]
        names = ("q", "k", "v", "alibi_slopes")
        wrt = tuple(x for x, n in zip(names, ctx.needs_input_grad, strict=False) if n)
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        found = ctx.vjp(dout, dlse=dlse, wrt=wrt)
        return found.dq, found.dk, found.dv, found.dalibi_slopes, None, None, None


def _check_longest(of: str, longest: Any, cu_seqlens: Any) -> None:
    name = f"max_seqlen_{of}"
    cu = in_host_memory(f"cu_seqlens_{of}", cu_seqlens)
    least = int(np.diff(cu).max(initial=0)) if cu.ndim == 1 else 0  # else it is refused later
    if check_integer(name, longest) < least:
        expected = f"at least {least}, the length of a sequence in cu_seqlens_{of}"
        raise ValueError(f"{name}: expected {expected}, got {longest}")


def _in_order(
    k: Tensor, v: Tensor, cu_seqlens_k: Any, block_table: Any
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Return keys and values that lie in pages one behind the other, and where each begins."""
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"v: expected shape {(*k.shape[:3], 'Dv')} to fit k {tuple(k.shape)}, got "
            f"{tuple(v.shape)}"
        )
    cu = in_host_memory("cu_seqlens_k", cu_seqlens_k)
    n_pages, page_size = k.shape[:2]
    lengths = cu[1:].astype(np.int64) - cu[:-1]
    table = check_table(block_table, len(lengths))
    room = page_size * table.shape[1]
    if (lengths < 0).any() or (lengths > room).any():
        expected = f"lengths from 0 to {room}, the keys of {table.shape[1]} pages"
        raise ValueError(f"cu_seqlens_k: expected {expected}, got {lengths.tolist()}")
    pages = check_pages(table, n_pages, page_size, lengths)
    items = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(begins[-1]) - begins[:-1][items]
    page = torch.from_numpy(pages.table[items, at // page_size] if at.size else at)
    row = torch.from_numpy(at % page_size if at.size else at)
    return k[page, row], v[page, row], begins


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_varlen_func` does, of keys and values in one ``(Tk, 2, Hkv, D)``."""
    check_tensor("kv", kv, "T, 2, H, D")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Do what `flash_attn_varlen_func` does, of all three in one tensor ``(T, 3, H, D)``."""
    check_tensor("qkv", qkv, "T, 3, H, D")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
