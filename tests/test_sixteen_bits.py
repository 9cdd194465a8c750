"""float16 and bfloat16: how they are stored, the dot product of pairs, and what both are worth.

That they keep the contract is tested where the contract is; here is what only they have.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest
from cases import CASES, check, check_gradients, gaussian, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from processors import bfloat16_as

import nattn
from nattn.backends.cpu import tiles
from nattn.backends.error_budget import UNIT
from nattn.call.checks import as_array
from nattn.vectors import dtypes, lanes, processor
from nattn.vectors import storage as stored
from nattn.vectors.lanes import Tile

Array = NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NARROW = (np.dtype(np.float16), BFLOAT16)
HAS_PAIRS = {"avx512bf16", "avx512vl"} <= processor.processor().features

each_narrow = pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.name)

jit = functools.partial(numba.njit, error_model="numpy")

nan, inf = np.nan, np.inf


@pytest.fixture(params=[*NARROW, "pairs"], ids=["float16", "bfloat16", "pairs"])
def kind(request: pytest.FixtureRequest) -> Iterator[np.dtype]:
    """Return a dtype: float16, bfloat16 in float32 arithmetic, and in emulated pairs."""
    if request.param == "pairs":
        with bfloat16_as("emulated"):
            yield BFLOAT16
    else:
        with bfloat16_as("float32"):
            yield request.param


def assert_same(got: Array, expected: Array) -> None:
    """Assert equality to the last bit, but for the payload of what is not a number."""
    bits = f"u{got.dtype.itemsize}"
    number = ~np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~number)
    np.testing.assert_array_equal(got.view(bits)[number], expected.view(bits)[number])


def gradients(vjp: Callable[..., Any], dout: Array) -> tuple[Any, Any, Any]:
    """Return dq, dk and dv, each in C order."""
    dq, dk, dv = (np.ascontiguousarray(x) for x in vjp(dout)[:3])
    return dq, dk, dv


# Storage


def around_all(dtype: np.dtype) -> Array:
    """Return all numbers of a dtype, the ties between them, what is beside those, and any bits."""
    with np.errstate(all="ignore"):
        all_bits = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
        finite = np.sort(np.unique(all_bits[np.isfinite(all_bits)]))
        ties = (finite[1:] / 2 + finite[:-1] / 2).astype(np.float32)
        near = [np.nextafter(x, np.float32(to)) for x in (finite, ties) for to in (-inf, inf)]
    any_bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    return np.concatenate([all_bits, ties, *near, any_bits])


def reader_and_writer(tile: Tile) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what reads what a tile's arrays store, and what writes it."""
    W = tile.W

    @jit
    def read(n: int, source: int, out: int) -> None:
        for i in range(0, n, W):
            lanes.store(out + 4 * i, lanes.load_stored(tile, source + 2 * i))

    @jit
    def write(n: int, source: int, out: int) -> None:
        for i in range(0, n, W):
            lanes.store_stored(tile, out + 2 * i, lanes.load(tile, source + 4 * i))

    return read, write


