"""The built-in masks against straightforward conditions, and how masks combine."""

from __future__ import annotations

import copy
import doctest
import functools
import inspect
import itertools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import registry
from numpy.typing import NDArray
from registry import MASKS, Sizes

import nattn
from nattn.functions import binding, masks
from nattn.functions.masks import EMPTY, FULL, MIXED, Mask, causal, mask

bind = functools.partial
B, H, N = 3, 2, 40
doc = np.array([*[0] * 7, *[1] * 20, *[5] * 12, 6])


def grid(first: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return positions of queries, from `first` on, and of keys, as the reference does."""
    return np.arange(first, N)[:, None], np.arange(N)[None, :]


def assert_loops_agree(
    mod: Callable[..., Any], expected: Callable[[int, int, int, int], bool], first: int = 0
) -> None:
    """Compare a mask on arrays with a condition on Python's numbers."""
    q_idx, kv_idx = grid(first)
    seen = set()
    for b in range(B):
        for h in range(H):
            got = mod(b, h, q_idx, kv_idx)
            assert got.dtype == bool
            got = np.broadcast_to(got, (N - first, N))
            want = [[expected(b, h, q, k) for k in range(N)] for q in range(first, N)]
            assert got.tolist() == want
            seen |= set(got.ravel().tolist())
    assert seen == {True, False}


def test_examples() -> None:
    result = doctest.testmod(masks)
    assert result.failed == 0
    assert result.attempted > 20


def test_mask_is_public() -> None:
    assert nattn.mask is mask


# ---------------------------------------------------------------------------------------------
# Each mask
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, -13, 25])
def test_causal(first: int) -> None:
    assert_loops_agree(causal, lambda b, h, q, k: not k > q, first)


@pytest.mark.parametrize("first", [0, -13])
@pytest.mark.parametrize(("left", "right"), [(3, 1), (0, 0), (-2, 5), (4, -1), (1 << 62, 2)])
def test_sliding_window(left: int, right: int, first: int) -> None:
    def expected(b: int, h: int, q: int, k: int) -> bool:
        return k in range(max(q - left, 0), q + right + 1)

    assert_loops_agree(bind(masks.sliding_window, left=left, right=right), expected, first)


def test_document() -> None:
    starts = [0, 7, 27, 39, 40]
    same = bind(masks.document, doc=doc)

    def expected(b: int, h: int, q: int, k: int) -> bool:
        return any(lo <= q < hi and lo <= k < hi for lo, hi in itertools.pairwise(starts))

    assert_loops_agree(same, expected)
    assert_loops_agree(same, expected, first=30)  # queries are the last ones


