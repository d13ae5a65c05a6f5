"""Transposed convolution of the compiled library: any geometry, with everything that follows it fused."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check, plain_node, run_node
from onnx import helper

from outrider.providers.cpu.kernels.epilogue import ACTIVATIONS
from tests.native_library import libraries

RNG = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def drawn(data: st.DataObject, rank: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Input, weights and attributes with `rank` spatial axes; kernels as large as the strides are frequent."""
    groups = data.draw(st.sampled_from((1, 1, 2)))
    channels = groups * data.draw(st.sampled_from((1, 3, 8, 20)))
    features = data.draw(st.sampled_from((1, 2, 9, 24)))
    strides = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    kernel = [data.draw(st.sampled_from((s, 1, 2, 3, 4))) for s in strides]
    dilations = [data.draw(st.sampled_from((1, 1, 2))) for _ in range(rank)]
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    pads = [data.draw(st.sampled_from((0, min(1, r)))) for r in (*reach, *reach)]
    extra = [data.draw(st.integers(0, s - 1)) for s in strides]
    spatial = [data.draw(st.integers(3, 12)) for _ in range(rank)]
    attributes = {"strides": strides, "pads": pads, "dilations": dilations, "group": groups, "output_padding": extra}
    weights = f32(channels, features, *kernel) / np.float32(np.sqrt(channels * np.prod(kernel)))
    return f32(data.draw(st.integers(1, 2)), channels, *spatial), weights, attributes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 2))
def test_any_geometry(data: st.DataObject, rank: int) -> None:
    x, w, attributes = drawn(data, rank)
    bias = f32(w.shape[1] * attributes["group"])
    check("ConvTranspose", [x, w, bias], rtol=1e-5, atol=1e-5, consts=(1, 2), **attributes)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(tuple(ACTIVATIONS)), st.sampled_from(("", "before", "after")))
def test_what_follows(data: st.DataObject, activation: str, residual: str) -> None:
    """The compiled implementation against the NumPy one: fused operators are our own."""
    x, w, attributes = drawn(data, 2)
    plain = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    shape = run_node(plain_node(plain, 21, [x, w], ["float32"]), [x, w])[0].shape
    features = shape[1]
    proto = helper.make_node(
        "ConvTranspose", ["x", "w", "bias", "residual", "scale", "shift"], ["y"], domain="outrider",
        activation=activation, residual=residual, **attributes,
    )  # fmt: skip
    inputs = [x, w, f32(features), f32(*shape), f32(features), f32(1)]
    node = plain_node(proto, 21, inputs, ["float32"])
    expected = run_node(node, inputs)[0]
    for library in libraries() or ():
        for consts in (None, (1, 2, 4, 5), ()):
            got = run_node(node, inputs, consts, library)[0]
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
