"""What is timed must be right: sampled rows of a result against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...api import functional
from ...backends.error_budget import UNIT
from ...functions import mods
from .cases import Array, Case


def check(case: Case, out: Array) -> None:
    """Compare sampled rows of a result, in all heads, with the reference.

    Parameters
    ----------
    case : Case
        What was computed.
    out : ndarray
        The output, ``(B, H, N, Dv)``; for a case of gradients dq, ``(B, H, N, D)``.

    Raises
    ------
    ArithmeticError
        If they are wrong.
    """
    if case.backward:
        _check_gradient(case, out)
        return
    q, k, v, options = _wide_arrays(case)
    mask = options.pop("mask", None)
    dropout_p, seed = options.pop("dropout_p", 0.0), options.pop("seed", 0)

    def attend(row: int, visible: Array | None) -> tuple[Array, Array]:
        result: tuple[Array, Array] = functional.attention(
            q[:1, :, row : row + 1],
            k[:1],
            v[:1],
            q_offset=row,
            mask=visible,
            return_lse=True,
            backend="reference",
            **options,
        )
        return result

    for row in {0, case.N // 3, case.N - 1}:
        visible = None if mask is None else mask[row]
        want, lse = attend(row, visible)
        if dropout_p:
            # The reference sees a single row and would drop what is dropped in row 0. So hide
            # what is dropped in this row, and divide by the sum over all keys, dropped or not.
            heads, keys = np.arange(case.H)[:, None, None], np.arange(case.N)
            kept = mods.keep(0, heads, row, keys, seed, dropout_p)
            want, kept_lse = attend(row, kept if visible is None else kept & visible)
            total = np.where(lse > -np.inf, lse, 0.0)  # an empty row stays 0
            want *= np.exp(kept_lse - total)[..., None] / (1 - dropout_p)
        _compare(case, "", out[0, :, row], want[0, :, 0])


def _check_gradient(case: Case, dq: Array) -> None:
    """Compare sampled rows of dq with the reference's."""
    q, k, v, options = _wide_arrays(case)
    dout = case.dout().astype(case.compute, copy=False)
    options.pop("bias", None)  # zeros
    for row in {0, case.N // 3, case.N - 1}:
        one = slice(row, row + 1)
        given = {**options, "q_offset": row, "backend": "reference"}
        out, lse = functional.attention(q[:1, :, one], k[:1], v[:1], return_lse=True, **given)
        want = functional.attention_backward(
            dout[:1, :, one], q[:1, :, one], k[:1], v[:1], out, lse, wrt=("q",), **given
        ).dq
        assert want is not None
        _compare(case, "dq ", dq[0, :, row], want[0, :, 0])


def _wide_arrays(case: Case) -> tuple[Array, Array, Array, dict[str, Any]]:
    """Return the arrays of a case as what is computed in, so that no 16-bit result is rounded."""
    *qkv, options = case.arrays()
    q, k, v = (x.astype(case.compute, copy=False) for x in qkv)
    return q, k, v, options


def _compare(case: Case, what: str, got: Array, want: Array) -> None:
    """Raise ArithmeticError if a row is wrong.

    Peers have error budgets of their own: this only finds what computes something else.
    """
    error = float(np.abs(got - want).max(initial=0.0))
    allowed = 1e-9 if case.compute == "float64" else 1e-3
    if case.dtype != case.compute:  # weights and gradients of scores are rounded, too
        allowed = max(allowed, 8 * UNIT[case.dtype] * float(np.abs(want).max(initial=0.0)))
    if not error <= allowed:  # so that NaN is wrong
        raise ArithmeticError(f"{what}wrong by {error:.2g}, more than the {allowed:.2g} allowed")
