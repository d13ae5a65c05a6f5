"""From the skeleton with its inferred types to the plain graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import onnx
from onnx import AttributeProto

from outrider.providers.wire.dtypes import is_tensor
from outrider.providers.wire.graph import OMITTED, Graph, Node, TensorRef, Value
from outrider.scheduler.inference import UNKNOWN, dtype_of, shape_of, type_of
from outrider.scheduler.lowering import TARGET, Lowered, Lowering
from outrider.scheduler.skeleton import Skeleton, body_graphs, walk

FIRST_IR_WITH_OVERRIDES = 4  # before it every initializer had to be listed as an input, and was constant all the same


class Scope:
    """Names in sight of a graph. What a body looks up further out is noted in `captured`."""

    def __init__(self, outer: Scope | None = None) -> None:
        self.values: dict[str, Value] = {}
        self.captured: dict[str, Value] = {}
        self.outer = outer

    def __getitem__(self, name: str) -> Value:
        found = self.values.get(name)
        if found is None:
            if self.outer is None:
                raise KeyError(name)
            found = self.captured.get(name)
            if found is None:
                found = self.captured[name] = self.outer[name]
        return found


class Builder:
    """Builds the plain graph of one model; `constant_nodes` lists the Constant nodes, which became constants."""

    def __init__(self, skeleton: Skeleton, lowering: Lowering) -> None:
        self.skeleton = skeleton
        self.store = skeleton.store
        self.lowering = lowering
        self.imports = skeleton.imports()
        self.constant_nodes: list[tuple[str, str]] = []
        self.functions = {(f.domain, f.name, f.overload) for f in skeleton.model.functions}
        self.declared = {
            (node.name, part): body.output for node in walk(skeleton.model.graph) for part, body in body_graphs(node)
        }

    def graph(self, graph: onnx.GraphProto, outer: Scope | None = None) -> tuple[Graph, Scope]:
        """The plain form of a graph or body, and its scope."""
        scope = Scope(outer)
        types = {info.name: info.type for info in graph.value_info}
        for info in graph.output:
            types.setdefault(info.name, info.type)
        weights = {tensor.name for tensor in graph.initializer}
        fixed = weights if self.skeleton.model.ir_version < FIRST_IR_WITH_OVERRIDES and outer is None else set()
        inputs = []
        for info in graph.input:
            if info.name not in fixed:
                value = Value(info.name, *type_of(info.type))
                inputs.append(value)
                scope.values[info.name] = value
        constants: dict[str, Any] = {}
        for tensor in graph.initializer:
            ref = self.store.add(tensor, f"initializer {tensor.name!r}")
            constants[tensor.name] = ref
            if tensor.name not in scope.values:
                scope.values[tensor.name] = Value(tensor.name, ref.dtype, ref.shape, constant=True)
        nodes: list[Node] = []
        for proto in graph.node:
            if proto.op_type == "Constant" and proto.domain == "" and len(proto.attribute) == 1:
                tensor, name = proto.attribute[0].t, proto.output[0]
                ref = constants[name] = self.store.add(tensor, f"node {proto.name!r}")
                scope.values[name] = Value(name, ref.dtype, ref.shape, constant=True)
                self.constant_nodes.append((proto.name, name))
            else:
                nodes.append(self._node(proto, len(nodes), scope, types))
        outputs = tuple(scope[info.name] for info in graph.output)
        return Graph(graph.name, tuple(nodes), tuple(inputs), outputs, constants, self.imports), scope

    def _node(self, proto: onnx.NodeProto, index: int, scope: Scope, types: Mapping[str, onnx.TypeProto]) -> Node:
        attributes, captures = self._attributes(proto, scope)
        inputs = tuple([scope[name] if name else OMITTED for name in proto.input])
        while inputs and inputs[-1] is OMITTED:
            inputs = inputs[:-1]
        constant = not captures and self._is_constant(proto, inputs, types)
        outputs = []
        for name in proto.output:
            if not name:
                outputs.append(OMITTED)
                continue
            kind = types.get(name)
            value = scope.values[name] = Value(name, *(type_of(kind) if kind is not None else UNKNOWN), constant)
            outputs.append(value)
        while outputs and outputs[-1] is OMITTED:
            outputs.pop()
        own = self.skeleton.opsets.get(proto.name, self.imports)
        metadata = {entry.key: entry.value for entry in proto.metadata_props} if proto.metadata_props else {}
        node = Node(
            index, proto.name, proto.op_type, proto.domain, own.get(proto.domain, 1), attributes, inputs,
            tuple(outputs), captures, proto.overload,
            metadata=metadata,
            devices=tuple(device_configuration(entry) for entry in proto.device_configurations),
            origin=self.skeleton.origins.get(proto.name, ()),
        )  # fmt: skip
        lowered = self._lowered(node, scope)
        return replace(node, lowered=lowered) if lowered is not None else node

    def _is_constant(self, proto: onnx.NodeProto, inputs: Iterable[Value], types: Mapping[str, Any]) -> bool:
        """Made of constants only, by an operator of ONNX that gives the same every time."""
        for value in inputs:
            if not value.constant and value is not OMITTED:
                return False
        if not any(value is not OMITTED for value in inputs) or proto.domain not in self.imports:
            return False
        if (proto.domain, proto.op_type, proto.overload) in self.functions:
            return False
        for name in proto.output:
            if name in types and not is_tensor(type_of(types[name])[0]):
                return False
        schema = schema_of(proto.op_type, self.skeleton.opset(proto), proto.domain)
        if schema is None:
            return False
        return not (schema.non_deterministic or proto.op_type == "Dropout")

    # Attributes ----------------------------------------------------------------------------------------------------
    def _attributes(self, proto: onnx.NodeProto, scope: Scope) -> tuple[dict[str, Any], tuple[Value, ...]]:
        """Decoded attributes, and the outer values that bodies among them read."""
        captured: dict[str, Value] = {}
        attributes: dict[str, Any] = {}
        for attribute in proto.attribute:
            if attribute.type == AttributeProto.GRAPH:
                body, inner = self.graph(attribute.g, scope)
                declared = self.declared.get((proto.name, attribute.name.removesuffix("_branch")), ())
                attributes[attribute.name] = replace(body, outputs=_with_ranks(body.outputs, declared))
                captured.update(inner.captured)
            elif attribute.type == AttributeProto.GRAPHS:
                pairs = [self.graph(graph, scope) for graph in attribute.graphs]
                attributes[attribute.name] = [body for body, _ in pairs]
                for _, inner in pairs:
                    captured.update(inner.captured)
            else:
                attributes[attribute.name] = self._decode(attribute, f"{attribute.name!r} of node {proto.name!r}")
        return attributes, tuple(captured.values())

    def _decode(self, attribute: AttributeProto, where: str) -> Any:
        kind = attribute.type
        if kind in _DECODE:
            return _DECODE[kind](attribute)
        if kind == AttributeProto.TENSOR:
            return self.store.add(attribute.t, where)
        if kind == AttributeProto.TENSORS:
            return [self.store.add(tensor, where) for tensor in attribute.tensors]
        return None

    # The opset-21 form ---------------------------------------------------------------------------------------------
    def _lowered(self, node: Node, scope: Scope) -> tuple[Node, ...] | None:
        """The node's opset-21 form; None when that is the node itself, bodies included."""
        if node.name in self.lowering.renumbered:
            return (_flattened(node, TARGET),)
        entry = self.lowering.table.get(node.name)
        if entry is None:
            changed = any(inner.lowered is not None for _, body in node.bodies() for inner in body.nodes)
            return (_flattened(node, node.opset),) if changed else None
        return self._steps(node, entry, scope)

    def _steps(self, node: Node, entry: Lowered, scope: Scope) -> tuple[Node, ...]:
        local = {value.name: value for value in node.outputs if value.name}
        steps = []
        for proto in entry.nodes:
            attributes = {}
            for attribute in proto.attribute:
                ours = node.attributes.get(attribute.name)
                heavy = attribute.type == AttributeProto.TENSOR and entry.keeps(attribute)
                attributes[attribute.name] = ours if heavy else self._decode(attribute, f"lowered {node.name!r}")
            inputs = tuple((local.get(name) or scope[name]) if name else OMITTED for name in proto.input)
            constant = proto.op_type == "Constant" or (bool(inputs) and all(v.constant for v in inputs if v.name))
            outputs = []
            for name in proto.output:
                if name and name not in local:
                    ref = attributes.get("value") if proto.op_type == "Constant" else None
                    if isinstance(ref, TensorRef):
                        local[name] = Value(name, ref.dtype, ref.shape, constant)
                    else:
                        kind = entry.types.get(name)
                        local[name] = Value(name, *(type_of(kind) if kind is not None else UNKNOWN), constant)
                outputs.append(local[name] if name else OMITTED)
            while outputs and outputs[-1] is OMITTED:
                outputs.pop()
            steps.append(
                Node(
                    node.index, node.name, proto.op_type, proto.domain, TARGET, attributes, inputs, tuple(outputs),
                    origin=node.origin,
                )
            )  # fmt: skip
        return tuple(steps)


