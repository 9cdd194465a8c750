"""Modifiers and masks for tests: the built-in ones and some as users write them.

`MODS` and `MASKS` hold for each name how to bind it for a call of some sizes. A test that runs one
on another backend compares it with its own call on arrays, and takes what rounding may do from
`Mod.budget`. `random_mod` and `random_mask` combine several.

None of these modifiers jumps: where one chooses by the score, both choices meet. So an error of the
score changes the result by at most `lipschitz` times as much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from nattn.functions import masks, mods

FUNCTION = 8
"""Roundings that an elementary function may stand for: 4 ulp, each up to two units of eps / 2."""


@dataclass(frozen=True)
class Sizes:
    """The call for which a function is bound.

    Positions of queries are above ``-positions`` and below `positions`, as with the default
    offset; with another `q_offset` say how many there are. Keys are from 0 to ``positions - 1``.
    """

    B: int
    H: int
    Nq: int
    Nk: int
    positions: int = 0

    @property
    def N(self) -> int:
        """Length of an array that positions index, from both of its ends."""
        return max(self.positions, self.Nq, self.Nk, 1)

    @property
    def far(self) -> int:
        """No query and key are farther apart."""
        return 2 * self.N


@dataclass(frozen=True)
class Mod:
    """A modifier, and what rounding does to it.

    Attributes
    ----------
    build : callable
        Takes `Sizes` and a generator; returns a score_mod.
    lipschitz : float
        Bound of ``|d mod / d score|``.
    magnitude : callable
        Takes ``S`` and ``far``, bounds of the scores and of the distances. Returns a bound of what
        each intermediate value ``v`` counts for in the result: ``|d mod / d v| * |v|``. The
        result is one of them, so this bounds it too, where it is not -inf.
    roundings : int
        How often one element is rounded on its way, an elementary function counted as `FUNCTION`
        and a literal that is no binary fraction as 1. So, to first order, evaluation in a float
        type with the unit roundoff ``u`` errs by at most ``roundings * u * magnitude``.
    kinks : tuple of float
        Scores at which the derivative jumps.
    hides : bool
        Whether it returns -inf in places.
    """

    build: Callable[[Sizes, Generator], Callable[..., Any]]
    lipschitz: float
    magnitude: Callable[[float, float], float]
    roundings: int
    kinks: tuple[float, ...] = ()
    hides: bool = False

    def budget(self, dtype: Any, S: float, sizes: Sizes, score_error: float = 0.0) -> float:
        """Return how far a backend's result may lie from the one in float64.

        Parameters
        ----------
        dtype : dtype
            In which the backend computes. NumPy's float64 rounds just as much: twice as far.
        S : float
            Bound of the scores.
        sizes : Sizes
            Of the call.
        score_error : float, optional
            How far the backend's own score may be off.
        """
        info = np.finfo(dtype)
        u = float(info.eps) / 2 * (2 if info.bits == 64 else 1)
        rounding = self.roundings * (u * self.magnitude(S, sizes.far) + float(info.tiny))
        return self.lipschitz * score_error + rounding


def generator(name: str) -> Generator:
    """Return random numbers of its own for each name."""
    return np.random.default_rng(list(name.encode()))


# ---------------------------------------------------------------------------------------------
# Modifiers as users write them
# ---------------------------------------------------------------------------------------------


def tanh_gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, weight: Any) -> Any:
    return np.where(kv_idx % 2 == 0, score, score * np.tanh(weight[h] * score))


def log_decay(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * np.log1p(np.abs(q_idx - kv_idx))


def document_gate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, doc: Any) -> Any:
    return np.where(doc[q_idx] == doc[kv_idx], score, 0.5 * score - 1.0)


def index_wave(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.25 * np.sin(0.3 * (q_idx - kv_idx))


def score_wave(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + np.sin(score) * np.cos(0.5 * score)


def nested_where(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    before = np.where(h % 2 == 0, 2.0 * score, 0.5 * score)
    return np.where(kv_idx < q_idx, before, np.where(b == 0, score - 1, score + 1.0))


def block_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, grid: Any) -> Any:
    return score + grid[q_idx // 4 % 5, kv_idx // 4 % 7]


def group_ranks(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, group: Any, rank: Any, step: Any
) -> Any:
    return score + step * rank[group[q_idx], group[kv_idx]]


def per_item(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, shift: Any, level: Any) -> Any:
    return score + shift[b, kv_idx] - level[q_idx, h]


def power_compress(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.sign(score) * (np.power(1.0 + np.abs(score), 0.75) - 1.0)


def root_of_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - (1 + abs(q_idx - kv_idx)) ** 0.5


def square_of_distance(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, rate: Any = 0.0078125
) -> Any:
    return score - rate * (q_idx - kv_idx) ** 2


def rational(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score**2 / (1.0 + score**2)


def clipped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, limit: Any) -> Any:
    return np.clip(score, -limit, limit) + np.clip(kv_idx - q_idx, -2, 3)


def minmax(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.maximum(score, 0.25 * score) - np.minimum(np.maximum(kv_idx, 2), q_idx) / 8


def distance_only(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return -0.125 * abs(q_idx - kv_idx)


def head_only(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 0.5 * max(h % 3, 1) - min(b, 2) * 0.25


def scaled_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (1 + h % 3) / 4


def holes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.where((q_idx + kv_idx) % 3 == 0, -np.inf, score)


def banded(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.where((q_idx >= kv_idx) & (q_idx < kv_idx + 9), score + 0.5 * np.tanh(score), -np.inf)


def remainders(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.5 * (kv_idx // 3 % 2) - 0.25 * ((q_idx - kv_idx) % 5)


def floors(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - np.floor(0.25 * (q_idx - kv_idx)) + (q_idx - kv_idx) * 0.25 // 2.0


def singles(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * np.float32(0.5) + np.float32(kv_idx - q_idx) * 0.125


def where_finite(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.where(np.isfinite(score), 0.5 * score, 0.0)


def softsign(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score / np.sqrt(1.0 + 0.0625 * score * score)


def saturate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return -np.sign(score) * np.expm1(-np.abs(score))


def half_life(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * np.exp2(-0.125 * abs(q_idx - kv_idx))


def softplus(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.log(1.0 + np.exp(np.minimum(score, 20.0)))


def logic(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    seen = np.logical_and(q_idx >= kv_idx, np.logical_not(kv_idx % 4 == 0))
    return np.where(np.logical_or(seen, h == 1), score, 0.5 * score)


def flagged(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, flags: Any, strict: Any) -> Any:
    return np.where(flags[kv_idx] & strict | (kv_idx == q_idx), score, score - 4.0)


def same_octet(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.where(q_idx >> 3 == kv_idx >> 3, score, score - 1 / (1 << 2))


def _bump(x: Any) -> Any:
    return np.exp(-x * x)


def with_helper(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + _bump(0.5 * score) * _bump(0.125 * (q_idx - kv_idx))


def with_closure(rate: float) -> Callable[..., Any]:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - rate * abs(q_idx - kv_idx)

    return mod


def in_other_order(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, second: Any, first: Any = 2
) -> Any:
    return first * score - second * h


# ---------------------------------------------------------------------------------------------
# What they are bound to
# ---------------------------------------------------------------------------------------------

bind = functools.partial


def plain(function: Callable[..., Any], **bound: Any) -> Callable[..., Callable[..., Any]]:
    """Bind what does not depend on the sizes."""
    return lambda sizes, rng: bind(function, **bound) if bound else function


def fractions(rng: Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """Return numbers from -2 to 2 that every float type holds exactly."""
    return (rng.integers(-128, 129, shape) / 64).astype(dtype)


def positive(rng: Generator, n: int) -> NDArray[np.float32]:
    """Return numbers above 0 and up to 1 that every float type holds exactly."""
    return (rng.integers(1, 65, n) / 64).astype(np.float32)


def documents(sizes: Sizes, rng: Generator, dtype: Any = np.int64) -> NDArray[Any]:
    """Return documents of some length, in order, for every position."""
    return np.cumsum(rng.random(sizes.N) < 0.1).astype(dtype)


MODS: dict[str, Mod] = {
    # the built-in ones
    "softcap": Mod(plain(mods.softcap, cap=5.0), 1, lambda S, far: min(S, 5), 3 + FUNCTION),
    "softcap, an integer": Mod(
        plain(mods.softcap, cap=30), 1, lambda S, far: min(S, 30), 3 + FUNCTION
    ),
    "alibi": Mod(
        lambda s, rng: bind(mods.alibi, slopes=np.broadcast_to(mods.alibi_slopes(s.H), (s.B, s.H))),
        1,
        lambda S, far: S + far,
        2,
    ),
    "alibi, for each item": Mod(
        lambda s, rng: bind(mods.alibi, slopes=fractions(rng, (s.B, s.H), np.float64)),
        1,
        lambda S, far: S + 2 * far,
        2,
    ),
    "relative_position_bias": Mod(
        lambda s, rng: bind(
            mods.relative_position_bias, table=fractions(rng, (s.H, 9), np.float16), reach=4
        ),
        1,
        lambda S, far: S + 2,
        1,
    ),
    "t5_bias": Mod(
        lambda s, rng: mods.t5_bias(fractions(rng, (32, s.H))), 1, lambda S, far: S + 2, 1
    ),
    "t5_bias of a decoder": Mod(
        lambda s, rng: mods.t5_bias(fractions(rng, (16, s.H)), False, 64),
        1,
        lambda S, far: S + 2,
        1,
    ),
    "soft_window": Mod(
        plain(mods.soft_window, width=12, softness=3.0),
        1,
        lambda S, far: S + (12 + far) / 3 + 1,
        4 + 2 * FUNCTION,
    ),
    "adaptive_span": Mod(  # weights of at least 1/8
        lambda s, rng: bind(
            mods.adaptive_span, span=rng.integers(3, 20, s.H).astype(np.float32), ramp=8.0
        ),
        1,
        lambda S, far: S + math.log(8) + 1,
        4 + FUNCTION,
        hides=True,
    ),
    "gaussian_window": Mod(
        plain(mods.gaussian_window, sigma=8.0), 1, lambda S, far: S + (far / 8) ** 2, 4
    ),
    "distance_decay": Mod(
        plain(mods.distance_decay, rate=0.75, length=4.0),
        1,
        lambda S, far: S + 0.75 * (math.log1p(far / 4) + 1),
        3 + FUNCTION,
    ),
    "relative_position_bias_2d": Mod(  # rows of 7 tokens, some of them before the first
        lambda s, rng: bind(
            mods.relative_position_bias_2d,
            table=fractions(rng, (s.H, 2 * (s.N // 7 + 2) - 1, 13)),
        ),
        1,
        lambda S, far: S + 2,
        1,
    ),
    "kerple_log": Mod(
        lambda s, rng: bind(mods.kerple_log, r1=positive(rng, s.H), r2=positive(rng, s.H)),
        1,
        lambda S, far: S + math.log1p(far) + 1,
        3 + FUNCTION,
    ),
    "kerple_power": Mod(
        lambda s, rng: bind(mods.kerple_power, r1=positive(rng, s.H), r2=positive(rng, s.H)),
        1,
        lambda S, far: S + far,
        2 + FUNCTION,
    ),
    "fire": Mod(  # three units of weights up to 2, each of a share of at most log(1 + far)
        lambda s, rng: bind(
            mods.fire,
            c=0.25,
            threshold=16.0,
            w1=fractions(rng, (3,)),
            b1=fractions(rng, (3,)),
            w2=fractions(rng, (s.H, 3)),
            b2=fractions(rng, (s.H,)),
        ),
        1,
        lambda S, far: S + 12 * math.log1p(far) + 14,
        10 + 2 * FUNCTION,
    ),
    "untied_positions": Mod(
        lambda s, rng: bind(
            mods.untied_positions,
            p_q=fractions(rng, (s.H, s.N, 3)),
            p_k=fractions(rng, (s.H, 3, s.N)).swapaxes(1, 2),
            scale=0.25,
        ),
        1,
        lambda S, far: S + 3,
        5,
    ),
    "logit_scale": Mod(
        lambda s, rng: bind(mods.logit_scale, scale=2 * positive(rng, s.H)),
        2,
        lambda S, far: 2 * S,
        1,
    ),
    "token_weights": Mod(
        lambda s, rng: bind(mods.token_weights, log_weights=fractions(rng, (s.B, s.N))),
        1,
        lambda S, far: S + 2,
        1,
    ),
    "forget_gates": Mod(
        lambda s, rng: bind(
            mods.forget_gates,
            cumulative=-np.cumsum(np.abs(fractions(rng, (s.B, s.H, s.N))), axis=2) / 2,
        ),
        1,
        lambda S, far: S + far,
        2,
    ),
    "compose": Mod(  # the sum of what its parts return bounds the parts of each
        lambda s, rng: mods.compose(
            with_closure(0.125), bind(mods.softcap, cap=4.0), bind(mods.gaussian_window, sigma=16.0)
        ),
        1,
        lambda S, far: S + 0.125 * far + 4 + (far / 16) ** 2,
        2 + 3 + FUNCTION + 4,
    ),
    # as users write them
    "tanh_gate": Mod(  # y = x tanh x has |y'| <= 1.2
        lambda s, rng: bind(tanh_gate, weight=np.abs(fractions(rng, (s.H,))) + 0.25),
        1.2,
        lambda S, far: S,
        2 + FUNCTION,
    ),
    "log_decay": Mod(
        plain(log_decay), 1, lambda S, far: S + 0.1 * math.log1p(far) + 0.1, 3 + FUNCTION
    ),
    "document_gate": Mod(
        lambda s, rng: bind(document_gate, doc=documents(s, rng)), 1, lambda S, far: S + 1, 2
    ),
    "index_wave": Mod(
        plain(index_wave), 1, lambda S, far: S + 0.25 * 0.3 * far + 0.25, 4 + FUNCTION
    ),
    "score_wave": Mod(plain(score_wave), 2.5, lambda S, far: S + 1, 2 + 2 * FUNCTION),
    "nested_where": Mod(plain(nested_where), 2, lambda S, far: 2 * S + 1, 1),
    "block_table": Mod(
        lambda s, rng: bind(block_table, grid=fractions(rng, (7, 5), np.float64).T),
        1,
        lambda S, far: S + 2,
        1,
    ),
    "group_ranks": Mod(
        lambda s, rng: bind(
            group_ranks,
            group=documents(s, rng, np.uint8) % 4,
            rank=rng.integers(-9, 10, (4, 4), np.int32),
            step=0.25,
        ),
        1,
        lambda S, far: S + 2.25,
        2,
    ),
    "per_item": Mod(
        lambda s, rng: bind(
            per_item,
            shift=fractions(rng, (s.B, s.N)),
            level=fractions(rng, (2 * s.N, s.H), np.float16)[::2],
        ),
        1,
        lambda S, far: S + 4,
        2,
    ),
    "power_compress": Mod(
        plain(power_compress), 0.75, lambda S, far: (1 + S) ** 0.75 + 1, 3 + FUNCTION
    ),
    "root_of_distance": Mod(
        plain(root_of_distance), 1, lambda S, far: S + (1 + far) ** 0.5, 2 + FUNCTION
    ),
    "square_of_distance": Mod(plain(square_of_distance), 1, lambda S, far: S + far**2 / 128, 3),
    "rational": Mod(plain(rational), 0.65, lambda S, far: 1.0, 2 + 2 * FUNCTION),
    "clipped": Mod(plain(clipped, limit=3.0), 1, lambda S, far: min(S, 3) + 3, 1, kinks=(-3, 3)),
    "minmax": Mod(plain(minmax), 1, lambda S, far: S + far / 8, 3, kinks=(0,)),
    "distance_only": Mod(plain(distance_only), 0, lambda S, far: far / 8, 1),
    "head_only": Mod(plain(head_only), 0, lambda S, far: 1.5, 2),
    "scaled_head": Mod(plain(scaled_head), 0.75, lambda S, far: 0.75 * S, 2),
    "holes": Mod(plain(holes), 1, lambda S, far: S, 1, hides=True),
    "banded": Mod(plain(banded), 1.5, lambda S, far: S + 0.5, 2 + FUNCTION, hides=True),
    "remainders": Mod(plain(remainders), 1, lambda S, far: S + 1.5, 2),
    "floors": Mod(plain(floors), 1, lambda S, far: S + far / 2 + 2, 2),
    "singles": Mod(plain(singles), 0.5, lambda S, far: 0.5 * S + far / 8, 2),
    "where_finite": Mod(plain(where_finite), 0.5, lambda S, far: 0.5 * S, 1),
    "softsign": Mod(plain(softsign), 1, lambda S, far: min(S, 4), 5),
    "saturate": Mod(plain(saturate), 1, lambda S, far: 1.0, 1 + FUNCTION),
    "half_life": Mod(plain(half_life), 1, lambda S, far: S, 2 + FUNCTION),
    "softplus": Mod(
        plain(softplus), 1, lambda S, far: min(S, 20) + 1, 1 + 2 * FUNCTION, kinks=(20,)
    ),
    "logic": Mod(plain(logic), 1, lambda S, far: S, 1),
    "flagged": Mod(
        lambda s, rng: bind(flagged, flags=(rng.random(s.N) < 0.5)[::-1], strict=True),
        1,
        lambda S, far: S + 4,
        1,
    ),
    "same_octet": Mod(plain(same_octet), 1, lambda S, far: S + 0.25, 1),
    # x exp(-x**2) is at most 0.43, and its double, for the derivative and the squares, below 1
    "with_helper": Mod(plain(with_helper), 1.5, lambda S, far: S + 1, 4 + 2 * FUNCTION),
    "with_closure": Mod(lambda s, rng: with_closure(0.5), 1, lambda S, far: S + 0.5 * far, 2),
    "in_other_order": Mod(
        lambda s, rng: bind(in_other_order, first=3, second=np.float64(0.5)),
        3,
        lambda S, far: 3 * S + far,
        2,
    ),
}


# ---------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------


def even_heads_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (h % 2 == 1) | (q_idx >= kv_idx)


def one_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (h == 0) | (b == 1)


def allowed_pairs(b: Any, h: Any, q_idx: Any, kv_idx: Any, group: Any, allowed: Any) -> Any:
    return allowed[group[q_idx], group[kv_idx]]


def lengths(b: Any, h: Any, q_idx: Any, kv_idx: Any, length: Any) -> Any:
    return kv_idx < length[b]


def carpet(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx & kv_idx) == 0


def near_by_log(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.floor(0.5 * abs(q_idx - kv_idx)) <= 2.0 + 2 * h


def known(b: Any, h: Any, q_idx: Any, kv_idx: Any, value: Any) -> Any:
    return np.logical_or(np.isfinite(value[kv_idx]), kv_idx == q_idx)


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.logical_not(q_idx == q_idx)


def _with_gaps(rng: Generator, n: int) -> NDArray[np.float32]:
    value = fractions(rng, (n,))
    value[rng.random(n) < 0.3] = np.nan
    return value


MASKS: dict[str, Callable[[Sizes, Generator], Callable[..., Any]]] = {
    "causal": plain(masks.causal),
    "sliding_window": plain(masks.sliding_window, left=5, right=2),
    "sliding_window, far": plain(masks.sliding_window, left=(1 << 63) - 1, right=-3),
    "document": lambda s, rng: bind(masks.document, doc=documents(s, rng)),
    "document, one byte": lambda s, rng: bind(masks.document, doc=documents(s, rng, np.uint8)),
    "document_batch": lambda s, rng: bind(
        masks.document_batch, doc=np.stack([documents(s, rng, np.int32) for _ in range(s.B)])
    ),
    "document_cross": lambda s, rng: bind(
        masks.document_cross,
        q_doc=rng.integers(0, 3, s.N),
        kv_doc=rng.integers(0, 3, 2 * s.N, np.int16)[::2],
    ),
    "prefix_lm": lambda s, rng: bind(masks.prefix_lm, prefix=rng.integers(0, s.N, s.B)),
    "dilated": plain(masks.dilated, window=3, dilation=2),
    "strided": plain(masks.strided, stride=5),
    "chunked": plain(masks.chunked, chunk=7),
    "local_plus_global": plain(masks.local_plus_global, window=2, n_global=3),
    "streaming": plain(masks.streaming, left=6, n_first=2),
    "even_heads_causal": plain(even_heads_causal),
    "one_head": plain(one_head),
    "allowed_pairs": lambda s, rng: bind(
        allowed_pairs, group=rng.integers(0, 6, s.N, np.int8), allowed=rng.random((6, 6)) < 0.5
    ),
    "lengths": lambda s, rng: bind(lengths, length=rng.integers(0, s.N, s.B, np.uint16)),
    "carpet": plain(carpet),
    "near_by_log": plain(near_by_log),
    "known": lambda s, rng: bind(known, value=_with_gaps(rng, s.N)),
    "nothing": plain(nothing),
    "lambda": plain(lambda b, h, q_idx, kv_idx: kv_idx * 2 <= q_idx + 3),
    "combined": lambda s, rng: (
        (masks.causal | bind(masks.document, doc=documents(s, rng)))
        & ~masks.mask(carpet)
        & even_heads_causal
    ),
}
"""How to bind a mask for a call of some sizes."""


# ---------------------------------------------------------------------------------------------
# Combinations
# ---------------------------------------------------------------------------------------------


def chain(parts: list[Mod]) -> Mod:
    """Return the modifier that applies several after each other, and what rounding does to it."""

    def units(S: float, far: float) -> float:
        error = 0.0
        for part in parts:
            error = part.lipschitz * error + part.roundings * part.magnitude(S, far)
            S = part.magnitude(S, far)
        return error + S  # of one rounding that there is not: so it bounds the result too

    return Mod(
        build=lambda sizes, rng: mods.compose(*(part.build(sizes, rng) for part in parts)),
        lipschitz=math.prod(part.lipschitz for part in parts),
        magnitude=units,
        roundings=1,
        hides=any(part.hides for part in parts),
    )


def random_mod(rng: Generator, count: int = 3) -> tuple[list[str], Mod]:
    """Return the names of some modifiers, and those applied one after the other.

    What is hidden stays so: a modifier that returns -inf comes last, if there is one.
    """
    seen = [name for name, mod in MODS.items() if not mod.hides]
    names = [*rng.choice(seen, count - 1).tolist(), str(rng.choice(list(MODS)))]
    return names, chain([MODS[name] for name in names])


def random_mask(rng: Generator, sizes: Sizes, depth: int = 2) -> masks.Mask:
    """Return masks combined at random."""
    if depth == 0:
        return masks.mask(MASKS[str(rng.choice(list(MASKS)))](sizes, rng))
    left = random_mask(rng, sizes, depth - 1)
    kind = rng.integers(5)
    if kind == 0:
        return ~left
    right = random_mask(rng, sizes, depth - 1)
    return left & right if kind < 3 else left | right
