"""The bits of dropout: Philox against its known answers and by hand, and what is kept."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nattn
from nattn.functions import dropout


def test_examples() -> None:
    result = doctest.testmod(dropout)
    assert result.failed == 0
    assert result.attempted > 3


def test_users_find_it_beside_the_modifiers() -> None:
    assert nattn.mods.keep is dropout.keep
    assert nattn.mods.philox is dropout.philox
    assert nattn.mods.drop_threshold is dropout.drop_threshold


# Known answers that Random123, the authors' library, is distributed with (kat_vectors).
KNOWN = [
    (6 * ["00000000"], ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
    (6 * ["ffffffff"], ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    (
        ["243f6a88", "85a308d3", "13198a2e", "03707344", "a4093822", "299f31d0"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ),
]

words = st.integers(0, 2**32 - 1)


def words_of(texts: list[str]) -> list[int]:
    return [int(text, 16) for text in texts]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c[0], 2**32)
        hi1, lo1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("given", "answer"), KNOWN)
def test_philox_knows_the_answers(given: list[str], answer: list[str]) -> None:
    arguments = words_of(given)
    assert philox_by_hand(arguments[:4], arguments[4:]) == words_of(answer)
    assert list(dropout.philox(*arguments)) == words_of(answer)  # Python's integers do not wrap
    with np.errstate(all="raise"):
        got = dropout.philox(*(np.array([x], np.int64) for x in arguments))
    assert [int(word[0]) for word in got] == words_of(answer)


@given(st.lists(words, min_size=6, max_size=6))
def test_philox_by_hand(arguments: list[int]) -> None:
    got = dropout.philox(*(np.array([x], np.int64) for x in arguments))
    assert [int(word[0]) for word in got] == philox_by_hand(arguments[:4], arguments[4:])
    assert all(word.dtype == np.int64 for word in got)


@given(st.lists(words, min_size=6, max_size=6), st.integers(-(2**31), 2**31 - 1))
def test_philox_takes_the_low_words(arguments: list[int], above: int) -> None:
    """A word that is sign-extended, or carries something above, is the same word."""
    dirty = [np.array([(above << 32) + x], np.int64) for x in arguments]
    clean = [np.array([x], np.int64) for x in arguments]
    assert [int(w[0]) for w in dropout.philox(*dirty)] == [
        int(w[0]) for w in dropout.philox(*clean)
    ]


def test_philox_mixes_shapes() -> None:
    c0, c1 = np.arange(3)[None, :], np.arange(2)[:, None]
    got = dropout.philox(c0, c1, np.array([[7]]), np.array([[8]]), 5, 6)
    for i in range(2):
        for j in range(3):
            assert [int(w[i, j]) for w in got] == philox_by_hand([j, i, 7, 8], [5, 6])


def keep_by_hand(b: int, h: int, i: int, j: int, seed: int, p: float) -> bool:
    word = philox_by_hand([j // 4, i, h, b], [seed % 2**32, seed // 2**32])[j % 4]
    return word >= p * 2**32


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x123456789ABCDEF0])
def test_keep(seed: int) -> None:
    i, j = np.arange(5), np.arange(11)
    for b, h in ((0, 0), (1, 2), (3, 1)):
        kept = dropout.keep(b, h, i[:, None], j[None, :], seed, 0.25)
        want = [[keep_by_hand(b, h, x, y, seed, 0.25) for y in range(11)] for x in range(5)]
        assert kept.tolist() == want


def test_keep_takes_every_shape() -> None:
    b, h, i, j = np.ogrid[:2, :3, :4, :9]
    whole = dropout.keep(b, h, i, j, seed=5, dropout_p=0.5)
    assert whole.shape == (2, 3, 4, 9)
    assert whole.dtype == bool
    with np.errstate(all="raise"):
        one = dropout.keep(1, 2, 3, 8, seed=5, dropout_p=0.5)
        assert dropout.keep(np.int64(1), 2, 3, np.arange(0), seed=5, dropout_p=0.5).shape == (0,)
    assert one.shape == ()
    assert bool(one) == bool(whole[1, 2, 3, 8])
    part = dropout.keep(1, 2, np.arange(1, 3)[:, None], np.arange(3, 9), seed=5, dropout_p=0.5)
    assert part.tolist() == whole[1, 2, 1:3, 3:9].tolist()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keep_has_the_right_mean(p: float) -> None:
    """Within six standard deviations, over all and in every part of the indices."""
    b, h, i, j = np.ogrid[:4, :4, :64, :64]
    kept = dropout.keep(b, h, i, j, seed=3, dropout_p=p)
    for axis in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        count = math.prod(kept.shape[n] for n in axis)
        spread = 6 * math.sqrt(p * (1 - p) / count)
        assert np.abs(kept.mean(axis) - (1 - p)).max() <= spread


def test_keep_depends_on_everything() -> None:
    """Shifting any index, or changing any bit of the seed, leaves no more than chance in common."""
    b, h, i, j = np.ogrid[:2, :2, :32, :32]
    kept = dropout.keep(b, h, i, j, 0, 0.5)
    others = [
        dropout.keep(b + 1, h, i, j, 0, 0.5),
        dropout.keep(b, h + 1, i, j, 0, 0.5),
        dropout.keep(b, h, i + 1, j, 0, 0.5),
        dropout.keep(b, h, i, j + 1, 0, 0.5),
    ]
    others += [dropout.keep(b, h, i, j, 1 << bit, 0.5) for bit in range(64)]
    others.append(np.swapaxes(kept, 2, 3))
    for other in others:
        assert abs(np.mean(kept == other) - 0.5) <= 6 * 0.5 / math.sqrt(kept.size)


def test_drop_threshold() -> None:
    assert dropout.drop_threshold(0.0) == 0
    assert dropout.drop_threshold(0.5) == 2**31
    assert dropout.drop_threshold(0.1) == round(0.1 * 2**32)
    assert dropout.drop_threshold(math.nextafter(1.0, 0.0)) == 2**32 - 1  # the last word is kept
    assert dropout.drop_threshold(2.0**-33) == 0
    assert isinstance(dropout.drop_threshold(np.float64(0.3)), int)
