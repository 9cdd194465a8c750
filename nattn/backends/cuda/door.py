"""The door of the CUDA backend: what `OFFERS` lists, and whether there is a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...call.device_arrays import on_device
from ...call.problem import Problem
from ...call.progress import Progress
from . import launch
from .target import SIMULATED

__all__ = ["backward", "check_usable", "forward"]

KEEPS_EXACT = False
LEARNS = False


@functools.cache  # what raised is tried again
def check_usable() -> None:
    """Raise if there is no GPU that can be used.

    Raises
    ------
    RuntimeError
        The text says what is missing.
    """
    if SIMULATED or cuda.is_available():
        return
    try:
        cuda.detect()
        reason = "CUDA reports no device"
    except Exception as error:  # whatever the driver, or its absence, makes of it
        reason = " ".join(str(error).split()).removesuffix(":").rstrip(" .")
    raise RuntimeError(
        "backend: expected an NVIDIA GPU and its driver for 'cuda', got none that can be used: "
        f"{reason}"
    )


def forward(
    problem: Problem,
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    progress: Progress | None = None,
) -> None:
    """Write the attention of a problem to `out` and its log-sum-exp to `lse`.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype, any strides; written.
    lse : ndarray
        ``(B, Hq, Nq)`` of its compute dtype, contiguous; written.
    progress : callable, optional
        Called with the fraction that is done: a GPU does not tell before the end.

    Notes
    -----
    Arrays on a GPU are read and written where they are, on the stream of their library. NumPy
    arrays are copied there and back, and the call returns when that is done.
    """
    if lse.size:
        with on_device(None if problem.allocator is None else problem.allocator.device):
            launch.attend(problem, out, lse)
    if progress is not None:
        progress(1.0)


def backward(
    problem: Problem,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    wrt: frozenset[str],
    *,
    progress: Progress | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the gradients of a problem.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    dout, out : ndarray
        ``(B, Hq, Nq, Dv)`` of the problem's dtype: the gradient and the value of the output.
    lse, dlse : ndarray
        ``(B, Hq, Nq)`` of its compute dtype: the log-sum-exp, and its gradient if it has one.
    wrt : frozenset of str
        Among "q", "k", "v", "bias", "sinks" and "alibi_slopes".
    progress : callable, optional
        Called with the fraction that is done: a GPU does not tell before the end.

    Returns
    -------
    dict
        A gradient for each name. Of NumPy arrays: like q, k and v; of the bias
        ``problem.bias_shape``; ``(Hq,)``; ``(B, Hq)``. Of arrays on a GPU what
        `nattn.call.results.new_gradient` made.
    """
    if problem.allocator is None:
        with np.errstate(over="ignore"):
            out = out.astype(problem.dtype, copy=False)
    with on_device(None if problem.allocator is None else problem.allocator.device):
        found = launch.gradients(problem, dout, out, lse, dlse, wrt)
    if progress is not None:
        progress(1.0)
    return found
