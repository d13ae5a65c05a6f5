"""2- and 4-bit types: several elements in a byte, the first in the lowest bits (ONNX TensorProto.raw_data).

Outrider keeps such elements one per byte; as `ml_dtypes` does, those with a sign fill the byte with it.
"""

from __future__ import annotations

import numpy as np

from outrider.providers.wire.dtypes import PACKED


def pack(items: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of a packed type, one per byte in any shape, as bytes in ONNX's form (1-D uint8)."""
    per_byte = PACKED[dtype]
    bits = 8 // per_byte
    padded = np.zeros(-(-items.size // per_byte) * per_byte, np.uint8)
    padded[: items.size] = items.reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: np.ndarray = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1).astype(np.uint8)
    return packed


def unpack(data: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """`count` elements, one per byte in its low bits (1-D uint8); `data` holds them packed."""
    per_byte = PACKED[dtype]
    bits = 8 // per_byte
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((data[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count]


def extended(items: np.ndarray, dtype: str) -> np.ndarray:
    """Unpacked elements with their sign in the whole byte, for the types that have one (uint8)."""
    if dtype not in ("int4", "int2"):
        return items
    sign = 1 << (8 // PACKED[dtype] - 1)
    return ((items ^ sign).astype(np.int8) - np.int8(sign)).view(np.uint8)
