"""The skeleton: the model's protobuf without its weights, with every node under its final name.

Everything after the load works on it: checker, shape inference, version converter and inliner cost milliseconds on a
few hundred kilobytes, and none of them can touch a weight. What it changes against the file, and nothing else:

- tensors above 1 KiB are stubs (`store.py`), sparse ones dense, `Constant` nodes all have the one attribute `value`;
- nodes have their full unique name (below), the domain 'ai.onnx' is '', nodes are in topological order.

Full names are those that pins, reports and errors use: the original one, `#17` for the unnamed node at position 17 of
its graph, `<node>/<attribute without _branch>/<name>` in bodies (`If_0/then/Conv_1`, `Loop_1/body/#0`), `<call>/<name>`
for nodes inlined from a function. A name that was taken already gets `~2`, `~3` … in the order of the file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from outrider.scheduler.model_errors import load_error
from outrider.scheduler.store import WeightStore

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
SCHEMAS = [schema for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""]
_TYPES_OF_BODIES = (onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS)
_WITH_BODIES = {
    schema.name for schema in SCHEMAS if any(one.type in _TYPES_OF_BODIES for one in schema.attributes.values())
}
# Operators of ONNX that take no graphs: nobody need look among the attributes of their nodes, which takes long.
_WITHOUT_BODIES = {schema.name for schema in SCHEMAS} - _WITH_BODIES


@dataclass
class Skeleton:
    """A model without weights. `opsets` and `origins` hold, by full name, what differs for nodes from functions."""

    model: onnx.ModelProto
    store: WeightStore
    opsets: dict[str, Mapping[str, int]] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def imports(self) -> dict[str, int]:
        """domain -> version of the model itself."""
        return opset_imports(self.model.opset_import)

    def opset(self, node: onnx.NodeProto) -> int:
        """The version in force for the node's domain; 1 for a domain that is not imported."""
        return self.opsets.get(node.name, self._model_imports).get(node.domain, 1)

    def __post_init__(self) -> None:
        self._model_imports = self.imports()


