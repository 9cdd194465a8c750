"""How exact a backend has to be: worst-case bounds of its distance to the float64 reference.

They are derived, for any order of summation, and not fitted: a backend that exceeds one is wrong.
The tests hold every backend to them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..vectors.dtypes import FLOAT64

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Unit roundoff of each storage type: half the distance from 1 to the next number."""

SUBNORMAL = {
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float32": 2.0**-149,
    "float64": 2.0**-1074,
}
"""Smallest number of each storage type."""


class ErrorBudget(NamedTuple):
    """Largest absolute errors that rounding can explain, one for each output."""

    out: NDArray[np.float64]
    lse: NDArray[np.float64]


def error_budget(
    dtype: np.dtype,
    row_length: ArrayLike,
    max_abs_score: ArrayLike,
    max_abs_v: ArrayLike,
    D: int,
    *,
    score_error: ArrayLike | None = None,
    dropout_p: float = 0.0,
    weight_unit: float = 0.0,
) -> ErrorBudget:
    """Bound the distance between a backend's result and the float64 reference.

    A bound on rounding errors, worst case to first order, for any order of summation. It is
    derived and not fitted, so a backend that exceeds it is wrong. Rounding the result to a
    narrower storage type comes on top: see `stored`.

    Parameters
    ----------
    dtype : dtype
        Compute dtype, float32 or float64; ``u = eps / 2`` is its unit roundoff.
    row_length : array_like
        ``n``, the number of keys that a row sees; a sink is one more.
    max_abs_score : array_like
        ``S``, the largest score of a row *without cancellation*:
        ``max_j(|scale| * sum_d |q[d] * k[j, d]| + |bias[j]|)`` over the visible keys, or the size
        of the sink, if that is larger. Pass 0 where the arithmetic on scores is known to be exact.
        With modifiers the first term is the size of what they returned.
    max_abs_v : array_like
        The largest ``|v[j, d]|`` among the visible keys.
    D : int
        Head dimension of q and k.
    score_error : array_like, optional
        ``E``, with modifiers: the largest absolute error of what they return, which takes in that
        of the dot product and what they make of it.
    dropout_p : float, default 0.0
        Probability of dropping.
    weight_unit : float, default 0.0
        Unit roundoff of what weights are rounded to before they multiply values, as for the dot
        product of pairs: ``UNIT["bfloat16"]``.

    Returns
    -------
    ErrorBudget
        Absolute tolerances for ``out`` and ``lse``, of the broadcast shape of the arguments.

    Notes
    -----
    1. A score ``s`` is a dot product of ``D`` terms (``D u S``), times the scale, plus the bias,
       minus the row's maximum and times ``log2(e)``: at most ``D + 8`` roundings that are each
       relative to ``S``, so ``|ds| <= (D + 8) u S``. A modifier comes after the dot product and
       the scale: then ``|ds| <= E + 8 u S``.
    2. ``exp`` has at most 2 ulp (``4 u``), so a weight has the relative error ``e = ds + 4 u``.
       ``out`` is a weighted mean, where an error common to all weights cancels; at worst half of
       them err up and half down: ``2 e max|v|``.
    3. Numerator and denominator are sums of ``n`` positive weights: ``n u`` each, whatever the
       order. Rescaling to a new maximum costs a few roundings for each block of 16 keys or
       more: less than another ``n u``. Together ``3 n u max|v|``.
    4. The normalisation adds ``4 u max|v|``. Sums of subnormal products lose at most ``n``
       smallest subnormals.
    5. Dropout leaves the sum of a part of the terms, times ``1 / (1 - p)``: all of this bounds a
       part too, so the factor is what it costs, and ``4 u`` for its own roundings.

    6. Weights that are rounded once more, not those of the denominator, add
       ``weight_unit max|v|``, and those that are flushed to 0 the smallest normal number each.

    ``out``: ``max|v| u (2 (D + 8) S + 3 n + 12)``, or ``max|v| (2 E + u (16 S + 3 n + 12))`` with
    modifiers. ``lse = row_max + log(row_sum)`` takes ``ds``
    once, the relative error of ``row_sum`` (``2 n u + 4 u``), 4 ulp of a logarithm that is at
    most ``log n``, and the rounding of the result, which is at most ``S + log n``. In float64 the
    reference rounds just as much, which doubles both.
    """
    info = np.finfo(dtype)
    u = float(info.eps) / 2
    n = np.asarray(row_length, np.float64)
    S = np.asarray(max_abs_score, np.float64)
    log_n = np.log(np.maximum(n, 1.0))
    E = np.asarray(0.0 if score_error is None else score_error, np.float64)
    D = D if score_error is None else 0
    rest = 12 if dropout_p == 0.0 else 16
    out = np.asarray(max_abs_v, np.float64) * (2 * E + u * (2 * (D + 8) * S + 3 * n + rest))
    out = out + n * float(info.smallest_subnormal)
    if weight_unit:
        out = out + (weight_unit + n * float(info.tiny)) * np.asarray(max_abs_v, np.float64)
    out = out / (1.0 - dropout_p)
    lse = E + u * ((D + 9) * S + 2 * n + 4 + 9 * log_n)
    both = 2 if dtype == FLOAT64 else 1
    return ErrorBudget(both * out, both * lse)


