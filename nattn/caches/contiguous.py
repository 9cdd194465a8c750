"""A cache with the keys of each item in one piece, or with a ring of the last ones."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..api import generation
from ..call import cached
from ..call.arguments import Arguments
from ..call.checks import Integers, check_count, check_integers
from ..call.pages import Pages, pages_of
from ..call.quantised import CacheError
from ..call.validators import check_offset
from .settings import Cache, check_items, mask_of, within


class KVCache(Cache):
    """Keys and values of a batch of sequences, which grow as tokens are generated.

    Parameters
    ----------
    batch : int
        Number of sequences.
    Hkv : int
        Number of key heads.
    D, Dv : int
        Lengths of a key and of a value; `Dv` is `D` by default.
    dtype : dtype, default float32
        float16, bfloat16, float32 or float64: of what is appended, and of queries.
    capacity : int, optional
        Keys of a sequence to have room for; 256 by default, with a window as many as that takes.
        When there is no room left it at least doubles.
    window : int, optional
        Keep a ring: a query sees its own key and so many before it, and older ones are written
        over. `window_size` is then ``(window, 0)`` by default, and must not reach farther.
    quantize : {None, "int8"}, default None
        "int8" rounds keys and values to 8 bits, with a scale for each row of each head. `error`
        tells what that changes at most.

    Attributes
    ----------
    lengths : ndarray of int64
        ``(batch,)``: how many keys have been appended to each sequence, and not cut off.

    Raises
    ------
    ValueError, TypeError
        For bad sizes and dtypes, and for rows and queries that do not fit. Nothing changes then.
    ImportError
        For bfloat16 if the library ml_dtypes, which has it, is not installed.

    Notes
    -----
    A ring has room for the window and the chunk that was appended, or `capacity`; what a much
    longer one before took is given back. Append a chunk, attend with its queries, append the next:
    the window of each is there. After `truncate` it is, too, as long as no more is cut off than the
    last chunk.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 50, 8, 64), dtype=np.float32)  # batch, tokens, heads, D
    >>> k, v = rng.standard_normal((2, 2, 50, 2, 64), dtype=np.float32)
    >>> cache = nattn.KVCache(batch=2, Hkv=2, D=64)
    >>> for n in range(50):
    ...     cache.append(k[:, n : n + 1], v[:, n : n + 1])
    ...     out = cache.attend(q[:, n : n + 1])
    >>> whole = nattn.attention(q, k, v, causal=True, layout="bnhd")
    >>> bool(np.allclose(out, whole[:, -1:], atol=1e-6)), cache.lengths
    (True, array([50, 50]))
    """

    def __init__(
        self,
        batch: int,
        Hkv: int,
        D: int,
        Dv: int | None = None,
        *,
        dtype: DTypeLike = np.float32,
        capacity: int | None = None,
        window: int | None = None,
        quantize: str | None = None,
    ) -> None:
        self.batch = check_count("batch", batch, 0)
        self._configure(Hkv, D, Dv, dtype, quantize)
        self.window = None if window is None else check_count("window", window, 0)
        least = 1 if self.window is None else self.window + 1
        room = 256 if self.window is None else least
        if capacity is not None:
            room = max(check_count("capacity", capacity), least)
        self._room = room
        self._store = self._new_store(self.batch, room)
        self._lengths = np.zeros(self.batch, np.int64)
        self._oldest = np.zeros(self.batch, np.int64)  # the first key that is not written over

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many keys each sequence has, ``(batch,)``: a copy."""
        return self._lengths.copy()

    @property
    def capacity(self) -> int:
        """How many keys of a sequence there is room for."""
        return int(self._store.k.shape[1])

    def append(self, k_new: ArrayLike, v_new: ArrayLike, lens: Integers | None = None) -> None:
        """Add keys and values behind those that are there.

        Parameters
        ----------
        k_new, v_new : array_like
            ``(batch, N, Hkv, D)`` and ``(batch, N, Hkv, Dv)`` of the cache's dtype.
        lens : int or (batch,) integers, optional
            How many rows of each sequence are real, from the first on; all by default.
        """
        k, v, lens = self._rows(k_new, v_new, lens, self.batch)
        n = k.shape[1]
        real = mask_of(lens, n)
        rows = self._stored(k, v, real)
        new = self._lengths + lens
        store = self._with_room(int(new.max(initial=0)), int(lens.max(initial=0)))
        items, at = cached.places(None, self._lengths, n, real)
        self._store = store
        store.write((items, at % self.capacity), rows)
        self._lengths = new
        if self.window is not None:
            self._oldest = np.maximum(self._oldest, new - self.capacity)

    def select(self, items: Integers) -> None:
        """Put other sequences of the cache in the place of each, as a search with beams does.

        Parameters
        ----------
        items : sequence of int
            For each sequence from now on which one it was; one may be there several times, and
            `batch` becomes as many. Rows are copied as they are stored.

        Raises
        ------
        ValueError, TypeError
            If there is no such sequence.
        """
        at = np.array(check_items(items, self.batch), np.int64)
        used = min(self.capacity, int(self._lengths.max(initial=0)))
        new = self._new_store(len(at), self.capacity)
        new.write(np.s_[:, :used], self._store.read((at, slice(used))))
        self._store, self.batch = new, len(at)
        self._lengths, self._oldest = self._lengths[at], self._oldest[at]

    def read(self, begin: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the keys and values that are there, as numbers of the cache's dtype.

        Parameters
        ----------
        begin : int, default 0
            The first key of each sequence to return.

        Returns
        -------
        k, v : ndarray
            ``(batch, N - begin, Hkv, D)`` and the same with `Dv`, with the longest sequence's ``N``
            keys: copies. They are 0 behind the end of a shorter one.

        Raises
        ------
        ValueError, TypeError
            If there are fewer keys, or the first ones are written over.
        """
        return self._read(begin, self._lengths, int(self._oldest.max(initial=0)), None)

    def truncate(self, lengths: Integers) -> None:
        """Cut sequences off, as after tokens that speculation got wrong.

        Parameters
        ----------
        lengths : int or (batch,) integers
            How many keys to keep of each, from the first on.

        Raises
        ------
        ValueError, TypeError
            If there are not so many, or if with a window those are gone that the next query would
            see.
        """
        found = check_integers("lengths", lengths, self.batch)
        for b, n in enumerate(found):
            if not 0 <= n <= self._lengths[b]:
                raise ValueError(
                    f"lengths: expected from 0 to {self._lengths[b]} keys of item {b}, got {n}"
                )
        new = np.array(found, np.int64)
        if self.window is not None:
            first = np.maximum(new - self.window, 0)
            gone = (first < self._oldest) & (new > 0)
            if gone.any():
                b = int(gone.argmax())
                raise ValueError(
                    f"lengths: expected at least {self._oldest[b] + self.window} keys of item {b}, "
                    f"or none, got {new[b]}: keys before {self._oldest[b]} are written over"
                )
            self._oldest = np.where(new == 0, 0, self._oldest)
        self._lengths = new

    def attend(
        self,
        q: ArrayLike,
        *,
        return_lse: bool = False,
        out: NDArray[Any] | None = None,
        backend: str = "auto",
        **args: Unpack[Arguments],
    ) -> Any:
        """Attend to the keys that are there.

        Parameters
        ----------
        q : array_like
            ``(batch, Nq, Hq, D)``, of the cache's dtype. Append their keys before.
        return_lse, out, backend, **args
            As in `nattn.attention_with_kvcache`.

        Returns
        -------
        out : ndarray
            ``(batch, Nq, Hq, Dv)``; with ``return_lse=True`` it is ``(out, lse)``.

        Raises
        ------
        ValueError, TypeError
            For bad input, and if with a window a query would see keys that are written over.
        """
        cached.check_own(args)
        rows = self._queries(q, self.batch)
        pages = None
        if self.window is not None:
            args = {**args, "window_size": within(self.window, args)}
            self._check_window(rows.shape[1], args)
            pages = self._ring()
        return generation.attend(
            q,
            rows,
            self._store,
            self._lengths,
            pages,
            return_lse=return_lse,
            out=out,
            backend=backend,
            **args,
        )

    def error(self, q: ArrayLike | None = None, scale: float | None = None) -> CacheError:
        """Bound what `quantize` changes.

        Parameters
        ----------
        q : array_like, optional
            Queries, ``(batch, Nq, Hq, D)``.
        scale : float, optional
            Factor of the scores, ``1 / sqrt(D)`` by default.

        Returns
        -------
        CacheError
            Of keys and values; with q of lse and of the output, too, for calls without dropout and
            score_mod. For each query it takes the largest scale among all keys of the sequence that
            are there.

        Notes
        -----
        With the largest scales ``k_scale`` and ``v_scale``, ``ROUNDING = 1/2 + 127 * 2**-24`` and
        ``d = |scale| * sum|q| * ROUNDING * k_scale``::

            |lse' - lse| <= d
            |out' - out| <= ROUNDING * v_scale + 2 tanh(d / 2) * 127 * v_scale

        `nattn.call.quantised.attention_error` derives it.
        """
        store, used = self._store, self._used()[..., None]
        scales = [x for x in (store.k_scales, store.v_scales) if x is not None]
        largest = [np.where(used, x, 0.0).max(axis=1, initial=0.0) for x in scales]
        return self._error(largest, q, scale, self.batch)

    # The arrays

    def _with_room(self, most: int, chunk: int) -> cached.Store:
        """Return the store, or a larger one with the same rows, before anything is changed."""
        old = self._store
        needed = most if self.window is None else max(self.window + chunk, self._room)
        too_large = self.window is not None and 2 * needed < self.capacity
        if needed <= self.capacity and not too_large:
            return old
        if self.window is None:
            new = self._new_store(self.batch, max(needed, 2 * self.capacity))
            n = int(self._lengths.max(initial=0))
            new.write(np.s_[:, :n], old.read(np.s_[:, :n]))
            return new
        new = self._new_store(self.batch, needed)
        for b in range(self.batch):
            at = np.arange(max(self._oldest[b], self._lengths[b] - needed), self._lengths[b])
            new.write((b, at % needed), old.read((b, at % self.capacity)))
        return new

    def _ring(self) -> Pages:
        """Return the pages of a ring: the same one again and again."""
        n = int(pages_of(self._lengths, self.capacity).max(initial=1))
        items = np.arange(self.batch)[:, None]
        return Pages(np.broadcast_to(items, (self.batch, n)), self.capacity)

    def _used(self) -> NDArray[np.bool_]:
        """Return which rows hold keys, ``(batch, capacity)``."""
        rows = np.arange(self.capacity)
        after = (rows - self._oldest[:, None]) % self.capacity
        used: NDArray[np.bool_] = after < (self._lengths - self._oldest)[:, None]
        return used

    def _check_window(self, Nq: int, args: Arguments) -> None:
        """Raise if a query would see keys that are written over."""
        lens, left = args.get("q_lens"), (args["window_size"] or (0, 0))[0]
        found = check_integers("q_lens", Nq if lens is None else lens, self.batch)
        if args.get("q_offset") is None:
            first = self._lengths - np.array(found, np.int64)
        else:
            first = check_offset(args["q_offset"], self.batch, (None, None))
        seen = np.maximum(first - (left or 0), 0)
        gone = (seen < self._oldest) & (np.array(found) > 0)
        if gone.any():
            b = int(gone.argmax())
            raise ValueError(
                f"q: expected queries that see no key before {self._oldest[b]} of item {b}, which "
                f"are written over in a cache for {self.capacity} keys, got one that sees key "
                f"{seen[b]}; attend after each chunk that is appended, or give more capacity"
            )
