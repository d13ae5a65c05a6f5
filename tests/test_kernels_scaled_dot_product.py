"""Attention and rotary positions against the definition of ONNX and onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(12)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    draw = data.draw
    groups, shared, steps, keys, past = (draw(st.integers(low, 3)) for low in (1, 1, 1, 1, 0))
    rows, heads, size, width = 2, groups * shared, 4, 3
    flat, causal = draw(st.booleans()), draw(st.integers(0, 1))
    q, k, v = normal(rows, heads, steps, size), normal(rows, groups, keys, size), normal(rows, groups, keys, width)
    more: dict[str, object] = {"is_causal": causal, "qk_matmul_output_mode": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        more["scale"] = 0.3
    if draw(st.booleans()):
        more["softcap"] = 1.5
    if flat:
        q, k, v = (x.transpose(0, 2, 1, 3).reshape(rows, x.shape[2], -1) for x in (q, k, v))
        more |= {"q_num_heads": heads, "kv_num_heads": groups}
    inputs: list[np.ndarray | None] = [q, k, v]
    mask = draw(st.sampled_from(["", "bool", "float", "short"]))
    cached = draw(st.booleans())
    total = keys + (past if cached else 0)
    if mask == "bool":
        inputs.append(RNG.random((rows, 1, steps, total)) < 0.6)
    elif mask == "float":
        inputs.append(normal(steps, total))
    elif mask == "short" and total > 1:
        inputs.append(normal(1, heads, steps, total - 1))
    else:
        inputs.append(None)
    if cached:
        inputs += [normal(rows, groups, past, size), normal(rows, groups, past, width)]
    names = ["y", "key", "value", draw(st.sampled_from(["", "scores"]))] if cached else ["y"]
    check("Attention", inputs, opset=24, oracle="reference", outputs=names, **CLOSE, **more)


def test_attention_over_a_cache_of_which_rows_use_different_lengths() -> None:
    q, k = normal(2, 2, 2, 4), normal(2, 2, 6, 4)
    for causal in (0, 1):
        inputs = [q, k, k * 2, None, None, None, np.array([3, 6])]
        check("Attention", inputs, opset=24, oracle="reference", is_causal=causal, **CLOSE)


def test_attention_of_a_query_that_sees_nothing_is_zero() -> None:
    mask = np.array([[True, True], [False, False]])
    y = check("Attention", [normal(1, 1, 2, 4)] * 3 + [mask], opset=23, oracle="reference", **CLOSE)
    assert not y[0][0, 0, 1].any()


def test_attention_agrees_with_onnxruntime_and_in_other_precisions() -> None:
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)
    check("Attention", [q, k, v, normal(3, 5)], opset=23, **CLOSE)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    (exact,) = check("Attention", wide, opset=23, oracle="reference", rtol=1e-12, atol=1e-12)
    check("Attention", [q, k, v], opset=23, oracle=[exact.astype(np.float32)], softmax_precision=11, **CLOSE)
    half = [x.astype(np.float16) for x in (q, k, v)]
    check("Attention", half, opset=23, oracle=[exact.astype(np.float16)], rtol=5e-3, atol=5e-3)
    with pytest.raises(ValueError, match="do not fit"):
        check("Attention", [q, k[:, :, :, 1:], v], opset=23, oracle=[q])
    with pytest.raises(ValueError, match="with 0 heads"):
        check("Attention", [normal(1, 2, 4)] * 3, opset=23, oracle=[q])


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_rotary_embedding(placed: bool, flat: bool, size: int, interleaved: int) -> None:
    x, half = normal(2, 3, 5, 8), (size or 8) // 2
    angles = RNG.uniform(0, 6, (10, half) if placed else (2, 5, half))
    inputs = [x, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
    more = {"interleaved": interleaved, "rotary_embedding_dim": size}
    if placed:
        inputs.append(RNG.integers(0, 10, (2, 5)))
    if flat or size:
        more["num_heads"] = 3
    if flat:
        inputs[0] = x.transpose(0, 2, 1, 3).reshape(2, 5, 24)
    check("RotaryEmbedding", inputs, opset=23, oracle="reference", **CLOSE, **more)
    check("RotaryEmbedding", inputs, opset=23, **CLOSE, **more)


def test_rotary_embedding_with_wrong_tables() -> None:
    x, table = normal(1, 2, 3, 8), normal(4, 4)
    with pytest.raises(ValueError, match="with 4 angles"):
        check("RotaryEmbedding", [x, table[:, 1:], table[:, 1:], np.zeros((1, 3), int)], opset=23, oracle=[x])
    with pytest.raises(IndexError, match="a position is outside the 4"):
        check("RotaryEmbedding", [x, table, table, np.array([[0, 1, 4]])], opset=23, oracle=[x])
