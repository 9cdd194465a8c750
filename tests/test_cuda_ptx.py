"""The forward kernels, compiled for real: no stack, no spills, and mostly multiply-adds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from cuda_ptx import MOST, STORAGE, check_resources, compiled, functions, inner_loops

from nattn.backends.cuda import forward, target, tiles

if target.SIMULATED:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

FOR_90 = {("bfloat16", 128, True)}  # the backward pass has a plain one and one of float32

FORWARD = [
    *((storage, D, every) for storage in STORAGE for D in (64, 128) for every in (False, True)),
    *((storage, 256, False) for storage in STORAGE if storage != "float64"),
    ("bfloat16", 256, True),  # which decodes what it reads, too
]
# By head dimension, with nothing done to scores: some 5 % above what they take.
CEILINGS = {64: 216, 128: 192, 256: 176}
# Their tiles differ from each other in width and in what is stored, and in nothing else.
FEW = [
    ("float32", 64, True),
    ("float64", 128, True),
    ("float16", 256, False),
    ("bfloat16", 64, False),
]


def kernel(storage: str, D: int, everything: bool, few: bool = False, wide: bool = True) -> Any:
    tile = tiles.query_tile(storage, D, wide, few)
    return forward.forward_kernel(tile, functions(storage, everything, derive=False))


@pytest.mark.parametrize(("storage", "D", "everything"), FORWARD)
def test_forward(storage: str, D: int, everything: bool) -> None:
    for_90 = (storage, D, everything) in FOR_90
    ceiling = MOST if storage == "float64" or everything else CEILINGS[D]
    check_resources(kernel(storage, D, everything), forward.ARGS, for_90, ceiling)


@pytest.mark.parametrize(("storage", "D", "everything"), FEW)
def test_few_queries(storage: str, D: int, everything: bool) -> None:
    check_resources(kernel(storage, D, everything, few=True), forward.ARGS)


def test_rows_that_are_read_one_by_one() -> None:
    check_resources(kernel("bfloat16", 64, everything=False, wide=False), forward.ARGS)


@pytest.mark.parametrize("storage", STORAGE)
def test_merge(storage: str) -> None:
    check_resources(forward.merge_kernel(storage), forward.ARGS)


def test_the_inner_loops_multiply_and_add() -> None:
    loops = inner_loops(compiled(kernel("float32", 64, everything=False), forward.ARGS))

    def products(loop: list[str]) -> int:
        return sum(line.startswith("fma.rn.f32") for line in loop)

    # Q K and P V; and P V once more, which selects what is visible where a value is not finite
    of_products = [loop for loop in loops if products(loop) >= 32]
    plain = [loop for loop in of_products if not any(x.startswith("selp.f32") for x in loop)]
    assert (len(of_products), len(plain)) == (3, 2)
    for loop in plain:
        assert products(loop) >= 0.7 * len(loop), "\n".join(loop)
