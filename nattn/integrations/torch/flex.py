"""torch's FlexAttention, its meaning computed by nattn: functions of scores, and block masks."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    _ordered_to_dense,
    _sliced_mask_mod_error,
)

from ...call.block_mask import BlockMask as Blocks
from ...functions.masks import EMPTY, FULL, Mask, mask
from .autograd import FLOATS, attention
from .translate import on_tensors, translate


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Do what `torch.nn.attention.flex_attention.flex_attention` does, with its signature.

    Nothing of the size of the scores is made, on the processor neither, and there are gradients.

    Parameters
    ----------
    query : Tensor
        ``(B, Hq, L, E)``: float16, bfloat16, float32 or float64.
    key, value : Tensor
        ``(B, H, S, E)`` and ``(B, H, S, Ev)``; with a block mask for all of B, of one batch item
        too. H is Hq, or with `enable_gqa` divides it.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx)``, written for torch: see `translate`.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        A pair is visible if its block is listed and, unless it is listed as full, the mask_mod is
        true.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(E)`` by default.
    enable_gqa : bool, default False
        Whether several query heads may share a key head.
    return_lse : bool, default False
        Return `lse` too.
    kernel_options : dict, optional
        Ignored: it tunes torch's kernels.
    return_aux : AuxRequest, optional
        Return an AuxOutput too, with `lse` if it is asked for.

    Returns
    -------
    out : Tensor
        ``(B, Hq, L, Ev)``. A row that sees no key is 0. Gradients reach query, key, value and the
        tensors that `score_mod` captures, also through what it computes of them alone.
    lse : Tensor, only with ``return_lse=True``
        Natural logarithm of the sum of the exponentials of the scores, ``(B, Hq, L)``, -inf for a
        row that sees no key.
    aux : AuxOutput, only with `return_aux`
        ``aux.lse`` is that or None.

    Raises
    ------
    ValueError, TypeError
        If shapes, sizes or dtypes do not fit.
    IndexError
        If a function indexes a captured tensor out of range, for a visible pair.
    NotImplementedError
        For ``return_aux.max_scores``, operations that nattn has not, gradients of captured tensors
        on a GPU and second derivatives.

    Notes
    -----
    Functions are traced anew where something has changed that they refer to. The blocks of a mask
    are looked at once for each BlockMask; what its mask_mod captures is read in every call, but
    for blocks that were empty or full. All this takes time that compiled kernels do not: reuse
    functions and block masks.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from nattn.integrations.torch import flex_attention
    >>> q = torch.randn(1, 8, 200, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 1, 2, 200, 64)
    >>> causal = create_block_mask(lambda b, h, i, j: j <= i, None, None, 200, 200, device="cpu")
    >>> def softcap(score, b, h, q_idx, kv_idx):
    ...     return 20 * torch.tanh(score / 20)
    >>> out = flex_attention(q, k, v, softcap, causal, enable_gqa=True)
    >>> out.sum().backward()
    >>> bool(torch.allclose(out[:, 3, 0], v[:, 0, 0])), q.grad.shape
    (True, torch.Size([1, 8, 200, 64]))
    """
    query, key, value = _checked(query, key, value, block_mask, enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse: expected False beside return_aux, got True")
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux: expected AuxRequest, got {type(return_aux).__name__}")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(
            "return_aux: expected max_scores=False, got True, and nattn has no largest scores"
        )
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options: expected a dict, got {type(kernel_options).__name__}")
    args: dict[str, Any] = {}
    if score_mod is not None:
        args["score_mod"] = on_tensors(score_mod, query.device)
    if block_mask is not None:
        args["block_mask"] = _blocks(block_mask, query, key)
    if scale is not None:
        args["scale"] = scale
    out, lse = attention(query, key, value, q_offset=0, return_lse=True, **args)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _checked(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Check shapes and dtypes, and return the tensors with the same batch."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            raise NotImplementedError(
                f"{name}: expected a dense tensor, got a nested or sparse one"
            )
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 axes, (B, H, N, E), got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS or x.dtype != query.dtype:
            taken = "float16, bfloat16, float32 or float64"
            expected = taken if name == "query" else f"{query.dtype} as of query"
            raise TypeError(f"{name}: expected {expected}, got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name}: expected device {query.device} as of query, got {x.device}")
    (B, Hq, _, E), (Bk, H, S, Ek) = query.shape, key.shape
    if Ek != E:
        raise ValueError(f"key: expected {E} columns as of query, got {Ek}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value: expected shape {(Bk, H, S, 'Ev')} as of key, got {tuple(value.shape)}"
        )
    if Hq != H and not enable_gqa:
        raise ValueError(
            f"key: expected {Hq} heads as of query, got {H}; did you mean enable_gqa=True?"
        )
    if H == 0 or Hq % H:
        raise ValueError(f"key: expected a number of heads that divides {Hq}, got {H}")
    if Bk == B:
        return query, key, value
    if Bk != 1 or block_mask is None:
        raise ValueError(f"key: expected {B} batch items as of query, got {Bk}")
    return query, key.expand(B, -1, -1, -1), value.expand(B, -1, -1, -1)


# Block masks

_known: weakref.WeakKeyDictionary[BlockMask, tuple[tuple[Any, ...], Blocks]] = (
    weakref.WeakKeyDictionary()
)
"""What was made of each block mask, and from which of its parts, for what sizes."""


