"""Packed sequences: each as alone, whatever lies beside it."""

from __future__ import annotations

import doctest
import functools
import importlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cases import (
    assert_near,
    gate,
    gaussian,
    gradient_truth,
    in_step,
    looked_up,
    poisoned,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import nattn
from nattn.backends.cpu import jobs, launch, launch_backward
from nattn.backends.cpu.backward import ITEM
from nattn.backends.cpu.schedule import Sizes, schedule
from nattn.call.problem import Problem
from nattn.call.results import check_incoming

Array = NDArray[Any]

HQ, HKV, D, DV = 4, 2, 16, 24


class Packed(NamedTuple):
    """Packed arrays, and where their sequences lie."""

    q: Array
    k: Array
    v: Array
    cu_q: list[int]
    cu_k: list[int]

    @property
    def lens(self) -> tuple[list[int], list[int]]:
        """Lengths in queries and in keys."""
        return np.diff(self.cu_q).tolist(), np.diff(self.cu_k).tolist()

    def alone(self, b: int) -> tuple[Any, Any, Any]:
        """Return q, k and v of one sequence, head-major."""
        q, k, v = (
            x[cu[b] : cu[b + 1]].transpose(1, 0, 2)
            for x, cu in ((self.q, self.cu_q), (self.k, self.cu_k), (self.v, self.cu_k))
        )
        return q, k, v

    def problem(self) -> Problem:
        """Return a call of them, checked."""
        return Problem.build(self.q, self.k, self.v, (self.cu_q, self.cu_k))

    def of_rows(self, x: Array, axis: int = 0) -> list[Array]:
        """Cut an array over queries into what belongs to each sequence."""
        return np.split(x, self.cu_q, axis=axis)[1:-1]

    def outside(self, x: Array, axis: int = 0) -> Array:
        """Return what belongs to no sequence."""
        parts = np.split(x, self.cu_q, axis=axis)
        return np.concatenate([parts[0], parts[-1]], axis=axis)

    def batch(self) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """Return the sequences as a padded batch, and its lengths."""
        n_q, n_kv = self.lens
        arrays = []
        for x, cu, lens in (
            (self.q, self.cu_q, n_q),
            (self.k, self.cu_k, n_kv),
            (self.v, self.cu_k, n_kv),
        ):
            padded = np.zeros((len(lens), x.shape[1], max(lens, default=0), x.shape[2]), x.dtype)
            for b, n in enumerate(lens):
                padded[b, :, :n] = x[cu[b] : cu[b] + n].transpose(1, 0, 2)
            arrays.append(padded)
        q, k, v = arrays
        return (q, k, v), {"q_lens": n_q, "kv_lens": n_kv}


def pack(
    q_lens: list[int],
    kv_lens: list[int],
    dtype: Any = np.float32,
    *,
    heads: tuple[int, int] = (HQ, HKV),
    sizes: tuple[int, int] = (D, DV),
    before: int = 3,
    behind: int = 2,
) -> Packed:
    """Make packed sequences, with rows of no sequence before and behind, which hold NaN and Inf."""
    cu_q = np.cumsum([before, *q_lens]).tolist()
    cu_k = np.cumsum([before, *kv_lens]).tolist()
    q = gaussian(cu_q[-1] + behind, heads[0], sizes[0], dtype=dtype)
    k = gaussian(cu_k[-1] + behind, heads[1], sizes[0], dtype=dtype, seed=1)
    v = gaussian(cu_k[-1] + behind, heads[1], sizes[1], dtype=dtype, seed=2)
    bad = []
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x = poisoned(x, slice(cu[0])) if cu[0] else x
        bad.append(poisoned(x, slice(cu[-1], None)) if behind else x)
    q, k, v = bad
    return Packed(q, k, v, cu_q, cu_k)


LENS = ([5, 0, 130, 60, 1, 48, 20, 97], [9, 4, 0, 60, 300, 129, 17, 260])


def run(p: Packed, **options: Any) -> tuple[Array, Array]:
    """Run a packed call and check what it returns for rows of no sequence."""
    out, lse = nattn.attention_varlen(*p, return_lse=True, **options)
    assert out.shape == (*p.q.shape[:2], p.v.shape[2])
    assert out.dtype == p.q.dtype
    assert lse.shape == (p.q.shape[1], p.q.shape[0])
    assert not p.outside(out).astype("f4").any()
    assert (p.outside(lse, 1) == -np.inf).all()
    return out, lse


def assert_alone(p: Packed, out: Array, lse: Array, **options: Any) -> None:
    """Assert that each sequence has the bits that it has alone."""
    rows = zip(p.of_rows(out), p.of_rows(lse, 1), strict=True)
    for b, (own_out, own_lse) in enumerate(rows):
        expected, expected_lse = nattn.attention(*p.alone(b), return_lse=True, **options)
        np.testing.assert_array_equal(own_out.transpose(1, 0, 2), expected, err_msg=f"{b}")
        np.testing.assert_array_equal(own_lse, expected_lse, err_msg=f"{b}")


PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "sinks, softcap": {"sinks": [0.5, -1.0, 2.0, -np.inf], "softcap": 1.5, "causal": True},
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16], ids=["f4", "bfloat16"])
def test_each_sequence_has_the_bits_that_it_has_alone(dtype: Any, name: str) -> None:
    p = pack(*LENS, dtype)
    assert_alone(p, *run(p, **PLAIN[name]), **PLAIN[name])


