"""Casts between element types, and linear quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import axis_of, clamp, convert
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.graph import Node

# Largest finite values of the float8 types (ONNX, "Float stored in 8 bits").
_FLOAT8_MAX = {"float8e4m3fn": 448.0, "float8e4m3fnuz": 240.0, "float8e5m2": 57344.0, "float8e5m2fnuz": 57344.0}
_INTEGER_RANGE = {
    "uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767), "uint4": (0, 15),
    "int4": (-8, 7), "uint2": (0, 3), "int2": (-2, 1),
}  # fmt: skip
_NO_SHAPE: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """An element type to convert to; `saturate` clips to the finite range of the float8 types.

    `rounding` ('up', 'down' or 'nearest') is that of float8e8m0, whose values are powers of two.
    """

    name: str
    saturate: bool
    rounding: str = "up"

    def limit(self) -> float | None:
        """The value to clip to, None where overflow follows the type (infinity or NaN)."""
        return _FLOAT8_MAX.get(self.name) if self.saturate else None


def _target(number: Any) -> str:
    name = BY_NUMBER.get(int(number), "")
    if not name or name == "undefined":
        raise Unsupported(f"element type {number} is not known here")
    return name


def _parse_cast(node: Node) -> Target:
    name = node.inputs[1].dtype if node.op_type == "CastLike" else _target(node.attributes["to"])
    rounding = str(node.attributes.get("round_mode", "up"))
    if rounding not in ("up", "down", "nearest"):
        raise Unsupported(f"round_mode={rounding!r}, the kernel takes 'up', 'down' and 'nearest'")
    return Target(name, bool(node.attributes.get("saturate", 1)), rounding)


def _text(value: Any) -> str:
    """One number as ONNX writes it: shortest form that reads back, `NaN`, `INF`, `-INF`."""
    if isinstance(value, (float, np.floating)):
        if np.isnan(value):
            return "NaN"
        if np.isinf(value):
            return "INF" if value > 0 else "-INF"
    return str(value)


def _texts(x: np.ndarray) -> np.ndarray:
    wide = x if x.dtype.kind in "biuf" else x.astype(np.float32)
    result = np.empty(x.shape, object)
    result.reshape(-1)[:] = [_text(v) for v in wide.reshape(-1)]
    return result


def _numbers(x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    read: Any = int if dtype.kind in "iu" else float
    return np.array([read(str(v)) for v in x.reshape(-1)]).astype(dtype).reshape(x.shape)


def _clipped(y: np.ndarray, x: np.ndarray, limit: float) -> None:
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    np.copyto(y, np.clip(wide, -limit, limit), "unsafe")  # NaN stays


def _power_of_two(y: np.ndarray, x: np.ndarray, target: Target) -> None:
    bits = x.astype(np.float32).view(np.uint32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if target.rounding == "up":
        higher = fraction > 0
    elif target.rounding == "nearest":  # a tie goes up, except between 0 and the smallest power
        higher = (fraction > 0x400000) | ((fraction == 0x400000) & (exponent > 0))
    else:
        higher = np.zeros(x.shape, bool)
    top = 0xFE if target.saturate else 0xFF  # 0xFF is NaN
    raised = np.where(exponent < 0xFF, np.minimum(exponent + higher, top), 0xFF)
    if target.saturate:
        raised = np.where(np.isinf(x.astype(np.float32)), top, raised)
    np.copyto(y, raised.astype(np.uint8).view(y.dtype))


def _by_float32(y: np.ndarray, x: np.ndarray) -> None:
    np.copyto(y, x.astype(np.float32), "unsafe")


def _castable(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    try:
        np.empty(_NO_SHAPE, source).astype(target)
    except (TypeError, ValueError):
        return False
    return True


def _cast(b: Bind, target: Target) -> None:
    x = b.array(0)
    if target.name == "string":
        b.value(0, lambda: x if x.dtype == object else _texts(x))
        return
    dtype = numpy_dtype(target.name)
    if x.dtype == object:
        b.value(0, lambda: _numbers(x, dtype))
        return
    if x.dtype == dtype:
        b.view(0, x)
        return
    y = b.out(0, x.shape, dtype)
    limit = target.limit()
    if target.name == "float8e8m0":
        b.step(_power_of_two, y, x, target)
    elif limit is not None:
        b.step(_clipped, y, x, limit)
    else:
        b.step(convert if _castable(x.dtype, dtype) else _by_float32, y, x)


@kernel("Cast", since=6, parse=_parse_cast)
def cast(b: Bind, p: Target) -> None:
    """Cast-25: C casts, float8 saturating unless told otherwise."""
    _cast(b, p)


@kernel("CastLike", since=15, parse=_parse_cast)
def cast_like(b: Bind, p: Target) -> None:
    """CastLike-25: cast to the dtype of the second input."""
    _cast(b, p)


def _parse_bit_cast(node: Node) -> str:
    name = _target(node.attributes["to"])
    if "string" in (name, node.inputs[0].dtype):
        raise Unsupported("strings have no bits to reinterpret")
    return name


@kernel("BitCast", since=26, parse=_parse_bit_cast)
def bit_cast(b: Bind, p: str) -> None:
    """BitCast-26: the same bits as another element type of the same width."""
    x = b.array(0)
    dtype = numpy_dtype(p)
    if dtype.itemsize != x.dtype.itemsize:
        raise ValueError(f"BitCast {b.node.name}: {x.dtype} and {dtype} differ in width")
    b.view(0, x.view(dtype))


# Quantization -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Quantization:
    """Attributes of QuantizeLinear and DequantizeLinear; dtypes are ONNX names, '' where not given."""

    axis: int
    block: int
    dtype: str
    precision: str
    saturate: bool


def _parse_quantization(node: Node) -> Quantization:
    attributes = node.attributes
    dtype = BY_NUMBER.get(int(attributes.get("output_dtype", 0)), "?")
    precision = BY_NUMBER.get(int(attributes.get("precision", 0)), "?")
    if "?" in (dtype, precision):
        raise Unsupported("output_dtype or precision is an element type that is not known here")
    if precision not in ("undefined", "float32", "float64", "float16", "bfloat16"):
        raise Unsupported(f"precision {precision} is no float type")
    return Quantization(
        int(attributes.get("axis", 1)),
        int(attributes.get("block_size", 0)),
        "" if dtype == "undefined" else dtype,
        "" if precision == "undefined" else precision,
        bool(attributes.get("saturate", 1)),
    )


def _parse_quantize(node: Node) -> Quantization:
    p = _parse_quantization(node)
    target = p.dtype or (node.inputs[2].dtype if len(node.inputs) > 2 and node.inputs[2].name else "uint8")
    if target not in _INTEGER_RANGE and target not in _FLOAT8_MAX and target != "float4e2m1":
        raise Unsupported(f"quantization to {target}")
    return Quantization(p.axis, p.block, target, p.precision, p.saturate)


def _fitted(b: Bind, i: int, x: np.ndarray, p: Quantization, dtype: Any) -> np.ndarray:
    """Input i (scale or zero point) as `dtype` and in a shape that broadcasts with x."""
    given = b.array(i)
    scaled = b.contiguous(given)
    if scaled.dtype != dtype:
        converted = b.scratch(given.shape, dtype)
        b.step(convert, converted, given)
        scaled = converted
    if p.block and scaled.ndim == x.ndim and x.ndim:
        axis = axis_of(p.axis, x.ndim, b.node)
        shape = list(scaled.shape)
        if not shape[axis] or -(-x.shape[axis] // p.block) != shape[axis]:
            raise ValueError(
                f"{b.node.label} {b.node.name}: {shape[axis]} blocks of {p.block} do not cover {x.shape[axis]}"
            )
        shape[axis] = x.shape[axis]
        repeated = b.scratch(shape, dtype)
        b.step(_repeat, scaled, p.block, axis, repeated)
        return repeated
    if scaled.size == 1:
        return scaled.reshape(())
    if scaled.ndim == 1:
        axis = axis_of(p.axis, x.ndim, b.node)
        return scaled.reshape((scaled.size,) + (1,) * (x.ndim - axis - 1))
    return scaled


def _repeat(x: np.ndarray, count: int, axis: int, y: np.ndarray) -> None:
    index = [slice(None)] * y.ndim
    index[axis] = slice(0, y.shape[axis])
    np.copyto(y, np.repeat(x, count, axis)[tuple(index)])


@kernel("QuantizeLinear", since=10, parse=_parse_quantize)
def quantize_linear(b: Bind, p: Quantization) -> None:
    """QuantizeLinear-25: saturate(round_half_even(x / scale) + zero point); one scale, one per axis, or blocks."""
    x = b.array(0)
    wide = numpy_dtype(p.precision) if p.precision else np.dtype(np.float32)
    if x.dtype == np.float64:
        wide = np.dtype(np.float64)
    work = b.scratch(x.shape, wide)
    if x.dtype == wide:
        b.step(np.divide, x, _fitted(b, 1, x, p, wide), work)
    else:
        scale = _fitted(b, 1, x, p, wide)
        b.step(convert, work, x)
        b.step(np.divide, work, scale, work)
    y = b.out(0, x.shape, numpy_dtype(p.dtype))
    bounds = _INTEGER_RANGE.get(p.dtype)
    if bounds is not None:
        b.step(np.rint, work, work)
        if p.precision in ("float16", "bfloat16"):  # too narrow for sums with a zero point
            exact = b.scratch(x.shape, np.float32)
            b.step(convert, exact, work)
            work = exact
        if b.has(2):
            b.step(np.add, work, _fitted(b, 2, x, p, work.dtype), work)
        clamp(b, work, work, work.dtype.type(bounds[0]), work.dtype.type(bounds[1]))
        b.step(convert, y, work)
        return
    limit = Target(p.dtype, p.saturate).limit()
    if limit is not None:
        b.step(_clipped, y, work, limit)
    else:
        b.step(convert, y, work)


@kernel("DequantizeLinear", since=10, parse=_parse_quantization)
def dequantize_linear(b: Bind, p: Quantization) -> None:
    """DequantizeLinear-25: (x - zero point) scale, in float32, into the dtype of the scale or output_dtype."""
    x = b.array(0)
    dtype = numpy_dtype(p.dtype) if p.dtype else b.array(1).dtype
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    y = b.out(0, x.shape, dtype)
    work = y if dtype == wide else b.scratch(x.shape, wide)
    scale = _fitted(b, 1, x, p, wide)
    if b.has(2) and x.dtype == np.int32:  # float32 would lose digits before the difference
        whole = b.scratch(x.shape, np.int32)
        b.step(np.subtract, x, _fitted(b, 2, x, p, np.int32), whole)
        b.step(convert, work, whole)
    else:
        b.step(convert, work, x)
        if b.has(2):
            b.step(np.subtract, work, _fitted(b, 2, x, p, wide), work)
    b.step(np.multiply, work, scale, work)
    if work is not y:
        b.step(convert, y, work)


def _dynamic_quantize(x: np.ndarray, y: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> None:
    low = np.minimum(x.min(initial=0), np.float32(0))
    high = np.maximum(x.max(initial=0), np.float32(0))
    step = (high - low) / np.float32(255)
    if step == 0:
        step = np.float32(1)
    point = np.clip(np.rint(-low / step), 0, 255)
    scale[...] = step
    zero[...] = point
    np.copyto(y, np.clip(np.rint(x / step) + point, 0, 255), "unsafe")


@kernel("DynamicQuantizeLinear", since=11, dtypes={0: {"float32"}})
def dynamic_quantize_linear(b: Bind, p: None) -> None:
    """DynamicQuantizeLinear-11: uint8 values, their scale and zero point, from the range of x with 0 in it."""
    x = b.array(0)
    y = b.out(0, x.shape, np.uint8)
    b.step(_dynamic_quantize, x, y, b.out(1, (), np.float32), b.out(2, (), np.uint8))
