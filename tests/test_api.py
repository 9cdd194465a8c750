"""nattn.attention: every case against the reference, results in the caller's form."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import ml_dtypes
import numpy as np
import pytest
from cases import CASES, Case, check, check_gradients, gate, gaussian, in_step, qkv, thin
from hypothesis import given
from hypothesis import strategies as st

import nattn
from nattn import backends
from nattn.api import functional
from nattn.backends import reference
from nattn.call import arguments
from nattn.call.problem import Problem

NARROW = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(computed: tuple[str, str], case: Case) -> None:
    backend, dtype = computed
    q, k, v, options = case.make(dtype)
    check(backend, q, k, v, **options)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("block", [16, 48, 64, 128, 256, 512])
def test_sizes_around_blocks(tiled: str, block: int, edge: int) -> None:
    q, k, v = qkv(1, 1, block + edge, block + edge, 8)
    check(tiled, q, k, v, causal=True)
    check(tiled, q[:, :, :5], k, v)


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (3, 2, 7, 4)])
def test_rank(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape))
    out, lse = check(backend, q, k, v)
    assert out.shape == shape
    assert lse.shape == shape[:-1]
    full = (1,) * (4 - len(shape)) + shape
    bare = nattn.attention(*(x.reshape(full) for x in (q, k, v)), backend=backend)
    np.testing.assert_array_equal(out, bare.reshape(shape))


def test_layout_bnhd_is_a_view_of_bhnd(backend: str) -> None:
    q, k, v = qkv(2, 3, 40, 60, 8, 5)
    out, lse = nattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    out2, lse2 = nattn.attention(
        *swapped, causal=True, return_lse=True, layout="bnhd", backend=backend
    )
    assert out2.shape == (2, 40, 3, 5)
    assert out2.flags.c_contiguous
    np.testing.assert_array_equal(out2.transpose(0, 2, 1, 3), out)
    np.testing.assert_array_equal(lse2, lse)  # head-major in both layouts


def test_lists(backend: str) -> None:
    q, k, v = [[1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0], [3.0]]
    out = nattn.attention(q, k, v, backend=backend)
    assert out.dtype == np.float64
    assert out.tolist() == [[2.0]]


def test_lists_as_mask_bias_and_lengths(backend: str) -> None:
    q, k, v = qkv(2, 1, 3, 3, 4)
    options = {"mask": [True, True, False], "bias": [0.5, 1.0, 0.0], "kv_lens": [3, 2]}
    check(backend, q, k, v, **options)


def test_auto_is_cpu() -> None:
    q, k, v = qkv(1, 1, 20, 20, 8)
    auto, cpu = nattn.attention(q, k, v), nattn.attention(q, k, v, backend="cpu")
    np.testing.assert_array_equal(auto, cpu)


# Backends and what they take


@pytest.mark.parametrize("dtype", [np.float32, *NARROW], ids=["float32", "float16", "bfloat16"])
def test_bfloat16_beside_other_arrays(backend: str, dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in qkv(1, 2, 5, 7, 4))
    numbers = gaussian(5, 7).astype(ml_dtypes.bfloat16)
    options: dict[str, Any] = {
        "bias": numbers,
        "sinks": numbers[0, :2],
        "alibi_slopes": numbers[1, :2],
    }
    check_gradients(backend, q, k, v, **options)
    check(backend, q, k, v, **options)
    wide = {name: x.astype("f4") for name, x in options.items()}
    np.testing.assert_array_equal(
        nattn.attention(q, k, v, backend=backend, **options),
        nattn.attention(q, k, v, backend=backend, **wide),
    )


class Door:
    """What a cuda backend shows of itself."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[Problem] = []

    def check_usable(self) -> None:
        if self.error is not None:
            raise self.error

    def forward(self, problem: Problem, out: Any, lse: Any, progress: Any = None) -> None:
        self.seen.append(problem)
        reference.forward(problem, out, lse, progress=progress)

    def backward(self, problem: Problem, *args: Any, progress: Any = None) -> Any:
        self.seen.append(problem)
        return reference.backward(problem, *args, progress=progress)


