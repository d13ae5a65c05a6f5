"""Conv as GEMMs over blocks that fit the cache.

Also the core that the quantized convolutions share. Shapes: x [N, C, *spatial], weights [M, C / group, *kernel],
bias [M], y [N, M, *out].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from outrider.providers.cpu.kernels.depthwise import compiled_depthwise, depthwise
from outrider.providers.cpu.kernels.direct import convolve_directly
from outrider.providers.cpu.kernels.enlarged import with_larger_residual
from outrider.providers.cpu.kernels.epilogue import (
    PAD,
    Epilogue,
    epilogue,
    finish_product,
    parse_epilogue,
    per_feature,
)
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, channels_last, kernel
from outrider.providers.cpu.kernels.precision import finish, target, wide, widened
from outrider.providers.cpu.kernels.windows import COLUMNS, Geometry, Window, geometry, padded, sliding, window
from outrider.providers.cpu.team import product_time
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node


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


# Columns, the windows to copy there, weights, the columns as a matrix, where the product goes.
_Block = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _run_blocks(blocks: list[_Block]) -> None:
    for columns, windows, weights, matrix, out in blocks:
        np.copyto(columns, windows)
        np.matmul(weights, matrix, out)


def _pointwise(b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, group: int) -> None:
    count = math.prod(y.shape[2:])
    if count == 1 or w.shape[1] == 1:  # GEMV, which shows strides in the last bits
        x = b.contiguous(x)
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
    shares = b.shares(product_time(y.shape[1], images * count, depth, y.itemsize))
    if group * depth * count <= COLUMNS and images >= shares:  # several images at once
        many = min(images // shares, max(1, COLUMNS // (group * depth * count)))

        def blocks() -> Iterator[_Block]:
            place = b.scratch((many,) + views.shape[1:], x.dtype)
            matrix, flat = place.reshape(many, group, depth, count), results.reshape(images, group, -1, count)
            for n in range(0, images, many):
                m = min(many, images - n)
                yield place[:m], views[n : n + m], w, matrix[:m], flat[n : n + m]

    else:  # rows of one group of one image
        row = count // g.out[0]
        rows = max(1, min(-(-g.out[0] // shares), COLUMNS // (depth * row)))
        lead = (slice(None),) * (1 + len(g.kernel))

        def blocks() -> Iterator[_Block]:
            memory = b.scratch((depth * rows * row,), x.dtype)
            for n in range(images):
                for k in range(group):
                    for first in range(0, g.out[0], rows):
                        part = min(rows, g.out[0] - first)
                        place = memory[: depth * part * row].reshape((channels,) + g.kernel + (part,) + g.out[1:])
                        out = results[n, k].reshape(-1, count)[:, first * row : (first + part) * row]
                        windows = views[n, k][lead + (slice(first, first + part),)]
                        yield place, windows, w[k], place.reshape(depth, part * row), out

    b.at_once(_run_blocks, [[*blocks()][share::shares] for share in range(shares)])


# Part of the result, and (weights, input, their product, its parts, one per tap, to add up there).
_Shifts = tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]]]


def _run_shifts(blocks: list[_Shifts]) -> None:
    for out, products in blocks:
        first = True
        for weights, x, product, parts in products:
            np.matmul(weights, x, product)
            for part in parts:
                if first:
                    np.copyto(out, part)
                    first = False
                else:
                    np.add(out, part, out)


def _by_shifts(
    b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, i: int, known: np.ndarray | None
) -> None:
    """Few features, unit strides, one or two axes: multiply all taps with the input as it lies, add shifted products.

    Nothing is copied into columns, and the taps of a kernel row (of the whole kernel, when features are very few) make
    the GEMM tall enough together. x is padded and C-contiguous.
    """
    order = (*range(2, w.ndim), 0, 1)  # [*kernel, M, C]
    if known is None:
        weights = b.contiguous(w.transpose(order))
    else:
        weights = b.packed(f"taps first {w.dtype.name}", i, lambda _: np.ascontiguousarray(known.transpose(order)))
    features, channels = w.shape[:2]
    (tall, taps), (below, aside) = ((1,) * (2 - len(g.kernel)) + d for d in (g.kernel, g.dilations))
    height, length = (1,) * (2 - len(g.out)) + g.out
    pitch = x.shape[-1]
    planes = x.reshape(x.shape[0], channels, -1)
    weights, results = weights.reshape(tall, taps, features, channels), y.reshape(-1, features, height, length)
    joint = taps * features < 32
    halo = (tall - 1) * below if joint else 0
    together = tall if joint else 1
    shares = b.shares(product_time(y.size, tall * taps, channels, y.itemsize))
    rows = max(1, min(-(-height // shares), COLUMNS // (together * taps * features * pitch) - halo))

    def blocks() -> Iterator[_Shifts]:
        memory = b.scratch((together * taps * features * (rows + halo) * pitch,), y.dtype)
        for n in range(len(planes)):
            for top in range(0, height, rows):
                r = min(rows, height - top)
                products = []
                for first in range(0, tall, together):
                    start = (top + first * below) * pitch
                    size = (r + halo) * pitch
                    place = memory[: together * taps * features * size]
                    stack = place.reshape(together, taps, features, r + halo, pitch)
                    parts = [
                        stack[k, t, :, k * below : k * below + r, t * aside : t * aside + length]
                        for k in range(together)
                        for t in range(taps)
                    ]
                    matrix = weights[first : first + together].reshape(-1, channels)
                    products.append((matrix, planes[n, :, start : start + size], place.reshape(-1, size), parts))
                yield results[n, :, top : top + r], products

    b.at_once(_run_shifts, [[*blocks()][share::shares] for share in range(shares)])


def _is_depthwise(x: np.ndarray, group: int) -> bool:
    return x.shape[1] == group and group > 1


def convolve(
    b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, group: int, i: int, known: np.ndarray | None
) -> None:
    """Record the steps of a convolution without bias, padded with zeros, in the floating dtype of w and y.

    x [N, C, *spatial], any dtype that converts; w [M, C / group, *kernel], any strides; y [N, M, *out], C-contiguous.
    `i`: which input the weights come from; `known`: their contents where they are known already.
    """
    if 0 in y.shape:
        return
    if 0 in x.shape or 0 in w.shape:
        b.step(y.fill, 0)
        return
    if _is_depthwise(x, group):
        depthwise(b, x, w, y, g, i, known)
        return
    x = padded(b, x, g, 0, y.dtype)
    matrix = b.reshaped(w, (group, w.shape[0] // group, w.shape[1] * math.prod(g.kernel)))
    if all(k == s == 1 for k, s in zip(g.kernel, g.strides, strict=True)) and x.shape[2:] == g.out:
        _pointwise(b, x, matrix, y, group)
    elif group == 1 and 2 * w.shape[0] <= w.shape[1] and len(g.out) < 3 and set(g.strides) == {1}:
        _by_shifts(b, b.contiguous(x), w, y, g, i, known)
    else:
        _by_columns(b, x, matrix, y, g, group)


@dataclass(frozen=True)
class Fused:
    """A convolution and what follows it in the same kernel."""

    convolution: Convolution
    epilogue: Epilogue


def _parse_plain(node: Node) -> Fused:
    return Fused(parse_convolution(node), Epilogue())


def _parse_own(node: Node) -> Fused:
    return Fused(parse_convolution(node), parse_epilogue(node))


def _parse_microsoft(node: Node) -> Fused:
    get = node.attributes.get
    parameters = [float(value) for value in get("activation_params", ())]
    return Fused(parse_convolution(node), epilogue(str(get("activation", "")), parameters, "before"))


def _padded_first(b: Bind, x: np.ndarray, g: Geometry) -> tuple[np.ndarray, Geometry]:
    """x with the values of input PAD around it, and the geometry that remains."""
    values = per_feature(b, PAD, x.shape[1])
    fill = b.reshaped(values, values.shape + (1,) * len(g.out))
    x = padded(b, x, g, fill, wide(x.dtype))
    nothing = (0,) * len(g.out)
    return x, replace(g, begin=nothing, end=nothing, spatial=x.shape[2:])


_COMPILED = ("conv", "depthwise", "copy")


@kernel("Conv", domain="outrider", dtypes={0: FLOATS}, parse=_parse_own, compiled=_COMPILED)
@kernel("FusedConv", domain="com.microsoft", dtypes={0: FLOATS}, parse=_parse_microsoft, compiled=_COMPILED)
@kernel("Conv", dtypes={0: FLOATS}, parse=_parse_plain, compiled=_COMPILED)
def conv(b: Bind, p: Fused) -> None:
    """ONNX Conv-22, any number of spatial axes; `com.microsoft::FusedConv`; both with all of `epilogue.py`."""
    x, w, group = b.array(0), b.array(1), p.convolution.group
    g = conv_geometry(p.convolution, x, w)
    shape, library = (x.shape[0], w.shape[0]) + g.out, b.compiled("conv")
    if with_larger_residual(b, conv, p, shape, 1):
        return
    if _is_depthwise(x, group) and compiled_depthwise(b, widened(b, 1), g, p.epilogue):
        return
    if library is not None and wide(x.dtype) == np.float32 and len(g.out) <= 3 and not _is_depthwise(x, group):
        order = channels_last(x.ndim)
        y = b.out(0, shape, x.dtype, order)
        total = y if y.dtype == np.float32 else b.scratch(shape, np.float32, order)
        if x.size and w.size and y.size:
            convolve_directly(b, library, widened(b, 0), w, total, g, group, p.epilogue)
            finish(b, y, total)
            return
    else:
        y = b.out(0, shape, x.dtype)
        total = target(b, y)
    w = widened(b, 1)
    if b.has(PAD):
        x, g = _padded_first(b, x, g)
    known = None
    if b.is_const(1):
        known = b.const(1) if b.array(1).dtype == w.dtype else w
    convolve(b, x, w, total, g, group, 1, known)
    finish_product(b, total, p.epilogue, 1)
    finish(b, y, total)
