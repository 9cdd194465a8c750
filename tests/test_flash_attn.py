"""The functions of flash-attention 2: against a dense formula in float64, written with torch."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from cases import assert_near, gradient_truth, truth
from numpy.typing import NDArray

torch: Any = pytest.importorskip("torch", reason="flash-attention's functions are of torch")
fa: Any = importlib.import_module("nattn.integrations.flash_attn")

Tensor = Any
D, HQ, HKV = 16, 4, 2


def normal(*shape: int, dtype: Any = None, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    B: int, Nq: int, Nk: int, H: tuple[int, int] = (HQ, HKV), dtype: Any = None
) -> list[Tensor]:
    shapes = [(B, Nq, H[0], D), (B, Nk, H[1], D), (B, Nk, H[1], D)]
    return [normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def array(x: Tensor) -> NDArray[Any]:
    """Return a tensor as an array of the same numbers and dtype."""
    if x.dtype == torch.bfloat16:
        bfloat16: Any = pytest.importorskip("ml_dtypes").bfloat16
        return np.asarray(x.detach().float().numpy().astype(bfloat16))
    return np.asarray(x.detach().numpy())


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out (N, H, D) and lse (H, N) of one sequence as flash-attention's text has it."""
    (Nq, H, _), (Nk, Hkv, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(H // Hkv, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (softmax_scale or D**-0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(Nq)[:, None] + Nk - Nq - torch.arange(Nk)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * distance.abs()
    left, right = window_size
    hidden = (distance < 0) if causal else torch.zeros(Nq, Nk, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (distance < -right)
    weights = s.masked_fill(hidden, -torch.inf).exp()  # scores of 16 columns do not overflow
    total = weights.sum(-1)
    alone = total == 0
    total = total + alone
    out = torch.einsum("hij,jhd->ihd", weights / total[..., None], v)
    return out, total.log().masked_fill(alone, -torch.inf)


def for_nattn(options: dict[str, Any]) -> dict[str, Any]:
    names = {"softmax_scale": "scale"}
    given = {names.get(name, name): x for name, x in options.items()}
    slopes = given.get("alibi_slopes")
    return given if slopes is None else {**given, "alibi_slopes": array(slopes)}


def check(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slack: float = 1.0,
    **options: Any,
) -> None:
    """Assert that a result of one sequence is as near to the dense one as rounding allows."""
    t = truth(*(array(x)[None] for x in (q, k, v)), layout="bnhd", **for_nattn(options))
    exact, exact_lse = dense(*(x.detach().double() for x in (q, k, v)), **options)
    got = np.asarray(array(out), np.float64).transpose(1, 0, 2)[None]
    assert_near(got, array(exact).transpose(1, 0, 2)[None], slack * t.stored_budget())
    assert_near(array(lse)[None], array(exact_lse)[None], slack * t.budget.lse)


SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0], [0.0, 1.0, 0.5, 2.0]])

OPTIONS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((33, 70), {}),
    "causal, fewer queries": ((33, 70), {"causal": True}),
    "causal, rows without keys": ((70, 33), {"causal": True}),
    "window": ((40, 60), {"window_size": (7, 3)}),
    "causal window": ((40, 60), {"window_size": (9, -1), "causal": True, "softmax_scale": 0.4}),
    "softcap, alibi": ((33, 70), {"softcap": 2.0, "alibi_slopes": SLOPES}),
    "softcap, alibi of heads": (
        (70, 70),
        {"softcap": 2.0, "alibi_slopes": SLOPES[0], "causal": True},
    ),
}


