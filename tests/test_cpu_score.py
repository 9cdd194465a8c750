"""Users' functions as tile functions: what NumPy makes of them, on every kind of lanes.

Each modifier and mask of `registry` is compiled for a kind of lanes, chosen in turn, so that all
kinds see several of them; and once more together with others, in the other float type.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import children
import numba
import numpy as np
import pytest
import registry
from cases import assert_near, qkv
from numpy.typing import NDArray
from registry import MASKS, MODS, Mod, Sizes

import nattn
from nattn.backends.cpu import score
from nattn.backends.cpu.score import CONTEXT, OPERAND, OUT_OF_RANGE, TILE_MAX_KNOWN, TileFunction
from nattn.functions import mods
from nattn.functions.binding import MASK_MOD, SCORE_MOD, Tree, resolve
from nattn.functions.on_arrays import ArrayFunction
from nattn.vectors.lanes import INDEX_BOUND, Tile

Array = NDArray[Any]

SIZES = Sizes(B=2, H=3, Nq=48, Nk=60)

WIDTHS = [("float32", 16), ("float64", 8), ("float32", 8), ("float64", 4), ("float32", 4)]
WIDTHS += [("float64", 16)]
MODES = [(False, "int32"), (True, "int64"), (True, "int32"), (False, "int64")]
"""Whether the lanes of a tile belong to several heads, and how large an index may be."""


@dataclass(frozen=True)
class Kind:
    """What a tile function is compiled for."""

    dtype: str
    W: int
    packed: bool
    index: str

    def compile(self, name: str, tree: Tree) -> TileFunction:
        """Compile a function, or take the one that is there."""
        positions = 0 if self.index == "int32" else INDEX_BOUND
        return score.user_function(name, tree, self.tile, positions, self.packed)

    @property
    def tile(self) -> Tile:
        return Tile(self.dtype, self.W, 1, 1)


def kind_of(n: int) -> Kind:
    """Return the n-th choice of a kind: 24 in a row are all there are, float32 where n is even."""
    return Kind(*WIDTHS[n % 6], *MODES[(n // 6 + n) % 4])


@dataclass(frozen=True)
class Place:
    """Which scores a tile holds: the context of a tile function, and what it points to."""

    b: int
    heads: NDArray[np.int64]
    rows: NDArray[np.int64]
    valid: int
    offset: int
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    first_key: int
    n_keys: int
    vectors: int

    @property
    def keys(self) -> NDArray[np.int64]:
        return np.arange(self.first_key, self.first_key + self.n_keys)

    def indices(self) -> tuple[Array, Array, Array, Array]:
        """Return b, h, q_idx and kv_idx as arrays that broadcast to [lane][key]."""
        positions = self.rows + self.offset
        return np.array([[self.b]]), self.heads[:, None], positions[:, None], self.keys[None, :]


def place(rng: np.random.Generator, kind: Kind, vectors: int, sizes: Sizes = SIZES) -> Place:
    """Draw what a tile may hold."""
    lanes = vectors * kind.W
    valid = int(rng.integers(1, lanes + 1))
    rows = rng.integers(0, sizes.Nq, lanes)
    heads = rng.integers(0, sizes.H, lanes) if kind.packed else np.full(lanes, rng.integers(3))
    rows[valid:], heads[valid:] = rows[valid - 1], heads[valid - 1]
    first_key = int(rng.integers(0, sizes.Nk))
    n_keys = int(rng.integers(1, sizes.Nk - first_key + 1))
    offset = int(rng.choice([sizes.Nk - sizes.Nq, 0, -7, 1 - sizes.Nk]))
    lo, hi = np.sort(rng.integers(0, sizes.Nk + 1, (2, lanes)), axis=0)
    b = int(rng.integers(sizes.B))
    return Place(b, heads, rows, valid, offset, lo, hi, first_key, n_keys, vectors)


CALL = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)


def run(
    function: TileFunction, at: Place, scores: Array, mask: Array | None = None
) -> tuple[int, Array, Array]:
    """Call a tile function; return its flags, the scores, and the largest of each lane.

    Nothing may be written beside them.
    """
    assert scores.shape == (at.n_keys, len(at.rows))
    memory = np.full((at.n_keys + 2, len(at.rows)), 7, scores.dtype)
    memory[1:-1] = scores
    top = np.full((3, len(at.rows)), 7, scores.dtype)
    record = np.zeros((), CONTEXT.dtype)
    record["batch"], record["n_valid"], record["offset"] = at.b, at.valid, at.offset
    record["first_key"], record["n_keys"] = at.first_key, at.n_keys
    record["vectors"], record["tile_max_ptr"] = at.vectors, top[1].ctypes.data
    lanes = {"heads": at.heads, "rows": at.rows, "lane_lo": at.lo, "lane_hi": at.hi}
    for name, values in lanes.items():
        record[f"{name}_ptr"] = values.ctypes.data
    operand = np.zeros((), OPERAND.dtype)
    if mask is not None:
        operand["ptr"] = mask.ctypes.data
        for axis, stride in zip("bhij", mask.strides, strict=True):
            operand[f"stride_{axis}"] = stride
        record["mask_ptr"] = operand.ctypes.data
    call = CALL(function.address)
    flags = call(memory[1].ctypes.data, 0, record.ctypes.data, function.params.ctypes.data)
    for edge in (memory[0], memory[-1], top[0], top[2]):
        np.testing.assert_array_equal(edge, 7)
    return flags, memory[1:-1], top[1]


def largest(scores: Array) -> Array:
    """Return the largest score of each lane; a NaN is passed over."""
    most: Array = np.max(np.where(np.isnan(scores), -np.inf, scores), axis=0)
    return most


def drawn_scores(rng: np.random.Generator, at: Place, dtype: str, S: float) -> Array:
    """Return scores up to S, and a few that are not finite."""
    x = rng.uniform(-S, S, (at.n_keys, len(at.rows))).astype(dtype)
    for special in (np.nan, np.inf, -np.inf):
        x[rng.integers(at.n_keys), rng.integers(len(at.rows))] = special
    return x


# ---------------------------------------------------------------------------------------------
# NumPy = lanes
# ---------------------------------------------------------------------------------------------

S = 8.0
"""Bound of the scores."""


def check_mod(mod: Mod, kind: Kind, rng: np.random.Generator) -> None:
    tree = resolve("score_mod", mod.build(SIZES, rng), SCORE_MOD)
    function = kind.compile("score_mod", tree)
    oracle = ArrayFunction("score_mod", tree, np.dtype(kind.dtype))
    tolerance = mod.budget(kind.dtype, S, SIZES)
    for vectors in (1, 2, 3):
        at = place(rng, kind, vectors)
        x = drawn_scores(rng, at, kind.dtype, S)
        flags, got, top = run(function, at, x)
        with np.errstate(all="ignore"):
            expected = np.asarray(oracle(x.T.astype(np.float64), *at.indices())).T
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        assert_near(got, expected, tolerance)
        assert flags == TILE_MAX_KNOWN
        np.testing.assert_array_equal(top, largest(got))


def check_mask(mask_mod: Callable[..., Any], kind: Kind, rng: np.random.Generator) -> None:
    tree = resolve("mask_mod", mask_mod, MASK_MOD)
    function = kind.compile("mask_mod", tree)
    oracle = ArrayFunction("mask_mod", tree, np.dtype(kind.dtype))
    for vectors in (1, 2, 3):
        at = place(rng, kind, vectors)
        x = drawn_scores(rng, at, kind.dtype, S)
        flags, got, top = run(function, at, x)
        visible = np.asarray(oracle(*at.indices())).T
        np.testing.assert_array_equal(got, np.where(visible, x, -np.inf))
        assert flags == TILE_MAX_KNOWN
        np.testing.assert_array_equal(top, largest(got))


@pytest.mark.parametrize("name", MODS)
def test_modifier(name: str) -> None:
    check_mod(MODS[name], kind_of(list(MODS).index(name)), registry.generator(name))


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    rng = registry.generator(name)
    check_mask(MASKS[name](SIZES, rng), kind_of(list(MASKS).index(name)), rng)


def shared_out(names: list[str]) -> list[tuple[int, list[str]]]:
    """Share names out among groups of three, each with the number of a kind.

    Its float type is the one that the functions were not tested with alone.
    """
    groups = []
    for parity in (0, 1):
        own = [name for n, name in enumerate(names) if n % 2 == parity]
        mixed = np.random.default_rng(parity).permutation(own).tolist()
        groups += [(n // 3 * 2 + 1 - parity, mixed[n : n + 3]) for n in range(0, len(own), 3)]
    return groups


@pytest.mark.parametrize(("n", "names"), shared_out(list(MODS)))
def test_modifiers_one_after_the_other(n: int, names: list[str]) -> None:
    parts = sorted((MODS[name] for name in names), key=lambda mod: mod.hides)
    once = [mod for mod in parts if not mod.hides] + [mod for mod in parts if mod.hides][:1]
    rng = np.random.default_rng(n)
    check_mod(registry.chain(once), kind_of(n), rng)
    for mod in parts[len(once) :]:  # what a hidden score becomes is not in the budget
        check_mod(mod, kind_of(n), rng)


@pytest.mark.parametrize(("n", "names"), shared_out(list(MASKS)))
def test_masks_combined(n: int, names: list[str]) -> None:
    rng = np.random.default_rng(n)
    first, *others = [MASKS[name](SIZES, rng) for name in names]
    combined = nattn.mask(first)
    for other in others:
        combined = [combined & other, combined | other, other & ~combined][rng.integers(3)]
    check_mask(combined, kind_of(n), rng)


@pytest.mark.parametrize("n", range(6))
def test_combined_at_random(n: int) -> None:
    rng = np.random.default_rng(100 + n)
    check_mod(registry.random_mod(rng)[1], kind_of(5 * n + 1), rng)
    check_mask(registry.random_mask(rng, SIZES), kind_of(5 * n), rng)


@pytest.mark.parametrize("names", [list(MODS), list(MASKS)], ids=["modifiers", "masks"])
def test_every_function_meets_both_float_types(names: list[str]) -> None:
    """The schedule is what makes so few compilations enough."""
    alone = [kind_of(n) for n in range(len(names))]
    together = {name: kind_of(n) for n, group in shared_out(names) for name in group}
    for name, kind in zip(names, alone, strict=True):
        assert {kind.dtype, together[name].dtype} == {"float32", "float64"}
    assert {(k.dtype, k.W) for k in alone} == set(WIDTHS)
    assert {(k.dtype, k.W) for k in together.values()} == set(WIDTHS)
    assert (
        len({(*w, *m) for w in WIDTHS for m in MODES} - {tuple(vars(k).values()) for k in alone})
        < 2
    )


def test_positions_beyond_32_bits() -> None:
    """With int64 indices: against Python's integers."""
    kind = Kind("float32", 8, False, "int64")
    far = 1 << 40

    def pattern(b: Any, h: Any, q_idx: Any, kv_idx: Any, left: Any) -> Any:
        d = q_idx - kv_idx
        near = (d >= -left) & (d * 1000003 % 7 < 5)
        return near & (d % 3 != 1) | (q_idx // 7 == kv_idx) & (abs(d) > 4294967296)

    function = kind.compile(
        "mask_mod", resolve("mask_mod", functools.partial(pattern, left=1 << 35), MASK_MOD)
    )
    rng = np.random.default_rng(0)
    for offset in (far, -far, 1 << 31, -(1 << 31) - 20, 7 * far + 3):
        rows = rng.integers(0, 40, 8)
        first = far - 3 if offset > 0 and offset != 1 << 31 else 0
        at = Place(0, np.zeros(8, np.int64), rows, 8, offset, rows, rows, first, 9, 1)
        _, got, _ = run(function, at, np.zeros((9, 8), np.float32))
        for lane, n in np.ndindex(8, 9):
            visible = pattern(0, 0, int(rows[lane]) + offset, first + n, 1 << 35)
            assert got[n, lane] == (0 if visible else -np.inf), (offset, lane, n)


# ---------------------------------------------------------------------------------------------
# Indices out of range
# ---------------------------------------------------------------------------------------------


def strict_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, at: Any, x: Any) -> Any:
    return score + x[at[q_idx, kv_idx]]


