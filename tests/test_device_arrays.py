"""Arrays on a GPU without one: doubles whose address is that of host memory, or of none at all."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import operator
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import CASES, Case, OnDevice, gaussian, incoming, qkv

import nattn
from nattn import backends
from nattn.backends import reference
from nattn.backends.error_budget import UNIT
from nattn.call import device_arrays, results
from nattn.call.device_arrays import DeviceArray, allocator_like, describe, plain
from nattn.call.problem import WRT, Problem
from nattn.functions import binding, masks
from nattn.vectors import dtypes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def view(array: Any, **interface: Any) -> DeviceArray:
    found = describe("x", OnDevice(array, **interface))
    assert found is not None
    return found


class Nowhere(OnDevice):
    """An array at an address that cannot be read."""

    def __init__(self, *shape: int, dtype: Any = "f4", **interface: Any) -> None:
        one = np.zeros((), dtype)
        nothing = {"strides": None, "data": (1 << 40, False)}
        super().__init__(np.broadcast_to(one, shape), **nothing | interface)


class Tensor:
    """What torch calls a tensor, as far as it is asked for here."""

    __module__ = "torch"
    is_cuda = True
    layout = "torch.strided"
    negative = False

    def __init__(self, array: Any, device: int = 0) -> None:
        self.array = array
        self.device = SimpleNamespace(index=device)

    @property
    def __cuda_array_interface__(self) -> Any:
        raise TypeError("torch refuses bfloat16 and what has a gradient")

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data) if self.array.size else 0

    def is_neg(self) -> bool:
        return self.negative

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.array.view(dtype))

    def numpy(self) -> Any:
        assert self.array.dtype != BFLOAT16
        return self.array


class CuPyArray(OnDevice):
    """What CuPy calls an ndarray."""

    __module__ = "cupy"
    device = SimpleNamespace(id=1)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    def empty(shape: tuple[int, ...], *, dtype: Any, device: Any) -> Tensor:
        return Tensor(np.full(shape, 77, dtype), device.index)

    names = ("float16", "float32", "float64", "int16")
    fake: Any = ModuleType("torch")
    fake.__dict__.update({name: np.dtype(name) for name in names}, bfloat16=BFLOAT16, empty=empty)
    stream = SimpleNamespace(cuda_stream=1234)
    fake.cuda = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.fixture
def numba_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Numba's simulator, as far as memory goes."""
    fake: Any = ModuleType("numba.cuda")
    fake.external_stream = lambda handle: ("stream", handle)

    def device_array(shape: tuple[int, ...], dtype: Any, stream: Any = 0) -> OnDevice:
        made = OnDevice(np.full(shape, 77, dtype))
        return OnDevice(made.array, stream=stream[1]) if stream else made

    fake.device_array = device_array
    monkeypatch.setitem(sys.modules, "numba.cuda", fake)
    return fake


# Views


def test_a_view_is_the_address_shape_and_strides() -> None:
    a = np.zeros((4, 6, 5), "f4")[::2, ::-1, 1:]
    x = view(a)
    assert (x.shape, x.strides, x.dtype, x.ctypes.data) == (
        (2, 6, 4),
        a.strides,
        a.dtype,
        a.ctypes.data,
    )
    assert view(np.zeros((2, 3)), strides=None).strides == (24, 8)
    assert view(np.zeros(())).shape == ()
    assert view(a).flags.writeable
    a.flags.writeable = False
    assert not view(a).flags.writeable


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_dtypes(dtype: str) -> None:
    assert view(np.zeros(3, dtype)).dtype == np.dtype(dtype)


@pytest.mark.parametrize("address", [0, None, 1 << 40])
def test_an_empty_array_has_any_address(address: Any) -> None:
    x = view(np.zeros((2, 0, 3), "f4"), data=(address, False))
    assert x.shape == (2, 0, 3)
    assert np.broadcast_to(x, (5, 2, 0, 3)).shape == (5, 2, 0, 3)


def test_a_view_keeps_the_array_alive() -> None:
    owner = OnDevice(np.zeros((2, 3)))
    alive = weakref.ref(owner)
    x = describe("x", owner)
    assert x is not None
    part = x.T[None, 1:]
    assert part.source.owner is owner
    del owner, x
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(0, 2, 1),
    "T": lambda x: x.T,
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "slices": lambda x: x[1:, ::-1, -1],
    "new axes": lambda x: x[None, :, None],
    "an element": lambda x: x[1, 2, 3],
    "an integer of NumPy": lambda x: x[np.int64(1)],
    "everything": lambda x: x[()],
    "reshape": lambda x: x.reshape(6, 4),
    "reshape to a tuple": lambda x: x.reshape((2, 1, -1)),
    "reshape a part": lambda x: x[:, 1].reshape(2, 2, 2),
    "broadcast": lambda x: np.broadcast_to(x, (5, 2, 3, 4)),
    "broadcast an axis": lambda x: np.broadcast_to(x[:, :1], (2, 7, 4)),
    "squeeze": lambda x: x[:1].squeeze(),
}


