"""The first minutes on a GPU: every kernel against the reference, and its speed against the card.

    python bench/gpu_check.py

needs a checkout with the package installed with its extras "test" and "cuda13" (or "cuda12"), and
is meant to take less than five minutes. It prints what it runs on, runs the checks of
tests/test_cuda_gpu.py in several processes (compiling takes the time), some of them once more under
compute-sanitizer if that is found, and then measures: the card's own limits, attention forward,
backward and decoding, and torch's attention if torch is there. The last thing that it prints is a
table in Markdown. The exit status is 1 if a check failed, 2 if there is no GPU.

``--simulate`` goes through all of that on tiny sizes in numba-cuda's simulator, where figures mean
nothing: so this script is tested where there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import operator
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Sampler = Callable[[], float]

cuda: Any = None
"""numba.cuda, imported by `use_numba`: kernels find it here, in the simulator its stand-in."""


def use_numba() -> None:
    """Import numba.cuda, once it is known whether to simulate."""
    global cuda
    cuda = importlib.import_module("numba.cuda")


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument(
        "--simulate", action="store_true", help="tiny sizes in the simulator: tests this script"
    )
    found.add_argument(
        "--minutes",
        type=float,
        default=2.0,
        help="time for the checks; what did not get its turn is reported as not run (%(default)s)",
    )
    found.add_argument(
        "--workers", type=int, help="processes that check (the processors, at most 12)"
    )
    found.add_argument("--rounds", type=int, default=7, help="rounds that count (%(default)s)")
    found.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only checks with this in their name; may be repeated",
    )
    found.add_argument("--list", action="store_true", help="list the checks, and do nothing")
    found.add_argument("--no-checks", action="store_true", help="measure only")
    found.add_argument("--no-speed", action="store_true", help="check only")
    found.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    found.add_argument(
        "--here", action="store_true", help="check one after the other, in this process"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.simulate:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported, here and in workers
        os.environ["PYTHONWARNINGS"] = "ignore::RuntimeWarning"  # NumPy's, of what is not finite
    for folder in (ROOT, ROOT / "tests"):
        if (folder / "nattn").exists() or folder.name == "tests":
            sys.path.insert(0, str(folder))
    started = time.perf_counter()
    from nattn.backends import load as load_backend

    try:
        load_backend("cuda")
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    use_numba()
    names = chosen(options.only)
    if options.list:
        print("\n".join(names))
        return 0
    if not names and not options.no_checks:
        print(f"gpu_check: no check is called {options.only}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    rows: list[Row] = []
    if not options.no_checks:
        rows += checked(names, options)
        if not (options.no_sanitizer or options.simulate or options.here):
            rows += sanitized()
    if not options.no_speed:
        rows += speeds(options)
    print(f"\n{table(rows)}\n\n{time.perf_counter() - started:.0f} s in all")
    return 1 if any(row.failed for row in rows) else 0


# The table


@dataclass
class Row:
    """A line of the table.

    Attributes
    ----------
    what, result : str
        What was done, and what came of it.
    of_limit, peer : str
        Part of the card's own limit, and of torch's speed, for what was measured.
    failed : bool
        Whether something is wrong.
    """

    what: str
    result: str
    of_limit: str = ""
    peer: str = ""
    failed: bool = False


def table(rows: Iterable[Row]) -> str:
    """Return all rows as one table in Markdown."""
    cells = [["what", "result", "of the limit", "x torch"]]
    cells += [[row.what, row.result, row.of_limit, row.peer] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [cell.rjust(width) if n else cell.ljust(width) for n, (cell, width) in enumerate(pairs)]
        for pairs in (zip(line, widths, strict=True) for line in [cells[0], rule, *cells[1:]])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> dict[str, str]:
    """Return what all of this runs on."""
    found = {"python": platform.python_version()}
    for name in ("nattn", "numba", "numba-cuda", "cuda-toolkit", "numpy", "torch", "cupy-cuda13x"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if simulated():
        return found | {"GPU": "simulated: figures mean nothing"}
    device = cuda.get_current_device()
    name = device.name
    found["GPU"] = name.decode() if isinstance(name, bytes) else str(name)
    found["compute capability"] = ".".join(map(str, device.compute_capability))
    found["multiprocessors"] = str(device.MULTIPROCESSOR_COUNT)
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        found["driver, highest clock"] = text.strip().splitlines()[0]
    return found


def simulated() -> bool:
    """Whether kernels run in the simulator."""
    return bool(importlib.import_module("numba.core.config").ENABLE_CUDASIM)


# The checks


def checks() -> dict[str, Any]:
    """Return the checks of tests/test_cuda_gpu.py by name."""
    found: dict[str, Any] = importlib.import_module("test_cuda_gpu").CHECKS
    return found


def chosen(only: list[str] | None) -> list[str]:
    """Return the names of the checks to run."""
    names = list(checks())
    if only is not None:
        return [name for name in names if any(text in name for text in only)]
    # what was made for the simulator is left to ``pytest -m gpu``: it compiles the same kernels
    names = [name for name in names if not name.startswith("tiny ")]
    return names[:: len(names) // 4] if simulated() else names


def run_check(name: str) -> tuple[str, str]:
    """Run one check; return "passed", "failed", "broke" or "skipped", and a text about it."""
    check = checks()[name]
    if check.needs is not None:
        if importlib.util.find_spec(check.needs) is None:
            return "skipped", f"{check.needs} is not installed"
        if not importlib.import_module(check.needs).cuda.is_available():
            return "skipped", f"{check.needs} sees no GPU"
    try:
        check.run()
    except AssertionError as error:
        return "failed", str(error) or traceback.format_exc()
    except Exception:  # after an error of CUDA's a process can do no more
        return "broke", traceback.format_exc()
    return "passed", ""


def work(connection: multiprocessing.connection.Connection, path: list[str]) -> None:
    """Run checks by name, as a process of their own, until there are none."""
    sys.path[:] = path
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (name := connection.recv()) is not None:
            connection.send(run_check(name))


class Worker:
    """A process that checks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, sys.path), daemon=True)
        self.process.start()
        other.close()
        self.name: str | None = None

    def start(self, name: str) -> None:
        """Begin a check."""
        self.name = name
        self.connection.send(name)

    def result(self) -> tuple[str, str]:
        """Return what came of it."""
        try:
            found: tuple[str, str] = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            found = "broke", f"the process ended with status {self.process.exitcode}"
        return found

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass
class Outcomes:
    """What came of the checks."""

    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)

    def add(self, name: str, status: str, text: str) -> None:
        """Note what came of one, and say so where it failed."""
        if status == "passed":
            self.passed += 1
        elif status == "skipped":
            self.skipped.setdefault(text, []).append(name)
        else:
            self.failures[name] = text
            print(f"\nFAILED {name}\n{text.rstrip()}", flush=True)

    def rows(self) -> Iterator[Row]:
        """Yield lines of the table."""
        count = self.passed + len(self.failures)
        text = f"{self.passed} of {count} passed"
        yield Row("checks against the reference", text, failed=bool(self.failures))
        names = list(self.failures)
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            yield Row(f"failed: {'; '.join(names[:4])}{more}", "FAILED", failed=True)
        for reason, names in self.skipped.items():
            yield Row(f"checks skipped: {reason}", str(len(names)))
        if self.not_run:
            yield Row("checks not run for lack of time", str(len(self.not_run)))


