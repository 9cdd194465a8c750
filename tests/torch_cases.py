"""What the tests of FlexAttention share: the usual functions, and the dense formula in torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nattn.backends.error_budget import error_budget

theirs = importlib.import_module("torch.nn.attention.flex_attention")
Tensor = Any
Mod = Callable[..., Any]

B, H, Nq, Nk, D = 2, 4, 40, 36, 16


def gaussian(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(Hkv: int = H, dtype: Any = torch.float32, grad: bool = False) -> tuple[Tensor, ...]:
    shapes = (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, 8)
    return tuple(
        gaussian(*s, dtype=dtype, seed=n).requires_grad_(grad) for n, s in enumerate(shapes)
    )


def block_mask(mask_mod: Mod, *sizes: Any, **options: Any) -> Any:
    sizes = sizes or (None, None, Nq, Nk)
    return theirs.create_block_mask(mask_mod, *sizes, device="cpu", **options)


def on_all_pairs(
    mod: Mod, *score: Tensor, sizes: tuple[int, int, int, int] = (B, H, Nq, Nk)
) -> Tensor:
    """Call a function as FlexAttention does, for all pairs at once."""
    trick = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    indices = map(torch.arange, sizes)
    with trick.TransformGetItemToIndex():
        found: Tensor = theirs._vmap_for_bhqkv(mod, prefix=(0,) * len(score))(*score, *indices)
    return found


def dense(
    tensors: tuple[Tensor, ...], score_mod: Mod | None = None, mask_mod: Mod | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and scores by the formula in float64, for torch to differentiate."""
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    sizes = *q.shape[:3], k.shape[2]
    s = s if score_mod is None else on_all_pairs(score_mod, s, sizes=sizes)
    if mask_mod is not None:
        s = s.masked_fill(~on_all_pairs(mask_mod, sizes=sizes), -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    weights = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ v, s.logsumexp(-1), s


def assert_within_budget(
    got: tuple[Tensor, Tensor],
    s: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    expected: tuple[Tensor, Tensor],
    wide: float = 8.0,
) -> None:
    """Compare with float64; `wide` is how much a modifier may raise the error of a score."""
    dtype = np.dtype(str(q.dtype).removeprefix("torch."))
    u = float(np.finfo(dtype).eps) / 2
    size = q.detach().abs() @ k.detach().abs().repeat_interleave(H // k.shape[1], dim=1).mT
    largest = max(float(size.max()) / math.sqrt(D), float(s[s > -math.inf].abs().max()))
    budget = error_budget(
        dtype, Nk, largest, float(v.abs().max()), D, score_error=wide * (D + 8) * u * largest
    )
    for x, y, limit in zip(got, expected, budget, strict=True):
        np.testing.assert_allclose(x.detach(), y.detach(), rtol=0, atol=float(limit))


# The usual functions

table = gaussian(H, 2 * Nq + 1)
slopes = torch.exp2(-torch.arange(1.0, H + 1))
document_ids = torch.tensor([0] * 10 + [1] * 7 + [2] * 23)
prefix = torch.tensor([5, 11], dtype=torch.int32)
offset = torch.tensor(3)
pinned = gaussian(Nq) > 0


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + slopes[h] * (kv_idx - q_idx)


def alibi_without_table(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.exp2(-((h + 1) * 8.0 / H)) * (kv_idx - q_idx)


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def relative_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + table[h, q_idx - kv_idx + Nq]


def by_rows(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * 0.5 + table[h][q_idx] + table[1, kv_idx] - offset * 0.25


def gated(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    far = (q_idx - kv_idx).abs() > 8
    score = torch.where(far, score * torch.sigmoid(score), score)
    score = score.masked_fill(pinned[q_idx] & (kv_idx % 5 == 0), 0.5)
    return torch.nn.functional.softplus(score) + far


def causal_inside(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def in_place(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    score = score * 1.0
    score += torch.tensor(0.5) * h
    score.mul_(2)
    return score


SCORE_MODS = [
    alibi,
    alibi_without_table,
    softcap,
    relative_bias,
    by_rows,
    gated,
    causal_inside,
    in_place,
]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx <= 6) & (kv_idx - q_idx <= 2)


def prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)


def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return document_ids[q_idx] == document_ids[kv_idx]


def dilated(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    distance = torch.abs(q_idx - kv_idx)
    return (distance <= 12) & (distance % 3 == 0)


def natten(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Neighbours on a canvas of rows of 8: the centre of a window stays away from the edges."""
    qx, qy, kx, ky = q_idx // 8, q_idx % 8, kv_idx // 8, kv_idx % 8
    cx, cy = qx.clamp(1, 5 - 1 - 1), qy.clamp(1, 8 - 1 - 1)
    return ((cx - kx).abs() <= 1) & ((cy - ky).abs() <= 1)


def checkerboard(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.logical_or((q_idx + kv_idx) & 1 == h % 2, torch.logical_not(kv_idx.bool()))


def modalities(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Transfusion: causal, and images as a whole."""
    visible = q_idx >= kv_idx
    for start, length in ((4, 9), (20, 6)):
        image = (q_idx >= start) & (q_idx < start + length) & (kv_idx < start + length)
        visible = visible | (image & (kv_idx >= start))
    return visible


def nothing_early(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx > 7) & (kv_idx >= offset)


MASK_MODS = [
    causal,
    sliding_window,
    prefix_lm,
    document,
    dilated,
    natten,
    checkerboard,
    modalities,
    nothing_early,
    theirs.and_masks(causal, document, theirs.noop_mask),
    theirs.or_masks(sliding_window, dilated),
]