@pytest.mark.parametrize("how", VIEWS)
def test_views(how: str) -> None:
    a = np.arange(24.0).reshape(2, 3, 4)
    x = VIEWS[how](view(a))
    expected = np.asarray(VIEWS[how](a))
    assert type(x) is DeviceArray
    assert x.source.owner.array is a
    assert (x.shape, x.strides) == (expected.shape, expected.strides)
    np.testing.assert_array_equal(plain(x), expected)


def test_what_a_view_tells() -> None:
    x = view(np.zeros((2, 3), "f2"))
    text = "DeviceArray(shape=(2, 3), dtype=float16, on a GPU)"
    assert repr(x) == str(x) == f"{x}" == text
    assert (len(x), x.size, np.size(x), np.ndim(x), np.shape(x)) == (2, 6, 6, 2, (2, 3))
    assert x.astype("f2") is x
    assert x.astype(np.float16, copy=False) is x


def test_shared_memory() -> None:
    a = np.zeros((4, 6))
    assert np.shares_memory(view(a[:2]), view(a[1:]))
    assert not np.shares_memory(view(a[:2]), view(a[2:]))
    most: Any = 100
    assert not np.shares_memory(view(a[:, ::2]), view(a[:, 1::2]), max_work=most)
    assert np.may_share_memory(view(a), a)


HOST = np.zeros((2, 3))

READS: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "tolist": lambda x: x.tolist(),
    "tobytes": lambda x: x.tobytes(),
    "item": lambda x: x.item(0),
    "bool": lambda x: bool(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x[0, 0]),
    "complex": lambda x: complex(x[0, 0]),
    "index": lambda x: operator.index(x[0, 0]),
    "iteration": lambda x: list(x),
    "in": lambda x: 1.0 in x,
    "setting": lambda x: operator.setitem(x, 0, 1),
    "an integer array": lambda x: x[[0]],
    "a boolean array": lambda x: x[HOST == 0],
    "True": lambda x: x[True],
    "reshape that copies": lambda x: x.T.reshape(6),
    "reshape to another size": lambda x: x.reshape(5),
    "astype": lambda x: x.astype("f4"),
    "sum": lambda x: x.sum(),
    "sort": lambda x: x.sort(),
    "fill": lambda x: x.fill(0),
    "flat": lambda x: x.flat,
    "real": lambda x: x.real,
    "data": lambda x: x.data,
    "ravel": lambda x: x.ravel(),
    "add": lambda x: x + 1,
    "radd": lambda x: HOST + x,
    "iadd": lambda x: x.__iadd__(1),
    "iadd to an array": lambda x: HOST.copy().__iadd__(x),
    "matmul": lambda x: x @ x.T,
    "neg": operator.neg,
    "less": lambda x: x < 1,
    "equal": lambda x: x == x,
    "not equal": lambda x: operator.ne(HOST, x),
    "ufunc": lambda x: np.exp(x),
    "ufunc to it": lambda x: np.add(HOST, HOST, out=x),
    "reduction": lambda x: np.add.reduce(x),
    "np.sum": lambda x: np.sum(x),
    "np.where": lambda x: np.where(x, 1, 2),
    "np.concatenate": lambda x: np.concatenate([x, x]),
    "np.copyto": lambda x: np.copyto(HOST.copy(), x),
    "np.reshape": lambda x: np.reshape(x, -1),
    "np.array_equal": lambda x: np.array_equal(x, x),
    "np.from_dlpack": lambda x: np.from_dlpack(x),
    "__array__": lambda x: x.__array__(),
    "__array_interface__": lambda x: x.__array_interface__,
}


@pytest.mark.parametrize("how", READS)
def test_what_reads_is_refused(how: str) -> None:
    x = describe("x", Nowhere(2, 3, dtype="f8"))  # whoever reads it falls
    with pytest.raises(TypeError, match=r"DeviceArray"):
        READS[how](x)


# Arrays of several libraries


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ({"mask": object()}, "a masked array"),
        ({"version": 1}, "version 2 or 3 .*got 1"),
        ({"version": 4}, "version 2 or 3 .*got 4"),
        ({"typestr": ">f4"}, "native byte order on a GPU, got >f4"),
        ({"typestr": "|V3"}, "numbers, got dtype .V3"),
        ({"typestr": "|O"}, "numbers, got dtype object"),
        ({"data": (0, False)}, r"address of an array of shape \(2, 3\), got none"),
    ],
)
def test_interfaces_that_are_refused(interface: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError, match=f"^mine: expected .*{expected}"):
        describe("mine", OnDevice(np.zeros((2, 3), "f4"), **interface))


