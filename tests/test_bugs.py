"""Faults that other libraries shipped, one section for each kind, with its right behaviour.

D1 to D16 are wrong results and crashes, S1 to S6 surprises; the issues where they were reported
are named beside them. What concerns packing and the GPU comes with those parts.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import (
    assert_gradients_near,
    assert_near,
    check,
    check_gradients,
    gaussian,
    gradient_truth,
    incoming,
    qkv,
    truth,
)

import nattn
from nattn.backends import reference
from nattn.backends.error_budget import error_budget
from nattn.call.problem import WRT, Problem
from nattn.functions.dropout import keep

nan, inf = np.nan, np.inf


def attend(backend: str, *arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = nattn.attention(*arrays, return_lse=True, backend=backend, **options)
    return out, lse


def differentiate(backend: str, *arrays: Any, **options: Any) -> Any:
    """Return dq, dk and dv for some dout and dlse."""
    dout, dlse = incoming(Problem.build(*arrays, **options))
    _, vjp = nattn.attention_vjp(*arrays, backend=backend, **options)
    return vjp(dout, dlse)


def assert_same_gradients(got: nattn.Gradients, expected: nattn.Gradients) -> None:
    for name, x, y in zip(WRT, got, expected, strict=False):
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=name)


def column(values: Any, dtype: str = "f4") -> np.ndarray:
    return np.array(values, dtype).reshape(1, 1, -1, 1)


def before(b: Any, h: Any, q_idx: Any, kv_idx: Any, end: Any) -> Any:
    return kv_idx < end


def hidden_from(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, end: Any) -> Any:
    return np.where(kv_idx < end, score, -np.inf)


# D1 an empty row: pytorch #41508, #196170; tracel-ai/burn #4697; flash-attention #978


def test_d1_mask_and_causal_together_empty_a_row(backend: str) -> None:
    q, k, v = qkv(1, 1, 4, 4, 4)
    mask = np.ones((1, 1, 4, 4), bool)
    mask[..., 0, 0] = False
    out, lse = check(backend, q, k, v, mask=mask, causal=True)
    assert np.all(out[0, 0, 0] == 0.0)
    assert lse[0, 0, 0] == -inf
    assert np.all(np.isfinite(lse[0, 0, 1:]))


@pytest.mark.parametrize("sinks", [None, [0.5]])
def test_d1_gradients_of_an_empty_row(backend: str, sinks: Any) -> None:
    q, k, v = qkv(1, 1, 4, 4, 4)
    mask = np.ones((1, 1, 4, 4), bool)
    mask[..., 0, 0] = False
    options: dict[str, Any] = {"mask": mask, "causal": True, "sinks": sinks}
    got = check_gradients(backend, q, k, v, **options)
    assert got.dq is not None
    assert np.all(got.dq[0, 0, 0] == 0.0)
    dout, dlse = incoming(Problem.build(q, k, v, **options))
    out, lse = attend(backend, q, k, v, **options)
    dout[0, 0, 0] = 0.0
    t = gradient_truth(q, k, v, dout, dlse, **options)
    for first in (5.0, nan, inf):  # whatever comes back into the empty row
        dout[0, 0, 0] = first
        again = nattn.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, wrt=tuple(t.gradients), backend=backend, **options
        )
        assert_gradients_near(again, t, tuple(t.gradients))


# D2 -inf - (-inf) in an early block that hides everything: pytorch #127055, #130014


@pytest.mark.parametrize("how", ["bias", "mask", "window_size"])
def test_d2_band(backend: str, how: str) -> None:
    i = np.arange(640)
    x = np.ones((1, 1, 640, 4), "f4")
    band = (i <= i[:, None]) & (i > i[:, None] - 10)
    options: dict[str, Any] = {
        "bias": np.where(band, 0, -inf),
        "mask": band,
        "window_size": (9, 0),
    }
    out, lse = attend(backend, x, x, x, **{how: options[how]})
    budget = error_budget(np.dtype("f4"), np.minimum(i + 1, 10), 2.0, 1.0, 4)
    assert_near(out[0, 0], np.ones((640, 4)), budget.out[:, None])
    assert_near(lse[0, 0], 2 + np.log(np.minimum(i + 1, 10)), budget.lse)


# D3 what lies behind the end of a cache leaks: flash-attention #1745, #2374; pytorch #101967


@pytest.mark.parametrize("how", ["kv_lens", "mask", "bias"])
def test_d3_cache_padding(backend: str, how: str) -> None:
    q, k, v = qkv(2, 2, 3, 3, 4)
    lengths = [1, 3]
    live = np.arange(3) < np.array(lengths).reshape(2, 1, 1, 1)
    options: dict[str, Any] = {
        "kv_lens": lengths,
        "mask": live,
        "bias": np.where(live, 0, -inf),
    }
    k[0, :, 1:], v[0, :, 1:] = nan, inf
    out, lse = attend(backend, q, k, v, **{how: options[how]})
    for b, n in enumerate(lengths):
        t = truth(q[[b]], k[[b], :, :n], v[[b], :, :n])
        assert_near(out[[b]], t.out, t.budget.out[..., None])
        assert_near(lse[[b]], t.lse, t.budget.lse)


@pytest.mark.parametrize("how", ["kv_lens", "mask", "bias", "mask_mod", "score_mod"])
def test_d3_cache_padding_has_no_gradient(backend: str, how: str) -> None:
    q, k, v = qkv(1, 2, 3, 3, 4)
    options: dict[str, Any] = {
        "kv_lens": 1,
        "mask": np.arange(3) < 1,
        "bias": np.where(np.arange(3) < 1, 0, -inf),
        "mask_mod": functools.partial(before, end=1),
        "score_mod": functools.partial(hidden_from, end=1),
    }
    k[0, :, 1:], v[0, :, 1:] = nan, inf
    option = {how: options[how]} | ({"q_offset": 0} if how == "kv_lens" else {})
    got = differentiate(backend, q, k, v, **option)
    cut = k[:, :, :1], v[:, :, :1]
    dout, dlse = incoming(Problem.build(q, *cut))
    t = gradient_truth(q, cut[0], cut[1], dout, dlse)
    for name, x in zip("qkv", got, strict=False):
        assert x is not None
        live = x if name == "q" else x[:, :, :1]
        assert_near(live, t.gradients[name], t.budget[name])
        assert name == "q" or np.all(x[:, :, 1:] == 0.0)


# D4 causal for Nq != Nk: mlx #2835; onnxruntime #29020; flash-attention #1778


def test_d4_causal_is_aligned_to_the_last_key(backend: str) -> None:
    q, k, v = qkv(1, 2, 5, 5, 4)
    full = truth(q, k, v, causal=True)
    out, lse = check(backend, q[:, :, -2:], k, v, causal=True)
    assert_near(out, full.out[:, :, -2:], full.budget.out[:, :, -2:, None])
    assert_near(lse, full.lse[:, :, -2:], full.budget.lse[:, :, -2:])
    out, lse = check(backend, q, k[:, :, :2], v[:, :, :2], causal=True)
    assert np.all(out[:, :, :3] == 0.0)
    assert np.all(lse[:, :, :3] == -inf)
    assert np.all(np.isfinite(lse[:, :, 3:]))


# D5 windows: transformers #39408; onnxruntime #25927; jax #32300, #23349


def test_d5_a_window_of_one_key_is_v(backend: str) -> None:
    q, k, v = qkv(1, 2, 130, 130, 8)
    out = nattn.attention(q, k, v, window_size=(0, 0), backend=backend)
    np.testing.assert_array_equal(out, v)


def test_d5_row_i_sees_exactly_its_window(backend: str) -> None:
    n = 130
    q = k = np.zeros((n, 1), "f4")
    out = nattn.attention(q, k, np.eye(n, dtype="f4"), window_size=(2, 0), backend=backend)
    for i in range(n):
        assert np.flatnonzero(out[i]).tolist() == list(range(max(0, i - 2), i + 1))


def test_d5_positions_of_each_item(backend: str) -> None:
    q, k = np.zeros((2, 1, 1, 1), "f4"), np.zeros((2, 1, 8, 1), "f4")
    v = np.broadcast_to(np.eye(8, dtype="f4"), (2, 1, 8, 8))
    out = nattn.attention(q, k, v, window_size=(2, 0), kv_lens=[5, 8], backend=backend)
    assert np.flatnonzero(out[0]).tolist() == [2, 3, 4]
    assert np.flatnonzero(out[1]).tolist() == [5, 6, 7]


# D6 masked keys leak: flash-attention #1025, #1033; onnxruntime #28379


def test_d6_a_masked_key_does_not_leak(backend: str) -> None:
    # score 50 is hidden, so weights are 1 and e**50
    out, lse = attend(
        backend,
        column([1]),
        column([0, 50, 50]),
        column([1, 2, 9]),
        mask=np.array([True, True, False]),
    )
    assert out.item() == 2.0
    assert lse.item() == 50.0


@pytest.mark.parametrize("how", ["mask", "bias", "kv_lens", "mask_mod", "score_mod"])
def test_d6_softcap_comes_before_the_mask(backend: str, how: str) -> None:
    hiding: dict[str, Any] = {
        "mask": np.array([True, True, False]),
        "bias": np.array([0.0, 0.0, -inf]),
        "kv_lens": 2,
        "mask_mod": functools.partial(before, end=2),
        "score_mod": functools.partial(hidden_from, end=2),
    }
    q, k, v = column([1]), column([0, 50, 50]), column([1, 2, 9])
    out, lse = attend(backend, q, k, v, softcap=1, **{how: hiding[how]})
    budget = error_budget(np.dtype("f4"), 2, 1.0, 2.0, 1, score_error=9 * 2.0**-24)  # tanh, cap
    assert_near(out, np.full(out.shape, (1 + 2 * math.e) / (1 + math.e)), budget.out)
    assert_near(lse, np.full(lse.shape, math.log(1 + math.e)), budget.lse)


def test_d6_the_gradient_of_softcap(backend: str) -> None:
    # p is 1/(1+e) and e/(1+e); of s = 1 the factor 1 - tanh(50)**2 is 0, of s = 0 it is 1
    q, k, v = column([1], "f8"), column([0, 50, 50], "f8"), column([1, 2, 9], "f8")
    options: dict[str, Any] = {"softcap": 1.0, "mask": [True, True, False], "bias": np.zeros(3)}
    out, lse = attend(backend, q, k, v, **options)
    assert out.item() == pytest.approx((1 + 2 * math.e) / (1 + math.e), rel=1e-14)
    assert lse.item() == pytest.approx(math.log(1 + math.e), rel=1e-14)
    got: Any = nattn.attention_backward(
        np.ones_like(out), q, k, v, out, lse, wrt=WRT[:4], backend=backend, **options
    )
    p = np.array([1.0, math.e]) / (1 + math.e)
    ds = p[0] * p[1]  # p (v - out): the same size for both keys
    close = functools.partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-16)
    close(np.ravel(got.dbias), [-ds, ds, 0.0])  # the factor is not on dbias
    close(np.ravel(got.dk), [-ds, 0.0, 0.0])
    assert np.ravel(got.dk)[2] == np.ravel(got.dbias)[2] == np.ravel(got.dv)[2] == 0.0  # hidden
    close(np.ravel(got.dq), [0.0])
    close(np.ravel(got.dv), [*p, 0.0])


def test_d6_the_gradient_of_softcap_with_a_bias(backend: str) -> None:
    q, k, v = qkv(1, 2, 20, 30, 8, dtype="f8")
    check_gradients(backend, q, k, v, softcap=0.5, bias=gaussian(2, 20, 30), mask=np.arange(30) > 3)


# D7 axes, dtype and shape of the mask: onnx #8108; pytorch #193728


def test_d7_the_mask_is_aligned_at_the_right(backend: str) -> None:
    q, k, v = qkv(2, 2, 3, 4, 4)
    mask = np.random.default_rng(0).random((2, 3, 4)) < 0.6
    out = nattn.attention(q, k, v, mask=mask, backend=backend)
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, mask=mask[None], backend=backend))
    other = nattn.attention(q, k, v, mask=mask[:, None], backend=backend)
    assert not np.array_equal(out, other)


def test_d7_what_does_not_fit_raises(backend: str) -> None:
    q, k, v = qkv(2, 2, 3, 4, 4)
    with pytest.raises(TypeError, match=r"^mask: .*uint8"):
        nattn.attention(q, k, v, mask=np.ones((3, 4), "u1"), backend=backend)
    with pytest.raises(ValueError, match=r"^mask: .*\(3, 3\)"):
        nattn.attention(q, k, v, mask=np.ones((3, 3), bool), backend=backend)
    with pytest.raises(ValueError, match=r"^v: "):
        nattn.attention(q, k, v[:, :, :3], backend=backend)


# D8 heads and sizes: levanter #449; native-sparse-attention-triton #27


@pytest.mark.parametrize("sizes", [(8, 24), (24, 8), (1, 5), (33, 257)])
def test_d8_head_map_and_value_size(backend: str, sizes: tuple[int, int]) -> None:
    D, Dv = sizes
    q, k, v = gaussian(2, 6, 9, D), gaussian(2, 2, 9, D, seed=1), gaussian(2, 2, 9, Dv, seed=2)
    check(backend, q, k, v)
    out = nattn.attention(q, k, v, backend=backend)
    repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
    t = truth(q, *repeated)
    assert_near(out, t.out, t.budget.out[..., None])


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("sizes", [(8, 24), (24, 8), (1, 5), (33, 257)])
def test_d8_gradients_are_summed_over_a_group(
    backend: str, sizes: tuple[int, int], dtype: str
) -> None:
    D, Dv = sizes
    q = gaussian(2, 6, 9, D, dtype=dtype)
    k, v = gaussian(2, 2, 9, D, dtype=dtype, seed=1), gaussian(2, 2, 9, Dv, dtype=dtype, seed=2)
    got = check_gradients(backend, q, k, v)
    dout, dlse = incoming(Problem.build(q, k, v))
    repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
    t = gradient_truth(q, repeated[0], repeated[1], dout, dlse)
    summed = {
        n: t.gradients[n].reshape(2, 2, 3, *x.shape[2:]).sum(2) for n, x in (("k", k), ("v", v))
    }
    budget = {n: t.budget[n].reshape(2, 2, 3, *x.shape[2:]).sum(2) for n, x in (("k", k), ("v", v))}
    u = float(np.finfo(dtype).eps)
    for name, x in (("q", got.dq), ("k", got.dk), ("v", got.dv)):
        expected = summed.get(name, t.gradients[name])
        allowed = budget.get(name, t.budget[name])
        assert_near(np.asarray(x), expected, allowed + 3 * u * np.abs(expected))


def test_d8_heads_that_do_not_divide_raise(backend: str) -> None:
    q, k, v = gaussian(1, 6, 4, 4), gaussian(1, 4, 4, 4), gaussian(1, 4, 4, 4)
    with pytest.raises(ValueError, match=r"^k, v: .*6 heads.* got 4"):
        nattn.attention(q, k, v, backend=backend)


# D9 log-sum-exp: vllm #28181, #15492; flashinfer #4051


def test_d9_lse_is_a_natural_logarithm(backend: str) -> None:
    _, lse = attend(backend, column([0]), column([0] * 8), column([1] * 8))
    budget = error_budget(np.dtype("f4"), 8, 0.0, 1.0, 1)
    assert_near(lse, np.full(lse.shape, math.log(8)), budget.lse)  # 3 would be the binary one


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 150])
def test_d9_parts_merge_by_their_lse(backend: str, cut: int) -> None:
    q, k, v = qkv(1, 2, 20, 150, 8, dtype="f8")
    t = truth(q, k, v)
    parts = [
        attend(backend, q, k[:, :, part], v[:, :, part])
        for part in (slice(0, cut), slice(cut, None))
    ]
    lse = np.logaddexp(parts[0][1], parts[1][1])
    out = sum(np.exp(part_lse - lse)[..., None] * part_out for part_out, part_lse in parts)
    # two parts, each within its budget, and the rounding of the merge
    assert_near(np.asarray(out), t.out, 3 * t.budget.out[..., None])
    assert_near(lse, t.lse, 3 * t.budget.lse)


# D10 empties: pytorch #141219; flash-attention #2470, #2562, #1537; numba #4483


@pytest.mark.parametrize("sizes", [(0, 3, 3), (1, 0, 3), (1, 3, 0), (1, 1, 1)])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_d10_empties(backend: str, sizes: tuple[int, int, int], options: dict[str, Any]) -> None:
    B, Nq, Nk = sizes
    out, lse = check(backend, *qkv(B, 2, Nq, Nk, 4), **options)
    if Nk == 0:
        assert np.all(out == 0.0)
        assert np.all(lse == -inf)


@pytest.mark.parametrize("sizes", [(0, 3, 3), (1, 0, 3), (1, 3, 0), (1, 1, 1)])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_d10_gradients_of_empties(
    backend: str, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    B, Nq, Nk = sizes
    q, k, v = qkv(B, 2, Nq, Nk, 4)
    got = check_gradients(backend, q, k, v, sinks=[1.0, 2.0], bias=np.zeros((2, 1, Nk)), **options)
    if B * Nq * Nk == 0:
        for x in got[:4]:
            assert x is not None
            assert not x.any()


# D11 strides: pytorch #187506, #112577; flash-attention #355; xformers #282; numba #4511, #2593


def test_d11_slices_of_one_packed_array(backend: str) -> None:
    packed = gaussian(2, 50, 3, 4, 16)  # (B, N, qkv, H, D)
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    before = packed.copy()
    out = nattn.attention(q, k, v, causal=True, backend=backend)
    copies = [np.ascontiguousarray(x) for x in (q, k, v)]
    np.testing.assert_array_equal(out, nattn.attention(*copies, causal=True, backend=backend))
    np.testing.assert_array_equal(packed, before)


def test_d11_views_of_all_kinds(backend: str) -> None:
    q, k, v = qkv(2, 2, 40, 70, 16)
    unaligned = np.zeros(q.nbytes + 1, "u1")[1:].view("f4").reshape(q.shape)
    unaligned[...] = q
    assert not unaligned.flags.aligned
    read_only = v.copy()
    read_only.flags.writeable = False
    views = [
        (unaligned, k[..., ::-1], read_only),
        (q.astype(">f4"), np.asfortranarray(k), np.broadcast_to(v[:1], v.shape)),
        (np.broadcast_to(np.float32(1), q.shape), k[:, :, ::-1], v[..., ::2]),
        (q[:, :, :1], k[:, :, :1], v[:, :, :1]),  # contiguous in both orders
    ]
    for arrays in views:
        copies = [np.array(x, "f4", order="C") for x in arrays]
        out = nattn.attention(*arrays, backend=backend)
        assert out.dtype == np.dtype("f4")
        assert out.dtype.isnative
        np.testing.assert_array_equal(out, nattn.attention(*copies, backend=backend))


def test_d11_gradients_of_views_of_all_kinds(backend: str) -> None:
    q, k, v = qkv(2, 2, 40, 70, 16)
    out, lse = attend(backend, q, k, v)
    dout = gaussian(2, 2, 40, 16, seed=7)
    packed = gaussian(2, 70, 3, 2, 16)
    room = np.zeros(dout.nbytes + 1, "u1")[1:].view("f4").reshape(dout.shape)
    room[...] = dout
    read_only = dout.copy()
    read_only.flags.writeable = False
    douts = [
        np.broadcast_to(np.float32(1), dout.shape),
        np.broadcast_to(dout[:, :, :1], dout.shape),
        np.asfortranarray(dout),
        np.ascontiguousarray(dout[..., ::-1])[..., ::-1],
        dout.astype(">f4"),
        room,
        read_only,
    ]
    views = [
        *((x, q, k, v, out, lse) for x in douts),
        (dout, q, *(packed[:, :, n].transpose(0, 2, 1, 3) for n in (0, 2)), out, lse),
        (dout, q[..., ::-1], k[:, :, ::-1], np.broadcast_to(v[:1], v.shape), out, lse),
        (dout, np.asfortranarray(q), k.astype(">f4"), np.asfortranarray(v), out, lse),
        (dout, q, k, v, np.asfortranarray(out), np.asfortranarray(lse)),
        (dout, q, k, v, out.astype(">f4"), lse.astype(">f4")),
    ]
    arrays: Any
    for arrays in views:
        before = [x.copy() for x in arrays]
        copies: Any = [np.array(x, "f4", order="C") for x in arrays]
        got = nattn.attention_backward(*arrays, backend=backend)
        assert all(x is None or (x.dtype == "f4" and x.dtype.isnative) for x in got)
        assert_same_gradients(got, nattn.attention_backward(*copies, backend=backend))
        for x, copy in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(x, copy)


# D12 precision: metal-flash-attention #8; ultralytics #24990; numba #8138, #3521


def test_d12_large_scores(backend: str) -> None:
    h = np.full((1, 1, 2, 64), 300, "f4")
    out, lse = attend(backend, h, h, column([1, 3]))
    assert out.tolist() == [[[[2.0], [2.0]]]]
    assert lse.tolist() == [[[720000.6875] * 2]]  # float32 next to 720000 + log 2


def test_d12_the_type_of_scale(backend: str) -> None:
    q, k, v = qkv(1, 2, 20, 30, 8)
    outs = [
        nattn.attention(q, k, v, scale=scale, backend=backend)
        for scale in (0.3, np.float64(0.3), np.float32(0.3))
    ]
    for out in outs:
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, outs[0])


# D13 flags that assume NaN and Inf away: numba #2919, #8708, #6217


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_d13_nan_and_inf_keep_their_meaning(backend: str, dtype: str) -> None:
    q, k, v = qkv(1, 1, 40, 130, 8, dtype=dtype)
    bias = np.zeros((40, 130))
    bias[0, 5], bias[1, 5], bias[2, 5] = nan, inf, -inf
    out, lse = check(backend, q, k, v, bias=bias)
    assert np.isnan(lse[0, 0]).tolist() == [True, True] + [False] * 38
    assert np.isnan(out[0, 0, :2]).all()


# D14 parallel code: numba #6976, #9529, #5979, #3681


def test_d14_half_of_the_rows_are_hidden(backend: str) -> None:
    q, k, v = qkv(2, 4, 100, 90, 16)
    live = np.random.default_rng(0).random((2, 4, 100)) < 0.5
    first = attend(backend, q, k, v, mask=live[..., None])
    assert np.all(first[0][~live] == 0.0)
    assert np.all(first[1][~live] == -inf)
    for h in range(4):
        heads = [x[:, h : h + 1] for x in (q, k, v)]
        alone = attend(backend, *heads, mask=live[:, h : h + 1, :, None])
        np.testing.assert_array_equal(alone[0], first[0][:, h : h + 1])
    for _ in range(50):
        again = attend(backend, q, k, v, mask=live[..., None])
        np.testing.assert_array_equal(again[0], first[0])
        np.testing.assert_array_equal(again[1], first[1])


# D15 threads, forks, process pools and Ctrl-C (numba #8563, #9288, #7872): promise 11 in
# test_promises.py. Here: the cache of compiled code (numba #10491, #4908, #10434, #9950)


@pytest.fixture(scope="module")
def kept(child: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what one call compiles, to be copied."""
    folder = tmp_path_factory.mktemp("kernels")
    child("one_call", NATTN_CACHE_DIR=str(folder))
    return folder


