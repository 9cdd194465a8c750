"""Users' functions: what their parameters are bound to, how they combine, when two are the same.

A modifier is ``score_mod(score, b, h, q_idx, kv_idx, ...)`` and a mask ``mask_mod(b, h, q_idx,
kv_idx, ...)``: plain Python in NumPy's style. Further parameters are bound as Python binds them,
with `functools.partial` or a default, to arrays and numbers; those that a closure captures are
parameters too. `resolve` turns whatever the user passed into a tree that a backend can walk: a
`Bound` for each function, a `Combination` where several were put together. Called with arrays, a
tree is the dense definition of itself; a compiling backend takes it apart.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .captures import lifted

SCORE_MOD = ("score", "b", "h", "q_idx", "kv_idx")
MASK_MOD = ("b", "h", "q_idx", "kv_idx")
"""What a modifier and what a mask is called with."""

Value = NDArray[Any] | int | float | bool


@dataclass(frozen=True, eq=False)
class Later:
    """Stands in a function's place for a value that is bound by `filled`.

    Attributes
    ----------
    value : object
        What the value is made of then.
    """

    value: Any


Describe = Callable[[str, Any], NDArray[Any] | Later | None]

_ARRAYS = {np.dtype(t) for t in ("?", *"bhilqBHILQ", "e", "f", "d")}
"""Dtypes of arrays that a function may be bound to."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A plain function, and values for all its parameters but what it is called with.

    Attributes
    ----------
    function : function
        The plain Python function; if it captures what it is bound to, `captures.lifted` of it.
    order : tuple of int
        For each of its parameters n, if it takes argument n of the call, or -1 - m, if it is
        bound to ``values[m]``.
    names : tuple of str
        Names of the bound parameters, then of captured variables.
    values : tuple
        Arrays in native byte order, ints (of 64 bits), floats and bools.
    dtypes : tuple of dtype or None
        Those of single numbers that came as arrays or as NumPy's scalars.
    """

    function: types.FunctionType
    order: tuple[int, ...]
    names: tuple[str, ...]
    values: tuple[Value, ...]
    dtypes: tuple[np.dtype[Any] | None, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*(args[n] if n >= 0 else self.values[-1 - n] for n in self.order))


@dataclass(frozen=True, eq=False)
class Combination:
    """Functions put together: callable like any one of them.

    Attributes
    ----------
    operator : {"just", "and", "or", "not", "compose"}
        "compose" gives each function the score that the one before returned; the others are for
        masks.
    parts : tuple of callable
        The functions.
    """

    operator: str
    parts: tuple[Callable[..., Any], ...]

    def __call__(self, *args: Any) -> Any:
        """Call the functions and join what they return."""
        if self.operator == "compose":
            score = args[0]
            for part in self.parts:
                score = part(score, *args[1:])
            return score
        results = [part(*args) for part in self.parts]
        if self.operator == "and":
            return np.logical_and(*results)
        if self.operator == "or":
            return np.logical_or(*results)
        return np.logical_not(results[0]) if self.operator == "not" else results[0]


Tree = Bound | Combination


def resolve(
    name: str, function: Any, parameters: tuple[str, ...], *, describe: Describe | None = None
) -> Tree:
    """Find the plain functions in what a user passed, and bind all their parameters.

    Parameters
    ----------
    name : str
        What to call it in an error.
    function : callable
        A plain or jitted function, a `functools.partial` of one, or a `Combination`.
    parameters : tuple of str
        What it is called with: `SCORE_MOD` or `MASK_MOD`.
    describe : callable, optional
        ``describe(name, value)`` returns a NumPy view of an array that is none of NumPy's, as one
        on a GPU, or a copy of a single number; and None of anything else. Without it such arrays
        are refused. What it returns a `Later` for is left open, to be `filled`.

    Returns
    -------
    Bound or Combination
        Of nothing but `Bound` and `Combination`. Arrays, ints and floats in a closure's cells are
        bound to parameters of their names, as they are now.

    Raises
    ------
    TypeError
        If it is not such a function, takes other parameters, has some left unbound, is bound to
        something else than arrays and numbers, or reads a global array.

    Examples
    --------
    >>> def capped(score, b, h, q_idx, kv_idx, cap): return cap * np.tanh(score / cap)
    >>> bound = resolve("score_mod", functools.partial(capped, cap=2.0), SCORE_MOD)
    >>> bound.names, bound.values
    (('cap',), (2.0,))
    """
    call = f"{name}({', '.join(parameters)})"
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    plain = function
    while True:
        if isinstance(plain, functools.partial):
            args, keywords = plain.args + args, {**plain.keywords, **keywords}
            plain = plain.func
        elif isinstance(plain, Combination) and plain.operator == "just":
            plain = plain.parts[0]
        elif isinstance(getattr(plain, "py_func", None), types.FunctionType):
            plain = plain.py_func
        else:
            break
    if isinstance(plain, Combination):
        if args or keywords:
            raise TypeError(
                f"{name}: expected parameters bound before functions are combined, got "
                f"functools.partial of a combination with {', '.join(keywords) or args}"
            )
        if (plain.operator == "compose") != (parameters == SCORE_MOD):
            kind = "composed modifiers" if plain.operator == "compose" else "combined masks"
            raise TypeError(f"{name}: expected a function {call}, got {kind}")
        parts = tuple(resolve(name, x, parameters, describe=describe) for x in plain.parts)
        return Combination(plain.operator, parts)
    if isinstance(plain, Bound) and not (args or keywords):
        return plain
    if not isinstance(plain, types.FunctionType):
        raise TypeError(
            f"{name}: expected a function {call} or functools.partial of one, "
            f"got {_describe(function)}"
        )
    return _bind(name, call, plain, args, keywords, len(parameters), describe)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        kind = "a masked array" if isinstance(value, np.ma.MaskedArray) else "an array"
        return f"{kind} of shape {value.shape} and dtype {value.dtype}"
    try:
        text = repr(value)
    except Exception:  # a broken one, or an int of 4300 digits
        return type(value).__name__
    return f"{text if len(text) < 60 else text[:57] + '...'} ({type(value).__name__})"


def _bind(
    name: str,
    call: str,
    plain: types.FunctionType,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    count: int,
    describe: Describe | None,
) -> Bound:
    signature = _signature(plain)
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(
                f"{name}: expected a function {call} with named parameters, got "
                f"{plain.__name__}{signature}, of which {p} cannot be compiled"
            )
    try:
        bound = signature.bind(*args, *_ARGUMENTS[:count], **keywords)
    except TypeError as error:
        missing = [
            p.name
            for p in list(signature.parameters.values())[count:]
            if p.default is p.empty and p.name not in keywords
        ]
        if missing and "missing" in str(error):
            raise TypeError(
                f"{name}: expected {' and '.join(missing)} to be bound, beside what {call} "
                f"passes, as in functools.partial({plain.__name__}, {missing[0]}=...), got "
                f"{plain.__name__}{signature}"
            ) from None
        raise TypeError(
            f"{name}: expected a function {call}, further parameters bound with "
            f"functools.partial, got {plain.__name__}{signature}: {error}"
        ) from None
    bound.apply_defaults()
    order: list[int] = []
    names: list[str] = []
    values: list[Value] = []
    dtypes: list[np.dtype[Any] | None] = []

    def bindable(variable: str, value: Any) -> bool:
        return _can_be_bound(f"{name}: {variable} of {plain.__name__}", value, describe)

    function, captured, contents = lifted(plain, bindable, _is_constant)
    for parameter, value in (
        *bound.arguments.items(),
        *zip(captured, contents, strict=True),
    ):
        if isinstance(value, _Argument):
            order.append(value.n)
            continue
        order.append(-1 - len(values))
        names.append(parameter)
        values.append(_value(name, plain.__name__, parameter, value, describe))
        dtypes.append(None if isinstance(values[-1], np.ndarray) else _own_dtype(value))
    digest(function, name)  # refuses what the function may not capture
    return Bound(function, tuple(order), tuple(names), tuple(values), tuple(dtypes))


def _can_be_bound(label: str, value: Any, describe: Describe | None) -> bool:
    """Return whether a captured value becomes a parameter; `_value` may still refuse its dtype.

    Single truths stay constants of the code: there are but two of them, and an `if` on one may
    choose between what no vector can hold both.
    """
    if isinstance(value, np.generic):
        return value.dtype in _ARRAYS and not isinstance(value, np.bool_)
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    if type(value) is float or isinstance(value, np.ndarray):
        return True
    if describe is None or _is_constant(value) or isinstance(value, types.ModuleType):
        return False
    return describe(label, value) is not None


@dataclass(frozen=True)
class _Argument:
    """Stands for an argument of the call while parameters are bound."""

    n: int


_ARGUMENTS = [_Argument(n) for n in range(len(SCORE_MOD))]

_signatures: weakref.WeakKeyDictionary[types.FunctionType, tuple[Any, Any, inspect.Signature]] = (
    weakref.WeakKeyDictionary()
)


def _signature(function: types.FunctionType) -> inspect.Signature:
    """Return a function's signature without annotations; from memory, while it is the same."""
    code, defaults = function.__code__, function.__defaults__
    found = None if function.__kwdefaults__ else _signatures.get(function)  # it may change
    if found is None or found[0] is not code or found[1] is not defaults:
        parameters = inspect.signature(function).parameters.values()
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        found = _signatures[function] = code, defaults, bare
    return found[2]


