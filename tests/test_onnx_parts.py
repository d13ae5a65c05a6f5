"""A part of a model means what its nodes meant in the model: cut node by node, and at random, onnxruntime gives the
same bits as for the whole; what no part can say is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from outrider.providers.wire.dtypes import NUMBER
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.graph import Node, Value
from outrider.providers.wire.onnx_model import OnnxModel, is_declarable, value_info
from outrider.scheduler.functions import inline_calls
from outrider.scheduler.inference import dtype_of, shape_of
from outrider.scheduler.model import load_model
from tests.builders import model, node, tensor
from tests.onnx_parts import agree, direct, in_parts, interface, opened, run_part, shipped

Case = tuple[onnx.ModelProto, dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}
RNG = np.random.default_rng(0)
LARGE = 400  # float32: more than stays in the skeleton


def case(made: Callable[[], Case]) -> Callable[[], Case]:
    CASES[made.__name__] = made
    return made


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def text(source: str, constants: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """A model from ONNX text; `constants` become initializers, those called `body/name` of the body of that name."""
    made = onnx.parser.parse_model(source)
    graphs = {"": made.graph} | {graph.name: graph for graph in bodies(made.graph)}
    for name, array in (constants or {}).items():
        where, _, own = name.rpartition("/")
        graphs[where].initializer.append(numpy_helper.from_array(array, own))
    return made


def bodies(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    found = []
    for one in graph.node:
        for attribute in one.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += [attribute.g, *bodies(attribute.g)]
    return found


@case
def captures_three_deep() -> Case:
    """Each body reads what the bodies around it make, and the innermost one the model's input and a weight."""
    made = text(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[N] x, bool c, int64 n) => (float[] y, float[] z) {
            a = Neg(x)
            y, z = Loop (n, "", a) <body = loop (int64 i, bool go, float[N] s) => (bool on, float[N] t, float[N] u) {
                on = Identity(go)
                b = Add(a, w)
                t = If (c) <
                    then_branch = then () => (float[] p) {
                        d = Mul(b, x)
                        p = Scan <num_scan_inputs = 1, body = scan (float e) => (float f) {
                            f1 = If (c) <
                                then_branch = most () => (float q) { q1 = ReduceSum<keepdims = 0>(d) q = Add(e, q1) },
                                else_branch = least () => (float r) { r = Identity(e) }>
                            f = Add(f1, e)
                        }> (s) },
                    else_branch = other () => (float[] v) { v = Sub(s, b) }>
                u = Mul(t, w)
            }>
        }""",
        {"w": floats(3)},
    )
    return made, {"x": floats(3), "c": np.array(True), "n": np.array(3)}


@case
def weights_within_bodies() -> Case:
    """Large and small, read there, read further in, and given back as they are."""
    made = text(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[400] x, bool c) => (float[] y, float[] big, float[] small) {
            y, big, small = If (c) <
                then_branch = then () => (float[] p, float[] w, float[] k) {
                    p = If (c) <
                        then_branch = in () => (float[] q) { q1 = Add(x, w) q = Mul(q1, k) },
                        else_branch = out () => (float[] v) { }> },
                else_branch = other () => (float[] v, float[] l, float[] k) { l = Identity(v) }>
            }""",
        {
            "then/w": floats(LARGE),
            "then/k": floats(1),
            "out/v": floats(LARGE),
            "other/v": 3 * floats(LARGE),
            "other/k": floats(1),
        },
    )
    return made, {"x": floats(LARGE), "c": np.array(True)}


@case
def weights_within_bodies_of_the_other_branch() -> Case:
    made, feed = weights_within_bodies()
    return made, {**feed, "c": np.array(False)}


