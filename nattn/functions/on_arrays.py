"""Users' functions on NumPy arrays: what the reference runs.

The function itself runs, on ``q_idx = pos[:, None]`` and ``kv_idx = j[None, :]``, so NumPy's
broadcasting is what defines a modifier or a mask. A few things differ from plain arrays so that it
means the same as in a kernel, where each argument is one number of a vector:

- A Python ``if`` on an argument is refused, whatever the size of the array, also on b and h.
- ``x += y`` binds x anew, as it does for numbers.
- Python's ``min`` and ``max``, the functions of `math` and ``np.float32`` work elementwise.
- A bound array can be indexed by integers alone; where an index is out of range is noted, and an
  error if that pair turns out to be visible.
- Bound floats have the precision that the call computes in.

For gradients the function runs on dual numbers, a value and its derivative by the score in one
(`Dual`): it is the function itself that is differentiated, exactly, and no difference is taken.
"""

from __future__ import annotations

import builtins
import linecache
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .binding import Bound, Combination, Tree
from .learning import Place


class ArrayFunction:
    """A user's function, ready to be called with arrays.

    Parameters
    ----------
    name : {"score_mod", "mask_mod"}
        The argument that it came as.
    tree : Bound or Combination
        The function.
    dtype : dtype
        Compute dtype: bound floats are rounded to it.
    place : Place, optional
        The bound value that `readings` tells of.
    """

    def __init__(self, name: str, tree: Tree, dtype: np.dtype, place: Place | None = None) -> None:
        self.name = name
        self.dtype = dtype
        self._place, self._leaf = place, 0
        self._learnt: _Learnt | None = None
        self.misses: list[tuple[str, NDArray[np.bool_]]] = []
        self._call = self._prepare(tree)

    def __call__(self, *args: Any) -> NDArray[Any]:
        """Return float64 scores or booleans, one for each pair.

        Raises
        ------
        TypeError
            If it does with its arguments what only a single number can do, or returns no real
            numbers or no booleans.
        """
        self.misses.clear()
        return np.asarray(self._call(*(np.asarray(x).view(_Array) for x in args)))

    def derive(self, score: Any, *args: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a modifier's scores and their derivatives with respect to `score`.

        The derivative is 0 where the score is -inf, which hides the key.

        Raises
        ------
        TypeError
            As a call does, and for functions of the score that have no rule.
        """
        self.misses.clear()
        x = np.asarray(score, np.float64).view(_Array)
        indices = (np.asarray(i).view(_Array) for i in args)
        result = self._call(Dual(x, np.ones_like(x)), *indices)
        value, slope = (
            (result.value, result.tangent) if isinstance(result, Dual) else (result, np.zeros(()))
        )
        value, slope = np.broadcast_arrays(np.asarray(value), np.asarray(slope))
        return value, np.where(value == -np.inf, 0.0, slope)

    def readings(
        self, score: Any, *args: Any
    ) -> Iterator[tuple[NDArray[Any], tuple[NDArray[Any], ...]]]:
        """Yield, for each place in the code that reads the value, what follows from the reading.

        Yields
        ------
        slope : ndarray
            The derivative of the score with respect to what is read there.
        index : tuple of ndarray
            Where that is in the value: an array for each axis, that broadcasts with the scores.
        """
        learnt = self._learnt
        assert learnt is not None
        call = [np.asarray(x).view(_Array) for x in (score, *args)]
        learnt.wanted = 0
        while True:
            self.misses.clear()
            learnt.passed = 0
            result = self._call(*call)
            if learnt.passed <= learnt.wanted:
                return
            slope = result.tangent if isinstance(result, Dual) else np.zeros(())
            value = np.broadcast_to(np.asarray(_value(result)), np.shape(score))
            yield np.where(value == -np.inf, 0.0, slope), learnt.index
            learnt.wanted += 1

    def check_indices(self, visible: NDArray[np.bool_]) -> None:
        """Raise if a bound array was indexed out of range where a pair is visible.

        Raises
        ------
        IndexError
            The text names the array.
        """
        for array, miss in self.misses:
            if np.any(miss & visible):
                raise IndexError(
                    f"{self.name}: expected indices within {array}, got one that is out of range"
                )

    def _prepare(self, tree: Any) -> Callable[..., Any]:
        if isinstance(tree, Combination):
            return Combination(tree.operator, tuple(map(self._prepare, tree.parts)))
        values: list[Any] = []
        numbers: list[int] = []  # which of them is a number to learn
        for n, (name, value) in enumerate(zip(tree.names, tree.values, strict=True)):
            x: Any = rounded(value, self.dtype)
            if isinstance(value, np.ndarray):
                x = _Bounded(f"{name} of {tree.function.__name__}", x, self.misses)
            if self._place == Place(self._leaf, n):
                x = self._learnt = _Learnt(x)
                numbers += [n] * (not isinstance(value, np.ndarray))
            values.append(x)
        self._leaf += 1
        bound = replace(tree, function=elementwise(tree.function), values=tuple(values))

        def call(*args: Any) -> Any:
            now = [x.number() if n in numbers else x for n, x in enumerate(bound.values)]
            return self._checked(replace(bound, values=tuple(now)), args)

        return call if numbers else lambda *args: self._checked(bound, args)

    def _checked(self, bound: Bound, args: tuple[Any, ...]) -> Any:
        try:
            result = bound(*args)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            place = _place(error, bound.function)
            text = str(error)
            if "truth value" in text:  # NumPy's own, of an array that is not ours
                kind, text = TypeError, _NO_TRUTH
            elif not text.startswith("expected"):
                text = f"expected what NumPy does with arrays, got: {text}"
            raise kind(f"{self.name}: {text}{place}") from error
        array = np.asarray(result.value if isinstance(result, Dual) else result)
        kinds, expected = ("b", "booleans") if self.name == "mask_mod" else ("fiu", "real numbers")
        if array.dtype.kind not in kinds:
            got = f"dtype {array.dtype}" if array.dtype.kind != "O" else repr(result)[:60]
            raise TypeError(
                f"{self.name}: expected {bound.function.__name__} to return {expected}, got {got}"
            )
        pairs = np.broadcast_shapes(*(x.shape for x in args))
        if any(n not in (1, m) for n, m in zip(array.shape[::-1], pairs[::-1], strict=False)) or (
            array.ndim > len(pairs)
        ):
            raise TypeError(
                f"{self.name}: expected {bound.function.__name__} to return one result for each "
                f"pair, got shape {array.shape} for {pairs}"
            )
        if expected == "real numbers":
            array = array.astype(np.float64)
        array = np.broadcast_to(array, pairs).view(_Array)
        return Dual(array, result.tangent) if isinstance(result, Dual) else array


def rounded(value: Any, dtype: np.dtype) -> Any:
    """Return what a function is bound to in the precision of a call, floats as float64 again."""
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            return float(np.float64(value).astype(dtype))
    if not isinstance(value, np.ndarray) or value.dtype.kind == "b":
        return value
    if value.dtype.kind in "iu":
        return value.astype(np.int64)
    with np.errstate(over="ignore"):
        return value.astype(dtype).astype(np.float64)


# Arrays that behave as the numbers in a kernel's vectors do

_NO_TRUTH = (
    "expected no Python if, while, and, or, not, nor a < b < c, on what it is called with, got one;"
    " choose with np.where(condition, a, b), join with & | ~"
)


class _Array(np.ndarray):
    """An array of which no single truth is asked, and that no operator changes in place."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__array_function__(func, types, args, kwargs)
        return result.view(_Array) if type(result) is np.ndarray else result

    def __bool__(self) -> bool:
        raise TypeError(_NO_TRUTH)

    def _one_number(self, *args: Any) -> Any:
        raise TypeError("expected NumPy's functions, which work on arrays, got one of a number")

    __int__ = __float__ = __complex__ = __index__ = __iter__ = _one_number

    def _anew(self, other: Any) -> Any:
        return NotImplemented  # so Python takes x = x + y

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _anew
    __ipow__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _anew


class Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """An array together with its derivative by the score: forward-mode differentiation.

    Each function of NumPy computes its value as always, and its derivative by the rule in
    `_RULES`. A. Griewank and A. Walther, "Evaluating Derivatives", 2nd edition, SIAM 2008,
    chapter 3. Where there is no derivative, or floats cannot tell it:

    - comparisons look at values and give plain arrays, and so do floor, sign and their like;
    - ``np.where`` takes the derivative of the branch that it takes, whatever the other's;
    - abs has the derivative 0 at 0; maximum and minimum follow their first argument at a tie, clip
      its argument at a bound;
    - 0 times anything is 0, and a product that overflows is the largest number;
    - of ``x ** y`` the derivative by y is 0 where x is 0.

    Attributes
    ----------
    value, tangent
        Arrays, or what else NumPy's functions take.
    """

    def __init__(self, value: Any, tangent: Any) -> None:
        self.value, self.tangent = value, tangent

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the value."""
        return tuple(self.value.shape)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or ufunc not in _RULES:
            raise TypeError(f"expected a function that nattn can differentiate, got {ufunc}")
        for x in inputs:
            if isinstance(x, _Bounded):
                np.asarray(x)  # raises
        z = ufunc(*map(_value, inputs))
        if isinstance(z, np.ndarray | np.generic):
            z = np.asarray(z).view(_Array)
        rule = _RULES[ufunc]
        tangent = None if rule is None else rule(z, *_operands(inputs))
        return z if tangent is None else Dual(z, tangent)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in (np.where, np.clip) or len(args) != 3 or kwargs:
            raise TypeError(
                f"expected a function that nattn can differentiate, got np.{func.__name__}"
            )
        z = func(*map(_value, args))
        rule = _where_rule if func is np.where else _clip_rule
        tangent = rule(z, *_operands(args))
        return z if tangent is None else Dual(z, tangent)

    def __bool__(self) -> bool:
        raise TypeError(_NO_TRUTH)

    __int__ = __float__ = __complex__ = __index__ = __iter__ = _Array._one_number

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _Array._anew
    __ipow__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _Array._anew


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Dual) else x


def _operands(inputs: Any) -> Iterator[Any]:
    """Yield each value and its tangent, None for a constant."""
    for x in inputs:
        yield _value(x)
        yield x.tangent if isinstance(x, Dual) else None


_LARGEST = float(np.finfo(np.float64).max)


def _times(dx: Any, factor: Any) -> Any:
    """Multiply a tangent by a partial derivative."""
    if dx is None:
        return None
    product = np.minimum(np.maximum(dx * factor, -_LARGEST), _LARGEST)
    return np.where((dx == 0.0) | (factor == 0.0), 0.0, product)


def _over(dx: Any, divisor: Any) -> Any:
    if dx is None:
        return None
    return np.where((dx == 0.0) | (np.abs(divisor) == np.inf), 0.0, dx / divisor)


def _plus(dx: Any, dy: Any) -> Any:
    return dy if dx is None else dx if dy is None else dx + dy


def _minus(dx: Any, dy: Any) -> Any:
    return _plus(dx, None if dy is None else -dy)


def _choose(condition: Any, dx: Any, dy: Any) -> Any:
    if dx is None and dy is None:
        return None
    return np.where(condition, 0.0 if dx is None else dx, 0.0 if dy is None else dy)


def _abs_rule(z: Any, x: Any, dx: Any) -> Any:
    return _choose(x == 0.0, None, _choose(x < 0.0, -dx, dx))


def _power_rule(z: Any, x: Any, dx: Any, y: Any, dy: Any) -> Any:
    if dx is not None:  # the factor y makes it 0 where y is 0, at x = 0 too
        dx = _times(_times(dx, y), np.power(x, np.subtract(y, 1.0)))
    if dy is not None:
        dy = _times(dy, np.where(x == 0.0, 0.0, z * np.log(x)))
    return _plus(dx, dy)


def _remainder_rule(z: Any, x: Any, dx: Any, y: Any, dy: Any) -> Any:
    return _minus(dx, None if dy is None else _times(dy, np.floor_divide(x, y)))


def _minimum_rule(z: Any, x: Any, dx: Any, y: Any, dy: Any) -> Any:
    return _choose((x <= y) | np.isnan(x), dx, dy)


def _maximum_rule(z: Any, x: Any, dx: Any, y: Any, dy: Any) -> Any:
    return _choose((x >= y) | np.isnan(x), dx, dy)


def _where_rule(z: Any, x: Any, dx: Any, y: Any, dy: Any, w: Any, dw: Any) -> Any:
    return _choose(x, dy, dw)


def _clip_rule(z: Any, x: Any, dx: Any, low: Any, dlow: Any, high: Any, dhigh: Any) -> Any:
    raised = np.maximum(x, low)
    return _minimum_rule(z, raised, _maximum_rule(z, x, dx, low, dlow), high, dhigh)


_RULES: dict[Any, Any] = {
    # z = f(x): from z, x and the tangent of x that of z
    np.negative: lambda z, x, dx: -dx,
    np.positive: lambda z, x, dx: dx,
    np.absolute: _abs_rule,
    np.fabs: _abs_rule,
    np.square: lambda z, x, dx: _times(dx, x + x),
    np.sqrt: lambda z, x, dx: _over(dx, z + z),
    np.exp: lambda z, x, dx: _times(dx, z),
    np.exp2: lambda z, x, dx: _times(dx, z * math.log(2)),
    np.expm1: lambda z, x, dx: _times(dx, z + 1.0),
    np.log: lambda z, x, dx: _over(dx, x),
    np.log1p: lambda z, x, dx: _over(dx, x + 1.0),
    np.tanh: lambda z, x, dx: _times(dx, (z + 1.0) * (1.0 - z)),
    np.sin: lambda z, x, dx: _times(dx, np.cos(x)),
    np.cos: lambda z, x, dx: -_times(dx, np.sin(x)),
    # z = f(x, y)
    np.add: lambda z, x, dx, y, dy: _plus(dx, dy),
    np.subtract: lambda z, x, dx, y, dy: _minus(dx, dy),
    np.multiply: lambda z, x, dx, y, dy: _plus(_times(dx, y), _times(dy, x)),
    np.true_divide: lambda z, x, dx, y, dy: _over(
        _minus(dx, None if dy is None else _times(dy, z)), y
    ),
    np.remainder: _remainder_rule,
    np.power: _power_rule,
    np.minimum: _minimum_rule,
    np.maximum: _maximum_rule,
    # the derivative is 0 wherever there is one
    **dict.fromkeys((np.floor, np.ceil, np.trunc, np.rint, np.sign, np.floor_divide)),
    # no floats
    **dict.fromkeys((np.less, np.less_equal, np.greater, np.greater_equal, np.equal)),
    **dict.fromkeys((np.not_equal, np.logical_and, np.logical_or, np.logical_not)),
    **dict.fromkeys((np.isfinite, np.isnan, np.isinf)),
}
"""How each function is differentiated; None for those whose result is plain."""


class _Bounded:
    """A bound array: it can be indexed, which never fails but is noted where out of range."""

    def __init__(
        self, label: str, array: NDArray[Any], misses: list[tuple[str, NDArray[np.bool_]]]
    ) -> None:
        self._label = label
        self._array = array
        self._misses = misses
        self.shape, self.ndim, self.size = array.shape, array.ndim, array.size

    def __len__(self) -> int:
        return len(self._array)

    def _all_of_it(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"expected {self._label} to be indexed, got all of it")

    __array__ = __array_ufunc__ = _all_of_it

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != self.ndim:
            raise TypeError(f"expected {self.ndim} indices of {self._label}, got {len(indices)}")
        miss: Any = False
        inside = []
        for x, n in zip(indices, self.shape, strict=True):
            if isinstance(x, np.ndarray | np.generic):
                kind, got = x.dtype.kind, str(x.dtype)
            else:
                kind, got = "i" if type(x) is int else "", type(x).__name__
            if kind not in ("i", "u"):
                raise TypeError(f"expected integers as indices of {self._label}, got {got}")
            miss = miss | (x < -n) | (x >= n)
            inside.append(np.clip(np.where(x < 0, x + n, x), 0, max(n - 1, 0)))
        self._misses.append((self._label, np.asarray(miss)))
        self.inside = tuple(inside)
        if self.size == 0:
            return np.zeros(np.broadcast_shapes(*map(np.shape, inside)), self._array.dtype)
        return np.asarray(self._array[tuple(inside)]).view(_Array)


class _Learnt:
    """A bound value of which one reading after the other is the variable to differentiate by.

    Attributes
    ----------
    wanted, passed : int
        The number of the reading that is; how many there have been.
    index : tuple of ndarray
        Where it read.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self.wanted = self.passed = 0
        self.index: tuple[Any, ...] = ()
        if isinstance(value, _Bounded):
            self.shape, self.ndim, self.size = value.shape, value.ndim, value.size
            self.__array__ = value.__array__

    def __len__(self) -> int:
        return len(self._value)

    __array_ufunc__ = None  # an array that meets it asks it, and finds no operator

    def _read(self, x: Any, index: tuple[Any, ...]) -> Any:
        self.passed += 1
        if self.passed - 1 != self.wanted:
            return x
        self.index = index
        x = np.asarray(x, np.float64).view(_Array)
        return Dual(x, np.ones_like(x))

    def number(self) -> Any:
        """Read a number."""
        return self._read(self._value, ())

    def __getitem__(self, index: Any) -> Any:
        found = self._value[index]
        return self._read(found, self._value.inside)


def _place(error: BaseException, function: types.FunctionType) -> str:
    """Say where in a user's file an error arose."""
    step, found = error.__traceback__, None
    while step is not None:
        if step.tb_frame.f_code.co_filename == function.__code__.co_filename:
            found = step
        step = step.tb_next
    if found is None:
        return f" (in {function.__name__})"
    code = found.tb_frame.f_code
    source = linecache.getline(code.co_filename, found.tb_lineno).strip()
    place = f" (line {found.tb_lineno} of {code.co_filename}, in {code.co_name}"
    return f"{place}: {source})" if source else f"{place})"


# Python's functions of numbers, for arrays


def _python_min(*args: Any) -> Any:
    least, *others = args if len(args) > 1 else args[0]
    for x in others:
        least = np.where(x < least, x, least)
    return least


def _python_max(*args: Any) -> Any:
    most, *others = args if len(args) > 1 else args[0]
    for x in others:
        most = np.where(x > most, x, most)
    return most


def _real(x: Any) -> Any:
    return np.multiply(x, 1.0)  # floats have the precision of the call, whatever they are called


_ON_ARRAYS: dict[Any, Any] = {min: _python_min, max: _python_max, float: _real}
_ON_ARRAYS |= {np.float32: _real, np.float64: _real}
_ON_ARRAYS |= {
    getattr(math, name): getattr(np, name)
    for name in (
        *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tanh", "floor", "fabs"),
        *("isfinite", "isnan", "isinf"),
    )
}
_ON_ARRAYS[math.pow] = np.power

_BUILTINS = {**vars(builtins), "min": _python_min, "max": _python_max, "float": _real}


class _Module:
    """A module of which the functions work on arrays."""

    def __init__(self, module: types.ModuleType, known: dict[Any, Any]) -> None:
        self._module, self._known = module, known

    def __getattr__(self, name: str) -> Any:
        return _replaced(getattr(self._module, name), self._known)


def elementwise(
    function: types.FunctionType, known: dict[Any, Any] | None = None
) -> types.FunctionType:
    """Return a function of the same code whose functions of numbers are functions of arrays.

    The code is that of the user; what differs is where it finds the names ``min``, ``max``,
    ``float``, the functions of `math`, ``np.float32``, and the functions that it calls.

    Examples
    --------
    >>> def clamped(score, b, h, q_idx, kv_idx): return min(score, 1.0)
    >>> elementwise(clamped)(np.array([0.0, 2.0]), 0, 0, 0, 0).tolist()
    [0.0, 1.0]
    """
    known = {} if known is None else known
    if function in known:
        return known[function]  # type: ignore[no-any-return]
    scope = {**function.__globals__, "__builtins__": _BUILTINS}
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    twin = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, cells
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    known[function] = twin
    for name in _names(function.__code__):
        if name in scope:
            scope[name] = _replaced(scope[name], known)
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _replaced(original.cell_contents, known)
    return twin


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _replaced(value: Any, known: dict[Any, Any]) -> Any:
    """Return what stands for a captured value on arrays."""
    plain = getattr(value, "py_func", value)
    if isinstance(plain, types.FunctionType):
        ours = plain.__module__ is not None and plain.__module__.split(".")[0] == "numpy"
        return plain if ours else elementwise(plain, known)
    if isinstance(value, types.ModuleType):
        return _Module(value, known)
    if isinstance(value, type | types.BuiltinFunctionType):
        return _ON_ARRAYS.get(value, value)
    return value
