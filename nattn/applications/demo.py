"""Denoise a photograph by exact attention over all its pixels.

Non-local means [1]_ replaces every pixel by a mean over the whole picture, in which another pixel
``j`` has weight ``exp(-|patch_i - patch_j|^2 / h^2)``: places that look alike help each other,
however far apart they are. That is attention. With ``q = k = patches``::

    -|q - k|^2 / h^2  =  (2 / h^2) dot(q, k)  -  |k|^2 / h^2  -  |q|^2 / h^2
                         scale * dot(q, k)       bias[j]         the same for all j: cancels

A picture of 60,000 pixels has 3.6e9 scores, 14 GB in float32. nattn never holds them.

References
----------
.. [1] A. Buades, B. Coll, J.-M. Morel, "A non-local algorithm for image denoising", CVPR 2005.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import backends
from ..api import functional
from ..api.merging import merge_states
from ..backends.error_budget import error_budget
from ..call.progress import Progress
from ..vectors.dtypes import FLOAT32
from .measure import PeakMemory
from .progress_bar import ProgressBar

Array = NDArray[Any]

SAMPLED_ROWS = 16
"""Rows that are compared with the reference."""


class DemoError(Exception):
    """Something that a person can put right; the text says what."""


@dataclass(frozen=True)
class Settings:
    """What to denoise, and how.

    Attributes
    ----------
    image : Path or None
        A picture, or None for the sample photograph that matplotlib ships.
    size : int
        Pixels to attend over: the picture is scaled to about so many, keeping its shape.
    noise : float
        Standard deviation of the noise that is added, of 255.
    strength : float
        ``h`` in units of the noise times the root of the patch's length: how much patches may
        differ and still help each other.
    patch : int
        Side of the square patches, odd.
    seed : int
        Seed of the noise and of the sampled rows.
    out : Path
        The PNG to write: original, noisy and denoised side by side.
    backend : str
        As `backend` of `nattn.attention`.
    """

    image: Path | None = None
    size: int = 60_000
    noise: float = 25.0
    strength: float = 0.42
    patch: int = 5
    seed: int = 0
    out: Path = Path("nattn-demo.png")
    backend: str = "auto"


class States(NamedTuple):
    """Attention of every pixel to some of the others: what merging needs."""

    out: Array
    lse: Array


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Attributes
    ----------
    shape : tuple of int
        Height and width of the picture.
    before, after : float
        PSNR of the noisy and of the denoised picture, dB.
    seconds : float
        Time of the attention.
    gflops : float
        Speed of the attention, both products over all pairs of pixels, GFLOP/s.
    peak : float or None
        The processor's FMA peak measured around it, GFLOP/s; None without the cpu backend.
    memory : PeakMemory
        Memory of the attention beyond inputs and outputs.
    dense : int
        Bytes of the dense matrix of scores.
    error, allowed : float
        Largest error of the sampled rows against the reference, and what rounding may cause.
    """

    shape: tuple[int, int]
    before: float
    after: float
    seconds: float
    gflops: float
    peak: float | None
    memory: PeakMemory
    dense: int
    error: float
    allowed: float

    def text(self) -> str:
        """Return the report for people."""
        height, width = self.shape
        speed = f"{self.gflops:.0f} GFLOP/s"
        if self.peak is not None:
            share = 100 * self.gflops / self.peak
            speed += f", {share:.0f}% of the processor's FMA peak ({self.peak:.0f} GFLOP/s)"
        lines = {
            "pixels": f"{width} x {height} = {width * height:,}, each attends to all others",
            "PSNR": f"{self.before:.2f} dB noisy, {self.after:.2f} dB denoised "
            f"({self.after - self.before:+.2f} dB)",
            "time": f"{self.seconds:.2f} s",
            "speed": speed,
            "memory": f"{self.memory.bytes / 1e6:.1f} MB beyond inputs and outputs "
            f"({self.memory.method}); the dense matrix needs {self.dense / 1e9:.1f} GB",
            "check": f"{SAMPLED_ROWS} sampled rows against the float64 reference: "
            f"largest error {self.error:.1e} (rounding may cause {self.allowed:.1e})",
        }
        return "\n".join(f"{name:8} {text}" for name, text in lines.items())


# The method


def patches(image: Array, side: int) -> Array:
    """Cut the square patch around each pixel; edges are mirrored.

    Parameters
    ----------
    image : ndarray
        ``(height, width, channels)``.
    side : int
        Odd side of a patch.

    Returns
    -------
    ndarray
        ``(height * width, side * side * channels)``, rows in reading order.
    """
    r = side // 2
    padded = np.pad(image, ((r, r), (r, r), (0, 0)), mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(0, 1))
    return views.transpose(0, 1, 3, 4, 2).reshape(image.shape[0] * image.shape[1], -1)


