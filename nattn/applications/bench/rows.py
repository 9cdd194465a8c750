"""Kinds of rows: how each is measured."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ...call.progress import Progress
from ..measure import Case, Contestant, Sampler, Unsupported, interleave
from .settings import PLAIN_PEERS, Settings


@dataclass(frozen=True)
class Result:
    """A measured row.

    Attributes
    ----------
    what : str
        The row, for people.
    figures : mapping of str to float
        Column to figure; empty if the row failed: then `notes` say why.
    asked : mapping of str to float
        Column to what is asked for: at least, or for seconds, bytes and compilations at most.
    notes : tuple of str
        Which peers were left out, and why.
    samples : mapping of str to sequence of float
        What was measured, round by round.
    """

    what: str
    figures: Mapping[str, float]
    asked: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Contestants:
    """The contestants of a run, each of them started when it is first asked for.

    Parameters
    ----------
    settings : Settings
        How much to measure.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stack = ExitStack()
        self._started: dict[Any, Contestant] = {}

    def get(
        self,
        name: str,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        copy: int = 0,
    ) -> Contestant:
        """Return a contestant; every `copy` has its own process and its own prepared case."""
        threads = threads or self.settings.threads
        key = (name, threads, tuple((environment or {}).items()), copy)
        if key not in self._started:
            contestant = Contestant(name, threads, environment)
            self._started[key] = self._stack.enter_context(contestant)
        return self._started[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Speed:
    """nattn's speed on a case: in GFLOP/s, in % of the peak and in multiples of its peers' speed.

    `percent`, `speedups` (by peer) and `gflops` are what is asked for. A case of 16-bit numbers has
    the peak of float32, which it is computed in, and nattn's own float32 for another peer.
    """

    name: str
    what: str
    case: Case
    percent: float | None = None
    speedups: Mapping[str, float] = field(default_factory=dict)
    peers: tuple[str, ...] = PLAIN_PEERS
    environment: Mapping[str, str] = field(default_factory=dict)
    gflops: float | None = None

    def measure(self, contestants: Contestants, progress: Progress) -> Result:
        """Measure the row."""
        settings = contestants.settings
        ours = contestants.get("nattn", environment=self.environment)
        ours.prepare(self.case)
        samplers: dict[str, Sampler] = {
            "nattn": ours.sample,
            "peak": lambda: ours.peak(self.case.compute),
        }
        if self.case.dtype != self.case.compute:
            wide = contestants.get("nattn", environment=self.environment, copy=1)
            wide.prepare(replace(self.case, dtype=self.case.compute))
            samplers[self.case.compute] = wide.sample
        notes = []
        for name in (name for name in self.peers if name in settings.peers):
            peer = contestants.get(name)
            try:
                peer.prepare(self.case)
            except (Unsupported, ArithmeticError, RuntimeError) as error:
                notes.append(f"{name}: {error}")
            else:
                samplers[name] = peer.sample
        samples = interleave(samplers, settings.rounds, progress=progress)
        work = self.case.flops() / 1e9
        percent = statistics.median(
            100 * work / (seconds * peak)
            for seconds, peak in zip(samples.values["nattn"], samples.values["peak"], strict=True)
        )
        figures = {"GFLOP/s": work / samples.median("nattn"), "% of peak": percent}
        for name in samplers.keys() - {"nattn", "peak"}:
            figures[f"x {name}"] = samples.ratio(name, "nattn")
        asked = {f"x {name}": value for name, value in self.speedups.items()}
        if self.percent is not None:
            asked["% of peak"] = self.percent
        if self.gflops is not None:
            asked["GFLOP/s"] = self.gflops
        return Result(self.what, figures, asked, tuple(notes), samples.values)


@dataclass(frozen=True)
class Ratio:
    """nattn's speed on a case in multiples of its speed on another.

    Speed is calls per second or, with `by_work`, operations per second, for cases of different
    work. `threads` are those of the other case.
    """

    name: str
    what: str
    case: Case
    other: Case
    asked: float
    threads: int | None = None
    by_work: bool = False

    def measure(self, contestants: Contestants, progress: Progress) -> Result:
        """Measure the row."""
        one = contestants.get("nattn")
        other = contestants.get("nattn", self.threads, copy=1)
        one.prepare(self.case)
        other.prepare(self.other)
        samplers = {"one": one.sample, "other": other.sample}
        samples = interleave(samplers, contestants.settings.rounds, progress=progress)
        ratio = samples.ratio("other", "one")
        if self.by_work:
            ratio *= self.case.flops() / self.other.flops()
        return Result(self.what, {"ratio": ratio}, {"ratio": self.asked}, (), samples.values)


@dataclass(frozen=True)
class ExtraMemory:
    """Memory of one call of nattn beyond inputs and output."""

    name: str
    what: str
    case: Case
    asked: float

    def measure(self, contestants: Contestants, progress: Progress) -> Result:
        """Measure the row."""
        ours = contestants.get("nattn")
        ours.prepare(self.case)
        mib = ours.extra_memory() / 2**20
        return Result(self.what, {"MiB": mib}, {"MiB": self.asked}, (), {"MiB": [mib]})


@dataclass(frozen=True)
class Snippet:
    """A figure that a snippet prints in a new process: seconds or a number of compilations.

    With `cold` each process has an empty kernel cache.
    """

    name: str
    what: str
    code: str
    asked: float
    cold: bool = False
    unit: str = "seconds"

    def measure(self, contestants: Contestants, progress: Progress) -> Result:
        """Measure the row."""
        found = []
        rounds = 1 if self.cold else min(3, contestants.settings.rounds)
        if not self.cold:
            _run_snippet(self.code, os.environ)  # fills the cache
        for turn in range(rounds):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
                environment = os.environ | ({"NATTN_CACHE_DIR": empty} if self.cold else {})
                found.append(_run_snippet(self.code, environment))
            progress((turn + 1) / rounds)
        figures = {self.unit: statistics.median(found)}
        return Result(self.what, figures, {self.unit: self.asked}, (), {self.unit: found})


Row = Speed | Ratio | ExtraMemory | Snippet


def _run_snippet(code: str, environment: Mapping[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a new process failed: {done.stderr.strip() or done.returncode}")
    return float(done.stdout)
