"""A progress bar for a person who waits: on a terminal only, and not for what is over at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

_WIDTH = 30
_EVERY = 0.1
"""Seconds between two drawings."""


class Progress:
    """Draw how much of a job is done, on one line that disappears at the end.

    Parameters
    ----------
    label : str
        What is being done.
    after : float, default 1.5
        Seconds that the job may take before anything is drawn.
    stream : text stream, default ``sys.stderr``
        Where to draw; nothing is drawn unless it is a terminal.

    Examples
    --------
    >>> with Progress("counting") as progress:
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
        """Say that `fraction` of the job, 0 to 1, is done."""
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
        # Before it is seen: Ctrl-C may come as soon as it is, and must find that it has to go.
        self._drawn = len(padded)
        try:
            self._stream.write("\r" + padded)
        except UnicodeEncodeError:  # a terminal without the characters of the bar
            self._stream.write("\r" + padded.encode("ascii", "replace").decode())
        self._stream.flush()
        self._drawn = len(text)


def part_of(
    progress: Callable[[float], object], begin: float, end: float
) -> Callable[[float], object]:
    """Return the progress of a part of a job.

    Parameters
    ----------
    progress : callable
        Called with the fraction of the whole that is done.
    begin, end : float
        Fractions of the whole at which the part begins and ends.

    Returns
    -------
    callable
        To be called with the fraction of the part that is done.

    Examples
    --------
    >>> part_of(lambda done: round(100 * done), 0.5, 0.75)(0.4)
    60
    """
    return lambda done: progress(begin + done * (end - begin))
