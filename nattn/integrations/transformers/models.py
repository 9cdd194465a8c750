"""Which models run on nattn: the name that they ask for, and layers that never ask."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, NamedTuple

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .attention import attention_forward
from .masks import lazy_mask

_UNFIT = ("flash", "sdpa", "flex_attention", "paged|", "/")
"""What transformers looks for in names, and then does what only those implementations want."""
_SELECTION = re.compile(r"\b((?:block_)?indices|sinks)=")
"""What layers pass that `attention_forward` refuses."""


class Layer(NamedTuple):
    """An attention layer: its name in the model, its class, what runs, and why not nattn."""

    name: str
    kind: str
    runs: str
    reason: str


class Report(tuple[Layer, ...]):
    """The attention layers of a model; printed as a table."""

    def __str__(self) -> str:
        if not self:
            return "no attention layers found"
        widths = [max(len(row[n]) for row in self) for n in range(3)]
        lines = (
            "  ".join([*(x.ljust(w) for x, w in zip(row, widths, strict=False)), row.reason])
            for row in self
        )
        return "\n".join(line.rstrip() for line in lines)


def register(name: str = "nattn") -> None:
    """Make ``attn_implementation="nattn"`` legal, when a model is loaded and afterwards.

    Parameters
    ----------
    name : str, default "nattn"
        Another name for it.

    Raises
    ------
    ValueError
        If the name holds one that transformers treats in a way of its own, as "flash".

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import nattn.integrations.transformers
    >>> nattn.integrations.transformers.register()
    >>> sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, vocab_size=100)
    >>> config = LlamaConfig(num_hidden_layers=1, attn_implementation="nattn", **sizes)
    >>> print(nattn.integrations.transformers.report(LlamaForCausalLM(config)))
    model.layers.0.self_attn  LlamaAttention  nattn
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r} ({type(name).__name__})")
    if any(part in name for part in _UNFIT) or name in ("", "eager"):
        raise ValueError(
            "name: expected one that transformers does not treat in a way of its own, by "
            f"{', '.join(map(repr, _UNFIT))} in it, got {name!r}"
        )
    # Without the second, transformers would make no masks, and layers see padding and the future.
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, lazy_mask)


def enable(model: Any, name: str = "nattn") -> None:
    """Let a loaded model run on nattn.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Is changed: what it and the models in it ask for.
    name : str, default "nattn"
        The name to `register`.

    Raises
    ------
    ValueError
        If layers never ask which implementation to use, as those of falcon, bloom and mpt, or
        pass what nattn refuses. Nothing is changed then.
    TypeError
        If it is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel, got {type(model).__name__}")
    deaf = [
        f"{place or 'the model itself'} ({type(module).__name__})"
        for place, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation()
    ]
    unfit = [f"{row.name} ({row.kind}): {row.reason}" for row in _rows(model, None) if row.reason]
    if deaf or unfit:
        raise ValueError(
            "model: expected attention layers that ask transformers which implementation to use, "
            f"got {'; '.join(deaf + unfit)}"
        )
    register(name)
    model.set_attn_implementation(name)


def report(model: Any) -> Report:
    """Tell for each attention layer of a model what it runs on, and why not on nattn.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or a part of one.

    Returns
    -------
    Report
        A tuple of `Layer`, ``(name, kind, runs, reason)``. `runs` is what the layer's
        configuration says, or "its own"; `reason` is empty where that is nattn.
    """
    return Report(_rows(model, lazy_mask))


def _rows(model: Any, mask_function: Any) -> list[Layer]:
    """List layers; without `mask_function` only what no other configuration would change."""
    found = []
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        cls: Any = type(module)
        kind = cls.__name__
        asks, refused = _reads(cls)
        if not asks:
            reason = "its code never asks transformers which implementation to use"
            found.append(Layer(name, kind, "its own", reason))
            continue
        runs = getattr(getattr(module, "config", None), "_attn_implementation", None) or "unknown"
        reason = f"passes {refused}, which nattn refuses" if refused else ""
        if mask_function and AttentionInterface._global_mapping.get(runs) is not attention_forward:
            reason = reason or "another implementation is set: enable(model) changes that"
        found.append(Layer(name, kind, runs, reason))
    return found


def _is_attention(module: Any) -> bool:
    """Whether a module computes attention itself, rather than one within it."""

    def named(x: Any) -> bool:
        return "Attention" in type(x).__name__ and bool(list(x.children()))

    return named(module) and not any(named(x) for x in module.modules() if x is not module)


@functools.cache
def _reads(kind: type) -> tuple[bool, str]:
    """Return whether a layer's code asks for an implementation, and what it passes in vain."""
    for base in kind.__mro__:
        if "forward" not in vars(base):
            continue
        try:
            code = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        passed = _SELECTION.search(code)
        return ".get_interface(" in code, passed.group(1) if passed else ""
    return False, ""
