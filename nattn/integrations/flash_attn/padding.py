"""Padded batches and packed sequences, one made of the other, as in flash_attn.bert_padding."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Return some rows of a tensor."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return so many rows: those of `values` in their places, and 0."""
    rows = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return rows.index_put((indices,), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return packed rows as a batch ``(batch, seqlen, ...)``, 0 where there are none.

    Parameters
    ----------
    hidden_states : Tensor
        ``(T, ...)``.
    indices : Tensor
        ``(T,)``: which row of the flattened batch each is, as `unpad_input` returned them.
    batch, seqlen : int
        Of the batch.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return those rows of a batch that are real, one behind the other.

    Parameters
    ----------
    hidden_states : Tensor
        ``(B, N, ...)``.
    attention_mask : Tensor
        ``(B, N)``, bool or 0 and 1: which rows are real.
    unused_mask : Tensor, optional
        The same of rows that are kept, too, but not counted in `seqused`.

    Returns
    -------
    rows : Tensor
        ``(T, ...)``.
    indices : Tensor
        ``(T,)``, for `pad_input`.
    cu_seqlens : Tensor
        ``(B + 1,)`` int32.
    max_seqlen : int
        Length of the longest.
    seqused : Tensor
        ``(B,)`` int32: how many rows of each item are real.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return rows, indices, cu_seqlens, int(lengths.max()), used
