"""ONNX's own node tests for the operator Attention, through the adapter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.backend.test.case.node.attention  # importing it makes the test cases
import pytest
from cases import qkv
from onnx import helper, inliner, parser
from onnx.backend.test.case import node as onnx_nodes
from onnx.backend.test.case.test_case import TestCase
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_attention

import nattn
import nattn.integrations.onnx
from nattn.integrations.onnx.attention import ATTRIBUTES

SCORES = "qk_matmul_output"


def is_attention(case: TestCase) -> bool:
    """Whether it is the operator itself, and not its expansion into other operators."""
    nodes = case.model.graph.node
    return len(nodes) == 1 and nodes[0].op_type == "Attention"


CASES = [case for case in onnx_nodes._NodeTestCases if is_attention(case)]


def on(backend: str) -> Any:
    """Return the operator, computed by a backend."""
    operator = nattn.integrations.onnx.Attention
    return type(operator.__name__, (operator,), {"backend": backend})


def test_no_case_is_left_out() -> None:
    assert len(CASES) == 93
    assert sum(SCORES in case.model.graph.node[0].output for case in CASES) == 18
    assert {a.name for case in CASES for a in case.model.graph.node[0].attribute} <= ATTRIBUTES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node(backend: str, case: TestCase, monkeypatch: pytest.MonkeyPatch) -> None:
    if SCORES not in case.model.graph.node[0].output:  # or the matrix is computed after all
        monkeypatch.delattr(op_attention, "_compute_attention")
    inputs, expected = case.data_sets[0]
    names = filter(None, case.model.graph.node[0].input)
    run = ReferenceEvaluator(case.model, new_ops=[on(backend)]).run
    got = run(None, dict(zip(names, inputs, strict=True)))
    for result, wanted in zip(got, expected, strict=True):
        assert result.dtype == wanted.dtype
        # the tolerances of ONNX's own runner
        rtol = max(case.rtol, 2**-6) if wanted.dtype == ml_dtypes.bfloat16 else case.rtol
        np.testing.assert_allclose(
            result.astype(np.float32), wanted.astype(np.float32), rtol=rtol, atol=case.atol
        )


def model(
    attributes: dict[str, Any], inputs: int = 3, outputs: int = 1, opset: int = 25
) -> onnx.ModelProto:
    """Return a model of one node, whose inputs and outputs are named by their numbers."""
    names = [f"in{i}" for i in range(inputs)]
    results = [f"out{i}" for i in range(outputs)]
    node = helper.make_node("Attention", names, results, **attributes)
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, None) for name in names],
        [helper.make_tensor_value_info(name, kind, None) for name in results],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def run(of: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    session = nattn.integrations.onnx.evaluator(of)
    found: list[np.ndarray] = session.run(None, {f"in{i}": x for i, x in enumerate(inputs)})
    return found


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_causal_is_aligned_with_the_first_key(opset: int) -> None:
    q, k, v = qkv(2, 3, 5, 9, 32)
    (out,) = run(model({"is_causal": 1}, opset=opset), q, k, v)
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, causal=True, q_offset=0))
    past = [np.ascontiguousarray(x[:, :, :4]) for x in (k, v)]
    new = [np.ascontiguousarray(x[:, :, 4:]) for x in (k, v)]
    none = np.ones((5, 9), bool)
    out, key, value = run(model({"is_causal": 1}, 6, 3, opset), q, *new, none, *past)
    np.testing.assert_array_equal(key, k)
    np.testing.assert_array_equal(value, v)
    budget = 1e-5
    np.testing.assert_allclose(out, nattn.attention(q, k, v, causal=True), rtol=0, atol=budget)


def test_a_query_that_sees_no_key_is_zero() -> None:
    q, k, v = qkv(2, 3, 5, 9, 32)
    mask = np.ones((5, 9), bool)
    mask[2] = False
    (out,) = run(model({}, 4), q, k, v, mask)
    assert not out[:, :, 2].any()
    assert np.isfinite(out).all()


def test_a_short_mask_hides_the_keys_behind_it() -> None:
    q, k, v = qkv(2, 3, 5, 9, 32)
    (out,) = run(model({}, 4), q, k, v, np.ones((5, 6), bool))
    np.testing.assert_array_equal(out, nattn.attention(q, k, v, mask=np.arange(9) < 6))
    (out,) = run(model({}, 4), q, k, v, np.zeros(6, np.float32))  # one axis
    reference = nattn.attention(q, k[:, :, :6], v[:, :, :6], backend="reference")
    np.testing.assert_allclose(out, reference, rtol=0, atol=1e-5)


def test_softmax_in_float64() -> None:
    q, k, v = qkv(2, 3, 5, 9, 32)
    (out,) = run(model({"softmax_precision": onnx.TensorProto.DOUBLE}), q, k, v)
    assert out.dtype == np.float32
    wide = nattn.attention(*(x.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_array_equal(out, wide.astype(np.float32))


BRANCHES = """
    <ir_version: 10, opset_import: ["" : 23]>
    graph (bool which, float[b, h, n, d] q, float[b, h, m, d] k) => (float[b, h, n, d] out) {
        out = If (which) <
            then_branch = then () => (float[b, h, n, d] a) { a = Attention (q, k, k) },
            else_branch = or () => (float[b, h, n, d] c) { c = Identity (q) }
        >
    }"""


def test_branches_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(op_attention, "_compute_attention")
    q, k, _ = qkv(2, 3, 5, 9, 32)
    session = nattn.integrations.onnx.evaluator(parser.parse_model(BRANCHES))
    (out,) = session.run(None, {"which": np.array(True), "q": q, "k": k})
    np.testing.assert_array_equal(out, nattn.attention(q, k, k))


FUNCTION = """
    <ir_version: 10, opset_import: ["" : 23, "own" : 1]>
    graph (float[b, h, n, d] x) => (float[b, h, n, d] out) { out = own.layer (x) }
    <domain: "own", opset_import: ["" : 23]>
    layer (x) => (y) { y = Attention (x, x, x) }"""


def test_functions_of_a_model_are_put_in_line_first() -> None:
    holds = parser.parse_model(FUNCTION)
    with pytest.raises(ValueError, match=r"no Attention within functions.* layer; onnx\.inliner"):
        nattn.integrations.onnx.evaluator(holds)
    x, _, _ = qkv(2, 3, 9, 9, 32)
    session = nattn.integrations.onnx.evaluator(inliner.inline_local_functions(holds))
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], nattn.attention(x, x, x))


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_models_are_taken_as_onnx_takes_them(kind: str, tmp_path: Any) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model({}), path)
    x, _, _ = qkv(2, 3, 9, 9, 32)
    session = nattn.integrations.onnx.evaluator(path.read_bytes() if kind == "bytes" else path)
    (out,) = session.run(None, {"in0": x, "in1": x, "in2": x})
    np.testing.assert_array_equal(out, nattn.attention(x, x, x))


def test_operators_of_the_caller_come_first() -> None:
    operator = on("reference")
    session = nattn.integrations.onnx.evaluator(model({}), new_ops=[operator])
    assert isinstance(session.rt_nodes_[0], operator)


@pytest.mark.parametrize(
    ("attributes", "change", "said"),
    [
        ({"heads": 3}, None, "expected attributes among is_causal, .*, got heads"),
        ({"q_num_heads": 2}, None, "neither q_num_heads nor kv_num_heads .*, got 2 and None"),
        ({}, "flat", "q_num_heads and kv_num_heads that divide .*, got None for Q"),
        ({"q_num_heads": 2, "kv_num_heads": 5}, "flat", "divide .*, got 5 for K"),
        ({}, "past", "expected past_key and past_value together, got one"),
        ({}, "both", "expected past_key or nonpad_kv_seqlen, got both"),
        ({}, "axes", "expected three or four axes of Q, K and V, got Q"),
        ({}, "past axes", "of four axes, got"),
        ({"left_window_size": -2}, None, "window_size: expected"),
    ],
)
def test_what_does_not_fit(attributes: dict[str, Any], change: str | None, said: str) -> None:
    inputs: list[Any] = list(qkv(2, 3, 5, 9, 32))
    n, k, v = len(inputs), inputs[1], inputs[2]
    if change == "flat":
        inputs = [x[:, 0] for x in inputs]
    elif change == "axes":
        inputs[0] = inputs[0][0]
    elif change is not None:
        cache = {"past": [k], "both": [k, v, np.full(len(k), 9)], "past axes": [k[0], v[0]]}
        inputs += [np.ones((5, 18), bool), *cache[change]]
        n = len(inputs)
    with pytest.raises(ValueError, match=said):
        run(model(attributes, n), *inputs)
