"""Providers that only benches use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.providers.contract import Claim, Context, Decline, Graph, Provider, Run, Unit


class Plain(Provider):
    """Relu in its simplest form: a callable that returns a new array, which the worker has to copy."""

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """Every Relu."""
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit: Unit) -> Run:
        """A callable of one input."""
        return _relu


class Stuck(Provider):
    """Claims every node and never returns, to be killed in a run. Option `running`: a FIFO that a run writes to."""

    merge = True

    def setup(self, context: Context) -> None:
        """Remember the FIFO."""
        self.running: str = context.options["running"]

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """Everything."""
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit: Unit) -> Run:
        """A callable that tells that it runs, and sleeps."""
        return self._sleep

    def _sleep(self, inputs: Sequence[Any]) -> list[Any]:
        Path(self.running).write_bytes(b"!")
        while True:
            time.sleep(3600)


def _relu(inputs: Sequence[Any]) -> list[Any]:
    return [np.maximum(inputs[0], 0)]
