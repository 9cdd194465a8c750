"""Tensors whose elements are made when an operation of torch needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class LazyTensor(Tensor):
    """A tensor without elements of its own, which `attention_forward` reads as what it stands for.

    Attributes
    ----------
    dense : callable
        ``dense()`` returns a plain tensor with the elements.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    dense: Callable[[], Tensor]

    def before(self, func: Any, is_written: bool) -> None:
        """Learn that an operator is called with the elements.

        Parameters
        ----------
        func : torch.OpOverload
            Which.
        is_written : bool
            Whether it writes to this tensor.
        """

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator with the elements."""
        kwargs = kwargs or {}
        written: list[Any] = []
        for n, argument in enumerate(func._schema.arguments):
            x = args[n] if n < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.extend(x if isinstance(x, (list, tuple)) else [x])

        def made(x: Any) -> Any:
            if not isinstance(x, LazyTensor):
                return x
            x.before(func, any(x is y for y in written))
            return x.dense()

        return func(*tree_map(made, args), **tree_map(made, kwargs))
