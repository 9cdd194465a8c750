"""A call on keys and values in a cache: the cache and what is added to it, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..vectors import dtypes
from .arguments import Arguments
from .checks import host_array, overlaps_itself, share_memory
from .pages import Pages
from .problem import Problem
from .quantised import quantise

INT8 = np.dtype(np.int8)
OWN = ("layout", "kv_lens")
"""Arguments of `nattn.attention` that a cache has an answer to itself."""

Place = tuple[NDArray[np.int64], NDArray[np.int64]]
"""For each row its item, or its page, and where it is in that."""


class Store(NamedTuple):
    """Keys and values, and where they are in int8 the scale of each row.

    Attributes
    ----------
    k, v : ndarray
        ``(B, S, Hkv, D)`` or, of a pool, ``(pages, page_size, Hkv, D)``, and the same with ``Dv``.
    k_scales, v_scales : ndarray of float32 or None
        Of their shapes without the last axis.
    """

    k: NDArray[Any]
    v: NDArray[Any]
    k_scales: NDArray[np.float32] | None = None
    v_scales: NDArray[np.float32] | None = None

    @property
    def quantised(self) -> bool:
        """Whether numbers are in int8."""
        return self.k_scales is not None

    def read(self, at: Any) -> Store:
        """Return a copy of some rows."""
        return Store(*(None if x is None else x[at] for x in self))  # type: ignore[arg-type]

    def write(self, at: Any, rows: Store) -> None:
        """Write some rows."""
        for to, x in zip(self, rows, strict=True):
            if to is not None:
                to[at] = x


def make_store(
    shape: tuple[int, int, int], D: int, Dv: int, dtype: np.dtype, quantised: bool
) -> Store:
    """Return new arrays of 0, the rows of each head together: ``(shape[0], Hkv, shape[1], D)``.

    Parameters
    ----------
    shape : tuple of int
        ``(B, S, Hkv)`` or ``(pages, page_size, Hkv)``.
    D, Dv : int
        Lengths of a key and a value.
    dtype : dtype
        Of the numbers, if they are not quantised.
    quantised : bool
        Whether they are in int8.
    """
    n, size, heads = shape
    kind = INT8 if quantised else dtype
    rows = [np.zeros((n, heads, size, width), kind).swapaxes(1, 2) for width in (D, Dv)]
    if not quantised:
        return Store(rows[0], rows[1])
    scales = [np.zeros((n, heads, size), np.float32).swapaxes(1, 2) for _ in range(2)]
    return Store(rows[0], rows[1], scales[0], scales[1])


def check_store(
    q: NDArray[Any], k: Any, v: Any, k_scales: Any, v_scales: Any, *, paged: bool
) -> Store:
    """Check that a cache fits queries.

    Raises
    ------
    ValueError, TypeError
        If a shape or dtype does not fit q, ``(B, Nq, Hq, D)``.
    """
    k, v = host_array("k_cache", k), host_array("v_cache", v)
    axes = "pages, page_size" if paged else f"{q.shape[0]}, S"
    B, _, Hq, D = q.shape
    if k.ndim != 4 or k.shape[3] != D or not (paged or k.shape[0] == B) or D == 0:
        raise ValueError(
            f"k_cache: expected shape ({axes}, Hkv, {D or 'D'}) to fit q {q.shape}, got {k.shape}"
        )
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        expected = ", ".join(map(str, k.shape[:3]))
        raise ValueError(
            f"v_cache: expected shape ({expected}, Dv) to fit k_cache {k.shape}, got {v.shape}"
        )
    Hkv = k.shape[2]
    if Hq % Hkv if Hkv else Hq:
        raise ValueError(
            f"k_cache, v_cache: expected a number of heads that divides the {Hq} heads of q, got "
            f"{Hkv} (q {q.shape}, k_cache {k.shape})"
        )
    if paged and k.shape[1] == 0:
        raise ValueError(f"k_cache: expected pages of at least one key, got shape {k.shape}")
    quantised = k_scales is not None or v_scales is not None
    own = q.dtype.newbyteorder("=")
    for name, x in (("k_cache", k), ("v_cache", v)):
        if x.dtype != (INT8 if quantised else own):
            what = "int8 beside k_scales and v_scales" if quantised else f"{own} as of q"
            hint = " without k_scales and v_scales" if x.dtype == INT8 else ""
            raise TypeError(
                f"{name}: expected dtype {what}, in native byte order, got {x.dtype.str}{hint}"
                if x.dtype.kind in "iufc"
                else f"{name}: expected dtype {what}, in native byte order, got {x.dtype}"
            )
    if not quantised:
        return Store(k, v)
    scales = []
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        if x is None:
            raise TypeError(f"{name}: expected an array, as of the other cache in int8, got None")
        found = host_array(name, x)
        if found.dtype != dtypes.FLOAT32:
            raise TypeError(f"{name}: expected dtype float32, got {found.dtype.str}")
        if found.shape != k.shape[:3]:
            raise ValueError(f"{name}: expected shape {k.shape[:3]}, got {found.shape}")
        scales.append(found)
    return Store(k, v, scales[0], scales[1])


def check_queries(q: Any) -> NDArray[Any]:
    """Return queries if they are ``(B, Nq, Hq, D)`` and of a float dtype."""
    found = host_array("q", q)
    if found.ndim != 4:
        raise ValueError(f"q: expected shape (B, Nq, Hq, D), got {found.shape}")
    if dtypes.storage_name(found.dtype) is None:
        expected = "dtype float16, bfloat16, float32 or float64"
        raise TypeError(f"q: expected {expected}, got {found.dtype}")
    return found


def check_own(args: Arguments) -> None:
    """Raise if there is an argument that a cache answers itself."""
    for name in OWN:
        if name in args:
            said = "always (B, N, H, D)" if name == "layout" else "that of the cache"
            raise TypeError(f"{name}: expected none beside a cache, for it is {said}")


def check_rows(
    k_new: Any, v_new: Any, B: int, Hkv: int, D: int, Dv: int, dtype: np.dtype
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return new keys and values, in native byte order, if they fit a cache.

    Raises
    ------
    ValueError, TypeError
        If one is missing, or is not ``(B, N, Hkv, D)`` or ``(B, N, Hkv, Dv)`` of the dtype.
    """
    found = []
    n: Any = "N"
    for name, x, width in (("k_new", k_new, D), ("v_new", v_new, Dv)):
        if x is None:
            raise TypeError(f"{name}: expected keys and values, or none of both, got None")
        x = host_array(name, x)
        if (
            x.ndim != 4
            or (x.shape[0], *x.shape[2:]) != (B, Hkv, width)
            or n not in ("N", x.shape[1])
        ):
            expected = f"({B}, {n}, {Hkv}, {width})"
            raise ValueError(f"{name}: expected shape {expected}, got {x.shape}")
        if x.dtype.newbyteorder("=") != dtype:
            raise TypeError(
                f"{name}: expected dtype {dtypes.show(dtype)}, got {dtypes.show(x.dtype)}"
            )
        n = x.shape[1]
        found.append(x.astype(dtype, copy=False))
    return found[0], found[1]