def test_what_is_not_on_a_gpu() -> None:
    class Here:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    class Broken:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("no such type")

    values = (None, 1, 2.0, "a", [1], (2,), np.zeros(2), np.float32(1), np.ma.zeros(2), object())
    for value in (*values, Here()):
        assert describe("x", value) is None
    with pytest.raises(TypeError, match=r"^x: expected an array, got Broken: no such type"):
        describe("x", Broken())
    tensor = Tensor(np.zeros(2))
    tensor.is_cuda = False
    assert describe("x", tensor) is None
    x = view(np.zeros(2))
    assert describe("x", x) is x


def test_tensors_of_torch(torch: Any) -> None:
    a = np.zeros((4, 6), BFLOAT16)[:, ::2]
    x = describe("q", Tensor(a, 3))
    assert x is not None
    assert (x.shape, x.strides, x.dtype, x.ctypes.data) == (
        (4, 3),
        (12, 4),
        BFLOAT16,
        a.ctypes.data,
    )
    assert str(x) == "DeviceArray(shape=(4, 3), dtype=bfloat16, on GPU 3)"
    allocator = allocator_like(x)
    assert (allocator.name, allocator.device, allocator.stream) == ("torch", 3, 1234)
    for storage in UNIT:
        made = allocator.empty((2, 3), storage)
        assert type(made) is Tensor
        assert (made.shape, made.array.dtype.name, made.device.index) == ((2, 3), storage, 3)
    empty = describe("q", Tensor(np.zeros((0, 5), "f4")))
    assert empty is not None
    assert empty.shape == (0, 5)


def test_tensors_that_are_refused() -> None:
    for attribute, value in (("layout", "torch.sparse_coo"), ("negative", True)):
        tensor = Tensor(np.zeros(2))
        setattr(tensor, attribute, value)
        with pytest.raises(TypeError, match=r"^q: expected a dense tensor .*got torch\."):
            describe("q", tensor)
    with pytest.raises(TypeError, match=r"^q: .*real numbers, got torch\.float8_e5m2"):
        describe("q", Tensor(np.zeros(2, ml_dtypes.float8_e5m2)))


def test_arrays_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            used.append(self.number)

        def __exit__(self, *args: object) -> None:
            used.append(-1)

    fake: Any = ModuleType("cupy")
    stream = SimpleNamespace(ptr=55)
    fake.cuda = SimpleNamespace(Device=Device, get_current_stream=lambda: stream)

    def empty(shape: tuple[int, ...], dtype: Any) -> CuPyArray:
        used.append(0)
        return CuPyArray(np.zeros(shape, dtype))

    fake.empty = empty
    fake.asnumpy = lambda x: x.array
    monkeypatch.setitem(sys.modules, "cupy", fake)
    a = np.arange(3, dtype=BFLOAT16)
    x = describe("q", CuPyArray(a, stream=55))
    assert x is not None
    assert x.dtype == BFLOAT16  # void in the interface
    allocator = allocator_like(x)
    assert (allocator.name, allocator.device, allocator.stream) == ("cupy", 1, 55)
    assert used == [1, -1]  # the current stream is that of a device
    used.clear()
    made = allocator.empty((2,), "bfloat16")
    assert (type(made), made.array.dtype, used) == (CuPyArray, BFLOAT16, [1, 0, -1])
    np.testing.assert_array_equal(device_arrays.copied(x), a)


def test_arrays_of_anyone(numba_cuda: Any) -> None:
    x = view(np.zeros(3, "f4"), stream=7)
    allocator = allocator_like(x)
    assert (allocator.name, allocator.device, allocator.stream) == ("numba", None, 7)
    assert allocator_like(view(np.zeros(3))).stream == 0
    made = allocator.empty((2, 3), "float16")
    assert (made.array.shape, made.array.dtype) == ((2, 3), np.float16)
    assert made.interface["stream"] == 7  # so that what reads it waits


def test_arrays_of_numba() -> None:
    owner: Any = OnDevice(np.zeros(3))
    owner.gpu_data = SimpleNamespace(context=SimpleNamespace(device=SimpleNamespace(id=2)))
    x = describe("x", owner)
    assert x is not None
    assert x.source.device == 2

    class Simulated:
        __cuda_ndarray__ = True

        def __init__(self, array: Any) -> None:
            self.array = array

        def __getattr__(self, name: str) -> Any:
            return getattr(self.array, name)

    a = np.zeros((3, 4), "f4")[:, ::2]
    x = describe("x", Simulated(a))
    assert x is not None
    assert (x.shape, x.strides, x.ctypes.data) == (a.shape, a.strides, a.ctypes.data)