def paste(rows: Array, shape: tuple[int, ...], side: int) -> Array:
    """Average denoised patches where they overlap, the inverse of `patches`.

    Every pixel lies in up to ``side * side`` patches and becomes the mean of its values in them.

    Parameters
    ----------
    rows : ndarray
        ``(height * width, side * side * channels)``.
    shape : tuple of int
        ``(height, width, channels)``.
    side : int
        Odd side of a patch.

    Returns
    -------
    ndarray
        The picture, of the given shape.
    """
    height, width, channels = shape
    r = side // 2
    total = np.zeros((height + 2 * r, width + 2 * r, channels))
    count = np.zeros((height + 2 * r, width + 2 * r, 1))
    views = rows.reshape(height, width, side, side, channels)
    for y in range(side):
        for x in range(side):
            total[y : y + height, x : x + width] += views[:, :, y, x]
            count[y : y + height, x : x + width] += 1
    inside = slice(r, r + height), slice(r, r + width)
    mean: Array = (total[inside] / count[inside]).astype(rows.dtype)
    return mean


class Similarity(NamedTuple):
    """The patches of a picture, and what turns their dot products into distances.

    The scores ``scale * dot(x_i, x_j) + bias_j`` differ from ``-|x_i - x_j|^2 / h^2`` by
    ``|x_i|^2 / h^2 = -bias_i`` alone.

    Attributes
    ----------
    x : ndarray
        ``(n, D)``: queries, keys and values at once.
    scale : float
        ``2 / h^2``.
    bias : ndarray
        ``(n,)``: ``-|x_j|^2 / h^2``.
    own : ndarray
        ``(n,)``: the score of a pixel for itself.
    """

    x: Array
    scale: float
    bias: Array
    own: Array

    @classmethod
    def of(cls, x: Array, sigma: float, strength: float) -> Similarity:
        """Describe patches with noise of standard deviation `sigma`.

        A pixel's own patch would be its best match by far, with all its noise. So its distance is
        set to that of a second photograph of the same place, ``2 sigma^2`` for each of the ``D``
        numbers. That score is `own`; the attention itself is to the other pixels.
        """
        h2 = (strength * sigma) ** 2 * x.shape[1]
        bias = (-np.square(x, dtype=np.float64).sum(axis=1) / h2).astype(x.dtype)
        return cls(x, 2 / h2, bias, -bias - 2 * sigma**2 * x.shape[1] / h2)

    def first(self, n: int) -> Similarity:
        """Return the first `n` patches alone."""
        return Similarity(self.x[:n], self.scale, self.bias[:n], self.own[:n])


def attend_to_others(
    s: Similarity,
    out: Array,
    backend: str = "auto",
    progress: Progress = lambda fraction: None,
) -> tuple[States, States]:
    """Let every pixel attend to the pixels before it, and to those after it.

    These are two causal calls without the diagonal; the second reads the same arrays backwards.

    Parameters
    ----------
    s : Similarity
        The patches, ``(n, D)``.
    out : ndarray
        ``(2, n, D)``, written.
    backend : str, default "auto"
        As `backend` of `nattn.attention`.
    progress : callable, optional
        Called with the fraction that is done.

    Returns
    -------
    before, behind : States
        Mean patches and log-sum-exps of the scores, in the order of the pixels.
    """
    states = []
    halves = (lambda done: progress(done / 2), lambda done: progress((1 + done) / 2))
    for i, step in enumerate((1, -1)):
        x = s.x[::step]
        _, lse = functional._attend(
            x,
            x,
            x,
            scale=s.scale,
            bias=s.bias[::step],
            causal=True,
            q_offset=-1,  # query i sits on key i - 1: it sees the keys before itself
            return_lse=True,
            out=out[i, ::step],
            backend=backend,
            progress=halves[i],
        )
        states.append(States(out[i], lse[::step]))
    return states[0], states[1]


def merge(*states: States) -> Array:
    """Join attention to disjoint sets of keys into attention to their union.

    Parameters
    ----------
    *states : States
        ``out (n, D)`` and ``lse (n,)``, as `nattn.merge_states` takes them.

    Returns
    -------
    ndarray
        ``(n, D)``.
    """
    return merge_states([state.out for state in states], [state.lse for state in states])[0]


