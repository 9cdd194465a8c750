"""The reference against numbers worked out by hand and against loops over plain floats."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import CASES, Case, assert_near, check, check_gradients, qkv, truth

import nattn
from nattn.call.problem import Problem
from nattn.functions.binding import Combination
from nattn.functions.dropout import keep

nan, inf = math.nan, math.inf
NARROW = [np.float16, ml_dtypes.bfloat16]


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


# Modifiers, sinks and dropout by hand: their order is what these tell apart


def add_one(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 1.0


def test_softcap_comes_before_bias_and_mask() -> None:
    # the score 50 becomes 1, and the bias is not capped: weights are 1, e and e**3
    keys, v = column(0.0, 50.0, 50.0, 50.0), column(1.0, 2.0, 3.0, 9.0)
    options: dict[str, Any] = {"softcap": 1.0, "mask": [True, True, True, False]}
    out, lse = attend([[1.0]], keys, v, bias=[0.0, 0.0, 2.0, 5.0], **options)
    total = 1 + math.e + math.e**3
    assert lse == [pytest.approx(math.log(total), rel=1e-15)]
    assert out == [[pytest.approx((1 + 2 * math.e + 3 * math.e**3) / total, rel=1e-15)]]


@pytest.mark.parametrize("off", [None, 0, 0.0, -0.0])
def test_softcap_is_off(off: Any) -> None:
    arrays = [[1.0]], column(0.0, 50.0), column(1.0, 2.0)
    assert attend(*arrays, softcap=off) == attend(*arrays)


def test_softcap_comes_before_score_mod() -> None:
    # 1 * tanh(50) + 1 and 1 * tanh(0) + 1: their difference is 1, the larger one 2
    out, lse = attend([[1.0]], column(0.0, 50.0), column(1.0, 2.0), softcap=1, score_mod=add_one)
    assert out == [[pytest.approx(1 + math.e / (1 + math.e), rel=1e-15)]]
    assert lse == [pytest.approx(math.log(math.e + math.e**2), rel=1e-15)]


def test_softcap_takes_infinite_scores() -> None:
    # -inf becomes -1, so the key is visible
    out, lse = attend([[1.0]], column(-inf, inf), column(8.0, 16.0), softcap=1.0)
    assert out == [[pytest.approx((8 + 16 * math.e**2) / (1 + math.e**2), rel=1e-15)]]
    assert lse == [pytest.approx(math.log(math.exp(-1) + math.e), rel=1e-15)]


def squared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * score


def test_alibi_comes_after_score_mod() -> None:
    # the query is at position 2: distances 2, 1, 0; 3**2 - 9, 2**2 - 4.5, 1 - 0
    _, lse = attend(
        [[1.0]], column(3.0, 2.0, 1.0), np.eye(3), score_mod=squared, alibi_slopes=[4.5], scale=1
    )
    assert lse == [pytest.approx(math.log(1 + math.exp(-0.5) + math.e), rel=1e-15)]


def test_alibi_distances_are_absolute_and_follow_the_offset() -> None:
    zeros3 = column(0.0, 0.0, 0.0)
    for q_offset, distances in ((None, [2, 1, 0]), (1, [1, 0, 1]), (-1, [1, 2, 3])):
        out, _ = attend([[0.0]], zeros3, np.eye(3), alibi_slopes=[math.log(2)], q_offset=q_offset)
        weights = [0.5**d for d in distances]
        assert out == [[pytest.approx(w / sum(weights), rel=1e-14) for w in weights]]


def test_alibi_slopes_of_each_item_and_head() -> None:
    q, k = np.zeros((2, 2, 1, 1)), np.zeros((2, 1, 2, 1))
    slopes = np.log([[1.0, 3.0], [7.0, 15.0]])
    v = np.broadcast_to([[0.0], [1.0]], (2, 1, 2, 1))
    out, _ = attend(q, k, v, alibi_slopes=slopes)  # 1 / (1 + exp(-slope))
    assert np.ravel(out).tolist() == pytest.approx([1 / 2, 3 / 4, 7 / 8, 15 / 16], rel=1e-15)


def test_the_bias_comes_last() -> None:
    _, lse = attend([[0.0]], column(0.0), column(1.0), score_mod=squared, bias=[-3.0])
    assert lse == [-3.0]


def test_sinks() -> None:
    # weights 1, 3 and the sink's 4
    out, lse = attend([[1.0]], column(0.0, math.log(3)), column(8.0, 16.0), sinks=[math.log(4)])
    assert out == [[pytest.approx(7.0, rel=1e-15)]]
    assert lse == [pytest.approx(math.log(8), rel=1e-15)]


def test_a_sink_far_above_the_scores() -> None:
    out, lse = attend([[1.0]], column(0.0, 1.0), column(8.0, 16.0), sinks=[2000.0])
    assert (out, lse) == ([[0.0]], [2000.0])


def test_a_sink_of_minus_inf_is_none() -> None:
    arrays = [[1.0]], column(0.0, 1.0), column(8.0, 16.0)
    assert attend(*arrays, sinks=[-inf]) == attend(*arrays)
    assert attend(*arrays, sinks=[-inf], mask=[False, False]) == ([[0.0]], [-inf])


def test_a_row_of_nothing_but_a_sink() -> None:
    q, k = np.zeros((2, 1, 2, 1)), np.zeros((2, 1, 3, 1))
    out, lse = attend(
        q, k, np.ones((2, 1, 3, 1)), sinks=[-7.0], kv_lens=[0, 3], q_lens=[1, 2], causal=True
    )
    assert out[0] == [[[0.0], [0.0]]]
    assert lse[0] == [[-7.0, -inf]]  # the second row does not exist


@pytest.mark.parametrize("sink", [nan, inf])
def test_a_sink_of_nan_or_inf_makes_the_rows_of_its_head_nan(sink: float) -> None:
    q, k = np.zeros((2, 3, 1)), np.zeros((2, 3, 1))
    out, lse = attend(q, k, np.ones((2, 3, 1)), sinks=[sink, 0.0], causal=True, q_offset=-1)
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()  # also of the row that sees no key
    assert np.isfinite(out[1]).all()
    assert np.isfinite(lse[1]).all()


def test_dropout() -> None:
    kept = keep(0, 0, 0, np.arange(4), 5, 0.5)
    assert 0 < kept.sum() < 4
    out, lse = attend([[0.0]], np.zeros((4, 1)), np.eye(4), dropout_p=0.5, seed=5)
    assert out == [[0.5 if x else 0.0 for x in kept]]  # 1 / 4 / (1 - 0.5)
    assert lse == [pytest.approx(math.log(4), rel=1e-15)]  # as without dropout


def test_dropout_is_indexed_by_the_row_and_not_its_position() -> None:
    q, k = np.zeros((3, 2, 5, 1)), np.zeros((3, 1, 9, 1))
    v = np.broadcast_to(np.eye(9), (3, 1, 9, 9))
    out, _ = attend(q, k, v, dropout_p=0.4, seed=9, q_offset=[70, -3, 2**70], q_lens=[5, 4, 5])
    item, head, i, j = np.indices((3, 2, 5, 9))
    kept = keep(item, head, i, j, 9, 0.4)
    kept[1, :, 4] = False
    np.testing.assert_array_equal(np.array(out) > 0, kept)


def test_the_value_of_a_dropped_key_is_not_read() -> None:
    kept = keep(0, 0, 0, np.arange(4), 5, 0.5)
    v = np.where(kept, 1.0, nan)[:, None]
    assert attend([[0.0]], np.zeros((4, 1)), v, dropout_p=0.5, seed=5)[0] == [[0.5 * kept.sum()]]


def test_a_dropped_score_of_nan_still_shows() -> None:
    kept = keep(0, 0, 0, np.arange(4), 5, 0.5)
    scores = np.where(kept, 0.0, nan)[:, None]
    out, lse = attend([[1.0]], scores, np.ones((4, 1)), dropout_p=0.5, seed=5)
    assert math.isnan(out[0][0])
    assert math.isnan(lse[0])


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


def widened(mod: Any) -> Any:
    """Bind float64 arrays in the place of narrower ones: a call computes in one precision."""
    if isinstance(mod, Combination):
        return Combination(mod.operator, tuple(map(widened, mod.parts)))
    if not isinstance(mod, functools.partial):
        return mod
    wide = {
        name: x.astype("f8") if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for name, x in mod.keywords.items()
    }
    return functools.partial(mod.func, *mod.args, **wide)


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
        if p.mask_mod is not None and not p.mask_mod(b, h, pos, j):
            continue
        q, k = p.q[b, h, i].tolist(), p.k[b, h // p.group, j].tolist()
        s = p.scale * math.fsum(x * y for x, y in zip(q, k, strict=True))
        if options.get("softcap"):
            s = options["softcap"] * math.tanh(s / options["softcap"])
        if "score_mod" in options:
            s = float(widened(options["score_mod"])(s, b, h, pos, j))
        if "alibi_slopes" in options:
            slopes = options["alibi_slopes"]
            s -= float(slopes[b][h] if np.ndim(slopes) == 2 else slopes[h]) * abs(pos - j)
        if p.bias is not None:
            s += float(p.compute.type(p.bias[b, h, i, j]))
        if s != -inf:
            scores[j] = s
    sink = float(options["sinks"][h]) if "sinks" in options else -inf
    if not scores:
        return zeros, sink
    top = max(*scores.values(), sink)
    total = math.fsum(math.exp(s - top) for s in (*scores.values(), sink))
    drop, seed = options.get("dropout_p", 0.0), options.get("seed", 0)
    kept = {j: math.exp(s - top) for j, s in scores.items() if keep(b, h, i, j, seed, drop)}
    out = [
        math.fsum(
            w / total / (1 - drop) * float(p.v[b, h // p.group, j, d]) for j, w in kept.items()
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


@pytest.mark.parametrize("dtype", NARROW, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_narrow_storage(case: Case, dtype: Any) -> None:
    q, k, v, options = case.make(dtype)
    check("reference", q, k, v, **options)
    check_gradients("reference", q, k, v, **options)


def test_a_narrow_result_is_the_rounded_wide_one() -> None:
    for dtype in NARROW:
        q, k, v = qkv(1, 2, 30, 40, 8, dtype=dtype)
        narrow = nattn.attention(q, k, v, scale=0.25, backend="reference")
        wide = (x.astype("f8") for x in (q, k, v))
        expected = nattn.attention(*wide, scale=0.25, backend="reference")
        np.testing.assert_array_equal(narrow, expected.astype(dtype))


def test_a_result_too_large_for_float16_is_infinite() -> None:
    # the one key is kept, and its value counts twice
    options: dict[str, Any] = {"dropout_p": 0.5, "backend": "reference"}
    options["seed"] = next(n for n in range(99) if keep(0, 0, 0, 0, n, 0.5))
    q, k, v = (np.full((1, 1), x, "f2") for x in (1, 1, 60000))
    with np.errstate(all="raise"):
        out, lse = nattn.attention(q, k, v, return_lse=True, **options)
        grads: Any = nattn.attention_backward(v, q, k, v, v, lse, **options)
    assert out.tolist() == grads.dv.tolist() == [[inf]]


def test_a_float32_result_is_the_rounded_float64_one() -> None:
    q, k, v = qkv(1, 2, 30, 40, 8)
    single = nattn.attention(q, k, v, scale=0.25, backend="reference")
    double = (x.astype("f8") for x in (q, k, v))
    expected = nattn.attention(*double, scale=0.25, backend="reference")
    np.testing.assert_array_equal(single, expected.astype("f4"))