def of_item(options: dict[str, Any], b: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    return (
        {**options, "alibi_slopes": slopes[b]}
        if slopes is not None and slopes.ndim == 2
        else options
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_arrays(name: str) -> None:
    (Nq, Nk), options = OPTIONS[name]
    q, k, v = (x.requires_grad_() for x in qkv(2, Nq, Nk))
    out, lse, probs = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert probs is None
    assert (out.shape, lse.shape) == ((2, Nq, HQ, D), (2, HQ, Nq))
    plain = fa.flash_attn_func(*(x.detach() for x in (q, k, v)), **options)
    assert torch.equal(plain, out)
    dout, dlse = normal(*out.shape, seed=5), normal(*lse.shape, seed=6)
    seen = lse.isfinite()
    torch.autograd.backward((out, lse), (dout, dlse * seen))
    for b in range(2):
        own = of_item(options, b)
        check(out[b], lse[b], q[b], k[b], v[b], **own)
        leaves = [x[b].detach().double().requires_grad_() for x in (q, k, v)]
        exact, exact_lse = dense(*leaves, **own)
        exact_lse = exact_lse.masked_fill(~seen[b], 0.0)
        torch.autograd.backward((exact, exact_lse), (dout[b].double(), (dlse * seen)[b].double()))
        arrays = (array(x[b : b + 1]) for x in (q, k, v, dout, dlse * seen))
        t = gradient_truth(*arrays, layout="bnhd", **for_nattn(own))
        for what, x, leaf in zip("qkv", (q, k, v), leaves, strict=True):
            assert_near(array(x.grad[b])[None], array(leaf.grad)[None], t.budget[what])


def test_bfloat16() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 33, 70, dtype=torch.bfloat16))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    check(out[0], lse[0], q[0], k[0], v[0], causal=True)
    dout = normal(*out.shape, dtype=torch.bfloat16, seed=5)
    out.backward(dout)
    t = gradient_truth(*map(array, (q, k, v, dout)), layout="bnhd", causal=True)
    for what, x in zip("qkv", (q, k, v), strict=True):
        assert_near(array(x.grad).astype(np.float64), t.gradients[what], t.budget[what])


def test_one_tensor_of_several() -> None:
    qkv_ = normal(2, 40, 3, HQ, D).requires_grad_()
    q, k, v = (qkv_[:, :, n].detach().requires_grad_() for n in range(3))
    expected = fa.flash_attn_func(q, k, v, causal=True)
    expected.sum().backward()
    out = fa.flash_attn_qkvpacked_func(qkv_, causal=True)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(qkv_.grad, torch.stack([q.grad, k.grad, v.grad], 2))
    out = fa.flash_attn_kvpacked_func(q, qkv_[:, :, 1:], causal=True)
    assert torch.equal(out, expected)
    cu = torch.tensor([0, 15, 40], dtype=torch.int32)
    packed = fa.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 25, 25, causal=True)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv_[0], cu, 25, causal=True)
    assert torch.equal(out, packed)
    out = fa.flash_attn_varlen_kvpacked_func(q[0], qkv_[0, :, 1:], cu, cu, 25, 25, causal=True)
    assert torch.equal(out, packed)


LENS = [5, 0, 40, 1], [9, 4, 33, 0]


def cumulative(lens: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (4, 2)},
        {"softcap": 2.0, "alibi_slopes": SLOPES.repeat(2, 1), "softmax_scale": 0.3},
    ],
)
def test_packed_sequences_are_as_alone(options: dict[str, Any]) -> None:
    q_lens, k_lens = LENS
    q, k, v = (x[0].requires_grad_() for x in qkv(1, sum(q_lens), sum(k_lens)))
    cu = cumulative(q_lens), cumulative(k_lens), max(q_lens), max(k_lens)
    out, lse, probs = fa.flash_attn_varlen_func(q, k, v, *cu, return_attn_probs=True, **options)
    assert probs is None
    assert (out.shape, lse.shape) == ((sum(q_lens), HQ, D), (HQ, sum(q_lens)))
    plain = fa.flash_attn_varlen_func(*(x.detach() for x in (q, k, v)), *cu, **options)
    assert torch.equal(plain, out)
    dout = normal(*out.shape, seed=5)
    dlse = normal(*lse.shape, seed=6) * lse.isfinite()
    torch.autograd.backward((out, lse), (dout, dlse))
    for b in range(4):
        rows, keys = (slice(c[b], c[b + 1]) for c in cu[:2])
        alone = [x.detach()[None].requires_grad_() for x in (q[rows], k[keys], v[keys])]
        one, its_lse, _ = fa.flash_attn_func(*alone, return_attn_probs=True, **of_item(options, b))
        assert torch.equal(one[0], out[rows])
        assert torch.equal(its_lse[0], lse[:, rows])
        torch.autograd.backward((one, its_lse), (dout[None, rows], dlse[None, :, rows]))
        for x, y, at in zip((q, k, v), alone, (rows, keys, keys), strict=True):
            assert torch.equal(y.grad[0], x.grad[at])


