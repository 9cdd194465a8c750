"""The disk cache and the compiler's door, mostly with kernels that compile in a moment."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import pytest

import nattn
from nattn.backends.cpu import jit

# ---------------------------------------------------------------------------------------------
# Where the cache lies
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Forget where the cache is, before and after, and start with no wishes at all."""
    for name in ("NATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    jit.cache_folder.cache_clear()
    yield monkeypatch
    jit.cache_folder.cache_clear()


def root() -> Path:
    folder = jit.cache_folder()
    assert folder is not None
    assert folder.is_dir()
    assert jit.fingerprint() in folder.name
    return folder.parent


def unwritable(tmp_path: Path, kind: str) -> Path:
    """Return a folder in which none can be made: a file, or one without the right to write."""
    place = tmp_path / kind
    if kind == "a file":
        place.write_text("in the way")
        return place
    place.mkdir()
    place.chmod(0o500)
    if os.access(place, os.W_OK):  # root may write anywhere, but not there
        place.chmod(0o700)
        place = Path("/proc")
        if not place.is_dir():
            pytest.skip("this user may write everywhere")
    return place


def test_cache_nattn_cache_dir_decides(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path / "a" / "b"))
    env.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    env.setenv("HOME", str(tmp_path))
    assert root() == tmp_path / "a" / "b"


def test_cache_in_numbas_folder(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    env.setenv("HOME", str(tmp_path))
    assert root() == tmp_path / "numba" / "nattn"


def test_cache_in_the_users_folder(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "HOME"
    env.setenv(variable, str(tmp_path / "user"))
    assert tmp_path / "user" in root().parents
    env.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    jit.cache_folder.cache_clear()
    assert root() == tmp_path / "xdg" / "nattn"


def test_cache_without_a_home_is_temporary(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert root().parent == tmp_path / "temporary"


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_cache_where_the_home_cannot_be_written(
    env: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    env.setenv("HOME", str(unwritable(tmp_path, kind)))
    env.setattr(numba.config, "CACHE_DIR", str(unwritable(tmp_path, "a file")))
    assert root().parent == tmp_path / "temporary"


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_cache_nowhere(env: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Then kernels are compiled in each process, and nothing else is different."""
    env.setenv("NATTN_CACHE_DIR", str(unwritable(tmp_path, kind)))
    assert jit.cache_folder() is None
    assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
    assert jit.clear_cache() == 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners here")
def test_cache_not_in_somebody_elses_folder(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code is loaded from it: who owns it can run what he likes."""
    env.setenv("NATTN_CACHE_DIR", str(tmp_path / "cache"))
    root()
    jit.cache_folder.cache_clear()
    mine = os.getuid()
    env.setattr(os, "getuid", lambda: mine + 1)
    assert jit.cache_folder() is None


def test_cache_stale_folders_go(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path))
    current = root() / f"kernels-{jit.fingerprint()}"
    assert current.is_dir()
    old = [tmp_path / f"kernels-{n:016x}" for n in range(20)]
    for age, folder in enumerate(old):
        (folder / "inside").mkdir(parents=True)
        (folder / "inside" / "code").write_bytes(b"x")
        os.utime(folder, (1e9 - age, 1e9 - age))
    os.utime(current, (1, 1))
    other = [tmp_path / "somebody else's", tmp_path / "kernels-notes"]
    for folder in other:
        folder.mkdir()
    (tmp_path / "a file").write_text("")
    jit.cache_folder.cache_clear()
    assert jit.cache_folder() == current
    left = [folder for folder in old if folder.exists()]
    assert 0 < len(left) < 10
    assert left == old[: len(left)]  # the newest
    assert current.is_dir()
    assert (tmp_path / "a file").exists()
    assert all(folder.exists() for folder in other)


def test_clear_cache(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path))
    kernel = jit.kernel("int64(int64)")(adding)
    assert value(kernel, 3, 4) == 7
    stale = tmp_path / f"kernels-{1:016x}"
    stale.mkdir()
    (stale / "code").write_bytes(bytes(1000))
    keep = tmp_path / "somebody else's"
    keep.write_bytes(bytes(10))
    size = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) - 10
    assert size > 1500
    assert jit.clear_cache() == size
    assert keep.exists()
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p != keep]
    assert jit.clear_cache() == 0
    # What is loaded still works, and what is new is compiled and cached again.
    assert value(kernel, 3, 4) == 7
    assert value(kernel, 5, 4) == 9
    assert jit.clear_cache() > 0


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def adding(n: int) -> Callable[[int], int]:
    """Make a function of one constant."""

    def function(x: int) -> int:
        return x + n

    return function


def value(kernel: Any, n: int, x: int) -> int:
    return int(kernel.compiled(n).ctypes(x))


def test_kernel_compiles_once_for_each_set_of_constants() -> None:
    made = []

    def factory(n: int) -> Callable[[int], int]:
        made.append(n)
        return adding(n)

    kernel = jit.kernel("int64(int64)")(factory)
    start = threading.Barrier(8)

    def work(thread: int) -> Any:
        start.wait()
        return kernel.compiled(thread % 2), kernel(thread % 2)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert sorted(made) == [0, 1]
    for thread, (compiled, address) in enumerate(found):
        assert compiled is found[thread % 2][0]
        assert address == compiled.address
        assert compiled.ctypes(10) == 10 + thread % 2
    assert found[0][1] != found[1][1]


def test_kernel_keeps_its_name_and_docstring() -> None:
    kernel = jit.kernel("int64(int64)")(adding)
    assert vars(kernel)["__name__"] == "adding"
    assert kernel.__doc__ == adding.__doc__


def test_kernel_that_fails_leaves_everything_as_it_was(
    env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path))
    assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.kernel")}
    assert before

    def broken(n: int) -> Callable[[int], Any]:
        def function(x: int) -> Any:
            return x.no_such_thing  # type: ignore[attr-defined]

        return function

    kernel = jit.kernel("int64(int64)")(broken)
    for _ in range(2):
        with pytest.raises(numba.TypingError, match="no_such_thing"):
            kernel.compiled(1)
    assert numba.config.CACHE_DIR == ""
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.kernel")} == before


