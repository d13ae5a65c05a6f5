"""Operators that pick or place elements by index, and orders: TopK, ArgMax, running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import axis_of, is_half
from outrider.providers.wire.dtypes import NUMBERS
from outrider.providers.wire.graph import Node

_INDEX = frozenset({"int32", "int64"})


def _axis(default: int) -> Callable[[Node], int]:
    return lambda node: int(node.attributes.get("axis", default))


def _check_bounds(indices: np.ndarray, length: int, name: str) -> None:
    if indices.size and (indices.min() < -length or indices.max() >= length):
        worst = int(indices.max()) if indices.max() >= length else int(indices.min())
        raise IndexError(f"{name}: index {worst} is out of range for a dimension of {length}")


def _take(x: np.ndarray, indices: np.ndarray, axis: int, y: np.ndarray, name: str) -> None:
    _check_bounds(indices, x.shape[axis], name)
    np.take(x, indices, axis, y, "wrap")  # checked already; 'raise' would go through a buffer


@kernel("Gather", dtypes={1: _INDEX}, parse=_axis(0))
def gather(b: Bind, p: int) -> None:
    """Gather-13: slices along `axis`, negative indices from the end. IndexError out of range."""
    x, indices = b.array(0), b.array(1)
    axis = axis_of(p, x.ndim, b.node)
    name = f"Gather {b.node.name}"
    before = (slice(None),) * axis
    if indices.ndim == 0 and b.is_const(1):
        index = b.const(1)
        _check_bounds(index, x.shape[axis], name)
        place: tuple[Any, ...] = (*before, int(index), ...)
        b.view(0, x[place])
        return
    y = b.out(0, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    b.step(_take, x, indices, axis, y, name)


def _along(indices: np.ndarray, axis: int, length: int, name: str) -> tuple[Any, ...]:
    """The index tuple of GatherElements and ScatterElements."""
    _check_bounds(indices, length, name)
    grid: list[Any] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    grid[axis] = indices
    return tuple(grid)


def _gather_elements(x: np.ndarray, indices: np.ndarray, axis: int, y: np.ndarray, name: str) -> None:
    np.copyto(y, x[_along(indices, axis, x.shape[axis], name)])


@kernel("GatherElements", since=11, dtypes={1: _INDEX}, parse=_axis(0))
def gather_elements(b: Bind, p: int) -> None:
    """GatherElements-13: y[i][j] = x[index[i][j]][j] for axis 0."""
    x, indices = b.array(0), b.array(1)
    axis = axis_of(p, x.ndim, b.node)
    b.step(_gather_elements, x, indices, axis, b.out(0, indices.shape, x.dtype), f"GatherElements {b.node.name}")


def _nd_index(indices: np.ndarray, shape: tuple[int, ...], batch: int, name: str) -> tuple[Any, ...]:
    """The index tuple of GatherND and ScatterND: the last axis of `indices` addresses axes after the batch ones."""
    depth = indices.shape[-1]
    for i in range(depth):
        _check_bounds(indices[..., i], shape[batch + i], name)
    lead = indices.ndim - 1
    grid = [np.arange(shape[i]).reshape((-1,) + (1,) * (lead - i - 1)) for i in range(batch)]
    return (*grid, *(indices[..., i] for i in range(depth)))


def _gather_nd(x: np.ndarray, indices: np.ndarray, batch: int, y: np.ndarray, name: str) -> None:
    np.copyto(y, x[(*_nd_index(indices, x.shape, batch, name), ...)])


@kernel("GatherND", since=11, dtypes={1: {"int64"}}, parse=lambda node: int(node.attributes.get("batch_dims", 0)))
def gather_nd(b: Bind, p: int) -> None:
    """GatherND-13: the last axis of the indices addresses x after the batch axes."""
    x, indices = b.array(0), b.array(1)
    y = b.out(0, (*indices.shape[:-1], *x.shape[p + indices.shape[-1] :]), x.dtype)
    b.step(_gather_nd, x, indices, p, y, f"GatherND {b.node.name}")


# Scatter ------------------------------------------------------------------------------------------------------------
_REDUCTIONS = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _reduction(node: Node) -> Any:
    name = str(node.attributes.get("reduction", "none"))
    if name not in _REDUCTIONS:
        raise Unsupported(f"reduction={name!r}, the kernel takes {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name]


def _put(y: np.ndarray, index: tuple[Any, ...], updates: np.ndarray, reduction: Any) -> None:
    if reduction is None:
        y[index] = updates
    elif y.dtype == bool:
        _put_bool(y, index, updates, reduction)
    else:
        reduction.at(y, index, updates)


def _put_bool(y: np.ndarray, index: tuple[Any, ...], updates: np.ndarray, reduction: Any) -> None:
    either = reduction in (np.add, np.maximum)
    (np.logical_or if either else np.logical_and).at(y, index, updates)


def _scatter_elements(
    x: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int, y: np.ndarray, reduction: Any, name: str
) -> None:
    np.copyto(y, x)
    _put(y, _along(indices, axis, x.shape[axis], name), updates, reduction)


@kernel("Scatter", since=9, dtypes={1: _INDEX}, parse=lambda node: (int(node.attributes.get("axis", 0)), None))
@kernel(
    "ScatterElements",
    since=11,
    dtypes={1: _INDEX},
    parse=lambda node: (int(node.attributes.get("axis", 0)), _reduction(node)),
)
def scatter_elements(b: Bind, p: tuple[int, Any]) -> None:
    """ScatterElements-18: a copy of x with updates placed (or added, ...) by index along `axis`."""
    x = b.array(0)
    axis = axis_of(p[0], x.ndim, b.node)
    y = b.out(0, x.shape, x.dtype)
    b.step(_scatter_elements, x, b.array(1), b.array(2), axis, y, p[1], f"ScatterElements {b.node.name}")


def _scatter_nd(
    x: np.ndarray, indices: np.ndarray, updates: np.ndarray, y: np.ndarray, reduction: Any, name: str
) -> None:
    np.copyto(y, x)
    _put(y, (*_nd_index(indices, x.shape, 0, name), ...), updates, reduction)


@kernel("ScatterND", since=11, dtypes={1: {"int64"}}, parse=_reduction)
def scatter_nd(b: Bind, p: Any) -> None:
    """ScatterND-18: a copy of x with slices placed (or added, ...) where the last axis of the indices says."""
    x = b.array(0)
    y = b.out(0, x.shape, x.dtype)
    b.step(_scatter_nd, x, b.array(1), b.array(2), y, p, f"ScatterND {b.node.name}")


def _tensor_scatter(
    past: np.ndarray, update: np.ndarray, start: np.ndarray | None, axis: int, circular: bool, y: np.ndarray
) -> None:
    np.copyto(y, past)
    count, room = update.shape[axis], past.shape[axis]
    for row in range(past.shape[0]):
        first = int(start[row]) if start is not None else 0
        places = first + np.arange(count)
        if circular:
            places %= room
        elif first < 0 or first + count > room:
            raise IndexError(f"TensorScatter: {count} from {first} do not fit a dimension of {room}")
        y[row][(slice(None),) * (axis - 1) + (places,)] = update[row]


def _parse_tensor_scatter(node: Node) -> tuple[int, bool]:
    mode = str(node.attributes.get("mode", "linear"))
    if mode not in ("linear", "circular"):
        raise Unsupported(f"mode={mode!r}, the kernel takes 'linear' and 'circular'")
    return int(node.attributes.get("axis", -2)), mode == "circular"


@kernel("TensorScatter", since=24, parse=_parse_tensor_scatter)
def tensor_scatter(b: Bind, p: tuple[int, bool]) -> None:
    """TensorScatter-24: a cache with an update written at each batch row's own position of `axis`."""
    past, update = b.array(0), b.array(1)
    axis = axis_of(p[0], past.ndim, b.node)
    if axis == 0:
        raise ValueError(f"TensorScatter {b.node.name}: axis 0 is the batch")
    start = b.array(2) if b.has(2) else None
    b.step(_tensor_scatter, past, update, start, axis, p[1], b.out(0, past.shape, past.dtype))


