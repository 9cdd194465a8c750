"""The steps from a weighted average to long sequences, each with figures computed on the spot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import positional
from ...api import diagnostics, functional
from ...nn.layers import MultiHeadAttention, SelfAttention
from .drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    SOFT,
    VIOLET,
    Array,
    canvas,
    decades,
    finish,
    heat,
    scale,
)
from .page import Step, figure, formula, inline, paragraph

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def scientific(value: float) -> str:
    """Return a number for a caption: 0 as it is, others with two or three digits.

    Examples
    --------
    >>> from nattn.applications.explain.steps import scientific
    >>> scientific(0.25), scientific(3.14159), scientific(6.02e-8), scientific(0.0)
    ('0.25', '3.14', '6.0·10<sup>−8</sup>', '0')
    """
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}·10<sup>{str(int(exponent)).replace('-', '−')}</sup>"


def gaussian(seed: int, *shape: int) -> Array:
    """Return independent normal numbers of variance 1, float32."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# 1. A weighted average


def average() -> Step:
    """Show a weighted average whose weights come from content."""
    centres = np.array([[1.6, 1.1], [-1.5, 1.2], [0.2, -1.7]])
    points = np.repeat(centres, [3, 3, 2], axis=0) + 0.38 * gaussian(3, 8, 2)
    asking = 2
    out = functional.attention(points, points, points, scale=0.5)
    weights = diagnostics.attention_weights(points, points, scale=0.5)
    p = weights[asking]
    blind = points.mean(axis=0)

    plane, axes = canvas(height=280)
    hull = points[_hull(points)]
    axes.fill(*hull.T, color=SOFT, alpha=0.13, linewidth=0)
    axes.scatter(*points.T, s=14 + 900 * p, color=BLUE, alpha=0.75, linewidth=0)
    for name, (x, y) in zip(LETTERS, points, strict=False):
        axes.annotate(name, (x, y), (8, 6), textcoords="offset points")
    axes.plot(
        *out[asking], "*", color=ORANGE, markersize=15, label=f"average that {LETTERS[asking]} gets"
    )
    axes.plot(*blind, "x", color=SOFT, markersize=8, markeredgewidth=2, label="plain mean")
    axes.legend(loc="lower left", handletextpad=0.3, borderaxespad=0.0)
    axes.set_title(f"What {LETTERS[asking]} attends to: larger is more")
    axes.margins(0.12)
    axes.set_ylim(points[:, 1].min() - 1.3)
    axes.set_xticks([])
    axes.set_yticks([])

    bars, axes = canvas(height=280)
    names = LETTERS[: len(points)]
    heat(axes, weights, rows=list(names), columns=list(names), limit=1.0)
    axes.tick_params(axis="x", labelrotation=0)
    axes.set_ylabel("who asks")
    axes.set_title("Weights, one row for each who asks")
    _numbers(axes, weights)

    panels = (
        finish(
            plane,
            "average-plane",
            "Eight points in the plane. Those near the one that asks are drawn large, for it gives "
            "them weight; the average is a star among them, the plain mean a cross in the middle.",
        ),
        finish(
            bars,
            "average-weights",
            "A table of weights, eight rows and columns: high within each group of points, "
            "low elsewhere.",
        ),
    )
    best = int(p.argmax())
    gets, mean = (f"({x:.2f}, {y:.2f})" for x, y in (out[asking], blind))
    caption = (
        f"Point <b>{LETTERS[asking]}</b> asks. The weights of its row add up to "
        f"<b>{p.sum():.3f}</b>; most, <b>{p[best]:.2f}</b>, goes to <b>{LETTERS[best]}</b>, "
        f"least, {scientific(p.min())}, to {LETTERS[int(p.argmin())]}. It gets {gets}; equal "
        f"weights would give {mean}. Shaded: all points that any weights can reach."
    )
    parts = (
        paragraph(
            "Attention is an average. Every item of a sequence asks all items, gives each a "
            "weight, and takes the weighted average of what they hold. The weights are not "
            "fixed, as in a moving average; they come from the <i>content</i>: who resembles "
            "what I ask for counts more. Resemblance is a dot product; the exponential makes it "
            "positive, the division makes the weights of a row add up to 1."
        ),
        formula(
            r"\text{out}_i = \sum_j p_{ij} \, v_j, \quad "
            r"p_{ij} = \frac{e^{q_i \cdot k_j}}{\sum_m e^{q_i \cdot k_m}}"
        ),
        paragraph(
            "Here each point is its own question, its own key and its own value. Weights are "
            "positive and add up to 1, so no output can leave the hull of the values: attention "
            "mixes, it does not invent."
        ),
        figure(panels, caption),
    )
    return Step("average", "A weighted average, weighted by content", parts, panels)


