"""The disk cache and the compiler's door, mostly with kernels that compile in a moment."""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import inspect
import os
import pickle
import pkgutil
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import pytest

import nattn
from nattn.backends import cpu
from nattn.backends.cpu import cache, jit

# ---------------------------------------------------------------------------------------------
# Where the cache lies
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Forget where the cache is, before and after, and start with no wishes at all."""
    for name in ("NATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(cache, "_warned", set())
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    cache.cache_folder.cache_clear()
    yield monkeypatch
    cache.cache_folder.cache_clear()


def root() -> Path:
    folder = cache.cache_folder()
    assert folder is not None
    assert folder.is_dir()
    assert cache.fingerprint() in folder.name
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
    cache.cache_folder.cache_clear()
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
    assert cache.cache_folder() is None
    assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
    assert cache.clear_cache() == 0


def test_cache_stale_folders_go(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path))
    current = root() / f"kernels-{cache.fingerprint()}"
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
    cache.cache_folder.cache_clear()
    assert cache.cache_folder() == current
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
    assert cache.clear_cache() == size
    assert keep.exists()
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p != keep]
    assert cache.clear_cache() == 0
    # What is loaded still works, and what is new is compiled and cached again.
    assert value(kernel, 3, 4) == 7
    assert value(kernel, 5, 4) == 9
    assert cache.clear_cache() > 0


# ---------------------------------------------------------------------------------------------
# Whom it trusts: code is loaded from it, and who can write it can run what he likes (N4)
# ---------------------------------------------------------------------------------------------

owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")


def give_away(env: pytest.MonkeyPatch, path: Path) -> None:
    """Make a path another user's, or this process one of another user."""
    other = os.geteuid() + 1
    try:
        os.chown(path, other, -1)
    except PermissionError:
        env.setattr(os, "geteuid", lambda: other)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@owners
@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("inner", [False, True])
def test_cache_not_where_others_can_write(
    env: pytest.MonkeyPatch, tmp_path: Path, bits: int, inner: bool
) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path / "shared"))
    refused = root() / f"kernels-{cache.fingerprint()}" if inner else root()
    cache.cache_folder.cache_clear()
    refused.chmod(bits)
    text = f"cache {refused} is not used: .*mode {bits:04o}.*chmod go-w '{refused}'.*CACHE_DIR"
    with pytest.warns(UserWarning, match=text):
        assert root().parent == tmp_path / "temporary"
    cache.cache_folder.cache_clear()
    assert root().parent == tmp_path / "temporary"  # and a warning would be an error here
    cache.cache_folder.cache_clear()
    refused.chmod(0o755)
    assert root() == tmp_path / "shared"