_DECODE: dict[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda a: a.f,
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.STRING: lambda a: _text(a.s),
    AttributeProto.FLOATS: lambda a: list(a.floats),
    AttributeProto.INTS: lambda a: list(a.ints),
    AttributeProto.STRINGS: lambda a: [_text(item) for item in a.strings],
    AttributeProto.TYPE_PROTO: lambda a: dtype_of(a.tp),
    AttributeProto.TYPE_PROTOS: lambda a: [dtype_of(item) for item in a.type_protos],
}


def _with_ranks(outputs: tuple[Value, ...], declared: Iterable[onnx.ValueInfoProto]) -> tuple[Value, ...]:
    """A body's outputs; those of which inference knows not even the rank have the shape that the model declares.

    A Loop without an iteration needs it for its scan outputs. Known ranks are kept: declarations lie at times.
    """
    shapes = {info.name: shape_of(info.type) for info in declared}
    return tuple(replace(v, shape=shapes.get(v.name)) if v.shape is None else v for v in outputs)


def _flattened(node: Node, opset: int) -> Node:
    """The node at another opset, with bodies whose nodes are the lowered ones themselves."""

    def flat(item: Any) -> Any:
        if isinstance(item, Graph):
            return replace(item, nodes=tuple(step for inner in item.nodes for step in inner.steps()))
        if isinstance(item, list):
            return [flat(one) for one in item]
        return item

    attributes = {key: flat(item) for key, item in node.attributes.items()} if any(node.bodies()) else node.attributes
    return replace(node, opset=opset, attributes=attributes, lowered=None, metadata={}, devices=())


