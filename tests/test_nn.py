"""Layers: against the formula in float64, finite differences, and the layers of other libraries."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import FLOATS, narrowed, safetensors_bytes
from model_files import stored as in_dtype
from numpy.typing import NDArray

import nattn
from nattn.backends.error_budget import UNIT, error_budget, pair_budget
from nattn.backends.error_budget import stored as budget_of_stored
from nattn.nn import MultiHeadAttention, SelfAttention, base, files, layers
from nattn.positional import Alibi, LearnedTable, Rotary, Sinusoidal, T5Bias, rotary_frequencies
from nattn.vectors import dtypes

Array = NDArray[Any]

DATA = Path(__file__).parent / "data"
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
NARROW = ["float16", "bfloat16"]


# The formula in float64, with bounds of what rounding can do in the dtype of the layer


@dataclass(frozen=True)
class Bounded:
    """Exact values, and how far those that are computed in a dtype may be from them.

    Attributes
    ----------
    x, e : ndarray
        Values, and bounds of ``|computed - x|``.
    u : float
        Unit roundoff, twice that in float64, where x is not exact either.
    """

    x: Array
    e: Array
    u: float

    @property
    def size(self) -> Array:
        return np.abs(self.x) + self.e

    def of(self, view: Callable[[Array], Array]) -> Bounded:
        return Bounded(view(self.x), view(self.e), self.u)

    def __add__(self, y: Bounded) -> Bounded:
        total = self.x + y.x
        return Bounded(total, self.e + y.e + self.u * (np.abs(total) + self.e + y.e), self.u)

    def __mul__(self, y: Bounded) -> Bounded:
        e = np.abs(self.x) * y.e + self.e * y.size
        return Bounded(self.x * y.x, e + self.u * self.size * y.size, self.u)

    def __matmul__(self, y: Bounded) -> Bounded:
        """Sum in any order: `sum_budget`."""
        e = np.abs(self.x) @ y.e + self.e @ y.size
        n = self.x.shape[-1]
        return Bounded(self.x @ y.x, e + (n + 3) * self.u * (self.size @ y.size), self.u)

    def sum(self, axis: int | tuple[int, ...]) -> Bounded:
        n = self.x.size // max(self.x.sum(axis).size, 1)
        return Bounded(
            self.x.sum(axis), self.e.sum(axis) + n * self.u * self.size.sum(axis), self.u
        )

    def scaled(self, c: float) -> Bounded:
        """Multiply by a factor that is rounded itself."""
        return Bounded(self.x * c, abs(c) * (self.e + 2 * self.u * self.size), self.u)

    @property
    def T(self) -> Bounded:
        return self.of(lambda x: x.swapaxes(-1, -2))


def bounded(x: Array, dtype: np.dtype, u: float = 0.0) -> Bounded:
    """Return what is known to ``u |x|``."""
    x = x.astype(np.float64)
    roundoff = float(np.finfo(dtype).eps) * (0.5 if dtype == FLOAT32 else 1.0)
    return Bounded(x, u * np.abs(x), roundoff)


def kept_in(dtype: np.dtype, y: Bounded) -> Bounded:
    """Return what is left of values that are rounded to the layer's dtype if that has 16 bits."""
    narrow = dtype.itemsize == 2
    return Bounded(y.x, budget_of_stored(dtype.name, y.x, y.e), y.u) if narrow else y


def softmax_attention(
    q: Bounded, k: Bounded, v: Bounded, dout: Bounded, hidden: Array, bias: Array, storage: np.dtype
) -> tuple[Bounded, Bounded, Bounded, Bounded]:
    """Return out, dq, dk and dv of ``(B, H, N, hd)`` arrays by the formula, before rounding."""
    D = q.x.shape[-1]
    dtype = dtypes.compute_dtype(storage.name)
    # with bfloat16, weights and their gradients may be rounded to it before they are multiplied,
    # and what is not normal flushed
    unit, tiny = (UNIT["bfloat16"], 2.0**-126) if storage.name == "bfloat16" else (0.0, 0.0)
    scores = (q @ k.T).scaled(1 / math.sqrt(D)) + bounded(bias, dtype)
    # errors of q and k in 16 bits are not that small: budgets are of first order, so they get what
    # the exponential makes of errors of a score and of lse
    scores = Bounded(scores.x, np.expm1(2 * scores.e) / 2, scores.u)
    s = np.where(hidden, -np.inf, scores.x)
    n = (~hidden).sum(axis=-1)
    E, S, V = scores.e.max(axis=-1), scores.size.max(axis=-1), v.size.max(axis=(-1, -2))
    lse = np.log(np.exp(s).sum(axis=-1))
    p = np.exp(s - lse[..., None])
    budget = error_budget(dtype, n, S, V[..., None], D, score_error=E, weight_unit=unit)
    out = Bounded(p @ v.x, budget.out[..., None] + p @ v.e, q.u)

    dp, delta = dout @ v.T, (dout * out).sum(-1).of(lambda x: x[..., None])
    pairs = pair_budget(
        dtype,
        p,
        np.where(hidden, 0.0, s - lse[..., None]),
        dp.x,
        delta.x,
        score_error=scores.e,
        lse_error=budget.lse[..., None],
        dp_size=dout.size @ v.T.size,
        delta_error=delta.e + dp.e,
        Dv=D,
    )

    def multiplied(x: Array, e: Array) -> Bounded:
        return Bounded(x, np.where(hidden, 0.0, e + unit * (np.abs(x) + e) + tiny), q.u)

    weight, ds = multiplied(p, pairs.weight), multiplied(p * (dp.x - delta.x), pairs.ds)
    c = 1 / math.sqrt(D)
    return out, (ds @ k).scaled(c), (ds.T @ q).scaled(c), weight.T @ dout


def turned(n: int, positions: Rotary, dtype: np.dtype) -> Bounded:
    """Return the rotation of each position as a matrix, ``(n, hd, hd)``.

    An angle of float32 is a product of rounded factors; a cosine of it errs by as much, and is
    rounded.
    """
    hd = positions.head_dim
    one = np.eye(hd)
    R = positions(np.broadcast_to(one[:, None], (hd, n, hd)).copy()).swapaxes(0, 1)
    np.testing.assert_allclose(R @ R.swapaxes(1, 2), np.broadcast_to(one, R.shape), atol=1e-14)
    angles = np.arange(n)[:, None, None] + 1.0
    x = bounded(R, dtype)
    return Bounded(x.x, (R != 0) * 4 * x.u * angles, x.u)


