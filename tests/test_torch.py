"""Tensors of torch: in the core, and through `nattn.integrations.torch`."""

from __future__ import annotations

import doctest
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import nattn

torch = pytest.importorskip("torch", reason="no torch")
adapter = importlib.import_module("nattn.integrations.torch")
F = torch.nn.functional
Tensor = Any

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gaussian(*shape: int, dtype: Any = torch.float32, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def array(x: Tensor) -> Any:
    if x.dtype != torch.bfloat16:
        return x.detach().numpy()
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    return x.detach().view(torch.int16).numpy().view(bfloat16)


def same_bits(x: Tensor, y: Any) -> None:
    assert isinstance(x, torch.Tensor)
    np.testing.assert_array_equal(array(x), y, strict=True)


# The core


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_core_takes_tensors(dtype: Any) -> None:
    q = gaussian(2, 20, 4, 16, dtype=dtype, grad=True).transpose(1, 2)
    k, v = gaussian(2, 2, 2, 40, 16, dtype=dtype)[:, :, :, ::2]
    mask, bias = gaussian(20, 20) > 0, gaussian(4, 1, 20)
    arrays = [array(x) for x in (q, k, v)]
    args, np_args = {"mask": mask, "bias": bias}, {"mask": array(mask), "bias": array(bias)}
    out, vjp = nattn.attention_vjp(q, k, v, return_lse=True, **args)
    expected, np_vjp = nattn.attention_vjp(*arrays, return_lse=True, **np_args)
    for x, y in zip(out, expected, strict=True):
        same_bits(x, y)
        assert not x.requires_grad
    wrt = ("q", "k", "v", "bias")
    for x, y in zip(vjp(out[0], wrt=wrt), np_vjp(expected[0], wrt=wrt), strict=True):
        if y is None:
            assert x is None
        else:
            same_bits(x, y)
    given = torch.empty(2, 20, 4, 16, dtype=dtype)
    assert (
        nattn.attention(q, k, v, out=given.transpose(1, 2), **args).data_ptr() == given.data_ptr()
    )
    same_bits(given.transpose(1, 2), expected[0])


def test_core_mixes_tensors_and_arrays() -> None:
    q, k, v = gaussian(3, 2, 8, 16)
    assert isinstance(nattn.attention(q, array(k), v), torch.Tensor)
    assert type(nattn.attention(array(q), k, v)) is np.ndarray
    out = np.empty((2, 8, 16), np.float32)
    assert nattn.attention(q, k, v, out=out) is not None
    same_bits(nattn.attention(q, k, v), out)


def test_small_arguments_and_layers_take_tensors() -> None:
    q, k, v = gaussian(3, 2, 4, 8, 16)
    args = {"kv_lens": torch.tensor([3, 8]), "q_offset": torch.tensor([0, 1])}
    args |= {"alibi_slopes": gaussian(4), "sinks": gaussian(4)}
    found = nattn.attention(q, k, v, **args)
    same_bits(
        found, nattn.attention(*map(array, (q, k, v)), **{n: array(x) for n, x in args.items()})
    )
    layer = nattn.nn.SelfAttention(16)
    np.testing.assert_array_equal(layer(q[0]), layer(array(q[0])), strict=True)


def test_packed_and_cached_tensors() -> None:
    q, k, v = gaussian(3, 20, 2, 16)
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    out, vjp = nattn.attention_varlen_vjp(q, k, v, cu, cu, causal=True)
    arrays = (array(q), array(k), array(v))
    expected, np_vjp = nattn.attention_varlen_vjp(*arrays, array(cu), array(cu), causal=True)
    same_bits(out, expected)
    same_bits(vjp(out).dk, np_vjp(expected).dk)

    caches = [torch.zeros(1, 32, 2, 16) for _ in range(2)]
    new = {"k_new": k[None], "v_new": v[None], "cache_seqlens": 3}
    np_caches = [array(x).copy() for x in caches]
    out = nattn.attention_with_kvcache(q[None], *caches, causal=True, **new)
    np_new = {"k_new": array(k[None]), "v_new": array(v[None]), "cache_seqlens": 3}
    same_bits(out, nattn.attention_with_kvcache(array(q[None]), *np_caches, causal=True, **np_new))
    for x, y in zip(caches, np_caches, strict=True):
        same_bits(x, y)

    cache = nattn.KVCache(1, 2, 16)
    cache.append(k[None], v[None])
    assert isinstance(cache.attend(q[None]), torch.Tensor)
    assert type(cache.attend(array(q[None]))) is np.ndarray


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.eye(8).to_sparse(), "q: expected a dense tensor .*to_dense"),
        (torch.empty(8, 8, device="meta"), "q: expected .*in host memory .*meta"),
        (torch.zeros(8, 8, dtype=torch.complex64), "complex64"),
        (torch.zeros(8, 8, dtype=torch.int32), "int32"),
        (torch.zeros(8, 8, dtype=torch.complex64).imag.conj(), "one dtype|q: "),
    ],
)
def test_refused_tensors(tensor: Tensor, text: str) -> None:
    x = torch.zeros(8, 8)
    if tensor.dtype == torch.float32 and tensor.layout is torch.strided and not tensor.is_meta:
        assert nattn.attention(tensor, x, x).shape == (8, 8)  # a strided view of real numbers
        return
    with pytest.raises(TypeError, match=text):
        nattn.attention(tensor, x, x)