def _text(item: bytes) -> str | bytes:
    """STRING attributes are text except in a few custom operators, which keep blobs in them."""
    try:
        return item.decode()
    except UnicodeDecodeError:
        return item


@cache
def schema_of(op_type: str, opset: int, domain: str) -> Any:
    """ONNX's schema of an operator at an opset, None where there is none."""
    try:
        return onnx.defs.get_schema(op_type, max_inclusive_version=opset, domain=domain)
    except onnx.defs.SchemaError:
        return None


def device_configuration(entry: onnx.NodeDeviceConfigurationProto) -> dict[str, Any]:
    """A node's device configuration (IR 11) as plain data: configuration, pipeline_stage (None), sharding."""
    return {
        "configuration": entry.configuration_id,
        "pipeline_stage": entry.pipeline_stage if entry.HasField("pipeline_stage") else None,
        "sharding": [
            {
                "tensor": spec.tensor_name,
                "device": list(spec.device),
                "groups": {group.key: list(group.value) for group in spec.index_to_device_group_map},
                "dims": [
                    {
                        "axis": dim.axis,
                        "simple": [
                            {
                                "dim": getattr(part, part.WhichOneof("dim") or "", None),
                                "num_shards": part.num_shards,
                            }
                            for part in dim.simple_sharding
                        ],
                    }
                    for dim in spec.sharded_dim
                ],
            }
            for spec in entry.sharding_spec
        ],
    }
