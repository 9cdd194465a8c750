"""Forward mode: directional derivatives of attention."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cases import (
    CASES,
    Array,
    Case,
    assert_near,
    gate,
    gaussian,
    qkv,
    scores_error,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import nattn
from nattn.backends import reference
from nattn.backends.cpu import jobs
from nattn.backends.error_budget import pair_budget, stored, sum_budget
from nattn.call.problem import Problem

HERE = pytest.mark.parametrize("backend", ["cpu", "reference"])
"""Where there is forward mode."""


def directions(q: Array, k: Array, v: Array, seed: int = 7) -> tuple[Array, ...]:
    """Return something for q, k and v to change by, of their dtypes."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in (q, k, v))


def budget(t: Any, dq: Array, dk: Array, dv: Array) -> tuple[Array, Array]:
    """Bound the errors of dout and dlse, worst case to first order, for any order of summation.

    With ``w = p * ds`` they are ``dlse = sum(w)`` and ``dout = sum(w * v) - dlse * out +
    sum(p * dv)``. `pair_budget` has the errors of p and of ``p * (dp - delta)``, which is w for
    ``dp = ds`` and ``delta = 0``; a tangent of a score is a dot product of 2 D terms, and takes
    the error of the modifiers' derivative besides.
    """
    p = t.problem
    double = 2 if p.compute == np.float64 else 1
    u = double * float(np.finfo(p.compute).eps) / 2
    off = np.zeros((*t.lse.shape, p.Dv)), np.zeros(t.lse.shape)

    def clean(x: Any) -> Array:
        return np.where(np.isfinite(x), x, 0.0)

    with np.errstate(all="ignore"):
        for b, h in np.ndindex(p.B, p.Hq):
            (at_q, n_q), (at_kv, n_kv) = p.q_place(b), p.kv_place(b)
            kv = h // p.group
            tangents = dq[at_q, h, n_q], dk[at_kv, kv, n_kv], dv[at_kv, kv, n_kv]
            move_q, move_k, move_v = (clean(x.astype(np.float64)) for x in tangents)
            q, k = (clean(x) for x in reference._queries_and_keys(p, b, h))
            v = np.abs(clean(reference._values(p, b, h)))
            s, visible, slope = reference._scores(p, b, h, derive=True)
            steep = clean(np.abs(np.broadcast_to(slope, s.shape)))
            score_error, slope_error = scores_error(p, b, h, np.abs(q) @ np.abs(k).T, s)
            size = np.abs(move_q) @ np.abs(k).T + np.abs(q) @ np.abs(move_k).T
            size *= abs(p.scale)
            ds = p.scale * (move_q @ k.T + q @ move_k.T) * clean(slope)
            lse = clean(t.lse[b, h, n_q, None])
            exponent = np.where(visible, clean(s - lse), 0.0)
            prob = np.where(visible, np.exp(exponent), 0.0)
            pair = pair_budget(
                p.compute,
                prob,
                exponent,
                ds,
                0.0,
                score_error=double * score_error,
                lse_error=clean(t.budget.lse[b, h, n_q, None]),
                dp_size=size * steep,
                delta_error=size * double * slope_error,
                Dv=2 * p.D,
            )
            w = np.where(visible, np.abs(prob * ds), 0.0)
            w_error = np.where(visible, clean(pair.ds), 0.0)
            n = 3 * visible.sum(axis=1) + 8  # rescaling costs less than another two sums
            dlse = np.abs(np.where(visible, prob * ds, 0.0).sum(axis=1))
            dlse_error = sum_budget(p.compute, w_error.sum(axis=1), w.sum(axis=1), n)
            off[1][b, h, n_q] = dlse_error
            kept, factor = reference._kept(p, b, h, visible), 1.0 / (1.0 - p.dropout_p)
            w, w_error, prob, p_error = (
                np.where(kept, x, 0.0) * factor for x in (w, w_error, prob, pair.weight)
            )
            error = w_error @ v + p_error @ np.abs(move_v)
            amount = w @ v + prob @ np.abs(move_v)
            out = np.abs(clean(t.out[b, h, n_q]))
            error += dlse_error[:, None] * out
            error += dlse[:, None] * (clean(t.budget.out[b, h, n_q, None]) + 2 * u * out)
            off[0][b, h, n_q] = sum_budget(p.compute, error, amount, n[:, None])
    return off


