"""One attention call, checked: every error that a user can cause is raised here.

A backend gets a `Problem` and trusts it: arrays are 4-D and head-major whatever the caller's rank
and layout, integers cannot overflow, nothing is left to guess.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..functions import mods
from ..functions.binding import MASK_MOD, SCORE_MOD, Combination, Tree, resolve
from ..vectors import dtypes
from . import device_arrays
from .block_mask import BlockMask
from .checks import (
    FAR,
    Integers,
    Mod,
    Scale,
    Window,
    as_array,
    check_flag,
    check_integer,
    check_integers,
    check_name,
    finite_float,
    overlaps_itself,
    share_memory,
    show,
)
from .device_arrays import DeviceArray

LEARNT = ("bias", "sinks", "alibi_slopes")
WRT = ("q", "k", "v", *LEARNT)
"""Arguments that have a gradient; the first three always, the others if they were passed."""

_INT64 = np.dtype(np.int64)


@dataclass(frozen=True, eq=False)
class Problem:
    """A complete and valid description of one attention call.

    Made by `Problem.build`, which raises on bad input. All arrays are views of the caller's data
    with any byte strides (negative, zero and unaligned ones too) in native byte order. Those of
    arrays on a GPU are `DeviceArray`, which only kernels read: q, k, v, mask, bias and arrays that
    functions are bound to. The latter may be in host memory all the same, as slopes, sinks and
    integers for each item always are: such numbers are copied to be checked.

    Attributes
    ----------
    q, k, v : ndarray
        ``(B, Hq, Nq, D)``, ``(B, Hkv, Nk, D)`` and ``(B, Hkv, Nk, Dv)``.
    dtype, storage : dtype, str
        What q, k, v and the output are stored as, and its name: "float16", "bfloat16", "float32"
        or "float64". bfloat16 is ml_dtypes', or `dtypes.BFLOAT16_BITS` without that.
    compute : dtype
        What is computed in: float64 for float64, else float32; lse, too, and all numbers here.
    kind : Kind or None
        How results are made like q, which is on a GPU then; None in host memory.
    streams : tuple of int
        Handles of the streams that device arrays name as those whose work they wait for.
    group : int
        Query heads for each key head: head ``h`` reads key head ``h // group``.
    scale : float
        Rounded to `compute`.
    window : tuple
        Keys visible to the left and to the right of a query's position, None where open.
    q_offset, q_lens, kv_lens : ndarray
        ``(B,)`` int64. Row ``i`` of item ``b`` sits at ``i + q_offset[b]`` on the key axis.
        Offsets and window are clamped where no array reaches, without changing what is visible:
        ``i + q_offset[b] - left`` and ``i + q_offset[b] + right + 1`` never overflow.
    mask, bias : ndarray or None
        Views broadcast to ``(B, Hq, Nq, Nk)``, never materialised. mask is bool; bias is of any
        storage type, to be rounded to `compute` as it is read.
    score_mods : tuple of Bound or Combination
        What happens to a score before the bias is added, in this order: softcap, the user's
        score_mod, ALiBi. The first is `mods.softcap` bound to ``cap``, a `compute` float; the
        last is `mods.alibi` bound to ``slopes``, a ``(B, Hq)`` view.
    mask_mod : Bound, Combination or None
        Which keys a position sees, from the argument of that name or from `block_mask`.
    block_mask : BlockMask or None
        Which blocks `mask_mod` leaves empty or full; made for these sizes and offsets.
    sinks : ndarray or None
        ``(Hq,)`` in `compute`, contiguous: an extra logit for each head.
    dropout_p, seed : float, int
        Probability of dropping, 0.0 for none, and ``0 <= seed < 2**64``.
    rank, layout
        How the caller wrote the arrays, to give the result back alike.
    bias_shape : tuple of int or None
        Shape of the bias as it was given, with ones put before it to make four axes: where it is
        1 and the bias's own axis longer, the bias was broadcast.
    given : dict
        Shape and dtype of bias, sinks and alibi_slopes as they were given, of those that were.
    """

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    B: int
    Hq: int
    Hkv: int
    group: int
    Nq: int
    Nk: int
    D: int
    Dv: int
    dtype: np.dtype
    storage: str
    compute: np.dtype
    kind: device_arrays.Kind | None
    streams: tuple[int, ...]
    scale: float
    causal: bool
    window: Window
    q_offset: NDArray[np.int64]
    q_lens: NDArray[np.int64]
    kv_lens: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    bias: NDArray[Any] | None
    score_mods: tuple[Tree, ...]
    mask_mod: Tree | None
    block_mask: BlockMask | None
    sinks: NDArray[Any] | None
    dropout_p: float
    seed: int
    rank: int
    layout: str
    bias_shape: tuple[int, ...] | None
    given: dict[str, tuple[tuple[int, ...], np.dtype]]

    @classmethod
    def build(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        q_offset: Integers | None = None,
        window_size: Window | None = None,
        mask: Any = None,
        bias: Any = None,
        scale: Scale | None = None,
        softcap: Scale | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        score_mod: Mod | None = None,
        mask_mod: Mod | None = None,
        block_mask: BlockMask | None = None,
        q_lens: Integers | None = None,
        kv_lens: Integers | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        layout: Any = "bhnd",
        out: Any = None,
    ) -> Problem:
        """Check the arguments of one call and bring them to the canonical form.

        Parameters are those of `nattn.attention`. `out` is only checked; see `as_bhnd`.

        Raises
        ------
        ValueError, TypeError
            The text names the argument, what was expected and what was got.
        NotImplementedError
            For legal input that no backend handles yet.
        """
        kind: device_arrays.Kind | None = None
        if not (type(q) is type(k) is type(v) is np.ndarray):
            q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
            kind = device_arrays.kind_of(q) if type(q) is DeviceArray else None
            _check_places({"q": q, "k": k, "v": v})
        mask = None if mask is None else as_array("mask", mask)
        bias = None if bias is None else as_array("bias", bias)
        alibi_slopes = None if alibi_slopes is None else as_array("alibi_slopes", alibi_slopes)
        sinks = None if sinks is None else as_array("sinks", sinks)
        inputs = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias}
        inputs |= {"alibi_slopes": alibi_slopes, "sinks": sinks}

        if kind is not None or type(mask) is DeviceArray or type(bias) is DeviceArray:
            _check_places({"q": q, "mask": mask, "bias": bias})

        dtype = compute = q.dtype
        if dtype is k.dtype is v.dtype and dtype is dtypes.FLOAT32:
            storage = "float32"
        elif dtype is k.dtype is v.dtype and dtype is dtypes.FLOAT64:
            storage = "float64"
        else:
            storage = _shared_storage(q, k, v)
            dtype, compute = dtypes.storage_dtype(storage), dtypes.compute_dtype(storage)
            q, k, v = _native(q, dtype), _native(k, dtype), _native(v, dtype)

        rank = q.ndim
        if not (rank == 4 == k.ndim == v.ndim and type(layout) is str and layout == "bhnd"):
            _check_rank(q, k, v, layout)
            q, k, v = _to_bhnd(q, layout), _to_bhnd(k, layout), _to_bhnd(v, layout)

        B, Hq, Nq, D = q.shape
        Bk, Hkv, Nk, Dk = k.shape
        Bv, Hv, Nv, Dv = v.shape
        same = Bk == Bv == B and Dk == D and Hv == Hkv and Nv == Nk
        if not same or D == 0 or (Hq % Hkv if Hkv else Hq):
            raise _shape_error(q, k, v, rank, layout)

        causal = check_flag("causal", causal)
        window = (None, None) if window_size is None else check_window(window_size)
        lens_q = _filled(B, Nq) if q_lens is None else _lengths("q_lens", q_lens, B, Nq)
        lens_kv = _filled(B, Nk) if kv_lens is None else _lengths("kv_lens", kv_lens, B, Nk)
        if q_offset is None:
            offset = lens_kv - lens_q
        else:
            exact = check_integers("q_offset", q_offset, B)
            offset = np.array([_near(x, *window) for x in exact], _INT64)

        pairs = (B, Hq, Nq, Nk)
        tree, blocks = None, None
        if block_mask is not None:
            blocks = _blocks(block_mask, mask_mod, pairs, offset, window)
            tree = blocks.mask_mod
        elif mask_mod is not None:
            tree = resolve("mask_mod", mask_mod, MASK_MOD, describe=_describe_bound)
        cap = None if softcap is None else _softcap(softcap, compute)
        user = None
        if score_mod is not None:
            user = resolve("score_mod", score_mod, SCORE_MOD, describe=_describe_bound)
        bound: dict[str, DeviceArray] = {}
        if _binds_device_arrays(user) or _binds_device_arrays(tree):
            for name, function in (("score_mod", user), ("mask_mod", tree)):
                arrays = _bound_arrays(name, function)
                bound.update((x, y) for x, y in arrays if type(y) is DeviceArray)
            _check_places({"q": q, **bound})
        slopes = None if alibi_slopes is None else _slopes(alibi_slopes, B, Hq, compute)
        probability = _probability(dropout_p)
        window = (_clamp(window[0]), _clamp(window[1]))

        problem = object.__new__(cls)
        # the __init__ of a frozen dataclass would take a third of all the time spent here
        problem.__dict__.update(
            q=q,
            k=k,
            v=v,
            B=B,
            Hq=Hq,
            Hkv=Hkv,
            group=(Hq // Hkv if Hkv else 0) or 1,
            Nq=Nq,
            Nk=Nk,
            D=D,
            Dv=Dv,
            dtype=dtype,
            storage=storage,
            compute=compute,
            kind=kind,
            streams=() if kind is None else _streams(q, k, v, mask, bias, *bound.values()),
            scale=_scale(dtypes.default_scale(D) if scale is None else scale, compute),
            causal=causal,
            window=window,
            q_offset=offset,
            q_lens=lens_q,
            kv_lens=lens_kv,
            mask=None if mask is None else _mask(mask, pairs),
            bias=None if bias is None else _bias(bias, pairs),
            score_mods=(
                *(() if cap is None else (_bound_softcap(cap),)),
                *(() if user is None else (user,)),
                *(() if slopes is None else (_bound_alibi(slopes),)),
            ),
            mask_mod=tree,
            block_mask=blocks,
            sinks=None if sinks is None else _sinks(sinks, Hq, compute),
            dropout_p=probability,
            seed=_seed(seed, probability),
            rank=rank,
            layout=layout,
            bias_shape=None if bias is None else (1,) * (4 - bias.ndim) + bias.shape,
            given={x: (inputs[x].shape, inputs[x].dtype) for x in LEARNT if inputs[x] is not None},
        )
        if out is not None:
            for name, function in (("score_mod", user), ("mask_mod", tree)):
                inputs.update(_bound_arrays(name, function))
            problem._check_out(out, inputs)
        return problem

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of ``out`` in the caller's rank and layout."""
        return _as_given((self.B, self.Hq, self.Nq, self.Dv), self.rank, self.layout)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of ``lse`` in the caller's rank: ``(B, Hq, Nq)`` without axes that lack."""
        return (self.B, self.Hq, self.Nq)[4 - self.rank :]

    def new_results(self, out: Any = None) -> tuple[Any, Any]:
        """Return ``out``, a new one if it is None, and a new ``lse``, of the caller's kind."""
        if out is None:
            out = self._new(self.out_shape, self.dtype)
        return out, self._new(self.lse_shape, self.compute)

    def _new(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        if self.kind is None:
            return np.empty(shape, dtype)
        name = dtypes.storage_name(dtype)
        assert name is not None
        return self.kind.empty(shape, name)

    def _seen(self, name: str, x: Any) -> Any:
        """Return a NumPy array, or the view of one on a GPU."""
        return np.asarray(x) if self.kind is None else device_arrays.describe(name, x)

    def as_bhnd(self, out: Any) -> NDArray[Any]:
        """View an array of `out_shape` as ``(B, Hq, Nq, Dv)``."""
        view: NDArray[Any] = _to_bhnd(self._seen("out", out), self.layout)
        return view

    def as_bhn(self, lse: Any) -> NDArray[Any]:
        """View an array of `lse_shape` as ``(B, Hq, Nq)``."""
        view: NDArray[Any] = self._seen("lse", lse)
        return view if self.rank == 4 else view[(None,) * (4 - self.rank)]

    def visible_range(
        self, b: int, i: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the keys that causal, window and lengths leave to rows of one item.

        Parameters
        ----------
        b : int
            Batch item.
        i : ndarray of int64
            Query rows.

        Returns
        -------
        lo, hi : ndarray of int64
            Row ``i`` may see key ``j`` if ``lo <= j < hi`` (none if ``hi <= lo``).
        """
        pos = i + self.q_offset[b]
        left, right = self.window
        lo = np.zeros_like(pos) if left is None else np.maximum(pos - left, 0)
        hi = np.full_like(pos, self.kv_lens[b])
        if self.causal:
            hi = np.minimum(hi, pos + 1)
        if right is not None:
            hi = np.minimum(hi, pos + right + 1)
        return lo, np.where(i < self.q_lens[b], hi, 0)

    def check_wrt(self, wrt: Any) -> frozenset[str]:
        """Return the names of what gradients are wanted of.

        Raises
        ------
        ValueError, TypeError
            If it is no tuple or list of names, or one is unknown, twice there or was not passed.
        """
        expected = "a tuple of names among " + ", ".join(map(repr, WRT))
        if not isinstance(wrt, (tuple, list)) or not all(isinstance(x, str) for x in wrt):
            raise TypeError(f"wrt: expected {expected}, got {show(wrt)}")
        for name in wrt:
            if name not in WRT:
                raise ValueError(f"wrt: expected {expected}, got {name!r}")
            if wrt.count(name) > 1:
                raise ValueError(f"wrt: expected each name once, got {name!r} twice")
            if name in LEARNT and name not in self.given:
                raise ValueError(
                    f"wrt: expected names of arguments that were passed, got {name!r} without "
                    f"{name}"
                )
        return frozenset(wrt)

    def check_incoming(self, dout: Any, out: Any, lse: Any, dlse: Any) -> tuple[Any, ...]:
        """Bring what a backward pass starts from to the canonical form.

        Parameters
        ----------
        dout, out : array_like
            Of `out_shape`.
        lse, dlse : array_like
            Of `lse_shape`; dlse may be None.

        Returns
        -------
        dout, out : ndarray
            ``(B, Hq, Nq, Dv)`` views with any strides, in native byte order.
        lse, dlse : ndarray
            ``(B, Hq, Nq)``, aligned and contiguous in host memory, with any strides on a GPU; dlse
            may be None.

        Raises
        ------
        ValueError, TypeError
            If a shape or dtype is not that of the call, or lse not that of its lengths, which
            remains unseen on a GPU.
        """
        dout = self._incoming("dout", dout, self.out_shape, self.dtype)
        out = self._incoming("out", out, self.out_shape, self.dtype)
        rows = []
        for name, x in (("lse", lse), ("dlse", dlse)):
            if x is not None or name == "lse":
                x = self._incoming(name, x, self.lse_shape, self.compute)
                x = x[(None,) * (4 - self.rank)]
                x = x if self.kind is not None else np.require(x, requirements=("C", "A"))
            rows.append(x)
        behind = np.arange(self.Nq) >= self.q_lens[:, None]
        if self.kind is None and behind.any():
            wrong = behind[:, None] & (rows[0] != -np.inf)
            if wrong.any():
                b, h, i = np.argwhere(wrong)[0].tolist()
                raise ValueError(
                    f"lse: expected -inf in rows past q_lens, as attention returns it for the same "
                    f"arguments, got {rows[0][b, h, i]} in row {i} of item {b} with "
                    f"q_lens[{b}] = {self.q_lens[b]}"
                )
        return _to_bhnd(dout, self.layout), _to_bhnd(out, self.layout), *rows

    def new_gradient(self, name: str) -> DeviceArray:
        """Return a view of a new array for a gradient, of a call with arrays on a GPU.

        Behind it lies an array of the caller's kind (`Source.owner`) in C order, of the shape and
        layout of the argument and with the dtype of a gradient of it (`dtypes.gradient_dtype`), so
        that what is written here needs no change before it is returned.

        Parameters
        ----------
        name : str
            One of `WRT`.

        Returns
        -------
        DeviceArray
            Head-major and 4-D for q, k and v; of `bias_shape`; ``(Hq,)``; of the slopes ``(B, Hq)``
            or ``(Hq,)`` as they were given, which is then the sum over items.
        """
        if name in LEARNT:
            shape, dtype = self.given[name]
            new = self._new(shape, dtypes.gradient_dtype(dtype, self.compute))
            view: DeviceArray = self._seen(name, new)
            if name == "bias":
                view = view.reshape(self.bias_shape)
        else:
            shape = _as_given(getattr(self, name).shape, self.rank, self.layout)
            view = _to_bhnd(self._seen(name, self._new(shape, self.dtype)), self.layout)
        return view

    def gradient_as_given(self, name: str, x: NDArray[Any]) -> Any:
        """Bring a gradient to the shape and dtype of the argument that it belongs to.

        Parameters
        ----------
        name : str
            One of `WRT`.
        x : ndarray
            Head-major and 4-D, of `bias_shape`, ``(Hq,)`` or for the slopes ``(B, Hq)``. On a GPU
            what `new_gradient` returned.

        Returns
        -------
        ndarray
            In native byte order; that of integers in the compute dtype. On a GPU an array of the
            caller's kind.
        """
        if isinstance(x, DeviceArray):
            return x.source.owner
        with np.errstate(all="ignore"):  # a narrow dtype may overflow
            if name not in LEARNT:
                x = x.astype(self.dtype, copy=False)
                return _to_bhnd(x, self.layout) if self.rank == 4 else x[(0,) * (4 - self.rank)]
            shape, dtype = self.given[name]
            if name == "alibi_slopes" and len(shape) == 1:
                x = x.sum(axis=0)
            dtype = dtypes.gradient_dtype(dtype, self.compute)
            gradient: NDArray[Any] = x.reshape(shape).astype(dtype, copy=False)
        return gradient

    def _incoming(self, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> NDArray[Any]:
        x = as_array(name, x)
        if type(x) is DeviceArray or self.kind is not None:
            _check_places({"q": self.q, name: x})
        if x.dtype != dtype and x.dtype.newbyteorder("=") != dtype:
            of = "as of q" if dtype == self.dtype else f"for q of {self.storage}"
            raise TypeError(
                f"{name}: expected dtype {dtypes.show(dtype)} {of}, got {dtypes.show(x.dtype)}"
            )
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
        return _native(x, dtype)

    def _check_out(self, out: Any, inputs: dict[str, Any]) -> None:
        if self.kind is not None:
            found = device_arrays.describe("out", out)
            if found is None:
                raise TypeError(f"out: expected an array on a GPU, as q is, got {show(out)}")
            _check_places({"q": self.q, "out": found})
            out = found
        if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
            raise TypeError(f"out: expected a NumPy array, got {show(out)}")
        if out.dtype != self.dtype:  # a dtype of the other byte order differs too
            got = out.dtype.str if out.dtype.kind == "f" else dtypes.show(out.dtype)
            raise TypeError(
                f"out: expected dtype {dtypes.show(self.dtype)} in native byte order, got {got}"
            )
        if out.shape != self.out_shape:
            raise ValueError(f"out: expected shape {self.out_shape}, got {out.shape}")
        if not out.flags.writeable:
            raise ValueError("out: expected a writeable array, got a read-only one")
        if overlaps_itself(out):
            raise ValueError(
                "out: expected an element of memory for each result, got strides "
                f"{out.strides} for shape {out.shape}, which overlap"
            )
        for name, array in inputs.items():
            if array is not None and share_memory(out, array):
                raise ValueError(
                    f"out: expected memory of its own, got an array that overlaps {name}"
                )


# What was got, and as an array


def _check_places(arrays: dict[str, NDArray[Any] | None]) -> None:
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


def _streams(*arrays: NDArray[Any] | None) -> tuple[int, ...]:
    """Return the streams that device arrays name, each once."""
    found = (x.source.stream for x in arrays if isinstance(x, DeviceArray))
    return tuple(dict.fromkeys(stream for stream in found if stream is not None))


def _native(x: NDArray[Any], dtype: np.dtype) -> NDArray[Any]:
    if x.dtype.isnative:
        return x
    # What is broadcast is converted once, and broadcast again.
    once = x[
        tuple(slice(0, 1 if n and not s else n) for n, s in zip(x.shape, x.strides, strict=True))
    ]
    return np.broadcast_to(once.astype(dtype), x.shape)


def _shared_storage(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> str:
    """Return the name of the one storage type of q, k and v."""
    found = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        storage = dtypes.storage_name(x.dtype)
        if storage is None or (x.dtype == dtypes.BFLOAT16_BITS and type(x) is not DeviceArray):
            raise TypeError(
                f"{name}: expected dtype float16, bfloat16, float32 or float64, got {x.dtype}"
            )
        found.append(storage)
    if not found[0] == found[1] == found[2]:
        raise TypeError("q, k, v: expected one dtype, got " + ", ".join(found))
    return found[0]


# Rank, layout, sizes


def _check_rank(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], layout: Any) -> None:
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


def _to_bhnd(x: Any, layout: str) -> Any:
    if x.ndim == 4:
        return x if layout == "bhnd" else x.transpose(0, 2, 1, 3)
    return x[None] if x.ndim == 3 else x[None, None]


def _as_given(shape: tuple[Any, ...], rank: int, layout: str) -> tuple[Any, ...]:
    """Write a (B, H, N, D) shape in the caller's rank and layout."""
    if layout == "bnhd":
        shape = (shape[0], shape[2], shape[1], shape[3])
    return shape[4 - rank :]


def _shape_error(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], rank: int, layout: str
) -> ValueError:
    """Say which of three 4-D shapes does not fit."""

    def text(*shape: Any) -> str:
        return "(" + ", ".join(str(n) for n in _as_given(shape, rank, layout)) + ")"

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


def _scale(value: Any, dtype: np.dtype) -> float:
    expected = f"a number that is finite in {dtypes.compute_name(dtype)}"
    exact = finite_float("scale", value, expected)
    try:
        return dtypes.round_to(exact, dtype)
    except OverflowError:
        raise ValueError(f"scale: expected {expected}, got {show(value)}") from None


def _softcap(value: Any, dtype: np.dtype) -> float | None:
    """Return a positive number of the compute dtype; None if it is off."""
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


def _probability(value: Any) -> float:
    if type(value) is float and value == 0.0:
        return 0.0
    expected = "a number p with 0 <= p < 1"
    p = finite_float("dropout_p", value, expected)
    if not 0.0 <= p < 1.0:  # also where a number below 1 rounds to 1
        raise ValueError(f"dropout_p: expected {expected}, got {show(value)}")
    return abs(p)


def _seed(value: Any, dropout_p: float) -> int:
    expected = "an integer from 0 to 2**64 - 1"
    if value is None:
        if dropout_p > 0.0:
            raise TypeError(f"seed: expected {expected} for dropout_p={dropout_p}, got None")
        return 0
    seed = check_integer("seed", value, expected)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected {expected}, got {show(seed)}")
    return seed


def _filled(B: int, value: int) -> NDArray[np.int64]:
    array = np.empty(B, _INT64)
    array.fill(value)
    return array


def _lengths(name: str, value: Any, B: int, N: int) -> NDArray[np.int64]:
    lengths = check_integers(name, value, B)
    for b, n in enumerate(lengths):
        if not 0 <= n <= N:
            raise ValueError(f"{name}: expected lengths from 0 to {N}, got {show(n)} for item {b}")
    return np.array(lengths, _INT64)


def check_window(value: Any) -> Window:
    """Return both sides of a window, None where open."""
    expected = "a pair (left, right) of integers, -1 or None for an open side"
    try:
        left, right = value
    except (TypeError, ValueError):
        error = ValueError if isinstance(value, (list, tuple, np.ndarray)) else TypeError
        raise error(f"window_size: expected {expected}, got {show(value)}") from None
    return _window_side(left, expected), _window_side(right, expected)


def _window_side(value: Any, expected: str) -> int | None:
    if value is None:
        return None
    side = check_integer("window_size", value, expected)
    if side < -1:
        raise ValueError(f"window_size: expected {expected}, got {show(side)}")
    return None if side == -1 else side


def _clamp(side: int | None) -> int | None:
    return None if side is None else min(side, 2 * FAR)


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


def _mask(mask: NDArray[Any], pairs: tuple[int, ...]) -> NDArray[np.bool_]:
    if mask.dtype.char != "?":
        raise TypeError(f"mask: expected dtype bool (True = visible), got {mask.dtype}")
    return _broadcast("mask", mask, pairs)


def _bias(bias: NDArray[Any], pairs: tuple[int, ...]) -> NDArray[Any]:
    native = bias.dtype.newbyteorder("=")
    if native not in dtypes.BIAS and dtypes.storage_name(native) is None:
        text = f"bias: expected dtype float16, bfloat16, float32 or float64, got {bias.dtype}"
        if dtypes.is_float(native):
            raise NotImplementedError(f"{text}, which is not built yet")
        raise TypeError(text)
    return _broadcast("bias", _native(bias, native), pairs)


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
    return _native(x, native)


def _slopes(slopes: NDArray[Any], B: int, Hq: int, dtype: np.dtype) -> NDArray[Any]:
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


def _sinks(sinks: NDArray[Any], Hq: int, dtype: np.dtype) -> NDArray[Any]:
    sinks = _real_array("sinks", sinks)
    if sinks.shape != (Hq,):
        raise ValueError(f"sinks: expected shape (Hq,) = ({Hq},), got {sinks.shape}")
    with np.errstate(over="ignore"):  # rounded as a bias is, to -inf and inf too
        return sinks.astype(dtype, order="C")


# Modifiers and masks


@functools.lru_cache(maxsize=64)
def _bound_softcap(cap: float) -> Tree:
    return resolve("softcap", functools.partial(mods.softcap, cap=cap), SCORE_MOD)


def _bound_alibi(slopes: NDArray[Any]) -> Tree:
    return resolve("alibi_slopes", functools.partial(mods.alibi, slopes=slopes), SCORE_MOD)


def _describe_bound(name: str, value: Any) -> NDArray[Any] | None:
    """Describe an array on a GPU that a function is bound to; a single number is copied."""
    found = device_arrays.describe(name, value)
    if found is None or found.ndim:
        return found
    return dtypes.widen(device_arrays.copied(found))


def _binds_device_arrays(tree: Tree | None) -> bool:
    """Whether a function is bound to an array on a GPU."""
    if isinstance(tree, Combination):
        return any(map(_binds_device_arrays, tree.parts))  # type: ignore[arg-type]
    return tree is not None and any(type(x) is DeviceArray for x in tree.values)


def _bound_arrays(name: str, tree: Tree | None) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays that functions read, under a name for each."""
    if isinstance(tree, Combination):
        for part in tree.parts:
            yield from _bound_arrays(name, part)  # type: ignore[arg-type]
    elif tree is not None:
        for parameter, value in zip(tree.names, tree.values, strict=True):
            if isinstance(value, np.ndarray):
                yield f"{parameter} of {name} ({tree.function.__name__})", value


def _blocks(
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