def formula(
    layer: Any, x: Array, context: Array | None, dout: Array, hidden: Array, bias: Array
) -> dict[str, Bounded]:
    """Return the output and all gradients of a layer by the textbook, from ``(B, N, d)``."""
    compute = dtypes.compute_dtype(layer.dtype.name)
    exact, kept = functools.partial(bounded, dtype=compute), functools.partial(kept_in, layer.dtype)
    p = {name: exact(array) for name, array in layer.params.items()}
    many = isinstance(layer, MultiHeadAttention)
    hd, group = (layer.head_dim, layer.num_heads // layer.num_kv_heads) if many else (1, 1)

    def linear(y: Bounded, name: str) -> Bounded:
        y = y @ p[f"w_{name}"]
        return y + p[f"b_{name}"] if f"b_{name}" in p else y

    def back(dy: Bounded, y: Bounded, name: str) -> Bounded:
        rows, inputs = (z.of(lambda z: z.reshape(-1, z.shape[-1])) for z in (dy, y))
        grads[f"w_{name}"] = kept(inputs.T @ rows)
        if f"b_{name}" in p:
            grads[f"b_{name}"] = kept(rows.sum(0))
        return dy @ p[f"w_{name}"].T

    def split(y: Bounded, repeats: int = 1) -> Bounded:
        width = hd if many else y.x.shape[-1]
        y = y.of(lambda y: y.reshape(*y.shape[:2], -1, width).swapaxes(1, 2))
        return y.of(lambda y: np.repeat(y, repeats, axis=1))

    def summed(y: Bounded) -> Bounded:
        return y.of(lambda y: y.reshape(len(y), -1, group, *y.shape[2:])).sum(2)

    def merge(y: Bounded) -> Bounded:
        return y.of(lambda y: y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1))

    def turn(y: Bounded, R: Bounded) -> Bounded:
        return (y.of(lambda y: y[..., None, :]) @ R).of(lambda y: y[..., 0, :])

    grads: dict[str, Bounded] = {}
    positions = layer.positions
    h = exact(x)
    if isinstance(positions, Sinusoidal | LearnedTable):
        zero = np.zeros(x.shape[1:], compute)
        h = h + bounded(positions(zero), compute, u=2 * h.u)
    c = h if context is None else exact(context)
    q, k, v = split(linear(h, "q")), split(linear(c, "k"), group), split(linear(c, "v"), group)
    if isinstance(positions, Rotary):
        Rq, Rk = (turned(y.x.shape[2], positions, compute) for y in (q, k))
        q, k = turn(q, Rq), turn(k, Rk)
    q, k, v = kept(q), kept(k), kept(v)
    y = exact(dout)
    do = split(kept(y @ p["w_o"].T) if many else y)
    o, dq, dk, dv = softmax_attention(q, k, v, do, hidden, bias, layer.dtype)
    o, dq, dk, dv = kept(o), kept(dq), kept(summed(dk)), kept(summed(dv))
    if isinstance(positions, Rotary):
        dq, dk = turn(dq, Rq.T), turn(dk, Rk.T)
    if many:
        back(y, merge(o), "o")
    out = kept(linear(merge(o), "o")) if many else merge(o)
    dc = back(merge(dk), c, "k") + back(merge(dv), c, "v")
    dx = back(merge(dq), h, "q")
    dx = dx + dc if context is None else dx
    if isinstance(positions, LearnedTable):
        n = x.shape[1]
        grads["positions.table"] = dx.sum(0).of(
            lambda g: np.concatenate([g, np.zeros((positions.max_len - n, g.shape[1]))])
        )
    grads |= {"out": out, "dx": kept(dx)}
    return grads if context is None else grads | {"dcontext": kept(dc)}


def assert_within(got: Array, expected: Bounded, what: str = "") -> None:
    assert got.shape == expected.x.shape, what
    error = np.abs(got.astype(np.float64) - expected.x)
    assert (error <= expected.e).all(), f"{what}: {error.max()} and {expected.e.max()}"


# What is called


@dataclass(frozen=True)
class Call:
    """A layer, and what it is called with: arguments, and what they hide and add."""

    make: Callable[..., Any]
    N: int = 6
    N_context: int = 0
    d_context: int = 8
    causal: bool = False
    kv_lens: tuple[int, ...] | None = None
    biased: bool = False
    slopes: tuple[float, ...] = ()  # what the layer's positions are known to take from scores


ROTARY = {name: functools.partial(Rotary, 4, pairing=name) for name in ("half", "interleaved")}
SELF = functools.partial(SelfAttention, 8, 4, 6)
MULTI = functools.partial(MultiHeadAttention, 8, 4)
GQA = functools.partial(MultiHeadAttention, 8, 4, num_kv_heads=2, head_dim=4)
CALLS = {
    "one head": Call(SELF),
    "one head, causal": Call(functools.partial(SELF, bias=True), causal=True),
    "heads": Call(MULTI),
    "heads, lengths": Call(GQA, causal=True, kv_lens=(6, 1)),
    "heads, no bias": Call(functools.partial(GQA, bias=False), biased=True),
    "heads, qkv": Call(functools.partial(GQA, bias="qkv"), causal=True, biased=True),
    "context": Call(GQA, N_context=9, causal=True),
    "long context": Call(functools.partial(MULTI, d_context=5), N_context=3, d_context=5),
    "sinusoidal": Call(lambda **o: MULTI(positions=Sinusoidal(8), **o)),
    "table": Call(
        lambda dtype, **o: MULTI(
            positions=LearnedTable(7, 8, dtype=dtypes.compute_dtype(dtype.name)), dtype=dtype, **o
        )
    ),
    "rotary": Call(lambda **o: GQA(positions=ROTARY["half"](), **o), causal=True),
    "rotary, pairs": Call(lambda **o: GQA(positions=ROTARY["interleaved"](), **o), kv_lens=(6, 4)),
    "alibi": Call(
        lambda **o: GQA(positions=Alibi(4), **o), causal=True, slopes=(0.25, 2**-4, 2**-6, 2**-8)
    ),
}


@dataclass(frozen=True)
class Ready:
    layer: Any
    x: Array
    context: Array | None
    dout: Array
    args: dict[str, Any]
    truth: dict[str, Bounded]

    def run(self) -> dict[str, Array]:
        inputs = (self.x,) if self.context is None else (self.x, self.context)
        out, backward = self.layer.vjp(*inputs, **self.args)
        grads = backward(self.dout)
        assert list(grads.dparams) == list(self.layer.params) or set(grads.dparams) == set(
            self.layer.params
        )
        found = {"out": out, "dx": grads.dx, **grads.dparams}
        assert (grads.dcontext is None) == (self.context is None)
        return found if self.context is None else found | {"dcontext": grads.dcontext}


def ready(call: Call, dtype: str, B: int = 2) -> Ready:
    rng = np.random.default_rng(0)
    layer = call.make(seed=1, dtype=dtypes.storage_dtype(dtype))
    for name, p in layer.params.items():
        if name.startswith("b_"):
            p[...] = rng.standard_normal(p.shape)
    Nk = call.N_context or call.N
    x = rng.standard_normal((B, call.N, 8)).astype(dtype)
    context = rng.standard_normal((B, Nk, call.d_context)).astype(dtype) if call.N_context else None
    H = getattr(layer, "num_heads", 1)
    i, j = np.arange(call.N)[:, None], np.arange(Nk)[None]
    pos = i + (Nk - call.N if call.N_context else 0)
    hidden, bias = np.zeros((B, H, call.N, Nk), bool), np.zeros((B, H, call.N, Nk))
    args: dict[str, Any] = {}
    if call.causal:
        args["causal"] = True
        hidden |= j > pos
    if call.kv_lens is not None:
        args["kv_lens"] = np.array(call.kv_lens[:B])
        hidden |= j >= args["kv_lens"][:, None, None, None]
    if call.biased:
        args["bias"] = rng.standard_normal((H, call.N, Nk)).astype(dtype)
        bias = bias + args["bias"].astype(np.float64)
    if call.slopes:
        bias = bias - np.array(call.slopes)[:, None, None] * abs(pos - j)
    dout = np.asarray(layer(x, *([] if context is None else [context]), **args))
    dout = rng.standard_normal(dout.shape).astype(dtype)
    return Ready(layer, x, context, dout, args, formula(layer, x, context, dout, hidden, bias))


