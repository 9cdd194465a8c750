"""The promises of nattn, in the order in which its contract numbers them."""

from __future__ import annotations

import functools
import importlib
import math
import mmap
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from cases import (
    POISON,
    Case,
    assert_gradients_near,
    assert_near,
    check,
    check_gradients,
    gate,
    gaussian,
    gradient_truth,
    has_gradients,
    in_step,
    incoming,
    looked_up,
    poisoned,
    qkv,
    thin,
    truth,
    visible_pairs,
)

import nattn
from nattn.backends.error_budget import error_budget
from nattn.call.problem import WRT, Problem
from nattn.functions import masks
from nattn.functions.dropout import keep
from nattn.functions.mods import compose

nan, inf = np.nan, np.inf


def attend(backend: str, *arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = nattn.attention(*arrays, return_lse=True, backend=backend, **options)
    return out, lse


def assert_same_bits(got: Any, expected: Any, rows: Any = ...) -> None:
    """Assert that pairs (out, lse) agree exactly in some rows."""
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x[rows], y[rows])


def differentiate(backend: str, *arrays: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return all gradients for some dout and dlse, and these."""
    p = Problem.build(*arrays, **options)
    dout, dlse = incoming(p)
    _, vjp = nattn.attention_vjp(*arrays, backend=backend, **options)
    return vjp(dout, dlse, has_gradients(p)), dout, dlse


def assert_same_gradients(got: Any, expected: Any, at: Any = ...) -> None:
    """Assert that gradients agree exactly, those of bias and heads as a whole."""
    for name, x, y in zip(WRT, got, expected, strict=False):
        assert (x is None) == (y is None), name
        if x is not None and y is not None:
            where = at if name in "qkv" else ...
            np.testing.assert_array_equal(x[where], y[where], err_msg=f"d{name}")


# 1. Hidden keys are never read into a result

RNG = np.random.default_rng(7)
HIDING: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal, negative offset": {"causal": True, "q_offset": -20},
    "window": {"window_size": (40, 11)},
    "window, causal": {"window_size": (5, -1), "causal": True},
    "kv_lens": {"kv_lens": 117},
    "mask": {"mask": RNG.random((70, 200)) < 0.5},
    "mask of each head": {"mask": RNG.random((2, 70, 200)) < 0.9},
    "mask of keys": {"mask": RNG.random(200) < 0.5},
    "mask of rows": {"mask": RNG.random((70, 1)) < 0.5},
    "bias": {"bias": np.where(RNG.random((2, 70, 200)) < 0.5, -inf, 1.0).astype("f4")},
    "bias, float16": {"bias": np.where(RNG.random((70, 200)) < 0.1, -inf, 1.0).astype("f2")},
    "mask and causal": {"mask": RNG.random((70, 200)) < 0.5, "causal": True},
    "mask and bias": {
        "mask": RNG.random((70, 200)) < 0.7,
        "bias": np.where(RNG.random(200) < 0.3, -inf, 1.0),
    },
    "mask_mod": {"mask_mod": functools.partial(in_step, step=3)},
    "score_mod": {"score_mod": thin},
    "everything": {
        "mask_mod": nattn.mask(functools.partial(in_step, step=3)) & masks.causal,
        "score_mod": compose(thin, functools.partial(gate, gain=0.75)),
        "mask": RNG.random((70, 200)) < 0.7,
        "softcap": 2.0,
        "alibi_slopes": np.array([0.1, 0.3]),
        "sinks": np.array([0.5, -0.5]),
        "dropout_p": 0.3,
        "seed": 4,
    },
}


@pytest.mark.parametrize("hiding", HIDING)
def test_1_hidden_keys_and_values_change_nothing(backend: str, hiding: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16, 9)
    options = HIDING[hiding]
    clean = attend(backend, q, k, v, **options)
    visible = visible_pairs(Problem.build(q, k, v, **options))[0]
    for h in range(2):
        for i in (0, 1, 15, 16, 31, 47, 48, 69):
            hidden = ~visible[h, i]  # element by element: other rows see some of these keys
            bad_k, bad_v = (poisoned(x, (0, h, hidden)) for x in (k, v))
            got = attend(backend, q, bad_k, bad_v, **options)
            untouched = ~(visible[h] & hidden).any(axis=1)
            assert untouched[i]
            assert_same_bits(got, clean, (0, h, untouched))


@pytest.mark.parametrize("hiding", ["causal", "window", "kv_lens", "mask", "mask of each head"])
def test_1_hidden_bias_changes_nothing(backend: str, hiding: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    options = HIDING[hiding]
    bias = gaussian(2, 70, 200)
    clean = attend(backend, q, k, v, bias=bias, **options)
    bad = poisoned(bias, ~visible_pairs(Problem.build(q, k, v, **options))[0])
    assert_same_bits(attend(backend, q, k, v, bias=bad, **options), clean)


@pytest.mark.parametrize("poison", POISON)
def test_1_padding_changes_nothing(backend: str, poison: float) -> None:
    q, k, v = qkv(3, 2, 60, 90, 16)
    lengths: dict[str, Any] = {"q_lens": [60, 7, 33], "kv_lens": [1, 90, 64], "causal": True}
    clean = attend(backend, q, k, v, **lengths)
    for b, (n_q, n_kv) in enumerate(zip(lengths["q_lens"], lengths["kv_lens"], strict=True)):
        q[b, :, n_q:] = k[b, :, n_kv:] = v[b, :, n_kv:] = poison
    got = attend(backend, q, k, v, **lengths)
    assert_same_bits(got, clean)
    for b, n_q in enumerate(lengths["q_lens"]):
        assert np.all(got[0][b, :, n_q:] == 0.0)
        assert np.all(got[1][b, :, n_q:] == -inf)


def test_1_a_bias_of_minus_inf_hides_a_score_of_nan(backend: str) -> None:
    q, k, v = qkv(1, 1, 50, 100, 8)
    bias = np.where(np.arange(100) % 3 == 0, np.float32(-inf), 0)
    clean = attend(backend, q, k, v, bias=bias)
    k[:, :, ::3] = v[:, :, ::3] = nan
    assert_same_bits(attend(backend, q, k, v, bias=bias), clean)


def test_1_a_score_of_minus_inf_hides_its_key(backend: str) -> None:
    q = np.abs(gaussian(1, 1, 50, 1)) + 1
    k, v = gaussian(1, 1, 100, 1, seed=1), gaussian(1, 1, 100, 5, seed=2)
    hidden = np.arange(100) % 3 == 0
    expected = truth(q, k, v, mask=~hidden)
    k[:, :, hidden] = -inf
    v[:, :, hidden] = nan
    out, lse = attend(backend, q, k, v)
    assert_near(out, expected.out, expected.budget.out[..., None])
    assert_near(lse, expected.lse, expected.budget.lse)
    out, lse = attend(backend, q, np.full_like(k, -inf), np.full_like(v, nan))
    assert np.all(out == 0.0)
    assert np.all(lse == -inf)


def test_1_a_hidden_score_stays_hidden_under_any_bias(backend: str) -> None:
    q, k, v = np.ones((1, 1, 20, 1), "f4"), gaussian(1, 1, 40, 1), gaussian(1, 1, 40, 3, seed=1)
    expected = truth(q, k, v, mask=np.arange(40) != 5)
    k[:, :, 5], v[:, :, 5] = -inf, nan
    out, _ = attend(backend, q, k, v, bias=np.where(np.arange(40) == 5, inf, 0.0))
    assert_near(out, expected.out, expected.budget.out[..., None])


def test_1_a_bias_that_the_dtype_rounds_to_minus_inf_hides(backend: str) -> None:
    q, k, v = qkv(1, 1, 20, 40, 8)
    low = np.where(np.arange(40) % 3, 0.0, -1e300)
    clean = attend(backend, q, k, v, bias=np.where(low, -inf, 0.0))
    k[:, :, ::3] = v[:, :, ::3] = nan
    assert_same_bits(attend(backend, q, k, v, bias=low), clean)
    out, lse = attend(backend, q, k, v, bias=np.full(40, -1e300))
    assert np.all(out == 0.0)
    assert np.all(lse == -inf)
    wide = [x.astype("f8") for x in qkv(1, 1, 20, 40, 8)]
    assert np.all(np.isfinite(attend(backend, *wide, bias=np.full(40, -1e300))[1]))


def test_1_the_value_of_a_dropped_key_is_not_read(backend: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16, 9)
    clean = attend(backend, q, k, v, dropout_p=0.5, seed=3)
    for h, i in ((0, 0), (0, 47), (1, 48), (1, 69)):
        dropped = ~keep(0, h, np.arange(70)[:, None], np.arange(200), 3, 0.5)
        bad = poisoned(v, (0, h, dropped[i]))
        out, lse = attend(backend, q, k, bad, dropout_p=0.5, seed=3)
        np.testing.assert_array_equal(out[0, h, i], clean[0][0, h, i])
        np.testing.assert_array_equal(lse, clean[1])
        keeps = (dropped[i] & ~dropped).any(axis=1)
        assert not np.isfinite(out[0, h, keeps]).any()


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("hiding", ["causal", "mask", "mask_mod"])
def test_1_what_a_score_mod_makes_of_hidden_pairs_changes_nothing(
    backend: str, hiding: str, poison: float
) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    options = HIDING[hiding]
    visible = visible_pairs(Problem.build(q, k, v, **options))[0]
    table = np.ones((1, 200), "f4")

    def got() -> tuple[np.ndarray, np.ndarray]:
        mod = functools.partial(looked_up, table=table, gain=0.5)
        return attend(backend, q, k, v, score_mod=mod, **options)

    clean = got()
    table[0, 150] = poison  # read for this key, and for the row that sits there
    blind = ~visible[:, :, 150] & (np.arange(70) + 130 != 150)
    assert blind.sum() > 30
    assert_same_bits(got(), clean, (0, blind))


@pytest.mark.parametrize("hiding", HIDING)
def test_1_hidden_keys_have_no_gradient(backend: str, hiding: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16, 9)
    options = HIDING[hiding]
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    hidden: Any = ~visible_pairs(p).any(axis=2)  # from all rows of the head
    clean = gradient_truth(q, k, v, dout, dlse, **options)
    wrt = has_gradients(p)
    bad_k, bad_v = poisoned(k, hidden), poisoned(v, hidden)
    _, vjp = nattn.attention_vjp(q, bad_k, bad_v, backend=backend, **options)
    got: Any = vjp(dout, dlse, wrt)
    assert_gradients_near(got, clean, wrt)
    assert np.all(got.dk[hidden] == 0.0)
    assert np.all(got.dv[hidden] == 0.0)
    assert got.dbias is None or np.isfinite(got.dbias).all()
    # a key that one row sees: what it does stays among those that depend on that row
    v[0, 0, 30] = POISON[list(HIDING).index(hiding) % 3]
    sees = visible_pairs(p)[0, 0]
    got = nattn.attention_vjp(q, k, v, backend=backend, **options)[1](dout, dlse)
    blind = ~sees[:, 30]
    expected = gradient_truth(q, k, v, dout, dlse, **options)
    assert_gradients_near(got, expected, ("q", "k", "v"))
    assert np.isfinite(got.dq[0, 0, blind]).all()
    apart = ~sees[~blind].any(axis=0)  # keys of no row that sees it
    assert np.isfinite(got.dk[0, 0, apart]).all()
    assert np.isfinite(got.dv).all()
    assert np.isfinite(got.dq[0, 1]).all()


@pytest.mark.parametrize("poison", POISON)
def test_1_padding_has_no_gradient(backend: str, poison: float) -> None:
    q, k, v = qkv(3, 2, 60, 90, 16)
    lengths: dict[str, Any] = {"q_lens": [60, 7, 33], "kv_lens": [1, 90, 64], "causal": True}
    lengths["bias"] = gaussian(2, 60, 90)
    clean, dout, dlse = differentiate(backend, q, k, v, **lengths)
    out, lse = attend(backend, q, k, v, **lengths)
    for b, (n_q, n_kv) in enumerate(zip(lengths["q_lens"], lengths["kv_lens"], strict=True)):
        q[b, :, n_q:] = k[b, :, n_kv:] = v[b, :, n_kv:] = poison
        dout[b, :, n_q:] = out[b, :, n_q:] = poison
        dlse[b, :, n_q:] = poison
    got: Any = nattn.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=("q", "k", "v", "bias"), backend=backend, **lengths
    )
    assert_same_gradients(got, clean)
    for b, (n_q, n_kv) in enumerate(zip(lengths["q_lens"], lengths["kv_lens"], strict=True)):
        assert np.all(got.dq[b, :, n_q:] == 0.0)
        assert np.all(got.dk[b, :, n_kv:] == 0.0)
        assert np.all(got.dv[b, :, n_kv:] == 0.0)


def test_1_a_hidden_bias_has_no_gradient(backend: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    options = HIDING["mask of each head"]
    bias = gaussian(2, 70, 200)
    visible = visible_pairs(Problem.build(q, k, v, **options))[0]
    clean, *_ = differentiate(backend, q, k, v, bias=bias, **options)
    bad = poisoned(bias, ~visible)
    got, *_ = differentiate(backend, q, k, v, bias=bad, **options)
    assert_same_gradients(got, clean)
    assert np.all(got.dbias[~visible] == 0.0)


@pytest.mark.parametrize("poison", POISON)
def test_1_the_gradient_of_a_dropped_key(backend: str, poison: float) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16, 9)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 3}
    dropped = ~keep(0, np.arange(2)[:, None], np.arange(70), 150, 3, 0.5)
    v[0, :, 150] = poison
    got, dout, dlse = differentiate(backend, q, k, v, **options)
    np.testing.assert_array_equal(np.isfinite(got.dq).all(axis=3)[0], dropped)
    assert_gradients_near(got, gradient_truth(q, k, v, dout, dlse, **options), ("q", "k", "v"))


# 2. A row that sees no key


def rows_from(b: Any, h: Any, q_idx: Any, kv_idx: Any, first: Any) -> Any:
    return q_idx >= first


def hide_rows(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, first: Any) -> Any:
    return np.where(q_idx < first, -np.inf, score)


EMPTYING: dict[str, tuple[dict[str, Any], slice]] = {
    "mask": ({"mask": np.arange(70)[:, None] >= 30}, slice(0, 30)),
    "bias": ({"bias": np.where(np.arange(70)[:, None] >= 30, 0, -inf)}, slice(0, 30)),
    "causal": ({"causal": True, "q_offset": -30}, slice(0, 30)),
    "causal, all": ({"causal": True, "q_offset": -(2**70)}, slice(None)),
    "window left": ({"window_size": (9, 0), "q_offset": 140}, slice(69, None)),
    "window right": ({"window_size": (None, 4), "q_offset": -34}, slice(0, 30)),
    "q_lens": ({"q_lens": 40}, slice(40, None)),
    "kv_lens": ({"kv_lens": 0}, slice(None)),
    "mask and causal together": (
        {"causal": True, "q_offset": 0, "mask": np.arange(200) >= 30},
        slice(0, 30),
    ),
    "mask_mod": ({"mask_mod": functools.partial(rows_from, first=30), "q_offset": 0}, slice(0, 30)),
    "score_mod": (
        {"score_mod": functools.partial(hide_rows, first=30), "q_offset": 0},
        slice(0, 30),
    ),
    "softcap, ALiBi, bias": (
        {
            "softcap": 2.0,
            "alibi_slopes": [0.1, 0.2],
            "bias": np.where(np.arange(70)[:, None] >= 30, 0, -inf),
        },
        slice(0, 30),
    ),
}


@pytest.mark.parametrize("emptying", EMPTYING)
def test_2_empty_rows_with_sinks(backend: str, emptying: str) -> None:
    options, empty = EMPTYING[emptying]
    q, k, v = qkv(1, 2, 70, 200, 16)
    sinks = np.array([-3.0, 300.0], "f4")
    out, lse = check(backend, q, k, v, sinks=sinks, **options)
    assert np.all(out[:, :, empty] == 0.0)
    exist = np.arange(70) < options.get("q_lens", 70)
    expected = np.where(exist, sinks[:, None], -inf)
    np.testing.assert_array_equal(lse[0][:, empty], expected[:, empty])
    # a sink of -inf is none
    none = attend(backend, q, k, v, sinks=[-inf, -inf], **options)
    assert_same_bits(none, attend(backend, q, k, v, **options))


@pytest.mark.parametrize("emptying", EMPTYING)
def test_2_empty_rows(backend: str, emptying: str) -> None:
    options, empty = EMPTYING[emptying]
    q, k, v = qkv(1, 2, 70, 200, 16)
    v += 100.0
    out, lse = check(backend, q, k, v, **options)
    assert np.all(out[:, :, empty] == 0.0)
    assert np.all(lse[:, :, empty] == -inf)
    rest = np.ones(70, bool)
    rest[empty] = False
    assert np.all(np.isfinite(lse[:, :, rest]))
    assert np.all(out[:, :, rest] > 50.0)


@pytest.mark.parametrize("emptying", EMPTYING)
@pytest.mark.parametrize("sinks", [None, np.array([-3.0, 300.0], "f4")], ids=["", "sinks"])
def test_2_gradients_of_empty_rows(backend: str, emptying: str, sinks: Any) -> None:
    options, empty = EMPTYING[emptying]
    q, k, v = qkv(1, 2, 70, 200, 16)
    options = options | ({} if sinks is None else {"sinks": sinks})
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    t = gradient_truth(q, k, v, dout, dlse, **options)
    out, lse = attend(backend, q, k, v, **options)
    for value in (None, nan):  # whatever comes back into the empty rows
        if value is not None:
            dout[:, :, empty] = value
            if sinks is None:  # with a sink lse still depends on it
                dlse[:, :, empty] = value
        got: Any = nattn.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, wrt=has_gradients(p), backend=backend, **options
        )
        assert_gradients_near(got, t, has_gradients(p))
        assert np.all(got.dq[:, :, empty] == 0.0)


# 3. NaN and Inf that are visible propagate to the rows that see them, and to no others


SEEING: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "mask": HIDING["mask"],
    "modifiers": {
        "softcap": 3.0,
        "alibi_slopes": [0.1, 0.2],
        "score_mod": functools.partial(gate, gain=0.75),
        "sinks": [0.0, 1.0],
    },
    "mask_mod": HIDING["mask_mod"],
}


@pytest.mark.parametrize("seeing", [*SEEING, "plain, but for one key"])
@pytest.mark.parametrize("j", [0, 1, 63, 64, 128, 150, 199])
def test_3_a_visible_nan_in_a_key(backend: str, seeing: str, j: int) -> None:
    q, k, v = qkv(2, 2, 70, 200, 16)
    options = SEEING.get(seeing, {"mask": np.arange(200) != 199 - j})
    clean = attend(backend, q, k, v, **options)
    k[1, 0, j, 3] = nan
    out, lse = attend(backend, q, k, v, **options)
    sees = np.zeros((2, 2, 70), bool)
    sees[1, 0] = visible_pairs(Problem.build(q, k, v, **options))[1, 0, :, j]
    assert np.all(np.isnan(out[sees]))
    assert np.all(np.isnan(lse[sees]))
    assert_same_bits((out, lse), clean, ~sees)


@pytest.mark.parametrize("options", SEEING.values(), ids=SEEING)
@pytest.mark.parametrize(("j", "value"), [(0, nan), (100, inf), (199, -inf), (199, nan)])
def test_3_a_visible_value(backend: str, options: dict[str, Any], j: int, value: float) -> None:
    q, k, v = qkv(2, 2, 70, 200, 16, 9)
    clean_out, clean_lse = attend(backend, q, k, v, **options)
    v[1, 0, j, 3] = value
    out, lse = attend(backend, q, k, v, **options)
    sees = np.zeros(out.shape, bool)
    sees[1, 0, :, 3] = visible_pairs(Problem.build(q, k, v, **options))[1, 0, :, j]
    assert not np.isfinite(out[sees]).any()
    np.testing.assert_array_equal(out[~sees], clean_out[~sees])
    np.testing.assert_array_equal(lse, clean_lse)


@pytest.mark.parametrize("j", [0, 100, 299])
@pytest.mark.parametrize("top", [5, 130, 290])
@pytest.mark.parametrize("options", [{}, {"mask": np.arange(300) != 77}], ids=["plain", "mask"])
def test_3_where_the_probability_underflows(
    backend: str, j: int, top: int, options: dict[str, Any]
) -> None:
    q = np.ones((1, 1, 50, 1), "f4")
    k, v = np.full((1, 1, 300, 1), -2000, "f4"), gaussian(1, 1, 300, 5)
    k[:, :, top] = 2000  # before, after and beside the key that shows
    v[:, :, j, 1:4] = POISON
    out, lse = attend(backend, q, k, v, **options)
    assert not np.isfinite(out[..., 1:4]).any()
    others = [0, 4]
    np.testing.assert_array_equal(
        out[..., others], np.broadcast_to(v[:, :, [top]][..., others], (1, 1, 50, 2))
    )
    assert np.all(lse == 2000.0)


@pytest.mark.parametrize("score", [nan, inf])
@pytest.mark.parametrize("j", [0, 100, 199])
def test_3_a_visible_score(backend: str, score: float, j: int) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    bias = np.zeros((70, 200), "f4")
    clean = attend(backend, q, k, v, bias=bias)
    bias[11, j] = score
    out, lse = attend(backend, q, k, v, bias=bias)
    assert np.all(np.isnan(out[:, :, 11]))
    assert np.all(np.isnan(lse[:, :, 11]))
    assert_same_bits((out, lse), clean, (slice(None), slice(None), np.arange(70) != 11))


@pytest.mark.parametrize("sink", [nan, inf])
@pytest.mark.parametrize("Nq", [1, 70])
def test_3_a_sink_of_nan_or_inf_shows_in_its_head(backend: str, Nq: int, sink: float) -> None:
    q, k, v = qkv(2, 4, Nq, 200, 16)
    k, v = k[:, :2], v[:, :2]
    options: dict[str, Any] = {"causal": True, "q_offset": [-5, 0]}
    clean = attend(backend, q, k, v, sinks=[1.0, 2.0, 3.0, 4.0], **options)
    got = attend(backend, q, k, v, sinks=[1.0, sink, 3.0, 4.0], **options)
    assert np.isnan(got[0][:, 1]).all()
    assert np.isnan(got[1][:, 1]).all()
    assert_same_bits(got, clean, (slice(None), [0, 2, 3]))


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("at", [0, 75, 129, 130, 199])
def test_3_what_a_score_mod_reads_shows(backend: str, value: float, at: int) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    table = np.ones((1, 200), "f4")
    options: dict[str, Any] = {"causal": True}

    def got() -> tuple[np.ndarray, np.ndarray]:
        mod = functools.partial(looked_up, table=table, gain=0.5)
        return attend(backend, q, k, v, score_mod=mod, **options)

    clean = got()
    table[0, at] = value
    out, lse = got()
    pos = np.arange(70) + 130
    sees = pos >= at  # as a key, and as the row's own position
    assert np.isnan(out[:, :, sees]).all()
    assert np.isnan(lse[:, :, sees]).all()
    assert_same_bits((out, lse), clean, (slice(None), slice(None), ~sees))


def test_3_a_kept_value_shows_and_a_dropped_score_too(backend: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16, 9)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 3}
    kept = keep(0, np.arange(2)[:, None], np.arange(70), 100, 3, 0.5)
    clean = attend(backend, q, k, v, **options)
    bad = v.copy()
    bad[0, :, 100, 3] = nan
    out, lse = attend(backend, q, k, bad, **options)
    shows = np.zeros(out.shape, bool)
    shows[0, :, :, 3] = kept
    np.testing.assert_array_equal(np.isnan(out), shows)
    np.testing.assert_array_equal(out[~shows], clean[0][~shows])
    np.testing.assert_array_equal(lse, clean[1])
    k[0, 1, 100] = nan
    out, lse = attend(backend, q, k, v, **options)
    assert np.isnan(out[:, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert_same_bits((out, lse), clean, (0, 0))


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("i", [0, 17, 69])
def test_3_a_nan_in_a_query_stays_in_its_row(backend: str, options: dict[str, Any], i: int) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    clean = attend(backend, q, k, v, **options)
    q[0, 1, i, 5] = nan
    out, lse = attend(backend, q, k, v, **options)
    assert np.all(np.isnan(out[0, 1, i]))
    assert np.isnan(lse[0, 1, i])
    rest = np.ones((1, 2, 70), bool)
    rest[0, 1, i] = False
    assert_same_bits((out, lse), clean, rest)


@pytest.mark.parametrize("Nq", [1, 3, 8])
def test_3_with_few_queries(backend: str, Nq: int) -> None:
    q, k, v = qkv(1, 4, Nq, 300, 16)
    k, v = k[:, :2], v[:, :2].copy()
    clean = attend(backend, q, k, v)
    v[0, 1, 123, 4] = nan
    out, lse = attend(backend, q, k, v)
    assert np.all(np.isnan(out[0, 2:, :, 4]))
    assert np.isnan(out).sum() == 2 * Nq
    assert_same_bits((out, lse), clean, (slice(None), slice(0, 2)))
    np.testing.assert_array_equal(lse, clean[1])


def tall(seeing: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Return q, k, v of four heads in two groups, and the options of `SEEING` for them."""
    q, k, v = qkv(1, 4, 70, 200, 16, 9)
    options = {
        n: np.tile(x, 2) if n in ("alibi_slopes", "sinks") else x for n, x in SEEING[seeing].items()
    }
    return q, k[:, :2].copy(), v[:, :2].copy(), options


@functools.cache
def tall_gradients(seeing: str) -> Any:
    """Return the gradients of that, where all is finite."""
    q, k, v, options = tall(seeing)
    dout, dlse = incoming(Problem.build(q, k, v, **options))
    return gradient_truth(q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("seeing", SEEING)
@pytest.mark.parametrize(  # an infinite score of -inf would hide its key
    ("where", "value"),
    [
        *((x, nan) for x in ("q", "k", "v", "dout", "dlse")),
        ("v", inf),
        ("dout", -inf),
        ("dlse", inf),
    ],
)
def test_3_gradients_of_what_is_not_finite(
    backend: str, seeing: str, where: str, value: float
) -> None:
    q, k, v, options = tall(seeing)
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    clean = tall_gradients(seeing)
    {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse[..., None]}[where][0, 0, 40, 0] = value
    wrt = has_gradients(p)
    _, vjp = nattn.attention_vjp(q, k, v, backend=backend, **options)
    got: Any = vjp(dout, dlse, wrt)
    visible = visible_pairs(p)
    rows, keys = np.zeros((1, 4, 70), bool), np.zeros((1, 2, 200), bool)
    if where in "kv":
        rows[0, :2] = visible[0, :2, :, 40]
    else:
        rows[0, 0, 40] = True
    for h in range(4):
        keys[:, h // 2] |= (visible[:, h] & rows[:, h, :, None]).any(axis=1)
    if where in "kv":
        keys[0, 0, 40] = True
    assert_gradients_near(got, gradient_truth(q, k, v, dout, dlse, **options), wrt)
    assert not np.isfinite(got.dq[rows]).all(axis=-1).any()
    for x, depends, name in ((got.dq, rows, "q"), (got.dk, keys, "k"), (got.dv, keys, "v")):
        near = ~depends[..., None]
        assert_near(
            np.where(near, x, 0.0), np.where(near, clean.gradients[name], 0.0), clean.budget[name]
        )


# 4. There is no sentinel


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("n", [1, 5, 64, 600])
@pytest.mark.parametrize("hidden_elements", [False, True])
@pytest.mark.parametrize("Nq", [1, 50])
def test_4_all_scores_at_the_lowest_number(
    backend: str, dtype: str, n: int, hidden_elements: bool, Nq: int
) -> None:
    lowest = np.finfo(dtype).min
    q, k = np.ones((1, 1, Nq, 1), dtype), np.full((1, 1, n, 1), lowest)
    v = gaussian(1, 1, n, 5, dtype=dtype)
    options = {}
    seen = slice(None)
    if hidden_elements:
        seen = slice(0, max(1, n // 2))
        options["mask"] = np.arange(n) < max(1, n // 2)
        k[:, :, max(1, n // 2) :] = 0.0  # larger, but hidden
    out, lse = attend(backend, q, k, v, **options)
    mean = v[0, 0, seen].astype("f8").mean(axis=0)
    # the scores are exact: only the mean is rounded
    budget = error_budget(np.dtype(dtype), n, 0.0, np.abs(v).max(), 1)
    assert_near(out, np.broadcast_to(mean, out.shape), budget.out)
    assert np.all(lse == lowest)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_4_the_lowest_number_beside_ordinary_scores(backend: str, dtype: str, where: str) -> None:
    k = np.zeros((1, 1, 700, 1), dtype)
    low = slice(0, 500) if where == "first" else slice(200, None)
    rest = slice(500, None) if where == "first" else slice(0, 200)
    k[:, :, low] = np.finfo(dtype).min
    v = gaussian(1, 1, 700, 5, dtype=dtype)
    out, lse = attend(backend, np.ones((1, 1, 50, 1), dtype), k, v)
    budget = error_budget(np.dtype(dtype), 700, 0.0, np.abs(v).max(), 1)
    mean = v[0, 0, rest].astype("f8").mean(axis=0)
    assert_near(out, np.broadcast_to(mean, out.shape), budget.out)
    assert_near(lse, np.full(lse.shape, math.log(200)), budget.lse)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_4_a_bias_at_the_lowest_number_hides_nothing(backend: str, dtype: str) -> None:
    q, k = np.zeros((1, 1, 50, 4), dtype), np.zeros((1, 1, 300, 4), dtype)
    v = gaussian(1, 1, 300, 5, dtype=dtype)
    out, lse = attend(backend, q, k, v, bias=np.full(300, np.finfo(dtype).min, dtype))
    budget = error_budget(np.dtype(dtype), 300, 0.0, np.abs(v).max(), 4)
    assert_near(out, np.broadcast_to(v[0, 0].astype("f8").mean(axis=0), out.shape), budget.out)
    assert np.all(lse == np.finfo(dtype).min)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", [1e4, 1e20, 3e38])
def test_4_large_equal_scores(backend: str, sign: float, size: float) -> None:
    k = np.full((1, 1, 300, 1), sign * size, "f4")
    v = gaussian(1, 1, 300, 5)
    out, lse = attend(backend, np.ones((1, 1, 50, 1), "f4"), k, v)
    budget = error_budget(np.dtype("f4"), 300, 0.0, np.abs(v).max(), 1)
    assert_near(out, np.broadcast_to(v[0, 0].astype("f8").mean(axis=0), out.shape), budget.out)
    score = float(k[0, 0, 0, 0])
    np.testing.assert_array_equal(lse, np.float32(score + math.log(300)))


def test_4_scores_from_lowest_to_highest(backend: str) -> None:
    k = np.array([np.finfo("f4").min, -1e30, 0.0, 1e30, np.finfo("f4").max], "f4")
    for order in (k, k[::-1], np.repeat(k, 150)[:-149]):
        v = gaussian(1, 1, len(order), 5)
        keys = order.reshape(1, 1, -1, 1)
        out, lse = attend(backend, np.ones((1, 1, 20, 1), "f4"), keys, v)
        winner = v[:, :, [order.argmax()]]
        np.testing.assert_array_equal(out, np.broadcast_to(winner, out.shape))
        assert np.all(lse == np.finfo("f4").max)


# 5. Same input, same bits


def test_5_whatever_the_number_of_threads(child: Callable[..., str]) -> None:
    child("threads_and_bits", NUMBA_NUM_THREADS="5")


WITH_B: dict[str, Any] = {
    "softcap": 3.0,
    "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]),
    "sinks": np.array([0.0, 1.0, 2.0, -1.0]),
    "score_mod": functools.partial(gate, gain=0.75),
    "mask_mod": functools.partial(in_step, step=3),
    "dropout_p": 0.3,
    "seed": 5,
}
WITHOUT_B = {name: x for name, x in WITH_B.items() if name not in ("mask_mod", "dropout_p", "seed")}
"""Modifiers, of which those that use the batch item give equal bits for item 0 alone."""


@pytest.mark.parametrize("Nq", [2, 200])
def test_5_modifiers_whatever_the_number_of_threads(
    Nq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = importlib.import_module("nattn.backends.cpu.jobs")
    q, k, v = qkv(3, 4, Nq, 1100, 24)
    results = []
    for n in (1, 2, 3):
        monkeypatch.setattr(jobs, "thread_count", lambda n=n: n)
        results.append(attend("cpu", q, k[:, :2], v[:, :2], **WITH_B))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("Nq", [5, 90])
@pytest.mark.parametrize("options", [{}, {"kv_lens": [140, 139, 3], "causal": True}], ids=str)
def test_5_modifiers_whatever_the_batch_mates(
    backend: str, options: dict[str, Any], Nq: int
) -> None:
    q, k, v = qkv(3, 4, Nq, 140, 24)
    k, v = k[:, :2], v[:, :2]
    for more, items in ((WITH_B, [0]), (WITHOUT_B, [0, 1, 2])):
        together = attend(backend, q, k, v, **options, **more)
        for b in items:
            alone = {n: x[b : b + 1] if n == "kv_lens" else x for n, x in options.items()}
            item = slice(b, b + 1)
            got = attend(backend, q[item], k[item], v[item], **alone, **more)
            assert_same_bits(got, [x[item] for x in together])


@pytest.mark.parametrize("q_len", [1, 8, 30])
def test_5_modifiers_whatever_the_padding(backend: str, q_len: int) -> None:
    q, k, v = qkv(2, 4, 200, 700, 24)
    k, v = k[:, :2], v[:, :2]
    lens = {"q_lens": [q_len, 200], "kv_lens": [650, 700]}
    padded = attend(backend, q, k, v, causal=True, **WITH_B, **lens)
    cut = q[:1, :, :q_len], k[:1, :, :650], v[:1, :, :650]
    got = attend(backend, *cut, causal=True, **WITH_B)
    assert_same_bits(got, [x[:1, :, :q_len] for x in padded])


def test_5_modifiers_whatever_the_strides_of_what_they_read(backend: str) -> None:
    q, k, v = qkv(2, 2, 40, 90, 8)
    table = gaussian(2, 90)
    spread = np.full((2, 270), nan, "f4")
    spread[:, ::3] = table
    unaligned = np.zeros(table.nbytes + 1, "u1")[1:].view("f4").reshape(table.shape)
    unaligned[...] = table
    read_only = table.copy()
    read_only.flags.writeable = False
    views = [
        np.asfortranarray(table),
        np.ascontiguousarray(table[::-1, ::-1])[::-1, ::-1],
        spread[:, ::3],
        unaligned,
        read_only,
        table.astype(">f4"),
    ]
    doc = np.arange(180)[::2] // 25

    def got(x: np.ndarray, doc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before = x.copy()
        result = attend(
            backend,
            *(q, k, v),
            score_mod=functools.partial(looked_up, table=x, gain=0.5),
            mask_mod=functools.partial(masks.document, doc=doc),
            alibi_slopes=x[:, 3:5],
            sinks=x[0, ::-1][7:9],
        )
        np.testing.assert_array_equal(x, before)
        return result

    expected = got(table, doc.copy())
    for view in views:
        np.testing.assert_array_equal(view, table)
        assert_same_bits(got(view, doc[::-1].copy()[::-1]), expected)
    row = np.broadcast_to(table[0], (2, 90))  # stride 0
    assert_same_bits(got(row, doc), got(row.copy(), doc))


def whatever_the_threads(monkeypatch: pytest.MonkeyPatch, *arrays: Any, **options: Any) -> None:
    jobs = importlib.import_module("nattn.backends.cpu.jobs")
    results = []
    for n in (1, 2, 3):
        monkeypatch.setattr(jobs, "thread_count", lambda n=n: n)
        results.append(differentiate("cpu", *arrays, **options)[0])
    assert_same_gradients(results[1], results[0])
    assert_same_gradients(results[2], results[0])


@pytest.mark.parametrize("Nq", [2, 200])
def test_5_gradients_whatever_the_number_of_threads(
    Nq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(3, 4, Nq, 1100, 24)
    bias = gaussian(4, 1, 1100)
    k, v = k[:, :2], v[:, :2]
    whatever_the_threads(monkeypatch, q, k, v, bias=bias, **WITH_B)
    whatever_the_threads(monkeypatch, q, k, v, causal=True)
    one = qkv(1, 1, Nq, 3000, 8)  # one head: the keys are what is shared out
    whatever_the_threads(monkeypatch, *one, bias=gaussian(Nq, 3000))


@pytest.mark.parametrize(("Nq", "dtype"), [(5, "f4"), (90, "f8")])
def test_5_gradients_whatever_the_batch_mates(backend: str, Nq: int, dtype: str) -> None:
    q, k, v = qkv(3, 4, Nq, 1300, 24, dtype=dtype)
    k, v = k[:, :2], v[:, :2]
    lens: dict[str, Any] = {"kv_lens": [1300, 139, 3], "causal": True}
    for more, items in ((WITH_B, [0]), (WITHOUT_B, [0, 1, 2])):
        wrt = ("q", "k", "v")
        dout = gaussian(3, 4, Nq, 24, dtype=dtype, seed=9)
        together = nattn.attention_vjp(q, k, v, backend=backend, **lens, **more)[1](dout, None, wrt)
        for b in items:
            item = slice(b, b + 1)
            alone = lens | {"kv_lens": lens["kv_lens"][item]} | more
            _, vjp = nattn.attention_vjp(q[item], k[item], v[item], backend=backend, **alone)
            expected = [None if x is None else x[item] for x in together]
            assert_same_gradients(vjp(dout[item], None, wrt), expected)


@pytest.mark.parametrize("q_len", [1, 8, 30])
def test_5_gradients_whatever_the_padding(backend: str, q_len: int) -> None:
    q, k, v = qkv(2, 4, 200, 700, 24)
    k, v = k[:, :2], v[:, :2]
    dout = gaussian(2, 4, 200, 24, seed=9)
    lens: dict[str, Any] = {"q_lens": [q_len, 200], "kv_lens": [650, 700]}
    _, vjp = nattn.attention_vjp(q, k, v, causal=True, backend=backend, **lens, **WITH_B)
    padded = vjp(dout)
    cut: Any = q[:1, :, :q_len], k[:1, :, :650], v[:1, :, :650]
    _, vjp = nattn.attention_vjp(*cut, causal=True, backend=backend, **WITH_B)
    got = vjp(dout[:1, :, :q_len])
    ends = {"q": q_len, "k": 650, "v": 650}
    expected = [np.asarray(x)[:1, :, :n] for x, n in zip(padded, ends.values(), strict=False)]
    assert_same_gradients(got, [*expected, None, None, None])


def test_5_gradients_whatever_the_other_heads(backend: str) -> None:
    q, k, v = qkv(1, 6, 90, 140, 24)
    k, v = k[:, :2], v[:, :2]
    dout = gaussian(1, 6, 90, 24, seed=9)
    together = nattn.attention_vjp(q, k, v, causal=True, backend=backend)[1](dout)
    for kv in range(2):
        heads, one = slice(3 * kv, 3 * kv + 3), slice(kv, kv + 1)
        cut: Any = q[:, heads], k[:, one], v[:, one]
        got = nattn.attention_vjp(*cut, causal=True, backend=backend)[1](dout[:, heads])
        parts = [np.asarray(x)[:, n] for x, n in zip(together, (heads, one, one), strict=False)]
        assert_same_gradients(got, [*parts, None, None, None])


MATES = [
    {},
    {"causal": True},
    {"causal": True, "q_offset": [0, 33, -5]},
    {"q_lens": [90, 1, 40], "kv_lens": [140, 139, 3], "causal": True},
    {"window_size": (20, 3)},
]


@pytest.mark.parametrize("options", MATES, ids=str)
@pytest.mark.parametrize("Nq", [5, 90])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_5_whatever_the_batch_mates(
    backend: str, options: dict[str, Any], Nq: int, dtype: str
) -> None:
    q, k, v = qkv(3, 4, Nq, 140, 24, dtype=dtype)
    k, v = k[:, :2], v[:, :2]
    mask = np.random.default_rng(3).random((3, 4, Nq, 140)) < 0.8
    if "q_lens" in options:
        options = options | {"q_lens": [min(n, Nq) for n in options["q_lens"]]}
    for extra in ({}, {"mask": mask}):
        together = attend(backend, q, k, v, **options, **extra)
        for b in range(3):
            alone = {
                name: x[b : b + 1] if name.endswith(("lens", "offset", "mask")) else x
                for name, x in (options | extra).items()
            }
            got = attend(backend, q[b : b + 1], k[b : b + 1], v[b : b + 1], **alone)
            assert_same_bits(got, [x[b : b + 1] for x in together])


@pytest.mark.parametrize("q_len", [1, 3, 8, 30])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_5_whatever_the_padding(backend: str, q_len: int, dtype: str) -> None:
    # Alone, the rows of these heads may share a tile or take a narrow one; padded they do not.
    q, k, v = qkv(2, 8, 200, 700, 24, dtype=dtype)
    k, v = k[:, :2], v[:, :2]
    options: dict[str, Any] = {"causal": True, "window_size": (400, None)}
    lens = {"q_lens": [q_len, 200], "kv_lens": [650, 700]}
    padded = attend(backend, q, k, v, **options, **lens)
    got = attend(backend, q[:1, :, :q_len], k[:1, :, :650], v[:1, :, :650], **options)
    assert_same_bits(got, [x[:1, :, :q_len] for x in padded])


@pytest.mark.parametrize("Nq", [1, 5, 90])
def test_5_whatever_the_other_heads(backend: str, Nq: int) -> None:
    q, k, v = qkv(1, 6, Nq, 140, 24)
    k, v = k[:, :2], v[:, :2]
    together = attend(backend, q, k, v, causal=True)
    for kv in range(2):
        heads = slice(3 * kv, 3 * kv + 3)
        got = attend(backend, q[:, heads], k[:, kv : kv + 1], v[:, kv : kv + 1], causal=True)
        assert_same_bits(got, [x[:, heads] for x in together])


@pytest.mark.parametrize("lengths", [(90, 140), (33, 64), (1, 139), (16, 1), (40, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 3)}], ids=str)
def test_5_however_it_is_padded(
    backend: str, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    q, k, v = qkv(2, 2, 90, 140, 24)
    n_q, n_kv = lengths
    mask = np.random.default_rng(3).random((90, 140)) < 0.8
    for extra in ({}, {"mask": mask}):
        out, lse = attend(backend, q, k, v, q_lens=n_q, kv_lens=n_kv, **options, **extra)
        if extra:
            extra = {"mask": mask[:n_q, :n_kv]}
        got = attend(backend, q[:, :, :n_q], k[:, :, :n_kv], v[:, :, :n_kv], **options, **extra)
        assert_same_bits(got, (out[:, :, :n_q], lse[:, :, :n_q]))


def test_5_every_time(backend: str) -> None:
    q, k, v = qkv(2, 2, 70, 140, 24)
    first = attend(backend, q, k, v, causal=True)
    for _ in range(50):
        assert_same_bits(attend(backend, q, k, v, causal=True), first)


@pytest.mark.parametrize("cut", [1, 16, 30, 48, 69])
def test_5_a_slice_of_the_queries_is_equal_within_the_budget(backend: str, cut: int) -> None:
    q, k, v = qkv(1, 2, 70, 140, 24)
    t = truth(q, k, v, causal=True)
    out, lse = attend(backend, q[:, :, cut:], k, v, causal=True)
    assert_near(out, t.out[:, :, cut:], t.budget.out[:, :, cut:, None])
    assert_near(lse, t.lse[:, :, cut:], t.budget.lse[:, :, cut:])


# 6. Linear memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("what", ["causal", "full", "mask", "bias", "window"])
def test_6_linear_memory(child: Callable[..., str], what: str) -> None:
    # the scores alone would take 256 MiB
    assert int(child("memory", 8192, what)) < 32 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_6_strided_keys_are_not_copied(child: Callable[..., str]) -> None:
    # k and v have 128 MiB each
    assert int(child("memory", 1 << 19, "strided")) < 32 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("what", ["float16", "bfloat16"])
def test_6_memory_of_16_bits(child: Callable[..., str], what: str) -> None:
    # k and v have 8 MiB each, in float32 they would have 16
    assert int(child("memory", 1 << 16, what)) < (32 << 20) - (16 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("what", ["plain", "causal", "bias"])
def test_6_memory_of_gradients(child: Callable[..., str], what: str) -> None:
    # q has 512 KiB: three results, eight shares of dq, copies of dk and dv; the scores 256 MiB
    assert int(child("memory_of_gradients", 8192, what)) < 48 << 20


# 7. Accumulation and dtypes


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_7_dtype_of_the_results(backend: str, dtype: str) -> None:
    out, lse = attend(backend, *qkv(1, 1, 3, 3, 4, dtype=dtype), bias=np.zeros(3))
    assert out.dtype == lse.dtype == np.dtype(dtype)


@pytest.mark.parametrize("scale", [np.float64(0.3), np.float32(0.3), np.array(0.3)], ids=repr)
def test_7_the_type_of_scale_changes_nothing(backend: str, scale: Any) -> None:
    q, k, v = qkv(1, 2, 30, 40, 8)
    got = attend(backend, q, k, v, scale=scale)
    assert got[0].dtype == np.float32
    assert_same_bits(got, attend(backend, q, k, v, scale=0.3))


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_7_long_rows_stay_within_the_budget(backend: str, spread: float) -> None:
    q, k, v = qkv(1, 1, 20, 50_000, 16, 4)
    check(backend, q * np.float32(spread), k, v)
    v[...] = 0.1  # rounding errors of one sign
    check(backend, q * np.float32(spread), k, v)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 1e3])
def test_7_scores_of_any_size_stay_within_the_budget(backend: str, size: float) -> None:
    q, k, v = qkv(1, 2, 60, 300, 16)
    check(backend, q * np.float32(size), k, v)
    check(backend, q, k, v * np.float32(size))


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_7_gradients_of_long_rows_stay_within_the_budget(backend: str, spread: float) -> None:
    q, k, v = qkv(1, 1, 20, 20_000, 8, 4)
    check_gradients(backend, q * np.float32(spread), k, v)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 1e3])
def test_7_gradients_of_any_size_stay_within_the_budget(backend: str, size: float) -> None:
    q, k, v = qkv(1, 2, 60, 300, 16)
    check_gradients(backend, q * np.float32(size), k, v)
    check_gradients(backend, q, k, v * np.float32(size))


# 8. Indices


def test_8_more_keys_than_16_bits_count(backend: str) -> None:
    n = 70_000
    v = np.arange(n, dtype="f4").reshape(1, 1, n, 1)
    mask = np.arange(n) == 66_001
    out, lse = attend(backend, np.ones((1, 1, 1, 1), "f4"), np.zeros_like(v), v, mask=mask)
    assert out.item() == 66_001
    assert lse.item() == 0.0
    offset = {"window_size": (0, 0), "q_offset": 66_001}
    out, _ = attend(backend, np.ones((1, 1, 1, 1), "f4"), np.zeros_like(v), v, **offset)
    assert out.item() == 66_001


@pytest.mark.skipif(sys.platform != "linux", reason="needs files with holes")
@pytest.mark.parametrize("sign", [1, -1])
def test_8_strides_beyond_32_bits(backend: str, sign: int, tmp_path: Path) -> None:
    with open(tmp_path / "holes", "w+b") as file:
        file.truncate(18 << 30)
        room = np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32)
    row = (1 << 29) + 8  # the fourth row lies beyond 2**31 elements, the last beyond 2**33 bytes

    def far(x: np.ndarray, start: int) -> np.ndarray:
        strides = (0, 4 * 100, 4 * row, 4)
        view = np.lib.stride_tricks.as_strided(room[start:], x.shape, strides)
        view[...] = x
        return view[:, :, ::sign]

    q, k, v = qkv(1, 2, 5, 7, 4)
    got = attend(backend, far(q, 0), far(k, 1000), far(v, 2000), causal=True)
    near = [x[:, :, ::sign] for x in (q, k, v)]
    assert_same_bits(got, attend(backend, *near, causal=True))


# 9. Errors: the table is in test_problem.py


def test_9_errors_come_before_anything_is_written(backend: str) -> None:
    q, k, v = qkv(1, 1, 5, 5, 4)
    out = np.full((1, 1, 5, 4), 7.0, "f4")
    with pytest.raises(ValueError, match=r"^kv_lens: expected lengths from 0 to 5, got 6"):
        nattn.attention(q, k, v, kv_lens=6, out=out, backend=backend)
    assert np.all(out == 7.0)


def test_9_errors_of_gradients_come_before_anything_is_computed(backend: str) -> None:
    q, k, v = qkv(1, 1, 5, 5, 4)
    out, lse = attend(backend, q, k, v)
    with pytest.raises(ValueError, match=r"^kv_lens: expected lengths from 0 to 5, got 6"):
        nattn.attention_backward(out, q, k, v, out, lse, kv_lens=6, backend=backend)
    with pytest.raises(ValueError, match=r"^backend: expected"):
        nattn.attention_backward(out, q, k, v, out, lse, backend="gpu")


def test_9_an_index_out_of_range_raises_backward_too(backend: str) -> None:
    q, k, v = qkv(1, 2, 70, 200, 16)
    out, lse = attend(backend, q, k, v)
    mod = functools.partial(looked_up, table=np.ones((1, 150), "f4"), gain=1.0)
    with pytest.raises(IndexError, match=r"^score_mod: expected indices within"):
        nattn.attention_backward(out, q, k, v, out, lse, score_mod=mod, backend=backend)
    options: dict[str, Any] = {"score_mod": mod, "kv_lens": 150, "q_offset": 0}
    check_gradients(backend, q, k, v, **options)


@pytest.mark.parametrize("where", ["mask_mod", "score_mod"])
def test_9_no_output_is_written_if_a_function_fails(backend: str, where: str) -> None:
    q, k, v = qkv(2, 1, 5, 5, 4)
    out = np.full((2, 1, 5, 4), 7.0, "f4")
    wrong: dict[str, Any] = {"mask_mod": number_mask, "score_mod": boolean_score}
    with pytest.raises(TypeError, match=f"^{where}: expected (.|\n)*got"):
        attend(backend, q, k, v, out=out, q_lens=[3, 5], **{where: wrong[where]})
    assert np.all(out == 7.0)


def number_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


def boolean_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score > 0.0


# 10. Empty sizes


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (1, 1)}], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        Case("B", B=0),
        Case("H", Hq=0),
        Case("Hq", Hq=0, Hkv=3),
        Case("Nq", Nq=0, Nk=7),
        Case("Nk", Nq=7, Nk=0),
        Case("Dv", Dv=0),
        Case("Nq, Nk", Nq=0),
        Case("all", B=0, Hq=0, Nq=0, Dv=0),
    ],
    ids=lambda case: case.name,
)
def test_10_empty_sizes(backend: str, sizes: Case, options: dict[str, Any], dtype: str) -> None:
    q, k, v, _ = sizes.make(dtype)
    out, lse = check(backend, q, k, v, **options)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == q.shape[:3]
    if sizes.Nk == 0:
        assert np.all(out == 0.0)
        assert np.all(lse == -inf)
    pairs = (*q.shape[:3], k.shape[2])
    check(backend, q, k, v, mask=np.ones(pairs, bool), bias=np.zeros(pairs), **options)
    sinks = np.arange(q.shape[1], dtype="f4") - 1
    modifiers = WITH_B | {"sinks": sinks, "alibi_slopes": sinks}
    _, lse = check(backend, q, k, v, **modifiers, **options)
    if sizes.Nk == 0:
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], lse.shape))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    "sizes",
    [
        Case("B", B=0),
        Case("H", Hq=0),
        Case("Hq", Hq=0, Hkv=3),
        Case("Nq", Nq=0, Nk=7),
        Case("Nk", Nq=7, Nk=0),
        Case("Dv", Dv=0),
        Case("Nq, Nk", Nq=0),
        Case("all", B=0, Hq=0, Nq=0, Dv=0),
    ],
    ids=lambda case: case.name,
)
def test_10_gradients_of_empty_sizes(backend: str, sizes: Case, dtype: str) -> None:
    q, k, v, _ = sizes.make(dtype)
    pairs = (*q.shape[:3], k.shape[2])
    got = check_gradients(backend, q, k, v, mask=np.ones(pairs, bool), bias=np.zeros(pairs))
    assert (np.shape(got.dq), np.shape(got.dk), np.shape(got.dv)) == (q.shape, k.shape, v.shape)
    sinks = np.arange(q.shape[1], dtype="f4") - 1
    modifiers = WITH_B | {"sinks": sinks, "alibi_slopes": sinks}
    check_gradients(backend, q, k, v, causal=True, **modifiers)


