"""Attention on NVIDIA GPUs, through numba.cuda. Its door is `door`."""

from __future__ import annotations

from typing import Any

from ...call.device_arrays import DeviceArray, describe
from ...call.problem import Problem

OFFERS = frozenset(("forward", "backward"))

MOST_ROWS = 1 << 31
"""Rows and keys of an item that kernels can number."""


def refusals(problem: Problem, task: str, arrays: dict[str, Any]) -> list[str]:
    """Return why the backend cannot do a call: nothing, if it can.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    task : str
        One of `OFFERS`.
    arrays : dict
        Further arrays that the task reads or writes, by name, as the caller passed them or as
        views.
    """
    p, reasons = problem, []
    if p.pages is not None or p.k_scales is not None:
        got = p.kv_storage if p.pages is None else f"pages of {p.kv_storage}"
        reasons.append(
            f"k, v: expected arrays of q's dtype and in one piece for 'cuda', got {got}; pass "
            "backend='cpu'"
        )
    if p.q_starts is not None:
        reasons.append(
            "backend: expected 'cpu' or 'reference' for packed sequences, got 'cuda', which does "
            "not take them yet"
        )
    for name, n in (("q", p.group * p.Nq), ("k", p.Nk)):
        if n >= MOST_ROWS:
            reasons.append(f"{name}: expected fewer than {MOST_ROWS} rows for a key head, got {n}")
    read = {"q": p.q, "k": p.k, "v": p.v, "mask": p.mask, "bias": p.bias, **arrays}
    for name, x in read.items():
        # A GPU faults where an element straddles its place; copies of host arrays lie well.
        if p.allocator is not None and x is not None and not isinstance(x, DeviceArray):
            x = describe(name, x)
        if not isinstance(x, DeviceArray) or not x.size:
            continue
        if any(n % x.itemsize for n in (x.ctypes.data, *x.strides)):
            reasons.append(
                f"{name}: expected elements at multiples of their {x.itemsize} bytes, got the "
                f"address {x.ctypes.data:#x} and strides {x.strides}"
            )
    return reasons
