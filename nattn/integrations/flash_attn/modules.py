"""Modules by the names of the package flash_attn, for programs that import it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import arrays, cache, packed, padding

VERSION = "2.8.3"
"""The edition of flash-attention whose signatures these are."""

_INTERFACE = {
    name: getattr(module, name)
    for module in (arrays, packed, cache)
    for name in vars(module)
    if name.startswith("flash_attn_")
}
_PADDING = {
    name: getattr(padding, name)
    for name in ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")
}
_NAMES = {
    "flash_attn": {**_INTERFACE, "__version__": VERSION},
    "flash_attn.flash_attn_interface": _INTERFACE,
    "flash_attn.bert_padding": _PADDING,
}


def install() -> None:
    """Let ``import flash_attn`` find the functions of nattn, in this process.

    `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` are made; a
    second call does nothing. Programs that ask for the installed distribution, or for a GPU, before
    they import it are not reached.

    Raises
    ------
    RuntimeError
        If the real flash_attn is imported or could be.

    Examples
    --------
    >>> import nattn.integrations.flash_attn
    >>> nattn.integrations.flash_attn.install()
    >>> from flash_attn import flash_attn_func
    >>> nattn.integrations.flash_attn.uninstall()
    """
    if _is_ours(sys.modules.get("flash_attn")):
        return
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        raise RuntimeError(
            "flash_attn: expected none beside nattn's, got one that is imported or installed; call "
            "the functions of nattn.integrations.flash_attn, or uninstall flash-attn"
        )
    made = {name: _module(name, content) for name, content in _NAMES.items()}
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    sys.modules.update(made)


def uninstall() -> None:
    """Undo `install`; what was imported meanwhile stays as it is."""
    if _is_ours(sys.modules.get("flash_attn")):
        for name in _NAMES:
            sys.modules.pop(name, None)


def _is_ours(module: Any) -> bool:
    return getattr(module, "__nattn__", False) is True


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "The functions of flash-attention 2, computed by nattn.")
    is_package = name == "flash_attn"
    module.__spec__ = ModuleSpec(name, None, origin="nattn", is_package=is_package)
    module.__package__ = "flash_attn"
    if is_package:
        module.__path__ = []
    vars(module).update(content, __nattn__=True, __all__=[x for x in content if x[0] != "_"])
    return module
