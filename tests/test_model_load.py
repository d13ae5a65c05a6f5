"""From a file to the plain graph: what is refused and how, what survives, and where constants end up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.graph import Graph, Node, TensorRef, Value
from outrider.scheduler import model as loading
from outrider.scheduler.model import LoadedModel
from outrider.scheduler.model_errors import ModelLimitError, ModelLoadError, ModelNotFoundError
from tests.models import MODELS, model_path

pytestmark = pytest.mark.fast

FLOAT = TensorProto.FLOAT
OPEN: list[LoadedModel] = []


def load_model(*arguments: object, **more: object) -> LoadedModel:
    OPEN.append(loading.load_model(*arguments, **more))  # type: ignore[arg-type]
    return OPEN[-1]


@pytest.fixture(autouse=True)
def close_stores() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().store.close()


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[object]],
    outputs: list[str],
    weights: list[onnx.TensorProto] = [],  # noqa: B006
    opset: int = 17,
    **more: object,
) -> onnx.ModelProto:
    """A float32 model; shapes of outputs are left open."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        initializer=weights,
    )
    imports = more.pop("opset_imports", [helper.make_opsetid("", opset)])
    return helper.make_model(graph, opset_imports=imports, **more)


def relu() -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"], name="R")], {"x": ["N", 4]}, ["y"])


