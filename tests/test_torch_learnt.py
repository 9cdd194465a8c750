"""Gradients of tensors that functions of scores are bound to, through torch."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nattn

torch = pytest.importorskip("torch", reason="no torch")
adapter = importlib.import_module("nattn.integrations.torch")
bound = importlib.import_module("nattn.integrations.torch.bound")
cases = importlib.import_module("torch_cases")
attention, flex_attention, gaussian = adapter.attention, adapter.flex_attention, cases.gaussian
partial, compose = functools.partial, nattn.mods.compose
Tensor = Any
Mod = Any

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # which it hides
)

N, REACH = 9, 8
DISTANCE = torch.arange(N)[:, None] - torch.arange(N) + REACH


def inputs(dtype: Any = torch.float64) -> tuple[Tensor, ...]:
    """Return q, k, v, a table and a gain."""
    shapes = (2, 4, N, 4), (2, 2, N, 4), (2, 2, N, 3), (4, 2 * REACH + 1), ()
    return tuple(gaussian(*s, dtype=dtype, seed=n).requires_grad_() for n, s in enumerate(shapes))


def dense(
    q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor], causal: bool = False
) -> Tensor:
    """Attention by its formula in float64, of scores that `change` changes."""
    q, k, v = (x.double() for x in (q, k, v))
    s = change(q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf)
    return s.softmax(-1) @ v.repeat_interleave(2, 1)


def gradients(out: Tensor, tensors: tuple[Tensor, ...], **kwargs: Any) -> tuple[Tensor, ...]:
    weights = gaussian(*out.shape, dtype=out.dtype, seed=11)
    found: tuple[Tensor, ...] = torch.autograd.grad((out * weights).sum(), tensors, **kwargs)
    return found


def assert_alike(found: Tensor, expected: Tensor, tensors: tuple[Tensor, ...]) -> None:
    np.testing.assert_allclose(found.detach(), expected.detach(), rtol=0, atol=1e-11)
    each = (gradients(x, tensors, retain_graph=True) for x in (found, expected))
    for x, y in zip(*each, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, gain: Any) -> Any:
    return gain * s + table[h, i - j + REACH]


def plus(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:
    return s + x[h, i - j + REACH]


def times(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:
    return s * x


def in_closure(table: Tensor, gain: Tensor) -> Mod:
    def bias(h: Any, distance: Any) -> Any:
        return table[h, distance + REACH]

    def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return gain * s + bias(h, i - j)

    return relative


def in_defaults(table: Tensor, gain: Tensor) -> Mod:
    def relative(
        s: Any, b: Any, h: Any, i: Any, j: Any, gain: Any = gain, *, table: Any = table
    ) -> Any:
        return gain * s + table[h, i - j + REACH]

    return relative


BOUND: dict[str, Callable[[Tensor, Tensor], Mod]] = {
    "partial": lambda table, gain: partial(partial(relative, gain=gain), table=table),
    "closure": in_closure,
    "defaults": in_defaults,
    "composition": lambda table, gain: compose(partial(times, x=gain), partial(plus, x=table)),
}
"""How a function can be bound to a table and a gain; scores are multiplied first."""


@pytest.mark.parametrize("bind", BOUND.values(), ids=BOUND)
def test_gradients_are_those_of_the_formula(bind: Callable[[Tensor, Tensor], Mod]) -> None:
    q, k, v, table, gain = tensors = inputs()
    out = attention(q, k, v, causal=True, score_mod=bind(table, gain))
    expected = dense(q, k, v, lambda s: gain * s + table[:, DISTANCE], causal=True)
    assert_alike(out, expected, tensors)
    # computed by torch, read as it lies in memory, and no more than what is asked for
    wide = torch.exp(table).repeat(2, 2).T[::2].T[:4]
    out = attention(q, k, v, causal=True, score_mod=bind(wide, gain.detach()))
    expected = dense(q, k, v, lambda s: gain.detach() * s + wide[:, DISTANCE], causal=True)
    assert_alike(out, expected, (table,))


def test_gradcheck() -> None:
    q, k, v, table, gain = inputs()

    def function(q: Tensor, table: Tensor, gain: Tensor) -> Any:
        mod = partial(relative, table=table, gain=gain)
        return attention(q, k, v, score_mod=mod, return_lse=True)

    assert torch.autograd.gradcheck(function, (q, table, gain))


def test_equal_names_in_a_composition() -> None:
    q, k, v, table, gain = tensors = inputs()
    other = gaussian(*table.shape, dtype=torch.float64, seed=3).requires_grad_()
    mod = compose(partial(plus, x=table), partial(times, x=gain), partial(plus, x=other))
    out = attention(q, k, v, score_mod=mod)
    expected = dense(q, k, v, lambda s: (s + table[:, DISTANCE]) * gain + other[:, DISTANCE])
    assert_alike(out, expected, (*tensors, other))
    # one tensor in two places has one gradient, the sum
    out = attention(q, k, v, score_mod=compose(*(partial(plus, x=table) for _ in range(2))))
    assert_alike(out, dense(q, k, v, lambda s: s + 2 * table[:, DISTANCE]), (table,))


def tilted(s: Any, b: Any, h: Any, i: Any, j: Any, kinds: Any, weights: Any, first: Any) -> Any:
    return s + weights[kinds[i], kinds[j]] * (h - first)


def same(b: Any, h: Any, i: Any, j: Any, kinds: Any, limit: Any) -> Any:
    return (kinds[i] == kinds[j]) | (j < limit)


def test_indices_and_masks_are_data() -> None:
    q, k, v, *_ = tensors = inputs()
    kinds = torch.tensor([0, 0, 1, 2, 1, 0, 2, 2, 1], dtype=torch.int32)
    weights = gaussian(3, 3, dtype=torch.float64).requires_grad_()
    limit = torch.tensor(2.0, requires_grad=True)
    mask = nattn.mask(partial(same, kinds=kinds, limit=limit))
    score_mod = partial(tilted, kinds=kinds, weights=weights, first=torch.tensor(1))
    out = attention(q, k, v, score_mod=score_mod, mask_mod=mask & nattn.masks.causal)
    hidden = (kinds[:, None] != kinds) & (torch.arange(N) >= 2)
    heads = torch.arange(4)[:, None, None] - 1

    def change(s: Tensor) -> Tensor:
        s = s + weights[kinds[:, None].long(), kinds.long()] * heads
        return s.masked_fill(hidden, -math.inf)

    assert_alike(out, dense(q, k, v, change, causal=True), (*tensors[:3], weights))
    assert gradients(out, (limit, weights), allow_unused=True)[0] is None
    plain = [x.detach() for x in (q, k, v)]
    assert not attention(*plain, mask_mod=mask).requires_grad
    blocks = nattn.BlockMask.from_mask_mod(mask & nattn.masks.causal, 1, 1, N, N)
    assert torch.equal(attention(*plain, score_mod=score_mod, block_mask=blocks), out)
    with torch.no_grad():
        assert not attention(q, k, v, score_mod=score_mod).requires_grad


@pytest.mark.parametrize(
    ("dtype", "of_table"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_dtypes(dtype: Any, of_table: Any) -> None:
    if dtype == torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    q, k, v = (x.detach() for x in inputs(dtype)[:3])
    table, gain = (x.detach().to(of_table).requires_grad_() for x in inputs()[3:])
    out = attention(q, k, v, score_mod=partial(relative, table=table, gain=gain))
    found = gradients(out, (table, gain))
    expected = dense(q, k, v, lambda s: gain.double() * s + table.double()[:, DISTANCE])
    weights = gaussian(*out.shape, dtype=dtype, seed=11).double()  # as they were rounded
    want = torch.autograd.grad((expected * weights).sum(), (table, gain))
    eps = torch.finfo(of_table).eps + 40 * torch.finfo(torch.float32).eps
    for x, y in zip(found, want, strict=True):
        assert x.dtype == of_table
        np.testing.assert_allclose(x.double(), y.double(), rtol=2 * eps, atol=2 * eps)


def test_nothing_is_copied() -> None:
    table = torch.zeros(4, 2 * (2 * REACH + 1))[:, ::2]
    args: dict[str, Any] = {"score_mod": compose(partial(plus, x=table), partial(times, x=2.0))}
    tensors = bound.opened(args)
    assert len(tensors) == 1
    assert tensors[0] is table
    first = bound.closed(args, tensors)["score_mod"].parts[0]
    assert np.shares_memory(first.values[0], table.numpy())
    assert first.values[0].strides == table.numpy().strides


def test_what_torch_keeps_for_the_backward_pass() -> None:
    q, k, v, table, gain = inputs()
    mod = partial(relative, table=table, gain=gain)
    out = attention(q, k, v, score_mod=mod)
    first = gradients(out, (table, gain), retain_graph=True)
    for x, y in zip(first, gradients(out, (table, gain)), strict=True):
        assert torch.equal(x, y)
    for x in (table, gain):
        out = attention(q, k, v, score_mod=mod)
        with torch.no_grad():
            x += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    (again,) = gradients(attention(q, k, v, score_mod=mod), (table,), create_graph=True)
    with pytest.raises(NotImplementedError, match="expected one derivative"):
        again.sum().backward()


def test_function_transforms() -> None:
    q, k, v, table, gain = (x.detach() for x in inputs())

    def loss(table: Tensor, gain: Tensor) -> Tensor:
        out = attention(q, k, v, score_mod=partial(relative, table=table, gain=gain))
        return (out**2).sum()

    def expected(table: Tensor, gain: Tensor) -> Tensor:
        return (dense(q, k, v, lambda s: gain * s + table[:, DISTANCE]) ** 2).sum()

    found = torch.func.grad(loss, argnums=(0, 1))(table, gain)
    for x, y in zip(found, torch.func.grad(expected, argnums=(0, 1))(table, gain), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11)
    tables = torch.stack([table, -table, 2 * table], dim=1)
    gains = gain + torch.arange(3)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(1, 0))(tables, gains)
    for n in range(3):
        assert torch.equal(each[n], torch.func.grad(loss)(tables[:, n], gains[n]))

    def seen(limit: Tensor) -> Tensor:
        kinds = torch.zeros(N, dtype=torch.int64)
        shown = partial(same, kinds=kinds, limit=limit)
        mask = nattn.mask(shown) & ~nattn.mask(partial(same, kinds=kinds + 1, limit=limit))
        return attention(q, k, v, mask_mod=mask | partial(before, limit=limit))

    limits = torch.tensor([2, 5])
    for x, n in zip(torch.func.vmap(seen)(limits), limits, strict=True):
        assert torch.equal(x, attention(q, k, v, kv_lens=int(n)))


def before(b: Any, h: Any, i: Any, j: Any, limit: Any) -> Any:
    return j < limit


class Relative(torch.nn.Module):  # type: ignore[misc, name-defined]
    """One head that has nothing but positions to learn from."""

    def __init__(self, written_for_torch: bool) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(1, 2 * REACH + 1))
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.written_for_torch = written_for_torch

    def forward(self, x: Tensor) -> Tensor:
        table, gain = self.table, self.gain
        if not self.written_for_torch:
            mod = partial(relative, table=table, gain=gain)
            return attention(x, x, x, score_mod=mod)
        learnt = 2 * table

        def same(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return gain * s + learnt[h, i - j + REACH]

        out: Tensor = flex_attention(x, x, x, same)
        return out


@pytest.mark.parametrize("written_for_torch", [False, True])
def test_a_module_learns_to_look_back(written_for_torch: bool) -> None:
    model = Relative(written_for_torch)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
    x = gaussian(4, 1, N, 4)
    losses = []
    for _ in range(40):
        loss = ((model(x)[:, :, 1:] - x[:, :, :-1]) ** 2).mean()
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.05 * losses[0]
    assert int(model.table.argmax()) == REACH + 1


# Compiled


@pytest.mark.parametrize("bind", BOUND.values(), ids=BOUND)
def test_compiled_without_a_graph_break(bind: Callable[[Tensor, Tensor], Mod]) -> None:
    tensors = q, k, v, table, gain = inputs()
    limit = torch.tensor(6)
    once = bind(table, gain)

    def given(q: Tensor, table: Tensor, gain: Tensor) -> Tensor:
        return attention(q, k, v, score_mod=once, mask_mod=partial(before, limit=limit))

    def made(q: Tensor, table: Tensor, gain: Tensor) -> Tensor:
        return attention(2 * q, k, v, score_mod=bind(2 * table, gain))

    closure = bind in (in_closure, in_defaults)
    for function in (given,) if closure else (given, made):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            out, expected = (f(q, table, gain) for f in (compiled, function))
            assert torch.equal(out, expected)
            for x, y in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
                assert torch.equal(x, y)
            with torch.no_grad():
                table += 0.25


def test_compiled_refuses_closures_that_it_has_made() -> None:
    q, k, v, table, gain = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, table: attention(q, k, v, score_mod=in_closure(table, gain)),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match=r"bind tensors with functools\.partial in torch"):
        compiled(q, table)


@pytest.mark.parametrize("grad", [False, True])
def test_operator(grad: bool) -> None:
    autograd = importlib.import_module("nattn.integrations.torch.autograd")
    tensors: list[Tensor] = []
    q, k, v, table, gain = (x.detach().requires_grad_(grad) for x in inputs())
    mod = bound.apart(partial(relative, table=table, gain=gain), tensors)
    key = autograd._key("auto", (("score_mod", mod),))
    found = torch.library.opcheck(
        torch.ops.nattn.attention.default, (q, k, v, *[None] * 8, tensors, key)
    )
    assert set(found.values()) == {"SUCCESS"}


# FlexAttention


table = gaussian(cases.H, 2 * cases.Nq + 1, dtype=torch.float64, seed=2).requires_grad_()
gain = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)
rows = torch.randint(0, 8, (81,), generator=torch.Generator().manual_seed(0))
embedding = gaussian(8, cases.H, dtype=torch.float64, seed=3).requires_grad_()


def read(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * gain + table[h, i - j + cases.Nq]


def computed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Of what is captured alone, by operations of torch, and of single numbers of it."""
    weights = torch.nn.functional.softplus(2 * embedding)[rows]
    return s + weights[i - j + cases.Nq, h] * gain.exp() + torch.sigmoid(table[h, i])