def test_document_batch() -> None:
    docs = np.stack([doc, doc[::-1], np.arange(N) // 9])
    assert_loops_agree(
        bind(masks.document_batch, doc=docs), lambda b, h, q, k: docs[b][q] - docs[b][k] == 0
    )


def test_document_cross() -> None:
    q_doc, kv_doc = doc[::-1], np.arange(N, dtype=np.uint8) // 6
    assert_loops_agree(
        bind(masks.document_cross, q_doc=q_doc, kv_doc=kv_doc),
        lambda b, h, q, k: int(q_doc[q]) == int(kv_doc[k]),
    )


@pytest.mark.parametrize("first", [0, -13])
def test_prefix_lm(first: int) -> None:
    prefix = np.array([0, 5, N - 1])

    def expected(b: int, h: int, q: int, k: int) -> bool:
        return k < prefix[b].item() or k <= q

    assert_loops_agree(bind(masks.prefix_lm, prefix=prefix), expected, first)


@pytest.mark.parametrize(("window", "dilation"), [(3, 4), (2, 1), (0, 3)])
def test_dilated(window: int, dilation: int) -> None:
    def expected(b: int, h: int, q: int, k: int) -> bool:
        return k in range(q - window * dilation, q + window * dilation + 1, dilation)

    assert_loops_agree(bind(masks.dilated, window=window, dilation=dilation), expected, -13)


@pytest.mark.parametrize("stride", [1, 5])
def test_strided(stride: int) -> None:
    def expected(b: int, h: int, q: int, k: int) -> bool:
        return k in range(q, q - stride, -1) or k in range(q, -1, -stride)

    assert_loops_agree(bind(masks.strided, stride=stride), expected, -13)


def test_chunked() -> None:
    edges = range(-28, N + 7, 7)

    def expected(b: int, h: int, q: int, k: int) -> bool:
        return any(q in range(at, at + 7) and k in range(at, at + 7) for at in edges)

    assert_loops_agree(bind(masks.chunked, chunk=7), expected, -13)


def test_local_plus_global() -> None:
    def expected(b: int, h: int, q: int, k: int) -> bool:
        return q < 2 or k < 2 or -3 <= q - k <= 3

    assert_loops_agree(bind(masks.local_plus_global, window=3, n_global=2), expected, -13)


def test_streaming() -> None:
    def expected(b: int, h: int, q: int, k: int) -> bool:
        return k <= q and (k in (0, 1) or k >= q - 4)

    assert_loops_agree(bind(masks.streaming, left=4, n_first=2), expected, -13)


# ---------------------------------------------------------------------------------------------
# Combining
# ---------------------------------------------------------------------------------------------


def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 2 == 0


def at_most(b: Any, h: Any, q_idx: Any, kv_idx: Any, most: Any) -> Any:
    return kv_idx <= most


@mask
def first_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Show everything to head 0."""
    return h == 0


few = bind(at_most, most=9)
jitted = numba.njit(even)  # never called, so never compiled

COMBINED: dict[str, tuple[Any, Callable[[int, int, int, int], bool]]] = {
    "and": (causal & mask(even), lambda b, h, q, k: k <= q and k % 2 == 0),
    "or": (causal | mask(even), lambda b, h, q, k: k <= q or k % 2 == 0),
    "not": (~causal, lambda b, h, q, k: k > q),
    "a function on the right": (causal & even, lambda b, h, q, k: k <= q and k % 2 == 0),
    "a function on the left": (even & causal, lambda b, h, q, k: k <= q and k % 2 == 0),
    "or, on the left": (even | causal, lambda b, h, q, k: k <= q or k % 2 == 0),
    "a partial": (causal & few, lambda b, h, q, k: k <= min(q, 9)),
    "a partial on the left": (few | causal, lambda b, h, q, k: k <= max(q, 9)),
    "a partial of a mask": (
        ~causal & bind(masks.sliding_window, left=0, right=2),
        lambda b, h, q, k: q < k <= q + 2,
    ),
    "a wrapped partial": (~mask(few), lambda b, h, q, k: k > 9),
    "nested": (
        ~(causal & ~(mask(even) | few)) & ~~causal,
        lambda b, h, q, k: k <= q and (k % 2 == 0 or k <= 9),
    ),
    "scalars and arrays": (causal & first_head, lambda b, h, q, k: k <= q and h == 0),
    "jitted": (~causal | mask(jitted), lambda b, h, q, k: k > q or k % 2 == 0),
}


def plain(tree: Any) -> Any:
    """Take what is jitted out, of which only the backends make use."""
    if isinstance(tree, binding.Combination):
        return binding.Combination(tree.operator, tuple(map(plain, tree.parts)))
    return getattr(tree, "py_func", tree)


@pytest.mark.parametrize("name", COMBINED)
def test_combinations(name: str) -> None:
    combined, expected = COMBINED[name]
    assert isinstance(combined, Mask)
    assert_loops_agree(plain(combined) if name == "jitted" else combined, expected)
    tree = binding.resolve("mask_mod", combined, binding.MASK_MOD)
    assert_loops_agree(tree, expected)


@pytest.mark.parametrize("name", MASKS)
def test_registered_masks_work_on_arrays_and_resolve(name: str) -> None:
    sizes = Sizes(B, H, 30, N)
    visible = MASKS[name](sizes, registry.generator(name))
    tree = binding.resolve("mask_mod", visible, binding.MASK_MOD)
    q_idx, kv_idx = grid(10)
    # arrays of batch items and heads do as well: nothing branches on them
    items, heads = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None]
    every = np.broadcast_to(visible(items, heads, q_idx, kv_idx), (B, H, 30, N))
    for b in range(B):
        for h in range(H):
            got = np.asarray(visible(b, h, q_idx, kv_idx))
            assert got.dtype == bool
            assert np.array_equal(got, tree(b, h, q_idx, kv_idx))
            assert np.array_equal(np.broadcast_to(got, (30, N)), every[b, h])


@pytest.mark.parametrize("seed", range(10))
def test_random_masks_are_masks(seed: int) -> None:
    made = [registry.random_mask(np.random.default_rng(seed), Sizes(B, H, N, N)) for _ in range(2)]
    assert isinstance(made[0], Mask)
    results = [np.broadcast_to(m(1, 1, *grid()), (N, N)) for m in made]
    assert np.array_equal(results[0], results[1])


def test_random_masks_differ() -> None:
    made = [
        registry.random_mask(np.random.default_rng(seed), Sizes(B, H, N, N)) for seed in range(10)
    ]
    assert len({repr(m) for m in made}) == 10


# ---------------------------------------------------------------------------------------------
# The wrapper
# ---------------------------------------------------------------------------------------------


def test_a_mask_looks_like_its_function() -> None:
    assert (
        str(inspect.signature(first_head))
        == "(b: 'Any', h: 'Any', q_idx: 'Any', kv_idx: 'Any') -> 'Any'"
    )
    assert first_head.__doc__ == "Show everything to head 0."
    assert first_head.__name__ == "first_head"  # type: ignore[attr-defined]
    assert first_head(0, 0, 1, 2) is True
    assert mask(first_head) is first_head


def test_partial_binds_a_mask() -> None:
    window = bind(masks.sliding_window, left=2)
    whole = bind(window, right=1)
    got = whole(0, 0, 10, np.arange(14))
    assert np.flatnonzero(got).tolist() == [8, 9, 10, 11]
    assert np.array_equal(mask(whole)(0, 0, 10, np.arange(14)), got)
    bound = binding.resolve("mask_mod", whole, binding.MASK_MOD)
    assert isinstance(bound, binding.Bound)
    assert bound.function is inspect.unwrap(masks.sliding_window)
    assert dict(zip(bound.names, bound.values, strict=True)) == {"left": 2, "right": 1}


def test_parameters_are_bound_before_masks_are_combined() -> None:
    late = bind(causal & masks.sliding_window, left=2, right=1)
    with pytest.raises(TypeError, match="bound before masks are combined, got left, right for <Ma"):
        late(0, 0, 1, 2)
    with pytest.raises(TypeError, match="bound before functions are combined"):
        binding.resolve("mask_mod", late, binding.MASK_MOD)
    with pytest.raises(TypeError, match="expected left and right to be bound"):
        binding.resolve("mask_mod", causal & masks.sliding_window, binding.MASK_MOD)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (causal, "causal"),
        (causal & even, "causal & even"),
        (even | ~causal, "even | ~causal"),
        (~(causal | even) & few, "~(causal | even) & at_most(most=9)"),
        ((causal | even) & causal | first_head, "(causal | even) & causal | first_head"),
        (~~causal, "~~causal"),
        (mask(bind(masks.document, doc=doc)), "document(doc=<int64 (40,)>)"),
        (causal & bind(bind(at_most, most=1), 3), "causal & at_most(3, most=1)"),
        (mask(lambda b, h, q, k: k < q) & causal, "<lambda> & causal"),
        (mask(jitted) & causal, "even & causal"),
    ],
)
def test_repr(made: Mask, text: str) -> None:
    assert repr(made) == f"<Mask {text}>"


@pytest.mark.parametrize(
    ("operand", "got"),
    [
        (np.ones((3, 4), bool), r"an array of shape \(3, 4\) and dtype bool"),
        (np.ones((), bool), r"an array of shape \(\) and dtype bool"),
        (True, "bool"),
        (np.True_, "bool"),
        (1, "int"),
        (None, "NoneType"),
        ("causal", "str"),
        ([causal], "list"),
    ],
    ids=str,
)
def test_what_is_no_function_is_refused(operand: Any, got: str) -> None:
    text = f"mask: expected a function mask_mod.*got {got}.*; .* as the argument mask"
    with pytest.raises(TypeError, match=text):
        mask(operand)
    for combine in (operator.and_, operator.or_):
        with pytest.raises(TypeError, match=text):
            combine(causal, operand)
        with pytest.raises(TypeError, match=text):
            combine(operand, causal)


def test_modifiers_are_no_masks() -> None:
    mods = nattn.mods.compose(nattn.mods.alibi)
    text = r"mask: expected a mask function with .*, got composed"
    with pytest.raises(TypeError, match=text):
        mask(mods)
    with pytest.raises(TypeError, match=text):
        causal & mods
    with pytest.raises(TypeError, match=text):
        mods | causal


def test_a_mask_has_no_truth_value() -> None:
    """`a and b` would silently be b alone."""
    for ask in (
        lambda: causal and even,
        lambda: causal or even,
        lambda: not causal,
        lambda: causal if causal else even,
        lambda: bool(causal & even),
    ):
        with pytest.raises(TypeError, match=r"expected & \| ~ between masks"):
            ask()


def test_masks_are_pickled() -> None:
    """A process pool passes them on: a decorated function by its name, others by their parts."""
    assert pickle.loads(pickle.dumps(causal)) is causal
    for made in (
        mask(even),
        causal & even,
        ~causal | few,
        causal & bind(masks.document, doc=doc),
        mask(bind(masks.sliding_window, left=3, right=0)),
    ):
        for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
            assert isinstance(other, Mask)
            assert repr(other) == repr(made)
            assert np.array_equal(other(0, 0, *grid()), made(0, 0, *grid()))


# ---------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------


def blocks(kinds: NDArray[Any], mod: Any = causal) -> nattn.BlockMask:
    tree = binding.resolve("mask_mod", mod, binding.MASK_MOD)
    b, h, n, m = kinds.shape
    return nattn.BlockMask(
        tree, b, h, 8 * n, 8 * m - 3, np.zeros(b, np.int64), 8, kinds.astype(np.uint8)
    )


def test_kinds_of_blocks() -> None:
    assert (EMPTY, MIXED, FULL) == (0, 1, 2)


def test_sparsity_is_the_share_of_empty_blocks() -> None:
    assert blocks(np.array([[[[MIXED, EMPTY, EMPTY], [FULL, MIXED, EMPTY]]]])).sparsity == 0.5
    assert blocks(np.full((2, 3, 1, 1), FULL)).sparsity == 0.0
    assert blocks(np.full((2, 3, 1, 1), EMPTY)).sparsity == 1.0
    assert blocks(np.zeros((1, 1, 0, 4))).sparsity == 0.0
    assert isinstance(blocks(np.zeros((1, 1, 1, 1))).sparsity, float)


def test_blocks_say_what_they_are() -> None:
    made = blocks(
        np.array([[[[MIXED, EMPTY], [FULL, MIXED]]]]),
        causal & bind(masks.document, doc=doc) | ~mask(few),
    )
    assert repr(made) == (
        "<BlockMask of causal & document(doc=<int64 (40,)>) | ~at_most(most=9), B=1, H=1, Nq=16, "
        "Nk=13, blocks of 8: 1 empty, 2 mixed, 1 full, sparsity 25.0%>"
    )


def test_blocks_are_frozen_and_themselves() -> None:
    made = blocks(np.zeros((1, 1, 2, 2)))
    with pytest.raises(AttributeError):
        made.B = 2  # type: ignore[misc]
    assert made == made
    assert made != blocks(np.zeros((1, 1, 2, 2)))
