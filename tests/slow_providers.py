"""Providers that take as long as the first element of their input says, in seconds, and in which way."""

import ctypes
import os
import time

import numpy

from outrider.providers.contract import Claim, Provider


class Slow(Provider):
    """Identity nodes, one unit each. Option `how`:

    'sleep': without the interpreter lock; 'lock': native code that holds it; 'look': it asks whether it is cancelled;
    'three rows': as 'sleep', and an hour for three rows; 'setup', 'claim', 'compile': an hour there.
    `log`: a file that gets a line per call, with what became of it.
    """

    def setup(self, context):
        self.how = context.options.get("how", "sleep")
        self.log = context.options.get("log")
        self.cancelled = context.cancelled
        if self.how == "setup":
            self._sleep(3600)

    def claim(self, graph):
        mine = [Claim([node]) for node in graph.nodes if node.op_type == "Identity"]
        if self.how == "claim" and mine:
            self._sleep(3600)
        return mine

    def compile(self, unit):
        if self.how == "compile":
            self._sleep(3600)
        return self._run

    def _note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{what}\n")

    def _run(self, inputs):
        seconds = float(inputs[0].flat[0])
        self._note("begun")
        if self.how == "three rows" and len(inputs[0]) == 3:
            self._sleep(3600)
        if seconds > 0:
            self._sleep(seconds)
        self._note("ended")
        return [numpy.array(inputs[0])]

    def _sleep(self, seconds):
        ends = time.monotonic() + seconds
        if self.how == "lock":
            usleep = ctypes.PyDLL(None).usleep
            while time.monotonic() < ends:
                usleep(1_000_000)
        elif self.how == "look":
            while time.monotonic() < ends:
                if self.cancelled():
                    self._note("stopped")
                    raise RuntimeError("nobody waits")
                time.sleep(0.001)
        else:
            time.sleep(seconds)


class Stopping(Slow):
    """Stops its process at a positive element, as SIGSTOP by a user would."""

    def _sleep(self, seconds):
        os.kill(os.getpid(), 19)


class Doomed(Slow):
    """Its first two incarnations die at a positive element, the others when they compile."""

    def setup(self, context):
        super().setup(context)
        self.incarnation = context.incarnation

    def compile(self, unit):
        if self.incarnation > 2:
            os.kill(os.getpid(), 9)
        return self._run

    def _sleep(self, seconds):
        os.kill(os.getpid(), 9)


class Sluggish(Slow):
    """Starts again when there is the file `gate`, and not before."""

    def setup(self, context):
        super().setup(context)
        while context.incarnation > 1 and not os.path.exists(context.options["gate"]):
            time.sleep(0.01)
