"""A cache of nattn in models of transformers."""

from __future__ import annotations

import copy
import doctest
import importlib
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no torch")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="no transformers")
adapter = importlib.import_module("nattn.integrations.transformers")
utilities = importlib.import_module("transformers.cache_utils")
Tensor = Any

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # their own
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model(kind: str, name: str, **more: Any) -> Any:
    adapter.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    config._attn_implementation = name
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return made


STORES: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "pages": {"page_size": 4},
    "int8": {"quantize": "int8"},
    "pages in int8": {"page_size": 4, "quantize": "int8"},
}
KINDS: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": {"sliding_window": 6}}


@pytest.fixture
def nothing_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rows: Any) -> Any:
        raise AssertionError("the rows of a cache were gathered")

    monkeypatch.setattr(adapter.CachedRows, "dense", refuse)


def generate(made: Any, cache: Any, **args: Any) -> Tensor:
    prompt = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(prompt)
    seen[1, :4] = 0
    given = {"attention_mask": seen, "cache": cache, "do_sample": False}
    return made.generate(prompt, **given, min_new_tokens=12, max_new_tokens=12, **args)


@pytest.mark.parametrize("name", ["nattn", "sdpa"])
@pytest.mark.parametrize("args", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens(kind: str, args: Any, name: str) -> None:
    made = model(kind, name, **KINDS[kind])
    expected = generate(made, utilities.DynamicCache(config=made.config), **args)
    for store in ("in one piece", "pages"):
        cache = adapter.NattnCache(made.config, capacity=12, **STORES[store])  # it has to grow
        assert torch.equal(generate(made, cache, **args), expected)
        assert cache.get_seq_length() == 20
        assert torch.equal(generate(made, adapter.NattnCache(**STORES[store]), **args), expected)


SEEN = {
    "all": torch.ones(2, 30, dtype=torch.long),
    "left": (torch.arange(30) >= torch.tensor([[0], [5]])).long(),
    "right": (torch.arange(30) < torch.tensor([[30], [16]])).long(),
    "between": (abs(torch.arange(30) - torch.tensor([[99], [9]])) > 1).long(),
}


@pytest.mark.usefixtures("nothing_gathered")
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_pages_and_little_else_in_int8(kind: str, seen: str) -> None:
    made = model(kind, "nattn", **KINDS[kind])
    x = torch.randint(3, 100, (2, 30), generator=torch.Generator().manual_seed(1))

    def logits(store: str) -> Tensor:
        cache, parts, n = adapter.NattnCache(made.config, **STORES[store]), [], 0
        for chunk in x.split([11, 6, 1, 1, 11], dim=1):
            n += chunk.shape[1]
            mask = SEEN[seen][:, :n]
            parts.append(made(input_ids=chunk, attention_mask=mask, cache=cache).logits)
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        found = {store: logits(store) for store in STORES}
        whole = made(input_ids=x, attention_mask=SEEN[seen], use_cache=False).logits
    assert torch.equal(found["pages"], found["in one piece"])
    assert torch.equal(found["pages in int8"], found["int8"])
    real = SEEN[seen].bool()
    size = float(whole.square().mean().sqrt())
    assert float((found["pages"] - whole)[real].abs().max()) < 60 * 2**-23 * size * 4
    moved = float((found["int8"] - whole)[real].square().mean().sqrt())
    # Of two layers keys and values err by half a 127th of the largest in their row, each.
    assert 0 < moved < 4 * size / 254


@pytest.mark.usefixtures("nothing_gathered")
@pytest.mark.parametrize("args", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_reads_the_cache_where_it_lies(kind: str, store: str, args: Any) -> None:
    made = model(kind, "nattn", **KINDS[kind])
    prompt = torch.randint(3, 9, (1, 30), generator=torch.Generator().manual_seed(3))
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, **args}

    def tokens(cache: Any) -> Tensor:
        return made.generate(prompt, cache=cache, **given, min_new_tokens=9, max_new_tokens=9)

    found = tokens(adapter.NattnCache(made.config, **STORES[store]))
    assert found.shape == (1, 39)
    if "int8" in store:  # another token may win, but from the same bits
        expected = tokens(adapter.NattnCache(made.config, quantize="int8"))
    else:
        expected = tokens(utilities.DynamicCache(config=made.config))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on(kind: str, store: str) -> None:
    made = model(kind, "nattn", **KINDS[kind])
    said = torch.randint(3, 100, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = adapter.NattnCache(made.config, **STORES[store])

    def answer(prompt: Tensor, cache: Any) -> Tensor:
        given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "cache": cache}
        return made.generate(prompt, **given, min_new_tokens=5, max_new_tokens=5)

    heard = answer(said[:, :9], cache)
    prefix = copy.deepcopy(cache)
    for more in (said[:, 9:20], said[:, 20:31]):  # the second from where the first began
        prompt = torch.cat([heard, more], dim=1)
        went_on = copy.deepcopy(prefix)
        found = answer(prompt, went_on)
        assert went_on.get_seq_length() == found.shape[1] - 1
        if "int8" not in store:
            assert torch.equal(found, answer(prompt, utilities.DynamicCache(config=made.config)))
    assert prefix.get_seq_length() == 13


def rows(n: int, dtype: Any = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.randn(2, 2, 3, n, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made[0], made[1]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_does_what_theirs_does(dtype: Any, store: str) -> None:
    ours = adapter.KVCacheLayer(capacity=8, **STORES[store])
    theirs = utilities.DynamicLayer()
    both = ours, theirs

    def same(x: Tensor, y: Tensor) -> None:
        if "int8" not in store:
            assert torch.equal(x, y)
            return
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        error = max(float(e.max()) for e in (ours.cache.error().k, ours.cache.error().v))
        error += float(y.abs().max()) * torch.finfo(dtype).eps  # to be of this dtype again
        assert 0 < float((x - y).abs().max()) <= error

    def compare() -> None:
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        if ours.get_seq_length():
            same(ours.keys, theirs.keys)
            same(ours.values, theirs.values)

    compare()
    for n, count in enumerate((5, 1, 1, 1, 6)):
        found, expected = (x.update(*rows(count, dtype, n)) for x in both)
        for x, y in zip(found, expected, strict=True):
            same(x, y)
        compare()
    changes: list[tuple[int, Any]] = [
        (2, lambda x: x.crop(-3)),
        (2, lambda x: x.reorder_cache(torch.tensor([1, 1]))),
        (2, lambda x: x.crop(0)),
        (4, lambda x: x.batch_repeat_interleave(2)),
        (2, lambda x: x.batch_select_indices(torch.tensor([3, 0]))),
        (2, lambda x: x.crop(-1)),
        (2, lambda x: x.reset()),
    ]
    for batch, change in changes:
        for x in both:
            change(x)
        compare()
        for x in both:
            x.update(*(torch.cat([y] * (batch // 2)) for y in rows(2, dtype, 9)))
        compare()
    twin = copy.deepcopy(ours)
    twin.update(*rows(1, dtype))
    compare()
    assert twin.get_seq_length() == 3


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_layer_with_a_window_does_what_theirs_does(quantize: str | None) -> None:
    ours = adapter.KVCacheLayer(sliding_window=4, quantize=quantize)
    theirs = utilities.DynamicSlidingWindowLayer(sliding_window=4)
    both = ours, theirs
    theirs.activate_past_recording()  # or it cannot be cropped
    for n, (count, crop) in enumerate([(2, 0), (1, 0), (5, -3), (2, -1), (1, 0), (9, 0), (3, -2)]):
        assert ours.get_mask_sizes(count) == theirs.get_mask_sizes(count)
        found, expected = (x.update(*rows(count, seed=n)) for x in both)
        for x, y in zip(found, expected, strict=True):
            assert x.shape == y.shape
            error = 0.0 if quantize is None else float(ours.cache.error().k.max()) * 2
            assert float((x - y).abs().max()) <= error
        for x in both:
            x.crop(crop)
            x.reorder_cache(torch.tensor([1, 0]))
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_max_length() == 4
    assert ours.is_sliding
    with pytest.raises(ValueError, match="lengths: expected at least"):
        ours.crop(-10)


def test_a_ring_gives_the_room_of_a_long_prompt_back() -> None:
    layer = adapter.KVCacheLayer(sliding_window=8)
    layer.update(*rows(100))
    most = layer.nbytes
    layer.update(*rows(1))
    assert layer.nbytes < most / 10
    assert layer.keys.shape[2] == 8


def test_beams_share_pages() -> None:
    layer = adapter.KVCacheLayer(page_size=4, capacity=32)
    layer.update(*rows(30))
    free = layer.pool.free_pages
    layer.reorder_cache(torch.tensor([1, 1]))
    assert layer.pool.free_pages == free + 8
    layer.batch_repeat_interleave(3)
    assert layer.pool.free_pages == free + 8
    layer.update(*(torch.cat([x] * 3) for x in rows(1)))  # each has a last page of its own
    assert layer.pool.free_pages == free + 8 - 5
    layer.batch_select_indices(torch.tensor([True] + 5 * [False]))
    assert layer.pool.free_pages == free + 8
    assert torch.equal(layer.keys[:, :, :30], rows(30)[0][1:])


def test_int8_takes_little_more_than_a_quarter() -> None:
    bytes_of = {}
    for store, options in STORES.items():
        layer = adapter.KVCacheLayer(capacity=64, **options)
        layer.update(*torch.randn(2, 2, 3, 10, 64))
        bytes_of[store] = layer.nbytes
    assert bytes_of["in one piece"] == 2 * 2 * 3 * 64 * 64 * 4
    for pages in ("pages", "in one piece"):
        ratio = bytes_of["int8" if pages != "pages" else "pages in int8"] / bytes_of[pages]
        assert ratio == (64 + 4) / (4 * 64)
    made = model("Mistral", "nattn", layer_types=["full_attention", "sliding_attention"])
    cache = adapter.NattnCache(made.config, quantize="int8")
    assert cache.nbytes == 0
    generate(made, cache)
    assert cache.nbytes == sum(x.pool.nbytes for x in cache.layers)
    theirs = utilities.LinearAttentionAndFullAttentionLayer()
    theirs.update(*rows(3))
    mixed = adapter.NattnCache()
    mixed.layers = [theirs]
    assert mixed.nbytes == 2 * 2 * 3 * 3 * 4 * 4


# Attention on what a cache returned


def attend(layer: Any, q: Tensor, k: Any = None, v: Any = None, **args: Any) -> Tensor:
    module = torch.nn.Module()
    k, v = (layer.keys if k is None else k), (layer.values if v is None else v)
    given: dict[str, Any] = {"attention_mask": None, "is_causal": False, **args}
    return adapter.attention_forward(module, q, k, v, **given)[0]


def queries(**args: Any) -> Tensor:
    return torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(7), **args)


@pytest.mark.usefixtures("nothing_gathered")
@pytest.mark.parametrize("store", ["int8", "pages in int8"])
def test_int8_errs_as_its_bound_says(store: str) -> None:
    layer = adapter.KVCacheLayer(**STORES[store])
    k, v = rows(40)
    layer.update(k[:, :, :30], v[:, :, :30])
    layer.update(k[:, :, 30:], v[:, :, 30:])
    q = queries()
    for args in ({}, {"is_causal": True}, {"softcap": 3.0}, {"s_aux": torch.ones(6)}):
        found, exact = attend(layer, q, **args), attend(layer, q, k, v, **args)
        bound = layer.cache.error(q.transpose(1, 2)).out.max()
        assert 0 < float((found - exact).abs().max()) <= bound + 1e-6


@pytest.mark.parametrize("store", ["pages", "int8", "pages in int8"])
def test_what_a_cache_knows_nothing_of_is_computed_from_copies(store: str) -> None:
    layer = adapter.KVCacheLayer(**STORES[store])
    layer.update(*rows(9))
    k, v = layer.keys.clone(), layer.values.clone()
    q = queries(requires_grad=True)
    plain = q.detach().clone().requires_grad_()
    out, expected = attend(layer, q), attend(layer, plain, k, v)
    for x in (out, expected):
        x.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(q.grad, plain.grad)
    with torch.no_grad():
        found = []
        for keys, values in ((None, None), (k, v)):
            torch.manual_seed(0)
            found.append(attend(layer, q, keys, values, dropout=0.5))
        assert torch.equal(*found)
        before = layer.keys, layer.values
        layer.update(*rows(3, seed=1))  # these are not all any longer
        assert torch.equal(attend(layer, q, *before), attend(layer, q, k, v))
    mixed = attend(layer, q.detach(), layer.keys, layer.values.clone())
    close = torch.finfo(torch.float32).eps * 20
    assert float((mixed - attend(layer, q.detach())).abs().max()) < close


def test_cross_attention_reads_what_was_put_in_once(nothing_gathered: None) -> None:
    sizes = {"d_model": 64, "vocab_size": 100, "num_mel_bins": 8, "max_source_positions": 20}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**sizes, **special, decoder_start_token_id=1)
    made = transformers.WhisperForConditionalGeneration(config).eval()
    adapter.enable(made)
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    steps = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for options in ({}, {"page_size": 4}):
        cache = utilities.EncoderDecoderCache(
            *(adapter.NattnCache(config, **options) for _ in range(2))
        )
        with torch.no_grad():
            encoded = made.model.encoder(sound)
            parts = [
                made(encoder_outputs=encoded, decoder_input_ids=x, cache=cache).logits
                for x in steps.split([5, 1, 3], dim=1)
            ]
        found.append(torch.cat(parts, dim=1))
        assert cache.cross_attention_cache.get_seq_length() == 20
    assert torch.equal(*found)


def test_masks_that_are_no_window_are_computed_from_copies() -> None:
    layer = adapter.KVCacheLayer(sliding_window=4)
    k, v = rows(12)
    layer.update(k[:, :, :7], v[:, :, :7])
    sizes = layer.get_mask_sizes(5)
    assert sizes == (8, 4)
    layer.update(k[:, :, 7:], v[:, :, 7:])
    mask = torch.rand(2, 1, 5, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    lazy = adapter.lazy_mask(2, 5, 8, 7, 4)  # causal alone
    bias = torch.rand(1, 6, 5, 8, generator=torch.Generator().manual_seed(1))
    for args in ({"attention_mask": mask}, {"attention_mask": lazy}, {"position_bias": bias}):
        found = attend(layer, queries(), **args)
        assert torch.equal(found, attend(layer, queries(), k[:, :, 4:], v[:, :, 4:], **args))


def test_rows_of_a_cache_are_read_only() -> None:
    layer = adapter.KVCacheLayer(quantize="int8")
    keys, values = layer.update(*rows(5))
    kept = keys.clone()
    assert repr(keys) == "<CachedRows of shape (2, 3, 5, 4)>"
    for write in (keys.zero_, lambda: torch.add(kept, 1, out=values)):
        with pytest.raises(ValueError, match="an operation that leaves rows of a cache as they"):
            write()
    layer.update(*rows(1))
    assert torch.equal(keys, kept)
    assert torch.equal(torch.zeros(kept.shape).copy_(keys), kept)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys[:, :, :5], kept.flip(0))
    with pytest.raises(ValueError, match="keys: expected rows of a cache that has only been added"):
        keys.clone()
    layer.crop(-6)
    assert layer.get_seq_length() == 0


def test_it_grows_in_place() -> None:
    layer = adapter.KVCacheLayer(capacity=8)
    first, _ = layer.update(*rows(3))
    kept = first.clone()
    second, values = layer.update(*rows(2, seed=1))
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(first, kept)
    layer.crop(-2)
    third, _ = layer.update(*rows(1, seed=2))
    assert third.data_ptr() == first.data_ptr()
    assert torch.equal(third[:, :, :3], kept)
    assert values.shape == (2, 3, 5, 4)


def test_refused() -> None:
    k, v = rows(2)
    with pytest.raises(ValueError, match="key_states: expected a tensor without a gradient"):
        adapter.KVCacheLayer().update(k.requires_grad_(), v)
    layer = adapter.KVCacheLayer()
    layer.update(*rows(2))
    with pytest.raises(ValueError, match="k_new: expected shape"):
        layer.update(*(x[:, :1] for x in rows(1)))
    assert layer.get_seq_length() == 2
    with pytest.raises(ValueError, match="tokens_to_remove: expected at most 0"):
        layer.crop(1)


def test_refused_options() -> None:
    for error, expected, options in (
        (ValueError, "quantize: expected None or 'int8', got 'int4'", {"quantize": "int4"}),
        (TypeError, "quantize: expected None or 'int8', got 8", {"quantize": 8}),
        (ValueError, "page_size: expected", {"page_size": 0}),
        (ValueError, "capacity: expected", {"capacity": 0}),
    ):
        with pytest.raises(error, match=expected):
            adapter.NattnCache(**options)
    with pytest.raises(ValueError, match="page_size: expected None beside a sliding window"):
        adapter.KVCacheLayer(sliding_window=4, page_size=4)
    config = transformers.Qwen3NextConfig(**SIZES, layer_types=["linear_attention", "hybrid"])
    assert len(adapter.NattnCache(config).layers) == 2
    with pytest.raises(ValueError, match="config: expected layers that see all keys or a window"):
        adapter.NattnCache(config, quantize="int8")


@pytest.mark.parametrize("name", ["caches", "models"])
def test_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"nattn.integrations.transformers.{name}"))
    assert result.attempted > 3
    assert result.failed == 0
