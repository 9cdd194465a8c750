"""The built-in modifiers against straightforward loops, on NumPy arrays."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import registry
from numpy.typing import NDArray
from registry import MODS, Sizes

from nattn.functions import binding, dropout, masks, mods, positions

bind = functools.partial
sizes = Sizes(B=2, H=3, Nq=24, Nk=33)
q_idx = (np.arange(sizes.Nq) + sizes.Nk - sizes.Nq)[:, None]
kv_idx = np.arange(sizes.Nk)[None, :]


def scores(seed: int = 0, scale: float = 4.0, dtype: Any = np.float64) -> NDArray[Any]:
    """Return scores that float32 holds too."""
    x = np.random.default_rng(seed).standard_normal((sizes.Nq, sizes.Nk), np.float32)
    return (np.float32(scale) * x).astype(dtype)


def assert_loops_agree(
    mod: Callable[..., Any], expected: Callable[[float, int, int, int, int], float]
) -> None:
    """Compare a modifier on arrays with a formula on Python's numbers, to a few roundings."""
    score = scores()
    for b in range(sizes.B):
        for h in range(sizes.H):
            got = np.broadcast_to(mod(score, b, h, q_idx, kv_idx), score.shape)
            want = [
                [expected(float(score[i, j]), b, h, int(q_idx[i, 0]), j) for j in range(sizes.Nk)]
                for i in range(sizes.Nq)
            ]
            # each formula is a sum of at most two terms below 1000, rounded at most 20 times
            np.testing.assert_allclose(got, want, rtol=0, atol=20 * 1000 * 2.0**-53)


