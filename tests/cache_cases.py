"""What the tests of caches share: sequences as lists of rows, and the truth about them."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import assert_near, truth
from numpy.typing import NDArray

from nattn.backends.error_budget import stored
from nattn.call.quantised import quantise
from nattn.call.results import as_bhnd
from nattn.vectors.dtypes import storage_name

Array = NDArray[Any]


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def batch_of(sequences: list[Array]) -> tuple[Array, list[int]]:
    """Put sequences ``(n, H, D)`` into one array, with NaN behind their ends, and their lengths."""
    n = max(map(len, sequences), default=0)
    shape = sequences[0].shape[1:]
    batch = np.full((len(sequences), n, *shape), np.nan, sequences[0].dtype)
    for row, sequence in zip(batch, sequences, strict=True):
        row[: len(sequence)] = sequence
    return batch, [len(x) for x in sequences]


def in_8_bits(x: Array) -> Array:
    """Return the numbers that rows become in int8, in the dtype that they are computed in."""
    codes, scales = quantise("x", x)
    wide = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    numbers: Array = codes.astype(wide)
    numbers *= scales[..., None]
    return numbers


def check(
    result: tuple[Array, Array],
    q: Array,
    k: list[Array],
    v: list[Array],
    *,
    int8: bool = False,
    **options: Any,
) -> None:
    """Compare ``(out, lse)`` of queries ``(B, Nq, Hq, D)`` with the truth about sequences.

    In int8 the budget is twice that of a call, for a scale may be multiplied before or after a sum.
    """
    out, lse = result
    keys, lens = batch_of([in_8_bits(x) if int8 else x for x in k])
    values, _ = batch_of([in_8_bits(x) if int8 else x for x in v])
    t = truth(q.astype(keys.dtype), keys, values, layout="bnhd", kv_lens=lens, **options)
    assert out.shape == t.problem.out_shape
    assert out.dtype == q.dtype
    assert lse.dtype == t.problem.compute
    times = 2 if int8 else 1
    error = times * t.budget.out[..., None]
    storage = storage_name(q.dtype)
    assert storage is not None
    if q.dtype != t.problem.compute:
        error = stored(storage, t.out, error)
    assert_near(as_bhnd(t.problem, out), t.out, error)
    assert_near(lse, t.lse, times * t.budget.lse)
