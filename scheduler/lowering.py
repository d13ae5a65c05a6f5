"""The opset-21 side table: for each original node the nodes that say the same in opset 21.

Kernels are written for the opset-21 form of an operator and for what later opsets add. Most operators have had the same
form all along but for the types they take: their nodes are only renumbered. The others go through ONNX's own version
converter, side by side in one model that holds nothing else: what a node reads is an input of that model, with the type
that inference found, and what it makes is an output. So the converter sees no weights, bodies or functions, and what it
made of a node is what now leads to that node's outputs. The model itself is never converted: the converter drops
functions, metadata and device configurations, and renames what it replaces.

What cannot be converted keeps its own form: nodes above opset 21, other domains, operators without a schema, adapters
known to be wrong (`BROKEN`), and whatever does not make all outputs of its original from the inputs of that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import onnx
from onnx import AttributeProto, helper, shape_inference, version_converter

from outrider.scheduler.inference import opset_groups, set_imports
from outrider.scheduler.skeleton import Skeleton, body_graphs, has_bodies

TARGET = 21
# Operator -> opsets (first, last): Dropout-7 has a mask of its input's type, which stays declared;
# GroupNormalization-18 has scale and bias per group, -21 per channel, and the converter only renumbers; PRelu-6 has one
# slope per channel, which it does not reshape; Scan-8 has a batch axis, which it drops; Softmax-1 and its kin flatten,
# and the Reshape that it puts after them takes an axis of size 0 for one to copy, and fails in some bodies; Hardmax-1
# it only renumbers.
BROKEN = {
    "Dropout": (7, 9),
    "GroupNormalization": (18, 20),
    "Hardmax": (1, 12),
    "LogSoftmax": (1, 12),
    "PRelu": (1, 6),
    "Scan": (8, 8),
    "Softmax": (1, 12),
}

_SAME, _RENUMBER, _CONVERT = range(3)
_logger = logging.getLogger(__name__)


@dataclass
class Lowered:
    """The derived nodes of one original, in order, with the types of the values between them."""

    nodes: list[onnx.NodeProto]
    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    attributes: dict[str, AttributeProto] = field(default_factory=dict)

    def keeps(self, attribute: AttributeProto) -> bool:
        """True for a tensor attribute that the original has too, in the same type and shape: the original is meant."""
        own = self.attributes.get(attribute.name)
        if own is None or own.type != AttributeProto.TENSOR:
            return False
        return own.t.data_type == attribute.t.data_type and list(own.t.dims) == list(attribute.t.dims)


@dataclass
class Lowering:
    """Full name of the original -> its lowered form; names of those that differ in nothing but the opset.

    Nodes that are in neither have their opset-21 form already, or none.
    """

    table: dict[str, Lowered] = field(default_factory=dict)
    renumbered: set[str] = field(default_factory=set)


def lower(skeleton: Skeleton, inferred: onnx.ModelProto, notes: list[str]) -> Lowering:
    """Make the side table. `inferred`: the skeleton's model with types (`inference.infer`); it is left as it is."""
    lowering = Lowering()
    functions = {(function.domain, function.name) for function in skeleton.model.functions}
    for own in opset_groups(skeleton):
        opset = {**skeleton.imports(), **own}.get("", TARGET)
        if opset >= TARGET:
            continue
        asked: list[_Item] = []
        for node, scope in _scoped(inferred.graph, None):
            if node.domain or skeleton.opsets.get(node.name, {}) != own or ("", node.op_type) in functions:
                continue
            change = _change(node.op_type, opset)
            if change == _RENUMBER:
                lowering.renumbered.add(node.name)
            elif change == _CONVERT and not has_bodies(node):
                asked.append(_Item(node, scope))
        if asked:
            _Conversion({**skeleton.imports(), **own}, opset, notes).into(lowering.table, asked)
    return lowering


