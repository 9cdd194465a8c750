"""Weights that can be looked at: against a dense float64 formula, within derived budgets."""

from __future__ import annotations

import doctest
import functools
import io
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import (
    CASES,
    Case,
    OnDevice,
    assert_near,
    gaussian,
    in_step,
    looked_up,
    qkv,
    scores_error,
    truth,
)
from numpy.typing import NDArray

import nattn
from nattn.api import diagnostics
from nattn.api.diagnostics import (
    RowStats,
    attention_map,
    attention_weights,
    key_mass,
    plot_attention,
    row_stats,
)
from nattn.backends import load as load_backend
from nattn.backends import reference
from nattn.backends.cpu import jobs
from nattn.backends.cpu.tiles import bfloat16_product, choose_tile
from nattn.backends.error_budget import error_budget, pair_budget, stored, sum_budget
from nattn.call.problem import Problem

Array = NDArray[Any]
nan, inf = np.nan, np.inf


@pytest.fixture(params=["reference", "cpu"])
def looks(request: pytest.FixtureRequest) -> str:
    """The backends that have a kernel that looks at weights."""
    return str(request.param)


# The truth, and how far a backend may be from it


def plain(q: Array, k: Array, **options: Any) -> Array:
    """Compute ``(B, Hq, Nq, Nk)`` weights by the formula, loop by loop, with no code of nattn."""
    if options.get("layout") == "bnhd":
        q, k = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)
    B, Hq, Nq, D = q.shape
    Nk = k.shape[2]
    k = np.repeat(k, Hq // k.shape[1], axis=1)
    scale = options.get("scale", 1 / np.sqrt(D))
    mask = np.broadcast_to(options.get("mask", True), (B, Hq, Nq, Nk))
    bias = np.broadcast_to(options.get("bias", 0.0), (B, Hq, Nq, Nk)).astype(np.float64)
    slopes = np.broadcast_to(options.get("alibi_slopes", 0.0), (B, Hq)).astype(np.float64)
    sinks = np.broadcast_to(options.get("sinks", -inf), (Hq,)).astype(np.float64)
    left, right = options.get("window_size", (None, None))
    w = np.zeros((B, Hq, Nq, Nk))
    for b, h in np.ndindex(B, Hq):
        n_q = options["q_lens"][b] if "q_lens" in options else Nq
        n_kv = options["kv_lens"][b] if "kv_lens" in options else Nk
        for i in range(n_q):
            pos = i + options.get("q_offset", n_kv - n_q)
            s = scale * (k[b, h, :n_kv].astype(np.float64) @ q[b, h, i].astype(np.float64))
            if "softcap" in options:
                s = options["softcap"] * np.tanh(s / options["softcap"])
            far = pos - np.arange(n_kv)
            s = s - slopes[b, h] * abs(far) + bias[b, h, i, :n_kv]
            seen = mask[b, h, i, :n_kv] & (s != -inf)
            if options.get("causal"):
                seen &= far >= 0
            if left is not None:
                seen &= far <= left
            if right is not None:
                seen &= far >= -right
            if seen.any():
                top = max(s[seen].max(), sinks[h])
                e = np.exp(s[seen] - top)
                w[b, h, i, np.flatnonzero(seen)] = e / (e.sum() + np.exp(sinks[h] - top))
    return w


@dataclass
class Look:
    """The weights of a call in float64, and how far those of a backend may be off, all dense.

    `error` bounds that of a weight, `exponent` is ``lse - s``, `exponent_error` bounds that of it,
    `score_error` that of s; all are 0 where hidden and where nothing is finite.
    """

    problem: Problem
    w: Array
    s: Array
    lse: Array
    visible: Array
    error: Array
    exponent: Array
    exponent_error: Array
    score_error: Array


def look(q: Any, k: Any, **options: Any) -> Look:
    """Compute all weights and their budgets.

    To that of `pair_budget`, for ``exp(s - lse)``, a kernel adds that it may take two factors,
    ``exp(s - max)`` and ``exp(max - lse)``, which share the exponent among them: another 4 u for
    the second one, and roundings of a quotient and products, 4 u at most.
    """
    k = np.asarray(k)
    v = np.zeros((*k.shape[:-1], 1), k.dtype)
    t = truth(q, k, v, **options)
    p = t.problem
    double = 2 if p.compute == np.float64 else 1
    u = double * float(np.finfo(p.compute).eps) / 2
    w = reference.weights(p, np.arange(p.Nq))
    s = np.full(w.shape, -inf)
    visible = np.zeros(w.shape, bool)
    error, exponent, exponent_error, score_error = np.zeros((4, *w.shape))

    def clean(x: Any) -> Array:
        return np.where(np.isfinite(x), x, 0.0)

    with np.errstate(all="ignore"):
        for b, h in np.ndindex(p.B, p.Hq):
            at = (b, h, slice(int(p.q_lens[b])), slice(int(p.kv_lens[b])))
            s[at], visible[at] = reference.scores(p, b, h)
            q1, k1 = reference._queries_and_keys(p, b, h)
            size = clean(np.abs(q1)) @ clean(np.abs(k1)).T
            off = np.where(visible[at], double * scores_error(p, b, h, size, s[at])[0], 0.0)
            lse_error = clean(t.budget.lse[b, h, : p.q_lens[b], None])
            far = np.where(visible[at], clean(t.lse[b, h, : p.q_lens[b], None] - s[at]), 0.0)
            one = clean(w[at])
            pair = pair_budget(
                p.compute,
                one,
                far,
                0.0,
                0.0,
                score_error=off,
                lse_error=lse_error,
                dp_size=0.0,
                delta_error=0.0,
                Dv=0,
            )
            error[at] = np.where(visible[at], pair.weight + 8 * u * one, 0.0)
            exponent[at], score_error[at] = far, off
            exponent_error[at] = np.where(visible[at], off + lse_error + 3 * u * far, 0.0)
    return Look(p, w, s, t.lse, visible, error, exponent, exponent_error, score_error)


def blocks_of(n: int, blocks: int) -> Array:
    return np.arange(n) * blocks // max(n, 1)


def sums_in_blocks(x: Array, s0: int, s1: int) -> Array:
    """Add up blocks of the last two axes, element by element."""
    found = np.zeros((*x.shape[:2], s0, s1))
    row, column = blocks_of(x.shape[2], s0)[:, None], blocks_of(x.shape[3], s1)
    for b, h in np.ndindex(*x.shape[:2]):
        np.add.at(found[b, h], (row, column), x[b, h])
    return found


def clean_of(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def as_bhnd(x: Array, trailing: int) -> Array:
    """Put the axes back that a caller's arrays lack."""
    return x.reshape((1,) * (trailing - x.ndim) + x.shape)


def assert_same_nan(got: Array, expected: Array) -> None:
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))


