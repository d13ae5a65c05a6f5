"""Products of 8-bit integers in both implementations.

`product` and `convolution` record the sums of products of what two operands hold less their zero points, and what
becomes of them (`Result`). In NumPy the sums are floating-point GEMMs, exact as long as no partial sum leaves the
integers that the float holds: float32 up to depth 1024 (int8 * int8), 514 (uint8 * int8) or 258 (shifted uint8 both),
float64 beyond. Compiled, they are int32: equal to the last bit. Results that are float32 differ between the two by the
roundings of the epilogue.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels import integers_compiled
from outrider.providers.cpu.kernels.convolution import Convolution, conv_geometry, convolve
from outrider.providers.cpu.kernels.epilogue import finish_product
from outrider.providers.cpu.kernels.frame import Bind, channels_last
from outrider.providers.cpu.kernels.integers import Quantized, Result, along
from outrider.providers.cpu.kernels.matmul import multiply, product_shape
from outrider.providers.cpu.kernels.quantizing import imitate


# NumPy ---------------------------------------------------------------------------------------------------------------
def _shift(values: np.ndarray, zero: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, values, "unsafe")
    np.subtract(out, zero, out, casting="unsafe")


def _shifted(b: Bind, q: Quantized, dtype: Any) -> np.ndarray:
    """values - zero point in `dtype`; made once where both are constant."""
    zero = q.broadcast()
    if q.i is not None and q.known(b):

        def make(contents: np.ndarray) -> np.ndarray:
            wide = q.of(contents).astype(dtype)
            if zero is not None:
                wide -= zero.astype(dtype)
            return wide

        ready: np.ndarray = b.packed(f"shifted {np.dtype(dtype).name} {q.key(b)}", q.i, make)
        return ready
    out = b.scratch(q.values.shape, dtype)
    if zero is None:
        b.step(np.copyto, out, q.values, "unsafe")
    else:
        b.step(_shift, q.values, zero, out)
    return out


def _exact_in(b: Bind, left: Quantized, right: Quantized, depth: int) -> np.dtype[Any]:
    """The float that adds `depth` products without rounding."""
    largest = depth * left.magnitude(b) * right.magnitude(b)
    return np.dtype(np.float32 if largest <= 2**24 else np.float64)


def _to_int32(total: np.ndarray, y: np.ndarray) -> None:
    """Sums to int32, wrapping as int32 addition would."""
    np.copyto(y, total.astype(np.int64), "unsafe")


def _requantize(
    total: np.ndarray, scales: tuple[np.ndarray, ...], zero: np.ndarray | None, scaled: np.ndarray, y: np.ndarray
) -> None:
    """y = saturate(round(total * (x_scale * w_scale / y_scale)) + zero point), rounding halves to even."""
    left, right, result = scales
    np.copyto(scaled, total, "unsafe")
    np.multiply(scaled, left * right / result, scaled)
    _saturate(scaled, zero, y)


def _quantize(value: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, y: np.ndarray) -> None:
    np.divide(value, scale, value)
    _saturate(value, zero, y)


def _saturate(value: np.ndarray, zero: np.ndarray | None, y: np.ndarray) -> None:
    np.rint(value, value)
    if zero is not None:
        np.add(value, zero, value, casting="unsafe")
    info = np.iinfo(y.dtype)
    np.clip(value, info.min, info.max, value)
    np.copyto(y, value, "unsafe")


def _scaled(total: np.ndarray, left: np.ndarray, right: np.ndarray, y: np.ndarray) -> None:
    """y = total * (left * right), in float32."""
    np.copyto(y, total, "unsafe")
    np.multiply(y, left * right, y)


def _add(total: np.ndarray, bias: np.ndarray, y: np.ndarray) -> None:
    np.add(total, bias, y, casting="unsafe")


def _finish(b: Bind, total: np.ndarray, y: np.ndarray, r: Result, depth: int, rows: int, features: int) -> None:
    """Record what becomes of the sums `total`, in NumPy; rows and features lie along these axes."""
    rank = max(1, y.ndim)
    if y.dtype == np.int32:
        if depth * 255 * 255 < 2**31:
            b.step(np.copyto, y, total, "unsafe")
        else:
            b.step(_to_int32, total, y)
        return
    assert r.x_scale is not None and r.w_scale is not None
    if r.bias is not None:  # float32 may have no room for the sum
        wide = total if total.dtype == np.float64 else b.scratch(total.shape, np.float64)
        b.step(_add, total, along(r.bias, rank, features), wide)
        total = wide
    left, right = along(r.x_scale, rank, rows), along(r.w_scale, rank, features)
    zero = None if r.y_zero is None else along(r.y_zero, rank, rows)
    value = y if r.y_scale is None else b.scratch(y.shape, np.float32)
    if r.y_scale is not None and r.direct:
        b.step(_requantize, total, (left, right, along(r.y_scale, rank, rows)), zero, value, y)
        return
    b.step(_scaled, total, left, right, value)
    if r.shift is not None:
        b.step(np.add, value, along(b.contiguous(b.array(r.shift)), rank, features), value)
    if r.p_scale is not None and r.p_zero is not None:
        info = np.iinfo(r.p_zero.dtype)
        bounds = int(info.min), int(info.max)
        b.step(imitate, value, r.p_scale.reshape(()), r.p_zero.reshape(()), bounds, value)
    if r.epilogue is not None:
        finish_product(b, value, r.epilogue, features)
    if r.y_scale is not None:
        b.step(_quantize, value, along(r.y_scale, rank, rows), zero, y)


# Both implementations ------------------------------------------------------------------------------------------------
def product(b: Bind, left: Quantized, right: Quantized, r: Result, y: np.ndarray | None = None) -> None:
    """Record left @ right (numpy.matmul's shapes) and what becomes of it; `y`: where, None: output 0."""
    shape = product_shape(left.values.shape, right.values.shape)
    if y is None:
        y = b.out(0, shape, r.dtype)
    library = b.compiled("quantized")
    if library is not None and integers_compiled.product(b, library, left, right, r, y):
        return
    depth = left.values.shape[-1]
    dtype = _exact_in(b, left, right, depth)
    total = b.scratch(y.shape, dtype)
    multiply(b, _shifted(b, left, dtype), _shifted(b, right, dtype), total)
    _finish(b, total, y, r, depth, -2, -1)


def convolution(b: Bind, p: Convolution, left: Quantized, right: Quantized, r: Result) -> None:
    """Record the convolution of left [N, C, *spatial] with weights [M, C / group, *kernel] into output 0.

    The padding stands for the zero point: it comes after the shift.
    """
    x, w = left.values, right.values
    g = conv_geometry(p, x, w)
    shape = (x.shape[0], w.shape[0]) + g.out
    library = b.compiled("quantized")
    if library is not None:
        y = b.out(0, shape, r.dtype, channels_last(x.ndim))
        if integers_compiled.convolution(b, library, left, right, g, p.group, r, y):
            return
    else:
        y = b.out(0, shape, r.dtype)
    depth = math.prod(w.shape[1:])
    dtype = _exact_in(b, left, right, depth)
    total = b.scratch(shape, dtype)
    weights = _shifted(b, right, dtype)
    assert right.i is not None
    convolve(b, _shifted(b, left, dtype), weights, total, g, p.group, right.i, weights if right.known(b) else None)
    _finish(b, total, y, r, depth, 1, 1)
