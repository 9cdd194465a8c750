"""Decoding: few query rows on many keys, cut into splits that are merged."""

from __future__ import annotations

import functools
import subprocess
from typing import Any

import children
import instruction_sets
import ml_dtypes
import numpy as np
import pytest
from cases import Case, bind, check, gate, gaussian, in_step, normal, random_bias, random_mask
from hypothesis import given
from hypothesis import strategies as st

import nattn
from nattn.backends.cpu import jobs, launch_decode, tiles
from nattn.backends.cpu.decode import decode_worker
from nattn.call.problem import Problem
from nattn.functions import masks
from nattn.vectors.lanes import Tile

SPLIT = launch_decode.BLOCK_KV * launch_decode.BLOCKS_PER_SPLIT
"""Keys of a split, where an item has few."""


def qkv(B: int, Hq: int, Nq: int, Nk: int, D: int, *, Hkv: int = 2) -> list[Any]:
    sizes = ((Hq, Nq), (Hkv, Nk), (Hkv, Nk))
    return [gaussian(B, H, n, D, seed=seed) for seed, (H, n) in enumerate(sizes)]


CASES = [
    Case("one row", Hq=3, Nq=1, Nk=3 * SPLIT + 5, D=32),
    Case("a group", Hq=8, Hkv=2, Nq=1, Nk=2 * SPLIT, D=64),
    Case("rows of a group, causal", Hq=6, Hkv=2, Nq=5, Nk=SPLIT + 1, options={"causal": True}),
    Case("more rows than lanes", Hq=4, Hkv=1, Nq=8, Nk=SPLIT - 1, D=40, Dv=24),
    Case("D=72, Dv=136", Nq=3, Nk=SPLIT + 17, D=72, Dv=136),
    Case("window", Nq=2, Nk=3 * SPLIT, options={"window_size": (SPLIT + 3, 0)}),
    Case(
        "bias and mask",
        Hq=4,
        Hkv=2,
        Nq=3,
        Nk=SPLIT + 70,
        options={"bias": random_bias("f2", 0.1, 0), "mask": random_mask(0.7, 1)},
    ),
    Case(
        "softcap, ALiBi, sinks",
        Hq=4,
        Hkv=2,
        Nq=3,
        Nk=SPLIT + 70,
        options={"softcap": 2.0, "alibi_slopes": normal("Hq"), "sinks": normal("Hq")},
    ),
    Case(
        "functions",
        Hq=4,
        Hkv=2,
        Nq=3,
        Nk=SPLIT + 70,
        options={"score_mod": bind(gate, gain=0.5), "mask_mod": bind(in_step, step=3)},
    ),
    Case("dropout", Hq=4, Hkv=2, Nq=3, Nk=SPLIT + 70, options={"dropout_p": 0.3, "seed": 5}),
    Case(
        "lengths",
        B=3,
        Nq=4,
        Nk=2 * SPLIT,
        options={
            "q_lens": [4, 0, 1],
            "kv_lens": [2 * SPLIT, 40, 0],
            "causal": True,
            "sinks": normal("Hq"),
        },
    ),
    Case("bnhd", B=2, Nq=3, Nk=70, options={"layout": "bnhd", "causal": True}),
]


