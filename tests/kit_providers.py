"""Providers that use the optional parts of the contract, one each, and say in `stats()` what they saw."""

import dataclasses
import os
import signal
import threading
import time

import numpy

from outrider.providers.contract import Capabilities, Claim, Program, Provider
from outrider.shm.board import BoardWriter

FUNCTIONS = {
    "Abs": numpy.abs, "Add": numpy.add, "Exp": numpy.exp, "Identity": lambda x: x, "Mul": numpy.multiply,
    "Neg": numpy.negative, "Relu": lambda x: numpy.maximum(x, 0), "Sub": numpy.subtract,
    "Transpose": lambda x: x.T,
}  # fmt: skip
INTO = {
    "Abs": numpy.abs, "Add": numpy.add, "Exp": numpy.exp, "Mul": numpy.multiply, "Neg": numpy.negative,
    "Relu": lambda x, out: numpy.maximum(x, 0, out=out), "Sub": numpy.subtract,
}  # fmt: skip


class Small(Provider):
    """Serves the operators above, or those that its option `claims` names, each node for itself."""

    def setup(self, context):
        self.options = context.options
        self.wanted = context.options.get("claims", list(FUNCTIONS))
        self.seen = []  # of each input: contiguous, aligned, writable

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type in self.wanted]

    def compile(self, unit):
        (node,) = unit.nodes
        arrange = self.arguments(unit)
        return lambda inputs: [FUNCTIONS[node.op_type](*arrange(inputs))]

    def arguments(self, unit):
        """What puts a run's inputs and the constants in the order of the node's inputs."""
        (node,) = unit.nodes
        position = {value.name: i for i, value in enumerate(unit.inputs)}

        def arrange(inputs):
            arrays = [inputs[position[v.name]] if v.name in position else unit.constants[v.name] for v in node.inputs]
            for array in arrays:
                aligned = array.ctypes.data % 64 == 0
                self.seen.append([array.flags.c_contiguous, aligned, array.flags.writeable])
            return arrays

        return arrange

    def stats(self):
        return {"seen": self.seen}


class IntoPlaces(Small):
    """Writes to the places of its outputs. For `returns` rows of input it returns a new array instead."""

    writes_out = True

    def compile(self, unit):
        (node,) = unit.nodes
        arrange = self.arguments(unit)

        def run(inputs, out):
            x, *others = arrange(inputs)
            if out[0] is None or out[0].shape != x.shape or len(x) == self.options.get("returns"):
                return [INTO[node.op_type](x, *others, out=numpy.empty_like(x))]
            target = out[0]
            self.seen.append([target.flags.c_contiguous, target.ctypes.data % 64 == 0, target.flags.writeable])
            INTO[node.op_type](x, *others, out=target)
            return None if self.options.get("silent", True) else [target if len(x) % 2 else None]

        return run


class ByFirst(IntoPlaces):
    """Returns a new array where the first element of its input is negative, and writes to the place elsewhere."""

    def compile(self, unit):
        def run(inputs, out):
            (x,) = inputs
            if out[0] is None or x.flat[0] < 0:
                return [numpy.abs(x)]
            numpy.abs(x, out=out[0])
            return [None]

        return run


class WrongCount(IntoPlaces):
    """Returns one output too many."""

    def compile(self, unit):
        return lambda inputs, out: [None, None]


class IntoPlacesPerShape(IntoPlaces):
    """Compiled per signature, and told the shapes of its outputs."""

    per_signature = True

    def compile(self, unit):
        assert all(isinstance(dim, int) for value in (*unit.inputs, *unit.outputs) for dim in value.shape)
        return super().compile(unit)


class Limited(Small):
    """Claims all, and is given what its options say it can be given."""

    def setup(self, context):
        super().setup(dataclasses.replace(context, options={}))
        self.capabilities = Capabilities(**context.options)

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        return lambda inputs: []  # never run


class Malformed(Small):
    """Sets an attribute of the contract to what its option says."""

    def setup(self, context):
        for name, value in context.options.items():
            setattr(self, name, Capabilities(**value) if isinstance(value, dict) else value)


class Strided(Small):
    """Takes arrays of any strides from its own units."""

    strided = True


class StridedPerShape(Strided):
    per_signature = True


class Overwriting(Small):
    """Computes in the memory of its inputs."""

    writable = True

    def compile(self, unit):
        (node,) = unit.nodes
        arrange = self.arguments(unit)

        def run(inputs):
            if isinstance(inputs[0], list):  # Identity of a sequence
                inputs[0].reverse()
                inputs[0][0] += 1
                return [inputs[0]]
            x, *others = arrange(inputs)
            x[...] = FUNCTIONS[node.op_type](x, *others)
            return [x]

        return run


class OverwritingBound(Overwriting):
    """The same, bound to places."""

    def compile(self, unit):
        return OverwritingProgram(unit.nodes[0].op_type)


class OverwritingProgram(Program):
    def __init__(self, operator):
        self.operator = operator

    def bind(self, inputs, place):
        (x,) = inputs
        y = place(0, "float32", x.shape)

        def run(arguments):
            assert arguments[0] is x
            INTO[self.operator](x, out=x)
            y[...] = x
            x[...] = -1
            return [None]

        return run


class DeviceArray:
    """Memory of a device that the host cannot look into."""

    def __init__(self, array):
        self._hidden = array.copy()
        self.dtype = str(array.dtype)
        self.shape = array.shape


