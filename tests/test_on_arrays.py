"""Users' functions: what they may do, what they are told if they may not, and what they read."""

from __future__ import annotations

import dataclasses
import doctest
import functools
import importlib
import math
from typing import Any

import numpy as np
import pytest
import rounding
from cases import (
    assert_near,
    check,
    documents,
    gate,
    gaussian,
    looked_up,
    qkv,
    truth,
)

import nattn
from nattn.call.block_mask import BlockMask
from nattn.call.problem import Problem
from nattn.functions import binding, masks, mods
from nattn.functions.on_arrays import ArrayFunction, elementwise

nan, inf = np.nan, np.inf
F4, F8 = np.dtype("f4"), np.dtype("f8")


def dense(function: Any, dtype: np.dtype = F8) -> ArrayFunction:
    tree = binding.resolve("score_mod", function, binding.SCORE_MOD)
    return ArrayFunction("score_mod", tree, dtype)


def call(function: Any, score: Any, dtype: np.dtype = F8, n: int = 3) -> Any:
    """Call a score_mod as the reference does, for n queries at 0, 1, ... and n keys."""
    i = np.arange(n)
    score = np.broadcast_to(np.asarray(score, float), (n, n))
    return dense(function, dtype)(score, [[1]], [[2]], i[:, None], i[None]).tolist()


# What a function may do


def cube(x: Any) -> Any:
    return x * x * x


SHIFT = 0.5


def versatile(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, rate: Any, far: Any = 5) -> Any:
    """Use Python's functions of numbers, a helper, a global, and assignments in place."""
    distance = abs(q_idx - kv_idx)
    distance = min(distance, far)
    score += SHIFT
    score *= math.exp(-rate * distance)
    score -= cube(math.tanh(score)) / 4
    ratio = kv_idx
    ratio /= 2 + abs(q_idx)
    near = distance
    near //= 3
    return max(score, -1.0) + np.float32(near) * 0.25 + 0.1 * max(b, h) + ratio


