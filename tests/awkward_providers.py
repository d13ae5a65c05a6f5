"""Providers that are within their contract, or nearly, and awkward all the same."""

from __future__ import annotations

import os
import time

import numpy

from outrider.providers.contract import Claim, Provider


class Copies(Provider):
    """Claims everything, or the operators of its option `operators`, and returns its first input for every output."""

    def setup(self, context):
        self.options = context.options
        if os.path.exists(self.options.get("slow_start", "/none")):
            time.sleep(30)

    def claim(self, graph):
        operators = self.options.get("operators")
        return [Claim([node]) for node in graph.nodes if not operators or node.op_type in operators]

    def compile(self, unit):
        def run(inputs):
            time.sleep(self.options.get("seconds", 0))
            return [numpy.array(inputs[0]) for _ in range(max(1, len(unit.outputs)))]

        return run


class FailsLate(Copies):
    """Its last output is no array when the first input begins with 1."""

    def compile(self, unit):
        run = super().compile(unit)
        return lambda inputs: [*run(inputs)[:-1], "text"] if inputs[0].flat[0] == 1 else run(inputs)


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


class Rude(Copies):
    """Says what no message can carry, and fails in everything that is not its work."""

    def compile(self, unit):
        def run(inputs):
            raise {"surrogate": ValueError("bad \udc80 text"), "no text": NoText()}[self.options["how"]]

        return run

    def stats(self):
        return {"numpy": numpy.int64(3), "huge": 1 << 80, 5: "bad \udc80 text"}

    def unload(self, compiled):
        raise ArithmeticError("unload went wrong")

    def close(self):
        raise ArithmeticError("close went wrong")
