"""Softmax, its logarithm, Hardmax, and `outrider::Softmax` with a factor and a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.blockwise import into, scalar_operand
from outrider.providers.cpu.kernels.frame import Bind, kernel, order_of
from outrider.providers.cpu.kernels.precision import cast, finish, target, wide
from outrider.providers.cpu.native import Library
from outrider.providers.cpu.team import parts
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

_LOGARITHM, _NAN_TO_ZERO = 1, 2  # flags in C
_COLUMNS = 64  # COLUMNS in C
_TIME = 5.0  # nanoseconds per element in NumPy


@dataclass(frozen=True)
class Along:
    """The axis of a softmax; `flat`: before opset 13 the trailing axes from it on are one."""

    axis: int
    flat: bool


def _parse_along(node: Node) -> Along:
    flat = node.opset < 13
    return Along(int(node.attributes.get("axis", 1 if flat else -1)), flat)


def _rows(b: Bind, p: Along, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """x and y in the shape to reduce, scratch for one number per row, and the axis."""
    axis = p.axis % max(1, x.ndim)
    if p.flat:
        shape = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
        x, y, axis = b.reshaped(x, shape), y.reshape(shape), 1
    elif x.ndim == 0:
        x, y = b.reshaped(x, (1,)), y.reshape(1)
    return x, y, b.scratch(x.shape[:axis] + (1,) + x.shape[axis + 1 :], y.dtype), axis


def _softmax(axis: int, x: np.ndarray, y: np.ndarray, row: np.ndarray) -> None:
    np.maximum.reduce(x, axis, None, row, keepdims=True)
    np.subtract(x, row, y)
    np.exp(y, y)
    if axis == y.ndim - 1:  # a sum as a matrix-vector product is faster than a reduction
        np.matmul(y, np.ones((y.shape[-1], 1), y.dtype), row)
    else:
        np.add.reduce(y, axis, None, row, keepdims=True)
    np.divide(y, row, y)


def _log_softmax(axis: int, x: np.ndarray, y: np.ndarray, row: np.ndarray, term: np.ndarray) -> None:
    np.maximum.reduce(x, axis, None, row, keepdims=True)
    np.subtract(x, row, y)
    np.exp(y, term)
    np.add.reduce(term, axis, None, row, keepdims=True)
    np.log(row, row)
    np.subtract(y, row, y)


def _hardmax(axis: int, x: np.ndarray, y: np.ndarray, row: np.ndarray) -> None:
    y.fill(0)
    np.put_along_axis(y, np.expand_dims(np.argmax(x, axis), axis), 1, axis)


def _in_shares(b: Bind, work: Callable[..., None], axis: int, *arrays: np.ndarray) -> None:
    """Record work(axis, *arrays), whose first array has the extents of all but `axis` of the others."""
    shape = arrays[0].shape
    others = [other for other in range(len(shape)) if other != axis]
    longest = max(others, key=lambda other: shape[other], default=axis)
    shares = min(b.shares(arrays[0].size * _TIME), shape[longest]) if others else 1
    own = [(slice(None),) * longest + (part,) for part in parts(shape[longest], shares)]
    b.at_once(lambda share: work(axis, *share), [[array[at] for array in arrays] for at in own])


def _bind_softmax(b: Bind, p: Along, work: Callable[..., None], flags: int | None = None) -> None:
    """`flags`: those of C for this work, None where C does not do it."""
    x = b.array(0)
    library = None if flags is None or wide(x.dtype) != np.float32 else b.compiled("softmax")
    y = b.out(0, x.shape, x.dtype, None if p.flat or library is None else order_of(x))
    if not x.size:
        return
    total = target(b, y)
    x = cast(b, x, total.dtype)
    if library is not None and flags is not None:
        axis = p.axis % max(1, x.ndim)
        if p.flat:
            flat = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
            in_one_pass(b, library, b.reshaped(x, flat), total.reshape(flat), 1, flags)
        else:
            in_one_pass(b, library, x, total, axis, flags)
    else:
        x, place, row, axis = _rows(b, p, x, total)
        extra = [b.scratch(x.shape, total.dtype)] if work is _log_softmax else []
        _in_shares(b, work, axis, x, place, row, *extra)
    finish(b, y, total)


def in_one_pass(
    b: Bind,
    library: Library,
    x: np.ndarray,
    y: np.ndarray,
    axis: int,
    flags: int = 0,
    factor: float = 1.0,
    mask: np.ndarray | None = None,
) -> None:
    """Record softmax(x * factor + mask) -> y by the compiled library; all float32, y dense, x and mask broadcast to it.

    x may be y itself.
    """
    order = order_of(y) or tuple(range(y.ndim))
    if x is not y:
        x = b.contiguous(np.broadcast_to(x, y.shape), order)
    place = y.transpose(order)
    at = order.index(axis) if order else 0
    outer, n, inner = math.prod(place.shape[:at]), math.prod(place.shape[at : at + 1]), math.prod(place.shape[at + 1 :])
    if inner > 1:
        if mask is not None or factor != 1.0:
            extra = [scalar_operand(factor), *([mask] if mask is not None else [])]
            program = [("Mul", 0, 1), ("Add", 3, 2)] if mask is not None else [("Mul", 0, 1)]
            into(b, library, program, [x, *extra], y)
            x = y
        tasks = library.tasks(outer * -(-inner // _COLUMNS), 1.3 * y.size, 4)
        b.step(library.call("or_softmax_columns", tasks, y, x, outer, n, inner, flags, tasks))
        return
    walk, step = np.empty((0, 2), np.int64), 0
    if mask is not None:
        spread = np.broadcast_to(mask, y.shape).transpose(order)
        if y.ndim and spread.strides[at] not in (0, 4):
            spread = np.broadcast_to(b.contiguous(mask), y.shape).transpose(order)
        if y.ndim and spread.strides[at] not in (0, 4):  # the axis is not the mask's last
            spread = b.contiguous(spread)
        step = spread.strides[at] // 4 if y.ndim else 0
        axes = list(zip(spread.shape[:at], spread.strides[:at], strict=True))
        walk = np.array([(count, stride // 4) for count, stride in axes], np.int64).reshape(-1, 2)
        mask = spread
    tasks = library.tasks(outer, 1.2 * y.size, 4)
    b.step(library.call("or_softmax", tasks, y, x, mask, walk, len(walk), step, outer, n, factor, flags, tasks))


@kernel("Softmax", dtypes={0: FLOATS}, parse=_parse_along, compiled="softmax")
def softmax(b: Bind, p: Along) -> None:
    """ONNX Softmax-13, and 1 to 12."""
    _bind_softmax(b, p, _softmax, 0)


@kernel("LogSoftmax", dtypes={0: FLOATS}, parse=_parse_along, compiled="softmax")
def log_softmax(b: Bind, p: Along) -> None:
    """ONNX LogSoftmax-13, and 1 to 12."""
    _bind_softmax(b, p, _log_softmax, _LOGARITHM)


@kernel("Hardmax", dtypes={0: FLOATS}, parse=_parse_along)
def hardmax(b: Bind, p: Along) -> None:
    """ONNX Hardmax-13, and 1 to 12: 1 at the first maximum, else 0."""
    _bind_softmax(b, p, _hardmax)


@dataclass(frozen=True)
class Masked:
    """Attributes of `outrider::Softmax`. `nan_to_zero`: rows that come out as NaN are zeros."""

    axis: int
    factor: float
    nan_to_zero: bool


def _parse_masked(node: Node) -> Masked:
    get = node.attributes.get
    return Masked(int(get("axis", -1)), float(get("factor", 1.0)), bool(get("nan_to_zero", 0)))


def _scaled(x: np.ndarray, factor: np.float32, mask: np.ndarray | None, y: np.ndarray) -> None:
    np.multiply(x, factor, y)
    if mask is not None:
        np.add(y, mask, y)


def _nan_to_zero(y: np.ndarray) -> None:
    np.putmask(y, np.isnan(y), 0)


@kernel("Softmax", domain="outrider", dtypes={0: {"float32"}}, parse=_parse_masked, compiled="softmax")
def masked_softmax(b: Bind, p: Masked) -> None:
    """`outrider::Softmax` [x, mask?]: softmax(x * factor + mask) along `axis` of the shape that both broadcast to.

    Fusion makes it of a softmax and what stands before it; the mask is float32.
    """
    x, mask = b.array(0), b.array(1) if b.has(1) else None
    shape = x.shape if mask is None else np.broadcast_shapes(x.shape, mask.shape)
    library = b.compiled("softmax")
    y = b.out(0, shape, np.float32, order_of(x) if x.shape == shape else None)
    if not y.size:
        return
    axis = p.axis % max(1, y.ndim)
    if library is not None:
        in_one_pass(b, library, x, y, axis, _NAN_TO_ZERO if p.nan_to_zero else 0, p.factor, mask)
        return
    b.step(_scaled, x, np.float32(p.factor), mask, y)
    _in_shares(b, _softmax, axis, y, y, b.scratch(y.shape[:axis] + (1,) + y.shape[axis + 1 :], y.dtype))
    if p.nan_to_zero:
        b.step(_nan_to_zero, y)
