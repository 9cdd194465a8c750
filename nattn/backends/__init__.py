"""Three siblings that compute attention, each behind one door.

A backend is `nattn.backends.NAME`, its face, which is quickly imported: `OFFERS` says which tasks
it has, and ``refusals(problem, task, arrays)`` why it cannot do a call, a reason for everything
that is in the way. Its door is a module that is imported when it is first asked for, with a
function for each of these tasks. `KEEPS_EXACT` says whether results can be had as they are before
they are rounded to 16 bits: whether its ``forward`` takes an array `exact` for the output, and its
``backward`` a flag of that name. `LEARNS` says whether its ``backward`` tells gradients of what
users' functions are bound to. Nobody above reaches past a door, or knows what a backend cannot
do. A new backend is one folder, and one line here.
"""

from __future__ import annotations

import functools
import importlib
import threading
from types import ModuleType
from typing import Any

from ..call.block_mask import BlockMask
from ..call.checks import check_name
from ..call.problem import Problem
from . import forks

_DOORS = {
    "cpu": "nattn.backends.cpu.door",
    "reference": "nattn.backends.reference",
    "cuda": "nattn.backends.cuda.door",
}
NAMES = ("auto", *_DOORS)

_loaded: dict[str, ModuleType] = {}
_import_lock = threading.RLock()

forks.guard(_import_lock)  # a fork in the middle of an import would leave it closed in the child


def load(name: str) -> ModuleType:
    """Return the door of a backend.

    Parameters
    ----------
    name : str
        One of `NAMES`; "auto" is "cpu".

    Raises
    ------
    ValueError, TypeError
        If there is no such backend.
    RuntimeError
        If what the cuda backend is made with, or a GPU, is missing.
    """
    found = _loaded.get(name) if type(name) is str else None
    if found is None:
        check_name("backend", name, NAMES)
        with _import_lock:
            try:
                door = _DOORS["cpu" if name == "auto" else name]
                found = _loaded[name] = importlib.import_module(door)
            except ImportError as error:
                if name != "cuda" or (error.name or "").split(".")[0] == "nattn":
                    raise
                raise RuntimeError(
                    "backend: expected numba-cuda for 'cuda', got none that can be imported "
                    f'({error}); install it with pip install "nattn[cuda13]" or "nattn[cuda12]", '
                    "by the version of CUDA that the driver knows"
                ) from error
    if name == "cuda":
        found.check_usable()
    return found


def choose(problem: Problem, name: str, task: str, **arrays: Any) -> ModuleType:
    """Return the door of the backend that a call asks for, if it can do all of the call.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    name : str
        One of `NAMES`; "auto" follows the arrays of the problem.
    task : str
        What is to be done: "forward", "backward", "jvp" or "observe".
    **arrays : ndarray or None
        Further arrays that the task reads or writes.

    Raises
    ------
    TypeError
        If the arrays are on a GPU and the backend is another.
    NotImplementedError
        For what the backend cannot do, with every reason.
    """
    if type(name) is not str or name not in NAMES:
        check_name("backend", name, NAMES)
    if problem.allocator is not None:
        if name not in ("auto", "cuda"):
            raise TypeError(
                f"backend: expected 'auto' or 'cuda' for arrays on a GPU, got {name!r}; copy them "
                "to host memory for it"
            )
        name = "cuda"
    face = _face(name)
    if task not in face.OFFERS:
        able = " or ".join(repr(x) for x in NAMES if task in _face(x).OFFERS)
        raise NotImplementedError(
            f"backend: expected {able} for the task {task!r}, got {name!r}, which does not offer "
            "it; with arrays in host memory pass one that does"
        )
    reasons = face.refusals(problem, task, arrays)
    if reasons:
        raise NotImplementedError("; ".join(reasons))
    return load(name)


@functools.cache
def _face(name: str) -> ModuleType:
    with _import_lock:
        return importlib.import_module(f"nattn.backends.{'cpu' if name == 'auto' else name}")


def _classify(*args: Any) -> Any:
    return load("cpu").classify(*args)


BlockMask.classify = _classify  # what the floor below asks of this one
