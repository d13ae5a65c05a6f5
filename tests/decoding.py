"""A small decoder with a growing past, as exporters write it, and random graphs whose dimensions are symbols."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.builders import model, node, tensor

WIDTH, HEADS, EACH = 32, 4, 8


def decoder(seed: int = 0) -> onnx.ModelProto:
    """One layer: x [B, 1, 32], k and v [B, 4, P, 8] -> y, and k and v with one more position.

    The shapes of the reshapes come from `Shape`, the position bias from a `Range` of the new length.
    """
    rng = np.random.default_rng(seed)
    sizes = {"wq": 32, "wk": 32, "wv": 32, "wo": 32, "up": 64}
    constants = {name: 0.2 * rng.standard_normal((WIDTH, size)).astype(np.float32) for name, size in sizes.items()}
    constants |= {
        "down": 0.2 * rng.standard_normal((64, WIDTH)).astype(np.float32),
        "gain": np.ones(WIDTH, np.float32),
        "scale": np.array(EACH**-0.5, np.float32),
        "zero": np.array(0), "one": np.array(1), "two": np.array(2),
        "first": np.array([0]), "rest": np.array([-1]), "heads": np.array([HEADS]),
        "each": np.array([EACH]), "width": np.array([WIDTH]),
    }  # fmt: skip
    nodes = [
        node("LayerNormalization", "x gain", "n"),
        node("Shape", "n", "dims"), node("Gather", "dims zero", "b"), node("Unsqueeze", "b first", "batch"),
        node("Concat", "batch rest heads each", "split", axis=0), node("Concat", "batch rest width", "joined", axis=0),
    ]  # fmt: skip
    for each in "qkv":
        nodes += [
            node("MatMul", f"n w{each}", f"{each}0"), node("Reshape", f"{each}0 split", f"{each}1"),
            node("Transpose", f"{each}1", f"{each}2", perm=[0, 2, 1, 3]),
        ]  # fmt: skip
    nodes += [
        node("Concat", "k k2", "new_k", axis=2), node("Concat", "v v2", "new_v", axis=2),
        node("Transpose", "new_k", "kt", perm=[0, 1, 3, 2]), node("MatMul", "q2 kt", "s0"),
        node("Mul", "s0 scale", "s1"),
        node("Shape", "new_k", "kdims"), node("Gather", "kdims two", "length"),
        node("Range", "zero length one", "at"), node("Cast", "at", "bias", to=TensorProto.FLOAT),
        node("Add", "s1 bias", "s2"), node("Softmax", "s2", "a", axis=-1), node("MatMul", "a new_v", "c0"),
        node("Transpose", "c0", "c1", perm=[0, 2, 1, 3]), node("Reshape", "c1 joined", "c2"),
        node("MatMul", "c2 wo", "o"), node("Add", "x o", "r"),
        node("LayerNormalization", "r gain", "m", "mlp"), node("MatMul", "m up", "u0"), node("Relu", "u0", "u1"),
        node("MatMul", "u1 down", "d"), node("Add", "r d", "y"),
    ]  # fmt: skip
    past, present = ["B", HEADS, "P", EACH], ["B", HEADS, "P1", EACH]
    return model(
        nodes,
        [tensor("x", ["B", 1, WIDTH]), tensor("k", past), tensor("v", past)],
        [tensor("y", ["B", 1, WIDTH]), tensor("new_k", present), tensor("new_v", present)],
        constants,
    )


UNARY = ("Neg", "Relu", "Abs", "Identity", "Sigmoid")
BINARY = ("Add", "Mul", "Sub", "Max")
CONSTANTS = {
    "zero": 0, "one": 1, "two": 2, "first": [0], "last": [-1], "back": [-1], "far": [-1000], "flat": [-1],
    "trips": 2,
}  # fmt: skip


class _Random:
    """A graph in the making: values by the symbols of their two dimensions."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.values = {"x": ("N", "M"), "z": ("N", "M"), "w": ("M", "N")}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def add(self, op: str, inputs: str, **attributes: object) -> str:
        out = self.name()
        self.nodes.append(node(op, inputs, out, **attributes))
        return out

    def pick(self, *shapes: tuple[str, str]) -> str:
        """A value, of one of these shapes if any are given."""
        fitting = [name for name, shape in self.values.items() if not shapes or shape in shapes]
        return str(self.draw(st.sampled_from(fitting)))

    def grow(self) -> None:
        x = self.pick()
        kind = self.draw(st.sampled_from(sorted(KINDS)))
        out, shape = KINDS[kind](self, x, self.values[x])
        self.values[out] = shape


Shape2 = tuple[str, str]


