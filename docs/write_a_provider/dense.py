"""MatMul, Add and Relu as one step in C: the complete example of docs/write-a-provider.md."""

import collections
import ctypes
import subprocess
import tempfile

import numpy as np

from outrider.providers.contract import Capabilities, Claim, Decline, Provider, ProviderUnavailableError

KERNEL = """void dense(const float *x, const float *w, const float *b, float *y, long rows, long depth, long columns) {
    for (long i = 0; i < rows; i++, x += depth, y += columns) {
        for (long j = 0; j < columns; j++) y[j] = b[j];
        for (long k = 0; k < depth; k++)
            for (long j = 0; j < columns; j++) y[j] += x[k] * w[k * columns + j];
        for (long j = 0; j < columns; j++) y[j] = y[j] < 0 ? 0 : y[j];
    }
}"""


class DenseProvider(Provider):
    capabilities = Capabilities(dtypes={"float32"})  # a claim with another dtype is declined for it
    writes_out = True

    def setup(self, context):
        level = context.options.get("level", 2)
        if level not in (0, 1, 2, 3) or set(context.options) - {"level"}:
            raise ProviderUnavailableError(f"the one option is level, 0 to 3; got {dict(context.options)}")
        with tempfile.TemporaryDirectory() as folder:
            command = ["cc", f"-O{level}", "-shared", "-fPIC", "-x", "c", "-", "-o", f"{folder}/dense.so"]
            subprocess.run(command, input=KERNEL, text=True, check=True)
            self.dense = ctypes.CDLL(f"{folder}/dense.so").dense
        self.dense.argtypes, self.dense.restype = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3, None

    def claim(self, graph):
        readers = collections.defaultdict(list, {value.name: [None] for value in graph.outputs})  # None: the caller
        for node in graph.nodes:
            for value in (*node.inputs, *node.captures):
                readers[value.name].append(node)
        return [self.offer(node, readers, graph.constants) for node in graph.nodes if node.label == "ai.onnx::MatMul"]

    def offer(self, matmul, readers, constants):
        chain = [matmul]
        for op_type in ("Add", "Relu"):
            after = readers[chain[-1].outputs[0].name]
            if len(after) != 1 or after[0] is None or after[0].op_type != op_type:
                return Decline(matmul, "its result does not go through one Add to one Relu and nowhere else")
            chain += after
        w, *biases = (constants.get(value.name) for value in (matmul.inputs[1], *chain[1].inputs))
        if w is None or w.ndim != 2 or not any(b is not None and b.shape == w.shape[1:] for b in biases):
            return Decline(matmul, "its weights must be a constant matrix, and what is added a constant row")
        return Claim(chain)

    def compile(self, unit):
        matmul, add, _ = unit.nodes
        w = unit.constants[matmul.inputs[1].name]
        (b,) = (unit.constants[value.name] for value in add.inputs if value.name in unit.constants)

        def run(inputs, out):
            (x,) = inputs
            if x.shape[-1:] != w.shape[:1]:  # before C reads what is not there
                raise ValueError(f"{x.shape} does not end in {len(w)}")
            shape = (*x.shape[:-1], w.shape[1])
            y = out[0] if out[0] is not None and out[0].shape == shape else np.empty(shape, np.float32)
            self.dense(*(one.ctypes.data for one in (x, w, b, y)), x[..., 0].size, *w.shape)
            return [y]

        return run
