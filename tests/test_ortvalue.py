"""OrtValue and IOBinding behave as in onnxruntime: one function runs on both. Where they differ it is on purpose."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import outrider
from outrider.scheduler import errors
from outrider.scheduler.iobinding import IOBinding
from outrider.scheduler.ortvalue import OrtValue
from outrider.shm.segment import address_of
from outrider.shm.user import process_memory
from tests.builders import model, node, tensor

pytestmark = pytest.mark.fast

X = np.array([-1, 2, -3, 4], np.float32)
TWO = model(
    [node("Relu", "x", "y"), node("Neg", "x", "z")], [tensor("x", ["N"])], [tensor("y", ["N"]), tensor("z", ["N"])]
).SerializeToString()


@pytest.fixture(scope="module")
def fleet() -> Iterator[outrider.Fleet]:
    with outrider.Fleet(["cpu"]) as made:
        yield made


@pytest.fixture
def session(fleet: outrider.Fleet) -> Iterator[outrider.InferenceSession]:
    with outrider.InferenceSession(TWO, options=outrider.SessionOptions(fleet=fleet)) as made:
        yield made


# The same on both ----------------------------------------------------------------------------------------------------
def program(runtime: ModuleType, session: Any) -> Iterator[Any]:
    """What a user's program might do; each thing it sees is yielded."""
    x = X.copy()
    value = runtime.OrtValue.ortvalue_from_numpy(x)
    yield value.device_name(), value.shape(), value.data_type(), value.element_type(), value.tensor_size_in_bytes()
    yield value.is_tensor(), value.is_tensor_sequence(), value.is_sparse_tensor(), value.has_value()
    yield value.data_ptr() == x.ctypes.data, np.shares_memory(value.numpy(), x), value.__dlpack_device__()
    x[0] = 9
    yield value.numpy().copy(), np.asarray(value), np.from_dlpack(value).copy()
    value.update_inplace(X)
    yield x.copy()
    made = runtime.OrtValue.ortvalue_from_shape_and_type([4], np.float32)
    made.update_inplace(X * 2)
    yield made.numpy().copy(), made.data_type(), made.shape()
    yield runtime.OrtValue.ortvalue_from_shape_and_type((2, 3), TensorProto.INT8).data_type()
    yield runtime.OrtValue.ortvalue_from_shape_and_type([2], TensorProto.BFLOAT16).data_type()
    shared = runtime.OrtValue.from_dlpack(x)
    yield shared.data_ptr() == x.ctypes.data

    binding = session.io_binding()
    yield binding.get_outputs()
    binding.bind_cpu_input("x", x)
    binding.bind_output("z")
    binding.bind_output("y", "cpu", 0)
    session.run_with_iobinding(binding)
    yield binding.copy_outputs_to_cpu()
    yield [one.numpy().copy() for one in binding.get_outputs()]
    x[...] = X * 3  # bound by reference
    session.run_with_iobinding(binding, None)
    yield binding.copy_outputs_to_cpu()

    y = np.full(4, 7, np.float32)
    binding.bind_output("y", "cpu", 0, np.float32, [4], y.ctypes.data)
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    yield y.copy(), binding.copy_outputs_to_cpu()
    binding.bind_output("y", "cpu", 0, TensorProto.FLOAT, (4,), y.ctypes.data)
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    session.run_with_iobinding(binding)
    yield y.copy()

    binding.clear_binding_outputs()
    yield binding.get_outputs()
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", made)
    session.run_with_iobinding(binding)
    yield made.numpy().copy(), [one.numpy().copy() for one in binding.get_outputs()]
    yield binding.get_outputs()[0].data_ptr() == made.data_ptr()
    yield session.run(None, {"x": made})
    yield [one.numpy().copy() for one in session.run_with_ort_values(["z"], {"x": made})]

    for wrong in (
        lambda: binding.bind_cpu_input("nope", x),
        lambda: binding.bind_output("y", "cpu", 0, None, None, y.ctypes.data),
        lambda: runtime.OrtValue.ortvalue_from_numpy(x, "cuda", 0),
        lambda: made.update_inplace(np.ones(5, np.float32)),
        lambda: session.run_with_iobinding(session.io_binding()),
    ):
        with pytest.raises(Exception):  # noqa: B017  # each has its own
            wrong()
    binding.clear_binding_inputs()
    with pytest.raises(Exception):  # noqa: B017
        session.run_with_iobinding(binding)


