"""Providers as a user would write them, loaded by path or module name. The first is the design's example."""

import ctypes
import os
import signal
import subprocess
import time

import numpy

from outrider.providers.contract import Capabilities, Claim, ClaimBrokenError, Decline, Program, Provider


class MyProvider(Provider):
    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit):
        return lambda inputs: [numpy.maximum(inputs[0], 0)]


class ReluAndAbs(Provider):
    """Its twin for two operators."""

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type in ("Relu", "Abs")]

    def compile(self, unit):
        (node,) = unit.nodes
        if node.op_type == "Relu":
            return lambda inputs: [numpy.maximum(inputs[0], 0)]
        return lambda inputs: [numpy.abs(inputs[0])]


class Picky(Provider):
    """Declines with a reason; takes options through setup."""

    def setup(self, context):
        self.operator = context.options.get("operator", "Neg")
        self.device = context.device
        self.threads = context.threads

    def claim(self, graph):
        return [
            Claim([node]) if node.op_type == self.operator else Decline(node, f"only {self.operator} on {self.device}")
            for node in graph.nodes
        ]

    def compile(self, unit):
        return lambda inputs: [numpy.negative(inputs[0])]


class Pair(Provider):
    """Claims each Neg with the Exp that follows it, as one indivisible claim."""

    def claim(self, graph):
        readers = {value.name: node for node in graph.nodes for value in node.inputs}
        claims = []
        for node in graph.nodes:
            after = readers.get(node.outputs[0].name)
            if node.op_type == "Neg" and after is not None and after.op_type == "Exp":
                claims.append(Claim([node, after]))
        return claims

    def compile(self, unit):
        assert [node.op_type for node in unit.nodes] == ["Neg", "Exp"]
        return lambda inputs: [numpy.exp(-inputs[0])]


class PerShape(Provider):
    """Compiled once per signature; says so in what it computes: x + number of elements it was compiled for."""

    per_signature = True

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Identity"]

    def compile(self, unit):
        count = numpy.prod(unit.inputs[0].shape, dtype=int)
        return lambda inputs: [inputs[0] + inputs[0].dtype.type(count)]


class Wrong(Provider):
    """Breaks the contract in the way its option says."""

    def setup(self, context):
        self.how = context.options["how"]
        if self.how == "setup":
            raise RuntimeError("no device of mine is here")

    def claim(self, graph):
        if self.how == "claim raises":
            raise ZeroDivisionError("claim went wrong")
        if self.how == "claim returns":
            return 7
        if self.how == "claim of a node":
            return [Claim(graph.nodes[0])]
        if self.how == "foreign node":
            return [Claim(["Relu_0"])]
        nodes = [node for node in graph.nodes if node.op_type == "Relu"]
        if self.how == "overlap":
            return [Claim(nodes[:1]), Claim(nodes[:1])]
        if self.how == "empty claim":
            return [Claim([])]
        return [Claim([node]) for node in nodes]

    def compile(self, unit):
        if self.how == "compile":
            raise ValueError("this Relu is too big for me")
        if self.how == "compile, of a node":
            raise ClaimBrokenError("this Relu is too big for me", nodes=unit.nodes[0])  # not a list of names
        if self.how == "not callable":
            return 7
        return self._run

    def _run(self, inputs):
        x = inputs[0]
        if self.how == "count":
            return [x, x]
        if self.how == "dtype":
            return [x.astype("float64")]
        if self.how == "rank":
            return [x[None]]
        if self.how == "nothing":
            return None
        if self.how == "an array":
            return x
        if self.how == "kind":
            return ["text"]
        if self.how == "none":
            return [None]
        if self.how == "raises":
            raise ArithmeticError("the kernel went wrong")
        if self.how == "exits":
            raise SystemExit(4)
        if self.how == "writes input":
            x += 1
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "prints and dies":
            print("the cache is poisoned")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "segfaults":
            ctypes.string_at(0)
        if self.how == "leaves":
            os._exit(9)
        return [numpy.maximum(x, 0)]


class HoldsTheLock(Provider):
    """Native code that keeps the interpreter lock for as long as the option `seconds` says."""

    def setup(self, context):
        self.seconds = context.options["seconds"]
        self.marker = context.options["marker"]

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        return self._run

    def _run(self, inputs):
        with open(self.marker, "w") as file:
            file.write(str(os.getpid()))
        ctypes.PyDLL(None).sleep(self.seconds)  # PyDLL does not release the lock
        return [inputs[0]]


class Slow(Provider):
    """Sleeps in each run."""

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit):
        def run(inputs):
            time.sleep(0.3)
            return [numpy.maximum(inputs[0], 0)]

        return run


class Whole(Provider):
    """Claims all of a graph, or nothing of one that holds an operator it lacks, as many compilers do."""

    def claim(self, graph):
        lacking = {node.op_type for node in graph.nodes} - {"Neg"}
        if lacking:
            return [Decline(node, f"a graph with {', '.join(sorted(lacking))}") for node in graph.nodes]
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        return lambda inputs: [numpy.negative(inputs[0])]


