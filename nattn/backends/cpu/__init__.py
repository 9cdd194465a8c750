"""The CPU backend: streaming attention in SIMD kernels compiled by Numba. Its door is `door`."""

from __future__ import annotations

from typing import Any

from ...call.problem import Problem
from ...vectors.dtypes import FLOAT32, FLOAT64, storage_name

OFFERS = frozenset(
    {"forward", "backward", "observe", "classify", "rotate", "gelu", "info", "warmup"}
    | {"clear_cache", "fma_peak"}
)


def refusals(problem: Problem, task: str, arrays: dict[str, Any]) -> list[str]:
    """Return why the backend cannot do a call: nothing, if it can.

    Parameters
    ----------
    problem : Problem
        The call, checked.
    task : str
        One of `OFFERS`.
    arrays : dict
        Further arrays that the task reads, by name.
    """
    if not problem.given and (problem.storage == "float32" or problem.storage == "float64"):
        return []
    wrong = [] if problem.dtype in (FLOAT32, FLOAT64) else [("q, k, v", problem.storage)]
    expected = {"q, k, v": "dtype float32 or float64", "bias": "dtype float16, float32 or float64"}
    for name, (_, dtype) in problem.given.items():
        if storage_name(dtype) == "bfloat16":
            wrong.append((name, "bfloat16"))
    other = "dtype float16, float32, float64 or integers"
    reasons = [
        f"{name}: expected {expected.get(name, other)} on the cpu backend, got {dtype}"
        for name, dtype in wrong
    ]
    if reasons:
        reasons[-1] += "; convert with .astype(np.float32), or pass backend='cuda' or 'reference'"
    return reasons
