"""Gather, scatter, orders and running sums against onnxruntime and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RNG = np.random.default_rng(4)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    "index", [np.int64(1), np.array([[0, -1], [2, 2]]), np.array([1, -3], np.int32), np.zeros((2, 0), int)]
)
def test_gather(axis: int, index: np.ndarray) -> None:
    check("Gather", [X, index], axis=axis)
    check("Gather", [(X * 10).astype(np.int64), index], axis=axis)


@pytest.mark.parametrize("op", ["Gather", "GatherElements"])
@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_out_of_range_is_an_error(op: str, index: int) -> None:
    with pytest.raises(IndexError, match=f"{op} node: index {index} is out of range for a dimension of 3"):
        check(op, [X, np.full((1, 1, 1), index)], oracle=[X])


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_gather_and_scatter_elements(axis: int) -> None:
    n = X.shape[axis]
    indices = RNG.integers(-n, n, size=(2, 3, 4))
    check("GatherElements", [X, indices], axis=axis)
    unique = np.argsort(RNG.normal(size=X.shape), axis)
    check("ScatterElements", [X, unique, RNG.normal(size=X.shape).astype(np.float32)], axis=axis)
    check("Scatter", [X, unique, X * 2], opset=10, axis=axis)


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_scatter_with_reduction(reduction: str) -> None:
    indices = RNG.integers(-3, 3, size=(4, 4, 5))
    updates = RNG.normal(size=(4, 4, 5)).astype(np.float32)
    check("ScatterElements", [X, indices, updates], axis=0, reduction=reduction, rtol=1e-5)
    check("ScatterND", [X, np.array([[0], [2], [0]]), X * 2], axis=None, reduction=reduction, rtol=1e-5)
    whole = (X * 10).astype(np.int64)
    check("ScatterND", [whole, np.array([[0, 1], [0, 1]]), whole[:2, 0]], reduction=reduction)


def test_scatter_nd() -> None:
    check("ScatterND", [X, np.array([[0], [-1]]), X[:2] * 2])
    check("ScatterND", [X, np.array([[[0, 1, 2]], [[2, 3, 4]]]), np.array([[9], [8]], np.float32)])
    flags = np.array([True, False, True])
    got = check("ScatterND", [flags, np.array([[1]]), np.array([True])], oracle=[np.ones(3, bool)])
    assert flags.tolist() == [True, False, True]
    assert got[0].all()


def test_gather_nd() -> None:
    check("GatherND", [X, np.array([[0, 1], [-1, 3]])])
    check("GatherND", [X, np.array([[[0], [2]]])])
    check("GatherND", [X, np.array([[1], [0], [-1]])], batch_dims=1)
    check("GatherND", [X, RNG.integers(0, 5, size=(3, 4, 2, 1))], batch_dims=2)
    with pytest.raises(IndexError, match="index 4"):
        check("GatherND", [X, np.array([[0, 4]])], oracle=[X])


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [-2, 1, 3])
def test_tensor_scatter(mode: str, axis: int) -> None:
    past, update = np.zeros((2, 4, 4, 4), np.float32), RNG.normal(size=(2, 4, 4, 4)).astype(np.float32)
    update = np.take(update, [0, 1], axis)
    start = np.array([0, 2]) if mode == "linear" else np.array([1, 3])
    check("TensorScatter", [past, update, start], opset=24, oracle="reference", mode=mode, axis=axis)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_topk(largest: int, axis: int) -> None:
    check("TopK", [X, np.array([2])], outputs=2, largest=largest, axis=axis)
    ties = np.array([[3, 1, 3, 2, 3, 1], [0, 0, 0, 0, 0, 0]], np.int64)
    check("TopK", [ties, np.array([2 if axis == 0 else 4])], outputs=2, largest=largest, axis=axis)
    check("TopK", [X, np.array([0])], outputs=2, largest=largest, axis=axis)
    check(
        "TopK",
        [np.array([[0, 255], [7, 0]], np.uint8), np.array([2])],
        outputs=2,
        oracle=_small(largest, axis),
        largest=largest,
        axis=axis,
    )


def _small(largest: int, axis: int) -> list[np.ndarray]:
    x = np.array([[0, 255], [7, 0]], np.uint8)
    order = np.argsort(-x.astype(int) if largest else x, axis, kind="stable")
    return [np.take_along_axis(x, order, axis), order]


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_arg(op: str, last: int) -> None:
    ties = np.array([[1, 3, 3, 1], [2, 2, 2, 2]], np.float32)
    for keepdims in (0, 1):
        for axis in (0, 1, -1):
            check(op, [ties], axis=axis, keepdims=keepdims, select_last_index=last)
            check(op, [X], axis=axis, keepdims=keepdims, select_last_index=last)


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumsum(exclusive: int, reverse: int, axis: int) -> None:
    flags = {"exclusive": exclusive, "reverse": reverse}
    check("CumSum", [X, np.int64(axis)], rtol=1e-5, **flags)
    check("CumSum", [(X * 9).astype(np.int32), np.int32(axis)], **flags)
    check("CumProd", [X, np.int64(axis)], opset=26, oracle="reference", rtol=1e-5, **flags)


def test_cumsum_of_one_and_of_none() -> None:
    check("CumSum", [np.ones((1, 3), np.float32), np.int64(0)], exclusive=1)
    check("CumSum", [np.ones((2, 0), np.float32), np.int64(1)])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_any_gather(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = shape[axis]
    index = np.array(data.draw(st.lists(st.integers(-n, n - 1), max_size=5)), np.int64)
    x = np.arange(int(np.prod(shape))).reshape(shape)
    check("Gather", [x, index], oracle=[np.take(x, index, axis)], axis=axis)
