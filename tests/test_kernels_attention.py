"""Attention and QAttention of com.microsoft against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check

RNG = np.random.default_rng(8)
MS = "com.microsoft"
BATCH, QUERIES, SIZE, HEADS = 2, 5, 8, 2


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def masks(keys: int) -> list[np.ndarray | None]:
    """One of each kind, every query seeing at least one key."""
    some = RNG.random((BATCH, QUERIES, keys)) < 0.6
    some[:, :, 0] = True
    kinds = (np.array([3, keys]), np.array([keys, 4, 1, 0]), some[:, 0], some)
    return [None, *(kind.astype(np.int32) for kind in kinds)]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("kind", range(5))
def test_attention(kind: int, causal: int) -> None:
    x, w, bias = normal(BATCH, QUERIES, SIZE), normal(SIZE, 3 * SIZE), normal(3 * SIZE)
    attributes: dict[str, Any] = {"domain": MS, "num_heads": HEADS, "unidirectional": causal, "atol": 1e-5}
    mask = masks(QUERIES)[kind]
    check("Attention", [x, w, bias, mask], **attributes)
    check("Attention", [x, w, bias, mask], scale=0.3, mask_filter_value=-5.0, **attributes)
    past = normal(2, BATCH, HEADS, 3, SIZE // HEADS)
    if kind in (0, 3, 4):
        mask = masks(QUERIES + 3)[kind]
        check("Attention", [x, w, bias, mask, past], outputs=2, **attributes)
        check("Attention", [x, w, bias, mask, None, normal(BATCH, HEADS, QUERIES, QUERIES)][:6 if kind == 0 else 3],
              **attributes)  # fmt: skip


def test_values_of_another_size() -> None:
    x, w, bias = normal(BATCH, QUERIES, SIZE), normal(SIZE, 2 * SIZE + 4), normal(2 * SIZE + 4)
    check("Attention", [x, w, bias], domain=MS, num_heads=HEADS, qkv_hidden_sizes=[SIZE, SIZE, 4], atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("columns", [(), (3 * SIZE,)])
@pytest.mark.parametrize("kind", range(4))
def test_q_attention(dtype: str, columns: tuple[int, ...], kind: int) -> None:
    x = RNG.integers(0, 256, (BATCH, QUERIES, SIZE)).astype(np.uint8)
    w = RNG.integers(0, 64, (SIZE, 3 * SIZE)).astype(dtype)  # beyond 64 onnxruntime saturates, without VNNI
    scales = [np.float32(0.02), np.asarray(RNG.uniform(0.01, 0.02, columns), np.float32)]
    zeros = [np.uint8(120), np.full(columns, 30, dtype)]
    inputs = [x, w, normal(3 * SIZE), *scales, masks(QUERIES)[kind], *zeros]
    check("QAttention", inputs, domain=MS, num_heads=HEADS, atol=1e-5)
    if kind == 0:
        past = normal(2, BATCH, HEADS, 3, SIZE // HEADS)
        check("QAttention", [*inputs, past], domain=MS, num_heads=HEADS, unidirectional=1, outputs=2, atol=1e-5)
