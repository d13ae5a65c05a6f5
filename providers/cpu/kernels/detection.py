"""Operators of detectors: boxes that do not overlap, and pooling over regions of interest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import cast, finish, target
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

# Boxes --------------------------------------------------------------------------------------------------------------


def _corners(boxes: np.ndarray, centred: bool) -> np.ndarray:
    """[n, 4] as low y, low x, high y, high x (either axis first), whichever corners or centres and sizes were given."""
    if centred:
        middle, half = boxes[:, :2], boxes[:, 2:] / 2
        low, high = middle - half, middle + half
        return np.concatenate([np.minimum(low, high), np.maximum(low, high)], 1)
    low, high = np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])
    return np.concatenate([low, high], 1)


def _overlaps(box: np.ndarray, others: np.ndarray, limit: np.float32) -> np.ndarray:
    """Which of `others` [n, 4] have an intersection over union with `box` above `limit`; not those without area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = np.where((sides > 0).all(1), sides[:, 0] * sides[:, 1], np.float32(0))
    area, areas = (np.prod(one[..., 2:] - one[..., :2], -1) for one in (box, others))
    real = (shared > 0) & (area > 0) & (areas > 0)
    union = np.where(real, area + areas - shared, np.float32(1))
    over: np.ndarray = real & (shared / union > limit)
    return over


def _kept(boxes: np.ndarray, scores: np.ndarray, most: int, limit: np.float32, least: np.float32 | None) -> list[int]:
    """Indices into boxes [n, 4] (corners) of the boxes that stay, best first; equal scores in their order."""
    rest = np.argsort(-scores, kind="stable")
    if least is not None:
        rest = rest[scores[rest] > least]
    kept: list[int] = []
    while rest.size and len(kept) < most:
        best, rest = int(rest[0]), rest[1:]
        kept.append(best)
        rest = rest[~_overlaps(boxes[best], boxes[rest], limit)]
    return kept


def _selected(boxes: np.ndarray, scores: np.ndarray, centred: bool, most: int, limit: Any, least: Any) -> np.ndarray:
    found: list[tuple[int, int, int]] = []
    if most > 0:
        for batch in range(scores.shape[0]):
            corners = _corners(boxes[batch], centred)
            for label in range(scores.shape[1]):
                kept = _kept(corners, scores[batch, label], most, limit, least)
                found.extend((batch, label, box) for box in kept)
    return np.array(found, np.int64).reshape(-1, 3)


@kernel(
    "NonMaxSuppression",
    since=10,
    dtypes={0: {"float32"}, 1: {"float32"}},
    parse=lambda node: bool(node.attributes.get("center_point_box", 0)),
)
def non_max_suppression(b: Bind, p: bool) -> None:
    """NonMaxSuppression-11: boxes [N, n, 4], scores [N, C, n] -> int64 [kept, 3] of batch, class, box.

    How many are kept is known in the run only. ValueError where the shapes do not fit.
    """
    b.dynamic()
    boxes, scores = b.array(0), b.array(1)
    if boxes.ndim != 3 or scores.ndim != 3 or boxes.shape[::2] != (scores.shape[0], 4):
        raise ValueError(f"boxes are {list(boxes.shape)} and scores {list(scores.shape)}, not [N, n, 4] and [N, C, n]")
    if boxes.shape[1] != scores.shape[2]:
        raise ValueError(f"there are {boxes.shape[1]} boxes and scores of {scores.shape[2]}")
    most = int(b.const(2).reshape(-1)[0]) if b.has(2) else 0
    limit = np.float32(b.const(3).reshape(-1)[0]) if b.has(3) else np.float32(0)
    least = np.float32(b.const(4).reshape(-1)[0]) if b.has(4) else None
    b.value(0, lambda: _selected(boxes, scores, p, most, limit, least))


# Regions of interest ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regions:
    """Attributes of RoiAlign. `samples` 0: as many as a bin is wide. `shift`: what to subtract from coordinates."""

    height: int
    width: int
    samples: int
    scale: float
    shift: float
    largest: bool


def _parse_align(node: Node) -> Regions:
    get = node.attributes.get
    mode = str(get("mode", "avg"))
    # Before opset 16 coordinates were not shifted and there was no attribute.
    pixel = str(get("coordinate_transformation_mode", "half_pixel" if node.opset >= 16 else "output_half_pixel"))
    if mode not in ("avg", "max"):
        raise Unsupported(f"mode is {mode!r}, ONNX has avg, max")
    if pixel not in ("half_pixel", "output_half_pixel"):
        raise Unsupported(f"coordinate_transformation_mode is {pixel!r}, ONNX has half_pixel, output_half_pixel")
    return Regions(
        int(get("output_height", 1)),
        int(get("output_width", 1)),
        int(get("sampling_ratio", 0)),
        float(get("spatial_scale", 1.0)),
        0.5 if pixel == "half_pixel" else 0.0,
        mode == "max",
    )


