"""Products of 8-bit integers: MatMulInteger, QLinearMatMul, QGemm, ConvInteger, QLinearConv and their near kin.

They run as floating-point GEMMs on values shifted by their zero points, which are exact as long as no partial sum
leaves the integers that the float holds: float32 up to depth 1024 (int8 * int8), 514 (uint8 * int8) or 258 (shifted
uint8 both), float64 beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.convolution import Convolution, conv_geometry, convolve, parse_convolution
from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.cpu.kernels.matmul import multiply, product_shape
from outrider.providers.cpu.kernels.quantizing import quantize_range
from outrider.providers.wire.graph import Node

_BYTES = {"int8", "uint8"}


@dataclass(frozen=True)
class Quantized:
    """An operand and its zero point (None: zero), ready to broadcast over it."""

    i: int
    values: np.ndarray
    zero: np.ndarray | None
    zero_input: int

    def magnitude(self, b: Bind) -> int:
        """An upper bound of |value - zero point|."""
        info = np.iinfo(self.values.dtype)
        if self.zero is None:
            return max(-int(info.min), int(info.max))
        if b.is_const(self.zero_input) and self.zero.size:
            points = b.const(self.zero_input).astype(np.int64)
            return max(int(info.max) - int(points.min()), int(points.max()) - int(info.min))
        return int(info.max) - int(info.min)


def _operand(b: Bind, i: int, zero_input: int, axis: int | None) -> Quantized:
    """Input i; a zero point with several entries lies along `axis` of it (None: it broadcasts as it is)."""
    values = b.array(i)
    if not b.has(zero_input):
        return Quantized(i, values, None, zero_input)
    return Quantized(i, values, _along(b, zero_input, values.ndim, axis), zero_input)


def _along(b: Bind, i: int, rank: int, axis: int | None) -> np.ndarray:
    """Input i (a scale or zero point), ready to broadcast over a tensor of that rank."""
    x = b.array(i)
    if x.size == 1:
        return b.reshaped(x, ())
    if x.ndim == 1 and axis is not None:
        return b.reshaped(x, tuple(x.shape[0] if k == axis % rank else 1 for k in range(rank)))
    return x


def _shift(values: np.ndarray, zero: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, values, "unsafe")
    np.subtract(out, zero, out, casting="unsafe")


def _known(b: Bind, q: Quantized) -> bool:
    return b.is_const(q.i) and (q.zero is None or b.is_const(q.zero_input))


def _shifted(b: Bind, q: Quantized, dtype: Any) -> np.ndarray:
    """values - zero point in `dtype`; made once where both are constant."""
    if _known(b, q):

        def make(values: np.ndarray) -> np.ndarray:
            wide = values.astype(dtype)
            if q.zero is not None:
                wide -= b.const(q.zero_input).reshape(q.zero.shape).astype(dtype)
            return wide

        zero_name, shape = ("", "") if q.zero is None else (b.node.inputs[q.zero_input].name, q.zero.shape)
        ready: np.ndarray = b.packed(f"shifted {np.dtype(dtype).name} {zero_name} {shape}", q.i, make)
        return ready
    out = b.scratch(q.values.shape, dtype)
    if q.zero is None:
        b.step(np.copyto, out, q.values, "unsafe")
    else:
        b.step(_shift, q.values, q.zero, out)
    return out


def _exact(b: Bind, left: Quantized, right: Quantized, depth: int) -> np.dtype[Any]:
    """The float that adds `depth` products without rounding."""
    largest = depth * left.magnitude(b) * right.magnitude(b)
    return np.dtype(np.float32 if largest <= 2**24 else np.float64)


def _to_int32(total: np.ndarray, y: np.ndarray) -> None:
    """Sums to int32, wrapping as int32 addition would."""
    np.copyto(y, total.astype(np.int64), "unsafe")


def _store(b: Bind, total: np.ndarray, y: np.ndarray, depth: int) -> None:
    if depth * 255 * 255 < 2**31:
        b.step(np.copyto, y, total, "unsafe")
    else:
        b.step(_to_int32, total, y)


def _requantize(
    total: np.ndarray, scales: tuple[np.ndarray, ...], zero: np.ndarray, scaled: np.ndarray, y: np.ndarray
) -> None:
    """y = saturate(round(total * a_scale * b_scale / y_scale) + zero point), rounding halves to even."""
    left, right, result = (np.asarray(s, np.float32) for s in scales)
    np.copyto(scaled, total, "unsafe")
    np.multiply(scaled, left * right / result, scaled)
    np.rint(scaled, scaled)
    np.add(scaled, zero, scaled, casting="unsafe")
    info = np.iinfo(y.dtype)
    np.clip(scaled, info.min, info.max, out=scaled)
    np.copyto(y, scaled, "unsafe")


@kernel("MatMulInteger", since=10, dtypes={0: _BYTES, 1: _BYTES})
def matmul_integer(b: Bind, p: None) -> None:
    """ONNX MatMulInteger-10: inputs A, B, a_zero_point (scalar or per row), b_zero_point (scalar or per column)."""
    left, right = _operand(b, 0, 2, -2), _operand(b, 1, 3, -1)
    depth = left.values.shape[-1]
    dtype = _exact(b, left, right, depth)
    y = b.out(0, product_shape(left.values.shape, right.values.shape), np.int32)
    total = b.scratch(y.shape, dtype)
    multiply(b, _shifted(b, left, dtype), _shifted(b, right, dtype), total)
    _store(b, total, y, depth)


@kernel("QLinearMatMul", since=10, dtypes={0: _BYTES, 3: _BYTES, 7: _BYTES})
def qlinear_matmul(b: Bind, p: None) -> None:
    """ONNX QLinearMatMul-21: A, scale, zero point, B, scale, zero point, then scale and zero point of Y."""
    left, right = _operand(b, 0, 2, -2), _operand(b, 3, 5, -1)
    depth = left.values.shape[-1]
    dtype = _exact(b, left, right, depth)
    y = b.out(0, product_shape(left.values.shape, right.values.shape), b.array(7).dtype)
    total = b.scratch(y.shape, dtype)
    multiply(b, _shifted(b, left, dtype), _shifted(b, right, dtype), total)
    rank = max(1, y.ndim)
    scales = (_along(b, 1, rank, -2), _along(b, 4, rank, -1), _along(b, 6, rank, -2))
    scaled = b.scratch(y.shape, np.float32)
    b.step(_requantize, total, scales, _along(b, 7, rank, -2), scaled, y)


def _add(total: np.ndarray, bias: np.ndarray, y: np.ndarray) -> None:
    np.add(total, bias, y, casting="unsafe")


def _with_bias(b: Bind, total: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """total + bias (int32, broadcast): in float64, as float32 may have no room for the sum."""
    wide = total if total.dtype == np.float64 else b.scratch(total.shape, np.float64)
    b.step(_add, total, bias, wide)
    return wide


def _scaled(total: np.ndarray, left: np.ndarray, right: np.ndarray, y: np.ndarray) -> None:
    """y = total * (left * right), in float32."""
    np.copyto(y, total, "unsafe")
    np.multiply(y, left * right, y)


def _scale(b: Bind, i: int, what: str) -> np.ndarray:
    """Input i, one scale for the whole tensor. Raises ValueError where it has several."""
    x = b.array(i)
    if x.size != 1:
        raise ValueError(f"{what} has shape {list(x.shape)}; the kernel takes one value")
    return b.reshaped(x, ())


def _finish_float(b: Bind, total: np.ndarray, left: np.ndarray, right: np.ndarray, bias: int, y: np.ndarray) -> None:
    """Record y = total * (left * right) + bias, by column; `bias` is the position of the optional input."""
    b.step(_scaled, total, left, right, y)
    if b.has(bias):
        b.step(np.add, y, b.array(bias), y)


def integer_product(
    b: Bind, x: tuple[int, int, int], w: tuple[int, int, int], bias: int, y: np.ndarray | None = None
) -> None:
    """Record the product of two inputs in float32, plus the input `bias` if there is one.

    `x`, `w`: positions of values, scale and zero point; those of w may go by column. `y`: the place, None: output 0.
    """
    left, right = _operand(b, x[0], x[2], -2), _operand(b, w[0], w[2], -1)
    dtype = _exact(b, left, right, left.values.shape[-1])
    if y is None:
        y = b.out(0, product_shape(left.values.shape, right.values.shape), np.float32)
    total = b.scratch(y.shape, dtype)
    multiply(b, _shifted(b, left, dtype), _shifted(b, right, dtype), total)
    _finish_float(b, total, _scale(b, x[1], "a_scale"), _along(b, w[1], max(1, y.ndim), -1), bias, y)


@kernel("MatMulIntegerToFloat", domain="com.microsoft", dtypes={0: _BYTES, 1: _BYTES, 2: {"float32"}})
def matmul_integer_to_float(b: Bind, p: None) -> None:
    """com.microsoft MatMulIntegerToFloat-1: A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias.

    (A - a_zero_point) (B - b_zero_point) a_scale b_scale + bias; scales and zero points of B may go by column.
    """
    integer_product(b, (0, 2, 4), (1, 3, 5), 6)


def _quantize_shifted(x: np.ndarray, out: np.ndarray, scale: np.ndarray) -> None:
    """What DynamicQuantizeLinear makes of x, less the zero point, and the scale."""
    step, point = quantize_range(x)
    scale[...] = step
    np.divide(x, step, out, casting="unsafe")
    np.rint(out, out)
    np.clip(out, -point, 255 - point, out=out)


@kernel("DynamicQuantizeMatMul", domain="com.microsoft", dtypes={0: {"float32"}, 1: _BYTES})
def dynamic_quantize_matmul(b: Bind, p: None) -> None:
    """com.microsoft DynamicQuantizeMatMul-1: A (float32), B, b_scale, b_zero_point, bias; A as uint8 by its range."""
    x, right = b.array(0), _operand(b, 1, 3, -1)
    depth = x.shape[-1]
    dtype = np.dtype(np.float32 if depth * 255 * right.magnitude(b) <= 2**24 else np.float64)
    y = b.out(0, product_shape(x.shape, right.values.shape), np.float32)
    shifted, scale = b.scratch(x.shape, dtype), b.scratch((), np.float32)
    total = b.scratch(y.shape, dtype)
    b.step(_quantize_shifted, x, shifted, scale)
    multiply(b, shifted, _shifted(b, right, dtype), total)
    _finish_float(b, total, scale, _along(b, 2, max(1, y.ndim), -1), 4, y)


@dataclass(frozen=True)
class Product:
    """Attributes of QGemm."""

    alpha: float
    left: bool
    right: bool


def _parse_qgemm(node: Node) -> Product:
    get = node.attributes.get
    return Product(float(get("alpha", 1.0)), bool(get("transA", 0)), bool(get("transB", 0)))


@kernel("QGemm", domain="com.microsoft", dtypes={0: _BYTES, 3: _BYTES}, parse=_parse_qgemm)
def qgemm(b: Bind, p: Product) -> None:
    """com.microsoft QGemm-1: A, scale, zero point, B, scale, zero point, C (int32), scale and zero point of Y.

    alpha A' B' plus C, which counts in units of alpha a_scale b_scale; float32 where Y has no scale.
    """
    left, right = _operand(b, 0, 2, None), _operand(b, 3, 5, -2 if p.right else -1)
    if left.values.ndim != 2 or right.values.ndim != 2:
        raise ValueError(f"QGemm takes matrices, these are {list(left.values.shape)} and {list(right.values.shape)}")
    depth = left.values.shape[0 if p.left else 1]
    dtype = _exact(b, left, right, depth)
    x, w = _shifted(b, left, dtype), _shifted(b, right, dtype)
    x, w = x.T if p.left else x, w.T if p.right else w
    y = b.out(0, product_shape(x.shape, w.shape), b.array(8).dtype if b.has(8) else np.float32)
    total = b.scratch(y.shape, dtype)
    multiply(b, x, w, total)
    if b.has(6):
        total = _with_bias(b, total, b.array(6))
    scale, columns = b.scratch((), np.float32), _along(b, 4, 2, -1)
    b.step(np.multiply, _scale(b, 1, "a_scale"), np.float32(p.alpha), scale)
    if b.has(7):
        result = (scale, columns, _scale(b, 7, "y_scale"))
        b.step(_requantize, total, result, _along(b, 8, 2, None), b.scratch(y.shape, np.float32), y)
    else:
        b.step(_scaled, total, scale, columns, y)


def _integer_conv(b: Bind, p: Convolution, left: Quantized, right: Quantized) -> tuple[np.ndarray, int]:
    """Record the sums [N, M, *out]; returns them, and how many products each adds."""
    x, w = left.values, right.values
    g = conv_geometry(p, x, w)
    depth = math.prod(w.shape[1:])
    dtype = _exact(b, left, right, depth)
    total = b.scratch((x.shape[0], w.shape[0]) + g.out, dtype)
    weights = _shifted(b, right, dtype)
    # The padding stands for the zero point: it comes after the shift.
    convolve(b, _shifted(b, left, dtype), weights, total, g, p.group, right.i, weights if _known(b, right) else None)
    return total, depth


@kernel("ConvInteger", since=10, dtypes={0: _BYTES, 1: _BYTES}, parse=parse_convolution)
def conv_integer(b: Bind, p: Convolution) -> None:
    """ONNX ConvInteger-10: x, w, x_zero_point, w_zero_point (scalar or per output channel)."""
    total, depth = _integer_conv(b, p, _operand(b, 0, 2, 1), _operand(b, 1, 3, 0))
    _store(b, total, b.out(0, total.shape, np.int32), depth)


@kernel("QLinearConv", since=10, dtypes={0: _BYTES, 3: _BYTES, 7: _BYTES}, parse=parse_convolution)
def qlinear_conv(b: Bind, p: Convolution) -> None:
    """ONNX QLinearConv-10: x, scale, zero point, w, scale, zero point, scale and zero point of y, int32 bias."""
    total, _ = _integer_conv(b, p, _operand(b, 0, 2, 1), _operand(b, 3, 5, 0))
    y = b.out(0, total.shape, b.array(7).dtype)
    rank = y.ndim
    if b.has(8):
        total = _with_bias(b, total, _along(b, 8, rank, 1))
    scales = (_along(b, 1, rank, 1), _along(b, 4, rank, 1), _along(b, 6, rank, 1))
    b.step(_requantize, total, scales, _along(b, 7, rank, 1), b.scratch(y.shape, np.float32), y)