NARROW_CALLS = ["one head, causal", "heads, lengths", "context", "table", "rotary"]
"""Both layers, grouped heads, a context, and positions on x and on q and k: tried in 16 bits."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(CALLS, ["float32", "float64"]),
        *itertools.product(NARROW_CALLS, NARROW),
    ],
)
def test_output_and_gradients_are_those_of_the_formula(name: str, dtype: str) -> None:
    it = ready(CALLS[name], dtype)
    found = it.run()
    assert found.keys() == it.truth.keys()
    for what, got in found.items():
        of = it.layer.params.get(what, it.x).dtype  # positions have the compute dtype
        assert got.dtype == (of if what.startswith("positions.") else dtype)
        assert_within(got, it.truth[what], what)


def attention_of(dtype: np.dtype) -> Callable[..., Any]:
    """Return `attention_vjp` for arrays of float32: it attends in 16 bits, and widens results."""

    def attend(q: Array, k: Array, v: Array, out: Any = None, **args: Any) -> Any:
        narrow = (x.astype(dtype) for x in (q, k, v))
        (o, lse), backward = nattn.attention_vjp(*narrow, **args)

        def widened(dout: Array, *more: Any) -> Any:
            grads = backward(dout.astype(dtype), *more)
            return [x if x is None else x.astype(np.float32) for x in grads]

        o = o.astype(np.float32)
        if out is not None:
            out[...] = o
        return (o, lse), widened

    return attend


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", NARROW_CALLS)
def test_16_bits_are_computed_in_float32_and_rounded_once(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit they are a layer of float32 around an attention in 16 bits, rounded in the end.

    The bounds above are those of the worst case, which for gradients in bfloat16 is large.
    """
    it = ready(CALLS[name], dtype)
    found = it.run()
    layer = CALLS[name].make(dtype=FLOAT32)
    layer.params.update((key, p.astype(np.float32)) for key, p in it.layer.params.items())
    monkeypatch.setattr(layers, "attention_vjp", attention_of(it.layer.dtype))
    x, dout = it.x.astype(np.float32), it.dout.astype(np.float32)
    context = None if it.context is None else it.context.astype(np.float32)
    for what, y in replace(it, layer=layer, x=x, context=context, dout=dout).run().items():
        got = found[what]
        assert got.tobytes() == y.astype(got.dtype).tobytes(), what


@pytest.mark.parametrize("dtype", NARROW)
def test_t5_beside_16_bits(dtype: str) -> None:
    """With an identity for the projection of the output, attention's own arrays are known."""
    layer = MULTI(positions=T5Bias(4), bias=False, dtype=dtype)
    layer.params["w_o"][...] = np.eye(8)
    x, dout = np.random.default_rng(2).standard_normal((2, 1, 5, 8)).astype(layer.dtype)
    (out, lse), backward = layer.vjp(x, return_lse=True, backend="reference")
    args = layer.positions.arguments(5, 5) | {"q_offset": 0, "backend": "reference"}
    do, o = (base.split_heads(y, 4) for y in (dout, out))
    _, vjp = nattn.attention_vjp(*layer.qkv(x), **args)
    grads = vjp(do, wrt=layer.positions.wrt)
    got = backward(dout).dparams["positions.table"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, layer.positions.collect(grads)["table"])
    # which takes out before it was rounded, and this one as it is
    rounded = layer.positions.backward(do, *layer.qkv(x), o, lse, **args)
    atol = 8 * float(np.finfo(np.float16).eps)
    np.testing.assert_allclose(got, rounded["table"], rtol=0, atol=atol)


def test_what_float16_does_not_hold_is_infinite() -> None:
    """Without a warning, which would be an error here; in an array of the caller's, too."""
    layer = MULTI(bias=False, dtype="float16")
    layer.params["w_o"][...], layer.params["w_v"][...] = 65504, np.eye(8)
    x = np.full((3, 8), 2, np.float16)
    out = np.zeros_like(x)
    assert layer(x, out=out) is out
    assert (out == np.inf).all()


@pytest.mark.parametrize("name", CALLS)
def test_one_item_needs_no_batch(name: str) -> None:
    it = ready(CALLS[name], "float64", B=1)
    one = Ready(
        it.layer, it.x[0], None if it.context is None else it.context[0], it.dout[0], it.args, {}
    )
    for what, got in one.run().items():
        batch = it.run()[what]
        np.testing.assert_array_equal(got, batch[0] if what in ("out", "dx", "dcontext") else batch)


# Finite differences


def noise(layer: Any, inputs: dict[str, Array], args: dict[str, Any]) -> float:
    """Bound the rounding errors of the loss below, by the largest numbers of each step.

    ``u`` is twice the unit roundoff: of two losses that are compared both are rounded.
    """
    u = float(np.finfo(FLOAT64).eps)
    p = {name: np.abs(array) for name, array in layer.params.items()}
    x, c = (
        np.abs(inputs.get(name, inputs["x"])) + p.get("positions.table", np.zeros(1)).max() + 1
        for name in ("x", "context")
    )  # positions added to x are no larger than that
    q, k, v = layer.qkv(**inputs)
    Nk, D = k.shape[-2:]
    n = max(layer.d_model, c.shape[-1]) + 6  # roundings of a projection, and of a rotation
    e_q = n * u * ((x @ p["w_q"]).max() + 2)
    e_k, e_v = (n * u * ((c @ p[name]).max() + 2) for name in ("w_k", "w_v"))
    scale = args.get("scale", D**-0.5)
    Q, K, V = (np.abs(y).max() for y in (q, k, v))
    S = scale * D * Q * K
    E = scale * D * (e_q * K + Q * e_k) + (D + 8) * u * (S + 8.0)  # 8: bias and slopes
    budget = error_budget(FLOAT64, Nk + 1, S + 8.0, V, D, score_error=E)
    rows = q.size // D
    e_o, w_o = budget.out + e_v, p.get("w_o", np.ones((1, 1)))
    e_y = w_o.sum(axis=0).max() * (e_o + (len(w_o) + 2) * u * V)
    out_size = rows * (v.shape[-1] if "w_o" not in p else w_o.shape[1])
    return float(out_size * e_y + rows * budget.lse)


def check_differences(layer: Any, inputs: dict[str, Array], args: dict[str, Any]) -> None:
    """Compare gradients with differences of the loss ``(out * dout).sum() + (lse * dlse).sum()``.

    As in test_gradients.py: in a random direction for each array, of fourth order, where the one
    with steps twice as long tells how far the finer is from the truth.
    """
    rng = np.random.default_rng(3)
    learnt = {name: args[name] for name in ("bias", "sinks") if name in args}
    (out, lse), backward = layer.vjp(**inputs, **args, return_lse=True)
    dout, dlse = rng.uniform(-1, 1, out.shape), rng.uniform(-1, 1, lse.shape)
    grads = backward(dout, dlse, wrt=tuple(learnt))
    assert set(grads.dparams) == {*layer.params, *learnt}
    found = {**grads.dparams, "x": grads.dx, "context": grads.dcontext}
    rounding = noise(layer, inputs, args)

    def loss() -> float:
        out, lse = layer(**inputs, **args, return_lse=True)
        return float((out * dout).sum() + (lse * dlse).sum())

    h = 1e-3
    for name, array in {**layer.params, **learnt, **inputs}.items():
        direction, origin, f = rng.uniform(-1, 1, array.shape), array.copy(), {}
        for step in (-4, -2, -1, 1, 2, 4):
            array[...] = origin + step * h * direction
            f[step] = loss()
        array[...] = origin
        fine = (8 * (f[1] - f[-1]) - (f[2] - f[-2])) / (12 * h)
        coarse = (8 * (f[2] - f[-2]) - (f[4] - f[-4])) / (24 * h)
        tolerance = abs(coarse - fine) + 1.5 * rounding / h
        if name != "b_k":  # which moves all scores of a row alike, so that only lse sees it
            assert tolerance < 1e-3 * abs(fine), name
        assert abs(float((found[name] * direction).sum()) - fine) <= tolerance, name