def test_10_no_value_columns_still_have_an_lse(backend: str) -> None:
    q, k, v = qkv(1, 2, 50, 60, 8)
    _, expected = attend(backend, q, k, v)
    out, lse = attend(backend, q, k, v[..., :0])
    assert out.shape == (1, 2, 50, 0)
    np.testing.assert_array_equal(lse, expected)


# 11. Call it from anywhere

LAYERS = ["omp", "workqueue", "tbb"]
forks = pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="there is no fork")


def need(layer: str) -> dict[str, str]:
    """Return the environment of a threading layer, or skip where its library is missing."""
    name = {"omp": "omppool", "workqueue": "workqueue", "tbb": "tbbpool"}[layer]
    try:
        importlib.import_module(f"numba.np.ufunc.{name}")
    except ImportError:
        pytest.skip(f"no library for the threading layer {layer}")
    return {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}


@pytest.mark.parametrize("layer", LAYERS)
def test_11_several_threads(child: Callable[..., str], layer: str) -> None:
    child("several_threads", **need(layer))


def test_11_first_call_in_several_threads(child: Callable[..., str]) -> None:
    child("first_call_in_several_threads", NUMBA_NUM_THREADS="2")


@forks
@pytest.mark.parametrize("layer", LAYERS)
def test_11_fork(child: Callable[..., str], layer: str) -> None:
    child("fork", **need(layer))


