"""Measure attention fairly: what is measured, by whom, with which clock.

- `cases`: one attention call, its arrays and its floating-point operations.
- `clock`: contestants take turns in one run, and figures are ratios within a round.
- `memory`: the peak of the resident memory while a block runs.
- `peers`: how nattn, its reference and other libraries compute a case.
- `checks`: their results against the reference.
- `contestants`: each of them in a process of its own.
"""

from .cases import MODIFIERS, Case, document_numbers
from .checks import check
from .clock import Call, Sampler, Samples, interleave, processors, timed
from .contestants import THREAD_VARIABLES, Contestant
from .memory import PeakMemory
from .peers import PREPARE, Unsupported, prepare

__all__ = [
    "MODIFIERS",
    "PREPARE",
    "THREAD_VARIABLES",
    "Call",
    "Case",
    "Contestant",
    "PeakMemory",
    "Sampler",
    "Samples",
    "Unsupported",
    "check",
    "document_numbers",
    "interleave",
    "prepare",
    "processors",
    "timed",
]
