"""What closures capture is bound: the same bits as with partial, one compilation, gradients."""

from __future__ import annotations

import doctest
import functools
import gc
import math
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nattn
from nattn.functions import captures
from nattn.functions.binding import SCORE_MOD, Bound, digest, resolve
from nattn.functions.captures import lifted
from nattn.vectors.lanes import Tile

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 3, n, 8), dtype=np.float32) for n in (40, 70, 70))
TILE = Tile("float32", 8, 1, 1)

partial: Any = functools.partial  # also of what it cannot bind
attention: Any = nattn.attention
attention_vjp: Any = nattn.attention_vjp


def test_examples() -> None:
    result = doctest.testmod(captures)
    assert result.failed == 0
    assert result.attempted > 0


def leaf(function: Any, parameters: tuple[str, ...] = SCORE_MOD) -> Bound:
    bound = resolve("score_mod", function, parameters)
    assert isinstance(bound, Bound)
    return bound


def amplifier(gain: Any) -> Any:
    def amplified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * gain + 0.1 * kv_idx

    return amplified


def amplified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, gain: Any) -> Any:
    return score * gain + 0.1 * kv_idx


def biased(table: Any) -> Any:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h] * kv_idx

    return mod


def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[h] * kv_idx


def equal_documents(doc: Any) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return doc[q_idx] == doc[kv_idx]

    return mask_mod


def near(width: Any) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return abs(q_idx - kv_idx) <= width

    return mask_mod


def agree(closure: Any, bound: Any) -> None:
    """Check that a closure gives what `partial` gives, and the reference does."""
    got = attention(Q, K, V, score_mod=closure)
    np.testing.assert_array_equal(got, attention(Q, K, V, score_mod=bound))
    want = attention(Q, K, V, score_mod=closure, backend="reference")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# What is captured


@pytest.mark.parametrize(
    "value",
    [3, 0.5, np.float32(0.5), np.float16(0.5), np.int8(-3), np.array(0.5), np.array(2), -(1 << 62)],
    ids=repr,
)
def test_numbers(value: Any) -> None:
    bound, given = leaf(amplifier(value)), leaf(partial(amplified, gain=value))
    assert (bound.names, bound.values, bound.dtypes) == (given.names, given.values, given.dtypes)
    assert bound.names == ("gain",)
    assert bound.order == (0, 1, 2, 3, 4, -1)
    if abs(value) < 100:
        agree(amplifier(value), partial(amplified, gain=value))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i1", "i8", "u2", "?"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_arrays(dtype: str, backend: str) -> None:
    table = np.array([0, 1, 2], dtype)[::-1]
    agree(biased(table), partial(bias, table=table))
    got = attention(Q, K, V, score_mod=biased(table), backend=backend)
    plain = attention(Q, K, V, backend=backend)
    np.testing.assert_array_equal(got[:, 2], plain[:, 2])  # where the table is 0
    assert np.abs(got[:, 0] - plain[:, 0]).max() > 1e-3


def test_keyword_only_parameters() -> None:
    def by_name(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, gain: Any = 2.0) -> Any:
        return score * gain + 0.1 * kv_idx

    mod: Any = by_name
    agree(mod, partial(amplified, gain=2.0))
    agree(partial(mod, gain=0.5), partial(amplified, gain=0.5))
    mod.__kwdefaults__["gain"] = 3.0
    agree(mod, partial(amplified, gain=3.0))
    mod.__kwdefaults__ = {"gain": 4.0}
    agree(mod, partial(amplified, gain=4.0))


def test_both_at_once() -> None:
    def make(table: Any, first: Any) -> Any:
        def mod(
            first_: Any, score: Any, b: Any, h: Any, q: Any, k: Any, n: Any = 2, *, x: Any
        ) -> Any:
            return score * x + table[h] * n * first_ + first

        return partial(mod, 3.0, x=0.5)

    bound = leaf(make(np.ones(3), 7))
    assert bound.names == ("first_", "n", "x", "first", "table")
    assert bound(1.0, 0, 2, 0, 0) == 0.5 + 2 * 3.0 + 7


