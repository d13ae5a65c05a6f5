"""Operators that say the same elements in another shape: views wherever memory allows, so no work in a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import axes_of, axis_of, ints, parse_axes, reshape_into, viewed
from outrider.providers.wire.graph import Node


def _parse_shape(node: Node) -> tuple[int | None, int | None]:
    start, end = node.attributes.get("start"), node.attributes.get("end")
    return None if start is None else int(start), None if end is None else int(end)


@kernel("Shape", parse=_parse_shape)
def shape(b: Bind, p: tuple[int | None, int | None]) -> None:
    """Shape-15: int64 dimensions from `start` to `end`."""
    b.fixed(0, np.array(b.array(0).shape[p[0] : p[1]], np.int64))


@kernel("Size")
def size(b: Bind, p: None) -> None:
    """The number of elements, rank 0, int64."""
    b.fixed(0, np.array(b.array(0).size, np.int64))


def _parse_reshape(node: Node) -> tuple[list[int] | None, bool]:
    given = node.attributes.get("shape")
    return None if given is None else ints(given), bool(node.attributes.get("allowzero", 0))


def reshape_target(x_shape: Sequence[int], wanted: Sequence[int], allowzero: bool, node: Node) -> tuple[int, ...]:
    """The dims Reshape means: 0 copies (unless `allowzero`), one -1 takes the rest. ValueError on no fit."""
    target = list(wanted)
    if not allowzero:
        for i, d in enumerate(target):
            if d == 0:
                if i >= len(x_shape):
                    raise ValueError(f"Reshape {node.name}: 0 at {i} names no dimension of {tuple(x_shape)}")
                target[i] = x_shape[i]
    count = math.prod(x_shape)
    if target.count(-1) == 1:
        rest = math.prod(d for d in target if d != -1)
        target[target.index(-1)] = count // rest if rest else 0
    if min(target, default=0) < 0 or math.prod(target) != count:
        raise ValueError(f"Reshape {node.name}: {tuple(x_shape)} does not fit {tuple(wanted)}")
    return tuple(target)


@kernel("Reshape", parse=_parse_reshape)
def reshape(b: Bind, p: tuple[list[int] | None, bool]) -> None:
    """Reshape-14."""
    x = b.array(0)
    wanted = p[0] if p[0] is not None else ints(b.const(1))
    reshape_into(b, 0, x, reshape_target(x.shape, wanted, p[1], b.node))


@kernel("Flatten", parse=lambda node: int(node.attributes.get("axis", 1)))
def flatten(b: Bind, p: int) -> None:
    """Flatten-13: two dimensions, cut before `axis`."""
    x = b.array(0)
    cut = p + x.ndim if p < 0 else p
    if not 0 <= cut <= x.ndim:
        raise ValueError(f"Flatten {b.node.name}: axis {p} is out of range for rank {x.ndim}")
    reshape_into(b, 0, x, (math.prod(x.shape[:cut]), math.prod(x.shape[cut:])))


@kernel("Squeeze", parse=parse_axes)
def squeeze(b: Bind, p: list[int] | None) -> None:
    """Squeeze-13: without the given (or all) dimensions of 1."""
    x = b.array(0)
    if p is None and b.has(1):
        p = ints(b.const(1))
    axes = {i for i, d in enumerate(x.shape) if d == 1} if p is None else set(axes_of(p, x.ndim, b.node))
    for axis in axes:
        if x.shape[axis] != 1:
            raise ValueError(f"Squeeze {b.node.name}: dimension {axis} of {x.shape} is not 1")
    b.view(0, x[tuple(0 if i in axes else slice(None) for i in range(x.ndim)) + (...,)])


@kernel("Unsqueeze", parse=parse_axes)
def unsqueeze(b: Bind, p: list[int] | None) -> None:
    """Unsqueeze-13: with dimensions of 1 where `axes` of the result say."""
    x = b.array(0)
    given = ints(b.const(1)) if p is None else p
    axes = set(axes_of(given, x.ndim + len(given), b.node))
    b.view(0, x[tuple(None if i in axes else slice(None) for i in range(x.ndim + len(given))) + (...,)])


def _parse_transpose(node: Node) -> list[int] | None:
    perm = node.attributes.get("perm")
    return None if perm is None else ints(perm)


@kernel("Transpose", parse=_parse_transpose)
def transpose(b: Bind, p: list[int] | None) -> None:
    """Transpose-21: dimensions in the order of `perm`, reversed by default."""
    x = b.array(0)
    b.view(0, x.transpose(p if p is not None else tuple(range(x.ndim))[::-1]))


@kernel("Expand", since=8)
def expand(b: Bind, p: None) -> None:
    """Expand-13: broadcast with a shape, in both directions; a view with strides of 0."""
    x = b.array(0)
    b.view(0, np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(ints(b.const(1))))))


def slice_of(start: int, end: int, step: int, length: int) -> slice:
    """ONNX's slice of an axis: unlike Python's, a start before the beginning is the first for negative steps too."""
    start, end = start + length * (start < 0), end + length * (end < 0)
    if step > 0:
        return slice(min(max(start, 0), length), min(max(end, 0), length), step)
    start, end = max(min(start, length - 1), 0), max(min(end, length - 1), -1)
    return slice(start, None if end < 0 else end, step)


def _parse_slice(node: Node) -> tuple[list[int], list[int], list[int] | None] | None:
    if "starts" not in node.attributes:  # before opset 10 they are attributes
        return None
    axes = node.attributes.get("axes")
    return ints(node.attributes["starts"]), ints(node.attributes["ends"]), None if axes is None else ints(axes)


@kernel("Slice", parse=_parse_slice)
def slice_(b: Bind, p: tuple[list[int], list[int], list[int] | None] | None) -> None:
    """Slice-13: a view, also with negative steps."""
    x = b.array(0)
    if p is None:
        starts, ends = ints(b.const(1)), ints(b.const(2))
        axes = ints(b.const(3)) if b.has(3) else list(range(len(starts)))
        steps = ints(b.const(4)) if b.has(4) else [1] * len(starts)
    else:
        starts, ends = p[0], p[1]
        axes = p[2] if p[2] is not None else list(range(len(starts)))
        steps = [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ValueError(f"Slice {b.node.name}: starts, ends, axes and steps have different lengths")
    index: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise ValueError(f"Slice {b.node.name}: step 0 at axis {axis}")
        place = axis_of(axis, x.ndim, b.node)
        index[place] = slice_of(start, end, step, x.shape[place])
    b.view(0, x[tuple(index) + (...,)])


def _parse_split(node: Node) -> tuple[int, list[int] | None, int]:
    sizes = node.attributes.get("split")  # before opset 13
    count = int(node.attributes.get("num_outputs", len(node.outputs)))
    return int(node.attributes.get("axis", 0)), None if sizes is None else ints(sizes), count


def split_sizes(length: int, count: int) -> list[int]:
    """`count` sizes that sum to `length`: equal, the last one smaller (Split-18)."""
    each = -(-length // count)
    return [max(0, min(each, length - each * i)) for i in range(count)]


@kernel("Split", since=2, parse=_parse_split)
def split(b: Bind, p: tuple[int, list[int] | None, int]) -> None:
    """Split-18: views along one axis, of the given or equal sizes."""
    x = b.array(0)
    axis = axis_of(p[0], x.ndim, b.node)
    sizes = p[1]
    if sizes is None and b.has(1):
        sizes = ints(b.const(1))
    if sizes is None:
        sizes = split_sizes(x.shape[axis], p[2])
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise ValueError(f"Split {b.node.name}: sizes {sizes} do not sum to {x.shape[axis]}")
    start = 0
    for i, length in enumerate(sizes):
        b.view(i, x[(slice(None),) * axis + (slice(start, start + length),)])
        start += length


def _parse_block(node: Node) -> tuple[int, str]:
    mode = str(node.attributes.get("mode", "DCR"))
    if mode not in ("DCR", "CRD"):
        raise Unsupported(f"mode={mode!r}, the kernel takes 'DCR' and 'CRD'")
    return int(node.attributes["blocksize"]), mode


def _regroup(b: Bind, x: np.ndarray, split_shape: Sequence[int], perm: Sequence[int], shape: Sequence[int]) -> None:
    """Output 0: x seen as `split_shape`, transposed by `perm`, seen as `shape`; one copy."""
    parts = viewed(x, split_shape)
    if parts is None:
        parts = b.contiguous(x).reshape(split_shape)
    turned = parts.transpose(perm)
    y = b.out(0, shape, x.dtype)
    b.copy(y.reshape(turned.shape), turned)


@kernel("DepthToSpace", parse=_parse_block)
def depth_to_space(b: Bind, p: tuple[int, str]) -> None:
    """DepthToSpace-13 of [N, C, H, W]: blocks of channels become blocks of pixels."""
    x = b.array(0)
    block, mode = p
    n, c, h, w = x.shape
    depth = c // (block * block)
    if mode == "DCR":
        parts, perm = (n, block, block, depth, h, w), (0, 3, 4, 1, 5, 2)
    else:
        parts, perm = (n, depth, block, block, h, w), (0, 1, 4, 2, 5, 3)
    _regroup(b, x, parts, perm, (n, depth, h * block, w * block))


@kernel("SpaceToDepth", parse=_parse_block)
def space_to_depth(b: Bind, p: tuple[int, str]) -> None:
    """SpaceToDepth-13 of [N, C, H, W]: blocks of pixels become channels."""
    x = b.array(0)
    block = p[0]
    n, c, h, w = x.shape
    parts = (n, c, h // block, block, w // block, block)
    perm = (0, 3, 5, 1, 2, 4) if p[1] == "DCR" else (0, 1, 3, 5, 2, 4)
    _regroup(b, x, parts, perm, (n, c * block * block, h // block, w // block))