@cache
def _change(op_type: str, opset: int) -> int:
    """How the operator's form at `opset` becomes its form in opset 21, as far as the converter may be trusted."""
    first, last = BROKEN.get(op_type, (TARGET, 0))
    if op_type == "Constant" or first <= opset <= last:
        return _SAME  # a Constant is not a node of the plain graph
    try:
        now = onnx.defs.get_schema(op_type, max_inclusive_version=opset, domain="")
        then = onnx.defs.get_schema(op_type, max_inclusive_version=TARGET, domain="")
    except onnx.defs.SchemaError:
        return _SAME
    if now.since_version == then.since_version:
        return _SAME
    return _RENUMBER if _form(now) == _form(then) and not then.deprecated else _CONVERT


@cache
def means_the_same(op_type: str, domain: str, opset: int, other: int) -> bool:
    """Whether a node written for `opset` of its domain may stand in a model that imports `other`.

    It may if the operator did not change in between, or only took more types. Unknown operators may not.
    """
    if opset == other:
        return True
    first, last = BROKEN.get(op_type, (TARGET, 0)) if domain == "" else (TARGET, 0)
    try:
        now = onnx.defs.get_schema(op_type, max_inclusive_version=opset, domain=domain)
        then = onnx.defs.get_schema(op_type, max_inclusive_version=other, domain=domain)
    except onnx.defs.SchemaError:
        return False
    if now.since_version == then.since_version:
        return True
    broken = any(first <= one <= last for one in (opset, other))
    return opset < other and not broken and not then.deprecated and _form(now) == _form(then)


def _form(schema: Any) -> tuple[Any, ...]:
    """What an operator takes and makes, without types."""
    attributes = {
        name: (one.type, one.required, one.default_value.SerializeToString()) for name, one in schema.attributes.items()
    }
    return attributes, [one.option for one in schema.inputs], [one.option for one in schema.outputs]


