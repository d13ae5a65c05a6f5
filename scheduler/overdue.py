"""Runs that nobody waits for any more, and partitions that take too long: what is done about them.

A run whose deadline has passed, or that was cancelled, is *given up*: the word that cancels it is published, its caller
goes, and its slot drains by itself as workers come to their next step. Whoever still shows that run `GRACE` seconds
later has a kernel that does not return, and is killed; so is one that could go on with it and does not, because its
process is stopped. What becomes of their other runs is no matter of this module.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.providers.wire.errors import RunCancelledError
from outrider.providers.wire.failures import first_names
from outrider.providers.wire.messages import CANCEL, START
from outrider.scheduler.dumps import SECONDS, end_with_stack, stacks
from outrider.scheduler.errors import RunTimeoutError
from outrider.shm.board import run_of
from outrider.shm.progress import IDLE, RUN, Doing, same_session

if TYPE_CHECKING:
    from outrider.scheduler.generation import Generation
    from outrider.scheduler.monitor import Monitor
    from outrider.scheduler.replica import Replica, Slot
    from outrider.scheduler.watching import Watch
    from outrider.scheduler.worker import Incarnation

GRACE = 1.0  # seconds from giving a run up until a worker that still shows it is killed


@dataclass(frozen=True)
class Working:
    """A worker, and where it is in a run.

    `step`: the position of the unit within the partition; None if it has not begun the partition, though it waits for
    nothing and the worker does nothing else.
    """

    one: Incarnation
    partition: int
    step: int | None
    nodes: list[str]

    @property
    def key(self) -> tuple[Incarnation, int, bool]:
        """What stays the same while it does not get on to another partition."""
        return self.one, self.partition, self.step is None

    def plain(self, stack: str) -> dict[str, Any]:
        """An entry of `RunTimeoutError.running`."""
        return {
            "provider": self.one.worker.name,
            "device": self.one.worker.device,
            "incarnation": self.one.number,
            "partition": self.partition,
            "nodes": list(self.nodes),
            "step": self.step,
            "stack": stack,
        }


def working(slot: Slot, run: int) -> list[Working]:
    """The workers that show a partition of this run of a slot, or could begin one. From any thread."""
    generation = slot.replica.generation
    if generation is None:
        return []
    found: list[Working] = []
    for board, side in generation.sides.items():
        progress = side.serving.progress
        if progress is None or not side.serving.alive:
            continue
        doing = progress.read()
        own = doing.kind == RUN and same_session(doing.session, slot.replica.deployer.session)
        number: int | None
        if doing.kind == IDLE or (own and _ended(generation, board, doing)):
            number, step = _next(generation, board, slot.index, run), None
        elif own and doing.slot == slot.index:
            number, step = doing.partition, doing.step
        else:
            continue
        if number in generation.partitions_of[board] and run_of(generation.done(number, slot.index)) != run:
            found.append(Working(side.serving, number, step, generation.partition_nodes[number]))
    return found


def _ended(generation: Generation, board: int, doing: Doing) -> bool:
    """Whether the partition that a worker shows has served its run: it may have been stopped right after that."""
    if doing.partition not in generation.partitions_of[board] or doing.slot >= generation.blueprint.slots:
        return False
    return run_of(generation.done(doing.partition, doing.slot)) == run_of(generation.word(0, START, doing.slot))


def _next(generation: Generation, board: int, slot: int, run: int) -> int | None:
    """The first partition of a worker that has not served the run although all that it reads is there."""
    for number in generation.owed(board, slot, run):
        inputs = generation.plans[number].inputs
        if all(run_of(generation.word(one["board"], one["edge"], slot)) == run for one in inputs):
            return number
    return None


def give_up(slot: Slot, run: int) -> None:
    """Nobody waits for the slot's pending run any more. Called by who has the slot."""
    generation = slot.replica.generation
    if generation is None:
        return
    generation.board.publish(CANCEL, slot.index, run, 1)
    monitor = _monitor(slot)
    monitor.call_later(GRACE, lambda: _end_those_at(monitor, slot, run))


def end_those_of(replica: Replica, provider: str, reason: str) -> None:
    """End the runs that a provider's worker is at, and the worker, which is not to blame. On the monitor's thread."""
    for slot in replica.slots:
        run = slot.pending
        for one in working(slot, run) if run else ():
            if one.one.worker.name == provider and one.step is not None:
                error = RunCancelledError(f"the run was cancelled: {reason}", reason=reason)
                replica.end(slot.index, run, error)
                _end(slot, run, one, reason, spared=True)


