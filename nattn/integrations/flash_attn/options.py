"""What the functions of flash-attention have in common: their tensors and options, translated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...call.arguments import PackedArguments
from ...call.checks import check_flag, show


def check_tensor(name: str, x: Any, axes: str) -> None:
    """Raise unless something is a tensor of so many axes: "B, N, 3, H, D" says how many are 3."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor of torch, got {show(x)}")
    names = axes.split(", ")
    if x.ndim != len(names) or any(
        name.isdigit() and int(name) != n for name, n in zip(names, x.shape, strict=True)
    ):
        raise ValueError(f"{name}: expected shape ({axes}), got {tuple(x.shape)}")


def arguments(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float = 0.0,
) -> PackedArguments:
    """Return options as nattn calls them; it checks them, too."""
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
    }


def check_flags(deterministic: bool, return_attn_probs: bool) -> None:
    """Raise unless both are flags. Equal input gives equal bits, with the first or without."""
    check_flag("deterministic", deterministic)
    check_flag("return_attn_probs", return_attn_probs)


def results(out: Any, lse: Any, return_attn_probs: bool) -> Any:
    """Return what is asked for. Of probabilities there is no matrix."""
    return (out, lse, None) if return_attn_probs else out
