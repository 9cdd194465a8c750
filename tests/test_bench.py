"""The benchmark: figures, their tables and files. How fast it is, is no test's business."""

from __future__ import annotations

import json
from pathlib import Path

import PIL.Image
import pytest

from nattn.applications import bench
from nattn.applications.bench import (
    BenchError,
    ExtraMemory,
    Growth,
    Ratio,
    Result,
    Settings,
    Snippet,
    Speed,
    Sweep,
)
from nattn.applications.measure import MODIFIERS, PREPARE, Case, Unsupported

ABOUT = {"processor": "Example 9000", "threads": "2"}

RESULTS = [
    Result(
        "N=4096 D=64",
        {"GFLOP/s": 203.4, "% of peak": 88.2, "x torch": 1.523},
        {"% of peak": 85, "x torch": 1.35},
        ("jax: not installed (jax)",),
        {"nattn": [0.1, 0.2]},
    ),
    Result("N=512 D=64", {"GFLOP/s": 170.0, "% of peak": 74.0}, notes=("numpy: too large",)),
    Result("memory", {"MiB": 1.25}, {"MiB": 32}),
    Result("tiny", {"seconds": 41.4e-6}, {"seconds": 60e-6}),
    Result("first", {"seconds": 4.5}, {"seconds": 6.0}),
    Result("later", {"compilations": 0}, {"compilations": 0}),
]

NARROW = ("float16", "bfloat16")

FILE = f"before\n\n{bench.BEGIN}\nold table\n{bench.END}\n\nafter\n"


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in bench.ROWS]
    assert len(set(names)) == len(names)
    assert set(bench.QUICK) <= set(names)
    peers = {peer for row in bench.ROWS if isinstance(row, Speed) for peer in row.peers}
    assert peers <= set(PREPARE)
    assert "flex" not in Speed("a", "plain", Case()).peers  # it compiles for half a minute


def test_every_modifier_is_measured() -> None:
    cases = [row.case for row in bench.ROWS if isinstance(row, Speed | Ratio | ExtraMemory)]
    assert {case.mod for case in cases} == {None, *MODIFIERS}


def test_16_bit_numbers_are_measured_both_ways() -> None:
    cases = [row.case for row in bench.ROWS if isinstance(row, Speed)]
    found = {(c.dtype, c.backward, c.D, c.causal) for c in cases if c.dtype != c.compute}
    both = {(dtype, b, D, False) for dtype in NARROW for b in (False, True) for D in (64, 128)}
    assert found == both | {("bfloat16", False, D, True) for D in (64, 128)}


def test_select() -> None:
    assert bench.select(None) == list(bench.ROWS)
    assert [row.name for row in bench.select(["tiny", "d64"])] == ["tiny", "d64"]
    with pytest.raises(BenchError, match=r"rows: no d65, x; known are d64, "):
        bench.select(["d65", "d64", "x"])


def test_a_table_for_a_terminal() -> None:
    lines = bench.table(RESULTS).splitlines()
    assert lines[0].split("  ")[0] == "speed (asked for)"
    assert lines[0].split()[-2:] == ["x", "torch"]
    assert lines[1].split() == ["N=4096", "D=64", "203", "88%", "(85%)", "1.52", "(1.35)"]
    assert lines[2].split() == ["N=512", "D=64", "170", "74%", "-"]
    assert lines[3] == ""
    assert [line.split()[1:] for line in lines[5:]] == [
        ["1.2", "MiB", "(32.0", "MiB)"],
        ["41", "µs", "(60", "µs)"],
        ["4.50", "s", "(6.00", "s)"],
        ["0", "(0)"],
    ]


def test_float32_is_the_last_column() -> None:
    narrow = Result("float16", {"GFLOP/s": 9, "% of peak": 8, "x float32": 1.5, "x torch": 2})
    head, row = bench.table([narrow]).splitlines()
    assert head.split()[-4:] == ["x", "torch", "x", "float32"]
    assert row.split()[-2:] == ["2.00", "1.50"]


def test_a_table_for_markdown() -> None:
    first, second = bench.table(RESULTS, markdown=True).split("\n\n")
    for text in (first, second):
        rows = [line.strip("|").split("|") for line in text.splitlines()]
        assert len({len(row) for row in rows}) == 1
        assert set(rows[1][0].strip()) == {":", "-"}
        assert rows[1][0].strip().startswith(":-")
        assert rows[1][1].strip().endswith("-:")


def test_notes_come_once() -> None:
    assert bench.notes([*RESULTS, RESULTS[0]]) == [
        "jax: not installed (jax)",
        "numpy: too large [N=512 D=64]",
    ]


def test_the_table_goes_between_the_markers_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text(FILE, encoding="utf-8")
    for _ in range(2):
        bench.write_markdown(path, RESULTS, ABOUT)
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"before\n\n{bench.BEGIN}\n")
    assert text.endswith(f"{bench.END}\n\nafter\n")
    assert "old table" not in text
    assert text.count(bench.table(RESULTS, markdown=True)) == 1
    assert "processor Example 9000, threads 2" in text


