"""The CPU backend: streaming attention in SIMD kernels compiled by Numba. Its door is `door`."""

from __future__ import annotations

from typing import Any

from ...call.problem import Problem

OFFERS = frozenset(
    {"forward", "backward", "jvp", "observe", "classify", "rotate", "gelu", "info", "warmup"}
    | {"clear_cache", "fma_peak", "read_memory"}
)


def refusals(problem: Problem, task: str, arrays: dict[str, Any]) -> list[str]:
    """Return why the backend cannot do a call: it can do all.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    task : str
        One of `OFFERS`.
    arrays : dict
        Further arrays that the task reads, by name.
    """
    return []