def every_node(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for _, body in node.bodies():
            yield from every_node(body)


def find(loaded: LoadedModel, name: str) -> Node:
    return next(node for node in every_node(loaded.graph) if node.name == name)


# What is refused ---------------------------------------------------------------------------------------------------
def test_files_that_are_no_models(tmp_path: Path) -> None:
    whole = relu().SerializeToString()
    no_graph = onnx.ModelProto(ir_version=8)
    no_graph.opset_import.add(version=17)
    no_opset = relu()
    del no_opset.opset_import[:]
    cases = {
        "missing": (None, ModelNotFoundError, "no such file"),
        "empty": (b"", ModelLoadError, "is empty"),
        "truncated": (whole[: len(whole) * 2 // 3], ModelLoadError, "cut short"),
        "text": (b"this is not a protobuf at all", ModelLoadError, "not an ONNX model"),
        "no_graph": (no_graph.SerializeToString(), ModelLoadError, "no graph"),
        "no_opset": (no_opset.SerializeToString(), ModelLoadError, "opset_import"),
    }
    for name, (data, kind, text) in cases.items():
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(kind, match=text) as caught:
            load_model(path)
        assert caught.value.path == str(path)
        if data:
            with pytest.raises(ModelLoadError, match=text):
                load_model(data)
    with pytest.raises(ModelLoadError, match="folder"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_model(str(tmp_path / "missing"))
    with pytest.raises(ModelLoadError, match="null character"):
        load_model("a\0b.onnx")
    with pytest.raises(ModelLoadError, match="path, bytes or a ModelProto"):
        load_model(3)  # type: ignore[arg-type]


def doubling(levels: int) -> onnx.ModelProto:
    functions = []
    for i in range(levels):
        below = f"f{i - 1}" if i else "Relu"
        domain = "d" if i else ""
        nodes = [
            helper.make_node(below, ["x"], ["t"], domain=domain),
            helper.make_node(below, ["t"], ["y"], domain=domain),
        ]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
        functions.append(helper.make_function("d", f"f{i}", ["x"], ["y"], nodes, imports))
    call = helper.make_node(f"f{levels - 1}", ["x"], ["y"], domain="d")
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    return model([call], {"x": [1]}, ["y"], opset_imports=imports, functions=functions)


def test_functions_that_double_are_bounded_before_anything_expands_them() -> None:
    begin = time.process_time()
    with pytest.raises(ModelLimitError, match="after its functions are expanded") as caught:
        load_model(doubling(27))
    assert caught.value.what == "nodes" and caught.value.got > caught.value.limit
    assert time.process_time() - begin < 30  # unbounded, shape inference alone takes minutes
    assert len(load_model(doubling(8)).functions) == 8


def test_functions_that_call_themselves_are_named() -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    functions = [
        helper.make_function("d", a, ["x"], ["y"], [helper.make_node(b, ["x"], ["y"], domain="d")], imports)
        for a, b in (("A", "B"), ("B", "C"), ("C", "B"))
    ]
    call = helper.make_node("A", ["x"], ["y"], domain="d")
    with pytest.raises(ModelLoadError, match="d::B -> d::C -> d::B"):
        load_model(model([call], {"x": [1]}, ["y"], opset_imports=imports, functions=functions))


def test_nesting_is_bounded() -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    functions = [
        helper.make_function(
            "d", f"f{i}", ["x"], ["y"], [helper.make_node(f"f{i + 1}", ["x"], ["y"], domain="d")], imports
        )
        for i in range(100)
    ]
    call = helper.make_node("f0", ["x"], ["y"], domain="d")
    with pytest.raises(ModelLimitError, match="64 deep"):
        load_model(model([call], {"x": [1]}, ["y"], opset_imports=imports, functions=functions))

    proto = model([helper.make_node("Identity", ["x"], ["y"])], {"x": []}, ["y"])
    graph = proto.graph
    for _ in range(90):  # more than protobuf itself parses
        node = graph.node.add(op_type="If", input=["x"], output=["z"])
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        graph.output.add(name="z")
    with pytest.raises(ModelLimitError, match="30 deep"):
        load_model(proto)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([("Add", ["x", "nowhere"], ["y"], "A")], "'A' reads value 'nowhere'"),
        ([("Relu", ["x"], ["t"], "A")], "output 'y'"),
        ([("Relu", ["x"], ["y"], "A"), ("Abs", ["x"], ["y"], "B")], "'y' of node 'B' is made by node 'A'"),
        ([("Relu", ["x"], ["x"], "A"), ("Relu", ["x"], ["y"], "B")], "an input or initializer"),
        ([("Add", ["x", "b"], ["y"], "A"), ("Relu", ["y"], ["b"], "B")], "'A' -> 'B' -> 'A'|'B' -> 'A' -> 'B'"),
        ([("Relu", ["x", "x"], ["y"], "A")], "not valid ONNX.*A"),
    ],
)
def test_graphs_that_do_not_hang_together(nodes: list[tuple[str, list[str], list[str], str]], text: str) -> None:
    protos = [helper.make_node(op, inputs, outputs, name=name) for op, inputs, outputs, name in nodes]
    with pytest.raises(ModelLoadError, match=text):
        load_model(model(protos, {"x": [1]}, ["y"]))


def test_nodes_out_of_order_are_sorted() -> None:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["y"], name="last"),
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("Abs", ["a"], ["b"]),
    ]
    loaded = load_model(model(nodes, {"x": [3]}, ["y"]))
    assert [node.name for node in loaded.graph.nodes] == ["first", "#2", "last"]
    assert [node.index for node in loaded.graph.nodes] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: setattr(t, "raw_data", t.raw_data[:-4]), "has 12 bytes where float32.* takes 16"),
        (lambda t: t.dims.__setitem__(0, -1), "negative dimension"),
        (lambda t: setattr(t, "data_type", 99), "element type 99"),
        (lambda t: (t.ClearField("raw_data"), t.float_data.extend([1, 2])), "malformed|elements|too little"),
    ],
)
def test_malformed_initializers_are_named(change: object, text: str) -> None:
    weight = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    change(weight)  # type: ignore[operator]
    with pytest.raises(ModelLoadError, match=f"initializer 'w'.*({text})"):
        load_model(model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, ["y"], [weight]))


