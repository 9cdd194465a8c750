"""Figures of the page in one style, drawn by matplotlib as SVG for the page and as PNG."""

from __future__ import annotations

import base64
import html
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WIDTH = 330
"""Width of a panel in CSS pixels: it fits a phone of 360 without smaller text."""

INK = "#20262d"
SOFT = "#6a737d"
BLUE = "#3a7bbf"
ORANGE = "#c8751c"
GREEN = "#3b925a"
RED = "#c4504a"
VIOLET = "#8763b5"
SERIES = (BLUE, ORANGE, GREEN, VIOLET, RED)
"""Middle tones, visible on white and on black."""

_ON_THE_PAGE = {INK: "currentColor", SOFT: "var(--soft)"}
"""These colours follow the page, light or dark."""

_STYLE: dict[str, Any] = {
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": None,  # set below: it needs cycler
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: it can be read out, searched and zoomed
    "text.color": INK,
    "text.parse_math": False,  # a sentence may hold a dollar
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 10.5,
}


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes
    ----------
    name : str
        Name of its file, without the ending.
    alt : str
        What it shows, for readers who cannot see it.
    svg : str
        The element for the page.
    png : bytes
        The same picture as a file.
    """

    name: str
    alt: str
    svg: str
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """Draw in the page's style within the block."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(_STYLE | {"axes.prop_cycle": cycler(color=SERIES)}):
        yield


def canvas(width: float = WIDTH, height: float = 230, **options: Any) -> tuple[Any, Any]:
    """Return a new figure, measured in CSS pixels, and its axes.

    Parameters
    ----------
    width, height : float
        Its size.
    **options
        For ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), layout="constrained", dpi=72)
    return figure, figure.subplots(**options)


def finish(figure: Any, name: str, alt: str) -> Panel:
    """Render a figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        As `canvas` makes it.
    name : str
        Unlike that of any other panel of the page.
    alt : str
        What it shows.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    svg, png = io.StringIO(), io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": name}):
        # the font may lack the script of a sentence; the page uses the reader's fonts
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        # `savefig` would run the layout again for each format, and draw twice
        figure.dpi = 72
        agg = FigureCanvasAgg(figure)
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
        figure.dpi = 144
        figure.set_facecolor("white")
        figure.set_canvas(agg)
        agg.print_png(png, metadata={"Software": None})
    return Panel(name, alt, _for_the_page(svg.getvalue(), alt), png.getvalue())


def _for_the_page(svg: str, alt: str) -> str:
    """Turn matplotlib's file into an element without header, fixed size and unused ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)
    assert box is not None
    width = float(box[1].split()[2])
    used = set(re.findall(r"#([\w-]+)", rest))
    rest = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", rest)
    for drawn, shown in _ON_THE_PAGE.items():
        rest = rest.replace(drawn, shown)
    rest = re.sub(r"\n\s*", "\n", rest)
    label = html.escape(alt)
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box[1]}" '
        f'style="{size(width)}" role="img" aria-label="{label}">{rest.strip()}'
    )


def size(pixels: float) -> str:
    """Return the CSS width of a picture: on a phone it shrinks a little, and else scrolls."""
    least = f";min-width:{0.92 * pixels:.0f}px" if pixels > 360 else ""
    return f"width:{pixels:.0f}px{least}"


# What is drawn more than once


def heat(
    axes: Any,
    matrix: Array,
    *,
    signed: bool = False,
    limit: float | None = None,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    frame: bool = True,
) -> Any:
    """Draw a matrix as colours: from light to dark, or red and blue for both signs.

    Parameters
    ----------
    axes : matplotlib axes
        Where.
    matrix : ndarray
        ``(rows, columns)``; NaN stays empty.
    signed : bool
        Whether 0 is the middle of the colours.
    limit : float, optional
        The value of the strongest colour; the largest magnitude by default.
    rows, columns : sequence of str, optional
        Names beside the matrix, one for each row or column.
    frame : bool
        Whether to draw a line around it.
    """
    largest = float(np.nanmax(np.abs(matrix), initial=0.0)) if limit is None else limit
    image = axes.imshow(
        matrix,
        cmap="RdBu" if signed else "Blues",
        vmin=-largest if signed else 0.0,
        vmax=largest or 1.0,
        interpolation="none",
        aspect="auto",
    )
    axes.spines[:].set_visible(frame)
    axes.tick_params(length=0)
    if rows is None:
        axes.set_yticks([])
    else:
        axes.set_yticks(range(len(rows)), rows)
    if columns is None:
        axes.set_xticks([])
    else:
        axes.set_xticks(range(len(columns)), columns, rotation=90)
        axes.xaxis.tick_top()
    return image


_SMALL = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}


def decades(axis: Any, unit: str = "") -> None:
    """Label the powers of ten of a logarithmic axis, with multiples of a unit if one is given."""
    from matplotlib.ticker import NullLocator

    def label(value: float, _: int) -> str:
        for size, name in _UNITS.get(unit, ()):
            if value >= 0.99 * size:
                return f"{value / size:.0f} {name}"
        exponent = round(math.log10(value))
        if -3 <= exponent <= 3:
            return f"{value:g}"
        return f"10{str(exponent).translate(_SMALL)}"

    axis.set_major_formatter(label)
    axis.set_minor_locator(NullLocator())


def scale(figure: Any, image: Any, axes: Any, label: str) -> None:
    """Draw the colour bar of a `heat`."""
    bar = figure.colorbar(image, ax=axes, label=label, fraction=0.06, pad=0.03)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)


# Small pictures: one pixel for each number


def pixels(matrix: Array) -> str:
    """Return a matrix as the address of a picture with one pixel for each element.

    Parameters
    ----------
    matrix : ndarray
        ``(rows, columns)`` in [0, 1]: from transparent to full colour.

    Returns
    -------
    str
        ``data:image/png;base64,...``.
    """
    import PIL.Image

    colours = np.empty((*matrix.shape, 4), np.uint8)
    colours[..., :3] = (20, 80, 150)
    colours[..., 3] = np.round(255 * np.clip(matrix, 0.0, 1.0))
    file = io.BytesIO()
    PIL.Image.fromarray(colours).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
