"""LLVM vectors with Python's operators.

`Vector` is an LLVM vector under construction: its operators emit instructions, so that a formula
of `elementary` or a rule of `dual` reads as such, for any width, in float32 and float64.

A vector of width 1 is a plain LLVM scalar: that is what each thread of a GPU works on, where there
are no others. What the two targets spell differently `Vector` knows, and nothing else here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

I32 = ir.IntType(32)

I64 = ir.IntType(64)


def on_gpu(b: Any) -> bool:
    """Whether code is for NVIDIA's processors, of which NVVM is the compiler."""
    return str(b.module.triple).startswith("nvptx")


def vector_type(element: Any, width: int) -> Any:
    """Return the LLVM type of so many numbers: of one, the scalar type itself."""
    return element if width == 1 else ir.VectorType(element, width)


def constant(ty: Any, x: Any) -> Any:
    """Return a number in all lanes of a vector type."""
    return ir.Constant(ty, [x] * ty.count if isinstance(ty, ir.VectorType) else x)


def insert(b: Any, vector: Any, x: Any, lane: int) -> Any:
    """Return a vector of which one lane is changed."""
    if isinstance(vector.type, ir.VectorType):
        return b.insert_element(vector, x, I32(lane))
    return x


def extract(b: Any, vector: Any, lane: Any) -> Any:
    """Return one lane of a vector; its number may be a value."""
    if isinstance(vector.type, ir.VectorType):
        return b.extract_element(vector, I32(lane) if isinstance(lane, int) else lane)
    return vector


_LIBDEVICE = {"fabs", "trunc", "rint", "fmod"}
"""Exact functions that NVVM has in its library, under the names of C, and not as intrinsics."""


