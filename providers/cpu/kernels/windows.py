"""Windows that slide over the spatial axes [N, C, *spatial]: attributes, geometry, padding, and the strided view.

Shared by convolutions and poolings. ONNX Conv-22, MaxPool-22, AveragePool-22, LpPool-22 describe the attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported
from outrider.providers.cpu.kernels.precision import cast
from outrider.providers.wire.graph import Node

# Elements of a block of columns: 800 KB of float32 stay in the caches between the copy and the GEMM.
COLUMNS = 200_000
AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class Window:
    """The attributes as given; None where the node leaves one out (its default depends on the rank)."""

    kernel: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    dilations: tuple[int, ...] | None
    pads: tuple[int, ...] | None
    auto_pad: str
    ceil: bool


@dataclass(frozen=True)
class Geometry:
    """A window over one spatial shape. `begin`: padding before each axis; `out`: output positions of each axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    spatial: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Length of each axis, from the start of the padding, that the windows touch."""
        return tuple(
            (o - 1) * s + (k - 1) * d + 1 if o else 0
            for o, s, k, d in zip(self.out, self.strides, self.kernel, self.dilations, strict=True)
        )

    def taps(self) -> list[tuple[int, ...]]:
        """All positions within the window, last axis fastest."""
        return list(product(*(range(k) for k in self.kernel)))


def _ints(node: Node, name: str) -> tuple[int, ...] | None:
    given = node.attributes.get(name)
    return tuple(int(v) for v in given) if given else None


def window(node: Node) -> Window:
    """Parse the attributes. Raises Unsupported for values ONNX does not define."""
    auto_pad = str(node.attributes.get("auto_pad", "NOTSET")) or "NOTSET"
    if auto_pad not in AUTO_PADS:
        raise Unsupported(f"auto_pad is {auto_pad!r}, ONNX has {', '.join(AUTO_PADS)}")
    parsed = Window(
        kernel=_ints(node, "kernel_shape"),
        strides=_ints(node, "strides"),
        dilations=_ints(node, "dilations"),
        pads=_ints(node, "pads"),
        auto_pad=auto_pad,
        ceil=bool(node.attributes.get("ceil_mode", 0)),
    )
    for name, values in (("kernel_shape", parsed.kernel), ("strides", parsed.strides), ("dilations", parsed.dilations)):
        if values is not None and min(values) < 1:
            raise Unsupported(f"{name} {list(values)} holds a number below 1")
    if parsed.pads is not None and min(parsed.pads) < 0:
        raise Unsupported(f"negative pads {list(parsed.pads)}")
    return parsed


def geometry(w: Window, spatial: tuple[int, ...], kernel: tuple[int, ...] | None = None) -> Geometry:
    """The window over `spatial`. Raises ValueError when the attributes do not fit the rank or the window the input."""
    kernel = kernel or w.kernel
    rank = len(spatial)
    strides = w.strides or (1,) * rank
    dilations = w.dilations or (1,) * rank
    pads = w.pads or (0,) * (2 * rank)
    if kernel is None or not len(kernel) == len(strides) == len(dilations) == len(pads) // 2 == rank:
        raise ValueError(f"window {w} does not fit {rank} spatial axes of {list(spatial)}")
    begin, end, out = [], [], []
    for i, size in enumerate(spatial):
        reach = (kernel[i] - 1) * dilations[i] + 1
        if w.auto_pad.startswith("SAME"):
            count = -(-size // strides[i])
            total = max(0, (count - 1) * strides[i] + reach - size)
            first = total // 2 if w.auto_pad == "SAME_UPPER" else total - total // 2
            last = total - first
        else:
            first, last = (pads[i], pads[rank + i]) if w.auto_pad == "NOTSET" else (0, 0)
            room = size + first + last - reach
            count = (math.ceil(room / strides[i]) if w.ceil else room // strides[i]) + 1
            if w.ceil and (count - 1) * strides[i] >= size + first:
                count -= 1  # a window that would start in the padding at the end is left out
        if count < 0 or (count == 0 and size + first + last > 0 and room < 0):
            raise ValueError(
                f"window of reach {reach} does not fit axis {i} of {list(spatial)} padded by {first}, {last}"
            )
        begin.append(first)
        end.append(last)
        out.append(max(count, 0))
    return Geometry(tuple(kernel), strides, dilations, tuple(begin), tuple(end), spatial, tuple(out))


def _fill_and_copy(borders: list[np.ndarray], fill: Any, inner: np.ndarray, x: np.ndarray) -> None:
    for border in borders:
        np.copyto(border, fill, "unsafe")
    np.copyto(inner, x, "unsafe")


def padded(b: Bind, x: np.ndarray, g: Geometry, fill: Any, dtype: Any) -> np.ndarray:
    """`x` [N, C, *spatial] as `dtype`, padded so that all windows lie inside; `x` itself when they do already.

    `fill`: one value, or an array [C, 1, ...] of one for each channel.
    """
    extent = g.extent
    if not any(g.begin) and all(e <= s for e, s in zip(extent, g.spatial, strict=True)):
        return cast(b, x, dtype)
    place = b.scratch(x.shape[:2] + extent, dtype)
    inner, borders = place, []
    for axis, (first, size, length) in enumerate(zip(g.begin, g.spatial, extent, strict=True), start=2):
        lead = (slice(None),) * axis
        stop = min(first + size, length)
        for part in (slice(0, min(first, length)), slice(max(stop, 0), length)):
            if part.start < part.stop:
                borders.append(inner[lead + (part,)])
        inner = inner[lead + (slice(first, stop),)]
        x = x[lead + (slice(0, max(stop - first, 0)),)]
    b.step(_fill_and_copy, borders, fill, inner, x)
    return place


def plane(values: Sequence[int], absent: int) -> tuple[int, int]:
    """What one or two spatial axes have, for rows and columns; a single axis is the columns."""
    rows, columns = (absent, *values)[-2:]
    return rows, columns


def plane_words(g: Geometry) -> tuple[int, ...]:
    """What compiled kernels want to know of a window: shapes of input, output and window, strides, dilations, begin."""
    ones = (g.spatial, g.out, g.kernel, g.strides, g.dilations)
    return *(word for values in ones for word in plane(values, 1)), *plane(g.begin, 0)


def plane_strides(x: np.ndarray) -> tuple[int, int, int]:
    """The strides of [N, C, *spatial] in elements: between images, rows, pixels."""
    image, _, *rest = (step // x.itemsize for step in x.strides)
    return image, *plane(rest, 0)


def sliding(x: np.ndarray, g: Geometry) -> np.ndarray:
    """The windows over padded `x` as a read-only view [N, C, *kernel, *out]."""
    steps = x.strides[2:]
    within = tuple(step * d for step, d in zip(steps, g.dilations, strict=True))
    between = tuple(step * s for step, s in zip(steps, g.strides, strict=True))
    shape = x.shape[:2] + g.kernel + g.out
    return np.lib.stride_tricks.as_strided(x, shape, x.strides[:2] + within + between, writeable=False)
