"""Records in memory: what kernels are given and leave behind, by the names of the fields."""

from __future__ import annotations

from dataclasses import dataclass
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

    In a kernel ``view(struct, address)`` has an attribute for each field. A plain type for it,
    unlike NumPy's records in Numba, keeps the names of compiled functions short.

    Attributes
    ----------
    name : str
        Name of the type, unique.
    integers, reals : tuple of str
        Names of the int64 fields, and of the float64 fields that follow.
    """

    name: str
    integers: tuple[str, ...]
    reals: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The record as a NumPy dtype."""
        return np.dtype([(n, "i8") for n in self.integers] + [(n, "f8") for n in self.reals])

    def field(self, name: str) -> tuple[int, Any]:
        """Return the byte offset and the Numba type of a field; KeyError if there is none."""
        if name in self.integers:
            return 8 * self.integers.index(name), types.int64
        if name in self.reals:
            return 8 * (len(self.integers) + self.reals.index(name)), types.float64
        raise KeyError(name)


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
    return emit_load(builder, builder.add(value, I64(offset)), LLVM[ty])


@lower_setattr_generic(ViewType)
def _view_set(context: Any, builder: Any, sig: Any, args: Any, attr: str) -> Any:
    offset, ty = sig.args[0].struct.field(attr)
    emit_store(
        builder, builder.add(args[0], I64(offset)), context.cast(builder, args[1], sig.args[1], ty)
    )


@intrinsic
def view(typingctx: Any, struct: Any, address: Any) -> Any:
    """Return the record of type `struct` at a byte address (an int64)."""
    return ViewType(struct.struct)(struct, types.int64), lambda context, b, sig, args: args[1]
