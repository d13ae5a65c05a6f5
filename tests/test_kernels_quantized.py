"""Integer products against int64 sums and onnxruntime: equal to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(12)
KINDS = [("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8"), ("int8", "uint8")]


def values(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def extreme(dtype: str, *shape: int) -> np.ndarray:
    """The operand whose partial sums are largest."""
    return np.full(shape, np.iinfo(dtype).min if dtype == "int8" else 255, dtype)


@pytest.mark.parametrize(("left", "right"), KINDS)
@pytest.mark.parametrize("depth", [7, 258, 259, 515, 1025, 3000])
def test_matmul_integer_is_exact_at_any_depth(left: str, right: str, depth: int) -> None:
    for a, b in (
        (values(left, 3, depth), values(right, depth, 4)),
        (extreme(left, 3, depth), extreme(right, depth, 4)),
    ):
        b[0] = np.iinfo(right).max if right == "int8" else 1  # an odd product shows a lost bit
        expected = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
        check("MatMulInteger", [a, b], oracle=[expected])
        za, zb = values(left), values(right)
        expected = ((a.astype(np.int64) - za) @ (b.astype(np.int64) - zb)).astype(np.int32)
        check("MatMulInteger", [a, b, za, zb], oracle=[expected])


def test_matmul_integer_with_zero_points_by_row_and_column() -> None:
    a, b, za, zb = values("uint8", 2, 3, 8), values("int8", 8, 4), values("uint8", 3), values("int8", 4)
    expected = (a.astype(np.int64) - za[:, None].astype(np.int64)) @ (b.astype(np.int64) - zb)
    check("MatMulInteger", [a, b, za, zb], oracle=[expected.astype(np.int32)])
    expected = (a.astype(np.int64) - za[0].astype(np.int64)) @ (b.astype(np.int64) - zb)
    check("MatMulInteger", [a, b, za[:1].reshape(()), zb], oracle=[expected.astype(np.int32)])


def scale(*shape: int, least: float = 0.01) -> np.ndarray:
    return np.asarray(RNG.uniform(least, least + 0.1, shape), np.float32)


def weights(dtype: str, *shape: int) -> np.ndarray:
    """Half the range: without VNNI, onnxruntime's uint8 * int8 saturates sums of two products at 16 bits."""
    return np.asarray(values(dtype, *shape) // np.array(2, dtype))


@pytest.mark.parametrize(("left", "right"), KINDS[:3])
@pytest.mark.parametrize("by_column", [False, True])
def test_qlinear_matmul(left: str, right: str, by_column: bool) -> None:
    shape = (5,) if by_column else ()
    inputs = [values(left, 2, 4, 9), scale(), values(left), weights(right, 9, 5), scale(*shape), weights(right, *shape)]
    check("QLinearMatMul", [*inputs, scale(least=0.5), values(left)])


CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 3, 8, 8), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 4, 7, 8), (4, 1, 3, 3), {"group": 4, "strides": [2, 1]}),
    ((1, 4, 7, 8), (6, 2, 2, 3), {"group": 2, "dilations": [2, 1]}),
    ((1, 64, 6, 6), (4, 64, 3, 3), {}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), CONVS)
def test_conv_integer(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check("ConvInteger", [values("uint8", *x), values("uint8", *w), values("uint8"), values("uint8")], **attributes)
    check("ConvInteger", [values("uint8", *x), values("uint8", *w)], **attributes)


@pytest.mark.parametrize(("x", "w", "attributes"), CONVS)
@pytest.mark.parametrize("dtypes", [("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")])
def test_qlinear_conv(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], dtypes: tuple[str, str]
) -> None:
    left, right = dtypes
    bias = RNG.integers(-9999, 9999, w[0]).astype(np.int32)
    per_channel = right == "int8"
    ws = scale(w[0]) if per_channel else scale()
    wz = np.zeros(w[0], right) if per_channel else values(right)
    inputs = [values(left, *x), scale(), values(left), weights(right, *w), ws, wz, scale(least=1.0), values(left)]
    check("QLinearConv", inputs, **attributes)
    check("QLinearConv", [*inputs, bias], **attributes)
