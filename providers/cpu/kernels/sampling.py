"""Values of an image between its pixels: GridSample, the grids it is given, deformable convolution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import cast, finish, target
from outrider.providers.cpu.kernels.support import ints
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

_MODES = {"bilinear": "linear", "bicubic": "cubic", "linear": "linear", "cubic": "cubic", "nearest": "nearest"}
_PADDINGS = ("zeros", "border", "reflection")
_A = -0.75  # the parameter of the cubic (Keys, 1981)

# A tap of an axis: pixel numbers, perhaps outside, and their weights (None for 1), both of the shape of the samples.
Tap = tuple[np.ndarray, "np.ndarray | None"]


def _taps(at: np.ndarray, mode: str) -> list[Tap]:
    """The pixels around coordinates `at` of one axis."""
    if mode == "nearest":
        return [(np.rint(at).astype(np.int64), None)]
    low = np.floor(at)
    share, pixel = at - low, low.astype(np.int64)
    if mode == "linear":
        return [(pixel, 1 - share), (pixel + 1, share)]
    near, far = (share, 1 - share), (share + 1, 2 - share)
    inner = [((_A + 2) * d - (_A + 3)) * d * d + 1 for d in near]
    outer = [((_A * d - 5 * _A) * d + 8 * _A) * d - 4 * _A for d in far]
    return [(pixel - 1, outer[0]), (pixel, inner[0]), (pixel + 1, inner[1]), (pixel + 2, outer[1])]


def _reflected(at: np.ndarray, low: float, high: float) -> np.ndarray:
    """Coordinates mirrored at both ends until they lie in [low, high]."""
    span = high - low
    if span <= 0:
        return np.full_like(at, low)
    from_low = np.abs(at - low) % (2 * span)
    return (low + np.minimum(from_low, 2 * span - from_low)).astype(at.dtype)


def _sample(x: np.ndarray, taps: Sequence[list[Tap]], inside: Callable[[np.ndarray, int], Any]) -> np.ndarray:
    """x [C, *spatial] at the samples that the axes' taps describe -> [C, *samples].

    `inside(pixels, axis)`: pixel numbers that exist, and which of them count (None: all).
    """
    total: Any = 0
    placed = [[(*inside(pixel, axis), weight) for pixel, weight in one] for axis, one in enumerate(taps)]
    for choice in itertools.product(*placed):
        values = x[(slice(None), *(pixel for pixel, _, _ in choice))]
        for _, counts, weight in choice:
            if weight is not None:
                values = values * weight
            if counts is not None:
                values = np.where(counts, values, values.dtype.type(0))
        total = total + values
    result: np.ndarray = total
    return result


def _or_zero(shape: tuple[int, ...]) -> Callable[[np.ndarray, int], Any]:
    """Pixels outside count as zeros."""

    def inside(pixel: np.ndarray, axis: int) -> Any:
        last = shape[axis] - 1
        return np.clip(pixel, 0, last), (pixel >= 0) & (pixel <= last)

    return inside


@dataclass(frozen=True)
class Grid:
    """Attributes of GridSample."""

    mode: str
    padding: str
    corners: bool


def _parse_grid(node: Node) -> Grid:
    mode = str(node.attributes.get("mode", "linear"))
    padding = str(node.attributes.get("padding_mode", "zeros"))
    if mode not in _MODES:
        raise Unsupported(f"mode is {mode!r}, ONNX has {', '.join(_MODES)}")
    if padding not in _PADDINGS:
        raise Unsupported(f"padding_mode is {padding!r}, ONNX has {', '.join(_PADDINGS)}")
    return Grid(_MODES[mode], padding, bool(node.attributes.get("align_corners", 0)))


def _grid_sample(x: np.ndarray, grid: np.ndarray, p: Grid, y: np.ndarray) -> None:
    spatial = x.shape[2:]
    ends = [(0.0, length - 1.0) if p.corners else (-0.5, length - 0.5) for length in spatial]

    def inside(pixel: np.ndarray, axis: int) -> Any:
        last = spatial[axis] - 1
        if p.padding == "reflection":
            pixel = np.rint(_reflected(pixel.astype(x.dtype), *ends[axis])).astype(np.int64)
        return np.clip(pixel, 0, last), None

    counting = _or_zero(spatial) if p.padding == "zeros" else inside
    for image, places, out in zip(x, grid, y, strict=True):
        taps = []
        for axis, length in enumerate(spatial):
            place = places[..., len(spatial) - 1 - axis]  # the grid names the last axis first
            at = (place + 1) / 2 * (length - 1) if p.corners else ((place + 1) * length - 1) / 2
            if p.padding == "reflection" and p.mode != "cubic":  # a cubic reads mirrored pixels instead
                at = _reflected(at, *ends[axis])
            taps.append(_taps(at, p.mode))
        np.copyto(out, _sample(image, taps, counting))


@kernel("GridSample", since=16, dtypes={0: FLOATS, 1: FLOATS}, parse=_parse_grid)
def grid_sample(b: Bind, p: Grid) -> None:
    """GridSample-22: x [N, C, *spatial] at places [N, *samples, rank] in [-1, 1] -> [N, C, *samples].

    Jaderberg et al., Spatial Transformer Networks, 2015. ValueError where the shapes do not fit.
    """
    x, grid = b.array(0), b.array(1)
    if x.ndim < 3 or grid.ndim != x.ndim or grid.shape[-1] != x.ndim - 2 or grid.shape[0] != x.shape[0]:
        raise ValueError(f"x is {list(x.shape)} and the grid {list(grid.shape)}, not [N, C, ...] and [N, ..., rank]")
    y = b.out(0, (*x.shape[:2], *grid.shape[1:-1]), x.dtype)
    computed = target(b, y)
    b.step(_grid_sample, cast(b, x, computed.dtype), cast(b, grid, computed.dtype), p, computed)
    finish(b, y, computed)


def _positions(length: int, corners: bool, dtype: Any) -> np.ndarray:
    """The middles of `length` pixels that fill [-1, 1], or with `corners` those whose middles do."""
    if corners:
        return np.linspace(-1, 1, length, dtype=dtype)
    made: np.ndarray = (2 * np.arange(length) + 1) / max(length, 1) - 1
    return made.astype(dtype)


@kernel("AffineGrid", since=20, dtypes={0: FLOATS}, parse=lambda node: bool(node.attributes.get("align_corners", 0)))
def affine_grid(b: Bind, p: bool) -> None:
    """AffineGrid-20: theta [N, r, r + 1] and a size [N, C, *spatial] -> places [N, *spatial, r] for GridSample."""
    theta, size = b.array(0), ints(b.const(1))
    rank = len(size) - 2
    if theta.shape[1:] != (rank, rank + 1):
        raise ValueError(f"theta is {list(theta.shape)} for a size of {size}")
    y = b.out(0, (size[0], *size[2:], rank), theta.dtype)
    computed = target(b, y)
    dtype = computed.dtype
    axes = np.meshgrid(*(_positions(length, p, dtype) for length in size[2:]), indexing="ij")
    places = np.stack([*reversed(axes), np.ones(size[2:], dtype)], -1).reshape(-1, rank + 1)
    flat = computed.reshape(size[0], -1, rank)
    b.step(np.matmul, places, b.contiguous(cast(b, theta, dtype)).transpose(0, 2, 1), flat)
    finish(b, y, computed)


@dataclass(frozen=True)
class Deformed:
    """Attributes of DeformConv; lists are empty where omitted."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    offsets: int


