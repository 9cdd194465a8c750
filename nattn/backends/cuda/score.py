"""What happens to a score between the products, as device functions of one pair of query and key.

The functions that users write for one score run on SIMD lanes on the CPU. A thread of a GPU works
on one score: here the same functions run on lanes of width 1, which are plain scalars, and become
part of the kernel. So a kernel is compiled for what a call does with scores (`Functions`), and
`steps` gives the kernel's factory the device functions; `arguments` fills the fields of the
kernel's argument record that they read (`FIELDS`).

In the simulator, which runs kernels as plain Python, the users' functions run on NumPy arrays of
one element, as in the reference.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numpy.typing import NDArray

from ...call.problem import Problem
from ...functions import on_lanes
from ...functions.binding import Bound, Combination, Tree
from ...functions.dropout import drop_threshold, philox
from ...functions.on_arrays import ArrayFunction
from ...functions.on_lanes import Tools, UserCode
from ...vectors import dtypes, dual, lanes
from ...vectors.lanes import INDEX_BOUND, Lanes, Tile
from .memory import Memory
from .target import SIMULATED, Kernel, device, load, read_uint8, store, write_int64

FIELDS = (
    # address of the words of what users' functions are bound to
    "words",
    # byte address, and byte strides over item, head, row, key
    *("mask", "mask_b", "mask_h", "mask_i", "mask_j"),
    *("bias", "bias_b", "bias_h", "bias_i", "bias_j"),
    # the kinds of blocks, a byte each: the keys of a row of blocks lie side by side
    *("blocks", "blocks_b", "blocks_h", "blocks_i", "block_size"),
    # address of an int64 for each name of `Functions.names`, which becomes 1 if that indexed out of
    # range
    "trouble",
    # dropout: the seed's halves; the random words below the threshold drop
    *("seed_low", "seed_high", "threshold"),
)
"""Fields of a kernel's argument record, all int64; those that a call has no use for are 0."""


@dataclass(frozen=True)
class Functions:
    """What a call does with its scores: equal if the code is.

    Attributes
    ----------
    dtype : str
        Compute type, "float32" or "float64".
    index : str
        "int32", or "int64" where positions may be large.
    score_mods : tuple of UserCode
        What happens to a score before the bias is added.
    mask_mod : UserCode or None
        Which keys a position sees.
    mask : bool
        Whether there is a mask array.
    bias : str or None
        How the bias is stored.
    dropout, blocks : bool
        Whether there is dropout, and a block mask.
    derive : bool
        Whether derivatives are wanted.
    """

    dtype: str
    index: str
    score_mods: tuple[UserCode, ...]
    mask_mod: UserCode | None
    mask: bool
    bias: str | None
    dropout: bool
    blocks: bool
    derive: bool

    @property
    def sources(self) -> tuple[UserCode, ...]:
        """All users' functions, in the order of their words."""
        return (*self.score_mods, *(() if self.mask_mod is None else (self.mask_mod,)))

    @property
    def names(self) -> tuple[str, ...]:
        """What to call each of the users' functions."""
        return ("score_mod",) * len(self.score_mods) + ("mask_mod",) * (self.mask_mod is not None)


def functions_of(problem: Problem, derive: bool = False) -> Functions:
    """Return what a problem does with its scores.

    Parameters
    ----------
    problem : Problem
        The call.
    derive : bool, default False
        Whether derivatives are wanted.
    """
    p = problem
    far = int(np.abs(p.q_offset).max(initial=0)) + max(p.Nq, p.Nk)
    return Functions(
        dtype=dtypes.compute_name(p.dtype),
        index="int32" if far < INDEX_BOUND else "int64",
        score_mods=tuple(map(UserCode.of, p.score_mods)),
        mask_mod=None if p.mask_mod is None else UserCode.of(p.mask_mod),
        mask=p.mask is not None,
        bias=None if p.bias is None else dtypes.storage_name(p.bias.dtype),
        dropout=p.dropout_p > 0.0,
        blocks=p.block_mask is not None,
        derive=derive,
    )


# The fields of the argument record

Place = Callable[[NDArray[Any]], tuple[int, tuple[int, ...]]]