@pytest.mark.parametrize("dtype", ["f8", "f2"])
def test_other_dtypes(dtype: str) -> None:
    """Few rows, for which there is a small kernel."""
    p = pack([4, 0, 3, 1], [300, 5, 0, 17], dtype)
    assert_alone(p, *run(p, causal=True), causal=True)


@pytest.mark.parametrize("lens", [([3, 1, 2], [40, 700, 0]), ([1100, 7], [1100, 70])], ids=str)
def test_short_and_long_ones(lens: tuple[list[int], list[int]]) -> None:
    p = pack(*lens)
    assert_alone(p, *run(p, causal=True), causal=True)


def test_strides_do_not_matter() -> None:
    p = pack([20, 70], [20, 70], sizes=(16, 16), heads=(2, 2), behind=0)
    qkv = np.stack([p.q, p.k, p.v], axis=1)
    strided = Packed(qkv[:, 0], qkv[:, 1], qkv[:, 2], p.cu_q, p.cu_k)
    turned_q, turned_k, turned_v = (x[:, :, ::-1].copy()[:, :, ::-1] for x in p[:3])
    turned = Packed(turned_q, turned_k, turned_v, p.cu_q, p.cu_k)
    for other in (strided, turned):
        for x, y in zip(run(other), run(p), strict=True):
            np.testing.assert_array_equal(x, y)
    out = np.full((2, *p.q.shape[:2], 16), 7, np.float32)[::-1][0]
    assert nattn.attention_varlen(*p, out=out) is out
    np.testing.assert_array_equal(out, run(p)[0])
    big = [x.astype(">f4") for x in p[:3]]
    np.testing.assert_array_equal(
        nattn.attention_varlen(big[0], big[1], big[2], p.cu_q, p.cu_k), out
    )


# Every argument, against the dense formula on the same sequences as a padded batch