def test_packed_keys_in_pages() -> None:
    q_lens, k_lens = LENS
    q, k, v = (x[0].requires_grad_() for x in qkv(1, sum(q_lens), sum(k_lens)))
    cu = cumulative(q_lens), cumulative(k_lens), max(q_lens), max(k_lens)
    size, table = 8, torch.full((4, 5), -7, dtype=torch.int32)
    pools = [normal(12, size, HKV, D, seed=9) for _ in "kv"]
    free = iter([3, 11, 0, 5, 1, 2, 7, 4, 10])
    for b, n in enumerate(k_lens):
        for first in range(0, n, size):
            table[b, first // size] = page = next(free)
            rows = slice(int(cu[1][b]) + first, int(cu[1][b]) + min(first + size, n))
            for pool, x in zip(pools, (k, v), strict=True):
                pool[page, : rows.stop - rows.start] = x.detach()[rows]
    expected = fa.flash_attn_varlen_func(q, k, v, *cu, causal=True)
    expected.sum().backward()
    pools = [pool.requires_grad_() for pool in pools]
    out = fa.flash_attn_varlen_func(q, *pools, *cu, causal=True, block_table=table)
    assert torch.equal(out, expected)
    out.sum().backward()  # and pages get theirs
    assert torch.equal(pools[0].grad[table[2, 1], :size], k.grad[13 + size : 13 + 2 * size])


def test_dropout_follows_the_seed_of_torch() -> None:
    q, k, v = qkv(1, 40, 40)
    cu = cumulative([15, 25])
    calls: list[Callable[[], Tensor]] = [
        lambda: fa.flash_attn_func(q, k, v, 0.5),
        lambda: fa.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 25, 25, 0.5),
    ]
    for call in calls:
        torch.manual_seed(1)
        one, other = call(), call()
        assert not torch.equal(one, other)
        torch.manual_seed(1)
        assert torch.equal(call(), one)
    torch.manual_seed(1)
    ones = torch.ones_like(v)
    kept = torch.stack([fa.flash_attn_func(q, k, ones, 0.5) for _ in range(20)])
    assert abs(float(kept.mean()) - 1.0) < 0.05


def test_what_was_changed_meanwhile_is_told() -> None:
    q, k, v = (x[0] for x in qkv(1, 20, 20))
    cu = cumulative([20])
    leaf = q.requires_grad_()
    out = fa.flash_attn_varlen_func(leaf * 1, k, v, cu, cu, 20, 20)
    k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_compiled() -> None:
    q, k, v = (x[0].requires_grad_() for x in qkv(1, 20, 20))
    cu = cumulative([5, 15])

    def call(*qkv: Tensor) -> Tensor:
        q, k, v = (2 * x for x in qkv)
        one = fa.flash_attn_func(q[None], k[None], v[None], causal=True)[0]
        other = fa.flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, causal=True)
        q, k, v = (x.detach()[None] for x in (q, k, v))
        rest = fa.flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=20, causal=True)
        return one + 3 * other + 5 * rest[0]

    call(q, k, v).sum().backward()
    expected = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        out = torch.compile(call, backend="aot_eager")(q, k, v)
        out.sum().backward()
    torch.testing.assert_close(out, call(q, k, v))
    torch.testing.assert_close([x.grad for x in (q, k, v)], expected)


# Caches


@pytest.mark.parametrize("causal", [False, True])
def test_cache_is_added_to_in_place(causal: bool) -> None:
    q, k, v = qkv(2, 5, 5)
    caches = [normal(3, 50, HKV, D, seed=n) for n in (7, 8)]
    olds = [x.clone() for x in caches]
    lens = torch.tensor([30, 0], dtype=torch.int32)
    out, lse = fa.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=lens,
        causal=causal,
        num_splits=3,
        return_softmax_lse=True,
    )
    for new, x, old in zip(caches, (k, v), olds, strict=True):
        for b, n in enumerate(lens.tolist()):
            old[b, n : n + 5] = x[b]
        assert torch.equal(new, old)
    for b, n in enumerate(lens.tolist()):
        check(out[b], lse[b], q[b], *(x[b, : n + 5] for x in caches), causal=causal)