DIFFERENCES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "one head": (functools.partial(SELF, bias=True), {"causal": True}),
    "heads": (functools.partial(GQA, bias=True), {"bias": (4, 5, 5), "sinks": (4,)}),
    "context": (functools.partial(GQA, d_context=3), {"context": (2, 7, 3), "causal": True}),
    "table": (lambda **o: MULTI(positions=LearnedTable(6, 8, dtype=FLOAT64), **o), {}),
    "rotary": (lambda **o: GQA(positions=Rotary(4), **o), {"kv_lens": [5, 3], "causal": True}),
    "rotary, context": (
        lambda **o: GQA(positions=Rotary(4, pairing="interleaved"), **o),
        {"context": (2, 7, 8), "kv_lens": [7, 5], "causal": True},
    ),
    "alibi": (lambda **o: MULTI(positions=Alibi(4), **o), {"bias": (4, 1, 5)}),
    "t5": (
        lambda **o: MULTI(positions=T5Bias(4, 4, 6, dtype=FLOAT64), **o),
        {"scale": 1.0, "window_size": (3, 2)},
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_finite_differences(name: str) -> None:
    make, args = DIFFERENCES[name]
    rng = np.random.default_rng(4)
    layer = make(seed=2, dtype=FLOAT64)
    for p in layer.params.values():
        p += 0.5 * rng.standard_normal(p.shape)
    args = {
        key: rng.standard_normal(value) if key in ("bias", "sinks", "context") else value
        for key, value in args.items()
    }
    inputs = {"x": rng.standard_normal((2, 5, 8))}
    if "context" in args:
        inputs["context"] = args.pop("context")
    check_differences(layer, inputs, args)


# Initialisation and parameters


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fresh_weights_keep_unit_variance(dtype: str) -> None:
    """Of n**2 entries of a product of n x n normal matrices the mean square is 1 +- sqrt(6) / n."""
    n = 256
    x = np.random.default_rng(5).standard_normal((n, n)).astype(dtype)
    for layer in (
        SelfAttention(n, dtype=dtype),
        MultiHeadAttention(n, 8, dtype=dtype),
        MultiHeadAttention(n, 8, head_dim=64, num_kv_heads=4, dtype=dtype),
    ):
        for name, p in layer.params.items():
            assert p.dtype == dtype
            if name.startswith("b_"):
                assert not p.any()
            else:
                mean_square = float((p.astype(np.float64) ** 2).mean()) * len(p)
                assert abs(mean_square - 1) < 5 * math.sqrt(2 / p.size)
        for y in layer.qkv(x):
            assert abs(float((y**2).mean()) - 1) < 5 * math.sqrt(6) / n


def test_a_seed_gives_the_same_weights_in_all_dtypes() -> None:
    one, two, other = (
        MultiHeadAttention(12, 3, seed=seed, dtype=dtype).params
        for seed, dtype in ((7, "float32"), (7, "float64"), (8, "float32"))
    )
    for name, p in one.items():
        np.testing.assert_array_equal(p, two[name].astype(np.float32))
        if name.startswith("w_"):
            assert (p != other[name]).all()
    for dtype in NARROW:
        layer = MultiHeadAttention(12, 3, seed=7, dtype=dtype)
        assert layer.dtype == dtypes.storage_dtype(dtype)
        for name, p in layer.params.items():
            np.testing.assert_array_equal(p, two[name].astype(layer.dtype))


def test_16_bits_have_several_names() -> None:
    half, brain = np.dtype(np.float16), dtypes.bfloat16()
    names: dict[Any, np.dtype] = {"float16": half, np.float16: half, half: half}
    names |= {"bfloat16": brain, brain.type: brain, brain: brain}
    assert all(SelfAttention(2, dtype=name).dtype == dtype for name, dtype in names.items())


def test_an_array_of_params_may_be_replaced() -> None:
    layer = MultiHeadAttention(8, 2, positions=LearnedTable(5, 8))
    x = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
    before = layer(x)
    for name in ("w_q", "positions.table"):
        layer.params[name] = layer.params[name] + 1
        after = layer(x)
        assert not np.allclose(after, before)
        before = after


# The arguments of attention


def test_every_argument_of_attention_is_passed_on() -> None:
    """With an identity for the projection of the output, a layer is attention of its qkv."""
    rng = np.random.default_rng(6)
    layer = MultiHeadAttention(8, 2, bias=False)
    layer.params["w_o"][...] = np.eye(8)
    single = SelfAttention(8, 4)
    x = rng.standard_normal((2, 5, 8), dtype=np.float32)
    given: dict[str, Any] = {
        "causal": True,
        "q_offset": [1, 0],
        "window_size": (2, None),
        "mask": rng.random((5, 5)) < 0.8,
        "bias": rng.standard_normal((2, 1, 5, 5), dtype=np.float32),
        "scale": 0.3,
        "softcap": 5.0,
        "alibi_slopes": np.array([0.5], np.float32),
        "sinks": np.array([0.1], np.float32),
        "score_mod": functools.partial(nattn.mods.softcap, cap=3.0),
        "mask_mod": nattn.masks.causal,
        "block_mask": nattn.BlockMask.from_mask_mod(nattn.masks.causal, 1, 1, 5, 5),
        "q_lens": [5, 3],
        "kv_lens": [4, 5],
        "dropout_p": 0.3,
        "seed": 11,
        "backend": "reference",
    }
    names = {name for name, p in signature(nattn.attention).parameters.items() if p.kind == 3}
    assert names == {*given, "layout", "out", "return_lse"}
    for one in (layer, single):
        H = getattr(one, "num_heads", 1)
        args = given | {name: np.repeat(given[name], H) for name in ("alibi_slopes", "sinks")}
        for name in args:
            plain: dict[str, Any] = {"backend": "reference", "q_offset": 0}
            some = plain | {name: args[name]}
            if name in ("dropout_p", "seed"):
                some |= {"dropout_p": 0.3, "seed": 11}
            expected = nattn.attention(*one.qkv(x), **some)
            got = one(x, **some)
            np.testing.assert_array_equal(got, expected.swapaxes(1, 2).reshape(got.shape))
            if name not in ("backend", "q_offset"):  # which alone changes nothing
                assert (got != one(x, **plain)).any(), name


def test_a_row_is_query_and_key_in_one_place() -> None:
    """With lengths alone attention would put the last query, of padding, on the last key."""
    x = np.random.default_rng(7).standard_normal((2, 6, 8))
    for layer in (
        SelfAttention(8, dtype=np.float64),
        MultiHeadAttention(8, 2, positions=Rotary(4), dtype=np.float64),
    ):
        out = layer(x, causal=True, kv_lens=[6, 3])
        for b, n in ((0, 6), (1, 3)):
            hidden = np.triu(np.ones((1, 1, n, n), bool), 1)
            own = x[b : b + 1, :n]
            truth = formula(layer, own, None, np.zeros_like(own), hidden, np.zeros(hidden.shape))
            assert_within(out[b : b + 1, :n], truth["out"])


def test_rotary_turns_queries_where_attention_has_them() -> None:
    """Row i stands at ``i + q_offset``, which is ``kv_len - q_len`` of its item with a context."""
    rng = np.random.default_rng(10)
    x, context = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 7, 8))
    rotary = Rotary(4)
    turning, plain = (
        MultiHeadAttention(8, 2, positions=positions, dtype=np.float64)
        for positions in (rotary, None)
    )
    places: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [4, 4]),
        ({"kv_lens": [7, 5]}, [4, 2]),
        ({"kv_lens": [7, 5], "q_lens": [3, 1]}, [4, 4]),
        ({"q_offset": [0, 2], "kv_lens": [7, 5]}, [0, 2]),
    ]
    for args, offsets in places:
        q, k, _ = turning.qkv(x, context, **args)
        q0, k0, _ = plain.qkv(x, context)
        for b, offset in enumerate(offsets):
            np.testing.assert_array_equal(q[b], rotary(q0[b], offset))
            np.testing.assert_array_equal(k[b], rotary(k0[b]))
        o = nattn.attention(q, k, plain.qkv(x, context)[2], **args)
        expected = o.swapaxes(1, 2).reshape(6, 8) @ turning.params["w_o"]
        np.testing.assert_array_equal(turning(x, context, **args), expected.reshape(2, 3, 8))


