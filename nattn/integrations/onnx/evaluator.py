"""Running whole models."""

from __future__ import annotations

from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator

from .attention import Attention

OPERATORS = [Attention]


def evaluator(model: Any, **options: Any) -> Any:
    """Return onnx's reference evaluator of a model, with its attention on nattn.

    Parameters
    ----------
    model : ModelProto, bytes, str or path
        The model, or a file of it.
    **options : object
        What else ``onnx.reference.ReferenceEvaluator`` takes; operators in `new_ops` come first.

    Returns
    -------
    onnx.reference.ReferenceEvaluator
        ``run(None, {input: array})`` runs the model.

    Raises
    ------
    ValueError
        If a function of the model's own holds attention: the evaluator leaves those to its own
        operators. ``onnx.inliner.inline_local_functions(model)`` makes a model without them.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import parser
    >>> import nattn.integrations.onnx
    >>> model = parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["" : 23]>
    ...     graph (float[b, n, 64] x) => (float[b, n, 64] out) {
    ...         out = Attention <q_num_heads = 4, kv_num_heads = 4> (x, x, x) }''')
    >>> session = nattn.integrations.onnx.evaluator(model)
    >>> session.run(None, {"x": np.ones((2, 30, 64), np.float32)})[0].shape
    (2, 30, 64)
    """
    if isinstance(model, bytes):
        model = onnx.load_model_from_string(model)
    elif not isinstance(model, onnx.ModelProto):
        model = onnx.load(model)
    ours = {(operator.op_domain, operator.__name__) for operator in OPERATORS}
    for function in model.functions:
        held = sorted({n.op_type for n in function.node if (n.domain, n.op_type) in ours})
        if held:
            raise ValueError(
                f"model: expected no {', '.join(held)} within functions of its own, got some in "
                f"{function.name}; onnx.inliner.inline_local_functions(model) puts it in line"
            )
    given = list(options.pop("new_ops", None) or [])
    taken = {(operator.op_domain, operator.__name__) for operator in given}
    added = [o for o in OPERATORS if (o.op_domain, o.__name__) not in taken]
    return ReferenceEvaluator(model, new_ops=given + added, **options)
