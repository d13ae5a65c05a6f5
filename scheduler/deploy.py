"""A plan on its workers: one generation of boards, segments, pools and doorbells, and each worker's `Load` message.

    board 0   the coordinator's: edge 0 is the start word of a run, edge 1 the word that cancels it, then one edge per
              model input that is read, then one per result that only the caller gets: where it wants it
    board n   the worker n's (its index in the fleet + 1): one edge per unit output, one `done` edge per partition

A generation is made whole and dropped whole: when a worker has died, the next run gets a new one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.providers.contract import ProviderContractError, ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.providers.wire.declared import Declarations, PooledDeclarations
from outrider.providers.wire.dtypes import BY_NUMBER, is_tensor, numpy_dtype, storage_bytes
from outrider.providers.wire.failures import text_of
from outrider.providers.wire.graph import Graph, Value
from outrider.providers.wire.pack import pack_graph
from outrider.providers.wire.spans import Recorder
from outrider.scheduler.arena import share_buffers
from outrider.scheduler.collector import collector_paused
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.inplace import Reach
from outrider.scheduler.planning import CALLER, Edge, Plan, PlanUnit, UnitInterface
from outrider.scheduler.trace import spanned
from outrider.scheduler.waves import own_before
from outrider.scheduler.worker import Worker
from outrider.shm.board import BoardReader, BoardWriter, Layout
from outrider.shm.doorbell import Doorbell
from outrider.shm.leases import Leases, callers_half
from outrider.shm.places import Places
from outrider.shm.segment import Segment, create_segment, read_only
from outrider.shm.user import ProcessMemory, UserMemory, process_memory

POOL_BLOCKS = 1024
UNKNOWN_DIM = 64


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


@dataclass
class WorkerSide:
    """What the coordinator reads of one worker: its board, its output pool."""

    worker: Worker
    incarnation: int
    reader: BoardReader
    declared: Declarations  # of its edges
    pool: Segment
    leases: Leases
    arrays: UserMemory  # the caller's half of the pool


@dataclass
class Generation:
    """One loaded generation, ready for runs."""

    number: int
    board: BoardWriter
    places: Places
    sides: dict[int, WorkerSide]  # by board
    inputs: dict[str, int]  # model input -> edge of board 0
    targets: dict[str, int]  # model output that only the caller gets -> the edge of board 0 that says where it wants it
    user: ProcessMemory
    reach: Reach
    outputs: dict[str, tuple[int, int]]  # model output -> (board, edge)
    results: list[tuple[int, int]]  # every edge that may hold a block of an output pool
    dones: list[tuple[int, int]]  # (board, done edge) of each partition
    lasts: list[tuple[int, int]]  # those of the partitions nobody waits for
    first_bells: list[Doorbell]
    partition_nodes: list[list[str]]
    partitions_of: dict[int, set[int]]  # board -> its partitions
    edges_of: list[list[int]]  # partition -> the edges of its board whose words it writes, but for its done edge
    leases: tuple[Leases, ...]  # of all output pools
    refused: list[tuple[int, int, str, str]] = field(default_factory=list)  # (partition, unit, reason, traceback)

    def sweep(self) -> None:
        """Take back the memory of arrays that the caller has dropped."""
        self.user.sweep()
        for side in self.sides.values():
            side.arrays.sweep()

    def result(self, board: int, layout: Layout) -> np.ndarray[Any, Any]:
        """The array that a layout of a worker's board describes; its contents change with each run."""
        dtype = numpy_dtype(BY_NUMBER[layout.dtype])
        return self.sides[board].reader.memory_of(layout).array(layout.offset, dtype, layout.shape)


class _Numbering:
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
def partition_plans(blueprint: Blueprint, numbering: _Numbering, graphs: UnitGraphs) -> list[messages.PartitionPlan]:
    """The `Load` entry of each partition."""
    plan = blueprint.plan
    crossing = {edge.value: edge for edge in blueprint.edges if edge.producer != CALLER}
    sizes = {value: _expected_bytes(graphs.values[value]) for value in numbering.values}
    buffers = share_buffers(plan, blueprint.interfaces, blueprint.edges, sizes)
    after = own_before(
        [partition.provider for partition in plan.partitions],
        [(edge.producer, consumer) for edge in crossing.values() for consumer in edge.consumers],
    )
    made: list[messages.PartitionPlan] = []
    for number, partition in enumerate(plan.partitions):
        own = [blueprint.interfaces[unit] for unit in partition.units]
        inside = {value for unit in own for value in unit.outputs}
        read = dict.fromkeys(value for unit in own for value in unit.inputs)
        inputs = [_source(numbering, value) for value in read if value not in inside]
        outputs: list[dict[str, Any]] = []
        waiting: set[int] = set()
        for value in inside:
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
                units=[graphs.packed(plan.units[unit], blueprint.interfaces[unit]) for unit in partition.units],
                rings=rings,
                done=numbering.done[number],
                last=not waiting,
                after=after[number],
            )
        )
    return made


