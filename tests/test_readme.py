"""README.md: its examples run, and what it names exists."""

from __future__ import annotations

import doctest
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from numpy.typing import NDArray

import nattn
from nattn.applications import bench, command_line
from nattn.functions import mods
from nattn.functions.masks import Mask
from nattn.vectors import lanes

Array = NDArray[Any]

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def examples(text: str) -> dict[str, Any]:
    """Run the examples and return the names that they define."""
    test = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    results = doctest.DocTestRunner().run(test, clear_globs=False)
    assert results.failed == 0
    assert results.attempted > 30
    return test.globs


def test_examples_run(examples: dict[str, Any]) -> None:
    assert examples["out"].shape == (2, 8, 300, 32)


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


def test_the_list_of_functions_is_complete(text: str) -> None:
    sentence = text.split("and NumPy's")[1].split("\n- ")[0]
    named = {getattr(np, name) for name in re.findall(r"`(\w+)`", sentence)}
    known = {f for f in (*lanes.UNARY, *lanes.BINARY) if isinstance(f, np.ufunc)}
    assert named == known | {np.where, np.clip, np.float32, np.float64}


def test_the_built_in_functions_are_named(text: str) -> None:
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


def test_the_table_of_arguments_is_complete(text: str) -> None:
    table = text.split("| argument | meaning |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    named = [name for row in rows for name in row.split(", ")]
    assert named == list(inspect.signature(nattn.attention).parameters)


def test_the_table_of_commands_is_complete(text: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_options_that_are_named_exist(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    helps = ""
    for command in ("demo", "explain", "bench"):
        with pytest.raises(SystemExit):
            command_line.main([command, "--help"])
        helps += capsys.readouterr().out
    named = {m.group() for m in re.finditer(r"(?<=`)--[a-z]+", text)}
    assert {"--image", "--plot", "--markdown"} <= named
    assert named <= set(re.findall(r"--[a-z]+", helps))


def test_the_bench_can_write_its_table() -> None:
    assert bench.BEGIN in bench.check_markdown(README)
