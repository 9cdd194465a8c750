"""Functions of attention-gym, a collection for FlexAttention, beside torch's own dense formula."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no torch")
masks = pytest.importorskip("attn_gym.masks", reason="no attention-gym")
mods = pytest.importorskip("attn_gym.mods", reason="no attention-gym")
documents = importlib.import_module("attn_gym.masks.document_mask")
cases = importlib.import_module("torch_cases")
ours = importlib.import_module("nattn.integrations.torch")
flex_attention, translate = ours.flex_attention, ours.translate
theirs, gaussian = cases.theirs, cases.gaussian
functional = torch.nn.functional
Tensor = Any
Mod = Any

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning:torch", "ignore:return_lse is deprecated:FutureWarning"
)

B, H, D = 2, 4, 8
N = 64
"""Queries and keys where a function is not made for other numbers: a canvas of 8 x 8."""


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's own run its dense formula as it stands, without its compiler."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def compare(
    mod: Mod | None, mask_mod: Mod | None, mask: Any, sizes: tuple[int, int], atol: float = 1e-11
) -> None:
    """Compare result and gradients with those of the formula."""
    Nq, Nk = sizes
    shapes = (B, H, Nq, D), (B, H, Nk, D), (B, H, Nk, D)
    tensors = [
        gaussian(*s, dtype=torch.float64, seed=n).requires_grad_() for n, s in enumerate(shapes)
    ]
    out, lse = flex_attention(*tensors, mod, mask, return_lse=True)
    torch.set_default_dtype(torch.float64)  # of what functions make of integers alone
    try:
        expected, lse64, _ = cases.dense(tensors, mod, mask_mod)
    finally:
        torch.set_default_dtype(torch.float32)
    seen = lse64 > -math.inf
    dout = gaussian(*out.shape, dtype=torch.float64)
    got = torch.autograd.grad((out * dout).sum() + lse[seen].sum(), tensors)
    want = torch.autograd.grad((expected * dout).sum() + lse64[seen].sum(), tensors)
    for x, y in zip((out, lse, *got), (expected, lse64, *want), strict=True):
        np.testing.assert_allclose(x.detach(), y.detach(), rtol=1e-9, atol=atol)


# Masks


def offsets(*lengths: int) -> Tensor:
    return documents.length_to_offsets(list(lengths), "cpu")


def tokens(*places: int) -> Tensor:
    found = torch.zeros(N, dtype=torch.bool)
    found[list(places)] = True
    return found


def shared_prefix() -> Mod:
    prefixes = torch.tensor([0, 0, 0, 3, 3])
    return masks.generate_shared_prefix_mask_mod(offsets(10, 6, 8, 20, 20), prefixes)


def vision() -> Mod:
    intervals = torch.tensor([[0, 27], [5, 27], [27, 50]], dtype=torch.int32)
    return masks.generate_vision_cross_attention_mask_mod(intervals, 12)


def tree() -> Mod:
    ancestors = masks.build_tree_ancestor_matrix([-1, 0, 1, 1, 3, 3, 0], "cpu")
    return masks.generate_jetspec_tree_causal_mask_mod(11, ancestors)


MASKS: dict[str, tuple[Callable[[], Mod], int, int]] = {
    "batches": (lambda: masks.batchify_mask_mod(masks.causal_mask, 16), N, N),
    "block diffusion": (lambda: masks.generate_block_diffusion_mask(N // 2, 8), N, N),
    "causal": (lambda: masks.causal_mask, N, N),
    "dilated window": (lambda: masks.generate_dilated_sliding_window(12, 3), N, N),
    "documents": (
        lambda: masks.generate_doc_mask_mod(masks.causal_mask, offsets(10, 20, 34)),
        N,
        N,
    ),
    "packed": (lambda: masks.generate_packed_causal_doc_mask_mod(offsets(10, 20, 34)), N, N),
    "vision": (vision, 50, 36),
    "global window": (lambda: masks.generate_global_sliding_window(5, tokens(0, 40)), N, N),
    "tree": (tree, 7, 18),
    "draft training": (lambda: masks.generate_jetspec_training_mask_mod(13, 4), 24, 37),
    "neighbours": (lambda: masks.generate_natten(8, 8, 3, 5), N, N),
    "neighbours, tiles": (lambda: masks.generate_tiled_natten(8, 8, 3, 5, 4, 2), N, N),
    "neighbours, Morton": (lambda: masks.generate_morton_natten(8, 8, 3, 5), N, N),
    "prefix": (lambda: masks.generate_prefix_lm_mask(9), N, N),
    "shared prefix": (shared_prefix, N, N),
    "window": (lambda: masks.generate_sliding_window(7), N, N),
    "tiles": (lambda: masks.generate_sta_mask_mod_2d((8, 6), (4, 4), (2, 2), 16), N, N),
    "tiles in 3D": (lambda: masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 4, 2), (2, 2, 2)), N, N),
    "in frames": (lambda: masks.generate_spatial_head_mask_mod(4, 6, 10, 2, True, 4), N, N),
    "over frames": (lambda: masks.generate_temporal_head_mask_mod(4, 6, 10, 2), N, N),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    make, Nq, Nk = MASKS[name]
    mask_mod = make()
    mask = theirs.create_block_mask(mask_mod, None, None, Nq, Nk, device="cpu", BLOCK_SIZE=16)
    compare(None, mask_mod, mask, (Nq, Nk))
    q, k, v = (gaussian(B, H, x, D, dtype=torch.float64) for x in (Nq, Nk, Nk))
    got, own = (f(q, k, v, block_mask=mask) for f in (flex_attention, theirs.flex_attention))
    np.testing.assert_allclose(got, own, rtol=1e-9, atol=1e-11)


def top_tiles() -> Tensor:
    """Return the three of 8 tiles that each tile of queries sees."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(B, H, 8, 8, generator=generator).argsort(-1)[..., :3]


