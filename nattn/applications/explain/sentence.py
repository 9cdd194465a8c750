"""The last chapter: how a real model reads a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..minilm import MiniLM
from .drawing import GREEN, ORANGE, SOFT, Array, Panel, canvas, finish, heat, pixels
from .page import Step, choices, choices_style, figure, formula, paragraph, similarities, text

OTHERS = (
    "She played the piano all evening.",
    "The pianist touched the black and white keys.",
    "He could not unlock his car.",
    "The key to the front door is missing.",
    "Bread is baked in the oven.",
)
"""Compared with the reader's sentence: two of music, two of locks, one of neither."""

PUNCTUATION = set(".,;:!?-\"'()[]")


@dataclass(frozen=True)
class Reading:
    """A sentence in the model: tokens, weights and rows.

    Attributes
    ----------
    words : list of str
        Its N tokens, from [CLS] to [SEP].
    weights : ndarray
        ``(layers, heads, N, N)``.
    states : ndarray
        ``(1 + layers, N, d_model)``: the rows before the first layer and after each, of length 1.
    """

    words: list[str]
    weights: Array
    states: Array

    @classmethod
    def of(cls, model: MiniLM, sentence: str) -> Reading:
        """Read a sentence."""
        words, weights = model.attention(sentence)
        tokens = model.tokenize(sentence)
        x = model.first_rows(tokens)
        states = [x[0].copy()]
        for layer in model.layers:
            layer(x, tokens.lengths)
            states.append(x[0].copy())
        rows = np.stack(states)
        rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
        return cls(words, weights, rows)

    @property
    def spoken(self) -> Array:
        """Which tokens are words: neither [CLS] and [SEP] nor punctuation."""
        inner = np.array([not set(word) <= PUNCTUATION for word in self.words])
        inner[[0, -1]] = False
        return inner


def chapter(model: MiniLM, sentence: str) -> Step:
    """Show which words of a sentence attend to which, in every layer and head.

    Parameters
    ----------
    model : MiniLM
        The model.
    sentence : str
        Not longer than the model's positions.
    """
    reading = Reading.of(model, sentence)
    n_layers, n_heads, n, _ = reading.weights.shape
    shares = _shares(reading)
    chosen, about_chosen = _chosen(reading, shares)
    overview = _overview(reading)
    parts = [
        paragraph(
            "The same steps, once more, with weights that were learned: <b>all-MiniLM-L6-v2</b>, "
            f"an encoder of {n_layers} layers with {n_heads} heads each, made to turn sentences "
            "into vectors that point the same way if they mean the same. It runs here on "
            "<code>nattn.nn.MultiHeadAttention</code>. In each layer the rows attend to each "
            "other, then each goes through a small network of its own:"
        ),
        formula(r"Y = \text{norm}(X + \text{attention}(X))"),
        formula(r"Z = \text{norm}(Y + \text{gelu}(Y W_1 + b_1) \, W_2 + b_2)"),
        paragraph(
            f"It reads: <b>“{text(sentence)}”</b> — {n} tokens with [CLS] and [SEP], which the "
            "model puts around every sentence; “##” continues a word."
        ),
        "<h3>Every layer and every head</h3>",
        paragraph(
            f"{n_layers * n_heads} heads, a row of pictures for each layer. Rows are the words "
            "that ask, columns the words they attend to; the colour is the square root of the "
            "weight. <b>Choose one</b> to see it large."
        ),
        _browser(reading, shares),
        "<h3>Heads with a habit</h3>",
        paragraph(
            "Nobody told the heads what to do. These were found by asking, for each habit, which "
            "head has most of it in this sentence."
        ),
        figure(chosen, about_chosen),
    ]
    panels: list[Panel] = [overview, *chosen]
    followed, told = _followed(reading)
    if followed:
        parts += [
            "<h3>What a word takes from its company</h3>",
            paragraph(
                "With every layer a word's row takes in more of the rows it attends to: one word "
                "in two places is two rows, and each place has its own company."
            ),
            figure(followed, told),
        ]
        panels += followed
    alike, likeness = _similarities(model, sentence)
    parts += [
        "<h3>A sentence as one vector</h3>",
        paragraph("The mean of the last layer's rows, scaled to length 1, is the sentence:"),
        formula(r"\text{embedding} = \frac{m}{\lVert m \rVert}, \quad m = \frac{1}{N} \sum_i x_i"),
        alike,
        paragraph(likeness),
    ]
    style = choices_style(n_layers * n_heads)
    return Step("model", "A real model reads a sentence", tuple(parts), tuple(panels), style)


# What heads do

HABITS = {
    "previous": "the word before",
    "next": "the word behind",
    "self": "itself",
    "begin": "[CLS]",
    "end": "[SEP]",
    "far": "words further away",
}


