"""Speed and memory against n: measured, and plotted for the README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..measure import Case, Contestant, Sampler, Unsupported, interleave
from ..progress_bar import ProgressBar
from .rows import Contestants
from .settings import PLAIN_PEERS, BenchError, Settings, require

PLOTTED = ("nattn", *PLAIN_PEERS)
"""Contestants of the plot, where installed."""

_TOO_LONG = 20.0
"""Seconds of a call that is too long: a contestant stops at the n before."""

_LEAST_MIB = 0.1
"""Less is noise of a few pages, and drawn as so much."""

_STYLES = {"nattn": {"linewidth": 2.6, "zorder": 3}}
_LABELS = {"numpy": "NumPy, dense", "torch": "PyTorch", "openvino": "OpenVINO", "jax": "JAX"}


@dataclass(frozen=True)
class Growth:
    """How one contestant's speed and memory change with n.

    Attributes
    ----------
    name : str
        The contestant.
    n : list of int
        Queries and keys of one head, D=64.
    gflops : list of float
        Speed, GFLOP/s.
    mib : list of float
        Memory of a call beyond inputs and output.
    """

    name: str
    n: list[int]
    gflops: list[float]
    mib: list[float]


@dataclass(frozen=True)
class Sweep:
    """All contestants against n.

    Attributes
    ----------
    peak : list of float
        The processor's FMA peak, measured beside each n, GFLOP/s.
    growths : list of Growth
        One for each contestant that is installed, as far as it gets.
    notes : list of str
        Which contestants stopped before the last n, and why.
    """

    peak: list[float]
    growths: list[Growth]
    notes: list[str]


def sweep(settings: Settings, sizes: Sequence[int]) -> Sweep:
    """Measure speed and extra memory of one head against n.

    Parameters
    ----------
    settings : Settings
        How much to measure.
    sizes : sequence of int
        The values of n, ascending.

    Returns
    -------
    Sweep
        With a growth for each contestant that is installed.

    Raises
    ------
    BenchError
        If nattn itself fails.
    """
    names = [name for name in PLOTTED if name == "nattn" or name in settings.peers]
    found = {name: Growth(name, [], [], []) for name in names}
    peaks: list[float] = []
    notes: list[str] = []
    label = "speed and memory against n"
    with Contestants(settings) as contestants, ProgressBar(label) as progress:
        done, total = 0.0, float(sum(n * n for n in sizes))
        for n in sizes:
            case = Case(H=1, N=n)
            ready: dict[str, Contestant] = {}
            for name in names:
                contestant = contestants.get(name)
                try:
                    contestant.prepare(case)
                except (Unsupported, ArithmeticError, RuntimeError) as error:
                    if name == "nattn":
                        raise BenchError(f"plot: {error}") from None
                    notes.append(f"{name}, n={n}: {error}")
                else:
                    ready[name] = contestant
            mib = {name: c.extra_memory() / 2**20 for name, c in ready.items()}
            samplers: dict[str, Sampler] = {name: c.sample for name, c in ready.items()}
            samplers["peak"] = contestants.get("nattn").peak
            samples = interleave(samplers, min(3, settings.rounds))
            peaks.append(samples.median("peak"))
            for name in ready:
                found[name].n.append(n)
                found[name].gflops.append(case.flops() / samples.median(name) / 1e9)
                found[name].mib.append(mib[name])
            names = [name for name in ready if 4 * samples.median(name) < _TOO_LONG]
            done += n * n
            progress(done / total)
    return Sweep(peaks, [growth for growth in found.values() if growth.n], notes)


def check_plot(path: Path) -> None:
    """Raise BenchError if `plot` could not write: before any work, not after it."""
    require("matplotlib", "plot")
    if not path.parent.is_dir():
        raise BenchError(f"plot: no folder {path.parent}")


def plot(path: Path, found: Sweep) -> None:
    """Write a PNG of speed and memory against n.

    Parameters
    ----------
    path : Path
        The file.
    found : Sweep
        What `sweep` returned.

    Raises
    ------
    BenchError
        If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for growth in found.growths:
        style = _STYLES.get(growth.name, {})
        label = _LABELS.get(growth.name, growth.name)
        left.plot(growth.n, growth.gflops, "o-", markersize=4, label=label, **style)
        mib = [max(m, _LEAST_MIB) for m in growth.mib]
        right.plot(growth.n, mib, "o-", markersize=4, label=label, **style)
    peak = max(
        found.peak
    )  # what the processor can do; other loads and spinning threads take from it
    left.axhline(peak, color="0.45", linestyle="--", linewidth=1.2, label="FMA peak")
    left.set_ylim(0)
    left.set_title("Speed, GFLOP/s")
    right.set_yscale("log", base=10)
    right.yaxis.set_major_formatter(
        FuncFormatter(lambda mib, _: f"{mib:,.10g}" if mib > _LEAST_MIB else f"≤{_LEAST_MIB:g}")
    )
    right.set_ylim(0.7 * _LEAST_MIB)
    right.set_title("Memory beyond inputs and output, MiB")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.tick_params(axis="x", labelrotation=35)
        axes.set_xlabel("n: queries and keys (one head, D=64, float32)")
        axes.grid(True, which="major", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BenchError(f"plot: cannot write {path}: {error.strerror or error}") from None
