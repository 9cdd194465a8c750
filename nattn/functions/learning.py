"""Gradients of what functions are bound to: which values have a name, and where their sums lie.

``score_mod.table`` is the value that a parameter `table` is bound to, in whatever function of the
composition has one; where several have, ``score_mod.shaw.table`` is that of the function `shaw`.
Where neither tells them apart, ``score_mod.1.0`` is the first value of the second function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .binding import Bound, Combination, Tree, Value, constants

PREFIX = "score_mod."
"""How the name of a bound value begins."""

ALIGNMENT = 64
"""Bytes: where each gradient begins."""


@dataclass(frozen=True)
class Place:
    """Where a value is bound.

    Attributes
    ----------
    leaf : int
        Number of the function, counted from left to right.
    value : int
        Number of the value among those that it is bound to.
    """

    leaf: int
    value: int


@dataclass(frozen=True, eq=False)
class Learnt:
    """A bound value whose gradient is wanted.

    Attributes
    ----------
    value : ndarray or float
        The value.
    offset : int
        Where its gradient begins among all of them, in bytes.
    strides : tuple of int
        Byte strides of the gradient, which is contiguous.
    """

    value: Any
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Gradients:
    """Gradients side by side in memory.

    Attributes
    ----------
    offsets : tuple of int
        Where each begins, in bytes.
    shapes : tuple of tuple of int
        Their shapes, () of a number.
    n_bytes : int
        Of all together.
    """

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    n_bytes: int

    def parts(self, total: NDArray[Any], itemsize: int) -> list[NDArray[Any]]:
        """Take apart an array of all their numbers, of so many bytes each in memory."""
        found = []
        for offset, shape in zip(self.offsets, self.shapes, strict=True):
            first = offset // itemsize
            found.append(total[first : first + math.prod(shape)].reshape(shape))
        return found


def leaves(tree: Tree) -> list[Bound]:
    """Return the functions of a tree, from left to right."""
    if isinstance(tree, Bound):
        return [tree]
    return [leaf for part in tree.parts for leaf in leaves(part)]  # type: ignore[arg-type]


def find(tree: Tree | None, name: str, *, argument: str = "wrt") -> Place:
    """Return where the value of a name is bound.

    Parameters
    ----------
    tree : Bound or Combination or None
        The score_mod.
    name : str
        ``score_mod.parameter``, ``score_mod.function.parameter`` or by numbers as in `Place`,
        ``score_mod.leaf.value``.
    argument : str, default "wrt"
        What to call the name in an error.

    Returns
    -------
    Place
        Its only place.

    Raises
    ------
    ValueError
        If no parameter is bound under that name, or several are.
    TypeError
        If it is bound to integers or booleans.
    """
    functions = [] if tree is None else leaves(tree)
    known = _known(functions)
    found = [x for x in known if name in x.names]
    if not found:
        names = sorted({x.names[0] for x in known})
        bound = ", ".join(map(repr, names)) if names else "nothing, for no score_mod is bound"
        last = name.rpartition(".")[2]
        users = [f.function.__name__ for f in functions if last in constants(f.function)]
        why = f", a constant of {users[0]}: bind it or capture it in a closure" if users else ""
        raise ValueError(f"{argument}: expected names of what is bound: {bound}; got {name!r}{why}")
    if len(found) > 1:
        names = [x.names[1] for x in found]
        if len(set(names)) < len(names):
            names = [x.names[2] for x in found]
        hint = ", ".join(map(repr, names))
        raise ValueError(f"{argument}: expected a name of one value, {hint}; got {name!r}")
    place = found[0].place
    value = functions[place.leaf].values[place.value]
    kind = value.dtype if isinstance(value, np.ndarray) else np.dtype(type(value))
    if kind.kind != "f":
        raise TypeError(
            f"{argument}: expected names of floats, got {name!r}, which is bound to {kind}"
        )
    return place


class _Known(NamedTuple):
    names: tuple[str, str, str]  # short, with the function's, by numbers
    place: Place
    value: Any


def _known(functions: list[Bound]) -> list[_Known]:
    """Return all that functions are bound to, and what it is called."""
    return [
        _Known(
            (
                f"{PREFIX}{parameter}",
                f"{PREFIX}{f.function.__name__}.{parameter}",
                f"{PREFIX}{n}.{m}",
            ),
            Place(n, m),
            value,
        )
        for n, f in enumerate(functions)
        for m, (parameter, value) in enumerate(zip(f.names, f.values, strict=True))
    ]


def named(tree: Tree) -> list[tuple[str, Any]]:
    """Return the shortest name that is that of one value alone, and the value, for each in order.

    Examples
    --------
    >>> from functools import partial
    >>> from .binding import SCORE_MOD, resolve
    >>> def add(score, b, h, q_idx, kv_idx, x): return score + x
    >>> def times(score, b, h, q_idx, kv_idx, x, y): return score * x * y
    >>> parts = (partial(add, x=1), partial(times, x=2, y=3))
    >>> tree = resolve("score_mod", Combination("compose", parts), SCORE_MOD)
    >>> named(tree)
    [('score_mod.add.x', 1), ('score_mod.times.x', 2), ('score_mod.y', 3)]
    """
    known = _known(leaves(tree))
    count = Counter(name for x in known for name in set(x.names))
    return [(next(name for name in x.names if count[name] == 1), x.value) for x in known]


def find_among(trees: Sequence[Tree], score_mod: Tree | None, name: str) -> Place:
    """Return where a value of a score_mod is bound, counted among all modifiers of a call."""
    place = find(score_mod, name)
    before = 0
    for tree in trees:
        if tree is score_mod:
            break
        before += len(leaves(tree))
    return Place(before + place.leaf, place.value)


def learnt_tree(
    trees: Sequence[Tree], places: Sequence[Place], itemsize: int
) -> tuple[Tree, Gradients]:
    """Return functions one after the other, some of what they are bound to marked as `Learnt`.

    Parameters
    ----------
    trees : sequence of Bound or Combination
        Modifiers, in order. Leaves of all of them are counted together.
    places : sequence of Place
        Whose gradients are wanted.
    itemsize : int
        Bytes of a number of a gradient.

    Returns
    -------
    tree : Combination
        Of all.
    gradients : Gradients
        Those of the places, in their order.
    """
    functions = [leaf for tree in trees for leaf in leaves(tree)]
    marked: dict[Place, Learnt] = {}
    offsets, shapes, end = [], [], 0
    for place in places:
        value = functions[place.leaf].values[place.value]
        if isinstance(value, np.ndarray) and value.dtype.kind != "f":
            value = value.astype(np.float64)  # ALiBi's slopes may be integers
        shape = value.shape if isinstance(value, np.ndarray) else ()
        strides = tuple(itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape)))
        marked[place] = Learnt(value, end, strides)
        offsets.append(end)
        shapes.append(shape)
        end += -(-math.prod(shape) * itemsize // ALIGNMENT) * ALIGNMENT
    n = 0

    def mark(tree: Tree) -> Tree:
        nonlocal n
        if isinstance(tree, Bound):
            values: tuple[Value, ...] = tuple(
                marked.get(Place(n, m), x)  # type: ignore[misc]
                for m, x in enumerate(tree.values)
            )
            n += 1
            return replace(tree, values=values)
        return replace(tree, parts=tuple(map(mark, tree.parts)))  # type: ignore[arg-type]

    tree = Combination("compose", tuple(map(mark, trees)))
    return tree, Gradients(tuple(offsets), tuple(shapes), end)
