"""The search of `claims.py` carried out: questions become models, their builds become answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from outrider.providers.contract import Claim, Decline, Graph, Node, OnnxModel, Value
from outrider.providers.ort.claims import Found, Item, Raised, Search, Taken
from outrider.providers.ort.library import said
from outrider.providers.ort.pieces import LEFT, reads_of
from outrider.providers.ort.sessions import Builder

SECONDS = 30.0  # for the search of one graph
_SMALL = 64  # elements of a constant that execution providers look at: axes, shapes, limits


def claims_of(graph: Graph, builder: Builder, barred: Callable[[Node], str], fallback: bool) -> list[Claim | Decline]:
    """What the execution provider takes of `graph`. `barred`: why a node is not even asked about, '' if it is.

    `fallback`: what onnxruntime's CPU provider takes counts as well.
    """
    reasons = {node.name: barred(node) for node in graph.nodes}
    nodes = [node for node in graph.nodes if not reasons[node.name]]
    found = _searched(graph, nodes, builder, fallback)
    offers: list[Claim | Decline] = [Decline(node, reasons[node.name]) for node in graph.nodes if reasons[node.name]]
    offers += [Claim([nodes[i]]) for i in sorted(found.alone)]
    offers += [Claim([nodes[i] for i in sorted(group)]) for group in found.groups]
    offers += [Decline(nodes[i], reason) for i, reason in found.declined.items()]
    return offers


def _searched(graph: Graph, nodes: Sequence[Node], builder: Builder, fallback: bool) -> Found:
    search = Search(len(nodes), lambda: _items(nodes, graph.constants), LEFT)
    asker = _Asker(graph, nodes, builder, fallback)
    until = monotonic() + SECONDS
    while (question := search.question()) is not None:
        if monotonic() > until:
            return search.stop(f"the search for what the execution provider takes was over after {SECONDS:.0f} s")
        search.answer(asker.ask(question))
    return search.stop(f"the search for what the execution provider takes was over after {search.asked} questions")


class _Asker:
    """Builds sessions of some of `nodes`, by position, and reads out of them who got which."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], builder: Builder, fallback: bool) -> None:
        self._graph = graph
        self._nodes = nodes
        self._builder = builder
        self._all = builder.ep.own_cpu or fallback  # what is built runs, also what went by other names
        self._readers: dict[str, set[str]] = {value.name: {""} for value in graph.outputs}  # value -> names of nodes
        for node in graph.nodes:
            for name in reads_of([node]):
                self._readers.setdefault(name, set()).add(node.name)

    def ask(self, positions: Sequence[int]) -> Taken | Raised:
        nodes = [self._nodes[i] for i in positions]
        inside = {node.name for node in nodes}
        made = {value.name: value for node in nodes for value in node.outputs if value.name}
        constants = self._graph.constants
        inputs = [value for name, value in reads_of(nodes).items() if name not in made and name not in constants]
        outputs = [value for name, value in made.items() if self._readers.get(name, set()) - inside]
        model = self._graph.model
        assert isinstance(model, OnnxModel)
        try:
            built = self._builder.ask(model, nodes, inputs, outputs or list(made.values()))
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime's kinds have no common class
            return Raised(said(error, 160))
        if self._all:
            return Taken(tuple(frozenset([i]) for i in positions))
        mine = self._builder.ep.name
        left = frozenset[str]().union(*(names for ep, names in built.groups if ep != mine))
        position = {node.name: i for node, i in zip(nodes, positions, strict=True) if _has_all(node, left)}
        taken = [names for ep, names in built.groups if ep == mine]
        groups = [frozenset(position[name] for name in names if name in position) for names in taken]
        return Taken(tuple(group for group in groups if group))


def _has_all(node: Node, left: frozenset[str]) -> bool:
    """False where the nodes of its bodies go to another provider."""
    return all(one.name not in left and _has_all(one, left) for _, body in node.bodies() for one in body.nodes)


# Kinds ---------------------------------------------------------------------------------------------------------------
def _items(nodes: Sequence[Node], constants: Mapping[str, np.ndarray]) -> list[Item]:
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for value in (*node.inputs, *node.captures):
            if value.name and value.name not in constants:
                readers.setdefault(value.name, []).append(i)
    return [
        Item(_kind(node, constants), tuple(j for value in node.outputs for j in readers.get(value.name, ())))
        for node in nodes
    ]


def _kind(node: Node, constants: Mapping[str, np.ndarray]) -> Hashable:
    """What an execution provider can tell a node by; nodes with bodies are all different."""
    if any(True for _ in node.bodies()):
        return node.name
    return (
        node.domain,
        node.op_type,
        node.opset,
        tuple(sorted((key, _digest(item)) for key, item in node.attributes.items())),
        tuple(_looks(value, constants) for value in node.inputs),
        tuple((value.dtype, _extents(value)) for value in node.outputs),
    )


def _looks(value: Value, constants: Mapping[str, np.ndarray]) -> Hashable:
    if value.name not in constants:
        return value.dtype, _extents(value), False
    small = math.prod(dim if isinstance(dim, int) else _SMALL + 1 for dim in value.shape or ()) <= _SMALL
    return value.dtype, _extents(value), _digest(constants[value.name]) if small else True


def _extents(value: Value) -> Hashable:
    """Shapes with unknown dims alike, whatever they are called."""
    return None if value.shape is None else tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)


def _digest(item: Any) -> Hashable:
    if isinstance(item, np.ndarray):
        told = repr(item.tolist()).encode() if item.dtype == object else item.tobytes()
        return str(item.dtype), item.shape, hashlib.sha256(told).digest()
    if isinstance(item, (list, tuple)):
        return tuple(_digest(one) for one in item)
    return item if isinstance(item, (int, float, str, bytes)) else repr(item)
