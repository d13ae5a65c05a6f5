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
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from outrider.providers.adapters import compile_unit
from outrider.providers.binding import BINDINGS, BoundUnit, Counters, OutputPort
from outrider.providers.constants import Constants
from outrider.providers.contract import Provider, Unit
from outrider.providers.lanes import Lane, LaneGroup, Present, serve_ready
from outrider.providers.steady import Block, Call, Outcome, Steady
from outrider.providers.targets import Targets
from outrider.providers.tracing import repeated, run_unit, unit_name, written
from outrider.providers.wire import values
from outrider.providers.wire.declared import Declarations, value_misfit
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.errors import BrokenEdgeError, RunCancelledError, WireError
from outrider.providers.wire.failures import error_to_plain, fail
from outrider.providers.wire.graph import OMITTED, Value
from outrider.providers.wire.messages import CANCEL, START, Failed, Load, Message, PartitionPlan, plan_of
from outrider.providers.wire.pack import unpack_graph
from outrider.providers.wire.spans import Args, Recorder, Trace, timed
from outrider.shm.board import ENCODED, NONE, STRONG_ORDER, VOID, BoardReader, BoardWriter, Layout, number_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import LayoutError
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.progress import LOAD, RUN, WHAT, ProgressWriter, what
from outrider.shm.segment import Segment
from outrider.shm.spin import Spin

log = logging.getLogger("outrider.worker")


class InputPort:
    """One input edge as read by this worker: the value of a word, as a cached read-only array where it is a tensor.

    A layout keeps its array when it comes under another number, so what was bound to that is found again.
    """

    def __init__(self, declared: Value, reader: BoardReader, board: int, edge: int, slots: int) -> None:
        self.name = declared.name
        self.reader = reader
        self.edge = edge
        self._declared = declared
        self._board = board
        self._numbered: list[dict[int, tuple[Layout, np.ndarray]]] = [{} for _ in range(slots)]
        self._arrays: list[dict[Layout, np.ndarray]] = [{} for _ in range(slots)]  # the least recently numbered first

    def value(self, slot: int, number: int) -> Any:
        """The value published under a layout number. Raises BrokenEdgeError when it is malformed."""
        try:
            return self._value(slot, number)
        except (LayoutError, WireError) as error:
            raise BrokenEdgeError(
                f"{self.name!r} cannot be read: {error}",
                value=self.name,
                board=self._board,
                edge=self.edge,
                reason=str(error),
            ) from error

    def _value(self, slot: int, number: int) -> Any:
        layout = self.reader.layout(self.edge, slot, number)
        held = self._numbered[slot].get(number)
        if held is not None and held[0] is layout:
            return held[1]
        if layout.kind == NONE:
            return None
        segment = self.reader.memory_of(layout)
        if layout.kind == ENCODED:
            value = values.decode(segment.view[layout.offset : layout.offset + layout.nbytes])
            misfit = value_misfit(self._declared, value)
            if misfit:
                raise WireError(misfit, where=self.name, reason="not as declared")
            return value
        arrays = self._arrays[slot]
        array = arrays.pop(layout, None)
        if array is None:
            array = segment.array(layout.offset, numpy_dtype(BY_NUMBER[layout.dtype]), layout.shape)
            array.flags.writeable = False
            if len(arrays) >= BINDINGS:
                arrays.pop(next(iter(arrays)))
        arrays[layout] = array
        self._numbered[slot][number] = (layout, array)
        return array


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

    def run(self, slot: int, recorder: Recorder | None, cancelled: Callable[[], bool]) -> Outcome | None:
        """Run the units; None when an input is void. `recorder`: for their spans.

        `cancelled`: asked between two units; RunCancelledError if it says so.
        """
        known: dict[str, Any] = {"": None}
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
                known[port.name] = port.value(slot, number)
        targets = self.targets.of(slot, read)
        numbers: dict[str, int] = {}
        for position, unit in enumerate(self.units):
            if position and cancelled():
                raise RunCancelledError("the run was cancelled between two units", reason="cancelled")
            arguments = [known[value.name] for value in unit.unit.inputs]
            try:
                if recorder is None:
                    results = unit.run(slot, arguments, targets)
                else:
                    results = run_unit(recorder, unit, slot, arguments, targets)
            except (Exception, SystemExit) as error:  # a provider may raise anything
                fail(unit.unit.nodes, unit.unit.inputs, arguments, error)
            binding = unit.repeatable()
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
        return Outcome([(edge, numbers[name]) for name, edge in self.outputs], read, calls, stamps, blocks)


