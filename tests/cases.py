"""Inputs shared by tests and benchmarks, the float64 truth, and the one error budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  so that NumPy knows the name of its dtype
import numpy as np
import rounding
from numpy.typing import NDArray

import nattn
from nattn.backends import reference
from nattn.backends.cpu import tiles
from nattn.backends.error_budget import (
    UNIT,
    ErrorBudget,
    error_budget,
    pair_budget,
    stored,
    sum_budget,
)
from nattn.call.problem import WRT, Problem
from nattn.call.results import as_bhnd
from nattn.functions import masks, mods
from nattn.vectors.dtypes import gradient_dtype, storage_name

Array = NDArray[Any]
Option = Callable[["Case", np.random.Generator], Any]


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call; an option that is a function makes an array for the case."""

    name: str
    B: int = 1
    Hq: int = 2
    Hkv: int | None = None
    Nq: int = 50
    Nk: int | None = None
    D: int = 16
    Dv: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, dtype: Any, seed: int = 0) -> tuple[Array, Array, Array, dict[str, Any]]:
        """Return q, k, v and the options."""
        rng = np.random.default_rng(seed)
        Hkv = self.Hq if self.Hkv is None else self.Hkv
        Nk = self.Nq if self.Nk is None else self.Nk
        Dv = self.D if self.Dv is None else self.Dv
        q = rng.standard_normal((self.B, self.Hq, self.Nq, self.D)).astype(dtype)
        k = rng.standard_normal((self.B, Hkv, Nk, self.D)).astype(dtype)
        v = rng.standard_normal((self.B, Hkv, Nk, Dv)).astype(dtype)
        if self.options.get("layout") == "bnhd":
            q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v))
        options = {
            key: value(self, rng) if callable(value) else value
            for key, value in self.options.items()
        }
        return q, k, v, options

    def pairs(self) -> tuple[int, int, int, int]:
        """The shape that mask and bias broadcast to."""
        return (self.B, self.Hq, self.Nq, self.Nq if self.Nk is None else self.Nk)


def random_mask(density: float, *axes: int) -> Option:
    """Make a mask in which the given axes have size 1."""

    def make(case: Case, rng: np.random.Generator) -> Array:
        shape = [1 if a in axes else n for a, n in enumerate(case.pairs())]
        return rng.random(shape) < density

    return make


def random_bias(dtype: Any, hidden: float, *axes: int) -> Option:
    """Make a bias with a share of -inf, in which the given axes have size 1."""

    def make(case: Case, rng: np.random.Generator) -> Array:
        shape = [1 if a in axes else n for a, n in enumerate(case.pairs())]
        bias = rng.standard_normal(shape).astype(dtype)
        bias[rng.random(shape) < hidden] = -np.inf
        return bias

    return make


# What users write. Each is compiled once for all the tests that share it.


def gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, gain: Any) -> Any:
    """Squash what is far away, and lift the keys of odd heads: one tanh, one np.where."""
    far = q_idx - kv_idx > 16
    return np.where(far, gain * np.tanh(score), score) + 0.25 * (h % 2)


