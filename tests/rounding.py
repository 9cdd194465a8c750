"""How far rounding can take a modifier: its function run on values that carry an error bound.

Running error analysis, as in N. Higham, "Accuracy and Stability of Numerical Algorithms", section
3.3: every operation passes on the bounds of its operands and adds its own rounding. So the budget
of a call with modifiers is derived from the user's function too, whatever it does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nattn.functions.binding import Combination
from nattn.functions.on_arrays import Dual, elementwise, rounded

FUNCTION = 8
"""Unit roundoffs of an elementary function: 4 ulp, as the contract has it."""


@dataclass(frozen=True, eq=False)
class Rounded(np.lib.mixins.NDArrayOperatorsMixin):
    """Float64 values, or exact integers and booleans, and what a backend's may differ by.

    Attributes
    ----------
    x : ndarray
        Values; float64, int64 or bool.
    error : ndarray of float64
        Bound of ``|backend's - x|``. For booleans not 0 where the backend may say the opposite.
    u : float
        Unit roundoff of the backend.
    """

    x: NDArray[Any]
    error: NDArray[np.float64]
    u: float

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Dual) for x in inputs):
            return NotImplemented
        assert method == "__call__", method
        assert set(kwargs) <= {"out"}, kwargs  # x += y binds x anew, as everywhere
        operands = [self._operand(x) for x in inputs]
        with np.errstate(all="ignore"):
            x = ufunc(*(a.x for a in operands))
            if x.dtype.kind == "i":
                return Rounded(x, np.zeros(x.shape), self.u)
            if x.dtype.kind == "f" and ufunc not in (np.negative, np.absolute):
                operands = [a.as_float() for a in operands]
            error = np.broadcast_to(_ERRORS[ufunc](x, self.u, *operands), x.shape)
            if ufunc in _EXACT and not any(a.error.any() for a in operands):
                # Of exact operands a result that needs no rounding is exact. That of short ones is
                # seen: it is short as well. Of others NumPy's own may be rounded.
                short = functools.reduce(np.logical_and, [_short(y.x) for y in operands], _short(x))
                error = np.where(short, 0.0, error)
        return Rounded(x, error, self.u)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, Dual) for x in args):
            return NotImplemented
        assert not kwargs, kwargs
        if func is np.clip:
            return np.minimum(np.maximum(args[0], args[1]), args[2])
        assert func is np.where, func
        condition, a, b = (self._operand(x) for x in args)
        if a.x.dtype.kind == "f" or b.x.dtype.kind == "f":
            a, b = a.as_float(), b.as_float()
        with np.errstate(all="ignore"):
            error = np.where(condition.x, a.error, b.error)
            either = np.maximum(a.error, b.error) + np.abs(a.x * 1.0 - b.x)
            error = np.where(condition.error > 0, either, error)
        return Rounded(np.where(condition.x, a.x, b.x), error, self.u)

    def _operand(self, x: Any) -> Rounded:
        if isinstance(x, Rounded):
            return x
        array = np.asarray(x)
        if array.dtype.kind != "f":
            return Rounded(array, np.zeros(array.shape), self.u)
        error = self.u * np.abs(array)
        exact = self.u < 2.0**-30 or _short(array)  # as every backend holds it
        error = np.where(exact | ~np.isfinite(error), 0.0, error)
        return Rounded(array, error, self.u)

    def as_float(self) -> Rounded:
        """Convert integers, which may not fit the backend's float."""
        if self.x.dtype.kind == "f":
            return self
        x = self.x.astype(np.float64)
        return Rounded(x, np.where(np.abs(x) * self.u < 0.5, 0.0, self.u * np.abs(x)), self.u)


class Table:
    """A bound array that is indexed by `Rounded` integers."""

    def __init__(self, array: NDArray[Any], u: float) -> None:
        self.array, self.u = array, u
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Rounded:
        given = index if isinstance(index, tuple) else (index,)
        indices = [i.x if isinstance(i, Rounded) else np.asarray(i) for i in given]
        if self.array.size == 0:
            x = np.zeros(np.broadcast_shapes(*(i.shape for i in indices)))
        else:  # what is out of range is hidden, or the call raises
            pairs = zip(indices, self.array.shape, strict=True)
            x = self.array[tuple(np.clip(i, -n, n - 1) for i, n in pairs)]
        return Rounded(np.asarray(x), np.zeros(np.shape(x)), self.u)


Errors = Callable[..., Any]


def _short(x: NDArray[Any]) -> Any:
    """Tell which numbers a float32 holds without rounding."""
    with np.errstate(all="ignore"):
        return x == x.astype(np.float32)


def _product(r: Any, u: float, a: Rounded, b: Rounded) -> Any:
    passed = np.abs(a.x) * b.error + np.abs(b.x) * a.error + a.error * b.error
    return np.where(np.isfinite(r), passed + u * np.abs(r), 0.0)


def _quotient(r: Any, u: float, a: Rounded, b: Rounded) -> Any:
    least = np.abs(b.x) - b.error
    passed = np.where(least > 0, (a.error + np.abs(r) * b.error) / least, np.inf)
    return np.where(np.isfinite(r), passed + u * np.abs(r), 0.0)


def _sum(r: Any, u: float, a: Rounded, b: Rounded) -> Any:
    return np.where(np.isfinite(r), a.error + b.error + u * np.abs(r), 0.0)


def _unary(slope: Callable[[Rounded], Any], units: int = FUNCTION) -> Errors:
    """Pass on the error by the largest slope between the least and the largest operand."""

    def error(r: Any, u: float, a: Rounded) -> Any:
        passed = np.where(a.error > 0, a.error * slope(a), 0.0)
        return np.where(np.isfinite(r), passed + units * u * np.abs(r), 0.0)

    return error