@pytest.mark.parametrize("dtype", [*NARROW, np.float32, np.float64])
def test_cuda_gets_arrays_in_host_memory(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    door: Any = Door()
    monkeypatch.setitem(backends._loaded, "cuda", door)
    q, k, v = qkv(1, 2, 5, 7, 4, dtype=dtype)
    out, lse = check("cuda", q, k, v)
    assert type(out) is type(lse) is np.ndarray
    check_gradients("cuda", q, k, v)
    assert [p.storage for p in door.seen] == [np.dtype(dtype).name] * 3
    assert all(p.allocator is None for p in door.seen)


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    door: Any = Door(RuntimeError("no driver"))
    monkeypatch.setitem(backends._loaded, "cuda", door)
    q, k, v = qkv(1, 2, 5, 7, 4)
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises(RuntimeError, match="no driver"):
        nattn.attention(q, k, v, out=out, backend="cuda")
    with pytest.raises(RuntimeError, match="no driver"):
        nattn.attention_backward(q, q, k, v, q, out[..., 0], backend="cuda")
    assert np.all(out == 7)
    assert door.seen == []
    with pytest.raises(ValueError, match=r"^k: expected"):  # bad input is bad anywhere
        nattn.attention(q, k[..., :3], v, backend="cuda")


def test_cuda_without_numba_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(backends._loaded, "cuda", raising=False)
    monkeypatch.setitem(backends._DOORS, "cuda", "no_numba_cuda_here.launch")
    q, k, v = qkv(1, 2, 5, 7, 4)
    expected = r"numba-cuda .*no_numba_cuda_here.*pip install .nattn\[cuda13\]. or .nattn\[cuda12\]"
    with pytest.raises(RuntimeError, match=expected) as caught:
        nattn.attention(q, k, v, backend="cuda")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "cuda" not in backends._loaded
    monkeypatch.setitem(backends._DOORS, "cuda", "nattn.no_such_file")  # is a mistake in nattn
    with pytest.raises(ModuleNotFoundError, match="no_such_file"):
        nattn.attention(q, k, v, backend="cuda")


def test_without_lse_is_the_same(backend: str) -> None:
    q, k, v = qkv(1, 2, 20, 20, 8)
    out, _ = nattn.attention(q, k, v, return_lse=True, backend=backend)
    np.testing.assert_array_equal(nattn.attention(q, k, v, backend=backend), out)


OUTS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "contiguous": lambda shape: np.full(shape, np.nan, "f4"),
    "transposed": lambda shape: np.full(shape[::-1], np.nan, "f4").transpose(3, 2, 1, 0),
    "every other": lambda shape: np.full((*shape[:-1], 2 * shape[-1]), np.nan, "f4")[..., ::2],
    "negative": lambda shape: np.full(shape, np.nan, "f4")[:, :, ::-1, ::-1],
    "unaligned": lambda shape: (
        np.zeros(4 * int(np.prod(shape)) + 1, "u1")[1:].view("f4").reshape(shape)
    ),
}


@pytest.mark.parametrize("kind", OUTS)
def test_out(backend: str, kind: str) -> None:
    q, k, v = qkv(2, 3, 21, 33, 8, 5)
    expected, expected_lse = nattn.attention(q, k, v, return_lse=True, backend=backend)
    out = OUTS[kind]((2, 3, 21, 5))
    got, lse = nattn.attention(q, k, v, return_lse=True, out=out, backend=backend)
    assert got is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_out_leaves_its_surroundings_alone(backend: str) -> None:
    q, k, v = qkv(1, 2, 50, 40, 8, 5)
    room = np.full((1, 2, 54, 9), 7.0, "f4")
    nattn.attention(q, k, v, out=room[:, :, 2:-2, 2:-2], backend=backend)
    inside = np.zeros(room.shape, bool)
    inside[:, :, 2:-2, 2:-2] = True
    assert np.all(room[~inside] == 7.0)
    np.testing.assert_array_equal(
        room[inside].reshape(1, 2, 50, 5), nattn.attention(q, k, v, backend=backend)
    )


