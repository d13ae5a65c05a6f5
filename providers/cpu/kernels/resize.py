"""Resize, and Upsample before it: nearest, linear and cubic, axis by axis, with every coordinate transformation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, channels_last, kernel, order_like
from outrider.providers.cpu.kernels.precision import cast, wide
from outrider.providers.cpu.kernels.windows import plane_strides
from outrider.providers.wire.graph import Node

_TRANSFORMS = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
_POLICIES = ("stretch", "not_larger", "not_smaller")


@dataclass(frozen=True)
class Resizing:
    """Attributes of Resize."""

    mode: str
    transform: str
    rounding: str
    axes: tuple[int, ...] | None
    policy: str
    antialias: bool
    exclude_outside: bool
    cubic: float
    extrapolation: float


def _parse(node: Node) -> Resizing:
    get = node.attributes.get
    axes = get("axes")
    p = Resizing(
        str(get("mode", "nearest")),
        str(get("coordinate_transformation_mode", "half_pixel")),
        str(get("nearest_mode", "round_prefer_floor")),
        tuple(int(a) for a in axes) if axes else None,
        str(get("keep_aspect_ratio_policy", "stretch")),
        bool(get("antialias", 0)),
        bool(get("exclude_outside", 0)),
        float(get("cubic_coeff_a", -0.75)),
        float(get("extrapolation_value", 0.0)),
    )
    for name, value, known in (
        ("mode", p.mode, ("nearest", "linear", "cubic")),
        ("coordinate_transformation_mode", p.transform, _TRANSFORMS),
        ("nearest_mode", p.rounding, tuple(_ROUNDINGS)),
        ("keep_aspect_ratio_policy", p.policy, _POLICIES),
    ):
        if value not in known:
            raise Unsupported(f"{name} is {value!r}, ONNX has {', '.join(known)}")
    if p.mode == "nearest" and p.antialias:
        raise Unsupported("antialias with mode 'nearest'")
    if p.mode != "nearest" and node.inputs[0].dtype in ("string", "bool", "complex64", "complex128"):
        raise Unsupported(f"mode {p.mode!r} on {node.inputs[0].dtype}")
    return p


@dataclass(frozen=True)
class AxisPlan:
    """One axis to resize: from `size` to `out` positions at `scale`; `start` and `stop` are its region of interest."""

    axis: int
    size: int
    out: int
    scale: float
    start: float = 0.0
    stop: float = 1.0

    def coordinates(self, transform: str, dtype: type[np.floating[Any]]) -> np.ndarray:
        """Where each output position lies on the input's axis."""
        x = np.arange(self.out, dtype=dtype)
        scale, last = dtype(self.scale), dtype(self.size - 1)
        width = dtype(self.scale * self.size)  # may be a fraction when `scales` is given
        at: np.ndarray
        if transform == "asymmetric":
            at = x / scale
        elif transform == "align_corners":
            at = x * dtype(0) if width == 1 else x * last / (width - 1)
        elif transform == "tf_crop_and_resize":
            start, stop = dtype(self.start), dtype(self.stop)
            if self.out <= 1:
                at = x * dtype(0) + (start + stop) * last / 2
            else:
                at = start * last + x * (stop - start) * last / dtype(self.out - 1)
        elif transform == "pytorch_half_pixel" and self.out == 1:
            at = x * dtype(0)
        else:
            at = (x + dtype(0.5)) / scale - dtype(0.5)
            if transform == "half_pixel_symmetric":
                at = at + dtype(self.size / 2) * (1 - dtype(self.out) / width)
        return at


