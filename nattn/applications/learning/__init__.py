"""Self-attention learns: three small tasks, gradients from nattn, and a few lines of Adam.

A list of key-value pairs in random order, and a question: the value of this key? Attention finds
it by content. If the list gives the key twice, and the later value counts, content is not enough:
without positions attention is blind to order, both values are as likely, and whatever is learned
the loss stays above ``log 2``. With positions the same network learns both tasks at once. Under
the causal mask it learns to continue a text, and does better than anything can that sees the last
character alone.

Everything that is not attention is here, forward and backward, in plain NumPy.
"""

from __future__ import annotations

from .network import Adam, Network, cross_entropy, evaluate, train
from .tasks import Curve, learn_all, learn_lists, learn_text

__all__ = [
    "Adam",
    "Curve",
    "Network",
    "cross_entropy",
    "evaluate",
    "learn_all",
    "learn_lists",
    "learn_text",
    "train",
]
