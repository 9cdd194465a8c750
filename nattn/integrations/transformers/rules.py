"""transformers' functions of positions, recognised, in arguments of `nattn.attention`.

They are known by their code and read from what they close over. What is not known is left to
transformers: `Unknown`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import masking_utils

import nattn

_BLOCKS_PAY = 256
"""Rows from which on it pays to look for blocks of a mask that are empty, once for all layers."""
_FAR = 1 << 30
"""Farther than a sequence is long."""

Description = dict[str, Any]


class Unknown(Exception):
    """A mask that cannot be said in nattn's arguments."""


class Rule(NamedTuple):
    """What a query sees: keys from so far left to so far right that all functions let through."""

    left: int | None = None
    right: int | None = None
    mods: tuple[Callable[..., Any], ...] = ()

    def __and__(self, other: Rule) -> Rule:
        return Rule(
            _nearer(self.left, other.left), _nearer(self.right, other.right), self.mods + other.mods
        )

    def __or__(self, other: Rule) -> Rule:
        if Rule() in (self, other):
            return Rule()
        return Rule(mods=(nattn.mask(self.mask_mod()) | other.mask_mod(),))

    def mask_mod(self) -> Any:
        """Return the rule as one function."""
        parts = list(self.mods)
        if self.right == 0 and self.left is None:
            parts.append(nattn.masks.causal)
        elif not (self.left is None and self.right is None):
            left = _FAR if self.left is None else self.left
            right = _FAR if self.right is None else self.right
            parts.append(functools.partial(nattn.masks.sliding_window, left=left, right=right))
        return functools.reduce(lambda a, b: a & nattn.mask(b), map(nattn.mask, parts))


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@nattn.mask
def same_block(b: Any, h: Any, q_idx: Any, kv_idx: Any, block: Any) -> Any:
    """Show the query's own block; a query whose block is -1 has none.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    block : ndarray of int
        ``(B, N)``: the block of each position of each batch item.
    """
    own = block[b, q_idx]
    return (own == block[b, kv_idx]) & (own >= 0)


# Reading functions

_CODE = {
    masking_utils.causal_mask_function.__code__: "causal",
    masking_utils.bidirectional_mask_function.__code__: "all",
    masking_utils.and_masks().__code__: "and",
    masking_utils.or_masks().__code__: "or",
    masking_utils.sliding_window_overlay(1).__code__: "window",
    masking_utils.sliding_window_bidirectional_overlay(1).__code__: "window on both sides",
    masking_utils.chunked_overlay(1, torch.zeros(1)).__code__: "chunks",
    masking_utils.packed_sequence_mask_function(torch.zeros(1)).__code__: "packed",
    masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, torch.zeros(1)
    ).__code__: "remapped",
    masking_utils.blockwise_overlay(torch.zeros(1)).__code__: "blocks",
    masking_utils.padding_mask_function(torch.zeros(1)).__code__: "padding",
}
"""What the functions are called here, by their code, which all that one maker returns share."""


