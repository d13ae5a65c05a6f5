"""`OrtValue`: a value of a model, with the methods it has in onnxruntime.

It holds a tensor as a numpy array, which it shares rather than copies where it can, a sequence as a list, a map as a
dict, and None for an empty optional. All memory is the host's: `device_type` is 'cpu'. A tensor made by
`ortvalue_from_shape_and_type` lies in memory that workers reach without a copy.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, numpy_dtype, onnx_name
from outrider.scheduler.checked import invalid_option, unsupported_option
from outrider.scheduler.differences import Explained
from outrider.scheduler.dlpack import from_dlpack
from outrider.scheduler.errors import DtypeMismatchError, InputTypeError, ShapeMismatchError
from outrider.scheduler.nodearg import type_name
from outrider.scheduler.pickling import refusing
from outrider.shm.segment import address_of
from outrider.shm.user import process_memory

Array = np.ndarray[Any, Any]


class OrtValue(Explained):
    """A tensor, sequence, map or empty optional. Made by one of the functions below, or got from an IOBinding.

    `value` is what it holds, `dtype` Outrider's name of its type ('float32', 'sequence(int64)').
    """

    __slots__ = ("value", "dtype")

    def __init__(self, value: Any, dtype: str | None = None) -> None:
        """`dtype` is needed where the value does not tell: an empty sequence or map, None."""
        self.value = value
        self.dtype = _type_of(value) if dtype is None else dtype

    @classmethod
    def of(cls, value: Any, declared: str) -> OrtValue:
        """A result; `declared` is its type where it does not tell itself."""
        return cls(value, None if isinstance(value, np.ndarray) else declared)

    __reduce__ = refusing("OrtValue", "it may lie in memory of this process; pickle its numpy() instead")

    # Making one -----------------------------------------------------------------------------------------------------
    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: Array, /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """The array itself as a value: what is written to one is seen in the other. Strided arrays are copied.

        Raises InputTypeError for what is no array of an ONNX type, UnsupportedOptionError for a device but 'cpu'.
        """
        check_device("OrtValue.ortvalue_from_numpy", device_type, device_id, vendor_id)
        return cls(_contiguous(_array("ortvalue_from_numpy", numpy_obj)))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: None = None,
    ) -> OrtValue:
        """A tensor of undefined contents in memory that workers read without a copy.

        `element_type`: a numpy type or an ONNX number. Raises InvalidOptionError for one that has no size,
        OutOfMemoryError, UnsupportedOptionError for a device but 'cpu'.
        """
        check_device("OrtValue.ortvalue_from_shape_and_type", device_type, device_id, vendor_id)
        if memory_info is not None:
            raise unsupported_option("OrtValue.ortvalue_from_shape_and_type.memory_info", None, "memory is the host's")
        kind = numpy_dtype(element_name(element_type))
        return cls(process_memory().empty(kind, checked_shape(shape), "an OrtValue"))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: Array, /, onnx_element_type: int) -> OrtValue:
        """The array's bytes as elements of an ONNX type of the same size: uint16 as bfloat16, uint8 as float8e5m2.

        What is written to one is seen in the other. Raises InputTypeError, and InvalidOptionError for a type of
        another size.
        """
        array = _contiguous(_array("ortvalue_from_numpy_with_onnx_type", data))
        kind = numpy_dtype(element_name(onnx_element_type))
        if array.dtype.itemsize != kind.itemsize or array.dtype.hasobject:
            expected = f"an ONNX type of {array.dtype.itemsize} bytes, the size of {array.dtype}"
            raise invalid_option("onnx_element_type", onnx_element_type, expected)
        return cls(array.view(kind))

    @classmethod
    def from_dlpack(cls, data: Any, /, is_bool_tensor: bool = False) -> OrtValue:
        """A tensor that shares the memory of `data`: an object with `__dlpack__`, or a capsule from it.

        `is_bool_tensor`: what it calls uint8 is bool. Raises InputTypeError for what numpy cannot share.
        """
        try:
            array = from_dlpack(data)
        except Exception as error:  # what the other library raises is its to choose
            raise _unfit("from_dlpack", "a host tensor with __dlpack__", data, error) from error
        if is_bool_tensor:
            array = array.view(np.bool_)
        return cls(_contiguous(_array("from_dlpack", array)))

    # What it is -----------------------------------------------------------------------------------------------------
    def numpy(self) -> Array:
        """The tensor, sharing its memory. Raises InputTypeError for what is no tensor."""
        return self._tensor("numpy")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._tensor("__array__"), dtype=dtype, copy=copy)

    def data_ptr(self) -> int:
        """The address of the tensor's first element. Raises InputTypeError for strings and what is no tensor."""
        array = self._tensor("data_ptr")
        if self.dtype == "string":
            raise _unfit("data_ptr", "a tensor of numbers", array, "strings have no address")
        return address_of(array)

    def device_name(self) -> str:
        """'cpu'."""
        return "cpu"

    def shape(self) -> list[int]:
        """The tensor's dimensions."""
        return list(self._tensor("shape").shape)

    def data_type(self) -> str:
        """onnxruntime's name of the type: 'tensor(float)', 'seq(tensor(int64))'."""
        return type_name(self.dtype)

    def element_type(self) -> int:
        """The ONNX number of the tensor's element type."""
        self._tensor("element_type")
        return NUMBER[self.dtype]

    def tensor_size_in_bytes(self) -> int:
        """Bytes of the tensor."""
        return int(self._tensor("tensor_size_in_bytes").nbytes)

    def has_value(self) -> bool:
        """False for an empty optional."""
        return self.value is not None

    def is_tensor(self) -> bool:
        """True for a tensor."""
        return isinstance(self.value, np.ndarray)

    def is_sparse_tensor(self) -> bool:
        """False: there are no sparse tensors here."""
        return False

    def is_tensor_sequence(self) -> bool:
        """True for a sequence."""
        return isinstance(self.value, list)

    def update_inplace(self, data: Any) -> None:
        """Copy an array or OrtValue of this dtype and as many elements over the contents; the address stays.

        Raises InputTypeError, DtypeMismatchError, ShapeMismatchError.
        """
        array = self._tensor("update_inplace")
        source = data._tensor("update_inplace") if isinstance(data, OrtValue) else _array("update_inplace", data)
        got = onnx_name(source.dtype.newbyteorder("="))
        if got != self.dtype:
            message = f"this OrtValue has dtype {self.dtype}; update_inplace got {got}."
            raise DtypeMismatchError(message, name="OrtValue", expected=self.dtype, got=got)
        if source.size != array.size:
            message = f"this OrtValue has shape {list(array.shape)}; update_inplace got {list(source.shape)}."
            raise ShapeMismatchError(message, name="OrtValue", expected=array.shape, got=source.shape)
        if not array.flags.writeable:
            raise _unfit("update_inplace", "a writable OrtValue", array, "its memory is read-only")
        np.copyto(array, source.reshape(array.shape))

    def __dlpack__(self, **keywords: Any) -> Any:
        """A DLPack capsule that shares the tensor's memory."""
        return self._tensor("__dlpack__").__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): the host."""
        kind, number = self._tensor("__dlpack_device__").__dlpack_device__()
        return int(kind), int(number)

    def __repr__(self) -> str:
        return f"<OrtValue {self.data_type()}{self.shape() if self.is_tensor() else ''}>"

    def _tensor(self, method: str) -> Array:
        if not isinstance(self.value, np.ndarray):
            raise _unfit(method, "an OrtValue that holds a tensor", self.value, f"it is {self.data_type()}")
        return self.value


def check_device(where: str, device_type: Any, device_id: Any, vendor_id: Any = -1) -> None:
    """Raise UnsupportedOptionError for any device but the host, which is 'cpu', 0."""
    if not isinstance(device_type, str) or device_type.lower() != "cpu":
        raise unsupported_option(f"{where}.device_type", device_type, "values lie in host memory; use 'cpu'.")
    for name, given, only in (("device_id", device_id, 0), ("vendor_id", vendor_id, -1)):
        if given != only:
            raise unsupported_option(f"{where}.{name}", given, f"the host is {only}.")


def element_name(element_type: Any) -> str:
    """The ONNX name of an element type given as numpy type or ONNX number. Raises InvalidOptionError without a size."""
    try:
        name = BY_NUMBER[element_type] if isinstance(element_type, int) else onnx_name(np.dtype(element_type))
    except (KeyError, ValueError, TypeError):
        name = "undefined"
    if name in ("undefined", "string"):
        raise invalid_option("element_type", element_type, "a numpy type or ONNX number of numbers or bool")
    return name


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple. Raises InvalidOptionError for what is no sequence of sizes."""
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError:
        dims = (-1,)
    if min(dims, default=0) < 0:
        raise invalid_option("shape", shape, "a sequence of sizes, none negative")
    return dims


