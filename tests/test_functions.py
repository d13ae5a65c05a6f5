"""Function calls are nodes until somebody asks for their bodies, which then compute the same under original names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from outrider.scheduler.functions import inline_calls
from outrider.scheduler.model import LoadedModel, load_model
from tests.rebuild import rebuild

pytestmark = pytest.mark.fast

FLOAT = TensorProto.FLOAT


def imports(**versions: int) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("" if domain == "onnx" else domain, version) for domain, version in versions.items()]


def reference(attribute: str, name: str, kind: int) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=attribute, ref_attr_name=name, type=kind)


def functions() -> list[onnx.FunctionProto]:
    square = helper.make_function(
        "loc", "Square", ["a"], ["b"], [helper.make_node("Mul", ["a", "a"], ["b"])], imports(onnx=18)
    )
    factor = helper.make_node("Constant", [], ["k"])
    factor.attribute.append(reference("value_float", "alpha", onnx.AttributeProto.FLOAT))
    total = helper.make_node("ReduceSum", ["s", ""], ["r"], name="total")
    total.attribute.append(reference("keepdims", "keep", onnx.AttributeProto.INT))
    scale = helper.make_function(
        "loc", "Scale", ["x", "bias"], ["y", "r"],
        [
            factor,
            helper.make_node("Square", ["x"], ["s"], domain="loc", name="square"),
            helper.make_node("Mul", ["s", "k"], ["m"]),
            helper.make_node("Sum", ["m", "bias"], ["y"], name="sum"),
            total,
        ],
        imports(onnx=13, loc=1), attributes=["keep"], attribute_protos=[helper.make_attribute("alpha", 2.0)],
    )  # fmt: skip
    # The body's own `x` and `t` are not the model's, which a renamed input may well be called.
    then = helper.make_graph(
        [helper.make_node("Neg", ["v"], ["x"]), helper.make_node("Square", ["x"], ["t"], domain="loc")],
        "then", [], [helper.make_tensor_value_info("t", FLOAT, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Identity", ["v"], ["t"])], "else", [], [helper.make_tensor_value_info("t", FLOAT, None)]
    )
    choose = helper.make_function(
        "loc", "Choose", ["c", "v"], ["y", "same"],
        [
            helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other, name="If"),
            helper.make_node("Identity", ["v"], ["same"]),
        ],
        imports(onnx=17, loc=1),
    )  # fmt: skip
    through = helper.make_function(
        "loc", "Through", ["a"], ["a", "b"], [helper.make_node("Abs", ["a"], ["b"])], imports(onnx=17)
    )
    return [square, scale, choose, through]


def model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Scale", ["x", "w"], ["t"], domain="loc", name="A", keep=0),
        helper.make_node("Scale", ["t", "w"], ["", "r"], domain="loc", alpha=0.5, keep=1),
        helper.make_node("Choose", ["c", "t"], ["u"], domain="loc", name="C"),
        helper.make_node("Relu", ["u"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", FLOAT, [2, 3]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", FLOAT, [2, 3]), helper.make_tensor_value_info("r", FLOAT, [1, 1])],
        initializer=[numpy_helper.from_array(np.arange(3, dtype=np.float32), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=imports(onnx=17, loc=1), functions=functions()[:3], ir_version=9)


@pytest.fixture
def loaded() -> Iterator[LoadedModel]:
    result = load_model(model())
    yield result
    result.store.close()


def names(loaded: LoadedModel) -> list[str]:
    return [node.name for node in loaded.graph.nodes]


def test_calls_are_nodes_at_first(loaded: LoadedModel) -> None:
    assert names(loaded) == ["A", "#1", "C", "#3"]
    call = loaded.graph.nodes[0]
    assert (call.domain, call.op_type, call.opset, call.lowered) == ("loc", "Scale", 1, None)
    assert call.attributes == {"keep": 0}
    assert call.outputs[0].dtype == "float32" and call.outputs[0].shape == (2, 3)
    assert set(loaded.functions) == {("loc", "Square", ""), ("loc", "Scale", ""), ("loc", "Choose", "")}


def test_all_calls_inlined_compute_the_same(loaded: LoadedModel) -> None:
    inlined = inline_calls(loaded)
    assert names(inlined) == [
        "A/square/#0", "A/#2", "A/sum", "A/total", "#1/square/#0", "#1/#2", "#1/sum", "#1/total", "C/If", "C/#1", "#3",
    ]  # fmt: skip
    assert inlined.constant_nodes == (("A/#0", "A/k"), ("#1/#0", "#1/k"))
    by_name = {node.name: node for node in inlined.graph.nodes}
    assert by_name["A/square/#0"].origin == ("A", "A/square") and by_name["A/square/#0"].opset == 18
    assert by_name["A/sum"].opset == 13 and [step.opset for step in by_name["A/#2"].steps()] == [21]
    assert by_name["A/total"].attributes == {"keepdims": 0}
    assert by_name["#1/sum"].outputs[0].name == "#1/y"  # nobody wanted it
    assert all(value.shape is not None for node in inlined.graph.nodes for value in node.outputs)
    (then,) = [body for key, body in by_name["C/If"].bodies() if key == "then_branch"]
    assert [node.name for node in then.nodes] == ["C/If/then/#0", "C/If/then/#1/#0"]
    assert inlined.functions == loaded.functions and names(loaded) == ["A", "#1", "C", "#3"]
    lowered = rebuild(inlined.graph, inlined.store, list(model().graph.output))
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    for c in (True, False):
        feed = {"x": x, "c": np.array(c)}
        t = x**2 * 2 + np.arange(3, dtype=np.float32)
        expected = [np.maximum(t**2 if c else t, 0), (t**2).sum(keepdims=True)]  # as the functions say
        for one, other in zip(expected, ReferenceEvaluator(lowered).run(None, feed), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def test_only_the_named_calls_are_expanded(loaded: LoadedModel) -> None:
    inlined = inline_calls(loaded, ["C"])
    assert names(inlined) == ["A", "#1", "C/If", "C/#1", "#3"]
    again = inline_calls(inlined, ["A"])
    assert names(again)[:5] == ["A/square/#0", "A/#2", "A/sum", "A/total", "#1"]
    assert names(inline_calls(again))[4] == "#1/square/#0"
    assert inline_calls(loaded, []) is loaded
    assert inline_calls(loaded, ["#3"]) is loaded  # no call


def test_calls_in_bodies_go_with_the_node_that_is_named() -> None:
    def branch(name: str, op: str, domain: str) -> onnx.GraphProto:
        nodes = [helper.make_node(op, ["x"], [name], domain=domain, name="same")]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, None)])

    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("p", "Square", "loc"), else_branch=branch("q", "Relu", ""), name="If"
    )
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", FLOAT, [2]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", FLOAT, [2])],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=imports(onnx=17, loc=1), functions=functions()[:1], ir_version=9)
    loaded = load_model(proto)
    for wanted in (["If"], ["If/then/same"], None):
        inlined = inline_calls(loaded, wanted)
        bodies = dict(inlined.graph.nodes[0].bodies())
        assert [n.name for n in bodies["then_branch"].nodes] == ["If/then/same/#0"]
        assert [v.name for v in inlined.graph.nodes[0].captures] == ["x"]
    loaded.store.close()


def test_outputs_that_are_inputs_and_names_that_are_taken() -> None:
    nodes = [
        helper.make_node("Through", ["x"], ["p", "q"], domain="loc", name="T"),
        helper.make_node("Add", ["p", "q"], ["T/b"], name="T/#0"),
        helper.make_node("Scale", ["T/b", "x"], ["y"], domain="loc", name="T", keep=1),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", FLOAT, [3])], [helper.make_tensor_value_info("y", FLOAT, [3])]
    )
    proto = helper.make_model(graph, opset_imports=imports(onnx=17, loc=1), functions=functions(), ir_version=9)
    loaded = load_model(proto)
    assert names(loaded) == ["T", "T/#0", "T~2"]
    inlined = inline_calls(loaded)
    assert names(inlined)[:3] == ["T/#0~2", "T/#output0", "T/#0"]
    lowered = rebuild(inlined.graph, inlined.store, list(graph.output))
    feed = {"x": np.array([-1, 2, 3], np.float32)}
    expected = (feed["x"] + np.abs(feed["x"])) ** 2 * 2 + feed["x"]
    np.testing.assert_allclose(ReferenceEvaluator(lowered).run(None, feed)[0], expected)
    loaded.store.close()


def test_overloads_are_different_functions() -> None:
    variants = []
    for overload, op in (("up", "Exp"), ("down", "Neg")):
        function = helper.make_function(
            "loc", "F", ["a"], ["b"], [helper.make_node(op, ["a"], ["b"])], imports(onnx=17)
        )
        function.overload = overload
        variants.append(function)
    nodes = [
        helper.make_node("F", ["x"], ["t"], domain="loc", overload="down"),
        helper.make_node("F", ["t"], ["y"], domain="loc", overload="up"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", FLOAT, [3])], [helper.make_tensor_value_info("y", FLOAT, [3])]
    )
    proto = helper.make_model(graph, opset_imports=imports(onnx=17, loc=1), functions=variants, ir_version=10)
    loaded = load_model(proto)
    assert [node.overload for node in loaded.graph.nodes] == ["down", "up"]
    assert [node.op_type for node in inline_calls(loaded).graph.nodes] == ["Neg", "Exp"]
    loaded.store.close()


def test_a_loop_of_nothing_but_a_trip_count_survives_inlining() -> None:
    """Its omitted condition is an input all the same: inference of the whole model fails without."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        agraph (float[N, 4] x, int64 m) => (float[] y) { u = own.F(x, m)  y = Relu(u) }
        <domain: "own", opset_import: ["": 18]> F (a, n) => (b) {
            b = Loop (n, "") <body = body (int64 i, bool c) => (bool d, float[] e) { d = Identity(c) e = Neg(a) }> }""")
    loaded = load_model(proto)
    inlined = inline_calls(loaded)
    loaded.store.close()
    assert not inlined.notes and inlined.graph.outputs[0].shape == (None, "N", 4)