def check_map(
    backend: str, q: Any, k: Any, size: Any, at: Look | None = None, **options: Any
) -> Any:
    """Compare a map with the truth.

    A block sums the weights of up to ``m`` keys in each of ``r`` rows. Rescaling to a new maximum
    costs no more than another rounding for each (`nattn.backends.error_budget.error_budget`, 3.).
    """
    at = look(q, k, **options) if at is None else at
    p = at.problem
    got = attention_map(q, k, size, backend=backend, **options)
    s0, s1 = (min(*x) for x in zip(size, (p.Nq, p.Nk), strict=True))
    assert got.dtype == p.compute
    assert got.shape == (p.B, p.Hq, s0, s1)[4 - p.rank :]
    area = sums_in_blocks(np.ones((1, 1, p.Nq, p.Nk)), s0, s1)
    sums, errors = sums_in_blocks(at.w, s0, s1), sums_in_blocks(at.error, s0, s1)
    n = 2 * -(-p.Nk // max(s1, 1)) + -(-p.Nq // max(s0, 1))
    budget = sum_budget(p.compute, errors, np.where(np.isfinite(sums), sums, 0.0), n)
    assert_same_nan(as_bhnd(got, 4), sums)
    with np.errstate(invalid="ignore"):
        tolerance = stored(p.compute.name, sums / area, budget / area)
    assert_near(as_bhnd(got, 4), sums / area, tolerance)
    return got


def check_stats(backend: str, q: Any, k: Any, at: Look | None = None, **options: Any) -> RowStats:
    """Compare statistics of rows with the truth.

    The entropy is a sum of ``w (lse - s)``, in which nothing cancels, in whatever way it is kept.
    """
    at = look(q, k, **options) if at is None else at
    p = at.problem
    got = row_stats(q, k, backend=backend, **options)
    assert isinstance(got, RowStats)
    assert all(x.shape == p.lse_shape for x in got)
    assert [x.dtype for x in got] == [p.compute, p.compute, np.int64]
    entropy, largest, argmax = (as_bhnd(x, 3) for x in got)
    bad = np.isnan(at.lse)
    w = np.where(bad[..., None], 0.0, at.w)
    expected = np.where(bad, nan, (w * at.exponent).sum(axis=3))
    terms = at.error * at.exponent + (w + at.error) * at.exponent_error
    size = clean_of(expected)
    n = 3 * at.visible.sum(axis=3) + 16
    budget = sum_budget(p.compute, clean_of(terms).sum(axis=3), size, n)
    assert_same_nan(entropy, expected)
    assert_near(entropy, expected, stored(p.compute.name, size, budget))
    assert not np.any(entropy < 0)
    expected = np.where(bad, nan, w.max(axis=3, initial=0.0))
    assert_same_nan(largest, expected)
    worst = at.error.max(axis=3, initial=0.0)
    assert_near(largest, expected, stored(p.compute.name, clean_of(expected), worst))
    some = at.visible.any(axis=3) & ~bad
    np.testing.assert_array_equal(argmax >= 0, some)
    np.testing.assert_array_equal(argmax[~some], -1)
    for b, h, i in np.argwhere(some):
        j = argmax[b, h, i]
        assert at.visible[b, h, i, j]
        # two scores may change places if they are closer than their errors
        off = 2 * at.score_error[b, h, i].max()
        assert at.s[b, h, i, j] >= at.s[b, h, i].max() - off
    return got


def check_mass(
    backend: str, q: Any, k: Any, lse: Any = None, at: Look | None = None, **options: Any
) -> Array:
    """Compare the mass of keys with the truth."""
    at = look(q, k, **options) if at is None else at
    p = at.problem
    got = key_mass(q, k, lse, backend=backend, **options)
    assert got.dtype == p.compute
    assert got.shape == (p.B, p.Hq, p.Nk)[4 - p.rank :]
    expected = at.w.sum(axis=2)
    count = at.visible.sum(axis=2)
    budget = sum_budget(p.compute, at.error.sum(axis=2), clean_of(expected), count)
    assert_same_nan(as_bhnd(got, 3), expected)
    assert_near(as_bhnd(got, 3), expected, budget)
    return got


def without_dropout(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name not in ("dropout_p", "seed")}


# The dense definition: by hand, by the formula, and by what attention does


def test_weights_by_hand() -> None:
    # scores 0 and log 3: a quarter and three quarters
    q, k = np.ones((1, 1)), np.array([[0.0], [np.log(3)]])
    np.testing.assert_allclose(attention_weights(q, k), [[0.25, 0.75]], rtol=1e-15)
    # with a sink of log 4 half of the weight goes to no key
    got = attention_weights(q[None], k[None], sinks=[np.log(4)])
    np.testing.assert_allclose(got, [[[0.125, 0.375]]], rtol=1e-15)


PLAIN: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "q_offset": -4},
    {"causal": True, "window_size": (5, None)},
    {"window_size": (3, 2), "q_offset": 7},
    {"q_lens": [20, 11], "kv_lens": [5, 30], "causal": True},
    {"q_lens": [0, 20], "kv_lens": [30, 0]},
    {"mask": np.random.default_rng(1).random((2, 1, 20, 30)) < 0.1},
    {"bias": np.where(gaussian(4, 1, 30, seed=2) > 0.5, -inf, gaussian(4, 20, 30))},
    {"softcap": 0.7, "scale": 0.9},
    {"alibi_slopes": np.array([0.5, 0.25, 0.125, 2.0]), "causal": True},
    {"sinks": np.array([-inf, 0.0, 3.0, 400.0]), "window_size": (4, 0), "q_offset": -6},
]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", PLAIN, ids=lambda options: ", ".join(options) or "plain")
def test_weights_are_those_of_the_formula(options: dict[str, Any], dtype: str, layout: str) -> None:
    q, k = gaussian(2, 4, 20, 8, dtype=dtype), gaussian(2, 2, 30, 8, dtype=dtype, seed=1)
    if layout == "bnhd":
        q, k = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k))
    options = {"scale": 8**-0.5} | options | {"layout": layout}
    rounded = dict(options)  # to the compute dtype, as all numbers are
    for name in {"scale", "softcap", "bias"} & set(options):
        rounded[name] = np.asarray(options[name], dtype).astype(np.float64)
    expected = plain(q, k, **rounded)
    got = attention_weights(q, k, **options)
    assert got.dtype == dtype
    assert got.shape == (2, 4, 20, 30)
    np.testing.assert_array_equal(got == 0, expected.astype(dtype) == 0)
    # both are computed in float64: its budget is that of the reference itself
    wide = look(q.astype("f8"), k.astype("f8"), **options)
    assert_near(got, expected, stored(dtype, expected, wide.error))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_weigh_the_values(case: Case) -> None:
    q, k, v, options = case.make("float64")
    options = without_dropout(options)
    t = truth(q, k, v, **options)
    p = t.problem
    got = attention_weights(q, k, **options)
    assert not np.any(got[~t.visible])
    out = got @ np.repeat(p.v, p.group, axis=1)
    assert_near(out, t.out, t.stored_budget())


