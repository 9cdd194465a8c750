"""What a query may see: masks as functions, how they combine, and the kinds of their blocks.

A mask is one plain function in NumPy's style, ``mask_mod(b, h, q_idx, kv_idx, ...)``, that is True
where the key is visible. The reference calls it with arrays and the kernels compile it for SIMD
lanes, so there is one definition of each. What it needs besides is bound with `functools.partial`,
and ``& | ~`` combine masks:

    window = functools.partial(nattn.masks.sliding_window, left=255, right=0)
    same = functools.partial(nattn.masks.document, doc=doc)
    nattn.attention(q, k, v, mask_mod=nattn.mask(window) & same)

In every mask `b` is the batch item, `h` the query head, `q_idx` the position of the query on the
key axis and `kv_idx` the key. Positions are below the number of keys unless `q_offset` says
otherwise. With more queries than keys the first ones are negative, and index an array from its end
as in NumPy; ``q_offset=0`` counts both from 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from . import binding


class Mask(binding.Combination):
    """A mask function on which ``&``, ``|`` and ``~`` work; `mask` makes one.

    The other operand may be any function ``mask_mod(b, h, q_idx, kv_idx)``, a `functools.partial`
    of one too.
    """

    # So that `array & mask` asks the mask, rather than every element of the array.
    __array_ufunc__ = None

    def __call__(self, *args: Any, **bound: Any) -> Any:
        """Call the functions and join what they return.

        Keywords reach a function that stands alone, so that `functools.partial` can bind them.
        """
        if bound and self.operator != "just":
            raise TypeError(
                "mask: expected parameters bound before masks are combined, got "
                f"{', '.join(bound)} for {self!r}"
            )
        return self.parts[0](*args, **bound) if bound else super().__call__(*args)

    def __and__(self, other: Callable[..., Any]) -> Mask:
        return Mask("and", (self, _mask_function(other, "&")))

    def __rand__(self, other: Callable[..., Any]) -> Mask:
        return Mask("and", (_mask_function(other, "&"), self))

    def __or__(self, other: Callable[..., Any]) -> Mask:
        return Mask("or", (self, _mask_function(other, "|")))

    def __ror__(self, other: Callable[..., Any]) -> Mask:
        return Mask("or", (_mask_function(other, "|"), self))

    def __invert__(self) -> Mask:
        return Mask("not", (self,))

    def __bool__(self) -> bool:
        raise TypeError(
            "mask: expected & | ~ between masks, got 'and', 'or', 'not' or 'if', which ask for "
            f"one truth value of {self!r}"
        )

    def __repr__(self) -> str:
        return f"<Mask {described(self)}>"

    def __reduce__(self) -> Any:
        # Pickle finds a decorated function under its name, where this object stands in its place.
        name = self.__dict__.get("__qualname__", "")
        module = sys.modules.get(self.__dict__.get("__module__", ""))
        if getattr(module, name, None) is self:
            return name
        return Mask, (self.operator, self.parts)


def mask(function: Callable[..., Any]) -> Mask:
    """Wrap a mask function so that ``&``, ``|`` and ``~`` work on it; a decorator too.

    Parameters
    ----------
    function : callable
        ``mask_mod(b, h, q_idx, kv_idx, ...)``, True where the key is visible; plain or jitted, or
        a `functools.partial` of such a function.

    Returns
    -------
    Mask
        Called with arrays, it returns what the function returns.

    Raises
    ------
    TypeError
        If it is no function.

    Examples
    --------
    >>> @mask
    ... def even(b, h, q_idx, kv_idx):
    ...     return kv_idx % 2 == 0
    >>> visible = causal & ~even
    >>> visible
    <Mask causal & ~even>
    >>> visible(0, 0, 4, np.arange(6))
    array([False,  True, False,  True, False, False])
    """
    if isinstance(function, Mask):
        return function
    wrapped = Mask("just", (_mask_function(function, "mask()"),))
    if not isinstance(function, functools.partial):
        functools.update_wrapper(wrapped, function, updated=())
    return wrapped


def _mask_function(function: Any, where: str) -> Any:
    if isinstance(function, binding.Combination) and function.operator == "compose":
        raise TypeError(f"mask: expected a mask function with {where}, got composed modifiers")
    if callable(function):
        return function
    if isinstance(function, np.ndarray):
        got = f"an array of shape {function.shape} and dtype {function.dtype}"
    else:
        got = type(function).__name__
    raise TypeError(
        f"mask: expected a function mask_mod(b, h, q_idx, kv_idx) with {where}, got {got}; "
        "nattn.attention takes a boolean array as the argument mask, beside mask_mod"
    )


_BINDING = {"or": 1, "and": 2, "not": 3, "just": 4}
"""How tightly operators bind, in `_describe`."""


def described(function: Any, within: int = 0) -> str:
    """Write a mask as the expression that makes it, its arrays by shape and dtype."""
    if isinstance(function, binding.Bound):
        name = function.function.__name__
        return _call(name, list(zip(function.names, function.values, strict=True)))
    if isinstance(function, functools.partial):
        inner = described(function.func, _BINDING["just"])
        return _call(inner, [("", x) for x in function.args] + [*function.keywords.items()])
    if not isinstance(function, binding.Combination) or function.operator not in _BINDING:
        return getattr(function, "__name__", type(function).__name__)
    strength = _BINDING[function.operator]
    parts = [described(part, strength) for part in function.parts]
    if function.operator == "not":
        text = "~" + parts[0]
    else:
        text = {"and": " & ", "or": " | ", "just": ""}[function.operator].join(parts)
    return f"({text})" if strength < within else text


def _call(name: str, bound: list[tuple[str, Any]]) -> str:
    if not bound:
        return name
    texts = [
        f"{key}=" * bool(key) + (f"<{x.dtype} {x.shape}>" if isinstance(x, np.ndarray) else repr(x))
        for key, x in bound
    ]
    return f"{name}({', '.join(texts)})"


@mask
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide what is behind the query: ``kv_idx <= q_idx`` is visible, as with ``causal=True``.

    Examples
    --------
    >>> causal(0, 0, np.arange(3)[:, None], np.arange(3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return kv_idx <= q_idx


@mask
def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any, left: Any, right: Any) -> Any:
    """Show `left` keys before the query to `right` keys behind it, as ``window_size=`` does.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    left, right : int
        Both ends belong to the window: ``-left <= kv_idx - q_idx <= right``. A window of W tokens
        that ends with the query is ``left=W - 1, right=0``.

    Returns
    -------
    array of bool
        True where the key is visible.

    Examples
    --------
    >>> window = functools.partial(sliding_window, left=1, right=0)
    >>> window(0, 0, np.arange(3)[:, None], np.arange(3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    ahead = kv_idx - q_idx
    return (ahead >= -left) & (ahead <= right)


@mask
def document(b: Any, h: Any, q_idx: Any, kv_idx: Any, doc: Any) -> Any:
    """Show the query's own document, where several lie one after the other.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    doc : ndarray of int
        ``(N,)``: the document of each position, for all queries and keys.

    Returns
    -------
    array of bool
        True where the key is visible.

    See Also
    --------
    document_batch : Another `doc` for each batch item.
    document_cross : Queries and keys that are different tokens.

    Examples
    --------
    >>> same = functools.partial(document, doc=np.array([7, 7, 8]))
    >>> same(0, 0, np.arange(3)[:, None], np.arange(3)).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """
    return doc[q_idx] == doc[kv_idx]


@mask
def document_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any, doc: Any) -> Any:
    """Show the query's own document, where each batch item holds others.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    doc : ndarray of int
        ``(B, N)``: the document of each position of each batch item.

    Returns
    -------
    array of bool
        True where the key is visible.

    Examples
    --------
    >>> same = functools.partial(document_batch, doc=np.array([[0, 0, 0], [0, 1, 1]]))
    >>> same(1, 0, 2, np.arange(3))
    array([False,  True,  True])
    """
    return doc[b, q_idx] == doc[b, kv_idx]


@mask
def document_cross(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_doc: Any, kv_doc: Any) -> Any:
    """Show keys of the query's document, where queries and keys are different tokens.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    q_doc : ndarray of int
        ``(Nq,)``: the document of each query. It is indexed by the query's position: pass
        ``q_offset=0`` to the call, so that the position is the row.
    kv_doc : ndarray of int
        ``(Nk,)``: the document of each key.

    Returns
    -------
    array of bool
        True where the key is visible.

    Examples
    --------
    >>> same = functools.partial(
    ...     document_cross, q_doc=np.array([0, 1]), kv_doc=np.array([1, 0, 0])
    ... )
    >>> same(0, 0, np.arange(2)[:, None], np.arange(3)).astype(int)
    array([[0, 1, 1],
           [1, 0, 0]])
    """
    return q_doc[q_idx] == kv_doc[kv_idx]


@mask
def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any, prefix: Any) -> Any:
    """Show all of a prefix, and what is not behind the query.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    prefix : ndarray of int
        ``(B,)``: length of each batch item's prefix; ``np.full(B, n)`` for one of all items.

    Returns
    -------
    array of bool
        True where the key is visible.

    Notes
    -----
    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (JMLR 2020).

    Examples
    --------
    >>> visible = functools.partial(prefix_lm, prefix=np.array([2]))
    >>> visible(0, 0, np.arange(3)[:, None], np.arange(3)).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return (kv_idx < prefix[b]) | (kv_idx <= q_idx)


@mask
def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: Any, dilation: Any) -> Any:
    """Show every `dilation`-th key around the query, `window` of them on each side.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    window : int
        Keys on each side of the query.
    dilation : int
        Distance between them, 1 or more.

    Returns
    -------
    array of bool
        True where the key is visible.

    Notes
    -----
    Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer" (2020).

    Examples
    --------
    >>> visible = functools.partial(dilated, window=1, dilation=2)
    >>> visible(0, 0, 4, np.arange(9)).astype(int)
    array([0, 0, 1, 0, 1, 0, 1, 0, 0])
    """
    distance = abs(q_idx - kv_idx)
    return (distance <= window * dilation) & (distance % dilation == 0)


@mask
def strided(b: Any, h: Any, q_idx: Any, kv_idx: Any, stride: Any) -> Any:
    """Show the last `stride` keys up to the query, and before them every `stride`-th.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    stride : int
        1 or more.

    Returns
    -------
    array of bool
        True where the key is visible, which is never behind the query.

    Notes
    -----
    Source: Child, Gray, Radford and Sutskever, "Generating Long Sequences with Sparse
    Transformers" (2019); both of its strided patterns in one.

    Examples
    --------
    >>> visible = functools.partial(strided, stride=3)
    >>> visible(0, 0, 7, np.arange(9)).astype(int)
    array([0, 1, 0, 0, 1, 1, 1, 1, 0])
    """
    distance = q_idx - kv_idx
    return (distance >= 0) & ((distance < stride) | (distance % stride == 0))


@mask
def chunked(b: Any, h: Any, q_idx: Any, kv_idx: Any, chunk: Any) -> Any:
    """Show the chunk of the sequence in which the query lies; with ``& causal`` for a decoder.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    chunk : int
        Positions of a chunk, 1 or more.

    Returns
    -------
    array of bool
        True where the key is visible.

    Examples
    --------
    >>> visible = functools.partial(chunked, chunk=3)
    >>> visible(0, 0, 4, np.arange(9)).astype(int)
    array([0, 0, 0, 1, 1, 1, 0, 0, 0])
    """
    return q_idx // chunk == kv_idx // chunk


@mask
def local_plus_global(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: Any, n_global: Any) -> Any:
    """Show a window around the query; the first tokens see everything and are seen by all.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    window : int
        Keys on each side of the query.
    n_global : int
        Positions below it are global.

    Returns
    -------
    array of bool
        True where the key is visible.

    Notes
    -----
    Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer" (2020).

    Examples
    --------
    >>> visible = functools.partial(local_plus_global, window=1, n_global=1)
    >>> visible(0, 0, np.arange(4)[:, None], np.arange(4)).astype(int)
    array([[1, 1, 1, 1],
           [1, 1, 1, 0],
           [1, 1, 1, 1],
           [1, 0, 1, 1]])
    """
    return (abs(q_idx - kv_idx) <= window) | (q_idx < n_global) | (kv_idx < n_global)


@mask
def streaming(b: Any, h: Any, q_idx: Any, kv_idx: Any, left: Any, n_first: Any) -> Any:
    """Show the first keys of the sequence, `left` keys before the query, and the query's own.

    Parameters
    ----------
    b, h, q_idx, kv_idx
        What every mask is called with.
    left : int
        Keys before the query.
    n_first : int
        Keys from the start that stay visible.

    Returns
    -------
    array of bool
        True where the key is visible, which is never behind the query.

    Notes
    -----
    Source: Xiao, Tian, Chen, Han and Lewis, "Efficient Streaming Language Models with Attention
    Sinks" (ICLR 2024), with positions as they are in the text.

    Examples
    --------
    >>> visible = functools.partial(streaming, left=2, n_first=1)
    >>> visible(0, 0, 5, np.arange(7)).astype(int)
    array([1, 0, 0, 1, 1, 1, 0])
    """
    distance = q_idx - kv_idx
    return (distance >= 0) & ((distance <= left) | (kv_idx < n_first))


# Blocks of a mask, of which some need not be looked at

EMPTY = 0
MIXED = 1
FULL = 2
"""Kinds of blocks: nothing is visible, something, everything."""