def strict_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, at: Any, x: Any) -> Any:
    return x[at[q_idx, kv_idx]] > 0.0


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
@pytest.mark.parametrize(
    "kind",
    [Kind("float32", 16, True, "int32"), Kind("float64", 4, False, "int64")],
    ids=["float32x16", "float64x4"],
)
def test_outside_is_said_where_a_row_sees_the_key(name: str, kind: Kind) -> None:
    """Only there: not beyond `valid`, nor outside lo <= key < hi, nor where a mask hides it."""
    plain: Callable[..., Any] = strict_score if name == "score_mod" else strict_mask
    parameters = SCORE_MOD if name == "score_mod" else MASK_MOD
    rng = np.random.default_rng(0)
    said = []
    for n in range(300):
        index = np.zeros((SIZES.Nq, SIZES.Nk), np.int8)
        at = place(rng, kind, 1 + n % 3)
        at = Place(**{**vars(at), "offset": 0})
        wrong = rng.random(index.shape) < (0.0, 0.001, 0.01, 1.0)[n % 4]
        index[wrong] = rng.choice([3, -4, 99, -100])
        mask = None if n % 5 == 0 else rng.random((SIZES.B, SIZES.H, 1, SIZES.Nk)) < 0.5
        if mask is not None:
            mask = np.broadcast_to(mask, (SIZES.B, SIZES.H, SIZES.Nq, SIZES.Nk))
        bound = functools.partial(plain, at=index, x=np.ones(3, np.float32))
        function = kind.compile(name, resolve(name, bound, parameters))
        flags, got, top = run(function, at, np.zeros((at.n_keys, len(at.rows)), kind.dtype), mask)
        seen = (at.lo[:, None] <= at.keys) & (at.keys < at.hi[:, None])
        if mask is not None:
            seen &= mask[at.b, at.heads[:, None], at.rows[:, None], at.keys]
        seen[at.valid :] = False
        expected = bool(np.any(seen & wrong[at.rows[:, None], at.keys]))
        assert flags == (TILE_MAX_KNOWN | OUT_OF_RANGE if expected else TILE_MAX_KNOWN), n
        said.append(expected)
        np.testing.assert_array_equal(top, largest(got))
    assert 60 < sum(said) < 240


