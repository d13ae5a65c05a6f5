"""The QLinear operators and integer products of com.microsoft against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import _dtype, check, ort_results, plain_node, run_node
from onnx import helper

from tests.native_library import libraries

RNG = np.random.default_rng(5)
KINDS = ["uint8", "int8"]
MS = "com.microsoft"


def values(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def half(dtype: str, *shape: int) -> np.ndarray:
    """Half the range: without VNNI, onnxruntime's uint8 * int8 saturates sums of two products at 16 bits."""
    return np.asarray(values(dtype, *shape) // np.array(2, dtype))


def scale(*shape: int, least: float = 0.01) -> np.ndarray:
    return np.asarray(RNG.uniform(least, 2 * least, shape), np.float32)


def near(op_type: str, inputs: list[Any], **attributes: Any) -> None:
    """At most one in fifty results, at a tie, is one off what onnxruntime says; both modes are equal."""
    inputs = [None if x is None else np.asarray(x) for x in inputs]
    proto = helper.make_node(op_type, [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)], ["y"],
                             domain=MS, **attributes)  # fmt: skip
    (expected,) = ort_results(proto, inputs, 21)
    node = plain_node(proto, 21, inputs, [_dtype(expected)])
    (plain,), (bound,) = run_node(node, inputs), run_node(node, inputs, ())
    np.testing.assert_array_equal(plain, bound)
    every = [plain]
    for library in libraries() or ():
        for known in (None, (), tuple(range(1, len(node.inputs)))):
            every += run_node(node, inputs, known, library)
    for got in every[2:]:
        np.testing.assert_array_equal(got, every[1])  # threads and memory orders make no difference
    for got in every[:2]:
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        off = np.abs(got.astype(int) - expected.astype(int))
        assert off.max(initial=0) <= 1
        assert (off > 0).mean() <= 0.02


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("shapes", [((3, 4, 5), (3, 4, 5)), ((3, 4, 5), (5,)), ((4, 1), (3, 1, 6)), ((), (7,))])
def test_of_two_tensors(op: str, dtype: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, other = values(dtype, *shapes[0]), values(dtype, *shapes[1])
    least = 0.02 if op == "QLinearAdd" else 0.5
    near(op, [x, scale(), values(dtype), other, scale(), values(dtype), scale(least=least), values(dtype)])


@pytest.mark.parametrize("dtype", KINDS)
def test_of_one_tensor(dtype: str) -> None:
    x = values(dtype, 3, 50)
    for op, attributes in (("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.3})):
        inputs = [x, scale(least=0.05), values(dtype), scale(least=0.01), values(dtype)]
        near(op, inputs, **attributes)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(dtype: str, axis: int) -> None:
    parts = [[values(dtype, 2, 3, 4), scale(least=0.02), values(dtype)] for _ in range(3)]
    near("QLinearConcat", [scale(least=0.03), values(dtype), *sum(parts, [])], axis=axis)


@pytest.mark.parametrize("dtype", KINDS)
def test_where(dtype: str) -> None:
    condition = RNG.random((2, 1, 4)) < 0.5
    x, other = values(dtype, 3, 4), values(dtype, 2, 3, 1)
    near(
        "QLinearWhere",
        [condition, x, scale(), values(dtype), other, scale(), values(dtype), scale(least=0.015), values(dtype)],
    )


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("last", [0, 1])
def test_pooling(dtype: str, last: int) -> None:
    x = values(dtype, 2, 9, 7, 5)
    quantization = [scale(), values(dtype), scale(), values(dtype)]
    near("QLinearGlobalAveragePool", [x, *quantization], channels_last=last)
    for attributes in (
        {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1]},
        {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1},
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
    ):
        near("QLinearAveragePool", [x, *quantization], channels_last=last, **attributes)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("axis", "opset"), [(-1, 13), (1, 13), (1, 12), (-2, 11)])
def test_softmax(dtype: str, axis: int, opset: int) -> None:
    x = values(dtype, 3, 4, 6)
    zero = np.asarray(0 if dtype == "uint8" else -128, dtype)
    for step in (1 / 256, 1 / 255):
        near("QLinearSoftmax", [x, scale(least=0.02), values(dtype), np.float32(step), zero], axis=axis, opset=opset)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_qgemm(dtype: str, left: int, right: int) -> None:
    a, w = values(dtype, *((9, 4) if left else (4, 9))), half(dtype, *((5, 9) if right else (9, 5)))
    for columns in ((), (5,)):
        zero = half(dtype, *columns)
        bias = RNG.integers(-5000, 5000, 5).astype(np.int32)
        inputs = [a, scale(), values(dtype), w, scale(*columns), zero, bias]
        near("QGemm", [*inputs, scale(least=0.5), values(dtype)], alpha=0.7, transA=left, transB=right)
        near("QGemm", [*inputs[:6], None, scale(least=0.5), values(dtype)], transA=left, transB=right)
        check("QGemm", inputs, domain=MS, transA=left, transB=right)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12)])