@case
def constant_nodes() -> Case:
    """Of all kinds, in the graph and in bodies, large and small, one of them an output of its body."""
    big = numpy_helper.from_array(floats(LARGE), "big")
    then = helper.make_graph(
        [
            helper.make_node("Constant", [], ["b"], value=big),
            helper.make_node("Constant", [], ["two"], value_float=2.0),
            node("Mul", "b two", "m"),
            node("Add", "m x", "p"),
        ],
        "then", [], [tensor("p", None), tensor("b", None)],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Constant", [], ["e"], value_floats=[1.0, 2.0]), node("Identity", "x", "q")],
        "else", [], [tensor("q", None), tensor("e", None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[0]),
        helper.make_node("Constant", [], ["k"], value=big),
        helper.make_node("Constant", [], ["alone"], value_strings=[b"a", b"\xc3\xa9"]),
        node("ReduceSum", "k axes", "s"),
        node("Add", "x s", "t"),
        helper.make_node("If", ["c"], ["y", "z"], then_branch=then, else_branch=other),
        node("Mul", "t y", "r"),
    ]
    outputs = [tensor("r", None), tensor("z", None), tensor("alone", None, TensorProto.STRING)]
    made = model(nodes, [tensor("x", [LARGE]), tensor("c", [], TensorProto.BOOL)], outputs, opset=17)
    return made, {"x": floats(LARGE), "c": np.array(True)}


FUNCTIONS = """
        <domain: "own", opset_import: ["": 17, "own": 1]> twice (a) => (b) { t = own.once(a) b = own.once(t) }
        <domain: "own", opset_import: ["": 17]> once (a) => (b) { k = Constant<value_float = 0.5>() b = Mul(a, k) }"""


@case
def calls_and_calls_in_bodies() -> Case:
    made = text(
        """<ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[N] x, bool c) => (float[] y) {
            a = own.twice(x)
            y = If (c) <
                then_branch = then () => (float[] p) { p1 = own.twice(a) p = Neg(p1) },
                else_branch = other () => (float[] q) { q = own.once(x) }>
        }"""
        + FUNCTIONS
    )
    for function in made.functions:  # a large tensor in a function
        if function.name == "once":
            function.node.insert(
                0, helper.make_node("Constant", [], ["big"], value=numpy_helper.from_array(floats(LARGE)))
            )
            function.node.insert(1, node("ReduceMean", "big", "mean", keepdims=0))
            function.node[-1].output[0] = "scaled"
            function.node.append(node("Add", "scaled mean", "b"))
    return made, {"x": floats(4), "c": np.array(True)}


@case
def nameless_and_equal_names() -> Case:
    nodes = [
        node("Neg", "x", "a"), node("Abs", "a", "b", "same"), node("Exp", "b", "d", "same"), node("Tanh", "d", "e"),
        node("Relu", "e", "y", "#0"),
    ]  # fmt: skip
    return model(nodes, [tensor("x", ["N"])], [tensor("y", ["N"])]), {"x": floats(5)}


@case
def omitted_inputs_and_outputs() -> Case:
    nodes = [
        node("Clip", "x - high", "a"),
        helper.make_node("LSTM", ["s", "w", "r", "", "", "h"], ["", "last", ""], hidden_size=3),
        node("Resize", "image - scales", "big", mode="nearest"),
    ]
    inputs = [tensor("x", ["N"]), tensor("s", [2, 1, 4]), tensor("image", [1, 1, 2, 2])]
    outputs = [tensor("last", None), tensor("a", None), tensor("big", None)]
    constants = {
        "high": np.array(0.5, np.float32), "w": floats(1, 12, 4), "r": floats(1, 12, 3),
        "h": floats(1, 1, 3), "scales": np.array([1, 1, 2, 2], np.float32),
    }  # fmt: skip
    return model(nodes, inputs, outputs, constants, opset=17), {
        "x": floats(5), "s": floats(2, 1, 4), "image": floats(1, 1, 2, 2)
    }  # fmt: skip


@case
def outputs_of_all_kinds() -> Case:
    """The same one twice, an input, a small and a large weight, and one that others read too."""
    outputs = [tensor(name, None) for name in ("y", "y", "x", "k", "w", "a")]
    nodes = [node("Add", "x w", "a"), node("Mul", "a k", "y")]
    constants = {"w": floats(LARGE), "k": floats(1)}
    return model(nodes, [tensor("x", [LARGE])], outputs, constants), {"x": floats(LARGE)}


@case
def sequences_optionals_and_maps() -> Case:
    made = text("""<ir_version: 9, opset_import: ["": 20, "ai.onnx.ml": 3]>
        g (float[N] x, string[2] words, map(string, float) counts)
            => (float[] y, seq(float[M]) pieces, string[] low, float[] v) {
            s = SequenceConstruct(x, x)
            a = Neg(x)
            pieces = SequenceInsert(s, a)
            o = Optional(pieces)
            got = OptionalGetElement(o)
            y = ConcatFromSequence<axis = 0>(got)
            low = StringConcat(words, words)
            v = ai.onnx.ml.DictVectorizer<string_vocabulary = ["a", "b"]>(counts)
        }""")
    feed = {"x": floats(3), "words": np.array(["Ab", "É"], object), "counts": {"a": 1.5}}
    return made, feed


@case
def narrow_types() -> Case:
    """Large and small tensors of types that numpy does not have, some packed."""
    nodes, constants, outputs = [], [], []
    for dtype, count in ((TensorProto.INT4, 4001), (TensorProto.UINT4, 5), (TensorProto.INT4, 3)):
        name = f"w{len(constants)}"
        items = (np.arange(count) % 7).astype(ml_dtypes.int4 if dtype == TensorProto.INT4 else ml_dtypes.uint4)
        constants.append(numpy_helper.from_array(items, name))
        nodes += [node("DequantizeLinear", f"{name} scale", f"y{name}")]
        outputs.append(tensor(f"y{name}", None))
    wide = np.linspace(-3, 3, 2000, dtype=np.float32)
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        name = f"w{len(constants)}"
        constants.append(numpy_helper.from_array(wide.astype(kind), name))
        nodes.append(helper.make_node("Cast", [name], [f"y{name}"], to=TensorProto.FLOAT))
        outputs.append(tensor(f"y{name}", None))
    nodes.append(node("Add", "x yw3", "y"))
    made = model(nodes, [tensor("x", [2000])], [*outputs, tensor("y", None)], {"scale": np.array(0.5, np.float32)})
    made.graph.initializer.extend(constants)
    return made, {"x": floats(2000)}


@case
def strings_and_other_dtypes() -> Case:
    constants = {
        "texts": np.array([f"t{i}é" for i in range(300)], object), "half": floats(900).astype(np.float16),
        "wide": floats(200).astype(np.float64), "none": np.zeros((0, 3), np.float32), "b": np.arange(2000) % 3 == 0,
    }  # fmt: skip
    nodes = [
        node("Gather", "texts i", "t"), node("Gather", "half i", "h"), node("Gather", "wide i", "d"),
        node("Gather", "b i", "f"), node("ReduceSum", "none", "z", keepdims=0), node("Add", "z x", "y"),
    ]  # fmt: skip
    kinds = {"t": TensorProto.STRING, "h": TensorProto.FLOAT16, "d": TensorProto.DOUBLE, "f": TensorProto.BOOL}
    outputs = [*(tensor(name, None, kind) for name, kind in kinds.items()), tensor("y", None)]
    made = model(nodes, [tensor("i", ["N"], TensorProto.INT64), tensor("x", ["M"])], outputs, constants, opset=17)
    return made, {"i": np.array([0, 199, 7]), "x": floats(2)}


@case
def sparse_weights() -> Case:
    def sparse(name: str, values: np.ndarray, shape: list[int]) -> onnx.SparseTensorProto:
        where = numpy_helper.from_array(np.arange(values.size, dtype=np.int64) * 2, f"{name}_at")
        return helper.make_sparse_tensor(numpy_helper.from_array(values, name), where, shape)

    nodes = [
        node("MatMul", "x w", "a"),
        helper.make_node("Constant", [], ["k"], sparse_value=sparse("", floats(2), [5])),
        node("Add", "a k", "y"),
    ]
    made = model(nodes, [tensor("x", [2, 100])], [tensor("y", None)], opset=17)
    made.graph.sparse_initializer.append(sparse("w", floats(200), [100, 5]))
    return made, {"x": floats(2, 100)}


@case
def initializers_that_are_inputs_before_ir_4() -> Case:
    nodes = [node("Add", "x w", "a"), node("Mul", "a k", "y")]
    inputs = [tensor("x", [LARGE]), tensor("w", [LARGE]), tensor("k", [1])]
    constants = {"w": floats(LARGE), "k": floats(1)}
    return model(nodes, inputs, [tensor("y", None)], constants, opset=8, ir_version=3), {"x": floats(LARGE)}


@case
def initializers_that_may_be_fed() -> Case:
    nodes = [node("Add", "x w", "a"), node("Mul", "a w", "y")]
    made = model(nodes, [tensor("x", [3]), tensor("w", [3])], [tensor("y", None)], {"w": floats(3)})
    return made, {"x": floats(3), "w": 2 * floats(3)}


@case
def contributed_and_unknown_types() -> Case:
    """Nobody but onnxruntime knows the types that `com.microsoft` makes."""
    nodes = [
        helper.make_node("Unique", ["t"], ["tokens", "places", "counts"], domain="com.microsoft"),
        helper.make_node("Gelu", ["x"], ["g"], domain="com.microsoft"),
        node("Neg", "g", "n"),
        helper.make_node("ExpandDims", ["n", "axis"], ["y"], domain="com.microsoft"),
        node("Abs", "y", "z"),
        node("Add", "tokens t", "u"),
        node("Neg", "counts", "m"),
    ]
    inputs = [tensor("x", ["N"]), tensor("t", ["M"])]
    outputs = [tensor("z", None), tensor("u", None), tensor("m", None, TensorProto.INT64)]
    made = model(nodes, inputs, outputs, {"axis": np.array(0, np.int32)}, opset=17)
    made.opset_import.add(domain="com.microsoft", version=1)
    return made, {"x": floats(4), "t": floats(4)}


@case
def declared_shapes_within_a_part_that_lie() -> Case:
    nodes = [node("Neg", "x", "a", "hold"), node("Abs", "a", "b", "hold"), node("Exp", "b", "y", "hold")]
    made = model(nodes, [tensor("x", ["N", 3])], [tensor("y", [7])])
    made.graph.value_info.extend([tensor("a", [5, 3]), tensor("b", [9, 3])])
    return made, {"x": floats(2, 3)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["whole", "node by node", "at random"])
def test_parts_give_the_bits_of_the_whole(name: str, how: str) -> None:
    made, feed = CASES[name]()
    if name == "declared_shapes_within_a_part_that_lie":
        how = "whole"
    expected = direct(made, feed)
    rng = random.Random(0)
    colors = {"whole": lambda one: 0, "node by node": lambda one: one.index, "at random": lambda one: rng.randint(0, 1)}
    with opened(made) as (graph, shipment):
        for _ in range(3 if how == "at random" else 1):
            agree(in_parts(graph, shipment, feed, colors[how]), expected)


def test_a_large_weight_that_an_initializer_further_in_shadows() -> None:
    made = text(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[400] x, bool c) => (float[] y) {
            y = If (c) <
                then_branch = then () => (float[] p) {
                    a = Add(x, w)
                    b = If (c) <
                        then_branch = own () => (float[] q) { q = Mul(w, x) },
                        else_branch = outer () => (float[] r) { r = Sub(x, w) }>
                    p = Add(a, b) },
                else_branch = other () => (float[] s) { s = Mul(x, w) }>
        }""",
        {"then/w": floats(LARGE), "own/w": floats(1), "other/w": 2 * floats(LARGE)},
    )
    x = floats(LARGE)
    with opened(made) as (graph, shipment):
        for c, expected in ((True, x + floats(LARGE) + floats(1) * x), (False, x * (2 * floats(LARGE)))):
            (y,) = in_parts(graph, shipment, {"x": x, "c": np.array(c)}, lambda one: 0)
            np.testing.assert_array_equal(y, expected)


def test_a_body_that_returns_a_value_twice() -> None:
    """onnxruntime leaves the first of the two unwritten in the whole model, and not in parts."""
    made = text(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[400] x, bool c) => (float[] y, float[] z) {
            y, z = If (c) <
                then_branch = then () => (float[] a, float[] a) { a = Neg(x) },
                else_branch = other () => (float[] v, float[] v) { }>
        }""",
        {"other/v": 3 * floats(LARGE)},
    )
    x = floats(LARGE)
    with opened(made) as (graph, shipment):
        for c, expected in ((True, -x), (False, 3 * floats(LARGE))):
            results = in_parts(graph, shipment, {"x": x, "c": np.array(c)}, lambda one: 0)
            agree(results, [expected, expected])