SMALL = ([5, 0, 60, 30, 1, 48, 20, 33], [9, 4, 0, 30, 150, 129, 17, 80])
B, N_Q, N_KV = len(SMALL[0]), max(SMALL[0]), max(SMALL[1])
RNG = np.random.default_rng(3)
OPTIONS: dict[str, dict[str, Any]] = {
    "an offset for each": {"causal": True, "q_offset": [0, 3, -5, 10, 149, 81, 1 << 70, -40]},
    "one offset": {"window_size": (30, 0), "q_offset": 7, "scale": 0.4},
    "ALiBi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4], "causal": True},
    "ALiBi for each": {"alibi_slopes": RNG.standard_normal((B, HQ)).astype("f4")},
    "mask": {"mask": RNG.random((B, 1, N_Q, N_KV)) < 0.7},
    "mask for all": {"mask": RNG.random((N_Q, N_KV)) < 0.7, "causal": True},
    "bias": {"bias": RNG.standard_normal((B, HQ, N_Q, N_KV)).astype("f4")},
    "bias for all": {"bias": RNG.standard_normal((HQ, 1, N_KV)).astype("f4")},
    "score_mod": {"score_mod": functools.partial(gate, gain=0.75)},
    "score_mod that knows b": {
        "score_mod": functools.partial(looked_up, table=RNG.uniform(-1, 1, (B, 310)), gain=2)
    },
    "mask_mod that knows b": {"mask_mod": functools.partial(in_step, step=3), "causal": True},
    "dropout": {"dropout_p": 0.3, "seed": 7, "sinks": [0.5, 1.0, -3.0, 0.0]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments(name: str) -> None:
    p, options = pack(*SMALL), OPTIONS[name]
    batch, lens = p.batch()
    own_options = lens | options
    t = truth(*batch, **own_options)
    exact, exact_lse = nattn.attention_varlen(*p, backend="reference", return_lse=True, **options)
    out, lse = run(p, **options)
    plain, plain_lse = nattn.attention(*batch, return_lse=True, **own_options)
    budget = np.broadcast_to(t.stored_budget(), t.out.shape)
    for b, n in enumerate(lens["q_lens"]):
        rows = slice(p.cu_q[b], p.cu_q[b] + n)
        own, own_lse = out[rows].transpose(1, 0, 2), lse[:, rows]
        np.testing.assert_array_equal(own, plain[b, :, :n])
        np.testing.assert_array_equal(own_lse, plain_lse[b, :, :n])
        assert_near(own, t.out[b, :, :n], budget[b, :, :n])
        assert_near(own_lse, t.lse[b, :, :n], t.budget.lse[b, :, :n])
        want = t.out[b, :, :n].astype("f4")
        np.testing.assert_array_equal(exact[rows].transpose(1, 0, 2), want)
        np.testing.assert_array_equal(exact_lse[:, rows], t.lse[b, :, :n].astype("f4"))
    assert not p.outside(exact).any()
    assert (p.outside(exact_lse, 1) == -np.inf).all()


def test_what_is_hidden_from_a_sequence_matters_to_the_others_alone() -> None:
    """NaN and Inf of one sequence do not reach the next, and padding of keys is never read."""
    p = pack([50, 30, 70], [50, 30, 70])
    clean, clean_lse = run(p, causal=True)
    at = slice(p.cu_q[1], p.cu_q[2])
    bad = p._replace(k=poisoned(p.k, at), v=poisoned(p.v, at))
    out, lse = run(bad, causal=True)
    for b in (0, 2):
        np.testing.assert_array_equal(p.of_rows(out)[b], p.of_rows(clean)[b])
        np.testing.assert_array_equal(p.of_rows(lse, 1)[b], p.of_rows(clean_lse, 1)[b])
    assert_alone(bad, out, lse, causal=True)
    assert not np.isfinite(p.of_rows(out)[1]).any()


lengths = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 15, 16, 17, 47, 48, 49, 100]),
        st.sampled_from([0, 0, 1, 3, 16, 33, 128, 129, 200]),
    ),
    max_size=12,
)


@settings(max_examples=25)
@given(lens=lengths, before=st.integers(0, 3), behind=st.integers(0, 3), causal=st.booleans())
def test_any_lengths(lens: list[tuple[int, int]], before: int, behind: int, causal: bool) -> None:
    p = pack([n for n, _ in lens], [n for _, n in lens], before=before, behind=behind)
    every: list[dict[str, Any]] = [{}, {"sinks": [0.5, -1.0, 2.0, 0.0]}]
    for options in every:
        assert_alone(p, *run(p, causal=causal, **options), causal=causal, **options)


