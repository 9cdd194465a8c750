"""Files of arrays: written whole or not at all, and read in any dtype of floats."""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from ..call.optional import require
from ..vectors.dtypes import BFLOAT16_BITS, storage_name, widen
from .states import check_names

Array = NDArray[Any]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the path of a new file, which takes the place of `path` if all goes well.

    Parameters
    ----------
    path : Path
        The file to write.

    Yields
    ------
    Path
        What to write to: a file beside it that has the same ending. After an error it is removed.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replaced(Path(folder) / "a.txt") as part:
    ...         _ = part.write_text("whole")
    ...     (Path(folder) / "a.txt").read_text()
    'whole'
    """
    part = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class Stored(NamedTuple):
    """An array as a file has it.

    Attributes
    ----------
    dtype : str
        What the format calls the type of its numbers.
    shape : tuple of int
        Its shape.
    array : ndarray or None
        Floats as they are stored, those of bfloat16 as float32; None of other types.
    """

    dtype: str
    shape: tuple[int, ...]
    array: Array | None


def show(path: Path) -> str:
    """Return what the error of a file begins with."""
    return f"path {str(path)!r}"


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that ends as one of the formats does."""
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"path: expected one that ends in .npz or .safetensors, got {str(path)!r}")
    return path


def write(path: Path, arrays: Mapping[str, Array], text: str) -> None:
    """Write arrays and a text, in the format that the path's ending names.

    Raises
    ------
    ImportError
        If the library safetensors is wanted and not installed.
    OSError
        If the file cannot be written.
    """
    library = _safetensors("safetensors.numpy") if path.suffix == ".safetensors" else None
    with replaced(path) as part:
        if library is None:
            everything: dict[str, Any] = {**arrays, "config": np.array(text)}
            np.savez(part, **everything)
        else:
            tensors = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
            library.save_file(tensors, part, {"nattn": text})


def read(path: Path) -> tuple[dict[str, Stored], str]:
    """Return the arrays of a file that `write` wrote, and the text.

    Raises
    ------
    ValueError
        If it is no such file, with its path.
    ImportError
        If the library safetensors is wanted and not installed.
    OSError
        If the file cannot be read.
    """
    return _read_npz(path) if path.suffix == ".npz" else read_safetensors(path)


def _read_npz(path: Path) -> tuple[dict[str, Stored], str]:
    raw = io.BytesIO(path.read_bytes())  # an OSError from here on is one of the content
    at, arrays = "", {}
    try:
        file = np.load(raw, allow_pickle=False)
        if not isinstance(file, NpzFile):
            raise ValueError("a single array")
        for name in file.files:
            at = f"{name}: "
            arrays[name] = np.asarray(file[name])
    except Exception as error:  # zipfile, zlib and NumPy have exceptions of their own
        raise ValueError(f"{show(path)}: expected a file .npz, got {at}{error}") from error
    text = str(arrays.pop("config", ""))
    return {name: _stored(x) for name, x in arrays.items()}, text


def _stored(x: Array) -> Stored:
    if x.dtype.kind == "V" and x.dtype.names is None and x.dtype.itemsize == 2:
        x = x.view(BFLOAT16_BITS)  # the one type of two bytes of which NumPy does not write a name
    known = storage_name(x.dtype) is not None
    return Stored(str(x.dtype), x.shape, widen(x) if known else None)


_FLOATS: dict[str, Any] = {"F16": "<f2", "BF16": BFLOAT16_BITS, "F32": "<f4", "F64": "<f8"}


def read_safetensors(path: Path) -> tuple[dict[str, Stored], str]:
    """Return the tensors of a file .safetensors, and what its metadata say under "nattn".

    The library's interface to NumPy knows bfloat16 only once another library has brought it, so
    the bytes are taken as they are.

    Raises
    ------
    ValueError, ImportError, OSError
        As `read` does.
    """
    library = _safetensors("safetensors")
    raw = path.read_bytes()
    try:
        tensors = library.deserialize(raw)
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        text = str((header.get("__metadata__") or {}).get("nattn", ""))
    except Exception as error:  # the library has an exception of its own
        raise ValueError(f"{show(path)}: expected a file .safetensors, got {error}") from error
    found = {}
    for name, tensor in tensors:
        dtype, shape = tensor["dtype"], tuple(tensor["shape"])
        array = None
        if dtype in _FLOATS:
            array = widen(np.ndarray(shape, _FLOATS[dtype], tensor["data"]))
        found[name] = Stored(dtype, shape, array)
    return found, text


def _safetensors(module: str) -> Any:
    return require(module, "safetensors", "a file .safetensors")


def fitted(
    where: str,
    what: str,
    found: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    others: Collection[str] = (),
    apart: Mapping[str, np.dtype] | None = None,
) -> dict[str, Array]:
    """Return the arrays that are wanted in their dtype, after all of them have been checked.

    Parameters
    ----------
    where : str
        What an error begins with: the file.
    what : str
        What the arrays are together, for errors.
    found : mapping
        What `read` returned.
    shapes : mapping
        Names and shapes of all that is wanted.
    dtype : dtype
        float16, bfloat16, float32 or float64.
    others : collection of str
        Names that may be there besides, of whatever dtype and shape.
    apart : mapping, optional
        Names of arrays that are wanted in another dtype, with it.

    Returns
    -------
    dict
        In the order of `shapes`.

    Raises
    ------
    ValueError
        If names are missing or unexpected, or arrays have other shapes, numbers that are no floats
        or, finite, too large for the dtype. All that is wrong is listed.
    """
    check_names(f"{where}: expected {what}", shapes, found.keys() - set(others))
    arrays, wrong, own = {}, [], apart or {}
    for name, shape in shapes.items():
        stored, wanted = found[name], own.get(name, dtype)
        if stored.shape != shape:
            wrong.append(f"{name} of shape {shape}, got {stored.shape}")
        elif stored.array is None:
            floats = "float16, bfloat16, float32 or float64"
            wrong.append(f"{name} of dtype {floats}, got {stored.dtype}")
        else:
            with np.errstate(over="ignore"):
                arrays[name] = array = stored.array.astype(wanted, order="C", copy=False)
            wider = stored.array.dtype.itemsize > wanted.itemsize
            if wider and np.isfinite(stored.array[np.isinf(array)]).any():
                wrong.append(f"{name} of numbers that {wanted} holds, got larger ones")
    if wrong:
        raise ValueError(f"{where}: expected {'; '.join(wrong)}")
    return arrays
