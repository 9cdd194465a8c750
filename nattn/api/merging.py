"""Partial results over disjoint keys, put together exactly: `merge_states`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..call.checks import HostArray, host_array, show
from ..vectors import dtypes

Array = NDArray[Any]


def merge_states(
    outs: HostArray | Sequence[HostArray], lses: HostArray | Sequence[HostArray]
) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    A state is what `nattn.attention` returns with ``return_lse=True`` for some of the keys. For
    states ``a``, in each row::

        lse = log(sum_a exp(lse_a))
        out = sum_a exp(lse_a - lse) * out_a

    Parameters
    ----------
    outs : sequence of array_like, or array_like
        Outputs ``(..., N, Dv)`` of any number of axes, head-major as lse is: float16, bfloat16
        (that of `ml_dtypes`), float32 or float64, all alike. A list or tuple holds a state in each
        item; an array has one at each index of its first axis.
    lses : sequence of array_like, or array_like
        For each output its natural log-sum-exp, of its shape without the last axis; float64 for
        outputs of float64, else float32.

    Returns
    -------
    out : ndarray
        ``(..., N, Dv)`` in the dtype of the outputs. All axes but the last are broadcast by NumPy's
        rule: a state that all items share, of a prefix of keys for one, may have ``B = 1``.
    lse : ndarray
        ``(..., N)`` in the dtype of the lses. It makes `out` a state, which can be merged again.

    Raises
    ------
    ValueError
        If a list is empty, numbers of states differ or shapes do not fit.
    TypeError
        If dtypes do not fit, or an array is on a GPU.

    Notes
    -----
    A state whose lse is -inf has seen no key: its output is not read, and merged with such states
    alone another one keeps its bits. Where all are empty, `out` is 0 and lse -inf. A row with NaN
    in an lse, or with +inf, which is the lse of no finite scores, is NaN in `out` and lse; NaN and
    Inf in an output reach `out`, also where the weight of the state underflows to 0.

    Weights are computed in float64, from the largest lse of the row; outputs are weighed and added
    in float64 for float64 and float32 for others, in the order of the states. Sinks and dropout
    fit in: a sink counts once, so it may be given to one of the calls only.

    The rule is that of splitting along the keys in Flash-Decoding [1]_, the operator on attention
    states of FlashInfer [2]_: states may be merged in any order and grouping, up to rounding.

    References
    ----------
    .. [1] T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference",
       2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    .. [2] Z. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
       Serving", 2025, arXiv:2501.01005.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 500, 64), dtype=np.float32)
    >>> cuts = slice(0, 300), slice(300, 500)
    >>> states = [nattn.attention(q, k[:, cut], v[:, cut], return_lse=True) for cut in cuts]
    >>> out, lse = nattn.merge_states(*zip(*states))
    >>> bool(np.allclose(out, nattn.attention(q, k, v), atol=1e-6))
    True
    """
    out_states, lse_states = _states("outs", outs), _states("lses", lses)
    if len(out_states) != len(lse_states):
        raise ValueError(
            f"lses: expected one for each of {len(out_states)} outs, got {len(lse_states)}"
        )
    storage = _check_states(out_states, lse_states)
    dtype, compute = dtypes.storage_dtype(storage), dtypes.compute_dtype(storage)

    # NaN, Inf and underflow are data here, whatever the caller's np.seterr says
    with np.errstate(all="ignore"):
        wide = [lse.astype(np.float64) for lse in lse_states]
        lse_max = np.asarray(functools.reduce(np.maximum, wide))
        shift = np.where(lse_max == -np.inf, 0.0, lse_max)  # where all are empty there is none
        weights = [np.exp(lse - shift) for lse in wide]
        weight_sum = np.asarray(sum(weights))
        # One state alone keeps its bits, -0.0 too: nothing is added to it but -0.0
        merged = np.full((*lse_max.shape, out_states[0].shape[-1]), -0.0, compute)
        for out, lse, weight in zip(out_states, wide, weights, strict=True):
            factor = np.asarray(weight / weight_sum, compute)[..., None]
            seen = np.asarray(lse != -np.inf)[..., None]
            np.add(merged, factor * out.astype(compute, copy=False), out=merged, where=seen)
        merged[lse_max == -np.inf] = 0.0
        lse = np.where(weight_sum == 1.0, shift, shift + np.log(weight_sum))
        return merged.astype(dtype, copy=False), lse.astype(compute)


def _states(name: str, given: Any) -> list[Array]:
    """Return the states of a list, or of the first axis of an array."""
    if isinstance(given, (list, tuple)):
        found = [host_array(f"{name}[{a}]", x) for a, x in enumerate(given)]
    else:
        stacked = host_array(name, given)
        if stacked.ndim == 0:
            expected = "a list of arrays, or an array of states along its first axis"
            raise TypeError(f"{name}: expected {expected}, got {show(given)}")
        found = list(stacked)
    if not found:
        raise ValueError(f"{name}: expected at least one state, got none")
    return [np.asarray(x) for x in found]


def _broadcast(a: int, shape: tuple[int, ...], another: tuple[int, ...]) -> tuple[int, ...]:
    try:
        if shape[-1] == another[-1]:
            return np.broadcast_shapes(shape, another)
    except ValueError:
        pass
    raise ValueError(
        f"outs[{a}]: expected a shape that broadcasts to that of the outs before it, {shape}, in "
        f"all axes but the last, and Dv = {shape[-1]} there, got {another}"
    )


def _check_states(outs: list[Array], lses: list[Array]) -> str:
    """Return the storage type of outputs that fit their lses and each other."""
    shape: tuple[int, ...] = ()
    storage = dtypes.storage_name(outs[0].dtype)
    for a, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        found = dtypes.storage_name(out.dtype)
        if storage is None or found is None or out.dtype == dtypes.BFLOAT16_BITS:
            expected = "dtype float16, bfloat16, float32 or float64"
            raise TypeError(f"outs[{a}]: expected {expected}, got {dtypes.show(out.dtype)}")
        if found != storage:
            raise TypeError(f"outs[{a}]: expected dtype {storage} as in outs[0], got {found}")
        compute = dtypes.compute_dtype(storage)
        if lse.dtype.newbyteorder("=") != compute:
            expected = f"dtype {compute} for outs of {storage}"
            raise TypeError(f"lses[{a}]: expected {expected}, got {dtypes.show(lse.dtype)}")
        if out.ndim == 0:
            raise ValueError(f"outs[{a}]: expected shape (..., N, Dv), got ()")
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lses[{a}]: expected shape {out.shape[:-1]} to fit outs[{a}] {out.shape} (both "
                f"head-major), got {lse.shape}"
            )
        shape = out.shape if a == 0 else _broadcast(a, shape, out.shape)
    assert storage is not None
    return storage
