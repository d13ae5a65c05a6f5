"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper


def tensor(name: str, shape: Sequence[Any] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A value info; shape None means unknown rank."""
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    """`node("Add", "x y", "z")`; '-' stands for an omitted input."""
    names = ["" if i == "-" else i for i in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=name, **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 21,
    **more: Any,
) -> onnx.ModelProto:
    """A model of one graph called 'g'."""
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), initializers)
    more.setdefault("opset_imports", [helper.make_opsetid("", opset)])
    more.setdefault("ir_version", 10)
    return helper.make_model(graph, **more)


def chain(*operators: str, shape: Sequence[Any] = ("N", 4)) -> onnx.ModelProto:
    """x -> op -> op -> ... -> y; the nodes are called n0, n1, ..."""
    names = ["x", *(f"v{i}" for i in range(1, len(operators))), "y"]
    nodes = [node(op, names[i], names[i + 1], f"n{i}") for i, op in enumerate(operators)]
    return model(nodes, [tensor("x", shape)], [tensor("y", shape)])
