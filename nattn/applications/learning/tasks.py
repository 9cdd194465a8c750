"""What is learned: lists of key-value pairs, by content and by order, and a text."""

from __future__ import annotations

import importlib.resources
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...call.progress import Progress, part_of
from ...positional import Rotary, Sinusoidal
from .network import Array, Network, evaluate, train


@dataclass(frozen=True)
class Curve:
    """How one task was learned.

    Attributes
    ----------
    name : str
        "lookup", "order", "blind lookup", "blind order" or "text".
    label : str
        What to call it in a figure.
    losses : ndarray
        ``(steps,)``: mean cross-entropy of each batch, in nats, before the step that it led to.
    end_loss, accuracy : float
        Mean cross-entropy and share of right answers at the end: on fresh lists, or over the text.
    chance : float
        Loss that is beaten only by what the task is about: see `levels`.
    levels : dict
        Losses to compare with, and what each stands for; `chance` is one of them.
    network : Network
        What was trained.
    """

    name: str
    label: str
    losses: Array
    end_loss: float
    accuracy: float
    chance: float
    levels: dict[str, float]
    network: Network = field(repr=False, compare=False)


# Lists of pairs: what is asked for is found by content, and by order if its key comes twice

KEYS = VALUES = 16
"""Keys are the symbols from 0 on, values those from `KEYS` on."""

QUESTION = KEYS + VALUES
"""The symbol that stands for the value that is asked for."""

PAIRS = 8
"""Pairs in a list."""

FRESH = 1024
"""Lists of each task that a network is tested with; as many mirrored ones come on top."""


