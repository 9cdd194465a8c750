"""Telling attention where things stand: without positions it sees a set, not a sequence.

Each scheme is a small class that says in ``acts_on`` what it changes:

====================  ==========  =========================================================
`Sinusoidal`          ``"x"``     adds waves of geometrically growing length to the input
`LearnedTable`        ``"x"``     adds a learnt row for each position to the input
`Rotary`              ``"qk"``    turns pairs of columns of queries and keys
`Alibi`               ``"scores"``  subtracts a multiple of the distance from each score
`T5Bias`              ``"scores"``  adds a learnt bias for each range of distances to each score
====================  ==========  =========================================================

``params`` holds what is learnt, under names. What acts on arrays is called with one and has a
``backward`` for its gradient; what acts on scores gives `arguments` for `nattn.attention`, and its
``backward`` takes what `nattn.attention_backward` takes. All of them take memory that grows
linearly with the length.
"""

from .biases import Alibi, T5Bias
from .rotary import Rotary, rotary_frequencies
from .tables import LearnedTable, Sinusoidal, sinusoidal_encoding

__all__ = [
    "Alibi",
    "LearnedTable",
    "Rotary",
    "Sinusoidal",
    "T5Bias",
    "rotary_frequencies",
    "sinusoidal_encoding",
]