# External data -----------------------------------------------------------------------------------------------------
def external(
    location: str, shape: list[int], offset: object = None, length: object = None, dtype: int = FLOAT
) -> TensorProto:
    tensor = TensorProto(name="w", data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def with_external(tensor: TensorProto) -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": list(tensor.dims)}, ["y"], [tensor])


def test_external_data_is_found_and_read_on_demand(tmp_path: Path) -> None:
    data = np.arange(12, dtype=np.float32)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"\0" * 64 + data.tobytes())
    proto = with_external(external("sub/w.bin", [3, 4], 64, 48))
    onnx.save(proto, tmp_path / "m.onnx")
    for loaded in (load_model(tmp_path / "m.onnx"), load_model(proto, base_dir=tmp_path)):
        ref = loaded.graph.constants["w"]
        assert (ref.path, ref.offset, ref.nbytes) == (os.path.realpath(tmp_path / "sub" / "w.bin"), 64, 48)
        np.testing.assert_array_equal(loaded.store.read(ref), data.reshape(3, 4))
        assert not loaded.store.seal()  # nothing of it was copied


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (external("../w.bin", [4]), "outside the model's folder"),
        (external("sub/../../w.bin", [4]), "outside the model's folder"),
        (external("{outside}", [4]), "outside the model's folder"),
        (external("link.bin", [4]), "outside the model's folder"),
        (external("gone.bin", [4]), "missing"),
        (external("", [4]), "without a usable location"),
        (external("folder", [4]), "not a file"),
        (external("w.bin", [5]), "has 16"),
        (external("w.bin", [4], 4), "has 16"),
        (external("w.bin", [4], -4), "has 16"),
        (external("w.bin", [4], 0, 12), "12 external bytes"),
        (external("w.bin", [4], "much"), "not a number"),
    ],
)
def test_external_data_out_of_reach(tmp_path: Path, tensor: TensorProto, text: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "folder").mkdir()
    for place in (tmp_path, folder):
        (place / "w.bin").write_bytes(bytes(16))
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    for entry in tensor.external_data:
        entry.value = entry.value.replace("{outside}", str(tmp_path / "w.bin"))
    with pytest.raises(ModelLoadError, match=f"'w'.*{text}"):
        load_model(with_external(tensor), base_dir=folder)


def test_a_linked_model_keeps_its_data_where_the_link_leads(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "w").write_bytes(np.full(4, 7, np.float32).tobytes())
    onnx.save(with_external(external("w.bin", [4])), blobs / "m")
    (snapshot / "m.onnx").symlink_to(blobs / "m")
    (snapshot / "w.bin").symlink_to(blobs / "w")
    loaded = load_model(snapshot / "m.onnx")
    np.testing.assert_array_equal(loaded.store.read(loaded.graph.constants["w"]), np.full(4, 7, np.float32))