def test_a_row_that_sees_nothing_has_no_weights() -> None:
    q, k = gaussian(5, 4), gaussian(3, 4)
    got = attention_weights(q, k, causal=True)  # the last query sits on the last key
    np.testing.assert_array_equal(got[:2], 0)
    assert np.all(got[2:, 0] > 0)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        3,
        -1,
        np.int32(2),
        [0, 5, 5, -6],
        (1, 2),
        range(4),
        [],
        slice(1, None, 2),
        slice(None, None, -1),
        np.array([True, False, False, True, True, False]),
        np.array([4, -5], np.int8),
        np.array([1, 2], np.uint64),
    ],
    ids=repr,
)
def test_rows_are_those_that_numpy_takes(rows: Any) -> None:
    q, k = gaussian(2, 6, 4), gaussian(2, 9, 4, seed=1)
    whole = attention_weights(q, k, causal=True)
    expected = whole if rows is None else whole[:, list(rows) if isinstance(rows, tuple) else rows]
    got = attention_weights(q, k, rows, causal=True)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2**-20)
    np.testing.assert_array_equal(got == 0, expected == 0)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (6, IndexError, "rows: expected row numbers from -6 to 5"),
        ([0, -7], IndexError, "rows: expected row numbers from -6 to 5"),
        ([True], IndexError, "rows: expected row numbers"),
        (1.0, TypeError, "rows: expected row numbers .* got .*1.0"),
        ([0.5], TypeError, "rows: expected row numbers"),
        (True, TypeError, "rows: expected row numbers"),
        ("all", TypeError, "rows: expected row numbers"),
        (slice("a", None), TypeError, "rows: expected row numbers"),
        ([[1]], ValueError, r"rows: expected one axis at most, got shape \(1, 1\)"),
        (OnDevice(np.zeros(1, np.int64)), TypeError, "rows: .* in host memory"),
    ],
    ids=lambda x: "on a GPU" if isinstance(x, OnDevice) else repr(x),
)
def test_rows_that_are_none(rows: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        attention_weights(gaussian(6, 4), gaussian(9, 4), rows)
    with pytest.raises(IndexError, match="for there is no row"):
        attention_weights(gaussian(0, 4), gaussian(9, 4), 0)


# Every case on every backend


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    q, k, _, options = case.make("float32")
    options = without_dropout(options)
    at = look(q, k, **options)  # which takes longer than all else
    for backend in ("reference", "cpu"):
        check_map(backend, q, k, (7, 10), at, **options)
        check_stats(backend, q, k, at, **options)
        check_mass(backend, q, k, None, at, **options)
    rows = np.random.default_rng(0).integers(-at.problem.Nq, at.problem.Nq, 7)
    some, expected = attention_weights(q, k, rows, **options), at.w[:, :, rows]
    error = (
        2.0**-28 * at.error[:, :, rows]
    )  # that of float64, twice: the budget grows with its roundoff
    assert_near(some, expected, stored("float32", expected, error))
    np.testing.assert_array_equal(some != 0, expected.astype("f4") != 0)


SOME = [c for c in CASES if c.name in ("odd sizes", "grouped", "lengths", "everything", "sinks")]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_case_in_float64(case: Case) -> None:
    q, k, _, options = case.make("float64")
    at = look(q, k, **options)
    for backend in ("reference", "cpu"):
        check_map(backend, q, k, (7, 10), at, **options)
        check_stats(backend, q, k, at, **options)
        check_mass(backend, q, k, None, at, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_mass_of_case_on_a_gpu(case: Case, dtype: str) -> None:
    q, k, _, options = case.make(dtype)
    check_mass("cuda", q, k, **options)


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 97), (97, 1), (3, 5), (16, 16), (96, 130), (97, 131), (500, 1000)]
)
def test_map_of_any_size(looks: str, size: tuple[int, int]) -> None:
    q, k, _ = qkv(1, 2, 97, 131, 16)
    check_map(looks, q, k, size, causal=True)


def test_a_map_as_large_as_the_matrix_is_the_matrix(looks: str) -> None:
    q, k, _ = qkv(1, 2, 40, 50, 16, dtype="f8")
    got = attention_map(q, k, 300, causal=True, backend=looks)
    np.testing.assert_allclose(got, attention_weights(q, k, causal=True), rtol=1e-12)
    np.testing.assert_array_equal(got, attention_map(q, k, (40, 50), causal=True, backend=looks))


def test_a_row_of_blocks_counts_its_rows(looks: str) -> None:
    """Mean times area, summed over a row of blocks, is the number of its rows that see a key."""
    q, k, _ = qkv(2, 3, 150, 110, 16)
    mask = np.random.default_rng(0).random((2, 3, 150, 1)) < 0.8
    options: dict[str, Any] = {"causal": True, "mask": mask, "q_lens": [150, 77]}
    got = attention_map(q, k, (13, 11), backend=looks, **options)
    area = sums_in_blocks(np.ones((1, 1, 150, 110)), 13, 11)
    at = look(q, k, **options)
    some = at.visible.any(axis=3).astype(float)[..., None]
    assert 0 < some.sum() < some.size
    expected = sums_in_blocks(some, 13, 1)[..., 0]
    error = sums_in_blocks(at.error.sum(axis=3)[..., None], 13, 1)[..., 0]
    n = 2 * 110 + 12 + 11
    assert_near(
        (got * area).sum(axis=3), expected, sum_budget(at.problem.compute, error, expected, n)
    )
    # and all masses together are all such rows
    mass = key_mass(q, k, backend=looks, **options)
    total = sum_budget(at.problem.compute, at.error.sum(axis=(2, 3)), some.sum(axis=(2, 3)), 300)
    assert_near(
        mass.sum(axis=2),
        some[..., 0].sum(axis=2),
        total[..., None][..., 0] if total.ndim == 2 else total[..., 0],
    )


