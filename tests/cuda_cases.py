"""Tiny cases of the contract for the cuda backend, by name: the simulator and a GPU run the same.

The simulator's blocks own 4 query rows (2 where queries are few) and stream 4 keys at a time, its
splits have 8 keys, its chunks of a head dimension 4 or 8 numbers (backends/cuda/tiles.py). So these
sizes have what larger ones have on a GPU: several blocks, steps, splits, chunks, and their edges.

Each case is a function without arguments; `FORWARD` and `BACKWARD` hold them under their names.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import registry
from cases import (
    POISON,
    Case,
    OnDevice,
    assert_gradients_near,
    assert_near,
    bind,
    check,
    check_gradients,
    documents,
    gate,
    gaussian,
    gradient_truth,
    has_gradients,
    in_step,
    incoming,
    just,
    looked_up,
    normal,
    poisoned,
    qkv,
    random_bias,
    random_mask,
    thin,
    truth,
    visible_pairs,
)
from numpy.typing import NDArray

import nattn
from nattn.backends.error_budget import error_budget
from nattn.call.problem import WRT, Problem
from nattn.functions import binding, masks
from nattn.functions.dropout import keep
from nattn.functions.mods import compose
from nattn.vectors.dtypes import storage_dtype

Array = NDArray[Any]
Suite = dict[str, Callable[[], None]]

FORWARD: Suite = {}
BACKWARD: Suite = {}

nan, inf = np.nan, np.inf


def case(suite: Suite, **choices: Iterable[Any]) -> Callable[..., Any]:
    """Register a function under its name, once for each combination of what it may be passed."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for chosen in itertools.product(*choices.values()):
            name = ": ".join([function.__name__.replace("_", " "), *map(str, chosen)])
            assert name not in suite, name
            suite[name] = functools.partial(function, **dict(zip(choices, chosen, strict=True)))
        return function

    return register


def attend(*arrays: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = nattn.attention(*arrays, return_lse=True, backend="cuda", **options)
    return out, lse


def differentiate(*arrays: Any, **options: Any) -> Any:
    """Return all gradients for some dout and dlse."""
    p = Problem.build(*arrays, **options)
    dout, dlse = incoming(p)
    _, vjp = nattn.attention_vjp(*arrays, backend="cuda", **options)
    return vjp(dout, dlse, has_gradients(p))


def assert_same_bits(got: Any, expected: Any, rows: Any = ...) -> None:
    """Assert that pairs (out, lse) agree exactly in some rows."""
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x[rows], y[rows])


def assert_same_gradients(got: Any, expected: Any, at: Any = ...) -> None:
    """Assert that gradients agree exactly, those of bias and heads as a whole."""
    for name, x, y in zip(WRT, got, expected, strict=False):
        assert (x is None) == (y is None), name
        if x is not None:
            where = at if name in "qkv" else ...
            np.testing.assert_array_equal(x[where], y[where], err_msg=f"d{name}")


# Every kind of call, forward and backward


CALLS = [
    Case("plain", Nq=5, Nk=7, D=4),
    Case("one key", Nq=5, Nk=1, D=4),
    Case("one query", Hq=1, Nq=1, Nk=19, D=4),
    Case("two queries of one item", Hq=1, Nq=2, Nk=9, D=8),
    Case("few queries of a group", Hq=4, Hkv=2, Nq=1, Nk=18, D=6, Dv=9),
    Case("odd sizes", B=2, Hq=3, Nq=5, Nk=6, D=3, Dv=10),
    Case("D=1, Dv=5", Hq=1, Nq=4, Nk=8, D=1, Dv=5),
    Case("D=13, Dv=2", Hq=1, Nq=5, Nk=5, D=13, Dv=2),
    Case("D=2, Dv=17", Hq=1, Nq=3, Nk=5, D=2, Dv=17),
    Case("grouped", B=2, Hq=6, Hkv=2, Nq=3, Nk=6, D=5),
    Case("one key head", Hq=5, Hkv=1, Nq=2, Nk=5, D=4),
    Case("causal", Nq=9, D=4, options={"causal": True}),
    Case("causal, more keys", Nq=5, Nk=11, D=4, options={"causal": True}),
    Case("causal, more queries", Nq=11, Nk=5, D=4, options={"causal": True}),
    Case("causal, top left", Nq=6, Nk=9, D=4, options={"causal": True, "q_offset": 0}),
    Case(
        "causal, an offset for each item, grouped",
        B=3,
        Hq=4,
        Hkv=2,
        Nq=3,
        Nk=7,
        D=4,
        options={"causal": True, "q_offset": [-2, 0, 5]},
    ),
    Case(
        "causal, few queries, an offset for each item",
        B=2,
        Hq=2,
        Hkv=1,
        Nq=1,
        Nk=18,
        D=4,
        options={"causal": True, "q_offset": [9, -1]},
    ),
    Case("window", Nq=11, D=4, options={"window_size": (3, 2)}),
    Case("window left, grouped", Hkv=1, Nq=7, D=4, options={"window_size": (2, 0)}),
    Case("window right", Nq=6, D=4, options={"window_size": (None, 1)}),
    Case("window, few queries", Nq=1, Nk=25, D=4, options={"window_size": (6, None)}),
    Case("window, causal", Nq=6, Nk=9, D=4, options={"window_size": (3, -1), "causal": True}),
    Case("mask", B=2, Nq=5, Nk=6, D=4, options={"mask": random_mask(0.5)}),
    Case(
        "mask, one row for all", B=2, Nq=4, Nk=9, D=4, options={"mask": random_mask(0.5, 0, 1, 2)}
    ),
    Case("mask, one column for all", Nq=6, Nk=5, D=4, options={"mask": random_mask(0.5, 0, 1, 3)}),
    Case("mask, few queries", B=2, Hkv=1, Nq=1, Nk=20, D=4, options={"mask": random_mask(0.3, 0)}),
    Case("bias", B=2, Nq=5, Nk=6, D=4, options={"bias": random_bias("f4", 0.0)}),
    Case("bias with -inf", Nq=5, Nk=7, D=4, options={"bias": random_bias("f4", 0.3)}),
    Case("bias, float16", Nq=5, Nk=7, D=4, options={"bias": random_bias("f2", 0.1, 0, 1)}),
    Case(
        "bias, bfloat16",
        Nq=5,
        Nk=7,
        D=4,
        options={"bias": random_bias(storage_dtype("bfloat16"), 0.1, 1)},
    ),
    Case("bias, float64", Nq=5, Nk=7, D=4, options={"bias": random_bias("f8", 0.1, 2)}),
    Case("bias, big-endian", Nq=5, Nk=7, D=4, options={"bias": random_bias(">f4", 0.1)}),
    Case(
        "mask and bias, grouped",
        B=2,
        Hq=4,
        Hkv=2,
        Nq=3,
        Nk=6,
        D=4,
        options={"mask": random_mask(0.5, 1), "bias": random_bias("f4", 0.2, 0)},
    ),
    Case(
        "lengths",
        B=4,
        Nq=6,
        Nk=9,
        D=4,
        options={"q_lens": [6, 0, 3, 5], "kv_lens": [9, 5, 1, 0], "causal": True},
    ),
    Case("scale", Hq=1, Nq=4, D=4, options={"scale": 0.7}),
    Case("negative scale", Hq=1, Nq=4, D=4, options={"scale": -0.3}),
    Case("no scale", Hq=1, Nq=4, D=4, options={"scale": 0.0}),
    Case(
        "layout bnhd",
        B=2,
        Hq=4,
        Hkv=2,
        Nq=3,
        Nk=5,
        D=4,
        options={"layout": "bnhd", "causal": True, "mask": random_mask(0.7)},
    ),
    Case("softcap", Nq=5, Nk=7, D=4, options={"softcap": 1.5}),
    Case(
        "softcap, bias, mask, causal",
        Nq=5,
        Nk=7,
        D=4,
        options={
            "softcap": 0.7,
            "bias": random_bias("f4", 0.2),
            "mask": random_mask(0.8, 1),
            "causal": True,
        },
    ),
    Case("ALiBi", B=2, Hq=4, Hkv=2, Nq=3, Nk=6, D=4, options={"alibi_slopes": normal("Hq")}),
    Case(
        "ALiBi for each item, causal, lengths",
        B=2,
        Hq=3,
        Nq=5,
        Nk=7,
        D=4,
        options={
            "alibi_slopes": normal("B", "Hq", dtype="f2"),
            "causal": True,
            "kv_lens": [7, 3],
            "q_lens": [4, 5],
        },
    ),
    Case(
        "ALiBi, few queries of a group",
        Hq=4,
        Hkv=2,
        Nq=1,
        Nk=17,
        D=4,
        options={"alibi_slopes": just([1, 3, 0, 2])},
    ),
    Case("sinks", B=2, Hq=4, Hkv=2, Nq=3, Nk=6, D=4, options={"sinks": normal("Hq")}),
    Case(
        "sinks, empty rows",
        Hq=3,
        Nq=6,
        Nk=9,
        D=4,
        options={
            "sinks": just(np.array([-inf, 5.0, -40.0])),
            "mask": random_mask(0.2),
            "causal": True,
            "q_offset": 1,
        },
    ),
    Case(
        "sinks, few queries of a group, no keys in one item, empty splits",
        B=3,
        Hq=4,
        Hkv=2,
        Nq=1,
        Nk=20,
        D=4,
        options={
            "sinks": just(np.array([0.0, -inf, 3.0, -3.0], ">f4")),
            "kv_lens": [20, 0, 7],
            "window_size": (5, 0),
        },
    ),
    Case(
        "score_mod",
        B=2,
        Hkv=1,
        Nq=3,
        Nk=6,
        D=4,
        options={"score_mod": bind(gate, gain=0.75), "q_offset": 14},
    ),
    Case(
        "score_mod that hides",
        Nq=5,
        Nk=7,
        D=4,
        options={"score_mod": just(thin), "bias": random_bias("f4", 0.1)},
    ),
    Case(
        "score_mod with a table, few queries",
        B=2,
        Hkv=1,
        Nq=1,
        Nk=18,
        D=4,
        options={"score_mod": bind(looked_up, table=normal("B", "N", dtype="f8"), gain=2)},
    ),
    Case(
        "score_mods composed",
        B=2,
        Nq=7,
        Nk=4,
        D=4,
        options={
            "score_mod": lambda case, rng: compose(
                thin,
                functools.partial(gate, gain=0.75),
                bind(looked_up, table=normal("B", "N"), gain=0.5)(case, rng),
            ),
            "softcap": 2.0,
            "alibi_slopes": normal("Hq"),
        },
    ),
    Case("mask_mod", B=2, Hkv=1, Nq=3, Nk=6, D=4, options={"mask_mod": bind(in_step, step=3)}),
    Case(
        "mask_mod, documents and causal, lengths",
        B=2,
        Nq=6,
        Nk=8,
        D=4,
        options={
            "mask_mod": lambda case, rng: (
                masks.mask(bind(masks.document, doc=documents(3, 1, 4))(case, rng)) & masks.causal
            ),
            "kv_lens": [8, 7],
        },
    ),
    Case("dropout", B=2, Hq=4, Hkv=2, Nq=3, Nk=6, D=4, options={"dropout_p": 0.3, "seed": 7}),
    Case(
        "dropout, few queries of a group, causal",
        Hq=4,
        Hkv=2,
        Nq=1,
        Nk=18,
        D=4,
        options={"dropout_p": 0.9, "seed": 2**64 - 1, "causal": True},
    ),
    Case(
        "everything",
        B=3,
        Hq=6,
        Hkv=3,
        Nq=4,
        Nk=7,
        D=5,
        Dv=3,
        options={
            "causal": True,
            "q_offset": [2, 1, 4],
            "window_size": (4, -1),
            "mask": random_mask(0.7),
            "bias": random_bias("f4", 0.2, 0),
            "scale": 0.2,
            "softcap": 2.5,
            "alibi_slopes": normal("B", "Hq"),
            "sinks": normal("Hq"),
            "score_mod": bind(gate, gain=0.75),
            "mask_mod": bind(in_step, step=3),
            "q_lens": [4, 3, 1],
            "kv_lens": [7, 5, 4],
            "dropout_p": 0.2,
            "seed": 11,
            "layout": "bnhd",
        },
    ),
]
BY_NAME = {call.name: call for call in CALLS}
IN_EVERY_STORAGE = ["odd sizes", "few queries of a group", "everything"]


