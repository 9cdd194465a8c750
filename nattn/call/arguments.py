"""The arguments of a call beside q, k and v: the one list of them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast

from .block_mask import BlockMask
from .checks import Array, Integers, Mod, Scale, Window


class PackedArguments(TypedDict, total=False):
    """What the result of `nattn.attention_varlen` depends on, and of `nattn.attention`, too."""

    causal: bool
    q_offset: Integers | None
    window_size: Window | None
    mask: Array | None
    bias: Array | None
    scale: Scale | None
    softcap: Scale | None
    alibi_slopes: Array | None
    sinks: Array | None
    score_mod: Mod | None
    mask_mod: Mod | None
    dropout_p: float
    seed: int | None


class Arguments(PackedArguments, total=False):
    """What the result of `nattn.attention` depends on; its docstring says what each means.

    Functions take them as ``**args: Unpack[Arguments]`` and pass them on.
    """

    block_mask: BlockMask | None
    q_lens: Integers | None
    kv_lens: Integers | None
    layout: str


_TYPES: dict[str, Any] = Arguments.__annotations__
_INSTEAD = {
    "block_mask": "pass its mask_mod",
    "q_lens": "cu_seqlens_q has them",
    "kv_lens": "cu_seqlens_k has them",
    "layout": "packed arrays are (T, H, D)",
}
"""What packed calls take instead of what they do not take."""
_NOT_NONE: Arguments = {"causal": False, "dropout_p": 0.0, "layout": "bhnd"}

DEFAULTS = cast(Arguments, dict.fromkeys(_TYPES) | _NOT_NONE)
"""What each is where it is not given. Not to be changed."""


def with_defaults(args: Arguments, packed: bool = False) -> Arguments:
    """Return all arguments: those that are given, and the defaults of the others.

    Raises
    ------
    TypeError
        If one is no argument of `nattn.attention`, or with `packed` of `nattn.attention_varlen`.
    """
    if not args:
        return DEFAULTS
    function = "nattn.attention_varlen" if packed else "nattn.attention"
    if packed and (names := _INSTEAD.keys() & args.keys()):
        name = min(names)
        raise TypeError(
            f"{name}: expected an argument of {function}, got {name!r}; {_INSTEAD[name]}"
        )
    every: Arguments = {**DEFAULTS, **args}
    if len(every) > len(DEFAULTS):
        name = next(name for name in args if name not in DEFAULTS)
        near = difflib.get_close_matches(name, DEFAULTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{name}: expected an argument of {function}, got {name!r}{hint}")
    return every


Function = TypeVar("Function", bound=Callable[..., Any])


def shows_packed_arguments(function: Function) -> Function:
    """Do what `shows_arguments` does for a function that takes `PackedArguments`."""
    return shows_arguments(function, tuple(PackedArguments.__annotations__))


def shows_arguments(function: Function, names: tuple[str, ...] = tuple(DEFAULTS)) -> Function:
    """Let the signature of a function show each argument in place of ``**args``.

    `help`, completion and `inspect.signature` read it; the function itself stays as it is. The
    arguments come before the function's own that are passed by keyword.
    """
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    kind = inspect.Parameter.KEYWORD_ONLY
    shared = [
        # as the source has it, like all annotations here: an array_like written out fills a page
        inspect.Parameter(name, kind, default=default, annotation=_TYPES[name].__forward_arg__)
        for name, default in DEFAULTS.items()
        if name in names
    ]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            *(p for p in own if p.kind < kind),
            *shared,
            *(p for p in own if p.kind == kind),
        ]
    )
    return function