# ---------------------------------------------------------------------------------------------
# Other processes
# ---------------------------------------------------------------------------------------------

HELPER = (
    "from nattn.backends.cpu.jit import device\n\n@device\ndef combine(x, n):\n    return x + n\n"
)

PROBE = """
from nattn.backends.cpu.jit import cache_folder, fingerprint, kernel
from nattn.backends.cpu.helper import combine

@kernel("int64(int64)")
def probe(n):
    def function(x):
        return combine(x, n)
    return function

def report(count):
    compiled = [probe.compiled(n) for n in range(count)]
    values, hits = [c.ctypes(10) for c in compiled], [c.cache_hits for c in compiled]
    print([values, sum(hits), str(cache_folder()), fingerprint()])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the package, and give it a kernel whose helper lies in another file."""
    copy = tmp_path / "site" / "nattn"
    shutil.copytree(Path(nattn.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "backends" / "cpu" / "helper.py").write_text(HELPER)
    (copy / "backends" / "cpu" / "probe.py").write_text(PROBE)
    return copy


def start(package: Path, cache: Path, count: int) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(package.parent), "NATTN_CACHE_DIR": str(cache)}
    command = [
        sys.executable,
        "-c",
        f"from nattn.backends.cpu.probe import report; report({count})",
    ]
    return subprocess.Popen(
        command,
        env=env,
        cwd=package.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[list[int], int, str, str]:
    """Return a process's values, cache hits, cache folder and fingerprint."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not err
    values, hits, folder, fingerprint = ast.literal_eval(out)
    return values, hits, folder, fingerprint


def files(folder: Path) -> dict[Path, int]:
    """Return when each file of a cache was last written."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_a_second_process_finds_the_code(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert finish(start(package, cache, 3))[:2] == ([10, 11, 12], 0)
    before = files(cache)
    assert len(before) == 3
    assert finish(start(package, cache, 3))[:2] == ([10, 11, 12], 3)
    assert files(cache) == before
    assert finish(start(package, cache, 5))[:2] == ([10, 11, 12, 13, 14], 3)


def test_an_edited_helper_is_compiled_anew(package: Path, tmp_path: Path) -> None:
    """Numba alone would miss it: only the kernel's own file is in its index."""
    cache = tmp_path / "cache"
    helper = package / "backends" / "cpu" / "helper.py"
    first = finish(start(package, cache, 1))
    kernel_file = (package / "backends" / "cpu" / "probe.py").stat()
    helper.write_text(HELPER.replace("x + n", "x - 100"))
    second = finish(start(package, cache, 1))
    assert first[:2] == ([10], 0)
    assert second[:2] == ([-90], 0)
    assert first[2:] != second[2:]
    helper.write_text(HELPER)  # back again: both versions are still there
    assert finish(start(package, cache, 1)) == ([10], 1, *first[2:])
    assert (package / "backends" / "cpu" / "probe.py").stat().st_mtime_ns == kernel_file.st_mtime_ns


def test_damaged_files_cost_time_only(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert finish(start(package, cache, 4))[0] == [10, 11, 12, 13]
    empty, short, noise, other = cache.rglob("*.kernel")
    empty.write_bytes(b"")
    short.write_bytes(short.read_bytes()[: int(0.6 * short.stat().st_size)])
    noise.write_bytes(os.urandom(noise.stat().st_size))
    other.write_bytes(other.read_bytes()[::-1])
    assert finish(start(package, cache, 4))[:2] == ([10, 11, 12, 13], 0)
    assert finish(start(package, cache, 4))[:2] == ([10, 11, 12, 13], 4)  # mended


def test_processes_at_once_on_an_empty_cache(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    processes = [start(package, cache, 6) for _ in range(3)]
    for process in processes:
        assert finish(process)[0] == [10, 11, 12, 13, 14, 15]
    assert finish(start(package, cache, 6))[:2] == ([10, 11, 12, 13, 14, 15], 6)


# That attention's own kernels are found there is in test_bugs.py, D15.