def _source(numbering: _Numbering, value: str) -> dict[str, Any]:
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
        """The unit as an entry of `PartitionPlan.units`."""
        return {"graph": pack_graph(self.cut(unit, interface)), "constants": len(unit.constant_nodes)}


class Deployer:
    """Makes generations of one session on a fleet. Not thread-safe: the session calls it with no run in flight."""

    def __init__(
        self, fleet: Fleet, session: int, weights: Mapping[int, int], slot_bells: Sequence[Doorbell], deadline: float
    ) -> None:
        self.fleet = fleet
        self.session = session
        self.weights = weights  # weight segment -> descriptor
        self.slot_bells = slot_bells
        self.deadline = deadline
        self.recorder: Recorder | None = None  # of the session's trace
        self._generation = 0
        self._weight_ids: dict[tuple[int, int, int], int] = {}  # (worker, incarnation, segment) -> descriptor id

    def weights_for(self, worker: Worker) -> dict[int, int]:
        """Weight segment -> the id under which the worker's present incarnation has, or gets now, its descriptor."""
        ids: dict[int, int] = {}
        for segment, descriptor in self.weights.items():
            key = (worker.index, worker.incarnation, segment)
            if key not in self._weight_ids:
                (self._weight_ids[key],) = worker.current.send_descriptors([descriptor])
            ids[segment] = self._weight_ids[key]
        return ids

    @spanned("deploy")
    def deploy(self, blueprint: Blueprint) -> Generation:
        """Load the plan everywhere. `refused` names units that did not compile; such a generation must not run.

        Raises the death of a worker; ProviderUnavailableError for one that is not done by the load deadline, and ended.
        """
        self._generation += 1
        numbering = _Numbering(blueprint)
        graphs = UnitGraphs(blueprint.graph)
        plans = partition_plans(blueprint, numbering, graphs)
        slots = blueprint.slots
        workers = {worker.index + 1: worker for worker in blueprint.workers}
        used = sorted(set(numbering.board_of))
        writable: dict[int, int] = {}
        pools: dict[int, int] = {}
        try:
            for board in (0, *used):
                writable[board] = create_segment(f"outrider-{self.session}-{board}")
            for board in used:
                pools[board] = create_segment(f"outrider-{self.session}-{board}-results")
            return self._load(blueprint, numbering, graphs, plans, workers, used, writable, pools, slots)
        finally:
            for fd in (*writable.values(), *pools.values()):
                os.close(fd)

    def _load(
        self,
        blueprint: Blueprint,
        numbering: _Numbering,
        graphs: UnitGraphs,
        plans: Sequence[messages.PartitionPlan],
        workers: dict[int, Worker],
        used: Sequence[int],
        writable: dict[int, int],
        pools: dict[int, int],
        slots: int,
    ) -> Generation:
        segment = Segment(writable[0], writable=True)
        board = BoardWriter(segment, numbering.edges[0], slots, self._generation)
        places = Places(segment, board, numbering.edges[0], slots)
        user = process_memory()
        sides: dict[int, WorkerSide] = {}
        waiting = []
        for one in used:
            mine = [plan for number, plan in enumerate(plans) if numbering.board_of[number] == one]
            released = places.reserve(8 * POOL_BLOCKS, "words of the output pool") // 8
            pool = Segment(pools[one], writable=True)
            shared = read_only(writable[one])
            try:
                mapped = Segment(shared, writable=False)
            finally:
                os.close(shared)
            declared = PooledDeclarations(
                {edge: graphs.values[name] for name, (_, board, edge) in numbering.values.items() if board == one},
                {output["edge"] for plan in mine for output in plan.outputs if output["result"]},
                callers_half(pool),
            )
            edges = numbering.edges[one]
            reader = BoardReader(mapped, edges, slots, self._generation, {one: pool}, declared.misfit)
            leases = Leases(pool, segment.words, released, POOL_BLOCKS)
            arrays = UserMemory(pool, callers_half(pool))
            sides[one] = WorkerSide(workers[one], workers[one].incarnation, reader, declared, pool, leases, arrays)
            load = self._message(workers[one], one, mine, numbering, blueprint, writable, pools, user, released)
            key = ("Loaded", self.session, self._generation)
            waiting.append((one, self.fleet.monitor.request(workers[one], load, key)))
        returned = [edge.value for edge in blueprint.edges if edge.to_caller and edge.producer != CALLER]
        generation = Generation(
            number=self._generation,
            board=board,
            places=places,
            sides=sides,
            inputs=numbering.inputs,
            targets=numbering.targets,
            user=user,
            reach=Reach({messages.USER_MEMORY: user.segment, **{one: side.pool for one, side in sides.items()}}),
            outputs={name: numbering.values[name][1:] for name in returned},
            results=[(numbering.board_of[p.partition], o["edge"]) for p in plans for o in p.outputs if o["result"]],
            dones=[(numbering.board_of[plan.partition], plan.done) for plan in plans],
            lasts=[(numbering.board_of[plan.partition], plan.done) for plan in plans if plan.last],
            first_bells=[
                workers[one].bell
                for one in used
                if any(i["board"] == 0 for p in plans if numbering.board_of[p.partition] == one for i in p.inputs)
            ],
            partition_nodes=[
                [blueprint.graph.nodes[n].name for unit in partition.units for n in blueprint.plan.units[unit].nodes]
                for partition in blueprint.plan.partitions
            ],
            leases=tuple(side.leases for side in sides.values()),
            edges_of=[[output["edge"] for output in plan.outputs if output["published"]] for plan in plans],
            partitions_of={one: {n for n, board in enumerate(numbering.board_of) if board == one} for one in used},
        )
        for one, future in waiting:
            try:
                loaded = future.result(self.deadline)
            except TimeoutError as error:
                self.fleet.monitor.kill(workers[one])
                name, reason = workers[one].name, f"it did not load its part of the model within {self.deadline:g} s"
                raise ProviderUnavailableError(
                    f"provider {name} was ended: {reason}", provider=name, reason=reason
                ) from error
            generation.refused += self._refused(workers[one], loaded, plans, generation.partitions_of[one])
        return generation

    def _refused(
        self, worker: Worker, loaded: messages.Loaded, plans: Sequence[messages.PartitionPlan], own: set[int]
    ) -> list[tuple[int, int, str, str]]:
        """What a worker refused, as `Generation.refused`.

        Raises ProviderUnavailableError if it could not load anything, ProviderContractError for an answer that it may
        not give; then it is ended.
        """
        made: list[tuple[int, int, str, str]] = []
        for one in loaded.refused:
            partition: Any = one.get("partition")
            unit: Any = one.get("unit")
            reason = text_of(one.get("reason"))
            if partition == -1:
                raise ProviderUnavailableError(
                    f"provider {worker.name} could not load its part of the model: {reason}",
                    provider=worker.name,
                    reason=reason,
                )
            known = type(partition) is int and partition in own and type(unit) is int
            if not known or not 0 <= unit < len(plans[partition].units):
                got = f"partition {partition!r:.60}, unit {unit!r:.60}"
                self.fleet.monitor.kill(worker, f"it broke the protocol: it refused what it was not given ({got})")
                raise ProviderContractError(
                    f"provider {worker.name} broke its contract: it refused a unit that it was not given; it was ended",
                    provider=worker.name,
                    expected="units of its own partitions",
                    got=got,
                )
            made.append((partition, unit, reason, text_of(one.get("traceback"))))
        return made

    def _message(
        self,
        worker: Worker,
        own: int,
        mine: Sequence[messages.PartitionPlan],
        numbering: _Numbering,
        blueprint: Blueprint,
        writable: dict[int, int],
        pools: dict[int, int],
        user: ProcessMemory,
        released: int,
    ) -> messages.Load:
        boards = sorted({0, own, *(entry["board"] for plan in mine for entry in plan.inputs)})
        bells = sorted({board for plan in mine for board in plan.rings})
        by_board = {one.index + 1: one for one in blueprint.workers}
        memories = {}  # a worker that reads model inputs reads them wherever they may lie
        if any(entry["board"] == 0 for plan in mine for entry in plan.inputs):
            memories = {messages.USER_MEMORY: user.descriptor, **pools}
            del memories[own]  # which it has, and writes
        others = [writable[board] for board in boards if board != own]
        reopened = [read_only(fd) for fd in (*others, *memories.values())]
        try:
            shared = iter(reopened)
            segments = [writable[own] if board == own else next(shared) for board in boards]
            fds = [
                *segments,
                *shared,
                *(by_board[board].bell.fileno() for board in bells),
                *(bell.fileno() for bell in self.slot_bells),
                pools[own],
            ]
            ids = iter(worker.current.send_descriptors(fds))
        finally:
            for fd in reopened:
                os.close(fd)
        return messages.Load(
            session=self.session,
            generation=self._generation,
            slots=blueprint.slots,
            own=own,
            optimization=blueprint.optimization,
            weights=self.weights_for(worker),
            boards=[{"board": board, "segment": next(ids), "edges": numbering.edges[board]} for board in boards],
            memories=[{"memory": memory, "segment": next(ids)} for memory in memories],
            bells={board: next(ids) for board in bells},
            slot_bells=[next(ids) for _ in self.slot_bells],
            spin_us=blueprint.spin_us,
            pool=next(ids),
            pool_words=released,
            pool_blocks=POOL_BLOCKS,
            pool_bytes=blueprint.output_memory,
            partitions=[vars(plan) for plan in mine],
        )

    def unload(self, workers: Sequence[Worker]) -> None:
        """Have the workers forget the session; does not wait for those that are gone."""
        for worker in workers:
            self.fleet.monitor.post(worker, messages.Unload(self.session))
