"""The elementary functions: how near they are to the exact results, over the full range.

The emitters are tested as they are, on vectors that lie in memory. For each float type and width
one function is compiled, which evaluates any of them.
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nattn.backends.cpu import tiles
from nattn.vectors import elementary
from nattn.vectors.vector import Vector, vector_type

Array = NDArray[Any]
Emitter = Callable[[Vector, Vector], Vector]

WIDTHS = (16, 8, 4, 1)
FUNCTIONS = {"exp": 2} | dict.fromkeys(
    ("exp2", "expm1", "log", "log1p", "tanh", "sqrt", "sin", "cos", "power"), 4
)
FUNCTIONS["exp2_nonpositive"] = 3
"""Names, and how far they may be from the exact result in units in the last place.

Where results are subnormal the unit is the smallest number. exp2_nonpositive promises a relative
error, and 0 in place of subnormal numbers: its unit is the machine epsilon of the exact result.
"""
FULL_TURNS = 1e6
"""Up to here sin and cos keep the promise; beyond they stay in [-1, 1]."""

dtype_of_each_kind = pytest.mark.parametrize("dtype", ["float32", "float64"])


# ---------------------------------------------------------------------------------------------
# Any of the functions, compiled
# ---------------------------------------------------------------------------------------------


def unary(emit: Callable[[Vector], Vector]) -> Emitter:
    return lambda x, y: emit(x)


def to_constant(n: int) -> Emitter:
    return lambda x, y: elementary.constant_power(x, n)


CONSTANTS = (-2, -1, 0, 1, 2, 3, 4, 5)
PREDICATES = ("isfinite", "isnan", "isinf")
EXACT = ("sign", "floor", "ceil", "trunc", "rint", *PREDICATES)

EMITTERS: dict[str, Emitter] = {
    name: unary(getattr(elementary, name))
    for name in (*FUNCTIONS, *EXACT)
    if name not in ("power", "sqrt")
}
EMITTERS |= {f"power {n}": to_constant(n) for n in CONSTANTS}
EMITTERS |= {
    "power": elementary.power,
    "sqrt": lambda x, y: x.call("sqrt"),
    "fma": lambda x, y: x.fma(y, -1.0),
}
INTEGER_EMITTERS: dict[str, Emitter] = {name: unary(getattr(elementary, name)) for name in EXACT}
INTEGER_EMITTERS |= {"power": elementary.int_power}
INTEGER_EMITTERS |= {f"power {n}": to_constant(n) for n in CONSTANTS}

ELEMENTS = {
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    "int64": ir.IntType(64),
}


@functools.cache
def compiled(dtype: str, W: int) -> tuple[list[str], Callable[..., None]]:
    """Return the names of the functions, and ``run(which, n, x, y, out)`` of addresses."""
    emitters = INTEGER_EMITTERS if dtype == "int64" else EMITTERS
    vector = vector_type(ELEMENTS[dtype], W)
    size = np.dtype(dtype).itemsize

    def emit_step(typingctx: Any, which: Any, x: Any, y: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            which_, *addresses = args
            pointers = [b.inttoptr(a, vector.as_pointer()) for a in addresses]
            operands = []
            for pointer in pointers[:2]:
                value = b.load(pointer)
                value.align = 1
                operands.append(Vector(b, value))
            end = b.append_basic_block("end")
            choice = b.switch(which_, end)
            for n, emit in enumerate(emitters.values()):
                block = b.append_basic_block("case")
                choice.add_case(n, block)
                b.position_at_end(block)
                value = emit(*operands).value
                if value.type != vector:  # booleans become 0 and 1
                    to = b.zext if dtype == "int64" else b.uitofp
                    value = to(value, vector)
                b.store(value, pointers[2]).align = 1
                b.branch(end)
            b.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    step = intrinsic(emit_step)

    def run(which: int, n: int, x: int, y: int, out: int) -> None:
        for i in range(0, n * size, W * size):
            step(which, x + i, y + i, out + i)

    signature = types.void(*[types.int64] * 5)
    return list(emitters), numba.njit(signature, error_model="numpy")(run)


def evaluate(name: str, x: Array, y: Array | None = None, W: int = 8) -> Array:
    """Evaluate a function; the lanes that fill the last vector up work on ones."""
    names, run = compiled(str(x.dtype), W)
    operands = [
        np.concatenate([a, np.ones(-len(a) % W, x.dtype)]) for a in (x, x if y is None else y)
    ]
    out = np.empty_like(operands[0])
    run(names.index(name), len(out), *(a.ctypes.data for a in (*operands, out)))
    return out[: len(x)]


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


def spread_bits(dtype: str, count: int) -> Array:
    """Return numbers of every exponent and both signs, subnormal ones too."""
    f = np.finfo(dtype)
    integer = np.dtype(f"u{f.dtype.itemsize}")
    bits = np.linspace(0, 2.0 ** (8 * f.dtype.itemsize), count, endpoint=False).astype(integer)
    rng = np.random.default_rng(0)
    bits |= rng.integers(0, 1 << (f.nmant - 11), count, integer)  # all low bits, not only zeros
    return bits.view(dtype)


@functools.cache
def samples(dtype: str) -> Array:
    """Return numbers from everywhere, and many where the functions bend."""
    f = np.finfo(dtype)
    count = 1 << 18
    rng = np.random.default_rng(0)
    top, bottom = f.maxexp * math.log(2), (f.minexp - f.nmant) * math.log(2)
    ranges = [(bottom * 1.05, top * 1.05), (-1.6 * f.maxexp, 1.1 * f.maxexp), (-3, 3), (0.3, 3)]
    ranges += [(-1e-3, 1e-3), (1 - 1e-3, 1 + 1e-3), (-25, 25), (-1, 0.5), (-1e6, 1e6)]
    dense = [rng.uniform(*ends, count >> 2) for ends in ranges]
    around = np.array([0, 1, -1, 2, math.log(2) / 2, math.sqrt(0.5), top, f.minexp, f.maxexp])
    around = np.append(around, [math.log(f.tiny), bottom, f.minexp - f.nmant, 9.3, 22.0])
    near = (
        around.astype(dtype)[:, None]
        + np.arange(-40, 41) * np.spacing(around.astype(dtype))[:, None]
    )
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, f.max, -f.max, f.tiny, -f.tiny]
    special += [f.smallest_subnormal, -f.smallest_subnormal]
    whole = np.arange(-1100, 1100)
    parts = [spread_bits(dtype, count), *dense, near.ravel(), special, whole]
    return np.concatenate([np.asarray(part).astype(dtype) for part in parts])


@functools.cache
def turns(dtype: str) -> Array:
    """Return the numbers at multiples of pi/2 up to 1e6, and their neighbours."""
    last = int(FULL_TURNS * 2 / math.pi)
    n = np.concatenate([np.arange(1, 20_000), np.arange(20_000, last, 7), [last]])
    x = (n * (math.pi / 2)).astype(dtype)
    around = np.nextafter(x, x.dtype.type(0)), x, np.nextafter(x, x.dtype.type(2e6))
    return np.concatenate([*around, -x])


def arguments(name: str, dtype: str) -> Array:
    """Return where a function of one argument promises something."""
    x = samples(dtype)
    if name == "exp2_nonpositive":
        return x[~(x > 0)]
    if name in ("sin", "cos"):
        x = np.concatenate([x, turns(dtype)])
        return x[~(np.isfinite(x) & (np.abs(x) > FULL_TURNS))]
    return x


@functools.cache
def pairs(dtype: str) -> tuple[Array, Array]:
    """Return bases and exponents for power."""
    f = np.finfo(dtype)
    rng = np.random.default_rng(0)
    n = 1 << 15
    anything = spread_bits(dtype, n)
    # Powers that reach every exponent, subnormal ones too, from all bases, and from near 1.
    goal = rng.uniform(1.05 * (f.minexp - f.nmant), 1.05 * f.maxexp, n)
    near = 1 + rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-f.nmant, -1, n)
    with np.errstate(all="ignore"):
        wild, near = (a.astype(dtype).astype("f8") for a in (rng.permutation(anything), near))
        logs = [np.log1p(near - 1) / math.log(2), np.log2(np.abs(wild))]
        exact = [(near, goal / logs[0]), (np.abs(wild), goal / logs[1])]
    small = rng.uniform(0, 10, n), rng.uniform(-30, 30, n)
    halves = rng.uniform(0, 1e4, n), rng.integers(-40, 40, n) / 2
    negative = -rng.uniform(0, 1e4, n), rng.integers(-80, 80, n) / 2
    whole = rng.integers(-30, 30, n), rng.integers(-30, 30, n)
    flat = rng.uniform(0.1, 10, n), rng.choice([-1, 1], n) * 2.0 ** rng.uniform(f.minexp, 0, n)
    parts = [(anything, rng.permutation(anything)), *exact, small, halves, negative, whole, flat]
    with np.errstate(all="ignore"):
        x, y = (np.concatenate([np.asarray(p[i]).astype(dtype) for p in parts]) for i in (0, 1))
    return x, y


# ---------------------------------------------------------------------------------------------
# Accuracy
# ---------------------------------------------------------------------------------------------


def wider(dtype: str) -> Any:
    """Return a float type with at least 10 more bits, or None where there is none."""
    wide = np.float64 if dtype == "float32" else np.longdouble
    return wide if np.finfo(wide).nmant >= np.finfo(dtype).nmant + 10 else None


def assert_accurate(name: str, ulps: float, got: Array, exact: Array, *given: Array) -> None:
    """Assert that results are as near the exact ones as promised; `exact` is of a wider type."""
    f = np.finfo(got.dtype)
    wide = exact.dtype.type
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact), err_msg=name)
    number = ~np.isnan(exact)
    got, exact = got[number], exact[number]
    np.testing.assert_array_equal(np.signbit(got), np.signbit(exact), err_msg=name)
    with np.errstate(all="ignore"):
        # The spacing of the numbers below the exact result. What is past the largest number may
        # be inf, which stands for the power of two that would come next.
        end = wide(2.0) ** f.maxexp
        pole = np.isinf(exact) & (name.startswith("log"))
        target = np.where(pole, exact, np.clip(exact, -end, end))
        value = np.where(np.isinf(got) & ~pole, np.copysign(end, got), got.astype(wide))
        exponent = np.frexp(np.clip(exact, -f.max, f.max))[1] - 1
        unit = np.ldexp(wide(1), np.maximum(exponent, f.minexp) - f.nmant)
        if name == "exp2_nonpositive":
            unit = f.eps * exact
        error = np.where(value == target, 0, np.abs(value - target) / unit)
    if name == "exp2_nonpositive":
        # No subnormal number is ever a result: 0 instead.
        assert not np.any((got != 0) & (got < f.tiny))
        assert not np.any(got[exact < f.tiny * (1 - ulps * f.eps)])
        error[exact < f.tiny * (1 + ulps * f.eps)] = 0
    worst = np.argmax(error)
    assert error[worst] <= ulps, (
        f"{name} of {[a[number][worst] for a in given]}: {got[worst]!r} for {exact[worst]!r}: "
        f"{error[worst]} ulp"
    )


def skip_without(wide: Any) -> None:
    if wide is None:
        pytest.skip("no float type here is wider than float64: see test_accuracy_in_decimals")


@dtype_of_each_kind
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "power"])
def test_accuracy(name: str, dtype: str) -> None:
    wide = wider(dtype)
    skip_without(wide)
    x = arguments(name, dtype)
    with np.errstate(all="ignore"):
        exact = getattr(np, name.removesuffix("_nonpositive"))(x.astype(wide))
    assert_accurate(name, FUNCTIONS[name], evaluate(name, x), exact, x)


@dtype_of_each_kind
def test_accuracy_of_power(dtype: str) -> None:
    wide = wider(dtype)
    skip_without(wide)
    x, y = pairs(dtype)
    for n in (None, *CONSTANTS):
        exponents = y if n is None else np.full_like(x, n)
        name = "power" if n is None else f"power {n}"
        with np.errstate(all="ignore"):
            exact = np.power(x.astype(wide), exponents.astype(wide))
        got = evaluate(name, x, exponents)
        assert_accurate(name, FUNCTIONS["power"], got, exact, x, exponents)


@functools.cache
def half_turn() -> Decimal:
    """Return pi to the current precision, by Machin's formula."""

    def arctan_of_inverse(n: int) -> Decimal:
        power = total = Decimal(1) / n
        k = 1
        while abs(power) > Decimal(10) ** -decimal.getcontext().prec:
            power /= -n * n
            k += 2
            total += power / k
        return total

    return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))