def checked(names: list[str], options: argparse.Namespace) -> list[Row]:
    """Run the checks in several processes and return the rows that tell of them."""
    from nattn.applications.measure import processors

    outcomes = Outcomes()
    end = time.monotonic() + 60 * options.minutes
    if options.here:
        for name in names:
            outcomes.add(name, *run_check(name))
        return list(outcomes.rows())
    count = options.workers or min(12, processors())
    waiting = deque(names)
    workers = [Worker() for _ in range(min(count, len(waiting)))]
    try:
        busy = set()
        for worker in workers:
            worker.start(waiting.popleft())
            busy.add(worker)
        while busy:
            left = end - time.monotonic()
            ready = multiprocessing.connection.wait([w.connection for w in busy], max(left, 0.0))
            if not ready:
                break
            for worker in [w for w in busy if w.connection in ready]:
                name, (status, text) = worker.name or "", worker.result()
                outcomes.add(name, status, text)
                busy.remove(worker)
                if waiting and time.monotonic() < end:
                    if status == "broke":
                        worker.stop()
                        workers.remove(worker)
                        worker = Worker()
                        workers.append(worker)
                    worker.start(waiting.popleft())
                    busy.add(worker)
        outcomes.not_run += [*(w.name or "" for w in busy), *waiting]
    finally:
        for worker in workers:
            worker.stop()
    if outcomes.not_run:
        print(f"\nnot run: {'; '.join(outcomes.not_run)}")
    return list(outcomes.rows())