def head_major(p: Problem, x: Array) -> Array:
    """View an array in the caller's layout as (B, H, N, D)."""
    x = x[(None,) * (4 - x.ndim)]
    return x.transpose(0, 2, 1, 3) if p.layout == "bnhd" else x


def check(backend: str, q: Array, k: Array, v: Array, **options: Any) -> None:
    """Compare a call with the reference within the budget, and its values with the truth."""
    move = directions(q, k, v)
    (out, lse), (dout, dlse) = nattn.attention_jvp(
        q, k, v, *move, return_lse=True, backend=backend, **options
    )
    t = truth(q, k, v, **options)
    p = t.problem
    assert (dout.shape, dout.dtype) == (out.shape, out.dtype) == (p.out_shape, p.dtype)
    assert (dlse.shape, dlse.dtype) == (lse.shape, lse.dtype) == (p.lse_shape, p.compute)
    places = tuple(head_major(p, x) for x in move)
    exact = [np.empty(shape) for shape in 2 * (t.out.shape, t.lse.shape)]
    reference.jvp(p, places, *exact)
    np.testing.assert_array_equal(exact[0], t.out)
    assert_near(head_major(p, out), t.out, t.stored_budget())
    assert_near(lse.reshape(t.lse.shape), t.lse, t.budget.lse)
    off, off_lse = budget(t, *places)
    if p.dtype != p.compute:
        off = stored(p.storage, exact[2], off)
    assert_near(head_major(p, dout), exact[2], off)
    assert_near(dlse.reshape(t.lse.shape), exact[3], off_lse)


@HERE
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cases(case: Case, backend: str) -> None:
    q, k, v, options = case.make("f4")
    check(backend, q, k, v, **options)


@HERE
@pytest.mark.parametrize(
    ("dtype", "rows"), [("float64", 7), ("float64", 150), ("float16", 150), ("bfloat16", 7)]
)
def test_storage_types(dtype: str, rows: int, backend: str) -> None:
    case = Case("", B=2, Hq=4, Hkv=2, Nq=rows, Nk=150, D=19, Dv=11)
    q, k, v, _ = case.make(dtype)
    check(backend, q, k, v, causal=True, softcap=20.0)


FUNCTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "what sees positions": {"causal": True, "window_size": (9, 2), "kv_lens": [30, 11]},
    "score_mod": {"score_mod": functools.partial(gate, gain=1.5)},
    "sinks, softcap, slopes": {"sinks": gaussian(2), "softcap": 3.0, "alibi_slopes": gaussian(2)},
    "dropout": {"dropout_p": 0.4, "seed": 9},
    "mask and bias": {"mask": gaussian(2, 1, 20, 30) > 0, "bias": gaussian(20, 30)},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_has_finite_differences(name: str) -> None:
    q, k, v = (x.astype(np.float64) for x in qkv(2, 2, 20, 30, 8))
    move, options = directions(q, k, v), FUNCTIONS[name] | {"backend": "reference"}

    def along(step: float) -> tuple[Array, Array]:
        moved = (x + step * dx for x, dx in zip((q, k, v), move, strict=True))
        found: tuple[Array, Array] = nattn.attention(*moved, return_lse=True, **options)
        return found

    _, found = nattn.attention_jvp(q, k, v, *move, return_lse=True, **options)
    for x, before, after in zip(found, along(-1e-5), along(1e-5), strict=True):
        seen = np.isfinite(after)
        slope = (after[seen] - before[seen]) / 2e-5
        assert np.abs(slope).max() > 0.1
        np.testing.assert_allclose(x[seen], slope, rtol=0, atol=1e-6 * np.abs(slope).max())
        assert not x[~seen].any()


