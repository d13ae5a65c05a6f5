"""The opset-21 side table: for each original node the nodes that say the same in opset 21.

Kernels are written for the opset-21 form of an operator and for what later opsets add. The table comes from ONNX's own
version converter, run once per opset on the skeleton (so that it sees no weights), and is mapped back to the original
nodes: by node name, which the converter keeps on nodes it does not replace; else by the name of an original output
value; else by the consumer. The model itself is never converted: the converter drops functions, metadata and device
configurations, and renames what it replaces.

What cannot be converted keeps its own form: nodes above opset 21, other domains, operators without a schema, adapters
known to be wrong (`BROKEN`), and whatever fails the invariant that an original has at least one derived node and each
derived node belongs to exactly one original.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import onnx
from onnx import AttributeProto, shape_inference, version_converter

from outrider.scheduler.inference import FRAGILE, hide, opset_groups, set_imports
from outrider.scheduler.skeleton import Skeleton, body_graphs, has_bodies, walk

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

_Which = Callable[[onnx.NodeProto], bool]
_logger = logging.getLogger(__name__)


@dataclass
class Lowered:
    """The derived nodes of one original, in order, with the types of the values between them."""

    nodes: list[onnx.NodeProto]
    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    opset: int = TARGET
    attributes: dict[str, AttributeProto] = field(default_factory=dict)

    def keeps(self, attribute: AttributeProto) -> bool:
        """True for a tensor attribute that the original has too, in the same type and shape: the original is meant."""
        own = self.attributes.get(attribute.name)
        if own is None or own.type != AttributeProto.TENSOR:
            return False
        return own.t.data_type == attribute.t.data_type and list(own.t.dims) == list(attribute.t.dims)


@dataclass
class Lowering:
    """Full name of the original -> its lowered form. Nodes not in it have their opset-21 form already, or none."""

    table: dict[str, Lowered] = field(default_factory=dict)


def lower(skeleton: Skeleton, inferred: onnx.ModelProto, notes: list[str]) -> Lowering:
    """Make the side table. `inferred`: the skeleton's model with types (`inference.infer`); it is left as it is."""
    lowering = Lowering()
    for own in opset_groups(skeleton):
        opset = {**skeleton.imports(), **own}.get("", TARGET)
        if opset > TARGET:
            continue
        needed = {
            node.name: node.op_type
            for node in walk(inferred.graph)
            if skeleton.opsets.get(node.name, {}) == own and _changes(node, opset)
        }
        if needed:
            _lower_group(skeleton, inferred, own, opset, needed, lowering, notes)
    return lowering


def _changes(node: onnx.NodeProto, opset: int) -> bool:
    """True when the operator's opset-21 form is another than its form at `opset`, and the converter may be trusted."""
    if node.domain:
        return False
    now, then = _since(node.op_type, opset), _since(node.op_type, TARGET)
    if now is None or then is None or now == then:
        return False
    first, last = BROKEN.get(node.op_type, (TARGET, 0))
    return not first <= opset <= last


@cache
def _since(op_type: str, opset: int) -> int | None:
    try:
        return int(onnx.defs.get_schema(op_type, max_inclusive_version=opset, domain="").since_version)
    except onnx.defs.SchemaError:
        return None


def _lower_group(
    skeleton: Skeleton,
    inferred: onnx.ModelProto,
    own: Mapping[str, int],
    opset: int,
    needed: Mapping[str, str],
    lowering: Lowering,
    notes: list[str],
) -> None:
    functions = {(f.domain, f.name) for f in skeleton.model.functions}

    def foreign(node: onnx.NodeProto) -> bool:
        """Nodes that the converter must not see. Control flow stays, so that bodies are converted."""
        if (node.domain, node.op_type) in functions or skeleton.opsets.get(node.name, {}) != own:
            return not has_bodies(node)
        if node.op_type in FRAGILE:  # the converter infers types, too; none of them has another form in opset 21
            return True
        return node.domain == "" and (_since(node.op_type, opset) is None or _broken(node, opset))

    refused: set[str] = set()
    converted = _convert(skeleton, inferred, own, foreign, refused)
    while isinstance(converted, str):
        # One operator is enough to fail the whole model: one that the message names, else each is tried alone.
        words = set(re.split(r"\W+", converted))
        named = (set(needed.values()) - refused) & words
        if not named:
            named = _failing_alone(skeleton, inferred, own, foreign, needed, refused)
        note = f"the opset-21 form of {', '.join(sorted(named))} at opset {opset} is not available: {converted}"
        notes.append(note)
        _logger.warning(note)
        refused |= named
        if refused >= set(needed.values()):
            return
        converted = _convert(skeleton, inferred, own, foreign, refused)
    _restore_names(inferred.graph, converted.graph)
    _map_back(inferred.graph, converted.graph, {n for n, op in needed.items() if op not in refused}, lowering, set())
    if any(len(entry.nodes) > 1 for entry in lowering.table.values()):
        _add_types(converted, lowering)


