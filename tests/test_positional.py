"""Positions: each scheme against its definition, written out here in float64."""

from __future__ import annotations

import doctest
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import nattn
from nattn.backends.cpu import jobs
from nattn.backends.cpu import rotary as kernels
from nattn.backends.error_budget import error_budget, pair_budget, sum_budget
from nattn.positional import (
    Alibi,
    LearnedTable,
    Rotary,
    Sinusoidal,
    T5Bias,
    biases,
    rotary,
    rotary_frequencies,
    sinusoidal_encoding,
    tables,
)

Array = NDArray[Any]
U64 = 2.0**-53
DTYPES = [np.float32, np.float64]
PAIRINGS = ["half", "interleaved"]


def test_the_examples() -> None:
    results = [doctest.testmod(module) for module in (tables, rotary, biases)]
    assert sum(result.failed for result in results) == 0
    assert min(result.attempted for result in results) > 2
    assert sum(result.attempted for result in results) > 20


def test_each_says_what_it_acts_on() -> None:
    schemes = [Sinusoidal(4), LearnedTable(3, 4), Rotary(4), Alibi(2), T5Bias(2)]
    assert [s.acts_on for s in schemes] == ["x", "x", "qk", "scores", "scores"]  # type: ignore[attr-defined]
    assert [list(s.params) for s in schemes] == [[], ["table"], [], [], ["table"]]  # type: ignore[attr-defined]


# Added to the input