@each_narrow
@pytest.mark.parametrize("by_bits", [False, True], ids=["as it comes", "by bits"])
def test_every_number_is_read_and_written(
    dtype: np.dtype, by_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By instructions for float16, where there are some, and without."""
    if by_bits:
        without = processor.processor()._replace(features=frozenset(), triple="none")
        monkeypatch.setattr(stored, "processor", lambda: without)
    for W in (16, 4, 1):
        read, write = reader_and_writer(Tile("float32", W, 1, 1, dtype.name))
        every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        wide = np.empty(every.shape, np.float32)
        read(every.size, every.ctypes.data, wide.ctypes.data)
        with np.errstate(all="ignore"):
            assert_same(wide, every.astype(np.float32))
        numbers = around_all(dtype)
        numbers = numbers[: numbers.size // 16 * 16].copy()
        narrow = np.empty(numbers.shape, dtype)
        write(numbers.size, numbers.ctypes.data, narrow.ctypes.data)
        with np.errstate(all="ignore"):
            assert_same(narrow, numbers.astype(dtype))


# The dot product of pairs


def random_words(n: int, rng: np.random.Generator) -> Array:
    """Return bfloat16 numbers of all kinds: any bits, special ones, near 1, tiny and huge."""
    special = np.array([0, 1, 0x7F, 0x80, 0x100, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0], np.uint16)
    special = np.concatenate([special, special | 0x8000])
    fraction = rng.integers(0, 1 << 16, n, np.uint16) & 0x807F
    parts = [rng.integers(0, 1 << 16, n, np.uint16), rng.choice(special, n)]
    for low, high in ((120, 134), (40, 90), (180, 210), (1, 60)):
        parts.append(fraction | (rng.integers(low, high, n).astype(np.uint16) << 7))
    return np.stack(parts)[rng.integers(0, len(parts), n), np.arange(n)]


@functools.cache
def dot(product: str, W: int) -> Any:
    """Return what adds dot products of pairs to numbers."""
    tile = Tile("float32", W, 1, 1, "bfloat16", product)

    @jit
    def run(n: int, acc: int, x: int, y: int, out: int) -> None:
        for i in range(0, 4 * n, 4 * W):
            a, b, c = lanes.load(tile, acc + i), lanes.load(tile, x + i), lanes.load(tile, y + i)
            lanes.store(out + i, lanes.chained(tile, a, b, c))

    return run


def dots(product: str, W: int, acc: Array, x: Array, y: Array) -> Array:
    out = np.empty_like(acc)
    dot(product, W)(acc.size, *(a.ctypes.data for a in (acc, x, y, out)))
    return out


def sums_and_words(n: int, seed: int) -> tuple[Array, Array, Array]:
    """Return float32 numbers of all kinds, and two arrays of pairs for each."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 1 << 16, n).astype(np.uint32) * rng.integers(0, 2, n).astype(np.uint32)
    acc = ((random_words(n, rng).astype(np.uint32) << 16) | low).view(np.float32)
    x, y = random_words(2 * n, rng), random_words(2 * n, rng)
    # Some sums end about where numbers become subnormal, or cancel.
    acc[::7] = np.ldexp(acc[::7], -126 - np.frexp(acc[::7])[1] + rng.integers(-3, 4, acc[::7].size))
    exact = x.view(BFLOAT16).astype(np.float32) * y.view(BFLOAT16).astype(np.float32)
    acc[1::7] = -exact.reshape(-1, 2)[1::7, 1]
    return acc, x, y


@pytest.mark.skipif(not HAS_PAIRS, reason="the processor has no AVX512-BF16")
@pytest.mark.parametrize("W", [16, 8, 4])
def test_emulated_pairs_are_what_the_instruction_computes(W: int) -> None:
    with np.errstate(all="ignore"):
        acc, x, y = sums_and_words(1 << 20, W)
    assert_same(dots("emulated pairs", W, acc, x, y), dots("pairs", W, acc, x, y))


def flushed(x: float) -> float:
    return x * 0.0 if abs(x) < 2.0**-126 else x


def rounded(x: Fraction) -> float:
    """Round to float32, to nearest even, and flush what is subnormal as if that ended nowhere."""
    if x == 0:
        return 0.0
    power = 0
    while abs(x) >= Fraction(2) ** (power + 1):
        power += 1
    while abs(x) < Fraction(2) ** power:
        power -= 1
    unit = Fraction(2) ** (power - 23)
    nearest = round(x / unit) * unit  # half to even
    if abs(nearest) < Fraction(2) ** -126:
        return -0.0 if x < 0 else 0.0
    return float(nearest) if abs(nearest) < Fraction(2) ** 128 else inf if nearest > 0 else -inf


def added(acc: float, x: float, y: float) -> float:
    """Return acc + x * y by the manual's words, in exact arithmetic."""
    acc, x, y = flushed(acc), flushed(x), flushed(y)
    if not np.isfinite([acc, x, y]).all():
        with np.errstate(all="ignore"):
            return float(np.float64(x) * np.float64(y) + np.float64(acc))
    total = Fraction(acc) + Fraction(x) * Fraction(y)
    if total == 0:
        return float(np.float64(x * y) + acc) if x * y == 0 else 0.0
    return rounded(total)


def test_emulated_pairs_are_what_the_manual_says() -> None:
    """On every processor: the sum first takes the upper product, then the lower one."""
    with np.errstate(all="ignore"):
        acc, x, y = sums_and_words(1 << 12, 1)
        got = dots("emulated pairs", 8, acc, x, y)
        a, b = (w.view(BFLOAT16).astype(np.float64).reshape(-1, 2) for w in (x, y))
        expected = [
            added(added(float(s), *high), *low)
            for s, high, low in zip(
                acc,
                zip(a[:, 1], b[:, 1], strict=True),
                zip(a[:, 0], b[:, 0], strict=True),
                strict=True,
            )
        ]
    assert_same(got, np.array(expected, np.float32))


def rounder(tile: Tile) -> Any:
    """Return what rounds two vectors at a time: to words of both, and each side by side."""
    W = tile.W

    @jit
    def run(n: int, source: int, words: int, halves: int) -> None:
        for i in range(0, 4 * n, 8 * W):
            x, y = lanes.load(tile, source + i), lanes.load(tile, source + i + 4 * W)
            lanes.store(words + i // 2, lanes.pair_up(tile, x, y))
            lanes.store_halves(tile, halves + i // 2, x)
            lanes.store_halves(tile, halves + i // 2 + 2 * W, y)

    return run


@pytest.mark.parametrize("W", [16, 4])
def test_rounding_to_pairs(W: int) -> None:
    """To nearest even, without subnormal numbers; by lanes or side by side, in both forms."""
    numbers = around_all(BFLOAT16)
    numbers = numbers[: numbers.size // 32 * 32].copy()
    with np.errstate(all="ignore"):
        tiny = np.abs(numbers) < 2.0**-126
        expected = np.where(tiny, np.copysign(0, numbers), numbers).astype(BFLOAT16)
    for product in ("emulated pairs", *(["pairs"] if HAS_PAIRS else [])):
        run = rounder(Tile("float32", W, 1, 1, "bfloat16", product))
        words, halves = np.empty_like(expected), np.empty_like(expected)
        run(numbers.size, *(x.ctypes.data for x in (numbers, words, halves)))
        assert_same(halves, expected)
        both = words.reshape(-1, W, 2).transpose(0, 2, 1)
        assert_same(np.ascontiguousarray(both).reshape(-1), expected)


@pytest.mark.skipif(not HAS_PAIRS, reason="the processor has no AVX512-BF16")
def test_attention_in_pairs_has_the_bits_of_the_emulation() -> None:
    found: dict[str, list[Array]] = {}
    for product in ("pairs", "emulated"):
        with bfloat16_as(product):
            results = found.setdefault(product, [])
            for name in ("odd sizes", "few queries of a group", "everything, modifiers too"):
                case = next(c for c in CASES if c.name == name)
                q, k, v, options = case.make(BFLOAT16)
                (out, lse), vjp = nattn.attention_vjp(q, k, v, return_lse=True, **options)
                # dk and dv add up the rows of a tile first, which is smaller for the emulation
                results += [out, lse, gradients(vjp, out)[0]]
            q, k, v = qkv(1, 2, 12, 70, 24, dtype=BFLOAT16)
            out, vjp = nattn.attention_vjp(q, k, v)
            results += gradients(vjp, out)
    for x, y in zip(*found.values(), strict=True):
        assert_same(x, y)


# The contract, in pairs: that of `computed` is for whatever this processor takes


NAMES = (
    *("plain", "one query", "few queries of a group", "odd sizes", "D=1, Dv=5", "many blocks"),
    *("causal, an offset for each item", "window", "mask", "bias with -inf", "lengths"),
    *("everything, modifiers too", "sinks, few queries of a group, no keys in one item"),
)


@pytest.mark.parametrize("name", NAMES)
def test_case_in_pairs(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    q, k, v, options = case.make(BFLOAT16)
    with bfloat16_as("emulated"):
        check("cpu", q, k, v, **options)
        check_gradients("cpu", q, k, v, **options)


@settings(max_examples=20)
@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    """Of q, k, v and out: reversed, broadcast, with gaps, and at odd addresses; the same bits."""
    dtype = data.draw(st.sampled_from(NARROW))
    product = data.draw(st.sampled_from(["float32", "emulated"]))
    Nq, Nk, D, Dv = (data.draw(st.integers(1, n)) for n in (40, 70, 20, 20))
    causal = data.draw(st.booleans())

    def laid_out(x: Array) -> Array:
        how = data.draw(st.sampled_from(["plain", "reversed", "gaps", "odd", "transposed"]))
        if how == "reversed":
            return x[..., ::-1, ::-1].copy()[..., ::-1, ::-1]
        if how == "gaps":
            return np.repeat(np.repeat(x, 3, axis=-1), 2, axis=-2)[..., ::2, ::3]
        if how == "odd":
            memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)
            memory[:] = x.ravel()
            return memory.reshape(x.shape)
        return np.asfortranarray(x) if how == "transposed" else x

    q, k, v = gaussian(2, Nq, D), gaussian(2, Nk, D, seed=1), gaussian(2, Nk, Dv, seed=2)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    with bfloat16_as(product):
        plain, lse = nattn.attention(q, k, v, causal=causal, return_lse=True)
        out = np.zeros((2, Nq, 2 * Dv), dtype)[..., ::-2]
        nattn.attention(laid_out(q), laid_out(k), laid_out(v), causal=causal, out=out)
        assert_same(np.ascontiguousarray(out), plain)
        grads = nattn.attention_backward(plain, q, k, v, plain, lse, causal=causal)
        others = nattn.attention_backward(
            laid_out(plain), laid_out(q), laid_out(k), laid_out(v), plain, lse, causal=causal
        )
        for x, y in zip(grads[:3], others[:3], strict=True):
            assert x is not None
            assert y is not None
            assert_same(np.ascontiguousarray(x), np.ascontiguousarray(y))


def test_what_is_hidden_is_never_read(kind: np.dtype) -> None:
    """NaN and Inf beside a visible key of the same pair, forward and backward."""
    q, k, v = qkv(1, 2, 21, 45, 6, dtype=kind)
    for options in ({"causal": True}, {"window_size": (4, 2)}, {"kv_lens": 31}):
        (out, lse), vjp = nattn.attention_vjp(q, k, v, return_lse=True, **options)
        grads = gradients(vjp, out)
        for value in (nan, inf):
            k2, v2 = k.copy(), v.copy()
            if "kv_lens" in options:
                k2[..., 31:, :] = v2[..., 31:, :] = value
                seen = np.ones(21, bool)
            else:  # key 44 is seen by the last rows alone
                k2[..., 44, :] = v2[..., 44, :] = value
                seen = np.arange(21) < 20 - (2 if "window_size" in options else 0)
            (out2, lse2), vjp2 = nattn.attention_vjp(q, k2, v2, return_lse=True, **options)
            assert_same(out2[:, :, seen], out[:, :, seen])
            assert_same(lse2[:, :, seen], lse[:, :, seen])
            if np.isnan(value):  # a product with inf may be a score of -inf, which hides
                assert np.isnan(lse2[:, :, ~seen]).all()
                assert np.isnan(out2[:, :, ~seen].astype(np.float32)).all()
            others = gradients(vjp2, out)
            assert_same(others[0][:, :, seen], grads[0][:, :, seen])
            if seen.all():
                for x, y in zip(others[1:], grads[1:], strict=True):
                    assert_same(x[..., :31, :], y[..., :31, :])
                    assert not x[..., 31:, :].any()


def test_bits_depend_on_the_item_alone(kind: np.dtype) -> None:
    q, k, v = qkv(3, 2, 130, 150, 16, dtype=kind)
    lens = [150, 61, 140]
    threads = numba.get_num_threads()
    try:
        results = []
        for n in (1, threads):
            numba.set_num_threads(n)
            out, vjp = nattn.attention_vjp(q, k, v, kv_lens=lens, causal=True)
            results.append((out, *gradients(vjp, out)))
    finally:
        numba.set_num_threads(threads)
    for x, y in zip(*results, strict=True):
        assert_same(x, y)
    alone, vjp = nattn.attention_vjp(q[1], k[1, :, :61], v[1, :, :61], causal=True)
    assert_same(alone, results[0][0][1])
    assert_same(gradients(vjp, alone)[0], results[0][1][1])


def test_scores_of_float16_do_not_overflow() -> None:
    q, k, v = (200 * x for x in qkv(1, 1, 9, 20, 64, dtype=np.float16))
    assert np.abs(q[0, 0].astype("f4") @ k[0, 0].astype("f4").T).max() > 2 * 65504
    check("cpu", q, k, v)
    check_gradients("cpu", q, k, v, scale=1e-6)


def test_a_result_that_is_too_large_is_infinite() -> None:
    q, k, v = qkv(1, 1, 3, 1, 4, dtype=np.float16)
    v[...] = 60000
    _, vjp = nattn.attention_vjp(q, k, v)
    _, _, dv = gradients(vjp, np.full((1, 1, 3, 4), 60000, np.float16))
    assert np.isposinf(dv).all()  # 3 * 60000


def test_what_pairs_flush() -> None:
    """Subnormal inputs count as 0 in pairs, and are numbers as others are in float32."""
    q, k, v = (np.ones((40, 4), BFLOAT16) for _ in "qkv")  # more rows than are decoded
    v[...] = 2.0**-130
    with bfloat16_as("float32"):
        assert (nattn.attention(q, k, v) == v).all()
    with bfloat16_as("emulated"):
        assert not nattn.attention(q, k, v).any()
        assert nattn.attention(q, k, 16 * v).all()


# How exact


def dense_in_float32(q: Array, k: Array, v: Array, unit: str) -> Array:
    """Return what computing densely in float32 gives, weights and output rounded to 16 bits."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    s = (q @ k.transpose(0, 2, 1)) * np.float32(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    total = p.sum(axis=-1, keepdims=True)
    out: Array = ((p.astype(unit).astype(np.float32) @ v) / total).astype(unit)
    return out


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_is_that_of_rounding(kind: np.dtype, causal: bool) -> None:
    """At most twice that of a dense computation in float32 that rounds the same things."""
    q, k, v = qkv(1, 2, 130, 700, 64, dtype=kind)
    exact = nattn.attention(*(x.astype("f8") for x in (q, k, v)), causal=causal)
    error = rms(nattn.attention(q, k, v, causal=causal).astype("f8") - exact)
    q, k, v = (x[0] for x in (q, k, v))
    full = nattn.attention(*(x.astype("f8") for x in (q, k, v)))
    plain = rms(dense_in_float32(q, k, v, kind.name).astype("f8") - full)
    assert error < 2 * plain
    assert error < 2 * UNIT[kind.name] * rms(exact)


@pytest.mark.parametrize("causal", [False, True])
def test_no_error_is_larger_than_that_of_torch(kind: np.dtype, causal: bool) -> None:
    torch = pytest.importorskip("torch", reason="no torch")
    numbers = np.random.default_rng(0).standard_normal((4, 1, 2, 512, 64), dtype=np.float32)
    q, k, v, dout = (x.astype(kind) for x in numbers)
    as_tensors = (torch.from_numpy(x.view(np.int16)) for x in (q, k, v, dout))
    tensors = [x.view(getattr(torch, kind.name)) for x in as_tensors]
    for x in tensors[:3]:
        x.requires_grad_()
    its = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], is_causal=causal)
    its.backward(tensors[3])
    out, vjp = nattn.attention_vjp(q, k, v, causal=causal)
    exact, exact_vjp = nattn.attention_vjp(*(x.astype("f8") for x in (q, k, v)), causal=causal)
    ours = [out, *gradients(vjp, dout)]
    theirs = [its.detach(), *(x.grad for x in tensors[:3])]
    truth = [exact, *gradients(exact_vjp, dout.astype("f8"))]
    for x, y, z in zip(ours, theirs, truth, strict=True):
        # of numbers that are rounded alike, one may be luckier than the other by a hundredth
        assert rms(x.astype("f8") - z) < 1.01 * rms(y.float().numpy() - z)


def test_the_rounding_of_out_does_not_reach_dq(kind: np.dtype) -> None:
    """Keys with a common part: an error of delta times it would be all that dq shows."""
    q, k, v = qkv(1, 2, 64, 300, 16, dtype=kind)
    k = (k.astype("f4") + 30).astype(kind)
    q = (q.astype("f4") / 8).astype(kind)
    v = (v.astype("f4") + 2).astype(kind)
    (out, lse), vjp = nattn.attention_vjp(q, k, v, return_lse=True)
    dout = gaussian(*out.shape, seed=9).astype(kind)
    wide = [x.astype("f8") for x in (q, k, v)]
    _, exact_vjp = nattn.attention_vjp(*wide)
    exact, kept = gradients(exact_vjp, dout.astype("f8"))[0], gradients(vjp, dout)[0]
    again = nattn.attention_backward(dout, q, k, v, out, lse).dq
    biased = nattn.attention_backward(
        dout, q, k, v, out.astype("f4"), lse
    ).dq  # what is passed in float32 is taken as it is
    assert again is not None
    assert biased is not None
    assert_same(again, kept)
    size = rms(exact)
    assert rms(kept.astype("f8") - exact) < 0.5 * rms(biased.astype("f8") - exact)
    assert rms(kept.astype("f8") - exact) < 40 * UNIT[kind.name] * size


def test_backward_of_a_share_of_the_keys(kind: np.dtype) -> None:
    """Rows whose lse is not that of these keys alone keep the out that was passed."""
    q, k, v = qkv(1, 1, 20, 60, 8, dtype=kind)
    (out, lse), vjp = nattn.attention_vjp(q, k, v, return_lse=True)
    whole = gradients(vjp, out)[0]
    parts = [
        nattn.attention_backward(out, q, k[:, :, part], v[:, :, part], out, lse, wrt=("q",)).dq
        for part in (slice(0, 30), slice(30, 60))
    ]
    total: Array = sum((x.astype("f8") for x in parts if x is not None), np.zeros(q.shape))
    # delta is off by the rounding of out: of 8 terms of size 1, times weights that sum to 1
    np.testing.assert_allclose(total, whole.astype("f8"), atol=24 * UNIT[kind.name])


# Around it


@each_narrow
def test_looks(dtype: np.dtype) -> None:
    q, k, _ = qkv(2, 4, 30, 50, 8, dtype=dtype)
    wide = q.astype("f8"), k.astype("f8")
    rows = functools.partial(nattn.attention_weights, rows=[0, 7, 29])
    for look in (nattn.attention_map, nattn.row_stats, nattn.key_mass, rows):
        got: Any = look(q, k, causal=True)
        expected: Any = look(*wide, causal=True)
        if not isinstance(got, tuple):
            got, expected = (got,), (expected,)
        for x, y in zip(got, expected, strict=True):
            assert x.dtype in (np.float32, np.int64)
            np.testing.assert_allclose(x.astype("f8"), y, rtol=1e-4, atol=1e-5)


def test_bfloat16_under_other_names() -> None:
    q, k, v = qkv(1, 2, 5, 7, 4, dtype=BFLOAT16)
    expected = nattn.attention(q, k, v)
    bits = [x.view(np.uint16).view(dtypes.BFLOAT16_BITS) for x in (q, k, v)]
    assert_same(nattn.attention(*bits), expected)

    class Interface:
        """An array that says of its dtype what the array interface can."""

        def __init__(self, x: Array) -> None:
            self.x = x
            self.__array_interface__ = x.__array_interface__ | {
                "descr": [("bfloat16", "<u2")],
                "typestr": "|V2",
            }

    assert as_array("q", Interface(q)).dtype == BFLOAT16
    others: Any = [Interface(x) for x in (q, k, v)]
    assert_same(nattn.attention(*others), expected)


def test_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((3, 4), np.uint16).view(dtypes.BFLOAT16_BITS)
    dtypes.bfloat16.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    try:
        with pytest.raises(TypeError, match=r"^q: expected the package ml_dtypes .*\[bfloat16\]"):
            nattn.attention(x, x, x)
    finally:
        dtypes.bfloat16.cache_clear()


@each_narrow
def test_mixed_with_wider_numbers(dtype: np.dtype) -> None:
    q, k, v = qkv(1, 2, 5, 7, 4, dtype=dtype)
    wide = q.astype("f4")
    with pytest.raises(TypeError, match=rf"^q, k, v: expected one dtype, got float32, {dtype}"):
        nattn.attention(wide, k, v)
    with pytest.raises(TypeError, match=rf"^out: expected dtype float32 .*got {dtype}|got <f2"):
        nattn.attention(wide, wide, wide, out=np.zeros(q.shape, dtype))
    with pytest.raises(TypeError, match=rf"^out: expected dtype {dtype} .*got <f4"):
        nattn.attention(q, q, q, out=np.zeros(q.shape, "f4"))
    lse = np.zeros(q.shape[:3], "f4")
    with pytest.raises(TypeError, match=rf"^dout: expected dtype {dtype} as of q, got float32"):
        nattn.attention_backward(wide, q, q, q, q, lse)
    with pytest.raises(TypeError, match=rf"^out: expected dtype float32 as of q, got {dtype}"):
        nattn.attention_backward(wide, wide, wide, wide, q, lse)
    with pytest.raises(TypeError, match=rf"^out: expected dtype {dtype} as of q, got float64"):
        nattn.attention_backward(q, q, q, q, q.astype("f8"), lse)


def test_the_product_is_chosen_and_shown(child: Callable[..., str]) -> None:
    shown = {}
    for asked in ("", "float32", "emulated"):
        facts = json.loads(child("show_info", NATTN_BFLOAT16=asked))
        shown[asked] = facts["tiles"]["bfloat16"]["products"]
    assert shown["float32"] == "float32 fma"
    assert shown["emulated"] == "float32 emulated pairs"
    assert shown[""] == f"float32 {tiles.bfloat16_product()}"


def test_what_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "cpu", lambda: tiles.Cpu("znver9", frozenset({"avx2"}), "AVX2"))
    for asked, error, text in (
        (
            "fast",
            ValueError,
            r"^NATTN_BFLOAT16: expected 'float32', 'pairs', 'emulated' or nothing",
        ),
        ("pairs", RuntimeError, r"^NATTN_BFLOAT16: expected .* without AVX512-BF16, got 'pairs'"),
    ):
        with pytest.raises(error, match=text), bfloat16_as(asked):
            tiles.bfloat16_product()
    with bfloat16_as(""):
        assert tiles.bfloat16_product() == "fma"
    features = frozenset({"avx512f", "avx512vl", "avx512bf16"})
    for name, product in (("znver5", "pairs"), ("znver4", "pairs"), ("emeraldrapids", "fma")):
        monkeypatch.setattr(tiles, "cpu", lambda name=name: tiles.Cpu(name, features, "AVX-512"))
        with bfloat16_as(""):
            assert tiles.bfloat16_product() == product