def _hull(points: Array) -> list[int]:
    """Return the corners of the convex hull in order, by walking round it."""
    start = int(points[:, 0].argmin())
    corners = [start]
    while True:
        here = points[corners[-1]]
        best = (corners[-1] + 1) % len(points)
        for other in range(len(points)):
            (ax, ay), (bx, by) = points[best] - here, points[other] - here
            if ax * by - ay * bx < 0:
                best = other
        if best == start:
            return corners
        corners.append(best)


def _numbers(axes: Any, matrix: Array) -> None:
    """Write the numbers into the cells of a heat map of weights."""
    for (i, j), value in np.ndenumerate(matrix):
        shown = f"{value:.2f}".lstrip("0") if value >= 0.005 else "0"
        colour = "white" if value > 0.55 else "#30363d"
        axes.text(j, i, shown, ha="center", va="center", fontsize=9.5, color=colour)


# 2. Queries, keys and values


def projections() -> Step:
    """Show queries, keys and values as three learned projections."""
    n, d_model, d_k = 10, 16, 8
    x = gaussian(1, n, d_model)
    layer = SelfAttention(d_model, d_k, d_k, seed=1)
    same = SelfAttention(d_model, d_k, d_k, seed=1)
    same.params["w_k"][...] = same.params["w_q"]
    scores = {
        name: (x @ one.params["w_q"]) @ (x @ one.params["w_k"]).T / math.sqrt(d_k)
        for name, one in (("different", layer), ("equal", same))
    }
    skew = {name: float(np.abs(s - s.T).max()) for name, s in scores.items()}

    three, axes = canvas(height=190, ncols=4, width_ratios=(d_model, d_k, d_k, d_k))
    projected = (x @ layer.params[f"w_{letter}"] for letter in "qkv")
    for ax, name, matrix in zip(axes, "XQKV", (x, *projected), strict=True):
        heat(ax, matrix, signed=True, limit=3.0)
        ax.set_title(name)
    panels = [
        finish(
            three,
            "projections",
            "Four matrices of coloured cells: the input X with sixteen columns, and its queries, "
            "keys and values with eight columns each.",
        )
    ]
    both, axes = canvas(height=190, ncols=2)
    for ax, (name, s) in zip(axes, scores.items(), strict=True):
        heat(ax, s, signed=True)
        ax.set_title(f"{name} weights")
    panels.append(
        finish(
            both,
            "projections-scores",
            "Two square matrices of scores. With different weights it has no symmetry; with equal "
            "weights it is symmetric about its diagonal.",
        )
    )
    caption = (
        f"{n} items of {d_model} numbers through a fresh <code>SelfAttention({d_model}, {d_k})"
        f"</code>, {d_k} numbers each; red is negative, blue positive. Right, their scores: the "
        f"largest difference between a score and its mirror image is "
        f"<b>{scientific(skew['different'])}</b> with different weights and "
        f"<b>{scientific(skew['equal'])}</b> with equal ones."
    )
    parts = (
        paragraph(
            "What I look for, how I can be found, and what I have to say are different things. "
            "So each item is projected three times, by three matrices that are learned: its "
            "<b>query</b>, its <b>key</b> and its <b>value</b>."
        ),
        formula(r"Q = X W_Q, \quad K = X W_K, \quad V = X W_V"),
        paragraph(
            "With a query of its own, an item need not look for what resembles itself, and "
            "looking need not be mutual: a verb may look for its subject while the subject looks "
            "elsewhere. The matrix of scores is then not symmetric."
        ),
        figure(panels, caption),
    )
    return Step("projections", "Queries, keys, values", parts, tuple(panels))


