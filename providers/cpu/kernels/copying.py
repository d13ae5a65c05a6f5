"""Copies between arrays of one shape and dtype and any strides."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from outrider.providers.cpu.native import Call, Library

_MOST_AXES = 7  # that C walks over, besides the one it copies along
_CHUNK = 1 << 16  # bytes along one axis that are one item of work
_TILE = 16  # elements along one axis that are transposed together

Axis = tuple[int, int, int]  # stride of y, stride of x (bytes), length


def copier(library: Library | None, y: np.ndarray, x: np.ndarray) -> Callable[[], Any]:
    """The step y[...] = x, of one dtype and shapes that broadcast to y's: by the library where it can, else NumPy's."""
    if library is not None and "copy" in library.families and x.dtype == y.dtype:
        call = copy_call(library, y, np.broadcast_to(x, y.shape))
        if call is not None:
            return call
    return partial(np.copyto, y, x)


def joined(y: np.ndarray, x: np.ndarray) -> list[Axis]:
    """The axes by falling stride of y; neighbours that lie alike in both are one, those of length 1 are left out."""
    axes = sorted(zip(y.strides, x.strides, y.shape, strict=True), key=lambda axis: -abs(axis[0]))
    rows: list[Axis] = []
    for axis in axes:
        if axis[2] == 1:
            continue
        if rows:
            outer_y, outer_x, outer = rows[-1]
            if outer_y == axis[0] * axis[2] and outer_x == axis[1] * axis[2]:
                rows[-1] = (axis[0], axis[1], outer * axis[2])
                continue
        rows.append(axis)
    return rows or [(y.itemsize, y.itemsize, 1)]


def _plan(axes: list[Axis], chunked: Axis, chunk: int) -> tuple[np.ndarray, int]:
    """What C walks over, [axis, (count, stride of y, stride of x)], and how many items that are."""
    y_step, x_step, n = chunked
    rows = [(count, y_stride, x_stride) for y_stride, x_stride, count in axes]
    rows.append((-(-n // chunk), y_step * chunk, x_step * chunk))
    return np.array(rows, np.int64), math.prod(row[0] for row in rows)


def copy_call(library: Library, y: np.ndarray, x: np.ndarray) -> Call | None:
    """The call that copies x to y, which have one shape and dtype and share no memory; None for what C does not take.

    C takes elements of 1, 2, 4 and 8 bytes and up to 8 axes that cannot be joined. Strides of x may be 0 or negative.
    """
    size = y.itemsize
    if size not in (1, 2, 4, 8) or y.dtype.hasobject or not y.size:
        return None
    axes = joined(y, x)
    if len(axes) > _MOST_AXES + 1:
        return None
    inner = axes.pop()
    if inner[:2] == (size, size):
        chunk = _CHUNK // size
        plan, items = _plan(axes, inner, chunk)
        tasks = library.tasks(items, 0.1 * y.nbytes + 4 * items, 4)
        return library.call("or_copy_rows", tasks, y, x, plan, len(plan), inner[2], chunk, size, tasks)
    along = next((k for k, axis in enumerate(axes) if axis[1] == size and axis[2] >= 4), None)
    if inner[0] == size and along is not None:
        chunked = axes.pop(along)
        plan, items = _plan(axes, chunked, _TILE)
        tasks = library.tasks(items, 0.4 * y.size, 4)
        return library.call(
            "or_copy_turned", tasks, y, x, plan, len(plan), chunked[2], _TILE, size, tasks,
            chunked[0], inner[2], inner[1],
        )  # fmt: skip
    chunk = _CHUNK // size
    plan, items = _plan(axes, inner, chunk)
    tasks = library.tasks(items, y.size + 4 * items, 4)
    return library.call(
        "or_copy_strided", tasks, y, x, plan, len(plan), inner[2], chunk, size, tasks, inner[0], inner[1]
    )