def test_inside_transforms_the_core_names_the_adapter() -> None:
    x = gaussian(2, 8, 16)
    with pytest.raises(TypeError, match=r"q: .*nattn\.integrations\.torch"):
        torch.func.vmap(lambda q: nattn.attention(q, q, q))(x)


def test_nobody_imports_torch() -> None:
    code = "import nattn, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# attention


def inputs() -> dict[str, Tensor]:
    """Everything that has a gradient, in float64."""
    shapes: dict[str, tuple[int, ...]] = {"q": (2, 4, 5, 4), "k": (2, 2, 7, 4), "v": (2, 2, 7, 3)}
    shapes |= {"bias": (4, 1, 7), "sinks": (4,), "alibi_slopes": (4,)}
    return {
        x: gaussian(*s, dtype=torch.float64, seed=n, grad=True)
        for n, (x, s) in enumerate(shapes.items())
    }


def attend(q: Tensor, k: Tensor, v: Tensor, *learnt: Tensor) -> Any:
    names = ("bias", "sinks", "alibi_slopes")
    return adapter.attention(
        q, k, v, causal=True, return_lse=True, **dict(zip(names, learnt, strict=False))
    )


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(attend, tuple(inputs().values()))


def test_gradcheck_with_functions_and_another_layout() -> None:
    q, k, v = (gaussian(1, 4, 2, 3, dtype=torch.float64, seed=n, grad=True) for n in range(3))

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * 0.5 + 0.1 * (i - j)

    assert torch.autograd.gradcheck(
        lambda *x: adapter.attention(*x, score_mod=mod, layout="bnhd", window_size=(2, 0)),
        (q, k, v),
    )


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gradients_are_those_of_the_core(dtype: Any) -> None:
    """Bit for bit, the unrounded output of 16 bits included."""
    q, k, v = (gaussian(2, 3, 20, 16, dtype=dtype, seed=n, grad=True) for n in range(3))
    dout = gaussian(2, 3, 20, 16, dtype=dtype, seed=5)
    out = adapter.attention(q, k, v, causal=True)
    found = torch.autograd.grad(out, (q, k, v), dout)
    expected, vjp = nattn.attention_vjp(*map(array, (q, k, v)), causal=True)
    same_bits(out.detach(), expected)
    for x, y in zip(found, vjp(array(dout))[:3], strict=True):
        same_bits(x, y)


def test_what_needs_no_gradient_gets_none() -> None:
    given = inputs()
    given["k"].requires_grad_(False)
    out, _ = attend(*given.values())
    out.sum().backward()
    assert given["k"].grad is None
    assert given["bias"].grad.shape == (4, 1, 7)
    with torch.no_grad():
        assert not attend(*given.values())[0].requires_grad