@pytest.mark.parametrize(
    "text", ["", bench.BEGIN, f"{bench.END}{bench.BEGIN}", f"{FILE}{FILE}", None]
)
def test_a_file_without_markers_is_left_alone(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "x.md"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match="markdown: "):
        bench.write_markdown(path, RESULTS, ABOUT)
    assert not path.exists() if text is None else path.read_text(encoding="utf-8") == text


def test_json(tmp_path: Path) -> None:
    bench.write_json(tmp_path / "x.json", RESULTS, ABOUT)
    read = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert read["machine"] == ABOUT
    assert read["results"][0]["samples"] == {"nattn": [0.1, 0.2]}
    with pytest.raises(BenchError, match="json: cannot write"):
        bench.write_json(tmp_path, RESULTS, ABOUT)


def test_a_plot(tmp_path: Path) -> None:
    growths = [Growth("nattn", [512, 1024], [50, 60], [0.0, 0.0]), Growth("numpy", [512], [2], [3])]
    found = Sweep([70.0, 71.0], growths, [])
    bench.plot(tmp_path / "x.png", found)
    with PIL.Image.open(tmp_path / "x.png") as picture:
        assert picture.format == "PNG"
    with pytest.raises(BenchError, match="plot: cannot write"):
        bench.plot(tmp_path, found)


