"""nattn.KVCache and nattn.PagedKVCache, against lists of what was appended."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_cases import Array, check, in_8_bits, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import nattn
from nattn.call.quantised import ROUNDING, quantise

HKV, HQ, D, DV = 2, 4, 8, 4
INT8 = pytest.mark.parametrize("quantize", [None, "int8"], ids=["plain", "int8"])


class Rows:
    """Makes rows, each other than all before."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, dtype=np.float32)


def bits(cache: Any) -> list[bytes]:
    return [
        x.tobytes() for x in (cache.k, cache.v, cache.k_scales, cache.v_scales) if x is not None
    ]


# State machines


class PagedMachine(RuleBasedStateMachine):
    """Any sequence of append, fork, truncate and release, with lists as the oracle."""

    @initialize(quantize=st.sampled_from([None, "int8"]), grow=st.booleans())
    def make(self, quantize: str | None, grow: bool) -> None:
        self.rows = Rows()
        self.int8 = quantize is not None
        self.cache = nattn.PagedKVCache(9, 4, HKV, D, DV, quantize=quantize, grow=grow)
        self.k: dict[int, Array] = {}
        self.v: dict[int, Array] = {}

    def some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.k)), unique=True, max_size=3))

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.k)))

    @rule()
    def new(self) -> None:
        x = self.cache.new()
        assert x not in self.k
        self.k[x], self.v[x] = self.rows(0, HKV, D), self.rows(0, HKV, DV)

    @precondition(lambda self: self.k)
    @rule(data=st.data(), n=st.integers(0, 9))
    def append(self, data: st.DataObject, n: int) -> None:
        ids = self.some(data)
        k, v = self.rows(len(ids), n, HKV, D), self.rows(len(ids), n, HKV, DV)
        lens = data.draw(
            st.none() | st.lists(st.integers(0, n), min_size=len(ids), max_size=len(ids))
        )
        real = [n] * len(ids) if lens is None else lens
        before, table = bits(self.cache), self.cache.block_table(sorted(self.k))
        try:
            self.cache.append(ids, k, v, lens)
        except MemoryError:
            assert not self.cache.grow
            assert bits(self.cache) == before
            np.testing.assert_array_equal(self.cache.block_table(sorted(self.k)), table)
            return
        for b, (x, m) in enumerate(zip(ids, real, strict=True)):
            self.k[x] = np.concatenate([self.k[x], k[b, :m]])
            self.v[x] = np.concatenate([self.v[x], v[b, :m]])

    @precondition(lambda self: self.k)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        x = self.one(data)
        free = self.cache.free_pages
        copy = self.cache.fork(x)
        assert self.cache.free_pages == free
        self.k[copy], self.v[copy] = self.k[x], self.v[x]

    @precondition(lambda self: self.k)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        x = self.one(data)
        n = data.draw(st.integers(0, len(self.k[x])))
        self.cache.truncate(x, n)
        self.k[x], self.v[x] = self.k[x][:n], self.v[x][:n]

    @precondition(lambda self: self.k)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        x = self.one(data)
        self.cache.release(x)
        del self.k[x], self.v[x]

    @precondition(lambda self: self.k)
    @rule(data=st.data(), Nq=st.integers(1, 3), causal=st.booleans())
    def attend(self, data: st.DataObject, Nq: int, causal: bool) -> None:
        ids = self.some(data)
        if not ids:
            return
        q = self.rows(len(ids), Nq, HQ, D)
        result = self.cache.attend(ids, q, causal=causal, return_lse=True)
        k, v = [self.k[x] for x in ids], [self.v[x] for x in ids]
        check(result, q, k, v, int8=self.int8, causal=causal)

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        ids = sorted(self.k)
        assert self.cache.sequences == ids
        np.testing.assert_array_equal(self.cache.lengths(ids), [len(self.k[x]) for x in ids])
        table = self.cache.block_table(ids)
        used = [row[row >= 0].tolist() for row in table]
        assert [len(pages) for pages in used] == [-(-len(self.k[x]) // 4) for x in ids]
        taken = {page for pages in used for page in pages}
        assert len(taken) + self.cache.free_pages == self.cache.pages

    @invariant()
    def every_row_is_there(self) -> None:
        for x in getattr(self, "k", {}):
            pages = self.cache.block_table([x])[0]
            arrays = (
                (self.cache.k, self.cache.k_scales, self.k),
                (
                    self.cache.v,
                    self.cache.v_scales,
                    self.v,
                ),
            )
            for pool, scales, rows in arrays:
                found = pool[pages].reshape(-1, *pool.shape[2:])[: len(rows[x])]
                if scales is None:
                    np.testing.assert_array_equal(found, rows[x])
                    continue
                factors = scales[pages].reshape(-1, HKV)[: len(rows[x])]
                np.testing.assert_array_equal(found * factors[..., None], in_8_bits(rows[x]))


class ContiguousMachine(RuleBasedStateMachine):
    """Any sequence of append, truncate and attend, of a cache in one piece or a ring."""

    @initialize(
        quantize=st.sampled_from([None, "int8"]),
        window=st.sampled_from([None, 0, 3, 10]),
        capacity=st.sampled_from([None, 1, 7]),
    )
    def make(self, quantize: str | None, window: int | None, capacity: int | None) -> None:
        self.rows, self.int8, self.window, self.last = Rows(), quantize is not None, window, 0
        self.cache = nattn.KVCache(
            2, HKV, D, DV, capacity=capacity, window=window, quantize=quantize
        )
        self.k = [self.rows(0, HKV, D) for _ in range(2)]
        self.v = [self.rows(0, HKV, DV) for _ in range(2)]

    @rule(n=st.integers(0, 9), data=st.data(), attend=st.booleans())
    def step(self, n: int, data: st.DataObject, attend: bool) -> None:
        """Append a chunk, and mostly attend with its queries, which see their windows."""
        k, v = self.rows(2, n, HKV, D), self.rows(2, n, HKV, DV)
        lens = data.draw(st.none() | st.lists(st.integers(0, n), min_size=2, max_size=2))
        real = [n, n] if lens is None else lens
        self.cache.append(k, v, lens)
        self.k = [np.concatenate([x, new[:m]]) for x, new, m in zip(self.k, k, real, strict=True)]
        self.v = [np.concatenate([x, new[:m]]) for x, new, m in zip(self.v, v, real, strict=True)]
        self.last = min(real)
        if not attend:
            return
        q = self.rows(2, n, HQ, D)
        result = self.cache.attend(q, q_lens=real, causal=True, return_lse=True)
        options = {} if self.window is None else {"window_size": (self.window, 0)}
        check(result, q, self.k, self.v, int8=self.int8, q_lens=real, causal=True, **options)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        lengths = [len(x) for x in self.k]
        most = [self.last if self.window is not None else n for n in lengths]
        keep = [n - data.draw(st.integers(0, m)) for n, m in zip(lengths, most, strict=True)]
        self.cache.truncate(keep)
        self.k = [x[:n] for x, n in zip(self.k, keep, strict=True)]
        self.v = [x[:n] for x, n in zip(self.v, keep, strict=True)]
        self.last = 0

    @rule()
    def clear(self) -> None:
        self.cache.truncate(0)
        self.k, self.v = [x[:0] for x in self.k], [x[:0] for x in self.v]

    @invariant()
    def lengths_are_those(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.lengths.tolist() == [len(x) for x in self.k]


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestContiguous = ContiguousMachine.TestCase
TestContiguous.settings = settings(max_examples=80, stateful_step_count=15, deadline=None)


# The same tokens one by one, in chunks and at once


@INT8
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_every_cache_and_every_way_to_fill_it(dtype: Any, quantize: str | None) -> None:
    N = 13
    q = normal(2, N, HQ, D, dtype=dtype)
    k, v = normal(2, N, HKV, D, dtype=dtype, seed=1), normal(2, N, HKV, DV, dtype=dtype, seed=2)
    int8 = quantize is not None
    for chunks in ([N], [1] * N, [5, 1, 7]):
        outs = []
        for kind in ("contiguous", "ring", "paged"):
            cache: Any
            if kind == "paged":
                pool = nattn.PagedKVCache(9, 4, HKV, D, DV, dtype=dtype, quantize=quantize)
                cache = pool.view([pool.new(), pool.new()])
            else:
                window = N if kind == "ring" else None
                made: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "window": window}
                cache = nattn.KVCache(2, HKV, D, DV, capacity=2, **made)
            done, out = 0, []
            for n in chunks:
                rows = slice(done, done + n)
                cache.append(k[:, rows], v[:, rows])
                out.append(cache.attend(q[:, rows], causal=True, return_lse=True))
                done += n
            outs.append([np.concatenate([x[i] for x in out], axis=1 + i) for i in range(2)])
        for other in outs[1:]:
            for x, y in zip(outs[0], other, strict=True):
                np.testing.assert_array_equal(x, y)
        check((outs[0][0], outs[0][1]), q, list(k), list(v), int8=int8, causal=True)


def test_a_window_that_forgets() -> None:
    """D5: a window of each item's own positions, in a ring that is written over many times."""
    cache = nattn.KVCache(2, HKV, D, DV, window=5)
    rows = Rows()
    ks, vs = [rows(0, HKV, D) for _ in range(2)], [rows(0, HKV, DV) for _ in range(2)]
    for n in (3, 1, 1, 6, 1, 2, 1, 1, 4) * 3:
        k, v, q = rows(2, n, HKV, D), rows(2, n, HKV, DV), rows(2, n, HQ, D)
        lens = [n, max(0, n - 1)]
        cache.append(k, v, lens)
        ks = [np.concatenate([x, new[:m]]) for x, new, m in zip(ks, k, lens, strict=True)]
        vs = [np.concatenate([x, new[:m]]) for x, new, m in zip(vs, v, lens, strict=True)]
        result = cache.attend(q, q_lens=lens, return_lse=True)
        check(result, q, ks, vs, q_lens=lens, window_size=(5, 0))
        result = cache.attend(q, q_lens=lens, return_lse=True, window_size=(2, 1), sinks=[0.5] * 4)
        check(result, q, ks, vs, q_lens=lens, window_size=(2, 1), sinks=[0.5] * 4)
    assert cache.capacity == 5 + 6
    with pytest.raises(ValueError, match="window_size: expected at most 5 keys to the left"):
        cache.attend(rows(2, 1, HQ, D), window_size=(6, 0))
    with pytest.raises(ValueError, match="window_size: expected at most 5 keys to the left"):
        cache.attend(rows(2, 1, HQ, D), window_size=(None, 0))
    with pytest.raises(ValueError, match="see no key before"):
        cache.attend(rows(2, 9, HQ, D))
    with pytest.raises(ValueError, match="see no key before"):
        cache.attend(rows(2, 1, HQ, D), q_offset=8)
    lengths = cache.lengths
    with pytest.raises(ValueError, match="are written over"):
        cache.truncate(lengths - 7)
    np.testing.assert_array_equal(cache.lengths, lengths)


def test_modifiers_in_a_ring_get_positions() -> None:
    cache = nattn.KVCache(1, HKV, D, DV, window=6)
    rows = Rows()
    k, v, q = rows(1, 50, HKV, D), rows(1, 50, HKV, DV), rows(1, 50, HQ, D)
    options: dict[str, Any] = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + 0.1 * (kv_idx % 7) - 0.01 * q_idx,
        "alibi_slopes": [0.1, 0.2, 0.3, 0.4],
    }
    for n in range(50):
        cache.append(k[:, n : n + 1], v[:, n : n + 1])
    result = cache.attend(q[:, -1:], return_lse=True, **options)
    check(result, q[:, -1:], [k[0]], [v[0]], window_size=(6, 0), **options)


def test_views_and_growth() -> None:
    cache = nattn.KVCache(2, HKV, D, DV, capacity=4)
    rows = Rows()
    k, v = rows(2, 3, HKV, D), rows(2, 3, HKV, DV)
    cache.append(k, v)
    assert (cache.capacity, cache.k.shape, cache.v.shape) == (4, (2, 4, HKV, D), (2, 4, HKV, DV))
    np.testing.assert_array_equal(cache.k[:, :3], k)
    cache.append(k, v, lens=[2, 0])
    assert cache.capacity == 8
    cache.append(k, v)
    assert (cache.capacity, cache.lengths.tolist()) == (8, [8, 6])
    cache.append(rows(2, 20, HKV, D), rows(2, 20, HKV, DV), lens=[0, 20])
    assert cache.capacity == 26
    np.testing.assert_array_equal(cache.v[:, :3], v)
    np.testing.assert_array_equal(cache.v[0, 5:8], v[0])
    assert cache.nbytes == 2 * 26 * HKV * (D + DV) * 4
    small = nattn.KVCache(2, HKV, D, DV, capacity=26, quantize="int8")
    assert small.nbytes == 2 * 26 * HKV * (D + DV + 8)
    cache.lengths[:] = 99
    assert cache.lengths.tolist() == [8, 26]


def test_an_empty_batch() -> None:
    cache = nattn.KVCache(0, HKV, D)
    cache.append(np.zeros((0, 3, HKV, D), np.float32), np.zeros((0, 3, HKV, D), np.float32))
    assert cache.attend(np.zeros((0, 3, HQ, D), np.float32)).shape == (0, 3, HQ, D)
    pool = nattn.PagedKVCache(1, 1, HKV, D)
    pool.append([], np.zeros((0, 3, HKV, D), np.float32), np.zeros((0, 3, HKV, D), np.float32))
    assert pool.attend([], np.zeros((0, 3, HQ, D), np.float32)).shape == (0, 3, HQ, D)
    out, lse = pool.attend([pool.new()], np.zeros((1, 1, HQ, D), np.float32), return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert pool.error([]).k.shape == (0, HKV)


# Pages


def test_forks_share_and_copy() -> None:
    rows = Rows()
    pool = nattn.PagedKVCache(10, 4, HKV, D, DV)
    one = pool.new()
    k, v = rows(1, 10, HKV, D), rows(1, 10, HKV, DV)
    pool.append([one], k, v)
    two, three = pool.fork(one), pool.fork(one)
    assert pool.free_pages == 7
    table = pool.block_table([one, two, three])
    assert (table == table[0]).all()
    more_k, more_v = rows(3, 1, HKV, D), rows(3, 1, HKV, DV)
    pool.append([one, two, three], more_k, more_v)  # the last that has the old page keeps it
    table = pool.block_table([one, two, three])
    assert (table[:, :2] == table[0, :2]).all()
    assert len(set(table[:, 2])) == 3
    assert pool.free_pages == 5
    q = rows(3, 1, HQ, D)
    keys = [np.concatenate([k[0], x]) for x in more_k]
    values = [np.concatenate([v[0], x]) for x in more_v]
    check(pool.attend([one, two, three], q, return_lse=True), q, keys, values)
    pool.release(one)
    assert pool.free_pages == 6
    pool.truncate(two, 3)
    pool.append([two], more_k[:1], more_v[:1])  # the first page is shared with three
    check(
        pool.attend([two, three], q[:2], return_lse=True),
        q[:2],
        [np.concatenate([k[0, :3], more_k[0]]), keys[2]],
        [np.concatenate([v[0, :3], more_v[0]]), values[2]],
    )
    pool.release(two)
    pool.release(three)
    assert pool.free_pages == 10


def test_a_pool_that_is_full() -> None:
    rows = Rows()
    pool = nattn.PagedKVCache(3, 4, HKV, D, DV)
    one = pool.new()
    pool.append([one], rows(1, 9, HKV, D), rows(1, 9, HKV, DV))
    two = pool.fork(one)
    before = bits(pool)
    with pytest.raises(MemoryError, match="expected 1 free pages of 4 keys, got 0 of 3"):
        pool.append([two], rows(1, 1, HKV, D), rows(1, 1, HKV, DV))
    assert bits(pool) == before
    assert pool.lengths([one, two]).tolist() == [9, 9]
    pool.release(one)
    pool.append([two], rows(1, 3, HKV, D), rows(1, 3, HKV, DV))
    assert pool.free_pages == 0
    grown = nattn.PagedKVCache(1, 4, HKV, D, DV, grow=True)
    x = grown.new()
    k, v, q = rows(1, 23, HKV, D), rows(1, 23, HKV, DV), rows(1, 2, HQ, D)
    grown.append([x], k, v)
    assert grown.pages == 6
    check(grown.attend([x], q, return_lse=True), q, [k[0]], [v[0]])


def test_what_a_pool_gives_is_what_the_function_takes() -> None:
    rows = Rows()
    for quantize in (None, "int8"):
        pool = nattn.PagedKVCache(10, 4, HKV, D, DV, quantize=quantize)
        ids = [pool.new(), pool.new()]
        pool.append(ids, rows(2, 9, HKV, D), rows(2, 9, HKV, DV), lens=[9, 6])
        q = rows(2, 2, HQ, D)
        out = nattn.attention_with_kvcache(
            q,
            pool.k,
            pool.v,
            cache_seqlens=pool.lengths(ids),
            block_table=pool.block_table(ids),
            k_scales=pool.k_scales,
            v_scales=pool.v_scales,
            causal=True,
        )
        np.testing.assert_array_equal(out, pool.attend(ids, q, causal=True))
        twice = pool.attend([ids[0], ids[0]], q)
        np.testing.assert_array_equal(twice[0], pool.attend([ids[0]], q[:1])[0])


# What does not fit


ROW = np.zeros((2, 1, HKV, D), np.float32)
WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "heads": (ValueError, "k_new: expected shape", lambda c: c.append(ROW[:, :, :1], ROW)),
    "batch": (ValueError, "k_new: expected shape", lambda c: c.append(ROW[:1], ROW)),
    "axes": (ValueError, "k_new: expected shape", lambda c: c.append(ROW[0], ROW)),
    "rows": (ValueError, "v_new: expected shape", lambda c: c.append(ROW, ROW[:, :0])),
    "dtype": (
        TypeError,
        "v_new: expected dtype float32",
        lambda c: c.append(ROW, ROW.astype("f2")),
    ),
    "none": (TypeError, "v_new: expected keys and values", lambda c: c.append(ROW, None)),
    "lens": (
        ValueError,
        "lens: expected lengths from 0 to 1",
        lambda c: c.append(ROW, ROW, [1, 2]),
    ),
    "lens too few": (ValueError, "lens", lambda c: c.append(ROW, ROW, [1])),
    "NaN": (ValueError, "k_new: expected finite numbers", lambda c: c.append(ROW * np.nan, ROW)),
    "inf": (ValueError, "v_new: expected finite numbers", lambda c: c.append(ROW, ROW + np.inf)),
    "longer": (ValueError, "lengths: expected from 0 to 3", lambda c: c.truncate([2, 4])),
    "negative": (ValueError, "lengths: expected from 0 to 3", lambda c: c.truncate(-1)),
    "q heads": (ValueError, "q: expected shape", lambda c: c.attend(np.zeros((2, 1, 3, D), "f4"))),
    "q batch": (ValueError, "q: expected shape", lambda c: c.attend(np.zeros((1, 1, 4, D), "f4"))),
    "q dtype": (TypeError, "q: expected dtype float32", lambda c: c.attend(ROW.astype("f8"))),
    "q ints": (TypeError, "q: expected dtype", lambda c: c.attend(ROW.astype(int))),
    "kv_lens": (TypeError, "kv_lens: expected none", lambda c: c.attend(ROW, kv_lens=2)),
    "layout": (TypeError, "layout: expected none", lambda c: c.attend(ROW, layout="bhnd")),
    "unknown": (TypeError, "casual", lambda c: c.attend(ROW, casual=True)),
    "error": (ValueError, "q: expected shape", lambda c: c.error(ROW[:1])),
}


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_changes_nothing(name: str, kind: str) -> None:
    error, text, call = WRONG[name]
    cache: Any = nattn.KVCache(2, HKV, D, capacity=3, quantize="int8")
    arrays = cache
    if kind == "paged":
        arrays = nattn.PagedKVCache(3, 4, HKV, D, quantize="int8")
        cache = arrays.view([arrays.new(), arrays.new()])
    cache.append(*Rows()(2, 2, 3, HKV, D))
    before = bits(arrays)
    with pytest.raises(error, match=text):
        call(cache)
    assert bits(arrays) == before
    assert cache.lengths.tolist() == [3, 3]


def test_caches_that_cannot_be() -> None:
    for error, text, make in (
        (ValueError, "batch: expected", lambda: nattn.KVCache(-1, 2, 8)),
        (ValueError, "Hkv: expected", lambda: nattn.KVCache(1, 0, 8)),
        (ValueError, "D: expected", lambda: nattn.KVCache(1, 2, 0)),
        (TypeError, "Dv: expected", lambda: nattn.KVCache(1, 2, 8, 1.5)),  # type: ignore[arg-type]
        (TypeError, "dtype: expected float16", lambda: nattn.KVCache(1, 2, 8, dtype="int8")),
        (ValueError, "capacity: expected", lambda: nattn.KVCache(1, 2, 8, capacity=0)),
        (ValueError, "window: expected", lambda: nattn.KVCache(1, 2, 8, window=-1)),
        (ValueError, "quantize: expected None or", lambda: nattn.KVCache(1, 2, 8, quantize="int4")),
        (TypeError, "quantize: expected None or", lambda: nattn.KVCache(1, 2, 8, quantize=8)),  # type: ignore[arg-type]
        (ValueError, "pages: expected", lambda: nattn.PagedKVCache(0, 4, 2, 8)),
        (ValueError, "page_size: expected", lambda: nattn.PagedKVCache(4, 0, 2, 8)),
        (TypeError, "grow: expected", lambda: nattn.PagedKVCache(4, 4, 2, 8, grow=1)),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=text):
            make()


def test_sequences_that_are_not_there() -> None:
    pool = nattn.PagedKVCache(4, 4, HKV, D)
    one, two = pool.new(), pool.new()
    pool.release(one)
    for call in (
        lambda: pool.fork(one),
        lambda: pool.release(one),
        lambda: pool.truncate(one, 0),
        lambda: pool.append([two, one], ROW, ROW),
        lambda: pool.lengths([7]),
        lambda: pool.view([one]),
    ):
        with pytest.raises(ValueError, match="seq_ids: expected a list of sequences"):
            call()
    for wrong in (two, "0", [1.0], {two: 1}):
        with pytest.raises(TypeError, match="seq_ids: expected a list of sequences"):
            pool.lengths(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_ids: expected each sequence once"):
        pool.append([two, two], ROW, ROW)
    with pytest.raises(ValueError, match="seq_ids: expected each sequence once"):
        pool.view([two, two])
    with pytest.raises(ValueError, match="length: expected from 0 to 0 keys, got 1"):
        pool.truncate(two, 1)


@pytest.mark.parametrize("name", ["caches.contiguous", "caches.paged", "api.generation"])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"nattn.{name}"))
    assert result.attempted
    assert result.failed == 0


