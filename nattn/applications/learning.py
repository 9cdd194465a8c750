"""Self-attention learns: three small tasks, gradients from nattn, and a few lines of Adam.

A list of key-value pairs in random order, and a question: the value of this key? Attention finds
it by content. If the list gives the key twice, and the later value counts, content is not enough:
without positions attention is blind to order, both values are as likely, and whatever is learned
the loss stays above ``log 2``. With positions the same network learns both tasks at once. Under
the causal mask it learns to continue a text, and does better than anything can that sees the last
character alone.

Everything that is not attention is here, forward and backward, in plain NumPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..call.checks import check_count
from ..call.progress import part_of
from ..nn.layers import MultiHeadAttention
from ..positional import Rotary, Sinusoidal

Array = NDArray[Any]
Params = dict[str, Array]
Progress = Callable[[float], object]
Batch = Callable[[np.random.Generator], tuple[Array, Array]]


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


# The network


class Network:
    """Embedding, layers of attention with residual connections, readout.

    ::

        x = sum of the embeddings of a row's symbols
        x = x + attention(x)                            for each layer
        logits = x @ w + b                              for the last rows

    Parameters
    ----------
    symbols : int
        Number of symbols; those of a list are 0 to ``symbols - 1``.
    answers : int
        Number of answers to choose from.
    d_model, num_heads, layers : int
        Length of a row, heads of each layer, and number of layers.
    positions : scheme of nattn.positional, optional
        What tells the layers of order; they share it.
    seed : int, default 0
        Of all weights. Embeddings are drawn from N(0, 1).
    dtype : dtype, default float32
        float32 or float64.
    **args
        Arguments of `nattn.attention` for every layer, ``causal=True`` for example.

    Attributes
    ----------
    params : dict
        All parameters: ``embedding`` ``(symbols, d_model)``, ``w`` ``(d_model, answers)``, ``b``,
        those of each layer under ``0.``, ``1.`` and so on, and those of the positions under
        ``positions.``. They are the arrays that the layers read: a change in place is learned.

    Examples
    --------
    >>> import numpy as np
    >>> from nattn.applications.learning import Network, cross_entropy
    >>> network = Network(symbols=5, answers=5, d_model=16, num_heads=2, layers=1, causal=True)
    >>> tokens = np.array([[0, 1, 2, 3], [4, 3, 2, 1]])
    >>> logits, backward = network.vjp(tokens)
    >>> logits.shape
    (2, 4, 5)
    >>> losses, dlogits = cross_entropy(logits, (tokens + 1) % 5)
    >>> for name, gradient in backward(dlogits).items():
    ...     network.params[name] -= 0.01 * gradient
    >>> after, _ = cross_entropy(network.vjp(tokens)[0], (tokens + 1) % 5)
    >>> bool(after.mean() < losses.mean())
    True
    """

    def __init__(
        self,
        symbols: int,
        answers: int,
        *,
        d_model: int,
        num_heads: int,
        layers: int,
        positions: Any = None,
        seed: int = 0,
        dtype: DTypeLike = np.float32,
        **args: Any,
    ) -> None:
        sizes = {"symbols": symbols, "answers": answers, "layers": layers}
        symbols, answers, layers = (check_count(name, value) for name, value in sizes.items())
        self.args = args
        self.layers = [
            MultiHeadAttention(
                d_model, num_heads, positions=positions, seed=seed + 1 + i, dtype=dtype
            )
            for i in range(layers)
        ]
        rng = np.random.default_rng(seed)
        self.params: Params = {
            "embedding": rng.standard_normal((symbols, d_model)).astype(dtype),
            # so small that at first every answer is about as likely
            "w": (rng.standard_normal((d_model, answers)) / d_model).astype(dtype),
            "b": np.zeros(answers, dtype),
        }
        for i, layer in enumerate(self.layers):
            self.params |= {_full_name(i, name): p for name, p in layer.params.items()}

    def vjp(
        self, tokens: ArrayLike, rows: int | None = None
    ) -> tuple[Array, Callable[[Array], Params]]:
        """Compute the logits, and the function that carries a gradient back to all parameters.

        Parameters
        ----------
        tokens : array_like of int
            ``(B, N)``, or ``(B, N, F)`` if each row of a list is made of F symbols.
        rows : int, optional
            How many of the last rows are read out; by default all.

        Returns
        -------
        logits : ndarray
            ``(B, rows, answers)``.
        backward : callable
            ``backward(dlogits)`` returns the gradients by the names of `params`.

        Raises
        ------
        ValueError, TypeError
            If the tokens are no such numbers, or there are fewer rows.
        """
        p = self.params
        tokens = _checked_tokens(tokens, len(p["embedding"]))
        B, N = tokens.shape[:2]
        rows = N if rows is None else check_count("rows", rows)
        if rows > N:
            raise ValueError(f"rows: expected at most the {N} of the tokens, got {rows}")

        x = p["embedding"][tokens].sum(axis=2)
        backwards = []
        for layer in self.layers:
            update, layer_backward = layer.vjp(x, **self.args)
            x = x + update
            backwards.append(layer_backward)
        read = x[:, N - rows :].reshape(B * rows, -1)
        logits = read @ p["w"] + p["b"]

        def backward(dlogits: Array) -> Params:
            dlogits = dlogits.reshape(B * rows, -1)
            grads = {"w": read.T @ dlogits, "b": dlogits.sum(axis=0)}
            dx = np.zeros_like(x)
            dx[:, N - rows :] = (dlogits @ p["w"].T).reshape(B, rows, -1)
            for i in reversed(range(len(self.layers))):
                found = backwards[i](dx)
                dx = dx + found.dx
                for name, gradient in found.dparams.items():
                    name = _full_name(i, name)  # what layers share adds up
                    grads[name] = grads[name] + gradient if name in grads else gradient
            grads["embedding"] = np.zeros_like(p["embedding"])
            np.add.at(grads["embedding"], tokens, dx[:, :, None])
            return grads

        return logits.reshape(B, rows, -1), backward


def _full_name(layer: int, name: str) -> str:
    """Return a network's name for a parameter of one of its layers."""
    return name if name.startswith("positions.") else f"{layer}.{name}"


