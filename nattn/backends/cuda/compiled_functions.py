"""Users' functions as device functions: compiled on lanes of width 1, which are plain scalars."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from numba import types
from numba.core.errors import TypingError

from ...functions import on_lanes
from ...functions.on_lanes import Tools
from ...vectors import dual, lanes
from ...vectors.lanes import INDEX_BOUND, Lanes, Tile
from .specialization import Evaluators, Functions
from .target import device, write_int64


def evaluators(functions: Functions) -> Evaluators:
    """Return the users' functions of a call."""
    tile, t = Tile(functions.dtype, 1, 1, 1), intrinsics(functions.index)
    modify, derive, visible, first = [], [], None, 0
    for n, source in enumerate(functions.score_mods):
        f, following = on_lanes.evaluator(source.tree, first, t.tools, t.as_score)
        modify.append(_modifier(tile, t, f, n))
        if functions.derive:
            f, _ = on_lanes.evaluator(source.tree, first, t.tools, t.as_dual)
            derive.append(_derivative(tile, t, f, n))
        first = following
    if functions.mask_mod is not None:
        f, _ = on_lanes.evaluator(functions.mask_mod.tree, first, t.tools, t.as_score)
        visible = _mask(tile, t, f, len(functions.score_mods))
    return Evaluators(modify, derive, visible)


@functools.cache
def intrinsics(index: str) -> Any:
    """Return the intrinsics of `lanes` and `dual` as numba.cuda knows them.

    Types and their operators are common to both targets; an intrinsic is of one.
    """
    from numba.cuda.extending import intrinsic

    _teach_conversions()

    def twin(original: Any) -> Any:
        return intrinsic(original._defn)

    def uniform_index(typingctx, tile, x):
        to = Lanes(getattr(types, index), 1, tile.real.dtype, INDEX_BOUND)

        def codegen(context, b, sig, args):
            value = context.cast(b, args[1], sig.args[1], types.int64)
            return context.cast(b, value, types.int64, to.dtype)

        return to(tile, types.unliteral(x)), codegen

    as_condition = twin(lanes.as_condition)
    return SimpleNamespace(
        tools=Tools(device, device, twin(lanes.call_arguments), as_condition),
        index=intrinsic(uniform_index),
        as_condition=as_condition,
        value=twin(dual.value),
        **{
            name: twin(getattr(lanes, name))
            for name in ("as_score", "splat", "new_outside", "clear_outside", "outside_bits")
        },
        **{name: twin(getattr(dual, name)) for name in ("seed", "as_dual", "chain")},
        number=intrinsic(_number),
    )


@functools.cache
def _teach_conversions() -> None:
    """Teach numba.cuda ``np.float32(lanes)``: of a number's class it knows its own uses alone."""
    from numba.cuda.extending import infer_getattr
    from numba.cuda.typing.builtins import NumberClassAttribute
    from numba.cuda.typing.templates import make_callable_template

    def converted(x):
        return x.of(x.real) if isinstance(x, Lanes) else x if isinstance(x, dual.Dual) else None

    def resolve(self, number_class):
        number = number_class.instance_type
        theirs = NumberClassAttribute(self.context).resolve___call__(number_class)
        ours = make_callable_template(key=number, typer=converted)
        return types.Function((ours, *theirs.templates))

    for number in (types.float32, types.float64):
        members = {"key": types.NumberClass(number), "resolve___call__": resolve}
        infer_getattr(type(f"Conversion_{number}", (NumberClassAttribute,), members))


def _number(typingctx, x):
    """Return lanes of width 1 as the scalar that they are."""
    if not isinstance(x, Lanes) or x.width != 1:
        raise TypingError(f"expected lanes of width 1, got {x}")
    return x.dtype(x), lambda context, b, sig, args: args[0]


def _modifier(tile: Tile, t: Any, evaluate: Any, n: int) -> Any:
    new_outside, clear_outside, outside_bits = t.new_outside, t.clear_outside, t.outside_bits
    splat, index, as_score, number = t.splat, t.index, t.as_score, t.number

    def modify(a, b, h, pos, key, s):
        error_flags = new_outside(tile)
        clear_outside(tile, error_flags)
        args = splat(tile, s), index(tile, b), index(tile, h), index(tile, pos), index(tile, key)
        result = number(as_score(tile, evaluate(tile, a.words_ptr, error_flags, args)))
        if outside_bits(tile, error_flags):
            write_int64(a.error_flags_ptr + 8 * n, 1)
        return result

    return device(modify)


def _derivative(tile: Tile, t: Any, evaluate: Any, n: int) -> Any:
    new_outside, clear_outside, outside_bits = t.new_outside, t.clear_outside, t.outside_bits
    splat, index, as_dual, number = t.splat, t.index, t.as_dual, t.number
    seed, value, chain = t.seed, t.value, t.chain

    def derive(a, b, h, pos, key, s, slope):
        error_flags = new_outside(tile)
        clear_outside(tile, error_flags)
        x = seed(splat(tile, s))
        args = x, index(tile, b), index(tile, h), index(tile, pos), index(tile, key)
        r = as_dual(tile, evaluate(tile, a.words_ptr, error_flags, args))
        if outside_bits(tile, error_flags):
            write_int64(a.error_flags_ptr + 8 * n, 1)
        return number(value(tile, r)), number(chain(tile, splat(tile, slope), r))

    return device(derive)


def _mask(tile: Tile, t: Any, evaluate: Any, n: int) -> Any:
    new_outside, clear_outside, outside_bits = t.new_outside, t.clear_outside, t.outside_bits
    index, as_condition, number = t.index, t.as_condition, t.number

    def visible(a, b, h, pos, key):
        error_flags = new_outside(tile)
        clear_outside(tile, error_flags)
        args = index(tile, b), index(tile, h), index(tile, pos), index(tile, key)
        result = number(as_condition(tile, evaluate(tile, a.words_ptr, error_flags, args)))
        if outside_bits(tile, error_flags):
            write_int64(a.error_flags_ptr + 8 * n, 1)
        return result

    return device(visible)
