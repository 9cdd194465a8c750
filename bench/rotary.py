"""Compare rotary with the machine's stream bandwidth: ``python bench/rotary.py``.

All contestants use the same number of threads and the same arrays, far larger than the caches, and
take turns, so that other work on the machine slows them alike. Rotary in place is compared with
``x *= c`` in NumPy, which reads and writes the same memory; rotary into another array with
``np.multiply(x, c, out=y)`` and with a copy. The figures are the ratio of the best times and the
median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

from nattn.positional import Rotary


def measure(dtype: str, pairing: str, shape: tuple[int, ...], threads: int, rounds: int) -> None:
    """Print the bandwidth of rotary in % of that of NumPy's passes over the same memory."""
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.dtype(dtype).type)
    y = np.ones_like(x)
    one = x.dtype.type(1)
    rotary = Rotary(shape[-1], pairing=pairing)
    splits = [slice(x.size * i // threads, x.size * (i + 1) // threads) for i in range(threads)]
    flat, other = x.reshape(-1), y.reshape(-1)
    with ThreadPoolExecutor(threads) as pool:

        def each(work: Callable[[slice], object]) -> Callable[[], object]:
            return lambda: list(pool.map(work, splits))

        contestants: dict[str, Callable[[], object]] = {
            "scale in place": each(lambda s: np.multiply(flat[s], one, out=flat[s])),
            "rotary in place": lambda: rotary(x, out=x),
            "scale": each(lambda s: np.multiply(flat[s], one, out=other[s])),
            "rotary": lambda: rotary(x, out=y),
            "copy": each(lambda s: np.copyto(other[s], flat[s])),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds + 1):
            for name, run in contestants.items():
                begin = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - begin)
    best = {name: min(found[1:]) for name, found in times.items()}
    size = f"{x.nbytes / 2**20:.0f} MiB"
    print(f"{dtype} {pairing}, {shape} = {size}, {threads} threads")
    for name, found in best.items():
        print(f"  {name:16} {1e3 * found:7.1f} ms  {2e-9 * x.nbytes / found:6.1f} GB/s")
    pairs = (
        ("rotary in place", "scale in place"),
        ("rotary", "scale"),
        ("rotary", "copy"),
    )
    for mine, yardstick in pairs:
        rates = np.array(times[yardstick][1:]) / np.array(times[mine][1:])
        print(
            f"  {mine} / {yardstick}: {100 * best[yardstick] / best[mine]:.0f}% of best, "
            f"median of rounds {100 * np.median(rates):.0f}%"
        )


def main() -> None:
    """Measure float32 and float64 in both pairings, or those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float64"], action="append")
    parser.add_argument("--pairing", choices=["half", "interleaved"], action="append")
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    numba.set_num_threads(given.threads)
    shape = (1, given.heads, given.length, given.head_dim)
    for dtype in given.dtype or ["float32", "float64"]:
        for pairing in given.pairing or ["half", "interleaved"]:
            measure(dtype, pairing, shape, given.threads, given.rounds)


if __name__ == "__main__":
    main()
