"""Constants of a graph as read-only arrays over shared memory, mapped when they are first asked for."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import numpy_dtype
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.graph import Graph, Node, TensorRef
from outrider.providers.wire.packing import extended, unpack
from outrider.shm.weights import WeightMap


class Constants:
    """Resolves TensorRefs: weight segments (id -> descriptor) and external files. Arrays are cached and read-only."""

    def __init__(self, segments: Mapping[int, int], maps: WeightMap | None = None) -> None:
        self._segments = segments
        self._maps = WeightMap() if maps is None else maps
        self._cache: dict[tuple[Any, ...], np.ndarray] = {}

    def array(self, ref: TensorRef) -> np.ndarray:
        """The constant. Raises WireError for a malformed reference, the errors of `shm.weights` for a changed file."""
        key = (ref.path, ref.segment, ref.offset, ref.nbytes, ref.dtype, ref.shape)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._read(ref)
        return found

    def _read(self, ref: TensorRef) -> np.ndarray:
        count = 1
        for dim in ref.shape:
            count *= dim
        if ref.nbytes == 0:
            view = memoryview(b"")
        elif ref.path:
            view = self._maps.file_view(ref.path, ref.offset, ref.nbytes, ref.file_size, ref.file_mtime_ns)
        else:
            descriptor = self._segments.get(ref.segment)
            if descriptor is None:
                raise WireError(
                    f"no weight segment is numbered {ref.segment}", where="TensorRef", reason="unknown segment"
                )
            view = self._maps.segment_view(descriptor, ref.offset, ref.nbytes)
        if ref.dtype == "string":
            return _strings(view, ref.shape, count)
        dtype = numpy_dtype(ref.dtype)
        if ref.packed:
            return _unpacked(view, ref, dtype, count)
        if count * dtype.itemsize != ref.nbytes:
            raise WireError(
                f"{ref.nbytes} bytes for a constant {ref.dtype}{list(ref.shape)}",
                where="TensorRef",
                reason="wrong size",
            )
        array = np.ndarray(ref.shape, dtype, buffer=view) if ref.nbytes else np.empty(ref.shape, dtype)
        array.flags.writeable = False
        return array

    def graph(self, graph: Graph) -> Graph:
        """The same graph with arrays in place of references, bodies and lowered forms included."""
        return dataclasses.replace(
            graph, nodes=tuple(self.node(node) for node in graph.nodes), constants=LazyConstants(self, graph.constants)
        )

    def node(self, node: Node) -> Node:
        """The node with decoded attributes; the same one where there is nothing to decode."""
        lowered = node.lowered
        if lowered is not None:
            steps = tuple([self.node(step) for step in lowered])
            lowered = lowered if all(map(operator.is_, steps, lowered)) else steps
        attributes = node.attributes
        if any(map(_is_coded, attributes.values())):
            attributes = {key: self._attribute(item) for key, item in attributes.items()}
        elif lowered is node.lowered:
            return node
        return dataclasses.replace(node, attributes=attributes, lowered=lowered)

    def _attribute(self, item: Any) -> Any:
        if isinstance(item, TensorRef):
            return self.array(item)
        if isinstance(item, Graph):
            return self.graph(item)
        if isinstance(item, (list, tuple)):
            return [self._attribute(one) for one in item]
        return item


def _is_coded(item: Any) -> bool:
    """True for a reference or a body, and for a list that may hold one."""
    return isinstance(item, (TensorRef, Graph)) or (
        isinstance(item, (list, tuple)) and any(isinstance(one, (TensorRef, Graph, list, tuple)) for one in item)
    )


class LazyConstants(Mapping[str, np.ndarray]):
    """name -> read-only array; nothing is mapped before it is asked for."""

    def __init__(self, constants: Constants, refs: Mapping[str, TensorRef]) -> None:
        self._constants = constants
        self._refs = refs

    def __getitem__(self, name: str) -> np.ndarray:
        return self._constants.array(self._refs[name])

    def __contains__(self, name: object) -> bool:
        return name in self._refs

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)


def _strings(view: memoryview, shape: tuple[int, ...], count: int) -> np.ndarray:
    ends = np.frombuffer(view[: 8 * (count + 1)], np.int64)
    text = bytes(view[8 * (count + 1) :])
    array = np.empty(shape, dtype=object)
    array.ravel()[:] = [text[ends[i] : ends[i + 1]].decode() for i in range(count)]
    array.flags.writeable = False
    return array


def _unpacked(view: memoryview, ref: TensorRef, dtype: np.dtype[Any], count: int) -> np.ndarray:
    """2- and 4-bit elements, one item each."""
    items = extended(unpack(np.frombuffer(view, np.uint8), ref.dtype, count), ref.dtype)
    array = items.view(dtype).reshape(ref.shape)
    array.flags.writeable = False
    return array
