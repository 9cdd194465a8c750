"""What 16 bits cost and bring: errors against float64, and speed beside float32.

    python bench/sixteen_bits.py errors     beside torch, if it is installed
    python bench/sixteen_bits.py speed      beside float32 and the processor's own limit

NATTN_BFLOAT16 chooses how bfloat16 numbers are multiplied: see docs/sixteen_bits.md.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nattn
from nattn.backends import load
from nattn.vectors.dtypes import storage_dtype

Array = NDArray[Any]

NAMES = ("float16", "bfloat16")
ROUNDS = 9


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x.astype(np.float64)))))


def distance(x: Array, exact: Array) -> float:
    return rms(x.astype(np.float64) - exact) / rms(exact)


def of_torch(q: Array, k: Array, v: Array, dout: Array, name: str) -> list[Array] | None:
    """Return out, dq, dk and dv of torch, None without it."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    dtype = getattr(torch, name)
    tensors = [torch.from_numpy(x.view(np.int16)).view(dtype) for x in (q, k, v, dout)]
    for x in tensors[:3]:
        x.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(*tensors[:3])
    out.backward(tensors[3])
    results = (out.detach(), *(x.grad for x in tensors[:3]))
    return [x.float().numpy() for x in results]


def dense(q: Array, k: Array, v: Array) -> Array:
    """Return what a dense computation in float32 gives that rounds weights and output."""
    dtype = q.dtype
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    out = p.astype(dtype).astype(np.float32) @ v / p.sum(axis=-1, keepdims=True)
    rounded: Array = out.astype(dtype)
    return rounded


def errors() -> None:
    """Print root mean square errors, relative to the size of the exact result."""
    print(f"{'':41}{'out':>9}{'dq':>9}{'dk':>9}{'dv':>9}")
    for name in NAMES:
        rng = np.random.default_rng(0)
        numbers = rng.standard_normal((4, 1, 4, 1024, 64), dtype=np.float32)
        q, k, v, dout = (x.astype(storage_dtype(name)) for x in numbers)
        out, vjp = nattn.attention_vjp(q, k, v)
        exact, exact_vjp = nattn.attention_vjp(*(x.astype(np.float64) for x in (q, k, v)))
        truth = [exact, *exact_vjp(dout.astype(np.float64))[:3]]
        product = load("cpu").info()["tiles"][name]["products"]
        rows: dict[str, Any] = {
            f"nattn ({product})": [out, *vjp(dout)[:3]],
            "torch": of_torch(q, k, v, dout, name),
            "dense, in float32, then rounded": [dense(q, k, v)],
        }
        for who, results in rows.items():
            if results is not None:
                figures = [f"{distance(x, y):9.1e}" for x, y in zip(results, truth, strict=False)]
                print(f"{name:9}{who:32}{''.join(figures)}")


def calls(dtype: np.dtype) -> dict[str, tuple[float, Callable[[], Any]]]:
    """Return calls by name, each with its floating-point operations."""
    made: dict[str, tuple[float, Callable[[], Any]]] = {}
    rng = np.random.default_rng(0)

    def add(name: str, H: int, N: int, D: int, seen: float, **options: Any) -> None:
        q, k, v = rng.standard_normal((3, 1, H, N, D), dtype=np.float32).astype(dtype)
        made[name] = 4.0 * H * D * seen, lambda: nattn.attention(q, k, v, **options)

    add("N=4096 D=64", 8, 4096, 64, 4096.0**2)
    add("N=4096 D=128", 8, 4096, 128, 4096.0**2)
    add("N=4096 D=64 causal", 8, 4096, 64, 4096.0**2 / 2, causal=True)
    add("N=512 D=64", 8, 512, 64, 512.0**2)
    add("N=16384 D=64 window (256, 0)", 8, 16384, 64, 16384.0 * 257, window_size=(256, 0))
    doc = np.repeat(np.arange(16), 512).astype(np.int32)
    same = functools.partial(nattn.masks.document, doc=doc)
    blocks = nattn.BlockMask.from_mask_mod(same, 1, 1, doc.size, doc.size)
    add("N=8192 D=64, 16 documents", 8, doc.size, 64, 512.0 * doc.size, block_mask=blocks)
    return made


def speed() -> None:
    """Print medians of ratios within a round, in which all take turns."""
    backend = load("cpu")
    by_dtype = {name: calls(storage_dtype(name)) for name in ("float32", *NAMES)}
    for made in by_dtype.values():
        for _, call in made.values():
            call()
    print(f"{'':44}{'GFLOP/s':>9}{'of limit':>10}{'x float32':>11}")
    for what in by_dtype["float32"]:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in by_dtype}
        for _ in range(ROUNDS):
            for name, made in by_dtype.items():
                limit = backend.fma_peak(name)
                work, call = made[what]
                begin = time.perf_counter()
                call()
                found[name].append((work / (time.perf_counter() - begin) / 1e9, limit))
        plain = np.array(found["float32"])[:, 0]
        for name in NAMES:
            rate, limit = np.array(found[name]).T
            figures = np.median(rate), np.median(rate / limit), np.median(rate / plain)
            print(f"{name:10}{what:34}{figures[0]:9.0f}{figures[1]:10.0%}{figures[2]:11.2f}")


if __name__ == "__main__":
    {"errors": errors, "speed": speed}[sys.argv[1]]()