@case(FORWARD, call=BY_NAME)
def call(call: str) -> None:
    q, k, v, options = BY_NAME[call].make("float32")
    check("cuda", q, k, v, **options)


@case(FORWARD, storage=["float64", "float16", "bfloat16"], call=IN_EVERY_STORAGE)
def stored(storage: str, call: str) -> None:
    q, k, v, options = BY_NAME[call].make(storage_dtype(storage))
    check("cuda", q, k, v, **options)


# Dtypes of a bias are those of `bias_of_every_dtype`; a scale is a factor, whatever its value.
AS_OTHERS = {"bias, float16", "bias, bfloat16", "bias, float64", "bias, big-endian", "scale"}


@case(BACKWARD, call=[name for name in BY_NAME if name not in AS_OTHERS])
def gradients(call: str) -> None:
    q, k, v, options = BY_NAME[call].make("float32")
    check_gradients("cuda", q, k, v, **options)


@case(BACKWARD, storage=["float64", "float16", "bfloat16"], call=IN_EVERY_STORAGE)
def gradients_stored(storage: str, call: str) -> None:
    q, k, v, options = BY_NAME[call].make(storage_dtype(storage))
    check_gradients("cuda", q, k, v, **options)


# Every modifier and mask from its one definition

SIZES = registry.Sizes(B=2, H=2, Nq=2, Nk=6)


def bound(table: Any, name: str) -> tuple[list[Array], Any]:
    """Return q, k, v and a function of the registry, for heads of one group."""
    entry, rng = table[name], registry.generator(name)
    q, k, v = qkv(SIZES.B, SIZES.H, SIZES.Nq, SIZES.Nk, 4, 3)
    build = entry.build if isinstance(entry, registry.Mod) else entry
    return [2 * q, k[:, :1], v[:, :1]], build(SIZES, rng)


@case(FORWARD, name=registry.MASKS)
def mask_mod(name: str) -> None:
    arrays, function = bound(registry.MASKS, name)
    check("cuda", *arrays, mask_mod=function)


@case(FORWARD, name=registry.MODS)
def score_mod(name: str) -> None:
    arrays, function = bound(registry.MODS, name)
    check("cuda", *arrays, score_mod=function)


@case(BACKWARD, name=registry.MODS)
def gradients_of_score_mod(name: str) -> None:
    arrays, function = bound(registry.MODS, name)
    check_gradients("cuda", *arrays, score_mod=function)


@case(BACKWARD)
def gradients_of_mask_mods() -> None:
    # what a mask hides is a matter of the forward pass too; here several of them together
    for names in (["causal", "one_head"], ["document", "streaming", "known"]):
        arrays, _ = bound(registry.MASKS, names[0])
        functions = [masks.mask(bound(registry.MASKS, name)[1]) for name in names]
        check_gradients("cuda", *arrays, mask_mod=functools.reduce(lambda x, y: x & y, functions))


