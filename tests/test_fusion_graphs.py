"""Fusion of whole graphs at level `all`: random ones against onnxruntime, and what it makes of each trained model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tests.models import MODELS, model_path
from tests.program_harness import compiled
from tests.test_fusion import check_fused

UNARY = (
    "Relu",
    "Sigmoid",
    "Tanh",
    "Abs",
    "Neg",
    "HardSwish",
    "HardSigmoid",
    "LeakyRelu",
    "Softplus",
    "Identity",
)
KINDS = (
    "conv", "wide", "depthwise", "norm", "unary", "unary", "constant", "constant", "constant", "binary", "rows", "clip",
)  # fmt: skip
SHAPES = ((), (1,), (4, 1, 1), (1, 4, 1, 1), (5,), (2, 4, 4, 5), (1, 1, 4, 1))


class Random:
    """A random graph of images [2, 4, 4, 5]: convolutions, norms, arithmetic with constants and each other, readers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arrays = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.values = ["x"]

    def constant(self, *shape: int, low: float = -1, high: float = 1) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = self.arrays.uniform(low, high, shape).astype(np.float32)
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        self.values.append(name)

    def layer(self) -> None:
        """A convolution, an activation and an affine operator or two, as trained networks have them."""
        x = self.values[-1]
        if self.rng.random() < 0.5:
            self.add("Conv", x, self.constant(4, 1, 3, 3), group=4, pads=[1, 1, 1, 1])
        else:
            self.add("Conv", x, self.constant(4, 4, 1, 3), self.constant(4), pads=[0, 1, 0, 1])
        self.add(self.rng.choice(UNARY), self.values[-1])
        for op in self.rng.sample(("Add", "Mul", "Sub"), self.rng.randint(0, 2)):
            self.add(op, self.values[-1], self.constant(*self.rng.choice(((), (4, 1, 1))), low=0.5))

    def grow(self) -> None:
        x = self.values[-1] if self.rng.random() < 0.8 else self.rng.choice(self.values)
        kind = self.rng.choice(
            ("conv", "depthwise", "norm", "unary", "unary", "constant", "constant", "binary", "rows")
        )
        if kind == "conv":
            self.add("Conv", x, self.constant(4, 4, 1, 1), *[self.constant(4)] * self.rng.randint(0, 1))
        elif kind == "wide":
            self.add("Conv", x, self.constant(4, 2, 3, 3), group=2, pads=[1, 1, 1, 1])
        elif kind == "depthwise":
            self.add("Conv", x, self.constant(4, 1, 3, 3), group=4, pads=[1, 1, 1, 1])
        elif kind == "norm":
            numbers = [self.constant(4) for _ in range(3)]
            self.add("BatchNormalization", x, *numbers, self.constant(4, low=0.5, high=2))
        elif kind == "unary":
            self.add(self.rng.choice(UNARY), x)
        elif kind == "clip":
            self.add("Clip", x, self.constant(low=-1, high=0), self.constant(low=0))
        elif kind == "constant":
            op = self.rng.choice(("Add", "Sub", "Mul", "Div"))
            constant = self.constant(*self.rng.choice(SHAPES), low=0.5)
            self.add(op, *((x, constant) if op == "Div" or self.rng.random() < 0.6 else (constant, x)))
        elif kind == "binary":
            self.add(self.rng.choice(("Add", "Sub", "Mul", "Max")), x, self.rng.choice(self.values))
        else:
            self.add("MatMul", x, self.constant(5, 5))
            if self.rng.random() < 0.7:
                self.add("Add", self.values[-1], self.constant(*self.rng.choice(((5,), (1, 5), (1,), ()))))

    def model(self) -> onnx.ModelProto:
        for _ in range(self.rng.choice((0, 1, 4))):
            self.layer()
        for _ in range(self.rng.randint(2, 12)):
            self.grow()
        outputs = [name for name in self.values[1:-1] if self.rng.random() < 0.08] + [self.values[-1]]
        dims = ["N", 4, "H", 5]
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", 1, dims)],
            [helper.make_tensor_value_info(name, 1, None) for name in outputs],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_random_graphs_agree_with_onnxruntime(seed: int) -> None:
    made = Random(seed)
    check_fused(made.model(), {"x": made.arrays.normal(0, 1, (2, 4, 4, 5)).astype(np.float32)})


# Model -> (ops that are left of its main graph, ops that each pattern made).
FUSED: dict[str, tuple[int, dict[str, int]]] = {
    "silero": (2, {"chain": 2, "conv+relu": 8, "conv+sigmoid": 2, "identity": 28}),
    "silero-16k": (34, {"chain": 1, "conv+relu": 4, "conv+sigmoid": 1, "identity": 11}),
    "silero-sequence": (19, {"chain": 1, "conv+relu": 4, "conv+sigmoid": 1}),
    "silero-half": (31, {"chain": 1, "conv+relu": 4, "conv+sigmoid": 1, "identity": 11}),
    "silero-ifless": (4, {"chain": 6, "conv+relu": 8, "conv+sigmoid": 2, "gemm": 2}),
    "silero-openvino": (28, {"chain": 1, "conv+relu": 4, "conv+sigmoid": 1, "identity": 6}),
    "ppocr-det": (
        91,
        {
            "chain": 8,
            "conv": 5,
            "conv+hardsigmoid": 10,
            "conv+hardswish": 24,
            "conv+relu": 11,
            "convtranspose+relu": 1,
            "convtranspose+sigmoid": 1,
            "forward": 20,
            "hard-swish": 24,
        },
    ),
    "ppocr-rec": (
        112,
        {
            "LayerNormalization": 5,
            "conv": 1,
            "conv+hardsigmoid": 2,
            "conv+hardswish": 28,
            "conv+relu": 2,
            "conv+silu": 5,
            "forward": 25,
            "hard-swish": 28,
            "matmul": 7,
            "matmul+operands": 3,
            "matmul+silu": 2,
            "swish": 7,
        },
    ),
    "ppocr-cls": (
        81,
        {
            "conv": 11,
            "conv+hardsigmoid": 9,
            "conv+hardswish": 18,
            "conv+relu": 15,
            "hard-swish": 18,
            "identity": 1,
            "matmul": 1,
        },
    ),
    "basic-pitch": (
        201,
        {"chain": 3, "concats": 7, "conv": 9, "conv+relu": 3, "conv+sigmoid": 3, "identity": 1, "reshapes": 18},
    ),
    "magika": (54, {"chain": 7, "conv+gelutanh": 1, "gelu": 2, "identity": 1, "lookup": 3, "matmul": 1}),
    "minilm": (
        146,
        {
            "chain": 1,
            "gelu": 6,
            "matmul": 30,
            "matmul+gelu": 6,
            "matmul+operands": 6,
            "softmax+guard": 6,
            "transposed keys": 6,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_of_a_trained_model(name: str) -> None:
    """A pattern that is lost, and one that is new, shows here; what the models compute is compared elsewhere."""
    with compiled(onnx.load(model_path(name)), "all", compiled=False) as (_, program, _unit):
        assert (len(program.code.top.ops), dict(sorted(program.fused.items()))) == FUSED[name]
