"""The progress bar: seen on a terminal, by a person who waits, and gone afterwards."""

from __future__ import annotations

import doctest
import io

import pytest

from nattn.applications import progress_bar
from nattn.applications.progress_bar import ProgressBar
from nattn.call import progress


def test_examples() -> None:
    for module in (progress, progress_bar):
        results = doctest.testmod(module)
        assert results.failed == 0
        assert results.attempted > 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class AsciiTerminal(Terminal):
    def write(self, text: str) -> int:
        text.encode("ascii")
        return super().write(text)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("nattn.applications.progress_bar.time.monotonic", lambda: self.now)


def test_draws_after_a_while_and_clears_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Terminal()
    with ProgressBar("work", after=1.5, stream=stream) as progress:
        clock.now += 1.0
        progress(0.25)
        assert stream.getvalue() == ""
        clock.now += 1.0
        progress(0.5)
        assert "work" in stream.getvalue()
        assert " 50%, 2 s left" in stream.getvalue()
    lines = stream.getvalue().split("\r")
    assert lines[-1] == ""
    assert lines[-2].strip() == ""
    assert len(lines[-2]) >= len(lines[1])


def test_draws_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Terminal()
    progress = ProgressBar("work", after=0.0, stream=stream)
    for i in range(1000):
        clock.now += 0.001
        progress(i / 1000)
    assert 5 <= stream.getvalue().count("\r") <= 10


def test_says_nothing_to_a_file_or_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with ProgressBar("work", after=0.0, stream=stream) as progress:
        clock.now += 10
        progress(0.5)
    assert stream.getvalue() == ""


def test_a_short_job_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    with ProgressBar("work", stream=stream) as progress:
        progress(1.0)
    assert stream.getvalue() == ""


def test_clears_the_line_when_the_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Terminal()

    def job() -> None:
        with ProgressBar("work", after=0.0, stream=stream) as progress:
            clock.now += 5
            progress(0.1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job()
    assert stream.getvalue().endswith("\r")


def test_clears_the_line_when_interrupted_while_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting(Terminal):
        def flush(self) -> None:  # the line is there now: the moment to press Ctrl-C
            if "%" in self.getvalue() and not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt

        pressed = False

    clock, stream = Clock(monkeypatch), Interrupting()

    def job() -> None:
        with ProgressBar("work", after=0.0, stream=stream) as progress:
            clock.now += 5
            progress(0.1)

    with pytest.raises(KeyboardInterrupt):
        job()
    line = stream.getvalue()
    assert line.endswith("\r")
    assert not line.split("\r")[-2].strip()


def test_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), AsciiTerminal()
    progress = ProgressBar("work", after=0.0, stream=stream)
    clock.now += 1
    progress(0.5)
    assert " 50%" in stream.getvalue()
