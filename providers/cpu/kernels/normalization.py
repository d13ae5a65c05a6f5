"""Normalizations over channels, groups, trailing axes and neighbours; statistics of 16-bit floats in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.blockwise import into, takes
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import cast, finish, target, wide, widened
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Batch:
    """Attributes of BatchNormalization."""

    epsilon: float
    momentum: float
    training: bool


def _parse_batch(node: Node) -> Batch:
    get = node.attributes.get
    training = bool(get("training_mode", 0))
    if not training and sum(1 for output in node.outputs if output.name) > 1:
        raise Unsupported("running statistics as outputs without training_mode")
    if get("spatial", 1) != 1:
        raise Unsupported("spatial 0")
    return Batch(float(get("epsilon", 1e-5)), float(get("momentum", 0.9)), training)


def _affine(
    scale: np.ndarray, bias: np.ndarray, mean: np.ndarray, var: np.ndarray, eps: float, out: np.ndarray
) -> None:
    """out[0] = scale / sqrt(var + eps), out[1] = bias - mean * out[0]."""
    np.add(var, eps, out[0])
    np.sqrt(out[0], out[0])
    np.divide(scale, out[0], out[0])
    np.multiply(mean, out[0], out[1])
    np.subtract(bias, out[1], out[1])


def _statistics(x: np.ndarray, axes: tuple[int, ...], mean: np.ndarray, var: np.ndarray) -> None:
    """Mean and population variance over `axes`; both keep them as 1."""
    count = x.size // max(1, mean.size)
    np.add.reduce(x, axes, None, mean, keepdims=True)
    np.divide(mean, count, mean)
    centred = x - mean
    np.multiply(centred, centred, centred)
    np.add.reduce(centred, axes, None, var, keepdims=True)
    np.divide(var, count, var)


def _blend(old: np.ndarray, new: np.ndarray, momentum: float, out: np.ndarray) -> None:
    np.copyto(out, old * momentum + new * (1 - momentum), "unsafe")


@kernel("BatchNormalization", since=7, dtypes={0: FLOATS}, parse=_parse_batch, compiled="norm")
def batch_normalization(b: Bind, p: Batch) -> None:
    """ONNX BatchNormalization-15: a multiply and an add per element; in training mode with the batch's statistics."""
    x = b.array(0)
    if x.ndim < 1:
        raise ValueError("the input has no axes")
    channels = x.shape[1] if x.ndim > 1 else 1
    y = b.reuse(0, 0)
    total = target(b, y)
    dtype = total.dtype
    shape = (channels,) + (1,) * max(0, x.ndim - 2)
    x = cast(b, x, dtype)
    affine = b.scratch((2, channels), dtype)
    if p.training:
        x = b.contiguous(x)  # strides must not show in the last bits of sums
        mean, var = b.scratch(shape, dtype), b.scratch(shape, dtype)
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        kept = (1,) * min(1, x.ndim - 1) + shape
        b.step(_statistics, x, axes, mean.reshape(kept), var.reshape(kept))
        mean, var = mean.reshape(channels), var.reshape(channels)
        b.step(_affine, widened(b, 1), widened(b, 2), mean, var, p.epsilon, affine)
        for i, new in ((1, mean), (2, var)):
            if b.wanted(i):
                old = b.array(2 + i)
                b.step(_blend, cast(b, old, wide(old.dtype)), new, p.momentum, b.out(i, old.shape, old.dtype))
    elif all(b.is_const(i) for i in range(1, 5)):

        def make(scale: np.ndarray) -> np.ndarray:
            made = np.empty((2, channels), dtype)
            bias, mean, var = (np.asarray(b.const(i), dtype) for i in (2, 3, 4))
            _affine(np.asarray(scale, dtype), bias, mean, var, p.epsilon, made)
            return made

        names = ",".join(value.name for value in b.node.inputs[2:5])
        affine = b.packed(f"affine {dtype.name} {p.epsilon} {names}", 1, make)
    else:
        b.step(_affine, *(cast(b, b.array(i), dtype) for i in range(1, 5)), p.epsilon, affine)
    factor, shift, library = affine[0].reshape(shape), affine[1].reshape(shape), b.compiled("norm")
    if library is not None and takes(x.shape, [x, factor, shift]):
        into(b, library, [("Mul", 0, 1), ("Add", 3, 2)], [x, factor, shift], total)
    else:
        b.step(np.multiply, x, factor, total)
        b.step(np.add, total, shift, total)
    finish(b, y, total)


