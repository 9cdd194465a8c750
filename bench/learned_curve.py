"""Heads learn what a distance is worth: ``python bench/learned_curve.py [FILE]``.

One layer of attention with three heads sees queries, keys and values, and what attention with three
known curves of the distance makes of them. It knows the curves by nothing but that, and learns a
number for each head and distance, by Adam, on new random inputs at every step. The picture shows
what it has learnt after some steps beside the curves that it was not shown: by default it is
docs/learned_curve.png. It takes some seconds and matplotlib, and is the same each time.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nattn

Array = NDArray[Any]

B, H, N, D = 4, 3, 256, 16
REACH = 48
"""Keys farther away share a number."""

SHOWN = (10, 50, 400)
"""After so many steps a curve is drawn; the last ends it."""

LEARNS = "score_mod.table"
PICTURE = Path(__file__).parents[1] / "docs" / "learned_curve.png"


def truth() -> dict[str, Array]:
    """Return a name of each head, and what it adds to a score at the distances 0 to REACH."""
    d = np.arange(REACH + 1)
    return {
        "nearer counts more: $-0.08\\,d$": -0.08 * d,
        "the token 12 steps back": 4.0 * np.exp(-(((d - 12) / 3.0) ** 2)),
        "every 16th token": 2.0 * np.cos(2 * np.pi * d / 16),
    }


def attend(table: Array) -> Any:
    """Return a score_mod; of a causal call only the first half of the table matters."""
    return functools.partial(nattn.mods.relative_position_bias, table=table, reach=REACH)


def train() -> tuple[dict[int, Array], list[float]]:
    """Return the tables after the steps of `SHOWN`, and the loss at each step."""
    rng = np.random.default_rng(0)
    curves = np.stack(list(truth().values())).astype(np.float32)
    known = np.zeros((H, 2 * REACH + 1), np.float32)
    known[:, : REACH + 1] = curves[:, ::-1]  # column REACH - d is the distance d
    table = np.zeros_like(known)
    mean, square = np.zeros_like(table), np.zeros_like(table)
    shown, losses = {}, []
    for step in range(1, SHOWN[-1] + 1):
        q, k, v = rng.standard_normal((3, B, H, N, D), dtype=np.float32)
        wanted = nattn.attention(q, k, v, causal=True, score_mod=attend(known))
        out, vjp = nattn.attention_vjp(q, k, v, causal=True, score_mod=attend(table))
        losses.append(float(((out - wanted) ** 2).mean()))
        d = vjp(2 * (out - wanted) / out.size, wrt=(LEARNS,)).dmods[LEARNS]
        mean, square = 0.9 * mean + 0.1 * d, 0.99 * square + 0.01 * d**2
        rate = 0.1 if step < 0.6 * SHOWN[-1] else 0.02
        size = np.sqrt(square / (1 - 0.99**step)) + 1e-12
        table = (table - rate * mean / (1 - 0.9**step) / size).astype(np.float32)
        if step in SHOWN:
            shown[step] = table[:, REACH::-1]
    return shown, losses


def centred(curve: Array) -> Array:
    """Subtract the mean: softmax does not know what is added to all scores of a row."""
    result: Array = curve - curve.mean()
    return result


def draw(file: str, shown: dict[int, Array], losses: list[float]) -> None:
    """Draw a panel for each head."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, H, figsize=(11, 3.6), sharex=True, layout="constrained")
    figure.suptitle("What each head adds to a score at a distance, learnt from outputs alone")
    shades = ("#9ecae1", "#4292c6", "#08519c")
    for head, (axes, (name, curve)) in enumerate(zip(panels, truth().items(), strict=True)):
        axes.plot(centred(curve), color="black", linewidth=4, alpha=0.25, label="truth")
        for (step, curves), shade in zip(shown.items(), shades, strict=True):
            label = f"after {step} steps (loss {losses[step - 1]:.0e})"
            axes.plot(centred(curves[head]), color=shade, linewidth=1.6, label=label)
        axes.set_title(f"head {head}: {name}", fontsize=10)
        axes.set_xlabel(f"distance d in tokens, backwards ({REACH}: or farther)", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("added to the score, less its mean")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Train, say how far it came, and draw."""
    file = sys.argv[1] if len(sys.argv) > 1 else str(PICTURE)
    shown, losses = train()
    for step, curves in shown.items():
        errors = [
            np.abs(centred(curves[head]) - centred(curve)).max()
            for head, curve in enumerate(truth().values())
        ]
        print(
            f"{step:4} steps: loss {losses[step - 1]:.1e}, farthest from the truth, by head: "
            + ", ".join(f"{x:.3f}" for x in errors)
        )
    draw(file, shown, losses)


if __name__ == "__main__":
    main()
