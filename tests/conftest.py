"""What all tests share: the backends, processes of their own, and the hypothesis profile."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import children
import pytest
from hypothesis import settings

# Derandomised: a run that fails can be repeated, and what passed once does not fail on others.
settings.register_profile("nattn", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("nattn")


@pytest.fixture(params=["reference", "cpu"])
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
