"""The benchmark: nattn against its peers and the processor's FMA peak, in one run.

`python -m nattn bench` measures the rows of `suite`, each with the figure that is asked for. How a
row is measured stands in `rows`, its table and files in `report`, the plot in `growth`.
"""

from .growth import Growth, Sweep, check_plot, plot, sweep
from .report import (
    BEGIN,
    END,
    check_markdown,
    check_table,
    machine,
    notes,
    table,
    write_json,
    write_markdown,
)
from .rows import Contestants, ExtraMemory, Ratio, Result, Row, Snippet, Speed
from .settings import PEERS, BenchError, Settings, default_settings
from .snippets import MODIFIED
from .suite import QUICK, ROWS, run, select

__all__ = [
    "BEGIN",
    "END",
    "MODIFIED",
    "PEERS",
    "QUICK",
    "ROWS",
    "BenchError",
    "Contestants",
    "ExtraMemory",
    "Growth",
    "Ratio",
    "Result",
    "Row",
    "Settings",
    "Snippet",
    "Speed",
    "Sweep",
    "check_markdown",
    "check_plot",
    "check_table",
    "default_settings",
    "machine",
    "notes",
    "plot",
    "run",
    "select",
    "sweep",
    "table",
    "write_json",
    "write_markdown",
]