def decimal_sin(x: Decimal) -> Decimal:
    x = x.remainder_near(2 * half_turn())
    term, total, n = x, x, 1
    while abs(term) > abs(total) * Decimal(10) ** -40:
        term *= -x * x / ((n + 1) * (n + 2))
        total += term
        n += 2
    return total


DECIMAL_FUNCTIONS: dict[str, Callable[..., Decimal]] = {
    "exp": lambda x: x.exp(),
    "exp2": lambda x: Decimal(2) ** x,
    "expm1": lambda x: x.exp() - 1,
    "log": lambda x: x.ln(),
    "log1p": lambda x: (1 + x).ln(),
    "sqrt": lambda x: x.sqrt(),
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1),
    "sin": decimal_sin,
    "cos": lambda x: decimal_sin(x + half_turn() / 2),
    "power": lambda x, y: x**y,
}


@functools.cache
def decimal_arguments(name: str, dtype: str) -> tuple[Array, ...]:
    """Return numbers for which the exact result is a number other than 0."""
    f = np.finfo(dtype)
    if name == "power":
        x, y = (a[::401] for a in pairs(dtype))
        with np.errstate(all="ignore"):
            size = y * np.log2(np.abs(x))
        keep = (x > 0) & (np.abs(size) < f.maxexp) & (np.abs(y) > f.tiny)
        assert keep.sum() > 200
        return x[keep], y[keep]
    x = samples(dtype)[:: 1 << 9]
    if name in ("sin", "cos"):
        x = np.concatenate([x, turns(dtype)[:: 1 << 13]])
    # Below 1e-30 a function is as good as its slope, and decimals need too many digits.
    x = x[np.isfinite(x) & (np.abs(x) > 1e-30)]
    least, most = f.minexp - f.nmant + 1.0, f.maxexp
    if name == "exp2_nonpositive":
        x = x[(x < 0) & (x > f.minexp)]
    elif name.startswith("exp"):
        unit = 1 if name == "exp2" else math.log(2)
        x = x[(x > (-50 if name == "expm1" else least * unit)) & (x < most * unit)]
    elif name == "tanh":
        x = x[np.abs(x) < 50]
    elif name == "log1p":
        x = x[x > -1]
    elif name in ("log", "sqrt"):
        x = x[(x > 0) & (x != 1)]
    else:
        x = x[np.abs(x) <= FULL_TURNS]
    assert len(x) > 300
    return (x,)


