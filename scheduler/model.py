"""From a file to the plain graph: read, bound, check, infer, lower."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import checker

from outrider.providers.wire.graph import Graph, TensorRef, Value
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.collector import collector_paused
from outrider.scheduler.inference import dtype_of, hide, infer, set_imports, shape_of
from outrider.scheduler.limits import FunctionKey, check_bytes, check_limits, function_key
from outrider.scheduler.lowering import lower
from outrider.scheduler.metadata import ModelMetadata
from outrider.scheduler.model_errors import ModelLoadError, ModelNotFoundError, load_error
from outrider.scheduler.plain import FIRST_IR_WITH_OVERRIDES, Builder, schema_of
from outrider.scheduler.skeleton import Skeleton, body_graphs, build_skeleton, opset_imports, walk
from outrider.scheduler.store import WeightStore

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model as the coordinator keeps it: the plain graph, where its constants are, and what it says about itself.

    `graph` is the whole model in its original form, function calls as nodes, each with its opset-21 form beside it.
    Constant nodes are entries of `graph.constants`; their names are in `constant_nodes` as (node, output).
    `inputs` and `outputs` are as declared (shapes of outputs are for the user to see, not to plan by). Initializers of
    models before IR version 4 are constants and not among the inputs even where the file lists them there.
    `defaults`: the initializers of inputs that may be left out; they are not among `graph.constants`. `notes`: what the
    load could not do.
    """

    path: str
    graph: Graph
    metadata: ModelMetadata
    opsets: Mapping[str, int]
    functions: Mapping[FunctionKey, onnx.FunctionProto]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    defaults: Mapping[str, TensorRef]
    store: WeightStore
    device_configurations: tuple[Mapping[str, Any], ...]
    constant_nodes: tuple[tuple[str, str], ...]
    skeleton: Skeleton
    notes: tuple[str, ...] = field(default=())


@collector_paused()
def load_model(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    base_dir: str | os.PathLike[str] | None = None,
    *,
    free_dimensions: Mapping[str, int] | None = None,
    segment_ids: Callable[[], int] | None = None,
) -> LoadedModel:
    """Load a model from a path, bytes or a ModelProto, which is left as it is.

    `base_dir`: where external data lies; the model's folder for a path, else the current one. `free_dimensions`: the
    size of dimensions that the model names. `segment_ids` numbers the weight segments. External data is looked at,
    never read. Raises InvalidOptionError for a name that no dimension of the inputs has, ModelLoadError
    (ModelNotFoundError for a missing file) or ModelLimitError.
    """
    proto, path, folder = _read(model)
    if base_dir is not None:
        folder = os.fspath(base_dir)
    if not proto.HasField("graph"):
        raise load_error(path, "has no graph: it is no ONNX model, or the file is cut short")
    if not proto.opset_import:
        raise load_error(path, "imports no opset; every ONNX model states the version of its operators in opset_import")
    check_limits(proto, path)
    metadata = ModelMetadata(
        producer_name=proto.producer_name,
        producer_version=proto.producer_version,
        domain=proto.domain,
        version=proto.model_version,
        description=proto.doc_string,
        graph_name=proto.graph.name,
        graph_description=proto.graph.doc_string,
        custom_metadata_map={entry.key: entry.value for entry in proto.metadata_props},
        ir_version=proto.ir_version,
    )
    configurations = tuple(
        {"name": entry.name, "num_devices": entry.num_devices, "device": list(entry.device)}
        for entry in proto.configuration
    )
    store = WeightStore(path, folder, segment_ids)
    with contextlib.ExitStack() as undo:
        undo.callback(store.close)
        skeleton = build_skeleton(proto, store)
        _check(skeleton.model, path)
        fix_dimensions(skeleton.model.graph, free_dimensions or {})
        loaded = assemble(skeleton, path, metadata, configurations)
        undo.pop_all()
    return loaded