@pytest.mark.parametrize("d_model", [1, 6, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinusoidal_is_the_formula_of_the_paper(d_model: int, dtype: Any) -> None:
    table = sinusoidal_encoding(40, d_model, base=100.0, dtype=dtype, offset=3)
    assert table.dtype == dtype
    u = np.finfo(dtype).eps / 2
    for row in range(40):
        for column in range(d_model):
            angle = (row + 3) / 100.0 ** (column // 2 * 2 / d_model)
            exact = math.cos(angle) if column % 2 else math.sin(angle)
            assert abs(float(table[row, column]) - exact) <= u + 4 * U64 * (angle + 1)


def test_a_shift_of_sinusoidal_positions_is_a_rotation() -> None:
    """What lets a linear layer attend by distance: the same map for every position."""
    table = sinusoidal_encoding(50, 8, dtype=np.float64)
    shift = 7
    for i in range(4):
        angle = shift / 10000.0 ** (2 * i / 8)
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        moved = table[:-shift, 2 * i : 2 * i + 2] @ turn.T
        np.testing.assert_allclose(moved, table[shift:, 2 * i : 2 * i + 2], atol=1e-13, rtol=0)


def test_sinusoidal_adds_its_rows_and_passes_gradients_on() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 6))
    scheme = Sinusoidal(6)
    np.testing.assert_array_equal(scheme(x), x + sinusoidal_encoding(5, 6, dtype=np.float64))
    assert scheme(x.astype(np.float32)).dtype == np.float32
    dx, dparams = scheme.backward(x, offset=4)
    np.testing.assert_array_equal(dx, x)
    assert dparams == {}


@pytest.mark.parametrize("offset", [0, 3])
def test_a_learned_table_and_its_gradient(offset: int) -> None:
    rng = np.random.default_rng(1)
    scheme = LearnedTable(9, 4, seed=5, dtype=np.float64)
    x, dy = rng.standard_normal((2, 2, 3, 6, 4))
    before = scheme(x, offset)
    np.testing.assert_array_equal(before, x + scheme.params["table"][offset : offset + 6])
    dx, dparams = scheme.backward(dy, offset)
    np.testing.assert_array_equal(dx, dy)
    # The map is linear: a step in the table changes the loss by its product with the gradient.
    step = rng.standard_normal((9, 4))
    scheme.params["table"] = scheme.params["table"] + step
    assert np.isclose(((scheme(x, offset) - before) * dy).sum(), (dparams["table"] * step).sum())


def test_a_learned_table_is_seeded() -> None:
    tables = [LearnedTable(50, 40, seed=seed).params["table"] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert (tables[0] != tables[2]).mean() > 0.99
    assert 0.018 < tables[0].std() < 0.022
    assert tables[0].dtype == np.float32


# Rotary, against its definition


def columns(D: int, pairing: str) -> tuple[Array, Array]:
    """Return the first and the second column of each pair."""
    if pairing == "half":
        return np.arange(D // 2), np.arange(D // 2) + D // 2
    return np.arange(0, D, 2), np.arange(1, D, 2)


def turned(x: Array, positions: Array, frequencies: Array, pairing: str, factor: float = 1) -> Any:
    """Return x turned, and what rounding can make of it in x's dtype.

    `positions` broadcast to ``(B, H, N)``. A result is a sum of two products: four roundings of
    the dtype with that of the table. Angles, their sines and the product of their parts have some
    of float64, here and there, that grow with the angle.
    """
    first, second = columns(2 * len(frequencies), pairing)
    angle = positions[..., None] * frequencies
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    y = x.astype(np.float64)
    y[..., first] = factor * (a * np.cos(angle) - b * np.sin(angle))
    y[..., second] = factor * (b * np.cos(angle) + a * np.sin(angle))
    error = np.zeros(x.shape)
    u = np.finfo(x.dtype).eps / 2
    error[..., first] = (abs(a) + abs(b)) * (4 * u + 8 * U64 * (abs(angle) + 1)) * factor
    error[..., second] = error[..., first]
    return y, error


def check(result: Array, x: Array, *args: Any) -> None:
    exact, error = turned(x, *args)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    worst = np.abs(result - exact) - error
    assert (worst <= 0).all(), worst.max()


RNG = np.random.default_rng(7)
PLACES: dict[str, tuple[Any, Any]] = {
    "default": (None, np.arange(150)),
    "offset": (np.int32(1000), 1000 + np.arange(150)),
    "before": (-70, np.arange(150) - 70),
    "each": ((p := RNG.permutation(400)[:150]), p),
    "scattered": ((p := RNG.integers(0, 1 << 30, 150)), p),
    "items": ((p := RNG.integers(0, 5000, (2, 150)).astype(np.uint16)), p[:, None].astype(int)),
    "list": (list(range(3, 153)), 3 + np.arange(150)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_the_formula_of_the_paper(dtype: Any, pairing: str, place: str) -> None:
    x = np.random.default_rng(2).standard_normal((2, 3, 150, 64)).astype(dtype)
    given, positions = PLACES[place]
    frequencies = 1 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    result = Rotary(64, pairing=pairing)(x, given)
    check(result, x, positions, frequencies, pairing)


@pytest.mark.parametrize(("D", "dim"), [(2, 2), (37, 22), (64, 16), (25, 24), (130, 130)])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_any_number_of_columns_turns_and_the_others_stay(pairing: str, D: int, dim: int) -> None:
    x = np.random.default_rng(3).standard_normal((3, 20, D)).astype(np.float32)
    rotary = Rotary(D, base=500.0, pairing=pairing, rotary_dim=dim)
    result = rotary(x)
    frequencies = 1 / 500.0 ** (np.arange(0, dim, 2) / dim)
    check(result[..., :dim], x[..., :dim], np.arange(20), frequencies, pairing)
    np.testing.assert_array_equal(result[..., dim:], x[..., dim:])
    whole = x.copy()
    rotary(whole, out=whole)
    np.testing.assert_array_equal(whole, result)


@pytest.mark.parametrize("first", [1 << 20, 100_000_000])
def test_far_positions_are_as_exact_as_near_ones(first: int) -> None:
    """Computed in float32, an angle of 1e8 would be off by whole turns."""
    x = np.random.default_rng(4).standard_normal((1, 1, 200, 8)).astype(np.float32)
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    angle = (first + np.arange(200.0))[:, None] * frequencies
    result = Rotary(8)(x, first)[0, 0].astype(np.float64)
    a, b = x[0, 0, :, :4].astype(np.float64), x[0, 0, :, 4:].astype(np.float64)
    # Two roundings more than those of float32 are all that a tenth of its unit adds up to.
    bound = 4.5 * 2.0**-24 * (abs(a) + abs(b)) + 4 * U64 * angle * (abs(a) + abs(b))
    assert (8 * U64 * angle).max() < 2.0**-22
    assert (abs(result[:, :4] - (a * np.cos(angle) - b * np.sin(angle))) <= bound).all()


def test_positions_beyond_64_bits_of_angle_still_turn() -> None:
    """Norms hold at any position that float64 can tell from its neighbours."""
    x = np.random.default_rng(4).standard_normal((2, 5, 16))
    result = Rotary(16)(x, [-(1 << 53), -5, 0, 1 << 40, 1 << 53])
    np.testing.assert_allclose(
        np.linalg.norm(result, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-14
    )


# What rotary is for


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_preserves_norms(pairing: str) -> None:
    x = np.random.default_rng(5).standard_normal((4, 100, 32))
    result = Rotary(32, pairing=pairing)(x, 10_000)
    np.testing.assert_allclose(
        np.linalg.norm(result, axis=-1), np.linalg.norm(x, axis=-1), rtol=32 * U64
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_dot_products_depend_on_the_distance_alone(pairing: str) -> None:
    q, k = np.random.default_rng(6).standard_normal((2, 32))
    rotary = Rotary(32, pairing=pairing)
    turned_q, turned_k = (rotary(np.tile(x, (60, 1))) for x in (q, k))
    scores = turned_q @ turned_k.T
    size = np.linalg.norm(q) * np.linalg.norm(k)
    for distance in range(-59, 60):
        diagonal = np.diagonal(scores, distance)
        assert np.ptp(diagonal) <= 64 * 60 * U64 * size
    by_distance = [scores[0, j] for j in range(60)]
    assert np.ptp(by_distance) > 0.1 * size  # and depend on it they do


def test_pairings_agree_up_to_the_order_of_columns() -> None:
    x = np.random.default_rng(7).standard_normal((2, 50, 48)).astype(np.float32)
    order = np.arange(48).reshape(2, 24).T.ravel()  # 0, 24, 1, 25, ...
    half = Rotary(48, pairing="half")(x)
    interleaved = Rotary(48, pairing="interleaved")(x[..., order])
    np.testing.assert_array_equal(interleaved, half[..., order])


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_inverse_and_backward(pairing: str, scaling: Any) -> None:
    """The inverse undoes the map, and backward is its transpose."""
    rng = np.random.default_rng(8)
    x, dy = rng.standard_normal((2, 2, 3, 70, 36))
    positions = rng.integers(0, 1000, (2, 70))
    rotary = Rotary(36, pairing=pairing, rotary_dim=28, scaling=scaling)
    y, dx = rotary(x, positions), rotary.backward(dy, positions)
    np.testing.assert_allclose(rotary.inverse(y, positions), x, rtol=0, atol=100 * U64)
    size = np.linalg.norm(dy) * np.linalg.norm(y)
    assert abs((dy * y).sum() - (dx * x).sum()) <= 1000 * U64 * size
    if scaling is None:
        np.testing.assert_array_equal(rotary.inverse(dy, positions), dx)
    else:
        factor = 0.1 * math.log(8) + 1
        np.testing.assert_allclose(
            np.linalg.norm(y[..., :28], axis=-1),
            factor * np.linalg.norm(x[..., :28], axis=-1),
            rtol=100 * U64,
        )


# Memory of any kind


def unaligned(x: Array) -> Array:
    room = np.zeros(x.nbytes + 1, np.uint8)
    view = np.frombuffer(room.data, x.dtype, x.size, offset=1).reshape(x.shape)
    view[...] = x
    return view


def spread(x: Array) -> Array:
    wide = np.zeros((*x.shape[:-1], 3 * x.shape[-1]), x.dtype)
    wide[..., ::3] = x
    return wide[..., ::3]


def read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


VIEWS: dict[str, Callable[[Array], Array]] = {
    "heads last": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "columns first": lambda x: x.transpose(3, 0, 1, 2).copy().transpose(1, 2, 3, 0),
    "backwards": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "spread": spread,
    "unaligned": unaligned,
    "read-only": read_only,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_strides_change_no_bits(pairing: str, view: str) -> None:
    x = np.random.default_rng(9).standard_normal((2, 3, 50, 44)).astype(np.float32)
    rotary = Rotary(44, pairing=pairing, rotary_dim=40)
    expected = rotary(x, 17)
    seen = VIEWS[view](x)
    before = seen.tobytes()
    result = rotary(seen, 17)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float32
    assert seen.tobytes() == before
    if view not in ("read-only", "big-endian"):
        out = VIEWS[view](np.zeros_like(x))
        assert rotary(x, 17, out=out) is out
        np.testing.assert_array_equal(out, expected)
        assert rotary(seen, 17, out=seen) is seen  # in place
        np.testing.assert_array_equal(seen, expected)


def test_a_row_for_all_heads() -> None:
    """A view without strides is read as what it shows."""
    row = np.random.default_rng(10).standard_normal((1, 1, 1, 16))
    x = np.broadcast_to(row, (2, 3, 9, 16))
    np.testing.assert_array_equal(Rotary(16)(x), Rotary(16)(x.copy()))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8)])
def test_all_ranks_and_empty_sizes(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(11).standard_normal(shape)
    result = Rotary(8)(x, 2)
    assert result.shape == shape
    rows = [Rotary(8)(row[None], 2 + i % 5)[0] for i, row in enumerate(x.reshape(-1, 8))]
    np.testing.assert_array_equal(result, np.reshape(rows, shape))


@pytest.mark.parametrize("shape", [(1, 1, 700, 40), (3, 5, 90, 40), (17, 2, 1, 40)])
@pytest.mark.parametrize("each", [False, True])
def test_bits_do_not_depend_on_threads(
    shape: tuple[int, ...], each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(12).standard_normal(shape).astype(np.float32)
    positions = np.random.default_rng(13).integers(0, 4000, (shape[0], shape[2]) if each else ())
    frequencies, _ = rotary_frequencies(40)
    where = positions[:, None] if each else positions + np.arange(shape[2])
    monkeypatch.setattr(kernels, "SMALL", 0)
    results = []
    for count in (1, 2, 3, 8):
        monkeypatch.setattr(jobs, "thread_count", lambda count=count: count)
        results.append(Rotary(40)(x, positions))
    check(results[0], x, where, frequencies, "half")
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


# Scaling

PUBLISHED: dict[str, tuple[int, float, dict[str, Any], int, float, dict[int, float]]] = {
    # Made once with transformers 5.24: dimension, base, scaling, length, factor, and some of its
    # frequencies, which it computes in float32.
    "llama3": (
        128,
        500000.0,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        0,
        1.0,
        {1: 0.81461722, 16: 0.037606031, 32: 0.00052484602, 40: 3.4281024e-05, 63: 3.0689259e-07},
    ),
    "yarn": (
        64,
        10000.0,
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        0,
        1.3688879454113936,
        {1: 0.7498942, 8: 0.1, 16: 0.0055000004, 20: 0.00079056941, 31: 3.3338035e-06},
    ),
    "yarn_ds": (
        64,
        10000.0,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        0,
        1.0857263992561355,
        {1: 0.7498942, 8: 0.1, 16: 0.0055000004, 20: 0.00079056941, 31: 3.3338035e-06},
    ),
    "yarn_notrunc": (
        64,
        150000.0,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        0,
        1.3465735902799727,
        {1: 0.6890443, 8: 0.050813273, 16: 0.00045648392, 20: 1.8188337e-05, 31: 3.0235114e-07},
    ),
    "dynamic": (
        128,
        10000.0,
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048},
        8192,
        1.0,
        {1: 0.83962578, 16: 0.061005913, 32: 0.0037217215, 40: 0.00091924192, 63: 1.6496886e-05},
    ),
    "linear": (
        128,
        10000.0,
        {"rope_type": "linear", "factor": 4.0},
        0,
        1.0,
        {1: 0.21649109, 16: 0.025, 32: 0.0024999999, 40: 0.00079056947, 63: 2.8869548e-05},
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_frequencies_are_those_of_transformers(case: str) -> None:
    dim, base, scaling, length, factor, some = PUBLISHED[case]
    frequencies, own = rotary_frequencies(dim, base, scaling, length)
    assert own == pytest.approx(factor, rel=1e-12)
    for i, value in some.items():  # some ten roundings of float32
        assert frequencies[i] == pytest.approx(value, rel=16 * 2.0**-24)


LLAMA3 = PUBLISHED["llama3"][2]
HARMLESS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # head_dim, what a configuration says, and what it means
    "Llama 2, Mistral, Qwen2, SmolLM": (
        128,
        {"rope_type": "default", "rope_theta": 10000.0, "factor": None},
        {"rope_type": "default"},
    ),
    "Llama 3.1 in transformers 5": (
        128,
        LLAMA3 | {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        LLAMA3,
    ),
    "Qwen2 with YaRN": (
        128,
        {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 32768.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "Llama 2 finetuned with YaRN": (
        128,
        {
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": np.float32(4096),
            "finetuned": True,
        },
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    "Gemma 3": (256, {"rope_type": "linear", "factor": 8}, {"rope_type": "linear", "factor": 8.0}),
    "dynamic": (
        64,
        {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32.0},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_of_real_configurations_that_mean_nothing_more(name: str) -> None:
    D, given, meaning = HARMLESS[name]
    before = dict(given)
    rotary, plain = (Rotary(D, scaling=scaling) for scaling in (given, meaning))
    assert given == before
    assert rotary.scaling == meaning
    x = np.random.default_rng(21).standard_normal((1, 40, D))
    np.testing.assert_array_equal(rotary(x), plain(x))
    for mine, theirs in zip(
        rotary_frequencies(D, scaling=given), rotary_frequencies(D, scaling=meaning), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("D", "dim", "factor"), [(80, 32, 0.4), (64, 16, 0.25), (128, 96, 0.75)])
def test_a_factor_may_say_how_many_columns_turn_if_rotary_dim_does(
    D: int, dim: int, factor: float
) -> None:
    """As transformers counts them: ``int(head_dim * partial_rotary_factor)``."""
    scaling = {"rope_type": "default", "partial_rotary_factor": factor}
    x = np.random.default_rng(22).standard_normal((1, 9, D))
    np.testing.assert_array_equal(
        Rotary(D, rotary_dim=dim, scaling=scaling)(x), Rotary(D, rotary_dim=dim)(x)
    )


def test_linear_scaling_divides_positions() -> None:
    x = np.random.default_rng(14).standard_normal((2, 30, 16))
    scaled = Rotary(16, scaling={"type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled(x, 4 * np.arange(30)), Rotary(16)(x), rtol=0, atol=1000 * U64)


def test_dynamic_scaling_begins_beyond_the_original_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
    x = np.random.default_rng(15).standard_normal((1, 2, 33, 16))
    dynamic, plain = Rotary(16, scaling=scaling), Rotary(16)
    np.testing.assert_array_equal(dynamic(x[..., :32, :]), plain(x[..., :32, :]))
    assert np.abs(dynamic(x) - plain(x)).max() > 0.01
    base = 10000.0 * (2.0 * 33 / 32 - 1.0) ** (16 / 14)
    check(dynamic(x), x, np.arange(33), base ** (-np.arange(0, 16, 2) / 16), "half")
    np.testing.assert_allclose(dynamic.backward(dynamic(x)), x, rtol=0, atol=1000 * U64)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_long_waves_are_stretched_and_short_ones_are_not(kind: str) -> None:
    """Formulas of the papers, pair by pair, with the numbers of turns in the original length."""
    dim, base, length, factor = 64, 10000.0, 2048, 16.0
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    frequencies, _ = rotary_frequencies(dim, base, scaling)
    kinds = set()
    for i, frequency in enumerate(frequencies):
        plain = base ** (-2 * i / dim)
        turns = length * plain / (2 * math.pi)
        if kind == "llama3":
            kept = 1.0 if turns > 4 else 0.0 if turns < 1 else (turns - 1) / 3
        else:  # a ramp over pairs, between those that turn 32 times and once
            ends = [
                dim * math.log(length / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (32, 1)
            ]
            low, high = math.floor(ends[0]), math.ceil(ends[1])
            kept = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        assert frequency == pytest.approx(kept * plain + (1 - kept) * plain / factor, rel=1e-13)
        kinds.add(kept if kept in (0.0, 1.0) else 0.5)
    assert kinds == {0.0, 0.5, 1.0}


# Added to the scores


def test_alibi_gives_attention_the_slopes_of_the_paper() -> None:
    """The formula here rounds, too, and a BLAS adds in an order of its own: twice the budget."""
    scheme = Alibi(4)
    q, k, v = np.random.default_rng(16).standard_normal((3, 4, 6, 8))
    out = nattn.attention(q, k, v, backend="reference", **scheme.arguments(6, 6, q_offset=1))
    distance = abs(np.arange(6)[:, None] + 1 - np.arange(6))
    falling = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * distance
    weights = np.exp(q @ k.transpose(0, 2, 1) / 8**0.5 - falling)
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v
    largest = (abs(q) @ abs(k).transpose(0, 2, 1) / 8**0.5 + falling).max(axis=-1)
    budget = error_budget(np.dtype(np.float64), 6, largest, abs(v).max(axis=(1, 2))[:, None], 8).out
    assert (abs(out - expected) <= budget[..., None]).all()
    level = nattn.attention(q, k, v, backend="reference")
    assert (abs(level - expected) > budget[..., None]).all()
    grads = nattn.attention_vjp(q, k, v, **scheme.arguments(6, 6))[1](out, wrt=scheme.wrt)
    assert scheme.collect(grads) == {}


def t5_buckets(distance: Array, count: int, far: int, bidirectional: bool) -> Array:
    """Return T5's bucket of each ``kv_idx - q_idx``, by the formula of its code in float64."""
    base = np.zeros_like(distance)
    n = -distance
    if bidirectional:
        count //= 2
        base = np.where(n < 0, count, 0)
        n = abs(n)
    n = np.maximum(n, 0)
    exact = count // 2
    steps = np.log(np.maximum(n, 1) / exact) / math.log(far / exact) * (count - exact)
    return np.asarray(
        base + np.where(n < exact, n, np.minimum(exact + steps.astype(int), count - 1))
    )


def pair_errors(
    dtype: np.dtype,
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    args: dict[str, Any],
) -> tuple[Array, Array]:
    """Bound the error and the size of the gradient of each score; hidden pairs count as well."""
    u, D, drop = float(np.finfo(dtype).eps) / 2, q.shape[3], args.get("dropout_p", 0.0)
    kt, vt = k.swapaxes(2, 3), v.swapaxes(2, 3)
    bias = np.where(bias == -np.inf, 0.0, bias)
    cap = args.get("softcap", math.inf)
    dots = q @ kt
    scores = (dots if cap == math.inf else cap * np.tanh(dots / cap)) + bias
    score_size = abs(q) @ abs(kt) + abs(bias)
    dp, dp_size = dout @ vt / (1 - drop), abs(dout) @ abs(vt) / (1 - drop)
    extra = 0.0 if dlse is None else dlse.astype(np.float64)
    delta = (dout * out).sum(axis=3) - extra
    most = score_size.max(axis=3) + 2.0  # of a sink, too
    own = error_budget(dtype, k.shape[2] + 1, most, abs(v).max(), D, dropout_p=drop)
    out_error = own.out[..., None] + (D + 1) * u * abs(out)
    delta_error = (abs(dout) * out_error).sum(axis=3) + u * (abs(delta) + abs(extra))
    # Rows that see nothing have no weights.
    exponent = np.where(lse == -np.inf, -np.inf, -lse)[..., None] + scores
    p = np.exp(np.minimum(exponent, 0.0))
    pairs = pair_budget(
        dtype,
        p,
        np.where(p == 0.0, 0.0, exponent),
        dp,
        delta[..., None],
        score_error=(D + 16) * u * score_size,
        lse_error=own.lse[..., None],
        dp_size=dp_size,
        delta_error=delta_error[..., None],
        Dv=D,
        dropout_p=drop,
    )
    return pairs.ds, p * (abs(dp) + abs(delta)[..., None])


T5_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "bidirectional": False},
    "causal, both": {"causal": True},
    "window": {"window_size": (20, 3)},
    "one side": {"window_size": (None, 9), "q_offset": 4},
    "offset": {"q_offset": -3},
    "lengths": {"q_lens": [40, 17], "kv_lens": [50, 31], "causal": True},
    "mask, sinks, cap": {"mask": 0.7, "sinks": np.array([0.5, -1, 0, 2]), "softcap": 3.0},
    "bias, dlse": {"bias": 1.0, "dlse": True},
    "dropout": {"dropout_p": 0.3, "seed": 5},
}


# What differs between dtypes is attention's own: two cases do for float32.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, np.float64) for case in T5_CASES), ("plain", np.float32), ("lengths", np.float32)],
)
def test_t5_bias_has_the_gradient_of_the_dense_computation(case: str, dtype: Any) -> None:
    """The reference adds the bias as a matrix, whose gradient is summed over buckets here."""
    args = dict(T5_CASES[case])
    rng = np.random.default_rng(17)
    B, H, Nq, Nk, D = 2, 4, 40, 50, 8
    q, dout = rng.standard_normal((2, B, H, Nq, D)).astype(dtype)
    k, v = rng.standard_normal((2, B, 2, Nk, D)).astype(dtype)
    dlse = rng.standard_normal((B, H, Nq)).astype(dtype) if args.pop("dlse", False) else None
    if "mask" in args:
        args["mask"] = rng.random((Nq, Nk)) < args["mask"]
    added = np.zeros((1, 1, 1, Nk))
    if "bias" in args:
        added = rng.standard_normal((B, 1, 1, Nk))
        added[..., 3] = -np.inf
        args["bias"] = added
    scheme = T5Bias(
        H, 12, 30, bidirectional=args.pop("bidirectional", True), seed=3, dtype=np.float64
    )
    scheme.params["table"] = rng.standard_normal((12, H))
    own = args | {"scale": 1.0} | scheme.arguments(Nq, Nk, args.get("q_offset"))
    out, lse = nattn.attention(q, k, v, return_lse=True, **own)
    found = scheme.backward(dout, q, k, v, out, lse, dlse=dlse, **own)["table"]
    assert found.shape == (12, H)
    assert found.dtype == np.float64

    offset = np.array(args.get("kv_lens", [Nk] * B)) - np.array(args.get("q_lens", [Nq] * B))
    offset = np.broadcast_to(args.get("q_offset", offset), B)
    distance = np.arange(Nk) - (np.arange(Nq)[:, None] + offset[:, None, None])
    buckets = t5_buckets(distance, 12, 30, scheme.bidirectional)
    matrix = scheme.params["table"][buckets].transpose(0, 3, 1, 2) + added
    exact = [x.astype(np.float64) for x in (q, k, v)]
    dense = args | {"scale": 1.0, "bias": matrix, "backend": "reference"}
    ref, ref_lse = nattn.attention(*exact, return_lse=True, **dense)
    wide = (dout.astype(np.float64), *exact, ref, ref_lse)
    ds = nattn.attention_backward(
        *wide, dlse=None if dlse is None else dlse.astype(np.float64), wrt=["bias"], **dense
    ).dbias
    assert ds is not None
    expected = np.array([[ds[:, h][buckets == n].sum() for h in range(H)] for n in range(12)])
    assert np.count_nonzero(expected) >= 12  # a test of nothing would pass

    kk, vv = (np.repeat(x, 2, axis=1) for x in exact[1:])
    errors, sizes = pair_errors(
        np.dtype(dtype), exact[0], kk, vv, matrix, wide[0], ref, ref_lse, dlse, args
    )
    for n in range(12):
        for h in range(H):
            inside = buckets == n
            error, size = errors[:, h][inside].sum(), sizes[:, h][inside].sum()
            budget = sum_budget(np.dtype(dtype), error, size, inside.sum())
            assert abs(found[n, h] - expected[n, h]) <= budget
            assert budget <= (1e-2 if dtype == np.float32 else 1e-10) * (size + 0.1)


def test_t5_bias_has_the_gradient_of_finite_differences() -> None:
    rng = np.random.default_rng(18)
    q, k, v, dout = rng.standard_normal((4, 2, 30, 8))
    scheme = T5Bias(2, 8, 20, dtype=np.float64, seed=1)
    step = rng.standard_normal((8, 2))
    table = scheme.params["table"]

    def loss(t: float) -> float:
        scheme.params["table"] = table + t * step
        out = nattn.attention(q, k, v, scale=1.0, backend="reference", **scheme.arguments(30, 30))
        return float((out * dout).sum())

    h = 1e-5  # errors of h**2 and of eps / h
    slope = (loss(h) - loss(-h)) / (2 * h)
    scheme.params["table"] = table
    args = scheme.arguments(30, 30) | {"scale": 1.0}
    out, lse = nattn.attention(q, k, v, return_lse=True, **args)
    gradient = scheme.backward(dout, q, k, v, out, lse, **args)["table"]
    assert (gradient * step).sum() == pytest.approx(slope, rel=1e-7)


def test_t5_bias_in_other_layouts_and_ranks() -> None:
    rng = np.random.default_rng(19)
    q, k, v, dout = rng.standard_normal((4, 1, 3, 40, 8))
    scheme = T5Bias(3, dtype=np.float64)
    args = scheme.arguments(40, 40) | {"causal": True}
    out, lse = nattn.attention(q, k, v, return_lse=True, **args)
    expected = scheme.backward(dout, q, k, v, out, lse, **args)["table"]
    heads = scheme.backward(dout[0], q[0], k[0], v[0], out[0], lse[0], **args)["table"]
    np.testing.assert_array_equal(heads, expected)
    mdout, mq, mk, mv, mout = (x.transpose(0, 2, 1, 3) for x in (dout, q, k, v, out))
    found = scheme.backward(mdout, mq, mk, mv, mout, lse, layout="bnhd", **args)["table"]
    np.testing.assert_array_equal(found, expected)


def test_the_gradient_of_t5_bias_takes_linear_memory() -> None:
    N = 4096
    q, k, v = np.random.default_rng(20).standard_normal((3, 1, N, 8))
    scheme = T5Bias(1, dtype=np.float64)
    args = scheme.arguments(N, N) | {"causal": True}
    out, lse = nattn.attention(q, k, v, return_lse=True, **args)
    tracemalloc.start()
    try:
        scheme.backward(out, q, k, v, out, lse, **args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < N * N // 8  # bytes: a matrix of bits would take as much


# Errors

X = np.zeros((2, 3, 5, 8), np.float32)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Rotary(0), ValueError, "head_dim: expected an integer of at least 2, got 0"),
    (lambda: Rotary(8.0), TypeError, "head_dim: expected an integer of at least 2, got 8.0"),  # type: ignore[arg-type]
    (lambda: Rotary(7), ValueError, "rotary_dim: expected an even number up to head_dim = 7"),
    (lambda: Rotary(8, rotary_dim=10), ValueError, "up to head_dim = 8, got 10"),
    (lambda: Rotary(8, base=1), ValueError, "base: expected a finite number above 1, got 1"),
    (lambda: Rotary(8, base=math.nan), ValueError, "base: expected a finite number above 1"),
    (lambda: Rotary(8, pairing="both"), ValueError, "pairing: expected"),
    (lambda: Rotary(8)(X[..., :6]), ValueError, r"D = head_dim = 8, got \(2, 3, 5, 6\)"),
    (lambda: Rotary(8)(X[0, 0, 0]), ValueError, r"expected shape \(N, D\), .* got \(8,\)"),
    (lambda: Rotary(8)(X.astype(np.float16)), TypeError, "x: expected dtype float32 or float64"),
    (lambda: Rotary(8).backward(X.astype(int)), TypeError, "dx: expected dtype .* got int64"),
    (lambda: Rotary(8)(X, np.arange(4)), ValueError, r"shape \(5,\) or \(2, 5\), .* got shape"),
    (lambda: Rotary(8)(X, np.zeros((3, 5), int)), ValueError, r"got shape \(3, 5\)"),
    (lambda: Rotary(8)(X[0], np.zeros((3, 5), int)), ValueError, r"of shape \(5,\), of magnitude"),
    (lambda: Rotary(8)(X, np.arange(5.0)), TypeError, "positions: .* got dtype float64"),
    (lambda: Rotary(8)(X, 1.0), TypeError, "positions: expected an integer, got"),
    (lambda: Rotary(8)(X, True), TypeError, "positions: expected an integer, got"),
    (lambda: Rotary(8)(X, 1 << 53), ValueError, "magnitude up to 2\\*\\*53, got 9007199254740992"),
    (lambda: Rotary(8)(X, 1 << 99), ValueError, "magnitude up to 2\\*\\*53, got 63"),
    (lambda: Rotary(8)(X, [0, 1, 2, 3, -(1 << 60)]), ValueError, "got -1152921504606846976"),
    (lambda: Rotary(8, scaling="yarn"), TypeError, "scaling: expected None or a dict"),  # type: ignore[arg-type]
    (
        lambda: Rotary(8, scaling={"rope_type": "longrope"}),
        ValueError,
        "'rope_type' of 'default', 'linear', 'dynamic', 'yarn', 'llama3', got 'longrope'",
    ),
    (lambda: Rotary(8, scaling={"factor": 2.0}), ValueError, "'rope_type' of .* got {'factor'"),
    (
        lambda: Rotary(8, scaling={"rope_type": "llama3", "factor": 8.0, "beta": 1}),
        ValueError,
        r"got none of \['low_freq_factor', .*, got the unknown \['beta'\]",
    ),
    (
        lambda: Rotary(8, scaling={"rope_type": "linear", "factor": 0.5}),
        ValueError,
        r"scaling\['factor'\]: expected a finite number of at least 1, got 0.5",
    ),
    (
        lambda: Rotary(8, scaling={"rope_type": "default", "rope_theta": 5e5}),
        ValueError,
        "'rope_theta' to be the base 10000.0, got 500000.0",
    ),
    (
        lambda: Rotary(8, scaling={"rope_type": "default", "partial_rotary_factor": 0.5}),
        ValueError,
        "'partial_rotary_factor' to be rotary_dim / head_dim = 8 / 8, got 0.5; say with rotary_dim",
    ),
    (
        lambda: Rotary(8, rotary_dim=4, scaling=YARN | {"partial_rotary_factor": 1.0}),
        ValueError,
        "'partial_rotary_factor' to be rotary_dim / head_dim = 4 / 8, got 1.0",
    ),
    (
        lambda: Rotary(8, scaling=YARN | {"partial_rotary_factor": 1e308}),
        ValueError,
        "'partial_rotary_factor' to be .* got 1e\\+308",
    ),
    (
        lambda: Rotary(8, scaling=YARN | {"partial_rotary_factor": True}),
        TypeError,
        r"scaling\['partial_rotary_factor'\]: expected a finite number above 0, got True",
    ),
    (
        lambda: rotary_frequencies(8, scaling=YARN | {"partial_rotary_factor": 0.5}),
        ValueError,
        "'partial_rotary_factor' to be 1.0, got 0.5",
    ),
    (
        lambda: Rotary(8, scaling={"type": "default", "mrope_section": [2, 1, 1]}),
        ValueError,
        r"for 'default' the keys \[\], got the unknown \['mrope_section'\]",
    ),
    (
        lambda: Rotary(8, scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
        ValueError,
        "'rope_type' of .* got 'mrope'",
    ),
    (
        lambda: Rotary(8, scaling=YARN | {"llama_4_scaling_beta": 0.1}),
        ValueError,
        r"got the unknown \['llama_4_scaling_beta'\]",
    ),
    (
        lambda: Rotary(8, scaling=YARN | {"type": "linear"}),
        ValueError,
        "'rope_type' of .* got {'rope_type': 'yarn'.* 'type': 'linear'}",
    ),
    (lambda: Rotary(8, scaling={"type": ["yarn"]}), ValueError, r"got \['yarn'\]"),
    (
        lambda: Rotary(8, scaling=YARN | {"original_max_position_embeddings": 64.5}),
        TypeError,
        r"\['original_max_position_embeddings'\]: expected an integer of at least 1, got 64.5",
    ),
    (
        lambda: Rotary(8, scaling=YARN | {"original_max_position_embeddings": math.inf}),
        TypeError,
        r"\['original_max_position_embeddings'\]: expected an integer of at least 1, got inf",
    ),
    (
        lambda: Rotary(8, scaling=YARN | {"beta_fast": 1.0}),
        ValueError,
        "expected beta_fast > beta_slow, got 1.0 and 1.0",
    ),
    (lambda: rotary_frequencies(7), ValueError, "rotary_dim: expected an even number, got 7"),
    (lambda: sinusoidal_encoding(-1, 4), ValueError, "n: expected an integer of at least 0"),
    (lambda: sinusoidal_encoding(1, 4, dtype="int64"), TypeError, "dtype: expected float32 or"),
    (lambda: Sinusoidal(6)(X), ValueError, r"x: expected shape \(..., N, 6\), got"),
    (lambda: Sinusoidal(8)(X, -1), ValueError, "offset: expected .* 0 or more, got -1"),
    (lambda: Sinusoidal(8, base=0), ValueError, "base: expected a finite number above 0"),
    (lambda: LearnedTable(6, 8)(X, 2), ValueError, "below max_len = 6, got 5 from position 2 on"),
    (lambda: LearnedTable(0, 8), ValueError, "max_len: expected an integer of at least 1, got 0"),
    (lambda: Alibi(0), ValueError, "num_heads: expected an integer of at least 1, got 0"),
    (lambda: T5Bias(2, 3), ValueError, "table: expected at least 4 buckets"),
    (lambda: T5Bias(2, max_distance=5), ValueError, "max_distance: expected more than the 8"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_errors_say_what_is_wrong(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_an_out_that_does_not_fit_is_refused() -> None:
    room = np.arange(2.0 * 3 * 6 * 8, dtype=np.float32).reshape(2, 3, 6, 8)
    before = room.copy()
    x = room[:, :, :5]
    outs: list[tuple[Any, type[Exception], str]] = [
        (
            room[:, :, 1:],
            ValueError,
            "out: expected x itself or memory of its own, got .* overlaps x",
        ),
        (x[:, ::-1], ValueError, "overlaps x"),
        (np.zeros((2, 3, 5, 9), np.float32), ValueError, r"out: expected shape \(2, 3, 5, 8\)"),
        (np.zeros(x.shape), TypeError, "out: expected dtype float32 as x, got float64"),
        (read_only(x), ValueError, "out: expected a writeable array, got a read-only one"),
        (x.tolist(), TypeError, "out: expected a NumPy array, got list"),
    ]
    own = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), x.shape, (0, 0, 0, 4))
    outs.append((own, ValueError, "out: expected elements that share no memory"))
    for out, error, text in outs:
        with pytest.raises(error, match=text):
            Rotary(8)(x, out=out)
    np.testing.assert_array_equal(room, before)