def _shares(reading: Reading) -> dict[str, Array]:
    """Return how much of a head's weight each habit gets, ``(layers, heads)`` each.

    It is the mean over the rows of words: rows of [CLS] and [SEP] do not count. The rest, up to
    1, goes to punctuation further away.
    """
    n = len(reading.words)
    i, j = np.indices((n, n))
    inner = (j > 0) & (j < n - 1)
    where = {
        "previous": (j == i - 1) & inner,
        "next": (j == i + 1) & inner,
        "self": j == i,
        "begin": (j == 0) & (i > 0),
        "end": (j == n - 1) & (i < n - 1),
        "far": (abs(i - j) > 1) & reading.spoken,
    }
    asking = reading.spoken
    if not asking.any():
        asking = np.ones(n, bool)
    return {
        name: (reading.weights * mask)[..., asking, :].sum(axis=-1).mean(axis=-1)
        for name, mask in where.items()
    }


def _strongest(reading: Reading, weights: Array) -> tuple[int, int] | None:
    """Return the row and key of the largest weight between two words that are not neighbours."""
    n = len(reading.words)
    i, j = np.indices((n, n))
    able = reading.spoken & reading.spoken[:, None] & (abs(i - j) > 1)
    if not able.any():
        return None
    best = int(np.where(able, weights, -1.0).argmax())
    return best // n, best % n


def _chosen(reading: Reading, shares: dict[str, Array]) -> tuple[list[Panel], str]:
    """Draw, for each habit, the head that has most of it."""
    panels, told = [], []
    for habit in ("previous", "next", "begin", "far"):
        share = shares[habit]
        layer, head = map(int, np.unravel_index(share.argmax(), share.shape))
        weights = reading.weights[layer, head]
        name = f"layer {layer + 1}, head {head + 1}"
        panels.append(
            _with_words(
                weights,
                reading.words,
                f"{HABITS[habit][0].upper()}{HABITS[habit][1:]}: {name}",
                f"model-{habit}",
                f"Weights of {name}, the head with most weight on {HABITS[habit]}; words are on "
                "both axes.",
            )
        )
        line = f"<b>{HABITS[habit]}</b> gets {share[layer, head]:.0%} in {name}"
        if habit == "far" and (pair := _strongest(reading, weights)) is not None:
            asks, asked = (reading.words[p] for p in pair)
            line += f" (most: “{text(asks)}” gives “{text(asked)}” {weights[pair]:.2f})"
        told.append(line)
    return panels, (
        "Share of the weights of all words, on average: " + "; ".join(told) + ". Colours: "
        "square root of the weight, so that small ones are seen; the strongest is 1."
    )


CELL = 13
"""Pixels of a word on an axis."""

MOST_WORDS = 80
"""With more tokens than these the axes have no words: the picture shows the pattern alone."""


def _with_words(weights: Array, words: Sequence[str], title: str, name: str, alt: str) -> Panel:
    """Draw weights with the words on the axes, large enough to read them."""
    many = len(words) > MOST_WORDS
    side = 600 if many else max(330, CELL * len(words) + 70)
    drawn, axes = canvas(width=side, height=side + 20)
    shown = None if many else words
    heat(axes, np.sqrt(weights), rows=shown, columns=shown, limit=1.0)
    axes.tick_params(labelsize=10.5)
    axes.set_title(title)
    return finish(drawn, name, alt)


def _overview(reading: Reading) -> Panel:
    """Draw all heads small, for the folder of PNGs: the page has `_browser` instead."""
    n_layers, n_heads, n, _ = reading.weights.shape
    gap = 1 + n // 12
    tiles = np.full((n_layers, n_heads, n + gap, n + gap), np.nan)
    tiles[..., :n, :n] = np.sqrt(reading.weights)
    drawn, axes = canvas(width=760, height=400)
    heat(axes, np.block([list(layer) for layer in tiles]), limit=1.0, frame=False)
    middles = [(n + gap) * i + n / 2 - 0.5 for i in range(max(n_layers, n_heads))]
    axes.set_yticks(middles[:n_layers], [str(i + 1) for i in range(n_layers)])
    axes.set_xticks(middles[:n_heads], [str(i + 1) for i in range(n_heads)])
    axes.xaxis.tick_top()
    axes.set_ylabel("layer")
    axes.set_title("head", loc="center", fontweight="normal")
    alt = f"The weights of all {n_layers} layers (rows) and {n_heads} heads (columns)."
    return finish(drawn, "model-overview", alt)


def _browser(reading: Reading, shares: dict[str, Array]) -> str:
    """Return all heads, small, to choose from, and the chosen one, large, with its numbers."""
    n_layers, n_heads, *_ = reading.weights.shape
    names, small, about = [], [], []
    for layer in range(n_layers):
        for head in range(n_heads):
            weights = reading.weights[layer, head]
            names.append(f"Layer {layer + 1}, head {head + 1}")
            small.append(pixels(np.sqrt(weights)))
            goes = ", ".join(
                f"{HABITS[habit]} {share[layer, head]:.0%}" for habit, share in shares.items()
            )
            line = f"<b>{names[-1]}</b>: words give {goes}."
            if (pair := _strongest(reading, weights)) is not None:
                asks, asked = (text(reading.words[p]) for p in pair)
                line += f" Most between words: “{asks}” → “{asked}” {weights[pair]:.2f}."
            about.append(line)
    first = int(shares["far"].argmax())
    return choices(names, small, about, reading.words, n_heads, first)