def blocks_of(tree: Any, B: int, H: int, Nq: int, Nk: int, size: int) -> nattn.BlockMask:
    """Return the block mask that `BlockMask.from_mask_mod` makes, without compiling anything."""
    q, k, v = qkv(B, H, Nq, Nk, 1)
    seen = visible_pairs(Problem.build(q, k, v, mask_mod=tree))
    kinds = np.empty((B, H, -(-Nq // size), -(-Nk // size)), np.uint8)
    for b, h, i, j in np.ndindex(kinds.shape):
        block = seen[b, h, i * size : (i + 1) * size, j * size : (j + 1) * size]
        kinds[b, h, i, j] = (
            masks.FULL if block.all() else masks.MIXED if block.any() else masks.EMPTY
        )
    resolved = binding.resolve("mask_mod", tree, binding.MASK_MOD)
    offset = np.full(B, Nk - Nq, np.int64)
    return nattn.BlockMask(resolved, B, H, Nq, Nk, offset, size, kinds)


@case(FORWARD, few=[False, True])
def a_block_mask_gives_the_same_bits(few: bool) -> None:
    Nq, Nk = (1, 25) if few else (7, 12)
    q, k, v = qkv(2, 2, Nq, Nk, 4)
    doc = np.repeat([0, 1, 2], [9, 1, 15])
    tree = masks.mask(functools.partial(masks.document, doc=doc)) & masks.causal
    expected = attend(q, k, v, mask_mod=tree)
    for size in (3, 6):  # less and more than the four keys of a step
        blocks = blocks_of(tree, 1, 1, Nq, Nk, size)
        assert {masks.EMPTY, masks.MIXED} <= set(blocks.kinds.ravel().tolist())
        assert_same_bits(attend(q, k, v, block_mask=blocks), expected)
    by_item = masks.mask(functools.partial(in_step, step=3)) & masks.causal
    blocks = blocks_of(by_item, 2, 2, Nq, Nk, 1)
    assert {masks.EMPTY, masks.FULL} == set(blocks.kinds.ravel().tolist())
    options: dict[str, Any] = {"sinks": [0.0, 1.0], "window_size": (None, 0)}
    expected = attend(q, k, v, mask_mod=by_item, **options)
    assert_same_bits(attend(q, k, v, block_mask=blocks, **options), expected)


@case(BACKWARD)
def gradients_with_a_block_mask_have_the_same_bits() -> None:
    q, k, v = qkv(1, 2, 7, 12, 4)
    doc = np.repeat([0, 1, 2], [5, 1, 6])
    tree = masks.mask(functools.partial(masks.document, doc=doc)) & masks.causal
    expected = differentiate(q, k, v, mask_mod=tree)
    for size in (2, 6):
        blocks = blocks_of(tree, 1, 1, 7, 12, size)
        assert {masks.EMPTY, masks.MIXED, masks.FULL} == set(blocks.kinds.ravel().tolist())
        assert_same_gradients(differentiate(q, k, v, block_mask=blocks), expected)


# Arrays of any strides, in host memory and on the device


class Place(OnDevice):
    """A copy on the device, of the same strides; the simulator's device memory is the host's."""

    def __init__(self, x: Array) -> None:
        first, end = np.lib.array_utils.byte_bounds(x)
        raw = np.frombuffer(ctypes.string_at(first, end - first), np.uint8).copy()
        cuda = importlib.import_module("numba.cuda")
        self.memory: Any = raw if in_simulator() else cuda.to_device(raw)
        memory: Any = self.memory
        at: int = (
            memory.ctypes.data if in_simulator() else memory.__cuda_array_interface__["data"][0]
        )
        self.offset = x.ctypes.data - first
        super().__init__(x, data=(at + self.offset, False), stream=None)

    def copy(self) -> Array:
        """Return what lies there now, in host memory."""
        raw = self.memory if in_simulator() else self.memory.copy_to_host()
        x = self.array
        return np.ndarray(x.shape, x.dtype, raw, self.offset, x.strides).copy()


def in_simulator() -> bool:
    """Whether kernels run as plain Python."""
    return bool(importlib.import_module("nattn.backends.cuda.target").SIMULATED)


def host(x: Any) -> Array:
    """Return a result of device arrays in host memory."""
    found: Array = x.copy() if isinstance(x, Place) else x.copy_to_host()
    return found


KINDS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0),
    "negative": lambda x: np.ascontiguousarray(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1],
    "spread": lambda x: np.repeat(x, 3, axis=3)[..., ::3],
    "rows apart": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "Fortran": np.asfortranarray,
    "zero": lambda x: np.broadcast_to(x[:1, :1, :1], x.shape),
    "one key and value": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


def kinds_after(kind: str) -> Iterable[Callable[[Array], Array]]:
    """Return that kind and the following ones, again and again."""
    return itertools.islice(itertools.cycle(KINDS.values()), list(KINDS).index(kind), None)


@case(FORWARD, kind=KINDS)
def strides(kind: str) -> None:
    q, k, v = (make(x) for x, make in zip(qkv(2, 2, 5, 6, 8), kinds_after(kind), strict=False))
    native = [np.array(x, order="C") for x in (q, k, v)]
    expected = attend(*native, causal=True)
    assert_same_bits(attend(q, k, v, causal=True), expected)
    places = [Place(x) for x in (q, k, v)]
    got = attend(*places, causal=True)
    assert_same_bits([host(x) for x in got], expected)
    for place, x in zip(places, native, strict=True):
        np.testing.assert_array_equal(place.copy(), x)  # inputs are never written


@case(FORWARD)
def big_endian_unaligned_and_read_only_arrays() -> None:
    q, k, v = qkv(1, 2, 5, 6, 4)
    room = np.zeros(k.nbytes + 1, "u1")[1:].view("f4").reshape(k.shape)
    room[...] = k
    read_only = v.copy()
    read_only.flags.writeable = False
    got = attend(q.astype(">f4"), room, read_only)
    assert got[0].dtype.isnative
    assert_same_bits(got, attend(q, k, v))
    place = Place(q)
    place.interface["data"] = (place.interface["data"][0], True)
    assert_same_bits([host(x) for x in attend(place, Place(k), Place(v))], attend(q, k, v))


@case(FORWARD, kind=KINDS)
def strides_of_mask_and_bias(kind: str) -> None:
    q, k, v = qkv(2, 2, 5, 6, 4)
    makes = kinds_after(kind)
    mask, bias = (
        make(x)
        for x, make in zip(
            (gaussian(2, 2, 5, 6) > -0.5, gaussian(2, 2, 5, 6, seed=1)), makes, strict=False
        )
    )
    expected = attend(q, k, v, mask=np.array(mask, order="C"), bias=np.array(bias, order="C"))
    assert_same_bits(attend(q, k, v, mask=mask, bias=bias), expected)
    places = [Place(x) for x in (q, k, v)]
    got = attend(*places, mask=Place(mask), bias=Place(bias))
    assert_same_bits([host(x) for x in got], expected)


OUTS: dict[str, Callable[[tuple[int, ...]], Array]] = {
    "contiguous": lambda shape: np.full(shape, nan, "f4"),
    "transposed": lambda shape: np.full(shape[::-1], nan, "f4").transpose(3, 2, 1, 0),
    "every other": lambda shape: np.full((*shape[:-1], 2 * shape[-1]), nan, "f4")[..., ::2],
    "negative": lambda shape: np.full(shape, nan, "f4")[:, :, ::-1, ::-1],
}


@case(FORWARD, kind=OUTS)
def out(kind: str) -> None:
    q, k, v = qkv(2, 2, 5, 6, 4, 5)
    expected = attend(q, k, v)
    room = OUTS[kind]((2, 2, 5, 5))
    got, lse = attend(q, k, v, out=room)
    assert got is room
    assert_same_bits((got, lse), expected)
    place = Place(OUTS[kind]((2, 2, 5, 5)))
    got, lse = attend(Place(q), Place(k), Place(v), out=place)
    assert got is place
    assert_same_bits((host(got), host(lse)), expected)


@case(FORWARD, Nq=[5, 1])
def out_leaves_its_surroundings_alone(Nq: int) -> None:
    q, k, v = qkv(1, 2, Nq, 18, 4, 5)
    room = np.full((1, 2, Nq + 4, 9), 7.0, "f4")
    place = Place(room)
    inner = room[:, :, 2:-2, 2:-2]
    inside = OnDevice(
        inner,
        data=(place.interface["data"][0] + inner.ctypes.data - room.ctypes.data, False),
        strides=inner.strides,
    )
    nattn.attention(Place(q), Place(k), Place(v), out=inside, backend="cuda")
    written = place.copy()
    np.testing.assert_array_equal(written[:, :, 2:-2, 2:-2], attend(q, k, v)[0])
    written[:, :, 2:-2, 2:-2] = 7.0
    assert np.all(written == 7.0)


@case(FORWARD, storage=["float32", "float64", "float16", "bfloat16"])
def arrays_on_a_device(storage: str) -> None:
    q, k, v = (x.astype(storage_dtype(storage)) for x in qkv(2, 2, 3, 10, 4))
    k, v = k[:, :1], v[:, :1]
    options: dict[str, Any] = {
        "mask": gaussian(3, 10) > -1,
        "bias": gaussian(2, 3, 10),
        "sinks": gaussian(2),
        "alibi_slopes": gaussian(2),
    }
    expected = attend(q, k, v, causal=True, **options)
    there: dict[str, Any] = {name: Place(x) for name, x in options.items()}
    got = nattn.attention(Place(q), Place(k), Place(v), causal=True, return_lse=True, **there)
    for x, y in zip(got, expected, strict=True):
        assert not isinstance(x, np.ndarray)
        assert host(x).dtype == y.dtype
        np.testing.assert_array_equal(host(x), y)
    # and of lower rank, in another layout, without lse
    got = nattn.attention(*(Place(x[0, 0]) for x in (q, k, v)))
    np.testing.assert_array_equal(host(got), attend(q[0, 0], k[0, 0], v[0, 0])[0])
    turned = [Place(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v)]
    got = nattn.attention(*turned, layout="bnhd", causal=True, **there)
    np.testing.assert_array_equal(host(got), expected[0].transpose(0, 2, 1, 3))


@case(FORWARD)
def elements_that_straddle_their_places_raise() -> None:
    """All of them are named before anything is read, so it matters little where they lie."""
    odd, out = (OnDevice(np.ndarray((3, 4), "f4", np.zeros(49, "u1"), 1)) for _ in range(2))
    even = OnDevice(np.zeros((3, 4), "f4"))
    error = r"^{}: expected elements at multiples of their 4 bytes.*; {}: expected elements"
    with pytest.raises(NotImplementedError, match=error.format("k", "out")):
        nattn.attention(even, odd, even, out=out)
    lse = OnDevice(np.zeros(3, "f4"))
    with pytest.raises(NotImplementedError, match=error.format("v", "dout")):
        nattn.attention_backward(out, even, even, odd, even, lse)


@case(BACKWARD, storage=["float32", "float64", "float16", "bfloat16"])
def gradients_of_arrays_on_a_device(storage: str) -> None:
    q, k, v = (x.astype(storage_dtype(storage)) for x in qkv(2, 2, 3, 6, 4))
    k, v = k[:, :1], v[:, :1]
    options: dict[str, Any] = {
        "bias": gaussian(2, 1, 6).astype(q.dtype),
        "sinks": gaussian(2),
        "alibi_slopes": gaussian(2, 2).astype("f8"),
    }
    dout, dlse = incoming(Problem.build(q, k, v, **options))
    _, vjp = nattn.attention_vjp(q, k, v, causal=True, backend="cuda", **options)
    expected = vjp(dout, dlse, WRT)
    there: dict[str, Any] = {name: Place(x) for name, x in options.items()}
    arrays = [Place(x) for x in (q, k, v)]
    out, lse = nattn.attention(*arrays, causal=True, return_lse=True, **there)
    there_too: dict[str, Any] = {"dlse": Place(dlse), "wrt": WRT, "causal": True, **there}
    back: Any = nattn.attention_backward
    got = back(Place(dout), *arrays, out, lse, **there_too)
    for name, x, y in zip(WRT, got, expected, strict=False):
        assert not isinstance(x, np.ndarray), name
        assert y is not None
        assert host(x).dtype == y.dtype, name
        np.testing.assert_array_equal(host(x), y, err_msg=f"d{name}")
    # Slopes that all items share are summed over the items by NumPy, or by a kernel.
    options["alibi_slopes"] = options["alibi_slopes"][0].copy()
    there["alibi_slopes"] = Place(options["alibi_slopes"])
    _, vjp = nattn.attention_vjp(*arrays, causal=True, **there)
    found = vjp(Place(dout), Place(dlse), WRT)
    t = gradient_truth(q, k, v, dout, dlse, causal=True, **options)
    assert_gradients_near([host(x) for x in found[: len(WRT)]], t, WRT)


@case(BACKWARD)
def gradients_of_views_of_all_kinds() -> None:
    q, k, v = qkv(2, 2, 3, 5, 8)
    out, lse = attend(q, k, v)
    dout = gaussian(2, 2, 3, 8, seed=7)
    room = np.zeros(dout.nbytes + 1, "u1")[1:].view("f4").reshape(dout.shape)
    room[...] = dout
    spread = KINDS["spread"]
    views: list[tuple[Any, ...]] = [
        (np.broadcast_to(np.float32(1), dout.shape), q[..., ::-1], k[:, :, ::-1], v, out, lse),
        (np.asfortranarray(dout), spread(q), np.asfortranarray(k), spread(v), out, lse),
        (dout[..., ::-1], q, k, np.broadcast_to(v[:1], v.shape), np.asfortranarray(out), lse),
        (room, q.astype(">f4"), k.astype(">f4"), v, out.astype(">f4"), np.asfortranarray(lse)),
    ]
    for n, arrays in enumerate(views):
        copies: Any = [np.array(x, "f4", order="C") for x in arrays]
        expected = nattn.attention_backward(*copies, backend="cuda")
        got = nattn.attention_backward(*arrays, backend="cuda")
        assert all(x is None or (x.dtype == "f4" and x.dtype.isnative) for x in got)
        assert_same_gradients(got, expected)
        if n < 3:
            places: Any = [Place(x) for x in arrays]
            got = nattn.attention_backward(*places)
            assert_same_gradients([None if x is None else host(x) for x in got], expected)


@case(FORWARD, shape=[(7, 4), (2, 7, 4)])
def rank(shape: tuple[int, ...]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape))
    out, lse = check("cuda", q, k, v)
    assert out.shape == shape
    assert lse.shape == shape[:-1]


@case(FORWARD)
def lists() -> None:
    q, k, v = [[1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0], [3.0]]
    assert nattn.attention(q, k, v, backend="cuda").tolist() == [[2.0]]
    options = {"mask": [True, True, False], "bias": [0.5, 1.0, 0.0], "kv_lens": [3, 2]}
    check("cuda", *qkv(2, 1, 3, 3, 4), **options)


@case(FORWARD)
def progress_ends_at_one() -> None:
    from nattn.api import functional

    seen: list[float] = []
    q, k, v = qkv(1, 2, 3, 3, 4)
    out = functional._attend(q, k, v, backend="cuda", progress=seen.append)
    np.testing.assert_array_equal(out, attend(q, k, v)[0])
    assert seen == sorted(seen)
    assert all(0 <= done <= 1 for done in seen)


# 1. Hidden keys are never read into a result

RNG = np.random.default_rng(7)
HIDING: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "kv_lens": {"kv_lens": 7, "q_offset": 4},
    "mask": {"mask": RNG.random((2, 5, 9)) < 0.6},
    "mask of keys": {"mask": RNG.random(9) < 0.6},
    "bias": {"bias": np.where(RNG.random((2, 5, 9)) < 0.5, -inf, 1.0).astype("f4")},
    "mask_mod": {"mask_mod": functools.partial(in_step, step=3)},
    "score_mod": {"score_mod": thin},
    "everything": {
        "mask_mod": masks.mask(functools.partial(in_step, step=3)) & masks.causal,
        "score_mod": compose(thin, functools.partial(gate, gain=0.75)),
        "mask": RNG.random((5, 9)) < 0.8,
        "softcap": 2.0,
        "alibi_slopes": np.array([0.1, 0.3]),
        "sinks": np.array([0.5, -0.5]),
        "dropout_p": 0.3,
        "seed": 4,
    },
}