def test_truths_are_constants_of_the_code() -> None:
    """So an `if` may choose between what no vector can hold both."""

    def make(indices: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            x = kv_idx if indices else 0.5 * score
            return score + x

        return mod

    def either(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, n: Any, x: Any) -> Any:
        return score + (n * kv_idx + x * score)

    assert leaf(make(True)).values == ()
    assert leaf(make(np.True_)).values == ()
    for indices in (True, False):
        got = attention(Q, K, V, score_mod=make(indices))
        bound = partial(either, n=int(indices), x=0.5 * (not indices))
        np.testing.assert_allclose(got, attention(Q, K, V, score_mod=bound), rtol=0, atol=1e-5)
    assert digest(make(True)) != digest(make(False))


def test_what_is_neither_stays_captured() -> None:
    def make(*captured: Any) -> Any:
        none, text, pair, function, module, other = captured

        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            x = function(score) if none is None else module.exp(score)
            return x * pair[len(text) - 3] + other

        return mod

    bound = leaf(make(None, "text", (1.0, 2.0), np.tanh, np, 3.0))
    assert (bound.names, bound.values) == (("other",), (3.0,))
    assert bound(0.5, 0, 0, 0, 0) == math.tanh(0.5) * 2.0 + 3.0
    got = attention(Q, K, V, score_mod=make(None, "text", (1.0, 2.0), np.tanh, np, 3.0))
    want = attention(Q, K, V, score_mod=lambda s, b, h, q, k: np.tanh(s) * 2.0)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_cell_is_read_in_every_call() -> None:
    gain: Any = 2.0

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * gain + 0.1 * kv_idx

    for gain in (0.5, 3.0, 0.5, 2, np.float32(4)):
        agree(mod, partial(amplified, gain=gain))
    table = np.ones(3)
    mod = biased(table)
    before = attention(Q, K, V, score_mod=mod)
    table[:] = 0.0
    np.testing.assert_array_equal(attention(Q, K, V, score_mod=mod), attention(Q, K, V))
    assert np.abs(before - attention(Q, K, V)).max() > 1e-3


def test_a_cell_that_becomes_something_else() -> None:
    """A number, a truth, an array and nothing at all, one after the other."""
    table: Any = 2.0
    mod = biased(table)
    assert mod.__closure__ is not None
    cell = mod.__closure__[0]
    for value, names in ((2.0, ("table",)), (True, ()), (np.ones(3), ("table",)), (None, ())):
        cell.cell_contents = value
        assert leaf(mod).names == names
    del cell.cell_contents
    assert leaf(mod).names == ()


# Masks


def test_masks_of_closures() -> None:
    doc = np.repeat([0, 1, 2], [20, 20, 30])
    documents = nattn.mask(partial(nattn.masks.document, doc=doc))
    window = nattn.mask(partial(nattn.masks.sliding_window, left=5, right=5))
    ours, close = nattn.mask(equal_documents(doc)), nattn.mask(near(5))
    for made, given in (
        (ours & close, documents & window),
        (ours | close, documents | window),
        (~ours, ~documents),
    ):
        got = attention(Q, K, V, mask_mod=made)
        np.testing.assert_array_equal(got, attention(Q, K, V, mask_mod=given))
        want = attention(Q, K, V, mask_mod=made, backend="reference")
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        blocks = nattn.BlockMask.from_mask_mod(made, B=1, H=1, Nq=40, Nk=70)
        np.testing.assert_array_equal(attention(Q, K, V, block_mask=blocks), got)


def test_compositions_of_closures() -> None:
    made = nattn.mods.compose(amplifier(0.5), biased(np.arange(3.0)))
    given = nattn.mods.compose(partial(amplified, gain=0.5), partial(bias, table=np.arange(3.0)))
    agree(made, given)


# Functions within functions


def layered(gain: Any, table: Any, weight: Any) -> Any:
    def inner(x: Any, factor: Any = 2.0) -> Any:
        return x * gain + factor * weight

    def helper(x: Any, h: Any) -> Any:
        return inner(x) + table[h] * inner(x, 3.0)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return helper(score, h) * gain

    return mod


def flat(score: Any, b: Any, h: Any, q: Any, k: Any, gain: Any, table: Any, weight: Any) -> Any:
    one, two = score * gain + 2.0 * weight, score * gain + 3.0 * weight
    return (one + table[h] * two) * gain


def test_helpers_share_what_they_capture() -> None:
    table = np.array([0.5, -1.0, 2.0])
    made = layered(0.5, table, 0.1)
    bound = leaf(made)
    values = dict(zip(bound.names, bound.values, strict=True))
    assert sorted(values) == ["gain", "table", "weight"]
    assert values["gain"] == 0.5
    agree(made, partial(flat, gain=0.5, table=table, weight=0.1))
    assert digest(leaf(layered(2.0, table, 7.0)).function) == digest(bound.function)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_are_those_of_partial(backend: str) -> None:
    table = np.array([0.5, -1.0, 2.0])
    wrt = ("q", *(f"score_mod.{x}" for x in ("gain", "table", "weight")))
    found = []
    for mod in (
        layered(0.5, table, 0.1),
        partial(flat, gain=0.5, table=table, weight=0.1),
    ):
        out, vjp = attention_vjp(Q, K, V, score_mod=mod, backend=backend)
        grads = vjp(out + 1, wrt=wrt)
        found.append((grads.dq, *(grads.dmods[name] for name in wrt[1:])))
    assert np.abs(found[0][1]).max() > 0.01
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_helpers_of_one_name() -> None:
    """What only a helper captures is told apart by the helper's name."""

    def make_helper(gain: Any) -> Any:
        def helper(x: Any) -> Any:
            return x * gain

        return helper

    def make(gain: Any, helper: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return helper(score) + gain

        return mod

    mod = make(1.0, make_helper(0.5))
    bound = leaf(mod)
    assert (bound.names, bound.values) == (("gain", "helper.gain"), (1.0, 0.5))
    assert bound(3.0, 0, 0, 0, 0) == 2.5
    out, vjp = attention_vjp(Q, K, V, score_mod=mod)
    dout = np.float32(RNG.standard_normal(out.shape))
    grads = vjp(dout, wrt=("score_mod.gain", "score_mod.helper.gain")).dmods
    assert abs(grads["score_mod.gain"]) < 1e-4  # the same for all keys
    assert abs(grads["score_mod.helper.gain"]) > 1e-3


def test_a_function_that_is_captured_twice() -> None:
    def make(table: Any) -> Any:
        def helper(h: Any) -> Any:
            return table[h]

        again = helper

        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + (helper(h) + again(h)) * kv_idx

        return mod

    table = np.array([0.5, -0.25, 0.0])
    got = attention(Q, K, V, score_mod=make(table))
    want = attention(Q, K, V, score_mod=partial(bias, table=2 * table))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_closures_in_the_body() -> None:
    def make(gain: Any, table: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            n = 2 * kv_idx

            def inner(x: Any) -> Any:
                return x * gain + table[h] * n

            return (lambda x: inner(x) + gain)(score)

        return mod

    def same(score: Any, b: Any, h: Any, q: Any, k: Any, gain: Any, table: Any) -> Any:
        return score * gain + table[h] * (2 * k) + gain

    table = np.array([0.5, -0.25, 0.0])
    agree(make(0.5, table), partial(same, gain=0.5, table=table))


def elsewhere(source: str, **scope: Any) -> Any:
    scope = {"np": np, "__name__": "elsewhere"} | scope
    exec(source, scope)
    return scope


def test_a_helper_of_another_module() -> None:
    """It reads its own globals, so what it captures stays with it: a constant, or refused."""
    scope = elsewhere(
        "LEVEL = 2.0\n"
        "def make(gain):\n"
        "    def helper(x): return x * gain + LEVEL\n"
        "    return helper\n"
    )

    def make(helper: Any, gain: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return helper(score) * gain

        return mod

    bound = leaf(make(scope["make"](0.5), 3.0))
    assert (bound.names, bound.values) == (("gain",), (3.0,))
    assert bound(4.0, 0, 0, 0, 0) == (4.0 * 0.5 + 2.0) * 3.0
    with pytest.raises(TypeError, match="got helper, which captures gain, an array"):
        leaf(make(scope["make"](np.ones(3)), 3.0))


def test_what_such_a_helper_shares_is_a_constant_of_both() -> None:
    """Else its gradient would be that of one of the places which read it."""

    def make(gain: Any) -> Any:
        def helper(*x: Any) -> Any:
            return x[0] * gain

        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return helper(score) + gain * kv_idx

        return mod

    mod = make(0.25)
    assert leaf(mod).names == ()
    got = attention(Q, K, V, score_mod=mod)
    want = attention(Q, K, V, score_mod=mod, backend="reference")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    out, vjp = attention_vjp(Q, K, V, score_mod=mod)
    with pytest.raises(ValueError, match=r"got 'score_mod.gain', a constant of mod: bind it"):
        vjp(out, wrt=("score_mod.gain",))


def test_functions_that_capture_each_other() -> None:
    def make(gain: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return other(score) if gain > 0 else score

        def other(x: Any) -> Any:
            return x if gain > 0 else mod(x, 0, 0, 0, 0)

        return mod

    bound = leaf(make(2.0))
    assert bound.names == ()  # constants, as nothing that calls itself can be compiled
    assert bound(3.0, 0, 0, 0, 0) == 3.0


def test_the_cell_of_a_class() -> None:
    class Modifiers:
        factor = 2.0

        def made(self, gain: Any) -> Any:
            def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return score * gain * __class__.factor  # type: ignore[name-defined]

            return mod

    bound = leaf(Modifiers().made(3.0))
    assert bound.names == ("gain",)
    assert bound(1.0, 0, 0, 0, 0) == 6.0


# The outer function


def always(*_: Any) -> bool:
    return True


def test_a_plain_function_is_itself() -> None:
    assert isinstance(amplified, types.FunctionType)
    assert lifted(amplified, always, always) == (amplified, (), ())
    text = biased("text")
    assert lifted(text, lambda name, value: False, always) == (text, (), ())


def test_names_that_are_taken() -> None:
    """A captured variable may be called as the template's own are, and as Python's keywords."""

    def make(a0: Any, c000000: Any, outer: Any, x1: Any) -> Any:
        def helper(x: Any = 1) -> Any:
            return x1 * x

        def mod(c000001: Any, *, make: Any = 5) -> Any:
            return c000001, a0, c000000, outer, helper(), make

        return mod

    found = lifted(make(2, 3, 4, 6), always, always)
    assert found.names == ("a0", "c000000", "outer", "x1")
    assert found.function(1, 5, *found.values) == (1, 2, 3, 4, 6, 5)


def test_code_that_no_compiler_makes_stays_as_it_is() -> None:
    """Cells out of order: what is captured is a constant of the code."""

    def make(a: Any, z: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return a * score + z

        return mod

    mod = make(2.0, 3.0)
    code = mod.__code__.replace(co_freevars=("z", "a"))  # what reads one cell now has two names
    odd = types.FunctionType(code, mod.__globals__, "odd", None, mod.__closure__)
    bound = leaf(odd)
    assert (bound.function, bound.names) == (odd, ())
    assert bound(1.0, 0, 0, 0, 0) == mod(1.0, 0, 0, 0, 0)


def test_functions_are_not_kept_alive() -> None:
    table = np.zeros(3)
    gone: list[weakref.ref[Any]] = []
    for mod in (amplifier(2.0), layered(0.5, table, 0.1), biased(table)):
        attention(Q, K, V, score_mod=mod)
        gone.append(weakref.ref(mod))
    gone.append(weakref.ref(table))
    del mod, table
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


# Errors


def written(folder: Path, name: str, source: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(source)
    scope: dict[str, Any] = {"np": np, "__name__": name}
    exec(compile(source, str(path), "exec"), scope)
    return scope


CLOSURE = """
def make(gain):
    def helper(x):
        return {helper}

    def mod(score, b, h, q_idx, kv_idx):
        x = score * gain
        return {body}
    return mod
"""


@pytest.mark.parametrize(
    ("helper", "body", "line", "reason"),
    [
        ("x", "np.arccosh(x)", 8, "arccosh"),
        ("np.arccosh(x) * gain", "helper(x)", 4, "arccosh"),
        ("x", "f'{x}'", 8, "an f-string cannot be compiled"),
        ("[x, gain][0]", "helper(x)", 4, "a list cannot be compiled"),
        ("x", "x if x > gain else score", 8, "np.where"),
        ("x", "x[gain]", 8, ""),
    ],
)
def test_errors_name_the_line_of_the_closure(
    tmp_path: Path, helper: str, body: str, line: int, reason: str
) -> None:
    scope = written(tmp_path, "closure", CLOSURE.format(helper=helper, body=body))
    with pytest.raises(TypeError) as error:
        attention(Q, K, V, score_mod=scope["make"](2.0))
    text = str(error.value)
    assert f'closure.py", line {line}: return ' in text
    assert reason in text


def test_an_index_out_of_range_names_the_variable() -> None:
    with pytest.raises(IndexError, match="score_mod: expected indices within"):
        attention(Q, K, V, score_mod=biased(np.zeros(2)))
    with pytest.raises(IndexError, match="within table of mod, got one"):
        attention(Q, K, V, score_mod=biased(np.zeros(2)), backend="reference")


GAIN = 2.0


def reads_a_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * GAIN


def test_gradients_of_constants_are_refused() -> None:
    wrt = {
        "score_mod.GAIN": "a constant of reads_a_global: bind it or capture it in a closure",
        "score_mod.reads_a_global.GAIN": "a constant of reads_a_global: bind it",
        "score_mod.other": "expected names of what is bound: .*; got 'score_mod.other'$",
    }
    out, vjp = attention_vjp(Q, K, V, score_mod=reads_a_global)
    for name, text in wrt.items():
        with pytest.raises(ValueError, match=text):
            vjp(out, wrt=(name,))
    out, vjp = attention_vjp(Q, K, V, score_mod=amplifier(3))
    with pytest.raises(TypeError, match=r"expected names of floats, got 'score_mod\.gain'"):
        vjp(out, wrt=("score_mod.gain",))