def lists(rng: np.random.Generator, count: int, repeats: int) -> Array:
    """Make lists of pairs in random order, each with a question at its end.

    Parameters
    ----------
    rng : Generator
        Where they come from.
    count : int
        How many.
    repeats : int
        How often a list gives each of its keys; a divisor of `PAIRS`. All values differ.

    Returns
    -------
    ndarray of int
        ``(count, PAIRS + 1, 2)``: key and value; in the last row a key of the list and `QUESTION`.
    """
    tokens = np.empty((count, PAIRS + 1, 2), np.int64)
    keys = rng.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)[:, : PAIRS // repeats]
    tokens[:, :PAIRS, 0] = rng.permuted(np.repeat(keys, repeats, axis=1), axis=1)
    values = rng.permuted(np.tile(np.arange(VALUES), (count, 1)), axis=1)[:, :PAIRS]
    tokens[:, :PAIRS, 1] = KEYS + values
    tokens[:, PAIRS, 0] = keys[np.arange(count), rng.integers(0, PAIRS // repeats, count)]
    tokens[:, PAIRS, 1] = QUESTION
    return tokens


def mirrored(tokens: Array) -> Array:
    """Return lists with their pairs in reverse order: what came last comes first."""
    return np.concatenate([tokens[:, -2::-1], tokens[:, -1:]], axis=1)


def answers(tokens: Array) -> Array:
    """Return the value, counted from 0, that each list gives the asked key last: ``(count, 1)``."""
    same = tokens[:, :PAIRS, 0] == tokens[:, PAIRS:, 0]
    last = PAIRS - 1 - same[:, ::-1].argmax(axis=1)
    return np.take_along_axis(tokens[:, :, 1], last[:, None], axis=1) - KEYS


def learn_lists(
    positions: bool = True,
    *,
    steps: int = 600,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Curve, Curve]:
    """Train one network on both tasks at once: keys that come once, and keys that come twice.

    Parameters
    ----------
    positions : bool, default True
        Whether the network is told of order, by sinusoidal positions.
    steps, seed, progress
        Number of steps; of the weights and the lists; as in `train`.

    Returns
    -------
    lookup, order : Curve
        The two tasks.

    Notes
    -----
    `chance` of "lookup" is ``log 8``: a guess among the values of the list, whose keys are not
    compared. That of "order" is ``log 2``, and without positions no network gets below it: its
    output is the same function of the *set* of pairs for a list and for its mirror image, where the
    other value of the key is the right one. It gives them p and p' with ``p + p' <= 1``, so the
    mean loss is ``-log(p p') / 2 >= log 2``, and at most one of the two answers is right. Lists
    that networks are tested with come with their mirror images, so this holds exactly.
    """
    network = Network(
        QUESTION + 1,
        VALUES,
        d_model=32,
        num_heads=4,
        layers=1,
        positions=Sinusoidal(32) if positions else None,
        seed=seed,
    )

    def batch(rng: np.random.Generator) -> tuple[Array, Array]:
        tokens = np.concatenate([lists(rng, 64, 1), lists(rng, 64, 2)])
        return tokens, answers(tokens)

    losses = train(network, batch, steps, parts=2, rate=5e-3, seed=seed, progress=progress)
    fresh = np.random.default_rng([seed, 1])
    tasks = (
        ("lookup", 1, math.log(PAIRS), f"a guess among the {PAIRS} values"),
        ("order", 2, math.log(2), "a guess among the key's two values"),
    )
    prefix, suffix = ("", "with positions") if positions else ("blind ", "without positions")
    curves = []
    for (name, repeats, chance, guess), loss in zip(tasks, losses, strict=True):
        tokens = lists(fresh, FRESH, repeats)
        tokens = np.concatenate([tokens, mirrored(tokens)])
        end_loss, accuracy = evaluate(network, tokens, answers(tokens))
        label = f"{name}, {suffix}"
        curves.append(
            Curve(prefix + name, label, loss, end_loss, accuracy, chance, {guess: chance}, network)
        )
    return curves[0], curves[1]


# A text: each character from those before it

TEXT = importlib.resources.files(__package__).joinpath("walrus.txt").read_text(encoding="utf-8")
"""Lewis Carroll, "The Walrus and the Carpenter", 1871."""

CONTEXT = 64
"""Characters in a window of the text: so many at most can be seen."""


def alphabet(text: str) -> str:
    """Return the characters of a text, each once, in order."""
    return "".join(sorted(set(text)))


def encode(text: str, characters: str) -> Array:
    """Return the number of each character of a text among `characters`.

    Raises
    ------
    ValueError
        If there are others in the text.
    """
    unknown = sorted(set(text) - set(characters))
    if unknown:
        raise ValueError(f"text: expected characters of {characters!r}, got {unknown}")
    number = {character: i for i, character in enumerate(characters)}
    return np.array([number[character] for character in text], np.int64)


def windows(text: Array, length: int = CONTEXT) -> tuple[Array, Array]:
    """Cut a text into windows and, for each of their characters, the one that comes next.

    Parameters
    ----------
    text : ndarray of int
        What `encode` returns.
    length : int
        Characters in a window. What is left at the end of the text is not used.

    Returns
    -------
    tokens, targets : ndarray
        ``(windows, length)`` each: no pair of neighbours comes twice.
    """
    starts = np.arange(0, len(text) - length, length)
    at = starts[:, None] + np.arange(length)
    return text[at], text[at + 1]


def entropies(tokens: Array, targets: Array) -> tuple[float, float]:
    """Return what is left to say of the next character: knowing none, and knowing the last one.

    Parameters
    ----------
    tokens, targets : ndarray of int
        Characters, and for each the next one.

    Returns
    -------
    unigram, bigram : float
        Entropy ``H(target)`` and conditional entropy ``H(target | token)`` of these pairs, in
        nats: the least mean cross-entropy, on them, of anything that sees nothing or `token` alone
        (T. M. Cover, J. A. Thomas, "Elements of Information Theory", 2006, theorem 2.6.3).

    Examples
    --------
    >>> import numpy as np
    >>> unigram, bigram = entropies(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]))
    >>> print(f"{unigram / np.log(2):.3f} {bigram / np.log(2):.3f} bits")
    0.811 0.500 bits
    """
    size = int(max(tokens.max(), targets.max())) + 1
    counts = np.bincount(tokens.ravel() * size + targets.ravel(), minlength=size * size)
    joint = counts.reshape(size, size) / tokens.size

    def entropy(p: Array) -> float:
        p = p[p > 0]
        return float(-(p * np.log(p)).sum())

    return entropy(joint.sum(axis=0)), entropy(joint.ravel()) - entropy(joint.sum(axis=1))


def learn_text(
    text: str = TEXT,
    *,
    steps: int = 400,
    seed: int = 0,
    progress: Progress | None = None,
    **args: Any,
) -> Curve:
    """Train a network under the causal mask to say the next character of a text.

    Parameters
    ----------
    text : str
        A few thousand characters.
    steps, seed, progress
        Number of steps; of the weights and the windows; as in `train`.
    **args
        Further arguments of `nattn.attention`, for every layer.

    Returns
    -------
    Curve
        `chance` is the bigram entropy of the text: see `entropies`. The end loss is that on the
        same text, which bigger networks learn by heart: what it shows is that attention brings the
        characters before the last to bear, for without them no network gets below `chance`.

    Raises
    ------
    ValueError
        If the text is too short for a window.
    """
    characters = alphabet(text)
    if len(text) <= CONTEXT:
        raise ValueError(f"text: expected more than {CONTEXT} characters, got {len(text)}")
    numbers = encode(text, characters)
    network = Network(
        len(characters),
        len(characters),
        d_model=48,
        num_heads=4,
        layers=2,
        positions=Rotary(12),
        seed=seed,
        **{"causal": True, **args},
    )

    def batch(rng: np.random.Generator) -> tuple[Array, Array]:
        at = rng.integers(0, len(numbers) - CONTEXT, (32, 1)) + np.arange(CONTEXT)
        return numbers[at], numbers[at + 1]

    (losses,) = train(network, batch, steps, rate=4e-3, seed=seed, progress=progress)
    tokens, targets = windows(numbers)
    end_loss, accuracy = evaluate(network, tokens, targets)
    unigram, bigram = entropies(tokens, targets)
    levels = {"no character seen": unigram, "the last character alone": bigram}
    label = "next character, causal"
    return Curve("text", label, losses, end_loss, accuracy, bigram, levels, network)


# All of it


def learn_all(progress: Progress | None = None, *, seed: int = 0) -> list[Curve]:
    """Train on everything: lists with and without positions, and the text.

    Parameters
    ----------
    progress : callable, optional
        Called with the fraction that is done.
    seed : int, default 0
        Of weights and data. Equal seeds give equal curves on one machine.

    Returns
    -------
    list of Curve
        "lookup" and "order" of one network, "blind lookup" and "blind order" of one without
        positions, and "text".
    """
    ends = (0.0, 0.2, 0.4, 1.0)  # of the time
    parts = [
        None if progress is None else part_of(progress, *both) for both in itertools.pairwise(ends)
    ]
    return [
        *learn_lists(True, seed=seed, progress=parts[0]),
        *learn_lists(False, seed=seed, progress=parts[1]),
        learn_text(seed=seed, progress=parts[2]),
    ]