@pytest.fixture
def _few_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail where a test decodes nothing: then it would test another kernel."""
    calls = []
    run = launch_decode.decode

    def decode(*args: Any, **options: Any) -> None:
        calls.append(1)
        run(*args, **options)

    monkeypatch.setattr("nattn.backends.cpu.launch.decode", decode)
    yield
    assert calls


@pytest.mark.usefixtures("_few_rows_are_decoded")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, dtype: Any) -> None:
    q, k, v, options = case.make(dtype)
    check("cpu", q, k, v, **options)


@given(
    Nq=st.integers(0, 9),
    Nk=st.integers(1, SPLIT + 40),
    group=st.integers(1, 3),
    D=st.integers(1, 70),
    causal=st.booleans(),
    strided=st.sampled_from(["", "keys", "columns", "reversed"]),
    left=st.none() | st.integers(0, 300),
)
def test_shapes_and_strides(
    Nq: int, Nk: int, group: int, D: int, causal: bool, strided: str, left: int | None
) -> None:
    q, k, v = qkv(2, 2 * group, Nq + 1, Nk, D, Hkv=2)
    if strided == "keys":
        k, v = (np.repeat(x, 2, axis=2)[:, :, ::2] for x in (k, v))
    elif strided == "columns":
        k, v = (np.repeat(x, 2, axis=3)[..., ::2] for x in (k, v))
    elif strided == "reversed":
        k, v = (x[:, :, ::-1] for x in (k, v))
    check("cpu", q, k, v, causal=causal, window_size=(left, None))


@pytest.mark.skipif(not tiles.cpu().fma, reason="a multiply-add is two instructions")
@pytest.mark.skipif(not instruction_sets.is_x86(), reason="x86 assembly")
@pytest.mark.parametrize("rows", [1, 4])
def test_products_stay_in_registers(rows: int) -> None:
    plan = launch_decode.plan_decode("float32", "float32", 1, 1, 64, 64, rows)
    wide = tiles.decode_tile("float32", rows)
    asm = decode_worker.inspect_asm(plan.tile, wide, Tile("float32", wide.W, 1, 1))
    found = [
        loop
        for loop in instruction_sets.innermost_loops(str(asm))
        if instruction_sets.count(loop, "^vfmadd") >= wide.MV * wide.NR
    ]
    assert len(found) >= 2  # with keys and with values
    for loop in found:
        assert instruction_sets.count(loop, r"\(%[er]sp") == 0, loop


# What bits depend on


def attend(*arrays: Any, **options: Any) -> tuple[Any, Any]:
    found = nattn.attention(*arrays, return_lse=True, **options)
    assert isinstance(found, tuple)
    return found


OPTIONS: list[dict[str, Any]] = [{}, {"causal": True, "dropout_p": 0.2, "seed": 1}]


@pytest.mark.parametrize("options", OPTIONS)
def test_threads_and_batch_mates_change_no_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (gaussian(3, h, n, 64) for h, n in ((4, 2), (2, 3 * SPLIT), (2, 3 * SPLIT)))
    lengths = [3 * SPLIT, SPLIT + 7, 2]
    monkeypatch.setattr(jobs, "thread_count", lambda: 1)
    out, lse = attend(q, k, v, kv_lens=lengths, **options)
    for n in (2, 5):
        monkeypatch.setattr(jobs, "thread_count", lambda n=n: n)
        for _ in range(5):
            again = attend(q, k, v, kv_lens=lengths, **options)
            np.testing.assert_array_equal(again[0], out)
            np.testing.assert_array_equal(again[1], lse)
    if options:  # with dropout the item counts
        return
    for b, n in enumerate(lengths):
        alone = attend(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **options)
        np.testing.assert_array_equal(alone[0][0], out[b])
        np.testing.assert_array_equal(alone[1][0], lse[b])


def test_padding_rows_change_no_bit() -> None:
    """The kernel is chosen by the rows that an item has, not by those that its array has."""
    q, k, v = (gaussian(2, 4, n, 32) for n in (80, 2 * SPLIT, 2 * SPLIT))
    out, lse = attend(q, k, v, q_lens=[3, 80], causal=True)
    alone = attend(q[:1, :, :3], k[:1], v[:1], causal=True)
    np.testing.assert_array_equal(alone[0], out[:1, :, :3])
    np.testing.assert_array_equal(alone[1], lse[:1, :, :3])
    assert not out[0, :, 3:].any()
    assert (lse[0, :, 3:] == -np.inf).all()
    whole = attend(q[1:], k[1:], v[1:], causal=True)
    np.testing.assert_array_equal(whole[0], out[1:])


def test_the_rows_of_batch_mates_change_no_bit() -> None:
    """One row may be computed in a register tile of four."""
    q, k, v = (gaussian(2, 2, n, 40) for n in (7, SPLIT + 5, SPLIT + 5))
    out, lse = attend(q, k, v, q_lens=[1, 7])
    alone = attend(q[:1, :, :1], k[:1], v[:1])
    np.testing.assert_array_equal(alone[0], out[:1, :, :1])
    np.testing.assert_array_equal(alone[1], lse[:1, :, :1])


@pytest.mark.parametrize("Nq", [1, 5])
def test_a_block_mask_changes_no_bit(Nq: int) -> None:
    q, k, v = qkv(1, 4, Nq, 3 * SPLIT, 32, Hkv=2)
    doc = np.repeat([0, 1, 2], SPLIT)
    doc[-Nq:] = 0
    mask_mod = functools.partial(masks.document, doc=doc)
    blocks = nattn.BlockMask.from_mask_mod(mask_mod, 1, 4, Nq, 3 * SPLIT, block_size=64)
    for plain, blocked in zip(
        attend(q, k, v, mask_mod=mask_mod), attend(q, k, v, block_mask=blocks), strict=True
    ):
        np.testing.assert_array_equal(blocked, plain)


def test_where_decoding_ends() -> None:
    """Both kernels agree within the budget on either side of the limit."""
    most = tiles.MOST_DECODED_ROWS
    q, k, v = qkv(1, 2, most + 1, SPLIT + 9, 32)
    problems = [Problem.build(q[:, :, :n], k, v) for n in (most, most + 1)]
    assert [len(launch_decode.items_of_few_rows(p)) for p in problems] == [1, 0]
    check("cpu", q[:, :, :most], k, v)
    check("cpu", q, k, v)


# What is hidden


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("Nq", [1, 6])
def test_hidden_nan_in_any_split(group: int, Nq: int, dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in qkv(1, 2 * group, Nq, 2 * SPLIT + 30, 48, Hkv=2))
    mask = np.random.default_rng(0).random((Nq, 2 * SPLIT + 30)) < 0.5
    mask[:, [5, SPLIT + 7, -1]] = False
    plain = attend(q, k, v, mask=mask)
    k, v = k.copy(), v.copy()
    k[:, :, [5, -1]] = np.nan
    v[:, :, [5, SPLIT + 7]] = np.inf
    for other, x in zip(attend(q, k, v, mask=mask), plain, strict=True):
        np.testing.assert_array_equal(other, x)
    mask[0, SPLIT + 7] = True
    out, _ = attend(q, k, v, mask=mask)
    finite = np.isfinite(out.astype(np.float32)).all(axis=(1, 3))[0]
    assert finite.tolist() == [False] + [True] * (Nq - 1)


def test_rows_and_items_without_keys() -> None:
    q, k, v = qkv(2, 2, 3, SPLIT + 3, 16)
    out, lse = attend(q, k, v, mask=np.zeros((3, 1), bool))
    assert not out.any()
    assert (lse == -np.inf).all()
    sinks = np.array([1.5, -np.inf], np.float32)
    out, lse = attend(q, k, v, kv_lens=[0, SPLIT + 3], sinks=sinks)
    assert not out[0].any()
    assert lse[0, :, 0].tolist() == [1.5, -np.inf]


def test_a_window_reads_only_what_it_sees() -> None:
    child = subprocess.run(
        children.command("window_reads"),
        env=children.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_number_of_splits() -> None:
    """It follows from an item's own keys: at least two blocks each, at most 64 splits."""
    sizes = {1: 1, SPLIT: 1, SPLIT + 1: 2, 64 * SPLIT: 64, 64 * SPLIT + 1: 43}
    for n, expected in sizes.items():
        x = np.broadcast_to(np.float32(0), (1, 2, n, 4))
        p = Problem.build(x[:, :, :1], x, x)
        _, tasks = launch_decode.task_table(p, [0], [n])
        assert tasks == 2 * expected