def _blocks(block_mask: BlockMask, query: Tensor, key: Tensor) -> Blocks:
    """Return nattn's block mask for one of torch, from memory while it is the same."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got "
            f"{type(block_mask).__name__}"
        )
    if block_mask.mask_mod is _sliced_mask_mod_error:
        raise ValueError(
            "block_mask: expected one with a mask_mod, got a slice, which has none until it is "
            "given one, made from that of the whole"
        )
    sizes = (*query.shape[:3], key.shape[2])
    parts = (sizes, block_mask.mask_mod, block_mask.seq_lengths, *_listing(block_mask))
    found = _known.get(block_mask)
    if found is None or any(
        x is not y and not (isinstance(x, tuple) and x == y)
        for x, y in zip(found[0], parts, strict=True)
    ):
        found = _known[block_mask] = parts, _made(block_mask, *sizes)
    return found[1]


def _listing(block_mask: BlockMask) -> tuple[Any, ...]:
    return (
        *(block_mask.kv_num_blocks, block_mask.kv_indices),
        *(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )


def _made(block_mask: BlockMask, B: int, Hq: int, Nq: int, Nk: int) -> Blocks:
    rows, columns = block_mask.BLOCK_SIZE
    large = 1 << 30  # one block, for any lengths: torch's own sign for no mask
    if not rows == columns == large and tuple(block_mask.seq_lengths) != (Nq, Nk):
        raise ValueError(
            f"block_mask: expected one for the lengths {(Nq, Nk)} of query and key, got one for "
            f"{tuple(block_mask.seq_lengths)}"
        )
    rows, columns = min(rows, max(Nq, 1)), min(columns, max(Nk, 1))
    counts, indices, full_counts, full_indices = _listing(block_mask)
    partial = _dense(counts, indices, -(-Nq // rows), -(-Nk // columns))
    full = np.zeros_like(partial)
    if full_counts is not None:
        full = _dense(full_counts, full_indices, *partial.shape[2:])
    b, h = partial.shape[:2]
    if b not in (1, B) or h not in (1, Hq):
        raise ValueError(
            f"block_mask: expected {B} batch items and {Hq} heads, or 1, got {b} and {h}"
        )
    function = _in_host_memory(
        translate(block_mask.mask_mod, "mask_mod", device=block_mask.kv_num_blocks.device)
    )
    if _agree(function, partial, full, rows, columns, Nq, Nk):
        return Blocks.from_mask_mod(function, b, h, Nq, Nk, q_offset=0)
    shape = (B, Hq, *partial.shape[2:])
    bind = functools.partial(_listed, rows=rows, columns=columns)
    whole: Mask = mask(functools.partial(bind, blocks=np.broadcast_to(full, shape)))
    some: Mask = mask(functools.partial(bind, blocks=np.broadcast_to(partial, shape)))
    return Blocks.from_mask_mod(whole | (some & function), B, Hq, Nq, Nk, q_offset=0)


def _dense(counts: Tensor, indices: Tensor, rows: int, columns: int) -> NDArray[np.bool_]:
    """Return which blocks are listed, ``(B, H, rows, columns)``."""
    width = max(columns, indices.shape[-1])
    found = _ordered_to_dense(counts.cpu(), indices.cpu(), width).bool()
    found = found.reshape((1,) * (4 - found.ndim) + found.shape)
    if found.shape[2] < rows:
        raise ValueError(
            f"block_mask: expected {rows} rows of blocks for these lengths, got {found.shape[2]}"
        )
    return found[:, :, :rows, :columns].numpy()  # type: ignore[no-any-return]


def _in_host_memory(function: Any) -> Any:
    """Bind a function to copies of tensors that lie on a GPU."""
    if not isinstance(function, functools.partial):
        return function
    arrays = {
        n: x.cpu().numpy() if isinstance(x, Tensor) else x for n, x in function.keywords.items()
    }
    return functools.partial(function.func, **arrays)


def _agree(
    function: Any,
    partial: NDArray[np.bool_],
    full: NDArray[np.bool_],
    rows: int,
    columns: int,
    Nq: int,
    Nk: int,
) -> bool:
    """Tell whether the mask_mod alone says what it says together with the list of blocks."""
    if rows >= Nq and columns >= Nk:
        size = max(rows, columns)
    elif rows >= Nq or columns >= Nk:  # along one axis there is one block, however large
        size = columns if rows >= Nq else rows
    else:
        size = math.gcd(rows, columns)
    b, h = partial.shape[:2]
    kinds = Blocks.from_mask_mod(function, b, h, Nq, Nk, q_offset=0, block_size=size).kinds
    i = np.arange(kinds.shape[2])[:, None] * size // rows
    j = np.arange(kinds.shape[3]) * size // columns
    partial, full = partial[:, :, i, j], full[:, :, i, j]
    wrong = (full & (kinds != FULL)) | (~(full | partial) & (kinds != EMPTY))
    return not wrong.any()


def _listed(b: Any, h: Any, q_idx: Any, kv_idx: Any, blocks: Any, rows: Any, columns: Any) -> Any:
    """Show the pairs of which the block is listed."""
    return blocks[b, h, q_idx // rows, kv_idx // columns]
