"""Dtypes and shapes of what contributed operators make, against what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from outrider.providers.wire.dtypes import NUMBER, onnx_name
from outrider.scheduler.model import load_model
from outrider.scheduler.standins import DOMAIN, RULES

pytestmark = pytest.mark.fast

F, U, S = np.float32, np.uint8, np.int8
IMAGE, ROWS, SCALE, ZERO = np.ones((1, 2, 5, 6), F), np.ones((2, 3, 4), F), np.full((), 0.5, F), np.zeros((), U)
GATES = np.ones(12, F)

# op -> inputs, attributes, number of outputs, and whether the shape of the first is known
CASES: dict[str, tuple[list[Any], dict[str, Any], int, bool]] = {
    "BiasGelu": ([ROWS, np.ones(4, F)], {}, 1, True),
    "QuickGelu": ([ROWS], {}, 1, True),
    "QLinearSigmoid": ([np.ones((2, 3), U), SCALE, ZERO, SCALE, ZERO], {}, 1, True),
    "QLinearAdd": ([np.ones((2, 3), U), SCALE, ZERO, np.ones((1, 3), U), SCALE, ZERO, SCALE, ZERO], {}, 1, True),
    "SkipLayerNormalization": ([ROWS, ROWS, np.ones(4, F), np.ones(4, F)], {}, 1, True),
    "DequantizeLinear": ([np.ones((2, 3), U), SCALE, ZERO], {}, 1, True),
    "QuantizeLinear": ([ROWS, SCALE, ZERO], {}, 1, True),
    "DynamicQuantizeMatMul": ([ROWS, np.ones((4, 5), S), SCALE], {}, 1, True),
    "MatMulIntegerToFloat": ([np.ones((2, 4), U), np.ones((4, 5), S), SCALE, SCALE], {}, 1, True),
    "FusedMatMul": ([ROWS, np.ones((2, 5, 4), F)], {"transB": 1}, 1, False),
    "FusedConv": ([IMAGE, np.ones((3, 2, 3, 3), F)], {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1, True),
    "QLinearGlobalAveragePool": ([np.ones((1, 2, 5, 6), U), SCALE, ZERO, SCALE, ZERO], {}, 1, True),
    "QLinearAveragePool": (
        [np.ones((1, 2, 5, 6), U), SCALE, ZERO, SCALE, ZERO], {"kernel_shape": [2, 2], "strides": [2, 2]}, 1, True,
    ),
    "QLinearConcat": (
        [SCALE, ZERO, np.ones((1, 2), U), SCALE, ZERO, np.ones((1, 3), U), SCALE, ZERO], {"axis": 1}, 1, True,
    ),
    "QGemm": ([np.ones((2, 3), U), SCALE, ZERO, np.ones((3, 4), U), SCALE, ZERO], {}, 1, True),
    "EmbedLayerNormalization": (
        [np.ones((2, 3), np.int32), None, np.ones((9, 4), F), np.ones((9, 4), F), None, np.ones(4, F), np.ones(4, F)],
        {}, 2, True,
    ),
    "Attention": ([ROWS, np.ones((4, 12), F), GATES], {"num_heads": 2}, 1, False),
    "MatMulNBits": (
        [np.ones((2, 32), F), np.ones((8, 2, 8), U), np.ones(16, F)],
        {"K": 32, "N": 8, "bits": 4, "block_size": 16}, 1, True,
    ),
}  # fmt: skip


def model(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph(nodes, "one", inputs, outputs), opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("op", CASES)
def test_types_are_those_that_come_out(op: str) -> None:
    inputs, attributes, count, known = CASES[op]
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if name}
    infos = [helper.make_tensor_value_info(name, NUMBER[onnx_name(x.dtype)], x.shape) for name, x in feeds.items()]
    node = helper.make_node(op, names, [f"y{i}" for i in range(count)], domain=DOMAIN, **attributes)
    made = [onnx.ValueInfoProto(name=name) for name in node.output]
    session = ort.InferenceSession(model([node], infos, made).SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(None, feeds)
    # What the graph returns has its dtype declared; what is inside it has not.
    copies = [helper.make_node("Identity", [name], [f"z{i}"]) for i, name in enumerate(node.output)]
    returned = [
        helper.make_tensor_value_info(f"z{i}", NUMBER[onnx_name(result.dtype)], None)
        for i, result in enumerate(results)
    ]
    loaded = load_model(model([node, *copies], infos, returned))
    try:
        seen = loaded.graph.nodes[0]
        assert (seen.domain, seen.op_type) == (DOMAIN, op)
        for value, result in zip(seen.outputs, results, strict=True):
            assert value.dtype == onnx_name(result.dtype)
        assert (seen.outputs[0].shape == results[0].shape) is known
    finally:
        loaded.store.close()


def test_every_rule_gives_a_function() -> None:
    assert set(CASES) <= set(RULES)
