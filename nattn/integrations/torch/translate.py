"""Functions of scores and masks written for torch, as NumPy-style functions for nattn.

torch traces a function on single numbers, as its own FlexAttention does; each operation of the
trace becomes a line of Python, and a tensor that the function captures an array that the new
function is bound to.
"""

from __future__ import annotations

import functools
import keyword
import linecache
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...functions.binding import MASK_MOD, SCORE_MOD, Bound, Combination
from .aten import TWINS, VIEWS, Number, decompositions, kind_of, literal, text_of
from .captures import Leaves, Unknown, alike, captured

Mod = Callable[..., Any]


def translate(
    mod: Mod,
    kind: Literal["score_mod", "mask_mod"] = "score_mod",
    *,
    device: torch.device | str = "cpu",
) -> Mod:
    """Write a function for torch's FlexAttention as one for `nattn.attention`.

    Parameters
    ----------
    mod : callable
        ``score_mod(score, b, h, q_idx, kv_idx)`` or ``mask_mod(b, h, q_idx, kv_idx)`` of torch's
        operations, which gets tensors without axes. Those of nattn come back as they are.
    kind : {"score_mod", "mask_mod"}, default "score_mod"
        Which of the two.
    device : device, default "cpu"
        Where the tensors are to lie that `mod` gets.

    Returns
    -------
    callable
        To be passed to `nattn.attention` and to `nattn.BlockMask.from_mask_mod`. Tensors that
        `mod` captures are bound to it, as arrays, and read when it is used; what `mod` computes of
        them alone, and its numbers, are those of now. Tensors of which a gradient is wanted stay
        tensors, for `nattn.integrations.torch.attention`.

    Raises
    ------
    NotImplementedError
        For an operation that nattn has not. The text names it.
    TypeError
        If `mod` does with tensors what only a single number can do, as in ``if score > 0``, or
        returns no number, as a mask no bool.

    Notes
    -----
    Floats have the precision of the call, whatever they are converted to, and integers do not
    wrap. An index out of range raises IndexError where the pair is visible. `torch.no_grad` within
    `mod` is not seen: what is to have no gradient is to be detached.

    Examples
    --------
    >>> import numpy as np, torch
    >>> slopes = torch.tensor([0.5, 0.25])
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score - slopes[h] * torch.abs(q_idx - kv_idx)
    >>> ours = translate(alibi)
    >>> ours(np.zeros(3), 0, 1, 2, np.arange(3))
    array([-0.5 , -0.25,  0.  ])
    """
    if kind not in ("score_mod", "mask_mod"):
        raise ValueError(f"kind: expected 'score_mod' or 'mask_mod', got {kind!r}")
    if isinstance(mod, Bound | Combination):
        return mod
    if not callable(mod):
        raise TypeError(f"{kind}: expected a function, got {type(mod).__name__}")
    found = _remembered(mod, kind, torch.device(device))
    learns = kind == "score_mod" and torch.is_grad_enabled()
    bound = {
        name: _with_axes(x) if learns and x.requires_grad else array_of(x)
        for name, x in found.tensors.items()
    }
    return functools.partial(found.function, **bound) if bound else found.function


def on_tensors(score_mod: Mod, device: torch.device) -> Mod:
    """Do what `translate` does for a score_mod, and bind it to tensors whatever they are."""
    if isinstance(score_mod, Bound | Combination) or not callable(score_mod):
        return translate(score_mod)
    found = _remembered(score_mod, "score_mod", device)
    tensors = {name: _with_axes(x) for name, x in found.tensors.items()}
    return functools.partial(found.function, **tensors) if tensors else found.function


def _with_axes(tensor: Tensor) -> Tensor:
    """Return a tensor of one number as one with an axis: a translated function indexes it."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def array_of(tensor: Tensor) -> Any:
    """View a captured tensor as an array of at least one axis; one on a GPU as a tensor."""
    plain = _with_axes(tensor.detach())
    if plain.dtype == torch.bfloat16:  # which no function of nattn is bound to
        plain = plain.float()
    return plain if plain.is_cuda else plain.numpy()


def name_of(mod: Any) -> str:
    """Return what a function is called."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    return getattr(mod, "__name__", type(mod).__name__)


class Translation(NamedTuple):
    """A NumPy-style function, and the tensors for its parameters behind those of the call."""

    function: types.FunctionType
    tensors: dict[str, Tensor]
    lasting: bool  # nothing was computed of a captured tensor


# Translations are remembered while nothing has changed that a function refers to

_known: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Leaves, Translation]]] = (
    weakref.WeakKeyDictionary()
)


def _remembered(mod: Mod, kind: str, device: torch.device) -> Translation:
    leaves = list(captured("", mod, frozenset()))
    key = kind, device, torch.get_default_dtype()
    try:
        known = _known.setdefault(mod, {})
    except TypeError:  # no hash, or no weak references
        known = {}
    found = known.get(key)
    if found is not None and alike(found[0], leaves):
        return found[1]
    names = {id(x): name for name, x in leaves if isinstance(x, Tensor)}
    for name, x in leaves:
        if isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise NotImplementedError(
                f"{kind}: expected captured tensors that torch.func does not transform, got "
                f"{name or 'one'} of {name_of(mod)}; bind it with functools.partial to a function "
                "in NumPy's style, for nattn.integrations.torch.attention"
            )
    result = _Translator(mod, kind, names).translate(device)
    if result.lasting and not any(isinstance(x, Unknown) for _, x in leaves):
        known[key] = leaves, result
    return result


