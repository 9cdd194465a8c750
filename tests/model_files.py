"""Files of weights in any dtype, made without the libraries that know it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nattn.vectors.dtypes import BFLOAT16_BITS

Array = NDArray[Any]

FLOATS = ("F16", "BF16", "F32", "F64")
"""What safetensors calls the dtypes in which floats are kept."""

_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "C64": "<c8", "BOOL": "?"}


def narrowed(x: Array, dtype: str) -> Array:
    """Return numbers that have been rounded to a dtype, as float64; bfloat16 is cut off."""
    if dtype == "BF16":
        return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(float)
    return x.astype(_NUMPY[dtype]).astype(float)


def stored(x: Array, dtype: str) -> Array:
    """Return numbers in a dtype; bfloat16 as its bits."""
    if dtype == "BF16":
        bits = x.astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(BFLOAT16_BITS).reshape(x.shape)
    if dtype == "F8_E4M3":
        return np.zeros(x.shape, np.uint8)
    return x.astype(_NUMPY[dtype])


def safetensors_bytes(
    state: Mapping[str, Array], dtypes: Mapping[str, str], text: str | None = None
) -> bytes:
    """Return a file of the format: the length of a header, the header in JSON, and the numbers.

    Parameters
    ----------
    state : mapping
        Arrays by name.
    dtypes : mapping
        What the format calls the dtype of each, F32 by default.
    text : str, optional
        What its metadata say under "nattn".
    """
    header: dict[str, Any] = {} if text is None else {"__metadata__": {"nattn": text}}
    numbers = b""
    for name, x in state.items():
        dtype = dtypes.get(name, "F32")
        own = stored(x, dtype).tobytes()
        ends = [len(numbers), len(numbers) + len(own)]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": ends}
        numbers += own
    first = json.dumps(header).encode()
    return len(first).to_bytes(8, "little") + first + numbers