def test_float_products(dtype: str, shape: tuple[int, ...]) -> None:
    w, bias = half(dtype, 12, 5), RNG.standard_normal(5).astype(np.float32)
    x = RNG.standard_normal(shape).astype(np.float32)
    for columns in ((), (5,)):
        s, zero = scale(*columns), half(dtype, *columns)
        for tail in ([s], [s, zero], [s, None, bias], [s, zero, bias]):
            check("DynamicQuantizeMatMul", [x, w, *tail], domain=MS, atol=1e-5)
        a = values("uint8", *shape)
        for tail in ([], [values("uint8")], [values("uint8"), zero], [values("uint8"), zero, bias]):
            check("MatMulIntegerToFloat", [a, w, scale(), s, *tail], domain=MS, atol=1e-5)


def test_quantization_of_com_microsoft() -> None:
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    for dtype in ("uint8", "int8", "uint16", "int16"):
        check("QuantizeLinear", [x, np.float32(0.01), np.asarray(7, dtype)], domain=MS)
        check("QuantizeLinear", [x, scale(4), values(dtype, 4)], domain=MS, axis=1)
        q = values(dtype, 3, 4)
        check("DequantizeLinear", [q, np.float32(0.01), np.asarray(7, dtype)], domain=MS)
        check("DequantizeLinear", [q, scale(3), values(dtype, 3)], domain=MS, axis=0)


@pytest.mark.parametrize(("bits", "zeros"), [(4, "none"), (4, "packed"), (4, "float"), (8, "none"), (8, "packed")])
def test_matmul_nbits(bits: int, zeros: str) -> None:
    depth, features, size = 40, 6, 16
    count = -(-depth // size)
    w, s = values("uint8", features, count, size * bits // 8), scale(features, count)
    x = RNG.standard_normal((2, 3, depth)).astype(np.float32)
    attributes = {"K": depth, "N": features, "bits": bits, "block_size": size}
    inputs: list[Any] = [x, w, s]
    if zeros == "packed":
        inputs.append(values("uint8", features, -(-count * bits // 8)))
    elif zeros == "float":
        inputs.append(np.asarray(RNG.uniform(0, 2**bits, (features, count)), np.float32))
    check("MatMulNBits", inputs, domain=MS, atol=2e-4, **attributes)
    if zeros != "float":
        bias = RNG.standard_normal(features).astype(np.float32)
        full = [*inputs, *[None] * (5 - len(inputs)), bias]
        check("MatMulNBits", full, domain=MS, atol=2e-4, **attributes)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("by_column", [False, True])
def test_dynamic_quantize_lstm(direction: str, dtype: str, by_column: bool) -> None:
    steps, batch, size, hidden = 5, 2, 6, 4
    d = 2 if direction == "bidirectional" else 1
    columns = (4 * hidden,) if by_column else ()

    def weights(depth: int) -> tuple[np.ndarray, list[np.ndarray]]:
        zero = np.zeros((d, *columns), dtype) if dtype == "int8" else np.full((d, *columns), 64, dtype)
        return half(dtype, d, depth, 4 * hidden), [scale(d, *columns, least=0.005), zero]

    w, w_scale = weights(size)
    r, r_scale = weights(hidden)
    x = RNG.standard_normal((steps, batch, size)).astype(np.float32)
    bias = RNG.standard_normal((d, 8 * hidden)).astype(np.float32)
    states = [RNG.standard_normal((d, batch, hidden)).astype(np.float32) for _ in range(2)]
    attributes = {"direction": direction, "hidden_size": hidden}
    tolerance = {"rtol": 1e-5, "atol": 1e-5, "outputs": 3, "domain": MS}
    check("DynamicQuantizeLSTM", [x, w, r, bias, None, *states, None, *w_scale, *r_scale], **tolerance, **attributes)
    check("DynamicQuantizeLSTM", [x, w, r, *[None] * 5, *w_scale, *r_scale], **tolerance, **attributes)
    lengths = np.array([3, 5], np.int32)
    peephole = RNG.standard_normal((d, 3 * hidden)).astype(np.float32)
    inputs = [x, w, r, bias, lengths, *states, peephole, *w_scale, *r_scale]
    check("DynamicQuantizeLSTM", inputs, **tolerance, clip=2.0, **attributes)