def plain(seen: Any) -> Any:
    if isinstance(seen, (list, tuple)):
        return [plain(one) for one in seen]
    return (seen.dtype.name, seen.tolist()) if isinstance(seen, np.ndarray) else seen


def test_a_program_written_for_onnxruntime(session: outrider.InferenceSession) -> None:
    theirs = onnxruntime.InferenceSession(TWO, providers=["CPUExecutionProvider"])
    ours = [plain(seen) for seen in program(outrider, session)]
    assert ours == [plain(seen) for seen in program(onnxruntime, theirs)]
    assert len(ours) == 20


# OrtValue ------------------------------------------------------------------------------------------------------------
def test_strided_arrays_and_those_of_another_byte_order_are_copied() -> None:
    strided = np.arange(8, dtype=np.float32)[::2]
    value = OrtValue.ortvalue_from_numpy(strided)
    np.testing.assert_array_equal(value.numpy(), strided)
    assert not np.shares_memory(value.numpy(), strided)
    swapped = OrtValue.ortvalue_from_numpy(X.astype(">f4"))
    np.testing.assert_array_equal(swapped.numpy(), X)
    assert swapped.numpy().dtype.isnative


def test_memory_made_for_a_value_is_shared_with_workers() -> None:
    value = OrtValue.ortvalue_from_shape_and_type([3, 2], np.int64)
    assert process_memory().segment.offset_of(value.numpy()) is not None
    assert value.data_ptr() % 64 == 0
    assert OrtValue.ortvalue_from_shape_and_type([2], TensorProto.BFLOAT16).numpy().dtype == ml_dtypes.bfloat16
    assert OrtValue.ortvalue_from_shape_and_type([], "float16").shape() == []


def test_what_is_no_tensor() -> None:
    sequence = OrtValue([X, X])
    assert (sequence.data_type(), sequence.is_tensor(), sequence.is_tensor_sequence()) == (
        "seq(tensor(float))", False, True
    )  # fmt: skip
    nothing = OrtValue(None, "optional(float32)")
    assert (nothing.has_value(), nothing.data_type()) == (False, "optional(tensor(float))")
    assert OrtValue({1: X}).data_type() == "map(int64,tensor(float))"
    for method in ("numpy", "data_ptr", "shape", "element_type", "__dlpack__", "tensor_size_in_bytes"):
        with pytest.raises(errors.InputTypeError, match=method):
            getattr(sequence, method)()
    text = OrtValue(np.array(["a"], object))
    assert text.data_type() == "tensor(string)"
    with pytest.raises(errors.InputTypeError, match="no address"):
        text.data_ptr()


def test_dlpack_of_every_kind() -> None:
    class Theirs:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()  # type: ignore[return-value]

    source = X.copy()
    for given in (Theirs(source), source.__dlpack__(), OrtValue.ortvalue_from_numpy(source)):
        assert OrtValue.from_dlpack(given).data_ptr() == address_of(source)
    fixed = X.copy()
    fixed.flags.writeable = False
    np.testing.assert_array_equal(OrtValue.from_dlpack(Theirs(fixed)).numpy(), X)
    np.testing.assert_array_equal(OrtValue.from_dlpack(Theirs(X[::2])).numpy(), X[::2])
    flags = OrtValue.from_dlpack(np.array([0, 1], np.uint8), is_bool_tensor=True)
    assert flags.numpy().tolist() == [False, True]
    for bad in (7, Theirs(np.array([1j], np.clongdouble))):
        with pytest.raises(errors.InputTypeError, match="from_dlpack"):
            OrtValue.from_dlpack(bad)

    class Elsewhere(Theirs):
        def __dlpack__(self, **keywords: Any) -> Any:
            raise BufferError("it is on a device")

    with pytest.raises(errors.InputTypeError, match="host tensor"):
        OrtValue.from_dlpack(Elsewhere(X))


