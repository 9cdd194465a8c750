"""README.md: its examples run, and what it names exists."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

import nattn
from nattn import __main__, bench

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


def test_examples_run() -> None:
    results = doctest.testfile(str(README), module_relative=False, encoding="utf-8")
    assert results.failed == 0
    assert results.attempted > 10


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
            __main__.main([command, "--help"])
        assert stop.value.code == 0
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    listed = re.findall(r"^    ([a-z-]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert set(named) == set(listed)


def test_options_that_are_named_exist(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    helps = ""
    for command in ("demo", "bench"):
        with pytest.raises(SystemExit):
            __main__.main([command, "--help"])
        helps += capsys.readouterr().out
    named = {m.group() for m in re.finditer(r"(?<=`)--[a-z]+", text)}
    assert {"--image", "--plot", "--markdown"} <= named
    assert named <= set(re.findall(r"--[a-z]+", helps))


def test_the_bench_can_write_its_table() -> None:
    assert bench.BEGIN in bench.check_markdown(README)