def _checked_tokens(tokens: ArrayLike, symbols: int) -> Array:
    """Return tokens as ``(B, N, F)``."""
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got dtype {array.dtype}")
    if array.ndim not in (2, 3):
        raise ValueError(f"tokens: expected shape (B, N) or (B, N, F), got {array.shape}")
    if array.size and not (array.min() >= 0 and array.max() < symbols):
        raise ValueError(f"tokens: expected 0 to {symbols - 1}, got {array.min()} to {array.max()}")
    return array if array.ndim == 3 else array[:, :, None]


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the loss of each prediction, and the gradient of their mean.

    Parameters
    ----------
    logits : ndarray
        ``(..., answers)``.
    targets : ndarray of int
        ``(...)``: the right answers.

    Returns
    -------
    losses : ndarray
        ``(...)``: ``-log softmax(logits)[target]``, in nats.
    dlogits : ndarray
        ``(softmax(logits) - [answer == target]) / number of targets``.

    Examples
    --------
    >>> import numpy as np
    >>> losses, dlogits = cross_entropy(np.log([[0.25, 0.75]]), np.array([1]))
    >>> losses.round(6).tolist(), dlogits.round(6).tolist()
    ([0.287682], [[0.25, -0.25]])
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    at = targets[..., None]
    losses = -np.take_along_axis(log_p, at, axis=-1)[..., 0]

    dlogits = np.exp(log_p)
    np.put_along_axis(dlogits, at, np.take_along_axis(dlogits, at, axis=-1) - 1, axis=-1)
    dlogits /= targets.size
    return losses, dlogits


class Adam:
    """Gradient descent with a step size for each number, from its gradient's two moments.

    Parameters
    ----------
    params : dict
        Arrays, changed in place.
    rate : float, default 3e-3
        Step size.
    beta1, beta2 : float
        How slowly the running means of the gradient and of its square forget.
    eps : float
        Added to the root of the mean square.

    Notes
    -----
    D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", 2014, arXiv:1412.6980,
    algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> params = {"x": np.array([3.0, -4.0])}
    >>> adam = Adam(params, rate=0.1)
    >>> for _ in range(300):
    ...     adam.step({"x": 2 * params["x"]})  # of the loss x**2
    >>> bool(np.abs(params["x"]).max() < 0.01)
    True
    """

    def __init__(
        self,
        params: Params,
        rate: float = 3e-3,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-8,
    ) -> None:
        self.params, self.rate, self.eps = params, rate, eps
        self.beta1, self.beta2 = beta1, beta2
        self.steps = 0
        self._mean = {name: np.zeros_like(p) for name, p in params.items()}
        self._square = {name: np.zeros_like(p) for name, p in params.items()}

    def step(self, grads: Params, factor: float = 1.0) -> None:
        """Change every parameter by its gradient, with `factor` times the step size."""
        self.steps += 1
        bias1, bias2 = 1 - self.beta1**self.steps, 1 - self.beta2**self.steps
        for name, p in self.params.items():
            g, mean, square = grads[name], self._mean[name], self._square[name]
            mean += (1 - self.beta1) * (g - mean)
            square += (1 - self.beta2) * (g * g - square)
            p -= factor * self.rate * (mean / bias1) / (np.sqrt(square / bias2) + self.eps)


