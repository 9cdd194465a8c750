"""The mathematics of self-attention, property by property.

Each test is one sentence about attention and the proof that nattn keeps it. Tolerances are those
of `nattn.vectors.dtypes`, derived from the number of operations, or follow from the number of
samples.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from numpy.typing import NDArray

import nattn
from nattn.backends.error_budget import error_budget
from nattn.nn import MultiHeadAttention, SelfAttention
from nattn.positional import Alibi, LearnedTable, Rotary, Sinusoidal

Array = NDArray[Any]
FLOAT64 = np.dtype(np.float64)


def weights(q: Array, k: Array, **args: Any) -> Array:
    """Return the weights of every row: what the average of the unit vectors is made of."""
    one = np.eye(k.shape[-2], dtype=q.dtype)
    return np.asarray(
        nattn.attention(q, k, np.broadcast_to(one, (*k.shape[:-1], len(one))), **args)
    )


def one_score(q: Array, k: Array, **args: Any) -> Array:
    """Return the score of each query with the one key of its head: its lse, ``log(exp(s))``."""
    _, lse = nattn.attention(q[:, None], k[:, None], k[:, None], return_lse=True, **args)
    return np.asarray(lse[:, 0], np.float64)


def rounding(n: int, max_abs_score: float = 0.0, max_abs_v: float = 1.0, D: int = 1) -> float:
    """Return the most that rounding can do to an output in float64: see `error_budget`."""
    return float(error_budget(FLOAT64, n, max_abs_score, max_abs_v, D).out)


# The scale


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape)


def uniform(rng: np.random.Generator, *shape: int) -> Array:
    return rng.uniform(-math.sqrt(3), math.sqrt(3), shape)


def signs(rng: np.random.Generator, *shape: int) -> Array:
    return rng.choice([-1.0, 1.0], shape)


UNIT_VARIANCE = [(normal, 3.0), (uniform, 9 / 5), (signs, 1.0)]
"""Distributions of mean 0 and variance 1, with their fourth moments."""


@pytest.mark.parametrize("d_k", [1, 4, 16, 64, 256])
@pytest.mark.parametrize(("draw", "fourth"), UNIT_VARIANCE, ids=["normal", "uniform", "signs"])
def test_a_dot_product_of_unit_variance_vectors_has_variance_d_k(
    draw: Callable[..., Array], fourth: float, d_k: int
) -> None:
    """And the score, with the scale ``1 / sqrt(d_k)``, has variance 1 for every d_k.

    ``s = sum_d q[d] k[d]`` is a sum of d_k independent terms of mean 0 and variance 1, whatever
    their distribution. The mean of ``s**2`` over M samples estimates its variance; it has itself
    the variance ``(E[s**4] - d_k**2) / M``, where ``E[s**4] = d_k m**2 + 3 d_k (d_k - 1)`` and m
    is the fourth moment of a number. Five standard deviations are missed once in two millions.
    """
    samples = 10_000
    rng = np.random.default_rng(d_k)
    q, k = draw(rng, samples, d_k), draw(rng, samples, d_k)
    deviation = math.sqrt((d_k * fourth**2 + 3 * d_k * (d_k - 1) - d_k**2) / samples)
    plain, scaled = one_score(q, k, scale=1.0), one_score(q, k)
    rounded = 1e-12 * d_k  # of signs, in one dimension, s**2 is 1 and has no deviation
    assert abs((plain**2).mean() - d_k) <= 5 * deviation + rounded
    assert abs((scaled**2).mean() - 1) <= 5 * deviation / d_k + rounded
    assert abs(plain.mean()) <= 5 * math.sqrt(d_k / samples)


def test_without_the_scale_the_softmax_saturates_and_its_gradient_vanishes() -> None:
    """Unscaled, nearly all weight goes to one key, and hardly a gradient comes back.

    ``ds[j] = p[j] (dp[j] - delta)``. With P the largest weight and R the range of dp,
    ``sum |ds| <= 2 (1 - P) R``: so much for all keys but the first in ``1 - P``, and as much for
    the first, whose dp differs from the average by ``(1 - P) R`` at most. Hence
    ``|dk| <= scale |q| 2 (1 - P) R``. Without a scale the factor ``|q|``, about sqrt(d_k), grows,
    but ``1 - P`` falls like an exponential of a gap that grows as fast.

    Each head is one query among 32 keys; a figure is the median over 32 heads. Rounding may change
    each of the 32 weights by `doubt`.
    """
    sizes: dict[str, list[float]] = {"plain": [], "scaled": []}
    top: dict[str, list[float]] = {"plain": [], "scaled": []}
    for d_k in (16, 256, 4096):
        rng = np.random.default_rng(d_k)
        q, k = rng.standard_normal((32, 1, d_k)), rng.standard_normal((32, 32, d_k))
        v, dout = rng.standard_normal((32, 32, 8)), rng.standard_normal((32, 1, 8))
        for name, scale in (("plain", 1.0), ("scaled", 1 / math.sqrt(d_k))):
            backward = nattn.attention_vjp(q, k, v, scale=scale)[1]
            norm = np.linalg.norm(np.asarray(backward(dout).dk), axis=(1, 2))
            largest = weights(q, k, scale=scale).max(axis=(1, 2))
            sizes[name].append(float(np.median(norm)))
            top[name].append(float(np.median(largest)))

            dp = (v * dout).sum(axis=2)
            spread = dp.max(axis=1) - dp.min(axis=1)
            doubt = rounding(32, scale * float((np.abs(k) @ np.abs(q).mT).max()), D=d_k)
            rest = 1 - largest + 32 * doubt
            assert (norm <= scale * np.linalg.norm(q, axis=(1, 2)) * 2 * rest * spread).all()

    assert top["plain"][0] < top["plain"][1] < top["plain"][2]
    assert top["plain"][2] > 1 - 1e-5
    assert max(top["scaled"]) < 0.5
    assert max(sizes["scaled"]) < 2 * min(sizes["scaled"])  # the same for every d_k
    share = [a / b for a, b in zip(sizes["plain"], sizes["scaled"], strict=True)]
    assert share[2] < share[1] < share[0]
    assert share[2] < 1e-3


# Weights


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 17, 100, 300])
def test_rows_of_weights_are_positive_and_sum_to_1(n: int, causal: bool) -> None:
    """Hidden keys have none. An error that scores have cancels in the sum: a row has n terms."""
    q, k = gaussian(2, n, 16, dtype="f8"), gaussian(2, n, 16, seed=1, dtype="f8")
    p = weights(q, k, causal=causal)
    visible = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
    assert (p[:, visible] > 0).all()
    assert (p[:, ~visible] == 0).all()
    assert (np.abs(p.sum(axis=2) - 1) <= rounding(n)).all()


def scores(layer: SelfAttention, x: Array) -> Array:
    """Return the scores of a layer: ``log p + lse``."""
    q, k, v = layer.qkv(x)
    _, lse = nattn.attention(q, k, v, return_lse=True)
    return np.asarray(np.log(weights(q, k)) + lse[:, None])


def test_scores_are_symmetric_only_if_w_q_equals_w_k() -> None:
    """With one matrix for both, i asks j as much as j asks i; with two, asking has a direction.

    The scores are ``x (W_Q W_K^T) x^T``. Weights are not symmetric even so: rows are normalised
    each for itself.
    """
    x = gaussian(40, 16, dtype="f8")
    layer = SelfAttention(16, dtype=np.float64)
    asymmetric = scores(layer, x)
    assert np.abs(asymmetric - asymmetric.T).max() > 1

    layer.params["w_k"][...] = layer.params["w_q"]
    symmetric = scores(layer, x)
    q, k, _ = layer.qkv(x)
    assert (q == k).all()
    budget = error_budget(FLOAT64, 40, (np.abs(q) @ np.abs(k).T).max() / 4, 1.0, 16)
    allowed = budget.lse + budget.out  # the latter of log p: so much is the relative error of p
    assert np.abs(symmetric - symmetric.T).max() <= 2 * allowed
    p = weights(q, k)
    assert np.abs(p - p.T).max() > 0.01


# Order


def test_shuffled_rows_give_shuffled_rows_and_nothing_else() -> None:
    """Attention is blind to order: it takes its input for a set.

    Small whole numbers make projections and scores exact, so that only the order of the sums over
    keys is left to differ.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (100, 16)).astype(float)
    layer = SelfAttention(16, dtype=np.float64)
    for p in layer.params.values():
        p[...] = rng.integers(-1, 2, p.shape)
    shuffle = rng.permutation(100)
    out, shuffled = layer(x), layer(x[shuffle])
    q, k, v = layer.qkv(x)
    size = (np.abs(q) @ np.abs(k).T).max() / 4
    allowed = rounding(100, size, np.abs(v).max(), D=0)
    assert np.abs(shuffled - out[shuffle]).max() <= 2 * allowed
    assert np.abs(shuffled - out).max() > 1  # and the rows did go elsewhere


