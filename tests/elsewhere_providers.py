"""Providers for workers in other environments: they import numpy and the contract only."""

import json
import os
import sys
from importlib.util import find_spec

import numpy

import outrider
from outrider.providers.contract import Claim, Provider

NAMES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PATH")


class Surrounded(Provider):
    """Negates; writes to the file in option `to` what is around it."""

    def setup(self, context):
        told = {
            "path": sys.path,
            "prefix": sys.prefix,
            "outrider": [outrider.__file__, outrider.__version__, outrider.providers.contract.__file__],
            "has": {name: find_spec(name) is not None for name in ("msgpack", "zmq", "onnx", "ml_dtypes")},
            "env": {name: os.environ.get(name) for name in NAMES},
            "numpy": numpy.__file__,
            "code": Provider.claim.__code__.co_filename,
        }
        with open(context.options["to"], "w") as file:
            json.dump(told, file)

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Neg"]

    def compile(self, unit):
        return lambda inputs: [numpy.negative(inputs[0])]


class SignBits(Provider):
    """Neg of floats that numpy has no type for: turns the highest bit of the raw integers around."""

    def claim(self, graph):
        self.dtypes = {node.inputs[0].dtype for node in graph.nodes}
        return [Claim([node]) for node in graph.nodes]

    def compile(self, unit):
        def run(inputs):
            (x,) = inputs
            assert x.dtype.kind == "u", x.dtype
            return [x ^ x.dtype.type(1 << 8 * x.itemsize - 1)]

        return run


class Fails(Provider):
    """Raises in its kernel, or ends its process, as the first number of the input says; writes a line each time."""

    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Neg"]

    def compile(self, unit):
        def in_the_kernel(inputs):
            number = int(inputs[0].flat[0])
            print(f"asked for {number}")
            if number == 1:
                raise ValueError("one is too many")
            if number > 1:
                os.kill(os.getpid(), number)
            return [numpy.negative(inputs[0])]

        return in_the_kernel
