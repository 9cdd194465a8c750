"""The table of the README: nattn against its peers and the processor's peak, in one run.

Every row names the least that the project asks of itself; `python -m nattn bench` measures them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from .. import backends
from ..call.progress import Progress
from .measure import PREPARE, Case, Contestant, Samples, Unsupported, interleave, processors

PEERS = tuple(name for name in PREPARE if name not in ("nattn", "reference"))
"""Columns of the table, where installed."""

PLAIN_PEERS = tuple(name for name in PEERS if name != "flex")
"""Peers of rows without functions of scores: FlexAttention compiles half a minute for each."""

FAST_PEERS = ("torch", "openvino")
"""Peers that can be waited for where a call takes seconds."""

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
"""Lines between which `write_markdown` puts the table."""

_SSE = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16"
_AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": f"{_SSE},+avx,+avx2,+fma,+bmi,+bmi2"}
_NO_FMA = {"NUMBA_CPU_NAME": "sandybridge", "NUMBA_CPU_FEATURES": f"{_SSE},+avx"}


class BenchError(Exception):
    """Something that a person can put right; the text says what."""


@dataclass(frozen=True)
class Result:
    """A measured row.

    Attributes
    ----------
    what : str
        The row, for people.
    figures : mapping of str to float
        Column to figure; none if the row failed, and `notes` say why.
    asked : mapping of str to float
        Column to the least (for seconds and bytes, the most) that is asked for.
    notes : tuple of str
        Who sat out, and why.
    samples : mapping
        What was measured, round by round.
    """

    what: str
    figures: Mapping[str, float]
    asked: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes
    ----------
    threads : int
        Threads of every contestant.
    rounds : int
        Rounds that count.
    peers : tuple of str
        Names from `PEERS`.
    """

    threads: int
    rounds: int
    peers: tuple[str, ...]


