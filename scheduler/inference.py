"""Types of values, from ONNX's own shape inference, for planning and for what providers are shown.

It runs on the skeleton. Declared shapes of outputs are no evidence (they lie in real models) and are cleared first, in
bodies too; declared dtypes stay.

ONNX's data propagation (what Shape, Gather and Concat compute for a Reshape) represents a 1-D tensor of n elements by n
protobuf messages, also where it is a weight of a billion floats. So it is let loose only on nodes whose inputs are
known to be short lists of integers; the others are hidden meanwhile, and the two kinds of inference alternate.

A graph with nodes of several opsets (functions have their own imports) is inferred once per opset, the nodes of the
others hidden, until nothing new is learnt.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from functools import lru_cache

import onnx
from onnx import helper, shape_inference

from outrider.providers.wire.dtypes import BY_NUMBER, is_tensor
from outrider.providers.wire.graph import Shape
from outrider.scheduler.limits import function_key
from outrider.scheduler.skeleton import SCHEMAS, Skeleton, body_graphs, has_bodies, walk, walk_nodes
from outrider.scheduler.standins import STAND_IN, restore, stand_in

HIDDEN = "outrider.hidden"  # a domain no library knows: passes through inference and conversion untouched
MAX_ROUNDS = 8
MAX_PROPAGATED = 256  # elements: shapes, axes, starts and ends are never longer

UNKNOWN: tuple[str, Shape] = ("undefined", None)
_INTEGERS = ("int64", "int32")
# Shape and Size have one too, but look at types only, whatever they read.
_PROPAGATORS = {schema.name for schema in SCHEMAS if schema.has_data_propagation_function} - {"Shape", "Size"}

_logger = logging.getLogger(__name__)

# These read the type of their input without asking whether it has one: with onnx 1.23 the process dies of it.
FRAGILE = {"EyeLike", "RegexFullMatch", "DictVectorizer", "LabelEncoder", "TreeEnsemble"}


def infer(skeleton: Skeleton, notes: list[str]) -> onnx.ModelProto:
    """A copy of the skeleton's model with `value_info` of everything that inference knows.

    A failure of the inference costs types, not the model: it is logged and added to `notes`.
    """
    model = onnx.ModelProto()
    model.CopyFrom(skeleton.model)
    _clear_output_shapes(model.graph)
    _complete_calls(model)
    originals = stand_in(model)
    model = _inferred(model, skeleton, notes)
    restore(model, originals)
    return model


def _inferred(model: onnx.ModelProto, skeleton: Skeleton, notes: list[str]) -> onnx.ModelProto:
    for function in model.functions:  # what a call knows of its inputs is not seen here
        for node in walk_nodes(function.node):
            if node.op_type in FRAGILE:
                node.domain = HIDDEN
    set_imports(model, skeleton.imports())
    groups = opset_groups(skeleton)
    inference = _Inference(model, notes)
    if len(groups) <= 1:
        return inference.visible(model)
    size = 0
    for _ in range(MAX_ROUNDS):
        for opsets in groups:
            others = {  # never control flow: what is hidden has its bodies hidden with it
                node.name
                for node in walk(model.graph)
                if skeleton.opsets.get(node.name, {}) != opsets and not has_bodies(node)
            }
            hidden = hide(model, others)
            set_imports(model, {**skeleton.imports(), **opsets})
            model = inference.visible(model)
            unhide(model, hidden)
        now = sum(len(g.value_info) for g in _graphs(model.graph))
        if now == size:
            break
        size = now
    set_imports(model, skeleton.imports())
    return model


def opset_groups(skeleton: Skeleton) -> list[Mapping[str, int]]:
    """The different opset imports in force in the graph: {} is the model's own, others come with inlined functions."""
    if not skeleton.opsets:
        return [{}]
    groups: list[Mapping[str, int]] = []
    for node in walk(skeleton.model.graph):
        own = skeleton.opsets.get(node.name, {})
        if own not in groups:
            groups.append(own)
    return groups


def set_imports(model: onnx.ModelProto, imports: Mapping[str, int]) -> None:
    """Replace a model's opset imports; our own domains come along."""
    del model.opset_import[:]
    for domain, version in {**imports, HIDDEN: 1, STAND_IN: 1}.items():
        model.opset_import.add(domain=domain, version=version)


