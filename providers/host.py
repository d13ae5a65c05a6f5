"""A session inside a worker: its partitions, and the loop that runs those whose inputs have arrived.

The word of every input edge carries the run it belongs to. A partition of a slot is ready when all its input words
carry the same run, newer than the last one it served; it runs its units in order, publishes the words of its outputs,
then its `done` word, and rings whoever waits. A void input, or a failure, makes it publish void instead, so every run
drains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from outrider.providers.adapters import compile_unit
from outrider.providers.binding import BoundUnit, Counters, OutputPort
from outrider.providers.constants import Constants
from outrider.providers.contract import Provider, Unit
from outrider.providers.steady import Call, Steady
from outrider.providers.tracing import repeated, run_unit, unit_name, written
from outrider.providers.wire import values
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.failures import error_to_plain, fail
from outrider.providers.wire.messages import Failed, Load, Message, PartitionPlan, plan_of
from outrider.providers.wire.pack import unpack_graph
from outrider.providers.wire.spans import Args, Recorder, Trace, timed
from outrider.shm.board import ENCODED, NONE, STRONG_ORDER, VOID, BoardReader, BoardWriter, Layout, number_of, run_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.segment import Segment

log = logging.getLogger("outrider.worker")


class InputPort:
    """One input edge as read by this worker: the value of a word, as a cached read-only array where it is a tensor."""

    def __init__(self, name: str, reader: BoardReader, edge: int, slots: int) -> None:
        self.name = name
        self.reader = reader
        self.edge = edge
        self._arrays: list[dict[int, tuple[Layout, np.ndarray]]] = [{} for _ in range(slots)]

    def value(self, slot: int, number: int) -> Any:
        """The value published under a layout number. Raises LayoutError or WireError when it is malformed."""
        layout = self.reader.layout(self.edge, slot, number)
        held = self._arrays[slot].get(number)
        if held is not None and held[0] is layout:
            return held[1]
        if layout.kind == NONE:
            return None
        segment = self.reader.segment
        if layout.kind == ENCODED:
            return values.decode(segment.view[layout.offset : layout.offset + layout.nbytes])
        array = segment.array(layout.offset, numpy_dtype(BY_NUMBER[layout.dtype]), layout.shape)
        array.flags.writeable = False
        self._arrays[slot][number] = (layout, array)
        return array


class Lane:
    """A partition in one run slot: the words it waits for, the last run it served, and whom it rings afterwards.

    The `runs` it served, failed ones too, took it `seconds`; `failed` says why one failed, for a trace.

    `followers` are the lanes of this worker and slot that wait for it before all others: no word of theirs can come
    earlier, so nobody looks at them until this lane has served the run.
    """

    __slots__ = (
        "partition", "slot", "last", "ports", "steady", "bells", "followers", "runs", "seconds", "failed"
    )  # fmt: skip

    def __init__(self, partition: Partition, slot: int, bells: Sequence[Doorbell]) -> None:
        self.partition = partition
        self.slot = slot
        self.bells = tuple(bells)
        self.followers: list[Lane] = []
        self.last = 0
        self.runs = 0
        self.seconds = 0.0
        self.failed = ""
        self.steady: Steady | None = None
        self.ports = tuple((port.reader.word, port.edge) for port in partition.inputs)

    def ready(self) -> int:
        """The run to serve now, or 0."""
        slot = self.slot
        read, edge = self.ports[0]
        run = run_of(read(edge, slot))
        if run <= self.last:
            return 0
        for read, edge in self.ports[1:]:
            if run_of(read(edge, slot)) != run:
                return 0
        return run


class LaneGroup:
    """The lanes of one slot: `waiting` are those that may become ready now, in the order of the plan."""

    def __init__(self) -> None:
        self.first: list[Lane] = []  # those that wait for no lane of this worker
        self.count = 0
        self.waiting: list[Lane] = []
        self.left = 0

    def add(self, lane: Lane, after: Lane | None) -> None:
        """Add a lane; `after` is the one of this group that it follows."""
        (self.first if after is None else after.followers).append(lane)
        self.count += 1
        self.waiting, self.left = list(self.first), self.count

    def served(self, position: int) -> None:
        """The lane at this position of `waiting` has served the run of the slot; after the last one all wait anew."""
        lane = self.waiting.pop(position)
        self.left -= 1
        if self.left:
            self.waiting += lane.followers
        else:
            self.waiting, self.left = list(self.first), self.count


class Partition:
    """Units dispatched together. Inputs and outputs are edges; values between its units stay in this worker."""

    def __init__(self, plan: PartitionPlan, inputs: Sequence[InputPort], units: Sequence[BoundUnit]) -> None:
        self.number = plan.partition
        self.inputs = tuple(inputs)
        self.units = tuple(units)
        self.outputs = tuple((output["name"], output["edge"]) for output in plan.outputs if output["published"])
        self.done = plan.done

    def run(self, slot: int, recorder: Recorder | None) -> Outcome | None:
        """Run the units; None when an input is void. `recorder`: for their spans."""
        known: dict[str, Any] = {"": None}
        read: list[tuple[BoardReader, int, int]] = []
        calls: list[Call] | None = []
        for port in self.inputs:
            number = number_of(port.reader.word(port.edge, slot))
            if number == VOID:
                return None
            read.append((port.reader, port.edge, number))
            if port.name:
                known[port.name] = port.value(slot, number)
        numbers: dict[str, int] = {}
        for unit in self.units:
            arguments = [known[value.name] for value in unit.unit.inputs]
            try:
                results = unit.run(slot, arguments) if recorder is None else run_unit(recorder, unit, slot, arguments)
            except (Exception, SystemExit) as error:  # a provider may raise anything
                fail(unit.unit.nodes, unit.unit.inputs, arguments, error)
            call = unit.repeatable()
            if call is None or not all(map(_stays, arguments)):
                calls = None
            elif calls is not None:
                if recorder is not None:
                    call = repeated(recorder, unit.unit, written(unit, results), call)
                calls.append((unit.unit, call, arguments))
            for port_out, (number, value) in zip(unit.outputs, results, strict=True):
                known[port_out.name] = value
                numbers[port_out.name] = number
        return Outcome([(edge, numbers[name]) for name, edge in self.outputs], read, calls)


def _stays(argument: Any) -> bool:
    """True for what is at the same place in each run under this layout."""
    return argument is None or (type(argument) is np.ndarray and argument.dtype != object)


class Outcome(NamedTuple):
    """What a partition's run gave: (edge, layout number) to publish; what it read; calls, if they can be repeated."""

    published: list[tuple[int, int]]
    read: list[tuple[BoardReader, int, int]]
    calls: list[Call] | None


