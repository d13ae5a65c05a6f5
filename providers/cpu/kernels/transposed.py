"""ConvTranspose: x [N, C, *spatial], weights [C, M / group, *kernel], bias [M], y [N, M, *out]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.convolution import parse_convolution
from outrider.providers.cpu.kernels.enlarged import with_larger_residual
from outrider.providers.cpu.kernels.epilogue import Epilogue, finish_product, parse_epilogue
from outrider.providers.cpu.kernels.frame import Bind, channels_last, kernel
from outrider.providers.cpu.kernels.gathered import transpose_convolve
from outrider.providers.cpu.kernels.precision import finish, target, wide, widened
from outrider.providers.cpu.kernels.windows import Geometry, Window
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Transposed:
    """Attributes of ConvTranspose."""

    window: Window
    group: int
    output_padding: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    epilogue: Epilogue = Epilogue()


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


def _parse_own(node: Node) -> Transposed:
    return replace(_parse_transposed(node), epilogue=parse_epilogue(node))


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


@kernel("ConvTranspose", domain="outrider", dtypes={0: FLOATS}, parse=_parse_own, compiled="conv")
@kernel("ConvTranspose", dtypes={0: FLOATS}, parse=_parse_transposed, compiled="conv")
def conv_transpose(b: Bind, p: Transposed) -> None:
    """ONNX ConvTranspose-22, also with all of `epilogue.py`: one GEMM per image, each tap is added at its place."""
    x, w = b.array(0), widened(b, 1)
    if x.ndim < 3 or w.ndim != x.ndim or x.shape[1] != w.shape[0] or w.shape[0] % p.group:
        raise ValueError(f"weights {list(w.shape)} in {p.group} groups do not fit an input {list(x.shape)}")
    dtype = wide(x.dtype)
    x = widened(b, 0)
    g, out = _placed(p, x.shape[2:], w.shape[2:])
    images, channels, per_group = x.shape[0], x.shape[1] // p.group, w.shape[1]
    shape, library = (images, per_group * p.group) + out, b.compiled("conv")
    if with_larger_residual(b, conv_transpose, p, shape, 1):
        return
    if library is not None and dtype == np.float32 and x.ndim <= 4 and x.size and w.size and math.prod(shape):
        order = channels_last(x.ndim)
        y = b.out(0, shape, b.array(0).dtype, order)
        result = y if y.dtype == np.float32 else b.scratch(shape, np.float32, order)
        transpose_convolve(b, library, x, w, result, replace(g, spatial=g.out, out=out), p.group, p.epilogue)
        finish(b, y, result)
        return
    y = b.out(0, shape, b.array(0).dtype)
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
            for n in range(images):  # taps that tile the output: each position is written once
                b.step(np.matmul, weights, flat[n], matrix)
                for place, at in zip(places, each, strict=True):
                    b.step(np.copyto, result[n][place], columns[at])
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
    finish_product(b, result, p.epilogue, 1)
    finish(b, y, result)