def test_a_call_raises_for_visible_pairs_alone() -> None:
    q, k, v = qkv(1, 2, 20, 30, 8)
    short = np.zeros(25, np.float32)

    def read(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
        return score + x[kv_idx]

    mod = functools.partial(read, x=short)
    with pytest.raises(IndexError, match=r"score_mod: expected indices within the arrays"):
        nattn.attention(q, k, v, score_mod=mod)
    hidings: list[dict[str, Any]] = [
        {"kv_lens": 25},
        {"mask": np.arange(30) < 25},
        {"causal": True, "q_offset": 5},
        {"window_size": (None, 0), "q_offset": 5},
    ]
    for hiding in hidings:
        nattn.attention(q, k, v, score_mod=mod, **hiding)
    with pytest.raises(IndexError, match="score_mod"):
        nattn.attention(q, k, v, score_mod=mod, mask=np.arange(30) < 26)

    def read_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any) -> Any:
        return x[kv_idx] == 0.0

    with pytest.raises(IndexError, match=r"mask_mod: expected indices within the arrays"):
        nattn.attention(q, k, v, mask_mod=functools.partial(read_mask, x=short))


# ---------------------------------------------------------------------------------------------
# What is compiled anew, and what is not
# ---------------------------------------------------------------------------------------------

KIND = Kind("float32", 8, False, "int32")
"""Of all the functions below."""


