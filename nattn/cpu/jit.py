"""Compiling kernels: the one place that calls Numba's compiler, and its disk cache.

A kernel is made by a factory: a module-level function of a few constants (a `Tile`, strings,
numbers) that returns the plain function to compile. Everything else is reached through functions
marked ``@device``, which are compiled into it. Such closures hit Numba's disk cache in every later
process; closures over compiled functions would miss in each.

Numba's cache does not see edits in other files than the kernel's own. So every state of the
package has a cache folder of its own, named after a fingerprint of all its sources.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError, NumbaWarning
from numba.extending import register_jitable

# NumPy's error model: a division by zero gives inf or NaN; a cfunc could not raise anyway.
_OPTIONS = {"nopython": True, "error_model": "numpy"}
_KEEP_FOLDERS = 8

device = register_jitable(error_model="numpy")
"""Mark a function that kernels call; it stays callable from Python where it uses no lanes."""

_lock = threading.RLock()


def _before_fork() -> None:
    """Let a fork wait for the compiler: a lock held by a thread that is gone never opens."""
    _lock.acquire()
    global_compiler_lock.acquire()


def _after_fork() -> None:
    global_compiler_lock.release()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )


@functools.cache
def fingerprint() -> str:
    """Return a hash of every source file of the package, the compiler's version and options."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
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


def _compile(signature: str, function: Callable[..., Any]) -> Any:
    """Compile to C's calling convention, from the disk cache if it is there and sound."""
    for _ in range(2):
        folder = cache_folder()
        if folder is None:
            break
        try:
            return _compile_cached(signature, function, folder)
        except NumbaError:  # the kernel is wrong, not the cache
            raise
        except Exception:
            # A truncated file, a full disk, a folder that went away: none may stop a call.
            shutil.rmtree(folder, ignore_errors=True)
            cache_folder.cache_clear()
    return numba.cfunc(signature, **_OPTIONS)(function)


def _compile_cached(signature: str, function: Callable[..., Any], folder: Path) -> Any:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read once, when the cache object is made
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumbaWarning)  # that a folder cannot be written
            return numba.cfunc(signature, cache=True, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before


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
            with _lock:
                found = self._variants.get(constants)
                if found is None:
                    found = _compile(self._signature, self._factory(*constants))
                    self._variants[constants] = found
        return found

    def inspect_asm(self, *constants: Any) -> str:
        """Return the assembly of the variant for these constants, as Numba's dispatchers do."""
        text: str = self.compiled(*constants)._library.get_asm_str()
        return text

    def __call__(self, *constants: Any) -> int:
        """Return the address of the variant for these constants."""
        address: int = self.compiled(*constants).address
        return address


def kernel(signature: str) -> Callable[[Callable[..., Callable[..., Any]]], Kernel]:
    """Make a factory of plain functions a factory of compiled ones, reached by address."""
    return lambda factory: Kernel(signature, factory)
