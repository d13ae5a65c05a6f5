"""Conv and ConvTranspose as GEMMs over blocks that fit the cache.

Also the core that the quantized convolutions share. Shapes: x [N, C, *spatial], weights [M, C / group, *kernel] (Conv)
or [C, M / group, *kernel] (ConvTranspose), bias [M], y [N, M, *out].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.epilogue import Epilogue, epilogue, finish_product, parse_epilogue
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import finish, target, wide, widened
from outrider.providers.cpu.kernels.windows import Geometry, Window, geometry, padded, sliding, window
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node

# Elements of a block of columns: 800 KB of float32 stay in the caches between the copy and the GEMM.
_COLUMNS = 200_000


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


def _by_taps(windows: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """The plain way: windows [C, *kernel, *out] times w [C, times, taps], tap after tap, into y [C, times, *out]."""
    rank = y.ndim - 2
    column = w.shape[:2] + (1,) * rank
    y.fill(0)
    for k, tap in enumerate(np.ndindex(windows.shape[1 : 1 + rank])):
        np.add(y, windows[(slice(None), *tap)][:, None] * w[:, :, k].reshape(column), y)


def _run_shifts(
    blocks: list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]]]],
) -> None:
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
    rows = max(1, min(height, _COLUMNS // (together * taps * features * pitch) - halo))
    memory = b.scratch((together * taps * features * (rows + halo) * pitch,), y.dtype)
    blocks = []
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
            blocks.append((results[n, :, top : top + r], products))
    b.step(_run_shifts, blocks)


@dataclass(frozen=True)
class _Band:
    """A block of a depthwise convolution; `cropped`: the part of `product` that goes to `out` (None: it lies there)."""

    columns: np.ndarray
    source: np.ndarray
    matrix: np.ndarray
    bands: np.ndarray
    product: np.ndarray
    cropped: np.ndarray | None
    out: np.ndarray
    windows: np.ndarray
    weights: np.ndarray


def _run_bands(blocks: list[_Band]) -> None:
    for block in blocks:
        np.copyto(block.columns, block.source)
        np.matmul(block.matrix, block.bands, block.product)
        # The zeros of a band times inf or nan are nan: with such inputs each output must see its own window only.
        if not np.isfinite(np.add.reduce(block.product, None)):
            _by_taps(block.windows, block.weights, block.out)
        elif block.cropped is not None:
            np.copyto(block.out, block.cropped)


def _fill_bands(w: np.ndarray, bands: np.ndarray, stride: int, dilation: int) -> None:
    """w [M, rows, taps] as banded matrices [M, rows, span, width]: column j holds the taps from row j * stride on."""
    bands.fill(0)
    step = bands.strides
    shape, strides = bands.shape[:2] + bands.shape[3:], (step[0], step[1], step[2] * stride + step[3])
    for tap in range(w.shape[2]):
        diagonal = np.lib.stride_tricks.as_strided(bands[:, :, tap * dilation :], shape, strides)
        np.copyto(diagonal, w[:, :, tap, None])


def _band_width(length: int) -> int:
    """How many neighbouring outputs share a row of columns: near 16, wasting as few positions as possible."""
    if length <= 24:
        return length
    return min(range(12, 25), key=lambda width: (-(-length // width) * width, abs(width - 16)))


def _depthwise(
    b: Bind, x: np.ndarray, w: np.ndarray, y: np.ndarray, g: Geometry, i: int, known: np.ndarray | None
) -> None:
    """One input channel per group: each row of columns makes `width` neighbours along the last axis.

    The weights of a channel become a banded matrix. Its zeros cost multiplications, yet the GEMM is several times
    faster than passes over shifted views.
    """
    images, channels, dtype = x.shape[0], x.shape[1], y.dtype
    times, length, stride, dilation = y.shape[1] // channels, g.out[-1], g.strides[-1], g.dilations[-1]
    width = _band_width(length)
    count = -(-length // width)
    span = (width - 1) * stride + (g.kernel[-1] - 1) * dilation + 1
    x = padded(b, x, replace(g, out=g.out[:-1] + (count * width,)), 0, dtype)

    rows, taps = math.prod(g.kernel[:-1]), g.kernel[-1]
    shape = (channels * times, rows, span, width)
    if known is None:
        bands = b.scratch(shape, dtype)
        b.step(_fill_bands, b.reshaped(w, (channels * times, rows, taps)), bands, stride, dilation)
    else:

        def make(_: np.ndarray) -> np.ndarray:
            made = np.empty(shape, dtype)
            _fill_bands(known.reshape(channels * times, rows, taps), made, stride, dilation)
            return made

        bands = b.packed(f"bands {shape} {stride} {dilation} {dtype.name}", i, make)
    matrices = bands.reshape(channels, times, rows * span, width)
    plain = b.reshaped(w, (channels, times, rows * taps))

    step = x.strides
    source = np.lib.stride_tricks.as_strided(
        x,
        (images, channels) + g.out[:-1] + (count,) + g.kernel[:-1] + (span,),
        step[:2]
        + tuple(p * s for p, s in zip(step[2:-1], g.strides[:-1], strict=True))
        + (step[-1] * stride * width,)
        + tuple(p * d for p, d in zip(step[2:-1], g.dilations[:-1], strict=True))
        + (step[-1],),
        writeable=False,
    )
    windows, results = sliding(x, g), y.reshape((images, channels, times) + g.out)
    lead = g.out[:-1] + (count,)
    depth, inner = rows * span, math.prod(lead[1:])
    many = max(1, min(channels, _COLUMNS // (depth * inner * lead[0])))
    part = lead[0] if len(lead) == 1 else max(1, min(lead[0], _COLUMNS // (depth * inner)))  # rows of one block
    columns = b.scratch((many * part * inner * depth,), dtype)
    exact = count * width == length
    place = None if exact else b.scratch((many * times * part * inner * width,), dtype)
    flat = y.reshape(images, channels, times, -1, width) if exact else y
    blocks = []
    for n in range(images):
        for c in range(0, channels, many):
            m = min(many, channels - c)
            own = slice(c, c + m)
            for first in range(0, lead[0], part):
                r = min(part, lead[0] - first)
                memory = columns[: m * r * inner * depth]
                out, below = results[n, own], windows[n, own]
                if len(lead) > 1:
                    out = out[:, :, first : first + r]
                    below = below[(slice(None),) * (1 + len(g.kernel)) + (slice(first, first + r),)]
                if place is None:
                    product, cropped = flat[n, own, :, first * inner : (first + r) * inner], None
                else:
                    product = place[: m * times * r * inner * width].reshape(m, times, r * inner, width)
                    cropped = product.reshape(out.shape[:-1] + (count * width,))[..., :length]
                blocks.append(
                    _Band(
                        memory.reshape((m, r) + lead[1:] + g.kernel[:-1] + (span,)),
                        source[n, own, first : first + r],
                        memory.reshape(m, 1, r * inner, depth),
                        matrices[own],
                        product,
                        cropped,
                        out,
                        below,
                        plain[own],
                    )
                )
    b.step(_run_bands, blocks)


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
    if x.shape[1] == group and group > 1:
        _depthwise(b, x, w, y, g, i, known)
        return
    x = padded(b, x, g, 0, y.dtype)
    matrix = b.reshaped(w, (group, w.shape[0] // group, w.shape[1] * math.prod(g.kernel)))
    if all(k == s == 1 for k, s in zip(g.kernel, g.strides, strict=True)) and x.shape[2:] == g.out:
        _pointwise(b, x, matrix, y, group)
    elif group == 1 and 2 * w.shape[0] <= w.shape[1] and len(g.out) < 3 and set(g.strides) == {1}:
        _by_shifts(b, b.contiguous(x), w, y, g, i, known)
    else:
        _by_columns(b, x, matrix, y, g, group)


def add_bias(b: Bind, y: np.ndarray, bias: np.ndarray) -> None:
    """Record y += bias, per channel."""
    if bias.shape != y.shape[1:2]:
        raise ValueError(f"bias {list(bias.shape)} does not fit an output {list(y.shape)}")
    b.step(np.add, y, b.reshaped(bias, bias.shape + (1,) * (y.ndim - 2)), y)


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


@kernel("Conv", domain="outrider", dtypes={0: FLOATS}, parse=_parse_own)
@kernel("FusedConv", domain="com.microsoft", dtypes={0: FLOATS}, parse=_parse_microsoft)
@kernel("Conv", dtypes={0: FLOATS}, parse=_parse_plain)
def conv(b: Bind, p: Fused) -> None:
    """ONNX Conv-22, any number of spatial axes; `com.microsoft::FusedConv`; both with all of `epilogue.py`."""
    x, w = b.array(0), widened(b, 1)
    g = conv_geometry(p.convolution, x, w)
    y = b.out(0, (x.shape[0], w.shape[0]) + g.out, x.dtype)
    total = target(b, y)
    known = None
    if b.is_const(1):
        known = b.const(1) if b.array(1).dtype == w.dtype else w
    convolve(b, x, w, total, g, p.convolution.group, 1, known)
    finish_product(b, total, p.epilogue, 1)
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


def _run_spread(
    images: list[tuple[np.ndarray, list[np.ndarray]]], weights: np.ndarray, matrix: np.ndarray, taps: list[np.ndarray]
) -> None:
    """Taps that tile the output: each position is written once."""
    for x, places in images:
        np.matmul(weights, x, matrix)
        for place, column in zip(places, taps, strict=True):
            np.copyto(place, column)


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
        if count == 1 or depth == 1:  # GEMV, which shows strides in the last bits
            x, w = b.contiguous(x), b.contiguous(w)
        weights = b.reshaped(w, (p.group, channels, depth)).swapaxes(1, 2)
        flat = b.reshaped(x, (images, p.group, channels, count))
        features = p.group * per_group
        columns = b.scratch((features,) + g.kernel + g.out, dtype)
        matrix = columns.reshape(p.group, depth, count)
        tiled = g.kernel == g.strides and not any(g.begin) and set(g.dilations) == {1}
        if tiled and out == tuple(o * s for o, s in zip(g.out, g.strides, strict=True)):
            each: list[tuple[Any, ...]] = [(slice(None), *tap) for tap in g.taps()]
            steps = [tuple(slice(t, None, k) for t, k in zip(tap, g.kernel, strict=True)) for tap in g.taps()]
            places: list[tuple[Any, ...]] = [(slice(None), *step) for step in steps]
            images_out = [(flat[n], [result[n][place] for place in places]) for n in range(images)]
            b.step(_run_spread, images_out, weights, matrix, [columns[at] for at in each])
        else:
            length = tuple(max(e, o + f) for e, o, f in zip(g.extent, out, g.begin, strict=True))
            total = b.scratch((features,) + length, dtype)
            taps = []
            for tap in g.taps():
                place = tuple(
                    slice(t * d, t * d + (o - 1) * s + 1, s)
                    for t, d, o, s in zip(tap, g.dilations, g.out, g.strides, strict=True)
                )
                taps.append((total[(slice(None),) + place], columns[(slice(None),) + tap]))
            cropped = total[(slice(None),) + tuple(slice(f, f + o) for f, o in zip(g.begin, out, strict=True))]
            b.step(_run_scatter, [(flat[n], result[n]) for n in range(images)], weights, matrix, total, taps, cropped)
    elif y.size:
        b.step(result.fill, 0)
    if b.has(2):
        add_bias(b, result, widened(b, 2))
    finish(b, y, result)