def test_function_transforms() -> None:
    q, k, v = (x.detach() for x in list(inputs().values())[:3])

    def loss(x: Tensor) -> Tensor:
        return (adapter.attention(x, k, v) ** 2).sum()

    x = q.clone().requires_grad_()
    expected = torch.autograd.grad(loss(x), x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q), expected, rtol=0, atol=0)
    rows = torch.func.jacrev(lambda x: adapter.attention(x, k, v))(q)
    torch.testing.assert_close(
        (rows * 2 * adapter.attention(q, k, v)[..., None, None, None, None]).sum((0, 1, 2, 3)),
        expected,
    )
    many = torch.stack([q, 2 * q, -q])
    found = torch.func.vmap(lambda x: adapter.attention(x, k, v), in_dims=1, out_dims=1)(
        many.transpose(0, 1)
    )
    for n in range(3):
        assert torch.equal(found[:, n], adapter.attention(many[n], k, v))
    each = torch.func.vmap(torch.func.grad(loss))(many)
    assert torch.equal(each[0], expected)


def _one_derivative(run: Callable[[], Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"attention: expected .*SDPBackend\.MATH"):
        run()


def test_only_first_derivatives() -> None:
    q, k, v = list(inputs().values())[:3]
    dq = torch.autograd.grad(adapter.attention(q, k, v).sum(), q, create_graph=True)[0]
    _one_derivative(lambda: dq.sum().backward())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operator(grad: bool, dtype: Any) -> None:
    key = importlib.import_module("nattn.integrations.torch.autograd")._key(
        "auto", (("causal", True),)
    )
    q, k, v = (gaussian(2, 3, 20, 16, dtype=dtype, seed=n, grad=grad) for n in range(3))
    sinks = gaussian(3, grad=grad)
    found = torch.library.opcheck(
        torch.ops.nattn.attention.default, (q, k, v, None, sinks, *[None] * 6, [], key)
    )
    assert set(found.values()) == {"SUCCESS"}


def half(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 0.5 + 0.1 * (i - j)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"causal": True, "window_size": (3, 0), "scale": 0.5},
        {"score_mod": half},
        {"layout": "bnhd", "bias": torch.ones(20)},
        {"kv_lens": torch.tensor([4, 8]), "q_offset": 0},
    ],
    ids=["plain", "numbers", "function", "layout", "lengths"],
)
def test_compiled_without_a_graph_break(args: Any) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * adapter.attention(q * 1.5, k, v, **args)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = [gaussian(2, 20, 20, 16, seed=n, grad=True) for n in range(3)]
    for _ in range(2):
        out, expected = compiled(*x), function(*x)
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(y, x, torch.ones_like(y)) for y in (out, expected)]
        assert all(map(torch.equal, *grads))


def test_compiled_refuses_what_it_cannot_name() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"window_size|_key"):
        torch.compile(adapter.attention, fullgraph=True, backend="aot_eager")(
            *gaussian(3, 2, 2, 8, 16), window_size=torch.tensor([4, 8])
        )


# scaled_dot_product_attention


def samples() -> Iterator[Any]:
    """Yield torch's own samples of its function."""
    pytest.importorskip("expecttest", reason="no expecttest, which torch's samples want")
    methods = importlib.import_module("torch.testing._internal.common_methods_invocations")
    name = "nn.functional.scaled_dot_product_attention"
    (op,) = (x for x in methods.op_db if x.name == name)
    yield from op.sample_inputs("cpu", torch.float64, requires_grad=True)


def test_samples_of_torch() -> None:
    seen = dropped = 0
    for s in samples():
        seen += 1
        given = (s.input, *s.args)
        torch.manual_seed(seen)
        out = adapter.scaled_dot_product_attention(*given, **s.kwargs)
        if s.kwargs.get("dropout_p"):
            dropped += 1
            torch.manual_seed(seen)
            again = adapter.scaled_dot_product_attention(*given, **s.kwargs)
            assert torch.equal(out, again)
            assert out.shape == F.scaled_dot_product_attention(*given, **s.kwargs).shape
            continue
        expected = F.scaled_dot_product_attention(*given, **s.kwargs)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
        mask = s.kwargs.get("attn_mask")
        learnt = [x for x in (*given, mask) if x is not None and x.requires_grad]
        dout = torch.ones_like(out)
        grads = [torch.autograd.grad(x, learnt, dout) for x in (out, expected)]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)
    assert (seen, dropped) == (25, 12)


