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


def generate(made: Any, cache: Any, **args: Any) -> Tensor:
    prompt = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(prompt)
    seen[1, :4] = 0
    given = {"attention_mask": seen, "cache": cache, "do_sample": False}
    return made.generate(prompt, **given, min_new_tokens=12, max_new_tokens=12, **args)


@pytest.mark.parametrize("name", ["nattn", "sdpa"])
@pytest.mark.parametrize("args", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    ("kind", "more"), [("Llama", {}), ("Mistral", {"sliding_window": 6})], ids=["Llama", "Mistral"]
)
def test_same_tokens(kind: str, more: Any, args: Any, name: str) -> None:
    made = model(kind, name, **more)
    expected = generate(made, utilities.DynamicCache(config=made.config), **args)
    cache = adapter.NattnCache(made.config, capacity=12)  # it has to grow
    assert torch.equal(generate(made, cache, **args), expected)
    assert cache.get_seq_length() == 20
    assert torch.equal(generate(made, adapter.NattnCache(), **args), expected)


def rows(n: int, dtype: Any = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.randn(2, 2, 3, n, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made[0], made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_does_what_theirs_does(dtype: Any) -> None:
    ours, theirs = adapter.KVCacheLayer(capacity=8), utilities.DynamicLayer()
    both = ours, theirs

    def compare() -> None:
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        if ours.get_seq_length():
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)

    compare()
    for n, count in enumerate((5, 1, 1, 1, 6)):
        found, expected = (x.update(*rows(count, dtype, n)) for x in both)
        assert all(map(torch.equal, found, expected))
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
    with pytest.raises(ValueError, match="crop"):
        layer.crop(1)


@pytest.mark.parametrize("name", ["caches", "models"])
def test_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"nattn.integrations.transformers.{name}"))
    assert result.attempted > 3
    assert result.failed == 0
