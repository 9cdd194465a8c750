"""The cuda backend's forward pass on tiny cases, in numba-cuda's simulator: no GPU is needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from cuda_cases import FORWARD
from cuda_simulated import Simulator

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)


@pytest.fixture(scope="module")
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    """Start the cases that were selected."""
    here = [item for item in request.session.items if item.path == request.path]
    found = Simulator("FORWARD", [item.callspec.params["name"] for item in here])  # type: ignore[attr-defined]
    yield found
    found.close()


@pytest.mark.parametrize("name", FORWARD)
def test_case(simulator: Simulator, name: str) -> None:
    error = simulator.error(name)
    if error:
        pytest.fail(error, pytrace=False)
