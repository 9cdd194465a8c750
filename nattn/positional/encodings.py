"""Telling attention where things stand: without positions it sees a set, not a sequence.

Each scheme is a small class that says in ``acts_on`` what it changes:

====================  ==========  =========================================================
`Sinusoidal`          ``"x"``     adds waves of geometrically growing length to the input
`LearnedTable`        ``"x"``     adds a learnt row for each position to the input
`Rotary`              ``"qk"``    turns pairs of columns of queries and keys
`Alibi`               ``"scores"``  subtracts a multiple of the distance from each score
`T5Bias`              ``"scores"``  adds a learnt bias for each range of distances to each score
====================  ==========  =========================================================

``params`` holds what is learnt, under names. What acts on arrays is called with one and has a
``backward`` for its gradient; what acts on scores gives `arguments` for `nattn.attention`, and its
``backward`` takes what `nattn.attention_backward` takes. All of them take memory that grows
linearly with the length.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import backends
from ..api.functional import attention_backward
from ..call.checks import (
    Window,
    check_count,
    check_flag,
    check_integer,
    check_integers,
    check_name,
    float_dtype,
    host_array,
    overlaps_itself,
    share_memory,
)
from ..call.validators import check_window
from ..functions import mods
from ..vectors.dtypes import FLOAT32, FLOAT64

__all__ = [
    "Alibi",
    "LearnedTable",
    "Rotary",
    "Sinusoidal",
    "T5Bias",
    "rotary_frequencies",
    "sinusoidal_encoding",
]

_TABLE, _BIAS = 1, 2
"""Beside a seed: a layer of the same seed draws other numbers."""

FARTHEST = 1 << 53
"""Positions up to here are exact in float64."""


# Checking


def _number(name: str, value: Any, least: float, *, above: bool = False) -> float:
    expected = f"a finite number {'above' if above else 'of at least'} {least:g}"
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    x = float(value)
    if not math.isfinite(x) or x < least or (above and x == least):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return x


def _floats(name: str, value: Any) -> NDArray[Any]:
    """Return an array of native float32 or float64 in host memory."""
    array = host_array(name, value)
    native = array.dtype.newbyteorder("=")
    if native not in (FLOAT32, FLOAT64):
        raise TypeError(f"{name}: expected dtype float32 or float64, got {array.dtype}")
    return array.astype(native, copy=False)


def _rows(name: str, value: Any, width: int, offset: Any) -> tuple[NDArray[Any], int]:
    """Return an array ``(..., N, width)`` and the position of its first row."""
    x = _floats(name, value)
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(f"{name}: expected shape (..., N, {width}), got {x.shape}")
    expected = "the position of the first row, 0 or more"
    first = check_integer("offset", offset, expected)
    if first < 0:
        raise ValueError(f"offset: expected {expected}, got {first}")
    return x, first


# Added to the input


def sinusoidal_encoding(
    n: int, d_model: int, base: float = 10000.0, dtype: Any = np.float32, offset: int = 0
) -> NDArray[Any]:
    """Return sines and cosines of geometrically growing wavelengths, a row for each position.

    Parameters
    ----------
    n : int
        Number of positions, 0 or more.
    d_model : int
        Number of columns, 1 or more.
    base : float, default 10000.0
        The longest wavelength is nearly ``2 pi base`` positions; above 0.
    dtype : dtype, default float32
        float32 or float64. Angles are computed in float64 and the results rounded.
    offset : int, default 0
        Position of the first row, 0 or more.

    Returns
    -------
    ndarray
        ``(n, d_model)``: column ``2 i`` is ``sin(pos / base**(2 i / d_model))`` and column
        ``2 i + 1`` the cosine.

    Raises
    ------
    TypeError, ValueError
        For numbers or a dtype that are not as above.

    Notes
    -----
    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.5. Some libraries put all
    sines before all cosines, which is the same up to the order of columns.

    Examples
    --------
    >>> sinusoidal_encoding(2, 4).round(4).tolist() == [
    ...     [0.0, 1.0, 0.0, 1.0],
    ...     np.float32([0.8415, 0.5403, 0.01, 1.0]).tolist(),
    ... ]
    True
    """
    n, d_model = check_count("n", n, 0), check_count("d_model", d_model)
    base = _number("base", base, 0.0, above=True)
    offset = check_count("offset", offset, 0)
    table = np.empty((n, d_model), float_dtype("dtype", dtype))
    frequencies = base ** (-np.arange(0, d_model, 2) / d_model)
    angles = np.arange(offset, offset + n, dtype=np.float64)[:, None] * frequencies
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles[:, : d_model // 2])
    return table


class Sinusoidal:
    """Fixed waves added to the input: `sinusoidal_encoding`.

    Parameters
    ----------
    d_model : int
        Columns of the input.
    base : float, default 10000.0
        Sets the longest wavelength.

    Attributes
    ----------
    acts_on : str
        ``"x"``, the input before queries, keys and values are made of it.
    params : dict
        Empty: nothing is learnt.

    Examples
    --------
    >>> positions = Sinusoidal(8)
    >>> x = np.zeros((2, 5, 8), np.float32)
    >>> bool((positions(x)[1] == sinusoidal_encoding(5, 8)).all())
    True
    >>> bool((positions(x[:, 4:], offset=4) == positions(x)[:, 4:]).all())  # the last row alone
    True
    """

    acts_on: ClassVar[str] = "x"

    def __init__(self, d_model: int, base: float = 10000.0) -> None:
        self.d_model = check_count("d_model", d_model)
        self.base = _number("base", base, 0.0, above=True)
        self.params: dict[str, NDArray[Any]] = {}

    def __call__(self, x: ArrayLike, offset: int = 0) -> NDArray[Any]:
        """Return ``x`` plus the encoding of its rows.

        Parameters
        ----------
        x : array_like
            ``(..., N, d_model)``, float32 or float64.
        offset : int, default 0
            Position of the first row.

        Returns
        -------
        ndarray
            Of x's shape and dtype.

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape, or a negative offset.
        """
        array, first = _rows("x", x, self.d_model, offset)
        n = array.shape[-2]
        encoding = sinusoidal_encoding(n, self.d_model, self.base, array.dtype, first)
        return np.asarray(array + encoding)

    def backward(
        self, dx: ArrayLike, offset: int = 0
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the gradient with respect to the input, which is `dx` itself, and of no params.

        Raises
        ------
        TypeError, ValueError
            As the call does.
        """
        return _rows("dx", dx, self.d_model, offset)[0], {}


