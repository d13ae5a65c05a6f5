"""A test module written for onnxruntime, as scripts use it. `test_dropin_outrider.py` runs it under another import."""

import copy
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from tests.builders import model, node, tensor
from tests.models import feeds, model_path, tolerance
from tests.oracle import assert_agree, run_ort

CPU = ["CPUExecutionProvider"]
X = np.array([[-2, -1, 0.5, 3], [4, -5, 6, -7]], np.float32)


def linear():
    """y = relu(x @ w + b), s = sum of it; `b` may be fed."""
    nodes = [
        node("MatMul", "x w", "p", "product"),
        node("Add", "p b", "t", "sum"),
        node("Relu", "t", "y", "relu"),
        node("ReduceSum", "y", "s", "total", keepdims=0),
    ]
    inputs = [tensor("x", ["batch", 4]), tensor("b", [3])]
    made = model(nodes, inputs, [tensor("y", ["batch", 3]), tensor("s", [])], {"w": W, "b": B})
    made.producer_name, made.domain, made.model_version, made.doc_string = "tests", "org.example", 7, "A small model."
    made.graph.doc_string = "Its graph."
    made.metadata_props.add(key="classes", value='["a", "b", "c"]')
    return made.SerializeToString()


W = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
B = np.array([0.5, -0.5, 0], np.float32)
Y = np.maximum(X @ W + B, 0)


@pytest.fixture(scope="module")
def session():
    return ort.InferenceSession(linear(), providers=CPU)


