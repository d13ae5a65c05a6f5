"""The plain graph: an ONNX graph as frozen Python data, the same in coordinator, messages and workers.

- **Value**: a named tensor (or sequence, map, optional) with what is known of its type.
- **TensorRef**: where the bytes of a constant lie (a weight segment or an external file); never the bytes themselves.
- **Node**: one original node of the model, under its original name. `lowered` is its opset-21 form.
- **Graph**: nodes in topological order, with inputs, outputs and constants; bodies of If, Loop and Scan are Graphs too.

Names of values are unique within a graph; a body sees its own names first, then those of the graphs around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Dim = int | str | None
Shape = tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class Value:
    """A value as known before a run. `shape` is None for unknown rank; a dim is an int, a symbol, or None for unknown.

    `dtype` is an ONNX name in lower case (see `dtypes`); an omitted optional input is `Value("", "undefined")`.
    `constant`: its contents never change (an initializer that is not also an input, or made of such only).
    """

    name: str
    dtype: str = "undefined"
    shape: Shape = None
    constant: bool = False


OMITTED = Value("")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The place of a constant. Bytes are C-ordered, little-endian, unpacked except where `packed` says so.

    `segment`: descriptor id of a weight memfd, or 0 when `path` names an external file (absolute; its size in bytes and
    mtime in ns were checked at load and are checked again where it is mapped). `nbytes` counts the bytes at the place.
    Strings are stored as `count + 1` int64 end offsets followed by UTF-8.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    segment: int = 0
    path: str = ""
    file_size: int = 0
    file_mtime_ns: int = 0
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Attribute values: int, float, str, TensorRef (read-only array in a provider), Graph, or lists of those.

    `name` is the full original name (`#17` when unnamed; `If_0/then/Conv_1` in a body). `opset` is the version in force
    for its domain ('' is ai.onnx). `inputs` keep omitted ones as `OMITTED`, except trailing ones, which are dropped.
    `captures` are the outer values that its bodies read. `lowered` is None when the node already has its opset-21 form.
    `origin` names the function calls it was inlined from, outermost first.
    """

    index: int
    name: str
    op_type: str
    domain: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    captures: tuple[Value, ...] = ()
    overload: str = ""
    lowered: tuple[Node, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Mapping[str, Any], ...] = ()
    origin: tuple[str, ...] = ()

    def steps(self) -> tuple[Node, ...]:
        """The node in opset-21 form: one node or, where the conversion made several, those in order."""
        return (self,) if self.lowered is None else self.lowered

    def bodies(self) -> Iterator[tuple[str, Graph]]:
        """(attribute name, body) for each graph attribute."""
        for key, item in self.attributes.items():
            if isinstance(item, Graph):
                yield key, item
            elif isinstance(item, (list, tuple)):
                for one in item:
                    if isinstance(one, Graph):
                        yield key, one

    @property
    def label(self) -> str:
        """`domain::op`, with ai.onnx spelt out."""
        return f"{self.domain or 'ai.onnx'}::{self.op_type}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in topological order.

    `constants` maps names to TensorRef (coordinator, wire) or read-only arrays (providers). `opsets`: domain ->
    version. For a body, `inputs` are its formal inputs; captured names resolve in the graphs around it. `model`: its
    ONNX form (`onnx_model.OnnxModel`), for providers that want one.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, Any]
    opsets: Mapping[str, int] = field(default_factory=dict)
    model: Any = field(default=None, compare=False, repr=False)
