"""Keys and values in 8 bits: how they are rounded, and how far that moves a result."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..vectors import dtypes

LARGEST = 127
"""Codes go from -127 to 127."""

ROUNDING = 0.5 + LARGEST * 2.0**-24
"""Largest error of an element, in units of its row's scale; `quantise` tells why."""


def quantise(name: str, x: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round rows of numbers to 8 bits, with a scale for each row.

    Parameters
    ----------
    name : str
        What the rows are called in an error.
    x : ndarray
        ``(..., D)``: float16, bfloat16, float32 or float64.

    Returns
    -------
    codes : ndarray of int8
        ``(..., D)``; an element is ``code * scale`` of its row.
    scales : ndarray of float32
        ``(...)``: the smallest for which ``127 * scale`` reaches the largest element of the row in
        size, up to rounding. A row of zeros has 0.

    Raises
    ------
    ValueError
        If an element is NaN or infinite, or so large that float32 holds no scale for it.

    Notes
    -----
    ``scale`` is ``max|x| / 127`` rounded to float32, and up where ``127 * scale`` would be less
    than ``max|x|``. So ``|x / scale| <= 127``, and no code is clipped. The quotient is rounded to
    float32 or float64, by ``127 u`` at most with ``u <= 2**-24``, and then to an integer:
    ``|x - code * scale| <= (1 / 2 + 127 u) * scale``, which is ``ROUNDING * scale``.
    """
    x = x.astype(dtypes.FLOAT64 if x.dtype.itemsize == 8 else dtypes.FLOAT32, copy=False)
    with np.errstate(all="ignore"):
        largest = np.abs(x).max(axis=-1, initial=0.0).astype(np.float64)
        scales = (largest / LARGEST).astype(np.float32)
        short = LARGEST * scales.astype(np.float64) < largest  # exact: 7 and 24 bits
        scales = np.where(short, np.nextafter(scales, np.float32(np.inf)), scales)
    wrong = ~np.isfinite(scales)
    if wrong.any():
        most = LARGEST * float(np.finfo(np.float32).max)
        raise ValueError(
            f"{name}: expected finite numbers up to {most:.3g} in size, to be stored in int8, got "
            f"{largest[wrong][0]:.3g}"
        )
    with np.errstate(all="ignore"):
        codes = np.rint(x / np.where(scales == 0.0, 1.0, scales)[..., None].astype(x.dtype))
    return codes.astype(np.int8), scales


def dequantise(
    codes: NDArray[np.int8], scales: NDArray[np.float32], dtype: np.dtype
) -> NDArray[Any]:
    """Return the numbers that rows in 8 bits stand for.

    Parameters
    ----------
    codes : ndarray of int8
        ``(..., D)``.
    scales : ndarray of float32
        ``(...)``.
    dtype : dtype
        Of the result: float16, bfloat16, float32 or float64. Products are of float32, or float64
        for that, and then rounded.

    Returns
    -------
    ndarray
        ``(..., D)``.
    """
    wide = dtypes.FLOAT64 if dtype.itemsize == 8 else dtypes.FLOAT32
    numbers: NDArray[Any] = codes.astype(wide)
    numbers *= scales[..., None]
    found: NDArray[Any] = numbers.astype(dtype, copy=False)
    return found


class CacheError(NamedTuple):
    """How far what a cache gives may be from what it would give if nothing had been rounded.

    Bounds of absolute errors by storing keys and values in 8 bits, beside rounding in arithmetic.
    All are 0 of a cache that stores what it gets.

    Attributes
    ----------
    k, v : ndarray of float64
        ``(B, Hkv)``: of each element of the keys and values of an item.
    lse, out : ndarray of float64 or None
        ``(B, Hq, Nq)``: of each row's lse and of each element of its output; None without queries.
    """

    k: NDArray[np.float64]
    v: NDArray[np.float64]
    lse: NDArray[np.float64] | None = None
    out: NDArray[np.float64] | None = None


def attention_error(
    k_scales: NDArray[Any],
    v_scales: NDArray[Any],
    q: NDArray[Any] | None = None,
    scale: float | None = None,
) -> CacheError:
    """Bound what keys and values in 8 bits change.

    Parameters
    ----------
    k_scales, v_scales : ndarray
        ``(B, Hkv)``: the largest scale of the keys and of the values of an item.
    q : ndarray, optional
        ``(B, Nq, Hq, D)``.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(D)`` by default.

    Returns
    -------
    CacheError
        The bounds.

    Notes
    -----
    1. An element of a key errs by at most ``e_k = ROUNDING * k_scale`` (see `quantise`), so a
       score by at most ``d = |scale| * sum|q| * e_k``. Softcap's slope is at most 1; ALiBi, bias,
       masks and sinks add the same to both scores: after them it is ``d`` still. Then
       ``|lse' - lse| <= d``.
    2. Weights whose scores move by at most ``d`` move, in sum, by at most ``2 tanh(d / 2)``: at
       worst a set of keys with weight ``a`` moves up by ``d`` and the rest down, and
       ``a e^d / (a e^d + (1 - a) e^-d) - a`` is largest at ``a = 1 / (1 + e^d)``, where it is
       ``(e^d - 1) / (e^d + 1)``.
    3. An element of a value errs by at most ``e_v = ROUNDING * v_scale``, and is at most
       ``127 v_scale`` in size. So with ``out' - out = sum p' (v' - v) + sum (p' - p) v``::

           |out' - out| <= e_v + 2 tanh(d / 2) * 127 v_scale
    """
    e_k, e_v = (ROUNDING * x.astype(np.float64) for x in (k_scales, v_scales))
    if q is None:
        return CacheError(e_k, e_v)
    D, group = q.shape[-1], q.shape[2] // max(1, e_k.shape[1])
    factor = dtypes.default_scale(D) if scale is None else abs(float(scale))
    factor *= 1.0 + 2.0**-23  # it is rounded to what is computed in
    size = np.abs(q.astype(np.float64)).sum(axis=-1).transpose(0, 2, 1)
    largest, e_k_, e_v_ = (
        np.repeat(x, group, axis=1)[..., None]
        for x in (LARGEST * v_scales.astype(np.float64), e_k, e_v)
    )
    d = factor * size * e_k_
    out = e_v_ + 2.0 * np.tanh(d / 2) * largest
    return CacheError(e_k, e_v, d, out)