def _stays(argument: Any) -> bool:
    """True for what is at the same place in each run under this layout."""
    return argument is None or (type(argument) is np.ndarray and argument.dtype != object)


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
        progress: ProgressWriter,
        present: Present,
    ) -> None:
        self.session = message.session
        self.generation = message.generation
        self.provider = provider
        self.provider_name = provider_name
        self.counters = Counters()
        self.refused: list[dict[str, Any]] = []
        self.spin = Spin(message.spin_us)
        self._send = send
        self._trace = trace
        self._recorder = trace.recorder
        self._progress = progress
        self._doing = progress.words
        self._present = present
        self._unloads: list[Callable[[], None]] = []
        self._constants = constants
        slots, own = message.slots, message.own
        pool = _mapped(take(message.pool), writable=True)
        memories = {one["memory"]: _mapped(take(one["segment"]), writable=False) for one in message.memories}
        memories[own] = pool
        plans = [plan_of(body) for body in message.partitions]
        buffers = {output["edge"]: output["buffer"] for plan in plans for output in plan.outputs}
        readers: dict[int, BoardReader] = {}
        self._declared: dict[int, Declarations] = {}  # by board
        for entry in message.boards:
            board, edges = entry["board"], entry["edges"]
            segment = _mapped(take(entry["segment"]), writable=board == own)
            if board == own:
                self._board = BoardWriter(segment, edges, slots, message.generation)
                self._places = Places(segment, self._board, edges, slots, buffers)
            # Its own board too: a partition may read what an earlier one of the same worker wrote.
            shown = memories if board == 0 else None
            declared = self._declared[board] = Declarations()
            readers[board] = BoardReader(segment, edges, slots, message.generation, shown, declared.misfit)
        self._bells = {board: Doorbell(take(fd)) for board, fd in message.bells.items()}
        self._slot_bells = [Doorbell(take(fd)) for fd in message.slot_bells]
        self._pool = PoolWriter(
            pool,
            readers[0].segment.words,
            message.pool_words,
            message.pool_blocks,
            limit=message.pool_bytes,
            memory=own,
        )
        caller = readers[0]
        self.groups = [
            LaneGroup(caller.words, caller.index(START, slot), caller.index(CANCEL, slot)) for slot in range(slots)
        ]
        self._lanes: dict[tuple[int, int], Lane] = {}  # (partition, slot)
        for plan in plans:
            partition = self._partition(plan, message, readers)
            if partition is None:
                continue
            for slot, group in enumerate(self.groups):
                bells = [self._bells[board] for board in plan.rings] + ([self._slot_bells[slot]] if plan.last else [])
                doing = what(RUN, self.session, slot, plan.partition)
                lane = self._lanes[plan.partition, slot] = Lane(partition, slot, bells, doing)
                group.add(lane, self._lanes.get((plan.after, slot)))

    def _partition(self, plan: PartitionPlan, message: Load, readers: Mapping[int, BoardReader]) -> Partition | None:
        ports = {
            one["name"]: OutputPort(one["name"], one["edge"], one["result"], one["inside"]) for one in plan.outputs
        }
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
            self._progress.begin(LOAD, self.session, plan.partition, index)
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
            outputs = [ports[value.name] for value in graph.outputs]
            units.append(
                BoundUnit(
                    self.provider_name,
                    unit,
                    program,
                    outputs,
                    self._places,
                    self._board,
                    self._pool,
                    self.counters,
                    self._trace,
                )
            )
        if self.refused:
            return None
        known = {value.name: value for unit in units for value in unit.unit.inputs}
        inputs: list[InputPort] = []
        for one in plan.inputs:
            value, board, edge = known.get(one["name"], OMITTED), one["board"], one["edge"]
            if board:  # the coordinator's own are what was fed, and checked
                self._declared[board].edges[edge] = value
            inputs.append(InputPort(value, readers[board], board, edge, message.slots))
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
                steady.repeat(run, self._present.cancelled)
            else:
                begun = begun or monotonic()
                self._run(lane, run)
        except (Exception, SystemExit) as error:  # whatever a provider raises becomes this run's failure
            if not self._present.cancelled():  # else nobody waits for its story
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

    def _run(self, lane: Lane, run: int) -> None:
        """The general way: whatever the inputs are, wherever they lie."""
        partition, slot, board = lane.partition, lane.slot, self._board
        changes = self._places.changes[slot]
        outcome = partition.run(slot, self._recorder, self._present.cancelled)
        if outcome is None:
            self._void(lane, run, "void")
            return
        for edge, number in outcome.published:
            board.publish(edge, slot, run, number)
        self._pool.published()
        board.publish(partition.done, slot, run, 1)
        # A later unit may have moved the buffer of an earlier one: a run in which nothing changed is kept.
        if outcome.calls is not None and STRONG_ORDER and changes == self._places.changes[slot]:
            lane.keep(Steady(board, self._places, self._pool, slot, outcome, partition.done))

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
        return {
            "bound": self.counters.bound,
            "copies": self.counters.copies,
            "copied_bytes": self.counters.copied_bytes,
            "allocated_bytes": self._places.allocated_bytes + self._pool.pooled_bytes(),
            "edge_bytes": self._places.allocated_bytes,
            "edge_bytes_unshared": self._places.unshared_bytes,
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
        self.groups.clear()
        self._lanes.clear()
        for bell in (*self._bells.values(), *self._slot_bells):
            bell.close()


def _mapped(fd: int, writable: bool) -> Segment:
    """Map a segment; its descriptor is not needed afterwards."""
    try:
        return Segment(fd, writable=writable)
    finally:
        os.close(fd)
