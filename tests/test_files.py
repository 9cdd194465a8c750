"""nattn.nn.files: files are written whole or not at all, and read whatever dtype floats have."""

from __future__ import annotations

import doctest
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from model_files import FLOATS, narrowed, safetensors_bytes, stored
from numpy.typing import NDArray

from nattn.call import optional
from nattn.nn import files
from nattn.vectors import dtypes

Array = NDArray[Any]

SUFFIXES = [".npz", ".safetensors"]
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
FLOAT16, BFLOAT16 = np.dtype(np.float16), dtypes.bfloat16()
NUMBERS = np.array([[1.5, -0.3, 1e-3, 0.0], [-2.0, 7.25, 65000.0, np.inf]])


def test_examples() -> None:
    for module in (files, optional):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 0


def test_after_an_error_all_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_text("before")

    def fail() -> None:
        with files.replaced(path) as part:
            assert part.suffix == ".npz"
            part.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with files.replaced(path) as part:
        part.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def content(suffix: str, arrays: dict[str, tuple[Array, str]], text: str = "what it is") -> bytes:
    """Return a file of arrays in dtypes of the names that safetensors has for them."""
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
        state = {name: x for name, (x, _) in arrays.items()}
        return safetensors_bytes(state, {name: dtype for name, (_, dtype) in arrays.items()}, text)
    file = io.BytesIO()
    everything: dict[str, Any] = {name: stored(*both) for name, both in arrays.items()}
    np.savez(file, config=np.array(text), **everything)
    return file.getvalue()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_that_floats_are_kept_in_is_read(
    suffix: str, dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    empty, number = np.zeros((0, 3)), np.array(2.5)
    path.write_bytes(
        content(suffix, {"x": (NUMBERS, dtype), "none": (empty, dtype), "one": (number, dtype)})
    )
    found, text = files.read(path)
    assert text == "what it is"
    shapes: dict[str, tuple[int, ...]] = {"one": (), "none": (0, 3), "x": (2, 4)}
    exact = narrowed(NUMBERS, dtype)
    for wanted in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64):
        arrays = files.fitted("here", "all", found, shapes, wanted)
        assert list(arrays) == list(shapes)
        for name, x in arrays.items():
            assert x.dtype == wanted
            assert x.dtype.isnative
            assert x.shape == shapes[name]
            assert x.flags.c_contiguous
            assert x.flags.writeable
        np.testing.assert_array_equal(arrays["x"], exact.astype(wanted))
        assert arrays["one"] == 2.5


