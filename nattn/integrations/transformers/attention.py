"""The function that transformers' models call in place of their own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import attention
from .caches import CachedRows
from .masks import LazyMask

_REFUSED = {
    "indices": "a selection of keys for each query",
    "block_indices": "a selection of blocks of keys for each query",
    "sinks": "sinks that differ from query to query",
}
"""What models pass that would change the result and that nattn does not compute."""


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, as ``attn_implementation="nattn"`` does.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; ``module.is_causal`` counts where neither a mask nor `is_causal` is given.
    query : Tensor
        ``(B, Hq, Nq, D)``, or of one batch item for all.
    key, value : Tensor
        ``(B, Hkv, Nk, D)`` and ``(B, Hkv, Nk, Dv)``, the heads not repeated. What a `NattnCache`
        returned is read where it lies, in pages and in int8.
    attention_mask : Tensor, optional
        Broadcast to ``(B, Hq, Nq, Nk)``: bool, True where a key is visible, or floats to be added
        to the scores. What `lazy_mask` returned is read, not expanded. It holds all that restricts
        what is seen: `is_causal` and `sliding_window` count only without it.
    scaling : float, optional
        Factor of the scores, ``1 / sqrt(D)`` by default.
    dropout : float, default 0.0
        Probability with which a weight is dropped, ruled by ``torch.manual_seed``; which ones
        differs from torch's own.
    is_causal : bool, optional
        Whether row ``i`` sees key ``j`` only if ``j <= i``. A single row sees all.
    sliding_window : int, optional
        Keys that a row sees, its own included, of a causal layer; of others how far it sees.
    softcap : float, optional
        Bound of the scores, smoothly approached.
    s_aux : Tensor, optional
        ``(Hq,)``: one more score in the softmax of each head.
    position_bias : Tensor, optional
        Broadcast to ``(B, Hq, Nq, Nk)`` and added to the scores.
    **kwargs
        What else models pass, and which changes nothing.

    Returns
    -------
    out : Tensor
        ``(B, Nq, Hq, Dv)`` of query's dtype. A row that sees no key is 0.
    weights : None
        They are never made.

    Raises
    ------
    ValueError
        If `indices`, `block_indices` or `sinks` are given.
    ValueError, TypeError
        As `nattn.attention` does.
    """
    _refuse(module, kwargs)
    query, key, value = _one_batch_size(query, key, value)
    if attention_mask is None:
        args = _without_mask(module, query, key, is_causal, sliding_window)
    elif isinstance(attention_mask, LazyMask) and not torch.compiler.is_compiling():
        args = attention_mask.arguments()
    else:
        if isinstance(attention_mask, LazyMask):  # made before what is compiled was called
            attention_mask = attention_mask.dense()
        args = {"mask" if attention_mask.dtype == torch.bool else "bias": attention_mask}
    if position_bias is not None:
        added = args.get("bias")
        args["bias"] = position_bias if added is None else position_bias + added
    given = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout or None}
    others: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    # In this order of axes the output is what a projection reads next, without a copy.
    q = query.transpose(1, 2)
    if isinstance(key, CachedRows):
        seen = _seen_in_cache(key, value, attention_mask, args)
        if seen is not None and not _is_recorded_or_drops(query, {**others, **seen}):
            return key.layer.cache.attend(q, **others, **seen), None
    k, v = (x.transpose(1, 2) for x in (key, value))
    return attention(q, k, v, layout="bnhd", **others, **args), None


def _seen_in_cache(
    key: CachedRows, value: Tensor, mask: Tensor | None, args: dict[str, Any]
) -> dict[str, Any] | None:
    """Say what is seen to a cache that is to be read where it lies; None if it cannot be."""
    if torch.compiler.is_compiling() or not key.is_current(value):
        return None
    N, window = key.end, key.layer.sliding_window
    if window is not None:  # a ring counts keys from the first one on, also those that are gone
        if not isinstance(mask, LazyMask) or "window_size" not in args or "bias" in args:
            return None
        args = mask.whole().arguments()
        left, _ = args["window_size"]
        if left is None or left >= window or mask.whole().shape[3] != N:
            return None
    args = dict(args)
    lens = args.pop("kv_lens", None)
    if lens is not None and "mask" not in args:
        args["mask"] = (torch.arange(N) < torch.tensor(lens)[:, None])[:, None, None, :]
    return args


def _is_recorded_or_drops(query: Tensor, args: dict[str, Any]) -> bool:
    """Whether torch records gradients, or draws what is dropped, which a cache knows nothing of."""
    tensors = [query, *(x for x in args.values() if isinstance(x, Tensor))]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return recorded or "dropout_p" in args


def _refuse(module: Any, kwargs: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: expected None, got {what} from {type(module).__name__}, which nattn "
                'would ignore; load this model with attn_implementation="eager"'
            )


def _one_batch_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Let learnt queries, one item for all, meet the keys of each."""
    sizes = {x.shape[0] for x in tensors}
    if len(sizes) == 2 and 1 in sizes:
        return tuple(x.expand(max(sizes), -1, -1, -1) for x in tensors)
    return tensors


def _without_mask(
    module: Any, query: Tensor, key: Tensor, is_causal: bool | None, window: int | None
) -> dict[str, Any]:
    """Say what is seen where no mask does: the first query sits on the first key."""
    Nq, Nk = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if Nq == 1:  # a query that was generated sits behind all keys, whatever it is called
        return {"window_size": (window - 1, None)} if window and is_causal and Nk > window else {}
    if is_causal:
        args: dict[str, Any] = {"causal": True, "q_offset": 0}
        return args | {"window_size": (window - 1, None)} if window else args
    return {"window_size": (window, window), "q_offset": 0} if window else {}
