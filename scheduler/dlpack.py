"""Arrays from DLPack objects: by numpy, and for the types that numpy lacks (bfloat16, float8) by their description.

The latter reads the structures of the DLPack specification, version 0.x, which every producer offers:

    DLManagedTensor  { DLTensor; void *manager_ctx; void (*deleter)(DLManagedTensor *) }
    DLTensor         { void *data; DLDevice { int32 type, int32 id }; int32 ndim;
                       DLDataType { uint8 code, uint8 bits, uint16 lanes };
                       int64 *shape; int64 *strides (in elements, NULL: contiguous); uint64 byte_offset }

The capsule is not consumed: the array holds it, and it frees the tensor when it goes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import numpy_dtype

HOST = 1  # kDLCPU
# (code, bits) -> ONNX name
_TYPES = {
    (4, 16): "bfloat16", (10, 8): "float8e4m3fn", (11, 8): "float8e4m3fnuz", (12, 8): "float8e5m2",
    (13, 8): "float8e5m2fnuz", (14, 8): "float8e8m0",
}  # fmt: skip

Array = np.ndarray[Any, Any]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Capsule:
    """A bare capsule of the host, as an object with the protocol's methods."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST, 0


def from_dlpack(data: Any) -> Array:
    """The tensor of an object with `__dlpack__`, or of a capsule of the host, without a copy.

    Raises what the object or numpy raises (BufferError, TypeError, ...) where that cannot be.
    """
    given = data if hasattr(data, "__dlpack__") else _Capsule(data)
    try:
        return np.from_dlpack(given)
    except Exception:
        array = described(given)
        if array is None:
            raise
        return array


def described(data: Any) -> Array | None:
    """The tensor of an object with `__dlpack__` if it is of a type that numpy lacks, and in host memory; else None."""
    try:
        if not hasattr(data, "__dlpack__") or data.__dlpack_device__()[0] != HOST:
            return None
        capsule = data.__dlpack__()
    except Exception:  # whatever the object raises: it gives no tensor
        return None
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.restype = ctypes.c_int
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    name = ctypes.c_char_p(b"dltensor")
    if not api.PyCapsule_IsValid(ctypes.py_object(capsule), name):
        return None
    tensor = _Tensor.from_address(api.PyCapsule_GetPointer(ctypes.py_object(capsule), name))
    dtype = _TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1 or tensor.device != HOST:
        return None
    kind = numpy_dtype(dtype)
    shape = tuple(tensor.shape[: tensor.ndim])
    if not tensor.data or 0 in shape:
        return np.empty(shape, kind)
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    if strides is not None and min(strides, default=0) < 0:
        return None
    last = sum(step * (dim - 1) for step, dim in zip(strides, shape, strict=True)) if strides else 0
    count = last + 1 if strides else int(np.prod(shape))
    memory: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(tensor.data + tensor.byte_offset)
    memory.owner = capsule  # lives as long as what is built on `memory`
    steps = None if strides is None else tuple(step * kind.itemsize for step in strides)
    return np.ndarray(shape, kind, buffer=memoryview(memory), strides=steps)