def stored(storage: str, exact: ArrayLike, error: ArrayLike = 0.0) -> NDArray[np.float64]:
    """Bound the error of a result that is rounded to its storage type in the end.

    Parameters
    ----------
    storage : str
        Name of the storage type, a key of `UNIT`.
    exact : array_like
        The exact result.
    error : array_like, default 0.0
        Bound of its error before it is rounded, of `error_budget` or `sum_budget` for one.

    Returns
    -------
    ndarray
        ``error + u (|exact| + error) + w / 2``: what is rounded is at most ``|exact| + error`` in
        size, and loses ``u``, the unit roundoff of the storage type, of it, or half of its
        smallest number ``w`` where it is subnormal. Of exact results that are not finite, `error`.
    """
    size, error = np.abs(np.asarray(exact, np.float64)), np.asarray(error, np.float64)
    size = np.where(np.isfinite(size), size, 0.0)
    return np.asarray(error + UNIT[storage] * (size + error) + SUBNORMAL[storage] / 2)


class PairBudget(NamedTuple):
    """Largest absolute errors of what a backward pass makes of each pair of query and key."""

    weight: NDArray[np.float64]
    ds: NDArray[np.float64]


def pair_budget(
    dtype: np.dtype,
    p: ArrayLike,
    exponent: ArrayLike,
    dp: ArrayLike,
    delta: ArrayLike,
    *,
    score_error: ArrayLike,
    lse_error: ArrayLike,
    dp_size: ArrayLike,
    delta_error: ArrayLike,
    Dv: int,
    dropout_p: float = 0.0,
) -> PairBudget:
    """Bound the rounding errors of a gradient, pair by pair; `sum_budget` adds them up.

    As `error_budget`: worst case, derived and not fitted.

    Parameters
    ----------
    dtype : dtype
        Compute dtype; ``u = eps / 2``.
    p : array_like
        Probabilities before dropout, 0 where hidden.
    exponent : array_like
        ``s - lse``.
    dp : array_like
        ``dot(dout, v) / (1 - dropout_p)``, 0 where dropped.
    delta : array_like
        ``dot(dout, out) - dlse`` of each row.
    score_error, lse_error : array_like
        Largest absolute errors of ``s`` as it is computed again, and of ``lse`` as it was passed.
    dp_size : array_like
        `dp` without cancellation: of ``|dout|`` and ``|v|``.
    delta_error : array_like
        Largest absolute error of `delta`; see 3. That of `out` takes in its rounding to the
        storage type, for it is what was stored that is read.
    Dv : int
        Length of the dot product in `dp`.
    dropout_p : float, default 0.0
        Probability of dropping.

    Returns
    -------
    PairBudget
        Absolute errors of ``weight = p / (1 - dropout_p)``, which multiplies dout, and of
        ``ds = p * (dp - delta)``.

    Notes
    -----
    1. ``p = exp(s - lse)`` takes the errors of its operands as relative ones, that of their
       difference (``u |s - lse|``) and those of two factors ``log2(e)`` (``2 u |s - lse|``), and
       has at most 2 ulp of its own: ``e = score_error + lse_error + 3 u |s - lse| + 4 u``. Below
       the smallest normal number it may be flushed to 0. Dropout costs two roundings.
    2. ``dp`` is a dot product of ``Dv`` terms and has a factor with dropout, which is itself
       rounded: ``(Dv + 2) u dp_size``.
    3. ``delta`` sums ``dout * out`` in any order and takes the error of `out` besides:
       ``sum_d |dout| (out_error + (Dv + 1) u |out|) + u (|delta| + |dlse|)``.
    4. So ``t = dp - delta`` errs by the two and ``u (|dp| + |delta|)``, and ``ds = p * t`` by
       ``p_error |t| + p t_error + p_error t_error`` and its own rounding.

    Then a modifier multiplies by its derivative, which has an error of its own, and the results
    are sums over pairs: `sum_budget`. In float64 the reference rounds just as much: twice as far.
    """
    info = np.finfo(dtype)
    u = float(info.eps) / 2 * (2 if dtype == FLOAT64 else 1)
    p, dp, delta, exponent, score_error, lse_error, dp_size, delta_error = (
        np.asarray(x, np.float64)
        for x in (p, dp, delta, exponent, score_error, lse_error, dp_size, delta_error)
    )
    e = score_error + lse_error + u * (3 * np.abs(exponent) + 4)
    p_error = p * e + float(info.tiny)
    t_error = (Dv + 2) * u * dp_size + delta_error + u * (np.abs(dp) + np.abs(delta))
    t = np.abs(dp - delta)
    ds = p_error * (t + t_error) + p * (t_error + u * t)
    weight = p_error if dropout_p == 0.0 else (p_error + 2 * u * p) / (1.0 - dropout_p)
    return PairBudget(weight, ds)


def sum_budget(
    dtype: np.dtype, error: NDArray[np.float64], size: NDArray[np.float64], n: ArrayLike
) -> NDArray[np.float64]:
    """Bound the error of a sum of ``n`` products, in any order.

    Parameters
    ----------
    dtype : dtype
        Compute dtype.
    error : ndarray
        Sum of the errors of the terms.
    size : ndarray
        Sum of the absolute values of the terms.
    n : array_like
        Number of terms.

    Returns
    -------
    ndarray
        ``error + (n + 3) u size``: each product and each addition is rounded, and so is a factor
        before and after the sum; and the smallest number for each product that is below it.
    """
    info = np.finfo(dtype)
    u = float(info.eps) / 2 * (2 if dtype == FLOAT64 else 1)
    n = np.asarray(n, np.float64)
    return np.asarray(error + (n + 3) * u * size + n * float(info.smallest_subnormal))
