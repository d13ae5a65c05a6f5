"""Sequence and optional operators of the cpu provider, against onnxruntime; where it fails or crashes, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from outrider.providers.contract import KernelError
from tests.program_harness import check_model, model, run_cpu

pytestmark = pytest.mark.fast

F32 = np.float32
A, B, C = np.array([1, 2], F32), np.array([3, 4, 5], F32), np.array([9], F32)
X = np.arange(12, dtype=F32).reshape(3, 4)
FLOATS = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))


def one(op: str, feeds: dict[str, Any], out: str = "seq(float)", **attributes: Any) -> onnx.ModelProto:
    """A model of one node; shapes are left open."""
    infos = []
    for name, item in feeds.items():
        if isinstance(item, list):
            infos.append(helper.make_value_info(name, FLOATS))
        else:
            element = helper.np_dtype_to_tensor_dtype(item.dtype)
            infos.append(helper.make_tensor_value_info(name, element, [None] * item.ndim))
    result = helper.make_value_info("y", FLOATS) if out == "seq(float)" else onnx.ValueInfoProto(name="y")
    if out != "seq(float)":
        result.type.tensor_type.elem_type = {"float": TensorProto.FLOAT, "int64": TensorProto.INT64}[out]
    node = helper.make_node(op, list(feeds), ["y"], name="node", **attributes)
    graph = helper.make_graph([node], "one", infos, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def fails(proto: onnx.ModelProto, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message) as caught:
        run_cpu(proto, feeds)
    assert caught.value.node == "node"


def at(position: Any, dtype: type = np.int64) -> np.ndarray:
    return np.array(position, dtype)


@pytest.mark.parametrize("position", [None, 2, 0, 1, -1, -2])
def test_insert(position: int | None) -> None:
    feeds = {"s": [A, B], "x": C} | ({} if position is None else {"i": at(position)})
    check_model(one("SequenceInsert", feeds), feeds)


@pytest.mark.parametrize("position", [3, -3])
def test_insert_out_of_range(position: int) -> None:
    feeds = {"s": [A, B], "x": C, "i": at(position)}
    fails(one("SequenceInsert", feeds), feeds, rf"position {position} is outside \[-2, 2\]")


def test_insert_of_another_dtype() -> None:
    proto = model("""agraph (seq(float[N]) s, int64[1] x) => (int64 n) {
        a = SequenceEmpty<dtype = 7>()  b = SequenceInsert(a, x)  n = SequenceLength(b) }""")
    check_model(proto, {"s": [A], "x": at([1])})


@pytest.mark.parametrize("position", [None, -1, 1, 0, -2])
def test_erase(position: int | None) -> None:
    feeds: dict[str, Any] = {"s": [A, B]} | ({} if position is None else {"i": at(position)})
    check_model(one("SequenceErase", feeds), feeds)


@pytest.mark.parametrize("position", [2, -3])
def test_erase_out_of_range(position: int) -> None:
    feeds = {"s": [A, B], "i": at(position)}
    fails(one("SequenceErase", feeds), feeds, rf"position {position} is outside \[-2, 1\]")


def test_erase_from_nothing() -> None:
    fails(one("SequenceErase", {"s": []}), {"s": []}, "empty sequence")


@pytest.mark.parametrize("position", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_at(position: int, dtype: type) -> None:
    feeds = {"s": [A, B], "i": at(position, dtype)}
    check_model(one("SequenceAt", feeds, "float"), feeds)


@pytest.mark.parametrize("position", [2, -3])
def test_at_out_of_range(position: int) -> None:
    feeds = {"s": [A, B], "i": at(position)}
    fails(one("SequenceAt", feeds, "float"), feeds, rf"position {position} is outside \[-2, 1\] of a sequence of 2")


def test_construct_erase_length() -> None:
    proto = model("""agraph (float[2] x) => (int64 n, int64 none, seq(float[2]) s) {
        a = SequenceConstruct(x)  b = SequenceErase(a)  n = SequenceLength(b)
        e = SequenceEmpty()  none = SequenceLength(e)  s = SequenceConstruct(x, x, x) }""")
    check_model(proto, {"x": A})


SPLITS: dict[str, tuple[Any, dict[str, int]]] = {
    "default": (None, {}),
    "keepdims 0": (None, {"keepdims": 0}),
    "axis 1, keepdims 0": (None, {"axis": 1, "keepdims": 0}),
    "axis -1": (None, {"axis": -1}),
    "scalar 2": (at(2), {}),
    "scalar 5": (at(5), {}),
    "sizes": (at([1, 2]), {}),
    "sizes of int32": (at([1, 2], np.int32), {}),
    "an empty piece": (at([0, 3]), {}),
    "sizes with keepdims 0": (at([1, 1, 1]), {"keepdims": 0}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_to_sequence(name: str) -> None:
    split, attributes = SPLITS[name]
    feeds = {"x": X} | ({} if split is None else {"split": split})
    check_model(one("SplitToSequence", feeds, **attributes), feeds)


def test_split_ignores_keepdims_where_split_is_given() -> None:
    """As the specification says; onnxruntime fails on chunks of more than one."""
    feeds = {"x": X, "split": at(2)}
    check_model(one("SplitToSequence", feeds, keepdims=0), feeds, [[X[:2], X[2:]]])


@pytest.mark.parametrize("split", [None, at(2)])
def test_split_of_nothing(split: Any) -> None:
    feeds = {"x": np.empty((0, 4), F32)} | ({} if split is None else {"split": split})
    check_model(one("SplitToSequence", feeds), feeds, [[]])


@pytest.mark.parametrize(
    ("split", "message"),
    [(0, "must be positive"), (-1, "must be positive"), ([1, 1], "add up to 3"), ([-1, 4], "add up to 3"),
     ([[1, 2]], "scalar or a list")],
)  # fmt: skip
def test_wrong_splits(split: Any, message: str) -> None:
    feeds = {"x": X, "split": at(split)}
    fails(one("SplitToSequence", feeds), feeds, message)


M = np.array([[1, 2], [3, 4]], F32)
CONCATS: dict[str, tuple[list[np.ndarray], dict[str, int]]] = {
    "rows": ([M, np.array([[5, 6]], F32)], {"axis": 0}),
    "last axis": ([M, M], {"axis": -1}),
    "an empty piece": ([np.empty((0, 2), F32), M[:1]], {"axis": 0}),
    "stack first": ([M, M], {"axis": 0, "new_axis": 1}),
    "stack last": ([M, M], {"axis": 2, "new_axis": 1}),
    "stack -1": ([M, M], {"axis": -1, "new_axis": 1}),
    "stack -3": ([M, M], {"axis": -3, "new_axis": 1}),
    "stack scalars": ([np.array(1, F32), np.array(2, F32)], {"axis": -1, "new_axis": 1}),
}


@pytest.mark.parametrize("name", CONCATS)
def test_concat_from_sequence(name: str) -> None:
    items, attributes = CONCATS[name]
    check_model(one("ConcatFromSequence", {"s": items}, "float", **attributes), {"s": items})


@pytest.mark.parametrize(
    ("items", "attributes", "message"),
    [
        ([M, M], {"axis": 2}, r"axis 2 is outside \[-2, 1\]"),
        ([M, M], {"axis": 3, "new_axis": 1}, r"axis 3 is outside \[-3, 2\]"),
        ([], {"axis": 0}, "empty sequence"),
        ([M, np.ones((1, 3), F32)], {"axis": 0}, "dimensions"),
    ],
)
def test_wrong_concats(items: list[np.ndarray], attributes: dict[str, int], message: str) -> None:
    fails(one("ConcatFromSequence", {"s": items}, "float", **attributes), {"s": items}, message)


def test_optionals_of_tensors() -> None:
    proto = model("""agraph (float[2] x) => (float[2] y, bool some, bool none) {
        o = Optional(x)  y = OptionalGetElement(o)  some = OptionalHasElement(o)  none = OptionalHasElement() }""")
    check_model(proto, {"x": A}, [A, np.array(True), np.array(False)])


def optional_input() -> onnx.ModelProto:
    """y = whether there is an element, z = its length or an error."""
    element = helper.make_optional_type_proto(FLOATS)
    graph = helper.make_graph(
        [
            helper.make_node("OptionalHasElement", ["o"], ["y"]),
            helper.make_node("OptionalGetElement", ["o"], ["s"], name="node"),
            helper.make_node("SequenceLength", ["s"], ["z"]),
        ],
        "optional",
        [helper.make_value_info("o", element)],
        [helper.make_tensor_value_info("y", TensorProto.BOOL, []), helper.make_tensor_value_info("z", 7, [])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_optional_inputs() -> None:
    check_model(optional_input(), {"o": [A, B, C]}, [np.array(True), np.array(3)])
    fails(optional_input(), {"o": None}, "the optional is empty")


def zipped(scores: np.ndarray, **labels: Any) -> onnx.ModelProto:
    """A model of ZipMap alone."""
    key = TensorProto.STRING if "classlabels_strings" in labels else TensorProto.INT64
    of_map = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    result = helper.make_value_info("y", helper.make_sequence_type_proto(of_map))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * scores.ndim)
    zip_map = helper.make_node("ZipMap", ["x"], ["y"], name="node", domain="ai.onnx.ml", **labels)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    graph = helper.make_graph([zip_map], "one", [given], [result])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("scores", [X, X[0], X[:0]], ids=["rows", "one row", "none"])
@pytest.mark.parametrize(
    "labels", [{"classlabels_int64s": [4, 0, -7, 2]}, {"classlabels_strings": ["a", "b", "ß", ""]}], ids=["int", "str"]
)
def test_maps_of_scores(scores: np.ndarray, labels: dict[str, Any]) -> None:
    proto = zipped(scores, **labels)
    (got,) = run_cpu(proto, {"x": scores})
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": scores})
    assert [list(row.items()) for row in got] == [list(row.items()) for row in expected]
    assert all(score.dtype == F32 for row in got for score in row.values())


def test_scores_that_are_not_one_for_each_class() -> None:
    fails(zipped(X, classlabels_int64s=[1, 2]), {"x": X}, r"shape \[3, 4\] are not one for each of 2 classes")
