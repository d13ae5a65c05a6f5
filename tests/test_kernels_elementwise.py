"""Element-wise kernels of one tensor against onnxruntime and exact functions."""

from __future__ import annotations

import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from kernel_harness import check

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RNG = np.random.default_rng(1)
X = (RNG.normal(size=(3, 4, 5)) * 2).astype(np.float32)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -0.5, 88.0, -104.0], np.float32)
UNARY = [
    "Abs", "Neg", "Sign", "Exp", "Log", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sin", "Cos", "Tan", "Asin",
    "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh", "Erf", "Identity", "IsNaN", "IsInf",
]  # fmt: skip
ACTIVATIONS = [
    ("Sigmoid", {}), ("Relu", {}), ("LeakyRelu", {}), ("LeakyRelu", {"alpha": 2.5}), ("LeakyRelu", {"alpha": -0.5}),
    ("Elu", {}), ("Elu", {"alpha": 0.3}), ("Selu", {}), ("Celu", {}), ("Celu", {"alpha": 0.7}), ("ThresholdedRelu", {}),
    ("HardSigmoid", {}), ("HardSigmoid", {"alpha": 0.5, "beta": 0.6}), ("HardSwish", {}), ("Softplus", {}),
    ("Softsign", {}), ("Mish", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}),
]  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str) -> None:
    for x in (X, SPECIAL, np.float32(0.3), np.zeros((0, 3), np.float32), np.zeros((2, 0), np.float32)):
        check(op, [x], rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize(("op", "attributes"), ACTIVATIONS)
def test_activation(op: str, attributes: dict[str, object]) -> None:
    finite = SPECIAL[np.isfinite(SPECIAL)]
    for x in (X, finite, np.float32(-0.3), np.zeros((0, 3), np.float32)):
        check(op, [x], rtol=3e-6, atol=1e-6, **attributes)


@pytest.mark.parametrize("op", ["Selu", "Gelu", "Sigmoid"])
def test_nothing_in_half_precision(op: str) -> None:
    nothing = np.zeros((0, 2), np.float16)
    check(op, [nothing], oracle=[nothing])


@pytest.mark.parametrize("op", ["Sigmoid", "Relu", "Elu", "Softplus", "HardSwish", "Tanh", "LeakyRelu"])
def test_nan_stays_nan(op: str) -> None:
    check(op, [np.array([np.nan, 1], np.float32)], oracle=[np.array([np.nan, _one(op)], np.float32)], rtol=1e-6)


def _one(op: str) -> float:
    known = {
        "Sigmoid": 1 / (1 + math.exp(-1)),
        "Softplus": math.log1p(math.e),
        "HardSwish": 4 / 6,
        "Tanh": math.tanh(1),
    }
    return known.get(op, 1.0)


@pytest.mark.parametrize(("op", "attributes"), [("Abs", {}), ("Exp", {}), ("Gelu", {}), ("Sigmoid", {}), ("Mish", {})])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_are_rounded_once(op: str, attributes: dict[str, object], dtype: type) -> None:
    x = X.astype(dtype)
    exact = {
        "Abs": np.abs,
        "Exp": np.exp,
        "Sigmoid": lambda v: 1 / (1 + np.exp(-v)),
        "Gelu": lambda v: v / 2 * (1 + np.vectorize(math.erf)(v / math.sqrt(2))),
        "Mish": lambda v: v * np.tanh(np.log1p(np.exp(v))),
    }[op](x.astype(np.float64))
    half_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    check(op, [x], oracle=[exact.astype(dtype)], rtol=1.01 * 2 * half_ulp, atol=1e-6, **attributes)
    if op == "Gelu":
        got = check(op, [x], oracle=[exact.astype(dtype)], rtol=2 * half_ulp, **attributes)[0]
        assert np.mean(got == exact.astype(dtype)) > 0.95  # one rounding, not one per step


def test_erf_is_exact_to_its_dtype() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.0, 1e-30, -1e-5, np.inf, -np.inf, np.nan]])
    exact = np.vectorize(math.erf)
    check("Erf", [x], oracle=[exact(x)], rtol=4e-15, atol=0)
    single = x.astype(np.float32)
    expected = exact(single.astype(np.float64)).astype(np.float32)
    check("Erf", [single], oracle=[expected], rtol=4e-7, atol=0, apart=6e-7)
    big = np.resize(single, (3, 20003))  # several blocks
    expected = exact(big.astype(np.float64)).astype(np.float32)
    check("Erf", [big], oracle=[expected], rtol=4e-7, atol=0, apart=6e-7)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_integers(dtype: type) -> None:
    info = np.iinfo(dtype)
    x = np.array([info.min, 0, 1, info.max], dtype)
    check("Abs", [x], oracle=[np.abs(x)])  # the lowest number wraps to itself
    check("Sign", [x])
    check("BitwiseNot", [x], oracle="reference")
    check("Relu", [x], oracle=[np.maximum(x, 0).astype(dtype)])
    if info.min:
        check("Neg", [x], oracle=[np.negative(x)])