def test_what_numpy_writes_of_ml_dtypes_and_of_other_orders(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path = tmp_path / "a.npz"
    exact = narrowed(NUMBERS, "BF16")
    arrays: dict[str, Any] = {
        "bfloat16": exact.astype(ml_dtypes.bfloat16),
        "big": exact.astype(">f4"),
        "columns": np.asfortranarray(exact),
    }
    np.savez(path, **arrays)
    found, text = files.read(path)
    assert text == ""
    shapes = dict.fromkeys(arrays, (2, 4))
    for name, x in files.fitted("here", "all", found, shapes, FLOAT32).items():
        assert x.flags.c_contiguous
        np.testing.assert_array_equal(x, exact, err_msg=name)
    np.savez(path, x=exact, narrow=exact.astype(ml_dtypes.float8_e5m2))  # which it cannot read
    with pytest.raises(ValueError, match=r"^path '.*a\.npz': expected a file \.npz, got narrow: "):
        files.read(path)


READ = """
import hashlib, sys
from pathlib import Path
if sys.argv[1] == "absent":
    sys.modules["ml_dtypes"] = None
elif sys.argv[1] == "imported":
    import ml_dtypes
import numpy as np
from nattn.nn import files
digest = hashlib.sha256()
for path in map(Path, sys.argv[2:]):
    arrays = files.fitted("here", "all", files.read(path)[0], {"x": (2, 4)}, np.dtype(np.float32))
    digest.update(arrays["x"].tobytes())
assert sys.argv[1] != "not imported" or "ml_dtypes" not in sys.modules
print(digest.hexdigest())
"""


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_it_does_not_matter_whether_ml_dtypes_was_imported(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    paths = [tmp_path / f"a{suffix}" for suffix in SUFFIXES]
    for path in paths:
        path.write_bytes(content(path.suffix, {"x": (NUMBERS, dtype)}))
    said = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", READ, how, *map(str, paths)],
            env=children.environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for how in ("absent", "not imported", "imported")
    }
    assert len(said) == 1


# What is refused


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_cut_anywhere_is_named(suffix: str, tmp_path: Path) -> None:
    whole = content(suffix, {"x": (NUMBERS, "F32"), "y": (NUMBERS, "BF16")})
    path = tmp_path / f"a{suffix}"
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=rf"^path '.*a{suffix}': expected a file {suffix}"):
            files.read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_changed_anywhere_is_read_or_named(suffix: str, tmp_path: Path) -> None:
    whole = content(suffix, {"x": (NUMBERS, "F32"), "y": (NUMBERS, "BF16")})
    path = tmp_path / f"a{suffix}"
    rng = np.random.default_rng(0)
    refused = []
    for n in range(len(whole)):
        changed = bytearray(whole)
        changed[n] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            found, _ = files.read(path)
            files.fitted(files.show(path), "all", found, {"x": (2, 4), "y": (2, 4)}, FLOAT32)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > len(whole) // 10
    assert all(text.startswith(f"path {str(path)!r}: expected ") for text in refused)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "bad", [b"", b"\0", b"not at all", b"\xff" * 100, b"\x80\x04N.", b"\x02\0\0\0\0\0\0\0[]"]
)
def test_what_is_no_such_file(suffix: str, bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path.write_bytes(bad)
    with pytest.raises(ValueError, match=rf"^path '.*': expected a file {suffix}, got "):
        files.read(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        files.read(path)


def test_files_of_numpy_that_are_no_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, NUMBERS)
    with pytest.raises(ValueError, match=r"a\.npz': expected a file \.npz, got a single array"):
        files.read(path)
    np.savez(path, x=np.array([{}], object))
    with pytest.raises(ValueError, match=r"a\.npz': expected a file \.npz, got x: Object arrays"):
        files.read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", ["I64", "BOOL", "C64", "F8_E4M3"])
def test_numbers_that_are_no_floats_are_named(suffix: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content(suffix, {"x": (np.ones((2, 4)), dtype), "y": (NUMBERS, "F32")}))
    found, _ = files.read(path)
    shapes = {"x": (2, 4), "y": (2, 4)}
    with pytest.raises(ValueError, match=r"^here: expected x of dtype float16, .*, got \S+$"):
        files.fitted("here", "all", found, shapes, FLOAT32)
    del shapes["x"]
    files.fitted("here", "all", found, shapes, FLOAT32, others=["x"])  # which is not looked at


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    large = np.array([1e39, np.inf])
    np.savez(path, a=np.zeros(3), b=np.zeros((2, 2)), c=np.array([1, 2]), d=large)
    found, _ = files.read(path)
    wanted: dict[str, tuple[int, ...]] = {"z": (1,), "c": (2,), "y": (1,)}
    with pytest.raises(
        ValueError, match=r"^here: expected all, got other names; missing: y, z; unexpected: a, b$"
    ):
        files.fitted("here", "all", found, wanted, FLOAT32, others=["d"])
    wanted = {"a": (4,), "b": (4,), "c": (2,), "d": (2,)}
    with pytest.raises(
        ValueError,
        match=r"^here: expected a of shape \(4,\), got \(3,\); b of shape .*; c of dtype .*, got "
        r"int64; d of numbers that float32 holds, got larger ones$",
    ):
        files.fitted("here", "all", found, wanted, FLOAT32)
    kept = files.fitted("here", "all", found, {"d": (2,)}, FLOAT64, others="abc")["d"]
    np.testing.assert_array_equal(kept, large)
    with pytest.raises(ValueError, match=r"^here: expected d of numbers that bfloat16 holds, got"):
        files.fitted("here", "all", found, {"d": (2,)}, BFLOAT16, others="abc")
    both: dict[str, tuple[int, ...]] = {"a": (3,), "d": (2,)}
    kinds = files.fitted("here", "all", found, both, FLOAT16, others="bc", apart={"d": FLOAT64})
    assert {name: x.dtype for name, x in kinds.items()} == {"a": FLOAT16, "d": FLOAT64}


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "a_library", None)
    with pytest.raises(
        ImportError,
        match=r"^the page: expected the library a_library, got none that can be imported \(.*\); "
        r'install it with python -m pip install "nattn\[explain\]"$',
    ) as caught:
        optional.require("a_library.inside", "explain", "the page")
    assert caught.value.name == "a_library"
