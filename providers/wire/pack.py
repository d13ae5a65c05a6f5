"""Plain graphs as plain data, and back.

The packed form is what msgpack can carry, and nothing is in it twice: values and tensor references are written once, in
tables, and referred to by number. A graph with its bodies and lowered nodes shares one pair of tables.

    {"v": 1, "values": [[name, dtype, shape, constant], …], "refs": [[dtype, shape, offset, nbytes, …], …],
     "graph": [name, nodes, inputs, outputs, constants, opsets]}

A node is a list of its fields; attribute values are [kind, item]. Value number 0 is the omitted one. The lowered form
is a list of nodes, or an opset where nothing else differs. Whoever unpacks does not trust the packer: counts, types and
numbers are checked, and WireError says where they are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.providers.wire.errors import WireError
from outrider.providers.wire.graph import OMITTED, Graph, Node, TensorRef, Value

VERSION = 2
MAX_DEPTH = 64  # bodies in bodies and lowered forms of them; the loader takes 30

_PLAIN, _REF, _GRAPH, _LIST = 0, 1, 2, 3
_SCALARS = (int, float, str, bytes)
_NODE_FIELDS = 14
_REF_TYPES: tuple[Any, ...] = (str, (list, tuple), int, int, int, str, int, int, bool)


def pack_graph(graph: Graph) -> dict[str, Any]:
    """The graph as lists, dicts, numbers, strings and bytes. Raises WireError for attribute values of another kind."""
    packer = _Packer()
    packed = packer.graph(graph)
    return {"v": VERSION, "values": packer.values, "refs": packer.refs, "graph": packed}


def unpack_graph(packed: Any) -> Graph:
    """The graph that `pack_graph` packed. Raises WireError for whatever else it is given."""
    if not isinstance(packed, dict):
        raise WireError(f"a packed graph is a map, not {type(packed).__name__}", where="graph", reason="not a map")
    if set(packed) != {"v", "values", "refs", "graph"}:
        raise _wrong("graph", f"it has the keys {sorted(map(str, packed))}")
    if packed["v"] != VERSION:
        raise _wrong("graph", f"it is of version {packed['v']!r}, this side speaks {VERSION}")
    values = _values(_list(packed["values"], "values"))
    refs = [_ref(item, i) for i, item in enumerate(_list(packed["refs"], "refs"))]
    return _Unpacker(values, refs).graph(packed["graph"], "graph", 0)


def pack_model(
    data: TensorRef, weights: Mapping[str, TensorRef], moved: Mapping[str, Sequence[str]], foreign: Mapping[str, str]
) -> dict[str, Any]:
    """The ONNX form of a model: where its bytes lie, and those of its large initializers.

    `moved`: of nodes with bodies, the initializers that their bodies read beside what the plain graph says. `foreign`:
    nodes that no part of it can hold, and why.
    """
    packer = _Packer()
    packer.ref(data)
    names = {name: packer.ref(ref) for name, ref in weights.items()}
    moved_names = {node: list(those) for node, those in moved.items()}
    return {"v": VERSION, "names": names, "moved": moved_names, "foreign": dict(foreign), "refs": packer.refs}


def unpack_model(packed: Any) -> tuple[TensorRef, dict[str, TensorRef], dict[str, list[str]], dict[str, str]]:
    """What `pack_model` packed. Raises WireError for whatever else it is given."""
    keys = {"v", "names", "moved", "foreign", "refs"}
    if not isinstance(packed, dict) or set(packed) != keys or packed["v"] != VERSION:
        raise WireError("a packed model is malformed", where="model", reason="malformed")
    refs = [_ref(item, i) for i, item in enumerate(_list(packed["refs"], "refs"))]
    names, moved = packed["names"], packed["moved"]
    if not refs or not isinstance(names, dict):
        raise _wrong("model", "it names no bytes")
    for node, those in moved.items() if isinstance(moved, dict) else [(None, None)]:
        if not isinstance(node, str) or not isinstance(those, list) or not all(isinstance(n, str) for n in those):
            raise _wrong("model", f"what was moved out of node {node!r:.60} is no list of names")
    for name, number in names.items():
        if not isinstance(name, str) or type(number) is not int or not 0 <= number < len(refs):
            raise _wrong("model", f"{name!r:.60} is at {number!r:.60}")
    foreign = dict(_map(packed["foreign"], str, str, "model"))
    return refs[0], {name: refs[number] for name, number in names.items()}, moved, foreign


class _Packer:
    def __init__(self) -> None:
        self.values: list[Any] = [["", "undefined", None, False]]
        self.refs: list[Any] = []
        self._value_numbers: dict[Value, int] = {OMITTED: 0}
        self._ref_numbers: dict[TensorRef, int] = {}

    def graph(self, graph: Graph) -> list[Any]:
        return [
            graph.name,
            [self.node(node) for node in graph.nodes],
            self.numbers(graph.inputs),
            self.numbers(graph.outputs),
            {name: self.ref(ref) for name, ref in graph.constants.items()},
            dict(graph.opsets),
        ]

    def node(self, node: Node) -> list[Any]:
        return [
            node.index,
            node.name,
            node.op_type,
            node.domain,
            node.opset,
            {key: self.attribute(item, node.name) for key, item in node.attributes.items()},
            self.numbers(node.inputs),
            self.numbers(node.outputs),
            self.numbers(node.captures),
            node.overload,
            self.lowered(node),
            dict(node.metadata),
            [dict(item) for item in node.devices],
            list(node.origin),
        ]

    def lowered(self, node: Node) -> int | list[Any] | None:
        if node.lowered is None:
            return None
        if len(node.lowered) == 1 and _is_renumbered(node, node.lowered[0]):
            return node.lowered[0].opset
        return [self.node(step) for step in node.lowered]

    def numbers(self, values: Sequence[Value]) -> list[int]:
        known = self._value_numbers
        numbers = []
        for value in values:
            number = known.get(value)
            if number is None:
                number = known[value] = len(self.values)
                shape = None if value.shape is None else list(value.shape)
                self.values.append([value.name, value.dtype, shape, value.constant])
            numbers.append(number)
        return numbers

    def ref(self, ref: Any) -> int:
        if not isinstance(ref, TensorRef):
            raise _wrong("constants", f"a constant is {type(ref).__name__}, not the place of one")
        number = self._ref_numbers.get(ref)
        if number is None:
            number = self._ref_numbers[ref] = len(self.refs)
            self.refs.append(
                [ref.dtype, list(ref.shape), ref.offset, ref.nbytes, ref.segment, ref.path, ref.file_size,
                 ref.file_mtime_ns, ref.packed]
            )  # fmt: skip
        return number

    def attribute(self, item: Any, where: str) -> list[Any]:
        if item is None or isinstance(item, _SCALARS):
            return [_PLAIN, item]
        if isinstance(item, TensorRef):
            return [_REF, self.ref(item)]
        if isinstance(item, Graph):
            return [_GRAPH, self.graph(item)]
        if isinstance(item, (list, tuple)):
            if all(isinstance(one, _SCALARS) for one in item):
                return [_PLAIN, list(item)]
            return [_LIST, [self.attribute(one, where) for one in item]]
        raise _wrong(where, f"an attribute value is {type(item).__name__}")


class _Unpacker:
    def __init__(self, values: list[Value], refs: list[TensorRef]) -> None:
        self.values = values
        self.refs = refs

    def graph(self, item: Any, where: str, depth: int) -> Graph:
        if depth > MAX_DEPTH:
            raise _wrong(where, f"bodies nest more than {MAX_DEPTH} deep")
        name, nodes, inputs, outputs, constants, opsets = _fields(item, 6, where)
        _check(name, str, where)
        _check(constants, dict, where)
        return Graph(
            name,
            tuple([self.node(node, where, depth) for node in _list(nodes, where)]),
            self.numbered(inputs, where),
            self.numbered(outputs, where),
            {_check(key, str, where): self.ref(number, where) for key, number in constants.items()},
            _map(opsets, str, int, where),
        )

    def node(self, item: Any, where: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise _wrong(where, f"bodies nest more than {MAX_DEPTH} deep")
        fields = _fields(item, _NODE_FIELDS, where)
        index, name, op_type, domain, opset, attributes, inputs, outputs, captures = fields[:9]
        overload, lowered, metadata, devices, origin = fields[9:]
        if type(name) is not str or type(op_type) is not str or type(domain) is not str or type(overload) is not str:
            raise _wrong(where, "a node's name, op_type, domain or overload is no string")
        if type(index) is not int or type(opset) is not int:
            raise _wrong(name, "its index or opset is no integer")
        if type(attributes) is not dict:
            raise _wrong(name, "its attributes are no map")
        shared = (
            {_check(key, str, name): self.attribute(one, name, depth) for key, one in attributes.items()},
            self.numbered(inputs, name),
            self.numbered(outputs, name),
            self.numbered(captures, name) if captures else (),
            overload,
        )
        calls = tuple([_check(one, str, name) for one in _list(origin, name)]) if origin else ()
        steps: tuple[Node, ...] | None = None
        if type(lowered) is int:
            steps = (Node(index, name, op_type, domain, lowered, *shared, None, {}, (), calls),)
        elif lowered is not None:
            steps = tuple([self.node(step, name, depth + 1) for step in _list(lowered, name)])
        return Node(
            index,
            name,
            op_type,
            domain,
            opset,
            *shared,
            steps,
            _map(metadata, str, str, name) if metadata else {},
            tuple([_check(one, dict, name) for one in _list(devices, name)]) if devices else (),
            calls,
        )

    def numbered(self, numbers: Any, where: str) -> tuple[Value, ...]:
        values = self.values
        count = len(values)
        found = []
        for number in _list(numbers, where):
            if type(number) is not int or not 0 <= number < count:
                raise _wrong(where, f"value number {number!r} of {count}")
            found.append(values[number])
        return tuple(found)

    def ref(self, number: Any, where: str) -> TensorRef:
        if type(number) is not int or not 0 <= number < len(self.refs):
            raise _wrong(where, f"tensor number {number!r} of {len(self.refs)}")
        return self.refs[number]

    def attribute(self, item: Any, where: str, depth: int) -> Any:
        kind, content = _fields(item, 2, where)
        if kind == _PLAIN:
            if isinstance(content, (list, tuple)):
                if not all(isinstance(one, _SCALARS) for one in content):
                    raise _wrong(where, "an attribute lists what is neither number nor text")
                return list(content)
            if content is not None and not isinstance(content, _SCALARS):
                raise _wrong(where, f"an attribute is {type(content).__name__}")
            return content
        if kind == _REF:
            return self.ref(content, where)
        if kind == _GRAPH:
            return self.graph(content, where, depth + 1)
        if kind == _LIST:
            if depth > MAX_DEPTH:
                raise _wrong(where, "attributes nest too deep")
            return [self.attribute(one, where, depth + 1) for one in _list(content, where)]
        raise _wrong(where, f"attribute kind {kind!r}")


def _wrong(where: str, reason: str) -> WireError:
    return WireError(f"packed graph is malformed at {where!r}: {reason}", where=where, reason=reason)


def _list(item: Any, where: str) -> Sequence[Any]:
    if not isinstance(item, (list, tuple)):
        raise _wrong(where, f"a list is expected, not {type(item).__name__}")
    return item


def _fields(item: Any, count: int, where: str) -> Sequence[Any]:
    if not isinstance(item, (list, tuple)) or len(item) != count:
        got = len(item) if isinstance(item, (list, tuple)) else type(item).__name__
        raise _wrong(where, f"{count} fields are expected, not {got}")
    return item


def _check(item: Any, kind: type | tuple[Any, ...], where: str) -> Any:
    if not isinstance(item, kind) or (isinstance(item, bool) and kind is int):
        raise _wrong(where, f"{item!r:.60} is {type(item).__name__}")
    return item


def _map(item: Any, key: type, value: type, where: str) -> Mapping[Any, Any]:
    for name, content in _check(item, dict, where).items():
        _check(name, key, where)
        _check(content, value, where)
    return dict(item)


def _is_renumbered(node: Node, step: Node) -> bool:
    """True when this lowered form is the node itself at another opset, without hints; it shares its parts."""
    return (
        step.attributes is node.attributes
        and step.inputs is node.inputs
        and step.outputs is node.outputs
        and step.captures == node.captures
        and (step.index, step.name, step.op_type, step.domain) == (node.index, node.name, node.op_type, node.domain)
        and (step.overload, step.origin) == (node.overload, node.origin)
        and not (step.lowered or step.metadata or step.devices)
    )


def _values(items: Sequence[Any]) -> list[Value]:
    values = []
    for i, item in enumerate(items):
        if type(item) is not list or len(item) != 4:
            raise _wrong(f"value {i}", "name, dtype, shape and constant flag are expected")
        name, dtype, shape, constant = item
        if type(name) is not str or type(dtype) is not str or type(constant) is not bool:
            raise _wrong(f"value {i}", "its name, dtype or constant flag has the wrong type")
        if shape is not None:
            for dim in _list(shape, "a value's shape"):
                if type(dim) is not int and type(dim) is not str and dim is not None:
                    raise _wrong(f"value {i}", f"a dimension is {dim!r:.60}")
            shape = tuple(shape)
        values.append(Value(name, dtype, shape, constant))
    return values


def _ref(item: Any, number: int) -> TensorRef:
    where = f"tensor {number}"
    fields = _fields(item, len(_REF_TYPES), where)
    for i, kind in enumerate(_REF_TYPES):
        _check(fields[i], kind, where)
    dtype, shape, offset, nbytes, segment, path, size, mtime, packed = fields
    if any(type(dim) is not int or dim < 0 for dim in shape) or offset < 0 or nbytes < 0 or segment < 0:
        raise _wrong(where, f"its place makes no sense: {fields!r:.200}")
    return TensorRef(dtype, tuple(shape), offset, nbytes, segment, path, size, mtime, packed)