@pytest.mark.parametrize("shape", [(6, 8), (2, 6, 8)])
@pytest.mark.parametrize("make", [SELF, GQA])
def test_out_and_lse(make: Any, shape: tuple[int, ...]) -> None:
    layer = make()
    x = np.random.default_rng(8).standard_normal(shape, dtype=np.float32)
    plain = layer(x, causal=True)
    room = np.full((*plain.shape[:-1], 9), 7, np.float32)
    out, lse = layer(x, causal=True, out=room[..., : plain.shape[-1]], return_lse=True)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(room[..., : plain.shape[-1]], plain)
    assert (room[..., plain.shape[-1] :] == 7).all()
    _, expected = nattn.attention(*layer.qkv(x), causal=True, return_lse=True)
    np.testing.assert_array_equal(lse, expected)
    assert lse.ndim == (1 if x.ndim == 2 and make is SELF else x.ndim)


@pytest.mark.parametrize("crossed", [False, True])
def test_what_lies_in_padding_matters_nowhere(crossed: bool) -> None:
    """NaN behind the lengths reaches neither outputs nor gradients of weights, as 0 * NaN."""
    layers: list[Any] = [GQA(positions=Rotary(4)), *([] if crossed else [SELF()])]
    rng = np.random.default_rng(10)
    x, context = rng.standard_normal((2, 2, 6, 8), dtype=np.float32)
    lens: dict[str, Any] = {"q_lens": [6, 3], "kv_lens": [6, 4]}
    for layer in layers:
        found = []
        for filling in (0.0, np.nan):
            x[1, 3 if crossed else 4 :], context[1, 4:] = filling, filling
            out, backward = layer.vjp(x, *([context] if crossed else []), **lens)
            grads = backward(np.ones_like(out))
            assert np.isfinite(grads.dx).all()
            found.append([out[0], out[1, :3], *grads.dparams.values()])
        for plain, poisoned in zip(*found, strict=True):
            np.testing.assert_array_equal(plain, poisoned)
        assert np.isnan(x[1, -1]).all()  # the caller's array is as it was