# 8 bits


@given(
    x=hnp.arrays(
        st.sampled_from([np.dtype(t) for t in ("f2", "f4", "f8")]),
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(-60000, 60000, width=16),
    ),
    exponent=st.integers(-330, 35),
)
def test_the_error_of_a_row(x: Array, exponent: int) -> None:
    """``|x - code * scale| <= ROUNDING * scale``, of any size."""
    if x.dtype == np.float64:
        x = x * 10.0**exponent
    elif x.dtype == np.float32:
        with np.errstate(all="ignore"):
            x = (x.astype("f8") * 10.0 ** max(-49, min(exponent, 33))).astype("f4")
    if float(np.abs(x).max()) > 127 * float(np.finfo(np.float32).max):
        with pytest.raises(ValueError, match="x: expected finite numbers up to"):
            quantise("x", x)
        return
    codes, scales = quantise("x", x)
    assert codes.dtype == np.int8
    assert scales.dtype == np.float32
    assert np.abs(codes.astype(int)).max() <= 127
    wide, factors = x.astype(np.float64), scales.astype(np.float64)[:, None]
    assert (np.abs(wide - codes * factors) <= ROUNDING * factors).all()
    largest = np.abs(wide).max(axis=1)
    assert (127 * factors[:, 0] >= largest).all()
    assert ((factors[:, 0] == 0.0) == (largest == 0.0)).all()
    normal_ = factors[:, 0] > np.finfo(np.float32).tiny
    assert (127 * factors[:, 0] * (1 - 2.0**-22) <= largest)[normal_].all()


