"""Transposed convolution by the compiled library: every output position gathers what it is the sum of.

`transposed.c` says how. One or two spatial axes, any strides, dilations, pads and groups; float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from outrider.providers.cpu.kernels.epilogue import BIAS, SCALE, SHIFT, Epilogue
from outrider.providers.cpu.kernels.frame import Bind, channels_last
from outrider.providers.cpu.kernels.panels import (
    FLOPS,
    Operands,
    aligned,
    epilogue_words,
    operands,
    pack,
    packed_size,
)
from outrider.providers.cpu.kernels.precision import widened
from outrider.providers.cpu.kernels.windows import Geometry, plane, plane_strides, plane_words
from outrider.providers.cpu.native import Library

_BLOCK = 96  # positions of one product
_MOST_ROWS = 8  # as tiles.h has it
_FEW = 8  # outputs of a pixel up to which `_few` is faster
_BEHIND = 24  # numbers that C may read behind those per feature


def _phases(g: Geometry) -> list[tuple[list[int], list[int]]]:
    """For each phase of rows and columns, the kernel rows and columns that count."""
    kernel, strides, dilations = (plane(values, 1) for values in (g.kernel, g.strides, g.dilations))
    rows, columns = (
        [[t for t in range(kernel[axis]) if t * dilations[axis] % strides[axis] == phase] for phase in range(stride)]
        for axis, stride in enumerate(strides)
    )
    return [(r, c) for r in rows for c in columns]


def _matrices(w: np.ndarray, group: int, rows: list[int], columns: list[int]) -> np.ndarray:
    """Weights [C, M, *kernel] of some taps as [group, taps * C / group, M]."""
    channels, features = w.shape[0] // group, w.shape[1]
    taps = w.reshape(group, channels, features, *plane(w.shape[2:], 1))[:, :, :, rows][..., columns]
    return taps.transpose(0, 3, 4, 1, 2).reshape(group, -1, features)


def _columns_merged(w: np.ndarray) -> np.ndarray:
    """[C, M, ..., columns] as [C, columns * M, ..., 1]."""
    moved = np.moveaxis(w, -1, 1)
    return moved.reshape(w.shape[0], -1, *w.shape[2:-1], 1)


def _packed(b: Bind, w: np.ndarray, g: Geometry, group: int, merged: bool) -> tuple[np.ndarray, np.ndarray]:
    """The panels of all phases, and where each phase begins."""
    phases = _phases(g)
    channels, features = w.shape[0] // group, w.shape[1] * (w.shape[-1] if merged else 1)
    sizes = [group * packed_size(len(r) * len(c) * channels, features, 0) for r, c in phases]
    offsets = np.cumsum([0, *sizes], dtype=np.int64)

    def fill(place: np.ndarray, contents: np.ndarray) -> None:
        if merged:
            contents = _columns_merged(contents)
        for (rows, columns), start, size in zip(phases, offsets, sizes, strict=False):
            if size:
                as_matrices = partial(_matrices, group=group, rows=rows, columns=columns)
                pack(place[start : start + size], contents, as_matrices, 0)

    def make(contents: np.ndarray) -> np.ndarray:
        place = aligned(int(offsets[-1]))
        fill(place, contents)
        return place

    if b.is_const(1):
        return b.packed(f"phases {g.strides} {g.dilations} {group} {merged}", 1, make), offsets
    place = b.scratch((int(offsets[-1]),), np.float32)
    b.step(fill, place, w)
    return place, offsets


def _repeat(place: np.ndarray, x: np.ndarray, features: int, times: int, each: int) -> None:
    place[: features * times * each].reshape(times, features, each)[...] = x[:, None]


def _repeated(b: Bind, i: int, features: int, times: int, each: int = 1) -> np.ndarray | None:
    """Input i, numbers per feature or one for all: each of them `each` times, all that `times` times, with room behind.

    None where it is not given.
    """
    if not b.has(i):
        return None
    x = widened(b, i)
    if x.shape not in ((features,), (1,)):
        raise ValueError(f"input {i} {list(x.shape)} does not fit {features} features")

    def make(contents: np.ndarray) -> np.ndarray:
        place = np.zeros(features * times * each + _BEHIND, np.float32)
        _repeat(place, contents, features, times, each)
        return place

    if b.is_const(i):
        made: np.ndarray = b.packed(f"repeated {features} {times} {each}", i, make)
        return made
    place = b.scratch((features * times * each + _BEHIND,), np.float32)
    b.step(_repeat, place, x, features, times, each)
    return place


def _few(b: Bind, library: Library, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, p: Epilogue) -> None:
    """Record it for a few outputs of each pixel that no other pixel contributes to; y may have any strides."""
    channels, features = w.shape[:2]
    outputs = features * math.prod(g.kernel)
    padded = next(n for n in (2, 4, 8) if n >= outputs)
    taps = outputs // features

    def fill(place: np.ndarray, contents: np.ndarray) -> None:
        place[:, outputs:] = 0
        place[:, :outputs] = np.moveaxis(contents.reshape(channels, features, taps), 1, 2).reshape(channels, outputs)

    def make(contents: np.ndarray) -> np.ndarray:
        place = np.empty((channels, padded), np.float32)
        fill(place, contents)
        return place

    if b.is_const(1):
        weights = b.packed("few", 1, make)
    else:
        weights = b.scratch((channels, padded), np.float32)
        b.step(fill, weights, w)
    bias, scale, shift = (_repeated(b, i, features, taps, 8) for i in (BIAS, SCALE, SHIFT))
    image, row, pixel = plane_strides(y)
    down, right = plane(g.strides, 1)
    offsets = [
        r * row + s * pixel + m * (y.strides[1] // 4)
        for r in range(down) for s in range(right) for m in range(features)
    ]  # fmt: skip
    rows, columns = plane(g.spatial, 1)
    tasks = library.tasks(y.shape[0] * rows, 0.3 * x.size + 2 * y.size, 4)
    b.step(
        library.call(
            "or_transposed_few", tasks, y, x, weights, np.array(offsets, np.int64), outputs, y.shape[0], rows, columns,
            channels, tasks, image, row * down, pixel * right, *plane_strides(x),
            *epilogue_words(b, p, Operands(bias, scale, shift), y, 0, 1),
        )
    )  # fmt: skip


def transpose_convolve(
    b: Bind, library: Library, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, group: int, p: Epilogue
) -> None:
    """Record y = epilogue(transposed convolution of x with w).

    x [N, C, *spatial], w [C, M / group, *kernel] (input 1 of the node), y [N, M, *out], all float32 and not empty.
    `g`: spatial is x's, out is y's, begin is cut from the front.
    """
    order = channels_last(x.ndim)
    if x.strides[1] != 4:
        x = b.contiguous(x, order)
    tiled = g.kernel == g.strides and set(g.dilations) == {1} and not any(g.begin)
    tiled = tiled and g.out == tuple(n * s for n, s in zip(g.spatial, g.strides, strict=True))
    if tiled and group == 1 and w.shape[1] * math.prod(g.kernel) <= _FEW and not p.residual:
        _few(b, library, x, w, y, g, p)
        return
    made = y if y.transpose(order).flags.c_contiguous else b.scratch(y.shape, np.float32, order)
    times = g.kernel[-1]
    # Columns of the kernel that lie side by side in y are features of one column.
    merged = group == 1 and times == g.strides[-1] and g.dilations[-1] == 1 and g.begin[-1] == 0
    merged = merged and g.out[-1] == g.spatial[-1] * times
    weights, offsets = _packed(b, w, _one_column(g) if merged else g, group, merged)
    features, channels = w.shape[1], w.shape[0] // group
    steps = plane_strides(made)
    if merged:
        bias, scale, shift = (_repeated(b, i, features, times) for i in (BIAS, SCALE, SHIFT))
        with_ = Operands(bias, scale, shift, operands(b, p, features).residual)
        g, features = _one_column(g), features * times
        steps = (steps[0], steps[1], features)
    else:
        with_ = operands(b, p, features * group)
    out, strides = plane(g.out, 1), plane(g.strides, 1)
    rows = y.shape[0] * out[0] * group
    parts = max(1, min(out[1] // (8 * strides[1]), -(-4 * library.threads // rows)))
    tasks = library.tasks(rows * parts, 2 * x.size * features * math.prod(g.kernel) / FLOPS, 4)
    chunks = max(len(r) * len(c) for r, c in _phases(g))
    each = -(-channels // 2) * 2 + 2 * chunks * (_BLOCK + _MOST_ROWS)
    b.step(
        library.call(
            "or_transposed", tasks, made, b.scratch((library.threads, each), np.float32), x, weights, offsets,
            each, y.shape[0], group, channels, features, parts, tasks, _BLOCK,
            *steps, *plane_strides(x), *plane_words(g),
            *epilogue_words(b, p, with_, y, 0, 1, order),
        )
    )  # fmt: skip
    if made is not y:
        b.copy(y, made)


def _one_column(g: Geometry) -> Geometry:
    """The same, one column of the kernel and of y for each column of x."""
    return replace(
        g, kernel=(*g.kernel[:-1], 1), strides=(*g.strides[:-1], 1), out=(*g.out[:-1], g.spatial[-1])
    )  # fmt: skip
