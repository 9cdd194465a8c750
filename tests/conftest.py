"""What all tests share: the backends, processes of their own, and the hypothesis profile."""

from __future__ import annotations

import functools
import gc
import subprocess
from collections.abc import Callable

import children
import pytest
from hypothesis import settings

from nattn.backends import load as load_backend

# Derandomised: a run that fails can be repeated, and what passed once does not fail on others.
settings.register_profile("nattn", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("nattn")


LONGEST = [
    "test_cuda_ptx",
    "test_promises",
    "test_cuda_ptx_backward",
    "test_cuda_simulator_backward",
    "test_cpu_tiles",
    "test_cpu_kernel",
    "test_cuda_simulator",
    "test_diagnostics",
    "test_cpu_score",
    "test_api",
    "test_gradients",
    "test_bugs",
    "test_explain",
    "test_learning",
    "test_reference",
    "test_nn",
    "test_positional",
]
"""Files that take longest, the first first. Of two processes one begins with kernels of GPUs and
the other with those of the CPU, so that neither compiles what the other is compiling."""


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist, where it is, take files in their order, not by their number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first: at the end no process waits for another for long."""
    place = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Collect garbage less often: compilers make millions of objects that live for seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@functools.cache
def why_no_gpu() -> str | None:
    """Return what is missing for the cuda backend; None with a GPU, and in the simulator."""
    try:
        load_backend("cuda")
    except RuntimeError as error:
        return str(error)
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") is not None and (reason := why_no_gpu()) is not None:
        pytest.skip(reason)


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend keeps the same contract, so every test of the contract runs on each."""
    return str(request.param)


@pytest.fixture(
    params=[
        ("reference", "float64"),  # it computes in float64 whatever it is given
        *(("cpu", dtype) for dtype in ("float32", "float64", "float16", "bfloat16")),
        *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu) for dtype in ("float32", "float64")),
    ],
    ids="-".join,
)
def computed(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return a backend, and a dtype in which it computes."""
    backend, dtype = request.param
    return backend, dtype


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def tiled(request: pytest.FixtureRequest) -> str:
    """Return a backend that cuts a call into tiles: the reference has no edges of blocks."""
    return str(request.param)


@pytest.fixture(scope="session")
def child() -> Callable[..., str]:
    """Run a scenario of children.py in a process of its own and return what it printed."""

    def run(scenario: str, *arguments: object, **environment: str) -> str:
        done = subprocess.run(
            children.command(scenario, *arguments),
            env=children.environment(**environment),
            capture_output=True,
            text=True,
            timeout=300,  # a hang is a failure too
            check=False,
        )
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