def _standardize(
    x: np.ndarray, y: np.ndarray, mean: np.ndarray, scale: np.ndarray, ones: np.ndarray, eps: float
) -> None:
    """y = (x - mean) / sqrt(var + eps) along the last axis; mean and `scale` = 1 / sqrt(var + eps) are [..., 1]."""
    np.matmul(x, ones, mean)  # a sum as a matrix-vector product is faster than a reduction
    np.subtract(x, mean, y)
    np.vecdot(y, y, scale[..., 0])
    np.multiply(scale, ones[0, 0], scale)
    np.add(scale, eps, scale)
    np.sqrt(scale, scale)
    np.reciprocal(scale, scale)
    np.multiply(y, scale, y)


def _standardized(
    b: Bind,
    x: np.ndarray,
    y: np.ndarray,
    eps: float,
    mean: np.ndarray | None = None,
    inverse: np.ndarray | None = None,
) -> None:
    """Record the standardizing of x [rows, n] into y (same dtype); `mean` and `inverse` [rows, 1] where wanted."""
    x = b.contiguous(x)  # strides must not show in the last bits of sums
    mean = b.scratch((x.shape[0], 1), y.dtype) if mean is None else mean
    inverse = b.scratch((x.shape[0], 1), y.dtype) if inverse is None else inverse
    ones = np.full((x.shape[1], 1), 1 / max(1, x.shape[1]), y.dtype)
    if y.size:
        b.step(_standardize, x, y, mean, inverse, ones, eps)


@dataclass(frozen=True)
class Layer:
    """Attributes of LayerNormalization and RMSNormalization."""

    axis: int
    epsilon: float
    stash: int


def _parse_layer(node: Node) -> Layer:
    stash = int(node.attributes.get("stash_type", 1))
    if stash not in (1, 11, 10, 16):
        raise Unsupported(f"stash_type {stash}")
    return Layer(int(node.attributes.get("axis", -1)), float(node.attributes.get("epsilon", 1e-5)), stash)


@dataclass(frozen=True)
class Extra:
    """What a normalization of rows has beside x, scale and bias: what is added to x, and more results, where wanted.

    `skip` [a divisor of rows, n], `skip_bias` [n], `total` [rows, n]: the sum that is normalized; `mean` and `inverse`
    (of the deviation) [rows, 1]. `simple`: no mean is subtracted, the root mean square takes the deviation's place.
    """

    skip: np.ndarray | None = None
    skip_bias: np.ndarray | None = None
    total: np.ndarray | None = None
    mean: np.ndarray | None = None
    inverse: np.ndarray | None = None
    simple: bool = False


