"""python -m nattn: exit codes, what goes where, pipes and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from children import environment

import nattn
from nattn.applications import bench, command_line

COMMANDS = ["info", "chat", "demo", "explain", "bench", "warmup", "clear-cache"]


def run(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nattn", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(PYTHONIOENCODING="utf-8", **changed),
        timeout=300,
        check=False,
    )


LAUNCH = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
runpy.run_module("nattn", run_name="__main__", alter_sys=True)
"""


def interrupted(*arguments: str, when: str) -> tuple[int, str, float]:
    """Press Ctrl-C when a text appears on the terminal.

    Returns exit code, everything that the terminal showed, and the seconds until all was over,
    processes of its own included: they hold the terminal open as long as they live.
    """
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment(PYTHONIOENCODING="utf-8"),
    )
    os.close(theirs)
    shown, start = b"", 0.0
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
            if not start and when.encode() in shown:
                start = time.monotonic()
                process.send_signal(signal.SIGINT)
    except OSError:  # how Linux says that nobody has the terminal open any more
        pass
    finally:
        os.close(ours)
    code = process.wait(60)
    assert start, f"{when!r} never came: {shown!r}"
    return code, shown.decode(), time.monotonic() - start


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m nattn {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["info", "--no-such-option"],
        ["chat", "--attention", "flash"],
        ["chat", "--max-tokens", "0"],
        ["demo", "--size", "0"],
        ["demo", "--size", "many"],
        ["demo", "--noise", "-1"],
        ["demo", "--noise", "nan"],
        ["demo", "--threads", "0"],
        ["demo", "--threads", "1000000"],
        ["demo", "--backend", "cuda"],
        ["bench", "--rounds", "0"],
        ["warmup", "--dtype", "float8"],
    ],
)
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert "error: " in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--image", "no/such.png"], "nattn demo: image: no file no/such.png\n"),
        (["demo", "--patch", "2"], "nattn demo: patch: expected an odd number from 1, got 2\n"),
        (["bench", "--rows", "d64,d65"], "nattn bench: rows: no d65; known are "),
        (["bench", "--peers", "tensorflow"], "nattn bench: peers: no tensorflow; known are "),
        (["bench", "--markdown", "no/such.md"], "nattn bench: markdown: cannot read no"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_bench_without_its_table_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert command_line.main(["bench", "--quick"]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors == (
        "nattn bench: tabulate is not installed; the table needs: "
        "python -m pip install 'nattn[bench]'\n"
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nattn {nattn.__version__}\n", "")


def test_info(tmp_path: Path) -> None:
    done = run("info", NATTN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("numba", "numpy", "float32", "float64", str(tmp_path)):
        assert word in done.stdout


def test_info_as_json() -> None:
    done = run("info", "--json")
    facts = json.loads(done.stdout)
    assert facts["nattn"] == nattn.__version__
    assert facts["processors"] >= 1
    assert "numba-cuda" in facts["gpu"]


def test_demo(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    done = run("demo", "--size", "2500", "--threads", "1", "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bar where there is no terminal
    assert path.read_bytes().startswith(b"\x89PNG")
    before, after = map(float, re.findall(r"([\d.]+) dB (?:noisy|denoised)", done.stdout))
    assert after > before + 2.5
    assert f"picture  {path}" in done.stdout


def test_demo_says_so_when_the_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("nattn.applications.demo.check_rows", lambda *args: (float("nan"), 1.0))
    arguments = ["--size", "900", "--backend", "reference", "--out", str(tmp_path / "x.png")]
    assert command_line.main(["demo", *arguments]) == 1
    assert "differ from the reference" in capsys.readouterr().err


def test_bench(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text(f"{bench.BEGIN}\n{bench.END}\n", encoding="utf-8")
    files = ["--json", str(tmp_path / "x.json"), "--markdown", str(page)]
    done = run("bench", "--rows", "short", "--rounds", "1", "--peers", "numpy", *files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^N=512 D=64 +\d+ +\d+% \(70%\) +[\d.]+$", done.stdout, re.MULTILINE)
    assert "| N=512 D=64 " in page.read_text(encoding="utf-8")
    samples = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["results"][0]["samples"]
    assert {name: len(values) for name, values in samples.items()} == {
        "nattn": 1,
        "peak": 1,
        "numpy": 1,
    }


def test_warmup_and_clear_cache(tmp_path: Path) -> None:
    folder = {"NATTN_CACHE_DIR": str(tmp_path / "cache")}
    done = run("warmup", "--dtype", "float32", **folder)
    assert done.returncode == 0, done.stderr
    assert "kernels ready" in done.stdout
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size > 100_000
    done = run("clear-cache", **folder)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"removed ([\d.]+) MB", done.stdout)[0]) == pytest.approx(
        size / 1e6, abs=0.1
    )
    assert not [path for path in tmp_path.rglob("*.nb*") if path.is_file()]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break in another way there")
def test_a_reader_that_goes_away() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "nattn", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.close()  # as `head` does when it has seen enough
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert errors == b""


def test_interrupt_in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nattn.applications.demo.run", stop)
    assert command_line.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals there")
def test_interrupt_the_attention(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    full = ["--size", "500000", "--patch", "7"]  # all of matplotlib's photograph: minutes
    code, shown, seconds = interrupted("demo", *full, "--out", str(path), when="attention over")
    assert code == 130
    assert "Traceback" not in shown
    assert shown.splitlines()[-1].split("\r")[-1] == "interrupted"  # the bar is gone
    assert seconds < 5.0
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals there")
def test_interrupt_the_benchmark() -> None:
    """It ends, and its contestants with it."""
    arguments = ["--rows", "d64", "--peers", "numpy", "--rounds", "1000"]
    code, shown, seconds = interrupted("bench", *arguments, when="N=4096 D=64 ")
    assert code == 130
    assert "Traceback" not in shown
    assert shown.splitlines()[-1].split("\r")[-1] == "interrupted"
    assert seconds < 10.0
