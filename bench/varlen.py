"""Compare packed sequences with a batch of equal lengths: ``python bench/varlen.py [HEADS] [D]``.

64 sequences of 16 to 2,048 tokens, of all lengths between, packed in random order; beside them a
batch of as many of their mean length, and the same sequences as a batch that is padded to the
longest. All take turns; a figure is the median, over the rounds, of ratios of GFLOP/s within one.
Counted are the products of pairs that are visible, in a padded batch too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import nattn
from nattn.applications.measure import interleave, timed

B, SHORTEST, LONGEST, ROUNDS = 64, 16, 2048, 7


def calls(
    H: int, D: int, causal: bool, backward: bool
) -> dict[str, tuple[float, Callable[[], Any]]]:
    """Return the contestants, each with its floating-point operations."""
    rng = np.random.default_rng(0)
    lens = rng.permutation(np.linspace(SHORTEST, LONGEST, B).astype(np.int64))
    mean = int(lens.mean())
    cu = np.concatenate([[0], np.cumsum(lens)])
    packed = rng.standard_normal((4, int(cu[-1]), H, D), dtype=np.float32)
    equal = rng.standard_normal((4, B, H, mean, D), dtype=np.float32)
    padded = rng.standard_normal((4, B, H, LONGEST, D), dtype=np.float32)
    q, k, v, dout = packed

    def flops(n: Any) -> float:
        pairs = n * (n + 1) / 2 if causal else n * n
        return (10.0 if backward else 4.0) * H * D * float(np.sum(pairs))

    if not backward:
        return {
            "packed": (
                flops(lens),
                lambda: nattn.attention_varlen(q, k, v, cu, cu, causal=causal),
            ),
            "equal": (B * flops(mean), lambda: nattn.attention(*equal[:3], causal=causal)),
            "padded": (
                flops(lens),
                lambda: nattn.attention(*padded[:3], causal=causal, q_lens=lens, kv_lens=lens),
            ),
        }
    _, of_packed = nattn.attention_varlen_vjp(q, k, v, cu, cu, causal=causal)
    _, of_equal = nattn.attention_vjp(*equal[:3], causal=causal)
    _, of_padded = nattn.attention_vjp(*padded[:3], causal=causal, q_lens=lens, kv_lens=lens)
    return {
        "packed": (flops(lens), lambda: of_packed(dout)),
        "equal": (B * flops(mean), lambda: of_equal(equal[3])),
        "padded": (flops(lens), lambda: of_padded(padded[3])),
    }


def main() -> None:
    """Print GFLOP/s and ratios."""
    H = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    D = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    print(f"{B} sequences of {SHORTEST} to {LONGEST} tokens, {H} heads, D={D}, float32")
    print(f"{'':20}{'packed':>16}{'of equal lengths':>18}{'of padded':>12}")
    for backward in (False, True):
        for causal in (False, True):
            made = calls(H, D, causal, backward)

            def rate(work: float, call: Callable[[], Any]) -> Callable[[], float]:
                seconds = timed(call)
                return lambda: work / seconds() / 1e9

            samples = interleave({name: rate(*x) for name, x in made.items()}, ROUNDS)
            what = f"{'backward' if backward else 'forward'}{', causal' if causal else ''}"
            print(
                f"{what:20}{samples.median('packed'):8.0f} GFLOP/s"
                f"{samples.ratio('packed', 'equal'):18.1%}"
                f"{samples.ratio('packed', 'padded'):11.2f}x"
            )


if __name__ == "__main__":
    main()