def test_three_gigabytes_of_external_data_are_not_read(tmp_path: Path) -> None:
    size = 3 * 2**30
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(size)
    onnx.save(with_external(external("w.bin", [size // 4])), tmp_path / "m.onnx")
    before = _resident()
    loaded = load_model(tmp_path / "m.onnx")
    assert loaded.graph.constants["w"].nbytes == size
    assert _resident() - before < 200 * 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Constants ---------------------------------------------------------------------------------------------------------
ELEMENTS = [number for number, dtype in BY_NUMBER.items() if dtype not in ("undefined", "string")]


@pytest.mark.parametrize("count", [5, 4096])  # kept in the skeleton, and not
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("number", ELEMENTS, ids=lambda n: BY_NUMBER[n])
def test_every_dtype_reads_back(number: int, raw: bool, count: int) -> None:
    dtype = numpy_dtype(BY_NUMBER[number])
    values = np.arange(count) % 2 + (number == TensorProto.FLOAT8E8M0)  # which has no zero
    array = values.astype(dtype)
    tensor = numpy_helper.from_array(array, "w")
    if not raw:
        tensor = helper.make_tensor("w", number, [count], values.tolist())
    assert tensor.HasField("raw_data") == raw
    proto = model([helper.make_node("Identity", ["w"], ["y"])], {}, ["y"], [tensor], 24)
    proto.graph.output[0].type.tensor_type.elem_type = number
    loaded = load_model(proto)
    ref = loaded.graph.constants["w"]
    assert ref == TensorRef(BY_NUMBER[number], (count,), 0, count * dtype.itemsize, segment=1)
    read = loaded.store.read(ref)
    assert read.dtype == dtype and not read.flags.writeable
    np.testing.assert_array_equal(read.view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4e2m1", "int2", "uint2"])
def test_external_packed_types_are_unpacked_when_read(tmp_path: Path, dtype: str) -> None:
    values = np.array([1, 0, 1, 1, 0, 1, 1], numpy_dtype(dtype))
    packed = numpy_helper.from_array(values, "w")
    (tmp_path / "w.bin").write_bytes(packed.raw_data)
    weight = external("w.bin", [7], dtype=packed.data_type)
    proto = model([helper.make_node("Identity", ["w"], ["y"])], {}, ["y"], [weight], 25)
    proto.graph.output[0].type.tensor_type.elem_type = packed.data_type
    loaded = load_model(proto, base_dir=tmp_path)
    ref = loaded.graph.constants["w"]
    assert ref.packed and ref.nbytes == len(packed.raw_data)
    np.testing.assert_array_equal(loaded.store.read(ref), values)


def test_strings_are_offsets_and_text() -> None:
    texts = ["", "grün", "a\0b", "long" * 500]
    tensor = helper.make_tensor("w", TensorProto.STRING, [2, 2], [text.encode() for text in texts])
    proto = model([helper.make_node("Identity", ["w"], ["y"])], {}, ["y"], [tensor])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.STRING
    loaded = load_model(proto)
    ref = loaded.graph.constants["w"]
    assert ref.nbytes == 5 * 8 + sum(len(text.encode()) for text in texts)
    assert loaded.store.read(ref).tolist() == [texts[:2], texts[2:]]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value_float": 1.5}, np.float32(1.5)),
        ({"value_floats": [1.0, 2.0]}, np.array([1, 2], np.float32)),
        ({"value_int": -3}, np.int64(-3)),
        ({"value_ints": [4, 5]}, np.array([4, 5], np.int64)),
        ({"value": numpy_helper.from_array(np.ones((2, 3000), np.float16))}, np.ones((2, 3000), np.float16)),
        ({"value_string": "ja"}, np.array("ja", object)),
        ({"value_strings": ["a", "b"]}, np.array(["a", "b"], object)),
    ],
)
def test_constant_nodes_become_constants(attribute: dict[str, object], expected: np.ndarray) -> None:
    nodes = [helper.make_node("Constant", [], ["c"], name="K", **attribute), helper.make_node("Identity", ["c"], ["y"])]
    loaded = load_model(model(nodes, {}, ["y"]))
    assert loaded.constant_nodes == (("K", "c"),)
    assert [node.name for node in loaded.graph.nodes] == ["#1"]
    read = loaded.store.read(loaded.graph.constants["c"])
    assert read.shape == np.shape(expected) and read.dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(read, expected)
    assert loaded.graph.nodes[0].inputs[0].constant and loaded.graph.nodes[0].outputs[0].constant


def sparse(name: str, shape: list[int], indices: np.ndarray, values: np.ndarray) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        numpy_helper.from_array(values, name), numpy_helper.from_array(indices, "at"), shape
    )


def test_sparse_constants_are_made_dense() -> None:
    flat = sparse("w", [2, 3], np.array([1, 5]), np.array([7, 8], np.float32))
    pairs = sparse("k", [2, 3], np.array([[0, 0], [1, 1]]), np.array([1, 2], np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], sparse_value=pairs),
        helper.make_node("Add", ["w", "k"], ["t"]),
        helper.make_node("Add", ["t", "x"], ["y"]),
    ]
    proto = model(nodes, {"x": [2, 3]}, ["y"])
    proto.graph.sparse_initializer.append(flat)
    loaded = load_model(proto)
    read = loaded.store.read
    assert read(loaded.graph.constants["w"]).tolist() == [[0, 7, 0], [0, 0, 8]]
    assert read(loaded.graph.constants["k"]).tolist() == [[1, 0, 0], [0, 2, 0]]

    proto.graph.sparse_initializer[0].CopyFrom(sparse("w", [2**20, 2**20], np.array([1]), np.ones(1, np.float32)))
    with pytest.raises(ModelLimitError, match="too large"):
        load_model(proto)
    proto.graph.sparse_initializer[0].CopyFrom(sparse("w", [2, 3], np.array([6]), np.ones(1, np.float32)))
    with pytest.raises(ModelLoadError, match="indices"):
        load_model(proto)


def test_equal_small_constants_are_stored_once_and_large_ones_lie_between_them() -> None:
    weights = [numpy_helper.from_array(np.full(n, v, np.float32), name) for name, n, v in
               (("a", 3, 1), ("b", 3, 1), ("big", 5000, 2), ("c", 3, 3), ("huge", 6000, 4), ("d", 3, 5))]  # fmt: skip
    nodes = [helper.make_node("Identity", [w.name], [f"y{i}"]) for i, w in enumerate(weights)]
    loaded = load_model(model(nodes, {}, [f"y{i}" for i in range(6)], weights))
    refs = loaded.graph.constants
    assert refs["a"] == refs["b"]
    spans = sorted((ref.offset, ref.offset + ref.nbytes) for ref in set(refs.values()))
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(start % 64 == 0 for start, _ in spans)
    for sealed in (False, True):
        for weight in weights:
            np.testing.assert_array_equal(loaded.store.read(refs[weight.name]), numpy_helper.to_array(weight))
        assert bool(loaded.store.seal()) or not sealed
    later = loaded.store.add(numpy_helper.from_array(np.full(7, 9, np.float32)), "later")
    assert later.segment == 2  # the first segment is closed
    assert loaded.store.read(later).tolist() == [9] * 7


# The plain graph ---------------------------------------------------------------------------------------------------
def branch(node: onnx.NodeProto, output: str) -> onnx.GraphProto:
    return helper.make_graph([node], "b", [], [helper.make_tensor_value_info(output, FLOAT, None)])


def test_names_and_captures() -> None:
    inner = helper.make_node(
        "If", ["c"], ["i"], name="Inner",
        then_branch=branch(helper.make_node("Add", ["a", "w"], ["p"]), "p"),
        else_branch=branch(helper.make_node("Relu", ["x"], ["q"], name="Q"), "q"),
    )  # fmt: skip
    outer = helper.make_node(
        "If", ["c"], ["y"],
        then_branch=branch(inner, "i"),
        else_branch=branch(helper.make_node("Relu", ["a"], ["r"], name="same"), "r"),
    )  # fmt: skip
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="same"),
        outer,
        helper.make_node("Relu", ["y"], ["z"], name="same"),
    ]
    proto = model(nodes, {"x": [2]}, ["z"], [numpy_helper.from_array(np.ones(2, np.float32), "w")])
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    loaded = load_model(proto)
    names = [node.name for node in every_node(loaded.graph)]
    assert names == [  # the helper that made the nodes sorts their attributes
        "same", "#1", "#1/else/same", "#1/then/Inner", "#1/then/Inner/else/Q", "#1/then/Inner/then/#0", "same~2",
    ]  # fmt: skip
    assert {value.name for value in find(loaded, "#1").captures} == {"a", "w", "x", "c"}
    assert {value.name for value in find(loaded, "#1/then/Inner").captures} == {"a", "w", "x"}
    add = find(loaded, "#1/then/Inner/then/#0")
    assert add.inputs == (Value("a", "float32", (2,)), Value("w", "float32", (2,), constant=True))
    assert [n.index for _, body in find(loaded, "#1").bodies() for n in body.nodes] == [0, 0]