# NaN, Inf and what is hidden


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("trouble", [nan, inf, -inf])
def test_what_is_hidden_is_not_seen(looks: str, dtype: str, trouble: float) -> None:
    q, k, _ = qkv(1, 2, 60, 90, 8, dtype=dtype)
    options: dict[str, Any] = {"causal": True, "kv_lens": 70, "q_lens": 50}
    expected = (
        attention_weights(q, k, **options),
        attention_map(q, k, (6, 9), backend=looks, **options),
        *row_stats(q, k, backend=looks, **options),
        key_mass(q, k, backend=looks, **options),
    )
    q, k = q.copy(), k.copy()
    q[:, :, 50:], k[:, :, 70:] = trouble, trouble
    bias = np.zeros((60, 90), dtype)
    bias[50:] = bias[:, 70:] = nan
    bias[:, 5] = -inf
    plain_bias = np.where(np.arange(90) == 5, -inf, 0.0).astype(dtype)
    base = (
        attention_weights(q, k, bias=plain_bias, **options),
        attention_map(q, k, (6, 9), bias=plain_bias, backend=looks, **options),
        *row_stats(q, k, bias=plain_bias, backend=looks, **options),
        key_mass(q, k, bias=plain_bias, backend=looks, **options),
    )
    k5 = k.copy()
    k5[:, :, 5] = trouble  # hidden by the bias, whatever its score
    for k_ in (k, k5):
        got = (
            attention_weights(q, k_, bias=bias, **options),
            attention_map(q, k_, (6, 9), bias=bias, backend=looks, **options),
            *row_stats(q, k_, bias=bias, backend=looks, **options),
            key_mass(q, k_, bias=bias, backend=looks, **options),
        )
        for x, y in zip(got, base, strict=True):
            np.testing.assert_array_equal(x, y)
    got = (
        attention_weights(q, k, **options),
        attention_map(q, k, (6, 9), backend=looks, **options),
        *row_stats(q, k, backend=looks, **options),
        key_mass(q, k, backend=looks, **options),
    )
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("where", ["key", "query", "score"])
def test_nan_that_is_visible_shows_where_it_is_seen(looks: str, where: str) -> None:
    q, k, _ = qkv(2, 2, 60, 60, 8)
    options: dict[str, Any] = {"window_size": (11, 0)}
    if where == "key":
        k[0, 0, 17] = nan
        bad = {(0, 0, i) for i in range(17, 29)}
    elif where == "query":
        q[1, 1, 33] = nan
        bad = {(1, 1, 33)}
    else:  # of +inf: others underflow to 0 beside it, and are NaN all the same
        bias = np.zeros((2, 2, 60, 60), np.float32)
        bias[1, 0, 40, 35] = inf
        options["bias"] = bias
        bad = {(1, 0, 40)}
    at = look(q, k, **options)
    for b, h, i in np.ndindex(2, 2, 60):
        seen = at.visible[b, h, i]
        expected = seen if (b, h, i) in bad else np.zeros(60, bool)
        np.testing.assert_array_equal(np.isnan(at.w[b, h, i]), expected)
    check_map(looks, q, k, (20, 30), at, **options)
    stats = check_stats(looks, q, k, at, **options)
    assert {tuple(map(int, x)) for x in np.argwhere(np.isnan(stats.entropy))} == bad
    assert {tuple(map(int, x)) for x in np.argwhere(stats.argmax == -1)} == bad
    mass = check_mass(looks, q, k, None, at, **options)
    assert np.isnan(mass).any()
    assert not np.isnan(mass).all(axis=2).any()


def test_nan_shows_in_a_block_of_its_own(looks: str) -> None:
    """The NaN of a processor has the sign bit that also marks what is hidden."""
    q, k, _ = qkv(1, 2, 20, 30, 8)
    bias = np.zeros((20, 30), np.float32)
    bias[4, 7], bias[5, 8] = inf, -nan
    got = check_map(looks, q, k, (20, 30), bias=bias)
    assert np.isnan(got[0, 0, 4, 7])
    k[0, 0, 9, 3] = inf
    check_map(looks, q, k, (20, 30), causal=True)


def test_a_sink_far_above_all_scores(looks: str) -> None:
    """Weights underflow to 0, and so does their entropy; the largest is known by its score."""
    q, k, _ = qkv(1, 1, 5, 300, 8)
    bias = np.full((5, 300), np.finfo(np.float32).min, np.float32)
    stats = row_stats(0 * q, k, bias=bias, sinks=[1e38], backend=looks)
    np.testing.assert_array_equal(stats.entropy, np.zeros((1, 1, 5)))
    np.testing.assert_array_equal(stats.max_weight, np.zeros((1, 1, 5)))
    np.testing.assert_array_equal(stats.argmax, np.zeros((1, 1, 5)))


def test_the_largest_of_scores_that_hardly_differ() -> None:
    """Weights in different blocks of keys may round to the same, and yet one score is larger."""
    q = np.array([[1.0, 0.0]], np.float32)
    k = np.zeros((3000, 2), np.float32)
    k[2900, 0] = 1e-9
    assert row_stats(q, k).argmax[0] == row_stats(q, k, backend="reference").argmax[0] == 2900


def test_a_long_row_is_summed_block_by_block() -> None:
    """Each of n keys adds a rounding within its block of 256, and each block one."""
    n = 100_000
    q, k = gaussian(3, 8), gaussian(n, 8, seed=1)
    got, expected = row_stats(q, k), row_stats(q.astype(float), k.astype(float))
    roundings = 256 + n / 256 + 64
    budget = 2.0**-24 * roundings * (expected.entropy + 4)
    assert np.all(np.abs(got.entropy - expected.entropy) <= budget)
    np.testing.assert_allclose(got.max_weight, expected.max_weight, rtol=2.0**-24 * roundings)


