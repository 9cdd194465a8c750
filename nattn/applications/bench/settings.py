"""How much a benchmark measures, and what it needs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from ..measure import PREPARE, processors

PEERS = tuple(name for name in PREPARE if name not in ("nattn", "reference"))
"""Columns of the table, where installed."""

PLAIN_PEERS = tuple(name for name in PEERS if name != "flex")
"""Peers of rows without functions of scores: FlexAttention compiles for half a minute each."""

FAST_PEERS = ("torch", "openvino")
"""Peers of rows in which a call takes seconds."""


class BenchError(Exception):
    """Something that a person can put right; the text says what."""


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes
    ----------
    threads : int
        Threads of every contestant.
    rounds : int
        Rounds that count.
    peers : tuple of str
        Names from `PEERS`.
    """

    threads: int
    rounds: int
    peers: tuple[str, ...]


def default_settings(quick: bool = False) -> Settings:
    """Return the settings of ``python -m nattn bench``."""
    return Settings(threads=processors(), rounds=3 if quick else 7, peers=PEERS)


def require(library: str, user: str) -> None:
    """Raise BenchError if a library is not installed: before any work, not after it."""
    if importlib.util.find_spec(library) is None:
        raise BenchError(
            f"{library} is not installed; the {user} needs: python -m pip install 'nattn[bench]'"
        )
