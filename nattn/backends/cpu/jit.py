"""Compiling kernels: the one place that calls Numba's compiler.

A kernel is made by a factory: a module-level function of a few constants (a `Tile`, strings,
numbers) that returns the plain function to compile. Everything else is reached through functions
marked ``@device``, which are compiled into it. A kernel is known by its factory's code, these
constants and the processor; the next process finds it in the cache on disk.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature
from numba.extending import register_jitable

from ...functions.binding import code_text
from ..forks import guard
from .cache import KernelFile

# NumPy's error model: a division by zero gives inf or NaN; a cfunc could not raise anyway.
_OPTIONS = {"nopython": True, "error_model": "numpy"}

device = register_jitable(error_model="numpy")
"""Mark a function that kernels call; it stays callable from Python where it uses no lanes."""

inlined = register_jitable(error_model="numpy", forceinline=True)
"""The same for small functions whose arguments must stay in registers."""

compiling = threading.RLock()
"""Held while Numba compiles, or sets itself up for it."""


# In the order in which a compiling thread takes them.
guard(compiling)
guard(global_compiler_lock)


def _compile(signature: str, function: Callable[..., Any], file: KernelFile | None) -> Any:
    """Compile to C's calling convention, or load from the disk."""
    compiled: Any = CFunc(function, normalize_signature(signature), {}, dict(_OPTIONS))
    if file is not None:
        compiled._cache = file
    compiled.compile()
    return compiled


class Kernel:
    """The compiled variants of one kernel, each made when it is first asked for."""

    def __init__(self, signature: str, factory: Callable[..., Callable[..., Any]]) -> None:
        self._signature = signature
        self._factory = factory
        self._variants: dict[tuple[Any, ...], Any] = {}
        functools.update_wrapper(self, factory)

    def _key(self, constants: tuple[Any, ...]) -> str:
        """Return what a variant is made of, as text."""
        factory = self._factory
        origin = factory.__module__, factory.__qualname__
        return repr((origin, self._signature, code_text(factory.__code__), constants))

    def compiled(self, *constants: Any) -> Any:
        """Return Numba's compiled function for these constants."""
        found = self._variants.get(constants)
        if found is None:
            with compiling:
                found = self._variants.get(constants)
                if found is None:
                    file = KernelFile(self._factory.__name__, self._key(constants))
                    found = _compile(self._signature, self._factory(*constants), file)
                    self._variants[constants] = found
        return found

    def inspect_asm(self, *constants: Any) -> str:
        """Return the assembly of the variant for these constants, as Numba's dispatchers do.

        It is compiled anew: what lies on disk is machine code alone.
        """
        with compiling:
            compiled = _compile(self._signature, self._factory(*constants), None)
        text: str = compiled._library.get_asm_str()
        return text

    def __call__(self, *constants: Any) -> int:
        """Return the address of the variant for these constants."""
        address: int = self.compiled(*constants).address
        return address


def kernel(signature: str) -> Callable[[Callable[..., Callable[..., Any]]], Kernel]:
    """Make a factory of plain functions a factory of compiled ones, reached by address."""
    return lambda factory: Kernel(signature, factory)
