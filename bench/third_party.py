"""Tests of other projects, run on nattn: ``python bench/third_party.py SUITE PATH [PART ...]``.

    torch           TestSDPACpuOnly of test/test_transformers.py, nattn's provider active
    transformers    ModelTesterMixin of tests/test_modeling_common.py, on tiny models whose "sdpa"
                    is nattn

PATH is a checkout of the project or its unpacked source distribution, best of the version that is
installed; its files run as they are. With parts of names only such tests run. Each suite runs
on nattn and without it, so that what fails either way can be told from the rest.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import sys
import time
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

Case = type[unittest.TestCase]


class Run(NamedTuple):
    """What each test came to and why, and how often nattn was called."""

    outcomes: dict[str, str]
    reasons: dict[str, str]
    calls: int
    seconds: float


class Recorder(unittest.TestResult):
    """Keeps for each test whether it passed, failed or was skipped, and the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = True
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def record(self, test: Any, outcome: str, reason: str = "") -> None:
        """Keep what came out; a failure of a part stays."""
        name = f"{type(test).__name__}.{test.id().rsplit('.', 1)[-1]}"
        if self.outcomes.get(name) == "failed":  # an earlier part of it did
            return
        self.outcomes[name], self.reasons[name] = outcome, reason

    def addSuccess(self, test: Any) -> None:
        """Keep a test that passed."""
        super().addSuccess(test)
        self.record(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        """Keep one that failed."""
        super().addFailure(test, err)
        self.record(test, "failed", said(err))

    def addError(self, test: Any, err: Any) -> None:
        """Keep one that raised something else."""
        super().addError(test, err)
        self.record(test, "failed", said(err))

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """Keep a part that failed."""
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.record(test, "failed", said(err))

    def addSkip(self, test: Any, reason: str) -> None:
        """Keep one that was skipped."""
        super().addSkip(test, reason)
        self.record(getattr(test, "test_case", test), "skipped", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        """Keep one that failed, as is known."""
        super().addExpectedFailure(test, err)
        self.record(test, "passed")

    def addUnexpectedSuccess(self, test: Any) -> None:
        """Keep one that should have failed."""
        super().addUnexpectedSuccess(test)
        self.record(test, "failed", "passed, which its project does not expect")


def said(err: Any) -> str:
    """Return the kind of an error and the beginning of its text."""
    lines = [x.strip() for x in str(err[1]).splitlines() if x.strip()]
    return f"{err[0].__name__}: {lines[0] if lines else ''}"[:160]


# torch


def torch_cases(path: Path, on_nattn: bool, count: Counter[str]) -> list[Case]:
    """Activate the provider, and return torch's class of tests for the CPU."""
    if on_nattn:
        provider = importlib.import_module("nattn.integrations.torch.provider")
        for name in ("attention", "attention_backward"):
            setattr(provider, name, counted(getattr(provider, name), count))
        provider.register_provider()
        torch = importlib.import_module("torch")
        torch.nn.attention.activate_flash_attention_impl(provider.NAME)
    folder = path / "test"
    if not (folder / "test_transformers.py").exists():
        sys.exit(
            f"PATH: expected a checkout of torch, got {path} without test/test_transformers.py"
        )
    sys.path.insert(0, str(folder))
    return [importlib.import_module("test_transformers").TestSDPACpuOnlyCPU]


# transformers

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
WHISPER = {
    "vocab_size": 99,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_mel_bins": 16,
    "max_source_positions": 10,
    "max_target_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGES = {**TEXT, "image_size": 12, "patch_size": 3}

MODELS: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "llama": ("Llama", DECODER, ["Model", "ForCausalLM"], "tokens"),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 2}, ["Model", "ForCausalLM"], "tokens"),
    "gemma2": ("Gemma2", {**DECODER, **KINDS}, ["Model", "ForCausalLM"], "tokens"),
    "gemma3": ("Gemma3", {**DECODER, **KINDS}, ["TextModel", "ForCausalLM"], "tokens"),
    "gpt-oss": (
        "GptOss",
        {**DECODER, **KINDS, "num_local_experts": 4, "num_experts_per_tok": 2},
        ["Model", "ForCausalLM"],
        "tokens",
    ),
    "qwen2": ("Qwen2", DECODER, ["Model", "ForCausalLM"], "tokens"),
    "qwen3": ("Qwen3", DECODER, ["Model", "ForCausalLM"], "tokens"),
    "bert": ("Bert", TEXT, ["Model", "ForMaskedLM"], "tokens"),
    "modernbert": (
        "ModernBert",
        {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
        ["Model", "ForMaskedLM"],
        "tokens",
    ),
    "t5": (
        "T5",
        {**T5, "decoder_start_token_id": 0},
        ["Model", "ForConditionalGeneration"],
        "pairs",
    ),
    "whisper": ("Whisper", WHISPER, ["Model", "ForConditionalGeneration"], "sound"),
    "clip text": ("CLIPText", TEXT, ["Model"], "tokens"),
    "clip vision": ("CLIPVision", IMAGES, ["Model"], "images"),
}
"""For each model the prefix of its classes, its configuration, the classes, what it is given."""


class Tester:
    """Makes a configuration and inputs, as the mixin asks for them."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads, hidden_size = 7, 9, 2, 4, 32

    def __init__(self, config: Callable[[], Any], inputs: str) -> None:
        self.get_config, self.inputs = config, inputs
        self.is_training = inputs != "sound"  # for which the mixin has no labels
        if inputs == "pairs":
            self.seq_length, self.encoder_seq_length = 7, 9
        if inputs == "sound":
            self.hidden_size = WHISPER["d_model"]
            self.encoder_seq_length = WHISPER["max_source_positions"]
        if inputs == "images":
            self.seq_length = (IMAGES["image_size"] // IMAGES["patch_size"]) ** 2 + 1

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Return both."""
        torch = importlib.import_module("torch")
        B, N = self.batch_size, 9
        tokens = torch.randint(3, 99, (B, N))
        real = torch.ones(B, N, dtype=torch.long)
        given = {
            "tokens": {"input_ids": tokens, "attention_mask": real},
            "pairs": {
                "input_ids": tokens,
                "decoder_input_ids": torch.randint(3, 99, (B, 7)),
                "attention_mask": real,
                "decoder_attention_mask": real[:, :7],
            },
            "sound": {
                "input_features": torch.rand(B, WHISPER["num_mel_bins"], 20),
                "decoder_input_ids": tokens,
                "decoder_attention_mask": real,
            },
            "images": {
                "pixel_values": torch.rand(B, 3, IMAGES["image_size"], IMAGES["image_size"])
            },
        }
        return self.get_config(), given[self.inputs]


def transformers_cases(path: Path, on_nattn: bool, count: Counter[str]) -> list[Case]:
    """Put nattn in the place of "sdpa", and return a class of tests for each model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    transformers = importlib.import_module("transformers")
    if on_nattn:
        ours = importlib.import_module("nattn.integrations.transformers")
        forward = counted(ours.attention_forward, count)
        transformers.AttentionInterface.register("sdpa", forward)
        transformers.AttentionMaskInterface.register("sdpa", ours.lazy_mask)
    if not (path / "tests" / "test_modeling_common.py").exists():
        sys.exit(
            f"PATH: expected a checkout of transformers, got {path} without "
            "tests/test_modeling_common.py"
        )
    sys.path.insert(0, str(path))
    # The source distribution lacks what the file takes two more mixins from, not run here.
    for name, mixin in (
        ("generation.test_utils", "GenerationTesterMixin"),
        ("exporters.test_export", "ExportTesterMixin"),
    ):
        if not (path / "tests" / f"{name.replace('.', '/')}.py").exists():
            module: Any = types.ModuleType(f"tests.{name}")
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules[module.__name__] = module
    common = importlib.import_module("tests.test_modeling_common")
    found = []
    for title, (prefix, options, kinds, inputs) in MODELS.items():
        config = getattr(transformers, f"{prefix}{'Text' if prefix == 'Gemma3' else ''}Config")
        classes = tuple(getattr(transformers, f"{prefix}{kind}") for kind in kinds)
        if on_nattn:  # it has the softcap and the sinks for which these refuse torch's function
            for x in classes:
                x._supports_sdpa = True
        members = {
            "all_model_classes": classes,
            "model_tester": Tester(functools.partial(config, **options), inputs),
            "is_encoder_decoder": inputs in ("pairs", "sound"),
            "test_resize_embeddings": inputs in ("tokens", "pairs"),
        }
        found.append(type(title, (common.ModelTesterMixin, unittest.TestCase), members))
    return found


# Running


def counted(function: Callable[..., Any], count: Counter[str]) -> Callable[..., Any]:
    """Count the calls of a function that return."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        count["calls"] += 1
        return found

    return call


SUITES = {"torch": torch_cases, "transformers": transformers_cases}


def run(suite: str, path: Path, parts: list[str], on_nattn: bool) -> dict[str, Run]:
    """Run a suite in this process; return what came out for each of its classes."""
    count: Counter[str] = Counter()
    with contextlib.redirect_stdout(sys.stderr):
        found = {}
        for case in SUITES[suite](path, on_nattn, count):
            tests: list[Any] = list(unittest.defaultTestLoader.loadTestsFromTestCase(case))
            if parts:
                tests = [x for x in tests if any(part in x.id() for part in parts)]
            before, start = count["calls"], time.perf_counter()
            recorder = Recorder()
            unittest.TestSuite(tests).run(recorder)
            seconds = time.perf_counter() - start
            calls = count["calls"] - before
            found[case.__name__] = Run(recorder.outcomes, recorder.reasons, calls, seconds)
    return found


def both(suite: str, path: Path, parts: list[str]) -> list[dict[str, Run]]:
    """Run a suite on nattn and without it."""
    found = []
    for on_nattn in (True, False):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found.append(process.submit(run, suite, path, parts, on_nattn).result())
    return found


def cells(one: Run) -> Iterable[str]:
    number = Counter(one.outcomes.values())
    return *(str(number[x]) for x in ("passed", "failed", "skipped")), f"{one.seconds:.0f} s"


def report(ours: dict[str, Run], theirs: dict[str, Run]) -> None:
    """Print a table, tests that failed on either side, and why others were skipped."""
    ours = {name: one for name, one in ours.items() if one.outcomes}
    head = "passed", "failed", "skipped", "time"
    print(f"{'':22}{'on nattn':>36}{'calls':>9}{'without it':>36}")
    print(f"{'':22}{''.join(f'{x:>9}' for x in head)}{'':9}{''.join(f'{x:>9}' for x in head)}")
    for name, one in ours.items():
        row = [*cells(one), str(one.calls), *cells(theirs[name])]
        print(f"{name:22}" + "".join(f"{x:>9}" for x in row))
    skipped: Counter[str] = Counter()
    for name, one in ours.items():
        for test, outcome in one.outcomes.items():
            peer = theirs[name].outcomes.get(test, "not run")
            if outcome == "skipped":
                skipped[one.reasons[test]] += 1
            if "failed" not in (outcome, peer):
                continue
            print(f"\n{test}\n    {outcome} on nattn, {peer} without it")
            reasons = dict.fromkeys(x.reasons.get(test, "") for x in (one, theirs[name]))
            print("\n".join(f"    {x}" for x in reasons if x))
    print("\nskipped on nattn:")
    for reason, number in skipped.most_common(12):
        print(f"{number:>9}  {reason}")


def main() -> None:
    """Print what a suite comes to."""
    if len(sys.argv) < 3 or sys.argv[1] not in SUITES:
        sys.exit(__doc__)
    suite, path, *parts = sys.argv[1:]
    report(*both(suite, Path(path).resolve(), parts))


if __name__ == "__main__":
    main()
