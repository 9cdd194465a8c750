"""MultiHeadAttention with a cache: rows in pieces give what all of them give at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_cases import Array, normal

import nattn
from nattn.nn import MultiHeadAttention
from nattn.positional import Alibi, LearnedTable, Rotary, Sinusoidal, T5Bias

D_MODEL, HEADS, HKV, HD = 12, 4, 2, 6
POSITIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda dtype: None,
    "sinusoidal": lambda dtype: Sinusoidal(D_MODEL),
    "table": lambda dtype: LearnedTable(40, D_MODEL, dtype=dtype),
    "rotary": lambda dtype: Rotary(HD, base=100.0),
    "alibi": lambda dtype: Alibi(HEADS),
    "t5": lambda dtype: T5Bias(HEADS, 8, 20, bidirectional=False, dtype=dtype),
}


def layer_with(positions: str = "none", dtype: Any = np.float64) -> MultiHeadAttention:
    compute = np.float64 if dtype == np.float64 else np.float32
    return MultiHeadAttention(
        D_MODEL,
        HEADS,
        num_kv_heads=HKV,
        head_dim=HD,
        positions=POSITIONS[positions](compute),
        dtype=dtype,
    )


def cache_of(kind: str, batch: int = 2, dtype: Any = np.float64, **more: Any) -> Any:
    if kind == "paged":
        pool = nattn.PagedKVCache(20, 4, HKV, HD, dtype=dtype, **more)
        return pool.view([pool.new() for _ in range(batch)])
    return nattn.KVCache(batch, HKV, HD, dtype=dtype, capacity=3, **more)


def in_pieces(layer: Any, x: Array, cache: Any, sizes: list[int], **args: Any) -> Array:
    ends = np.cumsum([0, *sizes])
    pieces = [x[:, n:m] for n, m in itertools.pairwise(ends)]
    return np.concatenate([layer(piece, cache=cache, **args) for piece in pieces], axis=1)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("name", POSITIONS)
def test_pieces(name: str, kind: str) -> None:
    layer, x = layer_with(name), normal(2, 13, D_MODEL, dtype=np.float64)
    whole = layer(x, causal=True)
    for sizes in ([13], [1] * 13, [6, 1, 1, 5]):
        out = in_pieces(layer, x, cache_of(kind), sizes, causal=True)
        np.testing.assert_allclose(out, whole, rtol=1e-11, atol=1e-12, equal_nan=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype: Any) -> None:
    layer, x = layer_with("rotary", dtype), normal(2, 13, D_MODEL, dtype=dtype)
    whole = layer(x, causal=True)
    out = in_pieces(layer, x, cache_of("paged", dtype=dtype), [6, 1, 6], causal=True)
    assert out.dtype == whole.dtype
    unit = 2.0**-8 if dtype == ml_dtypes.bfloat16 else float(np.finfo(dtype).eps)
    wide, expected = out.astype("f8"), whole.astype("f8")
    np.testing.assert_allclose(wide, expected, rtol=8 * unit, atol=8 * unit, equal_nan=False)


def test_a_window() -> None:
    layer, x = layer_with("rotary"), normal(2, 40, D_MODEL, dtype=np.float64)
    whole = layer(x, window_size=(5, 0))
    cache = nattn.KVCache(2, HKV, HD, dtype=np.float64, window=5)
    out = in_pieces(layer, x, cache, [10, *[1] * 20, 4, 6], causal=True)
    np.testing.assert_allclose(out, whole, rtol=1e-11, atol=1e-12, equal_nan=False)
    assert cache.capacity == 11  # the window and the last piece


def test_items_of_their_own_lengths() -> None:
    for name in ("rotary", "table"):
        layer, x = layer_with(name), normal(2, 13, D_MODEL, dtype=np.float64)
        cache = cache_of("contiguous")
        padded = np.full((2, 6, D_MODEL), np.nan)
        padded[0, :6], padded[1, :2] = x[0, :6], x[1, :2]
        first = layer(padded, cache=cache, causal=True, q_lens=[6, 2])
        assert cache.lengths.tolist() == [6, 2]
        then = layer(np.stack([x[0, 6:9], x[1, 2:5]]), cache=cache, causal=True)
        for b, (n, m) in enumerate(((6, 9), (2, 5))):
            whole = layer(x[b, :m], causal=True)
            np.testing.assert_allclose(
                first[b, :n], whole[:n], rtol=1e-11, atol=1e-12, equal_nan=False
            )
            np.testing.assert_allclose(then[b], whole[n:], rtol=1e-11, atol=1e-12, equal_nan=False)


def test_8_bits() -> None:
    layer, x = layer_with("rotary"), normal(2, 13, D_MODEL, dtype=np.float64)
    cache = cache_of("contiguous", quantize="int8")
    q, _, _ = layer.qkv(x)
    out, lse = layer(x, cache=cache, causal=True, return_lse=True)
    whole, whole_lse = layer(x, causal=True, return_lse=True)
    bound = cache.error(q.swapaxes(1, 2))
    assert (np.abs(lse - whole_lse) <= bound.lse + 1e-12).all()
    w = np.abs(layer.params["w_o"]).sum(axis=0).max()
    assert (np.abs(out - whole).max(axis=2) <= bound.out.max(axis=1) * w + 1e-12).all()
    assert np.abs(out - whole).max() > 0.0


def test_one_item_out_and_nothing() -> None:
    layer, x = layer_with("alibi"), normal(5, D_MODEL, dtype=np.float64)
    cache, out = cache_of("contiguous", 1), np.empty((5, D_MODEL))
    result, lse = layer(x, cache=cache, causal=True, out=out, return_lse=True)
    assert result is out
    assert lse.shape == (HEADS, 5)
    np.testing.assert_allclose(out, layer(x, causal=True), rtol=1e-11, atol=1e-12, equal_nan=False)
    assert layer(x[:0], cache=cache).shape == (0, D_MODEL)
    assert cache.lengths.tolist() == [5]
    assert layer(np.zeros((0, 3, D_MODEL)), cache=cache_of("contiguous", 0)).shape == (
        0,
        3,
        D_MODEL,
    )


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_what_goes_wrong_appends_nothing(kind: str) -> None:
    layer, x = layer_with("rotary"), normal(2, 3, D_MODEL, dtype=np.float64)
    cache = cache_of(kind)
    layer(x, cache=cache, causal=True)
    lens = [3, 3]
    for error, text, args in (
        (ValueError, "mask: expected a shape", {"mask": np.ones((5, 5), bool)}),
        (TypeError, "casual", {"casual": True}),
        (ValueError, "context: expected None", {"context": x}),
        (TypeError, "q_offset: expected none", {"q_offset": 0}),
        (TypeError, "kv_lens: expected none", {"kv_lens": 3}),
        (ValueError, "q_lens", {"q_lens": [3, 4]}),
        (ValueError, "out: expected shape", {"out": np.empty((2, 3, 1))}),
        (ValueError, "backend: expected", {"backend": "gpu"}),
    ):
        with pytest.raises(error, match=text):
            layer(x, cache=cache, **args)
        assert cache.lengths.tolist() == lens
    with pytest.raises(ValueError, match="x: expected 2 items as in the cache, got 1"):
        layer(x[:1], cache=cache)
    with pytest.raises(TypeError, match="cache: expected none where there are gradients"):
        layer.vjp(x, cache=cache)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="got PagedKVCache; pass a view"):
        layer(x, cache=nattn.PagedKVCache(1, 1, HKV, HD))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="k_new: expected dtype float32"):
        layer(x, cache=cache_of(kind, dtype=np.float32))
    for other in (MultiHeadAttention(D_MODEL, 4, dtype=np.float64),):
        with pytest.raises(ValueError, match="k_new: expected shape"):
            other(x, cache=cache)
    assert cache.lengths.tolist() == lens


def test_dynamic_scaling_ends_where_it_begins() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    layer = MultiHeadAttention(
        D_MODEL, HEADS, head_dim=HD, positions=Rotary(HD, scaling=scaling), dtype=np.float64
    )
    x, cache = normal(1, 9, D_MODEL, dtype=np.float64), nattn.KVCache(1, HEADS, HD, dtype="float64")
    out = in_pieces(layer, x[:, :8], cache, [5, 3], causal=True)
    np.testing.assert_allclose(
        out, layer(x[:, :8], causal=True), rtol=1e-11, atol=1e-12, equal_nan=False
    )
    with pytest.raises(ValueError, match="at most 8 positions"):
        layer(x[:, 8:], cache=cache, causal=True)