def rows_to_store(k: NDArray[Any], v: NDArray[Any], quantised: bool) -> Store:
    """Return rows as they are stored: new ones in int8 with scales, or those that were given.

    Raises
    ------
    ValueError
        If they cannot be stored in int8.
    """
    if not quantised:
        return Store(k, v)
    (k, k_scales), (v, v_scales) = quantise("k_new", k), quantise("v_new", v)
    return Store(k, v, k_scales, v_scales)


def check_writable(store: Store, others: dict[str, NDArray[Any] | None]) -> None:
    """Raise unless a cache can be written to without changing anything else."""
    arrays = dict(zip(("k_cache", "v_cache", "k_scales", "v_scales"), store, strict=True))
    for name, x in arrays.items():
        if x is None:
            continue
        if not x.flags.writeable:
            raise ValueError(
                f"{name}: expected a writeable array beside k_new, got a read-only one"
            )
        if overlaps_itself(x):
            raise ValueError(
                f"{name}: expected an element of memory for each number, got strides {x.strides} "
                f"for shape {x.shape}, which overlap"
            )
    seen = dict(others)
    for name, x in arrays.items():
        for other, y in seen.items():
            if x is not None and y is not None and share_memory(x, y):
                raise ValueError(
                    f"{name}: expected memory of its own beside k_new, got an array that overlaps "
                    f"{other}"
                )
        seen[name] = x