# 3. The scale


def scaling() -> Step:
    """Show why scores are divided by the root of the key dimension."""
    dims = np.array([4, 16, 64, 256, 1024, 4096])
    pairs, rows, keys = 4096, 256, 64
    variance: list[float] = []
    gradient: dict[bool, list[float]] = {True: [], False: []}
    top: dict[bool, list[float]] = {True: [], False: []}
    shown: dict[bool, Array] = {}
    for d in map(int, dims):
        a, b = gaussian(d, pairs, d), gaussian(d + 1, pairs, d)
        variance.append(float(np.einsum("nd,nd->n", a, b).var()))
        for scaled in (True, False):
            p = diagnostics.attention_weights(
                a[:rows], b[:keys], scale=1 / math.sqrt(d) if scaled else 1.0
            ).astype(np.float64)
            two, three = np.square(p).sum(axis=1), np.power(p, 3).sum(axis=1)
            gradient[scaled].append(float(np.median(np.sqrt(two - 2 * three + two**2))))
            top[scaled].append(float(p.max(axis=1).mean()))
            if d == 256:
                shown[scaled] = p[0]
    slope = float(np.polyfit(np.log(dims), np.log(variance), 1)[0])

    first, axes = canvas()
    axes.loglog(dims, dims, color=SOFT, linewidth=1.2, label="dₖ")
    axes.loglog(dims, variance, "o", color=BLUE, label="variance of q · k")
    axes.loglog(dims, variance / dims, "s", color=ORANGE, label="the same, scaled")
    axes.set_ylim(0.2, 3e5)
    decades(axes.yaxis)
    axes.legend(loc="upper left")
    _powers(axes, dims)
    axes.set_xlabel("dₖ")
    axes.set_title("Variance grows as dₖ")

    second, axes = canvas(nrows=2, sharex=True)
    for ax, scaled in zip(axes, (False, True), strict=True):
        ax.bar(range(keys), shown[scaled], color=BLUE if scaled else RED, width=0.85)
        ax.set_title(f"{'with' if scaled else 'without'} 1/√dₖ")
        ax.set_ylim(0, 1.1 * shown[scaled].max())
    axes[1].set_xlabel(f"key (of {keys}), dₖ = 256")

    third, axes = canvas()
    axes.loglog(dims, gradient[True], "o-", color=BLUE, label="with 1/√dₖ")
    axes.loglog(dims, gradient[False], "o-", color=RED, label="without")
    axes.legend(loc="lower left")
    _powers(axes, dims)
    axes.set_xlabel("dₖ")
    decades(axes.yaxis)
    axes.set_title("Norm of the softmax's derivative")

    fourth, axes = canvas()
    axes.semilogx(dims, top[True], "o-", color=BLUE, label="with 1/√dₖ")
    axes.semilogx(dims, top[False], "o-", color=RED, label="without")
    axes.set_ylim(0, 1)
    axes.legend(loc="upper left")
    _powers(axes, dims)
    axes.set_xlabel("dₖ")
    axes.set_title("Largest weight of a row (mean)")

    panels = (
        finish(
            first,
            "scale-variance",
            "The variance of dot products against the key dimension, on logarithmic axes: the "
            "points lie on the line variance = dimension; scaled scores stay at one.",
        ),
        finish(
            second,
            "scale-row",
            "One row of softmax weights twice: without the scale nearly all weight is on one key, "
            "with the scale it is spread over many.",
        ),
        finish(
            third,
            "scale-gradient",
            "The norm of the softmax's gradient against the key dimension: it stays with the "
            "scale and falls without it.",
        ),
        finish(
            fourth,
            "scale-largest",
            "The largest weight of a row against the key dimension: it stays small with the scale "
            "and approaches one without it.",
        ),
    )
    measured = ", ".join(f"{v:.4g} for {d}" for d, v in zip(dims, variance, strict=True))
    caption = (
        f"{pairs:,} pairs of random vectors for each d<sub>k</sub>. Measured variance: {measured}; "
        f"the exponent of the best power law is <b>{slope:.3f}</b>. At "
        f"d<sub>k</sub> = {dims[-1]} the largest of {keys} weights is "
        f"<b>{top[False][-1]:.2f}</b> on average without the scale and {top[True][-1]:.2f} with "
        f"it; the norm of the derivative, in the median row, is "
        f"{scientific(gradient[False][-1])} without and "
        f"<b>{scientific(gradient[True][-1])}</b> with it."
    )
    parts = (
        paragraph(
            f"A dot product is a sum of {inline('d_k')} terms. If the numbers in "
            "q and k are independent, with mean 0 and variance 1, each term has variance 1, and "
            "variances of independent terms add up:"
        ),
        formula(r"\text{Var}(q \cdot k) = \sum_{c=1}^{d_k} \text{Var}(q_c k_c) = d_k"),
        paragraph(
            "Dividing by the standard deviation gives scores of variance 1, whatever the dimension:"
        ),
        formula(r"\text{Attention}(Q, K, V) = \text{softmax}(Q K^T / \sqrt{d_k}) \, V"),
        paragraph(
            "Without it the largest score of a row runs away from the others, the softmax puts "
            "everything on one key, and its derivative, which holds a factor "
            + inline(r"p_i (\delta_{ij} - p_j)")
            + ", vanishes: nothing is learned any more."
        ),
        figure(panels, caption),
    )
    return Step("scale", "Why the scores are divided by √d<sub>k</sub>", parts, panels)


