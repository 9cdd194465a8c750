"""Time calls fairly: contestants take turns, and figures are ratios within a round.

A machine's speed drifts by a factor of two within minutes, so absolute times say little. Here every
contestant does one piece of work per round, and a figure is the median over the rounds of a ratio
*within* a round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...call.progress import Progress

Call = Callable[[], Any]
"""A piece of work; a contestant's returns the output, ``(B, H, N, Dv)``."""

Sampler = Callable[[], float]
"""Does a piece of work and returns its figure."""


@dataclass(frozen=True)
class Samples:
    """One figure of each contestant in each round.

    Attributes
    ----------
    values : mapping of str to tuple of float
        Name to figures, round by round: seconds, or a rate.
    """

    values: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Return the median figure of a contestant."""
        return statistics.median(self.values[name])

    def ratio(self, above: str, below: str) -> float:
        """Return the median over the rounds of ``above / below``, each pair from one round."""
        pairs = zip(self.values[above], self.values[below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def product(self, one: str, other: str) -> float:
        """Return the median over the rounds of ``one * other``, each pair from one round."""
        pairs = zip(self.values[one], self.values[other], strict=True)
        return statistics.median(a * b for a, b in pairs)


def interleave(
    samplers: Mapping[str, Sampler],
    rounds: int = 7,
    warmup: int = 1,
    pause: float = 0.005,
    progress: Progress | None = None,
) -> Samples:
    """Let contestants take turns, each once a round, in an order that rotates.

    Parameters
    ----------
    samplers : mapping of str to callable
        Each call does a piece of work and returns its figure, for example `timed`'s seconds.
    rounds : int, default 7
        Rounds that count.
    warmup : int, default 1
        Rounds before those, which do not count.
    pause : float, default 0.005
        Seconds between two turns, in which the threads of the last contestant stop spinning.
    progress : callable, optional
        Called with the fraction of the turns that are done.

    Returns
    -------
    Samples
        A figure of each contestant in each round that counts.

    Raises
    ------
    ValueError
        If there is no round to count.

    Examples
    --------
    >>> from nattn.applications.measure import interleave, timed
    >>> calls = {"list": lambda: sum([1] * 1000), "range": lambda: sum(range(1000))}
    >>> samples = interleave({k: timed(f, 1e-4) for k, f in calls.items()}, rounds=3)
    >>> samples.ratio("range", "list") > 0
    True
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds, warmup: expected 1 or more and 0 or more, got {rounds, warmup}")
    names = list(samplers)
    values: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        first = turn % len(names) if names else 0
        for place, name in enumerate(names[first:] + names[:first]):
            time.sleep(pause)
            value = samplers[name]()
            if turn >= warmup:
                values[name].append(value)
            if progress is not None:
                progress((turn + (place + 1) / len(names)) / (warmup + rounds))
    return Samples({name: tuple(x) for name, x in values.items()})


def timed(call: Call, at_least: float = 0.05) -> Sampler:
    """Make a sampler that returns the seconds one call takes.

    Parameters
    ----------
    call : callable
        The work.
    at_least : float, default 0.05
        Repeat a short call until so many seconds have gone by, and return the mean.

    Returns
    -------
    callable
        Takes nothing, returns seconds per call.
    """

    def sample() -> float:
        n = 0
        start = time.perf_counter()
        while True:
            call()
            n += 1
            elapsed = time.perf_counter() - start
            if elapsed >= at_least:
                return elapsed / n

    return sample


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
