"""The provider contract, on one page.

A provider claims nodes, compiles units and is called with arrays. The simplest form is three methods:

    class MyProvider(Provider):
        def claim(self, graph):
            return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
        def compile(self, unit):
            return lambda inputs: [numpy.maximum(inputs[0], 0)]

It lives in a worker process of its own, is made there without arguments, and is called from one thread, never
concurrently. Everything else on this page is optional. docs/write-a-provider.md tells it with examples.

What is what: a **Graph** is what a provider is asked about; a **Node** has `op_type`, `domain` ('' is ai.onnx),
`opset`, `name`, `attributes` (decoded: int, float, str, lists, read-only arrays, Graphs for bodies), `inputs` and
`outputs`; those are **Values** with `name`, `dtype` (ONNX name in lower case, `'undefined'` for an omitted optional
input, which keeps its position), `shape` (tuple of int, str or None; None for unknown rank) and `constant`.
`graph.constants` and `unit.constants` map names to read-only arrays, read from shared memory when asked for.

What arrives: a tensor is a C-contiguous, 64-byte aligned, read-only array; strings are an object array of str, a
sequence is a list, a map a dict, an omitted or empty optional None. What is returned may be any array of the declared
dtype and rank, of any strides: it is copied, so what it lies in may be used again. Sequences, maps, optionals and
strings are returned in the forms in which they arrive.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from outrider.providers.wire.errors import KernelError, RunCancelledError
from outrider.providers.wire.graph import Graph, Node, Shape, TensorRef, Value
from outrider.providers.wire.onnx_model import OnnxModel
from outrider.providers.wire.spans import Trace
from outrider.shm.errors import OutriderError

__all__ = [
    "Capabilities", "Claim", "Context", "Decline", "Graph", "KernelError", "Node", "OnnxModel", "Program", "Provider",
    "ProviderContractError", "ProviderUnavailableError", "ClaimBrokenError", "Run", "RunCancelledError", "RunInto",
    "Shape", "TensorRef", "Trace", "Unit", "Value",
]  # fmt: skip


class Claim:
    """An indivisible offer for a set of nodes of the graph that was shown; `nodes` are Node objects of it.

    `reference`: the provider would serve them with a stop-gap that the report counts. `cost`: seconds that the provider
    takes for them in one run, without the way there and back; None, the default, leaves that to be estimated. Only
    strategies that weigh costs read it. Raises TypeError for a single node, ValueError for a cost that is no number of
    seconds.
    """

    __slots__ = ("nodes", "reference", "cost")

    def __init__(self, nodes: Sequence[Node], reference: bool = False, cost: float | None = None) -> None:
        if isinstance(nodes, Node):
            raise TypeError("Claim takes a list of nodes; a claim of one is Claim([node])")
        self.nodes = tuple(nodes)
        self.reference = reference
        self.cost = None if cost is None else float(cost)
        if self.cost is not None and not 0 <= self.cost < math.inf:
            raise ValueError(f"the cost of a claim is a number of seconds, at least 0; got {cost!r}")

    def __repr__(self) -> str:
        return f"Claim([{', '.join(node.name for node in self.nodes)}])"


class Decline:
    """A reasoned refusal of one node. A node that is neither claimed nor declined counts as 'not claimed'."""

    __slots__ = ("node", "reason")

    def __init__(self, node: Node, reason: str) -> None:
        self.node = node
        self.reason = reason

    def __repr__(self) -> str:
        return f"Decline({self.node.name}, {self.reason!r})"


@dataclass(frozen=True)
class Capabilities:
    """What nodes a provider can be given at all. A claim with a node outside of it is declined, with the reason.

    It is about all values that a node or its bodies read and write. `dtypes`: element types, None for all; `sequences`,
    `maps`, `optionals`: whether values may be such; `bodies`: whether nodes may have them (If, Loop, Scan, ...);
    `shapes`: what must be known of shapes: 'any' nothing, 'ranked' how many dimensions, 'static' each of them.
    """

    dtypes: Collection[str] | None = None
    sequences: bool = True
    maps: bool = True
    optionals: bool = True
    bodies: bool = True
    shapes: str = "any"


@dataclass(frozen=True)
class Context:
    """What `setup` is told. `device`: index, 0 where the kind has none. `threads`: how many CPU threads to use.

    `part`: what a kind of this package names after its colon: the execution provider of `ort:NAME`.

    `trace`: for a provider that wants its own steps in traces: while `trace.on`, tell them by `trace.span(...)`.
    `incarnation`: which start of this worker it is, counted from 1.

    `cancelled`: for one whose calls take long. `cancelled()` becomes True when nobody waits any more for the run that
    it is called for; it may then stop at once, by raising RunCancelledError or anything else. A look takes 0.1
    microseconds. A worker whose call has not ended a second later is killed.
    """

    options: Mapping[str, Any]
    device: int
    threads: int
    logger: logging.Logger
    trace: Trace = field(default_factory=Trace)
    cancelled: Callable[[], bool] = lambda: False
    incarnation: int = 1
    part: str = ""


@dataclass(frozen=True)
class Unit:
    """What one call of `compile` gets: one claim, or neighbouring claims of a provider with `merge = True`.

    `nodes` are the claimed nodes in topological order, `inputs` the values that arrive in a run (positions fixed),
    `outputs` those that must be returned: what somebody reads (without any, a callable is not called), `constants`
    every constant that a node or body reads, `constant_nodes` the nodes made of constants only that this unit computes
    for itself, once, in `compile` (only with `merge = True`). `optimization` is 'none' (as written), 'basic'
    (bit-equal) or 'all' (within tolerance). `opsets`: domain -> version of the model. `model` is the
    ONNX form of the whole model, for a provider with `wants_model = True`: `unit.model.cut(unit.nodes, unit.inputs,
    unit.outputs)`.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, np.ndarray]
    constant_nodes: tuple[Node, ...] = ()
    optimization: str = "all"
    opsets: Mapping[str, int] = field(default_factory=dict)
    model: OnnxModel | None = field(default=None, repr=False)

    def lowered(self) -> tuple[Node, ...]:
        """The unit's nodes in opset-21 form, in order."""
        return tuple(step for node in self.nodes for step in node.steps())

    def replaced(self, nodes: Sequence[Node], constants: Mapping[str, np.ndarray] | None = None) -> Unit:
        """The unit with these nodes in place of its own, and with these constants beside its own; for `rewrite`."""
        both = ChainMap(dict(constants or {}), self.constants)  # type: ignore[arg-type]  # only read
        return dataclasses.replace(self, nodes=tuple(nodes), constants=MappingProxyType(both))


