"""Providers that only benches use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import Claim, Context, Decline, Graph, Place, Program, Provider, Run, Unit
from outrider.tools.bench.marks import WORKER_POINTS, Marks


class Plain(Provider):
    """Relu in its simplest form: a callable that returns a new array, which the worker has to copy."""

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """Every Relu."""
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit: Unit) -> Run:
        """A callable of one input."""
        return _relu


class Probe(Provider):
    """Takes nodes like Relu and computes nothing, as `null` does, and marks what its worker does in a run.

    `stats()` gives the marks since it was last asked.
    """

    def setup(self, context: Context) -> None:
        """Wrap the worker's functions, for as long as the process lives."""
        self.marks = Marks()
        self.marks.install(WORKER_POINTS)

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """Everything; outputs are to have the shape of the first input."""
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit: Unit) -> Program:
        """A program that asks for the place of its output."""
        return _Marked(unit, self.marks)

    def stats(self) -> Mapping[str, Any]:
        """{names, times}"""
        return self.marks.take()


class _Marked(Program):
    def __init__(self, unit: Unit, marks: Marks) -> None:
        self.unit, self.marks = unit, marks

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        place(0, self.unit.outputs[0].dtype, inputs[0].shape)
        nothing: list[Any] = [None]
        mark = self.marks.set

        def run(_: Sequence[Any]) -> list[Any]:
            mark("call prepared")
            mark("provider called")
            return nothing

        return run


def _relu(inputs: Sequence[Any]) -> list[Any]:
    return [np.maximum(inputs[0], 0)]