# What a first script does -------------------------------------------------------------------------------------------
def test_classify(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(linear())
    so = ort.SessionOptions()
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    so.intra_op_num_threads = 1
    so.inter_op_num_threads = 1
    so.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    so.log_severity_level = 3
    so.enable_cpu_mem_arena = False
    so.enable_mem_pattern = False
    so.add_session_config_entry("session.intra_op.allow_spinning", "0")
    sess = ort.InferenceSession(str(path), so, CPU)
    input_name = sess.get_inputs()[0].name
    output_names = [output.name for output in sess.get_outputs()]
    y, total = sess.run(output_names, {input_name: X})
    np.testing.assert_allclose(y, Y, rtol=1e-6)
    np.testing.assert_allclose(total, Y.sum(), rtol=1e-6)
    assert y.dtype == np.float32
    assert int(np.argmax(y[0])) == int(np.argmax(Y[0]))
    classes = json.loads(sess.get_modelmeta().custom_metadata_map["classes"])
    assert classes == ["a", "b", "c"]


def test_every_way_to_ask(session):
    for names in (None, [], ["y", "s"]):
        y, total = session.run(names, {"x": X})
        np.testing.assert_allclose(y, Y, rtol=1e-6)
        assert total.shape == ()
    total, y = session.run(["s", "y"], {"x": X}, None)
    np.testing.assert_allclose(y, Y, rtol=1e-6)
    (y,) = session.run(["y"], {"x": X.tolist()})  # lists are made arrays
    np.testing.assert_allclose(y, Y, rtol=1e-6)
    (y,) = session.run(output_names=["y"], input_feed={"x": X[:0]}, run_options=ort.RunOptions())
    assert y.shape == (0, 3)
    (y,) = session.run(["y"], {"x": X, "b": B + 1})
    np.testing.assert_allclose(y, np.maximum(X @ W + B + 1, 0), rtol=1e-6)
    (y,) = session.run(["y"], {"x": np.asfortranarray(X)[::-1]})
    np.testing.assert_allclose(y, Y[::-1], rtol=1e-6)


def test_constructors(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(linear())
    so = ort.SessionOptions()
    for sess in (
        ort.InferenceSession(path),
        ort.InferenceSession(os.fspath(path), None, CPU, [{}]),
        ort.InferenceSession(path_or_bytes=linear(), sess_options=so, providers=[("CPUExecutionProvider", {})]),
    ):
        np.testing.assert_allclose(sess.run(["y"], {"x": X})[0], Y, rtol=1e-6)
    assert sess.get_providers() == CPU
    assert sess.get_provider_options() == {"CPUExecutionProvider": {}}


def test_choose_a_provider():
    available = ort.get_available_providers()
    provider = "CUDAExecutionProvider" if "CUDAExecutionProvider" in available else "CPUExecutionProvider"
    assert "CPUExecutionProvider" in available
    assert set(available) <= set(ort.get_all_providers())
    sess = ort.InferenceSession(linear(), providers=[provider])
    assert sess.get_providers()[0] == provider
    assert ort.get_device() in ("CPU", "GPU", "CPU-GPU")
    if hasattr(ort, "no_such_thing"):
        raise AssertionError
    ort.set_default_logger_severity(3)
    ort.disable_telemetry_events()
    assert isinstance(ort.__version__, str)


class PickableInferenceSession(ort.InferenceSession):
    """As face recognition libraries have it."""

    def __init__(self, model_path, **kwargs):
        super().__init__(model_path, **kwargs)
        self.model_path = model_path

    def __getstate__(self):
        return {"model_path": self.model_path}

    def __setstate__(self, values):
        self.__init__(values["model_path"], providers=CPU)


def test_a_class_of_ones_own(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(linear())
    sess = PickableInferenceSession(str(path), providers=CPU, provider_options=[{}])
    sess.set_providers(["CPUExecutionProvider"])
    for one in (sess, copy.copy(sess)):
        assert one.model_path == str(path)
        np.testing.assert_allclose(one.run(["y"], {"x": X})[0], Y, rtol=1e-6)


# Options ------------------------------------------------------------------------------------------------------------
def test_options_are_read_back():
    so = ort.SessionOptions()
    assert so.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert (so.intra_op_num_threads, so.inter_op_num_threads, so.enable_profiling) == (0, 0, False)
    assert (so.enable_mem_pattern, so.enable_mem_reuse, so.enable_cpu_mem_arena) == (True, True, True)
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    so.intra_op_num_threads = 2
    so.logid = "me"
    so.log_severity_level = 0
    assert so.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert so.graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert int(so.graph_optimization_level) == ort.GraphOptimizationLevel.ORT_DISABLE_ALL.value == 0
    assert str(ort.GraphOptimizationLevel(99)) == "GraphOptimizationLevel.ORT_ENABLE_ALL"
    assert ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED == 2
    assert (so.intra_op_num_threads, so.logid, so.log_severity_level) == (2, "me", 0)
    so.add_session_config_entry("session.intra_op.allow_spinning", "0")
    assert so.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    with pytest.raises(RuntimeError):
        so.get_session_config_entry("session.inter_op.allow_spinning")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("intra_op_num_threads", "2"), ("graph_optimization_level", "all"), ("graph_optimization_level", 99),
     ("execution_mode", 0), ("enable_profiling", "yes"), ("logid", 3)],
)  # fmt: skip
def test_wrong_types_are_refused(attribute, value):
    so = ort.SessionOptions()
    before = getattr(so, attribute)
    with pytest.raises((TypeError, ValueError)):
        setattr(so, attribute, value)
    assert getattr(so, attribute) == before


def test_unknown_attributes_are_refused():
    for options in (ort.SessionOptions(), ort.RunOptions()):
        with pytest.raises(AttributeError):
            options.no_such_attribute = 1
        with pytest.raises(AttributeError):
            options.no_such_attribute  # noqa: B018


def test_each_level_and_a_copy_of_the_options():
    results = []
    levels = ort.GraphOptimizationLevel
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_EXTENDED, levels.ORT_ENABLE_ALL):
        so = ort.SessionOptions()
        so.graph_optimization_level = level
        so.intra_op_num_threads = 1
        sess = ort.InferenceSession(linear(), so, CPU)
        so.intra_op_num_threads = 2  # too late
        so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        results.append(sess.run(["y"], {"x": X})[0])
        if level in (0, 99):
            assert sess.get_session_options().graph_optimization_level == level
            assert sess.get_session_options().intra_op_num_threads == 1
            assert so.intra_op_num_threads == 2
    for y in results:
        np.testing.assert_allclose(y, Y, rtol=1e-6)


