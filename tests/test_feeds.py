"""The check of a feed: its order of precedence, what it accepts, and how a signature is described."""

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper

from outrider.providers.wire.dtypes import numpy_dtype
from outrider.providers.wire.graph import Value
from outrider.scheduler.errors import (
    DtypeMismatchError,
    InputNotFoundError,
    InputTypeError,
    InvalidOptionError,
    OutputNotFoundError,
    RankMismatchError,
    ShapeMismatchError,
    SymbolConflictError,
)
from outrider.scheduler.feeds import check_feeds, requested_outputs
from outrider.scheduler.metadata import ModelMetadata
from outrider.scheduler.nodearg import NodeArg, split_type, type_name

pytestmark = pytest.mark.fast

INPUTS = [
    Value("a", "float32", ("n", 3)),
    Value("b", "int64", ("n",)),
    Value("c", "float32", None),
    Value("w", "float32", (2,)),
]


def check(feed, output_names=None):
    return check_feeds(INPUTS, {"w"}, feed, output_names, ["y", "z"])


def f32(*shape):
    return np.zeros(shape, np.float32)


def i64(*shape):
    return np.zeros(shape, np.int64)


GOOD = {"a": f32(2, 3), "b": i64(2), "c": f32()}

# Each row holds the fault it is named for and every later one: (output names, feed, error, its facts).
PRECEDENCE = [
    (["q"], [("x", 1)], InputTypeError, {"expected": "dict", "got": "list"}),
    ("q", {"x": 1, "a": object()}, InvalidOptionError, {"name": "output_names"}),
    (["y", "q", "r"], {"x": 1, "a": object()}, OutputNotFoundError, {"name": "q"}),
    (["y"], {"x": 1, "a": object()}, InputNotFoundError, {"name": "x"}),
    (None, {"a": object(), "x": 1}, InputTypeError, {"name": "a"}),
    (None, {"a": np.zeros((9,), np.float64), "x": 1}, DtypeMismatchError, {"name": "a", "expected": "float32"}),
    (None, {"a": f32(9), "x": 1}, RankMismatchError, {"name": "a", "expected": 2, "got": 1}),
    (None, {"b": i64(1), "a": f32(2, 4)}, ShapeMismatchError, {"name": "a", "axis": 1, "got": (2, 4)}),
    (None, {"b": i64(1), "a": f32(2, 3), "x": 1}, SymbolConflictError, {"symbol": "n", "first": 1, "second": 2}),
    (None, {"a": f32(2, 3), "b": i64(2), "x": 1}, InputNotFoundError, {"name": "x"}),
    (None, {"w": f32(2), "b": i64(2)}, InputNotFoundError, {"name": "a"}),
    (None, {"a": f32(2, 3)}, InputNotFoundError, {"name": "b"}),
    (None, {"a": f32(2, 3), "b": i64(2)}, InputNotFoundError, {"name": "c"}),
]


@pytest.mark.parametrize(("output_names", "feed", "kind", "facts"), PRECEDENCE)
def test_precedence(output_names, feed, kind, facts):
    with pytest.raises(kind) as caught:
        check(feed, output_names)
    assert type(caught.value) is kind
    assert {name: getattr(caught.value, name) for name in facts} == facts


def test_good_feed_is_passed_on():
    checked = check(GOOD)
    assert list(checked) == ["a", "b", "c"]
    assert all(checked[name] is GOOD[name] for name in GOOD)
    assert list(check({**GOOD, "w": f32(2)})) == ["a", "b", "c", "w"]


def test_symbols_hold_within_one_input_too():
    square = [Value("s", "float32", ("n", "n"))]
    check_feeds(square, (), {"s": f32(3, 3)}, None, [])
    with pytest.raises(SymbolConflictError) as caught:
        check_feeds(square, (), {"s": f32(3, 4)}, None, [])
    assert (caught.value.first_input, caught.value.second_input) == ("s", "s")


def test_messages_name_near_names_and_shapes():
    with pytest.raises(InputNotFoundError, match="Did you mean tokens"):
        check_feeds([Value("tokens", "int64", (1,))], (), {"token": i64(1)}, None, [])
    with pytest.raises(InputNotFoundError, match=r"float32\[n, 3\]"):
        check({})
    with pytest.raises(ShapeMismatchError, match=r"\[2, 4\].*\[n, 3\]"):
        check({"a": f32(2, 4)})


def test_requested_outputs():
    assert requested_outputs(None, ["y", "z"]) == ["y", "z"]
    assert requested_outputs([], ["y", "z"]) == ["y", "z"]
    assert requested_outputs(("z", "y", "z"), ["y", "z"]) == ["z", "y", "z"]
    for bad in ("y", 3, {"y"}):
        with pytest.raises(InvalidOptionError):
            requested_outputs(bad, ["y"])


