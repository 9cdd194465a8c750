"""One attention call, checked: every error that a user can cause is raised here.

A backend gets a `Problem` and trusts it: arrays are 4-D and head-major whatever the caller's rank
and layout, integers cannot overflow, nothing is left to guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ..functions.binding import MASK_MOD, SCORE_MOD, Tree, resolve
from ..functions.learning import Place, find_among, leaves
from ..vectors import dtypes
from . import device_arrays
from .arguments import Arguments, with_defaults
from .block_mask import BlockMask
from .checks import Window, as_array, check_flag
from .device_arrays import DeviceArray
from .pages import Pages, gather
from .quantised import dequantise
from .validators import (
    PACKED,
    alibi_mod,
    binds_device_arrays,
    bound_arrays,
    check_bias,
    check_block_mask,
    check_cu_seqlens,
    check_lengths,
    check_mask,
    check_offset,
    check_packed,
    check_places,
    check_probability,
    check_rank,
    check_scale,
    check_seed,
    check_sinks,
    check_slopes,
    check_softcap,
    check_storage,
    check_window,
    clamp_side,
    describe_bound,
    shape_as_given,
    shape_error,
    softcap_mod,
    streams_of,
    to_bhnd,
    to_native,
)

LEARNT = ("bias", "sinks", "alibi_slopes")
WRT = ("q", "k", "v", *LEARNT)
"""Arguments that have a gradient; the first three always, the others if they were passed."""


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
        ``(B, Hq, Nq, D)``, ``(B, Hkv, Nk, D)`` and ``(B, Hkv, Nk, Dv)``. Of a packed call, whose
        items lie one behind the other, ``(1, Hq, Tq, D)`` and so on; there Nq and Nk are the
        largest lengths.
    dtype, storage : dtype, str
        What q, k, v and the output are stored as, and its name: "float16", "bfloat16", "float32"
        or "float64". bfloat16 is ml_dtypes', or `dtypes.BFLOAT16_BITS` without that.
    compute : dtype
        What is computed in: float64 for float64, else float32; lse, too, and all numbers here.
    allocator : Allocator or None
        Makes results like q, which is on a GPU then; None in host memory.
    in_torch : bool
        Whether q is a tensor of torch in host memory, as results then are, too.
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
    q_starts, kv_starts : ndarray or None
        ``(B,)`` int64: where the rows and the keys of each item begin in a packed call, one item
        behind the other in order; None in all others.
    mask, bias : ndarray or None
        Views broadcast to ``(B, Hq, Nq, Nk)``, never materialised. mask is bool; bias is of any
        storage type, to be rounded to `compute` as it is read.
    score_mods : tuple of Bound or Combination
        What happens to a score before the bias is added, in this order: softcap, the user's
        score_mod, ALiBi. The first is `mods.softcap` bound to ``cap``, a `compute` float; the
        last is `mods.alibi` bound to ``slopes``, a ``(B, Hq)`` view.
    score_mod : Bound, Combination or None
        That of them which was passed as such.
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
    inputs : dict
        All arrays that were passed, by name and as they were, None for those that were not.
    given : dict
        Shape and dtype of bias, sinks and alibi_slopes as they were given, of those that were.
    pages : Pages or None
        Where the keys of each item lie, if k and v are pools: ``(pages, Hkv, page_size, D)`` and
        the same with ``Dv``. `Nk` is then the length of the longest item.
    k_scales, v_scales : ndarray of float32 or None
        With k and v in int8 the scale of each row: of their shapes without the last axis.
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
    allocator: device_arrays.Allocator | None
    in_torch: bool
    streams: tuple[int, ...]
    scale: float
    causal: bool
    window: Window
    q_offset: NDArray[np.int64]
    q_lens: NDArray[np.int64]
    kv_lens: NDArray[np.int64]
    q_starts: NDArray[np.int64] | None
    kv_starts: NDArray[np.int64] | None
    mask: NDArray[np.bool_] | None
    bias: NDArray[Any] | None
    score_mods: tuple[Tree, ...]
    score_mod: Tree | None
    mask_mod: Tree | None
    block_mask: BlockMask | None
    sinks: NDArray[Any] | None
    dropout_p: float
    seed: int
    rank: int
    layout: str
    bias_shape: tuple[int, ...] | None
    inputs: dict[str, NDArray[Any] | None]
    given: dict[str, tuple[tuple[int, ...], np.dtype]]
    pages: Pages | None
    k_scales: NDArray[np.float32] | None
    v_scales: NDArray[np.float32] | None

    @classmethod
    def build(
        cls,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens: tuple[Any, Any] | None = None,
        **args: Unpack[Arguments],
    ) -> Problem:
        """Check the arguments of one call and bring them to the canonical form.

        Parameters
        ----------
        q, k, v, **args
            As in `nattn.attention`.
        cu_seqlens : tuple, optional
            Those of a packed call, `cu_seqlens_q` and `cu_seqlens_k`; q, k, v and the other
            arguments are then as in `nattn.attention_varlen`.

        Raises
        ------
        ValueError, TypeError
            The text names the argument, what was expected and what was got.
        NotImplementedError
            For legal input that no backend handles yet.
        """
        args = with_defaults(args, packed=cu_seqlens is not None)
        allocator: device_arrays.Allocator | None = None
        in_torch = False
        if not (type(q) is type(k) is type(v) is np.ndarray):
            in_torch = device_arrays.is_torch(q) and not q.is_cuda
            q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
            allocator = device_arrays.allocator_like(q) if type(q) is DeviceArray else None
            check_places({"q": q, "k": k, "v": v})
        inputs: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "mask": args["mask"],
            "bias": args["bias"],
            "sinks": args["sinks"],
            "alibi_slopes": args["alibi_slopes"],
        }
        for name in ("mask", *LEARNT):
            if inputs[name] is not None:
                inputs[name] = as_array(name, inputs[name])
        mask, bias = inputs["mask"], inputs["bias"]

        if allocator is not None or type(mask) is DeviceArray or type(bias) is DeviceArray:
            check_places({"q": q, "mask": mask, "bias": bias})

        dtype = compute = q.dtype
        if dtype is k.dtype is v.dtype and dtype is dtypes.FLOAT32:
            storage = "float32"
        elif dtype is k.dtype is v.dtype and dtype is dtypes.FLOAT64:
            storage = "float64"
        else:
            q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
            storage = check_storage(q, k, v)
            dtype, compute = dtypes.storage_dtype(storage), dtypes.compute_dtype(storage)
            q, k, v = to_native(q, dtype), to_native(k, dtype), to_native(v, dtype)

        rank, layout = q.ndim, args["layout"]
        if cu_seqlens is not None:
            check_packed(q, k, v)
            layout = PACKED
            q, k, v = to_bhnd(q, layout), to_bhnd(k, layout), to_bhnd(v, layout)
        elif not (rank == 4 == k.ndim == v.ndim and type(layout) is str and layout == "bhnd"):
            check_rank(q, k, v, layout)
            q, k, v = to_bhnd(q, layout), to_bhnd(k, layout), to_bhnd(v, layout)

        B, Hq, Nq, D = q.shape
        Bk, Hkv, Nk, Dk = k.shape
        Bv, Hv, Nv, Dv = v.shape
        same = Bk == Bv == B and Dk == D and Hv == Hkv and Nv == Nk
        if not same or D == 0 or (Hq % Hkv if Hkv else Hq):
            raise shape_error(q, k, v, rank, layout)

        causal = check_flag("causal", args["causal"])
        window = check_window(args["window_size"])
        q_starts, kv_starts = None, None
        if cu_seqlens is None:
            q_lens = check_lengths("q_lens", args["q_lens"], B, Nq)
            kv_lens = check_lengths("kv_lens", args["kv_lens"], B, Nk)
        else:
            q_starts, q_lens, kv_starts, kv_lens = check_cu_seqlens(*cu_seqlens, Nq, Nk)
            B, Nq, Nk = len(q_lens), int(q_lens.max(initial=0)), int(kv_lens.max(initial=0))
        offset = kv_lens - q_lens
        if args["q_offset"] is not None:
            offset = check_offset(args["q_offset"], B, window)

        pairs = (B, Hq, Nq, Nk)
        tree, blocks = None, None
        if args["block_mask"] is not None:
            blocks = check_block_mask(args["block_mask"], args["mask_mod"], pairs, offset, window)
            tree = blocks.mask_mod
        elif args["mask_mod"] is not None:
            tree = resolve("mask_mod", args["mask_mod"], MASK_MOD, describe=describe_bound)
        cap, user = check_softcap(args["softcap"], compute), None
        if args["score_mod"] is not None:
            user = resolve("score_mod", args["score_mod"], SCORE_MOD, describe=describe_bound)
        bound: dict[str, DeviceArray] = {}
        if binds_device_arrays(user) or binds_device_arrays(tree):
            for name, function in (("score_mod", user), ("mask_mod", tree)):
                arrays = bound_arrays(name, function)
                bound.update((x, y) for x, y in arrays if type(y) is DeviceArray)
            check_places({"q": q, **bound})
        slopes, sinks = inputs["alibi_slopes"], inputs["sinks"]
        slopes = None if slopes is None else check_slopes(slopes, B, Hq, compute)
        scale = dtypes.default_scale(D) if args["scale"] is None else args["scale"]
        dropout_p = check_probability(args["dropout_p"])
        window = (clamp_side(window[0]), clamp_side(window[1]))

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
            allocator=allocator,
            in_torch=in_torch,
            streams=() if allocator is None else streams_of(q, k, v, mask, bias, *bound.values()),
            scale=check_scale(scale, compute),
            causal=causal,
            window=window,
            q_offset=offset,
            q_lens=q_lens,
            kv_lens=kv_lens,
            q_starts=q_starts,
            kv_starts=kv_starts,
            mask=None if mask is None else check_mask(mask, pairs),
            bias=None if bias is None else check_bias(bias, pairs),
            score_mods=(
                *(() if cap is None else (softcap_mod(cap),)),
                *(() if user is None else (user,)),
                *(() if slopes is None else (alibi_mod(slopes),)),
            ),
            score_mod=user,
            mask_mod=tree,
            block_mask=blocks,
            sinks=None if sinks is None else check_sinks(sinks, Hq, compute),
            dropout_p=dropout_p,
            seed=check_seed(args["seed"], dropout_p),
            rank=rank,
            layout=layout,
            bias_shape=None if bias is None else (1,) * (4 - bias.ndim) + bias.shape,
            inputs=inputs,
            given={x: (inputs[x].shape, inputs[x].dtype) for x in LEARNT if inputs[x] is not None},
            pages=None,
            k_scales=None,
            v_scales=None,
        )
        return problem

    def place_of(self, name: str) -> Place:
        """Return where the value of a name in a `wrt` is bound, among `score_mods`.

        Raises
        ------
        ValueError, TypeError
            As `learning.find` does.
        """
        if name == "alibi_slopes":
            functions = [f for tree in self.score_mods for f in leaves(tree)]
            return Place(len(functions) - 1, functions[-1].names.index("slopes"))
        return find_among(self.score_mods, self.score_mod, name)

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a gradient of what the score_mod is bound to, in native byte order.

        That of the value, or of a number of Python's the compute dtype.
        """
        place = self.place_of(name)
        function = [f for tree in self.score_mods for f in leaves(tree)][place.leaf]
        value = function.values[place.value]
        if isinstance(value, np.ndarray):
            return value.dtype.newbyteorder("=")
        return function.dtypes[place.value] or self.compute

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of ``out`` in the caller's rank and layout."""
        return shape_as_given((*self.q.shape[:3], self.Dv), self.rank, self.layout)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of ``lse`` in the caller's rank: ``(B, Hq, Nq)`` without axes that lack."""
        shape: tuple[int, ...] = self.q.shape[4 - self.rank : 3]
        return shape

    @property
    def exists(self) -> NDArray[np.bool_]:
        """Which query rows are there: ``(B, Nq)``, of a packed call ``(1, Tq)``."""
        if self.q_starts is None:
            return np.arange(self.Nq) < self.q_lens[:, None]
        first, end = self.q_extent
        i = np.arange(self.q.shape[2])[None]
        return (first <= i) & (i < end)

    @property
    def q_extent(self) -> tuple[int, int]:
        """The rows of q from the first of the first item to the last, in a packed call."""
        if self.q_starts is None or not self.B:
            return 0, 0
        return int(self.q_starts[0]), int(self.q_starts[-1] + self.q_lens[-1])

    def q_place(self, b: int) -> tuple[int, slice]:
        """Return where the rows of an item lie: a number along axis 0 of q, and which rows."""
        return _place(b, self.q_starts, self.q_lens)

    def kv_place(self, b: int) -> tuple[int, slice]:
        """Return where the keys of an item lie: a number along axis 0 of k, and which rows."""
        return _place(b, self.kv_starts, self.kv_lens)

    @property
    def kv_storage(self) -> str:
        """What k and v are stored as: "int8", or `storage`."""
        return self.storage if self.k_scales is None else "int8"

    def gathered(self, dtype: np.dtype | None = None) -> Problem:
        """Return the same problem with k and v in one piece, and in floats.

        Parameters
        ----------
        dtype : dtype, optional
            What numbers in int8 become, `compute` by default. float64 holds their products with
            scales exactly.

        Returns
        -------
        Problem
            Itself if there is nothing to do. Otherwise k and v are ``(B, Hkv, Nk, D)`` and
            contiguous, and 0 where causal, window and lengths let no row look. If they were in int8
            q is in `compute`, which is then the problem's dtype: to round what comes of it to that
            of `out` is up to the caller.
        """
        if self.pages is None and self.k_scales is None:
            return self
        quantised = self.k_scales is not None
        kind = self.dtype if not quantised else self.compute if dtype is None else dtype
        new = [np.zeros((self.B, self.Hkv, self.Nk, n), kind) for n in (self.D, self.Dv)]
        stored = (self.k, self.k_scales), (self.v, self.v_scales)
        for b in range(self.B):
            lo, hi = self.visible_range(b, np.arange(self.q_lens[b]))
            begin, end = int(lo.min(initial=self.Nk)), int(hi.max(initial=0))
            if begin >= end:
                continue
            for to, (x, scales) in zip(new, stored, strict=True):
                rows = gather(x, self.pages, b, begin, end)
                if scales is not None:
                    rows = dequantise(rows, gather(scales, self.pages, b, begin, end), kind)
                to[b, :, begin:end] = rows
        plain = replace(self, k=new[0], v=new[1], pages=None, k_scales=None, v_scales=None)
        if not quantised:
            return plain
        storage = dtypes.compute_name(self.compute)
        q = self.q.astype(self.compute, copy=False)
        return replace(plain, q=q, dtype=self.compute, storage=storage)

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


def _place(b: int, starts: NDArray[np.int64] | None, lens: NDArray[np.int64]) -> tuple[int, slice]:
    n = int(lens[b])
    if starts is None:
        return b, slice(n)
    return 0, slice(int(starts[b]), int(starts[b]) + n)
