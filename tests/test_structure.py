"""The floors of the house: which file may import which, read from the sources."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import nattn

PACKAGE = Path(nattn.__file__).parent

FLOORS = (  # each uses only those under it
    "__main__",
    "applications",
    "integrations",
    "nn",
    "caches",
    "positional",
    "api",
    "backends",
    "call",
    "functions",
    "vectors",
)
HEIGHT = {floor: len(FLOORS) - i for i, floor in enumerate(FLOORS)}
FACE = "__init__"
"""The package's own face shows what lies behind it."""

MOST_ENTRIES = 13
MOST_LINES = 700

SIBLINGS = {"cpu", "cuda", "reference"}
"""Backends, which know nothing of each other."""

HEAVY = {"vectors", "functions.on_lanes", "backends.cpu", "backends.cuda", "applications"}
"""What may import Numba: `import nattn` must stay quick."""

LIGHT_IN_HEAVY = {"vectors", "vectors.dtypes", "backends.cpu.__init__", "backends.cuda.__init__"}
LLVM = {"vectors", "backends.cpu.engines", "backends.cuda", "applications.command_line", "__main__"}
JIT = {"njit", "jit", "cfunc", "vectorize", "guvectorize"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def within(path: Path, rooms: set[str]) -> bool:
    """Whether a file is one of these rooms or lies in one."""
    name = name_of(path)
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def floor_of(path: Path) -> str:
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


def modules_used(path: Path) -> set[str]:
    """Return what a file imports of nattn, without the package's own name."""
    found = {name.removeprefix("nattn.") for name in imports(path) if name.startswith("nattn.")}
    return found - {"__version__"}


def floors_used(path: Path) -> set[str]:
    return {name.split(".")[0] for name in modules_used(path)}


def test_the_reader_sees_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were `imports` blind, every other test here would pass."""
    package = tmp_path / "nattn"
    (package / "backends" / "cpu").mkdir(parents=True)
    file = package / "backends" / "cpu" / "x.py"
    file.write_text(
        "import numba.core\nfrom .. import forks\nfrom ...api import attention\n"
        "def f():\n    from . import jit\n    from nattn.call.problem import Problem\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert set(imports(file)) == {
        "numba.core",
        "nattn.backends.forks",
        "nattn.api.attention",
        "nattn.backends.cpu.jit",
        "nattn.call.problem.Problem",
    }
    assert floors_used(file) == {"backends", "api", "call"}
    assert within(file, {"backends.cpu"})
    assert not within(file, {"backends.c", "x"})


def test_there_is_something_to_check() -> None:
    found = {floor_of(path) for path in sources()}
    assert found >= set(FLOORS) - {"integrations"}
    names = {name_of(path) for path in sources()}
    for rooms in (HEAVY, LIGHT_IN_HEAVY, LLVM):
        for room in rooms:
            assert any(name == room or name.startswith(f"{room}.") for name in names), room


def test_the_top_can_be_taken_in_at_a_glance() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_file_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_every_file_has_a_floor(path: Path) -> None:
    assert floor_of(path) in {FACE, *FLOORS}


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    floor = floor_of(path)
    if floor == FACE:
        return
    for used in floors_used(path) - {floor}:
        assert used in HEIGHT, f"{floor} imports {used}, which is the package's own face"
        assert HEIGHT[used] < HEIGHT[floor], f"{floor} imports {used}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_backends_do_not_know_each_other(path: Path) -> None:
    own = name_of(path).split(".")
    if own[0] != "backends" or own[1] not in SIBLINGS:
        return
    used = {name.split(".")[1] for name in modules_used(path) if name.startswith("backends.")}
    assert not used & (SIBLINGS - {own[1]})


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_nobody_reaches_past_a_door(path: Path) -> None:
    """What is above asks `backends.load` or `backends.choose`, and takes what the door offers."""
    if floor_of(path) == "backends":
        return
    used = [name.split(".") for name in modules_used(path) if name.startswith("backends.")]
    assert not [name for name in used if name[1] in {*SIBLINGS, "forks"}]


@pytest.mark.parametrize("name", ["cpu", "cuda", "reference"])
def test_a_door_offers_what_its_list_says(name: str) -> None:
    face = importlib.import_module(f"nattn.backends.{name}")
    path = PACKAGE / "backends" / name / "door.py"
    if not path.exists():
        path = PACKAGE / "backends" / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    defined |= {alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert defined >= face.OFFERS


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_only_lanes_speak_llvm(path: Path) -> None:
    if within(path, LLVM):
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "llvmlite"]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_only_jit_compiles(path: Path) -> None:
    """One place calls njit and cfunc: cache folders and options are decided there."""
    if within(path, {"backends.cpu.jit", "backends.cuda"}):
        return
    compiled = {name for name in imports(path) if name.split(".")[0] == "numba"}
    assert not {name for name in compiled if name.split(".")[-1] in JIT}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id == "numba" and node.attr in JIT), f"line {node.lineno}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_the_light_rooms_import_no_numba(path: Path) -> None:
    """`import nattn` must stay quick, and the reference must not lean on what it checks."""
    if not within(path, HEAVY) or name_of(path) in LIGHT_IN_HEAVY:
        assert not [n for n in imports(path) if n.split(".")[0] in {"numba", "llvmlite"}]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_fastmath(path: Path) -> None:
    """NaN and Inf keep their meaning in every kernel."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "fastmath":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
