"""What `nattn.integrations.torch.translate` makes of functions, and of what they capture."""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nattn

torch = pytest.importorskip("torch", reason="no torch")
flex = importlib.import_module("nattn.integrations.torch.flex")
translation = importlib.import_module("nattn.integrations.torch.translate")
cases = importlib.import_module("torch_cases")
translate, flex_attention = translation.translate, flex.flex_attention
gaussian, qkv, block_mask, dense, relative_bias, causal = (
    cases.gaussian,
    cases.qkv,
    cases.block_mask,
    cases.dense,
    cases.relative_bias,
    cases.causal,
)
table, H, Nq, Nk = cases.table, cases.H, cases.Nq, cases.Nk
Tensor = Any
Mod = Any

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning:torch", "ignore:return_lse is deprecated:FutureWarning"
)

# What is captured


def test_captured_tensors_are_read_in_every_call() -> None:
    q, k, v = qkv()
    bias, size, flag = torch.zeros(H), torch.tensor(0.0), torch.tensor([True, False])

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h] * kv_idx + torch.where(flag[0], size * q_idx % 7 - kv_idx, 0.0)

    def expected() -> Tensor:
        return dense((q, k, v), mod)[0]

    once = translate(mod)
    for change in (
        lambda: None,
        lambda: bias.fill_(0.25),
        lambda: size.fill_(0.5),
        lambda: flag.logical_not_(),
    ):
        change()
        got = flex_attention(q, k, v, mod)
        np.testing.assert_allclose(got, expected(), atol=1e-4)
        assert torch.equal(nattn.attention(q, k, v, score_mod=once, q_offset=0), got)
    bias = torch.full((H,), -1.0)  # another tensor under the name
    np.testing.assert_allclose(flex_attention(q, k, v, mod), expected(), atol=1e-4)

    def computed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias.exp()[h] * kv_idx

    first = flex_attention(q, k, v, computed)
    bias.fill_(0.0)
    assert not torch.equal(flex_attention(q, k, v, computed), first)


def test_a_mask_reads_what_it_captures_in_every_call() -> None:
    q, k, v = qkv()
    last = torch.tensor(20)
    mask = block_mask(lambda b, h, q_idx, kv_idx: kv_idx < last)
    for n in (20, 30):
        last.fill_(n)
        got = flex_attention(q, k, v, block_mask=mask)
        assert torch.equal(got, nattn.attention(q, k, v, kv_lens=n, q_offset=0))


def test_captured_numbers_may_change() -> None:
    q, k, v = qkv()
    factor = 1.0

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * factor

    first = flex_attention(q, k, v, mod)
    factor = 2.0
    assert torch.equal(flex_attention(q, k, v, mod), flex_attention(q, k, v, scale=0.5))
    assert not torch.equal(flex_attention(q, k, v, mod), first)


def test_dtypes_of_captured_tensors() -> None:
    q, k, v = qkv()
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ):
        values = (torch.arange(Nk) % 5).to(dtype)
        mod = functools.partial(lambda values, s, b, h, i, j: s + values[j] * 2, values)
        got = flex_attention(q, k, v, mod)
        want = dense((q, k, v), mod)[0]
        np.testing.assert_allclose(got, want, atol=1e-5)


# Translation


def source(mod: Any) -> str:
    plain = getattr(mod, "func", mod)
    return "".join(linecache.getlines(plain.__code__.co_filename))


