"""The page: formulas in MathML, and one HTML file that needs nothing from elsewhere."""

from __future__ import annotations

import html
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ... import __version__
from ..measure import processors
from .drawing import Panel, size

text = html.escape
"""What came from outside goes through this, always."""


@dataclass(frozen=True)
class Step:
    """One chapter of the page.

    Attributes
    ----------
    key : str
        Its anchor.
    title : str
        Its heading.
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


def paragraph(content: str) -> str:
    """Return a paragraph of HTML."""
    return f"<p>{content}</p>"


def figure(panels: Sequence[Panel], caption: str) -> str:
    """Return pictures with what was measured in them; side by side where there is room."""
    drawn = "".join(f'<div class="panel">{panel.svg}</div>' for panel in panels)
    return f'<figure><div class="panels">{drawn}</div><figcaption>{caption}</figcaption></figure>'


def formula(latex: str) -> str:
    """Return a formula, given in LaTeX, on a line of its own, as MathML."""
    return f'<div class="formula">{_mathml(latex, "block")}</div>'


def inline(latex: str) -> str:
    """Return a formula within a line."""
    return _mathml(latex, "inline")


def _mathml(latex: str, display: str) -> str:
    from latex2mathml.converter import convert

    made: str = convert(latex, display=display)
    return made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML cells; the first of each row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


# One of many pictures, chosen without a script

LABEL = 74
"""Pixels that the words beside a picture may take."""


def choices(
    names: Sequence[str],
    pictures: Sequence[str],
    about: Sequence[str],
    words: Sequence[str],
    columns: int,
    first: int,
) -> str:
    """Return pictures of heads, small, to choose from, and the chosen one, large.

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
    grid = ["<span></span>", *(f"<span>{head + 1}</span>" for head in range(columns))]
    for i, (name, picture) in enumerate(zip(names, pictures, strict=True)):
        if i % columns == 0:
            grid.append(f"<span>{i // columns + 1}</span>")
        chosen = " checked" if i == first else ""
        grid.append(
            f'<label title="{text(name)}"><input type="radio" name="head" id="head-{i}"{chosen}>'
            f'<img alt="{text(name)}" src="{picture}"></label>'
        )
    cell = min(24.0, max(13.0, 250 / len(words)))  # as a phone can show it, down to what is legible
    side = cell * len(words)
    shown = [text(word if len(word) <= 11 else word[:10] + "…") for word in words]
    axes = "".join(
        f'<text x="{LABEL - 5}" y="{LABEL + cell * (i + 0.5):.1f}" text-anchor="end" '
        f'dominant-baseline="central">{word}</text>'
        f'<text transform="translate({LABEL + cell * (i + 0.5):.1f} {LABEL - 5}) rotate(-90)" '
        f'dominant-baseline="central">{word}</text>'
        for i, word in enumerate(shown)
    )
    maps = "".join(
        f'<image class="m{i}" x="{LABEL}" y="{LABEL}" width="{side:.1f}" height="{side:.1f}" '
        f'preserveAspectRatio="none" href="{picture}"/>'
        for i, picture in enumerate(pictures)
    )
    whole = LABEL + side + 1
    lines = "".join(f'<p class="about a{i}">{line}</p>' for i, line in enumerate(about))
    return (
        f'<figure class="heads"><div class="grid" role="radiogroup" aria-label="Heads" '
        f'style="--columns:{columns}">{"".join(grid)}</div>'
        f'<div class="panel"><svg class="map" viewBox="0 0 {whole:.1f} {whole:.1f}" '
        f'style="{size(whole)}" role="img" aria-label="Weights of the chosen head, '
        f'with words on both axes: rows ask, columns are attended to.">{axes}{maps}'
        f'<rect x="{LABEL}" y="{LABEL}" width="{side:.1f}" height="{side:.1f}"/></svg></div>'
        f"<figcaption>{lines}</figcaption></figure>"
    )


def choices_style(count: int) -> str:
    """Return the CSS that shows what is chosen of so many."""
    return "".join(
        f".heads:has(#head-{i}:checked) :is(.m{i},.a{i}){{display:block}}" for i in range(count)
    )


# The whole