OLD = """
        <domain: "own", opset_import: ["": 11]> total (a) => (b) {
            s = ReduceSum<axes = [1]>(a)
            e = Softmax<axis = 1>(a)
            t = Relu(s)
            b = Add(t, e)
        }"""


def of_two_opsets() -> onnx.ModelProto:
    """onnxruntime expands functions into the model, whose opset it takes for theirs; it refuses this one."""
    return text(
        """<ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[N, 3, 4] x, bool c) => (float[] y) {
            a = own.total(x)
            b = If (c) < then_branch = then () => (float[] p) { p = own.total(x) },
                         else_branch = other () => (float[] q) { q = Neg(x) }>
            d = Neg(a)
            y = Add(b, d)
        }"""
        + OLD
    )


def test_nodes_of_another_opset_are_told() -> None:
    made = of_two_opsets()
    feed = {"x": floats(2, 3, 4), "c": np.array(True)}
    expected = ReferenceEvaluator(made).run(None, feed)
    with opened(made) as (graph, shipment):
        assert set(shipment.foreign) == {"#0", "#1"}
        assert "ReduceSum is of opset 11" in shipment.foreign["#0"] and "opset 17" in shipment.foreign["#0"]
        inputs, outputs = interface(graph, graph.nodes[:1])
        with pytest.raises(WireError, match="opset 11") as caught:
            shipment.cut(graph.nodes[:1], inputs, outputs)
        assert caught.value.where == "#0"
    loaded = load_model(made)
    inlined = inline_calls(loaded, ["#0"])
    shipment = shipped(inlined)
    # Relu only took more types meanwhile, Add too: those may stand in the model, the others mean another thing.
    assert set(shipment.foreign) == {"#0/#0", "#0/#1", "#1"}
    known = dict(feed)
    for one in inlined.graph.nodes:
        inputs, outputs = interface(inlined.graph, [one])
        if one.name in shipment.foreign:
            made_of = [node for node in inlined.skeleton.model.graph.node if node.name == one.name]
            imports = [helper.make_opsetid("", one.opset), helper.make_opsetid("own", 1)]
            infos = [[tensor(v.name, None, NUMBER[v.dtype]) for v in values] for values in (inputs, outputs)]
            alone = helper.make_model(
                helper.make_graph(made_of, "g", *infos), opset_imports=imports, functions=made.functions
            )
            results = ReferenceEvaluator(alone).run(None, known)
        else:
            results = run_part(shipment, [one], inputs, outputs, known)
        known.update(zip((value.name for value in outputs), results, strict=True))
    loaded.store.close()
    np.testing.assert_allclose(known["y"], expected[0], rtol=1e-6)