def test_sources() -> None:
    mod = translate(relative_bias)
    assert source(mod) == (
        "def relative_bias(score, b, h, q_idx, kv_idx, table):\n"
        "    x0 = q_idx - kv_idx\n"
        f"    x1 = x0 + {Nq}\n"
        "    x2 = table[h, x1]\n"
        "    x3 = score + x2\n"
        "    return x3\n"
    )
    assert isinstance(mod, functools.partial)
    assert np.shares_memory(mod.keywords["table"], table.numpy())
    assert translate(causal, "mask_mod") is translate(causal, "mask_mod")
    again = translate(lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score / 2.0))
    other = translate(lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score / 2.0))
    assert again is other
    assert translate(nattn.masks.causal, "mask_mod") is nattn.masks.causal


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_operations(name: str) -> None:
    """Each against torch, all in one function: what differs, differs in one term."""

    def terms(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Iterator[Tensor]:
        d, f = i - j, torch.nn.functional
        yield from (d // 3, d % 3, d / 3, torch.div(d, 3, rounding_mode="trunc"), torch.fmod(d, 3))
        yield from (s // 0.5, s % 0.5, torch.fmod(s, 0.5), torch.div(s, 0.5, rounding_mode="trunc"))
        yield from (s**2, s**3.0, (s * s + 1) ** -1.5, 2.0 ** -s.abs(), d**2, 2 ** (i % 4))
        yield from (i << 1, i >> 1, i & 3, i | 4, i ^ 5, ~i, -i, d.abs(), d.sign(), s.sign())
        yield from (s.exp(), torch.expm1(s), torch.log1p(i), torch.sqrt(i + 1), torch.rsqrt(i + 1))
        yield from (
            torch.log2(i + 1).floor(),
            torch.log(j + 1),
            torch.log10(j + 1),
            s.sin(),
            s.cos(),
        )
        yield from (s.floor(), s.ceil(), s.trunc(), s.round(), s.frac(), d.floor(), 1 / (i + 1))
        yield from (f.silu(s), f.gelu(s, approximate="tanh"), f.relu(s), f.leaky_relu(s), f.elu(s))
        yield from (s.clamp(-1, 1), s.clamp(min=0.5), d.clamp(max=2), torch.maximum(i, j))
        yield from (torch.minimum(s, d), (i > j) + (i < 7), (i > j) * s, (i > j) ^ (j > 3))
        yield from (torch.rsub(s, 2), torch.add(s, d, alpha=3), torch.sub(s, d, alpha=2), i.float())
        yield from (torch.logical_xor(i, j), torch.logical_not(i), (s > 0).int(), s.double().tan())
        yield from (
            torch.isinf(s / (s > 0)),
            s.new_ones(()),
            torch.full_like(s, 2),
            b.new_zeros(()),
        )

    weights = gaussian(80).tolist()

    def mod(*args: Tensor) -> Tensor:
        return functools.reduce(
            torch.add, (w * x for w, x in zip(weights, terms(*args), strict=False))
        )

    q, k, v = qkv(dtype=torch.float64)
    got = nattn.attention(
        q, k, v, score_mod=translate(mod), q_offset=0, return_lse=True, backend=name
    )
    torch.set_default_dtype(torch.float64)  # of what it makes of integers alone
    try:
        lse = dense((q, k, v), mod)[1]
    finally:
        torch.set_default_dtype(torch.float32)
    limit = float(np.finfo("f8").eps) * 80 * 2 * 1600
    np.testing.assert_allclose(got[1], lse, atol=limit)


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (lambda s, b, h, i, j: torch.erf(s), r"score_mod: .*, got aten\.erf\.default in <lambda>"),
        (lambda s, b, h, i, j: s + torch.rand(()), r"got aten\.rand\.default in <lambda>"),
        (lambda s, b, h, i, j: s + table[h].sum(), r"aten\.sum\.default .* of shape \(81,\)"),
        (lambda s, b, h, i, j: s + table[h, s.long()], r"aten\._to_copy\.default to integers"),
        (lambda s, b, h, i, j: table.mul_(2)[h, i], r"aten\.mul_\.Tensor .* writes to what it"),
        (lambda s, b, h, i, j: torch.complex(s, s).real, "nattn has, too, got aten.complex"),
    ],
)
def test_refused_operations(mod: Mod, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        translate(mod)


def test_operations_of_other_libraries() -> None:
    """One that is called like torch's own may mean something else."""
    with contextlib.ExitStack() as stack:
        for name in ("approx", "nattn_test"):
            if not hasattr(getattr(torch.ops, name), "tanh"):  # attention-gym defines the first
                library = stack.enter_context(torch.library._scoped_library(name, "FRAGMENT"))
                library.define("tanh(Tensor x) -> Tensor")
                library.impl("tanh", torch.tanh, "CompositeExplicitAutograd")
        q, k, v = qkv()
        got = flex_attention(q, k, v, lambda s, b, h, i, j: torch.ops.approx.tanh(s))
        assert torch.equal(got, flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s)))
        with pytest.raises(NotImplementedError, match=r"got nattn_test\.tanh\.default in <lambda>"):
            translate(lambda s, b, h, i, j: torch.ops.nattn_test.tanh(s))


@pytest.mark.parametrize(
    ("mod", "kind", "text"),
    [
        (lambda s, b, h, i, j: s if s > 0 else -s, "score_mod", "expected no Python if"),
        (lambda s, b, h, i, j: s * i.item(), "score_mod", "Python"),
        (lambda s, b, h, i, j: "s", "score_mod", "expected <lambda> to return one tensor, got s"),
        (lambda b, h, i, j: i - j, "mask_mod", "to return a tensor of bools, got int"),
        (3, "score_mod", "score_mod: expected a function, got int"),
    ],
)
def test_no_functions_of_numbers(mod: Any, kind: str, text: str) -> None:
    with pytest.raises((TypeError, NotImplementedError), match=text):
        translate(mod, kind)


def test_an_index_out_of_range() -> None:
    q, k, v = qkv()
    short = torch.zeros(Nk - 1)
    with pytest.raises(IndexError, match="score_mod"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + short[j])
