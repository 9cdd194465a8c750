"""The later steps: the price of n², looking at a long sequence, and learning."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from ...api import diagnostics, functional
from ...call.progress import Progress
from .. import learning
from ..measure import PeakMemory
from .drawing import BLUE, ORANGE, RED, SOFT, Array, canvas, decades, finish, heat
from .page import Step, figure, formula, paragraph, text
from .steps import gaussian, scientific

# 8. The price


PAGE = 4096
"""Bytes of a page of memory, the least that is measured."""


def price(sizes: Sequence[int]) -> Step:
    """Measure time and memory against the length of the sequence."""
    d = 64
    seconds: dict[str, list[float]] = {"dense": [], "nattn": []}
    memory: dict[str, list[float]] = {"dense": [], "nattn": []}
    error = 0.0
    warm = gaussian(0, 128, d)
    functional.attention(warm, warm, warm)  # compiled once, before the clock runs
    for n in sizes:
        q, k, v = gaussian(n, 3, n, d)
        out = np.empty_like(q)
        out.fill(0.0)  # resident before it is measured
        runs: dict[str, Callable[[], Array]] = {
            "dense": functools.partial(_dense, q, k, v),
            "nattn": functools.partial(functional.attention, q, k, v, out=out),
        }
        results = []
        for name, function in runs.items():
            with PeakMemory() as used:
                results.append(function())
            memory[name].append(float(used.bytes))
            seconds[name].append(_least_time(function))
        error = max(error, float(np.abs(results[0] - results[1]).max()))
    ratio = {name: times[-1] / times[-2] for name, times in seconds.items()}
    times, axes = canvas(height=250)
    space, below = canvas(height=250)
    for name, colour, label in (("dense", RED, "n × n matrix"), ("nattn", BLUE, "streamed")):
        axes.loglog(sizes, seconds[name], "o-", color=colour, label=label)
        below.loglog(sizes, np.maximum(memory[name], PAGE), "o-", color=colour, label=label)
    one = np.array(sizes, float)
    axes.loglog(one, seconds["nattn"][-1] * (one / one[-1]) ** 2, ":", color=SOFT, label="n²")
    below.loglog(one, 3 * 4 * d * one, "--", color=SOFT, label="q, k, v themselves")
    for ax in (axes, below):
        ax.set_xticks(sizes, [f"{n:,}" if n >= 1024 else str(n) for n in sizes])
        ax.tick_params(axis="x", labelrotation=35)
        ax.minorticks_off()
        ax.set_xlabel("n")
        ax.legend(loc="upper left")
    axes.set_title("Time")
    below.set_title("Memory beyond in- and outputs")
    below.set_ylim(PAGE / 2)
    decades(axes.yaxis, "s")
    decades(below.yaxis, "B")
    panels = (
        finish(
            times,
            "price-time",
            "Time against the length on logarithmic axes, for a dense computation and for the "
            "streamed one; both grow with the square of the length.",
        ),
        finish(
            space,
            "price-memory",
            "Memory against the length: that of the dense computation grows with the square of "
            "the length, that of the streamed one does not.",
        ),
    )
    n = sizes[-1]
    caption = (
        f"One head of {d} dimensions, float32, on this machine. From n = {sizes[-2]:,} to "
        f"{n:,} time grows by <b>{ratio['dense']:.1f}</b> (dense, NumPy) and "
        f"<b>{ratio['nattn']:.1f}</b> (streamed). At n = {n:,}: "
        f"{1e3 * seconds['dense'][-1]:.0f} ms and {memory['dense'][-1] / 1e6:.0f} MB dense, "
        f"{1e3 * seconds['nattn'][-1]:.0f} ms and {memory['nattn'][-1] / 1e6:.1f} MB streamed; "
        f"results differ by at most {scientific(error)}. Less than a page of memory is drawn as "
        "one."
    )
    parts = (
        paragraph(
            "Everybody asks everybody: n items have n² scores. Twice the length is four times the "
            "work, and that cannot be helped without giving up exactness. The <i>memory</i> can: "
            "a row needs its scores only once, if it keeps a running maximum, a running sum and a "
            "running average, and corrects them when a larger score comes along."
        ),
        formula(r"m_2 = \max(m_1, s)"),
        formula(r"l_2 = l_1 e^{m_1 - m_2} + e^{s - m_2}"),
        formula(r"a_2 = a_1 e^{m_1 - m_2} + e^{s - m_2} v, \quad \text{out} = a / l"),
        figure(panels, caption),
    )
    return Step("price", "n² is the price: of time, not of memory", parts, panels)


def _dense(q: Array, k: Array, v: Array) -> Array:
    """Compute attention as the formula says, in NumPy, with one matrix that is reused."""
    s = q @ k.T
    s *= np.float32(1 / math.sqrt(q.shape[1]))
    s -= s.max(axis=1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=1, keepdims=True)
    return s @ v


def _least_time(function: Callable[[], object], budget: float = 0.3) -> float:
    """Return the least time of some runs: other processes only make a run slower."""
    best, start = math.inf, time.perf_counter()
    while True:
        before = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - before)
        if time.perf_counter() - start > budget:
            return best


# 9. A long sequence


def long(n: int) -> Step:
    """Show the attention of a long sequence without its matrix."""
    d, blocks, form = 64, 256, "ABABCB"
    rng = np.random.default_rng(12)
    part = n // len(form)
    melodies = {}
    for name in sorted(set(form)):
        time_line = np.arange(n - part * (len(form) - 1)) / part
        speed = rng.uniform(8, 24, d)
        phase = rng.uniform(0, 2 * math.pi, d)
        melodies[name] = np.sin(2 * math.pi * (speed * time_line[:, None] + phase))
    x = np.concatenate([melodies[name][:part] for name in form[:-1]] + [melodies[form[-1]]])
    x = (x + 0.35 * rng.standard_normal(x.shape)).astype(np.float32)
    sharp = 0.3
    few = x[: 2 * blocks]
    diagnostics.attention_map(few, few, size=(blocks, blocks))  # compiled before the clock runs
    with PeakMemory() as used:
        start = time.perf_counter()
        picture = diagnostics.attention_map(x, x, size=(blocks, blocks), scale=sharp)
        seconds = time.perf_counter() - start
    mass = diagnostics.key_mass(x, x, scale=sharp)
    stats = diagnostics.row_stats(x, x, scale=sharp)
    wide = np.exp(stats.entropy.astype(np.float64))

    left, axes = canvas(height=330)
    relative = np.asarray(picture, np.float64) * n
    bright = float(np.quantile(relative, 0.995))
    heat(axes, np.sqrt(np.minimum(relative / bright, 1.0)), limit=1.0)
    edges = [blocks * i / len(form) - 0.5 for i in range(len(form))]
    middles = [edge + blocks / len(form) / 2 for edge in edges]
    axes.set_xticks(middles, list(form))
    axes.set_yticks(middles, list(form))
    axes.xaxis.tick_top()
    axes.set_title(f"{n:,} × {n:,} weights in {blocks} × {blocks} blocks")
    right, (above, below) = canvas(height=330, nrows=2, sharex=True)
    where = np.arange(blocks) * n / blocks
    above.plot(where, _means(mass, blocks), color=BLUE)
    above.set_title("Weight a key gets in all")
    above.set_ylim(0)
    below.plot(where, _means(wide, blocks), color=ORANGE)
    below.set_title("Keys a row looks at (exp of entropy)")
    below.set_ylim(0)
    below.set_xlabel("position")
    for ax in (above, below):
        ax.set_xticks([part * i + part / 2 for i in range(len(form))], list(form))
        for i in range(1, len(form)):
            ax.axvline(part * i, color=SOFT, linewidth=0.5)
    panels = (
        finish(
            left,
            "long-map",
            "The map of a long sequence in six parts named A, B, A, B, C, B: diagonal lines where "
            "a part meets its repetition, nothing where C meets others.",
        ),
        finish(
            right,
            "long-rows",
            "Two curves along the sequence: the weight that keys get in all, and how many keys a "
            "row looks at; both follow the parts.",
        ),
    )
    each = {
        name: float(np.mean([wide[i * part : (i + 1) * part].mean() for i in _places(form, name)]))
        for name in sorted(set(form))
    }
    counts = ", ".join(
        f"{count:.0f} in {name} (heard {('once', 'twice', 'three times')[form.count(name) - 1]})"
        for name, count in each.items()
    )
    caption = (
        f"A made-up song of {n:,} tokens. Its matrix would take <b>{4 * n * n / 1e9:.1f} GB</b>; "
        f"the map took <b>{seconds:.1f} s</b> and {used.bytes / 1e6:.1f} MB beyond its inputs. "
        f"The mean of all weights is {scientific(float(np.mean(relative)))} / n, as it must be. "
        f"Keys that a row looks at: {counts}."
    )
    parts = (
        paragraph(
            "A fused kernel is fast because the matrix is never there, so there is nothing to look "
            "at. But a second pass over the scores can fold every weight into the picture's cell "
            "it belongs to, or into sums for each key or each row, and forget it again:"
        ),
        formula(
            r"\text{map}_{ab} = \underset{i \in a, \, j \in b}{\text{mean}} \, p_{ij}, \quad "
            r"\text{mass}_j = \sum_i p_{ij}"
        ),
        paragraph(
            "<code>nattn.attention_map</code>, <code>nattn.key_mass</code> and "
            "<code>nattn.row_stats</code> do that. The sequence here is a song with verses A, a "
            "refrain B and a bridge C: a moment finds itself again wherever its part is repeated."
        ),
        figure(panels, caption),
    )
    return Step("long", "Looking at long attention", parts, panels)


def _means(values: Array, blocks: int) -> Array:
    """Return the means of `blocks` consecutive blocks."""
    return np.array([part.mean(dtype=np.float64) for part in np.array_split(values, blocks)])


def _places(form: str, name: str) -> list[int]:
    return [i for i, one in enumerate(form) if one == name]


# 10. Learning


BLIND = "blind "
"""Beginning of the names of curves without positions."""


def learned(progress: Progress | None = None) -> Step:
    """Train small layers; show what they learn, and what they cannot learn without positions."""
    tasks: dict[str, list[learning.Curve]] = {}
    for curve in learning.learn_all(progress):
        tasks.setdefault(curve.name.removeprefix(BLIND), []).append(curve)
    panels, told = [], []
    for task, curves in tasks.items():
        drawn, axes = canvas(height=240)
        for curve in curves:
            blind = curve.name.startswith(BLIND)
            axes.plot(curve.losses, color=ORANGE if blind else BLUE, label=curve.label)
            told.append(
                f"{text(curve.label)}: <b>{curve.end_loss:.3f}</b>, {curve.accuracy:.1%} right"
            )
        levels = curves[0].levels
        for (name, level), dashes in zip(levels.items(), cycle(("--", ":"))):
            axes.axhline(level, color=SOFT, linestyle=dashes, linewidth=1.2, label=name)
        told += [f"{text(name)}: {level:.3f}" for name, level in levels.items()]
        highest = max(max(float(c.losses.max()) for c in curves), *levels.values())
        axes.set_ylim(0, 1.5 * highest)
        axes.legend(loc="upper right")
        axes.set_xlabel("step")
        axes.set_title(f"Loss: {task}")
        named = "; ".join(curve.label for curve in curves)
        panels.append(
            finish(drawn, f"learning-{task}", f"Loss against steps of training: {named}.")
        )
    parts = (
        paragraph(
            "Everything above has a derivative, so all of it can be learned. Small networks were "
            "trained just now, by <code>nattn</code>'s gradients and a few lines of Adam. "
            "<b>lookup</b>: find the value that belongs to a key, in a list in any order. "
            "<b>order</b>: the key is there twice, and the later value counts. <b>text</b>: "
            "continue a poem, letter by letter, under the causal mask."
        ),
        formula(r"ds_{ij} = p_{ij} \left( dp_{ij} - \sum_m p_{im} \, dp_{im} \right)"),
        figure(panels, "Mean loss at the end, in nats. " + "; ".join(told) + "."),
    )
    return Step("learning", "It learns", parts, tuple(panels))
