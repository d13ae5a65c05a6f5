"""A provider that wraps the vendor's library: onnxruntime loads it, in the worker's process.

Option `operators`: a library that has `vendor::Sqrt`.
"""

import onnxruntime
from onnx import TensorProto, helper

from outrider.providers.contract import Claim, Provider


class Vendor(Provider):
    """Takes every Sqrt."""

    def setup(self, context):
        self.operators = context.options["operators"]

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Sqrt"]

    def compile(self, unit):
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(self.operators)
        session = onnxruntime.InferenceSession(square_root("vendor"), options)
        return lambda inputs: session.run(None, {"x": inputs[0]})


def square_root(domain, names=("root",)):
    """A model of nodes with these names, one after the other, from float32 `x` to `y`, both of shape (4,), as bytes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    values = ["x", *(f"after {name}" for name in names[:-1]), "y"]
    edges = zip(names, values[:-1], values[1:], strict=True)
    nodes = [helper.make_node("Sqrt", [read], [made], name=name, domain=domain) for name, read, made in edges]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("vendor", 1)]
    graph = helper.make_graph(nodes, "square root", [x], [y])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
