"""What is added to the scores: a slope for each head, or numbers that are learnt."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..api.functional import attention_backward
from ..call.checks import (
    Window,
    check_count,
    check_flag,
    check_integer,
    check_integers,
    float_dtype,
)
from ..call.validators import check_window
from ..functions import mods
from ..vectors.dtypes import FLOAT64

_BIAS = 2
"""Beside a seed: a layer of the same seed draws other numbers."""


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
