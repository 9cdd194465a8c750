"""Call attention from anywhere for a while: ``python tests/stress.py --seconds 60``.

Each scenario runs in a process of its own, compares every result, forward and backward, with bits
that were computed before anything else went on, and prints its counts:

- ``forks``: three threads compute while a fourth one forks children that compute and exit.
- ``signals``: a signal handler computes every 10 ms, whatever the main thread is doing.
- ``interrupts``: 300 KeyboardInterrupts are raised at random moments of the main thread, and other
  calls, there and in a second thread, are none the worse.

The exit status is 1 if a bit was wrong, a call raised, a process crashed or something hung.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import children
import numpy as np

import nattn

CALLS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    # (H, Nq, Nk, D): from less than a task for each thread to many, with scratch of all sizes
    ((2, 120, 120, 64), {"causal": True}),
    ((2, 90, 90, 128), {}),
    ((4, 600, 600, 32), {"causal": True}),
    ((4, 300, 260, 64), {"window_size": (90, 5)}),
    ((8, 3, 700, 64), {}),
    ((2, 140, 140, 16), {"dropout_p": 0.2, "seed": 3}),
]

INTERRUPTS = 300
HANG = 120.0
"""Seconds after the end of a scenario at which it is taken for hanging."""

CHILD_HANG = 60
"""Seconds after which a child is."""

RIGHT, WRONG = 0, 3  # exit status of a child; others are a crash, or a hang


def make(call: int) -> tuple[list[Any], dict[str, Any]]:
    """Return q, k, v and the options of a call."""
    (H, Nq, Nk, D), options = CALLS[call]
    rng = np.random.default_rng(call)
    return [rng.standard_normal((1, H, n, D), dtype=np.float32) for n in (Nq, Nk, Nk)], options


INPUTS = [make(call) for call in range(len(CALLS))]


def results(call: int) -> list[Any]:
    """Run a call forward and backward."""
    arrays, options = INPUTS[call]
    (out, lse), vjp = nattn.attention_vjp(*arrays, return_lse=True, backend="cpu", **options)
    grads = vjp(np.ones_like(out))
    return [out, lse, grads.dq, grads.dk, grads.dv]


class Checker:
    """Runs calls and counts what comes out; any thread and any signal handler may use it."""

    def __init__(self) -> None:
        self.expected = [[x.copy() for x in results(call)] for call in range(len(CALLS))]
        self.counts: collections.Counter[str] = collections.Counter()

    def check(self, call: int, who: str) -> bool:
        """Run a call; return whether its bits are right, and say so if they are not."""
        found = results(call)
        self.counts[f"calls in {who}"] += 1
        pairs = list(zip(found, self.expected[call], strict=True))
        if all(x.tobytes() == y.tobytes() for x, y in pairs):
            return True
        self.counts["WRONG"] += 1
        worst = max(float(np.abs(x - y).max()) for x, y in pairs)
        print(f"wrong by {worst:.3g}: call {call} in {who}", flush=True)
        return False

    def until(self, end: float, seed: int, who: str) -> None:
        """Check calls in random order until it is time."""
        rng = random.Random(seed)
        while time.monotonic() < end:
            self.guarded(rng.randrange(len(CALLS)), who)

    def guarded(self, call: int, who: str) -> None:
        """Check a call and count what it raises."""
        try:
            self.check(call, who)
        except Exception:
            self.counts["RAISED"] += 1
            traceback.print_exc()


def forks(checker: Checker, end: float) -> None:
    """Fork again and again while three threads compute."""
    faulthandler.register(signal.SIGALRM, chain=True)  # says where a child hangs
    with ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(checker.until, end, seed, "threads") for seed in range(3)]
        rng = random.Random(7)
        while time.monotonic() < end:
            call = rng.randrange(len(CALLS))
            with warnings.catch_warnings():  # of threads, which the child does not need
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                signal.alarm(CHILD_HANG)  # ends it; the watchdog's thread does not outlive a fork
                status = 1
                try:
                    status = RIGHT if checker.check(call, "a child") else WRONG
                finally:
                    os._exit(status)
            _, waited = os.waitpid(child, 0)
            status = os.waitstatus_to_exitcode(waited)
            checker.counts["children"] += 1
            checker.counts["WRONG"] += status == WRONG
            checker.counts["CRASHED OR HUNG"] += status not in (RIGHT, WRONG)
        for thread in busy:
            thread.result()


def signals(checker: Checker, end: float) -> None:
    """Compute in a signal handler, every 10 ms, while the main thread computes."""
    rng = random.Random(8)

    def handler(number: int, frame: object) -> None:
        checker.guarded(rng.randrange(len(CALLS)), "the handler")
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    checker.until(end, 0, "the main thread")
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def interrupts(checker: Checker, end: float) -> None:
    """Interrupt the main thread at random moments, as Ctrl-C does."""
    rng = random.Random(9)
    mean = max(1e-3, end - time.monotonic()) / INTERRUPTS
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt
    other = threading.Thread(target=checker.until, args=(end, 1, "a second thread"))
    other.start()
    for _ in range(INTERRUPTS):
        delay = rng.uniform(0.0, 2.0 * mean)
        lost = time.monotonic() + delay + 10.0
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
        try:
            # Once it is raised where Python ignores exceptions, as in __del__, it does not come.
            while time.monotonic() < lost:
                checker.guarded(rng.randrange(len(CALLS)), "the main thread")
            checker.counts["interrupts lost"] += 1
        except KeyboardInterrupt:
            checker.counts["interrupts"] += 1
    other.join()
    for call in range(len(CALLS)):
        checker.guarded(call, "the end")


SCENARIOS: dict[str, Callable[[Checker, float], None]] = {
    scenario.__name__: scenario for scenario in (forks, signals, interrupts)
}


def run(name: str, seconds: float) -> bool:
    """Run a scenario in this process and print its counts; return whether all is well."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG, exit=True)
    checker = Checker()
    faulthandler.dump_traceback_later(seconds + HANG, exit=True)
    SCENARIOS[name](checker, time.monotonic() + seconds)
    faulthandler.cancel_dump_traceback_later()
    counts = checker.counts
    bad = [kind for kind in counts if kind.isupper() and counts[kind]]
    print(f"{name}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items() if n), flush=True)
    return not bad


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each scenario")
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario alone")
    parser.add_argument(
        "--threads", type=int, default=4, help="NUMBA_NUM_THREADS; more than cores make some late"
    )
    parser.add_argument("--here", choices=SCENARIOS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not hasattr(os, "fork"):
        print("this needs fork and interval timers, which there are not here")
        return 0
    if options.here:
        return 0 if run(options.here, options.seconds) else 1
    environment = children.environment(NUMBA_NUM_THREADS=str(options.threads))
    failed = []
    for name in SCENARIOS if options.only is None else [options.only]:
        command = [sys.executable, __file__, "--here", name, "--seconds", str(options.seconds)]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status != 0:
            failed.append(name)
            print(f"{name}: FAILED with status {status}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
