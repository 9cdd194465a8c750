"""Progress of a long job: the callback's type, and the progress of one part of a job."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], object]
"""Called with the fraction of a job that is done, 0 to 1."""


def part_of(progress: Progress, begin: float, end: float) -> Progress:
    """Return the progress of a part of a job.

    Parameters
    ----------
    progress : callable
        Called with the fraction of the whole that is done.
    begin, end : float
        Fractions of the whole at which the part begins and ends.

    Returns
    -------
    callable
        To be called with the fraction of the part that is done.

    Examples
    --------
    >>> part_of(lambda done: round(100 * done), 0.5, 0.75)(0.4)
    60
    """
    return lambda done: progress(begin + done * (end - begin))
