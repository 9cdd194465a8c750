"""Cases in numba-cuda's simulator: what runs in a process of its own, and what watches it.

``python cuda_simulated.py SUITE`` reads names of cases of cuda_cases.py, one a line, and writes a
line of JSON as each begins and as it ends. The simulator is chosen by an environment variable
before Numba is imported, so a test can only look on: `Simulator` does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable

import children

HANGS = 300
"""Seconds after which a case hangs; each takes a few."""


def run(suite: str, names: Iterable[str]) -> None:
    """Run cases and tell what came of each."""
    with contextlib.redirect_stdout(sys.stderr):
        found = getattr(importlib.import_module("cuda_cases"), suite)
    warnings.simplefilter("error")
    # Kernels compute with NumPy's scalars, which warn of every NaN and overflow; a GPU does not.
    warnings.simplefilter("ignore", RuntimeWarning)
    for name in names:
        report(name, None)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        error = ""
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[name]()
            except Exception:
                error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        report(name, error)


def report(name: str, error: str | None) -> None:
    """Write that a case begins, or how it ended: an empty error is none."""
    print(json.dumps({"name": name, "error": error}), flush=True)


class Simulator:
    """Cases that run in other processes, in order.

    If a process dies, the case that was running has failed, and another process does the rest.

    Parameters
    ----------
    suite : str
        "FORWARD" or "BACKWARD".
    names : list of str
        The cases.
    """

    def __init__(self, suite: str, names: list[str]) -> None:
        self._suite, self._names = suite, names
        self._errors: dict[str, str] = {}
        self._running: str | None = None
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._suite],
            env=children.environment(NUMBA_ENABLE_CUDASIM="1", PYTHONUNBUFFERED="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as file:
            file.writelines(f"{name}\n" for name in self._names if name not in self._errors)

    def error(self, name: str) -> str:
        """Wait for a case and return its traceback, which is empty if all is well."""
        while name not in self._errors:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if line:
                told = json.loads(line)
                self._running = told["name"]
                if told["error"] is not None:
                    self._errors[told["name"]] = told["error"]
                    self._running = None
            else:
                self._died()
        return self._errors[name]

    def _died(self) -> None:
        status = self._process.wait()
        self._log.seek(0)
        error = f"the process ended with status {status}\n{self._log.read()[-10_000:]}"
        self.close()
        if self._running is None:  # it cannot even begin
            self._errors |= {name: error for name in self._names if name not in self._errors}
            return
        self._errors[self._running] = error
        self._running = None
        self._start()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


if __name__ == "__main__":
    run(sys.argv[1], sys.stdin.read().splitlines())