def compiled(function: Any, kind: Kind = KIND) -> TileFunction:
    return kind.compile("score_mod", resolve("score_mod", function, SCORE_MOD))


def result(function: Any) -> float:
    """Return what a compiled modifier makes of the score 2, for query 5 and key 3."""
    eight = np.full(8, 5)
    at = Place(1, np.full(8, 2), eight, 8, 0, 0 * eight, eight, 3, 1, 1)
    _, got, _ = run(compiled(function), at, np.full((1, 8), 2, np.float32))
    assert len(set(got[0].tolist())) == 1
    return float(got[0, 0])


def weighted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, x: Any, n: Any, f: Any) -> Any:
    return score * x[h] + n * f


def test_new_values_compile_nothing() -> None:
    x = np.array([1, 2, 3], np.float32)
    first = compiled(functools.partial(weighted, x=x, n=1, f=0.5))
    count = len(score.modify._variants)
    others: list[Any] = [
        functools.partial(weighted, x=np.zeros(1, np.float32), n=-(1 << 60), f=math.inf),
        functools.partial(weighted, f=-0.0, n=np.int8(3), x=x[::-2]),
        functools.partial(weighted, x=np.broadcast_to(x[:1], 70), n=1, f=np.float64(2)),
        functools.partial(functools.partial(weighted, n=2, f=1.5), x=x[1:].astype(">f4")),
        numba.njit(weighted),
        weighted,
    ]
    others[-2:] = [functools.partial(f, x=x, n=1, f=0.5) for f in others[-2:]]
    for other in others:
        assert compiled(other).address == first.address
    assert len(score.modify._variants) == count
    assert result(functools.partial(weighted, x=x, n=1, f=0.5)) == 6.5
    assert result(functools.partial(weighted, x=x[::-1], n=4, f=0.25)) == 3.0


