"""The types of vectors: `Lanes`, the values of one; the `Tile`, which kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
)

from ..storage import SIZES
from ..vector import I32, I64, vector_type

LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: I32,
    types.int64: I64,
    types.boolean: ir.IntType(1),
}
"""How a scalar of each type that lanes can have is written in LLVM."""

INT32 = 1 << 31
"""The largest magnitude of an int32: that of its least number."""


class Lanes(types.Type):
    """The Numba type of `width` values of one scalar type in one SIMD value.

    Lanes of width 1 stand for a scalar that is the same in all lanes: they meet wider lanes by
    broadcast, and like those they are no condition that an ``if`` could test.

    Parameters
    ----------
    dtype : numba type
        float32, float64, int32, int64 or boolean.
    width : int
        Number of lanes.
    real : numba type, optional
        The float type that a division or a function such as exp makes of integer lanes; for float
        lanes it is `dtype` itself. Eight lanes of int32 alone would not tell.
    bound : int, optional
        The largest magnitude that int32 lanes can have. Where the result of an operation could
        exceed 32 bits it is computed in 64: nothing wraps silently, and what is known to be small
        stays in the narrow vectors.
    """

    def __init__(self, dtype: Any, width: int, real: Any = None, bound: int | None = None) -> None:
        self.dtype = dtype
        self.width = width
        self.real = dtype if isinstance(dtype, types.Float) else (real or types.float64)
        self.bound = None
        if dtype == types.int32:
            self.bound = INT32 if bound is None else min(bound, INT32)
        limit = f", at most {self.bound}" if self.bound not in (None, INT32) else ""
        super().__init__(name=f"Lanes({dtype} x {width}, {self.real}{limit})")

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two lane types one."""
        return (self.dtype, self.width, self.real, self.bound)

    def of(self, dtype: Any, bound: int | None = None) -> Lanes:
        """Return the type of as many lanes of another scalar type."""
        return Lanes(dtype, self.width, self.real, bound)

    @property
    def llvm(self) -> Any:
        """The LLVM vector type; of one lane, the scalar type."""
        return vector_type(LLVM[self.dtype], self.width)

    def unify(self, typingctx: Any, other: Any) -> Lanes | None:
        """Return the type of a variable that is assigned both."""
        to = common((self, other))
        # Not the larger bound: in a loop it would grow by each assignment until it is full.
        return to.of(to.dtype) if to is not None else None


def _is_scalar(t: Any) -> bool:
    return isinstance(t, types.Integer | types.Float | types.Boolean)


def common(args: tuple[Any, ...]) -> Lanes | None:
    """Return the lane type in which lanes and scalars meet; None if that is not ours to say.

    Floats take the kernel's own float type, whatever a scalar's type was; integers take 64 bits
    as soon as one of them needs 64.
    """
    lanes = [a for a in args if isinstance(a, Lanes)]
    if not lanes or not all(isinstance(a, Lanes) or _is_scalar(a) for a in args):
        return None
    widest = max(lanes, key=lambda x: x.width)
    if any(x.width not in (1, widest.width) or x.real != widest.real for x in lanes):
        return None
    kinds = [a.dtype if isinstance(a, Lanes) else a for a in args]
    if any(isinstance(k, types.Float) for k in kinds):
        return widest.of(widest.real)
    if all(isinstance(k, types.Boolean) for k in kinds):
        return widest.of(types.boolean)
    bound = max(map(bound_of, args))
    return widest.of(types.int32, bound) if bound <= INT32 else widest.of(types.int64)


def bound_of(ty: Any) -> int:
    """Return the largest magnitude of an integer or boolean, scalar or lanes."""
    if isinstance(ty, types.IntegerLiteral):
        value = int(ty.literal_value)
        return abs(value) + (value == INT32)  # of which only the negative fits 32 bits
    if isinstance(ty, Lanes) and ty.bound is not None:
        return ty.bound
    kind = ty.dtype if isinstance(ty, Lanes) else ty
    if isinstance(kind, types.Boolean):
        return 1
    return 1 << (kind.bitwidth - kind.signed) if isinstance(kind, types.Integer) else 0


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Lanes) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


PRODUCTS = ("fma", "pairs", "emulated pairs")
"""How a tile multiplies: by fused multiply-adds, or by dot products of pairs of bfloat16 numbers,
which an instruction computes (`pairs`), or other instructions bit for bit as that one does."""


@dataclass(frozen=True)
class Tile:
    """The vectors and the register tile that a kernel is compiled for.

    Attributes
    ----------
    dtype : str
        What is computed in: "float32" or "float64".
    W : int
        Lanes of one vector.
    MV : int
        Vectors side by side: a tile is ``MV * W`` lanes wide.
    NR : int
        Broadcast scalars of the outer product: ``MV * NR`` vectors accumulate in registers.
    storage : str
        What the arrays are stored as that a kernel reads and writes for its caller: "float16",
        "bfloat16", "float32" or "float64", of keys and values also "int8"; by default as `dtype`.
    product : str
        One of `PRODUCTS`. Pairs are of bfloat16 numbers, and computed in float32.
    """

    dtype: str
    W: int
    MV: int
    NR: int
    storage: str = ""
    product: str = "fma"

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", self.storage or self.dtype)

    @property
    def lanes(self) -> int:
        """Lanes of the whole tile, one query row each."""
        return self.W * self.MV

    @property
    def itemsize(self) -> int:
        """Bytes of one number that is computed with, and of one word."""
        return SIZES[self.dtype]

    @property
    def storage_size(self) -> int:
        """Bytes of one element of the arrays that a kernel reads and writes for its caller."""
        return SIZES[self.storage]

    @property
    def per_word(self) -> int:
        """Numbers in a word: in what a product takes, in scratch, as one scalar or lane."""
        return 1 if self.product == "fma" else 2

    @property
    def compute(self) -> Tile:
        """The tile whose arrays are stored as what is computed in."""
        return Tile(self.dtype, self.W, self.MV, self.NR)


class TileType(types.Opaque):
    """The Numba type of a `Tile`; the type is the value."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        super().__init__(name=repr(tile))

    @property
    def real(self) -> Lanes:
        """Float lanes of this tile."""
        return Lanes(getattr(types, self.tile.dtype), self.tile.W)


@typeof_impl.register(Tile)
def _typeof_tile(val: Tile, c: Any) -> TileType:
    return TileType(val)


register_model(TileType)(models.OpaqueModel)


@lower_constant(TileType)
def _constant_tile(context: Any, builder: Any, ty: Any, pyval: Any) -> Any:
    return context.get_dummy_value()


_NUMBERS = ("W", "MV", "NR", "lanes", "itemsize", "storage_size", "per_word")


@infer_getattr
class _TileAttributes(AttributeTemplate):
    key = TileType

    def generic_resolve(self, typ: Any, attr: str) -> Any:
        if attr == "compute":
            return TileType(typ.tile.compute)
        return types.int64 if attr in _NUMBERS else None


@lower_getattr_generic(TileType)
def _tile_attribute(context: Any, builder: Any, typ: Any, value: Any, attr: str) -> Any:
    return context.get_dummy_value() if attr == "compute" else I64(getattr(typ.tile, attr))