Run = Callable[[Sequence[Any]], Sequence[Any]]
RunInto = Callable[[Sequence[Any], Sequence[Any]], "Sequence[Any] | None"]
Place = Callable[[int, str, tuple[int, ...]], np.ndarray]


class Program:
    """The optional, faster result of `compile`: a unit that is bound to the places of its values.

    The worker calls `bind` once for each combination of places that occurs and keeps a bounded number of results, so a
    run looks nothing up and outputs are written where their consumers read them.
    """

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        """Prepare for these inputs and return the callable that runs the unit.

        `inputs`: one item per unit input: a read-only array whose address stays while its contents change from run to
        run, or None for an omitted one. Lists, dicts and object arrays (sequences, maps, strings), and what units hand
        each other because of `strided` or `export`, are given as they are in the present run, and the callable must
        take those from its argument instead.
        `place(i, dtype, shape)`: call it now for each output whose dtype and shape are known now, once; it returns the
        writable C-contiguous array that the callable fills. It raises OutOfMemoryError when there is no room.
        The callable gets the inputs of the run (the same arrays) and returns one item per output: None for
        a placed one, else the value.
        """
        raise NotImplementedError


class Provider:
    """Base class of providers. See the page above; class attributes are the options of the contract.

    `capabilities`: what nodes it can be given. `merge`: neighbouring claims come as one unit. `per_signature`:
    `compile`'s callable serves only the shapes it was compiled for, and `compile` is called again, with concrete shapes
    in `unit.inputs`, for each new signature. `wants_model`: `graph.model` and `unit.model` are the ONNX form of what is
    shown.

    `writes_out`: `compile`'s callable is called as `run(inputs, out)`, and writes where its readers look instead of
    being copied. `out[i]` is a writable, C-contiguous, 64-byte aligned array for an output whose shape follows from the
    declared ones, else None. It returns None for each output that it wrote there (or nothing, if that is all of them)
    and the value of the others. A value that comes although there is `out[i]`, which may have a shape that the model
    declares wrongly, is copied as ever.

    `strided`: an array that one unit returns may reach the next one of the same partition as it is: with any strides
    and alignment, not copied, read-only. It must then stay as it is until the partition's next run begins.
    `writable`: inputs are private copies, which it may overwrite.

    `version`: of what `save` writes, which counts only for the same one; may be set in `setup`.
    """

    capabilities: Capabilities = Capabilities()
    merge: bool = False
    per_signature: bool = False
    wants_model: bool = False
    writes_out: bool = False
    strided: bool = False
    writable: bool = False
    version: str = ""

    def setup(self, context: Context) -> None:
        """Called once, before anything else. Raise to refuse to start; the message reaches the user."""

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """Which nodes of `graph` this provider takes. Must not depend on earlier calls."""
        raise NotImplementedError(f"{type(self).__name__} has no method claim(self, graph)")

    def compile(self, unit: Unit) -> Run | RunInto | Program:
        """Make a unit runnable. Raise to take the claim back; the reason reaches the user.

        ClaimBrokenError(reason, nodes=[names of some of its nodes]) takes back just those.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method compile(self, unit)")

    def rewrite(self, unit: Unit) -> Unit:
        """A pass of the provider's own over the unit, before `compile` gets it; not called at optimization 'none'.

        Returns `unit.replaced(nodes, constants)`, or the unit itself; at 'basic' what comes out must be bit-equal.
        Errors go on naming the nodes of the model. Not for a provider with `wants_model`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method rewrite(self, unit)")

    def save(self, compiled: Any) -> bytes | None:
        """What `compile` returned, as bytes for `load` in a later process; None for what is not worth it.

        A provider that defines both has them kept in `$OUTRIDER_CACHE/compiled`, by all that they may depend on: its
        class's file, `version` and options, the unit with its constants, the machine.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method save(self, compiled)")

    def load(self, unit: Unit, state: memoryview) -> Run | RunInto | Program:
        """What `compile` would return. Raise if the state is of no use: it is dropped, and the unit compiled."""
        raise NotImplementedError(f"{type(self).__name__} has no method load(self, unit, state)")

    def export(self, value: Any, out: np.ndarray) -> None:
        """Copy a value of the provider's own into host memory.

        A provider that defines this may return values that are no arrays, such as memory of its device. They need
        `dtype` (an ONNX name or a NumPy dtype) and `shape`. They reach its own units as they are, in whichever
        partition those run, and must stay as they are while the run lasts; what another reads is exported to `out`, a
        writable C-contiguous array of that dtype and shape. What others made, and all of a run that is replayed after
        a crash, arrives in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method export(self, value, out)")

    def unload(self, compiled: Run | RunInto | Program) -> None:
        """A compiled unit will not be called again."""

    def stats(self) -> Mapping[str, Any]:
        """Counters of this provider, plain data, shown under `stats()['providers'][name]`."""
        return {}

    def close(self) -> None:
        """The worker stops. Not called when it is killed."""


class ProviderContractError(OutriderError, RuntimeError):
    """A provider broke its contract: wrong count, dtype, rank or value of outputs, or a claim it may not make."""

    _fields = ("provider", "node", "expected", "got")


class ProviderUnavailableError(OutriderError, RuntimeError):
    """A provider does not start, or may not be used now; `seconds`: for how much longer, None where nobody knows."""

    _fields = ("provider", "reason", "seconds")


class ClaimBrokenError(OutriderError, RuntimeError):
    """A provider claimed nodes and then could not compile them."""

    _fields = ("provider", "nodes", "reason", "remote_traceback")
