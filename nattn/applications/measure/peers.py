"""The contestants: how each library prepares a case and returns a call that computes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...api import functional
from ...vectors import dtypes
from .cases import Array, Case
from .checks import check
from .clock import Call


class Unsupported(Exception):
    """A contestant is not installed, or cannot do a case."""


def _nattn(case: Case, threads: int) -> Call:
    q, k, v, options = case.arrays()
    blocks = case.blocks()
    if blocks is not None:
        del options["mask_mod"]  # the blocks know it
    options |= {"backend": "cpu", "block_mask": blocks}
    if not case.backward:
        return lambda: functional.attention(q, k, v, **options)
    _, vjp = functional.attention_vjp(q, k, v, **options)
    dout = case.dout()
    wrt = ("q", "k", "v", "bias") if case.bias else ("q", "k", "v")

    def gradient() -> Array:
        found = vjp(dout, wrt=wrt)
        assert found.dq is not None
        return found.dq

    return gradient


def _reference(case: Case, threads: int) -> Call:
    q, k, v, options = case.arrays()
    return lambda: functional.attention(q, k, v, backend="reference", **options)


def _numpy(case: Case, threads: int) -> Call:
    if case.dtype != case.compute:  # of 16-bit numbers NumPy's products are loops
        raise Unsupported("float32 and float64 only")
    size = case.storage.itemsize * case.B * case.H * case.N**2
    if size > 2 << 30:
        raise Unsupported(f"the dense matrix would need {size / 2**30:.0f} GiB")
    q, k, v, options = case.arrays()
    scale = q.dtype.type(dtypes.default_scale(case.D))
    hidden = _hidden(case, options)

    def call() -> Array:
        s = (q * scale) @ k.swapaxes(-1, -2)
        if hidden is not None:
            np.copyto(s, -np.inf, where=hidden)
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        out: Array = s @ v
        return out

    return call


def _torch(case: Case, threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    q, k, v, options = case.arrays()
    tq, tk, tv = (_to_torch(x) for x in (q, k, v))
    only_causal = case.causal and case.window is None and case.mask is None
    hidden = None if only_causal else _hidden(case, options)
    mask = None if hidden is None else torch.from_numpy(~hidden)
    attend = torch.nn.functional.scaled_dot_product_attention
    if case.backward:
        if case.Hkv is not None or case.bias is not None:
            raise Unsupported("not written for it")
        dout = _to_torch(case.dout())
        inputs = [x.requires_grad_() for x in (tq, tk, tv)]
        with torch.enable_grad():
            out = attend(*inputs, attn_mask=mask, is_causal=only_causal)

        def gradient() -> Array:
            found = torch.autograd.grad(out, inputs, dout, retain_graph=True)
            return _from_torch(found[0], q.dtype)

        return gradient
    return lambda: _from_torch(attend(tq, tk, tv, attn_mask=mask, is_causal=only_causal), q.dtype)


def _to_torch(x: Array) -> Any:
    """Return an array as a tensor of the same memory: torch does not know NumPy's bfloat16."""
    import torch

    if dtypes.storage_name(x.dtype) == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _from_torch(x: Any, dtype: np.dtype) -> Array:
    """Return a tensor of a dtype as an array of the same memory."""
    import torch

    found: Array = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return found.view(dtype)


def _flex(case: Case, threads: int) -> Call:
    """Prepare PyTorch's FlexAttention, compiled: torch's way to modify scores by functions."""
    if case.dtype != "float32":
        raise Unsupported("float32 only")
    if case.mask is not None or case.mod not in (None, *_FLEX):
        raise Unsupported("not written for it")
    # compile in this process: helper processes would outlive it
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch
    from torch.nn.attention import flex_attention as flex

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch._dynamo.reset()  # after some cases it would silently stop compiling
    q, k, v, options = case.arrays()
    tq, tk, tv = (torch.from_numpy(x) for x in (q, k, v))
    functions = {} if case.mod is None else _FLEX[case.mod](options)
    visible = [functions["mask_mod"]] if "mask_mod" in functions else []
    if case.causal:
        visible.append(lambda b, h, i, j: j <= i)
    if case.window is not None:
        left, right = case.window
        visible.append(lambda b, h, i, j: (j >= i - left) & (j <= i + right))
    blocks = None
    if visible:
        every = flex.and_masks(*visible)
        blocks = flex.create_block_mask(every, None, None, case.N, case.N, device="cpu")
    attend = torch.compile(flex.flex_attention, dynamic=False)
    modify = functions.get("score_mod")
    return lambda: attend(tq, tk, tv, score_mod=modify, block_mask=blocks).numpy()


