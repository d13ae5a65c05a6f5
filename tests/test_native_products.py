"""Products and convolutions in C at the sizes where tiles, panels, blocks and edges meet: against float64.

`check` runs each in NumPy and compiled, as one task and as many, and compares the compiled bits of both and of both
memory orders of the inputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import check

RNG = np.random.default_rng(21)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def _batches(data: st.DataObject) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two batch shapes that broadcast."""
    whole = [data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(0, 2)))]
    left, right = ([data.draw(st.sampled_from([n, 1])) for n in whole] for _ in range(2))
    return tuple(left), tuple(right[data.draw(st.integers(0, len(right))) :])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_products_of_any_shape(data: st.DataObject) -> None:
    rows, depth = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 200))
    columns = data.draw(st.one_of(st.integers(1, 9), st.integers(10, 120)))
    left, right = _batches(data)
    a, b = floats(*left, rows, depth), floats(*right, depth, columns)
    attributes: dict[str, Any] = {"activation": data.draw(st.sampled_from(["", "Relu", "HardSwish"]))}
    expected = a.astype(np.float64) @ b.astype(np.float64)
    operands: list[np.ndarray | None] = [floats(columns) if data.draw(st.booleans()) else None]
    if operands[0] is not None:
        expected = expected + operands[0]
    residual = data.draw(st.sampled_from(["", "before", "after"]))
    if residual:
        operands.append(floats(*expected.shape))
        attributes["residual"] = residual
    if residual == "before":
        expected = expected + operands[1]
    if attributes["activation"] == "Relu":
        expected = np.maximum(expected, 0)
    elif attributes["activation"]:
        expected = expected * np.clip(expected / 6 + 0.5, 0, 1)
    if residual == "after":
        expected = expected + operands[1]
    inputs = [a, b, *operands]
    for name, axis in (("transA", 0), ("transB", 1)):
        if data.draw(st.booleans()):
            attributes[name] = 1
            inputs[axis] = np.ascontiguousarray(inputs[axis].swapaxes(-1, -2))
    bound = 1e-6 * math.sqrt(depth) * 8 + 1e-6
    known = data.draw(st.sampled_from([None, range(1, len(inputs))]))
    check(
        "MatMul", inputs, domain="outrider", oracle=[expected.astype(np.float32)], rtol=1e-5, atol=bound,
        consts=known, **attributes,
    )  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.data())
def test_convolutions_of_any_shape(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 2))
    kernel = [data.draw(st.integers(1, 5)) for _ in range(rank)]
    strides = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    dilations = [data.draw(st.sampled_from([1, 1, 2])) for _ in range(rank)]
    pads = [data.draw(st.integers(0, 4)) for _ in range(2 * rank)]
    spatial = [(k - 1) * d + data.draw(st.integers(1, 14)) for k, d in zip(kernel, dilations, strict=True)]
    group = data.draw(st.sampled_from([1, 1, 1, 2]))
    channels, features = data.draw(st.integers(1, 40)), data.draw(st.one_of(st.integers(1, 9), st.integers(10, 60)))
    x = floats(data.draw(st.integers(1, 2)), group * channels, *spatial)
    w = floats(group * features, channels, *kernel)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    bound = 1e-6 * math.sqrt(channels * math.prod(kernel)) * 8
    check("Conv", [x, w, floats(len(w))], rtol=1e-5, atol=bound, consts=(1, 2), **attributes)


def _padded(x: np.ndarray, pads: list[int], values: np.ndarray) -> np.ndarray:
    height, width = x.shape[2:]
    y = np.empty((*x.shape[:2], height + pads[0] + pads[2], width + pads[1] + pads[3]), x.dtype)
    y[...] = values[:, None, None]
    y[:, :, pads[0] : pads[0] + height, pads[1] : pads[1] + width] = x
    return y


def test_values_beyond_the_edges() -> None:
    for channels, group, attributes in [(5, 1, {}), (4, 2, {}), (6, 6, {}), (3, 1, {"dilations": [2, 1]})]:
        x, w, values = floats(2, channels, 7, 8), floats(12, channels // group, 3, 3), floats(channels)
        pads = [1, 2, 2, 1]
        plain = check("Conv", [_padded(x, pads, values), w], group=group, rtol=1e-5, atol=2e-5, **attributes)
        check(
            "Conv", [x, w, None, None, None, None, values], domain="outrider", oracle=plain, group=group, pads=pads,
            rtol=1e-5, atol=2e-5, **attributes,
        )  # fmt: skip


def test_what_is_not_finite_stays_in_its_own_windows() -> None:
    for features in (1, 8, 20):
        x, w = floats(1, 6, 9, 20), floats(features, 6, 3, 3)
        x[0, 2, 4, 9], x[0, 3, 6, 15] = np.inf, np.nan
        check("Conv", [x, w], pads=[1, 1, 1, 1], rtol=1e-5, atol=2e-5)