def _powers(axes: Any, dims: Array) -> None:
    axes.set_xticks(dims, [str(d) for d in dims])
    axes.minorticks_off()


# 4. Softmax


def softmax() -> Step:
    """Show rows of weights as probability distributions."""
    n, d = 12, 16
    x = gaussian(8, n, d)
    q, k, _ = SelfAttention(d, seed=4).qkv(x)
    p = diagnostics.attention_weights(q, k)
    sums = p.astype(np.float64).sum(axis=1)
    scales = np.geomspace(0.02, 60, 40)
    stats = [diagnostics.row_stats(q, k, scale=float(s)) for s in scales]
    entropy = np.array([s.entropy.mean() for s in stats]) / math.log(n)
    largest = np.array([s.max_weight.mean() for s in stats])
    usual = diagnostics.row_stats(q, k)

    left, axes = canvas(height=260)
    image = heat(axes, p)
    axes.set_xlabel("key")
    axes.set_ylabel("row, each adds up to 1")
    axes.set_title("Weights p")
    scale(left, image, axes, "")
    right, axes = canvas(height=260)
    axes.semilogx(scales, entropy, color=BLUE, label="entropy / log n")
    axes.semilogx(scales, largest, color=ORANGE, label="largest weight")
    axes.axvline(1 / math.sqrt(d), color=SOFT, linewidth=1, linestyle=":")
    axes.text(1 / math.sqrt(d) * 1.12, 1.03, "1/√dₖ", color=INK, fontsize=10)
    axes.set_ylim(0, 1.1)
    decades(axes.xaxis)
    axes.legend(loc="center left")
    axes.set_xlabel("scale of the scores")
    axes.set_title("From everybody to one")
    panels = (
        finish(left, "softmax-weights", "A matrix of weights, a few dark cells in every row."),
        finish(
            right,
            "softmax-entropy",
            "Entropy and largest weight against the scale of the scores: entropy falls from one "
            "to zero while the largest weight rises to one.",
        ),
    )
    caption = (
        f"All {p.size} weights lie between {scientific(float(p.min()))} and {p.max():.2f}; the "
        f"sums of the rows differ from 1 by at most <b>{scientific(float(abs(sums - 1).max()))}"
        f"</b>. At the usual scale a row has {usual.entropy.mean() / math.log(2):.2f} bits of "
        f"entropy on average, of {math.log2(n):.2f} for equal weights."
    )
    parts = (
        paragraph(
            "A row of weights is a probability distribution over the keys: positive, with sum 1, "
            "never exactly 0. A hard choice of the best key would have no derivative; the "
            "softmax is a choice that can be learned, because every weight answers to every score."
        ),
        formula(r"p_{ij} = e^{s_{ij} - \text{lse}_i}, \quad \text{lse}_i = \log \sum_j e^{s_{ij}}"),
        paragraph(
            "How sharp the choice is depends on the scale of the scores: at 0 all keys weigh the "
            "same, towards infinity the best key takes all."
        ),
        figure(panels, caption),
    )
    return Step("softmax", "Rows are probabilities", parts, panels)


