"""Operators that arrange elements anew: joining, padding, repeating, and making tensors from a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel, order_like
from outrider.providers.cpu.kernels.support import axis_of, convert, ints, parse_axes, scalar
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.graph import Node

_SMALL = 65536  # bytes: what is known when a node is bound is kept up to here, and made in the run beyond


def _known(b: Bind, shape: Sequence[int], dtype: np.dtype[Any], fill: Any) -> None:
    """Output 0 is what `fill(array)` makes of an array: a constant where small, else work of every run."""
    if math.prod(shape) * dtype.itemsize <= _SMALL:
        made = np.empty(tuple(shape), dtype)
        fill(made)
        b.fixed(0, made)
    else:
        b.step(fill, b.out(0, shape, dtype))


def _parse_constant(node: Node) -> np.ndarray:
    attributes = node.attributes
    for name, dtype in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if name in attributes:
            return np.array(attributes[name], dtype)
    for name in ("value_string", "value_strings"):
        if name in attributes:
            return np.array(attributes[name], object)
    value = attributes.get("value")
    if not isinstance(value, np.ndarray):
        raise Unsupported("a constant without value, or a sparse one")
    return value


@kernel("Constant", parse=_parse_constant)
def constant(b: Bind, p: np.ndarray) -> None:
    """Constant-13, without sparse_value."""
    b.fixed(0, p)


@kernel("ConstantOfShape", since=9, parse=lambda node: node.attributes.get("value", np.zeros(1, np.float32)))
def constant_of_shape(b: Bind, p: np.ndarray) -> None:
    """ConstantOfShape-9: one value, float32 zero by default, in the given shape."""
    value = np.asarray(p).reshape(-1)[0]
    _known(b, ints(b.const(0)), np.asarray(p).dtype, lambda y: y.fill(value))


@kernel("Range", since=11)
def range_(b: Bind, p: None) -> None:
    """Range-11: start, start + delta, ... below limit."""
    start, limit, delta = (b.const(i).reshape(-1)[0] for i in range(3))
    dtype = b.array(0).dtype
    wide: Any = int if dtype.kind in "iu" else float
    first, last, step = wide(start), wide(limit), wide(delta)
    if step == 0:
        raise ValueError(f"Range {b.node.name}: delta is 0")
    count = max(-((first - last) // step) if wide is int else math.ceil((last - first) / step), 0)

    def fill(y: np.ndarray) -> None:
        np.copyto(y, first + np.arange(count) * step, "unsafe")

    _known(b, (count,), dtype, fill)


def _parse_eye(node: Node) -> tuple[str, int]:
    number = node.attributes.get("dtype")
    return "" if number is None else BY_NUMBER[int(number)], int(node.attributes.get("k", 0))


@kernel("EyeLike", since=9, parse=_parse_eye)
def eye_like(b: Bind, p: tuple[str, int]) -> None:
    """EyeLike-22: ones on the k-th diagonal of a matrix of the input's shape."""
    x = b.array(0)
    rows, columns = x.shape
    dtype = numpy_dtype(p[0]) if p[0] else x.dtype
    _known(b, (rows, columns), dtype, lambda y: convert(y, np.eye(rows, columns, p[1], np.uint8)))