@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5)])
def test_out_of_lower_rank(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape))
    out = np.empty(shape)
    assert nattn.attention(q, k, v, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, backend=backend))


def test_out_in_layout_bnhd(backend: str) -> None:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in qkv(2, 3, 21, 33, 8))
    out = np.empty((2, 21, 3, 8), "f4")
    nattn.attention(q, k, v, out=out, layout="bnhd", backend=backend)
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, layout="bnhd", backend=backend))


def test_out_between_the_inputs_of_one_packed_array(backend: str) -> None:
    packed = np.random.default_rng(0).standard_normal((1, 2, 30, 4, 8))
    q, k, v, out = (packed[..., n, :] for n in range(4))
    expected = nattn.attention(q, k, v, backend=backend)
    nattn.attention(q, k, v, out=out, backend=backend)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_progress_ends_at_one(backend: str, dtype: Any) -> None:
    seen: list[float] = []
    q, k, v = qkv(2, 2, 30, 30, 8, dtype=dtype)
    out = functional._attend(q, k, v, backend=backend, progress=seen.append)
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, backend=backend))
    assert seen == sorted(seen)
    assert all(0 <= done <= 1 for done in seen)


SHARED = list(arguments.Arguments.__annotations__)
PACKED = list(arguments.PackedArguments.__annotations__)
TAKE_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {  # beside those that all share
    "attention": (["q", "k", "v"], ["return_lse", "out", "backend"]),
    "attention_backward": (["dout", "q", "k", "v", "out", "lse"], ["dlse", "wrt", "backend"]),
    "attention_vjp": (["q", "k", "v"], ["return_lse", "out", "backend"]),
    "attention_jvp": (["q", "k", "v", "dq", "dk", "dv"], ["return_lse", "backend"]),
    "attention_weights": (["q", "k", "rows"], ["backend"]),
    "attention_map": (["q", "k", "size"], ["backend"]),
    "row_stats": (["q", "k"], ["backend"]),
    "key_mass": (["q", "k", "lse"], ["backend"]),
}


@pytest.mark.parametrize("name", TAKE_ARGUMENTS)
def test_a_signature_shows_every_argument(name: str) -> None:
    function = getattr(nattn, name)
    first, last = TAKE_ARGUMENTS[name]
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*first, *SHARED, *last]
    assert all(parameters[x].kind == inspect.Parameter.KEYWORD_ONLY for x in [*SHARED, *last])
    defaults = dict.fromkeys(SHARED) | {"causal": False, "dropout_p": 0.0, "layout": "bhnd"}
    assert {x: parameters[x].default for x in SHARED} == defaults
    page = pydoc.TextDoc().docroutine(function).replace("'", "")
    for text in ("causal: bool = False", "window_size: Window | None = None", "seed: int | None"):
        assert text in page
    assert "args" not in parameters


@pytest.mark.parametrize("name", TAKE_ARGUMENTS)
def test_an_unknown_argument_is_named(name: str) -> None:
    q, k, v = qkv(1, 1, 3, 3, 4)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": q, "out": q, "lse": q[..., 0]}
    arrays = {x: arrays[x] for x in TAKE_ARGUMENTS[name][0] if x in arrays}
    text = r"^windowsize: expected an argument of nattn\.attention, got 'windowsize'; did you mean"
    with pytest.raises(TypeError, match=text + " 'window_size'"):
        getattr(nattn, name)(**arrays, windowsize=(1, 0))
    with pytest.raises(
        TypeError, match=r"^xyz: expected an argument of nattn\.attention, got 'xyz'$"
    ):
        getattr(nattn, name)(**arrays, causal=True, xyz=1)


def test_defaults_stay_as_they_are() -> None:
    q, k, v = qkv(1, 1, 3, 3, 4)
    before = dict(arguments.DEFAULTS)
    nattn.attention(q, k, v)
    nattn.attention(q, k, v, causal=True, sinks=[0.5], layout="bhnd", backend="reference")
    assert before == arguments.DEFAULTS


