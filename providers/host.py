"""A session inside a worker: its partitions, and the loop that runs those whose inputs have arrived.

The word of every input edge carries the run it belongs to. A partition of a slot is ready when all its input words
carry the same run, newer than the last one it served; it runs its units in order, publishes the words of its outputs,
then its `done` word, and rings whoever waits. A void input, or a failure, makes it publish void instead, so every run
drains.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from outrider.providers.adapters import NotInPlaceError
from outrider.providers.binding import BoundUnit, Counters, OutputPort
from outrider.providers.constants import Constants
from outrider.providers.contract import ClaimBrokenError, Provider
from outrider.providers.inputs import InputPort
from outrider.providers.lanes import Lane, LaneGroup, Present, serve_ready
from outrider.providers.programs import Compiled, Programs
from outrider.providers.resident import Resident
from outrider.providers.steady import Block, Call, Outcome, Steady
from outrider.providers.targets import Targets
from outrider.providers.tracing import repeated, run_unit, written
from outrider.providers.traits import Traits
from outrider.providers.wire.declared import Declarations
from outrider.providers.wire.errors import RunCancelledError
from outrider.providers.wire.failures import error_to_plain, fail
from outrider.providers.wire.graph import OMITTED
from outrider.providers.wire.messages import CANCEL, START, Failed, Load, Message, PartitionPlan, Resume, plan_of
from outrider.providers.wire.spans import Args, Recorder, Trace
from outrider.shm.board import (
    STRONG_ORDER,
    VOID,
    BoardReader,
    BoardWriter,
    arena_start,
    number_of,
    run_of,
)
from outrider.shm.doorbell import Doorbell
from outrider.shm.leases import PoolWriter, callers_half
from outrider.shm.places import Places
from outrider.shm.progress import LOAD, RUN, STEP, WHAT, ProgressWriter, what
from outrider.shm.segment import Segment
from outrider.shm.spin import Spin

log = logging.getLogger("outrider.worker")


class Partition:
    """Units dispatched together. Inputs and outputs are edges; values between its units stay in this worker."""

    def __init__(
        self, plan: PartitionPlan, inputs: Sequence[InputPort], units: Sequence[BoundUnit], targets: Targets
    ) -> None:
        self.number = plan.partition
        self.targets = targets
        self.inputs = tuple(inputs)
        self.units = tuple(units)
        self.outputs = tuple((output["name"], output["edge"]) for output in plan.outputs if output["published"])
        self.done = plan.done

    def run(
        self, slot: int, recorder: Recorder | None, cancelled: Callable[[], bool], doing: memoryview
    ) -> Outcome | None:
        """Run the units; None when an input is void. `recorder`: for their spans.

        `cancelled`: asked between two units; RunCancelledError if it says so. `doing`: the progress record.
        """
        known: dict[str, Any] = {"": None}
        loose: set[str] = set()  # of these values, those that have no place
        read: list[tuple[BoardReader, int, int]] = []
        calls: list[Call] | None = []
        stamps: list[tuple[int, int]] = []
        blocks: list[Block] = []
        for port in self.inputs:
            number = number_of(port.reader.word(port.edge, slot))
            if number == VOID:
                return None
            read.append((port.reader, port.edge, number))
            if port.name:
                kept = None if port.resident is None else port.resident.take(port.edge, slot)
                if kept is not None:
                    loose.add(port.name)
                known[port.name] = port.value(slot, number) if kept is None else kept
        targets = self.targets.of(slot, read)
        numbers: dict[str, int] = {}
        for position, unit in enumerate(self.units):
            if position:
                if cancelled():
                    raise RunCancelledError("the run was cancelled between two units", reason="cancelled")
                doing[STEP] = position
            arguments = [known[value.name] for value in unit.unit.inputs]
            free = [i for i, value in enumerate(unit.unit.inputs) if value.name in loose] if loose else ()
            try:
                if recorder is None:
                    results = unit.run(slot, arguments, targets, free)
                else:
                    results = run_unit(recorder, unit, slot, arguments, targets, free)
            except (Exception, SystemExit) as error:  # a provider may raise anything
                fail(unit.unit.nodes, unit.unit.inputs, arguments, error)
            binding = unit.repeatable()
            if unit.loose:
                loose.update(unit.outputs[i].name for i in unit.loose)
            if binding is None or not all(map(_stays, arguments)):
                calls = None
            elif calls is not None:
                run = binding.run
                if recorder is not None:
                    run = repeated(recorder, unit.unit, written(unit, results), run)
                calls.append((unit.unit, run, arguments))
                stamps += binding.stamps
                blocks += binding.blocks
            for port_out, (number, value) in zip(unit.outputs, results, strict=True):
                known[port_out.name] = value
                numbers[port_out.name] = number
        if len(self.units) > 1:
            doing[STEP] = 0
        return Outcome([(edge, numbers[name]) for name, edge in self.outputs], read, calls, stamps, blocks)


def _stays(argument: Any) -> bool:
    """True for what is at the same place in each run under this layout."""
    return argument is None or (type(argument) is np.ndarray and argument.dtype != object)


@dataclass(frozen=True)
class Services:
    """What a session uses of its worker. `take`: the descriptor behind an id; `send`: to the coordinator."""

    provider: Provider
    traits: Traits
    name: str
    take: Callable[[int], int]
    send: Callable[[Message], None]
    trace: Trace
    progress: ProgressWriter
    present: Present


class LoadedSession:
    """What `Load` makes of a message: the programs of its partitions, and after `attach` their lanes.

    `refused` lists the units that did not compile; then nothing runs.
    """

    def __init__(self, message: Load, services: Services, programs: Programs, constants: Constants) -> None:
        self.session = message.session
        self.generation = message.generation
        self.provider = services.provider
        self.traits = services.traits
        self.provider_name = services.name
        self.counters = Counters()
        self.refused: list[dict[str, Any]] = []
        self.spin = Spin(message.spin_us)
        self.groups: list[LaneGroup] = []
        self.keys: set[int] = set()
        self._message = message
        self._send = services.send
        self._trace = services.trace
        self._recorder = services.trace.recorder
        self._progress = services.progress
        self._doing = services.progress.words
        self._present = services.present
        self._cancelled = services.present.cancelled
        self._places: Places | None = None
        take, own = services.take, message.own
        self._own_pool = _mapped(take(message.pool), writable=True)
        self._memories = {one["memory"]: _mapped(take(one["segment"]), writable=False) for one in message.memories}
        self._memories[own] = self._own_pool
        self._segments = {
            one["board"]: _mapped(take(one["segment"]), writable=one["board"] == own) for one in message.boards
        }
        self._bells = {board: Doorbell(take(fd)) for board, fd in message.bells.items()}
        self._slot_bells = [Doorbell(take(fd)) for fd in message.slot_bells]
        self._lanes: dict[tuple[int, int], Lane] = {}  # (partition, slot)
        self._plans = [plan_of(body) for body in message.partitions]
        self._compiled = [self._compile(plan, programs, constants) for plan in self._plans]
        own_inputs = (one["edge"] for plan in self._plans for one in plan.inputs if one["board"] == own)
        self._resident = Resident(Counter(own_inputs))

    def _compile(self, plan: PartitionPlan, programs: Programs, constants: Constants) -> list[Compiled]:
        compiled: list[Compiled] = []
        for index, body in enumerate(plan.units):
            self._progress.begin(LOAD, self.session, plan.partition, index)
            try:
                made = programs.get(body, constants, self._message.optimization, self._recorder, plan.partition)
            except (Exception, SystemExit) as error:  # a provider may raise anything: the refusal carries its story
                plain = error_to_plain(error)
                told = error.nodes if isinstance(error, ClaimBrokenError) else None
                nodes = [one for one in told if isinstance(one, str)] if isinstance(told, (list, tuple)) else []
                self.refused.append(
                    {
                        "partition": plan.partition,
                        "unit": index,
                        "nodes": nodes,
                        "reason": plain["message"] if nodes else f"{plain['type']}: {plain['message']}",
                        "traceback": plain["traceback"],
                    }
                )
                continue
            self.keys.add(body["key"])
            compiled.append(made)
        return compiled

    def attach(self, resume: Resume | None = None, successor: int = 0) -> None:
        """Take up the pen: make the lanes, and serve what is not done.

        `resume`: what the dead predecessor of this worker left, which it must leave alone; `successor`: see
        `BoardWriter`. Raises OutOfMemoryError.
        """
        message = self._message
        slots, own, segment = message.slots, message.own, self._segments[message.own]
        edges = {entry["board"]: entry["edges"] for entry in message.boards}
        buffers = {output["edge"]: output["buffer"] for plan in self._plans for output in plan.outputs}
        region = None
        if resume is not None:
            region = resume.first, resume.end
            _give_up(segment, arena_start(edges[own], slots), segment.nbytes, resume.keep)
            _give_up(self._own_pool, 0, callers_half(self._own_pool), [taken[1:3] for taken in resume.taken])
        self._board = BoardWriter(segment, edges[own], slots, message.generation, successor)
        places = Places(segment, self._board, edges[own], slots, buffers, region)
        # Its own board too: a partition may read what an earlier one of the same worker wrote.
        declared = {board: Declarations() for board in self._segments}
        readers = {
            board: BoardReader(
                one,
                edges[board],
                slots,
                message.generation,
                self._memories if board == 0 else None,
                declared[board].misfit,
            )
            for board, one in self._segments.items()
        }
        self._pool = PoolWriter(
            self._own_pool,
            readers[0].segment.words,
            message.pool_words,
            message.pool_blocks,
            limit=message.pool_bytes,
            memory=own,
            taken=[] if resume is None else [(one[0], one[1], one[2], one[3]) for one in resume.taken],
        )
        self._places = places
        caller = readers[0]
        groups = [
            LaneGroup(caller.words, caller.index(START, slot), caller.index(CANCEL, slot)) for slot in range(slots)
        ]
        for plan, compiled in zip(self._plans, self._compiled, strict=True):
            partition = self._partition(plan, compiled, readers, declared, places)
            for slot, group in enumerate(groups):
                bells = [self._bells[board] for board in plan.rings] + ([self._slot_bells[slot]] if plan.last else [])
                doing = what(RUN, self.session, slot, plan.partition)
                lane = self._lanes[plan.partition, slot] = Lane(partition, slot, bells, doing)
                lane.last = run_of(readers[own].word(plan.done, slot))
                group.add(lane, self._lanes.get((plan.after, slot)))
        for group in groups:
            group.resume()
        self.groups = groups
        if resume is not None:
            for bell in (*self._bells.values(), *self._slot_bells):
                bell.ring()  # the predecessor may have died between a word and its ring

    def _partition(
        self,
        plan: PartitionPlan,
        compiled: Sequence[Compiled],
        readers: Mapping[int, BoardReader],
        declared: Mapping[int, Declarations],
        places: Places,
    ) -> Partition:
        ports = {
            one["name"]: OutputPort(one["name"], one["edge"], one["result"], one["inside"], one["published"])
            for one in plan.outputs
        }
        units = [
            BoundUnit(
                self.provider_name,
                self.provider,
                self.traits,
                self._resident,
                one.unit,
                one.program,
                [ports[value.name] for value in one.unit.outputs],
                places,
                self._board,
                self._pool,
                self.counters,
                self._trace,
            )
            for one in compiled
        ]
        known = {value.name: value for unit in units for value in unit.unit.inputs}
        inputs: list[InputPort] = []
        for one in plan.inputs:
            value, board, edge = known.get(one["name"], OMITTED), one["board"], one["edge"]
            if board:  # the coordinator's own are what was fed, and checked
                declared[board].edges[edge] = value
            resident = self._resident if self.traits.exports and board == self._message.own else None
            inputs.append(InputPort(value, readers[board], board, edge, self._message.slots, resident))
        targets = Targets(readers[0], {one["name"]: one["target"] for one in plan.outputs if one["target"] >= 0})
        return Partition(plan, inputs, units, targets)

    def poll(self) -> None:
        """Run every lane that is ready. What becomes ready by others' words is told by a ring."""
        serve_ready(self.groups, self._serve if self._recorder is None else self._serve_traced)

    def ready(self) -> bool:
        """Whether `poll` would run something."""
        return any(lane.ready() for group in self.groups for lane in group.waiting)

    def trace_into(self, recorder: Recorder | None) -> None:
        """Trace runs from now on, or no more."""
        self._recorder = recorder
        for lane in self._lanes.values():
            lane.steady.clear()  # its calls are made for one or the other

    def _serve_traced(self, lane: Lane, run: int) -> None:
        recorder, number = self._recorder, lane.partition.number
        assert recorder is not None
        lane.failed = ""
        lane.total()  # all that is traced is timed
        start = monotonic_ns()
        with self._trace.into(recorder):
            ended = self._serve(lane, run)
        where = {"session": self.session, "generation": self.generation}
        args: Args = {"partition": number, "run": run, "slot": lane.slot, **where}
        if lane.failed:
            args["error"] = lane.failed
        recorder.add("partition", f"partition {number}", start, int(ended * 1e9), args)

    def _serve(self, lane: Lane, run: int) -> float:
        """Returns the time (of `monotonic`) before the rings, whose readers may take the core; 0 if not timed."""
        doing = self._doing
        doing[WHAT] = lane.what
        lane.last = run
        self._present.lane = lane
        rest = lane.rest
        begun = 0.0 if rest else monotonic()
        steady: Steady | None = None
        try:
            if lane.words[lane.cancel] >> 16 == run:
                raise RunCancelledError("the run was cancelled", reason="cancelled")
            steady = lane.steady.get(lane.layouts)
            while steady is not None and not steady.fits():
                steady = steady.other
            if steady is not None:
                try:
                    steady.repeat(run, self._cancelled, doing)
                except NotInPlaceError:
                    self._not_repeated(lane)
                    steady = None
            if steady is None:
                begun = begun or monotonic()
                self._run(lane, run)
        except (Exception, SystemExit) as error:  # whatever a provider raises becomes this run's failure
            doing[STEP] = 0
            if not self._cancelled():  # else nobody waits for its story
                number = lane.partition.number
                self._send(Failed(self.session, self.generation, run, lane.slot, number, error_to_plain(error)))
            self._void(lane, run, type(error).__name__)
        doing[WHAT] = 0
        ended = monotonic() if begun else 0.0
        for bell in lane.bells:
            os.eventfd_write(bell, 1)
        if begun:
            lane.rest = lane.tally.add(ended - begun, steady is not None, rest)
        else:
            lane.rest = rest - 1
        return ended

    def _not_repeated(self, lane: Lane) -> None:
        """A run cannot be repeated after all; nothing of it is published."""
        self._doing[STEP] = 0
        self._pool.give_back_all()
        lane.steady.clear()

    def _run(self, lane: Lane, run: int) -> None:
        """The general way: whatever the inputs are, wherever they lie."""
        self._resident.run = run
        partition, slot, board, places = lane.partition, lane.slot, self._board, self._places
        assert places is not None
        changes = places.changes[slot]
        outcome = partition.run(slot, self._recorder, self._cancelled, self._doing)
        if outcome is None:
            self._void(lane, run, "void")
            return
        for edge, number in outcome.published:
            board.publish(edge, slot, run, number)
        self._pool.published()
        board.publish(partition.done, slot, run, 1)
        # A later unit may have moved the buffer of an earlier one: a run in which nothing changed is kept.
        if outcome.calls is not None and STRONG_ORDER and changes == places.changes[slot]:
            lane.keep(Steady(board, places, self._pool, slot, outcome, partition.done))

    def _void(self, lane: Lane, run: int, why: str) -> None:
        """Nothing of this run will come from here: whoever waits shall not wait in vain."""
        lane.failed = why
        self._pool.give_back_all()
        for _, edge in lane.partition.outputs:
            self._board.void(edge, lane.slot, run)
        self._board.void(lane.partition.done, lane.slot, run)

    def stats(self) -> dict[str, Any]:
        """Counters of this session in this worker; `partitions`: [number, runs, seconds] of each."""
        totals: dict[int, list[float]] = {}
        for (number, _), lane in self._lanes.items():
            total = totals.setdefault(number, [number, 0, 0.0])
            runs, seconds = lane.total()
            total[1] += runs
            total[2] += seconds
        places = self._places
        return {
            "bound": self.counters.bound,
            "copies": self.counters.copies,
            "copied_bytes": self.counters.copied_bytes,
            "exports": self.counters.exports,
            "exported_bytes": self.counters.exported_bytes,
            "allocated_bytes": 0 if places is None else places.allocated_bytes + self._pool.pooled_bytes(),
            "edge_bytes": 0 if places is None else places.allocated_bytes,
            "edge_bytes_unshared": 0 if places is None else places.unshared_bytes,
            "partitions": list(totals.values()),
        }

    def unload(self) -> None:
        """Forget the lanes; mappings go when nothing refers to them."""
        self.groups = []
        self._lanes.clear()
        for bell in (*self._bells.values(), *self._slot_bells):
            bell.close()


def _give_up(segment: Segment, first: int, end: int, keep: Sequence[list[int]]) -> None:
    """Return the memory between `first` and `end` but for the (offset, bytes) in `keep`."""
    for offset, nbytes in sorted(keep):
        segment.discard(first, offset - first)
        first = max(first, offset + nbytes)
    segment.discard(first, end - first)


def _mapped(fd: int, writable: bool) -> Segment:
    """Map a segment; its descriptor is not needed afterwards."""
    try:
        return Segment(fd, writable=writable)
    finally:
        os.close(fd)
