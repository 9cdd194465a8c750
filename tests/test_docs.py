"""README.md and docs/: their examples run, and what they name exists."""

from __future__ import annotations

import doctest
import functools
import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from numpy.typing import NDArray
from test_structure import FLOORS

import nattn
from nattn.applications import bench, command_line
from nattn.functions import mods
from nattn.functions.masks import Mask
from nattn.vectors.lanes.operators import BINARY, UNARY

Array = NDArray[Any]

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
FIGURES = "<!-- figures:begin -->", "<!-- figures:end -->"
MOST_LINES = 150

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"\b(?:nattn|tests|bench|docs)/(?:[\w.-]+/)*[\w-]*(?:\.\w+)?")

EXAMPLES = {
    "README.md": 8,
    "index.md": 4,
    "start.md": 24,
    "arrays.md": 8,
    "functions.md": 20,
    "gradients.md": 12,
    "layers.md": 9,
    "generation.md": 40,
    "looking.md": 11,
    "sixteen_bits.md": 7,
    "pytorch.md": 15,
    "flash_attn.md": 8,
    "onnx.md": 5,
}
"""How many examples a page has at least; others have none."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(text_of(page)) if found == language]


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of the lines of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def between(text: str, begin: str, end: str) -> str:
    assert text.count(begin) == text.count(end) == 1
    return text.split(begin)[1].split(end)[0]


@functools.cache
def run_examples(page: Path) -> dict[str, Any]:
    """Run the examples of a page, which begins with nothing, and return the names they define."""
    if page.name in ("pytorch.md", "flash_attn.md"):
        pytest.importorskip("torch", reason="no torch")
    test = doctest.DocTestParser().get_doctest(text_of(page), {}, page.name, str(page), 0)
    results = doctest.DocTestRunner().run(test, clear_globs=False)
    assert results.failed == 0
    assert results.attempted >= EXAMPLES.get(page.name, 0)
    return test.globs


@pytest.fixture(scope="module")
def examples() -> dict[str, Any]:
    return run_examples(DOCS / "functions.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    names = run_examples(page)
    assert bool(names.keys() - {"__builtins__"}) == (page.name in EXAMPLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_code_are_of_a_known_kind(page: Path) -> None:
    text = text_of(page)
    assert text.count("```") == 2 * len(BLOCK.findall(text))
    assert {language for language, _ in BLOCK.findall(text)} <= {"python", "sh", "text"}
    for code in blocks(page, "python"):
        if ">>>" not in code:  # wants a GPU, and torch
            compile(code, page.name, "exec")
    assert text.count(">>> ") == sum(code.count(">>> ") for code in blocks(page, "python"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(blocks(page, "sh"))
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))
    extras = ",".join(re.findall(r"'\.\[([^\]]+)\]'", shown))
    assert set(filter(None, extras.split(","))) <= set(project["project"]["optional-dependencies"])
    assert set(re.findall(r"--group (\w+)", shown)) <= set(project["dependency-groups"])
    for file in re.findall(r"^(?:python|bash) ([^-\s]\S*)", shown, re.MULTILINE):
        assert (ROOT / file).exists() or file == ".ci/run"  # which is no part of a distribution
    for command in re.findall(r"python -m nattn ([^\n&]+)", shown):
        with pytest.raises(SystemExit) as stop:
            command_line.main([command.split()[0], "--help"])
        assert stop.value.code == 0
        named = re.findall(r"--[a-z-]+", command)
        assert set(named) <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def slugs(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("https://"):
            continue
        target, _, head = link.partition("#")
        found = (page.parent / target) if target else page
        if target != "LICENSE":  # it lies in the wheel
            assert found.exists(), link
        assert not head or head in slugs(found), link


def test_readme_is_short_and_shows_one_figure() -> None:
    text = text_of(README)
    assert len(text.splitlines()) <= MOST_LINES
    assert re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text) == [("speed against n", "docs/speed.png")]


def test_readme_links_every_page() -> None:
    linked = set(re.findall(r"\(docs/([\w-]+\.md)", text_of(README)))
    assert linked == {page.name for page in PAGES[1:]} - {"index.md", "changes.md"}
    assert "(CHANGELOG.md)" in text_of(README)


def test_the_site_has_every_page() -> None:
    named = re.findall(r"^ +- (\w+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(named) == [page.name for page in PAGES[1:]]


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    head, _, *rows = rows_of(between(text_of(README), *FIGURES))
    table = between(text_of(DOCS / "benchmarks.md"), bench.BEGIN, bench.END)
    measured_head, _, *measured = rows_of(table)
    assert head == measured_head[: len(head)]
    assert len(rows) == 6
    for row in rows:
        assert row in [found[: len(head)] for found in measured]


# The page on architecture


def test_the_floors_are_drawn_in_order() -> None:
    drawing = blocks(DOCS / "architecture.md", "text")[0]
    assert tuple(re.findall(r"^│ (\w+) +│", drawing, re.MULTILINE)) == FLOORS


@pytest.mark.parametrize("name", ["architecture.md", "promises.md"])
def test_paths_that_are_named_exist(name: str) -> None:
    named = PATH.findall(text_of(DOCS / name))
    assert len(named) > 3
    package = Path(nattn.__file__).parent  # in a wheel it lies elsewhere
    for path in set(named):
        if path.startswith("nattn/"):
            assert (package.parent / path).exists(), path
        else:
            assert (ROOT / path).exists(), path


def test_every_promise_has_its_tests() -> None:
    source = text_of(ROOT / "tests" / "test_promises.py")
    tested = {int(n) for n in re.findall(r"^def test_(\d+)_", source, re.MULTILINE)}
    rows = re.findall(r"^\| (\d+) \|.*\| `test_(\d+)_` \|$", text_of(DOCS / "promises.md"), re.M)
    assert [int(n) for n, _ in rows] == [int(n) for _, n in rows] == sorted(tested)


def test_the_reference_has_every_name() -> None:
    named = set(re.findall(r"^::: nattn\.(\w+)$", text_of(DOCS / "api.md"), re.MULTILINE))
    rooms = {"masks", "mods", "nn", "positional"}
    assert (named | rooms) - {"__version__"} == set(nattn.__all__) - {"__version__"}


# The five functions of the chapter on functions, against what they say written out


def softmax_attention(q: Array, k: Array, v: Array, change: Callable[[Array], Array]) -> Array:
    """Compute attention densely, for one item and as many key heads as query heads."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.stack([one @ other.T for one, other in zip(q, k, strict=True)]) / q.shape[2] ** 0.5
    weights = np.exp(change(scores))
    return np.stack([w / w.sum(axis=1, keepdims=True) @ x for w, x in zip(weights, v, strict=True)])


