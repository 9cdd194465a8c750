"""The backward kernels, compiled for real: no stack and no spills."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from cuda_ptx import MOST, STORAGE, check_resources, functions

from nattn.backends.cuda import (
    backward,
    backward_keys,
    backward_queries,
    backward_sums,
    target,
    tiles,
)

if target.SIMULATED:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

FOR_90 = {"queries": ("float32", 64, False), "keys": ("bfloat16", 128, True)}

# By head dimension, with nothing done to scores: some 5 % above what they take.
OF_QUERIES = {64: 160, 128: 192}
OF_KEYS = {64: 212, 128: 208}

CALLS = [(storage, D, every) for storage in STORAGE for D in (64, 128) for every in (False, True)]


@pytest.mark.parametrize(("storage", "D", "everything"), CALLS)
def test_of_queries(storage: str, D: int, everything: bool) -> None:
    tile = tiles.row_tile(storage, D, wide=True)
    kernel = backward_queries.query_kernel(tile, functions(storage, everything, derive=True))
    ceiling = MOST if storage == "float64" or everything else OF_QUERIES[D]
    check_resources(kernel, backward.ARGS, (storage, D, everything) == FOR_90["queries"], ceiling)


@pytest.mark.parametrize(("storage", "D", "everything"), CALLS)
def test_of_keys_and_values(storage: str, D: int, everything: bool) -> None:
    tile = tiles.key_tile(storage, D, wide=True)
    kernel = backward_keys.key_kernel(tile, functions(storage, everything, derive=True))
    ceiling = MOST if storage == "float64" or everything else OF_KEYS[D]
    check_resources(kernel, backward.ARGS, (storage, D, everything) == FOR_90["keys"], ceiling)


@pytest.mark.parametrize(
    ("storage", "everything"), [("float32", False), ("float64", True), ("bfloat16", True)]
)
def test_of_a_bias(storage: str, everything: bool) -> None:
    tile = tiles.pair_tile(storage, wide=True)
    kernel = backward_queries.bias_kernel(
        tile, functions(storage, everything, derive=True), "float32"
    )
    check_resources(kernel, backward.ARGS)


@pytest.mark.parametrize("storage", STORAGE)
def test_delta(storage: str) -> None:
    check_resources(backward_sums.delta_kernel(storage), backward.ARGS)


@pytest.mark.parametrize("make", ["sink_kernel", "slope_kernel"])
@pytest.mark.parametrize("storage", ["float32", "float64"])
def test_sums(storage: str, make: str) -> None:
    check_resources(getattr(backward_sums, make)(storage, storage), backward.ARGS)
