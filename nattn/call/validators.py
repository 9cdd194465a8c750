"""Checks of the arguments of `nattn.attention`: each brings one to the form that backends take.

Each raises ValueError or TypeError with what was expected and what was got.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..functions import mods
from ..functions.binding import SCORE_MOD, Combination, Tree, resolve
from ..vectors import dtypes
from . import device_arrays, tensors
from .block_mask import BlockMask
from .checks import (
    FAR,
    Window,
    check_integer,
    check_integers,
    check_name,
    finite_float,
    host_array,
    in_host_memory,
    show,
)
from .device_arrays import DeviceArray

_INT64 = np.dtype(np.int64)

PACKED = "thd"
"""The layout of packed sequences: (T, H, D), seen as one item (1, H, T, D)."""


# What was got, and as an array


def check_places(arrays: dict[str, NDArray[Any] | None]) -> None:
    """Raise unless all arrays are where the first is: in host memory, or on one GPU."""
    (first, of), *others = [(name, x) for name, x in arrays.items() if x is not None]
    for name, x in others:
        if (type(x) is DeviceArray) != (type(of) is DeviceArray):
            places = [
                f"{what} {y.source if isinstance(y, DeviceArray) else 'in host memory'}"
                for what, y in ((first, of), (name, x))
            ]
            raise TypeError(
                f"{first}, {name}: expected both in host memory or both on a GPU, got "
                + " and ".join(places)
            )
        if isinstance(x, DeviceArray) and isinstance(of, DeviceArray):
            one, two = of.source, x.source
            if None not in (one.device, two.device) and one.device != two.device:
                raise TypeError(
                    f"{first}, {name}: expected both on one GPU, got {first} {one} and {name} {two}"
                )


def streams_of(*arrays: NDArray[Any] | None) -> tuple[int, ...]:
    """Return the streams that device arrays name, each once."""
    found = (x.source.stream for x in arrays if isinstance(x, DeviceArray))
    return tuple(dict.fromkeys(stream for stream in found if stream is not None))


def to_native(x: NDArray[Any], dtype: np.dtype) -> NDArray[Any]:
    """Return an array in native byte order, of the native dtype that is given."""
    if x.dtype.isnative:
        return x
    # What is broadcast is converted once, and broadcast again.
    once = x[
        tuple(slice(0, 1 if n and not s else n) for n, s in zip(x.shape, x.strides, strict=True))
    ]
    return np.broadcast_to(once.astype(dtype), x.shape)


def check_storage(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> str:
    """Return the name of the one storage type of q, k and v."""
    found = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        storage = dtypes.storage_name(x.dtype)
        if storage is None:
            raise TypeError(
                f"{name}: expected dtype float16, bfloat16, float32 or float64, got {x.dtype}"
            )
        found.append(storage)
    if not found[0] == found[1] == found[2]:
        raise TypeError("q, k, v: expected one dtype, got " + ", ".join(found))
    return found[0]


# Rank, layout, sizes


def check_rank(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], layout: Any) -> None:
    """Raise unless all have as many axes as q, and as many as the layout takes."""
    check_name("layout", layout, ("bhnd", "bnhd"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim not in (2, 3, 4):
            raise ValueError(
                f"{name}: expected shape (N, D), (H, N, D) or (B, H, N, D), got {x.shape}"
            )
        if layout == "bnhd" and x.ndim != 4:
            raise ValueError(
                f"{name}: expected shape (B, N, H, D) with layout='bnhd', got {x.shape}"
            )
        if x.ndim != q.ndim:
            raise ValueError(f"{name}: expected {q.ndim} axes as in q {q.shape}, got {x.shape}")


def check_packed(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> None:
    """Raise unless all have the axes of packed sequences."""
    for name, x, expected in (
        ("q", q, "(Tq, Hq, D)"),
        ("k", k, "(Tk, Hkv, D)"),
        ("v", v, "(Tk, Hkv, Dv)"),
    ):
        if x.ndim != 3:
            raise ValueError(f"{name}: expected shape {expected}, got {x.shape}")


def to_bhnd(x: Any, layout: str) -> Any:
    """View an array of the caller's rank and layout as ``(B, H, N, D)``."""
    if x.ndim == 4:
        return x if layout == "bhnd" else x.transpose(0, 2, 1, 3)
    if layout == PACKED:
        return x.transpose(1, 0, 2)[None]
    return x[None] if x.ndim == 3 else x[None, None]