def test_a_domain_that_only_a_function_imports() -> None:
    made = text(
        """<ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[N, 3] x) => (float[] y) { y = own.squared(x) }
        <domain: "own", opset_import: ["": 17, "com.microsoft": 1]> squared (a) => (b) {
            b = com.microsoft.FusedMatMul<transB = 1>(a, a)
        }"""
    )
    loaded = load_model(made)
    inlined = inline_calls(loaded)
    shipment = shipped(inlined)
    assert not shipment.foreign
    results = in_parts(inlined.graph, shipment, {"x": floats(2, 3)}, lambda one: 0)
    loaded.store.close()
    agree(results, direct(made, {"x": floats(2, 3)}))


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 15, 18, 21, 22, 23, 24, 25, 26, 27])
def test_every_opset(opset: int) -> None:
    pads = helper.make_node("Pad", ["a"], ["b"], pads=[0, 1, 0, 1]) if opset < 11 else node("Pad", "a pads", "b")
    drop = helper.make_node("Dropout", ["b"], ["d"])
    constants = {"w": floats(20, 20), "pads": np.array([0, 1, 0, 1])}
    nodes = [node("MatMul", "x w", "a"), pads, drop, node("Softmax", "d", "e"), node("Relu", "e", "y")]
    made = model(nodes, [tensor("x", ["N", 20])], [tensor("y", None)], constants, opset=opset, ir_version=4)
    expected = direct(made, {"x": floats(3, 20)})
    with opened(made) as (graph, shipment):
        agree(in_parts(graph, shipment, {"x": floats(3, 20)}, lambda one: one.index), expected)