@pytest.mark.parametrize("number", [TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2])
def test_dlpack_of_types_that_numpy_lacks(fleet: outrider.Fleet, number: int) -> None:
    theirs = onnxruntime.OrtValue.ortvalue_from_shape_and_type([2, 3], number)
    value = OrtValue.from_dlpack(theirs)
    assert value.element_type() == number and value.shape() == [2, 3]
    assert value.data_ptr() == theirs.data_ptr()
    value.update_inplace(np.arange(6).astype(value.numpy().dtype).reshape(2, 3))
    made = model([node("Cast", "x", "y", to=TensorProto.FLOAT)], [tensor("x", ["N", 3], number)], [tensor("y", None)])
    with outrider.InferenceSession(made, options=outrider.SessionOptions(fleet=fleet)) as session:
        given = theirs if number == TensorProto.BFLOAT16 else value  # of a float8 its numpy() makes uint8
        np.testing.assert_array_equal(session.run(None, {"x": given})[0], np.arange(6).reshape(2, 3))
        del given
    array = value.numpy()
    del theirs, value
    gc.collect()
    array[...] = 1  # the capsule keeps the memory
    assert (array == 1).all()
    nothing = OrtValue.from_dlpack(onnxruntime.OrtValue.ortvalue_from_shape_and_type([0, 3], number))
    assert nothing.shape() == [0, 3]


def test_updates_that_do_not_fit() -> None:
    value = OrtValue.ortvalue_from_numpy(X.copy())
    value.update_inplace(np.ones((2, 2), np.float32))  # as many elements
    assert value.numpy().tolist() == [1, 1, 1, 1]
    value.update_inplace(OrtValue.ortvalue_from_numpy(X))
    np.testing.assert_array_equal(value.numpy(), X)
    with pytest.raises(errors.DtypeMismatchError):  # onnxruntime copies the bytes
        value.update_inplace(np.ones(4, np.int32))
    with pytest.raises(errors.ShapeMismatchError):
        value.update_inplace(np.ones(5, np.float32))
    with pytest.raises(errors.InputTypeError):
        value.update_inplace([1, 2, 3, 4])
    fixed = X.copy()
    fixed.flags.writeable = False
    with pytest.raises(errors.InputTypeError, match="read-only"):
        OrtValue.ortvalue_from_numpy(fixed).update_inplace(X)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: OrtValue.ortvalue_from_numpy(X, "cuda", 0), "device_type"),
        (lambda: OrtValue.ortvalue_from_numpy(X, "cpu", 1), "device_id"),
        (lambda: OrtValue.ortvalue_from_numpy(X, "cpu", 0, 4318), "vendor_id"),
        (lambda: OrtValue.ortvalue_from_shape_and_type([1], "float32", "npu"), "device_type"),
        (lambda: OrtValue.ortvalue_from_shape_and_type([1], "float32", memory_info=7), "memory_info"),  # type: ignore[arg-type]
    ],
)
def test_other_devices_are_refused_by_name(make: Any, option: str) -> None:
    with pytest.raises(errors.UnsupportedOptionError, match=option):
        make()


def test_bindings_to_other_devices_are_refused_by_name(session: outrider.InferenceSession) -> None:
    binding = session.io_binding()
    for option, bind in (
        ("bind_output.device_type", lambda: binding.bind_output("y", "cuda", 0, np.float32, [4], 64)),
        ("bind_output.device_id", lambda: binding.bind_output("y", "cpu", 1)),
        ("bind_input.device_type", lambda: binding.bind_input("x", "cuda", 0, np.float32, [4], 64)),
    ):
        with pytest.raises(errors.UnsupportedOptionError) as caught:
            bind()
        assert caught.value.option == f"IOBinding.{option}"


@pytest.mark.parametrize(
    ("shape", "kind", "name"),
    [([2], 99, "element_type"), ([2], 8, "element_type"), ([2], "no", "element_type"),
     ([2], np.datetime64, "element_type"), ([-1], 1, "shape"), ([2.5], 1, "shape"), (7, 1, "shape"),
     (["N"], 1, "shape")],
)  # fmt: skip
def test_shapes_and_types_that_are_none(shape: Any, kind: Any, name: str) -> None:
    with pytest.raises(errors.InvalidOptionError) as caught:
        OrtValue.ortvalue_from_shape_and_type(shape, kind)
    assert caught.value.name == name


def test_what_no_value_can_share() -> None:
    for bad in ([1.0], np.ma.masked_array(X), np.array(["2020-01-01"], "datetime64[D]"), None):
        with pytest.raises(errors.InputTypeError, match="ortvalue_from_numpy"):
            OrtValue.ortvalue_from_numpy(bad)  # type: ignore[arg-type]