def bound_words(problem: Problem, place: Place) -> list[int]:
    """Return what the users' functions of a problem are bound to, as int64 words.

    Parameters
    ----------
    problem : Problem
        The call.
    place : callable
        Returns the address and the byte strides of an array on the device: `Memory.view`.
    """

    def checked(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
        address, strides = place(array)
        _check_aligned("an array that a function is bound to", address, strides, array.itemsize)
        if max(map(abs, strides), default=0) >= 1 << 31 > max(map(abs, array.strides)):
            raise NotImplementedError(
                "cuda: expected an array that a function is bound to without overlapping rows, got "
                f"one of shape {array.shape} and strides {array.strides}, too large to be copied"
            )
        return address, strides

    p = problem
    every = (*p.score_mods, *(() if p.mask_mod is None else (p.mask_mod,)))
    return [word for tree in every for word in on_lanes.words(tree, checked)]


def _check_aligned(what: str, address: int, strides: tuple[int, ...], itemsize: int) -> None:
    """Raise for what a GPU cannot read: it faults where an element straddles its place."""
    if any(x % itemsize for x in (address, *strides)):
        raise NotImplementedError(
            f"cuda: expected {what} whose elements lie at multiples of their {itemsize} bytes, got "
            f"the address {address:#x} and strides {strides}"
        )


def arguments(problem: Problem, memory: Memory, trouble: int) -> tuple[int, ...]:
    """Return the values of `FIELDS` for a problem, its arrays brought to the device.

    Parameters
    ----------
    problem : Problem
        The call.
    memory : Memory
        What the call holds on the device.
    trouble : int
        Address of as many int64 on the device as there are users' functions, all 0.

    Raises
    ------
    NotImplementedError
        For arrays that a GPU cannot read.
    TypeError
        In the simulator, for a users' function that arrays cannot express.
    """
    p = problem
    words = np.array(bound_words(p, memory.view) or [0], np.int64)
    found = [memory.upload(words)]
    for name, array in (("the mask", p.mask), ("the bias", p.bias)):
        address, strides = (0, (0,) * 4) if array is None else memory.view(array)
        _check_aligned(name, address, strides, 1 if array is None else array.itemsize)
        found += [address, *strides]
    if p.block_mask is None:
        found += [0] * 5
    else:
        kinds = np.ascontiguousarray(p.block_mask.kinds)
        by_b, by_h = (0 if kinds.shape[n] == 1 else kinds.strides[n] for n in (0, 1))
        found += [memory.upload(kinds), by_b, by_h, kinds.strides[2], p.block_mask.block_size]
    found.append(trouble)
    dropout = p.dropout_p > 0.0
    found += [p.seed & 0xFFFFFFFF, p.seed >> 32] if dropout else [0, 0]
    found.append(drop_threshold(p.dropout_p) if dropout else 0)
    if SIMULATED:
        _try_out(functions_of(p), found[0])
    return tuple(found)


def raise_outside(functions: Functions, troubles: NDArray[np.int64]) -> None:
    """Raise the error that a kernel could only note in `trouble`.

    Raises
    ------
    IndexError
        If a bound array was indexed out of range for a key that its row sees.
    """
    bits = sum(1 << int(n) for n in np.flatnonzero(troubles))
    on_lanes.raise_for_flags(functions.names, bits)


# Device functions


class Steps(NamedTuple):
    """Device functions for a kernel; `a` is its argument record, which has the `FIELDS`.

    `b` is the batch item, `h` the query head, `i` its row, `pos` the row's position on the key axis
    and `key` a key that causal, window and lengths leave to it.

    Attributes
    ----------
    change : function
        ``change(a, b, h, i, pos, key, s)``: what becomes of the score `s`, in the compute type;
        -inf where the key is hidden.
    change_full : function
        The same for a pair in a full block, where the mask function need not be asked.
    change_and_derive : function or None
        ``change_and_derive(a, b, h, i, pos, key, s)``: what `change` gives, and its derivative by
        `s`. None unless derivatives are wanted.
    words4 : function
        ``words4(a, b, h, i, four)``: random words of the keys ``4 * four`` to ``4 * four + 3``, of
        which those below ``a.threshold`` drop.
    """

    change: Any
    change_full: Any
    change_and_derive: Any
    words4: Any


@functools.lru_cache(maxsize=256)
def steps(functions: Functions) -> Steps:
    """Return the device functions for what a call does with its scores."""
    evaluators = _simulated(functions) if SIMULATED else _compiled(functions)
    number = getattr(np, functions.dtype)
    change = _change(functions, evaluators, number, full=False)
    return Steps(
        change=change,
        change_full=_change(functions, evaluators, number, full=True),
        change_and_derive=_change_and_derive(functions, evaluators, number),
        words4=_words4(),
    )


class _Evaluators(NamedTuple):
    """Users' functions as device functions.

    Attributes
    ----------
    modify : list of function
        ``f(a, b, h, pos, key, s)`` for each modifier: the new score.
    derive : list of function
        ``f(a, b, h, pos, key, s, slope)``: the new score, and `slope` times its derivative.
    visible : function or None
        ``f(a, b, h, pos, key)``: whether the mask function shows the key.
    """

    modify: list[Any]
    derive: list[Any]
    visible: Any


def _device(function: Callable[..., Any]) -> Any:
    """Let kernels call a function; those of this file name nothing that the simulator replaces."""
    return function if SIMULATED else device(function)


def _change(functions: Functions, evaluators: _Evaluators, number: Any, full: bool) -> Any:
    shown, add = _shown(functions), _add_bias(functions, number)
    restrict = _restrict(None if full else evaluators.visible, number)
    hidden = number(-np.inf)
    modify = _nothing_done
    for f in evaluators.modify:
        modify = _then(modify, f)

    def change(a, b, h, i, pos, key, s):
        if not shown(a, b, h, i, key):
            return hidden
        s = add(a, b, h, i, key, modify(a, b, h, pos, key, s))
        return restrict(a, b, h, pos, key, s)

    return _device(change)


def _change_and_derive(functions: Functions, evaluators: _Evaluators, number: Any) -> Any:
    if not functions.derive:
        return None
    shown, add = _shown(functions), _add_bias(functions, number)
    restrict = _restrict(evaluators.visible, number)
    hidden, one = number(-np.inf), number(1)
    modify = _nothing_derived
    for f in evaluators.derive:
        modify = _then_derive(modify, f)

    def change_and_derive(a, b, h, i, pos, key, s):
        if not shown(a, b, h, i, key):
            return hidden, one
        s, slope = modify(a, b, h, pos, key, s, one)
        s = add(a, b, h, i, key, s)
        return restrict(a, b, h, pos, key, s), slope

    return _device(change_and_derive)


@_device
def _nothing_done(a, b, h, pos, key, s):
    return s


@_device
def _nothing_derived(a, b, h, pos, key, s, slope):
    return s, slope


def _then(f, g):
    return _device(lambda a, b, h, pos, key, s: g(a, b, h, pos, key, f(a, b, h, pos, key, s)))


def _then_derive(f, g):
    def both(a, b, h, pos, key, s, slope):
        s, slope = f(a, b, h, pos, key, s, slope)
        return g(a, b, h, pos, key, s, slope)

    return _device(both)


def _shown(functions: Functions) -> Any:
    """Return ``f(a, b, h, i, key)``: whether the mask array shows a key."""
    if not functions.mask:
        return _device(lambda a, b, h, i, key: True)

    def shown(a, b, h, i, key):
        at = a.mask + b * a.mask_b + h * a.mask_h + i * a.mask_i + key * a.mask_j
        return read_uint8(at) != 0

    return _device(shown)


def _add_bias(functions: Functions, number: Any) -> Any:
    """Return ``f(a, b, h, i, key, s)``: the score with the bias; -inf on either side hides."""
    if functions.bias is None:
        return _device(lambda a, b, h, i, key, s: s)
    read, hidden = load(functions.bias), number(-np.inf)
    if SIMULATED:  # where rounding a large number would warn
        number = _in_silence(number)

    def add(a, b, h, i, key, s):
        at = a.bias + b * a.bias_b + h * a.bias_h + i * a.bias_i + key * a.bias_j
        x = number(read(at))
        if s == hidden or x == hidden:
            return hidden
        return s + x

    return _device(add)


def _in_silence(function):
    def silent(*args):
        with np.errstate(all="ignore"):
            return function(*args)

    return silent


def _restrict(visible: Any, number: Any) -> Any:
    """Return ``f(a, b, h, pos, key, s)``: the score, -inf where the mask function hides it."""
    if visible is None:
        return _device(lambda a, b, h, pos, key, s: s)
    hidden = number(-np.inf)

    def restrict(a, b, h, pos, key, s):
        return s if visible(a, b, h, pos, key) else hidden

    return _device(restrict)


@_device
def kind(a, b, h, i, key):
    """Return the kind of a pair's block, one of `masks.EMPTY`, `MIXED` and `FULL`."""
    size = a.block_size
    at = a.blocks + b * a.blocks_b + h * a.blocks_h + i // size * a.blocks_i + key // size
    return read_uint8(at)


@_device
def sees_block(a, b, h, i, lo, hi):
    """Return 1 if a row sees something of the blocks of the keys lo <= j < hi, else 0."""
    block = lo // a.block_size
    while block * a.block_size < hi:
        if kind(a, b, h, i, block * a.block_size) != 0:
            return 1
        block += 1
    return 0


def _words4() -> Any:
    if SIMULATED:

        def words(a, b, h, i, four):
            c0, c1, c2, c3 = _indices(four, i, h, b)
            found = philox(c0, c1, c2, c3, a.seed_low, a.seed_high)
            return tuple(int(x[0]) for x in found)

        return words
    mixed = on_lanes.compilable(philox, device)
    return device(lambda a, b, h, i, four: mixed(four, i, h, b, a.seed_low, a.seed_high))


# Compiled: on lanes of width 1


def _compiled(functions: Functions) -> _Evaluators:
    tile, t = Tile(functions.dtype, 1, 1, 1), _intrinsics(functions.index)
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
    return _Evaluators(modify, derive, visible)


@functools.cache
def _intrinsics(index: str) -> Any:
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
        tools=Tools(device, twin(lanes.call_arguments), as_condition),
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
        outside = new_outside(tile)
        clear_outside(tile, outside)
        args = splat(tile, s), index(tile, b), index(tile, h), index(tile, pos), index(tile, key)
        result = number(as_score(tile, evaluate(tile, a.words, outside, args)))
        if outside_bits(tile, outside):
            write_int64(a.trouble + 8 * n, 1)
        return result

    return device(modify)


def _derivative(tile: Tile, t: Any, evaluate: Any, n: int) -> Any:
    new_outside, clear_outside, outside_bits = t.new_outside, t.clear_outside, t.outside_bits
    splat, index, as_dual, number = t.splat, t.index, t.as_dual, t.number
    seed, value, chain = t.seed, t.value, t.chain

    def derive(a, b, h, pos, key, s, slope):
        outside = new_outside(tile)
        clear_outside(tile, outside)
        x = seed(splat(tile, s))
        args = x, index(tile, b), index(tile, h), index(tile, pos), index(tile, key)
        r = as_dual(tile, evaluate(tile, a.words, outside, args))
        if outside_bits(tile, outside):
            write_int64(a.trouble + 8 * n, 1)
        return number(value(tile, r)), number(chain(tile, splat(tile, slope), r))

    return device(derive)


def _mask(tile: Tile, t: Any, evaluate: Any, n: int) -> Any:
    new_outside, clear_outside, outside_bits = t.new_outside, t.clear_outside, t.outside_bits
    index, as_condition, number = t.index, t.as_condition, t.number

    def visible(a, b, h, pos, key):
        outside = new_outside(tile)
        clear_outside(tile, outside)
        args = index(tile, b), index(tile, h), index(tile, pos), index(tile, key)
        result = number(as_condition(tile, evaluate(tile, a.words, outside, args)))
        if outside_bits(tile, outside):
            write_int64(a.trouble + 8 * n, 1)
        return result

    return device(visible)


_Args: Any = namedtuple("_Args", FIELDS)  # type: ignore[misc]


def compile_alone(functions: Functions, cc: tuple[int, int] = (8, 0)) -> str:
    """Compile what happens to scores as a kernel of its own, which runs nothing; return its PTX."""
    found, number = steps(functions), getattr(np, functions.dtype)
    change, derive, write = found.change, found.change_and_derive, store(functions.dtype)

    # What they are called with is not known before the kernel runs, or nothing would be left.
    def modify(a):
        s = change(a, a.mask_b, a.mask_h, a.mask_i, a.bias_i, a.mask_j, number(a.blocks))
        write(a.trouble, s)

    def modify_and_derive(a):
        s = number(a.blocks)
        s, slope = derive(a, a.mask_b, a.mask_h, a.mask_i, a.bias_i, a.mask_j, s)
        write(a.trouble, s)
        write(a.trouble + 8, slope)

    kernel = modify_and_derive if functions.derive else modify
    return Kernel(kernel, 32).ptx(_Args(*(0,) * len(FIELDS)), cc)


def explained(functions: Functions, error: Exception) -> Exception:
    """Return a TypeError that names the line of a user's function that cannot be compiled.

    Parameters
    ----------
    functions : Functions
        What a kernel was to be compiled for.
    error : Exception
        What came of it; returned as it is if no user's function is the trouble.
    """
    nothing = replace(functions, score_mods=(), mask_mod=None, mask=False, bias=None)
    for name, source in zip(functions.names, functions.sources, strict=True):
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
    (source,), derive, a_mask = functions.sources, functions.derive, not functions.score_mods
    as_real = dual.as_dual if derive else lanes.as_score
    tools = Tools(register_jitable, lanes.call_arguments, lanes.as_condition)
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


# In the simulator: on arrays of one element


@dataclass(frozen=True)
class _At:
    """An array at an address, as NumPy takes it."""

    __array_interface__: dict[str, Any]


def _rebuilt(tree: Tree, words: Any) -> Tree:
    """Return a tree that is bound to what an iterator of words says."""
    if isinstance(tree, Combination):
        return Combination(tree.operator, tuple(_rebuilt(part, words) for part in tree.parts))  # type: ignore[arg-type]
    values: list[Any] = []
    for old in tree.values:
        word = next(words)
        if isinstance(old, np.ndarray):
            shape = tuple(next(words) for _ in range(old.ndim))
            strides = tuple(next(words) for _ in range(old.ndim))
            values.append(_array_at(word, shape, strides, old.dtype))
        elif isinstance(old, float):
            values.append(float(np.int64(word).view(np.float64)))
        else:
            values.append(type(old)(word))
    return Bound(tree.function, tree.order, tree.names, tuple(values))


def _array_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    if 0 in shape:
        return np.empty(shape, dtype)
    interface = {"version": 3, "shape": shape, "strides": strides, "typestr": dtype.str}
    return np.asarray(_At({**interface, "data": (address, True)}))


class _OnArrays:
    """The users' functions of a launch, a call at a time: each keeps what was out of range."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._lock = threading.Lock()
        self._launch: Any = None
        self._dense: list[ArrayFunction] = []

    def prepare(self, words: int) -> list[ArrayFunction]:
        """Return the functions, bound to what the words at an address say."""
        f = self._functions
        numbers = (ctypes.c_int64.from_address(words + 8 * n).value for n in range(1 << 30))
        dtype = np.dtype(f.dtype)
        return [
            ArrayFunction(name, _rebuilt(source.tree, numbers), dtype)
            for name, source in zip(f.names, f.sources, strict=True)
        ]

    def run(self, a: Any, n: int, call: Callable[[ArrayFunction], Any]) -> Any:
        """Call the n-th function for the launch whose argument record is `a`."""
        with self._lock, np.errstate(all="ignore"):
            if self._launch is not a:
                self._dense, self._launch = self.prepare(int(a.words)), a
            dense = self._dense[n]
            result = call(dense)
            if any(np.any(miss) for _, miss in dense.misses):
                write_int64(a.trouble + 8 * n, 1)
            return result


def _one(x: Any) -> NDArray[Any]:
    return np.array([x])


def _indices(*indices: Any) -> tuple[NDArray[Any], ...]:
    return tuple(np.array([int(x)], np.int64) for x in indices)


def _simulated(functions: Functions) -> _Evaluators:
    runner, number = _OnArrays(functions), _in_silence(getattr(np, functions.dtype))
    largest = float(np.finfo(functions.dtype).max)

    def modifier(n: int) -> Any:
        def modify(a, b, h, pos, key, s):
            args = _one(np.float64(s)), *_indices(b, h, pos, key)
            return number(runner.run(a, n, lambda dense: dense(*args))[0])

        return modify

    def derivative(n: int) -> Any:
        def derive(a, b, h, pos, key, s, slope):
            args = _one(np.float64(s)), *_indices(b, h, pos, key)
            value, own = runner.run(a, n, lambda dense: dense.derive(*args))
            factor = number(own[0])
            if slope == 0 or factor == 0:  # whatever the other
                return number(value[0]), number(0)
            return number(value[0]), number(np.clip(float(slope) * own[0], -largest, largest))

        return derive

    def visible(a, b, h, pos, key):
        args = _indices(b, h, pos, key)
        n = len(functions.score_mods)
        return bool(runner.run(a, n, lambda dense: dense(*args))[0])

    count = len(functions.score_mods)
    return _Evaluators(
        [modifier(n) for n in range(count)],
        [derivative(n) for n in range(count)] if functions.derive else [],
        None if functions.mask_mod is None else visible,
    )


def _try_out(functions: Functions, words: int) -> None:
    """Raise here what a user's function would raise in one of the simulator's threads."""
    pair = _indices(0, 0, 0, 0)
    with np.errstate(all="ignore"):
        for dense in _OnArrays(functions).prepare(words):
            dense(*((_one(0.0), *pair) if dense.name == "score_mod" else pair))
