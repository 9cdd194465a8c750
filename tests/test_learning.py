"""Layers that learn: gradients are right, and what attention learns follows from what it sees."""

from __future__ import annotations

import doctest
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from nattn.applications.learning import Adam, Curve, Network, cross_entropy, network, tasks
from nattn.positional import LearnedTable, Rotary, Sinusoidal

Array = NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of short calls: the threads of several test processes would wait for each other."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    with threadpool_limits(1, "blas"):
        yield
    numba.set_num_threads(before)


def test_examples() -> None:
    for module in (network, tasks):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 0


# Gradients of the whole network


SCHEMES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "sinusoidal": lambda: Sinusoidal(8),
    "learned table": lambda: LearnedTable(6, 8, dtype=np.float64),  # which both layers share
    "rotary": lambda: Rotary(4),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_finite_differences(scheme: str, causal: bool) -> None:
    """Of every parameter, along random directions of length 1.

    The five-point formula with step h errs by ``h**4 / 30`` fifth derivatives, 3e-14 of them, and
    by the rounding of losses near 1, some 1e-15 / h: together far less than 1e-9.
    """
    rng = np.random.default_rng(0)
    network = Network(
        *(7, 5),
        d_model=8,
        num_heads=2,
        layers=2,
        positions=SCHEMES[scheme](),
        dtype=np.float64,
        causal=causal,
    )
    tokens, targets = rng.integers(0, 7, (3, 6, 2)), rng.integers(0, 5, (3, 2))

    def loss() -> float:
        return float(cross_entropy(network.vjp(tokens, 2)[0], targets)[0].mean())

    logits, backward = network.vjp(tokens, 2)
    grads = backward(cross_entropy(logits, targets)[1])
    assert grads.keys() == network.params.keys()
    h = 1e-3
    for name, p in network.params.items():
        assert grads[name].shape == p.shape
        for _ in range(3):
            direction = rng.standard_normal(p.shape)
            direction /= np.linalg.norm(direction)
            start = p.copy()
            at = {}
            for steps in (-2, -1, 1, 2):
                p[...] = start + steps * h * direction
                at[steps] = loss()
            p[...] = start
            slope = (at[-2] - 8 * at[-1] + 8 * at[1] - at[2]) / (12 * h)
            assert abs((grads[name] * direction).sum() - slope) < 1e-9, name


def test_cross_entropy_and_its_gradient() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((2, 3, 4)), rng.integers(0, 4, (2, 3))
    losses, dlogits = cross_entropy(logits, targets)
    for at in np.ndindex(2, 3):
        p = np.exp(logits[at]) / np.exp(logits[at]).sum()
        assert losses[at] == pytest.approx(-math.log(p[targets[at]]), rel=1e-12)
        expected = (p - np.eye(4)[targets[at]]) / 6
        np.testing.assert_allclose(dlogits[at], expected, rtol=0, atol=1e-15)


def test_cross_entropy_of_large_logits() -> None:
    losses, dlogits = cross_entropy(np.array([[1e4, 0.0, -1e4]], np.float32), np.array([2]))
    assert losses.tolist() == [2e4]
    assert dlogits.tolist() == [[1.0, 0.0, -1.0]]


def test_adam_takes_the_steps_of_its_definition() -> None:
    x = np.array([2.0, -1.0])
    adam = Adam({"x": x}, rate=0.1, beta1=0.5, beta2=0.75, eps=0.0)
    first, second = np.array([3.0, -4.0]), np.array([-1.0, -4.0])
    adam.step({"x": first})
    np.testing.assert_allclose(x, [1.9, -0.9], rtol=1e-14)  # by the rate, whatever the size
    adam.step({"x": second}, factor=0.5)
    mean = (0.25 * first + 0.5 * second) / (1 - 0.5**2)
    square = (0.1875 * first**2 + 0.25 * second**2) / (1 - 0.75**2)
    expected = [1.9, -0.9] - 0.5 * 0.1 * mean / np.sqrt(square)
    np.testing.assert_allclose(x, expected, rtol=1e-14)


# Lists


@pytest.mark.parametrize("repeats", [1, 2])
def test_lists_are_what_they_say(repeats: int) -> None:
    tokens = tasks.lists(np.random.default_rng(0), 500, repeats)
    for one, answer, other in zip(
        tokens, tasks.answers(tokens), tasks.answers(tasks.mirrored(tokens)), strict=True
    ):
        *pairs, (asked, question) = one.tolist()
        assert question == tasks.QUESTION
        keys, values = zip(*pairs, strict=True)
        assert set(Counter(keys).values()) == {repeats}
        assert len(set(values)) == tasks.PAIRS
        assert max(keys) < tasks.KEYS <= min(values)
        assert max(values) < tasks.QUESTION
        found = [value - tasks.KEYS for key, value in pairs if key == asked]
        assert answer == found[-1]
        assert other == found[0]


