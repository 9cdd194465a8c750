"""Self-attention as a layer: projections, heads and positions around `nattn.attention`.

`SelfAttention` is the mechanism in its plainest form, `MultiHeadAttention` the layer of a
transformer. Both are NumPy: the parameters are arrays in a dictionary, to be read and changed in
place, a projection is ``y = x @ w + b``, and `vjp` returns, with the output, the function that
carries a gradient back to the input and to every parameter. In each `vjp` the steps back are in
the reverse order of the steps forward and have their names.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .. import positional
from ..api.functional import Gradients, attention_vjp
from ..call.arguments import Arguments
from ..call.checks import (
    check_count,
    check_flag,
    check_integers,
    check_name,
    float_dtype,
    host_array,
    overlaps_itself,
    share_memory,
)
from ..vectors import dtypes
from .files import replaced

Array = NDArray[Any]
Params = dict[str, Array]

_SCHEMES = ("Sinusoidal", "LearnedTable", "Rotary", "Alibi", "T5Bias")


class LayerGradients(NamedTuple):
    """Gradients of a loss that a layer's `backward` returns.

    Attributes
    ----------
    dx : ndarray
        Of the input, in its shape.
    dcontext : ndarray or None
        Of the context, in its shape; None without one.
    dparams : dict
        Of each parameter, under its name in `params`; and of the arguments of `nattn.attention`
        that were asked for in `wrt`, under theirs.
    """

    dx: Array
    dcontext: Array | None
    dparams: Params


Backward = Callable[..., LayerGradients]


# A projection, forward and backward


def _linear(x: Array, params: Params, name: str) -> Array:
    """``y = x @ w + b``, of the last axis; without a bias, ``x @ w``."""
    w, b = params[f"w_{name}"], params.get(f"b_{name}")
    y = x.reshape(-1, x.shape[-1]) @ w  # one product for the whole batch
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], w.shape[1])


def _linear_backward(dy: Array, x: Array, params: Params, name: str) -> tuple[Array, Params]:
    """``dx = dy @ w.T``, ``dw = x.T @ dy`` and ``db = sum(dy)`` over all rows."""
    w = params[f"w_{name}"]
    rows = dy.reshape(-1, dy.shape[-1])
    grads = {f"w_{name}": x.reshape(-1, x.shape[-1]).T @ rows}
    if f"b_{name}" in params:
        grads[f"b_{name}"] = rows.sum(axis=0)
    return (rows @ w.T).reshape(x.shape), grads


def _heads(y: Array, heads: int) -> Array:
    """View ``(B, N, heads * hd)`` as ``(B, heads, N, hd)``."""
    B, N, width = y.shape
    return y.reshape(B, N, heads, width // heads).swapaxes(1, 2)


def _merged(y: Array) -> Array:
    """Return ``(B, N, heads * hd)``: a view of what `_heads` made, a copy of other arrays."""
    B, heads, N, hd = y.shape
    return y.swapaxes(1, 2).reshape(B, N, heads * hd)


# What both layers share


class _Layer:
    """Parameters, their shapes, and files of them. What `__init__` takes is an attribute."""

    params: Params
    d_model: int
    dtype: np.dtype
    positions: Any = None

    _configure: Callable[..., None]
    """Check and keep what `__init__` takes, except for the seed."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer's own parameters, by name."""
        raise NotImplementedError

    def _initial(self, seed: int) -> Params:
        """Draw weights from N(0, 1 / d_in), which keeps unit variance; biases are 0."""
        rng = np.random.default_rng(check_count("seed", seed, 0))
        params = {}
        for name, shape in self._shapes().items():
            new = rng.standard_normal(shape) / math.sqrt(shape[0]) if len(shape) == 2 else 0.0
            params[name] = np.full(shape, new, self.dtype)
        return params | _of_positions(self.positions)

    @classmethod
    def _made(cls, config: dict[str, Any], params: Params, source: str) -> Self:
        """Make a layer of given parameters, which must be those that it has, and fit."""
        layer = cls.__new__(cls)
        layer._configure(**config)
        shapes = layer._shapes()
        of_positions = _of_positions(layer.positions)
        _check_names(source, {*shapes, *of_positions}, params)
        for name, shape in shapes.items():
            if params[name].shape != shape:
                got = params[name].shape
                raise ValueError(f"{source}: expected {name} of shape {shape}, got {got}")
        layer.params = {name: np.array(params[name], layer.dtype, order="C") for name in shapes}
        layer.params |= of_positions
        return layer

    # What a call starts with

    def _array(self, name: str, x: ArrayLike) -> Array:
        array = host_array(name, x)
        if array.dtype.newbyteorder("=") != self.dtype:
            expected = f"{name}: expected dtype {self.dtype} as of the layer"
            raise TypeError(f"{expected}, got {array.dtype}")
        return array.astype(self.dtype, copy=False)

    def _input(self, name: str, x: ArrayLike, width: int) -> Array:
        array = self._array(name, x)
        if array.ndim not in (2, 3) or array.shape[-1] != width:
            expected = f"{name}: expected shape (N, {width}) or (B, N, {width})"
            raise ValueError(f"{expected}, got {array.shape}")
        return array

    def _incoming(self, dout: ArrayLike, shape: tuple[int, ...]) -> Array:
        array = self._array("dout", dout)
        if array.shape != shape:
            raise ValueError(f"dout: expected shape {shape}, got {array.shape}")
        return array

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layer to a file, whole or not at all.

        Parameters
        ----------
        path : path
            Its ending says how: ``.npz``, which NumPy reads, or ``.safetensors``. The parameters
            are there under their names, and what else makes up the layer as JSON: in the array
            ``config`` or, in the other format, in the metadata under ``nattn``.

        Raises
        ------
        ValueError
            If the path has another ending.
        ImportError
            If the library safetensors is wanted and not installed.
        """
        path, suffix = _checked_path(path)
        config = json.dumps(_config(self), default=_dtype_name)
        with replaced(path) as part:
            if suffix == ".npz":
                np.savez(part, **cast(Any, self.params), config=np.array(config))
            else:
                tensors = {name: np.ascontiguousarray(x) for name, x in self.params.items()}
                _safetensors("safetensors.numpy").save_file(tensors, part, {"nattn": config})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a layer that `save` wrote.

        Parameters
        ----------
        path : path
            A file ``.npz`` or ``.safetensors``.

        Returns
        -------
        layer
            One that gives the same outputs, to the bit.

        Raises
        ------
        ValueError
            If the path has another ending, or what is there is no such layer: parameters that are
            missing and unexpected ones are listed.
        ImportError
            If the library safetensors is wanted and not installed.
        OSError
            If the file cannot be read.
        """
        params, text = _read(path)
        try:
            config = json.loads(text) if text else {}
            found = config.pop("type", "a file without one")
            scheme = config.get("positions")
            if scheme is not None:
                kind = scheme.pop("type")
                check_name("path: type of positions", kind, _SCHEMES)
                config["positions"] = scheme = getattr(positional, kind)(**scheme)
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"path: expected a config of `save`, got another ({error})") from error
        if found != cls.__name__:
            raise ValueError(f"path: expected a file that holds a {cls.__name__}, got {found}")
        learnt: Params = {} if scheme is None else scheme.params
        for name, own in learnt.items():
            got = params.get(f"positions.{name}", own)
            if got.shape != own.shape:
                raise ValueError(
                    f"path: expected positions.{name} of shape {own.shape}, got {got.shape}"
                )
            learnt[name] = got
        return cls._made(config, params, "path")