def _parse_deformed(node: Node) -> Deformed:
    get = node.attributes.get
    lists = [tuple(ints(get(name, []))) for name in ("strides", "pads", "dilations", "kernel_shape")]
    return Deformed(lists[0], lists[1], lists[2], lists[3], int(get("group", 1)), int(get("offset_group", 1)))


def _deform_conv(
    x: np.ndarray,
    w: np.ndarray,
    offset: np.ndarray,
    bias: np.ndarray | None,
    mask: np.ndarray | None,
    start: Sequence[np.ndarray],
    groups: int,
    y: np.ndarray,
) -> None:
    """offset [N, offset groups, taps, rank, *out], mask [N, offset groups, taps, *out]; `start[axis]` [taps, *out]."""
    inside, out_shape = _or_zero(x.shape[2:]), y.shape[2:]
    taps, parts = start[0].shape[0], offset.shape[1]
    channels = x.shape[1] // parts
    columns = np.empty((x.shape[1], taps, *out_shape), y.dtype)
    flat = w.reshape(groups, w.shape[0] // groups, -1)
    for i in range(x.shape[0]):
        for part in range(parts):
            at = [start[axis] + offset[i, part, :, axis] for axis in range(len(start))]
            values = _sample(
                x[i, part * channels : (part + 1) * channels], [_taps(one, "linear") for one in at], inside
            )
            columns[part * channels : (part + 1) * channels] = values if mask is None else values * mask[i, part]
        np.matmul(flat, columns.reshape(groups, flat.shape[2], -1), y[i].reshape(groups, flat.shape[1], -1))
    if bias is not None:
        y += bias.reshape(-1, *(1,) * len(out_shape))


@kernel("DeformConv", since=19, dtypes={0: FLOATS}, parse=_parse_deformed)
def deform_conv(b: Bind, p: Deformed) -> None:
    """DeformConv-22: x [N, C, *spatial], w [M, C / group, *kernel], offsets and perhaps weights of every tap.

    Dai et al., Deformable Convolutional Networks, 2017; Zhu et al., 2018 (mask). ValueError where shapes do not fit.
    """
    x, w, offset = b.array(0), b.array(1), b.array(2)
    rank = x.ndim - 2
    kernel_shape = p.kernel or w.shape[2:]
    strides, dilations, pads = p.strides or (1,) * rank, p.dilations or (1,) * rank, p.pads or (0,) * (2 * rank)
    out_shape, taps = offset.shape[2:], int(np.prod(kernel_shape))
    expected = tuple(
        (x.shape[2 + a] + pads[a] + pads[rank + a] - dilations[a] * (kernel_shape[a] - 1) - 1) // strides[a] + 1
        for a in range(rank)
    )
    if out_shape != expected or offset.shape[1] != p.offsets * taps * rank or x.shape[1] != w.shape[1] * p.groups:
        raise ValueError(
            f"x {list(x.shape)}, w {list(w.shape)} and offsets {list(offset.shape)} do not fit: the result is "
            f"{list(expected)}, with {p.offsets} groups of {taps} taps"
        )
    y = b.out(0, (x.shape[0], w.shape[0], *out_shape), x.dtype)
    computed = target(b, y)
    dtype = computed.dtype
    grids = np.indices(kernel_shape).reshape(rank, taps, *(1,) * rank)
    start = [
        grids[a] * dilations[a] - pads[a] + np.indices(out_shape)[a] * strides[a] + np.zeros((), dtype)
        for a in range(rank)
    ]

    def given(i: int, *shape: int) -> np.ndarray:
        return b.contiguous(cast(b, b.array(i), dtype)).reshape(shape)

    moved = given(2, x.shape[0], p.offsets, taps, rank, *out_shape)
    bias = given(3, -1) if b.has(3) else None
    mask = given(4, x.shape[0], p.offsets, taps, *out_shape) if b.has(4) else None
    b.step(_deform_conv, cast(b, x, dtype), given(1, *w.shape), moved, bias, mask, start, p.groups, computed)
    finish(b, y, computed)