def test_other_types_compile_anew() -> None:
    x = np.array([1, 2, 3], np.float32)
    first = compiled(functools.partial(weighted, x=x, n=1, f=0.5)).address
    memory = np.zeros(8, np.float32)
    far = np.lib.stride_tricks.as_strided(memory, (2,), (1 << 31,))
    addresses = [first]
    for values in (
        {"x": x.astype(np.float64), "n": 1, "f": 0.5},
        {"x": x.astype(np.int8), "n": 1, "f": 0.5},
        {"x": x, "n": 1.0, "f": 0.5},
        {"x": x, "n": True, "f": 0.5},
        {"x": far, "n": 1, "f": 0.5},
    ):
        function = compiled(functools.partial(weighted, **values))
        addresses.append(function.address)
    again = functools.partial(weighted, x=x, n=1, f=0.5)
    others = [("float64", 8, False, "int32"), ("float32", 4, False, "int32")]
    others += [("float32", 8, True, "int32"), ("float32", 8, False, "int64")]
    addresses += [compiled(again, Kind(*other)).address for other in others]
    assert len(set(addresses)) == len(addresses)
    assert result(functools.partial(weighted, x=x.astype(np.int8), n=1, f=0.5)) == 6.5
    assert result(functools.partial(weighted, x=x, n=True, f=0.25)) == 6.25


def made(rate: float) -> Callable[..., Any]:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - rate * (q_idx - kv_idx)

    return mod