@dtype_of_each_kind
@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy_in_decimals(name: str, dtype: str) -> None:
    """The same against decimal arithmetic, which every machine has: fewer numbers."""
    f = np.finfo(dtype)
    function = DECIMAL_FUNCTIONS[name.removesuffix("_nonpositive")]
    operands = decimal_arguments(name, dtype)
    got = evaluate(name, operands[0], operands[-1])
    with decimal.localcontext(prec=80, Emin=-9999, Emax=9999):
        least = Decimal(2) ** (f.minexp - f.nmant)
        end = Decimal(2) ** f.maxexp
        for y, *numbers in zip(got.tolist(), *(a.tolist() for a in operands), strict=True):
            exact = function(*map(Decimal, numbers))
            value = end if math.isinf(y) else Decimal(y)
            if name == "exp2_nonpositive":
                unit = Decimal(float(f.eps)) * exact
            else:
                # Of numbers that straddle a power of two the finer spacing.
                exponent = math.frexp(float(min(abs(exact), abs(value) or least)))[1] - 1
                unit = max(Decimal(2) ** (exponent - f.nmant), least)
            assert abs(value - exact) <= FUNCTIONS[name] * unit, (name, numbers, y, exact)


@dtype_of_each_kind
def test_beyond_a_million_sin_and_cos_stay_in_range(dtype: str) -> None:
    x = samples(dtype)
    x = x[np.isfinite(x)]
    s, c = evaluate("sin", x), evaluate("cos", x)
    assert max(np.abs(s).max(), np.abs(c).max()) <= 1
    # What they return is the sine and the cosine of one number: 4 ulp of each, squared.
    circle = s.astype("f8") ** 2 + c.astype("f8") ** 2
    assert np.abs(circle - 1).max() <= 9 * np.finfo(dtype).eps
    # It is near x, as near as x's own digits tell, for as long as these say anything.
    near = np.abs(x) < 2.0 ** (np.finfo(dtype).nmant - 3)
    slack = 4 * np.finfo(dtype).eps * (1 + np.abs(x[near]))
    assert np.all(np.abs(s[near] - np.sin(x[near])) <= slack)
    assert np.all(np.abs(c[near] - np.cos(x[near])) <= slack)