def assemble(
    skeleton: Skeleton, path: str, metadata: ModelMetadata, configurations: tuple[Mapping[str, Any], ...]
) -> LoadedModel:
    """Infer, lower and convert a skeleton to the plain graph."""
    notes: list[str] = []
    inferred = infer(skeleton, notes)
    builder = Builder(skeleton, lower(skeleton, inferred, notes))
    whole, _ = builder.graph(inferred.graph)
    declared = skeleton.model.graph
    weights = {tensor.name for tensor in declared.initializer}
    old = skeleton.model.ir_version < FIRST_IR_WITH_OVERRIDES
    inputs = [info for info in declared.input if not (old and info.name in weights)]
    defaults = {info.name: whole.constants[info.name] for info in inputs if info.name in weights}
    constants = {name: ref for name, ref in whole.constants.items() if name not in defaults}
    return LoadedModel(
        path,
        replace(whole, constants=constants),
        metadata,
        skeleton.imports(),
        {function_key(function): function for function in skeleton.model.functions},
        tuple(Value(info.name, dtype_of(info.type), shape_of(info.type, declared=True)) for info in inputs),
        tuple(Value(info.name, dtype_of(info.type), shape_of(info.type, declared=True)) for info in declared.output),
        defaults,
        skeleton.store,
        configurations,
        tuple(builder.constant_nodes),
        skeleton,
        tuple(notes),
    )


def fix_dimensions(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Give dimensions of inputs, and of values declared in the same words, their size."""
    names = {name for value in graph.input for name in named_dimensions(value)}
    for name in sizes:
        if name not in names:
            expected = f"names of dimensions of the model's inputs ({', '.join(sorted(names)) or 'it has none'})"
            raise invalid_option("free_dimensions", name, expected)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def named_dimensions(value: onnx.ValueInfoProto) -> list[str]:
    """Names of the dimensions of a value that have one."""
    return [dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param]


def _read(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, str, str]:
    """The protobuf, what to call it, and the folder of its external data."""
    if isinstance(model, onnx.ModelProto):
        return model, "<ModelProto>", "."
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _parse(bytes(model), "<bytes>"), "<bytes>", "."
    if not isinstance(model, (str, os.PathLike)):
        reason = f"a model is a path, bytes or a ModelProto, not {type(model).__name__}"
        raise ModelLoadError(f"{reason}.", path="", reason=reason)
    path = os.fsdecode(model)
    if "\0" in path:
        raise load_error(repr(path), "is no path, it holds a null character")
    try:
        with open(path, "rb", opener=_opened) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise load_error(path, "is not a file")
            check_bytes(info.st_size, path)
            data = file.read()
    except FileNotFoundError as error:
        reason = "there is no such file"
        if not os.path.isabs(path):
            with contextlib.suppress(OSError):
                reason += f" (the current folder is {os.getcwd()})"
        raise ModelNotFoundError(f"{path or repr(path)}: {reason}.", path=path, reason=reason) from error
    except IsADirectoryError as error:
        raise load_error(path, "is a folder; give the .onnx file in it") from error
    except OSError as error:
        raise load_error(path, f"cannot be read: {error.strerror}") from error
    return _parse(data, path), path, os.path.dirname(path) or "."


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe without a writer would block


def _parse(data: bytes, path: str) -> onnx.ModelProto:
    check_bytes(len(data), path)
    if not data:
        raise load_error(path, "is empty")
    try:
        model = onnx.ModelProto()
        model.ParseFromString(data)
    except DecodeError as error:
        raise load_error(path, "is not an ONNX model, or is cut short (its protobuf does not parse)") from error
    return model


def _check(model: onnx.ModelProto, path: str) -> None:
    """ONNX's checker on the skeleton, without what it minds and ONNX Runtime does not."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = max(copy.ir_version, 10)  # initializers that are no inputs, function overloads
    for graph in [copy.graph, *(body for node in walk(copy.graph) for _, body in body_graphs(node))]:
        for value in [*graph.input, *graph.output, *graph.value_info]:
            _give_shape(value.type)
    versions = opset_imports(model.opset_import)
    set_imports(copy, versions)
    hide(copy, {node.name for node in walk(copy.graph) if _is_deprecated(node, versions)})
    try:
        checker.check_model(copy, skip_opset_compatibility_check=True)
    except (checker.ValidationError, RuntimeError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        raise load_error(path, f"is not valid ONNX: {text}") from error


def _is_deprecated(node: onnx.NodeProto, versions: Mapping[str, int]) -> bool:
    """True where ONNX withdrew the operator (Upsample, GroupNormalization-18): it may still be claimed."""
    version = versions.get(node.domain)
    schema = schema_of(node.op_type, version, node.domain) if version else None
    return schema is not None and bool(schema.deprecated)


def _give_shape(kind: onnx.TypeProto) -> None:
    """The checker wants a shape on every tensor; an unknown rank is legal all the same."""
    if kind.WhichOneof("value") == "tensor_type" and not kind.tensor_type.HasField("shape"):
        kind.tensor_type.shape.SetInParent()
