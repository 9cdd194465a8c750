"""Gradients of what a score_mod is bound to: arrays and numbers, read in any way that lanes can."""

from __future__ import annotations

import doctest
import functools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import gradient_truth
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import nattn
from nattn.backends.cpu import jobs, launch_backward
from nattn.backends.error_budget import sum_budget
from nattn.functions import learning
from nattn.functions.binding import SCORE_MOD, Combination, resolve
from nattn.functions.on_arrays import ArrayFunction

Array = NDArray[Any]
Mod = Callable[..., Any]

B, H, Hkv, Nq, Nk, D = 2, 4, 2, 21, 37, 8
RNG = np.random.default_rng(0)
REACH = Nq + Nk

# Functions, and what they are bound to. Positions of queries end at Nk - 1, those of keys too.


def rel(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, i - j + REACH]


def behind(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, j - i + REACH]


def clipped(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[np.clip(j - i, -5, 5) + 5]


def weighted(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return s + np.log1p(np.exp(w[j]))


def by_item(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return s + w[b, j] * w[b, i]


def from_the_end(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return s + w[-1 - j]


def within_where(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return np.where((i + j) % 3 == 0, s + w[j], s - w[i % 7] * 0.5)


def rows_of_rows(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, kinds: Any) -> Any:
    return s + table[kinds[i], kinds[j]]


def repeated(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return s + w[i // 4 % 3] + w[j // 5 % 3] * w[0]


def scattered(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return s + w[(i * 7 + j * 3) % 11]


def bilinear(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    total = s
    for n in range(3):
        total = total + w[n, h] * np.cos(0.3 * n * (i - j))
    return total


def hiding(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return np.where(j % 5 == 2, -np.inf, s + w[j])


def capped(s: Any, b: Any, h: Any, i: Any, j: Any, cap: Any) -> Any:
    return cap * np.tanh(s / cap)


def decaying(s: Any, b: Any, h: Any, i: Any, j: Any, rate: Any) -> Any:
    return s - rate * np.sqrt(abs(i - j))


def gated(s: Any, b: Any, h: Any, i: Any, j: Any, gain: Any, floor: Any) -> Any:
    return np.maximum(s * gain, floor)


def unused(s: Any, b: Any, h: Any, i: Any, j: Any, w: Any) -> Any:
    return s * 1.0


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape)


CASES: dict[str, Mod] = {
    "rel": functools.partial(rel, table=normal(H, 2 * REACH)),
    "behind": functools.partial(behind, table=normal(2 * REACH, H).T),
    "clipped": functools.partial(clipped, table=normal(11)),
    "scaled": functools.partial(nattn.mods.logit_scale, scale=RNG.random(H) + 0.5),
    "weighted": functools.partial(weighted, w=normal(Nk)),
    "by item": functools.partial(by_item, w=normal(B, Nk)),
    "from the end": functools.partial(from_the_end, w=normal(Nk + 3)[::-1]),
    "within where": functools.partial(within_where, w=normal(Nk)),
    "rows of rows": functools.partial(
        rows_of_rows, table=normal(3, 3), kinds=RNG.integers(-3, 3, Nk)
    ),
    "repeated": functools.partial(repeated, w=normal(3)),
    "scattered": functools.partial(scattered, w=normal(11)),
    "bilinear": functools.partial(bilinear, w=normal(3, H)),
    "hiding": functools.partial(hiding, w=normal(Nk)),
    "kerple log": functools.partial(
        nattn.mods.kerple_log, r1=RNG.random(H) + 0.1, r2=RNG.random(H) + 0.1
    ),
    "kerple power": functools.partial(
        nattn.mods.kerple_power, r1=RNG.random(H) + 0.1, r2=RNG.random(H) * 0.5 + 0.1
    ),
    # Each unit is on for some pairs only, and the threshold is no position: there the slope jumps.
    "fire": functools.partial(
        nattn.mods.fire,
        c=0.7,
        threshold=20.5,
        w1=np.array([1.5, -1.2, 0.9]),
        b1=np.array([-0.6, 0.7, -0.4]),
        w2=normal(H, 3),
        b2=normal(H),
    ),
    "forgetting": functools.partial(
        nattn.mods.forget_gates, cumulative=-np.cumsum(RNG.random((B, H, Nk)), axis=2)
    ),
    "swin": functools.partial(nattn.mods.relative_position_bias_2d, table=normal(H, 11, 15)),
    "tupe": functools.partial(
        nattn.mods.untied_positions, p_q=normal(H, Nk, 2), p_k=normal(H, Nk, 2), scale=0.6
    ),
    "token weights": functools.partial(nattn.mods.token_weights, log_weights=normal(B, Nk)),
    "shaw": functools.partial(nattn.mods.relative_position_bias, table=normal(H, 15), reach=7),
    "capped": functools.partial(capped, cap=2.5),
    "decaying": functools.partial(decaying, rate=np.float64(0.3)),
    "gated": functools.partial(gated, gain=np.array(1.2), floor=-0.4),
    "softcap": functools.partial(nattn.mods.softcap, cap=3.0),
    "alibi": functools.partial(nattn.mods.alibi, slopes=RNG.random((B, H))),
    "soft window": functools.partial(nattn.mods.soft_window, width=6.3, softness=1.5),
    "gaussian": functools.partial(nattn.mods.gaussian_window, sigma=9.0),
    "span": functools.partial(nattn.mods.adaptive_span, span=RNG.random(H) * 9, ramp=6.0),
    "t5": nattn.mods.t5_bias(normal(8, H), max_distance=20),
    "composed": nattn.mods.compose(
        functools.partial(nattn.mods.logit_scale, scale=RNG.random(H) + 0.5),
        functools.partial(capped, cap=2.0),
        functools.partial(weighted, w=normal(Nk)),
    ),
    "unused": functools.partial(unused, w=normal(3)),
}


def floats(mod: Mod) -> dict[str, Any]:
    """Return the floats that a function, or one of a composition, is bound to, by name."""
    parts = mod.parts if isinstance(mod, Combination) else (mod,)
    bound = [(x, y) for part in parts for x, y in part.keywords.items()]  # type: ignore[attr-defined]
    return {f"score_mod.{x}": y for x, y in bound if np.asarray(y).dtype.kind == "f"}


def rebound(mod: Mod, name: str, value: Any) -> Mod:
    """Return the same functions, one of their parameters bound to something else."""
    if isinstance(mod, Combination):
        return nattn.mods.compose(*(rebound(x, name, value) for x in mod.parts))
    own = name.removeprefix("score_mod.")
    keywords = mod.keywords  # type: ignore[attr-defined]
    if own not in keywords:
        return mod
    return functools.partial(mod.func, **{**keywords, own: value})  # type: ignore[attr-defined]


def inputs(dtype: Any = np.float64) -> tuple[Array, ...]:
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, B, H, Nq, D)).astype(dtype)
    k, v = rng.standard_normal((2, B, Hkv, Nk, D)).astype(dtype)
    return q, k, v, dout


def gradients(mod: Mod, backend: str, dtype: Any = np.float64, **args: Any) -> Any:
    """Return the gradients of everything that a function is bound to."""
    q, k, v, dout = inputs(dtype)
    args = args | {"score_mod": mod}
    out, lse = nattn.attention(q, k, v, return_lse=True, backend="reference", **args)
    wrt = tuple(floats(mod))
    return nattn.attention_backward(dout, q, k, v, out, lse, wrt=wrt, backend=backend, **args)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_has_the_gradient_of_finite_differences(case: str) -> None:
    mod = CASES[case]
    q, k, v, dout = inputs()
    found = gradients(mod, "reference").dmods
    assert list(found) == list(floats(mod))
    for name, value in floats(mod).items():
        assert found[name].shape == np.shape(value)
        step = np.random.default_rng(2).standard_normal(np.shape(value))
        h = 3e-6

        def loss(t: float, name: str = name, value: Any = value, step: Any = step) -> float:
            moved = rebound(mod, name, value + t * step)
            out = nattn.attention(q, k, v, score_mod=moved, backend="reference")
            return float((out * dout).sum())

        slope = (loss(h) - loss(-h)) / (2 * h)
        size = np.abs(found[name] * step).sum()
        assert abs((found[name] * step).sum() - slope) <= 1e-6 * max(size, 1e-3)
        assert case == "unused" or size > 0.0


EXTRAS: dict[str, Any] = {
    "causal": True,
    "window_size": (20, 0),
    "dropout_p": 0.2,
    "seed": 3,
    "kv_lens": [Nk, 25],
    "q_lens": [Nq, 13],
    "softcap": 5.0,
    "alibi_slopes": np.array([0.25, 0.5, 0.1, 0.0]),
    "sinks": np.zeros(H),
    "mask_mod": nattn.masks.causal,
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_give_what_the_reference_gives(case: str) -> None:
    for args in ({}, EXTRAS):
        got, expected = (gradients(CASES[case], x, **args).dmods for x in ("cpu", "reference"))
        for name, x in expected.items():
            error = np.abs(got[name] - x).max(initial=0.0)
            assert error <= 1e-12 * (1.0 + np.abs(x).max(initial=0.0)), name


def readings(mod: Mod, p: Any, b: int, h: int) -> Any:
    """Yield slopes and places of what one head reads of the only value of a function."""
    pos = np.arange(Nq)[:, None] + p.q_offset[b]
    (name,) = floats(mod)
    f = ArrayFunction("score_mod", p.score_mods[0], p.compute, p.place_of(name))
    s = p.scale * (p.q[b, h].astype(np.float64) @ p.k[b, h // p.group].astype(np.float64).T)
    yield from f.readings(s, np.full((1, 1), b), np.full((1, 1), h), pos, np.arange(Nk)[None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["rel", "behind", "scaled", "weighted", "scattered", "clipped"])
def test_errors_stay_within_their_budget(case: str, dtype: str) -> None:
    """That of the gradient of each score, as of a bias of 0, times what the score depends on."""
    mod = CASES[case]
    (name,) = floats(mod)
    own = np.float32
    if dtype == "bfloat16":
        own = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v, dout = inputs(own)
    bias = np.zeros((B, H, Nq, Nk), np.float32)
    t = gradient_truth(q, k, v, dout, score_mod=mod, bias=bias)
    _, vjp = nattn.attention_vjp(q, k, v, score_mod=mod)
    got = vjp(dout, wrt=(name,)).dmods[name]
    sums = np.zeros((4, *got.shape))  # the gradient, errors and sizes of terms, their number
    u = 2.0**-24
    for b, h in np.ndindex(B, H):
        ds, error = t.gradients["bias"][b, h], t.budget["bias"][b, h]
        for slope, index in readings(mod, t.problem, b, h):
            slope = np.broadcast_to(slope, ds.shape)
            # the slope is of a few operations on a score that has an error of its own
            own_error = (16 + 4 * D) * u * np.abs(slope) * (np.abs(ds) + error)
            terms = slope * ds, np.abs(slope) * error + own_error, np.abs(slope * ds), 1.0
            where = tuple(np.broadcast_to(x, ds.shape) for x in index)
            for total, term in zip(sums, terms, strict=True):
                np.add.at(total, where, term)
    budget = sum_budget(np.dtype(np.float32), *sums[1:])
    assert np.all(np.abs(got - sums[0]) <= budget)
    assert budget.max() <= (1e-3 if dtype == "float32" else 1.0) * sums[2].max()


def test_it_is_one_pass_for_all_and_what_else_is_wanted_has_the_same_bits() -> None:
    mod = CASES["composed"]
    q, k, v, dout = inputs(np.float32)
    _, vjp = nattn.attention_vjp(q, k, v, score_mod=mod, alibi_slopes=np.ones(H, np.float32))
    names = tuple(floats(mod))
    every = vjp(dout, wrt=("k", names[2], "alibi_slopes", names[0], "q", names[1], "v"))
    plain = vjp(dout)
    for x in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(every, x), getattr(plain, x))
    assert plain.dmods is None
    assert list(every.dmods) == [names[2], names[0], names[1]]
    for name in names:
        alone = vjp(dout, wrt=(name,)).dmods[name]
        np.testing.assert_array_equal(every.dmods[name], alone)
    np.testing.assert_array_equal(every.dalibi_slopes, vjp(dout, wrt=["alibi_slopes"])[5])


@pytest.mark.parametrize("case", ["rel", "scaled", "scattered"])
def test_threads_change_no_bit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TINY", 0.0)  # for several threads to take part at all
    rng = np.random.default_rng(5)
    q, k, v, dout = rng.standard_normal((4, 2, 4, 300, 8), dtype=np.float32)

    def rel_(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s + table[h, i - j + 300]

    mods: dict[str, Mod] = {
        "rel": functools.partial(rel_, table=normal(4, 601).astype("f4")),
        "scaled": CASES["scaled"],
        "scattered": CASES["scattered"],
    }
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(jobs, "thread_count", lambda threads=threads: threads)
        _, vjp = nattn.attention_vjp(q, k, v, score_mod=mods[case])
        found.append(vjp(dout, wrt=tuple(floats(mods[case]))).dmods)
    for other in found[1:]:
        for name, x in found[0].items():
            np.testing.assert_array_equal(other[name], x)


def test_memory_is_bounded_and_runs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a few tasks at a time, or for one, the sums are those of all at once."""
    mod = CASES["rel"]
    whole = gradients(mod, "cpu").dmods["score_mod.table"]
    n_bytes = whole.nbytes
    for room in (3 * n_bytes, n_bytes, 1):
        monkeypatch.setattr(launch_backward, "MOST_PARTIALS", room)
        got = gradients(mod, "cpu").dmods["score_mod.table"]
        np.testing.assert_allclose(got, whole, rtol=0, atol=1e-12)

    monkeypatch.undo()
    N = 4096

    def far(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s + table[h, i - j + N]

    q, k, v = np.random.default_rng(6).standard_normal((3, 1, N, 8), dtype=np.float32)
    table = np.zeros((1, 2 * N), np.float32)
    args: Any = {"score_mod": functools.partial(far, table=table), "causal": True}
    out, lse = nattn.attention(q, k, v, return_lse=True, **args)
    rest: Any = (out, q, k, v, out, lse)
    nattn.attention_backward(*rest, wrt=["score_mod.table"], **args)  # compiles
    tracemalloc.start()
    try:
        nattn.attention_backward(*rest, wrt=["score_mod.table"], **args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < N * N // 8  # bytes: a matrix of bits would take as much


DTYPES = ["float16", "float32", "float64", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_has_the_dtype_of_its_array(dtype: str) -> None:
    own = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    w = normal(Nk).astype(own)
    if dtype == "bfloat16":  # which functions cannot be bound to, but in memory as float32
        w = w.astype(np.float32)
    q, k, v, dout = inputs(np.float32)
    mod = functools.partial(weighted, w=w)
    got = nattn.attention_vjp(q, k, v, score_mod=mod)[1](dout, wrt=["score_mod.w"]).dmods
    assert got["score_mod.w"].dtype == w.dtype
    exact = gradients(functools.partial(weighted, w=w.astype(np.float64)), "reference").dmods
    np.testing.assert_allclose(
        got["score_mod.w"].astype(np.float64), exact["score_mod.w"], rtol=2e-3, atol=1e-4
    )


def test_numbers_have_a_gradient_of_their_own_kind() -> None:
    q, k, v, dout = inputs(np.float32)
    for cap, dtype in (
        (2.5, "float32"),
        (np.float64(2.5), "float64"),
        (np.array(2.5, np.float16), "float16"),
    ):
        mod = functools.partial(capped, cap=cap)
        vjp = nattn.attention_vjp(q, k, v, score_mod=mod)[1]
        found = vjp(dout, wrt=("score_mod.cap",)).dmods["score_mod.cap"]
        assert found.shape == ()
        assert found.dtype == dtype


def test_other_layouts_ranks_and_packed_sequences() -> None:
    mod = CASES["rel"]
    name = "score_mod.table"
    q, k, v, dout = inputs()
    expected = nattn.attention_vjp(q, k, v, score_mod=mod)[1](dout, wrt=[name]).dmods[name]
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v, dout)]
    _, vjp = nattn.attention_vjp(*turned[:3], score_mod=mod, layout="bnhd")
    np.testing.assert_array_equal(vjp(turned[3], wrt=[name]).dmods[name], expected)
    _, vjp = nattn.attention_vjp(q[0], k[0], v[0], score_mod=mod)
    one = vjp(dout[0], wrt=[name]).dmods[name]
    _, vjp = nattn.attention_vjp(q[1], k[1], v[1], score_mod=mod)
    np.testing.assert_allclose(one + vjp(dout[1], wrt=[name]).dmods[name], expected, atol=1e-12)
    pq, pk, pv, pdout = [
        x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], D) for x in (q, k, v, dout)
    ]
    starts = np.arange(B + 1) * Nq, np.arange(B + 1) * Nk
    _, vjp = nattn.attention_varlen_vjp(pq, pk, pv, *starts, score_mod=mod)
    np.testing.assert_allclose(vjp(pdout, wrt=[name]).dmods[name], expected, atol=1e-12)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_sizes_strides_and_masks(data: Any) -> None:
    n_q, n_k = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 90))
    heads = data.draw(st.sampled_from([1, 2, 4]))
    causal = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, dout = rng.standard_normal((2, 2, heads, n_q, 8))
    k, v = rng.standard_normal((2, 2, 1, n_k, 8))
    w = rng.standard_normal(3 * n_k)[:: data.draw(st.sampled_from([1, 2, 3, -1, -2]))]
    args: Any = {
        "score_mod": functools.partial(weighted, w=w),
        "causal": causal,
        "kv_lens": [n_k, data.draw(st.integers(0, n_k))],
        "mask": rng.random((n_q, n_k)) < 0.7,
    }
    found = []
    for backend in ("cpu", "reference"):
        _, vjp = nattn.attention_vjp(q, k, v, backend=backend, **args)
        found.append(vjp(dout, wrt=("score_mod.w",)).dmods["score_mod.w"])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_is_hidden_or_nan_stays_out(backend: str) -> None:
    """Hidden keys, their weights and what a dropped row says: nothing of them reaches a sum."""
    q, k, v, dout = inputs()
    w = normal(Nk)
    expected = None
    for bad in (0.0, np.nan, np.inf):
        k[:, :, 30:], v[:, :, 30:] = bad, bad
        w[31:] = bad
        args: Any = {"score_mod": functools.partial(weighted, w=w), "kv_lens": 30, "q_offset": 9}
        vjp = nattn.attention_vjp(q, k, v, backend=backend, **args)[1]
        got = vjp(dout, wrt=("score_mod.w",)).dmods["score_mod.w"]
        assert np.isfinite(got).all()
        assert not got[30:].any()
        expected = got if expected is None else expected
        np.testing.assert_array_equal(got, expected)
    mask = np.ones(Nk, np.bool_)
    mask[:9] = False
    w[:5] = np.nan
    args |= {"mask": mask, "score_mod": functools.partial(weighted, w=w)}
    got = nattn.attention_vjp(q, k, v, backend=backend, **args)[1](dout, wrt=["score_mod.w"])
    assert np.isfinite(got.dmods["score_mod.w"]).all()
    w[9] = np.nan  # which is visible
    got = nattn.attention_vjp(q, k, v, backend=backend, **args)[1](dout, wrt=["score_mod.w"])
    assert np.isnan(got.dmods["score_mod.w"][9])


def test_t5_learns_beside_what_sees_positions() -> None:
    q, k, v, dout = inputs()
    scheme = nattn.positional.T5Bias(H, 8, 20, dtype=np.float64, seed=4)
    blocks = nattn.BlockMask.from_mask_mod(nattn.masks.causal, B, H, Nq, Nk)
    more: list[dict[str, Any]] = [
        {"mask_mod": nattn.masks.causal},
        {"block_mask": blocks},
        {"alibi_slopes": nattn.alibi_slopes(H)},
    ]
    for args in more:
        args = args | scheme.arguments(Nq, Nk)
        found = []
        for backend in ("cpu", "reference"):
            out, lse = nattn.attention(q, k, v, return_lse=True, backend=backend, **args)
            grads = scheme.backward(dout, q, k, v, out, lse, backend=backend, **args)
            found.append(grads["table"])
        assert np.abs(found[1]).max() > 0.01
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-12)


def constant_gain(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * GAIN


GAIN = 1.5

WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "unknown": (CASES["rel"], "score_mod.tabel", ValueError, "'score_mod.table'; got 'score_mod.t"),
    "integers": (CASES["rows of rows"], "score_mod.kinds", TypeError, "bound to int64"),
    "constant": (constant_gain, "score_mod.GAIN", ValueError, "got 'score_mod.GAIN'"),
    "without": (None, "score_mod.w", ValueError, "no score_mod is bound; got 'score_mod.w'"),
    "mask": (CASES["rel"], "mask_mod.w", ValueError, "what a mask is bound to has no gradient"),
    "ambiguous": (
        nattn.mods.compose(CASES["weighted"], CASES["hiding"]),
        "score_mod.w",
        ValueError,
        "'score_mod.weighted.w', 'score_mod.hiding.w'; got 'score_mod.w'",
    ),
    "same functions": (
        nattn.mods.compose(CASES["weighted"], CASES["weighted"]),
        "score_mod.weighted.w",
        ValueError,
        "'score_mod.0.0', 'score_mod.1.0'; got 'score_mod.weighted.w'",
    ),
    "twice": (CASES["rel"], ("score_mod.table",) * 2, ValueError, "each name once"),
    "aliases": (
        CASES["rel"],
        ("score_mod.rel.table", "score_mod.table"),
        ValueError,
        "one name for each value, got 'score_mod.rel.table' and 'score_mod.table'",
    ),
    "other": (CASES["rel"], "table", ValueError, "wrt: expected a tuple of names among"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_of_nothing_that_learns_are_refused(case: str) -> None:
    mod, wrt, error, text = WRONG[case]
    q, k, v, dout = inputs()
    _, vjp = nattn.attention_vjp(q, k, v, score_mod=mod, backend="reference")
    with pytest.raises(error, match=text):
        vjp(dout, wrt=wrt if isinstance(wrt, tuple) else (wrt,))


def test_each_value_has_a_name_of_its_own() -> None:
    assert doctest.testmod(learning).failed == 0
    mod = nattn.mods.compose(CASES["weighted"], CASES["within where"], CASES["weighted"])
    names = [name for name, _ in learning.named(resolve("score_mod", mod, SCORE_MOD))]
    assert names[0] == "score_mod.0.0"
    assert "score_mod.within_where.w" in names
    assert len(set(names)) == len(names)
    q, k, v, dout = inputs()
    _, vjp = nattn.attention_vjp(q, k, v, score_mod=mod, backend="reference")
    found = vjp(dout, wrt=[x for x in names if x.endswith((".0.0", ".2.0"))]).dmods
    assert list(found) == ["score_mod.0.0", "score_mod.2.0"]
    for name, x in found.items():
        np.testing.assert_array_equal(vjp(dout, wrt=(name,)).dmods[name], x)


def test_one_function_of_a_composition_is_found_by_its_name() -> None:
    mod = nattn.mods.compose(CASES["weighted"], CASES["within where"])
    q, k, v, dout = inputs()
    names = ("score_mod.weighted.w", "score_mod.within_where.w")
    found = [
        nattn.attention_vjp(q, k, v, score_mod=mod, backend=x)[1](dout, wrt=names).dmods
        for x in ("cpu", "reference")
    ]
    for name in names:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-12)
    assert not np.allclose(found[0][names[0]], found[0][names[1]])


def looped(s: Any, b: Any, h: Any, i: Any, j: Any, gain: Any) -> Any:
    for _ in range(int(gain)):
        s = s * 2.0
    return s


def test_a_number_that_decides_how_code_runs_cannot_learn() -> None:
    q, k, v, dout = inputs()
    mod = functools.partial(looped, gain=2.0)
    _, vjp = nattn.attention_vjp(q, k, v, score_mod=mod)
    with pytest.raises(TypeError, match="score_mod: expected a function that SIMD lanes"):
        vjp(dout, wrt=("score_mod.gain",))


def test_a_small_model_learns_its_curve() -> None:
    """Gradient descent on the table alone finds the distances that the targets came from."""
    rng = np.random.default_rng(9)
    q, k, v = rng.standard_normal((3, 1, 200, 8), dtype=np.float32)
    q *= 0.3
    distances = np.arange(401) - 200
    truth = (3.0 * np.exp(-((distances - 7) ** 2) / 30.0)).astype(np.float32)[None]

    def curve(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s + table[h, i - j + 200]

    wanted = nattn.attention(q, k, v, score_mod=functools.partial(curve, table=truth))
    table = np.zeros_like(truth)
    momentum = np.zeros_like(table)
    losses = []
    for _ in range(60):
        mod = functools.partial(curve, table=table)
        out, vjp = nattn.attention_vjp(q, k, v, score_mod=mod)
        losses.append(float(((out - wanted) ** 2).sum()))
        step = vjp(2 * (out - wanted), wrt=("score_mod.table",)).dmods["score_mod.table"]
        momentum = 0.9 * momentum - 0.05 * step
        table = table + momentum
    assert losses[-1] < 0.1 * losses[0]
    near = abs(distances - 7) < 4
    assert table[0, near].mean() > table[0, abs(distances) < 100].mean() + 1.0
    assert math.isfinite(losses[-1])
