"""How an input lies in memory must not show in the last bits: what is a view in one placement is a copy in another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_harness import plain_node, run_node
from onnx import helper

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RNG = np.random.default_rng(6)


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


X = f32(2, 24, 33, 17)
P = np.abs(X) + np.float32(0.1)
PLAIN = (
    "Exp Tanh Sin Cos Erf Sigmoid Softplus Gelu Mish Elu Selu Celu Sinh Cosh Asinh Atan Softsign HardSwish Softmax "
    "LogSoftmax GlobalAveragePool GlobalMaxPool GlobalLpPool MeanVarianceNormalization LpNormalization"
)
CASES: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    *((op, [X], {}) for op in PLAIN.split()),
    *((op, [P], {}) for op in ("Log", "Sqrt", "Reciprocal", "ReduceMean", "ReduceLogSumExp", "ReduceL2", "ReduceSum")),
    ("Pow", [P, np.array(1.7, np.float32)], {}),
    ("Pow", [P, np.array(-0.5, np.float32)], {}),
    ("CumSum", [X, np.array(1)], {}),
    ("Mean", [X, X[::-1], X * 2], {}),
    ("MatMul", [f32(2, 3, 40, 70), f32(2, 3, 70, 50)], {}),
    ("MatMul", [f32(4, 40, 70), f32(70, 50)], {}),
    ("MatMul", [f32(40, 70), f32(3, 70, 50)], {}),
    *(
        ("MatMul", [f32(m, k), f32(k, n)], {})
        for m, k, n in ((40, 70, 50), (1, 300, 7), (7, 300, 1), (3, 5, 2), (130, 513, 65))
    ),
    ("MatMul", [f32(70), f32(70, 50)], {}),
    ("MatMul", [f32(40, 70), f32(70)], {}),
    ("Gemm", [f32(40, 70), f32(70, 50)], {}),
    ("Gemm", [f32(70, 40), f32(50, 70)], {"transA": 1, "transB": 1}),
    ("Einsum", [f32(20, 30), f32(30, 40)], {"equation": "ij,jk->ik"}),
    ("LayerNormalization", [X, f32(17)], {}),
    ("LayerNormalization", [X, f32(33, 17)], {"axis": 2}),
    ("RMSNormalization", [X, f32(17)], {}),
    ("InstanceNormalization", [X, f32(24), f32(24)], {}),
    ("GroupNormalization", [X, f32(24), f32(24)], {"num_groups": 4}),
    ("BatchNormalization", [X, f32(24), f32(24), f32(24), np.abs(f32(24))], {}),
    ("LRN", [X], {"size": 3}),
    ("Conv", [X, f32(8, 24, 3, 3)], {}),
    ("Conv", [X, f32(8, 24, 1, 1)], {}),
    ("Conv", [X, f32(24, 1, 3, 3)], {"group": 24}),
    ("ConvTranspose", [X, f32(24, 8, 2, 2)], {"strides": [2, 2]}),
    ("AveragePool", [X], {"kernel_shape": [3, 3]}),
    ("Resize", [X, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    ("LSTM", [f32(5, 2, 16), f32(1, 32, 16), f32(1, 32, 8)], {"hidden_size": 8}),
    ("GRU", [f32(5, 2, 16), f32(1, 24, 16), f32(1, 24, 8)], {"hidden_size": 8}),
]


def laid_out(x: np.ndarray) -> Iterator[np.ndarray]:
    """The same elements with other strides: Fortran order, the last two axes swapped, channels last, every second."""
    for order in {(*range(x.ndim)[::-1],), (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2), (0, *range(2, x.ndim), 1)}:
        yield np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    yield wide[..., ::2]


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=[f"{op}-{i}" for i, (op, _, _) in enumerate(CASES)])
def test_strides_do_not_show(op: str, inputs: list[np.ndarray | None], attributes: dict[str, Any]) -> None:
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    node = plain_node(helper.make_node(op, names, ["y"], **attributes), 23, inputs, ["float32"])
    (expected,) = run_node(node, inputs)
    for i, x in enumerate(inputs):
        if x is None or x.ndim < 2:
            continue
        for other in laid_out(x):
            (got,) = run_node(node, [*inputs[:i], other, *inputs[i + 1 :]])
            np.testing.assert_array_equal(got, expected, err_msg=f"{op} input {i}, strides {other.strides}")