@pytest.mark.parametrize("sink", [nan, inf])
@pytest.mark.parametrize("Nk", [0, 50])
def test_a_sink_that_is_not_finite(looks: str, sink: float, Nk: int) -> None:
    q, k, _ = qkv(1, 2, 40, Nk, 8)
    options: dict[str, Any] = {"sinks": [0.5, sink], "causal": True, "q_offset": -5, "q_lens": 30}
    check_map(looks, q, k, (4, 5), **options)
    stats = check_stats(looks, q, k, **options)
    assert np.isnan(stats.entropy[0, 1, :30]).all()
    assert not np.isnan(stats.entropy[0, 1, 30:]).any()
    assert not np.isnan(stats.entropy[0, 0]).any()
    check_mass(looks, q, k, **options)


def test_nan_does_not_spread_in_a_group_of_heads(backend: str) -> None:
    q, k = gaussian(1, 4, 30, 8), gaussian(1, 2, 40, 8, seed=1)
    expected = key_mass(q, k, backend=backend)
    q[0, 1, 7] = nan
    got = check_mass(backend, q, k)
    assert np.isnan(got[0, 1]).all()
    np.testing.assert_array_equal(got[0, [0, 2, 3]], expected[0, [0, 2, 3]])


# Sizes, ranks, layouts, strides


@pytest.mark.parametrize(
    ("B", "H", "Nq", "Nk"), [(0, 2, 5, 6), (1, 0, 5, 6), (1, 2, 0, 6), (1, 2, 5, 0), (0, 0, 0, 0)]
)
def test_empty_sizes(looks: str, B: int, H: int, Nq: int, Nk: int) -> None:
    q, k, _ = qkv(B, H, Nq, Nk, 4)
    assert attention_weights(q, k).shape == (B, H, Nq, Nk)
    got = attention_map(q, k, (3, 4), backend=looks)
    assert got.shape == (B, H, min(3, Nq), min(4, Nk))
    np.testing.assert_array_equal(got, np.full(got.shape, 1 / Nk if Nk else 0.0))
    entropy, largest, argmax = row_stats(q, k, backend=looks)
    for x, value in ((entropy, 0), (largest, 0), (argmax, -1)):
        np.testing.assert_array_equal(x, np.full((B, H, Nq), value))
    np.testing.assert_array_equal(key_mass(q, k, backend=looks), np.zeros((B, H, Nk)))


@pytest.mark.parametrize("rank", [2, 3])
def test_rank(looks: str, rank: int) -> None:
    q, k = gaussian(2, 30, 8)[4 - rank - 1 :][: 2 if rank == 3 else 1], gaussian(2, 50, 8, seed=1)
    q, k = (q, k) if rank == 3 else (q[0], k[0])
    check_map(looks, q, k, (5, 6), causal=True)
    check_stats(looks, q, k, causal=True)
    check_mass(looks, q, k, causal=True)
    full = [x.reshape((1,) * (4 - rank) + x.shape) for x in (q, k)]
    whole = attention_weights(full[0], full[1], [3, 4])
    np.testing.assert_array_equal(attention_weights(q, k, [3, 4]), whole[(0,) * (4 - rank)])


def test_layout_bnhd_gives_the_same(looks: str) -> None:
    q, k = gaussian(2, 4, 30, 8), gaussian(2, 2, 50, 8, seed=1)
    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k)]
    kwargs: dict[str, Any] = {"causal": True, "backend": looks}
    for f in (attention_map, key_mass, attention_weights):
        function: Any = f
        got = function(*swapped, layout="bnhd", **kwargs)
        np.testing.assert_array_equal(got, function(q, k, **kwargs))
        assert got.shape[:2] == (2, 4)
    got = row_stats(*swapped, layout="bnhd", **kwargs)
    for x, y in zip(got, row_stats(q, k, **kwargs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_arrays_of_every_kind(looks: str) -> None:
    q, k = gaussian(1, 2, 20, 8), gaussian(1, 2, 30, 8, seed=1)
    results = []
    big = np.zeros((1, 2, 20, 16), np.float32)
    big[..., ::2] = q
    flipped = np.ascontiguousarray(k[:, :, ::-1])[:, :, ::-1]
    for q_, k_ in (
        (q, k),
        (big[..., ::2], flipped),
        (q.astype(">f4"), k.astype(">f4")),
        (q.tolist(), k.tolist()),
    ):
        if isinstance(q_, list):  # float64 then
            q_, k_ = np.asarray(q_, np.float32).tolist(), np.asarray(k_, np.float32).tolist()
            assert attention_map(q_, k_, backend=looks).dtype == np.float64
            continue
        q_.flags.writeable = False
        stats = row_stats(q_, k_, backend=looks)
        results.append(
            (attention_map(q_, k_, (4, 4), backend=looks), key_mass(q_, k_, backend=looks), *stats)
        )
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)
            assert y.dtype.isnative


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_narrow_types(dtype: Any) -> None:
    q, k = gaussian(1, 2, 20, 8).astype(dtype), gaussian(1, 2, 30, 8, seed=1).astype(dtype)
    wide = q.astype("f4"), k.astype("f4")
    np.testing.assert_array_equal(attention_weights(q, k), attention_weights(*wide))
    for f in (attention_map, key_mass):
        function: Any = f
        got = function(q, k, backend="reference")
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, function(*wide, backend="reference"))
        # each weight is rounded to bfloat16 where it is computed in pairs, and only there
        pairs = dtype == ml_dtypes.bfloat16 and bfloat16_product() != "fma"
        rtol = 2.0**-8 if pairs and function is key_mass else 1e-5
        np.testing.assert_allclose(function(q, k), got, rtol=rtol)
        assert function(q, k).dtype == np.float32
    got = row_stats(q, k, backend="reference")
    for x, y in zip(got, row_stats(*wide, backend="reference"), strict=True):
        np.testing.assert_array_equal(x, y)


# What rows are like


def test_entropy_of_equal_weights(looks: str) -> None:
    q, k = np.zeros((50, 8), np.float32), gaussian(50, 8)
    got = check_stats(looks, q, k, causal=True)
    n = np.arange(1, 51)
    u = 2.0**-24
    # scores are exact: only sums of n terms and a logarithm err
    np.testing.assert_allclose(got.entropy, np.log(n), rtol=0, atol=u * (3 * 50 + 16) * np.log(50))
    np.testing.assert_array_equal(got.argmax, 0)  # all are tied: the first
    assert got.entropy[0] == 0
    assert not np.signbit(got.entropy[0])


