"""What somebody might write from docs/write-a-provider.md alone, in a hurry: wrong in a way of its own per operator."""

import ctypes
import time

import numpy as np

from outrider.providers.contract import Claim, Decline, Provider


class Stranger(Provider):
    OPERATORS = ("Abs", "Add", "Exp", "LayerNormalization", "Mul", "Neg", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh")

    def claim(self, graph):
        return [
            Claim([node]) if node.op_type in self.OPERATORS else Decline(node, "no such kernel") for node in graph.nodes
        ]

    def compile(self, unit):
        (node,) = unit.nodes
        kernel = getattr(self, node.op_type.lower())
        first = {value.name: i for i, value in enumerate(unit.inputs)}
        self.last = {}

        def run(inputs):
            known = [inputs[first[v.name]] if v.name in first else unit.constants[v.name] for v in node.inputs]
            return [kernel(*known)]

        return run

    def sqrt(self, x):  # right
        return np.sqrt(x)

    def sigmoid(self, x):  # wrong dtype: Python's floats are float64
        return 1.0 / (1.0 + np.exp(-x.astype("float64")))

    def add(self, a, b):  # a wrong result where something is broadcast: only the first row is
        if a.shape == b.shape:
            return a + b
        shape = np.broadcast_shapes(a.shape, b.shape)
        return np.resize(a, shape) + np.resize(b, shape)

    def relu(self, x):  # writes to its input
        x[x < 0] = 0
        return x

    def exp(self, x):  # the same past NumPy
        ctypes.memset(x.ctypes.data, 0, x.nbytes)
        return np.exp(x)

    def abs(self, x):  # crashes on a dtype that it has no kernel for
        if x.dtype != np.float32:
            ctypes.string_at(0)
        return np.abs(x)

    def layernormalization(self, x, scale, bias=0):  # ignores its attributes
        far = x - x.mean(-1, keepdims=True)
        return far / np.sqrt((far * far).mean(-1, keepdims=True) + np.float32(1e-5)) * scale + bias

    def tanh(self, x):  # hangs on an empty tensor
        while x.size == 0:
            time.sleep(1)
        return np.tanh(x)

    def neg(self, x):  # claims too much
        if x.dtype.kind == "i":
            raise NotImplementedError("only floats")
        return -x

    def sub(self, a, b):  # keeps state: what it once computed for these shapes is the answer for ever
        return self.last.setdefault(("sub", a.shape, b.shape), a - b)

    def mul(self, a, b):  # forgets a dimension where that is 1
        return np.squeeze(a * b) if a.shape[:1] == (1,) else a * b
