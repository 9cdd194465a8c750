"""Attention over packed sequences: of different lengths, one behind the other, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from numpy.typing import NDArray

from ..call.arguments import PackedArguments, shows_packed_arguments
from ..call.checks import Array
from ..call.problem import Problem
from .functional import Gradients, _forward, _vjp


@shows_packed_arguments
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    backend: str = "auto",
    **args: Unpack[PackedArguments],
) -> Any:
    """Attention of each of many sequences, which lie one behind the other in packed arrays.

    The queries of sequence ``b`` are the rows from ``cu_seqlens_q[b]`` to before
    ``cu_seqlens_q[b + 1]`` of `q`, its keys and values those of `k` and `v` by `cu_seqlens_k`. Each
    sequence gets the bits that `nattn.attention` gives it alone.

    Parameters
    ----------
    q : array_like
        Queries of all sequences, ``(Tq, Hq, D)``, of the dtypes and strides that
        `nattn.attention` takes, in host memory.
    k, v : array_like
        Keys and values, ``(Tk, Hkv, D)`` and ``(Tk, Hkv, Dv)``; ``Hq % Hkv == 0``.
    cu_seqlens_q, cu_seqlens_k : (B + 1,) array_like of integers
        Where each of ``B`` sequences begins and the last one ends. They do not fall, and lie
        between 0 and Tq, or Tk. A sequence may be without queries, without keys, or without both.
    return_lse : bool, default False
        Whether lse is wanted, too.
    out : ndarray, optional
        ``(Tq, Hq, Dv)`` of q's dtype, to write to.
    backend : {"auto", "cpu", "reference"}, default "auto"
        As in `nattn.attention`.
    **args
        Arguments of `nattn.attention`. ``B`` of their shapes is the number of sequences, Nq and Nk
        are the lengths of the longest: each sequence takes the upper left corner of a mask and a
        bias. Functions, dropout and slopes of ``(B, Hq)`` know a sequence by its number ``b``, and
        rows and keys by their positions within it. ``q_offset`` may be one for each sequence; by
        default the last query of each sits on its last key.

    Returns
    -------
    out : ndarray
        ``(Tq, Hq, Dv)``, 0 in rows of no sequence (before the first, behind the last) and in those
        that see no key.
    lse : ndarray
        Only with ``return_lse=True``, as ``(out, lse)``: ``(Hq, Tq)``, -inf in rows of no sequence.

    Raises
    ------
    ValueError, TypeError, IndexError
        As `nattn.attention` does. There is no `block_mask`, which is made for items of one size:
        pass its mask_mod.
    NotImplementedError
        With ``backend="cuda"``.

    Notes
    -----
    Nothing is copied or padded. The rows of each sequence are cut into tasks of their own, and the
    tasks that take longest are done first, so that threads end together whatever the lengths.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((100, 8, 64), dtype=np.float32)  # three sequences
    >>> k, v = rng.standard_normal((2, 100, 2, 64), dtype=np.float32)
    >>> cu = np.array([0, 30, 35, 100])
    >>> out = nattn.attention_varlen(q, k, v, cu, cu, causal=True)
    >>> alone = [x[30:35].transpose(1, 0, 2) for x in (q, k, v)]  # (H, N, D)
    >>> second = nattn.attention(*alone, causal=True)
    >>> bool((out[30:35] == second.transpose(1, 0, 2)).all())
    True
    """
    problem = Problem.build(q, k, v, (cu_seqlens_q, cu_seqlens_k), **args)
    out, lse, _ = _forward(problem, out, return_lse, backend)
    return (out, lse) if return_lse else out


@shows_packed_arguments
def attention_varlen_vjp(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    backend: str = "auto",
    **args: Unpack[PackedArguments],
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention over packed sequences, and the function that carries a gradient back through it.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse, out, backend, **args
        As in `nattn.attention_varlen`.

    Returns
    -------
    out : ndarray or (ndarray, ndarray)
        What `nattn.attention_varlen` returns: with ``return_lse=True`` it is ``(out, lse)``.
    vjp : callable
        ``vjp(dout, dlse=None, wrt=("q", "k", "v"))`` returns the `Gradients`, packed as their
        arguments: 0 in rows of no sequence. Those of q, k and v have for each sequence the bits
        that `nattn.attention_vjp` gives it alone.

    Raises
    ------
    ValueError, TypeError, IndexError, NotImplementedError
        As `nattn.attention_varlen` does, and `vjp` as `nattn.attention_backward` does.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 50, 2, 16), dtype=np.float32)
    >>> cu = [0, 20, 50]
    >>> out, vjp = nattn.attention_varlen_vjp(q, k, v, cu, cu, causal=True)
    >>> grads = vjp(np.ones_like(out))
    >>> grads.dv.shape, bool(np.allclose(grads.dv[20:].sum(axis=0), 30))
    ((50, 2, 16), True)
    """
    problem = Problem.build(q, k, v, (cu_seqlens_q, cu_seqlens_k), **args)
    return _vjp(problem, out, return_lse, backend)