def test_an_input_of_unknown_type_is_refused_and_an_output_is_not() -> None:
    made, feed = contributed_and_unknown_types()
    with opened(made) as (graph, shipment):
        absolute = next(one for one in graph.nodes if one.op_type == "Abs")
        assert not is_declarable(absolute.inputs[0])
        with pytest.raises(WireError, match="'y' is unknown") as caught:
            shipment.cut([absolute], absolute.inputs, absolute.outputs)
        assert caught.value.where == "y"


def test_external_weights_stay_in_their_files(tmp_path: Path) -> None:
    """A large one is told by its place, a small one lies in the part, one of a body moves out of it and stays there."""
    made, feed = weights_within_bodies()
    made.graph.initializer.append(numpy_helper.from_array(floats(1), "one"))
    expected = direct(made, feed)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    with opened(tmp_path / "m.onnx") as (graph, shipment):
        part = shipment.cut(graph.nodes, graph.inputs, graph.outputs)
        assert len(part.files) == 3 and not part.weights
        agree(in_parts(graph, shipment, feed, lambda one: one.index), expected)


def test_the_same_arguments_give_the_same_bytes() -> None:
    made, _ = captures_three_deep()
    parts = []
    for _ in range(2):
        with opened(made) as (graph, shipment):
            parts.append(shipment.cut(graph.nodes, graph.inputs, graph.outputs))
    assert parts[0] == parts[1]


