"""Poolings and reductions by the compiled library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check, plain_node, run_node
from onnx import helper

from tests.native_library import libraries

RNG = np.random.default_rng(9)


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(("MaxPool", "AveragePool", "LpPool")), st.integers(1, 2))
def test_any_window(data: st.DataObject, op_type: str, rank: int) -> None:
    channels = data.draw(st.sampled_from((8, 12, 40, 67)))
    kernel = [data.draw(st.integers(1, 4)) for _ in range(rank)]
    dilations = [data.draw(st.sampled_from((1, 1, 2))) for _ in range(rank)]
    spatial = [data.draw(st.integers((k - 1) * d + 1, 15)) for k, d in zip(kernel, dilations, strict=True)]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "dilations": dilations,
        "strides": [data.draw(st.integers(1, 3)) for _ in range(rank)],
        "pads": [data.draw(st.integers(0, k - 1)) for k in (*kernel, *kernel)],
        "ceil_mode": data.draw(st.integers(0, 1)),
    }
    if op_type == "AveragePool":
        attributes["count_include_pad"] = data.draw(st.integers(0, 1))
    if op_type == "LpPool":
        attributes["p"] = data.draw(st.integers(1, 3))
        attributes["ceil_mode"] = 0
    x = f32(data.draw(st.integers(1, 2)), channels, *spatial)
    check(op_type, [x], opset=22, rtol=1e-5, atol=1e-6, **attributes)


@pytest.mark.fast
@pytest.mark.parametrize("op_type", ["MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "ReduceSum"])
def test_nan_stays(op_type: str) -> None:
    found = libraries()
    if found is None:
        pytest.skip("there are no compiled kernels here")
    x = f32(1, 16, 6, 6)
    x[0, 3, 2, 4] = np.nan
    attributes = {"kernel_shape": [6, 6]} if op_type == "MaxPool" else {}
    inputs = [x, np.array([2, 3])] if op_type.startswith("Reduce") else [x]
    proto = helper.make_node(op_type, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes)
    node = plain_node(proto, 21, inputs, ["float32"])
    for order in ("C", "F"):
        y = run_node(node, [np.array(x, order=order), *inputs[1:]], None, found[0])[0]
        assert np.argwhere(np.isnan(y)).tolist() == [[0, 3, 0, 0]]


_WHAT = {
    "ReduceSum": lambda x, axes: x.sum(axes, keepdims=True),
    "ReduceMean": lambda x, axes: x.mean(axes, keepdims=True),
    "ReduceMax": lambda x, axes: x.max(axes, keepdims=True),
    "ReduceMin": lambda x, axes: x.min(axes, keepdims=True),
    "ReduceL1": lambda x, axes: np.abs(x).sum(axes, keepdims=True),
    "ReduceL2": lambda x, axes: np.sqrt((x * x).sum(axes, keepdims=True)),
    "ReduceSumSquare": lambda x, axes: (x * x).sum(axes, keepdims=True),
}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(tuple(_WHAT)), st.booleans())
def test_any_axes(data: st.DataObject, op_type: str, keepdims: bool) -> None:
    """Against float64; `check` compares the bits for two memory orders."""
    rank = data.draw(st.integers(1, 4))
    shape = [data.draw(st.sampled_from((1, 2, 5, 8, 33))) for _ in range(rank)]
    axes = sorted(data.draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    x = f32(*shape)
    expected = _WHAT[op_type](x.astype(np.float64), tuple(axes)).astype(np.float32)
    if not keepdims:
        expected = expected.reshape([d for i, d in enumerate(shape) if i not in axes])
    check(op_type, [x, np.array(axes)], oracle=[expected], keepdims=int(keepdims), rtol=2e-6, atol=3e-5, consts=(1,))


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(5000,), (3, 5000), (5000, 3), (2, 2100, 40)])
def test_long_sums_lose_little(shape: tuple[int, ...]) -> None:
    """Within the documented bound of the sum of magnitudes."""
    found = libraries()
    if found is None:
        pytest.skip("there are no compiled kernels here")
    axis = shape.index(max(shape))
    x = f32(*shape) + 3
    proto = helper.make_node("ReduceSum", ["x", "a"], ["y"], keepdims=0)
    inputs = [x, np.array([axis])]
    y = run_node(plain_node(proto, 21, inputs, ["float32"]), inputs, (1,), found[0])[0]
    exact, magnitudes = x.astype(np.float64).sum(axis), np.abs(x.astype(np.float64)).sum(axis)
    n = shape[axis]
    assert (np.abs(y - exact) <= (128 + math.ceil(n / 1024) + 5) * 2.0**-24 * magnitudes).all()
