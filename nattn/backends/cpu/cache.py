"""The disk cache of compiled kernels: where it lies, whom it trusts, what is in its files.

Numba's own disk cache would miss closures over users' functions and not see edits in other files
than the kernel's. So every state of the package has a cache folder of its own, named after a
fingerprint of the sources that make code, with one file for each kernel.

A file is unpickled, and what it holds is run: who can write one can run what he likes. So folders
and files that another user owns or can write are refused. A file begins with a checksum of the
rest and the hash of the kernel's key, so that neither a damaged nor a misnamed one is run.

A folder has a limit. Loading a file touches it, and the files that were touched last are kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numba
from numba.core import serialize
from numba.core.compiler import CompileResult

_KEEP_FOLDERS = 8
_LIMIT = 512
"""MiB that a folder may take, if NATTN_CACHE_LIMIT does not say."""
_HOUR = 3600.0
"""Seconds after which a file that is used is marked as used lately."""

GENERATING = ("vectors", "functions", "backends/cpu")
"""Folders of the package whose files decide what code a kernel becomes."""


@functools.cache
def fingerprint() -> str:
    """Return a hash of the sources that make code, and of the versions of what compiles them."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    files = (path for floor in GENERATING for path in (package / floor).rglob("*.py"))
    for path in sorted(files):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    digest.update(repr((versions, sys.version_info[:3])).encode())
    return digest.hexdigest()[:16]


# Where the cache lies