def test_what_8_bits_do_not_hold() -> None:
    for bad in (np.nan, np.inf, -np.inf, 1e41):
        x = np.zeros((2, 3))
        x[1, 1] = bad
        with pytest.raises(ValueError, match="x: expected finite numbers"):
            quantise("x", x)


BOUNDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softcap": 1.0, "scale": -0.7},
    {"alibi_slopes": [0.1, 0.2, 0.3, 0.4], "sinks": [0.5, -1.0, 3.0, -np.inf]},
    {"window_size": (4, 1), "bias": normal(1, 4, 3, 11)},
]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    options=st.sampled_from(BOUNDS),
    size=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    paged=st.booleans(),
)
def test_the_error_of_a_result(
    seed: int, options: dict[str, Any], size: float, paged: bool
) -> None:
    """In float64 by the reference: what is left is what 8 bits change, within the bound."""
    q, k, v = (
        normal(2, n, h, width, dtype=np.float64, seed=seed + i)
        for i, (n, h, width) in enumerate([(3, HQ, D), (11, HKV, D), (11, HKV, DV)])
    )
    k[:, seed % 11] *= size * 5
    q *= size
    cache: Any = nattn.KVCache(2, HKV, D, DV, dtype=np.float64, quantize="int8")
    if paged:
        pool = nattn.PagedKVCache(9, 4, HKV, D, DV, dtype=np.float64, quantize="int8")
        cache = pool.view([pool.new(), pool.new()])
    cache.append(k, v)
    out, lse = cache.attend(q, return_lse=True, backend="reference", **options)
    exact, exact_lse = nattn.attention(
        q, k, v, layout="bnhd", return_lse=True, backend="reference", **options
    )
    bound = cache.error(q, options.get("scale"))
    assert bound.out.shape == bound.lse.shape == (2, HQ, 3)
    slack = 1e-12
    assert (np.abs(lse - exact_lse) <= bound.lse + slack).all()
    moved = np.abs(out - exact).max(axis=3).transpose(0, 2, 1)
    assert (moved <= bound.out + slack).all()
    if size:
        assert moved.max() > 0.0
    for x, limit in ((k, bound.k), (v, bound.v)):
        assert (np.abs(x - in_8_bits(x)).max(axis=(1, 3)) <= limit).all()
    assert cache.error().out is None


