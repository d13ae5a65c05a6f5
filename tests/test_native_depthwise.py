"""Depthwise convolution of the compiled library: any geometry, with everything that follows it fused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check, plain_node, run_node
from onnx import helper

from outrider.providers.cpu.kernels.epilogue import ACTIVATIONS
from tests.native_library import libraries

RNG = np.random.default_rng(5)


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def drawn(data: st.DataObject, rank: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Input, weights and attributes of a depthwise convolution with `rank` spatial axes."""

    def numbers(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(rank)]

    channels = data.draw(st.sampled_from((8, 9, 16, 23, 40, 100)))
    kernel = [data.draw(st.sampled_from((1, 2, 3, 5, 7))) for _ in range(rank)]
    dilations = [data.draw(st.sampled_from((1, 1, 2))) for _ in range(rank)]
    spatial = [
        data.draw(st.integers(d * (k - 1) + 1, 30)) for k, d in zip(kernel, dilations, strict=True)
    ]  # fmt: skip
    attributes = {
        "group": channels, "dilations": dilations, "strides": numbers(1, 3), "pads": [*numbers(0, 3), *numbers(0, 3)],
    }  # fmt: skip
    return f32(data.draw(st.integers(1, 2)), channels, *spatial), f32(channels, 1, *kernel), attributes


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 2))
def test_any_geometry(data: st.DataObject, rank: int) -> None:
    x, w, attributes = drawn(data, rank)
    check("Conv", [x, w, f32(len(w))], rtol=1e-5, atol=1e-5, consts=(1, 2), **attributes)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(tuple(ACTIVATIONS)), st.sampled_from(("", "before", "after")))
def test_what_follows(data: st.DataObject, activation: str, residual: str) -> None:
    """The compiled implementation against the NumPy one: fused operators are our own."""
    x, w, attributes = drawn(data, 2)
    plain = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    shape = run_node(plain_node(plain, 21, [x, w], ["float32"]), [x, w])[0].shape
    names = ["x", "w", "bias", "residual", "scale", "shift", "pad"]
    inputs = [x, w, f32(len(w)), f32(*shape), f32(len(w)), f32(1), f32(len(w))]
    if data.draw(st.booleans()):
        names, inputs = names[:3], inputs[:3]
    proto = helper.make_node(
        "Conv", names, ["y"], domain="outrider", activation=activation, residual=residual, **attributes
    )
    node = plain_node(proto, 21, inputs, ["float32"])
    expected = run_node(node, inputs)[0]
    for library in libraries() or ():
        for consts in (None, (1, 2, 4, 5, 6), ()):
            got = run_node(node, inputs, consts, library)[0]
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((1, 16, 20, 300), (16, 1, 3, 3), {"pads": [1, 1, 1, 1]}),  # rows in parts
        ((2, 24, 500), (24, 1, 31), {"pads": [15, 15]}),
        ((1, 40, 33, 7), (40, 1, 5, 1), {"pads": [2, 0, 2, 0], "strides": [2, 1]}),
        ((1, 200, 9, 9), (200, 1, 5, 5), {"pads": [2, 2, 2, 2]}),  # channels in blocks
        ((1, 12, 4, 4), (12, 1, 7, 7), {"pads": [6, 6, 6, 6]}),
        ((1, 8, 3, 3), (8, 1, 3, 3), {"pads": [7, 7, 7, 7]}),  # windows that lie outside
        ((1, 8, 30, 30), (8, 1, 20, 20), {"pads": [0, 0, 0, 0]}),  # too large a kernel: NumPy
        ((1, 24, 5, 90), (24, 1, 3, 3), {"pads": [1, 1, 1, 1]}),  # read where it lies
        ((1, 20, 9, 90), (20, 1, 3, 3), {"pads": [1, 0, 1, 3], "strides": [2, 2]}),
        ((1, 8, 9, 9), (8, 1, 3, 3), {"pads": [3, 0, 3, 0], "dilations": [2, 1]}),
        ((1, 7, 9, 9), (7, 1, 3, 3), {}),
        ((1, 8, 9, 9), (16, 1, 3, 3), {}),
        ((1, 8, 5, 6, 7), (8, 1, 3, 3, 3), {}),
    ],
)
def test_chosen(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    weights = f32(*w) / np.float32(np.sqrt(np.prod(w[2:])))
    check("Conv", [f32(*x), weights, f32(w[0])], rtol=1e-5, atol=1e-5, consts=(1, 2), group=x[1], **attributes)


@pytest.mark.fast
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_spoils_only_its_own_windows(value: float) -> None:
    x = f32(1, 8, 12, 30)
    x[0, 3, 5, 17] = value
    found = libraries()
    if found is None:
        pytest.skip("there are no compiled kernels here")
    proto = helper.make_node("Conv", ["x", "w"], ["y"], group=8, pads=[1, 1, 1, 1])
    w = f32(8, 1, 3, 3)
    y = run_node(plain_node(proto, 21, [x, w], ["float32"]), [x, w], (1,), found[0])[0]
    spoilt = np.argwhere(~np.isfinite(y))
    assert len(spoilt) == 9
    assert (np.abs(spoilt - [0, 3, 5, 17]).max(axis=0) == [0, 0, 1, 1]).all()
