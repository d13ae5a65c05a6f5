"""Products of 8-bit integers of any shape: both implementations equal int64 sums to the last bit, whatever the form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import identical, plain_node, run_node
from onnx import helper

from outrider.providers.cpu.kernels.narrow import narrow
from tests.native_library import libraries

KINDS = ["uint8", "int8"]
SPREADS = [2, 12, 26, 45, 1000]  # of the weights: from those that always fit 16-bit sums to those that seldom do


def values(rng: np.random.Generator, dtype: str, spread: float, *shape: int) -> np.ndarray:
    """Normal around the middle of the range, saturated."""
    info = np.iinfo(dtype)
    middle = (int(info.max) + int(info.min) + 1) // 2
    return np.clip(np.rint(rng.normal(middle, spread, shape)), info.min, info.max).astype(dtype)


def every_way(op_type: str, inputs: list[Any], dtype: str, domain: str = "", **attributes: Any) -> np.ndarray:
    """The result in NumPy; the compiled ones, bound and immediate, on one thread and on several, have its bits."""
    inputs = [None if x is None else np.asarray(x) for x in inputs]
    proto = helper.make_node(
        op_type, [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)], ["y"], domain=domain, **attributes
    )
    node = plain_node(proto, 21, inputs, [dtype])
    result = run_node(node, inputs)
    consts = tuple(range(1, len(node.inputs)))
    for library in libraries() or ():
        for known in (None, (), consts):
            identical(result, run_node(node, inputs, known, library), f"{op_type}, known {known}")
    array: np.ndarray = result[0]
    return array


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 30),
    depth=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 31, 64, 130, 600]),
    columns=st.sampled_from([1, 3, 8, 15, 16, 17, 40]),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    zeros=st.tuples(st.sampled_from(["none", "one", "each"]), st.sampled_from(["none", "one", "each"])),
    spread=st.sampled_from(SPREADS),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    joint=st.booleans(),
)
def test_matmul_integer(
    seed: int, rows: int, depth: int, columns: int, kinds: tuple[str, str], zeros: tuple[str, str], spread: float,
    batch: tuple[int, ...], joint: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    x = values(rng, kinds[0], 1000, *batch, rows, depth)
    w = values(rng, kinds[1], spread, *(() if joint else batch), depth, columns)
    shapes: dict[str, tuple[int, ...]] = {"one": ()}
    points: list[np.ndarray | None] = []
    for kind, how, size in zip(kinds, zeros, (rows, columns), strict=True):
        shape = shapes.get(how, (size,))
        points.append(None if how == "none" else values(rng, kind, 1000, *shape))
    wide = [
        x.astype(np.int64) - (0 if points[0] is None else points[0].astype(np.int64).reshape(-1, 1)),
        w.astype(np.int64) - (0 if points[1] is None else points[1].astype(np.int64)),
    ]
    inputs = [x, w, *points]
    while inputs[-1] is None:
        inputs.pop()
    got = every_way("MatMulInteger", inputs, "int32")
    np.testing.assert_array_equal(got, wide[0] @ wide[1])


@settings(deadline=None, derandomize=True, max_examples=35)
@given(
    seed=st.integers(0, 2**32),
    spatial=st.sampled_from([(9,), (7, 6), (1, 5), (6, 11)]),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    pad=st.integers(0, 2),
    group=st.sampled_from([(1, 3, 5), (1, 16, 20), (2, 4, 3), (6, 1, 1), (19, 1, 1), (3, 1, 2)]),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    by_feature=st.booleans(),
    spread=st.sampled_from(SPREADS),
)
def test_convolutions(
    seed: int, spatial: tuple[int, ...], kernel: int, stride: int, dilation: int, pad: int,
    group: tuple[int, int, int], kinds: tuple[str, str], by_feature: bool, spread: float,
) -> None:  # fmt: skip
    rng, rank = np.random.default_rng(seed), len(spatial)
    groups, channels, per_group = group
    features = groups * per_group
    reach = [min(kernel, (size + 2 * pad - 1) // dilation + 1) for size in spatial]
    x = values(rng, kinds[0], 1000, 2, groups * channels, *spatial)
    w = values(rng, kinds[1], spread, features, channels, *reach)
    zx = values(rng, kinds[0], 1000)
    zw = values(rng, kinds[1], 20, *((features,) if by_feature else ()))
    attributes: dict[str, Any] = {
        "strides": [stride] * rank, "dilations": [dilation] * rank, "pads": [pad] * (2 * rank), "group": groups
    }  # fmt: skip
    expected = sums(x, w, zx, zw, attributes)
    np.testing.assert_array_equal(every_way("ConvInteger", [x, w, zx, zw], "int32", **attributes), expected)
    scales = [np.asarray(rng.uniform(0.01, 0.02, zw.shape), np.float32), np.float32(rng.uniform(0.05, 5))]
    bias = rng.integers(-(2**20), 2**20, features).astype(np.int32)
    zy = values(rng, kinds[0], 1000)
    inputs = [x, np.float32(0.02), zx, w, scales[0], zw, scales[1], zy, bias]
    got = every_way("QLinearConv", inputs, kinds[0], **attributes)
    column = (features,) + (1,) * rank
    scale = (np.float32(0.02) * scales[0] / scales[1]).reshape(column if by_feature else ())
    value = np.rint((expected + bias.reshape(column)).astype(np.float32) * scale) + zy.astype(np.float32)
    info = np.iinfo(kinds[0])
    np.testing.assert_array_equal(got, np.clip(value, info.min, info.max).astype(kinds[0]))


def sums(x: np.ndarray, w: np.ndarray, zx: np.ndarray, zw: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """The convolution in int64, tap by tap."""
    rank = x.ndim - 2
    pad, stride, dilation, groups = (attributes[key] for key in ("pads", "strides", "dilations", "group"))
    wide = np.pad(x.astype(np.int64) - zx.astype(np.int64), [(0, 0), (0, 0), *zip(pad[:rank], pad[rank:], strict=True)])
    weights = w.astype(np.int64) - zw.astype(np.int64).reshape((-1,) + (1,) * (rank + 1))
    out = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, d, s in zip(wide.shape[2:], w.shape[2:], dilation, stride, strict=True)
    ]  # fmt: skip
    total = np.zeros((x.shape[0], groups, w.shape[0] // groups, *out), np.int64)
    split = wide.reshape(x.shape[0], groups, -1, *wide.shape[2:])
    parts = weights.reshape(groups, -1, *w.shape[1:])
    for tap in np.ndindex(*w.shape[2:]):
        places = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilation, out, stride, strict=True)
        )
        window = split[(slice(None),) * 3 + places]
        total += np.einsum("ngc...,gmc->ngm...", window, parts[(slice(None),) * 3 + tap])
    return total.reshape(x.shape[0], -1, *out)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("spread", SPREADS)
def test_narrow_weights_never_overflow(dtype: str, spread: float) -> None:
    rng = np.random.default_rng(3)
    w, zero = values(rng, dtype, spread, 2, 45, 20), values(rng, dtype, 20, 2, 20)
    found = narrow(w, zero)
    assert (found is None) == (spread > 40)  # then 16 bits for each weight cost less
    if found is None:
        return
    panels = found.panels.astype(np.int64)
    whole = panels.copy()
    for panel, (first, last) in enumerate(zip(found.first, found.first[1:], strict=False)):
        for i in range(first, last):
            whole[panel, found.at[i]] += found.extra[i]
    shifted = w.astype(np.int64) - (128 if dtype == "uint8" else 0)
    unpacked = whole.reshape(2, 2, -1, 16, 4).transpose(0, 2, 4, 1, 3).reshape(2, -1, 32)
    np.testing.assert_array_equal(unpacked[:, :45, :20], shifted)
    octets = panels[:, : 2 * found.octets].reshape(4, found.octets, 2, 16, 2, 2)
    pairs = [panels.reshape(4, -1, 16, 2, 2), found.extra.astype(np.int64).reshape(1, -1, 16, 2, 2)]
    meeting = [octets.transpose(0, 1, 3, 4, 2, 5).reshape(-1, 4), *(pair.reshape(-1, 2) for pair in pairs)]
    for together in meeting:
        assert np.maximum(together, 0).sum(axis=-1).max(initial=0) * 255 < 2**15
        assert np.minimum(together, 0).sum(axis=-1).min(initial=0) * 255 >= -(2**15)