@pytest.mark.parametrize(
    "scheme",
    [
        lambda: Sinusoidal(16),
        lambda: LearnedTable(100, 16, dtype=np.float64),
        lambda: Rotary(8),
        lambda: Alibi(2),
    ],
    ids=["sinusoidal", "learned table", "rotary", "alibi"],
)
def test_positions_end_the_blindness_to_order(scheme: Callable[[], Any]) -> None:
    """The largest difference is a million times what rounding does without positions."""
    x = gaussian(100, 16, dtype="f8")
    shuffle = np.random.default_rng(0).permutation(100)

    def difference(positions: Any) -> float:
        layer = MultiHeadAttention(16, 2, positions=positions, dtype=np.float64)
        return float(np.abs(layer(x[shuffle]) - layer(x)[shuffle]).max())

    assert difference(scheme()) > 1e6 * max(difference(None), np.finfo(float).eps)


CUTS = [0, 7, 15, 16, 47, 48, 98]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_under_the_causal_mask_no_row_depends_on_later_rows(cut: int, dtype: str) -> None:
    """To the last bit, whatever happens behind the cut, and so do the gradients.

    Of a loss of the rows up to the cut, that of later rows is 0, also as keys and values.
    """
    n = 100
    q, k, v, dout = (gaussian(2, n, 16, seed=i, dtype=dtype) for i in range(4))
    dout[:, cut + 1 :] = 0
    others = [x.copy() for x in (q, k, v)]
    for i, x in enumerate(others):
        x[:, cut + 1 :] = 30 * gaussian(2, n - cut - 1, 16, seed=9 + i, dtype=dtype)

    out, backward = nattn.attention_vjp(q, k, v, causal=True)
    other_out, other_backward = nattn.attention_vjp(*others, causal=True)
    np.testing.assert_array_equal(other_out[:, : cut + 1], out[:, : cut + 1])
    assert (other_out[:, cut + 1 :] != out[:, cut + 1 :]).any()
    for name in ("dq", "dk", "dv"):
        gradient, other = getattr(backward(dout), name), getattr(other_backward(dout), name)
        np.testing.assert_array_equal(other[:, : cut + 1], gradient[:, : cut + 1], err_msg=name)
        assert not gradient[:, cut + 1 :].any(), name
        assert not other[:, cut + 1 :].any(), name

    free, _ = nattn.attention_vjp(q, k, v)  # without the mask every row sees the change
    other_free, _ = nattn.attention_vjp(*others)
    assert (free != other_free).any(axis=2).all()


