"""Why a kernel cannot be compiled: which line of which user's function is at fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import types

from ...functions import on_lanes
from ...functions.on_lanes import Tools
from ...vectors import dual, lanes
from ...vectors.lanes import Tile
from . import operands, score
from .specialization import Functions
from .target import Kernel, record, store

ARGS = record("ScoreArgs", operands.FIELDS)
"""What a kernel gets that does nothing but change scores."""


def compile_alone(functions: Functions, cc: tuple[int, int] = (8, 0)) -> str:
    """Compile what happens to scores as a kernel of its own, which runs nothing; return its PTX."""
    found, number = score.steps(functions), getattr(np, functions.dtype)
    change, derive, write = found.change, found.change_and_derive, store(functions.dtype)

    # What they are called with is not known before the kernel runs, or nothing would be left.
    def modify(a):
        s = change(a, a.mask_b, a.mask_h, a.mask_i, a.bias_i, a.mask_j, number(a.threshold))
        write(a.error_flags_ptr, s)

    def modify_and_derive(a):
        s = number(a.threshold)
        s, slope = derive(a, a.mask_b, a.mask_h, a.mask_i, a.bias_i, a.mask_j, s)
        write(a.error_flags_ptr, s)
        write(a.error_flags_ptr + 8, slope)

    kernel = modify_and_derive if functions.derive else modify
    return Kernel(kernel, 32).ptx(ARGS(*(0,) * len(operands.FIELDS)), cc)


def explained(functions: Functions, error: Exception) -> Exception:
    """Return a TypeError that names the line of a user's function that cannot be compiled.

    Parameters
    ----------
    functions : Functions
        What a kernel was to be compiled for.
    error : Exception
        What came of it; returned as it is if no user's function is at fault.
    """
    nothing = replace(functions, score_mods=(), mask_mod=None, mask=False, bias=None)
    for name, source in zip(functions.names, functions.codes, strict=True):
        a_mask = name == "mask_mod"
        alone = (
            replace(nothing, mask_mod=source) if a_mask else replace(nothing, score_mods=(source,))
        )
        try:
            _compile_for_host(alone)  # whose errors name the line
            compile_alone(alone)
        except on_lanes.COMPILER_ERRORS as found:
            return on_lanes.explained(name, source.tree, found)
    return error


def _compile_for_host(functions: Functions) -> None:
    """Compile one user's function for the CPU, with the types that it has on the GPU."""
    from numba import njit
    from numba.extending import register_jitable

    tile, index = Tile(functions.dtype, 1, 1, 1), functions.index
    (source,), derive, a_mask = functions.codes, functions.derive, not functions.score_mods
    as_real = dual.as_dual if derive else lanes.as_score
    tools = Tools(register_jitable, register_jitable, lanes.call_arguments, lanes.as_condition)
    evaluate, _ = on_lanes.evaluator(source.tree, 0, tools, as_real)
    convert = lanes.as_condition if a_mask else as_real
    first = register_jitable((lambda x: (dual.seed(x),)) if derive else (lambda x: (x,)))
    if a_mask:
        first = register_jitable(lambda x: ())

    def run(params, x):
        i = lanes.uniform_index(tile, index, params)
        args = (*first(lanes.splat(tile, x)), i, i, i, i)
        convert(tile, evaluate(tile, params, lanes.new_outside(tile), args))

    njit(types.void(types.int64, types.float64))(run)
