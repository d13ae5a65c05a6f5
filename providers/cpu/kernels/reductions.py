"""Reductions over axes. 16-bit floats are accumulated in float32 and rounded once; integers wrap in their own dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, kernel, order_like
from outrider.providers.cpu.kernels.reducing import LARGEST, MAGNITUDES, SMALLEST, SQUARES, SUM, compiled_reduction
from outrider.providers.cpu.kernels.support import axes_of, convert, ints, working
from outrider.providers.wire.dtypes import NUMBERS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Reduction:
    """Attributes of the Reduce operators; `axes` is None where they are an input (from 18 on) or left out."""

    axes: tuple[int, ...] | None
    keepdims: bool
    noop: bool


def _parse(node: Node) -> Reduction:
    axes = node.attributes.get("axes")
    return Reduction(
        None if axes is None else tuple(ints(axes)),
        bool(node.attributes.get("keepdims", 1)),
        bool(node.attributes.get("noop_with_empty_axes", 0)),
    )


def reduced(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """The shape after reducing over `axes`."""
    if keepdims:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def _order(x: np.ndarray, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...] | None:
    """The memory order of the result: that of x."""
    order = order_like(x)
    if order is None or keepdims:
        return order
    kept = [axis for axis in order if axis not in axes]
    places = {axis: place for place, axis in enumerate(sorted(kept))}
    return tuple(places[axis] for axis in kept)


def _axes(b: Bind, p: Reduction, rank: int) -> tuple[int, ...]:
    given: tuple[int, ...] | None = p.axes
    if given is None and b.has(1):
        given = tuple(ints(b.const(1)))
    if not given:
        return () if p.noop else tuple(range(rank))
    return axes_of(given, rank, b.node)


# fn(b, x, axes, y): record steps that reduce x over axes into y, whose reduced axes are kept as 1; both with any
# strides and the working dtype of x. No axes: the element-wise part of the operator is still done.
Body = Callable[[Bind, np.ndarray, tuple[int, ...], np.ndarray], None]


def _ufunc(b: Bind, ufunc: Any, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    # The order of a sum follows the strides, and its last bits follow the order: whether x is a view of another value
    # or arrived from elsewhere must not show.
    b.step(ufunc.reduce, x if x.dtype.kind in "iub" else b.contiguous(x), axes, x.dtype, y, True)


def _sum(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    if not compiled_reduction(b, x, axes, y, SUM):
        _ufunc(b, np.add, x, axes, y)


def _prod(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    _ufunc(b, np.multiply, x, axes, y)


def _mapped(b: Bind, ufunc: Any, *x: np.ndarray) -> np.ndarray:
    """ufunc of x, in scratch."""
    made = b.scratch(x[0].shape, x[0].dtype)
    b.step(ufunc, *x, made)
    return made


def _mean(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    count = x.size // y.size if y.size else 0
    if compiled_reduction(b, x, axes, y, SUM, count):
        return
    _sum(b, x, axes, y)
    if x.dtype.kind in "iu":
        b.step(_truncated, y, max(count, 1))
    elif count != 1:
        b.step(np.divide, y, x.dtype.type(count), y)  # 0 / 0 of an empty mean is NaN


def _truncated(y: np.ndarray, count: int) -> None:
    np.copyto(y, np.sign(y) * (np.abs(y) // count) if y.dtype.kind == "i" else y // count, "unsafe")


def _l1(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    if not compiled_reduction(b, x, axes, y, MAGNITUDES):
        _sum(b, _mapped(b, np.absolute, x), axes, y)


def _sum_square(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    if not compiled_reduction(b, x, axes, y, SQUARES):
        _sum(b, _mapped(b, np.multiply, x, x), axes, y)


def _root(y: np.ndarray) -> None:
    np.copyto(y, np.sqrt(y), "unsafe")  # integers: the root is truncated


def _l2(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    if not compiled_reduction(b, x, axes, y, SQUARES, root=True):
        _sum_square(b, x, axes, y)
        b.step(_root, y)


def _logarithm(y: np.ndarray) -> None:
    np.copyto(y, np.log(y), "unsafe")


def _log_sum(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    _sum(b, x, axes, y)
    b.step(_logarithm, y)


def _log_sum_exp_step(x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    wide = x if x.dtype.kind == "f" else x.astype(np.float64)
    if x.size == 0:
        y.fill(-np.inf if y.dtype.kind == "f" else 0)
        return
    top = wide.max(axes, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0)  # inf - inf would be NaN
    np.copyto(y, np.log(np.exp(wide - shift).sum(axes, keepdims=True)) + shift, "unsafe")


def _log_sum_exp(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    b.step(_log_sum_exp_step, b.contiguous(x), axes, y)


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _max(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    if compiled_reduction(b, x, axes, y, LARGEST):
        return
    if x.size:
        _ufunc(b, np.maximum, x, axes, y)
    else:
        b.step(y.fill, _lowest(x.dtype))


def _min(b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray) -> None:
    if compiled_reduction(b, x, axes, y, SMALLEST):
        return
    if x.size:
        _ufunc(b, np.minimum, x, axes, y)
    else:
        b.step(y.fill, _highest(x.dtype))


_NUMPY_ONLY = (_prod, _log_sum_exp)


def _register(op_type: str, body: Body, dtypes: frozenset[str] = NUMBERS) -> None:
    @kernel(op_type, dtypes={0: dtypes}, parse=_parse, compiled=() if body in _NUMPY_ONLY else "reduce")
    def bind(b: Bind, p: Reduction) -> None:
        x = b.array(0)
        axes = _axes(b, p, x.ndim)
        y = b.out(0, reduced(x.shape, axes, p.keepdims), x.dtype, _order(x, axes, p.keepdims))
        kept = y if p.keepdims else np.expand_dims(y, axes)
        wide = working(x.dtype)
        if wide == x.dtype:
            body(b, x, axes, kept)
            return
        source, total = b.scratch(x.shape, wide), b.scratch(kept.shape, wide)
        b.step(convert, source, x)
        body(b, source, axes, total)
        b.step(convert, kept, total)


for _name, _body, _dtypes in (
    ("ReduceSum", _sum, NUMBERS),
    ("ReduceMean", _mean, NUMBERS),
    ("ReduceProd", _prod, NUMBERS),
    ("ReduceMax", _max, NUMBERS | {"bool"}),
    ("ReduceMin", _min, NUMBERS | {"bool"}),
    ("ReduceL1", _l1, NUMBERS),
    ("ReduceL2", _l2, NUMBERS),
    ("ReduceSumSquare", _sum_square, NUMBERS),
    ("ReduceLogSum", _log_sum, NUMBERS),
    ("ReduceLogSumExp", _log_sum_exp, NUMBERS),
):
    _register(_name, _body, _dtypes)
