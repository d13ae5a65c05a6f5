"""The models that benches run: chains whose links are pinned to workers in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from outrider.scheduler import Fleet, InferenceSession, SessionOptions

Shape = Sequence[int | str]


def relu_chain(length: int, shape: Shape, op_type: str = "Relu") -> onnx.ModelProto:
    """`length` nodes `n0` ... of one operator, float32, one after the other, from `x` to `y`."""
    names = ["x", *(f"v{i}" for i in range(1, length)), "y"]
    nodes = [helper.make_node(op_type, [names[i]], [names[i + 1]], name=f"n{i}") for i in range(length)]
    return _model(nodes, shape, [])


def matmul_chain(length: int, size: int) -> onnx.ModelProto:
    """`length` products `n0` ... of a (size, size) float32 matrix; the weights are orthogonal, so values stay small."""
    rng = np.random.default_rng(0)
    names = ["x", *(f"v{i}" for i in range(1, length)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"n{i}") for i in range(length)]
    weights = []
    for i in range(length):
        orthogonal, _ = np.linalg.qr(rng.standard_normal((size, size)))
        weights.append(numpy_helper.from_array(orthogonal.astype(np.float32), f"w{i}"))
    return _model(nodes, [size, size], weights)


def dealt(length: int, workers: Sequence[str], together: int = 1) -> dict[str, str]:
    """Pins: stretches of `together` nodes in turn to each of `workers`."""
    return {f"n{i}": workers[i // together % len(workers)] for i in range(length)}


@contextlib.contextmanager
def session(
    model: onnx.ModelProto, fleet: Fleet, pins: Mapping[str, str] | None = None, **options: Any
) -> Iterator[InferenceSession]:
    """A session on a shared fleet."""
    with InferenceSession(model, options=SessionOptions(fleet=fleet, pins=dict(pins or {}), **options)) as made:
        yield made


def runs_of(
    made: InferenceSession, feed: Mapping[str, Any], names: Sequence[str] | None = None
) -> Callable[[], list[Any]]:
    """A run on always the same feed."""
    return lambda: made.run(names, feed)


def zeros(nbytes: int) -> np.ndarray[Any, Any]:
    """So many bytes of float32 zeros, in one dimension."""
    return np.zeros(nbytes // 4, np.float32)


def _model(nodes: Sequence[onnx.NodeProto], shape: Shape, weights: Sequence[onnx.TensorProto]) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
