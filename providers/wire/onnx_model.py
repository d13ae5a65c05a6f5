"""The ONNX form of a model, and of any part of it, made without the `onnx` package.

The coordinator serializes the model once, without its large weights, every node under its final name; it lies in
shared memory. A part of it is put together from the very bytes of its nodes, so that nothing that somebody wrote into
them is lost, with new inputs and outputs around them:

    ModelProto   ir_version, opset_import..., functions...     as they are
      GraphProto
        node...             those asked for, as they are
        initializer...      those that they or their bodies read; a large one is only its name, type and shape, with
                            `external_data`: its bytes are in `weights`, or in the file that this names
        input, output       made from the plain graph
        value_info...       of the values in between, as they are

Field numbers are those of `onnx.proto`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.graph import Node, Shape, Value

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_IR_VERSION, _MODEL_GRAPH, _MODEL_OPSET_IMPORT, _MODEL_FUNCTIONS = 1, 7, 8, 25
_GRAPH_NODE, _GRAPH_NAME, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_VALUE_INFO = 1, 2, 5, 11, 12, 13
_NODE_NAME, _TENSOR_NAME, _TENSOR_DATA_TYPE, _VALUE_NAME = 3, 8, 2, 1
_NODE_INPUT, _NODE_OUTPUT, _NODE_OP_TYPE = 1, 2, 4
_FUNCTION_NAME, _FUNCTION_DOMAIN, _FUNCTION_OVERLOAD = 1, 10, 13


@dataclass(frozen=True)
class Part:
    """A model made of some nodes: its bytes, and the initializers whose bytes are not in it, each with its dtype.

    The array of such a one is `OnnxModel.weights[name]`; where `ml_dtypes` is not installed, that of a dtype that
    numpy does not have holds raw unsigned integers. `files`: further initializers, whose `external_data` names a file,
    from the root folder on; that it is the file that was loaded is checked where `OnnxModel.weights[name]` is read.
    `outputs`: what its outputs are called, in the order asked for.
    """

    data: bytes
    weights: Mapping[str, str]
    files: tuple[str, ...]
    outputs: tuple[str, ...]


class OnnxModel:
    """A serialized model. `weights`: the large initializers, by name, as read-only arrays that are not copied.

    `moved`: of nodes with bodies, the initializers that were moved out of those. `foreign`: names of nodes that no part
    can hold, because an opset describes them that the model does not import, and that in words. `files`: those of the
    weights that lie in files of their own. Raises WireError when the bytes are no model as the coordinator makes it.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        weights: Mapping[str, np.ndarray],
        moved: Mapping[str, Sequence[str]],
        foreign: Mapping[str, str],
        files: Collection[str] = (),
    ) -> None:
        self.weights = weights
        self.foreign = foreign
        self._files = files
        self._moved = moved
        self._head: list[memoryview] = []
        self._nodes: dict[str, memoryview] = {}
        self._initializers: dict[str, memoryview] = {}
        self._infos: dict[str, memoryview] = {}
        self._functions: set[tuple[str, str, str]] = set()  # domain, name, overload
        graph: memoryview | None = None
        for number, whole, payload in fields(memoryview(data)):
            if number == _MODEL_GRAPH:
                graph = _message(whole, payload)
            elif number in (_MODEL_IR_VERSION, _MODEL_OPSET_IMPORT, _MODEL_FUNCTIONS):
                self._head.append(whole)
                if number == _MODEL_FUNCTIONS:
                    self._functions.add(_function_key(_message(whole, payload)))
        if graph is None:
            raise WireError("a serialized model has no graph", where="model", reason="no graph")
        named = {
            _GRAPH_NODE: (self._nodes, _NODE_NAME),
            _GRAPH_INITIALIZER: (self._initializers, _TENSOR_NAME),
            _GRAPH_VALUE_INFO: (self._infos, _VALUE_NAME),
        }
        for number, whole, payload in fields(graph):
            if number in named:
                table, name_field = named[number]
                table[_text(_message(whole, payload), name_field)] = whole

    def calls(self, node: Node) -> bool:
        """True for a call of a function that the model itself defines."""
        return (node.domain, node.op_type, node.overload) in self._functions

    def cut(
        self, nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], apart: bool = False
    ) -> Part:
        """A model of these nodes of the model's graph, in topological order. The same arguments give the same bytes.

        `inputs` get their dtypes and shapes; whoever runs the part may hold arrays against those shapes, which are not
        always true, since real models declare wrong ones: a Value with shape None promises nothing. `outputs` get
        their dtypes only, and those of unknown dtype not even that. What the nodes read and neither they nor `inputs`
        make must be initializers. `apart`: an output that one of the nodes reads leaves through an Identity, under
        another name, since some execution providers take nothing of a model with such an output.

        Raises WireError for unknown names, for `foreign` nodes, and for an input of unknown dtype, which ONNX cannot
        express (`is_declarable` tells).
        """
        for node in nodes:
            if node.name in self.foreign:
                reason = self.foreign[node.name]
                raise WireError(f"no part can hold node {node.name!r}: {reason}", where=node.name, reason=reason)
        given = {value.name for value in inputs}
        made = dict.fromkeys(value.name for node in nodes for value in node.outputs if value.name)
        read = dict.fromkeys(value.name for node in nodes for value in (*node.inputs, *node.captures) if value.name)
        read.update((name, None) for node in nodes for name in self._moved.get(node.name, ()))
        results = {value.name: value for value in outputs}
        constants = [name for name in (read | results) if name not in given and name not in made]
        parts: list[bytes | memoryview] = [_field(_GRAPH_NAME, b"part")]
        parts += [self._find(self._nodes, node.name, "node") for node in nodes]
        parts += [self._find(self._initializers, name, "initializer") for name in constants]
        parts += [_field(_GRAPH_INPUT, value_info(value, value.shape)) for value in inputs]
        taken = {*given, *made, *constants}
        leaving = {name: _other(name, taken) if apart and name in read else name for name in results}
        parts += [_field(_GRAPH_NODE, _identity(name, new)) for name, new in leaving.items() if name != new]
        parts += [_field(_GRAPH_OUTPUT, _result(replace(value, name=leaving[name]))) for name, value in results.items()]
        infos = [name for name in made if name in self._infos and name not in given]
        parts += [self._infos[name] for name in infos if leaving.get(name) != name]
        data = b"".join([*self._head, _field(_MODEL_GRAPH, b"".join(parts))])
        weights = {name: self._dtype(name) for name in constants if name in self.weights and name not in self._files}
        files = tuple(name for name in constants if name in self._files)
        return Part(data, weights, files, tuple(leaving[value.name] for value in outputs))

    def _find(self, table: Mapping[str, memoryview], name: str, what: str) -> memoryview:
        found = table.get(name)
        if found is None:
            raise WireError(f"the serialized model has no {what} {name!r}", where="model", reason=f"unknown {what}")
        return found

    def _dtype(self, name: str) -> str:
        """Of an initializer."""
        for _, _, tensor in fields(self._initializers[name]):
            for number, _, payload in fields(tensor):
                if number == _TENSOR_DATA_TYPE:
                    return BY_NUMBER.get(_varint(payload, 0)[0], "undefined")
        return "undefined"


