"""nattn.attention_stream: keys and values in chunks, from memory, generators and files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import assert_near, qkv, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import nattn
from nattn.api import streaming
from nattn.call.results import as_bhnd

Array = NDArray[Any]


def cut(k: Array, v: Array, ends: list[int], axis: int = -2) -> Iterator[tuple[Array, Array]]:
    """Yield chunks that end at the given keys, and the rest."""
    for begin, end in zip([0, *ends], [*ends, k.shape[axis]], strict=True):
        part = (slice(None),) * (axis % k.ndim) + (slice(begin, end),)
        yield k[part], v[part]


def check(
    chunks: Any, n: int, q: Array, k: Array, v: Array, own: Any = None, **options: Any
) -> Any:
    """Compare with the truth, within the budget of a call and of n merges."""
    arguments = options if own is None else own
    out, lse = nattn.attention_stream(q, chunks, return_lse=True, **arguments)
    t = truth(q, k, v, **options)
    assert (out.shape, out.dtype) == (t.problem.out_shape, t.problem.dtype)
    assert lse.dtype == t.problem.compute
    # a merge rounds two weights, two products and a sum; of lse a logarithm and a sum
    u = float(np.finfo(t.problem.compute).eps) / 2
    largest = np.abs(v.astype("f8")).max(initial=0.0)
    assert_near(as_bhnd(t.problem, out), t.out, t.stored_budget() + 8 * n * u * largest)
    more = 8 * n * u * (1 + np.abs(np.where(np.isfinite(t.lse), t.lse, 0.0)))
    assert_near(lse.reshape(t.lse.shape), t.lse, t.budget.lse + more)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 60},
    "causal, last on last": {"causal": True},
    "window": {"window_size": (30, 5), "q_offset": 40},
    "an offset for each item": {"causal": True, "q_offset": [10, 70]},
    "a far offset": {"window_size": (1 << 70, -1), "q_offset": 1 << 70},
    "softcap and scale": {"softcap": 1.5, "scale": 0.3},
    "ALiBi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4], "q_offset": 50},
    "sinks": {"sinks": [0.5, -1.0, 3.0, -np.inf], "causal": True, "q_offset": -10},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["f4", "f8", ml_dtypes.bfloat16], ids=["f4", "f8", "bfloat16"])
def test_options(dtype: Any, name: str) -> None:
    options = OPTIONS[name]
    q, k, v = qkv(2, 4, 50, 150, 16, dtype=dtype)
    k, v = k[:, :2], v[:, ::2]
    ends = [1, 40, 40, 133]
    whole = "q_offset" in options or not options.get("causal")
    if whole:
        check(cut(k, v, ends), 5, q, k, v, **options)
        check(list(cut(k, v, ends)), 5, q, k, v, **options)
    check((k, v), 4, q, k, v, {**options, "chunk_size": 40}, **options)


@settings(max_examples=30)
@given(data=st.data())
def test_any_cut(data: st.DataObject) -> None:
    Nk = data.draw(st.integers(0, 90))
    ends = sorted(data.draw(st.lists(st.integers(0, Nk), max_size=6)))
    offset = data.draw(st.integers(-20, 100))
    rank = data.draw(st.integers(2, 4))
    q, k, v = qkv(1, 1, data.draw(st.integers(0, 20)), Nk, 8)
    q, k, v = (x[(0,) * (4 - rank)] for x in (q, k, v))
    check(cut(k, v, ends), len(ends) + 1, q, k, v, causal=True, q_offset=offset)


def test_layout() -> None:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in qkv(2, 4, 30, 100, 8))
    options: dict[str, Any] = {"layout": "bnhd", "causal": True, "q_offset": 70}
    check(cut(k, v, [33, 80], axis=1), 3, q, k, v, **options)
    own = {**options, "chunk_size": 30}
    check((k, v), 4, q, k, v, own, **options)


def test_files(tmp_path: Path) -> None:
    q, k, v = qkv(1, 2, 20, 300, 16)
    np.save(tmp_path / "k.npy", k)
    np.save(tmp_path / "v.npy", v)
    files = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "kv")
    for size in (None, 64):
        np.testing.assert_array_equal(
            nattn.attention_stream(q, files, chunk_size=size),
            nattn.attention_stream(q, (k, v), chunk_size=size),
        )


def test_chunks_are_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(1, 2, 5, 100, 16)
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 10 * 2 * 2 * 16 * 4)  # ten keys
    done: list[float] = []
    nattn.attention_stream(q, (k, v), progress=done.append)
    np.testing.assert_allclose(done, np.arange(1, 11) / 10)


def test_an_array_of_another_library() -> None:
    class Lazy:
        """What is read when it is sliced."""

        def __init__(self, x: Array) -> None:
            self.x, self.shape, self.dtype = x, x.shape, x.dtype

        def __getitem__(self, part: Any) -> Array:
            read: Array = self.x[part].copy()
            return read

    q, k, v = qkv(1, 2, 20, 300, 16)
    np.testing.assert_array_equal(
        nattn.attention_stream(q, (Lazy(k), Lazy(v)), chunk_size=70),
        nattn.attention_stream(q, (k, v), chunk_size=70),
    )


def test_an_iterator_is_one_chunk_ahead() -> None:
    q, k, v = qkv(1, 1, 5, 40, 8)
    taken, done, threads = [0], [0], set()
    ahead: list[int] = []

    def chunks() -> Iterator[tuple[Array, Array]]:
        for pair in cut(k, v, [10, 20, 30]):
            taken[0] += 1
            ahead.append(taken[0] - done[0])
            threads.add(threading.get_ident())
            yield pair

    class Known:
        """An iterable whose length is known."""

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[tuple[Array, Array]]:
            return chunks()

    def progress(fraction: float) -> None:
        done[0] = round(4 * fraction)

    nattn.attention_stream(q, Known(), progress=progress)
    assert done == [4]
    assert max(ahead) <= 2
    assert threading.get_ident() not in threads


def test_what_an_iterator_raises() -> None:
    q, k, v = qkv(1, 1, 5, 40, 8)

    def chunks() -> Iterator[tuple[Array, Array]]:
        yield k, v
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        nattn.attention_stream(q, chunks())


Q, K, V = qkv(1, 2, 5, 7, 4)

ERRORS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no chunk": ([], {}, ValueError, "kv_chunks: expected at least one chunk"),
    "no iterable": (7, {}, TypeError, "kv_chunks: expected an iterable of pairs"),
    "text": ("kv", {}, TypeError, "kv_chunks: expected an iterable of pairs"),
    "no pair": ([(K, V), K], {}, TypeError, r"kv_chunks\[1\]: expected a pair"),
    "a stack": (np.stack([K, V]), {}, TypeError, r"kv_chunks\[0\]: expected a pair"),
    "another D": ([(K, V), (V[..., :2], V)], {}, ValueError, r"kv_chunks\[1\]: k: expected shape"),
    "another dtype": ([(K, V), (K.astype("f8"), V)], {}, TypeError, r"kv_chunks\[1\]: q, k, v: "),
    "another Dv": ([(K, V), (K, V[..., :2])], {}, ValueError, r"kv_chunks\[1\]: v: expected Dv"),
    "v of another length": ((K, V[:, :, :3]), {}, ValueError, "v: expected as many rows as k has"),
    "k of one axis": ((K[0, 0, 0], V), {}, ValueError, "k: expected shape"),
    "chunk_size of 0": ((K, V), {"chunk_size": 0}, ValueError, "chunk_size: expected an integer"),
    "chunk_size of chunks": ([(K, V)], {"chunk_size": 3}, TypeError, "chunk_size: expected None"),
    "no q_offset": (iter([(K, V)]), {"causal": True}, TypeError, "q_offset: expected where query"),
    "progress": (iter([(K, V)]), {"progress": print}, TypeError, "progress: expected None for"),
    "layout": ([(K, V)], {"layout": "nbhd"}, ValueError, "layout: expected"),
    "a mask": ([(K, V)], {"mask": True}, TypeError, "mask"),
    "scale": ([(K, V)], {"scale": np.nan}, ValueError, r"kv_chunks\[0\]: scale: expected"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    chunks, options, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        nattn.attention_stream(Q, chunks, **options)
