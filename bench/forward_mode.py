"""What a directional derivative takes: ``python bench/forward_mode.py``.

`nattn.attention_jvp` beside `nattn.attention`: 8 heads, N=2048, D=64, float32. All take turns; a
figure is the median over the rounds of the ratio of times within one. ``--small`` runs it on short
sequences, to see that it works.
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
DIRECTIONS = [("dq",), ("dk",), ("dv",), ("dq", "dk"), ("dq", "dk", "dv")]


def main() -> None:
    """Print a line for each set of directions."""
    rng = np.random.default_rng(0)
    q, k, v, dq, dk, dv = rng.standard_normal((6, 1, H, N, D), dtype=np.float32)
    given = {"dq": dq, "dk": dk, "dv": dv}
    print(f"{'times the forward pass':24}{'all visible':>14}{'causal':>14}")
    for names in DIRECTIONS:
        ratios = []
        for causal in (False, True):
            chosen: dict[str, Any] = {name: given[name] for name in names}
            runs = {
                "jvp": timed(
                    functools.partial(nattn.attention_jvp, q, k, v, causal=causal, **chosen)
                ),
                "forward": timed(functools.partial(nattn.attention, q, k, v, causal=causal)),
            }
            samples = interleave(runs, 2 if SMALL else 15)
            ratios.append(samples.ratio("jvp", "forward"))
        print(f"{', '.join(names):24}{ratios[0]:14.2f}{ratios[1]:14.2f}", flush=True)


if __name__ == "__main__":
    main()