@forks
def test_11_fork_before_the_first_call(child: Callable[..., str]) -> None:
    child("fork_before_the_first_call")


@forks
def test_11_fork_during_the_first_call(child: Callable[..., str], tmp_path: Path) -> None:
    child("fork_during_the_first_call", NATTN_CACHE_DIR=str(tmp_path))


@forks
@pytest.mark.parametrize("layer", LAYERS)
def test_11_fork_while_a_thread_calls(child: Callable[..., str], layer: str) -> None:
    child("fork_while_a_thread_calls", **need(layer))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_11_process_pool(child: Callable[..., str], method: str) -> None:
    # no layer of Numba's runs in it: `fork` has one
    child("process_pool", method)


@forks
@pytest.mark.parametrize("layer", LAYERS)
def test_11_ctrl_c(layer: str) -> None:
    # Uninterrupted, the call would take hours: that it ends is the proof.
    with subprocess.Popen(
        children.command("interrupt"),
        env=children.environment(**need(layer)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        watchdog = threading.Timer(200, process.kill)
        watchdog.start()
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1] == "ready":
                threading.Timer(0.7, process.send_signal, [signal.SIGINT]).start()
        status = process.wait()
        watchdog.cancel()
    assert status == 0, "\n".join(lines)
    assert lines == ["ready", "interrupted"] * 2 + ["right"]


@forks
@pytest.mark.parametrize("layer", LAYERS)
def test_11_gradients_from_anywhere(child: Callable[..., str], layer: str) -> None:
    child("gradients_from_anywhere", **need(layer))