def test_the_error_of_what_is_not_rounded() -> None:
    cache = nattn.KVCache(2, HKV, D, DV)
    cache.append(normal(2, 3, HKV, D), normal(2, 3, HKV, DV))
    bound = cache.error(normal(2, 1, HQ, D))
    assert bound.out is not None
    assert not any(x.any() for x in bound if x is not None)


def test_the_error_is_of_the_keys_that_are_there() -> None:
    large, small = np.full((1, 1, HKV, D), 127.0, "f4"), np.full((1, 1, HKV, D), 1.27, "f4")
    ring = nattn.KVCache(1, HKV, D, window=2, quantize="int8")
    plain = nattn.KVCache(1, HKV, D, quantize="int8")
    ring.append(large, small)
    assert ring.error().k.max() > 0.4
    for _ in range(3):
        ring.append(small, small)
    plain.append(small, small)
    plain.append(large, large)
    plain.truncate(1)
    for cache in (ring, plain):
        np.testing.assert_allclose(cache.error().k, 0.005, rtol=1e-3)
    pool = nattn.PagedKVCache(3, 2, HKV, D, quantize="int8")
    x = pool.new()
    pool.append([x], np.repeat(small, 3, axis=1), np.repeat(large, 3, axis=1))
    pool.truncate(x, 1)
    np.testing.assert_allclose(pool.error([x]).k, 0.005, rtol=1e-3)
    np.testing.assert_allclose(pool.error([x]).v, 0.5, rtol=1e-3)
