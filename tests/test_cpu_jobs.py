"""Jobs: late workers touch nothing, only `enter` leads to scratch, calls from within calls."""

from __future__ import annotations

import _thread
import ast
import functools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import gaussian

import nattn
from nattn import backends, masks
from nattn.backends.cpu import jobs
from nattn.backends.cpu.jobs import JOB, job_record
from nattn.positional import Rotary

LATE = 0.002
"""Seconds: long after the first worker has done a small job alone."""


def arrays(heads: int, n: int, d: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    return [gaussian(1, heads, n, d, seed=seed + i) for i in range(3)]


def forward(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, k, v = arrays(heads, n, d)
    return lambda: list(nattn.attention(q, k, v, causal=True, return_lse=True))


def decode(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, k, v = arrays(heads, 8 * n, d)
    return lambda: list(nattn.attention(q[:, :, :2], k, v, causal=True, return_lse=True))


def backward(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, k, v = arrays(heads, n, d)
    out, lse = nattn.attention(q, k, v, causal=True, return_lse=True)
    dout = np.ones_like(out)
    return lambda: list(nattn.attention_backward(dout, q, k, v, out, lse, causal=True)[:3])


def tangents(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, k, v = arrays(heads, n, d)
    return lambda: list(nattn.attention_jvp(q, k, v, v, causal=True))


def observe(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, k, _ = arrays(heads, n, d)
    return lambda: [nattn.attention_map(q, k, size=(7, 9)), *nattn.row_stats(q, k)]


def classify(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    mask_mod = functools.partial(masks.sliding_window, left=d, right=0)
    make = nattn.BlockMask.from_mask_mod
    return lambda: [make(mask_mod, 1, heads, n, n, block_size=16).kinds]


def rotate(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, _, _ = arrays(heads, 4 * n, d)
    return lambda: [Rotary(d)(q)]


def gelu(heads: int, n: int, d: int) -> Callable[[], list[Any]]:
    q, _, _ = arrays(4 * heads, n, d)
    return lambda: [backends.load("cpu").gelu(q)]


KERNELS = [forward, decode, backward, tangents, observe, classify, rotate, gelu]


class Delay:
    """Lets every worker but the first start late, while it is on; counts the threads of jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.most_threads = 0
        self._compiled, self._run = jobs._callable, jobs._run
        monkeypatch.setattr(jobs, "_callable", self.delayed)
        monkeypatch.setattr(jobs, "_run", self.counted)
        monkeypatch.setattr(jobs, "thread_count", lambda: 4)

    def delayed(self, address: int) -> Any:
        worker, is_late = self._compiled(address), self.on

        def run(slot: int, args: bytes) -> None:
            if is_late and slot > 0:
                time.sleep(LATE)
            worker(slot, args)

        return run

    def counted(self, address: int, args: bytes, state: Any, n_threads: int, *more: Any) -> None:
        self.most_threads = max(self.most_threads, n_threads)
        self._run(address, args, state, n_threads, *more)


@pytest.mark.parametrize("first", KERNELS)
def test_late_workers_leave_later_calls_alone(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call does not wait for them, and its scratch is the next one's."""
    small = first(2, 300, 64)
    small()
    later = [(kernel(heads, n, d), kernel) for kernel, heads, n, d in LATER]
    expected = [call() for call, _ in later]
    delay = Delay(monkeypatch)
    for _ in range(6):
        for (call, kernel), want in zip(later, expected, strict=True):
            delay.on, delay.most_threads = True, 0
            small()
            assert delay.most_threads > 1  # or this test would show nothing
            delay.on = False
            for x, y in zip(call(), want, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=kernel.__name__)
    time.sleep(5 * LATE)


LATER = [
    (forward, 4, 533, 64),
    (backward, 4, 528, 128),
    (backward, 2, 700, 64),
    (observe, 2, 400, 32),
    (rotate, 4, 500, 64),
]


def test_scratch_is_reached_by_enter_alone() -> None:
    """No record of a job says where scratch is, so no kernel can touch it before it has entered."""
    folder = Path(jobs.__file__).parent
    users = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        if {"scratch_ptr", "scratch_bytes"} & {*names, *map(str, strings)}:
            users[path.stem] = True
    assert set(users) == {"jobs"}
    kernels = [p for p in folder.glob("*.py") if '@kernel("void(int64, int64)")' in p.read_text()]
    assert {p.stem for p in kernels} == {
        *("forward", "decode", "backward", "tangents", "totals", "classify", "rotary", "gelu"),
        "peak",
    }
    for path in kernels:
        assert "enter(" in path.read_text(encoding="utf-8"), path


def test_fields_are_checked_by_name() -> None:
    record = job_record("TestArgs", ("first", "second"))

    def start(**fields: Any) -> None:
        jobs.run_job(0, record, fields, n_tasks=1, flops=0.0, keepalive=None)

    with pytest.raises(TypeError, match=r"TestArgs: expected a value for each .* of second"):
        start(first=1)
    with pytest.raises(TypeError, match=r"TestArgs: expected a value for each .* of third"):
        start(first=1, second=2, third=3)
    assert record.size == 8 * 3
    assert JOB.size == 8 * len(JOB.names)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals with a timer")
def test_a_signal_handler_may_call() -> None:
    """Also while the pool starts a thread, holding what it holds then."""
    q, k, v = arrays(2, 400, 64)
    expected = nattn.attention(q, k, v)
    wrong: list[bool] = []

    def handler(*_: Any) -> None:
        wrong.append(not np.array_equal(nattn.attention(q, k, v), expected))
        signal.setitimer(signal.ITIMER_REAL, 0.003)  # a slow machine must not be interrupted here

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            jobs._forget_threads()  # so that threads are started again and again
            np.testing.assert_array_equal(nattn.attention(q, k, v), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert wrong
    assert not any(wrong)


def test_a_call_from_within_the_pool_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a signal handler or a ``__del__`` does in the middle of `submit`, without a race."""
    q, k, v = arrays(2, 400, 64)
    expected = nattn.attention(q, k, v)
    start: Any = _thread.start_new_thread
    calls: list[Any] = []

    def start_and_call(*args: Any) -> Any:
        if not calls:
            calls.append(1)
            calls.append(np.array_equal(nattn.attention(q, k, v), expected))
        return start(*args)

    monkeypatch.setattr(jobs, "thread_count", lambda: 4)
    monkeypatch.setattr(_thread, "start_new_thread", start_and_call)
    jobs._forget_threads()
    done: list[Any] = []
    caller = threading.Thread(target=lambda: done.append(nattn.attention(q, k, v)), daemon=True)
    caller.start()
    caller.join(60)
    assert done, "attention waits for itself"
    np.testing.assert_array_equal(done[0], expected)
    assert calls == [1, True]
