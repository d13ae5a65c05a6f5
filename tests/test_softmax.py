"""Softmax, LogSoftmax and `outrider::Softmax` against float64, over axes, masks and memory orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check, compare, plain_node
from onnx import helper

from outrider.providers.cpu.kernels.frame import channels_last

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def exact(x: np.ndarray, axis: int, logarithm: bool = False) -> np.ndarray:
    t = x.astype(np.float64)
    t = t - t.max(axis, keepdims=True)
    total = np.exp(t).sum(axis, keepdims=True)
    return (t - np.log(total) if logarithm else np.exp(t) / total).astype(np.float32)


@st.composite
def cases(draw: Any) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape = tuple(draw(st.sampled_from((1, 2, 3, 7, 8, 9, 70))) for _ in range(draw(st.integers(1, 4))))
    x = (rng.normal(0, 1, shape) * draw(st.sampled_from((0.1, 3.0, 40.0)))).astype(np.float32)
    if len(shape) > 2 and draw(st.booleans()):
        order = channels_last(len(shape))
        x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    return x, draw(st.integers(-len(shape), len(shape) - 1))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_any_axis(case: tuple[np.ndarray, int], logarithm: bool) -> None:
    x, axis = case
    op = "LogSoftmax" if logarithm else "Softmax"
    check(op, [x], axis=axis, oracle=[exact(x, axis, logarithm)], rtol=3e-6, atol=1e-5 if logarithm else 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(), st.data())
def test_factor_and_mask(case: tuple[np.ndarray, int], data: st.DataObject) -> None:
    x, axis = case
    factor = data.draw(st.sampled_from((1.0, 0.125, -2.0)))
    inputs = [x]
    scaled = x.astype(np.float64) * factor
    if data.draw(st.booleans()):
        form = [n if data.draw(st.booleans()) else 1 for n in x.shape]
        if data.draw(st.booleans()):
            form = [2, *form]  # the mask has more axes than x
        axis = axis % x.ndim - x.ndim
        rng = np.random.default_rng(len(form))
        inputs.append(np.where(rng.random(form) < 0.2, np.float32(-200), rng.normal(0, 1, form)).astype(np.float32))
        scaled = scaled + inputs[1]
    proto = helper.make_node(
        "Softmax", [f"x{i}" for i in range(len(inputs))], ["y"], domain="outrider", axis=axis, factor=factor
    )
    tolerance = 2e-6 + 2e-7 * float(np.abs(scaled).max(initial=0))  # rounding of what goes into exp
    expected = exact(scaled, axis)
    compare(plain_node(proto, 1, inputs, ["float32"]), inputs, [expected], rtol=tolerance, atol=1e-9)


def test_rows_without_a_number() -> None:
    x = np.array([[1, 2, 3], [-np.inf] * 3, [np.nan, 1, 2], [-np.inf, 1, 1]], np.float32)
    for axis, of in ((-1, x), (0, np.ascontiguousarray(x.T))):
        proto = helper.make_node("Softmax", ["x"], ["y"], domain="outrider", axis=axis, nan_to_zero=1)
        expected = np.nan_to_num(exact(of, axis), nan=0.0)
        compare(plain_node(proto, 1, [of], ["float32"]), [of], [expected], rtol=1e-6)
        check("Softmax", [of], axis=axis, oracle=[exact(of, axis)], rtol=1e-6)


def test_masked_elements_are_zero() -> None:
    x = np.zeros((2, 5), np.float32)
    mask = np.array([0, -np.inf, 0, np.finfo(np.float32).min, -1e9], np.float32)
    proto = helper.make_node("Softmax", ["x", "m"], ["y"], domain="outrider")
    expected = np.tile(np.array([0.5, 0, 0.5, 0, 0], np.float32), (2, 1))
    compare(plain_node(proto, 1, [x, mask], ["float32"]), [x, mask], [expected], rtol=1e-7, atol=0)
