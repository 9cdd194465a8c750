"""What the layers share: parameters and files of them, projections, and arguments of a call."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import positional
from ..api.functional import Gradients
from ..call.arguments import Arguments
from ..call.checks import (
    check_count,
    check_integers,
    check_name,
    float_dtype,
    host_array,
    overlaps_itself,
    share_memory,
)
from ..functions.learning import PREFIX
from ..vectors import dtypes
from . import files

Array = NDArray[Any]
Params = dict[str, Array]

_SCHEMES = ("Sinusoidal", "LearnedTable", "Rotary", "Alibi", "T5Bias")

_NO_CONFIG = (AttributeError, KeyError, TypeError, ValueError, MemoryError, RecursionError)
"""What may come of a text in a file that is not what `Layer.save` wrote."""


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


def wide(x: Array) -> Array:
    """Return numbers of 16 bits, exactly, as float32, in which BLAS multiplies; others as is."""
    return x.astype(dtypes.FLOAT32) if x.dtype.itemsize == 2 else x


def linear(x: Array, params: Params, name: str) -> Array:
    """``y = x @ w + b``, of the last axis of a wide x; without a bias, ``x @ w``."""
    w, b = wide(params[f"w_{name}"]), params.get(f"b_{name}")
    y = x.reshape(-1, x.shape[-1]) @ w  # one product for the whole batch
    if b is not None:
        y += wide(b)
    return y.reshape(*x.shape[:-1], w.shape[1])


def linear_backward(dy: Array, x: Array, params: Params, name: str) -> tuple[Array, Params]:
    """``dx = dy @ w.T``, ``dw = x.T @ dy`` and ``db = sum(dy)`` over all rows; all are wide."""
    w = wide(params[f"w_{name}"])
    rows = dy.reshape(-1, dy.shape[-1])
    grads = {f"w_{name}": x.reshape(-1, x.shape[-1]).T @ rows}
    if f"b_{name}" in params:
        grads[f"b_{name}"] = rows.sum(axis=0)
    return (rows @ w.T).reshape(x.shape), grads


def split_heads(y: Array, heads: int) -> Array:
    """View ``(B, N, heads * hd)`` as ``(B, heads, N, hd)``."""
    B, N, width = y.shape
    return y.reshape(B, N, heads, width // heads).swapaxes(1, 2)


def merge_heads(y: Array) -> Array:
    """Return ``(B, N, heads * hd)``: a view of what `split_heads` made, a copy of other arrays."""
    B, heads, N, hd = y.shape
    return y.swapaxes(1, 2).reshape(B, N, heads * hd)


# What both layers share


class Layer:
    """Parameters, their shapes, and files of them. What `__init__` takes is an attribute.

    A layer of 16 bits stores its parameters, inputs, outputs and gradients so, and q, k and v; what
    lies between is computed in float32, and rounded once.
    """

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
        return params | of_positions(self.positions)

    @classmethod
    def _made(cls, config: dict[str, Any], params: Params) -> Self:
        """Make a layer of parameters that have been checked, with copies of them."""
        layer = cls.__new__(cls)
        layer._configure(**config)
        params = {name: np.array(params[name], layer.dtype, order="C") for name in layer._shapes()}
        layer.params = params | of_positions(layer.positions)
        return layer

    # What a call starts with, and what it ends with

    @property
    def _compute(self) -> np.dtype:
        """What a layer computes in; of this dtype are the parameters of positions, too."""
        return dtypes.compute_dtype(self.dtype.name)

    def _rounded(self, x: Array) -> Array:
        """Round to the layer's dtype if that has 16 bits; what is too large becomes infinite."""
        if self.dtype.itemsize > 2:
            return x
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(self.dtype)

    def _rounded_all(self, grads: Params) -> Params:
        return {name: self._rounded(x) for name, x in grads.items()}

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
        path = files.checked_path(path)
        files.write(path, self.params, json.dumps(_config(self), default=_dtype_name))

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
            One that gives the same outputs, to the bit. Its dtype is that of the layer that was
            saved. The parameters may have been stored in another one since, in float16, bfloat16,
            float32 or float64: they are converted. (NumPy writes bfloat16 of the library ml_dtypes
            into a ``.npz`` as two bytes without a name, which are read as such.)

        Raises
        ------
        ValueError
            If the path has another ending, or what is there is no such layer: with the path, and
            with a list of the parameters that are missing, unexpected, or of another shape or
            dtype.
        ImportError
            If the library safetensors is wanted and not installed, or ml_dtypes for a layer of
            bfloat16.
        OSError
            If the file cannot be read.
        """
        path = files.checked_path(path)
        where = files.show(path)
        found, text = files.read(path)
        try:
            config = json.loads(text) if text else {}
            kind = config.pop("type", "a file without one")
            if kind == cls.__name__:
                scheme = config.get("positions")
                if scheme is not None:
                    config["positions"] = _scheme(scheme, config["dtype"])
                layer = cls.__new__(cls)
                layer._configure(**config)
        except _NO_CONFIG as error:
            raise ValueError(
                f"{where}: expected a config of `save`, got another ({error})"
            ) from error
        if kind != cls.__name__:
            raise ValueError(f"{where}: expected a file that holds a {cls.__name__}, got {kind}")
        learnt = of_positions(layer.positions)
        shapes = layer._shapes() | {name: p.shape for name, p in learnt.items()}
        what = f"the parameters of a {kind}"
        apart = dict.fromkeys(learnt, layer._compute)
        layer.params = files.fitted(where, what, found, shapes, layer.dtype, apart=apart)
        for name in learnt:
            layer.positions.params[name.removeprefix("positions.")] = layer.params[name]
        return layer


def _scheme(config: dict[str, Any], dtype: Any) -> Any:
    """Make positions of what `_config` returned for them, for a layer of a dtype."""
    kind = config.pop("type")
    check_name("type of positions", kind, _SCHEMES)
    scheme = getattr(positional, kind)(**config)
    compute = dtypes.compute_dtype(float_dtype("dtype", dtype, narrow=True).name)
    own = scheme.params
    own.update((name, p.astype(compute)) for name, p in own.items())
    return scheme


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


def size(name: str, value: Any, default: int) -> int:
    """Return a size that is given, or that by default."""
    return default if value is None else check_count(name, value)


def of_positions(positions: Any) -> Params:
    """Return the parameters of positions under the names that a layer gives them."""
    params = {} if positions is None else positions.params
    return {f"positions.{name}": p for name, p in params.items()}


# Arguments of a call


def own_args(args: Arguments, context: Array | None = None) -> Arguments:
    """Return arguments of attention, with row i of x at key i unless something else is said."""
    if "layout" in args:
        raise TypeError("layout: expected none, the layer has its own")
    if "cache" in args:
        raise TypeError(
            "cache: expected none where there are gradients: call the layer itself with one"
        )
    if context is None and args.get("q_offset") is None:
        args = {**args, "q_offset": 0}
    return args


def rows_at(args: Arguments, B: int, Nq: int, Nk: int) -> tuple[Any, int]:
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


def existing(x: Array, *lengths: Any) -> Array:
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


def asked(grads: Gradients, wrt: Sequence[str]) -> Params:
    """Return the gradients of arguments that were asked for, under their names."""
    return {
        name: grads.dmods[name] if name.startswith(PREFIX) else getattr(grads, f"d{name}")
        for name in wrt
    }


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, inputs: Iterable[Array | None]
) -> None:
    """Raise unless an output can be written to `out`, if there is one."""
    if out is None:
        return
    if not isinstance(out, np.ndarray) or out.dtype != dtype or not out.flags.writeable:
        got = getattr(out, "dtype", type(out).__name__)
        raise TypeError(f"out: expected a writable NumPy array of dtype {dtype}, got {got}")
    if out.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if overlaps_itself(out) or any(x is not None and share_memory(out, x) for x in inputs):
        raise ValueError("out: expected memory of its own, got some of an input or a parameter")


def checked_positions(positions: Any, layer: Layer) -> Any:
    """Return positions if they fit a layer."""
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
        if p.dtype != layer._compute:
            expected = f"{layer._compute}, which a layer of {layer.dtype} computes in"
            raise TypeError(f"positions: expected dtype {expected}, got {p.dtype}")
    return positions