def places(
    pages: Pages | None,
    begins: NDArray[np.int64],
    n: int,
    real: NDArray[np.bool_] | None = None,
) -> Place:
    """Return where n keys of each item go, after so many others.

    That is two arrays ``(B, n)`` or, of the keys that are `real` alone, of one axis.
    """
    at = begins[:, None] + np.arange(n)
    items = np.broadcast_to(np.arange(len(begins))[:, None], at.shape)
    if real is not None:
        items, at = items[real], at[real]
    if pages is None or at.size == 0:
        return items, at
    return pages.table[items, at // pages.page_size], at % pages.page_size


def check_apart(at: Place, page_size: int) -> None:
    """Raise if two sequences would write to the same row of a page."""
    rows = (at[0] * page_size + at[1]).ravel()
    if len(np.unique(rows)) < rows.size:
        page = int(np.sort(rows)[:-1][np.diff(np.sort(rows)) == 0][0]) // page_size
        raise ValueError(
            "block_table: expected a page of its own where a sequence is added to, got page "
            f"{page} for several"
        )


def build(
    q: NDArray[Any],
    store: Store,
    lengths: NDArray[np.int64],
    pages: Pages | None,
    args: Arguments,
    **others: NDArray[Any] | None,
) -> Problem:
    """Return the problem of queries on a cache.

    Parameters
    ----------
    q : ndarray
        ``(B, Nq, Hq, D)``.
    store : Store
        The cache, checked.
    lengths : ndarray of int64
        ``(B,)``: how many keys each item has; ``Nk`` is the largest.
    pages : Pages or None
        Where they lie, checked; None if item ``b`` of the cache has them in order.
    args : dict
        Further arguments of `nattn.attention`.
    **others : ndarray or None
        Further arrays that are read, by name.

    Raises
    ------
    ValueError, TypeError
        As `Problem.build` does.
    """
    Nk = int(lengths.max(initial=0))
    more: Arguments = {**args, "kv_lens": lengths, "layout": "bnhd"}
    k, v, k_scales, v_scales = store
    if pages is None:
        k, v = k[:, :Nk], v[:, :Nk]
        if store.quantised:
            k_scales, v_scales = k_scales[:, :Nk], v_scales[:, :Nk]  # type: ignore[index]
    if pages is None and not store.quantised:
        problem = Problem.build(q, k, v, **more)
    else:
        B, Hkv = q.shape[0], k.shape[2]
        shapes = [(B, Nk, Hkv, x.shape[3]) for x in (k, v)]
        k0, v0 = (np.ndarray(s, q.dtype, bytes(8), strides=(0, 0, 0, 0)) for s in shapes)
        problem = Problem.build(q, k0, v0, **more)
        problem.__dict__.update(  # no one else has seen it yet
            k=k.swapaxes(1, 2),
            v=v.swapaxes(1, 2),
            pages=pages,
            k_scales=None if k_scales is None else k_scales.swapaxes(1, 2),
            v_scales=None if v_scales is None else v_scales.swapaxes(1, 2),
        )
    inputs = {"k_cache": store.k, "v_cache": store.v, "k_scales": store.k_scales}
    problem.inputs.update(inputs, v_scales=store.v_scales, **others)
    return problem
