"""Self-attention as a layer: projections, heads and positions around `nattn.attention`.

`SelfAttention` is the mechanism in its plainest form, `MultiHeadAttention` the layer of a
transformer. Both are NumPy: the parameters are arrays in a dictionary, to be read and changed in
place, a projection is ``y = x @ w + b``, and `vjp` returns, with the output, the function that
carries a gradient back to the input and to every parameter. In each `vjp` the steps back are in
the reverse order of the steps forward and have their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..api.functional import attention_vjp
from ..caches import KVCache, PagedKVCache, PagedView
from ..call.arguments import Arguments
from ..call.checks import check_count, check_flag, float_dtype, show
from ..call.validators import check_lengths
from ..vectors import dtypes
from .base import (
    Array,
    Backward,
    Layer,
    LayerGradients,
    Params,
    asked,
    check_out,
    checked_positions,
    existing,
    linear,
    linear_backward,
    merge_heads,
    own_args,
    rows_at,
    size,
    split_heads,
    wide,
)
from .states import translated


class SelfAttention(Layer):
    """Self-attention in its plainest form: every row of x asks, is asked, and answers.

    ::

        q = x @ w_q      what a row looks for
        k = x @ w_k      what it can be found by
        v = x @ w_v      what it says
        out = softmax(q @ k.T / sqrt(d_k)) @ v

    Parameters
    ----------
    d_model : int
        Length of a row of x.
    d_k, d_v : int, optional
        Lengths of a query or key, and of a value; `d_model` by default.
    bias : bool, default False
        Whether vectors ``b_q``, ``b_k`` and ``b_v`` are added to q, k and v.
    seed : int, default 0
        Of the weights, which are drawn from N(0, 1 / d_model): of independent inputs with unit
        variance they make q, k and v with unit variance. Biases are 0.
    dtype : dtype, default float32
        float16, bfloat16, float32 or float64, of parameters, input, output and gradients. In 16
        bits arithmetic is in float32.

    Attributes
    ----------
    params : dict
        ``w_q`` and ``w_k`` ``(d_model, d_k)``, ``w_v`` ``(d_model, d_v)``, and with biases
        ``b_q``, ``b_k`` ``(d_k,)`` and ``b_v`` ``(d_v,)``.

    Raises
    ------
    ValueError, TypeError
        For bad sizes and dtypes, and by a call for an input that does not fit.
    ImportError
        For bfloat16 if the library ml_dtypes, which has it, is not installed.

    Notes
    -----
    Formula: A. Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, section 3.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from nattn.nn import SelfAttention
    >>> layer = SelfAttention(d_model=32, d_k=16, seed=1)
    >>> x = np.random.default_rng(0).standard_normal((100, 32), dtype=np.float32)
    >>> out, backward = layer.vjp(x, causal=True)
    >>> grads = backward(2 * out)  # the loss is the sum of out**2
    >>> out.shape, grads.dx.shape, sorted(grads.dparams)
    ((100, 32), (100, 32), ['w_k', 'w_q', 'w_v'])
    >>> for name, gradient in grads.dparams.items():
    ...     layer.params[name] -= 1e-4 * gradient
    >>> bool((layer(x, causal=True) ** 2).sum() < (out**2).sum())
    True
    """

    def __init__(
        self,
        d_model: int,
        d_k: int | None = None,
        d_v: int | None = None,
        *,
        bias: bool = False,
        seed: int = 0,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._configure(d_model=d_model, d_k=d_k, d_v=d_v, bias=bias, dtype=dtype)
        self.params = self._initial(seed)

    def _configure(self, *, d_model: Any, d_k: Any, d_v: Any, bias: Any, dtype: Any) -> None:
        self.d_model = check_count("d_model", d_model)
        self.d_k = size("d_k", d_k, self.d_model)
        self.d_v = size("d_v", d_v, self.d_model)
        self.bias = check_flag("bias", bias)
        self.dtype = float_dtype("dtype", dtype, narrow=True)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        widths = {"q": self.d_k, "k": self.d_k, "v": self.d_v}
        return {f"w_{x}": (self.d_model, width) for x, width in widths.items()} | {
            f"b_{x}": (width,) for x, width in widths.items() if self.bias
        }

    def __call__(self, x: ArrayLike, **args: Any) -> Any:
        """Return the output for an input; see `vjp`, whose arguments these are."""
        return self.vjp(x, **args)[0]

    def qkv(self, x: ArrayLike) -> tuple[Array, Array, Array]:
        """Project an input.

        Parameters
        ----------
        x : array_like
            ``(N, d_model)`` or ``(B, N, d_model)``.

        Returns
        -------
        q, k, v : ndarray
            What `nattn.attention` takes: ``(N, d_k)`` or, with one head, ``(B, 1, N, d_k)``; v
            with `d_v`.
        """
        x = wide(self._input("x", x, self.d_model))
        q, k, v = (self._rounded(linear(x, self.params, name)) for name in "qkv")
        return (q, k, v) if x.ndim == 2 else (q[:, None], k[:, None], v[:, None])

    def vjp(
        self,
        x: ArrayLike,
        *,
        return_lse: bool = False,
        out: Array | None = None,
        backend: str = "auto",
        **args: Unpack[Arguments],
    ) -> tuple[Any, Backward]:
        """Compute the output, and the function that carries a gradient back.

        Parameters
        ----------
        x : array_like
            ``(N, d_model)`` or ``(B, N, d_model)``.
        return_lse, out, backend, **args
            As in `nattn.attention`, except for `layout`, which is the layer's own. `q_offset` is 0
            if it is not given: row ``i`` of x is both query and key ``i``, whatever the lengths.

        Returns
        -------
        out : ndarray or (ndarray, ndarray)
            ``(N, d_v)`` or ``(B, N, d_v)``; with ``return_lse=True`` it is ``(out, lse)``.
        backward : callable
            ``backward(dout, dlse=None, wrt=())`` returns `LayerGradients`. `wrt` may name
            what else has a gradient: "bias", "sinks", "alibi_slopes", and what a score_mod is bound
            to. It holds views of
            x, of the parameters and, unless there is `out`, of the output: call it before they
            change.
        """
        x, p = self._input("x", x, self.d_model), self.params
        check_out(out, (*x.shape[:-1], self.d_v), self.dtype, (x, *p.values()))
        args = own_args(args)
        batched = x.ndim == 3
        rows = x if batched else x[None]
        x = existing(rows, args.get("q_lens"), args.get("kv_lens")).reshape(x.shape)

        q, k, v = self.qkv(x)
        result, attend_backward = attention_vjp(q, k, v, return_lse=True, backend=backend, **args)
        y, lse = result[0][:, 0] if batched else result[0], result[1]

        def backward(
            dout: ArrayLike, dlse: ArrayLike | None = None, wrt: Sequence[str] = ()
        ) -> LayerGradients:
            dy = self._incoming(dout, y.shape)
            grads = attend_backward(dy[:, None] if batched else dy, dlse, ("q", "k", "v", *wrt))
            dq, dk, dv = map(wide, cast(tuple[Array, Array, Array], grads[:3]))
            h = wide(x)
            dx_v, dp_v = linear_backward(dv, h, p, "v")
            dx_k, dp_k = linear_backward(dk, h, p, "k")
            dx_q, dp_q = linear_backward(dq, h, p, "q")
            dparams = self._rounded_all(dp_q | dp_k | dp_v) | asked(grads, wrt)
            return LayerGradients(self._rounded(dx_q + dx_k + dx_v), None, dparams)

        given = y
        if out is not None:
            out[...] = y
            given = out
        return ((given, lse) if return_lse else given), backward


class MultiHeadAttention(Layer):
    """Multi-head attention: several heads, each with its own queries, keys and values.

    ::

        q, k, v = split(x @ w_q + b_q), split(c @ w_k + b_k), split(c @ w_v + b_v)
        out = merge(softmax(q @ k.T / sqrt(head_dim)) @ v) @ w_o + b_o

    with the context c, which is x in self-attention.

    Parameters
    ----------
    d_model : int
        Length of a row of x, and of the output.
    num_heads : int
        Number of query heads.
    num_kv_heads : int, optional
        Number of key and value heads, a divisor of `num_heads`, which it is by default: each
        serves as many query heads in a row (grouped-query attention).
    head_dim : int, optional
        Length of a query, key and value; ``d_model / num_heads`` by default.
    d_context : int, optional
        Length of a row of the context; `d_model` by default.
    bias : bool or "qkv", default True
        Whether there are vectors ``b_q``, ``b_k``, ``b_v`` and ``b_o``; "qkv": the first three.
    positions : scheme of nattn.positional, optional
        What tells rows apart by where they stand. It acts on x, on q and k or on scores, as its
        `acts_on` says; a context is not changed by one that acts on x.
    seed : int, default 0
        Of the weights, which are drawn from N(0, 1 / d_in), d_in being the first of their axes.
        Biases are 0.
    dtype : dtype, default float32
        float16, bfloat16, float32 or float64, of parameters, input, output and gradients. In 16
        bits arithmetic is in float32, and so are parameters of positions and their gradients.

    Attributes
    ----------
    params : dict
        ``w_q`` ``(d_model, num_heads * head_dim)``, ``w_k`` and ``w_v`` ``(d_context, num_kv_heads
        * head_dim)``, ``w_o`` ``(num_heads * head_dim, d_model)``, the biases, and the parameters
        of the positions under ``positions.`` and their name.

    Raises
    ------
    ValueError, TypeError
        For bad sizes and dtypes, and by a call for an input that does not fit.
    ImportError
        For bfloat16 if the library ml_dtypes, which has it, is not installed.

    Notes
    -----
    Formula: A. Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, section 3.2.2;
    fewer key heads: J. Ainslie et al., "GQA", 2023, arXiv:2305.13245.

    Examples
    --------
    >>> import numpy as np
    >>> from nattn.nn import MultiHeadAttention
    >>> layer = MultiHeadAttention(d_model=32, num_heads=4, num_kv_heads=2)
    >>> x, context = np.random.default_rng(0).standard_normal((2, 3, 50, 32), dtype=np.float32)
    >>> layer(x, causal=True, kv_lens=[50, 20, 7], q_lens=[50, 20, 7]).shape
    (3, 50, 32)
    >>> out, backward = layer.vjp(x, context)
    >>> grads = backward(np.ones_like(out))
    >>> grads.dcontext.shape, grads.dparams["w_k"].shape
    ((3, 50, 32), (32, 16))
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_context: int | None = None,
        bias: bool | str = True,
        positions: Any = None,
        seed: int = 0,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._configure(
            d_model=d_model,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            d_context=d_context,
            bias=bias,
            positions=positions,
            dtype=dtype,
        )
        self.params = self._initial(seed)

    def _configure(
        self,
        *,
        d_model: Any,
        num_heads: Any,
        num_kv_heads: Any,
        head_dim: Any,
        d_context: Any,
        bias: Any,
        positions: Any,
        dtype: Any,
    ) -> None:
        self.d_model = check_count("d_model", d_model)
        self.num_heads = check_count("num_heads", num_heads)
        self.num_kv_heads = size("num_kv_heads", num_kv_heads, self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of the {num_heads} heads, got {num_kv_heads}"
            )
        if head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of d_model = {d_model}, or a head_dim besides, got "
                f"{num_heads}"
            )
        self.head_dim = size("head_dim", head_dim, self.d_model // self.num_heads)
        self.d_context = size("d_context", d_context, self.d_model)
        self.bias = bias if bias == "qkv" else check_flag("bias", bias)
        self.dtype = float_dtype("dtype", dtype, narrow=True)
        self.positions = checked_positions(positions, self)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = {
            "w_q": (self.d_model, wide),
            "w_k": (self.d_context, narrow),
            "w_v": (self.d_context, narrow),
            "w_o": (wide, self.d_model),
        }
        biased = "qkv" if self.bias == "qkv" else "qkvo" if self.bias else ""
        return weights | {f"b_{x}": weights[f"w_{x}"][1:] for x in biased}

    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        cache: KVCache | PagedView | None = None,
        **args: Any,
    ) -> Any:
        """Return the output for an input.

        Parameters
        ----------
        x, context, **args
            As in `vjp`.
        cache : KVCache or PagedView, optional
            Keys and values of the rows before x. Those of x, at the positions behind them, are
            appended, and x attends to all. Pass the same arguments as without a cache, ``causal``
            for one: rows in pieces then give what all of them give at once. With `q_lens` only so
            many rows of each item are appended. A context, `q_offset` and `kv_lens` do not go with
            it, and there are no gradients.

        Returns
        -------
        out : ndarray or (ndarray, ndarray)
            As in `vjp`.

        Raises
        ------
        ValueError, TypeError
            For bad input. The cache has the keys that it had before.
        """
        if cache is None:
            return self.vjp(x, context, **args)[0]
        if context is not None:
            raise ValueError(f"context: expected None beside a cache, got {show(context)}")
        return self._cached(x, cache, **args)

    def qkv(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        q_offset: Any = None,
        q_lens: Any = None,
        kv_lens: Any = None,
    ) -> tuple[Array, Array, Array]:
        """Project an input, with positions where they act on x or on q and k.

        Parameters
        ----------
        x, context : array_like
            As in `vjp`.
        q_offset, q_lens, kv_lens : optional
            As in `vjp`, where they are passed there: rotary turns queries at their positions.

        Returns
        -------
        q, k, v : ndarray
            What `nattn.attention` takes: ``(B, H, N, head_dim)`` or ``(H, N, head_dim)``.
        """
        x, context, single = self._inputs(x, context)
        args: Arguments = {"q_offset": q_offset, "q_lens": q_lens, "kv_lens": kv_lens}
        _, _, q, k, v = self._project(x, context, own_args(args, context))
        return (q[0], k[0], v[0]) if single else (q, k, v)

    def vjp(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        return_lse: bool = False,
        out: Array | None = None,
        backend: str = "auto",
        **args: Unpack[Arguments],
    ) -> tuple[Any, Backward]:
        """Compute the output, and the function that carries a gradient back.

        Parameters
        ----------
        x : array_like
            ``(N, d_model)`` or ``(B, N, d_model)``: queries come from it.
        context : array_like, optional
            ``(Nk, d_context)`` or ``(B, Nk, d_context)``: keys and values come from it, and from x
            where there is none.
        return_lse, out, backend, **args
            As in `nattn.attention`, except for `layout`, which is the layer's own. Without a
            context `q_offset` is 0 if it is not given: row ``i`` of x is both query and key ``i``,
            whatever the lengths. What the positions pass on is not to be passed.

        Returns
        -------
        out : ndarray or (ndarray, ndarray)
            Of the shape of x; with ``return_lse=True`` it is ``(out, lse)``. Rows past `q_lens` are
            ``b_o``, or 0.
        backward : callable
            ``backward(dout, dlse=None, wrt=())`` returns `LayerGradients`. `wrt` may name
            what else has a gradient: "bias", "sinks", "alibi_slopes", and what a score_mod is bound
            to. It holds views of
            x, the context and the parameters: call it before they change.
        """
        x, context, single = self._inputs(x, context)
        p, shape = self.params, x.shape[single:]
        check_out(out, shape, self.dtype, (x, context, *p.values()))
        args = self._with_positions(own_args(args, context), x, context)
        q_lens, kv_lens = args.get("q_lens"), args.get("kv_lens")
        if context is None:
            x = existing(x, q_lens, kv_lens)
        else:
            x, context = existing(x, q_lens), existing(context, kv_lens)

        h, c, q, k, v = self._project(x, context, args)
        o = np.empty((*x.shape[:2], len(p["w_o"])), self.dtype)
        (_, lse), attend_backward = attention_vjp(
            q, k, v, return_lse=True, out=split_heads(o, self.num_heads), backend=backend, **args
        )
        y = self._rounded(linear(wide(o), p, "o"))

        def backward(
            dout: ArrayLike, dlse: ArrayLike | None = None, wrt: Sequence[str] = ()
        ) -> LayerGradients:
            dy = wide(self._incoming(dout, shape))
            dlse = dlse if dlse is None or not single else np.asarray(dlse)[None]
            do, dp_o = linear_backward(dy, wide(o), p, "o")
            do = split_heads(self._rounded(do), self.num_heads)
            scheme = self.positions if self._acts_on("scores") else None
            learnt = () if scheme is None else scheme.wrt
            grads = attend_backward(do, dlse, ("q", "k", "v", *learnt, *wrt))
            dp_pos: Params = {} if scheme is None else scheme.collect(grads)
            dq, dk, dv = map(wide, cast(tuple[Array, Array, Array], grads[:3]))
            dh, dc, dp = self._project_backward(dq, dk, dv, h, c, args)
            dcontext = None if context is None else self._rounded(dc[0] if single else dc)
            dx = dh + dc if context is None else dh
            if self._acts_on("x"):
                dx, dp_pos = self.positions.backward(dx)
            dparams = self._rounded_all(dp | dp_o) | {
                f"positions.{name}": dparam for name, dparam in dp_pos.items()
            }
            dparams |= asked(grads, wrt)
            return LayerGradients(self._rounded(dx.reshape(shape)), dcontext, dparams)

        y = y.reshape(shape)
        if out is not None:
            out[...] = y
            y = out
        return ((y, lse[0] if single else lse) if return_lse else y), backward

    def _cached(
        self,
        x: ArrayLike,
        cache: Any,
        *,
        return_lse: bool = False,
        out: Array | None = None,
        backend: str = "auto",
        **args: Any,
    ) -> Any:
        """Append the keys and values of x to a cache, and attend to all that is there."""
        if not isinstance(cache, (KVCache, PagedView)):
            hint = "; pass a view of some sequences" if isinstance(cache, PagedKVCache) else ""
            raise TypeError(
                "cache: expected a nattn.KVCache or a view of a nattn.PagedKVCache, got "
                f"{type(cache).__name__}{hint}"
            )
        for name in ("layout", "q_offset", "kv_lens"):
            if name in args:
                raise TypeError(f"{name}: expected none beside a cache, which has its own")
        x, _, single = self._inputs(x, None)
        p, shape = self.params, x.shape[single:]
        check_out(out, shape, self.dtype, (x, *p.values()))
        B, N, _ = x.shape
        if cache.batch != B:
            raise ValueError(f"x: expected {cache.batch} items as in the cache, got {B}")
        begins, given = cache.lengths, args.get("q_lens")
        lens = check_lengths("q_lens", given, B, N)
        most = int((begins + lens).max(initial=0))
        args = dict(self._with_positions(cast(Arguments, args), x, None))

        h = wide(existing(x, given))
        if self._acts_on("x"):  # whose rows have one position for all items
            rows = [self.positions(h[b : b + 1], offset=int(n)) for b, n in enumerate(begins)]
            h = np.concatenate([h[:0], *rows])
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        q, k, v = (split_heads(linear(h, p, name), n) for name, n in heads.items())
        if self._acts_on("qk"):
            scaling = getattr(self.positions, "scaling", None) or {}
            fixed = scaling.get("original_max_position_embeddings", most)
            if scaling.get("rope_type") == "dynamic" and most > fixed:
                raise ValueError(
                    f"x: expected at most {fixed} positions beside a cache, for 'dynamic' scaling "
                    f"then turns the keys that are there otherwise, got {most}"
                )
            at = begins[:, None] + np.arange(N)
            self.positions(q, at, out=q, length=most)
            self.positions(k, at, out=k, length=most)
        q, k, v = (self._rounded(y).swapaxes(1, 2) for y in (q, k, v))

        cache.append(k, v, lens)
        try:
            o, lse = cache.attend(q, return_lse=True, backend=backend, **args)
        except BaseException:  # an interrupt, too
            cache.truncate(begins)
            raise
        y = self._rounded(linear(wide(o.reshape(B, N, len(p["w_o"]))), p, "o")).reshape(shape)
        if out is not None:
            out[...] = y
            y = out
        return (y, lse[0] if single else lse) if return_lse else y

    def _project(
        self, x: Array, context: Array | None, args: Arguments
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return what queries and what keys are made of, wide, and q, k and v, with positions."""
        h = wide(x)
        h = self.positions(h) if self._acts_on("x") else h
        c = h if context is None else wide(context)
        q = split_heads(linear(h, self.params, "q"), self.num_heads)
        k = split_heads(linear(c, self.params, "k"), self.num_kv_heads)
        v = split_heads(linear(c, self.params, "v"), self.num_kv_heads)
        if self._acts_on("qk"):
            at, length = rows_at(args, len(h), h.shape[1], c.shape[1])
            self.positions(q, at, out=q, length=length)
            self.positions(k, out=k, length=length)
        return h, c, self._rounded(q), self._rounded(k), self._rounded(v)

    def _project_backward(
        self, dq: Array, dk: Array, dv: Array, h: Array, c: Array, args: Arguments
    ) -> tuple[Array, Array, Params]:
        """Return gradients of what queries and what keys are made of, and of the weights."""
        if self._acts_on("qk"):
            at, length = rows_at(args, len(h), h.shape[1], c.shape[1])
            dk = self.positions.backward(dk, length=length)
            dq = self.positions.backward(dq, at, length=length)
        dc_v, dp_v = linear_backward(merge_heads(dv), c, self.params, "v")
        dc_k, dp_k = linear_backward(merge_heads(dk), c, self.params, "k")
        dh, dp_q = linear_backward(merge_heads(dq), h, self.params, "q")
        return dh, dc_k + dc_v, dp_q | dp_k | dp_v

    def _inputs(self, x: ArrayLike, context: ArrayLike | None) -> tuple[Array, Array | None, bool]:
        """Return the inputs as a batch, and whether they were a single item."""
        if self.positions is not None:  # whose arrays may have been replaced in `params`
            own = self.positions.params
            own.update((name, self.params[f"positions.{name}"]) for name in own)
        x = self._input("x", x, self.d_model)
        single = x.ndim == 2
        if context is None:
            if self.d_context != self.d_model:
                raise ValueError(f"context: expected rows of {self.d_context} numbers, got None")
            return x[None] if single else x, None, single
        context = self._input("context", context, self.d_context)
        if context.shape[:-2] != x.shape[:-2]:
            raise ValueError(f"x, context: expected one batch, got {x.shape} and {context.shape}")
        return (x[None], context[None], True) if single else (x, context, False)

    def _acts_on(self, what: str) -> bool:
        return self.positions is not None and self.positions.acts_on == what

    def _with_positions(self, args: Arguments, x: Array, context: Array | None) -> Arguments:
        """Add what the positions have to say about scores."""
        if not self._acts_on("scores"):
            return args
        more = self.positions.arguments(x.shape[1], (x if context is None else context).shape[1])
        for name in more:
            if args.get(name) is not None:
                raise ValueError(f"{name}: expected it from the layer's positions alone, got both")
        return cast(Arguments, {**args, **more})

    # Weights of other libraries

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        style: str,
        num_heads: int,
        *,
        prefix: str = "",
        num_kv_heads: int | None = None,
        positions: Any = None,
        dtype: DTypeLike | None = None,
    ) -> Self:
        """Make a layer of weights under the names that another library gives them.

        Parameters
        ----------
        state : mapping of str to array_like
            Weights by name, of any float dtype, bfloat16 too. They are copied.
        style : str
            Whose names and shapes: "torch" (``nn.MultiheadAttention``), or those of the attention
            in Hugging Face's models: "bert", "llama" (Mistral and Qwen2 too, and Phi-3's fused
            ``qkv_proj``) or "gpt2".
        num_heads : int
            Number of query heads. Other sizes follow from the weights.
        prefix : str, default ""
            What the names begin with, ``"model.layers.0.self_attn."`` for example. Others are not
            looked at.
        num_kv_heads : int, optional
            Number of key heads, to be checked.
        positions : scheme of nattn.positional, optional
            As in the class. Weights do not tell: "llama" needs ``Rotary(head_dim, base)``.
        dtype : dtype, optional
            float16, bfloat16, float32 or float64; by default float64 where all weights are, else
            float32.

        Returns
        -------
        MultiHeadAttention
            Of the attention alone, with the projection of its output, and without dropout, residual
            connection and normalisation. Call that of "llama" and "gpt2" with ``causal=True``.

        Raises
        ------
        ValueError, TypeError
            If names are missing or unexpected, all of which are listed, or if shapes do not fit:
            with the names and shapes of `state`.
        NotImplementedError
            If there are ``bias_k`` and ``bias_v`` of torch's ``add_bias_kv``.

        Notes
        -----
        Three kinds of names stand for no weights of attention, and are passed over: in "bert" those
        of the rest of the block (``attention.output.LayerNorm``, ``intermediate.dense``,
        ``output.dense``, ``output.LayerNorm``), in "llama" ``rotary_emb.inv_freq``, and in "gpt2"
        the causal mask (``bias``, ``masked_bias``).
        """
        config, params = translated(state, style, num_heads, prefix, num_kv_heads)
        if dtype is None:
            all64 = all(p.dtype == dtypes.FLOAT64 for p in params.values())
            dtype = dtypes.FLOAT64 if all64 else dtypes.FLOAT32
        return cls._made({**config, "positions": positions, "dtype": dtype}, params)