# A trace becomes text


class _Constant(NamedTuple):
    """A tensor that no argument changes: one that is captured, or computed of such ones."""

    tensor: Tensor
    captured: bool
    fixed: bool  # made by the function itself, of numbers


class _Part(NamedTuple):
    """What is left of an array of which some axes have been indexed."""

    name: str
    indices: tuple[str, ...]
    ndim: int
    dtype: torch.dtype


class _Translator:
    """Writes the text of one function."""

    def __init__(self, mod: Mod, kind: str, names: dict[int, str]) -> None:
        self.mod, self.kind, self.names = mod, kind, names
        self.parameters = SCORE_MOD if kind == "score_mod" else MASK_MOD
        self.lines: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[Any, Any] = {}
        self.lasting = True

    def translate(self, device: torch.device) -> Translation:
        trace = self.trace(device)
        trace.graph.eliminate_dead_code()
        arguments = iter(self.parameters)
        result: Any = None
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                name = next(arguments)
                self.values[node] = Number(name, "float" if name == "score" else "int")
            elif node.op == "get_attr":
                tensor = functools.reduce(getattr, node.target.split("."), trace)
                self.values[node] = _Constant(tensor, captured=True, fixed=False)
            elif node.op == "output":
                result = node.args[0]
            else:
                self.values[node] = self.value(node)
        if not isinstance(result, (torch.fx.Node, bool, int, float)):
            raise TypeError(
                f"{self.kind}: expected {name_of(self.mod)} to return one tensor, got {result}"
            )
        number = self.number(result, "what it returns")
        text = number.text
        if self.kind == "mask_mod" and number.kind != "bool":
            raise TypeError(
                f"{self.kind}: expected {name_of(self.mod)} to return a tensor of bools, got "
                f"{number.kind}"
            )
        if self.kind == "score_mod" and number.kind == "bool":
            text = f"np.where({text}, 1.0, 0.0)"
        name = name_of(self.mod)
        name = name if name.isidentifier() and not keyword.iskeyword(name) else self.kind
        lines = [f"def {name}({', '.join((*self.parameters, *self.tensors))}):"]
        lines += [f"    {line}" for line in (*self.lines, f"return {text}")]
        function = _compiled("\n".join(lines) + "\n", name)
        return Translation(function, self.tensors, self.lasting)

    def trace(self, device: torch.device) -> torch.fx.GraphModule:
        traced = make_fx(
            lambda *args: self.mod(*args),
            decomposition_table=decompositions(),
            tracing_mode="fake",  # so that no index is looked up, which may be out of range at 0
            _allow_non_fake_inputs=True,
        )
        try:
            # what torch.func does to inputs of the call is nothing to single numbers
            with temporarily_clear_interpreter_stack(), torch.no_grad(), TransformGetItemToIndex():
                numbers = [
                    torch.zeros(
                        (), dtype=torch.float32 if x == "score" else torch.int32, device=device
                    )
                    for x in self.parameters
                ]
                return traced(*numbers)
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            raise TypeError(
                f"{self.kind}: expected no Python if, while, and, or, not, nor item(), on what "
                f"{name_of(self.mod)} is called with, got one; choose with torch.where(condition, "
                "a, b), join with & | ~"
            ) from error

    def refuse(self, what: object, why: str = "") -> NotImplementedError:
        return NotImplementedError(
            f"{self.kind}: expected operations on single numbers that nattn has, too, got {what} "
            f"in {name_of(self.mod)}{why}"
        )

    def value(self, node: torch.fx.Node) -> Any:
        target: Any = node.target
        schema = getattr(target, "_schema", None)
        if schema is None or torch.Tag.nondeterministic_seeded in target.tags:
            raise self.refuse(target)
        name = TWINS.get(schema.name, schema.name).removeprefix("aten::").removeprefix("prims::")
        inputs = [self.values[x] for x in node.all_input_nodes]
        if name == "index":
            found = self.index(node)
            if found is not None:
                return found
        if schema.is_mutable:
            made_by = node.all_input_nodes[0].target if node.all_input_nodes else None
            shared = getattr(made_by, "_opname", "") in VIEWS
            if shared or (isinstance(inputs[0], _Constant) and not inputs[0].fixed):
                raise self.refuse(target, ", which writes to what it shares")
            name = name.removesuffix("_")
        if all(isinstance(x, _Constant) for x in inputs) and not schema.is_mutable:
            return self.constant(node, inputs)
        if not isinstance(node.meta["val"], Tensor):
            raise self.refuse(target, ", which makes a number of Python")
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        if name.startswith("new_") or name.endswith("_like"):
            return self.filled(node, name.removeprefix("new_").removesuffix("_like"))
        kind = kind_of(dtype)
        if shape or kind is None:
            raise self.refuse(target, f", which makes a tensor of shape {tuple(shape)}, {dtype}")
        text = text_of(name, kind, self.arguments(node, schema))
        if text is None:
            detail = " to integers" if name == "_to_copy" and kind == "int" else ""
            raise self.refuse(f"{target}{detail}")
        return self.assigned(text, kind)

    def arguments(self, node: torch.fx.Node, schema: Any) -> list[Any]:
        """Return all arguments in the order of the schema, nodes and numbers as `Number`."""
        found: list[Any] = []
        for n, parameter in enumerate(schema.arguments):
            given = node.args[n] if n < len(node.args) else node.kwargs.get(parameter.name)
            if given is None and parameter.has_default_value():
                given = parameter.default_value
            plain = isinstance(given, (torch.fx.Node, bool, int, float))
            found.append(self.number(given, node.target) if plain else given)
        return found

    def number(self, x: Any, where: object) -> Number:
        if not isinstance(x, torch.fx.Node):
            return literal(x)
        value = self.values[x]
        if isinstance(value, Number):
            return value
        if isinstance(value, _Part) or value.tensor.ndim:
            shape = tuple(x.meta["val"].shape) if "val" in x.meta else tuple(value.tensor.shape)
            raise self.refuse(where, f", which works on a tensor of shape {shape}")
        kind = kind_of(value.tensor.dtype)
        if kind is None:
            raise self.refuse(value.tensor.dtype)
        if value.fixed:
            return literal(value.tensor.item())
        return Number(f"{self.bound(value)}[0]", kind)

    def assigned(self, text: str, kind: str) -> Number:
        if text.isidentifier():
            return Number(text, kind)
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return Number(name, kind)

    def bound(self, value: _Constant) -> str:
        """Return the name of the parameter that a tensor is bound to."""
        for name, x in self.tensors.items():
            if x is value.tensor:
                return name
        wanted = self.names.get(id(value.tensor), "")
        taken = {*self.parameters, *self.tensors, "np", "abs"}
        usable = wanted.isidentifier() and not keyword.iskeyword(wanted) and wanted not in taken
        if not usable or (wanted[0] == "x" and wanted[1:].isdigit()):
            wanted = f"tensor{len(self.tensors)}"
        self.tensors[wanted] = value.tensor
        return wanted

    def constant(self, node: torch.fx.Node, inputs: list[_Constant]) -> _Constant:
        """Compute what depends on no argument."""
        target: Any = node.target
        made = target._opname in ("lift_fresh_copy", "lift_fresh")
        fixed = made or all(x.fixed for x in inputs)
        self.lasting = self.lasting and fixed
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda x: self.values[x].tensor
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kind == "score_mod"):
            result = target(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise self.refuse(target)
        return _Constant(result, captured=False, fixed=fixed)

    def filled(self, node: torch.fx.Node, name: str) -> _Constant:
        """Return a new tensor that takes no more than its dtype from an argument."""
        values = {"ones": 1, "zeros": 0, "full": node.args[-1]}
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        if name not in values or not isinstance(values[name], (bool, int, float)):
            raise self.refuse(node.target)
        return _Constant(torch.full(shape, values[name], dtype=dtype), captured=False, fixed=True)

    def index(self, node: torch.fx.Node) -> Number | _Part | None:
        """Index an array by single integers; None if that can be computed now."""
        base, given = self.values[node.args[0]], list(node.args[1])
        if isinstance(base, Number):
            raise self.refuse(node.target)
        inputs = [self.values[x] for x in node.all_input_nodes]
        if all(isinstance(x, _Constant) for x in inputs) and any(x.tensor.ndim for x in inputs[1:]):
            return None
        numbers = [self.number(x, node.target) for x in given if x is not None]
        fixed = all(x.literal for x in numbers)
        if isinstance(base, _Constant) and fixed and not base.captured:
            return None
        bad = [x.meta["val"].dtype for x in given if x is not None and "val" in x.meta]
        bad = [x for x in bad if kind_of(x) != "int" or x == torch.uint8]
        if bad or len(numbers) != len(given):
            got = f" by {bad[0]}" if bad else " by a slice"
            raise self.refuse(f"{node.target}{got}")
        if isinstance(base, _Constant):
            base = _Part(self.bound(base), (), base.tensor.ndim, base.tensor.dtype)
        indices = (*base.indices, *(x.text for x in numbers))
        if len(indices) < base.ndim:
            part: _Part = base._replace(indices=indices)
            return part
        kind = kind_of(base.dtype)
        if kind is None:
            raise self.refuse(base.dtype)
        return self.assigned(f"{base.name}[{', '.join(indices)}]", kind)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str, name: str) -> types.FunctionType:
    """Make a function of a text; the same one of the same text."""
    file = f"<{__name__}: {name} {_compiled.cache_info().misses}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope: dict[str, Any] = {"np": np, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    function: types.FunctionType = scope[name]
    return function