@case(FORWARD, hiding=HIDING)
def hidden_keys_and_values_change_nothing(hiding: str) -> None:
    q, k, v = qkv(1, 2, 5, 9, 4, 3)
    options = HIDING[hiding]
    clean = attend(q, k, v, **options)
    visible = visible_pairs(Problem.build(q, k, v, **options))[0]
    for rows in ((0, 3), (4, 1)):  # element by element: other rows see some of these keys
        bad_k, bad_v = k, v
        hidden = [~visible[h, i] for h, i in enumerate(rows)]
        for h in range(2):
            bad_k, bad_v = poisoned(bad_k, (0, h, hidden[h])), poisoned(bad_v, (0, h, hidden[h]))
        assert not np.isfinite(bad_v).all()
        got = attend(q, bad_k, bad_v, **options)
        for h in range(2):
            untouched = ~(visible[h] & hidden[h]).any(axis=1)
            assert untouched[rows[h]]
            assert_same_bits(got, clean, (0, h, untouched))


@case(FORWARD, hiding=["kv_lens", "mask", "window_size"])
def hidden_keys_of_few_queries(hiding: str) -> None:
    q, k, v = qkv(1, 2, 1, 20, 4)
    mask = np.random.default_rng(0).random((2, 1, 20)) < 0.5
    options: dict[str, Any] = {"kv_lens": 13, "mask": mask, "window_size": (9, 0)}
    option = {hiding: options[hiding]}
    clean = attend(q, k, v, **option)
    hidden = ~visible_pairs(Problem.build(q, k, v, **option))[:, :, 0]
    assert_same_bits(attend(q, poisoned(k, hidden), poisoned(v, hidden), **option), clean)


@case(FORWARD, hiding=["causal", "mask", "kv_lens"])
def a_hidden_bias_changes_nothing(hiding: str) -> None:
    q, k, v = qkv(1, 2, 5, 9, 4)
    options, bias = HIDING[hiding], gaussian(2, 5, 9)
    clean = attend(q, k, v, bias=bias, **options)
    hidden = ~visible_pairs(Problem.build(q, k, v, **options))[0]
    assert_same_bits(attend(q, k, v, bias=poisoned(bias, hidden), **options), clean)


LENGTHS: dict[str, Any] = {"q_lens": [5, 1, 3], "kv_lens": [1, 7, 4], "causal": True}


@case(FORWARD, value=POISON)
def padding_changes_nothing(value: float) -> None:
    q, k, v = qkv(3, 2, 5, 7, 4)
    clean = attend(q, k, v, **LENGTHS)
    for b, (n_q, n_kv) in enumerate(zip(LENGTHS["q_lens"], LENGTHS["kv_lens"], strict=True)):
        q[b, :, n_q:] = k[b, :, n_kv:] = v[b, :, n_kv:] = value
    got = attend(q, k, v, **LENGTHS)
    assert_same_bits(got, clean)
    for b, n_q in enumerate(LENGTHS["q_lens"]):
        assert np.all(got[0][b, :, n_q:] == 0.0)
        assert np.all(got[1][b, :, n_q:] == -inf)


@case(FORWARD)
def a_bias_of_minus_inf_hides_a_score_of_nan() -> None:
    q, k, v = qkv(1, 1, 5, 9, 4)
    bias = np.where(np.arange(9) % 3 == 0, np.float32(-inf), 0)
    clean = attend(q, k, v, bias=bias)
    k[:, :, ::3] = v[:, :, ::3] = nan
    assert_same_bits(attend(q, k, v, bias=bias), clean)


@case(FORWARD)
def a_score_of_minus_inf_hides_its_key() -> None:
    q = np.abs(gaussian(1, 1, 5, 1)) + 1
    k, v = gaussian(1, 1, 9, 1, seed=1), gaussian(1, 1, 9, 3, seed=2)
    hidden = np.arange(9) % 3 == 0
    expected = truth(q, k, v, mask=~hidden)
    k[:, :, hidden] = -inf
    v[:, :, hidden] = nan
    for bias in (None, np.where(hidden, inf, 0.0)):  # it stays hidden under any bias
        out, lse = attend(q, k, v, bias=bias)
        assert_near(out, expected.out, expected.budget.out[..., None])
        assert_near(lse, expected.lse, expected.budget.lse)
    out, lse = attend(q, np.full_like(k, -inf), np.full_like(v, nan))
    assert np.all(out == 0.0)
    assert np.all(lse == -inf)


@case(FORWARD)
def a_bias_that_the_dtype_rounds_to_minus_inf_hides() -> None:
    q, k, v = qkv(1, 1, 5, 9, 4)
    low = np.where(np.arange(9) % 3, 0.0, -1e300)
    clean = attend(q, k, v, bias=np.where(low, -inf, 0.0))
    k[:, :, ::3] = v[:, :, ::3] = nan
    assert_same_bits(attend(q, k, v, bias=low), clean)
    wide = [x.astype("f8") for x in qkv(1, 1, 5, 9, 4)]
    assert np.all(np.isfinite(attend(*wide, bias=np.full(9, -1e300))[1]))


@case(FORWARD)
def the_value_of_a_dropped_key_is_not_read() -> None:
    q, k, v = qkv(1, 2, 5, 9, 4, 3)
    clean = attend(q, k, v, dropout_p=0.5, seed=3)
    for h, i in ((0, 0), (1, 4)):
        dropped = ~keep(0, h, np.arange(5)[:, None], np.arange(9), 3, 0.5)
        out, lse = attend(q, k, poisoned(v, (0, h, dropped[i])), dropout_p=0.5, seed=3)
        np.testing.assert_array_equal(out[0, h, i], clean[0][0, h, i])
        np.testing.assert_array_equal(lse, clean[1])
        keeps = (dropped[i] & ~dropped).any(axis=1)
        assert not np.isfinite(out[0, h, keeps]).any()


@case(FORWARD, hiding=["causal", "mask", "mask_mod"])
def what_a_score_mod_makes_of_hidden_pairs_changes_nothing(hiding: str) -> None:
    q, k, v = qkv(1, 2, 5, 9, 4)
    options, table = HIDING[hiding], np.ones((1, 9), "f4")
    visible = visible_pairs(Problem.build(q, k, v, **options))[0]

    def got() -> tuple[Array, Array]:
        mod = functools.partial(looked_up, table=table, gain=0.5)
        return attend(q, k, v, score_mod=mod, **options)

    clean = got()
    table[0, 6] = nan  # read for this key, and for the row that sits there
    blind = ~visible[:, :, 6] & (np.arange(5) + 4 != 6)
    assert blind.any()
    assert_same_bits(got(), clean, (0, blind))


@case(BACKWARD, hiding=HIDING)
def hidden_keys_have_no_gradient(hiding: str) -> None:
    q, k, v = qkv(1, 2, 5, 9, 4, 3)
    options = HIDING[hiding]
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    visible = visible_pairs(p)
    # from all rows of the head, and so that there are some
    hidden: Any = ~visible.any(axis=2)
    if not hidden.any():
        mask = np.arange(9) != 5
        options = options | {"mask": mask & options["mask"] if "mask" in options else mask}
        p = Problem.build(q, k, v, **options)
        hidden = ~visible_pairs(p).any(axis=2)
    clean = gradient_truth(q, k, v, dout, dlse, **options)
    bad_k, bad_v = poisoned(k, hidden), poisoned(v, hidden)
    wrt = has_gradients(p)
    _, vjp = nattn.attention_vjp(q, bad_k, bad_v, backend="cuda", **options)
    got: Any = vjp(dout, dlse, wrt)
    assert_gradients_near(got, clean, wrt)
    assert np.all(got.dk[hidden] == 0.0)
    assert np.all(got.dv[hidden] == 0.0)
    # a value that some rows see: what it does stays among those that depend on them
    sees = visible_pairs(p)[0, 0]
    share = sees.mean(axis=0)
    j = int(np.argmax(np.where(share < 1, share, 0))) if np.any((share > 0) & (share < 1)) else 0
    v[0, 0, j] = nan
    got = nattn.attention_vjp(q, k, v, backend="cuda", **options)[1](dout, dlse, wrt)
    assert_gradients_near(got, gradient_truth(q, k, v, dout, dlse, **options), wrt)
    assert np.isfinite(got.dq[0, 0, ~sees[:, j]]).all()
    assert np.isfinite(got.dv).all()
    assert np.isfinite(got.dq[0, 1]).all()


