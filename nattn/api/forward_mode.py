"""Forward mode: what attention changes by where q, k and v change in a direction."""

from __future__ import annotations

from typing import Any, Unpack

from .. import backends
from ..call import results
from ..call.arguments import Arguments, shows_arguments
from ..call.checks import Array, check_flag
from ..call.problem import Problem


@shows_arguments
def attention_jvp(
    q: Array,
    k: Array,
    v: Array,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> tuple[Any, Any]:
    """Attention and its derivative in a direction: the product of the Jacobian and a vector.

    For each batch item and query head, with the ``s``, ``p = exp(s - lse)`` and ``kept`` of
    `attention` and over the visible keys::

        ds[i, j]  = scale * (dot(dq[i], k[j]) + dot(q[i], dk[j]))
        ds        = ds * d score_mod / d score, of softcap too
        dlse[i]   = sum_j p[i, j] * ds[i, j]
        dout[i]   = sum_j kept[i, j] / (1 - dropout_p) * p[i, j]
                    * ((ds[i, j] - dlse[i]) * v[j] + dv[j])

    in one pass over the keys, with no more memory than the results.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, in host memory.
    dq, dk, dv : array_like, optional
        What they change by: of the shape and dtype of each, with any strides. None is 0, and what
        it would take part in is not computed. At least one is given.
    return_lse : bool, default False
        Return lse and its derivative too.
    backend : {"auto", "cpu", "reference"}, default "auto"
        As in `attention`; there are no kernels for GPUs yet.
    **args
        All other arguments of `attention`. They do not change.

    Returns
    -------
    out : ndarray or (ndarray, ndarray)
        What `attention` returns: with ``return_lse=True`` it is ``(out, lse)``.
    dout : ndarray or (ndarray, ndarray)
        What it changes by, of the same shapes and dtypes: with ``return_lse=True`` it is
        ``(dout, dlse)``.

    Raises
    ------
    ValueError, TypeError, IndexError
        As `attention` does, before anything is computed.
    NotImplementedError
        For arrays on a GPU.

    Notes
    -----
    Of 16 bits all is computed in float32, without the dot product of pairs, and rounded in the
    end; so `out` may differ in its last bits from that of `attention`, as it does where keys are
    taken in other blocks. Hidden pairs contribute 0, whatever lies in their slots, and rows that
    see no key do not change. Equal input gives equal bits, whatever the number of threads and the
    other items of the batch.

    In one direction it costs about as much as two forward passes, in three as much as three: q, k
    and v each add a product of matrices for the scores or for the values, and a directional
    derivative by q or k another one. Reverse mode is `attention_vjp`; what both give together is
    the product of a Gauss-Newton matrix and a vector, as in the example. A derivative of
    `attention_vjp` itself, with which Hessians could be had, there is not: its reverse pass would
    take nine products of matrices for each pair, and two sums over keys before the first of them.

    The formula is the derivative of those of `attention`; Baydin et al. [1]_ tell of forward mode.

    References
    ----------
    .. [1] A. G. Baydin, B. A. Pearlmutter, A. A. Radul, J. M. Siskind, "Automatic Differentiation
       in Machine Learning: a Survey", JMLR 18 (2018).

    Examples
    --------
    >>> import numpy as np
    >>> import nattn
    >>> q, k, v, dq = np.random.default_rng(0).standard_normal((4, 50, 16))
    >>> out, dout = nattn.attention_jvp(q, k, v, dq, causal=True)
    >>> further = nattn.attention(q + 1e-6 * dq, k, v, causal=True)
    >>> bool(np.allclose((further - out) / 1e-6, dout, atol=1e-5))
    True

    The matrix J'J times dq, for who fits `out` by least squares:

    >>> _, vjp = nattn.attention_vjp(q, k, v, causal=True)
    >>> product = vjp(dout, wrt=("q",)).dq
    >>> bool(np.isclose((product * dq).sum(), (dout**2).sum()))
    True
    """
    problem = Problem.build(q, k, v, **args)
    check_flag("return_lse", return_lse)
    door = backends.choose(problem, backend, "jvp")
    directions = results.check_directions(problem, dq, dk, dv)
    found = [*results.new_results(problem), *results.new_results(problem)]
    views = (
        results.as_bhnd(problem, x) if n % 2 == 0 else results.as_bhn(problem, x)
        for n, x in enumerate(found)
    )
    door.jvp(problem, directions, *views)
    out, lse, dout, dlse = (results.returned(problem, x) for x in found)
    return ((out, lse), (dout, dlse)) if return_lse else (out, dout)
