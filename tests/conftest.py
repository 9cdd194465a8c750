"""What all tests share: the backends, processes of their own, and the hypothesis profile."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable

import children
import pytest
from hypothesis import settings

from nattn.api import load_backend

# Derandomised: a run that fails can be repeated, and what passed once does not fail on others.
settings.register_profile("nattn", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("nattn")


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


@pytest.fixture
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