def test_arrays_with_dlpack_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exporter:
        def __init__(self, device: int) -> None:
            self.device = device

        def __dlpack_device__(self) -> tuple[int, int]:
            return (self.device, 4)

    a = np.zeros((3, 4), "f4").T

    class View:
        ptr, shape, strides, dtype, readonly = a.ctypes.data, a.shape, (1, 4), a.dtype, True

        @classmethod
        def from_dlpack(cls, value: Any, stream_ptr: int) -> View:
            if value.device == 13:
                raise BufferError("no such memory")
            assert stream_ptr == 1  # 0 is none in this protocol
            return cls()

    fake: Any = ModuleType("cuda.core.utils")
    fake.StridedMemoryView = View
    monkeypatch.setitem(sys.modules, "cuda.core.utils", fake)
    x = describe("k", Exporter(2))
    assert x is not None
    assert (x.shape, x.strides, x.ctypes.data) == (a.shape, a.strides, a.ctypes.data)
    assert not x.flags.writeable
    assert x.source.device == 4
    assert isinstance(x.source.keepalive, View)
    with pytest.raises(TypeError, match=r"^k: expected an array, got Exporter: no such memory"):
        describe("k", Exporter(13))
    monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
    with pytest.raises(TypeError, match=r"^k: .*got Exporter, .*DLPack alone.* cuda-core"):
        describe("k", Exporter(2))


@pytest.mark.parametrize("dtype", ["i8", "f2", BFLOAT16, "f8"])
def test_copies_of_small_arrays(numba_cuda: Any, torch: Any, dtype: Any) -> None:
    a = np.arange(12).astype(dtype).reshape(3, 4)
    for b in (a, a.T, a[::-1, ::2], a[1, 1:], a[2, 3, ...], a[:0], np.broadcast_to(a[0], (5, 4))):
        for x in (
            view(b),
            describe("x", Tensor(b) if all(n > 0 for n in b.strides) else OnDevice(b)),
        ):
            assert x is not None
            got = device_arrays.copied(x)
            assert type(got) is np.ndarray
            assert got.dtype == b.dtype
            np.testing.assert_array_equal(got, b)
            assert not np.shares_memory(got, b) or type(x.source.owner) is Tensor


def test_copies_by_numba(numba_cuda: Any) -> None:
    seen: list[Any] = []

    def from_cuda_array_interface(interface: dict[str, Any], owner: Any) -> Any:
        (size,) = interface["shape"]
        data = np.frombuffer(ctypes.string_at(interface["data"][0], size), np.uint8)
        seen.append((interface["typestr"], size, interface["stream"], owner))
        return SimpleNamespace(copy_to_host=lambda: data)

    numba_cuda.from_cuda_array_interface = from_cuda_array_interface
    owner = OnDevice(np.arange(9, dtype="i4")[::-2], stream=7)
    x = describe("x", owner)
    assert x is not None
    assert device_arrays.copied(x).tolist() == [8, 6, 4, 2, 0]
    assert seen == [("|u1", 36, 7, owner)]


# Without ml_dtypes


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dtypes.bfloat16.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    yield
    dtypes.bfloat16.cache_clear()


def test_bfloat16_without_ml_dtypes(torch: Any, without_ml_dtypes: None) -> None:
    q, k, v = (Tensor(x.astype(BFLOAT16)) for x in qkv(1, 2, 3, 4, 8))
    numbers = Tensor(np.array([0.5, -2.0], BFLOAT16))
    out = Tensor(np.zeros((1, 2, 3, 8), BFLOAT16))
    bias = Tensor(np.zeros((3, 4), BFLOAT16))
    p = Problem.build(q, k, v, bias=bias, sinks=numbers, alibi_slopes=numbers)
    results.check_out(p, out)
    assert p.storage == "bfloat16"
    assert p.dtype == dtypes.BFLOAT16_BITS
    assert p.sinks is not None
    assert p.sinks.tolist() == [0.5, -2.0]
    assert repr(p.q).startswith("DeviceArray(shape=(1, 2, 3, 8), dtype=bfloat16")
    for name in WRT:
        made = results.new_gradient(p, name)
        assert made.source.owner.array.dtype == BFLOAT16
    with pytest.raises(TypeError, match=r"^out: expected dtype bfloat16 .*got <f4"):
        results.check_out(Problem.build(q, k, v), Tensor(np.zeros((1, 2, 3, 8), "f4")))
    with pytest.raises(TypeError, match=r"^lse: expected dtype float32 for q of bfloat16, got bfl"):
        results.check_incoming(p, out, out, out, None)


# Problems


def plus(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
    return score + x[kv_idx]


def shown(b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
    return x[kv_idx]


def three(**interface: Any) -> dict[str, Any]:
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 3)}
    return {name: Nowhere(*shape, **interface) for name, shape in shapes.items()}


