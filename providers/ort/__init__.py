"""ONNX Runtime as a provider: any of its execution providers, in a worker of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime

from outrider.providers.contract import Claim, Decline, Graph, Provider, Run, Unit


class OrtProvider(Provider):
    """The CPU execution provider of ONNX Runtime."""

    merge = True
    wants_model = True

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """Each node that ONNX Runtime assigns to a provider."""
        assert graph.model is not None
        part = graph.model.cut(graph.nodes, graph.inputs, graph.outputs)
        options = self._options(graph.model, part.weights)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(part.data, options)
        taken = {one.name for group in session.get_provider_graph_assignment_info() for one in group.get_nodes()}
        return [Claim([n]) if n.name in taken else Decline(n, "onnxruntime does not take it") for n in graph.nodes]

    def compile(self, unit: Unit) -> Run:
        """A session of the unit."""
        assert unit.model is not None
        nodes = (*unit.constant_nodes, *unit.nodes)
        part = unit.model.cut(nodes, unit.inputs, unit.outputs)
        session = onnxruntime.InferenceSession(part.data, self._options(unit.model, part.weights))
        names = [value.name for value in unit.inputs]
        outputs = [value.name for value in unit.outputs]

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            results: Sequence[Any] = session.run(outputs, dict(zip(names, inputs, strict=True)))
            return results

        return run

    def _options(self, model: Any, weights: Mapping[str, str]) -> Any:
        options = onnxruntime.SessionOptions()
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(model.weights[name]) for name in weights]
        for name, value in zip(weights, values, strict=True):
            options.add_initializer(name, value)
        options.add_external_initializers(list(weights), values)
        self._kept.append(values)
        options.intra_op_num_threads = 1
        return options