def plan_axes(p: Resizing, shape: tuple[int, ...], scales: Any, sizes: Any, roi: Any) -> list[AxisPlan]:
    """The axes that change. Raises ValueError where the counts of scales or sizes do not fit."""
    axes = [a % len(shape) for a in p.axes] if p.axes is not None else list(range(len(shape)))
    given = scales if scales is not None else sizes
    if len(given) != len(axes):
        raise ValueError(f"{len(given)} scales or sizes for {len(axes)} axes of {list(shape)}")
    crop = p.transform == "tf_crop_and_resize" and roi is not None and len(roi) == 2 * len(axes)
    plans = []
    if scales is None and p.policy != "stretch":
        ratios = [int(n) / max(1, shape[a]) for n, a in zip(sizes, axes, strict=True)]
        ratio = min(ratios) if p.policy == "not_larger" else max(ratios)
    for k, axis in enumerate(axes):
        size = shape[axis]
        start, stop = (float(roi[k]), float(roi[k + len(axes)])) if crop else (0.0, 1.0)
        if scales is not None:
            scale = float(scales[k])
            # In float32, as scales are: 10 * 0.7 is 7 there, and 6.9999999 of the same number in float64.
            out = int(np.float32(size) * (np.float32(stop) - np.float32(start)) * np.float32(scale))
        elif p.policy != "stretch":
            scale, out = ratio, math.floor(ratio * size + 0.5)
        else:
            out = int(sizes[k])
            scale = out / max(1, size)
        if out != size or scale != 1 or (start, stop) != (0.0, 1.0):
            plans.append(AxisPlan(axis, size, out, scale, start, stop))
    return plans


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981, equation 4)."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def weighted_taps(p: Resizing, plan: AxisPlan) -> tuple[np.ndarray, np.ndarray]:
    """Which input positions each output position sums, and their weights: [out, taps] both."""
    x = plan.coordinates(p.transform, np.float64)
    left = np.ceil(x) - 1  # the neighbour strictly to the left, so that the ratio lies in (0, 1]
    reach = 1 if p.mode == "linear" else 2
    shrink = min(plan.scale, 1.0) if p.antialias else 1.0
    first = math.floor(-reach / shrink) + 1
    offsets = np.arange(first, 2 - first)
    distance = (offsets - (x - left)[:, None]) * shrink
    weights = np.maximum(1 - np.abs(distance), 0) if p.mode == "linear" else _cubic(distance, p.cubic)
    at = left[:, None] + offsets
    if p.exclude_outside:
        weights = np.where((at < 0) | (at >= plan.size), 0.0, weights)
    if p.exclude_outside or p.antialias:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return np.clip(at, 0, plan.size - 1).astype(np.intp), weights


def _interpolate(x: np.ndarray, taps: list[Any], axis: int, y: np.ndarray, term: np.ndarray) -> None:
    y.fill(0)
    for at, weight in taps:
        np.take(x, at, axis, term, "clip")
        np.multiply(term, weight, term)
        np.add(y, term, y)


def _round_into(x: np.ndarray, y: np.ndarray) -> None:
    """Interpolated integers: round halves to even, then saturate."""
    np.rint(x, x)
    info = np.iinfo(y.dtype)
    np.clip(x, info.min, info.max, out=x)
    np.copyto(y, x, "unsafe")


def _fill_outside(y: np.ndarray, places: list[tuple[Any, ...]], value: float) -> None:
    for place in places:
        y[place] = value


