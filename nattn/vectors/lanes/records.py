"""Records in memory: what kernels are given and leave behind, by the names of the fields."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import types
from numba.core.imputils import lower_constant
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
    typeof_impl,
)

from ..vector import I64
from .memory import emit_load, emit_store
from .types import LLVM


@dataclass(frozen=True)
class Struct:
    """A record of 8-byte fields at some address, which kernels read and write by name.

    In a kernel ``view(struct, address)`` has an attribute for each field; that of a record within a
    record is a view of it. A plain type for it, unlike NumPy's records in Numba, keeps the names of
    compiled functions short. On the host `pack` makes one of values by name.

    Attributes
    ----------
    name : str
        Name of the type, unique.
    integers, reals : tuple
        Names of the int64 fields, and of the float64 fields that follow. Among the first,
        ``(name, Struct)`` is a record within this one, of integers alone.
    """

    name: str
    integers: tuple[str | tuple[str, Struct], ...]
    reals: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return (*(x if isinstance(x, str) else x[0] for x in self.integers), *self.reals)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The record as a NumPy dtype."""
        integers = [(x, "i8") if isinstance(x, str) else (x[0], x[1].dtype) for x in self.integers]
        return np.dtype([*integers, *((n, "f8") for n in self.reals)])

    @cached_property
    def size(self) -> int:
        """The number of bytes."""
        return self.dtype.itemsize

    @cached_property
    def _places(self) -> dict[str, tuple[int, Any]]:
        found: dict[str, tuple[int, Any]] = {}
        records = dict(x for x in self.integers if not isinstance(x, str))
        for name, (dtype, offset, *_) in (self.dtype.fields or {}).items():
            number = types.float64 if dtype.kind == "f" else types.int64
            found[name] = offset, ViewType(records[name]) if name in records else number
        return found

    def field(self, name: str) -> tuple[int, Any]:
        """Return the byte offset and the Numba type of a field; KeyError if there is none."""
        return self._places[name]

    def pack(self, fields: Mapping[str, Any]) -> bytes:
        """Return the record as bytes.

        Parameters
        ----------
        fields : mapping
            A value for each name: a number, or for a record within this one a tuple of integers.

        Raises
        ------
        TypeError
            If a field is missing, or there is one that the record does not have.

        Examples
        --------
        >>> pair = Struct("Pair", ("first", "second"))
        >>> outer = Struct("Outer", ("a", ("b", pair)), ("c",))
        >>> outer.pack({"c": 0.5, "b": (2, 3), "a": 1}).hex(" ", 8)
        '0100000000000000 0200000000000000 0300000000000000 000000000000e03f'
        """
        try:
            values = self._in_order(fields)
        except KeyError:
            values = ()
        if len(fields) != len(values):
            wrong = sorted(set(fields) ^ set(self.names))
            raise TypeError(
                f"{self.name}: expected a value for each of its fields and no other, got too many "
                f"or too few of {', '.join(wrong)}"
            )
        words: list[Any] = []
        for x in values:
            if type(x) is tuple:
                words += x
            else:
                words.append(x)
        return self._packed(*words)

    @cached_property
    def _in_order(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        getter: Any = operator.itemgetter(*self.names)
        if len(self.names) == 1:
            return lambda fields: (getter(fields),)
        return getter  # type: ignore[no-any-return]

    @cached_property
    def _packed(self) -> Callable[..., bytes]:
        n_reals = len(self.reals)
        return struct.Struct(f"{self.size // 8 - n_reals}q{n_reals}d").pack


class StructType(types.Opaque):
    """The Numba type of a `Struct` itself."""

    def __init__(self, struct: Struct) -> None:
        self.struct = struct
        super().__init__(name=f"Struct({struct.name})")


class ViewType(types.Type):
    """The Numba type of a `Struct` at an address."""

    def __init__(self, struct: Struct) -> None:
        self.struct = struct
        super().__init__(name=f"View({struct.name})")


@register_model(ViewType)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: ViewType) -> None:
        super().__init__(dmm, fe_type, I64)


@typeof_impl.register(Struct)
def _typeof_struct(val: Struct, c: Any) -> StructType:
    return StructType(val)


register_model(StructType)(models.OpaqueModel)


@lower_constant(StructType)
def _constant_struct(context: Any, builder: Any, ty: Any, pyval: Any) -> Any:
    return context.get_dummy_value()


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = ViewType

    def generic_resolve(self, typ: Any, attr: str) -> Any:
        try:
            return typ.struct.field(attr)[1]
        except KeyError:
            return None


@lower_getattr_generic(ViewType)
def _view_get(context: Any, builder: Any, typ: Any, value: Any, attr: str) -> Any:
    offset, ty = typ.struct.field(attr)
    if isinstance(ty, ViewType):
        return builder.add(value, I64(offset))
    return emit_load(builder, builder.add(value, I64(offset)), LLVM[ty])


@lower_setattr_generic(ViewType)
def _view_set(context: Any, builder: Any, sig: Any, args: Any, attr: str) -> Any:
    offset, ty = sig.args[0].struct.field(attr)
    emit_store(
        builder, builder.add(args[0], I64(offset)), context.cast(builder, args[1], sig.args[1], ty)
    )


@intrinsic
def address_of(typingctx: Any, record: Any) -> Any:
    """Return the byte address of a record."""
    return types.int64(record), lambda context, b, sig, args: args[0]


@intrinsic
def view(typingctx: Any, struct: Any, address: Any) -> Any:
    """Return the record of type `struct` at a byte address (an int64)."""
    return ViewType(struct.struct)(struct, types.int64), lambda context, b, sig, args: args[1]