# Orders -------------------------------------------------------------------------------------------------------------
def _parse_topk(node: Node) -> tuple[int, bool, int | None]:
    k = node.attributes.get("k")  # before opset 10
    largest = bool(node.attributes.get("largest", 1))
    return int(node.attributes.get("axis", -1)), largest, None if k is None else int(k)


def descending(x: np.ndarray, axis: int) -> np.ndarray:
    """Stable indices from the largest: equal elements keep their order."""
    turned = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    order: np.ndarray = x.shape[axis] - 1 - turned
    return order


def _topk(x: np.ndarray, k: int, axis: int, largest: bool, values: np.ndarray, indices: np.ndarray) -> None:
    keys = x.astype(np.float32) if is_half(x.dtype) else x
    order = descending(keys, axis) if largest else np.argsort(keys, axis, kind="stable")
    first = order[(slice(None),) * axis + (slice(0, k),)]
    np.copyto(indices, first)
    np.copyto(values, np.take_along_axis(x, first, axis))


@kernel("TopK", dtypes={0: NUMBERS}, parse=_parse_topk)
def topk(b: Bind, p: tuple[int, bool, int | None]) -> None:
    """TopK-24: values and int64 indices, in order; of equal elements the lower index first."""
    x = b.array(0)
    axis = axis_of(p[0], x.ndim, b.node)
    k = p[2] if p[2] is not None else int(b.const(1).reshape(-1)[0])
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"TopK {b.node.name}: k={k} of a dimension of {x.shape[axis]}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    b.step(_topk, x, k, axis, p[1], b.out(0, shape, x.dtype), b.out(1, shape, np.int64))