def test_free_dimensions():
    so = ort.SessionOptions()
    so.add_free_dimension_override_by_name("batch", 2)
    sess = ort.InferenceSession(linear(), so, CPU)
    assert sess.get_inputs()[0].shape == [2, 4]
    assert sess.get_outputs()[0].shape == [2, 3]
    np.testing.assert_allclose(sess.run(["y"], {"x": X})[0], Y, rtol=1e-6)
    with pytest.raises(Exception, match="x"):
        sess.run(["y"], {"x": X[:1]})


def test_profile(tmp_path):
    so = ort.SessionOptions()
    so.enable_profiling = True
    so.profile_file_prefix = str(tmp_path / "profile")
    sess = ort.InferenceSession(linear(), so, CPU)
    sess.run(None, {"x": X})
    written = sess.end_profiling()
    assert os.path.basename(written).startswith("profile_")
    assert written.endswith(".json")
    with open(written) as file:
        assert json.load(file)


def test_run_options(session):
    ro = ort.RunOptions()
    ro.log_severity_level = 3
    ro.log_verbosity_level = 0
    ro.logid = "this run"
    ro.only_execute_path_to_fetches = True
    ro.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    assert ro.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"
    np.testing.assert_allclose(session.run(["y"], {"x": X}, ro)[0], Y, rtol=1e-6)
    ro.terminate = True
    with pytest.raises(Exception):  # noqa: B017 (onnxruntime's has no other base)
        session.run(["y"], {"x": X}, ro)
    ro.terminate = False
    np.testing.assert_allclose(session.run(["y"], {"x": X}, run_options=ro)[0], Y, rtol=1e-6)


# What a model says --------------------------------------------------------------------------------------------------
def test_metadata(session):
    meta = session.get_modelmeta()
    assert (meta.producer_name, meta.domain, meta.version, meta.description) == (
        "tests", "org.example", 7, "A small model.",
    )  # fmt: skip
    assert (meta.graph_name, meta.graph_description) == ("g", "Its graph.")
    assert meta.custom_metadata_map == {"classes": '["a", "b", "c"]'}


def test_node_args(session):
    (x,) = session.get_inputs()
    assert (x.name, x.type, x.shape) == ("x", "tensor(float)", ["batch", 4])
    assert str(x) == "NodeArg(name='x', type='tensor(float)', shape=['batch', 4])"
    assert [(one.name, one.type, one.shape) for one in session.get_outputs()] == [
        ("y", "tensor(float)", ["batch", 3]), ("s", "tensor(float)", []),
    ]  # fmt: skip
    assert [one.name for one in session.get_overridable_initializers()] == ["b"]


TYPES = {
    "FLOAT": "float", "DOUBLE": "double", "FLOAT16": "float16", "INT8": "int8", "INT16": "int16", "INT32": "int32",
    "INT64": "int64", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "BOOL": "bool",
    "STRING": "string",
}  # fmt: skip


