"""Tensors that functions of scores and masks are bound to: inputs of a call like q, k and v.

torch records gradients of a Function's inputs alone, unwraps them for its transforms and keeps them
for the backward pass. So `opened` takes the tensors out of a function and leaves their numbers in
their places, and `closed` puts them in again as arrays, where they can be read. A compiler sees no
further than plain Python: `apart` writes a function as tuples for it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...call.validators import describe_bound
from ...functions.binding import MASK_MOD, SCORE_MOD, Combination, Later, Tree, filled, resolve
from ...functions.learning import named

FUNCTIONS = {"score_mod": SCORE_MOD, "mask_mod": MASK_MOD}
"""Arguments that may be bound to tensors, and what they are called with."""


def opened(args: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that functions are bound to, and put their numbers in their places.

    Parameters
    ----------
    args : dict
        Arguments of `nattn.attention`. In place of functions they have trees then, with a `Later`
        for each tensor.
    """
    tensors: list[Tensor] = []

    def numbered(label: str, x: Any) -> Later:
        tensors.append(x.value)
        return Later(len(tensors) - 1)

    for name, parameters in FUNCTIONS.items():
        if args.get(name) is not None:
            first = len(tensors)
            tree = resolve(name, args[name], parameters, describe=_left_open)
            args[name] = filled(name, tree, numbered)
            if name == "mask_mod":
                tensors[first:] = map(without_gradient, tensors[first:])
    return tensors


def _left_open(label: str, value: Any) -> Any:
    if isinstance(value, Later):
        return value
    return Later(value) if isinstance(value, Tensor) else describe_bound(label, value)


def without_gradient(x: Tensor) -> Tensor:
    """Detach a tensor that a mask reads: it says yes or no, which has no gradient."""
    return x.detach() if x.requires_grad else x


def closed(args: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return arguments with functions that are bound to arrays in place of the tensors' numbers."""
    found = {
        name: filled(name, _tree(name, args[name]), lambda label, x: _view(label, tensors[x.value]))
        for name in FUNCTIONS
        if tensors and args.get(name) is not None
    }
    return {**args, **found}


def _view(label: str, tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:  # which no function of nattn is bound to
        tensor = tensor.detach().float()
    return describe_bound(label, tensor)


def _tree(name: str, function: Any) -> Tree:
    return resolve(name, function, FUNCTIONS[name], describe=_left_open)


def names_of(score_mod: Any) -> dict[int, str]:
    """Return what nattn calls the tensors of a score_mod, by their numbers."""
    return {
        x.value: name for name, x in named(_tree("score_mod", score_mod)) if isinstance(x, Later)
    }


# Compiled

_TENSOR, _PARTIAL, _FUNCTION, _COMBINATION = "tensor", "partial", "function", "combination"
"""How tuples begin that stand for something; nattn binds nothing to tuples and strings."""


def apart(function: Any, tensors: list[Tensor], within: tuple[Any, ...] = ()) -> Any:
    """Return what a function is made of as tuples, and add its tensors to a list.

    A function without tensors stays as it is, to be read anew in each call. torch's compiler traces
    this, and asks before each call whether what is read here is as it was. `within` are the
    functions that have this one in their closures.
    """
    count = len(tensors)
    if isinstance(function, functools.partial):
        inner = apart(function.func, tensors)
        args = tuple([_slot(x, tensors) for x in function.args])
        items = tuple([(name, _slot(x, tensors)) for name, x in function.keywords.items()])
        return function if len(tensors) == count else (_PARTIAL, inner, args, items)
    if isinstance(function, Combination):
        parts = tuple([apart(x, tensors) for x in function.parts])
        return _COMBINATION, function.operator, parts
    if isinstance(function, types.FunctionType):
        try:
            closure = function.__closure__ or ()
        except AttributeError:  # torch's compiler does not show that of what it saw being defined
            return function
        within = (*within, function)
        cells = tuple([_cell(x, tensors, within) for x in closure])
        defaults = tuple([_slot(x, tensors) for x in function.__defaults__ or ()])
        named_defaults = function.__kwdefaults__ or {}
        items = tuple([(name, _slot(x, tensors)) for name, x in named_defaults.items()])
        if len(tensors) > count:
            return _FUNCTION, function, cells, defaults, items
    return function


def _slot(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensors.append(value)
    return _TENSOR, len(tensors) - 1


def _cell(cell: types.CellType, tensors: list[Tensor], within: tuple[Any, ...]) -> Any:
    value = cell.cell_contents
    if isinstance(value, types.FunctionType) and value not in within:
        return apart(value, tensors, within)
    return _slot(value, tensors)


def together(x: Any) -> Any:
    """Return the function that was taken apart, with a `Later` for each tensor."""
    if not isinstance(x, tuple) or not x:
        return x
    kind, *parts = x
    if kind == _TENSOR:
        return Later(parts[0])
    if kind == _COMBINATION:
        return Combination(parts[0], tuple(map(together, parts[1])))
    if kind == _PARTIAL:
        function, args, items = parts
        keywords = {name: together(value) for name, value in items}
        return functools.partial(together(function), *map(together, args), **keywords)
    if kind != _FUNCTION:
        return x
    function, cells, defaults, items = parts
    twin = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        tuple(map(together, defaults)),
        tuple(types.CellType(together(value)) for value in cells),
    )
    twin.__kwdefaults__ = {name: together(value) for name, value in items}
    twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
    return twin


def key_of(x: Any) -> str:
    """Return what arguments share that are the same to a compiled call."""
    if isinstance(x, (tuple, list)):
        return f"({','.join(map(key_of, x))})"
    return str(id(x)) if callable(x) else repr(x)