def test_d15_damaged_cache_files(child: Callable[..., str], kept: Path, tmp_path: Path) -> None:
    # The real kernels; several processes on an empty cache are in test_cpu_jit.py.
    cache = {"NATTN_CACHE_DIR": str(tmp_path)}
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)

    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}

    assert files()
    for n, path in enumerate(files()):
        content = path.read_bytes()
        path.write_bytes([b"", content[: len(content) // 2], content[::-1]][n % 3])
    damaged = files()
    child("one_call", **cache)
    mended = files()
    assert mended.keys() == damaged.keys()
    assert all(mended[path] != damaged[path] for path in mended)
    child("one_call", **cache)
    assert files() == mended  # nothing was compiled


def test_n4_a_kernel_under_anothers_name(
    child: Callable[..., str], kept: Path, tmp_path: Path
) -> None:
    # It crashed. Who may write to the folders and files is in test_cpu_jit.py.
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    paths = sorted(tmp_path.rglob("*.kernel"))
    contents = [path.read_bytes() for path in paths]
    assert len(paths) > 1
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    child("one_call", NATTN_CACHE_DIR=str(tmp_path))


def test_d15_nowhere_to_write(child: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "folder")
    child("one_call", NATTN_CACHE_DIR=nowhere, HOME=nowhere, TMPDIR=nowhere)


# D16 indices (mlx #3360, #2894; pytorch #162588): promise 8 in test_promises.py


@pytest.mark.parametrize("Nq", [1, 40])
def test_d16_one_key_among_many(backend: str, Nq: int) -> None:
    n = 70_000
    v = column(np.arange(n))
    mask = np.arange(n) == 66_001
    out = nattn.attention(
        np.ones((1, 1, Nq, 1), "f4"), np.zeros_like(v), v, mask=mask, backend=backend
    )
    assert np.all(out == 66_001)


# S1 dropout: apex #816; flash-attention #612, #2439


@pytest.mark.parametrize("Nq", [3, 200])
def test_s1_dropout_keeps_the_mean(backend: str, Nq: int) -> None:
    q, k, v = qkv(2, 4, Nq, 1000, 16)
    out, lse = check(backend, q, k, np.ones_like(v), dropout_p=0.1, seed=1)
    # A row's out is a mean of 1 / 0.9 with probability 0.9 and else 0, of weights p: its variance
    # is sum(p**2) / 9. Six deviations of the mean over all rows, which are independent.
    t = truth(q, k, v)
    s = np.array([reference.scores(t.problem, b, h)[0] for b, h in np.ndindex(2, 4)])
    p = np.exp(s - t.lse.reshape(8, Nq, 1))
    assert abs(out[..., 0].mean() - 1.0) < 6 * math.sqrt((p**2).sum() / 9) / (8 * Nq)
    np.testing.assert_array_equal(lse, attend(backend, q, k, v)[1])  # that without dropout
    other, _ = attend(backend, q, k, np.ones_like(v), dropout_p=0.1, seed=2)
    assert not np.array_equal(out, other)


def test_s1_what_is_dropped_does_not_depend_on_the_tiling(backend: str) -> None:
    # Every size of q, k and v chooses its own tiles; equal scores tell who was dropped.
    expected = keep(0, np.arange(4)[:, None, None], np.arange(300)[:, None], np.arange(300), 3, 0.5)
    for Nq, Nk, D in [(1, 300, 1), (5, 300, 8), (40, 37, 200), (300, 300, 8)]:
        q, k = np.zeros((1, 4, Nq, D), "f4"), np.zeros((1, 2, Nk, D), "f4")
        v = np.broadcast_to(np.eye(Nk, dtype="f4"), (1, 2, Nk, Nk))
        for x in (k, k[:, [0, 1, 0, 1]]):  # heads of a group share a tile
            heads = v if x is k else v[:, [0, 1, 0, 1]]
            out = nattn.attention(q, x, heads, dropout_p=0.5, seed=3, backend=backend)
            np.testing.assert_array_equal(out[0] > 0, expected[:, :Nq, :Nk])


def test_s1_the_backward_pass_drops_what_the_forward_pass_drops(backend: str) -> None:
    # dv of v = 1: each row gives 1 / (1 - p) times its weight to the keys that it keeps
    kept = keep(0, np.arange(2)[:, None, None], np.arange(50)[:, None], np.arange(300), 3, 0.5)
    q, k, v = np.zeros((1, 2, 50, 4), "f4"), np.zeros((1, 2, 300, 4), "f4"), gaussian(1, 2, 300, 3)
    _, vjp = nattn.attention_vjp(q, k, v, dropout_p=0.5, seed=3, backend=backend)
    dout = np.zeros((1, 2, 50, 3), "f4")
    for i in (0, 17, 49):
        dout[...] = 0.0
        dout[:, :, i] = 1.0
        dv = vjp(dout, wrt=("v",)).dv
        assert dv is not None
        np.testing.assert_array_equal(dv[0, ..., 0] > 0, kept[:, i])
    check_gradients(backend, *qkv(1, 2, 50, 300, 8), dropout_p=0.1, seed=2**64 - 1)


# S2 ALiBi slopes: mlx #3071; paiml/aprender #2143


def test_s2_alibi_slopes() -> None:
    eight = nattn.alibi_slopes(8)
    assert (eight[0], eight[7]) == (0.5, 2.0**-8)
    twelve = nattn.alibi_slopes(12)
    np.testing.assert_array_equal(twelve[:8], eight)
    np.testing.assert_array_equal(twelve[8:], nattn.alibi_slopes(16)[0:8:2])


def test_s2_alibi_for_twelve_heads(backend: str) -> None:
    # Equal scores: the weight of a key is exp(-slope * distance).
    q, k = np.zeros((1, 12, 1, 4), "f4"), np.zeros((1, 12, 2, 4), "f4")
    _, lse = check(backend, q, k, k, alibi_slopes=nattn.alibi_slopes(12))
    slopes = nattn.alibi_slopes(12).astype("f8")
    budget = error_budget(np.dtype("f4"), 2, slopes, 0.0, 4, score_error=0.0)  # -slope is exact
    assert_near(lse[0, :, 0], np.log1p(np.exp(-slopes)), budget.lse)


# S3 results depend on the batch: flash-attention #1897; FlashMLA #212


@pytest.mark.parametrize("Nq", [1, 4, 100])
def test_s3_an_item_alone(backend: str, Nq: int) -> None:
    q, k, v = qkv(5, 2, Nq, 700, 16)
    together = nattn.attention(q, k, v, backend=backend)
    alone = nattn.attention(q[:1], k[:1], v[:1], backend=backend)
    np.testing.assert_array_equal(alone, together[:1])


@pytest.mark.parametrize("Nq", [1, 4, 100])
def test_s3_gradients_of_an_item_alone(backend: str, Nq: int) -> None:
    q, k, v = qkv(5, 2, Nq, 700, 16)
    dout = gaussian(5, 2, Nq, 16, seed=9)

    def got(items: slice) -> Any:
        _, vjp = nattn.attention_vjp(q[items], k[items], v[items], backend=backend)
        return vjp(dout[items])

    together = got(slice(None))
    for b in range(5):
        item = slice(b, b + 1)
        assert_same_gradients(
            got(item), nattn.Gradients(*(x[item] for x in together[:3]), *[None] * 3)
        )


# S5 weights that are subnormal numbers: meep #1708


def test_s5_scores_whose_weights_are_subnormal(backend: str) -> None:
    rng = np.random.default_rng(0)
    q = np.ones((1, 1, 64, 1), "f4")
    k = column(np.where(np.arange(500) % 2, 0.0, -rng.uniform(90, 103, 500)))
    v = gaussian(1, 1, 500, 8)
    check(backend, q, k, v)
    check(backend, q, k, v * np.float32(1e-38))  # products are subnormal too


# S6 edges: flash-attention #2896; pytorch #191937


@pytest.mark.parametrize("D", [72, 104])
@pytest.mark.parametrize("Nk", [63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513])
def test_s6_edges(tiled: str, D: int, Nk: int) -> None:
    q, k, v = qkv(1, 1, 33, Nk, D)
    check(tiled, q, k, v)
    check(tiled, q, k, v, mask=np.arange(Nk) % 5 > 0)
    check(tiled, q, np.broadcast_to(k[:, :, :1], k.shape), np.broadcast_to(v[:1, :, :1], v.shape))


@pytest.mark.parametrize("D", [72, 104])
@pytest.mark.parametrize("Nk", [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_s6_edges_backward(tiled: str, D: int, Nk: int) -> None:
    q, k, v = qkv(1, 1, 33, Nk, D)
    check_gradients(tiled, q, k, v)
    check_gradients(tiled, q, k, v, mask=np.arange(Nk) % 5 > 0)
    flat = np.broadcast_to(k[:, :, :1], k.shape), np.broadcast_to(v[:1, :, :1], v.shape)
    check_gradients(tiled, q, *flat)


def test_s6_edges_of_the_queries_backward(tiled: str) -> None:
    for Nq in (1, 15, 16, 17, 23, 24, 25, 47, 48, 49, 95, 96, 97, 191, 192, 193):
        check_gradients(tiled, *qkv(1, 1, Nq, 40, 8, 5))


def test_s5_gradients_whose_weights_are_subnormal(backend: str) -> None:
    rng = np.random.default_rng(0)
    q = np.ones((1, 1, 64, 1), "f4")
    k = column(np.where(np.arange(500) % 2, 0.0, -rng.uniform(90, 103, 500)))
    check_gradients(backend, q, k, gaussian(1, 1, 500, 8))