def _own_dtype(value: Any) -> np.dtype[Any] | None:
    """Return the dtype of a single number in native byte order, None of Python's numbers."""
    dtype = getattr(value, "dtype", None)
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else None


def _value(
    name: str, function: str, parameter: str, value: Any, describe: Describe | None
) -> Value:
    """Check what a parameter is bound to."""
    found = None
    if describe is not None and not isinstance(value, np.ndarray | np.generic | int | float):
        found = describe(f"{name}: {parameter} of {function}", value)
        if isinstance(found, Later):
            return found  # type: ignore[return-value]
        value = value if found is None else found
    if isinstance(value, np.generic) or (type(value) is np.ndarray and value.ndim == 0):
        value = value.item()
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return value
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        native = value.dtype.newbyteorder("=")
        if native in _ARRAYS:
            if found is not None:
                return value  # as it was described
            plain = np.asarray(value)
            return plain if plain.dtype.isnative else plain.astype(native)
    if inspect.isclass(value) or callable(value):
        detail = ", a function, which can only be called as a global"
    elif isinstance(value, np.ma.MaskedArray):
        detail = (
            f": bind {parameter}.filled(x), with the number x that stands for what is masked, or "
            f"its data and its mask as two arrays"
        )
    else:
        detail = ""
    raise TypeError(
        f"{name}: expected {parameter} of {function} to be bound to a NumPy array of numbers or "
        f"to a number of 64 bits, got {_describe(value)}{detail}"
    )