def _least(a: Rounded) -> Any:
    """The operand's least value, above 0 or infinitely steep."""
    return np.maximum(a.x - a.error, 0.0)


def _may_differ(r: Any, u: float, a: Rounded, b: Rounded) -> Any:
    both = np.isfinite(a.x * 1.0) & np.isfinite(b.x * 1.0)
    return both & (a.error + b.error > 0) & (np.abs(a.x * 1.0 - b.x) <= a.error + b.error)


def _any(r: Any, u: float, *operands: Rounded) -> Any:
    return np.maximum(operands[0].error, operands[-1].error)


def _choice(sign: float) -> Errors:
    """Pass on the error of the operand that is the smaller one, of ``sign * x``, or both may be."""

    def error(r: Any, u: float, a: Rounded, b: Rounded) -> Any:
        apart = sign * (b.x - a.x) - a.error - b.error
        surely_b = sign * (a.x - b.x) - a.error - b.error > 0
        both = np.maximum(a.error, b.error)
        return np.where(apart > 0, a.error, np.where(surely_b, b.error, both))

    return error


def _corners(function: Callable[..., Any], units: int) -> Errors:
    """Pass on the error of a function that is monotone in each operand, on each side of 0."""

    def error(r: Any, u: float, a: Rounded, b: Rounded) -> Any:
        passed = np.zeros(r.shape)
        for x in (a.x - a.error, a.x + a.error, np.where(np.abs(a.x) < a.error, 0.0, a.x)):
            for y in (b.x - b.error, b.x + b.error):
                passed = np.maximum(passed, np.abs(function(x, y) - r))  # a NaN stays one
        passed = np.where(np.isnan(passed), np.inf, passed)
        return np.where(np.isfinite(r), passed + units * u * np.abs(r), 0.0)

    return error


def _floor(r: Any, u: float, a: Rounded) -> Any:
    return np.maximum(np.floor(a.x + a.error) - r, r - np.floor(a.x - a.error))


def _sign(r: Any, u: float, a: Rounded) -> Any:
    return np.where((a.error > 0) & (np.abs(a.x) <= a.error), 1.0 + np.abs(r), 0.0)


def _exactly(r: Any, u: float, a: Rounded) -> Any:
    return np.zeros(r.shape)


_ERRORS: dict[Any, Errors] = {
    np.add: _sum,
    np.subtract: _sum,
    np.multiply: _product,
    np.true_divide: _quotient,
    np.negative: _any,
    np.absolute: _any,
    np.minimum: _choice(1.0),
    np.maximum: _choice(-1.0),
    np.power: _corners(np.power, FUNCTION),
    np.floor_divide: _corners(np.floor_divide, 0),
    np.floor: _floor,
    np.sign: _sign,
    np.exp2: _unary(lambda a: math.log(2) * np.exp2(a.x + a.error)),
    np.expm1: _unary(lambda a: np.exp(a.x + a.error)),
    np.exp: _unary(lambda a: np.exp(a.x + a.error)),
    np.tanh: _unary(lambda a: 1 - np.tanh(np.maximum(np.abs(a.x) - a.error, 0.0)) ** 2),
    np.sin: _unary(lambda a: 1.0),
    np.cos: _unary(lambda a: 1.0),
    np.sqrt: _unary(lambda a: 0.5 / np.sqrt(_least(a)), 1),
    np.log: _unary(lambda a: 1 / _least(a)),
    np.log1p: _unary(lambda a: 1 / np.maximum(1 + a.x - a.error, 0.0)),
    np.less: _may_differ,
    np.less_equal: _may_differ,
    np.greater: _may_differ,
    np.greater_equal: _may_differ,
    np.equal: _may_differ,
    np.not_equal: _may_differ,
    np.logical_and: _any,
    np.logical_or: _any,
    np.logical_not: _any,
    np.bitwise_and: _any,
    np.bitwise_or: _any,
    np.invert: _any,
    np.isnan: _exactly,
    np.isfinite: _exactly,
}

_EXACT = {np.add, np.subtract, np.multiply, np.true_divide}
"""What every backend rounds correctly."""


def run(tree: Any, dtype: np.dtype, *args: Any) -> Any:
    """Call a function with `Rounded` arguments, as a backend of that dtype binds and rounds."""
    if isinstance(tree, Combination):
        parts = tuple((lambda *a, part=part: run(part, dtype, *a)) for part in tree.parts)
        return Combination(tree.operator, parts)(*args)
    u = float(np.finfo(dtype).eps) / 2
    values = [rounded(value, dtype) for value in tree.values]
    values = [Table(x, u) if isinstance(x, np.ndarray) else x for x in values]
    result = replace(tree, function=elementwise(tree.function), values=tuple(values))(*args)
    return result if isinstance(result, Dual) else args[-1]._operand(result)


def derive(tree: Any, dtype: np.dtype, score: Rounded, *indices: Rounded) -> tuple[Any, Any]:
    """Return what a modifier makes of scores, and the derivative: both are `Rounded`.

    That runs on dual numbers of `Rounded` values, so it is the rules for tangents that round.
    """
    seed = score._operand(np.ones(score.x.shape))
    seed = replace(seed, error=np.zeros(score.x.shape))
    result = run(tree, dtype, Dual(score, seed), *indices)
    if not isinstance(result, Dual):
        flat = np.zeros(np.broadcast_shapes(score.x.shape, result.x.shape))
        return result.as_float(), Rounded(flat, flat, score.u)
    hidden = result.value.x == -np.inf
    slope: Any = score._operand(result.tangent)
    return result.value.as_float(), np.where(hidden, 0.0, slope)
