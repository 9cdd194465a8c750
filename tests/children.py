"""What runs in a process of its own: ``python children.py SCENARIO [ARGUMENT ...]``.

A scenario ends with exit status 0, or its output says what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import nattn
from nattn.backends import load as load_backend
from nattn.vectors.dtypes import storage_dtype

CALLS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    # (H, Nq, Nk, D): several tiles, edges, few queries, hidden elements
    ((4, 200, 300, 32), {}),
    ((2, 333, 333, 16), {"causal": True}),
    ((8, 3, 500, 64), {}),
    ((1, 150, 150, 8), {"window_size": (30, 5)}),
]


def command(scenario: str, *arguments: object) -> list[str]:
    """Return the command line of a scenario."""
    return [sys.executable, __file__, scenario, *map(str, arguments)]


def environment(**changed: str) -> dict[str, str]:
    """Return an environment in which a child imports the same nattn, wherever it lies."""
    path = [str(Path(nattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | changed


def inputs(call: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return q, k, v and the options of one call; the last bits matter, so no BLAS made them."""
    (H, Nq, Nk, D), options = CALLS[call]
    rng = np.random.default_rng(call)
    shapes = (1, H, Nq, D), (1, H, Nk, D), (1, H, Nk, D)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    if call % 2:
        options = options | {"mask": rng.random((Nq, Nk)) < 0.8}
    return arrays, options


def bits(call: int) -> bytes:
    """Run a call and return its result to the last bit."""
    arrays, options = inputs(call)
    out, lse = nattn.attention(*arrays, return_lse=True, backend="cpu", **options)
    return bytes(out.tobytes() + lse.tobytes())


def right(call: int) -> bytes:
    """Run a call, assert that it is near the reference, and return its bits."""
    from cases import check

    arrays, options = inputs(call)
    out, lse = check("cpu", *arrays, **options)
    return out.tobytes() + lse.tobytes()


def layer() -> None:
    """Run a parallel kernel as users have them, on the threading layer that was asked for."""
    import numba

    @numba.njit(parallel=True)  # type: ignore[untyped-decorator]
    def total(n: int) -> int:
        s = 0
        for i in numba.prange(n):
            s += i
        return s

    assert total(1000) == 499500
    assert numba.threading_layer() == os.environ["NUMBA_THREADING_LAYER"]


def several_threads() -> None:
    """Call from four Python threads at once, many times."""
    layer()
    expected = [right(call) for call in range(len(CALLS))]
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait()
        for n in range(25):
            call = (n + thread) % len(CALLS)
            assert bits(call) == expected[call], (thread, n, call)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, thread) for thread in range(4)]:
            done.result()


def one_call() -> None:
    """Make a call."""
    right(1)


def first_call_in_several_threads() -> None:
    """Let four threads race to compile, load and start everything."""
    start = threading.Barrier(4)

    def work(call: int) -> bytes:
        start.wait()
        return bits(call)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, [0, 1, 0, 1]))
    assert results == [right(0), right(1)] * 2


def _in_fork(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"


def fork() -> None:
    """Call, fork, call in the child, in the child's child, and in the parent again."""
    layer()
    expected = [right(call) for call in range(len(CALLS))]

    def child() -> None:
        assert [bits(call) for call in range(len(CALLS))] == expected
        _in_fork(grandchild)

    def grandchild() -> None:
        assert bits(1) == expected[1]

    _in_fork(child)
    assert [bits(call) for call in range(len(CALLS))] == expected
    _in_fork(child)


def fork_before_the_first_call() -> None:
    """Let parent and child each make the first call on their own."""
    _in_fork(lambda: right(0))
    right(0)


def fork_while_a_thread_calls() -> None:
    """Fork again and again while another thread is inside a call."""
    layer()
    expected = [right(call) for call in range(len(CALLS))]
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            assert bits(0) == expected[0]

    def child() -> None:
        assert bits(1) == expected[1]

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(work)
        try:
            for _ in range(8):
                _in_fork(child)
        finally:
            stop.set()
        busy.result()


def fork_during_the_first_call() -> None:
    """Fork while another thread compiles: the child must find no lock closed for ever.

    The thread calls nattn and no more: a fork waits for ever for a product in OpenBLAS, which the
    reference is computed with, and a module half imported by the thread stays so in the child.
    """
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bits, 0)
        time.sleep(0.5)
        _in_fork(lambda: right(0))
        assert first.result() == right(0)


def process_pool(method: str) -> None:
    """Call inside a process pool, after a call in the parent."""
    expected = [right(call) for call in range(len(CALLS))]
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(bits, [0, 1, 2, 3, 0, 1])) == [*expected, *expected[:2]]
    assert bits(0) == expected[0]


def interrupt() -> None:
    """Be interrupted in a call that would take far longer than any test; then call again."""
    # a shell lets what it starts in the background ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    layer()
    n = 1 << 21
    x = np.broadcast_to(np.ones((1, 1, 1, 64), np.float32), (1, 1, n, 64))
    expected = right(1)
    for _ in range(2):
        print("ready", flush=True)
        try:
            nattn.attention(x, x, x, backend="cpu")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        assert right(1) == expected
    print("right", flush=True)


