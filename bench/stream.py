"""Compare attention over a memory-mapped file with reading it: ``python bench/stream.py [GIB]``.

One query row for each of 8 heads, keys and values in float32 of D=128 in two files in a temporary
folder. Both take turns, with the files in the page cache; the figure is the median of ratios. Then
the memory that a call takes beyond what was there is read from Linux.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import nattn

H, D, ROUNDS = 8, 128, 7
PIECE = 4096


def peak() -> int:
    """Return the largest anonymous memory so far, in bytes; pages of files do not count."""
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * int(next(x for x in status if x.startswith("RssAnon")).split()[1])


def main() -> None:
    """Print the ratio of the times, and the memory."""
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    N = int(size * 2**30 / (2 * H * D * 4)) // PIECE * PIECE
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in ("k", "v"):
            path = Path(folder) / f"{name}.bin"
            new = np.memmap(path, np.float32, "w+", shape=(N, H, D))
            for n in range(0, N, PIECE):
                new[n : n + PIECE] = rng.standard_normal((PIECE, H, D), dtype=np.float32)
            new.flush()
            files.append(np.memmap(path, np.float32, "r", shape=(1, N, H, D)))
        q = rng.standard_normal((1, 1, H, D), dtype=np.float32)
        k, v = files
        buffer = bytearray(1 << 24)

        def read() -> None:
            for name in ("k", "v"):
                with open(Path(folder) / f"{name}.bin", "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

        grown: list[int] = []

        def attend() -> None:
            before = peak()
            watch: Callable[[float], None] = lambda _: grown.append(peak() - before)  # noqa: E731
            nattn.attention_stream(q, (k, v), layout="bnhd", progress=watch)

        times: dict[str, list[float]] = {"read": [], "attend": []}
        for _ in range(ROUNDS):
            for what, run in (("read", read), ("attend", attend)):
                begin = time.perf_counter()
                run()
                times[what].append(time.perf_counter() - begin)
    ratio = np.median(np.array(times["attend"]) / np.array(times["read"]))
    total = 2 * N * H * D * 4
    rate = total / np.median(times["attend"]) / 1e9
    print(
        f"{total / 2**30:.2f} GiB: {rate:.1f} GB/s, {ratio:.2f} times as long as reading, "
        f"{max(grown) / 2**20:.0f} MiB of memory, {os.cpu_count()} processors"
    )


if __name__ == "__main__":
    main()
