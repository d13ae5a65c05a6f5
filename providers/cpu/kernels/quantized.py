"""Operators that multiply 8-bit integers: MatMulInteger, QLinearMatMul, ConvInteger, QLinearConv, and of com.microsoft
MatMulIntegerToFloat, DynamicQuantizeMatMul, QGemm, QLinearConv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outrider.providers.cpu.kernels.convolution import Convolution, parse_convolution
from outrider.providers.cpu.kernels.epilogue import Epilogue, parse_epilogue
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.integer_products import convolution, product
from outrider.providers.cpu.kernels.integers import (
    BYTES,
    P_SCALE,
    P_ZERO,
    SUM_BIAS,
    W_SCALE,
    W_ZERO,
    X_SCALE,
    X_ZERO,
    Y_SCALE,
    Y_ZERO,
    Quantized,
    Result,
    operand,
)
from outrider.providers.cpu.kernels.quantizing import dynamically_quantized
from outrider.providers.wire.graph import Node


def _given(b: Bind, i: int) -> np.ndarray | None:
    return b.contiguous(b.array(i)) if b.has(i) else None


def _quantized_result(b: Bind, x: int, w: int, y: int, bias: int | None = None) -> Result:
    """uint8 or int8; `x`, `w`, `y`: positions of the scales, of y followed by its zero point; `bias`: int32."""
    zero = b.contiguous(b.array(y + 1))
    given = None if bias is None else _given(b, bias)
    return Result(zero.dtype, _given(b, x), _given(b, w), given, y_scale=_given(b, y), y_zero=zero)


@kernel("MatMulInteger", since=10, dtypes={0: BYTES, 1: BYTES}, compiled="quantized")
def matmul_integer(b: Bind, p: None) -> None:
    """ONNX MatMulInteger-10: inputs A, B, a_zero_point (scalar or per row), b_zero_point (scalar or per column)."""
    product(b, operand(b, 0, 2, -2), operand(b, 1, 3, -1), Result(np.dtype(np.int32)))


@kernel("QLinearMatMul", since=10, dtypes={0: BYTES, 3: BYTES, 7: BYTES}, compiled="quantized")
def qlinear_matmul(b: Bind, p: None) -> None:
    """ONNX QLinearMatMul-21: A, scale, zero point, B, scale, zero point, then scale and zero point of Y."""
    product(b, operand(b, 0, 2, -2), operand(b, 3, 5, -1), _quantized_result(b, 1, 4, 6))


def _one_scale(b: Bind, i: int) -> np.ndarray:
    """Input i, one scale for the whole tensor. Raises ValueError where it has several."""
    x = b.array(i)
    if x.size != 1:
        raise ValueError(f"input {i} has shape {list(x.shape)}; the kernel takes one scale")
    return b.contiguous(x)


def integer_product(
    b: Bind, x: tuple[int, int, int], w: tuple[int, int, int], bias: int, y: np.ndarray | None = None
) -> None:
    """Record the product of two inputs in float32, plus the input `bias` if there is one.

    `x`, `w`: positions of values, scale and zero point; those of w may go by column. `y`: the place, None: output 0.
    """
    shift = bias if b.has(bias) else None
    result = Result(np.dtype(np.float32), _one_scale(b, x[1]), _given(b, w[1]), shift=shift)
    product(b, operand(b, x[0], x[2], -2), operand(b, w[0], w[2], -1), result, y)


@kernel(
    "MatMulIntegerToFloat", domain="com.microsoft", dtypes={0: BYTES, 1: BYTES, 2: {"float32"}}, compiled="quantized"
)
def matmul_integer_to_float(b: Bind, p: None) -> None:
    """com.microsoft MatMulIntegerToFloat-1: A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias.

    (A - a_zero_point) (B - b_zero_point) a_scale b_scale + bias; scales and zero points of B may go by column.
    """
    integer_product(b, (0, 2, 4), (1, 3, 5), 6)


@kernel("DynamicQuantizeMatMul", domain="com.microsoft", dtypes={0: {"float32"}, 1: BYTES}, compiled="quantized")
def dynamic_quantize_matmul(b: Bind, p: None) -> None:
    """com.microsoft DynamicQuantizeMatMul-1: A (float32), B, b_scale, b_zero_point, bias; A as uint8 by its range."""
    x = b.array(0)
    values, scale, zero = b.scratch(x.shape, np.uint8), b.scratch((), np.float32), b.scratch((), np.uint8)
    dynamically_quantized(b, x, values, scale, zero)
    left = Quantized(None, values, zero, None, None)
    result = Result(np.dtype(np.float32), scale, _given(b, 2), shift=4 if b.has(4) else None)
    product(b, left, operand(b, 1, 3, -1), result)


@dataclass(frozen=True)
class Product:
    """Attributes of QGemm."""

    alpha: float
    left: bool
    right: bool


def _parse_qgemm(node: Node) -> Product:
    get = node.attributes.get
    return Product(float(get("alpha", 1.0)), bool(get("transA", 0)), bool(get("transB", 0)))


@kernel("QGemm", domain="com.microsoft", dtypes={0: BYTES, 3: BYTES}, parse=_parse_qgemm, compiled="quantized")
def qgemm(b: Bind, p: Product) -> None:
    """com.microsoft QGemm-1: A, scale, zero point, B, scale, zero point, C (int32), scale and zero point of Y.

    alpha A' B' plus C, which counts in units of alpha a_scale b_scale; float32 where Y has no scale.
    """
    left, right = operand(b, 0, 2, None), operand(b, 3, 5, -1)
    if left.values.ndim != 2 or right.values.ndim != 2:
        raise ValueError(f"QGemm takes matrices, these are {list(left.values.shape)} and {list(right.values.shape)}")
    if p.left:
        left = replace(left, values=left.values.T, pick=np.transpose)
    if p.right:
        right = replace(right, values=right.values.T, pick=np.transpose)
    scale = _one_scale(b, 1)
    if p.alpha != 1:
        scaled = b.scratch((), np.float32)
        b.step(np.multiply, b.reshaped(scale, ()), np.float32(p.alpha), scaled)
        scale = scaled
    zero = _given(b, 8)
    dtype = np.dtype(np.float32) if zero is None else zero.dtype
    product(b, left, right, Result(dtype, scale, _given(b, 4), _given(b, 6), y_scale=_given(b, 7), y_zero=zero))


@kernel("ConvInteger", since=10, dtypes={0: BYTES, 1: BYTES}, parse=parse_convolution, compiled="quantized")
def conv_integer(b: Bind, p: Convolution) -> None:
    """ONNX ConvInteger-10: x, w, x_zero_point, w_zero_point (scalar or per output channel)."""
    convolution(b, p, operand(b, 0, 2, 1), operand(b, 1, 3, 0), Result(np.dtype(np.int32)))


def _parse_qlinear_conv(node: Node) -> Convolution:
    if int(node.attributes.get("channels_last", 0)):
        raise Unsupported("channels_last")
    return parse_convolution(node)


@kernel("QLinearConv", since=10, dtypes={0: BYTES, 3: BYTES, 7: BYTES}, parse=parse_convolution, compiled="quantized")
@kernel(
    "QLinearConv",
    domain="com.microsoft",
    dtypes={0: BYTES, 3: BYTES, 7: BYTES},
    parse=_parse_qlinear_conv,
    compiled="quantized",
)
def qlinear_conv(b: Bind, p: Convolution) -> None:
    """ONNX QLinearConv-10: x, scale, zero point, w, scale, zero point, scale and zero point of y, int32 bias."""
    convolution(b, p, operand(b, 0, 2, 1), operand(b, 3, 5, 0), _quantized_result(b, 1, 4, 6, 8))


# Fused operators -----------------------------------------------------------------------------------------------------
def _fused_result(b: Bind, p: Epilogue) -> Result:
    zero = _given(b, Y_ZERO)
    dtype = np.dtype(np.float32) if zero is None else zero.dtype
    return Result(
        dtype,
        _one_scale(b, X_SCALE),
        _given(b, W_SCALE),
        _given(b, SUM_BIAS),
        epilogue=p,
        y_scale=_given(b, Y_SCALE),
        y_zero=zero,
        p_scale=_given(b, P_SCALE),
        p_zero=_given(b, P_ZERO),
    )


@kernel("IntegerMatMul", domain="outrider", dtypes={0: BYTES, 1: BYTES}, parse=parse_epilogue, compiled="quantized")
def integer_matmul(b: Bind, p: Epilogue) -> None:
    """outrider::IntegerMatMul: x, w and the inputs of `epilogue.py`, then scale and zero point of x, w, y and product.

    The product in float32, quantized and dequantized where it has a scale; with the epilogue; quantized where y has a
    scale.
    """
    product(b, operand(b, 0, X_ZERO, -2), operand(b, 1, W_ZERO, -1), _fused_result(b, p))


@dataclass(frozen=True)
class FusedConvolution:
    """Attributes of outrider::IntegerConv."""

    convolution: Convolution
    epilogue: Epilogue


@kernel(
    "IntegerConv",
    domain="outrider",
    dtypes={0: BYTES, 1: BYTES},
    parse=lambda node: FusedConvolution(parse_convolution(node), parse_epilogue(node)),
    compiled="quantized",
)
def integer_conv(b: Bind, p: FusedConvolution) -> None:
    """outrider::IntegerConv: as IntegerMatMul, with the attributes of Conv."""
    convolution(b, p.convolution, operand(b, 0, X_ZERO, 1), operand(b, 1, W_ZERO, 0), _fused_result(b, p.epilogue))
