"""What nodes and crossings cost, in seconds: estimated from operators, shapes, dtypes; corrected by what was measured.

    node = CALL + max(bytes read and written / BYTES, floating point operations / FLOPS)

The rates are those of one core of today; what counts is how nodes compare with each other. A cost with an unknown part
(a symbolic dimension, counted as 1; an operator that is not known here) is a *lower bound*: good enough to balance
stages by, never a reason to move a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from outrider.providers.wire.dtypes import is_tensor, storage_bytes
from outrider.providers.wire.graph import Graph, Node, Shape, Value

FLOPS = 2e10  # floating point operations per second
BYTES = 8e9  # bytes per second
CALL = 3e-6  # seconds for calling a kernel, whatever it does
TRANSCENDENTAL = 20  # operations per element


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds that a node takes. `exact` is False for a lower bound."""

    seconds: float
    exact: bool


@dataclass(frozen=True)
class Crossing:
    """What the cut costs: `hop`, seconds for one more partition; `byte`, seconds for each byte between two workers."""

    hop: float
    byte: float


@dataclass(frozen=True)
class Costs:
    """All that a strategy weighs: a cost per node, bytes of the values whose size is known, and the crossings."""

    nodes: Sequence[NodeCost]
    nbytes: Mapping[str, int]
    crossing: Crossing


def value_bytes(value: Value) -> int | None:
    """Bytes of a tensor whose shape is static; None otherwise."""
    _, nbytes, exact = _size(value.dtype, value.shape)
    return nbytes if exact and value.dtype != "string" else None


def estimate(graph: Graph, crossing: Crossing, sizes: Mapping[str, int] | None = None) -> Costs:
    """The costs of a graph before anything ran. Constant nodes, which are computed once, cost nothing.

    `sizes`: of symbolic dimensions, as far as they are known.
    """
    nodes = [_sized(node, sizes) for node in graph.nodes] if sizes else graph.nodes
    known: dict[str, int | None] = {}
    for node in nodes:
        known.update((value.name, value_bytes(value)) for value in node.outputs)
    return Costs(
        [node_cost(node) for node in nodes],
        {name: nbytes for name, nbytes in known.items() if nbytes is not None},
        crossing,
    )


def node_cost(node: Node) -> NodeCost:
    """The estimate for one node."""
    if node.outputs and all(value.constant for value in node.outputs if value.name):
        return NodeCost(0.0, True)
    if node.domain in ("", "ai.onnx") and node.op_type in _VIEWS:
        return NodeCost(CALL, True)
    moved, exact = 0, True
    for value in (*node.inputs, *node.outputs):
        if value.name:
            _, nbytes, known = _size(value.dtype, value.shape)
            moved += nbytes
            exact = exact and known
    operations, counted = _operations(node)
    return NodeCost(CALL + max(moved / BYTES, operations / FLOPS), exact and counted)


def measured(costs: Costs, groups: Iterable[tuple[Sequence[int], float]]) -> Costs:
    """`costs` with what was measured put in: `groups` are nodes (positions) with the seconds they took together.

    The seconds of a group are shared out in proportion to the estimates. They are exact as a sum, which is what is
    compared: a strategy weighs partitions and parts of them, not single nodes.
    """
    nodes = list(costs.nodes)
    for positions, seconds in groups:
        whole = sum(nodes[position].seconds for position in positions)
        for position in positions:
            share = nodes[position].seconds / whole if whole else 1 / len(positions)
            nodes[position] = NodeCost(seconds * share, True)
    return Costs(nodes, costs.nbytes, costs.crossing)


def _sized(node: Node, sizes: Mapping[str, int]) -> Node:
    """The node with sizes for symbols."""

    def sized(value: Value) -> Value:
        if value.shape is None or all(isinstance(dim, int) for dim in value.shape):
            return value
        dims = tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in value.shape)
        return replace(value, shape=dims)

    return replace(node, inputs=tuple(map(sized, node.inputs)), outputs=tuple(map(sized, node.outputs)))


@lru_cache(maxsize=4096)
def _size(dtype: str, shape: Shape) -> tuple[int, int, bool]:
    """How many elements and bytes, at least, and whether that is exact. A string, or what is no tensor, is a byte."""
    dims = [dim for dim in shape or () if isinstance(dim, int)]
    count = math.prod(dims)
    exact = shape is not None and len(dims) == len(shape) and is_tensor(dtype)
    return count, storage_bytes(dtype, count) if is_tensor(dtype) and dtype != "string" else count, exact


