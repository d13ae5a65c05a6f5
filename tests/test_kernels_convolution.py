"""Conv and ConvTranspose against onnxruntime, and float16 and float64 against float64 sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


CONVS: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("pointwise", (2, 6, 5, 7), (4, 6, 1, 1), {}),
    ("pointwise strided", (2, 6, 5, 7), (4, 6, 1, 1), {"strides": [2, 2]}),
    ("padded", (2, 3, 9, 8), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("uneven pads", (1, 3, 9, 8), (4, 3, 3, 5), {"pads": [0, 2, 1, 1], "strides": [2, 1]}),
    ("dilated", (1, 3, 12, 11), (4, 3, 3, 3), {"dilations": [2, 3], "pads": [2, 2, 2, 2]}),
    ("groups", (2, 6, 7, 7), (9, 2, 3, 3), {"group": 3}),
    ("groups strided", (2, 6, 8, 8), (4, 3, 2, 3), {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("depthwise", (2, 8, 9, 10), (8, 1, 3, 3), {"group": 8, "pads": [1, 1, 1, 1]}),
    ("depthwise strided", (2, 8, 9, 10), (8, 1, 5, 5), {"group": 8, "pads": [2, 2, 2, 2], "strides": [2, 1]}),
    ("depthwise multiplied", (1, 4, 6, 6), (12, 1, 3, 3), {"group": 4, "dilations": [1, 2]}),
    ("depthwise unpadded", (1, 4, 6, 6), (4, 1, 3, 3), {"group": 4}),
    ("depthwise 1-D", (2, 5, 20), (5, 1, 4), {"group": 5, "dilations": [2]}),
    ("1-D", (2, 3, 40), (5, 3, 4), {"strides": [3], "pads": [1, 2]}),
    ("3-D", (1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0], "strides": [1, 2, 2]}),
    ("same upper", (1, 3, 7, 8), (2, 3, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("same lower", (1, 3, 7, 8), (2, 3, 4, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ("valid", (1, 3, 7, 8), (2, 3, 4, 3), {"auto_pad": "VALID", "strides": [2, 2]}),
    ("blocks of rows", (2, 16, 60, 61), (8, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("blocks of rows in groups", (1, 32, 60, 61), (8, 16, 3, 3), {"group": 2}),
    ("few features", (2, 12, 9, 10), (3, 12, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("few features in many taps", (1, 32, 9, 10), (12, 32, 2, 3), {"dilations": [2, 1]}),
    ("few features in blocks", (1, 64, 70, 71), (24, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("one feature in blocks", (1, 32, 150, 90), (1, 32, 7, 3), {"pads": [3, 1, 3, 1]}),
    ("few features in 1-D", (2, 8, 33), (2, 8, 5), {"dilations": [2], "pads": [3, 2]}),
    ("blocks of images", (40, 16, 9, 5), (8, 16, 5, 5), {}),
    ("blocks of channels", (1, 40, 40, 41), (40, 1, 3, 3), {"group": 40, "pads": [1, 1, 1, 1]}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), [c[1:] for c in CONVS], ids=[c[0] for c in CONVS])
def test_conv(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    inputs = [floats(*x), floats(*w)]
    check("Conv", inputs, rtol=1e-4, atol=1e-4, **attributes)
    check("Conv", [*inputs, floats(w[0])], rtol=1e-4, atol=1e-4, **attributes)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_conv_of_any_geometry(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    small = st.integers(1, 3)
    kernel = [data.draw(small) for _ in range(rank)]
    strides = [data.draw(small) for _ in range(rank)]
    dilations = [data.draw(st.integers(1, 2)) for _ in range(rank)]
    pads = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    spatial = [(k - 1) * d + data.draw(st.integers(1, 5)) for k, d in zip(kernel, dilations, strict=True)]
    group, channels, features = data.draw(small), data.draw(small), data.draw(small)
    x = floats(data.draw(small), group * channels, *spatial)
    w = floats(group * features, channels, *kernel)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    check("Conv", [x, w], rtol=1e-4, atol=1e-4, **attributes)


def _naive(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), w.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,mcij->nmhw", windows, w.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_conv_in_other_precisions(dtype: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x, w = floats(2, 3, 8, 8).astype(kind), floats(4, 3, 3, 3).astype(kind)
    expected = _naive(x, w)
    unit = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-12}[dtype]
    check("Conv", [x, w], opset=22, oracle=[expected.astype(kind)], rtol=unit, atol=unit)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_depthwise_conv_spoils_only_the_windows_that_hold_the_value(value: float) -> None:
    x, w = floats(2, 20, 12, 30), floats(40, 1, 3, 3)
    x[1, 3, 5, 17] = value
    check("Conv", [x, w], group=20, pads=[1, 1, 1, 1], rtol=1e-4, atol=1e-4)


def test_conv_of_nothing() -> None:
    check("Conv", [floats(0, 3, 5, 5), floats(2, 3, 3, 3)], oracle=[np.zeros((0, 2, 3, 3), np.float32)])


TRANSPOSED: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("plain", (1, 3, 4, 5), (3, 2, 3, 3), {}),
    ("doubling", (2, 4, 4, 5), (4, 3, 2, 2), {"strides": [2, 2]}),
    ("padded", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "pads": [1, 0, 1, 1]}),
    ("output padding", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [3, 2], "output_padding": [2, 1]}),
    ("padded tiles", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [3, 3], "pads": [1, 1, 1, 1], "output_padding": [2, 2]}),
    ("dilated tiles", (1, 3, 4, 5), (3, 2, 2, 2), {"strides": [2, 2], "dilations": [2, 2], "pads": [0, 0, 1, 1]}),
    ("output shape", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "output_shape": [8, 10]}),
    ("shape upper", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "output_shape": [8, 10], "auto_pad": "SAME_UPPER"}),
    ("same upper", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("same lower", (1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("groups", (2, 4, 4, 5), (4, 3, 3, 2), {"group": 2, "strides": [1, 2]}),
    ("depthwise", (2, 4, 4, 5), (4, 1, 3, 2), {"group": 4}),
    ("dilated", (1, 3, 4, 5), (3, 2, 2, 2), {"dilations": [2, 3], "strides": [2, 2]}),
    ("gaps", (1, 3, 4, 5), (3, 2, 2, 1), {"strides": [3, 3]}),
    ("1-D", (1, 3, 9), (3, 2, 4), {"strides": [2], "pads": [1, 1]}),
    ("3-D", (1, 2, 3, 3, 3), (2, 2, 2, 3, 2), {"strides": [2, 1, 2]}),
]  # fmt: skip


@pytest.mark.parametrize(("x", "w", "attributes"), [c[1:] for c in TRANSPOSED], ids=[c[0] for c in TRANSPOSED])
def test_conv_transpose(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    bias = floats(w[1] * attributes.get("group", 1))
    check("ConvTranspose", [floats(*x), floats(*w), bias], rtol=1e-4, atol=1e-4, **attributes)
    check("ConvTranspose", [floats(*x), floats(*w)], rtol=1e-4, atol=1e-4, **attributes)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_conv_transpose_of_any_geometry(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 2))
    small = st.integers(1, 3)
    kernel, strides, dilations = ([data.draw(small) for _ in range(rank)] for _ in range(3))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [data.draw(st.integers(0, (r - 1) // 2)) for r in reach * 2]
    extra = [data.draw(st.integers(0, s - 1)) for s in strides]
    group, channels, features = data.draw(small), data.draw(small), data.draw(small)
    x = floats(data.draw(small), group * channels, *[data.draw(st.integers(1, 5)) for _ in range(rank)])
    w = floats(group * channels, features, *kernel)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group, "output_padding": extra}
    check("ConvTranspose", [x, w], rtol=1e-4, atol=1e-4, **attributes)


def test_a_weight_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[4, 5, 3, 3\]"):
        check("Conv", [floats(1, 3, 8, 8), floats(4, 5, 3, 3)], oracle=[floats(1)])