def _copy_all(copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in copies:
        np.copyto(target, source)


def _pick(p: Resizing, plan: AxisPlan) -> np.ndarray:
    """Which input position each output position is, with mode 'nearest'."""
    # In float32, as onnxruntime: 1 / float32(1/3) is 3 there, and floor() of it in float64 would be 2.
    at = _ROUNDINGS[p.rounding](plan.coordinates(p.transform, np.float32))
    picked: np.ndarray = np.clip(at, 0, plan.size - 1).astype(np.intp)
    return picked


def _nearest(b: Bind, p: Resizing, plans: list[AxisPlan], x: np.ndarray, y: np.ndarray) -> None:
    picks = [_pick(p, plan) for plan in plans]
    factors = [plan.out // plan.size for plan in plans]
    repeated = [
        plan.out == plan.size * f and np.array_equal(at, np.arange(plan.out) // f)
        for plan, at, f in zip(plans, picks, factors, strict=True)
    ]
    if all(repeated):  # each element becomes a block
        times = dict(zip((plan.axis for plan in plans), factors, strict=True))
        blocks = y.reshape([n for axis, size in enumerate(x.shape) for n in (size, times.get(axis, 1))])
        first: tuple[Any, ...] = (slice(None), 0)
        last = x.ndim - 1
        copies = [(blocks[first * last + (slice(None), j)], x) for j in range(times.get(last, 1))]
        for axis in reversed(range(last)):  # then whole rows, planes, ...
            head = first * axis + (slice(None),)
            if times.get(axis, 1) > 1:
                copies.append((blocks[(*head, slice(1, None))], blocks[(*head, slice(0, 1))]))
        b.step(_copy_all, copies)
        return
    for k, (plan, at) in enumerate(zip(plans, picks, strict=True)):
        shape = x.shape[: plan.axis] + (plan.out,) + x.shape[plan.axis + 1 :]
        out = y if k == len(plans) - 1 else b.scratch(shape, x.dtype)
        b.step(np.take, x, at, plan.axis, out, "clip")
        x = out


def _weighted(b: Bind, p: Resizing, plans: list[AxisPlan], x: np.ndarray, y: np.ndarray) -> None:
    dtype = wide(x.dtype)
    if dtype.kind in "iu":
        dtype = np.dtype(np.float64)  # so that halves, which decide the rounding, are exact
    x = cast(b, x, dtype)
    for k, plan in enumerate(plans):
        at, weights = weighted_taps(p, plan)
        shape = x.shape[: plan.axis] + (plan.out,) + x.shape[plan.axis + 1 :]
        out = y if k == len(plans) - 1 and y.dtype == dtype else b.scratch(shape, dtype)
        column = (-1,) + (1,) * (len(shape) - plan.axis - 1)
        taps = [
            (at[:, n].copy(), weights[:, n].astype(dtype).reshape(column))
            for n in range(at.shape[1])
            if np.any(weights[:, n])
        ]
        b.step(_interpolate, x, taps, plan.axis, out, b.scratch(shape, dtype))
        x = out
    if x is not y:
        b.step(*((_round_into, x, y) if y.dtype.kind in "iu" else (np.copyto, y, x, "unsafe")))


def _compiled(b: Bind, p: Resizing, plans: list[AxisPlan], x: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """Output 0, made by the compiled library; None where that does not take it.

    It takes one or two spatial axes of [N, C, *spatial] with eight or more channels: nearest neighbours of any dtype of
    fixed size, everything else in float32.
    """
    library = b.compiled("resize")
    fits = 3 <= x.ndim <= 4 and x.shape[1] >= 8 and all(plan.axis >= 2 for plan in plans) and x.size
    if library is None or not fits or (p.mode != "nearest" and x.dtype != np.float32) or x.dtype.hasobject:
        return None
    order = channels_last(x.ndim)
    y = b.out(0, shape, x.dtype, order)
    place = y if y.strides[1] == x.itemsize else b.scratch(shape, x.dtype, order)
    if x.strides[1] != x.itemsize:
        x = b.contiguous(x, order)
    by_axis = {plan.axis: plan for plan in plans}
    taps = [_taps(p, by_axis.get(axis), shape[axis]) for axis in range(2, x.ndim)]
    if x.ndim == 3:
        taps.insert(0, _taps(p, None, 1))
    (rows, row_weights), (columns, column_weights) = taps
    images, channels = x.shape[:2]
    count = images * len(rows)
    steps = (*plane_strides(place), *plane_strides(x))
    if p.mode == "nearest":
        size = x.itemsize
        tasks = library.tasks(count, 0.2 * y.nbytes, 4)
        call = library.call(
            "or_resize_nearest", tasks, place, x, rows, columns, channels * size, images, tasks,
            *(step * size for step in steps), len(rows), len(columns),
        )  # fmt: skip
    else:
        tasks = library.tasks(count, y.size * (0.2 + 0.15 * (rows.shape[1] + columns.shape[1])), 4)
        scratch = b.scratch((library.threads, x.shape[-1] * channels), np.float32)
        call = library.call(
            "or_resize_weighted", tasks, place, scratch, x, rows, columns, row_weights, column_weights,
            rows.shape[1], columns.shape[1], channels, images, tasks, *steps, len(rows), len(columns), x.shape[-1],
        )  # fmt: skip
    b.step(call)
    if place is not y:
        b.copy(y, place)
    return y


def _taps(p: Resizing, plan: AxisPlan | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Input positions [out, taps] and float32 weights of an axis; of one that stays as it is, itself."""
    if plan is None or p.mode == "nearest":
        at = (np.arange(size) if plan is None else _pick(p, plan)).astype(np.int64)[:, None]
        return at, np.ones(at.shape, np.float32)
    positions, weights = weighted_taps(p, plan)
    used = np.any(weights, axis=0)
    at, weights = positions[:, used].astype(np.int64), weights[:, used].astype(np.float32)
    return np.ascontiguousarray(at), np.ascontiguousarray(weights)


def _parse_early(node: Node) -> tuple[Resizing, np.ndarray | None]:
    """Nothing to choose but the mode; the scales are an attribute before Upsample-9."""
    scales = node.attributes.get("scales")
    chosen = {"mode": node.attributes.get("mode", "nearest")}
    chosen |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _parse(replace(node, attributes=chosen)), None if scales is None else np.array(scales, np.float32)


@kernel("Upsample", since=7, parse=_parse_early, compiled="resize")
@kernel("Resize", since=10, parse=_parse_early, compiled="resize")
def resize_early(b: Bind, p: tuple[Resizing, np.ndarray | None]) -> None:
    """Upsample-7, Upsample-9 and Resize-10, which the converter leaves as they are where nothing reads their output."""
    scales = b.const(1) if p[1] is None else p[1]
    _resize(b, p[0], plan_axes(p[0], b.array(0).shape, scales, None, None))


@kernel("Resize", since=11, parse=_parse, compiled="resize")
def resize(b: Bind, p: Resizing) -> None:
    """ONNX Resize-19 (and 11, 13, 18): inputs X, roi, scales, sizes."""
    x = b.array(0)
    scales = b.const(2) if b.has(2) and b.array(2).size else None
    sizes = b.const(3) if scales is None and b.has(3) else None
    if scales is None and sizes is None:
        raise ValueError("neither scales nor sizes are given")
    roi = b.const(1) if p.transform == "tf_crop_and_resize" and b.has(1) else None
    _resize(b, p, plan_axes(p, x.shape, scales, sizes, roi))


def _resize(b: Bind, p: Resizing, plans: list[AxisPlan]) -> None:
    x = b.array(0)
    shape = list(x.shape)
    for plan in plans:
        shape[plan.axis] = plan.out
    if not plans:
        b.copy(b.out(0, shape, x.dtype, order_like(x)), x)
        return
    y = _compiled(b, p, plans, x, shape) if 0 not in shape else None
    if y is None:
        y = b.out(0, shape, x.dtype)
        if not y.size:
            return
        (_nearest if p.mode == "nearest" else _weighted)(b, p, plans, x, y)
    if p.transform == "tf_crop_and_resize":
        places = []
        for plan in plans:
            at = plan.coordinates(p.transform, np.float64)
            outside = np.flatnonzero((at < 0) | (at > plan.size - 1))
            if outside.size:
                places.append((slice(None),) * plan.axis + (outside,))
        if places:
            b.step(_fill_outside, y, places, p.extrapolation)
