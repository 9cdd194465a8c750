"""Which arrays are taken, and what comes back; docs/arrays.md says it, and is run."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import gaussian, qkv
from numpy.typing import NDArray

import nattn
from nattn.call.checks import as_array
from nattn.call.problem import Problem

Array = NDArray[Any]

PAGE = Path(__file__).parents[1] / "docs" / "arrays.md"


class HasDlpack:
    """An array in host memory that has DLPack alone."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class HasOldDlpack(HasDlpack):
    """An array of a library that knows DLPack of before 2024 only."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


class HasArray:
    """An array that NumPy converts by a call."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.array, dtype)


class HasInterface:
    """An array that shows NumPy its memory."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class LikeJax(HasDlpack):
    """What JAX's arrays on the CPU have: both, and an interface for GPUs that raises."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.array.view()
        found.flags.writeable = False
        return found

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("on the CPU")


class Subclass(np.ndarray):
    """An array that carries no meaning of its own."""


def frozen(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x: Array) -> Array:
    room = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    room[...] = x
    return room


IN_PLACE: dict[str, Callable[[Array], Any]] = {
    "dlpack": HasDlpack,
    "dlpack of before 2024": HasOldDlpack,
    "dlpack of strides": lambda x: HasDlpack(np.asfortranarray(x)),
    "dlpack, read-only": lambda x: HasDlpack(frozen(x)),
    "array": HasArray,
    "interface": HasInterface,
    "like jax": LikeJax,
    "buffer": lambda x: memoryview(x),  # type: ignore[arg-type]
    "read-only": frozen,
    "unaligned": unaligned,
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "subclass": lambda x: x.view(Subclass),
}
KINDS = IN_PLACE | {
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "big-endian interface": lambda x: HasInterface(x.astype(x.dtype.newbyteorder(">"))),
    "list": lambda x: x.tolist(),
    "tuple of arrays": tuple,
}


