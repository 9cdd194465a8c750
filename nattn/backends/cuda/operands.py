"""What happens to scores, as values: the fields of a kernel's argument record that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...call.problem import Problem
from ...functions import on_lanes
from ...functions.dropout import drop_threshold
from . import simulated_functions
from .memory import DeviceMemory
from .specialization import Functions, functions_of
from .target import SIMULATED

Locate = Callable[[NDArray[Any]], tuple[int, tuple[int, ...]]]

FIELDS = (
    # address of the words that users' functions are bound to
    "words_ptr",
    # byte address, and byte strides over item, head, row, key
    *("mask_ptr", "mask_b", "mask_h", "mask_i", "mask_j"),
    *("bias_ptr", "bias_b", "bias_h", "bias_i", "bias_j"),
    # the kinds of blocks, a byte each: the keys of a row of blocks lie side by side
    *("blocks_ptr", "blocks_b", "blocks_h", "blocks_i", "block_size"),
    # address of an int64 for each name of `Functions.names`, which becomes 1 if that indexed out of
    # range
    "error_flags_ptr",
    # dropout: the seed's halves; the random words below the threshold drop
    *("seed_low", "seed_high", "threshold"),
)
"""Fields of a kernel's argument record, all int64; those that a call has no use for are 0."""


def bound_words(problem: Problem, locate: Locate) -> list[int]:
    """Return what the users' functions of a problem are bound to, as int64 words.

    Parameters
    ----------
    problem : Problem
        The call.
    locate : callable
        Returns the address and the byte strides of an array on the device: `DeviceMemory.view`.
    """

    def checked(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
        ptr, strides = locate(array)
        _check_aligned("an array that a function is bound to", ptr, strides, array.itemsize)
        if max(map(abs, strides), default=0) >= 1 << 31 > max(map(abs, array.strides)):
            raise NotImplementedError(
                "cuda: expected an array that a function is bound to without overlapping rows, got "
                f"one of shape {array.shape} and strides {array.strides}, too large to be copied"
            )
        return ptr, strides

    p = problem
    every = (*p.score_mods, *(() if p.mask_mod is None else (p.mask_mod,)))
    return [word for tree in every for word in on_lanes.words(tree, checked)]


def _check_aligned(what: str, ptr: int, strides: tuple[int, ...], itemsize: int) -> None:
    """Raise for what a GPU cannot read: it faults where an element straddles its place."""
    if any(x % itemsize for x in (ptr, *strides)):
        raise NotImplementedError(
            f"cuda: expected {what} whose elements lie at multiples of their {itemsize} bytes, got "
            f"the address {ptr:#x} and strides {strides}"
        )


def arguments(problem: Problem, memory: DeviceMemory, error_flags_ptr: int) -> tuple[int, ...]:
    """Return the values of `FIELDS` for a problem, its arrays brought to the device.

    Parameters
    ----------
    problem : Problem
        The call.
    memory : DeviceMemory
        What the call holds on the device.
    error_flags_ptr : int
        Address of as many int64 on the device as there are users' functions, all 0.

    Raises
    ------
    NotImplementedError
        For arrays that a GPU cannot read.
    TypeError
        In the simulator, for a users' function that arrays cannot express.
    """
    p = problem
    words = np.array(bound_words(p, memory.view) or [0], np.int64)
    found = [memory.upload(words)]
    for name, array in (("the mask", p.mask), ("the bias", p.bias)):
        ptr, strides = (0, (0,) * 4) if array is None else memory.view(array)
        _check_aligned(name, ptr, strides, 1 if array is None else array.itemsize)
        found += [ptr, *strides]
    if p.block_mask is None:
        found += [0] * 5
    else:
        kinds = np.ascontiguousarray(p.block_mask.kinds)
        by_b, by_h = (0 if kinds.shape[n] == 1 else kinds.strides[n] for n in (0, 1))
        found += [memory.upload(kinds), by_b, by_h, kinds.strides[2], p.block_mask.block_size]
    found.append(error_flags_ptr)
    dropout = p.dropout_p > 0.0
    found += [p.seed & 0xFFFFFFFF, p.seed >> 32] if dropout else [0, 0]
    found.append(drop_threshold(p.dropout_p) if dropout else 0)
    if SIMULATED:
        simulated_functions.try_out(functions_of(p), found[0])
    return tuple(found)


def raise_for_flags(functions: Functions, error_flags: NDArray[np.int64]) -> None:
    """Raise the error that a kernel could only flag.

    Raises
    ------
    IndexError
        If a bound array was indexed out of range for a key that its row sees.
    """
    bits = sum(1 << int(n) for n in np.flatnonzero(error_flags))
    on_lanes.raise_for_flags(functions.names, bits)
