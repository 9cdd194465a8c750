"""Measure the cost of looking at attention: ``python bench/attention_map.py``.

`nattn.attention_map`, `nattn.row_stats` and `nattn.key_mass` take turns with `nattn.attention` on
the same queries and keys. A ratio is the median over the rounds of its time over that of the
forward pass; memory is the peak beyond what was resident before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

import nattn
from nattn.applications.measure import PeakMemory, interleave, timed


def main() -> None:
    """Measure one head of the length that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--causal", action="store_true")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (3, given.length, given.head_dim)
    q, k, v = rng.standard_normal(shape, dtype=np.float32)
    causal = given.causal
    lse = nattn.attention(q, k, v, causal=causal, return_lse=True)[1]
    calls: dict[str, Callable[[], object]] = {
        "attention": lambda: nattn.attention(q, k, v, causal=causal),
        "attention_map": lambda: nattn.attention_map(q, k, size=given.size, causal=causal),
        "row_stats": lambda: nattn.row_stats(q, k, causal=causal),
        "key_mass": lambda: nattn.key_mass(q, k, causal=causal),
        "key_mass, with lse": lambda: nattn.key_mass(q, k, lse, causal=causal),
    }
    memory = {}
    for name, call in calls.items():
        with PeakMemory() as peak:
            call()
        memory[name] = peak.bytes / 2**20
    samples = interleave({n: timed(call) for n, call in calls.items()}, given.rounds, warmup=0)
    print(f"float32, N={given.length} D={given.head_dim} causal={causal}, map {given.size}")
    for name in calls:
        print(
            f"  {name:18} {samples.median(name):7.2f} s  {samples.ratio(name, 'attention'):5.2f}"
            f" x attention  {memory[name]:6.1f} MiB"
        )


if __name__ == "__main__":
    main()
