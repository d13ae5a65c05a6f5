"""The opset-21 side table says the same as the original nodes, belongs to them, and leaves alone what it must."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnx.reference import ReferenceEvaluator

from outrider.providers.wire.graph import Graph, Node
from outrider.scheduler import InferenceSession, lowering
from outrider.scheduler.lowering import BROKEN
from outrider.scheduler.model import LoadedModel, load_model
from tests import builders
from tests.models import feeds, model_path, tolerance
from tests.oracle import run_ort
from tests.rebuild import rebuild

pytestmark = pytest.mark.fast

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def make(
    opset: int,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[object]],
    outputs: list[str],
    weights: dict[str, np.ndarray] | None = None,
    imports: tuple[tuple[str, int], ...] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        initializer=[numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    ids = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, version) for domain, version in imports)]
    return helper.make_model(graph, opset_imports=ids, ir_version=8)


def runtime(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(run_ort(model.SerializeToString(), feed).values())


@pytest.fixture
def load() -> Iterator[object]:
    loaded: list[LoadedModel] = []

    def one(model: object) -> LoadedModel:
        loaded.append(load_model(model))  # type: ignore[arg-type]
        return loaded[-1]

    yield one
    for item in loaded:
        item.store.close()


def steps(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """(original, step) for all nodes, with the bodies of the originals."""
    for node in graph.nodes:
        for step in node.steps():
            yield node, step
        for _, body in node.bodies():
            yield from steps(body)


def check(loaded: LoadedModel) -> None:
    """What holds for every table: names of originals, outputs made once, nothing read from inside another original."""

    def walk(graph: Graph, outer: set[str]) -> None:
        seen = outer | {value.name for value in graph.inputs} | set(graph.constants)
        for node in graph.nodes:
            local: set[str] = set()
            for step in node.steps():
                assert (step.name, step.index, step.lowered) in (
                    (node.name, node.index, None),
                    (node.name, node.index, node.lowered),
                )
                assert {value.name for value in step.inputs if value.name} <= seen | local
                made = {value.name for value in step.outputs if value.name}
                assert not made & (seen | local)
                local |= made
                for _, body in step.bodies():
                    assert all(inner.lowered is None for inner in body.nodes) or step is node
                    walk(body, seen | local)
            outputs = {value.name for value in node.outputs if value.name}
            assert outputs <= local
            seen |= outputs

    walk(loaded.graph, set())
    proto = onnx.defs
    for node, step in steps(loaded.graph):
        if step.domain == "" and node.opset <= 21 and node.lowered is not None:
            assert step.opset == 21
            assert proto.get_schema(step.op_type, 21, "").since_version <= 21


X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)

SMALL = {
    "squeeze-7": make(7, [
        helper.make_node("Unsqueeze", ["x"], ["u"], axes=[0, 2]),
        helper.make_node("Squeeze", ["u"], ["y"], axes=[2], name="S"),
    ], {"x": [2, 3, 4, 5]}, ["y"]),
    "upsample-9": make(9, [
        helper.make_node("Upsample", ["x", "s"], ["y"], mode="nearest"),
    ], {"x": [2, 3, 4, 5]}, ["y"], {"s": np.array([1, 1, 2, 3], np.float32)}),
    "upsample-7": make(7, [
        helper.make_node("Upsample", ["x"], ["y"], mode="nearest", scales=[1.0, 1.0, 2.0, 2.0]),
    ], {"x": [2, 3, 4, 5]}, ["y"]),
    "clip-6-to-slice-9": make(9, [
        helper.make_node("Clip", ["x"], ["c"], min=-0.5, max=0.5),
        helper.make_node("Slice", ["c"], ["s"], starts=[1], ends=[3], axes=[2]),
        helper.make_node("Pad", ["s"], ["p"], mode="constant", pads=[0, 0, 1, 0, 0, 0, 0, 2], value=1.5),
        helper.make_node("TopK", ["p"], ["y", "i"], k=2, axis=3),
    ], {"x": [2, 3, 4, 5]}, ["y"]),
    "split-11": make(11, [
        helper.make_node("Split", ["x"], ["a", "b"], axis=1, split=[1, 2]),
        helper.make_node("ReduceSum", ["b"], ["r"], axes=[1], keepdims=1),
        helper.make_node("Add", ["a", "r"], ["y"]),
    ], {"x": [2, 3, 4, 5]}, ["y"]),
    "reduce-13": make(13, [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[-1], keepdims=1),
        helper.make_node("ReduceMax", ["x"], ["n"], axes=[2, 3], keepdims=0),
        helper.make_node("Unsqueeze", ["n", "ax"], ["k"]),
        helper.make_node("Sub", ["m", "k"], ["y"]),
    ], {"x": [2, 3, 4, 5]}, ["y"], {"ax": np.array([2, 3])}),
    "pad-17": make(17, [
        helper.make_node("Pad", ["x", "p"], ["q"], mode="reflect"),
        helper.make_node("ReduceL2", ["q"], ["y"], axes=[1]),
    ], {"x": [2, 3, 4, 5]}, ["y"], {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
    "shared-17": make(17, [  # one converted constant for two originals must not tie them together
        helper.make_node("ReduceMean", ["x"], ["a"], axes=[1]),
        helper.make_node("ReduceMean", ["a"], ["b"], axes=[1]),
        helper.make_node("Split", ["b"], ["c", "d"], axis=2),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ], {"x": [2, 3, 4, 5]}, ["y"]),
}  # fmt: skip


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_before_opset_13_keeps_its_own_form(op: str, axis: int) -> None:
    """It flattens its input, of which sizes of 0 and equal maxima are the touchstones."""
    graph = make(12, [helper.make_node(op, ["x"], ["y"], axis=axis)], {"x": ["A", "B", 4]}, ["y"])
    with InferenceSession(graph) as session:
        for shape in [(2, 3, 4), (0, 3, 4), (2, 0, 4)]:
            x = np.ones(shape, np.float32)
            (expected,) = runtime(graph, {"x": x})
            np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_small_models_compute_the_same(name: str, load: object) -> None:
    model = SMALL[name]
    loaded = load(model)  # type: ignore[operator]
    check(loaded)
    assert any(node.lowered for node in loaded.graph.nodes) and not loaded.notes
    lowered = rebuild(loaded.graph, loaded.store, list(model.graph.output))
    expected = runtime(model, {"x": X})
    for oracle in (runtime(lowered, {"x": X}), ReferenceEvaluator(lowered).run(None, {"x": X})):
        for one, other in zip(expected, oracle, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["basic-pitch", "silero", "silero-ifless", "ppocr-cls", "magika", "minilm"])
def test_real_models_compute_the_same(name: str, load: object) -> None:
    path = model_path(name)
    loaded = load(path)  # type: ignore[operator]
    check(loaded)
    assert not loaded.notes
    for node, _ in steps(loaded.graph):  # nothing is left in a form that kernels do not know
        now = onnx.defs.get_schema(node.op_type, node.opset, node.domain).since_version
        known = node.lowered is not None or node.op_type in BROKEN
        assert known or now == onnx.defs.get_schema(node.op_type, 21, node.domain).since_version
    original = onnx.load(path)
    lowered = rebuild(loaded.graph, loaded.store, list(original.graph.output))
    feed = feeds(name)
    for one, other in zip(runtime(original, feed), runtime(lowered, feed), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert np.abs(one - other).max() <= tolerance(name) * np.abs(one).max()


def test_steps_and_boundaries(load: object) -> None:
    loaded = load(SMALL["squeeze-7"])  # type: ignore[operator]
    first, second = loaded.graph.nodes
    assert [step.op_type for step in second.steps()] == ["Constant", "Squeeze"]
    constant, squeeze = second.steps()
    assert squeeze.inputs[0] == second.inputs[0] and squeeze.outputs == second.outputs
    axes = squeeze.inputs[1]
    assert axes.constant and (axes.dtype, axes.shape) == ("int64", (1,)) and axes.name.startswith("S::")
    assert loaded.store.read(constant.attributes["value"]).tolist() == [2]
    assert (second.op_type, second.opset, second.attributes) == ("Squeeze", 7, {"axes": [2]})  # the truth


def test_nothing_to_do_means_no_table(load: object) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Softmax", ["t"], ["y"])]
    for opset in (14, 21, 22, 24):
        loaded = load(make(opset, nodes, {"x": [2, 3]}, ["y"]))  # type: ignore[operator]
        assert [node.lowered for node in loaded.graph.nodes] == [None, None]
        assert [node.opset for node in loaded.graph.nodes] == [opset, opset]


def test_bodies_are_lowered_in_place(load: object) -> None:
    def branch(axis: int, name: str) -> onnx.GraphProto:
        nodes = [helper.make_node("Squeeze", ["x"], [name], axes=[axis])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, None)])

    inner = helper.make_graph(
        [helper.make_node("If", ["c"], ["i"], then_branch=branch(0, "p"), else_branch=branch(1, "q"), name="Inner")],
        "inner", [], [helper.make_tensor_value_info("i", FLOAT, None)],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=branch(0, "r"), name="Outer")
    model = make(11, [node], {"x": [1, 1, 3]}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    loaded = load(model)  # type: ignore[operator]
    check(loaded)
    (outer,) = loaded.graph.nodes
    (step,) = outer.steps()
    assert step.opset == 21 and step.captures == outer.captures
    (within,) = step.attributes["then_branch"].nodes
    assert (within.name, within.lowered) == ("Outer/then/Inner", None)
    assert [n.op_type for n in within.attributes["else_branch"].nodes] == ["Constant", "Squeeze"]
    assert [n.op_type for n in outer.attributes["else_branch"].nodes] == ["Squeeze"]
    lowered = rebuild(loaded.graph, loaded.store, list(model.graph.output))
    x = np.ones((1, 1, 3), np.float32)
    for c in (True, False):
        feed = {"x": x, "c": np.array(c)}
        np.testing.assert_array_equal(runtime(model, feed)[0], ReferenceEvaluator(lowered).run(None, feed)[0])


def test_operators_the_converter_spoils_keep_their_form(load: object) -> None:
    weights = {"s": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    nodes = [
        helper.make_node("GroupNormalization", ["x", "s", "b"], ["n"], num_groups=2, name="G"),
        helper.make_node("Pad", ["n", "p"], ["y"], mode="reflect", name="P"),
    ]
    loaded = load(make(18, nodes, {"x": [2, 4, 5]}, ["y"], {**weights, "p": np.array([0, 0, 1, 0, 0, 1])}))  # type: ignore[operator]
    group, pad = loaded.graph.nodes
    assert group.lowered is None and group.opset == 18
    assert [step.opset for step in pad.steps()] == [21]


def test_unknown_operators_do_not_hold_up_the_others(load: object) -> None:
    nodes = [
        helper.make_node("Custom", ["x"], ["a"], domain="mine", axes=[1], name="C"),
        helper.make_node("Squeeze", ["a"], ["b"], axes=[0], name="S"),
        helper.make_node("FusedThing", ["b"], ["y"], domain="com.microsoft", name="F"),
    ]
    loaded = load(make(11, nodes, {"x": [1, 2]}, ["y"], imports=(("com.microsoft", 1),)))  # type: ignore[operator]
    custom, squeeze, fused = loaded.graph.nodes
    assert custom.lowered is None and fused.lowered is None and custom.attributes == {"axes": [1]}
    assert [step.op_type for step in squeeze.steps()] == ["Constant", "Squeeze"]
    assert not loaded.notes


def test_replaced_nodes_keep_the_names_of_their_outputs(load: object) -> None:
    """The converter renames what Upsample and Scatter make, also where one follows the other or a body reads it."""

    def branch(op: str, name: str) -> onnx.GraphProto:
        nodes = [helper.make_node("Upsample", ["b"], [name + "u"], scales=[1.0, 1.0, 1.0, 2.0], name="U3"),
                 helper.make_node(op, [name + "u"], [name])]  # fmt: skip
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, None)])

    nodes = [
        helper.make_node("Upsample", ["x"], ["a"], scales=[1.0, 1.0, 2.0, 1.0], name="U1"),
        helper.make_node("Upsample", ["a"], ["b"], scales=[1.0, 1.0, 1.0, 2.0], name="U2"),
        helper.make_node("If", ["c"], ["y"], then_branch=branch("Neg", "p"), else_branch=branch("Abs", "q"), name="If"),
    ]
    model = make(8, nodes, {"x": [2, 3, 4, 5]}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    loaded = load(model)  # type: ignore[operator]
    check(loaded)
    assert [node.name for node, step in steps(loaded.graph) if step.op_type == "Resize"] == [
        "U1", "U2", "If/else/U3", "If/then/U3",
    ]  # fmt: skip
    lowered = rebuild(loaded.graph, loaded.store, list(model.graph.output))
    feed = {"x": X, "c": np.array(True)}
    expected = -X.repeat(2, 2).repeat(4, 3)
    np.testing.assert_array_equal(runtime(lowered, feed)[0], expected)


def test_an_operator_that_does_not_convert_is_noted_and_alone_in_it(load: object) -> None:
    nodes = [
        helper.make_node("Upsample", ["x", "s"], ["a"], mode="nearest", name="U"),  # scales known only in the run
        helper.make_node("Squeeze", ["x"], ["b"], axes=[0], name="S"),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    loaded = load(make(9, nodes, {"x": [1, 1, 2, 2], "s": [4]}, ["y"]))  # type: ignore[operator]
    check(loaded)
    upsample, squeeze = loaded.graph.nodes[:2]
    assert [step.op_type for step in squeeze.steps()] == ["Constant", "Squeeze"]
    assert upsample.lowered is not None or any("Upsample" in note for note in loaded.notes)


def test_large_tensors_pass_through_as_references(load: object) -> None:
    big = np.random.default_rng(0).standard_normal((1, 3, 4, 200)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(big)),
        helper.make_node("Add", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "k"], ["m"]),
        helper.make_node("Squeeze", ["m"], ["y"], axes=[0]),
    ]
    model = make(11, nodes, {"x": [1, 3, 4, 200]}, ["y"], {"w": big})
    loaded = load(model)  # type: ignore[operator]
    lowered = rebuild(loaded.graph, loaded.store, list(model.graph.output))
    np.testing.assert_array_equal(runtime(model, {"x": big})[0], runtime(lowered, {"x": big})[0])


@pytest.mark.parametrize("opset", [7, 9, 10, 12])
def test_the_mask_of_dropout_has_the_type_of_its_opset(opset: int) -> None:
    """The type of the input before opset 10; the converter leaves it declared and makes another."""
    mask = builders.tensor("mask", [2, 3], TensorProto.BOOL if opset >= 10 else TensorProto.FLOAT)
    x_info, outputs = builders.tensor("x", [2, 3]), [builders.tensor("y", [2, 3]), mask]
    made = builders.model([builders.node("Dropout", "x", "y mask")], [x_info], outputs, opset=opset, ir_version=4)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with InferenceSession(made) as session:
        y, kept = session.run(None, {"x": x})
    np.testing.assert_array_equal(y, x)
    assert kept.dtype == (bool if opset >= 10 else np.float32) and kept.all()


def renumbered() -> Iterator[tuple[int, list[onnx.NodeProto]]]:
    """(opset, nodes without attributes) of what is only renumbered; bodies aside, which are lowered by themselves."""
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    for opset in range(1, lowering.TARGET):
        nodes = []
        for name in sorted(names - {"If", "Loop", "Scan"}):
            if onnx.defs.has(name, opset) and lowering._change(name, opset) == lowering._RENUMBER:
                schema = onnx.defs.get_schema(name, opset)
                inputs = [f"{name} i{i}" for i in range(max(schema.min_input, 1 if schema.inputs else 0))]
                outputs = [f"{name} o{i}" for i in range(max(schema.min_output, 1))]
                nodes.append(helper.make_node(name, inputs, outputs, name=name))
        yield opset, nodes


def test_what_is_only_renumbered_is_left_as_it_is_by_the_converter_too() -> None:
    seen = set()
    for opset, nodes in renumbered():
        inputs = {name: [2, 3] for node in nodes for name in node.input}
        model = make(opset, nodes, inputs, [name for node in nodes for name in node.output])
        converted = version_converter.convert_version(model, lowering.TARGET).graph.node
        for node, same in zip(nodes, converted, strict=True):
            assert (same.op_type, same.input, same.attribute) == (node.op_type, node.input, []), opset
            seen.add((node.op_type, onnx.defs.get_schema(node.op_type, opset).since_version))
    assert len(seen) > 100
