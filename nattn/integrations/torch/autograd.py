"""Attention on tensors, whose gradients torch records: eagerly, in torch.func, and compiled.

`_Attention` is what torch's autograd and its function transforms see; a compiler sees the operator
``nattn::attention`` instead. torch makes a Function of an operator, too, but one that torch.func
refuses. Both call `_run` and `_run_backward`, which know what the core takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...api import attention as nattn_attention
from ...api import attention_backward, attention_jvp
from ...api.functional import _forward
from ...call.arguments import Arguments
from ...call.problem import LEARNT, WRT, Problem
from ...call.tensors import as_tensor
from .bound import FUNCTIONS, apart, closed, key_of, names_of, opened, together, without_gradient

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What attention is computed of."""

_INPUTS = (*LEARNT, "mask", "seed", "q_lens", "kv_lens", "q_offset")
"""Arguments that are tensors for torch: the first have gradients, and vmap may map all."""


@dataclass(frozen=True, eq=False)
class _Call:
    """What a call depends on beside its tensors; one leaf for torch, which looks into dicts.

    Attributes
    ----------
    args : dict
        Arguments of `nattn.attention`; functions have numbers in place of tensors (`bound`).
    names : tuple of str
        What the tensors after q, k and v are: some of `_INPUTS`, in their order. Behind them come
        those that functions are bound to.
    keeps_exact : bool
        Whether a backward pass may follow, which wants 16-bit outputs as they were computed.
    wrt : tuple of str
        In a backward pass, what gradients are wanted of; "0" is the first bound tensor.
    """

    args: Arguments
    names: tuple[str, ...]
    backend: str
    keeps_exact: bool
    wrt: tuple[str, ...] = ()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **args: Unpack[Arguments],
) -> Any:
    """Do what `nattn.attention` does, on tensors, with torch's gradients.

    Parameters
    ----------
    q, k, v : Tensor
        As in `nattn.attention`, ``(..., N, D)`` of float16, bfloat16, float32 or float64, in host
        memory or on a GPU, with any strides; nothing is copied.
    return_lse : bool, default False
        Return `lse` too, which has a gradient as well.
    backend : str, default "auto"
        As in `nattn.attention`.
    **args
        All other arguments of `nattn.attention`. With dropout and without a `seed` one is drawn
        from torch's generator, so that ``torch.manual_seed`` rules it. `score_mod` and `mask_mod`
        may be bound to tensors, in host memory without a copy but of bfloat16; those without axes
        stand for their number.

    Returns
    -------
    out : Tensor
        ``(..., Nq, Dv)``. Gradients reach q, k, v, bias, sinks, alibi_slopes and the tensors that
        `score_mod` is bound to.
    lse : Tensor, only with ``return_lse=True``
        ``(B, Hq, Nq)``.

    Raises
    ------
    ValueError, TypeError, IndexError, NotImplementedError
        As `nattn.attention` does; NotImplementedError for second derivatives and for tangents of
        other tensors than q, k and v, and within ``torch.compile`` for arguments that are neither
        tensors, numbers nor functions. On a GPU the tensors that `score_mod` is bound to have no
        gradient yet.

    Notes
    -----
    ``torch.func.grad``, ``jvp``, ``vmap``, ``jacrev`` and ``jacfwd`` work; a mapped axis is gone
    through one by one. So does ``torch.compile(fullgraph=True)``.

    Examples
    --------
    >>> import torch
    >>> from nattn.integrations.torch import attention
    >>> q = torch.randn(1, 8, 100, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 1, 2, 100, 64)
    >>> sinks = torch.zeros(8, requires_grad=True)
    >>> attention(q, k, v, causal=True, window_size=(20, 0), sinks=sinks).sum().backward()
    >>> q.grad.shape, sinks.grad.shape
    (torch.Size([1, 8, 100, 64]), torch.Size([8]))
    >>> from functools import partial
    >>> def relative(score, b, h, q_idx, kv_idx, table):
    ...     return score + table[h, q_idx - kv_idx]
    >>> table = torch.zeros(8, 100, requires_grad=True)
    >>> attention(q, k, v, causal=True, score_mod=partial(relative, table=table)).sum().backward()
    >>> table.grad.shape
    torch.Size([8, 100])
    """
    given = with_seed(dict(args))
    if torch.compiler.is_compiling():
        out, lse = traced(q, k, v, given, backend)
    else:
        names = tuple(x for x in _INPUTS if isinstance(given.get(x), Tensor))
        inputs = [given.pop(x) for x in names] + opened(given)
        recorded = _is_recorded(q, k, v, *inputs)
        call = _Call(given, names, backend, keeps_exact=recorded)  # type: ignore[arg-type]
        run = _Attention.apply if recorded else _run_alone
        out, lse, *_ = run(q, k, v, *inputs, call)
    return (out, lse) if return_lse else out