def _broken(node: onnx.NodeProto, opset: int) -> bool:
    first, last = BROKEN.get(node.op_type, (TARGET, 0))
    return node.domain == "" and first <= opset <= last


def _convert(
    skeleton: Skeleton, inferred: onnx.ModelProto, own: Mapping[str, int], foreign: _Which, refused: set[str]
) -> onnx.ModelProto | str:
    """The converted copy, or what the converter said instead."""
    copy = onnx.ModelProto()
    copy.CopyFrom(inferred)
    copy.ir_version = max(copy.ir_version, 8)
    del copy.functions[:]
    hide(copy, {n.name for n in walk(copy.graph) if foreign(n) or (n.domain == "" and n.op_type in refused)})
    set_imports(copy, {**skeleton.imports(), **own})
    for node in walk(copy.graph):
        del node.metadata_props[:]
        del node.device_configurations[:]
    try:
        return version_converter.convert_version(copy, TARGET)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _failing_alone(
    skeleton: Skeleton,
    inferred: onnx.ModelProto,
    own: Mapping[str, int],
    foreign: _Which,
    needed: Mapping[str, str],
    refused: set[str],
) -> set[str]:
    """The operators whose presence alone makes the conversion fail; all of them when that explains nothing."""
    everything = {node.op_type for node in walk(inferred.graph) if not has_bodies(node)}
    left = set(needed.values()) - refused
    bad = {op for op in left if isinstance(_convert(skeleton, inferred, own, foreign, everything - {op}), str)}
    return bad or left


# Mapping back ------------------------------------------------------------------------------------------------------
def _map_back(
    original: onnx.GraphProto, converted: onnx.GraphProto, wanted: set[str], lowering: Lowering, outer: set[str]
) -> None:
    """Assign the nodes of a converted graph to originals; record those that are `wanted` and whole."""
    names = {node.name: node for node in original.node}
    makers = {out: node.name for node in original.node for out in node.output if out}
    visible = outer | set(makers) | {v.name for v in original.input} | {t.name for t in original.initializer}
    added = {tensor.name: tensor for tensor in converted.initializer if tensor.name not in visible}
    owner: dict[int, str] = {}
    reads: dict[str, str] = {}  # value between nodes -> the original whose derived node reads it first
    for i in range(len(converted.node) - 1, -1, -1):
        node = converted.node[i]
        origin = node.name if node.name in names else None
        if origin is None:
            origin = next((makers[out] for out in node.output if out in makers), None)
        if origin is None:
            origin = next((reads[out] for out in node.output if out in reads), None)
        if origin is None:
            continue
        owner[i] = origin
        for name in node.input:
            if name and name not in visible:
                reads[name] = origin
    derived: dict[str, list[onnx.NodeProto]] = {}
    for i, node in enumerate(converted.node):
        if i in owner:
            derived.setdefault(owner[i], []).append(node)
    for name, nodes in derived.items():
        if name in wanted:
            entry = _entry(names[name], nodes, added)
            if entry is not None:
                lowering.table[name] = entry
    by_name = {node.name: node for node in converted.node if node.name in names}
    for node in original.node:
        if node.name in by_name and has_bodies(node):
            theirs = dict(body_graphs(by_name[node.name]))
            for part, body in body_graphs(node):
                if part in theirs:
                    _map_back(body, theirs[part], wanted, lowering, visible)


@dataclass
class _Level:
    """One converted graph: what it makes, which original names are missing from that, and what they are called now."""

    made: set[str]
    lost: set[str]
    renamed: dict[str, str] = field(default_factory=dict)


