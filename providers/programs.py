"""The compiled units of one session in a worker. They outlive a generation: what comes again is not compiled again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from outrider.providers.adapters import Compiler
from outrider.providers.constants import Constants
from outrider.providers.contract import Program, Unit
from outrider.providers.tracing import unit_name
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.onnx_model import OnnxModel
from outrider.providers.wire.pack import unpack_graph
from outrider.providers.wire.spans import Recorder, timed

log = logging.getLogger("outrider.worker")


@dataclass
class Compiled:
    """A unit, what it was compiled to, and what undoes that."""

    unit: Unit
    program: Program
    unload: Callable[[], None]


class Programs:
    """By the key under which the coordinator ships a unit: equal keys of a session mean the same unit."""

    def __init__(self, compiler: Compiler, provider_name: str) -> None:
        self.compiler = compiler
        self._name = provider_name
        self._compiled: dict[int, Compiled] = {}
        self.model: OnnxModel | None = None  # the ONNX form of the session's model, if the provider wants one

    def get(
        self, body: dict[str, Any], constants: Constants, optimization: str, recorder: Recorder | None, partition: int
    ) -> Compiled:
        """The unit of an entry of `PartitionPlan.units`, compiled now if it is new. Raises what the provider raises."""
        key, count = body["key"], body["constants"]
        found = self._compiled.get(key)
        if found is not None:
            return found
        if body["graph"] is None:
            raise WireError(f"unit {key} was not shipped to this worker", where="Load.units", reason="unknown unit")
        graph = constants.graph(unpack_graph(body["graph"]))
        unit = Unit(
            nodes=graph.nodes[count:],
            inputs=graph.inputs,
            outputs=graph.outputs,
            constants=graph.constants,
            constant_nodes=graph.nodes[:count],
            optimization=optimization,
            opsets=graph.opsets,
            model=self.model,
        )
        with timed(recorder, "compile", unit_name(unit), {"partition": partition}):
            program, unload = self.compiler.program(unit)
        self._compiled[key] = made = Compiled(unit, program, unload)
        return made

    def keep(self, keys: Collection[int]) -> None:
        """Unload all others."""
        for key in [key for key in self._compiled if key not in keys]:
            unload = self._compiled.pop(key).unload
            try:
                unload()
            except (Exception, SystemExit):  # anyone's unload(): the others must not suffer from it
                log.exception("provider %s failed to unload a unit", self._name)