def cut(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * gain + table.detach()[h, i - j + cases.Nq]


@pytest.mark.parametrize(
    ("mod", "learnt"),
    [(read, (table, gain)), (computed, (table, gain, embedding)), (cut, (gain,))],
    ids=["read", "computed", "detached"],
)
def test_captured_tensors(mod: Mod, learnt: tuple[Tensor, ...]) -> None:
    tensors = cases.qkv(dtype=torch.float64, grad=True)
    mask = cases.block_mask(cases.causal)
    out = flex_attention(*tensors, mod, mask)
    expected = cases.dense(tensors, mod, cases.causal)[0]
    assert_alike(out, expected, (*tensors, *learnt))
    if mod is cut:
        assert gradients(flex_attention(*tensors, mod), (table,), allow_unused=True) == (None,)
    with torch.no_grad():
        assert not flex_attention(*tensors, mod, mask).requires_grad


def test_captured_tensors_of_16_bits() -> None:
    q, k, v = cases.qkv()
    narrow = table.detach().bfloat16().requires_grad_()

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + narrow[h, i - j + cases.Nq]

    (found,) = gradients(flex_attention(q, k, v, mod), (narrow,))
    wide = narrow.detach().double().requires_grad_()

    def same(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + wide[h, i - j + cases.Nq]

    out = cases.dense((q, k, v), same)[0]
    weights = gaussian(*out.shape, seed=11).double()
    (want,) = torch.autograd.grad((out * weights).sum(), wide)
    assert found.dtype == torch.bfloat16
    np.testing.assert_allclose(found.double(), want, rtol=2**-8, atol=1e-5)


def test_captured_tensors_in_transforms() -> None:
    """Of what is captured there is no gradient in torch.func; of q there is."""
    q, k, v = cases.qkv(dtype=torch.float64)
    found = torch.func.grad(lambda q: flex_attention(q, k, v, read).square().sum())(q)
    x = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cases.dense((x, k, v), read)[0].square().sum(), x)
    np.testing.assert_allclose(found.detach(), expected, rtol=0, atol=1e-11)

    def loss(rows: Tensor) -> Tensor:
        out: Tensor = flex_attention(q, k, v, lambda s, b, h, i, j: s + rows[h, i])
        return out.sum()

    with pytest.raises(NotImplementedError, match=r"got rows of <lambda>; bind it with functools"):
        torch.func.grad(loss)(table.detach())


def test_translations_carry_what_learns() -> None:
    """`translate` alone serves both, nattn's own function and the one that records gradients."""
    tensors = cases.qkv(dtype=torch.float64)
    ours = adapter.translate(read)
    out = attention(*tensors, score_mod=ours, q_offset=0)
    assert_alike(out, cases.dense(tensors, read)[0], (table, gain))
    assert torch.equal(nattn.attention(*tensors, score_mod=ours, q_offset=0), out)


# The core


def test_the_core_takes_bound_tensors() -> None:
    q, k, v, table, gain = (x.detach() for x in inputs())
    mod = partial(relative, table=table, gain=gain)
    out, vjp = nattn.attention_vjp(q, k, v, score_mod=mod)
    plain = partial(relative, table=table.numpy(), gain=gain.numpy())
    expected, np_vjp = nattn.attention_vjp(q.numpy(), k.numpy(), v.numpy(), score_mod=plain)
    np.testing.assert_array_equal(out.numpy(), expected)
    wrt = ("score_mod.table", "score_mod.gain")
    found, same = vjp(out, wrt=wrt).dmods, np_vjp(expected, wrt=wrt).dmods
    for name in wrt:
        np.testing.assert_array_equal(found[name].numpy(), same[name], strict=True)


# Bad input

X = torch.zeros(4, N, 4)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "complex": (torch.zeros(4, 17) * 1j, TypeError, "expected x of plus to be bound .*complex64"),
    "sparse": (torch.zeros(4, 17).to_sparse(), TypeError, "score_mod: x of plus: expected a dense"),
    "meta": (torch.empty(4, 17, device="meta"), TypeError, "x of plus: expected .* host memory"),
    "float8": (torch.zeros(4, 17).to(torch.float8_e5m2), TypeError, "x of plus: expected .*"),
    "short": (torch.zeros(4, 9), IndexError, "score_mod"),
    "no tensor": ("table", TypeError, "expected x of plus to be bound to a NumPy array"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input(case: Any) -> None:
    value, error, text = case
    with pytest.raises(error, match=text):
        attention(X, X, X, score_mod=partial(plus, x=value))
