"""Which blocks of a mask a call may skip: `BlockMask`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ..functions import binding
from ..functions.masks import EMPTY, FULL, MIXED, described
from . import tensors
from .checks import FAR, Integers, check_integer, check_integers


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask function and the kinds of its blocks, found once and used in many calls.

    `nattn.attention` skips the blocks that are empty and leaves the function out where they are
    full; the result has the same bits as with ``mask_mod`` alone. Made by `from_mask_mod`.

    Attributes
    ----------
    mask_mod : Bound or Combination
        The mask.
    B, H : int
        Batch items and query heads; 1 stands for any number, all alike.
    Nq, Nk : int
        Query rows and keys.
    q_offset : ndarray
        ``(B,)`` int64: row ``i`` of item ``b`` sits at ``i + q_offset[b]`` on the key axis.
    block_size : int
        Rows, and keys, of a block. The last ones may hold fewer.
    kinds : ndarray
        ``(B, H, ceil(Nq / block_size), ceil(Nk / block_size))`` uint8: `EMPTY`, `MIXED` or `FULL`.
    """

    classify: ClassVar[Callable[..., NDArray[np.uint8]]]

    mask_mod: binding.Tree
    B: int
    H: int
    Nq: int
    Nk: int
    q_offset: NDArray[np.int64]
    block_size: int
    kinds: NDArray[np.uint8]

    @property
    def sparsity(self) -> float:
        """Share of the blocks that are empty, 0 if there are none."""
        return float(np.mean(self.kinds == EMPTY)) if self.kinds.size else 0.0

    def __repr__(self) -> str:
        empty, mixed, full = (int(np.sum(self.kinds == kind)) for kind in (EMPTY, MIXED, FULL))
        return (
            f"<{type(self).__name__} of {described(self.mask_mod)}, B={self.B}, H={self.H}, "
            f"Nq={self.Nq}, Nk={self.Nk}, blocks of {self.block_size}: {empty} empty, "
            f"{mixed} mixed, {full} full, sparsity {self.sparsity:.1%}>"
        )

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[..., Any],
        B: int,
        H: int,
        Nq: int,
        Nk: int,
        q_offset: Integers | None = None,
        block_size: int = 128,
    ) -> Self:
        """Classify the blocks of a mask: empty, full or mixed.

        Every pair of a query and a key is looked at once, in SIMD code and in parallel, and
        nothing is kept but a byte for each block.

        Parameters
        ----------
        mask_mod : callable
            ``mask_mod(b, h, q_idx, kv_idx)``, as for `nattn.attention`. What it is bound to must
            not change while the block mask is in use.
        B, H : int
            Batch items and query heads; 1 serves any number, if the mask looks at neither.
        Nq, Nk : int
            Query rows and keys.
        q_offset : int or (B,) integers, optional
            Position of query row 0 on the key axis, ``Nk - Nq`` by default. Calls must have the
            same.
        block_size : int, default 128
            Query rows, and keys, of a block.

        Returns
        -------
        BlockMask
            To be passed as ``block_mask``; see `nattn.BlockMask` for its attributes.

        Raises
        ------
        ValueError, TypeError
            For bad sizes, or a function that is none or that SIMD lanes cannot express.
        IndexError
            If the function indexes a bound array out of range.

        Examples
        --------
        >>> import nattn
        >>> blocks = nattn.BlockMask.from_mask_mod(nattn.masks.causal, 1, 1, 512, 512)
        >>> blocks.kinds[0, 0]
        array([[1, 0, 0, 0],
               [2, 1, 0, 0],
               [2, 2, 1, 0],
               [2, 2, 2, 1]], dtype=uint8)
        >>> round(blocks.sparsity, 3)
        0.375
        """
        tree = binding.resolve("mask_mod", mask_mod, binding.MASK_MOD, describe=tensors.bound_view)
        B, H, Nq, Nk = (_size(*x) for x in (("B", B), ("H", H), ("Nq", Nq), ("Nk", Nk)))
        block_size = min(_size("block_size", block_size, least=1), max(Nq, Nk, 1))
        exact = check_integers("q_offset", Nk - Nq if q_offset is None else q_offset, B)
        # As far as any array reaches; Problem compares what is left of larger ones.
        offset = np.clip(np.array(exact, object), -FAR, FAR).astype(np.int64)
        kinds = cls.classify(tree, B, H, Nq, Nk, offset, block_size)
        return cls(tree, B, H, Nq, Nk, offset, block_size, kinds)


def _size(name: str, value: Any, least: int = 0) -> int:
    size = check_integer(name, value)
    if size < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {size}")
    return size
