"""Bad input: what raises, what it says, and that nothing was written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import nattn
from nattn.call import results
from nattn.call.arguments import DEFAULTS
from nattn.call.block_mask import BlockMask
from nattn.call.problem import Problem
from nattn.functions import binding, masks, mods

nan, inf = np.nan, np.inf
B, Hq, Hkv, Nq, Nk, D, Dv = 2, 4, 2, 5, 7, 8, 3


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def base(**changed: Any) -> dict[str, Any]:
    arguments = {"q": zeros(B, Hq, Nq, D), "k": zeros(B, Hkv, Nk, D), "v": zeros(B, Hkv, Nk, Dv)}
    return arguments | changed


def three(dtype: Any) -> dict[str, Any]:
    return {name: x.astype(dtype) for name, x in base().items()}


class OnGpu:
    """An array as CuPy and others show it; nothing lies at its address."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (1,), "typestr": "<f4", "data": (1 << 40, True)}


class Subclass(np.ndarray):
    """An array that carries no meaning of its own."""


class Silent:
    """An object that NumPy can only wrap, and whose repr is broken."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def plus(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
    return score + x


def every_second(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 2 == 0


def flexible(*args: Any) -> Any:
    return args[0]


class Callable_:
    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score


GLOBAL = np.zeros(3)


def reads_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + GLOBAL[kv_idx]


def blocks(B: int = B, H: int = Hq, Nq: int = Nq, Nk: int = Nk, q_offset: Any = 2) -> BlockMask:
    """Make a map of one mixed block for sizes and offsets that may not fit."""
    tree = binding.resolve("mask_mod", every_second, binding.MASK_MOD)
    kinds = np.full((B, H, 1, 1), masks.MIXED, np.uint8)
    offset = np.broadcast_to(np.int64(q_offset), (B,))
    return BlockMask(tree, B, H, Nq, Nk, offset, 128, kinds)


whole = np.zeros((B, Hq, Nq, 2 * Dv), np.float32)

# (what is changed, the exception, words of the message)
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    # rank and shape
    "q of rank 1": ({"q": zeros(8)}, ValueError, ["q", "(8,)"]),
    "q of rank 0": ({"q": np.float32(1)}, ValueError, ["q", "()"]),
    "k of rank 5": ({"k": zeros(1, 2, 2, 7, 8)}, ValueError, ["k", "(1, 2, 2, 7, 8)"]),
    "mixed ranks": ({"k": zeros(2, 7, 8)}, ValueError, ["k", "4 axes", "(2, 7, 8)"]),
    "v of a lower rank": ({"v": zeros(7, 3)}, ValueError, ["v", "4 axes", "(7, 3)"]),
    "D differs": ({"k": zeros(2, 2, 7, 9)}, ValueError, ["k", "(2, Hkv, Nk, 8)", "(2, 2, 7, 9)"]),
    "B differs": ({"k": zeros(1, 2, 7, 8)}, ValueError, ["k", "(2, Hkv, Nk, 8)", "(1, 2, 7, 8)"]),
    "v shorter": ({"v": zeros(2, 2, 6, 3)}, ValueError, ["v", "(2, 2, 7, Dv)", "(2, 2, 6, 3)"]),
    "v longer": ({"v": zeros(2, 2, 8, 3)}, ValueError, ["v", "(2, 2, 7, Dv)", "(2, 2, 8, 3)"]),
    "v of other heads": ({"v": zeros(2, 4, 7, 3)}, ValueError, ["v", "(2, 2, 7, Dv)"]),
    "v of another batch": ({"v": zeros(3, 2, 7, 3)}, ValueError, ["v", "(3, 2, 7, 3)"]),
    "heads do not divide": (
        {"q": zeros(2, 6, 5, 8), "k": zeros(2, 4, 7, 8), "v": zeros(2, 4, 7, 3)},
        ValueError,
        ["k, v", "divides the 6 heads", "got 4"],
    ),
    "fewer query heads": ({"q": zeros(2, 1, 5, 8)}, ValueError, ["k, v", "1 heads", "got 2"]),
    "no key heads": (
        {"k": zeros(2, 0, 7, 8), "v": zeros(2, 0, 7, 3)},
        ValueError,
        ["k, v", "4 heads", "got 0"],
    ),
    "D = 0": ({"q": zeros(2, 4, 5, 0), "k": zeros(2, 2, 7, 0)}, ValueError, ["q", "(2, 4, 5, 0)"]),
    "bnhd, wrong k": (
        {
            "q": zeros(2, 5, 4, 8),
            "k": zeros(2, 7, 2, 9),
            "v": zeros(2, 7, 2, 3),
            "layout": "bnhd",
        },
        ValueError,
        ["k", "(2, Nk, Hkv, 8)", "(2, 7, 2, 9)"],
    ),
    "bnhd of rank 3": (
        {"q": zeros(4, 5, 8), "k": zeros(2, 7, 8), "v": zeros(2, 7, 3), "layout": "bnhd"},
        ValueError,
        ["q", "(B, N, H, D)", "(4, 5, 8)"],
    ),
    # dtypes of q, k, v
    "integers": (three("i4"), TypeError, ["q", "float32 or float64", "int32"]),
    "a list of integers": (
        {"q": [[1]], "k": [[1]], "v": [[1]]},
        TypeError,
        ["q", "float32 or float64", "int64"],
    ),
    "complex": (three("c8"), TypeError, ["q", "float32 or float64", "complex64"]),
    "bool": (three("?"), TypeError, ["q", "float32 or float64", "bool"]),
    "longdouble": (three("g"), TypeError, ["q", "float32 or float64", np.dtype("g").name]),
    "only k is integer": ({"k": zeros(2, 2, 7, 8, dtype="i8")}, TypeError, ["k", "int64"]),
    "mixed floats": (
        {"k": zeros(2, 2, 7, 8, dtype="f8")},
        TypeError,
        ["q, k, v", "one dtype", "float32, float64, float32"],
    ),
    "mixed with float16": ({"v": zeros(2, 2, 7, 3, dtype="f2")}, TypeError, ["q, k, v", "float16"]),
    "float16 and bfloat16": (
        three("f2") | {"k": zeros(2, 2, 7, 8, dtype=ml_dtypes.bfloat16)},
        TypeError,
        ["q, k, v", "one dtype", "float16, bfloat16, float16"],
    ),
    "bits that are not named bfloat16": (
        three("u2") | {"q": zeros(2, 4, 5, 8, dtype=[("bfloat16", "u2")])},
        TypeError,
        ["k", "uint16"],
    ),
    "float8": (three(ml_dtypes.float8_e4m3fn), TypeError, ["q", "float8_e4m3fn"]),
    "a record": ({"q": zeros(2, 4, 5, 8, dtype=[("a", "f4")])}, TypeError, ["q", "float32"]),
    # no arrays at all
    "None": ({"q": None}, TypeError, ["q", "object"]),
    "a string": ({"k": "abc"}, TypeError, ["k", "<U3"]),
    "an object": ({"v": Silent()}, TypeError, ["v", "object"]),
    "a ragged list": ({"q": [[1.0], [1.0, 2.0]]}, ValueError, ["q", "list"]),
    "a masked array": (
        {"k": np.ma.masked_less(zeros(2, 2, 7, 8), 1)},
        TypeError,
        ["k", "masked array", "mask"],
    ),
    "a masked array as mask": (
        {"mask": np.ma.masked_array(np.ones((5, 7), bool))},
        TypeError,
        ["mask", "masked array"],
    ),
    "an array on a GPU": (
        {"k": OnGpu()},
        TypeError,
        ["q, k", "both", "q in host memory and k on a GPU"],
    ),
    "a mask on a GPU": ({"mask": OnGpu()}, TypeError, ["q, mask", "mask on a GPU"]),
    "a table on a GPU": (
        {"score_mod": functools.partial(plus, x=OnGpu())},
        TypeError,
        ["q, x of score_mod (plus)", "q in host memory and x of score_mod (plus) on a GPU"],
    ),
    # flags and names
    "causal is a string": ({"causal": "False"}, TypeError, ["causal", "'False'"]),
    "causal is an int": ({"causal": 1}, TypeError, ["causal", "1 (int)"]),
    "causal is None": ({"causal": None}, TypeError, ["causal", "None"]),
    "return_lse is an int": ({"return_lse": 1}, TypeError, ["return_lse", "1 (int)"]),
    "layout": ({"layout": "bhdn"}, ValueError, ["layout", "'bhnd' or 'bnhd'", "'bhdn'"]),
    "layout is None": ({"layout": None}, TypeError, ["layout", "None"]),
    "layout is an array": ({"layout": np.zeros(2)}, TypeError, ["layout", "shape (2,)"]),
    "backend": ({"backend": "gpu"}, ValueError, ["backend", "'reference'", "'gpu'"]),
    "backend is None": ({"backend": None}, TypeError, ["backend", "None"]),
    "backend is a list": ({"backend": ["cpu"]}, TypeError, ["backend", "cpu"]),
    # scale
    "scale NaN": ({"scale": nan}, ValueError, ["scale", "finite", "nan"]),
    "scale inf": ({"scale": -inf}, ValueError, ["scale", "finite", "-inf"]),
    "scale is too large for float32": ({"scale": 1e39}, ValueError, ["scale", "float32", "1e+39"]),
    "scale is a huge int": ({"scale": 10**5000}, ValueError, ["scale", "bits"]),
    "scale is a string": ({"scale": "1"}, TypeError, ["scale", "'1'"]),
    "scale is a bool": ({"scale": True}, TypeError, ["scale", "True"]),
    "scale is complex": ({"scale": 1j}, TypeError, ["scale", "1j"]),
    "scale is an array": ({"scale": np.ones(1)}, TypeError, ["scale", "shape (1,)"]),
    "scale is a list": ({"scale": [1.0]}, TypeError, ["scale", "[1.0]"]),
    # lengths and offset
    "negative length": ({"kv_lens": -1}, ValueError, ["kv_lens", "from 0 to 7", "-1", "item 0"]),
    "kv_lens too long": ({"kv_lens": [7, 8]}, ValueError, ["kv_lens", "0 to 7", "8", "item 1"]),
    "q_lens too long": ({"q_lens": 6}, ValueError, ["q_lens", "from 0 to 5", "6"]),
    "q_lens huge": ({"q_lens": 10**5000}, ValueError, ["q_lens", "from 0 to 5", "bits"]),
    "kv_lens for 3 items": ({"kv_lens": [1, 2, 3]}, ValueError, ["kv_lens", "2 of them", "got 3"]),
    "kv_lens for 1 item": ({"kv_lens": np.array([1])}, ValueError, ["kv_lens", "2", "got 1"]),
    "kv_lens of rank 2": (
        {"kv_lens": np.ones((2, 1), int)},
        ValueError,
        ["kv_lens", "an integer", "(2, 1)"],
    ),
    "kv_lens is a float": ({"kv_lens": 3.0}, TypeError, ["kv_lens", "an integer", "3.0"]),
    "kv_lens are floats": ({"kv_lens": np.ones(2)}, TypeError, ["kv_lens", "float64"]),
    "kv_lens is a bool": ({"kv_lens": True}, TypeError, ["kv_lens", "an integer", "True"]),
    "kv_lens is a NumPy bool": ({"kv_lens": np.True_}, TypeError, ["kv_lens", "True"]),
    "kv_lens are bools": ({"kv_lens": [True, False]}, TypeError, ["kv_lens[0]", "True"]),
    "kv_lens are NumPy bools": ({"kv_lens": np.ones(2, bool)}, TypeError, ["kv_lens", "bool"]),
    "kv_lens has a None": ({"kv_lens": [7, None]}, TypeError, ["kv_lens[1]", "None"]),
    "kv_lens is a string": ({"kv_lens": "77"}, TypeError, ["kv_lens", "77"]),
    "kv_lens is an object": ({"kv_lens": Silent()}, TypeError, ["kv_lens", "Silent"]),
    "q_offset is a float": ({"q_offset": 0.5}, TypeError, ["q_offset", "an integer", "0.5"]),
    "q_offset is a bool": ({"q_offset": False}, TypeError, ["q_offset", "False"]),
    "q_offset for 1 item": ({"q_offset": [1]}, ValueError, ["q_offset", "2 of them", "got 1"]),
    "q_offset is nested": ({"q_offset": [[1], [2]]}, TypeError, ["q_offset[0]", "[1]"]),
    # window
    "window below -1": ({"window_size": (-2, 0)}, ValueError, ["window_size", "-1", "got -2"]),
    "window right below -1": ({"window_size": (0, -5)}, ValueError, ["window_size", "got -5"]),
    "window is an int": ({"window_size": 3}, TypeError, ["window_size", "a pair", "3 (int)"]),
    "window has 3 sides": ({"window_size": (1, 2, 3)}, ValueError, ["window_size", "a pair"]),
    "window has 1 side": ({"window_size": [1]}, ValueError, ["window_size", "a pair", "[1]"]),
    "window is a float": ({"window_size": (1.0, 2)}, TypeError, ["window_size", "1.0"]),
    "window is a bool": ({"window_size": (True, 2)}, TypeError, ["window_size", "True"]),
    "window is a string": ({"window_size": "ab"}, TypeError, ["window_size", "'ab' (str)"]),
    "window is 0-D": ({"window_size": np.array(3)}, TypeError, ["window_size", "array(3)"]),
    "window is 2-D": ({"window_size": zeros(2, 2)}, ValueError, ["window_size", "(2, 2)"]),
    "window is masked": ({"window_size": np.ma.ones(2, int)}, TypeError, ["window_size", "masked"]),
    "window is an array of floats": ({"window_size": zeros(2)}, TypeError, ["window_size", "0.0"]),
    # mask and bias
    "mask of integers": ({"mask": zeros(5, 7, dtype="u1")}, TypeError, ["mask", "bool", "uint8"]),
    "mask of floats": ({"mask": zeros(5, 7)}, TypeError, ["mask", "bool", "float32"]),
    "mask with a column less": (
        {"mask": np.ones((5, 6), bool)},
        ValueError,
        ["mask", "(2, 4, 5, 7)", "(5, 6)"],
    ),
    "mask of (B, Nq, Nk)": (
        {"mask": np.ones((2, 5, 7), bool)},
        ValueError,
        ["mask", "(2, 4, 5, 7)", "(2, 5, 7)"],
    ),
    "mask of rank 5": ({"mask": np.ones((1, 1, 1, 5, 7), bool)}, ValueError, ["mask", "(1, 1, 1"]),
    "mask with a key head axis": (
        {"mask": np.ones((2, 2, 5, 7), bool)},
        ValueError,
        ["mask", "(2, 4, 5, 7)", "(2, 2, 5, 7)"],
    ),
    "mask is a string": ({"mask": "causal"}, TypeError, ["mask", "bool", "<U6"]),
    "bias of integers": ({"bias": zeros(5, 7, dtype="i4")}, TypeError, ["bias", "float", "int32"]),
    "bias of bools": ({"bias": np.ones((5, 7), bool)}, TypeError, ["bias", "float", "bool"]),
    "bias is complex": ({"bias": zeros(5, 7, dtype="c8")}, TypeError, ["bias", "complex64"]),
    "bias of longdouble": (
        {"bias": zeros(5, 7, dtype="g")},
        NotImplementedError,
        ["bias", np.dtype("g").name],
    ),
    "bias of float8": (
        {"bias": zeros(5, 7, dtype=ml_dtypes.float8_e5m2)},
        NotImplementedError,
        ["bias", "float8_e5m2"],
    ),
    "bias with a row more": ({"bias": zeros(6, 7)}, ValueError, ["bias", "(2, 4, 5, 7)", "(6, 7)"]),
    # softcap, slopes, sinks
    "softcap negative": ({"softcap": -1.0}, ValueError, ["softcap", "positive", "-1.0"]),
    "softcap NaN": ({"softcap": nan}, ValueError, ["softcap", "finite", "nan"]),
    "softcap inf": ({"softcap": inf}, ValueError, ["softcap", "finite", "inf"]),
    "softcap too large for float32": ({"softcap": 1e39}, ValueError, ["softcap", "1e+39"]),
    "softcap too small for float32": ({"softcap": 1e-60}, ValueError, ["softcap", "1e-60"]),
    "softcap is a string": ({"softcap": "1"}, TypeError, ["softcap", "'1'"]),
    "softcap is a bool": ({"softcap": True}, TypeError, ["softcap", "True"]),
    "softcap is an array": ({"softcap": np.ones(1)}, TypeError, ["softcap", "shape (1,)"]),
    "slopes for key heads": (
        {"alibi_slopes": np.ones(2)},
        ValueError,
        ["alibi_slopes", "(Hq,) = (4,)", "(B, Hq) = (2, 4)", "(2,)"],
    ),
    "slopes transposed": (
        {"alibi_slopes": np.ones((4, 2))},
        ValueError,
        ["alibi_slopes", "(4, 2)"],
    ),
    "slopes to be broadcast": (
        {"alibi_slopes": np.ones((1, 4))},
        ValueError,
        ["alibi_slopes", "(2, 4)", "(1, 4)"],
    ),
    "slopes are a number": ({"alibi_slopes": 0.5}, ValueError, ["alibi_slopes", "()"]),
    "slopes are bools": ({"alibi_slopes": [True] * 4}, TypeError, ["alibi_slopes", "bool"]),
    "slopes are complex": ({"alibi_slopes": [1j] * 4}, TypeError, ["alibi_slopes", "complex128"]),
    "slopes of float8": (
        {"alibi_slopes": zeros(4, dtype=ml_dtypes.float8_e5m2)},
        NotImplementedError,
        ["alibi_slopes", "float8_e5m2"],
    ),
    "a slope is NaN": ({"alibi_slopes": [0, 1, nan, 2]}, ValueError, ["alibi_slopes", "nan"]),
    "a slope is too large": (
        {"alibi_slopes": [0.0, 1e300, 0.0, 0.0]},
        ValueError,
        ["alibi_slopes", "finite in float32", "1e+300"],
    ),
    "sinks for key heads": ({"sinks": [0.0, 1.0]}, ValueError, ["sinks", "(4,)", "(2,)"]),
    "sinks for each item": ({"sinks": np.ones((2, 4))}, ValueError, ["sinks", "(4,)", "(2, 4)"]),
    "sinks are a number": ({"sinks": 1.0}, ValueError, ["sinks", "(4,)", "()"]),
    "sinks are bools": ({"sinks": np.ones(4, bool)}, TypeError, ["sinks", "bool"]),
    "sinks are complex": ({"sinks": np.ones(4, "c8")}, TypeError, ["sinks", "complex64"]),
    "sinks of longdouble": (
        {"sinks": zeros(4, dtype="g")},
        NotImplementedError,
        ["sinks", np.dtype("g").name],
    ),
    "sinks are strings": ({"sinks": ["a"] * 4}, TypeError, ["sinks", "<U1"]),
    "masked arrays in a list": (
        {"sinks": [np.ma.ones(2), np.ma.ones(2)]},
        TypeError,
        ["sinks", "masked array"],
    ),
    "sinks are masked": ({"sinks": np.ma.ones(4)}, TypeError, ["sinks", "masked array"]),
    # functions
    "score_mod is a number": ({"score_mod": 1.0}, TypeError, ["score_mod", "function", "1.0"]),
    "score_mod is an array": ({"score_mod": zeros(5, 7)}, TypeError, ["score_mod", "(5, 7)"]),
    "score_mod is a ufunc": ({"score_mod": np.tanh}, TypeError, ["score_mod", "tanh"]),
    "score_mod is an object": ({"score_mod": Callable_()}, TypeError, ["score_mod", "Callable_"]),
    "score_mod has too few parameters": (
        {"score_mod": every_second},
        TypeError,
        ["score_mod", "score_mod(score, b, h, q_idx, kv_idx)", "every_second(b"],
    ),
    "score_mod has *args": ({"score_mod": flexible}, TypeError, ["score_mod", "*args"]),
    "score_mod has a parameter left": (
        {"score_mod": plus},
        TypeError,
        ["score_mod", "x to be bound", "functools.partial(plus, x=...)"],
    ),
    "score_mod is bound to what it has not": (
        {"score_mod": functools.partial(cast(Any, plus), x=1, y=2)},
        TypeError,
        ["score_mod", "y"],
    ),
    "score_mod is bound to a string": (
        {"score_mod": functools.partial(plus, x="1")},
        TypeError,
        ["score_mod", "x of plus", "'1'"],
    ),
    "score_mod is bound to None": (
        {"score_mod": functools.partial(plus, x=None)},
        TypeError,
        ["score_mod", "x of plus", "None"],
    ),
    "score_mod is bound to a list": (
        {"score_mod": functools.partial(plus, x=[1.0])},
        TypeError,
        ["score_mod", "x of plus", "[1.0]"],
    ),
    "score_mod is bound to complex numbers": (
        {"score_mod": functools.partial(plus, x=np.ones(3, complex))},
        TypeError,
        ["score_mod", "x of plus", "complex128"],
    ),
    "score_mod is bound to a huge int": (
        {"score_mod": functools.partial(plus, x=2**64)},
        TypeError,
        ["score_mod", "x of plus", "64 bits"],
    ),
    "score_mod is bound to a function": (
        {"score_mod": functools.partial(plus, x=np.tanh)},
        TypeError,
        ["score_mod", "x of plus"],
    ),
    "score_mod reads a global array": (
        {"score_mod": reads_global},
        TypeError,
        ["score_mod", "functools.partial", "the global GLOBAL"],
    ),
    "a part of a composition has a parameter left": (
        {"score_mod": mods.compose(functools.partial(plus, x=1.0), plus)},
        TypeError,
        ["score_mod", "x to be bound"],
    ),
    "mask_mod is a mask": (
        {"mask_mod": np.ones((5, 7), bool)},
        TypeError,
        ["mask_mod", "function", "(5, 7)"],
    ),
    "mask_mod is a score_mod": (
        {"mask_mod": functools.partial(plus, x=1.0)},
        TypeError,
        ["mask_mod", "kv_idx", "plus(score"],
    ),
    "a part of a mask has a parameter left": (
        {"mask_mod": masks.causal & masks.document},
        TypeError,
        ["mask_mod", "doc to be bound"],
    ),
    "block_mask is a mask_mod": (
        {"block_mask": masks.causal},
        TypeError,
        ["block_mask", "BlockMask", "Mask causal"],
    ),
    "block_mask is an array": (
        {"block_mask": np.ones((2, 4, 1, 1), bool)},
        TypeError,
        ["block_mask", "BlockMask.from_mask_mod", "(2, 4, 1, 1)"],
    ),
    "mask_mod beside a block_mask": (
        {"block_mask": blocks(), "mask_mod": masks.causal},
        ValueError,
        ["mask_mod", "block_mask", "join masks with &"],
    ),
    "block_mask for another batch": (
        {"block_mask": blocks(B=3)},
        ValueError,
        ["block_mask", "(2, 4, 5, 7)", "(3, 4, 5, 7)"],
    ),
    "block_mask for key heads": (
        {"block_mask": blocks(H=2)},
        ValueError,
        ["block_mask", "(2, 4, 5, 7)", "(2, 2, 5, 7)"],
    ),
    "block_mask for other queries": (
        {"block_mask": blocks(Nq=6)},
        ValueError,
        ["block_mask", "(2, 4, 5, 7)", "(2, 4, 6, 7)"],
    ),
    "block_mask for other keys": (
        {"block_mask": blocks(Nk=8)},
        ValueError,
        ["block_mask", "(2, 4, 5, 7)", "(2, 4, 5, 8)"],
    ),
    "block_mask for another offset": (
        {"block_mask": blocks(q_offset=0)},
        ValueError,
        ["block_mask", "q_offset=[2, 2]", "[0, 0]", "BlockMask.from_mask_mod"],
    ),
    "block_mask for the offset of one item": (
        {"block_mask": blocks(B=1), "q_offset": [2, 3]},
        ValueError,
        ["block_mask", "q_offset=[2, 3]", "[2]"],
    ),
    "lengths move the offset away from that of block_mask": (
        {"block_mask": blocks(), "kv_lens": [7, 4]},
        ValueError,
        ["block_mask", "q_offset=[2, -1]", "kv_len - q_len"],
    ),
    # dropout
    "dropout_p is 1": ({"dropout_p": 1.0, "seed": 1}, ValueError, ["dropout_p", "p < 1", "1.0"]),
    "dropout_p rounds to 1": (
        {"dropout_p": Fraction(2**80 - 1, 2**80), "seed": 1},
        ValueError,
        ["dropout_p", "p < 1", "Fraction"],
    ),
    "dropout_p negative": (
        {"dropout_p": -0.1, "seed": 1},
        ValueError,
        ["dropout_p", "0 <=", "-0.1"],
    ),
    "dropout_p NaN": ({"dropout_p": nan, "seed": 1}, ValueError, ["dropout_p", "nan"]),
    "dropout_p is a string": ({"dropout_p": "0.1", "seed": 1}, TypeError, ["dropout_p", "'0.1'"]),
    "dropout_p is a bool": ({"dropout_p": False}, TypeError, ["dropout_p", "False"]),
    "dropout_p is None": ({"dropout_p": None}, TypeError, ["dropout_p", "None"]),
    "no seed": ({"dropout_p": 0.1}, TypeError, ["seed", "integer", "dropout_p=0.1", "None"]),
    "seed negative": ({"dropout_p": 0.1, "seed": -1}, ValueError, ["seed", "2**64 - 1", "-1"]),
    "seed too large": ({"dropout_p": 0.1, "seed": 2**64}, ValueError, ["seed", "2**64 - 1"]),
    "seed is a float": ({"dropout_p": 0.1, "seed": 1.0}, TypeError, ["seed", "integer", "1.0"]),
    "seed is a bool": ({"dropout_p": 0.1, "seed": True}, TypeError, ["seed", "integer", "True"]),
    "seed without dropout": ({"seed": "7"}, TypeError, ["seed", "integer", "'7'"]),
    # out
    "out of another shape": (
        {"out": zeros(2, 4, 5, 8)},
        ValueError,
        ["out", "(2, 4, 5, 3)", "(2, 4, 5, 8)"],
    ),
    "out of a lower rank": ({"out": zeros(4, 5, 3)}, ValueError, ["out", "(4, 5, 3)"]),
    "out of another dtype": (
        {"out": zeros(2, 4, 5, 3, dtype="f8")},
        TypeError,
        ["out", "float32", "<f8"],
    ),
    "out big-endian": (
        {"out": zeros(2, 4, 5, 3, dtype=">f4")},
        TypeError,
        ["out", "native", ">f4"],
    ),
    "out of float32 for float16": (
        three("f2") | {"out": zeros(2, 4, 5, 3)},
        TypeError,
        ["out", "float16", "<f4"],
    ),
    "out of uint16 for bfloat16": (
        three(ml_dtypes.bfloat16) | {"out": zeros(2, 4, 5, 3, dtype="u2")},
        TypeError,
        ["out", "bfloat16", "uint16"],
    ),
    "out on a GPU": ({"out": OnGpu()}, TypeError, ["out", "NumPy array", "OnGpu"]),
    "out is a list": ({"out": [0.0]}, TypeError, ["out", "NumPy array", "list"]),
    "out is a masked array": ({"out": np.ma.zeros((2, 4, 5, 3), "f4")}, TypeError, ["out"]),
    "out read-only": (
        {"out": np.frombuffer(bytes(4 * 2 * 4 * 5 * 3), "f4").reshape(2, 4, 5, 3)},
        ValueError,
        ["out", "writeable", "read-only"],
    ),
    "out of stride zero": (
        {"out": np.lib.stride_tricks.as_strided(zeros(5, 3), (2, 4, 5, 3), (0, 0, 12, 4))},
        ValueError,
        ["out", "strides", "(0, 0, 12, 4)"],
    ),
    "out overlaps itself": (
        {"out": np.lib.stride_tricks.as_strided(zeros(200), (2, 4, 5, 3), (240, 60, 8, 4))},
        ValueError,
        ["out", "strides", "(240, 60, 8, 4)"],
    ),
    "out overlaps q": (
        {"q": whole[..., :5], "k": zeros(2, 2, 7, 5), "out": whole[..., 3:]},
        ValueError,
        ["out", "overlaps q"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changed, error, words = BAD[name]
    with pytest.raises(error) as caught:
        nattn.attention(**base(**changed))
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith(words[0])
    for word in [*words, "expected", "got"]:
        assert word in message, message


@pytest.mark.parametrize("name", [name for name in BAD if "out" not in BAD[name][0]])
def test_nothing_is_written_on_an_error(backend: str, name: str) -> None:
    changed, error, _ = BAD[name]
    out = np.full((B, Hq, Nq, Dv), 7.0, np.float32)
    with pytest.raises(error):
        nattn.attention(**base(backend=backend, out=out) | changed)
    assert np.all(out == 7.0)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
@pytest.mark.parametrize("kind", ["same", "reversed", "big-endian", "buffer"])
def test_out_that_overlaps_an_input(name: str, kind: str) -> None:
    out = zeros(2, 4, 7, 8)
    arguments: dict[str, Any] = {x: zeros(2, 4, 7, 8) for x in ("q", "k", "v")}
    mine: Any = out
    if name == "mask":
        mine = out.view("?")[..., :7]
    elif name == "bias":
        mine = out[..., :7]
    if kind == "reversed":
        mine = mine[..., ::-1]
    elif kind == "big-endian" and name != "mask":
        mine = mine.view(">f4")  # converted by a copy, but out would still destroy it
    elif kind == "buffer":
        mine = memoryview(mine)
    arguments[name] = mine
    with pytest.raises(ValueError, match=f"^out: expected memory.* got .*overlaps {name}$"):
        nattn.attention(**arguments, out=out)


@pytest.mark.parametrize(
    ("argument", "label"),
    [
        ("alibi_slopes", "alibi_slopes"),
        ("sinks", "sinks"),
        ("score_mod", "x of score_mod"),
        ("mask_mod", "doc of mask_mod"),
        ("mask_mod in a combination", "doc of mask_mod"),
    ],
)
def test_out_that_overlaps_what_modifiers_read(argument: str, label: str) -> None:
    out = zeros(2, 4, 7, 8)
    arguments: dict[str, Any] = {x: zeros(2, 4, 7, 8) for x in ("q", "k", "v")}
    same = functools.partial(masks.document, doc=out[0, 0, 0].view("i4"))
    arguments[argument.split()[0]] = {
        "score_mod": functools.partial(plus, x=out[0, 0, 0]),
        "mask_mod": same,
        "mask_mod in a combination": nattn.mask(every_second) | ~nattn.mask(same),
    }.get(argument, out[0, 0, 0, :4])
    with pytest.raises(ValueError, match=f"^out: expected memory.* got .*overlaps {label}"):
        nattn.attention(**arguments, out=out)


def test_out_may_lie_between_inputs() -> None:
    packed = zeros(2, 4, 7, 4, 8)
    q, k, v, out = (packed[:, :, :, n] for n in range(4))
    results.check_out(Problem.build(q, k, v), out)
    packed = zeros(2, 4, 7, 8, 2)
    results.check_out(Problem.build(packed[..., 0], packed[..., 0], packed[..., 0]), packed[..., 1])


def test_out_of_any_slices() -> None:
    a = base()
    for slices in product([slice(None), slice(None, None, -2), slice(1, None, 3)], repeat=4):
        room = zeros(20, 20, 20, 20)[slices]
        results.check_out(Problem.build(**a), room[:2, :4, :5, :3])
        results.check_out(Problem.build(**a), room.transpose(2, 0, 3, 1)[:2, :4, :5, :3])


INTEGERS = {
    "int": 3,
    "int8": np.int8(3),
    "uint64": np.uint64(3),
    "0-d array": np.array(3),
    "0-d big-endian array": np.array(3, ">i4"),
    "list": [3, 3],
    "list of NumPy integers": [np.int16(3), 3],
    "tuple": (3, 3),
    "array": np.array([3, 3], np.uint8),
    "read-only array": np.broadcast_to(np.int64(3), (2,)),
    "object array": np.array([3, 3], object),
}


@pytest.mark.parametrize("value", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize("name", ["q_lens", "kv_lens", "q_offset"])
def test_integers(name: str, value: Any) -> None:
    array = getattr(Problem.build(**base(), **{name: value}), name)
    assert array.tolist() == [3, 3]
    assert array.dtype == np.int64
    assert array.dtype.isnative
    assert array.flags.c_contiguous


def test_lengths_are_copied() -> None:
    lengths = np.array([3, 3])
    assert not np.shares_memory(Problem.build(**base(), kv_lens=lengths).kv_lens, lengths)


def test_default_offset_is_bottom_right() -> None:
    p = Problem.build(**base(), q_lens=[5, 2], kv_lens=[3, 7])
    assert p.q_offset.tolist() == [-2, 5]
    assert Problem.build(**base()).q_offset.tolist() == [2, 2]


@pytest.mark.parametrize("q_offset", [[], np.zeros(0, int), 4])
def test_integers_for_no_items(q_offset: Any) -> None:
    p = Problem.build(zeros(0, 1, 3, 4), zeros(0, 1, 3, 4), zeros(0, 1, 3, 4), q_offset=q_offset)
    assert p.q_offset.shape == (0,)


def test_visible_range() -> None:
    q, k = zeros(2, 1, 4, 8), zeros(2, 1, 6, 8)
    p = Problem.build(
        q, k, k, causal=True, window_size=(2, 0), q_offset=[1, -1], q_lens=[3, 4], kv_lens=[3, 6]
    )
    i = np.arange(4)
    keys = [
        [range(*map(int, bounds)) for bounds in zip(*p.visible_range(b, i), strict=True)]
        for b in range(2)
    ]
    assert [list(r) for r in keys[0]] == [[0, 1], [0, 1, 2], [1, 2], []]
    assert [list(r) for r in keys[1]] == [[], [0], [0, 1], [0, 1, 2]]


FAR = [0, 1, 3, 2**30, 2**58, 2**59 - 1, 2**59, 2**59 + 1, 2**60, 2**61, 2**62, 2**63, 2**64 + 5]
FAR += [2**70, 2**70 + 2, 10**40]


@pytest.mark.parametrize("causal", [False, True])
def test_far_offsets_and_windows_are_exact(causal: bool) -> None:
    q, k = zeros(1, 5), zeros(9, 5)
    near = [n + d for n in FAR for d in (-2, 0, 3)]
    sides = [None, *FAR]
    for offset in [*near, *(-n for n in near)]:
        for left, right in [
            *((side, None) for side in sides),
            *((None, side) for side in sides),
            *((abs(offset + d), abs(offset + e)) for d in (-3, 0, 3) for e in (-3, 0, 3)),
        ]:
            p = Problem.build(q, k, k, causal=causal, q_offset=offset, window_size=(left, right))
            lo, hi = p.visible_range(0, np.zeros(1, np.int64))
            seen = [j for j in range(9) if lo[0] <= j < hi[0]]
            assert seen == [
                j
                for j in range(9)
                if (not causal or j <= offset)
                and (left is None or -left <= j - offset)
                and (right is None or j - offset <= right)
            ], (offset, left, right)
            reach = abs(int(p.q_offset[0])) + max(x or 0 for x in p.window)
            assert reach < 2**62  # leaves the other half of int64 to rows


CONTAINERS: dict[str, Callable[[], Any]] = {  # all of them give two things when iterated
    "dict": lambda: {0: 1, 1: 2},
    "keys": {0: 1, 1: 2}.keys,
    "values": {0: 1, 1: 2}.values,
    "set": lambda: {0, 1},
    "frozenset": lambda: frozenset({0, 1}),
    "str": lambda: "12",
    "bytes": lambda: b"12",
    "generator": lambda: (x for x in (0, 1)),
    "map": lambda: map(int, "12"),
    "file": lambda: StringIO("1\n2\n"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", [*"qkv", "out", "return_lse", "backend", *DEFAULTS])
def test_a_wrong_container_is_refused(name: str, container: str) -> None:
    arguments = base(dropout_p=0.5, seed=0) | {name: CONTAINERS[container]()}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: (?s:.)*expected (?s:.)*got "):
        nattn.attention(**arguments)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["wrt", "dout", "lse", "rows", "size", "words", "titles"])
def test_a_wrong_container_is_refused_beside_a_call(name: str, container: str) -> None:
    a, value = base(), CONTAINERS[container]()
    out, lse = nattn.attention(**a, return_lse=True, backend="reference")
    given: dict[str, Any] = {"dout": out, "out": out, "lse": lse} | a

    def backward() -> Any:
        return nattn.attention_backward(**given | {name: value})

    calls: dict[str, Callable[[], Any]] = {
        "rows": lambda: nattn.attention_weights(a["q"], a["k"], rows=value),
        "size": lambda: nattn.attention_map(a["q"], a["k"], size=value),
        "words": lambda: nattn.plot_attention(np.eye(2), words=value),
        "titles": lambda: nattn.plot_attention(np.ones((2, 2, 2)), titles=value),
    }
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected (?s:.)*got "):
        calls.get(name, backward)()


@pytest.mark.parametrize(
    "value",
    [
        (None, 5),
        (-1, 5),
        range(-1, 6)[::6],
        [None, 5],
        (np.int8(-1), np.uint64(5)),
        np.array([-1, 5]),
    ],
)
def test_window(value: Any) -> None:
    assert Problem.build(**base(), window_size=value).window == (None, 5)


SCALES = [
    0.1,
    np.float64(0.1),
    np.float32(0.1),
    np.array(0.1),
    np.array(0.1, ">f8"),
    Fraction(1, 10),
]


@pytest.mark.parametrize("value", SCALES, ids=lambda value: type(value).__name__)
def test_scale_is_rounded_to_the_compute_dtype(value: Any) -> None:
    p = Problem.build(**base(), scale=value)
    assert type(p.scale) is float
    assert p.scale == float(np.float32(0.1))


def test_scale_in_float64() -> None:
    a = {name: x.astype("f8") for name, x in base().items()}
    assert Problem.build(**a, scale=0.1).scale == 0.1
    assert Problem.build(**a).scale == 1 / np.sqrt(8)
    assert Problem.build(**a, scale=np.float32(0.1)).scale == float(np.float32(0.1))
    assert Problem.build(**a, scale=2).scale == 2.0


NARROW = {"float16": np.dtype("f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_storage_is_computed_in_float32(name: str) -> None:
    a = three(NARROW[name])
    a["k"] = a["k"].astype(NARROW[name].newbyteorder(">")) if name == "float16" else a["k"]
    slopes = np.array([0, 0.5, 1.5, -2], NARROW[name])
    p = Problem.build(**a, scale=0.1, softcap=0.1, alibi_slopes=slopes, sinks=slopes)
    assert p.storage == name
    assert p.dtype == p.q.dtype == p.k.dtype == p.v.dtype == NARROW[name]
    assert p.compute == np.float32
    assert p.scale == float(np.float32(0.1))
    capped, alibi = p.score_mods
    assert isinstance(capped, binding.Bound)
    assert isinstance(alibi, binding.Bound)
    assert capped.values == (float(np.float32(0.1)),)
    assert np.asarray(alibi.values[0]).tolist() == [[0, 0.5, 1.5, -2]] * 2
    assert p.sinks is not None
    assert p.sinks.dtype == np.float32
    assert p.sinks.tolist() == [0, 0.5, 1.5, -2]
    with pytest.raises(ValueError, match=r"^scale: .*finite in float32"):
        Problem.build(**a, scale=1e39)
    assert results.gradient_as_given(p, "q", np.full((B, Hq, Nq, D), 0.1)).dtype == NARROW[name]
    assert results.gradient_as_given(p, "sinks", np.ones(4)).dtype == NARROW[name]
    assert results.gradient_as_given(p, "alibi_slopes", np.ones((B, Hq))).dtype == NARROW[name]


@pytest.mark.parametrize("name", NARROW)
def test_a_bias_of_narrow_storage(name: str) -> None:
    bias = np.full((5, 7), 0.5, NARROW[name])
    p = Problem.build(**base(), bias=bias)
    assert p.bias is not None
    assert p.bias.dtype == NARROW[name]
    assert np.shares_memory(p.bias, bias)
    assert results.gradient_as_given(p, "bias", np.full((1, 1, 5, 7), 1e30)).dtype == NARROW[name]


@pytest.mark.parametrize("name", NARROW)
def test_incoming_of_narrow_storage(name: str) -> None:
    p = Problem.build(**three(NARROW[name]))
    x, lse = zeros(B, Hq, Nq, Dv, dtype=NARROW[name]), zeros(B, Hq, Nq)
    dout, out, rows, dlse = results.check_incoming(p, x, x, lse, lse)
    assert dout.dtype == out.dtype == NARROW[name]
    assert rows.dtype == dlse.dtype == np.float32
    with pytest.raises(
        TypeError, match=f"^dlse: expected dtype float32 for q of {name}, got {name}"
    ):
        results.check_incoming(p, x, x, lse, lse.astype(NARROW[name]))
    with pytest.raises(TypeError, match=f"^dout: expected dtype {name} as of q, got float32"):
        results.check_incoming(p, x.astype("f4"), x, lse, None)


def test_no_storage_but_the_four() -> None:
    for storage in ("float32", "float64"):
        p = Problem.build(**three(storage))
        assert (p.storage, p.dtype, p.compute) == (storage, np.dtype(storage), np.dtype(storage))
        assert p.allocator is None
        assert p.streams == ()
    p = Problem.build(**three(">f4"))
    assert p.storage == "float32"
    assert p.dtype is np.dtype(np.float32)


def test_scale_that_underflows_raises_nothing() -> None:
    with np.errstate(all="raise"):
        assert Problem.build(**base(), scale=1e-60).scale == 0.0


@pytest.mark.parametrize("value", SCALES, ids=lambda value: type(value).__name__)
def test_softcap_is_rounded_to_the_compute_dtype(value: Any) -> None:
    (capped,) = Problem.build(**base(), softcap=value).score_mods
    assert isinstance(capped, binding.Bound)
    assert capped.function is mods.softcap
    assert capped.values == (float(np.float32(0.1)),)


@pytest.mark.parametrize("off", [None, 0, 0.0, -0.0, np.float32(0), np.array(0)])
def test_softcap_is_off(off: Any) -> None:
    assert Problem.build(**base(), softcap=off).score_mods == ()


def test_the_order_of_modifiers() -> None:
    user = mods.compose(functools.partial(plus, x=1), functools.partial(plus, x=2))
    p = Problem.build(**base(), alibi_slopes=[0, 1, 2, 3], score_mod=user, softcap=4)
    capped, mine, alibi = p.score_mods
    assert isinstance(capped, binding.Bound)
    assert isinstance(mine, binding.Combination)
    assert isinstance(alibi, binding.Bound)
    assert [capped.function, alibi.function] == [mods.softcap, mods.alibi]
    assert [part.values for part in mine.parts] == [(1,), (2,)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i1", "u8", ">i2"])
def test_slopes_and_sinks_of_any_dtype(dtype: str) -> None:
    x = np.arange(8).astype(dtype)[::2]
    p = Problem.build(**base(), alibi_slopes=x, sinks=x)
    assert isinstance(p.score_mods[0], binding.Bound)
    (slopes,) = p.score_mods[0].values
    assert isinstance(slopes, np.ndarray)
    assert slopes.dtype == np.dtype(dtype).newbyteorder("=")
    assert slopes.dtype.isnative
    assert slopes.tolist() == [[0, 2, 4, 6]] * 2
    assert p.sinks is not None
    assert p.sinks.dtype == np.dtype("f4")
    assert p.sinks.dtype.isnative
    assert p.sinks.flags.c_contiguous
    assert not np.shares_memory(p.sinks, x)
    assert p.sinks.tolist() == [0, 2, 4, 6]


def test_sinks_are_rounded_as_a_bias_is() -> None:
    with np.errstate(all="raise"):
        sinks = Problem.build(**base(), sinks=[0.1, -1e300, 1e300, nan]).sinks
    assert sinks is not None
    np.testing.assert_array_equal(sinks, np.array([0.1, -inf, inf, nan], "f4"))


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int8(5), np.uint64(2**63), np.array(5)])
def test_seed(seed: Any) -> None:
    p = Problem.build(**base(), dropout_p=cast(float, np.float32(0.5)), seed=seed)
    assert (type(p.seed), p.seed) == (int, int(seed))
    assert (type(p.dropout_p), p.dropout_p) == (float, 0.5)


@pytest.mark.parametrize("p", [0, 0.0, -0.0, np.float32(0)])
def test_no_dropout(p: Any) -> None:
    problem = Problem.build(**base(), dropout_p=p)
    assert (str(problem.dropout_p), problem.seed) == ("0.0", 0)


def test_mask_mod_comes_from_block_mask() -> None:
    given = blocks()
    p = Problem.build(**base(), block_mask=given)
    assert p.block_mask is given
    assert p.mask_mod is given.mask_mod
    p = Problem.build(**base(), mask_mod=every_second)
    assert p.block_mask is None
    assert isinstance(p.mask_mod, binding.Bound)
    assert p.mask_mod.function is every_second


@pytest.mark.parametrize("given", [blocks(B=1), blocks(H=1), blocks(B=1, H=1), blocks()])
def test_block_mask_is_broadcast(given: BlockMask) -> None:
    assert Problem.build(**base(), block_mask=given).block_mask is given


def test_block_mask_for_the_offset_of_each_item() -> None:
    given = blocks(q_offset=[5, -3])
    assert Problem.build(**base(), block_mask=given, q_offset=[5, -3]).block_mask is given
    far = blocks(q_offset=2**62)  # farther than any array reaches: clamped, and so is the call's
    assert Problem.build(**base(), block_mask=far, q_offset=2**62).block_mask is far


def test_subclasses_of_ndarray(tmp_path: Path) -> None:
    x = np.memmap(tmp_path / "x", "f4", "w+", shape=(3, 4))
    p = Problem.build(x, x.view(Subclass), x)
    assert type(p.q) is type(p.k) is np.ndarray
    assert np.shares_memory(p.q, x)
    assert np.shares_memory(p.k, x)
    assert p.k.shape == (1, 1, 3, 4)


def test_nothing_is_copied() -> None:
    a = base()
    mask, bias = np.ones((5, 7), bool), zeros(4, 1, 7, dtype="f2")
    p = Problem.build(**a, mask=mask, bias=bias)
    for name, x in (a | {"mask": mask, "bias": bias}).items():
        assert np.shares_memory(getattr(p, name), x)
    assert p.mask is not None
    assert p.bias is not None
    assert p.mask.strides == (0, 0, 7, 1)
    assert p.bias.strides == (0, 14, 0, 2)
    assert p.mask.shape == p.bias.shape == (B, Hq, Nq, Nk)


@pytest.mark.parametrize("flag", [np.True_, True])
def test_flags(flag: Any) -> None:
    assert Problem.build(**base(), causal=flag).causal is True


def test_a_problem_is_frozen() -> None:
    p = Problem.build(**base())
    with pytest.raises(AttributeError):
        p.scale = 2.0  # type: ignore[misc]


def test_every_field_is_set() -> None:
    p = Problem.build(**base())
    assert set(vars(p)) == {field.name for field in fields(p)}


def test_big_endian_broadcasts_are_not_materialised() -> None:
    q = np.ones((1, 1, 50, 4), np.float32)
    row = np.arange(50).astype(">f4")
    bias = Problem.build(q, q, q, bias=np.broadcast_to(row, (50, 50))).bias
    assert bias is not None
    assert bias.dtype.isnative
    assert bias.strides[2] == 0
    np.testing.assert_array_equal(bias[0, 0, 7], row)


# Gradients: what a backward pass starts from, and what it is asked for


def backward_problem(**options: Any) -> tuple[Problem, dict[str, Any]]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 5, 8), dtype=np.float32)
    k, v = (rng.standard_normal((2, 2, 7, n), dtype=np.float32) for n in (8, 3))
    lse = np.zeros((2, 4, 5), np.float32)
    return Problem.build(q, k, v, **options), {
        "dout": np.zeros((2, 4, 5, 3), np.float32),
        "out": np.zeros((2, 4, 5, 3), np.float32),
        "lse": lse,
        "dlse": None,
    }


INCOMING: dict[str, tuple[str, Any, type[Exception], str]] = {
    "dout, shape of q": ("dout", np.zeros((2, 4, 5, 8), "f4"), ValueError, r"\(2, 4, 5, 3\), got"),
    "dout, to be broadcast": ("dout", np.float32(1), ValueError, r"got \(\)"),
    "dout, dtype": ("dout", np.zeros((2, 4, 5, 3)), TypeError, "float32 as of q, got float64"),
    "dout, integers": ("dout", np.zeros((2, 4, 5, 3), int), TypeError, "float32 as of q, got int"),
    "dout, masked": ("dout", np.ma.zeros((2, 4, 5, 3)), TypeError, "got a masked array"),
    "dout, none": ("dout", None, TypeError, "expected dtype float32"),
    "out, shape": ("out", np.zeros((2, 5, 4, 3), "f4"), ValueError, r"got \(2, 5, 4, 3\)"),
    "out, dtype": ("out", np.zeros((2, 4, 5, 3), "f2"), TypeError, "got float16"),
    "lse, shape": ("lse", np.zeros((2, 5, 4), "f4"), ValueError, r"\(2, 4, 5\), got \(2, 5, 4\)"),
    "lse, one axis more": ("lse", np.zeros((2, 4, 5, 1), "f4"), ValueError, r"got \(2, 4, 5, 1\)"),
    "lse, dtype": ("lse", np.zeros((2, 4, 5)), TypeError, "float32 as of q, got float64"),
    "lse, none": ("lse", None, TypeError, "expected dtype float32"),
    "dlse, shape": ("dlse", np.zeros((2, 4), "f4"), ValueError, r"got \(2, 4\)"),
    "dlse, dtype": ("dlse", np.zeros((2, 4, 5), "c8"), TypeError, "got complex64"),
}


@pytest.mark.parametrize("case", INCOMING)
def test_incoming_errors(case: str) -> None:
    name, value, error, expected = INCOMING[case]
    p, arrays = backward_problem()
    with pytest.raises(error, match=f"^{name}: expected .*{expected}|^{name}: .*{expected}"):
        results.check_incoming(p, **{**arrays, name: value})


def test_incoming_in_the_callers_rank_and_layout() -> None:
    x = np.zeros((5, 8), "f4")
    p = Problem.build(x, x, x)
    dout, out, lse, dlse = results.check_incoming(p, x, x, x[:, 0], None)
    assert dout.shape == out.shape == (1, 1, 5, 8)
    assert lse.shape == (1, 1, 5)
    assert lse.flags.c_contiguous
    assert dlse is None
    with pytest.raises(ValueError, match=r"^lse: expected shape \(5,\), got \(1, 1, 5\)"):
        results.check_incoming(p, x, x, lse, None)
    y = np.zeros((2, 5, 3, 8), "f4")
    p = Problem.build(y, y, y, layout="bnhd")
    big = np.arange(30, dtype=">f4").reshape(2, 3, 5)
    dout, _, lse, dlse = results.check_incoming(p, y.astype(">f4"), y, big[..., ::-1], big)
    assert dout.shape == (2, 3, 5, 8)
    assert dout.dtype.isnative
    assert lse.dtype.isnative
    assert dlse.dtype.isnative
    np.testing.assert_array_equal(lse, big[..., ::-1])


def test_an_lse_of_other_lengths() -> None:
    p, arrays = backward_problem(q_lens=[5, 3])
    with pytest.raises(ValueError, match=r"^lse: expected -inf .*got 0.0 in row 3 of item 1"):
        results.check_incoming(p, **arrays)
    arrays["lse"][1, :, 3:] = -np.inf
    results.check_incoming(p, **arrays)


WRTS: dict[str, tuple[Any, type[Exception], str]] = {
    "a name": ("q", TypeError, "got 'q'"),
    "a set": ({"q"}, TypeError, "set"),
    "none": (None, TypeError, "None"),
    "a number": ((1,), TypeError, "got "),
    "unknown": (("q", "o"), ValueError, "got 'o'"),
    "with a d": (["dq"], ValueError, "got 'dq'"),
    "twice": (("q", "k", "q"), ValueError, "got 'q' twice"),
    "no bias": (("bias",), ValueError, "got 'bias' without bias"),
    "no sinks": (("q", "sinks"), ValueError, "got 'sinks' without sinks"),
    "no slopes": (("alibi_slopes",), ValueError, "got 'alibi_slopes' without alibi_slopes"),
}


@pytest.mark.parametrize("case", WRTS)
def test_wrt_errors(case: str) -> None:
    value, error, expected = WRTS[case]
    p, _ = backward_problem()
    with pytest.raises(error, match=f"^wrt: expected .*{expected}"):
        results.check_wrt(p, value)


def test_wrt() -> None:
    p, _ = backward_problem(bias=np.zeros(7), sinks=[0.0] * 4, alibi_slopes=[0.0] * 4)
    every = ["q", "k", "v", "bias", "sinks", "alibi_slopes"]
    assert results.check_wrt(p, every) == frozenset(every)
    assert results.check_wrt(p, ()) == frozenset()


def test_the_shape_of_a_bias() -> None:
    for shape, padded in [
        ((7,), (1, 1, 1, 7)),
        ((), (1, 1, 1, 1)),
        ((4, 1, 7), (1, 4, 1, 7)),
        ((2, 1, 5, 1), (2, 1, 5, 1)),
    ]:
        p, _ = backward_problem(bias=np.zeros(shape, "f2"))
        assert p.bias_shape == padded
        assert results.gradient_as_given(p, "bias", np.ones(padded)).shape == shape
        assert results.gradient_as_given(p, "bias", np.ones(padded)).dtype == np.float16
    p, _ = backward_problem(bias=np.broadcast_to(np.float32(1), (2, 4, 5, 7)))
    assert p.bias_shape == (2, 4, 5, 7)
    p, _ = backward_problem()
    assert p.bias_shape is None


def test_gradients_as_given() -> None:
    p, _ = backward_problem(sinks=np.zeros(4, ">f8"), alibi_slopes=[1, 2, 3, 4])
    assert results.gradient_as_given(p, "sinks", np.ones(4, "f4")).dtype.str == np.dtype("f8").str
    slopes = results.gradient_as_given(p, "alibi_slopes", np.ones((2, 4), "f4"))
    assert slopes.tolist() == [2.0] * 4
    assert slopes.dtype == np.float32  # integers have no gradient of their own type
    p, _ = backward_problem(alibi_slopes=np.ones((2, 4), "f2"))
    slopes = results.gradient_as_given(p, "alibi_slopes", np.full((2, 4), 1e9, "f4"))
    assert slopes.dtype == np.float16
    assert np.all(slopes == np.inf)  # too large, and no warning
