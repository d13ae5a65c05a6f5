"""Values that are not plain tensors, as bytes: strings, sequences, maps, empty optionals, and what they nest.

    u64 length of the header | msgpack header | padding to 64 | buffers, each 64-byte aligned

The header describes the value (`{"kind": "tensor" | "string" | "list" | "map" | "none", ...}`) and names each buffer by
its offset from the end of the padded header and its length in bytes. Tensors are C-ordered.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.providers.wire.codec import msgpack
from outrider.providers.wire.dtypes import name_as, numpy_dtype, storage_bytes
from outrider.providers.wire.errors import WireError

_ALIGN = 64
MAX_DEPTH = 64  # values in values; ONNX has types for three
Buffer = bytes | memoryview


def _padded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def encode(value: Any, declared: str = "undefined") -> list[Buffer]:
    """The chunks whose concatenation is the encoded value, which is to be of type `declared`.

    Raises WireError for values ONNX has no type for.
    """
    body = _Body(declared)
    header = msgpack.packb(body.describe(value))
    lead = struct.pack("<Q", len(header)) + header
    return [lead + b"\0" * (_padded(len(lead)) - len(lead)), *body.buffers]


class _Body:
    """What comes after the header. No closures: one that calls itself is a cycle that keeps the value alive."""

    def __init__(self, declared: str) -> None:
        self.declared = declared
        self.buffers: list[Buffer] = []
        self._end = 0

    def describe(self, item: Any) -> dict[str, Any]:
        """The item for the header; its bytes are added here."""
        if item is None:
            return {"kind": "none"}
        if isinstance(item, dict):
            return {"kind": "map", "keys": list(item.keys()), "values": [self.describe(one) for one in item.values()]}
        if isinstance(item, (list, tuple)):
            return {"kind": "list", "items": [self.describe(one) for one in item]}
        if isinstance(item, str):
            item = np.array(item, dtype=object)
        array = np.asarray(item)
        try:
            dtype = name_as(array.dtype, self.declared)
        except ValueError as error:
            raise WireError(str(error), where="value", reason="no ONNX type") from error
        shape = list(array.shape)
        if dtype == "string":
            texts = [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel()]
            blob = msgpack.packb(texts)
            return {"kind": "string", "shape": shape, "offset": self._put(blob, len(blob)), "nbytes": len(blob)}
        array = np.ascontiguousarray(array).reshape(array.shape)
        data = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
        start = self._put(data, array.nbytes)
        return {"kind": "tensor", "dtype": dtype, "shape": shape, "offset": start, "nbytes": array.nbytes}

    def _put(self, data: Buffer, nbytes: int) -> int:
        start = self._end
        self.buffers.append(data)
        padding = _padded(nbytes) - nbytes
        if padding:
            self.buffers.append(b"\0" * padding)
        self._end += nbytes + padding
        return start


def size(chunks: Sequence[Buffer]) -> int:
    """Bytes of an encoded value."""
    return sum(len(chunk) for chunk in chunks)


def decode(view: memoryview) -> Any:
    """The value in `view`, in memory of its own. Raises WireError when the bytes are malformed.

    Whoever wrote them is not trusted: no more memory is asked for than the bytes that are there can fill.
    """
    try:
        (count,) = struct.unpack_from("<Q", view, 0)
        if count > len(view) - 8:
            raise WireError("the header is longer than the value", where="value", reason="out of bounds")
        header = msgpack.unpackb(bytes(view[8 : 8 + count]), strict_map_key=False)
        return _build(header, view[_padded(8 + count) :], 0)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, struct.error, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"an encoded value is malformed: {error}", where="value", reason="malformed") from error


def _build(item: dict[str, Any], view: memoryview, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise WireError(f"values nest more than {MAX_DEPTH} deep", where="value", reason="too deep")
    kind = item["kind"]
    if kind == "none":
        return None
    if kind == "list":
        return [_build(one, view, depth + 1) for one in item["items"]]
    if kind == "map":
        return dict(zip(item["keys"], (_build(one, view, depth + 1) for one in item["values"]), strict=True))
    start, nbytes, shape = item["offset"], item["nbytes"], tuple(item["shape"])
    if start < 0 or nbytes < 0 or start + nbytes > len(view):
        raise WireError("a buffer lies outside of its value", where="value", reason="out of bounds")
    if any(type(dim) is not int or not 0 <= dim < 1 << 62 for dim in shape):
        raise WireError(f"no shape is {shape!r:.60}", where="value", reason="malformed")
    data = view[start : start + nbytes]
    if kind == "string":
        given = msgpack.unpackb(bytes(data))
        if type(given) is not list or len(given) != math.prod(shape) or any(type(text) is not str for text in given):
            raise WireError(f"what should be strings{list(shape)} is not", where="value", reason="wrong size")
        texts = np.empty(shape, dtype=object)
        texts.reshape(-1)[:] = given
        return texts
    if kind == "tensor":
        dtype = numpy_dtype(item["dtype"])
        if storage_bytes(item["dtype"], math.prod(shape)) != nbytes:
            raise WireError(f"{nbytes} bytes for {item['dtype']}{list(shape)}", where="value", reason="wrong size")
        array = np.empty(shape, dtype)
        if nbytes:
            array.reshape(-1).view(np.uint8)[:] = data
        return array
    raise WireError(f"no value is of kind {kind!r}", where="value", reason="unknown kind")
