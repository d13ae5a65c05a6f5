"""GELUs, skip normalizations and embeddings of com.microsoft against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, plain_node, run_node
from native_library import libraries
from onnx import helper

pytestmark = pytest.mark.fast
CONTRIBUTED = "com.microsoft"


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(0, 2, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "biased"),
    [("Gelu", False), ("BiasGelu", True), ("FastGelu", True), ("FastGelu", False), ("QuickGelu", False)],
)
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 1030), (4,)])
def test_gelus(op: str, biased: bool, shape: tuple[int, ...]) -> None:
    inputs = [floats(*shape), floats(shape[-1], seed=1)] if biased else [floats(*shape)]
    check(op, inputs, domain=CONTRIBUTED, rtol=1e-6, atol=2e-6)


def test_quick_gelu_has_a_number() -> None:
    check("QuickGelu", [floats(3, 9)], domain=CONTRIBUTED, alpha=0.7, rtol=1e-6, atol=1e-6)


def test_gelu_of_halves_is_rounded_once() -> None:
    x, bias = floats(2, 8).astype(np.float16), floats(8, seed=1).astype(np.float16)
    wide = x.astype(np.float64) + bias
    expected = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    check("FastGelu", [x, bias], domain=CONTRIBUTED, oracle=[expected.astype(np.float16)], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("skip", [(2, 3, 40), (1, 3, 40), (3, 40)])
@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_skip_layer_normalization(skip: tuple[int, ...], beta: bool, bias: bool) -> None:
    inputs = [floats(2, 3, 40), floats(*skip, seed=1), floats(40, seed=2)]
    inputs += [floats(40, seed=3) if beta else None, floats(40, seed=4) if bias else None]
    check("SkipLayerNormalization", inputs, domain=CONTRIBUTED, outputs=["y", "", "", "s"], rtol=1e-5, atol=1e-5)
    check("SkipLayerNormalization", inputs, domain=CONTRIBUTED, epsilon=0.1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_skip_simplified_layer_normalization(bias: bool) -> None:
    inputs = [floats(2, 3, 40), floats(3, 40, seed=1), floats(40, seed=2), floats(40, seed=4) if bias else None]
    op = "SkipSimplifiedLayerNormalization"
    check(op, inputs, domain=CONTRIBUTED, outputs=["y", "", "", "s"], rtol=1e-5, atol=1e-5)
    check(op, inputs, domain=CONTRIBUTED, epsilon=0.1, rtol=1e-5, atol=1e-5)


def test_statistics_of_a_skip_layer_normalization() -> None:
    x, skip, gamma = floats(2, 3, 40), floats(2, 3, 40, seed=1), floats(40, seed=2)
    total = x.astype(np.float64) + skip
    mean, inverse = total.mean(-1, keepdims=True), 1 / np.sqrt(total.var(-1, keepdims=True) + 1e-12)
    expected = [((total - mean) * inverse * gamma), mean, inverse]
    check(
        "SkipLayerNormalization", [x, skip, gamma], domain=CONTRIBUTED, outputs=3,
        oracle=[e.astype(np.float32) for e in expected], rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_simplified_layer_normalization() -> None:
    check("SimplifiedLayerNormalization", [floats(2, 3, 40), floats(40, seed=1)], outputs=2, opset=17, rtol=1e-5)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("positions", [None, 1, 2])
def test_embed_layer_normalization(segments: bool, mask: bool, positions: int | None) -> None:
    rng = np.random.default_rng(1)

    def numbers(top: int, rows: int = 2) -> np.ndarray:
        return rng.integers(0, top, (rows, 3)).astype(np.int32)

    inputs = [
        numbers(5), numbers(2) if segments else None, floats(5, 8), floats(4, 8, seed=1),
        floats(2, 8, seed=2) if segments else None, floats(8, seed=3), floats(8, seed=4),
        numbers(3) if mask else None, numbers(4, positions) if positions else None,
    ]  # fmt: skip
    for outputs in (2, 3):
        check("EmbedLayerNormalization", inputs, domain=CONTRIBUTED, outputs=outputs, rtol=1e-5, atol=1e-5)


def test_an_embedding_that_is_not_there() -> None:
    inputs = [
        np.array([[7]], np.int32), None, floats(5, 8), floats(4, 8, seed=1), None, floats(8, seed=3), floats(8, seed=4),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="from 7 to 7, the table has 5"):
        check("EmbedLayerNormalization", inputs, domain=CONTRIBUTED, outputs=2, oracle=[floats(1, 1, 8), np.zeros(1)])


@pytest.mark.parametrize("i", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, 4])
def test_skip_layer_normalization_with_too_few_numbers(i: int, elements: int) -> None:
    given = [np.ones((2, 3, 8), np.float32), np.ones((2, 3, 8), np.float32), *(np.ones(8, np.float32),) * 3]
    given[i] = np.ones(elements, np.float32)
    proto = helper.make_node("SkipLayerNormalization", list("xzgbs"), ["y"], domain=CONTRIBUTED)
    for library in (None, *(libraries() or ())):
        with pytest.raises(ValueError, match="does not fit rows of 8"):
            run_node(plain_node(proto, 1, given, ["float32"]), given, None, library)
