"""A view and a copy of it give the same bits, so where a model is cut does not show in its results.

Inside a unit a Transpose is a view, across units its result arrives as a contiguous copy. numpy and BLAS choose other
routines for other strides (GEMV for one row or column, pairwise sums along the contiguous axis); kernels must not let
that through.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.program_harness import run_cpu

RNG = np.random.default_rng(0)
Case = tuple[str, list[np.ndarray | None], dict[int, tuple[int, ...]], dict[str, Any]]


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def build(case: Case, viewed: bool, opset: int = 23) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The node, with the inputs that have a permutation made by a Transpose (`viewed`) or fed as they are."""
    op, inputs, orders, attributes = case
    nodes, names, infos, feeds, constants = [], [], [], {}, []
    for i, x in enumerate(inputs):
        names.append("" if x is None else f"x{i}")
        if x is None:
            continue
        if i not in orders:
            constants.append(numpy_helper.from_array(x, names[-1]))
            continue
        feed, source = x, names[-1]
        if viewed:
            feed, source = np.ascontiguousarray(x.transpose(np.argsort(orders[i]))), f"i{i}"
            nodes.append(helper.make_node("Transpose", [source], names[-1:], perm=orders[i]))
        feeds[source] = feed
        infos.append(helper.make_tensor_value_info(source, TensorProto.FLOAT, feed.shape))
    nodes.append(helper.make_node(op, names, ["y"], **attributes))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "strides", infos, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), feeds


def images() -> Iterator[Case]:
    for channels, height in itertools.product((1, 8), (1, 7)):
        x = floats(2, channels, height, 16)
        for order, filters, kernel in itertools.product(((0, 3, 1, 2), (0, 1, 3, 2)), (1, 4), (1, 3)):
            pads = {"pads": [kernel // 2] * 4}
            w = floats(filters, channels, kernel, kernel)
            yield "Conv", [x, w], {0: order}, pads
            yield "Conv", [x, w], {0: order, 1: (0, 2, 3, 1)}, {**pads, "strides": [2, 2]}
            yield "Conv", [x, floats(channels, 1, kernel, kernel)], {0: order}, {**pads, "group": channels}
            yield "ConvTranspose", [x, floats(channels, filters, kernel, kernel)], {0: order}, {}
        scale, shift = floats(channels), floats(channels)
        order = (2, 0, 1, 3)
        yield "GlobalAveragePool", [x], {0: order}, {}
        yield "AveragePool", [x], {0: order}, {"kernel_shape": [1, 3]}
        yield "LpPool", [x], {0: order}, {"kernel_shape": [1, 3]}
        yield "BatchNormalization", [x, scale, shift, shift, np.abs(scale)], {0: order}, {}
        yield "InstanceNormalization", [x, scale, shift], {0: order}, {}
        yield "GroupNormalization", [x, scale, shift], {0: order}, {"num_groups": 1}
        yield "LayerNormalization", [x, floats(16)], {0: order}, {}
        yield "LayerNormalization", [x, floats(height, 16)], {0: order}, {"axis": 2}
        yield "RMSNormalization", [x, floats(16)], {0: order}, {}
        yield "LRN", [x], {0: order}, {"size": 3}
        yield "LpNormalization", [x], {0: order}, {"axis": 1}
        yield "MeanVarianceNormalization", [x], {0: order}, {}
        for axis in (1, 3):
            yield "Softmax", [x], {0: order}, {"axis": axis}
            yield "LogSoftmax", [x], {0: order}, {"axis": axis}
        for reduce, axes in itertools.product(("ReduceSum", "ReduceMean", "ReduceL2"), ([1], [3], [0, 2], [2, 3])):
            yield reduce, [x, np.array(axes)], {0: order}, {}


def products() -> Iterator[Case]:
    for rows, depth, columns in itertools.product((1, 2, 33), (4, 31), (1, 3, 64)):
        x, w = floats(3, rows, depth), floats(depth, columns)
        yield "MatMul", [x, w], {0: (1, 0, 2)}, {}
        yield "MatMul", [x, w], {0: (0, 2, 1), 1: (1, 0)}, {}
        yield "MatMul", [x, floats(3, depth, columns)], {0: (0, 2, 1), 1: (0, 2, 1)}, {}
        yield "MatMul", [x, floats(depth)], {0: (0, 2, 1)}, {}
        yield "Gemm", [x[0], w, floats(columns)], {0: (1, 0), 1: (1, 0)}, {}
        yield "Gemm", [x[0].T.copy(), w.T.copy()], {0: (1, 0)}, {"transA": 1, "transB": 1}
        yield "Einsum", [x, floats(3, depth, columns)], {0: (0, 2, 1), 1: (0, 2, 1)}, {"equation": "bij,bjk->bik"}
        yield "Einsum", [x, x], {0: (0, 2, 1), 1: (0, 2, 1)}, {"equation": "bij,bij->b"}


def recurrent() -> Iterator[Case]:
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for steps, batch, width in itertools.product((1, 5), (1, 3), (1, 4)):
            weights = [floats(1, gates * 16, width), floats(1, gates * 16, 16)]
            yield op, [floats(steps, batch, width), *weights], {0: (1, 2, 0)}, {"hidden_size": 16}


@pytest.mark.parametrize("cases", [images, products, recurrent])
def test_strides_do_not_show_in_the_bits(cases: Any) -> None:
    wrong = []
    for case in cases():
        viewed, plain = (run_cpu(*build(case, flag))[0] for flag in (True, False))
        if viewed.tobytes() != plain.tobytes():
            wrong.append((case[0], [None if x is None else x.shape for x in case[1]], case[2], case[3]))
    assert not wrong