@case(BACKWARD, value=POISON)
def padding_has_no_gradient(value: float) -> None:
    q, k, v = qkv(3, 2, 5, 7, 4)
    options = LENGTHS | {"bias": gaussian(2, 5, 7), "sinks": gaussian(2), "softcap": 2.0}
    dout, dlse = incoming(Problem.build(q, k, v, **options))
    out, lse = attend(q, k, v, **options)
    wrt = ("q", "k", "v", "bias", "sinks")
    back: Any = functools.partial(nattn.attention_backward, wrt=wrt, backend="cuda", **options)
    clean = back(dout, q, k, v, out, lse, dlse=dlse)
    for b, (n_q, n_kv) in enumerate(zip(LENGTHS["q_lens"], LENGTHS["kv_lens"], strict=True)):
        q[b, :, n_q:] = k[b, :, n_kv:] = v[b, :, n_kv:] = value
        dout[b, :, n_q:] = out[b, :, n_q:] = value
        dlse[b, :, n_q:] = value
    got: Any = back(dout, q, k, v, out, lse, dlse=dlse)
    assert_same_gradients(got, clean)
    for b, (n_q, n_kv) in enumerate(zip(LENGTHS["q_lens"], LENGTHS["kv_lens"], strict=True)):
        assert np.all(got.dq[b, :, n_q:] == 0.0)
        assert np.all(got.dk[b, :, n_kv:] == 0.0)
        assert np.all(got.dv[b, :, n_kv:] == 0.0)


@case(BACKWARD)
def a_hidden_bias_has_no_gradient() -> None:
    q, k, v = qkv(1, 2, 5, 9, 4)
    options, bias = HIDING["mask"], gaussian(2, 5, 9)
    hidden = ~visible_pairs(Problem.build(q, k, v, **options))[0]
    clean = differentiate(q, k, v, bias=bias, **options)
    got = differentiate(q, k, v, bias=poisoned(bias, hidden), **options)
    assert_same_gradients(got, clean)
    assert np.all(got.dbias[hidden] == 0.0)


@case(BACKWARD)
def the_gradient_of_a_dropped_key() -> None:
    q, k, v = qkv(1, 2, 5, 9, 4, 3)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 3}
    dropped = ~keep(0, np.arange(2)[:, None], np.arange(5), 6, 3, 0.5)
    assert dropped.any()
    v[0, :, 6] = nan
    got = differentiate(q, k, v, **options)
    np.testing.assert_array_equal(np.isfinite(got.dq).all(axis=3)[0], dropped)
    dout, dlse = incoming(Problem.build(q, k, v, **options))
    assert_gradients_near(got, gradient_truth(q, k, v, dout, dlse, **options), ("q", "k", "v"))


# 2. A row that sees no key


def rows_from(b: Any, h: Any, q_idx: Any, kv_idx: Any, first: Any) -> Any:
    return q_idx >= first


def hide_rows(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, first: Any) -> Any:
    return np.where(q_idx < first, -np.inf, score)


LATE = np.arange(6)[:, None] >= 3
EMPTYING: dict[str, tuple[dict[str, Any], slice]] = {
    "mask": ({"mask": LATE}, slice(0, 3)),
    "bias": ({"bias": np.where(LATE, 0, -inf)}, slice(0, 3)),
    "causal": ({"causal": True, "q_offset": -3}, slice(0, 3)),
    "causal, all": ({"causal": True, "q_offset": -(2**70)}, slice(None)),
    "window left": ({"window_size": (2, 0), "q_offset": 8}, slice(3, None)),
    "window right": ({"window_size": (None, 1), "q_offset": -4}, slice(0, 3)),
    "q_lens": ({"q_lens": 4}, slice(4, None)),
    "kv_lens": ({"kv_lens": 0}, slice(None)),
    "mask_mod": ({"mask_mod": functools.partial(rows_from, first=3), "q_offset": 0}, slice(0, 3)),
    "score_mod": ({"score_mod": functools.partial(hide_rows, first=3), "q_offset": 0}, slice(0, 3)),
}
SINKS = np.array([-3.0, 300.0], "f4")


@case(FORWARD, emptying=EMPTYING)
def empty_rows(emptying: str) -> None:
    options, empty = EMPTYING[emptying]
    q, k, v = qkv(1, 2, 6, 9, 4)
    v += 100.0
    out, lse = without = check("cuda", q, k, v, **options)
    assert np.all(out[:, :, empty] == 0.0)
    assert np.all(lse[:, :, empty] == -inf)
    rest = np.ones(6, bool)
    rest[empty] = False
    assert np.all(np.isfinite(lse[:, :, rest]))
    assert np.all(out[:, :, rest] > 50.0)
    out, lse = check("cuda", q, k, v, sinks=SINKS, **options)
    assert np.all(out[:, :, empty] == 0.0)
    expected = np.where(np.arange(6) < options.get("q_lens", 6), SINKS[:, None], -inf)
    np.testing.assert_array_equal(lse[0][:, empty], expected[:, empty])
    assert_same_bits(attend(q, k, v, sinks=[-inf, -inf], **options), without)


@case(BACKWARD, emptying=EMPTYING)
def gradients_of_empty_rows(emptying: str) -> None:
    options, empty = EMPTYING[emptying]
    q, k, v = qkv(1, 2, 6, 9, 4)
    # A sink does not ask what emptied its row: a mask, positions, lengths or a modifier.
    with_sinks = emptying in ("mask", "causal, all", "kv_lens", "score_mod")
    for extra in ({}, {"sinks": SINKS}) if with_sinks else ({},):
        options = options | extra
        p = Problem.build(q, k, v, **options)
        dout, dlse = incoming(p)
        t = gradient_truth(q, k, v, dout, dlse, **options)
        out, lse = attend(q, k, v, **options)
        dout[:, :, empty] = nan  # whatever comes back into the empty row
        if not extra:  # with a sink lse still depends on it
            dlse[:, :, empty] = nan
        wrt = has_gradients(p)
        got: Any = nattn.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, backend="cuda", **options
        )
        assert_gradients_near(got, t, wrt)
        assert np.all(got.dq[:, :, empty] == 0.0)


# 3. NaN and Inf that are visible propagate to the rows that see them, and to no others

SEEING: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "mask": HIDING["mask"],
    "modifiers": {
        "softcap": 3.0,
        "alibi_slopes": [0.1, 0.2],
        "score_mod": functools.partial(gate, gain=0.75),
        "sinks": [0.0, 1.0],
    },
    "mask_mod": HIDING["mask_mod"],
}


@case(FORWARD, seeing=SEEING, j=[0, 5])
def a_visible_key_and_a_visible_value(seeing: str, j: int) -> None:
    q, k, v = qkv(2, 2, 5, 9, 4, 3)
    options = SEEING[seeing]
    clean = attend(q, k, v, **options)
    k[1, 0, j, 3] = nan
    v[1, 1, j, 2] = -inf if j else inf
    got = attend(q, k, v, **options)
    sees = visible_pairs(Problem.build(*qkv(2, 2, 5, 9, 4, 3), **options))[..., j]
    assert sees.any()
    row, at = np.zeros((2, 2, 5), bool), np.zeros((2, 2, 5, 3), bool)
    row[1, 0], at[1, 1, :, 2] = sees[1, 0], sees[1, 1]
    np.testing.assert_array_equal(np.isnan(got[1]), row)
    np.testing.assert_array_equal(~np.isfinite(got[0]), at | row[..., None])
    np.testing.assert_array_equal(got[1][~row], clean[1][~row])
    rest = ~(at | row[..., None])
    np.testing.assert_array_equal(got[0][rest], clean[0][rest])


@case(FORWARD, top=[1, 6, 10], hidden_elements=[False, True])
def where_the_probability_underflows(top: int, hidden_elements: bool) -> None:
    q = np.ones((1, 1, 5, 1), "f4")
    k, v = np.full((1, 1, 12, 1), -2000, "f4"), gaussian(1, 1, 12, 4)
    options = {"mask": np.arange(12) != 7} if hidden_elements else {}
    k[:, :, top] = 2000  # before, after and beside the keys that show
    v[0, 0, [0, 5, 11], [0, 1, 2]] = POISON
    out, lse = attend(q, k, v, **options)
    assert not np.isfinite(out[..., :3]).any()
    np.testing.assert_array_equal(out[..., 3], np.full((1, 1, 5), v[0, 0, top, 3]))
    assert np.all(lse == 2000.0)


@case(FORWARD, score=[nan, inf])
def a_visible_score(score: float) -> None:
    q, k, v = qkv(1, 2, 6, 9, 4)
    bias = np.zeros((6, 9), "f4")
    clean = attend(q, k, v, bias=bias)
    bias[2, 0] = bias[5, 8] = score
    out, lse = attend(q, k, v, bias=bias)
    assert np.all(np.isnan(out[:, :, [2, 5]]))
    assert np.all(np.isnan(lse[:, :, [2, 5]]))
    assert_same_bits((out, lse), clean, (slice(None), slice(None), [0, 1, 3, 4]))