class LoadedSession:
    """What `Load` makes of a message. `refused` lists the units that did not compile; then nothing runs."""

    def __init__(
        self,
        message: Load,
        provider: Provider,
        provider_name: str,
        take: Callable[[int], int],
        constants: Constants,
        send: Callable[[Message], None],
        trace: Trace,
    ) -> None:
        self.session = message.session
        self.generation = message.generation
        self.provider = provider
        self.provider_name = provider_name
        self.counters = Counters()
        self.refused: list[dict[str, Any]] = []
        self._send = send
        self._trace = trace
        self._recorder = trace.recorder
        self._unloads: list[Callable[[], None]] = []
        self._constants = constants
        slots = message.slots
        readers: dict[int, BoardReader] = {}
        for entry in message.boards:
            board, edges = entry["board"], entry["edges"]
            segment = _mapped(take(entry["segment"]), writable=board == message.own)
            if board == message.own:
                self._board = BoardWriter(segment, edges, slots, message.generation)
                self._places = Places(segment, self._board, edges, slots)
            # Its own board too: a partition may read what an earlier one of the same worker wrote.
            readers[board] = BoardReader(segment, edges, slots, message.generation)
        self._bells = {board: Doorbell(take(fd)) for board, fd in message.bells.items()}
        self._slot_bells = [Doorbell(take(fd)) for fd in message.slot_bells]
        self._pool = PoolWriter(
            _mapped(take(message.pool), writable=True),
            readers[0].segment.words,
            message.pool_words,
            message.pool_blocks,
            limit=message.pool_bytes,
        )
        self._groups = [LaneGroup() for _ in range(slots)]
        self._lanes: dict[tuple[int, int], Lane] = {}  # (partition, slot)
        for body in message.partitions:
            plan = plan_of(body)
            partition = self._partition(plan, message, readers)
            if partition is None:
                continue
            for slot, group in enumerate(self._groups):
                bells = [self._bells[board] for board in plan.rings] + ([self._slot_bells[slot]] if plan.last else [])
                lane = self._lanes[plan.partition, slot] = Lane(partition, slot, bells)
                group.add(lane, self._lanes.get((plan.after, slot)))

    def _partition(self, plan: PartitionPlan, message: Load, readers: Mapping[int, BoardReader]) -> Partition | None:
        ports = {one["name"]: OutputPort(one["name"], one["edge"], one["result"]) for one in plan.outputs}
        units: list[BoundUnit] = []
        for index, body in enumerate(plan.units):
            graph = self._constants.graph(unpack_graph(body["graph"]))
            count = body["constants"]
            unit = Unit(
                nodes=graph.nodes[count:],
                inputs=graph.inputs,
                outputs=graph.outputs,
                constants=graph.constants,
                constant_nodes=graph.nodes[:count],
                optimization=message.optimization,
                opsets=graph.opsets,
            )
            try:
                with timed(self._recorder, "compile", unit_name(unit), {"partition": plan.partition}):
                    program, unload = compile_unit(self.provider, unit)
            except (Exception, SystemExit) as error:  # a provider may raise anything: the refusal carries its story
                plain = error_to_plain(error)
                self.refused.append(
                    {
                        "partition": plan.partition,
                        "unit": index,
                        "reason": f"{plain['type']}: {plain['message']}",
                        "traceback": plain["traceback"],
                    }
                )
                continue
            self._unloads.append(unload)
            targets = [ports[value.name] for value in graph.outputs]
            units.append(
                BoundUnit(
                    self.provider_name,
                    unit,
                    program,
                    targets,
                    self._places,
                    self._board,
                    self._pool,
                    self.counters,
                    self._trace,
                )
            )
        if self.refused:
            return None
        inputs = [InputPort(e["name"], readers[e["board"]], e["edge"], message.slots) for e in plan.inputs]
        return Partition(plan, inputs, units)

    def poll(self) -> bool:
        """Run every lane that is ready, in order; True when one was."""
        any_ready = False
        serve = self._serve if self._recorder is None else self._serve_traced
        for group in self._groups:
            position = 0
            while position < len(group.waiting):
                lane = group.waiting[position]
                run = lane.ready()
                if run:
                    any_ready = True
                    serve(lane, run)
                    group.served(position)
                    position = 0  # those passed over may have waited for this lane, whose words no ring follows
                else:
                    position += 1
        return any_ready

    def trace_into(self, recorder: Recorder | None) -> None:
        """Trace runs from now on, or no more."""
        self._recorder = recorder
        for lane in self._lanes.values():
            lane.steady = None  # its calls are made for one or the other

    def _serve_traced(self, lane: Lane, run: int) -> None:
        number = lane.partition.number
        args: Args = {"partition": number, "run": run, "slot": lane.slot}
        args.update(session=self.session, generation=self.generation)
        lane.failed = ""
        with self._trace.into(self._recorder), timed(self._recorder, "partition", f"partition {number}", args):
            self._serve(lane, run)
            if lane.failed:
                args["error"] = lane.failed

    def _serve(self, lane: Lane, run: int) -> None:
        lane.last = run
        begun = monotonic()
        try:
            if lane.steady is not None and lane.steady.fits(run):
                lane.steady.repeat(run)
            else:
                lane.steady = None
                self._run(lane, run)
        except (Exception, SystemExit) as error:  # whatever a provider raises becomes this run's failure
            number = lane.partition.number
            self._send(Failed(self.session, self.generation, run, lane.slot, number, error_to_plain(error)))
            self._void(lane, run, type(error).__name__)
        lane.runs += 1
        lane.seconds += monotonic() - begun
        for bell in lane.bells:
            bell.ring()

    def _run(self, lane: Lane, run: int) -> None:
        """The general way: whatever the inputs are, wherever they lie."""
        partition, slot, board = lane.partition, lane.slot, self._board
        outcome = partition.run(slot, self._recorder)
        if outcome is None:
            self._void(lane, run, "void")
            return
        for edge, number in outcome.published:
            board.publish(edge, slot, run, number)
        self._pool.published()
        board.publish(partition.done, slot, run, 1)
        if outcome.calls is not None and STRONG_ORDER:
            lane.steady = Steady(
                board, self._places, slot, outcome.read, outcome.calls, outcome.published, partition.done
            )

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
            total[1] += lane.runs
            total[2] += lane.seconds
        return {
            "bound": self.counters.bound,
            "copies": self.counters.copies,
            "copied_bytes": self.counters.copied_bytes,
            "allocated_bytes": self._places.allocated_bytes + self._pool.pooled_bytes(),
            "partitions": list(totals.values()),
        }

    def unload(self) -> None:
        """Forget the programs; mappings go when nothing refers to them."""
        for unload in self._unloads:
            try:
                unload()
            except (Exception, SystemExit):  # anyone's unload(): the others must not suffer from it
                log.exception("provider %s failed to unload a unit", self.provider_name)
        self._unloads.clear()
        self._groups.clear()
        self._lanes.clear()
        for bell in (*self._bells.values(), *self._slot_bells):
            bell.close()


def _mapped(fd: int, writable: bool) -> Segment:
    """Map a segment; its descriptor is not needed afterwards."""
    try:
        return Segment(fd, writable=writable)
    finally:
        os.close(fd)
