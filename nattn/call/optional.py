"""Libraries that one part of nattn needs and a plain installation lacks."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str, who: str) -> Any:
    """Import a module of an optional library.

    Parameters
    ----------
    module : str
        Its name, ``"safetensors.numpy"`` for example.
    extra : str
        The optional dependencies of nattn that the library is among.
    who : str
        What needs it, to begin the error with.

    Returns
    -------
    module
        The module.

    Raises
    ------
    ImportError
        If it cannot be imported, with the way to install it. Its `name` is that of the library.

    Examples
    --------
    >>> require("json", "explain", "the page").loads("[1]")
    [1]
    """
    library = module.split(".")[0]
    try:
        importlib.import_module(library)  # a module of it may be there still when it is gone
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who}: expected the library {library}, got none that can be imported ({error}); "
            f'install it with python -m pip install "nattn[{extra}]"',
            name=library,
        ) from error