# ---------------------------------------------------------------------------------------------
# Exact results
# ---------------------------------------------------------------------------------------------


@dtype_of_each_kind
def test_special_values(dtype: str) -> None:
    f = np.finfo(dtype)
    inf, nan = math.inf, math.nan
    none = math.log(f.smallest_subnormal) - 1
    tiny, most, least = f.tiny, f.max, f.smallest_subnormal
    expected: dict[str, dict[Any, Any]] = {
        "exp": {-inf: 0, inf: inf, nan: nan, 0: 1, none: 0, 0.7 * f.maxexp: inf, -most: 0},
        "exp2": {-inf: 0, inf: inf, nan: nan, 5: 32, f.minexp: tiny, -1.5e4: 0, 1.5e4: inf},
        "expm1": {-inf: -1, inf: inf, nan: nan, 0: 0, -most: -1, most: inf, tiny: tiny},
        "log": {-0.0: -inf, inf: inf, nan: nan, 1: 0, -1: nan, -inf: nan, -tiny: nan},
        "log1p": {-1: -inf, inf: inf, nan: nan, 0: 0, -1.5: nan, -inf: nan, tiny: tiny},
        "tanh": {0: 0, inf: 1, -inf: -1, nan: nan, 25: 1, -most: -1, tiny: tiny, least: least},
        "sqrt": {0: 0, inf: inf, nan: nan, -1: nan, -inf: nan, 2.25: 1.5, -least: nan},
        "exp2_nonpositive": {0: 1, -inf: 0, nan: nan, f.minexp: tiny, f.minexp - 1: 0, -1: 0.5},
        "sin": {0: 0, inf: nan, -inf: nan, nan: nan, tiny: tiny, least: least},
        "cos": {-0.0: 1, tiny: 1, inf: nan, -inf: nan, nan: nan},
    }
    expected["exp2"] |= {f.minexp - f.nmant: least, f.minexp - f.nmant - 1: 0}
    for name, results in expected.items():
        got = evaluate(name, np.array(list(results), dtype))
        np.testing.assert_array_equal(got, np.array(list(results.values()), dtype), err_msg=name)
        assert not np.signbit(got[got == 0]).any(), name
    # Where a function is odd the sign of zero survives, and next to it each number.
    steps: list[Any] = [0, least, 3 * least, tiny, 1.5 * tiny, f.eps / 16]
    small = np.array(steps, dtype)
    for name in ("expm1", "log1p", "tanh", "sin"):
        for x in (small, -small):
            got = evaluate(name, x)
            np.testing.assert_array_equal(got, x, err_msg=name)
            np.testing.assert_array_equal(np.signbit(got), np.signbit(x), err_msg=name)
    assert list(np.signbit(evaluate("sqrt", np.array([-0.0, 0.0], dtype)))) == [True, False]