def _read(path: str | os.PathLike[str]) -> tuple[Params, str]:
    """Return the arrays in a file, and the text of what else there is to say."""
    path, suffix = _checked_path(path)
    library = _safetensors("safetensors") if suffix == ".safetensors" else None
    try:
        if library is None:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                params = dict(file)
                return params, str(params.pop("config", ""))
        with library.safe_open(path, framework="numpy") as file:
            params = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return params, (file.metadata() or {}).get("nattn", "")
    except OSError:
        raise
    except Exception as error:  # each format has exceptions of its own
        raise ValueError(f"path: expected a file {suffix}, got {str(path)!r}: {error}") from error


def _dtype_name(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):
        raise TypeError(f"positions: expected what JSON can hold, got {dtype!r}")
    return dtype.name


def _config(thing: Any) -> dict[str, Any]:
    """Return a layer's type and what its `__init__` takes, of its positions too, by name."""
    config: dict[str, Any] = {"type": type(thing).__name__}
    for name in inspect.signature(type(thing)).parameters:
        if hasattr(thing, name):  # not the seed, and nothing that parameters tell
            config[name] = getattr(thing, name)
    positions = config.get("positions")
    if positions is not None:
        if type(positions).__name__ not in positional.__all__:
            expected = "positions: expected one of nattn.positional, which `load` knows"
            raise TypeError(f"{expected}, got {type(positions).__name__}")
        config["positions"] = _config(positions)
    return config


