"""Measure attention fairly: contestants take turns in one run, and figures are ratios within it.

A machine's speed drifts by a factor of two while nobody looks, so absolute times say little. Here
every contestant does one piece of work per round, and a figure is the median over the rounds of a
ratio *within* a round: to another contestant, or to the processor's own peak, measured in turn.

Each contestant runs in a process of its own (`Contestant`), because thread pools that spin while
they wait slow down whoever comes next, and two OpenMP runtimes in one process fight.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from .. import backends
from ..api import functional
from ..call.block_mask import BlockMask
from ..call.problem import Problem
from ..functions import masks, mods
from ..vectors.dtypes import default_scale

Array = NDArray[Any]
Sampler = Callable[[], float]
Call = Callable[[], Any]


class Unsupported(Exception):
    """A contestant is not installed, or cannot do a case."""


# What is measured


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
        "float32" or "float64".
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
        What happens to the scores, or which mask function hides some: a key of `MODIFIERS`.
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

    def visible(self) -> int:
        """Count the scores that causal and window leave, in blocks that are not skipped.

        What a mask, or a mask function without blocks, hides does count: it is computed.

        Returns
        -------
        int
            Over all batch items and heads.
        """
        zero = np.zeros((), self.dtype)
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
        """Classify the blocks of the mask function, if there is one and its blocks are skipped."""
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
            every = packed.astype(self.dtype).transpose(2, 0, 3, 1, 4)
            q, k, v = (x[..., :w] for x, w in zip(every, widths, strict=True))
        else:
            key_heads = self.H if self.Hkv is None else self.Hkv
            q, k, v = (
                _in_form(rng.standard_normal((self.B, h, self.N, w)).astype(self.dtype), self)
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
            options["bias"] = np.zeros((1, self.H, rows, self.N), self.dtype)
        return q, k, v, options | self._modifiers()

    def dout(self) -> Array:
        """Make the gradient that arrives through the output: standard normal."""
        shape = (self.B, self.H, self.N, self.width)
        return np.random.default_rng(1).standard_normal(shape).astype(self.dtype)

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
    """Squash the scores of keys that are far away: a modifier as users write them."""
    return np.where(abs(q_idx - kv_idx) > near, gain * np.tanh(score), score)


def document_numbers(n: int, count: int = 16) -> NDArray[np.int32]:
    """Return the document of each of n positions.

    The documents are of about the same length, but none ends where a block does, save by chance.
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
"""What `Case.mod` may say: options of `nattn.attention`, for a case."""


# Taking turns


@dataclass(frozen=True)
class Samples:
    """One figure of each contestant in each round.

    Attributes
    ----------
    values : mapping of str to tuple of float
        Name to figures, round by round: seconds, or a rate.
    """

    values: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Return the median figure of a contestant."""
        return statistics.median(self.values[name])

    def ratio(self, above: str, below: str) -> float:
        """Return the median over the rounds of ``above / below``, each pair from one round."""
        pairs = zip(self.values[above], self.values[below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def product(self, one: str, other: str) -> float:
        """Return the median over the rounds of ``one * other``, each pair from one round."""
        pairs = zip(self.values[one], self.values[other], strict=True)
        return statistics.median(a * b for a, b in pairs)


def interleave(
    samplers: Mapping[str, Sampler],
    rounds: int = 7,
    warmup: int = 1,
    pause: float = 0.005,
    progress: Callable[[float], object] | None = None,
) -> Samples:
    """Let contestants take turns, each once a round, in an order that rotates.

    Parameters
    ----------
    samplers : mapping of str to callable
        Each call does a piece of work and returns its figure, for example `timed`'s seconds.
    rounds : int, default 7
        Rounds that count.
    warmup : int, default 1
        Rounds before them, thrown away.
    pause : float, default 0.005
        Seconds between two turns, for the last one's threads to stop spinning.
    progress : callable, optional
        Called with the fraction of the turns that are done.

    Returns
    -------
    Samples
        A figure of each contestant in each round that counts.

    Raises
    ------
    ValueError
        If there is no round to count.

    Examples
    --------
    >>> from nattn.applications.measure import interleave, timed
    >>> calls = {"list": lambda: sum([1] * 1000), "range": lambda: sum(range(1000))}
    >>> samples = interleave({k: timed(f, 1e-4) for k, f in calls.items()}, rounds=3)
    >>> samples.ratio("range", "list") > 0
    True
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds, warmup: expected 1 or more and 0 or more, got {rounds, warmup}")
    names = list(samplers)
    values: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        first = turn % len(names) if names else 0
        for place, name in enumerate(names[first:] + names[:first]):
            time.sleep(pause)
            value = samplers[name]()
            if turn >= warmup:
                values[name].append(value)
            if progress is not None:
                progress((turn + (place + 1) / len(names)) / (warmup + rounds))
    return Samples({name: tuple(x) for name, x in values.items()})