def _other(name: str, taken: Collection[str]) -> str:
    """A name for a value that leaves a part beside the one of this name."""
    other = f"{name}/out"
    while other in taken:
        other += "~"
    return other


# Protobuf ----------------------------------------------------------------------------------------------------------
def fields(data: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """(field number, its bytes with the tag, its payload) of each field of a message.

    The payload of a number is its bytes. Raises WireError for what is cut short or no message.
    """
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at)
            begin, at = at, at + size
        elif kind in (_FIXED64, _FIXED32):
            begin, at = at, at + (8 if kind == _FIXED64 else 4)
        elif kind == _VARINT:
            begin = at
            _, at = _varint(data, at)
        else:
            raise WireError(f"wire type {kind} is none of protobuf's", where="model", reason="malformed")
        if at > len(data):
            raise WireError("a serialized message is cut short", where="model", reason="malformed")
        yield tag >> 3, data[start:at], data[begin:at]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    result = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
    raise WireError("a serialized number is cut short", where="model", reason="malformed")


def _message(whole: memoryview, payload: memoryview) -> memoryview:
    """The payload of a field that must be a message or text."""
    if whole[0] & 7 != _BYTES:
        raise WireError("a number stands where a message should", where="model", reason="malformed")
    return payload


def _text(message: memoryview, wanted: int) -> str:
    """A string field of a message; '' if it is not there."""
    for number, whole, payload in fields(message):
        if number == wanted:
            try:
                return str(_message(whole, payload), "utf-8")
            except UnicodeDecodeError as error:
                raise WireError(f"a name is no UTF-8: {error}", where="model", reason="malformed") from error
    return ""