def shape_as_given(shape: tuple[Any, ...], rank: int, layout: str) -> tuple[Any, ...]:
    """Write a (B, H, N, D) shape in the caller's rank and layout."""
    if layout in ("bnhd", PACKED):
        shape = (shape[0], shape[2], shape[1], shape[3])
    return shape[4 - rank :]


def shape_error(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], rank: int, layout: str
) -> ValueError:
    """Say which of three 4-D shapes does not fit."""

    def text(*shape: Any) -> str:
        return "(" + ", ".join(str(n) for n in shape_as_given(shape, rank, layout)) + ")"

    B, Hq, _, D = q.shape
    _, Hkv, Nk, _ = k.shape
    if D == 0:
        return ValueError(f"q: expected a last axis D of at least 1, got shape {text(*q.shape)}")
    if k.shape[0] != B or k.shape[3] != D:
        expected = text(B, "Hkv", "Nk", D)
        return ValueError(
            f"k: expected shape {expected} to fit q {text(*q.shape)}, got {text(*k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        expected = text(B, Hkv, Nk, "Dv")
        return ValueError(
            f"v: expected shape {expected} to fit k {text(*k.shape)}, got {text(*v.shape)}"
        )
    return ValueError(
        f"k, v: expected a number of heads that divides the {Hq} heads of q, got {Hkv} "
        f"(q {text(*q.shape)}, k {text(*k.shape)})"
    )


# Numbers


def check_scale(value: Any, dtype: np.dtype) -> float:
    """Return a finite number of the compute dtype."""
    expected = f"a number that is finite in {dtypes.compute_name(dtype)}"
    exact = finite_float("scale", value, expected)
    try:
        return dtypes.round_to(exact, dtype)
    except OverflowError:
        raise ValueError(f"scale: expected {expected}, got {show(value)}") from None


def check_softcap(value: Any, dtype: np.dtype) -> float | None:
    """Return a positive number of the compute dtype; None if it is off."""
    if value is None:
        return None
    name = dtypes.compute_name(dtype)
    expected = f"None, 0 or a positive number that is finite and not 0 or subnormal in {name}"
    exact = finite_float("softcap", value, expected)
    if exact == 0.0:
        return None
    try:
        cap = dtypes.round_to(exact, dtype)
    except OverflowError:
        cap = 0.0
    if cap < float(np.finfo(dtype).tiny):  # of which 1 / cap would overflow
        raise ValueError(f"softcap: expected {expected}, got {show(value)}")
    return cap


def check_probability(value: Any) -> float:
    """Return a probability of dropping."""
    if type(value) is float and value == 0.0:
        return 0.0
    expected = "a number p with 0 <= p < 1"
    p = finite_float("dropout_p", value, expected)
    if not 0.0 <= p < 1.0:  # also where a number below 1 rounds to 1
        raise ValueError(f"dropout_p: expected {expected}, got {show(value)}")
    return abs(p)


def check_seed(value: Any, dropout_p: float) -> int:
    """Return a seed of 64 bits, 0 if there is no dropout that needs one."""
    expected = "an integer from 0 to 2**64 - 1"
    if value is None:
        if dropout_p > 0.0:
            raise TypeError(f"seed: expected {expected} for dropout_p={dropout_p}, got None")
        return 0
    seed = check_integer("seed", value, expected)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected {expected}, got {show(seed)}")
    return seed


def check_lengths(name: str, value: Any, B: int, N: int) -> NDArray[np.int64]:
    """Return the length of each item, which is N by default."""
    if value is None:
        full = np.empty(B, _INT64)
        full.fill(N)
        return full
    lengths = check_integers(name, value, B)
    for b, n in enumerate(lengths):
        if not 0 <= n <= N:
            raise ValueError(f"{name}: expected lengths from 0 to {N}, got {show(n)} for item {b}")
    return np.array(lengths, _INT64)


def check_cu_seqlens(cu_q: Any, cu_k: Any, Tq: int, Tk: int) -> tuple[NDArray[np.int64], ...]:
    """Return where the rows of each sequence begin, their number, and the same of its keys."""
    q = _cumulative("cu_seqlens_q", cu_q, "q", Tq)
    k = _cumulative("cu_seqlens_k", cu_k, "k", Tk)
    if len(q) != len(k):
        raise ValueError(
            f"cu_seqlens_k: expected {len(q)} numbers, as many as in cu_seqlens_q, got {len(k)}"
        )
    return q[:-1], np.diff(q), k[:-1], np.diff(k)


def _cumulative(name: str, value: Any, of: str, T: int) -> NDArray[np.int64]:
    array = in_host_memory(name, value)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"{name}: expected shape (B + 1,), where each of B sequences begins and the last ends, "
            f"got shape {array.shape}"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {show(value)}")
    if array[0] < 0:
        raise ValueError(f"{name}: expected a first number of at least 0, got {array[0]}")
    falls = np.flatnonzero(array[1:] < array[:-1])
    if falls.size:
        n = int(falls[0])
        raise ValueError(
            f"{name}: expected numbers that do not fall, got {array[n + 1]} after {array[n]} "
            f"at place {n + 1}"
        )
    if int(array[-1]) > T:
        raise ValueError(
            f"{name}: expected a last number of at most {T}, the rows of {of}, got {array[-1]}"
        )
    return array.astype(_INT64)  # a copy, whatever becomes of the caller's


def check_window(value: Any) -> Window:
    """Return both sides of a window, None where open; without a window both are."""
    if value is None:
        return None, None
    expected = "a pair (left, right) of integers, -1 or None for an open side"
    pair = value
    if not isinstance(value, (tuple, list)):
        # of a dict, a set or a string two things could be taken, too; NumPy makes no row of them
        array = host_array("window_size", value)
        if array.ndim == 0:
            raise TypeError(f"window_size: expected {expected}, got {show(value)}")
        pair = array.tolist() if array.ndim == 1 else ()
    if len(pair) != 2:
        raise ValueError(f"window_size: expected {expected}, got {show(value)}")
    left, right = pair
    return _window_side(left, expected), _window_side(right, expected)


def _window_side(value: Any, expected: str) -> int | None:
    if value is None:
        return None
    side = check_integer("window_size", value, expected)
    if side < -1:
        raise ValueError(f"window_size: expected {expected}, got {show(side)}")
    return None if side == -1 else side


def clamp_side(side: int | None) -> int | None:
    """Bring a side of a window to where no array reaches, which `check_offset` allows for."""
    return None if side is None else min(side, 2 * FAR)


def check_offset(value: Any, B: int, window: Window) -> NDArray[np.int64]:
    """Return the position of each item's row 0, clamped where no array reaches."""
    return np.array([_near(x, *window) for x in check_integers("q_offset", value, B)], _INT64)


def _near(offset: int, left: int | None, right: int | None) -> int:
    """Bring an offset of any size within int64 without changing what is visible.

    Of a far offset only the distance to the window's other end matters, so that is what is
    clamped: ``offset=2**70, left=2**70`` still sees from key 0 on.
    """
    if offset >= FAR:
        reach = left or 0
        return max(-FAR, min(offset - reach, FAR)) + min(reach, 2 * FAR)
    if offset <= -FAR:
        reach = right or 0
        return max(-FAR, min(offset + reach, FAR)) - min(reach, 2 * FAR)
    return offset


# mask, bias, slopes, sinks, out


def _broadcast(name: str, x: NDArray[Any], pairs: tuple[int, ...]) -> NDArray[Any]:
    try:
        return np.broadcast_to(x, pairs)
    except ValueError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (B, Hq, Nq, Nk) = {pairs}, got {x.shape}"
        ) from None