class LearnedTable:
    """A learnt row for each position, added to the input, as in BERT and GPT-2.

    Parameters
    ----------
    max_len : int
        Number of positions.
    d_model : int
        Columns of the input.
    seed : int, default 0
        Of the initial table: normal, with the standard deviation 0.02.
    dtype : dtype, default float32
        float32 or float64.

    Attributes
    ----------
    acts_on : str
        ``"x"``, the input before queries, keys and values are made of it.
    params : dict
        ``{"table": (max_len, d_model)}``.

    Examples
    --------
    >>> positions = LearnedTable(10, 4)
    >>> x = np.zeros((3, 6, 4), np.float32)
    >>> y = positions(x, offset=2)
    >>> dx, dparams = positions.backward(np.ones_like(y), offset=2)
    >>> dparams["table"][:, 0].tolist()  # three sequences have a row at positions 2 to 7
    [0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]
    """

    acts_on: ClassVar[str] = "x"

    def __init__(self, max_len: int, d_model: int, seed: int = 0, dtype: Any = np.float32) -> None:
        self.max_len = check_count("max_len", max_len)
        self.d_model = check_count("d_model", d_model)
        rng = np.random.default_rng([check_count("seed", seed, 0), _TABLE])
        table = 0.02 * rng.standard_normal((max_len, d_model))
        self.params: dict[str, NDArray[Any]] = {"table": table.astype(float_dtype("dtype", dtype))}

    def _place(self, name: str, value: Any, offset: Any) -> tuple[NDArray[Any], slice]:
        x, first = _rows(name, value, self.d_model, offset)
        end = first + x.shape[-2]
        if end > self.max_len:
            raise ValueError(
                f"{name}: expected rows for positions below max_len = {self.max_len}, got "
                f"{x.shape[-2]} from position {first} on"
            )
        return x, slice(first, end)

    def __call__(self, x: ArrayLike, offset: int = 0) -> NDArray[Any]:
        """Return ``x`` plus the rows of the table.

        Parameters
        ----------
        x : array_like
            ``(..., N, d_model)``, float32 or float64.
        offset : int, default 0
            Position of the first row; ``offset + N <= max_len``.

        Returns
        -------
        ndarray
            Of x's shape and dtype.

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape, or positions that the table lacks.
        """
        array, rows = self._place("x", x, offset)
        return np.asarray(array + self.params["table"][rows].astype(array.dtype, copy=False))

    def backward(
        self, dx: ArrayLike, offset: int = 0
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the gradient with respect to the input, which is `dx` itself, and of the table.

        Parameters
        ----------
        dx : array_like
            Gradient with respect to what the call returned.
        offset : int, default 0
            As in the call.

        Returns
        -------
        dx : ndarray
            The same.
        dparams : dict
            ``{"table": ...}``, of the table's shape and dtype; summed over all sequences in
            float64.

        Raises
        ------
        TypeError, ValueError
            As the call does.
        """
        array, rows = self._place("dx", dx, offset)
        table = np.zeros_like(self.params["table"])
        table[rows] = array.sum(axis=tuple(range(array.ndim - 2)), dtype=np.float64)
        return array, {"table": table}


# Rotary

_SCALING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        (
            *("factor", "low_freq_factor", "high_freq_factor"),
            "original_max_position_embeddings",
        ),
        (),
    ),
}
"""For each type of scaling the keys that it needs, and those that it may have."""


def _checked_scaling(scaling: Any, base: float) -> tuple[str, dict[str, Any]]:
    """Return the type of a scaling and its numbers."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected None or a dict with 'rope_type', got {scaling!r}")
    given = {key: value for key, value in scaling.items() if value is not None}
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    if not kinds or kinds[0] not in _SCALING or kinds[0] != kinds[-1]:
        known = ", ".join(map(repr, _SCALING))
        got = repr(kinds[0]) if kinds and kinds[0] == kinds[-1] else repr(dict(scaling))
        raise ValueError(f"scaling: expected a 'rope_type' of {known}, got {got}")
    kind = str(kinds[0])
    theta = given.pop("rope_theta", base)
    if theta != base:
        raise ValueError(f"scaling: expected 'rope_theta' to be the base {base!r}, got {theta!r}")
    needed, possible = _SCALING[kind]
    missing = [key for key in needed if key not in given]
    unknown = [key for key in given if key not in needed + possible]
    if missing or unknown:
        raise ValueError(
            f"scaling: expected for {kind!r} the keys {list(needed)}"
            + (f" and possibly {list(possible)}" if possible else "")
            + "".join(
                f", got {'none of' if which is missing else 'the unknown'} {which}"
                for which in (missing, unknown)
                if which
            )
        )
    numbers_of: dict[str, Any] = {}
    for key, value in given.items():
        name = f"scaling[{key!r}]"
        if key == "original_max_position_embeddings":
            numbers_of[key] = check_count(name, value)
        elif key == "truncate":
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected True or False, got {value!r}")
            numbers_of[key] = value
        elif key == "factor":
            numbers_of[key] = _number(name, value, 1.0)
        else:
            numbers_of[key] = _number(name, value, 0.0, above="mscale" not in key)
    for high, low in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0}
        if high in numbers_of or low in numbers_of:
            more, less = (numbers_of.get(key, defaults.get(key)) for key in (high, low))
            if not more > less:  # type: ignore[operator]
                raise ValueError(f"scaling: expected {high} > {low}, got {more} and {less}")
    return kind, numbers_of