def test_lengths_of_a_cache() -> None:
    q, _, _ = qkv(2, 1, 1)
    caches = [normal(2, 50, HKV, D, seed=n) for n in (7, 8)]
    full = fa.flash_attn_with_kvcache(q, *caches)
    assert torch.equal(full, fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=50))
    out, lse = fa.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=20, window_size=(6, 0), softcap=2.0, return_softmax_lse=True
    )
    for b in range(2):
        ours = (x[b, :20] for x in caches)
        check(out[b], lse[b], q[b], *ours, window_size=(6, 0), softcap=2.0)


def test_items_of_a_cache() -> None:
    q, k, v = qkv(2, 3, 3)
    caches = [normal(5, 40, HKV, D, seed=n) for n in (7, 8)]
    others = [x[[0, 2, 4]].clone() for x in caches]
    lens, items = torch.tensor([30, 11]), torch.tensor([3, 1], dtype=torch.int32)
    out, lse = fa.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=lens,
        cache_batch_idx=items,
        causal=True,
        return_softmax_lse=True,
    )
    for x, old, new in zip(caches, others, (k, v), strict=True):
        assert torch.equal(x[[0, 2, 4]], old)
        assert torch.equal(x[3, 30:33], new[0])
        assert torch.equal(x[1, 11:14], new[1])
    for b, (item, n) in enumerate(((3, 33), (1, 14))):
        check(out[b], lse[b], q[b], *(x[item, :n] for x in caches), causal=True)


def test_cache_in_pages() -> None:
    q, k, v = qkv(2, 1, 1)
    pools = [normal(9, 8, HKV, D, seed=n) for n in (7, 8)]
    table = torch.tensor([[4, 0, 7, -1], [2, 8, -1, -1]], dtype=torch.int32)
    lens = torch.tensor([20, 8], dtype=torch.int32)
    out, lse = fa.flash_attn_with_kvcache(
        q, *pools, k, v, cache_seqlens=lens, block_table=table, return_softmax_lse=True
    )
    for b, (pages, n) in enumerate((([4, 0, 7], 20), ([2, 8], 8))):
        whole = [x[pages].flatten(0, 1)[: n + 1] for x in pools]
        assert torch.equal(whole[0][n], k[b, 0])
        assert torch.equal(whole[1][n], v[b, 0])
        check(out[b], lse[b], q[b], *whole)


def test_padding_on_the_left() -> None:
    q, k, v = qkv(2, 4, 4)
    caches = [normal(2, 50, HKV, D, seed=n) for n in (7, 8)]
    lens, padding = torch.tensor([30, 12]), torch.tensor([10, 0])
    options: dict[str, Any] = {"causal": True, "window_size": (8, 0)}
    out, lse = fa.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=lens,
        cache_leftpad=padding,
        return_softmax_lse=True,
        **options,
    )
    for b in range(2):
        ours = (x[b, padding[b] : lens[b] + 4] for x in caches)
        check(out[b], lse[b], q[b], *ours, **options)