def thin(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide every third diagonal by a score of -inf."""
    return np.where((q_idx + kv_idx) % 3 == 0, -np.inf, score)


def looked_up(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any, gain: Any) -> Any:
    """Read a float for each item and position, from the end where positions are negative."""
    return score + gain * table[b, q_idx] * table[b, kv_idx]


def in_step(b: Any, h: Any, q_idx: Any, kv_idx: Any, step: Any) -> Any:
    """Show a comb of keys that differs from head to head and item to item."""
    return (q_idx + kv_idx + h + 2 * b) % step != 0


def just(value: Any) -> Option:
    """Pass a value as it is, a function too."""
    return lambda case, rng: value


def documents(*lengths: int) -> Option:
    """Number the documents of each position, for all keys of the case."""

    def make(case: Case, rng: np.random.Generator) -> Array:
        count = max(case.pairs()[2:])
        doc = np.repeat(np.arange(len(lengths)), lengths)
        return np.pad(doc, (0, max(0, count - len(doc))), mode="edge").astype(np.int32)

    return make


def normal(*shape: str | int, dtype: Any = np.float32) -> Option:
    """Make normal numbers; a size may be named: B, Hq or N, the longer of Nq and Nk."""

    def make(case: Case, rng: np.random.Generator) -> Array:
        sizes = {"B": case.B, "Hq": case.Hq, "N": max(case.pairs()[2:])}
        return rng.standard_normal([n if isinstance(n, int) else sizes[n] for n in shape]).astype(
            dtype
        )

    return make


def bind(function: Any, **values: Any) -> Option:
    """Bind a function; what makes arrays makes them for the case."""

    def make(case: Case, rng: np.random.Generator) -> Any:
        bound = {key: x(case, rng) if callable(x) else x for key, x in values.items()}
        return functools.partial(function, **bound)

    return make


def same_document_causal(case: Case, rng: np.random.Generator) -> Any:
    """Combine two masks."""
    same = functools.partial(masks.document, doc=documents(40, 3, 70)(case, rng))
    return nattn.mask(same) & masks.causal


CASES = [
    Case("plain"),
    Case("one query", Nq=1, Nk=300),
    Case("one key", Nq=70, Nk=1),
    Case("few queries of a group", Hq=8, Hkv=2, Nq=3, Nk=130, D=64),
    Case("sixteen queries", Nq=16, Nk=257, D=32),
    Case("odd sizes", B=2, Hq=3, Nq=97, Nk=131, D=33, Dv=257),
    Case("D=1, Dv=5", Nq=40, Nk=60, D=1, Dv=5),
    Case("D=8, Dv=24", Hq=6, Hkv=2, Nq=9, D=8, Dv=24),
    Case("D=24, Dv=8", Hq=6, Hkv=2, Nq=9, D=24, Dv=8),
    Case("D=72", Nq=65, Nk=129, D=72),
    Case("D=104", Nq=65, Nk=127, D=104),
    Case("D=512", Hq=1, Nq=49, Nk=70, D=512),
    Case("D=600, Dv=3", Hq=1, Nq=20, Nk=40, D=600, Dv=3),
    Case("grouped", B=2, Hq=6, Hkv=2, Nq=60, Nk=140, D=40),
    Case("one key head", Hq=5, Hkv=1, Nq=60, Nk=140, D=20),
    Case("many blocks", Hq=1, Nq=200, Nk=1100, D=64),
    Case("causal", Nq=150, D=32, options={"causal": True}),
    Case("causal, more keys", Nq=60, Nk=200, options={"causal": True}),
    Case("causal, more queries", Nq=200, Nk=60, options={"causal": True}),
    Case("causal, top left", Nq=100, Nk=300, options={"causal": True, "q_offset": 0}),
    Case("causal, negative offset", Nq=100, options={"causal": True, "q_offset": -30}),
    Case(
        "causal, an offset for each item",
        B=3,
        Nq=90,
        Nk=150,
        options={"causal": True, "q_offset": [-10, 0, 70]},
    ),
    Case("window", Nq=300, D=32, options={"window_size": (20, 7)}),
    Case("window left", Nq=300, options={"window_size": (100, 0)}),
    Case("window right", Nq=300, options={"window_size": (None, 33)}),
    Case("window, causal", Nq=300, Nk=400, options={"window_size": (64, -1), "causal": True}),
    Case("mask", B=2, Nq=70, Nk=150, options={"mask": random_mask(0.5)}),
    Case("mask, one row for all", B=2, Nq=70, Nk=150, options={"mask": random_mask(0.5, 0, 1, 2)}),
    Case("mask, one column for all", Nq=70, Nk=150, options={"mask": random_mask(0.5, 0, 1, 3)}),
    Case("mask, sparse, causal", Nq=150, options={"mask": random_mask(0.02), "causal": True}),
    Case("bias", B=2, Nq=70, Nk=150, options={"bias": random_bias("f4", 0.0)}),
    Case("bias with -inf", Nq=70, Nk=150, options={"bias": random_bias("f4", 0.3)}),
    Case("bias, float16", Nq=70, Nk=150, options={"bias": random_bias("f2", 0.1, 0, 1)}),
    Case("bias, float64", Nq=70, Nk=150, options={"bias": random_bias("f8", 0.1, 2)}),
    Case("bias, big-endian", Nq=70, Nk=150, options={"bias": random_bias(">f4", 0.1)}),
    Case(
        "mask and bias, grouped",
        B=2,
        Hq=4,
        Hkv=2,
        Nq=50,
        Nk=90,
        options={"mask": random_mask(0.5, 1), "bias": random_bias("f4", 0.2, 0)},
    ),
    Case(
        "lengths",
        B=4,
        Nq=80,
        Nk=200,
        options={"q_lens": [80, 0, 33, 50], "kv_lens": [200, 129, 1, 0], "causal": True},
    ),
    Case("scale", Nq=60, options={"scale": 0.7}),
    Case("negative scale", Nq=60, options={"scale": -0.3}),
    Case("no scale", Nq=60, options={"scale": 0.0}),
    Case(
        "layout bnhd",
        B=2,
        Hq=4,
        Hkv=2,
        Nq=60,
        Nk=100,
        options={"layout": "bnhd", "causal": True, "mask": random_mask(0.7)},
    ),
    Case(
        "everything",
        B=3,
        Hq=6,
        Hkv=3,
        Nq=110,
        Nk=170,
        D=40,
        Dv=24,
        options={
            "causal": True,
            "q_offset": [60, 40, 100],
            "window_size": (90, -1),
            "mask": random_mask(0.6),
            "bias": random_bias("f4", 0.2, 0),
            "scale": 0.2,
            "q_lens": [110, 100, 7],
            "kv_lens": [170, 140, 120],
        },
    ),
    Case("softcap", Nq=60, Nk=140, D=32, options={"softcap": 1.5}),
    Case(
        "softcap, bias, mask, causal",
        Nq=60,
        Nk=140,
        options={
            "softcap": 0.7,
            "bias": random_bias("f4", 0.2),
            "mask": random_mask(0.8, 1),
            "causal": True,
        },
    ),
    Case("ALiBi", B=2, Hq=6, Hkv=2, Nq=60, Nk=140, options={"alibi_slopes": normal("Hq")}),
    Case(
        "ALiBi for each item, causal, lengths",
        B=2,
        Hq=3,
        Nq=60,
        Nk=140,
        options={
            "alibi_slopes": normal("B", "Hq", dtype="f2"),
            "causal": True,
            "kv_lens": [140, 33],
            "q_lens": [50, 60],
        },
    ),
    Case(
        "ALiBi, few queries of a group",
        Hq=8,
        Hkv=2,
        Nq=3,
        Nk=130,
        D=64,
        options={"alibi_slopes": normal("Hq", dtype="f8")},
    ),
    Case(
        "ALiBi, integers, window",
        Nq=90,
        options={"alibi_slopes": just([1, 3]), "window_size": (30, 5)},
    ),
    Case("sinks", B=2, Hq=6, Hkv=2, Nq=60, Nk=140, options={"sinks": normal("Hq")}),
    Case(
        "sinks, empty rows, float64",
        Hq=3,
        Nq=60,
        Nk=140,
        options={
            "sinks": just(np.array([-np.inf, 5.0, -40.0])),
            "mask": random_mask(0.02),
            "causal": True,
            "q_offset": 20,
        },
    ),
    Case(
        "sinks, few queries of a group, no keys in one item",
        B=2,
        Hq=8,
        Hkv=2,
        Nq=2,
        Nk=130,
        options={"sinks": just(np.arange(8, dtype=">f4")), "kv_lens": [130, 0]},
    ),
    Case(
        "score_mod", B=2, Hq=4, Hkv=2, Nq=70, Nk=150, options={"score_mod": bind(gate, gain=0.75)}
    ),
    Case(
        "score_mod, few queries of a group",
        Hq=8,
        Hkv=2,
        Nq=3,
        Nk=130,
        D=64,
        options={"score_mod": bind(gate, gain=0.75)},
    ),
    Case(
        "score_mod that hides",
        Nq=70,
        Nk=150,
        options={"score_mod": just(thin), "bias": random_bias("f4", 0.1)},
    ),
    Case(
        "score_mod with a table",
        B=2,
        Hq=4,
        Hkv=2,
        Nq=70,
        Nk=150,
        options={"score_mod": bind(looked_up, table=normal("B", "N", dtype="f8"), gain=2)},
    ),
    Case(
        "score_mods composed",
        B=2,
        Nq=70,
        Nk=60,
        options={
            "score_mod": lambda case, rng: mods.compose(
                thin,
                functools.partial(gate, gain=0.75),
                bind(looked_up, table=normal("B", "N"), gain=0.5)(case, rng),
            )
        },
    ),
    Case(
        "relative position bias",
        Hq=3,
        Nq=70,
        Nk=150,
        options={"score_mod": bind(mods.relative_position_bias, table=normal("Hq", 41), reach=20)},
    ),
    Case("mask_mod", B=2, Hq=4, Hkv=2, Nq=70, Nk=150, options={"mask_mod": bind(in_step, step=3)}),
    Case(
        "mask_mod, few queries of a group",
        B=2,
        Hq=8,
        Hkv=2,
        Nq=3,
        Nk=130,
        options={"mask_mod": bind(in_step, step=3)},
    ),
    Case(
        "mask_mod, documents",
        Nq=150,
        D=32,
        options={"mask_mod": bind(masks.document, doc=documents(40, 3, 70))},
    ),
    Case(
        "mask_mod, documents and causal",
        B=2,
        Nq=110,
        Nk=150,
        options={"mask_mod": same_document_causal, "kv_lens": [150, 140]},
    ),
    Case(
        "mask_mod that is causal, more queries",
        Nq=200,
        Nk=60,
        options={"mask_mod": just(masks.causal)},
    ),
    Case("dropout", B=2, Hq=4, Hkv=2, Nq=70, Nk=150, options={"dropout_p": 0.3, "seed": 7}),
    Case(
        "dropout, few queries of a group, causal",
        Hq=8,
        Hkv=2,
        Nq=3,
        Nk=130,
        options={"dropout_p": 0.9, "seed": 2**64 - 1, "causal": True},
    ),
    Case(
        "dropout, sinks, lengths",
        B=3,
        Nq=60,
        Nk=100,
        options={
            "dropout_p": 0.5,
            "seed": 1 << 33,
            "sinks": normal("Hq"),
            "kv_lens": [100, 0, 37],
            "q_lens": [60, 50, 0],
        },
    ),
    Case(
        "everything, modifiers too",
        B=3,
        Hq=6,
        Hkv=3,
        Nq=110,
        Nk=170,
        D=40,
        Dv=24,
        options={
            "causal": True,
            "q_offset": [60, 40, 100],
            "window_size": (90, -1),
            "mask": random_mask(0.6),
            "bias": random_bias("f4", 0.2, 0),
            "scale": 0.2,
            "softcap": 2.5,
            "alibi_slopes": normal("B", "Hq"),
            "sinks": normal("Hq"),
            "score_mod": bind(gate, gain=0.75),
            "mask_mod": bind(in_step, step=3),
            "q_lens": [110, 100, 7],
            "kv_lens": [170, 140, 120],
            "dropout_p": 0.2,
            "seed": 11,
            "layout": "bnhd",
        },
    ),
]


@dataclass(frozen=True)
class Truth:
    """The float64 result of a call and how far a backend may be from it, row by row.

    The budget is that of the computation; `stored_budget` takes in the rounding to what is stored.
    """

    problem: Problem
    out: Array
    lse: Array
    visible: NDArray[np.bool_]
    budget: ErrorBudget

    def stored_budget(self) -> Array:
        """How far each element of a backend's out may be from the truth."""
        error = self.budget.out[..., None]
        if self.problem.dtype == self.problem.compute:
            return error
        return stored(self.problem.storage, self.out, error)


def visible_pairs(p: Problem) -> NDArray[np.bool_]:
    """Return which keys causal, window, lengths, mask, bias and modifiers leave to each row."""
    visible = np.zeros((p.B, p.Hq, p.Nq, p.Nk), bool)
    if p.score_mods or p.mask_mod is not None:
        with np.errstate(all="ignore"):
            for b, h in np.ndindex(p.B, p.Hq):
                visible[b, h, : p.q_lens[b], : p.kv_lens[b]] = reference.scores(p, b, h)[1]
        return visible
    i, j = np.arange(p.Nq)[:, None], np.arange(p.Nk)
    for b in range(p.B):
        lo, hi = p.visible_range(b, i)
        visible[b] = (lo <= j) & (j < hi)
    if p.mask is not None:
        visible &= p.mask
    if p.bias is not None:
        with np.errstate(over="ignore"):  # rounded as every backend rounds it
            visible &= p.bias.astype(p.compute) != -np.inf
    return visible


def weight_unit(p: Problem) -> float:
    """Return the unit roundoff of what weights, and their gradients, are rounded to, or 0."""
    pairs = p.storage == "bfloat16" and tiles.bfloat16_product() != "fma"
    return UNIT["bfloat16"] if pairs else 0.0


def budget(p: Problem, visible: NDArray[np.bool_]) -> ErrorBudget:
    """Return the error budget of every row (`nattn.backends.error_budget` derives it).

    What is not finite has no error; such elements are compared by kind, not by distance.
    """
    with np.errstate(all="ignore"):
        heads = np.arange(p.Hq) // p.group
        q, k = p.q.astype(np.float64), p.k[:, heads].astype(np.float64).transpose(0, 1, 3, 2)
        score = abs(p.scale) * (np.abs(q) @ np.abs(k))
        error = None
        if p.score_mods:
            score, error = modified(p, p.scale * (q @ k), score)
            error = np.where(visible & np.isfinite(score), error, 0.0).max(axis=3, initial=0.0)
        if p.bias is not None:
            score = score + np.abs(p.bias.astype(np.float64))
        score = np.where(visible & np.isfinite(score), score, 0.0).max(axis=3, initial=0.0)
        count = visible.sum(axis=3)
        if p.sinks is not None:
            sink = np.abs(p.sinks.astype(np.float64))
            score = np.maximum(score, np.where(np.isfinite(sink), sink, 0.0)[:, None])
            count = count + 1
        v = np.abs(p.v[:, heads].astype(np.float64))
        v = np.where(np.isfinite(v), v, 0.0).max(axis=3, initial=0.0)
        max_v = np.where(visible, v[:, :, None, :], 0.0).max(axis=3, initial=0.0)
    return error_budget(
        p.compute,
        count,
        score,
        max_v,
        p.D,
        score_error=error,
        dropout_p=p.dropout_p,
        weight_unit=weight_unit(p),
    )


def modified(p: Problem, score: Array, size: Array) -> tuple[Array, Array]:
    """Return the size and the error bound of all scores after the modifiers.

    `size` is that of the dot products without cancellation: of their ``D`` roundings and that of
    the scale.
    """
    u = float(np.finfo(p.compute).eps) / 2
    new, error = np.empty(score.shape), np.empty(score.shape)
    for b, h in np.ndindex(p.B, p.Hq):
        pos = np.arange(p.Nq)[:, None] + p.q_offset[b]
        indices = [np.full((1, 1), b), np.full((1, 1), h), pos, np.arange(p.Nk)[None]]
        exact = [rounding.Rounded(x, np.zeros(x.shape), u) for x in indices]
        s = rounding.Rounded(score[b, h], (p.D + 1) * u * size[b, h], u)
        for tree in p.score_mods:
            s = rounding.run(tree, p.compute, s, *exact).as_float()
        new[b, h], error[b, h] = np.abs(s.x), s.error
    return new, error


def truth(q: Any, k: Any, v: Any, **options: Any) -> Truth:
    """Compute a call by the reference and keep its float64 result, in (B, H, N, D) order."""
    p = Problem.build(q, k, v, **options)
    out = np.empty((p.B, p.Hq, p.Nq, p.Dv))
    lse = np.empty((p.B, p.Hq, p.Nq))
    reference.forward(p, out, lse)
    visible = visible_pairs(p)
    return Truth(p, out, lse, visible, budget(p, visible))


def check(backend: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Array]:
    """Run a call, compare it with the truth within the budget, and return (out, lse)."""
    out, lse = nattn.attention(q, k, v, return_lse=True, backend=backend, **options)
    t = truth(q, k, v, **options)
    assert out.shape == t.problem.out_shape
    assert out.dtype == t.problem.dtype
    assert lse.dtype == t.problem.compute
    assert out.dtype.isnative
    assert_near(as_bhnd(t.problem, out), t.out, t.stored_budget())
    assert_near(lse.reshape(t.lse.shape), t.lse, t.budget.lse)
    return out, lse


# Gradients


@dataclass(frozen=True)
class GradientTruth:
    """The float64 gradients of a call and how far a backend may be from them, by name."""

    problem: Problem
    gradients: dict[str, Array]
    budget: dict[str, Array]


def incoming(p: Problem, seed: int = 5) -> tuple[Array, Array]:
    """Return some dout and dlse for a call, in the caller's rank and layout."""
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal(p.out_shape).astype(p.dtype)
    return dout, rng.standard_normal(p.lse_shape).astype(p.compute)


def has_gradients(p: Problem) -> tuple[str, ...]:
    """Return the names of all that a gradient can be had of."""
    return tuple(name for name in WRT if name in "qkv" or name in p.given)


def gradient_truth(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any = None, **options: Any
) -> GradientTruth:
    """Compute the gradients of a call by the reference, and their budget."""
    t = truth(q, k, v, **options)
    p = t.problem
    dout = as_bhnd(p, dout).astype(p.dtype)
    dlse = None if dlse is None else np.asarray(dlse, p.compute).reshape(t.lse.shape)
    found = reference.backward(p, dout, t.out, t.lse, dlse, frozenset(has_gradients(p)))
    budget = gradient_budget(t, dout, np.zeros(t.lse.shape) if dlse is None else dlse)
    gradients = {name: as_given(p, name, x) for name, x in found.items()}
    for name, x in gradients.items():
        budget[name] = as_given(p, name, budget[name])
        dtype = gradient_dtype(p.given[name][1], p.compute) if name in p.given else p.dtype
        if dtype != p.compute:  # and it is rounded to what was given
            budget[name] = stored(storage_name(dtype) or "", x, budget[name])
    return GradientTruth(p, gradients, budget)


def as_given(p: Problem, name: str, x: Array) -> Array:
    """Bring a gradient to the caller's shape, and keep it in float64."""
    if name == "alibi_slopes" and len(p.given[name][0]) == 1:
        x = x.sum(axis=0)
    if name in p.given:
        return x.reshape(p.given[name][0])
    x = x.transpose(0, 2, 1, 3) if p.layout == "bnhd" else x
    return x.reshape(x.shape[4 - p.rank :])


def gradient_budget(t: Truth, dout: Array, dlse: Array) -> dict[str, Array]:
    """Return the error budget of every gradient (`nattn.backends.error_budget` derives it).

    What is not finite has no error; it counts for nothing in the budget of what is.
    """
    p = t.problem
    double = 2 if p.compute == np.float64 else 1
    u = double * float(np.finfo(p.compute).eps) / 2
    off_out = np.broadcast_to(t.stored_budget(), t.out.shape)  # what was stored is read again
    shapes = {"q": p.q.shape, "k": p.k.shape, "v": p.v.shape, "bias": p.bias_shape or ()}
    shapes |= {"sinks": (p.Hq,), "alibi_slopes": (p.B, p.Hq)}
    # of each sum the errors, the sizes and the number of its terms
    total = {name: np.zeros((3, *shapes[name])) for name in has_gradients(p)}

    def clean(x: Any) -> Array:
        return np.where(np.isfinite(x), x, 0.0)

    def size(x: Array) -> Array:
        return clean(np.abs(x.astype(np.float64)))

    with np.errstate(all="ignore"):
        for b, h in np.ndindex(p.B, p.Hq):
            n_q, n_kv, kv = int(p.q_lens[b]), int(p.kv_lens[b]), h // p.group
            at: Any
            q, k, v = size(p.q[b, h, :n_q]), size(p.k[b, kv, :n_kv]), size(p.v[b, kv, :n_kv])
            do, out = clean(dout[b, h, :n_q].astype(np.float64)), clean(t.out[b, h, :n_q])
            lse, dl = clean(t.lse[b, h, :n_q, None]), clean(dlse[b, h, :n_q, None])
            s, visible, slope = reference._scores(p, b, h, derive=True)
            slope = np.broadcast_to(slope, s.shape)
            score_error, slope_error = scores_error(p, b, h, q @ k.T, s)
            keys = np.where(np.isfinite(p.v[b, kv, :n_kv]), p.v[b, kv, :n_kv], 0.0)

            exponent = np.where(visible, clean(s - lse), 0.0)
            prob = np.where(visible, np.exp(exponent), 0.0)
            kept, factor = reference._kept(p, b, h, visible), 1.0 / (1.0 - p.dropout_p)
            dp = np.where(kept, do @ keys.T.astype(np.float64) * factor, 0.0)
            delta = (do * out).sum(axis=1, keepdims=True) - dl
            out_error = clean(off_out[b, h, :n_q])
            lse_error = clean(t.budget.lse[b, h, :n_q, None])
            delta_error = (np.abs(do) * (out_error + (p.Dv + 1) * u * np.abs(out))).sum(1)
            delta_error = delta_error[:, None] + u * (np.abs(delta) + np.abs(dl))
            pair = pair_budget(
                p.compute,
                prob,
                exponent,
                dp,
                delta,
                score_error=double * score_error,
                lse_error=lse_error,
                dp_size=np.where(kept, np.abs(do) @ v.T * factor, 0.0),
                delta_error=delta_error,
                Dv=p.Dv,
                dropout_p=p.dropout_p,
            )
            w_error = np.where(kept, pair.weight, 0.0)
            ds, ds_error = np.abs(prob * (dp - delta)), np.where(visible, clean(pair.ds), 0.0)
            i, j = np.arange(n_q)[:, None], np.arange(n_kv)
            distance = np.abs(i + p.q_offset[b] - j).astype(np.float64)
            sink = -np.inf if p.sinks is None else float(p.sinks[h])
            share = clean(np.exp(sink - lse))
            off = share * (lse_error + 3 * u * np.abs(clean(sink - lse)) + 4 * u)
            terms: dict[str, Any] = {
                "bias": (ds_error, ds, visible),
                "alibi_slopes": (ds_error * distance, ds * distance, visible),
                "sinks": (off * np.abs(delta) + (share + off) * delta_error, share * delta, 1 + i),
            }
            steep = clean(np.abs(slope))
            ds_error = ds_error * (steep + double * slope_error)
            ds_error += ds * (double * slope_error + u * steep)
            ds, scale = ds * steep, abs(p.scale)
            w = np.where(kept, prob * factor, 0.0)
            # what is smaller than the smallest normal number is flushed
            ds_error += weight_unit(p) * (ds + ds_error) + 2.0**-126 * (weight_unit(p) > 0)
            w_error += weight_unit(p) * (w + w_error) + 2.0**-126 * (weight_unit(p) > 0)
            rows: dict[str, Any] = {
                "q": (ds_error @ k, ds @ k, visible),
                "k": (ds_error.T @ q, ds.T @ q, visible.T),
                "v": (w_error.T @ np.abs(do), w.T @ np.abs(do), visible.T),
            }
            for name, sums in total.items():
                if name == "bias":
                    for sum_, x in zip(sums, terms[name], strict=True):
                        reference._add_broadcast(sum_, b, h, x.astype(np.float64))
                elif name in terms:
                    error, amount, count = terms[name]
                    at = (b, h) if name == "alibi_slopes" else (h,)
                    n = np.count_nonzero(count) + p.B
                    sums[(slice(None), *at)] += error.sum(), np.abs(amount).sum(), n
                else:
                    error, amount, count = rows[name]
                    at = (b, h, slice(n_q)) if name == "q" else (b, kv, slice(n_kv))
                    factor_ = 1.0 if name == "v" else scale
                    sums[(0, *at)] += factor_ * error
                    sums[(1, *at)] += factor_ * amount
                    sums[(2, *at)] += count.sum(axis=1)[:, None]
    return {name: sum_budget(p.compute, *sums) for name, sums in total.items()}


def scores_error(p: Problem, b: int, h: int, size: Array, s: Array) -> tuple[Array, Array]:
    """Return how far the scores of one head may be off, and the derivatives of the modifiers.

    `size` is that of the dot products without cancellation, without the scale.
    """
    u = float(np.finfo(p.compute).eps) / 2
    n_q, n_kv = s.shape
    error = (p.D + 2) * u * abs(p.scale) * size
    slope_error = np.zeros(s.shape)
    if p.score_mods:
        q, k = reference._queries_and_keys(p, b, h)
        pos = np.arange(n_q)[:, None] + p.q_offset[b]
        indices = [np.full((1, 1), b), np.full((1, 1), h), pos, np.arange(n_kv)[None]]
        exact = [rounding.Rounded(x, np.zeros(x.shape), u) for x in indices]
        score = rounding.Rounded(p.scale * (q @ k.T), error, u)
        slope = rounding.Rounded(np.ones(s.shape), np.zeros(s.shape), u)
        for tree in p.score_mods:
            score, own = rounding.derive(tree, p.compute, score, *exact)
            slope = slope * own
        error, slope_error = score.error, slope.error
    if p.bias is not None:
        error = error + u * (np.abs(s) + np.abs(p.bias[b, h, :n_q, :n_kv].astype(np.float64)))
    return np.where(np.isfinite(s), error, 0.0), np.where(np.isfinite(s), slope_error, 0.0)


def check_gradients(
    backend: str,
    q: Any,
    k: Any,
    v: Any,
    dout: Any = None,
    dlse: Any = None,
    *,
    wrt: tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    """Run a call forward and backward and compare with the truth within the budget."""
    p = Problem.build(q, k, v, **options)
    if dout is None:
        dout, dlse = incoming(p)
    wrt = has_gradients(p) if wrt is None else wrt
    out, lse = nattn.attention(q, k, v, return_lse=True, backend=backend, **options)
    got = nattn.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, backend=backend, **options
    )
    t = gradient_truth(q, k, v, dout, dlse, **options)
    assert_gradients_near(got, t, wrt)
    return got


def assert_gradients_near(got: Any, t: GradientTruth, wrt: tuple[str, ...]) -> None:
    """Assert that gradients have the right shapes and dtypes and lie within the budget."""
    for name, x in zip(WRT, got, strict=False):
        if name not in wrt:
            assert x is None, name
            continue
        assert x is not None, name
        p = t.problem
        given = p.given[name][1] if name in p.given else p.dtype
        assert x.dtype == gradient_dtype(given, p.compute)
        assert x.dtype.isnative
        assert x.shape == t.gradients[name].shape
        try:
            assert_near(x, t.gradients[name], t.budget[name])
        except AssertionError as error:
            raise AssertionError(f"d{name}: {error}") from error


def assert_near(got: Array, expected: Array, tolerance: Array | float) -> None:
    """Assert closeness where the truth is finite, and the same -inf or non-finite elsewhere.

    Where a probability underflows, an infinite value is NaN in one precision and Inf in
    another; the contract only promises that it shows.
    """
    expected = np.asarray(expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(got == -np.inf, expected == -np.inf)
    error = np.abs(np.where(finite, got, 0.0) - np.where(finite, expected, 0.0))
    excess = error - np.broadcast_to(tolerance, error.shape)
    if excess.size and excess.max() > 0:
        at = np.unravel_index(excess.argmax(), excess.shape)
        allowed = np.broadcast_to(tolerance, error.shape)[at]
        raise AssertionError(
            f"at {tuple(map(int, at))}: got {got[at]}, expected {expected[at]}, "
            f"error {error[at]:.3g}, allowed {allowed:.3g}; "
            f"{np.count_nonzero(excess > 0)} of {excess.size} are too far"
        )


POISON = [np.nan, np.inf, -np.inf]


def poisoned(x: Array, at: Any) -> Array:
    """Return a copy with NaN and both infinities in turn along the first axis of ``x[at]``."""
    x = x.copy()
    count = x[at].shape[0]
    x[at] = np.resize(POISON, count).reshape(-1, *(1,) * (x[at].ndim - 1))
    return x


class OnDevice:
    """What has a CUDA array interface, though what lies at its address is a NumPy array.

    Only a kernel of the simulator may read it there: the library, which cannot know, must not.
    """

    def __init__(self, array: Array, **interface: Any) -> None:
        self.array = array
        self.interface = interface

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        x = self.array
        found = {"shape": x.shape, "strides": x.strides, "typestr": x.dtype.str, "version": 3}
        return found | {"data": (x.ctypes.data, not x.flags.writeable)} | self.interface

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype


def gaussian(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    """Return standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(
    B: int,
    H: int,
    Nq: int,
    Nk: int,
    D: int,
    Dv: int | None = None,
    *,
    dtype: Any = np.float32,
    seed: int = 0,
) -> tuple[Array, Array, Array]:
    """Return standard normal q, k and v."""
    q = gaussian(B, H, Nq, D, dtype=dtype, seed=seed)
    k = gaussian(B, H, Nk, D, dtype=dtype, seed=seed + 1)
    v = gaussian(B, H, Nk, D if Dv is None else Dv, dtype=dtype, seed=seed + 2)
    return q, k, v