HEADS, N = 3, 150
DISTANCE = np.array([[float(abs(i - j)) for j in range(N)] for i in range(N)])
SLOPES = np.array([0.25, 0.5, 1.0], np.float32)
DOC = np.repeat([4, 2, 9], [70, 31, 49])


def together(scores: Array) -> Array:
    for i in range(N):
        for j in range(N):
            if DOC[i] != DOC[j]:
                scores[:, i, j] = -np.inf
    return scores


def squash(scores: Array) -> Array:
    far = DISTANCE > 20
    scores[:, far] = 0.75 * np.tanh(scores[:, far])
    return scores


FIVE: list[tuple[str, dict[str, Any], Callable[[Array], Array]]] = [
    ("alibi", {"slopes": SLOPES}, lambda s: s - SLOPES[:, None, None].astype(float) * DISTANCE),
    ("softcap", {"cap": 0.5}, lambda s: (1 - np.exp(-4 * s)) / (1 + np.exp(-4 * s)) / 2),
    ("decay", {"rate": 1.5}, lambda s: s + np.log((1 + DISTANCE) ** -1.5)),
    ("gate", {"near": 20, "gain": 0.75}, squash),
    ("document", {"doc": DOC}, together),
]


@pytest.mark.parametrize(("name", "bound", "change"), FIVE, ids=[name for name, *_ in FIVE])
def test_the_five_functions_do_what_they_say(
    name: str, bound: dict[str, Any], change: Callable[[Array], Array], examples: dict[str, Any]
) -> None:
    role = "mask_mod" if name == "document" else "score_mod"
    options: dict[str, Any] = {role: functools.partial(examples[name], **bound)}
    q, k, v = cases.qkv(1, HEADS, N, N, 16)
    dense = softmax_attention(q[0], k[0], v[0], change)
    truth = cases.truth(q, k, v, **options)
    np.testing.assert_allclose(truth.out[0], dense, rtol=1e-9, atol=1e-12)
    out = nattn.attention(q, k, v, **options)
    cases.assert_near(out[0], dense, truth.budget.out[0, ..., None])


def test_the_list_of_functions_is_complete() -> None:
    text = text_of(DOCS / "functions.md")
    sentence = text.split("and NumPy's")[1].split("\n- ")[0]
    named = {getattr(np, name) for name in re.findall(r"`(\w+)`", sentence)}
    known = {f for f in (*UNARY, *BINARY) if isinstance(f, np.ufunc)}
    assert named == known | {np.where, np.clip, np.float32, np.float64}


def test_the_built_in_functions_are_named() -> None:
    text = text_of(DOCS / "functions.md")
    named = {
        room: set(re.findall(r"`(\w+)`", text.split(f"| `nattn.{room}` |")[1].split("\n")[0]))
        for room in ("mods", "masks")
    }
    assert named["masks"] == {n for n, x in vars(nattn.masks).items() if isinstance(x, Mask)}
    modifiers = {
        n
        for n, x in vars(mods).items()
        if inspect.isfunction(x) and next(iter(inspect.signature(x).parameters)) == "score"
    }
    assert named["mods"] == modifiers | {"t5_bias"}


def test_the_table_of_arguments_is_complete() -> None:
    text = text_of(DOCS / "start.md")
    table = text.split("| argument | meaning |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    named = [name for row in rows for name in row.split(", ")]
    assert named == list(inspect.signature(nattn.attention).parameters)


def test_the_table_of_commands_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(DOCS / "command_line.md")
    named = re.findall(r"^\| `python -m nattn ([a-z-]+)` \|", text, re.MULTILINE)
    assert named
    for command in named:
        with pytest.raises(SystemExit) as stop:
            command_line.main([command, "--help"])
        assert stop.value.code == 0
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    listed = re.findall(r"^    ([a-z-]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert set(named) == set(listed)


def test_options_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(map(text_of, PAGES))
    helps = ""
    for command in ("chat", "demo", "explain", "bench"):
        with pytest.raises(SystemExit):
            command_line.main([command, "--help"])
        helps += capsys.readouterr().out
    named = {m.group() for m in re.finditer(r"(?<=`)--[a-z]+", text)}
    assert {"--image", "--plot", "--markdown"} <= named
    assert named <= set(re.findall(r"--[a-z]+", helps))


def test_the_bench_can_write_its_table() -> None:
    assert bench.BEGIN in bench.check_markdown(DOCS / "benchmarks.md")