class Field:
    """The contestants of a run, each started when it is first needed.

    Parameters
    ----------
    plan : Plan
        How much to measure.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stack = ExitStack()
        self._started: dict[Any, Contestant] = {}

    def get(
        self,
        name: str,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        copy: int = 0,
    ) -> Contestant:
        """Return a contestant; each `copy` has a process and a prepared case of its own."""
        threads = threads or self.plan.threads
        key = (name, threads, tuple((environment or {}).items()), copy)
        if key not in self._started:
            contestant = Contestant(name, threads, environment)
            self._started[key] = self._stack.enter_context(contestant)
        return self._started[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


# Kinds of rows


@dataclass(frozen=True)
class Speed:
    """nattn's speed on a case, as a share of the peak and in multiples of its peers' speed."""

    name: str
    what: str
    case: Case
    percent: float | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    peers: tuple[str, ...] = PLAIN_PEERS
    environment: Mapping[str, str] = field(default_factory=dict)
    gflops: float | None = None

    def measure(self, contestants: Field, progress: Progress) -> Result:
        """Measure the row."""
        plan = contestants.plan
        ours = contestants.get("nattn", environment=self.environment)
        ours.prepare(self.case)
        samplers: dict[str, Callable[[], float]] = {
            "nattn": ours.sample,
            "peak": lambda: ours.peak(self.case.dtype),
        }
        notes = []
        for name in (name for name in self.peers if name in plan.peers):
            peer = contestants.get(name)
            try:
                peer.prepare(self.case)
            except (Unsupported, ArithmeticError, RuntimeError) as error:
                notes.append(f"{name}: {error}")
            else:
                samplers[name] = peer.sample
        samples = interleave(samplers, plan.rounds, progress=progress)
        work = self.case.flops() / 1e9
        share = statistics.median(
            100 * work / (seconds * peak)
            for seconds, peak in zip(samples.values["nattn"], samples.values["peak"], strict=True)
        )
        figures = {"GFLOP/s": work / samples.median("nattn"), "% of peak": share}
        for name in samplers.keys() - {"nattn", "peak"}:
            figures[f"x {name}"] = samples.ratio(name, "nattn")
        asked = {f"x {name}": value for name, value in self.times.items()}
        if self.percent is not None:
            asked["% of peak"] = self.percent
        if self.gflops is not None:
            asked["GFLOP/s"] = self.gflops
        return Result(self.what, figures, asked, tuple(notes), samples.values)


@dataclass(frozen=True)
class Against:
    """nattn's speed on a case in multiples of its own on another.

    Calls per second, or with `by_work` operations per second, where the other one has other work.
    """

    name: str
    what: str
    case: Case
    other: Case
    asked: float
    threads: int | None = None  # of the other one
    by_work: bool = False

    def measure(self, contestants: Field, progress: Progress) -> Result:
        """Measure the row."""
        one = contestants.get("nattn")
        other = contestants.get("nattn", self.threads, copy=1)
        one.prepare(self.case)
        other.prepare(self.other)
        samplers = {"one": one.sample, "other": other.sample}
        samples = interleave(samplers, contestants.plan.rounds, progress=progress)
        ratio = samples.ratio("other", "one")
        if self.by_work:
            ratio *= self.case.flops() / self.other.flops()
        return Result(self.what, {"ratio": ratio}, {"ratio": self.asked}, (), samples.values)


@dataclass(frozen=True)
class Memory:
    """Memory of one call beyond inputs and output."""

    name: str
    what: str
    case: Case
    asked: float

    def measure(self, contestants: Field, progress: Progress) -> Result:
        """Measure the row."""
        ours = contestants.get("nattn")
        ours.prepare(self.case)
        mib = ours.extra_memory() / 2**20
        return Result(self.what, {"MiB": mib}, {"MiB": self.asked}, (), {"MiB": [mib]})


@dataclass(frozen=True)
class Snippet:
    """A figure that a snippet prints, each time in a new process: seconds, or compilations."""

    name: str
    what: str
    code: str
    asked: float
    cold: bool = False
    unit: str = "seconds"

    def measure(self, contestants: Field, progress: Progress) -> Result:
        """Measure the row."""
        found = []
        rounds = 1 if self.cold else min(3, contestants.plan.rounds)
        if not self.cold:
            _run_snippet(self.code, os.environ)  # whatever is to be cached is cached now
        for turn in range(rounds):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
                environment = os.environ | ({"NATTN_CACHE_DIR": empty} if self.cold else {})
                found.append(_run_snippet(self.code, environment))
            progress((turn + 1) / rounds)
        figures = {self.unit: statistics.median(found)}
        return Result(self.what, figures, {self.unit: self.asked}, (), {self.unit: found})


Row = Speed | Against | Memory | Snippet


def _run_snippet(code: str, environment: Mapping[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a new process failed: {done.stderr.strip() or done.returncode}")
    return float(done.stdout)


_CLOCK = "import time, numpy as np, numba; clock = time.perf_counter; start = clock()\n"
_TINY = "x = np.zeros((1, 1, 16, 64), 'f4')\n"
_IMPORT = _CLOCK + "import nattn\nprint(clock() - start)"
_FIRST = _CLOCK + _TINY + "import nattn\nnattn.attention(x, x, x)\nprint(clock() - start)"
_WARM = (
    _CLOCK
    + _TINY
    + """
import nattn, statistics
times = []
for _ in range(2000):
    start = clock()
    nattn.attention(x, x, x)
    times.append(clock() - start)
print(statistics.median(times))
"""
)

MODIFIED = (
    _CLOCK
    + """
from functools import partial
from numba.core import event
import nattn
x = np.zeros((1, 1, 64, 64), 'f4')

def known(score, b, h, q_idx, kv_idx, table):
    return score + table[q_idx] * np.tanh(score)

new = "def fresh(score, b, h, q_idx, kv_idx): return np.where(q_idx < kv_idx, score, {})"
exec(new.format(time.time()))  # no cache has seen it

def bound(n):
    nattn.attention(x, x, x, score_mod=partial(known, table=np.ones(n, 'f4')))