def timed(call: Call, at_least: float = 0.05) -> Sampler:
    """Make a sampler that returns the seconds one call takes.

    Parameters
    ----------
    call : callable
        The work.
    at_least : float, default 0.05
        Repeat a short call until so many seconds have gone by, and return the mean.

    Returns
    -------
    callable
        Takes nothing, returns seconds per call.
    """

    def sample() -> float:
        n = 0
        start = time.perf_counter()
        while True:
            call()
            n += 1
            elapsed = time.perf_counter() - start
            if elapsed >= at_least:
                return elapsed / n

    return sample


# Memory


class PeakMemory:
    """How far the process's resident memory rises while a block runs.

    On Linux the kernel's high-water mark is reset at the start of the block and read at its end.
    Elsewhere the mark cannot be reset, and what an earlier peak has covered is not seen.

    Attributes
    ----------
    bytes : int
        Peak of the block less what was resident at its start, 0 until the block ends.
    method : str
        How it was measured, for people; says so where it could not be.

    Examples
    --------
    >>> from nattn.applications.measure import PeakMemory
    >>> with PeakMemory() as memory:
    ...     block = bytearray(32 << 20)
    >>> memory.bytes >= 0
    True
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.method = "not measured on this system"
        self._start = 0

    def __enter__(self) -> Self:
        gc.collect()
        _give_back_free_memory()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self._start = _proc_status("VmRSS")
            self.method = "peak resident set"
        except OSError:
            if (peak := _peak_resident()) is not None:
                self._start = peak
                self.method = "growth of the process's highest resident set"
        return self

    def __exit__(self, *exception: object) -> None:
        if self.method == "peak resident set":
            self.bytes = max(0, _proc_status("VmHWM") - self._start)
        elif (peak := _peak_resident()) is not None:
            self.bytes = peak - self._start


def _give_back_free_memory() -> None:
    """Let glibc return what is free: reused, it would be resident already and not be seen."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _proc_status(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {key} in /proc/self/status")


def _peak_resident() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# The contestants: each prepares a case and returns a call that computes it


def _nattn(case: Case, threads: int) -> Call:
    q, k, v, options = case.arrays()
    blocks = case.blocks()
    if blocks is not None:
        del options["mask_mod"]  # the blocks know it
    options |= {"backend": "cpu", "block_mask": blocks}
    if not case.backward:
        return lambda: functional.attention(q, k, v, **options)
    out, lse = functional.attention(q, k, v, return_lse=True, **options)
    dout = case.dout()
    wrt = ("q", "k", "v", "bias") if case.bias else ("q", "k", "v")

    def gradient() -> Array:
        found = functional.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options)
        assert found.dq is not None
        return found.dq

    return gradient


def _reference(case: Case, threads: int) -> Call:
    q, k, v, options = case.arrays()
    return lambda: functional.attention(q, k, v, backend="reference", **options)


def _numpy(case: Case, threads: int) -> Call:
    size = np.dtype(case.dtype).itemsize * case.B * case.H * case.N**2
    if size > 2 << 30:
        raise Unsupported(f"the dense matrix would need {size / 2**30:.0f} GiB")
    q, k, v, options = case.arrays()
    scale = q.dtype.type(default_scale(case.D))
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
    tq, tk, tv = (torch.from_numpy(x) for x in (q, k, v))
    only_causal = case.causal and case.window is None and case.mask is None
    hidden = None if only_causal else _hidden(case, options)
    mask = None if hidden is None else torch.from_numpy(~hidden)
    attend = torch.nn.functional.scaled_dot_product_attention
    if case.backward:
        if case.Hkv is not None or case.bias is not None:
            raise Unsupported("not written for it")
        dout = torch.from_numpy(case.dout())
        inputs = [x.requires_grad_() for x in (tq, tk, tv)]
        with torch.enable_grad():
            out = attend(*inputs, attn_mask=mask, is_causal=only_causal)

        def gradient() -> Array:
            found: Array = torch.autograd.grad(out, inputs, dout, retain_graph=True)[0].numpy()
            return found

        return gradient
    return lambda: attend(tq, tk, tv, attn_mask=mask, is_causal=only_causal).numpy()