@case(FORWARD, Nq=[1, 3], sink=[nan, inf])
def a_sink_of_nan_or_inf_shows_in_its_head(Nq: int, sink: float) -> None:
    q, k, v = qkv(2, 4, Nq, 9, 4)
    k, v = k[:, :2], v[:, :2]
    options: dict[str, Any] = {"causal": True, "q_offset": [-2, 0]}
    clean = attend(q, k, v, sinks=[1.0, 2.0, 3.0, 4.0], **options)
    got = attend(q, k, v, sinks=[1.0, sink, 3.0, 4.0], **options)
    assert np.isnan(got[0][:, 1]).all()
    assert np.isnan(got[1][:, 1]).all()
    assert_same_bits(got, clean, (slice(None), [0, 2, 3]))


@case(FORWARD, value=[nan, inf])
def what_a_score_mod_reads_shows(value: float) -> None:
    q, k, v = qkv(1, 2, 5, 9, 4)
    table = np.ones((1, 9), "f4")

    def got() -> tuple[Array, Array]:
        mod = functools.partial(looked_up, table=table, gain=0.5)
        return attend(q, k, v, score_mod=mod, causal=True)

    clean = got()
    table[0, 6] = value
    out, lse = got()
    sees = np.arange(5) + 4 >= 6  # as a key, and as the row's own position
    assert np.isnan(out[:, :, sees]).all()
    assert np.isnan(lse[:, :, sees]).all()
    assert_same_bits((out, lse), clean, (slice(None), slice(None), ~sees))