def _yarn_factor(numbers_of: dict[str, Any]) -> float:
    """Return what YaRN multiplies queries and keys by."""

    def size(weight: float) -> float:
        return 0.1 * weight * math.log(numbers_of["factor"]) + 1.0

    if "attention_factor" in numbers_of:
        return float(numbers_of["attention_factor"])
    above, below = (numbers_of.get(key) for key in ("mscale", "mscale_all_dim"))
    if above and below:
        return size(above) / size(below)
    return size(1.0)


def _yarn(
    exponents: NDArray[np.float64], base: float, dim: int, **given: Any
) -> NDArray[np.float64]:
    """Interpolate slow pairs, leave quick ones, and blend those between."""

    def pair_that_turns(times: float) -> float:
        """Return the pair that turns so often within the original length, as a real number."""
        length = given["original_max_position_embeddings"]
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(given.get("beta_fast", 32.0))
    high = pair_that_turns(given.get("beta_slow", 1.0))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    blend: NDArray[np.float64] = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    plain: NDArray[np.float64] = base**-exponents
    return plain * (1.0 - blend) + plain / float(given["factor"]) * blend


def _llama3(exponents: NDArray[np.float64], base: float, **given: Any) -> NDArray[np.float64]:
    """Interpolate long waves, leave short ones, and blend those between."""
    plain: NDArray[np.float64] = base**-exponents
    turns = given["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    kept: NDArray[np.float64] = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * kept + plain / float(given["factor"]) * (1.0 - kept)


def rotary_frequencies(
    rotary_dim: int,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    length: int = 0,
) -> tuple[NDArray[np.float64], float]:
    """Return by how much each pair of columns turns from one position to the next.

    Parameters
    ----------
    rotary_dim : int
        Columns that turn: even, 2 or more.
    base : float, default 10000.0
        Above 1; ``rope_theta`` of a model's configuration.
    scaling : dict, optional
        As `Rotary` takes it.
    length : int, default 0
        For "dynamic" scaling the number of positions in use.

    Returns
    -------
    frequencies : ndarray
        ``(rotary_dim // 2,)`` float64, in radians: ``base**(-2 i / rotary_dim)`` without scaling.
    factor : float
        What turned columns are multiplied by; 1.0 for all but "yarn".

    Raises
    ------
    TypeError, ValueError
        For numbers that are not as above, and for a scaling that is not known or lacks something.

    Examples
    --------
    >>> rotary_frequencies(4, base=100.0)
    (array([1. , 0.1]), 1.0)
    >>> rotary_frequencies(4, 100.0, {"rope_type": "linear", "factor": 4.0})
    (array([0.25 , 0.025]), 1.0)
    """
    dim = check_count("rotary_dim", rotary_dim, 2)
    if dim % 2:
        raise ValueError(f"rotary_dim: expected an even number, got {dim}")
    base = _number("base", base, 1.0, above=True)
    kind, given = _checked_scaling(scaling, base)
    length = check_count("length", length, 0)
    exponents = np.arange(0, dim, 2) / dim
    if kind == "yarn":
        return _yarn(exponents, base, dim, **given), _yarn_factor(given)
    if kind == "llama3":
        return _llama3(exponents, base, **given), 1.0
    if kind == "linear":
        return base**-exponents / given["factor"], 1.0
    if kind == "dynamic" and dim > 2:
        stretch = max(1.0, length / given["original_max_position_embeddings"])
        grown = given["factor"] * stretch - (given["factor"] - 1.0)
        base *= grown ** (dim / (dim - 2))
    return base**-exponents, 1.0


class Rotary:
    """Queries and keys turned by their positions: scores then depend on the distance alone.

    Pair ``i`` of columns turns by the angle ``position * frequencies[i]``, in one pass over the
    array, on several threads, in place on request.

    Parameters
    ----------
    head_dim : int
        Columns of queries and keys.
    base : float, default 10000.0
        The slowest pair turns once in nearly ``2 pi base`` positions; ``rope_theta`` of a model's
        configuration.
    pairing : {"half", "interleaved"}, default "half"
        "half" pairs column ``i`` with ``i + rotary_dim // 2`` (GPT-NeoX, Llama in Hugging Face),
        "interleaved" pairs ``2 i`` with ``2 i + 1`` (the paper, GPT-J).
    rotary_dim : int, optional
        Only so many first columns turn, an even number; by default all.
    scaling : dict, optional
        How a model was stretched to longer inputs, as ``rope_scaling`` of Hugging Face says it.
        "rope_type" is one of

        - "default": not at all;
        - "linear": positions are divided by "factor";
        - "dynamic": beyond "original_max_position_embeddings" the base grows with the largest
          position of each call, by "factor" (so do not mix calls of several lengths in one cache);
        - "yarn": pairs that turn less than "beta_slow" times (1) within
          "original_max_position_embeddings" are divided by "factor", those that turn more than
          "beta_fast" times (32) stay, and all are multiplied by "attention_factor", by default
          ``0.1 log(factor) + 1`` or the quotient of those with the weights "mscale" and
          "mscale_all_dim"; with "truncate" (True) the bounds are rounded to whole pairs;
        - "llama3": the same with "low_freq_factor" and "high_freq_factor" for the turns, and a
          blend that is linear in them.

    Attributes
    ----------
    acts_on : str
        ``"qk"``, queries and keys after their projections, heads apart.
    params : dict
        Empty: nothing is learnt.

    Raises
    ------
    TypeError, ValueError
        For a head_dim, rotary_dim or base out of range, an unknown pairing or type of scaling, and
        for keys that a scaling lacks or does not know.

    Notes
    -----
    Angles are computed in float64, whatever the dtype, with an error of a few times ``2**-53`` of
    the angle: float32 results are exact to rounding up to positions of hundreds of millions.
    Libraries that compute angles in float32 are off by 0.01 at a position of 100,000.

    Equal input gives equal bits, whatever the number of threads.

    Sources: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021);
    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation"
    (2023); Peng, Quesnelle, Fan and Shippole, "YaRN: Efficient Context Window Extension of Large
    Language Models" (2023), which describes the dynamic change of base, too; Llama Team, "The
    Llama 3 Herd of Models" (2024) and the code published with version 3.1.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 64))
    >>> rotary = Rotary(64)
    >>> def score(i, j):
    ...     return rotary(q[None], i)[0] @ rotary(k[None], j)[0]
    >>> bool(np.isclose(score(7, 3), score(1007, 1003)))
    True
    """

    acts_on: ClassVar[str] = "qk"

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        pairing: str = "half",
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        self.head_dim = check_count("head_dim", head_dim, 2)
        check_name("pairing", pairing, ("half", "interleaved"))
        dim = self.head_dim if rotary_dim is None else check_count("rotary_dim", rotary_dim, 2)
        if dim % 2 or dim > self.head_dim:
            raise ValueError(
                f"rotary_dim: expected an even number up to head_dim = {self.head_dim}, got {dim}"
            )
        rotary_frequencies(dim, base, scaling)  # which checks the rest
        kind, given = _checked_scaling(scaling, base)
        self.rotary_dim = dim
        self.base = float(base)
        self.pairing = pairing
        self.scaling = None if scaling is None else {"rope_type": kind, **given}
        self.params: dict[str, NDArray[Any]] = {}

    def __call__(
        self,
        x: ArrayLike,
        positions: ArrayLike | None = None,
        out: NDArray[Any] | None = None,
        length: int | None = None,
    ) -> NDArray[Any]:
        """Turn queries or keys to their positions.

        Parameters
        ----------
        x : array_like
            ``(N, D)``, ``(H, N, D)`` or ``(B, H, N, D)`` with ``D = head_dim``, float32 or
            float64, any strides: pass ``x.transpose(0, 2, 1, 3)`` of a ``(B, N, H, D)`` array.
        positions : int, (N,) or (B, N) integers, optional
            Position of the first row, or of each. By default 0, 1, 2 and so on. Of magnitude up
            to ``2**53``; they may be negative.
        out : ndarray, optional
            Where to write: x itself, for the work to be done in place, or an array of x's shape
            and dtype that shares no memory with it.
        length : int, optional
            For "dynamic" scaling the number of positions in use, which queries and keys have to
            agree upon; by default the largest position and one.

        Returns
        -------
        ndarray
            Of x's shape and dtype: `out` if it was given.

        Raises
        ------
        TypeError, ValueError
            For another shape or dtype, positions that are no integers or do not fit, and an `out`
            that does not fit, is read-only, or overlaps x or itself. Nothing is written then.
        """
        return self._turn("x", x, positions, out, length)

    def backward(
        self,
        dx: ArrayLike,
        positions: ArrayLike | None = None,
        out: NDArray[Any] | None = None,
        length: int | None = None,
    ) -> NDArray[Any]:
        """Carry a gradient back: turn it the other way.

        Parameters
        ----------
        dx : array_like
            Gradient with respect to what the call returned.
        positions, out, length : optional
            As in the call.

        Returns
        -------
        ndarray
            Gradient with respect to x. The transposed map: YaRN's factor multiplies it, too.

        Raises
        ------
        TypeError, ValueError
            As the call does.
        """
        return self._turn("dx", dx, positions, out, length, inverse=True)

    def inverse(
        self,
        x: ArrayLike,
        positions: ArrayLike | None = None,
        out: NDArray[Any] | None = None,
        length: int | None = None,
    ) -> NDArray[Any]:
        """Undo the call: turn back, and divide by YaRN's factor.

        Parameters
        ----------
        x : array_like
            What the call returned.
        positions, out, length : optional
            As in the call.

        Returns
        -------
        ndarray
            What the call was given, up to rounding.

        Raises
        ------
        TypeError, ValueError
            As the call does.
        """
        return self._turn("x", x, positions, out, length, inverse=True, divide=True)

    def _turn(
        self,
        name: str,
        value: Any,
        positions: Any,
        out: Any,
        length: Any,
        *,
        inverse: bool = False,
        divide: bool = False,
    ) -> NDArray[Any]:
        x = _floats(name, value)
        if x.ndim not in (2, 3, 4) or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name}: expected shape (N, D), (H, N, D) or (B, H, N, D) with D = head_dim = "
                f"{self.head_dim}, got {x.shape}"
            )
        where = _positions(positions, x.shape[-2], x.shape[0] if x.ndim == 4 else None)
        if out is None:
            out = np.empty_like(x, subok=False)
        else:
            _check_out(out, name, x)
        if length is None:
            length = max(0, int(where.max()) + 1) if where.size else 0
        frequencies, factor = rotary_frequencies(self.rotary_dim, self.base, self.scaling, length)
        lift = (None,) * (4 - x.ndim)
        backends.load("cpu").rotate(
            x[lift],
            out[lift],
            where,
            frequencies,
            factor=1.0 / factor if divide else factor,
            inverse=inverse,
            interleaved=self.pairing == "interleaved",
        )
        return np.asarray(out)


