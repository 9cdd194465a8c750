"""Masks of transformers in arguments of nattn, and the function that its layers call."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

import nattn

torch = pytest.importorskip("torch", reason="no torch")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers", reason="no transformers")
adapter = importlib.import_module("nattn.integrations.transformers")
masking_utils = importlib.import_module("transformers.masking_utils")
Tensor = Any

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # their own


def attended(args: dict[str, Any], B: int, Nq: int, Nk: int) -> Any:
    """Return what the definition of attention makes of a mask, in arguments of nattn."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((B, 2, n, 8)) for n in (Nq, Nk))
    v = rng.standard_normal((B, 2, Nk, 8))
    return nattn.attention(q, k, v, backend="reference", **args)


PACKED = torch.tensor([[0] * 7 + [1] * 5, [0] * 3 + [1] * 9])
PLACES = torch.tensor([[*range(7), *range(5)], [*range(3), *range(4, 13)]])
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, 2, 2, 2], [-1] * 6 + [0] * 6])
CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function(4)
CHUNKS = masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2]))
REMAPPED = masking_utils.remap_positions_for_packed_sequence(WINDOW, PLACES)
IMAGES = masking_utils.blockwise_overlay(BLOCKS)
FUNCTIONS = {
    "causal": CAUSAL,
    "all": masking_utils.bidirectional_mask_function,
    "window": WINDOW,
    "two windows": masking_utils.and_masks(masking_utils.sliding_window_overlay(6), WINDOW),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": CHUNKS,
    "packed": masking_utils.and_masks(
        REMAPPED, masking_utils.packed_sequence_mask_function(PACKED)
    ),
    "images": masking_utils.or_masks(CAUSAL, IMAGES),
    "images in a window": masking_utils.or_masks(WINDOW, IMAGES),
    "images packed": masking_utils.and_masks(
        masking_utils.or_masks(REMAPPED, IMAGES),
        masking_utils.packed_sequence_mask_function(PACKED),
    ),
    "all or some": masking_utils.or_masks(masking_utils.bidirectional_mask_function, IMAGES),
}
PADDINGS = {
    "none": None,
    "no padding": torch.ones(2, 12, dtype=torch.bool),
    "left": torch.arange(12) >= torch.tensor([[0], [5]]),
    "right": torch.arange(12) < torch.tensor([[12], [5]]),
    "right, a row empty": torch.arange(12) < torch.tensor([[0], [5]]),
    "holes": torch.arange(12) % 5 != 2,
    "short": torch.arange(10) >= torch.tensor([[0], [3]]),
    "long": torch.arange(15) >= torch.tensor([[0], [3]]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("Nq", "Nk", "first", "start"), [(12, 12, 0, 0), (3, 8, 9, 4)])
def test_mask_in_arguments(function: str, Nq: int, Nk: int, first: int, start: int) -> None:
    for padding in PADDINGS.values():
        padding = padding if padding is None else padding.expand(2, -1)
        sizes = {"batch_size": 2, "q_length": Nq, "kv_length": Nk, "kv_offset": start}
        given = {**sizes, "mask_function": FUNCTIONS[function], "attention_mask": padding}
        offset = torch.tensor(first)
        lazy = adapter.lazy_mask(**given, q_offset=offset)
        offset += Nq  # as a static cache does before the first layer asks
        assert isinstance(lazy, adapter.LazyMask)
        args = lazy.arguments()
        assert lazy._dense is None, "made, though it is known"
        dense = masking_utils.sdpa_mask(**given, q_offset=first, allow_is_causal_skip=False)
        assert torch.equal(lazy & True, dense)
        expected = attended({"mask": dense.numpy()}, 2, Nq, Nk)
        np.testing.assert_allclose(attended(args, 2, Nq, Nk), expected, rtol=0, atol=1e-13)


def test_arguments_of_common_masks() -> None:
    def arguments(function: Any, **given: Any) -> Any:
        lazy = adapter.lazy_mask(2, 12, 12, mask_function=function, **given)
        return lazy.arguments()

    assert arguments(CAUSAL) == {"causal": True, "q_offset": 0}
    assert arguments(WINDOW) == {"causal": True, "q_offset": 0, "window_size": (3, None)}
    assert arguments(FUNCTIONS["all"]) == {}
    assert arguments(FUNCTIONS["all"], attention_mask=PADDINGS["right"]) == {"kv_lens": [12, 5]}
    assert arguments(FUNCTIONS["packed"]).keys() == {
        "causal", "q_offset", "window_size", "mask_mod"
    }  # fmt: skip


def test_blocks_of_documents() -> None:
    lengths = torch.tensor([300, 100, 400])
    document = torch.repeat_interleave(torch.arange(3), lengths)[None]
    places = torch.cat([torch.arange(int(n)) for n in lengths])[None]
    function = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(CAUSAL, places),
        masking_utils.packed_sequence_mask_function(document),
    )
    args = adapter.lazy_mask(1, 800, 800, mask_function=function).arguments()
    assert args["block_mask"].sparsity > 0.3
    dense = masking_utils.sdpa_mask(1, 800, 800, 0, 0, function, allow_is_causal_skip=False)
    expected = attended({"mask": dense.numpy()}, 1, 800, 800)
    np.testing.assert_allclose(attended(args, 1, 800, 800), expected, rtol=0, atol=1e-13)


