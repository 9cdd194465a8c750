"""Compiling kernels: the one place that calls Numba's compiler, and its disk cache.

A kernel is made by a factory: a module-level function of a few constants (a `Tile`, strings,
numbers) that returns the plain function to compile. Everything else is reached through functions
marked ``@device``, which are compiled into it. A kernel is known by its factory's code, these
constants and the processor.

Numba's own disk cache would miss closures over users' functions and not see edits in other files
than the kernel's. So every state of the package has a cache folder of its own, named after a
fingerprint of the sources that make code, with one file for each kernel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import serialize
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature
from numba.extending import register_jitable

from ...functions.binding import code_text
from ..forks import guard

# NumPy's error model: a division by zero gives inf or NaN; a cfunc could not raise anyway.
_OPTIONS = {"nopython": True, "error_model": "numpy"}
_KEEP_FOLDERS = 8

GENERATING = ("vectors", "functions", "backends/cpu")
"""Folders of the package whose files decide what code a kernel becomes."""

device = register_jitable(error_model="numpy")
"""Mark a function that kernels call; it stays callable from Python where it uses no lanes."""

inlined = register_jitable(error_model="numpy", forceinline=True)
"""The same for small functions whose arguments must stay in registers."""

compiling = threading.RLock()
"""Held while Numba compiles, or sets itself up for it."""


# In the order in which a compiling thread takes them.
guard(compiling)
guard(global_compiler_lock)


@functools.cache
def fingerprint() -> str:
    """Return a hash of the sources that make code, and of the compiler's version and options."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    files = (path for floor in GENERATING for path in (package / floor).rglob("*.py"))
    for path in sorted(files):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    digest.update(repr((versions, sys.version_info[:3], _OPTIONS)).encode())
    return digest.hexdigest()[:16]


def _candidates() -> list[Path]:
    """Return where the cache may lie, best first."""
    given = os.environ.get("NATTN_CACHE_DIR")
    if given:
        return [Path(given)]
    folders = []
    if numba.config.CACHE_DIR:
        folders.append(Path(numba.config.CACHE_DIR) / "nattn")
    if os.environ.get("XDG_CACHE_HOME"):
        folders.append(Path(os.environ["XDG_CACHE_HOME"]) / "nattn")
    elif sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        folders.append(Path(os.environ["LOCALAPPDATA"]) / "nattn" / "Cache")
    elif os.environ.get("HOME"):
        home = Path(os.environ["HOME"])
        macos = sys.platform == "darwin"
        folders.append(home / ("Library/Caches" if macos else ".cache") / "nattn")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folders.append(Path(tempfile.gettempdir()) / f"nattn-cache-{user}")
    return folders


def _usable(folder: Path) -> bool:
    """Make the folder and try a file in it; it must be ours, since code is loaded from it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@functools.cache
def cache_folder() -> Path | None:
    """Return this version's cache folder, made if need be; None where nothing can be written.

    The environment variable NATTN_CACHE_DIR decides; without it ``NUMBA_CACHE_DIR/nattn``, the
    user's cache folder or a folder in the temporary directory, whichever can be written first.
    """
    for root in _candidates():
        folder = root / f"kernels-{fingerprint()}"
        if _usable(root) and _usable(folder):
            _forget_stale(root, folder)
            return folder
    return None


def _folders(root: Path) -> list[Path]:
    """Return the cache folders of all versions in a root that may hold other things too."""
    return [p for p in root.iterdir() if re.fullmatch("kernels-[0-9a-f]{16}", p.name)]


def _forget_stale(root: Path, current: Path) -> None:
    """Delete all but the newest folders, which other versions of the package may still use."""
    try:
        os.utime(current)
        found = sorted(_folders(root), key=lambda p: p.stat().st_mtime, reverse=True)
    except OSError:  # another process tidies up at the same time
        return
    for path in found[_KEEP_FOLDERS:]:
        shutil.rmtree(path, ignore_errors=True)


def clear_cache() -> int:
    """Delete the cached code of every version of the package; return the bytes freed."""
    current = cache_folder()
    if current is None:
        return 0
    freed = 0
    for folder in _folders(current.parent):
        freed += sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        shutil.rmtree(folder, ignore_errors=True)
    cache_folder.cache_clear()
    return freed


class _KernelFile:
    """One kernel on disk, as Numba's compiler asks for it: load and save, or do without.

    Whatever is wrong with a file or a folder (truncated, full, read-only, gone) costs a compile
    and nothing else.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name = name
        self._key = key

    def _path(self, target_context: Any) -> Path | None:
        folder = cache_folder()
        if folder is None:
            return None
        processor = repr(target_context.codegen().magic_tuple())
        digest = hashlib.sha256(f"{self._key}\n{processor}".encode()).hexdigest()[:32]
        return folder / f"{self._name}-{digest}.kernel"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function, or None."""
        target_context.refresh()
        path = self._path(target_context)
        if path is None:
            return None
        try:
            content = path.read_bytes()
            checksum, payload = content[:32], content[32:]
            if hashlib.sha256(payload).digest() != checksum:
                return None
            return CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:
            return None

    def save_overload(self, sig: Any, result: Any) -> None:
        """Write the compiled function, whole or not at all."""
        path = self._path(result.target_context)
        if path is None or result.library.has_dynamic_globals:
            return
        payload = serialize.dumps(result._reduce())
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, path)
        except OSError:
            with contextlib.suppress(OSError, UnboundLocalError):
                os.unlink(file.name)


def _compile(signature: str, function: Callable[..., Any], file: _KernelFile | None) -> Any:
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

    def compiled(self, *constants: Any) -> Any:
        """Return Numba's compiled function for these constants."""
        found = self._variants.get(constants)
        if found is None:
            with compiling:
                found = self._variants.get(constants)
                if found is None:
                    key = repr((self._signature, code_text(self._factory.__code__), constants))
                    file = _KernelFile(self._factory.__name__, key)
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
