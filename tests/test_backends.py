"""The doors of the backends: what each offers, what it refuses, and who is asked."""

from __future__ import annotations

import functools
import importlib
import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cases import qkv
from test_device_arrays import Nowhere

import nattn
from nattn import backends
from nattn.call.problem import Problem

TASKS = {
    "cpu": {"forward", "backward", "observe", "classify", "rotate", "gelu", "info", "warmup"},
    "reference": {"forward", "backward", "observe", "weights"},
    "cuda": {"forward", "backward"},
}


def face(name: str) -> Any:
    return importlib.import_module(f"nattn.backends.{name}")


def problem(dtype: Any = np.float32, **options: Any) -> Problem:
    return Problem.build(*qkv(1, 2, 5, 7, 4, dtype=dtype), **options)


def test_the_names() -> None:
    assert ("auto", *TASKS) == backends.NAMES
    for name, tasks in TASKS.items():
        assert tasks <= face(name).OFFERS


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_a_door_has_what_its_face_offers(name: str) -> None:
    door = backends.load(name)
    assert door is backends.load(name)
    for task in face("cpu" if name == "auto" else name).OFFERS:
        assert callable(getattr(door, task))


def test_auto_is_cpu_in_host_memory() -> None:
    assert backends.load("auto") is backends.load("cpu")
    assert backends.choose(problem(), "auto", "forward") is backends.load("cpu")


def test_a_face_is_light() -> None:
    code = (
        "import sys, nattn.backends.cpu, nattn.backends.cuda, nattn.backends.reference\n"
        "print([m for m in ('numba', 'llvmlite', 'cupy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["cpu ", "CPU", "", "gpu", "nattn.backends.cpu"])
def test_an_unknown_name(name: str) -> None:
    expected = r"^backend: expected 'auto', 'cpu', 'reference' or 'cuda', got "
    q, k, v = qkv(1, 1, 3, 3, 4)
    for call in (
        lambda: backends.load(name),
        lambda: backends.choose(problem(), name, "forward"),
        lambda: nattn.attention(q, k, v, backend=name),
        lambda: nattn.attention_vjp(q, k, v, backend=name),
        lambda: nattn.attention_weights(q, k, backend=name),
        lambda: nattn.attention_map(q, k, backend=name),
        lambda: nattn.row_stats(q, k, backend=name),
        lambda: nattn.key_mass(q, k, backend=name),
    ):
        with pytest.raises(ValueError, match=expected):
            call()


@pytest.mark.parametrize("name", [None, 1, ["cpu"], {"cpu": 1}, b"cpu", np])
def test_a_name_that_is_no_string(name: Any) -> None:
    for call in (
        lambda: backends.load(name),
        lambda: backends.choose(problem(), name, "forward"),
        lambda: nattn.attention(*qkv(1, 1, 3, 3, 4), backend=name),
    ):
        with pytest.raises(TypeError, match=r"^backend: expected 'auto', .* got "):
            call()


def test_a_task_that_a_backend_lacks() -> None:
    expected = (
        r"^backend: expected 'auto' or 'cpu' or 'reference' for the task 'observe', got 'cuda'"
    )
    with pytest.raises(NotImplementedError, match=expected):
        backends.choose(problem(), "cuda", "observe")
    with pytest.raises(NotImplementedError, match=r"^backend: expected 'reference' for .* 'cpu'"):
        backends.choose(problem(), "cpu", "weights")
    q, k, _ = qkv(1, 1, 3, 3, 4)
    for call in (nattn.attention_map, nattn.row_stats):
        with pytest.raises(NotImplementedError, match=expected):
            call(q, k, backend="cuda")


def test_cuda_lists_every_reason() -> None:
    unaligned = {"data": ((1 << 40) + 1, True)}
    many = Nowhere(1, 1, 1 << 31, 4)
    p = Problem.build(many, Nowhere(1, 1, 7, 4, **unaligned), Nowhere(1, 1, 7, 4))
    reasons = face("cuda").refusals(p, "forward", {"out": None})
    assert [reason.split(":")[0] for reason in reasons] == ["q", "k"]
    assert "fewer than 2147483648 rows" in reasons[0]
    assert "multiples of their 4 bytes" in reasons[1]
    with pytest.raises(NotImplementedError) as caught:
        backends.choose(p, "auto", "forward")
    assert str(caught.value) == "; ".join(reasons)


def test_a_call_that_is_refused_loads_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ModuleType:
        raise AssertionError(name)

    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr(face("cpu"), "refusals", lambda *given: ["q: expected more", "k: so, too"])
    q, k, v = qkv(1, 2, 5, 7, 4)
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises(NotImplementedError, match=r"^q: expected more; k: so, too$"):
        nattn.attention(q, k, v, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_arrays_on_a_gpu_go_to_cuda(name: str) -> None:
    p = Problem.build(Nowhere(5, 4), Nowhere(7, 4), Nowhere(7, 4))
    with pytest.raises(TypeError, match=rf"^backend: expected 'auto' or 'cuda' .*got '{name}'"):
        backends.choose(p, name, "forward")
    with pytest.raises(NotImplementedError, match=r"for the task 'observe', got 'cuda'"):
        backends.choose(p, "auto", "observe")


def test_gradients_of_what_functions_are_bound_to_need_a_backend_that_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that on a GPU does not: it says so before anything is computed."""
    door = backends.load("reference")
    monkeypatch.setattr(door, "LEARNS", False)
    monkeypatch.setattr(door, "backward", None)
    q, k, v = qkv(1, 2, 5, 7, 4)
    out, lse = nattn.attention(q, k, v, return_lse=True)
    score_mod = functools.partial(nattn.mods.logit_scale, scale=np.ones(2, np.float32))
    with pytest.raises(NotImplementedError, match=r"^wrt: .* on a GPU, .*got 'score_mod.scale'"):
        nattn.attention_backward(
            *(out, q, k, v, out, lse),
            score_mod=score_mod,
            wrt=("q", "score_mod.scale"),
            backend="reference",
        )


def test_weights_are_those_of_the_reference() -> None:
    q, k, _ = qkv(1, 2, 5, 7, 4)
    same = [nattn.attention_weights(q, k, causal=True, backend=name) for name in backends.NAMES]
    for weights in same[1:]:
        np.testing.assert_array_equal(weights, same[0])


@pytest.mark.parametrize("name", TASKS)
def test_refusals_are_asked_alike(name: str) -> None:
    parameters = inspect.signature(face(name).refusals).parameters
    assert list(parameters) == ["problem", "task", "arrays"]