def filled(name: str, tree: Tree, describe: Describe) -> Tree:
    """Return functions whose open values are bound.

    Parameters
    ----------
    name : str
        What to call them in an error.
    tree : Bound or Combination
        Made by `resolve`.
    describe : callable
        As in `resolve`; called with each `Later` once, in the order of functions from left to
        right.

    Returns
    -------
    Bound or Combination
        The same one if nothing was open.

    Raises
    ------
    TypeError
        If a value cannot be bound.

    Examples
    --------
    >>> def scaled(score, b, h, q_idx, kv_idx, factor): return score * factor
    >>> leave = functools.partial(scaled, factor=Later("gain"))
    >>> tree = resolve("score_mod", leave, SCORE_MOD, describe=lambda label, x: x)
    >>> filled("score_mod", tree, lambda label, x: {"gain": np.float32(2)}[x.value])(1, 0, 0, 0, 0)
    2.0
    """
    if isinstance(tree, Combination):
        parts = tuple(filled(name, x, describe) for x in tree.parts)  # type: ignore[arg-type]
        same = all(x is y for x, y in zip(parts, tree.parts, strict=True))
        return tree if same else replace(tree, parts=parts)
    if not any(isinstance(x, Later) for x in tree.values):
        return tree
    function = tree.function.__name__
    values = tuple(
        _value(name, function, parameter, x, describe) if isinstance(x, Later) else x
        for parameter, x in zip(tree.names, tree.values, strict=True)
    )
    return replace(tree, values=values)