def test_what_is_missing_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.check_table()
    bench.check_plot(tmp_path / "x.png")
    with pytest.raises(BenchError, match="plot: no folder"):
        bench.check_plot(tmp_path / "no" / "x.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"matplotlib is .* plot .*pip install 'nattn\[bench\]'"):
        bench.check_plot(tmp_path / "x.png")
    with pytest.raises(BenchError, match=r"tabulate is .* table .*pip install 'nattn\[bench\]'"):
        bench.check_table()


SMALL = Case(H=2, N=64, D=16)
SETTINGS = Settings(threads=1, rounds=2, peers=("numpy",))


def test_every_kind_of_row_is_measured() -> None:
    told: list[Result] = []
    rows: list[bench.Row] = [
        Speed("a", "speed", SMALL, 85, {"numpy": 2.0}),
        Speed("b", "no such matrix", Case(H=1, N=24_000, D=4, window=(1, 0)), peers=("numpy",)),
        Ratio("c", "forms", Case(H=2, N=64, D=16, form="packed"), SMALL, 0.85),
        Ratio("c", "modified", Case(H=2, N=64, D=16, mod="softcap"), SMALL, 0.85),
        ExtraMemory("d", "memory", SMALL, 32),
        Snippet("e", "latency", "print(0.25)", 1.0),
        Snippet(
            "f", "cold", "import os; print(len(os.environ['NATTN_CACHE_DIR']))", 1.0, cold=True
        ),
        Snippet("g", "counted", "print(3)", 0, unit="compilations"),
    ]
    results = bench.run(rows, SETTINGS, told.append)
    assert told == results
    speed, alone, forms, modified, memory, latency, cold, counted = results
    assert set(speed.figures) == {"GFLOP/s", "% of peak", "x numpy"}
    assert all(value > 0 for value in speed.figures.values())
    assert speed.asked == {"% of peak": 85, "x numpy": 2.0}
    assert set(speed.samples) == {"nattn", "peak", "numpy"}
    assert {len(values) for values in speed.samples.values()} == {2}
    assert set(alone.figures) == {"GFLOP/s", "% of peak"}
    assert alone.notes == ("numpy: the dense matrix would need 2 GiB",)
    assert 0.01 < forms.figures["ratio"] < 100
    assert 0.01 < modified.figures["ratio"] < 100
    assert 0 <= memory.figures["MiB"] < 32
    assert latency.figures == {"seconds": 0.25}
    assert cold.figures["seconds"] > 0
    assert (counted.figures, counted.asked) == ({"compilations": 3}, {"compilations": 0})


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("backward", [False, True])
def test_16_bit_numbers_beside_float32(dtype: str, backward: bool) -> None:
    case = Case(H=2, N=64, D=16, dtype=dtype, backward=backward)
    (result,) = bench.run([Speed("a", "narrow", case)], SETTINGS)
    assert set(result.figures) == {"GFLOP/s", "% of peak", "x float32"}
    assert all(value > 0 for value in result.figures.values())
    refusal = "no gradients" if backward else "float32 and float64 only"
    assert result.notes == (f"numpy: {refusal}",)


class Fixed:
    """A contestant that always takes as long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def prepare(self, case: Case) -> None:
        pass

    def sample(self) -> float:
        return self.seconds

    def peak(self, dtype: str = "float32") -> float:
        return 100.0

    def extra_memory(self) -> int:
        return 0


def test_a_figure_is_work_over_time_over_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"nattn": Fixed(0.002), "numpy": Fixed(0.005)}
    monkeypatch.setattr(bench.Contestants, "get", lambda self, name, *args, **kwargs: fixed[name])
    (result,) = bench.run([Speed("a", "speed", Case(H=1, N=1000, D=25))], SETTINGS)
    assert result.figures == pytest.approx({"GFLOP/s": 50.0, "% of peak": 50.0, "x numpy": 2.5})


@pytest.mark.parametrize("dtype", NARROW)
def test_the_yardstick_of_16_bit_numbers_is_float32(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {0: Fixed(0.002), 1: Fixed(0.003)}
    prepared: list[Case] = []
    peaks = {"float32": 100.0}
    monkeypatch.setattr(fixed[1], "prepare", prepared.append)
    monkeypatch.setattr(fixed[0], "peak", peaks.__getitem__)
    monkeypatch.setattr(
        bench.Contestants, "get", lambda self, name, environment, copy=0: fixed[copy]
    )
    case = Case(H=1, N=1000, D=25, dtype=dtype)
    (result,) = bench.run([Speed("a", "speed", case, peers=())], SETTINGS)
    assert result.figures == pytest.approx({"GFLOP/s": 50.0, "% of peak": 50.0, "x float32": 1.5})
    assert prepared == [Case(H=1, N=1000, D=25)]


def test_a_ratio_is_of_times_or_of_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {0: Fixed(0.002), 1: Fixed(0.006)}
    monkeypatch.setattr(bench.Contestants, "get", lambda self, name, *args, copy=0: fixed[copy])
    half, whole = Case(H=1, N=100, D=4), Case(H=2, N=100, D=4)
    rows = [Ratio(name, name, half, whole, 1.0, by_work=name == "b") for name in "ab"]
    times, speeds = bench.run(rows, SETTINGS)
    assert times.figures["ratio"] == pytest.approx(3.0)
    assert speeds.figures["ratio"] == pytest.approx(1.5)


def test_known_functions_are_not_compiled_again() -> None:
    rebound, later = bench.run(bench.select(["rebound", "later"]), Settings(1, 1, ()))
    assert rebound.figures == later.figures == {"compilations": 0}


def test_compilations_are_counted() -> None:
    """Were the counter blind, the rows that ask for none would always do well."""
    code = bench.MODIFIED + "print(compilations(lambda: nattn.attention(x, x, x, score_mod=fresh)))"
    (result,) = bench.run([Snippet("a", "new", code, 0, unit="compilations")], Settings(1, 1, ()))
    assert result.figures["compilations"] >= 1


class Missing(Fixed):
    """A contestant that is not installed."""

    def prepare(self, case: Case) -> None:
        raise Unsupported("not installed")


def test_a_row_that_fails_says_so_and_the_others_go_on() -> None:
    rows: list[bench.Row] = [
        Snippet("a", "broken", "1 / 0", 1.0),
        ExtraMemory("b", "wrong form", Case(form="no such form"), 1.0),
        Snippet("c", "sound", "print(1)", 1.0),
    ]
    broken, wrong, sound = bench.run(rows, SETTINGS)
    assert broken.figures == wrong.figures == {}
    assert "ZeroDivisionError" in broken.notes[0]
    assert "no such form" in wrong.notes[0]
    assert sound.figures == {"seconds": 1.0}
    assert bench.table([broken, wrong, sound]).count("\n") == 1
    assert len(bench.notes([broken, wrong, sound])) == 2


def test_a_row_whose_dtype_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.Contestants, "get", lambda self, name, **options: Missing(0.0))
    results = bench.run([Speed(x, x, Case(dtype="bfloat16")) for x in "ab"], SETTINGS)
    assert [result.figures for result in results] == [{}, {}]
    assert bench.notes(results) == ["nattn: not installed"]


def test_speed_and_memory_against_n() -> None:
    found = bench.sweep(SETTINGS, [256, 1024])
    nattn, numpy = found.growths
    assert (nattn.name, numpy.name) == ("nattn", "numpy")
    assert len(found.peak) == 2
    for growth in found.growths:
        assert growth.n == [256, 1024]
        assert all(speed > 0 for speed in growth.gflops)
    assert numpy.mib[1] > 3.5 > nattn.mib[1]  # the dense matrix has 4 MiB


class Broken(Fixed):
    """A contestant that cannot do any case."""

    def prepare(self, case: Case) -> None:
        raise Unsupported("too large")


def test_a_sweep_says_who_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot go on is noted and left out; without nattn there is no plot."""
    fixed = {"nattn": Fixed(0.002), "numpy": Broken(0.0)}
    monkeypatch.setattr(bench.Contestants, "get", lambda self, name: fixed[name])
    found = bench.sweep(SETTINGS, [500, 1000])
    (nattn,) = found.growths
    assert nattn.gflops == pytest.approx([4 * 64 * n * n / 0.002 / 1e9 for n in (500, 1000)])
    assert found.peak == [100.0, 100.0]
    assert found.notes == ["numpy, n=500: too large"]
    fixed["nattn"] = Broken(0.0)
    with pytest.raises(BenchError, match="plot: too large"):
        bench.sweep(SETTINGS, [500])
