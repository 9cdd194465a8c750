"""What the gradient of something bound to a score_mod takes: ``python bench/learning.py``.

The backward pass with it, beside that of the same function without and that of no function at all:
8 heads, N=2048, D=64, float32. All take turns; a figure is the median over the rounds of the ratio
of speeds within one. ``--small`` runs it on short sequences, to see that it works.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

import nattn
from nattn.applications.measure import interleave, timed

SMALL = "--small" in sys.argv
H, N, D = (2, 64, 16) if SMALL else (8, 2048, 64)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    """Add a number for each head and distance."""
    return score + table[h, q_idx - kv_idx + N - 1]


def gain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, gain: Any) -> Any:
    """Multiply by a number for each head."""
    return score * gain[h]


def weight(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, w: Any) -> Any:
    """Add a number for each key."""
    return score + w[kv_idx]


def cases() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Return functions, the names of what learns, and further arguments."""
    one, bound = np.float32, functools.partial
    t5 = nattn.positional.T5Bias(H)
    bias = t5.arguments(N, N)["score_mod"]
    blocks = nattn.BlockMask.from_mask_mod(nattn.masks.causal, 1, 1, N, N)
    table = np.zeros((H, 2 * N - 1), one)
    return {
        f"table ({H}, {2 * N - 1})": (bound(relative, table=table), "score_mod.table", {}),
        "gain of each head": (bound(gain, gain=np.ones(H, one)), "score_mod.gain", {}),
        "weight of each key": (bound(weight, w=np.zeros(N, one)), "score_mod.w", {}),
        "T5Bias, causal": (bias, t5.wrt[0], {"causal": True}),
        "T5Bias, BlockMask": (bias, t5.wrt[0], {"block_mask": blocks}),
    }


def main() -> None:
    """Print a line for each case."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, H, N, D), dtype=np.float32)
    print(f"{'speed, in % of the pass':24}{'without it':>14}{'without any':>14}")
    for name, (mod, learnt, args) in cases().items():
        _, vjp = nattn.attention_vjp(q, k, v, score_mod=mod, **args)
        _, plain = nattn.attention_vjp(q, k, v, **args)
        wrt = ("q", "k", "v", learnt)
        runs = {
            "with": timed(functools.partial(vjp, dout, wrt=wrt)),
            "without": timed(functools.partial(vjp, dout)),
            "plain": timed(functools.partial(plain, dout)),
        }
        samples = interleave(runs, 2 if SMALL else 9)
        ratios = [100 * samples.ratio(x, "with") for x in ("without", "plain")]
        print(f"{name:24}{ratios[0]:13.0f}%{ratios[1]:13.0f}%", flush=True)


if __name__ == "__main__":
    main()
