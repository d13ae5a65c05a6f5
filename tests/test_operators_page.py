"""The page of operators equals the registry, and what the registry says of compiled kernels is so."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import plain_node, run_node
from onnx import helper

from outrider.providers.cpu.kernels.frame import KERNELS, Kernel
from tests.native_library import libraries

ROOT = Path(__file__).resolve().parent.parent
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.random(shape, np.float32)


def bytes_of(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return RNG.integers(0, 100, shape).astype(dtype)


ONE, ZERO = np.float32(0.01), np.uint8(3)
X = floats(2, 8, 6, 7)
A, Q = floats(6, 32), bytes_of(6, 32)
IMAGE, FILTERS = bytes_of(1, 8, 6, 6), bytes_of(8, 8, 3, 3)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

# Operator -> the inputs and attributes of nodes that, together, use all families that it declares. Without an entry
# here it is tried on one tensor.
EXAMPLES: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "AveragePool": [([X], {"kernel_shape": [2, 2]})],
    "BatchNormalization": [([X, *[floats(8) for _ in range(4)]], {})],
    "BiasGelu": [([X, floats(7)], {})],
    "Chain": [([X, X], {"program": [["Add", 0, 1]]})],
    "Conv": [([X, floats(16, 8, 3, 3)], {}), ([X, floats(8, 1, 3, 3)], {"group": 8})],
    "ConvInteger": [([IMAGE, FILTERS, ZERO], {})],
    "ConvTranspose": [([X, floats(8, 4, 2, 2)], {"strides": [2, 2]})],
    "DequantizeLinear": [([Q, ONE, ZERO], {})],
    "DynamicQuantizeLinear": [([A], {})],
    "DynamicQuantizeMatMul": [([A, bytes_of(32, 16), ONE, ZERO], {})],
    "DynamicQuantizeLSTM": [
        (
            [
                floats(5, 2, 8),
                bytes_of(1, 8, 64),
                bytes_of(1, 16, 64),
                *[None] * 5,
                *[np.full(1, ONE), np.full(1, ZERO)] * 2,
            ],
            {"hidden_size": 16},
        )
    ],
    "EmbedLayerNormalization": [
        ([np.zeros((1, 3), np.int32), None, floats(5, 8), floats(4, 8), None, floats(8), floats(8)], {})
    ],
    "FusedConv": [([X, floats(16, 8, 3, 3)], {}), ([X, floats(8, 1, 3, 3)], {"group": 8})],
    "FusedGemm": [([A, floats(32, 16), floats(16)], {})],
    "FusedMatMul": [([A, floats(32, 16)], {})],
    "Gemm": [([A, floats(32, 16), floats(16)], {})],
    "ImitateQuantization": [([A, ONE, ZERO], {})],
    "IntegerConv": [([IMAGE, FILTERS, *[None] * 4, ONE, ZERO, ONE, ZERO], {})],
    "IntegerMatMul": [([Q, bytes_of(32, 16), *[None] * 4, ONE, ZERO, ONE, ZERO], {})],
    "GroupNormalization": [([X, floats(8), floats(8)], {"num_groups": 2})],
    "InstanceNormalization": [([X, floats(8), floats(8)], {})],
    "LayerNormalization": [([X, floats(7)], {})],
    "LpPool": [([X], {"kernel_shape": [2, 2]})],
    "MatMul": [([A, floats(32, 16)], {})],
    "MatMulInteger": [([Q, bytes_of(32, 16), ZERO], {})],
    "MatMulIntegerToFloat": [([Q, bytes_of(32, 16), ONE, ONE, ZERO], {})],
    "MaxPool": [([X], {"kernel_shape": [2, 2]})],
    "PRelu": [([X, floats(8, 1, 1)], {})],
    "QAttention": [([bytes_of(1, 3, 8), bytes_of(8, 24), floats(24), ONE, ONE, None, ZERO, ZERO], {"num_heads": 2})],
    "QGemm": [([Q, ONE, ZERO, bytes_of(32, 16), ONE, ZERO, None, ONE, ZERO], {})],
    "QLinearConcat": [([ONE, ZERO, Q, ONE, ZERO, Q, ONE, ZERO], {"axis": 0})],
    "QLinearConv": [([IMAGE, ONE, ZERO, FILTERS, ONE, ZERO, ONE, ZERO], {})],
    "QLinearLeakyRelu": [([Q, ONE, ZERO, ONE, ZERO], {})],
    "QLinearMatMul": [([Q, ONE, ZERO, bytes_of(32, 16), ONE, ZERO, ONE, ZERO], {})],
    "QLinearSigmoid": [([Q, ONE, ZERO, ONE, ZERO], {})],
    "QLinearSoftmax": [([Q, ONE, ZERO, ONE, ZERO], {"opset": 13})],
    **{op: [([Q, ONE, ZERO, Q, ONE, ZERO, ONE, ZERO], {})] for op in ("QLinearAdd", "QLinearMul")},
    "QLinearWhere": [([Q > 50, Q, ONE, ZERO, Q, ONE, ZERO, ONE, ZERO], {})],
    "QuantizeLinear": [([A, ONE, ZERO], {})],
    "RMSNormalization": [([X, floats(7)], {})],
    "Resize": [([X, None, np.array([1, 1, 2, 2], np.float32)], {})],
    "SimplifiedLayerNormalization": [([X, floats(7)], {})],
    "SkipLayerNormalization": [([floats(2, 3, 8), floats(2, 3, 8), floats(8)], {})],
    "SkipSimplifiedLayerNormalization": [([floats(2, 3, 8), floats(2, 3, 8), floats(8)], {})],
    "Upsample": [([X, np.array([1, 1, 2, 2], np.float32)], {})],
    **{op: [([X, X], {})] for op in ("Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sub", "Sum", "SwiGLU")},
    **{op: [([X, X], {})] for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    "Cast": [([Q], {"to": 1})],
    "CastLike": [([Q, X], {})],
    "Clip": [([X, ONE, np.float32(0.5)], {})],
    "Where": [([X > 0.5, X, ONE], {})],
    **{
        op: [([floats(5, 2, 8), floats(1, gates * 16, 8), floats(1, gates * 16, 16)], {"hidden_size": 16})]
        for op, gates in GATES.items()
    },
}


def entries() -> Iterator[Kernel[Any]]:
    """The kernels that say that they call compiled ones."""
    for kernels in KERNELS.values():
        yield from (kernel for kernel in kernels if kernel.compiled)


@pytest.mark.parametrize("entry", [*entries()], ids=lambda entry: f"{entry.domain}::{entry.op_type}-{entry.since}")
def test_a_declared_family_is_used(entry: Kernel[Any]) -> None:
    found = libraries()
    if found is None:
        pytest.skip("compiled kernels are not tested: no C compiler")
    library = found[0]
    used: set[str] = set()
    for inputs, attributes in EXAMPLES.get(entry.op_type, [([X], {})]):
        names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
        proto = helper.make_node(entry.op_type, names, ["y"], domain=entry.domain)
        node = plain_node(proto, entry.since if entry.domain else max(entry.since, 21), inputs, ["float32"])
        node = dataclasses.replace(node, attributes=attributes)
        library.forget()
        run_node(node, [None if x is None else np.asarray(x) for x in inputs], None, library)
        used |= library.used
    assert entry.compiled <= used, f"{entry.op_type} declares {set(entry.compiled)} and uses {used}"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_operators", ROOT / "docs" / "operators" / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.PAGE.read_text() == make.page(), "run: python docs/operators/make.py --write"
