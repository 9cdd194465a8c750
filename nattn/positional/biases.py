"""What is added to the scores: a slope for each head, or numbers that are learnt."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..api.functional import Gradients, attention_backward
from ..call.checks import check_count, check_flag, check_integer, float_dtype
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
    wrt : tuple of str
        Empty, as there is nothing to learn.
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
    wrt: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_heads: int) -> None:
        self.num_heads = check_count("num_heads", num_heads)
        self.params: dict[str, NDArray[Any]] = {}

    def arguments(self, Nq: int, Nk: int, q_offset: Any = None) -> dict[str, Any]:
        """Return what `nattn.attention` is called with, whatever the sizes."""
        return {"alibi_slopes": mods.alibi_slopes(self.num_heads)} | _offset(q_offset)

    def collect(self, grads: Gradients) -> dict[str, NDArray[Any]]:
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
    wrt : tuple of str
        What `nattn.attention_backward` is asked for so that `collect` can tell the gradient.
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
    wrt: ClassVar[tuple[str, ...]] = ("score_mod.relative_position_bias.table",)

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

        Where other gradients are wanted too, one pass gives them all: name `wrt` among them, and
        hand what comes out to `collect`.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse
            As in `nattn.attention_backward`, in host memory.
        **args
            All arguments of the forward pass, those of `arguments` among them, its score_mod
            perhaps composed with others.

        Returns
        -------
        dict
            ``{"table": ...}``, of the table's shape and dtype.

        Raises
        ------
        TypeError, ValueError
            As `nattn.attention_backward` does.
        """
        found = attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=self.wrt, **args)
        return self.collect(found)

    def collect(self, grads: Gradients) -> dict[str, NDArray[Any]]:
        """Return the gradients of `params` from those of attention with respect to `wrt`.

        The table is spread over distances before attention reads it (`nattn.mods.t5_bias`): what
        arrives for the distances of a bucket is added up.

        Parameters
        ----------
        grads : Gradients
            What `nattn.attention_backward` returned.

        Returns
        -------
        dict
            ``{"table": ...}``, of the table's shape and dtype.
        """
        assert grads.dmods is not None
        table = self.params["table"]
        columns = grads.dmods[self.wrt[0]]
        buckets = mods.t5_buckets(len(table), self.bidirectional, self.max_distance)
        gradient = np.zeros(table.shape, FLOAT64)
        np.add.at(gradient, buckets, columns.T)
        return {"table": gradient.astype(table.dtype)}
