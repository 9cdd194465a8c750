"""What tells positions apart: tables, rotations, and biases of the scores."""

from .encodings import (
    Alibi,
    LearnedTable,
    Rotary,
    Sinusoidal,
    T5Bias,
    rotary_frequencies,
    sinusoidal_encoding,
)

__all__ = [
    "Alibi",
    "LearnedTable",
    "Rotary",
    "Sinusoidal",
    "T5Bias",
    "rotary_frequencies",
    "sinusoidal_encoding",
]
