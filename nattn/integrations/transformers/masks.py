"""Masks that are not made: what transformers asks for is kept, and read by the attention function.

transformers describes a mask by sizes, offsets, padding, and a function of positions that is put
together from a few of its own. `lazy_mask` keeps the description; `arguments_of` says the same in
arguments of `nattn.attention`, which skip what is hidden. Whatever else looks at the mask finds the
tensor that transformers itself would have made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from .lazy import LazyTensor
from .rules import Unknown, arguments_of


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Describe the mask of a layer, in place of transformers' own functions that make one.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Sizes of the mask.
    q_offset, kv_offset : int or Tensor, default 0
        Position of the first query, and of the first key.
    mask_function : callable, optional
        ``mask_function(batch_idx, head_idx, q_idx, kv_idx)`` on tensors of positions, True where
        the key is visible.
    attention_mask : Tensor, optional
        ``(B, positions)`` bool: False on padding.
    use_vmap : bool, default False
        Whether `mask_function` must be called with single positions.
    device : torch.device, default "cpu"
        Where the mask is to be.
    **kwargs
        What else transformers passes, and which says when no mask would be needed. One is always
        described here, also where all is visible: what None means depends on the layer.

    Returns
    -------
    LazyMask
        ``(B, 1, Nq, Nk)`` bool; within `torch.compile` and where something else is traced a plain
        tensor.
    """
    description: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    if any(is_tracing(x) for x in (attention_mask, q_offset, kv_offset)):
        return dense(description)
    # A cache counts on in the tensor that it passes, before the layers ask for the mask.
    description.update(q_offset=int(q_offset), kv_offset=int(kv_offset))
    return LazyMask(description)


def dense(description: dict[str, Any]) -> Tensor:
    """Make the mask that is described, as transformers does."""
    made: Tensor = sdpa_mask(
        **description, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )
    return made


class LazyMask(LazyTensor):
    """A mask ``(B, 1, Nq, Nk)`` of bool that is made when an operation of torch needs its elements.

    Attributes
    ----------
    description : dict
        Arguments of transformers' functions that make masks.
    """

    description: dict[str, Any]
    _dense: Tensor | None
    _arguments: dict[str, Any] | None
    _whole: LazyMask | None
    _may_have_changed: bool

    @staticmethod
    def __new__(cls, description: dict[str, Any]) -> LazyMask:
        """Make a tensor without elements."""
        names = ("batch_size", "q_length", "kv_length")
        B, Nq, Nk = (description[name] for name in names)
        made: LazyMask = Tensor._make_wrapper_subclass(
            cls, (B, 1, Nq, Nk), dtype=torch.bool, device=torch.device(description["device"])
        )
        return made

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self._dense = None
        self._arguments = None
        self._whole = None
        self._may_have_changed = False

    def __repr__(self, **kwargs: Any) -> str:
        made = "" if self._dense is None else ", made"
        return f"<LazyMask of shape {tuple(self.shape)}{made}>"

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def dense(self) -> Tensor:
        """Return the mask as a plain tensor, made at the first call."""
        if self._dense is None:
            self._dense = dense(self.description)
        return self._dense

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `nattn.attention` that hide what the mask hides."""
        if self._may_have_changed:
            return {"mask": self.dense()}
        if self._arguments is None:
            try:
                self._arguments = arguments_of(self.description)
            except Unknown:
                self._arguments = {"mask": self.dense()}
        return dict(self._arguments)

    def whole(self) -> LazyMask:
        """Return the mask of all keys, those before its first one included."""
        if self._whole is None:
            end = self.description["kv_offset"] + self.description["kv_length"]
            self._whole = LazyMask({**self.description, "kv_offset": 0, "kv_length": end})
        return self._whole

    def before(self, func: Any, is_written: bool) -> None:
        """Count on the elements from now on if they may change: at once, or through a view."""
        self._may_have_changed |= any(x.alias_info is not None for x in func._schema.arguments)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator with the elements of the mask; a detached mask stays as it is."""
        if func is torch.ops.aten.detach.default and not args[0]._may_have_changed:
            return LazyMask(args[0].description)
        return super().__torch_dispatch__(func, types, args, kwargs)