def test_names_that_the_model_does_not_have() -> None:
    made, _ = initializers_that_may_be_fed()
    with opened(made) as (graph, shipment):
        first, second = graph.nodes
        with pytest.raises(WireError, match="no initializer 'a'"):
            shipment.cut([second], graph.inputs, second.outputs)
        with pytest.raises(WireError, match="no node 'other'"):
            shipment.cut([replace(first, name="other")], graph.inputs, first.outputs)


# Bytes that are no model -----------------------------------------------------------------------------------------
def serialized() -> bytes:
    made, _ = weights_within_bodies()
    return made.SerializeToString()


def read(data: bytes) -> None:
    """Raises nothing but WireError."""
    try:
        made = OnnxModel(data, {}, {}, {})
    except WireError:
        return
    for name in [*made._nodes][:3]:
        value = Value(name, "float32", (1,))
        try:
            made.cut([Node(0, name, "Op", "", 1, {}, (value,), ())], [], [])
        except WireError:
            continue


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    read(data)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_bytes_that_were_changed(data: st.DataObject) -> None:
    mine = bytearray(serialized())
    for _ in range(data.draw(st.integers(1, 4))):
        mine[data.draw(st.integers(0, len(mine) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(mine[: data.draw(st.integers(0, len(mine)))]))


TYPES = st.sampled_from(["float32", "int4", "string", "bool", "float8e4m3fn"])
DTYPES = st.one_of(
    TYPES,
    TYPES.map(lambda one: f"sequence({one})"),
    TYPES.map(lambda one: f"optional({one})"),
    TYPES.map(lambda one: f"optional(sequence({one}))"),
    TYPES.map(lambda one: f"sparse({one})"),
    TYPES.map(lambda one: f"map(int64,{one})"),
    TYPES.map(lambda one: f"sequence(map(string,{one}))"),
)
DIMS = st.one_of(
    st.integers(0, 2**63 - 1),
    st.none(),
    st.text(min_size=1).filter(lambda one: not one.startswith("unk__") and one != "?"),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(min_size=1), DTYPES, st.one_of(st.none(), st.lists(DIMS, max_size=4).map(tuple)))
def test_types_are_written_as_onnx_reads_them(name: str, dtype: str, shape: Any) -> None:
    info = onnx.ValueInfoProto.FromString(value_info(Value(name, dtype), shape))
    assert info.name == name and dtype_of(info.type) == dtype
    assert shape_of(info.type) == (shape if dtype in NUMBER else None)