class Returns(MyProvider):
    """Its result is its input."""

    def compile(self, unit):
        return lambda inputs: [inputs[0]]


class Narrow(MyProvider):
    """Takes float16 only."""

    capabilities = Capabilities(dtypes={"float16"})


class BadMerge(MyProvider):
    merge = "yes"


class BadAccepts(MyProvider):
    capabilities = Capabilities(dtypes={"float99"})


class LeavesAChild(MyProvider):
    """Starts a process and forgets it; the option `marker` names a file for its id."""

    def setup(self, context):
        child = subprocess.Popen(["sleep", "1000"])
        with open(context.options["marker"], "w") as file:
            file.write(str(child.pid))


class NotAProvider:
    pass


class Incomplete(Provider):
    """Forgot to define anything."""


class Grouped(Provider):
    """Claims what node names say: `c0.5|c2.1|n7` is in claim 5 of provider 0 and claim 1 of provider 2.

    A claim is indivisible, is compiled as one unit, and is run by a small interpreter of its own.
    """

    OPERATORS = {
        "Relu": lambda x: numpy.maximum(x, 0),
        "Neg": numpy.negative,
        "Abs": numpy.abs,
        "Add": numpy.add,
        "Sub": numpy.subtract,
        "Max": numpy.maximum,
    }

    def setup(self, context):
        self.me = f"c{context.options['me']}."

    def claim(self, graph):
        groups = {}
        for node in graph.nodes:
            for part in node.name.split("|"):
                if part.startswith(self.me):
                    groups.setdefault(part, []).append(node)
        return [Claim(nodes) for nodes in groups.values()]

    def compile(self, unit):
        def run(inputs):
            known = {value.name: item for value, item in zip(unit.inputs, inputs, strict=True)}
            known.update(unit.constants)
            for node in unit.nodes:
                read = [known[value.name] for value in node.inputs]
                known[node.outputs[0].name] = self.OPERATORS[node.op_type](*read)
            return [known[value.name] for value in unit.outputs]

        return run


class Touchy(Provider):
    """Runs in place-bound form, and fails on what its input holds: raises for a first element of -13, dies for -666."""

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit):
        return TouchyProgram()


class TouchyProgram(Program):
    def bind(self, inputs, place):
        x = inputs[0]
        y = place(0, "float32", x.shape)

        def run(_):
            if x.flat[0] == -13:
                raise ArithmeticError("unlucky")
            if x.flat[0] == -666:
                os.kill(os.getpid(), signal.SIGKILL)
            numpy.maximum(x, 0, y)
            return [None]

        return run


class Moody(Provider):
    """Relu, whose fault depends on the first element of its input; does not compile for 13 rows.

    It does not start either while the file that its option `closed` names is there.
    """

    per_signature = True
    FAULTS = {-101: "raises", -102: "exits", -103: "count", -104: "dtype", -105: "memory", -106: "dies"}

    def setup(self, context):
        if os.path.exists(context.options["closed"]):
            raise RuntimeError("closed today")

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]

    def compile(self, unit):
        if unit.inputs[0].shape[0] == 13:
            raise ValueError("no 13 rows")
        return self._run

    def _run(self, inputs):
        x = inputs[0]
        assert not x.flags.writeable and x.flags.c_contiguous and x.ctypes.data % 64 == 0
        how = self.FAULTS.get(x.flat[0])
        if how == "raises":
            raise ArithmeticError("unlucky")
        if how == "exits":
            raise SystemExit(4)
        if how == "memory":
            raise MemoryError("not that much")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        y = numpy.maximum(x, 0)
        return [y, y] if how == "count" else [y.astype("float64")] if how == "dtype" else [y]


class Witness(Provider):
    """Looks at all that the contract promises, for a model `x + w, squeezed` of opset 11 without names of nodes."""

    def setup(self, context):
        assert (dict(context.options), context.device, context.threads) == ({"depth": [1, {"a": None}]}, 2, 1)
        context.logger.info("a witness")

    def claim(self, graph):
        add, squeeze = graph.nodes
        assert [(n.op_type, n.domain, n.opset, n.name) for n in graph.nodes] == [
            ("Add", "", 11, "#0"), ("Squeeze", "", 11, "#1"),
        ]  # fmt: skip
        assert (dict(add.attributes), dict(squeeze.attributes)) == ({}, {"axes": [1]})
        values = [(v.name, v.dtype, v.shape, v.constant) for v in (*add.inputs, *add.outputs, *squeeze.outputs)]
        assert values == [
            ("x", "float32", ("N", 1, 3), False), ("w", "float32", (3,), True),
            ("sum", "float32", ("N", 1, 3), False), ("y", "float32", ("N", 3), False),
        ], values  # fmt: skip
        assert not graph.constants["w"].flags.writeable
        return [Claim(graph.nodes)]

    def compile(self, unit):
        assert [node.name for node in unit.nodes] == ["#0", "#1"]
        assert [value.name for value in unit.inputs] == ["x"] and [value.name for value in unit.outputs] == ["y"]
        add, axes, squeeze = unit.lowered()  # from opset 13 on the axes of Squeeze are an input
        assert (axes.op_type, list(axes.attributes["value"])) == ("Constant", [1])
        assert not squeeze.attributes and squeeze.inputs[1].name == axes.outputs[0].name
        w = unit.constants["w"]
        assert not w.flags.writeable and w.flags.c_contiguous and w.ctypes.data % 64 == 0

        def run(inputs):
            (x,) = inputs
            assert not x.flags.writeable and x.flags.c_contiguous and x.ctypes.data % 64 == 0
            return [numpy.asfortranarray((x + w)[:, 0])]

        return run