def _flex(case: Case, threads: int) -> Call:
    """PyTorch's FlexAttention, compiled: what torch has for functions of scores."""
    if case.dtype != "float32":
        raise Unsupported("float32 only")
    if case.mask is not None or case.mod not in (None, *_FLEX):
        raise Unsupported("not written for it")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that outlive this
    import torch
    from torch.nn.attention import flex_attention as flex

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch._dynamo.reset()  # after some cases it would stop compiling, and say so to nobody
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
"""What FlexAttention is told, by `Case.mod`."""


def _openvino(case: Case, threads: int) -> Call:
    import openvino
    from openvino import opset13 as ops

    if case.dtype != "float32":
        raise Unsupported("float32 only")
    if case.N > 8192 and (case.causal or case.window is not None or case.mask is not None):
        raise Unsupported("makes a mask of n x n, which takes minutes")
    q, k, v, options = case.arrays()
    inputs = [q, k, v]
    nodes = [ops.parameter(list(x.shape), np.float32) for x in inputs]
    only_causal = case.causal and case.window is None and case.mask is None
    hidden = None if only_causal else _hidden(case, options)
    if hidden is not None:
        inputs.append(~hidden[None, None])
        nodes.append(ops.parameter([1, 1, *hidden.shape], bool))
    node = ops.scaled_dot_product_attention(*nodes, causal=only_causal)
    compiled = openvino.Core().compile_model(
        openvino.Model([node], nodes, "attention"),
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads},
    )
    request = compiled.create_infer_request()
    for i, x in enumerate(inputs):
        request.set_input_tensor(i, openvino.Tensor(x))

    def call() -> Array:
        request.infer()
        result: Array = request.get_output_tensor(0).data
        return result

    return call


def _onnxruntime(case: Case, threads: int) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper

    if case.dtype != "float32":
        raise Unsupported("float32 only")
    if case.window is not None or case.mask is not None:
        raise Unsupported("no boolean mask for each pair")
    # its own fused operator, in the layout that it asks for: (B, N, H * D)
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
"""Each contestant's way to prepare a case."""

_MODIFYING = ("nattn", "reference", "flex")
"""Those that can be asked for a case with a `Case.mod`."""

_LEARNING = ("nattn", "torch")
"""Those that can be asked for gradients."""


def prepare(name: str, case: Case, threads: int) -> Call:
    """Prepare a case for a contestant in this process, and check what it computes.

    Parameters
    ----------
    name : str
        A key of `PREPARE`.
    case : Case
        What to compute.
    threads : int
        Threads that it may use. Most libraries want to be told before they are imported:
        `Contestant` does.

    Returns
    -------
    callable
        Takes nothing, computes the case and returns the output, ``(B, H, N, Dv)``.

    Raises
    ------
    Unsupported
        If it is not installed or cannot do the case.
    ArithmeticError
        If its result is wrong: a time would mean nothing.
    """
    if case.mod is not None and name not in _MODIFYING:
        raise Unsupported("no functions of scores")
    if case.backward and name not in _LEARNING:
        raise Unsupported("no gradients")
    try:
        call = PREPARE[name](case, threads)
    except ImportError as missing:
        raise Unsupported(f"not installed ({missing.name or missing})") from None
    check(case, call())
    return call