SANITIZED = ("float32, D=64, causal", "float16, D=80, causal", "float32, D=64, few queries")
TOOLS = ("memcheck", "racecheck")


def sanitized() -> list[Row]:
    """Run a few checks under each tool of compute-sanitizer, if it is there."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return [Row("compute-sanitizer", "not found")]
    rows = []
    for tool in TOOLS:
        only = [part for name in SANITIZED for part in ("--only", name)]
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
        command += ["--here", "--no-speed", *only]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            rows.append(Row(f"compute-sanitizer {tool}", "not ended within 30 s"))
            continue
        if done.returncode:
            print(f"\ncompute-sanitizer {tool}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
        result = "nothing found" if done.returncode == 0 else f"FAILED ({done.returncode})"
        rows.append(Row(f"compute-sanitizer {tool}", result, failed=done.returncode != 0))
    return rows


# Speed


@dataclass(frozen=True)
class Shape:
    """One call to be measured."""

    what: str
    storage: str
    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    causal: bool = False
    backward: bool = False
    asked: float | None = None  # TFLOP/s

    def flops(self) -> float:
        """Return the operations for visible scores: two products forward, five backward."""
        pairs = self.Nq * self.Nk
        if self.causal:
            pairs = sum(max(0, min(self.Nk, i + 1 + self.Nk - self.Nq)) for i in range(self.Nq))
        return (10.0 if self.backward else 4.0) * self.B * self.Hq * pairs * self.D

    def bytes_read(self) -> float:
        """Return the bytes of keys and values."""
        size = {"float64": 8, "float32": 4}.get(self.storage, 2)
        return 2.0 * self.B * self.Hkv * self.Nk * self.D * size


def shapes() -> list[Shape]:
    """Return what is measured."""
    if simulated():
        return [
            Shape("float32 D=4 causal", "float32", 1, 1, 1, 5, 5, 4, causal=True, asked=25),
            Shape("float16 D=4, gradients", "float16", 1, 1, 1, 4, 4, 4, backward=True),
            Shape("decode, float16", "float16", 1, 2, 1, 1, 9, 4),
        ]
    found = []
    for D in (64, 128):
        for causal in (False, True):
            text = f"N=8192 D={D}{' causal' if causal else ''}"
            asked = 25.0 if D == 64 else None
            found.append(
                Shape(f"float32 {text}", "float32", 1, 8, 8, 8192, 8192, D, causal, asked=asked)
            )
    for storage in ("bfloat16", "float16", "float64"):
        text = f"{storage} N=8192 D=128 causal" if storage != "float64" else "float64 N=4096 D=64"
        N, D = (4096, 64) if storage == "float64" else (8192, 128)
        found.append(Shape(text, storage, 1, 8, 8, N, N, D, storage != "float64"))
    for storage, D in (("float32", 64), ("float32", 128), ("bfloat16", 128)):
        text = f"{storage} N=4096 D={D} causal, gradients"
        found.append(Shape(text, storage, 1, 8, 8, 4096, 4096, D, True, backward=True))
    for storage, B, Nk in (("float16", 16, 8192), ("bfloat16", 1, 131072), ("float32", 16, 8192)):
        text = f"decode, {storage}, B={B} Hq=32 Hkv=8 Nq=1 Nk={Nk} D=128"
        found.append(Shape(text, storage, B, 32, 8, 1, Nk, 128))
    return found


def timed(call: Callable[[], Any], at_least: float = 0.03) -> Sampler:
    """Return a sampler of the seconds that a call takes on the GPU, between two events."""

    def seconds(times: int) -> float:
        start, end = cuda.event(), cuda.event()
        begun = time.perf_counter()
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        if simulated():
            return (time.perf_counter() - begun) / times
        return float(cuda.event_elapsed_time(start, end)) / 1e3 / times

    if not simulated():
        call()  # compiles
    once = seconds(1)
    times = max(1, round(at_least / max(once, 1e-6)))
    return lambda: seconds(times)


def fma_loop(dtype: str) -> tuple[Callable[..., None], int]:
    """Return a kernel of nothing but fused multiply-adds, and how many a turn of its loop has."""
    import numpy as np

    number = getattr(np, dtype)
    one, half = number(1), number(0.5)

    def kernel(out: Any, turns: Any) -> None:
        i = cuda.grid(1)
        x = number(i) * half
        a, b, c, d, e, f, g, h = x, x + one, x - one, x * half, x, x + half, x - half, x
        for _ in range(turns):
            for _ in range(8):
                a, b = a * half + one, b * half + one
                c, d = c * half + one, d * half + one
                e, f = e * half + one, f * half + one
                g, h = g * half + one, h * half + one
        out[i] = a + b + c + d + e + f + g + h

    return kernel, 64


def limits() -> tuple[dict[str, Sampler], dict[str, str]]:
    """Return samplers of the card's own limits: operations or bytes a second, and their names."""
    import numpy as np

    samplers: dict[str, Sampler] = {}
    names: dict[str, str] = {}
    threads = 4 if simulated() else 256
    blocks = 1 if simulated() else 8 * cuda.get_current_device().MULTIPROCESSOR_COUNT
    turns = 1 if simulated() else 4096

    def rate(call: Callable[[], Any], work: float) -> Sampler:
        sample = timed(call)
        return lambda: work / sample()

    for dtype in ("float32", "float64"):
        kernel, count = fma_loop(dtype)
        compiled = cuda.jit(kernel)
        out = cuda.device_array(threads * blocks, dtype)
        run = launcher(compiled, blocks, threads, out, turns)
        samplers[f"fma {dtype}"] = rate(run, 2.0 * count * turns * threads * blocks)
        names[f"fma {dtype}"] = f"limit: multiply-adds, {dtype}"
    size = 1 << (8 if simulated() else 28)
    one, other = (cuda.device_array(size, np.float32) for _ in range(2))
    samplers["copy"] = rate(lambda: one.copy_to_device(other), 8.0 * size)
    names["copy"] = "limit: device-to-device copy"
    library, ones = matrices()
    for dtype, n in (("float32", 4096), ("float16", 8192)) if ones is not None else ():
        x = ones(n, dtype)
        samplers[f"matmul {dtype}"] = rate(functools.partial(operator.matmul, x, x), 2.0 * n**3)
        names[f"matmul {dtype}"] = f"{library}'s matrix product, {dtype}"
    return samplers, names


