"""How many multiplications and additions an op takes, where that is what its time goes by. For traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.providers.wire.graph import Node

# Operators -> positions of their weights, whose elements are each used once per element of the spatial output.
_CONVOLUTIONS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
# Operators -> positions of the two factors.
_PRODUCTS = {
    "MatMul": (0, 1), "Gemm": (0, 1), "FusedMatMul": (0, 1), "MatMulInteger": (0, 1), "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1), "QLinearMatMul": (0, 3), "QGemm": (0, 3),
}  # fmt: skip
_RECURRENT = ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM")


def operations(step: Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Twice the products of a convolution, matrix product or recurrent layer for these arrays; 0 for all others."""
    kind = step.op_type
    if kind in _CONVOLUTIONS:
        y, w = _array(outputs, 0), _array(inputs, _CONVOLUTIONS[kind])
        return 0 if y is None or w is None or not w.size else 2 * y.size * (w.size // w.shape[0])
    if kind == "ConvTranspose":
        x, w = _array(inputs, 0), _array(inputs, 1)
        return 0 if x is None or w is None or not w.size else 2 * x.size * (w.size // w.shape[0])
    if kind in _PRODUCTS:
        y, a = _array(outputs, 0), _array(inputs, _PRODUCTS[kind][0])
        return 0 if y is None or a is None or not a.ndim else 2 * y.size * _inner(step, a)
    if kind in _RECURRENT:
        x, w, r = _array(inputs, 0), _array(inputs, 1), _array(inputs, 2)
        return 0 if x is None or w is None or r is None else 2 * math.prod(x.shape[:2]) * (w.size + r.size)
    return 0


def _array(values: Sequence[Any], i: int) -> np.ndarray | None:
    value = values[i] if i < len(values) else None
    return value if isinstance(value, np.ndarray) else None


def _inner(step: Node, a: np.ndarray) -> int:
    """The extent that is summed over."""
    transposed = step.attributes.get("transA", 0)
    return int(a.shape[-2] if transposed and a.ndim > 1 else a.shape[-1])
