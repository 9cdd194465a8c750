"""The tile shapes of every processor, forced: no loop may suppose what they divide."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import CASES, Case, check, check_gradients, gaussian
from processors import bfloat16_as, tiles_of

import nattn
from nattn.backends.cpu import tiles

NAMES = (
    *("plain", "one query", "few queries of a group", "sixteen queries", "odd sizes"),
    *("D=1, Dv=5", "D=24, Dv=8", "causal, more keys", "mask", "window"),
)
GRADIENTS = ("odd sizes", "D=1, Dv=5", "causal, more keys", "mask")

EVERY = [
    *((family, np.float32) for family in tiles.FAMILIES),
    # those of SSE2 and AVX: the same vectors, in fewer registers or without FMA
    *((family, np.float64) for family in tiles.FAMILIES if family not in ("SSE2", "AVX")),
]


def case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def test_every_shape_is_there() -> None:
    shapes = set()
    for family in tiles.FAMILIES:
        with tiles_of(family):
            for dtype, rows in itertools.product(("float32", "float64"), (1, 1 << 20)):
                tile = tiles.choose_tile(dtype, rows)
                shapes.add((tile.W, tile.MV, tile.NR))
    assert {w for w, _, _ in shapes} == {2, 4, 8, 16}
    assert {mv for _, mv, _ in shapes} == {1, 2, 3}
    assert {nr for _, _, nr in shapes} == {4, 8, 16}
    assert (2, 3, 8) in shapes  # of float64 on NEON: 6 lanes, which four does not divide


def test_the_host_has_its_own_tiles_again() -> None:
    own = tiles.choose_tile("float32", 100)
    with tiles_of("NEON"):
        assert tiles.choose_tile("float32", 100).lanes == 12
    assert tiles.choose_tile("float32", 100) == own


@pytest.mark.parametrize(("family", "dtype"), EVERY)
def test_forward(family: str, dtype: Any) -> None:
    with tiles_of(family):
        for name in NAMES:
            q, k, v, options = case(name).make(dtype)
            check("cpu", q, k, v, **options)
            v[..., -1, :] = np.nan  # visible, or hidden: then once more without what is hidden
            check("cpu", q, k, v, **options)


@pytest.mark.parametrize(("family", "dtype"), EVERY)
def test_backward(family: str, dtype: Any) -> None:
    with tiles_of(family):
        for name in GRADIENTS:
            q, k, v, options = case(name).make(dtype)
            check_gradients("cpu", q, k, v, **options)


@pytest.mark.parametrize(
    ("family", "product", "dtype"),
    [
        ("NEON", "float32", np.float16),
        ("SSE2", "emulated", ml_dtypes.bfloat16),
    ],
)
def test_16_bits(family: str, product: str, dtype: Any) -> None:
    with bfloat16_as(product), tiles_of(family):
        for name in NAMES:
            q, k, v, options = case(name).make(dtype)
            check("cpu", q, k, v, **options)
            if name in GRADIENTS:
                check_gradients("cpu", q, k, v, **options)


@pytest.mark.parametrize(("family", "dtype"), EVERY)
@pytest.mark.parametrize("block_size", [1, 7])
def test_gradients_have_the_same_bits_with_a_block_mask(
    family: str, dtype: Any, block_size: int
) -> None:
    """Of blocks smaller than a tile, also where a visible value or key is not finite."""
    q, k, v = (gaussian(1, 1, 90, 16, dtype=dtype, seed=i) for i in range(3))
    near = functools.partial(nattn.masks.sliding_window, left=20, right=0)
    blocks = nattn.BlockMask.from_mask_mod(near, 1, 1, 90, 90, block_size=block_size)
    dout = gaussian(1, 1, 90, 16, dtype=dtype, seed=5)
    with tiles_of(family):
        for array, value in ((v, np.nan), (k, np.inf), (v, -np.inf)):
            kept = array[0, 0, 60, 3]
            array[0, 0, 60, 3] = value
            results = []
            for options in ({"mask_mod": near}, {"block_mask": blocks}):
                (_, vjp) = nattn.attention_vjp(q, k, v, **options)
                results.append(vjp(dout)[:3])
            array[0, 0, 60, 3] = kept
            assert not all(np.isfinite(np.asarray(x)).all() for x in results[0])
            for x, y in zip(*results, strict=True):
                assert np.isfinite(x[0, 0, :40]).all()  # what the rows that see it do not see
                np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))