def of_special_values(dtype: str) -> Array:
    f = np.finfo(dtype)
    some: list[Any] = [0.0, 1, 2, 3, 7, 0.5, 0.25, 1.5, 2.5, 1e30, 1e-30, 2.0**59]
    some += [2.0**24 + 1, 2.0**53 - 1, 1 + f.eps, 1 - f.epsneg]
    some += [f.max, f.tiny, f.smallest_subnormal, math.inf, math.nan]
    values = np.array([*some, *(-x for x in some)], dtype)
    assert np.signbit(values[values == 0]).tolist() == [False, True]
    return values


@dtype_of_each_kind
def test_power_of_special_values(dtype: str) -> None:
    """Every pair of them, against NumPy: the same zeros, ones, infinities, NaN and signs."""
    values = of_special_values(dtype)
    x, y = (a.ravel().copy() for a in np.meshgrid(values, values))
    for n in (None, *CONSTANTS):
        exponents = y if n is None else np.full_like(x, n)
        got = evaluate("power" if n is None else f"power {n}", x, exponents)
        with np.errstate(all="ignore"):
            expected = np.power(x, exponents)
        one = (x == 1) | (exponents == 0) | ((x == -1) & np.isinf(exponents))
        assert np.all(got[one] == 1)
        for special in (0.0, math.inf):
            np.testing.assert_array_equal(np.abs(got) == special, np.abs(expected) == special)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        number = ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(expected[number]))


