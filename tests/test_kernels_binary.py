"""Element-wise kernels of several tensors against onnxruntime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_harness import check

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RNG = np.random.default_rng(2)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)
SHAPES = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((3, 1), (2, 1, 4)), ((), (2, 3)), ((), ()), ((0, 3), (1, 3))]


def _make(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    if np.dtype(dtype) == bool:
        return np.asarray(RNG.normal(size=shape) > 0)
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(1, 50, size=shape).astype(dtype)
    return RNG.normal(size=shape).astype(dtype) + np.array(0, dtype)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int64])
def test_arithmetic(op: str, dtype: type) -> None:
    for a, b in SHAPES:
        check(op, [_make(a, dtype), _make(b, dtype)], rtol=1e-3 if dtype is np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint16, np.uint64])
def test_small_integers_wrap(dtype: type) -> None:
    info = np.iinfo(dtype)
    x, y = np.array([info.max, info.min, 7], dtype), np.array([1, 1, 9], dtype)
    check("Add", [x, y], oracle=[np.array([info.min, info.min + 1, 16], dtype)])
    check("Sub", [y, y], oracle=[np.zeros(3, dtype)])
    check("Sub", [np.array([info.min], dtype), np.array([1], dtype)], oracle=[np.array([info.max], dtype)])


def test_bfloat16() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    for op in ("Add", "Mul", "Div", "Max", "Min"):
        check(op, [x, x[::-1]], oracle="reference", rtol=1e-2)
    check("Less", [x, x[::-1]], oracle=[x.astype(np.float32) < x[::-1].astype(np.float32)])


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_integer_division_truncates(dtype: type) -> None:
    x = np.array([-7, 7, -7, 7, -8, 0, -128], dtype)
    y = np.array([2, 2, -2, -2, 3, 5, 7], dtype)
    check("Div", [x, y], oracle=[np.trunc(x / y).astype(dtype)])


def test_division_by_zero_of_floats() -> None:
    check("Div", [np.array([1, -1, 0], np.float32), np.zeros(3, np.float32)])


@pytest.mark.parametrize("op", ["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
def test_comparison(op: str, dtype: type) -> None:
    x = np.array([[1, 2, 3], [4, 5, 6]], dtype)
    check(op, [x, np.array([1, 5, 3], dtype)])
    check(op, [np.array([np.nan, 1], np.float32), np.array([np.nan, 1], np.float32)])


def test_equal_of_other_types() -> None:
    check("Equal", [np.array([True, False]), np.array([True])])
    strings = np.array([["a", "b"], ["c", "a"]], object)
    check("Equal", [strings, np.array("a", object)], oracle=[np.array([[True, False], [False, True]])], bound=False)


@pytest.mark.parametrize("op", ["And", "Or", "Xor"])
def test_logic(op: str) -> None:
    for a, b in SHAPES:
        check(op, [_make(a, bool), _make(b, bool)])


@pytest.mark.parametrize("op", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_bits(op: str, dtype: type) -> None:
    check(op, [_make((3, 4), dtype), _make((4,), dtype)])


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shift(direction: str) -> None:
    x = np.array([1, 255, 16, 4], np.uint8)
    check("BitShift", [x, np.array([1, 3, 4, 2], np.uint8)], direction=direction)
    signed, amounts = np.array([-5, 5, -1, 7, -128], np.int8), np.array([1, 9, -1, 7, 3], np.int8)
    check("BitShift", [signed, amounts], opset=28, oracle="reference", direction=direction)


@pytest.mark.parametrize("base", [np.float32, np.float64, np.int32, np.int64])
def test_pow(base: type) -> None:
    x = np.array([[1, 2, 3], [4, 5, 6]], base)
    for exponent in (np.float32, np.float64, np.int32, np.int64):
        check("Pow", [x, np.array([0, 2, 3], exponent)])
        for one in (1, 2, 3, 0, 7):
            check("Pow", [x, np.array(one, exponent)])
        check("Pow", [np.array(3, base), np.array([[0, 1, 2]], exponent)])


def test_pow_of_special_values() -> None:
    x = np.array([-np.inf, np.inf, 0.0, -0.0, np.nan, -2.0, 2.0], np.float32)
    for one in (2.0, 0.5, -1.0, 0.0, 3.0):
        check("Pow", [x, np.float32(one)])
    check("Pow", [np.array([2, 3], np.int32), np.float32(0.5)])
    check("Pow", [np.array([2.0, -3.0], np.float16), np.float16(2)], oracle=[np.array([4, 9], np.float16)])


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_mod(dtype: type) -> None:
    x = np.array([-7, 7, -7, 7, 5], np.int64).astype(dtype)
    y = np.array([3, -3, -3, 3, 5], np.int64).astype(dtype)
    check("Mod", [x, y])
    check("Mod", [x, y], fmod=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fmod_of_floats(dtype: type) -> None:
    check("Mod", [np.array([-4.3, 7.2, 5.0, 3], dtype), np.array([2.1, -3.4, 8.0, np.inf], dtype)], fmod=1)


@pytest.mark.parametrize("op", ["Max", "Min", "Sum", "Mean"])
def test_variadic(op: str) -> None:
    check(op, [X])
    check(op, [X, X[::-1]])
    check(op, [X, X[0], -X, np.float32(0.1)])
    check(op, [np.float32(0.1), X[0], X])  # grows from input to input
    if op in ("Max", "Min"):
        check(op, [np.array([np.nan, 1, 2], np.float32), np.array([0, np.nan, 3], np.float32)])
        check(op, [np.array([1, -5]), np.array([[3], [-9]])])


def test_where() -> None:
    check("Where", [X > 0, X, -X])
    check("Where", [np.array([[True], [False]]), np.float32(1), np.arange(3, dtype=np.float32)])
    check("Where", [np.array([True, False]), np.array([1, 2]), np.array([3, 4])])
    words = np.array(["a", "b"], object)
    expected = np.array(["a", "z"], object)
    check("Where", [np.array([True, False]), words, np.array("z", object)], oracle=[expected], bound=False)


def test_shapes_that_do_not_broadcast_are_named() -> None:
    with pytest.raises(ValueError, match=r"Add node: shapes .*\(2, 3, 4\).*\(5,\)"):
        check("Add", [X, np.zeros(5, np.float32)], oracle=[X])


_pairs = hnp.mutually_broadcastable_shapes(num_shapes=3, min_dims=0, max_dims=4, max_side=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_pairs, st.sampled_from(["Add", "Mul", "Max", "Where", "Mean"]))
def test_any_broadcast(pair: hnp.BroadcastableShapes, op: str) -> None:
    a, b, c = (_make(shape, np.float32) for shape in pair.input_shapes)
    exact = {
        "Add": lambda: a + b,
        "Mul": lambda: a * b,
        "Max": lambda: np.maximum(np.maximum(a, b), c),
        "Mean": lambda: ((a.astype(np.float64) + b + c) / 3).astype(np.float32),
        "Where": lambda: np.where(a > 0, b, c),
    }[op]()
    inputs = {"Add": [a, b], "Mul": [a, b], "Where": [np.asarray(a > 0), b, c]}.get(op, [a, b, c])
    check(op, inputs, oracle=[np.asarray(exact)])