def made_again(rate: float) -> Callable[..., Any]:
    def other_name(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # at another place, with a comment
        return score - rate * (q_idx - kv_idx)

    return other_name


def test_the_same_code_is_compiled_once() -> None:
    first = compiled(made(0.25)).address
    count = len(score.modify._variants)
    assert compiled(made(0.25)).address == first
    assert compiled(made_again(0.25)).address == first
    assert len(score.modify._variants) == count


def test_a_captured_number_is_part_of_the_code() -> None:
    assert result(made(0.25)) == 1.5
    assert result(made(0.5)) == 1.0
    assert result(made_again(0.5)) == 1.0
    assert result(made(0.25)) == 1.5


def test_a_captured_number_that_changes() -> None:
    """Also in the same function object."""
    rate = 0.25

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - rate * (q_idx - kv_idx)

    assert result(mod) == 1.5
    rate = 0.5
    assert result(mod) == 1.0
    rate = 0.25
    assert result(mod) == 1.5


def module(path: Path, text: str, name: str = "users_module") -> Any:
    """Run a user's file."""
    path.write_text(text)
    made = types.ModuleType(name)
    made.__file__ = str(path)
    exec(compile(text, path, "exec"), vars(made))
    return made


USERS = """
import numba
import numpy as np

LEVEL = 1.0

def helper(x):
    return inner(x) + LEVEL

def inner(x):
    return np.maximum(x, 0.5)

@numba.njit
def jitted(x):
    return jitted_inner(x) * 3.0

@numba.njit
def jitted_inner(x):
    return np.maximum(x, 0.5)

def mod(score, b, h, q_idx, kv_idx):
    return helper(score) + jitted(score)
"""


def test_helpers_are_part_of_the_code(tmp_path: Path) -> None:
    """Plain and jitted ones, what they call, and globals: each change shows at once."""
    users = module(tmp_path / "users.py", USERS)
    assert result(users.mod) == 9.0
    users.LEVEL = 2.0
    assert result(users.mod) == 10.0
    users.inner = module(tmp_path / "b.py", "def inner(x):\n    return 4.0 * x\n").inner
    assert result(users.mod) == 16.0
    users.helper = module(tmp_path / "c.py", "def helper(x):\n    return -x\n").helper
    assert result(users.mod) == 4.0
    again = module(tmp_path / "users.py", USERS)
    count = len(score.modify._variants)
    assert result(again.mod) == 9.0
    assert len(score.modify._variants) == count


def test_functions_that_are_gone_stay_compiled() -> None:
    """What is kept is the code: a new function object of the same code finds it."""
    addresses = set()
    for _ in range(5):
        addresses.add(compiled(made(0.125)).address)
        assert result(made(0.125)) == 1.75
    assert len(addresses) == 1


CHILD = """
import sys
import numpy as np
import functools
from nattn import masks, mods
from nattn.backends.cpu import score
from nattn.functions import binding
from nattn.vectors.lanes import Tile
sys.path.insert(0, sys.argv[1])
import users
tile = Tile("float32", 8, 1, 1)
for name, f in (
    ("score_mod", users.mod),
    ("score_mod", functools.partial(mods.softcap, cap=float(sys.argv[2]))),
    ("mask_mod", functools.partial(masks.document, doc=np.zeros(int(sys.argv[2])))),
    ("mask_mod", masks.causal & functools.partial(masks.chunked, chunk=3)),
):
    parameters = {"score_mod": binding.SCORE_MOD, "mask_mod": binding.MASK_MOD}[name]
    score.user_function(name, binding.resolve(name, f, parameters), tile, 0, False)
    print(name)
"""


def test_another_process_compiles_nothing(tmp_path: Path) -> None:
    """Users' functions, built-in ones and combinations are found on the disk."""
    (tmp_path / "users.py").write_text(USERS)
    cache = tmp_path / "cache"

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in cache.rglob("*.kernel")}

    found = []
    for value in ("3", "40"):
        subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path), value],
            env=children.environment(NATTN_CACHE_DIR=str(cache), PYTHONDONTWRITEBYTECODE="1"),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found.append(files())
    assert found[0] == found[1]  # a compiled one would have been written anew
    assert len(found[0]) == 4
    (tmp_path / "users.py").write_text(USERS.replace("0.5", "0.75"))
    subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), "5"],
        env=children.environment(NATTN_CACHE_DIR=str(cache), PYTHONDONTWRITEBYTECODE="1"),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert len(files()) == 5
    assert found[0].items() <= files().items()


# ---------------------------------------------------------------------------------------------
# What lanes cannot express
# ---------------------------------------------------------------------------------------------

