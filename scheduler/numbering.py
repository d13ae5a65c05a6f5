"""Which edge carries which value, and the `Load` entry of each partition.

board 0   the coordinator's: edge START is the start word of a run, CANCEL ends one early; then one edge per model
          input that is read, then one per result that only the caller gets: where it wants it
board n   the worker n's (its index in the fleet + 1): one edge per unit output, one `done` edge per partition
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.providers.wire import messages
from outrider.providers.wire.dtypes import is_tensor, storage_bytes
from outrider.providers.wire.graph import Graph, Node, Value
from outrider.providers.wire.pack import pack_graph
from outrider.scheduler.arena import share_buffers
from outrider.scheduler.collector import collector_paused
from outrider.scheduler.planning import CALLER, Edge, Plan, PlanUnit, UnitInterface
from outrider.scheduler.waves import own_before
from outrider.scheduler.worker import Worker

UNKNOWN_DIM = 64
RANDOM = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
})  # fmt: skip
"""Operators of ai.onnx that draw numbers; Dropout does with a third input, `training_mode`, only."""


@dataclass(frozen=True)
class Blueprint:
    """All that a deployment needs to know: the plan over `graph`, on `workers` (positions are the plan's providers)."""

    graph: Graph
    plan: Plan
    edges: Sequence[Edge]
    interfaces: Sequence[UnitInterface]
    workers: Sequence[Worker]
    optimization: str
    slots: int
    output_memory: int
    spin_us: int

    def nodes_of(self, partition: int) -> list[str]:
        """The names of a partition's nodes."""
        units = self.plan.partitions[partition].units
        return [self.graph.nodes[node].name for unit in units for node in self.plan.units[unit].nodes]


class Numbering:
    """Which edge carries which value."""

    def __init__(self, blueprint: Blueprint) -> None:
        plan, self.interfaces = blueprint.plan, blueprint.interfaces
        self.inputs = {edge.value: i for i, edge in enumerate(_from_caller(blueprint.edges), messages.FIRST_INPUT)}
        self.board_of = [blueprint.workers[partition.provider].index + 1 for partition in plan.partitions]
        self.edges: dict[int, int] = {0: messages.FIRST_INPUT + len(self.inputs)}
        self.values: dict[str, tuple[int, int, int]] = {}  # value -> (partition, board, edge)
        self.done: list[int] = []
        self.targets: dict[str, int] = {}  # see Generation
        for number, partition in enumerate(plan.partitions):
            board = self.board_of[number]
            for unit in partition.units:
                for value in self.interfaces[unit].outputs:
                    self.values[value] = (number, board, self._next(board))
            self.done.append(self._next(board))

    def target(self, value: str) -> int:
        """A new edge of board 0 for the place of a result."""
        edge = self.targets[value] = self._next(0)
        return edge

    def _next(self, board: int) -> int:
        edge = self.edges.get(board, 0)
        self.edges[board] = edge + 1
        return edge


def _from_caller(edges: Sequence[Edge]) -> list[Edge]:
    return [edge for edge in edges if edge.producer == CALLER and edge.consumers]


@collector_paused()
def partition_plans(blueprint: Blueprint, numbering: Numbering) -> list[messages.PartitionPlan]:
    """The `Load` entry of each partition, without its units."""
    plan = blueprint.plan
    crossing = {edge.value: edge for edge in blueprint.edges if edge.producer != CALLER}
    graphs = UnitGraphs(blueprint.graph)
    sizes = {value: _expected_bytes(graphs.values[value]) for value in numbering.values}
    buffers = share_buffers(plan, blueprint.interfaces, blueprint.edges, sizes)
    after = own_before(
        [partition.provider for partition in plan.partitions],
        [(edge.producer, consumer) for edge in crossing.values() for consumer in edge.consumers],
    )
    made: list[messages.PartitionPlan] = []
    for number, partition in enumerate(plan.partitions):
        own = [blueprint.interfaces[unit] for unit in partition.units]
        inside = dict.fromkeys(value for unit in own for value in unit.outputs)
        read = dict.fromkeys(value for unit in own for value in unit.inputs)
        inputs = [_source(numbering, value) for value in read if value not in inside]
        outputs: list[dict[str, Any]] = []
        waiting: set[int] = set()
        # In the order in which they are published. The caller looks as soon as the last partitions are done, and those
        # wait for what they read only: what no other partition reads must be there before what one does.
        for value in sorted(inside, key=lambda value: value in crossing and bool(crossing[value].consumers)):
            edge = crossing.get(value)
            alone = edge is not None and edge.to_caller and not edge.consumers and value not in read
            outputs.append(
                {
                    "name": value,
                    "edge": numbering.values[value][2],
                    "buffer": buffers[value],
                    "result": alone,
                    "target": numbering.target(value) if alone else -1,
                    "published": edge is not None,
                    "inside": value in read,
                }
            )
            waiting.update(edge.consumers if edge is not None else ())
        rings = sorted({numbering.board_of[consumer] for consumer in waiting} - {numbering.board_of[number]})
        made.append(
            messages.PartitionPlan(
                partition=number,
                inputs=inputs or [{"name": "", "board": 0, "edge": messages.START}],
                outputs=outputs,
                units=[],  # packed for those who need them
                rings=rings,
                done=numbering.done[number],
                last=not waiting,
                after=after[number],
            )
        )
    return made


def random_partitions(blueprint: Blueprint) -> frozenset[int]:
    """Partitions with a node, or a body's node, that does not compute the same twice."""
    random = [_is_random(node) for node in blueprint.graph.nodes]
    plan = blueprint.plan
    return frozenset(
        number
        for number, partition in enumerate(plan.partitions)
        if any(random[node] for unit in partition.units for node in plan.units[unit].nodes)
    )


def _is_random(node: Node) -> bool:
    if node.op_type in RANDOM and node.domain in ("", "ai.onnx"):
        return node.op_type != "Dropout" or (len(node.inputs) > 2 and bool(node.inputs[2].name))
    return any(_is_random(inner) for _, body in node.bodies() for inner in body.nodes)


def _source(numbering: Numbering, value: str) -> dict[str, Any]:
    if value in numbering.values:
        _, board, edge = numbering.values[value]
        return {"name": value, "board": board, "edge": edge}
    return {"name": value, "board": 0, "edge": numbering.inputs[value]}


def _expected_bytes(value: Value) -> int:
    """Bytes of a value, to compare with others: dimensions that are not known count as `UNKNOWN_DIM`."""
    if value.shape is None or not is_tensor(value.dtype) or value.dtype == "string":
        return 0
    return storage_bytes(value.dtype, math.prod(dim if isinstance(dim, int) else UNKNOWN_DIM for dim in value.shape))


class UnitGraphs:
    """Cuts units out of the model's graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[str, Value] = {value.name: value for value in graph.inputs}
        for node in graph.nodes:
            self.values.update((value.name, value) for value in node.outputs)

    def cut(self, unit: PlanUnit, interface: UnitInterface) -> Graph:
        """The unit as a graph: its constant nodes, then its nodes, with the constants they read."""
        nodes = tuple(self.graph.nodes[index] for index in (*unit.constant_nodes, *unit.nodes))
        constants: dict[str, Any] = {}
        for node in nodes:
            for step in (node, *node.steps()):
                for value in (*step.inputs, *step.captures):
                    if value.name in self.graph.constants:
                        constants[value.name] = self.graph.constants[value.name]
        return Graph(
            name=self.graph.name,
            nodes=nodes,
            inputs=tuple(self.values[name] for name in interface.inputs),
            outputs=tuple(self.values[name] for name in interface.outputs),
            constants=constants,
            opsets=self.graph.opsets,
        )

    def packed(self, unit: PlanUnit, interface: UnitInterface) -> dict[str, Any]:
        """The unit's graph as it is shipped."""
        return pack_graph(self.cut(unit, interface))
