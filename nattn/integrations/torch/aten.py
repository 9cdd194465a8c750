"""Operations of torch on single numbers, and the NumPy-style text that says the same for nattn.

`text_of` writes one. What it has no twin for is refused, never replaced by something similar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Number:
    """One number for each pair of query and key, as text: a name, an element or a literal.

    Attributes
    ----------
    text : str
        Binds more tightly than any operator.
    kind : {"float", "int", "bool"}
        What it is to torch.
    literal : bool
        Whether it is written out, and so the same for all pairs.
    """

    text: str
    kind: str
    literal: bool = False


def kind_of(dtype: torch.dtype) -> str | None:
    """Return the kind of a dtype; None of complex numbers."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float"
    return None if dtype.is_complex else "int"


def literal(value: bool | int | float) -> Number:
    """Write out a number."""
    if isinstance(value, bool):
        return Number(str(value), "bool", True)
    if isinstance(value, int):
        return Number(f"({value})" if value < 0 else str(value), "int", True)
    if math.isnan(value):
        return Number("np.nan", "float", True)
    if math.isinf(value):
        return Number("np.inf" if value > 0 else "(-np.inf)", "float", True)
    return Number(f"({value!r})" if math.copysign(1.0, value) < 0 else repr(value), "float", True)


Write = Callable[..., str | None]


def _counted(x: Number) -> str:
    """Write a number, of bools 0 or 1: NumPy adds bools as torch does not."""
    return f"np.where({x.text}, 1, 0)" if x.kind == "bool" else x.text


def _true(x: Number) -> str:
    return x.text if x.kind == "bool" else f"({x.text} != 0)"


def _numeric(template: str) -> Write:
    """Return what fills a template with numbers."""
    count = template.count("{}") or 1 + max(n for n in range(3) if f"{{{n}}}" in template)

    def write(kind: str, *args: Any) -> str | None:
        if not all(isinstance(x, Number) for x in args[:count]) or _any_given(args[count:]):
            return None
        return template.format(*map(_counted, args[:count]))

    return write


def _any_given(rest: tuple[Any, ...]) -> bool:
    return any(x is not None for x in rest)


def _whole(function: str) -> Write:
    """Return what rounds floats to whole ones, and leaves integers as they are."""

    def write(kind: str, x: Number, *rest: Any) -> str | None:
        if rest:  # decimals
            return None
        return _counted(x) if x.kind != "float" else f"np.{function}({x.text})"

    return write


def _scaled(operator: str) -> Write:
    def write(kind: str, x: Number, y: Number, alpha: Number) -> str:
        times = "" if alpha.text == "1" else f"{alpha.text} * "
        return f"{_counted(x)} {operator} {times}{_counted(y)}"

    return write


def _rsub(kind: str, x: Number, y: Number, alpha: Number) -> str | None:
    return f"{_counted(y)} - {_counted(x)}" if alpha.text == "1" else None


def _div(kind: str, x: Number, y: Number, mode: str | None = None) -> str:
    a, b = _counted(x), _counted(y)
    if mode is None:
        return f"{a} / {b}"
    if mode == "floor":
        return f"{a} // {b}"
    if kind == "float":
        return f"np.trunc({a} / {b})"
    return f"np.where(({a} < 0) ^ ({b} < 0), -(abs({a}) // abs({b})), abs({a}) // abs({b}))"


def _pow(kind: str, x: Number, y: Number) -> str:
    exponent = _counted(y)
    if y.literal and y.kind == "float" and x.kind == "float":
        value = float(eval(y.text, {"np": math}))  # math has inf and nan, too
        if value.is_integer() and abs(value) <= 4:  # which may be but products
            exponent = literal(int(value)).text
    return f"{_counted(x)} ** {exponent}"


def _log2(kind: str, x: Number) -> str:
    a, log2 = _counted(x), f"np.log({_counted(x)}) * {1 / math.log(2)!r}"
    if x.kind == "float":
        return log2
    whole = f"np.rint({log2})"  # of a power of two it is the logarithm, which a floor may follow
    return f"np.where(np.exp2({whole}) == {a}, {whole}, {log2})"


def _clamp(kind: str, x: Number, low: Number | None = None, high: Number | None = None) -> str:
    text = _counted(x)
    if low is not None:
        text = f"np.maximum({text}, {_counted(low)})"
    return text if high is None else f"np.minimum({text}, {_counted(high)})"


def _where(kind: str, condition: Number, x: Number, y: Number) -> str:
    a, b = (x.text, y.text) if kind == "bool" else (_counted(x), _counted(y))
    return f"np.where({_true(condition)}, {a}, {b})"


def _bitwise(operator: str) -> Write:
    def write(kind: str, x: Number, y: Number) -> str:
        if kind == "bool":
            return f"{x.text} {operator} {y.text}"
        return f"{_counted(x)} {operator} {_counted(y)}"

    return write


def _logical(operator: str) -> Write:
    return lambda kind, x, y: f"{_true(x)} {operator} {_true(y)}"


def _comparison(operator: str) -> Write:
    return lambda kind, x, y: f"{x.text} {operator} {y.text}"


