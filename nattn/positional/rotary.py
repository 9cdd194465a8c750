"""Queries and keys turned by their positions, and how that is stretched to longer inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import backends
from ..call.checks import check_count, check_integer, check_name, overlaps_itself, share_memory
from .checks import floats, number

FARTHEST = 1 << 53
"""Positions up to here are exact in float64."""

# Scaling

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


def _checked_scaling(
    scaling: Any, base: float, turning: tuple[int, int] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the type of a scaling and its numbers, without what changes nothing.

    `turning` is the number of columns that turn and that of all columns, if it is known.
    """
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected None or a dict with 'rope_type', got {scaling!r}")
    given = {key: value for key, value in scaling.items() if value is not None}
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    if not kinds or kinds[0] not in list(_SCALING) or kinds[0] != kinds[-1]:
        known = ", ".join(map(repr, _SCALING))
        got = repr(kinds[0]) if kinds and kinds[0] == kinds[-1] else repr(dict(scaling))
        raise ValueError(f"scaling: expected a 'rope_type' of {known}, got {got}")
    kind = str(kinds[0])
    theta = given.pop("rope_theta", base)
    if theta != base:
        raise ValueError(f"scaling: expected 'rope_theta' to be the base {base!r}, got {theta!r}")
    given.pop("finetuned", None)  # tells how a model was made; transformers does not read it either
    if "partial_rotary_factor" in given:
        _check_partial(given.pop("partial_rotary_factor"), turning)
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
            # JSON has 32768.0 too
            whole = isinstance(value, float | np.floating) and value.is_integer()
            numbers_of[key] = check_count(name, int(value) if whole else value)
        elif key == "truncate":
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected True or False, got {value!r}")
            numbers_of[key] = value
        elif key == "factor":
            numbers_of[key] = number(name, value, 1.0)
        else:
            numbers_of[key] = number(name, value, 0.0, above="mscale" not in key)
    for high, low in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0}
        if high in numbers_of or low in numbers_of:
            more, less = (numbers_of.get(key, defaults.get(key)) for key in (high, low))
            if not more > less:  # type: ignore[operator]
                raise ValueError(f"scaling: expected {high} > {low}, got {more} and {less}")
    return kind, numbers_of


def _check_partial(value: Any, turning: tuple[int, int] | None) -> None:
    """Raise unless a ``partial_rotary_factor`` says what the numbers of columns say."""
    factor = number("scaling['partial_rotary_factor']", value, 0.0, above=True)
    columns, width = (1, 1) if turning is None else turning
    if factor > 1.0 or int(width * factor) != columns:
        expected = "1.0" if turning is None else f"rotary_dim / head_dim = {columns} / {width}"
        raise ValueError(
            f"scaling: expected 'partial_rotary_factor' to be {expected}, got {value!r}; say with "
            "rotary_dim how many columns turn"
        )


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
    base = number("base", base, 1.0, above=True)
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

        What such a dictionary repeats may be there, if it says the same: "type", "rope_theta" (the
        base) and "partial_rotary_factor" (``rotary_dim / head_dim``). "finetuned" means nothing.
        All other keys are refused, for who reads them gets other numbers.

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
        base = number("base", base, 1.0, above=True)
        kind, given = _checked_scaling(scaling, base, (dim, self.head_dim))
        self.rotary_dim = dim
        self.base = base
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
        x = floats(name, value)
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
