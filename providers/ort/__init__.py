"""ONNX Runtime as a provider: any of its execution providers, in a worker of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.providers.contract import (
    Claim,
    ClaimBrokenError,
    Context,
    Decline,
    Graph,
    Node,
    OnnxModel,
    Program,
    Provider,
    Run,
    RunInto,
    Unit,
    Value,
)
from outrider.providers.ort.asking import claims_of
from outrider.providers.ort.library import CPU, ExecutionProvider, check_custom_ops, choose, onnxruntime, said
from outrider.providers.ort.options import OrtOptions, parse_options
from outrider.providers.ort.pieces import cut
from outrider.providers.ort.program import Counters, OrtProgram
from outrider.providers.ort.sessions import Builder, Built


class OrtProvider(Provider):
    """`ort`: onnxruntime's CPU provider; `ort:NAME`: another of its execution providers. Options: `options.py`."""

    merge = True
    wants_model = True

    def setup(self, context: Context) -> None:
        """Raises ProviderUnavailableError: no onnxruntime, no such execution provider, a wrong option."""
        own_cpu = context.part in ("", CPU) and "library" not in context.options
        self._options: OrtOptions = parse_options(context.options, own_cpu)
        self.per_signature = self._options.static_shapes
        self._ort = onnxruntime()
        ep = choose(self._ort, context.part, context.device, self._options)
        check_custom_ops(self._ort, self._options.custom_ops)
        self._builder = Builder(self._ort, ep, self._options, context.threads)
        self._rescuer = Builder(self._ort, ExecutionProvider(CPU, (), {}), self._options, context.threads)
        self._counters = Counters()
        self._programs = 0

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """What the execution provider takes: see `claims.py`."""
        model = graph.model
        assert isinstance(model, OnnxModel)

        def barred(node: Node) -> str:
            label = node.label
            if label in self._options.exclude:
                return f"the option exclude={node.op_type} leaves it to others"
            if model.calls(node):
                return "a call of a model function; its nodes are asked for one by one"
            return model.foreign.get(node.name, "")

        return claims_of(graph, self._builder, barred, self._options.cpu_fallback)

    def compile(self, unit: Unit) -> Run | Program:
        """Sessions for the unit. Raises ClaimBrokenError for nodes that the execution provider does not run."""
        compiled = self._compiled(unit) if unit.outputs else _nothing
        self._programs += 1
        return compiled

    def _compiled(self, unit: Unit) -> OrtProgram:
        model = unit.model
        assert model is not None
        mine = frozenset(node.name for node in unit.nodes)
        ep, fallback = self._builder.ep, self._options.cpu_fallback

        def attempt(
            nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]
        ) -> tuple[Built, frozenset[str]]:
            built = self._builder.build(model, nodes, inputs, outputs, unit.optimization)
            left = frozenset[str]().union(*(names for name, names in built.groups if name != ep.name))
            return built, frozenset() if fallback else mine & left

        def rescue(nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]) -> Built:
            return self._rescuer.build(model, nodes, inputs, outputs, unit.optimization)

        pieces = cut(unit, attempt, said)
        if pieces.refused:
            reason = "; ".join(dict.fromkeys(pieces.refused.values()))
            raise ClaimBrokenError(reason, nodes=list(pieces.refused), reason=reason)
        return OrtProgram(
            self._ort, unit, pieces.built, not ep.own_cpu, self._counters, self._compiled, attempt, rescue
        )

    def unload(self, compiled: Run | RunInto | Program) -> None:
        """Frees the sessions of a unit."""
        self._programs -= 1
        if isinstance(compiled, OrtProgram):
            compiled.unload()

    def stats(self) -> Mapping[str, Any]:
        """Programs loaded, sessions built so far (questions included), runs bound, outputs returned by value."""
        return {
            "execution_provider": self._builder.ep.name,
            "onnxruntime": str(self._ort.__version__),
            "programs": self._programs,
            "sessions_built": self._builder.built,
            **asdict(self._counters),
        }


def _nothing(inputs: Sequence[Any]) -> Sequence[Any]:
    """The run of a unit whose outputs nobody reads."""
    return []