def listed(tree: ast.AST) -> int:
    """Count the places in a source where all the shared arguments stand."""
    places: list[list[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            places.append([x.arg for x in (*node.args, *node.kwonlyargs)])
        elif isinstance(node, ast.ClassDef):
            fields = [x.target for x in node.body if isinstance(x, ast.AnnAssign)]
            places.append([x.id for x in fields if isinstance(x, ast.Name)])
        elif isinstance(node, ast.Call):
            places.append([x.arg for x in node.keywords if x.arg])
        elif isinstance(node, ast.Dict):
            places.append([str(x.value) for x in node.keys if isinstance(x, ast.Constant)])
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            places.append([str(x.value) for x in node.elts if isinstance(x, ast.Constant)])
    return sum(set(PACKED) <= set(names) for names in places)


def test_the_list_of_arguments_stands_once() -> None:
    names = ", ".join(SHARED)
    keywords = ", ".join(f"{x}={x}" for x in SHARED)
    assert listed(ast.parse(f"def f(q, *, {names}): return g(q, {keywords})")) == 2
    package = Path(nattn.__file__).parent
    counts = {x: listed(ast.parse(x.read_text(encoding="utf-8"))) for x in package.rglob("*.py")}
    assert {x.name: n for x, n in counts.items() if n} == {"arguments.py": 1}


def test_docstring() -> None:
    result = doctest.testmod(importlib.import_module("nattn.api.functional"))
    assert result.attempted > 0
    assert result.failed == 0


def test_import_is_light() -> None:
    heavy = ("numba", "nattn.backends.cpu.door")
    code = f"import sys, nattn; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=children.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert nattn.__version__.count(".") == 2


# Gradients


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (3, 2, 7, 4)])
def test_gradients_of_lower_rank(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape))
    got = check_gradients(backend, q, k, v, bias=np.zeros(7))
    full = (1,) * (4 - len(shape)) + shape
    bare = check_gradients(backend, *(x.reshape(full) for x in (q, k, v)), bias=np.zeros(7))
    for x, y in zip(got[:4], bare[:4], strict=True):
        assert x is not None
        assert y is not None
        assert x.shape == (y.shape if x is got.dbias else shape)
        np.testing.assert_array_equal(x, y.reshape(x.shape))


def test_gradients_in_layout_bnhd(backend: str) -> None:
    q, k, v = qkv(2, 3, 40, 60, 8, 5)
    out, lse = nattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    expected = nattn.attention_backward(out, q, k, v, out, lse, causal=True, backend=backend)
    arrays: Any = [*(x.transpose(0, 2, 1, 3) for x in (out, q, k, v, out)), lse]
    got = nattn.attention_backward(*arrays, causal=True, layout="bnhd", backend=backend)
    for x, y in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(x, np.asarray(y).transpose(0, 2, 1, 3))


def test_lists_have_gradients(backend: str) -> None:
    # equal scores: both weights are 1/2, and out is 2
    q, k, v = [[1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0], [3.0]]
    options: dict[str, Any] = {"bias": [0.0, 0.0], "scale": 1.0, "backend": backend}
    out, lse = nattn.attention(q, k, v, return_lse=True, **options)
    wrt = ["q", "k", "v", "bias"]
    got = nattn.attention_backward([[1.0]], q, k, v, out.tolist(), lse.tolist(), wrt=wrt, **options)
    assert [np.asarray(x).tolist() for x in got[:4]] == [
        [[0.0, 0.0]],
        [[-0.5, 0.0], [0.5, 0.0]],
        [[0.5], [0.5]],
        [-0.5, 0.5],
    ]


