"""Signals: DFT and STFT by FFT, the Hann, Hamming and Blackman windows, and the mel weight matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.precision import cast, wide, widened
from outrider.providers.wire.dtypes import BY_NUMBER, FLOATS, NUMBERS, numpy_dtype
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Transform:
    """Attributes of DFT and STFT; `axis` is an attribute in DFT-17 only."""

    axis: int
    inverse: bool
    onesided: bool


def _parse_dft(node: Node) -> Transform:
    get = node.attributes.get
    return Transform(int(get("axis", 1)), bool(get("inverse", 0)), bool(get("onesided", 0)))


def _complex(x: np.ndarray) -> np.ndarray:
    """[..., 2] as complex numbers, [..., 1] as it is without that axis."""
    if x.shape[-1] == 1:
        return x[..., 0]
    return np.ascontiguousarray(x).view(np.result_type(x.dtype, np.complex64))[..., 0]


def _dft(x: np.ndarray, length: int, axis: int, p: Transform, y: np.ndarray) -> None:
    signal = _complex(x)
    if p.inverse and p.onesided:
        np.copyto(y[..., 0], np.fft.irfft(signal, length, axis), "unsafe")
        return
    if p.inverse:
        spectrum = np.fft.ifft(signal, length, axis)
    elif p.onesided and signal.dtype.kind != "c":
        spectrum = np.fft.rfft(signal, length, axis)
    else:
        spectrum = np.fft.fft(signal, length, axis)
    part = spectrum[(slice(None),) * axis + (slice(0, y.shape[axis]),)]
    np.copyto(y[..., 0], part.real, "unsafe")
    np.copyto(y[..., 1], part.imag, "unsafe")


def _bind_dft(b: Bind, p: Transform, axis: int) -> None:
    x = b.array(0)
    if x.shape[-1] not in (1, 2):
        raise ValueError(f"the last axis of {list(x.shape)} holds neither 1 nor 2 parts")
    if not -x.ndim <= axis < x.ndim or axis % x.ndim == x.ndim - 1:
        raise ValueError(f"axis {axis} is none of the signal axes of {list(x.shape)}")
    axis %= x.ndim
    real_result = p.inverse and p.onesided
    natural = 2 * (x.shape[axis] - 1) if real_result else x.shape[axis]
    length = int(b.const(1).reshape(())) if b.has(1) else natural
    shape = list(x.shape)
    shape[axis] = length // 2 + 1 if p.onesided and not p.inverse else length
    shape[-1] = 1 if real_result else 2
    y = b.out(0, shape, x.dtype)
    if y.size:
        b.step(_dft, cast(b, x, wide(x.dtype)), length, axis, p, y)


@kernel("DFT", since=17, dtypes={0: FLOATS}, parse=_parse_dft)
def dft_17(b: Bind, p: Transform) -> None:
    """ONNX DFT-17: inputs x, dft_length; the axis is an attribute."""
    _bind_dft(b, p, p.axis)


@kernel("DFT", since=20, dtypes={0: FLOATS}, parse=_parse_dft)
def dft(b: Bind, p: Transform) -> None:
    """ONNX DFT-20: inputs x, dft_length, axis."""
    _bind_dft(b, p, int(b.const(2).reshape(())) if b.has(2) else -2)


def _stft(frames: np.ndarray, window: np.ndarray | None, onesided: bool, y: np.ndarray) -> None:
    # In float64: bins of a constant signal are the rounding errors of its window, and models divide by them.
    signal = _complex(frames.astype(np.float64))
    if window is not None:
        signal = signal * window
    real = onesided and signal.dtype.kind != "c"
    spectrum = np.fft.rfft(signal, axis=2) if real else np.fft.fft(signal, axis=2)
    part = spectrum[:, :, : y.shape[2]]
    np.copyto(y[..., 0], part.real, "unsafe")
    np.copyto(y[..., 1], part.imag, "unsafe")


@kernel("STFT", since=17, dtypes={0: FLOATS}, parse=lambda node: bool(node.attributes.get("onesided", 1)))
def stft(b: Bind, onesided: bool) -> None:
    """ONNX STFT-17: inputs signal [N, length, 1 or 2], frame_step, window, frame_length; y [N, frames, bins, 2].

    A real signal may be [N, length], which onnxruntime takes and exporters write.
    """
    given = b.array(0)
    if given.ndim == 2:
        given = given[:, :, None]
    if given.ndim != 3 or given.shape[2] not in (1, 2):
        raise ValueError(f"the signal is {list(given.shape)}, not [batch, length, 1 or 2]")
    step = int(b.const(1).reshape(()))
    window = widened(b, 2) if b.has(2) else None
    size = given.shape[1] if window is None else window.shape[0]
    if b.has(3):
        size = int(b.const(3).reshape(()))
    if step < 1 or size > given.shape[1] or (window is not None and window.shape != (size,)):
        raise ValueError(f"frames of {size} every {step} do not fit a signal {list(given.shape)} and its window")
    count = (given.shape[1] - size) // step + 1
    y = b.out(0, (given.shape[0], count, size // 2 + 1 if onesided else size, 2), given.dtype)
    if not y.size:
        return
    x = cast(b, given, wide(given.dtype))
    frames = np.lib.stride_tricks.as_strided(
        x,
        (x.shape[0], count, size, x.shape[2]),
        (x.strides[0], x.strides[1] * step, x.strides[1], x.strides[2]),
        writeable=False,
    )
    b.step(_stft, frames, window, onesided, y)


@dataclass(frozen=True)
class Made:
    """Attributes of operators that make a tensor of a chosen dtype."""

    dtype: str
    periodic: bool


def _parse_made(node: Node) -> Made:
    number = int(node.attributes.get("output_datatype", 1))
    dtype = BY_NUMBER.get(number, "undefined")
    if dtype not in NUMBERS:
        raise Unsupported(f"output_datatype {number}")
    return Made(dtype, bool(node.attributes.get("periodic", 1)))


def _cosines(b: Bind, p: Made, weights: tuple[float, ...]) -> None:
    """A window that is a sum of cosines: weights[k] * cos(2 pi k n / N)."""
    size = int(b.const(0).reshape(()))
    period = max(1, size if p.periodic else size - 1)
    angle = np.arange(size) * (2 * np.pi / period)
    window = sum(weight * np.cos(k * angle) for k, weight in enumerate(weights))
    b.fixed(0, np.asarray(window).astype(numpy_dtype(p.dtype)))


@kernel("HannWindow", since=17, parse=_parse_made)
def hann_window(b: Bind, p: Made) -> None:
    """ONNX HannWindow-17."""
    _cosines(b, p, (0.5, -0.5))


@kernel("HammingWindow", since=17, parse=_parse_made)
def hamming_window(b: Bind, p: Made) -> None:
    """ONNX HammingWindow-17, with the optimal weights 25/46 and 21/46."""
    _cosines(b, p, (25 / 46, -21 / 46))


@kernel("BlackmanWindow", since=17, parse=_parse_made)
def blackman_window(b: Bind, p: Made) -> None:
    """ONNX BlackmanWindow-17."""
    _cosines(b, p, (0.42, -0.5, 0.08))


def mel_weights(bands: int, length: int, rate: int, low: float, high: float) -> np.ndarray:
    """Triangles of peak 1 over the bins of a spectrum, [length // 2 + 1, bands], float64."""
    bottom, top = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    mels = np.arange(bands + 2) * ((top - bottom) / (bands + 2)) + bottom
    bins = ((length + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(np.int64)
    left, centre, right = bins[:-2], bins[1:-1], bins[2:]
    at = np.arange(length // 2 + 1)[:, None]
    rising = np.where(centre > left, (at - left) / np.maximum(centre - left, 1), 1.0)
    falling = np.where(right > centre, (right - at) / np.maximum(right - centre, 1), 0.0)
    weights = np.where((at >= left) & (at <= centre), rising, 0.0)
    return np.where((at >= centre) & (at < right), falling, weights)


@kernel("MelWeightMatrix", since=17, parse=_parse_made)
def mel_weight_matrix(b: Bind, p: Made) -> None:
    """ONNX MelWeightMatrix-17: num_mel_bins, dft_length, sample_rate, lower_edge_hertz, upper_edge_hertz."""
    bands, length, rate = (int(b.const(i).reshape(())) for i in range(3))
    low, high = (float(b.const(i).reshape(())) for i in (3, 4))
    b.fixed(0, mel_weights(bands, length, rate, low, high).astype(numpy_dtype(p.dtype)))