def denoise(
    noisy: Array,
    sigma: float,
    *,
    strength: float = Settings.strength,
    patch: int = Settings.patch,
    backend: str = "auto",
) -> Array:
    """Denoise a picture by attention over all its pixels.

    Parameters
    ----------
    noisy : ndarray
        ``(height, width, channels)``, float32 or float64.
    sigma : float
        Standard deviation of its noise, in the same unit; above 0.
    strength, patch, backend
        As in `Settings`.

    Returns
    -------
    ndarray
        The denoised picture, in `noisy`'s shape and dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nattn.applications.demo import denoise, psnr
    >>> clean = np.tile(np.array([0.2, 0.8], "f4"), (16, 8))[..., None]  # stripes
    >>> noisy = clean + np.random.default_rng(0).normal(0, 0.1, clean.shape).astype("f4")
    >>> psnr(denoise(noisy, 0.1, backend="reference"), clean) > psnr(noisy, clean) + 5
    True
    """
    middle = noisy.mean(dtype=np.float64).astype(noisy.dtype)
    x = patches(noisy - middle, patch)  # same distances, smaller and so more exact scores
    similarity = Similarity.of(x, sigma, strength)
    before, behind = attend_to_others(similarity, np.empty((2, *x.shape), x.dtype), backend)
    own = States(x, similarity.own)
    result: Array = paste(merge(before, behind, own), noisy.shape, patch) + middle
    return result


def psnr(image: Array, truth: Array) -> float:
    """Return the peak signal-to-noise ratio of a picture with values in [0, 1], in dB."""
    error = np.clip(image, 0.0, 1.0).astype(np.float64) - truth
    return -10 * math.log10(max(float(np.mean(np.square(error))), 1e-30))


def check_rows(s: Similarity, merged: Array, rows: Array) -> tuple[float, float]:
    """Compare rows of the merged attention with the reference.

    The reference attends to all other pixels in one dense float64 call with a mask.

    Parameters
    ----------
    s : Similarity
        The patches.
    merged : ndarray
        ``(n, D)``, what `merge` made of them.
    rows : ndarray of int
        Rows to compare.

    Returns
    -------
    error, allowed : float
        The largest difference, and the largest that rounding can explain.
    """
    x = s.x.astype(np.float64)
    bias = s.bias.astype(np.float64)
    out, lse = functional.attention(
        x[rows],
        x,
        x,
        scale=float(s.x.dtype.type(s.scale)),
        bias=bias,
        mask=np.arange(len(x)) != rows[:, None],
        return_lse=True,
        backend="reference",
    )
    expected = merge(States(out, lse), States(x[rows], s.own[rows].astype(np.float64)))
    error = np.abs(merged[rows] - expected).max(axis=1)
    # The largest score without cancellation: |scale| |x_i| |x_j| + |bias_j|
    length = np.sqrt(-bias * s.scale / 2) * 2 / s.scale
    longest = np.abs(s.scale) * length[rows] * length.max() + np.abs(bias).max()
    largest = np.abs(x).max()
    budget = error_budget(s.x.dtype, len(x), longest, largest, x.shape[1])
    # Either state has an error of budget.out, and the weights that of two lse
    allowed = budget.out + 2 * largest * (2 * budget.lse)
    worst = (error / allowed).argmax()
    return float(error[worst]), float(allowed[worst])


# The picture


def load(path: Path | None, pixels: int, smallest: int) -> Array:
    """Read a picture and scale it to about so many pixels.

    Parameters
    ----------
    path : Path or None
        A file that Pillow can read, or None for matplotlib's sample photograph.
    pixels : int
        Pixels wanted; a picture with fewer stays as it is.
    smallest : int
        Smallest height and width that the method can use.

    Returns
    -------
    ndarray
        ``(height, width, 3)`` float32 in [0, 1].

    Raises
    ------
    DemoError
        If there is no picture, or it is too small.
    """
    image_module, sample = _libraries()
    try:
        with image_module.open(sample if path is None else path) as file:
            image = file.convert("RGB")
    except FileNotFoundError:
        raise DemoError(f"image: no file {path or sample}") from None
    except (OSError, ValueError, image_module.DecompressionBombError) as error:
        raise DemoError(f"image: cannot read {path or sample} as a picture: {error}") from None
    factor = math.sqrt(pixels / (image.width * image.height))
    if factor < 1:
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        image = image.resize(size, image_module.Resampling.LANCZOS)
    if min(image.size) < smallest:
        raise DemoError(
            f"image: {image.width} x {image.height} pixels are too few for this patch: "
            f"expected at least {smallest} x {smallest}"
        )
    return np.asarray(image, np.float32) / 255


