"""Providers that are right but for one thing, each for a contract case that must find it."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import numpy

from outrider.providers.contract import Capabilities, Claim, Decline, Program, Provider, RunCancelledError


class Sound(Provider):
    """Relu, Add, Neg and MatMul, with nothing wrong. Each kind of fault changes one method of it."""

    OPERATORS = {
        "Relu": lambda x: numpy.maximum(x, x.dtype.type(0)), "Add": numpy.add, "Neg": numpy.negative,
        "MatMul": numpy.matmul,
    }  # fmt: skip

    def setup(self, context):
        self.context = context
        self.kept = {}
        unknown = set(context.options)
        if unknown:
            raise ValueError(f"no option is called {', '.join(sorted(unknown))}")

    def claim(self, graph):
        return [
            Claim([node]) if node.op_type in self.OPERATORS else Decline(node, f"no kernel for {node.op_type}")
            for node in graph.nodes
        ]

    def compile(self, unit):
        constants = {name: self.constant(unit, name) for name in unit.constants}
        state = {}

        def run(inputs):
            known = {**constants, **dict(zip([value.name for value in unit.inputs], inputs, strict=True))}
            for node in unit.nodes:
                operands = [known[value.name] for value in node.inputs]
                known[node.outputs[0].name] = numpy.asarray(self.compute(unit, state, node.op_type, operands))
            return [known[value.name] for value in unit.outputs]

        return run

    def constant(self, unit, name):
        return unit.constants[name]

    def compute(self, unit, state, op, operands):
        return self.OPERATORS[op](*operands)


class Repeats(Sound):
    """Remembers its last result, and passes on what it did to it."""

    def compute(self, unit, state, op, operands):
        x = operands[0]
        if x.size and "x" in state and numpy.array_equal(state["x"], x):
            state["y"] = state["y"] + 1
        else:
            state["x"], state["y"] = x.copy(), super().compute(unit, state, op, operands)
        return state["y"]


class Tiles(Sound):
    """Works in tiles of 16 rows, and forgets those that are left over beyond 32."""

    def compute(self, unit, state, op, operands):
        y = numpy.array(super().compute(unit, state, op, operands))
        if y.ndim and y.shape[0] > 32 and y.shape[0] % 16:
            y[y.shape[0] // 16 * 16 :] = 0
        return y


class Peeks(Sound):
    """Looks at the largest element, which need not be there."""

    def compute(self, unit, state, op, operands):
        operands[0].max()
        return super().compute(unit, state, op, operands)


class Vectors(Sound):
    """Computes eight elements at a time, and forgets those that are left over."""

    def compute(self, unit, state, op, operands):
        y = super().compute(unit, state, op, operands)
        if numpy.ndim(y):
            y.reshape(-1)[y.size // 8 * 8 :] = 0
        return y


class Counts(Sound):
    """Counts rows, which a scalar does not have."""

    def compute(self, unit, state, op, operands):
        assert len(operands[0]) >= 0
        return super().compute(unit, state, op, operands)


class Finite(Sound):
    """Has no infinities."""

    def compute(self, unit, state, op, operands):
        return super().compute(unit, state, op, [numpy.nan_to_num(one) for one in operands])


class BoundRelu(Program):
    """A bound program that may mix up its bindings: places of large outputs (`large`), or inputs, by shape only."""

    def __init__(self, large):
        self.large = large
        self.places = {}
        self.inputs = {}

    def bind(self, inputs, place):
        (x,) = inputs
        y = place(0, "float32", x.shape)
        if self.large and y.nbytes > 1 << 16:
            self.places.setdefault(x.shape, y)
            return lambda values: [numpy.maximum(x, 0, self.places[x.shape])] and [None]
        if not self.large:
            self.inputs[x.shape] = x
            return lambda values: [numpy.maximum(self.inputs[x.shape], 0, y)] and [None]
        return lambda values: [numpy.maximum(x, 0, y)] and [None]


class Relu(Sound):
    OPERATORS = {"Relu": Sound.OPERATORS["Relu"]}


class MixesPlaces(Relu):
    def compile(self, unit):
        return BoundRelu(large=True)


class MixesSlots(Relu):
    def compile(self, unit):
        return BoundRelu(large=False)


class Abandons(Sound):
    """Takes long for 7 rows, and a unit is never the same when it was cancelled then."""

    def compute(self, unit, state, op, operands):
        y = super().compute(unit, state, op, operands)
        if operands[0].shape[:1] == (7,):
            until = time.monotonic() + 60
            while time.monotonic() < until:
                if self.context.cancelled():
                    state["broken"] = True
                    raise RunCancelledError("cancelled")
        return y + 1 if state else y


class Optimizes(Sound):
    """Wrong at 'basic'."""

    def compute(self, unit, state, op, operands):
        y = super().compute(unit, state, op, operands)
        return y + 1 if unit.optimization == "basic" else y


class Freezes(Sound):
    """Takes the first vector that it is fed for a constant."""

    def compute(self, unit, state, op, operands):
        frozen = [
            state.setdefault(i, one.copy()) if one.ndim == 1 and not unit.constants else one
            for i, one in enumerate(operands)
        ]
        return super().compute(unit, state, op, frozen)


class OneForAll(Sound):
    """Keeps the constants of the last unit only."""

    def constant(self, unit, name):
        self.kept[unit.nodes[0].op_type] = unit.constants[name]
        return unit.constants[name]

    def compute(self, unit, state, op, operands):
        if unit.constants and op in self.kept:
            operands = [operands[0], self.kept[op]]
        return super().compute(unit, state, op, operands)


class ByName(Sound):
    """Keeps constants by name, as if there were one model."""

    def constant(self, unit, name):
        value = unit.constants[name]
        return self.kept.setdefault((unit.nodes[0].op_type, name, value.shape), value.copy())


class Tramples(Relu):
    """Writes zeros over its input when it can, in memory that its own process has written."""

    def compute(self, unit, state, op, operands):
        (x,) = operands
        y = super().compute(unit, state, op, operands)
        if _writable(x.ctypes.data):
            ctypes.memset(x.ctypes.data, 0, x.nbytes)
        return y


def _writable(address):
    with open("/proc/self/maps") as file:
        for line in file:
            span, access = line.split()[:2]
            low, high = (int(one, 16) for one in span.split("-"))
            if low <= address < high:
                return "w" in access
    return False


class Truncates(Sound):
    """Adds as many rows as both operands have."""

    def compute(self, unit, state, op, operands):
        if len(operands) == 2 and all(one.ndim == 2 and len(one) > 1 for one in operands) and op == "Add":
            rows = min(map(len, operands))
            operands = [one[:rows] for one in operands]
        return super().compute(unit, state, op, operands)


class Claimed(Sound):
    """Claims what it has not seen before."""

    def claim(self, graph):
        new = [answer for answer in super().claim(graph) if _names(answer) not in self.kept]
        self.kept.update((_names(answer), True) for answer in new)
        return new


def _names(answer):
    return tuple(node.name for node in answer.nodes) if isinstance(answer, Claim) else answer.node.name


class Overlaps(Sound):
    """Claims the first two nodes as a pair, too."""

    def claim(self, graph):
        answers = super().claim(graph)
        nodes = [answer.nodes[0] for answer in answers if isinstance(answer, Claim)]
        return [*answers, Claim(nodes[:2])] if len(nodes) > 1 else answers


class Cached(Sound):
    """Compiles whole chains, and takes one that begins alike for the same."""

    merge = True

    def compile(self, unit):
        key = unit.nodes[0].name, len(unit.inputs), unit.optimization
        if key[0].startswith("c"):
            return self.kept.setdefault(key, super().compile(unit))
        return super().compile(unit)


class Hoards(Sound):
    """Keeps every constant for ever."""

    def constant(self, unit, name):
        self.kept[len(self.kept)] = numpy.array(unit.constants[name])
        return unit.constants[name]


class Opens(Sound):
    """Opens a file for each unit, and never closes it."""

    def compile(self, unit):
        os.open(os.devnull, os.O_RDONLY)
        return super().compile(unit)


class Locks(Sound):
    """Is not let in again."""

    def setup(self, context):
        super().setup(context)
        if context.incarnation > 1:
            raise RuntimeError("the device is still held")


class Easygoing(Sound):
    """Takes any option."""

    def setup(self, context):
        self.context, self.kept = context, {}


class Stays(Sound):
    """Has to be ended."""

    def close(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Five(Sound):
    """Each operator wrong in a way of its own."""

    OPERATORS = {
        **Sound.OPERATORS, "Abs": numpy.abs, "Exp": numpy.exp, "Tanh": numpy.tanh, "Erf": None, "Floor": numpy.floor,
        "Sqrt": numpy.sqrt,
    }  # fmt: skip

    def compile(self, unit):
        if unit.nodes[0].op_type == "Floor":
            raise ValueError("no kernel for Floor after all")
        return super().compile(unit)

    def compute(self, unit, state, op, operands):
        if op == "Abs":
            ctypes.string_at(0)
        if op == "Exp":
            time.sleep(1000)
        if op == "Erf":
            print("about to fail")
            raise ArithmeticError("Erf went wrong")
        if op == "Neg":
            operands[0][...] *= -1
            return operands[0]
        y = super().compute(unit, state, op, operands)
        if op == "Tanh":
            return y.astype("float64")
        return y + 1 if op == "Sqrt" else y


class Loads(Sound):
    """Adds constants, and saves what it compiled without them."""

    OPERATORS = {"Add": numpy.add}

    def compile(self, unit):
        run = super().compile(unit)
        self.kept[run] = unit.nodes[0].op_type
        return run

    def save(self, compiled):
        return self.kept[compiled].encode()

    def load(self, unit, state):
        operator = self.OPERATORS[bytes(state).decode()]
        return lambda inputs: [operator(*inputs, *inputs)]


class Rounds(Sound):
    """Computes float64 in float32."""

    def compute(self, unit, state, op, operands):
        narrow = [one.astype("float32") if one.dtype == "float64" else one for one in operands]
        return numpy.asarray(super().compute(unit, state, op, narrow)).astype(operands[0].dtype)


class Fixed(Sound):
    """Declines free dimensions."""

    capabilities = Capabilities(shapes="static")


class Buffered(Sound):
    """Hands out one buffer for all that it computes, as values that units pass on as they are."""

    strided = True

    def compute(self, unit, state, op, operands):
        y = numpy.array(super().compute(unit, state, op, operands))
        kept = self.kept.setdefault((y.shape, y.dtype), y)
        kept[...] = y
        return kept
