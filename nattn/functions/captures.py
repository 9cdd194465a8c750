"""What a closure captures becomes a parameter: the same code, and the number or array read anew.

A function that captures ``gain`` is put, as it is, into one that takes `gain`::

    lambda score, b, h, q_idx, kv_idx, gain: f(score, b, h, q_idx, kv_idx)

where the `gain` of `f` is the parameter. No instruction of the user's is changed: the outer
function is compiled from such a line, and the user's code, which wants nothing but so many cells,
takes the place of its inner one. Compilers inline the inner function, so the outer one is as good
as one that was written with the parameter, and errors name the user's lines.

Functions in a closure's cells that capture something themselves are made again within the outer
one, so a variable that several share is one parameter of all.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple


class Lifted(NamedTuple):
    """A function whose captured variables are parameters.

    Attributes
    ----------
    function : function
        Plain, with the parameters of the one that it was made of, then those of `names`.
    names : tuple of str
        Of the captured variables.
    values : tuple
        What they hold now.
    """

    function: types.FunctionType
    names: tuple[str, ...]
    values: tuple[Any, ...]


class _Made(NamedTuple):
    """A function that is made again within the outer one, whatever it captures.

    The file stands apart: codes that are equal may lie in different ones.
    """

    code: types.CodeType
    filename: str
    defaults: tuple[Any, ...] | None
    cells: tuple[int, ...]  # the numbers of its cells
    own: int  # that of the cell which holds it


class _Plan(NamedTuple):
    """All that decides the code of the outer function.

    Cells are numbered in the order of their names, in which each code has its own.
    """

    root: _Made
    helpers: tuple[_Made, ...]  # each before those that call it
    names: tuple[str, ...]  # of the cells
    passed: tuple[int, ...]
    kept: tuple[int, ...]


class _Slot(NamedTuple):
    """A cell, the name that a function has for it, and that function."""

    name: str
    cell: types.CellType
    owner: Any  # a function, which mypy would take for a method


def lifted(
    function: types.FunctionType,
    bindable: Callable[[str, Any], bool],
    constant: Callable[[Any], bool],
) -> Lifted:
    """Return a function that takes what another captures as parameters behind its own.

    Its keyword-only parameters become ordinary ones. Functions of one code share the code of what
    is returned, whatever they capture.

    Parameters
    ----------
    function : function
        A plain function without ``*args`` and ``**kwargs``.
    bindable : callable
        ``bindable(name, value)`` says if a captured value can be passed. What it says no to is
        captured as before.
    constant : callable
        ``constant(value)`` says if a value may be a default of a function that is captured.

    Returns
    -------
    Lifted
        Of the function itself, if nothing is to change.

    Examples
    --------
    >>> def amplifier(gain): return lambda score, b: score * gain + b
    >>> found = lifted(amplifier(2.0), lambda name, x: True, lambda x: True)
    >>> found.names, found.values, found.function(3.0, 1.0, 10.0)
    (('gain',), (2.0,), 31.0)
    """
    code = function.__code__
    if not function.__closure__ and not code.co_kwonlyargcount:
        return Lifted(function, (), ())
    helpers, stuck = _helpers(function, constant)
    passed: dict[int, _Slot] = {}
    for owner in (function, *map(contents, helpers.values())):
        for slot in _slots(owner):
            value = contents(slot)
            if id(slot.cell) not in stuck and not callable(value) and bindable(slot.name, value):
                passed.setdefault(id(slot.cell), slot)
    plan, kept = _planned(function, helpers, passed)
    if not plan.passed and not code.co_kwonlyargcount:
        return Lifted(function, (), ())
    found = _lifted.get(function)
    if found is None or found[0] != plan or tuple(map(id, kept)) != found[1]:
        scope, name = function.__globals__, function.__name__
        twin = types.FunctionType(_outer(plan), scope, name, None, kept)
        twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
        found = _lifted[function] = plan, tuple(map(id, kept)), twin
    slots = list(passed.values()) if plan.passed else []
    return Lifted(found[2], _names(function, slots), tuple(map(contents, slots)))


_lifted: weakref.WeakKeyDictionary[
    types.FunctionType, tuple[_Plan, tuple[int, ...], types.FunctionType]
] = weakref.WeakKeyDictionary()
"""What became of each function when it was last seen, and of which cells."""


def _slots(function: types.FunctionType) -> list[_Slot]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [_Slot(name, cell, function) for name, cell in cells]


def contents(slot: _Slot) -> Any:
    """Return what a cell holds now, None of an empty one."""
    try:
        return slot.cell.cell_contents
    except ValueError:
        return None


def _helpers(
    root: types.FunctionType, constant: Callable[[Any], bool]
) -> tuple[dict[int, _Slot], set[int]]:
    """Return the cells whose functions can be made again, and those that have to stay captured.

    The latter are those of all other functions that are reached. A variable that one of them
    captures is a constant of all: else its gradient would be that of some of its readings.
    """
    helpers: dict[int, _Slot] = {}
    stuck: set[int] = set()
    fixed: set[types.FunctionType] = set()

    def visit(function: types.FunctionType, path: tuple[types.FunctionType, ...]) -> None:
        for slot in _slots(function):
            value = contents(slot)
            plain = getattr(value, "py_func", value)
            if not path:
                stuck.add(id(slot.cell))
            if not isinstance(plain, types.FunctionType):
                continue
            if (
                path
                and plain is value
                and value not in path
                and _can_be_made(root, value, constant)
            ):
                if id(slot.cell) not in helpers:
                    visit(value, (*path, value))
                    helpers[id(slot.cell)] = slot
            elif plain not in fixed:
                fixed.add(plain)
                visit(plain, ())

    visit(root, (root,))
    return helpers, stuck


def _can_be_made(
    root: types.FunctionType, function: types.FunctionType, constant: Callable[[Any], bool]
) -> bool:
    code = function.__code__
    stars = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return (
        function.__globals__ is root.__globals__
        and not (code.co_flags & stars or code.co_kwonlyargcount)
        and all(map(constant, function.__defaults__ or ()))
    )


def _planned(
    root: types.FunctionType, helpers: dict[int, _Slot], passed: dict[int, _Slot]
) -> tuple[_Plan, tuple[types.CellType, ...]]:
    """Return what decides the outer function's code, and the cells that it captures itself."""
    made: dict[int, _Slot] = {}
    for key, slot in helpers.items():
        own = {id(x.cell) for x in _slots(contents(slot))}
        if not own.isdisjoint(passed) or not own.isdisjoint(made):
            made[key] = slot
    functions = [root, *map(contents, made.values())]
    cells = {id(x.cell): x for f in functions for x in _slots(f)}
    ordered = sorted(cells.values(), key=lambda x: x.name)
    number = {id(x.cell): n for n, x in enumerate(ordered)}

    def describe(function: types.FunctionType, own: int, defaults: Any) -> _Made:
        code = function.__code__
        numbers = tuple(number[id(x.cell)] for x in _slots(function))
        return _Made(code, code.co_filename, defaults, numbers, own)

    first = describe(root, -1, None)
    others = [describe(f := contents(x), number[key], f.__defaults__) for key, x in made.items()]
    if any(list(x.cells) != sorted(x.cells) for x in (first, *others)):
        # no compiler of Python's makes such code: leave it as it is
        return _Plan(first, (), (), (), ()), root.__closure__ or ()
    kept = [x for x in ordered if id(x.cell) not in passed and id(x.cell) not in made]
    plan = _Plan(
        first,
        tuple(others),
        tuple(x.name for x in ordered),
        tuple(number[key] for key in passed),
        tuple(number[id(x.cell)] for x in kept),
    )
    return plan, tuple(x.cell for x in kept)