def array_at(element_type: Any, shape: Any, buffer_ptr: Any) -> Array:
    """The caller's memory at an address as an array, which does not keep it alive."""
    kind, dims = numpy_dtype(element_name(element_type)), checked_shape(shape)
    nbytes = kind.itemsize
    for dim in dims:
        nbytes *= dim
    if not isinstance(buffer_ptr, (int, np.integer)) or buffer_ptr < 0 or (nbytes and not buffer_ptr):
        raise invalid_option("buffer_ptr", buffer_ptr, "the address of the tensor's first element")
    if not nbytes:
        return np.empty(dims, kind)
    memory = memoryview((ctypes.c_char * nbytes).from_address(int(buffer_ptr)))
    return np.ndarray(dims, kind, buffer=memory)


def _array(method: str, given: Any) -> Array:
    """A plain array of an ONNX dtype in native byte order."""
    if not isinstance(given, np.ndarray) or isinstance(given, np.ma.MaskedArray):
        raise _unfit(method, "a numpy array", given, "there is no memory to share")
    try:
        onnx_name(given.dtype.newbyteorder("="))
    except ValueError as error:
        raise _unfit(method, "an array of an ONNX type", given, error) from error
    array = given.view(np.ndarray)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else np.array(array, order="C")


def _type_of(value: Any) -> str:
    """Outrider's name of the type of a value; 'undefined' where it does not tell."""
    if isinstance(value, np.ndarray):
        return onnx_name(value.dtype)
    if isinstance(value, list):
        return f"sequence({_type_of(value[0]) if value else 'undefined'})"
    if isinstance(value, Mapping):
        for key, item in value.items():
            return f"map({'string' if isinstance(key, str) else 'int64'},{_type_of(np.asarray(item))})"
    return "undefined"


def _unfit(method: str, expected: str, got: Any, why: object) -> InputTypeError:
    kind = type(got).__name__
    message = f"OrtValue.{method} needs {expected}; got {kind}: {why}."
    return InputTypeError(message, name="OrtValue", expected=expected, got=kind)