def opset_imports(entries: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """domain -> version, with 'ai.onnx' as ''."""
    return {canonical(entry.domain): entry.version for entry in entries}


def canonical(domain: str) -> str:
    """A domain's one spelling: 'ai.onnx' is ''."""
    return "" if domain == "ai.onnx" else domain


def build_skeleton(model: onnx.ModelProto, store: WeightStore) -> Skeleton:
    """Copy a model without its weights, which go to the store. The model is left as it is.

    Raises ModelLoadError for malformed tensors, undefined values, duplicate outputs and cycles.
    """
    copy = onnx.ModelProto(ir_version=model.ir_version, model_version=model.model_version)
    for domain, version in opset_imports(model.opset_import).items():
        copy.opset_import.add(domain=domain, version=version)
    _copy_graph(model.graph, copy.graph, store, "")
    for function in model.functions:
        target = copy.functions.add()
        _copy_function(function, target, store)
        order_function(target, store.path)
    known = {entry.domain for entry in copy.opset_import}
    for node in walk(copy.graph):  # custom domains are often not imported, and nothing depends on their version
        if node.domain not in known and not node.domain.startswith("ai.onnx"):
            known.add(node.domain)
            copy.opset_import.add(domain=node.domain, version=1)
    skeleton = Skeleton(copy, store)
    name_nodes(copy.graph.node, "", skeleton.names)
    order_graph(copy.graph, (), store.path, "")
    return skeleton


def walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph and its bodies."""
    return walk_nodes(graph.node)


def walk_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """All of these nodes and those of their bodies."""
    for node in nodes:
        yield node
        if node.op_type not in _WITHOUT_BODIES or node.domain:
            for _, body in body_graphs(node):
                yield from walk_nodes(body.node)


def _takes_no_graph(op_type: str, domain: str) -> bool:
    return op_type in _WITHOUT_BODIES and domain == ""


def has_bodies(node: onnx.NodeProto) -> bool:
    """True for control flow: a graph is among the attributes."""
    if _takes_no_graph(node.op_type, node.domain):
        return False
    return any(attribute.type in _GRAPHS for attribute in node.attribute)


def body_graphs(node: onnx.NodeProto) -> list[tuple[str, onnx.GraphProto]]:
    """(name within the node, graph) of each body: `then`, `else`, `body`; `graphs0` for the first of a list."""
    found: list[tuple[str, onnx.GraphProto]] = []
    if _takes_no_graph(node.op_type, node.domain):
        return found
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            found.append((attribute.name.removesuffix("_branch"), attribute.g))
        elif attribute.type == AttributeProto.GRAPHS:
            found += [(f"{attribute.name}{i}", graph) for i, graph in enumerate(attribute.graphs)]
    return found


def name_nodes(nodes: Iterable[onnx.NodeProto], prefix: str, taken: set[str]) -> None:
    """Give nodes and the nodes of their bodies their full names, unique among `taken`."""
    for node in nodes:
        node.name = unique(prefix + node.name, taken)
        for part, body in body_graphs(node):
            name_nodes(body.node, f"{node.name}/{part}/", taken)


def unique(name: str, taken: set[str]) -> str:
    """`name`, or `name~2`, `name~3` … when it is taken. The result is taken from then on."""
    result, number = name, 2
    while result in taken:
        result, number = f"{name}~{number}", number + 1
    taken.add(result)
    return result


# Copying without weights -------------------------------------------------------------------------------------------
def _copy_graph(source: onnx.GraphProto, target: onnx.GraphProto, store: WeightStore, where: str) -> None:
    target.name = source.name or "graph"
    target.input.extend(source.input)
    target.output.extend(source.output)
    target.value_info.extend(source.value_info)
    for tensor in source.initializer:
        target.initializer.append(store.stub(tensor, f"initializer {tensor.name!r}{where}"))
    for sparse in source.sparse_initializer:
        target.initializer.append(store.stub_sparse(sparse, f"initializer {sparse.values.name!r}{where}"))
    _copy_nodes(source.node, target, store, where)


def _copy_function(source: onnx.FunctionProto, target: onnx.FunctionProto, store: WeightStore) -> None:
    target.name, target.overload, target.domain = source.name, source.overload, canonical(source.domain)
    for names in ("input", "output", "attribute", "attribute_proto", "value_info"):
        getattr(target, names).extend(getattr(source, names))
    for domain, version in opset_imports(source.opset_import).items():
        target.opset_import.add(domain=domain, version=version)
    _copy_nodes(source.node, target, store, f" of function {source.domain}::{source.name}")


_HEAVY = {
    AttributeProto.TENSOR, AttributeProto.TENSORS, AttributeProto.GRAPH, AttributeProto.GRAPHS,
    AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS,
}  # fmt: skip


def _copy_nodes(
    source: Iterable[onnx.NodeProto], target: onnx.GraphProto | onnx.FunctionProto, store: WeightStore, where: str
) -> None:
    for position, node in enumerate(source):
        name = node.name or f"#{position}"
        copy = target.node.add()
        if node.op_type != "Constant" and _HEAVY.isdisjoint([a.type for a in node.attribute]):
            copy.CopyFrom(node)
        else:
            copy.op_type = node.op_type
            if node.overload:
                copy.overload = node.overload
            for part in ("input", "output", "metadata_props", "device_configurations"):
                getattr(copy, part).extend(getattr(node, part))
            for attribute in node.attribute:
                if attribute.type in _GRAPHS and _takes_no_graph(node.op_type, canonical(node.domain)):
                    raise load_error(
                        store.path,
                        f"{attribute.name!r} of node {name!r}{where} is a graph, and {node.op_type} takes none",
                    )
                _copy_attribute(attribute, copy.attribute.add(), store, f"{attribute.name!r} of node {name!r}{where}")
            if node.op_type == "Constant" and canonical(node.domain) == "":
                constant_as_tensor(copy, store, f"node {name!r}{where}")
        copy.name = name
        copy.domain = canonical(node.domain)
        drop_trailing(copy)


def drop_trailing(node: onnx.NodeProto) -> None:
    """Drop trailing omitted inputs, in place, down to as many as ONNX wants to see."""
    if node.input and node.input[-1] == "":
        least = _least_inputs(node.op_type, node.domain)
        while len(node.input) > least and node.input[-1] == "":
            del node.input[-1]


@cache
def _least_inputs(op_type: str, domain: str) -> int:
    """How many inputs must be there, omitted or not: a Loop has a trip count and a condition, if only ''."""
    try:
        return int(onnx.defs.get_schema(op_type, domain=domain).min_input)
    except onnx.defs.SchemaError:
        return 0


def _copy_attribute(source: AttributeProto, copy: AttributeProto, store: WeightStore, where: str) -> None:
    copy.name = source.name
    copy.type = kind = source.type
    if source.ref_attr_name:
        copy.ref_attr_name = source.ref_attr_name  # only then: the checker asks whether the field is there at all
    elif kind == AttributeProto.TENSOR:
        copy.t.CopyFrom(store.stub(source.t, f"attribute {where}"))
    elif kind == AttributeProto.TENSORS:
        copy.tensors.extend([store.stub(t, f"attribute {where}") for t in source.tensors])
    elif kind == AttributeProto.SPARSE_TENSOR:
        copy.type = AttributeProto.TENSOR
        copy.t.CopyFrom(store.stub_sparse(source.sparse_tensor, f"attribute {where}"))
    elif kind == AttributeProto.SPARSE_TENSORS:
        copy.type = AttributeProto.TENSORS
        copy.tensors.extend([store.stub_sparse(t, f"attribute {where}") for t in source.sparse_tensors])
    elif kind == AttributeProto.GRAPH:
        _copy_graph(source.g, copy.g, store, f" in {where}")
    elif kind == AttributeProto.GRAPHS:
        for graph in source.graphs:
            _copy_graph(graph, copy.graphs.add(), store, f" in {where}")
    else:
        copy.CopyFrom(source)


def constant_as_tensor(node: onnx.NodeProto, store: WeightStore, where: str) -> None:
    """Turn a Constant's `value_float`, `value_ints`, `value_string` … into `value`, in place."""
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return
    attribute = node.attribute[0]
    if attribute.name == "value":
        return
    dtypes = {"float": np.float32, "floats": np.float32, "int": np.int64, "ints": np.int64}
    kind = attribute.name.removeprefix("value_")
    item = helper.get_attribute_value(attribute)
    if kind in dtypes:
        tensor = numpy_helper.from_array(np.asarray(item, dtypes[kind]), node.output[0] if node.output else "")
    elif kind in ("string", "strings"):
        strings = [item] if kind == "string" else list(item)
        tensor = helper.make_tensor("", onnx.TensorProto.STRING, [] if kind == "string" else [len(strings)], strings)
    elif attribute.name == "sparse_value":
        tensor = attribute.t  # dense already
    else:
        return
    value = AttributeProto(name="value", type=AttributeProto.TENSOR)
    value.t.CopyFrom(store.stub(tensor, where))
    del node.attribute[:]
    node.attribute.append(value)


# Order -------------------------------------------------------------------------------------------------------------
def order_function(function: onnx.FunctionProto, path: str) -> None:
    """Like `order_graph`, for the body of a function."""
    graph = onnx.GraphProto()
    graph.node.extend(function.node)
    inputs, outputs = list(function.input), list(function.output)
    label = f"function {function.domain}::{function.name}"
    if _order(graph, inputs, outputs, (), path, label)[1]:
        del function.node[:]
        function.node.extend(graph.node)


def order_graph(graph: onnx.GraphProto, outer: tuple[set[str], ...], path: str, label: str) -> list[str]:
    """Sort a graph and its bodies where needed. Returns the outer names that it reads, `outer` being those in sight.

    ONNX asks for topological order; not every exporter keeps to it. Raises ModelLoadError for values that nothing
    defines, values defined twice, and cycles, naming the nodes.
    """
    inputs = [value.name for value in graph.input]
    inputs += [tensor.name for tensor in graph.initializer]
    return _order(graph, inputs, [value.name for value in graph.output], outer, path, label)[0]


def _order(
    graph: onnx.GraphProto, inputs: list[str], outputs: list[str], outer: tuple[set[str], ...], path: str, label: str
) -> tuple[list[str], bool]:
    at = f" of {label}" if label else ""
    maker: dict[str, int] = {}
    nodes = graph.node
    given = set(inputs)
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and (name in maker or name in given):
                other = f"node {nodes[maker[name]].name!r}" if name in maker else "an input or initializer"
                raise load_error(path, f"value {name!r} of node {node.name!r}{at} is made by {other} already")
            if name:
                maker[name] = i
    scope = (given | maker.keys(), *outer)
    reads: list[list[str]] = []
    free: dict[str, None] = {}
    in_order = True
    for i, node in enumerate(nodes):
        names = [name for name in node.input if name]
        for name in names:
            if name not in scope[0] and not any(name in known for known in outer):
                raise load_error(path, f"node {node.name!r}{at} reads value {name!r}, which nothing defines")
        for part, body in body_graphs(node):
            names += order_graph(body, scope, path, f"{part} of node {node.name!r}")
        reads.append(names)
        for name in names:
            made = maker.get(name)
            if made is None:
                if name not in given:
                    free[name] = None
            elif made >= i:
                in_order = False
    for name in outputs:
        if not any(name in known for known in scope):
            raise load_error(path, f"output {name!r}{at} is a value that nothing defines")
        if name not in scope[0]:
            free[name] = None
    if not in_order:
        _sort(graph, reads, maker, path, at)
    return list(free), not in_order


def _sort(graph: onnx.GraphProto, reads: list[list[str]], maker: dict[str, int], path: str, at: str) -> None:
    count = len(reads)
    before = [{maker[name] for name in names if name in maker} for names in reads]
    after: list[list[int]] = [[] for _ in range(count)]
    for i, sources in enumerate(before):
        for source in sources:
            after[source].append(i)
    waiting = [len(sources) for sources in before]
    ready = [i for i in range(count) if not waiting[i]]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for follower in after[i]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    if len(order) < count:
        raise load_error(path, f"nodes{at} depend on each other in a cycle: {_cycle(graph, before, set(order))}")
    nodes = [graph.node[i] for i in order]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _cycle(graph: onnx.GraphProto, before: list[set[int]], done: set[int]) -> str:
    """One cycle among the nodes that could not be ordered, spelled from producer to consumer."""
    at = next(i for i in range(len(before)) if i not in done)
    path: list[int] = []
    while at not in path:
        path.append(at)
        at = min(i for i in before[at] if i not in done)
    cycle = [*path[path.index(at) :], at][::-1]
    names = [repr(graph.node[i].name) for i in cycle]
    return " -> ".join(names if len(names) <= 12 else [*names[:6], "…", *names[-5:]])
