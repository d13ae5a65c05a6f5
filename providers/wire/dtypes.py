"""Element types: the ONNX names in lower case, their sizes, and their numpy forms.

A dtype is a plain string everywhere in Outrider: `'float32'`, `'bfloat16'`, `'int4'`, `'string'`; `'undefined'` marks
an omitted optional input. Types of other values are written `'sequence(float32)'`, `'optional(sequence(int64))'`,
`'map(int64,float32)'`.

numpy itself has no bfloat16, float8, float4, int4 or int2. Where the `ml_dtypes` package is installed its types serve;
elsewhere the raw unsigned integers of the same width do, one element per byte for the packed types.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

# ONNX TensorProto.DataType numbers (onnx.proto, IR version 14).
BY_NUMBER: dict[int, str] = {
    0: "undefined", 1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
    16: "bfloat16", 17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz", 21: "uint4",
    22: "int4", 23: "float4e2m1", 24: "float8e8m0", 25: "uint2", 26: "int2",
}  # fmt: skip
NUMBER: dict[str, int] = {name: number for number, name in BY_NUMBER.items()}

_NATIVE = {
    "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "bool", "float16", "float64", "uint32", "uint64",
    "complex64", "complex128",
}  # fmt: skip
# ONNX name -> (ml_dtypes name, raw numpy form without it)
_EXTENDED = {
    "bfloat16": ("bfloat16", "uint16"),
    "float8e4m3fn": ("float8_e4m3fn", "uint8"),
    "float8e4m3fnuz": ("float8_e4m3fnuz", "uint8"),
    "float8e5m2": ("float8_e5m2", "uint8"),
    "float8e5m2fnuz": ("float8_e5m2fnuz", "uint8"),
    "float8e8m0": ("float8_e8m0fnu", "uint8"),
    "float4e2m1": ("float4_e2m1fn", "uint8"),
    "uint4": ("uint4", "uint8"),
    "int4": ("int4", "uint8"),
    "uint2": ("uint2", "uint8"),
    "int2": ("int2", "uint8"),
}
# Elements per byte of the types that ONNX packs in TensorProto.raw_data (external and inline weights).
PACKED: dict[str, int] = {"uint4": 2, "int4": 2, "float4e2m1": 2, "uint2": 4, "int2": 4}

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
SIGNED = frozenset({"int8", "int16", "int32", "int64"})
UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
INTEGERS = SIGNED | UNSIGNED
NUMBERS = FLOATS | INTEGERS


@cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy form of an ONNX dtype (one element per item, packed types unpacked; strings are objects).

    Raises ValueError for names that are not element types, such as `'undefined'` or `'sequence(float32)'`.
    """
    if dtype in _NATIVE:
        return np.dtype(dtype)
    if dtype == "string":
        return np.dtype(object)
    if dtype in _EXTENDED:
        name, raw = _EXTENDED[dtype]
        try:
            import ml_dtypes
        except ImportError:
            return np.dtype(raw)
        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extended
    raise ValueError(f"{dtype!r} is not an element type; those are {', '.join(sorted(NUMBER))}")


def is_string(dtype: np.dtype[Any]) -> bool:
    """True for the numpy dtypes that hold strings: object, fixed-width text or bytes, and StringDType."""
    return dtype.kind in "OUS" or type(dtype).__name__ == "StringDType"


@cache
def onnx_name(dtype: np.dtype[Any]) -> str:
    """The ONNX name of a numpy dtype. Raises ValueError where ONNX has no such type (datetime, structured, ...)."""
    if is_string(dtype):
        return "string"
    if dtype.name in _NATIVE:
        return str(dtype.name)
    for name, (extended, _) in _EXTENDED.items():
        if dtype.name == extended:
            return name
    raise ValueError(f"ONNX has no tensor type for numpy dtype {dtype}")


@cache
def name_as(dtype: np.dtype[Any], declared: str) -> str:
    """`onnx_name` where a tensor of type `declared` is expected, or a sequence or optional of such.

    Without `ml_dtypes`, raw integers are what they stand for there.
    """
    element = declared.rpartition("(")[2].rstrip(")")
    return element if is_tensor(element) and numpy_dtype(element) == dtype else onnx_name(dtype)


@cache
def is_raw(dtype: str) -> bool:
    """True where `numpy_dtype` gives raw integers for want of `ml_dtypes`: bits to move, nothing to compute."""
    return dtype in _EXTENDED and numpy_dtype(dtype) == np.dtype(_EXTENDED[dtype][1])


def is_tensor(dtype: str) -> bool:
    """True for element types (string included), false for sequences, maps, optionals and 'undefined'."""
    return dtype in NUMBER and dtype != "undefined"


def storage_bytes(dtype: str, count: int) -> int:
    """Bytes of `count` elements as Outrider keeps them: unpacked. Raises ValueError for strings, which have no size."""
    if dtype == "string":
        raise ValueError("strings have no fixed size")
    return count * numpy_dtype(dtype).itemsize