class _Scope:
    """The types of the values in sight of a graph."""

    def __init__(self, graph: onnx.GraphProto, outer: _Scope | None) -> None:
        self.graph = graph
        self.outer = outer

    @cached_property
    def _own(self) -> dict[str, onnx.TypeProto | None]:
        own: dict[str, onnx.TypeProto | None] = {name: None for node in self.graph.node for name in node.output}
        for tensor in self.graph.initializer:
            own[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        for infos in (self.graph.value_info, self.graph.output, self.graph.input):
            own.update((info.name, info.type) for info in infos)
        return own

    def type_of(self, name: str) -> onnx.TypeProto | None:
        """What is known of a value's type."""
        if name in self._own:
            return self._own[name]
        return None if self.outer is None else self.outer.type_of(name)


def _scoped(graph: onnx.GraphProto, outer: _Scope | None) -> Iterator[tuple[onnx.NodeProto, _Scope]]:
    """All nodes of a graph and its bodies, each with what it sees."""
    scope = _Scope(graph, outer)
    for node in graph.node:
        yield node, scope
        for _, body in body_graphs(node):
            yield from _scoped(body, scope)


# Conversion --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Item:
    node: onnx.NodeProto
    scope: _Scope


class _Conversion:
    """Asks the converter for the opset-21 forms of nodes of one opset."""

    def __init__(self, imports: Mapping[str, int], opset: int, notes: list[str]) -> None:
        self.imports = imports
        self.opset = opset
        self.notes = notes

    def into(self, table: dict[str, Lowered], items: Sequence[_Item]) -> None:
        """Add the lowered forms of `items` to the table. One operator is enough to make the converter fail: then that
        which its message names is left out, else those that fail alone."""
        converted = self._convert(items)
        while isinstance(converted, str):
            operators = {item.node.op_type for item in items}
            refused = operators & set(re.split(r"\W+", converted)) or self._failing_alone(items) or operators
            note = f"the opset-21 form of {', '.join(sorted(refused))} at opset {self.opset} is not available: "
            self.notes.append(note + converted)
            _logger.warning(note + converted)
            items = [item for item in items if item.node.op_type not in refused]
            if not items:
                return
            converted = self._convert(items)
        table.update(_entries(converted, items))

    def _convert(self, items: Sequence[_Item]) -> onnx.ModelProto | str:
        """A model of these nodes, in opset 21, or what the converter said instead."""
        model = onnx.ModelProto(ir_version=8)
        set_imports(model, self.imports)
        graph = model.graph
        graph.name = "side by side"
        for number, item in enumerate(items):
            node = graph.node.add(
                op_type=item.node.op_type, overload=item.node.overload, attribute=item.node.attribute,
                input=[name and f"{number}<{i}" for i, name in enumerate(item.node.input)],
                output=[name and f"{number}>{i}" for i, name in enumerate(item.node.output)],
            )  # fmt: skip
            for infos, inside, names in ((graph.input, node.input, item.node.input),
                                         (graph.output, node.output, item.node.output)):  # fmt: skip
                for ours, name in zip(inside, names, strict=True):
                    if name:
                        infos.add(name=ours, type=item.scope.type_of(name))
        try:
            return version_converter.convert_version(model, TARGET)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

    def _failing_alone(self, items: Sequence[_Item]) -> set[str]:
        by_operator: dict[str, list[_Item]] = {}
        for item in items:
            by_operator.setdefault(item.node.op_type, []).append(item)
        return {operator for operator, own in by_operator.items() if isinstance(self._convert(own), str)}


def _entries(converted: onnx.ModelProto, items: Sequence[_Item]) -> dict[str, Lowered]:
    """The nodes of the converted model, by the original that they lead to the outputs of."""
    results = iter(converted.graph.output)
    outputs = [{next(results).name: name for name in item.node.output if name} for item in items]
    leads_to = {ours: number for number, names in enumerate(outputs) for ours in names}
    derived: list[list[onnx.NodeProto]] = [[] for _ in items]
    for node in reversed(converted.graph.node):
        number = next((leads_to[name] for name in node.output if name in leads_to), None)
        if number is not None:
            derived[number].append(node)
            leads_to.update(dict.fromkeys(node.input, number))
    added = {tensor.name: tensor for tensor in converted.graph.initializer}
    types = _types_inside(converted, items)
    found = {}
    for number, item in enumerate(items):
        names = {f"{number}<{i}": name for i, name in enumerate(item.node.input) if name} | outputs[number]
        entry = _entry(item.node, derived[number][::-1], names, added, types)
        if entry is not None:
            found[item.node.name] = entry
    return found


def _entry(
    original: onnx.NodeProto,
    nodes: Sequence[onnx.NodeProto],
    names: dict[str, str],
    added: Mapping[str, onnx.TensorProto],
    types: Mapping[str, onnx.TypeProto],
) -> Lowered | None:
    """The lowered form if it stands on its own: it makes all outputs of the original and reads its inputs only.

    `names`: those in the converted model -> the original's. Values between the nodes are called `<original>::<name>`.
    """
    entry = Lowered([], attributes={attribute.name: attribute for attribute in original.attribute})
    names[""] = ""
    for node in nodes:
        for name in node.input:
            if name in added and name not in names:
                names[name] = f"{original.name}::{name}"
                constant = onnx.NodeProto(op_type="Constant", output=[names[name]])
                constant.attribute.add(name="value", type=AttributeProto.TENSOR, t=added[name])
                entry.nodes.append(constant)
        if any(name not in names for name in node.input):
            return None
        for name in node.output:
            if name not in names:
                names[name] = f"{original.name}::{name}"
                if name in types:
                    entry.types[names[name]] = types[name]
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
        entry.nodes.append(node)
    made = {name for node in entry.nodes for name in node.output}
    return entry if {name for name in original.output if name} <= made else None


def _types_inside(converted: onnx.ModelProto, items: Sequence[_Item]) -> dict[str, onnx.TypeProto]:
    """Types of the values between derived nodes. Failing to infer them leaves them unknown, which kernels can bear."""
    if sum(node.op_type != "Constant" for node in converted.graph.node) <= len(items):
        return {}  # a node and constants for each: those say their types themselves
    try:
        model = shape_inference.infer_shapes(converted, strict_mode=False)
    except (shape_inference.InferenceError, RuntimeError, ValueError) as error:
        _logger.debug("no types inside lowered nodes: %s", str(error))
        return {}
    return {info.name: info.type for info in model.graph.value_info}