def _parse_arg(node: Node) -> tuple[int, bool, bool]:
    attributes = node.attributes
    return (
        int(attributes.get("axis", 0)),
        bool(attributes.get("keepdims", 1)),
        bool(attributes.get("select_last_index", 0)),
    )


def _last_index(fn: Any, x: np.ndarray, axis: int, y: np.ndarray) -> None:
    np.subtract(x.shape[axis] - 1, fn(np.flip(x, axis), axis), y)


def _register_arg(fn: Any, op_type: str) -> None:
    @kernel(op_type, dtypes={0: NUMBERS}, parse=_parse_arg)
    def bind(b: Bind, p: tuple[int, bool, bool]) -> None:
        x = b.array(0)
        axis = axis_of(p[0], x.ndim, b.node)
        y = b.out(0, (*x.shape[:axis], *((1,) if p[1] else ()), *x.shape[axis + 1 :]), np.int64)
        flat = y.reshape(x.shape[:axis] + x.shape[axis + 1 :])
        if p[2]:
            b.step(_last_index, fn, x, axis, flat)
        else:
            b.step(fn, x, axis, flat)


_register_arg(np.argmax, "ArgMax")
_register_arg(np.argmin, "ArgMin")


def _parse_running(node: Node) -> tuple[bool, bool]:
    return bool(node.attributes.get("exclusive", 0)), bool(node.attributes.get("reverse", 0))


def _running(ufunc: Any, x: np.ndarray, axis: int, y: np.ndarray, dtype: Any) -> None:
    if dtype == y.dtype:
        ufunc.accumulate(x, axis, dtype, y)
    else:
        np.copyto(y, ufunc.accumulate(x.astype(dtype), axis), "unsafe")


def _register_running(ufunc: Any, op_type: str, since: int, start: int) -> None:
    @kernel(op_type, since=since, dtypes={0: NUMBERS}, parse=_parse_running)
    def bind(b: Bind, p: tuple[bool, bool]) -> None:
        x = b.array(0)
        exclusive, reverse = p
        axis = axis_of(int(b.const(1).reshape(-1)[0]), x.ndim, b.node)
        y = b.out(0, x.shape, x.dtype)
        dtype = np.dtype(np.float32) if is_half(x.dtype) else x.dtype
        source, target = (np.flip(x, axis), np.flip(y, axis)) if reverse else (x, y)
        if exclusive:
            lead = (slice(None),) * axis
            b.step(np.copyto, target[(*lead, slice(0, 1))], x.dtype.type(start))
            source, target = source[(*lead, slice(0, -1))], target[(*lead, slice(1, None))]
        if target.size:
            b.step(_running, ufunc, source, axis, target, dtype)


_register_running(np.add, "CumSum", 11, 0)
_register_running(np.multiply, "CumProd", 26, 1)