# The average


def test_outputs_lie_in_the_convex_hull_of_the_values() -> None:
    """In the plane: on the inner side of every edge of the hull, which is all there is to check.

    A polygon is the intersection of the half-planes of its edges, and an edge is a pair of points
    that have all others on one side. For a normal u of an edge, ``u . out <= max_j u . v_j``.
    """
    rng = np.random.default_rng(0)
    points = rng.standard_normal((30, 2))
    q, k = 3 * rng.standard_normal((500, 8)), rng.standard_normal((30, 8))  # some are near corners
    out = nattn.attention(q, k, points)
    size = 3 * math.sqrt(8) * float(np.abs(k).max() * np.abs(q).max())
    allowed = 2 * rounding(30, size, float(np.abs(points).max()), 8)
    edges = 0
    closest = np.inf
    for a, b in itertools.permutations(points, 2):
        outward = np.array([b[1] - a[1], a[0] - b[0]]) / np.linalg.norm(b - a)
        if (points @ outward <= a @ outward + 1e-12).all():
            edges += 1
            depth = a @ outward - out @ outward
            assert (depth >= -allowed).all()
            closest = min(closest, float(depth.min()))
    assert edges >= 3
    assert closest < 0.01  # the edges were reached: a smaller polygon would not do


@pytest.mark.parametrize("Dv", [1, 3, 40])
def test_weights_are_the_proof_that_outputs_lie_in_the_hull(Dv: int) -> None:
    """In any dimension: the output *is* ``sum_j p_j v_j`` with positive p that sum to 1.

    So in every direction u it lies between the least and the largest ``u . v_j``. To look along
    the axes would not do in general: that is a box around the hull. But no test of directions is
    needed where the p are at hand. A few directions are tested all the same.
    """
    q, k, v = (gaussian(60, d, seed=i, dtype="f8") for i, d in enumerate((16, 16, Dv)))
    out, p = nattn.attention(q, k, v), weights(q, k)
    size = float((np.abs(q) @ np.abs(k).T).max()) / 4
    allowed = rounding(60, size, np.abs(v).max(), 16)
    assert (p > 0).all()
    assert np.abs(p @ v - out).max() <= 2 * allowed
    for u in (*np.eye(Dv), *np.random.default_rng(0).standard_normal((200, Dv))):
        along, reach = v @ u, allowed * np.abs(u).sum()
        assert (along.min() - reach <= out @ u).all()
        assert (out @ u <= along.max() + reach).all()