SHAPES: dict[str, tuple[Any, ...]] = {
    "two axes": ((5, 4), (7, 4), (7, 3)),
    "one query, many keys": ((4, 5, 4), (3, 4, 7, 4), (3, 4, 7, 3)),
    "batches that broadcast": ((1, 4, 5, 4), (3, 1, 7, 4), (3, 4, 7, 3)),
    "five axes": ((2, 1, 4, 5, 4), (3, 4, 7, 4), (2, 3, 4, 7, 3)),
    "no batch": ((0, 4, 5, 4), (0, 4, 7, 4), (0, 4, 7, 3)),
    "no query": ((2, 4, 0, 4), (2, 4, 7, 4), (2, 4, 7, 3)),
}


@pytest.mark.parametrize("masked", ["", "causal", "bool", "float"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes: Any, masked: str) -> None:
    q, k, v = (gaussian(*s, dtype=torch.float64, seed=n) for n, s in enumerate(shapes))
    pairs = (q.shape[-2], k.shape[-2])
    masks = {"bool": gaussian(*pairs) > 0, "float": gaussian(*pairs, dtype=torch.float64)}
    masks["bool"][..., 0] = True
    args: dict[str, Any] = {"is_causal": True} if masked == "causal" else {}
    if masked in masks:
        args["attn_mask"] = masks[masked]
    found = adapter.scaled_dot_product_attention(q, k, v, **args)
    expected = F.scaled_dot_product_attention(q, k, v, **args)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_grouped_queries(lead: tuple[int, ...]) -> None:
    q, k = gaussian(*lead, 6, 5, 4, dtype=torch.float64), gaussian(*lead, 2, 7, 4)
    k = k.to(torch.float64)
    found = adapter.scaled_dot_product_attention(q, k, k, enable_gqa=True, scale=0.3)
    expected = F.scaled_dot_product_attention(q, k, k, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_rows_that_see_nothing() -> None:
    q, k, v = gaussian(3, 2, 3, 4)
    mask = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    out = adapter.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(out[:, 1], torch.zeros(2, 4))


X = torch.zeros(2, 3, 5, 4)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": ((X.numpy(), X, X), {}, TypeError, "query: expected a tensor, got ndarray"),
    "one axis": ((X[0, 0, 0], X, X), {}, ValueError, "query: expected at least 2 axes"),
    "complex": ((X * 1j, X, X), {}, TypeError, "query: expected float16.*got torch.complex64"),
    "devices": ((X, X.to("meta"), X), {}, TypeError, "key: expected device cpu .*got meta"),
    "mask's device": ((X, X, X, X.to("meta")), {}, TypeError, "attn_mask: expected device cpu"),
    "mask and causal": ((X, X, X, X[0, 0, :, :1], 0.0, True), {}, ValueError, "attn_mask: exp"),
    "heads": ((X, X[:, :1].expand(2, 2, 5, 4), X), {}, ValueError, "did you mean enable_gqa"),
    "two axes with groups": ((X[0, 0], X, X), {"enable_gqa": True}, ValueError, "at least 3 axes"),
    "groups": ((X, X[:, :2], X[:, :2]), {"enable_gqa": True}, ValueError, "heads"),
    "dropout": ((X, X, X), {"dropout_p": 1.5}, ValueError, "dropout_p"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input(case: Any) -> None:
    args, kwargs, error, text = case
    with pytest.raises(error, match=text):
        adapter.scaled_dot_product_attention(*args, **kwargs)


# Whole programs


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each call that reaches nattn's core."""
    calls: list[Any] = []
    for module, name in (("autograd", "nattn_attention"), ("provider", "attention")):
        part = importlib.import_module(f"nattn.integrations.torch.{module}")
        inner = getattr(part, name)

        def count(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            calls.append(args[0].shape)
            return inner(*args, **kwargs)

        monkeypatch.setattr(part, name, count)
    return calls


def test_mode(counted: list[Any]) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = gaussian(2, 10, 16)
    expected = layer(x)
    assert not counted
    with adapter.sdpa():
        found = layer(x)
        ints = F.scaled_dot_product_attention(*(torch.empty(2, 3, 4, device="meta"),) * 3)
    assert len(counted) == 1
    assert ints.is_meta
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    layer(x)
    assert len(counted) == 1


@pytest.mark.parametrize("masked", ["", "causal", "bool", "float"])
def test_provider(counted: list[Any], masked: str) -> None:
    adapter.register_provider()
    q, k, v = (gaussian(2, 3, 12, 16, dtype=torch.float64, seed=n, grad=True) for n in range(3))
    args: dict[str, Any] = {"is_causal": True} if masked == "causal" else {}
    if masked in ("bool", "float"):
        bias = gaussian(2, 1, 12, 12, dtype=torch.float64)
        args["attn_mask"] = bias > -1 if masked == "bool" else bias

    def run() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, **args)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    expected = run()
    assert not counted
    torch.nn.attention.activate_flash_attention_impl("NATTN")
    try:
        found = run()
        assert len(counted) == 1
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
    run()
    assert len(counted) == 1


def test_from_other_threads() -> None:
    """Autograd runs backward passes in a thread of its own; users have threads too."""
    import threading

    q, k, v = (gaussian(2, 3, 12, 16, seed=n, grad=True) for n in range(3))
    expected = torch.autograd.grad(adapter.attention(q, k, v).sum(), q)[0]
    found: list[Tensor] = []

    def work() -> None:
        found.append(torch.autograd.grad(adapter.attention(q, k, v).sum(), q)[0])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 3
    assert all(torch.equal(x, expected) for x in found)


def test_forward_mode() -> None:
    q, k, v, *moves = gaussian(6, 2, 9, 8).double()
    run = functools.partial(adapter.attention, causal=True, return_lse=True)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT / 8**0.5
        s = s.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1)

    found = torch.func.jvp(run, (q, k, v), tuple(moves))
    expected = torch.func.jvp(dense, (q, k, v), tuple(moves))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    ahead = torch.func.jacfwd(run, argnums=1)(q, k, v)
    torch.testing.assert_close(ahead, torch.func.jacrev(run, argnums=1)(q, k, v))
    ad = torch.autograd.forward_ad
    with ad.dual_level():  # where nothing requires a gradient, either
        out, lse = run(ad.make_dual(q, moves[0]), k, v)
        tangents = [ad.unpack_dual(x).tangent for x in (out, lse)]
    expected = torch.func.jvp(lambda q: dense(q, k, v), (q,), (moves[0],))
    torch.testing.assert_close(tuple(tangents), expected[1], rtol=0, atol=1e-13)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)


def test_forward_mode_of_16_bits() -> None:
    q, k, v, dq = gaussian(4, 2, 40, 16)
    run = functools.partial(adapter.attention, softcap=5.0)
    exact = torch.func.jvp(lambda q: run(q, k, v), (q,), (dq,))[1]
    narrow = [x.bfloat16() for x in (q, k, v, dq)]
    found = torch.func.jvp(lambda q: run(q, *narrow[1:3]), (narrow[0],), (narrow[3],))[1]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=0.05)


