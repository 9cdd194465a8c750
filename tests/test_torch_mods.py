"""What the built-in functions learn, against torch's gradient of the papers' formulas, dense.

Each formula is written as the papers' own code has it, with matrices of all pairs, so that nothing
of it is shared with what is tested. The functions are those of test_learnt.py, and compile nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no torch")

from test_learnt import CASES, B, D, H, Hkv, Nk, Nq, floats, gradients, inputs  # noqa: E402

Tensor = Any
I = torch.arange(Nk - Nq, Nk)[:, None]  # noqa: E741
J = torch.arange(Nk)[None, :]
DISTANCE = (I - J).abs()


def of_heads(x: Tensor) -> Tensor:
    return x[:, None, None]


def alibi(s: Tensor, slopes: Tensor) -> Tensor:
    return s - slopes[:, :, None, None] * DISTANCE


def shaw(s: Tensor, table: Tensor) -> Tensor:
    """By products with one-hot vectors of the clipped distance, as one may write it for a TPU."""
    reach = table.shape[1] // 2
    one_hot = torch.nn.functional.one_hot((J - I).clamp(-reach, reach) + reach, 2 * reach + 1)
    return s + torch.einsum("ijn,hn->hij", one_hot.to(table.dtype), table)


def swin(s: Tensor, table: Tensor) -> Tensor:
    """As in microsoft/Swin-Transformer: one flat index for each pair of a window's tokens."""
    height, width = table.shape[1] // 2 + 1, table.shape[2] // 2 + 1
    coords = torch.stack(
        torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ).flatten(1)
    apart = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
    apart[:, :, 0] += height - 1
    apart[:, :, 1] += width - 1
    apart[:, :, 0] *= 2 * width - 1
    index = apart.sum(-1)
    flat = table.reshape(H, -1).T  # relative_position_bias_table
    bias = flat[index.reshape(-1)].reshape(height * width, height * width, H).permute(2, 0, 1)
    return s + bias[:, Nk - Nq : Nk, :Nk]


def kerple_log(s: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    return s - of_heads(r1) * torch.log(1 + of_heads(r2) * DISTANCE)


def kerple_power(s: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    return s - of_heads(r1) * DISTANCE.double().pow(of_heads(r2))


def fire(
    s: Tensor, c: Tensor, threshold: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """As the paper's appendix has it: two linear layers for each pair."""
    linear = torch.nn.functional.linear
    near = torch.log(torch.abs(c * DISTANCE) + 1)
    x = near / torch.log(torch.abs(c * torch.max(I.double(), threshold)) + 1)
    hidden = torch.relu(linear(x[..., None], w1[:, None], b1))
    return s + linear(hidden, w2, b2).permute(2, 0, 1)


def tupe(s: Tensor, p_q: Tensor, p_k: Tensor, scale: Tensor) -> Tensor:
    return s + scale * p_q[:, Nk - Nq :] @ p_k.transpose(1, 2)


def scaled(s: Tensor, scale: Tensor) -> Tensor:
    return of_heads(scale) * s


def weighted(s: Tensor, log_weights: Tensor) -> Tensor:
    """By weights of the exponentials, which softmax divides by their sum."""
    return s + log_weights.exp()[:, None, None].log()


def forgetting(s: Tensor, cumulative: Tensor) -> Tensor:
    return s + cumulative[..., Nk - Nq :, None] - cumulative[..., None, :]


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "alibi": alibi,
    "shaw": shaw,
    "swin": swin,
    "kerple log": kerple_log,
    "kerple power": kerple_power,
    "fire": fire,
    "tupe": tupe,
    "scaled": scaled,
    "token weights": weighted,
    "forgetting": forgetting,
}


def loss(scores: Callable[[Tensor], Tensor], causal: bool) -> Tensor:
    q, k, v, dout = map(torch.from_numpy, inputs())
    k, v = (x.repeat_interleave(H // Hkv, dim=1) for x in (k, v))
    s = scores(q @ k.transpose(2, 3) / math.sqrt(D))
    if causal:
        s = s.masked_fill(I < J, -math.inf)
    return (s.softmax(-1) @ v * dout).sum()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", FORMULAS)
def test_gradients_are_those_of_torch(case: str, causal: bool, backend: str) -> None:
    mod = CASES[case]
    bound = {name.removeprefix("score_mod."): x for name, x in floats(mod).items()}
    leaves = {n: torch.tensor(x, dtype=torch.float64, requires_grad=True) for n, x in bound.items()}
    total = loss(lambda s: FORMULAS[case](s, **leaves), causal)
    expected = torch.autograd.grad(total, list(leaves.values()))
    found = gradients(mod, backend, causal=causal).dmods
    assert len(found) == len(expected) > 0
    for name, x in zip(bound, expected, strict=True):
        got, size = found[f"score_mod.{name}"], float(x.abs().max())
        assert size > 1e-3 or name == "b2", name  # which all keys of a row share: no weight moves
        np.testing.assert_allclose(got, x.numpy(), rtol=0, atol=1e-11 * (1 + size), err_msg=name)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gates_learn_through_their_sums(backend: str) -> None:
    """By the line that the docstring of `forget_gates` gives for the gradient of the logarithms."""
    sums = CASES["forgetting"].keywords["cumulative"]  # type: ignore[attr-defined]
    gates = torch.tensor(np.diff(sums, axis=2, prepend=0.0), requires_grad=True)
    total = loss(lambda s: forgetting(s, torch.cumsum(gates, dim=2)), causal=True)
    (expected,) = torch.autograd.grad(total, [gates])
    d = gradients(CASES["forgetting"], backend, causal=True).dmods["score_mod.cumulative"]
    got = np.flip(np.cumsum(np.flip(d, 2), axis=2), 2)
    assert got.shape == (B, H, Nk)
    np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-11)