@HERE
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_transpose_of_the_reverse_pass(name: str, backend: str) -> None:
    q, k, v = (x.astype(np.float64) for x in qkv(2, 2, 20, 30, 8))
    move, options = directions(q, k, v), FUNCTIONS[name] | {"backend": backend}
    _, (dout, dlse) = nattn.attention_jvp(q, k, v, *move, return_lse=True, **options)
    (out, lse), vjp = nattn.attention_vjp(q, k, v, return_lse=True, **options)
    back, back_lse = gaussian(*out.shape, dtype="f8"), gaussian(*lse.shape, dtype="f8", seed=1)
    grads = vjp(back, back_lse)
    ahead = (back * dout).sum() + (back_lse * dlse)[np.isfinite(lse)].sum()
    pairs = zip((grads.dq, grads.dk, grads.dv), move, strict=True)
    np.testing.assert_allclose(ahead, sum((x * dx).sum() for x, dx in pairs), rtol=1e-10)


@HERE
@pytest.mark.parametrize("given", [("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v")])
def test_what_is_not_given_does_not_move(given: tuple[str, ...], backend: str) -> None:
    q, k, v = (x.astype(np.float64) for x in qkv(1, 2, 70, 90, 12))
    move: dict[str, Any] = dict(zip(("dq", "dk", "dv"), directions(q, k, v), strict=True))
    some: dict[str, Any] = {name: move[name] if name[1] in given else None for name in move}
    zeros: dict[str, Any] = {
        name: move[name] if name[1] in given else np.zeros_like(move[name]) for name in move
    }
    args: dict[str, Any] = {"causal": True, "return_lse": True, "backend": backend}
    (out, lse), (dout, dlse) = nattn.attention_jvp(q, k, v, **some, **args)
    (out0, lse0), (dout0, dlse0) = nattn.attention_jvp(q, k, v, **zeros, **args)
    np.testing.assert_array_equal(out, out0)
    np.testing.assert_array_equal(lse, lse0)
    np.testing.assert_allclose(dout, dout0, rtol=0, atol=1e-13)
    np.testing.assert_allclose(dlse, dlse0, rtol=0, atol=1e-13)
    assert dlse.any() == (given != ("v",))
    assert dout.any()
    double: dict[str, Any] = {name: None if x is None else 2 * x for name, x in some.items()}
    _, (twice, twice_lse) = nattn.attention_jvp(q, k, v, **double, **args)
    np.testing.assert_array_equal(twice, 2 * dout)  # it is linear, and 2 is exact
    np.testing.assert_array_equal(twice_lse, 2 * dlse)


@HERE
@pytest.mark.parametrize("of", ["k", "v", "dk", "dv"])
def test_what_is_hidden_stays_out(of: str, backend: str) -> None:
    q, k, v = qkv(1, 2, 60, 80, 16)
    arrays: dict[str, Any] = dict(zip(("dq", "dk", "dv"), directions(q, k, v), strict=True))
    arrays |= {"k": k, "v": v}
    mask = np.ones((60, 80), bool)
    mask[:, 33] = False
    mask[7, 33] = True
    args: dict[str, Any] = {"mask": mask, "backend": backend, "return_lse": True}
    plain = nattn.attention_jvp(q, **arrays, **args)
    for bad in (np.nan, np.inf):
        poisoned = arrays[of].copy()
        poisoned[0, :, 33] = bad
        found = nattn.attention_jvp(q, **arrays | {of: poisoned}, **args)
        others = np.arange(60) != 7
        for x, y in zip((*found[0], *found[1]), (*plain[0], *plain[1]), strict=True):
            np.testing.assert_array_equal(x[:, :, others], y[:, :, others])
        assert np.isnan(found[1][0][0, :, 7]).any() or np.isinf(found[1][0][0, :, 7]).any()


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TINY", 0.0)  # for several threads to take part at all
    q, k, v = qkv(2, 4, 300, 300, 8)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(jobs, "thread_count", lambda threads=threads: threads)
        found.append(nattn.attention_jvp(q, k, v, *directions(q, k, v), causal=True))
    one = nattn.attention_jvp(
        *(x[1:] for x in (q, k, v, *directions(q, k, v))), causal=True
    )  # and what else is in the batch
    for out, dout in found:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(dout, found[0][1])
        np.testing.assert_array_equal(dout[1:], one[1])