def _size(name: str, value: Any, default: int) -> int:
    return default if value is None else check_count(name, value)


def _of_positions(positions: Any) -> Params:
    """Return the parameters of positions under the names that a layer gives them."""
    params = {} if positions is None else positions.params
    return {f"positions.{name}": p for name, p in params.items()}


def _check_names(source: str, expected: Iterable[str], got: Iterable[str]) -> None:
    missing = sorted(set(expected) - set(got))
    unexpected = sorted(set(got) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{source}: expected other names of parameters, got some missing "
            f"({', '.join(missing) or 'none'}) or unexpected ({', '.join(unexpected) or 'none'})"
        )


def _checked_path(path: str | os.PathLike[str]) -> tuple[Path, str]:
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"path: expected one that ends in .npz or .safetensors, got {str(path)!r}")
    return path, path.suffix


def _safetensors(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "path: expected the library safetensors for a file .safetensors, got none that can be "
            f'imported ({error}); install it with pip install "nattn[safetensors]"'
        ) from error


# Arguments of a call


def _own_args(args: Arguments, context: Array | None = None) -> Arguments:
    """Return arguments of attention, with row i of x at key i unless something else is said."""
    if "layout" in args:
        raise TypeError("layout: expected none, the layer has its own")
    if context is None and args.get("q_offset") is None:
        args = {**args, "q_offset": 0}
    return args


def _rows_at(args: Arguments, B: int, Nq: int, Nk: int) -> tuple[Any, int]:
    """Return where queries stand on the axis of keys, and how many positions are in use."""
    at = args.get("q_offset")
    if at is None:
        ends = (args.get("kv_lens"), Nk), (args.get("q_lens"), Nq)
        kv_lens, q_lens = (
            check_integers(name, N if lens is None else lens, B)
            for name, (lens, N) in zip(("kv_lens", "q_lens"), ends, strict=True)
        )
        offsets = [n - m for n, m in zip(kv_lens, q_lens, strict=True)]
    else:
        offsets = check_integers("q_offset", at, B)
    length = max(Nk, Nq + max(offsets, default=0))
    if len(set(offsets)) <= 1:
        return (offsets[0] if offsets else 0), length
    return np.array(offsets)[:, None] + np.arange(Nq), length


def _existing(x: Array, *lengths: Any) -> Array:
    """Return ``(B, N, ...)`` with 0 in the rows past all lengths: NaN there would reach products.

    With a length of None all rows exist.
    """
    if any(n is None for n in lengths):
        return x
    B, N = x.shape[:2]
    ends = np.array([check_integers("q_lens, kv_lens", n, B) for n in lengths]).max(axis=0)
    gone = np.arange(N) >= ends[:, None]
    if gone.any():
        x = x.copy()
        x[gone] = 0.0
    return x


def _asked(grads: Gradients, wrt: Sequence[str]) -> Params:
    return {name: getattr(grads, f"d{name}") for name in wrt}


def _check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, inputs: Iterable[Array | None]
) -> None:
    if out is None:
        return
    if not isinstance(out, np.ndarray) or out.dtype != dtype or not out.flags.writeable:
        got = getattr(out, "dtype", type(out).__name__)
        raise TypeError(f"out: expected a writable NumPy array of dtype {dtype}, got {got}")
    if out.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if overlaps_itself(out) or any(x is not None and share_memory(out, x) for x in inputs):
        raise ValueError("out: expected memory of its own, got some of an input or a parameter")


def _checked_positions(positions: Any, layer: MultiHeadAttention) -> Any:
    if positions is None:
        return None
    if getattr(positions, "acts_on", None) not in ("x", "qk", "scores"):
        got = type(positions).__name__
        raise TypeError(f"positions: expected a scheme of nattn.positional, got {got}")
    for name in ("d_model", "head_dim", "num_heads"):
        own, its = getattr(layer, name), getattr(positions, name, None)
        if its not in (None, own):
            raise ValueError(f"positions: expected {name} = {own} as of the layer, got {its}")
    for p in positions.params.values():
        if p.dtype != layer.dtype:
            raise TypeError(
                f"positions: expected dtype {layer.dtype} as of the layer, got {p.dtype}"
            )
    return positions


# The layers


