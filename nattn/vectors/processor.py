"""The processor that Numba compiles for, which NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may change."""

from __future__ import annotations

import functools
from typing import NamedTuple

from numba.core.registry import cpu_target


class Processor(NamedTuple):
    """What the code generator is told of it.

    Attributes
    ----------
    triple : str
        Its architecture first: "x86_64-...", "aarch64-...".
    name : str
        That of the model.
    features : frozenset of str
        Its instruction sets.
    """

    triple: str
    name: str
    features: frozenset[str]

    @property
    def is_arm(self) -> bool:
        """Whether it is one of 64-bit ARM's."""
        return self.triple.startswith(("aarch64", "arm64"))

    @property
    def converts_halves(self) -> bool:
        """Whether float16 is converted to float32 and back by an instruction."""
        return self.is_arm or "f16c" in self.features


@functools.cache
def processor() -> Processor:
    """Describe it. The first time, Numba imports half of itself."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    have = frozenset(f[1:] for f in features.split(",") if f.startswith("+"))
    return Processor(triple, name, have)
