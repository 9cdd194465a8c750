"""Weights of attention under the names and in the shapes of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import check_count, check_name, host_array
from ..vectors import dtypes

Array = NDArray[Any]


def check_names(expected: str, wanted: Iterable[str], got: Iterable[str]) -> None:
    """Raise with a list of the names that are missing and of those that are unexpected.

    Parameters
    ----------
    expected : str
        What the error begins with: where, and what was expected.
    wanted, got : iterables of str
        Names.
    """
    missing, unexpected = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{expected}, got other names; missing: {', '.join(missing) or 'none'}; "
            f"unexpected: {', '.join(unexpected) or 'none'}"
        )


class _Style(NamedTuple):
    """How a library names what attention consists of.

    Attributes
    ----------
    weights, biases : tuple of dict
        Ways to name all of them: from the letters of projections, fused ones together, to a name.
    others : set of str
        Names that stand for nothing of attention.
    """

    weights: tuple[dict[str, str], ...]
    biases: tuple[dict[str, str], ...]
    others: frozenset[str] = frozenset()


def _each(pattern: str, **letters: str) -> dict[str, str]:
    return {letter: pattern.format(name) for letter, name in letters.items()}


_TORCH = {"q": "q_proj_weight", "k": "k_proj_weight", "v": "v_proj_weight"}
_BERT = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
_LLAMA = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
_PHI = {"qkv": "qkv_proj"}
_GPT2 = {"qkv": "c_attn", "o": "c_proj"}
_STYLES = {
    "torch": _Style(
        weights=(
            {"qkv": "in_proj_weight", "o": "out_proj.weight"},
            {**_TORCH, "o": "out_proj.weight"},
        ),
        biases=({}, {"qkv": "in_proj_bias", "o": "out_proj.bias"}),
    ),
    "bert": _Style(
        weights=(_each("attention.{}.weight", **_BERT),),
        biases=(_each("attention.{}.bias", **_BERT),),
        others=frozenset(
            f"{module}.{kind}"
            for module in (
                "attention.output.LayerNorm",
                "intermediate.dense",
                "output.dense",
                "output.LayerNorm",
            )
            for kind in ("weight", "bias")
        ),
    ),
    "llama": _Style(
        weights=(_each("{}.weight", **_LLAMA, o="o_proj"), _each("{}.weight", **_PHI, o="o_proj")),
        biases=(
            {},
            _each("{}.bias", **_LLAMA),
            _each("{}.bias", **_LLAMA, o="o_proj"),
            _each("{}.bias", **_PHI),
            _each("{}.bias", **_PHI, o="o_proj"),
        ),
        others=frozenset({"rotary_emb.inv_freq"}),
    ),
    "gpt2": _Style(
        weights=(_each("{}.weight", **_GPT2),),
        biases=(_each("{}.bias", **_GPT2),),
        others=frozenset({"bias", "masked_bias"}),
    ),
}


def _closest(ways: tuple[dict[str, str], ...], found: Iterable[str]) -> dict[str, str]:
    """Return the way to name things of which most is there; of two the first, which is shorter."""
    return max(ways, key=lambda way: len(set(way.values()) & set(found)))


def _weights(name: str, value: Any) -> Array:
    array = dtypes.widen(host_array(name, value))
    axes = 2 if name.endswith("weight") else 1
    if not dtypes.is_float(array.dtype) or array.ndim != axes:
        got = f"shape {array.shape} and dtype {array.dtype}"
        raise ValueError(f"state: expected {axes} axes of a float dtype for {name}, got {got}")
    return array


def translated(
    state: Mapping[str, Any], style: str, num_heads: int, prefix: str, num_kv_heads: int | None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return what a `MultiHeadAttention` is configured with, and its parameters.

    Parameters
    ----------
    state, style, num_heads, prefix, num_kv_heads
        As in `MultiHeadAttention.from_state`.

    Returns
    -------
    config : dict
        The sizes and `bias`.
    params : dict
        Views of the weights, bfloat16 as float32, under the names of our parameters.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `MultiHeadAttention.from_state` does, with the library's names and shapes.
    """
    check_name("style", style, tuple(_STYLES))
    known = _STYLES[style]
    num_heads = check_count("num_heads", num_heads)
    found = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
    if style == "torch" and {"bias_k", "bias_v"} & found.keys():
        raise NotImplementedError("state: expected no bias_k and bias_v (add_bias_kv), got them")
    weights, biases = _closest(known.weights, found), _closest(known.biases, found)
    names = {*weights.values(), *biases.values()}
    where = f"state, after {prefix!r}" if prefix else "state"
    expected = f"{where}: expected the weights of attention in the style {style!r}"
    check_names(expected, names, found.keys() - known.others)

    arrays = {name: _weights(prefix + name, found[name]) for name in names}
    if style != "gpt2":  # whose matrices are (d_in, d_out), as here
        arrays = {name: x.T for name, x in arrays.items()}
    wide, d_model = arrays[weights["o"]].shape
    head_dim = wide // num_heads
    if not head_dim or head_dim * num_heads != wide:
        raise ValueError(f"num_heads: expected a divisor of {wide}, got {num_heads}")
    if "qkv" in weights:
        narrow = max((arrays[weights["qkv"]].shape[1] - wide) // 2, 1)
        d_context = d_model
    else:
        d_context, narrow = arrays[weights["k"]].shape
    _check_shapes(prefix, style, weights, biases, arrays, (d_model, d_context, wide, narrow))
    if narrow % head_dim or num_kv_heads not in (None, narrow // head_dim):
        raise ValueError(
            f"num_kv_heads: expected {narrow / head_dim:g} for keys of {narrow} columns and "
            f"heads of {head_dim}, got {num_kv_heads}"
        )

    params: dict[str, Array] = {}
    for kind, of in (("w", weights), ("b", biases)):
        for letters, name in of.items():
            x, parts = arrays[name], [arrays[name]]
            if letters == "qkv":
                parts = np.split(x, [wide, wide + narrow], axis=-1)
            params |= {f"{kind}_{one}": y for one, y in zip(letters, parts, strict=True)}
    config = {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": narrow // head_dim,
        "head_dim": head_dim,
        "d_context": d_context,
        "bias": {"": False, "qkv": "qkv", "qkvo": True}["".join(biases)],
    }
    return config, params


def _check_shapes(
    prefix: str,
    style: str,
    weights: Mapping[str, str],
    biases: Mapping[str, str],
    arrays: Mapping[str, Array],
    sizes: tuple[int, int, int, int],
) -> None:
    """Raise unless arrays, matrices as ``(d_in, d_out)``, fit together; in the library's words."""
    d_model, d_context, wide, narrow = sizes
    widths = {"q": wide, "k": narrow, "v": narrow, "o": d_model, "qkv": wide + 2 * narrow}
    inputs = {"q": d_model, "k": d_context, "v": d_context, "o": wide, "qkv": d_model}

    def stored(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if style == "gpt2" else shape[::-1]

    def fail(expected: str, got: str) -> None:
        raise ValueError(f"state: expected {expected}, got {got}")

    if "k" in weights:
        k, v = weights["k"], weights["v"]
        if arrays[k].shape != arrays[v].shape:
            one = "one shape (kdim = vdim)" if style == "torch" else "one shape"
            fail(
                f"{prefix}{k} and {prefix}{v} of {one}",
                f"{stored(arrays[k].shape)} and {stored(arrays[v].shape)}",
            )
    for of in (weights, biases):
        for letters, name in of.items():
            shape = (inputs[letters], widths[letters]) if of is weights else (widths[letters],)
            if arrays[name].shape != shape:
                fail(f"{prefix}{name} of shape {stored(shape)}", f"{stored(arrays[name].shape)}")
