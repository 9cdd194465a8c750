"""What a closure captures is bound: read at each call, compiled once, and it can learn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import nattn
from nattn.functions.binding import MASK_MOD, SCORE_MOD, resolve
from nattn.functions.on_lanes import UserCode

Array = NDArray[Any]
Mod = Callable[..., Any]

RNG = np.random.default_rng(0)
Q, K, V, DOUT = RNG.standard_normal((4, 2, 30, 8))
TABLE = RNG.standard_normal(30)


def amplifier(gain: Any) -> Mod:
    def amplified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * gain

    return amplified


def weighing(w: Any) -> Mod:
    def weighed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + w[kv_idx]

    return weighed


def bound_gain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, gain: Any) -> Any:
    return score * gain


def bound_weight(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, w: Any) -> Any:
    return score + w[kv_idx]


def code_of(mod: Mod) -> Any:
    return UserCode.of(resolve("score_mod", mod, SCORE_MOD)).key


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_captured_and_bound_give_the_same_bits(backend: str, dtype: str) -> None:
    w = TABLE.astype(dtype)
    pairs = [
        (amplifier(1.5), functools.partial(bound_gain, gain=1.5)),
        (amplifier(np.array(1.5, dtype)), functools.partial(bound_gain, gain=1.5)),
        (weighing(w), functools.partial(bound_weight, w=w)),
        (weighing(w[::-1]), functools.partial(bound_weight, w=w[::-1])),
    ]
    for captured, bound in pairs:
        found = [nattn.attention(Q, K, V, score_mod=x, backend=backend) for x in (captured, bound)]
        np.testing.assert_array_equal(*found)


def test_what_is_captured_learns_under_its_name() -> None:
    name = "score_mod.w"
    for backend in ("cpu", "reference"):
        found = []
        for mod in (weighing(TABLE), functools.partial(bound_weight, w=TABLE)):
            _, vjp = nattn.attention_vjp(Q, K, V, score_mod=mod, backend=backend)
            found.append(vjp(DOUT, wrt=("q", name)).dmods[name])
        np.testing.assert_array_equal(found[0], found[1])
        assert found[0].shape == TABLE.shape
        assert np.abs(found[0]).max() > 0.01


def test_another_number_is_no_other_code() -> None:
    """2,000 closures, each with a number of its own, are one function to compile."""
    assert len({code_of(amplifier(float(n))) for n in range(2000)}) == 1
    assert code_of(amplifier(1.0)) != code_of(amplifier(1))  # of another type
    first, second = (nattn.attention(Q, K, V, score_mod=amplifier(x)) for x in (0.5, 2.0))
    assert not np.array_equal(first, second)


def test_a_cell_is_read_at_each_call() -> None:
    gain = 1.0

    def amplified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * gain

    found = []
    for gain in (1.0, 3.0):
        expected = nattn.attention(Q, K, V, score_mod=functools.partial(bound_gain, gain=gain))
        found.append(nattn.attention(Q, K, V, score_mod=amplified))
        np.testing.assert_array_equal(found[-1], expected)
    assert not np.array_equal(*found)


def test_keyword_defaults_are_bound() -> None:
    def amplified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, gain: Any = 1.5) -> Any:
        return score * gain

    for mod, gain in ((amplified, 1.5), (functools.partial(amplified, gain=0.5), 0.5)):
        expected = nattn.attention(Q, K, V, score_mod=functools.partial(bound_gain, gain=gain))
        np.testing.assert_array_equal(nattn.attention(Q, K, V, score_mod=mod), expected)


def test_masks_of_closures_combine() -> None:
    def near(width: int) -> Mod:
        return lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < width

    def same(kind: Array) -> Mod:
        return lambda b, h, q_idx, kv_idx: kind[q_idx] == kind[kv_idx]

    kind = RNG.integers(0, 3, 30)
    mask_mod = nattn.mask(near(7)) & ~nattn.mask(same(kind))
    i, j = np.ogrid[:30, :30]
    dense = (abs(i - j) < 7) & (kind[i] != kind[j])
    found = nattn.attention(Q, K, V, mask_mod=mask_mod)
    np.testing.assert_allclose(found, nattn.attention(Q, K, V, mask=dense), rtol=0, atol=1e-14)
    trees = [resolve("mask_mod", near(n), MASK_MOD) for n in (3, 9)]
    assert UserCode.of(trees[0]) == UserCode.of(trees[1])


def test_helpers_that_are_closures() -> None:
    def outer(a: float, w: Array) -> Mod:
        def part(x: Any) -> Any:
            return x * a

        def whole(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return part(score) + w[q_idx]

        return whole

    for a in (0.5, 2.0):
        found = [
            nattn.attention(Q, K, V, score_mod=outer(a, TABLE), backend=x)
            for x in ("cpu", "reference")
        ]
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-13)
        plain = nattn.attention(Q, K, V, scale=a / np.sqrt(8), backend="reference")
        # what is added depends on the query alone: the softmax does not see it
        np.testing.assert_allclose(found[0], plain, rtol=0, atol=1e-13)


GAIN = 1.5


def of_a_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * GAIN


def test_a_global_stays_a_constant() -> None:
    _, vjp = nattn.attention_vjp(Q, K, V, score_mod=of_a_global, backend="reference")
    with pytest.raises(ValueError, match=r"^wrt: .* got 'score_mod\.GAIN'"):
        vjp(DOUT, wrt=("score_mod.GAIN",))
    expected = nattn.attention(Q, K, V, score_mod=functools.partial(bound_gain, gain=1.5))
    np.testing.assert_array_equal(nattn.attention(Q, K, V, score_mod=of_a_global), expected)


def test_what_cannot_be_bound_is_refused_by_name() -> None:
    mod = amplifier("loud")
    with pytest.raises(TypeError, match=r"^score_mod: "):
        nattn.attention(Q, K, V, score_mod=mod)
    masked = np.ma.masked_array(TABLE, TABLE > 0)
    with pytest.raises(TypeError, match="masked array"):
        nattn.attention(Q, K, V, score_mod=weighing(masked))
