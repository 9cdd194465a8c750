"""The operator Attention of ONNX, opsets 23 to 25, as the reference evaluator takes operators."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference.ops import op_attention

from ...api import attention
from ...call.arguments import Arguments

ATTRIBUTES = {
    *("is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap"),
    *("softmax_precision", "left_window_size", "right_window_size"),
}
_HEADS_OF_4D = 25  # the first opset that refuses numbers of heads beside inputs of four axes


class Attention(op_attention.Attention):  # the evaluator knows operators by the class's name
    """ONNX's Attention for ``onnx.reference.ReferenceEvaluator(model, new_ops=[Attention])``.

    Past and present keys, lengths, windows, softcap, grouped heads and inputs of three axes mean
    what the operator says [1]_: without a cache causality and windows count from the first key.
    A query that sees no key is 0. `softmax_precision` double computes all in float64; anything
    less is at least float32.

    The matrix `qk_matmul_output` is the one thing that takes memory for every pair. It is computed,
    by onnx's own formula, only where a graph names that output.

    Attributes
    ----------
    backend : {"auto", "cpu", "cuda", "reference"}
        What computes, as in `nattn.attention`.

    Raises
    ------
    ValueError
        If the node has attributes that the operator does not have, or inputs do not fit.

    References
    ----------
    .. [1] https://onnx.ai/onnx/operators/onnx__Attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import parser
    >>> from onnx.reference import ReferenceEvaluator
    >>> from nattn.integrations.onnx import Attention
    >>> model = parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["" : 23]>
    ...     graph (float[1, 4, n, 64] q, float[1, 4, m, 64] k, float[1, 4, m, 64] v)
    ...         => (float[1, 4, n, 64] out) { out = Attention <is_causal = 1> (q, k, v) }''')
    >>> run = ReferenceEvaluator(model, new_ops=[Attention]).run
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 100, 64), dtype=np.float32)
    >>> run(None, {"q": q, "k": k, "v": v})[0].shape
    (1, 4, 100, 64)
    """

    op_domain = ""
    backend: ClassVar[Any] = "auto"

    def __init__(self, onnx_node: Any, run_params: dict[str, Any], schema: Any = None) -> None:
        unknown = sorted({a.name for a in onnx_node.attribute} - ATTRIBUTES)
        if unknown:
            raise ValueError(
                f"Attention: expected attributes among {', '.join(sorted(ATTRIBUTES))}, "
                f"got {', '.join(unknown)}"
            )
        super().__init__(onnx_node, run_params, schema)
        self._validate_attention25 = run_params["opsets"].get("", 0) >= _HEADS_OF_4D

    def _run(
        self,
        Q: NDArray[Any],
        K: NDArray[Any],
        V: NDArray[Any],
        attn_mask: NDArray[Any] | None = None,
        past_key: NDArray[Any] | None = None,
        past_value: NDArray[Any] | None = None,
        nonpad_kv_seqlen: NDArray[Any] | None = None,
        **attributes: Any,
    ) -> tuple[NDArray[Any], ...]:
        """Return the outputs that the node names."""
        past = past_key, past_value
        self._check(Q, K, V, past, nonpad_kv_seqlen, attributes)
        q = _heads(Q, attributes.get("q_num_heads"))
        k = _heads(K, attributes.get("kv_num_heads"))
        v = _heads(V, attributes.get("kv_num_heads"))
        if past_key is not None and past_value is not None:
            k = np.concatenate([past_key, k], axis=2)
            v = np.concatenate([past_value, v], axis=2)

        arguments = _arguments(attributes)
        if nonpad_kv_seqlen is not None:  # the queries end there, which is nattn's default
            arguments["kv_lens"] = nonpad_kv_seqlen
        else:  # they follow the cache, or start with the first key
            arguments["q_offset"] = 0 if past_key is None else past_key.shape[2]
        if attn_mask is not None:
            arguments |= _mask(attn_mask, k.shape[2], q.dtype)
        wide = attributes.get("softmax_precision") == onnx.TensorProto.DOUBLE
        operands = [x.astype(np.float64) for x in (q, k, v)] if wide else [q, k, v]

        out = attention(*operands, backend=self.backend, **arguments).astype(Q.dtype, copy=False)
        if Q.ndim == 3:
            out = out.transpose(0, 2, 1, 3).reshape(*Q.shape[:2], -1)
        results = [out, k, v]
        asked = self.onnx_node.output
        if len(asked) > 3 and asked[3]:
            inputs = Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen
            results.append(super()._run(*inputs, **attributes)[3])
        return tuple(results[: len(asked)])

    def _check(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        past: tuple[NDArray[Any] | None, NDArray[Any] | None],
        lengths: NDArray[Any] | None,
        attributes: dict[str, Any],
    ) -> None:
        """Raise unless the inputs are what the operator takes; sizes are nattn's to check."""
        shapes = f"Q {q.shape}, K {k.shape}, V {v.shape}"
        if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
            raise ValueError(f"Attention: expected three or four axes of Q, K and V, got {shapes}")
        counts = [attributes.get(name) for name in ("q_num_heads", "kv_num_heads")]
        if q.ndim == 3:
            for name, x, n in zip("QKV", (q, k, v), (*counts, counts[-1]), strict=True):
                if not n or n < 0 or x.shape[2] % n:
                    raise ValueError(
                        "Attention: expected q_num_heads and kv_num_heads that divide the last "
                        f"axis of three, got {n} for {name} {x.shape}"
                    )
        elif self._validate_attention25 and counts != [None, None]:
            raise ValueError(
                "Attention: expected neither q_num_heads nor kv_num_heads beside inputs of four "
                f"axes, got {counts[0]} and {counts[1]}"
            )
        if (past[0] is None) != (past[1] is None):
            raise ValueError("Attention: expected past_key and past_value together, got one")
        if past[0] is not None and past[1] is not None:
            if lengths is not None:
                raise ValueError("Attention: expected past_key or nonpad_kv_seqlen, got both")
            if past[0].ndim != 4 or past[1].ndim != 4:
                raise ValueError(
                    "Attention: expected past_key and past_value of four axes, got "
                    f"{past[0].shape} and {past[1].shape}"
                )


def _heads(x: NDArray[Any], heads: int | None) -> NDArray[Any]:
    """View ``(B, N, H * D)`` as ``(B, H, N, D)``; what has four axes stays."""
    if x.ndim == 4:
        return x
    assert heads is not None
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _arguments(attributes: dict[str, Any]) -> Arguments:
    """Return attributes as nattn calls them."""
    sides = [attributes.get(f"{side}_window_size") for side in ("left", "right")]
    before, behind = (-1 if n is None else n for n in sides)
    return {
        "causal": bool(attributes.get("is_causal")),
        "window_size": (before, behind),
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap") or 0.0,
    }


def _mask(mask: NDArray[Any], n: int, dtype: np.dtype[Any]) -> Arguments:
    """Return a mask as nattn's `mask` or `bias`; keys behind its end are hidden."""
    hides = mask.dtype == bool
    if mask.ndim < 2:
        mask = np.atleast_2d(mask)
    if not hides and mask.dtype.kind in "iu":
        mask = mask.astype(dtype)
    if mask.shape[-1] < n:
        behind = [(0, 0)] * (mask.ndim - 1) + [(0, n - mask.shape[-1])]
        mask = np.pad(mask, behind, constant_values=False if hides else -np.inf)
    return {"mask": mask} if hides else {"bias": mask}
