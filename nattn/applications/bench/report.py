"""Results as tables, for a terminal and for Markdown, and as files."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from ... import __version__, backends
from .rows import Result
from .settings import PEERS, BenchError, require

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
"""Lines between which `write_markdown` puts the tables."""


def check_table() -> None:
    """Raise BenchError if `table` lacks its library: before any work, not after it."""
    require("tabulate", "table")


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
    columns = ["GFLOP/s", "% of peak", *(f"x {name}" for name in (*PEERS, "float32"))]
    columns = [c for c in columns if any(c in r.figures for r in speeds)]
    tables = []
    if speeds:
        cells = [[r.what, *(_figure(r, column) for column in columns)] for r in speeds]
        tables.append(_layout(["speed (asked for)", *columns], cells, markdown))
    if others:
        cells = [[r.what, _figure(r, next(iter(r.figures)))] for r in others]
        tables.append(_layout(["what", "measured (asked for)"], cells, markdown))
    return "\n\n".join(tables)


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


def _layout(head: list[str], cells: list[list[str]], markdown: bool) -> str:
    from tabulate import tabulate

    return str(
        tabulate(
            cells,
            headers=head,
            tablefmt="pipe" if markdown else "plain",
            colalign=("left", *("right" for _ in head[1:])),
            disable_numparse=True,  # figures are texts with units: leave them as they are
        )
    )


def notes(results: Iterable[Result]) -> list[str]:
    """Return which peers were left out and why: each reason once, with its rows."""
    rows: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            rows.setdefault(note, []).append(result.what)
    everywhere = {note for note, at in rows.items() if len(at) > 3 or "not installed" in note}
    return [n if n in everywhere else f"{n} [{'; '.join(at)}]" for n, at in rows.items()]


def machine(threads: int) -> dict[str, str]:
    """Return what the figures depend on: processor, versions, threads."""
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
        The file, for example docs/benchmarks.md.
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
