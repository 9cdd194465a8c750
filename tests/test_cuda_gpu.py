"""The kernels on an NVIDIA GPU: every one of them against the reference, within the budget.

`CHECKS` lists what is checked, the most telling first; bench/gpu_check.py runs the same list. With
NUMBA_ENABLE_CUDASIM=1 those that can be made tiny run in numba-cuda's simulator, which shows that
the checks themselves are right.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cases
import cuda_cases
import numpy as np
import pytest
import registry
from cases import CASES, Case, check, check_gradients, gaussian, has_gradients, incoming, qkv
from numba.core import config
from numpy.typing import NDArray

import nattn
from nattn.call import device_arrays
from nattn.call.problem import WRT, Problem
from nattn.functions import mods
from nattn.vectors import dtypes

pytestmark = [pytest.mark.gpu]

Array = NDArray[Any]
Maker = Callable[[Array], Any]

SIMULATED = bool(config.ENABLE_CUDASIM)
if SIMULATED:  # where NumPy computes, and warns of what is not finite
    pytestmark.append(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
STORAGE = ("float32", "float16", "bfloat16", "float64")
DIMENSIONS = (4, 10) if SIMULATED else (64, 128, 16, 40, 80, 96, 256, 300)
FEW_DIMENSIONS = (4,) if SIMULATED else (64, 128, 256)
nan, inf = np.nan, np.inf


@dataclass(frozen=True)
class Check:
    """One thing to check.

    Attributes
    ----------
    name : str
        What is checked.
    run : callable
        Raises AssertionError if it is not so.
    needs : str or None
        The library whose arrays it takes.
    """

    name: str
    run: Callable[[], None]
    needs: str | None = None


def arrays(sizes: tuple[int, ...], storage: str = "float32") -> tuple[Array, Array, Array]:
    """Return normal q, k, v for the sizes B, Hq, Hkv, Nq, Nk, D and Dv, which may be left out."""
    B, Hq, Hkv, Nq, Nk, D, *rest = sizes
    of = dtypes.storage_dtype(storage)
    q, _, _ = qkv(B, Hq, Nq, 0, D, seed=1)
    _, k, v = qkv(B, Hkv, 0, Nk, D, *rest, seed=2)
    return q.astype(of), k.astype(of), v.astype(of)


def sized(real: tuple[int, ...], tiny: tuple[int, ...]) -> tuple[int, ...]:
    """Choose sizes for a GPU or for the simulator."""
    return tiny if SIMULATED else real


def attend(*inputs: Any, **options: Any) -> tuple[Array, Array]:
    """Return out and lse of arrays in host memory."""
    out, lse = nattn.attention(*inputs, return_lse=True, backend="cuda", **options)
    return out, lse


def differentiate(*inputs: Any, **options: Any) -> list[Array]:
    """Return out, lse and all gradients of arrays in host memory."""
    p = Problem.build(*inputs, **options)
    out, vjp = nattn.attention_vjp(*inputs, backend="cuda", **options)
    return [out, *(x for x in vjp(*incoming(p), has_gradients(p)) if x is not None)]


def assert_same_bits(got: Any, expected: Any, at: Any = ...) -> None:
    """Assert that arrays agree exactly, NaN with NaN."""
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(dtypes.widen(x)[at], dtypes.widen(y)[at])


# Every kernel, storage type and head dimension


def check_both(storage: str, sizes: tuple[int, ...], **options: Any) -> None:
    inputs = arrays(sizes, storage)
    check("cuda", *inputs, **options)
    check_gradients("cuda", *inputs, **options)


def check_edges(D: int) -> None:
    """Check sizes around those of all tiles."""
    lengths = (3, 4, 5, 8, 9) if SIMULATED else (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129)
    q, k, v = arrays((1, 1, 1, lengths[-1], lengths[-1] + 1, D))
    for n in lengths:
        check_gradients("cuda", q[:, :, :n], k, v, causal=True)
        check_gradients("cuda", q, k[:, :, :n], v[:, :, :n])
        check("cuda", q[:, :, :n], k[:, :, :n], v[:, :, :n])


def check_case(case: Case, dtype: str = "float32") -> None:
    q, k, v, options = case.make(dtypes.storage_dtype(dtype))
    check("cuda", q, k, v, **options)
    check_gradients("cuda", q, k, v, **options)


# Functions of users


def check_modifier(name: str) -> None:
    """Check one of the registry."""
    B, H, Nq, Nk, D = sized((2, 4, 70, 90, 32), (2, 2, 5, 6, 4))
    mod = registry.MODS[name].build(registry.Sizes(B, H, Nq, Nk), registry.generator(name))
    check_both("float32", (B, H, H // 2, Nq, Nk, D), score_mod=mod)


def check_mask(name: str) -> None:
    """Check one of the registry, and that its `BlockMask` changes no bit."""
    B, H, Nq, Nk, D = sized((2, 2, 200, 300, 32), (2, 2, 5, 6, 4))
    sizes = registry.Sizes(B, H, Nq, Nk)
    mask_mod = registry.MASKS[name](sizes, registry.generator(name))
    inputs = arrays((B, H, H, Nq, Nk, D))
    check("cuda", *inputs, mask_mod=mask_mod)
    check_gradients("cuda", *inputs, mask_mod=mask_mod)
    blocks = nattn.BlockMask.from_mask_mod(mask_mod, B, H, Nq, Nk, block_size=16)
    assert_same_bits(
        differentiate(*inputs, block_mask=blocks), differentiate(*inputs, mask_mod=mask_mod)
    )


def check_dropout(storage: str) -> None:
    """Read from the result itself which pairs were kept: values are rows of a unit matrix."""
    n, seed, p = sized((130,), (6,))[0], (1 << 40) + 3, 0.4
    q, k = (np.zeros((2, 3, n, 8), dtypes.storage_dtype(storage)) for _ in range(2))
    v = np.broadcast_to(np.eye(n), (2, 3, n, n)).astype(q.dtype)
    out, _ = attend(q, k, v, dropout_p=p, seed=seed)
    b, h, i, j = np.ogrid[:2, :3, :n, :n]
    np.testing.assert_array_equal(dtypes.widen(out) != 0, mods.keep(b, h, i, j, seed, p))
    few, _ = attend(q[:, :, :1], k, v, dropout_p=p, seed=seed)
    assert_same_bits([few != 0], [out[:, :, :1] != 0])


def out_of_range(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[kv_idx + 1]


def check_index_error() -> None:
    q, k, v = arrays((1, 1, 1, *sized((40, 70), (3, 5)), 4))
    mod = functools.partial(out_of_range, table=np.zeros(k.shape[2], np.float32))
    with pytest.raises(IndexError, match="score_mod"):
        nattn.attention(q, k, v, score_mod=mod, backend="cuda")
    attend(q, k, v, score_mod=mod, kv_lens=k.shape[2] - 1)  # which hides the pair in question


# Promises


HIDING: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "lengths": lambda Nq, Nk: {"kv_lens": Nk - 2},
    "causal": lambda Nq, Nk: {"causal": True, "q_offset": Nk - 2 - Nq},
    "window": lambda Nq, Nk: {"window_size": (None, 0), "q_offset": Nk - 2 - Nq},
    "mask": lambda Nq, Nk: {"mask": np.arange(Nk) < Nk - 2},
    "bias": lambda Nq, Nk: {"bias": np.where(np.arange(Nk) < Nk - 2, 0.5, -inf)},
    "mask_mod": lambda Nq, Nk: {"mask_mod": functools.partial(_before, n=Nk - 2)},
}
"""Ways to hide the last two keys from all rows."""


def _before(b: Any, h: Any, q_idx: Any, kv_idx: Any, n: Any) -> Any:
    return kv_idx < n


def check_hidden(how: str, Nq: int) -> None:
    """Whatever lies in hidden keys and values, the results have the same bits."""
    Nk = sized((200,), (7,))[0]
    q, k, v = arrays((2, 2, 1, Nq, Nk, 8))
    options = HIDING[how](Nq, Nk)
    expected = differentiate(q, k, v, **options)
    for x in (nan, inf, -inf):
        poisoned = [y.copy() for y in (k, v)]
        for y in poisoned:
            y[:, :, -2:] = x
        got = differentiate(q, *poisoned, **options)
        assert_same_bits(got, expected)
        for gradient in got[2:4]:
            assert (gradient[:, :, -2:] == 0).all()


def check_shown(Nq: int) -> None:
    """A NaN reaches exactly the rows that see it, and in a value exactly its column."""
    Nk = sized((200,), (7,))[0]
    for at, j in itertools.product((1, 2), (0, Nk // 2, Nk - 1)):
        inputs = arrays((1, 2, 1, Nq, Nk, 8))
        clean, _ = attend(*inputs, causal=True)
        inputs[at][0, 0, j, 3] = nan
        out, _ = attend(*inputs, causal=True)
        sees = np.arange(Nq) + Nk - Nq >= j
        odd = np.zeros(out.shape, bool)
        odd[:, :, sees, ... if at == 1 else 3] = True
        np.testing.assert_array_equal(np.isnan(out), odd)
        np.testing.assert_array_equal(out[~odd], clean[~odd])


def check_same_bits(storage: str) -> None:
    """Twice the same call, an item alone, and several threads: the same bits."""
    sizes = sized((3, 4, 2, 150, 180, 64), (2, 2, 1, 5, 6, 4))
    inputs = arrays(sizes, storage)
    options: dict[str, Any] = {"dropout_p": 0.2, "seed": 4, "softcap": 2.0, "causal": True}
    expected = differentiate(*inputs, **options)
    assert_same_bits(differentiate(*inputs, **options), expected)
    first = attend(*inputs, causal=True)
    alone = attend(*(x[:1] for x in inputs), causal=True)
    assert_same_bits([x[:1] for x in first], alone)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(
            lambda n: differentiate(*inputs, **options), range(1 if SIMULATED else 8)
        ):
            assert_same_bits(got, expected)


def check_empty() -> None:
    for B, H, Nq, Nk in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        check_both("float32", (B, H, H, Nq, Nk, 4))
    check("cuda", *arrays((1, 1, 1, 4, 5, 4, 0)))


# Arrays of other libraries


class Foreign:
    """Some library's array: memory of Numba's behind the bare interface."""

    def __init__(self, x: Array) -> None:
        self.dtype, self.shape = x.dtype, x.shape
        raw = x.copy().reshape(-1).view(np.uint8)
        self._memory: Any = raw if SIMULATED else _numba(raw)
        address = raw.ctypes.data if SIMULATED else _address(self._memory)
        typestr = "<V2" if x.dtype.kind == "V" else x.dtype.str
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": None,
            "typestr": typestr,
            "data": (address, False),
            "stream": None,
        }


def _address(x: Any) -> int:
    address: int = x.__cuda_array_interface__["data"][0]
    return address


def _numba(x: Array) -> Any:
    return importlib.import_module("numba.cuda").to_device(x)


def _torch(x: Array) -> Any:
    torch = importlib.import_module("torch")
    if dtypes.storage_name(x.dtype) == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def _cupy(x: Array) -> Any:
    return importlib.import_module("cupy").asarray(x)


LIBRARIES: dict[str, tuple[Maker, str]] = {
    "numba": (_numba, "numba"),
    "foreign": (Foreign, "numba"),
    "torch": (_torch, "torch"),
    "cupy": (_cupy, "cupy"),
}
"""How each library gets an array onto the GPU, and which one makes the results."""


def to_host(x: Any) -> Array:
    """Return what a result holds."""
    found = device_arrays.describe("x", x)
    assert found is not None, f"{type(x).__name__} is not on a GPU"
    return device_arrays.copied(found)


def check_library(library: str, storage: str) -> None:
    """The same bits come from and in arrays of a library, however they lie in memory."""
    send, kind = LIBRARIES[library]
    sizes = sized((2, 4, 2, 90, 110, 40), (2, 2, 1, 4, 5, 4))
    q, k, v = arrays(sizes, storage)
    bias = gaussian(q.shape[2], k.shape[2])
    mask = np.arange(k.shape[2]) % 5 != 0
    table = gaussian(max(bias.shape), seed=9)
    host: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "score_mod": functools.partial(_added, table=table),
    }
    there: dict[str, Any] = {
        "bias": send(bias),
        "mask": send(mask),
        "score_mod": functools.partial(_added, table=send(table)),
    }
    p = Problem.build(q, k, v, **host)
    dout, dlse = incoming(p)
    wrt = ("q", "k", "v", "bias")
    rows = attend(q, k, v, **host)
    _, vjp = nattn.attention_vjp(q, k, v, backend="cuda", **host)
    expected = [*rows, *vjp(dout, dlse, wrt)[:4]]

    devices = [send(x) for x in (q, k, v)]
    out, lse = nattn.attention(*devices, return_lse=True, **there)
    _, vjp = nattn.attention_vjp(*devices, **there)
    results = [out, lse, *vjp(send(dout), send(dlse), wrt)[:4]]
    for x in results:
        described = device_arrays.describe("x", x)
        assert described is not None
        assert described.source.library == kind
    assert_same_bits([to_host(x) for x in results], expected)

    again = send(np.zeros_like(expected[0]))
    assert nattn.attention(*devices, out=again, **there) is again
    assert_same_bits([to_host(again)], expected[:1])
    if library == "foreign":
        return
    turned = [send(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v)]
    assert_same_bits(
        [to_host(nattn.attention(*turned, layout="bnhd", **there)).transpose(0, 2, 1, 3)],
        expected[:1],
    )
    strided = [send(np.repeat(x, 2, axis=2))[:, :, ::2] for x in (q, k, v)]
    assert_same_bits([to_host(nattn.attention(*strided, **there))], expected[:1])


def _added(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[kv_idx]


def check_streams(library: str) -> None:
    """Work is queued on the library's current stream, behind what is queued there already."""
    module = importlib.import_module(library)
    send, _ = LIBRARIES[library]
    q, k, v = arrays((1, 4, 4, 500, 600, 64))
    expected = attend(q, k, v)
    devices = [send(x) for x in (q, k, v)]
    if library == "torch":
        stream = module.cuda.Stream()
        current, synchronize = module.cuda.stream(stream), module.cuda.synchronize
        busy = module.ones((4000, 4000), device="cuda")
    else:
        stream = module.cuda.Stream(non_blocking=True)
        current, synchronize = stream, stream.synchronize
        busy = module.ones((4000, 4000), np.float32)
        module.cuda.Device().synchronize()
    nattn.attention(*devices)  # what it compiles would give the stream time to finish
    synchronize()
    with current:
        late = [x * 0 for x in devices]
        for _ in range(20):
            busy = busy @ busy * 0
        for x, y in zip(late, devices, strict=True):
            x += y + busy[0, 0]
        got = nattn.attention(*late, return_lse=True)
        copies = [x + 0 for x in got]
    stream.synchronize()
    assert_same_bits([to_host(x) for x in copies], expected)