@pytest.fixture(scope="module")
def seeing() -> tuple[Curve, Curve]:
    """Lookup and order, learned by one network with positions."""
    return tasks.learn_lists(steps=500)


@pytest.fixture(scope="module")
def blind() -> tuple[Curve, Curve]:
    """The same without positions."""
    return tasks.learn_lists(positions=False, steps=500)


def test_with_positions_one_network_learns_lookup_and_order(seeing: tuple[Curve, Curve]) -> None:
    """A guess is right in an eighth or half of the lists; one wrong in twenty is no guess.

    The loss then is far below that of a guess, too, if the network knows when it does not know.
    """
    lookup, order = seeing
    assert lookup.network is order.network
    for curve in seeing:
        assert curve.accuracy > 0.95
        assert curve.end_loss < curve.chance / 4
        assert curve.losses[:10].mean() > curve.losses[-50:].mean() + 1


def test_without_positions_it_learns_lookup(blind: tuple[Curve, Curve]) -> None:
    lookup, _ = blind
    assert lookup.accuracy > 0.95
    assert lookup.end_loss < lookup.chance / 4


def test_without_positions_it_fails_at_order(blind: tuple[Curve, Curve]) -> None:
    """The bound of `learn_lists`, for float32: rounding moves the loss by some 1e-6."""
    _, order = blind
    assert order.chance == math.log(2)
    assert order.end_loss > math.log(2) - 1e-4
    assert order.accuracy < 0.51


def in_float64(network: Network, positions: Any) -> Network:
    sizes = {"d_model": 32, "num_heads": 4, "layers": 1}
    symbols, answers = tasks.QUESTION + 1, tasks.VALUES
    wide = Network(symbols, answers, positions=positions, dtype=np.float64, **sizes)
    for name, p in network.params.items():
        wide.params[name][...] = p
    return wide


def chances(network: Network, tokens: Array, answers: Array) -> Array:
    """Return the probabilities that a network gives certain answers."""
    losses, _ = cross_entropy(network.vjp(tokens, 1)[0], answers)
    return np.exp(-losses[:, 0])


def test_why_it_fails_at_order(blind: tuple[Curve, Curve], seeing: tuple[Curve, Curve]) -> None:
    """A list and its mirror image are the same to it: p + p' <= 1 for their right answers.

    In float64, where rounding changes no probability by more than 1e-9. It has learned as much as
    there is to learn: one of the two it has to be.
    """
    tokens = tasks.lists(np.random.default_rng(5), 500, 2)
    image = tasks.mirrored(tokens)
    first, last = tasks.answers(image), tasks.answers(tokens)
    network = in_float64(blind[1].network, None)
    p, p_image = chances(network, tokens, last), chances(network, image, first)
    assert (p + p_image < 1 + 1e-9).all()
    np.testing.assert_allclose(chances(network, tokens, first), p_image, rtol=0, atol=1e-9)
    assert (p + p_image).mean() > 0.9

    network = in_float64(seeing[1].network, Sinusoidal(32))
    p, p_image = chances(network, tokens, last), chances(network, image, first)
    assert (p + p_image).mean() > 1.8


# Text


def test_entropies_are_those_of_the_best_guesses() -> None:
    """Tables of frequencies reach them, and so does no table that is a little different."""
    numbers = tasks.encode(tasks.TEXT, tasks.alphabet(tasks.TEXT))
    tokens, targets = tasks.windows(numbers)
    pairs = list(zip(tokens.ravel().tolist(), targets.ravel().tolist(), strict=True))
    single, double = Counter(b for _, b in pairs), Counter(pairs)
    first = Counter(a for a, _ in pairs)
    n = len(pairs)
    unigram, bigram = tasks.entropies(tokens, targets)
    assert unigram == pytest.approx(-sum(math.log(single[b] / n) for _, b in pairs) / n)
    expected = -sum(math.log(double[a, b] / first[a]) for a, b in pairs) / n
    assert bigram == pytest.approx(expected)
    worse = -sum(math.log(0.99 * double[a, b] / first[a] + 0.01 * single[b] / n) for a, b in pairs)
    assert bigram < worse / n < unigram


