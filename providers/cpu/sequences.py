"""Sequences and optionals (ONNX opsets 11 to 18), and maps: values of the unbound stretch.

They are held as lists, None, dicts, and arrays.

A sequence operator makes a new list and never changes the one it got; elements are shared, not copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from outrider.providers.contract import Node
from outrider.providers.cpu.items import fixed_size
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.wire.dtypes import BY_NUMBER, is_tensor

POSITIONS = ("int32", "int64")


def _element_dtype(node: Node) -> str:
    number = node.attributes.get("dtype", 1)
    if number not in BY_NUMBER or number == 0:
        raise Unsupported(f"SequenceEmpty: {number} is no element type")
    return BY_NUMBER[number]


@kernel("SequenceEmpty", since=11, parse=_element_dtype)
def sequence_empty(b: Bind, _: str) -> None:
    """An empty list. SequenceEmpty-11."""
    b.value(0, list)


def _all_given(node: Node) -> None:
    if any(not value.name for value in node.inputs):
        raise Unsupported("SequenceConstruct: an element is omitted")
    dtypes = {value.dtype for value in node.inputs if is_tensor(value.dtype)}
    if len(dtypes) > 1:
        raise Unsupported(f"SequenceConstruct: elements of different dtypes, {', '.join(sorted(dtypes))}")


@kernel("SequenceConstruct", since=11, parse=_all_given)
def sequence_construct(b: Bind, _: None) -> None:
    """The inputs as a list, in order. SequenceConstruct-11."""
    b.value(0, lambda: list(b.inputs))


@kernel("SequenceLength", since=11)
def sequence_length(b: Bind, _: None) -> None:
    """How many elements, int64 scalar. SequenceLength-11."""
    b.dynamic()
    b.value(0, lambda: np.asarray(len(_sequence(b, 0)), np.int64))


@kernel("SequenceAt", since=11, dtypes={1: POSITIONS})
def sequence_at(b: Bind, _: None) -> None:
    """The element at a position in [-n, n-1]. SequenceAt-11."""
    b.dynamic()
    items = _sequence(b, 0)
    at = _position(b, 1, len(items), len(items) - 1)
    b.value(0, lambda: items[at])


@kernel("SequenceInsert", since=11, dtypes={2: (*POSITIONS, "undefined")})
def sequence_insert(b: Bind, _: None) -> None:
    """A list with input 1 put before a position in [-n, n], appended when omitted. SequenceInsert-11."""
    b.dynamic()
    items, item = _sequence(b, 0), b.array(1)
    if items and isinstance(items[0], np.ndarray) and items[0].dtype != item.dtype:
        raise ValueError(f"cannot insert an element of {item.dtype} into a sequence of {items[0].dtype}")
    at = _position(b, 2, len(items), len(items)) if b.has(2) else len(items)
    b.value(0, lambda: [*items[:at], item, *items[at:]])


@kernel("SequenceErase", since=11, dtypes={1: (*POSITIONS, "undefined")})
def sequence_erase(b: Bind, _: None) -> None:
    """A list without the element at a position in [-n, n-1], the last one when omitted. SequenceErase-11."""
    b.dynamic()
    items = _sequence(b, 0)
    if not items:
        raise ValueError("cannot erase from an empty sequence")
    at = _position(b, 1, len(items), len(items) - 1) if b.has(1) else len(items) - 1
    b.value(0, lambda: [*items[:at], *items[at + 1 :]])


@dataclass(frozen=True)
class _Split:
    axis: int
    keepdims: bool


def _split_attributes(node: Node) -> _Split:
    return _Split(node.attributes.get("axis", 0), bool(node.attributes.get("keepdims", 1)))


@kernel("SplitToSequence", since=11, dtypes={1: (*POSITIONS, "undefined")}, parse=_split_attributes)
def split_to_sequence(b: Bind, p: _Split) -> None:
    """Pieces of a tensor along an axis; `keepdims` counts only where `split` is omitted. SplitToSequence-11, -24."""
    b.dynamic()
    x = b.array(0)
    axis = _axis(p.axis, -x.ndim, x.ndim - 1)
    extent = x.shape[axis]
    if not b.has(1):
        pieces = [np.take(x, [i] if p.keepdims else i, axis) for i in range(extent)]
        b.value(0, lambda: [np.asarray(piece) for piece in pieces])
        return
    split = b.const(1)
    if split.ndim > 1:
        raise ValueError(f"split must be a scalar or a list, its shape is {split.shape}")
    if split.ndim == 0:
        chunk = int(split)
        if chunk <= 0:
            raise ValueError(f"a scalar split must be positive, it is {chunk}")
        edges = [*range(0, extent, chunk), extent] if extent else [0]
    else:
        sizes = split.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != extent:
            raise ValueError(f"split {sizes} must be sizes that add up to {extent}, the extent of axis {axis}")
        edges = np.cumsum([0, *sizes]).tolist()
    before = (slice(None),) * axis
    pairs = pairwise(edges)
    b.value(0, lambda: [np.ascontiguousarray(x[(*before, slice(start, stop))]) for start, stop in pairs])


@dataclass(frozen=True)
class _Concat:
    axis: int
    new_axis: bool


def _concat_attributes(node: Node) -> _Concat:
    if "axis" not in node.attributes:
        raise Unsupported("ConcatFromSequence: attribute axis is missing")
    return _Concat(node.attributes["axis"], bool(node.attributes.get("new_axis", 0)))


@kernel("ConcatFromSequence", since=11, parse=_concat_attributes)
def concat_from_sequence(b: Bind, p: _Concat) -> None:
    """The elements joined along an axis, or stacked on a new one. ConcatFromSequence-11."""
    b.dynamic()
    items = _sequence(b, 0)
    if not items:
        raise ValueError("cannot concatenate an empty sequence")
    rank = items[0].ndim
    if p.new_axis:
        axis = _axis(p.axis, -rank - 1, rank)
        b.value(0, lambda: np.stack(items, axis))
    else:
        axis = _axis(p.axis, -rank, rank - 1)
        b.value(0, lambda: np.concatenate(items, axis))


@kernel("Optional", since=15)
def optional(b: Bind, _: None) -> None:
    """The input itself, or an empty optional without one. Optional-15."""
    if b.has(0) and fixed_size(b.inputs[0]):
        b.view(0, b.array(0))
    else:
        b.value(0, lambda: b.inputs[0] if b.inputs else None)


@kernel("OptionalHasElement", since=15)
def optional_has_element(b: Bind, _: None) -> None:
    """Whether there is an element, bool scalar; an omitted input has none. OptionalHasElement-15, -18."""
    b.fixed(0, np.asarray(b.has(0)))


@kernel("OptionalGetElement", since=15)
def optional_get_element(b: Bind, _: None) -> None:
    """The element; an empty optional is an error. OptionalGetElement-15, -18."""
    if not b.has(0):
        raise ValueError("the optional is empty: ask OptionalHasElement first")
    if fixed_size(b.inputs[0]):
        b.view(0, b.array(0))
    else:
        b.value(0, lambda: b.inputs[0])


def _classes(node: Node) -> dict[Any, int]:
    """Key -> its column for ZipMap, in the order of keys, which is onnxruntime's too."""
    found = [node.attributes[name] for name in ("classlabels_int64s", "classlabels_strings") if name in node.attributes]
    keys = [list(labels) for labels in found if len(labels)]
    if len(keys) != 1:
        raise Unsupported("ZipMap: it needs either classlabels_int64s or classlabels_strings")
    columns = {key.decode() if isinstance(key, bytes) else key: column for column, key in enumerate(keys[0])}
    if len(columns) < len(keys[0]):
        raise Unsupported("ZipMap: it names a class twice")
    return dict(sorted(columns.items()))


