"""Poolings against onnxruntime, or onnx.reference where onnxruntime lacks the type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(8)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


WINDOWS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("plain", (2, 3, 8, 9), {"kernel_shape": [2, 3]}),
    ("strided", (2, 3, 8, 9), {"kernel_shape": [2, 3], "strides": [2, 2]}),
    ("padded", (2, 3, 8, 9), {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2]}),
    ("dilated", (1, 2, 9, 9), {"kernel_shape": [2, 3], "dilations": [2, 2]}),
    ("ceiling", (1, 2, 9, 8), {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("ceiling padded", (1, 2, 5, 6), {"kernel_shape": [3, 3], "strides": [3, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ("same upper", (1, 2, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("same lower", (1, 2, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("1-D", (2, 3, 11), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    ("3-D", (1, 2, 5, 4, 6), {"kernel_shape": [2, 2, 3], "strides": [1, 2, 2], "pads": [1, 0, 1, 0, 1, 0]}),
]
each_window = pytest.mark.parametrize(("x", "attributes"), [w[1:] for w in WINDOWS], ids=[w[0] for w in WINDOWS])


@each_window
def test_max_pool(x: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check("MaxPool", [floats(*x)], **attributes)
    check("MaxPool", [floats(*x)], outputs=2, **attributes)


@each_window
def test_average_pool(x: tuple[int, ...], attributes: dict[str, Any]) -> None:
    for include in (0, 1):
        check("AveragePool", [floats(*x)], count_include_pad=include, **attributes)


@each_window
def test_lp_pool(x: tuple[int, ...], attributes: dict[str, Any]) -> None:
    for p in (1, 2, 3):
        check("LpPool", [floats(*x)], p=p, rtol=1e-5, **attributes)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.data())
def test_pools_of_any_geometry(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    small = st.integers(1, 3)
    kernel, strides, dilations = ([data.draw(small) for _ in range(rank)] for _ in range(3))
    pads = [data.draw(st.integers(0, k - 1)) for k in kernel * 2]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    x = floats(2, data.draw(small), *[r + data.draw(st.integers(0, 5)) for r in reach])
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    attributes["ceil_mode"] = data.draw(st.integers(0, 1))
    check("MaxPool", [x], outputs=2, **attributes)
    include = data.draw(st.integers(0, 1))
    check("AveragePool", [x], count_include_pad=include, rtol=1e-5, atol=1e-5, **attributes)


def test_max_pool_indices_by_column() -> None:
    check("MaxPool", [floats(2, 2, 6, 5)], outputs=2, kernel_shape=[2, 2], strides=[2, 1], storage_order=1)


def test_max_pool_of_bytes() -> None:
    for dtype in (np.int8, np.uint8):
        x = RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (1, 2, 6, 6)).astype(dtype)
        check("MaxPool", [x], kernel_shape=[3, 3], pads=[1, 1, 1, 1])


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
def test_global_pools(shape: tuple[int, ...]) -> None:
    x = floats(*shape)
    check("GlobalMaxPool", [x])
    check("GlobalAveragePool", [x])
    check("GlobalLpPool", [x], p=2, rtol=1e-5)
    check("GlobalLpPool", [x], p=1, rtol=1e-5)


def test_pools_of_halves_round_once() -> None:
    x = floats(1, 3, 8, 8).astype(np.float16)
    mean = x.astype(np.float64).reshape(1, 3, 64).mean(axis=2).reshape(1, 3, 1, 1)
    check("GlobalAveragePool", [x], oracle=[mean.astype(np.float16)], rtol=1e-3)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (2, 2), axis=(2, 3))
    check("AveragePool", [x], kernel_shape=[2, 2], oracle=[windows.mean(axis=(4, 5)).astype(np.float16)], rtol=1e-3)
    check("MaxPool", [x], kernel_shape=[2, 2], oracle=[windows.max(axis=(4, 5)).astype(np.float16)])


def test_max_unpool() -> None:
    x = floats(1, 2, 3, 3)
    at = np.stack([RNG.permutation(36)[:9] + 36 * c for c in range(2)]).reshape(1, 2, 3, 3).astype(np.int64)
    check("MaxUnpool", [x, at], kernel_shape=[2, 2], strides=[2, 2])
