"""What is measured: one attention call, its arrays and its work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...call.block_mask import BlockMask
from ...call.problem import Problem
from ...functions import masks, mods
from ...vectors import dtypes

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One attention call to be measured.

    Attributes
    ----------
    B, H, N, D : int
        Batch items, heads, queries and keys, head dimension.
    Dv : int or None
        Dimension of the values, `D` if None.
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    causal : bool
        Hide the keys behind the query.
    window : (left, right) or None
        As ``window_size`` of `nattn.attention`.
    mask : str or None
        A dense boolean ``(N, N)`` mask: "random" hides half of the pairs, "sparse" every 16th
        key of each row, in another place from row to row, "open" none.
    form : str
        How q, k and v lie in memory: "contiguous"; "packed" slices of one ``(B, N, 3, H, D)``
        array; "reversed" keys and values; "strided" with every second element of a row;
        "read-only"; "unaligned" by one byte. Only nattn is asked for other forms than the first.
    mod : str or None
        A key of `MODIFIERS`: what modifies the scores, or the mask function that hides some.
    skip : bool
        Give nattn a mask function as a `nattn.BlockMask`, so that empty blocks are skipped.
    Hkv : int or None
        Key heads, `H` if None.
    backward : bool
        Measure the gradients of q, k and v, and of the bias if there is one.
    bias : str or None
        A bias of zeros: "full", ``(1, H, N, N)``, or "keys", ``(1, H, 1, N)``.
    """

    B: int = 1
    H: int = 8
    N: int = 4096
    D: int = 64
    Dv: int | None = None
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: Literal["random", "sparse", "open"] | None = None
    form: str = "contiguous"
    mod: str | None = None
    skip: bool = True
    Hkv: int | None = None
    backward: bool = False
    bias: Literal["full", "keys"] | None = None

    @property
    def width(self) -> int:
        """The dimension of the values."""
        return self.D if self.Dv is None else self.Dv

    @property
    def storage(self) -> np.dtype:
        """The dtype of q, k, v and the output."""
        return dtypes.storage_dtype(self.dtype)

    @property
    def compute(self) -> str:
        """The name of the dtype that is computed in: "float32" for 16-bit numbers."""
        return dtypes.compute_dtype(self.dtype).name

    def visible(self) -> int:
        """Count the scores that causal and window leave, in blocks that are not skipped.

        Scores that a dense mask hides count, and so do those that a mask function without blocks
        hides: they are computed.

        Returns
        -------
        int
            Over all batch items and heads.
        """
        zero = np.zeros((), self.compute)
        x = np.broadcast_to(zero, (1, 1, self.N, 1))  # sizes without data
        problem = Problem.build(x, x, x, causal=self.causal, window_size=self.window)
        lo, hi = problem.visible_range(0, np.arange(self.N))
        blocks = self.blocks()
        if blocks is None:
            count = np.maximum(hi - lo, 0).sum()
        else:
            kinds, size = blocks.kinds[0, 0], blocks.block_size
            first = size * np.arange(kinds.shape[1])
            within = np.minimum(hi[:, None], first + size) - np.maximum(lo[:, None], first)
            looked_at = np.repeat(kinds != masks.EMPTY, size, axis=0)[: self.N]
            count = np.maximum(within, 0)[looked_at].sum()
        return self.B * self.H * int(count)

    def blocks(self) -> BlockMask | None:
        """Return the blocks of the mask function, or None if there is none or none is skipped."""
        mask_mod = self._modifiers().get("mask_mod")
        if mask_mod is None or not self.skip:
            return None
        return BlockMask.from_mask_mod(mask_mod, 1, 1, self.N, self.N)

    def flops(self) -> int:
        """Count the floating-point operations of the products over the visible scores.

        Returns
        -------
        int
            ``2 * visible * (D + Dv)``, and for the gradients ``2 * visible * (3 D + 2 Dv)``:
            softmax is not counted.
        """
        if self.backward:
            return 2 * self.visible() * (3 * self.D + 2 * self.width)
        return 2 * self.visible() * (self.D + self.width)

    def arrays(self, seed: int = 0) -> tuple[Array, Array, Array, dict[str, Any]]:
        """Make q, k, v and the options of `nattn.attention`.

        Parameters
        ----------
        seed : int, default 0
            Of the random numbers.

        Returns
        -------
        q, k, v : ndarray
            ``(B, H, N, D)``, v ``(B, H, N, Dv)``, standard normal.
        options : dict
            Keyword arguments; a mask function is a ``mask_mod``, whatever `skip` says.
        """
        rng = np.random.default_rng(seed)
        widths = (self.D, self.D, self.width)
        if self.form == "packed":
            packed = rng.standard_normal((self.B, self.N, 3, self.H, max(widths)))
            every = packed.astype(self.storage).transpose(2, 0, 3, 1, 4)
            q, k, v = (x[..., :w] for x, w in zip(every, widths, strict=True))
        else:
            key_heads = self.H if self.Hkv is None else self.Hkv
            q, k, v = (
                _in_form(rng.standard_normal((self.B, h, self.N, w)).astype(self.storage), self)
                for h, w in zip((self.H, key_heads, key_heads), widths, strict=True)
            )
        options: dict[str, Any] = {}
        if self.causal:
            options["causal"] = True
        if self.window is not None:
            options["window_size"] = self.window
        if self.mask is not None:
            options["mask"] = self._mask(rng)
        if self.bias is not None:
            rows = self.N if self.bias == "full" else 1
            options["bias"] = np.zeros((1, self.H, rows, self.N), self.storage)
        return q, k, v, options | self._modifiers()

    def dout(self) -> Array:
        """Make the gradient of the output, ``(B, H, N, Dv)``, standard normal."""
        shape = (self.B, self.H, self.N, self.width)
        return np.random.default_rng(1).standard_normal(shape).astype(self.storage)

    def _modifiers(self) -> dict[str, Any]:
        return {} if self.mod is None else MODIFIERS[self.mod](self)

    def _mask(self, rng: np.random.Generator) -> Array:
        if self.mask == "random":
            return rng.random((self.N, self.N), np.float32) < 0.5
        i, j = np.arange(self.N)[:, None], np.arange(self.N)
        hidden = (i + j) % 16 == 0
        return ~hidden if self.mask == "sparse" else np.ones_like(hidden)


