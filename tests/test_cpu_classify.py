"""Kinds of blocks against the mask itself, block by block on NumPy."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nattn.backends.cpu import jobs
from nattn.backends.cpu.classify import classify
from nattn.functions import masks
from nattn.functions.binding import MASK_MOD, resolve
from nattn.functions.masks import EMPTY, FULL, MIXED

Array = NDArray[Any]


def in_table(b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any, start: Any) -> Any:
    """Show what a table of [b, h, row, key] says: any pattern there is."""
    return table[b, h, q_idx - start[b], kv_idx]


def patchwork(rng: np.random.Generator, shape: tuple[int, ...], patch: tuple[int, int]) -> Array:
    """Return patches that are empty, full, or hold or lack a few; the last ones are cut off."""
    B, H, Nq, Nk = shape
    patches = B, H, -(-Nq // patch[0]), -(-Nk // patch[1])
    density = rng.choice([0.0, 1.0, 0.01, 0.99], patches)
    wide = np.repeat(np.repeat(density, patch[0], axis=2), patch[1], axis=3)
    return rng.random(shape) < wide[:, :, :Nq, :Nk]


def kinds_of(visible: Array, block: int) -> Array:
    """Classify blocks one by one."""
    B, H, Nq, Nk = visible.shape
    kinds = np.zeros((B, H, -(-Nq // block), -(-Nk // block)), np.uint8)
    for b, h, i, j in np.ndindex(kinds.shape):
        part = visible[b, h, i * block : (i + 1) * block, j * block : (j + 1) * block]
        kinds[b, h, i, j] = FULL if part.all() else MIXED if part.any() else EMPTY
    return kinds


def classified(
    mask_mod: Callable[..., Any], shape: tuple[int, ...], offset: Any, block: int
) -> Array:
    B, H, Nq, Nk = shape
    tree = resolve("mask_mod", mask_mod, MASK_MOD)
    offset = np.broadcast_to(np.asarray(offset, np.int64), B).copy()
    kinds = classify(tree, B, H, Nq, Nk, offset, block)
    assert kinds.dtype == np.uint8
    assert kinds.flags.c_contiguous
    return kinds


SIZE = st.integers(1, 300)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), SIZE, SIZE),
    patch=st.tuples(SIZE, SIZE),
    block=st.one_of(st.integers(1, 20), SIZE, st.sampled_from([16, 48, 64, 128, 1 << 62])),
    offsets=st.lists(st.integers(-(1 << 20), 1 << 20), min_size=3, max_size=3),
    far=st.sampled_from([0, 0, 1 << 40, -(1 << 40)]),
    seed=st.integers(0, 1 << 30),
)
def test_kinds_of_any_pattern(
    shape: tuple[int, ...],
    patch: tuple[int, int],
    block: int,
    offsets: list[int],
    far: int,
    seed: int,
) -> None:
    table = patchwork(np.random.default_rng(seed), shape, patch)
    start = np.array(offsets[: shape[0]]) + far
    mask_mod = functools.partial(in_table, table=table, start=start)
    got = classified(mask_mod, shape, start, block)
    np.testing.assert_array_equal(got, kinds_of(table, block))


@given(
    sizes=st.tuples(SIZE, SIZE),
    left=st.integers(-5, 100),
    right=st.integers(-5, 100),
    block=st.sampled_from([1, 7, 32, 64, 128, 200]),
    offset=st.integers(-320, 320),
)
def test_kinds_of_a_window(
    sizes: tuple[int, int], left: int, right: int, block: int, offset: int
) -> None:
    window = functools.partial(masks.sliding_window, left=left, right=right)
    Nq, Nk = sizes
    visible = window(0, 0, np.arange(Nq)[:, None] + offset, np.arange(Nk))[None, None]
    got = classified(window, (1, 1, Nq, Nk), offset, block)
    np.testing.assert_array_equal(got, kinds_of(visible, block))


@pytest.mark.parametrize("pair", [(0, 0), (0, 299), (255, 40), (255, 255), (299, 299), (128, 127)])
def test_a_single_pair_decides(pair: tuple[int, int]) -> None:
    """Wherever in the block it lies: the last of its lanes, the last of its keys."""
    shape = (1, 1, 300, 300)
    for seen in (True, False):
        table = np.full(shape, not seen)
        table[0, 0, pair[0], pair[1]] = seen
        mask_mod = functools.partial(in_table, table=table, start=np.zeros(1, np.int64))
        for block in (1, 100, 256, 300):
            kinds = classified(mask_mod, shape, 0, block)
            np.testing.assert_array_equal(kinds, kinds_of(table, block))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (1, 1, 0, 5), (1, 1, 5, 0)])
def test_no_blocks(shape: tuple[int, ...]) -> None:
    B, H, Nq, Nk = shape
    kinds = classified(masks.causal, shape, 0, 4)
    assert kinds.shape == (B, H, -(-Nq // 4), -(-Nk // 4))


def test_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 3, 400, 500)
    table = patchwork(np.random.default_rng(0), shape, (60, 70))
    start = np.array([3, -90])
    mask_mod = functools.partial(in_table, table=table, start=start)
    expected = kinds_of(table, 32)
    used = []
    run = jobs._run

    def counted(address: int, args: bytes, state: Any, n_threads: int, *more: Any) -> None:
        used.append(n_threads)
        run(address, args, state, n_threads, *more)

    monkeypatch.setattr(jobs, "_run", counted)
    for count in (1, 2, 5):
        monkeypatch.setattr(jobs, "thread_count", lambda count=count: count)
        for _ in range(3):
            got = classified(mask_mod, shape, start, 32)
            np.testing.assert_array_equal(got, expected)
    assert used == [1] * 3 + [2] * 3 + [5] * 3


def test_memory_is_linear_in_the_blocks() -> None:
    """A byte for each block, and some scratch for each thread."""
    n, block = 3000, 64
    window = functools.partial(masks.sliding_window, left=100, right=0)
    classified(window, (1, 1, 10, 10), 0, block)  # compiled
    tracemalloc.start()
    try:
        kinds = classified(window, (1, 1, n, n), 0, block)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kinds.nbytes == (-(-n // block)) ** 2
    assert peak < kinds.nbytes + 256 * 1024 * jobs.thread_count()
    assert peak < n * n / 8  # not even a bit for each pair


def test_an_index_out_of_range() -> None:
    def short(b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
        return x[kv_idx] > 0

    x = np.zeros(300)
    text = r"mask_mod: expected indices within the arrays"
    assert not classified(functools.partial(short, x=x), (1, 1, 70, 300), 0, 64).any()
    for n, shape in ((299, (1, 1, 70, 300)), (0, (1, 1, 1, 1)), (64, (1, 2, 300, 65))):
        with pytest.raises(IndexError, match=text):
            classified(functools.partial(short, x=x[:n]), shape, 0, 64)
