"""A plan on its workers: what each gets in its `Load` message, at first and when it has died.

A unit that a worker has compiled for this session is not shipped to it again: a new plan costs only what is new in it.
"""

from __future__ import annotations

import concurrent.futures
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.providers.contract import ProviderContractError, ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.providers.wire.declared import PooledDeclarations
from outrider.providers.wire.failures import error_from_plain, text_of
from outrider.providers.wire.graph import Graph
from outrider.providers.wire.spans import Recorder
from outrider.scheduler.closing import closed_error
from outrider.scheduler.dumps import end_late
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.failures import KINDS, under_name
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.generation import Descriptors, Generation, RefusedUnit, WorkerSide
from outrider.scheduler.inplace import Reach
from outrider.scheduler.numbering import Blueprint, Numbering, UnitGraphs, partition_plans, random_partitions
from outrider.scheduler.planning import CALLER
from outrider.scheduler.trace import spanned
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.board import BoardReader, BoardWriter
from outrider.shm.doorbell import Doorbell
from outrider.shm.leases import Leases, callers_half
from outrider.shm.places import Places
from outrider.shm.segment import Segment, create_segment, read_only
from outrider.shm.user import UserMemory, process_memory

POOL_BLOCKS = 1024


class Deployer:
    """Makes generations of one session on a fleet. Not thread-safe: one thread of the session uses it at a time."""

    def __init__(
        self, fleet: Fleet, session: int, weights: Mapping[int, int], slot_bells: Sequence[Doorbell], deadline: float
    ) -> None:
        self.fleet = fleet
        self.session = session
        self.weights = weights  # weight segment -> descriptor
        self.model: dict[str, Any] | None = None  # the ONNX form of the model, for providers that want it
        self.slot_bells = slot_bells
        self.deadline = deadline
        self.recorder: Recorder | None = None  # of the session's trace
        self._generation = 0
        # Of each incarnation: weight segment -> the id of its descriptor there, and the keys of units it has compiled.
        self._weight_ids: weakref.WeakKeyDictionary[Incarnation, dict[int, int]] = weakref.WeakKeyDictionary()
        self._compiled: weakref.WeakKeyDictionary[Incarnation, set[int]] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Incarnation, set[int]] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[Incarnation, int] = weakref.WeakKeyDictionary()  # the generation it has
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._abandoned = False
        self._keys: dict[object, int] = {}  # what a unit is -> its key
        self._graph: Graph | None = None  # that the keys are for

    def weights_for(self, one: Incarnation) -> dict[int, int]:
        """Weight segment -> the id under which an incarnation has, or gets now, its descriptor."""
        ids = self._weight_ids.setdefault(one, {})
        for segment, descriptor in self.weights.items():
            if segment not in ids:
                (ids[segment],) = self._give(one, [descriptor])
        return dict(ids)

    def model_for(self, one: Incarnation) -> dict[str, Any] | None:
        """The ONNX form of the model, if the incarnation's provider wants it."""
        return self.model if one.hello is not None and one.hello.wants_model else None

    def _give(self, one: Incarnation, fds: list[int]) -> list[int]:
        """`Incarnation.send_descriptors`; a worker that cannot be given any is ended if it lives on."""
        try:
            return one.send_descriptors(fds)
        except WorkerDiedError:
            self.fleet.monitor.end_if_deaf(one)
            raise

    @spanned("deploy")
    def deploy(self, blueprint: Blueprint) -> Generation:
        """Load the plan everywhere. `refused` names units that did not compile; such a generation must not run.

        Raises the death of a worker; ProviderUnavailableError for one that is not done by the load deadline, and ended.
        """
        self._generation += 1
        numbering = Numbering(blueprint)
        plans = partition_plans(blueprint, numbering)
        descriptors = Descriptors()
        try:
            for board in (0, *sorted(set(numbering.board_of))):
                descriptors.boards[board] = create_segment(f"outrider-{self.session}-{board}")
            for board in sorted(set(numbering.board_of)):
                descriptors.pools[board] = create_segment(f"outrider-{self.session}-{board}-results")
            generation = self._made(blueprint, numbering, plans, descriptors)
            waiting = [
                (side.serving, self._ask(generation, board, side.serving, held=False))
                for board, side in generation.sides.items()
            ]
            for one, future in waiting:
                generation.refused += self._loaded(generation, one, future)
            return generation
        except BaseException:
            descriptors.close()
            raise

    @spanned("deploy")
    def load_again(self, generation: Generation, board: int, one: Incarnation) -> list[RefusedUnit]:
        """Load a worker's part of a generation into another incarnation, held until `resume`; units that it refuses.

        Raises what `deploy` raises.
        """
        refused = self._loaded(generation, one, self._ask(generation, board, one, held=True))
        if not refused:
            self._held[one] = generation.number
        return refused

    def holds(self, generation: Generation, one: Incarnation) -> bool:
        """Whether an incarnation has loaded its part of this generation, held."""
        return self._held.get(one) == generation.number

    def abandon(self) -> None:
        """Wait for no answer any more: whoever does gets SessionClosedError. For any thread."""
        self._abandoned = True
        for future in list(self._waiting):
            future.cancel()

    def resume(self, generation: Generation, board: int, one: Incarnation, runs: Sequence[tuple[int, int]]) -> None:
        """Have an incarnation that has loaded its part go on where the dead one stopped. `runs`: (slot, run) in flight.

        Raises the death of the worker, OutOfMemoryError, and ProviderUnavailableError as `deploy`.
        """
        left = generation.left(board, runs)
        resume = messages.Resume(
            session=self.session,
            generation=generation.number,
            first=left.first,
            end=left.end,
            keep=[list(one) for one in left.keep],
            taken=[list(one) for one in left.taken],
        )
        key = ("Resumed", self.session, generation.number)
        answer = self._answer(one, self.fleet.monitor.request(one, resume, key), "take over its part of the model")
        if answer.error is not None:
            known = error_from_plain(answer.error, KINDS)
            if known is not None:
                raise under_name(known, one.worker.name)
            raise ProviderUnavailableError(
                f"worker {one.worker.name} could not take over: {answer.error.get('message')}",
                provider=one.worker.name,
                reason=str(answer.error.get("message")),
            )

    def _ask(
        self, generation: Generation, board: int, one: Incarnation, held: bool
    ) -> concurrent.futures.Future[messages.Loaded]:
        load = self._message(generation, board, one, held)
        self._before[one] = self._compiled.pop(one, set())  # until it has answered nobody knows what it has
        return self.fleet.monitor.request(one, load, ("Loaded", self.session, generation.number))

    def _loaded(
        self, generation: Generation, one: Incarnation, future: concurrent.futures.Future[messages.Loaded]
    ) -> list[RefusedUnit]:
        """Wait for the answer to a `Load`: what was refused."""
        loaded = self._answer(one, future, "load its part of the model")
        refused = [self._refusal(generation, one, told) for told in loaded.refused]
        without = {(told.partition, told.unit) for told in refused}
        made = {
            key
            for partition in generation.partitions_of[one.worker.index + 1]
            for unit, key in enumerate(self._unit_keys(generation.blueprint, partition))
            if (partition, unit) not in without
        }
        # A worker drops what is not in a plan that it has loaded, and nothing for one that it refused.
        self._compiled[one] = made | (self._before.get(one, set()) if refused else set())
        return refused

    def _refusal(self, generation: Generation, one: Incarnation, told: Mapping[str, Any]) -> RefusedUnit:
        """One entry of `Loaded.refused`.

        Raises ProviderUnavailableError if it says that nothing could be loaded, ProviderContractError for a unit that
        the worker was not given; then it is ended.
        """
        name, reason = one.worker.name, text_of(told.get("reason"))
        partition: Any = told.get("partition")
        unit: Any = told.get("unit")
        if partition == -1:
            raise ProviderUnavailableError(
                f"provider {name} could not load its part of the model: {reason}", provider=name, reason=reason
            )
        own = type(partition) is int and partition in generation.partitions_of[one.worker.index + 1]
        units = len(generation.blueprint.plan.partitions[partition].units) if own else 0
        if type(unit) is not int or not 0 <= unit < units:
            got = f"partition {partition!r:.60}, unit {unit!r:.60}"
            self.fleet.monitor.kill(one, f"it broke the protocol: it refused what it was not given ({got})")
            raise ProviderContractError(
                f"provider {name} broke its contract and was ended: it refused a unit that it was not given ({got})",
                provider=name,
                expected="units of its own partitions",
                got=got,
            )
        plan, nodes = generation.blueprint.plan, generation.blueprint.graph.nodes
        names = {nodes[i].name for i in plan.units[plan.partitions[partition].units[unit]].nodes}
        blamed: Any = told.get("nodes")
        told_names = blamed if isinstance(blamed, list) else []
        own_names = [name for name in told_names if isinstance(name, str) and name in names]
        return RefusedUnit(partition, unit, tuple(own_names), reason, text_of(told.get("traceback")))

    def _answer(self, one: Incarnation, future: concurrent.futures.Future[Any], what: str) -> Any:
        self._waiting.add(future)
        try:
            if self._abandoned:
                future.cancel()
            return future.result(one.worker.patience(self.deadline))
        except concurrent.futures.CancelledError as error:
            raise closed_error("session", "the session was closed") from error
        except TimeoutError as error:
            reason = f"it did not {what} within {self.deadline:g} s"
            raise end_late(self.fleet.monitor, one, reason, self.session) from error
        finally:
            self._waiting.discard(future)

    def _unit_keys(self, blueprint: Blueprint, partition: int) -> list[int]:
        """The keys of a partition's units: equal ones mean the same unit, in whatever plan of this session."""
        if blueprint.graph is not self._graph:  # calls were inlined; nothing has been loaded yet
            self._graph = blueprint.graph
            self._keys.clear()
            self._compiled.clear()
        keys = []
        for unit in blueprint.plan.partitions[partition].units:
            planned, interface = blueprint.plan.units[unit], blueprint.interfaces[unit]
            what = planned.nodes, planned.constant_nodes, interface.inputs, interface.outputs
            keys.append(self._keys.setdefault(what, len(self._keys)))
        return keys

    def _made(
        self,
        blueprint: Blueprint,
        numbering: Numbering,
        plans: Sequence[messages.PartitionPlan],
        descriptors: Descriptors,
    ) -> Generation:
        """The coordinator's side of a generation, before anything is loaded."""
        workers = {worker.index + 1: worker for worker in blueprint.workers}
        slots, used = blueprint.slots, sorted(descriptors.pools)
        segment = Segment(descriptors.boards[0], writable=True)
        board = BoardWriter(segment, numbering.edges[0], slots, self._generation)
        places = Places(segment, board, numbering.edges[0], slots)
        user = process_memory()
        known = UnitGraphs(blueprint.graph).values
        results = [(numbering.board_of[p.partition], o["edge"]) for p in plans for o in p.outputs if o["result"]]
        sides: dict[int, WorkerSide] = {}
        released: dict[int, int] = {}
        for one in used:
            released[one] = places.reserve(8 * POOL_BLOCKS, "words of the output pool") // 8
            pool = Segment(descriptors.pools[one], writable=True)
            shared = read_only(descriptors.boards[one])
            try:
                mapped = Segment(shared, writable=False)
            finally:
                os.close(shared)
            declared = PooledDeclarations(
                {edge: known[name] for name, (_, where, edge) in numbering.values.items() if where == one},
                {edge for where, edge in results if where == one},
                callers_half(pool),
            )
            edges = numbering.edges[one]
            reader = BoardReader(mapped, edges, slots, self._generation, {one: pool}, declared.misfit)
            leases = Leases(pool, segment.words, released[one], POOL_BLOCKS)
            arrays = UserMemory(pool, callers_half(pool))
            sides[one] = WorkerSide(workers[one], workers[one].current, reader, declared, pool, leases, arrays)
        return Generation(
            number=self._generation,
            blueprint=blueprint,
            numbering=numbering,
            plans=plans,
            descriptors=descriptors,
            released=released,
            board=board,
            places=places,
            sides=sides,
            inputs=numbering.inputs,
            targets=numbering.targets,
            user=user,
            reach=Reach({messages.USER_MEMORY: user.segment, **{one: side.pool for one, side in sides.items()}}),
            outputs={
                edge.value: numbering.values[edge.value][1:]
                for edge in blueprint.edges
                if edge.to_caller and edge.producer != CALLER
            },
            results=results,
            dones=[(numbering.board_of[plan.partition], plan.done) for plan in plans],
            lasts=[(numbering.board_of[plan.partition], plan.done) for plan in plans if plan.last],
            first_bells=[
                workers[one].bell
                for one in used
                if any(i["board"] == 0 for p in plans if numbering.board_of[p.partition] == one for i in p.inputs)
            ],
            partition_nodes=[blueprint.nodes_of(number) for number in range(len(plans))],
            leases=tuple(side.leases for side in sides.values()),
            random=random_partitions(blueprint),
            partitions_of={one: {n for n, board in enumerate(numbering.board_of) if board == one} for one in used},
        )

    def _partitions(
        self, generation: Generation, mine: Sequence[messages.PartitionPlan], one: Incarnation
    ) -> list[dict[str, Any]]:
        """A worker's partitions as they are shipped to an incarnation."""
        blueprint, known = generation.blueprint, self._compiled.get(one, set())
        graphs: UnitGraphs | None = None
        made = []
        for plan in mine:
            units = []
            keys = self._unit_keys(blueprint, plan.partition)
            for unit, key in zip(blueprint.plan.partitions[plan.partition].units, keys, strict=True):
                planned, shipped = blueprint.plan.units[unit], None
                if key not in known:
                    graphs = graphs or UnitGraphs(blueprint.graph)
                    shipped = graphs.packed(planned, blueprint.interfaces[unit])
                units.append({"key": key, "graph": shipped, "constants": len(planned.constant_nodes)})
            made.append({**vars(plan), "units": units})
        return made

    def _message(self, generation: Generation, own: int, one: Incarnation, held: bool) -> messages.Load:
        blueprint, numbering = generation.blueprint, generation.numbering
        boards_of, pools = generation.descriptors.boards, generation.descriptors.pools
        mine = [plan for plan in generation.plans if numbering.board_of[plan.partition] == own]
        boards = sorted({0, own, *(entry["board"] for plan in mine for entry in plan.inputs)})
        bells = sorted({board for plan in mine for board in plan.rings})
        by_board = {worker.index + 1: worker for worker in blueprint.workers}
        memories = {}  # a worker that reads model inputs reads them wherever they may lie
        if any(entry["board"] == 0 for plan in mine for entry in plan.inputs):
            memories = {messages.USER_MEMORY: generation.user.descriptor, **pools}
            del memories[own]  # which it has, and writes
        others = [boards_of[board] for board in boards if board != own]
        reopened = [read_only(fd) for fd in (*others, *memories.values())]
        try:
            shared = iter(reopened)
            segments = [boards_of[own] if board == own else next(shared) for board in boards]
            fds = [
                *segments,
                *shared,
                *(by_board[board].bell.fileno() for board in bells),
                *(bell.fileno() for bell in self.slot_bells),
                pools[own],
            ]
            ids = iter(self._give(one, fds))
        finally:
            for fd in reopened:
                os.close(fd)
        return messages.Load(
            session=self.session,
            generation=generation.number,
            held=held,
            slots=blueprint.slots,
            own=own,
            optimization=blueprint.optimization,
            weights=self.weights_for(one),
            model=self.model_for(one),
            boards=[{"board": board, "segment": next(ids), "edges": numbering.edges[board]} for board in boards],
            memories=[{"memory": memory, "segment": next(ids)} for memory in memories],
            bells={board: next(ids) for board in bells},
            slot_bells=[next(ids) for _ in self.slot_bells],
            spin_us=blueprint.spin_us,
            pool=next(ids),
            pool_words=generation.released[own],
            pool_blocks=POOL_BLOCKS,
            pool_bytes=blueprint.output_memory,
            partitions=self._partitions(generation, mine, one),
        )

    def unload(self, workers: Sequence[Worker]) -> None:
        """Have the workers forget the session; does not wait for those that are gone."""
        for worker in workers:
            self.fleet.monitor.post(worker, messages.Unload(self.session))
