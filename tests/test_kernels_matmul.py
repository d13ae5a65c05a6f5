"""Matrix products against onnxruntime, numpy integers, and float64 for 16-bit floats."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(10)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 3)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check("MatMul", [floats(*left), floats(*right)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_matmul_of_integers_wraps(dtype: type) -> None:
    a, b = (RNG.integers(0, np.iinfo(dtype).max, shape, dtype=dtype) for shape in ((3, 4), (4, 5)))
    wrapped = np.array([[sum(int(p) * int(q) for p, q in zip(r, c, strict=True)) for c in b.T] for r in a], object)
    bits = 8 * np.dtype(dtype).itemsize
    low = wrapped % 2**bits
    if np.dtype(dtype).kind == "i":
        low = np.where(low >= 2 ** (bits - 1), low - 2**bits, low)
    check("MatMul", [a, b], oracle=[low.astype(dtype)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matmul_of_halves_rounds_once(dtype: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    a, b = floats(5, 70).astype(kind), floats(70, 6).astype(kind)
    expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(kind)
    check("MatMul", [a, b], oracle=[expected], rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize(("left", "right"), [((3, 0), (0, 5)), ((0, 4), (4, 5)), ((2, 3, 0), (0, 5))])
def test_matmul_of_nothing(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check("MatMul", [floats(*left), floats(*right)], oracle=[np.zeros(left[:-1] + right[-1:], np.float32)])


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_gemm(left: int, right: int) -> None:
    a, b = floats(*((4, 3) if left else (3, 4))), floats(*((5, 4) if right else (4, 5)))
    addends = [None, *(np.asarray(floats(*shape)) for shape in [(), (5,), (1, 5), (3, 1), (3, 5)])]
    for c in addends:
        inputs = [a, b] if c is None else [a, b, c]
        check("Gemm", inputs, transA=left, transB=right, alpha=0.5, beta=2.0, rtol=1e-5, atol=1e-5)
        check("Gemm", inputs, transA=left, transB=right, rtol=1e-5, atol=1e-5)


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("ij,jk", (3, 4), (4, 5)),
    ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
    ("...ij, ...jk", (2, 3, 4), (1, 4, 5)),
    ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("i,j->ij", (3,), (4,)),
    ("ij,ij->", (3, 4), (3, 4)),
]


@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_einsum_of_two(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check("Einsum", [floats(*left), floats(*right)], equation=equation, rtol=1e-5, atol=1e-5)


def test_einsum_of_one_and_three() -> None:
    check("Einsum", [floats(4, 4)], equation="ii->i")
    check("Einsum", [floats(3, 4)], equation="ij->ji")
    check("Einsum", [floats(3, 4)], equation="ij->")
    inputs = [floats(3, 4), floats(4, 5), floats(5, 2)]
    check("Einsum", inputs, equation="ij,jk,kl->il", rtol=1e-5, atol=1e-5)
    check("Einsum", [RNG.integers(0, 9, (3, 4)), RNG.integers(0, 9, (4, 2))], equation="ij,jk->ik")


def test_shapes_without_a_product_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] and \[5, 6\]"):
        check("MatMul", [floats(3, 4), floats(5, 6)], oracle=[floats(1)])