@case(FORWARD)
def a_kept_value_shows_and_a_dropped_score_too() -> None:
    q, k, v = qkv(1, 2, 5, 9, 4, 3)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 3}
    kept = keep(0, np.arange(2)[:, None], np.arange(5), 6, 3, 0.5)
    assert set(kept.ravel().tolist()) == {False, True}
    clean = attend(q, k, v, **options)
    bad = v.copy()
    bad[0, :, 6, 1] = nan
    out, lse = attend(q, k, bad, **options)
    shows = np.zeros(out.shape, bool)
    shows[0, :, :, 1] = kept
    np.testing.assert_array_equal(np.isnan(out), shows)
    np.testing.assert_array_equal(out[~shows], clean[0][~shows])
    np.testing.assert_array_equal(lse, clean[1])
    k[0, 1, 6] = nan
    out, lse = attend(q, k, v, **options)
    assert np.isnan(out[:, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert_same_bits((out, lse), clean, (0, 0))


@case(FORWARD, causal=[False, True])
def a_nan_in_a_query_stays_in_its_row(causal: bool) -> None:
    q, k, v = qkv(1, 2, 5, 9, 4)
    clean = attend(q, k, v, causal=causal)
    q[0, 1, 2, 3] = nan
    got = attend(q, k, v, causal=causal)
    assert np.all(np.isnan(got[0][0, 1, 2]))
    rest = np.ones((1, 2, 5), bool)
    rest[0, 1, 2] = False
    np.testing.assert_array_equal(np.isnan(got[1]), ~rest)
    assert_same_bits(got, clean, rest)


@case(FORWARD, storage=["float32", "float16", "bfloat16"])
def a_visible_value_with_few_queries(storage: str) -> None:
    q, k, v = (x.astype(storage_dtype(storage)) for x in qkv(1, 4, 1, 20, 4))
    k, v = k[:, :2], v[:, :2].copy()
    clean = attend(q, k, v)
    v[0, 1, 13, 2] = nan
    k[0, 0, 19, 1] = nan
    out, lse = attend(q, k, v)
    odd = np.zeros(out.shape, bool)
    odd[0, 2:, :, 2] = odd[0, :2] = True
    np.testing.assert_array_equal(np.isnan(out), odd)
    np.testing.assert_array_equal(out[~odd], clean[0][~odd])
    np.testing.assert_array_equal(lse[:, 2:], clean[1][:, 2:])
    assert np.isnan(lse[:, :2]).all()


# an infinite score of -inf would hide its key
ODD = [
    *(("plain", x, nan) for x in ("q", "k", "v", "dout", "dlse")),
    *(("causal", *x) for x in (("q", nan), ("k", nan), ("v", inf), ("dout", -inf))),
    *(("modifiers", *x) for x in (("q", nan), ("k", nan), ("v", nan), ("dlse", nan))),
]


@case(BACKWARD, odd=ODD)
def gradients_of_what_is_not_finite(odd: tuple[str, str, float]) -> None:
    seeing, where, value = odd
    q, k, v = qkv(1, 4, 3, 6, 4, 3)
    k, v = k[:, :2].copy(), v[:, :2].copy()
    options: dict[str, Any] = {
        n: np.tile(x, 2) if n in ("alibi_slopes", "sinks") else x for n, x in SEEING[seeing].items()
    }
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    clean = gradient_truth(q, k, v, dout, dlse, **options)
    visible, rows, keys = visible_pairs(p), np.zeros((1, 4, 3), bool), np.zeros((1, 2, 6), bool)
    if where in "kv":
        j = 4
        {"k": k, "v": v}[where][0, 0, j, 0] = value
        rows[0, :2] = visible[0, :2, :, j]
    else:
        {"q": q, "dout": dout, "dlse": dlse[..., None]}[where][0, 0, 1, 0] = value
        rows[0, 0, 1] = True
    for h in range(4):
        keys[:, h // 2] |= (visible[:, h] & rows[:, h, :, None]).any(axis=1)
    if where in "kv":
        keys[0, 0, j] = True
    wrt = has_gradients(p)
    _, vjp = nattn.attention_vjp(q, k, v, backend="cuda", **options)
    got: Any = vjp(dout, dlse, wrt)
    assert_gradients_near(got, gradient_truth(q, k, v, dout, dlse, **options), wrt)
    assert not np.isfinite(got.dq[rows]).all(axis=-1).any()
    for x, depends, name in ((got.dq, rows, "q"), (got.dk, keys, "k"), (got.dv, keys, "v")):
        near = ~depends[..., None]
        assert_near(
            np.where(near, x, 0.0), np.where(near, clean.gradients[name], 0.0), clean.budget[name]
        )


# 4. There is no sentinel


@case(FORWARD, dtype=["f4", "f8"], Nq=[1, 5], hidden_elements=[False, True])
def all_scores_at_the_lowest_number(dtype: str, Nq: int, hidden_elements: bool) -> None:
    lowest = np.finfo(dtype).min
    q, k = np.ones((1, 1, Nq, 1), dtype), np.full((1, 1, 11, 1), lowest)
    v = gaussian(1, 1, 11, 3, dtype=dtype)
    seen = np.arange(11) < (6 if hidden_elements else 11)
    k[:, :, ~seen] = 0.0  # larger, but hidden
    out, lse = attend(q, k, v, mask=seen if hidden_elements else None)
    mean = v[0, 0, seen].astype("f8").mean(axis=0)
    # the scores are exact: only the mean is rounded
    budget = error_budget(np.dtype(dtype), 11, 0.0, np.abs(v).max(), 1)
    assert_near(out, np.broadcast_to(mean, out.shape), budget.out)
    assert np.all(lse == lowest)


@case(FORWARD, first=[False, True], Nq=[1, 5])
def the_lowest_number_beside_ordinary_scores(first: bool, Nq: int) -> None:
    k = np.zeros((1, 1, 12, 1), "f4")
    low = np.arange(12) < 7 if first else np.arange(12) >= 5
    k[:, :, low] = np.finfo("f4").min
    v = gaussian(1, 1, 12, 3)
    out, lse = attend(np.ones((1, 1, Nq, 1), "f4"), k, v)
    budget = error_budget(np.dtype("f4"), 12, 0.0, np.abs(v).max(), 1)
    mean = v[0, 0, ~low].astype("f8").mean(axis=0)
    assert_near(out, np.broadcast_to(mean, out.shape), budget.out)
    assert_near(lse, np.full(lse.shape, math.log(5)), budget.lse)


@case(FORWARD)
def a_bias_at_the_lowest_number_hides_nothing() -> None:
    q, k, v = np.zeros((1, 1, 5, 4), "f4"), np.zeros((1, 1, 9, 4), "f4"), gaussian(1, 1, 9, 3)
    out, lse = attend(q, k, v, bias=np.full(9, np.finfo("f4").min, "f4"))
    budget = error_budget(np.dtype("f4"), 9, 0.0, np.abs(v).max(), 4)
    assert_near(out, np.broadcast_to(v[0, 0].astype("f8").mean(axis=0), out.shape), budget.out)
    assert np.all(lse == np.finfo("f4").min)


@case(FORWARD)
def scores_from_lowest_to_highest() -> None:
    k = np.array([np.finfo("f4").min, -1e30, 0.0, 1e30, np.finfo("f4").max], "f4")
    for order in (k, k[::-1], np.repeat(k, 3)[:-2]):
        v = gaussian(1, 1, len(order), 3)
        out, lse = attend(np.ones((1, 1, 3, 1), "f4"), order.reshape(1, 1, -1, 1), v)
        np.testing.assert_array_equal(out, np.broadcast_to(v[:, :, [order.argmax()]], out.shape))
        assert np.all(lse == np.finfo("f4").max)


@case(FORWARD, size=[1e-30, 30.0, 1e3])
def scores_and_values_of_any_size(size: float) -> None:
    q, k, v = qkv(1, 1, 5, 9, 4)
    check("cuda", q * np.float32(size), k, v * np.float32(size))


@case(BACKWARD, size=[1e-30, 30.0])
def gradients_of_scores_and_values_of_any_size(size: float) -> None:
    q, k, v = qkv(1, 1, 5, 9, 4)
    check_gradients("cuda", q * np.float32(size), k, v * np.float32(size))


@case(FORWARD)
def weights_that_are_subnormal_numbers() -> None:
    rng = np.random.default_rng(0)
    k = np.where(np.arange(13) % 2, 0.0, -rng.uniform(86, 103, 13)).astype("f4")
    q, v = np.ones((1, 1, 4, 1), "f4"), gaussian(1, 1, 13, 4)
    check("cuda", q, k.reshape(1, 1, 13, 1), v)
    check("cuda", q, k.reshape(1, 1, 13, 1), v * np.float32(1e-38))  # products are subnormal too


# 5. Same input, same bits


@case(FORWARD, mask=[False, True])
def an_item_has_the_same_bits_alone(mask: bool) -> None:
    q, k, v = qkv(3, 2, 5, 18, 4)
    options: dict[str, Any] = {
        "q_lens": [5, 1, 2],  # few queries, in splits, beside many
        "kv_lens": [9, 18, 7],
        "q_offset": [4, 17, 6],
        "causal": True,
        "window_size": (12, None),
    }
    if mask:
        options["mask"] = np.random.default_rng(1).random((3, 2, 5, 18)) < 0.8
    together = attend(q, k, v, **options)
    for b in range(3):
        item = slice(b, b + 1)
        one = {
            name: x[item] if name.endswith(("lens", "offset", "mask")) else x
            for name, x in options.items()
        }
        got = attend(q[item], k[item], v[item], **one)
        assert_same_bits(got, [x[item] for x in together])
    n_q, n_kv = 1, 18  # and without its padding
    options |= {"q_lens": None, "kv_lens": None, "q_offset": 17}
    if mask:
        options["mask"] = options["mask"][1:2, :, :n_q, :n_kv]
    got = attend(q[1:2, :, :n_q], k[1:2, :, :n_kv], v[1:2, :, :n_kv], **options)
    assert_same_bits(got, [x[1:2, :, :n_q] for x in together])


@case(FORWARD, Nq=[1, 5])
def whatever_the_other_heads(Nq: int) -> None:
    q, k, v = qkv(1, 4, Nq, 11, 4)
    k, v = k[:, :2], v[:, :2]
    together = attend(q, k, v, causal=True)
    assert_same_bits(attend(q, k, v, causal=True), together)
    for kv in range(2):
        heads = slice(2 * kv, 2 * kv + 2)
        got = attend(q[:, heads], k[:, kv : kv + 1], v[:, kv : kv + 1], causal=True)
        assert_same_bits(got, [x[:, heads] for x in together])


@case(FORWARD, lengths=[(5, 6), (3, 11), (1, 9), (4, 0)])
def however_it_is_padded(lengths: tuple[int, int]) -> None:
    q, k, v = qkv(2, 2, 6, 12, 4)
    n_q, n_kv = lengths
    mask = np.random.default_rng(3).random((6, 12)) < 0.8
    options: dict[str, Any] = {"causal": True}
    out, lse = attend(q, k, v, q_lens=n_q, kv_lens=n_kv, mask=mask, **options)
    short = q[:, :, :n_q], k[:, :, :n_kv], v[:, :, :n_kv]
    got = attend(*short, mask=mask[:n_q, :n_kv], **options)
    assert_same_bits(got, (out[:, :, :n_q], lse[:, :, :n_q]))


@case(BACKWARD)
def gradients_of_an_item_have_the_same_bits_alone() -> None:
    q, k, v = qkv(3, 2, 5, 9, 4)
    lengths: dict[str, Any] = {"q_lens": [5, 1, 2], "kv_lens": [9, 6, 4]}
    dout, dlse = incoming(Problem.build(q, k, v))

    def got(items: slice) -> Any:
        own = {name: x[items] for name, x in lengths.items()}
        arrays = q[items], k[items], v[items]
        _, vjp = nattn.attention_vjp(*arrays, causal=True, backend="cuda", **own)
        return vjp(dout[items], dlse[items])

    together = got(slice(None))
    assert_same_gradients(got(slice(None)), together)
    for b in range(3):
        item = slice(b, b + 1)
        expected = [None if x is None else x[item] for x in together]
        assert_same_gradients(got(item), expected)


@case(BACKWARD)
def gradients_have_the_same_bits_whatever_else_is_wanted() -> None:
    q, k, v = qkv(2, 2, 3, 6, 4)
    options: dict[str, Any] = {
        "bias": gaussian(2, 1, 1, 6),
        "sinks": gaussian(2),
        "alibi_slopes": gaussian(2, 2),
        "softcap": 2.0,
        "causal": True,
        "backend": "cuda",
    }
    out, lse = nattn.attention(q, k, v, return_lse=True, **options)
    dout, dlse = incoming(Problem.build(q, k, v))
    back = functools.partial(
        nattn.attention_backward, dout, q, k, v, out, lse, dlse=dlse, **options
    )
    full = back(wrt=WRT)
    for wrt in [(), *((name,) for name in WRT), ("v", "q"), ("bias", "sinks")]:
        expected = [x if name in wrt else None for name, x in zip(WRT, full, strict=False)]
        assert_same_gradients(back(wrt=wrt), expected)
    # dlse of None is that of 0
    zero = back(wrt=WRT, dlse=np.zeros_like(dlse))
    assert_same_gradients(back(wrt=WRT, dlse=None), zero)
    assert not np.array_equal(np.asarray(zero.dq), np.asarray(full.dq))


# Gradients of the bias in each of its shapes, of lower rank, by vjp, by hand

SHAPES = [
    *((4, 3, 5), (2, 1, 3, 5), (2, 4, 3, 5), (1, 4, 1, 5), (4, 3, 1), (2, 1, 1, 1)),
    *((5,), (2, 4, 1, 5), (3, 1), ()),
]


@case(BACKWARD, shape=SHAPES)
def bias_of_every_shape(shape: tuple[int, ...]) -> None:
    q, k, v = qkv(2, 4, 3, 5, 4)
    bias = np.random.default_rng(0).standard_normal(shape).astype("f4")
    got = check_gradients("cuda", q, k[:, :2], v[:, :2], bias=bias, causal=True, softcap=2.0)
    assert got.dbias.shape == shape


@case(BACKWARD, dtype=["f2", "bfloat16", "f8", ">f4"])
def bias_of_every_dtype(dtype: str) -> None:
    q, k, v = qkv(2, 2, 3, 5, 4)
    of = storage_dtype(dtype) if dtype == "bfloat16" else np.dtype(dtype)
    for shape in ((3, 5), (2, 1, 1, 5)):
        bias = gaussian(*shape).astype(of)
        got = check_gradients("cuda", q, k, v, bias=bias, wrt=("bias", "q"))
        assert got.dbias.dtype == of.newbyteorder("=")
    full = np.broadcast_to(gaussian(5).astype(of), (2, 2, 3, 5))  # of stride 0, but of full shape
    got = check_gradients("cuda", q, k, v, bias=full, wrt=("bias",))
    assert got.dbias.shape == full.shape


@case(BACKWARD)
def sinks_and_slopes_of_every_dtype() -> None:
    q, k, v = qkv(2, 4, 2, 5, 4)
    k, v = k[:, :2], v[:, :2]
    for of, shape in (("f2", (4,)), ("f8", (2, 4)), (">f4", (4,)), ("i4", (2, 4))):
        slopes = (2 * gaussian(*shape)).astype(of)
        check_gradients("cuda", q, k, v, alibi_slopes=slopes, sinks=(2 * gaussian(4)).astype(of))


@case(BACKWARD, shape=[(5, 4), (2, 5, 4)])
def gradients_of_lower_rank(shape: tuple[int, ...]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape))
    got = check_gradients("cuda", q, k, v, bias=np.zeros(5))
    assert got.dq.shape == shape


@case(BACKWARD)
def gradients_in_layout_bnhd() -> None:
    q, k, v = qkv(2, 3, 4, 6, 4, 5)
    options: dict[str, Any] = {"causal": True, "backend": "cuda"}
    out, lse = attend(q, k, v, causal=True)
    expected = nattn.attention_backward(out, q, k, v, out, lse, **options)
    arrays: Any = [*(x.transpose(0, 2, 1, 3) for x in (out, q, k, v, out)), lse]
    got = nattn.attention_backward(*arrays, layout="bnhd", **options)
    for x, y in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(x, np.asarray(y).transpose(0, 2, 1, 3))


@case(BACKWARD)
def vjp_is_the_backward_pass() -> None:
    q, k, v = qkv(1, 2, 3, 5, 4)
    options: dict[str, Any] = {"causal": True, "bias": gaussian(3, 5), "backend": "cuda"}
    expected_out, expected_lse = nattn.attention(q, k, v, return_lse=True, **options)
    dout, dlse = gaussian(1, 2, 3, 4, seed=5), gaussian(1, 2, 3, seed=6)
    (out, lse), vjp = nattn.attention_vjp(q, k, v, return_lse=True, **options)
    assert_same_bits((out, lse), (expected_out, expected_lse))
    for d, wrt in ((None, ("q", "k", "v")), (dlse, ("bias",))):
        expected = nattn.attention_backward(dout, q, k, v, out, lse, dlse=d, wrt=wrt, **options)
        assert_same_gradients(vjp(dout, d, wrt), expected)


@case(BACKWARD)
def gradients_by_hand() -> None:
    # equal scores: both weights are 1/2, and out is 2
    q, k, v = [[1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0], [3.0]]
    options: dict[str, Any] = {"bias": [0.0, 0.0], "scale": 1.0, "backend": "cuda"}
    out, lse = nattn.attention(q, k, v, return_lse=True, **options)
    got = nattn.attention_backward([[1.0]], q, k, v, out, lse, wrt=WRT[:4], **options)
    assert [np.asarray(x).tolist() for x in got[:4]] == [
        [[0.0, 0.0]],
        [[-0.5, 0.0], [0.5, 0.0]],
        [[0.5], [0.5]],
        [-0.5, 0.5],
    ]


# Dropout


@case(FORWARD)
def what_is_dropped_does_not_depend_on_the_tiling() -> None:
    # every size of q, k and v chooses its own tiles; equal scores tell who was dropped
    seed, p = (1 << 40) + 3, 0.5
    b, h, i, j = np.ogrid[:2, :4, :5, :13]
    expected = keep(b, h, i, j, seed, p)
    for Nq, Nk, D, Hkv in [(1, 13, 1, 2), (1, 13, 5, 4), (5, 7, 4, 2), (3, 13, 4, 4)]:
        q, k = np.zeros((2, 4, Nq, D), "f4"), np.zeros((2, Hkv, Nk, D), "f4")
        v = np.broadcast_to(np.eye(Nk, dtype="f4"), (2, Hkv, Nk, Nk))
        out, _ = attend(q, k, v, dropout_p=p, seed=seed)
        np.testing.assert_array_equal(out > 0, expected[:, :, :Nq, :Nk])


@case(BACKWARD)
def the_backward_pass_drops_what_the_forward_pass_drops() -> None:
    # dv of v = 1: each row gives 1 / (1 - p) times its weight to the keys that it keeps
    kept = keep(0, np.arange(2)[:, None, None], np.arange(5)[:, None], np.arange(9), 3, 0.5)
    q, k, v = np.zeros((1, 2, 5, 4), "f4"), np.zeros((1, 2, 9, 4), "f4"), gaussian(1, 2, 9, 3)
    _, vjp = nattn.attention_vjp(q, k, v, dropout_p=0.5, seed=3, backend="cuda")
    for i in (0, 4):
        dout = np.zeros((1, 2, 5, 3), "f4")
        dout[:, :, i] = 1.0
        dv: Any = vjp(dout, wrt=("v",)).dv
        np.testing.assert_array_equal(dv[0, ..., 0] > 0, kept[:, i])


# Faults that other libraries shipped


@case(FORWARD)
def row_i_sees_exactly_its_window() -> None:
    n = 11
    q = k = np.zeros((n, 1), "f4")
    out = nattn.attention(q, k, np.eye(n, dtype="f4"), window_size=(2, 0), backend="cuda")
    for i in range(n):
        assert np.flatnonzero(out[i]).tolist() == list(range(max(0, i - 2), i + 1))
    q, k = np.zeros((2, 1, 1, 1), "f4"), np.zeros((2, 1, 10, 1), "f4")
    v = np.broadcast_to(np.eye(10, dtype="f4"), (2, 1, 10, 10))
    out = nattn.attention(q, k, v, window_size=(2, 0), kv_lens=[5, 10], backend="cuda")
    assert np.flatnonzero(out[0]).tolist() == [2, 3, 4]
    assert np.flatnonzero(out[1]).tolist() == [7, 8, 9]


@case(FORWARD)
def a_window_of_one_key_is_v() -> None:
    q, k, v = qkv(1, 2, 7, 7, 4)
    np.testing.assert_array_equal(attend(q, k, v, window_size=(0, 0))[0], v)


@case(FORWARD)
def a_masked_key_does_not_leak() -> None:
    # score 50 is hidden, so weights are 1 and e**50
    q, k, v = (np.array(x, "f4").reshape(1, 1, -1, 1) for x in ([1], [0, 50, 50], [1, 2, 9]))
    out, lse = attend(q, k, v, mask=np.array([True, True, False]))
    assert out.item() == 2.0
    assert lse.item() == 50.0


@case(FORWARD)
def large_equal_scores() -> None:
    h, v = np.full((1, 1, 2, 8), 300, "f4"), np.array([1, 3], "f4").reshape(1, 1, 2, 1)
    out, lse = attend(h, h, v, scale=1.0)
    assert out.tolist() == [[[[2.0], [2.0]]]]
    assert lse.tolist() == [[[720000.6875] * 2]]  # float32 next to 720000 + log 2


# 9. Errors


@case(FORWARD)
def errors_come_before_anything_is_written() -> None:
    q, k, v = qkv(1, 1, 5, 5, 4)
    out = np.full((1, 1, 5, 4), 7.0, "f4")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"kv_lens": 6}, ValueError, r"^kv_lens: expected lengths from 0 to 5, got 6"),
        ({"mask": np.ones((5, 4), bool)}, ValueError, r"^mask: .*\(5, 4\)"),
        ({"mask": np.ones((5, 5), "u1")}, TypeError, r"^mask: .*uint8"),
        ({"dropout_p": 0.5}, TypeError, r"^seed: "),
        ({"mask_mod": number_mask}, TypeError, r"^mask_mod: expected (.|\n)*got"),
        ({"score_mod": boolean_score}, TypeError, r"^score_mod: expected (.|\n)*got"),
    ]
    for options, error, text in wrong:
        with pytest.raises(error, match=text):
            nattn.attention(q, k, v, out=out, backend="cuda", **options)
    with pytest.raises(TypeError, match=r"^q"):
        nattn.attention(q.astype(int), k, v, out=out, backend="cuda")
    assert np.all(out == 7.0)


