"""The public functions: validate, describe the call as a `Problem`, hand it to a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

from numpy.typing import NDArray

from .. import backends
from ..call import results
from ..call.arguments import Arguments, shows_arguments
from ..call.checks import Array, HostArray, check_flag
from ..call.device_arrays import CudaArray
from ..call.problem import WRT, Problem
from ..call.progress import Progress


@overload
def attention(
    q: CudaArray,
    k: CudaArray,
    v: CudaArray,
    *,
    return_lse: bool = ...,
    out: CudaArray | None = ...,
    backend: str = ...,
    **args: Unpack[Arguments],
) -> Any: ...


@overload
def attention(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    return_lse: Literal[False] = ...,
    out: NDArray[Any] | None = ...,
    backend: str = ...,
    **args: Unpack[Arguments],
) -> NDArray[Any]: ...


@overload
def attention(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    return_lse: Literal[True],
    out: NDArray[Any] | None = ...,
    backend: str = ...,
    **args: Unpack[Arguments],
) -> tuple[NDArray[Any], NDArray[Any]]: ...


@overload
def attention(
    q: HostArray,
    k: HostArray,
    v: HostArray,
    *,
    return_lse: bool,
    out: NDArray[Any] | None = ...,
    backend: str = ...,
    **args: Unpack[Arguments],
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...


@shows_arguments
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out: NDArray[Any] | CudaArray | None = None,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> Any:
    """Exact scaled dot-product attention, in memory that grows linearly with the input.

    For each batch item `b` and query head `h`, with ``pos = i + q_offset``::

        s[i, j] = scale * dot(q[i], k[j])
        s       = softcap * tanh(s / softcap)            only with softcap
        s       = score_mod(s, b, h, pos, j)             only with score_mod
        s       = s - alibi_slopes[h] * |pos - j|        only with alibi_slopes
        s       = s + bias[b, h, i, j]                   only with bias
        lse[i]  = log(sum_j exp(s[i, j]) + exp(sinks[h]))    over the visible keys j
        out[i]  = sum_j exp(s[i, j] - lse[i]) * v[j]

    The matrix of scores is never built (except by ``backend="reference"``, one head at a time).

    Parameters
    ----------
    q : array_like
        Queries, ``(N, D)``, ``(H, N, D)`` or ``(B, H, N, D)``: float16, bfloat16 (in NumPy that
        of `ml_dtypes`), float32 or float64. Any strides will do, also of read-only and unaligned
        arrays; nothing is copied but big-endian input. See Notes for arrays on a GPU.
    k, v : array_like
        Keys and values, of q's dtype and number of axes, and ``(..., Nk, D)`` and
        ``(..., Nk, Dv)`` in shape. They may have fewer heads: ``Hq % Hkv == 0``, and query head
        ``h`` reads key head ``h // (Hq // Hkv)``.
    causal : bool, default False
        Query row ``i`` sees key ``j`` if ``j <= pos``.
    q_offset : int or (B,) integers, optional
        Position of query row 0 on the key axis, of any size and sign. By default
        ``kv_len - q_len`` of the item: the last query sits on the last key. 0 aligns the first
        query with the first key.
    window_size : (left, right), optional
        Query row ``i`` sees key ``j`` if ``-left <= j - pos <= right``, both inclusive. None or
        -1 leaves a side open.
    mask : array_like of bool, optional
        True where a key is visible; broadcast to ``(B, Hq, Nq, Nk)`` by NumPy's rule (in both
        layouts), without being materialised.
    bias : array_like, optional
        Added to the scores; float16, bfloat16, float32 or float64, rounded to the compute dtype
        as it is read; broadcast like `mask`. -inf hides the key, whatever its score, and so does
        a value that is rounded to -inf. The compute dtype is float64 for q of float64, else
        float32.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(D)`` by default; rounded to the compute dtype.
    softcap : float, optional
        Bound of the scores, smoothly approached; rounded to the compute dtype. None and 0 are off.
    alibi_slopes : (Hq,) or (B, Hq) array_like, optional
        For each head how much a score falls with every position between query and key; float16,
        bfloat16, float32, float64 or integers, finite. `nattn.alibi_slopes` makes those of the
        paper.
    sinks : (Hq,) array_like, optional
        For each head one more score in the softmax, with no key and no value; of the same dtypes,
        rounded to the compute dtype. -inf is none; NaN and inf make all rows of the head NaN.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score: a plain Python function in
        NumPy's style, of the batch item, the query head, the position ``pos`` of the query and the
        key. Further parameters are bound to arrays and numbers with `functools.partial`. It runs
        elementwise, compiled for SIMD lanes: no ``if`` on an argument, but ``np.where``. A score
        of -inf hides its key. See `nattn.mods`.
    mask_mod : callable, optional
        ``mask_mod(b, h, q_idx, kv_idx)`` returns True where the key is visible; a function like
        `score_mod`. `nattn.mask` wraps one, so that ``& | ~`` combine masks. See `nattn.masks`.
    block_mask : nattn.BlockMask, optional
        A mask_mod with a map of the blocks that it leaves empty, which are then skipped. Takes the
        place of `mask_mod` and gives the same bits; made for the sizes and offsets of this call.
    q_lens, kv_lens : int or (B,) integers, optional
        Rows and keys of each item that exist; what lies behind is padding and is not read.
    dropout_p : float, default 0.0
        ``0 <= dropout_p < 1``: probabilities are set to 0 with this probability and otherwise
        divided by ``1 - dropout_p``, after the softmax. `lse` is that without dropout.
    seed : int, optional
        ``0 <= seed < 2**64``, required with dropout: what is dropped depends on
        ``(seed, b, h, i, j)`` alone (`nattn.mods.keep` tells).
    layout : {"bhnd", "bnhd"}, default "bhnd"
        Order of the axes of q, k, v and out. "bnhd" is ``(B, N, H, D)``, for 4-D arrays.
    return_lse : bool, default False
        Return `lse` too.
    out : ndarray, optional
        Array to write to: shape and dtype of the result, any strides, in memory that it shares
        with no input; on a GPU if q is.
    backend : {"auto", "cpu", "cuda", "reference"}, default "auto"
        "auto" follows the type of the arrays: those on a GPU go to "cuda", all others to "cpu".
        "cuda" with arrays in host memory copies them to the GPU and the results back. "reference"
        is the dense float64 computation that defines the result.

    Returns
    -------
    out : ndarray
        Like q with the last axis ``Dv``, in q's dtype and native byte order. A row that sees no
        key is 0. On a GPU an array of the kind of q.
    lse : ndarray, only with ``return_lse=True``
        Natural logarithm of the sum of the exponentials of the visible scores and the sink,
        ``(B, Hq, Nq)`` in both layouts (``(Hq, Nq)`` and ``(Nq,)`` for lower ranks), in the
        compute dtype. A row that sees no key has -inf, or its sink.

    Raises
    ------
    ValueError, TypeError
        For bad input, before anything is computed or written. The text names the argument, what
        was expected and what was got.
    IndexError
        If a score_mod or mask_mod indexes a bound array out of range, at a pair that causal,
        window, lengths and mask leave visible. `out` is then undefined. Negative indices wrap.
    NotImplementedError
        For legal input that the backend does not handle yet, with every reason: on "cuda" arrays
        whose elements are not aligned to their size, and 2**31 rows or more.
    RuntimeError
        If "cuda" lacks numba-cuda or a GPU; the text says what is missing.

    Notes
    -----
    Taken are NumPy arrays of any strides, also read-only, unaligned and big-endian ones; what has
    ``__array__``, ``__array_interface__`` or a buffer, such as arrays of JAX on the CPU, data
    frames and `memoryview`; objects that have DLPack alone, in host memory; and lists of numbers,
    which are float64. Nothing is copied but lists and big-endian arrays, and nothing is written
    to. What comes back are new NumPy arrays in native byte order, whatever was passed, or `out`.
    Masked arrays are refused, for their masks would be ignored: pass ``.data``, and what is
    visible as `mask`. Tensors of torch in host memory are taken like NumPy arrays, without a copy,
    of bfloat16 and with a gradient, too; results are tensors if q is one. Nothing is recorded for
    torch's own gradients: for that there is `nattn.integrations.torch`.

    Arrays on a GPU are tensors of torch (with a gradient, too, which is not recorded), arrays of
    CuPy and Numba, all that have ``__cuda_array_interface__`` and, with the package cuda-core, all
    that have DLPack. They are read where they lie, and the results are made by torch or CuPy, on
    q's device, if it is theirs, otherwise by Numba. Work goes to the current stream of torch or
    CuPy, otherwise to the stream that q names or the default one. q, k, v, mask, bias and out lie
    together, on one GPU or in host memory. Arrays that a function is bound to may lie with them or
    in host memory; slopes, sinks, lengths and offsets are small, may lie anywhere, and are copied
    to the host to be checked.

    NaN and Inf in a hidden key, value, bias or mask slot change nothing; a visible NaN reaches
    exactly the rows that see it, and a visible score of +inf makes its row NaN. A score of -inf
    hides its key. A value whose probability is dropped is not read. Equal input gives equal bits,
    whatever the number of threads and the other items of the batch.

    The streaming softmax is that of Milakov and Gimelshein [1]_, tiled as in FlashAttention [2]_.
    The random bits of dropout are those of Philox4x32-10 [3]_.

    References
    ----------
    .. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018,
       arXiv:1805.02867.
    .. [2] T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention: Fast and
       Memory-Efficient Exact Attention with IO-Awareness", 2022, arXiv:2205.14135.
    .. [3] J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as
       1, 2, 3", SC 2011.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 8, 100, 64), dtype=np.float32)  # 8 query heads
    >>> k, v = rng.standard_normal((2, 1, 2, 100, 64), dtype=np.float32)  # on 2 key heads
    >>> out, lse = nattn.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 8, 100, 64), (1, 8, 100))
    >>> bool(np.allclose(out[:, 3, 0], v[:, 0, 0]))  # the first row sees only the first key
    True

    Functions of one's own, and of `nattn.masks`, with what they need bound to them:

    >>> import functools
    >>> def decayed(score, b, h, q_idx, kv_idx, rate):
    ...     return score - rate * np.sqrt(abs(q_idx - kv_idx))
    >>> doc = np.repeat([0, 1, 2], [30, 50, 20])
    >>> same = functools.partial(nattn.masks.document, doc=doc)
    >>> out = nattn.attention(
    ...     q,
    ...     k,
    ...     v,
    ...     score_mod=functools.partial(decayed, rate=0.1),
    ...     mask_mod=nattn.mask(same) & nattn.masks.causal,
    ... )
    >>> bool(np.allclose(out[:, 3, 30], v[:, 0, 30]))  # the first row of the second document
    True
    """
    return _attend(q, k, v, return_lse=return_lse, out=out, backend=backend, **args)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    backend: str = "auto",
    progress: Progress | None = None,
    **args: Unpack[Arguments],
) -> Any:
    """Do what `attention` does, calling ``progress(fraction_done)`` now and then."""
    problem = Problem.build(q, k, v, **args)
    out, lse, _ = _forward(problem, out, return_lse, backend, progress)
    return (out, lse) if return_lse else out


def _forward(
    problem: Problem,
    out: Any,
    return_lse: Any,
    backend: str,
    progress: Progress | None = None,
    keeps_exact: bool = False,
) -> tuple[Any, Any, Any]:
    """Return `out`, which is made if there is none, and lse, in the caller's rank and kind.

    The third is the output that a backward pass should get: with `keeps_exact`, and where the
    backend can, `out` before it was rounded to 16 bits.
    """
    if out is not None:
        results.check_out(problem, out)
    check_flag("return_lse", return_lse)
    door = backends.choose(problem, backend, "forward", out=out)
    new_out, lse = results.new_results(problem, out)
    views = results.as_bhnd(problem, new_out), results.as_bhn(problem, lse)
    exact = results.new_exact(problem) if keeps_exact and door.KEEPS_EXACT else None
    if exact is None:
        door.forward(problem, *views, progress=progress)
        exact = new_out
    else:
        door.forward(problem, *views, exact=exact, progress=progress)
        exact = results.as_given(problem, exact)
    return results.returned(problem, new_out), results.returned(problem, lse), exact


# Gradients


class Gradients(NamedTuple):
    """Gradients of a loss; None for what was not asked for.

    Each has the shape of the argument that it is named after, and its dtype in native byte order;
    it is a NumPy array, or of the kind of q on a GPU. `dmods` is a dict of those of what a
    score_mod is bound to, by their names in `wrt`.
    """

    dq: NDArray[Any] | Any | None
    dk: NDArray[Any] | Any | None
    dv: NDArray[Any] | Any | None
    dbias: NDArray[Any] | Any | None
    dsinks: NDArray[Any] | Any | None
    dalibi_slopes: NDArray[Any] | Any | None
    dmods: Any = None


@shows_arguments
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    wrt: tuple[str, ...] | list[str] = ("q", "k", "v"),
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> Gradients:
    """Gradients of attention, in memory that grows linearly with the input.

    Of a loss whose gradient with respect to the output is `dout`, for each batch item and query
    head, with the ``s``, ``p = exp(s - lse)`` and ``kept`` of the forward pass::

        w[i, j]     = p[i, j] * kept[i, j] / (1 - dropout_p)       what weighs a value
        dv[j]       = sum_i w[i, j] * dout[i]
        dp[i, j]    = dot(dout[i], v[j]) * kept[i, j] / (1 - dropout_p)
        delta[i]    = dot(dout[i], out[i])
        ds[i, j]    = p[i, j] * (dp[i, j] - delta[i] + dlse[i])    of s after all modifiers
        dbias       = ds, summed over the axes along which the bias was broadcast
        dslopes[h]  = -sum_ij ds[i, j] * |pos - j|
        dsinks[h]   = sum_i exp(sinks[h] - lse[i]) * (dlse[i] - delta[i])
        dmods[x]    = sum_ij ds[i, j] * d score_mod / d x          for what it is bound to
        ds          = ds * d score_mod / d score, of softcap too   of s = scale * dot(q, k)
        dq[i]       = scale * sum_j ds[i, j] * k[j]
        dk[j]       = scale * sum_i ds[i, j] * q[i]

    over visible pairs; dk and dv are summed over the query heads that share a key head. Scores are
    computed again from q, k and lse: no matrix of them is ever built.

    Parameters
    ----------
    dout : array_like
        Gradient with respect to `out`, of its shape and dtype. Any strides will do, also
        ``np.broadcast_to(np.float32(1), out.shape)``.
    q, k, v : array_like
        Those of the forward pass.
    out, lse : array_like
        What `attention` returned for them with ``return_lse=True`` and the same arguments. Of 16
        bits the CPU backend computes `out` once more, for the rounding of `out` would show in dq;
        in host memory it may be in the compute dtype, and is used as it is then. `attention_vjp`
        keeps such a one.
    dlse : array_like, optional
        Gradient with respect to `lse`, of its shape and dtype, if the loss depends on it.
    wrt : tuple or list of str, default ("q", "k", "v")
        With respect to what: "q", "k", "v", "bias", "sinks", "alibi_slopes", and floats that the
        score_mod is bound to, arrays and numbers: "score_mod.table" is what a parameter `table` is
        bound to and, if several functions of a composition have one, "score_mod.f.table" that of
        the function `f`. What is left out is neither computed nor allocated.
    backend : {"auto", "cpu", "cuda", "reference"}, default "auto"
        As in `attention`.
    **args
        All other arguments of `attention` that its result depends on: those of the forward pass.
        Of a `score_mod` no derivative is asked: it runs on dual numbers.

    Returns
    -------
    Gradients
        Named tuple ``(dq, dk, dv, dbias, dsinks, dalibi_slopes, dmods)``, None for what is not in
        `wrt`; `dmods` is a mapping from the names of what the score_mod is bound to.
        Each has the shape of its argument, in its layout (where that is "bnhd", in host memory, as
        a view of a head-major array), and its dtype; that of integer slopes or sinks has the
        compute dtype. On a GPU they are arrays of the kind of q.

    Raises
    ------
    ValueError, TypeError
        For bad input, before anything is computed. The text names the argument, what was expected
        and what was got. Other arguments than those of the forward pass can mostly not be told:
        they give the gradient of something else.
    IndexError
        If a score_mod or mask_mod indexes a bound array out of range where a pair is visible.
    NotImplementedError, RuntimeError
        For legal input that the backend does not handle yet, and without a GPU, as in `attention`.

    Notes
    -----
    Hidden pairs contribute exactly 0, whatever lies in the slots of their key, value, bias, query
    or dout, and rows that see no key have the gradient 0. A NaN that is visible reaches what
    depends on it. Where a modifier has no derivative, as ``abs`` at 0, its derivative counts as 0,
    and ``max`` and ``min`` follow their first argument at a tie.

    Equal input gives equal bits, whatever the number of threads and the other items of the batch,
    and whatever else is in `wrt`.

    Beyond the results a call takes up to eight arrays of the size of dq, and no more than 64 MiB
    of those where more than one key head would need them at once; one copy of dk and dv, padded to
    the width of a register tile; and three numbers for each query row. Of 16 bits these are all in
    float32, and so is one copy of out, unless that is passed in float32. A gradient of a bias of
    shape ``(..., Nq, Nk)`` is itself a matrix, and so is that of an array as large; of arrays that
    a function is bound to each task has sums of its own, of no more than 64 MiB together or, where
    one takes more, on one thread. The function runs once more for each place in its code that
    reads such an array, on a number and its derivative by what it read there.

    The gradient is that of FlashAttention-2 [1]_, with the key heads and parts of the keys as
    tasks. If `lse` and `out` are those of a softmax over more keys than `k` holds, what comes out
    is these keys' share: shares of disjoint keys add up.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
       Partitioning", 2023, arXiv:2307.08691, section 3.1.2.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> bias = np.zeros((8, 1, 100), np.float32)
    >>> out, lse = nattn.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    >>> dout = 2 * out  # the loss is the sum of out**2
    >>> grads = nattn.attention_backward(
    ...     dout, q, k, v, out, lse, bias=bias, causal=True, wrt=("q", "bias")
    ... )
    >>> grads.dq.shape, grads.dk, grads.dbias.shape
    ((8, 100, 64), None, (8, 1, 100))
    >>> step = 1e-3 * grads.dq / np.linalg.norm(grads.dq)  # uphill
    >>> higher = nattn.attention(q + step, k, v, bias=bias, causal=True)
    >>> bool((higher**2).sum() > (out**2).sum())
    True
    """
    problem = Problem.build(q, k, v, **args)
    return _backward(problem, dout, out, lse, dlse, wrt, backend)


@shows_arguments
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out: NDArray[Any] | CudaArray | None = None,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention, and the function that carries a gradient back through it.

    Parameters
    ----------
    q, k, v, return_lse, out, backend, **args
        As in `attention`.

    Returns
    -------
    out : ndarray or (ndarray, ndarray)
        What `attention` returns: with ``return_lse=True`` it is ``(out, lse)``.
    vjp : callable
        ``vjp(dout, dlse=None, wrt=("q", "k", "v"))`` returns the `Gradients`: the product of a
        vector and the Jacobian. It may be called any number of times.

    Raises
    ------
    ValueError, TypeError, IndexError, NotImplementedError, RuntimeError
        As `attention` does, and `vjp` as `attention_backward` does.

    Notes
    -----
    The function holds views of q, k, v, out and all other arrays, not copies: if one is changed
    before `vjp` is called, it returns the gradient of something else. Of 16 bits it holds, in
    float32, the output as it was before it was rounded.

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 50, 16))
    >>> out, vjp = nattn.attention_vjp(q, k, v, causal=True)
    >>> grads = vjp(np.ones_like(out))
    >>> [x.shape for x in grads if x is not None]
    [(50, 16), (50, 16), (50, 16)]
    >>> bool(np.allclose(grads.dv.sum(axis=0), 50))  # 50 rows, whose weights sum to 1
    True
    """
    problem = Problem.build(q, k, v, **args)
    return _vjp(problem, out, return_lse, backend)