def check_mask(mask: NDArray[Any], pairs: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a view of ``(B, Hq, Nq, Nk)``."""
    if mask.dtype.char != "?":
        raise TypeError(f"mask: expected dtype bool (True = visible), got {mask.dtype}")
    return _broadcast("mask", mask, pairs)


def check_bias(bias: NDArray[Any], pairs: tuple[int, ...]) -> NDArray[Any]:
    """Return a view of ``(B, Hq, Nq, Nk)`` in native byte order."""
    native = bias.dtype.newbyteorder("=")
    if native not in dtypes.BIAS and dtypes.storage_name(native) is None:
        text = f"bias: expected dtype float16, bfloat16, float32 or float64, got {bias.dtype}"
        if dtypes.is_float(native):
            raise NotImplementedError(f"{text}, which is not built yet")
        raise TypeError(text)
    return _broadcast("bias", to_native(bias, native), pairs)


def _real_array(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """Return integers or floats of NumPy's own, in native byte order and in host memory."""
    if isinstance(x, DeviceArray):
        x = device_arrays.copied(x)
    x = dtypes.widen(x)
    native = x.dtype.newbyteorder("=")
    if native.kind not in "iu" and native not in dtypes.BIAS:
        expected = "dtype float16, bfloat16, float32, float64 or integers"
        text = f"{name}: expected {expected}, got {x.dtype}"
        if dtypes.is_float(native):
            raise NotImplementedError(f"{text}, which is not built yet")
        raise TypeError(text)
    return to_native(x, native)


def check_slopes(slopes: NDArray[Any], B: int, Hq: int, dtype: np.dtype) -> NDArray[Any]:
    """Return a ``(B, Hq)`` view of numbers that are finite in the compute dtype."""
    slopes = _real_array("alibi_slopes", slopes)
    if slopes.shape not in ((Hq,), (B, Hq)):
        raise ValueError(
            f"alibi_slopes: expected shape (Hq,) = ({Hq},) or (B, Hq) = {(B, Hq)}, "
            f"got {slopes.shape}"
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(slopes.astype(dtype))
    if not finite.all():  # of an infinite slope 0 times the distance would be NaN
        raise ValueError(
            f"alibi_slopes: expected numbers that are finite in {dtype}, got {slopes[~finite][0]}"
        )
    return np.broadcast_to(slopes, (B, Hq))


def check_sinks(sinks: NDArray[Any], Hq: int, dtype: np.dtype) -> NDArray[Any]:
    """Return ``(Hq,)`` numbers, rounded to the compute dtype."""
    sinks = _real_array("sinks", sinks)
    if sinks.shape != (Hq,):
        raise ValueError(f"sinks: expected shape (Hq,) = ({Hq},), got {sinks.shape}")
    with np.errstate(over="ignore"):  # rounded as a bias is, to -inf and inf too
        return sinks.astype(dtype, order="C")


# Modifiers and masks of positions


@functools.lru_cache(maxsize=64)
def softcap_mod(cap: float) -> Tree:
    """Return softcap as what happens to a score."""
    return resolve("softcap", functools.partial(mods.softcap, cap=cap), SCORE_MOD)


def alibi_mod(slopes: NDArray[Any]) -> Tree:
    """Return ALiBi as what happens to a score."""
    return resolve("alibi_slopes", functools.partial(mods.alibi, slopes=slopes), SCORE_MOD)


def describe_bound(name: str, value: Any) -> NDArray[Any] | None:
    """Describe an array on a GPU or a tensor that a function is bound to.

    A single number on a GPU is copied, and so is bfloat16 in host memory, as float32.
    """
    found = device_arrays.describe(name, value)
    if found is None:
        return tensors.bound_view(name, value)
    return found if found.ndim else dtypes.widen(device_arrays.copied(found))


def binds_device_arrays(tree: Tree | None) -> bool:
    """Whether a function is bound to an array on a GPU."""
    if isinstance(tree, Combination):
        return any(map(binds_device_arrays, tree.parts))  # type: ignore[arg-type]
    return tree is not None and any(type(x) is DeviceArray for x in tree.values)


def bound_arrays(name: str, tree: Tree | None) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays that functions read, under a name for each."""
    if isinstance(tree, Combination):
        for part in tree.parts:
            yield from bound_arrays(name, part)  # type: ignore[arg-type]
    elif tree is not None:
        for parameter, value in zip(tree.names, tree.values, strict=True):
            if isinstance(value, np.ndarray):
                yield f"{parameter} of {name} ({tree.function.__name__})", value


def check_block_mask(
    blocks: Any,
    mask_mod: Any,
    pairs: tuple[int, ...],
    offset: NDArray[np.int64],
    window: Window,
) -> BlockMask:
    """Check that a BlockMask was made for this call."""
    if not isinstance(blocks, BlockMask):
        raise TypeError(
            "block_mask: expected a nattn.BlockMask, made by BlockMask.from_mask_mod, "
            f"got {show(blocks)}"
        )
    if mask_mod is not None:
        raise ValueError(
            "mask_mod: expected None beside block_mask, which carries its own, got "
            f"{show(mask_mod)}; join masks with & before BlockMask.from_mask_mod"
        )
    B, Hq, Nq, Nk = pairs
    sizes = blocks.B, blocks.H, blocks.Nq, blocks.Nk
    fits = blocks.B in (1, B) and blocks.H in (1, Hq) and (blocks.Nq, blocks.Nk) == (Nq, Nk)
    if not fits:
        raise ValueError(
            f"block_mask: expected (B, H, Nq, Nk) = {pairs}, where B and H may be 1, got {sizes}"
        )
    own = np.array([_near(int(x), *window) for x in blocks.q_offset], _INT64)
    if np.any(own != offset):
        raise ValueError(
            f"block_mask: expected one made for q_offset={reprlib.repr(offset.tolist())}, "
            f"got one for {reprlib.repr(blocks.q_offset.tolist())}; give the same q_offset to "
            "BlockMask.from_mask_mod and to attention, whose default is kv_len - q_len of each item"
        )
    return blocks