def hide(model: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
    """Move the nodes of these full names into the hidden domain. Returns full name -> their own domain."""
    hidden: dict[str, str] = {}
    for node in walk(model.graph) if names else ():
        if node.name in names:
            hidden[node.name] = node.domain
            node.domain = HIDDEN
    return hidden


def unhide(model: onnx.ModelProto, hidden: Mapping[str, str]) -> None:
    """Undo `hide`."""
    if hidden:
        for node in walk(model.graph):
            if node.domain == HIDDEN and node.name in hidden:
                node.domain = hidden[node.name]


def type_of(kind: onnx.TypeProto) -> tuple[str, Shape]:
    """`dtype_of` and `shape_of` of an inferred type: a model has few different ones, and reading one takes long."""
    return _read_type(kind.SerializeToString())


@lru_cache(maxsize=4096)
def _read_type(data: bytes) -> tuple[str, Shape]:
    kind = onnx.TypeProto.FromString(data)
    return dtype_of(kind), shape_of(kind)


def dtype_of(kind: onnx.TypeProto) -> str:
    """A type as Outrider writes it: 'float32', 'sequence(float32)', 'map(int64,string)'; 'undefined' when unknown."""
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return BY_NUMBER.get(kind.tensor_type.elem_type, "undefined")
    if which == "sparse_tensor_type":
        return f"sparse({BY_NUMBER.get(kind.sparse_tensor_type.elem_type, 'undefined')})"
    if which == "sequence_type":
        return f"sequence({dtype_of(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({dtype_of(kind.optional_type.elem_type)})"
    if which == "map_type":
        return f"map({BY_NUMBER.get(kind.map_type.key_type, 'undefined')},{dtype_of(kind.map_type.value_type)})"
    return "undefined"


def shape_of(kind: onnx.TypeProto, declared: bool = False) -> Shape:
    """Dims as int, symbol, or None for unknown; None for unknown rank and for what is not a tensor.

    `declared`: a type that the model states, where `unk__7` is a symbol like any other (tf2onnx writes such).
    """
    if kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return None
    dims: list[int | str | None] = []
    for dim in kind.tensor_type.shape.dim:
        which = dim.WhichOneof("value")
        if which == "dim_value" and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        elif (
            which == "dim_param"
            and dim.dim_param not in ("", "?")
            and (declared or not dim.dim_param.startswith("unk__"))
        ):
            dims.append(dim.dim_param)
        else:  # exporters write unknown dims as '?' or -1, twice in a shape; inference makes up unk__ ones
            dims.append(None)
    return tuple(dims)


class _Inference:
    """Calls into ONNX for one model, and what is needed to know of its nodes for them, which stays while types come."""

    def __init__(self, model: onnx.ModelProto, notes: list[str]) -> None:
        self.notes = notes
        nodes = list(walk(model.graph))
        graphs = _graphs(model.graph)
        self.fragile = any(node.op_type in FRAGILE for node in nodes)
        self.bodies = len(graphs) > 1
        self.made = {name: UNKNOWN for node in nodes for name in node.output}
        self.propagating = {node.name: (*node.input, *node.output) for node in nodes if node.op_type in _PROPAGATORS}
        tensors = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
        tensors |= {n.output[0]: n.attribute[0].t for n in nodes if n.op_type == "Constant" and len(n.attribute) == 1}
        self.tensors = {
            name: _is_short(BY_NUMBER.get(tensor.data_type, "undefined"), tuple(tensor.dims))
            for name, tensor in tensors.items()
        }

    def visible(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Inference with data propagation where that is cheap."""
        model = self.once(model, False)
        types = self._types(model)
        for _ in range(MAX_ROUNDS):
            if all(itertools.starmap(_is_known, types.values())):
                break
            hidden = hide(model, self._too_long_to_propagate(types))
            model = self.once(model, True)
            unhide(model, hidden)
            before, types = types, self._types(model)
            if types == before:
                break
            model = self.once(model, False)
            types = self._types(model)
        return model

    def _types(self, model: onnx.ModelProto) -> dict[str, tuple[str, Shape]]:
        """Types of all values of all graphs by name; of equal names in sibling bodies, one."""
        types = dict(self.made)
        for graph in _graphs(model.graph) if self.bodies else (model.graph,):
            for infos in (graph.input, graph.value_info, graph.output):
                types.update([(info.name, type_of(info.type)) for info in infos])
        types.pop("", None)
        return types

    def _too_long_to_propagate(self, types: Mapping[str, tuple[str, Shape]]) -> set[str]:
        """Nodes with a data propagator that read anything but short integer lists."""
        short = {name: _is_short(*kind) for name, kind in types.items()} | self.tensors | {"": True}
        return {node for node, values in self.propagating.items() if not all(short.get(name) for name in values)}

    def once(self, model: onnx.ModelProto, data_prop: bool) -> onnx.ModelProto:
        """One call into ONNX; more where fragile nodes have to wait for the types of their inputs."""
        waiting = self._waiting(model)
        while True:
            hidden = hide(model, waiting)
            try:
                model = shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=data_prop)
            except (shape_inference.InferenceError, RuntimeError, ValueError, TypeError) as error:
                note = f"shape inference failed, so planning knows fewer types: {str(error).strip()}"
                if note not in self.notes:
                    _logger.warning(note)
                    self.notes.append(note)
                unhide(model, hidden)
                return model
            unhide(model, hidden)
            still = self._waiting(model)
            if len(still) == len(waiting):
                return model
            waiting = still

    def _waiting(self, model: onnx.ModelProto) -> set[str]:
        return _fragile(model.graph, set()) if self.fragile else set()


def _is_short(dtype: str, shape: Shape) -> bool:
    """True for an integer, or a list of integers of a known and small length."""
    if dtype not in _INTEGERS or shape is None or len(shape) > 1:
        return False
    return all(isinstance(dim, int) and dim <= MAX_PROPAGATED for dim in shape)


def _is_known(dtype: str, shape: Shape) -> bool:
    return None not in shape if shape is not None else dtype != "undefined" and not is_tensor(dtype)


def _fragile(graph: onnx.GraphProto, outer: set[str]) -> set[str]:
    """Fragile nodes that read a value of unknown type. `outer`: the values around the graph whose type is known."""
    made = {name for node in graph.node for name in node.output}
    infos = [*graph.input, *graph.value_info, *graph.output]
    typed = {info.name for info in infos if dtype_of(info.type) != "undefined"}
    known = (outer - made) | typed | {tensor.name for tensor in graph.initializer}
    known |= {node.output[0] for node in graph.node if node.op_type == "Constant" and node.domain == ""}
    found = {node.name for node in graph.node if node.op_type in FRAGILE and not known.issuperset(node.input)}
    for node in graph.node:
        if has_bodies(node):
            for _, body in body_graphs(node):
                found |= _fragile(body, known)
    return found


def _complete_calls(model: onnx.ModelProto) -> None:
    """Write out the trailing inputs and outputs that calls leave out: inference of the function wants all of them."""
    functions = {function_key(function): function for function in model.functions}
    for node in walk(model.graph) if functions else ():
        function = functions.get(function_key(node))
        if function is not None:
            node.input.extend([""] * (len(function.input) - len(node.input)))
            node.output.extend([""] * (len(function.output) - len(node.output)))


def _clear_output_shapes(graph: onnx.GraphProto) -> None:
    """Forget the shapes that outputs are declared with; those that are inputs or weights have theirs.

    Inference would take an empty declaration of such an output for the value's type everywhere.
    """
    for g in _graphs(graph):
        names = {value.name for value in g.output}
        weights = [tensor for tensor in g.initializer if tensor.name in names]
        known = {t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in weights}
        known |= {value.name: value.type for value in g.input if value.name in names}
        for value in g.output:
            if value.name in known:
                value.type.CopyFrom(known[value.name])
            elif value.type.WhichOneof("value") == "tensor_type":
                value.type.tensor_type.ClearField("shape")


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    return [graph, *(body for node in walk(graph) if has_bodies(node) for _, body in body_graphs(node))]
