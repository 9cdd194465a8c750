"""The page: one HTML file that needs nothing from elsewhere, made from templates.

The templates lie in ``templates``: the whole page with its CSS, and the parts of a chapter. They
escape what they are given, except where it is named HTML here.
"""

from __future__ import annotations

import html
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from ... import __version__
from ..measure import processors
from .drawing import Array, Panel, size

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)

text = html.escape
"""Applied to text from outside that a chapter puts into its own HTML, without exception."""


@dataclass(frozen=True)
class Step:
    """One chapter of the page.

    Attributes
    ----------
    key : str
        Its anchor.
    title : str
        Its heading, HTML.
    parts : tuple of str
        HTML, in order.
    panels : tuple of Panel
        The pictures in `parts`, to be written as files too.
    style : str
        CSS that it needs beside that of the page.
    """

    key: str
    title: str
    parts: tuple[str, ...]
    panels: tuple[Panel, ...]
    style: str = ""


def _part(name: str, *arguments: Any) -> str:
    """Return what a macro of ``parts.html`` makes of its arguments."""
    return str(getattr(_TEMPLATES.get_template("parts.html").module, name)(*arguments))


def paragraph(content: str) -> str:
    """Return a paragraph of HTML."""
    return _part("paragraph", content)


def figure(panels: Sequence[Panel], caption: str) -> str:
    """Return pictures with a caption of HTML; side by side where there is room."""
    return _part("figure", panels, caption)


def formula(latex: str) -> str:
    """Return a formula, given in LaTeX, on a line of its own, as MathML."""
    return _part("formula", _mathml(latex, "block"))


def inline(latex: str) -> str:
    """Return a formula within a line."""
    return _mathml(latex, "inline")


def _mathml(latex: str, display: str) -> str:
    from latex2mathml.converter import convert

    made: str = convert(latex, display=display)
    return made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def similarities(sentences: Sequence[str], alike: Array) -> str:
    """Return a numbered list of sentences and a table of how alike they are.

    Parameters
    ----------
    sentences : sequence of str
        N of them, plain text.
    alike : ndarray
        ``(N, N)``, cosines.
    """
    return _part("similarities", sentences, alike.tolist())


# One of many pictures, chosen without a script

LABEL = 74
"""Pixels for the words beside a picture."""


def choices(
    names: Sequence[str],
    pictures: Sequence[str],
    about: Sequence[str],
    words: Sequence[str],
    columns: int,
    first: int,
) -> str:
    """Return small pictures of heads to choose from, and the chosen one, large.

    Parameters
    ----------
    names : sequence of str
        One for each head, plain text.
    pictures : sequence of str
        Addresses of pictures with ``len(words)`` pixels on each side.
    about : sequence of str
        HTML that is shown with the chosen one.
    words : sequence of str
        Plain text, for both axes.
    columns : int
        Heads of a layer.
    first : int
        Which one is chosen at first.
    """
    cell = min(24.0, max(13.0, 250 / len(words)))  # fits a phone, unless words became illegible
    shown = [word if len(word) <= 11 else word[:10] + "…" for word in words]
    style = size(LABEL + cell * len(words) + 1)
    return _part("choices", names, pictures, about, shown, columns, first, LABEL, cell, style)


def choices_style(count: int) -> str:
    """Return the CSS that shows the chosen one of `count` heads."""
    return _part("choices_style", count)


# The whole

TITLE = "Self-attention, step by step"


def page(steps: Sequence[Step]) -> str:
    """Return the whole page.

    Parameters
    ----------
    steps : sequence of Step
        The chapters.
    """
    made_on = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, "
        f"{platform.system()} {platform.machine()}, {processors()} processors"
    )
    return _TEMPLATES.get_template("page.html").render(
        title=TITLE, steps=steps, version=__version__, made_on=made_on
    )
