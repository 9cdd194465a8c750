"""Users' functions in the hands of a backend that compiles: which code they are, and what they say.

A tree of functions (`binding.Bound`, `binding.Combination`) becomes one function on lanes by
`evaluator`, with the decorators and intrinsics of the backend's own target. What the functions are
bound to reaches it as 8-byte words. Two trees of one `key` are one piece of code.
"""

from __future__ import annotations

import linecache
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numpy.typing import NDArray

from ..vectors.lanes import Layout
from . import binding
from .binding import Bound, Tree
from .constructs import unsupported
from .learning import Learnt, leaves


@dataclass(frozen=True)
class UserCode:
    """A tree of users' functions as code to compile: equal if what it becomes would be.

    Attributes
    ----------
    key : tuple
        The hash of each function and the types of what it is bound to.
    tree : Bound or Combination
        The functions.
    """

    key: tuple[Any, ...]
    tree: Tree = field(compare=False, repr=False)

    @classmethod
    def of(cls, tree: Tree) -> UserCode:
        """Return the code of a tree."""
        return cls(_key(tree), tree)


def _kind(value: binding.Value | Learnt) -> tuple[Any, ...]:
    """Return how a bound value is passed: see `nattn.vectors.lanes.Layout`."""
    if isinstance(value, Learnt):
        kind, *rest = _kind(value.value)
        return (f"learnt {kind}", *rest)
    if isinstance(value, np.ndarray):
        far = max((*map(abs, value.strides), *value.shape)) >= 1 << 31
        return ("array", value.dtype.name, value.ndim, far)
    return (type(value).__name__,)


def _key(tree: Tree) -> tuple[Any, ...]:
    if isinstance(tree, Bound):
        kinds = tuple(map(_kind, tree.values))
        return (binding.digest(tree.function), tree.order, kinds)
    return (tree.operator, *(_key(part) for part in tree.parts))  # type: ignore[arg-type]