def _elements(value: Value) -> tuple[int, bool]:
    """How many elements, at least, and whether that is exact."""
    count, _, exact = _size(value.dtype, value.shape)
    return count, exact


def _operations(node: Node) -> tuple[int, bool]:
    """Floating point operations, at least, and whether all are counted."""
    if node.domain not in ("", "ai.onnx") or node.op_type in _UNCOUNTED or next(node.bodies(), None) is not None:
        return 0, False
    count = _COUNTED.get(node.op_type)
    if count is not None:
        return count(node)
    elements, exact = _elements(node.outputs[0]) if node.outputs else (0, True)
    return elements * (TRANSCENDENTAL if node.op_type in _TRANSCENDENTAL else 1), exact


def _dims(node: Node, position: int) -> tuple[list[int], bool]:
    """Dimensions of an input, unknown ones as 1."""
    if position >= len(node.inputs) or node.inputs[position].shape is None:
        return [1], False
    shape = node.inputs[position].shape or ()
    return [dim if isinstance(dim, int) else 1 for dim in shape], all(isinstance(dim, int) for dim in shape)


def _convolution(weight: int) -> Callable[[Node], tuple[int, bool]]:
    def count(node: Node) -> tuple[int, bool]:
        dims, known = _dims(node, weight)
        elements, exact = _elements(node.outputs[0])
        return 2 * elements * math.prod(dims[1:]), known and exact

    return count


def _transposed_convolution(node: Node) -> tuple[int, bool]:
    dims, known = _dims(node, 1)
    elements, exact = _elements(node.inputs[0])
    return 2 * elements * math.prod(dims[1:]), known and exact


def _product(node: Node) -> tuple[int, bool]:
    dims, known = _dims(node, 0)
    inner = dims[0] if node.attributes.get("transA") and len(dims) > 1 else (dims or [1])[-1]
    elements, exact = _elements(node.outputs[0])
    return 2 * elements * inner, known and exact


def _recurrent(node: Node) -> tuple[int, bool]:
    x, known = _dims(node, 0)
    w, w_known = _dims(node, 1)
    r, r_known = _dims(node, 2)
    return 2 * math.prod(x[:2]) * (math.prod(w) + math.prod(r)), known and w_known and r_known


def _pool(node: Node) -> tuple[int, bool]:
    elements, exact = _elements(node.outputs[0])
    return elements * math.prod(node.attributes.get("kernel_shape", ())), exact


def _einsum(node: Node) -> tuple[int, bool]:
    """Two operations for each combination of all labels, as a loop over them would do."""
    terms = str(node.attributes.get("equation", "")).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    exact = "..." not in "".join(terms) and len(terms) == len(node.inputs)
    for position, term in enumerate(terms[: len(node.inputs)]):
        dims, known = _dims(node, position)
        exact = exact and known and len(dims) == len(term)
        for label, dim in zip(term, dims, strict=False):
            sizes[label] = max(dim, sizes.get(label, 1))
    return 2 * math.prod(sizes.values()), exact


_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Size"})
_UNCOUNTED = frozenset({"If", "Loop", "Scan", "SequenceMap", "Attention", "DFT", "STFT"})
_TRANSCENDENTAL = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Gelu", "Log",
    "LogSoftmax", "Mish", "Pow", "ReduceLogSumExp", "Selu", "Sigmoid", "Sin", "Sinh", "Softmax", "Softplus", "Swish",
    "Tan", "Tanh",
})  # fmt: skip
_COUNTED: Mapping[str, Callable[[Node], tuple[int, bool]]] = {
    "Conv": _convolution(1), "ConvInteger": _convolution(1), "QLinearConv": _convolution(3),
    "DeformConv": _convolution(1), "ConvTranspose": _transposed_convolution, "MatMul": _product, "Gemm": _product,
    "MatMulInteger": _product, "QLinearMatMul": _product, "LSTM": _recurrent, "GRU": _recurrent, "RNN": _recurrent,
    "AveragePool": _pool, "MaxPool": _pool, "LpPool": _pool, "Einsum": _einsum,
}  # fmt: skip
