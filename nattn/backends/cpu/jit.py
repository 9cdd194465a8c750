"""Compiling kernels: the one place that calls Numba's compiler.

A kernel is made by a factory: a module-level function of a few constants (a `Tile`, strings,
numbers) that returns the plain function to compile. Everything else is reached through functions
marked ``@device``, which are compiled into it. A kernel is known by its factory's code, these
constants and the processor; the next process finds it in the cache on disk. Of users' functions
those least recently used are forgotten and freed: whoever holds the address of one must hold what
`Kernel.compiled` returned, too.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature
from numba.extending import register_jitable

from ...functions.binding import code_text
from ...functions.on_lanes import UserCode
from ..forks import guard
from .cache import CodeFile, KernelFile
from .engines import llvm_lock, loaded, own_engine

# NumPy's error model: a division by zero gives inf or NaN; a cfunc could not raise anyway.
_OPTIONS = {"nopython": True, "error_model": "numpy"}

device = register_jitable(error_model="numpy")
"""Mark a function that kernels call; it stays callable from Python where it uses no lanes."""

inlined = register_jitable(error_model="numpy", forceinline=True)
"""The same for small functions whose arguments must stay in registers."""

fleeting = njit(error_model="numpy", forceinline=True, no_cpython_wrapper=True)
"""The same for functions that go with the kernel which calls them: Numba registers the others.

The result is not the function itself, and compiled code must find it in the function's place.
"""

compiling = threading.RLock()
"""Held while Numba compiles, or sets itself up for it."""


# In the order in which a compiling thread takes them.
guard(compiling)
guard(global_compiler_lock)
if llvm_lock is not None:
    guard(llvm_lock)


def _compile(signature: str, function: Callable[..., Any], file: KernelFile | None) -> Any:
    """Compile to C's calling convention, or load from the disk."""
    compiled: Any = CFunc(function, normalize_signature(signature), {}, dict(_OPTIONS))
    if file is not None:
        compiled._cache = file
    compiled.compile()
    return compiled


MOST_USERS = 256
"""Of how many users' functions each kernel keeps the compiled variants."""

_now = itertools.count()


class _Variant:
    """A compiled function, and when it was last asked for."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.used = next(_now)


class Kernel:
    """The compiled variants of one kernel, each made when it is first asked for."""

    def __init__(self, signature: str, factory: Callable[..., Callable[..., Any]]) -> None:
        self._signature = signature
        self._factory = factory
        self._variants: dict[tuple[Any, ...], _Variant] = {}
        functools.update_wrapper(self, factory)

    def _key(self, constants: tuple[Any, ...]) -> str:
        """Return what a variant is made of, as text."""
        factory = self._factory
        origin = factory.__module__, factory.__qualname__
        return repr((origin, self._signature, code_text(factory.__code__), constants))

    def compiled(self, *constants: Any) -> Any:
        """Return what holds the code for these constants; `address` is where that begins."""
        # not the tree of functions, which holds arrays
        key = tuple(x.key if isinstance(x, UserCode) else x for x in constants)
        found = self._variants.get(key)
        if found is None:
            with compiling:
                found = self._variants.get(key)
                if found is None:
                    found = self._variants[key] = self._made(constants)
        found.used = next(_now)
        return found.compiled

    def _made(self, constants: tuple[Any, ...]) -> _Variant:
        name, key = self._factory.__name__, self._key(constants)
        if not any(isinstance(x, UserCode) for x in constants):
            function = self._factory(*constants)
            return _Variant(_compile(self._signature, function, KernelFile(name, key)))
        while len(self._variants) >= MOST_USERS:
            oldest = min(self._variants, key=lambda key: self._variants[key].used)
            del self._variants[oldest]
        file = CodeFile(name, key)
        with global_compiler_lock:
            code = file.load(cpu_target.target_context)
            found = None if code is None else loaded(code)
            if found is None:
                with own_engine():
                    compiled = _compile(self._signature, self._factory(*constants), file)
                found = None if file.code is None else loaded(file.code)
                found = compiled if found is None else found
        return _Variant(found)

    def inspect_asm(self, *constants: Any) -> str:
        """Return the assembly of the variant for these constants, as Numba's dispatchers do.

        It is compiled anew: what lies on disk is machine code alone.
        """
        with compiling:
            compiled = _compile(self._signature, self._factory(*constants), None)
        text: str = compiled._library.get_asm_str()
        return text

    def __call__(self, *constants: Any) -> int:
        """Return the address of the variant for these constants, none of which is a user's code."""
        address: int = self.compiled(*constants).address
        return address


def kernel(signature: str) -> Callable[[Callable[..., Callable[..., Any]]], Kernel]:
    """Make a factory of plain functions a factory of compiled ones, reached by address."""
    return lambda factory: Kernel(signature, factory)