class Device(Small):
    """Computes on its device. `uploads` and `exports` are the values that came from, and went to, host memory."""

    def setup(self, context):
        super().setup(context)
        self.uploads, self.exports = 0, 0

    def compile(self, unit):
        (node,) = unit.nodes
        position = {value.name: i for i, value in enumerate(unit.inputs)}

        def run(inputs):
            items = [inputs[position[v.name]] if v.name in position else unit.constants[v.name] for v in node.inputs]
            self.uploads += sum(isinstance(item, numpy.ndarray) for item in items)
            arrays = [item if isinstance(item, numpy.ndarray) else item._hidden for item in items]
            made = DeviceArray(FUNCTIONS[node.op_type](*arrays))
            if self.options.get("how") == "no shape":
                del made.shape
            if self.options.get("how") == "dtype":
                made.dtype = "float64"
            return [made]

        return run

    def export(self, value, out):
        if self.options.get("how") == "raises":
            raise ArithmeticError("the device is gone")
        self.exports += 1
        assert out.flags.writeable and out.flags.c_contiguous and out.ctypes.data % 64 == 0
        out[...] = value._hidden

    def stats(self):
        return {"uploads": self.uploads, "exported": self.exports}


class DevicePerShape(Device):
    per_signature = True


class OneThread(Small):
    """Notes which thread calls each of its methods, and whether another call was in progress."""

    per_signature = True

    def __init__(self):
        self.threads = {threading.get_ident()}
        self.inside = False
        self.calls = set()

    def noted(self, name):
        assert not self.inside
        self.calls.add(name)
        self.threads.add(threading.get_ident())

    def setup(self, context):
        self.noted("setup")
        super().setup(context)

    def claim(self, graph):
        self.noted("claim")
        return super().claim(graph)

    def compile(self, unit):
        self.noted("compile")
        inner = super().compile(unit)

        def run(inputs):
            self.noted("run")
            self.inside = True
            result = inner(inputs)
            self.inside = False
            return result

        return run

    def unload(self, compiled):
        self.noted("unload")

    def stats(self):
        self.noted("stats")
        return {"threads": len(self.threads), "calls": sorted(self.calls)}


class Rewriting(Small):
    """Makes Abs of each Neg whose result only an Abs reads, and of an Add of a constant a Sub of another one."""

    merge = True

    def rewrite(self, unit):
        how = self.options.get("how")
        if how == "raises":
            raise ArithmeticError("no idea")
        if how == "no unit":
            return list(unit.nodes)
        if how == "outputs":
            return dataclasses.replace(unit, outputs=unit.outputs[:0])
        if how == "lost":
            return unit.replaced(unit.nodes[1:])
        if how == "twice":
            return unit.replaced([unit.nodes[0], *unit.nodes])
        if how == "unmade":
            return unit.replaced(unit.nodes[:-1])
        nodes, constants, skipped = [], {}, {}
        for node in unit.nodes:
            if node.op_type == "Neg":
                skipped[node.outputs[0].name] = node.inputs[0]
                continue
            inputs = tuple(skipped.get(value.name, value) for value in node.inputs)
            if node.op_type == "Add" and inputs[1].name in unit.constants:
                minus = dataclasses.replace(inputs[1], name=f"-{inputs[1].name}")
                constants[minus.name] = -unit.constants[inputs[1].name]
                node = dataclasses.replace(node, op_type="Sub", lowered=None)
                inputs = (inputs[0], minus)
            nodes.append(dataclasses.replace(node, inputs=inputs))
        return unit.replaced(nodes, constants)

    def compile(self, unit):
        self.compiled = [node.op_type for node in unit.nodes]

        def run(inputs):
            known = dict(zip((value.name for value in unit.inputs), inputs, strict=True))
            for node in unit.nodes:
                read = [known[v.name] if v.name in known else unit.constants[v.name] for v in node.inputs]
                known[node.outputs[0].name] = FUNCTIONS[node.op_type](*read)
            return [known[value.name] for value in unit.outputs]

        return run

    def stats(self):
        return {"compiled": self.compiled}


class RewritesModels(Rewriting):
    wants_model = True


class OnlySaves(Small):
    def save(self, compiled):
        return b""


class Keeping(Small):
    """Keeps what it compiled: the name of the operator. The option `log` names a file that tells of each call."""

    def setup(self, context):
        super().setup(context)
        self.version = context.options.get("version", "1")
        self.how = context.options.get("how")

    def note(self, what):
        with open(self.options["log"], "a") as file:
            file.write(f"{what}\n")

    def compile(self, unit):
        self.note(f"compile {unit.nodes[0].op_type}")
        made = self.made(unit, unit.nodes[0].op_type)
        made.unit = unit
        return made

    def made(self, unit, operator):
        arrange = self.arguments(unit)

        def run(inputs):
            return [FUNCTIONS[operator](*arrange(inputs))]

        return run

    def save(self, compiled):
        if self.how == "save raises":
            raise ArithmeticError("too big to save")
        if self.how == "save text":
            return "text"
        if self.how == "save nothing":
            return None
        return compiled.unit.nodes[0].op_type.encode()

    def load(self, unit, state):
        self.note(f"load {bytes(state).decode()}")
        if self.how == "load raises":
            raise ArithmeticError("cannot make sense of it")
        if os.path.exists(self.options["log"] + ".deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.made(unit, bytes(state).decode())


class KeepingPerShape(Keeping):
    per_signature = True


class Lingering(Small):
    """Its worker is stopped for a while before each word that it publishes, as a busy machine may do."""

    def setup(self, context):
        super().setup(context)
        publish = BoardWriter.publish

        def late(*arguments):
            time.sleep(0.03)
            publish(*arguments)

        BoardWriter.publish = late
