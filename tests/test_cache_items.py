"""Caches whose items change places, are read, and give room back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_cases import in_8_bits, normal

import nattn

B, HKV, D, DV = 3, 2, 8, 5


def made(kind: str, quantize: str | None, dtype: Any = np.float32) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "quantize": quantize}
    if kind == "pages":
        pool = nattn.PagedKVCache(9, 4, HKV, D, DV, grow=True, **options)
        return pool.view([pool.new() for _ in range(B)])
    window = 30 if kind == "ring" else None
    return nattn.KVCache(B, HKV, D, DV, capacity=7, window=window, **options)


def rows(n: int, items: int = B, dtype: Any = np.float32, seed: int = 0) -> tuple[Any, Any]:
    return normal(items, n, HKV, D, dtype=dtype, seed=seed), normal(
        items, n, HKV, DV, dtype=dtype, seed=seed + 1
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("kind", ["in one piece", "ring", "pages"])
def test_items_change_places(kind: str, quantize: str | None, dtype: Any) -> None:
    cache = made(kind, quantize, dtype)
    k, v = rows(9, dtype=dtype)
    lens = np.array([9, 4, 6])
    cache.append(k, v, lens)
    if quantize is not None:
        k, v = (in_8_bits(x).astype(dtype) for x in (k, v))
    for x in (k, v):
        x[np.arange(9) >= lens[:, None]] = 0

    def check(begin: int = 0) -> None:
        most = int(lens.max())
        assert (cache.batch, cache.lengths.tolist()) == (len(lens), lens.tolist())
        for found, x in zip(cache.read(begin), (k, v), strict=True):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, x[:, begin:most])

    check()
    check(5)
    check(9)
    for items in ([2, 0, 2], [1, 1, 0, 2], [3, 1], [0]):
        cache.select(items)
        k, v, lens = k[items], v[items], lens[items]
        check()
    cache.select(np.array([0, 0]))  # and what is added to one is not in the other
    new = rows(2, 2, dtype, seed=9)
    cache.append(*new)
    if quantize is not None:
        new = in_8_bits(new[0]).astype(dtype), in_8_bits(new[1]).astype(dtype)
    k, v = (
        np.concatenate([np.repeat(x[:, : lens[0]], 2, axis=0), y], axis=1)
        for x, y in zip((k, v), new, strict=True)
    )
    lens = np.repeat(lens, 2) + 2
    check()
    q = np.repeat(normal(1, 1, 4, D, dtype=dtype), 2, axis=0)
    out = cache.attend(q)
    assert not np.array_equal(out[0], out[1])
    if quantize is None:
        whole = made(kind, None, dtype)
        whole.select([0, 1])
        whole.append(k, v)
        np.testing.assert_array_equal(out, whole.attend(q))


def test_pages_are_shared_and_given_back() -> None:
    pool = nattn.PagedKVCache(12, 4, HKV, D)
    view = pool.view([pool.new(), pool.new()])
    other = pool.new()
    view.append(*normal(2, 2, 16, HKV, D))
    assert pool.free_pages == 4
    first = view.seq_ids[0]
    view.select([0, 0, 0])
    assert pool.free_pages == 8
    assert view.seq_ids[0] == first
    assert sorted([other, *view.seq_ids]) == sorted(pool.sequences)
    view.select([])
    assert (pool.free_pages, pool.sequences) == (12, [other])


def test_a_ring_gives_back_what_a_long_chunk_took() -> None:
    cache = nattn.KVCache(B, HKV, D, DV, window=5)
    k, v = rows(80)
    q = normal(B, 1, 4, D)
    cache.append(k[:, :60], v[:, :60])
    assert cache.capacity == 65
    for n in range(60, 80):
        cache.append(k[:, n : n + 1], v[:, n : n + 1], lens=[1, 1, n % 2])
        assert cache.capacity == 6
        out = cache.attend(q)
        np.testing.assert_array_equal(cache.read(n - 4)[0][0], k[0, n - 4 : n + 1])
        whole = nattn.attention(
            q, k[:, : n + 1], v[:, : n + 1], causal=True, window_size=(5, 0), layout="bnhd"
        )
        np.testing.assert_allclose(out[:2], whole[:2], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="begin: expected a key from 74 to 80, got 70"):
        cache.read(70)
    roomy = nattn.KVCache(B, HKV, D, DV, window=5, capacity=50)
    for n in (60, 1):
        roomy.append(*rows(n))
    assert roomy.capacity == 65


def test_refused() -> None:
    for kind in ("in one piece", "pages"):
        cache = made(kind, None)
        cache.append(*rows(4))
        for error, items in (
            (ValueError, [0, 3]),
            (ValueError, [-1]),
            (TypeError, [[0]]),
            (TypeError, [0.5]),
            (TypeError, 0),
            (TypeError, "0"),
        ):
            with pytest.raises(error, match="items"):
                cache.select(items)
        with pytest.raises(ValueError, match="begin: expected a key from 0 to 4, got 5"):
            cache.read(5)
        with pytest.raises(TypeError, match="begin: expected"):
            cache.read(1.5)
        assert cache.lengths.tolist() == [4, 4, 4]
