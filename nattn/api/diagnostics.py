"""Attention that can be looked at without the ``Nq x Nk`` matrix of its weights.

What is asked for is computed from q and k again: some rows of the matrix, a small picture of all of
it, what each key is given, what each row does. All but the chosen rows takes memory that grows
linearly with the input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from .. import backends
from ..call import results
from ..call.arguments import Arguments, shows_arguments
from ..call.checks import Array, as_array, check_integer, check_name, show
from ..call.device_arrays import DeviceArray
from ..call.optional import require
from ..call.problem import Problem


class RowStats(NamedTuple):
    """What each row of the weights looks like; see `row_stats`."""

    entropy: NDArray[Any]
    max_weight: NDArray[Any]
    argmax: NDArray[np.int64]


@shows_arguments
def attention_weights(
    q: Array,
    k: Array,
    rows: Any = None,
    *,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> NDArray[Any]:
    """Return the weights of the softmax, exactly, of chosen rows.

    ::

        w[i, j] = exp(s[i, j] - lse[i])    with s and lse of `nattn.attention`; 0 where hidden

    Parameters
    ----------
    q, k : array_like
        As in `nattn.attention`, in host memory.
    rows : int, slice or (R,) integers or bools, optional
        Which rows, as NumPy would index them: negative numbers count from the end, a single number
        leaves out the axis of rows, and a row may come several times. All of them by default,
        which is the whole matrix.
    backend : {"auto", "cpu", "cuda", "reference"}, default "auto"
        As in `nattn.attention`. All take the float64 computation of the reference, on the CPU.
    **args
        All other arguments of `nattn.attention` that its result depends on: causal, window_size,
        mask, bias, score_mod, layout and so on, but for dropout.

    Returns
    -------
    ndarray
        ``(B, Hq, R, Nk)`` in both layouts, ``(Hq, R, Nk)`` or ``(R, Nk)`` for lower ranks; in the
        compute dtype, float64 for float64 and float32 for others. With a sink the weights of a row
        sum to less than 1. A row that sees no key and one past q_lens are 0; one whose lse is NaN
        is NaN at the keys that it sees.

    Raises
    ------
    ValueError, TypeError
        For bad input, and for ``dropout_p > 0``: these are the weights before dropout.
    IndexError
        For rows that do not exist, and for a score_mod or mask_mod as in `nattn.attention`.
    NotImplementedError
        For arrays on a GPU.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k = np.random.default_rng(0).standard_normal((2, 8, 5000, 64), dtype=np.float32)
    >>> last = nattn.attention_weights(q, k, rows=[-1], causal=True)
    >>> last.shape
    (8, 1, 5000)
    >>> bool(np.allclose(last.sum(axis=-1), 1))
    True
    """
    problem = _problem(q, k, 0, args)
    chosen = _row_numbers(rows, problem.Nq)
    check_name("backend", backend, backends.NAMES)
    found = backends.load("reference").weights(problem, chosen.reshape(-1))
    found = found.astype(problem.compute, copy=False)
    if chosen.ndim == 0:
        found = found[:, :, 0]
    return _as_given(problem, found)


@shows_arguments
def attention_map(
    q: Array,
    k: Array,
    size: int | tuple[int, int] = (256, 256),
    *,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> NDArray[Any]:
    """Return a small picture of the matrix of weights: the mean of each of its blocks.

    Row ``i`` lies in block ``i * s0 // Nq`` and key ``j`` in block ``j * s1 // Nk``. One pass over
    the scores, in memory that grows linearly with the input.

    Parameters
    ----------
    q, k : array_like
        As in `nattn.attention`, in host memory.
    size : int or (int, int), default (256, 256)
        Into how many blocks rows and keys are cut, at least 1; one number counts for both. There
        are no more than rows or keys: ``s0 = min(size[0], Nq)`` and ``s1 = min(size[1], Nk)``, and
        where both are smaller than `size` the picture is the matrix itself.
    backend : {"auto", "cpu", "reference"}, default "auto"
        As in `nattn.attention`.
    **args
        All other arguments of `nattn.attention` that its result depends on, but for dropout.

    Returns
    -------
    ndarray
        ``(B, Hq, s0, s1)`` in both layouts, ``(Hq, s0, s1)`` or ``(s0, s1)`` for lower ranks; in
        the compute dtype. Hidden pairs count as 0, also in the size of a block: its mean times its
        area is the sum of its weights, and over a row of blocks that is the number of rows that
        see a key (without sinks). A row whose lse is NaN makes the blocks NaN that it sees a key
        of.

    Raises
    ------
    ValueError, TypeError, IndexError
        As in `attention_weights`.
    NotImplementedError
        For arrays on a GPU, for ``backend="cuda"`` and for what the backend cannot do, as in
        `nattn.attention`.

    Notes
    -----
    The sums of a row's blocks are kept relative to the largest score so far, as the streaming
    softmax keeps its output; in the end they are divided by their own sum. Where a row is NaN, a
    part of the rows takes a second pass.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k = np.random.default_rng(0).standard_normal((2, 5000, 64), dtype=np.float32)
    >>> picture = nattn.attention_map(q, k, size=(50, 100), causal=True)
    >>> picture.shape
    (50, 100)
    >>> area = (5000 // 50) * (5000 // 100)
    >>> bool(np.allclose(area * picture.sum(axis=1), 5000 // 50))  # each row's weights sum to 1
    True
    >>> bool(picture[0, 2:].any())  # what is to come is hidden
    False
    """
    blocks = _map_size(size)
    problem = _problem(q, k, 0, args)
    s0, s1 = min(blocks[0], problem.Nq), min(blocks[1], problem.Nk)
    door = backends.choose(problem, backend, "observe")
    found = door.observe(problem, size=(s0, s1), stats=False)["map"]
    area = _block_lengths(problem.Nq, s0)[:, None] * _block_lengths(problem.Nk, s1)
    with np.errstate(all="ignore"):
        mean: NDArray[Any] = found / area.astype(problem.compute)
    return _as_given(problem, mean)


@shows_arguments
def row_stats(q: Array, k: Array, *, backend: str = "auto", **args: Unpack[Arguments]) -> RowStats:
    """Describe each row of the matrix of weights, in one pass and linear memory.

    ::

        entropy[i]    = -sum_j w[i, j] * log(w[i, j])    natural logarithm, 0 * log(0) = 0
        max_weight[i] = max_j w[i, j]
        argmax[i]     = the visible key of the largest score

    Of keys whose weights round to the same number argmax is one, the first within a block of keys.
    A row that attends to ``n`` keys alike has the entropy ``log(n)``, one that attends to a single
    key has 0.

    Parameters
    ----------
    q, k : array_like
        As in `nattn.attention`, in host memory.
    backend : {"auto", "cpu", "reference"}, default "auto"
        As in `nattn.attention`.
    **args
        All other arguments of `nattn.attention` that its result depends on, but for dropout.

    Returns
    -------
    RowStats
        Named tuple ``(entropy, max_weight, argmax)`` of arrays ``(B, Hq, Nq)`` in both layouts,
        ``(Hq, Nq)`` or ``(Nq,)`` for lower ranks; the first two in the compute dtype, argmax in
        int64. A row that sees no key and one past q_lens have 0, 0 and -1; one whose lse is NaN
        has NaN, NaN and -1. A sink takes its share of the weights and is no key: it is left out of
        all three.

    Raises
    ------
    ValueError, TypeError, IndexError
        As in `attention_weights`.
    NotImplementedError
        As in `attention_map`.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q = np.zeros((3, 2))
    >>> k = np.random.default_rng(0).standard_normal((3, 2))
    >>> stats = nattn.row_stats(q, k, causal=True)  # all scores are 0
    >>> bool(np.allclose(stats.entropy, np.log([1, 2, 3])))
    True
    >>> stats.argmax.tolist()
    [0, 0, 0]
    """
    problem = _problem(q, k, 0, args)
    found = backends.choose(problem, backend, "observe").observe(problem, size=None, stats=True)
    return RowStats(*(_as_given(problem, found[name]) for name in RowStats._fields))


@shows_arguments
def key_mass(
    q: Array,
    k: Array,
    lse: Any = None,
    *,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> NDArray[Any]:
    """Return how much each key is attended to in all: the column sums of the weights.

    ::

        mass[j] = sum_i w[i, j]

    Parameters
    ----------
    q, k : array_like
        As in `nattn.attention`, in host memory.
    lse : array_like, optional
        What ``nattn.attention(..., return_lse=True)`` returned beside its output for the same
        arguments. With it one pass over the scores is enough, otherwise it takes two.
    backend : {"auto", "cpu", "cuda", "reference"}, default "auto"
        As in `nattn.attention`.
    **args
        All other arguments of `nattn.attention` that its result depends on, but for dropout.

    Returns
    -------
    ndarray
        ``(B, Hq, Nk)`` in both layouts, ``(Hq, Nk)`` or ``(Nk,)`` for lower ranks; in the compute
        dtype. One number for each query head, also where heads share their keys. Keys that no row
        sees have 0; a row whose lse is NaN makes the keys NaN that it sees. Without sinks the sum
        over the keys is the number of rows that see one.

    Raises
    ------
    ValueError, TypeError, IndexError
        As in `attention_weights`.
    NotImplementedError
        For arrays on a GPU and for what the backend cannot do, as in `nattn.attention`.

    Notes
    -----
    It is the gradient with respect to a single column of values, of a loss that sums the output:
    ``d sum_i out[i] / d v[j] = sum_i w[i, j]``. So it is computed by the backward pass, which reads
    no values for it. The gradient would be summed over query heads that share a key head: each
    gets keys of its own, which takes a copy of k where several key heads are shared.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k = np.zeros((2, 4, 3))  # four rows and keys, all scores are 0
    >>> nattn.key_mass(q, k, causal=True).round(3).tolist()
    [2.083, 1.083, 0.583, 0.25]
    """
    p = _problem(q, k, 1, args)
    one: NDArray[Any] = np.ones((), p.dtype)
    out = np.zeros((p.B, p.Hq, p.Nq, 1), p.dtype)
    exact = np.zeros(out.shape, p.compute)  # NaN in rows whose lse is NaN, which tells enough
    found = None if lse is None else _checked_lse(p, lse)
    module = backends.choose(p, backend, "backward")
    if found is None:
        found = np.empty((p.B, p.Hq, p.Nq), p.compute)
        module.forward(p, out, found)
    dout = np.broadcast_to(one, out.shape)
    own = _with_own_keys(p)
    options = {"exact": True} if module.KEEPS_EXACT else {}
    mass: NDArray[Any]
    mass = module.backward(own, dout, exact, found, None, frozenset("v"), **options)["v"][..., 0]
    with np.errstate(all="ignore"):
        mass = np.ascontiguousarray(mass, p.compute)
    return _as_given(p, mass)


# What is asked for


def _problem(q: Any, k: Any, Dv: int, args: Any) -> Problem:
    """Check the arguments of a call that has no values; `Dv` columns of zeros stand for them."""
    q, k = as_array("q", q), as_array("k", k)
    for name, x in (("q", q), ("k", k)):
        if isinstance(x, DeviceArray):
            raise NotImplementedError(
                f"{name}: expected an array in host memory, got one {x.source}; what looks at "
                "weights makes its arrays there: copy q and k"
            )
    v = np.broadcast_to(np.zeros((), k.dtype), (*k.shape[:-1], Dv))
    problem = Problem.build(q, k, v, **args)
    if problem.dropout_p > 0.0:
        raise ValueError(
            f"dropout_p: expected 0 where weights are looked at, which are those before dropout, "
            f"got {problem.dropout_p}"
        )
    return problem


def _as_given(p: Problem, x: NDArray[Any]) -> NDArray[Any]:
    """Leave out the axes that the caller's arrays lack."""
    found: NDArray[Any] = x[(0,) * (4 - p.rank)]
    return found


def _row_numbers(rows: Any, Nq: int) -> NDArray[np.int64]:
    """Return which rows are meant, by NumPy's rules; a 0-D array for a single one."""
    every = np.arange(Nq, dtype=np.int64)
    if rows is None:
        return every
    expected = f"row numbers from {-Nq} to {Nq - 1}" if Nq else "no row number, for there is no row"
    if not isinstance(rows, slice):
        rows = as_array("rows", rows)
        if isinstance(rows, DeviceArray):
            raise TypeError(f"rows: expected {expected} in host memory, got an array {rows.source}")
        if rows.size == 0 and rows.ndim == 1:
            rows = rows.astype(np.int64)  # [] has a float dtype
        if rows.dtype.kind not in "iub" or (rows.ndim == 0 and rows.dtype.kind == "b"):
            raise TypeError(f"rows: expected {expected}, got {show(rows[()])}")
        if rows.ndim > 1:
            raise ValueError(f"rows: expected one axis at most, got shape {rows.shape}")
    try:
        return np.asarray(every[rows])
    except (IndexError, TypeError) as error:
        raise type(error)(f"rows: expected {expected}: {error}") from None


def _map_size(size: Any) -> tuple[int, int]:
    expected = "a number of blocks from 1, or one for rows and one for keys"
    numbers = size if isinstance(size, (tuple, list)) else (size, size)
    if len(numbers) != 2:
        raise ValueError(f"size: expected {expected}, got {show(size)}")
    s0, s1 = (check_integer("size", n, expected) for n in numbers)
    if s0 < 1 or s1 < 1:
        raise ValueError(f"size: expected {expected}, got {show(size)}")
    return s0, s1


def _block_lengths(n: int, blocks: int) -> NDArray[np.int64]:
    """Return how many of the indices below n lie in each block."""
    if blocks == 0:
        return np.zeros(0, np.int64)
    return np.diff(-(-np.arange(blocks + 1, dtype=np.int64) * n // blocks))


def _checked_lse(p: Problem, lse: Any) -> NDArray[Any]:
    """Return ``(B, Hq, Nq)`` from the lse that was passed."""
    out = np.broadcast_to(np.zeros((), p.dtype), p.out_shape)
    found: NDArray[Any] = results.check_incoming(p, out, out, lse, None)[2]
    return found


def _with_own_keys(p: Problem) -> Problem:
    """Give each query head a key head of its own."""
    if p.group == 1:
        return p

    def spread(x: NDArray[Any]) -> NDArray[Any]:
        wide = np.broadcast_to(x[:, :, None], (p.B, p.Hkv, p.group, *x.shape[2:]))
        return wide.reshape(p.B, p.Hq, *x.shape[2:])  # a view where there is one key head

    return dataclasses.replace(p, k=spread(p.k), v=spread(p.v), Hkv=p.Hq, group=1)


# Pictures


def plot_attention(
    weights: Any,
    *,
    words: Sequence[str] | None = None,
    row_words: Sequence[str] | None = None,
    titles: Sequence[str] | None = None,
    tokens: tuple[int, int] | None = None,
    ax: Any = None,
    **imshow: Any,
) -> Any:
    """Draw weights, or a map of them, with matplotlib.

    Parameters
    ----------
    weights : array_like
        ``(R, M)``, what `attention_weights` or `attention_map` returned for one head, or
        ``(H, R, M)`` for a picture of each head on one scale of colours. Axes of length 1 before
        them are dropped. NaN is drawn in red.
    words : sequence of str, optional
        The words that are attended to, one for each of the M columns; of the rows, too, if there
        are as many and `row_words` is not given.
    row_words : sequence of str, optional
        The words that attend, one for each of the R rows.
    titles : sequence of str, optional
        One for each picture; "head 0" and so on by default where there are several.
    tokens : (int, int), optional
        How many rows and keys the picture stands for: its axes count these, not blocks. Only
        without words.
    ax : matplotlib Axes or a sequence of them, optional
        Where to draw, one for each picture. By default a new figure of pyplot is made, with a bar
        that explains the colours; ``matplotlib.pyplot.show()`` shows it.
    **imshow
        Passed to matplotlib's ``imshow``: cmap, vmin, vmax, norm and so on. By default colours run
        from 0 to the largest weight.

    Returns
    -------
    matplotlib Axes or list of Axes
        A list for ``(H, R, M)``. Of a new figure ``ax.figure.savefig(...)`` writes a file.

    Raises
    ------
    ValueError, TypeError
        If shapes, words, titles or axes do not fit together.
    ImportError
        Without matplotlib.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 8))
    >>> weights = nattn.attention_weights(q, k, causal=True)
    >>> ax = nattn.plot_attention(weights, words="the cat sat down".split())
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['the', 'cat', 'sat', 'down']
    """
    pictures, single = _pictures(weights)
    count, n_rows, n_keys = pictures.shape
    if row_words is None and words is not None and n_rows == n_keys:
        row_words = words
    columns = _labels("words", words, n_keys, "column")
    lines = _labels("row_words", row_words, n_rows, "row")
    if titles is None and not single:
        titles = [f"head {h}" for h in range(count)]
    names = _labels("titles", titles, count, "picture")
    extent = _extent(tokens, columns, lines)
    axes, bar = _axes(ax, single, count, n_rows, n_keys, columns is not None or lines is not None)
    finite = pictures[np.isfinite(pictures)]
    if "norm" not in imshow:
        largest = float(finite.max(initial=0.0))
        imshow = {"vmin": 0.0, "vmax": largest if largest > 0 else 1.0} | imshow
    shown: dict[str, Any] = {"cmap": "magma", "interpolation": "nearest", "aspect": "auto"} | imshow
    if extent is not None:
        shown = {"extent": extent} | shown
    image = None
    for i, (one, picture) in enumerate(zip(axes, pictures, strict=True)):
        image = one.imshow(picture, **shown)
        image.set_cmap(image.get_cmap().with_extremes(bad="red"))
        # words are no formulas: parse_math off, or a dollar sign begins one
        if columns is not None:
            one.set_xticks(range(n_keys), columns, rotation=90, parse_math=False)
        if lines is not None:
            one.set_yticks(range(n_rows), lines, parse_math=False)
        if names is not None:
            one.set_title(names[i], parse_math=False)
    if bar and image is not None:
        axes[0].figure.colorbar(image, ax=axes, label="weight")
    return axes[0] if single else axes


def _pictures(weights: Any) -> tuple[NDArray[Any], bool]:
    """Return ``(H, R, M)``, and whether there is but one picture with no axis of heads."""
    x = as_array("weights", weights)
    expected = "shape (R, M) or (H, R, M)"
    if isinstance(x, DeviceArray) or x.dtype.kind not in "fiu":
        raise TypeError(f"weights: expected real numbers of {expected}, got {show(weights)}")
    while x.ndim > 2 and x.shape[0] == 1:
        x = x[0]
    if x.ndim not in (2, 3) or x.size == 0:
        raise ValueError(f"weights: expected {expected} with no axis of length 0, got {x.shape}")
    return (x[None], True) if x.ndim == 2 else (x, False)


def _labels(name: str, given: Any, n: int, of: str) -> list[str] | None:
    if given is None:
        return None
    expected = f"{n} strings, one for each {of}"
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)):
        raise TypeError(f"{name}: expected {expected}, got {show(given)}")
    if len(given) != n:
        raise ValueError(f"{name}: expected {expected}, got {len(given)}")
    return [str(x) for x in given]


def _extent(
    tokens: Any, columns: list[str] | None, lines: list[str] | None
) -> tuple[float, float, float, float] | None:
    if tokens is None:
        return None
    expected = "two numbers from 1, of rows and of keys"
    if not isinstance(tokens, (tuple, list)) or len(tokens) != 2:
        raise TypeError(f"tokens: expected {expected}, got {show(tokens)}")
    rows, keys = (check_integer("tokens", n, expected) for n in tokens)
    if rows < 1 or keys < 1:
        raise ValueError(f"tokens: expected {expected}, got {show(tokens)}")
    if columns is not None or lines is not None:
        raise ValueError("tokens: expected None beside words, which name each row and column")
    return -0.5, keys - 0.5, rows - 0.5, -0.5


def _axes(
    ax: Any, single: bool, count: int, n_rows: int, n_keys: int, words: bool
) -> tuple[list[Any], bool]:
    """Return an Axes for each picture, and whether they are new."""
    if ax is not None:
        axes = [ax] if single else list(np.ravel(ax))
        if len(axes) != count:
            raise ValueError(f"ax: expected {count} axes, one for each picture, got {len(axes)}")
        for one in axes:
            if not hasattr(one, "imshow"):
                raise TypeError(f"ax: expected a matplotlib Axes, got {show(one)}")
        return axes, False
    pyplot = require("matplotlib.pyplot", "demo", "plot_attention")
    across = min(count, 4)
    down = -(-count // across)
    largest = 8.0 if single else 3.0
    # a line of text for each word, within what a screen shows
    width, height = (
        min(16.0, max(largest, 0.25 * n)) if words else largest for n in (n_keys, n_rows)
    )
    _, grid = pyplot.subplots(
        down,
        across,
        figsize=(min(24.0, across * width), min(24.0, down * height)),
        squeeze=False,
        layout="constrained",
    )
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    return axes[:count], True
