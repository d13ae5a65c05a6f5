"""Networks of known kinds with random weights, built without a training framework; onnxruntime's tools quantise them.

Weights are scaled so that activations stay near one from layer to layer; so a wrong layer shows in the result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

from tests.builders import model, node, tensor
from tests.oracle import run_ort

Feeds = dict[str, np.ndarray]


class Builder:
    """Nodes and weights of a network being written down; every method returns the name of its result."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def op(self, operator: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """A node with a new name, and `result` or a new name for its result."""
        name = f"{operator}_{len(self.nodes)}"
        result = result or f"{name}_out"
        self.nodes.append(node(operator, " ".join(inputs), result, name, **attributes))
        return result

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """An initializer; whole numbers want dtype int64."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.array(value, dtype)
        return name

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        """Random normal numbers times `scale`."""
        return self.constant(scale * self.rng.standard_normal(shape))

    def near(self, value: float, *shape: int) -> str:
        """Random numbers within 20 % or 0.2 of `value`."""
        return self.constant(value + 0.2 * self.rng.uniform(-1, 1, shape))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """x [..., inputs] @ W + b."""
        product = self.op("MatMul", x, self.weight(inputs, outputs, scale=inputs**-0.5))
        return self.op("Add", product, self.near(0, outputs))

    def normalised(self, x: str, size: int) -> str:
        """LayerNormalization over the last axis."""
        return self.op("LayerNormalization", x, self.near(1, size), self.near(0, size), epsilon=1e-5)

    def model(self, inputs: Sequence[Any], outputs: Sequence[Any], opset: int = 17) -> onnx.ModelProto:
        """The network; checked."""
        made = model(self.nodes, inputs, outputs, self.constants, opset, ir_version=8)
        onnx.checker.check_model(made)
        return made


