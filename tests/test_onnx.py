"""ONNX's own node tests for the operator Attention, through an adapter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.backend.test.case.node.attention  # importing it makes the test cases
import pytest
from onnx.backend.test.case import node as onnx_nodes
from onnx.backend.test.case.test_case import TestCase

import nattn

OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def attributes(case: TestCase) -> dict[str, Any]:
    node = case.model.graph.node[0]
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def wants_scores(case: TestCase) -> bool:
    """Whether the n x n scores are an output, which nattn never builds."""
    return "qk_matmul_output" in case.model.graph.node[0].output


def is_attention(case: TestCase) -> bool:
    """Whether it is the operator itself, and not its expansion into other operators."""
    nodes = case.model.graph.node
    return len(nodes) == 1 and nodes[0].op_type == "Attention"


ALL = [case for case in onnx_nodes._NodeTestCases if is_attention(case)]
CASES = [case for case in ALL if not wants_scores(case)]


def run(case: TestCase, backend: str) -> dict[str, np.ndarray]:
    """Run a node as nattn understands it.

    The mask is right-aligned, -inf or False where it is too short; without a cache causal is
    top-left aligned, with `past_key` the queries follow it, and with `nonpad_kv_seqlen` they end
    there, which is nattn's default.
    """
    node = case.model.graph.node[0]
    given = dict(zip(filter(None, node.input), case.data_sets[0][0], strict=True))
    options = attributes(case)
    q, k, v = given["Q"], given["K"], given["V"]
    flat = q.ndim == 3
    if flat:  # (B, N, H * D)
        q, k, v = (
            x.reshape(*x.shape[:2], options[heads], -1).transpose(0, 2, 1, 3)
            for x, heads in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads"))
        )
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k = np.concatenate([given["past_key"], k], axis=2)
        v = np.concatenate([given["past_value"], v], axis=2)

    arguments: dict[str, Any] = {
        "causal": bool(options.get("is_causal", 0)),
        "window_size": (
            options.get("left_window_size", -1),
            options.get("right_window_size", -1),
        ),
    }
    if "nonpad_kv_seqlen" in given:
        arguments["kv_lens"] = given["nonpad_kv_seqlen"]
    else:
        arguments["q_offset"] = past
    if "scale" in options:
        arguments["scale"] = options["scale"]
    if options.get("softcap"):
        arguments["softcap"] = options["softcap"]
    if "attn_mask" in given:
        mask = given["attn_mask"]
        hidden = False if mask.dtype == bool else -np.inf
        short = k.shape[2] - mask.shape[-1]
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=hidden)
        arguments["mask" if mask.dtype == bool else "bias"] = mask

    y = nattn.attention(q, k, v, backend=backend, **arguments)
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(*given["Q"].shape[:2], -1)
    return dict(zip(OUTPUTS, (y, k, v), strict=False))


def test_no_case_is_left_out() -> None:
    assert len(ALL) == 93
    assert len(CASES) == 75
    known = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap"}
    known |= {"left_window_size", "right_window_size"}
    assert {name for case in CASES for name in attributes(case)} <= known


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node(backend: str, case: TestCase) -> None:
    got = run(case, backend)
    names = list(case.model.graph.node[0].output)
    for name, expected in zip(names, case.data_sets[0][1], strict=True):
        result = got[name].astype(expected.dtype)
        # the tolerances of ONNX's own runner
        rtol = max(case.rtol, 2**-6) if expected.dtype == ml_dtypes.bfloat16 else case.rtol
        np.testing.assert_allclose(
            result.astype(np.float32), expected.astype(np.float32), rtol=rtol, atol=case.atol
        )
