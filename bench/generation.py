"""Generate tokens with a small decoder and each cache: ``python bench/generation.py``.

The decoder has weights from a seed, `nattn.nn.MultiHeadAttention` with rotary and grouped heads,
and NumPy for the rest: set ``OPENBLAS_NUM_THREADS=1``, for its products are small. It continues a
prompt greedily: by going through all tokens again for each new one, and with the keys and values of
those before in a cache. All take turns, and the figures are medians, without the prompt. What each
generates is compared with the first.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nattn
from nattn.nn import MultiHeadAttention
from nattn.positional import Rotary

Array = NDArray[Any]
HEADS, HKV, HEAD_DIM = 8, 2, 64
D_MODEL = HEADS * HEAD_DIM


def norm(x: Array) -> Array:
    """Return rows of unit variance."""
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6))


class Decoder:
    """Blocks of attention and a perceptron, between an embedding and scores of tokens."""

    def __init__(self, layers: int, vocabulary: int, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def weights(n: int, m: int) -> Array:
            return rng.standard_normal((n, m), dtype=np.float32) / np.float32(np.sqrt(n))

        self.head = weights(D_MODEL, vocabulary)
        self.embedding = rng.standard_normal((vocabulary, D_MODEL), dtype=np.float32)
        self.blocks = [
            (
                MultiHeadAttention(
                    D_MODEL,
                    HEADS,
                    num_kv_heads=HKV,
                    bias=False,
                    positions=Rotary(HEAD_DIM),
                    seed=seed + n,
                ),
                weights(D_MODEL, 2 * D_MODEL),
                weights(2 * D_MODEL, D_MODEL),
            )
            for n in range(layers)
        ]

    def __call__(self, tokens: Array, caches: list[Any] | None = None) -> Array:
        """Return the next token of each sequence."""
        x = self.embedding[tokens]
        for n, (attention, w_in, w_out) in enumerate(self.blocks):
            cache = None if caches is None else caches[n]
            x = x + attention(norm(x), cache=cache, causal=True)
            x = x + np.maximum(norm(x) @ w_in, 0.0) @ w_out
        return np.asarray((norm(x[:, -1]) @ self.head).argmax(axis=-1))


def generate(
    decoder: Decoder, prompt: Array, n: int, caches: list[Any] | None
) -> tuple[Array, float]:
    """Return n tokens that continue a prompt, and the time that all but the first took."""
    new = decoder(prompt, caches)[:, None]
    tokens = np.concatenate([prompt, new], axis=1)
    begin = time.perf_counter()
    for _ in range(n - 1):
        new = decoder(tokens if caches is None else new, caches)[:, None]
        tokens = np.concatenate([tokens, new], axis=1)
    return tokens[:, prompt.shape[1] :], time.perf_counter() - begin


def caches_of(kind: str, layers: int, batch: int, room: int) -> list[Any] | None:
    """Return an empty cache for each block, or None for none."""
    if kind == "recomputed":
        return None
    quantize = "int8" if "int8" in kind else None
    if "paged" in kind:
        views = []
        for _ in range(layers):
            pages = batch * -(-room // 64)
            pool = nattn.PagedKVCache(pages, 64, HKV, HEAD_DIM, quantize=quantize)
            views.append(pool.view([pool.new() for _ in range(batch)]))
        return views
    return [
        nattn.KVCache(batch, HKV, HEAD_DIM, capacity=room, quantize=quantize) for _ in range(layers)
    ]


KINDS = ("recomputed", "contiguous", "paged", "int8", "paged int8")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    decoder = Decoder(given.layers, 1000, given.seed)
    rng = np.random.default_rng(given.seed)
    prompt = rng.integers(0, 1000, (given.batch, given.prompt))
    room = given.prompt + given.tokens

    def run(kind: str, n: int) -> tuple[Array, float]:
        caches = caches_of(kind, given.layers, given.batch, room)
        return generate(decoder, prompt, n, caches)

    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found: dict[str, Array] = {}
    for kind in KINDS:
        run(kind, 2)  # compiles
    for _ in range(given.rounds):
        for kind in KINDS:
            found[kind], seconds = run(kind, given.tokens)
            times[kind].append(seconds)
    sizes = {kind: caches_of(kind, given.layers, given.batch, room) for kind in KINDS}
    print(
        f"{given.batch} x {given.prompt} tokens of prompt, {given.tokens} generated, "
        f"{given.layers} layers of {HEADS} heads on {HKV}, D={HEAD_DIM}"
    )
    print("| cache | tokens per second | MiB | tokens as recomputed |")
    print("| --- | ---: | ---: | ---: |")
    for kind in KINDS:
        rate = given.batch * (given.tokens - 1) / float(np.median(times[kind]))
        caches = sizes[kind] or []
        stores = (getattr(x, "cache", x) for x in caches)
        mib = sum(x.nbytes for x in stores) / 2**20
        same = found[kind] == found["recomputed"]
        print(f"| {kind} | {rate:.0f} | {mib:.1f} | {same.sum()} of {same.size} |")


if __name__ == "__main__":
    main()