def threads_and_bits() -> None:
    """Compare the bits of every number of threads."""
    import numba

    expected = [right(call) for call in range(len(CALLS))]
    assert numba.config.NUMBA_NUM_THREADS == 5
    for threads in (1, 2, 3, 4, 5):
        numba.set_num_threads(threads)
        assert [bits(call) for call in range(len(CALLS))] == expected, threads


def gradient_bits(call: int) -> bytes:
    """Run a call forward and backward and return the gradients to the last bit."""
    arrays, options = inputs(call)
    out, vjp = nattn.attention_vjp(*arrays, backend="cpu", **options)
    return b"".join(x.tobytes() for x in vjp(out) if x is not None)


def gradients_from_anywhere() -> None:
    """Differentiate in four Python threads, in a forked child and on any number of threads."""
    import numba
    from cases import check_gradients

    layer()
    for call in range(len(CALLS)):
        arrays, options = inputs(call)
        check_gradients("cpu", *arrays, **options)
    expected = [gradient_bits(call) for call in range(len(CALLS))]

    def work(thread: int) -> None:
        for n in range(10):
            call = (n + thread) % len(CALLS)
            assert gradient_bits(call) == expected[call], (thread, n, call)

    def child() -> None:
        assert [gradient_bits(call) for call in range(len(CALLS))] == expected

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, thread) for thread in range(4)]:
            done.result()
    _in_fork(child)
    for threads in (1, 2):
        numba.set_num_threads(threads)
        child()


# Memory


def _peak_rss() -> int:
    with open("/proc/self/status") as status:
        return 1024 * int(next(x for x in status if x.startswith("VmHWM")).split()[1])


def _rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _extra(run: Callable[[], object]) -> int:
    """Return by how many bytes the peak of a run exceeds what was resident before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # resets the peak
    before = _rss()
    run()
    return _peak_rss() - before


def memory(n: int, what: str) -> None:
    """Print the bytes that a call of n queries on n keys takes beyond inputs and output."""
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"backend": "cpu"}
    rows, D = n, 16
    if what == "causal":
        options["causal"] = True
    elif what == "mask":
        options["mask"] = rng.random(n) < 0.9
    elif what == "bias":
        options["bias"] = rng.standard_normal((n, 1)).astype("f4")
    elif what == "window":
        options["window_size"] = (1000, 1000)
    elif what in ("strided", "float16", "bfloat16"):
        rows, D = 64, 64  # a copy of the keys would show, their product with q would not
    q = rng.standard_normal((1, 1, rows, D), dtype=np.float32)
    k, v = (rng.standard_normal((1, 1, n, D), dtype=np.float32) for _ in range(2))
    if "float16" in what:
        q, k, v = (x.astype(storage_dtype(what)) for x in (q, k, v))
    out = np.ones_like(q)  # touched, so that its pages count as there before
    if what == "strided":
        k, v = (x.reshape(1, 1, D, n).transpose(0, 1, 3, 2)[:, :, ::-1] for x in (k, v))

    def small(name: str) -> Any:
        x = options.get(name)
        return x[:64] if isinstance(x, np.ndarray) else x

    warm = {name: small(name) for name in options}
    nattn.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], out=out[:, :, :64], **warm)
    print(_extra(lambda: nattn.attention(q, k, v, out=out, **options)))


def memory_of_gradients(n: int, what: str) -> None:
    """Print the bytes that the gradients of n queries on n keys take, results included."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, n, 16), dtype=np.float32)
    options: dict[str, Any] = {"causal": what == "causal"}
    wrt: tuple[str, ...] = ("q", "k", "v")
    if what == "bias":
        options["bias"] = rng.standard_normal((1, n), dtype=np.float32)
        wrt = (*wrt, "bias")
    small = options | ({"bias": options["bias"][:, :64]} if what == "bias" else {})
    out, vjp = nattn.attention_vjp(*(x[:, :, :64] for x in (q, k, v)), backend="cpu", **small)
    vjp(out, wrt=wrt)
    out, vjp = nattn.attention_vjp(q, k, v, backend="cpu", **options)
    print(_extra(lambda: vjp(out, wrt=wrt)))


def show_info() -> None:
    """Print what the CPU backend says of itself."""
    print(json.dumps(load_backend("cpu").info()))


def window_reads() -> None:
    """Decode with a window over arrays of which all the rest cannot be read."""
    page, row, n = mmap.PAGESIZE, 64 * 4, 4096
    libc = ctypes.CDLL(None, use_errno=True)
    q = np.ones((1, 2, 3, 64), np.float32)
    arrays = []
    for _ in "kv":
        memory = mmap.mmap(-1, n * row)
        x = np.frombuffer(memory, np.float32).reshape(1, 1, n, 64)
        x[...] = 1.0
        seen = n - 2048  # the window of the first row, on the beginning of a page
        assert seen * row % page == 0
        assert libc.mprotect(ctypes.c_void_p(x.ctypes.data), seen * row, 0) == 0
        arrays.append(x)
    out = nattn.attention(q, *arrays, window_size=(2045, 0))
    assert (out == 1.0).all(), out


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        window_reads,
        several_threads,
        first_call_in_several_threads,
        one_call,
        fork,
        fork_before_the_first_call,
        fork_while_a_thread_calls,
        fork_during_the_first_call,
        process_pool,
        interrupt,
        threads_and_bits,
        memory,
        gradients_from_anywhere,
        memory_of_gradients,
        show_info,
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*(int(x) if x.isdecimal() else x for x in sys.argv[2:]))
