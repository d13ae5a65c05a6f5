"""Products of 8-bit integers by the compiled kernels of source/integer_*.c."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.epilogue import Epilogue
from outrider.providers.cpu.kernels.frame import Bind, channels_last
from outrider.providers.cpu.kernels.integers import Quantized, Result
from outrider.providers.cpu.kernels.narrow import Narrow, narrow
from outrider.providers.cpu.kernels.panels import Operands, epilogue_words, operands, padded_features
from outrider.providers.cpu.kernels.windows import Geometry
from outrider.providers.cpu.native import Library

_PANEL, _TILE = 16, 6  # NR and MR of integer.h
_BLOCK_BYTES = 128 << 10  # of widened rows: they and a panel of weights stay in the L2 cache
_PLAIN = Epilogue()
_KINDS = {"int32": 0, "float32": 1, "uint8": 2, "int8": 3}  # enum result of integer.h
_BYTES = (np.dtype(np.uint8), np.dtype(np.int8))


def _signed(x: np.ndarray) -> bool:
    return x.dtype == np.int8


def _one(*arrays: np.ndarray | None) -> bool:
    return all(x is None or x.size == 1 for x in arrays)


def _by_feature(x: np.ndarray | None, features: int) -> bool:
    return x is None or x.size == 1 or x.shape == (features,)


def _fits(left: Quantized, right: Quantized, r: Result, features: int) -> bool:
    """The types and scales are those that the kernels take."""
    return (
        left.values.dtype in _BYTES
        and right.values.dtype in _BYTES
        and all(q.zero is None or q.zero.dtype == q.values.dtype for q in (left, right))
        and (r.y_zero is None or r.y_zero.dtype == r.dtype)
        and all(x is None or x.dtype == np.float32 for x in (r.x_scale, r.w_scale, r.y_scale))
        and _one(r.x_scale, r.y_scale, r.y_zero, r.p_scale, r.p_zero)
        and _by_feature(r.w_scale, features)
        and _by_feature(r.bias, features)
    )


def _output(
    b: Bind, library: Library, r: Result, y: np.ndarray, features: int, order: tuple[int, ...] | None
) -> list[Any]:
    """The words of `struct output`: y [rows, features], dense in this memory order."""
    given = Operands() if r.epilogue is None else operands(b, r.epilogue, features)
    if r.shift is not None:
        given = Operands(bias=padded_features(b, r.shift, features))
    ready = None
    if r.x_scale is not None:
        width = -(-features // _PANEL) * _PANEL + _PANEL
        ready = b.scratch((library.threads, width), np.float32)
    return [
        y, features, 1, _KINDS[y.dtype.name], r.direct, r.x_scale, r.w_scale,
        r.w_scale is not None and r.w_scale.size > 1, r.bias, r.bias is not None and r.bias.size > 1,
        r.y_scale, r.y_zero, r.p_scale, r.p_zero, r.p_zero is not None and _signed(r.p_zero), ready, features,
        *epilogue_words(b, r.epilogue or _PLAIN, given, y, features, 1, order),
    ]  # fmt: skip


def packed_weights(
    b: Bind, library: Library, q: Quantized, values: np.ndarray, lay: Callable[[np.ndarray], np.ndarray], by_batch: bool
) -> list[Any]:
    """The words of `struct weights`; packed once if the weights are constant, and narrow where that pays.

    `lay`: [batches, depth, columns] of the contents of an array like `values`, which holds those of q in the run.
    `by_batch`: zero points by column go on through all batches.
    """
    batches, depth, columns = lay(values).shape
    panels = batches * -(-columns // _PANEL)
    packed = (panels, -(-depth // 2), _PANEL, 2)
    zero_step = int(q.zero is not None and q.zero.size > 1)

    def call(w: np.ndarray, y: np.ndarray, tasks: int) -> Any:
        return library.call(
            "or_integer_pack", tasks,
            w, q.zero, y, _signed(w), zero_step, zero_step * columns * by_batch,
            batches, depth, columns, *w.strides, tasks,
        )  # fmt: skip

    if q.i is not None and q.known(b):

        def make(contents: np.ndarray) -> Narrow | np.ndarray:
            w = lay(q.of(contents))
            zero = np.zeros(1, np.int32) if q.zero is None else q.zero
            shape = (batches, columns) if by_batch or not zero_step else (1, columns)
            points = np.broadcast_to(zero.reshape(shape) if zero_step else zero.reshape(1, 1), (batches, columns))
            form = narrow(w, points)
            if form is not None:
                return form
            made = np.empty(packed, np.int16)
            call(w, made, 1)()
            return made

        ready: Narrow | np.ndarray = b.packed(f"panels {packed} {q.key(b)}", q.i, make)
        return ready.words() if isinstance(ready, Narrow) else _wide(ready)
    y = b.scratch(packed, np.int16)
    b.step(call(lay(values), y, library.tasks(panels, batches * depth * columns * 0.7)))
    return _wide(y)


def _wide(panels: np.ndarray) -> list[Any]:
    return [panels, 0, 0, None, None, None, None, None]


def ready_rows(b: Bind, weights: list[Any], rows: int, depth: int) -> np.ndarray:
    """Room for so many ready rows."""
    if weights[1]:
        return b.scratch((rows, -(-depth // 4) * 4), np.uint8)
    return b.scratch((rows, -(-depth // 2) * 2), np.int16)


def _rows_at_once(rows: int, depth: int) -> int:
    """Rows that a task makes ready at once: whole tiles, at most MOST_ROWS of integer.h."""
    fit = _BLOCK_BYTES // (2 * depth + 2)
    return min(-(-rows // _TILE), max(8, min(32, fit // _TILE))) * _TILE


def _parts(library: Library, rows: int, panels: int, work: float) -> tuple[int, int]:
    """Into how many parts to split the rows and the panels."""
    tasks = library.tasks(max(rows // _TILE, panels), work, 2)
    if tasks == 1:
        return 1, 1
    if rows >= 4 * _TILE * library.threads:
        return min(tasks, rows // _TILE), 1
    return 1, min(tasks, panels)


def product(b: Bind, library: Library, left: Quantized, right: Quantized, r: Result, y: np.ndarray) -> bool:
    """Record left @ right; False where the kernels do not take it and nothing was recorded."""
    x, w = left.values, right.values
    if x.ndim < 1 or w.ndim < 2 or not y.size or not x.size or not y.flags.c_contiguous:
        return False
    if w.ndim > 2 and w.shape[:-2] != x.shape[:-2]:
        return False
    depth, features = w.shape[-2:]
    if not _fits(left, right, r, features) or not _by_feature(right.zero, features):
        return False
    rows = x.shape[-2] if x.ndim > 1 else 1
    by_row = left.zero is not None and left.zero.size > 1
    if left.zero is not None and by_row and left.zero.shape != (rows,):
        return False
    batches = math.prod(x.shape[:-2])
    if w.ndim == 2 and not by_row:
        rows, batches = rows * batches, 1
    x = b.contiguous(x)
    values = w if w.ndim == 2 or right.known(b) else b.contiguous(w)  # then a reshape gives a view

    def lay(w: np.ndarray) -> np.ndarray:
        return w.reshape(-1, depth, features) if w.ndim > 2 else w[None]

    weights = packed_weights(b, library, right, values, lay, False)
    panels = -(-features // _PANEL)
    row_parts, panel_parts = _parts(library, batches * rows, panels, batches * rows * depth * features / 50)
    at_once = _rows_at_once(rows, depth)
    ready = weights[1] and not _signed(x) and depth % 4 == 0
    call = library.call(
        "or_integer_gemm", row_parts * panel_parts,
        x, left.zero, _signed(x), by_row, depth,
        *weights, panels if w.ndim > 2 else 0, batches, rows, depth,
        row_parts, panel_parts, at_once, None if ready else ready_rows(b, weights, library.threads * at_once, depth),
        *_output(b, library, r, y, features, None),
    )  # fmt: skip
    b.step(call)
    return True


def _pad_front(values: tuple[int, ...], fill: int) -> tuple[int, int]:
    height, width = (fill, *values) if len(values) == 1 else values
    return height, width


def _window(x: np.ndarray, zero: np.ndarray | None, g: Geometry) -> list[Any]:
    """The words of `struct window`; x is channels last in memory, with one or two spatial axes."""
    height, width = _pad_front(x.shape[2:], 1)
    row_step = x.strides[2] if x.ndim == 4 else 0
    return [
        x, zero, _signed(x), x.shape[0], height, width, x.shape[1], x.strides[0], row_step, x.strides[-1],
        *_pad_front(g.kernel, 1), *_pad_front(g.strides, 1), *_pad_front(g.dilations, 1), *_pad_front(g.begin, 0),
        *_pad_front(g.out, 1),
    ]  # fmt: skip


def _depthwise_weights(b: Bind, right: Quantized, features: int) -> np.ndarray | None:
    """Weights [M, 1, *kernel] as [taps, M rounded up], less their zero points; None where they are not constant."""
    if right.i is None or not right.known(b):
        return None
    zero = right.broadcast()

    def make(w: np.ndarray) -> np.ndarray:
        whole = w.astype(np.int16)
        if zero is not None:
            whole -= zero.astype(np.int16)
        made = np.zeros((math.prod(w.shape[2:]), -(-features // _PANEL) * _PANEL), np.int16)
        made[:, :features] = whole.reshape(features, -1).T
        return made

    ready: np.ndarray = b.packed(f"taps {right.key(b)}", right.i, make)
    return ready


def convolution(
    b: Bind, library: Library, left: Quantized, right: Quantized, g: Geometry, group: int, r: Result, y: np.ndarray
) -> bool:
    """Record a convolution; False where the kernels do not take it and nothing was recorded."""
    x, w = left.values, right.values
    features = w.shape[0]
    if x.ndim > 4 or 0 in x.shape or 0 in w.shape or 0 in y.shape or not _fits(left, right, r, features):
        return False
    if not _one(left.zero) or not _by_feature(right.zero, features):
        return False
    depth, order = math.prod(w.shape[1:]), channels_last(x.ndim)
    per_group = features // group
    depthwise = group > 1 and w.shape[1] == 1 and per_group == 1
    taps = _depthwise_weights(b, right, features) if depthwise else None
    x = b.contiguous(x, order)
    place = y
    if not y.transpose(order).flags.c_contiguous:
        place = b.scratch(y.shape, y.dtype, order)
    pixels = x.shape[0] * math.prod(g.out)
    tasks = library.tasks(-(-pixels // _TILE), pixels * depth * features / (10 if depthwise else 50), 4)
    window = _window(x, left.zero, g)
    output = _output(b, library, r, place, features, order)
    if taps is not None:
        b.step(library.call("or_integer_depthwise", tasks, *window, taps, tasks, *output))
    else:
        weights = _conv_weights(b, library, right, group)
        at_once = _rows_at_once(pixels, depth)
        block = ready_rows(b, weights, library.threads * at_once, depth)
        b.step(library.call("or_integer_conv", tasks, *window, *weights, group, tasks, at_once, block, *output))
    if place is not y:
        b.copy(y, place)
    return True


def _conv_weights(b: Bind, library: Library, right: Quantized, group: int) -> list[Any]:
    """Weights [M, C / group, *kernel] in panels, the channel being the innermost of the depth."""
    order = channels_last(right.values.ndim)

    def lay(w: np.ndarray) -> np.ndarray:
        rows: np.ndarray = np.ascontiguousarray(w.transpose(order)).reshape(group, w.shape[0] // group, -1)
        return rows.swapaxes(1, 2)

    values = right.values if right.known(b) else b.contiguous(right.values, order)  # then `lay` gives a view
    return packed_weights(b, library, right, values, lay, True)
