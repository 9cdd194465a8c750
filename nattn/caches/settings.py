"""What the caches have in common: the settings they are made with, and checks of what they get."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..call import cached
from ..call.arguments import Arguments
from ..call.cached import Store
from ..call.checks import (
    Window,
    check_count,
    check_integer,
    check_integers,
    float_dtype,
    show,
)
from ..call.pages import Pages
from ..call.quantised import CacheError, attention_error, dequantise
from ..call.validators import check_window
from ..vectors import dtypes


class Cache:
    """Sizes and dtype of the rows of a cache, and the arrays that hold them."""

    Hkv: int
    D: int
    Dv: int
    dtype: np.dtype
    quantize: str | None
    _store: Store

    def _configure(self, Hkv: Any, D: Any, Dv: Any, dtype: Any, quantize: Any) -> None:
        self.Hkv, self.D = check_count("Hkv", Hkv), check_count("D", D)
        self.Dv = self.D if Dv is None else check_count("Dv", Dv)
        self.dtype = float_dtype("dtype", dtype, narrow=True)
        self.quantize = check_quantize(quantize)

    def _new_store(self, n: int, size: int) -> Store:
        shape = (n, size, self.Hkv)
        return cached.make_store(shape, self.D, self.Dv, self.dtype, self.quantize is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, whether they are full or not."""
        return sum(x.nbytes for x in self._store if x is not None)

    @property
    def k(self) -> NDArray[Any]:
        """A view of the keys, until the arrays grow; with `quantize` their int8 codes.

        In one piece it is ``(batch, capacity, Hkv, D)``, and key ``j`` is row ``j``, or row
        ``j % capacity`` with a window; of a pool ``(pages, page_size, Hkv, D)``.
        """
        return self._store.k

    @property
    def v(self) -> NDArray[Any]:
        """The same of values, with ``Dv`` columns."""
        return self._store.v

    @property
    def k_scales(self) -> NDArray[np.float32] | None:
        """Scales of keys in int8: of the shape of `k` without the last axis."""
        return self._store.k_scales

    @property
    def v_scales(self) -> NDArray[np.float32] | None:
        """Scales of values in int8."""
        return self._store.v_scales

    # What is given to a cache

    def _rows(
        self, k_new: Any, v_new: Any, lens: Any, B: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Return new keys and values if they fit, and how many of each item there are."""
        size = B, self.Hkv, self.D, self.Dv
        k, v = cached.check_rows(k_new, v_new, *size, self.dtype)
        n = k.shape[1]
        found = [n] * B if lens is None else check_integers("lens", lens, B)
        for b, x in enumerate(found):
            if not 0 <= x <= n:
                raise ValueError(f"lens: expected lengths from 0 to {n}, got {x} for item {b}")
        return k, v, np.array(found, np.int64)

    def _stored(self, k: Any, v: Any, real: NDArray[np.bool_] | None) -> Store:
        """Return rows as they are stored, without those that are not real."""
        if real is not None:
            k, v = k[real], v[real]
        return cached.rows_to_store(k, v, self.quantize is not None)

    def _read(
        self, begin: Any, lengths: NDArray[np.int64], oldest: int, pages: Pages | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return copies of the keys and values from one on, if they are not written over."""
        most = int(lengths.max(initial=0))
        expected = f"a key from {oldest} to {most}"
        first = check_integer("begin", begin, expected)
        if not oldest <= first <= most:
            raise ValueError(f"begin: expected {expected}, got {first}")
        n = most - first
        items, at = cached.places(pages, np.full(len(lengths), first), n)
        size = self._store.k.shape[1]
        rows = self._store.read((items, at if pages else at % size))
        found = [rows.k, rows.v]
        if rows.k_scales is not None and rows.v_scales is not None:
            scales = rows.k_scales, rows.v_scales
            found = [dequantise(x, s, self.dtype) for x, s in zip(found, scales, strict=True)]
        real = mask_of(np.clip(lengths - first, 0, None), n)
        if real is not None:
            for x in found:
                x[~real] = 0
        return found[0], found[1]

    def _queries(self, q: Any, B: int) -> NDArray[Any]:
        """Return queries if they fit."""
        q = cached.check_queries(q)
        if q.shape[0] != B or q.shape[2] % self.Hkv or q.shape[3] != self.D:
            heads = f"a multiple of {self.Hkv} heads"
            raise ValueError(
                f"q: expected shape ({B}, Nq, Hq, {self.D}) with {heads}, got {q.shape}"
            )
        if q.dtype.newbyteorder("=") != self.dtype:
            expected, got = dtypes.show(self.dtype), dtypes.show(q.dtype)
            raise TypeError(f"q: expected dtype {expected} as of the cache, got {got}")
        found: NDArray[Any] = q
        return found

    def _error(
        self,
        largest: list[NDArray[Any]],
        q: Any,
        scale: float | None,
        B: int,
    ) -> CacheError:
        """Bound what rounding to 8 bits changes; `largest` are scales ``(B, Hkv)``, if any."""
        k, v = largest or (np.zeros((B, self.Hkv)),) * 2
        return attention_error(k, v, None if q is None else self._queries(q, B), scale)


def check_quantize(quantize: Any) -> str | None:
    """Return how a cache is to store numbers: "int8", or None for as they are."""
    if quantize is None or (isinstance(quantize, str) and quantize == "int8"):
        return quantize
    kind = ValueError if isinstance(quantize, str) else TypeError
    raise kind(f"quantize: expected None or 'int8', got {show(quantize)}")


def check_items(items: Any, B: int) -> list[int]:
    """Return numbers of batch items, each of which may be there several times."""
    expected = f"a list of numbers of items from 0 to {B - 1}"
    if not hasattr(items, "__len__") or isinstance(items, (str, bytes, dict)):
        raise TypeError(f"items: expected {expected}, got {show(items)}")
    found = check_integers("items", items, len(items))
    for x in found:
        if not 0 <= x < B:
            raise ValueError(f"items: expected {expected}, got {x}")
    return found


def within(window: int, args: Arguments) -> Window:
    """Return the window of a call on a cache that keeps a window of keys.

    Raises
    ------
    ValueError, TypeError
        If it reaches farther to the left.
    """
    given = args.get("window_size")
    if given is None:
        return window, 0
    left, right = check_window(given)
    if left is None or left > window:
        raise ValueError(
            f"window_size: expected at most {window} keys to the left, as many as the cache keeps, "
            f"got {show(given)}"
        )
    return left, right


def mask_of(lens: NDArray[np.int64], n: int) -> NDArray[np.bool_] | None:
    """Return which of n rows of each item are real, None if all are."""
    if int(lens.min(initial=n)) == n:
        return None
    real: NDArray[np.bool_] = np.arange(n) < lens[:, None]
    return real