@pytest.mark.parametrize("module", [mods, positions], ids=["mods", "positions"])
def test_examples(module: types.ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 12


# ---------------------------------------------------------------------------------------------
# Each modifier
# ---------------------------------------------------------------------------------------------


def test_softcap() -> None:
    assert_loops_agree(bind(mods.softcap, cap=3.0), lambda s, b, h, q, k: 3 * math.tanh(s / 3))
    far = np.array([-np.inf, -1e300, 0.0, 1e300, np.inf])
    assert mods.softcap(far, 0, 0, 0, 0, cap=7.0).tolist() == [-7, -7, 0, 7, 7]


def test_alibi() -> None:
    slopes = registry.fractions(np.random.default_rng(1), (sizes.B, sizes.H))
    assert_loops_agree(
        bind(mods.alibi, slopes=slopes),
        lambda s, b, h, q, k: s - float(slopes[b, h]) * abs(q - k),
    )


def papers_slopes(n: int) -> list[float]:
    """ALiBi's slopes as the paper puts them: a geometric sequence, or two interleaved."""
    if n & (n - 1) == 0:
        start = 2.0 ** (-8.0 / n)
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return papers_slopes(closest) + papers_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("n", [*range(1, 70), 96, 112, 128, 1000])
def test_alibi_slopes(n: int) -> None:
    slopes = mods.alibi_slopes(n)
    assert slopes.shape == (n,)
    assert slopes.dtype == np.float32
    # start**i gathers one rounding for each of i factors; then there is float32's own
    np.testing.assert_allclose(slopes, papers_slopes(n), rtol=2.0**-24 + 2 * n * 2.0**-53)


def test_alibi_slopes_by_hand() -> None:
    assert mods.alibi_slopes(0).shape == (0,)
    assert mods.alibi_slopes(0).dtype == np.float32
    assert mods.alibi_slopes(1).tolist() == [2.0**-8]
    assert mods.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert mods.alibi_slopes(np.int16(8)).tolist() == mods.alibi_slopes(8).tolist()  # type: ignore[arg-type]
    sixteen = mods.alibi_slopes(16)
    twelve = mods.alibi_slopes(12)
    assert twelve[:8].tolist() == mods.alibi_slopes(8).tolist()
    assert twelve[8:].tolist() == sixteen[[0, 2, 4, 6]].tolist()


@pytest.mark.parametrize("n", [8.0, "8", None, True, np.True_, np.ones(2, int), 1j])
def test_alibi_slopes_of_no_count(n: Any) -> None:
    with pytest.raises(TypeError, match="n_heads: expected a number of heads"):
        mods.alibi_slopes(n)


def test_alibi_slopes_of_a_negative_count() -> None:
    with pytest.raises(ValueError, match="n_heads: expected a number of heads, 0 or more, got -1"):
        mods.alibi_slopes(-1)


def test_relative_position_bias() -> None:
    table = registry.fractions(np.random.default_rng(2), (sizes.H, 11))

    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        return s + float(table[h, 5 + max(-5, min(5, k - q))])

    assert_loops_agree(bind(mods.relative_position_bias, table=table, reach=5), expected)


def t5_bucket(distance: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """T5's formula in float64; `distance` is the key's position minus the query's."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        n = abs(distance)
    else:
        n = max(-distance, 0)
    exact = buckets // 2
    if n < exact:
        return first + n
    steps = math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(exact + int(steps), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(32, 128), (64, 128), (32, 64), (16, 20), (9, 100), (6, 1000), (4, 2), (128, 1000)],
)
def test_t5_buckets(bidirectional: bool, buckets: int, max_distance: int) -> None:
    if bidirectional and max_distance <= buckets // 4:
        return
    if not bidirectional and max_distance <= buckets // 2:
        max_distance += buckets
    distance = np.arange(-1000, 1001)
    table = np.arange(float(buckets))[:, None] * [1.0, -1.0]
    mod = mods.t5_bias(table, bidirectional, max_distance)
    got = mod(0.0, 0, 0, 1000, distance + 1000)
    want = [t5_bucket(int(d), bidirectional, buckets, max_distance) for d in distance]
    assert got.tolist() == want
    assert mod(0.0, 0, 1, 1000, distance + 1000).tolist() == [-bucket for bucket in want]


def test_t5_buckets_by_hand() -> None:
    """Where the exact logarithm is an integer: 8 * 2**(k / 2) starts a bucket of its own."""
    mod = mods.t5_bias(np.arange(32.0)[:, None])
    before = mod(0.0, 0, 0, np.array([0, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 63, 64]), 0)
    assert before.tolist() == [0, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 13, 14]
    assert mod(0.0, 0, 0, np.array([90, 91, 127, 128, 1 << 40]), 0).tolist() == [14, 15, 15, 15, 15]
    assert mod(0.0, 0, 0, 0, np.array([1, 16, 91, 1 << 40])).tolist() == [17, 26, 31, 31]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
def test_t5_bias_keeps_the_tables_dtype(dtype: str) -> None:
    table = registry.fractions(np.random.default_rng(3), (32, 5), dtype)
    bound = binding.resolve("score_mod", mods.t5_bias(table), binding.SCORE_MOD)
    assert isinstance(bound, binding.Bound)
    assert bound.function is mods.relative_position_bias
    columns = dict(zip(bound.names, bound.values, strict=True))["table"]
    assert isinstance(columns, np.ndarray)
    assert columns.dtype == np.dtype(dtype).newbyteorder("=")
    buckets = [3, 16 + 5]  # of keys 3 before and 5 behind the query
    distance = [columns.shape[1] // 2 + d for d in (-3, 5)]
    assert columns[:, distance].T.tolist() == table[buckets].tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"table": np.zeros((32, 4), int)}, TypeError, "table: expected dtype float16, float32"),
        ({"table": np.zeros((32, 4), "c8")}, TypeError, "got complex64"),
        ({"table": np.zeros(32)}, ValueError, r"table: expected shape .*, got \(32,\)"),
        ({"table": np.zeros((3, 1))}, ValueError, "at least 4 buckets with bidirectional=True"),
        (
            {"table": np.zeros((1, 1)), "bidirectional": False},
            ValueError,
            "at least 2 buckets with bidirectional=False",
        ),
        ({"table": np.zeros((32, 4)), "max_distance": 8}, ValueError, "more than the 8 distances"),
        ({"table": np.zeros((32, 4)), "max_distance": 64.0}, TypeError, "max_distance: expected"),
    ],
)
def test_bad_t5_tables(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mods.t5_bias(**arguments)


def test_relative_position_bias_2d() -> None:
    """Rows of 5 tokens: against the coordinates of both."""
    table = registry.fractions(np.random.default_rng(4), (sizes.H, 13, 9))

    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        (y, x), (v, u) = divmod(q, 5), divmod(k, 5)
        return s + float(table[h, 6 + y - v, 4 + x - u])

    assert_loops_agree(bind(mods.relative_position_bias_2d, table=table), expected)


def test_kerple() -> None:
    r1, r2 = (registry.positive(np.random.default_rng(n), sizes.H) for n in (5, 6))
    assert_loops_agree(
        bind(mods.kerple_log, r1=r1, r2=r2),
        lambda s, b, h, q, k: s - float(r1[h]) * math.log(1 + float(r2[h]) * abs(q - k)),
    )
    assert_loops_agree(
        bind(mods.kerple_power, r1=r1, r2=r2),
        lambda s, b, h, q, k: s - float(r1[h]) * abs(q - k) ** float(r2[h]),
    )


def test_fire() -> None:
    rng = np.random.default_rng(7)
    w1, b1 = rng.standard_normal((2, 6))
    w2, b2 = rng.standard_normal((sizes.H, 6)), rng.standard_normal(sizes.H)

    def psi(x: float) -> float:
        return math.log(0.4 * x + 1)

    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        x = psi(abs(q - k)) / psi(max(13.5, q))
        hidden = [max(float(w) * x + float(c), 0.0) for w, c in zip(w1, b1, strict=True)]
        return (
            s + math.fsum(float(w) * y for w, y in zip(w2[h], hidden, strict=True)) + float(b2[h])
        )

    mod = bind(mods.fire, c=0.4, threshold=13.5, w1=w1, b1=b1, w2=w2, b2=b2)
    assert_loops_agree(mod, expected)


def test_untied_positions() -> None:
    p_q, p_k = np.random.default_rng(8).standard_normal((2, sizes.H, sizes.Nk, 4))

    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        return s + math.fsum(map(float, p_q[h, q] * p_k[h, k]))

    assert_loops_agree(bind(mods.untied_positions, p_q=p_q, p_k=p_k), expected)
    assert_loops_agree(bind(mods.untied_positions, p_q=p_q, p_k=4 * p_k, scale=0.25), expected)


def test_logit_scale() -> None:
    scale = registry.positive(np.random.default_rng(9), sizes.H)
    assert_loops_agree(
        bind(mods.logit_scale, scale=scale), lambda s, b, h, q, k: s * float(scale[h])
    )


def test_token_weights() -> None:
    """A token of size n is n equal ones."""
    log_weights = np.random.default_rng(10).standard_normal((sizes.B, sizes.Nk))
    assert_loops_agree(
        bind(mods.token_weights, log_weights=log_weights),
        lambda s, b, h, q, k: s + float(log_weights[b, k]),
    )
    weights = np.array([1, 3, 0, 2])
    with np.errstate(divide="ignore"):
        few = mods.token_weights(scores()[0, :4], 0, 0, 0, np.arange(4), np.log(weights)[None])
    many = np.repeat(scores()[0, :4], weights)
    np.testing.assert_allclose(np.exp(few).sum(), np.exp(many).sum(), rtol=1e-14)


def test_forget_gates() -> None:
    """The product of the gates after a key, up to the query; before the query its inverse."""
    gates = np.random.default_rng(11).uniform(0.5, 1.0, (sizes.B, sizes.H, sizes.Nk))

    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        between = gates[b, h, min(q, k) + 1 : max(q, k) + 1]
        return s + math.copysign(1.0, q - k) * math.log(math.prod(map(float, between)))

    mod = bind(mods.forget_gates, cumulative=np.cumsum(np.log(gates), axis=2))
    assert_loops_agree(mod, expected)


def test_soft_window() -> None:
    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        return s + math.log(1 / (1 + math.exp(-(6.5 - abs(q - k)) / 2)))

    assert_loops_agree(bind(mods.soft_window, width=6.5, softness=2.0), expected)


def test_adaptive_span() -> None:
    span = np.array([0.0, 3.0, 40.0], np.float32)

    def expected(s: float, b: int, h: int, q: int, k: int) -> float:
        weight = min(max((float(span[h]) + 4.0 - abs(q - k)) / 4.0, 0.0), 1.0)
        return s + math.log(weight) if weight else -math.inf

    assert_loops_agree(bind(mods.adaptive_span, span=span, ramp=4.0), expected)


def test_gaussian_window() -> None:
    assert_loops_agree(
        bind(mods.gaussian_window, sigma=5.0),
        lambda s, b, h, q, k: s - (q - k) ** 2 / (2 * 5.0**2),
    )


def test_distance_decay() -> None:
    assert_loops_agree(
        bind(mods.distance_decay, rate=1.5, length=3.0),
        lambda s, b, h, q, k: s + math.log((1 + abs(q - k) / 3.0) ** -1.5),
    )
    assert_loops_agree(
        bind(mods.distance_decay, rate=1), lambda s, b, h, q, k: s - math.log(1 + abs(q - k))
    )


def test_any_distance_is_safe() -> None:
    """No overflow, no warning, no NaN, however far and however near."""
    distance = np.array([0, 1, 50_000, 1 << 31, 1 << 40], np.int64)
    with np.errstate(all="raise", under="ignore"):
        for mod in (
            bind(mods.soft_window, width=64, softness=0.25),
            bind(mods.soft_window, width=1e9, softness=1e-3),
            bind(mods.gaussian_window, sigma=1e-3),
            bind(mods.distance_decay, rate=2.0, length=1e-3),
            bind(mods.alibi, slopes=np.ones((1, 1))),
            bind(mods.kerple_log, r1=np.ones(1), r2=np.ones(1)),
            bind(mods.kerple_power, r1=np.ones(1), r2=np.full(1, 2.0)),
        ):
            for q, k in ((distance, 0), (0, distance)):
                added = mod(0.0, 0, 0, q, k)
                assert np.isfinite(added).all()
                assert (np.diff(added) <= 0).all()
        span = bind(mods.adaptive_span, span=np.array([1.0]), ramp=1.0)
        assert span(0.0, 0, 0, distance, 0).tolist() == [0.0, 0.0, *[-np.inf] * 3]
    # exactly: the penalty of 2**40 positions is not lost in a square of integers
    assert float(mods.gaussian_window(0.0, 0, 0, 1 << 40, 0, sigma=1.0)) == -(2.0**79)


def test_modifiers_say_what_they_need() -> None:
    with pytest.raises(TypeError, match="expected cap to be bound"):
        binding.resolve("score_mod", mods.softcap, binding.SCORE_MOD)


# ---------------------------------------------------------------------------------------------
# compose
# ---------------------------------------------------------------------------------------------


def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
    return score + x


def double(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2 * score


def test_compose_applies_the_first_first() -> None:
    assert mods.compose(bind(add, x=1.0), double)(5.0, 0, 0, 0, 0) == 12.0
    assert mods.compose(double, bind(add, x=1.0))(5.0, 0, 0, 0, 0) == 11.0
    assert mods.compose(double)(5.0, 0, 0, 0, 0) == 10.0


def test_compose_passes_the_indices_on() -> None:
    seen = []

    def watch(score: Any, *indices: Any) -> Any:
        seen.append(indices)
        return score

    mods.compose(watch, double, watch)(5.0, 1, 2, 3, 4)
    assert seen == [(1, 2, 3, 4)] * 2


def test_compose_is_flat() -> None:
    inner = mods.compose(double, double)
    both = mods.compose(inner, bind(add, x=1.0), mods.compose(inner))
    assert both.operator == "compose"
    assert [type(part) for part in both.parts] == [
        *[types.FunctionType] * 2,
        bind,
        *[types.FunctionType] * 2,
    ]
    assert both(1.0, 0, 0, 0, 0) == 20.0
    tree = binding.resolve("score_mod", both, binding.SCORE_MOD)
    assert isinstance(tree, binding.Combination)
    assert all(isinstance(part, binding.Bound) for part in tree.parts)
    assert tree(1.0, 0, 0, 0, 0) == 20.0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ((), "at least one"),
        ((double, 3.0), "got float"),
        ((None,), "got NoneType"),
        ((np.zeros(3),), "got ndarray"),
        ((double, masks.causal), "<Mask causal>"),
        ((masks.causal & masks.causal,), "<Mask causal & causal>"),
    ],
)
def test_compose_refuses(wrong: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=f"compose: .*{text}"):
        mods.compose(*wrong)


# ---------------------------------------------------------------------------------------------
# The registry: what it says of itself
# ---------------------------------------------------------------------------------------------

MOST = 12.0  # bound of the scores here


def evaluate(mod: Callable[..., Any], score: NDArray[Any], b: int, h: int) -> NDArray[Any]:
    return np.broadcast_to(mod(score, b, h, q_idx, kv_idx), score.shape)


def in_dtype(mod: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Round what the functions in a modifier are bound to."""

    def one(tree: Any) -> Any:
        if isinstance(tree, binding.Combination):
            return binding.Combination(tree.operator, tuple(map(one, tree.parts)))
        values = [
            x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
            for x in tree.values
        ]
        return binding.Bound(tree.function, tree.order, tree.names, tuple(values))

    result: Callable[..., Any] = one(binding.resolve("score_mod", mod, binding.SCORE_MOD))
    return result


@pytest.mark.parametrize("name", MODS)
def test_registered_budgets_hold(name: str) -> None:
    """NumPy in float32 errs by no more than the budget, and an error of the score by as much."""
    entry = MODS[name]
    mod = entry.build(sizes, registry.generator(name))
    score = np.clip(scores(), -MOST, MOST)
    moved = np.clip(score + scores(1, 0.25), -MOST, MOST)
    budget32 = entry.budget(np.float32, MOST, sizes)
    budget64 = entry.budget(np.float64, MOST, sizes)
    hidden = False
    for b in range(sizes.B):
        for h in range(sizes.H):
            want = evaluate(mod, score, b, h)
            seen = want != -np.inf
            hidden |= not seen.all()
            assert np.abs(want[seen]).max() <= entry.magnitude(MOST, sizes.far)
            low = evaluate(in_dtype(mod, np.float32), score.astype(np.float32), b, h)
            assert (low[~seen] == -np.inf).all()
            assert np.abs(low[seen] - want[seen]).max() <= budget32
            # a quotient of differences is no larger than the derivative somewhere
            change = np.abs(evaluate(mod, moved, b, h)[seen] - want[seen])
            assert (change <= entry.lipschitz * np.abs(moved - score)[seen] + budget64).all()
    assert hidden == entry.hides


@pytest.mark.parametrize("seed", range(20))
def test_chained_budgets_hold(seed: int) -> None:
    names, entry = registry.random_mod(np.random.default_rng(seed))
    mod = entry.build(sizes, np.random.default_rng(seed))
    score = np.clip(scores(seed), -MOST, MOST)
    want = evaluate(mod, score, 1, 2)
    low = evaluate(in_dtype(mod, np.float32), score.astype(np.float32), 1, 2)
    seen = want != -np.inf
    assert len(names) == 3
    assert (seen == (low != -np.inf)).all()
    assert np.abs(want[seen]).max() <= entry.magnitude(MOST, sizes.far)
    assert np.abs(low[seen] - want[seen]).max() <= entry.budget(np.float32, MOST, sizes)


@pytest.mark.parametrize("name", [name for name in MODS if MODS[name].kinks])
def test_registered_kinks_are_where_the_derivative_jumps(name: str) -> None:
    mod = MODS[name].build(sizes, registry.generator(name))
    for kink in MODS[name].kinks:
        at, left, right = (
            evaluate(mod, np.full((sizes.Nq, sizes.Nk), x), 0, 0)
            for x in (kink, kink - 2.0**-10, kink + 2.0**-10)
        )
        assert (np.abs((right - at) - (at - left)) > 2.0**-12).all()


ALLOWED = {
    *("where", "exp", "exp2", "expm1", "log", "log1p", "tanh", "sqrt", "power", "sin", "cos"),
    *("abs", "sign", "floor", "clip", "minimum", "maximum", "logical_and", "logical_or"),
    *("logical_not", "isfinite", "float32", "inf", "shape"),
}
"""What lanes know of NumPy, and of an array."""

BUILT_IN = [
    *("softcap", "alibi", "relative_position_bias", "soft_window", "adaptive_span"),
    *("gaussian_window", "distance_decay", "relative_position_bias_2d", "kerple_log"),
    *("kerple_power", "fire", "untied_positions", "logit_scale", "token_weights", "forget_gates"),
]


def all_functions() -> list[types.FunctionType]:
    """Return the built-in functions and those of the registry."""
    found = [getattr(mods, name) for name in BUILT_IN]
    found += [dropout.philox, dropout._philox_round]
    found += [
        inspect.unwrap(x)
        for name, x in vars(masks).items()
        if isinstance(x, masks.Mask) and not name.startswith("_")
    ]
    made = [entry.build(sizes, registry.generator(name)) for name, entry in MODS.items()]
    made += [build(sizes, registry.generator(name)) for name, build in registry.MASKS.items()]

    def collect(mod: Any) -> None:
        if isinstance(mod, binding.Combination):
            for part in mod.parts:
                collect(part)
        elif isinstance(mod, functools.partial):
            collect(mod.func)
        elif mod not in found:
            found.append(mod)

    for mod in made:
        collect(mod)
    return found


@pytest.mark.parametrize("function", all_functions(), ids=lambda f: f.__name__)
def test_one_plain_function_each(function: types.FunctionType) -> None:
    """No branch, no loop but over a size, nothing that lanes do not know."""
    source = textwrap.dedent(inspect.getsource(function))
    if function.__name__ == "<lambda>":
        source = source[source.index("lambda ") : source.rindex(")")]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.If | ast.IfExp | ast.While | ast.BoolOp | ast.Not | ast.Try)
        if isinstance(node, ast.For):
            assert ast.unparse(node.iter) in ("range(len(w1))", "range(p_q.shape[2])")
        if isinstance(node, ast.Compare):
            assert len(node.ops) == 1
        if isinstance(node, ast.Attribute):
            assert isinstance(node.value, ast.Name)
            assert node.value.id == "np" or node.attr in ("Any", "shape")
            assert node.attr in ALLOWED


def test_there_are_functions_to_check() -> None:
    names = {f.__name__ for f in all_functions()}
    assert {"softcap", "philox", "causal", "streaming", "tanh_gate", "carpet"} <= names
    assert len(names) > 50
