"""Views, shapes, padding and selection against onnxruntime and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check, plain_node, run_node
from onnx import TensorProto, helper, numpy_helper

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

X = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4) / 7


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_shape_and_size() -> None:
    check("Shape", [X])
    check("Shape", [X], start=1)
    check("Shape", [X], start=-2, end=-1)
    check("Shape", [X], start=-9, end=9)
    check("Size", [X])
    check("Size", [np.float32(1)])
    check("Size", [np.zeros((0, 3), np.float32)])


@pytest.mark.parametrize("shape", [(24,), (4, 6), (-1, 2), (0, -1), (2, 3, 2, 2), (0, 0, 4, 1), (1, 24)])
def test_reshape(shape: tuple[int, ...]) -> None:
    check("Reshape", [X, i64(*shape)])


def test_reshape_of_nothing_and_to_a_scalar() -> None:
    check("Reshape", [np.zeros((0, 3), np.float32), i64(3, 0)], allowzero=1)
    check("Reshape", [np.ones((1, 1), np.float32), np.zeros(0, np.int64)])
    check("Reshape", [np.zeros((0, 2, 3), np.float32), i64(0, -1)], oracle=[np.zeros((0, 0), np.float32)])
    with pytest.raises(ValueError, match="does not fit"):
        check("Reshape", [X, i64(5, -1)], oracle=[X])


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -2])
def test_flatten(axis: int) -> None:
    check("Flatten", [X], axis=axis)


def test_squeeze_and_unsqueeze() -> None:
    x = X.reshape(1, 2, 3, 1, 4)
    check("Squeeze", [x, i64(0)])
    check("Squeeze", [x, i64(-2, 0)])
    check("Squeeze", [x])
    check("Squeeze", [np.ones((1, 1), np.float32)])
    check("Unsqueeze", [X, i64(0)])
    check("Unsqueeze", [X, i64(-1, 1, 0)])
    check("Unsqueeze", [np.float32(3), i64(0, 1)])
    check("Squeeze", [x], opset=11, axes=[0])
    check("Unsqueeze", [X], opset=11, axes=[1])
    with pytest.raises(ValueError, match="is not 1"):
        check("Squeeze", [X, i64(1)], oracle=[X])


def test_transpose() -> None:
    check("Transpose", [X])
    check("Transpose", [X], perm=[1, 0, 2])
    check("Transpose", [np.float32(1)])


def test_expand() -> None:
    check("Expand", [X, i64(2, 1, 3, 1)])
    check("Expand", [X[:, :1], i64(3, 1)])
    check("Expand", [np.float32(2), i64(2, 0)])


SLICES: list[tuple[Any, ...]] = [
    ((0, 1), (2, 3), None, None),
    ((1,), (1000,), (2,), None),
    ((-1,), (-1000,), (1,), (-1,)),
    ((10,), (0,), (2,), (-2,)),
    ((0, 0), (-1, 1), (-1, 0), (2, 1)),
    ((3,), (1,), (2,), (1,)),
    ((2**63 - 1,), (-(2**63),), (0,), (-1,)),
]


@pytest.mark.parametrize(("starts", "ends", "axes", "steps"), SLICES)
def test_slice(starts: Any, ends: Any, axes: Any, steps: Any) -> None:
    given_ = [X, i64(*starts), i64(*ends)]
    if axes is not None:
        given_.append(i64(*axes))
    if steps is not None:
        given_.append(i64(*steps))
    check("Slice", given_)


def test_slice_of_opset_9() -> None:
    check("Slice", [X], opset=9, starts=[0, 1], ends=[1, -1], axes=[0, 2])


def test_split() -> None:
    check("Split", [X, i64(1, 3)], outputs=2, axis=2)
    check("Split", [X], outputs=3, axis=1, num_outputs=3)
    check("Split", [X], outputs=3, axis=-1, num_outputs=3)  # 2, 2, 0 of 4: the last is smaller
    check("Split", [X, i64(0, 4)], outputs=["", "y"], oracle=[X], axis=2)
    with pytest.raises(ValueError, match="do not sum"):
        check("Split", [X, i64(1, 1)], oracle=[X, X], outputs=2, axis=2)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.uint8])
def test_concat(dtype: type) -> None:
    x = X.astype(dtype)
    for axis in (0, 1, -1):
        check("Concat", [x, x], axis=axis)
    check("Concat", [x, x[:, :1], x[:, :0]], axis=1)
    check("Concat", [x], axis=1)


def test_concat_of_strings_and_of_misfits() -> None:
    words = np.array(["a", "b"], object)
    check("Concat", [words, words], oracle=[np.array(["a", "b", "a", "b"], object)], axis=0)
    with pytest.raises(ValueError, match="differ beside axis 0"):
        check("Concat", [X, X[:, :2]], oracle=[X], axis=0)


def test_tile() -> None:
    check("Tile", [X, i64(1, 2, 3)])
    check("Tile", [X, i64(2, 0, 1)])
    check("Tile", [np.arange(3), i64(4)])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize(
    "pads", [(0, 0, 1, 0, 0, 2), (1, 2, 3, 1, 1, 2), (0, -1, 1, 0, -1, 1), (0, 0, -2, 0, 0, 0), (0, 0, 0, 0, 0, 0)]
)
def test_pad(mode: str, pads: tuple[int, ...]) -> None:
    if mode == "reflect" and pads[0]:
        pads = (1, 2, 3, 1, 1, 2)  # at most the dimension less one
    if mode != "constant" and min(pads) < 0:
        crop = X[tuple(slice(max(-b, 0), d - max(-a, 0)) for b, a, d in zip(pads[:3], pads[3:], X.shape, strict=True))]
        pairs = [(max(b, 0), max(a, 0)) for b, a in zip(pads[:3], pads[3:], strict=True)]
        check("Pad", [X, i64(*pads)], oracle=[np.pad(crop, pairs, mode)], mode=mode)  # type: ignore[call-overload]
        return
    check("Pad", [X, i64(*pads)], mode=mode)


def test_pad_values_axes_and_dtypes() -> None:
    check("Pad", [X, i64(1, 0, 0, 0, 2, 0), np.float32(-3)], consts=(1,))
    check("Pad", [X, i64(1, 2), np.float32(5), i64(-1)], consts=(1, 3))
    check("Pad", [np.arange(6).reshape(2, 3), i64(1, 1, 1, 1), np.int64(9)])
    check("Pad", [np.ones((2, 2), bool), i64(0, 1, 0, 1)])
    check("Pad", [np.zeros((0, 2), np.float32), i64(1, 1, 1, 1), np.float32(4)])
    check("Pad", [X], opset=10, pads=[0, 0, 1, 0, 0, 1], value=2.0)


def test_constants() -> None:
    value = numpy_helper.from_array(np.array([7], np.int32))
    check("ConstantOfShape", [i64(2, 3)], consts=(0,), value=value)
    check("ConstantOfShape", [i64(2, 0)], consts=(0,))
    check("ConstantOfShape", [np.zeros(0, np.int64)], consts=(0,))
    check("ConstantOfShape", [i64(300, 300)], consts=(0,))  # too large to keep: made in the run
    check("Constant", [], value=numpy_helper.from_array(X))
    check("Constant", [], value_floats=[1.0, 2.0])
    check("Constant", [], value_int=3)
    check("Constant", [], value_string="word")


@pytest.mark.parametrize(
    "numbers", [(0, 10, 3), (10, 0, -3), (0, 0, 1), (5, 1, 1), (-4, 4, 2)], ids=lambda n: "_".join(map(str, n))
)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.float64])
def test_range(numbers: tuple[int, ...], dtype: type) -> None:
    check("Range", [np.array(n, dtype) for n in numbers], consts=(0, 1, 2))


def test_range_of_fractions() -> None:
    check("Range", [np.array(n, np.float32) for n in (0.5, 4.1, 0.7)], consts=(0, 1, 2))


def test_eye_like() -> None:
    check("EyeLike", [np.zeros((3, 4), np.float32)])
    check("EyeLike", [np.zeros((3, 4), np.int32)], k=-1, dtype=TensorProto.DOUBLE)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_and_space(mode: str) -> None:
    x = np.arange(2 * 8 * 3 * 2, dtype=np.float32).reshape(2, 8, 3, 2)
    check("DepthToSpace", [x], blocksize=2, mode=mode)
    check("SpaceToDepth", [x.reshape(2, 2, 4, 6)], blocksize=2)


@pytest.mark.parametrize("shape", [(2, 3), (5, 1), (4, 4), (3, 9)])
def test_center_crop_pad(shape: tuple[int, int]) -> None:
    check("CenterCropPad", [X, i64(*shape)], oracle="reference", axes=[-1, 1])


@pytest.mark.parametrize("upper", [0, 1])
def test_trilu(upper: int) -> None:
    check("Trilu", [X], upper=upper)
    for k in (-1, 2, 10):
        check("Trilu", [X, np.int64(k)], upper=upper)


def test_one_hot() -> None:
    indices = i64(1, -1, 9, 0)
    for axis in (0, -1):
        check("OneHot", [indices, np.int64(4), np.array([0.5, 2], np.float32)], consts=(1,), axis=axis)
    expected = np.array([[[5, 5], [1, 5], [5, 1]]], np.int64)
    check(
        "OneHot",
        [np.array([[1, 2]], np.int32), np.array([3], np.int32), i64(5, 1)],
        consts=(1,),
        oracle=[expected],
        axis=1,
    )


def test_reverse_sequence() -> None:
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    check("ReverseSequence", [x, i64(4, 3, 2, 1)], time_axis=0, batch_axis=1)
    check("ReverseSequence", [x, i64(1, 2, 3, 4)], time_axis=1, batch_axis=0)
    proto = helper.make_node("ReverseSequence", ["x", "lengths"], ["y"])
    short = [x, i64(1, 2, 3)]
    with pytest.raises(ValueError, match="shape .3. for 4 rows"):
        run_node(plain_node(proto, 21, short, ["float32"]), short)


def test_data_dependent_sizes() -> None:
    x = np.array([[1, 0, 3], [0, 0, 6]], np.float32)
    check("NonZero", [x], bound=False)
    check("NonZero", [x > 1], bound=False)
    check("NonZero", [np.zeros((0, 2), np.float32)], bound=False)
    check("Compress", [x, np.array([False, True])], axis=0, bound=False)
    check("Compress", [x, np.array([True, False, True])], axis=-1, bound=False)
    check("Compress", [x, np.array([True, False, False, True])], bound=False)


@pytest.mark.parametrize("in_order", [0, 1])
def test_unique(in_order: int) -> None:
    x = np.array([2, 1, 1, 3, 4, 3], np.float32)
    check("Unique", [x], outputs=4, bound=False, sorted=in_order)
    rows = np.array([[1, 0, 0], [1, 0, 0], [0, 3, 4]], np.float32)
    check("Unique", [rows], outputs=4, bound=False, axis=0, sorted=in_order)
    check("Unique", [rows], outputs=["y", "", "i", ""], bound=False, axis=1, sorted=in_order)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_slice(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    start, end = data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8))
    step = data.draw(st.sampled_from([1, 2, 3, -1, -2]))
    x = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    check("Slice", [x, i64(start), i64(end), i64(axis), i64(step)])