def test_names_of_types():
    inputs = [tensor(name, [None, 2, "n"], getattr(TensorProto, name)) for name in TYPES]
    float_list = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    perhaps = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.INT64, [2]))
    inputs += [helper.make_value_info("list", float_list), helper.make_value_info("perhaps", perhaps)]
    nodes = [node("Identity", "FLOAT", "y"), node("SequenceLength", "list", "n"), node("Identity", "list", "same")]
    outputs = [tensor("y", None), tensor("n", [], TensorProto.INT64), helper.make_value_info("same", float_list)]
    sess = ort.InferenceSession(model(nodes, inputs, outputs).SerializeToString(), providers=CPU)
    got = {one.name: one.type for one in sess.get_inputs()}
    assert got == {name: f"tensor({short})" for name, short in TYPES.items()} | {
        "list": "seq(tensor(float))", "perhaps": "optional(tensor(int64))",
    }  # fmt: skip
    assert sess.get_inputs()[0].shape == [None, 2, "n"]
    assert [one.type for one in sess.get_outputs()] == ["tensor(float)", "tensor(int64)", "seq(tensor(float))"]
    length, same = sess.run(["n", "same"], made_for(sess, {"list": [X, X[0]]}))
    assert length == 2
    np.testing.assert_array_equal(same[1], X[0])


NUMPY = {"float": np.float32, "double": np.float64, "string": object, "bool": np.bool_}


def made_for(sess, given):
    """Zeros for each input that is not given, as generic runners make them from `get_inputs`."""
    made = dict(given)
    for one in sess.get_inputs():
        if one.name not in made and one.type.startswith("tensor"):
            name = one.type[len("tensor(") : -1]
            shape = [dim if isinstance(dim, int) else 1 for dim in one.shape]
            made[one.name] = np.zeros(shape, NUMPY.get(name) or np.dtype(name))
            if name == "string":
                made[one.name][...] = "a"
        elif one.name not in made:
            made[one.name] = np.zeros(2, np.int64)
    return made


def test_strings():
    kind = TensorProto.STRING
    made = model([node("Identity", "text", "same")], [tensor("text", [None], kind)], [tensor("same", [None], kind)])
    sess = ort.InferenceSession(made.SerializeToString(), providers=CPU)
    for text in (np.array(["one", "zwölf"], dtype=object), np.array(["one", "zwölf"])):
        (same,) = sess.run(None, {"text": text})
        assert same.tolist() == ["one", "zwölf"]


def test_classes_and_their_scores():
    """What converters make of a classifier: labels, and a map of scores for each row."""
    ml = {"domain": "ai.onnx.ml"}
    scores = {"coefficients": W.T.ravel().tolist(), "intercepts": B.tolist(), "classlabels_ints": [3, 5, 7]}
    nodes = [
        node("LinearClassifier", "X", "label probabilities", **scores, post_transform="SOFTMAX", **ml),
        node("ZipMap", "probabilities", "maps", classlabels_int64s=[3, 5, 7], **ml),
    ]
    of_map = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    maps = helper.make_value_info("maps", helper.make_sequence_type_proto(of_map))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    made = model(
        nodes, [tensor("X", [None, 4])], [tensor("label", [None], TensorProto.INT64), maps], opset_imports=opsets
    )
    sess = ort.InferenceSession(made.SerializeToString(), providers=CPU)
    assert sess.get_outputs()[1].type == "seq(map(int64,tensor(float)))"
    label_name = sess.get_outputs()[0].name
    raw = np.exp(X @ W + B)
    expected = raw / raw.sum(1, keepdims=True)
    np.testing.assert_array_equal(sess.run([label_name], {"X": X})[0], np.array([3, 5, 7])[expected.argmax(1)])
    (rows,) = sess.run(["maps"], {"X": X})
    assert [list(row) for row in rows] == [[3, 5, 7]] * 2
    assert {type(score) for row in rows for score in row.values()} == {float}
    np.testing.assert_allclose([list(row.values()) for row in rows], expected, rtol=1e-5)


# What goes wrong ----------------------------------------------------------------------------------------------------
def test_missing_input(session):
    with pytest.raises(ValueError, match="x"):
        session.run(None, {})


