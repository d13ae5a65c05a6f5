"""Packed graphs come back equal, and malformed ones are refused with the place that is wrong."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.wire.errors import WireError
from outrider.providers.wire.graph import OMITTED, Graph, Node, TensorRef, Value
from outrider.providers.wire.pack import pack_graph, pack_model, unpack_graph, unpack_model
from outrider.scheduler.model import load_model
from tests.models import MODELS, model_path

pytestmark = pytest.mark.fast

text = st.text(max_size=8)
sizes = st.integers(0, 2**40)
values = st.builds(
    Value,
    text,
    st.sampled_from(["float32", "undefined", "sequence(int64)"]),
    st.none() | st.lists(st.integers(0, 2**31) | st.none() | text, max_size=3).map(tuple),
    st.booleans(),
) | st.just(OMITTED)  # fmt: skip
refs = st.builds(
    TensorRef,
    text,
    st.lists(sizes, max_size=3).map(tuple),
    sizes, sizes, st.integers(0, 9), text, sizes, sizes, st.booleans(),
)  # fmt: skip
scalars = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text | st.binary(max_size=8)
plain = scalars | st.lists(scalars, max_size=3) | refs | st.lists(refs, min_size=1, max_size=2)


def lists(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


def nodes(attributes: st.SearchStrategy[Any], lowered: st.SearchStrategy[Any]) -> st.SearchStrategy[Node]:
    devices = lists(st.dictionaries(text, text, max_size=2))
    return st.builds(
        Node,
        st.integers(0, 99), text, text, text, st.integers(1, 30), st.dictionaries(text, attributes, max_size=3),
        lists(values), lists(values), lists(values), text, lowered, st.dictionaries(text, text, max_size=2), devices,
        lists(text),
    )  # fmt: skip


def graphs(of: st.SearchStrategy[Node]) -> st.SearchStrategy[Graph]:
    constants = st.dictionaries(text, refs, max_size=2)
    opsets = st.dictionaries(text, st.integers(1, 30), max_size=2)
    return st.builds(Graph, text, lists(of), lists(values), lists(values), constants, opsets)


leaves = nodes(plain, st.none())
inner = graphs(leaves)
outer = nodes(plain | inner | st.lists(inner, min_size=1, max_size=2), st.none() | lists(leaves))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(graphs(outer))
def test_round_trip(graph: Graph) -> None:
    body = msgpack.packb(pack_graph(graph))
    assert unpack_graph(msgpack.unpackb(body, strict_map_key=False)) == graph


@pytest.mark.parametrize("name", MODELS)
def test_real_models_round_trip(name: str) -> None:
    loaded = load_model(model_path(name))
    body = msgpack.packb(pack_graph(loaded.graph))
    assert unpack_graph(msgpack.unpackb(body, strict_map_key=False)) == loaded.graph
    loaded.store.close()


X = Value("x", "float32", (2,))
SMALL = Graph(
    "g",
    (Node(0, "n", "Relu", "", 14, {"a": 1, "t": TensorRef("float32", (2,), 0, 8, 1)}, (X,), (Value("y"),)),),
    (X,),
    (Value("y"),),
    {"w": TensorRef("float32", (2,), 0, 8, 1)},
    {"": 14},
)


def change(path: list[Any], item: Any) -> Callable[[Any], Any]:
    def apply(packed: Any) -> Any:
        if not path:
            return item
        at = packed
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = item
        return packed

    return apply


NODE = ["graph", 1, 0]


@pytest.mark.parametrize(
    ("apply", "where"),
    [
        (change([], None), "graph"),
        (change([], []), "graph"),
        (change(["v"], 99), "graph"),
        (change(["surplus"], 1), "graph"),
        (lambda packed: {key: packed[key] for key in ("v", "values", "graph")}, "graph"),
        (change(["values"], 3), "values"),
        (change(["values", 1], ["x"]), "value 1"),
        (change(["values", 1, 0], 5), "value 1"),
        (change(["values", 1, 2], [1.5]), "value 1"),
        (change(["values", 1, 3], 1), "value 1"),
        (change(["refs", 0, 2], -1), "tensor 0"),
        (change(["refs", 0, 2], True), "tensor 0"),
        (change(["refs", 0, 1], ["n"]), "tensor 0"),
        (change(["refs", 0], [1, 2]), "tensor 0"),
        (change(["graph"], {}), "graph"),
        (change(["graph", 2], [7]), "graph"),
        (change(["graph", 2], [-1]), "graph"),
        (change(["graph", 2], [True]), "graph"),
        (change(["graph", 4, "w"], 1), "graph"),
        (change(["graph", 5], {"": "x"}), "graph"),
        (change([*NODE, 6], [3]), "n"),
        (change([*NODE, 0], "0"), "n"),
        (change([*NODE, 2], None), "graph"),
        (change([*NODE, 5], []), "n"),
        (change([*NODE, 5, "a"], [9, 0]), "n"),
        (change([*NODE, 5, "a"], [0, {}]), "n"),
        (change([*NODE, 5, "a"], [0, [[]]]), "n"),
        (change([*NODE, 5, "t"], [1, 5]), "n"),
        (change([*NODE, 5, "a"], [2, []]), "n"),
        (change([*NODE, 10], [[]]), "n"),
        (change([*NODE, 10], True), "n"),
        (change([*NODE, 12], 7), "n"),
        (change([*NODE, 11], {"k": 1}), "n"),
        (change([*NODE, 12], [1]), "n"),
        (change([*NODE, 13], [None]), "n"),
        (change(["graph", 1], [[]]), "graph"),
    ],
)
def test_malformed_graphs_are_refused(apply: Callable[[Any], Any], where: str) -> None:
    with pytest.raises(WireError) as caught:
        unpack_graph(apply(copy.deepcopy(pack_graph(SMALL))))
    assert caught.value.where == where and caught.value.reason


def test_what_goes_deeper_than_any_model_is_refused() -> None:
    packed = pack_graph(SMALL)
    for _ in range(2000):
        node = copy.copy(pack_graph(SMALL)["graph"][1][0])
        node[5] = {"body": [2, packed["graph"]]}
        packed["graph"] = ["g", [node], [], [], {}, {}]
    with pytest.raises(WireError, match="deep"):
        unpack_graph(packed)


def test_values_are_written_once() -> None:
    many = Graph("g", SMALL.nodes * 50, SMALL.inputs, SMALL.outputs, {})
    packed = pack_graph(many)
    assert len(packed["values"]) == 3 and len(packed["refs"]) == 1


def test_arrays_do_not_travel() -> None:
    import numpy as np

    graph = Graph("g", (), (), (), {"w": np.zeros(2)})
    with pytest.raises(WireError, match="not the place of one"):
        pack_graph(graph)
    node = Node(0, "n", "Relu", "", 14, {"t": np.zeros(2)}, (), ())
    with pytest.raises(WireError, match="'n'.*ndarray"):
        pack_graph(Graph("g", (node,), (), (), {}))


def test_a_lowered_form_that_differs_in_the_opset_only_is_a_number() -> None:
    node = dataclasses.replace(SMALL.nodes[0], metadata={"k": "v"}, origin=("call",))
    step = dataclasses.replace(node, opset=21, metadata={})
    packed = pack_graph(dataclasses.replace(SMALL, nodes=(dataclasses.replace(node, lowered=(step,)),)))
    assert packed["graph"][1][0][10] == 21
    (back,) = unpack_graph(packed).nodes
    assert back.lowered == (step,) and dataclasses.replace(back, lowered=None) == node


MODEL = pack_model(
    TensorRef("uint8", (3,), 0, 3, segment=1),
    {"w": TensorRef("float32", (2,), 64, 8, segment=1)},
    {"If_0": ["If_0/then/w"]},
    {"call": "of another opset"},
)


def test_a_packed_model_comes_back() -> None:
    data, weights, moved, foreign = unpack_model(copy.deepcopy(MODEL))
    assert data.nbytes == 3 and weights["w"].offset == 64
    assert moved == {"If_0": ["If_0/then/w"]} and foreign == {"call": "of another opset"}


@pytest.mark.parametrize(
    "apply",
    [
        lambda one: [one], change(["v"], 1), change(["refs"], []), change(["refs", 0], 7), change(["names"], []),
        change(["names"], {"w": 2}), change(["names"], {"w": True}), change(["names"], {1: 0}), change(["moved"], None),
        change(["moved"], {"n": "w"}), change(["moved"], {"n": [1]}), change(["moved"], {1: []}),
        change(["foreign"], ["n"]), change(["foreign"], {"n": 1}), lambda one: {**one, "more": 1},
    ],
)  # fmt: skip
def test_malformed_models_are_refused(apply: Callable[[Any], Any]) -> None:
    with pytest.raises(WireError):
        unpack_model(apply(copy.deepcopy(MODEL)))