# 5. The causal mask


def causal() -> Step:
    """Show the causal mask: who writes must not read ahead."""
    n, d, changed = 16, 16, 10
    x = gaussian(5, n, d)
    layer = SelfAttention(d, seed=6)
    q, k, _ = layer.qkv(x)
    p = {c: diagnostics.attention_weights(q, k, causal=c) for c in (False, True)}
    other = x.copy()
    other[changed] = gaussian(6, d)
    moved = {c: np.abs(layer(other, causal=c) - layer(x, causal=c)).max(axis=1) for c in p}
    out, backward = layer.vjp(x, causal=True)
    dout = np.zeros_like(out)
    dout[changed - 1] = 1.0
    dx = np.abs(backward(dout).dx).max(axis=1)

    maps, axes = canvas(height=190, ncols=2)
    for ax, c in zip(axes, p, strict=True):
        heat(ax, p[c], limit=float(p[True].max()))
        ax.set_title("causal" if c else "all keys")
        ax.set_xlabel("key")
    axes[0].set_ylabel("row")
    bars, axes = canvas(height=190, nrows=2, sharex=True)
    for ax, c in zip(axes, moved, strict=True):
        colours = [ORANGE if i >= changed else BLUE for i in range(n)]
        ax.bar(range(n), moved[c], color=colours)
        ax.set_title("causal" if c else "all keys")
        ax.set_yticks([])
        ax.set_xticks(range(0, n, 2))
    axes[1].set_xlabel(f"output whose change is drawn (input {changed} was changed)")
    panels = (
        finish(
            maps,
            "causal-weights",
            "Two matrices of weights. The causal one is empty above its diagonal.",
        ),
        finish(
            bars,
            "causal-change",
            f"How much each output changes when input {changed} changes: all do without the mask, "
            "only that one and later ones with it.",
        ),
    )
    caption = (
        f"Input {changed} of {n} is replaced. Outputs before it change by up to "
        f"{scientific(float(moved[False][:changed].max()))} without the mask and by "
        f"<b>{scientific(float(moved[True][:changed].max()))}</b> with it. Gradients obey it too: "
        f"that of output {changed - 1} is up to {scientific(float(dx[:changed].max()))} for "
        f"inputs up to {changed - 1} and <b>{scientific(float(dx[changed:].max()))}</b> for later "
        "ones."
    )
    parts = (
        paragraph(
            "A model that predicts the next word must not see it. The causal mask hides all keys "
            "that come later, by a score of −∞, whose weight is exactly 0:"
        ),
        formula(r"s_{ij} = q_i \cdot k_j / \sqrt{d_k} \quad \text{for } j \le i"),
        formula(r"s_{ij} = -\infty \quad \text{for } j > i"),
        paragraph(
            "One pass over a text is then as many exercises as it has words: every output is a "
            "prediction made from its past alone."
        ),
        figure(panels, caption),
    )
    return Step("causal", "The causal mask", parts, panels)


