"""The rooms of the house: which file may import which, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nattn

PACKAGE = Path(nattn.__file__).parent

ROWS = (  # each uses only the rows under it
    {"__main__"},
    {"bench", "demo", "explain"},
    {"measure"},
    {"learning", "minilm"},
    {"kvcache", "diagnostics", "nn", "integrations"},
    {"blockmask"},
    {"positional"},
    {"__init__", "api"},
    {"cpu", "reference", "cuda"},
    {"problem", "dense"},
    {"masks", "mods", "device_arrays"},
    {"dual", "trees"},
    {"lanes"},
    {"elementary", "dtypes", "files", "forks", "progress", "functions"},
)
HEIGHT = {room: len(ROWS) - i for i, row in enumerate(ROWS) for room in row}
BACKENDS = {"cpu", "reference", "cuda"}
SHOWN = {("__init__", x) for x in ("api", "positional", "blockmask", "diagnostics", "nn")}
"""The package's own face shows what lies beside it and above."""

LIGHT = {"__init__", "api", "blockmask", "problem", "reference", "dense", "masks", "mods"}
LIGHT |= {"functions", "dtypes", "progress", "device_arrays"}
LIGHT |= {"diagnostics", "nn", "positional", "learning", "files"}
LLVM = {"elementary", "lanes", "dual"}
LLVM_VERSION_ONLY = {"__main__"}
JIT = {"njit", "jit", "cfunc", "vectorize", "guvectorize"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def room_of(path: Path) -> str:
    return name_of(path).split(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Yield what a file imports as absolute dotted names, wherever in the file it does."""
    package = ["nattn", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def rooms_used(path: Path) -> set[str]:
    """Return the rooms of nattn that a file imports from; ``nattn.__version__`` is in none."""
    parts = [name.split(".") for name in imports(path) if name.split(".")[0] == "nattn"]
    return {p[1] if len(p) > 1 and p[1] in HEIGHT else "__init__" for p in parts}


def test_the_reader_sees_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were `imports` blind, every other test here would pass."""
    package = tmp_path / "nattn"
    (package / "cpu").mkdir(parents=True)
    file = package / "cpu" / "x.py"
    file.write_text(
        "import numba.core\nfrom .. import api\nfrom ..api import attention\n"
        "def f():\n    from . import jit\n    from nattn.reference import forward\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert set(imports(file)) == {
        "numba.core",
        "nattn.api",
        "nattn.api.attention",
        "nattn.cpu.jit",
        "nattn.reference.forward",
    }
    assert rooms_used(file) == {"api", "cpu", "reference"}


def test_there_is_something_to_check() -> None:
    found = {room_of(path) for path in sources()}
    assert {"api", "cpu", "cuda", "reference", "problem", "lanes", "functions"} <= found
    assert found >= LIGHT


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_every_file_has_a_room(path: Path) -> None:
    assert room_of(path) in HEIGHT


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    for used in rooms_used(path) - {room, "__init__"}:
        assert HEIGHT[used] < HEIGHT[room] or (room, used) in SHOWN, f"{room} imports {used}"
    if "__init__" in rooms_used(path):  # the version, from the face of the package
        assert HEIGHT[room] > HEIGHT["__init__"]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_backends_know_neither_each_other_nor_the_api(path: Path) -> None:
    room = room_of(path)
    if room in BACKENDS:
        assert not rooms_used(path) & ((BACKENDS | {"api", "positional"}) - {room})


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_only_lanes_speak_llvm(path: Path) -> None:
    if room_of(path) in LLVM | LLVM_VERSION_ONLY | {"cuda"}:
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "llvmlite"]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_only_jit_compiles(path: Path) -> None:
    """One place calls njit and cfunc: cache folders and options are decided there."""
    if name_of(path) == "cpu.jit" or room_of(path) == "cuda":
        return
    compiled = {name for name in imports(path) if name.split(".")[0] == "numba"}
    assert not {name for name in compiled if name.split(".")[-1] in JIT}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id == "numba" and node.attr in JIT), f"line {node.lineno}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_the_light_rooms_import_no_numba(path: Path) -> None:
    """`import nattn` must stay quick, and the reference must not lean on what it checks."""
    if room_of(path) in LIGHT:
        assert not [n for n in imports(path) if n.split(".")[0] in {"numba", "llvmlite"}]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_fastmath(path: Path) -> None:
    """NaN and Inf keep their meaning in every kernel."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "fastmath":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