SIZES = torch.tensor([8, 8, 8, 5, 8, 8, 3, 8])
"""Tokens in each tile: two are not full."""


def lists_of_blocks() -> dict[str, tuple[Any, Mod]]:
    fast = importlib.import_module("attn_gym.masks.causal").create_causal_block_mask_fast
    made = {
        "causal": (fast(None, None, N, N, "cpu", 16), masks.causal_mask),
        "causal, all partial": (fast(B, H, N, N, "cpu", 16, False), masks.causal_mask),
    }
    for name, sizes in (("tiles", None), ("tiles, padded", SIZES)):
        mask_mod = masks.generate_vsa_mask_mod(top_tiles(), 8, sizes)
        made[name] = masks.create_vsa_block_mask(top_tiles(), 8, 8, sizes), mask_mod
        halves = masks.create_vsa_flash_block_mask(top_tiles(), 8, 8, 4, sizes)
        made[name.replace("tiles", "halves")] = halves, mask_mod
    return made


@pytest.mark.parametrize(
    "name",
    ["causal", "causal, all partial", "tiles", "tiles, padded", "halves", "halves, padded"],
)
def test_lists_of_blocks(name: str) -> None:
    mask, mask_mod = lists_of_blocks()[name]
    compare(None, mask_mod, mask, (N, N))


# Scores


def graph() -> Tensor:
    edges = torch.rand(B, N, N, generator=torch.Generator().manual_seed(0)) < 0.05
    return edges | edges.mT


def on_distances() -> Mod:
    distances = mods.shortest_path_distances(graph(), 4)
    return mods.generate_graphormer_spatial_bias(gaussian(H, 6), distances)


def on_edges() -> Mod:
    kinds = torch.randint(0, 3, (B, N, N), generator=torch.Generator().manual_seed(0))
    found = mods.shortest_path_edge_types(graph(), kinds, 3)
    return mods.generate_graphormer_edge_bias(gaussian(H, 3, 3, dtype=torch.float64), *found)


GELU = functools.partial(functional.gelu, approximate="tanh")

SCORES: dict[str, Callable[[], Mod]] = {
    "tanh GELU": lambda: mods.generate_activation_score_mod(GELU),
    "ReLU": lambda: mods.generate_activation_score_mod(functional.relu),
    "sigmoid": lambda: mods.generate_activation_score_mod(torch.sigmoid),
    "ALiBi": lambda: mods.generate_alibi_bias(H),
    "distances in a graph": on_distances,
    "edges of a graph": on_edges,
    "sandwich": lambda: mods.generate_sandwich_bias(H, N),
    "softcap": lambda: mods.generate_tanh_softcap(2),
    "softcap, approximate": lambda: mods.generate_tanh_softcap(3, approx=True),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    atol = 1e-6 if name == "sandwich" else 1e-11  # torch multiplies its tables in float32
    compare(SCORES[name](), None, None, (N, N), atol)


@pytest.mark.parametrize(
    ("mod", "kind", "text"),
    [
        (mods.generate_activation_score_mod(), "score_mod", "got aten.erf.default"),
        (
            mods.generate_mla_rope_score_mod(gaussian(B, H, N, 4), gaussian(B, 1, N, 4), H),
            "score_mod",
            r"got aten.dot.default .* of shape \(4,\)",
        ),
        (masks.generate_vsa_mask_mod(top_tiles(), 8), "mask_mod", "got aten.unsqueeze.default"),
    ],
    ids=["GELU", "rotary scores", "top tiles"],
)
def test_refused(mod: Mod, kind: str, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        translate(mod, kind)