def test_a_problem_reads_nothing() -> None:
    table, doc = Nowhere(7), Nowhere(7, dtype="?")
    bias = Nowhere(4, 1, 7, dtype="f2")
    p = Problem.build(
        **three(),
        mask=Nowhere(5, 7, dtype="?"),
        bias=bias,
        score_mod=functools.partial(plus, x=table),
        mask_mod=nattn.mask(masks.causal) | functools.partial(shown, x=doc),
        q_lens=[5, 3],
    )
    results.check_out(p, Nowhere(2, 4, 5, 3, data=(1 << 41, False)))
    assert p.allocator is not None
    assert p.allocator.source is p.q.source  # type: ignore[attr-defined]
    assert isinstance(p.bias, DeviceArray)
    assert p.bias.strides == (0, 14, 0, 2)
    assert p.bias.source.owner is bias
    assert isinstance(p.mask, DeviceArray)
    assert p.mask.shape == (2, 4, 5, 7)
    (mod,) = p.score_mods
    assert isinstance(mod, binding.Bound)
    assert isinstance(mod.values[0], DeviceArray)
    x, lse = Nowhere(2, 4, 5, 3), Nowhere(2, 4, 5)
    dout, out, *rows = results.check_incoming(p, x, x, lse, lse)
    assert all(type(x) is DeviceArray for x in (dout, out, *rows))
    assert results.check_incoming(p, x, x, lse, None)[3] is None


def test_ranks_and_layouts() -> None:
    x = Nowhere(5, 8)
    p = Problem.build(x, x, x)
    assert p.q.shape == (1, 1, 5, 8)
    rows = results.check_incoming(p, x, x, Nowhere(5), None)
    assert [y.shape for y in rows[:3]] == [(1, 1, 5, 8), (1, 1, 5, 8), (1, 1, 5)]
    y = Nowhere(2, 5, 3, 8)
    p = Problem.build(y, y, y, layout="bnhd")
    assert p.q.shape == (2, 3, 5, 8)
    assert results.as_bhnd(p, y).strides == p.q.strides == (480, 32, 96, 4)
    assert type(results.as_bhnd(p, y)) is DeviceArray


def test_small_arrays_are_copied(numba_cuda: Any) -> None:
    slopes, lengths = np.array([0, 1, 2, 3], "f2"), np.array([7, 4], "i4")
    for wrap in (OnDevice, np.asarray):
        p = Problem.build(
            **three(),
            alibi_slopes=wrap(slopes),
            sinks=wrap(slopes[::-1]),
            kv_lens=wrap(lengths),
            q_offset=wrap(lengths),
            q_lens=wrap(np.array([5, 0])),
        )
        assert type(p.sinks) is type(p.kv_lens) is type(p.q_offset) is np.ndarray
        assert p.sinks.tolist() == [3, 2, 1, 0]
        assert p.sinks.dtype == np.float32
        assert (p.kv_lens.tolist(), p.q_offset.tolist(), p.q_lens.tolist()) == (
            [7, 4],
            [7, 4],
            [5, 0],
        )
        (mod,) = p.score_mods
        assert isinstance(mod, binding.Bound)
        assert type(mod.values[0]) is np.ndarray
        assert p.given["sinks"] == ((4,), np.dtype("f2"))
    with pytest.raises(ValueError, match=r"^kv_lens: expected lengths from 0 to 7, got 8"):
        Problem.build(**three(), kv_lens=OnDevice(np.array([7, 8])))
    with pytest.raises(ValueError, match=r"^alibi_slopes: expected numbers .*got nan"):
        Problem.build(**three(), alibi_slopes=OnDevice(np.array([0, 1, 2, np.nan])))


def test_bound_arrays_may_lie_in_host_memory() -> None:
    table = np.zeros(7, "f4")
    p = Problem.build(**three(), score_mod=functools.partial(plus, x=table))
    (mod,) = p.score_mods
    assert isinstance(mod, binding.Bound)
    assert mod.values[0] is table


@pytest.mark.parametrize("dtype", ["f4", "f2", BFLOAT16, "i4", "?"])
def test_a_single_number_is_bound_as_one(numba_cuda: Any, dtype: Any) -> None:
    number = np.ones((), dtype)
    p = Problem.build(**three(), score_mod=functools.partial(plus, x=OnDevice(number)))
    (mod,) = p.score_mods
    assert isinstance(mod, binding.Bound)
    expected = {"b": bool, "i": int}.get(number.dtype.kind, float)
    assert [(type(x), x) for x in mod.values] == [(expected, 1)]


def test_the_streams_that_arrays_name() -> None:
    assert Problem.build(**three()).streams == ()
    a = three(stream=5)
    a["v"] = Nowhere(2, 2, 7, 3, stream=9)
    mod = functools.partial(plus, x=Nowhere(7, stream=2))
    p = Problem.build(**a, bias=Nowhere(7, stream=9), score_mod=mod)
    assert p.streams == (5, 9, 2)
    assert p.allocator is not None
    assert p.allocator.stream == 5


