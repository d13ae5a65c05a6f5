"""Small models for tests, made in one call, and a look at the processes of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.leaks import snapshot

Shape = Sequence[int | str | None]


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
    dtype: int = TensorProto.FLOAT,
    opset: int = 21,
) -> bytes:
    """A serialised model; all inputs have `dtype`, outputs have it too and an unknown shape."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, dtype, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return made.SerializeToString()


def node(op: str, inputs: str, outputs: str, name: str = "", **attributes: object) -> onnx.NodeProto:
    """`node("Add", "a b", "c")`; names of values are separated by spaces."""
    return helper.make_node(op, inputs.split(), outputs.split(), name=name, **attributes)


def worker_pids() -> list[int]:
    """Processes that this run has started and that still run, oldest first."""
    return sorted(snapshot().processes)