def _in_form(x: Array, case: Case) -> Array:
    if case.form == "contiguous":
        return x
    if case.form == "reversed":
        return x[:, :, ::-1]
    if case.form == "strided":
        wide = np.empty((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if case.form == "read-only":
        x.flags.writeable = False
        return x
    if case.form == "unaligned":
        shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        shifted[...] = x
        return shifted
    raise ValueError(f"form: expected a known one, got {case.form!r}")


# What may happen to the scores of a case


def gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, near: Any, gain: Any) -> Any:
    """Squash the scores of keys that are far away: a score_mod as users write them."""
    return np.where(abs(q_idx - kv_idx) > near, gain * np.tanh(score), score)


def document_numbers(n: int, count: int = 16) -> NDArray[np.int32]:
    """Return the document of each of n positions.

    The documents have about the same length, and their ends do not fall on the ends of blocks,
    except by chance.
    """
    jitter = np.random.default_rng(0).uniform(-0.1, 0.1, count - 1)
    ends = n / count * (np.arange(1, count) + jitter)
    return np.searchsorted(ends, np.arange(n), side="right").astype(np.int32)


def _softcap(case: Case) -> dict[str, Any]:
    return {"softcap": 20.0}


def _alibi(case: Case) -> dict[str, Any]:
    return {"alibi_slopes": mods.alibi_slopes(case.H)}


def _gate(case: Case) -> dict[str, Any]:
    return {"score_mod": functools.partial(gate, near=64, gain=0.75)}


def _causal(case: Case) -> dict[str, Any]:
    return {"mask_mod": masks.causal}


def _documents(case: Case) -> dict[str, Any]:
    return {"mask_mod": functools.partial(masks.document, doc=document_numbers(case.N))}


def _prefix(case: Case) -> dict[str, Any]:
    return {"mask_mod": functools.partial(masks.prefix_lm, prefix=np.full(case.B, case.N // 4))}


def _local(case: Case) -> dict[str, Any]:
    return {"mask_mod": functools.partial(masks.local_plus_global, window=256, n_global=64)}


def _dropout(case: Case) -> dict[str, Any]:
    return {"dropout_p": 0.1, "seed": 1}


MODIFIERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "softcap": _softcap,
    "ALiBi": _alibi,
    "gate": _gate,
    "causal": _causal,
    "documents": _documents,
    "prefix": _prefix,
    "local": _local,
    "dropout": _dropout,
}
"""Options of `nattn.attention` for a case, by the names that `Case.mod` may have."""