def on(device: int, *shape: int, dtype: Any = "f4") -> Any:
    array: Any = Nowhere(*shape, dtype=dtype)
    array.device = SimpleNamespace(id=device)
    return array


MIXED: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"k": np.zeros((2, 2, 7, 8), "f4")}, "q, k: .*q on GPU 0 and k in host memory"),
    "v is a list": ({"v": [[[[0.0]]]]}, "q, v: .*q on GPU 0 and v in host memory"),
    "k elsewhere": ({"k": on(1, 2, 2, 7, 8)}, "q, k: .*q on GPU 0 and k on GPU 1"),
    "mask": ({"mask": np.ones((5, 7), bool)}, "q, mask: .*mask in host memory"),
    "bias elsewhere": ({"bias": on(1, 5, 7)}, "q, bias: .*bias on GPU 1"),
    "table elsewhere": (
        {"score_mod": functools.partial(plus, x=on(1, 7))},
        r"q, x of score_mod \(plus\): .*x of score_mod \(plus\) on GPU 1",
    ),
    "out": ({"out": np.zeros((2, 4, 5, 3), "f4")}, "out: .*on a GPU, as q is, got ndarray"),
    "out elsewhere": ({"out": on(1, 2, 4, 5, 3)}, "q, out: .*q on GPU 0 and out on GPU 1"),
    "a table of complex numbers": (
        {"score_mod": functools.partial(plus, x=on(0, 7, dtype="c8"))},
        "score_mod: .*x of plus .*shape .7,. and dtype complex64",
    ),
    "a mask of integers": ({"mask": on(0, 5, 7, dtype="i4")}, "mask: .*bool .*got int32"),
    "a bias of integers": ({"bias": on(0, 5, 7, dtype="i4")}, "bias: .*float32 .*got int32"),
    "integers": ({"q": on(0, 2, 4, 5, 8, dtype="i4")}, "q: .*float32 .*got int32"),
    "two dtypes": ({"k": on(0, 2, 2, 7, 8, dtype="f2")}, "q, k, v: expected one dtype"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_places(name: str) -> None:
    changed, text = MIXED[name]
    arguments = {"q": on(0, 2, 4, 5, 8), "k": on(0, 2, 2, 7, 8), "v": Nowhere(2, 2, 7, 3)}
    arguments |= changed
    out = arguments.pop("out", None)
    with pytest.raises(TypeError, match=f"^{text}"):
        results.check_out(Problem.build(**arguments), out)


def test_incoming_that_lies_elsewhere() -> None:
    p = Problem.build(**three())
    x, lse = Nowhere(2, 4, 5, 3), Nowhere(2, 4, 5)
    with pytest.raises(TypeError, match=r"^q, dout: .*q on a GPU and dout in host memory"):
        results.check_incoming(p, np.zeros((2, 4, 5, 3), "f4"), x, lse, None)
    with pytest.raises(TypeError, match=r"^q, dlse: .*dlse in host memory"):
        results.check_incoming(p, x, x, lse, np.zeros((2, 4, 5), "f4"))
    with pytest.raises(ValueError, match=r"^lse: expected shape \(2, 4, 5\)"):
        results.check_incoming(p, x, x, Nowhere(2, 5, 4), None)
    p = Problem.build(*(x.array for x in three().values()))
    with pytest.raises(TypeError, match=r"^q, dout: .*dout on a GPU"):
        results.check_incoming(p, x, x, lse, None)


def test_out_is_checked_by_its_address() -> None:
    a = np.zeros((2, 4, 7, 8), "f4")
    q = OnDevice(a)
    for x, expected in (
        (a[..., :3], "overlaps q$"),
        (np.broadcast_to(np.zeros(3, "f4"), (2, 4, 7, 3)), "read-only"),
    ):
        with pytest.raises(ValueError, match=f"^out: .*{expected}"):
            results.check_out(
                Problem.build(q, q, OnDevice(np.zeros((2, 4, 7, 3), "f4"))), OnDevice(x)
            )
    strided = OnDevice(np.zeros((2, 4, 7, 8), "f4"), strides=(0, 0, 32, 4))
    with pytest.raises(ValueError, match=r"^out: .*strides \(0, 0, 32, 4\)"):
        results.check_out(Problem.build(q, q, q), strided)
    table = np.zeros((2, 4, 7, 8), "f4")
    mod = functools.partial(plus, x=OnDevice(table[0, 0, 0]))
    with pytest.raises(ValueError, match=r"^out: .*overlaps x of score_mod"):
        results.check_out(Problem.build(q, q, q, score_mod=mod), OnDevice(table))


def test_a_block_mask_is_made_of_host_memory() -> None:
    with pytest.raises(TypeError, match=r"^mask_mod: expected x of shown .*NumPy array"):
        nattn.BlockMask.from_mask_mod(functools.partial(shown, x=Nowhere(9, dtype="?")), 1, 1, 9, 9)


# Calls: the api with the reference in the place of the cuda backend


def on_host(x: Any) -> Any:
    """Replace the views of doubles by the arrays themselves, in functions too."""
    if isinstance(x, binding.Combination):
        return binding.Combination(x.operator, tuple(map(on_host, x.parts)))
    if isinstance(x, binding.Bound):
        return replace(x, values=tuple(map(on_host, x.values)))
    return plain(x) if isinstance(x, DeviceArray) else x


class Stand:
    """A backend that keeps the interface of the one for CUDA."""

    KEEPS_EXACT = False
    usable = 0

    def check_usable(self) -> None:
        self.usable += 1

    def problem(self, p: Problem) -> Problem:
        for x in (p.q, p.k, p.v):
            assert type(x) is DeviceArray
        arrays = {name: on_host(getattr(p, name)) for name in ("q", "k", "v", "mask", "bias")}
        mods = tuple(map(on_host, p.score_mods))
        return replace(p, **arrays, score_mods=mods, mask_mod=on_host(p.mask_mod))

    def forward(self, p: Problem, out: Any, lse: Any, progress: Any = None) -> None:
        assert type(out) is type(lse) is DeviceArray
        assert lse.shape == (p.B, p.Hq, p.Nq)
        reference.forward(self.problem(p), plain(out), plain(lse))

    def backward(
        self, p: Problem, dout: Any, out: Any, lse: Any, dlse: Any, wrt: Any, progress: Any = None
    ) -> Any:
        dlse = None if dlse is None else plain(dlse)
        found = reference.backward(self.problem(p), plain(dout), plain(out), plain(lse), dlse, wrt)
        made = {name: results.new_gradient(p, name) for name in wrt}
        with np.errstate(all="ignore"):
            for name, x in found.items():
                if name == "alibi_slopes" and made[name].ndim == 1:
                    x = x.sum(axis=0)
                plain(made[name])[...] = x
        return made


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    backend: Any = Stand()
    monkeypatch.setitem(backends._loaded, "cuda", backend)
    return backend  # type: ignore[no-any-return]


def moved(x: Any, wrap: Any) -> Any:
    """Put all arrays of an option, and what functions are bound to, into doubles."""
    if isinstance(x, functools.partial):
        return functools.partial(x.func, **{k: moved(y, wrap) for k, y in x.keywords.items()})
    return wrap(x) if isinstance(x, np.ndarray) and x.dtype.isnative else x


NAMES = {
    "one query",
    "layout bnhd",
    "bias with -inf",
    "ALiBi for each item, causal, lengths",
    "sinks",
    "score_mod with a table",
    "everything, modifiers too",
}
CALLS = [case for case in CASES if case.name in NAMES]
KINDS: list[tuple[Any, Any]] = [
    (OnDevice, "f4"),
    (OnDevice, "f2"),
    (Tensor, BFLOAT16),
    (Tensor, "f8"),
]


def test_the_calls_are_there() -> None:
    assert len(CALLS) == len(NAMES)


@pytest.mark.parametrize(("wrap", "dtype"), KINDS, ids=["f4", "f2", "torch-bf16", "torch-f8"])
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_calls(
    stand: Stand, numba_cuda: Any, torch: Any, wrap: Any, case: Case, dtype: Any
) -> None:
    q, k, v, options = case.make(dtype)
    p = Problem.build(q, k, v, **options)
    dout, dlse = incoming(p)
    wrt = [name for name in WRT if name in "qkv" or name in p.given]
    out, lse = nattn.attention(q, k, v, return_lse=True, backend="reference", **options)
    moved_options = {name: moved(x, wrap) for name, x in options.items()}
    got = nattn.attention(wrap(q), wrap(k), wrap(v), return_lse=True, **moved_options)
    for x, y in zip(got, (out, lse), strict=True):
        assert type(x) is wrap
        assert x.array.dtype == y.dtype
        np.testing.assert_array_equal(x.array, y)
    expected: Any = nattn.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, backend="reference", **options
    )
    arrays = [wrap(x) for x in (dout, q, k, v, out, lse)]
    found: Any = nattn.attention_backward(
        *arrays, dlse=wrap(dlse), wrt=wrt, backend="cuda", **moved_options
    )
    for name, x, y in zip(WRT, found, expected, strict=False):
        assert (x is None) == (y is None) == (name not in wrt)
        if x is not None:
            assert type(x) is wrap
            assert x.array.dtype == y.dtype
            assert x.array.flags.c_contiguous
            np.testing.assert_array_equal(x.array, y)
    assert stand.usable == 2


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4)])
def test_calls_of_lower_rank(stand: Stand, numba_cuda: Any, shape: tuple[int, ...]) -> None:
    q, k, v = (gaussian(*shape, seed=n) for n in range(3))
    out, lse = nattn.attention(q, k, v, return_lse=True, backend="reference")
    mine = OnDevice(np.zeros(shape, "f4"))
    got = nattn.attention_vjp(OnDevice(q), OnDevice(k), OnDevice(v), out=mine, return_lse=True)
    (same, rows), vjp = got
    assert same is mine
    np.testing.assert_array_equal(mine.array, out)
    np.testing.assert_array_equal(rows.array, lse)
    grads: Any = vjp(OnDevice(q), wrt=["k"])
    expected = nattn.attention_backward(q, q, k, v, out, lse, backend="reference")
    np.testing.assert_array_equal(grads.dk.array, expected.dk)
    assert grads.dq is None


