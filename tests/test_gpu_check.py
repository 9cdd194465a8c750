"""bench/gpu_check.py: all that it does but on a GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import children
import pytest
import test_cuda_gpu

from nattn import backends

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script as a module; it changes the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def needs_numba_cuda() -> None:
    try:
        metadata.version("numba-cuda")
    except metadata.PackageNotFoundError:
        pytest.skip("numba-cuda is not installed")


def why_no_gpu() -> str | None:
    try:
        backends.load("cuda")
    except RuntimeError as error:
        return str(error)
    return None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=children.environment(NUMBA_ENABLE_CUDASIM="0"),
        capture_output=True,
        text=True,
        timeout=300,  # a hang is a failure too
        check=False,
    )


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of the table by those of the first column."""
    lines = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    assert cells
    assert all(len(row) == 4 for row in cells)
    return {row[0]: row[1:] for row in cells}


def test_it_runs_in_the_simulator(script: ModuleType) -> None:
    needs_numba_cuda()
    done = run("--simulate", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    passed = re.fullmatch(r"(\d+) of (\d+) passed", rows["checks against the reference"][0])
    assert passed
    assert int(passed[1]) == int(passed[2]) >= 3
    assert rows["limit: device-to-device copy"][0].endswith("GB/s")
    for what in ("float32 D=4 causal", "float16 D=4, gradients", "decode, float16"):
        assert re.fullmatch(r"\S+( \(25\))? (TFLOP|GB)/s", rows[what][0])
        assert rows[what][1].endswith("%")


def test_it_says_what_is_missing() -> None:
    missing = why_no_gpu()
    if missing is None:
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode == 2
    assert missing in done.stderr


def test_a_wrong_command_line() -> None:
    assert run("--minutes", "many").returncode == 2
    needs_numba_cuda()
    done = run("--simulate", "--only", "no such check")
    assert done.returncode == 2
    assert "no such check" in done.stderr


class Fake:
    """A check."""

    needs = None

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def run(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [AssertionError("too far"), RuntimeError("unspecified failure")])
def test_a_check_that_fails(
    error: Exception,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"good": Fake(), "bad": Fake(error), "last": Fake()}
    monkeypatch.setattr(backends, "load", lambda name: None)
    monkeypatch.setattr(script, "machine", dict)
    monkeypatch.setattr(script, "simulated", lambda: False)
    monkeypatch.setattr(script, "checks", lambda: found)
    assert script.main(["--here", "--no-speed", "--only", "bad", "--only", "good"]) == 1
    text = capsys.readouterr().out
    assert "FAILED bad\n" in text
    assert str(error) in text
    rows = rows_of(text)
    assert rows["checks against the reference"][0] == "1 of 2 passed"
    assert rows["failed: bad"][0] == "FAILED"
    assert script.main(["--here", "--no-speed", "--only", "good"]) == 0


def test_what_is_sanitized_exists(script: Any) -> None:
    if not test_cuda_gpu.SIMULATED:
        assert set(script.SANITIZED) <= set(test_cuda_gpu.CHECKS)
        assert set(script.chosen(None)) >= set(script.SANITIZED)


def test_flops(script: Any) -> None:
    shape = script.Shape("x", "float16", 2, 6, 3, 4, 7, 8)
    assert shape.flops() == 4 * 2 * 6 * 4 * 7 * 8
    assert shape.bytes_read() == 2 * 2 * 3 * 7 * 8 * 2
    causal = script.Shape("x", "float32", 1, 1, 1, 3, 4, 1, causal=True, backward=True)
    assert causal.flops() == 10 * (2 + 3 + 4)


def test_the_loop_of_multiply_adds_is_one(script: Any) -> None:
    """Nothing is left out of it, and no multiplication is apart from its addition."""
    needs_numba_cuda()
    from numba import cuda, types

    script.use_numba()
    for dtype, name in (("float32", "f32"), ("float64", "f64")):
        kernel, count = script.fma_loop(dtype)
        signature = types.void(getattr(types, dtype)[::1], types.int64)
        code, _ = cuda.compile(
            kernel, signature, device=False, abi="numba", output="ptx", cc=(9, 0)
        )
        text = code if isinstance(code, str) else code.decode()
        loops = re.findall(r"^(\$L\w+):\n((?:(?!^\$L).*\n)*?).*bra(?:\.uni)?\s+\1;", text, re.M)
        assert max(body.count(f"fma.rn.{name}") for _, body in loops) % count == 0
        assert max(body.count(f"fma.rn.{name}") for _, body in loops) > 0