def test_omitted_inputs_keep_their_position_and_trailing_ones_go() -> None:
    nodes = [helper.make_node("Clip", ["x", "", "hi"], ["t"]), helper.make_node("Clip", ["t", "", ""], ["y"])]
    loaded = load_model(model(nodes, {"x": [2]}, ["y"], [numpy_helper.from_array(np.float32(1), "hi")]))
    first, second = loaded.graph.nodes
    assert first.inputs[1] == Value("") and first.inputs[1].dtype == "undefined" and len(first.inputs) == 3
    assert [value.name for value in second.inputs] == ["t"]


def test_constants_are_what_constants_make_and_chance_does_not() -> None:
    one = numpy_helper.from_array(np.ones(2, np.float32), "w")
    nodes = [
        helper.make_node("Relu", ["w"], ["a"]),
        helper.make_node("Add", ["a", "w"], ["b"]),
        helper.make_node("RandomNormalLike", ["w"], ["r"]),
        helper.make_node("Custom", ["w"], ["k"], domain="mine"),
        helper.make_node("Add", ["b", "x"], ["y"]),
        helper.make_node("Add", ["r", "k"], ["z"]),
    ]
    loaded = load_model(model(nodes, {"x": [2]}, ["y", "z"], [one]))
    assert [node.outputs[0].constant for node in loaded.graph.nodes] == [True, True, False, False, False, False]
    assert loaded.graph.nodes[3].opset == 1 and "mine" in loaded.opsets  # not imported, and no less usable


