"""What of Python no compiled function of lanes can hold, found in its bytecode beforehand.

Numba would refuse much of it by an error that names no line, and take some of it in a way that is
wrong here: in a kernel nothing can be raised, lists of lanes would lie where no vector may, and
what is printed comes from any thread.
"""

from __future__ import annotations

import dis
import inspect
import types
from typing import NamedTuple


class Unsupported(NamedTuple):
    """A construct that cannot be compiled, and the line of a file on which it stands."""

    line: int
    reason: str
    file: str = ""


_LIST = "a list cannot be compiled: write a tuple"
_SET = "a set cannot be compiled: write a tuple"
_DICT = "a dict, or ** in a call, cannot be compiled: pass what it holds one by one"
_TEXT = "an f-string cannot be compiled"
_WITH = "`with` cannot be compiled"
_DEL = "`del` cannot be compiled: leave it away"
_GLOBAL = "`global` cannot be compiled: return what changes"
_NONLOCAL = "`nonlocal` cannot be compiled: return what changes"
_MATCH = "of `match` only patterns of single numbers can be compiled: write np.where"

_REASONS = {
    "IMPORT_NAME": "`import` cannot be compiled: import at the top of the file",
    "BEFORE_WITH": _WITH,
    "LOAD_SPECIAL": _WITH,  # Python 3.14
    "PUSH_EXC_INFO": "`try` cannot be compiled: nothing is raised in a kernel",
    "RAISE_VARARGS": "`raise` and `assert` cannot be compiled: nothing is raised in a kernel",
    "LOAD_BUILD_CLASS": "`class` cannot be compiled",
    "BUILD_SET": _SET,
    "BUILD_MAP": _DICT,
    "BUILD_CONST_KEY_MAP": _DICT,
    "FORMAT_VALUE": _TEXT,
    "FORMAT_SIMPLE": _TEXT,  # Python 3.13
    "FORMAT_WITH_SPEC": _TEXT,
    "BUILD_STRING": _TEXT,
    "BUILD_TEMPLATE": _TEXT,  # Python 3.14
    "STORE_GLOBAL": _GLOBAL,
    "DELETE_GLOBAL": _GLOBAL,
    "DELETE_FAST": _DEL,
    "DELETE_DEREF": _DEL,
    "DELETE_NAME": _DEL,
    "DELETE_SUBSCR": _DEL,
    "DELETE_ATTR": _DEL,
    "MATCH_CLASS": _MATCH,
    "MATCH_MAPPING": _MATCH,
    "MATCH_SEQUENCE": _MATCH,
    "UNPACK_EX": "`a, *rest = ...` cannot be compiled: name each part",
}
"""Why the instructions of a construct are refused."""

_COMPREHENSIONS = {"<listcomp>": _LIST, "<setcomp>": _SET, "<dictcomp>": _DICT}
"""Names of the code that Python 3.11 makes of them; later ones build the list in the function."""


def unsupported(function: types.FunctionType) -> Unsupported | None:
    """Return the first construct of a function that lanes cannot express, if there is one.

    Examples
    --------
    >>> def f(score, b, h, q_idx, kv_idx):
    ...     import math
    ...     return score
    >>> unsupported(f).reason
    '`import` cannot be compiled: import at the top of the file'
    """
    return _in_code(function.__code__, function.__globals__)


def _in_code(code: types.CodeType, scope: dict[str, object]) -> Unsupported | None:
    found = _first(code, scope)
    return found if found is None or found.file else found._replace(file=code.co_filename)


def _first(code: types.CodeType, scope: dict[str, object]) -> Unsupported | None:
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return Unsupported(code.co_firstlineno, "`async def` cannot be compiled: write def")
    if code.co_flags & inspect.CO_GENERATOR:
        what = "a generator expression" if code.co_name == "<genexpr>" else "`yield`"
        return Unsupported(code.co_firstlineno, f"{what} cannot be compiled")
    lists: list[int] = []  # lines of those that have not become a tuple, as in f(*a, b)
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        if step.positions is not None and step.positions.lineno is not None:
            line = step.positions.lineno
        if step.opname == "BUILD_LIST":
            lists.append(line)
        elif step.opname == "LIST_TO_TUPLE" or "LIST_TO_TUPLE" in step.argrepr:
            del lists[-1:]
        elif step.opname in _REASONS:
            return Unsupported(line, _REASONS[step.opname])
        elif step.opname == "STORE_DEREF" and step.argval in code.co_freevars:
            return Unsupported(line, _NONLOCAL)
        elif step.opname == "LOAD_GLOBAL" and step.argval == "print" and "print" not in scope:
            return Unsupported(line, "`print` cannot be compiled: call the function on arrays")
        elif isinstance(step.argval, types.CodeType):
            inner = step.argval
            if inner.co_name in _COMPREHENSIONS:
                return Unsupported(line, _COMPREHENSIONS[inner.co_name])
            found = _in_code(inner, scope)
            if found is not None:
                return found
    return Unsupported(lists[0], _LIST) if lists else None
