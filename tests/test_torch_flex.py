"""FlexAttention on nattn: `nattn.integrations.torch.flex_attention`."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

import nattn
from nattn.backends.error_budget import stored

torch = pytest.importorskip("torch", reason="no torch")
flex = importlib.import_module("nattn.integrations.torch.flex")
cases = importlib.import_module("torch_cases")
theirs, flex_attention = cases.theirs, flex.flex_attention
gaussian, qkv, block_mask, dense, assert_within_budget, softcap = (
    cases.gaussian,
    cases.qkv,
    cases.block_mask,
    cases.dense,
    cases.assert_within_budget,
    cases.softcap,
)
relative_bias, gated, causal, sliding_window, document, dilated = (
    cases.relative_bias,
    cases.gated,
    cases.causal,
    cases.sliding_window,
    cases.document,
    cases.dilated,
)
nothing_early, SCORE_MODS, MASK_MODS, B, H, Nq = (
    cases.nothing_early,
    cases.SCORE_MODS,
    cases.MASK_MODS,
    cases.B,
    cases.H,
    cases.Nq,
)
Nk, D = cases.Nk, cases.D
Tensor = Any
Mod = Any

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning:torch", "ignore:return_lse is deprecated:FutureWarning"
)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's own run its dense formula as it stands, without its compiler."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("mod", SCORE_MODS, ids=lambda mod: mod.__name__)
def test_score_mods(mod: Mod) -> None:
    q, k, v = qkv()
    got = flex_attention(q, k, v, mod, return_lse=True)
    out, lse, s = dense((q, k, v), mod)
    assert_within_budget(got, s, q, k, v, (out, lse))
    own = theirs.flex_attention(q, k, v, mod, return_lse=True)
    assert_within_budget(got, s, q, k, v, own, wide=16)


@pytest.mark.parametrize("mod", MASK_MODS, ids=lambda mod: mod.__name__)
def test_masks(mod: Mod) -> None:
    q, k, v = qkv()
    for mask in (block_mask(mod, B, H, Nq, Nk, BLOCK_SIZE=8), block_mask(mod, B, H, Nq, Nk)):
        got = flex_attention(q, k, v, block_mask=mask, return_lse=True)
        out, lse, s = dense((q, k, v), None, mod)
        assert_within_budget(got, s, q, k, v, (out, lse))
        own = theirs.flex_attention(q, k, v, block_mask=mask, return_lse=True)
        assert_within_budget(got, s, q, k, v, own, wide=16)
    if mod is nothing_early:
        assert (got[0][:, :, :8] == 0).all()
        assert (got[1][:, :, :8] == -math.inf).all()


@pytest.mark.parametrize("Hkv", [H, 2])
@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [(None, None), (softcap, causal), (gated, nothing_early), (relative_bias, document)],
)
def test_gradients(score_mod: Mod | None, mask_mod: Mod | None, Hkv: int) -> None:
    tensors = qkv(Hkv, torch.float64, grad=True)
    mask = None if mask_mod is None else block_mask(mask_mod)
    out, aux = flex_attention(
        *tensors, score_mod, mask, enable_gqa=True, return_aux=theirs.AuxRequest(lse=True)
    )
    expected, lse, _ = dense(tensors, score_mod, mask_mod)
    seen = lse > -math.inf
    dout, dlse = gaussian(*out.shape, dtype=torch.float64), gaussian(*lse.shape)
    got = torch.autograd.grad((out * dout).sum() + (aux.lse * dlse)[seen].sum(), tensors)
    want = torch.autograd.grad((expected * dout).sum() + (lse * dlse)[seen].sum(), tensors)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    assert aux.max_scores is None


def test_16_bits() -> None:
    q, k, v = qkv(dtype=torch.float16)
    got = flex_attention(q, k, v, softcap, block_mask(causal), return_lse=True)
    out = dense((q, k, v), softcap, causal)[0]
    assert got[0].dtype == torch.float16
    assert got[1].dtype == torch.float32
    limit = np.asarray(stored("float16", np.float64(1e-4), out.abs().numpy()))
    assert (np.abs(got[0].numpy() - out.numpy()) <= limit).all()


def test_one_batch_item_of_keys_serves_all() -> None:
    q, k, v = qkv()
    mask = block_mask(causal, B, None, Nq, Nk)
    got = flex_attention(q, k[:1], v[:1], block_mask=mask)
    same = flex_attention(q, k[:1].repeat(B, 1, 1, 1), v[:1].repeat(B, 1, 1, 1), block_mask=mask)
    assert torch.equal(got, same)
    with pytest.raises(ValueError, match="key: expected 2 batch items as of query, got 1"):
        flex_attention(q, k[:1], v[:1])


# Block masks whose list of blocks says more than the mask_mod


def by_list(mask: Any, mask_mod: Mod) -> Mod:
    """Return what a list of blocks and a mask_mod show together, as one mask_mod."""
    rows, columns = mask.BLOCK_SIZE
    counts, indices = mask.kv_num_blocks, mask.kv_indices
    some = theirs._ordered_to_dense(counts, indices, indices.shape[-1]).bool()
    whole = torch.zeros_like(some)
    if mask.full_kv_indices is not None:
        whole = theirs._ordered_to_dense(
            mask.full_kv_num_blocks, mask.full_kv_indices, indices.shape[-1]
        ).bool()

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = b * 0, h * 0, q_idx // rows, kv_idx // columns
        return whole[place] | (some[place] & mask_mod(b, h, q_idx, kv_idx))

    return visible


@pytest.mark.parametrize("size", [8, (8, 16), (64, 12)], ids=str)
@pytest.mark.parametrize("mask_mod", [None, dilated])
def test_lists_of_blocks_are_honoured(mask_mod: Mod | None, size: Any) -> None:
    made = block_mask(sliding_window, BLOCK_SIZE=size)
    full = made.full_kv_num_blocks.clone()
    mask = theirs.BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        full,
        made.full_kv_indices,
        BLOCK_SIZE=made.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(Nq, Nk),
    )
    q, k, v = qkv()
    visible = by_list(mask, mask_mod or theirs.noop_mask)
    out, lse, s = dense((q, k, v), None, visible)
    got = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    assert_within_budget(got, s, q, k, v, (out, lse))


def test_sliced_block_masks() -> None:
    whole = block_mask(causal, BLOCK_SIZE=8)
    mask = whole[:, :, 2:3]
    q, k, v = (x[:, :, :8] if n == 0 else x for n, x in enumerate(qkv()))
    with pytest.raises(ValueError, match="block_mask: expected one with a mask_mod, got a slice"):
        flex_attention(q, k, v, block_mask=mask)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 16, kv_idx)
    with pytest.raises(ValueError, match=r"block_mask: expected one for the lengths \(8, 36\)"):
        flex_attention(q, k, v, block_mask=mask)
    mask.seq_lengths = (8, Nk)
    got = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(got, nattn.attention(q, k, v, causal=True, q_offset=16))


def test_block_masks_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    make = flex._made

    def counted(*args: Any) -> Any:
        calls.append(args)
        return make(*args)

    monkeypatch.setattr(flex, "_made", counted)
    q, k, v = qkv()
    mask = block_mask(causal)
    first = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), first)
    assert len(calls) == 1
    mask.mask_mod = sliding_window
    other = flex_attention(q, k, v, block_mask=mask)
    assert len(calls) == 2
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": gaussian(H, Nq, D)}, ValueError, "query: expected 4 axes"),
        (
            {"query": gaussian(B, H, Nq, 8)},
            ValueError,
            "key: expected 8 columns as of query, got 16",
        ),
        ({"query": gaussian(B, 8, Nq, D)}, ValueError, "key: expected 8 heads .* enable_gqa=True"),
        ({"key": gaussian(B, H, 5, D)}, ValueError, r"value: expected shape \(2, 4, 5, 'Ev'\)"),
        ({"key": qkv()[1].half()}, TypeError, "key: expected torch.float32 as of query"),
        ({"query": np.zeros(3)}, TypeError, "query: expected a tensor, got ndarray"),
        ({"block_mask": causal}, TypeError, "block_mask: expected a BlockMask of torch"),
        ({"kernel_options": 3}, TypeError, "kernel_options: expected a dict, got int"),
        (
            {"return_aux": theirs.AuxRequest(max_scores=True)},
            NotImplementedError,
            "return_aux: expected max_scores=False",
        ),
        ({"return_aux": theirs.AuxRequest(), "return_lse": True}, ValueError, "return_lse"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True))
    with pytest.raises(error, match=text):
        flex_attention(**{**arguments, **change})


def test_a_block_mask_for_other_sizes() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"block_mask: expected one for the lengths \(40, 36\)"):
        flex_attention(q, k, v, block_mask=block_mask(causal, None, None, Nq, 64))
    with pytest.raises(ValueError, match="block_mask: expected 2 batch items and 4 heads, or 1"):
        flex_attention(q, k, v, block_mask=block_mask(causal, 3, None, Nq, Nk))