def versatile_number(score: float, b: int, h: int, q: int, k: int, rate: float) -> float:
    distance = min(abs(q - k), 5)
    score = (score + 0.5) * math.exp(-rate * distance)
    score -= math.tanh(score) ** 3 / 4
    return max(score, -1.0) + 0.25 * (distance // 3) + 0.1 * max(b, h) + k / (2 + abs(q))


def test_python_on_numbers_means_the_same_on_arrays() -> None:
    scores = np.linspace(-4, 4, 81).reshape(9, 9)
    got = call(functools.partial(versatile, rate=0.3), scores, n=9)
    expected = [
        [versatile_number(float(scores[q, k]), 1, 2, q, k, 0.3) for k in range(9)] for q in range(9)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_python_on_numbers(backend: str, dtype: str) -> None:
    q, k, v = qkv(2, 3, 60, 90, 16, dtype=dtype)
    check(backend, q, k, v, score_mod=functools.partial(versatile, rate=0.3))


def test_arguments_are_never_changed_in_place() -> None:
    i = np.arange(3)
    args = [np.zeros((3, 3)), np.array([[1]]), np.array([[2]]), i[:, None], i[None]]
    before = [x.copy() for x in args]
    dense(functools.partial(versatile, rate=0.3))(*args)
    for x, y in zip(args, before, strict=True):
        np.testing.assert_array_equal(x, y)


def least(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any, y: Any) -> Any:
    return min(score + x, score + y)


@pytest.mark.parametrize("x", [1.0, 2.0, nan])
@pytest.mark.parametrize("y", [1.0, 2.0, nan])
def test_min_is_that_of_python(x: float, y: float) -> None:
    got = call(functools.partial(least, x=x, y=y), 0.0, n=1)
    np.testing.assert_equal(got, [[min(x, y)]])


def closed_over(factor: float) -> Any:
    def inner(x: Any) -> Any:
        return max(x, 0.0) * factor

    def outer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return inner(score)

    return outer


def test_numbers_and_helpers_in_closures() -> None:
    assert call(closed_over(2.0), [-1.0, 0.0, 3.0]) == [[0.0, 0.0, 6.0]] * 3
    assert call(closed_over(5.0), [-1.0, 0.0, 3.0]) == [[0.0, 0.0, 15.0]] * 3


def constant(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 1


def test_a_number_stands_for_all_pairs(backend: str) -> None:
    q, k, v = qkv(1, 1, 20, 30, 8)
    out, lse = check(backend, q, k, v, score_mod=constant)
    t = truth(np.zeros_like(q), k, v, bias=[[1.0]])
    assert_near(out, t.out, t.budget.out[..., None])
    assert_near(lse, t.lse, t.budget.lse)


def test_bound_floats_take_the_precision_of_the_call() -> None:
    function = functools.partial(looked_up, table=np.array([[0.1]] * 2), gain=0.1)
    product = float(np.float32(0.1)) ** 3
    assert call(function, 0.0, F4, n=1) == [[product]]
    assert call(function, 0.0, F8, n=1) == [[0.1 * 0.1 * 0.1]]


def test_a_bound_float_that_overflows_is_infinite() -> None:
    with np.errstate(all="raise"):
        assert call(functools.partial(least, x=1e300, y=2e300), 0.0, F4, n=1) == [[inf]]


def square_of_distance(b: Any, h: Any, q_idx: Any, kv_idx: Any, distance: Any) -> Any:
    return (q_idx - kv_idx) ** 2 == distance * distance


@pytest.mark.parametrize("q_offset", [69_999, 2**31])
def test_indices_do_not_overflow(backend: str, q_offset: int) -> None:
    v = np.arange(70_000, dtype="f4").reshape(1, 1, -1, 1)
    mask = functools.partial(square_of_distance, distance=q_offset - 19_999)
    out, lse = nattn.attention(
        np.ones((1, 1, 1, 1), "f4"),
        np.zeros_like(v),
        v,
        mask_mod=mask,
        q_offset=q_offset,
        return_lse=True,
        backend=backend,
    )
    assert out.item() == 19_999
    assert lse.item() == 0.0


# What it may not


def if_on_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if score > 0:
        return score
    return 2 * score


def if_on_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score if h == 0 else 2 * score


def and_on_indices(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx > 3 and kv_idx > 3


def chained(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 0 <= kv_idx - q_idx < 3


def loop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for _ in range(b):
        score = score + 1
    return score


REFUSED = {
    "if on a score": ("score_mod", if_on_score, "if score > 0:"),
    "if on a head": ("score_mod", if_on_head, "return score if h == 0"),
    "and on indices": ("mask_mod", and_on_indices, "return q_idx > 3 and"),
    "a chained comparison": ("mask_mod", chained, "return 0 <= "),
    "in a combination": ("mask_mod", nattn.mask(chained) & masks.causal, "return 0 <= "),
    "in a composition": ("score_mod", mods.compose(constant, if_on_score), "if score > 0:"),
}


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("what", REFUSED)
def test_a_python_if_is_refused(backend: str, what: str, n: int) -> None:
    name, function, line = REFUSED[what]
    q, k, v = qkv(1, 1, n, n, 8)  # one element has a truth, but a function has many calls
    out = np.full(v.shape, 7.0, "f4")
    options: dict[str, Any] = {name: function}
    with pytest.raises(TypeError) as caught:
        nattn.attention(q, k, v, out=out, backend=backend, **options)
    text = str(caught.value)
    assert text.startswith(f"{name}: expected")
    for word in ("got", "np.where", "test_on_arrays.py", "line ", line):
        assert word in text, text
    assert np.all(out == 7.0)


def test_a_loop_over_the_batch_item_is_refused(backend: str) -> None:
    with pytest.raises(TypeError, match=r"^score_mod: expected (.|\n)*range\(b\)"):
        nattn.attention(*qkv(1, 1, 5, 5, 4), score_mod=loop, backend=backend)


def boolean(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score > 0


def nothing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return None


def integers(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx & kv_idx


def floats(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 0.5 * kv_idx


WRONG_TYPE = {
    "a boolean score": ("score_mod", boolean, "boolean"),
    "no score": ("score_mod", nothing, "nothing"),
    "a boolean score in a composition": ("score_mod", mods.compose(boolean, constant), "boolean"),
    "an integer mask": ("mask_mod", integers, "integers"),
    "a float mask": ("mask_mod", floats, "floats"),
    "an integer mask in a combination": ("mask_mod", masks.causal | integers, "integers"),
    "an inverted integer mask": ("mask_mod", ~nattn.mask(integers), "integers"),
}


@pytest.mark.parametrize("what", WRONG_TYPE)
def test_the_type_of_what_is_returned(backend: str, what: str) -> None:
    name, function, culprit = WRONG_TYPE[what]
    q, k, v = qkv(1, 1, 5, 5, 4)
    out = np.full(v.shape, 7.0, "f4")
    options: dict[str, Any] = {name: function}
    with pytest.raises(TypeError) as caught:
        nattn.attention(q, k, v, out=out, backend=backend, **options)
    text = str(caught.value)
    assert text.startswith(f"{name}: expected")
    assert "got" in text
    assert culprit in text
    assert np.all(out == 7.0)


def imaginary(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 1j


def other_shape(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.zeros(7)


def all_of_it(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table


def sliced(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[0:1]


def by_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[score]


def by_boolean(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[q_idx > kv_idx]


def one_number(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + math.erf(score)


TABLE = gaussian(2, 5)
MISUSED: dict[str, tuple[Any, list[str]]] = {
    "complex": (imaginary, ["imaginary", "real numbers", "complex128"]),
    "another shape": (other_shape, ["other_shape", "(7,)", "(3, 3)"]),
    "all of an array": (
        functools.partial(all_of_it, table=TABLE),
        ["table of all_of_it", "all of it"],
    ),
    "too few indices": (functools.partial(by_score, table=TABLE), ["2 indices", "got 1"]),
    "a slice": (
        functools.partial(sliced, table=TABLE[0]),
        ["integers", "of sliced", "slice"],
    ),
    "a float as index": (functools.partial(by_score, table=TABLE[0]), ["integers", "float64"]),
    "a boolean as index": (functools.partial(by_boolean, table=TABLE[0]), ["integers", "bool"]),
    "a function of one number": (one_number, ["NumPy's functions", "math.erf"]),
}


@pytest.mark.parametrize("what", MISUSED)
def test_what_the_reference_refuses(what: str) -> None:
    function, words = MISUSED[what]
    with pytest.raises(TypeError) as caught:
        call(function, 0.0)
    text = str(caught.value)
    assert text.startswith("score_mod: expected")
    for word in [*words, "got"]:
        assert word in text, text


# Bound arrays and their ends


def test_negative_indices_wrap(backend: str) -> None:
    q, k, v = qkv(2, 2, 40, 30, 8)
    table = gaussian(2, 30)
    options: dict[str, Any] = {"score_mod": functools.partial(looked_up, table=table, gain=1)}
    check(backend, q, k, v, **options)  # the first rows sit at -10, -9, ...
    (bound,) = Problem.build(q, k, v, **options).score_mods
    got = ArrayFunction("score_mod", bound, F8)(
        np.zeros((1, 30)), [[1]], [[0]], np.array([[-10]]), np.arange(30)[None]
    )
    np.testing.assert_array_equal(got[0], table[1, -10] * table[1].astype("f8"))


OUT_OF_RANGE: dict[str, dict[str, Any]] = {
    # arrays too short for the last keys, the last rows, the first rows, an item
    "keys": {"table": np.ones((2, 55), "f4")},
    "keys, none at all": {"table": np.ones((2, 0), "f4")},
    "rows": {"table": np.ones((2, 60), "f4"), "q_offset": 21},
    "rows below 0": {"table": np.ones((2, 60), "f4"), "q_offset": -61},
    "items": {"table": np.ones((1, 60), "f4")},
}


@pytest.mark.parametrize("what", OUT_OF_RANGE)
def test_indices_out_of_range_raise(backend: str, what: str) -> None:
    options = dict(OUT_OF_RANGE[what])
    options["score_mod"] = functools.partial(looked_up, table=options.pop("table"), gain=1)
    with pytest.raises(IndexError, match=r"^score_mod: expected"):
        nattn.attention(*qkv(2, 2, 40, 60, 8), backend=backend, **options)


def test_indices_of_a_mask_out_of_range_raise(backend: str) -> None:
    mask = nattn.mask(functools.partial(masks.document, doc=np.zeros(55, np.int64))) & masks.causal
    with pytest.raises(IndexError, match=r"^mask_mod: expected"):
        nattn.attention(*qkv(1, 2, 40, 60, 8), mask_mod=mask, backend=backend)


HIDDEN: dict[str, dict[str, Any]] = {
    "kv_lens": {"kv_lens": 55},
    "mask": {"mask": np.arange(60) < 55},
    "causal": {"causal": True, "q_offset": 15},
    "window": {"window_size": (None, 0), "q_offset": 15},
    "q_lens": {"q_lens": 0},
}


@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_pairs_never_raise(backend: str, how: str) -> None:
    options: dict[str, Any] = {"q_offset": 5} | HIDDEN[how]
    q, k, v = qkv(1, 2, 40, 60, 8)
    short = gaussian(1, 55)
    check(
        backend,
        *(q, k, v),
        score_mod=functools.partial(looked_up, table=short, gain=1),
        mask_mod=functools.partial(masks.document, doc=np.arange(55, dtype=np.int32) // 20),
        **options,
    )


def test_a_row_that_sees_no_key_never_raises(backend: str) -> None:
    q, k, v = qkv(1, 2, 40, 60, 8)
    options: dict[str, Any] = {"mask": np.arange(40)[:, None] < 30, "q_offset": 20}
    table = np.ones((1, 60), "f4")  # too short for rows from 40 on
    with pytest.raises(IndexError):
        nattn.attention(
            *(q, k, v),
            backend=backend,
            score_mod=functools.partial(looked_up, table=table[:, :49], gain=1),
            **options,
        )
    options["kv_lens"] = 49
    q_short = functools.partial(looked_up, table=table[:, :50], gain=1)
    check(backend, q, k, v, score_mod=q_short, **options)


# Masks as functions say what arguments say


@pytest.mark.parametrize("sizes", [(1, 100), (7, 100), (60, 100), (100, 60)])
@pytest.mark.parametrize("kv_lens", [None, [100, 37], [59, 0]], ids=str)
def test_causal_as_a_function(backend: str, sizes: tuple[int, int], kv_lens: Any) -> None:
    Nq, Nk = sizes
    q, k, v = qkv(2, 2, Nq, Nk, 8)
    lens: dict[str, Any] = {} if kv_lens is None else {"kv_lens": [min(n, Nk) for n in kv_lens]}
    expected = truth(q, k, v, causal=True, **lens)
    out, lse = nattn.attention(
        q, k, v, mask_mod=masks.causal, return_lse=True, backend=backend, **lens
    )
    assert_near(out, expected.out, expected.budget.out[..., None])
    assert_near(lse, expected.lse, expected.budget.lse)


def test_a_window_as_a_function(backend: str) -> None:
    q, k, v = qkv(2, 2, 60, 90, 8)
    expected = truth(q, k, v, window_size=(20, 3), q_offset=[40, -5])
    window = functools.partial(masks.sliding_window, left=20, right=3)
    out, lse = nattn.attention(
        q, k, v, mask_mod=window, q_offset=[40, -5], return_lse=True, backend=backend
    )
    assert_near(out, expected.out, expected.budget.out[..., None])
    assert_near(lse, expected.lse, expected.budget.lse)


def in_corner(b: Any, h: Any, q_idx: Any, kv_idx: Any, first: Any) -> Any:
    return (q_idx >= first[b, h]) & (kv_idx < 40)


@pytest.mark.parametrize("broadcast", [(), (0,), (1,), (0, 1)], ids=str)
def test_blocks_change_no_bit(backend: str, broadcast: tuple[int, ...]) -> None:
    B, H, Nq, Nk, size = 2, 2, 300, 400, 32
    q, k, v = qkv(B, H, Nq, Nk, 16)
    doc = np.arange(Nk) // 150
    mask: Any = nattn.mask(functools.partial(masks.document, doc=doc)) & masks.causal
    if not broadcast:
        mask = mask | functools.partial(in_corner, first=np.array([[0, 200], [290, 350]]))
    p = Problem.build(q, k, v, mask_mod=mask)
    assert p.mask_mod is not None
    rows, columns = -(-Nq // size), -(-Nk // size)
    shape = [1 if axis in broadcast else n for axis, n in enumerate((B, H))]
    kinds = np.empty((*shape, rows, columns), np.uint8)
    for b, h in np.ndindex(*shape):
        pos = np.arange(Nq)[:, None] + Nk - Nq
        visible = ArrayFunction("mask_mod", p.mask_mod, F4)([[b]], [[h]], pos, np.arange(Nk)[None])
        for r, c in np.ndindex(rows, columns):
            block = visible[r * size : (r + 1) * size, c * size : (c + 1) * size]
            kinds[b, h, r, c] = (
                masks.FULL if block.all() else masks.MIXED if block.any() else masks.EMPTY
            )
    assert set(kinds.ravel()) == {masks.EMPTY, masks.MIXED, masks.FULL}
    each = kinds.reshape(-1, rows, columns)
    assert broadcast or all(np.any(each[0] != other) for other in each[1:])
    offset = np.full(shape[0], Nk - Nq)
    blocks = BlockMask(p.mask_mod, shape[0], shape[1], Nq, Nk, offset, size, kinds)
    out, lse = nattn.attention(q, k, v, block_mask=blocks, return_lse=True, backend=backend)
    expected = nattn.attention(q, k, v, mask_mod=mask, return_lse=True, backend=backend)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


# The budget of modifiers


BUDGETED = {
    "softcap": functools.partial(mods.softcap, cap=1.5),
    "alibi": functools.partial(mods.alibi, slopes=gaussian(1, 1)),
    "gate": functools.partial(gate, gain=0.75),
    "looked up": functools.partial(looked_up, table=gaussian(1, 200), gain=0.3),
    "soft window": functools.partial(mods.soft_window, width=20.0, softness=3.0),
    "distance decay": functools.partial(mods.distance_decay, rate=0.7, length=3.0),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_the_error_bound_of_a_modifier_holds_and_is_near(name: str) -> None:
    """Float32 arithmetic, as NumPy does it, against float64: within the bound, and not far."""
    tree = binding.resolve("score_mod", BUDGETED[name], binding.SCORE_MOD)
    u = 2.0**-24
    pos, j = np.arange(200)[:, None], np.arange(200)[None]
    score = gaussian(200, 200) * np.float32(3)
    # an error of 20 u on the way in, as of a dot product
    moved = score * (1 + np.float32(20 * u) * np.sign(gaussian(200, 200, seed=1)))
    zero = np.zeros((1, 1), np.int64)
    exact = [rounding.Rounded(x, np.zeros(x.shape), u) for x in (zero, zero, pos, j)]
    wide = score.astype("f8")
    carried = np.abs(wide) * 22 * u  # and the rounding of `moved`
    s = rounding.run(tree, F4, rounding.Rounded(wide, carried, u), *exact).as_float()
    truth_ = ArrayFunction("score_mod", tree, F4)(wide, zero, zero, pos, j)
    np.testing.assert_allclose(s.x, truth_, rtol=1e-13, atol=1e-13)
    assert isinstance(tree, binding.Bound)
    values: list[Any] = [np.float32(x) if isinstance(x, float) else x for x in tree.values]
    single = dataclasses.replace(tree, function=elementwise(tree.function), values=tuple(values))
    small = np.zeros((1, 1), np.int16)
    got = single(moved, small, small, pos.astype("i2"), j.astype("i2"))
    error = np.abs(got.astype("f4") - truth_)  # some integers took NumPy to float64
    assert np.all(error <= s.error)
    assert error.max() > s.error.max() / 20


def test_docstrings() -> None:
    result = doctest.testmod(importlib.import_module("nattn.functions.on_arrays"))
    assert result.attempted > 0
    assert result.failed == 0


def test_documents_option() -> None:
    """The cases' documents cover all keys."""
    case = importlib.import_module("cases").Case("x", Nq=9, Nk=5)
    assert documents(2, 3)(case, np.random.default_rng(0)).tolist() == [0, 0] + [1] * 7
