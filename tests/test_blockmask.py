"""BlockMask: its face, and attention that skips blocks, to the last bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import assert_near, in_step, qkv, truth
from numpy.typing import NDArray

import nattn
from nattn import BlockMask
from nattn.backends.cpu import tiles
from nattn.functions import masks

Array = NDArray[Any]


def in_table(b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any, start: Any) -> Any:
    """Show what a table of [b, h, row, key] says: any pattern there is."""
    return table[b, h, q_idx - start, kv_idx]


def patchwork(rng: np.random.Generator, shape: tuple[int, ...], patch: tuple[int, int]) -> Array:
    """Return patches that are empty, full, or mixed, half of them empty."""
    B, H, Nq, Nk = shape
    patches = B, H, -(-Nq // patch[0]), -(-Nk // patch[1])
    density = rng.choice([0.0, 0.0, 0.0, 1.0, 1.0, 0.5], patches)
    wide = np.repeat(np.repeat(density, patch[0], axis=2), patch[1], axis=3)
    return rng.random(shape) < wide[:, :, :Nq, :Nk]


# ---------------------------------------------------------------------------------------------
# The face
# ---------------------------------------------------------------------------------------------


def test_from_mask_mod() -> None:
    blocks = BlockMask.from_mask_mod(masks.causal, 1, 2, 5, 9, block_size=4)
    assert isinstance(blocks, nattn.BlockMask)
    assert blocks.kinds.tolist() == [[[[2, 1, 0], [2, 2, 2]]] * 2]  # position 4 + 4 is the last
    assert (blocks.B, blocks.H, blocks.Nq, blocks.Nk, blocks.block_size) == (1, 2, 5, 9, 4)
    assert blocks.q_offset.tolist() == [4]
    assert blocks.sparsity == 1 / 6
    assert repr(blocks).startswith("<BlockMask of causal, B=1, H=2, Nq=5, Nk=9, blocks of 4: 2 ")
    blocks = BlockMask.from_mask_mod(masks.causal, 3, 1, 8, 8, q_offset=[-8, 0, 8], block_size=4)
    assert blocks.kinds[:, 0].tolist() == [[[0, 0], [0, 0]], [[1, 0], [2, 1]], [[2, 2], [2, 2]]]
    assert BlockMask.from_mask_mod(masks.causal, 1, 1, 300, 300).kinds.shape == (1, 1, 3, 3)


@pytest.mark.parametrize("offset", [1 << 70, -(1 << 70)])
def test_an_offset_that_no_array_reaches(offset: int) -> None:
    blocks = BlockMask.from_mask_mod(masks.causal, 1, 1, 8, 8, q_offset=offset, block_size=4)
    assert np.all(blocks.kinds == (masks.FULL if offset > 0 else masks.EMPTY))
    q, k, v = qkv(1, 1, 8, 8, 4)
    same_bits(q, k, v, masks.causal, blocks, q_offset=offset)


@pytest.mark.parametrize("sizes", [(0, 1, 5, 5), (1, 0, 5, 5), (1, 1, 0, 5), (1, 1, 5, 0)])
def test_empty_sizes(sizes: tuple[int, int, int, int]) -> None:
    B, H, Nq, Nk = sizes
    blocks = BlockMask.from_mask_mod(masks.causal, *sizes, block_size=2)
    assert blocks.kinds.shape == (B, H, -(-Nq // 2), -(-Nk // 2))
    assert blocks.sparsity == 0.0
    q, k, v = qkv(*sizes, 4)
    out, lse = nattn.attention(q, k, v, block_mask=blocks, return_lse=True)
    assert out.shape == q.shape
    assert np.all(lse == -np.inf)


def no_condition(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx and h == 0


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"B": -1}, ValueError, r"B: expected an integer of at least 0, got -1"),
    ({"H": 1.5}, TypeError, r"H: expected an integer"),
    ({"Nq": "7"}, TypeError, r"Nq: expected an integer"),
    ({"Nk": -3}, ValueError, r"Nk: expected an integer of at least 0, got -3"),
    ({"block_size": 0}, ValueError, r"block_size: expected an integer of at least 1, got 0"),
    ({"block_size": None}, TypeError, r"block_size: expected an integer"),
    ({"q_offset": [1, 2]}, ValueError, r"q_offset: expected"),
    ({"q_offset": 0.5}, TypeError, r"q_offset: expected"),
    ({"mask_mod": np.ones((4, 4), bool)}, TypeError, r"mask_mod: expected a function mask_mod\("),
    ({"mask_mod": lambda b, h, q_idx: True}, TypeError, r"mask_mod: expected a function mask_mod"),
    ({"mask_mod": masks.document}, TypeError, r"mask_mod: expected .*doc to be bound"),
    ({"mask_mod": no_condition}, TypeError, r"np\.where"),
    ({"mask_mod": lambda b, h, q_idx, kv_idx: q_idx}, TypeError, r"True or False"),
    ({"mask_mod": nattn.mods.compose(nattn.mods.alibi)}, TypeError, r"composed modifiers"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=range(len(BAD)))
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good: dict[str, Any] = {"mask_mod": masks.causal, "B": 1, "H": 1, "Nq": 4, "Nk": 4}
    with pytest.raises(error, match=text):
        BlockMask.from_mask_mod(**good | change)


def test_sizes_beyond_64_bits() -> None:
    """A block that is larger than any array is one block."""
    blocks = BlockMask.from_mask_mod(masks.causal, 1, 1, 8, 8, block_size=1 << 70)
    assert blocks.kinds.tolist() == [[[[masks.MIXED]]]]
    q, k, v = qkv(1, 1, 8, 8, 4)
    same_bits(q, k, v, masks.causal, blocks)


def test_an_index_out_of_range() -> None:
    doc = np.zeros(9, np.int32)
    with pytest.raises(IndexError, match="mask_mod: expected indices within"):
        BlockMask.from_mask_mod(functools.partial(masks.document, doc=doc), 1, 1, 10, 10)


def test_a_call_of_other_sizes(backend: str) -> None:
    blocks = BlockMask.from_mask_mod(masks.causal, 1, 2, 20, 30)
    for sizes in ((1, 3, 20, 30), (1, 2, 21, 30), (1, 2, 20, 31)):
        with pytest.raises(ValueError, match=r"block_mask: expected \(B, H, Nq, Nk\) = "):
            nattn.attention(*qkv(*sizes, 4), block_mask=blocks, backend=backend)
    q, k, v = qkv(1, 2, 20, 30, 4)
    with pytest.raises(ValueError, match=r"block_mask: expected one made for q_offset="):
        nattn.attention(q, k, v, block_mask=blocks, q_offset=3, backend=backend)
    with pytest.raises(ValueError, match="mask_mod: expected None beside block_mask"):
        nattn.attention(q, k, v, block_mask=blocks, mask_mod=masks.causal, backend=backend)
    other: Any = blocks.kinds
    with pytest.raises(TypeError, match=r"block_mask: expected a nattn\.BlockMask"):
        nattn.attention(q, k, v, block_mask=other, backend=backend)


# ---------------------------------------------------------------------------------------------
# Same bits as the mask alone
# ---------------------------------------------------------------------------------------------


def same_bits(
    q: Array,
    k: Array,
    v: Array,
    mask_mod: Callable[..., Any],
    blocks: BlockMask,
    **options: Any,
) -> tuple[Array, Array]:
    """Assert that skipping changes no bit of out and lse, and return them."""
    alone = nattn.attention(q, k, v, return_lse=True, mask_mod=mask_mod, **options)
    out, lse = nattn.attention(q, k, v, return_lse=True, block_mask=blocks, **options)
    for got, expected in zip((out, lse), alone, strict=True):
        np.testing.assert_array_equal(got, expected)  # NaN in the same places
        numbers = ~np.isnan(expected)
        integer = f"i{expected.itemsize}"
        np.testing.assert_array_equal(got[numbers].view(integer), expected[numbers].view(integer))
    return out, lse


def check_table(
    table: Array, q: Array, k: Array, v: Array, block_size: int, **options: Any
) -> tuple[Array, Array]:
    """Compare one pattern with and without its blocks; B and H of the table may be 1."""
    B, H, Nq, Nk = table.shape
    start = options.get("q_offset", Nk - Nq)
    full = np.broadcast_to(table, (q.shape[0], q.shape[1], Nq, Nk))
    mask_mod = functools.partial(in_table, table=full, start=start)
    blocks = BlockMask.from_mask_mod(mask_mod, B, H, Nq, Nk, start, block_size)
    return same_bits(q, k, v, mask_mod, blocks, **options)


BLOCK_SIZES = (8, 33, 64, 100, 128, 256, 1000)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_any_pattern_on_any_blocks(block_size: int) -> None:
    """Patches of other sizes than the blocks, and of the same: whole blocks and their gaps."""
    rng = np.random.default_rng(block_size)
    q, k, v = qkv(1, 2, 200, 700, 16)
    for patch in ((block_size, block_size), (70, 5), (3, 90), (200, 700)):
        table = patchwork(rng, (1, 2, 200, 700), patch)
        check_table(table, q, k, v, block_size)
        check_table(table[:, :1], q, k, v, block_size)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (90, 20)},
    "window, causal": {"window_size": (300, -1), "causal": True},
    "lengths": {"q_lens": [130, 77], "kv_lens": [300, 170]},
    "mask": {"mask": np.random.default_rng(3).random((130, 300)) < 0.7},
    "bias": {"bias": np.where(np.arange(300) % 7 == 0, -np.inf, 0.25).astype("f4")},
    "softcap, ALiBi": {"softcap": 2.0, "alibi_slopes": np.array([0.1, 0.0, 0.3, 1.0])},
    "sinks": {"sinks": np.array([0.5, -np.inf, 3.0, -1.0])},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "everything": {
        "causal": True,
        "window_size": (250, 3),
        "kv_lens": [280, 300],
        "softcap": 3.0,
        "sinks": np.zeros(4),
        "dropout_p": 0.2,
        "seed": 1 << 60,
    },
}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_beside_other_arguments(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = qkv(2, 4, 130, 300, 16, dtype=dtype)
    for block_size, offset in ((16, 170), (64, 30), (128, 170)):
        table = patchwork(rng, (2, 4, 130, 300), (block_size, block_size))
        out, lse = check_table(table, q, k, v, block_size, q_offset=offset, **OPTIONS[name])
        assert np.isfinite(out).all()
        if name not in ("dropout", "everything"):
            assert out.any()
    start = {"table": table, "start": offset}
    expected = truth(
        q, k, v, mask_mod=functools.partial(in_table, **start), q_offset=offset, **OPTIONS[name]
    )
    assert_near(out, expected.out, expected.budget.out[..., None])
    assert_near(lse, expected.lse, expected.budget.lse)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("Nq", [1, 2, 3, 5])
def test_few_queries_of_a_group(Nq: int, dtype: str) -> None:
    """Lanes of several heads, each with blocks of its own."""
    rng = np.random.default_rng(Nq)
    q = qkv(2, 8, Nq, 1, 32, dtype=dtype)[0]
    _, k, v = qkv(2, 2, 1, 900, 32, dtype=dtype)
    for block_size in (16, 128, 300):
        for heads in (8, 1):
            table = patchwork(rng, (2, heads, Nq, 900), (1, block_size))
            check_table(table, q, k, v, block_size, q_offset=900 - Nq)
            check_table(table[:1], q, k, v, block_size, q_offset=900 - Nq, causal=True)


@pytest.mark.parametrize("dilation", [32, 50, 80])
@pytest.mark.parametrize(("Nq", "dtype"), [(3, "f4"), (5, "f8"), (300, "f4"), (300, "f8")])
def test_holes_between_the_blocks_of_a_tile(Nq: int, dtype: str, dilation: int) -> None:
    """Empty blocks amid the keys that a tile takes at once are hidden, not skipped."""
    q, k, v = qkv(1, 1, Nq, 500, 16, dtype=dtype)
    few = Nq < 8
    for block_size in (8, 16, 64):
        # With many rows the holes of a dilated mask are not those of other rows in the tile.
        every = functools.partial(every_nth, window=16)
        mask_mod = functools.partial(masks.dilated, window=4) if few else every
        mask_mod = functools.partial(mask_mod, dilation=dilation)
        blocks = BlockMask.from_mask_mod(mask_mod, 1, 1, Nq, 500, block_size=block_size)
        if 4 * block_size <= dilation:  # mixed blocks with few rows, and full ones with many
            seen = np.flatnonzero(blocks.kinds.any(axis=(0, 1, 2)))
            assert block_size < np.diff(seen).max() * block_size < tiles.block_kv("float64", 16)
        same_bits(q, k, v, mask_mod, blocks)


def every_nth(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: Any, dilation: Any) -> Any:
    """Show a few keys and then none, the same ones to all rows."""
    return kv_idx % dilation < window


def test_what_is_not_finite_in_hidden_keys() -> None:
    """It changes nothing where it is hidden, be it by a block; else it shows where it is seen."""
    rng = np.random.default_rng(0)
    q, k, v = qkv(1, 2, 150, 600, 16)
    table = patchwork(rng, (1, 1, 150, 600), (50, 64))
    table[..., 100:200] = False
    clean = check_table(table, q, k, v, 64)
    never = ~table.any(axis=(0, 1, 2))
    k, v = k.copy(), v.copy()
    k[:, :, never], v[:, :, never] = np.nan, np.inf
    for got, expected in zip(check_table(table, q, k, v, 64), clean, strict=True):
        np.testing.assert_array_equal(got, expected)
    key = np.argmin(np.abs(table[0, 0].mean(axis=0) - 0.3))
    seen = table[0, 0, :, key]
    assert 20 < seen.sum() < 100
    v[:, :, key] = np.nan
    out, lse = check_table(table, q, k, v, 64)
    np.testing.assert_array_equal(lse, clean[1])
    k[:, :, key] = np.nan
    for got in (out, check_table(table, q, k, v, 64)[0]):
        np.testing.assert_array_equal(np.isnan(got).all(axis=(0, 1, 3)), seen)
        np.testing.assert_array_equal(got[:, :, ~seen], clean[0][:, :, ~seen])


def test_one_block_mask_for_all_items_and_heads() -> None:
    q, k, v = qkv(3, 4, 90, 200, 8)
    same = functools.partial(masks.document, doc=np.repeat(np.arange(8), 25))
    blocks = BlockMask.from_mask_mod(same & masks.causal, 1, 1, 90, 200, block_size=32)
    same_bits(q, k, v, same & masks.causal, blocks)
    varied = functools.partial(in_step, step=3)
    for B, H in ((3, 4), (1, 4), (3, 1)):
        chosen = functools.partial(in_some, item=B > 1, head=H > 1)
        blocks = BlockMask.from_mask_mod(chosen, B, H, 90, 200, block_size=32)
        assert blocks.kinds.shape[:2] == (B, H)
        same_bits(q, k, v, chosen, blocks)
    blocks = BlockMask.from_mask_mod(varied, 3, 4, 90, 200, block_size=32)
    same_bits(q, k, v, varied, blocks)


def in_some(b: Any, h: Any, q_idx: Any, kv_idx: Any, item: Any, head: Any) -> Any:
    """Show other keys to each item and head, where these count."""
    return (kv_idx // 32 + b * item + h * head) % 4 == 0


def test_only_mixed_blocks_are_looked_at() -> None:
    """In others the function does not run: so what it would say now does not matter."""
    # No tile straddles two rows of blocks, nor keys that are taken at once two blocks.
    size = math.lcm(tiles.choose_tile("float32", 1 << 20).lanes, 2 * tiles.block_kv("float32", 16))
    n = 3 * size
    table = patchwork(np.random.default_rng(1), (1, 1, n, n), (size, size))
    mask_mod = functools.partial(in_table, table=table, start=0)
    blocks = BlockMask.from_mask_mod(mask_mod, 1, 1, n, n, 0, size)
    assert {0, 1, 2} == set(blocks.kinds.ravel().tolist())
    q, k, v = qkv(1, 1, n, n, 16)
    expected = nattn.attention(q, k, v, mask_mod=mask_mod, q_offset=0)
    mixed = np.repeat(np.repeat(blocks.kinds == masks.MIXED, size, axis=2), size, axis=3)
    table[~mixed] ^= True
    out = nattn.attention(q, k, v, block_mask=blocks, q_offset=0)
    np.testing.assert_array_equal(out, expected)


def test_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from nattn.backends.cpu import jobs

    q, k, v = qkv(1, 4, 300, 600, 16)
    table = patchwork(np.random.default_rng(0), (1, 4, 300, 600), (64, 64))
    results = []
    for count in (1, 2, 3):
        monkeypatch.setattr(jobs, "thread_count", lambda count=count: count)
        results.append(check_table(table, q, k, v, 64))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_the_reference_agrees() -> None:
    """It takes a block mask as the mask that it carries."""
    q, k, v = qkv(1, 2, 40, 70, 8)
    table = patchwork(np.random.default_rng(0), (1, 2, 40, 70), (16, 16))
    mask_mod = functools.partial(in_table, table=table, start=30)
    blocks = BlockMask.from_mask_mod(mask_mod, 1, 2, 40, 70, block_size=16)
    with_blocks = nattn.attention(q, k, v, block_mask=blocks, backend="reference")
    alone = nattn.attention(q, k, v, mask_mod=mask_mod, backend="reference")
    np.testing.assert_array_equal(with_blocks, alone)