class _Reader:
    """Turns functions to rules, for sizes and offsets of one mask."""

    def __init__(self, description: Description) -> None:
        self.B: int = description["batch_size"]
        self.start: int = description["kv_offset"]
        self.first: int = description["q_offset"]
        self.stop = max(self.start + description["kv_length"], self.first + description["q_length"])

    def rule(self, function: Any, packed: Tensor | None = None) -> Rule:
        """Return what a function lets through, within sequences that are packed, if any are."""
        kind = _kind(function)
        bound = _bound(function)
        if kind == "causal":
            return Rule(right=0)
        if kind == "all":
            return Rule()
        if kind == "window":  # of so many keys, the query's own among them
            return Rule(left=int(bound["sliding_window"]) - 1)
        if kind == "window on both sides":
            return Rule(int(bound["sliding_window"]), int(bound["sliding_window"]))
        if kind in ("and", "or"):
            parts = bound["mask_functions"]
            if kind == "and":
                found = [_bound(x)["packed_sequence_mask"] for x in parts if _kind(x) == "packed"]
                packed = found[0] if found else packed
            rules = [self.rule(x, packed) for x in parts]
            if kind == "and":
                return functools.reduce(lambda a, b: a & b, rules, Rule())
            return functools.reduce(lambda a, b: a | b, rules)
        if kind == "remapped":
            if packed is None or not _counts_up(bound["position_ids"], packed):
                raise Unknown
            inner = self.rule(bound["mask_function"])
            if inner.mods:  # they may look at positions, not at their difference alone
                raise Unknown
            return inner
        if kind == "packed":
            return Rule(mods=(_same(self.positions(bound["packed_sequence_mask"])),))
        if kind == "chunks":
            place = torch.arange(self.stop) - _host(bound["left_padding"])[:, None]
            return Rule(mods=(_same(self.positions(place // int(bound["chunk_size"]))),))
        if kind == "blocks":
            block = self.positions(bound["block_sequence_ids"])
            return Rule(mods=(functools.partial(same_block, block=block),))
        raise Unknown

    def positions(self, x: Tensor) -> NDArray[Any]:
        """Return what belongs to positions, from that of the first key on, which nattn calls 0."""
        x = _host(x)
        if x.ndim != 2 or x.shape[0] < self.B or x.shape[1] < self.stop or self.first < self.start:
            raise Unknown
        return np.ascontiguousarray(x[: self.B, self.start :].numpy())


def _same(doc: NDArray[Any]) -> Any:
    return functools.partial(nattn.masks.document_batch, doc=doc)


def _kind(function: Any) -> str:
    kind = _CODE.get(getattr(function, "__code__", None))
    if kind is None:
        raise Unknown
    return kind


def _bound(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _host(x: Tensor) -> Tensor:
    return x.detach().cpu()


def _counts_up(position_ids: Tensor, packed: Tensor) -> bool:
    """Whether positions grow by one within a sequence, so that distances are what they were."""
    within = packed.diff(dim=-1) == 0
    return bool((position_ids.diff(dim=-1)[within.expand(position_ids.shape[0], -1)] == 1).all())


# Arguments


def arguments_of(description: Description) -> dict[str, Any]:
    """Return arguments of `nattn.attention` that hide what a description of a mask hides.

    Raises
    ------
    Unknown
        If its function is none that is known here.
    """
    Nq, Nk = description["q_length"], description["kv_length"]
    start = description["kv_offset"]
    offset = description["q_offset"] - start
    rule = _Reader(description).rule(description["mask_function"])
    args: dict[str, Any] = {}
    if rule != Rule():
        args["q_offset"] = offset
    if rule.right == 0:
        args["causal"] = True
    right = None if rule.right == 0 else rule.right
    if not (rule.left is None and right is None):
        args["window_size"] = (rule.left, right)
    if rule.mods:
        mask_mod = Rule(mods=rule.mods).mask_mod()
        if Nq < _BLOCKS_PAY:
            args["mask_mod"] = mask_mod
        else:
            sizes = (description["batch_size"], 1, Nq, Nk)
            args["block_mask"] = nattn.BlockMask.from_mask_mod(mask_mod, *sizes, q_offset=offset)
    return args | _padding(description["attention_mask"], description["batch_size"], start, Nk)


def _padding(real: Tensor | None, B: int, start: int, Nk: int) -> dict[str, Any]:
    """Say which keys are padding: by lengths where it lies behind, else by a mask of keys."""
    if real is None:
        return {}
    real = real[:, start : start + Nk]
    if real.shape[1] < Nk:
        real = torch.nn.functional.pad(real, (0, Nk - real.shape[1]))
    if bool(real.all()):
        return {}
    if real.shape[0] != B:
        raise Unknown
    places = torch.arange(1, Nk + 1, device=real.device)
    lengths = (real * places).amax(dim=-1) if Nk else places.new_zeros(B)
    args: dict[str, Any] = {"kv_lens": cast(list[int], lengths.tolist())}
    if bool((real != (places <= lengths[:, None])).any()):
        args["mask"] = real[:, None, None, :]
    return args