def normalize_rows(
    b: Bind,
    x: np.ndarray,
    y: np.ndarray,
    scale: np.ndarray | None,
    bias: np.ndarray | None,
    epsilon: float,
    extra: Extra = Extra(),
) -> None:
    """Record (x - mean) / deviation * scale + bias -> y for each row of x [rows, n]; scale and bias are [n].

    All have y's dtype. y is C-contiguous and may be x. Raises ValueError where there are other than n numbers to a row.
    """
    if not y.size:
        return
    rows, n = x.shape
    for what, given in (("scale", scale), ("bias", bias), ("bias of what is added", extra.skip_bias)):
        if given is not None and given.size != n:
            raise ValueError(f"a {what} of shape {list(given.shape)} does not fit rows of {n}")
    x = b.contiguous(x)  # strides must not show in the last bits of sums
    skip = None if extra.skip is None else b.contiguous(extra.skip)
    library = b.compiled("norm")
    if library is not None and y.dtype == np.float32:
        gain, shift, skip_bias = (None if a is None else b.contiguous(a) for a in (scale, bias, extra.skip_bias))
        tasks = library.tasks(rows, 0.4 * y.size, 4)
        b.step(library.call(
            "or_layer_norm", tasks, y, x, skip, skip_bias, extra.total, gain, shift, extra.mean, extra.inverse,
            rows, n, rows if skip is None else len(skip), float(epsilon), extra.simple, tasks,
        ))  # fmt: skip
        return
    if skip is not None:
        total = y if extra.total is None else extra.total
        turns = (rows // len(skip), *skip.shape)
        b.step(np.add, x.reshape(turns), skip, total.reshape(turns))  # C-contiguous: views
        if extra.skip_bias is not None:
            b.step(np.add, total, extra.skip_bias, total)
        x = total
    if extra.simple:
        inverse = b.scratch((rows, 1), y.dtype) if extra.inverse is None else extra.inverse
        b.step(_root_mean_square, x, y, inverse, epsilon)
    else:
        _standardized(b, x, y, epsilon, extra.mean, extra.inverse)
    if scale is not None:
        b.step(np.multiply, y, scale, y)
    if bias is not None:
        b.step(np.add, y, bias, y)


def _bind_rows(b: Bind, p: Layer, y: np.ndarray, dtype: np.dtype[Any], simple: bool, statistics: Sequence[int]) -> None:
    """Layer and root-mean-square normalization. `statistics`: positions of the outputs mean and 1 / deviation."""
    x = b.array(0)
    axis = p.axis % x.ndim
    total = target(b, y, dtype)
    rows, n = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    flat, place = b.reshaped(cast(b, x, dtype), (rows, n)), total.reshape(rows, n)
    scale, bias = cast(b, widened(b, 1), dtype), cast(b, widened(b, 2), dtype) if b.has(2) else None
    wanted = [b.scratch((rows, 1), dtype) if i > 0 and b.wanted(i) else None for i in statistics]
    extra = Extra(mean=wanted[0], inverse=wanted[1], simple=simple)
    if scale.size == n and (bias is None or bias.size == n):
        flat_bias = None if bias is None else b.reshaped(bias, (n,))
        normalize_rows(b, flat, place, b.reshaped(scale, (n,)), flat_bias, p.epsilon, extra)
    else:
        normalize_rows(b, flat, place, None, None, p.epsilon, extra)
        b.step(np.multiply, total, scale, total)
        if bias is not None:
            b.step(np.add, total, bias, total)
    finish(b, y, total)
    kept = x.shape[:axis] + (1,) * (x.ndim - axis)
    for i, value in zip(statistics, wanted, strict=True):
        if value is not None:
            b.step(np.copyto, b.out(i, kept, np.float32).reshape(rows, 1), value, "unsafe")


@kernel("LayerNormalization", dtypes={0: FLOATS}, parse=_parse_layer, compiled="norm")
def layer_normalization(b: Bind, p: Layer) -> None:
    """ONNX LayerNormalization-17, with Mean and InvStdDev."""
    x = b.array(0)
    _bind_rows(b, p, b.out(0, x.shape, x.dtype), wide(x.dtype), False, (1, 2))


def _root_mean_square(x: np.ndarray, y: np.ndarray, inverse: np.ndarray, eps: float) -> None:
    np.vecdot(x, x, inverse[..., 0])
    np.divide(inverse, x.shape[-1], inverse)
    np.add(inverse, eps, inverse)
    np.sqrt(inverse, inverse)
    np.reciprocal(inverse, inverse)
    np.multiply(x, inverse, y)


@kernel("RMSNormalization", since=23, dtypes={0: FLOATS}, parse=_parse_layer, compiled="norm")
def rms_normalization(b: Bind, p: Layer) -> None:
    """ONNX RMSNormalization-23."""
    x = b.array(0)
    y = b.out(0, x.shape, b.array(1).dtype)
    _bind_rows(b, p, y, np.promote_types(wide(x.dtype), wide(y.dtype)), True, (0, 0))


@kernel("SimplifiedLayerNormalization", dtypes={0: FLOATS}, parse=_parse_layer, compiled="norm")
def simplified_layer_normalization(b: Bind, p: Layer) -> None:
    """What onnxruntime writes for RMSNormalization before opset 23, with 1 / root as second output."""
    x = b.array(0)
    y = b.out(0, x.shape, b.array(1).dtype)
    _bind_rows(b, p, y, np.promote_types(wide(x.dtype), wide(y.dtype)), True, (0, 1))


def _epsilon(node: Node) -> float:
    return float(node.attributes.get("epsilon", 1e-5))


def _per_channel(b: Bind, x: np.ndarray, i: int) -> np.ndarray:
    """Input i, one number per channel, ready to broadcast over [N, C, *spatial]."""
    values = widened(b, i)
    return b.reshaped(values, values.shape + (1,) * (x.ndim - 2))


def _check_per_channel(b: Bind, count: int) -> None:
    """Scale and bias have `count` elements each, else ValueError: the compiled kernel reads as many."""
    for i in (1, 2):
        shape = b.array(i).shape
        if math.prod(shape) != count:
            raise ValueError(f"input {i} has the shape {list(shape)}, there must be {count} elements")


def _groups_in_one_pass(
    b: Bind, x: np.ndarray, y: np.ndarray, channels: int, groups: int, per_group: bool, epsilon: float
) -> bool:
    """Record the normalization of x [rows, n], rows of so many channels, -> y, where the compiled library takes it."""
    library = b.compiled("norm")
    if library is None or y.dtype != np.float32:
        return False
    if not y.size:
        return True
    rows, n = x.shape
    scale, bias = b.contiguous(widened(b, 1)), b.contiguous(widened(b, 2))
    if scale.dtype != np.float32 or bias.dtype != np.float32:
        return False
    tasks = library.tasks(rows, 0.4 * y.size, 4)
    b.step(library.call(
        "or_group_norm", tasks, y, b.contiguous(x), scale, bias, rows, channels, n // channels, groups, per_group,
        float(epsilon), tasks,
    ))  # fmt: skip
    return True


@kernel("InstanceNormalization", since=6, dtypes={0: FLOATS}, parse=_epsilon, compiled="norm")
def instance_normalization(b: Bind, epsilon: float) -> None:
    """ONNX InstanceNormalization-22."""
    x = b.array(0)
    _check_per_channel(b, x.shape[1])
    y = b.out(0, x.shape, x.dtype)
    total = target(b, y)
    rows, n = x.shape[0] * x.shape[1], math.prod(x.shape[2:])
    flat, place = b.reshaped(cast(b, x, total.dtype), (rows, n)), total.reshape(rows, n)
    if not _groups_in_one_pass(b, flat, place, 1, x.shape[1], False, epsilon):
        _standardized(b, flat, place, epsilon)
        b.step(np.multiply, total, _per_channel(b, x, 1), total)
        b.step(np.add, total, _per_channel(b, x, 2), total)
    finish(b, y, total)


@dataclass(frozen=True)
class Groups:
    """Attributes of GroupNormalization; `per_group`: opset 18 has one scale per group, 21 one per channel."""

    count: int
    epsilon: float
    per_group: bool


def _parse_groups(node: Node) -> Groups:
    count = int(node.attributes.get("num_groups", 0))
    if count < 1:
        raise Unsupported(f"num_groups is {count}")
    if int(node.attributes.get("stash_type", 1)) not in (1, 11):
        raise Unsupported(f"stash_type {node.attributes['stash_type']}")
    return Groups(count, _epsilon(node), node.opset < 21)


@kernel("GroupNormalization", since=18, dtypes={0: FLOATS}, parse=_parse_groups, compiled="norm")
def group_normalization(b: Bind, p: Groups) -> None:
    """ONNX GroupNormalization-21, and 18."""
    x = b.array(0)
    if x.shape[1] % p.count:
        raise ValueError(f"{x.shape[1]} channels do not divide into {p.count} groups")
    _check_per_channel(b, p.count if p.per_group else x.shape[1])
    y = b.out(0, x.shape, x.dtype)
    total = target(b, y)
    rows, n = x.shape[0] * p.count, math.prod(x.shape[1:]) // p.count
    flat, place = b.reshaped(cast(b, x, total.dtype), (rows, n)), total.reshape(rows, n)
    if not _groups_in_one_pass(b, flat, place, x.shape[1] // p.count, p.count, p.per_group, p.epsilon):
        _standardized(b, flat, place, p.epsilon)
        place = total
        if p.per_group:
            place = total.reshape((x.shape[0], p.count, x.shape[1] // p.count) + x.shape[2:])
        b.step(np.multiply, place, _per_channel(b, place, 1), place)
        b.step(np.add, place, _per_channel(b, place, 2), place)
    finish(b, y, total)


@dataclass(frozen=True)
class Response:
    """Attributes of LRN."""

    alpha: float
    beta: float
    bias: float
    size: int


def _parse_response(node: Node) -> Response:
    get = node.attributes.get
    size = int(get("size", 0))
    if size < 1:
        raise Unsupported(f"size is {size}")
    return Response(float(get("alpha", 1e-4)), float(get("beta", 0.75)), float(get("bias", 1.0)), size)


def _local_response(x: np.ndarray, p: Response, square: np.ndarray, total: np.ndarray) -> None:
    np.multiply(x, x, square)
    total.fill(0)
    channels = x.shape[1]
    before, after = (p.size - 1) // 2, p.size // 2
    for shift in range(-before, after + 1):
        first, last = max(0, -shift), min(channels, channels - shift)
        if first < last:
            part = total[:, first:last]
            np.add(part, square[:, first + shift : last + shift], part)
    np.multiply(total, p.alpha / p.size, total)
    np.add(total, p.bias, total)
    np.power(total, -p.beta, total)
    np.multiply(total, x, total)


@kernel("LRN", dtypes={0: FLOATS}, parse=_parse_response)
def lrn(b: Bind, p: Response) -> None:
    """ONNX LRN-13: local response normalization over channels."""
    x = b.array(0)
    y = b.out(0, x.shape, x.dtype)
    total = target(b, y)
    b.step(_local_response, cast(b, x, total.dtype), p, b.scratch(x.shape, total.dtype), total)
    finish(b, y, total)


@dataclass(frozen=True)
class Norm:
    """Attributes of LpNormalization."""

    axis: int
    power: int


def _parse_norm(node: Node) -> Norm:
    power = int(node.attributes.get("p", 2))
    if power not in (1, 2):
        raise Unsupported(f"p is {power}, ONNX has 1 and 2")
    return Norm(int(node.attributes.get("axis", -1)), power)


def _divide_by_norm(x: np.ndarray, p: Norm, y: np.ndarray, norm: np.ndarray) -> None:
    if p.power == 1:
        np.abs(x, y)
    else:
        np.multiply(x, x, y)
    np.add.reduce(y, p.axis, None, norm, keepdims=True)
    if p.power == 2:
        np.sqrt(norm, norm)
    np.copyto(norm, 1, where=norm == 0)  # 0 / 0 is 0 here
    np.divide(x, norm, y)


@kernel("LpNormalization", dtypes={0: FLOATS}, parse=_parse_norm)
def lp_normalization(b: Bind, p: Norm) -> None:
    """ONNX LpNormalization-22."""
    x = b.array(0)
    y = b.out(0, x.shape, x.dtype)
    total = target(b, y)
    axis = p.axis % x.ndim
    norm = b.scratch(x.shape[:axis] + (1,) + x.shape[axis + 1 :], total.dtype)
    b.step(_divide_by_norm, cast(b, x, total.dtype), Norm(axis, p.power), total, norm)
    finish(b, y, total)


def _mean_variance(x: np.ndarray, axes: tuple[int, ...], y: np.ndarray, square: np.ndarray, stat: np.ndarray) -> None:
    count = x.size // max(1, stat.size)
    np.add.reduce(x, axes, None, stat, keepdims=True)
    np.divide(stat, count, stat)
    np.subtract(x, stat, y)
    np.multiply(y, y, square)
    np.add.reduce(square, axes, None, stat, keepdims=True)
    np.divide(stat, count, stat)
    np.sqrt(stat, stat)
    np.add(stat, 1e-9, stat)
    np.divide(y, stat, y)


def _parse_axes(node: Node) -> tuple[int, ...]:
    return tuple(int(a) for a in node.attributes.get("axes", (0, 2, 3)))


@kernel("MeanVarianceNormalization", since=9, dtypes={0: FLOATS}, parse=_parse_axes)
def mean_variance_normalization(b: Bind, axes: tuple[int, ...]) -> None:
    """ONNX MeanVarianceNormalization-13: (x - mean) / (deviation + 1e-9)."""
    x = b.array(0)
    y = b.out(0, x.shape, x.dtype)
    total = target(b, y)
    axes = tuple(axis % x.ndim for axis in axes)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    stat = b.scratch(shape, total.dtype)
    b.step(_mean_variance, b.contiguous(cast(b, x, total.dtype)), axes, total, b.scratch(x.shape, total.dtype), stat)
    finish(b, y, total)
