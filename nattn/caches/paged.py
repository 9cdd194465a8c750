"""A cache of pages that sequences share: for many of them, which come, fork and go."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..api import generation
from ..call import cached
from ..call.arguments import Arguments
from ..call.checks import Integers, check_count, check_flag, check_integer, check_integers, show
from ..call.pages import Pages
from ..call.quantised import CacheError
from .settings import Cache, check_items, mask_of

SeqIds = Sequence[int] | NDArray[np.integer[Any]]


class _Sequence:
    """The pages of one sequence, and its length."""

    __slots__ = ("_pages", "length", "n_pages")

    def __init__(self) -> None:
        self._pages = np.zeros(8, np.int64)
        self.n_pages = 0
        self.length = 0

    @property
    def pages(self) -> NDArray[np.int64]:
        """Its pages in order."""
        return self._pages[: self.n_pages]

    def add(self, pages: list[int]) -> None:
        """Append pages."""
        n = self.n_pages + len(pages)
        if n > len(self._pages):
            self._pages = np.resize(self._pages, max(n, 2 * len(self._pages)))
        self._pages[self.n_pages : n] = pages
        self.n_pages = n


class PagedKVCache(Cache):
    """Keys and values of many sequences in one pool of pages.

    A sequence is an integer that `new` or `fork` gives. It takes pages as it grows, and gives them
    back when it is released. A fork shares the pages of what it was made from. When one of both is
    added to, it gets a copy of a page that is not full, and of no other.

    Parameters
    ----------
    pages : int
        Pages of the pool.
    page_size : int
        Keys of a page.
    Hkv : int
        Number of key heads.
    D, Dv : int
        Lengths of a key and of a value; `Dv` is `D` by default.
    dtype : dtype, default float32
        float16, bfloat16, float32 or float64: of what is appended, and of queries.
    quantize : {None, "int8"}, default None
        "int8" rounds keys and values to 8 bits, with a scale for each row of each head. `error`
        tells what that changes at most.
    grow : bool, default False
        Whether the pool at least doubles when it is full, in place of an error.

    Raises
    ------
    ValueError, TypeError
        For bad sizes and dtypes, for sequences that are not there, and for rows and queries that do
        not fit. Nothing changes then.
    MemoryError
        By `append`, if there are too few free pages. Nothing changes then.
    ImportError
        For bfloat16 if the library ml_dtypes, which has it, is not installed.

    Notes
    -----
    Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, arXiv:2309.06180.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> prompt = rng.standard_normal((2, 1, 100, 2, 64), dtype=np.float32)  # k and v
    >>> cache = nattn.PagedKVCache(pages=20, page_size=16, Hkv=2, D=64)
    >>> first = cache.new()
    >>> cache.append([first], *prompt)
    >>> second = cache.fork(first)  # the same prompt, of which nothing is copied
    >>> cache.free_pages
    13
    >>> q, k, v = rng.standard_normal((3, 2, 1, 2, 64), dtype=np.float32)
    >>> cache.append([first, second], k, v)  # the seventh page is not full, and copied for one
    >>> cache.attend([first, second], q).shape, cache.free_pages
    ((2, 1, 2, 64), 12)
    >>> cache.release(first)
    >>> cache.lengths([second])
    array([101])
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        Hkv: int,
        D: int,
        Dv: int | None = None,
        *,
        dtype: DTypeLike = np.float32,
        quantize: str | None = None,
        grow: bool = False,
    ) -> None:
        n_pages = check_count("pages", pages)
        self.page_size = check_count("page_size", page_size)
        self._configure(Hkv, D, Dv, dtype, quantize)
        self.grow = check_flag("grow", grow)
        self._store = self._new_store(n_pages, self.page_size)
        self._uses = np.zeros(n_pages, np.int64)
        self._free = list(range(n_pages - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    # What is there

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return len(self._uses)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        """The sequences that are there, in the order in which they were made."""
        return list(self._sequences)

    def lengths(self, seq_ids: SeqIds) -> NDArray[np.int64]:
        """Return how many keys sequences have.

        Parameters
        ----------
        seq_ids : sequence of int
            Which; one may be there several times.

        Returns
        -------
        ndarray of int64
            One for each.
        """
        return np.array([x.length for x in self._found(seq_ids)], np.int64)

    def block_table(self, seq_ids: SeqIds) -> NDArray[np.int64]:
        """Return the pages of sequences, as `nattn.attention_with_kvcache` takes them.

        Parameters
        ----------
        seq_ids : sequence of int
            Which; one may be there several times.

        Returns
        -------
        ndarray of int64
            A row for each, and -1 behind its pages.
        """
        found = self._found(seq_ids)
        table = np.full((len(found), max((x.n_pages for x in found), default=0)), -1, np.int64)
        for row, x in zip(table, found, strict=True):
            row[: x.n_pages] = x.pages
        return table

    # Sequences

    def new(self) -> int:
        """Make a sequence of no keys.

        Returns
        -------
        int
            What it is called from now on. None is given twice.
        """
        return self._add(_Sequence())

    def fork(self, seq_id: int) -> int:
        """Make a sequence that begins with all keys of another, and shares their pages.

        Parameters
        ----------
        seq_id : int
            The other.

        Returns
        -------
        int
            The new one.
        """
        [old] = self._found([seq_id])
        copy = _Sequence()
        copy.add(old.pages.tolist())
        copy.length = old.length
        self._uses[old.pages] += 1
        return self._add(copy)

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Pages that no other shares become free.

        Parameters
        ----------
        seq_id : int
            Which.
        """
        [gone] = self._found([seq_id])
        self._drop(gone, 0)
        del self._sequences[int(seq_id)]

    def truncate(self, seq_id: int, length: int) -> None:
        """Cut a sequence off, as after tokens that speculation got wrong.

        Parameters
        ----------
        seq_id : int
            Which.
        length : int
            How many keys to keep, from the first on.
        """
        [x] = self._found([seq_id])
        n = check_integer("length", length)
        if not 0 <= n <= x.length:
            raise ValueError(f"length: expected from 0 to {x.length} keys, got {n}")
        self._drop(x, -(-n // self.page_size))
        x.length = n

    def append(
        self,
        seq_ids: SeqIds,
        k_new: ArrayLike,
        v_new: ArrayLike,
        lens: Integers | None = None,
    ) -> None:
        """Add keys and values to sequences.

        Parameters
        ----------
        seq_ids : sequence of int
            To which, each once.
        k_new, v_new : array_like
            ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)`` of the cache's dtype, an item for each
            sequence.
        lens : int or (B,) integers, optional
            How many rows of each item are real, from the first on; all by default.
        """
        found = self._found(seq_ids)
        self._apart(seq_ids, found)
        k, v, lens = self._rows(k_new, v_new, lens, len(found))
        n = k.shape[1]
        real = mask_of(lens, n)
        rows = self._stored(k, v, real)
        copies, takes = self._plan(found, lens)
        self._make_room(len(copies) + sum(takes))

        for x in copies:
            self._copy_last(x)
        for x, count in zip(found, takes, strict=True):
            x.add([self._take() for _ in range(count)])
        pages = Pages(self.block_table(seq_ids), self.page_size)
        self._store.write(cached.places(pages, self.lengths(seq_ids), n, real), rows)
        for x, count in zip(found, lens.tolist(), strict=True):
            x.length += count

    # Attention

    def attend(
        self,
        seq_ids: SeqIds,
        q: ArrayLike,
        *,
        return_lse: bool = False,
        out: NDArray[Any] | None = None,
        backend: str = "auto",
        **args: Unpack[Arguments],
    ) -> Any:
        """Attend to the keys of sequences.

        Parameters
        ----------
        seq_ids : sequence of int
            Which; one may be there several times.
        q : array_like
            ``(B, Nq, Hq, D)``, of the cache's dtype, an item for each. Append their keys before.
        return_lse, out, backend, **args
            As in `nattn.attention_with_kvcache`.

        Returns
        -------
        out : ndarray
            ``(B, Nq, Hq, Dv)``; with ``return_lse=True`` it is ``(out, lse)``.
        """
        cached.check_own(args)
        lengths, table = self.lengths(seq_ids), self.block_table(seq_ids)
        return generation.attend(
            q,
            self._queries(q, len(lengths)),
            self._store,
            lengths,
            Pages(table, self.page_size),
            return_lse=return_lse,
            out=out,
            backend=backend,
            **args,
        )

    def error(
        self, seq_ids: SeqIds, q: ArrayLike | None = None, scale: float | None = None
    ) -> CacheError:
        """Bound what `quantize` changes; see `KVCache.error`.

        Parameters
        ----------
        seq_ids : sequence of int
            Of which sequences.
        q : array_like, optional
            Queries, ``(B, Nq, Hq, D)``.
        scale : float, optional
            Factor of the scores, ``1 / sqrt(D)`` by default.

        Returns
        -------
        CacheError
            Of keys and values; with q of lse and of the output, too.
        """
        found = self._found(seq_ids)
        scales = [x for x in (self._store.k_scales, self._store.v_scales) if x is not None]
        largest = [
            np.array([self._largest(one, x) for one in found]).reshape(-1, self.Hkv) for x in scales
        ]
        return self._error(largest, q, scale, len(found))

    def read(self, seq_ids: SeqIds, begin: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return keys and values of sequences; see `KVCache.read`.

        Parameters
        ----------
        seq_ids : sequence of int
            Which; one may be there several times.
        begin : int, default 0
            The first key of each to return.

        Returns
        -------
        k, v : ndarray
            ``(B, N - begin, Hkv, D)`` and the same with `Dv`.
        """
        pages = Pages(self.block_table(seq_ids), self.page_size)
        return self._read(begin, self.lengths(seq_ids), 0, pages)

    def view(self, seq_ids: SeqIds) -> PagedView:
        """Return some sequences as what `KVCache` is: a batch to append and attend to.

        Parameters
        ----------
        seq_ids : sequence of int
            Which, each once.

        Returns
        -------
        PagedView
            For the `cache` of a layer, for one.
        """
        self._apart(seq_ids, self._found(seq_ids))
        return PagedView(self, [int(x) for x in seq_ids])

    # Pages

    def _found(self, seq_ids: Any) -> list[_Sequence]:
        expected = "a list of sequences, made by new() or fork()"
        if isinstance(seq_ids, (str, bytes, dict)) or not hasattr(seq_ids, "__iter__"):
            raise TypeError(f"seq_ids: expected {expected}, got {show(seq_ids)}")
        numbers = [check_integer("seq_ids", x, expected) for x in seq_ids]
        for x in numbers:
            if x not in self._sequences:
                raise ValueError(f"seq_ids: expected {expected} and not released, got {x}")
        return [self._sequences[x] for x in numbers]

    def _apart(self, seq_ids: Any, found: list[_Sequence]) -> None:
        if len({id(x) for x in found}) < len(found):
            raise ValueError(f"seq_ids: expected each sequence once, got {reprlib.repr(seq_ids)}")

    def _add(self, x: _Sequence) -> int:
        self._sequences[self._next] = x
        self._next += 1
        return self._next - 1

    def _plan(
        self, found: list[_Sequence], lens: NDArray[np.int64]
    ) -> tuple[list[_Sequence], list[int]]:
        """Return whose last page is to be copied, and how many new ones each takes."""
        copies, takes = [], []
        left: dict[int, int] = {}
        """How many sequences have a page when those before have their copies."""
        for x, count in zip(found, lens.tolist(), strict=True):
            if count and x.length % self.page_size:
                last = int(x.pages[-1])
                uses = left.get(last, int(self._uses[last]))
                if uses > 1:
                    copies.append(x)
                    left[last] = uses - 1
            takes.append(-(-(x.length + count) // self.page_size) - x.n_pages)
        return copies, takes

    def _make_room(self, needed: int) -> None:
        """Raise, or grow, if there are fewer free pages."""
        if needed <= len(self._free):
            return
        if not self.grow:
            raise MemoryError(
                f"expected {needed} free pages of {self.page_size} keys, got {len(self._free)} of "
                f"{self.pages}; release sequences, or make the cache with more pages or grow=True"
            )
        old, n = self._store, self.pages
        new = self._new_store(max(2 * n, n + needed - len(self._free)), self.page_size)
        new.write(np.s_[:n], old)
        self._store = new
        grown = len(new.k)
        self._uses = np.concatenate([self._uses, np.zeros(grown - n, np.int64)])
        self._free = [*range(grown - 1, n - 1, -1), *self._free]

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def _copy_last(self, x: _Sequence) -> None:
        """Give a sequence a last page of its own."""
        old, new, n = int(x.pages[-1]), self._take(), x.length % self.page_size
        self._store.write(np.s_[new, :n], self._store.read(np.s_[old, :n]))
        self._uses[old] -= 1
        x.pages[-1] = new

    def _drop(self, x: _Sequence, keep: int) -> None:
        """Take all pages behind the first from a sequence."""
        for page in x.pages[keep:][::-1].tolist():
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)
        x.n_pages = keep

    def _largest(self, x: _Sequence, scales: Any) -> NDArray[Any]:
        """Return the largest scale of each head."""
        rows = scales[x.pages].reshape(-1, self.Hkv)[: x.length]
        return np.asarray(rows.max(axis=0, initial=0.0))


class PagedView:
    """Sequences of a `PagedKVCache`, as a batch.

    Attributes
    ----------
    cache : PagedKVCache
        Where they are.
    seq_ids : list of int
        Which.
    """

    def __init__(self, cache: PagedKVCache, seq_ids: list[int]) -> None:
        self.cache, self.seq_ids = cache, seq_ids

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.seq_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many keys each has."""
        return self.cache.lengths(self.seq_ids)

    def append(self, k_new: ArrayLike, v_new: ArrayLike, lens: Integers | None = None) -> None:
        """Add keys and values, as `PagedKVCache.append` does.

        Parameters
        ----------
        k_new, v_new, lens
            As there.
        """
        self.cache.append(self.seq_ids, k_new, v_new, lens)

    def truncate(self, lengths: Integers) -> None:
        """Cut the sequences off.

        Parameters
        ----------
        lengths : int or (batch,) integers
            How many keys to keep of each, from the first on.
        """
        found = check_integers("lengths", lengths, self.batch)
        for b, (n, most) in enumerate(zip(found, self.lengths.tolist(), strict=True)):
            if not 0 <= n <= most:
                raise ValueError(f"lengths: expected from 0 to {most} keys of item {b}, got {n}")
        for seq_id, n in zip(self.seq_ids, found, strict=True):
            self.cache.truncate(seq_id, n)

    def select(self, items: Integers) -> None:
        """Put other sequences of the view in the place of each, as a search with beams does.

        Parameters
        ----------
        items : sequence of int
            For each sequence from now on which one of the view it was. One that is there several
            times is forked, and one that is not there is released.

        Raises
        ------
        ValueError, TypeError
            If there is no such sequence.
        """
        found = check_items(items, self.batch)
        first = dict(zip(reversed(found), reversed(range(len(found))), strict=True))
        old = self.seq_ids
        self.seq_ids = [
            old[x] if first[x] == n else self.cache.fork(old[x]) for n, x in enumerate(found)
        ]
        for n, seq_id in enumerate(old):
            if n not in first:
                self.cache.release(seq_id)

    def read(self, begin: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the keys and values of the sequences; see `KVCache.read`.

        Parameters
        ----------
        begin : int, default 0
            The first key of each to return.

        Returns
        -------
        k, v : ndarray
            As there.
        """
        return self.cache.read(self.seq_ids, begin)

    def attend(self, q: ArrayLike, **args: Any) -> Any:
        """Attend to the keys of the sequences, as `PagedKVCache.attend` does.

        Parameters
        ----------
        q, **args
            As there.

        Returns
        -------
        out : ndarray
            As there.
        """
        return self.cache.attend(self.seq_ids, q, **args)

    def error(self, q: ArrayLike | None = None, scale: float | None = None) -> CacheError:
        """Bound what `quantize` changes; see `KVCache.error`.

        Parameters
        ----------
        q, scale
            As there.

        Returns
        -------
        CacheError
            As there.
        """
        return self.cache.error(self.seq_ids, q, scale)