def train(
    network: Network,
    batch: Batch,
    steps: int,
    *,
    parts: int = 1,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Array:
    """Train a network by Adam; after half of the steps their size falls, linearly, to 0.

    Parameters
    ----------
    network : Network
        Its parameters are changed in place.
    batch : callable
        ``batch(rng)`` returns tokens ``(B, N)`` or ``(B, N, F)``, and targets ``(B, rows)`` for
        the last rows.
    steps : int
        Number of batches.
    parts : int, default 1
        Tasks in a batch: equal parts of B, one after the other.
    rate, seed : float, int
        Step size, and seed of the batches.
    progress : callable, optional
        Called with the fraction that is done.

    Returns
    -------
    ndarray
        ``(parts, steps)``: mean loss of each part of each batch.
    """
    rng = np.random.default_rng(seed)
    adam = Adam(network.params, rate)
    steps = check_count("steps", steps)
    losses = np.empty((parts, steps))
    for step in range(steps):
        tokens, targets = batch(rng)
        logits, backward = network.vjp(tokens, targets.shape[1])
        each, dlogits = cross_entropy(logits, targets)
        adam.step(backward(dlogits), min(1.0, 2 * (1 - step / steps)))
        losses[:, step] = each.reshape(parts, -1).mean(axis=1)
        if progress is not None:
            progress((step + 1) / steps)
    return losses


def evaluate(network: Network, tokens: Array, targets: Array) -> tuple[float, float]:
    """Return the mean cross-entropy, in nats, and the share of right answers."""
    logits, _ = network.vjp(tokens, targets.shape[1])
    losses, _ = cross_entropy(logits.astype(np.float64), targets)
    return float(losses.mean()), float((logits.argmax(axis=-1) == targets).mean())


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

TEXT = """\
The sun was shining on the sea,
Shining with all his might:
He did his very best to make
The billows smooth and bright--
And this was odd, because it was
The middle of the night.

The moon was shining sulkily,
Because she thought the sun
Had got no business to be there
After the day was done--
"It's very rude of him," she said,
"To come and spoil the fun!"

The sea was wet as wet could be,
The sands were dry as dry.
You could not see a cloud, because
No cloud was in the sky:
No birds were flying overhead--
There were no birds to fly.

The Walrus and the Carpenter
Were walking close at hand;
They wept like anything to see
Such quantities of sand:
"If this were only cleared away,"
They said, "it would be grand!"

"If seven maids with seven mops
Swept it for half a year,
Do you suppose," the Walrus said,
"That they could get it clear?"
"I doubt it," said the Carpenter,
And shed a bitter tear.

"O Oysters, come and walk with us!"
The Walrus did beseech.
"A pleasant walk, a pleasant talk,
Along the briny beach:
We cannot do with more than four,
To give a hand to each."

The eldest Oyster looked at him,
But never a word he said:
The eldest Oyster winked his eye,
And shook his heavy head--
Meaning to say he did not choose
To leave the oyster-bed.

But four young Oysters hurried up,
All eager for the treat:
Their coats were brushed, their faces washed,
Their shoes were clean and neat--
And this was odd, because, you know,
They hadn't any feet.

Four other Oysters followed them,
And yet another four;
And thick and fast they came at last,
And more, and more, and more--
All hopping through the frothy waves,
And scrambling to the shore.

The Walrus and the Carpenter
Walked on a mile or so,
And then they rested on a rock
Conveniently low:
And all the little Oysters stood
And waited in a row.

"The time has come," the Walrus said,
"To talk of many things:
Of shoes--and ships--and sealing-wax--
Of cabbages--and kings--
And why the sea is boiling hot--
And whether pigs have wings."

"But wait a bit," the Oysters cried,
"Before we have our chat;
For some of us are out of breath,
And all of us are fat!"
"No hurry!" said the Carpenter.
They thanked him much for that.

"A loaf of bread," the Walrus said,
"Is what we chiefly need:
Pepper and vinegar besides
Are very good indeed--
Now if you're ready, Oysters dear,
We can begin to feed."

"But not on us!" the Oysters cried,
Turning a little blue.
"After such kindness, that would be
A dismal thing to do!"
"The night is fine," the Walrus said.
"Do you admire the view?

"It was so kind of you to come!
And you are very nice!"
The Carpenter said nothing but
"Cut us another slice:
I wish you were not quite so deaf--
I've had to ask you twice!"

"It seems a shame," the Walrus said,
"To play them such a trick,
After we've brought them out so far,
And made them trot so quick!"
The Carpenter said nothing but
"The butter's spread too thick!"

"I weep for you," the Walrus said:
"I deeply sympathize."
With sobs and tears he sorted out
Those of the largest size,
Holding his pocket-handkerchief
Before his streaming eyes.

"O Oysters," said the Carpenter,
"You've had a pleasant run!
Shall we be trotting home again?"
But answer came there none--
And this was scarcely odd, because
They'd eaten every one.
"""
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