def test_many_tiny_ones() -> None:
    lens = np.random.default_rng(0).integers(0, 9, 3000).tolist()
    p = pack(lens, lens, heads=(1, 1), sizes=(4, 4))
    out, _ = run(p, causal=True)
    for b in (*range(20), 2998, 2999):
        expected = nattn.attention(*p.alone(b), causal=True)
        np.testing.assert_array_equal(p.of_rows(out)[b].transpose(1, 0, 2), expected)
    exact, _ = nattn.attention_varlen(*p, causal=True, return_lse=True, backend="reference")
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_empty_ones() -> None:
    p = pack([0, 1, 0], [3, 0, 5], before=0, behind=0)
    assert (p.cu_q, p.cu_k) == ([0, 0, 1, 1], [0, 3, 3, 8])
    out, lse = run(p)
    assert out.shape == (1, HQ, DV)
    assert not out.any()
    assert (lse == -np.inf).all()
    out, lse = run(p, sinks=[1.0, 2.0, 3.0, 4.0])
    assert not out.any()
    assert lse[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    none = pack([], [])
    out, lse = run(none)  # no sequence at all: what is there belongs to none
    assert out.shape == (5, HQ, DV)
    assert run(pack([0, 0], [0, 0], before=0, behind=0))[0].shape == (0, HQ, DV)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(
    n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pack([400, 3, 170, 60], [500, 300, 170, 0])
    expected = run(p, causal=True)
    monkeypatch.setattr(jobs, "thread_count", lambda: n_threads)
    monkeypatch.setattr(jobs, "TINY", 0.0)
    for x, y in zip(run(p, causal=True), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_takes_longest_comes_first() -> None:
    p = pack([40, 0, 900, 300, 1], [40, 50, 900, 300, 7])
    problem = p.problem()
    plan = launch.plan("float32", 5, HQ, 2, 900, 900, D, DV, 2, True)
    table, n_tasks = launch.task_table(problem, plan, 2)
    assert table[:, 1].tolist() == [2, 3, 0, 4]
    first, _, n_tiles, per_task, per_stream = table.T
    assert (per_task * per_stream >= n_tiles).all()
    assert (per_task * (per_stream - 1) < n_tiles).all()
    assert (per_task <= plan.fields["tiles_per_task"]).all()
    np.testing.assert_array_equal(np.diff(first, append=n_tasks), HQ * per_stream)


def test_some_items_alone() -> None:
    """What is left out is not written: it may be computed by another kernel."""
    p = pack([40, 20, 70], [40, 20, 70])
    problem = p.problem()
    expected, expected_lse = run(p)
    out = np.full((1, HQ, p.q.shape[0], DV), 7, np.float32)
    lse = np.full(out.shape[:3], 7, np.float32)
    launch.attend(problem, out, lse, items=np.array([2, 0]))
    for b in range(3):
        rows = slice(p.cu_q[b], p.cu_q[b + 1])
        want = (7, 7) if b == 1 else (expected[rows].transpose(1, 0, 2), expected_lse[:, rows])
        np.testing.assert_array_equal(out[0, :, rows], want[0])
        np.testing.assert_array_equal(lse[0, :, rows], want[1])
    batch, lens = p.batch()
    plain = np.full((3, HQ, 70, DV), 7, np.float32)
    lse = np.full(plain.shape[:3], 7, np.float32)
    launch.attend(Problem.build(*batch, **lens), plain, lse, items=np.array([1]))
    want = nattn.attention(*batch, **lens)
    np.testing.assert_array_equal(plain[1], want[1])
    assert (plain[[0, 2]] == 7).all()


# Gradients


def incoming(p: Packed) -> tuple[Array, Array]:
    """Make a dout and a dlse, which are NaN where there is no sequence."""
    dout = gaussian(*p.q.shape[:2], p.v.shape[2], seed=5)
    dlse = gaussian(p.q.shape[1], p.q.shape[0], seed=6)
    for rows in (slice(p.cu_q[0]), slice(p.cu_q[-1], None)):
        dout[rows], dlse[:, rows] = np.nan, np.nan
    compute = np.float64 if p.q.dtype == np.float64 else np.float32
    return dout.astype(p.q.dtype), dlse.astype(compute)


def run_back(p: Packed, wrt: tuple[str, ...] = ("q", "k", "v"), **options: Any) -> Any:
    """Run a packed call forward and backward."""
    _, vjp = nattn.attention_varlen_vjp(p.q, p.k, p.v, p.cu_q, p.cu_k, return_lse=True, **options)
    grads = vjp(*incoming(p), wrt)
    for x, like in ((grads.dq, p.q), (grads.dk, p.k), (grads.dv, p.v)):
        if x is not None:
            assert (x.shape, x.dtype) == (like.shape, like.dtype)
            cu = p.cu_q if like is p.q else p.cu_k
            assert not x[: cu[0]].astype("f4").any()
            assert not x[cu[-1] :].astype("f4").any()
    return grads


def assert_back_alone(p: Packed, grads: Any, **options: Any) -> None:
    """Assert that each sequence has the gradients that it has alone, to the bit."""
    dout, dlse = incoming(p)
    for b in range(len(p.cu_q) - 1):
        q_rows, kv_rows = slice(*p.cu_q[b : b + 2]), slice(*p.cu_k[b : b + 2])
        _, vjp = nattn.attention_vjp(*p.alone(b), **options)
        own = vjp(dout[q_rows].transpose(1, 0, 2), dlse[:, q_rows])
        for x, y, rows in zip(grads[:3], own[:3], (q_rows, kv_rows, kv_rows), strict=True):
            np.testing.assert_array_equal(x[rows].transpose(1, 0, 2), y, err_msg=f"{b}")


@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16], ids=["f4", "bfloat16"])
def test_gradients_have_the_bits_that_they_have_alone(dtype: Any) -> None:
    p = pack([*LENS[0], 30], [*LENS[1], 2100], dtype)  # of the last the keys are split
    every: list[dict[str, Any]] = [{}, {"causal": True, "softcap": 2.0}]
    for options in every:
        assert_back_alone(p, run_back(p, **options), **options)


WRT: dict[str, tuple[str, ...]] = {
    "ALiBi": ("q", "k", "v", "alibi_slopes"),
    "ALiBi for each": ("q", "k", "v", "alibi_slopes"),
    "bias": ("q", "k", "v", "bias"),
    "bias for all": ("q", "k", "v", "bias"),
    "dropout": ("q", "k", "v", "sinks"),
}


def check_gradients(p: Packed, wrt: tuple[str, ...], **options: Any) -> None:
    """Compare with the gradients of the dense formula on a padded batch, and their bits."""
    batch, lens = p.batch()
    dout, dlse = np.zeros((*batch[0].shape[:3], DV), "f4"), np.zeros(batch[0].shape[:3], "f4")
    packed_dout, packed_dlse = incoming(p)
    for b, n in enumerate(lens["q_lens"]):
        rows = slice(p.cu_q[b], p.cu_q[b] + n)
        dout[b, :, :n], dlse[b, :, :n] = (
            packed_dout[rows].transpose(1, 0, 2),
            packed_dlse[:, rows],
        )
    own_options = lens | options
    t = gradient_truth(*batch, dout, dlse, **own_options)
    got = run_back(p, wrt, **options)
    _, vjp = nattn.attention_vjp(*batch, **own_options)
    plain = vjp(dout, dlse, wrt)
    exact = run_back(p, wrt, backend="reference", **options)
    for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes"):
        x = getattr(got, f"d{name}")
        y, z = getattr(plain, f"d{name}"), getattr(exact, f"d{name}")
        if name not in wrt:
            assert x is None
            continue
        if name not in "qkv":
            assert x.shape == y.shape
            assert_near(x, t.gradients[name], t.budget[name])
            assert_near(z, t.gradients[name], t.budget[name])
            continue
        cu = p.cu_q if name == "q" else p.cu_k
        for b, first in enumerate(cu[:-1]):
            n, rows = cu[b + 1] - first, slice(first, cu[b + 1])
            own = x[rows].transpose(1, 0, 2)
            np.testing.assert_array_equal(own, y[b, :, :n], err_msg=f"d{name}, {b}")
            for found in (own, z[rows].transpose(1, 0, 2)):
                assert_near(found, t.gradients[name][b, :, :n], t.budget[name][b, :, :n])


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_arguments(name: str) -> None:
    check_gradients(pack(*SMALL), WRT.get(name, ("q", "k", "v")), **OPTIONS[name])


@pytest.mark.parametrize(
    "shape", [(B, HQ, 60, 1), (HQ, 1, 1), (60, 70), (B, 1, 1, 70), (1, HQ, 1, 70), ()], ids=str
)
def test_a_bias_that_is_broadcast_gets_sums(shape: tuple[int, ...]) -> None:
    p = pack([5, 0, 33, 60, 1, 48, 20, 9], [9, 4, 0, 60, 70, 29, 17, 26])
    check_gradients(p, ("bias",), bias=gaussian(*shape), causal=True)


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",)], ids=str)
def test_what_is_not_wanted_changes_no_bit(wrt: tuple[str, ...]) -> None:
    p = pack([30, 70], [30, 1500])
    every, some = run_back(p, causal=True), run_back(p, wrt, causal=True)
    for name, x, y in zip("qkv", every[:3], some[:3], strict=True):
        assert (y is None) == (name not in wrt)
        if y is not None:
            np.testing.assert_array_equal(x, y)


@settings(max_examples=25)
@given(lens=lengths, before=st.integers(0, 3), behind=st.integers(0, 3), causal=st.booleans())
def test_gradients_of_any_lengths(
    lens: list[tuple[int, int]], before: int, behind: int, causal: bool
) -> None:
    p = pack([n for n, _ in lens], [n for _, n in lens], before=before, behind=behind)
    assert_back_alone(p, run_back(p, causal=causal), causal=causal)


def test_gradients_of_empty_ones() -> None:
    p = pack([0, 1, 0], [3, 0, 5], before=0, behind=0)
    for backend in ("cpu", "reference"):
        for x in run_back(p, backend=backend)[:3]:
            assert not x.any()
    sinks = [1.0, 2.0, 3.0, 4.0]
    grads = run_back(p, ("sinks",), sinks=sinks)
    np.testing.assert_allclose(grads.dsinks, incoming(p)[1][:, 0], rtol=1e-6)  # lse is the sink
    for x in run_back(pack([], []))[:3]:
        assert not x.any()


@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16], ids=["f4", "bfloat16"])
@pytest.mark.parametrize("room", [1, 40_000, 150_000])
def test_little_room_for_partial_results_changes_no_bit(
    dtype: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pack([40, 0, 90, 33, 1], [2100, 50, 3100, 1030, 7], dtype)
    expected = run_back(p, causal=True)
    monkeypatch.setattr(launch_backward, "MOST_PARTIALS", room)
    for x, y in zip(run_back(p, causal=True)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit_of_gradients(
    n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pack([100, 3, 170, 60], [2100, 300, 170, 0])
    options: dict[str, Any] = {"causal": True, "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}
    wrt = ("q", "k", "v", "alibi_slopes")
    expected = run_back(p, wrt, **options)
    monkeypatch.setattr(jobs, "thread_count", lambda: n_threads)
    monkeypatch.setattr(jobs, "TINY", 0.0)
    for x, y in zip(run_back(p, wrt, **options), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_runs_hold_as_much_as_there_is_room_for() -> None:
    p = pack([50, 0, 10, 70, 20], [1000, 10, 90, 3000, 0])
    q_lens, kv_lens = (np.array(x, np.int64).tobytes() for x in p.lens)
    starts = np.array(p.cu_q[:-1], np.int64).tobytes()
    shape = (1, HQ, p.q.shape[0], D)
    head = HQ // HKV * D * 4 * 2 * 70  # bytes of partial dq: of item 3, whose keys form two splits

    def runs(most: int, items: bool, heads: bool, rounded: bool = False) -> list[Any]:
        lens = (q_lens, kv_lens, starts)
        sizes = Sizes(shape, HKV, *lens, 48, 128, 4, 4, rounded, most, items, heads, 0)
        found, n_splits = schedule(sizes)
        assert n_splits.tolist() == [1, 1, 1, 2, 1]
        for run in found:
            assert run.room * 4 <= max(most, head)
            assert run.n_tasks == sum(run.sums["heads"] // 2 * n_splits[run.table[:, 1]])
            rows = [p.lens[0][b] * p.lens[1][b] for b in run.table[:, 1]]
            assert run.pairs == run.sums["heads"] // 2 * sum(rows)
        every = ("item", "first_kv_head")
        columns = [ITEM.names.index(name) for name in every]
        return [(run.table[:, columns].tolist(), run.sums["heads"] // 2) for run in found]

    together = [[3, 0], [0, 0], [2, 0]]  # of one without keys or queries there is nothing
    assert runs(1 << 26, False, False) == [(together, HKV)]
    assert runs(HKV * head, False, False) == [(together, HKV)]
    one_by_one = [([x], HKV) for x in together]
    assert runs(1 << 26, True, False) == one_by_one
    each = [([[b, h]], 1) for b in (3, 0, 2) for h in range(HKV)]
    assert runs(1 << 26, True, True) == each
    by_head = [([[3, 0]], 1), ([[3, 1]], 1)]
    assert runs(head, False, False) == [*by_head, (together[1:], HKV)]
    assert runs(1, False, False) == [*by_head, (together[1:], HKV)]
    assert runs(1, False, False, rounded=True) == each


def test_lse_of_other_rows_is_refused() -> None:
    p = pack([20, 30], [20, 30])
    problem = p.problem()
    out, lse = run(p)
    lse[1, 0] = 2.0
    with pytest.raises(ValueError, match=r"^lse: expected -inf in rows of no sequence, .* row 0$"):
        check_incoming(problem, out, out, lse, None)


# What is refused

CU = "cu_seqlens_q"
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "4-D": ({"q": np.zeros((1, 9, 2, 4), "f4")}, ValueError, r"^q: expected shape \(Tq, Hq, D\)"),
    "2-D": ({"v": np.zeros((9, 4), "f4")}, ValueError, r"^v: expected shape \(Tk, Hkv, Dv\), got"),
    "heads": ({"q": np.zeros((9, 3, 4), "f4")}, ValueError, r"^k, v: .* heads that divides the 3"),
    "depth": ({"k": np.zeros((9, 2, 5), "f4")}, ValueError, r"^k: expected shape \(Nk, Hkv, 4\)"),
    "rows": ({"v": np.zeros((8, 2, 4), "f4")}, ValueError, r"^v: expected shape \(9, 2, Dv\)"),
    "dtype": ({"k": np.zeros((9, 2, 4))}, TypeError, r"^q, k, v: expected one dtype"),
    "falls": ({CU: [0, 5, 4]}, ValueError, r"numbers that do not fall, got 4 after 5 at place 2$"),
    "unsigned": ({CU: np.array([0, 5, 4], "u4")}, ValueError, r"got 4 after 5 at place 2$"),
    "negative": ({CU: [-1, 5, 9]}, ValueError, r"^cu_seqlens_q: .* at least 0, got -1$"),
    "too far": ({CU: [0, 5, 10]}, ValueError, r"a last number of at most 9, .* of q, got 10$"),
    "too far, keys": ({"cu_seqlens_k": [0, 5, 10]}, ValueError, r"at most 9, .* of k, got 10$"),
    "other number": ({CU: [0, 9]}, ValueError, r"^cu_seqlens_k: expected 2 numbers, .* got 3$"),
    "none": ({CU: []}, ValueError, r"^cu_seqlens_q: expected shape \(B \+ 1,\)"),
    "scalar": ({CU: 5}, ValueError, r"^cu_seqlens_q: expected shape \(B \+ 1,\)"),
    "floats": ({CU: [0.0, 4.0, 9.0]}, TypeError, r"^cu_seqlens_q: expected integers, got "),
    "bools": ({CU: [False, True, True]}, TypeError, r"^cu_seqlens_q: expected integers, got "),
    "no array": ({CU: None}, ValueError, r"^cu_seqlens_q: expected .*, got "),
    "layout": ({"layout": "bnhd"}, TypeError, r"^layout: .*attention_varlen, .* \(T, H, D\)$"),
    "q_lens": ({"q_lens": [4, 5]}, TypeError, r"^q_lens: .* cu_seqlens_q has them$"),
    "kv_lens": ({"kv_lens": None}, TypeError, r"^kv_lens: .* cu_seqlens_k has them$"),
    "block_mask": ({"block_mask": None}, TypeError, r"^block_mask: .* pass its mask_mod$"),
    "unknown": ({"windowsize": 1}, TypeError, r"attention_varlen, .* did you mean 'window_size'"),
    "mask": ({"mask": np.ones((2, 1, 9, 9), bool)}, ValueError, r"^mask: .* = \(2, 2, 5, 5\), got"),
    "bias": ({"bias": np.zeros((3, 1, 1, 1))}, ValueError, r"^bias: .* = \(2, 2, 5, 5\), got "),
    "offset": ({"q_offset": [1, 2, 3]}, ValueError, r"^q_offset: expected .* 2 of them"),
    "slopes": ({"alibi_slopes": np.ones((3, 2))}, ValueError, r"^alibi_slopes: .* = \(2, 2\), got"),
    "out": ({"out": np.zeros((2, 9, 4), "f4")}, ValueError, r"^out: expected shape \(9, 2, 4\)"),
    "cuda": ({"backend": "cuda"}, NotImplementedError, r"^backend: expected 'cpu' or 'reference'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case: str) -> None:
    change, kind, text = WRONG[case]
    x = np.zeros((9, 2, 4), np.float32)
    given: dict[str, Any] = {"q": x, "k": x, "v": x, CU: [0, 4, 9], "cu_seqlens_k": [0, 4, 9]}
    with pytest.raises(kind, match=text):
        nattn.attention_varlen(**given | change)


def test_docstrings() -> None:
    result = doctest.testmod(importlib.import_module("nattn.api.varlen"))
    assert result.attempted > 0
    assert result.failed == 0