STYLE = """
:root { color-scheme: light dark; --page: #fbfbf9; --ink: #20262d; --soft: #636c75;
  --line: #d9dcdf; --card: #f1f2f0; --link: #2a65a8; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --ink: #e4e7ea; --soft: #9aa4ae; --line: #353b42; --card: #1e2329;
    --link: #7db3ec; }
  figure svg image, .heads .grid label { filter: invert(1) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0 auto; padding: 0 14px 4rem; max-width: 736px; background: var(--page);
  color: var(--ink); font: 17px/1.6 Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia,
  serif; overflow-wrap: break-word; }
h1, h2, h3, nav, figcaption, table, .heads, footer {
  font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 2.1rem; line-height: 1.15; margin: 2.6rem 0 .8rem; letter-spacing: -.02em; }
h2 { font-size: 1.42rem; line-height: 1.25; margin: 3.4rem 0 .6rem; padding-top: 1rem;
  border-top: 1px solid var(--line); letter-spacing: -.01em; }
h2 .number { color: var(--soft); font-weight: 400; margin-right: .35em; }
h3 { font-size: 1.08rem; margin: 2rem 0 .3rem; }
p { margin: .8rem 0; }
a { color: var(--link); }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  background: var(--card); padding: .1em .3em; border-radius: 4px; }
.lead { font-size: 1.1rem; }
nav { font-size: .94rem; columns: 2 15rem; margin: 1.5rem 0; padding: .9rem 1rem;
  background: var(--card); border-radius: 10px; }
nav a { display: block; padding: .16rem 0; text-decoration: none; break-inside: avoid; }
nav a:hover { text-decoration: underline; }
.formula { margin: 1.1rem 0; padding: .8rem .6rem; background: var(--card); border-radius: 10px;
  overflow-x: auto; font-size: 1.12rem; }
.formula + .formula { margin-top: -1.7rem; padding-top: .5rem; border-radius: 0 0 10px 10px; }
.formula:has(+ .formula) { border-radius: 10px 10px 0 0; }
.formula + .formula:has(+ .formula) { border-radius: 0; }
munder > mo:first-child, munderover > mo:first-child { font-size: 1.35em; }
sub, sup { line-height: 0; }
math { font-family: "STIX Two Math", "Cambria Math", "Latin Modern Math", math, serif; }
figure { margin: 1.5rem 0 1.8rem; }
.panels { display: flex; flex-wrap: wrap; justify-content: center; gap: 1rem 1.6rem; }
.panel { flex: 0 1 auto; min-width: 0; max-width: 100%; overflow-x: auto; }
.panel svg { display: block; max-width: 100%; height: auto; }
.panel svg text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
figcaption { margin-top: .6rem; font-size: .9rem; line-height: 1.5; color: var(--soft); }
figcaption b { color: var(--ink); font-weight: 600; }
.wide { overflow-x: auto; margin: 1.2rem 0; }
table { border-collapse: collapse; font-size: .88rem; line-height: 1.4; }
th, td { padding: .36rem .6rem; text-align: right;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
ol.sentences { font-size: .95rem; line-height: 1.5; padding-left: 1.6rem; }
.heads .grid { display: grid; grid-template-columns: auto repeat(var(--columns), 1fr);
  gap: 2px; max-width: 640px; margin: 0 auto 1rem; font-size: 12px; color: var(--soft);
  text-align: center; align-items: center; }
.heads .grid span { padding: 0 3px; }
.heads .grid label { position: relative; aspect-ratio: 1; cursor: pointer;
  border: 1px solid var(--line); background: #fff; }
.heads .grid label:hover { border-color: var(--link); }
.heads .grid label:has(:checked) { outline: 3px solid #c8751c; z-index: 1; }
.heads .grid label:has(:focus-visible) { outline-color: var(--link); }
.heads .grid input { position: absolute; inset: 0; opacity: 0; margin: 0; cursor: pointer;
  width: 100%; height: 100%; }
.heads .grid img { display: block; width: 100%; height: 100%; image-rendering: pixelated; }
.heads .map { margin: 0 auto; font-size: 11px; fill: currentColor; }
.heads .map image, .heads .about { display: none; image-rendering: pixelated; }
.heads .map rect { fill: none; stroke: var(--soft); stroke-width: .8; }
footer { margin-top: 4rem; padding-top: 1rem; border-top: 1px solid var(--line);
  font-size: .88rem; color: var(--soft); }
@media (max-width: 480px) { body { font-size: 16px; } h1 { font-size: 1.75rem; }
  .formula { font-size: 1rem; } }
@media print { nav { display: none; } figure { break-inside: avoid; } }
"""


TITLE = "Self-attention, step by step"


def page(steps: Sequence[Step]) -> str:
    """Return the whole page.

    Parameters
    ----------
    steps : sequence of Step
        The chapters.
    """
    links = "".join(
        f'<a href="#{step.key}">{i}. {step.title}</a>' for i, step in enumerate(steps, 1)
    )
    chapters = "\n".join(
        f'<section id="{step.key}"><h2><span class="number">{i}</span>{step.title}</h2>\n'
        + "\n".join(step.parts)
        + "\n</section>"
        for i, step in enumerate(steps, 1)
    )
    made = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, "
        f"{platform.system()} {platform.machine()}, {processors()} processors"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<link rel="icon" href="data:,">
<style>{STYLE}{"".join(step.style for step in steps)}</style>
</head>
<body>
<header><h1>{TITLE}</h1>
<p class="lead">What attention computes, why it is computed that way, and what it looks like.
Every figure and every number under a figure was computed by nattn {__version__} when this page was
made.</p>
</header>
<nav aria-label="Chapters">{links}</nav>
<main>
{chapters}
</main>
<footer>Made by <code>python -m nattn explain</code>: nattn {__version__}, {made}. Colours of
weights run from 0 (pale) to the largest (strong) unless stated otherwise.</footer>
</body>
</html>
"""