def _restore_names(original: onnx.GraphProto, converted: onnx.GraphProto) -> None:
    """Undo the renaming of outputs of replaced nodes (Upsample, Scatter), in place.

    Consumers keep their inputs in order, so the name that stands where the lost one stood is its new one. Backwards,
    since a consumer may itself be a replaced node that is known only by its output.
    """
    seen: list[tuple[onnx.GraphProto, tuple[_Level, ...]]] = []

    def pair(ours: Iterable[str], theirs: Iterable[str], levels: tuple[_Level, ...]) -> None:
        for old, new in zip(ours, theirs, strict=False):
            level = next((level for level in levels if new in level.made), None)
            if old != new and level is not None and old in level.lost:
                level.renamed[new] = old

    def consume(ours: onnx.GraphProto, theirs: onnx.GraphProto, outer: tuple[_Level, ...]) -> None:
        names = {node.name: node for node in ours.node}
        makers = {out: node for node in ours.node for out in node.output if out}
        made = {out for node in theirs.node for out in node.output if out}
        level = _Level(made, set(makers) - made)
        levels = (level, *outer)
        seen.append((theirs, levels))
        pair([value.name for value in ours.output], [value.name for value in theirs.output], levels)
        for node in reversed(theirs.node):
            outputs = [level.renamed.get(name, name) for name in node.output]
            own = names.get(node.name) or next((makers[out] for out in outputs if out in makers), None)
            if own is not None:
                if has_bodies(own):
                    bodies = dict(body_graphs(node))
                    for part, body in body_graphs(own):
                        if part in bodies:
                            consume(body, bodies[part], levels)
                pair(own.input, node.input, levels)

    consume(original, converted, ())
    if any(levels[0].renamed for _, levels in seen):
        for graph, levels in seen:
            for node in graph.node:
                node.output[:] = [levels[0].renamed.get(name, name) for name in node.output]
                node.input[:] = [_restored(name, levels) for name in node.input]


def _restored(name: str, levels: tuple[_Level, ...]) -> str:
    level = next((level for level in levels if name in level.made), None)
    return name if level is None else level.renamed.get(name, name)


def _entry(
    original: onnx.NodeProto, nodes: Iterable[onnx.NodeProto], added: Mapping[str, onnx.TensorProto]
) -> Lowered | None:
    """The lowered form if it stands on its own: it makes all outputs of the original and reads its inputs only."""
    entry = Lowered([], attributes={attribute.name: attribute for attribute in original.attribute})
    inside: dict[str, str] = {}
    inputs, outputs = set(original.input), set(original.output)
    for node in nodes:
        for name in node.input:
            if name in added and name not in inside:
                inside[name] = f"{original.name}::{name}"
                constant = onnx.NodeProto(op_type="Constant", output=[inside[name]])
                constant.attribute.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(added[name])
                entry.nodes.append(constant)
            elif name and name not in inputs and name not in inside:
                return None
        for name in node.output:
            if name and name not in outputs:
                inside[name] = f"{original.name}::{name}"
        if inside:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = [inside.get(name, name) for name in node.input]
            copy.output[:] = [inside.get(name, name) for name in node.output]
            entry.nodes.append(copy)
        else:
            entry.nodes.append(node)
    made = {name for node in entry.nodes for name in node.output}
    return entry if {name for name in outputs if name} <= made else None


def _add_types(converted: onnx.ModelProto, lowering: Lowering) -> None:
    """Types of the values between derived nodes. Failing to infer them leaves them unknown, which kernels can bear."""
    try:
        model = shape_inference.infer_shapes(converted, strict_mode=False)
    except (shape_inference.InferenceError, RuntimeError, ValueError) as error:
        _logger.debug("no types inside lowered nodes: %s", error)
        return
    graphs = [model.graph] + [body for node in walk(model.graph) for _, body in body_graphs(node)]
    types = {info.name: info.type for graph in graphs for info in graph.value_info}
    for name, entry in lowering.table.items():
        for node in entry.nodes:
            for output in node.output:
                inner = output.removeprefix(f"{name}::")
                if inner != output and inner in types:
                    entry.types[output] = types[inner]
