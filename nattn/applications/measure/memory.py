"""How much memory a call takes beyond what was there before."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import Self


class PeakMemory:
    """Measure how far the process's resident memory rises while a block runs.

    On Linux the kernel's high-water mark is reset at the start of the block and read at its end.
    Elsewhere the mark cannot be reset, and what an earlier peak has covered is not seen.

    Attributes
    ----------
    bytes : int
        Peak of the block less what was resident at its start, 0 until the block ends.
    method : str
        How it was measured, or that it could not be, for people.

    Examples
    --------
    >>> from nattn.applications.measure import PeakMemory
    >>> with PeakMemory() as memory:
    ...     block = bytearray(32 << 20)
    >>> memory.bytes >= 0
    True
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.method = "not measured on this system"
        self._start = 0

    def __enter__(self) -> Self:
        gc.collect()
        _give_back_free_memory()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self._start = _proc_status("VmRSS")
            self.method = "peak resident set"
        except OSError:
            if (peak := _peak_resident()) is not None:
                self._start = peak
                self.method = "growth of the process's highest resident set"
        return self

    def __exit__(self, *exception: object) -> None:
        if self.method == "peak resident set":
            self.bytes = max(0, _proc_status("VmHWM") - self._start)
        elif (peak := _peak_resident()) is not None:
            self.bytes = peak - self._start


def _give_back_free_memory() -> None:
    """Let glibc return free memory: if it were reused, it would not be seen to become resident."""
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _proc_status(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {key} in /proc/self/status")


def _peak_resident() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