def test_dynamic_rotary_turns_queries_and_keys_alike() -> None:
    """Beyond the original length the base depends on the length: on one for both."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    rotary = Rotary(8, scaling=scaling)
    layer = MultiHeadAttention(8, 1, positions=rotary, dtype=np.float64)
    x, context = np.random.default_rng(11).standard_normal((2, 20, 8))
    q, k, _ = layer.qkv(x[:4], context)
    frequencies, _ = rotary_frequencies(8, scaling=scaling, length=20)
    for got, rows, name, first in ((q, x[:4], "q", 16), (k, context, "k", 0)):
        y = rows @ layer.params[f"w_{name}"] + layer.params[f"b_{name}"]
        angles = (first + np.arange(len(y)))[:, None] * frequencies
        a, b, cos, sin = y[:, :4], y[:, 4:], np.cos(angles), np.sin(angles)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
        np.testing.assert_allclose(got[0], turned, rtol=1e-13, atol=1e-13)


def test_a_layer_and_its_positions_draw_numbers_of_their_own() -> None:
    layer = MultiHeadAttention(64, 8, positions=LearnedTable(64, 64))
    table, w_q = layer.params["positions.table"].ravel(), layer.params["w_q"].ravel()
    assert abs(np.corrcoef(table, w_q)[0, 1]) < 6 / 64  # six standard deviations of 4096 pairs


def test_a_context_that_is_x_has_its_own_gradient() -> None:
    layer = MultiHeadAttention(8, 2)
    x = np.random.default_rng(9).standard_normal((1, 6, 8), dtype=np.float32)
    own, crossed = layer.vjp(x), layer.vjp(x, x)
    np.testing.assert_array_equal(own[0], crossed[0])
    g, h = own[1](own[0]), crossed[1](own[0])
    assert g.dcontext is None
    np.testing.assert_array_equal(g.dx, h.dx + h.dcontext)


def test_nothing_at_all() -> None:
    for layer, width in ((SelfAttention(8, d_v=3), 3), (MultiHeadAttention(8, 2), 8)):
        for shape in ((0, 8), (0, 4, 8), (3, 0, 8)):
            out, backward = layer.vjp(np.zeros(shape, np.float32))
            assert out.shape == (*shape[:-1], width)
            grads = backward(out)
            assert grads.dx.shape == shape
            assert not any(g.any() for g in grads.dparams.values())


# Files


SAVED: dict[str, Callable[[], Any]] = {
    "one head": lambda: SelfAttention(8, 3, 5, bias=True, seed=3),
    "float64": lambda: MultiHeadAttention(8, 2, seed=3, bias=False, dtype=np.float64),
    "heads": lambda: GQA(bias="qkv", d_context=8, seed=3),
    "sinusoidal": lambda: MULTI(positions=Sinusoidal(8, base=50.0)),
    "table": lambda: MULTI(
        positions=LearnedTable(9, 8, seed=4, dtype=np.float64), dtype=np.float64
    ),
    "rotary": lambda: GQA(
        positions=Rotary(
            4,
            500.0,
            pairing="interleaved",
            rotary_dim=2,
            scaling={"rope_type": "linear", "factor": np.float32(2.0)},
        )
    ),
    "alibi": lambda: MULTI(positions=Alibi(4)),
    "t5": lambda: MULTI(positions=T5Bias(4, 10, 20, bidirectional=False, seed=4)),
    "float16": lambda: SELF(bias=True, dtype=np.float16),
    "bfloat16": lambda: MULTI(positions=LearnedTable(9, 8), dtype="bfloat16"),
}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_is_loaded(name: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer = SAVED[name]()
    rng = np.random.default_rng(1)
    for p in layer.params.values():
        p += rng.standard_normal(p.shape).astype(p.dtype)
    path = tmp_path / f"layer{suffix}"
    path.write_bytes(b"an old file")
    layer.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = type(layer).load(str(path))
    assert list(loaded.params) == list(layer.params)
    for key, p in layer.params.items():
        assert loaded.params[key].dtype == p.dtype
        assert loaded.params[key].tobytes() == p.tobytes()
    x = rng.standard_normal((2, 7, 8)).astype(layer.dtype)
    np.testing.assert_array_equal(loaded(x, causal=True), layer(x, causal=True))
    other = MultiHeadAttention if isinstance(layer, SelfAttention) else SelfAttention
    with pytest.raises(ValueError, match=f"expected a file that holds a {other.__name__}, got"):
        other.load(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SelfAttention(4)
    layer.save(tmp_path / "layer.npz")
    before = (tmp_path / "layer.npz").read_bytes()

    def full(file: Path, **arrays: Any) -> None:
        Path(file).write_bytes(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        layer.save(tmp_path / "layer.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["layer.npz"]
    assert (tmp_path / "layer.npz").read_bytes() == before


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    layer = MULTI(positions=LearnedTable(5, 8))
    layer.save(tmp_path / "layer.npz")
    whole = dict(np.load(tmp_path / "layer.npz"))
    for missing in ("w_k", "positions.table"):
        np.savez(tmp_path / "part.npz", **{n: p for n, p in whole.items() if n != missing}, w_x=[1])
        with pytest.raises(ValueError, match=rf"missing: {missing}; unexpected: w_x$"):
            MultiHeadAttention.load(tmp_path / "part.npz")
    np.savez(tmp_path / "part.npz", **(whole | {"w_k": np.zeros((8, 3))}))
    with pytest.raises(
        ValueError, match=r"^path '.*part\.npz': expected w_k of shape \(8, 8\), got \(8, 3\)$"
    ):
        MultiHeadAttention.load(tmp_path / "part.npz")
    (tmp_path / "part.npz").write_bytes((tmp_path / "layer.npz").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"^path '.*part\.npz': expected a file \.npz, got"):
        MultiHeadAttention.load(tmp_path / "part.npz")
    with pytest.raises(FileNotFoundError):
        MultiHeadAttention.load(tmp_path / "none.npz")
    np.savez(tmp_path / "part.npz", w_k=np.zeros(3))
    with pytest.raises(ValueError, match=r"part\.npz': .* got a file without one"):
        MultiHeadAttention.load(tmp_path / "part.npz")
    for path in ("layer.pt", "layer"):
        with pytest.raises(ValueError, match=r"ends in \.npz or \.safetensors"):
            layer.save(tmp_path / path)
        with pytest.raises(ValueError, match=r"ends in \.npz or \.safetensors"):
            MultiHeadAttention.load(tmp_path / path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "float64", *NARROW])
@pytest.mark.parametrize("kept", FLOATS)
def test_weights_may_be_kept_in_another_dtype(
    kept: str, dtype: str, suffix: str, tmp_path: Path
) -> None:
    """The layer's own dtype stays, and that of the table of its positions."""
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer = MULTI(positions=LearnedTable(5, 8, dtype=dtypes.compute_dtype(dtype)), dtype=dtype)
    path = tmp_path / f"layer{suffix}"
    config = json.dumps(base._config(layer), default=base._dtype_name)
    if suffix == ".npz":
        arrays: dict[str, Any] = {n: in_dtype(p, kept) for n, p in layer.params.items()}
        np.savez(path, config=np.array(config), **arrays)
    else:
        dtypes_of = dict.fromkeys(layer.params, kept)
        path.write_bytes(safetensors_bytes(layer.params, dtypes_of, config))
    loaded = MultiHeadAttention.load(path)
    assert loaded.dtype == dtype
    for name, p in layer.params.items():
        layer.params[name] = narrowed(p, kept).astype(p.dtype)
        assert loaded.params[name].dtype == p.dtype
        np.testing.assert_array_equal(loaded.params[name], layer.params[name])
    assert loaded.params["positions.table"] is loaded.positions.params["table"]
    x = np.random.default_rng(2).standard_normal((5, 8)).astype(layer.dtype)
    np.testing.assert_array_equal(loaded(x), layer(x))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_weights_that_are_no_floats(suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer = MULTI(positions=LearnedTable(5, 8))
    for name in ("w_k", "positions.table"):
        params = layer.params | {name: np.ones(layer.params[name].shape, np.int64)}
        path = tmp_path / f"layer{suffix}"
        files.write(path, params, json.dumps(base._config(layer), default=base._dtype_name))
        with pytest.raises(
            ValueError, match=rf"^path '.*layer{suffix}': expected {name} of dtype float16, .* got "
        ):
            MultiHeadAttention.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": None},
        {"d_model": "8"},
        {"d_model": -1},
        {"dtype": "int16"},
        {"dtype": 32},
        {"another": 1},
        {"positions": 3},
        {"positions": {"type": "Unknown"}},
        {"positions": {"max_len": 5, "d_model": 8}},
        {"positions": {"type": "LearnedTable", "max_len": 1 << 50, "d_model": 8}},
    ],
    ids=str,
)
def test_a_config_that_is_none(change: dict[str, Any], tmp_path: Path) -> None:
    layer = MULTI()
    config = base._config(layer) | {"dtype": "float32"} | change
    for text in (json.dumps(config), json.dumps([config]), "{", "null", "[" * 100_000):
        files.write(tmp_path / "layer.npz", layer.params, text)
        with pytest.raises(ValueError, match=r"^path '.*layer\.npz': expected a config of `save`"):
            MultiHeadAttention.load(tmp_path / "layer.npz")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SelfAttention(4)
    for module in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(importlib.import_module("sys").modules, module, None)
    for act in (layer.save, SelfAttention.load):
        with pytest.raises(ImportError, match=r'pip install "nattn\[safetensors\]"'):
            act(tmp_path / "layer.safetensors")
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dtypes.bfloat16.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    yield
    dtypes.bfloat16.cache_clear()


def test_without_ml_dtypes(tmp_path: Path, without_ml_dtypes: None) -> None:
    layer, path = SelfAttention(4, dtype="float16"), tmp_path / "layer.npz"
    config = base._config(layer) | {"dtype": "bfloat16"}
    files.write(path, layer.params, json.dumps(config))
    text = r'^dtype bfloat16: .*pip install "nattn\[bfloat16\]"$'
    with pytest.raises(ImportError, match=text):
        SelfAttention(4, dtype="bfloat16")
    with pytest.raises(ImportError, match=text):
        SelfAttention.load(path)


# Weights of other libraries