class Trespasser(MyProvider):
    """Writes past numpy into the memory of its input when the first element is -99."""

    def compile(self, unit):
        def run(inputs):
            if inputs[0].flat[0] == -99:
                ctypes.memset(inputs[0].ctypes.data, 0, 4)
            return [numpy.maximum(inputs[0], 0)]

        return run


class Clipper(Provider):
    """Clip by one bound. An omitted input keeps its position, with dtype 'undefined'; a trailing one is not there."""

    def claim(self, graph):
        answers = []
        for node in graph.nodes:
            kinds = " ".join(value.dtype for value in node.inputs)
            answers.append(Claim([node]) if node.op_type == "Clip" else Decline(node, f"{node.op_type}: {kinds}"))
        return answers

    def compile(self, unit):
        (node,) = unit.nodes
        names = [value.name for value in node.inputs]
        kinds = [value.dtype for value in node.inputs]
        fed = [value.name for value in unit.inputs]

        def run(inputs):
            known = {**unit.constants, **dict(zip(fed, inputs, strict=True))}
            if kinds == ["float32", "undefined", "float32"]:
                return [numpy.minimum(known[names[0]], known[names[2]])]
            assert kinds == ["float32", "float32"], kinds
            return [numpy.maximum(known[names[0]], known[names[1]])]

        return run


class Gated(Provider):
    """Identity nodes; each run takes one byte from the FIFO in option `gate` first, and notes what it saw in `log`."""

    def setup(self, context):
        self.gate = os.open(context.options["gate"], os.O_RDWR)
        self.log = context.options.get("log")

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Identity"]

    def compile(self, unit):
        return self._run

    def _run(self, inputs):
        os.read(self.gate, 1)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{float(inputs[0].flat[0])}\n")
        return [inputs[0].copy()]


class InPlace(Provider):
    """Unary operators and a sum, each a unit bound to its places; sequences that hold what they were given."""

    OPERATORS = {"Neg": numpy.negative, "Abs": numpy.abs, "Relu": lambda x, out: numpy.maximum(x, 0, out)}

    def claim(self, graph):
        known = {*self.OPERATORS, "ReduceSum", "SequenceConstruct", "SequenceInsert", "SequenceAt"}
        return [Claim([node]) for node in graph.nodes if node.op_type in known]

    def compile(self, unit):
        (node,) = unit.nodes
        if node.op_type == "SequenceConstruct":
            return lambda inputs: [list(inputs)]
        if node.op_type == "SequenceInsert":
            return lambda inputs: [[*inputs[0], inputs[1]]]
        if node.op_type == "SequenceAt":
            return lambda inputs: [inputs[0][0]]
        return InPlaceProgram(self.OPERATORS.get(node.op_type))


class InPlaceProgram(Program):
    def __init__(self, operator):
        self.operator = operator

    def bind(self, inputs, place):
        x = inputs[0]
        y = place(0, "float32", (1,) if self.operator is None else x.shape)

        def run(_):
            if self.operator is None:
                y[0] = x.sum()
            else:
                self.operator(x, out=y)
            return [None]

        return run


class Costly(Provider):
    """Claims Relu, or `all`, and tells what that costs."""

    def setup(self, context):
        self.options = context.options

    def claim(self, graph):
        mine = [node for node in graph.nodes if self.options.get("all") or node.op_type == "Relu"]
        return [Claim([node], cost=self.options["cost"]) for node in mine]

    def compile(self, unit):
        (node,) = unit.nodes
        function = {"Relu": lambda x: numpy.maximum(x, 0), "Neg": numpy.negative}[node.op_type]
        return lambda inputs: [function(inputs[0])]


class Recorded(Provider):
    """Serves elementwise operators, and appends the name of each node that it compiles to a file."""

    FUNCTIONS = {
        "Relu": lambda x: numpy.maximum(x, 0), "Neg": numpy.negative, "Abs": numpy.abs, "Exp": numpy.exp,
        "Tanh": numpy.tanh,
    }  # fmt: skip

    def setup(self, context):
        self.record = context.options["record"]

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type in self.FUNCTIONS]

    def compile(self, unit):
        (node,) = unit.nodes
        with open(self.record, "a") as file:
            file.write(f"{node.name}\n")
        function = self.FUNCTIONS[node.op_type]
        return lambda inputs: [function(inputs[0])]
