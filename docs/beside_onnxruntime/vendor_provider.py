"""A provider that wraps the vendor's library: onnxruntime loads it, in the worker's process.

Options: `plugin`, an execution provider library to register; `operators`, a library that has `vendor::Sqrt`.
"""

import onnxruntime
from onnx import TensorProto, helper

from outrider.providers.contract import Claim, Provider


class Vendor(Provider):
    """Takes every Sqrt."""

    def setup(self, context):
        if "plugin" in context.options:
            onnxruntime.register_execution_provider_library("vendor", context.options["plugin"])
        self.operators = context.options.get("operators")

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Sqrt"]

    def compile(self, unit):
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(self.operators)
        session = onnxruntime.InferenceSession(square_root("vendor"), options)
        return lambda inputs: session.run(None, {"x": inputs[0]})


def square_root(domain):
    """A model of one node, `root`, from float32 `x` to `y`, both of shape (4,), as bytes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    node = helper.make_node("Sqrt", ["x"], ["y"], name="root", domain=domain)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("vendor", 1)]
    graph = helper.make_graph([node], "square root", [x], [y])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