BAD = """
import numpy as np
import math

def an_if(score, b, h, q_idx, kv_idx):
    if score > 0:                                   # here
        return score
    return -score

def an_if_on_the_head(score, b, h, q_idx, kv_idx):
    return score if h == 0 else -score              # here

def a_while(score, b, h, q_idx, kv_idx):
    while q_idx > kv_idx:                           # here
        score = score + 1
    return score

def an_and(score, b, h, q_idx, kv_idx):
    near = q_idx > kv_idx and h > 0                 # here
    return np.where(near, score, -score)

def a_not(score, b, h, q_idx, kv_idx):
    return np.where(not (q_idx > kv_idx), score, 0) # here

def chained(score, b, h, q_idx, kv_idx):
    return np.where(0 < kv_idx < 5, score, 0.0)     # here

def unknown_function(score, b, h, q_idx, kv_idx):
    return np.arctan2(score, 2.0)                   # here

def a_sum(score, b, h, q_idx, kv_idx):
    return score - np.sum(score)                    # here

def unknown_name(score, b, h, q_idx, kv_idx):
    return score + nowhere_defined                  # Numba does not say where

def an_attribute(score, b, h, q_idx, kv_idx):
    return score.real                               # here

def a_method(score, b, h, q_idx, kv_idx):
    return score.clip(0, 1)                         # here

def a_range(score, b, h, q_idx, kv_idx):
    for n in range(q_idx):                          # here
        score = score + n
    return score

def a_complex(score, b, h, q_idx, kv_idx):
    return score + 1j                               # here

def a_list(score, b, h, q_idx, kv_idx):
    return [score, score][h]                        # here

def float_index(score, b, h, q_idx, kv_idx, x):
    return score + x[0.5 * h, 0]                    # here

def bool_index(score, b, h, q_idx, kv_idx, x):
    return score + x[q_idx > 0, 0]                  # here

def few_indices(score, b, h, q_idx, kv_idx, x):
    return score + x[h]                             # here

def many_indices(score, b, h, q_idx, kv_idx, x):
    return score + x[h, 0, b]                       # here

def a_slice(score, b, h, q_idx, kv_idx, x):
    return score + x[h, :2]                         # here

def whole_array(score, b, h, q_idx, kv_idx, x):
    return score + x                                # here

def assigns(score, b, h, q_idx, kv_idx, x):
    x[h, 0] = 1.0                                   # here
    return score

def two_types(score, b, h, q_idx, kv_idx):
    x = score
    for n in range(2):
        x = (x, n)                                  # anywhere
    return score

def helped(score, b, h, q_idx, kv_idx):
    return helper(score)

def helper(x):
    return x if x > 0 else -x                       # here

def returns_a_truth(score, b, h, q_idx, kv_idx):
    return score > 0

def returns_nothing(score, b, h, q_idx, kv_idx):
    score + 1

def returns_two(score, b, h, q_idx, kv_idx):
    return score, h

def returns_text(score, b, h, q_idx, kv_idx):
    return "score"

def mask_if(b, h, q_idx, kv_idx):
    return True if q_idx > kv_idx else False        # here

def mask_number(b, h, q_idx, kv_idx):
    return q_idx - kv_idx

def mask_float(b, h, q_idx, kv_idx):
    return 1.0

def mask_or(b, h, q_idx, kv_idx):
    return q_idx > kv_idx or h == 0                 # here
"""

GOOD = """
def good(score, b, h, q_idx, kv_idx):
    return 2 * score
"""

REASONS = {
    **dict.fromkeys(("an_if", "an_if_on_the_head", "a_while", "an_and", "a_not"), r"`if`, `while`"),
    **dict.fromkeys(("chained", "mask_if", "mask_or"), r"`if`, `while`"),
    "unknown_function": "arctan2",
    "a_sum": "sum",
    "unknown_name": "nowhere_defined",
    "an_attribute": "real",
    "a_method": "clip",
    "a_range": "range",
    **dict.fromkeys(("float_index", "bool_index", "a_slice"), "indexed by integers"),
    **dict.fromkeys(("few_indices", "many_indices"), "2 axes"),
    "returns_a_truth": "a number to be returned",
    "returns_nothing": "a number to be returned, got none",
    "returns_two": "a number to be returned",
    "returns_text": "a number to be returned",
    "mask_number": "True or False to be returned",
    "mask_float": "True or False to be returned",
}
"""What the error has to say beside the line."""


