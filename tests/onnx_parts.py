"""A model cut into parts as workers cut it, each run by onnxruntime in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime

from outrider.providers.wire.dtypes import NUMBER, onnx_name
from outrider.providers.wire.graph import Graph, Node, Value
from outrider.providers.wire.onnx_model import OnnxModel, Part, is_declarable
from outrider.providers.wire.pack import pack_model, unpack_model
from outrider.scheduler.model import LoadedModel, load_model
from outrider.scheduler.onnx_form import onnx_form
from outrider.scheduler.skeleton import walk_nodes
from outrider.scheduler.store import WeightStore


class Weights(Mapping[str, np.ndarray]):
    """What a worker maps, read here from the store."""

    def __init__(self, store: WeightStore, refs: Mapping[str, Any]) -> None:
        self.store, self.refs = store, refs

    def __getitem__(self, name: str) -> np.ndarray:
        return self.store.read(self.refs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)


def shipped(loaded: LoadedModel) -> OnnxModel:
    """The ONNX form of a loaded model as it arrives in a worker."""
    form = onnx_form(loaded)
    loaded.store.seal()
    data, weights, moved, foreign = unpack_model(pack_model(form.data, form.weights, form.moved, form.foreign))
    files = [name for name, ref in weights.items() if ref.path]
    return OnnxModel(loaded.store.read(data).data, Weights(loaded.store, weights), moved, foreign, files)


@contextmanager
def opened(model: Any, **more: Any) -> Iterator[tuple[Graph, OnnxModel]]:
    """The plain graph of a model, with arrays as constants, and its ONNX form."""
    loaded = load_model(model, **more)
    try:
        form = shipped(loaded)
        yield replace(loaded.graph, constants=Weights(loaded.store, loaded.graph.constants)), form
    finally:
        loaded.store.close()


AS_WRITTEN = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def options(level: onnxruntime.GraphOptimizationLevel = AS_WRITTEN) -> onnxruntime.SessionOptions:
    """On one thread, and silent."""
    made = onnxruntime.SessionOptions()
    made.graph_optimization_level = level
    made.intra_op_num_threads = 1
    made.log_severity_level = 4
    return made


def filled(model: OnnxModel, part: Part) -> onnx.ModelProto:
    """A part with all its weights inside, and with the types and shapes that ONNX's checker wants to see."""
    proto = onnx.ModelProto.FromString(part.data)
    for info in (*proto.graph.input, *proto.graph.output):
        if info.type.WhichOneof("value") in ("tensor_type", None):
            info.type.tensor_type.shape.SetInParent()
            info.type.tensor_type.elem_type = info.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
    for tensor in proto.graph.initializer:
        if tensor.name in (*part.weights, *part.files):
            array = model.weights[tensor.name]
            assert NUMBER[part.weights.get(tensor.name, "float32")] == tensor.data_type
            assert tuple(tensor.dims) == array.shape
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = array.tobytes()
    return proto


def session(model: OnnxModel, part: Part) -> tuple[onnxruntime.InferenceSession, Any]:
    """onnxruntime on a part, its large weights by reference, and what must live as long."""
    made = options()
    values = [
        onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(model.weights[name], NUMBER[dtype])
        for name, dtype in part.weights.items()
    ]
    for name, value in zip(part.weights, values, strict=True):
        made.add_initializer(name, value)
    made.add_external_initializers(list(part.weights), values)
    made.add_session_config_entry("session.model_external_initializers_file_folder_path", "/")
    return onnxruntime.InferenceSession(part.data, made, providers=["CPUExecutionProvider"]), values


def direct(
    model: onnx.ModelProto, feed: Mapping[str, Any], level: onnxruntime.GraphOptimizationLevel = AS_WRITTEN
) -> list[Any]:
    """The whole model in onnxruntime, as it was written but for names of nodes, which must differ there."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in walk_nodes(copy.graph.node):
        node.name = ""
    made = onnxruntime.InferenceSession(copy.SerializeToString(), options(level), providers=["CPUExecutionProvider"])
    results: list[Any] = made.run(None, dict(feed))
    return results


def interface(graph: Graph, nodes: Sequence[Node]) -> tuple[list[Value], list[Value]]:
    """What a part of a graph reads that is no constant, and what of it others, or the caller, read."""
    made = {value.name for node in nodes for value in node.outputs}
    inputs = {
        value.name: value
        for node in nodes
        for value in (*node.inputs, *node.captures)
        if value.name and value.name not in made and value.name not in graph.constants
    }
    chosen = {node.name for node in nodes}
    read = {value.name for value in graph.outputs}
    for node in graph.nodes:
        if node.name not in chosen:
            read.update(value.name for value in (*node.inputs, *node.captures))
    outputs = [value for node in nodes for value in node.outputs if value.name and value.name in read]
    return list(inputs.values()), outputs


def run_part(
    model: OnnxModel, nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], known: Mapping[str, Any]
) -> list[Any]:
    """The outputs of a part, which ONNX's checker finds valid."""
    part = model.cut(nodes, [_typed(value, known[value.name]) for value in inputs], outputs)
    onnx.checker.check_model(filled(model, part), skip_opset_compatibility_check=True)
    made, kept = session(model, part)
    results = made.run([value.name for value in outputs], {value.name: known[value.name] for value in inputs})
    del made, kept
    return list(results)


def in_parts(graph: Graph, model: OnnxModel, feed: Mapping[str, Any], color: Callable[[Node], int]) -> list[Any]:
    """The model's outputs; neighbours in topological order of one color are one part."""
    groups: list[list[Node]] = []
    last = None
    for node in graph.nodes:
        mine = color(node)
        if mine != last:
            groups.append([])
        groups[-1].append(node)
        last = mine
    known = dict(feed)
    for nodes in groups:
        inputs, outputs = interface(graph, nodes)
        results = run_part(model, nodes, inputs, outputs, known) if outputs else []  # nobody may read them
        known.update(zip((value.name for value in outputs), results, strict=True))
    names = [value.name for value in graph.outputs]
    return [known[name] if name in known else graph.constants[name] for name in names]


def _typed(value: Value, item: Any) -> Value:
    """A value of unknown type is what it turned out to be."""
    return value if is_declarable(value) else Value(value.name, onnx_name(item.dtype))


def agree(results: Sequence[Any], expected: Sequence[Any]) -> None:
    """The same bits."""
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        if isinstance(other, list):
            agree(one, other)
        elif isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other