def _libraries() -> tuple[Any, Path]:
    try:
        import matplotlib
        import PIL.Image
    except ImportError as error:
        raise DemoError(
            f"{error.name} is not installed; the demo needs: python -m pip install 'nattn[demo]'"
        ) from None
    return PIL.Image, Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")


def save(path: Path, pictures: dict[str, Array]) -> None:
    """Write pictures side by side to one PNG, each under its title, pixel for pixel.

    Parameters
    ----------
    path : Path
        The file.
    pictures : dict
        Title to picture, ``(height, width, 3)`` in [0, 1], all of one shape.

    Raises
    ------
    DemoError
        If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width, _ = next(iter(pictures.values())).shape
    zoom = max(1, round(440 / width))  # whole, so that pixels stay square and sharp
    gap, top, dpi = 12, 44, 100
    total = (len(pictures) * (zoom * width + gap) + gap, zoom * height + top + gap)
    figure = Figure(figsize=(total[0] / dpi, total[1] / dpi), dpi=dpi)
    FigureCanvasAgg(figure)
    for i, (title, picture) in enumerate(pictures.items()):
        left = gap + i * (zoom * width + gap)
        box = (left, gap, zoom * width, zoom * height)
        scale = (total[0], total[1], total[0], total[1])
        axes = figure.add_axes(tuple(a / b for a, b in zip(box, scale, strict=True)))
        axes.imshow(np.clip(picture, 0, 1), interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(title, fontsize=13)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DemoError(f"out: cannot write {path}: {error.strerror or error}") from None


# The run


def run(settings: Settings) -> Report:
    """Denoise a photograph, write the picture and measure time, memory and error.

    Parameters
    ----------
    settings : Settings
        What to denoise, and how.

    Returns
    -------
    Report
        Its results.

    Raises
    ------
    DemoError
        If a setting or a file is at fault.
    """
    _check(settings)
    clean = load(settings.image, settings.size, smallest=settings.patch // 2 + 2)
    rng = np.random.default_rng(settings.seed)
    sigma = settings.noise / 255
    noisy = clean + rng.normal(0, sigma, clean.shape).astype(np.float32)

    middle = noisy.mean(dtype=np.float64).astype(noisy.dtype)
    x = patches(noisy - middle, settings.patch)
    similarity = Similarity.of(x, sigma, settings.strength)
    n, D = x.shape
    out = np.zeros((2, n, D), np.float32)
    out.fill(0.0)  # resident now, so that it does not count as memory of the attention
    with ProgressBar("compiling, once"):
        attend_to_others(similarity.first(64), out[:, :64], settings.backend)

    peak = [_fma_peak(settings.backend)]
    with ProgressBar(f"attention over {n:,} pixels") as progress, PeakMemory() as memory:
        start = time.perf_counter()
        states = attend_to_others(similarity, out, settings.backend, progress)
        seconds = time.perf_counter() - start
    peak.append(_fma_peak(settings.backend))

    merged = merge(*states, States(x, similarity.own))
    denoised = paste(merged, clean.shape, settings.patch) + middle
    rows = np.sort(rng.choice(n, min(SAMPLED_ROWS, n), replace=False))
    error, allowed = check_rows(similarity, merged, rows)
    report = Report(
        shape=(clean.shape[0], clean.shape[1]),
        before=psnr(noisy, clean),
        after=psnr(denoised, clean),
        seconds=seconds,
        gflops=2 * n * (n - 1) * (D + D) / seconds / 1e9,
        peak=None if None in peak else sum(p for p in peak if p is not None) / len(peak),
        memory=memory,
        dense=n * n * FLOAT32.itemsize,
        error=error,
        allowed=allowed,
    )
    save(
        settings.out,
        {
            "original": clean,
            f"with noise: {report.before:.1f} dB": noisy,
            f"attention over {n:,} pixels: {report.after:.1f} dB": denoised,
        },
    )
    return report


def _check(settings: Settings) -> None:
    if settings.patch < 1 or settings.patch % 2 == 0:
        raise DemoError(f"patch: expected an odd number from 1, got {settings.patch}")
    if settings.size < 1:
        raise DemoError(f"size: expected a number of pixels from 1, got {settings.size}")
    for name in ("noise", "strength"):
        value = getattr(settings, name)
        if not (0 < value < math.inf):
            raise DemoError(f"{name}: expected a number above 0, got {value}")
    if settings.seed < 0:
        raise DemoError(f"seed: expected a number from 0, got {settings.seed}")
    if not settings.out.parent.is_dir():
        raise DemoError(f"out: no folder {settings.out.parent}")


def _fma_peak(backend: str) -> float | None:
    if backend == "reference":
        return None
    return float(backends.load("cpu").fma_peak("float32"))