def _vjp(
    problem: Problem, out: Any, return_lse: bool, backend: str
) -> tuple[Any, Callable[..., Gradients]]:
    """Do what `attention_vjp` does."""
    result, lse, exact = _forward(problem, out, return_lse, backend, keeps_exact=True)

    def vjp(
        dout: Array,
        dlse: Array | None = None,
        wrt: tuple[str, ...] | list[str] = ("q", "k", "v"),
    ) -> Gradients:
        """Return the gradients that `dout`, and `dlse` if lse matters too, give rise to."""
        return _backward(problem, dout, exact, lse, dlse, wrt, backend)

    return ((result, lse) if return_lse else result), vjp


def _backward(
    problem: Problem,
    dout: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    wrt: Any,
    backend: str,
    progress: Progress | None = None,
) -> Gradients:
    """Do what `attention_backward` does, calling ``progress(fraction_done)`` now and then."""
    names = results.check_wrt(problem, wrt)
    incoming = results.check_incoming(problem, dout, out, lse, dlse)
    arrays = dict(zip(("dout", "out", "lse", "dlse"), incoming, strict=True))
    door = backends.choose(problem, backend, "backward", **arrays)
    bound = [x for x in wrt if x not in WRT]
    if bound and not door.LEARNS:
        raise NotImplementedError(
            f"wrt: expected names among {', '.join(map(repr, WRT))} on a GPU, whose kernels do not "
            f"tell gradients of what functions are bound to yet, got {bound[0]!r}; with arrays in "
            "host memory pass backend='cpu'"
        )
    found = door.backward(problem, *incoming, names, progress=progress)
    given = {x: results.gradient_as_given(problem, x, found[x]) for x in names}
    dmods = {x: given[x] for x in bound} if bound else None
    return Gradients(**{f"d{x}": given.get(x) for x in WRT}, dmods=dmods)
