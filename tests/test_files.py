"""nattn.nn.files: a file is written whole or not at all."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from nattn.nn import files


def test_examples() -> None:
    assert doctest.testmod(files).failed == 0


def test_after_an_error_all_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_text("before")

    def fail() -> None:
        with files.replaced(path) as part:
            assert part.suffix == ".npz"
            part.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with files.replaced(path) as part:
        part.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
