"""Resize against onnxruntime and, where that deviates from ONNX, onnx.reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(13)
TRANSFORMS = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]


def image(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def by_sizes(x: np.ndarray, *sizes: int) -> list[Any]:
    return [x, None, None, np.array(sizes, np.int64)]


def by_scales(x: np.ndarray, *scales: float) -> list[Any]:
    return [x, None, np.array(scales, np.float32)]


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nearest(rounding: str, transform: str) -> None:
    attributes = {"nearest_mode": rounding, "coordinate_transformation_mode": transform}
    for sizes in [(7, 9), (8, 12), (2, 3), (4, 6), (3, 11)]:
        check("Resize", by_sizes(image(1, 2, 4, 6), 1, 2, *sizes), **attributes)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_interpolation(mode: str, transform: str) -> None:
    for sizes in [(7, 9), (8, 12), (2, 3), (3, 11), (1, 5)]:
        inputs = by_sizes(image(1, 2, 4, 6), 1, 2, *sizes)
        check("Resize", inputs, mode=mode, coordinate_transformation_mode=transform, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scales", [(2.0, 3.0), (0.5, 0.7), (1.5, 0.6)])
def test_scales(mode: str, scales: tuple[float, float]) -> None:
    inputs = by_scales(image(1, 2, 10, 6), 1.0, 1.0, *scales)
    check("Resize", inputs, mode=mode, rtol=1e-4, atol=1e-5)
    check("Resize", inputs, mode=mode, coordinate_transformation_mode="asymmetric", rtol=1e-4, atol=1e-5)


def test_float32_scales_divide_as_float32() -> None:
    inputs = by_scales(image(1, 1, 9, 10), 1.0, 1.0, 1 / 3, 0.7)
    check("Resize", inputs, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("exclude", [0, 1])
def test_antialias(mode: str, exclude: int) -> None:
    for inputs in (by_sizes(image(1, 1, 8, 9), 1, 1, 3, 4), by_scales(image(1, 1, 8, 9), 1.0, 1.0, 0.6, 0.45)):
        attributes = {"mode": mode, "antialias": 1, "exclude_outside": exclude}
        check("Resize", inputs, opset=19, oracle="reference", rtol=1e-4, atol=1e-5, **attributes)


def test_cubic_without_what_is_outside() -> None:
    inputs = by_sizes(image(1, 1, 5, 6), 1, 1, 8, 4)
    check("Resize", inputs, mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_crop_and_resize(mode: str) -> None:
    roi = np.array([0, 0, 0.4, -0.3, 1, 1, 1.2, 0.8], np.float32)
    inputs = [image(1, 1, 5, 6), roi, None, np.array([1, 1, 4, 5], np.int64)]
    attributes = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    check("Resize", inputs, oracle="reference", rtol=1e-4, atol=1e-5, **attributes)


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("axes", [[2, 3], [3, 2]])
def test_aspect_ratio(policy: str, axes: list[int]) -> None:
    inputs = by_sizes(image(1, 2, 4, 6), 9, 7)
    check("Resize", inputs, axes=axes, keep_aspect_ratio_policy=policy, mode="linear", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.float16, np.float64])
def test_other_types(dtype: type) -> None:
    x = RNG.integers(0, 100, (1, 2, 4, 6)).astype(dtype)
    check("Resize", by_sizes(x, 1, 2, 7, 9), oracle="reference")
    check("Resize", by_sizes(x, 1, 2, 7, 9), mode="linear", oracle="reference", rtol=1e-3)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_what_came_before_resize_11(mode: str) -> None:
    x, scales = image(1, 2, 4, 6), [1.0, 1.0, 2.0, 1.5]
    check("Upsample", [x], opset=8, mode=mode, scales=scales, rtol=1e-4, atol=1e-5)
    for op, opset in [("Upsample", 9), ("Resize", 10)]:
        check(op, [x, np.array(scales, np.float32)], opset=opset, mode=mode, rtol=1e-4, atol=1e-5)