def turned(x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn ``(N, H, D)`` as complex numbers in float64."""
    n = cos.shape[1]
    factors = torch.complex(cos.double(), sin.double())[at][:, None]
    x = x.double()
    columns = [torch.arange(n), torch.arange(n) + n]
    if interleaved:
        columns = [2 * columns[0], 2 * columns[0] + 1]
    z = torch.complex(x[..., columns[0]], x[..., columns[1]]) * factors
    new = x.clone()
    new[..., columns[0]], new[..., columns[1]] = z.real, z.imag
    return new.float()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved: bool, causal: bool) -> None:
    q, k, v = qkv(2, 3, 4)  # fewer queries than new keys
    caches = [normal(2, 50, HKV, D, seed=n) for n in (7, 8)]
    lens = torch.tensor([30, 12])
    angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])  # half the columns
    tables = angles.cos(), angles.sin()
    out, lse = fa.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        *tables,
        lens,
        causal=causal,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
    )
    for b, n in enumerate(lens.tolist()):
        expected = turned(k[b], torch.arange(n, n + 4), *tables, interleaved)
        got = caches[0][b, n : n + 4]
        assert_near(array(got), array(expected), 2.0**-22 * float(k.abs().max()))
        assert torch.equal(got[..., 8:], k[b, ..., 8:])
        at = n + torch.arange(3) if causal else torch.full((3,), n)
        own = turned(q[b], at, *tables, interleaved)
        # slack for a query that was rounded differently
        check(out[b], lse[b], own, *(x[b, : n + 4] for x in caches), causal=causal, slack=2.0)


def test_after_an_error_the_cache_is_as_it_was() -> None:
    q, k, v = qkv(2, 1, 1)
    caches = [normal(2, 20, HKV, D, seed=n) for n in (7, 8)]
    olds = [x.clone() for x in caches]
    with pytest.raises(ValueError, match="20 of 20 keys already"):
        fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([3, 20]))
    assert all(map(torch.equal, caches, olds))


# What is passed


def bad(match: str, error: type[Exception] = ValueError, **changed: Any) -> Any:
    return pytest.param(match, error, changed, id=match)


@pytest.mark.parametrize(
    ("match", "error", "changed"),
    [
        bad("q: expected a tensor", TypeError, q=np.zeros((1, 3, HQ, D), np.float32)),
        bad(r"k: expected shape \(B, N, H, D\), got \(3, 2, 16\)", k=torch.zeros(3, HKV, D)),
        bad("window_size: expected a pair", window_size=(3,)),
        bad("softcap: expected", softcap=-1.0),
        bad("alibi_slopes: expected", alibi_slopes=torch.zeros(3)),
        bad("dropout_p: expected", dropout_p=1.5),
        bad("deterministic: expected True or False", TypeError, deterministic=1),
        bad("return_attn_probs: expected True or False", TypeError, return_attn_probs="no"),
    ],
)
def test_bad_arrays(match: str, error: type[Exception], changed: dict[str, Any]) -> None:
    q, k, v = qkv(1, 3, 3)
    with pytest.raises(error, match=match):
        fa.flash_attn_func(**{"q": q, "k": k, "v": v, **changed})


@pytest.mark.parametrize(
    ("match", "error", "changed"),
    [
        bad("max_seqlen_q: expected at least 25", max_seqlen_q=24),
        bad("max_seqlen_k: expected an integer", TypeError, max_seqlen_k=25.0),
        bad("cu_seqlens_k: expected", cu_seqlens_k=torch.tensor([0, 41, 40]), max_seqlen_k=41),
        bad("q: expected shape", q=torch.zeros(1, 40, HQ, D)),
        bad("k: expected shape", block_table=torch.zeros(2, 1)),
    ],
)
def test_bad_packed(match: str, error: type[Exception], changed: dict[str, Any]) -> None:
    q, k, v = (x[0] for x in qkv(1, 40, 40))
    cu = cumulative([15, 25])
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    with pytest.raises(error, match=match):
        fa.flash_attn_varlen_func(**{**given, "max_seqlen_q": 25, "max_seqlen_k": 25, **changed})


@pytest.mark.parametrize(
    ("match", "error", "changed"),
    [
        bad("expected pages from 0 to 4, got 5", block_table=torch.tensor([[0], [5]])),
        bad("cu_seqlens_k: expected lengths from 0 to 30", block_table=torch.zeros(2, 1).int()),
        bad("block_table: expected shape", block_table=torch.zeros(3, 2).int()),
        bad("block_table: expected integers", TypeError, block_table=torch.zeros(2, 2)),
        bad("v: expected shape", v=torch.zeros(5, 20, HKV, D)),
    ],
)
def test_bad_pages(match: str, error: type[Exception], changed: dict[str, Any]) -> None:
    q, k, v = qkv(5, 8, 30)
    lens = [25, 31] if "from 0 to 30" in match else [15, 25]
    cu = cumulative(lens)
    given = {"q": q.flatten(0, 1), "k": k, "v": v, "cu_seqlens_q": cumulative([15, 25])}
    given |= {"cu_seqlens_k": cu, "max_seqlen_q": 25, "max_seqlen_k": 31}
    given |= {"block_table": torch.tensor([[0], [1]])}
    with pytest.raises(error, match=match):
        fa.flash_attn_varlen_func(**{**given, **changed})


COS = torch.ones(100, 4)


@pytest.mark.parametrize(
    ("match", "error", "changed"),
    [
        bad("v: expected new keys and values", v=None),
        bad("cache_seqlens: expected lengths beside k", cache_seqlens=None),
        bad("cache_seqlens: expected lengths from 0 to 20", cache_seqlens=21),
        bad("cache_batch_idx: expected items from 0 to 1", cache_batch_idx=torch.tensor([0, 2])),
        bad("cache_batch_idx: expected each item once", cache_batch_idx=torch.tensor([1, 1])),
        bad(
            "cache_batch_idx: expected None beside block_table",
            cache_batch_idx=torch.tensor([0, 1]),
            block_table=torch.tensor([[0], [1]]),
        ),
        bad("cache_leftpad: expected lengths", cache_leftpad=torch.tensor([0, 30])),
        bad("rotary_sin: expected a tensor", TypeError, rotary_cos=COS),
        bad("rotary_sin: expected shape", rotary_cos=COS, rotary_sin=COS[1:]),
        bad("rotary_cos: expected at most 8 columns", rotary_cos=COS[:, :1].repeat(1, 9)),
        bad("rotary_cos: expected at least 11 positions", rotary_cos=COS[:9], rotary_sin=COS[:9]),
        bad("rotary_cos: expected new keys", rotary_cos=COS, k=None, v=None),
        bad("num_splits: expected", num_splits=-1),
        bad("k_cache: expected dtype", TypeError, k_cache=torch.zeros(2, 20, HKV, D).half()),
        bad(r"k: expected shape \(2, N, H, D\)", k=torch.zeros(1, 1, HKV, D)),
    ],
)
def test_bad_caches(match: str, error: type[Exception], changed: dict[str, Any]) -> None:
    q, k, v = qkv(2, 1, 1)
    given = {"q": q, "k_cache": torch.zeros(2, 20, HKV, D), "v_cache": torch.zeros(2, 20, HKV, D)}
    given |= {"k": k, "v": v, "cache_seqlens": 10}
    if "8 columns" in match:
        changed = {**changed, "rotary_sin": changed["rotary_cos"]}
    with pytest.raises(error, match=match):
        fa.flash_attn_with_kvcache(**{**given, **changed})


TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}, block_table=None"
    ),
    "flash_attn_varlen_kvpacked_func": (
        f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}"
    ),
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found = inspect.signature(getattr(fa, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert ", ".join(map(str, bare)) == SIGNATURES[name]


# Modules


def test_padding_and_back() -> None:
    padding: Any = importlib.import_module("nattn.integrations.flash_attn.padding")
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    x = normal(3, 3, 2, 4).requires_grad_()
    rows, indices, cu, most, used = padding.unpad_input(x, mask)
    assert (cu.tolist(), most, used.tolist()) == ([0, 2, 2, 4], 2, [2, 0, 2])
    assert (cu.dtype, used.dtype) == (torch.int32, torch.int32)
    assert torch.equal(rows, x[mask.bool()])
    back = padding.pad_input(rows, indices, 3, 3)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())
    unused = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 0]])
    _, _, cu, most, used = padding.unpad_input(x, mask, unused)
    assert (cu.tolist(), most, used.tolist()) == ([0, 3, 3, 5], 3, [2, 0, 2])


INSTALLED = """
import importlib.util, sys
import nattn.integrations.flash_attn as ours
assert "flash_attn" not in sys.modules
ours.uninstall()
ours.install()
ours.install()
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
import flash_attn.flash_attn_interface as interface
assert flash_attn_func is ours.flash_attn_func is interface.flash_attn_func
assert flash_attn.bert_padding.pad_input is pad_input
assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 3, 3)
assert importlib.util.find_spec("flash_attn").name == "flash_attn"
assert importlib.util.find_spec("flash_attn.bert_padding") is not None
assert importlib.util.find_spec("flash_attn.layers") is None
ours.uninstall()
assert not [x for x in sys.modules if x.split(".")[0] == "flash_attn"]
try:
    import flash_attn
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
"""

REFUSED = """
import sys
import nattn.integrations.flash_attn as ours
for _ in range(2):
    try:
        ours.install()
    except RuntimeError as error:
        assert "flash_attn: expected none beside" in str(error)
    else:
        raise AssertionError
    import flash_attn  # now it is imported, not only there
    assert flash_attn.REAL
    ours.uninstall()
    assert sys.modules["flash_attn"] is flash_attn
"""


def run(code: str, **environment: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, env=children.environment(**environment), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="the real flash_attn is installed"
)
def test_install() -> None:
    run(INSTALLED)


def test_the_real_one_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("REAL = True\n")
    path = children.environment()["PYTHONPATH"]
    run(REFUSED, PYTHONPATH=f"{tmp_path}{os.pathsep}{path}")