def _function_key(message: memoryview) -> tuple[str, str, str]:
    return _text(message, _FUNCTION_DOMAIN), _text(message, _FUNCTION_NAME), _text(message, _FUNCTION_OVERLOAD)


def _identity(name: str, new: str) -> bytes:
    """An Identity node, called as what it makes."""
    texts = {_NODE_INPUT: name, _NODE_OUTPUT: new, _NODE_NAME: new, _NODE_OP_TYPE: "Identity"}
    return b"".join(_field(number, text.encode()) for number, text in texts.items())


def _encoded(number: int) -> bytes:
    """A varint."""
    made = bytearray()
    number &= (1 << 64) - 1  # negative numbers are their two's complement
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def _field(number: int, payload: bytes) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(len(payload)) + payload


def _number(number: int, value: int) -> bytes:
    return _encoded(number << 3 | _VARINT) + _encoded(value)


# Types -------------------------------------------------------------------------------------------------------------
def is_declarable(value: Value) -> bool:
    """Whether the dtype of a value is known, so that it can be an input of a part."""
    return "undefined" not in value.dtype


def value_info(value: Value, shape: Shape) -> bytes:
    """A ValueInfoProto: the value's name and dtype, with this shape if it is a tensor. Raises WireError."""
    if not is_declarable(value):
        raise WireError(f"the type of input {value.name!r} is unknown", where=value.name, reason="unknown type")
    return _field(_VALUE_NAME, value.name.encode()) + _field(2, _type(value.dtype, shape))


def _result(value: Value) -> bytes:
    return value_info(value, None) if is_declarable(value) else _field(_VALUE_NAME, value.name.encode())


def _type(dtype: str, shape: Shape = None) -> bytes:
    """A TypeProto. Raises WireError for a dtype that ONNX has no name for."""
    outer, paren, inner = dtype.partition("(")
    inner = inner.removesuffix(")")
    if not paren:
        return _field(1, _number(1, _element(dtype)) + (b"" if shape is None else _field(2, _shape(shape))))
    if outer == "sequence":
        return _field(4, _field(1, _type(inner)))
    if outer == "optional":
        return _field(9, _field(1, _type(inner)))
    if outer == "sparse":
        return _field(8, _number(1, _element(inner)))
    if outer == "map":
        key, _, item = inner.partition(",")
        return _field(5, _number(1, _element(key)) + _field(2, _type(item)))
    raise WireError(f"{dtype!r} is no type of ONNX", where="model", reason="unknown dtype")


def _element(dtype: str) -> int:
    number = NUMBER.get(dtype)
    if not number:
        raise WireError(f"a value of unknown type ({dtype!r})", where="model", reason="unknown dtype")
    return number


def _shape(shape: Iterable[int | str | None]) -> bytes:
    return b"".join(_field(1, _dimension(dim)) for dim in shape)


def _dimension(dim: int | str | None) -> bytes:
    if dim is None:
        return b""
    return _field(2, dim.encode()) if isinstance(dim, str) else _number(1, dim)