@pytest.mark.parametrize(
    "wrong",
    [{"x": X, "no_such_input": X}, {"x": X.astype(np.float64)}, {"x": X[0]}, {"x": X[:, :3]}, {"x": None}],
    ids=["unknown name", "dtype", "rank", "dimension", "None"],
)
def test_bad_feed(session, wrong):
    with pytest.raises(Exception):  # noqa: B017 (onnxruntime's has no other base)
        session.run(None, wrong)
    np.testing.assert_allclose(session.run(["y"], {"x": X})[0], Y, rtol=1e-6)  # it goes on


def test_unknown_output(session):
    with pytest.raises(Exception, match="no_such_output"):
        session.run(["no_such_output"], {"x": X})


def test_bad_models(tmp_path):
    with pytest.raises(Exception, match="no_such_model"):
        ort.InferenceSession(str(tmp_path / "no_such_model.onnx"), providers=CPU)
    for bad in (b"this is no model", b"", 7):
        with pytest.raises(Exception):  # noqa: B017 (onnxruntime's has no other base)
            ort.InferenceSession(bad, providers=CPU)


# Binding ------------------------------------------------------------------------------------------------------------
def test_io_binding(session):
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    binding.bind_output("s", "cpu")
    session.run_with_iobinding(binding)
    y, total = binding.copy_outputs_to_cpu()
    np.testing.assert_allclose(y, Y, rtol=1e-6)
    np.testing.assert_allclose(total, Y.sum(), rtol=1e-6)
    value = binding.get_outputs()[0]
    assert (value.shape(), value.data_type(), value.device_name()) == ([2, 3], "tensor(float)", "cpu")
    binding.clear_binding_inputs()
    binding.clear_binding_outputs()
    with pytest.raises(Exception):  # noqa: B017 (onnxruntime's has no other base)
        session.run_with_iobinding(binding)


def test_io_binding_to_memory(session):
    x, y = X.copy(), np.empty((2, 3), np.float32)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output(
        name="y",
        device_type="cpu",
        device_id=0,
        element_type=np.float32,
        shape=tuple(y.shape),
        buffer_ptr=y.ctypes.data,
    )
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(y, Y, rtol=1e-6)
    x *= 2
    binding.synchronize_inputs()
    session.run_with_iobinding(iobinding=binding, run_options=ort.RunOptions())
    binding.synchronize_outputs()
    np.testing.assert_allclose(y, np.maximum(2 * X @ W + B, 0), rtol=1e-6)


def test_io_binding_to_values(session):
    x = ort.OrtValue.ortvalue_from_numpy(X.copy(), "cpu", 0)
    y = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32, "cpu", 0)
    binding = ort.IOBinding(session)
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(y.numpy(), Y, rtol=1e-6)
    x.update_inplace(X * 2)
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(y.numpy(), np.maximum(2 * X @ W + B, 0), rtol=1e-6)


def test_values(session):
    value = ort.OrtValue.ortvalue_from_numpy(X.copy())
    assert value.is_tensor()
    assert value.has_value()
    assert not value.is_sparse_tensor()
    assert not value.is_tensor_sequence()
    assert (value.element_type(), value.tensor_size_in_bytes()) == (TensorProto.FLOAT, X.nbytes)
    assert value.data_ptr() != 0
    total, y = session.run_with_ort_values(["s", "y"], {"x": value})
    np.testing.assert_allclose(y.numpy(), Y, rtol=1e-6)
    np.testing.assert_allclose(total.numpy(), Y.sum(), rtol=1e-6)
    narrow = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.array([0x3F80], np.uint16), TensorProto.BFLOAT16)
    assert narrow.data_type() == "tensor(bfloat16)"
    made = session.create_ortvalue_from_shape_and_type([2], np.int64, "cpu")
    assert (made.shape(), made.data_type()) == ([2], "tensor(int64)")


# At once ------------------------------------------------------------------------------------------------------------
def test_run_async():
    session = ort.InferenceSession(linear(), providers=CPU)
    called, seen = threading.Event(), []

    def callback(results, user_data, err):
        seen.append((results, user_data, err))
        called.set()

    session.run_async(["y"], {"x": X}, callback, {"id": 7})
    assert called.wait(60)
    ((results, user_data, err),) = seen
    assert (user_data, err) == ({"id": 7}, "")
    np.testing.assert_allclose(results[0], Y, rtol=1e-6)


