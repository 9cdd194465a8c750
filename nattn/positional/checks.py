"""Checks that the schemes share."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..call.checks import check_integer, host_array
from ..vectors.dtypes import FLOAT32, FLOAT64


def number(name: str, value: Any, least: float, *, above: bool = False) -> float:
    """Return a float from a finite number that is large enough."""
    expected = f"a finite number {'above' if above else 'of at least'} {least:g}"
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    x = float(value)
    if not math.isfinite(x) or x < least or (above and x == least):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return x


def floats(name: str, value: Any) -> NDArray[Any]:
    """Return an array of native float32 or float64 in host memory."""
    array = host_array(name, value)
    native = array.dtype.newbyteorder("=")
    if native not in (FLOAT32, FLOAT64):
        raise TypeError(f"{name}: expected dtype float32 or float64, got {array.dtype}")
    return array.astype(native, copy=False)


def placed_rows(name: str, value: Any, width: int, offset: Any) -> tuple[NDArray[Any], int]:
    """Return an array ``(..., N, width)`` and the position of its first row."""
    x = floats(name, value)
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(f"{name}: expected shape (..., N, {width}), got {x.shape}")
    expected = "the position of the first row, 0 or more"
    first = check_integer("offset", offset, expected)
    if first < 0:
        raise ValueError(f"offset: expected {expected}, got {first}")
    return x, first
