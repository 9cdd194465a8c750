"""Attention over keys and values that come in chunks: from files, or from whoever makes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..call.arguments import Arguments
from ..call.checks import Array, Integers, Scale, Window, check_count, check_name, host_array, show
from ..call.problem import Problem
from ..call.progress import Progress
from .functional import _forward
from .merging import merge_states

CHUNK_BYTES = 32 << 20
"""Bytes of keys and values that are read at once, where arrays are given whole."""

Chunk = tuple[Any, Any]


def attention_stream(
    q: Array,
    kv_chunks: Iterable[Chunk] | Chunk,
    *,
    causal: bool = False,
    q_offset: Integers | None = None,
    window_size: Window | None = None,
    scale: Scale | None = None,
    softcap: Scale | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    layout: str = "bhnd",
    chunk_size: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Any:
    """Attention over keys and values that need not fit in memory.

    They come in chunks along the sequence, each of which is read once. While one is computed with,
    the next is fetched by another thread. What `nattn.attention` makes of each is merged as by
    `nattn.merge_states`, in their order.

    Parameters
    ----------
    q : array_like
        Queries, as in `nattn.attention`, in host memory.
    kv_chunks : iterable of (k, v), or a pair of arrays (k, v)
        Chunks, of any and different lengths, each as k and v in `nattn.attention`. An iterator is
        advanced by another thread, and never farther than one chunk ahead. Or k and v themselves:
        whatever has ``shape`` and gives an array for a slice of it, such as `numpy.memmap` and
        arrays of zarr and h5py.
    causal, window_size, scale, softcap, alibi_slopes, sinks, layout, backend
        As in `nattn.attention`. Keys are counted through all chunks. (Its other arguments speak of
        single keys or pairs, of all at once.)
    q_offset : int or (B,) integers, optional
        The position of query 0 among all keys. By default the last query sits on the last key.
        Chunks of an unknown number of keys need it where it matters: with `causal`, a window or
        slopes.
    chunk_size : int, optional
        Keys of a chunk, where k and v are given whole; by default about 32 MiB of both.
    return_lse : bool, default False
        Whether lse is wanted, too.
    progress : callable, optional
        Called with the fraction that is done, after each chunk. Their number has to be known: k and
        v whole, or chunks that have a ``len``.

    Returns
    -------
    out : ndarray
        As in `nattn.attention`; with ``return_lse=True`` it is ``(out, lse)``.

    Raises
    ------
    ValueError, TypeError
        For bad input; for a chunk that does not fit when its turn comes, with its number.

    Notes
    -----
    Between chunks outputs are not rounded to 16 bits. Cutting the keys differently changes the
    result within its error budget. Arrays are not copied, those of mapped files neither: of the
    chunk after the one at hand the system is told that it will be wanted.

    Merging is that of Flash-Decoding: see `nattn.merge_states`.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 500, 64), dtype=np.float32)
    >>> pieces = ((k[:, n : n + 128], v[:, n : n + 128]) for n in range(0, 500, 128))
    >>> out = nattn.attention_stream(q, pieces, causal=True, q_offset=0)
    >>> bool(np.allclose(out, nattn.attention(q, k, v, causal=True), atol=1e-5))
    True
    >>> whole = nattn.attention_stream(q, (k, v), causal=True, chunk_size=200)
    >>> bool(np.allclose(out, whole, atol=1e-5))
    True
    """
    q = host_array("q", q)
    check_name("layout", layout, ("bhnd", "bnhd"))
    axis = 1 if layout == "bnhd" else -2
    if layout == "bnhd" and q.ndim != 4:
        raise ValueError(f"q: expected shape (B, N, H, D) with layout='bnhd', got {q.shape}")
    n_chunks = len(kv_chunks) if isinstance(kv_chunks, Sized) else None
    places = causal or window_size is not None or alibi_slopes is not None
    chunks: Iterator[Chunk]
    if _is_pair_of_arrays(kv_chunks):
        k, v = kv_chunks
        n_keys, size = _lengths(k, v, axis, chunk_size)
        n_chunks = max(1, -(-n_keys // size))
        chunks = _slices(k, v, axis, size)
        if q_offset is None:
            q_offset = n_keys - q.shape[axis]
    else:
        if chunk_size is not None:
            raise TypeError(
                f"chunk_size: expected None beside chunks that are made already, got {chunk_size}"
            )
        if q_offset is None and places:
            raise TypeError(
                "q_offset: expected where query 0 sits among all keys, for chunks of which the "
                "number of keys is not known and with causal, window_size or alibi_slopes, got None"
            )
        chunks = _checked(kv_chunks)
    if progress is not None and n_chunks is None:
        raise TypeError(
            "progress: expected None for chunks without a len, whose number is not known, got "
            f"{show(progress)}"
        )
    args: Arguments = {
        "causal": causal,
        "window_size": window_size,
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    head_major = _head_major(q, layout)
    offset = np.asarray(0 if q_offset is None else q_offset)
    state: tuple[NDArray[Any], NDArray[Any]] | None = None
    done = 0
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(_fetch, chunks)
        while (chunk := ahead.result()) is not None:
            ahead = thread.submit(_fetch, chunks)
            args["q_offset"] = offset
            try:
                k, v = (_head_major(x, layout) for x in chunk)
                new = _attend(head_major, k, v, backend, args, state)
            except (ValueError, TypeError) as error:
                raise type(error)(f"kv_chunks[{done}]: {error}") from error
            state = new if state is None else merge_states(*zip(state, new, strict=True))
            args["sinks"] = None  # which count once
            offset = offset - k.shape[-2]
            done += 1
            if progress is not None:
                progress(min(1.0, done / (n_chunks or 1)))
    if state is None:
        raise ValueError("kv_chunks: expected at least one chunk, got none")
    with np.errstate(all="ignore"):
        out = state[0].astype(q.dtype.newbyteorder("="), copy=False)
    out = _head_major(out, layout)
    return (out, state[1]) if return_lse else out


def _head_major(x: NDArray[Any], layout: str) -> NDArray[Any]:
    """Exchange heads and rows, if the layout has them so; there and back."""
    if layout == "bhnd":
        return x
    if x.ndim != 4:
        raise ValueError(f"expected shape (B, N, H, D) with layout='bnhd', got {x.shape}")
    return x.transpose(0, 2, 1, 3)


def _is_pair_of_arrays(given: Any) -> bool:
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    return pair and all(hasattr(x, "shape") and hasattr(x, "__getitem__") for x in given)


def _lengths(k: Any, v: Any, axis: int, chunk_size: int | None) -> tuple[int, int]:
    """Return the number of keys, and that of a chunk."""
    for name, x in (("k", k), ("v", v)):
        if len(x.shape) not in ((4,) if axis == 1 else (2, 3, 4)):
            expected = "(B, N, H, D) with layout='bnhd'" if axis == 1 else "(..., N, D)"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    n_keys, n_values = int(k.shape[axis]), int(v.shape[axis])
    if n_keys != n_values:
        raise ValueError(f"v: expected as many rows as k has, {n_keys}, got {n_values}")
    if chunk_size is not None:
        return n_keys, check_count("chunk_size", chunk_size)
    row = sum(np.dtype(x.dtype).itemsize * int(np.prod(x.shape)) // max(1, n_keys) for x in (k, v))
    return n_keys, max(1, CHUNK_BYTES // max(1, row))


def _slices(k: Any, v: Any, axis: int, size: int) -> Iterator[Chunk]:
    """Yield k and v in slices; of no keys, one that is empty."""
    before = (slice(None),) * (axis if axis > 0 else len(k.shape) + axis)
    for begin in range(0, max(1, k.shape[axis]), size):
        part, following = (
            (*before, slice(n * size, (n + 1) * size)) for n in (begin // size, begin // size + 1)
        )
        for x in (k, v):
            if isinstance(x, np.memmap):
                _read_ahead(x, following)
        yield k[part], v[part]


def _read_ahead(whole: np.memmap[Any, Any], part: Any) -> None:
    """Let the system read a part of a file that will be wanted; a hint, and no more.

    A mapped file is computed with where it lies: a copy would take more time than that saves.
    """
    x = whole[part]
    low, high = np.lib.array_utils.byte_bounds(x)
    scattered = high - low > 4 * x.nbytes
    if x.size == 0 or scattered or whole.filename is None or not hasattr(os, "posix_fadvise"):
        return
    begin = whole.offset + low - np.lib.array_utils.byte_bounds(whole)[0]
    with contextlib.suppress(OSError), open(whole.filename, "rb") as file:
        os.posix_fadvise(file.fileno(), begin, high - low, os.POSIX_FADV_WILLNEED)


def _checked(chunks: Any) -> Iterator[Chunk]:
    """Yield pairs."""
    expected = "an iterable of pairs (k, v), or a pair of arrays"
    if not hasattr(chunks, "__iter__") or isinstance(chunks, (str, bytes, dict)):
        raise TypeError(f"kv_chunks: expected {expected}, got {show(chunks)}")

    def pairs() -> Iterator[Chunk]:
        for n, pair in enumerate(chunks):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"kv_chunks[{n}]: expected a pair (k, v), got {show(pair)}")
            yield pair[0], pair[1]

    return pairs()


def _fetch(chunks: Iterator[Chunk]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return the next chunk in memory, None after the last."""
    for k, v in chunks:
        return host_array("k", k), host_array("v", v)
    return None


def _attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    backend: str,
    args: Arguments,
    state: tuple[NDArray[Any], NDArray[Any]] | None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the state of a chunk that fits the one before: out, before it is rounded, and lse."""
    problem = Problem.build(q, k, v, **args)
    if state is not None and state[0].shape[-1] != problem.Dv:
        expected = f"Dv = {state[0].shape[-1]} as in the chunks before"
        raise ValueError(f"v: expected {expected}, got shape {v.shape}")
    _, lse, out = _forward(problem, None, True, backend, keeps_exact=True)
    return out, lse