def test_vjp(backend: str) -> None:
    q, k, v = qkv(2, 3, 20, 30, 8)
    options: dict[str, Any] = {"causal": True, "bias": gaussian(20, 30), "backend": backend}
    expected_out, expected_lse = nattn.attention(q, k, v, return_lse=True, **options)
    dout, dlse = gaussian(2, 3, 20, 8, seed=5), gaussian(2, 3, 20, seed=6)
    out, vjp = nattn.attention_vjp(q, k, v, **options)
    (again, lse), vjp_lse = nattn.attention_vjp(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(again, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)
    for d, wrt in ((None, ("q", "k", "v")), (dlse, ("bias",)), (dlse, ["v", "q"])):
        expected = nattn.attention_backward(dout, q, k, v, out, lse, dlse=d, wrt=wrt, **options)
        for got in (vjp(dout, d, wrt), vjp_lse(dout, dlse=d, wrt=wrt)):
            assert isinstance(got, nattn.Gradients)
            for x, y in zip(got, expected, strict=True):
                assert (x is None) == (y is None)
                np.testing.assert_array_equal(x, y)


def test_vjp_writes_to_out(backend: str) -> None:
    q, k, v = qkv(1, 2, 9, 9, 4)
    room = np.empty_like(q)
    out, vjp = nattn.attention_vjp(q, k, v, out=room, backend=backend)
    assert out is room
    np.testing.assert_array_equal(room, nattn.attention(q, k, v, backend=backend))
    expected = nattn.attention_vjp(q, k, v, backend=backend)[1](q)
    np.testing.assert_array_equal(vjp(q).dk, expected.dk)


def test_vjp_refuses_what_attention_does_not_know() -> None:
    q, k, v = qkv(1, 1, 3, 3, 4)
    with pytest.raises(
        TypeError,
        match=r"^dropout: expected an argument of nattn\.attention, got 'dropout'; did you",
    ):
        nattn.attention_vjp(q, k, v, dropout=0.1)  # type: ignore[call-arg]
    _, vjp = nattn.attention_vjp(q, k, v)
    with pytest.raises(ValueError, match=r"^dout: expected shape \(1, 1, 3, 4\), got \(1, 1, 3\)"):
        vjp(q[..., 0])
    with pytest.raises(ValueError, match=r"^wrt: expected .* got 'bias' without bias"):
        vjp(q, wrt=("bias",))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_progress_of_gradients_ends_at_one(backend: str, dtype: Any) -> None:
    seen: list[float] = []
    q, k, v = qkv(2, 2, 30, 30, 8, dtype=dtype)
    p = Problem.build(q, k, v)
    out, lse = nattn.attention(q, k, v, return_lse=True, backend=backend)
    functional._backward(p, out, out, lse, None, ("q", "k"), backend, seen.append)
    assert seen == sorted(seen)
    assert all(0 <= done <= 1 for done in seen)


# Any shape, any strides, any options


def _view(x: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of x in another arrangement of memory."""
    if kind == "transposed":
        return np.ascontiguousarray(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    if kind == "negative":
        return np.ascontiguousarray(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    if kind == "spread":
        room = np.full((*x.shape[:3], 3 * x.shape[3]), np.nan, x.dtype)
        room[..., ::3] = x
        return room[..., ::3]
    if kind == "unaligned":
        room = np.zeros(x.nbytes + 1, "u1")
        view = room[1:].view(x.dtype).reshape(x.shape)
        view[...] = x
        return view
    if kind == "odd row stride":
        row = np.dtype([("x", x.dtype, x.shape[3:]), ("pad", "u1")])
        room = np.zeros(x.shape[:3], row)
        room["x"] = x
        return room["x"]
    if kind == "big-endian":
        return x.astype(x.dtype.newbyteorder(">"))
    if kind == "Fortran":
        return np.asfortranarray(x)
    if kind == "read-only":
        x = x.copy()
        x.flags.writeable = False
        return x
    if kind == "zero":
        return np.broadcast_to(x[:1, :1, :1], x.shape)
    return x


KINDS = [
    "plain",
    "transposed",
    "negative",
    "spread",
    "unaligned",
    "odd row stride",
    "big-endian",
    "Fortran",
    "read-only",
    "zero",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strides(backend: str, kind: str, dtype: str) -> None:
    q, k, v = (_view(x, kind) for x in qkv(2, 3, 70, 150, 24, 9, dtype=dtype))
    before = [x.copy() for x in (q, k, v)]
    out = nattn.attention(q, k, v, causal=True, backend=backend)
    native = [np.array(x, dtype, order="C") for x in (q, k, v)]
    np.testing.assert_array_equal(out, nattn.attention(*native, causal=True, backend=backend))
    for x, copy in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_strides_of_mask_and_bias(backend: str, kind: str, dtype: str) -> None:
    q, k, v = qkv(2, 3, 70, 150, 8)
    rng = np.random.default_rng(5)
    bias = rng.standard_normal((2, 3, 70, 150)).astype(dtype)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    mask = rng.random(bias.shape) < 0.6
    mask[:, :, 0, :] = True
    options: dict[str, Any] = {"mask": _view(mask, kind), "bias": _view(bias, kind)}
    native: dict[str, Any] = {
        "mask": options["mask"].copy(),
        "bias": np.array(options["bias"], dtype, order="C"),
    }
    out = nattn.attention(q, k, v, backend=backend, **options)
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, backend=backend, **native))


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[str, Any]]:
    dtype = draw(st.sampled_from(["float32", "float64"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, Hkv, group = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = st.one_of(st.integers(0, 9), st.integers(10, 300))
    Nq, Nk = draw(size), draw(size)
    D, Dv = draw(st.integers(1, 80)), draw(st.integers(0, 80))
    spread = draw(st.sampled_from([0.0, 1.0, 10.0]))
    arrays = [
        (spread * rng.standard_normal((B, Hkv * group, Nq, D))).astype(dtype),
        rng.standard_normal((B, Hkv, Nk, D)).astype(dtype),
        rng.standard_normal((B, Hkv, Nk, Dv)).astype(dtype),
    ]
    kinds = st.sampled_from(KINDS)
    arrays = [_view(x, draw(kinds)) if x.size else x for x in arrays]
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    modified = draw(st.booleans())
    item = st.integers(-300, 300)
    if not modified:  # far away a slope times the distance has no digits left to compare
        item |= st.integers(-(2**70), 2**70)
    if draw(st.booleans()):
        options["q_offset"] = draw(item | st.lists(item, min_size=B, max_size=B))
    if draw(st.booleans()):
        side = st.none() | st.integers(-1, 200) | st.integers(2**50, 2**70)
        options["window_size"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["q_lens"] = draw(st.lists(st.integers(0, Nq), min_size=B, max_size=B))
    if draw(st.booleans()):
        options["kv_lens"] = draw(st.lists(st.integers(0, Nk), min_size=B, max_size=B))
    pairs = [B, Hkv * group, Nq, Nk]
    for name in ("mask", "bias"):
        if draw(st.booleans()):
            shape = [draw(st.sampled_from([1, n])) for n in pairs][draw(st.integers(0, 4)) :]
            hidden = rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
            bias = rng.standard_normal(shape).astype(draw(st.sampled_from(["f2", "f4", ">f8"])))
            x = ~hidden if name == "mask" else np.where(hidden, -np.inf, bias).astype(bias.dtype)
            options[name] = _view(x, draw(kinds)) if x.ndim == 4 and x.size else x
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2, width=32))
    if modified:
        options |= draw(modifiers(B, Hkv * group))
    return arrays, options


@st.composite
def modifiers(draw: st.DrawFn, B: int, Hq: int) -> dict[str, Any]:
    options: dict[str, Any] = {"softcap": draw(st.none() | st.floats(0.5, 50))}
    numbers = st.floats(-3, 3, width=16)
    if draw(st.booleans()):
        options["alibi_slopes"] = draw(st.lists(numbers, min_size=Hq, max_size=Hq))
    if draw(st.booleans()):
        sink = numbers | st.sampled_from([-np.inf, 40.0])
        options["sinks"] = draw(st.lists(sink, min_size=Hq, max_size=Hq))
    if draw(st.booleans()):
        options["score_mod"] = draw(st.sampled_from([thin, functools.partial(gate, gain=0.75)]))
    if draw(st.booleans()):
        options["mask_mod"] = functools.partial(in_step, step=draw(st.integers(1, 5)))
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.floats(0, 1, exclude_max=True, width=16))
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    return options


@given(call=calls())
def test_any_call(call: tuple[list[np.ndarray], dict[str, Any]]) -> None:
    arrays, options = call
    check("cpu", *arrays, **options)