def test_initializers_that_are_inputs() -> None:
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2], "w": [2]}, ["y"], [weight])
    loaded = load_model(proto)
    assert [value.name for value in loaded.inputs] == ["x", "w"]
    assert set(loaded.defaults) == {"w"} and not loaded.graph.constants
    assert not loaded.graph.nodes[0].inputs[1].constant
    proto.ir_version = 3  # here the file had to list them
    loaded = load_model(proto)
    assert not loaded.defaults and [value.name for value in loaded.inputs] == ["x"]
    assert loaded.graph.nodes[0].inputs[1].constant


def test_declared_output_shapes_are_shown_and_not_believed() -> None:
    proto = relu()
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, [17, 1, 1]))
    loaded = load_model(proto)
    assert loaded.outputs == (Value("y", "float32", (17, 1, 1)),)
    assert loaded.graph.outputs == (Value("y", "float32", ("N", 4)),)


def test_outputs_that_are_inputs_or_weights_keep_their_shape() -> None:
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    loaded = load_model(model(nodes, {"x": ["N", 4]}, ["y", "x", "w"], [weight]))
    assert [value.shape for value in loaded.graph.outputs] == [("N", 4), ("N", 4), (4, 4)]


FRAGILE = {
    "EyeLike": helper.make_node("EyeLike", ["u"], ["y"], dtype=FLOAT),
    "RegexFullMatch": helper.make_node("RegexFullMatch", ["u"], ["y"], pattern="a"),
    "LabelEncoder": helper.make_node(
        "LabelEncoder", ["u"], ["y"], domain="ai.onnx.ml", keys_strings=["a"], values_floats=[1.0]
    ),
}


@pytest.mark.parametrize("name", FRAGILE)
@pytest.mark.parametrize("place", ["graph", "body", "function"])
def test_inference_that_would_end_the_process_is_not_asked(name: str, place: str) -> None:
    """ONNX's own dies where these read a value whose type is unknown."""
    node, functions = FRAGILE[name], []
    imports = [helper.make_opsetid(domain, version) for domain, version in (("", 20), ("ai.onnx.ml", 4), ("own", 1))]
    if place == "body":
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch(node, "y"), else_branch=branch(node, "y"))
    elif place == "function":
        functions = [helper.make_function("own", "F", ["u"], ["y"], [node], imports)]
        node = helper.make_node("F", ["u"], ["y"], domain="own")
    foreign = helper.make_node("Foreign", ["x"], ["u"], domain="foreign")
    proto = model([foreign, node], {"x": [2, 2]}, ["y"], opset_imports=imports, functions=functions)
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    assert [one.op_type for one in load_model(proto).graph.nodes] == ["Foreign", node.op_type]


