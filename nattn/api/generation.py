"""Attention of new queries on keys and values in a cache, to which new ones may be added."""

from __future__ import annotations

from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from .. import backends
from ..call import cached, results
from ..call.arguments import Arguments
from ..call.cached import Store
from ..call.checks import Array, HostArray, Integers, check_flag, show
from ..call.pages import Pages, check_pages, check_table
from ..call.tensors import like
from ..call.validators import check_lengths, check_offset
from ..vectors import dtypes
from .functional import _forward


class Turning(Protocol):
    """What turns queries and keys by their positions, as `nattn.positional.Rotary` does."""

    acts_on: Any

    def __call__(
        self, x: Any, positions: Any = None, out: Any = None, length: Any = None
    ) -> NDArray[Any]:
        """Return ``(B, H, N, D)``, turned to positions ``(B, N)``."""


def attention_with_kvcache(
    q: HostArray,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    *,
    cache_seqlens: Integers,
    block_table: Array | None = None,
    k_new: HostArray | None = None,
    v_new: HostArray | None = None,
    k_scales: NDArray[np.float32] | None = None,
    v_scales: NDArray[np.float32] | None = None,
    rotary: Turning | None = None,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> Any:
    """Attention on keys and values in a cache, after new ones have been written to it.

    The interface is that of `flash_attn_with_kvcache` in flash-attention: arrays are
    ``(B, N, H, D)``, the cache is two arrays of the caller's, and a call is one step of generation.
    `nattn.KVCache` and `nattn.PagedKVCache` keep such arrays, and what is where in them.

    Parameters
    ----------
    q : array_like
        Queries, ``(B, Nq, Hq, D)``: one for each item, or several, as in speculative decoding and
        for a prompt in pieces.
    k_cache, v_cache : ndarray
        ``(B, S, Hkv, D)`` and ``(B, S, Hkv, Dv)``, with room for ``S`` keys of each item; or, with
        a block table, ``(pages, page_size, Hkv, D)`` and the same with ``Dv``. Of q's dtype, or
        int8; any strides.
    cache_seqlens : int or (B,) integers
        How many keys each item has in the cache, without `k_new`.
    block_table : (B, n) integers, optional
        Key ``j`` of item ``b`` is row ``j % page_size`` of page
        ``block_table[b, j // page_size]``. What lies behind the pages that an item needs, `k_new`
        included, may be anything.
    k_new, v_new : array_like, optional
        ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)`` of q's dtype: written into the cache behind the
        keys that are there, with their scales if it is in int8.
    k_scales, v_scales : ndarray of float32, optional
        For a cache in int8 the scale of each row, ``(B, S, Hkv)`` or ``(pages, page_size, Hkv)``:
        a number of the row is its int8 times the scale.
    rotary : nattn.positional.Rotary, optional
        Turns queries, and new keys before they are written, to their positions: row ``i`` of
        `k_new` is at ``cache_seqlens + i``, and row ``i`` of q at ``i + q_offset``. ("dynamic"
        scaling turns by the length, and so does not go with keys that were turned before.)
    return_lse, out, backend, **args
        As in `nattn.attention`, without `layout` and `kv_lens`. `causal` is False by default, and
        `q_offset` puts the last query on the last key, new ones included. A mask and a bias
        broadcast to ``(B, Hq, Nq, Nk)`` with the length of the longest item as ``Nk``.

    Returns
    -------
    out : ndarray
        ``(B, Nq, Hq, Dv)``, in q's dtype; with ``return_lse=True`` it is ``(out, lse)``, lse being
        ``(B, Hq, Nq)``.

    Raises
    ------
    ValueError, TypeError
        For bad input. After any error the cache is as it was.
    NotImplementedError
        For pages and int8 on a GPU.

    Notes
    -----
    Equal lengths and numbers give equal bits, in pages or in one piece.

    Pages are those of Kwon et al., "Efficient Memory Management for Large Language Model Serving
    with PagedAttention", SOSP 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 2, 100, 2, 64), np.float32)  # room for 100 keys
    >>> q = rng.standard_normal((2, 7, 8, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 7, 2, 64), dtype=np.float32)
    >>> def step(n, m):
    ...     rows = slice(n, m)
    ...     return nattn.attention_with_kvcache(
    ...         q[:, rows],
    ...         k_cache,
    ...         v_cache,
    ...         cache_seqlens=n,
    ...         k_new=k[:, rows],
    ...         v_new=v[:, rows],
    ...         causal=True,
    ...     )
    >>> out = np.concatenate([step(0, 5), step(5, 6), step(6, 7)], axis=1)
    >>> whole = nattn.attention(q, k, v, causal=True, layout="bnhd")
    >>> bool(np.allclose(out, whole, atol=1e-6))
    True
    """
    cached.check_own(args)
    given, q = q, cached.check_queries(q)
    paged = block_table is not None
    store = cached.check_store(q, k_cache, v_cache, k_scales, v_scales, paged=paged)
    B, _, _, D = q.shape
    n_pages, page_size, Hkv, Dv = store.v.shape
    new = None
    if k_new is not None or v_new is not None:
        dtype = q.dtype.newbyteorder("=")
        new = cached.check_rows(k_new, v_new, B, Hkv, D, Dv, dtype)
    n_new = 0 if new is None else new[0].shape[1]

    table = check_table(block_table, B) if paged else None
    room = page_size if table is None else page_size * table.shape[1]
    before = check_lengths("cache_seqlens", 0 if B == 0 else cache_seqlens, B, room)
    lengths = before + n_new
    if n_new and int(lengths.max(initial=0)) > room:
        b = int(lengths.argmax())
        raise ValueError(
            f"k_new: expected at most {room - before[b]} rows, for item {b} has {before[b]} of "
            f"{room} keys already, got {n_new}"
        )
    pages = None if table is None else check_pages(table, n_pages, page_size, lengths)
    if rotary is not None:
        q, new = _turned(rotary, q, new, before, lengths, args)

    others: dict[str, Any] = {"k_new": None, "v_new": None}
    if new is not None:
        others = {"k_new": new[0], "v_new": new[1]}
        cached.check_writable(store, {"q": q, **others})
    problem = cached.build(q, store, lengths, pages, args, **others)
    if new is None or n_new == 0:
        return _attend(given, problem, return_lse, out, backend)
    at = cached.places(pages, before, n_new)
    if paged:
        cached.check_apart(at, page_size)
    rows = cached.rows_to_store(*new, store.quantised)
    if out is not None:
        results.check_out(problem, out)
    check_flag("return_lse", return_lse)
    backends.choose(problem, backend, "forward", out=out)
    old = store.read(at)
    try:
        store.write(at, rows)
        return _attend(given, problem, return_lse, out, backend)
    except BaseException:  # an interrupt, or an index of a user's function out of range
        store.write(at, old)
        raise


def attend(
    given: Any,
    q: NDArray[Any],
    store: Store,
    lengths: NDArray[np.int64],
    pages: Pages | None,
    *,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> Any:
    """Attend to a cache that is known to be right, as `attention_with_kvcache` does.

    q are the queries, checked, and `given` what the caller passed: results are of its kind.
    """
    problem = cached.build(q, store, lengths, pages, args)
    return _attend(given, problem, return_lse, out, backend)


def _attend(q: Any, problem: Any, return_lse: bool, out: Any, backend: str) -> Any:
    out, lse, _ = _forward(problem, out, return_lse, backend)
    out, lse = like(q, out, lse)
    return (out, lse) if return_lse else out


def _turned(
    rotary: Any,
    q: NDArray[Any],
    new: tuple[NDArray[Any], NDArray[Any]] | None,
    before: NDArray[np.int64],
    lengths: NDArray[np.int64],
    args: Arguments,
) -> tuple[NDArray[Any], tuple[NDArray[Any], NDArray[Any]] | None]:
    """Return queries and new keys at their positions."""
    if not callable(rotary) or getattr(rotary, "acts_on", None) != "qk":
        raise TypeError(f"rotary: expected a nattn.positional.Rotary, got {show(rotary)}")
    B, Nq = q.shape[:2]
    if args.get("q_offset") is None:
        offset = lengths - check_lengths("q_lens", args.get("q_lens"), B, Nq)
    else:
        offset = check_offset(args["q_offset"], B, (None, None))
    most = int(lengths.max(initial=0))

    def turn(x: NDArray[Any], begins: NDArray[np.int64]) -> NDArray[Any]:
        storage = dtypes.storage_name(x.dtype) or ""
        wide = x.astype(dtypes.compute_dtype(storage), copy=False).swapaxes(1, 2)
        at = begins[:, None] + np.arange(x.shape[1])
        with np.errstate(all="ignore"):  # of 16 bits what is too large becomes infinite
            turned = rotary(wide, at, length=most).swapaxes(1, 2)
            return np.asarray(turned.astype(dtypes.storage_dtype(storage), copy=False))

    q = turn(q, offset)
    return q, None if new is None else (turn(new[0], before), new[1])
