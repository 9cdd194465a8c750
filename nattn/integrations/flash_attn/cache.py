"""Attention of new queries on a cache of keys and values, to which new ones may be added."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...api.generation import attention_with_kvcache
from ...call.checks import check_count, check_flag, check_integers
from ...call.pages import check_table
from ...call.validators import check_lengths, check_window
from .options import arguments, check_tensor


@torch.compiler.disable(reason="flash_attn_with_kvcache of nattn is not compiled, but called")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention on a cache, after new keys and values have been written to it, as they lie there.

    No gradient is recorded.

    Parameters
    ----------
    q : Tensor
        Queries, ``(B, Nq, H, D)``, in host memory.
    k_cache, v_cache : Tensor
        ``(C, S, Hkv, D)`` and ``(C, S, Hkv, Dv)`` of q's dtype, with room for ``S`` keys of each of
        at least ``B`` items; with a block table ``(pages, page_size, Hkv, D)`` and the same with
        ``Dv``. Pages may be of any size.
    k, v : Tensor, optional
        ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)``: written into the cache behind what is there.
    rotary_cos, rotary_sin : Tensor, optional
        ``(positions, R / 2)``, R even and at most D: the first R columns of keys in `k` are turned
        to ``cache_seqlens + i`` before they are written, and those of queries to ``cache_seqlens +
        i`` with `causal` or a window, otherwise to ``cache_seqlens``.
    cache_seqlens : int or Tensor, optional
        How many keys each item has, without `k`, ``(B,)``; `cache_leftpad` counts. By default the
        cache is full.
    cache_batch_idx : Tensor, optional
        ``(B,)``: which item of the cache is whose. Not beside a block table.
    cache_leftpad : Tensor, optional
        ``(B,)``: so many first keys of each item are none.
    block_table : Tensor, optional
        ``(B, n)``: key ``j`` of item ``b`` is row ``j % page_size`` of page
        ``block_table[b, j // page_size]``.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`; the last query sits on the last key, of `k` if there is one.
    rotary_interleaved : bool, default True
        Whether column ``2 i`` turns with ``2 i + 1``, otherwise ``i`` with ``i + R / 2``.
    num_splits : int, default 0
        Makes no difference: how keys are divided among threads never changes a bit.
    return_softmax_lse : bool, default False
        Return ``(out, lse)``.

    Returns
    -------
    out : Tensor
        ``(B, Nq, H, Dv)`` of q's dtype.
    lse : Tensor, only with ``return_softmax_lse=True``
        ``(B, H, Nq)``, -inf in rows that see no key.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        For bad input, and for tensors on a GPU. After any error the cache is as it was.

    Examples
    --------
    >>> import torch
    >>> from nattn.integrations.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 1, 100, 2, 64)
    >>> q = torch.randn(1, 1, 8, 64)
    >>> k, v = torch.randn(2, 1, 1, 2, 64)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=30, causal=True).shape
    torch.Size([1, 1, 8, 64])
    >>> bool((k_cache[:, 30] == k[:, 0]).all())
    True
    """
    check_tensor("q", q, "B, N, H, D")
    of_cache = "C, S, H, D" if block_table is None else "pages, page_size, H, D"
    check_tensor("k_cache", k_cache, of_cache)
    check_tensor("v_cache", v_cache, of_cache)
    check_count("num_splits", num_splits, 0)
    check_flag("return_softmax_lse", return_softmax_lse)
    B = len(q)
    for name, x, other in (("k", k, v), ("v", v, k)):
        if x is None and other is not None:
            raise ValueError(f"{name}: expected new keys and values, or none of both, got None")
        if x is not None:
            check_tensor(name, x, f"{B}, N, H, D")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx: expected None beside block_table, got both")
        # an item is a page of S keys
        block_table = _table_of_items(cache_batch_idx, B, len(k_cache), k is not None)
    elif block_table is None:
        k_cache, v_cache = k_cache[:B], v_cache[:B]
    room = k_cache.shape[1]
    if block_table is not None:
        room *= check_table(block_table, B).shape[1]
    if cache_seqlens is None and k is not None:
        raise ValueError("cache_seqlens: expected lengths beside k, got None")
    before = check_lengths("cache_seqlens", cache_seqlens, B, room)

    args = arguments(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if rotary_cos is not None or rotary_sin is not None:
        tables = _check_rotary(rotary_cos, rotary_sin, q.shape[3], k)
        check_flag("rotary_interleaved", rotary_interleaved)
        in_turn = causal or check_window(window_size) != (None, None)
        q = _turned(q, before, in_turn, *tables, rotary_interleaved)
        k = _turned(k, before, True, *tables, rotary_interleaved)
    if cache_leftpad is not None:
        most = int(before.max(initial=0)) + (0 if k is None else k.shape[1])
        padding = check_lengths("cache_leftpad", cache_leftpad, B, most)
        args["mask"] = (np.arange(most) >= padding[:, None])[:, None, None]
    return attention_with_kvcache(
        q.detach(),
        k_cache,
        v_cache,
        cache_seqlens=before,
        block_table=block_table,
        k_new=k,
        v_new=v,
        return_lse=return_softmax_lse,
        **args,
    )


def _table_of_items(value: Any, B: int, C: int, written: bool) -> NDArray[np.int64]:
    items = check_integers("cache_batch_idx", value, B)
    if any(not 0 <= x < C for x in items):
        raise ValueError(f"cache_batch_idx: expected items from 0 to {C - 1}, got {items}")
    if written and len(set(items)) < B:
        raise ValueError(f"cache_batch_idx: expected each item once beside k, got {items}")
    return np.array(items, np.int64)[:, None]


# Rotary positions, of tables


def _check_rotary(cos: Any, sin: Any, D: int, k: Tensor | None) -> tuple[Tensor, Tensor]:
    if k is None:
        raise ValueError("rotary_cos: expected new keys, k and v, beside it, got None")
    check_tensor("rotary_cos", cos, "positions, R / 2")
    check_tensor("rotary_sin", sin, "positions, R / 2")
    if 2 * cos.shape[1] > D:
        raise ValueError(
            f"rotary_cos: expected at most {D // 2} columns, half of q's, got {cos.shape[1]}"
        )
    if sin.shape != cos.shape:
        raise ValueError(
            f"rotary_sin: expected shape {tuple(cos.shape)} as of rotary_cos, got "
            f"{tuple(sin.shape)}"
        )
    return cos, sin


def _turned(
    x: Tensor,
    begins: NDArray[np.int64],
    in_turn: bool,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> Tensor:
    """Return x turned to its positions: row ``i`` to ``begins + i``, or all rows to ``begins``."""
    at = begins[:, None] + np.arange(x.shape[1]) * in_turn
    most = int(at.max(initial=-1)) + 1
    if most > len(cos):
        raise ValueError(f"rotary_cos: expected at least {most} positions, got {len(cos)}")
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[torch.from_numpy(at)].to(wide)[:, :, None] for table in (cos, sin))
    turning, rest = x.to(wide).tensor_split((2 * cos.shape[1],), dim=-1)
    if interleaved:
        a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = turning.tensor_split(2, dim=-1)
    new = a * c - b * s, a * s + b * c
    turned = torch.stack(new, -1).flatten(-2) if interleaved else torch.cat(new, -1)
    return torch.cat([turned, rest], -1).to(x.dtype)
