"""What is timed must be right: sampled rows of a result against the reference."""

from __future__ import annotations

import numpy as np

from ...api import functional
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
    q, k, v, options = case.arrays()
    if case.backward:
        _check_gradient(case, out)
        return
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

    error = 0.0
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
        # np.max, unlike max, keeps a NaN
        error = float(np.max([error, np.abs(out[0, :, row] - want[0, :, 0]).max(initial=0.0)]))
    # Peers have error budgets of their own: this only finds what computes something else
    allowed = 1e-3 if case.dtype == "float32" else 1e-9
    if not error <= allowed:
        raise ArithmeticError(f"wrong by {error:.2g}, more than the {allowed:.2g} allowed")


def _check_gradient(case: Case, dq: Array) -> None:
    """Compare sampled rows of dq with the reference's."""
    q, k, v, options = case.arrays()
    dout = case.dout()
    options.pop("bias", None)  # zeros
    error = 0.0
    for row in {0, case.N // 3, case.N - 1}:
        one = slice(row, row + 1)
        given = {**options, "q_offset": row, "backend": "reference"}
        out, lse = functional.attention(q[:1, :, one], k[:1], v[:1], return_lse=True, **given)
        want = functional.attention_backward(
            dout[:1, :, one], q[:1, :, one], k[:1], v[:1], out, lse, wrt=("q",), **given
        ).dq
        assert want is not None
        error = float(np.max([error, np.abs(dq[0, :, row] - want[0, :, 0]).max(initial=0.0)]))
    allowed = 1e-3 if case.dtype == "float32" else 1e-9
    if not error <= allowed:
        raise ArithmeticError(f"dq wrong by {error:.2g}, more than the {allowed:.2g} allowed")
