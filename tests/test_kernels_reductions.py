"""Reductions against onnxruntime, and against float64 where the dtype is narrow."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_harness import check

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
OPS = [
    "ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum", "ReduceLogSumExp",
]  # fmt: skip


def axes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reduce(op: str, keepdims: int) -> None:
    x = np.abs(X) + 0.1 if op == "ReduceLogSum" else X
    for given in (axes(0), axes(-1), axes(0, 2), axes(0, 1, 2)):
        check(op, [x, given], keepdims=keepdims, rtol=1e-5)
        check(op, [x.astype(np.float64), given], keepdims=keepdims, rtol=1e-12)
    check(op, [x], keepdims=keepdims, rtol=1e-5)
    check(op, [x, axes()], keepdims=keepdims, rtol=1e-5)
    check(op, [np.float32(0.5)], keepdims=keepdims, rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_no_axes_and_noop_reduces_nothing(op: str) -> None:
    x = np.abs(X) + 0.1
    exact = {"ReduceL2": np.abs, "ReduceL1": np.abs, "ReduceSumSquare": np.square, "ReduceLogSum": np.log}
    expected = exact.get(op, np.asarray)(x).astype(np.float32)
    check(op, [x, axes()], noop_with_empty_axes=1, oracle=[expected], rtol=1e-5)
    check(op, [x], noop_with_empty_axes=1, oracle=[expected], rtol=1e-5)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers(op: str, dtype: type) -> None:
    x = (X * 3).astype(dtype)
    exact = {"ReduceProd": np.prod, "ReduceMax": np.max, "ReduceMin": np.min}.get(op, np.sum)
    parts = {"ReduceSumSquare": np.square, "ReduceL1": np.abs}.get(op, np.asarray)(x)
    check(op, [x, axes(1)], oracle=[exact(parts, 1, keepdims=True).astype(dtype)])


def test_integer_sums_wrap_and_means_truncate() -> None:
    x = np.full((4,), 2**30, np.int32)
    check("ReduceSum", [x], keepdims=0, oracle=[np.array(0, np.int32)])
    check("ReduceMean", [np.array([-1, -2, 0, 0], np.int64)], keepdims=0, oracle=[np.array(0)])
    check("ReduceMean", [np.array([7, 8, 8, 8], np.int32)], keepdims=0, oracle=[np.array(7, np.int32)])


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_extremes(op: str) -> None:
    check(op, [np.array([[True, False], [True, True]]), axes(1)], opset=20, oracle="reference", keepdims=0)
    check(op, [np.array([[1, 200], [0, 7]], np.uint8), axes(0)])
    assert np.isnan(check(op, [np.array([1, np.nan], np.float32)], oracle=[np.array([np.nan], "f")])[0]).all()


@pytest.mark.parametrize(
    ("op", "value"),
    [
        ("ReduceSum", 0),
        ("ReduceProd", 1),
        ("ReduceMax", -np.inf),
        ("ReduceMin", np.inf),
        ("ReduceL2", 0),
        ("ReduceLogSumExp", -np.inf),
    ],
)
def test_of_nothing(op: str, value: float) -> None:
    check(op, [np.zeros((2, 0, 4), np.float32), axes(1)], oracle=[np.full((2, 1, 4), value, np.float32)])
    if op in ("ReduceMax", "ReduceMin"):
        info = np.iinfo(np.int32)
        extreme = info.min if op == "ReduceMax" else info.max
        check(op, [np.zeros((2, 0), np.int32), axes(1)], oracle=[np.full((2, 1), extreme, np.int32)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_are_rounded_once(dtype: type) -> None:
    x = np.full(5000, 1.0).astype(dtype)  # summed in float16 itself this would stop at 2048
    check("ReduceSum", [x], keepdims=0, oracle=[np.array(5000.0).astype(dtype)], rtol=0, atol=0)
    check("ReduceMean", [x], keepdims=0, oracle=[np.array(1.0).astype(dtype)], rtol=0, atol=0)
    check("ReduceMax", [X.astype(dtype), axes(1)], oracle=[X.astype(dtype).max(1, keepdims=True)])


def test_log_sum_exp_does_not_overflow() -> None:
    check("ReduceLogSumExp", [np.array([[1000, 1000], [-1000, -1000]], np.float32), axes(1)], rtol=1e-6)
    check("ReduceLogSumExp", [np.array([[-np.inf, -np.inf], [np.inf, 0]], np.float32), axes(1)])


def test_axes_as_attribute_before_opset_18() -> None:
    check("ReduceMean", [X], opset=13, axes=[1, -1], rtol=1e-5)
    check("ReduceSum", [X], opset=11, axes=[1], rtol=1e-5)


@pytest.mark.parametrize("bad", [(3,), (-4,), (1, 1), (0, -3)])
def test_bad_axes_are_named(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ai.onnx::ReduceSum node: "):
        check("ReduceSum", [X, axes(*bad)], oracle=[X])
