"""Fourier transforms, windows and mel weights against onnx.reference and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(14)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def number(value: float, dtype: Any = np.int64) -> np.ndarray:
    return np.array(value, dtype)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("length", [None, 8, 13])
def test_dft(parts: int, inverse: int, length: int | None) -> None:
    given = None if length is None else number(length)
    for axis in (-2, 1):
        inputs = [floats(2, 10, 5, parts), given, number(axis)]
        check("DFT", inputs, inverse=inverse, oracle="reference", rtol=1e-4, atol=1e-4)
        check("DFT", inputs[:2], opset=17, axis=axis % 4, inverse=inverse, oracle="reference", rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [None, 8, 13])
def test_onesided_dft(length: int | None) -> None:
    given = None if length is None else number(length)
    check("DFT", [floats(2, 10, 1), given, number(1)], onesided=1, oracle="reference", rtol=1e-4, atol=1e-4)
    attributes = {"onesided": 1, "inverse": 1}
    check("DFT", [floats(2, 6, 2), given, number(1)], oracle="reference", rtol=1e-4, atol=1e-4, **attributes)


@pytest.mark.parametrize("onesided", [0, 1])
def test_stft(onesided: int) -> None:
    window = np.hanning(16).astype(np.float32)
    for inputs in (
        [floats(2, 60, 1), number(7), window],
        [floats(2, 60, 1), number(7), None, number(16)],
        [floats(2, 60, 1), number(7), window, number(16)],
    ):
        check("STFT", inputs, onesided=onesided, oracle="reference", rtol=1e-4, atol=1e-4)
    check("STFT", [floats(1, 40, 2), number(5), window], onesided=0, oracle="reference", rtol=1e-4, atol=1e-4)
    check("STFT", [floats(2, 60), number(7), window], onesided=onesided, rtol=1e-4, atol=1e-4)


def test_stft_of_a_constant_is_the_error_of_its_window() -> None:
    """Models take the angle of such bins, which 0 / 0 would spoil."""
    window = np.hanning(21)[:20].astype(np.float32)
    x = np.full((1, 60, 1), -0.12536708, np.float32)
    expected = np.fft.rfft(np.lib.stride_tricks.sliding_window_view(x[0, :, 0].astype(float), 20)[::5] * window)
    result = np.stack([expected.real, expected.imag], -1)[None].astype(np.float32)
    (y,) = check("STFT", [x, number(5), window], oracle=[result], rtol=1e-4, atol=1e-16)
    assert (y[..., 0] != 0).all()


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows(op: str, periodic: int) -> None:
    check(op, [number(10)], consts=[0], periodic=periodic, rtol=1e-5, atol=1e-6)
    check(op, [number(11, np.int32)], consts=[0], periodic=periodic, output_datatype=11, rtol=1e-12, oracle="reference")


def test_mel_weights() -> None:
    inputs = [number(8), number(64), number(8192), number(0, np.float32), number(4096, np.float32)]
    check("MelWeightMatrix", inputs, consts=range(5), rtol=1e-5, atol=1e-6)
