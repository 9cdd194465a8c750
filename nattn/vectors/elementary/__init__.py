"""The elementary functions, written with the operators of `Vector`.

Every function takes and returns `Vector` and works for any width, in float32 and float64. `lanes`
offers them to Numba under NumPy's names, `dual` differentiates them.
"""

from .arithmetic import (
    ceil,
    floor,
    floor_divide,
    isfinite,
    isinf,
    isnan,
    maximum,
    minimum,
    python_max,
    python_min,
    remainder,
    rint,
    sign,
    trunc,
)
from .exponentials import exp, exp2, exp2_nonpositive, expm1, tanh
from .formats import clamp
from .logarithms import log, log1p
from .powers import constant_power, int_power, power
from .trigonometric import cos, sin

__all__ = [
    "ceil",
    "clamp",
    "constant_power",
    "cos",
    "exp",
    "exp2",
    "exp2_nonpositive",
    "expm1",
    "floor",
    "floor_divide",
    "int_power",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "power",
    "python_max",
    "python_min",
    "remainder",
    "rint",
    "sign",
    "sin",
    "tanh",
    "trunc",
]