# Joining and repeating ----------------------------------------------------------------------------------------------
@kernel("Concat", parse=lambda node: int(node.attributes.get("axis", 1)))
def concat(b: Bind, p: int) -> None:
    """Concat-13: inputs of one rank and dtype, one after the other along `axis`."""
    parts = [b.array(i) for i in range(len(b.inputs))]
    first = parts[0]
    axis = axis_of(p, first.ndim, b.node)
    for part in parts:
        if part.shape[:axis] != first.shape[:axis] or part.shape[axis + 1 :] != first.shape[axis + 1 :]:
            raise ValueError(f"Concat {b.node.name}: shapes {[q.shape for q in parts]} differ beside axis {axis}")
    if len(parts) == 1:
        b.view(0, first)
        return
    total = sum(part.shape[axis] for part in parts)
    order = order_like(max(parts, key=lambda part: part.size))
    y = b.out(0, (*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype, order)
    start = 0
    for part in parts:
        length = part.shape[axis]
        if part.size:
            b.copy(y[(slice(None),) * axis + (slice(start, start + length),)], part)
        start += length


@kernel("Tile", since=6)
def tile(b: Bind, p: None) -> None:
    """Tile-13: `repeats` copies along each axis."""
    x = b.array(0)
    repeats = ints(b.const(1))
    if len(repeats) != x.ndim:
        raise ValueError(f"Tile {b.node.name}: {len(repeats)} repeats for rank {x.ndim}")
    y = b.out(0, [d * r for d, r in zip(x.shape, repeats, strict=True)], x.dtype)
    parts = y.reshape([n for d, r in zip(x.shape, repeats, strict=True) for n in (r, d)])
    b.copy(parts, x[tuple(i for _ in range(x.ndim) for i in (None, slice(None))) + (...,)])


# Padding ------------------------------------------------------------------------------------------------------------
def _parse_pad(node: Node) -> tuple[str, list[int] | None, float]:
    mode = str(node.attributes.get("mode", "constant"))
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise Unsupported(f"mode={mode!r}, the kernel takes 'constant', 'reflect', 'edge' and 'wrap'")
    pads = node.attributes.get("pads", node.attributes.get("paddings"))  # before opset 11
    return mode, None if pads is None else ints(pads), float(node.attributes.get("value", 0.0))


def _pad_pairs(b: Bind, rank: int, pads: list[int] | None) -> list[tuple[int, int]]:
    """(before, after) of each axis."""
    given = ints(b.const(1)) if pads is None else pads
    axes = [axis_of(a, rank, b.node) for a in ints(b.const(3))] if b.has(3) else list(range(rank))
    if len(given) != 2 * len(axes):
        raise ValueError(f"Pad {b.node.name}: {len(given)} pads for {len(axes)} axes")
    pairs = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        pairs[axis] = (given[i], given[i + len(axes)])
    return pairs


def pad_constant(b: Bind, x: np.ndarray, y: np.ndarray, pairs: Sequence[tuple[int, int]], value: np.ndarray) -> None:
    """Record: x in the middle of y, `value` (of one element, their dtype) around it. Negative pads crop."""
    inner: list[slice] = []
    source: list[slice] = []
    for (before, after), length, width in zip(pairs, x.shape, y.shape, strict=True):
        start = max(before, 0)
        stop = max(width - max(after, 0), start)
        source.append(slice(max(-before, 0), max(length + min(after, 0), 0)))
        inner.append(slice(start, stop))
    for axis, (place, width) in enumerate(zip(inner, y.shape, strict=True)):
        for border in (slice(0, place.start), slice(place.stop, width)):
            if border.stop > border.start:
                b.copy(y[(*inner[:axis], border)], value)
    if all(s.stop > s.start for s in inner):
        within: tuple[Any, ...] = (*inner, ...)
        origin: tuple[Any, ...] = (*source, ...)
        b.copy(y[within], x[origin])


def pad_indices(length: int, before: int, after: int, mode: str) -> np.ndarray:
    """Which element of an axis each element of the padded axis is (`mode` is numpy's word for it)."""
    index = np.arange(length)[max(-before, 0) : max(length + min(after, 0), 0)]
    if length == 0 and (before > 0 or after > 0):
        raise ValueError(f"an axis of length 0 cannot be padded with mode {mode!r}")
    padded: np.ndarray = np.pad(index, (max(before, 0), max(after, 0)), mode)  # type: ignore[call-overload]  # wants a literal
    return padded


def _repeatable(length: int, mode: str) -> int:
    """How many elements on each side of an axis are those of one part of it."""
    if length == 0:
        return 0
    return {"reflect": length - 1, "wrap": length}.get(mode, 1 << 62)


def _pad_by_copies(b: Bind, x: np.ndarray, y: np.ndarray, pairs: Sequence[tuple[int, int]], mode: str) -> None:
    """Record: x in the middle of y, then axis by axis the parts before and after, from y itself."""
    region = [slice(before, before + length) for (before, _), length in zip(pairs, x.shape, strict=True)]
    b.copy(y[tuple(region)], x)
    for axis, ((before, after), length) in enumerate(zip(pairs, x.shape, strict=True)):
        stop = before + length
        if mode == "reflect":
            parts = (
                slice(2 * before, before, -1),
                slice(stop - 2, stop - 2 - after if stop - 2 - after >= 0 else None, -1),
            )
        elif mode == "wrap":
            parts = (slice(length, stop), slice(before, before + after))
        else:
            parts = (slice(before, before + 1), slice(stop - 1, stop))
        for place, source, count in zip(
            (slice(0, before), slice(stop, stop + after)), parts, (before, after), strict=True
        ):
            if count:
                b.copy(
                    y[(*region[:axis], place, *region[axis + 1 :])], y[(*region[:axis], source, *region[axis + 1 :])]
                )
        region[axis] = slice(0, stop + after)


@kernel("Pad", parse=_parse_pad)
def pad(b: Bind, p: tuple[str, list[int] | None, float]) -> None:
    """Pad-25: constant, reflect, edge or wrap; negative pads crop."""
    x = b.array(0)
    mode, pads, default = p
    pairs = _pad_pairs(b, x.ndim, pads)
    shape = [d + before + after for d, (before, after) in zip(x.shape, pairs, strict=True)]
    if min(shape, default=0) < 0:
        raise ValueError(f"Pad {b.node.name}: {x.shape} padded by {pairs} has a negative dimension")
    if not any(any(pair) for pair in pairs):
        b.view(0, x)
        return
    y = b.out(0, shape, x.dtype, order_like(x))
    if mode == "constant":
        value = scalar(b, b.array(2)) if b.has(2) else np.array(default, np.float64).astype(x.dtype)
        pad_constant(b, x, y, pairs, value)
        return
    if all(max(pair) <= _repeatable(d, mode) and min(pair) >= 0 for d, pair in zip(x.shape, pairs, strict=True)):
        _pad_by_copies(b, x, y, pairs, mode)
        return
    index = [pad_indices(d, *pair, mode) for d, pair in zip(x.shape, pairs, strict=True)]
    changed = [axis for axis, pair in enumerate(pairs) if any(pair)]
    current = x
    for axis in changed:
        if axis == changed[-1]:
            place = y
        else:
            place = b.scratch((*current.shape[:axis], shape[axis], *current.shape[axis + 1 :]), x.dtype)
        b.step(np.take, current, index[axis], axis, place, "clip")  # indices are right: 'clip' spares a buffer
        current = place


@kernel("CenterCropPad", since=18, parse=parse_axes)
def center_crop_pad(b: Bind, p: list[int] | None) -> None:
    """CenterCropPad-18: cropped or padded with zeros around the centre."""
    x = b.array(0)
    wanted = ints(b.const(1))
    axes = list(range(x.ndim)) if p is None else [axis_of(a, x.ndim, b.node) for a in p]
    shape = list(x.shape)
    pairs = [(0, 0)] * x.ndim
    for axis, length in zip(axes, wanted, strict=True):
        extra = length - x.shape[axis]
        before = extra // 2 if extra >= 0 else -(-extra // 2)
        pairs[axis] = (before, extra - before)
        shape[axis] = length
    pad_constant(b, x, b.out(0, shape, x.dtype), pairs, np.zeros((), x.dtype))


# Selecting ----------------------------------------------------------------------------------------------------------
def _parse_trilu(node: Node) -> bool:
    return bool(node.attributes.get("upper", 1))


@kernel("Trilu", since=14, parse=_parse_trilu)
def trilu(b: Bind, p: bool) -> None:
    """Trilu-14: the upper or lower triangle of the last two axes, from the k-th diagonal."""
    x = b.array(0)
    k = int(b.const(1).reshape(-1)[0]) if b.has(1) else 0
    difference = np.arange(x.shape[-1]) - np.arange(x.shape[-2])[:, None]
    outside = difference < k if p else difference > k
    y = b.out(0, x.shape, x.dtype)
    b.copy(y, x)
    b.step(np.copyto, y, np.zeros((), x.dtype), "same_kind", outside)


def _one_hot(indices: np.ndarray, values: np.ndarray, classes: np.ndarray, y: np.ndarray, axis: int) -> None:
    depth = classes.size
    plain = indices.astype(np.int64)
    plain = np.where(plain < 0, plain + depth, plain)
    hot = np.expand_dims(plain, axis) == classes
    np.copyto(y, values[0])
    np.copyto(y, values[1], "same_kind", hot)


@kernel("OneHot", since=9, parse=lambda node: int(node.attributes.get("axis", -1)))
def one_hot(b: Bind, p: int) -> None:
    """OneHot-11: `values[1]` where the new axis equals the index, `values[0]` elsewhere."""
    indices, values = b.array(0), b.array(2)
    depth = int(b.const(1).reshape(-1)[0])
    axis = axis_of(p, indices.ndim + 1, b.node)
    y = b.out(0, (*indices.shape[:axis], depth, *indices.shape[axis:]), values.dtype)
    classes = np.arange(depth).reshape((depth,) + (1,) * (indices.ndim - axis))
    b.step(_one_hot, indices, values, classes, y, axis)


def _parse_reverse(node: Node) -> tuple[int, int]:
    return int(node.attributes.get("batch_axis", 1)), int(node.attributes.get("time_axis", 0))


def _reverse(x: np.ndarray, lengths: np.ndarray, y: np.ndarray) -> None:
    for row, length in enumerate(lengths.tolist()):
        y[row, :length] = x[row, :length][::-1]
        y[row, length:] = x[row, length:]


@kernel("ReverseSequence", since=10, parse=_parse_reverse)
def reverse_sequence(b: Bind, p: tuple[int, int]) -> None:
    """ReverseSequence-10: the first `sequence_lens` steps of each row turned round."""
    x = b.array(0)
    rows = x.shape[p[0]]
    if b.array(1).shape != (rows,):
        raise ValueError(f"there are lengths of shape {list(b.array(1).shape)} for {rows} rows")
    y = b.out(0, x.shape, x.dtype)
    b.step(_reverse, np.moveaxis(x, p, (0, 1)), b.array(1), np.moveaxis(y, p, (0, 1)))


@kernel("NonZero", since=9)
def non_zero(b: Bind, p: None) -> None:
    """NonZero-13: int64 [rank, count], row-major order."""
    b.dynamic()
    x = b.array(0)
    found = np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1) if x.ndim else np.zeros((0, int(x != 0)), np.int64)
    b.step(np.copyto, b.out(0, found.shape, np.int64), found)


