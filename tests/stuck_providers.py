"""Providers that get stuck where their option `where` says, after making the file that their option `mark` names."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import numpy

from outrider.providers.contract import Claim, Provider


class Stuck(Provider):
    """Claims Relu. `where`: 'setup', 'claim', 'compile', 'run', 'close'; `how`: 'sleeps', 'holds the lock', 'stops'.

    With `armed` it gets stuck only while that file exists. It sleeps for `seconds`, and makes the file `then` at last.
    """

    def setup(self, context):
        self.options = context.options
        self._reach("setup")

    def _reach(self, where):
        if where != self.options.get("where") or not os.path.exists(self.options.get("armed", "/")):
            return
        with open(self.options["mark"], "w") as file:
            file.write(str(os.getpid()))
        how = self.options.get("how", "sleeps")
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "holds the lock":
            ctypes.PyDLL(None).sleep(600)
        else:
            time.sleep(self.options.get("seconds", 600))
        if "then" in self.options:
            open(self.options["then"], "w").close()

    def claim(self, graph):
        self._reach("claim")
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit):
        self._reach("compile")

        def run(inputs):
            self._reach("run")
            return [numpy.maximum(inputs[0], 0)]

        return run

    def close(self):
        self._reach("close")
