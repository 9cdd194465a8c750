"""nattn.attention_with_kvcache: caches that are arrays of the caller's, in one piece and paged."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_cases import Array, check, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import nattn
from nattn.backends import cuda
from nattn.call import cached
from nattn.call.pages import Pages
from nattn.call.quantised import quantise
from nattn.positional import Rotary

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
PAGE = 4


class Fixture:
    """Sequences, and arrays that hold them, with NaN where there is nothing."""

    def __init__(
        self,
        lengths: list[int],
        room: int = 40,
        *,
        kind: str = "whole",
        int8: bool = False,
        dtype: Any = np.float32,
        Hkv: int = 2,
        D: int = 16,
        Dv: int = 16,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths, self.int8, B = lengths, int8, len(lengths)
        self.k = [normal(n, Hkv, D, dtype=dtype, seed=seed + 2 * b) for b, n in enumerate(lengths)]
        self.v = [
            normal(n, Hkv, Dv, dtype=dtype, seed=seed + 2 * b + 1) for b, n in enumerate(lengths)
        ]
        self.more: dict[str, Any] = {}
        n, size = B, room
        if kind == "paged":
            n, size = B * -(-room // PAGE) + 3, PAGE
            table = rng.permutation(n)[: B * -(-room // PAGE)].reshape(B, -(-room // PAGE))
            self.more = {"block_table": table}
        kinds = (np.int8, np.int8) if int8 else (dtype, dtype)
        self.cache = [
            np.full((n, size, Hkv, width), 77 if int8 else np.nan, kind)
            for width, kind in zip((D, Dv), kinds, strict=True)
        ]
        self.scales = [np.full((n, size, Hkv), np.nan, np.float32) for _ in range(2)]
        for b, length in enumerate(lengths):
            for j in range(length):
                at = (self.more["block_table"][b, j // PAGE], j % PAGE) if self.more else (b, j)
                for n_, x in enumerate((self.k[b][j], self.v[b][j])):
                    if int8:
                        self.cache[n_][at], self.scales[n_][at] = quantise("x", x)
                    else:
                        self.cache[n_][at] = x
        if int8:
            self.more |= {"k_scales": self.scales[0], "v_scales": self.scales[1]}

    def __call__(self, q: Array, **args: Any) -> Any:
        args = {"cache_seqlens": self.lengths, **self.more, **args}
        return nattn.attention_with_kvcache(q, *self.cache, **args)

    def bits(self) -> list[bytes]:
        return [x.tobytes() for x in (*self.cache, *self.scales)]


KINDS = pytest.mark.parametrize("kind", ["whole", "paged"])
INT8 = pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])


@KINDS
@INT8
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_call(kind: str, int8: bool, dtype: Any, backend: str) -> None:
    f = Fixture([7, 0, 23, 1], kind=kind, int8=int8, dtype=dtype, Dv=8)
    for n in (1, 3):
        q = normal(4, n, 4, 16, dtype=dtype, seed=9)
        result = f(q, causal=True, return_lse=True, backend=backend)
        check(result, q, f.k, f.v, int8=int8, causal=True)


@KINDS
@INT8
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda x: np.dtype(x).name)
def test_prompts_beside_single_queries(kind: str, int8: bool, dtype: Any) -> None:
    """Items with more rows than are decoded take keys in one piece, others where they lie."""
    f = Fixture([37, 5, 40], kind=kind, int8=int8, dtype=dtype, Dv=8)
    q = normal(3, 37, 4, 16, dtype=dtype, seed=9)
    lens = [37, 1, 20]
    result = f(q, causal=True, return_lse=True, q_lens=lens)
    check(result, q, f.k, f.v, int8=int8, causal=True, q_lens=lens)
    own = slice(1, 2)
    pools = ("k_scales", "v_scales") if kind == "paged" else ()
    more = {name: x if name in pools else x[own] for name, x in f.more.items()}
    cache = f.cache if kind == "paged" else [x[own] for x in f.cache]
    alone = nattn.attention_with_kvcache(q[own, :1], *cache, cache_seqlens=[5], causal=True, **more)
    np.testing.assert_array_equal(alone[0], result[0][1, :1])


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5, "scale": 0.4},
    "window": {"window_size": (4, 0)},
    "window to both sides": {"window_size": (3, 2), "q_offset": [1, 15]},
    "ALiBi, sinks": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4], "sinks": [0.5, -1.0, 3.0, -np.inf]},
    "mask": {"mask": np.random.default_rng(0).random((2, 1, 3, 23)) < 0.5},
    "bias": {"bias": normal(4, 1, 23)},
    "q_offset": {"q_offset": [2, 30], "causal": True},
    "q_lens": {"q_lens": [2, 3], "causal": True},
    "score_mod": {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.1 * abs(q_idx - kv_idx)
    },
    "mask_mod": {"mask_mod": functools.partial(nattn.masks.document, doc=np.arange(30) // 9)},
    "dropout": {"dropout_p": 0.3, "seed": 5},
}


@INT8
@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_are_passed_on(name: str, int8: bool) -> None:
    q = normal(2, 3, 4, 16, seed=9)
    outs = []
    for kind in ("whole", "paged"):
        f = Fixture([7, 23], kind=kind, int8=int8)
        result = f(q, return_lse=True, **OPTIONS[name])
        check(result, q, f.k, f.v, int8=int8, **OPTIONS[name])
        outs.append(result)
    for x, y in zip(*outs, strict=True):
        np.testing.assert_array_equal(x, y)


@KINDS
@INT8
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_new_rows_are_written(kind: str, int8: bool, dtype: Any) -> None:
    n = 3
    f = Fixture([7, 0, 23], kind=kind, int8=int8, dtype=dtype)
    q = normal(3, n, 4, 16, dtype=dtype, seed=9)
    k, v = (normal(3, n, 2, 16, dtype=dtype, seed=seed) for seed in (10, 11))
    before = [x.copy() for x in (*f.cache, *f.scales)]
    result = f(q, k_new=k, v_new=v, causal=True, return_lse=True)
    keys = [np.concatenate(pair) for pair in zip(f.k, k, strict=True)]
    values = [np.concatenate(pair) for pair in zip(f.v, v, strict=True)]
    check(result, q, keys, values, int8=int8, causal=True)
    after = (*f.cache, *f.scales)
    grown = f(q, cache_seqlens=[10, 3, 26], causal=True, return_lse=True)
    for x, y in zip(result, grown, strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(before[: 4 if int8 else 2], after, strict=False):
        changed = (x.view(np.uint8) != y.view(np.uint8)).reshape(*x.shape[:2], -1).any(axis=2)
        assert changed.sum() == 3 * n  # and no other row


def test_step_by_step_in_chunks_and_at_once() -> None:
    """Where the same kernel runs the same bits come out, whatever the batch and the pages (S3)."""
    lengths, n = [5, 18], 9
    q = normal(2, n, 4, 16, seed=9)
    k, v = (normal(2, n, 2, 16, seed=seed) for seed in (10, 11))
    for chunks in ([9], [1] * 9, [4, 1, 3, 1]):
        results = []
        for kind in ("whole", "paged"):
            f, done, outs = Fixture(lengths, kind=kind), 0, []
            for size in chunks:
                rows = slice(done, done + size)
                new: dict[str, Any] = {"k_new": k[:, rows], "v_new": v[:, rows], "causal": True}
                outs.append(f(q[:, rows], **new, cache_seqlens=[x + done for x in lengths]))
                done += size
            results.append(np.concatenate(outs, axis=1))
        np.testing.assert_array_equal(results[0], results[1])
        lse = f(q, cache_seqlens=[x + n for x in lengths], causal=True, return_lse=True)[1]
        keys = [np.concatenate(pair) for pair in zip(f.k, k, strict=True)]
        values = [np.concatenate(pair) for pair in zip(f.v, v, strict=True)]
        check((results[0], lse), q, keys, values, causal=True)


@KINDS
@INT8
def test_an_item_alone_and_in_a_batch(kind: str, int8: bool) -> None:
    f = Fixture([7, 23, 12], kind=kind, int8=int8)
    q = normal(3, 2, 4, 16, seed=9)
    both = f(q, causal=True)
    for b, n in enumerate(f.lengths):
        args: dict[str, Any] = {}
        cache, more = f.cache, f.more
        if kind == "paged":
            more = {**more, "block_table": more["block_table"][b : b + 1]}
        else:
            cache = [x[b : b + 1] for x in cache]
            more = {name: x[b : b + 1] for name, x in more.items()}
        args = {**more, "cache_seqlens": n, "causal": True}
        alone = nattn.attention_with_kvcache(q[b : b + 1], *cache, **args)
        np.testing.assert_array_equal(alone, both[b : b + 1])


@KINDS
def test_windows_are_of_each_item(kind: str) -> None:
    """D5: one query, ``(2, 0)`` and lengths 5 and 8 see keys 2 to 4 and 5 to 7."""
    f = Fixture([5, 8], kind=kind)
    q = np.zeros((2, 1, 2, 16), np.float32)
    out = f(q, window_size=(2, 0))
    for b, n in enumerate(f.lengths):
        mean = f.v[b][n - 3 : n].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(out[b, 0], mean, rtol=1e-5, atol=1e-6)
    single = f(q, window_size=(0, 0))
    for b in range(2):
        np.testing.assert_allclose(single[b, 0], f.v[b][-1], rtol=1e-6)


@KINDS
@INT8
def test_empties(kind: str, int8: bool) -> None:
    """D9, D10: nothing in, nothing out, and lse is -inf."""
    f = Fixture([0, 0], kind=kind, int8=int8)
    out, lse = f(normal(2, 2, 4, 16), return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    out, lse = f(normal(2, 0, 4, 16), return_lse=True, cache_seqlens=0)
    assert (out.shape, lse.shape) == ((2, 0, 4, 16), (2, 4, 0))
    none = normal(2, 0, 2, 16)
    np.testing.assert_array_equal(f(normal(2, 1, 4, 16), k_new=none, v_new=none), 0.0)
    f = Fixture([3, 5], kind=kind, int8=int8)
    if kind == "paged":
        f.more = {**f.more, "block_table": np.zeros((0, 4), int)}
    else:
        f.cache = [x[:0] for x in f.cache]
        f.more = {name: x[:0] for name, x in f.more.items()}
    assert f(normal(0, 1, 4, 16), cache_seqlens=[]).shape == (0, 1, 4, 16)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, ">i4"])
def test_tables_behind_lengths_are_ignored(dtype: Any) -> None:
    f = Fixture([7, 16], kind="paged")
    q = normal(2, 2, 4, 16, seed=9)
    expected = f(q)
    table = f.more["block_table"].astype(dtype)
    table[0, 2:], table[1, 4:] = np.iinfo(table.dtype).max, np.iinfo(table.dtype).min
    np.testing.assert_array_equal(f(q, block_table=table), expected)
    np.testing.assert_array_equal(f(q, block_table=table[:, :4]), expected)
    np.testing.assert_array_equal(f(q, block_table=table[:, ::-1].copy()[:, ::-1]), expected)
    np.testing.assert_array_equal(f(q, block_table=table[:, :4].tolist()), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("given_offset", [False, True])
def test_rotary(dtype: Any, given_offset: bool) -> None:
    rotary = Rotary(16, base=100.0)
    f = Fixture([7, 3], dtype=dtype, kind="paged")
    q = normal(2, 3, 4, 16, dtype=dtype, seed=9)
    k, v = (normal(2, 3, 2, 16, dtype=dtype, seed=seed) for seed in (10, 11))

    def turned(x: Array, begins: list[int]) -> Array:
        wide = x.astype(np.float64 if dtype == np.float64 else np.float32)
        at = np.array(begins)[:, None] + np.arange(3)
        return rotary(wide.transpose(0, 2, 1, 3), at).transpose(0, 2, 1, 3).astype(dtype)

    more: dict[str, Any] = {"q_offset": [4, 5]} if given_offset else {}
    result = f(q, k_new=k, v_new=v, rotary=rotary, causal=True, return_lse=True, **more)
    q, k = turned(q, more.get("q_offset", [7, 3])), turned(k, [7, 3])
    keys = [np.concatenate(pair) for pair in zip(f.k, k, strict=True)]
    values = [np.concatenate(pair) for pair in zip(f.v, v, strict=True)]
    check(result, q, keys, values, causal=True, **more)


def test_out_and_strides() -> None:
    """D11: views of any strides, and results where they are wanted."""
    f = Fixture([7, 3])
    q = normal(2, 3, 4, 16, seed=9)
    expected, out = f(q), np.empty((2, 4, 3, 16), np.float32).swapaxes(1, 2)
    assert f(q, out=out) is out
    np.testing.assert_array_equal(out, expected)
    f.cache = [x.swapaxes(1, 2).copy().swapaxes(1, 2)[..., ::-1].copy()[..., ::-1] for x in f.cache]
    np.testing.assert_array_equal(f(q[:, ::-1].copy()[:, ::-1]), expected)
    np.testing.assert_array_equal(f(q.astype(">f4")), expected)
    np.testing.assert_array_equal(f(q, cache_seqlens=np.array([7, 3], np.uint8)), expected)


Q, K, V = normal(2, 3, 4, 16), normal(2, 3, 2, 16), normal(2, 3, 2, 16)
NEW: dict[str, Any] = {"k_new": K, "v_new": V}
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "layout": (TypeError, "layout: expected none", {"layout": "bnhd"}),
    "kv_lens": (TypeError, "kv_lens: expected none", {"kv_lens": 3}),
    "unknown": (TypeError, "did you mean 'causal'", {"casual": True}),
    "lengths": (ValueError, "cache_seqlens: expected lengths from 0 to", {"cache_seqlens": 41}),
    "negative": (ValueError, "cache_seqlens: expected lengths from 0", {"cache_seqlens": [1, -1]}),
    "half a length": (TypeError, "cache_seqlens", {"cache_seqlens": 1.5}),
    "full": (ValueError, "k_new: expected at most 2 rows", {"cache_seqlens": [1, 38], **NEW}),
    "k alone": (TypeError, "v_new: expected keys and values", {"k_new": K}),
    "v alone": (TypeError, "k_new: expected keys and values", {"v_new": V}),
    "heads": (ValueError, r"k_new: expected shape \(2, N, 2, 16\)", {"k_new": Q, "v_new": V}),
    "rows": (ValueError, r"v_new: expected shape \(2, 3, 2, 16\)", {"k_new": K, "v_new": V[:, :2]}),
    "dtype": (TypeError, "k_new: expected dtype float32", {"k_new": K.astype("f8"), "v_new": V}),
    "rotary": (TypeError, "rotary: expected a nattn.positional.Rotary", {**NEW, "rotary": abs}),
    "head_dim": (ValueError, "expected shape", {**NEW, "rotary": Rotary(8)}),
    "out": (ValueError, "out: expected shape", {**NEW, "out": np.zeros((2, 3, 4, 15), "f4")}),
    "out is k_new": (ValueError, "overlaps k_new", {"k_new": K, "v_new": V}),
    "flag": (TypeError, "return_lse: expected True or False", {**NEW, "return_lse": 1}),
    "backend": (ValueError, "backend: expected", {**NEW, "backend": "gpu"}),
    "mask": (ValueError, "mask: expected a shape", {**NEW, "mask": np.ones((3, 9), bool)}),
}


@KINDS
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_changes_nothing(kind: str, name: str) -> None:
    error, text, args = WRONG[name]
    f = Fixture([7, 3], kind=kind)
    if name == "out is k_new":
        both = np.zeros((2, 3, 4, 16), np.float32)
        args = {"k_new": both[:, :, :2], "v_new": V, "out": both}
    before = f.bits()
    with pytest.raises(error, match=text):
        f(Q, **args)
    assert f.bits() == before


def test_caches_that_do_not_fit() -> None:
    f = Fixture([7, 3])
    k, v = f.cache
    call = functools.partial(nattn.attention_with_kvcache, cache_seqlens=2)
    for error, text, arrays in (
        (ValueError, "k_cache: expected shape", (Q, k[:1], v)),
        (ValueError, "k_cache: expected shape", (Q, k[0], v)),
        (ValueError, "k_cache: expected shape", (Q, k[..., :8], v)),
        (ValueError, "v_cache: expected shape", (Q, k, v[:, :30])),
        (ValueError, "a number of heads that divides the 3", (Q[:, :, :3], k, v)),
        (ValueError, r"q: expected shape \(B, Nq, Hq, D\)", (Q[0], k, v)),
        (TypeError, "k_cache: expected dtype float32", (Q, k.astype("f8"), v)),
        (TypeError, "k_cache: expected dtype float32.*native", (Q, k.astype(">f4"), v)),
        (TypeError, "without k_scales", (Q, np.zeros(k.shape, "i1"), v)),
        (TypeError, "q: expected dtype", (Q.astype(int), k, v)),
    ):
        with pytest.raises(error, match=text):
            call(*arrays)
    f = Fixture([7, 3], int8=True)
    k, v = f.cache
    s = f.scales[0]
    for error, text, scales in (
        (TypeError, "v_scales: expected an array", (s, None)),
        (TypeError, "k_scales: expected an array", (None, s)),
        (ValueError, "k_scales: expected shape", (s[..., 0], s)),
        (TypeError, "v_scales: expected dtype float32", (s, s.astype("f8"))),
    ):
        with pytest.raises(error, match=text):
            call(Q, k, v, k_scales=scales[0], v_scales=scales[1])
    with pytest.raises(TypeError, match="k_cache: expected dtype int8"):
        call(Q, Q, Q, k_scales=s, v_scales=s)


def test_memory_that_is_shared() -> None:
    f = Fixture([7, 3])
    with pytest.raises(ValueError, match=r"v_cache: .* overlaps k_cache"):
        nattn.attention_with_kvcache(Q, f.cache[0], f.cache[0], cache_seqlens=2, **NEW)
    assert nattn.attention_with_kvcache(Q, f.cache[0], f.cache[0], cache_seqlens=2).shape == Q.shape
    with pytest.raises(ValueError, match=r"k_cache: .* overlaps v_new"):
        f(Q, k_new=K, v_new=f.cache[0][:, :3])
    with pytest.raises(ValueError, match=r"out: .* overlaps k"):
        f(Q[:, :, :2], out=f.cache[0][:, :3])
    f.cache[1].flags.writeable = False
    with pytest.raises(ValueError, match="v_cache: expected a writeable"):
        f(Q, **NEW)
    f.cache[0] = np.broadcast_to(f.cache[0][:1], f.cache[0].shape)
    assert np.isfinite(f(Q, cache_seqlens=2)).all()


def test_tables_that_do_not_fit() -> None:
    f = Fixture([7, 16], kind="paged")
    table = f.more["block_table"]
    before = f.bits()
    for error, text, value in (
        (TypeError, "block_table: expected integers", table.astype(float)),
        (ValueError, r"block_table: expected shape \(2, n\)", table[:1]),
        (ValueError, r"block_table: expected shape \(2, n\)", table[0]),
        (ValueError, "at most 0 rows, for item 1 has 16 of 16", table[:, :4]),
    ):
        with pytest.raises(error, match=text):
            f(Q, **NEW, block_table=value)
    for b, n, page in ((0, 1, -1), (1, 4, 23), (1, 0, 1 << 40)):
        wrong = table.astype(np.int64)
        wrong[b, n] = page
        with pytest.raises(ValueError, match=f"got {page} in column {n} of item {b}"):
            f(Q, **NEW, block_table=wrong)
    shared = table.copy()
    shared[1, 4] = shared[0, 2]
    with pytest.raises(ValueError, match=f"got page {shared[0, 2]} for several"):
        f(Q, cache_seqlens=[8, 16], **NEW, block_table=shared)
    assert f.bits() == before


@KINDS
@INT8
def test_an_error_in_the_middle_changes_nothing(kind: str, int8: bool) -> None:
    f = Fixture([7, 3], kind=kind, int8=int8)
    before = f.bits()
    short = functools.partial(nattn.masks.document, doc=np.zeros(8, int))
    with pytest.raises(IndexError):
        f(Q, **NEW, mask_mod=short)
    assert f.bits() == before
    if int8:
        bad = K.copy()
        bad[1, 2, 1, 3] = np.inf
        with pytest.raises(ValueError, match="k_new: expected finite numbers"):
            f(Q, k_new=bad, v_new=V)
        assert f.bits() == before


def test_gpus_refuse() -> None:
    f = Fixture([7, 3])
    lengths = np.array([7, 3])
    pages = Pages(np.zeros((2, 1), np.int64), 40)
    plain = cached.build(Q, cached.Store(*f.cache), lengths, None, {})
    assert plain.gathered() is plain
    assert plain.kv_storage == "float32"
    assert not cuda.refusals(plain, "forward", {})
    paged = cached.build(Q, cached.Store(*f.cache), lengths, pages, {})
    assert "pages of float32" in cuda.refusals(paged, "forward", {})[0]
    codes = cached.Store(K.astype(np.int8), V.astype(np.int8), *f.scales)
    whole = cached.build(Q, codes, np.array([3, 3]), None, {})
    assert whole.kv_storage == "int8"
    assert "got int8" in cuda.refusals(whole, "forward", {})[0]


@settings(max_examples=40)
@given(data=st.data())
def test_any_pages(data: st.DataObject) -> None:
    """Any lengths, pages and offsets, against the dense arrays."""
    B, Nq = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=B, max_size=B))
    f = Fixture(
        lengths, kind="paged", int8=data.draw(st.booleans()), seed=data.draw(st.integers(0, 9))
    )
    q = normal(B, Nq, 4, 16, seed=9)
    options: dict[str, Any] = {"causal": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        options["q_offset"] = data.draw(st.integers(-5, 45))
    if data.draw(st.booleans()):
        options["window_size"] = (data.draw(st.integers(-1, 20)), data.draw(st.integers(-1, 20)))
    check(f(q, return_lse=True, **options), q, f.k, f.v, int8=f.int8, **options)
