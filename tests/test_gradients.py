"""Gradients: against finite differences, the dense reference, PyTorch, and numbers by hand."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
import operator
import tracemalloc
from typing import Any

import numpy as np
import pytest
import registry
from cases import (
    CASES,
    Case,
    check_gradients,
    gate,
    gaussian,
    has_gradients,
    in_step,
    incoming,
    just,
    looked_up,
    normal,
    qkv,
    random_bias,
    random_mask,
    thin,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import nattn
from nattn.backends.error_budget import error_budget
from nattn.call.problem import WRT, Problem
from nattn.functions import masks, on_arrays
from nattn.functions.binding import SCORE_MOD, resolve
from nattn.vectors import dual

Array = NDArray[Any]

nan, inf = np.nan, np.inf
FLOAT64 = np.dtype(np.float64)


def gradients(backend: str, q: Any, k: Any, v: Any, *, wrt: Any = None, **options: Any) -> Any:
    """Run a call forward and backward, for all that has a gradient."""
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    wrt = has_gradients(p) if wrt is None else wrt
    _, vjp = nattn.attention_vjp(q, k, v, backend=backend, **options)
    return vjp(dout, dlse, wrt)


def assert_same_bits(got: Any, expected: Any) -> None:
    for name, x, y in zip(WRT, got, expected, strict=False):
        assert (x is None) == (y is None), name
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=f"d{name}")


# Every case against the reference, within the budget


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(computed: tuple[str, str], case: Case) -> None:
    backend, dtype = computed
    q, k, v, options = case.make(dtype)
    check_gradients(backend, q, k, v, **options)


SHAPES = [
    *((50, 90), (4, 50, 90), (2, 1, 50, 90), (2, 4, 50, 90), (1, 4, 1, 90), (4, 50, 1)),
    *((2, 1, 1, 1), (90,), (1, 90), (2, 4, 1, 90), (50, 1), (2, 1, 1, 90), (1, 1, 50, 1), ()),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_of_every_shape(computed: tuple[str, str], shape: tuple[int, ...]) -> None:
    backend, dtype = computed
    q, k, v = qkv(2, 4, 50, 90, 8, dtype=dtype)
    bias = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    got = check_gradients(backend, q, k[:, :2], v[:, :2], bias=bias, causal=True, softcap=2.0)
    assert got.dbias is not None
    assert got.dbias.shape == shape
    full = np.broadcast_to(bias, (2, 4, 50, 90))  # of stride 0, but of full shape
    got = check_gradients(backend, q, k[:, :2], v[:, :2], bias=full, wrt=("bias",))
    assert got.dbias is not None
    assert got.dbias.shape == full.shape


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("block", [16, 48, 64, 128, 256, 512])
def test_sizes_around_blocks(tiled: str, block: int, edge: int) -> None:
    q, k, v = qkv(1, 1, block + edge, block + edge, 8)
    check_gradients(tiled, q, k, v, causal=True)
    check_gradients(tiled, q[:, :, :5], k, v)
    check_gradients(tiled, q, k[:, :, :5], v[:, :, :5])


@pytest.mark.parametrize("n_kv", [1000, 2049, 5000])
def test_several_parts_of_the_keys(tiled: str, n_kv: int) -> None:
    q, k, v = qkv(2, 2, 60, n_kv, 8)
    bias = gaussian(2, 1, 1, n_kv)
    options: dict[str, Any] = {"kv_lens": [n_kv, n_kv // 3], "sinks": [0.5, -1.0]}
    check_gradients(tiled, q, k, v, bias=bias, **options)
    check_gradients(tiled, q, k, v, alibi_slopes=[0.01, 0.002], causal=True, **options)


def test_block_mask_gives_the_same_bits() -> None:
    q, k, v = qkv(2, 2, 200, 300, 16)
    doc = np.repeat([0, 1, 2], [90, 100, 110])
    tree = nattn.mask(functools.partial(masks.document, doc=doc)) & masks.causal
    blocks = nattn.BlockMask.from_mask_mod(tree, 1, 1, 200, 300, block_size=64)
    assert_same_bits(
        gradients("cpu", q, k, v, block_mask=blocks), gradients("cpu", q, k, v, mask_mod=tree)
    )
    check_gradients("cpu", q, k, v, block_mask=blocks)


# Finite differences, in float64, over the option matrix

SMOOTH = sorted(
    name
    for name, mod in registry.MODS.items()
    if not mod.kinks and name not in ("power_compress", "saturate")  # whose slopes have kinks
)
SHARED = {"gate": gate, "thin": thin, "looked_up": looked_up}
"""Modifiers for the cpu: those of other tests, so that nothing is compiled for this one."""


def shared_mod(name: str, B: int, far: int, rng: np.random.Generator) -> tuple[Any, registry.Mod]:
    """Return a modifier of `SHARED`, and what rounding does to it."""
    if name == "gate":
        mod = functools.partial(gate, gain=0.75)
        return mod, registry.Mod(lambda *_: mod, 1, lambda S, far: S + 0.5, 3 + registry.FUNCTION)
    if name == "thin":
        return thin, registry.Mod(lambda *_: thin, 1, lambda S, far: S, 1)
    table = rng.uniform(-1, 1, (B, far))
    mod = functools.partial(looked_up, table=table, gain=2)
    return mod, registry.Mod(lambda *_: mod, 1, lambda S, far: S + 2, 3)


@st.composite
def differentiable(draw: st.DrawFn, compiled: bool) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Draw arrays by which to differentiate, the other options, and how far a score may be off."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank = draw(st.sampled_from([4, 4, 3, 2]))
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    B, Hkv, group = (B if rank == 4 else 1), (Hkv if rank > 2 else 1), (group if rank > 2 else 1)
    Nq, Nk = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    D, Dv, Hq = draw(st.integers(1, 9)), draw(st.integers(1, 9)), Hkv * group
    x = {
        "q": rng.uniform(-2, 2, (B, Hq, Nq, D)),
        "k": rng.uniform(-2, 2, (B, Hkv, Nk, D)),
        "v": rng.uniform(-2, 2, (B, Hkv, Nk, Dv)),
    }
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if rank == 4 and draw(st.booleans()):
        options["layout"] = "bnhd"
        x = {name: np.ascontiguousarray(y.transpose(0, 2, 1, 3)) for name, y in x.items()}
    x = {name: y.reshape(y.shape[4 - rank :]) for name, y in x.items()}
    if draw(st.booleans()):
        options["q_offset"] = draw(st.integers(-Nq, Nk))
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 12)
        options["window_size"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["q_lens"] = draw(st.lists(st.integers(0, Nq), min_size=B, max_size=B))
    if draw(st.booleans()):
        options["kv_lens"] = draw(st.lists(st.integers(0, Nk), min_size=B, max_size=B))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.5, 0.25, 1.0]))
    if draw(st.booleans()):
        options["mask_mod"] = functools.partial(in_step, step=draw(st.integers(1, 4)))
    if draw(st.booleans()):
        options |= {
            "dropout_p": draw(st.sampled_from([0.25, 0.5])),
            "seed": draw(st.integers(0, 9)),
        }
    pairs = [B, Hq, Nq, Nk]
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in pairs][draw(st.integers(0, 4)) :]
        options["mask"] = rng.random(shape) < 0.7
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in pairs][draw(st.integers(0, 4)) :]
        x["bias"] = np.where(rng.random(shape) < 0.2, -inf, rng.uniform(-1, 1, shape))
    if draw(st.booleans()):
        x["sinks"] = np.where(rng.random(Hq) < 0.2, -inf, rng.uniform(-1, 1, Hq))
    if draw(st.booleans()):
        shape = [Hq] if draw(st.booleans()) else [B, Hq]
        x["alibi_slopes"] = rng.uniform(-0.5, 0.5, shape)
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 4.0]))

    # what the modifiers make of the largest score, and of the rounding of q @ k
    far = Nq + Nk + abs(options.get("q_offset", 0))
    u = float(np.finfo(FLOAT64).eps)  # twice: of both evaluations
    S = 4.0 * D * abs(options.get("scale", D**-0.5))
    error = (D + 2) * u * S
    if "softcap" in options:
        S, error = options["softcap"], error + (3 + registry.FUNCTION) * u * options["softcap"]
    if draw(st.booleans()):
        sizes = registry.Sizes(B, Hq, Nq, Nk, positions=far)
        if compiled:
            name = draw(st.sampled_from(sorted(SHARED)))
            options["score_mod"], mod = shared_mod(name, B, far, rng)
        else:
            mod = registry.MODS[draw(st.sampled_from(SMOOTH))]
            options["score_mod"] = mod.build(sizes, rng)
        error, S = mod.budget(FLOAT64, S, sizes, error), mod.magnitude(S, sizes.far)
    S += 0.5 * far + 1.0  # ALiBi and bias
    return x, options, error + 4 * u * S


def check_differences(
    backend: str, arrays: dict[str, Any], options: dict[str, Any], score_error: float
) -> None:
    """Compare a gradient with differences of the loss ``(out * dout).sum() + (lse * dlse).sum()``.

    In a random direction, for each array. The difference of fourth order,

        (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h = f' + c h**4 + ...,

    is taken for h and 2h: the latter is 15 times as far from the former as that is from the truth.
    The rounding errors of four losses enter with 18 / 12h at most.
    """
    rng = np.random.default_rng(3)
    p = Problem.build(**arrays, **options)
    dout = rng.uniform(-1, 1, p.out_shape)
    dlse = rng.uniform(-1, 1, p.lse_shape)

    def loss(x: dict[str, Any]) -> float:
        out, lse = nattn.attention(**x, **options, return_lse=True, backend="reference")
        return float((out * dout).sum() + (np.where(lse == -inf, 0.0, lse) * dlse).sum())

    q, k, v = (arrays[name] for name in "qkv")
    names = tuple(arrays)
    given = {name: x for name, x in arrays.items() if name not in "qkv"}
    out, lse = nattn.attention(q, k, v, return_lse=True, backend=backend, **given, **options)
    got = nattn.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=names, backend=backend, **given, **options
    )
    S = 4.0 * p.D * abs(p.scale) + 2.0  # of the subtraction of the largest score
    budget = error_budget(
        FLOAT64, p.Nk + 1, S, 2.0, p.D, score_error=score_error, dropout_p=p.dropout_p
    )
    rounding = float(dout.size * budget.out + dlse.size * budget.lse)
    h = 1e-3
    for name in names:
        gradient = got[WRT.index(name)]
        assert gradient is not None
        direction = rng.uniform(-1, 1, gradient.shape)
        f = {}
        for step in (-4, -2, -1, 1, 2, 4):
            f[step] = loss({**arrays, name: arrays[name] + step * h * direction})
        fine = (8 * (f[1] - f[-1]) - (f[2] - f[-2])) / (12 * h)
        coarse = (8 * (f[2] - f[-2]) - (f[4] - f[-4])) / (24 * h)
        tolerance = abs(coarse - fine) + 1.5 * rounding / h
        assert abs(float((gradient * direction).sum()) - fine) <= tolerance, name


@settings(max_examples=80)
@given(drawn=differentiable(compiled=False))
def test_finite_differences_of_the_reference(drawn: Any) -> None:
    check_differences("reference", *drawn)


@settings(max_examples=80)
@given(drawn=differentiable(compiled=True))
def test_finite_differences(drawn: Any) -> None:
    check_differences("cpu", *drawn)


@settings(max_examples=80)
@given(drawn=differentiable(compiled=True), dtype=st.sampled_from(["float32", "float64"]))
def test_any_call(drawn: Any, dtype: str) -> None:
    arrays, options, _ = drawn
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    check_gradients("cpu", **arrays, **options)


# Dual numbers on arrays

SIZES = registry.Sizes(B=2, H=2, Nq=16, Nk=11)


@pytest.mark.parametrize("name", registry.MODS)
def test_the_derivative_of_a_modifier(name: str) -> None:
    """As `check_differences`, for each score."""
    mod = registry.MODS[name]
    tree = resolve("score_mod", mod.build(SIZES, registry.generator(name)), SCORE_MOD)
    f = on_arrays.ArrayFunction("score_mod", tree, FLOAT64)
    h, S = 1e-3, 6.0
    s = registry.generator(name).uniform(-S, S, (SIZES.Nq, SIZES.Nk))
    for kink in (*mod.kinks, 0.0):  # where it has none, or none that is smooth
        s = np.where(np.abs(s - kink) < 5 * h, kink + 0.5, s)
    pos, j = np.arange(SIZES.Nq)[:, None] - 5, np.arange(SIZES.Nk)[None]
    for b, head in np.ndindex(SIZES.B, SIZES.H):
        indices = np.full((1, 1), b), np.full((1, 1), head), pos, j
        value, slope = f.derive(s, *indices)
        np.testing.assert_allclose(value, f(s, *indices), rtol=1e-15, atol=1e-15)
        seen = value != -inf
        at = {n: np.where(seen, f(s + n * h, *indices), 0.0) for n in (-4, -2, -1, 1, 2, 4)}
        fine = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)
        coarse = (8 * (at[2] - at[-2]) - (at[4] - at[-4])) / (24 * h)
        tolerance = np.abs(coarse - fine) + 1.5 * mod.budget(FLOAT64, S + 1, SIZES) / h
        assert np.all(np.abs(slope - fine) <= tolerance)
        assert np.all(slope[~seen] == 0.0)


def slope_of(function: Any, *scores: float) -> list[float]:
    """Return the derivatives of a function of the score alone."""

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(score)

    f = on_arrays.ArrayFunction("score_mod", resolve("score_mod", mod, SCORE_MOD), FLOAT64)
    zero = np.zeros((1, 1), np.int64)
    with np.errstate(all="ignore"):
        slopes: list[float] = f.derive(np.array([scores]), zero, zero, zero, zero)[1][0].tolist()
    return slopes


SPECIAL: dict[str, tuple[Any, list[float], list[float]]] = {
    "abs": (lambda s: np.abs(s), [-2.0, 0.0, 3.0], [-1.0, 0.0, 1.0]),
    "maximum": (lambda s: np.maximum(s, 1.0), [0.0, 1.0, 2.0], [0.0, 1.0, 1.0]),
    "maximum, second": (lambda s: np.maximum(1.0, s), [0.0, 1.0, 2.0], [0.0, 0.0, 1.0]),
    "minimum": (lambda s: np.minimum(s, 1.0), [0.0, 1.0, 2.0], [1.0, 1.0, 0.0]),
    "minimum, second": (lambda s: np.minimum(1.0, s), [0.0, 1.0, 2.0], [1.0, 0.0, 0.0]),
    "max": (lambda s: max(s, 1.0), [0.0, 1.0, 2.0], [0.0, 1.0, 1.0]),
    "min": (lambda s: min(1.0, s), [0.0, 1.0, 2.0], [1.0, 0.0, 0.0]),
    "clip": (lambda s: np.clip(s, -1.0, 1.0), [-2.0, -1.0, 0.0, 1.0, 2.0], [0, 1, 1, 1, 0]),
    "floor": (lambda s: np.floor(s) + s // 2.0 + np.sign(s), [1.5], [0.0]),
    "mod": (lambda s: s % 2.0, [3.5, -0.5], [1.0, 1.0]),
    "mod of": (lambda s: 7.0 % s, [2.0], [-3.0]),
    "where": (lambda s: np.where(s > 0, np.log(s), s), [-1.0, 2.0], [1.0, 0.5]),
    "where of a score": (lambda s: np.where(s, 2.0 * s, s), [0.0, 2.0], [1.0, 2.0]),
    "hidden": (lambda s: np.where(s > 0, s, -inf), [-1.0, 2.0], [0.0, 1.0]),
    "hidden by overflow": (lambda s: np.log(np.maximum(s, 0.0)), [-1.0, 4.0], [0.0, 0.25]),
    "shut": (lambda s: 0.0 * np.sqrt(s), [0.0], [0.0]),
    "sqrt": (lambda s: np.sqrt(s), [0.0, 4.0], [inf, 0.25]),
    "sigmoid": (lambda s: 1.0 / (1.0 + np.exp(-s)), [-1000.0, 0.0, 1000.0], [0.0, 0.25, 0.0]),
    "power": (lambda s: s**3 + 2.0**s, [0.0, 1.0], [math.log(2), 3 + 2 * math.log(2)]),
    "power of 0": (lambda s: s**s + 0.0**s, [0.0], [0.0]),
    "no score": (lambda s: np.float32(2.0), [1.0], [0.0]),
    "nan": (lambda s: s * s, [nan], [nan]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_where_there_is_no_derivative(name: str) -> None:
    function, scores, expected = SPECIAL[name]
    np.testing.assert_allclose(slope_of(function, *scores), expected, rtol=1e-15)


def test_every_function_has_a_rule() -> None:
    by_operator = {
        operator.truediv: np.true_divide,
        operator.floordiv: np.floor_divide,
        operator.mod: np.remainder,
        operator.pow: np.power,
        operator.neg: np.negative,
        operator.pos: np.positive,
        operator.sub: np.subtract,
        operator.mul: np.multiply,
        operator.add: np.add,
        abs: np.absolute,
        operator.abs: np.absolute,
    }
    comparisons = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
    checked = 0
    for function, _, real in dual.functions():
        if function in comparisons or not (real or isinstance(function, np.ufunc)):
            continue
        ufunc = by_operator.get(function, function)
        if isinstance(ufunc, np.ufunc):
            assert ufunc in on_arrays._RULES, function
            checked += 1
    assert checked > 25


WRONG: dict[str, tuple[Any, str]] = {
    "if": (lambda s: s if s > 0 else -s, "np.where"),
    "if of a score": (lambda s: s if s else -s, "np.where"),
    "int": (lambda s: int(s), "of a number"),
    "unknown": (lambda s: np.arctan(s), "differentiate"),
    "reduction": (lambda s: np.add.reduce(s), "differentiate"),
    "sum": (lambda s: np.sum(s), "differentiate"),
    "where, keyword": (lambda s: np.exp(s, where=False), "differentiate"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_differentiated(name: str) -> None:
    function, expected = WRONG[name]
    with pytest.raises(TypeError, match=f"^score_mod: (.|\n)*{expected}"):
        slope_of(function, 1.0, 2.0)


def by_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return table[score]


def all_of_it(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table


@pytest.mark.parametrize(
    ("mod", "expected"), [(by_score, "integers as indices"), (all_of_it, "to be indexed")]
)
def test_a_bound_array_is_not_indexed_by_a_score(mod: Any, expected: str) -> None:
    tree = resolve("score_mod", functools.partial(mod, table=np.ones(3)), SCORE_MOD)
    zero = np.zeros((1, 1), np.int64)
    with pytest.raises(TypeError, match=f"^score_mod: (.|\n)*{expected}"):
        on_arrays.ArrayFunction("score_mod", tree, FLOAT64).derive(
            np.ones((1, 2)), zero, zero, zero, zero
        )


def inplace(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    new = score
    new *= 2.0
    q_idx += score
    return new + score + q_idx


def test_in_place_operators_bind_anew() -> None:
    tree = resolve("score_mod", inplace, SCORE_MOD)
    i = np.ones((1, 1), np.int64)
    value, slope = on_arrays.ArrayFunction("score_mod", tree, FLOAT64).derive(
        np.ones((1, 1)), i, i, i, i
    )
    assert (value.item(), slope.item()) == (5.0, 4.0)
    assert i.item() == 1


# What is asked for


def test_subsets_give_the_same_bits(backend: str) -> None:
    q, k, v, options = next(c for c in CASES if c.name == "everything, modifiers too").make("f4")
    every = gradients(backend, q, k, v, **options)
    assert all(x is not None for x in every[: len(WRT)])
    for n, names in enumerate(itertools.combinations(WRT, 2)):
        order = names[:: 1 - 2 * (n % 2)]
        got = gradients(backend, q, k, v, wrt=list(order), **options)
        expected = nattn.Gradients(
            *(x if name in names else None for name, x in zip(WRT, every, strict=False))
        )
        assert_same_bits(got, expected)
    for name in WRT:
        got = gradients(backend, q, k, v, wrt=(name,), **options)
        np.testing.assert_array_equal(got[WRT.index(name)], every[WRT.index(name)])
    assert gradients(backend, q, k, v, wrt=(), **options) == (None,) * 7


def test_the_same_bits_every_time(backend: str) -> None:
    q, k, v, options = next(c for c in CASES if c.name == "everything, modifiers too").make("f4")
    first = gradients(backend, q, k, v, **options)
    for _ in range(10):
        assert_same_bits(gradients(backend, q, k, v, **options), first)


def test_what_is_left_out_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("nattn.backends.cpu.jobs"), "thread_count", lambda: 1
    )
    q, k, v = qkv(1, 1, 4096, 4096, 512, 8)
    out, lse = nattn.attention(q, k, v, return_lse=True)

    def peak(*wrt: str) -> int:
        nattn.attention_backward(out, q, k, v, out, lse, wrt=wrt)  # compiles
        tracemalloc.start()
        nattn.attention_backward(out, q, k, v, out, lse, wrt=wrt)
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    scratch = 6 << 20  # of one thread, with four query tiles at D=512
    assert peak("v") < scratch < q.nbytes
    assert q.nbytes < peak("k") < 2 * q.nbytes + scratch  # dk and its padded copy
    assert q.nbytes < peak("q") < 9 * q.nbytes + scratch  # dq and eight shares of it


# Chunks of the keys: with the lse and out of all of them, shares add up


def test_shares_of_disjoint_keys_add_up(backend: str) -> None:
    q, k, v = qkv(1, 2, 30, 100, 8, dtype="f8")
    dout = gaussian(1, 2, 30, 8, dtype="f8", seed=9)
    out, lse = nattn.attention(q, k, v, return_lse=True, causal=True, backend=backend)
    whole = nattn.attention_backward(dout, q, k, v, out, lse, causal=True, backend=backend)
    parts: list[Any] = [
        nattn.attention_backward(
            dout, q, k[:, :, a:b], v[:, :, a:b], out, lse, causal=True, q_offset=70 - a,
            backend=backend,
        )
        for a, b in ((0, 40), (40, 100))
    ]  # fmt: skip
    close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13)
    close(parts[0].dq + parts[1].dq, whole.dq)
    close(np.concatenate([x.dk for x in parts], axis=2), whole.dk)
    close(np.concatenate([x.dv for x in parts], axis=2), whole.dv)


# PyTorch's own autograd


TORCH: list[Case] = [
    Case("plain", B=2, Nq=40, Nk=70, D=16, Dv=24),
    Case("causal", Nq=60, D=32, options={"causal": True}),
    Case("grouped", B=2, Hq=6, Hkv=2, Nq=40, Nk=50, options={"scale": 0.3}),
    Case("bias", B=2, Nq=40, Nk=70, options={"bias": random_bias("f8", 0.0)}),
    Case("bias of each key", B=2, Nq=40, Nk=70, options={"bias": random_bias("f8", 0.0, 0, 2)}),
    Case("bias of each row", B=2, Nq=40, Nk=70, options={"bias": random_bias("f8", 0.0, 1, 3)}),
    Case("mask", B=2, Nq=40, Nk=70, options={"mask": random_mask(0.6)}),
    Case("softcap, ALiBi, sinks", B=2, Nq=40, Nk=70, options={
        "softcap": 1.5, "alibi_slopes": normal("Hq", dtype="f8"), "sinks": normal("Hq", dtype="f8")
    }),
    Case("score_mod", Nq=40, Nk=70, options={"score_mod": functools.partial(gate, gain=0.75)}),
]  # fmt: skip


@pytest.mark.parametrize("case", TORCH, ids=lambda case: case.name)
def test_torch(backend: str, case: Case) -> None:
    """The same formula in torch, in float64: what is differentiated is torch's affair."""
    torch = importlib.import_module("torch") if _has_torch() else pytest.skip("no torch")
    options = {
        n: just(x) if callable(x) and n == "score_mod" else x for n, x in case.options.items()
    }
    q, k, v, options = Case(**{**vars(case), "options": options}).make("f8")
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    wrt = has_gradients(p)
    arrays = {"q": q, "k": k, "v": v} | {name: options[name] for name in wrt if name in options}
    x = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in arrays.items()}
    repeat = functools.partial(torch.repeat_interleave, repeats=p.group, dim=1)
    s = p.scale * x["q"] @ repeat(x["k"]).transpose(2, 3)
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    i, j = np.arange(p.Nq)[:, None] + p.q_offset[0], np.arange(p.Nk)
    if "score_mod" in options:
        far = torch.tensor(i - j > 16)
        s = torch.where(far, 0.75 * torch.tanh(s), s) + torch.tensor([0.0, 0.25])[:, None, None]
    if "alibi_slopes" in options:
        s = s - x["alibi_slopes"][:, None, None] * torch.tensor(np.abs(i - j))
    if "bias" in options:
        s = s + x["bias"]
    visible = np.broadcast_to(i >= j if p.causal else True, s.shape)
    if p.mask is not None:
        visible = visible & p.mask
    s = s.masked_fill(torch.tensor(~visible), -inf)
    one = torch.zeros(1, dtype=torch.float64)
    sinks = x["sinks"] if "sinks" in options else one.expand(p.Hq) - inf
    with_sink = torch.cat([s, sinks[:, None, None].expand(p.B, p.Hq, p.Nq, 1)], dim=3)
    lse = torch.logsumexp(with_sink, dim=3)
    out = torch.exp(s - lse[..., None]) @ repeat(x["v"])
    loss = (out * torch.tensor(dout)).sum() + (lse * torch.tensor(dlse)).sum()
    expected = torch.autograd.grad(loss, [x[name] for name in wrt])
    got = gradients(backend, q, k, v, **options)
    for name, y in zip(wrt, expected, strict=True):
        np.testing.assert_allclose(got[WRT.index(name)], y.numpy(), rtol=1e-10, atol=1e-12)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def test_nan_of_either_sign_is_seen_beside_dropout(backend: str) -> None:
    """What is hidden has the sign bit, and so may a NaN have that makes a row's lse one."""
    q, k, v = qkv(1, 1, 20, 30, 8)
    drop: dict[str, Any] = {"dropout_p": 0.3, "seed": 5, "backend": backend}
    out, lse = nattn.attention(q, k, v, return_lse=True, **drop)
    for sign in (1.0, -1.0):
        lse[0, 0, 4] = np.copysign(np.float32(np.nan), np.float32(sign))
        dq = nattn.attention_backward(np.ones_like(out), q, k, v, out, lse, **drop).dq
        assert dq is not None
        assert np.isnan(dq[0, 0, 4]).all()
        assert np.isfinite(np.delete(dq[0, 0], 4, axis=0)).all()
