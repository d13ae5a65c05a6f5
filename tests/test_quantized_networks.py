"""Networks that onnxruntime's quantization tools write, against onnxruntime unoptimised, in both implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as quantization
import pytest
from onnx import numpy_helper

from tests.oracle import run_ort
from tests.program_harness import Bound, compiled, model

Feeds = dict[str, np.ndarray]

TEXTS = {
    "cnn": """agraph (float[N, 3, H, W] x) => (float[N, 10] y) {
        a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w0, b0)  b = Relu(a)
        c = Conv<pads = [1, 1, 1, 1], group = 16>(b, w1, b1)  d = Clip(c, zero, six)
        e = Conv(d, w2, b2)  f = Add(e, b)  g = Relu(f)
        h = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(g)
        k = Conv<pads = [1, 1, 1, 1], group = 2>(h, w3, b3)  l = Sigmoid(k)  m = Mul(k, l)
        o = GlobalAveragePool(m)  p = Flatten(o)  y = Gemm<transB = 1>(p, w4, b4) }""",
    "mlp": """agraph (float[N, M, 24] x) => (float[N, M, 8] y) {
        a = MatMul(x, v0)  b = Add(a, c0)  c = Gelu(b)  d = MatMul(c, v1)  e = Add(d, c1)  f = Add(e, x)
        g = LayerNormalization(f, s, t)  y = MatMul(g, v2) }""",
    "lstm": """agraph (float[T, N, 12] x) => (float[T, D, N, 16] y) {
        y, h, c = LSTM<hidden_size = 16, direction = "bidirectional">(x, wl, rl, bl) }""",
    "attention": """agraph (float[N, M, 24] x) => (float[N, M, 24] y) {
        q = MatMul(x, q0)  k = MatMul(x, k0)  v = MatMul(x, q1)
        qr = Reshape(q, heads)  kr = Reshape(k, heads)  vr = Reshape(v, heads)
        qt = Transpose<perm = [0, 2, 1, 3]>(qr)  kt = Transpose<perm = [0, 2, 3, 1]>(kr)
        vt = Transpose<perm = [0, 2, 1, 3]>(vr)
        m = MatMul(qt, kt)  z = Mul(m, scale)  p = Softmax(z)  o = MatMul(p, vt)
        ot = Transpose<perm = [0, 2, 1, 3]>(o)  f = Reshape(ot, flat)  y = MatMul(f, q1) }""",
}
SHAPES = {
    "w0": (16, 3, 3, 3), "b0": (16,), "w1": (16, 1, 3, 3), "b1": (16,), "w2": (16, 16, 1, 1), "b2": (16,),
    "w3": (20, 8, 3, 3), "b3": (20,), "w4": (10, 20), "b4": (10,), "v0": (24, 40), "c0": (40,), "v1": (40, 24),
    "c1": (24,), "v2": (24, 8), "s": (24,), "t": (24,), "wl": (2, 64, 12), "rl": (2, 64, 16), "bl": (2, 128),
    "q0": (24, 24), "k0": (24, 24), "q1": (24, 24),
}  # fmt: skip
FIXED = {
    "zero": np.float32(0), "six": np.float32(6), "scale": np.float32(8**-0.5),
    "heads": np.array([0, 0, 3, 8]), "flat": np.array([0, 0, 24]),
}  # fmt: skip
INPUTS = {"cnn": (2, 3, 18, 14), "mlp": (2, 5, 24), "lstm": (6, 2, 12), "attention": (2, 7, 24)}


def feeds(name: str, seed: int) -> Feeds:
    """An input of the network, of the same shape for all seeds."""
    return {"x": np.random.default_rng(seed).standard_normal(INPUTS[name]).astype(np.float32)}


@cache
def network(name: str) -> onnx.ModelProto:
    """The float network with weights that are the same in each run."""
    rng = np.random.default_rng(len(name))
    proto = model(TEXTS[name], opset=21)
    used = {one for node in proto.graph.node for one in node.input}
    for weight, shape in SHAPES.items():
        if weight in used:
            values = rng.normal(0, 1 / np.sqrt(np.prod(shape[1:]) if len(shape) > 1 else 4), shape)
            proto.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), weight))
    for constant, value in FIXED.items():
        if constant in used:
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), constant))
    return proto


class Samples(quantization.CalibrationDataReader):
    """Eight inputs to calibrate with."""

    def __init__(self, name: str) -> None:
        self._rest: Iterator[Feeds] = iter([feeds(name, seed) for seed in range(8)])

    def get_next(self) -> Feeds | None:
        return next(self._rest, None)


def _static(form: str, **options: Any) -> Callable[[str, Path], onnx.ModelProto]:
    def quantize(name: str, folder: Path) -> onnx.ModelProto:
        source, target = folder / "float.onnx", folder / "quantized.onnx"
        onnx.save(network(name), source)
        quantization.quantize_static(
            source, target, Samples(name), quant_format=quantization.QuantFormat[form], **options
        )
        return onnx.load(target)

    return quantize


def _dynamic(**options: Any) -> Callable[[str, Path], onnx.ModelProto]:
    def quantize(name: str, folder: Path) -> onnx.ModelProto:
        source, target = folder / "float.onnx", folder / "quantized.onnx"
        onnx.save(network(name), source)
        quantization.quantize_dynamic(source, target, **options)
        return onnx.load(target)

    return quantize


INT8, UINT8 = quantization.QuantType.QInt8, quantization.QuantType.QUInt8
# Weights of 7 bits where inputs are unsigned: without VNNI, onnxruntime saturates sums of two products at 16 bits.
WAYS = {
    "dynamic": _dynamic(weight_type=INT8, reduce_range=True),
    "dynamic, unsigned": _dynamic(weight_type=UINT8, reduce_range=True),
    "dynamic, by channel": _dynamic(weight_type=INT8, per_channel=True, reduce_range=True),
    "qdq": _static("QDQ", activation_type=UINT8, weight_type=INT8, reduce_range=True),
    "qdq, by channel": _static("QDQ", activation_type=INT8, weight_type=INT8, per_channel=True),
    "operators": _static("QOperator", activation_type=UINT8, weight_type=UINT8, reduce_range=True),
    "operators, by channel": _static(
        "QOperator", activation_type=UINT8, weight_type=INT8, per_channel=True, reduce_range=True
    ),
}


FUSED = {
    ("cnn", "dynamic"): {"integer conv": 4, "integer conv+relu": 2, "integer conv+clip": 1, "integer conv+silu": 1},
    ("cnn", "qdq"): {"integer conv": 4, "integer gemm": 1, "integer result": 5},
    ("mlp", "dynamic"): {"integer matmul": 4, "integer matmul+gelu": 1},
    ("attention", "qdq"): {"integer matmul": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TEXTS)
def test_network(name: str, way: str, tmp_path: Path) -> None:
    proto = WAYS[way](name, tmp_path)
    given = feeds(name, 99)
    (expected,) = run_ort(proto.SerializeToString(), given).values()
    largest = float(np.abs(expected).max())
    for library in (False, True):
        for optimization in ("basic", "all"):
            with compiled(proto, optimization, compiled=library) as (provider, program, unit):
                assert provider.stats()["reference_nodes"] == 0
                (got,) = Bound(program, unit, given).run()
                off = np.abs(got - expected)
                # Where a value lies half way between two integers both are right: few do, and a step is not much.
                assert off.max() <= 0.02 * largest, f"compiled={library}, {optimization}"
                assert (off > 1e-5 * largest).mean() < 0.05, f"compiled={library}, {optimization}"
                fused = program.fused
        assert {pattern: fused[pattern] for pattern in FUSED.get((name, way), {})} == FUSED.get((name, way), {})