def check_numba_stream() -> None:
    """Numba's arrays name the stream that they belong to."""
    cuda = importlib.import_module("numba.cuda")
    q, k, v = arrays((1, 4, 4, 500, 600, 64))
    expected = attend(q, k, v)
    stream = cuda.stream()
    devices = [cuda.to_device(x, stream=stream) for x in (q, k, v)]
    got = nattn.attention(*devices, return_lse=True)
    stream.synchronize()
    assert_same_bits([to_host(x) for x in got], expected)


def check_torch_gradient() -> None:
    """Tensors that require gradients are taken, and torch's own gradients are near."""
    torch = importlib.import_module("torch")
    q, k, v = arrays((1, 2, 2, 130, 130, 32), "float64")
    devices = [_torch(x).requires_grad_() for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*devices, is_causal=True)
    dout = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, devices, dout)
    out, vjp = nattn.attention_vjp(*devices, causal=True)
    t = cases.gradient_truth(q, k, v, to_host(dout), None, causal=True)
    for name, x, y in zip(WRT, vjp(dout), expected, strict=False):
        cases.assert_near(to_host(x), t.gradients[name], t.budget[name])
        cases.assert_near(to_host(y), t.gradients[name], 10 * t.budget[name])
    assert not out.requires_grad


# The list