@HERE
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_nothing(sizes: tuple[int, int], backend: str) -> None:
    q, k, v = qkv(2, 2, *sizes, 8)
    sinks = np.array([0.5, np.nan], np.float32)
    (out, lse), (dout, dlse) = nattn.attention_jvp(
        q, k, v, *directions(q, k, v), sinks=sinks, return_lse=True, backend=backend
    )
    assert dout.shape == out.shape
    np.testing.assert_array_equal(np.isnan(dlse), np.isnan(lse))
    np.testing.assert_array_equal(np.isnan(dout), np.isnan(out))
    assert not np.nan_to_num(dout).any()
    assert not np.nan_to_num(dlse).any()


@HERE
def test_ranks_layouts_and_strides(backend: str) -> None:
    q, k, v = qkv(1, 2, 40, 50, 8)
    move = directions(q, k, v)
    _, dout = nattn.attention_jvp(q, k, v, *move, backend=backend)
    found = nattn.attention_jvp(*(x[0] for x in (q, k, v, *move)), backend=backend)
    np.testing.assert_array_equal(found[1], dout[0])
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v, *move)]
    found = nattn.attention_jvp(*turned, layout="bnhd", backend=backend)
    np.testing.assert_array_equal(found[1].transpose(0, 2, 1, 3), dout)
    spread = [np.repeat(x, 3, axis=3)[..., ::-3] for x in (q, k, v, *move)]
    back = nattn.attention_jvp(*(x[..., ::-1] for x in spread), backend=backend)
    np.testing.assert_array_equal(back[1], dout)
    big = [x.astype(x.dtype.newbyteorder(">")) for x in (q, k, v, *move)]
    np.testing.assert_array_equal(nattn.attention_jvp(*big, backend=backend)[1], dout)


@settings(max_examples=25)
@given(st.data())
def test_any_sizes_and_masks(data: Any) -> None:
    draw = data.draw
    B, Hkv, group = (draw(st.integers(1, n)) for n in (2, 2, 3))
    Nq, Nk, D, Dv = (draw(st.integers(1, n)) for n in (120, 260, 20, 20))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    q = rng.standard_normal((B, Hkv * group, Nq, D), dtype=np.float32)
    k, v = (rng.standard_normal((B, Hkv, Nk, n), dtype=np.float32) for n in (D, Dv))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["mask"] = rng.random((B, 1, Nq, Nk)) < 0.5
    if draw(st.booleans()):
        options["kv_lens"] = rng.integers(0, Nk, B, endpoint=True)
        options["q_lens"] = rng.integers(0, Nq, B, endpoint=True)
    check("cpu", q, k, v, **options)


def test_bad_input() -> None:
    q, k, v = qkv(1, 2, 10, 12, 8)
    with pytest.raises(ValueError, match=r"dq, dk, dv: expected an array .* got None for all"):
        nattn.attention_jvp(q, k, v)
    expected = r"dk: expected shape \(1, 2, 12, 8\), got \(1, 2, 10, 8\)"
    with pytest.raises(ValueError, match=expected):
        nattn.attention_jvp(q, k, v, dk=q)
    with pytest.raises(TypeError, match="dv: expected dtype float32 as of q, got float64"):
        nattn.attention_jvp(q, k, v, dv=v.astype("f8"))
    with pytest.raises(NotImplementedError, match="'cpu' or 'reference' for the task 'jvp'"):
        nattn.attention_jvp(q, k, v, q, backend="cuda")
    with pytest.raises(TypeError, match="return_lse: expected"):
        nattn.attention_jvp(q, k, v, q, return_lse=2)  # type: ignore[arg-type]
