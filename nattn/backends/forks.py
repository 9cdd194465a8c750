"""Locks that a fork waits for: one held by a thread that is gone in the child would never open."""

from __future__ import annotations

import os
from typing import Protocol


class Lock(Protocol):
    """What can be acquired and released."""

    def acquire(self) -> object:
        """Close the lock."""

    def release(self) -> object:
        """Open the lock."""


_guarded: list[Lock] = []
_held: list[Lock] = []


def guard(lock: Lock) -> None:
    """Let every fork from now on take this lock, after those that were guarded before it."""
    _guarded.append(lock)


def _before() -> None:
    # While it waits for one lock, its holder may import a module that guards another.
    n = 0
    while n < len(_guarded):
        _guarded[n].acquire()
        n += 1
    _held[:] = _guarded[:n]


def _after() -> None:
    # The first one taken is released last: until then no other fork can have set `_held`.
    held = _held.copy()
    _held.clear()
    for lock in reversed(held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
