"""Users' functions in the simulator: on NumPy arrays of one element, as in the reference."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...functions.binding import Bound, Combination, Tree
from ...functions.on_arrays import ArrayFunction
from . import twins
from .specialization import Evaluators, Functions


@dataclass(frozen=True)
class _At:
    """An array at an address, as NumPy takes it."""

    __array_interface__: dict[str, Any]


def _rebuilt(tree: Tree, words: Any) -> Tree:
    """Return a tree that is bound to what an iterator of words says."""
    if isinstance(tree, Combination):
        return Combination(tree.operator, tuple(_rebuilt(part, words) for part in tree.parts))  # type: ignore[arg-type]
    values: list[Any] = []
    for old in tree.values:
        word = next(words)
        if isinstance(old, np.ndarray):
            shape = tuple(next(words) for _ in range(old.ndim))
            strides = tuple(next(words) for _ in range(old.ndim))
            values.append(_array_at(word, shape, strides, old.dtype))
        elif isinstance(old, float):
            values.append(float(np.int64(word).view(np.float64)))
        else:
            values.append(type(old)(word))
    return Bound(tree.function, tree.order, tree.names, tuple(values))


def _array_at(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    if 0 in shape:
        return np.empty(shape, dtype)
    interface = {"version": 3, "shape": shape, "strides": strides, "typestr": dtype.str}
    return np.asarray(_At({**interface, "data": (ptr, True)}))


class _OnArrays:
    """The users' functions of a launch, a call at a time: each keeps what was out of range."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._lock = threading.Lock()
        self._launch: Any = None
        self._bound: list[ArrayFunction] = []

    def prepare(self, words_ptr: int) -> list[ArrayFunction]:
        """Return the functions, bound to what the words at an address say."""
        f = self._functions
        numbers = (ctypes.c_int64.from_address(words_ptr + 8 * n).value for n in range(1 << 30))
        dtype = np.dtype(f.dtype)
        return [
            ArrayFunction(name, _rebuilt(source.tree, numbers), dtype)
            for name, source in zip(f.names, f.codes, strict=True)
        ]

    def run(self, a: Any, n: int, call: Callable[[ArrayFunction], Any]) -> Any:
        """Call the n-th function for the launch whose argument record is `a`."""
        with self._lock, np.errstate(all="ignore"):
            if self._launch is not a:
                self._bound, self._launch = self.prepare(int(a.words_ptr)), a
            function = self._bound[n]
            result = call(function)
            if any(np.any(miss) for _, miss in function.misses):
                twins.write_int64(a.error_flags_ptr + 8 * n, 1)
            return result


def _one(x: Any) -> NDArray[Any]:
    return np.array([x])


def indices(*numbers: Any) -> tuple[NDArray[Any], ...]:
    """Return each index as an array of one element."""
    return tuple(np.array([int(x)], np.int64) for x in numbers)


def evaluators(functions: Functions) -> Evaluators:
    """Return the users' functions of a call."""
    runner, number = _OnArrays(functions), twins.in_silence(getattr(np, functions.dtype))
    largest = float(np.finfo(functions.dtype).max)

    def modifier(n: int) -> Any:
        def modify(a, b, h, pos, key, s):
            args = _one(np.float64(s)), *indices(b, h, pos, key)
            return number(runner.run(a, n, lambda function: function(*args))[0])

        return modify

    def derivative(n: int) -> Any:
        def derive(a, b, h, pos, key, s, slope):
            args = _one(np.float64(s)), *indices(b, h, pos, key)
            value, own = runner.run(a, n, lambda function: function.derive(*args))
            factor = number(own[0])
            if slope == 0 or factor == 0:  # whatever the other
                return number(value[0]), number(0)
            return number(value[0]), number(np.clip(float(slope) * own[0], -largest, largest))

        return derive

    def visible(a, b, h, pos, key):
        args = indices(b, h, pos, key)
        n = len(functions.score_mods)
        return bool(runner.run(a, n, lambda function: function(*args))[0])

    count = len(functions.score_mods)
    return Evaluators(
        [modifier(n) for n in range(count)],
        [derivative(n) for n in range(count)] if functions.derive else [],
        None if functions.mask_mod is None else visible,
    )


def try_out(functions: Functions, words_ptr: int) -> None:
    """Raise here what a user's function would raise in one of the simulator's threads."""
    pair = indices(0, 0, 0, 0)
    with np.errstate(all="ignore"):
        for function in _OnArrays(functions).prepare(words_ptr):
            function(*((_one(0.0), *pair) if function.name == "score_mod" else pair))