@kernel("ZipMap", domain="ai.onnx.ml", dtypes={0: ("float32",)}, parse=_classes)
def zip_map(b: Bind, columns: dict[Any, int]) -> None:
    """A map from class to score for each row of scores; one row may come without its axis. ai.onnx.ml ZipMap-1."""
    b.dynamic()
    x = b.array(0)
    if x.ndim not in (1, 2) or x.shape[-1] != len(columns):
        raise ValueError(f"scores of shape {list(x.shape)} are not one for each of {len(columns)} classes")
    rows = x.reshape(-1, len(columns))
    b.value(0, lambda: [{key: row[column] for key, column in columns.items()} for row in rows])


def _sequence(b: Bind, i: int) -> list[Any]:
    items = b.inputs[i]
    if not isinstance(items, list):
        raise TypeError(f"input {i} must be a sequence, it is {type(items).__name__}")
    return items


def _position(b: Bind, i: int, length: int, highest: int) -> int:
    """A position counted from the front, checked."""
    position = b.const(i)
    if position.size != 1:
        raise ValueError(f"the position must be one number, its shape is {position.shape}")
    at = int(position.reshape(()))
    if not -length <= at <= highest:
        raise ValueError(f"position {at} is outside [{-length}, {highest}] of a sequence of {length}")
    return at + length if at < 0 else at


def _axis(axis: int, lowest: int, highest: int) -> int:
    if not lowest <= axis <= highest:
        raise ValueError(f"axis {axis} is outside [{lowest}, {highest}]")
    return axis - lowest if axis < 0 else axis