def test_backends_for_arrays_on_a_gpu(stand: Stand) -> None:
    nothing: Any = None
    for backend in ("cpu", "reference"):
        with pytest.raises(TypeError, match=f"^backend: expected 'auto' or 'cuda' .*'{backend}'"):
            nattn.attention(**three(), backend=backend)
    with pytest.raises(ValueError, match=r"^backend: expected .*'cuda', got 'gpu'"):
        nattn.attention(**three(), backend="gpu")
    with pytest.raises(TypeError, match=r"^backend: expected .*'cuda', got None"):
        nattn.attention(**three(), backend=nothing)
    assert stand.usable == 0


def odd(*shape: int, **interface: Any) -> OnDevice:
    """Return an array of float32 at an odd address, unless the interface says otherwise."""
    return OnDevice(np.ndarray(shape, "f4", np.zeros(4 * np.prod(shape) + 1, "u1"), 1), **interface)


def even(*shape: int) -> OnDevice:
    return OnDevice(np.zeros(shape, "f4"))


STRADDLING: dict[str, Callable[..., OnDevice]] = {
    "address": odd,
    "strides": lambda *shape: Nowhere(*shape, strides=(*(20,) * (len(shape) - 1), 6)),
}
OF_FORWARD = ("q", "k", "v", "bias", "out")
OF_BACKWARD = ("dout", "q", "k", "v", "bias", "out", "lse", "dlse")


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("how", STRADDLING)
@pytest.mark.parametrize("name", OF_FORWARD)
def test_elements_that_straddle_their_places(name: str, how: str, layout: str) -> None:
    """A GPU would fault: the array is named before anything is launched, or a GPU looked for."""
    arrays: dict[str, Any] = {x: even(1, 3, 3, 4) for x in OF_FORWARD}
    arrays["bias"] = even(3, 3)
    arrays[name] = STRADDLING[how](*arrays[name].array.shape)
    if name == "out" and how == "strides":  # which would overlap each other
        arrays[name] = Nowhere(1, 3, 3, 4, strides=(540, 180, 60, 6))
    error = f"^{name}: expected elements at multiples of their 4 bytes"
    with pytest.raises(NotImplementedError, match=error):
        nattn.attention(**arrays, layout=layout)