def test_unknown_functions_make_a_dense_mask() -> None:
    def odd(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 1) & (kv_idx <= q_idx)

    scattered = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(CAUSAL, PLACES.flip(1)),
        masking_utils.packed_sequence_mask_function(PACKED),
    )
    chunks = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(CHUNKS, PLACES),
        masking_utils.packed_sequence_mask_function(PACKED),
    )
    for function in (odd, masking_utils.and_masks(CAUSAL, odd), scattered, chunks):
        lazy = adapter.lazy_mask(2, 12, 12, mask_function=function)
        args = lazy.arguments()
        expected = masking_utils.sdpa_mask(2, 12, 12, 0, 0, function, allow_is_causal_skip=False)
        assert args.keys() == {"mask"}
        assert torch.equal(args["mask"], expected)


def test_lazy_mask_is_a_tensor() -> None:
    lazy = adapter.lazy_mask(2, 5, 7, q_offset=2)
    assert lazy.shape == (2, 1, 5, 7)
    assert lazy.dtype == torch.bool
    assert "made" not in repr(lazy)
    assert isinstance(lazy.detach(), adapter.LazyMask)
    assert isinstance(lazy.to("cpu"), adapter.LazyMask)
    whole = lazy.detach() & True
    assert type(whole) is torch.Tensor
    assert torch.equal(lazy[:, :, -1:], whole[:, :, -1:])
    assert torch.equal(~lazy, ~whole)
    assert torch.equal(torch.cat([lazy, lazy], -1), torch.cat([whole, whole], -1))


def test_what_is_written_to_a_lazy_mask_counts() -> None:
    lazy = adapter.lazy_mask(1, 5, 5)
    assert lazy.arguments() == {"causal": True, "q_offset": 0}
    lazy[:, :, :, 2] = False
    args = lazy.arguments()
    assert args.keys() == {"mask"}
    assert not args["mask"][..., 2].any()
    assert args["mask"][..., 4, 1].all()
    assert not args["mask"][..., 1, 4].any()


def test_masks_are_plain_where_something_is_traced() -> None:
    fake = importlib.import_module("torch._subclasses")
    with fake.FakeTensorMode():
        real = torch.ones(2, 12, dtype=torch.bool)
        assert not isinstance(adapter.lazy_mask(2, 12, 12, attention_mask=real), adapter.LazyMask)


# The layers' function without a mask, and what is refused


def layer(is_causal: bool = True) -> Any:
    made = torch.nn.Identity()
    made.is_causal = is_causal
    made.num_key_value_groups = 2
    return made


def qkv(Nq: int, Nk: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, h, n, 16, generator=generator) for h, n in ((4, Nq), (2, Nk), (2, Nk))
    )


@pytest.mark.parametrize(("Nq", "Nk"), [(12, 12), (5, 12), (12, 5), (1, 12)])
@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("module", [layer(True), layer(False)], ids=["causal", "not causal"])
def test_without_a_mask(module: Any, is_causal: bool | None, Nq: int, Nk: int) -> None:
    theirs = transformers.integrations.sdpa_attention.sdpa_attention_forward
    found, weights = adapter.attention_forward(module, *qkv(Nq, Nk), None, is_causal=is_causal)
    expected, _ = theirs(module, *qkv(Nq, Nk), None, is_causal=is_causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert weights is None
    assert found.shape == (2, Nq, 4, 16)
    assert found.is_contiguous()


def test_window_without_a_mask() -> None:
    for Nq, Nk, is_causal in ((12, 12, True), (1, 12, True), (12, 12, False)):
        distance = torch.arange(Nq)[:, None] + Nk - Nq - torch.arange(Nk)
        visible = distance.abs() <= 4 if not is_causal else (distance >= 0) & (distance < 4)
        args = {"is_causal": is_causal, "sliding_window": 4}
        found, _ = adapter.attention_forward(layer(), *qkv(Nq, Nk), None, **args)
        expected, _ = adapter.attention_forward(layer(), *qkv(Nq, Nk), visible[None, None])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_learnt_queries() -> None:
    q, k, v = qkv(5, 12)
    found, _ = adapter.attention_forward(layer(False), q[:1], k, v, None)
    expected, _ = adapter.attention_forward(layer(False), q[:1].repeat(2, 1, 1, 1), k, v, None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_refused_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected None, got .* from Identity"):
        adapter.attention_forward(layer(), *qkv(5, 5), None, **{name: torch.zeros(1)})
    adapter.attention_forward(layer(), *qkv(5, 5), None, **{name: None})


def test_enable_refuses_layers_that_never_ask() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=100, **sizes))
    before = made.config._attn_implementation
    with pytest.raises(ValueError, match=r"the model itself \(FalconForCausalLM"):
        adapter.enable(made)
    assert made.config._attn_implementation == before
    (row,) = adapter.report(made)
    assert row.name == "transformer.h.0.self_attention"
    assert (row.kind, row.runs) == ("FalconAttention", "its own")
    assert "never asks" in row.reason
    with pytest.raises(TypeError, match="model: expected a PreTrainedModel, got Linear"):
        adapter.enable(torch.nn.Linear(2, 2))
