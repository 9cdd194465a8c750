"""What a call gives back, in the caller's rank, layout, dtype and kind of array.

Results are made here, seen by backends as ``(B, H, N, D)`` and brought back; arrays that a caller
hands in to be written to, or that came out of an earlier call, are checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..functions.learning import PREFIX, Place
from ..vectors import dtypes
from . import device_arrays, tensors
from .checks import as_array, overlaps_itself, share_memory, show
from .device_arrays import DeviceArray
from .problem import LEARNT, WRT, Problem
from .validators import PACKED, bound_arrays, check_places, shape_as_given, to_bhnd, to_native

# Of the forward pass


def new_results(problem: Problem, out: Any = None) -> tuple[Any, Any]:
    """Return ``out``, a new one if it is None, and a new ``lse``, of the caller's kind."""
    if out is None:
        out = _new(problem, problem.out_shape, problem.dtype)
    return out, _new(problem, problem.lse_shape, problem.compute)


def new_exact(problem: Problem) -> NDArray[Any] | None:
    """Return a new array for ``out`` before it is rounded, None if it is not or is on a GPU.

    It is head-major, ``(B, Hq, Nq, Dv)`` or ``(1, Hq, Tq, Dv)`` of a packed call, and
    `check_incoming` takes a view of it for `out`.
    """
    if problem.allocator is not None or problem.dtype == problem.compute:
        return None
    return np.zeros((*problem.q.shape[:3], problem.Dv), problem.compute)


def as_given(problem: Problem, x: NDArray[Any]) -> NDArray[Any]:
    """View a head-major array in the caller's rank and layout."""
    view: NDArray[Any]
    view = to_bhnd(x, problem.layout) if problem.rank == 4 else x[(0,) * (4 - problem.rank)]
    return view if problem.layout != PACKED else view.transpose(1, 0, 2)


def returned(problem: Problem, x: Any) -> Any:
    """Return a result in host memory as a tensor if q is one."""
    return tensors.as_tensor(x) if problem.in_torch else x