@pytest.mark.parametrize("how", STRADDLING)
@pytest.mark.parametrize("name", OF_BACKWARD)
def test_elements_that_straddle_their_places_backward(name: str, how: str) -> None:
    arrays: dict[str, Any] = {x: even(3, 4) for x in OF_BACKWARD}
    arrays |= {"bias": even(3, 3), "lse": even(3), "dlse": even(3)}
    arrays[name] = STRADDLING[how](*arrays[name].array.shape)
    error = f"^{name}: expected elements at multiples of their 4 bytes"
    with pytest.raises(NotImplementedError, match=error):
        nattn.attention_backward(**arrays, backend="cuda")


def test_all_that_straddles_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"^k: expected .*; out: expected elements"):
        nattn.attention(even(3, 4), odd(3, 4), even(3, 4), out=odd(3, 4))


def test_no_element_straddles_where_there_is_none(stand: Stand, numba_cuda: Any) -> None:
    out = odd(0, 4)
    assert nattn.attention(odd(0, 4), even(3, 4), even(3, 4), out=out) is out


def test_more_rows_than_kernels_can_number() -> None:
    k = Nowhere(1, 1, 1 << 31, 4, strides=(0, 0, 0, 4))
    with pytest.raises(NotImplementedError, match=r"^k: expected fewer than 2147483648 rows"):
        nattn.attention(Nowhere(1, 1, 3, 4), k, k)
    q = Nowhere(1, 2, 1 << 30, 4, strides=(0, 0, 0, 4))
    with pytest.raises(NotImplementedError, match=r"^q: expected fewer than 2147483648 rows"):
        nattn.attention(q, Nowhere(1, 1, 3, 4), Nowhere(1, 1, 3, 4))
