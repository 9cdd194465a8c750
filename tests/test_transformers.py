"""Models of transformers on nattn, beside transformers' own attention."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from nattn.applications import chat

torch = pytest.importorskip("torch", reason="no torch")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="no transformers")
adapter = importlib.import_module("nattn.integrations.transformers")
masks = importlib.import_module("nattn.integrations.transformers.masks")
Tensor = Any
Model = Any

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # their own
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TINY, "num_key_value_heads": 2, "head_dim": 16, "attention_dropout": 0.0}
KINDS = ["sliding_attention", "full_attention"]

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "layer_types": KINDS, "attn_logit_softcapping": 2.0},
    "Gemma3": {"sliding_window": 6, "layer_types": KINDS},
    "GptOss": {
        "sliding_window": 6,
        "layer_types": KINDS,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
    "Qwen2": {},
    "Qwen3": {},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "ModernBert": {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
}
CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}


@functools.cache
def model(kind: str) -> Model:
    """Make a model with weights so large that attention matters."""
    torch.manual_seed(0)
    name = CONFIG_NAMES.get(kind, f"{kind}Config")
    if kind in DECODERS:
        config = getattr(transformers, name)(**DECODER, **DECODERS[kind])
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    else:
        config = getattr(transformers, name)(**TINY, **ENCODERS[kind])
        made = getattr(transformers, f"{kind}Model")(config)
    return enlarged(made)


def enlarged(made: Model) -> Model:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            elif parameter.ndim == 1 and not parameter.any():
                parameter.normal_(0, 0.5, generator=generator)
    return made.eval()


@contextlib.contextmanager
def on(made: Model, name: str) -> Iterator[Model]:
    """Run a model on another implementation for a while."""
    if name == "nattn":
        adapter.enable(made)
    else:
        made.set_attn_implementation(name)
    try:
        yield made
    finally:
        made.set_attn_implementation("eager")


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(seed))


def result(made: Model, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return made(**inputs)[0]


def both(made: Model, **inputs: Any) -> tuple[Tensor, Tensor]:
    made.set_attn_implementation("eager")
    expected = result(made, **inputs)
    with on(made, "nattn"):
        return result(made, **inputs), expected


def close(x: Tensor, y: Tensor, factor: float = 1) -> None:
    """Compare by the error that layers of such a dtype make, relative to the largest value."""
    assert x.dtype == y.dtype
    budget = factor * 60 * torch.finfo(x.dtype).eps * max(float(y.abs().max()), 1e-2)
    assert float((x.float() - y.float()).abs().max()) <= budget


@pytest.fixture(autouse=True)
def _registered() -> None:
    adapter.register()


# Models


@pytest.mark.parametrize("kind", DECODERS)
def test_decoder(kind: str) -> None:
    x = tokens(2, 20)
    close(*both(model(kind), input_ids=x))


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder(kind: str) -> None:
    x = tokens(2, 20)
    close(*both(model(kind), input_ids=x))
    real = torch.arange(20) < torch.tensor([[20], [13]])
    ours, theirs = both(model(kind), input_ids=x, attention_mask=real.long())
    close(ours[real], theirs[real])


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "GptOss"])
def test_bfloat16(kind: str) -> None:
    pytest.importorskip("ml_dtypes")
    made = copy.deepcopy(model(kind)).to(torch.bfloat16)
    exact = result(copy.deepcopy(made).float(), input_ids=tokens(2, 20))
    ours, theirs = both(made, input_ids=tokens(2, 20))
    assert ours.dtype == torch.bfloat16
    errors = [float((x.float() - exact).square().mean().sqrt()) for x in (ours, theirs)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_padding(kind: str, side: str) -> None:
    real = torch.arange(20) < torch.tensor([[20], [13]])
    real = real.flip(1) if side == "left" else real
    ours, theirs = both(model(kind), input_ids=tokens(2, 20), attention_mask=real.long())
    close(ours[real], theirs[real])


def test_packed_sequences() -> None:
    places = torch.cat([torch.arange(n) for n in (7, 9, 4)])[None]
    for kind in ("Llama", "Mistral"):
        inputs = {"input_ids": tokens(1, 20), "position_ids": places, "use_cache": False}
        close(*both(model(kind), **inputs))


def test_dense_masks_of_a_user() -> None:
    made = model("Llama")
    visible = torch.ones(20, 20, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    visible[1, :, :, 3:5] = False
    visible[:, :, range(20), range(20)] = True
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = result(made, input_ids=tokens(2, 20), attention_mask=added)
    with on(made, "nattn"):
        for mask in (visible, added):
            close(result(made, input_ids=tokens(2, 20), attention_mask=mask), expected)


def t5() -> Model:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": 100, "relative_attention_num_buckets": 8, "dropout_rate": 0}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return enlarged(transformers.T5ForConditionalGeneration(config))


def test_encoder_and_decoder() -> None:
    real = torch.arange(20) < torch.tensor([[20], [13]])
    inputs = {"input_ids": tokens(2, 20), "decoder_input_ids": tokens(2, 9, seed=1)}
    close(*both(t5(), **inputs))
    close(*both(t5(), **inputs, attention_mask=real.long()))


def test_whisper() -> None:
    sizes = {"d_model": 64, "vocab_size": 100, "num_mel_bins": 8, "max_source_positions": 20}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = transformers.WhisperConfig(**sizes, **special, decoder_start_token_id=1)
    made = enlarged(transformers.WhisperForConditionalGeneration(config))
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    close(*both(made, input_features=sound, decoder_input_ids=tokens(2, 9)))


def test_clip() -> None:
    text = {**TINY, "max_position_embeddings": 32, "projection_dim": 64}
    vision = {**TINY, "image_size": 32, "patch_size": 8, "projection_dim": 64}
    del vision["vocab_size"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    made = enlarged(transformers.CLIPModel(config))
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    real = torch.arange(20) < torch.tensor([[20], [13]])
    inputs = {"input_ids": tokens(2, 20), "pixel_values": pixels, "attention_mask": real.long()}
    close(*both(made, **inputs))


# Training


def gradients(made: Model, **inputs: Any) -> dict[str, Tensor]:
    made.zero_grad()
    made(**inputs).loss.backward()
    return {name: x.grad.clone() for name, x in made.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("kind", ["Llama", "GptOss", "T5"])
def test_gradients(kind: str) -> None:
    made = t5() if kind == "T5" else model(kind)
    inputs = {"input_ids": tokens(2, 20), "labels": tokens(2, 20, seed=1)}
    expected = gradients(made, **inputs)
    with on(made, "nattn"):
        found = gradients(made, **inputs)
    assert found.keys() == expected.keys()
    wanted = {"GptOss": "sinks", "T5": "relative_attention_bias", "Llama": "q_proj"}[kind]
    assert any(wanted in name for name in found)
    for name, x in found.items():
        assert x.any() == expected[name].any(), name
        close(x, expected[name], 3)


def test_dropout_in_training() -> None:
    config = transformers.LlamaConfig(**{**DECODER, "attention_dropout": 0.5})
    made = enlarged(transformers.LlamaForCausalLM(config))
    with on(made, "nattn"):
        plain = result(made, input_ids=tokens(2, 20))
        made.train()
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(result(made, input_ids=tokens(2, 20)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], plain)


# Generation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma3", "GptOss"])
def test_generate(kind: str, cache: str) -> None:
    made = model(kind)
    real = torch.arange(9) >= torch.tensor([[0], [4]])
    inputs = {"input_ids": tokens(2, 9), "attention_mask": real.long()}
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    found = []
    for name in ("eager", "nattn"):
        with on(made, name):
            found.append(made.generate(**inputs, **options, cache_implementation=cache))
            assert found[-1].shape == (2, 21)
    assert found[0].tolist() == found[1].tolist()


def test_continued_prompt() -> None:
    made = model("Mistral")
    found = []
    for name in ("eager", "nattn"):
        with on(made, name), torch.no_grad():
            cache = transformers.DynamicCache(config=made.config)
            steps = tokens(2, 30).split([11, 7, 1, 11], dim=1)
            parts = [made(input_ids=x, cache=cache).logits for x in steps]
            found.append(torch.cat(parts, dim=1))
    close(*found[::-1])


def test_smollm2() -> None:
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed, reason=f"no {needed}, which reads the model")
    try:
        chat.package_file()
    except ImportError as error:
        pytest.skip(str(error))
    made = chat.load_model(attention="eager")
    # "The capital of France is", and what follows, whatever it is
    inputs = {"input_ids": torch.tensor([[504, 3575, 282, 4649, 314]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    found = []
    for name in ("eager", "sdpa", "nattn"):
        with on(made, name):
            found.append(made.generate(**inputs, **options)[0].tolist())
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 10


# The mask, long and compiled, and reports


def test_long_prompt_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(description: Any) -> Any:
        raise AssertionError("a mask of 32,768 x 32,768 was made")

    monkeypatch.setattr(masks, "dense", refuse)
    config = transformers.MistralConfig(**{**DECODER, "num_hidden_layers": 1}, sliding_window=64)
    made = enlarged(transformers.MistralForCausalLM(config))
    with on(made, "nattn"):
        x = tokens(1, 32_768)
        real = torch.ones_like(x)
        real[:, -5:] = 0
        found = result(made, input_ids=x, attention_mask=real, logits_to_keep=8)
    assert found.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # what a compiler of another project warns of
def test_compiled() -> None:
    made = model("Llama")
    given = {"input_ids": tokens(2, 20)}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with on(made, "nattn"):
        expected = result(made, **given)
        compiled = torch.compile(made.forward, backend="eager", fullgraph=True)
        close(result(compiled, **given), expected)
        steps = made.generate(**given, **options, cache_implementation="static")
        torch.compiler.reset()
        forward = made.forward
        made.forward = torch.compile(forward, backend="eager")
        try:
            found = made.generate(**given, **options, cache_implementation="static")
        finally:
            made.forward = forward
            torch.compiler.reset()
    assert torch.equal(found, steps)


def test_gradient_checkpointing() -> None:
    made = copy.deepcopy(model("Llama"))
    inputs = {"input_ids": tokens(2, 20), "labels": tokens(2, 20, seed=1)}
    with on(made, "nattn"):
        expected = gradients(made, **inputs)
        for reentrant in (True, False):
            made.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
            found = gradients(made, **inputs)
            assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_report() -> None:
    made = t5()
    assert {row.reason for row in adapter.report(made)} == {
        "another implementation is set: enable(model) changes that"
    }
    with on(made, "nattn"):
        rows = adapter.report(made)
    assert len(rows) == 6
    assert {(row.kind, row.runs, row.reason) for row in rows} == {("T5Attention", "nattn", "")}
    assert len(str(rows).splitlines()) == 6
    assert str(adapter.report(torch.nn.Linear(2, 2))) == "no attention layers found"


def test_register_another_name() -> None:
    adapter.register("exact")
    config = transformers.LlamaConfig(**DECODER, attn_implementation="exact")
    made = transformers.LlamaForCausalLM(config)
    assert [row.reason for row in adapter.report(made)] == ["", ""]
    for name in ("my-flash", "sdpa", "a/b", "eager", ""):
        with pytest.raises(ValueError, match="name: expected one that transformers does not"):
            adapter.register(name)
    with pytest.raises(TypeError, match="name: expected a string"):
        adapter.register(None)
