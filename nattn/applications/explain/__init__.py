"""Explain self-attention on one illustrated page, with figures computed on the spot.

Each step has a formula and a figure that nattn computes while the page is made. The last one shows
a real model, all-MiniLM-L6-v2, reading a sentence of the reader's. The page is a single HTML file
that needs nothing from elsewhere. The figures lie beside it as PNGs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ...call.progress import Progress, part_of
from ...nn.files import replaced
from ..progress_bar import ProgressBar

if TYPE_CHECKING:
    from ..minilm import MiniLM
    from .page import Step

SENTENCE = "She played the keys of the piano and lost the keys of her car."
"""It has one word in two meanings: does the model tell them apart by their context?"""

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Lengths at which time and memory are measured."""


class ExplainError(Exception):
    """Something that a person can put right; the text says what."""


@dataclass(frozen=True)
class Settings:
    """What to put on the page, and where.

    Attributes
    ----------
    sentence : str
        What the real model reads.
    output : Path
        The HTML file. The PNGs go into a folder beside it, with the same name and "-figures".
    model : bool
        Whether to end with the real model.
    learning : bool
        Whether to train the small layers: the slowest step.
    tokens : int
        Length of the long sequence, 1536 or more.
    sizes : tuple of int
        Lengths at which time and memory are measured: two or more, ascending.
    """

    sentence: str = SENTENCE
    output: Path = Path("nattn-explain.html")
    model: bool = True
    learning: bool = True
    tokens: int = 32_768
    sizes: tuple[int, ...] = SIZES

    @property
    def folder(self) -> Path:
        """Where the PNGs go."""
        return self.output.with_name(self.output.stem + "-figures")


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes
    ----------
    output : Path
        The page.
    size : int
        Its bytes.
    figures : tuple of Path
        The PNGs.
    seconds : dict
        Time of each step, by its name, in the order of the page.
    """

    output: Path
    size: int
    figures: tuple[Path, ...]
    seconds: dict[str, float]

    def text(self) -> str:
        """Return the report for people."""
        wide = max(10, *(len(name) for name in self.seconds))
        lines = [f"{name:{wide}} {seconds:6.1f} s" for name, seconds in self.seconds.items()]
        lines.append(f"{'total':{wide}} {sum(self.seconds.values()):6.1f} s")
        lines.append(f"{'page':{wide}} {self.output} ({self.size / 1e6:.1f} MB)")
        folder = self.figures[0].parent
        lines.append(f"{'figures':{wide}} {folder}{os.sep} ({len(self.figures)} PNGs)")
        return "\n".join(lines)


def run(settings: Settings) -> Report:
    """Compute everything and write the page.

    Parameters
    ----------
    settings : Settings
        What to do.

    Returns
    -------
    Report
        What was written.

    Raises
    ------
    ExplainError
        If a setting, a file or a library is at fault: before any work. If writing fails, some of
        the figures may be new, each of them whole, and the page is unchanged.
    """
    model = _check(settings)
    from threadpoolctl import threadpool_limits

    from . import drawing, lengths, page, steps

    # with each chapter a guess at its time, relative to the others: for the progress bar alone
    chapters: list[tuple[str, float, Callable[[Progress], Step]]] = [
        ("average", 1, lambda progress: steps.average()),
        ("projections", 1, lambda progress: steps.projections()),
        ("scale", 2, lambda progress: steps.scaling()),
        ("softmax", 2, lambda progress: steps.softmax()),
        ("causal", 2, lambda progress: steps.causal()),
        ("positions", 2, lambda progress: steps.positions()),
        ("heads", 1, lambda progress: steps.heads()),
        ("price", 8, lambda progress: lengths.price(settings.sizes)),
        ("long", 8, lambda progress: lengths.long(settings.tokens)),
    ]
    if settings.learning:
        chapters.append(("learning", 40, lengths.learned))
    if model is not None:
        from . import sentence

        known = model
        chapters.append(("model", 6, lambda progress: sentence.chapter(known, settings.sentence)))
    seconds: dict[str, float] = {}
    made: list[Step] = []
    total = sum(cost for _, cost, _ in chapters)
    with ProgressBar("explaining") as bar, drawing.style():
        done = 0.0
        for name, cost, chapter in chapters:
            progress = part_of(bar, done / total, (done + cost) / total)
            progress(0.0)
            start = time.perf_counter()
            # Most products here are too small to gain from threads of OpenBLAS, which wait for each
            # other where other processes are busy: twenty times slower
            with threadpool_limits(None if name == "price" else 1, "blas"):
                made.append(chapter(progress))
            seconds[name] = time.perf_counter() - start
            done += cost
    start = time.perf_counter()
    whole = page.page(made).encode("utf-8")
    pictures = {panel.name: panel.png for step in made for panel in step.panels}
    written = _write(settings, whole, pictures)
    seconds["writing"] = time.perf_counter() - start
    return Report(settings.output, len(whole), written, seconds)


def _check(settings: Settings) -> MiniLM | None:
    """Raise ExplainError for what would fail later, before any work; return the model."""
    if not settings.sentence.strip():
        raise ExplainError("sentence: expected words, got none")
    if settings.tokens < 1536:
        raise ExplainError(f"tokens: expected 1536 or more, got {settings.tokens}")
    sizes = settings.sizes
    if len(sizes) < 2 or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
        raise ExplainError(f"sizes: expected two or more numbers, rising from 1, got {sizes}")
    output, folder = settings.output, settings.folder
    if not output.parent.is_dir():
        raise ExplainError(f"output: no folder {output.parent}")
    if output.is_dir() or not output.name:
        raise ExplainError(f"output: expected a file, got the folder {output}")
    if folder.exists() and not folder.is_dir():
        raise ExplainError(f"output: the figures need the folder {folder}, but that is a file")
    for place in (output.parent, folder):
        if place.exists() and not os.access(place, os.W_OK):
            raise ExplainError(f"output: cannot write into {place}")
    try:
        import jinja2  # noqa: F401
        import latex2mathml.converter  # noqa: F401
        import matplotlib  # noqa: F401
        import PIL.Image  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        raise ExplainError(
            f"{error.name} is not installed; the page needs: python -m pip install 'nattn[explain]'"
        ) from None
    if not settings.model:
        return None
    from ..minilm import MiniLM

    hint = "; or leave the real model out with --no-model"
    try:
        model = MiniLM.load()
    except ImportError as error:
        raise ExplainError(f"model: {error}{hint}") from None
    except (OSError, ValueError) as error:
        raise ExplainError(f"model: {error}{hint}") from error
    try:
        model.tokenize(settings.sentence)
    except ValueError as error:
        raise ExplainError(f"sentence: {error}") from None
    return model


def _write(settings: Settings, whole: bytes, pictures: dict[str, bytes]) -> tuple[Path, ...]:
    """Write the files, each of them whole or not at all, and the page last."""
    try:
        settings.folder.mkdir(exist_ok=True)
        paths = [settings.folder / f"{name}.png" for name in pictures]
        for path, picture in zip(paths, pictures.values(), strict=True):
            with replaced(path) as new:
                new.write_bytes(picture)
        with replaced(settings.output) as new:
            new.write_bytes(whole)
    except OSError as error:
        name = error.filename or settings.output
        raise ExplainError(f"output: cannot write {name}: {error.strerror or error}") from None
    return tuple(paths)