def _flex_softcap(options: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    cap = options["softcap"]
    return {"score_mod": lambda score, b, h, i, j: cap * torch.tanh(score / cap)}


def _flex_alibi(options: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    slopes = torch.from_numpy(options["alibi_slopes"])
    return {"score_mod": lambda score, b, h, i, j: score - slopes[h] * torch.abs(i - j)}


def _flex_documents(options: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    doc = torch.from_numpy(options["mask_mod"].keywords["doc"])
    return {"mask_mod": lambda b, h, i, j: doc[i] == doc[j]}


_FLEX: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "softcap": _flex_softcap,
    "ALiBi": _flex_alibi,
    "documents": _flex_documents,
}
"""FlexAttention's arguments for a `Case.mod`."""


def _openvino(case: Case, threads: int) -> Call:
    import openvino
    from openvino import opset13 as ops

    if case.dtype not in ("float32", "bfloat16"):
        raise Unsupported("float32 and bfloat16 only")
    kind = openvino.Type.f32 if case.dtype == "float32" else openvino.Type.bf16
    if case.N > 8192 and (case.causal or case.window is not None or case.mask is not None):
        raise Unsupported("makes a mask of n x n, which takes minutes")
    q, k, v, options = case.arrays()
    inputs = [q, k, v]
    nodes = [ops.parameter(list(x.shape), kind) for x in inputs]
    only_causal = case.causal and case.window is None and case.mask is None
    hidden = None if only_causal else _hidden(case, options)
    if hidden is not None:
        inputs.append(~hidden[None, None])
        nodes.append(ops.parameter([1, 1, *hidden.shape], bool))
    node = ops.scaled_dot_product_attention(*nodes, causal=only_causal)
    compiled = openvino.Core().compile_model(
        openvino.Model([node], nodes, "attention"),
        "CPU",
        {"INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": threads},
    )
    if compiled.get_property("INFERENCE_PRECISION_HINT") != kind:  # it was only a hint
        raise Unsupported(f"no {case.dtype} on this processor")
    request = compiled.create_infer_request()
    for i, x in enumerate(inputs):
        tensor = openvino.Tensor(nodes[i].get_element_type(), list(x.shape))
        tensor.data.view(x.dtype)[...] = x  # it shows bfloat16 as float16
        request.set_input_tensor(i, tensor)

    def call() -> Array:
        request.infer()
        result: Array = request.get_output_tensor(0).data
        return result.view(q.dtype)

    return call


def _onnxruntime(case: Case, threads: int) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper

    if case.dtype != "float32":
        raise Unsupported("float32 only")
    if case.window is not None or case.mask is not None:
        raise Unsupported("no boolean mask for each pair")
    # its own fused operator takes (B, N, H * D)
    flat = [
        np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(case.B, case.N, -1)
        for x in case.arrays()[:3]
    ]
    names = ["query", "key", "value"]
    node = helper.make_node(
        "MultiHeadAttention",
        names,
        ["output"],
        domain="com.microsoft",
        num_heads=case.H,
        unidirectional=int(case.causal),
    )
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, kind, x.shape) for n, x in zip(names, flat, strict=True)],
        [helper.make_tensor_value_info("output", kind, flat[2].shape)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = dict(zip(names, flat, strict=True))

    def call() -> Array:
        out: Array = session.run(None, feed)[0]
        return out.reshape(case.B, case.N, case.H, -1).transpose(0, 2, 1, 3)

    return call


def _jax(case: Case, threads: int) -> Call:
    if hasattr(os, "sched_setaffinity"):  # it takes as many threads as it sees processors
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_enable_x64", case.dtype == "float64")
    *qkv, options = case.arrays()
    q, k, v = (jax.numpy.asarray(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in qkv)
    if case.width != case.D:
        raise Unsupported("values of another width")
    mask = options.get("mask")
    if mask is not None:
        mask = jax.numpy.asarray(mask)[None, None]
    attend = jax.jit(
        lambda q, k, v, mask: jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=case.causal, local_window_size=case.window
        )
    )
    return lambda: np.asarray(attend(q, k, v, mask)).transpose(0, 2, 1, 3)


def _hidden(case: Case, options: Mapping[str, Any]) -> Array | None:
    """Return causal, window and mask as one dense ``(N, N)`` array of the hidden pairs."""
    hidden = None
    if case.causal or case.window is not None:
        i, j = np.arange(case.N)[:, None], np.arange(case.N)
        hidden = np.zeros((case.N, case.N), bool)
        if case.causal:
            hidden |= j > i
        if case.window is not None:
            hidden |= (j < i - case.window[0]) | (j > i + case.window[1])
    if "mask" in options:
        hidden = ~options["mask"] if hidden is None else hidden | ~options["mask"]
    return hidden


PREPARE: dict[str, Callable[[Case, int], Call]] = {
    "nattn": _nattn,
    "reference": _reference,
    "torch": _torch,
    "flex": _flex,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "jax": _jax,
    "numpy": _numpy,
}
"""How each contestant prepares a case: takes the case and the number of threads."""

_WITH_MODIFIERS = ("nattn", "reference", "flex")
"""Contestants that can modify scores by functions."""

_WITH_GRADIENTS = ("nattn", "torch")
"""Contestants that can compute gradients."""


def prepare(name: str, case: Case, threads: int) -> Call:
    """Prepare a case for a contestant in this process, and check its result.

    Parameters
    ----------
    name : str
        A key of `PREPARE`.
    case : Case
        What to compute.
    threads : int
        Threads that it may use. Most libraries read their number of threads when they are
        imported: `Contestant` sets it before.

    Returns
    -------
    callable
        Takes nothing, computes the case and returns the output, ``(B, H, N, Dv)``.

    Raises
    ------
    Unsupported
        If it is not installed or cannot do the case.
    ArithmeticError
        If its result is wrong: its time would mean nothing.
    """
    if case.mod is not None and name not in _WITH_MODIFIERS:
        raise Unsupported("no functions of scores")
    if case.backward and name not in _WITH_GRADIENTS:
        raise Unsupported("no gradients")
    if case.storage == dtypes.BFLOAT16_BITS:
        raise Unsupported("bfloat16 needs ml_dtypes, which is not installed")
    try:
        call = PREPARE[name](case, threads)
    except ImportError as missing:
        raise Unsupported(f"not installed ({missing.name or missing})") from None
    check(case, call())
    return call
