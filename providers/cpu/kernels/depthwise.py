"""Depthwise convolution: one input channel per group.

Shapes: x [N, C, *spatial], weights [C * times, 1, *kernel], y [N, C * times, *out].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np

from outrider.providers.cpu.kernels.epilogue import PAD, RESIDUAL, Epilogue
from outrider.providers.cpu.kernels.frame import Bind, channels_last
from outrider.providers.cpu.kernels.panels import epilogue_words, operands, padded_features
from outrider.providers.cpu.kernels.windows import (
    COLUMNS,
    Geometry,
    padded,
    plane,
    plane_strides,
    plane_words,
    sliding,
)
from outrider.providers.cpu.team import product_time

_LANES, _MOST_ROWS = 16, 64  # as depthwise.c has them
_RING = (
    384  # positions of LANES floats that the rows of the ring may have: 24 KB, so that L1 holds weights and sums too
)


def _by_taps(windows: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """The plain way: windows [C, *kernel, *out] times w [C, times, taps], tap after tap, into y [C, times, *out]."""
    rank = y.ndim - 2
    column = w.shape[:2] + (1,) * rank
    y.fill(0)
    for k, tap in enumerate(np.ndindex(windows.shape[1 : 1 + rank])):
        np.add(y, windows[(slice(None), *tap)][:, None] * w[:, :, k].reshape(column), y)


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


def depthwise(
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
    shares = b.shares(product_time(y.size, rows * span, 1, y.itemsize))
    many = max(1, min(-(-channels // shares), COLUMNS // (depth * inner * lead[0])))
    part = lead[0] if len(lead) == 1 else max(1, min(lead[0], COLUMNS // (depth * inner)))  # rows of one block
    exact = count * width == length
    flat = y.reshape(images, channels, times, -1, width) if exact else y

    def blocks() -> Iterator[_Band]:
        columns = b.scratch((many * part * inner * depth,), dtype)
        place = None if exact else b.scratch((many * times * part * inner * width,), dtype)
        for n, c, first in itertools.product(range(images), range(0, channels, many), range(0, lead[0], part)):
            m, r = min(many, channels - c), min(part, lead[0] - first)
            own = slice(c, c + m)
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
            yield _Band(
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

    b.at_once(_run_bands, [[*blocks()][share::shares] for share in range(shares)])


# Compiled ------------------------------------------------------------------------------------------------------------
def _packed(w: np.ndarray) -> np.ndarray:
    """[C, 1, *kernel] as [blocks, *kernel, LANES], with zeros after the last channel."""
    blocks, taps = -(-len(w) // _LANES), math.prod(w.shape[2:])
    packed = np.zeros((blocks, taps, _LANES), np.float32)
    for block, part in enumerate(packed):
        lanes = w[block * _LANES : (block + 1) * _LANES].reshape(-1, taps)
        part[:, : len(lanes)] = lanes.T
    return packed


def _fill_packed(w: np.ndarray, packed: np.ndarray) -> None:
    np.copyto(packed, _packed(w))


def compiled_depthwise(b: Bind, w: np.ndarray, g: Geometry, p: Epilogue) -> bool:
    """Record the whole convolution, epilogue included, by the compiled library; False where that does not take it.

    It takes float32, one or two spatial axes, and as many outputs as inputs.
    """
    library, x = b.compiled("depthwise"), b.array(0)
    images, channels = x.shape[:2]
    shape = (images, w.shape[0]) + g.out
    if library is None or x.dtype != np.float32 or x.ndim > 4 or channels != w.shape[0]:
        return False
    if p.residual and b.has(RESIDUAL) and np.broadcast_shapes(shape, b.array(RESIDUAL).shape) != shape:
        return False  # it enlarges the output
    # Along the columns an input serves several outputs: a kernel of one column lies along the rows.
    swapped = len(g.kernel) == 2 and g.kernel[1] == 1 and g.kernel[0] > 1
    if swapped:
        g = Geometry(*(tuple(reversed(values)) for values in astuple(g)))
    kernel, strides, dilations, out = (plane(v, 1) for v in (g.kernel, g.strides, g.dilations, g.out))
    if 0 in shape or 0 in x.shape or 0 in w.shape or kernel[0] > _MOST_ROWS:
        return False
    last = channels_last(x.ndim)
    order = (0, 3, 2, 1) if swapped else last
    y = b.out(0, shape, np.float32, last)
    place = y if y.strides[1] == 4 else b.scratch(shape, np.float32, last)
    if x.strides[1] != 4:
        x = b.contiguous(x, last)
    blocks = -(-channels // _LANES)
    if b.is_const(1):
        weights = b.packed("lanes", 1, _packed)
    else:
        weights = b.scratch((blocks, math.prod(kernel), _LANES), np.float32)
        b.step(_fill_packed, w, weights)

    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    direct = (
        kernel[1] == reach[1] == 3 and strides[1] <= 2 and out[1] >= 40 and _cached(kernel[0] * (7 * strides[1] + 3), x)
    )
    block = 16 * _LANES if direct else _LANES
    columns = out[1] if direct else max(8, (_RING // reach[0] - reach[1]) // strides[1])
    segments = -(-out[1] // columns)
    columns = -(-out[1] // segments)
    width = (-(-columns // 4) * 4 - 1) * strides[1] + reach[1]
    items = images * segments * -(-channels // block)
    bands = max(1, min(out[0] // (4 * reach[0]), -(-4 * library.threads // items)))
    tasks = library.tasks(items * bands, y.size * (0.3 + 0.03 * math.prod(kernel)), 4)
    memory = max(kernel[0] * 17, reach[0] * width) * _LANES
    scratch = b.scratch((library.threads, memory), np.float32)
    made, given = (place.swapaxes(2, 3), x.swapaxes(2, 3)) if swapped else (place, x)
    b.step(
        library.call(
            "or_depthwise", tasks, place, x, weights, padded_features(b, PAD, channels), scratch, memory,
            channels, images, tasks, bands, segments, block, direct, reach[0], width,
            *plane_strides(made), *plane_strides(given), *plane_words(g),
            *epilogue_words(b, p, operands(b, p, channels), y, channels, 1, order),
        )
    )  # fmt: skip
    if place is not y:
        b.copy(y, place)
    return True


def _cached(inputs: int, x: np.ndarray) -> bool:
    """Whether so many neighbouring pixels of x fit an L1 cache with 64 sets of 8 lines of 64 bytes side by side."""
    return inputs <= 6 * 64 // math.gcd(max(1, x.strides[-1] // 64), 64)
