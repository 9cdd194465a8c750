"""nattn.applications.demo: attention is non-local means, and it denoises."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from cases import gaussian

from nattn.applications import demo
from nattn.applications.demo import DemoError, Settings, Similarity, States


def nonlocal_means(image: demo.Array, sigma: float, strength: float, side: int) -> demo.Array:
    """Write non-local means down as its definition has it, pixel by pixel."""
    height, width, channels = image.shape
    r = side // 2
    padded = np.pad(image, ((r, r), (r, r), (0, 0)), mode="reflect")
    places = [(y, x) for y in range(height) for x in range(width)]
    patch = {(y, x): padded[y : y + side, x : x + side] for y, x in places}
    D = side * side * channels
    h2 = (strength * sigma) ** 2 * D
    total = np.zeros_like(padded)
    count = np.zeros_like(padded)
    for y, x in places:
        mean, weights = np.zeros((side, side, channels)), 0.0
        for other in places:
            distance = np.square(patch[y, x] - patch[other]).sum()
            if other == (y, x):
                distance = 2 * sigma**2 * D
            weight = np.exp(-distance / h2)
            mean += weight * patch[other]
            weights += weight
        total[y : y + side, x : x + side] += mean / weights
        count[y : y + side, x : x + side] += 1
    inside = slice(r, r + height), slice(r, r + width)
    result: demo.Array = total[inside] / count[inside]
    return result


def test_examples() -> None:
    assert doctest.testmod(demo).failed == 0


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_nonlocal_means(backend: str, side: int, channels: int) -> None:
    image = np.random.default_rng(0).random((7, 9, channels))
    got = demo.denoise(image, 0.2, strength=0.9, patch=side, backend=backend)
    np.testing.assert_allclose(got, nonlocal_means(image, 0.2, 0.9, side), rtol=0, atol=1e-12)


def test_patches_and_paste() -> None:
    image = gaussian(6, 8, 3)
    rows = demo.patches(image, 5)
    assert rows.shape == (48, 75)
    assert (rows[:, 36:39] == image.reshape(48, 3)).all()  # the middle of a patch is its pixel
    assert (rows[8 + 1].reshape(5, 5, 3)[1:, 1:] == image[:4, :4]).all()
    np.testing.assert_allclose(demo.paste(rows, image.shape, 5), image, rtol=1e-6)


def test_every_pixel_attends_to_all_others_and_not_to_itself(backend: str) -> None:
    x = gaussian(70, 5, dtype="f8")
    s = Similarity.of(x, 0.5, 1.0)
    before, behind = demo.attend_to_others(s, np.empty((2, 70, 5)), backend)
    weight = np.exp(s.scale * x @ x.T + s.bias)
    np.fill_diagonal(weight, 0.0)
    np.testing.assert_allclose(np.logaddexp(before.lse, behind.lse), np.log(weight.sum(1)))
    expected = (weight @ x) / weight.sum(1, keepdims=True)
    np.testing.assert_allclose(demo.merge(before, behind), expected, atol=1e-12)
    assert before.lse[0] == behind.lse[-1] == -np.inf


def test_merge_leaves_a_state_alone_that_meets_an_empty_one() -> None:
    state = States(gaussian(4, 3), np.array([0.0, -1e30, 1e30, 5.0], np.float32))
    empty = States(np.zeros((4, 3), np.float32), np.full(4, -np.inf, np.float32))
    assert (demo.merge(state, empty) == state.out).all()
    assert (demo.merge(empty, state) == state.out).all()


def test_psnr() -> None:
    truth = np.full((4, 4, 3), 0.5)
    assert demo.psnr(truth + 0.1, truth) == pytest.approx(20.0)
    assert demo.psnr(truth + 9.0, truth) == pytest.approx(-20 * np.log10(0.5))  # clipped at white


def test_a_run(backend: str, tmp_path: Path) -> None:
    settings = Settings(size=2500, out=tmp_path / "x.png", backend=backend)
    report = demo.run(settings)
    assert report.shape == (54, 46)
    assert report.after > report.before + 2.5
    assert 0 < report.error <= report.allowed
    assert report.dense == 4 * 2484**2
    assert report.seconds > 0
    assert (report.peak is None) == (backend == "reference")
    for word in ("2,484", "dB", "GFLOP/s", "MB", "reference"):
        assert word in report.text()
    with PIL.Image.open(settings.out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 3 * 46
        corner = np.asarray(picture.convert("RGB"))
    assert len(np.unique(corner.reshape(-1, 3), axis=0)) > 1000  # photographs, no blank page


def test_seeds(tmp_path: Path) -> None:
    runs = [
        demo.run(Settings(size=900, seed=seed, out=tmp_path / "x.png", backend="reference"))
        for seed in (1, 1, 2)
    ]
    assert runs[0].after == runs[1].after != runs[2].after


def test_the_check_finds_a_wrong_row() -> None:
    s = Similarity.of(gaussian(200, 12) / 4, 0.1, 0.4)
    states = demo.attend_to_others(s, np.empty((2, 200, 12), np.float32), "reference")
    merged = demo.merge(*states, States(s.x, s.own))
    rows = np.array([3, 77, 199])
    error, allowed = demo.check_rows(s, merged, rows)
    assert error <= allowed
    merged[77, 5] += 2 * allowed
    error, allowed = demo.check_rows(s, merged, rows)
    assert error > allowed


def test_a_picture_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "grey.png"
    PIL.Image.fromarray(np.arange(0, 240, dtype=np.uint8).reshape(12, 20)).save(path)
    image = demo.load(path, 10_000, 4)
    assert image.shape == (12, 20, 3)  # not blown up
    assert image.dtype == np.float32
    assert image[0, 5] == pytest.approx([5 / 255] * 3)
    assert demo.load(path, 60, 4).shape == (6, 10, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image": Path("no/such.png")}, "image: no file"),
        ({"image": Path(__file__)}, "image: cannot read .* as a picture"),
        ({"image": Path(__file__).parent}, "image: cannot read"),
        ({"size": 4}, "image: 2 x 2 pixels are too few"),
        ({"size": 0}, "size: expected a number of pixels from 1, got 0"),
        ({"patch": 4}, "patch: expected an odd number from 1, got 4"),
        ({"patch": -1}, "patch: expected"),
        ({"noise": 0.0}, "noise: expected a number above 0"),
        ({"noise": float("nan")}, "noise: expected a number above 0"),
        ({"strength": float("inf")}, "strength: expected a number above 0"),
        ({"seed": -1}, "seed: expected"),
        ({"out": Path("no/such/folder/x.png")}, "out: no folder"),
    ],
)
def test_bad_settings(changed: dict[str, object], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        demo.run(Settings(**({"size": 900, "backend": "reference"} | changed)))  # type: ignore[arg-type]


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(DemoError, match="out: cannot write"):
        demo.run(Settings(size=900, backend="reference", out=tmp_path / "x.png"))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DemoError, match=r"pip install 'nattn\[demo\]'"):
        demo.run(Settings())
