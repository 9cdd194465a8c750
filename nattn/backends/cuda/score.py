"""What happens to a score between the products, as device functions of one pair of query and key.

The functions that users write for one score run on SIMD lanes on the CPU. A thread of a GPU works
on one score: here the same functions become part of the kernel, as scalars. So a kernel is compiled
for what a call does with scores (`Functions`), `steps` gives its factory the device functions, and
`operands` fills the fields of its argument record that they read.

The users' own functions come from `compiled_functions`, in the simulator `simulated_functions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...functions import on_lanes
from ...functions.dropout import philox
from . import compiled_functions, simulated_functions, twins
from .specialization import Evaluators, Functions
from .target import SIMULATED, device, load, read_uint8


class Steps(NamedTuple):
    """Device functions for a kernel; `a` is its argument record, with `operands.FIELDS`.

    `b` is the batch item, `h` the query head, `i` its row, `pos` the row's position on the key axis
    and `key` a key that causal, window and lengths leave to it.

    Attributes
    ----------
    change : function
        ``change(a, b, h, i, pos, key, s)``: what becomes of the score `s`, in the compute type;
        -inf where the key is hidden.
    change_full : function
        The same for a pair in a full block, where the mask function need not be asked.
    change_and_derive : function or None
        ``change_and_derive(a, b, h, i, pos, key, s)``: what `change` gives, and its derivative by
        `s`. None unless derivatives are wanted.
    words4 : function
        ``words4(a, b, h, i, four)``: random words of the keys ``4 * four`` to ``4 * four + 3``, of
        which those below ``a.threshold`` drop.
    """

    change: Any
    change_full: Any
    change_and_derive: Any
    words4: Any


@functools.lru_cache(maxsize=256)
def steps(functions: Functions) -> Steps:
    """Return the device functions for what a call does with its scores."""
    make = simulated_functions.evaluators if SIMULATED else compiled_functions.evaluators
    evaluators = make(functions)
    number = getattr(np, functions.dtype)
    change = _change(functions, evaluators, number, full=False)
    return Steps(
        change=change,
        change_full=_change(functions, evaluators, number, full=True),
        change_and_derive=_change_and_derive(functions, evaluators, number),
        words4=_words4(),
    )


def _device(function: Callable[..., Any]) -> Any:
    """Let kernels call a function; those of this file name nothing that the simulator replaces."""
    return function if SIMULATED else device(function)


def _change(functions: Functions, evaluators: Evaluators, number: Any, full: bool) -> Any:
    shown, add = _shown(functions), _add_bias(functions, number)
    restrict = _restrict(None if full else evaluators.visible, number)
    hidden = number(-np.inf)
    modify = _nothing_done
    for f in evaluators.modify:
        modify = _then(modify, f)

    def change(a, b, h, i, pos, key, s):
        if not shown(a, b, h, i, key):
            return hidden
        s = add(a, b, h, i, key, modify(a, b, h, pos, key, s))
        return restrict(a, b, h, pos, key, s)

    return _device(change)


def _change_and_derive(functions: Functions, evaluators: Evaluators, number: Any) -> Any:
    if not functions.derive:
        return None
    shown, add = _shown(functions), _add_bias(functions, number)
    restrict = _restrict(evaluators.visible, number)
    hidden, one = number(-np.inf), number(1)
    modify = _nothing_derived
    for f in evaluators.derive:
        modify = _then_derive(modify, f)

    def change_and_derive(a, b, h, i, pos, key, s):
        if not shown(a, b, h, i, key):
            return hidden, one
        s, slope = modify(a, b, h, pos, key, s, one)
        s = add(a, b, h, i, key, s)
        return restrict(a, b, h, pos, key, s), slope

    return _device(change_and_derive)


@_device
def _nothing_done(a, b, h, pos, key, s):
    return s


@_device
def _nothing_derived(a, b, h, pos, key, s, slope):
    return s, slope


def _then(f, g):
    return _device(lambda a, b, h, pos, key, s: g(a, b, h, pos, key, f(a, b, h, pos, key, s)))


def _then_derive(f, g):
    def both(a, b, h, pos, key, s, slope):
        s, slope = f(a, b, h, pos, key, s, slope)
        return g(a, b, h, pos, key, s, slope)

    return _device(both)


def _shown(functions: Functions) -> Any:
    """Return ``f(a, b, h, i, key)``: whether the mask array shows a key."""
    if not functions.mask:
        return _device(lambda a, b, h, i, key: True)

    def shown(a, b, h, i, key):
        at = a.mask_ptr + b * a.mask_b + h * a.mask_h + i * a.mask_i + key * a.mask_j
        return read_uint8(at) != 0

    return _device(shown)


def _add_bias(functions: Functions, number: Any) -> Any:
    """Return ``f(a, b, h, i, key, s)``: the score with the bias; -inf on either side hides."""
    if functions.bias is None:
        return _device(lambda a, b, h, i, key, s: s)
    read, hidden = load(functions.bias), number(-np.inf)
    if SIMULATED:  # where rounding a large number would warn
        number = twins.in_silence(number)

    def add(a, b, h, i, key, s):
        at = a.bias_ptr + b * a.bias_b + h * a.bias_h + i * a.bias_i + key * a.bias_j
        x = number(read(at))
        if s == hidden or x == hidden:
            return hidden
        return s + x

    return _device(add)


def _restrict(visible: Any, number: Any) -> Any:
    """Return ``f(a, b, h, pos, key, s)``: the score, -inf where the mask function hides it."""
    if visible is None:
        return _device(lambda a, b, h, pos, key, s: s)
    hidden = number(-np.inf)

    def restrict(a, b, h, pos, key, s):
        return s if visible(a, b, h, pos, key) else hidden

    return _device(restrict)


@_device
def kind(a, b, h, i, key):
    """Return the kind of a pair's block, one of `masks.EMPTY`, `MIXED` and `FULL`."""
    size = a.block_size
    at = a.blocks_ptr + b * a.blocks_b + h * a.blocks_h + i // size * a.blocks_i + key // size
    return read_uint8(at)


@_device
def sees_block(a, b, h, i, lo, hi):
    """Return 1 if a row sees something of the blocks of the keys lo <= j < hi, else 0."""
    block = lo // a.block_size
    while block * a.block_size < hi:
        if kind(a, b, h, i, block * a.block_size) != 0:
            return 1
        block += 1
    return 0


def _words4() -> Any:
    if SIMULATED:

        def words(a, b, h, i, four):
            c0, c1, c2, c3 = simulated_functions.indices(four, i, h, b)
            found = philox(c0, c1, c2, c3, a.seed_low, a.seed_high)
            return tuple(int(x[0]) for x in found)

        return words
    mixed = on_lanes.compilable(philox, device, device)
    return device(lambda a, b, h, i, four: mixed(four, i, h, b, a.seed_low, a.seed_high))