def one(dtype, value, shape=None):
    return check_feeds([Value("x", dtype, shape)], (), {"x": value}, None, [])["x"]


class WithNumpy:
    def __init__(self, array):
        self.array = array

    def numpy(self):
        return self.array


class WithDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class WithArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class OnDevice:
    def numpy(self):
        raise TypeError("can't convert device tensor to numpy")


@pytest.mark.parametrize(
    "wrap",
    [lambda array: array, WithNumpy, WithDLPack, WithArray, memoryview, onnxruntime.OrtValue.ortvalue_from_numpy],
)
def test_array_likes(wrap):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = one("float32", wrap(array))
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, array)
    with pytest.raises(DtypeMismatchError):
        one("float64", wrap(array))


def test_dlpack_of_memory_that_is_read_only_or_strided():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(one("float32", WithDLPack(base.T)), base.T)
    np.testing.assert_array_equal(one("float32", WithDLPack(base[:, ::2])), base[:, ::2])
    base.flags.writeable = False
    got = one("float32", WithDLPack(base))
    assert np.shares_memory(got, base)
    with pytest.raises(InputTypeError, match="'x'"):
        one("complex128", WithDLPack(np.zeros(3, "datetime64[s]")))


def test_strides_and_byte_order():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert one("float32", base.T) is not None
    np.testing.assert_array_equal(one("float32", base[::-1, ::2]), base[::-1, ::2])
    swapped = base.astype(">f4")
    got = one("float32", swapped)
    assert got.dtype == np.dtype("float32")
    assert got.dtype.isnative
    np.testing.assert_array_equal(got, base)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("float32", 1, np.float32(1)), ("float32", 1.5, np.float32(1.5)),
        ("float32", [[1, 2.5]], np.array([[1, 2.5]], "f4")),
        ("int64", [1, 2], np.array([1, 2])), ("uint8", (255,), np.array([255], "u1")),
        ("bool", [True], np.array([True])),
        ("float16", [1.5], np.array([1.5], "f2")), ("complex64", [1, 2j], np.array([1, 2j], "c8")),
        ("float32", [], np.empty(0, "f4")), ("int32", [], np.empty(0, "i4")),
        ("float32", [np.inf], np.array([np.inf], "f4")),
        ("bfloat16", [1.5], np.array([1.5], ml_dtypes.bfloat16)), ("int4", [-8, 7], np.array([-8, 7], ml_dtypes.int4)),
        ("float32", np.float32(3), np.float32(3)), ("float32", [f32(2), f32(2)], f32(2, 2)),
    ],
)  # fmt: skip
def test_python_numbers_take_the_declared_dtype(dtype, value, expected):
    got = one(dtype, value)
    assert got.dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("dtype", "value", "kind"),
    [
        ("int64", 1.0, DtypeMismatchError), ("int64", [True], DtypeMismatchError), ("bool", [1], DtypeMismatchError),
        ("float32", [1j], DtypeMismatchError), ("float32", "1.5", DtypeMismatchError),
        ("float32", np.float64(1), DtypeMismatchError),
        ("float32", [np.float64(1)], DtypeMismatchError), ("float32", np.zeros(2, "M8[s]"), DtypeMismatchError),
        ("bfloat16", np.zeros(2, np.uint16), DtypeMismatchError), ("int64", np.zeros(2, np.int32), DtypeMismatchError),
        ("float32", np.array(["a"], object), DtypeMismatchError), ("string", [1], InputTypeError),
        ("string", np.zeros(2), DtypeMismatchError), ("string", np.array(["a", None], object), InputTypeError),
        ("string", np.array([b"\xff"]), InputTypeError), ("int8", [128], InputTypeError),
        ("int64", [2**63], InputTypeError),
        ("int4", [8], InputTypeError), ("uint8", [-1], InputTypeError), ("float16", [1e6], InputTypeError),
        ("int64", [2**70], InputTypeError), ("float32", [[1], [2, 3]], InputTypeError),
        ("float32", None, InputTypeError),
        ("float32", {}, InputTypeError), ("float32", object(), InputTypeError), ("float32", OnDevice(), InputTypeError),
        ("float32", np.ma.masked_array([1.0], [True]), InputTypeError), ("float32", (x for x in [1.0]), InputTypeError),
        ("sequence(float32)", f32(2), InputTypeError), ("sequence(float32)", [np.zeros(1)], DtypeMismatchError),
        ("map(int64,float32)", [1], InputTypeError), ("map(int64,float32)", {"a": 1.0}, InputTypeError),
        ("map(string,float32)", {1: 1.0}, InputTypeError), ("map(int64,float32)", {True: 1.0}, InputTypeError),
        ("optional(float32)", np.zeros(1), DtypeMismatchError),
    ],
)  # fmt: skip
def test_what_does_not_fit(dtype, value, kind):
    with pytest.raises(kind) as caught:
        one(dtype, value)
    assert type(caught.value) is kind
    assert caught.value.name.startswith("x")
    assert "'x" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [np.array(["a", "bé"]), np.array(["a", "bé".encode()], object), np.array([b"a", "bé".encode()]),
     ["a", "bé"], np.array(["a", "bé"], np.dtypes.StringDType()), [b"a", "bé"]],
)  # fmt: skip
def test_strings_become_object_arrays_of_str(value):
    got = one("string", value, (2,))
    assert got.dtype == object
    assert got.tolist() == ["a", "bé"]
    assert all(type(text) is str for text in got)


