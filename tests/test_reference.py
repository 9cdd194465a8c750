"""The reference against numbers worked out by hand and against loops over plain floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, assert_near, qkv, truth

import nattn
from nattn.problem import Problem

nan, inf = math.nan, math.inf


def attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = nattn.attention(q, k, v, return_lse=True, backend="reference", **options)
    return out.tolist(), lse.tolist()


def column(*values: float) -> list[list[float]]:
    return [[x] for x in values]


# By hand. exp(log(3)) = 3, so weights are ratios of small integers.


def test_two_keys() -> None:
    # scores 0 and log 3, weights 1/4 and 3/4
    out, lse = attend([[1.0]], column(0.0, math.log(3)), column(8.0, 16.0))
    assert out == [[pytest.approx(14.0, rel=1e-15)]]
    assert lse == [pytest.approx(math.log(4), rel=1e-15)]


def test_scale_defaults_to_one_over_root_d() -> None:
    # D = 4: the dot product 2 log 3 becomes log 3
    half = math.log(3) / 2
    out, _ = attend([[1.0] * 4], [[0.0] * 4, [half] * 4], column(8.0, 16.0))
    assert out == [[pytest.approx(14.0, rel=1e-15)]]


def test_scale() -> None:
    out, _ = attend([[1.0]], column(0.0, 1.0), column(8.0, 16.0), scale=math.log(3))
    assert out == [[pytest.approx(14.0, rel=1e-15)]]


def test_bias() -> None:
    out, lse = attend([[0.0]], column(5.0, 6.0), column(8.0, 16.0), bias=[0.0, math.log(3)])
    assert out == [[pytest.approx(14.0, rel=1e-15)]]
    assert lse == [pytest.approx(math.log(4), rel=1e-15)]


def test_eight_zero_scores() -> None:
    _, lse = attend([[0.0]], np.ones((8, 1)), np.ones((8, 1)))
    assert lse == [pytest.approx(math.log(8), rel=1e-15)]  # natural logarithm: not 3


def test_causal_is_bottom_right() -> None:
    # two queries on three keys: they see 2 and 3 of them
    out, _ = attend(column(0.0, 0.0), column(0.0, 0.0, 0.0), column(1.0, 2.0, 6.0), causal=True)
    assert out == [[1.5], [pytest.approx(3.0)]]


def test_causal_top_left() -> None:
    k, v = column(0.0, 0.0, 0.0), column(1.0, 2.0, 6.0)
    out, _ = attend(column(0.0, 0.0), k, v, causal=True, q_offset=0)
    assert out == [[1.0], [1.5]]


def test_window_is_inclusive() -> None:
    n = 5
    q = k = column(*[0.0] * n)
    v = column(1.0, 2.0, 4.0, 8.0, 16.0)
    out, _ = attend(q, k, v, window_size=(1, 2))
    # each power of two is one key: the sums tell who was seen
    counts = [3, 4, 4, 3, 2]
    assert [round(x * n) for (x,), n in zip(out, counts, strict=True)] == [7, 15, 30, 28, 24]


def test_lengths() -> None:
    q, k = np.zeros((2, 1, 2, 1)), np.zeros((2, 1, 3, 1))
    v = np.array([1.0, 2.0, 6.0] * 2).reshape(2, 1, 3, 1)
    out, lse = attend(q, k, v, q_lens=[2, 1], kv_lens=[1, 2])
    assert out == [[[[1.0], [1.0]]], [[[1.5], [0.0]]]]
    assert lse == [[[0.0, 0.0]], [[math.log(2), -inf]]]


def test_heads_of_a_group() -> None:
    q, k = np.zeros((4, 1, 1)), np.zeros((2, 1, 1))
    out, _ = attend(q, k, np.array([1.0, 2.0]).reshape(2, 1, 1))
    assert [head[0][0] for head in out] == [1.0, 1.0, 2.0, 2.0]


# Special values


def test_a_bias_of_minus_inf_hides_even_a_nan_score() -> None:
    out, lse = attend([[1.0]], column(nan, 0.0), column(nan, 3.0), bias=[-inf, 0.0])
    assert (out, lse) == ([[3.0]], [0.0])


def test_a_score_of_minus_inf_is_hidden_with_its_value() -> None:
    out, lse = attend([[1.0]], column(-inf, 0.0), column(nan, 3.0))
    assert (out, lse) == ([[3.0]], [0.0])


def test_a_score_of_minus_inf_is_hidden_whatever_the_bias() -> None:
    out, lse = attend([[1.0]], column(-inf, 0.0), column(nan, 3.0), bias=[inf, 0.0])
    assert (out, lse) == ([[3.0]], [0.0])


def test_a_bias_that_float32_rounds_to_minus_inf_hides() -> None:
    q, k, v = (np.array(x, "f4") for x in ([[1.0]], column(0.0, 0.0), column(1.0, 3.0)))
    assert attend(q, k, v, bias=[-1e300, 0.0]) == ([[3.0]], [0.0])
    assert attend(q, k, v, bias=[-1e300, -1e300]) == ([[0.0]], [-inf])


def test_an_empty_row() -> None:
    out, lse = attend([[1.0]], column(1.0, nan), column(nan, inf), mask=[False, False])
    assert (out, lse) == ([[0.0]], [-inf])


@pytest.mark.parametrize("score", [nan, inf])
def test_a_visible_nan_or_inf_score_makes_its_row_nan(score: float) -> None:
    bias = [[0.0, score, 0.0], [0.0, 0.0, 0.0]]
    out, lse = attend(column(0.0, 0.0), column(0.0, 0.0, 0.0), column(1.0, 2.0, 3.0), bias=bias)
    assert math.isnan(out[0][0])
    assert math.isnan(lse[0])
    assert (out[1], lse[1]) == ([pytest.approx(2.0)], pytest.approx(math.log(3)))


def test_a_value_of_nan_reaches_its_column_alone() -> None:
    v = [[nan, 1.0], [0.0, 1.0]]
    out, lse = attend([[0.0]], column(0.0, 0.0), v)
    assert math.isnan(out[0][0])
    assert (out[0][1], lse) == (1.0, [math.log(2)])


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_visible_value_shows_where_its_probability_underflows(value: float) -> None:
    out, lse = attend([[1.0]], column(0.0, -2000.0), column(1.0, value))
    assert not math.isfinite(out[0][0])
    assert lse == [0.0]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_scores_at_the_lowest_number_are_data(dtype: str) -> None:
    lowest = np.finfo(dtype).min
    k = np.full((3, 1), lowest, dtype)
    out, lse = attend(np.ones((1, 1), dtype), k, np.array(column(1.0, 2.0, 6.0), dtype))
    assert out == [[pytest.approx(3.0)]]
    assert lse == [lowest]


def test_no_warning_leaks() -> None:
    q, k, v = ([[x]] for x in (1e200, 1e200, inf))  # warnings are errors here
    with np.errstate(all="raise"):
        out, lse = attend(q, k, v)
    assert math.isnan(out[0][0])
    assert math.isnan(lse[0])


# Loops over plain Python floats, without NumPy and without `Problem.visible_range`


def naive_row(
    p: Problem, options: dict[str, Any], b: int, h: int, i: int
) -> tuple[list[float], float]:
    n_q, n_kv = int(p.q_lens[b]), int(p.kv_lens[b])
    zeros = [0.0] * p.Dv
    if i >= n_q:
        return zeros, -inf
    offset = options.get("q_offset", n_kv - n_q)
    pos = i + (offset[b] if isinstance(offset, list) else offset)
    left, right = options.get("window_size") or (None, None)
    scores = {}
    for j in range(n_kv):
        if options.get("causal") and j > pos:
            continue
        if left not in (None, -1) and j < pos - left:
            continue
        if right not in (None, -1) and j > pos + right:
            continue
        if p.mask is not None and not p.mask[b, h, i, j]:
            continue
        q, k = p.q[b, h, i].tolist(), p.k[b, h // p.group, j].tolist()
        s = p.scale * math.fsum(x * y for x, y in zip(q, k, strict=True))
        if p.bias is not None:
            s += float(p.dtype.type(p.bias[b, h, i, j]))
        if s != -inf:
            scores[j] = s
    if not scores:
        return zeros, -inf
    top = max(scores.values())
    total = math.fsum(math.exp(s - top) for s in scores.values())
    out = [
        math.fsum(
            math.exp(s - top) / total * float(p.v[b, h // p.group, j, d]) for j, s in scores.items()
        )
        for d in range(p.Dv)
    ]
    return out, top + math.log(total)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_plain_loops(case: Case) -> None:
    q, k, v, options = case.make(np.float64)
    t = truth(q, k, v, **options)
    rng = np.random.default_rng(1)
    rows = [tuple(int(rng.integers(n)) for n in t.lse.shape) for _ in range(12)]
    rows += [(t.problem.B - 1, t.problem.Hq - 1, i) for i in (0, t.problem.Nq - 1)]
    for row in rows:
        out, lse = naive_row(t.problem, options, *row)
        assert_near(t.out[row], np.array(out), t.budget.out[row])
        assert_near(t.lse[row], np.array(lse), t.budget.lse[row])


def test_a_float32_result_is_the_rounded_float64_one() -> None:
    q, k, v = qkv(1, 2, 30, 40, 8)
    single = nattn.attention(q, k, v, scale=0.25, backend="reference")
    double = (x.astype("f8") for x in (q, k, v))
    expected = nattn.attention(*double, scale=0.25, backend="reference")
    np.testing.assert_array_equal(single, expected.astype("f4"))
