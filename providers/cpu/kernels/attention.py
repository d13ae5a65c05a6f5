"""Attention and QAttention of com.microsoft: projections to query, key and value, then softmax(Q K' scale + mask) V.

Shapes: input [B, S, D]; weights [D, Q + K + V], Q = K = N * H, V = N * W; bias [Q + K + V]; past and present
[2, B, N, P, H]; mask_index as below; output [B, S, V]. N heads of H (queries, keys) and W (values) features; T = P + S.
Sources: onnxruntime's documentation of the contributed operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.integers import BYTES
from outrider.providers.cpu.kernels.matmul import multiply
from outrider.providers.cpu.kernels.quantized import integer_product
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Heads:
    """Attributes of Attention and QAttention. `sizes`: Q, K and V, None: a third of the weights each."""

    count: int
    causal: bool
    scale: float | None
    masked: float
    sizes: tuple[int, int, int] | None


def _parse(node: Node) -> Heads:
    get = node.attributes.get
    count = int(get("num_heads", 0))
    if count < 1:
        raise Unsupported(f"num_heads is {count}")
    for name in ("do_rotary", "past_present_share_buffer"):
        if int(get(name, 0)):
            raise Unsupported(f"{name} is not taken")
    sizes = get("qkv_hidden_sizes")
    given: tuple[int, int, int] | None = None
    if sizes:
        given = (int(sizes[0]), int(sizes[1]), int(sizes[2]))
        if given[0] != given[1] or any(n % count for n in given):
            raise Unsupported(f"qkv_hidden_sizes {list(sizes)} do not fit {count} heads")
    scale = float(get("scale", 0.0))
    return Heads(count, bool(get("unidirectional", 0)), scale or None, float(get("mask_filter_value", -10000.0)), given)


def _mask(given: np.ndarray | None, p: Heads, past: int, mask: np.ndarray) -> None:
    """What is added to the scores, [B, S, T]. `given` is one of

    - [B]: the number of keys; [2 B]: where the keys end, then where they start;
    - [B, T]: nonzero for keys that count; [B, S, T]: the same for each query.
    """
    batch, queries, keys = mask.shape
    low = np.float32(p.masked)
    position = np.arange(keys)
    if given is None:
        mask.fill(0)
    elif given.ndim == 1:
        end = given[:batch, None]
        start = given[batch : 2 * batch, None] if len(given) >= 2 * batch else 0
        np.copyto(mask, np.where((position < end) & (position >= start), np.float32(0), low)[:, None])
    else:
        shown = np.where(given > 0, np.float32(0), low)
        np.copyto(mask, shown[:, None] if given.ndim == 2 else shown)
    if p.causal:
        later = position > np.arange(queries)[:, None] + past
        np.copyto(mask, np.finfo(np.float32).min, where=later)


def _softmax(scores: np.ndarray, scale: np.float32, mask: np.ndarray, more: np.ndarray | None) -> None:
    """scores [B, N, S, T] become their softmax, scaled and masked first."""
    np.multiply(scores, scale, scores)
    np.add(scores, mask[:, None], scores)
    if more is not None:
        np.add(scores, more, scores)
    np.subtract(scores, scores.max(axis=-1, keepdims=True), scores)
    np.exp(scores, scores)
    np.divide(scores, scores.sum(axis=-1, keepdims=True), scores)


def attend(b: Bind, p: Heads, projected: np.ndarray, mask: int, past: int, more: int) -> None:
    """Record outputs 0 and, if wanted, 1 (present) from the projections [B, S, Q + K + V], bias added.

    `mask`, `past`, `more`: positions of the inputs mask_index, past and attention bias (-1: there is none).
    """
    batch, queries, width = projected.shape
    sizes = p.sizes or (width // 3,) * 3
    if sum(sizes) != width or any(n % p.count for n in sizes):
        raise ValueError(f"{width} features are not query, key and value of {p.count} heads each")
    heads = p.count

    def split(first: int, size: int) -> np.ndarray:
        part = projected[:, :, first : first + size]
        return b.reshaped(part, (batch, queries, heads, size // heads)).transpose(0, 2, 1, 3)

    query, key, value = split(0, sizes[0]), split(sizes[0], sizes[1]), split(sizes[0] + sizes[1], sizes[2])
    earlier = b.array(past) if past >= 0 and b.has(past) else None
    before = 0 if earlier is None else earlier.shape[3]
    keys = before + queries
    if earlier is not None or b.wanted(1):
        if sizes[1] != sizes[2]:
            raise ValueError(f"keys of {sizes[1]} and values of {sizes[2]} features cannot be kept together")
        shape = (2, batch, heads, keys, sizes[1] // heads)
        kept = b.out(1, shape, np.float32) if b.wanted(1) else b.scratch(shape, np.float32)
        for place, old, new in zip(kept, (None, None) if earlier is None else earlier, (key, value), strict=True):
            if old is not None:
                b.step(np.copyto, place[:, :, :before], old)
            b.step(np.copyto, place[:, :, before:], new)
        key, value = kept[0], kept[1]
    scores = b.scratch((batch, heads, queries, keys), np.float32)
    added = b.scratch((batch, queries, keys), np.float32)
    given = b.array(mask) if b.has(mask) else None
    _check_mask(given, batch, queries, keys)
    b.step(_mask, given, p, before, added)
    multiply(b, query, key.swapaxes(-1, -2), scores)
    scale = np.float32(p.scale if p.scale is not None else 1 / math.sqrt(sizes[0] // heads))
    b.step(_softmax, scores, scale, added, b.array(more) if more >= 0 and b.has(more) else None)
    y = b.out(0, (batch, queries, sizes[2]), np.float32)
    multiply(b, scores, value, y.reshape(batch, queries, heads, sizes[2] // heads).transpose(0, 2, 1, 3))


def _check_mask(given: np.ndarray | None, batch: int, queries: int, keys: int) -> None:
    if given is None:
        return
    if given.shape not in ((batch,), (2 * batch,), (batch, keys), (batch, queries, keys)):
        raise ValueError(
            f"mask_index {list(given.shape)} is none of [{batch}], [{2 * batch}], [{batch}, {keys}], "
            f"[{batch}, {queries}, {keys}]"
        )


def _input(b: Bind) -> np.ndarray:
    x = b.array(0)
    if x.ndim != 3 or b.array(1).ndim != 2 or x.shape[2] != b.array(1).shape[0]:
        raise ValueError(f"weights {list(b.array(1).shape)} do not fit an input {list(x.shape)}")
    return x


@kernel("Attention", domain="com.microsoft", dtypes={0: {"float32"}}, parse=_parse)
def attention(b: Bind, p: Heads) -> None:
    """com.microsoft Attention-1: input, weights, bias, mask_index, past, attention_bias."""
    if b.has(6):
        raise ValueError("past_sequence_length belongs to a buffer that past and present share, which is not taken")
    x, w = _input(b), b.array(1)
    projected = b.scratch((*x.shape[:2], w.shape[1]), np.float32)
    multiply(b, x, w, projected)
    if b.has(2):
        b.step(np.add, projected, b.array(2), projected)
    attend(b, p, projected, 3, 4, 5)


@kernel(
    "QAttention",
    domain="com.microsoft",
    dtypes={0: BYTES, 1: BYTES, 2: {"float32"}},
    parse=_parse,
    compiled="quantized",
)
def q_attention(b: Bind, p: Heads) -> None:
    """com.microsoft QAttention-1: input, weights, bias, their scales, mask_index, their zero points, past."""
    x, w = _input(b), b.array(1)
    projected = b.scratch((*x.shape[:2], w.shape[1]), np.float32)
    integer_product(b, (0, 3, 6), (1, 4, 7), 2, projected)
    attend(b, p, projected, 5, 8, -1)
