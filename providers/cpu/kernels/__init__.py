"""The kernels of the cpu provider, one module per operator family. Importing this package registers them all."""

from outrider.providers.cpu.kernels import (
    convolution,
    matmul,
    normalization,
    pooling,
    quantized,
    recurrent,
    resize,
    signal,
)

__all__ = [
    "convolution",
    "matmul",
    "normalization",
    "pooling",
    "quantized",
    "recurrent",
    "resize",
    "signal",
]
