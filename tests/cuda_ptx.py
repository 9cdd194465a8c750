"""Kernels compiled for real: their PTX, and what NVIDIA's assembler makes of it. No GPU is needed.

One PTX, compiled for compute capability 8.0, is assembled for 8.0 and for 9.0: that is what a
driver does with it. `FOR_90` names kernels that are compiled for 9.0 besides.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import gate, in_step, qkv
from cuda_cases import blocks_of

from nattn.call.problem import Problem
from nattn.vectors.dtypes import storage_dtype

STORAGE = ("float32", "float64", "float16", "bfloat16")
MOST = 255
"""Registers that a thread can have."""
SHARED = 48 * 1024
"""Bytes of shared memory that a block may have without asking for more."""


@functools.cache
def ptxas() -> str | None:
    """Return the path of the assembler: that of the environment's own package, or on PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "ptxas":
            return str(file.locate())
    return shutil.which("ptxas")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, and bytes."""

    registers: int
    stack: int
    spilled: int
    shared: int


def assemble(ptx: str, arch: str) -> Resources:
    """Assemble PTX and return what the kernel in it takes, or any function that it calls."""
    program = ptxas()
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [program, "-v", f"-arch={arch}", str(source), "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    log = done.stderr

    def largest(pattern: str) -> int:
        return max((int(x) for x in re.findall(pattern, log)), default=0)

    found = Resources(
        registers=largest(r"Used (\d+) registers"),
        stack=largest(r"(\d+) bytes (?:stack frame|cumulative stack size)"),
        spilled=largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads"),
        shared=largest(r"(\d+) bytes smem"),
    )
    assert found.registers > 0, log
    return found


@functools.cache
def compiled(kernel: Any, cls: Any, cc: tuple[int, int] = (8, 0)) -> str:
    """Return the PTX of a kernel; `cls` is the NamedTuple of its arguments."""
    text: str = kernel.ptx(cls._make([1] * (len(cls._fields) - 2) + [1.0, 1.0]), cc)
    return text


def check_resources(kernel: Any, cls: Any, for_90: bool = False, ceiling: int = MOST) -> None:
    """Assert that a kernel stays in registers, in `ceiling` of them, and in shared memory."""
    if ptxas() is None:
        pytest.skip("no ptxas is found, in the package nvidia-cuda-nvcc or on PATH")
    ptx = compiled(kernel, cls)
    texts = {"sm_80": ptx, "sm_90": ptx}
    if for_90:
        texts["sm_90, compiled for it"] = compiled(kernel, cls, (9, 0))
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda arch: assemble(texts[arch], arch.split(",")[0]), texts)
        for arch, taken in zip(texts, found, strict=True):
            assert (taken.stack, taken.spilled) == (0, 0), f"{arch}: {taken}"
            assert taken.registers <= ceiling, f"{arch}: {taken}"
            assert taken.shared <= SHARED, f"{arch}: {taken}"


def functions(storage: str, everything: bool, derive: bool) -> Any:
    """Return what a call does with its scores: nothing, or all that there is."""
    from nattn.backends.cuda.specialization import functions_of

    q, k, v = (x.astype(storage_dtype(storage)) for x in qkv(1, 2, 8, 8, 4))
    options: dict[str, Any] = {}
    if everything:
        comb = functools.partial(in_step, step=3)
        options = {
            "softcap": 5.0,
            "alibi_slopes": np.ones(2),
            "score_mod": functools.partial(gate, gain=0.75),
            "block_mask": blocks_of(comb, 1, 2, 8, 8, 4),
            "mask": np.ones((8, 8), bool),
            "bias": np.zeros((8, 8), np.float32),
            "dropout_p": 0.5,
            "seed": 1,
        }
    return functions_of(Problem.build(q, k, v, **options), derive)


def inner_loops(ptx: str) -> list[list[str]]:
    """Return the instructions of each innermost loop, by the label that is branched back to."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    labels = {line[:-1]: n for n, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if target and labels.get(target[1], end) < end:
            loops.append((labels[target[1]], end))
    inner = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    return [
        [x for x in lines[first : last + 1] if x.endswith(";") and not x.startswith(".")]
        for first, last in inner
    ]
