"""Make ``nn_<style>.npz``: weights, inputs and outputs of attention layers of other libraries.

They are what `nattn.nn` is compared with where those libraries are not installed::

    pip install torch==2.13.0 transformers
    python tests/data/make_nn_vectors.py

Weights and inputs are random float32 numbers, outputs were computed of them in float64. A file
holds the weights by their usual names under ``state/``, the inputs ``x``, ``context`` and
``kv_lens``, and what of it goes into each output: ``out`` plain, ``causal``, ``padded`` with
kv_lens, ``crossed`` with the context.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
D_MODEL, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 6
B, N, N_CONTEXT = 2, 7, 5
KV_LENS = np.array([7, 4])

torch: Any = importlib.import_module("torch")


def numpy(x: Any) -> NDArray[Any]:
    array: NDArray[Any] = x.detach().numpy()
    return array


def randomised(module: Any) -> Any:
    """Return a module in float64 whose parameters are random numbers of float32."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            std = p.shape[-1] ** -0.5 if p.ndim > 1 else 0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    return module.double().eval()


def inputs(seed: int, n: int, width: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, n, width, generator=generator).double()


def additive(hidden: Any) -> Any:
    """Return a mask as Hugging Face's models add it to scores."""
    zero = torch.zeros(hidden.shape, dtype=torch.float64)
    return zero.masked_fill(hidden, float("-inf"))


X = inputs(1, N, D_MODEL)
PADDING = torch.arange(N)[None] >= torch.from_numpy(KV_LENS)[:, None]  # (B, N), True = ignore
FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)


def write(name: str, state: dict[str, Any], **arrays: Any) -> None:
    """Write results in float64, and what is exactly of float32 as such."""
    exact = {f"state/{key}": x for key, x in state.items()}
    exact |= {key: arrays.pop(key) for key in ("x", "context") if key in arrays}
    arrays = {key: x if isinstance(x, np.ndarray) else numpy(x) for key, x in arrays.items()}
    arrays |= {key: numpy(x).astype(np.float32) for key, x in exact.items()}
    np.savez_compressed(HERE / f"nn_{name}.npz", **arrays)


def from_torch() -> None:
    layer = randomised(torch.nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True))
    context = inputs(2, N_CONTEXT, D_MODEL)

    def run(keys: Any = X, **options: Any) -> Any:
        return layer(X, keys, keys, need_weights=False, **options)[0]

    write(
        "torch",
        layer.state_dict(),
        x=X,
        context=context,
        kv_lens=KV_LENS,
        out=run(),
        causal=run(attn_mask=FUTURE),
        padded=run(key_padding_mask=PADDING),
        crossed=run(context),
    )
    width = 10
    layer = torch.nn.MultiheadAttention(D_MODEL, HEADS, kdim=width, vdim=width, batch_first=True)
    layer, context = randomised(layer), inputs(3, N_CONTEXT, width)
    write("torch_kdim", layer.state_dict(), x=X, context=context, crossed=run(context))


def from_bert() -> None:
    bert = importlib.import_module("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(
        hidden_size=D_MODEL, num_attention_heads=HEADS, attn_implementation="sdpa"
    )
    layer = randomised(bert.BertAttention(config))
    state = {f"encoder.layer.0.attention.{name}": p for name, p in layer.state_dict().items()}

    def run(mask: Any = None) -> Any:
        # before the layer normalisation and the residual, which are not attention's
        return layer.output.dense(layer.self(X, attention_mask=mask)[0])

    padded = run(additive(PADDING[:, None, None]))
    write("bert", state, x=X, kv_lens=KV_LENS, out=run(), padded=padded)


def from_llama() -> None:
    """Write Llama, Qwen2 with its biases, and Phi-3, which keeps q, k and v in one matrix."""
    for name, class_name in (("llama", "Llama"), ("qwen2", "Qwen2"), ("phi3", "Phi3")):
        model = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = getattr(model, f"{class_name}Config")(
            hidden_size=D_MODEL,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            attn_implementation="sdpa",
            pad_token_id=0,
        )
        config.head_dim = HEAD_DIM
        layer = randomised(getattr(model, f"{class_name}Attention")(config, layer_idx=0))
        positions = torch.arange(N)[None]
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        angles = positions[..., None] * torch.cat([frequencies, frequencies])
        cos, sin = angles.cos(), angles.sin()  # the library's own are of float32
        for ours, theirs in zip(
            (cos, sin),
            getattr(model, f"{class_name}RotaryEmbedding")(config)(X, positions),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=1e-6)
        causal = layer(
            hidden_states=X, position_embeddings=(cos, sin), attention_mask=additive(FUTURE)
        )[0]
        write(name, layer.state_dict(), x=X, causal=causal)


def from_gpt2() -> None:
    gpt2 = importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    config = gpt2.GPT2Config(
        n_embd=D_MODEL, n_head=HEADS, attn_implementation="sdpa", attn_pdrop=0.0, resid_pdrop=0.0
    )
    layer = randomised(gpt2.GPT2Attention(config, layer_idx=0))
    state = {f"h.0.attn.{name}": p for name, p in layer.state_dict().items()}
    causal = layer(X, attention_mask=additive(FUTURE)[None, None])[0]
    write("gpt2", state, x=X, causal=causal)


if __name__ == "__main__":
    from_torch()
    from_bert()
    from_llama()
    from_gpt2()
