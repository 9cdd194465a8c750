"""The vocabulary of kernels: SIMD vectors for Numba, and the few machine operations they need.

Numba compiles scalars; whether a loop over them becomes vector code is up to LLVM's
auto-vectoriser, and a register tile is more than it will find. So this module gives Numba a vector
type: ``Lanes(dtype, width)`` lowers to LLVM's ``<width x dtype>``, and arithmetic, comparisons and
the NumPy functions listed below work on it as they do on scalars, with scalars broadcast:

    + - * / // % **   unary + -   < <= > >= == !=   & | ^ ~ << >>   abs min max
    np.where  np.minimum  np.maximum  np.clip  np.logical_and  np.logical_or  np.logical_not
    np.abs  np.sign  np.sqrt  np.square  np.power  np.exp  np.exp2  np.expm1  np.log  np.log1p
    np.tanh  np.sin  np.cos  np.floor  np.ceil  np.trunc  np.rint
    np.isfinite  np.isinf  np.isnan  np.float32  np.float64, and math's twins of these

    array[lanes]   a gather: an element of an array that a function is bound to, for every lane

LLVM splits a vector that is wider than the processor's registers and pads one that is narrower, so
every width works on every machine and one process can test them all.

A kernel says which vectors it works on with a `Tile`: a compile-time value (it has no bits at run
time) that carries the float type, the width W and the shape of the register tile. Memory is
reached by byte address, with no alignment asked for: ``load(tile, address)``.

No operation here carries fast-math flags: NaN and Inf keep their meaning. ``fma`` is
``llvm.fmuladd``: one instruction where the processor has it and two where it has not
(``llvm.fma`` would call a library function there, 60 times slower).

This folder, `elementary`, which holds the formulas, and `dual`, which differentiates them, are all
that speaks LLVM on the CPU side. What a kernel may say is listed here; its own rooms are

    types            the types of vectors and of the tile
    conversions      a scalar or lanes as lanes of another type
    operators        operators and NumPy's functions: the tables above
    memory           lanes and numbers by byte address, and atomic updates
    records          records in memory, of which the fields have names
    register_tile    the outer products that a kernel spends its time in
    dot_tile         dot products over the lanes, many at a time, for few rows
    strided          rows that lie anywhere, in any storage type
    words            numbers as they are stored, and what products take of them
    bound_arrays     arrays that users' functions are bound to
    user_functions   what users' functions are called with, and what they return
"""

from .bound_arrays import (
    clear_outside,
    new_outside,
    outside_bits,
)
from .dot_tile import (
    add_dots,
    store_dots,
    zero_dots,
)
from .memory import (
    atomic_add,
    atomic_or,
    load,
    load_int32,
    load_old,
    prefetch,
    prefetch_far,
    read,
    read_int8,
    read_int64,
    splat,
    store,
    write,
    write_int8,
    write_int32,
    write_int64,
)
from .operators import (
    exp2_nonpositive,
    fma,
    lane_of,
    sign_bit,
)
from .records import (
    Struct,
    address_of,
    view,
)
from .register_tile import (
    add_outer,
    add_outer_stored,
    add_outer_unless_hidden,
    add_outer_visible,
    add_tile,
    rescale_add_tile,
    store_tile,
    zeros,
)
from .strided import (
    gather_transposed,
    join_pairs,
    load_lanes,
    load_splat,
    part_pairs,
    scatter_add_transposed,
    scatter_transposed,
    store_panels,
)
from .types import (
    Lanes,
    Tile,
)
from .user_functions import (
    INDEX_BOUND,
    Layout,
    as_condition,
    as_score,
    call_arguments,
    call_tile_function,
    load_index,
    uniform_index,
)
from .words import (
    BOTH,
    chained,
    gather_words,
    load_rows,
    load_stored,
    load_word_lanes,
    load_words,
    pair_up,
    read_rows,
    read_stored,
    read_word,
    store_halves,
    store_stored,
    write_stored,
)

__all__ = [
    "BOTH",
    "INDEX_BOUND",
    "Lanes",
    "Layout",
    "Struct",
    "Tile",
    "add_dots",
    "add_outer",
    "add_outer_stored",
    "add_outer_unless_hidden",
    "add_outer_visible",
    "add_tile",
    "address_of",
    "as_condition",
    "as_score",
    "atomic_add",
    "atomic_or",
    "call_arguments",
    "call_tile_function",
    "chained",
    "clear_outside",
    "exp2_nonpositive",
    "fma",
    "gather_transposed",
    "gather_words",
    "join_pairs",
    "lane_of",
    "load",
    "load_index",
    "load_int32",
    "load_lanes",
    "load_old",
    "load_rows",
    "load_splat",
    "load_stored",
    "load_word_lanes",
    "load_words",
    "new_outside",
    "outside_bits",
    "pair_up",
    "part_pairs",
    "prefetch",
    "prefetch_far",
    "read",
    "read_int8",
    "read_int64",
    "read_rows",
    "read_stored",
    "read_word",
    "rescale_add_tile",
    "scatter_add_transposed",
    "scatter_transposed",
    "sign_bit",
    "splat",
    "store",
    "store_dots",
    "store_halves",
    "store_panels",
    "store_stored",
    "store_tile",
    "uniform_index",
    "view",
    "write",
    "write_int8",
    "write_int32",
    "write_int64",
    "write_stored",
    "zero_dots",
    "zeros",
]