def arguments() -> dict[str, Array]:
    q, k, v = qkv(2, 4, 5, 7, 8, 3, dtype="f8")
    return {
        "q": q,
        "k": k,
        "v": v,
        "mask": gaussian(2, 1, 5, 7) < 1,
        "bias": gaussian(4, 1, 7, dtype="f8"),
        "alibi_slopes": np.linspace(0, 1, 4),
        "sinks": np.linspace(-1, 1, 4),
        "q_lens": np.array([5, 3]),
        "kv_lens": np.array([4, 7]),
        "q_offset": np.array([1, 2]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_of_every_kind(kind: str) -> None:
    plain: dict[str, Any] = arguments()
    others: dict[str, Any] = {name: KINDS[kind](x) for name, x in plain.items()}
    before = {name: np.array(x, copy=True) for name, x in plain.items()}
    wrt = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
    out, lse = nattn.attention(**plain, return_lse=True)
    got = nattn.attention(**others, return_lse=True)
    for x, y in zip(got, (out, lse), strict=True):
        assert type(x) is np.ndarray
        assert x.dtype.str == np.dtype("f8").str
        np.testing.assert_array_equal(x, y)
    dout = gaussian(*out.shape, dtype="f8")
    rest = {"dout": dout, "out": out, "lse": lse, "dlse": gaussian(*lse.shape, dtype="f8")}
    grads = nattn.attention_backward(**rest, **plain, wrt=wrt)
    converted: dict[str, Any] = {name: KINDS[kind](x) for name, x in rest.items()}
    again = nattn.attention_backward(**converted, **others, wrt=wrt)
    assert again.dmods is None
    for x, y in zip(again[: len(wrt)], grads[: len(wrt)], strict=True):
        assert type(x) is np.ndarray
        assert x.dtype.isnative
        np.testing.assert_array_equal(x, y)
    for name, x in before.items():
        np.testing.assert_array_equal(plain[name], x)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_nothing_is_copied(kind: str) -> None:
    array = gaussian(2, 4, 5, 8)
    passed = IN_PLACE[kind](array)
    source = getattr(passed, "array", passed)
    p = Problem.build(passed, passed, passed, bias=IN_PLACE[kind](gaussian(5, 5)))
    assert np.shares_memory(p.q, np.asarray(source))
    assert type(p.q) is type(p.bias) is np.ndarray


@pytest.mark.parametrize("kind", ["dlpack", "array", "interface", "read-only", "list"])
def test_looks_and_merging(kind: str) -> None:
    q, k, v = qkv(1, 2, 5, 7, 4, dtype="f8")
    a, b = KINDS[kind](q), KINDS[kind](k)
    np.testing.assert_array_equal(nattn.attention_map(a, b), nattn.attention_map(q, k))
    np.testing.assert_array_equal(nattn.key_mass(a, b), nattn.key_mass(q, k))
    out, lse = nattn.attention(q, k, v, return_lse=True)
    merged = nattn.merge_states([KINDS[kind](out)], [KINDS[kind](lse)])
    np.testing.assert_array_equal(merged[0], out)


def test_out_is_filled_and_returned_whatever_q_is() -> None:
    q, k, v = qkv(1, 2, 5, 7, 4)
    out = np.empty_like(q)
    assert nattn.attention(HasDlpack(q), HasArray(k), v, out=out) is out
    np.testing.assert_array_equal(out, nattn.attention(q, k, v))
    with pytest.raises(ValueError, match=r"^out: .*overlaps q"):
        nattn.attention(HasDlpack(out), k, v, out=out)


def test_bfloat16() -> None:
    q, k, v = qkv(1, 2, 5, 7, 4, dtype=ml_dtypes.bfloat16)
    out = nattn.attention(HasArray(q), HasArray(k), v, backend="reference")
    assert out.dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match=r"^k: .*of NumPy's own dtypes, .*got HasDlpack"):
        nattn.attention(q, HasDlpack(k), v, backend="reference")


class Elsewhere(HasDlpack):
    """An array on a device that nattn does not know: Metal."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no copy to the CPU")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0


REFUSED: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.ones((5, 8), "f4"), "got a masked array, .*pass .data"),
    "masked in a list": ([np.ma.ones(8)] * 5, "got a masked array, .*pass .data"),
    "masked in lists": ([[np.ma.ones(8)] * 5] * 2, "got a masked array"),
    "another device": (Elsewhere(np.ones((5, 8))), "in host memory .*Elsewhere .*no copy to the"),
    "dlpack of strings": (HasDlpack(np.full((5, 8), "x")), "of NumPy's own dtypes"),
    "ragged": ([[1.0], [1.0, 2.0]], "expected an array, got .*inhomogeneous"),
}


NAMES = ["q", "v", "mask", "bias", "sinks", "kv_lens"]


@pytest.mark.parametrize(
    ("name", "kind"),
    # a list of lengths is read item by item
    [(n, x) for n in NAMES for x in REFUSED if n != "kv_lens" or type(REFUSED[x][0]) is not list],
)
def test_refused(name: str, kind: str) -> None:
    value, text = REFUSED[kind]
    given: dict[str, Any] = {x: gaussian(5, 8) for x in ("q", "k", "v")} | {name: value}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*" + text.format(name)):
        nattn.attention(**given)


def test_one_library_that_has_it_all() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = qkv(1, 2, 5, 7, 4)
    out = nattn.attention(*map(jax.numpy.asarray, (q, k, v)))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, nattn.attention(q, k, v))


def test_lists_are_float64() -> None:
    assert as_array("q", [[1.0, 2.0]]).dtype == np.float64
    q, k, v = (x.tolist() for x in qkv(1, 1, 3, 3, 4, dtype="f8"))
    assert nattn.attention(q, k, v).dtype == np.float64
    with pytest.raises(TypeError, match=r"^q, k, v: expected one dtype, got float64, float32"):
        nattn.attention(q, np.array(k, "f4"), v)


def test_the_page_runs() -> None:
    test = doctest.DocTestParser().get_doctest(
        PAGE.read_text(encoding="utf-8"), {}, PAGE.name, str(PAGE), 0
    )
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 5
    assert results.failed == 0
