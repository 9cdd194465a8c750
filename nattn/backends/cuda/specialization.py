"""What kernels are compiled for: the code that a call runs on each of its scores.

Calls whose code is equal share their kernels; the values that it reads are `operands`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...call.problem import Problem
from ...functions.on_lanes import UserCode
from ...vectors import dtypes
from ...vectors.lanes import INDEX_BOUND


@dataclass(frozen=True)
class Functions:
    """What a call does with its scores: equal if the code is.

    Attributes
    ----------
    dtype : str
        Compute type, "float32" or "float64".
    index : str
        "int32", or "int64" where positions may be large.
    score_mods : tuple of UserCode
        What happens to a score before the bias is added.
    mask_mod : UserCode or None
        Which keys a position sees.
    mask : bool
        Whether there is a mask array.
    bias : str or None
        How the bias is stored.
    dropout, blocks : bool
        Whether there is dropout, and a block mask.
    derive : bool
        Whether derivatives are wanted.
    """

    dtype: str
    index: str
    score_mods: tuple[UserCode, ...]
    mask_mod: UserCode | None
    mask: bool
    bias: str | None
    dropout: bool
    blocks: bool
    derive: bool

    @property
    def codes(self) -> tuple[UserCode, ...]:
        """All users' functions, in the order of their words."""
        return (*self.score_mods, *(() if self.mask_mod is None else (self.mask_mod,)))

    @property
    def names(self) -> tuple[str, ...]:
        """What to call each of the users' functions."""
        return ("score_mod",) * len(self.score_mods) + ("mask_mod",) * (self.mask_mod is not None)


def functions_of(problem: Problem, derive: bool = False) -> Functions:
    """Return what a problem does with its scores.

    Parameters
    ----------
    problem : Problem
        The call.
    derive : bool, default False
        Whether derivatives are wanted.
    """
    p = problem
    far = int(np.abs(p.q_offset).max(initial=0)) + max(p.Nq, p.Nk)
    return Functions(
        dtype=dtypes.compute_name(p.dtype),
        index="int32" if far < INDEX_BOUND else "int64",
        score_mods=tuple(map(UserCode.of, p.score_mods)),
        mask_mod=None if p.mask_mod is None else UserCode.of(p.mask_mod),
        mask=p.mask is not None,
        bias=None if p.bias is None else dtypes.storage_name(p.bias.dtype),
        dropout=p.dropout_p > 0.0,
        blocks=p.block_mask is not None,
        derive=derive,
    )


class Evaluators(NamedTuple):
    """Users' functions as device functions.

    Attributes
    ----------
    modify : list of function
        ``f(a, b, h, pos, key, s)`` for each modifier: the new score.
    derive : list of function
        ``f(a, b, h, pos, key, s, slope)``: the new score, and `slope` times its derivative.
    visible : function or None
        ``f(a, b, h, pos, key)``: whether the mask function shows the key.
    """

    modify: list[Any]
    derive: list[Any]
    visible: Any
