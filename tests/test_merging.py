"""nattn.merge_states: partial results over disjoint keys make the result over all keys."""

from __future__ import annotations

import doctest
import functools
import importlib
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import assert_near, gaussian, qkv, truth
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import nattn

Array = NDArray[Any]

nan, inf = np.nan, np.inf
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def states_of(q: Array, k: Array, v: Array, cuts: list[int], **options: Any) -> Any:
    """Attend to the keys between each two cuts; return outs and lses."""
    found = []
    for start, end in pairwise([0, *cuts, k.shape[-2]]):
        keys = np.s_[..., start:end, :]
        found.append(nattn.attention(q, k[keys], v[keys], return_lse=True, **options))
    return tuple(zip(*found, strict=True))


def defined(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Merge by the definition, in float64, states of finite lses and others that are -inf."""
    wide, rows = outs.astype(np.float64), lses.astype(np.float64)
    lse = functools.reduce(np.logaddexp, rows, np.full(rows.shape[1:], -inf))
    with np.errstate(invalid="ignore"):
        weights = np.where(rows == -inf, 0.0, np.exp(rows - lse))
    return (weights[..., None] * wide).sum(axis=0), lse


def same_bits(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("cuts", [[0], [1], [63], [64], [150], [1, 64], [0, 63, 63, 149, 150]])
def test_merged_equals_full(dtype: str, cuts: list[int]) -> None:
    q, k, v = qkv(1, 2, 20, 150, 8, dtype=dtype)
    t = truth(q, k, v)
    out, lse = nattn.merge_states(*states_of(q, k, v, cuts))
    assert out.dtype == lse.dtype == q.dtype
    # each state is within its budget, and its weight, the exponential of two lse, within twice that
    assert_near(out, t.out, 3 * t.budget.out[..., None])
    assert_near(lse, t.lse, 3 * t.budget.lse)


def test_causal_parts_with_rows_that_see_no_key() -> None:
    q, k, v = qkv(2, 4, 30, 90, 8)
    full = nattn.attention(q, k, v, causal=True, return_lse=True)
    states = []
    for start, end in ((0, 40), (40, 70), (70, 90)):
        keys = np.s_[:, :, start:end]
        options: dict[str, Any] = {"causal": True, "q_offset": 60 - start, "return_lse": True}
        states.append(nattn.attention(q, k[keys], v[keys], **options))
    assert (states[2][1] == -inf).any()
    merged = nattn.merge_states([out for out, _ in states], [lse for _, lse in states])
    for x, y in zip(merged, full, strict=True):
        np.testing.assert_allclose(x, y, atol=4e-6)


def test_eight_keys_of_score_0() -> None:
    out, lse = nattn.merge_states(np.ones((8, 1, 1, 1, 2), "f4"), np.zeros((8, 1, 1, 1), "f4"))
    np.testing.assert_allclose(lse, np.log(8), rtol=1e-6)  # 3 would be the binary logarithm
    assert (out == 1.0).all()


def test_empty_states_alone_are_empty() -> None:
    for outs in (np.zeros((2, 3, 4)), np.full((2, 3, 4), nan)):
        out, lse = nattn.merge_states(outs, np.full((2, 3), -inf))
        assert (out == 0.0).all()
        assert not np.signbit(out).any()
        assert (lse == -inf).all()


ODD = [0.0, -0.0, 1.5, -3e-44, 1e-310, 3e38, inf, -inf, nan]


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8")])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_empty_states_leave_another_its_bits(dtype: np.dtype, place: int) -> None:
    with np.errstate(all="ignore"):
        numbers = np.array(ODD, "f8").astype(dtype)
    compute = np.dtype("f8" if dtype == "f8" else "f4")
    rows = np.array([0.0, -0.0, 5.25, -104.7, 1e30, -3e38], compute)
    outs = np.full((4, len(rows), len(numbers)), nan, dtype)  # which nobody reads
    lses = np.full((4, len(rows)), -inf, compute)
    outs[place], lses[place] = numbers, rows
    out, lse = nattn.merge_states(outs, lses)
    assert same_bits(out, outs[place])
    assert same_bits(lse, rows)


def test_one_state_is_copied() -> None:
    outs, lses = gaussian(1, 5, 3), gaussian(1, 5, seed=1)
    out, lse = nattn.merge_states(outs, lses)
    assert same_bits(out, outs[0])
    assert same_bits(lse, lses[0])
    assert not np.shares_memory(out, outs)
    assert not np.shares_memory(lse, lses)
    assert out.flags.writeable
    assert lse.flags.writeable


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("other", [0.0, -inf, nan, inf, 3e38])
def test_an_lse_of_nan_or_inf_makes_its_row_nan(bad: float, other: float) -> None:
    outs = np.ones((2, 3, 4), "f4")
    lses = np.array([[bad, 0.0, 1.0], [other, 2.0, -inf]], "f4")
    for order in (1, -1):
        out, lse = nattn.merge_states(outs[::order], lses[::order])
        assert np.isnan(out[0]).all()
        assert np.isnan(lse[0])
        assert (out[1:] == 1.0).all()
        assert np.isfinite(lse[1:]).all()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("lse_of_bad", [0.0, -1e4])
def test_outputs_that_are_not_finite_show(bad: float, lse_of_bad: float) -> None:
    outs = np.ones((2, 2, 3), "f4")
    outs[1, 0, 1] = bad
    out, lse = nattn.merge_states(outs, np.array([[0.0, 0.0], [lse_of_bad, lse_of_bad]], "f4"))
    assert not np.isfinite(out[0, 1])
    assert np.isfinite(np.delete(out.ravel(), 1)).all()
    assert np.isfinite(lse).all()


def test_far_apart_and_large() -> None:
    outs = np.array([[[1.0]], [[2.0]]], "f4")
    for low, high in ((-3e38, 3e38), (-1e30, 0.0), (1e30, 2e30)):
        out, lse = nattn.merge_states(outs, np.array([[low], [high]], "f4"))
        assert out.tolist() == [[2.0]]
        assert lse == np.float32(high)


def test_states_are_broadcast() -> None:
    q, k, v = qkv(3, 2, 7, 40, 8, dtype="f8")
    prefix = tuple(x[:1, :, :25] for x in (k, v))  # that all items share
    k[:, :, :25], v[:, :, :25] = prefix
    same_query = np.broadcast_to(q[:1], q.shape)
    one = nattn.attention(q[:1], *prefix, return_lse=True)
    rest = nattn.attention(same_query, k[:, :, 25:], v[:, :, 25:], return_lse=True)
    full = nattn.attention(same_query, k, v, return_lse=True)
    merged = nattn.merge_states([one[0], rest[0]], [one[1], rest[1]])
    for x, y in zip(merged, full, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    again = nattn.merge_states([rest[0], one[0]], [rest[1], one[1]])
    assert again[0].shape == (3, 2, 7, 8)
    assert again[1].shape == (3, 2, 7)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_outputs_are_added_in_float32(name: str) -> None:
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    outs = gaussian(64, 5, 3).astype(dtype)
    lses = gaussian(64, 5, seed=1)
    out, lse = nattn.merge_states(outs, lses)
    wide = nattn.merge_states(outs.astype("f4"), lses)
    assert same_bits(out, wide[0].astype(dtype))
    assert same_bits(lse, wide[1])


def test_lists_strides_byte_orders_and_read_only_arrays() -> None:
    outs, lses = gaussian(3, 4, 5, dtype="f8"), gaussian(3, 4, dtype="f8", seed=1)
    expected = nattn.merge_states(outs, lses)
    outs.flags.writeable = lses.flags.writeable = False
    forms: list[tuple[Any, Any]] = [
        (list(outs), tuple(lses)),
        (outs.tolist(), lses.tolist()),
        (list(outs), lses),
        (outs.astype(">f8"), [x.astype(">f8") for x in lses]),
        (np.asfortranarray(outs), np.repeat(lses, 2, axis=1)[:, ::2]),
    ]
    for form in forms:
        out, lse = nattn.merge_states(*form)
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 4, 0), (2, 0, 4, 3), (2, 3)])
def test_sizes_of_0_and_single_rows(shape: tuple[int, ...]) -> None:
    out, lse = nattn.merge_states(np.zeros(shape, "f4"), np.zeros(shape[:-1], "f4"))
    assert type(out) is type(lse) is np.ndarray
    assert out.shape == shape[1:]
    assert lse.shape == shape[1:-1]
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


def test_what_the_caller_says_of_floating_point_errors_does_not_matter() -> None:
    with np.errstate(all="raise"):
        nattn.merge_states(np.array([[[inf]], [[1e-45]]], "f4"), np.array([[-inf], [-3e38]], "f4"))
        nattn.merge_states(np.ones((2, 1, 1), "f2"), np.array([[0], [-1e3]], "f4"))
        nattn.merge_states(np.zeros((2, 1, 1)), np.full((2, 1), -inf))


f4, f8 = np.dtype("f4"), np.dtype("f8")


def zeros(*shape: int, dtype: Any = f4) -> Array:
    return np.zeros(shape, dtype)


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no states": ([], [], ValueError, "outs: expected at least one state, got none"),
    "an empty stack": (zeros(0, 2, 3), zeros(0, 2), ValueError, "outs: expected at least one"),
    "too few lses": ([zeros(2, 3)] * 2, [zeros(2)], ValueError, "lses: .* each of 2 outs, got 1"),
    "a number": (1.0, [0.0], TypeError, r"outs: expected a list of arrays.*got 1.0 \(float\)"),
    "a dict": ({0: zeros(2, 3)}, [zeros(2)], TypeError, "outs: expected a list of arrays.*dict"),
    "an iterator": (iter([zeros(2, 3)]), [zeros(2)], TypeError, "outs: .*iterator"),
    "a string": ([zeros(2, 3)], "ab", TypeError, "lses: expected a list of arrays.*'ab'"),
    "integers": (zeros(1, 2, 3, dtype=int), zeros(1, 2), TypeError, r"outs\[0\]: .*got int64"),
    "two dtypes": (
        [zeros(2, 3), zeros(2, 3, dtype=f8)],
        [zeros(2)] * 2,
        TypeError,
        r"outs\[1\]: expected dtype float32 as in outs\[0\], got float64",
    ),
    "a wide lse": (
        zeros(2, 2, 3),
        zeros(2, 2, dtype=f8),
        TypeError,
        r"lses\[0\]: expected dtype float32 for outs of float32, got float64",
    ),
    "a narrow lse": (
        zeros(2, 2, 3, dtype="f2"),
        zeros(2, 2, dtype="f2"),
        TypeError,
        r"lses\[0\]: expected dtype float32 for outs of float16, got float16",
    ),
    "lse of another shape": (
        [zeros(2, 5, 3)],
        [zeros(5, 2)],
        ValueError,
        r"lses\[0\]: expected shape \(2, 5\) to fit outs\[0\] \(2, 5, 3\).*got \(5, 2\)",
    ),
    "no axes": ([np.float32(1)], [np.float32(1)], ValueError, r"outs\[0\]: .*N, Dv.*got \(\)"),
    "another Dv": (
        [zeros(2, 3), zeros(2, 1)],
        [zeros(2)] * 2,
        ValueError,
        r"outs\[1\]: .*\(2, 3\).*Dv = 3.*got \(2, 1\)",
    ),
    "what does not broadcast": (
        [zeros(2, 1, 3), zeros(1, 4, 3), zeros(3, 1, 3)],
        [zeros(2, 1), zeros(1, 4), zeros(3, 1)],
        ValueError,
        r"outs\[2\]: .*\(2, 4, 3\).*got \(3, 1, 3\)",
    ),
    "masked": ([np.ma.ones((2, 3))], [zeros(2)], TypeError, r"outs\[0\]: .*masked array"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    outs, lses, error, text = BAD[name]
    with pytest.raises(error, match=f"^{text}"):
        nattn.merge_states(outs, lses)


scores = st.floats(-700, 700, width=32) | st.just(-inf)


@given(
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from(["f4", "f8"]),
    st.data(),
)
def test_any_states(n: int, rows: int, Dv: int, dtype: str, data: st.DataObject) -> None:
    outs = np.random.default_rng(n).uniform(-1, 1, (n, rows, Dv)).astype(dtype)
    lses = np.array(
        data.draw(st.lists(scores, min_size=n * rows, max_size=n * rows)), dtype
    ).reshape(n, rows)
    outs[lses == -inf] = 0.0
    out, lse = nattn.merge_states(outs, lses)
    expected = defined(outs, lses)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=(n + 1) * eps + 700 * 2**-51)
    np.testing.assert_allclose(lse, expected[1], rtol=eps, atol=eps)
    # in two steps, cut anywhere
    cut = data.draw(st.integers(0, n))
    halves = [
        nattn.merge_states(outs[part], lses[part])
        for part in (slice(cut), slice(cut, n))
        if len(outs[part])
    ]
    twice = nattn.merge_states([x for x, _ in halves], [x for _, x in halves])
    # an lse of up to 706 is rounded in between
    np.testing.assert_allclose(twice[0], out, rtol=0, atol=(2 * n + 2 + 4 * 706) * eps)
    np.testing.assert_allclose(twice[1], lse, rtol=2 * eps, atol=2 * eps)


def test_docstring() -> None:
    result = doctest.testmod(importlib.import_module("nattn.api.merging"))
    assert result.attempted > 0
    assert result.failed == 0