def _unary(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    return r.add(r.draw(st.sampled_from(UNARY)), x), shape


def _binary(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    return r.add(r.draw(st.sampled_from(BINARY)), f"{x} {r.pick(shape)}"), shape


def _transpose(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    return r.add("Transpose", x, perm=[1, 0]), shape[::-1]


def _matmul(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    other = r.pick(*[s for s in set(r.values.values()) if s[0] == shape[1]])
    return r.add("MatMul", f"{x} {other}"), (shape[0], r.values[other][1])


def _centre(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    sums = r.add("ReduceSum", f"{x} last")
    return r.add("Sub", f"{x} {sums}"), shape


def _joined_and_cut(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    """Two values on top of each other, and one half of that, by the length that `Shape` says."""
    both = r.add("Concat", f"{x} {r.pick(shape)}", axis=0)
    rows = r.add("Shape", x, start=0, end=1)
    if r.draw(st.booleans()):
        return r.add("Slice", f"{both} first {rows} first"), shape
    twice = r.add("Shape", both, start=0, end=1)
    return r.add("Slice", f"{both} {rows} {twice} first"), shape


def _flat_and_back(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    flat, dims = r.add("Reshape", f"{x} flat"), r.add("Shape", x)
    return r.add("Reshape", f"{flat} {dims}", allowzero=1), shape


def _backwards(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    return r.add("Slice", f"{x} last far first back"), shape


def _expanded(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    row, dims = r.add("ReduceSum", f"{x} first"), r.add("Shape", x)
    return r.add("Expand", f"{row} {dims}"), shape


def _positions(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    dims = r.add("Shape", x)
    length = r.add("Gather", f"{dims} one")
    at = r.add("Cast", r.add("Range", f"zero {length} one"), to=TensorProto.FLOAT)
    return r.add("Add", f"{x} {at}"), shape


def _late(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    """Rows by a condition on contents: how many, only the run knows."""
    sums = r.add("ReduceSum", f"{x} last", keepdims=0)
    chosen = r.add("Greater", f"{sums} nought")
    rows = r.add("Compress", f"{x} {chosen}", axis=0)
    total = r.add("ReduceSum", f"{rows} first")
    return r.add("Add", f"{x} {total}"), shape


def _random(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    noise = r.add("RandomUniformLike", x, seed=3.0)
    return r.add("Add", f"{x} {noise}"), shape


def _branch(r: _Random, x: str, name: str, op: str) -> onnx.GraphProto:
    other = r.pick(r.values[x])
    inner, out = f"{name}i", f"{name}o"
    nodes = [node(op, f"{x} {other}", inner), node("Relu", inner, out)]
    return helper.make_graph(nodes, name, [], [tensor(out, None)])


def _if(r: _Random, x: str, shape: Shape2, condition: str) -> tuple[str, Shape2]:
    then, other = _branch(r, x, r.name(), "Add"), _branch(r, x, r.name(), "Sub")
    return r.add("If", condition, then_branch=then, else_branch=other), shape


def _if_long(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    """A condition on a length: known when the program is bound."""
    dims = r.add("Shape", x)
    rows = r.add("Gather", f"{dims} zero")
    return _if(r, x, shape, r.add("Greater", f"{rows} two"))


def _if_positive(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    """A condition on contents."""
    total = r.add("ReduceSum", x, keepdims=0)
    return _if(r, x, shape, r.add("Greater", f"{total} nought"))


def _loop(r: _Random, x: str, shape: Shape2) -> tuple[str, Shape2]:
    """carried = carried + captured, twice."""
    name = r.name()
    body = helper.make_graph(
        [node("Identity", f"{name}c", f"{name}d"), node("Add", f"{name}v {r.pick(shape)}", f"{name}u")],
        name,
        [tensor(f"{name}i", [], TensorProto.INT64), tensor(f"{name}c", [], TensorProto.BOOL), tensor(f"{name}v", None)],
        [tensor(f"{name}d", [], TensorProto.BOOL), tensor(f"{name}u", None)],
    )
    return r.add("Loop", f"trips - {x}", body=body), shape


KINDS: dict[str, Callable[[_Random, str, Shape2], tuple[str, Shape2]]] = {
    "unary": _unary, "binary": _binary, "transpose": _transpose, "matmul": _matmul, "centre": _centre,
    "cut": _joined_and_cut, "flat": _flat_and_back, "backwards": _backwards, "expand": _expanded,
    "positions": _positions, "late": _late, "random": _random, "if_long": _if_long, "if_positive": _if_positive,
    "loop": _loop,
}  # fmt: skip


@st.composite
def growing_graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """x, z [N, M] and w [M, N] through views, shape arithmetic, control flow and what only the run knows."""
    made = _Random(draw)
    for _ in range(draw(st.integers(1, 10))):
        made.grow()
    names = st.sampled_from(sorted(made.values))
    outputs = draw(st.lists(names, min_size=1, max_size=4))
    finals = list(dict.fromkeys(outputs))
    constants = {name: np.array(value, np.int64) for name, value in CONSTANTS.items()}
    constants["nought"] = np.array(0, np.float32)
    declared = {name: tensor(name, made.values[name]) for name in "xzw"}
    return model(made.nodes, list(declared.values()), [tensor(name, [None, None]) for name in finals], constants)
