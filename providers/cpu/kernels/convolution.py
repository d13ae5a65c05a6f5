"""Conv and ConvTranspose: one GEMM over blocks of columns that fit the cache, depthwise by taps.

Also the core that the quantized convolutions share. Shapes: x [N, C, *spatial], weights [M, C / group, *kernel] (Conv)
or [C, M / group, *kernel] (ConvTranspose), bias [M], y [N, M, *out].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import finish, target, wide, widened
from outrider.providers.cpu.kernels.windows import Geometry, Window, geometry, padded, sliding, window
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

# Elements of a block of columns: 800 KB of float32 stay in the caches between the copy and the GEMM.
_COLUMNS = 200_000
# Elements of a block of depthwise sums: with its product and its input it stays in the second-level cache.
_SUMS = 32_000


@dataclass(frozen=True)
class Convolution:
    """Attributes of Conv and of the quantized convolutions."""

    window: Window
    group: int


def parse_convolution(node: Node) -> Convolution:
    """Window and group. Raises Unsupported for a group below 1."""
    group = int(node.attributes.get("group", 1))
    if group < 1:
        raise Unsupported(f"group is {group}")
    return Convolution(window(node), group)


def conv_geometry(p: Convolution, x: np.ndarray, w: np.ndarray) -> Geometry:
    """Check the shapes against each other and slide the window. Raises ValueError with the shapes that do not fit."""
    if x.ndim < 3 or w.ndim != x.ndim or x.shape[1] != w.shape[1] * p.group or w.shape[0] % p.group:
        raise ValueError(f"weights {list(w.shape)} in {p.group} groups do not fit an input {list(x.shape)}")
    return geometry(p.window, x.shape[2:], w.shape[2:])


def _run_blocks(blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]) -> None:
    for columns, windows, weights, matrix, out in blocks:
        np.copyto(columns, windows)
        np.matmul(weights, matrix, out)


def _pointwise(b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, group: int) -> None:
    count = math.prod(y.shape[2:])
    matrix = b.reshaped(x, (x.shape[0], group, x.shape[1] // group, count))
    b.step(np.matmul, w, matrix, y.reshape(y.shape[0], group, y.shape[1] // group, count))


def _by_columns(b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, group: int) -> None:
    """Copy windows into columns, multiply, block after block."""
    images, channels = x.shape[0], x.shape[1] // group
    taps, count = math.prod(g.kernel), math.prod(g.out)
    depth = channels * taps
    views = sliding(x, g)
    views = np.lib.stride_tricks.as_strided(  # split the channels into groups
        views,
        (images, group, channels) + views.shape[2:],
        (views.strides[0], views.strides[1] * channels) + views.strides[1:],
        writeable=False,
    )
    results = y.reshape((images, group, y.shape[1] // group) + g.out)
    blocks = []
    if group * depth * count <= _COLUMNS:  # several images at once
        many = min(images, max(1, _COLUMNS // (group * depth * count)))
        place = b.scratch((many,) + views.shape[1:], x.dtype)
        matrix, flat = place.reshape(many, group, depth, count), results.reshape(images, group, -1, count)
        for n in range(0, images, many):
            m = min(many, images - n)
            blocks.append((place[:m], views[n : n + m], w, matrix[:m], flat[n : n + m]))
    else:  # rows of one group of one image
        row = count // g.out[0]
        rows = max(1, min(g.out[0], _COLUMNS // (depth * row)))
        memory = b.scratch((depth * rows * row,), x.dtype)
        lead = (slice(None),) * (1 + len(g.kernel))
        for n in range(images):
            for k in range(group):
                for first in range(0, g.out[0], rows):
                    part = min(rows, g.out[0] - first)
                    place = memory[: depth * part * row].reshape((channels,) + g.kernel + (part,) + g.out[1:])
                    out = results[n, k].reshape(-1, count)[:, first * row : (first + part) * row]
                    windows = views[n, k][lead + (slice(first, first + part),)]
                    blocks.append((place, windows, w[k], place.reshape(depth, part * row), out))
    b.step(_run_blocks, blocks)


def _run_taps(blocks: list[tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray, Any, Any]]) -> None:
    for taps, total, product, out, cropped in blocks:
        first = True
        for x, w in taps:
            if first:
                np.multiply(x, w, total)
                first = False
            else:
                np.multiply(x, w, product)
                np.add(total, product, total)
        if out is not None:
            np.copyto(out, cropped)


def _depthwise(b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry) -> None:
    """One input channel per group: multiply and add shifted views, tap after tap.

    With unit strides a shifted plane is one contiguous run at the pitch of the padded input; the sums are made at that
    pitch and cropped at the end.
    """
    images, channels = x.shape[:2]
    times = y.shape[1] // channels
    weights = w.reshape(channels, times, -1)
    rank = len(g.out)
    flat = all(s == 1 for s in g.strides) and x.flags.c_contiguous and rank > 1
    pitch = [step // x.itemsize for step in x.strides[2:]]
    run = 1 + sum((o - 1) * p for o, p in zip(g.out, pitch, strict=True)) if flat else math.prod(g.out)
    many = max(1, min(channels, _SUMS // run))
    inner = (run,) if flat else g.out
    product = b.scratch((many,) + inner, x.dtype)
    sums = b.scratch((many,) + inner, x.dtype) if flat else None
    windows = sliding(x, g)
    planes = x.reshape(images, channels, -1) if flat else None
    results = y.reshape((images, channels, times) + g.out)
    column = (-1,) + (1,) * len(inner)
    offsets = [sum(t * d * p for t, d, p in zip(tap, g.dilations, pitch, strict=True)) for tap in g.taps()]
    blocks = []
    for n in range(images):
        for c in range(0, channels, many):
            m = min(many, channels - c)
            part = slice(c, c + m)
            for j in range(times):
                scale = [weights[part, j, k].reshape(column) for k in range(weights.shape[2])]
                out = results[n, part, j]
                if planes is not None and sums is not None:
                    shifted = [planes[n, part, o : o + run] for o in offsets]
                    total = sums[:m]
                    steps = (total.strides[0],) + tuple(p * x.itemsize for p in pitch)
                    cropped = np.lib.stride_tricks.as_strided(total, (m,) + g.out, steps, writeable=False)
                    blocks.append((list(zip(shifted, scale, strict=True)), total, product[:m], out, cropped))
                else:
                    shifted = [windows[(n, part) + tap] for tap in g.taps()]
                    blocks.append((list(zip(shifted, scale, strict=True)), out, product[:m], None, None))
    b.step(_run_taps, blocks)


def convolve(b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, group: int) -> None:
    """Record the steps of a convolution without bias, in the one floating dtype that all three arrays have.

    x [N, C, *padded] as `padded` gives it; w [M, C / group, *kernel], any strides; y [N, M, *out], C-contiguous.
    """
    if 0 in y.shape:
        return
    if 0 in x.shape or 0 in w.shape:
        b.step(y.fill, 0)
        return
    if x.shape[1] == group and group > 1:
        if w.flags.c_contiguous:
            _depthwise(b, x, w.reshape(w.shape[0], -1), y, g)
        else:
            _depthwise(b, x, b.contiguous(w).reshape(w.shape[0], -1), y, g)
        return
    matrix = b.reshaped(w, (group, w.shape[0] // group, w.shape[1] * math.prod(g.kernel)))
    if all(k == s == 1 for k, s in zip(g.kernel, g.strides, strict=True)) and x.shape[2:] == g.out:
        _pointwise(b, x, matrix, y, group)
    else:
        _by_columns(b, x, matrix, y, g, group)


def add_bias(b: Bind, y: np.ndarray, bias: np.ndarray) -> None:
    """Record y += bias, per channel."""
    if bias.shape != y.shape[1:2]:
        raise ValueError(f"bias {list(bias.shape)} does not fit an output {list(y.shape)}")
    b.step(np.add, y, b.reshaped(bias, bias.shape + (1,) * (y.ndim - 2)), y)


@kernel("Conv", dtypes={0: FLOATS}, parse=parse_convolution)
def conv(b: Bind, p: Convolution) -> None:
    """ONNX Conv-22, any number of spatial axes."""
    x, w = b.array(0), widened(b, 1)
    g = conv_geometry(p, x, w)
    y = b.out(0, (x.shape[0], w.shape[0]) + g.out, x.dtype)
    total = target(b, y)
    convolve(b, padded(b, x, g, 0, wide(x.dtype)), w, total, g, p.group)
    if b.has(2):
        add_bias(b, total, widened(b, 2))
    finish(b, y, total)


@dataclass(frozen=True)
class Transposed:
    """Attributes of ConvTranspose."""

    window: Window
    group: int
    output_padding: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None


def _parse_transposed(node: Node) -> Transposed:
    common = parse_convolution(node)
    extra = node.attributes.get("output_padding")
    shape = node.attributes.get("output_shape")
    return Transposed(
        common.window,
        common.group,
        tuple(int(v) for v in extra) if extra else None,
        tuple(int(v) for v in shape) if shape else None,
    )


def _placed(p: Transposed, spatial: tuple[int, ...], kernel_shape: tuple[int, ...]) -> tuple[Geometry, tuple[int, ...]]:
    """The geometry of the convolution that this one transposes (`out` is our input), and our spatial output shape."""
    rank, w = len(spatial), p.window
    strides, dilations = w.strides or (1,) * rank, w.dilations or (1,) * rank
    extra, pads = p.output_padding or (0,) * rank, w.pads or (0,) * (2 * rank)
    if not len(strides) == len(dilations) == len(extra) == len(pads) // 2 == len(kernel_shape) == rank:
        raise ValueError(f"window {w} does not fit {rank} spatial axes of {list(spatial)}")
    wanted: Sequence[int] | None = p.output_shape[-rank:] if p.output_shape else None
    if wanted is None and w.auto_pad.startswith("SAME"):
        wanted = [n * s for n, s in zip(spatial, strides, strict=True)]
    begin, end, out = [], [], []
    for i, size in enumerate(spatial):
        full = (size - 1) * strides[i] + (kernel_shape[i] - 1) * dilations[i] + 1 + extra[i]
        if wanted is not None:
            total = max(0, full - wanted[i])
            first = total // 2 if w.auto_pad == "SAME_UPPER" else total - total // 2
            last, length = total - first, wanted[i]
        else:
            first, last = (pads[i], pads[rank + i]) if w.auto_pad == "NOTSET" else (0, 0)
            length = full - first - last
        if length < 0:
            raise ValueError(f"pads {first}, {last} leave nothing of axis {i}, which has {full} positions")
        begin.append(first)
        end.append(last)
        out.append(length)
    return Geometry(kernel_shape, strides, dilations, tuple(begin), tuple(end), tuple(out), spatial), tuple(out)


def _run_scatter(
    images: list[tuple[np.ndarray, np.ndarray]],
    weights: np.ndarray,
    matrix: np.ndarray,
    total: np.ndarray,
    taps: list[tuple[np.ndarray, np.ndarray]],
    cropped: np.ndarray,
) -> None:
    for x, y in images:
        np.matmul(weights, x, matrix)
        total.fill(0)
        for place, column in taps:
            np.add(place, column, place)
        np.copyto(y, cropped)


@kernel("ConvTranspose", dtypes={0: FLOATS}, parse=_parse_transposed)
def conv_transpose(b: Bind, p: Transposed) -> None:
    """ONNX ConvTranspose-22: one GEMM per image, then each tap is added at its place."""
    x, w = b.array(0), widened(b, 1)
    if x.ndim < 3 or w.ndim != x.ndim or x.shape[1] != w.shape[0] or w.shape[0] % p.group:
        raise ValueError(f"weights {list(w.shape)} in {p.group} groups do not fit an input {list(x.shape)}")
    dtype = wide(x.dtype)
    x = widened(b, 0)
    g, out = _placed(p, x.shape[2:], w.shape[2:])
    images, channels, per_group = x.shape[0], x.shape[1] // p.group, w.shape[1]
    y = b.out(0, (images, per_group * p.group) + out, b.array(0).dtype)
    result = target(b, y)
    if x.size and w.size and y.size:
        count, depth = math.prod(g.out), per_group * math.prod(g.kernel)
        weights = b.reshaped(w, (p.group, channels, depth)).swapaxes(1, 2)
        flat = b.reshaped(x, (images, p.group, channels, count))
        columns = b.scratch((p.group * per_group,) + g.kernel + g.out, dtype)
        length = tuple(max(e, o + f) for e, o, f in zip(g.extent, out, g.begin, strict=True))
        total = b.scratch((p.group * per_group,) + length, dtype)
        taps = []
        for tap in g.taps():
            place = tuple(
                slice(t * d, t * d + (o - 1) * s + 1, s)
                for t, d, o, s in zip(tap, g.dilations, g.out, g.strides, strict=True)
            )
            taps.append((total[(slice(None),) + place], columns[(slice(None),) + tap]))
        cropped = total[(slice(None),) + tuple(slice(f, f + o) for f, o in zip(g.begin, out, strict=True))]
        matrix = columns.reshape(p.group, depth, count)
        b.step(_run_scatter, [(flat[n], result[n]) for n in range(images)], weights, matrix, total, taps, cropped)
    elif y.size:
        b.step(result.fill, 0)
    if b.has(2):
        add_bias(b, result, widened(b, 2))
    finish(b, y, result)
