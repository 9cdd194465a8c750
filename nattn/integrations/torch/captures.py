"""What a function refers to: names of captured tensors, and whether a trace of it still holds."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Leaves = list[tuple[str, Any]]
"""Names and objects, in the order in which they are found."""


def alike(before: Leaves, now: Leaves) -> bool:
    """Tell whether a function refers to what it referred to before."""
    return len(before) == len(now) and all(
        x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and repr(x) == repr(y))
        for (_, x), (_, y) in zip(before, now, strict=True)
    )


_PLAIN = (bool, int, float, str, type(None))
_LASTING = (
    *(*_PLAIN, Tensor, torch.dtype, torch.device, types.BuiltinFunctionType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_LASTING_PACKAGES = ("torch", "math", "numpy", "operator", "functools", "builtins", "nattn")
"""Of modules and classes these may be trusted to stay as they are."""


class Unknown:
    """Stands for an object that may change without being another one."""


def captured(name: str, value: Any, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield all that a function refers to, with names: what decides what its trace will be.

    Functions that it calls are gone through; `seen` has the ids of those that called this one. An
    object that cannot be followed is an `Unknown`, and the tensors that are its attributes.
    """
    if isinstance(value, functools.partial):
        yield from captured(name, value.func, seen)
        yield from captured(name, value.args, seen)
        yield from captured(name, value.keywords, seen)
    elif isinstance(value, (tuple, list)):
        yield name, len(value)
        for x in value:
            yield from captured(name, x, seen)
    elif type(value) is dict:
        for key, x in value.items():
            yield name, key
            yield from captured(str(key), x, seen)
    elif isinstance(value, (types.ModuleType, type)):
        package = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        yield name, value if package.split(".")[0] in _LASTING_PACKAGES else Unknown()
    elif isinstance(value, types.FunctionType):
        yield name, value.__code__
        if id(value) not in seen:
            seen = seen | {id(value)}
            theirs = (value.__module__ or "").split(".")[0] == "torch"
            yield from (_cells if theirs else _referred)(value, seen)
    elif isinstance(value, types.MethodType):
        yield from captured(name, value.__func__, seen)
        yield from _attributes(value.__self__)
    elif isinstance(value, _LASTING):
        yield name, value
    else:
        yield name, Unknown()
        yield from _attributes(value)


def _referred(function: types.FunctionType, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    yield from captured("", function.__defaults__ or (), seen)
    yield from captured("", dict(function.__kwdefaults__ or {}), seen)
    yield from _cells(function, seen)
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield from captured(name, function.__globals__[name], seen)


def _cells(function: types.FunctionType, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    free = function.__code__.co_freevars
    for name, cell in zip(free, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield from captured(name, value, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an object, for their names, and that the object may change."""
    yield "", Unknown()
    members = {**getattr(value, "__dict__", {})}
    if isinstance(value, torch.nn.Module):
        members |= {**dict(value.named_parameters()), **dict(value.named_buffers())}
    yield from ((name, x) for name, x in members.items() if isinstance(x, Tensor))