def test_strings_keep_shape_and_trailing_nul():
    assert one("string", "a\0").item() == "a\0"
    assert one("string", [["a\0"], [""]]).tolist() == [["a\0"], [""]]
    assert one("string", []).shape == (0,)


def test_sequences_maps_optionals():
    got = one("sequence(float32)", (f32(2), [1, 2, 3]))
    assert [item.shape for item in got] == [(2,), (3,)]
    assert all(item.dtype == np.float32 for item in got)
    got = one("map(int64,float32)", {np.int32(3): 1.5})
    assert list(got) == [3]
    assert type(next(iter(got))) is int
    assert got[3].dtype == np.float32
    assert one("optional(float32)", None) is None
    assert one("optional(sequence(int64))", [[1]])[0].tolist() == [1]
    assert one("sequence(map(string,int64))", [{"a": 1}])[0]["a"] == 1
    with pytest.raises(DtypeMismatchError, match=r"x\[1\]"):
        one("sequence(float32)", [f32(1), i64(1)])


@settings(deadline=None, derandomize=True)
@given(
    arrays.arrays(st.sampled_from(["f4", ">f4"]), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
)
def test_shape_check_agrees_with_numpy_on_any_array(array):
    """An array passes exactly those fixed shapes that are its own."""
    np.testing.assert_array_equal(one("float32", array, array.shape), array.astype("f4"))
    with pytest.raises(RankMismatchError):
        one("float32", array, (*array.shape, 1))
    for axis in range(array.ndim):
        wrong = list(array.shape)
        wrong[axis] += 1
        with pytest.raises(ShapeMismatchError):
            one("float32", array, tuple(wrong))


def test_types_are_named_as_onnxruntime_names_them():
    def tensor(kind, shape):
        return helper.make_tensor_type_proto(kind, shape)

    types = {
        "float32": tensor(TensorProto.FLOAT, ["n", 3, None]),
        "float64": tensor(TensorProto.DOUBLE, []),
        "float16": tensor(TensorProto.FLOAT16, [1]),
        "bfloat16": tensor(TensorProto.BFLOAT16, None),
        "int64": tensor(TensorProto.INT64, [2]),
        "bool": tensor(TensorProto.BOOL, [2]),
        "string": tensor(TensorProto.STRING, [2]),
        "sequence(float32)": helper.make_sequence_type_proto(tensor(TensorProto.FLOAT, None)),
        "optional(float32)": helper.make_optional_type_proto(tensor(TensorProto.FLOAT, None)),
    }
    shapes = {"float32": ("n", 3, None), "float64": (), "float16": (1,), "int64": (2,), "bool": (2,), "string": (2,)}
    graph = helper.make_graph(
        [helper.make_node("Identity", [f"in {name}"], [f"out {name}"]) for name in types],
        "g",
        [helper.make_value_info(f"in {name}", kind) for name, kind in types.items()],
        [helper.make_value_info(f"out {name}", kind) for name, kind in types.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    theirs = onnxruntime.InferenceSession(model.SerializeToString()).get_inputs()
    assert len(theirs) == len(types)
    for arg, name in zip(theirs, types, strict=True):
        ours = NodeArg.of(Value(f"in {name}", name, shapes.get(name)))
        assert (ours.name, ours.type, ours.shape) == (arg.name, arg.type, arg.shape)
    assert type_name("map(int64,float32)") == "map(int64,tensor(float))"
    assert type_name("sequence(map(string,float64))") == "seq(map(string,tensor(double)))"
    assert split_type("optional(sequence(int64))") == ("optional", ("sequence(int64)",))


def test_metadata_has_the_names_of_both():
    meta = ModelMetadata(version=3, description="d", custom_metadata_map={"k": "v"})
    assert (meta.model_version, meta.doc_string, meta.metadata_props) == (3, "d", {"k": "v"})
