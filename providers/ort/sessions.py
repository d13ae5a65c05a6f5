"""onnxruntime sessions of parts of a model: weights by reference, one thread pool that does not spin, few words.

A weight reaches a session in two ways at once. `add_external_initializers` puts it into the graph, where optimisers and
execution providers see its value, and would be copied when the session is ready; `add_initializer` has the session
use the array where it lies. But it does so by name, whatever has become of that weight: an optimiser that transposed
it under its name is undone, and the result is wrong or an error. Weights that such optimisers may touch are therefore
given in the first way only. What lies in a file of its own onnxruntime is told by name: it maps it, and copies nothing
at all, where `add_external_initializers` takes as much memory again while a session is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.contract import Node, OnnxModel, Value
from outrider.providers.ort.library import ExecutionProvider
from outrider.providers.ort.options import OrtOptions
from outrider.providers.wire.dtypes import NUMBER, onnx_name
from outrider.providers.wire.onnx_model import Part

_LEVELS = {"none": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}
_ENTRIES = {
    "session.intra_op.allow_spinning": "0",
    "session.inter_op.allow_spinning": "0",
    "session.record_ep_graph_assignment_info": "1",
    "session.model_external_initializers_file_folder_path": "/",  # where `Part.files` are looked for
}
_ERRORS_ONLY, _NOTHING = 3, 4  # severities of onnxruntime's log

# Where a weight is read that no optimiser changes under its own name: (domain, operator, input). What onnxruntime
# transposes or reshapes in place are constants of elementwise operators, Concat and the like.
_UNTOUCHED = frozenset(
    [
        *(("", op, 1) for op in ("Conv", "ConvTranspose", "MatMul", "Gemm", "MatMulInteger", "ConvInteger")),
        *(("", op, i) for op in ("LSTM", "GRU", "RNN") for i in (1, 2)),
        ("", "Gather", 0),
        ("", "QLinearConv", 3),
        ("", "QLinearMatMul", 3),
        *(("com.microsoft", op, 1) for op in ("MatMulNBits", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")),
        *(("com.microsoft", op, i) for op in ("Attention", "QAttention", "DynamicQuantizeLSTM") for i in (1, 2)),
    ]
)


@dataclass
class Built:
    """A session, and the arrays that must outlive it. `outputs`: what it calls its outputs, the values `makes`."""

    session: Any
    inputs: tuple[str, ...]
    makes: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: list[Any]
    groups: list[tuple[str, frozenset[str]]]  # (execution provider, names of its nodes) of each assignment


class Builder:
    """Makes sessions for one execution provider. `ort`: the package."""

    def __init__(self, ort: Any, ep: ExecutionProvider, options: OrtOptions, threads: int) -> None:
        self.ort = ort
        self.ep = ep
        self.built = 0
        self._options = options
        self._threads = threads

    def ask(self, model: OnnxModel, nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]) -> Built:
        """A session that only tells which node goes where: as written, and nothing of it is optimised or run.

        Raises what onnxruntime raises, and WireError for a value whose type nobody knows.
        """
        part = model.cut(nodes, inputs, outputs, apart=not self.ep.own_cpu)
        return self._build(model, part, inputs, outputs, "none", set(part.weights), _NOTHING)

    def build(
        self,
        model: OnnxModel,
        nodes: Sequence[Node],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        level: str,
    ) -> Built:
        """A session to run. `level`: 'none', 'basic' or 'all'. Raises as `ask` does."""
        part = model.cut(nodes, inputs, outputs, apart=not self.ep.own_cpu)
        as_written = level == "none" and self.ep.own_cpu
        shared = set(part.weights) if as_written else _untouched(nodes)
        return self._build(model, part, inputs, outputs, level, shared, _ERRORS_ONLY)

    def _build(
        self,
        model: OnnxModel,
        part: Part,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        level: str,
        shared: set[str],
        severity: int,
    ) -> Built:
        ort = self.ort
        options = ort.SessionOptions()
        options.log_severity_level = severity
        options.intra_op_num_threads = self._threads
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[level])
        self._choose(options)
        weights = {name: value_of(ort, model.weights[name], NUMBER[dtype]) for name, dtype in part.weights.items()}
        for name, value in weights.items():
            if name in shared:
                options.add_initializer(name, value)
        options.add_external_initializers(list(weights), list(weights.values()))
        for name in part.files:
            _ = model.weights[name]  # raises if the file is no longer the one that was loaded
        for library in self._options.custom_ops:
            options.register_custom_ops_library(library)
        providers = self.ep.attach(options)
        # With a fallback onnxruntime would print, and then do without the execution provider.
        session = ort.InferenceSession(part.data, options, providers=providers, enable_fallback=0)
        self.built += 1
        groups = [
            (str(group.ep_name), frozenset(str(node.name) for node in group.get_nodes()))
            for group in session.get_provider_graph_assignment_info()
        ]
        reads, makes = (tuple(value.name for value in values) for values in (inputs, outputs))
        return Built(session, reads, makes, part.outputs, list(weights.values()), groups)

    def _choose(self, options: Any) -> None:
        """What the user asked of onnxruntime's sessions, over what we ask."""
        for name, value in self._options.attributes.items():
            if name == "execution_mode":
                value = getattr(self.ort.ExecutionMode, f"ORT_{value.upper()}")
            elif name == "execution_order":
                value = getattr(self.ort.ExecutionOrder, value.upper())
            setattr(options, name, value)
        for name, text in {**_ENTRIES, **self._options.entries}.items():
            options.add_session_config_entry(name, text)


def value_of(ort: Any, array: np.ndarray, number: int) -> Any:
    """An OrtValue over an array's memory, which it keeps alive. `number`: of its type, ONNX's."""
    if array.dtype.isbuiltin == 1 and number == NUMBER[onnx_name(array.dtype)]:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.dtype.itemsize}"), number)


def _untouched(nodes: Sequence[Node]) -> set[str]:
    """The names of weights that are only read where no optimiser changes them."""
    readers: dict[str, bool] = {}
    for node in nodes:
        for body_reads in node.captures:
            readers[body_reads.name] = False
        computed = any(value.name and not value.constant for value in node.inputs)
        for i, value in enumerate(node.inputs):
            safe = computed and (node.domain, node.op_type, i) in _UNTOUCHED
            readers[value.name] = readers.get(value.name, True) and safe
    return {name for name, safe in readers.items() if safe and name}
