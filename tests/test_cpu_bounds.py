"""How much compiled code is kept, in memory and on disk, and that what is forgotten is freed."""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import environment
from numba.core.compiler import CompileResult

import nattn
from nattn.backends.cpu import cache, engines, jit, score
from nattn.functions.binding import Bound
from nattn.functions.on_lanes import UserCode, compilable
from nattn.vectors.lanes import atomic_add

Call = Callable[[int], int]


def code(n: int, body: str = "return x + {n}") -> UserCode:
    """Return a user's function, of a number of its own."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(f"def f(x): {body.format(n=n)}\n", scope)
    return UserCode((n, body), Bound(scope["f"], (0,), (), ()))


def calling(made: list[int], ours: Callable[[Any], Any] = lambda f: f) -> jit.Kernel:
    """Return a kernel that calls a user's function, and notes which it compiles."""

    def factory(source: UserCode) -> Any:
        made.append(source.key[0])
        return ours(compilable(source.tree.function, jit.fleeting, jit.inlined))  # type: ignore[union-attr]

    def call(source: UserCode) -> Any:
        f = factory(source)
        return lambda x: f(x)

    return jit.kernel("int64(int64)")(call)


def call(compiled: Any, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)(x))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, which nobody has looked at yet."""
    monkeypatch.setenv("NATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NATTN_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(cache, "_written", {})
    cache.cache_folder.cache_clear()
    yield tmp_path
    cache.cache_folder.cache_clear()


def sizes(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in folder.rglob("*.kernel")}


# In memory


@pytest.mark.usefixtures("folder")
def test_the_least_recently_used_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MOST_USERS", 3)
    kernel = calling([])
    codes = [kernel.compiled(code(n)) for n in range(3)]
    assert all(isinstance(x, engines.MachineCode) for x in codes)
    loaded = [x._engine for x in codes]
    assert kernel.compiled(code(0)) is codes[0]  # used again
    held = codes[1]
    del codes
    kernel.compiled(code(3))  # for which 1 goes, and then 2
    kernel.compiled(code(4))
    kernel.compiled(code(0))
    kernel.compiled(code(5))  # frees what went before it
    assert len(kernel._variants) == 3
    assert [x.closed for x in loaded] == [False, False, True]
    assert call(held, 40) == 41
    del held
    kernel.compiled(code(6))
    assert [x.closed for x in loaded] == [False, True, True]
    assert call(kernel.compiled(code(0)), 7) == 7


@pytest.mark.usefixtures("folder")
def test_what_it_was_compiled_in_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Any] = []
    compilers: list[weakref.ref[Any]] = []

    class Watched(engines._Codegen):
        def dispose_of_passes(self) -> None:
            passes.extend(self._lists)
            compilers.append(weakref.ref(self))
            super().dispose_of_passes()

    monkeypatch.setattr(engines, "_Codegen", Watched)
    kernel = calling([])
    codes = [kernel.compiled(code(n)) for n in range(3)]
    assert [call(x, 10) for x in codes] == [10, 11, 12]
    gc.collect()
    assert len(compilers) == 3
    assert [x() for x in compilers[1:]] == [None, None]  # what all share stays with the first
    assert passes
    assert all(x.closed for x in passes)
    del codes


def test_forgotten_code_comes_back(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From the disk, or from the compiler."""
    monkeypatch.setattr(jit, "MOST_USERS", 1)
    made: list[int] = []
    kernel = calling(made)
    for _ in range(2):
        assert [call(kernel.compiled(code(n)), 10) for n in range(2)] == [10, 11]
    assert made == [0, 1]
    for path in folder.rglob("*.kernel"):
        path.unlink()
    assert call(kernel.compiled(code(0)), 10) == 10
    assert made == [0, 1, 0]