def with_seed(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with a seed from torch's generator, where there is dropout without one."""
    if args.get("dropout_p") and args.get("seed") is None:
        args["seed"] = torch.randint(2**63 - 1, ())
    return args


def traced(
    q: Tensor, k: Tensor, v: Tensor, args: dict[str, Any], backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return out and lse, by the operator that a compiler sees; `args` is used up."""
    inputs = [args.pop(x) if isinstance(args.get(x), Tensor) else None for x in _INPUTS]
    bound: list[Tensor] = []
    for name in FUNCTIONS:
        if args.get(name) is not None:
            first = len(bound)
            args[name] = apart(args[name], bound)
            if name == "mask_mod":
                bound[first:] = [without_gradient(x) for x in bound[first:]]
    # torch shows this line where it cannot pass on what it finds
    key = _key(backend, tuple(args.items()))  # bind tensors with functools.partial in torch.compile
    out, lse, _ = torch.ops.nattn.attention(q, k, v, *inputs, bound, key)
    return out, lse


def _is_recorded(*inputs: Tensor) -> bool:
    """Whether anything of torch looks on: a Function takes 30 microseconds, for nothing if not.

    A Function itself asks in this way whether torch.func is at work.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
    )


# What is computed


def _arguments(call: _Call, inputs: tuple[Any, ...]) -> Arguments:
    found = closed(call.args, inputs[len(call.names) :])  # type: ignore[arg-type]
    found.update((n, x) for n, x in zip(call.names, inputs, strict=False) if x is not None)
    if isinstance(found.get("seed"), Tensor):
        found["seed"] = int(found["seed"])
    return found  # type: ignore[return-value]


def _run(call: _Call, q: Tensor, k: Tensor, v: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return out, lse and, of 16 bits for a backward pass, perhaps out before it was rounded."""
    args = _arguments(call, inputs)
    if not (call.keeps_exact and q.dtype.itemsize == 2):
        found = nattn_attention(q, k, v, return_lse=True, backend=call.backend, **args)
        return tuple(found)
    problem = Problem.build(q, k, v, **args)
    out, lse, exact = _forward(problem, None, True, call.backend, keeps_exact=True)
    return (out, lse) if exact is out else (out, lse, as_tensor(exact))


def _run_alone(*args: Any) -> tuple[Tensor, ...]:
    """Do what `_run` does, called as a Function is."""
    return _run(args[-1], *args[:-1])


def _run_backward(
    call: _Call,
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *inputs: Any,
) -> tuple[Tensor, ...]:
    """Return a gradient for each of `WRT` and each bound tensor, empty where none is wanted."""
    bound = inputs[len(call.names) :]
    wanted = [n for n in range(len(bound)) if str(n) in call.wrt]
    names = names_of(call.args["score_mod"]) if wanted else {}
    found = attention_backward(
        torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        if dout is None
        else dout,
        q,
        k,
        v,
        out,
        lse,
        dlse=dlse,
        wrt=(*(x for x in call.wrt if x in WRT), *(names[n] for n in wanted)),
        backend=call.backend,
        **_arguments(call, inputs),
    )
    learnt: list[Any] = [None] * len(bound)
    for n in wanted:
        learnt[n] = found.dmods[names[n]].to(bound[n].dtype)
    return tuple(q.new_empty(0) if x is None else x for x in (*found[: len(WRT)], *learnt))


def _backwards(
    needed: Sequence[bool], names: tuple[str, ...], run: Callable[[tuple[str, ...]], Any]
) -> tuple[Tensor | None, ...]:
    """Return a gradient for each tensor, of those whose names `run` is called with.

    `names` are those of the tensors after q, k and v. What a function is bound to has no more than
    a number.
    """
    numbers = tuple(map(str, range(len(needed) - 3 - len(names))))
    inputs = ("q", "k", "v", *names, *numbers)
    wrt = tuple(x for x, is_needed in zip(inputs, needed, strict=True) if is_needed)
    found = dict(zip((*WRT, *numbers), run(wrt), strict=True))
    return tuple(found[x] if x in wrt else None for x in inputs)


def _exact_last(tensors: Any, n_outputs: int) -> tuple[Any, ...]:
    """Return (out, lse, *inputs) of what was saved; out before it was rounded, if that is there."""
    out, lse, *rest = tensors
    if n_outputs == 2:
        return out, lse, *rest
    exact, *inputs = rest
    return exact if exact.numel() else out, lse, *inputs


# Eager


def _one_by_one(function: Any, info: Any, dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Apply a function along mapped axes, and stack what it returns."""
    found = [
        function.apply(
            *(x if d is None else x.select(d, n) for x, d in zip(args, dims, strict=True))
        )
        for n in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])


class _Attention(torch.autograd.Function):
    """(q, k, v, *inputs, *bound, call) to (out, lse) or, of 16 bits, (out, lse, exact)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _run_alone(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output, *inputs[:-1])
        ctx.save_for_forward(*output, *inputs[:-1])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.call, ctx.n_outputs = inputs[-1], len(output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        saved = _exact_last(ctx.saved_tensors, ctx.n_outputs)

        def run(wrt: tuple[str, ...]) -> Any:
            return _Backward.apply(dout, dlse, *saved, replace(ctx.call, wrt=wrt))

        return (*_backwards(ctx.needs_input_grad[:-1], ctx.call.names, run), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Attention, info, in_dims, args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs = ctx.saved_tensors[ctx.n_outputs :]
        others = (*ctx.call.names, *["what a function is bound to"] * len(inputs))
        for name, x in zip(others, tangents[3:-1], strict=False):
            if x is not None:
                raise NotImplementedError(
                    f"attention: expected tangents of q, k and v, got one of {name}, which nattn "
                    "does not have in forward mode; use torch.func.vjp or jacrev"
                )
        dout, dlse = _Tangent.apply(*tangents[:3], *inputs, ctx.call)
        return (dout, dlse) if ctx.n_outputs == 2 else (dout, dlse, None)


# torch asks for the signature at each call; found anew that takes 20 microseconds
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # type: ignore[attr-defined]


class _Backward(torch.autograd.Function):
    """(dout, dlse, out, lse, q, k, v, *inputs, *bound, call) to gradients."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _run_backward(args[-1], *args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_ONCE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_ONCE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Backward, info, in_dims, args)


class _Tangent(torch.autograd.Function):
    """(dq, dk, dv, q, k, v, *inputs, *bound, call) to (dout, dlse)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        dq, dk, dv, q, k, v, *inputs, call = args
        moves = {"dq": dq, "dk": dk, "dv": dv, "return_lse": True, "backend": call.backend}
        _, tangents = attention_jvp(q, k, v, **moves, **_arguments(call, tuple(inputs)))
        return tangents

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_ONCE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_ONCE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Tangent, info, in_dims, args)


_ONCE = (
    "attention: expected one derivative, got a second one, which nattn does not have; "
    "use torch's own attention with sdpa_kernel(SDPBackend.MATH)"
)


# Compiled

_calls: dict[str, _Call] = {}
_NO_KEY = (type(None), bool, int, float, str)


@torch.compiler.assume_constant_result
def _key(backend: str, items: tuple[tuple[str, Any], ...]) -> str:
    """Remember what a compiled call depends on beside its tensors, and return its name.

    Equal numbers and the same functions have the same name, so that graphs are found again.
    """
    parts = [backend]
    for name, x in items:
        if callable(x) or isinstance(x, (list, tuple, *_NO_KEY)):
            parts.append(f"{name}={key_of(x)}")
        else:
            raise NotImplementedError(
                f"{name}: expected a tensor, a number or a function within torch.compile, got "
                f"{type(x).__name__}"
            )
    key = " ".join(parts)
    args: Any = {name: together(x) if name in FUNCTIONS else x for name, x in items}
    _calls[key] = _Call(args, _INPUTS, backend, keeps_exact=True)
    return key


_TENSORS = "Tensor q, Tensor k, Tensor v, " + ", ".join(
    (*(f"Tensor? {x}" for x in _INPUTS), "Tensor[] bound")
)
LIBRARY = torch.library.Library("nattn", "DEF")
LIBRARY.define(f"attention({_TENSORS}, str call) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{_TENSORS}, str call, str[] wrt) -> Tensor[]"
)


def _operator(name: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        LIBRARY.impl(name, function, "CPU")
        LIBRARY.impl(name, function, "CUDA")
        return function

    return register


@_operator("attention")
def _attention_operator(*args: Any) -> tuple[Tensor, ...]:
    *tensors, bound, key = args
    found = _run(_calls[key], *tensors, *bound)
    return found if len(found) == 3 else (*found, found[1].new_empty(0))


@_operator("attention_backward")
def _backward_operator(*args: Any) -> list[Tensor]:
    *tensors, bound, key, wrt = args
    return list(_run_backward(replace(_calls[key], wrt=tuple(wrt)), *tensors, *bound))


@torch.library.register_fake("nattn::attention", lib=LIBRARY)
def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[:-1]
    if _calls[rest[-1]].args.get("layout") == "bnhd":
        rows = (rows[0], rows[2], rows[1])
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    narrow = q.dtype.itemsize == 2 and q.device.type == "cpu"
    exact = out.to(compute) if narrow else q.new_empty(0, dtype=compute)
    return out, q.new_empty(rows, dtype=compute), exact


@torch.library.register_fake("nattn::attention_backward", lib=LIBRARY)
def _backward_shapes(*args: Any) -> list[Tensor]:
    *tensors, bound, _, wrt = args
    q, *_ = tensors[4:]
    inputs = dict(zip(WRT, tensors[4:], strict=False))
    inputs |= {str(n): x for n, x in enumerate(bound)}
    return [
        torch.empty_like(inputs[x]) if x in wrt else q.new_empty(0)
        for x in (*WRT, *map(str, range(len(bound))))
    ]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, bound, ctx.key = inputs
    ctx.save_for_backward(*output, *tensors, *bound)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward_of_operator(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
    saved = _exact_last(ctx.saved_tensors, 3)
    n = 5 + len(_INPUTS)  # out, lse, q, k and v, and the others

    def run(wrt: tuple[str, ...]) -> Any:
        return torch.ops.nattn.attention_backward(
            dout, dlse, *saved[:n], list(saved[n:]), ctx.key, list(wrt)
        )

    *needed, bound, _ = ctx.needs_input_grad
    found = _backwards((*needed, *bound), _INPUTS, run)
    return *found[: len(needed)], list(found[len(needed) :]), None


torch.library.register_autograd(
    "nattn::attention", _backward_of_operator, setup_context=_save, lib=LIBRARY
)
