"""The ONNX form of a model as workers get it: the skeleton, serialized once, for providers that want ONNX bytes.

The bytes lie in a weight segment like any constant. They differ from the skeleton in what a worker could not mend:

- `Constant` nodes of the graph are initializers of their outputs' names;
- a large tensor is an initializer of the graph, its `external_data` naming its file from the root folder on, or nothing
  where it lies in a weight segment; one that a body owns moves out of it, under a name of its own; one within a
  function or an attribute is written out, since nothing there can refer to one, and so is one of a type that arrays
  have no common form for;
- an output of a body that is such a one, or another output too, is a copy of it;
- inputs, outputs and training data are left out: a part gets inputs and outputs of its own;
- an IR version below 4 is 4, the first in which an initializer need not be an input: those that are none are constants
  in all of them.

A model has one opset of each domain, but functions have their own, which the nodes inlined from them keep. Those whose
form or meaning differs between the two are told (`foreign`): no part can hold them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, helper

from outrider.providers.wire.dtypes import NUMBER, PACKED
from outrider.providers.wire.graph import TensorRef
from outrider.providers.wire.packing import pack
from outrider.scheduler.functions import defined, value_names
from outrider.scheduler.limits import MAX_BYTES, FunctionKey, function_key
from outrider.scheduler.lowering import means_the_same
from outrider.scheduler.model import LoadedModel
from outrider.scheduler.model_errors import ModelLimitError
from outrider.scheduler.plain import FIRST_IR_WITH_OVERRIDES
from outrider.scheduler.skeleton import Skeleton, body_graphs, opset_imports, unique, walk_nodes
from outrider.scheduler.store import KEPT_BYTES, WeightStore

# Their bytes are written out: onnxruntime takes no arrays of complex numbers or strings, and 2- and 4-bit elements
# are packed in ONNX and not in arrays.
_WRITTEN_OUT = frozenset({"string", "complex64", "complex128", *PACKED})


@dataclass(frozen=True)
class OnnxForm:
    """`data`: where the serialized model lies. `weights`: where the bytes of its large initializers lie, by name.

    `moved`: of nodes with bodies, the names of initializers that were moved out of those. `foreign`: the nodes that no
    part of the model can hold, and why.
    """

    data: TensorRef
    weights: dict[str, TensorRef]
    moved: dict[str, list[str]]
    foreign: dict[str, str]


def onnx_form(loaded: LoadedModel) -> OnnxForm:
    """Serialize a loaded model into its weight store, whose segments must be sealed and sent afterwards.

    Raises ModelLimitError if that is more than protobuf holds.
    """
    model = onnx.ModelProto()
    model.CopyFrom(loaded.skeleton.model)
    model.ir_version = max(model.ir_version, FIRST_IR_WITH_OVERRIDES)
    foreign = _foreign(loaded.skeleton, model)
    maker = _Maker(loaded.store, model, loaded.skeleton.names)
    maker.graph(model.graph)
    for function in model.functions:
        for node in walk_nodes(function.node):
            maker.write_out(node)
            for part, body in body_graphs(node):
                maker.write_out_all(body.initializer)
                maker.outputs(body, f"{function.name}/{node.name}/{part}/")
    del model.graph.input[:], model.graph.output[:]
    if (size := model.ByteSize()) > MAX_BYTES:
        raise ModelLimitError(
            f"{loaded.path}: nodes, and constants that must lie among them, are {size:,} bytes in ONNX form; protobuf "
            f"holds at most {MAX_BYTES:,}.",
            what="bytes", limit=MAX_BYTES, got=size,
        )  # fmt: skip
    data = np.frombuffer(model.SerializeToString(), np.uint8)
    ref = loaded.store.add_array("uint8", data.shape, data, "the serialized model")
    return OnnxForm(ref, maker.weights, maker.moved, foreign)


def _foreign(skeleton: Skeleton, model: onnx.ModelProto) -> dict[str, str]:
    """Nodes of the graph that the opsets of the model do not describe, and why.

    Imports of domains that only functions import are added to `model`.
    """
    if not skeleton.opsets and not model.functions:
        return {}
    imports = skeleton.imports()
    functions = {function_key(one): one for one in model.functions}
    why: dict[FunctionKey, str] = {}

    def among(nodes: Iterable[onnx.NodeProto], inherited: Mapping[str, int]) -> str:
        for node in walk_nodes(nodes):
            key = function_key(node)
            if key in functions:
                if key not in why:
                    why[key] = ""  # functions that call themselves were refused at load
                    why[key] = among(functions[key].node, opset_imports(functions[key].opset_import))
                if why[key]:
                    return why[key]
                continue
            own = skeleton.opsets.get(node.name, inherited).get(node.domain, 1)
            if node.domain not in imports:
                imports[node.domain] = own
                model.opset_import.add(domain=node.domain, version=own)
            if not _is_constant(node) and not means_the_same(node.op_type, node.domain, own, imports[node.domain]):
                domain = node.domain or "ai.onnx"
                return (
                    f"{domain}::{node.op_type} is of opset {own}, as its function says, and may mean another thing in "
                    f"opset {imports[node.domain]}, which the model imports"
                )
        return ""

    told = {node.name: among([node], imports) for node in model.graph.node}
    return {name: reason for name, reason in told.items() if reason}


class _Maker:
    def __init__(self, store: WeightStore, model: onnx.ModelProto, names: Collection[str]) -> None:
        self.store = store
        self.top = model.graph
        self.weights: dict[str, TensorRef] = {}
        self.moved: dict[str, list[str]] = {}
        self._owner = ""  # the node of the graph whose bodies are looked at
        self._values = value_names(model.graph)
        self._names = set(names)  # of nodes

    def graph(self, graph: onnx.GraphProto) -> None:
        """The top graph: constants become initializers, bodies lose what is large."""
        nodes = []
        for node in graph.node:
            if _is_constant(node):
                tensor = graph.initializer.add()
                tensor.CopyFrom(node.attribute[0].t)
                tensor.name = node.output[0]
            else:
                nodes.append(node)
                self._owner = node.name
                self.node(node)
        if len(nodes) < len(graph.node):
            kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
            del graph.node[:]
            graph.node.extend(kept)
        for tensor in graph.initializer:
            self._refer(tensor)

    def node(self, node: onnx.NodeProto) -> None:
        """A node of the graph or of a body: what is large in its attributes is written out, in its bodies moved."""
        self.write_out(node)
        for part, body in body_graphs(node):
            self.body(body, f"{node.name}/{part}/")

    def body(self, body: onnx.GraphProto, prefix: str) -> None:
        """Move the large initializers and constants of a body, and of those within it, to the top graph."""
        moved: dict[str, str] = {}
        defaults = {value.name for value in body.input}  # nobody reads an initializer of such a name
        for tensor in [one for one in body.initializer if _is_large(one) or one.name in defaults]:
            if tensor.name not in defaults:
                moved[tensor.name] = self._move(tensor, prefix + tensor.name)
            body.initializer.remove(tensor)
        kept = []
        for node in body.node:
            if _is_constant(node) and _is_large(node.attribute[0].t):
                moved[node.output[0]] = self._move(node.attribute[0].t, prefix + node.output[0])
            else:
                kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
        if len(kept) < len(body.node):
            del body.node[:]
            body.node.extend(kept)
        if moved:
            _rename(body, moved)
        self.outputs(body, prefix)
        for node in body.node:
            self.node(node)

    def outputs(self, body: onnx.GraphProto, prefix: str) -> None:
        """Have each output of a body be a value of its own that the body makes.

        What was moved out of it is none any more, and of two outputs that are the same value onnxruntime 1.32 leaves
        the first one unwritten.
        """
        own = defined(body)
        for position, value in enumerate(body.output):
            if value.name in own:
                own.discard(value.name)
                continue
            name = f"{prefix}#output{position}"
            made = unique(name, self._values)
            body.node.add(op_type="Identity", name=unique(name, self._names), input=[value.name], output=[made])
            value.name = made

    def _move(self, tensor: onnx.TensorProto, name: str) -> str:
        """Make a large tensor an initializer of the top graph; the name that it got."""
        made = self.top.initializer.add()
        made.CopyFrom(tensor)
        made.name = unique(name, self._values)
        self.moved.setdefault(self._owner, []).append(made.name)
        return str(made.name)

    def _refer(self, tensor: onnx.TensorProto) -> None:
        """Note where the bytes of a large initializer lie; write out what arrays have no form for."""
        if not _is_large(tensor):
            return
        ref = self.store.add(tensor, f"initializer {tensor.name!r}")
        if ref.dtype in _WRITTEN_OUT or ref.nbytes <= KEPT_BYTES:  # small external ones: shapes, axes
            tensor.CopyFrom(self._written(ref, tensor.name))
        else:
            self.weights[tensor.name] = ref
            if ref.path:  # onnxruntime maps a file that it is told, at no cost; other weights it copies for a while
                del tensor.external_data[:]
                place = {"location": ref.path.lstrip("/"), "offset": ref.offset, "length": ref.nbytes}
                for key, item in place.items():
                    tensor.external_data.add(key=key, value=str(item))

    def write_out(self, node: onnx.NodeProto) -> None:
        """Put the bytes of large tensors among a node's attributes back into it."""
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR and not attribute.ref_attr_name:
                self.write_out_all([attribute.t])
            elif attribute.type == AttributeProto.TENSORS:
                self.write_out_all(attribute.tensors)

    def write_out_all(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Put the bytes of these tensors back into them."""
        for tensor in tensors:
            if _is_large(tensor):
                tensor.CopyFrom(self._written(self.store.add(tensor, f"tensor {tensor.name!r}"), tensor.name))

    def _written(self, ref: TensorRef, name: str) -> onnx.TensorProto:
        items = self.store.read(ref)
        if ref.dtype == "string":
            return helper.make_tensor(name, onnx.TensorProto.STRING, ref.shape, items.reshape(-1).tolist())
        raw = pack(items, ref.dtype).tobytes() if ref.dtype in PACKED else items.tobytes()
        return onnx.TensorProto(name=name, data_type=NUMBER[ref.dtype], dims=ref.shape, raw_data=raw)


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and node.domain == "" and len(node.attribute) == 1


def _is_large(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def _rename(body: onnx.GraphProto, moved: Mapping[str, str]) -> None:
    """Have a body and the bodies within it read values under other names."""
    for node in body.node:
        for i, name in enumerate(node.input):
            if name in moved:
                node.input[i] = moved[name]
        for _, inner in body_graphs(node):
            own = defined(inner)
            _rename(inner, {name: new for name, new in moved.items() if name not in own})
    for value in body.output:
        value.name = moved.get(value.name, value.name)
