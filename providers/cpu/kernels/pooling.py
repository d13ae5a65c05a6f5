"""Poolings over the spatial axes of [N, C, *spatial]: maximum, average, p-norm, tap by tap; global ones reduce."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, channels_last, kernel
from outrider.providers.cpu.kernels.precision import cast, finish, target, wide
from outrider.providers.cpu.kernels.reducing import LARGEST, MAGNITUDES, SQUARES, SUM, compiled_reduction
from outrider.providers.cpu.kernels.windows import (
    Geometry,
    Window,
    geometry,
    padded,
    plane,
    plane_strides,
    plane_words,
    sliding,
    window,
)
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Pooling:
    """Attributes of the windowed poolings; each operator reads its own."""

    window: Window
    column_major: bool
    count_padding: bool
    power: int


def _parse(node: Node) -> Pooling:
    parsed = window(node)
    if parsed.kernel is None:
        raise Unsupported("kernel_shape is missing")
    power = node.attributes.get("p", 2)
    if power < 1:
        raise Unsupported(f"p is {power}")
    return Pooling(
        parsed,
        bool(node.attributes.get("storage_order", 0)),
        bool(node.attributes.get("count_include_pad", 0)),
        int(power),
    )


def _views(x: np.ndarray, g: Geometry) -> list[np.ndarray]:
    """The input of every tap, [N, C, *out] each."""
    windows = sliding(x, g)
    return [windows[(slice(None), slice(None)) + tap] for tap in g.taps()]


def _lowest(dtype: np.dtype[Any]) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _maximum(views: list[np.ndarray], y: np.ndarray) -> None:
    np.copyto(y, views[0])
    for x in views[1:]:
        np.maximum(y, x, out=y)


def _maximum_at(
    views: list[np.ndarray], numbers: list[np.ndarray], y: np.ndarray, at: np.ndarray, larger: np.ndarray
) -> None:
    """Maxima and where they are; the first of equals, and never the padding."""
    np.copyto(y, views[0])
    np.copyto(at, numbers[0])
    for x, number in zip(views[1:], numbers[1:], strict=True):
        np.greater(x, y, larger)
        np.logical_or(larger, at < 0, larger)
        np.logical_and(larger, number >= 0, larger)
        np.copyto(y, x, where=larger)
        np.copyto(at, number, where=larger)


def _positions(g: Geometry, planes: int, column_major: bool) -> list[np.ndarray]:
    """For every tap the flat index of the input it reads, -1 in the padding; broadcastable to [planes, *out]."""
    size = math.prod(g.spatial)
    order = range(len(g.spatial)) if column_major else reversed(range(len(g.spatial)))
    weight, step = [0] * len(g.spatial), 1
    for axis in order:
        weight[axis], step = step, step * g.spatial[axis]
    base = np.arange(planes, dtype=np.int64).reshape((planes,) + (1,) * len(g.out)) * size
    numbers = []
    for tap in g.taps():
        flat, inside = np.zeros((1,) * len(g.out), np.int64), np.ones((1,) * len(g.out), bool)
        for axis, t in enumerate(tap):
            at = np.arange(g.out[axis]) * g.strides[axis] + t * g.dilations[axis] - g.begin[axis]
            shape = (1,) * axis + (-1,) + (1,) * (len(g.out) - axis - 1)
            flat = flat + (at * weight[axis]).reshape(shape)
            inside = inside & ((at >= 0) & (at < g.spatial[axis])).reshape(shape)
        numbers.append(np.where(inside, flat + base, -1))
    return numbers


def _compiled(
    b: Bind, x: np.ndarray, g: Geometry, what: int, divisor: np.ndarray | None = None, root: bool = False
) -> bool:
    """Record output 0 by the compiled library; False where that does not take it.

    It takes float32, one or two spatial axes, eight or more channels. `divisor`: float32 [*out].
    """
    library = b.compiled("pool")
    shape = x.shape[:2] + g.out
    if library is None or x.dtype != np.float32 or x.ndim > 4 or x.shape[1] < 8 or 0 in shape or not x.size:
        return False
    order = channels_last(x.ndim)
    y = b.out(0, shape, x.dtype, order)
    place = y if y.strides[1] == 4 else b.scratch(shape, x.dtype, order)
    if x.strides[1] != 4:
        x = b.contiguous(x, order)
    rows = x.shape[0] * plane(g.out, 1)[0]
    tasks = library.tasks(rows, y.size * (0.3 + 0.1 * math.prod(g.kernel)), 4)
    b.step(
        library.call(
            "or_pool", tasks, place, x, divisor, what, root, x.shape[1], x.shape[0], tasks,
            *plane_strides(place), *plane_strides(x), *plane_words(g),
        )
    )  # fmt: skip
    if place is not y:
        b.copy(y, place)
    return True


@kernel("MaxPool", dtypes={0: FLOATS | {"int8", "uint8"}}, parse=_parse, compiled="pool")
def max_pool(b: Bind, p: Pooling) -> None:
    """ONNX MaxPool-22, with Indices."""
    x = b.array(0)
    g = geometry(p.window, x.shape[2:])
    if not b.wanted(1) and _compiled(b, x, g, LARGEST):
        return
    y = b.out(0, x.shape[:2] + g.out, x.dtype)
    at = b.out(1, y.shape, np.int64) if b.wanted(1) else None
    if not y.size:
        return
    total = target(b, y)
    views = _views(padded(b, x, g, _lowest(x.dtype), total.dtype), g)
    if at is None:
        b.step(_maximum, views, total)
    else:
        planes = x.shape[0] * x.shape[1]
        numbers = [n.reshape(x.shape[:2] + n.shape[1:]) for n in _positions(g, planes, p.column_major)]
        b.step(_maximum_at, views, numbers, total, at, b.scratch(y.shape, bool))
    finish(b, y, total)


def _sum(views: list[np.ndarray], y: np.ndarray) -> None:
    np.copyto(y, views[0])
    for x in views[1:]:
        np.add(y, x, y)


def _counts(g: Geometry, count_padding: bool, dtype: Any) -> np.ndarray:
    """How many elements each window averages, [*out]. What ceil_mode adds beyond the padding never counts."""
    counts = []
    for axis, size in enumerate(g.spatial):
        taps = np.arange(g.kernel[axis]) * g.dilations[axis]
        at = np.arange(g.out[axis])[:, None] * g.strides[axis] + taps - g.begin[axis]
        low, high = (-g.begin[axis], size + g.end[axis]) if count_padding else (0, size)
        counts.append(((at >= low) & (at < high)).sum(axis=1))
    counted: np.ndarray = np.maximum(reduce(np.multiply.outer, counts), 1).astype(dtype)
    return counted


@kernel("AveragePool", dtypes={0: FLOATS}, parse=_parse, compiled="pool")
def average_pool(b: Bind, p: Pooling) -> None:
    """ONNX AveragePool-22."""
    x = b.array(0)
    g = geometry(p.window, x.shape[2:])
    if _compiled(b, x, g, SUM, _counts(g, p.count_padding, np.float32)):
        return
    y = b.out(0, x.shape[:2] + g.out, x.dtype)
    if not y.size:
        return
    total = target(b, y)
    b.step(_sum, _views(padded(b, x, g, 0, total.dtype), g), total)
    b.step(np.divide, total, _counts(g, p.count_padding, total.dtype), total)
    finish(b, y, total)


def _sum_of_powers(views: list[np.ndarray], power: int, y: np.ndarray, term: np.ndarray) -> None:
    y.fill(0)
    for x in views:
        np.abs(x, term)
        if power != 1:
            np.power(term, power, term)
        np.add(y, term, y)
    if power != 1:
        np.power(y, 1 / power, y)


@kernel("LpPool", since=2, dtypes={0: FLOATS}, parse=_parse, compiled="pool")
def lp_pool(b: Bind, p: Pooling) -> None:
    """ONNX LpPool-22."""
    x = b.array(0)
    g = geometry(p.window, x.shape[2:])
    if p.power <= 2 and _compiled(b, x, g, MAGNITUDES if p.power == 1 else SQUARES, None, p.power == 2):
        return
    y = b.out(0, x.shape[:2] + g.out, x.dtype)
    if not y.size:
        return
    total = target(b, y)
    views = _views(padded(b, x, g, 0, total.dtype), g)
    b.step(_sum_of_powers, views, p.power, total, b.scratch(y.shape, total.dtype))
    finish(b, y, total)


def _global_place(b: Bind) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    x = b.array(0)
    if x.ndim < 2:
        raise ValueError(f"a global pooling needs batch and channels, its input is {list(x.shape)}")
    y = b.out(0, x.shape[:2] + (1,) * (x.ndim - 2), x.dtype)
    return x, y, tuple(range(2, x.ndim))


@kernel("GlobalMaxPool", dtypes={0: FLOATS}, compiled="reduce")
def global_max_pool(b: Bind, p: None) -> None:
    """ONNX GlobalMaxPool-22, any rank."""
    x, y, axes = _global_place(b)
    if not compiled_reduction(b, x, axes, y, LARGEST):
        b.step(np.maximum.reduce, x, axes, None, y, True)


@kernel("GlobalAveragePool", dtypes={0: FLOATS}, compiled="reduce")
def global_average_pool(b: Bind, p: None) -> None:
    """ONNX GlobalAveragePool-22, any rank."""
    x, y, axes = _global_place(b)
    if compiled_reduction(b, x, axes, y, SUM, math.prod(x.shape[2:])):
        return
    total = target(b, y)
    b.step(np.add.reduce, b.contiguous(cast(b, x, wide(x.dtype))), axes, None, total, True)
    b.step(np.divide, total, max(1, math.prod(x.shape[2:])), total)
    finish(b, y, total)


def _global_norm(x: np.ndarray, power: int, axes: tuple[int, ...], y: np.ndarray, term: np.ndarray) -> None:
    np.abs(x, term)
    if power != 1:
        np.power(term, power, term)
    np.add.reduce(term, axes, None, y, keepdims=True)
    if power != 1:
        np.power(y, 1 / power, y)


@kernel(
    "GlobalLpPool", since=2, dtypes={0: FLOATS}, parse=lambda node: int(node.attributes.get("p", 2)), compiled="reduce"
)
def global_lp_pool(b: Bind, p: int) -> None:
    """ONNX GlobalLpPool-22, any rank."""
    x, y, axes = _global_place(b)
    if p <= 2 and compiled_reduction(b, x, axes, y, MAGNITUDES if p == 1 else SQUARES, root=p == 2):
        return
    total = target(b, y)
    b.step(_global_norm, cast(b, x, total.dtype), p, axes, total, b.scratch(x.shape, total.dtype))
    finish(b, y, total)


def _scatter(x: np.ndarray, at: np.ndarray, y: np.ndarray) -> None:
    y.fill(0)
    y[at.reshape(-1)] = x.reshape(-1)


@kernel("MaxUnpool", since=9, dtypes={0: FLOATS}, parse=_parse)
def max_unpool(b: Bind, p: Pooling) -> None:
    """ONNX MaxUnpool-22: values go back to the indices that MaxPool gave; the rest is 0."""
    x = b.array(0)
    w, rank = p.window, x.ndim - 2
    assert w.kernel is not None
    strides, pads = w.strides or (1,) * rank, w.pads or (0,) * (2 * rank)
    natural = [(n - 1) * strides[i] + w.kernel[i] - pads[i] - pads[rank + i] for i, n in enumerate(x.shape[2:])]
    shape = x.shape[:2] + tuple(natural)
    if b.has(2):
        shape = tuple(int(n) for n in b.const(2))
    y = b.out(0, shape, x.dtype)
    at = b.array(1)
    if shape != x.shape[:2] + tuple(natural):
        # The indices count in the natural shape; in a larger output the same coordinates have other numbers.
        b.step(_scatter_within, x, at, x.shape[:2] + tuple(natural), y)
    else:
        b.step(_scatter, x, at, y.reshape(-1))


def _scatter_within(x: np.ndarray, at: np.ndarray, natural: tuple[int, ...], y: np.ndarray) -> None:
    y.fill(0)
    y[np.unravel_index(at.reshape(-1), natural)] = x.reshape(-1)
