"""A progress bar on a terminal, drawn only for jobs that take longer than a moment."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

_WIDTH = 30
_EVERY = 0.1
"""Least seconds between two drawings."""


class ProgressBar:
    """Draw how much of a job is done, on one line that disappears at the end.

    It is a `nattn.call.progress.Progress`: called with the fraction that is done.

    Parameters
    ----------
    label : str
        What is being done, for the person who waits.
    after : float, default 1.5
        Seconds that the job may take before anything is drawn.
    stream : text stream, default ``sys.stderr``
        Where to draw; nothing is drawn unless it is a terminal.

    Examples
    --------
    >>> from nattn.applications.progress_bar import ProgressBar
    >>> with ProgressBar("counting") as progress:
    ...     for i in range(10):
    ...         progress((i + 1) / 10)
    """

    def __init__(self, label: str, after: float = 1.5, stream: TextIO | None = None) -> None:
        self._label = label
        self._after = after
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream is not None and self._stream.isatty()
        self._drawn = 0
        self._start = self._last = time.monotonic()

    def __call__(self, fraction: float) -> None:
        """Report that `fraction` of the job, 0 to 1, is done."""
        now = time.monotonic()
        elapsed = now - self._start
        if not self._shows or elapsed < self._after or now - self._last < _EVERY:
            return
        self._last = now
        fraction = min(max(fraction, 0.0), 1.0)
        full = round(_WIDTH * fraction)
        left = f", {elapsed / fraction - elapsed:.0f} s left" if fraction > 0.02 else ""
        bar = "█" * full + "·" * (_WIDTH - full)
        self._draw(f"{self._label} {bar} {100 * fraction:3.0f}%{left}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._drawn:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()

    def _draw(self, text: str) -> None:
        padded = text.ljust(self._drawn)
        # Set before writing: Ctrl-C may come right after, and `__exit__` must then clear the line.
        self._drawn = len(padded)
        try:
            self._stream.write("\r" + padded)
        except UnicodeEncodeError:  # a terminal without the characters of the bar
            self._stream.write("\r" + padded.encode("ascii", "replace").decode())
        self._stream.flush()
        self._drawn = len(text)