# IOBinding -----------------------------------------------------------------------------------------------------------
def test_bindings_that_cannot_be(session: outrider.InferenceSession, fleet: outrider.Fleet) -> None:
    binding = session.io_binding()
    with pytest.raises(errors.InputNotFoundError, match="no input 'q'"):
        binding.bind_cpu_input("q", X)
    with pytest.raises(errors.OutputNotFoundError, match="no output 'q'"):
        binding.bind_output("q")
    with pytest.raises(errors.InputTypeError, match="needs an OrtValue"):
        binding.bind_ortvalue_input("x", X)  # type: ignore[arg-type]
    with pytest.raises(errors.DtypeMismatchError) as caught:
        binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(np.zeros(4)))
    assert (caught.value.name, caught.value.expected, caught.value.got) == ("y", "float32", "float64")
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(errors.InputTypeError, match="read-only"):
        binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(fixed))
    with pytest.raises(errors.InputTypeError, match="cannot be written into"):
        binding.bind_ortvalue_output("y", OrtValue([X]))
    for pointer in (0, -1, None, "here"):
        with pytest.raises(errors.InvalidOptionError, match="buffer_ptr"):
            binding.bind_input("x", "cpu", 0, np.float32, [4], pointer)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidOptionError, match="at least one output"):
        session.run_with_iobinding(binding)
    binding.bind_output("y")
    with pytest.raises(errors.InputNotFoundError, match="was not fed"):
        session.run_with_iobinding(binding)
    binding.bind_cpu_input("x", X.astype(np.float64))
    with pytest.raises(errors.DtypeMismatchError):
        session.run_with_iobinding(binding)
    binding.bind_cpu_input("x", X)
    session.run_with_iobinding(binding)
    with outrider.InferenceSession(TWO, options=outrider.SessionOptions(fleet=fleet)) as other:
        for wrong in (binding, None):
            with pytest.raises(errors.InvalidOptionError, match="an IOBinding of this session"):
                other.run_with_iobinding(wrong)  # type: ignore[arg-type]
    assert isinstance(binding, IOBinding)


def test_results_of_a_binding_are_not_changed_by_its_later_runs(session: outrider.InferenceSession) -> None:
    x, y = X.copy(), np.zeros(4, np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("z")
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    kept = []
    for step in range(4):
        x[...] = X * step
        session.run_with_iobinding(binding)
        kept.append((binding.get_outputs(), binding.copy_outputs_to_cpu()))
    for step, (values, copies) in enumerate(kept):
        np.testing.assert_array_equal(values[0].numpy(), -X * step)
        np.testing.assert_array_equal(copies[1], np.maximum(X * step, 0))
        assert values[1].data_ptr() == address_of(y)  # bound: what the last run wrote


def test_memory_of_the_callers_own(session: outrider.InferenceSession) -> None:
    source, target = (ctypes.c_float * 4)(*X.tolist()), (ctypes.c_float * 4)()
    binding = session.io_binding()
    binding.bind_input("x", "CPU", 0, np.float32, [4], ctypes.addressof(source))
    binding.bind_output("z", "cpu", 0, np.float32, [4], ctypes.addressof(target))
    session.run_with_iobinding(binding)
    assert list(target) == (-X).tolist()
    binding.bind_input("x", "cpu", 0, np.float32, [0], 0)
    binding.bind_output("z", "cpu", 0, np.float32, [0], 0)
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].shape == (0,)


def test_values_are_fed_as_they_are(fleet: outrider.Fleet) -> None:
    made = model(
        [node("SequenceAt", "s i", "y"), node("Identity", "t", "u")],
        [onnx_sequence("s"), tensor("i", [], TensorProto.INT64), tensor("t", ["N"], TensorProto.STRING)],
        [tensor("y", None), tensor("u", ["N"], TensorProto.STRING)],
    )
    with outrider.InferenceSession(made, options=outrider.SessionOptions(fleet=fleet)) as session:
        feed = {"s": OrtValue([X, X * 2]), "i": OrtValue(np.array(1)), "t": OrtValue(np.array(["a", "ä"], object))}
        y, u = session.run_with_ort_values(None, feed)
        np.testing.assert_array_equal(y.numpy(), X * 2)
        assert u.numpy().tolist() == ["a", "ä"]
        binding = session.io_binding()
        for name, value in feed.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("u")
        with pytest.raises(errors.InputTypeError, match="tensors of numbers"):
            binding.bind_ortvalue_output("u", OrtValue(np.array(["", ""], object)))
        session.run_with_iobinding(binding)
        assert binding.copy_outputs_to_cpu()[0].tolist() == ["a", "ä"]


def onnx_sequence(name: str) -> Any:
    return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)