def test_ties_go_to_the_first_key(looks: str) -> None:
    rng = np.random.default_rng(0)
    q = np.ones((1, 1, 40, 1), np.float32)
    k = rng.integers(0, 4, (1, 1, 700, 1)).astype(np.float32)  # scores are small integers
    start = 300
    options: dict[str, Any] = {"window_size": (start, 0), "scale": 1.0}
    got = row_stats(q, k, backend=looks, **options).argmax[0, 0]
    for i in range(40):
        last = 700 - 40 + i
        seen = k[0, 0, last - start : last + 1, 0]
        assert got[i] == last - start + seen.argmax()


def test_one_key_takes_all(looks: str) -> None:
    q = np.full((1, 1, 20, 1), 1e4, np.float32)
    k = np.zeros((1, 1, 60, 1), np.float32)
    k[0, 0, 41] = 1.0
    entropy, largest, argmax = check_stats(looks, q, k)
    np.testing.assert_array_equal(entropy, 0)
    np.testing.assert_array_equal(largest, 1)
    np.testing.assert_array_equal(argmax, 41)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_scores_are_data(looks: str, dtype: str) -> None:
    low = float(np.finfo(dtype).min)
    q, k = np.zeros((1, 1, 30, 4), dtype), np.zeros((1, 1, 90, 4), dtype)
    bias = np.full((30, 90), low, dtype)
    bias[10:, 50:] = low / 2
    bias[20:, 3] = 0
    bias[:, 60:] = -inf
    visible = reference.scores(Problem.build(q, k, k, bias=bias), 0, 0)[1]
    assert np.all(visible.sum(axis=1) == 60)
    got = row_stats(q, k, bias=bias, backend=looks)
    np.testing.assert_array_equal(got.argmax[0, 0], [0] * 10 + [50] * 10 + [3] * 10)
    # equal scores: 60, 10 and 1 of them share the weight, the others underflow
    n = np.repeat([60, 10, 1], 10)
    atol = 2 * float(np.finfo(dtype).eps) * (3 * 60 + 16)
    np.testing.assert_allclose(got.entropy[0, 0], np.log(n), rtol=0, atol=5 * atol)
    np.testing.assert_allclose(got.max_weight[0, 0], 1 / n, rtol=atol)
    picture = attention_map(q, k, 200, bias=bias, backend=looks)[0, 0]
    np.testing.assert_allclose(picture.sum(axis=1), 1, rtol=atol)
    np.testing.assert_allclose(picture.max(axis=1), 1 / n, rtol=atol)
    np.testing.assert_array_equal(picture[:, 60:], 0)


@pytest.mark.parametrize("sink", [3.0, 200.0, 1e6])
def test_a_sink_takes_its_share(looks: str, sink: float) -> None:
    """Also where it leaves nothing to the keys: the first of the largest scores is told then."""
    q, k, _ = qkv(1, 2, 40, 90, 8)
    options: dict[str, Any] = {"sinks": [sink, -sink], "causal": True, "q_offset": -5}
    check_map(looks, q, k, (8, 9), **options)
    got = check_stats(looks, q, k, **options)
    check_mass(looks, q, k, **options)
    bare = row_stats(q, k, backend=looks, causal=True, q_offset=-5)
    np.testing.assert_array_equal(got.argmax, bare.argmax)


# The mass of keys


def test_mass_in_one_pass(backend: str) -> None:
    q, k = gaussian(2, 4, 60, 8), gaussian(2, 2, 90, 8, seed=1)
    v = gaussian(2, 2, 90, 24, seed=2)
    options: dict[str, Any] = {"causal": True, "q_lens": [60, 31]}
    _, lse = nattn.attention(q, k, v, return_lse=True, backend=backend, **options)
    check_mass(backend, q, k, lse, **options)
    # the lse that is given counts: half as much weight with one that is greater by log 2
    got = key_mass(q, k, lse + np.float32(np.log(2)), backend=backend, **options)
    full = key_mass(q, k, lse, backend=backend, **options)
    np.testing.assert_allclose(got, full / 2, rtol=2.0**-16)


def test_mass_of_many_rows() -> None:
    """Sums of up to 20,000 weights in float32 keep the budget: for equal scores, harmonic ones."""
    n = 20_000
    q, k = np.zeros((n, 4), np.float32), np.ones((n, 4), np.float32)
    got = key_mass(q, k, causal=True)
    share = 1 / np.arange(1.0, n + 1)
    expected = np.cumsum(share[::-1])[::-1]
    lse_error = error_budget(np.dtype("f4"), n, 0.0, 0.0, 4).lse
    pair = pair_budget(
        np.dtype("f4"),
        share,
        -np.log(share),
        0.0,
        0.0,
        score_error=0.0,
        lse_error=lse_error,
        dp_size=0.0,
        delta_error=0.0,
        Dv=0,
    )
    error = np.cumsum(pair.weight[::-1])[::-1]
    assert_near(got, expected, sum_budget(np.dtype("f4"), error, expected, np.arange(n, 0, -1)))