@owners
def test_cache_not_in_somebody_elses_folder(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("HOME", str(tmp_path))
    env.setattr(sys, "platform", "linux")
    given = root()
    cache.cache_folder.cache_clear()
    mine = os.geteuid()
    give_away(env, given)
    with pytest.warns(UserWarning, match=f"cache {given} is not used: it belongs to user .*Remove"):
        folder = cache.cache_folder()
    if os.geteuid() == mine:
        assert folder is not None
        assert folder.parents[1] == tmp_path / "temporary"
    else:  # all that this test made is of another user now
        assert folder is None


@owners
def test_cache_nowhere_that_is_safe(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then kernels are compiled in each process, and nothing else is different."""
    given, temporary = tmp_path / "shared", tmp_path / "temporary" / f"nattn-cache-{os.geteuid()}"
    for folder in (given, temporary):
        folder.mkdir()
        folder.chmod(0o777)
    env.setenv("NATTN_CACHE_DIR", str(given))
    with pytest.warns(UserWarning, match="not used") as warned:
        assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
    assert len(warned) == 2
    assert cache.cache_folder() is None
    assert not [*given.iterdir(), *temporary.iterdir()]


@owners
@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_cache_is_private_whatever_the_umask(
    env: pytest.MonkeyPatch, tmp_path: Path, mask: int
) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path / "a" / "b"))
    before = os.umask(mask)
    try:
        assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
    finally:
        os.umask(before)
    (file,) = (tmp_path / "a").rglob("*.kernel")
    assert mode(file) == 0o600
    for folder in (tmp_path / "a", tmp_path / "a" / "b", file.parent):
        assert mode(folder) == 0o700
    assert hits(jit.kernel("int64(int64)")(adding), 3) == 1


class Planted:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@owners
@pytest.mark.parametrize("how", ["own", "group", "others", "foreign"])
def test_a_planted_file_is_not_run(env: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    env.setenv("NATTN_CACHE_DIR", str(tmp_path / "cache"))
    assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
    (file,) = tmp_path.rglob("*.kernel")
    rest = file.read_bytes()[32:64] + pickle.dumps(Planted(tmp_path / "made"))
    file.write_bytes(hashlib.sha256(rest).digest() + rest)
    file.chmod({"group": 0o620, "others": 0o602}.get(how, 0o600))
    if how == "foreign":
        give_away(env, file)
    if how == "own":  # it would be run: the others are kept from that by their owner and mode
        assert value(jit.kernel("int64(int64)")(adding), 3, 4) == 7
        assert (tmp_path / "made").is_dir()
        return
    reason = "belongs to user" if how == "foreign" else "mode 06[02][02].*chmod go-w"
    with pytest.warns(UserWarning, match=rf"cache {file} is not used: .*{reason}"):
        assert hits(jit.kernel("int64(int64)")(adding), 3) == 0
    assert not (tmp_path / "made").exists()
    if how != "foreign":  # what was compiled has taken its place
        assert mode(file) == 0o600
        assert hits(jit.kernel("int64(int64)")(adding), 3) == 1


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


def hits(kernel: Any, n: int) -> int:
    return int(kernel.compiled(n).cache_hits)


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
# The sources that make code
# ---------------------------------------------------------------------------------------------


def origins(module: types.ModuleType) -> dict[str, str]:
    """Return which module each name comes from that a module imports, wherever it does."""
    found = {}
    package = module.__spec__.parent if module.__spec__ else None
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            stem = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                name = f"{stem}.{alias.name}"
                found[alias.asname or alias.name] = name if name in sys.modules else stem
    return found


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def plain(value: Any) -> types.FunctionType | None:
    """Return the Python function of a kernel, of what Numba wraps, or of itself."""
    for attribute in ("_factory", "py_func", "_defn"):
        value = getattr(value, attribute, value)
    return value if isinstance(value, types.FunctionType) else None


def sources_of(start: list[Any]) -> set[str]:
    """Return the modules of nattn that define what functions are made of, as their names say."""
    todo, seen = [f for f in map(plain, start) if f is not None], set()
    modules: set[str] = set()
    while todo:
        function = todo.pop()
        module = sys.modules.get(function.__module__)
        if function in seen or module is None or not module.__name__.startswith("nattn."):
            continue
        seen.add(function)
        modules.add(module.__name__)
        imported = origins(module)
        for code in codes(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname != "LOAD_GLOBAL":
                    continue
                modules.add(imported.get(step.argval, module.__name__))
                value = function.__globals__.get(step.argval)
                values = [value]
                if isinstance(value, types.ModuleType):
                    values = [vars(value).get(name) for name in code.co_names]
                todo += [f for f in map(plain, values) if f is not None]
    return {name for name in modules if name.startswith("nattn.")}


def is_generating(module: str) -> bool:
    path = module.removeprefix("nattn.").replace(".", "/") + "/"
    return any(path.startswith(f"{floor}/") for floor in cache.GENERATING)


def test_what_kernels_are_made_of_is_in_the_fingerprint() -> None:
    """An edit elsewhere must not matter to them, for it does not make them be compiled anew."""
    names = [f"{cpu.__name__}.{module.name}" for module in pkgutil.iter_modules(cpu.__path__)]
    rooms = [importlib.import_module(name) for name in names]
    kernels = [x for room in rooms for x in vars(room).values() if isinstance(x, jit.Kernel)]
    assert len(set(kernels)) > 8
    found = sources_of(kernels)
    for part in ("nattn.backends.cpu.", "nattn.vectors.", "nattn.functions."):
        assert [name for name in found if name.startswith(part)]
    assert [name for name in found if not is_generating(name)] == []


@pytest.mark.parametrize("what", ["limit", "limit_of()", "invented.limit_of()"])
def test_the_search_finds_what_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Were it blind, the test before this one would pass."""
    sources = {
        "nattn.call.invented": "LIMIT = 3\n\ndef limit_of():\n    return LIMIT\n",
        "nattn.backends.cpu.invented": (
            "from nattn.call import invented\n"
            "from ...call.invented import LIMIT as limit, limit_of\n\n"
            f"def factory(n):\n    return lambda x: x + {what}\n"
        ),
    }
    for name, text in sources.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        parent = importlib.import_module(name.rpartition(".")[0])
        monkeypatch.setattr(parent, "invented", module, raising=False)
        spec.loader.exec_module(module)
    kernel = jit.kernel("int64(int64)")(module.factory)
    elsewhere = [name for name in sources_of([kernel]) if not is_generating(name)]
    assert elsewhere == ["nattn.call.invented"]


# ---------------------------------------------------------------------------------------------
# Other processes
# ---------------------------------------------------------------------------------------------

HELPER = (
    "from nattn.backends.cpu.jit import device\n\n@device\ndef combine(x, n):\n    return x + n\n"
)

PROBE = """
from nattn.backends.cpu.cache import cache_folder, fingerprint
from nattn.backends.cpu.jit import kernel
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


def start(package: Path, folder: Path, count: int) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(package.parent), "NATTN_CACHE_DIR": str(folder)}
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
    folder = tmp_path / "cache"
    assert finish(start(package, folder, 3))[:2] == ([10, 11, 12], 0)
    before = files(folder)
    assert len(before) == 3
    assert finish(start(package, folder, 3))[:2] == ([10, 11, 12], 3)
    assert files(folder) == before
    assert finish(start(package, folder, 5))[:2] == ([10, 11, 12, 13, 14], 3)


def test_an_edited_helper_is_compiled_anew(package: Path, tmp_path: Path) -> None:
    """Numba alone would miss it: only the kernel's own file is in its index."""
    folder = tmp_path / "cache"
    helper = package / "backends" / "cpu" / "helper.py"
    first = finish(start(package, folder, 1))
    kernel_file = (package / "backends" / "cpu" / "probe.py").stat()
    helper.write_text(HELPER.replace("x + n", "x - 100"))
    second = finish(start(package, folder, 1))
    assert first[:2] == ([10], 0)
    assert second[:2] == ([-90], 0)
    assert first[2:] != second[2:]
    helper.write_text(HELPER)  # back again: both versions are still there
    assert finish(start(package, folder, 1)) == ([10], 1, *first[2:])
    assert (package / "backends" / "cpu" / "probe.py").stat().st_mtime_ns == kernel_file.st_mtime_ns


@pytest.mark.parametrize("floor", ["vectors", "functions", "call", "applications"])
def test_only_sources_that_make_code_count(package: Path, tmp_path: Path, floor: str) -> None:
    """An edit of the page's text must not compile every kernel anew."""
    folder = tmp_path / "cache"
    first = finish(start(package, folder, 1))
    edited = max((package / floor).rglob("*.py"), key=lambda p: p.stat().st_size)
    with edited.open("a") as file:
        file.write("\n# a remark\n")
    second = finish(start(package, folder, 1))
    assert first[:2] == ([10], 0)
    if floor in cache.GENERATING:
        assert second[1] == 0
        assert second[3] != first[3]
    else:
        assert second == (first[0], 1, *first[2:])


def test_another_kernels_file_costs_time_only(package: Path, tmp_path: Path) -> None:
    """N4: what a wrong copy or a sync tool leaves is as valid as before, under another's name."""
    folder = tmp_path / "cache"
    assert finish(start(package, folder, 3))[0] == [10, 11, 12]
    names = sorted(folder.rglob("*.kernel"))
    contents = [path.read_bytes() for path in names]
    for path, content in zip(names, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    assert finish(start(package, folder, 3))[:2] == ([10, 11, 12], 0)
    assert finish(start(package, folder, 3))[:2] == ([10, 11, 12], 3)  # mended


def test_another_versions_file_costs_time_only(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    finish(start(package, folder, 1))
    (old,) = folder.rglob("*.kernel")
    helper = package / "backends" / "cpu" / "helper.py"
    helper.write_text(HELPER.replace("x + n", "x - 100"))
    new = Path(finish(start(package, folder, 1))[2])
    for path in new.iterdir():
        path.write_bytes(old.read_bytes())
    assert finish(start(package, folder, 1))[:2] == ([-90], 0)


def test_damaged_files_cost_time_only(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert finish(start(package, folder, 4))[0] == [10, 11, 12, 13]
    empty, short, noise, other = folder.rglob("*.kernel")
    empty.write_bytes(b"")
    short.write_bytes(short.read_bytes()[: int(0.6 * short.stat().st_size)])
    noise.write_bytes(os.urandom(noise.stat().st_size))
    other.write_bytes(other.read_bytes()[::-1])
    assert finish(start(package, folder, 4))[:2] == ([10, 11, 12, 13], 0)
    assert finish(start(package, folder, 4))[:2] == ([10, 11, 12, 13], 4)  # mended


def test_processes_at_once_on_an_empty_cache(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    processes = [start(package, folder, 6) for _ in range(3)]
    for process in processes:
        assert finish(process)[0] == [10, 11, 12, 13, 14, 15]
    assert finish(start(package, folder, 6))[:2] == ([10, 11, 12, 13, 14, 15], 6)


# That attention's own kernels are found there is in test_bugs.py, D15.
