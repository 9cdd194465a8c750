"""Users' functions: how they are bound, what is refused, and when two are the same."""

from __future__ import annotations

import doctest
import functools
import gc
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from nattn.functions import binding, mods
from nattn.functions.binding import (
    MASK_MOD,
    SCORE_MOD,
    Bound,
    Combination,
    digest,
    helpers,
    resolve,
)

bind: Any = functools.partial  # also of what it cannot bind


def test_examples() -> None:
    result = doctest.testmod(binding)
    assert result.failed == 0
    assert result.attempted > 0


def define(source: str, name: str = "f", **scope: Any) -> types.FunctionType:
    """Return a function of a module of its own, so that it can be written again."""
    scope = {"np": np, "__name__": "elsewhere"} | scope
    exec(source, scope)
    function = scope[name]
    assert isinstance(function, types.FunctionType)
    return function


Made: Any = Combination  # of anything


def leaf(function: Any, parameters: tuple[str, ...] = SCORE_MOD) -> Bound:
    bound = resolve("score_mod", function, parameters)
    assert isinstance(bound, Bound)
    return bound


# ---------------------------------------------------------------------------------------------
# Binding
# ---------------------------------------------------------------------------------------------


def plain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score, b, h, q_idx, kv_idx


def further(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any, y: Any = 7) -> Any:
    return score, b, h, q_idx, kv_idx, x, y


def leading(x: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, y: Any = 3) -> Any:
    return x, score, b, h, q_idx, kv_idx, y


def is_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


def test_a_plain_function() -> None:
    bound = leaf(plain)
    assert (bound.function, bound.order, bound.names, bound.values) == (
        plain,
        (0, 1, 2, 3, 4),
        (),
        (),
    )
    assert bound(1.0, 2, 3, 4, 5) == (1.0, 2, 3, 4, 5)


def first(x: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, y: Any) -> Any:
    return x, score, b, h, q_idx, kv_idx, y


def middle(score: Any, b: Any, x: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score, b, x, h, q_idx, kv_idx


def test_parameters_are_bound_as_python_binds_them() -> None:
    """`Bound` called with the call's arguments gives what the partial gives."""
    array = np.arange(3)
    for made, names in (
        (bind(further, x=1), ("x", "y")),
        (bind(further, x=array, y=2.5), ("x", "y")),
        (bind(bind(further, x=1), y=2), ("x", "y")),
        (bind(bind(further, x=1), x=2), ("x", "y")),  # the outer one wins
        (bind(first, 10, y=20), ("x", "y")),
        (bind(bind(first, 10), y=True), ("x", "y")),
        (bind(leading, 1), ("x", "y")),
        (bind(bind(leading, 1), y=2.5), ("x", "y")),
    ):
        bound = leaf(made)
        assert bound.names == names
        assert str(bound(1.0, 2, 3, 4, 5)) == str(made(1.0, 2, 3, 4, 5))


def test_the_order_of_parameters() -> None:
    bound = leaf(bind(first, 10, y=20))
    assert bound.order == (-1, 0, 1, 2, 3, 4, -2)
    assert bound.values == (10, 20)


def test_a_parameter_between_those_of_the_call_cannot_be_bound() -> None:
    """Python cannot call it so either: the call gives its arguments by position."""
    made = bind(middle, x=1)
    with pytest.raises(TypeError):
        made(1.0, 2, 3, 4, 5)
    with pytest.raises(TypeError, match=r"score_mod: .*multiple values for argument 'x'"):
        resolve("score_mod", made, SCORE_MOD)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (True, True),
        (np.True_, True),
        (3, 3),
        (np.int8(3), 3),
        (np.uint64(3), 3),
        (-(1 << 63), -(1 << 63)),
        ((1 << 63) - 1, (1 << 63) - 1),
        (2.5, 2.5),
        (np.float32(2.5), 2.5),
        (np.float64(2.5), 2.5),
        (np.float16(2.5), 2.5),
        (np.array(2.5, "f4"), 2.5),
        (np.array(3, ">i2"), 3),
        (np.array(True), True),
    ],
)
def test_numbers_become_pythons(value: Any, want: Any) -> None:
    [got] = leaf(bind(further, x=value, y=0)).values[:1]
    assert type(got) is type(want)
    assert got == want


@pytest.mark.parametrize("dtype", ["?", *"bhilqBHILQ", "e", "f", "d"])
@pytest.mark.parametrize("order", "<>")
def test_arrays_are_passed_on_in_native_order(dtype: str, order: str) -> None:
    value = np.arange(6).reshape(2, 3).astype(order + dtype)[:, ::-1]
    [got, _] = leaf(bind(further, x=value)).values
    assert type(got) is np.ndarray
    assert got.dtype.isnative
    assert got.dtype == value.dtype.newbyteorder("=")
    assert np.array_equal(got, value)
    assert np.shares_memory(got, value) == value.dtype.isnative  # not copied without need


