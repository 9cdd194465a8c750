"""Compiled code that is freed when nothing holds it any more.

Numba keeps all that it ever compiled: its engine owns every module of LLVM's, finished or on the
way there. So a user's function, of which there may be any number, is compiled in an engine of its
own, which goes when nothing is left that refers to it. What runs is the machine code alone, loaded
into another engine that holds nothing else.

Should a later Numba be built otherwise, functions are compiled in its own engine, as kernels are:
that takes memory for each of them, and nothing else is different.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numba
from llvmlite import binding as llvm
from numba.core import codegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from .cache import ObjectCode

_PASSES: Any = getattr(getattr(llvm, "newpassmanagers", None), "NewPassManager", ())

llvm_lock: Any = getattr(getattr(llvm.ffi.lib, "_lock", None), "_lock", None)
"""Held during each call of LLVM, also by a thread that happens to free what it left behind."""


class _Codegen(codegen.JITCPUCodegen):
    """An engine that disposes of its lists of passes.

    Those of llvmlite 0.50 never are: they inherit a `_dispose` that does nothing before the one
    that is theirs. For each function of each module that is 16 KB, 2 MB for a user's function.
    """

    def __init__(self, name: str) -> None:
        self._lists: list[Any] = []
        super().__init__(name)

    def _function_pass_manager(self, **options: Any) -> Any:
        made = super()._function_pass_manager(**options)
        self._lists.append(made[0])
        return made

    def _module_pass_manager(self, **options: Any) -> Any:
        made = super()._module_pass_manager(**options)
        self._lists.append(made[0])
        return made

    def dispose_of_passes(self) -> None:
        """Free the lists, none of which is in use now."""
        for passes in self._lists:
            forgotten = isinstance(passes, _PASSES) and not passes.closed
            if forgotten and type(passes)._dispose is llvm.ffi.ObjectRef._dispose:
                _PASSES._dispose(passes)
                passes.detach()
        self._lists.clear()


@contextlib.contextmanager
def own_engine() -> Iterator[None]:
    """Compile within, or load from the disk, into an engine that is freed with what it holds.

    Numba's compiler is locked meanwhile.
    """
    with global_compiler_lock:
        context = cpu_target.target_context
        context.refresh()  # what Numba compiles to set itself up stays in its own
        before = getattr(context, "_internal_codegen", None)
        if type(before) not in (codegen.JITCPUCodegen, _Codegen):
            yield
            return
        engine = _Codegen("nattn.users")
        try:
            context._internal_codegen = engine
            yield
        finally:
            context._internal_codegen = before
            engine.dispose_of_passes()


_unused: deque[Any] = deque()
"""Engines of which no code is held any more."""


class MachineCode:
    """A compiled function, loaded from an object file into an engine of its own.

    It is freed some time after the last reference is gone: by the next thread that loads another,
    not by whichever thread happens to drop it, in the middle of whatever it does.

    Parameters
    ----------
    code : ObjectCode
        The object file.

    Attributes
    ----------
    address : int
        Of the function, as long as this object lives.
    """

    def __init__(self, code: ObjectCode) -> None:
        with global_compiler_lock:
            while _unused:
                _unused.popleft().close()
            triple = llvm.get_process_triple()
            module = llvm.parse_assembly(f'target triple = "{triple}"')
            machine = llvm.Target.from_triple(triple).create_target_machine(jit=True)
            by_llvmlite = numba.config.USE_LLVMLITE_MEMORY_MANAGER
            engine = llvm.create_mcjit_compiler(module, machine, use_lmm=by_llvmlite)
            engine.add_object_file(llvm.ObjectFileRef.from_data(code.image))
            engine.finalize_object()
            self.address: int = engine.get_function_address(code.symbol)
        self._engine = engine

    def __del__(self, unused: deque[Any] = _unused) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            unused.append(engine)


def loaded(code: ObjectCode) -> MachineCode | None:
    """Load an object file; None if this llvmlite does not do it so."""
    try:
        return MachineCode(code)
    except Exception:
        return None