def resnet18(seed: int = 0, width: int = 16, classes: int = 10) -> onnx.ModelProto:
    """ResNet-18 (He et al., 2015): x [N, 3, H, W] -> y [N, classes]. `width` is 64 in the paper."""
    b = Builder(seed)

    def unit(x: str, inputs: int, outputs: int, kernel: int, stride: int, relu: bool = True) -> str:
        """Convolution and batch normalisation, perhaps ReLU."""
        w = b.weight(outputs, inputs, kernel, kernel, scale=(2 / (inputs * kernel * kernel)) ** 0.5)
        pads = [kernel // 2] * 4
        x = b.op("Conv", x, w, kernel_shape=[kernel, kernel], strides=[stride, stride], pads=pads)
        x = b.op("BatchNormalization", x, *(b.near(value, outputs) for value in (1, 0, 0, 1)))
        return b.op("Relu", x) if relu else x

    x = unit("x", 3, width, 7, 2)
    x = b.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage in range(4):
        for block in range(2):
            outputs, stride = width << stage, 2 if stage and not block else 1
            straight = unit(x, channels, outputs, 1, stride, relu=False) if channels != outputs else x
            deep = unit(unit(x, channels, outputs, 3, stride), outputs, outputs, 3, 1, relu=False)
            x = b.op("Relu", b.op("Add", deep, straight))
            channels = outputs
    x = b.op("Flatten", b.op("GlobalAveragePool", x))
    b.op("Gemm", x, b.weight(classes, channels, scale=channels**-0.5), b.near(0, classes), result="y", transB=1)
    return b.model([tensor("x", ["N", 3, "H", "W"])], [tensor("y", ["N", classes])])


def _gelu(b: Builder, x: str) -> str:
    """x * (1 + erf(x / sqrt(2))) / 2, as exporters write it."""
    inner = b.op("Add", b.op("Erf", b.op("Div", x, b.constant(2**0.5))), b.constant(1))
    return b.op("Mul", b.op("Mul", x, inner), b.constant(0.5))


def _gelu_tanh(b: Builder, x: str) -> str:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2."""
    cube = b.op("Mul", b.op("Pow", x, b.constant(3)), b.constant(0.044715))
    inner = b.op("Mul", b.op("Add", x, cube), b.constant((2 / np.pi) ** 0.5))
    return b.op("Mul", b.op("Mul", x, b.constant(0.5)), b.op("Add", b.op("Tanh", inner), b.constant(1)))


def _heads(b: Builder, x: str, heads: int, size: int) -> str:
    """[N, T, heads * size] -> [N, heads, T, size]."""
    return b.op("Transpose", b.op("Reshape", x, b.constant([0, 0, heads, size], np.int64)), perm=[0, 2, 1, 3])


def _joined(b: Builder, x: str, dim: int) -> str:
    """[N, heads, T, size] -> [N, T, dim]."""
    return b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.constant([0, 0, dim], np.int64))


def vit(
    seed: int = 0, dim: int = 48, depth: int = 2, heads: int = 4, patch: int = 8, side: int = 32, classes: int = 10
) -> onnx.ModelProto:
    """A vision transformer (Dosovitskiy et al., 2020): x [N, 3, side, side] -> y [N, classes]."""
    b = Builder(seed)
    count = (side // patch) ** 2
    w = b.weight(dim, 3, patch, patch, scale=(3 * patch * patch) ** -0.5)
    x = b.op("Conv", "x", w, b.near(0, dim), kernel_shape=[patch, patch], strides=[patch, patch])
    x = b.op("Transpose", b.op("Reshape", x, b.constant([0, dim, count], np.int64)), perm=[0, 2, 1])
    batch = b.op("Slice", b.op("Shape", "x"), b.constant([0], np.int64), b.constant([1], np.int64))
    shape = b.op("Concat", batch, b.constant([1, dim], np.int64), axis=0)
    x = b.op("Concat", b.op("Expand", b.weight(1, 1, dim), shape), x, axis=1)
    x = b.op("Add", x, b.weight(1, count + 1, dim, scale=0.2))
    for _ in range(depth):
        normal = b.normalised(x, dim)
        q, k, v = (_heads(b, b.linear(normal, dim, dim), heads, dim // heads) for _ in range(3))
        scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = b.op("Div", scores, b.constant((dim // heads) ** 0.5))
        mixed = _joined(b, b.op("MatMul", b.op("Softmax", scores, axis=-1), v), dim)
        x = b.op("Add", x, b.linear(mixed, dim, dim))
        wide = _gelu(b, b.linear(b.normalised(x, dim), dim, 4 * dim))
        x = b.op("Add", x, b.linear(wide, 4 * dim, dim))
    x = b.op("Gather", b.normalised(x, dim), b.constant(0, np.int64), axis=1)
    b.op("Gemm", x, b.weight(classes, dim, scale=dim**-0.5), b.near(0, classes), result="y", transB=1)
    return b.model([tensor("x", ["N", 3, side, side])], [tensor("y", ["N", classes])])


def gpt(
    seed: int = 0, dim: int = 32, depth: int = 2, heads: int = 4, words: int = 50, room: int = 32
) -> onnx.ModelProto:
    """A decoder with a cache of keys and values (GPT-2, Radford et al., 2019).

    ids [N, T] and for each layer past_key_i, past_value_i [N, heads, P, dim / heads] -> logits [N, T, words] and
    present_key_i, present_value_i [N, heads, P + T, dim / heads]. P may be 0; P + T is at most `room`.
    """
    b = Builder(seed)
    size = dim // heads
    one, zero = b.constant(1, np.int64), b.constant(0, np.int64)
    step = b.op("Gather", b.op("Shape", "ids"), one)
    past = b.op("Gather", b.op("Shape", "past_key_0"), b.constant(2, np.int64))
    total = b.op("Add", past, step)
    rows = b.op("Range", past, total, one)  # positions of the new words
    columns = b.op("Range", zero, total, one)
    later = b.op("Greater", columns, b.op("Unsqueeze", rows, b.constant([1], np.int64)))
    mask = b.op("Where", later, b.constant(-1e9), b.constant(0))
    embedding, places = b.weight(words, dim), b.weight(room, dim, scale=0.3)
    x = b.op("Add", b.op("Gather", embedding, "ids"), b.op("Gather", places, rows))
    for layer in range(depth):
        mixed = b.linear(b.normalised(x, dim), dim, 3 * dim)
        parts = [f"{name}_{layer}" for name in "qkv"]
        b.nodes.append(node("Split", f"{mixed} {b.constant([dim] * 3, np.int64)}", " ".join(parts), axis=2))
        q, k, v = (_heads(b, part, heads, size) for part in parts)
        keys = b.op("Concat", f"past_key_{layer}", k, result=f"present_key_{layer}", axis=2)
        values = b.op("Concat", f"past_value_{layer}", v, result=f"present_value_{layer}", axis=2)
        scores = b.op("MatMul", q, b.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = b.op("Add", b.op("Mul", scores, b.constant(size**-0.5)), mask)
        mixed = _joined(b, b.op("MatMul", b.op("Softmax", scores, axis=-1), values), dim)
        x = b.op("Add", x, b.linear(mixed, dim, dim))
        wide = _gelu_tanh(b, b.linear(b.normalised(x, dim), dim, 4 * dim))
        x = b.op("Add", x, b.linear(wide, 4 * dim, dim))
    b.op("MatMul", b.normalised(x, dim), b.op("Transpose", embedding, perm=[1, 0]), result="logits")
    names = [f"{kind}_{layer}" for layer in range(depth) for kind in ("key", "value")]
    inputs = [tensor("ids", ["N", "T"], TensorProto.INT64)]
    inputs += [tensor(f"past_{name}", ["N", heads, "P", size]) for name in names]
    outputs = [tensor("logits", ["N", "T", words])]
    outputs += [tensor(f"present_{name}", ["N", heads, "P+T", size]) for name in names]
    return b.model(inputs, outputs)


def no_past(made: onnx.ModelProto, rows: int) -> Feeds:
    """Empty caches for a model of `gpt`."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in made.graph.input
        if value.name.startswith("past")
    }
    return {name: np.zeros((rows, shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}


QUANTISED = ("dynamic", "qdq", "qoperator")


def quantised(made: onnx.ModelProto, kind: str, calibration: Iterable[Feeds]) -> bytes:
    """The model as onnxruntime's quantiser rewrites it.

    'dynamic': int8 weights, and activations quantised as they come. 'qdq': pairs of QuantizeLinear and
    DequantizeLinear; 'qoperator': QLinearConv and its like; both with the ranges that `calibration` brings about.
    """
    from onnxruntime import quantization as tools

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest: Iterator[Feeds] = iter(calibration)

        def get_next(self) -> Feeds | None:
            return next(self.rest, None)

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "quantised.onnx"
        onnx.save(made, source)
        if kind == "dynamic":
            tools.quantize_dynamic(source, target, weight_type=tools.QuantType.QUInt8)
        else:
            form = {"qdq": tools.QuantFormat.QDQ, "qoperator": tools.QuantFormat.QOperator}[kind]
            # A mask of -1e9 would take the whole range of 256 numbers.
            masked = {one.output[0] for one in made.graph.node if one.op_type == "Where"}
            masked |= {one.output[0] for one in made.graph.node if masked & set(one.input)}
            kept = [one.name for one in made.graph.node if masked & {*one.input, *one.output}]
            tools.quantize_static(source, target, Reader(), form, per_channel=kind == "qdq", nodes_to_exclude=kept)
        return target.read_bytes()


def optimised(made: bytes | Path) -> bytes:
    """The model as onnxruntime's optimiser rewrites it for any CPU, with fused operators of com.microsoft."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(target)
        source = made if isinstance(made, bytes) else str(made)
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        return target.read_bytes()


_QUANTISING = ("DynamicQuantizeLinear", "QuantizeLinear")


def quantised_anew(made: onnx.ModelProto, inputs: Feeds) -> tuple[bytes, Feeds]:
    """A quantised model whose quantising nodes read what onnxruntime gave them, and its inputs.

    A value at the edge between two of 256 steps may go either way; here that does not reach what comes after the next
    such node, so results agree closely wherever they are right. What the nodes would have read is among the outputs.
    """
    known = {*inputs, *(item.name for item in made.graph.initializer)}
    read = sorted({one.input[0] for one in made.graph.node if one.op_type in _QUANTISING} - known)
    outputs = {output.name for output in made.graph.output}
    shown = onnx.ModelProto()
    shown.CopyFrom(made)
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in read if name not in outputs)
    values = run_ort(shown.SerializeToString(), inputs, read)
    result = onnx.ModelProto()
    result.CopyFrom(made)
    for one in result.graph.node:
        if one.op_type in _QUANTISING and one.input[0] in values:
            one.input[0] += "/given"
    for name, value in values.items():
        if name not in outputs:
            result.graph.output.append(tensor(name, value.shape))
        result.graph.input.append(tensor(f"{name}/given", value.shape))
    return result.SerializeToString(), {**inputs, **{f"{name}/given": value for name, value in values.items()}}


def behind(made: onnx.ModelProto, operator: str) -> set[str]:
    """The values that depend on nodes of this operator, of a model of `quantised_anew`: up to the next such node."""
    found: set[str] = set()
    for one in made.graph.node:
        if one.op_type == operator or found & set(one.input):
            found.update(one.output)
    return found