def _samples(start: float, size: float, bins: int, samples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Linear interpolation on an axis: two pixels and their weights, both [2, bins * samples]."""
    step = size / bins
    at = start + step * (np.arange(bins)[:, None] + (np.arange(samples) + 0.5) / samples).reshape(-1)
    outside = (at < -1) | (at > length)
    at = np.clip(at, 0, length - 1)
    low = np.floor(at).astype(np.int64)
    weights = np.stack([1 - (at - low), at - low])
    weights[:, outside] = 0
    return np.stack([low, np.minimum(low + 1, length - 1)]), weights


def _means(pixels: np.ndarray, weights: np.ndarray, bins: int, length: int) -> np.ndarray:
    """[bins, length]: what each pixel of an axis counts in the mean of a bin's samples."""
    counted = np.zeros((pixels.shape[1], length))
    for pixel, weight in zip(pixels, weights, strict=True):
        np.add.at(counted, (np.arange(pixel.size), pixel), weight)
    means: np.ndarray = counted.reshape(bins, -1, length).mean(1)
    return means


def _maxima(x: np.ndarray, rows: Any, columns: Any, shape: tuple[int, int]) -> np.ndarray:
    """[C, *shape]: the largest weighted pixel of a bin, as ONNX's and onnxruntime's own code has it."""
    best: np.ndarray | None = None
    for row, tall in zip(*rows, strict=True):
        for column, wide in zip(*columns, strict=True):
            weighted = x[:, row[:, None], column] * (tall[:, None] * wide).astype(x.dtype)
            best = weighted if best is None else np.maximum(best, weighted)
    assert best is not None
    found: np.ndarray = best.reshape(x.shape[0], shape[0], -1, shape[1], columns[0].shape[1] // shape[1]).max((2, 4))
    return found


def _roi_align(x: np.ndarray, regions: np.ndarray, images: np.ndarray, p: Regions, y: np.ndarray) -> None:
    for region, image, out in zip(regions, images, y, strict=True):
        if not 0 <= image < x.shape[0]:
            raise IndexError(f"a region is of image {image}, there are {x.shape[0]}")
        left, top, right, bottom = (float(one) * p.scale - p.shift for one in region)
        height, width = bottom - top, right - left
        if not p.shift:
            height, width = max(height, 1.0), max(width, 1.0)
        tall = p.samples or max(math.ceil(height / p.height), 0)
        wide = p.samples or max(math.ceil(width / p.width), 0)
        if not tall or not wide:
            out[...] = 0
            continue
        rows = _samples(top, height, p.height, tall, x.shape[2])
        columns = _samples(left, width, p.width, wide, x.shape[3])
        if p.largest:
            np.copyto(out, _maxima(x[image], rows, columns, (p.height, p.width)))
        else:
            down, across = _means(*rows, p.height, x.shape[2]), _means(*columns, p.width, x.shape[3])
            np.copyto(out, down.astype(x.dtype) @ x[image] @ across.astype(x.dtype).T)


@kernel("RoiAlign", since=10, dtypes={0: FLOATS}, parse=_parse_align)
def roi_align(b: Bind, p: Regions) -> None:
    """RoiAlign-22: x [N, C, H, W], regions [n, 4] as x1, y1, x2, y2, images [n] -> [n, C, height, width].

    He et al., Mask R-CNN, 2017: means of bilinear samples per bin, or maxima of weighted pixels.
    """
    x, regions, images = b.array(0), b.array(1), b.array(2)
    y = b.out(0, (regions.shape[0], x.shape[1], p.height, p.width), x.dtype)
    computed = target(b, y)
    b.step(_roi_align, b.contiguous(cast(b, x, computed.dtype)), regions, images, p, computed)
    finish(b, y, computed)


def _parse_pool(node: Node) -> tuple[tuple[int, int], float]:
    shape = tuple(int(one) for one in node.attributes.get("pooled_shape", ()))
    if len(shape) != 2:
        raise Unsupported(f"pooled_shape is {list(shape)}, not two numbers")
    return (shape[0], shape[1]), float(node.attributes.get("spatial_scale", 1.0))


def _bins(start: int, stop: int, count: int, length: int) -> list[slice]:
    """The pixels of each bin of a region from `start` to `stop` inclusive, on an axis of `length`."""
    size = np.float32(max(stop - start + 1, 1)) / np.float32(count)
    lows = [start + math.floor(np.float32(i) * size) for i in range(count)]
    highs = [start + math.ceil(np.float32(i + 1) * size) for i in range(count)]
    return [slice(min(max(a, 0), length), min(max(z, 0), length)) for a, z in zip(lows, highs, strict=True)]


def _max_roi_pool(x: np.ndarray, regions: np.ndarray, p: tuple[tuple[int, int], float], y: np.ndarray) -> None:
    (height, width), scale = p
    y[...] = 0
    for region, out in zip(regions, y, strict=True):
        image = int(region[0])
        if not 0 <= image < x.shape[0]:
            raise IndexError(f"a region is of image {image}, there are {x.shape[0]}")
        # Halves are rounded away from zero, as C does.
        left, top, right, bottom = (
            int(math.copysign(math.floor(abs(one) + 0.5), one)) for one in (float(v) * scale for v in region[1:])
        )
        for i, rows in enumerate(_bins(top, bottom, height, x.shape[2])):
            for j, columns in enumerate(_bins(left, right, width, x.shape[3])):
                part = x[image, :, rows, columns]
                if part.size:
                    np.copyto(out[:, i, j], part.max((1, 2)))


@kernel("MaxRoiPool", dtypes={0: FLOATS}, parse=_parse_pool)
def max_roi_pool(b: Bind, p: tuple[tuple[int, int], float]) -> None:
    """MaxRoiPool-22: x [N, C, H, W], regions [n, 5] as image, x1, y1, x2, y2 -> [n, C, height, width].

    Girshick, Fast R-CNN, 2015; an empty bin gives 0.
    """
    x, regions = b.array(0), b.array(1)
    b.step(_max_roi_pool, x, regions, p, b.out(0, (regions.shape[0], x.shape[1], *p[0]), x.dtype))
