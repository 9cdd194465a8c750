"""Which number types nattn stores and computes in."""

from __future__ import annotations

import functools
import importlib
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

BIAS = (FLOAT16, FLOAT32, FLOAT64)
"""NumPy's own types of a bias, which is rounded to the compute type as it is read."""

BFLOAT16_BITS = np.dtype([("bfloat16", np.uint16)])
"""Stands for bfloat16 where ml_dtypes, whose type it is in NumPy, is not installed."""


@functools.cache
def bfloat16() -> np.dtype:
    """Return the dtype of bfloat16: that of ml_dtypes if it is installed, else a stand-in."""
    try:
        found: np.dtype = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        return BFLOAT16_BITS
    return found


def storage_dtype(name: str) -> np.dtype:
    """Return the dtype of a storage type by its name."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def storage_name(dtype: np.dtype) -> str | None:
    """Return the name of a storage type, None for another dtype; of any byte order."""
    if dtype.kind == "f":
        return _NAMES.get(dtype.char)
    if dtype.itemsize == 2 and dtype.kind == "V":
        return "bfloat16" if dtype == BFLOAT16_BITS or dtype.name == "bfloat16" else None
    return None


_NAMES = {"e": "float16", "f": "float32", "d": "float64"}


def show(dtype: np.dtype) -> str:
    """Return what to call a dtype in an error."""
    return "bfloat16" if dtype == BFLOAT16_BITS else str(dtype)


def widen(x: NDArray[Any]) -> NDArray[Any]:
    """Return bfloat16 numbers, exactly, as float32; other arrays as they are."""
    if storage_name(x.dtype) != "bfloat16":
        return x
    bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(x.shape)


def compute_dtype(storage: str) -> np.dtype:
    """Return the dtype that a storage type is computed in."""
    return FLOAT64 if storage == "float64" else FLOAT32


def gradient_dtype(dtype: np.dtype, compute: np.dtype) -> np.dtype:
    """Return the dtype of a gradient of numbers of a dtype; that of integers is computed in."""
    if dtype.kind == "f":
        return dtype.newbyteorder("=")
    return dtype if storage_name(dtype) == "bfloat16" else compute


def compute_name(dtype: np.dtype) -> str:
    """Return the name of the compute dtype of a storage dtype; NumPy takes ten microseconds."""
    return "float64" if dtype.itemsize == 8 else "float32"


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a real floating type, one that NumPy does not know included."""
    return dtype.kind == "f" or "float" in dtype.name


def round_to(value: float, dtype: np.dtype) -> float:
    """Round a float to a compute dtype, as a Python float.

    Unlike ``np.float32(value)`` this never warns, whatever ``np.seterr`` says.

    Raises
    ------
    OverflowError
        If a finite value is too large for the dtype.
    """
    if dtype == FLOAT64:
        return value
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def default_scale(D: int) -> float:
    """Return ``1 / sqrt(D)``, which restores the unit variance of a dot product."""
    return 1.0 / math.sqrt(D)