@pytest.mark.parametrize("negative", [0, 1])
@pytest.mark.parametrize("positive", [0, 1])
def test_isinf_by_sign(negative: int, positive: int) -> None:
    check("IsInf", [SPECIAL], detect_negative=negative, detect_positive=positive)


def test_not() -> None:
    check("Not", [X > 0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int8, np.int32, np.int64, np.uint8])
def test_clip(dtype: type) -> None:
    x = (X * 3).astype(dtype) if np.dtype(dtype).kind != "u" else np.abs(X * 3).astype(dtype)
    low, high = np.array(1, dtype), np.array(4, dtype)
    for bounds in ([low, high], [low, None], [None, high], [high, low], []):
        check("Clip", [x, *bounds])
    check("Clip", [x, low.reshape(1), high.reshape(1)], oracle=[np.clip(x, 1, 4)])


def test_shrink() -> None:
    check("Shrink", [X], lambd=0.5, bias=0.3)
    check("Shrink", [np.arange(-4, 5, dtype=np.int32)], lambd=1.5, bias=1.5)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 1), (1,), (5,)])
def test_prelu(shape: tuple[int, ...]) -> None:
    check("PRelu", [X, RNG.normal(size=shape).astype(np.float32)])


def test_prelu_before_opset_7_has_one_slope_per_channel() -> None:
    slope = np.arange(X.shape[1], dtype=np.float32)
    expected = np.where(X < 0, X * slope.reshape(-1, *(1,) * (X.ndim - 2)), X)
    check("PRelu", [X, slope], opset=6, oracle=[expected])


def test_prelu_slope_must_fit() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        check("PRelu", [X[0, 0], X], oracle=[X])


def test_swish_and_swiglu() -> None:
    check("Swish", [X], opset=24, oracle="reference", alpha=1.5)
    check("Swish", [X], opset=24, oracle="reference")
    x, y = X.astype(np.float64), X[::-1].astype(np.float64)
    gated = x / (1 + np.exp(-1.5 * x)) * y
    check("SwiGLU", [X, X[::-1]], opset=28, oracle=[gated.astype(np.float32)], rtol=2e-6, alpha=1.5)


def test_dropout_in_inference_changes_nothing() -> None:
    check("Dropout", [X])
    check("Dropout", [X, np.float32(0.7)], outputs=2)
    check("Dropout", [X, np.float32(0.0), np.array(True)], outputs=2, consts=(1, 2))


def test_dropout_in_training_keeps_the_scaled_rest() -> None:
    ones = np.ones((100, 100), np.float32)
    y, mask = _dropout(ones, 0.25)
    np.testing.assert_array_equal(y, np.where(mask, np.float32(1 / 0.75), 0))
    assert 0.2 < 1 - mask.mean() < 0.3


def _dropout(x: np.ndarray, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    from kernel_harness import plain_node, run_node
    from onnx import helper

    proto = helper.make_node("Dropout", ["x", "r", "t"], ["y", "m"], seed=3)
    inputs = [x, np.array(ratio, np.float32), np.array(True)]
    return tuple(run_node(plain_node(proto, 21, inputs, ["float32", "bool"]), inputs))


def test_bfloat16_without_ml_dtypes_is_refused() -> None:
    # There the arrays hold raw uint16 bits, and sums of those would be wrong without a sound.
    program = """
import sys
sys.modules["ml_dtypes"] = None
import outrider.providers.cpu.kernels
from outrider.providers.cpu.kernels.frame import Unsupported, find
from outrider.providers.wire.graph import Node, Value
x = Value("x", "bfloat16", (2,))
node = Node(0, "node", "Add", "", 21, {}, (x, x), (Value("y", "bfloat16", (2,)),))
try:
    find(node).parsed(node)
except Unsupported as reason:
    print(reason)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "bfloat16 needs the ml_dtypes package, which is not installed in this worker"