# The price


def pairs_seen(n: int, **args: Any) -> float:
    """Count the pairs of a query and a key that went into a result.

    All scores are 0, so every key that a row sees adds ``exp(0) = 1`` to its sum, whose logarithm
    is lse.
    """
    zero = np.zeros((n, 8), np.float64)
    _, lse = nattn.attention(zero, zero, zero, return_lse=True, **args)
    return float(np.exp(lse).sum())


@pytest.mark.parametrize("n", [100, 512, 1000])
def test_twice_the_rows_are_four_times_the_work(n: int) -> None:
    """Work is counted in pairs, of which each takes ``2 (D + Dv)`` operations: n² of them.

    Under the causal mask ``n (n + 1) / 2``; in a window of 64 only twice as many.
    """
    assert pairs_seen(n) == pytest.approx(n**2, rel=1e-12)
    assert pairs_seen(2 * n) == pytest.approx(4 * pairs_seen(n), rel=1e-12)
    assert pairs_seen(n, causal=True) == pytest.approx(n * (n + 1) / 2, rel=1e-12)
    windows = [pairs_seen(m, window_size=(63, 0)) for m in (n, 2 * n)]
    assert windows[1] - windows[0] == pytest.approx(64 * n, rel=1e-12)


def dense(q: Array, k: Array, v: Array) -> Array:
    """Write attention down as everybody does, with the whole matrix."""
    p = np.exp(q @ k.T / math.sqrt(q.shape[1]))
    return np.asarray((p / p.sum(axis=1, keepdims=True)) @ v)


def peak(function: Callable[..., Any], n: int) -> int:
    """Return the most bytes of arrays that a call has at once, its input and output included."""
    q, k, v = (gaussian(n, 16, seed=i) for i in range(3))
    function(q, k, v)  # what is compiled, and kept for later calls, does not count
    tracemalloc.start()
    try:
        kept = function(q, k, v)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del kept
    return most + q.nbytes + k.nbytes + v.nbytes


def test_twice_the_rows_take_twice_the_memory() -> None:
    """Of all arrays, as Python counts them; and the whole matrix four times as much.

    What a call takes whatever n is, its objects and its scratch, is the less the larger n is: at
    4,000 rows one percent is left.
    """
    sizes = [peak(nattn.attention, n) for n in (4096, 8192)]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.01)
    assert sizes[1] < 8192**2 * 4 / 64  # one byte where the matrix alone takes 64
    dense_sizes = [peak(dense, n) for n in (512, 1024)]
    assert dense_sizes[1] == pytest.approx(4 * dense_sizes[0], rel=0.1)