# When two functions are the same: for caches of compiled code


def digest(function: types.FunctionType, name: str = "function") -> str:
    """Return a hash of all that decides what a function does.

    That is its code with its constants, and the functions, numbers and modules that it finds in
    its closure and among its globals, recursively; not what its parameters are bound to, nor its
    name or place. A change of such a number changes the hash: those that `resolve` binds are
    found there no more.

    Raises
    ------
    TypeError
        If it captures something else, an array for one.
    """
    found = _known.get(function)
    if found is not None:
        code, captured, result = found
        if code is function.__code__ and all(
            _current(owner, key) is value for owner, key, value in captured
        ):
            return result
    hasher = hashlib.sha256()
    captures: list[tuple[Any, str, Any]] = []
    _hash_function(name, function, hasher, captures, [])
    _known[function] = function.__code__, captures, hasher.hexdigest()
    return _known[function][2]


_Known = tuple[types.CodeType, list[tuple[Any, str, Any]], str]

_known: weakref.WeakKeyDictionary[types.FunctionType, _Known] = weakref.WeakKeyDictionary()
"""Each function's code and what it captured when it was last seen, and its hash."""


def _current(owner: Any, key: str) -> Any:
    """Look again where something was captured: in a cell, a function or a module's namespace."""
    if isinstance(owner, types.FunctionType):
        return getattr(owner, key)
    try:
        return owner.cell_contents if isinstance(owner, types.CellType) else owner.get(key)
    except ValueError:  # an empty cell
        return None


def helpers(function: types.FunctionType) -> list[types.FunctionType]:
    """Return the plain Python functions that a function may call, and those they call."""
    digest(function)
    captured = _known[function][1]
    return [value for _, _, value in captured if isinstance(value, types.FunctionType)]


def constants(function: types.FunctionType) -> set[str]:
    """Return the names of the numbers that belong to a function's code: globals, for the most."""
    digest(function)
    return {
        name
        for _, name, value in _known[function][1]
        if isinstance(value, bool | int | float | np.number | np.bool_)
    }


def frozen(
    function: types.FunctionType, wrap: Callable[[Any], Any]
) -> tuple[Any, list[types.FunctionType]]:
    """Copy a function with what it captures now, and the helpers that it may call.

    A compiler that remembers functions by identity would miss that a captured number has changed
    since; the copy is a function of its own.

    Parameters
    ----------
    function : function
        A plain function.
    wrap : callable
        What to make of each copy before another finds it.

    Returns
    -------
    function
        The wrapped copy.
    others : list of function
        Those helpers that it finds as attributes of modules, which are not copied.
    """
    copies: dict[types.FunctionType, Any] = {}
    result = _copy(function, copies, wrap)
    return result, [f for f in helpers(function) if f not in copies]