def _user() -> int | None:
    """Return who owns the files that this process makes; None where files have no such owners."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _candidates() -> list[Path]:
    """Return where the cache may lie if NATTN_CACHE_DIR does not say, best first."""
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
    user = os.environ.get("USERNAME", "user") if _user() is None else _user()
    with contextlib.suppress(FileNotFoundError):  # there may be no temporary directory
        folders.append(Path(tempfile.gettempdir()) / f"nattn-cache-{user}")
    return folders


_warned: set[Path] = set()
"""Folders of which a warning has said that they, or files in them, are refused."""


def _refused(path: Path, status: os.stat_result) -> bool:
    """Return whether others can decide what lies there, and warn of it once for each folder."""
    user = _user()
    if user is None:
        return False
    if status.st_uid != user:
        why = f"it belongs to user {status.st_uid}, and this process runs as user {user}"
        remedy = "Remove it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
        remedy = f"After a look at who did, remove it or run `chmod go-w '{path}'`"
    else:
        return False
    folder = path if stat.S_ISDIR(status.st_mode) else path.parent
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(
            f"the kernel cache {path} is not used: {why}, so the code in it may not be yours. "
            f"{remedy}, or let NATTN_CACHE_DIR name a folder of your own.",
            stacklevel=2,
        )
    return True


def _make(folder: Path) -> None:
    """Make a folder, and those it lies in, for this user alone whatever the umask is."""
    for path in (*reversed(folder.parents), folder):
        if path.is_dir():
            continue
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if not path.is_dir():  # made by another process in the meantime
                raise
        else:
            path.chmod(0o700)  # an umask may take the owner's rights too


def _usable(folder: Path) -> bool:
    """Make the folder and try a file in it; False if it is refused, OSError if that fails."""
    _make(folder)
    if _refused(folder, folder.stat()):
        return False
    with tempfile.TemporaryFile(dir=folder):
        return True


@functools.cache
def cache_folder() -> Path | None:
    """Return this version's cache folder, made if need be; None where nothing can be written.

    The environment variable NATTN_CACHE_DIR decides; without it ``NUMBA_CACHE_DIR/nattn``, the
    user's cache folder or a folder in the temporary directory, whichever can be written first. A
    folder that another user owns or can write is refused with a warning, also where NATTN_CACHE_DIR
    names it, and the next one is tried.
    """
    given = os.environ.get("NATTN_CACHE_DIR")
    wanted = [Path(given)] if given else []
    for root in (*wanted, *_candidates()):
        folder = root / f"kernels-{fingerprint()}"
        try:
            usable = _usable(root) and _usable(folder)
        except OSError:
            if root in wanted:
                return None
            continue
        if usable:
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


def _limit() -> float:
    """Return how many bytes a folder may take."""
    given = os.environ.get("NATTN_CACHE_LIMIT", "")
    try:
        megabytes = float(given or _LIMIT)
    except ValueError:
        megabytes = math.nan
    if not megabytes >= 0:
        warnings.warn(
            f"NATTN_CACHE_LIMIT: expected a number of MiB, got {given!r}; it is {_LIMIT} now",
            stacklevel=2,
        )
        megabytes = _LIMIT
    return megabytes * (1 << 20)


_written: dict[Path, float] = {}
"""Bytes that this process has written to a folder since it last looked at all that is there."""


def _keep_within_limit(folder: Path, n_bytes: int) -> None:
    """Delete the files that were not used for longest, once a folder is too large.

    What another process still wants of them costs it a compile. To look at every file after each
    one that is written would be slow: an eighth of the limit may be written in between.
    """
    limit = _limit()
    _written[folder] = _written.get(folder, math.inf) + n_bytes  # the first time look at once
    if _written[folder] <= limit / 8:
        return
    _written[folder] = 0
    files = []
    with contextlib.suppress(OSError):  # another process deletes the folder
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # or this file
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            break
        with contextlib.suppress(OSError):  # on Windows what another process reads stays
            path.unlink()
        total -= size


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


# What is in its files

_DIGEST = hashlib.sha256().digest_size


class ObjectCode(NamedTuple):
    """Machine code as the compiler leaves it, in the format of the system's object files.

    Attributes
    ----------
    symbol : str
        Name of the function to call.
    image : bytes
        The object file.
    """

    symbol: str
    image: bytes


class KernelFile:
    """One kernel on disk, as Numba's compiler asks for it: load and save, or do without.

    Whatever is wrong with a file or a folder (truncated, full, read-only, gone, another kernel's,
    another user's) costs a compile and nothing else.

    Parameters
    ----------
    name : str
        What its file is called, for those who look into the folder.
    key : str
        What the kernel is made of, beside the processor and the sources.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name = name
        self._key = key

    def _place(self, target_context: Any) -> tuple[Path, bytes] | None:
        """Return where the file lies, and the hash of all that the kernel follows from."""
        folder = cache_folder()
        if folder is None:
            return None
        processor = repr(target_context.codegen().magic_tuple())
        text = f"{fingerprint()}\n{self._name}\n{self._key}\n{processor}"
        digest = hashlib.sha256(text.encode())
        return folder / f"{self._name}-{digest.hexdigest()[:32]}.kernel", digest.digest()

    def _read(self, target_context: Any) -> memoryview | None:
        """Return what was written, or None."""
        place = self._place(target_context)
        if place is None:
            return None
        path, identity = place
        try:
            with path.open("rb") as file:
                # Of the opened file, not of what the path may lead to a moment later. A file that
                # only this user can write is his, whoever may exchange the folders above it.
                status = os.fstat(file.fileno())
                if _refused(path, status):
                    return None
                content = file.read()
        except OSError:
            return None
        checksum, rest = content[:_DIGEST], memoryview(content)[_DIGEST:]
        if hashlib.sha256(rest).digest() != checksum or rest[:_DIGEST] != identity:
            return None
        if time.time() - status.st_mtime > _HOUR:
            with contextlib.suppress(OSError):
                os.utime(path)
        return rest[_DIGEST:]

    def _write(self, target_context: Any, content: bytes) -> None:
        """Write it, whole or not at all."""
        place = self._place(target_context)
        if place is None:
            return
        path, identity = place
        rest = identity + content
        try:
            _make(path.parent)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                if hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), 0o600)  # whatever the umask is
                file.write(hashlib.sha256(rest).digest() + rest)
            os.replace(file.name, path)
        except OSError:
            with contextlib.suppress(OSError, UnboundLocalError):
                os.unlink(file.name)
            return
        _keep_within_limit(path.parent, _DIGEST + len(rest))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function, or None."""
        target_context.refresh()
        content = self._read(target_context)
        if content is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception:
            return None

    def save_overload(self, sig: Any, result: Any) -> None:
        """Write the compiled function, whole or not at all."""
        if cache_folder() is not None and not result.library.has_dynamic_globals:
            self._write(result.target_context, serialize.dumps(result._reduce()))


class CodeFile(KernelFile):
    """A user's function on disk: its machine code alone, which is all that it takes to call it.

    Where that does not suffice, because the code needs objects of Python's, the file is like that
    of any kernel.

    Attributes
    ----------
    code : ObjectCode or None
        What was found or compiled.
    """

    def __init__(self, name: str, key: str) -> None:
        super().__init__(name, key)
        self._file = KernelFile(name, f"{key}\ncode")
        self.code: ObjectCode | None = None

    def load(self, target_context: Any) -> ObjectCode | None:
        """Return the code, or None."""
        target_context.refresh()  # which gives names to what the code may call
        content = self._file._read(target_context)
        if content is not None:
            symbol, _, image = bytes(content).partition(b"\0")
            self.code = ObjectCode(symbol.decode(), image)
        return self.code

    def save_overload(self, sig: Any, result: Any) -> None:
        """Keep the code, and write it."""
        if result.library.has_dynamic_globals:  # addresses of this process
            return
        (_, kind, data), _, own, _, objects, lifted, _, setup, environments = result._reduce()
        names = any(x.consts for x in (own, *environments))
        if kind != "object" or objects or lifted or setup or names:
            super().save_overload(sig, result)
            return
        self.code = ObjectCode(result.fndesc.llvm_cfunc_wrapper_name, data[0])
        content = self.code.symbol.encode() + b"\0" + self.code.image
        self._file._write(result.target_context, content)
