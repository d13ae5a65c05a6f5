"""Linear quantization: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear, and those of com.microsoft."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.casting import FLOAT8_MAX, Target, clipped
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel, order_of
from outrider.providers.cpu.kernels.support import axis_of, clamp, convert
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.graph import Node

INTEGER_RANGE = {
    "uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767), "uint4": (0, 15),
    "int4": (-8, 7), "uint2": (0, 3), "int2": (-2, 1),
}  # fmt: skip


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
    if target not in INTEGER_RANGE and target not in FLOAT8_MAX and target != "float4e2m1":
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


_KINDS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3}  # enum kind of quantize.c
_WORKS = {"quantize": 0, "dequantize": 1, "imitate": 2}  # enum work of quantize.c


def _collapsed(shape: tuple[int, ...], order: tuple[int, ...] | None, axis: int) -> tuple[int, int, int]:
    """[outer, channels, inner] of an array whose memory has its axes in `order`; channels lie along `axis`."""
    order = order or tuple(range(len(shape)))
    at = order.index(axis)
    sizes = [shape[k] for k in order]
    return math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])


def record_compiled(
    b: Bind,
    work: str,
    kind: str,
    x: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    axis: int,
    make: Callable[[tuple[int, ...] | None], np.ndarray],
) -> bool:
    """Record y = x quantized, dequantized or both ('imitate'); False where the compiled kernel does not take it.

    `scale`, `zero`: one value, or one per channel along `axis`; `make`: the place of y, lying in memory in that order.
    """
    library = b.compiled("quantized")
    if library is None or kind not in _KINDS or not x.size or scale.dtype != np.float32:
        return False
    by_channel = scale.size > 1
    if by_channel and scale.shape != x.shape[axis : axis + 1]:
        return False
    if zero is not None and (zero.dtype.name != kind or zero.size != scale.size):
        return False
    order = order_of(x)
    y = make(order)
    if order_of(y) != order:
        order = None
    x = b.contiguous(x, order)
    sizes = _collapsed(x.shape, order, axis) if by_channel else (1, 1, x.size)
    items = -(-x.size // 32) if not by_channel else sizes[0] * sizes[1] if sizes[2] > 1 else sizes[0]
    tasks = library.tasks(items, x.size * 0.4, 1)
    number = _KINDS[kind], _WORKS[work], by_channel
    scale, zero = b.contiguous(scale), None if zero is None else b.contiguous(zero)
    b.step(library.call("or_quantize", tasks, x, y, scale, zero, *number, *sizes, tasks))
    return True


def _with_numbers(b: Bind, p: Quantization, work: str, kind: str, dtype: Any) -> bool:
    """Inputs x, scale and zero point by the compiled kernel, if it takes them."""
    x = b.array(0)
    if p.block or b.array(1).ndim > 1 or (b.array(1).size > 1 and not -x.ndim <= p.axis < x.ndim):
        return False
    zero = b.array(2) if b.has(2) else None
    axis = p.axis % max(1, x.ndim)

    def make(order: tuple[int, ...] | None) -> np.ndarray:
        return b.out(0, x.shape, dtype, order)

    return record_compiled(b, work, kind, x, b.array(1), zero, axis, make)


@kernel("QuantizeLinear", since=10, parse=_parse_quantize, compiled="quantized")
@kernel("QuantizeLinear", domain="com.microsoft", parse=_parse_quantize, compiled="quantized")
def quantize_linear(b: Bind, p: Quantization) -> None:
    """QuantizeLinear-25: saturate(round_half_even(x / scale) + zero point); one scale, one per axis, or blocks."""
    x = b.array(0)
    plain = x.dtype == np.float32 and p.precision in ("", "float32")
    if plain and _with_numbers(b, p, "quantize", p.dtype, numpy_dtype(p.dtype)):
        return
    wide = numpy_dtype(p.precision) if p.precision else np.dtype(np.float32)
    if x.dtype == np.float64:
        wide = np.dtype(np.float64)
    order = order_of(x)
    work = b.scratch(x.shape, wide, order)
    if x.dtype == wide:
        b.step(np.divide, x, _fitted(b, 1, x, p, wide), work)
    else:
        scale = _fitted(b, 1, x, p, wide)
        b.step(convert, work, x)
        b.step(np.divide, work, scale, work)
    y = b.out(0, x.shape, numpy_dtype(p.dtype), order)
    bounds = INTEGER_RANGE.get(p.dtype)
    if bounds is not None:
        b.step(np.rint, work, work)
        if p.precision in ("float16", "bfloat16"):  # too narrow for sums with a zero point
            exact = b.scratch(x.shape, np.float32, order)
            b.step(convert, exact, work)
            work = exact
        if b.has(2):
            b.step(np.add, work, _fitted(b, 2, x, p, work.dtype), work)
        clamp(b, work, work, work.dtype.type(bounds[0]), work.dtype.type(bounds[1]))
        b.step(convert, y, work)
        return
    limit = Target(p.dtype, p.saturate).limit()
    if limit is not None:
        b.step(clipped, y, work, limit)
    else:
        b.step(convert, y, work)


@kernel("DequantizeLinear", since=10, parse=_parse_quantization, compiled="quantized")
@kernel("DequantizeLinear", domain="com.microsoft", parse=_parse_quantization, compiled="quantized")
def dequantize_linear(b: Bind, p: Quantization) -> None:
    """DequantizeLinear-25: (x - zero point) scale, in float32, into the dtype of the scale or output_dtype."""
    x = b.array(0)
    dtype = numpy_dtype(p.dtype) if p.dtype else b.array(1).dtype
    if dtype == np.float32 and _with_numbers(b, p, "dequantize", x.dtype.name, dtype):
        return
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    order = order_of(x)
    y = b.out(0, x.shape, dtype, order)
    work = y if dtype == wide else b.scratch(x.shape, wide, order)
    scale = _fitted(b, 1, x, p, wide)
    if b.has(2) and x.dtype == np.int32:  # float32 would lose digits before the difference
        whole = b.scratch(x.shape, np.int32, order)
        b.step(np.subtract, x, _fitted(b, 2, x, p, np.int32), whole)
        b.step(convert, work, whole)
    else:
        b.step(convert, work, x)
        if b.has(2):
            b.step(np.subtract, work, _fitted(b, 2, x, p, wide), work)
    b.step(np.multiply, work, scale, work)
    if work is not y:
        b.step(convert, y, work)


def imitate(x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, bounds: tuple[int, int], y: np.ndarray) -> None:
    """Step: y = x (float32) quantized to integers within the bounds, and dequantized."""
    np.divide(x, scale, y)
    np.rint(y, y)
    if zero is not None:
        np.add(y, zero, y, casting="unsafe")
    np.clip(y, np.float32(bounds[0]), np.float32(bounds[1]), y)
    if zero is not None:
        np.subtract(y, zero, y, casting="unsafe")
    np.multiply(y, scale, y)


@kernel("ImitateQuantization", domain="outrider", dtypes={0: {"float32"}}, parse=_parse_quantize, compiled="quantized")
def imitate_quantization(b: Bind, p: Quantization) -> None:
    """outrider::ImitateQuantization: QuantizeLinear and DequantizeLinear with the same scale and zero point, in one.

    Inputs x, scale, zero point, attribute axis; the bits are those of the two.
    """
    if _with_numbers(b, p, "imitate", p.dtype, np.dtype(np.float32)):
        return
    x = b.array(0)
    scale = _fitted(b, 1, x, p, np.dtype(np.float32))
    zero = _fitted(b, 2, x, p, np.dtype(np.float32)) if b.has(2) else None
    b.step(imitate, x, scale, zero, INTEGER_RANGE[p.dtype], b.reuse(0, 0))


def quantize_range(x: np.ndarray) -> tuple[np.float32, np.float32]:
    """Scale and zero point (an integer) with which x fits uint8, 0 being exact. ONNX DynamicQuantizeLinear-11."""
    low = np.minimum(x.min(initial=0), np.float32(0))
    high = np.maximum(x.max(initial=0), np.float32(0))
    step = np.float32((high - low) / np.float32(255))
    if step == 0:
        step = np.float32(1)
    return step, np.float32(np.clip(np.rint(-low / step), 0, 255))


def _dynamic_quantize(x: np.ndarray, work: np.ndarray, y: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> None:
    step, point = quantize_range(x)
    scale[...] = step
    zero[...] = point
    np.divide(x, step, work)
    np.rint(work, work)
    np.add(work, point, work)
    np.clip(work, 0, 255, work)
    np.copyto(y, work, "unsafe")


def dynamically_quantized(b: Bind, x: np.ndarray, y: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> None:
    """Record what DynamicQuantizeLinear makes of x (float32): y, lying as x does, its scale and zero point."""
    library = b.compiled("quantized")
    order = order_of(x)
    if library is not None and x.size and (x.flags.c_contiguous or order is not None) and y.strides == _strides(x, 1):
        tasks = library.tasks(-(-x.size // 32), x.size * 0.5)
        parts = b.scratch((tasks, 2), np.float32)
        b.step(library.call("or_range", tasks, x, parts, x.size, tasks))
        b.step(library.call("or_dynamic_quantize", tasks, x, y, scale, zero, parts, x.size, tasks, tasks))
        return
    work = b.scratch(x.shape, np.float32, order)
    b.step(_dynamic_quantize, x, work, y, scale, zero)


@kernel("DynamicQuantizeLinear", since=11, dtypes={0: {"float32"}}, compiled="quantized")
def dynamic_quantize_linear(b: Bind, p: None) -> None:
    """DynamicQuantizeLinear-11: uint8 values, their scale and zero point, from the range of x with 0 in it."""
    x = b.array(0)
    y = b.out(0, x.shape, np.uint8, order_of(x))
    dynamically_quantized(b, x, y, b.out(1, (), np.float32), b.out(2, (), np.uint8))


def _strides(x: np.ndarray, itemsize: int) -> tuple[int, ...]:
    """The strides of an array that lies like x, dense, with elements of that size."""
    return tuple(step // x.itemsize * itemsize for step in x.strides)
