"""Boxes that do not overlap, regions of interest, sampling between pixels, columns: against onnxruntime and ONNX."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Boxes --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 30), limit=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_non_max_suppression(seed: int, count: int, limit: float) -> None:
    rng = np.random.default_rng(seed)
    batches, labels, centred = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(0, 2))
    # On a coarse grid: many boxes are equal, touch, have no area or their corners the wrong way round.
    boxes = rng.integers(0, 5, (batches, count, 4)).astype(np.float32)
    scores = rng.integers(0, 6, (batches, labels, count)).astype(np.float32) / 6
    most = np.array([int(rng.integers(0, 8))])
    inputs = [boxes, scores, most, np.array([limit], np.float32), np.array([rng.uniform(0, 0.6)], np.float32)]
    check("NonMaxSuppression", inputs[: int(rng.integers(4, 6))], opset=11, center_point_box=centred, bound=False)


def test_non_max_suppression_without_a_number_of_boxes_keeps_none() -> None:
    check("NonMaxSuppression", [np.ones((1, 2, 4), np.float32), np.ones((1, 1, 2), np.float32)], bound=False)


def test_boxes_and_scores_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="there are 3 boxes and scores of 2"):
        check("NonMaxSuppression", [normal(1, 3, 4), normal(1, 1, 2)], oracle=[np.zeros((0, 3), np.int64)])
    with pytest.raises(ValueError, match=r"boxes are \[1, 3, 5\]"):
        check("NonMaxSuppression", [normal(1, 3, 5), normal(1, 1, 3)], oracle=[np.zeros((0, 3), np.int64)])


# Regions of interest ------------------------------------------------------------------------------------------------

REGIONS = np.array([[1, 1, 9, 7], [0, 0, 3, 12], [-4, -3, 20, 20], [2.3, 4.1, 2.6, 4.2], [9, 9, 4, 4]], np.float32)
IMAGES = np.array([0, 1, 1, 0, 1])


@pytest.mark.parametrize("pixel", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(pixel: str, samples: int, scale: float, mode: str) -> None:
    attributes = {"output_height": 3, "output_width": 2, "sampling_ratio": samples, "spatial_scale": scale}
    x, more = normal(2, 3, 10, 12), {"coordinate_transformation_mode": pixel, "mode": mode, **attributes}
    check("RoiAlign", [x, REGIONS, IMAGES], opset=16, rtol=1e-5, atol=1e-5, **more)
    if mode == "avg" and pixel == "output_half_pixel":
        check("RoiAlign", [x, REGIONS, IMAGES], opset=10, rtol=1e-5, atol=1e-5, **attributes)


def test_max_roi_pool() -> None:
    regions = np.concatenate([IMAGES[:, None].astype(np.float32), REGIONS], 1)[:4]
    for scale in (1.0, 0.5):
        check("MaxRoiPool", [normal(2, 3, 10, 12), regions], pooled_shape=[3, 2], spatial_scale=scale)


@pytest.mark.parametrize("op", ["RoiAlign", "MaxRoiPool"])
def test_a_region_of_an_image_that_is_not_there(op: str) -> None:
    align = [normal(1, 1, 4, 4), REGIONS[:1], np.array([7])]
    pool = [normal(1, 1, 4, 4), np.array([[7, 0, 0, 2, 2]], np.float32)]
    with pytest.raises(IndexError, match="a region is of image 7, there are 1"):
        check(op, align if op == "RoiAlign" else pool, oracle=[normal(1, 1, 1, 1)], pooled_shape=[1, 1])


# Between pixels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str, corners: int) -> None:
    grid = RNG.uniform(-1.9, 1.9, (2, 5, 4, 2)).astype(np.float32)
    more = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    check("GridSample", [normal(2, 3, 6, 7), grid], opset=20, rtol=1e-4, atol=1e-4, **more)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_grid_sample_of_volumes(mode: str, padding: str) -> None:
    grid = RNG.uniform(-1.5, 1.5, (1, 3, 2, 4, 3)).astype(np.float32)
    more = {"mode": mode, "padding_mode": padding}
    check("GridSample", [normal(1, 2, 4, 5, 3), grid], opset=20, rtol=1e-4, atol=1e-5, **more)


def test_grid_sample_in_the_words_of_opset_16_and_in_other_precisions() -> None:
    x, grid = normal(1, 2, 5, 5), RNG.uniform(-1, 1, (1, 3, 3, 2)).astype(np.float32)
    check("GridSample", [x, grid], opset=16, mode="bilinear", rtol=1e-5, atol=1e-5)
    (whole,) = check("GridSample", [x.astype(float), grid.astype(float)], opset=20, rtol=1e-10, atol=1e-10)
    half = [x.astype(np.float16), grid.astype(np.float16)]
    check("GridSample", half, opset=22, oracle=[whole.astype(np.float16)], rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="the grid"):
        check("GridSample", [x, grid[..., :1]], oracle=[x])


@pytest.mark.filterwarnings("ignore:divide by zero")  # the oracle, on an axis of one pixel
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("size", [[2, 3, 4, 5], [2, 1, 3, 4, 2], [2, 2, 2, 1]])
def test_affine_grid(size: list[int], corners: int) -> None:
    rank = len(size) - 2
    inputs = [normal(2, rank, rank + 1), np.array(size)]
    check("AffineGrid", inputs, opset=20, oracle="reference", align_corners=corners, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("groups", "offsets", "masked"), [(1, 1, True), (2, 2, False), (1, 2, True)])
def test_deform_conv(groups: int, offsets: int, masked: bool) -> None:
    x, w = normal(2, 2, 4, 5), normal(2, 2 // groups, 2, 2)
    attributes = {"pads": [1, 0, 0, 1], "strides": [1, 2], "dilations": [1, 2], "group": groups}
    out = (4, 2)
    moved = RNG.uniform(-2, 2, (2, offsets * 8, *out)).astype(np.float32)
    inputs = [x, w, moved, normal(2)]
    if masked:
        inputs.append(RNG.uniform(0, 1, (2, offsets * 4, *out)).astype(np.float32))
    check("DeformConv", inputs, opset=19, oracle="reference", offset_group=offsets, rtol=1e-4, atol=1e-4, **attributes)


def test_deform_conv_that_moves_nothing_is_a_convolution() -> None:
    x, w = normal(1, 2, 5, 5), normal(3, 2, 3, 3)
    (expected,) = check("Conv", [x, w], rtol=1e-5, atol=1e-5)
    still = np.zeros((1, 18, 3, 3), np.float32)
    check("DeformConv", [x, w, still], opset=19, oracle=[expected], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"the result is \[3, 3\]"):
        check("DeformConv", [x, w, still[:, :, :2]], opset=19, oracle=[expected])


@pytest.mark.parametrize("case", [{}, {"strides": [2, 1]}, {"dilations": [1, 2], "pads": [1, 0, 2, 1]}])
def test_col2im(case: dict[str, list[int]]) -> None:
    image, block = [7, 8], [3, 2]
    pads, strides, dilations = case.get("pads", [0] * 4), case.get("strides", [1, 1]), case.get("dilations", [1, 1])
    places = [(image[a] + pads[a] + pads[2 + a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1 for a in (0, 1)]
    x = normal(2, 3 * 6, places[0] * places[1])
    check("Col2Im", [x, np.array(image), np.array(block)], opset=18, rtol=1e-5, atol=1e-5, **case)
    with pytest.raises(ValueError, match="do not make an image"):
        check("Col2Im", [x[:, :, 1:], np.array(image), np.array(block)], opset=18, oracle=[x], **case)


def test_col2im_counts_how_many_windows_see_a_pixel() -> None:
    shape, block = (4, 3, 5), (2, 3, 2)
    seen = np.zeros(shape, np.float32)
    for corner in itertools.product(*(range(n - k + 1) for n, k in zip(shape, block, strict=True))):
        seen[tuple(slice(c, c + k) for c, k in zip(corner, block, strict=True))] += 1
    ones = np.ones((1, 12, 12), np.float32)
    check("Col2Im", [ones, np.array(shape), np.array(block)], opset=18, oracle=[seen[None, None]])