@kernel("Compress", since=9, parse=lambda node: node.attributes.get("axis"))
def compress(b: Bind, p: int | None) -> None:
    """Compress-11: the slices along `axis` (or elements of the flat tensor) where the condition holds."""
    b.dynamic()
    x, condition = b.array(0), b.array(1)
    axis = None if p is None else axis_of(int(p), x.ndim, b.node)
    kept = np.compress(condition, x, axis)
    b.step(np.copyto, b.out(0, kept.shape, x.dtype), kept)


def _parse_unique(node: Node) -> tuple[int | None, bool]:
    axis = node.attributes.get("axis")
    return None if axis is None else int(axis), bool(node.attributes.get("sorted", 1))


@kernel("Unique", since=11, parse=_parse_unique)
def unique(b: Bind, p: tuple[int | None, bool]) -> None:
    """Unique-11: values, first places, places of each element among them, counts; sorted or in order of appearance."""
    b.dynamic()
    x = b.array(0)
    axis = None if p[0] is None else axis_of(p[0], x.ndim, b.node)
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not p[1]:
        order = np.argsort(first, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        values = values[order] if axis is None else np.take(values, order, axis)
        first, inverse, counts = first[order], place[inverse], counts[order]
    for i, item in enumerate((values, first, inverse, counts)):
        if b.wanted(i):
            made = np.asarray(item, x.dtype if i == 0 else np.int64)
            b.step(np.copyto, b.out(i, made.shape, made.dtype), made)
