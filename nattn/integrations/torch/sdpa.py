"""torch's own attention function, its meaning computed by nattn, and programs that switch to it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .autograd import FLOATS, LIBRARY, attention, traced, with_seed


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what `torch.nn.functional.scaled_dot_product_attention` does, with its signature.

    Parameters
    ----------
    query : Tensor
        ``(..., L, E)`` with any number of axes, or ``(..., Hq, L, E)`` with `enable_gqa`.
    key, value : Tensor
        ``(..., S, E)`` and ``(..., S, Ev)``; leading axes broadcast. With `enable_gqa` they are
        ``(..., H, S, E)``, where H divides Hq.
    attn_mask : Tensor, optional
        Broadcast to ``(..., L, S)``: bool, True where a key is visible, or floats to be added to
        the scores, which have a gradient.
    dropout_p : float, default 0.0
        Probability with which a weight is dropped, ruled by ``torch.manual_seed``; which ones
        differs from torch's own.
    is_causal : bool, default False
        Row ``i`` sees key ``j`` if ``j <= i``: the first query sits on the first key.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(E)`` by default.
    enable_gqa : bool, default False
        Whether several query heads share a key head.

    Returns
    -------
    Tensor
        ``(..., L, Ev)``. A row that sees no key is 0.

    Raises
    ------
    ValueError
        If shapes do not fit, or `attn_mask` and `is_causal` are both given.
    TypeError
        If a dtype or a device is not one of nattn's, or they differ.
    NotImplementedError
        For second derivatives and forward-mode AD.

    Examples
    --------
    >>> import torch
    >>> from nattn.integrations.torch import scaled_dot_product_attention
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64)
    >>> ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> bool(torch.allclose(ours, theirs, atol=1e-5))
    True
    """
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.nattn.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found
    return _on_four_axes(
        attention, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def _on_four_axes(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Check what torch's function is given, and call nattn's with it."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.ndim < 2:
            raise ValueError(f"{name}: expected at least 2 axes, got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            expected = "float16, bfloat16, float32 or float64"
            raise TypeError(f"{name}: expected {expected}, got {x.dtype}")
    for name, x in (*tensors.items(), ("attn_mask", attn_mask)):
        if x is not None and x.device != query.device:
            raise TypeError(f"{name}: expected device {query.device} as of query, got {x.device}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: expected None beside is_causal=True, got a tensor")
    lead: Sequence[int] = query.shape[:2]
    own = 1 if enable_gqa else 2  # axes in which they must be alike
    alike = query.shape[:own] == key.shape[:own] == value.shape[:own]
    if not (query.ndim == key.ndim == value.ndim == 4 and alike):
        query, key, value, lead = _four_axes(query, key, value, enable_gqa)
    if attn_mask is not None and (attn_mask.ndim > 4 or len(lead) != 2):
        shape = (*lead, query.shape[-2], key.shape[-2])
        attn_mask = attn_mask.expand(shape).reshape(*query.shape[:2], *shape[-2:])
    args = arguments(attn_mask, is_causal, scale)
    if dropout_p:
        args["dropout_p"] = dropout_p
    out = attend(query, key, value, **args)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


# What torch compiles asks again at each call whether all is as it was that its tracer came by. Of
# this operator, which is made of the one for attention, the tracer sees nothing but the call.
LIBRARY.define(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) "
    "-> Tensor"
)


@functools.partial(
    LIBRARY.impl, "scaled_dot_product_attention", dispatch_key="CompositeImplicitAutograd"
)
def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor, **args: Any) -> Tensor:
        return traced(q, k, v, with_seed(args))[0]

    return _on_four_axes(
        attend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def arguments(attn_mask: Tensor | None, is_causal: bool, scale: float | None) -> dict[str, Any]:
    """Return options of torch's attention as nattn calls them."""
    args: dict[str, Any] = {}
    if attn_mask is not None:
        args["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    if scale is not None:
        args["scale"] = scale
    if is_causal:
        args.update(causal=True, q_offset=0)
    return args


def _four_axes(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Sequence[int]]:
    """Broadcast leading axes, and return ``(B, H, N, D)`` tensors and what the axes were."""
    tensors = (query, key, value)
    own = 1 if enable_gqa else 0  # leading axes that do not broadcast
    if enable_gqa and min(x.ndim for x in tensors) < 3:
        raise ValueError(
            "query, key, value: expected at least 3 axes with enable_gqa, got shapes "
            f"{_shapes(tensors)}"
        )
    try:
        shared = torch.broadcast_shapes(*(x.shape[: x.ndim - 2 - own] for x in tensors))
    except RuntimeError:
        raise ValueError(
            "query, key, value: expected leading axes that broadcast, got shapes "
            f"{_shapes(tensors)}{'' if enable_gqa else '; did you mean enable_gqa=True?'}"
        ) from None

    def folded(x: Tensor) -> Tensor:
        x = x.expand(*shared, *x.shape[x.ndim - 2 - own :])
        if x.ndim == 4:
            return x
        if x.ndim < 4:
            return x[(None,) * (4 - x.ndim)]
        return x.flatten(0, x.ndim - 4)

    lead = (*shared, query.shape[-3]) if enable_gqa else tuple(shared)
    return folded(query), folded(key), folded(value), lead


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


class sdpa(TorchFunctionMode):
    """A context in which all calls of torch's attention function run on nattn, in this thread.

    What nattn does not take (other devices, dtypes that are no floats) goes to torch as before.

    Examples
    --------
    >>> import torch
    >>> import nattn.integrations.torch
    >>> layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 100, 64)
    >>> with nattn.integrations.torch.sdpa():
    ...     y, _ = layer(x, x, x, need_weights=False)
    >>> theirs, _ = layer(x, x, x, need_weights=False)
    >>> bool(torch.allclose(y, theirs, atol=1e-5))
    True
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call what was called, or nattn in place of torch's attention."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.multi_head_attention_forward:
            # Called from here it would not ask this mode again, as its layers are to do.
            return _on_nattn(func)(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _where_possible(*args, **kwargs)
        return func(*args, **kwargs)


def _where_possible(query: Any, *args: Any, **kwargs: Any) -> Any:
    """Call nattn, or torch for what nattn does not take."""
    taken = (
        isinstance(query, Tensor)
        and query.device.type in ("cpu", "cuda")
        and query.dtype in FLOATS
        and query.shape[-1] > 0
    )
    function = (
        scaled_dot_product_attention if taken else torch.nn.functional.scaled_dot_product_attention
    )
    return function(query, *args, **kwargs)


@functools.cache
def _on_nattn(function: Any) -> Callable[..., Any]:
    """Return a function of torch that finds ours under the name of torch's attention."""
    names = {
        **function.__globals__,
        "scaled_dot_product_attention": _where_possible,
        "has_torch_function": lambda tensors: False,
    }
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