class SelfAttention(_Layer):
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
        float32 or float64, of parameters, input and output.

    Attributes
    ----------
    params : dict
        ``w_q`` and ``w_k`` ``(d_model, d_k)``, ``w_v`` ``(d_model, d_v)``, and with biases
        ``b_q``, ``b_k`` ``(d_k,)`` and ``b_v`` ``(d_v,)``.

    Raises
    ------
    ValueError, TypeError
        For bad sizes and dtypes, and by a call for an input that does not fit.

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
        self.d_k = _size("d_k", d_k, self.d_model)
        self.d_v = _size("d_v", d_v, self.d_model)
        self.bias = check_flag("bias", bias)
        self.dtype = float_dtype("dtype", dtype)

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
        x = self._input("x", x, self.d_model)
        q, k, v = (_linear(x, self.params, name) for name in "qkv")
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
            arguments that have a gradient too: "bias", "sinks", "alibi_slopes". It holds views of
            x, of the parameters and, unless there is `out`, of the output: call it before they
            change.
        """
        x, p = self._input("x", x, self.d_model), self.params
        _check_out(out, (*x.shape[:-1], self.d_v), self.dtype, (x, *p.values()))
        args = _own_args(args)
        batched = x.ndim == 3
        rows = x if batched else x[None]
        x = _existing(rows, args.get("q_lens"), args.get("kv_lens")).reshape(x.shape)

        q, k, v = self.qkv(x)
        result, attend_backward = attention_vjp(q, k, v, return_lse=True, backend=backend, **args)
        y, lse = result[0][:, 0] if batched else result[0], result[1]

        def backward(
            dout: ArrayLike, dlse: ArrayLike | None = None, wrt: Sequence[str] = ()
        ) -> LayerGradients:
            dy = self._incoming(dout, y.shape)
            grads = attend_backward(dy[:, None] if batched else dy, dlse, ("q", "k", "v", *wrt))
            dq, dk, dv = cast(tuple[Array, Array, Array], grads[:3])
            dx_v, dp_v = _linear_backward(dv, x, p, "v")
            dx_k, dp_k = _linear_backward(dk, x, p, "k")
            dx_q, dp_q = _linear_backward(dq, x, p, "q")
            dparams = dp_q | dp_k | dp_v | _asked(grads, wrt)
            return LayerGradients(dx_q + dx_k + dx_v, None, dparams)

        given = y
        if out is not None:
            out[...] = y
            given = out
        return ((given, lse) if return_lse else given), backward


class MultiHeadAttention(_Layer):
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
        `acts_on` says; a context is not changed by one that acts on x. Of `T5Bias` beside a
        mask_mod, a block_mask or ALiBi there is no gradient.
    seed : int, default 0
        Of the weights, which are drawn from N(0, 1 / d_in), d_in being the first of their axes.
        Biases are 0.
    dtype : dtype, default float32
        float32 or float64, of parameters, input and output.

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
        self.num_kv_heads = _size("num_kv_heads", num_kv_heads, self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of the {num_heads} heads, got {num_kv_heads}"
            )
        if head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of d_model = {d_model}, or a head_dim besides, got "
                f"{num_heads}"
            )
        self.head_dim = _size("head_dim", head_dim, self.d_model // self.num_heads)
        self.d_context = _size("d_context", d_context, self.d_model)
        self.bias = bias if bias == "qkv" else check_flag("bias", bias)
        self.dtype = float_dtype("dtype", dtype)
        self.positions = _checked_positions(positions, self)

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

    def __call__(self, x: ArrayLike, context: ArrayLike | None = None, **args: Any) -> Any:
        """Return the output for an input; see `vjp`, whose arguments these are."""
        return self.vjp(x, context, **args)[0]

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
        _, _, q, k, v = self._project(x, context, _own_args(args, context))
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
            arguments that have a gradient too: "bias", "sinks", "alibi_slopes". It holds views of
            x, the context and the parameters: call it before they change.
        """
        x, context, single = self._inputs(x, context)
        p, shape = self.params, x.shape[single:]
        _check_out(out, shape, self.dtype, (x, context, *p.values()))
        args = self._with_positions(_own_args(args, context), x, context)
        q_lens, kv_lens = args.get("q_lens"), args.get("kv_lens")
        if context is None:
            x = _existing(x, q_lens, kv_lens)
        else:
            x, context = _existing(x, q_lens), _existing(context, kv_lens)

        h, c, q, k, v = self._project(x, context, args)
        o = np.empty((*x.shape[:2], len(p["w_o"])), self.dtype)
        (_, lse), attend_backward = attention_vjp(
            q, k, v, return_lse=True, out=_heads(o, self.num_heads), backend=backend, **args
        )
        y = _linear(o, p, "o")

        def backward(
            dout: ArrayLike, dlse: ArrayLike | None = None, wrt: Sequence[str] = ()
        ) -> LayerGradients:
            dy = self._incoming(dout, shape)
            dlse = dlse if dlse is None or not single else np.asarray(dlse)[None]
            do, dp_o = _linear_backward(dy, o, p, "o")
            dp_pos: Params = {}
            if self._acts_on("scores"):
                do_, o_ = _heads(do, self.num_heads), _heads(o, self.num_heads)
                dp_pos = self.positions.backward(
                    do_, q, k, v, o_, lse, dlse=dlse, backend=backend, **args
                )
            grads = attend_backward(_heads(do, self.num_heads), dlse, ("q", "k", "v", *wrt))
            dq, dk, dv = cast(tuple[Array, Array, Array], grads[:3])
            dh, dc, dp = self._project_backward(dq, dk, dv, h, c, args)
            dcontext = None if context is None else dc[0] if single else dc
            dx = dh + dc if context is None else dh
            if self._acts_on("x"):
                dx, dp_pos = self.positions.backward(dx)
            dp |= dp_o | {f"positions.{name}": dparam for name, dparam in dp_pos.items()}
            dparams = dp | _asked(grads, wrt)
            return LayerGradients(dx.reshape(shape), dcontext, dparams)

        y = y.reshape(shape)
        if out is not None:
            out[...] = y
            y = out
        return ((y, lse[0] if single else lse) if return_lse else y), backward

    def _project(
        self, x: Array, context: Array | None, args: Arguments
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return what queries and what keys are made of, and q, k and v, positions included."""
        h = self.positions(x) if self._acts_on("x") else x
        c = h if context is None else context
        q = _heads(_linear(h, self.params, "q"), self.num_heads)
        k = _heads(_linear(c, self.params, "k"), self.num_kv_heads)
        v = _heads(_linear(c, self.params, "v"), self.num_kv_heads)
        if self._acts_on("qk"):
            at, length = _rows_at(args, len(h), h.shape[1], c.shape[1])
            self.positions(q, at, out=q, length=length)
            self.positions(k, out=k, length=length)
        return h, c, q, k, v

    def _project_backward(
        self, dq: Array, dk: Array, dv: Array, h: Array, c: Array, args: Arguments
    ) -> tuple[Array, Array, Params]:
        """Return gradients of what queries and what keys are made of, and of the weights."""
        if self._acts_on("qk"):
            at, length = _rows_at(args, len(h), h.shape[1], c.shape[1])
            dk = self.positions.backward(dk, length=length)
            dq = self.positions.backward(dq, at, length=length)
        dc_v, dp_v = _linear_backward(_merged(dv), c, self.params, "v")
        dc_k, dp_k = _linear_backward(_merged(dk), c, self.params, "k")
        dh, dp_q = _linear_backward(_merged(dq), h, self.params, "q")
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
            float32 or float64; by default float64 where all weights are, else float32.

        Returns
        -------
        MultiHeadAttention
            Of the attention alone, with the projection of its output, and without dropout, residual
            connection and normalisation. Call that of "llama" and "gpt2" with ``causal=True``.

        Raises
        ------
        ValueError, TypeError
            If names are missing or unexpected, all of which are listed, or if shapes do not fit.
        NotImplementedError
            If there are ``bias_k`` and ``bias_v`` of torch's ``add_bias_kv``.

        Notes
        -----
        Three kinds of names stand for no weights of attention, and are passed over: in "bert" those
        of the rest of the block (``attention.output.LayerNorm``, ``intermediate.dense``,
        ``output.dense``, ``output.LayerNorm``), in "llama" ``rotary_emb.inv_freq``, and in "gpt2"
        the causal mask (``bias``, ``masked_bias``).
        """
        check_name("style", style, tuple(_STYLES))
        known = _STYLES[style]
        num_heads = check_count("num_heads", num_heads)
        found = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
        if style == "torch" and {"bias_k", "bias_v"} & found.keys():
            raise NotImplementedError(
                "state: expected no bias_k and bias_v (add_bias_kv), got them"
            )
        weights, biases = _closest(known.weights, found), _closest(known.biases, found)
        names = {*weights.values(), *biases.values()}
        where = f"state, after {prefix!r}" if prefix else "state"
        _check_names(where, names, found.keys() - known.others)

        arrays = {name: _weights(prefix + name, found[name]) for name in names}
        if dtype is None:
            all64 = all(x.dtype == dtypes.FLOAT64 for x in arrays.values())
            dtype = dtypes.FLOAT64 if all64 else dtypes.FLOAT32
        if style != "gpt2":  # whose matrices are (d_in, d_out), as here
            arrays = {name: x.T for name, x in arrays.items()}
        wide = len(arrays[weights["o"]])
        params: Params = {}
        for kind, of in (("w", weights), ("b", biases)):
            for letters, name in of.items():
                x, parts = arrays[name], [arrays[name]]
                if letters == "qkv":
                    narrow = (x.shape[-1] - wide) // 2
                    parts = np.split(x, [wide, wide + narrow], axis=-1)
                params |= {f"{kind}_{one}": y for one, y in zip(letters, parts, strict=True)}

        (d_context, narrow), d_model = params["w_k"].shape, params["w_o"].shape[1]
        head_dim = wide // num_heads
        if head_dim * num_heads != wide:
            raise ValueError(f"num_heads: expected a divisor of {wide}, got {num_heads}")
        if narrow % head_dim or num_kv_heads not in (None, narrow // head_dim):
            raise ValueError(
                f"num_kv_heads: expected {narrow / head_dim:g} for keys of {narrow} columns and "
                f"heads of {head_dim}, got {num_kv_heads}"
            )
        config = {
            "d_model": d_model,
            "num_heads": num_heads,
            "num_kv_heads": narrow // head_dim,
            "head_dim": head_dim,
            "d_context": d_context,
            "bias": {"": False, "qkv": "qkv", "qkvo": True}["".join(biases)],
            "positions": positions,
            "dtype": dtype,
        }
        return cls._made(config, params | _of_positions(positions), "state")


class _Style(NamedTuple):
    """How a library names what attention consists of.

    Attributes
    ----------
    weights, biases : tuple of dict
        Ways to name all of them: from the letters of projections, fused ones together, to a name.
    others : set of str
        Names that stand for nothing of attention.
    """

    weights: tuple[dict[str, str], ...]
    biases: tuple[dict[str, str], ...]
    others: frozenset[str] = frozenset()


def _each(pattern: str, **letters: str) -> dict[str, str]:
    return {letter: pattern.format(name) for letter, name in letters.items()}


_TORCH = {"q": "q_proj_weight", "k": "k_proj_weight", "v": "v_proj_weight"}
_BERT = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
_LLAMA = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
_PHI = {"qkv": "qkv_proj"}
_GPT2 = {"qkv": "c_attn", "o": "c_proj"}
_STYLES = {
    "torch": _Style(
        weights=(
            {"qkv": "in_proj_weight", "o": "out_proj.weight"},
            {**_TORCH, "o": "out_proj.weight"},
        ),
        biases=({}, {"qkv": "in_proj_bias", "o": "out_proj.bias"}),
    ),
    "bert": _Style(
        weights=(_each("attention.{}.weight", **_BERT),),
        biases=(_each("attention.{}.bias", **_BERT),),
        others=frozenset(
            f"{module}.{kind}"
            for module in (
                "attention.output.LayerNorm",
                "intermediate.dense",
                "output.dense",
                "output.LayerNorm",
            )
            for kind in ("weight", "bias")
        ),
    ),
    "llama": _Style(
        weights=(_each("{}.weight", **_LLAMA, o="o_proj"), _each("{}.weight", **_PHI, o="o_proj")),
        biases=(
            {},
            _each("{}.bias", **_LLAMA),
            _each("{}.bias", **_LLAMA, o="o_proj"),
            _each("{}.bias", **_PHI),
            _each("{}.bias", **_PHI, o="o_proj"),
        ),
        others=frozenset({"rotary_emb.inv_freq"}),
    ),
    "gpt2": _Style(
        weights=(_each("{}.weight", **_GPT2),),
        biases=(_each("{}.bias", **_GPT2),),
        others=frozenset({"bias", "masked_bias"}),
    ),
}


def _closest(ways: tuple[dict[str, str], ...], found: Iterable[str]) -> dict[str, str]:
    """Return the way to name things of which most is there; of two the first, which is shorter."""
    return max(ways, key=lambda way: len(set(way.values()) & set(found)))


def _weights(name: str, value: Any) -> Array:
    array = dtypes.widen(host_array(name, value))
    axes = 2 if name.endswith("weight") else 1
    if not dtypes.is_float(array.dtype) or array.ndim != axes:
        got = f"shape {array.shape} and dtype {array.dtype}"
        raise ValueError(f"state: expected {axes} axes of a float dtype for {name}, got {got}")
    return array