def test_windows_hold_each_pair_of_neighbours_once() -> None:
    tokens, targets = tasks.windows(np.arange(200), 64)
    assert tokens.shape == targets.shape == (3, 64)
    assert tokens.ravel().tolist() == list(range(192))
    assert (targets == tokens + 1).all()
    assert tasks.windows(np.arange(65), 64)[0].shape == (1, 64)
    assert tasks.windows(np.arange(64), 64)[0].shape == (0, 64)


def test_under_the_causal_mask_it_learns_a_text() -> None:
    """Attention lifts it above all that sees the last character alone, which is a bound.

    The same network, whose rows may look at themselves only, stays on the other side of that
    bound, though it learns as well.
    """
    curve = tasks.learn_text(steps=150)
    unigram, bigram = curve.levels.values()
    assert curve.chance == bigram < unigram
    assert curve.end_loss < bigram - 0.25
    alone = tasks.learn_text(steps=60, window_size=(0, 0))
    assert bigram < alone.end_loss < unigram - 0.25


def test_no_later_character_is_seen() -> None:
    numbers = tasks.encode(tasks.TEXT[:400], tasks.alphabet(tasks.TEXT))
    network = tasks.learn_text(tasks.TEXT, steps=1).network
    tokens = numbers[:64][None]
    logits, _ = network.vjp(tokens)
    for t in (0, 15, 16, 62):
        other = tokens.copy()
        other[:, t + 1 :] = numbers[300 : 300 + 63 - t]
        changed, _ = network.vjp(other)
        np.testing.assert_array_equal(changed[:, : t + 1], logits[:, : t + 1])
        assert not (changed[:, t + 1 :] == logits[:, t + 1 :]).all()


# Runs


def test_equal_seeds_give_equal_curves() -> None:
    for learn in (tasks.learn_lists, lambda **args: (tasks.learn_text(**args),)):
        one, same, other = (learn(steps=3, seed=seed) for seed in (1, 1, 2))
        for a, b, c in zip(one, same, other, strict=True):
            np.testing.assert_array_equal(a.losses, b.losses)
            assert a.end_loss == b.end_loss
            assert (a.losses != c.losses).all()


def test_all_tasks_are_learned_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("learn_lists", "learn_text"):
        monkeypatch.setattr(tasks, name, functools.partial(getattr(tasks, name), steps=4))
    seen: list[float] = []
    curves = tasks.learn_all(seen.append)
    names = ["lookup", "order", "blind lookup", "blind order", "text"]
    assert [curve.name for curve in curves] == names
    assert len({curve.label for curve in curves}) == 5
    assert seen == sorted(seen)
    assert len(seen) == 12
    assert seen[-1] == pytest.approx(1)
    for curve in curves:
        assert curve.losses.shape == (4,)
        assert np.isfinite(curve.losses).all()
        assert curve.chance in curve.levels.values()
    assert len(tasks.learn_all()) == 5  # without anybody who watches


# Bad input


def small(**changes: Any) -> Network:
    return Network(
        **{"symbols": 5, "answers": 5, "d_model": 8, "num_heads": 2, "layers": 1} | changes
    )


@pytest.mark.parametrize("name", ["symbols", "answers", "layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_bad_sizes(name: str, value: Any) -> None:
    error = ValueError if type(value) is int else TypeError
    with pytest.raises(error, match=rf"^{name}: expected an integer of at least 1, got {value!r}"):
        small(**{name: value})


@pytest.mark.parametrize(
    ("tokens", "rows", "error", "text"),
    [
        ([[0.5]], None, TypeError, "tokens: expected integers, got dtype float64"),
        ([1, 2], None, ValueError, r"tokens: expected shape .*, got \(2,\)"),
        ([[1, 5]], None, ValueError, "tokens: expected 0 to 4, got 1 to 5"),
        ([[1, -1]], None, ValueError, "tokens: expected 0 to 4, got -1 to 1"),
        ([[1, 2]], 3, ValueError, "rows: expected at most the 2 of the tokens, got 3"),
        ([[1, 2]], 0, ValueError, "rows: expected an integer of at least 1, got 0"),
    ],
)
def test_bad_tokens(tokens: Any, rows: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="^" + text):
        small().vjp(tokens, rows)


def test_bad_runs() -> None:
    with pytest.raises(ValueError, match=r"^steps: expected an integer of at least 1, got 0"):
        tasks.learn_lists(steps=0)
    with pytest.raises(ValueError, match=r"^text: expected more than 64 characters, got 3"):
        tasks.learn_text("abc")
    with pytest.raises(ValueError, match=r"^text: expected characters of 'ab', got \['c'\]"):
        tasks.encode("abc", "ab")