def _names(root: types.FunctionType, slots: list[_Slot]) -> tuple[str, ...]:
    """Name what is passed; what is in a helper alone by the helper too, if the name is taken."""
    code = root.__code__
    taken = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars}
    names = []
    for slot in slots:
        name = slot.name
        if slot.owner is not root:
            name = f"{slot.owner.__name__}.{name}" if name in taken else name
            taken.add(name)
        names.append(name)
    return tuple(names)


# The code of the outer function


@functools.lru_cache(256)
def _outer(plan: _Plan) -> types.CodeType:
    """Return the code of a function around others, of which the cells are its parameters."""
    code = plan.root.code
    count = code.co_argcount + code.co_kwonlyargcount
    code = code.replace(co_argcount=count, co_kwonlyargcount=0)
    if not plan.passed:
        return code
    args = [f"a{n}" for n in range(count)]
    outer = _template(plan, args)
    users = {"a0": code} | {f"x{f.own}": f.code for f in plan.helpers}
    defaults = {(f"x{f.own}",): f.defaults for f in plan.helpers}
    names = dict(zip(args, code.co_varnames, strict=False))
    for n, name in enumerate(plan.names):
        while name in names.values():
            name += "_"
        names[_cell(n)] = name
    return outer.replace(
        co_varnames=tuple(names[x] for x in outer.co_varnames),
        co_cellvars=tuple(names[x] for x in outer.co_cellvars),
        co_freevars=tuple(names[x] for x in outer.co_freevars),
        co_consts=tuple(
            users[x.co_varnames[0]]
            if isinstance(x, types.CodeType)
            else defaults.get(x, x)
            if isinstance(x, tuple)
            else x
            for x in outer.co_consts
        ),
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=plan.root.filename,
        co_firstlineno=code.co_firstlineno,
    )


def _cell(n: int) -> str:
    """Name a cell of the template, so that names are in the order of numbers."""
    return f"c{n:06}"


def _template(plan: _Plan, args: list[str]) -> types.CodeType:
    """Return the code of the outer function, with inner ones that do no more than name their cells.

    It is one line, which stands for the first of the user's.
    """

    def inner(parameters: str, made: _Made) -> str:
        return f"lambda {parameters}: ({''.join(_cell(n) + ',' for n in made.cells)})"

    steps = []
    for f in plan.helpers:
        name = f"x{f.own}"
        parameter = f"{name}={name!r}" if f.defaults else name
        steps.append(f"{_cell(f.own)} = {inner(parameter, f)}")
    arguments = ", ".join(args)
    steps.append(f"return ({inner(arguments, plan.root)})({arguments})")
    parameters = ", ".join([*args, *map(_cell, plan.passed)])
    source = f"def outer({parameters}): {'; '.join(steps)}\n"
    kept = ", ".join(map(_cell, plan.kept))
    scope: dict[str, Any] = {}
    exec(f"def make({kept}):\n {source} return outer\n", scope)
    outer: types.FunctionType = scope["make"](*plan.kept)
    return outer.__code__