def test_views_of_any_kind_are_arrays() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for value in (
        read_only,
        np.broadcast_to(np.float32(1), (3, 4)),
        np.zeros((0, 3)),
        np.zeros(3).view(type("Subclass", (np.ndarray,), {})),
        np.frombuffer(b"\0" * 9, np.uint8)[1:].view(np.float64),
    ):
        [got, _] = leaf(bind(further, x=value)).values
        assert type(got) is np.ndarray
        assert np.shares_memory(got, value) or not value.size


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class CallableObject:
    def __call__(self, *args: Any) -> Any:
        return args

    def method(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ["x of further", "None (NoneType)"]),
        ("text", ["'text' (str)"]),
        ([1, 2], ["[1, 2] (list)"]),
        (1j, ["1j (complex)"]),
        (np.complex64(1j), ["complex"]),
        (np.longdouble(1), ["longdouble"]),
        (1 << 63, ["number of 64 bits", "9223372036854775808 (int)"]),
        (-(1 << 63) - 1, ["-9223372036854775809 (int)"]),
        pytest.param(10**5000, ["got int"], id="many digits"),
        (Silent(), ["got Silent"]),
        (np.zeros(3, complex), ["shape (3,) and dtype complex128"]),
        (np.zeros(3, object), ["dtype object"]),
        (np.zeros(3, "g"), [f"dtype {np.dtype('g').name}"]),
        (np.zeros(3, "M8[s]"), ["dtype datetime64[s]"]),
        (np.zeros(3, [("a", "f4")]), ["array of shape (3,)"]),
        (np.zeros(3, "S3"), ["dtype |S3"]),
        (
            np.ma.masked_less(np.zeros(3), 1),
            [
                "got a masked array of shape (3,) and dtype float64: bind x.filled(",
                "two arrays",
            ],
        ),
        (np.ma.masked, ["got a masked array of shape ()"]),
        (np.tanh, ["tanh", "can only be called as a global"]),
        (plain, ["plain", "can only be called as a global"]),
        (float, ["float", "can only be called as a global"]),
    ],
)
def test_what_a_parameter_cannot_be_bound_to(value: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as error:
        resolve("score_mod", bind(further, x=value), SCORE_MOD)
    text = str(error.value)
    assert text.startswith("score_mod: expected x of further to be bound to a NumPy array of")
    for word in words:
        assert word in text


def unnamed(*args: Any) -> Any:
    return args[0]


def unnamed_too(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **more: Any) -> Any:
    return score


def by_name(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, cap: Any) -> Any:
    return score


def no_default(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any, y: Any) -> Any:
    return score


def odd_default(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any = None) -> Any:
    return score


@pytest.mark.parametrize(
    ("function", "words"),
    [
        # what is no function
        (None, ["expected a function score_mod(score, b, h, q_idx, kv_idx)", "None (NoneType)"]),
        (3.0, ["3.0 (float)"]),
        ("softcap", ["'softcap' (str)"]),
        (np.zeros((3, 4)), ["an array of shape (3, 4) and dtype float64"]),
        (np.tanh, ["<ufunc 'tanh'>"]),
        (max, ["<built-in function max>"]),
        (float, ["<class 'float'>"]),
        (CallableObject(), ["CallableObject"]),
        (CallableObject().method, ["bound method", "(method)"]),
        (bind(np.tanh, 3), ["functools.partial", "(partial)"]),
        pytest.param(10**5000, ["got int"], id="many digits"),
        (Silent(), ["got Silent"]),
        # the wrong parameters
        (lambda score: score, ["<lambda>(score)", "too many positional arguments"]),
        (lambda: 0, ["<lambda>()"]),
        (is_mask, ["is_mask(b", "too many positional arguments"]),
        (no_default, ["expected x and y to be bound", "partial(no_default, x=...)"]),
        (bind(no_default, x=1), ["expected y to be bound", "partial(no_default, y=...)"]),
        (bind(plain, zzz=1), ["further parameters bound", "unexpected keyword argument 'zzz'"]),
        (bind(plain, 1), ["plain(score", "too many positional arguments"]),
        (bind(plain, b=1), ["multiple values for argument 'b'"]),
        (odd_default, ["expected x of odd_default", "None"]),
        # parameters that cannot be compiled
        (unnamed, ["unnamed(*args", "of which *args cannot be compiled"]),
        (bind(unnamed_too, x=1), ["of which **more cannot be compiled"]),
        (by_name, ["expected cap to be bound", "partial(by_name, cap=...)"]),
    ],
)
def test_what_is_refused(function: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as error:
        resolve("score_mod", function, SCORE_MOD)
    text = str(error.value)
    assert text.startswith("score_mod: expected ")
    for word in words:
        assert word in text


def test_a_modifier_is_no_mask() -> None:
    with pytest.raises(TypeError, match="mask_mod: expected kv_idx to be bound"):
        resolve("mask_mod", plain, MASK_MOD)


def test_a_jitted_function_is_its_plain_one() -> None:
    jitted = numba.njit(further)
    bound = leaf(bind(jitted, x=2))
    assert bound.function is further
    assert bound.values == (2, 7)


# ---------------------------------------------------------------------------------------------
# Combinations
# ---------------------------------------------------------------------------------------------


def double(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2 * score


def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any, by: Any) -> Any:
    return kv_idx >= by


def test_combinations_are_resolved_to_their_leaves() -> None:
    tree = Combination(
        "and",
        (
            Combination("not", (bind(Combination("just", (shifted,)), by=4),)),
            Combination("or", (numba.njit(is_mask), Combination("just", (bind(shifted, by=2),)))),
        ),
    )
    resolved = resolve("mask_mod", tree, MASK_MOD)
    assert isinstance(resolved, Combination)
    inverse, either = resolved.parts
    assert isinstance(inverse, Combination)
    assert isinstance(either, Combination)
    assert [resolved.operator, inverse.operator, either.operator] == ["and", "not", "or"]
    leaves = [*inverse.parts, *either.parts]
    assert [getattr(x, "function", None) for x in leaves] == [shifted, is_mask, shifted]
    got = resolved(0, 0, 1, np.arange(6))
    assert got.tolist() == [True, True, True, True, False, False]


def test_compose_gives_each_the_score_of_the_one_before() -> None:
    both = Combination("compose", (double, bind(mods.softcap, cap=1.0), double))
    resolved = resolve("score_mod", both, SCORE_MOD)
    assert resolved(0.25, 0, 0, 0, 0) == 2 * np.tanh(0.5)


def test_what_is_resolved_stays_as_it_is() -> None:
    bound = leaf(bind(further, x=1))
    assert resolve("score_mod", bound, SCORE_MOD) is bound


@pytest.mark.parametrize(
    ("function", "parameters", "text"),
    [
        (bind(Made("compose", (double, further)), x=1), SCORE_MOD, "before functions are"),
        (bind(Made("and", (is_mask, shifted)), 4), MASK_MOD, "before functions are"),
        (Made("compose", (is_mask, is_mask)), MASK_MOD, "got composed modifiers"),
        (Made("and", (double, double)), SCORE_MOD, "got combined masks"),
        (Made("not", (double,)), SCORE_MOD, "got combined masks"),
        (Made("compose", (double, 3)), SCORE_MOD, r"got 3 \(int\)"),
        (Made("or", (is_mask, double)), MASK_MOD, "kv_idx to be bound"),
        (bind(leaf(double), 3), SCORE_MOD, "got functools.partial"),
    ],
)
def test_bad_combinations(function: Any, parameters: tuple[str, ...], text: str) -> None:
    with pytest.raises(TypeError, match=f"a_mod: expected .*{text}"):
        resolve("a_mod", function, parameters)


# ---------------------------------------------------------------------------------------------
# When two functions are the same
# ---------------------------------------------------------------------------------------------

BODY = "def f(score, b, h, q_idx, kv_idx, a=1):\n    return rate * score + 1.5\n"


def test_the_same_source_is_the_same_function() -> None:
    assert digest(define(BODY, rate=2.0)) == digest(define(BODY, rate=2.0))
    elsewhere = "\n\n# moved, and renamed\n" + BODY.replace("def f", "def g")
    assert digest(define(elsewhere, "g", rate=2.0)) == digest(define(BODY, rate=2.0))
    # what it is bound to is no part of it, nor are the values of its defaults
    assert digest(define(BODY.replace("a=1", "a=2"), rate=2.0)) == digest(define(BODY, rate=2.0))


@pytest.mark.parametrize(
    "changed",
    [
        BODY.replace("1.5", "1.25"),
        BODY.replace("1.5", "1"),
        BODY.replace("1.5", "-0.0").replace("+", "-"),
        BODY.replace("rate *", "rate /"),
        BODY.replace("score +", "kv_idx +"),
        BODY.replace("1.5", "np.tanh(score)"),
        BODY.replace("1.5", "np.exp(score)"),
        BODY.replace(", a=1", ", a=1, c=2"),
        BODY.replace("1.5", "(lambda x: x + 1)(score)"),
        BODY.replace("1.5", "(lambda x: x + 2)(score)"),
    ],
)
def test_a_changed_body_is_another_function(changed: str) -> None:
    seen = {digest(define(BODY, rate=2.0)), digest(define(changed, rate=2.0))}
    assert len(seen) == 2


def test_numbers_of_other_types_are_others() -> None:
    rates = [1, 1.0, True, np.float32(1), np.int32(1), 0.0, -0.0, float("nan"), None, "1", (1,)]
    assert len({digest(define(BODY, rate=rate)) for rate in rates}) == len(rates)


def test_a_captured_number_that_changes() -> None:
    f = define(BODY, rate=2.0)
    before = digest(f)
    f.__globals__["rate"] = 3.0
    assert digest(f) != before
    f.__globals__["rate"] = 2.0
    assert digest(f) == before


def make(rate: Any, power: Any = 2) -> Any:
    def f(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return rate * score**power

    return f


def test_closures() -> None:
    assert digest(make(2.0)) == digest(make(2.0))
    assert digest(make(2.0)) != digest(make(3.0))
    assert digest(make(2.0, 3)) != digest(make(3.0, 2))
    f = make(2.0)
    before = digest(f)
    f.__closure__[1].cell_contents = 5.0
    assert digest(f) != before


def test_a_helper_that_changes() -> None:
    source = "def f(score, b, h, q_idx, kv_idx): return helper(score)\n"
    helper = "def helper(x, a=1): return deeper(x) + a\n"
    deeper = "def deeper(x): return x * 2\n"
    f = define(source + helper + deeper)
    scope = f.__globals__
    hashes = [digest(f)]
    assert helpers(f) == [scope["helper"], scope["deeper"]]
    for changed in (
        deeper.replace("2", "3"),
        helper.replace("+", "-"),
        helper.replace("a=1", "a=2"),
        "def other(x): return x\ndef helper(x): return other(x)\n",
    ):
        exec(changed, scope)
        hashes.append(digest(f))
    assert len(set(hashes)) == 5
    assert helpers(f) == [scope["helper"], scope["other"]]
    same = define(source + helper + deeper)
    assert digest(same) == hashes[0]


def test_code_that_is_replaced_in_place() -> None:
    """As IPython's autoreload does, in the function itself and in what it calls."""
    source = (
        "def f(score, b, h, q_idx, kv_idx): return helper(score)\ndef helper(x, a=1): return x\n"
    )
    f = define(source)
    hashes = [digest(f)]
    helper = f.__globals__["helper"]
    helper.__code__ = define("def helper(x, a=1): return x + 1", "helper").__code__
    hashes.append(digest(f))
    helper.__defaults__ = (5,)
    hashes.append(digest(f))
    f.__code__ = define(source.replace("(score)", "(kv_idx)")).__code__
    hashes.append(digest(f))
    assert len(set(hashes)) == 4


def test_what_is_defined_later() -> None:
    """In a notebook a helper may be missing at first, or take a builtin's name."""
    f = define("def f(score, b, h, q_idx, kv_idx): return abs(later(score))\n")
    hashes = [digest(f)]
    for source in (
        "def later(x): return x\n",
        "def later(x): return 2 * x\n",
        "def abs(x): return x\n",
    ):
        exec(source, f.__globals__)
        hashes.append(digest(f))
    assert len(set(hashes)) == 4
    assert [g.__name__ for g in helpers(f)] == ["abs", "later"]


def test_functions_that_call_each_other() -> None:
    source = "def f(x): return g(x) + h(x)\ndef g(x): return f(x) * 2\ndef h(x): return g(x) + {}\n"
    one, two, other = (define(source.format(n)) for n in (1, 1, 2))
    assert digest(one) == digest(two) != digest(other)


def test_jitted_helpers() -> None:
    source = "def f(score, b, h, q_idx, kv_idx): return helper(score)\n"
    made = [
        define(source, helper=wrap(define(f"def helper(x): return x + {n}", "helper")))
        for n in (1, 2)
        for wrap in (numba.njit, lambda x: x)
    ]
    jitted, plain_one, jitted_other, _ = map(digest, made)
    assert jitted == plain_one
    assert jitted != jitted_other


def module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


def test_modules_count_by_what_is_used_of_them() -> None:
    source = "def f(score, b, h, q_idx, kv_idx): return tools.deep.helper(score) * tools.rate\n"

    def using(n: int, rate: float, unused: Any) -> types.FunctionType:
        helper = define(f"def helper(x): return x + {n}", "helper")
        return define(
            source, tools=module("tools", deep=module("deep", helper=helper), rate=rate, un=unused)
        )

    base = digest(using(1, 2.0, 0))
    assert base == digest(using(1, 2.0, np.zeros(3)))
    assert base != digest(using(2, 2.0, 0))
    assert base != digest(using(1, 3.0, 0))
    f = using(1, 2.0, 0)
    assert digest(f) == base
    f.__globals__["tools"].rate = 4.0
    assert digest(f) != base


ARRAY = np.arange(3)


def reads_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + ARRAY[h]


def calls_reader(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return reads_global(score, b, h, q_idx, kv_idx)


def in_a_lambda(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (lambda n: ARRAY[n])(h)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (reads_global, r"functools.partial\(reads_global, ARRAY=ARRAY\), got reads_global, which"),
        (calls_reader, r"partial\(reads_global, ARRAY=ARRAY\)"),
        (in_a_lambda, r"partial\(in_a_lambda, ARRAY=ARRAY\)"),
        (make(np.zeros(2, "c8")), r"expected rate of f to be bound to .* dtype complex64"),
        (make(np.ma.zeros(2)), r"expected rate of f to be bound to .* bind rate.filled\(x\)"),
        (make([1, 2]), r"numbers and functions to be all that f captures, got rate, \[1, 2\]"),
        (make({"a": 1}), "got rate, .* bind arrays and numbers with functools.partial"),
        (make((np.zeros(2),)), "got rate, "),
        (make(Silent()), "got rate, Silent"),
        (
            define(
                "def f(score, b, h, q_idx, kv_idx): return g(score)\ndef g(x, a=A): return x\n",
                A=np.zeros(3),
            ),
            "expected numbers as defaults of g, which f calls",
        ),
    ],
)
def test_what_may_not_be_captured(function: Any, text: str) -> None:
    for _ in range(2):  # not remembered as if it had passed
        with pytest.raises(TypeError, match=f"score_mod: .*{text}"):
            resolve("score_mod", function, SCORE_MOD)


def test_what_replaces_a_number_is_looked_at() -> None:
    f = define(BODY, rate=2.0)
    resolve("score_mod", f, SCORE_MOD)
    f.__globals__["rate"] = np.zeros(3)
    with pytest.raises(TypeError, match="which reads the global rate"):
        resolve("score_mod", f, SCORE_MOD)


def test_functions_are_not_kept_alive() -> None:
    """Closures made in a loop, and what a notebook's cell defined before it ran again."""
    closure = make(2.0)
    defined = define(BODY, rate=2.0)
    scope = defined.__globals__
    gone = []
    for f in (closure, defined):
        resolve("score_mod", f, SCORE_MOD)
        gone.append(weakref.ref(f))
    del closure, defined, f
    exec(BODY, scope)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


HASHES = """
import functools, sys
sys.path.insert(0, {tests!r})
import numpy as np
import registry
from nattn.functions import binding, dropout

def leaves(tree):
    if isinstance(tree, binding.Bound):
        return [binding.digest(tree.function)]
    return [x for part in tree.parts for x in leaves(part)]

sizes = registry.Sizes(2, 3, 8, 8)
for name, mod in registry.MODS.items():
    made = mod.build(sizes, registry.generator(name))
    print(name, *leaves(binding.resolve(name, made, binding.SCORE_MOD)))
print(binding.digest(dropout.philox), [f.__name__ for f in binding.helpers(dropout.philox)])
"""


def test_hashes_are_the_same_in_every_process() -> None:
    """Else nothing that was compiled would be found again."""
    tests = __file__.rpartition("/")[0] or "."

    def run(seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", HASHES.format(tests=tests)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    first_run, second_run = run("1"), run("2")
    assert len(first_run.splitlines()) > 40
    assert first_run == second_run
    assert "['_philox_round']" in first_run


def test_built_ins_are_different_functions() -> None:
    built_in: list[Callable[..., Any]] = [
        mods.softcap,
        mods.alibi,
        mods.relative_position_bias,
        mods.soft_window,
        mods.adaptive_span,
        mods.gaussian_window,
        mods.distance_decay,
        mods.relative_position_bias_2d,
        mods.kerple_log,
        mods.kerple_power,
        mods.fire,
        mods.untied_positions,
        mods.logit_scale,
        mods.token_weights,
        mods.forget_gates,
    ]
    assert len({digest(f) for f in built_in if isinstance(f, types.FunctionType)}) == len(built_in)
