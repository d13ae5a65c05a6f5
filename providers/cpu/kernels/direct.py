"""Convolution by the compiled library, on the input where it lies: channels last, nothing padded, no columns.

`conv.c` says how. One to three spatial axes, any strides, dilations, pads and groups; float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.epilogue import PAD, Epilogue
from outrider.providers.cpu.kernels.frame import Bind, channels_last
from outrider.providers.cpu.kernels.panels import (
    FLOPS,
    ROWS,
    block_rows,
    epilogue_words,
    operands,
    packed_weights,
    padded_features,
    panel_count,
)
from outrider.providers.cpu.kernels.windows import Geometry
from outrider.providers.cpu.native import Library

_SPATIAL = 3

Axes = tuple[int, int, int]


@dataclass(frozen=True)
class _Layout:
    """The geometry in three spatial axes, with the strides of x in floats."""

    images: int
    image: int
    size: Axes
    out: Axes
    kernel: Axes
    strides: Axes
    dilations: Axes
    begin: Axes
    steps: Axes

    @property
    def inside(self) -> bool:
        """True when no window leaves the image."""
        sizes = zip(self.out, self.strides, self.kernel, self.dilations, self.size, strict=True)
        return not any(self.begin) and all((o - 1) * s + (k - 1) * d < size for o, s, k, d, size in sizes)


def _layout(x: np.ndarray, g: Geometry, join_images: bool) -> _Layout:
    """Axes of length 1 without a kernel are outermost; windows of one position over dense memory have one axis."""
    steps = tuple(step // 4 for step in x.strides)
    axes = list(zip(g.spatial, g.out, g.kernel, g.strides, g.dilations, g.begin, steps[2:], strict=True))
    images, image = x.shape[0], steps[0]
    if all(axis[:1] == axis[1:2] and axis[2:4] == (1, 1) for axis in axes):
        count, step = 1, next((axis[-1] for axis in reversed(axes) if axis[0] > 1), 0)
        joined = True
        for size, *_, own in reversed(axes):
            joined = joined and (size == 1 or own == step * count)
            count *= size
        if joined:
            axes = [(count, count, 1, 1, 1, 0, step)]
            if join_images and images > 1 and count > 1 and image == step * count:
                axes, images = [(images * count, images * count, 1, 1, 1, 0, step)], 1
    idle = [axis for axis in axes if axis[:3] == (1, 1, 1) and axis[5] == 0]
    axes = [axis for axis in axes if axis not in idle]
    axes = [(1, 1, 1, 1, 1, 0, 0)] * (_SPATIAL - len(axes)) + axes
    columns = [(a, b, c) for a, b, c in zip(*axes, strict=True)]
    return _Layout(images, image, *columns)


def _as_matrices(w: np.ndarray, group: int) -> np.ndarray:
    """Weights [M, C / group, *kernel] as [group, kernel * C / group, M / group]."""
    features, channels = w.shape[0] // group, w.shape[1]
    taps_first = np.moveaxis(w.reshape((group, features) + w.shape[1:]), (1, 2), (-1, -2))
    return taps_first.reshape(group, math.prod(w.shape[2:]) * channels, features)


def convolve_directly(
    b: Bind, library: Library, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, group: int, p: Epilogue
) -> None:
    """Record y = epilogue(convolution of x with w).

    x [N, C, *spatial], y [N, M, *out], float32 and not empty; y in C order or with the channels last. w is input 1 of
    the node, [M, C / group, *kernel], of any float. The epilogue's inputs are the node's; input PAD gives the padding.
    """
    order = channels_last(x.ndim)
    channels, features = w.shape[1], w.shape[0] // group
    # One feature is summed in eight lanes of each chunk: chunks must not depend on strides.
    if (channels * group > 1 and x.strides[1] != 4) or w.shape[0] == 1:
        x = b.contiguous(x, order)
    last = y.transpose(order).flags.c_contiguous
    at = _layout(x, g, last)
    joined = group == 1 and (at.kernel[2] == 1 or (at.dilations[2] == 1 and at.steps[2] == channels))
    length = channels * (at.kernel[2] if joined else 1)
    depth = channels * math.prod(at.kernel)
    single = length if w.shape[0] == 1 else 0
    shape = (group, depth, features)
    weights = packed_weights(b, 1, f"of {group} groups", shape, single, lambda c: _as_matrices(c, group))

    positions = math.prod(g.out)
    y_steps = (positions * w.shape[0], w.shape[0], 1) if last else (positions * w.shape[0], 1, positions)
    rows = y.shape[0] * positions
    block = block_rows(depth * group, rows)
    pitch, chunks = block + 8, depth // length
    edges = 0 if at.inside else block * depth
    each = 2 * chunks * pitch + -(-length * group // 8) * 8 + pitch + edges
    nanoseconds = 2.0 * rows * depth * features * group / FLOPS
    many = library.tasks(1 << 16, nanoseconds, 4)
    row_parts = min(many, -(-rows // ROWS))
    panel_parts = min(group * panel_count(features), -(-many // row_parts))
    tasks = min(many, row_parts * panel_parts)
    b.step(
        library.call(
            "or_conv", tasks, x, weights, padded_features(b, PAD, channels * group), y,
            b.scratch((library.threads, each + each % 2), np.float32), each + each % 2,
            at.images, group, channels, features,
            *at.size, *at.out, *at.kernel, *at.strides, *at.dilations, *at.begin, at.image, *at.steps,
            *(y_steps if at.images == y.shape[0] else (rows * w.shape[0], *y_steps[1:])),
            joined, row_parts, panel_parts, tasks, block,
            *epilogue_words(b, p, operands(b, p, w.shape[0]), y, y_steps[1], y_steps[2], order if last else None),
        )
    )  # fmt: skip