def _same(kind: str, x: Number, *rest: Any) -> str:
    return x.text


def _cast(kind: str, x: Number, *rest: Any) -> str | None:
    """Write a conversion; among floats there is none, all have the precision of the call."""
    if kind == x.kind:
        return x.text
    if kind == "bool":
        return f"{x.text} != 0"
    if kind == "int":
        return _counted(x) if x.kind == "bool" else None
    return f"np.where({x.text}, 1.0, 0.0)" if x.kind == "bool" else f"np.float64({x.text})"


TWINS = {"approx::tanh": "aten::tanh"}
"""Operations that are not torch's own, but known to mean one of those. This one lets a GPU round as
it likes, and many softcaps are written with it; another library's `tanh` may be anything."""

VIEWS = frozenset(
    (
        *("alias", "broadcast_in_dim", "contiguous", "detach", "expand", "lift_fresh", "reshape"),
        *("squeeze", "unsqueeze", "view", "view_of", "_reshape_alias", "_unsafe_view"),
    )
)
"""Operations that leave a single number as it is, and share its memory."""

_UNARY = ("exp", "exp2", "expm1", "log", "log1p", "sqrt", "tanh", "sin", "cos", "sign")

_WRITE: dict[str, Write] = {
    **{name: _numeric(f"np.{name}({{}})") for name in _UNARY},
    **{name: _numeric(f"np.{name}({{}})") for name in ("isnan", "isinf", "isfinite")},
    **{name: _numeric(f"np.{name}({{}}, {{}})") for name in ("maximum", "minimum")},
    **{name: _whole(name) for name in ("floor", "ceil", "trunc")},
    **dict.fromkeys(VIEWS | {"clone"}, _same),
    **dict.fromkeys(("_to_copy", "convert_element_type", "to"), _cast),
    "abs": _numeric("abs({})"),
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "rsub": _rsub,
    "mul": _numeric("{} * {}"),
    "div": _div,
    "floor_divide": _numeric("{} // {}"),
    "remainder": _numeric("{} % {}"),
    "fmod": _numeric("np.where({0} < 0, -(abs({0}) % abs({1})), abs({0}) % abs({1}))"),
    "pow": _pow,
    "square": _numeric("np.square({})"),
    "neg": _numeric("-{}"),
    "reciprocal": _numeric("1.0 / {}"),
    "rsqrt": _numeric("1.0 / np.sqrt({})"),
    "sigmoid": _numeric("1.0 / (1.0 + np.exp(-{}))"),
    "relu": _numeric("np.where({0} <= 0, 0, {0})"),  # as in torch a NaN stays, the slope at 0 is 0
    "tan": _numeric("np.sin({0}) / np.cos({0})"),
    "log2": _log2,
    "log10": _numeric(f"np.log({{}}) * {1 / math.log(10)!r}"),
    "round": _whole("rint"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda kind, x, high: _clamp(kind, x, None, high),
    "where": _where,
    "masked_fill": lambda kind, x, mask, value: _where(kind, mask, value, x),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "logical_not": lambda kind, x: f"~{x.text}" if x.kind == "bool" else f"{x.text} == 0",
    "bitwise_not": lambda kind, x: f"~{x.text}",
    **{f"bitwise_{n}": _bitwise(s) for n, s in (("and", "&"), ("or", "|"), ("xor", "^"))},
    **{f"__{n}__": _bitwise(s) for n, s in (("and", "&"), ("or", "|"), ("xor", "^"))},
    "bitwise_left_shift": _numeric("{} << {}"),
    "bitwise_right_shift": _numeric("{} >> {}"),
    "__lshift__": _numeric("{} << {}"),
    "__rshift__": _numeric("{} >> {}"),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "eq": _comparison("=="),
    "ne": _comparison("!="),
}
"""For each operation what writes it, from the kind of the result and the arguments."""

_COMPOSED = (
    *("addcdiv", "addcmul", "celu", "elu", "frac", "gelu", "hardshrink", "hardsigmoid"),
    *("hardswish", "hardtanh", "leaky_relu", "lerp", "log_sigmoid_forward", "logaddexp"),
    *("logit", "mish", "nan_to_num", "sgn", "silu", "softplus", "softshrink", "threshold"),
    *("xlogy",),
)


def decompositions() -> Any:
    """Return how torch writes some of its functions by simpler ones."""
    return torch._decomp.get_decompositions([getattr(torch.ops.aten, x) for x in _COMPOSED])


def text_of(name: str, kind: str, args: list[Any]) -> str | None:
    """Write an operation.

    Parameters
    ----------
    name : str
        That of torch's operation, without namespace, overload and the mark of one in place.
    kind : {"float", "int", "bool"}
        What the result is.
    args : list
        Its arguments in order: `Number`, None, and what else torch passes.

    Returns
    -------
    str or None
        An expression; None if nattn has none that means the same.

    Examples
    --------
    >>> text_of("remainder", "int", [Number("q_idx", "int"), literal(-3)])
    'q_idx % (-3)'
    """
    write = _WRITE.get(name)
    return None if write is None else write(kind, *args)