class Vector:
    """An LLVM vector under construction: operators emit instructions."""

    def __init__(self, b: ir.IRBuilder, value: Any) -> None:
        self.b = b
        self.value = value
        self.type = value.type
        several = isinstance(value.type, ir.VectorType)
        self.width = value.type.count if several else 1
        self.element = value.type.element if several else value.type
        self.is_float = not isinstance(self.element, ir.IntType)

    def const(self, x: Any) -> Vector:
        """Broadcast a Python number (or pass a `Vector`) to this type."""
        if isinstance(x, Vector):
            return x
        if self.is_float:
            x = float(np.float32(x)) if isinstance(self.element, ir.FloatType) else float(x)
        return Vector(self.b, constant(self.type, x))

    def literal(self) -> Any:
        """Return the number that all lanes are known to hold, None if there is none."""
        if not isinstance(self.value, ir.Constant):
            return None
        return self.value.constant if self.width == 1 else self.value.constant[0].constant

    def _op(self, name: str, other: Any) -> Vector:
        prefix = "f" if self.is_float else ""
        emit = getattr(self.b, prefix + name)
        return Vector(self.b, emit(self.value, self.const(other).value))

    def __add__(self, o: Any) -> Vector:
        return self._op("add", o)

    def __sub__(self, o: Any) -> Vector:
        return self._op("sub", o)

    def __mul__(self, o: Any) -> Vector:
        return self._op("mul", o)

    def __truediv__(self, o: Any) -> Vector:
        return self._op("div", o)

    def __neg__(self) -> Vector:
        if not self.is_float:
            return self.const(0) - self
        if on_gpu(self.b):  # NVVM's LLVM is older than fneg
            return self.const(-0.0) - self
        return Vector(self.b, self.b.fneg(self.value))

    def _bitwise(self, name: str, o: Any) -> Vector:
        return Vector(self.b, getattr(self.b, name)(self.value, self.const(o).value))

    def __and__(self, o: Any) -> Vector:
        return self._bitwise("and_", o)

    def __or__(self, o: Any) -> Vector:
        return self._bitwise("or_", o)

    def __xor__(self, o: Any) -> Vector:
        return self._bitwise("xor", o)

    def __invert__(self) -> Vector:
        return Vector(self.b, self.b.not_(self.value))

    def __lshift__(self, o: Any) -> Vector:
        return self._bitwise("shl", o)

    def __rshift__(self, o: Any) -> Vector:
        return self._bitwise("ashr", o)

    def cmp(self, op: str, o: Any) -> Vector:
        """Compare as NumPy does: with a NaN only ``!=`` is true."""
        y = self.const(o).value
        if not self.is_float:
            return Vector(self.b, self.b.icmp_signed(op, self.value, y))
        emit = self.b.fcmp_unordered if op == "!=" else self.b.fcmp_ordered
        return Vector(self.b, emit(op, self.value, y))

    def where(self, x: Any, y: Any) -> Vector:
        """Select by this boolean vector; one of x and y may be a number."""
        x = x if isinstance(x, Vector) else y.const(x)
        y = x.const(y)
        return Vector(self.b, self.b.select(self.value, x.value, y.value))

    def call(self, name: str, *args: Any) -> Vector:
        """Call an LLVM intrinsic on vectors of this type."""
        if on_gpu(self.b) and name in _LIBDEVICE:
            return self._call(f"__nv_{name}" + "f" * isinstance(self.element, ir.FloatType), args)
        suffix = {"float": "f32", "double": "f64"}.get(str(self.element), str(self.element))
        if self.width > 1:
            suffix = f"v{self.width}{suffix}"
        return self._call(f"llvm.{name}.{suffix}", args)

    def _call(self, function: str, args: tuple[Any, ...]) -> Vector:
        operands = [self.value] + [self.const(a).value for a in args]
        ty = ir.FunctionType(self.type, [self.type] * len(operands))
        fn = cgutils.get_or_insert_function(self.b.module, ty, function)
        return Vector(self.b, self.b.call(fn, operands))

    def fma(self, y: Any, z: Any) -> Vector:
        """Return self * y + z, fused where the processor can."""
        return self.call("fma" if on_gpu(self.b) else "fmuladd", y, z)

    def rem(self, y: Vector) -> Vector:
        """Return the exact remainder of floats, with the sign of self: C's fmod."""
        if on_gpu(self.b):  # which has no instruction for it, and no C library
            return self.call("fmod", y)
        return Vector(self.b, self.b.frem(self.value, y.value))

    def abs(self) -> Vector:
        """Return the magnitude."""
        if self.is_float:
            return self.call("fabs")
        return self.cmp("<", 0).where(-self, self)

    def isnan(self) -> Vector:
        """Return where the value is NaN."""
        return self.cmp("!=", self)

    def bits(self) -> Vector:
        """Return the float's bits as an integer vector."""
        integer = I32 if isinstance(self.element, ir.FloatType) else I64
        return Vector(self.b, self.b.bitcast(self.value, vector_type(integer, self.width)))

    def as_float(self) -> Vector:
        """Return integer bits as a float vector."""
        real = ir.FloatType() if self.element == I32 else ir.DoubleType()
        return Vector(self.b, self.b.bitcast(self.value, vector_type(real, self.width)))

    def poly(self, coefficients: tuple[float, ...]) -> Vector:
        """Evaluate ``c[0] + c[1] x + ...``.

        Short polynomials by Horner's rule; long ones in pieces of four terms, which do not wait
        for each other. Measured: more pieces cost more multiplications than they save in time.
        """
        pieces = [coefficients]
        if len(coefficients) > 6:
            pieces = [coefficients[n : n + 4] for n in range(0, len(coefficients), 4)]
        values = []
        for piece in pieces:
            p = self.const(piece[-1])
            for c in reversed(piece[:-1]):
                p = p.fma(self, c)
            values.append(p)
        if len(values) > 1:
            square = self * self
            fourth = square * square
            while len(values) > 1:
                high, low = values.pop(), values.pop()
                values.append(high.fma(fourth, low))
        return values[0]
