"""Decoding: how fast keys and values are read, beside a plain read of the same bytes and torch.

    python bench/decoding.py table           bandwidth, beside torch, if it is installed
    python bench/decoding.py caches          caches in pieces, in pages and in 8 bits
    python bench/decoding.py rows [FILE]     time over the number of queries; a plot, if asked for
    python bench/decoding.py call            one short call

Medians of rounds in which everything takes its turn.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nattn
from nattn.applications.measure import interleave, timed
from nattn.backends import load
from nattn.vectors.dtypes import storage_dtype

Array = NDArray[Any]
Run = Callable[[], object]

ROUNDS = 11

CASES = [
    # name, B, Hq, Hkv, Nk, dtype, queries
    ("float32, 32 heads on 32, 8,192 keys", 1, 32, 32, 8192, "float32", 1),
    ("float32, 32 on 8, 16,384 keys", 1, 32, 8, 16384, "float32", 1),
    ("float32, 32 on 1, 65,536 keys", 1, 32, 1, 65536, "float32", 1),
    ("bfloat16, 32 on 8, 16,384 keys", 1, 32, 8, 16384, "bfloat16", 1),
    ("float16, 32 on 8, 16,384 keys", 1, 32, 8, 16384, "float16", 1),
    ("bfloat16, batch 8, 32 on 8, 4,096 keys", 8, 32, 8, 4096, "bfloat16", 1),
    ("float32, 32 on 32, 8,192 keys, 8 queries", 1, 32, 32, 8192, "float32", 8),
    ("float32, 32 on 8, 16,384 keys, 8 queries", 1, 32, 8, 16384, "float32", 8),
]


def medians(runs: dict[str, Run], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median time of each, in seconds."""
    samples = interleave({name: timed(run) for name, run in runs.items()}, rounds)
    return {name: samples.median(name) for name in runs}


def arrays(
    B: int, Hq: int, Hkv: int, Nk: int, dtype: str, Nq: int, D: int = 128
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    shapes = (B, Hq, Nq, D), (2, B, Hkv, Nk, D)
    q, kv = (rng.standard_normal(s, dtype=np.float32).astype(storage_dtype(dtype)) for s in shapes)
    return q, kv[0], kv[1]


def of_torch(q: Array, k: Array, v: Array, dtype: str) -> Run | None:
    """Return torch's call, None without it."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    if dtype in ("float16", "bfloat16"):
        tensors = [
            torch.from_numpy(x.view(np.int16)).view(getattr(torch, dtype)) for x in (q, k, v)
        ]
    else:
        tensors = [torch.from_numpy(x) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[1] != k.shape[1]
    return lambda: attend(*tensors, enable_gqa=grouped)


def table() -> None:
    """Print bandwidth and its share of a plain read of the same arrays."""
    read_memory = load("cpu").read_memory
    print(f"{'':43}{'nattn':>9}{'read':>9}{'share':>7}{'ms':>8}{'torch':>8}")
    for name, B, Hq, Hkv, Nk, dtype, Nq in CASES:
        q, k, v = arrays(B, Hq, Hkv, Nk, dtype, Nq)
        assert k.base is not None  # one piece of memory with v, which is read as a whole
        whole = k.base.view(np.uint8).reshape(-1)
        runs: dict[str, Run] = {
            "nattn": lambda q=q, k=k, v=v: nattn.attention(q, k, v),  # type: ignore[misc]
            "read": lambda whole=whole: read_memory(whole),  # type: ignore[misc]
        }
        peer = of_torch(q, k, v, dtype)
        found = medians(runs)
        # torch's threads spin after a call, and would take part in the others'
        ratio = "-"
        if peer is not None:
            slow = medians({"torch": peer, "nattn": runs["nattn"]}, 5)
            ratio = f"{slow['torch'] / found['nattn']:.1f}x"
        n_bytes = k.nbytes + v.nbytes
        own, plain = (n_bytes / found[x] / 1e9 for x in ("nattn", "read"))
        print(
            f"{name:43}{own:>6.1f} GB{plain:>6.1f} GB{own / plain:>6.0%}"
            f"{found['nattn'] * 1e3:>8.2f}{ratio:>8}",
            flush=True,
        )


def caches() -> None:
    """Print times of a step on caches of 16,384 keys, 32 heads on 8."""
    rng = np.random.default_rng(0)
    Hq, Hkv, Nk, D = 32, 8, 16384, 128
    for dtype in ("float32", "bfloat16"):
        numbers = [
            rng.standard_normal((1, n, h, D), dtype=np.float32)
            for n, h in ((1, Hq), (Nk, Hkv), (Nk, Hkv))
        ]
        q, k, v = (x.astype(storage_dtype(dtype)) for x in numbers)
        runs: dict[str, Run] = {}
        for name, quantize in (("in one piece", None), ("int8", "int8")):
            cache = nattn.KVCache(1, Hkv, D, dtype=q.dtype, capacity=Nk, quantize=quantize)
            cache.append(k, v)
            runs[name] = lambda cache=cache, q=q: cache.attend(q)  # type: ignore[misc]
        for size in (16, 64):
            paged = nattn.PagedKVCache(Nk // size, size, Hkv, D, dtype=q.dtype)
            seq = paged.new()
            paged.append([seq], k, v)
            runs[f"pages of {size}"] = lambda p=paged, s=seq, q=q: p.attend([s], q)  # type: ignore[misc]
        found = medians(runs, 31)
        first = found["in one piece"]
        for name, seconds in found.items():
            print(f"{dtype:10}{name:14}{seconds * 1e3:8.2f} ms{first / seconds:8.2f}x", flush=True)


def rows(file: str | None = None) -> None:
    """Print, and plot, the time over the number of queries, from decoding to the tiled kernel."""
    counts = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 33, 36, 40, 48, 56, 64]
    curves: dict[str, list[float]] = {}
    for dtype, Hq, Hkv in (("float32", 8, 8), ("float32", 32, 8), ("bfloat16", 32, 8)):
        runs: dict[str, Run] = {}
        for Nq in counts:
            q, k, v = arrays(1, Hq, Hkv, 8192, dtype, Nq)
            runs[str(Nq)] = lambda q=q, k=k, v=v: nattn.attention(q, k, v)  # type: ignore[misc]
        found = medians(runs, 7)
        name = f"{dtype}, {Hq} heads on {Hkv}"
        curves[name] = [found[str(n)] * 1e3 for n in counts]
        print(name, *(f"{n}: {ms:.2f}" for n, ms in zip(counts, curves[name], strict=True)))
    if file is not None:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name, times in curves.items():
            axes.plot(counts, times, marker="o", markersize=3, label=name)
        axes.set(xlabel="queries", ylabel="milliseconds, 8,192 keys, D = 128", ylim=(0, None))
        axes.legend()
        figure.savefig(file, dpi=120, bbox_inches="tight")


def call() -> None:
    """Print the time of a warm call on 128 keys."""
    for Hq, Hkv in ((1, 1), (32, 8), (32, 32)):
        q, k, v = arrays(1, Hq, Hkv, 128, "float32", 1)
        found = medians({"": lambda q=q, k=k, v=v: nattn.attention(q, k, v)}, 101)  # type: ignore[misc]
        print(f"128 keys, {Hq} heads on {Hkv}: {found[''] * 1e6:.0f} us")


if __name__ == "__main__":
    wanted: dict[str, Callable[..., None]] = {
        "table": table,
        "caches": caches,
        "rows": rows,
        "call": call,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in wanted:
        sys.exit(__doc__)
    wanted[sys.argv[1]](*sys.argv[2:])