def stored(name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return weights, and inputs with outputs, of a file that make_nn_vectors.py wrote."""
    with np.load(DATA / f"nn_{name}.npz") as file:
        arrays = dict(file)
    state = {n.removeprefix("state/"): x for n, x in arrays.items() if n.startswith("state/")}
    return state, {n: x for n, x in arrays.items() if not n.startswith("state/")}


VECTORS = {
    "torch": ("torch", ""),
    "torch_kdim": ("torch", ""),
    "bert": ("bert", "encoder.layer.0."),
    "llama": ("llama", ""),
    "qwen2": ("llama", ""),
    "phi3": ("llama", ""),
    "gpt2": ("gpt2", "h.0.attn."),
}


def from_state(name: str, state: Any, dtype: Any = None) -> MultiHeadAttention:
    style, prefix = VECTORS[name]
    return MultiHeadAttention.from_state(
        state,
        style,
        4,
        prefix=prefix,
        positions=Rotary(6) if style == "llama" else None,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", VECTORS)
def test_other_libraries_outputs(name: str, dtype: str) -> None:
    state, arrays = stored(name)
    layer = from_state(name, state, dtype)
    assert layer.dtype == dtype
    x = arrays["x"].astype(dtype)
    N = x.shape[1]
    i, j = np.arange(N)[:, None], np.arange(N)[None]
    outputs = {"out", "causal", "padded", "crossed"} & arrays.keys()
    assert outputs
    for output in outputs:
        args: dict[str, Any] = {"causal": True} if output == "causal" else {}
        hidden = np.broadcast_to(j > i if args else j < 0, (len(x), 4, N, N))
        context = None
        if output == "padded":
            args["kv_lens"] = arrays["kv_lens"]
            hidden = hidden | (j >= arrays["kv_lens"][:, None, None, None])
        if output == "crossed":
            context = arrays["context"].astype(dtype)
            hidden = np.zeros((len(x), 4, N, context.shape[1]), bool)
        # theirs was computed in float64, so both may be as far from the truth as the formula says
        truth = formula(layer, x, context, np.zeros_like(x), hidden, np.zeros((1, 1, 1, 1)))["out"]
        got = layer(x, context, **args)
        assert (np.abs(got - arrays[output]) <= 2 * truth.e).all(), output


@pytest.mark.parametrize("name", VECTORS)
def test_weights_of_narrow_dtypes(name: str) -> None:
    """They are as if they had been widened before; without ml_dtypes bfloat16 are bits.

    A layer of their own dtype has their own numbers.
    """
    ml_dtypes = pytest.importorskip("ml_dtypes")
    state, arrays = stored(name)
    x = arrays["x"]
    args = [arrays["context"]] if "context" in arrays else []
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = {n: p.astype(dtype) for n, p in state.items()}
        layer, wide = (
            from_state(name, narrow),
            from_state(name, {n: p.astype(np.float32) for n, p in narrow.items()}),
        )
        assert layer.dtype == np.float32
        np.testing.assert_array_equal(layer(x, *args), wide(x, *args))
        own = from_state(name, narrow, dtype)
        assert own.dtype == dtype
        for key, p in layer.params.items():
            assert own.params[key].dtype == dtype
            np.testing.assert_array_equal(own.params[key].astype(np.float32), p)
    bits = {n: p.view(np.uint16).view(dtypes.BFLOAT16_BITS) for n, p in narrow.items()}
    np.testing.assert_array_equal(from_state(name, bits)(x, *args), wide(x, *args))
    assert from_state(name, {n: p.astype(float) for n, p in state.items()}).dtype == np.float64


def test_the_configuration_follows_from_the_weights() -> None:
    found = {name: from_state(name, stored(name)[0]) for name in VECTORS}
    assert {n: (x.num_kv_heads, x.head_dim, x.d_context, x.bias) for n, x in found.items()} == {
        "torch": (4, 4, 16, True),
        "torch_kdim": (4, 4, 10, True),
        "bert": (4, 4, 16, True),
        "llama": (2, 6, 16, False),
        "qwen2": (2, 6, 16, "qkv"),
        "phi3": (2, 6, 16, False),
        "gpt2": (4, 4, 16, True),
    }
    assert all(x.d_model == 16 and x.num_heads == 4 for x in found.values())


@pytest.mark.parametrize("name", VECTORS)
def test_names_that_are_missing_or_unexpected(name: str) -> None:
    state, _ = stored(name)
    _, prefix = VECTORS[name]
    others = {n for n in state if "LayerNorm" in n}
    for missing in state.keys() - others:
        if missing.endswith("bias") and name not in ("bert", "gpt2"):
            continue  # there need not be any
        part = {n: p for n, p in state.items() if n != missing}
        part |= {name: np.ones(1) for name in (f"{prefix}two", f"{prefix}one.weight", "zero")}
        with pytest.raises(ValueError, match="state") as error:
            from_state(name, part)
        text = str(error.value)
        if missing != "qkv_proj.weight":  # there could be three instead, which are named then
            assert missing.removeprefix(prefix) in text.split("unexpected")[0]
        assert "one.weight, two" in text.split("unexpected")[1]
        assert ("zero" in text) == (prefix == "")  # without one everything is looked at
    with pytest.raises(ValueError, match=r"missing: none; unexpected: more$"):
        from_state(name, state | {f"{prefix}more": np.ones(1)})
    with pytest.raises(ValueError, match="missing"):
        MultiHeadAttention.from_state(state, VECTORS[name][0], 4, prefix="other.")


def test_half_of_the_biases_of_torch_are_missing() -> None:
    state, _ = stored("torch")
    for name in ("in_proj_bias", "out_proj.bias"):
        part = {n: p for n, p in state.items() if n != name}
        with pytest.raises(ValueError, match=rf"missing: {name};"):
            from_state("torch", part)
    none = {n: p for n, p in state.items() if not n.endswith("bias")}
    assert from_state("torch", none).bias is False


def test_weights_that_do_not_fit() -> None:
    state, _ = stored("llama")
    make = MultiHeadAttention.from_state
    with pytest.raises(ValueError, match="num_heads: expected a divisor of 24, got 5"):
        make(state, "llama", 5)
    none = {n: x[:0].T if n.startswith("o") else x[:0] for n, x in state.items()}
    with pytest.raises(ValueError, match="num_heads: expected a divisor of 0, got 4"):
        make(none, "llama", 4)
    with pytest.raises(ValueError, match=r"num_kv_heads: expected 2 .* got 4"):
        make(state, "llama", 4, num_kv_heads=4)
    with pytest.raises(ValueError, match="num_kv_heads"):
        make(state, "llama", 3)  # keys of 1.5 heads
    with pytest.raises(
        ValueError,
        match=r"state: expected k_proj\.weight and v_proj\.weight of one shape, "
        r"got \(12, 16\) and \(6, 16\)$",
    ):
        make(state | {"v_proj.weight": state["v_proj.weight"][:6]}, "llama", 4)
    with pytest.raises(ValueError, match=r"expected 2 axes of a float dtype for q_proj\.weight"):
        make(state | {"q_proj.weight": np.zeros(3)}, "llama", 4)
    with pytest.raises(ValueError, match=r"float dtype for q_proj\.weight, got .* int64"):
        make(state | {"q_proj.weight": np.zeros((24, 16), np.int64)}, "llama", 4)
    with pytest.raises(ValueError, match="style: expected 'torch', 'bert', 'llama' or 'gpt2'"):
        make(state, "t5", 4)
    with pytest.raises(NotImplementedError, match="bias_k"):
        make(stored("torch")[0] | {"bias_k": np.zeros(1)}, "torch", 4)
    with pytest.raises(ValueError, match="positions: expected head_dim = 6"):
        make(state, "llama", 4, positions=Rotary(4))


def test_torch_with_values_of_another_width_than_keys() -> None:
    """``kdim != vdim``: the error has torch's names and shapes."""
    state, _ = stored("torch_kdim")
    width = state["k_proj_weight"].shape[1]
    state["v_proj_weight"] = np.zeros((16, width + 2))
    with pytest.raises(
        ValueError,
        match=r"^state: expected k_proj_weight and v_proj_weight of one shape \(kdim = vdim\), "
        rf"got \(16, {width}\) and \(16, {width + 2}\)$",
    ):
        from_state("torch_kdim", state)


@pytest.mark.parametrize("name", VECTORS)
def test_shapes_are_told_in_the_words_of_the_library(name: str) -> None:
    """Of each array in turn: with one more of each axis it fits no other."""
    state, _ = stored(name)
    for key, p in state.items():
        if "LayerNorm" in key:
            continue
        for axis in range(p.ndim):
            if key.endswith("_proj.weight") and axis == 0 and name in ("llama", "qwen2", "phi3"):
                continue  # which may mean another number of heads
            grown = np.concatenate([p, p.take([0], axis)], axis)
            with pytest.raises(ValueError, match="expected") as caught:
                from_state(name, state | {key: grown})
            text = str(caught.value)
            if not text.startswith("num_"):  # the projection of the output tells all widths
                shown = [str(other.shape) for other in (*state.values(), grown)]
                assert text.startswith("state: expected ")
                assert " w_" not in text
                assert " b_" not in text
                named = [other for other in state if other in text]
                assert named
                assert any(text.endswith(shape) for shape in shown)


def test_a_layer_owns_its_weights() -> None:
    state, arrays = stored("gpt2")
    layer = from_state("gpt2", state)
    before = layer(arrays["x"])
    for p in state.values():
        p[...] = 0
    np.testing.assert_array_equal(layer(arrays["x"]), before)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_itself(causal: bool) -> None:
    """Outputs and gradients of what is installed, in float64."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64)
    ours = MultiHeadAttention.from_state(
        {name: p.detach().numpy() for name, p in theirs.state_dict().items()}, "torch", 3
    )
    x = torch.randn(2, 10, 24, dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1) if causal else None
    expected = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out, backward = ours.vjp(x.detach().numpy(), causal=causal)
    grads = backward(dout.numpy())
    never = np.zeros((2, 3, 10, 10), bool) if hidden is None else hidden.numpy()
    never = np.broadcast_to(never, (2, 3, 10, 10))
    truth = formula(ours, x.detach().numpy(), None, dout.numpy(), never, np.zeros((1, 1, 1, 1)))
    fused = {n: np.concatenate([grads.dparams[f"{n}_{x}"] for x in "qkv"], axis=-1).T for n in "wb"}
    errors = {n: np.concatenate([truth[f"{n}_{x}"].e for x in "qkv"], axis=-1).T for n in "wb"}
    for got, gradient, e in (
        (out, expected.detach(), truth["out"].e),
        (grads.dx, x.grad, truth["dx"].e),
        (fused["w"], theirs.in_proj_weight.grad, errors["w"]),
        (fused["b"], theirs.in_proj_bias.grad, errors["b"]),
        (grads.dparams["w_o"].T, theirs.out_proj.weight.grad, truth["w_o"].e.T),
        (grads.dparams["b_o"], theirs.out_proj.bias.grad, truth["b_o"].e),
    ):
        assert (np.abs(got - gradient.numpy()) <= 2 * e).all()


# Errors


X = np.zeros((2, 5, 8), np.float32)
SQUARE = SelfAttention(8)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "d_model": (lambda: SelfAttention(0), ValueError, "d_model: expected an integer of at least 1"),
    "d_k": (lambda: SelfAttention(8, 2.5), TypeError, "d_k: expected an integer of at least 1"),  # type: ignore[arg-type]
    "out is x, one head": (lambda: SQUARE(X, out=X), ValueError, "out: expected memory of its own"),
    "out is a weight": (
        lambda: SQUARE(X[0, :5], out=SQUARE.params["w_v"][:5]),
        ValueError,
        "out: expected memory of its own",
    ),
    "seed": (lambda: SelfAttention(8, seed=-1), ValueError, "seed: expected an integer of at le"),
    "offset": (lambda: MULTI(positions=Rotary(2))(X, q_offset=1.5), TypeError, "q_offset: exp"),
    "heads": (lambda: MultiHeadAttention(8, 3), ValueError, "num_heads: expected a div"),
    "kv heads": (
        lambda: MultiHeadAttention(8, 4, num_kv_heads=3), ValueError, "num_kv_heads: expected a"
    ),
    "no kv heads": (
        lambda: MultiHeadAttention(8, 4, num_kv_heads=0), ValueError, "num_kv_heads: expected an"
    ),
    "bias": (lambda: MultiHeadAttention(8, 4, bias="o"), TypeError, "bias: expected"),
    "dtype": (
        lambda: SelfAttention(8, dtype=np.int16),
        TypeError,
        r"^dtype: expected float16, bfloat16, float32 or float64, got int16$",
    ),
    "positions": (
        lambda: MultiHeadAttention(8, 4, positions=3), TypeError, "positions: expected a scheme"
    ),
    "their heads": (
        lambda: MULTI(positions=Alibi(3)), ValueError, "positions: expected num_heads = 4 .* got 3"
    ),
    "their width": (
        lambda: MULTI(positions=Sinusoidal(6)), ValueError, "expected d_model = 8 .* got 6"
    ),
    "their dtype": (
        lambda: MULTI(positions=LearnedTable(9, 8), dtype=np.float64), TypeError, "expected dtype"
    ),
    "their dtype, 16 bits": (
        lambda: MULTI(positions=LearnedTable(9, 8, dtype=np.float64), dtype="bfloat16"),
        TypeError,
        "^positions: expected dtype float32, which a layer of bfloat16 computes in, got float64$",
    ),
    "their own dtype": (
        lambda: LearnedTable(9, 8, dtype="bfloat16"), TypeError, "dtype: expected float32 or float6"
    ),
    "x": (lambda: MULTI()(X[..., :7]), ValueError, r"x: expected shape \(N, 8\) or \(B, N, 8\)"),
    "x dtype": (lambda: MULTI()(X.astype(float)), TypeError, "x: expected dtype float32"),
    "x wider": (
        lambda: MULTI(dtype="bfloat16")(X),
        TypeError,
        "^x: expected dtype bfloat16 as of the layer, got float32$",
    ),
    "x list": (lambda: SELF()([[1] * 8]), TypeError, "x: expected dtype float32 .* got int64"),
    "x axes": (lambda: SELF()(X[None]), ValueError, "x: expected shape"),
    "masked": (lambda: SELF()(np.ma.array(X)), TypeError, "x: expected a plain array"),
    "context": (lambda: MULTI()(X, X[..., :7]), ValueError, "context: expected shape"),
    "no context": (lambda: MULTI(d_context=3)(X), ValueError, "context: expected rows of 3"),
    "batches": (lambda: MULTI()(X, X[:1]), ValueError, "x, context: expected one batch"),
    "layout": (lambda: MULTI()(X, layout="bhnd"), TypeError, "layout: expected none"),
    "unknown": (lambda: MULTI()(X, casual=True), TypeError, "got 'casual'"),
    "twice": (
        lambda: MULTI(positions=Alibi(4))(X, alibi_slopes=[1.0] * 4), ValueError, "slopes: exp"
    ),
    "dout": (lambda: MULTI().vjp(X)[1](X[:, :4]), ValueError, "dout: expected shape"),
    "dout dtype": (lambda: SELF().vjp(X)[1](X.astype(float)), TypeError, "dout: expected dtype"),
    "wrt": (lambda: MULTI().vjp(X)[1](X, wrt=("bias",)), ValueError, "wrt: expected"),
    "out": (lambda: MULTI()(X, out=X[0].copy()), ValueError, "out: expected shape"),
    "dout wider": (
        lambda: SELF(dtype="float16").vjp(X.astype("f2"))[1](X[..., :6]),
        TypeError,
        "^dout: expected dtype float16 as of the layer, got float32$",
    ),
    "out dtype": (lambda: MULTI()(X, out=X.astype(float)), TypeError, "out: expected a writable"),
    "out is x": (lambda: MULTI()(X, out=X), ValueError, "out: expected memory of its own"),
    "too long": (
        lambda: MULTI(positions=LearnedTable(4, 8))(X), ValueError, "positions below max_len"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


def test_positions_of_ones_own_cannot_be_saved(tmp_path: Path) -> None:
    class Mine(Sinusoidal):
        pass

    layer = MULTI(positions=Mine(8))
    with pytest.raises(TypeError, match=r"one of nattn\.positional, .* got Mine"):
        layer.save(tmp_path / "layer.npz")