def listed() -> Iterator[Check]:
    """Yield what is checked, the most telling first."""
    main = sized((1, 4, 2, 150, 200), (1, 2, 1, 5, 9))
    few = sized((2, 8, 2, 3, 5000), (2, 2, 1, 1, 20))
    for storage, D in itertools.product(STORAGE, DIMENSIONS):
        yield Check(
            f"{storage}, D={D}, causal",
            functools.partial(check_both, storage, (*main, D), causal=True),
        )
        if D in FEW_DIMENSIONS:
            yield Check(
                f"{storage}, D={D}, few queries",
                functools.partial(check_both, storage, (*few, D), kv_lens=[few[4], few[4] // 3]),
            )
    yield Check(
        "Dv=72, D=24", functools.partial(check_both, "float32", (*main, *sized((24, 72), (4, 9))))
    )
    yield Check("sizes around tiles", functools.partial(check_edges, DIMENSIONS[0]))
    yield Check("empty sizes", check_empty)
    for storage in STORAGE[: 1 if SIMULATED else None]:
        yield Check(f"bits, {storage}", functools.partial(check_same_bits, storage))
        yield Check(f"dropout, {storage}", functools.partial(check_dropout, storage))
    for how, Nq in itertools.product(HIDING, (sized((90,), (5,))[0], 1)):
        yield Check(f"hidden by {how}, Nq={Nq}", functools.partial(check_hidden, how, Nq))
    for Nq in (sized((90,), (5,))[0], 1):
        yield Check(f"a visible NaN, Nq={Nq}", functools.partial(check_shown, Nq))
    yield Check("an index out of range", check_index_error)
    for library, storage in itertools.product(LIBRARIES, STORAGE):
        if (library, storage) in (("numba", "bfloat16"), ("cupy", "bfloat16")):
            continue  # which they do not know
        needs = library if library in ("torch", "cupy") else None
        run = functools.partial(check_library, library, storage)
        yield Check(f"arrays of {library}, {storage}", run, needs)
    if not SIMULATED:
        for library in ("torch", "cupy"):
            yield Check(f"streams of {library}", functools.partial(check_streams, library), library)
        yield Check("streams of numba", check_numba_stream)
        yield Check("gradients of torch", check_torch_gradient, "torch")
        for case in CASES:
            yield Check(f"{case.name}", functools.partial(check_case, case))
        for name in ("everything, modifiers too", "dropout, sinks, lengths"):
            case = next(case for case in CASES if case.name == name)
            for storage in STORAGE[1:]:
                yield Check(f"{name}, {storage}", functools.partial(check_case, case, storage))
    for name in registry.MASKS:
        yield Check(f"mask {name}", functools.partial(check_mask, name))
    for name in registry.MODS:
        yield Check(f"modifier {name}", functools.partial(check_modifier, name))
    if not SIMULATED:  # where they are a suite of their own
        for suite in (cuda_cases.FORWARD, cuda_cases.BACKWARD):
            for name, tiny in suite.items():
                yield Check(f"tiny {name}", tiny)


CHECKS = {check_.name: check_ for check_ in listed()}


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    check_ = CHECKS[name]
    if check_.needs is not None:
        module = pytest.importorskip(check_.needs)
        if not module.cuda.is_available():
            pytest.skip(f"{check_.needs} sees no GPU")
    check_.run()