def _positions(positions: Any, n: int, batch: int | None) -> NDArray[np.int64]:
    """Return ``(1, n)`` or ``(batch, n)`` int64."""
    shapes = f"({n},)" if batch is None else f"({n},) or {(batch, n)}"
    expected = f"an integer, or integers of shape {shapes}, of magnitude up to 2**53"
    if positions is None:
        positions = 0
    array = np.asarray(positions)
    if array.ndim == 0:
        first = check_integer("positions", array[()] if array.dtype != object else positions)
        if abs(first) + n > FARTHEST:
            raise ValueError(f"positions: expected {expected}, got {first}")
        return np.arange(first, first + n, dtype=np.int64)[None]
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"positions: expected {expected}, got dtype {array.dtype}")
    if array.shape != (n,) and (batch is None or array.shape != (batch, n)):
        raise ValueError(f"positions: expected {expected}, got shape {array.shape}")
    if array.size and (int(array.max()) > FARTHEST or int(array.min()) < -FARTHEST):
        far = max(int(array.max()), int(array.min()), key=abs)
        raise ValueError(f"positions: expected {expected}, got {far}")
    return np.atleast_2d(array.astype(np.int64))


def _check_out(out: Any, name: str, x: NDArray[Any]) -> None:
    """Raise unless x can be turned into `out`."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: expected a NumPy array, got {type(out).__name__}")
    if out.shape != x.shape:
        raise ValueError(f"out: expected shape {x.shape} as {name}, got {out.shape}")
    if out.dtype != x.dtype or not out.dtype.isnative:
        raise TypeError(f"out: expected dtype {x.dtype} as {name}, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out: expected a writeable array, got a read-only one")
    if overlaps_itself(out):
        raise ValueError(
            f"out: expected elements that share no memory, got strides {out.strides} for shape "
            f"{out.shape}, which overlap"
        )
    same = out.ctypes.data == x.ctypes.data and all(
        a == b for a, b, n in zip(out.strides, x.strides, x.shape, strict=True) if n > 1
    )
    if not same and share_memory(out, x):
        raise ValueError(
            f"out: expected {name} itself or memory of its own, got an array that overlaps {name}"
        )


# Added to the scores


class Alibi:
    """Scores that fall linearly with the distance, in each head by another slope.

    Parameters
    ----------
    num_heads : int
        Number of query heads.

    Attributes
    ----------
    acts_on : str
        ``"scores"``.
    params : dict
        Empty: the slopes are those of the paper, `nattn.alibi_slopes`. To learn them, pass your
        own as ``alibi_slopes`` and ask `nattn.attention_backward` for their gradient.

    Notes
    -----
    Source: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
    Input Length Extrapolation" (ICLR 2022).

    Examples
    --------
    >>> Alibi(4).arguments(10, 10)
    {'alibi_slopes': array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)}
    """

    acts_on: ClassVar[str] = "scores"

    def __init__(self, num_heads: int) -> None:
        self.num_heads = check_count("num_heads", num_heads)
        self.params: dict[str, NDArray[Any]] = {}

    def arguments(self, Nq: int, Nk: int, q_offset: Any = None) -> dict[str, Any]:
        """Return what `nattn.attention` is called with, whatever the sizes."""
        return {"alibi_slopes": mods.alibi_slopes(self.num_heads)} | _offset(q_offset)

    def backward(self, *incoming: Any, **args: Any) -> dict[str, NDArray[Any]]:
        """Return the gradients of `params`: none."""
        return {}


def _offset(q_offset: Any) -> dict[str, Any]:
    return {} if q_offset is None else {"q_offset": q_offset}


class T5Bias:
    """A learnt bias for each head and each range of distances between key and query.

    Parameters
    ----------
    num_heads : int
        Number of query heads.
    num_buckets : int, default 32
        Ranges of distances: near ones have one distance each, others grow exponentially.
    max_distance : int, default 128
        From here on everything shares the last range.
    bidirectional : bool, default True
        True as in T5's encoder: half of the buckets are for keys behind the query. False as in its
        decoder, which is causal.
    seed : int, default 0
        Of the initial table: normal, with the standard deviation 0.02.
    dtype : dtype, default float32
        float32 or float64.

    Attributes
    ----------
    acts_on : str
        ``"scores"``.
    params : dict
        ``{"table": (num_buckets, num_heads)}``, as ``relative_attention_bias.weight`` of Hugging
        Face's T5 stores it.

    Raises
    ------
    TypeError, ValueError
        For numbers that are out of range, as in `nattn.mods.t5_bias`.

    Notes
    -----
    T5 does not scale its scores: pass ``scale=1.0`` along with the arguments.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (JMLR 2020).

    Examples
    --------
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 300, 16), dtype=np.float32)
    >>> bias = T5Bias(num_heads=2)
    >>> args = bias.arguments(300, 300) | {"scale": 1.0}
    >>> out, lse = nattn.attention(q, k, v, return_lse=True, **args)
    >>> bias.backward(np.ones_like(out), q, k, v, out, lse, **args)["table"].shape
    (32, 2)
    """

    acts_on: ClassVar[str] = "scores"

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        seed: int = 0,
        dtype: Any = np.float32,
    ) -> None:
        self.num_heads = check_count("num_heads", num_heads)
        self.num_buckets = check_count("num_buckets", num_buckets)
        self.max_distance = check_integer("max_distance", max_distance)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        shape = (self.num_buckets, self.num_heads)
        rng = np.random.default_rng([check_count("seed", seed, 0), _BIAS])
        table = (0.02 * rng.standard_normal(shape)).astype(float_dtype("dtype", dtype))
        self.params: dict[str, NDArray[Any]] = {"table": table}
        self._modifier()  # which checks the rest

    def _modifier(self) -> Any:
        return mods.t5_bias(self.params["table"], self.bidirectional, self.max_distance)

    def arguments(self, Nq: int, Nk: int, q_offset: Any = None) -> dict[str, Any]:
        """Return what `nattn.attention` is called with.

        Parameters
        ----------
        Nq, Nk : int
            Numbers of queries and keys, on which nothing depends here.
        q_offset : optional
            Position of the first query among the keys, if it is not attention's default.

        Returns
        -------
        dict
            ``score_mod``, and ``q_offset`` if it was given. The table is read at the distances of
            each tile of scores, so no matrix is made.
        """
        return {"score_mod": self._modifier()} | _offset(q_offset)

    def backward(
        self,
        dout: ArrayLike,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        out: ArrayLike,
        lse: ArrayLike,
        *,
        dlse: ArrayLike | None = None,
        **args: Any,
    ) -> dict[str, NDArray[Any]]:
        """Return the gradient of the table, in memory that grows linearly with the length.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse
            As in `nattn.attention_backward`, in host memory.
        **args
            All arguments of the forward pass, those of `arguments` among them.

        Returns
        -------
        dict
            ``{"table": ...}``, of the table's shape and dtype.

        Raises
        ------
        NotImplementedError
            With other modifiers, a ``mask_mod`` or a ``block_mask``: they would see shifted
            positions.
        TypeError, ValueError
            As `nattn.attention_backward` does.

        Notes
        -----
        The keys of one bucket lie in a band of distances, where the bias is the same number for
        all pairs of a head. With `out` and `lse` of the whole softmax and a window for the band,
        `nattn.attention_backward` gives the gradient of that number: one call for each bucket,
        which visits only the tiles that the band meets. A window holds the distance 0, so the
        queries are moved by the distance of the band. All calls together visit each pair about
        once, for two of the five products of a backward pass.
        """
        _check_plain(args)
        table = self.params["table"]
        rank, layout = np.ndim(q), args.get("layout", "bhnd")
        causal = check_flag("causal", args.pop("causal", False))
        window = args.pop("window_size", None)
        sides = (None, None) if window is None else check_window(window)
        bias = args.pop("bias", None)
        offsets = _q_offsets(args, np.shape(q), np.shape(k), rank, layout)
        gradient = np.zeros(table.shape, FLOAT64)
        for bucket, first, last in _bands(len(table), self.bidirectional, self.max_distance):
            left, right = _meet(first, last, sides, causal)
            if left is not None and right is not None and left > right:
                continue
            # Distances are measured from a position within the band.
            centre = right if right is not None else left if left is not None else 0
            number = table[bucket][:, None, None]
            added = number if bias is None else _sum_of(bias, number)
            found = attention_backward(
                *(dout, q, k, v, out, lse),
                dlse=dlse,
                wrt=("bias",),
                bias=added,
                q_offset=[offset + centre for offset in offsets],
                window_size=(
                    None if left is None else centre - left,
                    None if right is None else right - centre,
                ),
                **args,
            ).dbias
            assert found is not None
            heads = found.reshape((1,) * (4 - found.ndim) + found.shape)
            gradient[bucket] += heads.sum(axis=(0, 2, 3), dtype=FLOAT64)
        return {"table": gradient.astype(table.dtype)}


def _check_plain(args: dict[str, Any]) -> None:
    """Take out the modifier of `T5Bias.arguments`, and raise if anything else sees positions."""
    mod = args.pop("score_mod", None)
    own = isinstance(mod, functools.partial) and mod.func is mods.relative_position_bias
    others = [name for name in ("mask_mod", "block_mask") if args.get(name) is not None]
    others += ["alibi_slopes"] * (args.get("alibi_slopes") is not None)
    others += ["a score_mod beside that of arguments()"] * (mod is not None and not own)
    if others:
        raise NotImplementedError(
            "T5Bias.backward: expected arguments that do not see positions, got "
            + ", ".join(others)
            + "; pass causal, window_size, mask, q_lens or kv_lens instead"
        )


def _q_offsets(args: dict[str, Any], q: Any, k: Any, rank: int, layout: str) -> list[int]:
    """Take out ``q_offset`` and return one for each item: given, or ``kv_len - q_len``."""
    rows = 1 if layout == "bnhd" and rank == 4 else rank - 2
    B = q[0] if rank == 4 else 1
    given = args.pop("q_offset", None)
    if given is not None:
        return check_integers("q_offset", given, B)
    q_lens, kv_lens = (
        check_integers(name, shape[rows] if args.get(name) is None else args[name], B)
        for name, shape in (("q_lens", q), ("kv_lens", k))
    )
    return [n - m for n, m in zip(kv_lens, q_lens, strict=True)]


def _bands(
    num_buckets: int, bidirectional: bool, max_distance: int
) -> Iterator[tuple[int, int | None, int | None]]:
    """Yield each bucket with the first and the last ``kv_idx - q_idx`` in it, None where open."""
    buckets = mods.t5_buckets(num_buckets, bidirectional, max_distance)
    reach = len(buckets) // 2
    starts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
    for begin, end in itertools.pairwise(starts):
        first = None if begin == 0 else begin - reach
        yield int(buckets[begin]), first, None if end == len(buckets) else end - 1 - reach


def _meet(
    first: int | None, last: int | None, window: Window, causal: bool
) -> tuple[int | None, int | None]:
    """Return the distances that a band, a window and causality leave, None where open."""
    left, right = window
    firsts = [x for x in (first, None if left is None else -left) if x is not None]
    lasts = [x for x in (last, right, 0 if causal else None) if x is not None]
    return max(firsts, default=None), min(lasts, default=None)


def _sum_of(bias: Any, number: NDArray[Any]) -> NDArray[Any]:
    """Add a number for each head to a bias; what is -inf stays it."""
    return np.asarray(np.asarray(bias) + number)