def built_in():
    for options in (
        {"softcap": 20.0},
        {"alibi_slopes": np.ones(1, 'f4')},
        {"mask_mod": nattn.masks.causal},
        {"mask_mod": partial(nattn.masks.document, doc=np.arange(64) // 9)},
        {"dropout_p": 0.1, "seed": 1},
    ):
        nattn.attention(x, x, x, **options)

def compilations(call):
    "Count the functions whose types Numba infers: the first thing it does to compile one."
    with event.install_recorder("numba:run_pass") as recorder:
        call()
    passes = [e for _, e in recorder.buffer if e.is_start]
    return sum("type_inference" in e.data["name"] for e in passes)

"""
)
"""What snippets about users' functions begin with."""

_NEW = (
    MODIFIED
    + "nattn.attention(x, x, x)\nstart = clock()\n"
    + "nattn.attention(x, x, x, score_mod=fresh)\nprint(clock() - start)"
)
_REBOUND = MODIFIED + "bound(64)\nprint(compilations(lambda: (bound(64), bound(65), bound(1000))))"
_LATER = MODIFIED + "print(compilations(built_in))"

LONG = 32_768

_X86_ROWS: tuple[Row, ...] = (
    Speed("avx2", "N=4096 D=64 compiled for AVX2", Case(), 70, peers=(), environment=_AVX2),
    Speed(
        "no-fma",
        "N=2048 D=64 compiled for a processor without FMA",
        Case(N=2048),
        peers=(),
        environment=_NO_FMA,
        gflops=60,
    ),
)

ROWS: tuple[Row, ...] = (
    Speed("d64", "N=4096 D=64", Case(), 85, {"torch": 1.35, "openvino": 1.1}),
    Speed("d128", "N=4096 D=128", Case(D=128), 85, {"torch": 1.15, "openvino": 1.1}),
    Speed(
        "causal-d64",
        "N=4096 D=64 causal",
        Case(causal=True),
        78,
        {"torch": 1.4, "openvino": 2},
    ),
    Speed(
        "causal-d128",
        "N=4096 D=128 causal",
        Case(D=128, causal=True),
        78,
        {"torch": 1.25, "openvino": 2},
    ),
    Speed("long-d64", "one head, N=32768 D=64", Case(H=1, N=LONG), 82, peers=FAST_PEERS),
    Speed("long-d128", "one head, N=32768 D=128", Case(H=1, N=LONG, D=128), 82, peers=FAST_PEERS),
    Speed(
        "long-causal-d64",
        "one head, N=32768 D=64 causal",
        Case(H=1, N=LONG, causal=True),
        78,
        peers=FAST_PEERS,
    ),
    Speed(
        "long-causal-d128",
        "one head, N=32768 D=128 causal",
        Case(H=1, N=LONG, D=128, causal=True),
        78,
        peers=FAST_PEERS,
    ),
    Speed("short", "N=512 D=64", Case(N=512), 70),
    Speed("float64", "float64, N=2048 D=64", Case(N=2048, dtype="float64"), 75),
    Speed("d80", "N=2048 D=80", Case(N=2048, D=80), 70),
    Speed("d96", "N=2048 D=96", Case(N=2048, D=96), 70),
    Speed("d40", "N=2048 D=40", Case(N=2048, D=40), 70),
    Speed("dv", "N=2048 D=192 Dv=128", Case(N=2048, D=192, Dv=128), 70),
    Speed(
        "window",
        "N=16384 D=64 window (256, 0)",
        Case(N=16_384, window=(256, 0)),
        55,
        {"flex": 2.5},
        peers=(*FAST_PEERS, "flex"),
    ),
    Speed("mask", "N=4096 D=64 dense mask, half hidden", Case(mask="random"), 45),
    *(
        Speed(name, what, case, None, {"flex": 2.5}, peers=("flex",))
        for name, what, case in (
            ("softcap-speed", "N=4096 D=64 softcap", Case(mod="softcap")),
            ("alibi-speed", "N=4096 D=64 ALiBi", Case(mod="ALiBi")),
            (
                "documents-speed",
                "N=16384 D=64, 16 documents, BlockMask",
                Case(N=16_384, mod="documents"),
            ),
        )
    ),
    Speed(
        "backward-d64",
        "gradients, N=2048 D=64",
        Case(N=2048, backward=True),
        66,
        {"torch": 1.3},
        peers=("torch",),
    ),
    Speed(
        "backward-d128",
        "gradients, N=2048 D=128",
        Case(N=2048, D=128, backward=True),
        66,
        {"torch": 1.2},
        peers=("torch",),
    ),
    Speed(
        "backward-causal-d64",
        "gradients, N=2048 D=64 causal",
        Case(N=2048, causal=True, backward=True),
        58,
        {"torch": 1.4},
        peers=("torch",),
    ),
    Speed(
        "backward-causal-d128",
        "gradients, N=2048 D=128 causal",
        Case(N=2048, D=128, causal=True, backward=True),
        58,
        {"torch": 1.2},
        peers=("torch",),
    ),
    *(_X86_ROWS if platform.machine().lower() in ("x86_64", "amd64") else ()),
    Against(
        "hiding",
        "a mask that hides something in each tile, against one that hides nothing",
        Case(mask="sparse"),
        Case(mask="open"),
        0.85,
    ),
    Against("threads", "all threads against one", Case(), Case(), 1.85, threads=1),
    *(
        Against(form, f"{form} inputs against contiguous ones", Case(form=form), Case(), 0.85)
        for form in ("packed", "reversed", "strided", "read-only", "unaligned")
    ),
    Against("softcap", "softcap against none", Case(mod="softcap"), Case(), 0.85),
    Against("alibi", "ALiBi against none", Case(mod="ALiBi"), Case(), 0.93),
    Against(
        "gate",
        "a score_mod of one tanh and one np.where against none",
        Case(mod="gate"),
        Case(),
        0.82,
    ),
    Against("dropout", "dropout against none", Case(mod="dropout"), Case(), 0.7),
    Against(
        "causal-mod",
        "causal as a mask_mod with its BlockMask against causal=True",
        Case(mod="causal"),
        Case(causal=True),
        0.85,
    ),
    Against(
        "documents",
        "16 documents in N=16384, with BlockMask against without",
        Case(N=16_384, mod="documents"),
        Case(N=16_384, mod="documents", skip=False),
        10,
    ),
    Against(
        "prefix",
        "prefix-LM at N=16384 against no mask, for each score of a visible block",
        Case(N=16_384, mod="prefix"),
        Case(N=16_384),
        0.7,
        by_work=True,
    ),
    Against(
        "local",
        "local-plus-global at N=16384 against no mask, for each score of a visible block",
        Case(N=16_384, mod="local"),
        Case(N=16_384),
        0.7,
        by_work=True,
    ),
    Against(
        "backward-threads",
        "gradients of one head, N=8192 D=64: all threads against one",
        Case(H=1, N=8192, backward=True),
        Case(H=1, N=8192, backward=True),
        1.7,
        threads=1,
    ),
    Against(
        "backward-groups",
        "gradients, 8 query heads on 2 key heads against 8",
        Case(N=2048, Hkv=2, backward=True),
        Case(N=2048, backward=True),
        0.9,
    ),
    Against(
        "backward-softcap",
        "gradients with softcap against none",
        Case(N=2048, mod="softcap", backward=True),
        Case(N=2048, backward=True),
        0.6,
    ),
    Against(
        "backward-gate",
        "gradients with a score_mod of one tanh and one np.where against none",
        Case(N=2048, mod="gate", backward=True),
        Case(N=2048, backward=True),
        0.6,
    ),
    Against(
        "backward-bias",
        "gradients with that of a bias (1, H, N, N) against none",
        Case(N=2048, bias="full", backward=True),
        Case(N=2048, backward=True),
        0.55,
    ),
    Against(
        "backward-key-bias",
        "gradients with that of a bias (1, H, 1, N) against none",
        Case(N=2048, bias="keys", backward=True),
        Case(N=2048, backward=True),
        0.7,
    ),
    Memory(
        "backward-memory",
        "gradients of one head, N=32768 D=64: memory beyond inputs and dq",
        Case(H=1, N=LONG, backward=True),
        96,
    ),
    Memory(
        "memory",
        "one head, N=65536 D=64 causal: memory beyond inputs and output",
        Case(H=1, N=65_536, causal=True),
        32,
    ),
    Snippet("import", "import nattn, after import numba", _IMPORT, 0.3),
    Snippet("second", "first call in a process, kernels from the cache", _FIRST, 0.8),
    Snippet("first", "first call ever, kernels compiled", _FIRST, 6.0, cold=True),
    Snippet("new-mod", "first call with a new function", _NEW, 0.8),
    Snippet("rebound", "new arrays bound to a known function", _REBOUND, 0, unit="compilations"),
    Snippet("later", "built-ins in a later process", _LATER, 0, unit="compilations"),
    Snippet("tiny", "a warm call on (1, 1, 16, 64)", _WARM, 60e-6),
)

QUICK = ("d64", "causal-d64", "short", "tiny")
"""Rows of ``--quick``."""


def select(names: Iterable[str] | None) -> list[Row]:
    """Return rows by name, all of them for None.

    Raises
    ------
    BenchError
        If there is no such row.
    """
    if names is None:
        return list(ROWS)
    known = {row.name: row for row in ROWS}
    names = list(names)
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"rows: no {', '.join(unknown)}; known are {', '.join(known)}")
    return [known[name] for name in names]


def run(
    rows: Iterable[Row], plan: Plan, tell: Callable[[Result], object] = lambda result: None
) -> list[Result]:
    """Measure rows, one after the other.

    Parameters
    ----------
    rows : iterable of rows
        What to measure.
    plan : Plan
        How much to measure.
    tell : callable, optional
        Called with each result as soon as it is there.

    Returns
    -------
    list of Result
        In the order of the rows.
    """
    results = []
    with Field(plan) as contestants:
        for row in rows:
            try:
                with Progress(row.what) as progress:
                    result = row.measure(contestants, progress)
            except (ArithmeticError, RuntimeError) as error:  # the other rows go on
                result = Result(row.what, {}, notes=(f"failed: {error}",))
            tell(result)
            results.append(result)
    return results


# For people


def table(results: Sequence[Result], markdown: bool = False) -> str:
    """Lay out results: one table of speeds, and one of everything else.

    Parameters
    ----------
    results : sequence of Result
        What `run` returned.
    markdown : bool, default False
        For a Markdown file instead of a terminal.

    Returns
    -------
    str
        Each figure is followed by what is asked for, in parentheses.
    """
    speeds = [r for r in results if "% of peak" in r.figures]
    others = [r for r in results if r.figures and "% of peak" not in r.figures]
    columns = ["GFLOP/s", "% of peak", *(f"x {name}" for name in PEERS)]
    columns = [c for c in columns if any(c in r.figures for r in speeds)]
    parts = []
    if speeds:
        cells = [[r.what, *(_figure(r, column) for column in columns)] for r in speeds]
        parts.append(_grid(["speed (asked for)", *columns], cells, markdown))
    if others:
        cells = [[r.what, _figure(r, next(iter(r.figures)))] for r in others]
        parts.append(_grid(["what", "measured (asked for)"], cells, markdown))
    return "\n\n".join(parts)


def _figure(result: Result, column: str) -> str:
    if column not in result.figures:
        return "-"
    got = _number(result.figures[column], column)
    asked = result.asked.get(column)
    return got if asked is None else f"{got} ({_number(asked, column)})"


def _number(value: float, column: str) -> str:
    if column == "seconds":
        return f"{value:.2f} s" if value >= 0.01 else f"{1e6 * value:.0f} µs"
    if column == "MiB":
        return f"{value:.1f} MiB"
    if column == "% of peak":
        return f"{value:.0f}%"
    return f"{value:.0f}" if column in ("GFLOP/s", "compilations") else f"{value:.2f}"


def _grid(head: list[str], cells: list[list[str]], markdown: bool) -> str:
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]

    def line(row: list[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(line(row) for row in [head, *([rule] if markdown else []), *cells])


def notes(results: Iterable[Result]) -> list[str]:
    """Return who sat out and why, each reason once, with its rows."""
    rows: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            rows.setdefault(note, []).append(result.what)
    everywhere = {note for note, at in rows.items() if len(at) > 3 or "not installed" in note}
    return [n if n in everywhere else f"{n} [{'; '.join(at)}]" for n, at in rows.items()]


def machine(threads: int) -> dict[str, str]:
    """Describe what the figures hold for: processor, versions, threads."""
    from importlib import metadata

    from .. import __version__

    cpu = backends.load("cpu")

    found = {
        "processor": str(cpu.info().get("cpu", platform.processor())),
        "threads": str(threads),
        "python": platform.python_version(),
        "nattn": __version__,
    }
    for name in ("numba", "numpy", "torch", "openvino", "onnxruntime", "jax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_markdown(path: Path, results: Sequence[Result], about: Mapping[str, str]) -> None:
    """Put the tables between the lines `BEGIN` and `END` of a file.

    Parameters
    ----------
    path : Path
        The file, for example README.md.
    results : sequence of Result
        What `run` returned.
    about : mapping of str to str
        What `machine` returned.

    Raises
    ------
    BenchError
        If the file cannot be read or lacks the lines.
    """
    text = check_markdown(path)
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    text = f"{head}{BEGIN}\n\n{table(results, markdown=True)}\n\n{facts}\n\n{END}{tail}"
    _write("markdown", path, text)


def check_markdown(path: Path) -> str:
    """Return the text of a file into which `write_markdown` can write."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"markdown: cannot read {path}: {error}") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BenchError(f"markdown: expected one line {BEGIN} and, after it, one {END} in {path}")
    return text


def write_json(path: Path, results: Sequence[Result], about: Mapping[str, str]) -> None:
    """Write everything that was measured.

    Raises
    ------
    BenchError
        If the file cannot be written.
    """
    document = {"machine": dict(about), "results": [asdict(result) for result in results]}
    _write("json", path, json.dumps(document, indent=1) + "\n")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{option}: cannot write {path}: {error.strerror or error}") from None


# Time and memory against n

PLOTTED = ("nattn", "torch", "numpy")
"""Contestants of the plot."""

_TOO_LONG = 20.0
"""Seconds after which a contestant goes no further."""


@dataclass(frozen=True)
class Curve:
    """How one contestant's time and memory grow with n.

    Attributes
    ----------
    name : str
        The contestant.
    n : list of int
        Queries and keys of one head, D=64.
    seconds, mib : list of float
        Time of a call, and its memory beyond inputs and output.
    """

    name: str
    n: list[int]
    seconds: list[float]
    mib: list[float]


def curves(plan: Plan, sizes: Sequence[int]) -> list[Curve]:
    """Measure time and extra memory of one head against n.

    Parameters
    ----------
    plan : Plan
        How much to measure.
    sizes : sequence of int
        The values of n, ascending.

    Returns
    -------
    list of Curve
        One for each contestant that is installed, as far as it gets.
    """
    names = [name for name in PLOTTED if name == "nattn" or name in plan.peers]
    found = {name: Curve(name, [], [], []) for name in names}
    with Field(plan) as contestants, Progress("time and memory against n") as progress:
        done, total = 0.0, float(sum(n * n for n in sizes))
        for n in sizes:
            ready = {}
            for name in names:
                contestant = contestants.get(name)
                try:
                    contestant.prepare(Case(H=1, N=n))
                except (Unsupported, ArithmeticError, RuntimeError):
                    continue
                ready[name] = contestant
            mib = {name: c.extra_memory() / 2**20 for name, c in ready.items()}
            samples: Samples = interleave({k: c.sample for k, c in ready.items()}, rounds=3)
            for name in ready:
                found[name].n.append(n)
                found[name].seconds.append(samples.median(name))
                found[name].mib.append(mib[name])
            names = [name for name in ready if 4 * found[name].seconds[-1] < _TOO_LONG]
            done += n * n
            progress(done / total)
    return [curve for curve in found.values() if curve.n]


def check_plot(path: Path) -> None:
    """Raise BenchError if `plot` could not write: know it before minutes of work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "plot: matplotlib is not installed; it needs: python -m pip install 'nattn[demo]'"
        )
    if not path.parent.is_dir():
        raise BenchError(f"plot: no folder {path.parent}")


def plot(path: Path, found: Sequence[Curve]) -> None:
    """Write a PNG of time and memory against n.

    Parameters
    ----------
    path : Path
        The file.
    found : sequence of Curve
        What `curves` returned.

    Raises
    ------
    BenchError
        If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for curve in found:
        label = "NumPy, dense" if curve.name == "numpy" else curve.name
        left.loglog(curve.n, curve.seconds, "o-", base=2, label=label)
        # what is below a page or two is noise of the measurement
        right.loglog(curve.n, [max(m, 0.1) for m in curve.mib], "o-", base=2, label=label)
    left.set_title("seconds per call")
    right.set_title("MiB beyond inputs and output (0.1 and less shown as 0.1)")
    for axes in (left, right):
        axes.set_yscale("log", base=10)
        axes.set_xlabel("n: queries and keys (one head, D=64, float32)")
        axes.grid(True, which="major", alpha=0.4)
        axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BenchError(f"plot: cannot write {path}: {error.strerror or error}") from None


def default_plan(quick: bool = False) -> Plan:
    """Return the plan of ``python -m nattn bench``."""
    return Plan(threads=processors(), rounds=3 if quick else 7, peers=PEERS)