# 6. Positions


def positions() -> Step:
    """Show that attention is blind for order until positions are added."""
    n, d = 12, 64
    x = gaussian(7, n, d)
    order = np.random.default_rng(2).permutation(n)
    layer = SelfAttention(d, seed=7)
    encode = positional.Sinusoidal(d)
    change = {
        name: np.abs(layer(f(x[order])) - layer(f(x))[order]).max(axis=1)
        for name, f in (("without", lambda a: a), ("with", encode))
    }
    left, axes = canvas()
    axes.bar(np.arange(n) - 0.2, change["without"], 0.4, color=BLUE, label="without positions")
    axes.bar(np.arange(n) + 0.2, change["with"], 0.4, color=ORANGE, label="with positions")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 1e3)
    decades(axes.yaxis)
    axes.legend(loc="upper left")
    axes.set_xlabel("output")
    axes.set_title("Change when inputs are shuffled")

    rows = positional.sinusoidal_encoding(96, d)
    middle, axes = canvas(nrows=2, height_ratios=(3, 2))
    heat(axes[0], rows, signed=True)
    axes[0].set_ylabel("position")
    axes[0].set_title("Sinusoidal encoding, 96 × 64")
    offsets = np.arange(-47, 48)
    axes[1].plot(offsets, rows[48 + offsets] @ rows[48] / (d / 2), color=BLUE)
    axes[1].set_title("resemblance of positions")
    axes[1].set_xlabel("distance")

    distances = np.unique(np.geomspace(1, 4096, 120).astype(int))
    one = gaussian(11, 256, 1, 128)
    norm = np.square(one).sum(axis=-1).mean()
    decay = {}
    for base in (1e4, 5e5):
        rotate = positional.Rotary(128, base=base)
        turned = rotate(np.repeat(one, len(distances), axis=1), positions=distances)
        decay[base] = (turned * one).sum(axis=-1).mean(axis=0) / norm
    rotate = positional.Rotary(d)
    near, far = (rotate(x, positions=np.arange(n) + offset) for offset in (0, 1000))
    drift = float(np.abs(near @ near.T - far @ far.T).max() / np.abs(near @ near.T).max())
    right, axes = canvas()
    for colour, (base, line) in zip((BLUE, ORANGE), decay.items(), strict=True):
        axes.semilogx(distances, line, color=colour, label=f"base {base:,.0f}")
    axes.axhline(0, color=SOFT, linewidth=0.8)
    decades(axes.xaxis)
    axes.legend(loc="upper right")
    axes.set_xlabel("distance")
    axes.set_title("Rotary: resemblance of equals")

    alibi = positional.Alibi(4)
    empty = np.zeros((4, 65, 8), np.float32)
    fade = diagnostics.attention_weights(
        empty, empty, rows=np.array([64]), causal=True, **alibi.arguments(65, 65)
    )[:, 0]
    last, axes = canvas()
    for h, colour in enumerate((BLUE, ORANGE, GREEN, VIOLET)):
        axes.semilogy(np.arange(-64, 1), fade[h], color=colour, label=f"head {h + 1}")
    axes.set_ylim(1e-6, 2)
    decades(axes.yaxis)
    axes.legend(loc="lower center", ncols=2)
    axes.set_xlabel("key, relative to the row")
    axes.set_title("ALiBi: weight by distance")
    panels = (
        finish(
            left,
            "positions-shuffled",
            "How far outputs differ after shuffling: rounding only without positions, more than "
            "ten thousand times as much with them.",
        ),
        finish(
            middle,
            "positions-sinusoidal",
            "The sinusoidal encoding: waves that get longer from column to column. Below, the "
            "resemblance of two positions, with a peak at distance zero.",
        ),
        finish(
            right,
            "positions-rotary",
            "The score of a vector with itself, rotated, against the distance: it falls from one, "
            "slower with the larger base.",
        ),
        finish(
            last,
            "positions-alibi",
            "The weights of four heads under ALiBi against distance: straight lines on a "
            "logarithmic axis, each with its own slope.",
        ),
    )
    beyond = int(distances[np.abs(decay[1e4] - 0.5).argmin()])
    caption = (
        f"{n} inputs are shuffled; outputs, put back in order, differ by at most "
        f"<b>{scientific(float(change['without'].max()))}</b> without positions (rounding) and "
        f"{scientific(float(change['with'].max()))} with them. Rotary with base 10,000: the "
        f"score of equals is halved at a distance of about {beyond}; moving everything by 1,000 "
        f"places changes scores by {scientific(drift)} of the largest (rounding)."
    )
    parts = (
        paragraph(
            "Nothing so far knows about order. Shuffle the inputs, and the outputs are shuffled in "
            "the same way and otherwise unchanged: to attention a sentence is a bag of words. "
            "Order has to be put in. There are three places for it."
        ),
        paragraph(
            "<b>Into the input</b>: a vector for each position is added, made of waves of many "
            "lengths, or learned."
        ),
        formula(r"\text{PE}_{m,2c} = \sin m \theta_c, \quad \text{PE}_{m,2c+1} = \cos m \theta_c"),
        formula(r"\theta_c = 10000^{-2c/d}"),
        paragraph(
            "<b>Into queries and keys</b>: rotary encoding turns each pair of their numbers by an "
            "angle that grows with the position. Turning both leaves only the difference, so a "
            "score knows how far apart two items are, and not where they stand:"
        ),
        formula(r"(R_m q) \cdot (R_n k) = q \cdot R_{n-m} k"),
        paragraph(
            "<b>Into the scores</b>: ALiBi takes a slope times the distance away; other schemes "
            "learn a number for each range of distances."
        ),
        figure(panels, caption),
    )
    return Step("positions", "Blind for order, and the cure", parts, panels)


