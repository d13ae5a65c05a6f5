"""Normalizations and softmaxes against onnxruntime, float64 or onnx.reference."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, plain_node, run_node
from native_library import libraries
from onnx import helper

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(9)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3), (2, 3, 7), (1, 3, 2, 2, 2)])
def test_batch_normalization(shape: tuple[int, ...]) -> None:
    statistics = [floats(3), floats(3), floats(3), np.abs(floats(3))]
    check("BatchNormalization", [floats(*shape), *statistics], epsilon=1e-3, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3)])
def test_batch_normalization_in_training_mode(shape: tuple[int, ...]) -> None:
    inputs = [floats(*shape), floats(3), floats(3), floats(3), np.abs(floats(3))]
    attributes = {"training_mode": 1, "momentum": 0.7, "epsilon": 1e-3}
    check("BatchNormalization", inputs, outputs=3, oracle="reference", rtol=1e-4, atol=1e-5, **attributes)


def test_batch_normalization_with_known_statistics() -> None:
    statistics = [floats(3), floats(3), floats(3), np.abs(floats(3))]
    inputs = [floats(2, 3, 4), *statistics]
    from kernel_harness import plain_node, run_node
    from onnx import helper

    proto = helper.make_node("BatchNormalization", list("xsbmv"), ["y"])
    node = plain_node(proto, 21, inputs, ["float32"])
    (known,) = run_node(node, inputs, (1, 2, 3, 4))
    (unknown,) = run_node(node, inputs, ())
    np.testing.assert_array_equal(known, unknown)


def _layer(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, axis: int) -> np.ndarray:
    wide = x.astype(np.float64)
    axes = tuple(range(axis % x.ndim, x.ndim))
    centred = wide - wide.mean(axis=axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + 1e-5) * scale + bias


@pytest.mark.parametrize("axis", [-1, 1, 2])
def test_layer_normalization(axis: int) -> None:
    x = floats(3, 4, 6)
    scale, bias = floats(*x.shape[axis:]), floats(*x.shape[axis:])
    check("LayerNormalization", [x, scale, bias], axis=axis, rtol=1e-5, atol=1e-5)
    check("LayerNormalization", [x, scale], axis=axis, rtol=1e-5, atol=1e-5)
    check("LayerNormalization", [x, scale, bias], axis=axis, outputs=3, oracle="reference", rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_layer_normalization_in_other_precisions(dtype: type) -> None:
    x, scale, bias = (floats(*shape).astype(dtype) for shape in ((5, 8), (8,), (8,)))
    unit = 1e-3 if dtype == np.float16 else 1e-12
    check(
        "LayerNormalization", [x, scale, bias], oracle=[_layer(x, scale, bias, -1).astype(dtype)], rtol=unit, atol=unit
    )


def test_instance_group_and_rms_normalization() -> None:
    check("InstanceNormalization", [floats(2, 3, 4, 5), floats(3), floats(3)], rtol=1e-5, atol=1e-5)
    x = floats(2, 6, 4, 3)
    check("GroupNormalization", [x, floats(6), floats(6)], num_groups=3, oracle="reference", rtol=1e-5, atol=1e-5)
    by_group = [x, floats(3), floats(3)]
    check("GroupNormalization", by_group, opset=18, num_groups=3, oracle="reference", rtol=1e-5, atol=1e-5)
    for axis in (-1, 1):
        x = floats(3, 4, 6)
        scale = floats(*x.shape[axis:])
        check("RMSNormalization", [x, scale], opset=23, axis=axis, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 3, 12])
@pytest.mark.parametrize("op", ["InstanceNormalization", "GroupNormalization"])
def test_as_many_scales_as_channels(op: str, elements: int) -> None:
    attributes = {"num_groups": 2} if op == "GroupNormalization" else {}
    proto = helper.make_node(op, ["x", "s", "b"], ["y"], **attributes)
    x, good, wrong = np.ones((2, 6, 4), np.float32), np.ones(6, np.float32), np.ones(elements, np.float32)
    for library in (None, *(libraries() or ())):
        for scale, bias in ((wrong, good), (good, wrong)):
            node = plain_node(proto, 21, [x, scale, bias], ["float32"])
            with pytest.raises(ValueError, match="there must be 6 elements"):
                run_node(node, [x, scale, bias], None, library)


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_lrn(size: int) -> None:
    # As many images as channels: onnx.reference visits only so many channels. onnxruntime takes odd sizes only.
    check("LRN", [floats(5, 5, 3, 3)], size=size, alpha=0.3, beta=0.5, bias=2.0, rtol=1e-5, oracle="reference")


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_lp_normalization(p: int, axis: int) -> None:
    x = floats(3, 4, 5)
    x[:, 0] = 0
    check("LpNormalization", [x], p=p, axis=axis, rtol=1e-5)


def test_mean_variance_normalization() -> None:
    check("MeanVarianceNormalization", [floats(2, 3, 4, 5)], rtol=1e-4, atol=1e-5)
    check("MeanVarianceNormalization", [floats(2, 3, 4, 5)], axes=[1, -1], oracle="reference", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", [11, 13, 21])
def test_softmaxes(op: str, opset: int) -> None:
    x = floats(3, 4, 5) * 30
    check(op, [x], opset=opset, rtol=1e-5, atol=1e-6)
    for axis in (0, 1, -1):
        check(op, [x], opset=opset, rtol=1e-5, atol=1e-6, axis=axis)


def test_softmax_of_halves_rounds_once() -> None:
    x = (floats(4, 50) * 3).astype(np.float16)
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    check("Softmax", [x], oracle=[(e / e.sum(axis=1, keepdims=True)).astype(np.float16)], rtol=1e-3)


def test_softmax_of_nothing() -> None:
    check("Softmax", [floats(3, 0)], axis=0, oracle=[floats(3, 0)])