def check(case: Case, out: Array) -> None:
    """Compare sampled rows of a result, in all heads, with the reference.

    Raises
    ------
    ArithmeticError
        If they are wrong.
    """
    q, k, v, options = case.arrays()
    if case.backward:
        _check_gradient(case, out)
        return
    mask = options.pop("mask", None)
    dropout_p, seed = options.pop("dropout_p", 0.0), options.pop("seed", 0)

    def attend(row: int, visible: Array | None) -> tuple[Array, Array]:
        result: tuple[Array, Array] = functional.attention(
            q[:1, :, row : row + 1],
            k[:1],
            v[:1],
            q_offset=row,
            mask=visible,
            return_lse=True,
            backend="reference",
            **options,
        )
        return result

    error = 0.0
    for row in {0, case.N // 3, case.N - 1}:
        visible = None if mask is None else mask[row]
        want, lse = attend(row, visible)
        if dropout_p:
            # The reference sees a single row, for which dropout would drop what it does in row 0:
            # hide what is dropped here, and bring the rest to its share of the sum over all.
            heads, keys = np.arange(case.H)[:, None, None], np.arange(case.N)
            kept = mods.keep(0, heads, row, keys, seed, dropout_p)
            want, kept_lse = attend(row, kept if visible is None else kept & visible)
            total = np.where(lse > -np.inf, lse, 0.0)  # of an empty row nothing is kept either
            want *= np.exp(kept_lse - total)[..., None] / (1 - dropout_p)
        # np.max, unlike max, keeps a NaN
        error = float(np.max([error, np.abs(out[0, :, row] - want[0, :, 0]).max(initial=0.0)]))
    # Peers promise no budget of ours: this only tells what computes something else
    allowed = 1e-3 if case.dtype == "float32" else 1e-9
    if not error <= allowed:
        raise ArithmeticError(f"wrong by {error:.2g}, more than the {allowed:.2g} allowed")


def _check_gradient(case: Case, dq: Array) -> None:
    """Compare sampled rows of dq with the reference's."""
    q, k, v, options = case.arrays()
    dout = case.dout()
    options.pop("bias", None)  # zeros
    error = 0.0
    for row in {0, case.N // 3, case.N - 1}:
        one = slice(row, row + 1)
        given = {**options, "q_offset": row, "backend": "reference"}
        out, lse = functional.attention(q[:1, :, one], k[:1], v[:1], return_lse=True, **given)
        want = functional.attention_backward(
            dout[:1, :, one], q[:1, :, one], k[:1], v[:1], out, lse, wrt=("q",), **given
        ).dq
        assert want is not None
        error = float(np.max([error, np.abs(dq[0, :, row] - want[0, :, 0]).max(initial=0.0)]))
    allowed = 1e-3 if case.dtype == "float32" else 1e-9
    if not error <= allowed:
        raise ArithmeticError(f"dq wrong by {error:.2g}, more than the {allowed:.2g} allowed")


# Each in a process of its own


class Contestant:
    """A contestant in a process of its own, asked over a pipe.

    Parameters
    ----------
    name : str
        A key of `PREPARE`.
    threads : int
        Threads that it may use.
    environment : mapping of str to str, optional
        Environment variables of its process.

    Notes
    -----
    Use it as a context manager: the process ends with the block. A case that it cannot do raises
    `Unsupported`; a process that dies raises RuntimeError.
    """

    def __init__(
        self, name: str, threads: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        threading = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, threads), daemon=True)
        with _environment(threading | dict(environment or {})):
            self._process.start()
        theirs.close()

    def prepare(self, case: Case) -> None:
        """Make a case ready and check what is computed; forget the case before."""
        self._ask("prepare", case)

    def sample(self, at_least: float = 0.05) -> float:
        """Return the seconds one call takes, repeating for `at_least` seconds."""
        return float(self._ask("sample", at_least))

    def extra_memory(self) -> int:
        """Return the bytes by which one call's memory peak exceeds inputs and output."""
        return int(self._ask("memory", None))

    def peak(self, dtype: str = "float32") -> float:
        """Return the processor's FMA peak for its threads and instruction set, in GFLOP/s."""
        return float(self._ask("peak", dtype))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, what: str, argument: Any) -> Any:
        try:
            self._pipe.send((what, argument))
            reply = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise RuntimeError(
                f"{self.name}: its process ended with code {self._process.exitcode}"
            ) from None
        if isinstance(reply, Exception):
            raise reply
        return reply


_THREAD_VARIABLES = (
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that a block starts."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _serve(pipe: Connection, name: str, threads: int) -> None:
    """Answer requests until the pipe closes; an exception is an answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    call: Call = _nothing_prepared
    while True:
        try:
            what, argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if what == "prepare":
                call = _nothing_prepared  # frees the last case before the next is made
                call = prepare(name, argument, threads)
                reply: Any = None
            elif what == "sample":
                reply = timed(call, argument)()
            elif what == "memory":
                reply = _extra_memory(call)
            else:
                cpu = backends.load("cpu")

                reply = cpu.fma_peak(argument, threads)
        except (Unsupported, ArithmeticError) as error:
            reply = error
        except Exception as error:  # of any library, whose own type may not travel
            reply = RuntimeError(f"{name}: {type(error).__name__}: {error}")
        pipe.send(reply)


def _nothing_prepared() -> Any:
    raise RuntimeError("no case is prepared")


def _extra_memory(call: Call) -> int:
    with PeakMemory() as memory:
        out = call()
    return max(0, memory.bytes - int(out.nbytes))


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
