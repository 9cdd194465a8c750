"""Kernels with the tiles of any processor, on the one at hand: LLVM splits or pads vectors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nattn.backends.cpu import launch, launch_backward, launch_decode, tiles

_CHOSEN = (
    tiles.bfloat16_product,
    tiles.choose_tile,
    tiles.decode_tile,
    tiles.block_kv,
    tiles.backward_block_kv,
    launch.plan,
    launch_decode.plan_decode,
    launch_backward.plan_backward,
)


def _forget() -> None:
    for cache in _CHOSEN:
        cache.cache_clear()


@contextmanager
def tiles_of(family: str) -> Iterator[None]:
    """Choose tiles as on a processor of a family, a key of `tiles.FAMILIES`."""
    host = tiles.cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "cpu", lambda: tiles.Cpu(host.name, host.features, family))
        _forget()
        try:
            yield
        finally:
            _forget()


@contextmanager
def bfloat16_as(product: str) -> Iterator[None]:
    """Multiply bfloat16 numbers as NATTN_BFLOAT16 would ask for: see `tiles.BFLOAT16_PRODUCTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NATTN_BFLOAT16", product)
        _forget()
        try:
            yield
        finally:
            _forget()
