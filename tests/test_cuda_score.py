"""What kernels do to scores on a GPU: it compiles, and its plain Python twin does it right.

No GPU is needed, and nothing here runs on one. The definitions that the CPU runs on SIMD lanes
compile to PTX on lanes of width 1; what that code computes the shared suite tells where there is a
GPU. The twins, which the simulator runs, are compared with the reference pair by pair.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import registry
from numpy.typing import NDArray

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numba import types
from numba.core import config
from numba.core.errors import NumbaError

import nattn
from nattn.backends import reference
from nattn.backends.cpu import score as cpu_score
from nattn.backends.cuda import compiled_functions, diagnosis, operands, score, specialization
from nattn.backends.cuda.target import SIMULATED, Kernel, device, store, write_int64
from nattn.call.problem import Problem
from nattn.functions import binding, masks, mods
from nattn.functions.binding import MASK_MOD, SCORE_MOD
from nattn.functions.on_lanes import UserCode
from nattn.vectors import dual
from nattn.vectors.lanes import Lanes, Tile
from nattn.vectors.lanes.operators import BINARY, COMPARISON, TERNARY, UNARY

if SIMULATED:
    pytest.skip("the simulator has no compiler", allow_module_level=True)

Array = NDArray[Any]

dtype_of_each_kind = pytest.mark.parametrize("dtype", ["float32", "float64"])

PLAIN = specialization.Functions("float32", "int32", (), None, False, None, False, False, False)
SIZES = registry.Sizes(B=2, H=2, Nq=8, Nk=8)
CC = (8, 0)


def assert_exact(ptx: str) -> None:
    """Assert that nothing lies in memory of a thread, and nothing is approximated or called."""
    assert ".local" not in ptx
    assert not re.findall(r"\b(?:div|sqrt|rcp|rsqrt|sin|cos|ex2|lg2|tanh)\.(?:approx|full)\S*", ptx)
    assert not re.findall(r"\bcall\b", ptx)


# Everything in the tables of lanes, and every rule of dual numbers

Args = namedtuple("Args", ("out", "x", "y", "i", "j"))


def joined(parts: list[Any]) -> Any:
    """Return a device function that calls several, each with the same arguments."""
    if len(parts) == 1:
        return parts[0]
    step = -(-len(parts) // 4)
    groups = [joined(parts[n : n + step]) for n in range(0, len(parts), step)]
    f, g, h, k = groups + [device(lambda a, x, y: None)] * (4 - len(groups))

    def several(a, x, y):  # type: ignore[no-untyped-def]
        f(a, x, y)
        g(a, x, y)
        h(a, x, y)
        k(a, x, y)

    return device(several)


def compiled(tile: Tile, start: Callable[..., Any], parts: list[Any]) -> str:
    """Compile a kernel that calls device functions with ``start(a)``, two arguments."""
    first, call = device(start), joined(parts)

    def kernel(a):  # type: ignore[no-untyped-def]
        x, y = first(a)
        call(a, x, y)

    return Kernel(kernel, 32).ptx(Args(0, 0, 0, 0, 0), CC)


def application(function: Any, arity: int, write: Callable[..., Any]) -> Any:
    """Return a device function that calls a function with x and y, and writes what it returns."""
    if function is np.where:
        return device(lambda a, x, y: write(a, np.where(x < y, x, y)))
    if arity == 1:
        return device(lambda a, x, y: write(a, function(x)))
    if arity == 2:
        return device(lambda a, x, y: write(a, function(x, y)))
    return device(lambda a, x, y: write(a, function(x, y, x + 1)))


def writers(tile: Tile, convert: Any, parts: Any) -> Any:
    """Yield functions ``write(a, r)``, each of which writes to a place of its own."""
    store_one, number = store(tile.dtype), compiled_functions.intrinsics("int32").number
    for n in itertools.count():

        def write(a, r, n=n):  # type: ignore[no-untyped-def]
            value, slope = parts(tile, convert(tile, r))
            store_one(a.out + 16 * n, number(value))
            store_one(a.out + 16 * n + 8, number(slope))

        yield device(write)


@dtype_of_each_kind
def test_every_function_compiles_with_its_derivative(dtype: str) -> None:
    """Those that take floats and give floats."""
    known = [(function, arity) for function, arity, real in dual.functions() if real]
    assert {dual.rule_name(function) for function, _ in known} == set(dual.RULES)
    t, tile, real = compiled_functions.intrinsics("int32"), Tile(dtype, 1, 1, 1), getattr(np, dtype)
    seed, splat, as_dual, value_of, chain = t.seed, t.splat, t.as_dual, t.value, t.chain

    def start(a):  # type: ignore[no-untyped-def]
        return seed(splat(tile, real(a.x))), seed(splat(tile, real(a.y)))

    parts = device(lambda tile, r: (value_of(tile, r), chain(tile, splat(tile, 2), r)))
    write = writers(tile, as_dual, parts)
    applied = [application(function, arity, next(write)) for function, arity in known]
    ptx = compiled(tile, start, applied)
    assert ".local" not in ptx
    assert not re.findall(r"\bcall\b", ptx)
    assert len(re.findall(r"\bst\.global", ptx)) >= 2 * len(known)


def others() -> Iterator[tuple[Any, int, str]]:
    """Yield what the tables of lanes hold beside: functions that give integers or booleans."""
    tables = (UNARY, 1), (BINARY, 2), (COMPARISON, 2), (TERNARY, 3)
    for table, arity in tables:
        for function, operation in table.items():
            for kind in ("float32", "int64"):
                given = Lanes(getattr(types, kind), 1, types.float32)
                found = operation.types((given,) * arity)
                if found is not None and not isinstance(found[1].dtype, types.Float):
                    yield function, arity, kind
    yield np.where, 3, "int64"


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_functions_of_other_results_compile(kind: str) -> None:
    known = [(function, arity) for function, arity, k in others() if k == kind]
    assert len(known) >= 12
    t, tile = compiled_functions.intrinsics("int64"), Tile("float32", 1, 1, 1)
    splat, index, as_score = t.splat, t.index, t.as_score

    def start(a):  # type: ignore[no-untyped-def]
        if kind == "int64":
            return index(tile, a.i), index(tile, a.j)
        return splat(tile, np.float32(a.x)), splat(tile, np.float32(a.y))

    parts = device(lambda tile, r: (r, r))
    write = writers(tile, device(lambda tile, r: as_score(tile, np.where(r, r + 1, 5))), parts)
    applied = [application(function, arity, next(write)) for function, arity in known]
    ptx = compiled(tile, start, applied)
    assert_exact(ptx)
    assert len(re.findall(r"\bst\.global", ptx)) >= 2 * len(known)


# Modifiers and masks


def built_in(module: ModuleType, first: str) -> set[str]:
    """Return the names of the modifiers or masks that a module offers."""
    return {
        name
        for name, f in vars(module).items()
        if getattr(f, "__module__", "").startswith("nattn.")
        and callable(f)
        and next(iter(inspect.signature(getattr(f, "parts", [f])[0]).parameters), "") == first
    }


USERS = ("singles", "with_helper", "in_other_order", "per_item", "flagged")


def sources(names: list[str]) -> tuple[UserCode, ...]:
    trees = (registry.MODS[name].build(SIZES, registry.generator(name)) for name in names)
    return tuple(UserCode.of(binding.resolve("score_mod", tree, SCORE_MOD)) for tree in trees)


@pytest.mark.parametrize(
    ("dtype", "derive"), [("float32", False), ("float32", True), ("float64", True)]
)
def test_every_modifier_compiles(dtype: str, derive: bool) -> None:
    known = built_in(mods, "score")
    assert {"softcap", "alibi", "relative_position_bias", "distance_decay"} <= known
    assert known <= set(registry.MODS)
    names = [n for n in registry.MODS if n.split(",")[0] in known | {"t5_bias", "compose"}]
    every = sources([*names, *USERS])
    all_of_them = replace(PLAIN, dtype=dtype, score_mods=every, derive=derive)
    ptx = diagnosis.compile_alone(all_of_them, CC)
    assert_exact(ptx)
    bound = sum(isinstance(x, np.ndarray) for s in all_of_them.codes for x in values(s.tree))
    noted = len(re.findall(r"\bst\.global\.u64", ptx))
    assert 0 < noted <= bound  # a place for each modifier that indexes something


def values(tree: binding.Tree) -> list[Any]:
    """Return what the functions of a tree are bound to."""
    if isinstance(tree, binding.Bound):
        return list(tree.values)
    return [x for part in tree.parts for x in values(part)]  # type: ignore[arg-type]


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_every_mask_compiles(index: str) -> None:
    known = built_in(masks, "b")
    assert {"causal", "document", "streaming", "local_plus_global"} <= known
    assert known <= set(registry.MASKS)
    every = (masks.mask(m(SIZES, registry.generator(n))) for n, m in registry.MASKS.items())
    tree = binding.resolve("mask_mod", functools.reduce(lambda f, g: f & g, every), MASK_MOD)
    ptx = diagnosis.compile_alone(replace(PLAIN, index=index, mask_mod=UserCode.of(tree)), CC)
    assert_exact(ptx)


@dtype_of_each_kind
@pytest.mark.parametrize("bias", ["float16", "bfloat16", "float32", "float64"])
def test_mask_and_bias_compile(dtype: str, bias: str) -> None:
    ptx = diagnosis.compile_alone(replace(PLAIN, dtype=dtype, mask=True, bias=bias), CC)
    assert_exact(ptx)
    size = {"float16": "16", "bfloat16": "16", "float32": "32", "float64": "64"}[bias]
    assert re.search(rf"ld\.global\.nc\.[ufb]{size}", ptx)
    assert re.search(r"ld\.global\.nc\.u8", ptx)


def test_dropout_and_block_kinds_compile() -> None:
    steps, write = score.steps(PLAIN), write_int64
    words4, kind = steps.words4, score.kind

    def kernel(a):  # type: ignore[no-untyped-def]
        w0, w1, w2, w3 = words4(a, a.mask_b, a.mask_h, a.mask_i, a.mask_j)
        write(a.error_flags_ptr, w0 + kind(a, a.mask_b, a.mask_h, a.mask_i, a.mask_j))
        write(a.error_flags_ptr + 8, w1)
        write(a.error_flags_ptr + 16, w2)
        write(a.error_flags_ptr + 24, w3)

    ptx = Kernel(kernel, 32).ptx(diagnosis.ARGS(*(0,) * len(operands.FIELDS)), CC)
    assert ".local" not in ptx
    assert len(re.findall(r"\bst\.global\.u64", ptx)) == 4


# Errors


def branching(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    doubled = 2 * score
    if q_idx > kv_idx:
        return doubled
    return score


def unknown(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.arctan(score)


def of_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return table[score]


def a_number(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


@pytest.mark.parametrize(
    ("name", "function", "derive"),
    [
        ("score_mod", branching, False),
        ("score_mod", branching, True),
        ("score_mod", unknown, False),
        ("score_mod", functools.partial(of_score, table=np.zeros(3)), True),
        ("mask_mod", a_number, False),
    ],
    ids=["branching", "branching, derived", "unknown", "an index of floats", "no condition"],
)
def test_errors_are_those_of_the_cpu(name: str, function: Any, derive: bool) -> None:
    q = np.zeros((1, 1, 4, 8), np.float32)
    problem = Problem.build(q, q, q, softcap=5.0, **{name: function})
    wanted = specialization.functions_of(problem, derive)
    with pytest.raises(NumbaError) as raised:
        diagnosis.compile_alone(wanted)
    error = diagnosis.explained(wanted, raised.value)
    tree = wanted.codes[-1].tree
    with pytest.raises(TypeError) as on_cpu:
        cpu_score.user_function(name, tree, Tile("float32", 8, 1, 1), 9, False, derive)
    assert type(error) is TypeError
    assert str(error) == str(on_cpu.value)


def test_other_errors_stay_what_they_are() -> None:
    error = NumbaError("something else")
    wanted = replace(PLAIN, score_mods=sources(["softcap"]))
    assert diagnosis.explained(wanted, error) is error


# What a kernel is compiled for


def test_functions_are_equal_if_their_code_is() -> None:
    def shifted(by: float) -> Callable[..., Any]:
        return lambda score, b, h, q_idx, kv_idx, table: score + table[h] + by

    def of(by: float, table: Array, q_offset: int = 0, **options: Any) -> specialization.Functions:
        q = np.zeros((1, 2, 4, 8), np.float32)
        mod = functools.partial(shifted(by), table=table)
        problem = Problem.build(q, q, q, score_mod=mod, q_offset=q_offset, **options)
        return specialization.functions_of(problem)

    first = of(1.0, np.zeros(2))
    assert first == of(1.0, np.ones(7))
    assert hash(first) == hash(of(1.0, np.ones(7)))
    bias = np.zeros((4, 4))
    assert first == of(2.0, np.zeros(2))  # what is captured is bound
    others = [of(1.0, np.zeros(2, np.float32)), of(1.0, np.zeros(2), 1 << 40)]
    others += [of(1.0, np.zeros(2), **options) for options in ({"bias": bias}, {"softcap": 1.0})]
    others += [of(1.0, np.zeros(2), mask=bias == 0), of(1.0, np.zeros(2), dropout_p=0.5, seed=1)]
    others += [of(1.0, np.zeros(2), mask_mod=masks.causal)]
    assert len({first, *others}) == 1 + len(others)
    assert [f.index for f in others[:2]] == ["int32", "int64"]
    assert others[3].names == ("score_mod", "score_mod")
    assert others[-1].names == ("score_mod", "mask_mod")


def test_a_gpu_cannot_read_what_is_not_aligned() -> None:
    q = np.zeros((1, 1, 4, 8), np.float32)
    mod = functools.partial(mods.relative_position_bias, table=np.zeros((1, 3)), reach=1)
    problem = Problem.build(q, q, q, score_mod=mod)
    words = operands.bound_words(problem, lambda x: (1 << 40, x.strides))
    assert words == [1 << 40, 1, 3, 24, 8, 1]
    for place in ((1 << 40) + 4, (24, 8)), (1 << 40, (24, 4)):
        with pytest.raises(NotImplementedError, match="multiples of their 8 bytes"):
            operands.bound_words(problem, lambda x, place=place: place)  # type: ignore[misc]


# The twins of the simulator against the reference


@functools.cache
def simulated() -> Any:
    """Load nattn.backends.cuda once more, under another name, as it is in the simulator."""
    folder = inspect.getfile(score).removesuffix("score.py")
    spec = importlib.util.spec_from_file_location(
        "nattn.backends.simulated_cuda", folder + "__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    with (
        mock.patch.object(config, "ENABLE_CUDASIM", 1),
        mock.patch.dict("sys.modules", {"nattn.backends.simulated_cuda": package}),
    ):
        for name in ("memory", "operands", "score", "specialization", "target"):
            importlib.import_module(f"nattn.backends.simulated_cuda.{name}")
    assert package.target.SIMULATED
    return package


class Launch:
    """A problem, and what a kernel would get for it in the simulator."""

    def __init__(self, dtype: str = "float32", **options: Any) -> None:
        twins = simulated()
        rng = np.random.default_rng(0)
        shapes = (2, 2, 5, 4), (2, 1, 7, 4)
        self.q, self.k = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        self.p = Problem.build(self.q, self.k, self.k, **options)
        self.functions = twins.specialization.functions_of(self.p, True)
        self.steps = twins.score.steps(self.functions)
        self.memory = memory = twins.memory.DeviceMemory()
        self.error_flags = memory.zeros((max(len(self.functions.names), 1),), np.int64)
        record: Any = namedtuple("Args", twins.operands.FIELDS)  # type: ignore[misc]
        self.a: Any = record(*twins.operands.arguments(self.p, memory, self.error_flags.ptr))

    def pairs(self) -> Any:
        """Yield (b, h, i, pos, key) of all pairs that causal, window and lengths leave."""
        p = self.p
        for b, h, i in np.ndindex(p.B, p.Hq, p.Nq):
            lo, hi = (int(x[0]) for x in p.visible_range(b, np.array([i])))
            for key in range(lo, hi):
                yield b, h, i, i + int(p.q_offset[b]), key


def bias_of_numbers() -> Array:
    bias = np.random.default_rng(1).standard_normal((2, 1, 5, 7))
    bias[0, 0, 1, 2] = -np.inf
    bias[1, 0, 4, 1] = 1e300  # more than float32 holds
    return bias


def without(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + len(table) + 0.5


TWINS: dict[str, dict[str, Any]] = {
    "plain": {"causal": True, "window_size": (3, None)},
    "softcap, ALiBi": {"softcap": 2.0, "alibi_slopes": np.array([0.5, 0.25])},
    "mask, bias": {
        "mask": np.random.default_rng(2).random((2, 1, 1, 7)) < 0.7,
        "bias": bias_of_numbers(),
    },
    "bias in float16": {"bias": np.arange(7, dtype=np.float16)},
    "arrays": {
        "score_mod": functools.partial(
            mods.relative_position_bias, table=np.arange(10.0).reshape(5, 2).T, reach=2
        ),
        "mask_mod": masks.mask(masks.causal)
        & functools.partial(masks.document, doc=np.arange(7) // 3),
    },
    "an empty array": {"score_mod": functools.partial(without, table=np.zeros(0))},
    "numbers": {"score_mod": functools.partial(registry.in_other_order, first=3, second=0.5)},
    "hidden": {"score_mod": registry.holes, "alibi_slopes": np.ones(2), "kv_lens": [7, 6]},
    "bends": {"score_mod": registry.minmax, "softcap": 3.0},
}


@dtype_of_each_kind
@pytest.mark.parametrize("name", TWINS)
def test_twins_do_what_the_reference_does(dtype: str, name: str) -> None:
    launch = Launch(dtype, **TWINS[name])
    p, a, number = launch.p, launch.a, getattr(np, dtype)
    eps = float(np.finfo(dtype).eps)
    with np.errstate(all="ignore"):
        known = {(b, h): reference._scores(p, b, h, derive=True) for b, h in np.ndindex(p.B, p.Hq)}
    found = 0
    for b, h, i, pos, key in launch.pairs():
        raw = number(p.scale * (p.q[b, h, i].astype(float) @ p.k[b, 0, key].astype(float)))
        s = launch.steps.change(a, b, h, i, pos, key, raw)
        t, slope = launch.steps.change_and_derive(a, b, h, i, pos, key, raw)
        assert type(s) is type(t) is type(slope) is number
        assert s == t
        expected, visible, slopes = known[b, h]
        if not visible[i, key]:
            assert s == -math.inf
            continue
        if np.isinf(number(expected[i, key])):
            assert s == math.inf
            continue
        # Some ten roundings, of numbers that are no larger than 16.
        assert abs(float(s) - expected[i, key]) <= 160 * eps
        assert abs(float(slope) - np.broadcast_to(slopes, expected.shape)[i, key]) <= 160 * eps
        found += 1
    assert found >= 40
    assert not launch.error_flags.to_host().any()


def test_the_words_of_dropout_are_those_of_keep() -> None:
    launch = Launch(dropout_p=0.3, seed=(7 << 40) + 5)
    for b, h, i in np.ndindex(2, 2, 5):
        words = [w for four in (0, 1) for w in launch.steps.words4(launch.a, b, h, i, four)]
        kept = [word >= launch.a.threshold for word in words]
        assert kept == mods.keep(b, h, i, np.arange(8), launch.p.seed, 0.3).tolist()


def test_the_kinds_of_blocks() -> None:
    block_mask = nattn.BlockMask.from_mask_mod(masks.causal, 2, 1, 5, 7, block_size=2)
    launch = Launch(block_mask=block_mask)
    for b, h, i, pos, key in launch.pairs():
        kind = simulated().score.kind(launch.a, b, h, i, key)
        assert kind == block_mask.kinds[b, 0, i // 2, key // 2]
        s = np.float32(1.5)
        changed = launch.steps.change(launch.a, b, h, i, pos, key, s)
        if kind == masks.FULL:
            full = launch.steps.change_full(launch.a, b, h, i, pos, key, s)
            assert changed == full == s
        elif kind == masks.EMPTY:
            assert changed == -math.inf


def gathered(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[kv_idx]


def test_indices_out_of_range_are_noted() -> None:
    seen = np.arange(7) < 6
    launch = Launch(
        softcap=5.0,
        score_mod=functools.partial(gathered, table=np.zeros(6)),
        mask_mod=functools.partial(masks.document, doc=np.zeros(7, int)),
        mask=seen,
    )
    for b, h, i, pos, key in launch.pairs():
        launch.steps.change(launch.a, b, h, i, pos, key, np.float32(0))
    assert launch.error_flags.to_host().tolist() == [0, 0, 0]  # the mask hides the key
    launch = Launch(softcap=5.0, score_mod=functools.partial(gathered, table=np.zeros(6)))
    value = launch.steps.change(launch.a, 0, 0, 0, 0, 5, np.float32(1))
    assert math.isfinite(value)
    assert launch.error_flags.to_host().tolist() == [0, 0]
    value = launch.steps.change(launch.a, 0, 0, 0, 0, 6, np.float32(1))
    assert math.isfinite(value)
    error_flags = launch.error_flags.to_host()
    assert error_flags.tolist() == [0, 1]
    with pytest.raises(IndexError, match="score_mod: expected indices within the arrays"):
        operands.raise_for_flags(launch.functions, error_flags)
    operands.raise_for_flags(launch.functions, np.zeros(2, np.int64))


def test_a_function_that_arrays_cannot_express_is_refused_before_the_kernel() -> None:
    with pytest.raises(TypeError, match=r"score_mod: expected no Python if.*in branching"):
        Launch(score_mod=branching)
