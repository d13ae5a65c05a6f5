"""Model-local functions: calls that nobody claimed are replaced by their bodies.

Providers see calls first, as nodes. What is left is expanded here, on the skeleton, and the plain graph is built anew:
an inlined node is `<call>/<name or #i>`, keeps the opset that its function imports, and names the calls it came from in
`origin`. Everything else in the graph keeps its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import onnx
from onnx import AttributeProto

from outrider.scheduler.limits import FunctionKey, function_key
from outrider.scheduler.model import LoadedModel, assemble
from outrider.scheduler.skeleton import (
    Skeleton,
    body_graphs,
    constant_as_tensor,
    drop_trailing,
    name_nodes,
    opset_imports,
    unique,
    walk,
    walk_nodes,
)


def inline_calls(loaded: LoadedModel, names: Collection[str] | None = None) -> LoadedModel:
    """The same model with the calls among these nodes expanded (None: all calls); other calls stay nodes.

    `names` are full names. Calls inside an expanded function are expanded too, and so are all calls in the bodies of a
    control-flow node that is named. The result shares the weight store; `loaded` stays as it is, and is returned when
    there is nothing to expand.
    """
    skeleton = loaded.skeleton
    if not any(function_key(node) in loaded.functions for node in walk(skeleton.model.graph)):
        return loaded
    model = onnx.ModelProto()
    model.CopyFrom(skeleton.model)
    inlined = Skeleton(model, skeleton.store, dict(skeleton.opsets), dict(skeleton.origins), set(skeleton.names))
    inliner = _Inliner(inlined, names)
    inliner.graph(model.graph, names is None)
    if not inliner.expanded:
        return loaded
    if not any(function_key(node) in loaded.functions for node in walk(model.graph)):
        del model.functions[:]
    result = assemble(inlined, loaded.path, loaded.metadata, loaded.device_configurations)
    return replace(result, functions=loaded.functions, notes=tuple(dict.fromkeys([*loaded.notes, *result.notes])))


class _Inliner:
    def __init__(self, skeleton: Skeleton, names: Collection[str] | None) -> None:
        self.skeleton = skeleton
        self.names = frozenset(names or ())
        self.expanded = 0
        self.imports = skeleton.imports()
        self.functions: dict[FunctionKey, onnx.FunctionProto] = {
            function_key(function): function for function in skeleton.model.functions
        }
        self.values = value_names(skeleton.model.graph)

    def graph(self, graph: onnx.GraphProto, everything: bool) -> None:
        """Expand calls of a graph and its bodies, in place."""
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            self.node(node, nodes, everything)
        copies = onnx.GraphProto()
        copies.node.extend(nodes)
        del graph.node[:]
        graph.node.extend(copies.node)

    def node(self, node: onnx.NodeProto, nodes: list[onnx.NodeProto], everything: bool) -> None:
        """Append the node, or what it expands to."""
        everything = everything or node.name in self.names
        function = self.functions.get(function_key(node))
        if function is not None and everything:
            self.expanded += 1
            self.call(node, function, nodes)
            return
        for _, body in body_graphs(node):
            self.graph(body, everything)
        nodes.append(node)

    def call(self, call: onnx.NodeProto, function: onnx.FunctionProto, nodes: list[onnx.NodeProto]) -> None:
        """Append the nodes of a call."""
        prefix = f"{call.name}/"
        names = {"": ""}
        for i, name in enumerate(function.input):
            names[name] = call.input[i] if i < len(call.input) else ""
        passed: list[tuple[str, str]] = []  # outputs that are inputs, or outputs given twice
        for i, name in enumerate(function.output):
            target = call.output[i] if i < len(call.output) else ""
            if name in names and target:
                passed.append((names[name], target))
            elif name not in names:
                names[name] = target or unique(prefix + name, self.values)
        given = {attribute.name: attribute for attribute in function.attribute_proto}
        given.update({attribute.name: attribute for attribute in call.attribute})
        body = [self._instance(node, names, given, prefix) for node in function.node]
        body += [
            onnx.NodeProto(op_type="Identity", name=f"#output{i}", input=[source], output=[target])
            for i, (source, target) in enumerate(passed)
        ]
        name_nodes(body, prefix, self.skeleton.names)
        opsets = {**self.imports, **opset_imports(function.opset_import)}
        origin = (*self.skeleton.origins.get(call.name, ()), call.name)
        for node in walk_nodes(body):
            if opsets != self.imports:
                self.skeleton.opsets[node.name] = opsets
            self.skeleton.origins[node.name] = origin
            if not node.device_configurations:
                node.device_configurations.extend(call.device_configurations)
        for node in body:
            self.node(node, nodes, True)

    def _instance(
        self, node: onnx.NodeProto, names: dict[str, str], given: Mapping[str, AttributeProto], prefix: str
    ) -> onnx.NodeProto:
        """A copy of a function's node with the call's values and attributes in place of the formal ones."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [self._renamed(name, names, prefix) for name in node.input]
        copy.output[:] = [self._renamed(name, names, prefix) for name in node.output]
        drop_trailing(copy)
        del copy.attribute[:]
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                copy.attribute.append(attribute)
            elif attribute.ref_attr_name in given:
                actual = copy.attribute.add()
                actual.CopyFrom(given[attribute.ref_attr_name])
                actual.name = attribute.name
        if copy.op_type == "Constant" and copy.domain == "":
            constant_as_tensor(copy, self.skeleton.store, f"node {prefix}{node.name}")
        for _, body in body_graphs(copy):
            self._body(body, names, given, prefix)
        return copy

    def _renamed(self, name: str, names: dict[str, str], prefix: str) -> str:
        if name not in names:
            names[name] = unique(prefix + name, self.values)
        return names[name]

    def _body(
        self, body: onnx.GraphProto, names: dict[str, str], given: Mapping[str, AttributeProto], prefix: str
    ) -> None:
        """Rename a body in place, its own names as well, since a formal name may now mean an outer value."""
        local = {name: mapped for name, mapped in names.items() if name not in defined(body)}
        for value in body.input:
            value.name = self._renamed(value.name, local, prefix)
        for tensor in body.initializer:
            tensor.name = self._renamed(tensor.name, local, prefix)
        del body.value_info[:]
        instances = onnx.GraphProto()
        instances.node.extend([self._instance(node, local, given, prefix) for node in body.node])
        del body.node[:]
        body.node.extend(instances.node)
        for value in body.output:
            value.name = self._renamed(value.name, local, prefix)


def defined(graph: onnx.GraphProto) -> set[str]:
    """Names of the values that a graph has itself, not in its bodies."""
    found = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return found | {name for node in graph.node for name in node.output if name}


def value_names(graph: onnx.GraphProto) -> set[str]:
    """All names of values in a graph and its bodies."""
    names: set[str] = set()
    graphs: Iterable[onnx.GraphProto] = [graph, *(body for node in walk(graph) for _, body in body_graphs(node))]
    for one in graphs:
        names |= defined(one)
    return names