def end_after_close(replica: Replica) -> None:
    """The session is being closed on a fleet that goes on: what its workers are at is given up, and ended if need be.

    Its runs have no callers any more, and soon it has no generation: the progress record tells whether a worker is
    still at it, as no other session of the fleet has its number.
    """
    generation, monitor = replica.generation, replica.deployer.fleet.monitor
    session = replica.deployer.session
    if generation is None:
        return
    for slot in replica.slots:
        if slot.pending:
            generation.board.publish(CANCEL, slot.index, slot.pending, 1)
    for side in generation.sides.values():
        one = side.serving

        def still(one: Incarnation = one) -> bool:
            doing = one.doing()
            return one.alive and doing.kind == RUN and same_session(doing.session, session)

        def end(one: Incarnation = one, still: Callable[[], bool] = still) -> None:
            reason = f"its session was closed {GRACE:g} s before, and what it ran for it did not come to an end"
            end_with_stack(monitor, one, reason, still, spared=True)

        if still():
            monitor.call_later(GRACE, end)


def wait(slot: Slot, run: int, watch: Watch) -> None:
    """Block until the slot's doorbell rings, or something is due. For a run that its caller waits for.

    Raises RunTimeoutError and RunCancelledError, with the run given up. A worker whose partition takes longer than the
    partition deadline is on its way to its end when this returns: its death is told as any other.
    """
    watch.waker = slot.bell.ring
    if watch.cancelled:
        give_up(slot, run)
        raise RunCancelledError("the run was cancelled while it ran", reason="cancelled while it ran")
    if watch.over:
        give_up(slot, run)
        raise _timed_out(slot, run, watch)
    if watch.stall is not None:
        seconds = watch.stall.seconds
        shown = {one.key: one for one in working(slot, run)}
        for key in watch.stall.look(time.monotonic(), shown):
            late = shown[key]
            how = "ran longer than" if late.step is not None else "did not begin within"
            _end(slot, run, late, f"partition {late.partition} {how} its partition_deadline of {seconds:g} s")
    slot.bell.wait(watch.block())


def wait_for_earlier(slot: Slot, watch: Watch | None) -> None:
    """The same for a caller whose run has to wait for one that was given up. Raises what `Watch.left` does."""
    if watch is None:
        slot.bell.wait()
    else:
        watch.waker = slot.bell.ring
        slot.bell.wait(watch.left("while it waited for an earlier run of its slot, which was given up, to end"))


def _timed_out(slot: Slot, run: int, watch: Watch) -> RunTimeoutError:
    at_it = working(slot, run)
    told = [one.plain(stack) for one, stack in zip(at_it, _stacks(slot, at_it), strict=True)]
    lines = [f"the run took longer than its deadline of {watch.deadline:g} s."]
    for entry in told:
        where = f"partition {entry['partition']} ({first_names(entry['nodes'])})"
        where = f"had not begun {where}" if entry["step"] is None else f"was at {where}, unit {entry['step']}"
        lines.append(f"Worker {entry['provider']} (incarnation {entry['incarnation']}) {where}.")
        if entry["stack"]:
            lines.append(f"Its Python stack:\n{entry['stack']}")
    if not told:
        lines.append("No worker was at it: what it waits for is busy with other runs, or has just died.")
    return RunTimeoutError("\n".join(lines), deadline=watch.deadline, running=told)


def _stacks(slot: Slot, at_it: list[Working]) -> list[str]:
    return stacks(_monitor(slot), [one.one for one in at_it]) if at_it else []


def _end_those_at(monitor: Monitor, slot: Slot, run: int) -> None:
    """On the monitor's thread."""
    for one in working(slot, run) if slot.pending == run else ():
        how = "begin" if one.step is None else "come to an end"
        why = f"its run was given up {GRACE:g} s before, and partition {one.partition} did not {how}"
        if one.step is None:  # it may just have been woken
            monitor.call_later(SECONDS, functools.partial(_end, slot, run, one, why, spared=True))
        else:
            _end(slot, run, one, why, spared=True)


def _end(slot: Slot, run: int, late: Working, reason: str, spared: bool = False) -> None:
    def still() -> bool:
        return slot.pending == run and any(one.key == late.key for one in working(slot, run))

    end_with_stack(_monitor(slot), late.one, reason, still, spared)


def _monitor(slot: Slot) -> Monitor:
    return slot.replica.deployer.fleet.monitor