@pytest.mark.parametrize(
    ("lse", "error", "text"),
    [
        (np.zeros((2, 5), "f4"), ValueError, r"lse: expected shape \(2, 6\), got \(2, 5\)"),
        (np.zeros((2, 6)), TypeError, "lse: expected dtype float32"),
        (np.zeros((2, 6), "f4"), ValueError, "lse: expected -inf in rows past q_lens"),
    ],
)
def test_an_lse_that_does_not_fit(lse: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        key_mass(gaussian(2, 6, 4), gaussian(2, 9, 4), lse, q_lens=4)


# Promises


@pytest.mark.parametrize("N", [300, 1111])
def test_threads_change_no_bit(N: int) -> None:
    import numba

    q, k = gaussian(2, 4, N, 16), gaussian(2, 2, 1500, 16, seed=1)
    before = numba.get_num_threads()
    results = []
    try:
        for threads in (1, before):
            numba.set_num_threads(threads)
            stats = row_stats(q, k, causal=True)
            results.append((attention_map(q, k, 50, causal=True), key_mass(q, k), *stats))
    finally:
        numba.set_num_threads(before)
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("more", ["many", "one tile", "one row"])
def test_neither_do_batch_mates_and_room(
    looks: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are taken four tiles at a time where room is short: the last part may be one tile."""
    lanes = choose_tile("float32", 1 << 20).lanes
    Nq = {"many": 700, "one tile": 5 * lanes, "one row": 4 * lanes + 1}[more]
    q, k = gaussian(3, 2, Nq, 8), gaussian(3, 2, 400, 8, seed=1)
    options: dict[str, Any] = {"kv_lens": [400, 70, 0], "backend": looks}

    def everything(b: int | None) -> tuple[Array, ...]:
        q_, k_, here = q, k, dict(options)
        if b is not None:
            q_, k_ = q[b : b + 1], k[b : b + 1]
            here["kv_lens"] = options["kv_lens"][b : b + 1]
        found = (attention_map(q_, k_, 60, **here), key_mass(q_, k_, **here))
        return (*found, *row_stats(q_, k_, **here))

    together = everything(None)
    for b in range(3):
        for x, y in zip(together, everything(b), strict=True):
            np.testing.assert_array_equal(x[b], y[0])
    if looks == "cpu":  # the sums of a map are kept for a few rows at a time
        monkeypatch.setattr(sys.modules[load_backend("cpu").observe.__module__], "MOST_STATE", 1)
        for x, y in zip(together, everything(None), strict=True):
            np.testing.assert_array_equal(x, y)


def test_memory_is_linear() -> None:
    n = 6000
    q, k = gaussian(n, 8), gaussian(n, 8, seed=1)
    attention_map(q, k), row_stats(q, k), key_mass(q, k)
    tracemalloc.start()
    try:
        attention_map(q, k), row_stats(q, k), key_mass(q, k)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < n * n * 4 / 4


def test_a_bound_array_indexed_out_of_range(looks: str) -> None:
    q, k, _ = qkv(1, 2, 20, 30, 8)
    mod = functools.partial(looked_up, table=np.ones((1, 29), np.float32), gain=0.5)
    for f in (attention_map, key_mass, row_stats, attention_weights):
        function: Any = f
        with pytest.raises(IndexError, match="score_mod"):
            function(q, k, score_mod=mod, backend=looks)
    # where it is hidden it does not matter
    short = functools.partial(looked_up, table=np.ones((1, 30), np.float32), gain=0.5)
    got = attention_map(q, k, score_mod=mod, kv_lens=29, q_offset=0, backend=looks)
    expected = attention_map(q, k, score_mod=short, kv_lens=29, q_offset=0, backend=looks)
    np.testing.assert_array_equal(got, expected)


def test_block_mask(looks: str) -> None:
    q, k, _ = qkv(2, 4, 70, 150, 16)
    comb = functools.partial(in_step, step=3)
    blocks = nattn.BlockMask.from_mask_mod(comb, B=2, H=4, Nq=70, Nk=150)
    for f in (attention_map, key_mass):
        function: Any = f
        got = function(q, k, block_mask=blocks, backend=looks)
        np.testing.assert_array_equal(got, function(q, k, mask_mod=comb, backend=looks))


def test_the_door(looks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and rows may be had in one pass, of a problem with values, and progress is told."""
    q, k, v = qkv(2, 2, 60, 90, 8)
    sinks = np.array([0.5, -inf], np.float32)
    p = Problem.build(q, k, v, causal=True, sinks=sinks)
    seen: list[float] = []
    if looks == "cpu":  # even so short a call is done by others, in parts
        monkeypatch.setattr(jobs, "SHORT", 0.0)
        monkeypatch.setattr(sys.modules[load_backend("cpu").observe.__module__], "MOST_STATE", 1)
    got = load_backend(looks).observe(p, size=(6, 9), stats=True, progress=seen.append)
    assert set(got) == {"map", "lse", "entropy", "max_weight", "argmax"}
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert seen[-1] == 1
    assert all(0 <= x <= 1 for x in seen)
    np.testing.assert_array_equal(
        got["map"] / np.float32(100),
        attention_map(q, k, (6, 9), causal=True, sinks=sinks, backend=looks),
    )
    stats = row_stats(q, k, causal=True, sinks=sinks, backend=looks)
    for name in RowStats._fields:
        np.testing.assert_array_equal(got[name], getattr(stats, name))
    t = truth(q, k, v, causal=True, sinks=sinks)
    assert_near(got["lse"], t.lse, t.budget.lse)


# What is refused

FUNCTIONS: list[Any] = [attention_weights, attention_map, row_stats, key_mass]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_arguments(function: Any) -> None:
    q, k = gaussian(2, 6, 4), gaussian(2, 9, 4)
    with pytest.raises(
        TypeError,
        match=r"^casual: expected an argument of nattn\.attention, got 'casual'; did you",
    ):
        function(q, k, casual=True)
    with pytest.raises(TypeError, match="got 'return_lse'"):
        function(q, k, return_lse=True)
    with pytest.raises(ValueError, match=r"dropout_p: expected 0 .* got 0.5"):
        function(q, k, dropout_p=0.5, seed=1)
    with pytest.raises(ValueError, match="backend: expected 'auto', 'cpu', "):
        function(q, k, backend="gpu")
    with pytest.raises(TypeError, match="backend: expected"):
        function(q, k, backend=None)
    with pytest.raises(ValueError, match=r"k: expected shape \(2, Nk, 4\)|k: expected"):
        function(q, gaussian(2, 9, 5))
    with pytest.raises(ValueError, match="k: expected 3 axes"):
        function(q, gaussian(9, 4))
    with pytest.raises(TypeError, match="q: expected dtype"):
        function(np.ones((6, 4), int), np.ones((6, 4), int))
    with pytest.raises(ValueError, match=r"mask: expected a shape"):
        function(q, k, mask=np.ones((3, 3), bool))
    for device in ((OnDevice(q), OnDevice(k)), (q, OnDevice(k))):
        with pytest.raises(NotImplementedError, match="expected an array in host memory"):
            function(*device)
    function(q, k, dropout_p=0.0, seed=3, backend="reference")


@pytest.mark.parametrize("function", [attention_map, row_stats])
def test_no_kernel_on_a_gpu(function: Any) -> None:
    with pytest.raises(NotImplementedError, match="'cpu' or 'reference' for the task 'observe'"):
        function(gaussian(6, 4), gaussian(9, 4), backend="cuda")


@pytest.mark.parametrize(
    ("size", "error"),
    [
        *((0, ValueError), ((4, -1), ValueError), ((1, 2, 3), ValueError), (2.5, TypeError)),
        *((None, TypeError), ("ab", TypeError), ((4, True), TypeError)),
    ],
)
def test_bad_sizes(size: Any, error: Any) -> None:
    with pytest.raises(error, match=r"^size: expected a number of blocks from 1"):
        attention_map(gaussian(6, 4), gaussian(9, 4), size)


def test_one_number_is_the_size_of_both() -> None:
    q, k = gaussian(20, 4), gaussian(30, 4)
    seven: Any = np.int64(7)
    got = attention_map(q, k, seven, backend="reference")
    np.testing.assert_array_equal(got, attention_map(q, k, (7, 7), backend="reference"))
    assert attention_map(gaussian(600, 4), gaussian(300, 4), backend="reference").shape == (
        256,
        256,
    )


def test_examples() -> None:
    result = doctest.testmod(diagnostics)
    assert result.attempted > 20
    assert result.failed == 0


# Pictures


@pytest.fixture
def pyplot() -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg", force=True)
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def drawn(ax: Any) -> bytes:
    """Draw the whole figure, which fails for what cannot be drawn."""
    file = io.BytesIO()
    ax.figure.savefig(file, format="png", dpi=40)
    return file.getvalue()


def test_plot_of_words(pyplot: Any) -> None:
    w = attention_weights(gaussian(5, 4), gaussian(5, 4, seed=1), causal=True)
    words = ["the", "$", "price_", "$x^", r"\frac"]
    ax = plot_attention(w, words=words, titles=["$"])
    np.testing.assert_array_equal(ax.images[0].get_array(), w)
    assert [x.get_text() for x in ax.get_xticklabels()] == words
    assert [x.get_text() for x in ax.get_yticklabels()] == words
    assert ax.get_title() == "$"
    assert ax.images[0].get_clim() == (0.0, w.max())
    assert drawn(ax).startswith(b"\x89PNG")


def test_plot_of_some_rows(pyplot: Any) -> None:
    w = attention_weights(gaussian(1, 1, 5, 4), gaussian(1, 1, 5, 4, seed=1), [1, 2])
    ax = plot_attention(w, words=list("abcde"))
    assert [x.get_text() for x in ax.get_xticklabels()] == list("abcde")
    assert "a" not in [x.get_text() for x in ax.get_yticklabels()]
    ax = plot_attention(w, words=list("abcde"), row_words=("b", "c"))
    assert [x.get_text() for x in ax.get_yticklabels()] == ["b", "c"]
    drawn(ax)


def test_plot_of_heads(pyplot: Any) -> None:
    w = attention_weights(gaussian(6, 5, 4), gaussian(6, 5, 4, seed=1))
    w[2, 3] = nan
    axes = plot_attention(w, words=list("abcde"))
    assert len(axes) == 6
    for h, ax in enumerate(axes):
        np.testing.assert_array_equal(ax.images[0].get_array(), w[h])
        assert ax.get_title() == f"head {h}"
        assert ax.images[0].get_clim() == (0.0, np.nanmax(w))  # one scale for all
    image = axes[2].images[0]
    red = image.cmap(image.norm(np.ma.masked_invalid(w[2])))[3, 0]
    assert red.tolist() == [1, 0, 0, 1]
    drawn(axes[0])


def test_plot_where_the_caller_says(pyplot: Any) -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    w = attention_map(gaussian(2, 300, 4), gaussian(2, 400, 4, seed=1), 20, backend="reference")
    axes = plot_attention(w, ax=[left, right], tokens=(300, 400), cmap="viridis", vmax=0.5)
    assert axes == [left, right]
    assert len(figure.axes) == 2  # no bar beside them
    assert tuple(left.images[0].get_extent()) == (-0.5, 399.5, 299.5, -0.5)
    assert left.images[0].get_cmap().name == "viridis"
    assert left.images[0].get_clim() == (0.0, 0.5)
    assert plot_attention(w[0], ax=right) is right
    assert plot_attention(np.zeros((3, 4))).images[0].get_clim() == (0.0, 1.0)
    from matplotlib.colors import LogNorm

    ax = plot_attention(w[0], norm=LogNorm(1e-4, 1e-1))
    assert ax.images[0].norm.vmin == 1e-4
    drawn(ax)


@pytest.mark.parametrize(
    ("weights", "options", "error", "text"),
    [
        (np.zeros((2, 3)), {"words": ["a"]}, ValueError, "words: expected 3 strings, one for each"),
        (np.zeros((2, 3)), {"words": "abc"}, TypeError, "words: expected 3 strings"),
        (np.zeros((2, 3)), {"row_words": ["a"]}, ValueError, "row_words: expected 2 strings"),
        (np.zeros((2, 3)), {"titles": []}, ValueError, "titles: expected 1 strings"),
        (np.zeros((2, 3)), {"tokens": 5}, TypeError, "tokens: expected two numbers"),
        (np.zeros((2, 3)), {"tokens": (0, 5)}, ValueError, "tokens: expected two numbers"),
        (
            np.zeros((2, 3)),
            {"tokens": (4, 5), "words": list("abc")},
            ValueError,
            "tokens: expected None beside words",
        ),
        (np.zeros((2, 2, 3)), {"ax": []}, ValueError, "ax: expected 2 axes"),
        (np.zeros((2, 3)), {"ax": 5}, TypeError, "ax: expected a matplotlib Axes"),
        (np.zeros((2, 2, 2, 3)), {}, ValueError, "weights: expected shape"),
        (np.zeros(3), {}, ValueError, "weights: expected shape"),
        (np.zeros((0, 3)), {}, ValueError, "weights: expected shape"),
        (np.zeros((2, 3), complex), {}, TypeError, "weights: expected real numbers"),
    ],
)
def test_plots_that_do_not_fit(
    weights: Any, options: Any, error: Any, text: str, pyplot: Any
) -> None:
    with pytest.raises(error, match=text):
        plot_attention(weights, **options)
    assert pyplot.get_fignums() == []  # nothing was begun


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError,
        match=r"the library matplotlib, got none .* python -m pip install .nattn\[demo\]",
    ):
        plot_attention(np.zeros((2, 3)))
