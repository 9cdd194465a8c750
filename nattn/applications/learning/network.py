"""A small network around layers of attention, its loss, and gradient descent, in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ...call.checks import check_count
from ...call.progress import Progress
from ...nn import MultiHeadAttention

Array = NDArray[Any]
Params = dict[str, Array]

Batch = Callable[[np.random.Generator], tuple[Array, Array]]


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
