"""Convolutions and products with an epilogue: com.microsoft's against onnxruntime, our own against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_harness import check

from outrider.providers.cpu.kernels.epilogue import ACTIVATIONS
from outrider.providers.cpu.kernels.frame import Unsupported

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(12)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# By the definitions of ONNX, in float64; Silu is x sigmoid(alpha x).
DEFINED: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {
    "": lambda x, alpha, beta: x,
    "Relu": lambda x, alpha, beta: np.maximum(x, 0),
    "Clip": lambda x, alpha, beta: np.clip(x, alpha, beta),
    "LeakyRelu": lambda x, alpha, beta: np.where(x < 0, alpha * x, x),
    "HardSigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    "HardSwish": lambda x, alpha, beta: x * np.clip(x / 6 + 0.5, 0, 1),
    "Sigmoid": lambda x, alpha, beta: _sigmoid(x),
    "Tanh": lambda x, alpha, beta: np.tanh(x),
    "Gelu": lambda x, alpha, beta: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "GeluTanh": lambda x, alpha, beta: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "Silu": lambda x, alpha, beta: x * _sigmoid(alpha * x),
    "Elu": lambda x, alpha, beta: np.where(x < 0, alpha * np.expm1(x), x),
}
PARAMETERS = {
    "Clip": (-0.5, 0.75), "LeakyRelu": (0.2, 0.0), "HardSigmoid": (0.3, 0.4), "Silu": (1.7, 0.0), "Elu": (0.6, 0.0),
}  # fmt: skip


def _expected(
    product: np.ndarray, inputs: list[np.ndarray | None], attributes: dict[str, Any], column: tuple[int, ...]
) -> np.ndarray:
    bias, residual, scale, shift = (None if x is None else x.astype(np.float64) for x in inputs)
    y = product * attributes.get("factor", 1.0)
    if bias is not None:
        y = y + bias.reshape(column)
    if residual is not None and attributes["residual"] == "before":
        y = y + residual
    name = attributes.get("activation", "")
    y = DEFINED[name](y, *(attributes.get(key, default) for key, default in zip(
        ("alpha", "beta"), ACTIVATIONS[name], strict=True)))  # fmt: skip
    if scale is not None:
        y = y * scale.reshape(column)
    if shift is not None:
        y = y + shift.reshape(column)
    if residual is not None and attributes["residual"] == "after":
        y = y + residual
    return y


def _attributes(activation: str) -> dict[str, Any]:
    given = {"activation": activation}
    if activation in PARAMETERS:
        given["alpha"], given["beta"] = PARAMETERS[activation]
    return given


@pytest.mark.parametrize("residual", ["", "before", "after"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_own_conv(activation: str, residual: str) -> None:
    x, w = floats(2, 5, 6, 7), floats(9, 5, 1, 1)
    operands = [floats(9), floats(2, 9, 6, 7) if residual else None, floats(9), floats(1)]
    product = np.einsum("nchw,mc->nmhw", x.astype(np.float64), w[:, :, 0, 0].astype(np.float64))
    attributes = {**_attributes(activation), "residual": residual}
    expected = _expected(product, operands, attributes, (-1, 1, 1)).astype(np.float32)
    check("Conv", [x, w, *operands], domain="outrider", oracle=[expected], rtol=2e-5, atol=2e-5, **attributes)


@pytest.mark.parametrize("residual", ["", "before", "after"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_own_matmul(activation: str, residual: str) -> None:
    a, b = floats(2, 7, 5), floats(2, 10, 7)
    operands = [floats(10), floats(10) if residual else None, floats(1), floats(10)]
    product = np.einsum("nki,njk->nij", a.astype(np.float64), b.astype(np.float64))
    attributes = {**_attributes(activation), "residual": residual, "factor": 0.5, "transA": 1, "transB": 1}
    expected = _expected(product, operands, attributes, (-1,)).astype(np.float32)
    check("MatMul", [a, b, *operands], domain="outrider", oracle=[expected], rtol=2e-5, atol=2e-5, **attributes)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("", []), ("Relu", []), ("Tanh", []), ("Sigmoid", []), ("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.75]),
     ("HardSigmoid", [0.3, 0.4])],
)  # fmt: skip
def test_microsoft_fused_conv(activation: str, parameters: list[float]) -> None:
    attributes: dict[str, Any] = {"pads": [1, 0, 1, 2]}
    if activation:
        attributes["activation"] = activation
    if parameters:
        attributes["activation_params"] = parameters
    inputs = [floats(1, 4, 6, 7), floats(9, 4, 3, 3), floats(9)]
    check("FusedConv", inputs, domain="com.microsoft", rtol=2e-5, atol=2e-5, **attributes)
    inputs.append(floats(1, 9, 6, 7))
    check("FusedConv", inputs, domain="com.microsoft", rtol=2e-5, atol=2e-5, **attributes)


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_microsoft_fused_matmul(left: int, right: int) -> None:
    a, b = floats(*((2, 4, 3) if left else (2, 3, 4))), floats(*((2, 5, 4) if right else (2, 4, 5)))
    check("FusedMatMul", [a, b], domain="com.microsoft", transA=left, transB=right, alpha=0.3, rtol=1e-5, atol=1e-5)


def test_microsoft_fused_matmul_of_moved_batches() -> None:
    a, b = floats(3, 2, 4), floats(2, 4, 5)
    check("FusedMatMul", [a, b], domain="com.microsoft", transBatchA=1, rtol=1e-5, atol=1e-5)
    a, b = floats(4, 2, 3), floats(5, 2, 4)
    attributes = {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1}
    check("FusedMatMul", [a, b], domain="com.microsoft", rtol=1e-5, atol=1e-5, **attributes)


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Tanh", "Sigmoid"])
def test_microsoft_fused_gemm(activation: str) -> None:
    attributes = {"activation": activation, "alpha": 0.5, "beta": 2.0, "transB": 1}
    if activation == "LeakyRelu":
        attributes["activation_alpha"] = 0.2
    inputs = [floats(3, 4), floats(5, 4), floats(5)]
    check("FusedGemm", inputs, domain="com.microsoft", rtol=1e-5, atol=1e-5, **attributes)


def test_what_there_is_not_is_refused() -> None:
    inputs = [floats(1, 1, 3, 3), floats(1, 1, 3, 3)]
    for attributes in ({"activation": "Selu"}, {"residual": "between"}):
        with pytest.raises(Unsupported, match=next(iter(attributes.values()))):
            check("Conv", inputs, domain="outrider", oracle=[floats(1)], **attributes)