def test_threads_share_a_session(session):
    scales = range(1, 9)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda scale: session.run(["y"], {"x": X * scale})[0], scales))
    for scale, y in zip(scales, results, strict=True):
        np.testing.assert_allclose(y, np.maximum(X * scale @ W + B, 0), rtol=1e-6)


# Real models, as their libraries run them ---------------------------------------------------------------------------
class OnnxWrapper:
    """A voice detector: state goes round from chunk to chunk."""

    def __init__(self, path):
        opts = ort.SessionOptions()
        opts.inter_op_num_threads = 1
        opts.intra_op_num_threads = 1
        self.session = ort.InferenceSession(path, providers=["CPUExecutionProvider"], sess_options=opts)
        self.state = np.zeros((2, 1, 128), np.float32)

    def __call__(self, chunk, rate):
        inputs = {"input": chunk, "state": self.state, "sr": np.array(rate, dtype="int64")}
        out, self.state = self.session.run(None, inputs)
        return out


def test_voice_activity():
    path, first = model_path("silero"), feeds("silero", 3)
    detector = OnnxWrapper(str(path))
    state = np.zeros((2, 1, 128), np.float32)
    for scale in (1.0, 0.5, 0.0):
        chunk = first["input"] * np.float32(scale)
        expected = run_ort(path, {"input": chunk, "state": state, "sr": first["sr"]})
        out = detector(chunk, int(first["sr"]))
        got = dict(zip(expected, (out, detector.state), strict=True))
        assert_agree(got, expected, tolerance("silero"))
        state = expected[list(expected)[1]]


class OrtInferSession:
    """A reader of text: options of the provider, names by position, labels in the metadata."""

    def __init__(self, path, threads=-1):
        so = ort.SessionOptions()
        so.log_severity_level = 4
        so.enable_cpu_mem_arena = False
        so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        if threads != -1 and 1 <= threads <= os.cpu_count():
            so.intra_op_num_threads = threads
        providers = [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]
        self.session = ort.InferenceSession(str(path), sess_options=so, providers=providers)

    def __call__(self, image):
        feed = dict(zip([one.name for one in self.session.get_inputs()], [image], strict=True))
        return self.session.run([one.name for one in self.session.get_outputs()], feed)

    def character_list(self):
        return self.session.get_modelmeta().custom_metadata_map["character"].splitlines()


def test_read_text():
    path, feed = model_path("ppocr-rec"), feeds("ppocr-rec")
    reader = OrtInferSession(path, 1)
    expected = run_ort(path, feed)
    (scores,) = reader(feed["x"])
    assert_agree(dict(zip(expected, [scores], strict=True)), expected, tolerance("ppocr-rec"))
    assert len(reader.character_list()) + 2 == scores.shape[-1]  # and blank and space


class FeatureExtractor:
    """Sentence embeddings: only the inputs that the model has, mean pooling over the mask."""

    def __init__(self, path):
        self.model = ort.InferenceSession(path, ort.SessionOptions(), providers=["CPUExecutionProvider"])
        self.input_names = {one.name: i for i, one in enumerate(self.model.get_inputs())}
        self.output_names = {one.name: i for i, one in enumerate(self.model.get_outputs())}

    def __call__(self, tokens):
        outputs = self.model.run(None, {name: tokens[name] for name in self.input_names})
        return dict(zip(self.output_names, outputs, strict=True))


def test_embed_sentences():
    path, tokens = model_path("minilm"), feeds("minilm")
    extractor = FeatureExtractor(str(path))
    expected = run_ort(path, tokens)
    assert_agree(extractor({**tokens, "unused": X}), expected, tolerance("minilm"))
