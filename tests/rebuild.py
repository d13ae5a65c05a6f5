"""A ModelProto made from a plain graph, so that an oracle that is not ours can run what the side table says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from outrider.providers.wire.dtypes import NUMBER
from outrider.providers.wire.graph import Graph, Node, TensorRef
from outrider.scheduler.store import WeightStore


def rebuild(graph: Graph, store: WeightStore, outputs: list[onnx.ValueInfoProto], opset: int = 21) -> onnx.ModelProto:
    """The opset-21 form of a graph: every node replaced by its steps."""
    proto = _graph(graph, store)
    del proto.output[:]
    proto.output.extend(outputs)
    versions = {domain: opset if domain == "" else version for domain, version in graph.opsets.items()}
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_model(proto, opset_imports=imports, ir_version=10)


def _graph(graph: Graph, store: WeightStore) -> onnx.GraphProto:
    nodes = [_node(step, store) for node in graph.nodes for step in node.steps()]
    inputs = [value_info(value.name, value.dtype, value.shape) for value in graph.inputs]
    outputs = [value_info(value.name, value.dtype, None) for value in graph.outputs]
    weights = [tensor(name, ref, store) for name, ref in graph.constants.items()]
    return helper.make_graph(nodes, "rebuilt", inputs, outputs, initializer=weights)


def _node(node: Node, store: WeightStore) -> onnx.NodeProto:
    proto = onnx.NodeProto(
        op_type=node.op_type,
        domain=node.domain,
        overload=node.overload,
        input=[value.name for value in node.inputs],
        output=[value.name for value in node.outputs],
    )
    for key, item in node.attributes.items():
        proto.attribute.append(_attribute(key, item, store))
    return proto


def _attribute(key: str, item: Any, store: WeightStore) -> onnx.AttributeProto:
    if isinstance(item, TensorRef):
        return helper.make_attribute(key, tensor("", item, store))
    if isinstance(item, Graph):
        return helper.make_attribute(key, _graph(item, store))
    if item == []:
        return helper.make_attribute(key, item, attr_type=onnx.AttributeProto.INTS)
    return helper.make_attribute(key, item)


def tensor(name: str, ref: TensorRef, store: WeightStore) -> onnx.TensorProto:
    """A constant with its bytes inside."""
    array = store.read(ref)
    if ref.dtype == "string":
        texts = [text.encode() for text in array.reshape(-1)]
        return helper.make_tensor(name, TensorProto.STRING, ref.shape, texts)
    if ref.dtype in ("int4", "uint4", "int2", "uint2", "float4e2m1"):
        return onnx.numpy_helper.from_array(array, name)
    return TensorProto(name=name, data_type=NUMBER[ref.dtype], dims=ref.shape, raw_data=np.asarray(array).tobytes())


def value_info(name: str, dtype: str, shape: Any) -> onnx.ValueInfoProto:
    """An empty type where the dtype is no tensor's: the reference evaluator does not ask."""
    if dtype not in NUMBER or dtype == "undefined":
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, NUMBER[dtype], shape)
