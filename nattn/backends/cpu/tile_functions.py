"""The tile functions of a call, compiled and bound: what its scores and probabilities meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...call.problem import Problem
from ...vectors.lanes import Tile
from . import score


@dataclass(frozen=True)
class TileFunctions:
    """The tile functions of a call.

    Attributes
    ----------
    fields : dict
        The fields of a pass's record: `score_functions`, `mask_functions`, `prob_functions`, and
        `mask_ptr`, the address of the params of the argument mask, or 0.
    names : tuple of str
        What to call those that may index an array out of range.
    keepalive : tuple
        What must live while they run.
    """

    fields: dict[str, Any]
    names: tuple[str, ...]
    keepalive: tuple[Any, ...]


NONE = TileFunctions(
    {
        "score_functions": (0, 0),
        "mask_functions": (0, 0),
        "prob_functions": (0, 0),
        "mask_ptr": 0,
    },
    (),
    (),
)


def count(p: Problem) -> int:
    """Return how many functions scores and probabilities go through; dropout takes time for two."""
    operands = (p.bias is not None) + (p.mask is not None)
    return operands + len(p.score_mods) + (p.mask_mod is not None) + 2 * (p.dropout_p > 0)


def bind(
    p: Problem,
    tile: Tile,
    *,
    packed: bool,
    derive: bool = False,
    observers: tuple[score.TileFunction, ...] = (),
) -> TileFunctions:
    """Compile and bind what happens to the scores and probabilities of a call.

    Parameters
    ----------
    p : Problem
        The call.
    tile : Tile
        What they run on.
    packed : bool
        Whether the lanes of a tile belong to several heads.
    derive : bool, default False
        Whether the modifiers give their derivative too.
    observers : tuple of TileFunction
        What looks at the probabilities.
    """
    far = int(np.abs(p.q_offset).max(initial=0)) + max(p.Nq, p.Nk)
    scores = [
        score.user_function("score_mod", mod, tile, far, packed, derive) for mod in p.score_mods
    ]
    if p.bias is not None:
        scores.append(score.operand_function(tile, p.bias))
    mask = None if p.mask is None else score.operand_function(tile, p.mask)
    if mask is not None:
        scores.append(mask)
    masks = []
    if p.mask_mod is not None:
        masks.append(score.user_function("mask_mod", p.mask_mod, tile, far, packed))
    probs = list(observers)
    if p.dropout_p > 0.0:
        probs.append(score.drop_function(tile, p.dropout_p, p.seed, packed))
    fields: dict[str, Any] = {"mask_ptr": 0 if mask is None else mask.params.ctypes.data}
    keepalive: list[Any] = []
    for name, functions in (("score", scores), ("mask", masks), ("prob", probs)):
        table = np.array([(f.address, f.params.ctypes.data) for f in functions], np.int64)
        fields[f"{name}_functions"] = (table.ctypes.data, len(functions))
        keepalive += [table, functions]
    others = ["bias"] * (p.bias is not None) + ["mask"] * (p.mask is not None)
    names = ["score_mod"] * len(p.score_mods) + others + ["mask_mod"] * len(masks)
    return TileFunctions(fields, tuple(names), tuple(keepalive))