def _copy(
    function: types.FunctionType,
    copies: dict[types.FunctionType, Any],
    wrap: Callable[[Any], Any],
) -> Any:
    if function in copies:
        return copies[function]
    scope: dict[str, Any] = {"__builtins__": builtins, "__name__": function.__module__}
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    new = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, cells
    )
    new.__module__, new.__qualname__ = function.__module__, function.__qualname__
    copies[function] = wrapped = wrap(new)
    by_name = dict(zip(function.__code__.co_freevars, cells, strict=True))
    for owner, name, value in _captured(function):
        if isinstance(value, types.FunctionType):
            value = _copy(value, copies, wrap)
        if isinstance(owner, types.CellType):
            by_name[name].cell_contents = value
        elif name in owner:
            scope[name] = value
    return wrapped


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code and those of the functions that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def code_text(code: types.CodeType) -> str:
    """Return what a code object does, as text: all but its name, its place and its line numbers."""
    parts = []
    for c in codes(code):
        constants = [x for x in c.co_consts if not isinstance(x, types.CodeType)]
        counts = c.co_argcount, c.co_kwonlyargcount
        parts.append((c.co_code, constants, c.co_names, c.co_varnames, c.co_freevars, *counts))
    return repr(parts)


def _captured(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield what a function finds outside of itself: (where, name, value)."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        yield cell, name, _current(cell, name)
    scope = function.__globals__
    for code in codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                # None for a builtin, and for what may be defined later
                yield scope, step.argval, scope.get(step.argval)


def _hash_function(
    role: str,
    function: types.FunctionType,
    hasher: Any,
    captures: list[tuple[Any, str, Any]],
    open_functions: list[types.FunctionType],
) -> None:
    if function in open_functions:
        hasher.update(f"again {open_functions.index(function)}".encode())
        return
    open_functions.append(function)
    attributes: set[str] = set()
    hasher.update(code_text(function.__code__).encode())
    for code in codes(function.__code__):
        attributes.update(code.co_names)
    if len(open_functions) > 1:  # those of the function itself are parameters like any other
        places = ("__code__", "__defaults__")  # which reloading a module replaces
        captures += [(function, place, getattr(function, place)) for place in places]
        if not all(map(_is_constant, function.__defaults__ or ())):
            raise TypeError(
                f"{role}: expected numbers as defaults of {function.__name__}, which "
                f"{open_functions[0].__name__} calls, got {_describe(function.__defaults__)}"
            )
        hasher.update(repr(function.__defaults__).encode())
    seen: set[tuple[int, str]] = set()
    pending = list(_captured(function))
    while pending:
        owner, name, value = pending.pop(0)
        if (id(owner), name) in seen:
            continue
        seen.add((id(owner), name))
        captures.append((owner, name, value))
        hasher.update(f"\0{name}\0".encode())
        if isinstance(getattr(value, "py_func", None), types.FunctionType):
            value = value.py_func
        if isinstance(value, types.FunctionType):
            _hash_function(role, value, hasher, captures, open_functions)
        elif isinstance(value, types.ModuleType):
            hasher.update(f"{value.__name__} {getattr(value, '__version__', '')}".encode())
            if value.__name__.split(".")[0] not in ("numpy", "math", "operator", "builtins"):
                scope = vars(value)
                pending += [(scope, a, scope[a]) for a in sorted(attributes & scope.keys())]
        elif isinstance(value, np.ndarray):
            how = "captures" if isinstance(owner, types.CellType) else "reads the global"
            raise TypeError(
                f"{role}: expected arrays as parameters, bound with functools.partial("
                f"{function.__name__}, {name}={name}), got {function.__name__}, which {how} "
                f"{name}, {_describe(value)}"
            )
        elif _is_constant(value):
            hasher.update(f"{type(value).__name__} {value!r}".encode())
        elif isinstance(value, type | np.ufunc | types.BuiltinFunctionType) or callable(value):
            module = getattr(value, "__module__", "")
            hasher.update(f"{module}.{getattr(value, '__qualname__', repr(value))}".encode())
        else:
            raise TypeError(
                f"{role}: expected numbers and functions to be all that {function.__name__} "
                f"captures, got {name}, {_describe(value)}; bind arrays and numbers with "
                "functools.partial"
            )


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, bool | int | float | str | np.number | np.bool_)
