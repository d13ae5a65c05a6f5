"""Casts and linear quantization against onnxruntime, and against onnx.reference for types that it lacks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_harness import check
from onnx import TensorProto

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RNG = np.random.default_rng(3)
X = (RNG.normal(size=(4, 6)) * 20).astype(np.float32)
NUMBERS = {
    "FLOAT": np.float32, "DOUBLE": np.float64, "FLOAT16": np.float16, "INT8": np.int8, "INT16": np.int16,
    "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32,
    "UINT64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


@pytest.mark.parametrize("source", list(NUMBERS))
def test_cast_between_numbers(source: str) -> None:
    x = np.array([[0, 1, 2], [3, 100, 127]]).astype(NUMBERS[source])
    for target, dtype in NUMBERS.items():
        check("Cast", [x], to=getattr(TensorProto, target))
        check("CastLike", [x, np.zeros(2, dtype)])


def test_cast_rounds_wraps_and_truncates() -> None:
    check("Cast", [np.array([-1.9, 1.9, 2.5], np.float32)], to=TensorProto.INT32)
    check("Cast", [np.array([300, -200, 128])], to=TensorProto.INT8)
    check("Cast", [np.array([0.1, np.nan, -0.0, 1e-30], np.float32)], to=TensorProto.BOOL)
    check("Cast", [np.array([1e6, 65519, 65520, 1e-8], np.float32)], to=TensorProto.FLOAT16)
    check("Cast", [np.float32(3.7)], to=TensorProto.INT64)
    check("Cast", [np.zeros((0, 2), np.float32)], to=TensorProto.INT64)


FLOAT8 = ["FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"]
WIDE = np.array([0, -0.0, 0.3, -17.3, 239, 241, 447, 449, 1e6, -1e6, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("target", [*FLOAT8, "BFLOAT16"])
@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("source", [np.float32, np.float16])
def test_cast_to_short_floats(target: str, saturate: int, source: type) -> None:
    x = WIDE.astype(source)
    to = getattr(TensorProto, target)
    attributes = {} if target == "BFLOAT16" else {"saturate": saturate}
    narrow = check("Cast", [x], oracle="reference", to=to, **attributes)[0]
    check("Cast", [narrow], oracle="reference", to=TensorProto.FLOAT)
    check("Cast", [narrow], oracle="reference", to=TensorProto.FLOAT16)


@pytest.mark.parametrize("target", ["INT4", "UINT4", "FLOAT4E2M1"])
def test_cast_to_packed_types(target: str) -> None:
    x = np.array([[0, 1, 2.4], [3, 5.5, 6]], np.float32)
    narrow = check("Cast", [x], oracle="reference", to=getattr(TensorProto, target), opset=23)[0]
    check("Cast", [narrow], oracle="reference", to=TensorProto.FLOAT, opset=23)
    check("Cast", [narrow], oracle="reference", to=TensorProto.FLOAT16, opset=23)


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
@pytest.mark.parametrize("saturate", [0, 1])
def test_cast_to_powers_of_two(mode: str, saturate: int) -> None:
    x = np.array([0.5, 0.75, 1.0, 1.2, 1.5, 1.7, 3e38, 1e-38, 1000, np.nan], np.float32)
    check("Cast", [x], oracle="reference", opset=25, to=TensorProto.FLOAT8E8M0, round_mode=mode, saturate=saturate)


def test_infinity_saturates_as_a_power_of_two() -> None:
    top = np.array([2.0**127], ml_dtypes.float8_e8m0fnu)
    check("Cast", [np.array([np.inf], np.float32)], oracle=[top], opset=25, to=TensorProto.FLOAT8E8M0)


def test_cast_of_strings() -> None:
    words = np.array(["1.5", "-2", "NaN", "INF", "-INF", "1e3"], object)
    numbers = np.array([1.5, -2, np.nan, np.inf, -np.inf, 1000], np.float32)
    check("Cast", [words], oracle=[numbers], bound=False, to=TensorProto.FLOAT)
    check("Cast", [np.array(["7", "-3"], object)], bound=False, to=TensorProto.INT64, oracle=[np.array([7, -3])])
    written = np.array(["1.5", "-2.0", "NaN", "INF", "-INF", "1000.0"], object)
    check("Cast", [numbers], oracle=[written], bound=False, to=TensorProto.STRING)
    check("Cast", [np.array([[7, -3]])], bound=False, to=TensorProto.STRING)


def test_bit_cast() -> None:
    check("BitCast", [X], oracle=[X.view(np.int32)], opset=26, to=TensorProto.INT32)
    with pytest.raises(ValueError, match="width"):
        check("BitCast", [X], oracle=[X], opset=26, to=TensorProto.INT64)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_quantize(dtype: type) -> None:
    zero = np.array(3, dtype)
    check("QuantizeLinear", [X, np.float32(0.5), zero])
    check("QuantizeLinear", [X, np.array([0.1], np.float32), zero.reshape(1)])
    scales = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    check("QuantizeLinear", [X, scales, np.array([0, 1, 2, 3], dtype)], axis=0)
    check("QuantizeLinear", [X, np.resize(scales, 6), np.zeros(6, dtype)], axis=-1)
    blocks = np.abs(RNG.normal(size=(4, 2))).astype(np.float32) + 0.1
    check("QuantizeLinear", [X, blocks, np.ones((4, 2), dtype)], axis=1, block_size=3)
    check("QuantizeLinear", [np.array([0.5, 1.5, 2.5, -0.5], np.float32), np.float32(1), np.array(0, dtype)])


def test_quantize_defaults_and_output_dtype() -> None:
    check("QuantizeLinear", [X, np.float32(0.5)])
    check("QuantizeLinear", [X, np.float32(0.5)], output_dtype=TensorProto.INT8)
    check("QuantizeLinear", [X.astype(np.float16), np.array(0.5, np.float16), np.array(2, np.int8)])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32])
def test_dequantize(dtype: type) -> None:
    q = np.arange(24).reshape(4, 6).astype(dtype)
    scales = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    check("DequantizeLinear", [q, np.float32(0.25)])
    check("DequantizeLinear", [q, scales], axis=0)
    if dtype is not np.int32:
        check("DequantizeLinear", [q, scales, np.array([0, 1, 2, 3], dtype)], axis=0)
        check("DequantizeLinear", [q, np.ones((2, 6), np.float32), np.ones((2, 6), dtype)], axis=0, block_size=2)
        check("DequantizeLinear", [q, np.array(0.25, np.float16), np.array(1, dtype)])


def test_dequantize_int32_keeps_its_digits() -> None:
    q = np.array([2**30 + 3, -(2**30)], np.int32)
    check("DequantizeLinear", [q, np.float32(1), np.array(2**30, np.int32)], oracle=[np.array([3, -(2.0**31)], "f")])


def test_blocks_that_do_not_cover_are_refused() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        check("QuantizeLinear", [X, np.ones((4, 2), np.float32)], oracle=[X], axis=1, block_size=2)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn])
def test_quantize_to_extended_types(dtype: type) -> None:
    zero = np.array([0], dtype).reshape(())
    x = np.array([[0.1, 1, 2], [-30, 5.5, 600]], np.float32)
    small = check("QuantizeLinear", [x, np.float32(0.5), zero], opset=23, oracle="reference")[0]
    check("DequantizeLinear", [small, np.float32(0.5), zero], opset=23, oracle="reference")


@pytest.mark.parametrize("x", [X, np.abs(X), -np.abs(X), np.full((2, 2), 3, np.float32)])
def test_dynamic_quantize(x: np.ndarray) -> None:
    check("DynamicQuantizeLinear", [x], outputs=3)
