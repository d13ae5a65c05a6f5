"""Providers for traces: one tells its steps, one has stages that meet, so that runs overlap for certain, one waits."""

import os
import time

import numpy

from outrider.providers.contract import Claim, Provider


class TellsSteps(Provider):
    """Relu in two steps, told by `context.trace` as the contract says."""

    def setup(self, context):
        self.trace = context.trace

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit):
        (node,) = unit.nodes

        def run(inputs):
            start = time.monotonic_ns()
            mask = inputs[0] > 0
            if self.trace.on:
                self.trace.span("mask", start, time.monotonic_ns(), nbytes=mask.nbytes)
                start = time.monotonic_ns()
            result = inputs[0] * mask
            if self.trace.on:
                self.trace.span(node.name, start, time.monotonic_ns(), node.label, result.nbytes)
            return [result]

        return run


class Meets(Provider):
    """Stage number `stage` of three: in its call n it meets the next stage's call n - 1.

    So each stage is at a run of its own while the others are at theirs, or nobody gets on. Pipes in `folder`.
    """

    STAGES = ("Neg", "Abs", "Exp")
    RUNS = 3

    def setup(self, context):
        self.stage, folder = context.options["stage"], context.options["folder"]
        self.before = self.after = None
        if self.stage > 0:
            self.before = self._pipes(folder, self.stage - 1)[::-1]
        if self.stage < len(self.STAGES) - 1:
            self.after = self._pipes(folder, self.stage)
        self.calls = 0

    def _pipes(self, folder, number):
        return [os.open(os.path.join(folder, f"{number}{way}"), os.O_RDWR) for way in ("down", "up")]

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == self.STAGES[self.stage]]

    def compile(self, unit):
        work = {"Neg": numpy.negative, "Abs": numpy.abs, "Exp": numpy.exp}[unit.nodes[0].op_type]

        def run(inputs):
            self.calls += 1
            meet = [self.before] if self.before and self.calls < self.RUNS else []
            meet += [self.after] if self.after and self.calls > 1 else []
            for write, _ in meet:
                os.write(write, b".")
            for _, read in meet:
                os.read(read, 1)
            return [work(inputs[0])]

        return run


class Waits(Provider):
    """Runs when somebody writes a byte to the pipe `gate`; says by one in `begun` that it has been called."""

    def setup(self, context):
        self.begun, self.gate = (os.open(context.options[name], os.O_RDWR) for name in ("begun", "gate"))

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        def run(inputs):
            os.write(self.begun, b".")
            os.read(self.gate, 1)
            return [numpy.negative(inputs[0])]

        return run
