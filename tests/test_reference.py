"""The stop-gap: nodes that `onnx.reference` serves are right, counted, told apart, and refused where it is wrong."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from outrider.providers.contract import Claim, Decline
from outrider.providers.cpu import reference
from outrider.providers.cpu.kernels.frame import Unsupported
from outrider.providers.wire.graph import Node, Value
from tests.program_harness import Bound, check_model, compiled, model, offers

pytestmark = pytest.mark.fast

F32 = np.float32
X = np.linspace(0.1, 2, 12, dtype=F32).reshape(3, 4)


def test_a_node_without_kernel_is_served_and_counted() -> None:
    proto = model("""agraph (float[3, 3] x) => (float y) { a = Neg(x)  [odd] d = Det(a)  y = Neg(d) }""")
    x = np.array([[1, 2, 3], [0, 4, 5], [1, 0, 6]], F32)
    check_model(proto, {"x": x}, rtol=1e-5)
    with compiled(proto) as (provider, program, unit):
        assert program.reference_nodes == ("odd",)
        Bound(program, unit, {"x": x}).run()
        stats = provider.stats()
        assert (stats["reference_nodes"], stats["reference_ops"]) == (1, {"ai.onnx::Det": 1})
    claims = [offer for offer in offers(proto) if isinstance(offer, Claim)]
    assert [claim.reference for claim in claims] == [False, True, False]


def test_one_in_a_body_marks_the_node_around_it() -> None:
    proto = model("""agraph (bool c, float[2, 2] x) => (float y) {
        [choose] y = If (c) <then_branch = t () => (float a) { [odd] a = Det(x) },
                             else_branch = e () => (float b) { b = ReduceSum<keepdims = 0>(x) }> }""")
    (claim,) = offers(proto)
    assert isinstance(claim, Claim)
    assert claim.reference
    with compiled(proto) as (_, program, _unit):
        assert "choose/then/odd" in program.reference_nodes


def test_constants_through_the_stop_gap_are_made_once() -> None:
    proto = model("""agraph (float x) => (float y) <float[2, 2] w = {1, 2, 3, 4}> { d = Det(w)  y = Add(x, d) }""")
    with compiled(proto) as (provider, program, unit):
        assert Bound(program, unit, {"x": np.array(1, F32)}).run()[0] == pytest.approx(-1)
        assert provider.stats()["unbound_nodes"] == 0


def test_operators_that_onnx_defines_as_functions() -> None:
    """SoftmaxCrossEntropyLoss is one; here with an omitted input and two outputs."""
    proto = model("""agraph (float[3, 4] x, int64[3] t) => (float loss, float[3, 4] p) {
        loss, p = SoftmaxCrossEntropyLoss(x, t) }""")
    check_model(proto, {"x": X, "t": np.array([0, 3, 1])}, rtol=1e-5)


def test_strings_and_lists_of_strings_of_another_domain() -> None:
    node = helper.make_node(
        "LabelEncoder", ["s"], ["y"], domain="ai.onnx.ml", keys_strings=["a", "b"], values_int64s=[7, 9],
        default_int64=-1,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "labels",
        [helper.make_tensor_value_info("s", TensorProto.STRING, [None])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [None])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 4)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    check_model(proto, {"s": np.array(["b", "zzz", "a"], object)}, [np.array([9, -1, 7])])


def test_tensor_attributes_and_signatures_that_change() -> None:
    node = helper.make_node(
        "LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml",
        keys_tensor=helper.make_tensor("", TensorProto.INT64, [2], [1, 2]),
        values_tensor=helper.make_tensor("", TensorProto.FLOAT, [2], [0.5, 0.25]),
        default_tensor=helper.make_tensor("", TensorProto.FLOAT, [1], [0]),
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "labels",
        [helper.make_tensor_value_info("x", TensorProto.INT64, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 4)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with compiled(proto) as (_, program, unit):
        for x in (np.array([2, 1, 3]), np.array([[1], [2]])):
            expected = np.choose(x - 1, [0.5, 0.25, 0]).astype(F32)
            np.testing.assert_array_equal(Bound(program, unit, {"x": x}).run()[0], expected)


def plain(op_type: str, opset: int, shape: tuple[int, ...] = (1, 2, 3), **attributes: object) -> Node:
    value = Value("x", "float32", shape)
    return Node(0, "n", op_type, "", opset, attributes, (value, value), (Value("y", "float32"),))


@pytest.mark.parametrize(
    "node",
    [
        plain("BatchNormalization", 13),
        plain("BatchNormalization", 15, training_mode=1),
        plain("GlobalMaxPool", 21),
        plain("GatherElements", 21, axis=-1),
        plain("QuantizeLinear", 13),
        plain("DequantizeLinear", 13),
        plain("Scatter", 11),
        plain("NoSuchOperator", 21),
    ],
    ids=lambda node: f"{node.op_type}-{node.opset}",
)
def test_what_the_reference_gets_wrong_or_lacks_is_refused(node: Node) -> None:
    with pytest.raises(Unsupported):
        reference.stop_gap(node)


def test_what_it_gets_right_nearby_is_served() -> None:
    for node in (plain("GlobalMaxPool", 21, (1, 2, 3, 4)), plain("GatherElements", 21, axis=1)):
        assert reference.stop_gap(node).deterministic
    assert not reference.stop_gap(plain("Bernoulli", 21)).deterministic


def test_without_the_onnx_package_the_node_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="not installed"):
        reference.stop_gap(plain("Det", 21))


def test_an_unknown_operator_is_declined_with_both_reasons() -> None:
    proto = model("agraph (float[2] x) => (float[2] y) { y = nobody.Does(x) }", nobody=1)
    (answer,) = offers(proto)
    assert isinstance(answer, Decline)
    assert "no kernel for nobody::Does" in answer.reason
    assert "stop-gap: ONNX has no operator" in answer.reason


def test_evaluators_are_kept() -> None:
    proto = model("agraph (float[2, 2] x) => (float y) { y = Det(x) }")
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"x": np.eye(2, dtype=F32)})
        bound.run()
        made: list[object] = []
        original = onnx.reference.ReferenceEvaluator.__init__

        def counted(self: object, *args: object, **kwargs: object) -> None:
            made.append(self)
            original(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(onnx.reference.ReferenceEvaluator, "__init__", counted)
            assert bound.run({"x": 2 * np.eye(2, dtype=F32)})[0] == pytest.approx(4)
        assert not made
