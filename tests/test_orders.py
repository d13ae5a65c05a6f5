"""Memory orders: shapes stay ONNX's, the memory of a value may have its axes in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.cpu.kernels.frame import Bind, channels_last, kernel, order_of, ordered
from tests.program_harness import model, run_cpu

pytestmark = pytest.mark.fast

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
SEEN: list[tuple[tuple[int, ...], bool]] = []


def _copy(x: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, x)


@kernel("Last", domain="test.orders")
def last(b: Bind, _: None) -> None:
    """The input with its channels last in memory."""
    x = b.array(0)
    b.step(_copy, x, b.out(0, x.shape, x.dtype, channels_last(x.ndim)))


@kernel("Look", domain="test.orders")
def look(b: Bind, _: None) -> None:
    """Twice the input, over the input where that dies; notes its strides, and whether the memory was the same."""
    x = b.array(0)
    y = b.reuse(0, 0)
    SEEN.append((x.strides, y.ctypes.data == x.ctypes.data))
    b.step(np.add, x, x, y)


def run(text: str) -> list[Any]:
    SEEN.clear()
    return run_cpu(model(text, **{"test.orders": 1}), {"x": X})


def test_a_reused_value_keeps_its_order() -> None:
    (y,) = run("""agraph (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) {
        a = test.orders.Last(x) b = test.orders.Look(a) y = test.orders.Look(b) }""")
    assert SEEN[0] == ((240, 4, 60, 12), True)
    assert y.flags.c_contiguous
    np.testing.assert_array_equal(y, 4 * X)


def test_an_output_of_the_unit_is_in_c_order() -> None:
    a, b = run("""agraph (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] a, float[2, 3, 4, 5] b) {
        a = test.orders.Last(x) b = test.orders.Look(a) }""")
    assert SEEN[-1] == ((240, 80, 20, 4), False)
    np.testing.assert_array_equal(a, X)
    np.testing.assert_array_equal(b, 2 * X)


def test_what_follows_takes_any_order() -> None:
    text = """agraph (float[2, 3, 4, 5] x) => (float[2, 60] flat, float[2, 5, 4, 3] turned) <int64[2] to = {2, 60}> {
        a = test.orders.Last(x) flat = Reshape(a, to)
        b = test.orders.Look(a) turned = Transpose<perm = [0, 3, 2, 1]>(b) }"""
    flat, turned = run(text)
    np.testing.assert_array_equal(flat, X.reshape(2, 60))
    np.testing.assert_array_equal(turned, 2 * X.transpose(0, 3, 2, 1))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_an_order_is_found_again(shape: list[int], random: Any) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    x = ordered(tuple(shape), order, np.empty)
    assert x.shape == tuple(shape)
    assert x.transpose(order).flags.c_contiguous
    found = order_of(x)
    if found is None:
        assert x.flags.c_contiguous
    else:
        assert x.transpose(found).flags.c_contiguous
    part = x[..., ::2]
    found = order_of(part)
    assert part.flags.c_contiguous or found is None or part.transpose(found).flags.c_contiguous