@pytest.mark.usefixtures("folder")
def test_code_that_runs_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MOST_USERS", 1)

    def waiting(f: Any) -> Any:
        def wait(x: Any) -> Any:
            while atomic_add(x, 0) == 0:
                pass
            return f(x)

        return jit.fleeting(wait)

    kernel = calling([], waiting)
    state = (ctypes.c_int64 * 1)(0)
    where = ctypes.addressof(state)
    codes = [kernel.compiled(code(1))]
    engine = codes[0]._engine
    found: list[int] = []
    started = threading.Event()

    def run() -> None:
        mine = codes.pop()
        started.set()
        found.append(call(mine, where))

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    for n in (2, 3, 4):
        kernel.compiled(code(n))
    gc.collect()
    assert not found
    assert not engine.closed
    state[0] = 1
    thread.join()
    assert found == [where + 1]
    kernel.compiled(code(5))
    assert engine.closed


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("part", ["loader", "compiler"])
def test_a_numba_that_is_built_otherwise(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Then nothing is freed, and nothing else is different."""
    if part == "loader":
        monkeypatch.setattr("llvmlite.binding.ObjectFileRef", None)
    else:
        other = types.SimpleNamespace(JITCPUCodegen=type("Other", (), {}))
        monkeypatch.setattr(engines, "codegen", other)
    made: list[int] = []
    for _ in range(2):
        kernel = calling(made)
        assert [call(kernel.compiled(code(n)), 10) for n in range(2)] == [10, 11]
    assert made == ([0, 1] if part == "compiler" else [0, 1, 0, 1])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("needs", ["setup", "objects"])
def test_code_that_needs_more_than_itself(monkeypatch: pytest.MonkeyPatch, needs: str) -> None:
    """It is kept as any kernel is, with what it needs."""
    reduce = CompileResult._reduce

    def with_needs(result: Any) -> Any:
        parts = list(reduce(result))
        if needs == "setup":
            parts[7] = (int,)  # what to call before it is loaded
        else:
            parts[2].consts.append("text")
        return tuple(parts)

    monkeypatch.setattr(CompileResult, "_reduce", with_needs)
    made: list[int] = []
    for hits in range(2):
        compiled = calling(made).compiled(code(3))
        assert compiled.cache_hits == hits
        assert call(compiled, 5) == 8


def test_functions_and_arrays_are_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score.modify, "_variants", {})
    monkeypatch.setattr(jit, "MOST_USERS", 1)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 30, 8))
    table = rng.standard_normal(30)

    def weighing(w: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + w[kv_idx]

    def scaling(gain: float) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score * gain

    mods = [weighing(table), scaling(0.5)]
    first, again = ([nattn.attention(q, k, v, score_mod=x) for x in mods] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    expected = nattn.attention(q, k, v, bias=table)
    np.testing.assert_allclose(first[0], expected, rtol=0, atol=1e-13)
    assert len(score.modify._variants) == 1
    gone = [weakref.ref(mods[0]), weakref.ref(mods[1]), weakref.ref(table)]
    del mods, table
    gc.collect()
    assert [x() for x in gone] == [None] * 3


# Processes

PROBE = """
import os, sys, threading
sys.path.insert(0, {tests!r})
import test_cpu_bounds as bounds
from nattn.backends.cpu import jit
made = []
kernel = bounds.calling(made)
"""

FIND = """
values = [bounds.call(kernel.compiled(bounds.code(n)), 10) for n in range(4)]
print([values, made])
"""

FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
jit.MOST_USERS = 2
ends = threading.Event()
def compile(first):
    n = first
    while not ends.is_set():
        assert bounds.call(kernel.compiled(bounds.code(n)), 10) == 10 + n
        n += 2
threads = [threading.Thread(target=compile, args=(n,)) for n in (0, 1)]
for thread in threads:
    thread.start()
for n in range(4):
    child = os.fork()
    if child == 0:
        for n in (-1, -2, -3):
            assert bounds.call(kernel.compiled(bounds.code(n)), 10) == 10 + n
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
ends.set()
for thread in threads:
    thread.join()
print(len(kernel._variants))
"""

LEAVE = """
import ctypes, time
from nattn.vectors.lanes import atomic_add
def forever(f):
    def run(x):
        while atomic_add(x, 0) == 0:
            pass
        return f(x)
    return jit.fleeting(run)
state = (ctypes.c_int64 * 1)(0)
def start(kernel):
    where = ctypes.addressof(state)
    compiled = kernel.compiled(bounds.code(1))
    threading.Thread(target=lambda: bounds.call(compiled, where), daemon=True).start()
start(bounds.calling([], forever))
time.sleep(0.1)
print("leaves")
"""


def process(folder: Path, text: str) -> subprocess.Popen[str]:
    probe = PROBE.format(tests=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", probe + text],
        env=environment(NATTN_CACHE_DIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(started: subprocess.Popen[str]) -> str:
    try:
        out, err = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode == 0, err
    assert not err
    return out


def test_processes_share_code(folder: Path) -> None:
    """Several at once, that find nothing, and one that finds all."""
    values = [10, 11, 12, 13]
    for started in [process(folder, FIND) for _ in range(2)]:
        assert ast.literal_eval(output(started))[0] == values
    assert ast.literal_eval(output(process(folder, FIND))) == [values, []]
    assert len(sizes(folder)) == 4
    assert max(sizes(folder).values()) < 10_000  # nothing but machine code


def test_exit_while_code_runs(folder: Path) -> None:
    assert output(process(folder, LEAVE)) == "leaves\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forks_while_code_is_compiled_and_freed(folder: Path) -> None:
    assert output(process(folder, FORK)) == "2\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_waits_for_who_frees_code() -> None:
    assert engines.llvm_lock is not None
    held = threading.Event()

    def hold() -> None:
        with engines.llvm_lock:
            held.set()
            threading.Event().wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if engines.llvm_lock.acquire(timeout=5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


# On disk


def adding(n: int) -> Call:
    return lambda x: x + n


def value(kernel: jit.Kernel, n: int) -> int:
    return call(kernel.compiled(n), 10)


def test_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What was not used for longest goes; what was loaded lately stays."""
    kernel = jit.kernel("int64(int64)")(adding)
    names = []
    for n in range(6):
        before = sizes(folder)
        assert value(kernel, n) == n + 10
        (name,) = sizes(folder).keys() - before.keys()
        names.append(name)
    assert len(sizes(folder)) == 6
    for age, name in enumerate(reversed(names)):
        (file,) = folder.rglob(name)
        os.utime(file, (1e9 - age, 1e9 - age))
    again = jit.kernel("int64(int64)")(adding)
    assert again.compiled(0).cache_hits == 1  # the oldest until now
    room = 3.5 * max(sizes(folder).values())
    monkeypatch.setenv("NATTN_CACHE_LIMIT", str(room / 2**20))
    assert value(again, 6) == 16
    left = sizes(folder)
    assert sum(left.values()) <= room
    assert len(left) == 3
    assert names[0] in left
    assert names[5] in left
    # what is gone is compiled anew, and so much may be written before all is looked at again
    assert jit.kernel("int64(int64)")(adding).compiled(1).cache_hits == 0
    assert sum(sizes(folder).values()) <= room * 9 / 8 + max(left.values())


def test_cache_without_room(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("NATTN_CACHE_LIMIT", "0")
    for n in range(3):
        assert value(jit.kernel("int64(int64)")(adding), n) == n + 10
        assert not sizes(folder)


@pytest.mark.parametrize("given", ["much", "-1", "nan"])
def test_a_limit_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, folder: Path, given: str
) -> None:
    monkeypatch.setenv("NATTN_CACHE_LIMIT", given)
    with pytest.warns(UserWarning, match=f"NATTN_CACHE_LIMIT: expected .* MiB, got '{given}'"):
        assert value(jit.kernel("int64(int64)")(adding), 3) == 13
    assert len(sizes(folder)) == 1


def test_files_that_go_meanwhile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another process deletes them while this one looks which are too many."""
    monkeypatch.setenv("NATTN_CACHE_LIMIT", "0")
    for n in range(3):
        (folder / f"{n}.kernel").write_bytes(b"x")
    looked = Path.stat

    def look(path: Path, **options: Any) -> os.stat_result:
        status = looked(path, **options)
        if path.suffix == ".kernel":
            os.unlink(path)
            if path.name == "1.kernel":
                raise FileNotFoundError
        return status

    monkeypatch.setattr(Path, "stat", look)
    cache._keep_within_limit(folder, 1)
    assert not [*folder.glob("*.kernel")]