def test_forward_mode_has_one_derivative_of_q_k_and_v() -> None:
    q, k, v, dq = gaussian(4, 2, 8, 16)

    def loss(q: Tensor) -> Tensor:
        return adapter.attention(q, k, v).sum()

    _one_derivative(lambda: torch.func.hessian(loss)(q))
    _one_derivative(lambda: torch.func.grad(lambda q: torch.func.jvp(loss, (q,), (dq,))[1])(q))
    sinks = torch.zeros(2)
    with pytest.raises(NotImplementedError, match="expected tangents of q, k and v, got one of si"):
        torch.func.jvp(lambda x: adapter.attention(q, k, v, sinks=x), (sinks,), (sinks,))


def test_the_core_is_not_compiled() -> None:
    torch._dynamo.reset()
    x = gaussian(2, 8, 16)
    with pytest.raises(Exception, match=r"nattn\.integrations\.torch"):
        torch.compile(lambda x: nattn.attention(x, x, x), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize(
    "name",
    [
        *(f"torch.{x}" for x in ("autograd", "sdpa", "provider", "flex", "translate")),
        *(f"flash_attn.{x}" for x in ("arrays", "packed", "cache", "modules")),
    ],
)
def test_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"nattn.integrations.{name}"))
    assert result.attempted > 3
    assert result.failed == 0