def _new(problem: Problem, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    if problem.allocator is None:
        return np.empty(shape, dtype)
    name = dtypes.storage_name(dtype)
    assert name is not None
    return problem.allocator.empty(shape, name)


def _seen(problem: Problem, name: str, x: Any) -> Any:
    """Return a NumPy array, or the view of one on a GPU."""
    return as_array(name, x) if problem.allocator is None else device_arrays.describe(name, x)


def as_bhnd(problem: Problem, out: Any) -> NDArray[Any]:
    """View an array of `out_shape` as ``(B, Hq, Nq, Dv)``."""
    view: NDArray[Any] = to_bhnd(_seen(problem, "out", out), problem.layout)
    return view


def as_bhn(problem: Problem, lse: Any) -> NDArray[Any]:
    """View an array of `lse_shape` as ``(B, Hq, Nq)``."""
    view: NDArray[Any] = _seen(problem, "lse", lse)
    return view if problem.rank == 4 else view[(None,) * (4 - problem.rank)]


def check_out(problem: Problem, out: Any) -> None:
    """Raise unless an array can be written to in place of a new result."""
    if problem.allocator is not None:
        found = device_arrays.describe("out", out)
        if found is None:
            raise TypeError(f"out: expected an array on a GPU, as q is, got {show(out)}")
        check_places({"q": problem.q, "out": found})
        out = found
    elif device_arrays.is_torch(out):
        out = as_array("out", out)
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out: expected a NumPy array, got {show(out)}")
    if out.dtype != problem.dtype:  # a dtype of the other byte order differs too
        got = out.dtype.str if out.dtype.kind == "f" else dtypes.show(out.dtype)
        raise TypeError(
            f"out: expected dtype {dtypes.show(problem.dtype)} in native byte order, got {got}"
        )
    if out.shape != problem.out_shape:
        raise ValueError(f"out: expected shape {problem.out_shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out: expected a writeable array, got a read-only one")
    if overlaps_itself(out):
        raise ValueError(
            "out: expected an element of memory for each result, got strides "
            f"{out.strides} for shape {out.shape}, which overlap"
        )
    inputs = dict(problem.inputs)
    for name, tree in (
        *(("score_mod", x) for x in problem.score_mods),
        ("mask_mod", problem.mask_mod),
    ):
        inputs.update(bound_arrays(name, tree))
    for name, array in inputs.items():
        if array is not None and share_memory(out, array):
            raise ValueError(f"out: expected memory of its own, got an array that overlaps {name}")


# Of the backward pass


def check_wrt(problem: Problem, wrt: Any) -> frozenset[str]:
    """Return the names of what gradients are wanted of.

    Raises
    ------
    ValueError, TypeError
        If it is no tuple or list of names, or one is unknown, twice there or was not passed.
    """
    expected = "a tuple of names among " + ", ".join(map(repr, WRT))
    expected += " and those of what the score_mod is bound to, as 'score_mod.table'"
    if not isinstance(wrt, (tuple, list)) or not all(isinstance(x, str) for x in wrt):
        raise TypeError(f"wrt: expected {expected}, got {show(wrt)}")
    places: dict[Place, str] = {}
    for name in wrt:
        if name.startswith(PREFIX):
            first = places.setdefault(problem.place_of(name), name)
            if first != name:
                raise ValueError(
                    f"wrt: expected one name for each value, got {first!r} and {name!r}"
                )
        elif name.startswith("mask_mod."):
            raise ValueError(
                f"wrt: expected {expected}, got {name!r}, and what a mask is bound to has no "
                "gradient: a key is visible or not"
            )
        elif name not in WRT:
            raise ValueError(f"wrt: expected {expected}, got {name!r}")
        if wrt.count(name) > 1:
            raise ValueError(f"wrt: expected each name once, got {name!r} twice")
        if name in LEARNT and name not in problem.given:
            raise ValueError(
                f"wrt: expected names of arguments that were passed, got {name!r} without {name}"
            )
    return frozenset(wrt)


def check_incoming(problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any) -> tuple[Any, ...]:
    """Bring what a backward pass starts from to the canonical form.

    Parameters
    ----------
    dout, out : array_like
        Of `out_shape`. In host memory `out` may be of the compute dtype: not rounded yet.
    lse, dlse : array_like
        Of `lse_shape`; dlse may be None.

    Returns
    -------
    dout, out : ndarray
        ``(B, Hq, Nq, Dv)`` views with any strides, in native byte order.
    lse, dlse : ndarray
        ``(B, Hq, Nq)``, aligned and contiguous in host memory, with any strides on a GPU; dlse
        may be None.

    Raises
    ------
    ValueError, TypeError
        If a shape or dtype is not that of the call, or lse not that of its lengths, which
        remains unseen on a GPU.
    """
    dout = _incoming(problem, "dout", dout, problem.out_shape, problem.dtype)
    out = as_array("out", out)
    exact = problem.allocator is None and out.dtype.newbyteorder("=") == problem.compute
    dtype = problem.compute if exact else problem.dtype
    out = _incoming(problem, "out", out, problem.out_shape, dtype)
    rows = []
    for name, x in (("lse", lse), ("dlse", dlse)):
        if x is not None or name == "lse":
            x = _incoming(problem, name, x, problem.lse_shape, problem.compute)
            x = x[(None,) * (4 - problem.rank)]
            x = x if problem.allocator is not None else np.require(x, requirements=("C", "A"))
        rows.append(x)
    behind = ~problem.exists
    if problem.allocator is None and behind.any():
        wrong = behind[:, None] & (rows[0] != -np.inf)
        if wrong.any():
            b, h, i = np.argwhere(wrong)[0].tolist()
            where, place = "past q_lens", f"row {i} of item {b}"
            if problem.q_starts is None:
                place += f" with q_lens[{b}] = {problem.q_lens[b]}"
            else:
                where, place = "of no sequence", f"row {i}"
            raise ValueError(
                f"lse: expected -inf in rows {where}, as attention returns it for the same "
                f"arguments, got {rows[0][b, h, i]} in {place}"
            )
    return to_bhnd(dout, problem.layout), to_bhnd(out, problem.layout), *rows


def new_gradient(problem: Problem, name: str) -> DeviceArray:
    """Return a view of a new array for a gradient, of a call with arrays on a GPU.

    Behind it lies an array of the caller's kind (`DeviceSource.owner`) in C order, of the shape and
    layout of the argument and with the dtype of a gradient of it (`dtypes.gradient_dtype`), so
    that what is written here needs no change before it is returned.

    Parameters
    ----------
    name : str
        One of `WRT`.

    Returns
    -------
    DeviceArray
        Head-major and 4-D for q, k and v; of `bias_shape`; ``(Hq,)``; of the slopes ``(B, Hq)``
        or ``(Hq,)`` as they were given, which is then the sum over items.
    """
    if name in LEARNT:
        shape, dtype = problem.given[name]
        new = _new(problem, shape, dtypes.gradient_dtype(dtype, problem.compute))
        view: DeviceArray = _seen(problem, name, new)
        if name == "bias":
            view = view.reshape(problem.bias_shape)
    else:
        shape = shape_as_given(getattr(problem, name).shape, problem.rank, problem.layout)
        view = to_bhnd(_seen(problem, name, _new(problem, shape, problem.dtype)), problem.layout)
    return view


def gradient_as_given(problem: Problem, name: str, x: NDArray[Any]) -> Any:
    """Bring a gradient to the shape and dtype of the argument that it belongs to.

    Parameters
    ----------
    name : str
        One of `WRT`, or of what the score_mod is bound to.
    x : ndarray
        Head-major and 4-D, of `bias_shape`, ``(Hq,)`` or for the slopes ``(B, Hq)``; of the shape
        of what a function is bound to. On a GPU what `new_gradient` returned.

    Returns
    -------
    ndarray
        In native byte order; that of integers in the compute dtype. On a GPU an array of the
        caller's kind.
    """
    if isinstance(x, DeviceArray):
        return x.source.owner
    with np.errstate(all="ignore"):  # a narrow dtype may overflow
        if name.startswith(PREFIX):
            return returned(problem, x.astype(problem.dtype_of(name), copy=False))
        if name not in LEARNT:
            x = x.astype(problem.dtype, copy=False)
            return returned(problem, as_given(problem, x))
        shape, dtype = problem.given[name]
        if name == "alibi_slopes" and len(shape) == 1:
            x = x.sum(axis=0)
        dtype = dtypes.gradient_dtype(dtype, problem.compute)
        gradient: NDArray[Any] = x.reshape(shape).astype(dtype, copy=False)
    return returned(problem, gradient)


def _incoming(
    problem: Problem, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype
) -> NDArray[Any]:
    x = as_array(name, x)
    if type(x) is DeviceArray or problem.allocator is not None:
        check_places({"q": problem.q, name: x})
    if x.dtype != dtype and x.dtype.newbyteorder("=") != dtype:
        of = "as of q" if dtype == problem.dtype else f"for q of {problem.storage}"
        raise TypeError(
            f"{name}: expected dtype {dtypes.show(dtype)} {of}, got {dtypes.show(x.dtype)}"
        )
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
    return to_native(x, dtype)
