"""Weights reach onnxruntime by reference, and its optimizers change some of them: at every level `ort` gives the bits
of onnxruntime in this process at that level."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions
from outrider.scheduler.options import OPTIMIZATIONS
from tests.builders import model, node, tensor
from tests.onnx_parts import agree, direct

LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
SHAPE = [2, 16, 16, 16]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet([ProviderSpec("ort", threads=1)]) as made:
        yield made


@pytest.mark.parametrize("level", OPTIMIZATIONS)
def test_a_weight_that_is_transposed_under_its_own_name(fleet: Fleet, level: str) -> None:
    """The Transposes are moved through the Mul and cancel each other."""
    turn = {"perm": [0, 2, 1]}
    nodes = [node("Transpose", "x", "t", **turn), node("Mul", "t w", "m"), node("Transpose", "m", "y", **turn)]
    w = np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    made = model(nodes, [tensor("x", [1, 64, 64])], [tensor("y", None)], {"w": w}, opset=17)
    x = np.ones((1, 64, 64), np.float32)
    options = SessionOptions(fleet=fleet, optimization=level)
    with InferenceSession(made, providers=["ort"], options=options) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], w.transpose(0, 2, 1))


class Draft:
    """A chain of operators of rank 4, most of them with a large weight, many of them Transposes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.items = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.shape = list(SHAPE)
        self.last = "x"
        for _ in range(self.rng.randint(4, 14)):
            self.rng.choice([transpose, transpose, transpose, *STEPS])(self)

    def weight(self, *shape: int, scale: float = 0.3) -> str:
        return self.constant((self.items.standard_normal(shape) * scale).astype(np.float32))

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.constants)}"
        self.constants[name] = array
        return name

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        """Append a node; the name of its output. '' among the inputs is the value so far."""
        output = f"v{len(self.nodes)}"
        names = [name or self.last for name in inputs]
        self.nodes.append(helper.make_node(op, names, [output], **attributes))
        return output

    def model(self) -> onnx.ModelProto:
        return model(self.nodes, [tensor("x", SHAPE)], [tensor(self.last, None)], self.constants, opset=17)


def transpose(d: Draft) -> None:
    perm = d.rng.sample(range(4), 4)
    d.last = d.add("Transpose", "", perm=perm)
    d.shape = [d.shape[axis] for axis in perm]


def same_shape(d: Draft) -> None:
    inputs = ["", d.weight(*d.shape)]
    d.rng.shuffle(inputs)
    d.last = d.add(d.rng.choice(["Add", "Mul", "Sub", "Max"]), *inputs)


def broadcast(d: Draft) -> None:
    shape = [size if d.rng.random() < 0.6 else 1 for size in d.shape][d.rng.randint(0, 2) :]
    d.last = d.add(d.rng.choice(["Add", "Mul"]), "", d.weight(*shape))


def where(d: Draft) -> None:
    d.last = d.add("Where", d.constant(d.items.random(d.shape) > 0.5), "", d.weight(*d.shape))


def concat(d: Draft) -> None:
    axis = d.rng.randint(0, 3)
    if d.shape[axis] <= 32:
        d.last = d.add("Concat", "", d.weight(*d.shape), axis=axis)
        d.shape[axis] *= 2


def matmul(d: Draft) -> None:
    columns = d.rng.choice([8, 16, 32])
    ones = d.rng.choice([[], [1, 1]])
    d.last = d.add("MatMul", "", d.weight(*ones, d.shape[-1], columns, scale=0.2))
    d.shape[-1] = columns


def gemm(d: Draft) -> None:
    turned = d.rng.randint(0, 1)
    rows = d.add("Reshape", "", d.constant(np.array([-1, d.shape[-1]])))
    w = d.weight(*([16, d.shape[-1]] if turned else [d.shape[-1], 16]), scale=0.2)
    product = d.add("Gemm", rows, w, d.weight(16), transB=turned)
    d.shape[-1] = 16
    d.last = d.add("Reshape", product, d.constant(np.array(d.shape)))


def conv(d: Draft) -> None:
    channels = d.rng.choice([8, 16])
    bias = d.rng.choice([[], [d.weight(channels)]])
    d.last = d.add("Conv", "", d.weight(channels, d.shape[1], 3, 3, scale=0.1), *bias, pads=[1, 1, 1, 1])
    d.shape[1] = channels


def quantized_conv(d: Draft) -> None:
    scale, zero = d.constant(np.array(0.05, np.float32)), d.constant(np.array(0, np.int8))
    w = d.constant(d.items.integers(-100, 100, (8, d.shape[1], 3, 3)).astype(np.int8))
    x = d.add("DequantizeLinear", d.add("QuantizeLinear", "", scale, zero), scale, zero)
    y = d.add("Conv", x, d.add("DequantizeLinear", w, scale, zero), pads=[1, 1, 1, 1])
    d.last = d.add("DequantizeLinear", d.add("QuantizeLinear", y, scale, zero), scale, zero)
    d.shape[1] = 8


def gather(d: Draft) -> None:
    where = d.constant(d.items.integers(0, 40, d.shape[:2]))
    d.last = d.add("Add", "", d.add("Gather", d.weight(40, *d.shape[2:]), where))


def lstm(d: Draft) -> None:
    sequence = d.add("Reshape", "", d.constant(np.array([d.shape[0] * d.shape[1], *d.shape[2:]])))
    w, r = d.weight(1, 32, d.shape[3], scale=0.2), d.weight(1, 32, 8, scale=0.2)
    d.shape[3] = 8
    d.last = d.add("Reshape", d.add("LSTM", sequence, w, r, hidden_size=8), d.constant(np.array(d.shape)))


def unsqueezed(d: Draft) -> None:
    axis = d.rng.randint(0, 4)
    axes = d.constant(np.array([axis]))
    product = d.add("Mul", d.add("Unsqueeze", "", axes), d.weight(*d.shape[:axis], 1, *d.shape[axis:]))
    d.last = d.add("Squeeze", product, axes)


def normalized(d: Draft) -> None:
    factors = [d.constant(d.items.random(d.shape[1]).astype(np.float32) + 0.5) for _ in range(4)]
    d.last = d.add("BatchNormalization", "", *factors)


def plain(d: Draft) -> None:
    kind = d.rng.choice(["Relu", "Sigmoid", "Softmax", "ReduceMean", "Pad"])
    if kind == "Pad":
        d.last = d.add("Pad", "", d.constant(np.array([0, 0, 1, 0, 0, 0, 0, 1])))
        d.shape[2:] = [size + 1 for size in d.shape[2:]]
    elif kind == "ReduceMean":
        d.last = d.add("Sub", "", d.add("ReduceMean", "", axes=[d.rng.randint(0, 3)]))
    else:
        d.last = d.add(kind, "", **({"axis": d.rng.randint(0, 3)} if kind == "Softmax" else {}))


STEPS: list[Callable[[Draft], None]] = [
    same_shape, same_shape, broadcast, broadcast, where, concat, matmul, gemm, conv, quantized_conv, gather, lstm,
    unsqueezed, normalized, plain, plain,
]  # fmt: skip


@pytest.mark.parametrize("level", ["basic", "all"])
@pytest.mark.parametrize("seed", range(12))
def test_graphs_that_optimizers_turn_around(fleet: Fleet, seed: int, level: str) -> None:
    made = Draft(seed).model()
    feed = {"x": np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)}
    options = SessionOptions(fleet=fleet, optimization=level)
    with InferenceSession(made, providers=["ort"], options=options) as session:
        agree(session.run(None, feed), direct(made, feed, LEVELS[level]))