def test_inference_of_fragile_nodes_waits_for_their_types() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["u"]),
        helper.make_node("EyeLike", ["u"], ["v"]),
        helper.make_node("EyeLike", ["v"], ["w"], dtype=FLOAT),
        helper.make_node("Relu", ["w"], ["y"]),
    ]
    loaded = load_model(model(nodes, {"x": ["N", 4]}, ["y"]))
    assert loaded.graph.outputs == (Value("y", "float32", (2, None)),)


def test_metadata_and_device_configurations_survive() -> None:
    proto = relu()
    proto.ir_version = 11
    proto.producer_name, proto.producer_version, proto.domain = "maker", "2.1", "org.example"
    proto.model_version, proto.doc_string, proto.graph.doc_string = 7, "what it is for", "how it works"
    proto.metadata_props.add(key="k", value="v")
    proto.configuration.add(name="two", num_devices=2, device=["a", "b"])
    node = proto.graph.node[0]
    node.metadata_props.add(key="layer", value="3")
    hint = node.device_configurations.add(configuration_id="two", pipeline_stage=1)
    spec = hint.sharding_spec.add(tensor_name="x", device=[0, 1])
    spec.sharded_dim.add(axis=0).simple_sharding.add(dim_value=2, num_shards=2)
    before = proto.SerializeToString()
    loaded = load_model(proto)
    assert proto.SerializeToString() == before
    meta = loaded.metadata
    assert (meta.producer_name, meta.producer_version, meta.domain) == ("maker", "2.1", "org.example")
    assert (meta.ir_version, meta.model_version, meta.description, meta.graph_name) == (11, 7, "what it is for", "g")
    assert meta.graph_description == "how it works"
    assert meta.custom_metadata_map == {"k": "v"}
    assert loaded.device_configurations == ({"name": "two", "num_devices": 2, "device": ["a", "b"]},)
    plain = loaded.graph.nodes[0]
    assert plain.metadata == {"layer": "3"}
    (device,) = plain.devices
    assert (device["configuration"], device["pipeline_stage"]) == ("two", 1)
    assert device["sharding"][0]["tensor"] == "x" and device["sharding"][0]["device"] == [0, 1]
    assert device["sharding"][0]["dims"] == [{"axis": 0, "simple": [{"dim": 2, "num_shards": 2}]}]


@pytest.mark.parametrize("name", MODELS)
def test_real_models_keep_their_names_and_order(name: str) -> None:
    path = model_path(name)
    loaded = load_model(path)
    proto = onnx.load(path)
    _compare(proto.graph.node, loaded.graph, "")
    assert [value.name for value in loaded.outputs] == [value.name for value in proto.graph.output]
    for tensor in proto.graph.initializer:
        read = loaded.store.read(loaded.graph.constants[tensor.name])
        np.testing.assert_array_equal(read, numpy_helper.to_array(tensor))


def _compare(nodes: object, graph: Graph, prefix: str) -> None:
    originals = [(i, node) for i, node in enumerate(nodes) if node.op_type != "Constant"]  # type: ignore[call-overload]
    assert len(originals) == len(graph.nodes)
    for (i, proto), node in zip(originals, graph.nodes, strict=True):
        assert node.name == prefix + (proto.name or f"#{i}") and node.op_type == proto.op_type
        inputs = [value.name for value in node.inputs]
        assert inputs == list(proto.input)[: len(inputs)] and not any(list(proto.input)[len(inputs) :])
        assert [value.name for value in node.outputs] == [name for name in proto.output if name]
        assert {entry.key: entry.value for entry in proto.metadata_props} == node.metadata
        bodies = dict(node.bodies())
        for attribute in proto.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                part = attribute.name.removesuffix("_branch")
                _compare(attribute.g.node, bodies[attribute.name], f"{node.name}/{part}/")