def _own_place(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    return array.ctypes.data, array.strides


def words(
    tree: Tree, place: Callable[[NDArray[Any]], tuple[int, tuple[int, ...]]] = _own_place
) -> list[int]:
    """Return what the functions are bound to as 8-byte words, in the order of the tree.

    Parameters
    ----------
    tree : Bound or Combination
        The functions.
    place : callable, optional
        Returns the address and the byte strides at which compiled code finds an array; by default
        where it is.

    Returns
    -------
    list of int
        As `nattn.vectors.lanes.Layout` has them, of 64 bits with a sign.
    """
    found: list[int] = []
    for value in (x for leaf in leaves(tree) for x in leaf.values):
        x: Any = value.value if isinstance(value, Learnt) else value
        if isinstance(x, np.ndarray):
            address, strides = place(x)
            found += [address, *x.shape, *strides]
        elif isinstance(x, float):
            found += struct.unpack("q", struct.pack("d", x))
        else:
            found.append(int(x))
        if isinstance(value, Learnt):
            found += [value.offset, *value.strides]
    return found


# Compilation


class Tools(NamedTuple):
    """What a target compiles functions of lanes with.

    Attributes
    ----------
    inlined : callable
        Decorator of functions that compiled code may call, which finds the result in their place.
    registered : callable
        The same for functions that compiled code finds as they are, in modules.
    call_arguments, as_condition : intrinsic
        Those of `nattn.vectors.lanes`, as the target knows them.
    """

    inlined: Callable[..., Any]
    registered: Callable[..., Any]
    call_arguments: Any
    as_condition: Any


Evaluate = Callable[..., Any]


def evaluator(tree: Tree, first: int, tools: Tools, convert: Any) -> tuple[Evaluate, int]:
    """Return ``f(tile, params, error_flags, args)`` to be compiled for a tree, and the next word.

    `args` is what the functions are called with, `params` the address of the words of what they
    are bound to, from word `first` on. A composition converts each score with ``convert(tile, x)``.
    """
    if isinstance(tree, Bound):
        layout = Layout(tree.order, tuple(map(_kind, tree.values)), first)
        function, call_arguments = (
            compilable(tree.function, tools.inlined, tools.registered),
            tools.call_arguments,
        )

        def leaf(tile: Any, params: Any, error_flags: Any, args: Any) -> Any:
            return function(*call_arguments(tile, layout, args, params, error_flags))

        return tools.inlined(leaf), first + layout.words
    parts = []
    for part in tree.parts:
        evaluate, first = evaluator(part, first, tools, convert)  # type: ignore[arg-type]
        parts.append(evaluate)
    joined = parts[0]
    if tree.operator == "not":
        joined = _negated(joined, tools)
    for part in parts[1:]:
        if tree.operator == "compose":
            joined = _composed(joined, part, tools, convert)
        else:
            joined = (_both if tree.operator == "and" else _either)(joined, part, tools)
    return joined, first


def compilable(function: Any, inlined: Callable[..., Any], registered: Callable[..., Any]) -> Any:
    """Return a copy of a plain function that compiled code can call; for the others see `Tools`.

    Raises
    ------
    InexpressibleError
        If it holds what no compiled function can.
    """
    for plain in (function, *binding.helpers(function)):
        found = unsupported(plain)
        if found is not None:
            raise InexpressibleError((found.file, found.line), found.reason)
    copy, others = binding.frozen(function, inlined)
    for helper in others:
        registered(helper)
    return copy


def _negated(f: Evaluate, tools: Tools) -> Any:
    as_condition = tools.as_condition

    def negated(tile: Any, params: Any, error_flags: Any, args: Any) -> Any:
        return ~as_condition(tile, f(tile, params, error_flags, args))

    return tools.inlined(negated)


def _both(f: Evaluate, g: Evaluate, tools: Tools) -> Any:
    as_condition = tools.as_condition

    def both(tile: Any, params: Any, error_flags: Any, args: Any) -> Any:
        x = as_condition(tile, f(tile, params, error_flags, args))
        return x & as_condition(tile, g(tile, params, error_flags, args))

    return tools.inlined(both)


def _either(f: Evaluate, g: Evaluate, tools: Tools) -> Any:
    as_condition = tools.as_condition

    def either(tile: Any, params: Any, error_flags: Any, args: Any) -> Any:
        x = as_condition(tile, f(tile, params, error_flags, args))
        return x | as_condition(tile, g(tile, params, error_flags, args))

    return tools.inlined(either)


def _composed(f: Evaluate, g: Evaluate, tools: Tools, convert: Any) -> Any:
    def composed(tile: Any, params: Any, error_flags: Any, args: Any) -> Any:
        score = convert(tile, f(tile, params, error_flags, args))
        return g(tile, params, error_flags, (score, *args[1:]))

    return tools.inlined(composed)


# Errors


class InexpressibleError(NumbaError):
    """A user's function holds what no compiled function can.

    Attributes
    ----------
    where : tuple
        The file and the line.
    """

    def __init__(self, where: tuple[str, int], reason: str) -> None:
        self.where = where
        super().__init__(reason)


COMPILER_ERRORS = (
    *(NumbaError, UnsupportedBytecodeError, NotImplementedError, AssertionError, AttributeError),
    *(ImportError, LookupError, TypeError, ValueError),
)
"""What the compiler raises of code that is beyond it: some of its errors are not its own."""


_PLACES = (
    r"[Dd]uring: typing of .*? at (.+?) \((\d+)\)",
    r"(?:Raised from|location:) (.+?) \((\d+)\)",
    r'File "([^"]+)", line (\d+)',
)
"""How Numba names a line, in the order in which the names are trusted."""


def _place(tree: Tree, error: Exception, files: set[str]) -> str:
    """Return the line of a user's function that an error is about, else where the functions are."""
    found = [error.where] if isinstance(error, InexpressibleError) else []
    for pattern in _PLACES:
        found += [(file, int(line)) for file, line in re.findall(pattern, str(error))]
    for file, line in found:
        if file in files:
            source = linecache.getline(file, line).strip()
            return f'"{file}", line {line}' + (f": {source}" if source else "")
    codes = [leaf.function.__code__ for leaf in leaves(tree)]
    return " and ".join(f'{c.co_name} ("{c.co_filename}", line {c.co_firstlineno})' for c in codes)


def explained(name: str, tree: Tree, error: Exception) -> TypeError:
    """Say which line of a user's function is at fault, why, and what to do.

    Numba's text holds it all: every call on the way from the line, and what each candidate said.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)) or type(error).__name__  # no colours
    plain = [f for leaf in leaves(tree) for f in (leaf.function, *binding.helpers(leaf.function))]
    files = {code.co_filename for f in plain for code in binding.codes(f.__code__)}
    where = _place(tree, error, files)
    ours = "|".join(("leaf", "negated", "both", "either", "composed", *(f.__name__ for f in plain)))
    reasons = [
        r"(?:TypingError: |nopython mode pipeline.*\n\s*)(?=\S)(?!Failed in|No implementation)(.+)",
        r"((?:Untyped global name|Unknown attribute|NameError:|Cannot unify|Unsupported) .+)",
        rf">>> (?!(?:{ours})\()(.+)",
    ]
    reason = text.strip().splitlines()[-1]
    for pattern in reasons:
        found = re.findall(pattern, text)
        if found:
            reason = found[-1] if ">>>" not in pattern else f"there is no {found[-1]}"
            break
    reason = re.sub(r"Lanes\((\w+) x \d+[^()]*\)", r"lanes of \1", reason)
    return TypeError(
        f"{name}: expected a function that SIMD lanes can express: arithmetic, comparisons, & | ~, "
        f"np.where in place of if, and NumPy's elementwise functions; got {where}\n{reason}"
    )


def raise_for_flags(names: tuple[str, ...], error_flags: int) -> None:
    """Raise the error that compiled functions could only flag: bit n for the n-th of the names.

    Raises
    ------
    IndexError
        If a bound array was indexed out of range for a key that its row sees.
    """
    for n, name in enumerate(names):
        if error_flags >> n & 1:
            raise IndexError(
                f"{name}: expected indices within the arrays that the function is bound to, got "
                "one out of range for a visible pair of query and key; the output is undefined"
            )