def reference(name: str, x: Array) -> Array:
    with np.errstate(all="ignore"):
        return getattr(np, name)(x).astype(x.dtype)  # type: ignore[no-any-return]


@dtype_of_each_kind
def test_what_is_exact(dtype: str) -> None:
    f = np.finfo(dtype)
    steps = np.arange(-9, 9.25, 0.25)
    edge = 2.0 ** np.arange(f.nmant - 2, f.nmant + 2)
    edge = np.concatenate([edge, edge - 0.5, edge + 0.5]).astype(dtype)
    x = np.concatenate([of_special_values(dtype), steps.astype(dtype), edge, -edge])
    for name in EXACT:
        got, expected = evaluate(name, x), reference(name, x)
        np.testing.assert_array_equal(got, expected, err_msg=name)
        number = ~np.isnan(x)
        np.testing.assert_array_equal(
            np.signbit(got[number]), np.signbit(expected[number]), err_msg=name
        )


def wrapped(x: int, n: int) -> int:
    """Return x**n as int64 has it; with a negative n what is left of the fraction."""
    if n < 0:
        return x ** (-n) if abs(x) == 1 else 0
    return (pow(x, n, 1 << 64) + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("W", WIDTHS)
def test_integers(W: int) -> None:
    end = np.iinfo("i8")
    some = [0, 1, 2, 3, 5, 7, 10, 46341, 2**31, 2**32 + 1, 3**39, end.max]
    bases = np.array([*some, *(-x for x in some), end.min])
    exponents = np.array([*range(-3, 12), 31, 32, 62, 63, 64, 65, end.max, end.min, end.min + 1])
    x, n = (a.ravel().copy() for a in np.meshgrid(bases, exponents))
    # Pairs in any order, so that the lanes of a vector need different numbers of steps.
    order = np.random.default_rng(0).permutation(len(x))
    x, n = x[order], n[order]
    expected = [wrapped(a, b) for a, b in zip(x.tolist(), n.tolist(), strict=True)]
    np.testing.assert_array_equal(evaluate("power", x, n, W), expected)
    for constant in CONSTANTS:
        expected = [wrapped(a, constant) for a in bases.tolist()]
        np.testing.assert_array_equal(evaluate(f"power {constant}", bases, W=W), expected)
    for name in EXACT:
        # NumPy rounds integers to floats in rint; here they stay.
        exact = bases if name == "rint" else reference(name, bases)
        np.testing.assert_array_equal(evaluate(name, bases, W=W), exact)


@dtype_of_each_kind
@pytest.mark.parametrize("W", WIDTHS)
def test_every_width_computes_the_same_bits(W: int, dtype: str) -> None:
    x = samples(dtype)[::7]
    base, exponent = (a[::3] for a in pairs(dtype))
    for name in EMITTERS:
        inside = x[~(x > 0)] if name == "exp2_nonpositive" else x
        operands = (base, exponent) if name == "power" else (inside, inside[::-1].copy())
        got, expected = (evaluate(name, *operands, width) for width in (W, 8))
        np.testing.assert_array_equal(got, expected, err_msg=name)
        number = ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(expected[number]))


@dtype_of_each_kind
@pytest.mark.parametrize("W", WIDTHS)
def test_fma(W: int, dtype: str) -> None:
    """One rounding where the processor has the instruction, two where it has not."""
    eps = np.finfo(dtype).eps
    x, y = (np.full(W, v, dtype) for v in (1 + eps, 1 - eps))
    expected = -eps * eps if tiles.cpu().fma else (x * y - 1)[0]
    np.testing.assert_array_equal(evaluate("fma", x, y, W), expected)