# A word and its context


def _followed(reading: Reading) -> tuple[list[Panel], str]:
    """Follow a word that occurs twice, or else the longest, through the layers."""
    if not reading.spoken.any():
        return [], ""
    places = _twice(reading)
    word = reading.words[places[0]]
    seen = np.flatnonzero(reading.spoken)
    looks = np.sqrt(reading.weights[:, :, places][..., seen].mean(axis=1))  # (layers, places, seen)
    ranks = ("first", "second") if len(places) == 2 else ("",)
    panels, told = [], []
    n_layers = len(looks)
    for nth, rank in enumerate(ranks):
        name = " ".join(part for part in (rank, f"“{word}”") if part)
        drawn, axes = canvas(width=max(330, CELL * len(seen) + 50), height=200)
        heat(
            axes,
            looks[:, nth],
            rows=[str(layer + 1) for layer in range(n_layers)],
            columns=[reading.words[j] for j in seen],
            limit=float(looks.max()),
        )
        axes.set_ylabel("layer")
        axes.set_title(f"Where the {name} looks")
        alt = f"Mean weight over all heads from the {name} to each word, a row for each layer."
        panels.append(finish(drawn, f"model-looks-{nth + 1}", alt))
        others = np.array([reading.words[j] != word for j in seen])
        if others.any():
            best = int(np.where(others, looks[:, nth].mean(axis=0), -1.0).argmax())
            told.append(
                f"The {text(name)} looks most at “{text(reading.words[seen[best]])}” "
                f"({np.square(looks[:, nth, best]).mean():.1%} over all layers and heads)"
            )
    if len(places) == 2:
        apart, line = _apart(reading, *places)
        panels.append(apart)
        told.append(line)
    return panels, ". ".join([*told, "Colours: square root of the mean weight of all heads."])


def _apart(reading: Reading, one: int, two: int) -> tuple[Panel, str]:
    """Show which words' rows tell two occurrences of a word apart, layer by layer."""
    word = reading.words[one]
    alike = np.einsum("snd,smd->snm", reading.states, reading.states)
    same = alike[:, one, two]
    line = (
        f"The rows of the two “{text(word)}” have cosine <b>{same[0]:.2f}</b> before the first "
        f"layer and <b>{same[-1]:.2f}</b> after the last"
    )
    gap = alike[:, one] - alike[:, two]  # (stages, N), above 0 where nearer to the first
    able = reading.spoken & np.array([other != word for other in reading.words])
    stages = np.arange(len(gap))
    drawn, axes = canvas(height=230)
    ends = [(ORANGE, "first", 1.0), (GREEN, "second", -1.0)] if able.any() else []
    for colour, rank, sign in ends:
        other = int(np.where(able, sign * gap[-1], -np.inf).argmax())
        name = f"“{reading.words[other]}”"
        axes.plot(stages, sign * gap[:, other], "o-", color=colour, label=f"{name}: to the {rank}")
        line += f"; {text(name)} is nearer to the {rank} by <b>{sign * gap[-1, other]:+.3f}</b>"
    axes.axhline(0, color=SOFT, linewidth=0.8)
    axes.set_xticks(stages, ["in", *map(str, stages[1:])])
    axes.set_xlabel("after layer")
    axes.set_title(f"Nearer to one “{word[:12]}” by (cosine)")
    if ends:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.4 * (high - low))
        axes.legend(loc="upper left")
    alt = f"How much nearer two other words are to the first or the second “{word}”, by layer."
    return finish(drawn, "model-apart", alt), line


def _twice(reading: Reading) -> list[int]:
    """Return two places of the longest word that occurs twice, or else one of the longest."""
    places: dict[str, list[int]] = {}
    for i in np.flatnonzero(reading.spoken):
        places.setdefault(reading.words[i], []).append(int(i))
    return max(places.values(), key=lambda where: (len(where) > 1, len(reading.words[where[0]])))[
        :2
    ]


# Sentences


def _similarities(model: MiniLM, sentence: str) -> tuple[str, str]:
    """Return a table of how alike sentences are, and a sentence about it."""
    sentences = [sentence, *OTHERS]
    vectors = model.encode(sentences)
    alike = vectors @ vectors.T
    shown = similarities(sentences, alike)
    upper = np.where(np.triu(np.ones_like(alike), 1) > 0, alike, -2.0)
    best = divmod(int(upper.argmax()), len(sentences))
    nearest = 1 + int(alike[0, 1:].argmax())
    return shown, (
        f"Nearest to the first sentence is number {nearest + 1} ({alike[0, nearest]:.2f}). Most "
        f"alike of all are {best[0] + 1} and {best[1] + 1} ({alike[best]:.2f})."
    )