def matrices() -> tuple[str, Any]:
    """Return a library with matrix products, and what makes square matrices of it, or None."""
    torch = torch_on_gpu()
    if torch is not None:
        return "torch", lambda n, dtype: torch.ones(
            (n, n), device="cuda", dtype=getattr(torch, dtype)
        )
    if not simulated() and importlib.util.find_spec("cupy") is not None:
        cupy = importlib.import_module("cupy")
        return "CuPy", lambda n, dtype: cupy.ones((n, n), dtype)
    return "", None


def launcher(kernel: Any, blocks: int, threads: int, *arguments: Any) -> Callable[[], None]:
    """Return what launches a kernel."""
    return lambda: kernel[blocks, threads](*arguments)


def torch_on_gpu() -> Any:
    """Return torch if it is there and sees a GPU, else None."""
    if simulated() or importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def inputs(shape: Shape) -> list[Any]:
    """Return q, k, v and dout on the GPU: torch's tensors if there is torch."""
    import numpy as np
    from test_cuda_gpu import Foreign

    from nattn.vectors import dtypes

    sizes = [(shape.B, shape.Hq, shape.Nq, shape.D), *[(shape.B, shape.Hkv, shape.Nk, shape.D)] * 2]
    sizes.append(sizes[0])
    torch = torch_on_gpu()
    if torch is not None:
        dtype = getattr(torch, shape.storage)
        return [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    rng = np.random.default_rng(0)
    dtype = dtypes.storage_dtype(shape.storage)
    return [Foreign(rng.standard_normal(size, np.float32).astype(dtype)) for size in sizes]


def contestants(shape: Shape) -> dict[str, Sampler]:
    """Return samplers of seconds: nattn's, and torch's if it can do the call."""
    import nattn

    q, k, v, dout = inputs(shape)
    found = {}
    if shape.backward:
        _, vjp = nattn.attention_vjp(q, k, v, causal=shape.causal)
        found["nattn"] = timed(lambda: vjp(dout))
    else:
        found["nattn"] = timed(lambda: nattn.attention(q, k, v, causal=shape.causal))
    torch = torch_on_gpu()
    if torch is not None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        options = {"is_causal": shape.causal, "enable_gqa": shape.Hq != shape.Hkv}
        try:
            if shape.backward:
                leaves = [x.requires_grad_() for x in (q, k, v)]
                out = sdpa(*leaves, **options)
                found["torch"] = timed(
                    lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
                )
            else:
                found["torch"] = timed(lambda: sdpa(q, k, v, **options))
        except RuntimeError as error:
            print(f"torch, {shape.what}: {error}")
    return found


def speeds(options: argparse.Namespace) -> list[Row]:
    """Measure, all contestants in turns, and return the rows that tell of it."""
    from nattn.applications.measure import interleave

    rounds = 1 if options.simulate else options.rounds
    rows = []
    own, names = limits()
    samples = interleave(own, rounds, warmup=0 if options.simulate else 1)
    for name, text in names.items():
        value = statistics.median(samples.values[name])
        unit = "GB/s" if name == "copy" else "TFLOP/s"
        rows.append(Row(text, f"{value / (1e9 if unit == 'GB/s' else 1e12):.3g} {unit}"))
    for shape in shapes():
        decode = shape.Nq == 1
        limit = (
            "copy" if decode else f"fma {'float64' if shape.storage == 'float64' else 'float32'}"
        )
        try:
            samplers = contestants(shape)
            samplers["limit"] = own[limit]
            samples = interleave(samplers, rounds, warmup=0 if options.simulate else 1)
        except Exception:  # the other rows go on
            print(f"\nFAILED {shape.what}\n{traceback.format_exc()}")
            rows.append(Row(shape.what, "FAILED", failed=True))
            continue
        work = shape.bytes_read() if decode else shape.flops()
        value = work / samples.median("nattn")
        unit, scale = ("GB/s", 1e9) if decode else ("TFLOP/s", 1e12)
        of_limit = work / samples.product("nattn", "limit")
        peer = f"{samples.ratio('torch', 'nattn'):.2f}" if "torch" in samplers else "-"
        asked = "" if shape.asked is None else f" ({shape.asked:.0f})"
        rows.append(
            Row(shape.what, f"{value / scale:.3g}{asked} {unit}", f"{100 * of_limit:.0f}%", peer)
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
