"""MatMulNBits of com.microsoft: a product with weights of 2, 4 or 8 bits, scaled in blocks along their depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.matmul import multiply
from outrider.providers.cpu.kernels.precision import finish, target, widened
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Blocks:
    """Attributes of MatMulNBits: weights [N, K] in blocks of `size` along K."""

    depth: int
    features: int
    bits: int
    size: int

    @property
    def count(self) -> int:
        """Blocks of one feature."""
        return -(-self.depth // self.size)


def _parse(node: Node) -> Blocks:
    get = node.attributes.get
    p = Blocks(int(get("K", 0)), int(get("N", 0)), int(get("bits", 4)), int(get("block_size", 32)))
    if p.bits not in (2, 4, 8):
        raise Unsupported(f"weights of {p.bits} bits; the kernel takes 2, 4 and 8")
    if p.depth < 1 or p.features < 1 or p.size < 16 or p.size & (p.size - 1):
        raise Unsupported(f"K={p.depth}, N={p.features}, block_size={p.size}: a power of two from 16 on is taken")
    return p


def _unpacked(x: np.ndarray, bits: int) -> np.ndarray:
    """Small integers from bytes, the low bits first; the last axis grows."""
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    parts: np.ndarray = (x[..., None] >> shifts) & np.uint8(2**bits - 1)
    return parts.reshape(*x.shape[:-1], -1)


def _dequantized(
    values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray | None, p: Blocks
) -> np.ndarray:
    """The weights [K, N] in float32. `groups`: the block whose scale each of the K rows has, instead of its own."""
    whole = _unpacked(values.reshape(p.features, -1), p.bits)[:, : p.count * p.size].astype(np.float32)
    scale = scales.astype(np.float32).reshape(p.features, p.count)
    if zeros is None:
        zero = np.full((p.features, p.count), 2 ** (p.bits - 1), np.float32)
    elif zeros.dtype == np.uint8:
        zero = _unpacked(zeros.reshape(p.features, -1), p.bits)[:, : p.count].astype(np.float32)
    else:
        zero = zeros.astype(np.float32).reshape(p.features, p.count)
    block = np.arange(p.depth) // p.size if groups is None else groups[: p.depth]
    return np.ascontiguousarray(((whole[:, : p.depth] - zero[:, block]) * scale[:, block]).T)


def _dequantize(y: np.ndarray, *given: Any) -> None:
    np.copyto(y, _dequantized(*given))


@kernel("MatMulNBits", domain="com.microsoft", dtypes={0: FLOATS, 1: {"uint8"}, 2: FLOATS}, parse=_parse)
def matmul_nbits(b: Bind, p: Blocks) -> None:
    """com.microsoft MatMulNBits-1: A [..., K], B [N, blocks, bytes], scales, zero points, group index, bias [N].

    In float32, whatever `accuracy_level` allows; constant weights are dequantized once.
    """
    x = widened(b, 0)
    if x.ndim == 0 or x.shape[-1] != p.depth:
        raise ValueError(f"A has shape {list(x.shape)}, its last axis is to be {p.depth}")
    given = [b.array(i) if b.has(i) else None for i in (3, 4)]
    if all(b.is_const(i) for i in (1, 2, 3, 4) if b.has(i)):
        weights: np.ndarray = b.packed("dequantized", 1, lambda v: _dequantized(v, b.const(2), given[0], given[1], p))
    else:
        weights = b.scratch((p.depth, p.features), np.float32)
        b.step(_dequantize, weights, b.array(1), b.array(2), *given, p)
    y = b.out(0, (*x.shape[:-1], p.features), b.array(0).dtype)
    total = target(b, y)
    multiply(b, x, weights, total)
    if b.has(5):
        b.step(np.add, total, widened(b, 5), total)
    finish(b, y, total)
