"""What several kernel families share: axes, precisions, views that never freeze stale data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported
from outrider.providers.wire.graph import Node


def axis_of(axis: int, rank: int, node: Node) -> int:
    """`axis` counted from 0. ValueError where it is out of [-rank, rank)."""
    if not -rank <= axis < rank:
        raise ValueError(f"{node.label} {node.name}: axis {axis} is out of range for rank {rank}")
    return axis % rank if rank else 0


def axes_of(axes: Iterable[int], rank: int, node: Node) -> tuple[int, ...]:
    """Sorted, distinct axes counted from 0. ValueError where one is out of range or given twice."""
    plain = sorted(axis_of(int(axis), rank, node) for axis in axes)
    if len(set(plain)) != len(plain):
        raise ValueError(f"{node.label} {node.name}: an axis is given twice in {tuple(plain)}")
    return tuple(plain)


def parse_axes(node: Node) -> list[int] | None:
    """The attribute `axes`; None where it is omitted."""
    axes = node.attributes.get("axes")
    return None if axes is None else ints(axes)


def is_half(dtype: np.dtype[Any]) -> bool:
    """True for float16 and bfloat16: such work is done in float32 and rounded once."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def working(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that arithmetic of several steps runs in: float32 for the 16-bit floats, else `dtype` itself."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def convert(y: np.ndarray, x: np.ndarray) -> None:
    """Step: `x` into `y` with a C cast (integers wrap, floats round to nearest even)."""
    np.copyto(y, x, "unsafe")


def maximum(x: Any, y: Any, out: np.ndarray) -> None:
    """Step: np.maximum, which (unlike other ufuncs) takes its output by keyword only."""
    np.maximum(x, y, out=out)


def minimum(x: Any, y: Any, out: np.ndarray) -> None:
    """Step: np.minimum, which (unlike other ufuncs) takes its output by keyword only."""
    np.minimum(x, y, out=out)


def clamp(b: Bind, x: np.ndarray, y: np.ndarray, low: Any = None, high: Any = None) -> None:
    """Record min(max(x, low), high) -> y; bounds are scalars or rank-0 arrays of x's dtype; y may be x.

    NaN stays NaN, and `high` wins where low > high. One pass: on float32 and integers numpy's clip is 1.4 to 7 times as
    fast as its maximum with a scalar; it is slow on float16 and unknown to the types of `ml_dtypes`.
    """
    if x.dtype == np.float32 or x.dtype.kind in "iu":
        whole = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        lowest = x.dtype.type(whole.min if whole else -np.inf) if low is None else low
        highest = x.dtype.type(whole.max if whole else np.inf) if high is None else high
        b.step(np.clip, x, lowest, highest, y)
        return
    if low is not None:
        b.step(maximum, x, low, y)
        x = y
    if high is not None:
        b.step(minimum, x, high, y)


def widened(b: Bind, x: np.ndarray) -> np.ndarray:
    """`x`, or for a 16-bit float a float32 scratch copy that a step refreshes."""
    if not is_half(x.dtype):
        return x
    wide = b.scratch(x.shape, np.float32)
    b.step(convert, wide, x)
    return wide


def viewed(x: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """A view of `x` with another shape, None where only a copy has it."""
    view = x.view()
    try:
        view.shape = tuple(shape)  # unlike reshape(), never copies
    except AttributeError:
        return None
    return view


def reshape_into(b: Bind, i: int, x: np.ndarray, shape: Sequence[int]) -> None:
    """Output i is `x` with another shape: a view where memory allows, else a copy in the output's own place."""
    view = viewed(x, shape)
    if view is not None:
        b.view(i, view)
        return
    y = b.out(i, shape, x.dtype)
    b.copy(y.reshape(x.shape), x)  # y is C-contiguous: a view


def scalar(b: Bind, x: np.ndarray) -> np.ndarray:
    """A one-element input as a rank-0 view, so that it does not raise the rank of what it is combined with."""
    return b.reshaped(x, ())


def ints(value: Any) -> list[int]:
    """An attribute or constant of integers as a list; one number counts as a list of one."""
    return [int(v) for v in np.asarray(value).reshape(-1).tolist()]


def refuse(node: Node, *names: str) -> None:
    """Raise Unsupported where one of these attributes is given."""
    for name in names:
        if name in node.attributes:
            raise Unsupported(f"attribute {name} of opset {node.opset} is not taken; opset 21 has another form")
