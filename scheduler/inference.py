"""Types of values, from ONNX's own shape inference, for planning and for what providers are shown.

It runs on the skeleton. Declared shapes of outputs are no evidence (they lie in real models) and are cleared first, in
bodies too; declared dtypes stay. A graph with nodes of several opsets (functions have their own imports) is inferred
once per opset, the nodes of the others hidden, until nothing new is learnt.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import onnx
from onnx import shape_inference

from outrider.providers.wire.dtypes import BY_NUMBER
from outrider.providers.wire.graph import Shape
from outrider.scheduler.skeleton import Skeleton, body_graphs, walk

HIDDEN = "outrider.hidden"  # a domain no library knows: passes through inference and conversion untouched
MAX_ROUNDS = 8

_logger = logging.getLogger(__name__)


def infer(skeleton: Skeleton, notes: list[str]) -> onnx.ModelProto:
    """A copy of the skeleton's model with `value_info` of everything that inference knows.

    A failure of the inference costs types, not the model: it is logged and added to `notes`.
    """
    model = onnx.ModelProto()
    model.CopyFrom(skeleton.model)
    _clear_output_shapes(model.graph)
    groups = opset_groups(skeleton)
    if len(groups) <= 1:
        return _infer_once(model, notes)
    size = 0
    for _ in range(MAX_ROUNDS):
        for opsets in groups:
            others = {node.name for node in walk(model.graph) if skeleton.opsets.get(node.name, {}) != opsets}
            hidden = hide(model, others)
            set_imports(model, {**skeleton.imports(), **opsets})
            model = _infer_once(model, notes)
            unhide(model, hidden)
        now = sum(len(g.value_info) for g in _graphs(model.graph))
        if now == size:
            break
        size = now
    set_imports(model, skeleton.imports())
    return model


def opset_groups(skeleton: Skeleton) -> list[Mapping[str, int]]:
    """The different opset imports in force in the graph: {} is the model's own, others come with inlined functions."""
    groups: list[Mapping[str, int]] = []
    for node in walk(skeleton.model.graph):
        own = skeleton.opsets.get(node.name, {})
        if own not in groups:
            groups.append(own)
    return groups


def set_imports(model: onnx.ModelProto, imports: Mapping[str, int]) -> None:
    """Replace a model's opset imports; the hidden domain comes along."""
    del model.opset_import[:]
    for domain, version in {**imports, HIDDEN: 1}.items():
        model.opset_import.add(domain=domain, version=version)


def hide(model: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
    """Move the nodes of these full names into the hidden domain. Returns full name -> their own domain."""
    hidden = {}
    for node in walk(model.graph):
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
        elif which == "dim_param" and dim.dim_param not in ("", "?") and (
            declared or not dim.dim_param.startswith("unk__")
        ):
            dims.append(dim.dim_param)
        else:  # exporters write unknown dims as '?' or -1, twice in a shape; inference makes up unk__ ones
            dims.append(None)
    return tuple(dims)


def _infer_once(model: onnx.ModelProto, notes: list[str]) -> onnx.ModelProto:
    try:
        return shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    except (shape_inference.InferenceError, RuntimeError, ValueError, TypeError) as error:
        note = f"shape inference failed, so planning knows fewer types: {str(error).strip()}"
        _logger.warning(note)
        notes.append(note)
        return model


def _clear_output_shapes(graph: onnx.GraphProto) -> None:
    for g in _graphs(graph):
        for value in g.output:
            if value.type.WhichOneof("value") == "tensor_type":
                value.type.tensor_type.ClearField("shape")


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    found = [graph]
    for node in walk(graph):
        found += [body for _, body in body_graphs(node)]
    return found