# 7. Heads


def heads() -> Step:
    """Show several heads, each with a view of its own."""
    n, d, H = 48, 64, 4
    x = gaussian(9, n, d)
    layer = MultiHeadAttention(d, H, positions=positional.Alibi(H), seed=3)
    q, k, _ = layer.qkv(x)
    slopes = positional.Alibi(H).arguments(n, n)
    p = diagnostics.attention_weights(q, k, causal=True, **slopes)
    i, j = np.indices((n, n))
    reach = (p * np.abs(i - j)).sum(axis=-1).mean(axis=-1)
    maps, axes = canvas(height=330, nrows=2, ncols=2)
    for h, ax in enumerate(axes.flat):
        heat(ax, np.sqrt(p[h]), limit=1.0)
        ax.set_title(f"head {h + 1}: {reach[h]:.1f} back")
    sizes = {
        one: sum(value.size for value in MultiHeadAttention(d, one).params.values())
        for one in (1, 2, 4, 8)
    }
    panels = (
        finish(
            maps,
            "heads",
            "Four matrices of weights for the same input, from one close to the diagonal to one "
            "spread over the whole past.",
        ),
    )
    caption = (
        f"Four heads of a fresh layer see the same {n} items; each has its own projections and "
        f"its own ALiBi slope. They look {', '.join(f'{r:.1f}' for r in reach)} items back on "
        f"average. Numbers to learn in a layer of width {d} with {', '.join(map(str, sizes))} "
        f"heads: {', '.join(f'{size:,}' for size in sizes.values())}. Colours: "
        "square root of the weight."
    )
    parts = (
        paragraph(
            "One average is one view: a word that needs its subject <i>and</i> its tense gets a "
            "blend of both. Several heads look at the same time, each with smaller queries, keys "
            "and values of its own; their outputs are laid side by side and mixed once more."
        ),
        formula(r"\text{head}_h = \text{Attention}(X W_Q^h, X W_K^h, X W_V^h)"),
        formula(r"\text{out} = \text{concat}(\text{head}_1, \dots, \text{head}_H) \, W_O"),
        figure(panels, caption),
    )
    return Step("heads", "Several heads", parts, panels)