def number_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


def boolean_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score > 0.0


@case(BACKWARD)
def errors_of_gradients_come_before_anything_is_computed() -> None:
    q, k, v = qkv(1, 1, 3, 3, 4)
    out, lse = attend(q, k, v)
    with pytest.raises(ValueError, match=r"^kv_lens: expected lengths from 0 to 3, got 6"):
        nattn.attention_backward(out, q, k, v, out, lse, kv_lens=6, backend="cuda")
    with pytest.raises(ValueError, match=r"^wrt: expected .* got 'bias' without bias"):
        nattn.attention_backward(out, q, k, v, out, lse, wrt=("bias",), backend="cuda")
    with pytest.raises(TypeError, match=r"^score_mod: expected (.|\n)*got"):
        nattn.attention_backward(out, q, k, v, out, lse, score_mod=boolean_score, backend="cuda")


@case(FORWARD, Nq=[1, 5])
def an_index_out_of_range_raises(Nq: int) -> None:
    q, k, v = qkv(1, 2, Nq, 9, 4)
    mod = functools.partial(looked_up, table=np.ones((1, 7), "f4"), gain=1.0)
    with pytest.raises(IndexError, match=r"^score_mod: expected indices within"):
        attend(q, k, v, score_mod=mod)
    mask = functools.partial(masks.document, doc=np.zeros(8, int))
    with pytest.raises(IndexError, match=r"^mask_mod: expected indices within"):
        attend(q, k, v, mask_mod=mask)
    # pairs that are hidden by causal, window, lengths or mask never raise
    check("cuda", q, k, v, score_mod=mod, kv_lens=7, q_offset=0)
    check("cuda", q, k, v, score_mod=mod, mask=np.arange(9) < 7, q_offset=0)
    check("cuda", q, k, v, score_mod=mod, causal=True, q_offset=0)


@case(BACKWARD)
def an_index_out_of_range_raises_backward_too() -> None:
    q, k, v = qkv(1, 2, 5, 9, 4)
    out, lse = attend(q, k, v)
    mod = functools.partial(looked_up, table=np.ones((1, 7), "f4"), gain=1.0)
    for wrt in (("q",), ("k", "v")):
        with pytest.raises(IndexError, match=r"^score_mod: expected indices within"):
            nattn.attention_backward(out, q, k, v, out, lse, score_mod=mod, wrt=wrt, backend="cuda")
    options: dict[str, Any] = {"score_mod": mod, "kv_lens": 7, "q_offset": 0}
    check_gradients("cuda", q, k, v, **options)


# 10. Empty sizes

EMPTY = {
    "B": Case("B", B=0, Nq=3, D=4),
    "H": Case("H", Hq=0, Nq=3, D=4),
    "Hq": Case("Hq", Hq=0, Hkv=3, Nq=3, D=4),
    "Nq": Case("Nq", Nq=0, Nk=3, D=4),
    "Nk": Case("Nk", Nq=3, Nk=0, D=4),
    "Nk, few queries": Case("Nk, few queries", Hq=1, Nq=1, Nk=0, D=4),
    "Dv": Case("Dv", Nq=3, D=4, Dv=0),
    "Dv, few queries": Case("Dv, few queries", Nq=1, Nk=9, D=4, Dv=0),
    "Nq, Nk": Case("Nq, Nk", Nq=0, D=4),
    "all": Case("all", B=0, Hq=0, Nq=0, D=4, Dv=0),
}


@case(FORWARD, sizes=EMPTY)
def empty_sizes(sizes: str) -> None:
    q, k, v, _ = EMPTY[sizes].make("f4")
    out, lse = check("cuda", q, k, v)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == q.shape[:3]
    if k.shape[2] == 0:
        assert np.all(out == 0.0)
        assert np.all(lse == -inf)
    pairs = (*q.shape[:3], k.shape[2])
    check("cuda", q, k, v, mask=np.ones(pairs, bool), bias=np.zeros(pairs), causal=True)
    sinks = np.arange(q.shape[1], dtype="f4") - 1
    _, lse = check("cuda", q, k, v, sinks=sinks, alibi_slopes=sinks, softcap=2.0)
    if k.shape[2] == 0:
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], lse.shape))
    if v.shape[3] == 0:
        full = attend(q, k, k)
        np.testing.assert_array_equal(attend(q, k, v)[1], full[1])
    places = [Place(x) for x in (q, k, v)]
    got = attend(*places)
    assert tuple(got[0].shape) == out.shape
    assert tuple(got[1].shape) == lse.shape


@case(BACKWARD, sizes=EMPTY)
def gradients_of_empty_sizes(sizes: str) -> None:
    q, k, v, _ = EMPTY[sizes].make("f4")
    pairs = (*q.shape[:3], k.shape[2])
    sinks = np.arange(q.shape[1], dtype="f4") - 1
    got = check_gradients(
        "cuda",
        q,
        k,
        v,
        mask=np.ones(pairs, bool),
        bias=np.zeros(pairs),
        sinks=sinks,
        alibi_slopes=sinks,
        causal=True,
    )
    assert (np.shape(got.dq), np.shape(got.dk), np.shape(got.dv)) == (q.shape, k.shape, v.shape)