@functools.cache
def bad_names() -> list[str]:
    return [name for name in re.findall(r"def (\w+)", BAD) if name != "helper"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return module(tmp_path_factory.mktemp("bad") / "bad.py", BAD)


@pytest.mark.parametrize("name", bad_names())
def test_what_lanes_cannot_express(name: str, bad: Any) -> None:
    """A TypeError that names the argument, the place, the trouble and the remedy."""
    function = getattr(bad, name)
    argument = "mask_mod" if name.startswith("mask_") else "score_mod"
    if "x" in function.__code__.co_varnames[: function.__code__.co_argcount]:
        function = functools.partial(function, x=np.zeros((3, 4), np.float32))
    tree = resolve(argument, function, SCORE_MOD if argument == "score_mod" else MASK_MOD)
    with pytest.raises(TypeError) as caught:
        KIND.compile(argument, tree)
    text = str(caught.value)
    assert text.startswith(f"{argument}: ")
    assert "np.where" in text
    start = BAD.index(f"def {name}(")
    end = BAD.find("\ndef ", start)
    if name == "helped":
        start, end = BAD.index("def helper("), BAD.index("def returns_a_truth")
    body = BAD[start:end]
    if "# here" in body:
        line = BAD[: start + body.index("# here")].count("\n") + 1
        assert f'{bad.__file__}", line {line}' in text, text
    else:
        assert name in text or bad.__file__ in text, text
    assert re.search(REASONS.get(name, ""), text), text
    assert "Lanes(" not in text, text


def test_nothing_is_written_on_an_error(bad: Any, tmp_path: Path) -> None:
    """And a good call afterwards is right."""
    q, k, v = qkv(1, 2, 20, 30, 8)
    out = np.full_like(q, 7)
    for options in ({"score_mod": bad.an_if}, {"mask_mod": bad.mask_if}):
        for _ in range(2):
            with pytest.raises(TypeError, match=r"bad\.py"):
                nattn.attention(q, k, v, out=out, **options)
            np.testing.assert_array_equal(out, 7)
    good = module(tmp_path / "good.py", GOOD).good
    nattn.attention(q, k, v, out=out, score_mod=good)
    np.testing.assert_array_equal(out, nattn.attention(2 * q, k, v))  # doubling is exact


# ---------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        Kind("float32", 16, False, "int64"),
        Kind("float32", 8, True, "int64"),
        Kind("float64", 8, True, "int64"),
        Kind("float64", 4, False, "int64"),
    ],
    ids=lambda k: f"{k.dtype}x{k.W}{' packed' * k.packed}",
)
def test_dropout(kind: Kind) -> None:
    """The bits of `mods.keep`, however the keys are cut into tiles; the rest stays as it is."""
    rng = np.random.default_rng(0)
    sizes = Sizes(B=5, H=3, Nq=70_000, Nk=300)
    for seed, dropout_p in ((0, 0.5), ((1 << 64) - 1, 0.01), (1 << 40, 0.999), (12345, 1e-300)):
        function = score.drop_function(kind.tile, dropout_p, seed, kind.packed)
        for vectors in (1, 3):
            at = place(rng, kind, vectors, sizes)
            probs = rng.random((sizes.Nk, len(at.rows))).astype(kind.dtype)
            kept = mods.keep(at.b, at.heads, at.rows, np.arange(sizes.Nk)[:, None], seed, dropout_p)
            expected = np.where(kept, probs, -0.0)
            bits = np.dtype(kind.dtype).str.replace("f", "i")
            edges = np.unique([0, sizes.Nk, *rng.integers(0, sizes.Nk, 60)])
            for lo, hi in itertools.pairwise(edges):
                cut = Place(**{**vars(at), "first_key": int(lo), "n_keys": int(hi - lo)})
                flags, got, top = run(function, cut, probs[lo:hi])
                assert flags == 0
                np.testing.assert_array_equal(top, 7)
                np.testing.assert_array_equal(got.view(bits), expected[lo:hi].view(bits))
    assert set(np.diff(edges)) >= {1, 2, 3, 4, 5}
