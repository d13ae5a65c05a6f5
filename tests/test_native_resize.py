"""Resizing by the compiled library: images with enough channels, every mode and transformation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_harness import check

RNG = np.random.default_rng(8)
TRANSFORMS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
SCALES = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(("nearest", "linear", "cubic")),
    st.sampled_from(TRANSFORMS),
    st.sampled_from((8, 11, 40)),
    st.lists(st.tuples(st.integers(2, 12), st.sampled_from(SCALES)), min_size=2, max_size=2),
    st.booleans(),
)
def test_images(mode: str, transform: str, channels: int, axes: list[tuple[int, float]], antialias: bool) -> None:
    # Where sizes are rounded, onnxruntime takes the rounded ones for these two and ONNX the others.
    assume(transform not in ("align_corners", "half_pixel_symmetric") or all(n * f == int(n * f) for n, f in axes))
    x = RNG.normal(size=(2, channels, *(size for size, _ in axes))).astype(np.float32)
    scales = np.array([1, 1, *(scale for _, scale in axes)], np.float32)
    more = {"antialias": 1} if antialias and mode != "nearest" else {}
    check(
        "Resize", [x, None, scales], mode=mode, coordinate_transformation_mode=transform, rtol=1e-5, atol=2e-5,
        consts=(2,), **more,
    )  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64])
def test_nearest_of_any_dtype(dtype: type) -> None:
    x = RNG.integers(0, 100, (1, 9, 7, 5)).astype(dtype)
    expected = x.repeat(2, 2).repeat(3, 3)
    scales = np.array([1, 1, 2, 3], np.float32)
    check("Resize", [x, None, scales], mode="nearest", oracle=[expected], consts=(2,))


@pytest.mark.fast
def test_one_spatial_axis() -> None:
    x = RNG.normal(size=(2, 10, 7)).astype(np.float32)
    check("Resize", [x, None, np.array([1, 1, 2], np.float32)], mode="linear", oracle="reference", consts=(2,))
