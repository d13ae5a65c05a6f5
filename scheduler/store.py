"""Where the constants of a model are: inline ones in weight segments, external ones in their files.

The bytes leave the protobuf once, at load, and stay out of every later step: whatever the graph says about a constant
is a TensorRef. Inline bytes go into memfds that the workers map read-only; external files are looked at with `stat`.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, PACKED, numpy_dtype, storage_bytes
from outrider.providers.wire.graph import TensorRef
from outrider.providers.wire.packing import unpack
from outrider.scheduler.limits import MAX_DENSE_BYTES
from outrider.scheduler.model_errors import ModelLimitError, ModelLoadError, load_error
from outrider.shm.segment import ALIGN
from outrider.shm.weights import WeightMap, WeightWriter

KEPT_BYTES = 1024  # constants up to this size stay in the skeleton: shape inference and the version converter read them
STUB = "#"  # location of a stub: '#' and the number of its TensorRef


class WeightStore:
    """The constants of one model.

    `ids` numbers the segments (descriptor ids; the default counts from 1). A segment is closed by `seal` and can then
    be sent; what is added afterwards (constants of functions inlined later) opens another.
    """

    def __init__(self, path: str = "<model>", folder: str = ".", ids: Callable[[], int] | None = None) -> None:
        self.path = path
        self.folder = folder
        self.segments: dict[int, int] = {}  # sealed: segment id -> descriptor
        self._ids = ids or itertools.count(1).__next__
        self._writer: WeightWriter | None = None
        self._map = WeightMap()
        self._gathered = bytearray()  # small constants on their way to the open segment, from `_gathered_at` on
        self._gathered_at = 0
        self._open_id = 0
        self._stubs: list[TensorRef] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], TensorRef] = {}
        self._open_bytes: dict[TensorRef, bytes] = {}  # small ones of the open segment, which cannot be read yet

    # Into the store ------------------------------------------------------------------------------------------------
    def stub(self, tensor: onnx.TensorProto, where: str) -> onnx.TensorProto:
        """The tensor itself while it is small and inline, else a stand-in of the same type and shape without bytes.

        `where` names the tensor in errors. Raises ModelLoadError for malformed tensors and external data out of reach.
        """
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            ref = self._external(tensor, where)
        elif tensor.ByteSize() <= KEPT_BYTES:
            self.add(tensor, where)  # checks it
            return tensor
        else:
            ref = self.add(tensor, where)
        return self._stand_in(tensor.name, ref)

    def stub_sparse(self, sparse: onnx.SparseTensorProto, where: str) -> onnx.TensorProto:
        """Like `stub`, for a sparse tensor made dense. Raises ModelLimitError when that is larger than 1 GiB."""
        tensor = numpy_helper.from_array(self._dense(sparse, where), sparse.values.name)
        return self.stub(tensor, where)

    def add(self, tensor: onnx.TensorProto, where: str) -> TensorRef:
        """The place of a tensor's bytes, which are stored now unless they are already."""
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location = next((e.value for e in tensor.external_data if e.key == "location"), "")
            if location.startswith(STUB) and location[1:].isdigit() and int(location[1:]) < len(self._stubs):
                return self._stubs[int(location[1:])]
            return self._external(tensor, where)
        if tensor.HasField("raw_data") and tensor.ByteSize() <= KEPT_BYTES and not tensor.HasField("segment"):
            key = (BY_NUMBER.get(tensor.data_type, ""), tuple(tensor.dims), tensor.raw_data)
            if key in self._known:  # checked when it came first
                return self._known[key]
        dtype, shape = self._type(tensor, where)
        return self.add_array(dtype, shape, self._inline(tensor, dtype, shape, where), where)

    def add_array(self, dtype: str, shape: tuple[int, ...], items: np.ndarray, what: str = "constant") -> TensorRef:
        """Store items (one per element, C order, or bytes already in stored form)."""
        data = _string_bytes(items) if dtype == "string" else items.reshape(-1).view(np.uint8)
        small = data.nbytes <= KEPT_BYTES
        key = (dtype, shape, data.tobytes() if small else b"")
        if small and key in self._known:
            return self._known[key]
        if self._writer is None:
            self._open_id = self._ids()
            self._writer = WeightWriter(f"weights-{self._open_id}")
        if small:  # gathered, because each append asks the system how much memory is left
            offset = self._gathered_at + len(self._gathered)
            self._gathered += key[2] + bytes(-len(key[2]) % ALIGN)
            ref = TensorRef(dtype, shape, offset, len(key[2]), segment=self._open_id)
            self._known[key] = ref
            self._open_bytes[ref] = key[2]
        else:
            self._flush()
            ref = TensorRef(dtype, shape, *self._writer.append(data, what), segment=self._open_id)
            self._gathered_at = -(-self._writer.nbytes // ALIGN) * ALIGN
        return ref

    def _flush(self) -> None:
        if self._writer is not None and self._gathered:
            self._gathered_at = sum(self._writer.append(memoryview(self._gathered), "small constants"))
            self._gathered = bytearray()

    def seal(self) -> Mapping[int, int]:
        """Close the open segment, if any. Returns all segments: id -> read-only descriptor, owned by the store."""
        if self._writer is not None:
            self._flush()
            self.segments[self._open_id] = self._writer.seal()
            self._writer, self._gathered_at = None, 0
            self._open_bytes.clear()
        return self.segments

    def close(self) -> None:
        """Close the descriptors of the segments, and drop what was not sealed. Workers keep theirs."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for descriptor in self.segments.values():
            os.close(descriptor)
        self.segments.clear()
        self._map = WeightMap()

    # Out of the store ----------------------------------------------------------------------------------------------
    def read(self, ref: TensorRef) -> np.ndarray:
        """The contents, as a read-only array of the dtype's numpy form (object array of str for strings).

        Raises WeightFileChangedError when an external file changed since the model was loaded.
        """
        if ref.path:
            view = self._map.file_view(ref.path, ref.offset, ref.nbytes, ref.file_size, ref.file_mtime_ns)
        elif ref in self._open_bytes:
            view = memoryview(self._open_bytes[ref])
        else:
            if ref.segment == self._open_id:
                self.seal()
            view = self._map.segment_view(self.segments[ref.segment], ref.offset, ref.nbytes)
        data = np.frombuffer(view, np.uint8)
        if ref.dtype == "string":
            return _strings(data, ref.shape)
        if ref.packed:
            data = unpack(data, ref.dtype, math.prod(ref.shape))
        array = data.view(numpy_dtype(ref.dtype)).reshape(ref.shape)
        array.flags.writeable = False
        return array

    # Tensors -------------------------------------------------------------------------------------------------------
    def _error(self, reason: str) -> ModelLoadError:
        return load_error(self.path, reason)

    def _stand_in(self, name: str, ref: TensorRef) -> onnx.TensorProto:
        tensor = onnx.TensorProto(
            name=name, data_type=NUMBER[ref.dtype], dims=ref.shape, data_location=onnx.TensorProto.EXTERNAL
        )
        tensor.external_data.add(key="location", value=f"{STUB}{len(self._stubs)}")
        self._stubs.append(ref)
        return tensor

    def _type(self, tensor: onnx.TensorProto, where: str) -> tuple[str, tuple[int, ...]]:
        dtype = BY_NUMBER.get(tensor.data_type, "undefined")
        if dtype == "undefined":
            raise self._error(f"{where} has element type {tensor.data_type}, which this version does not know")
        shape = tuple(tensor.dims)
        if any(dim < 0 for dim in shape):
            raise self._error(f"{where} has a negative dimension: {list(shape)}")
        if tensor.HasField("segment"):
            raise self._error(f"{where} is one segment of a tensor, which ONNX never defined further")
        return dtype, shape

    def _inline(self, tensor: onnx.TensorProto, dtype: str, shape: tuple[int, ...], where: str) -> np.ndarray:
        count = math.prod(shape)
        if dtype == "string":
            if len(tensor.string_data) != count:
                raise self._error(f"{where} has {len(tensor.string_data)} strings for shape {list(shape)}")
            return np.array(list(tensor.string_data), object)
        if tensor.HasField("raw_data"):
            raw = np.frombuffer(tensor.raw_data, np.uint8)
            expected = _packed_bytes(dtype, count)
            if raw.nbytes != expected:
                raise self._error(f"{where} has {raw.nbytes} bytes where {dtype}{list(shape)} takes {expected}")
            return unpack(raw, dtype, count) if dtype in PACKED else raw
        if tensor.ByteSize() < count // 8:  # before numpy allocates what the shape promises
            raise self._error(f"{where} has too little data for {dtype}{list(shape)}")
        try:
            array = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._error(f"{where} is malformed: {error}") from error
        if array.size != count:
            raise self._error(f"{where} has {array.size} elements for shape {list(shape)}")
        return np.ascontiguousarray(array)

    def _external(self, tensor: onnx.TensorProto, where: str) -> TensorRef:
        dtype, shape = self._type(tensor, where)
        if dtype == "string":
            raise self._error(f"{where} keeps strings in an external file, which ONNX does not define")
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path, info = self._resolve(entries.get("location", ""), where)
        nbytes = _packed_bytes(dtype, math.prod(shape))
        try:
            offset = int(entries.get("offset", "") or 0)
            length = int(entries.get("length", "") or nbytes)
        except ValueError:
            raise self._error(f"{where} has an external offset or length that is not a number: {entries}") from None
        if length != nbytes:
            raise self._error(f"{where} has {length} external bytes where {dtype}{list(shape)} takes {nbytes}")
        if offset < 0 or offset + nbytes > info.st_size:
            span = f"bytes {offset} to {offset + nbytes}"
            raise self._error(f"{where} wants {span} of {path}, which has {info.st_size}: it is cut short or wrong")
        return TensorRef(
            dtype, shape, offset, nbytes, path=path, file_size=info.st_size, file_mtime_ns=info.st_mtime_ns,
            packed=dtype in PACKED,
        )  # fmt: skip

    def _resolve(self, location: str, where: str) -> tuple[str, os.stat_result]:
        """An external file, which must lie under the model's folder also after symbolic links are followed."""
        if not location or "\0" in location:
            raise self._error(f"{where} has external data without a usable location: {location!r}")
        base = os.path.realpath(self.folder)
        # A model that is itself a link (as in the Hugging Face cache) may keep its data where the link leads.
        bases = {base, os.path.dirname(os.path.realpath(self.path)) if os.path.exists(self.path) else base}
        path = os.path.realpath(os.path.join(base, location))
        lexical = os.path.normpath(os.path.join(base, location))
        inside = os.path.commonpath([base, lexical]) == base and not os.path.isabs(location)
        if not inside or all(os.path.commonpath([b, path]) != b for b in bases):
            raise self._error(f"external data of {where} is at {location!r}, outside the model's folder {base}")
        try:
            info = os.stat(path)
        except OSError as error:
            detail = error.strerror or "cannot be read"
            raise self._error(f"external data of {where} is missing: {path} ({detail})") from error
        if not stat.S_ISREG(info.st_mode):
            raise self._error(f"external data of {where} is not a file: {path}")
        return path, info

    def _dense(self, sparse: onnx.SparseTensorProto, where: str) -> np.ndarray:
        dtype, _ = self._type(sparse.values, where)
        shape = tuple(sparse.dims)
        count = math.prod(shape)
        if dtype == "string" or any(dim < 0 for dim in shape):
            raise self._error(f"sparse {where} has a type or shape that cannot be made dense: {dtype}{list(shape)}")
        if storage_bytes(dtype, count) > MAX_DENSE_BYTES:
            raise ModelLimitError(
                f"{self.path}: sparse {where} of shape {list(shape)} is too large to be made dense.",
                what="bytes of a dense tensor", limit=MAX_DENSE_BYTES, got=storage_bytes(dtype, count),
            )  # fmt: skip
        if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
            raise self._error(f"sparse {where} keeps its values in an external file, which is not supported")
        values = numpy_helper.to_array(sparse.values).reshape(-1)
        indices = numpy_helper.to_array(sparse.indices).astype(np.int64)
        dense = np.zeros(shape, values.dtype)
        try:
            if indices.ndim == 2:
                dense[tuple(indices.T)] = values
            else:
                dense.reshape(-1)[indices] = values
        except (IndexError, ValueError) as error:
            raise self._error(f"sparse {where} has indices outside {list(shape)}: {error}") from error
        return dense


def _packed_bytes(dtype: str, count: int) -> int:
    per_byte = PACKED.get(dtype)
    return -(-count // per_byte) if per_byte else storage_bytes(dtype, count)


def _string_bytes(items: np.ndarray) -> np.ndarray:
    """`count + 1` int64 end offsets, then the UTF-8 of all strings."""
    encoded = [item if isinstance(item, bytes) else str(item).encode() for item in items.reshape(-1)]
    ends = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(item) for item in encoded], out=ends[1:])
    return np.frombuffer(ends.tobytes() + b"".join(encoded), np.uint8)


def _strings(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    count = math.prod(shape)
    ends = data[: 8 * (count + 1)].view(np.int64)
    text = data[8 * (count + 1) :].tobytes()
    array = np.empty(count, object)
    array[:] = [text[ends[i] : ends[i + 1]].decode("utf-8", "replace") for i in range(count)]
    array = array.reshape(shape)
    array.flags.writeable = False
    return array
