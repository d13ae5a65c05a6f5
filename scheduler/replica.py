"""A replica: one loaded copy of the model, and what the monitor and the supervisor tell of it.

A session has one, or several that share its runs. Each has a session number of its own on the fleet, its own slots, and
a generation that lives on when a worker of it has died (`supervisor.py`), or is replaced by one with another plan.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.providers.wire.errors import BrokenEdgeError, WireError
from outrider.scheduler import blame, overdue, recovery
from outrider.scheduler.closing import closed_error
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.evidence import begun, first_void
from outrider.scheduler.failures import error_of
from outrider.scheduler.generation import Generation
from outrider.scheduler.inplace import Admission, Targets
from outrider.scheduler.numbering import Blueprint
from outrider.scheduler.placement import Placer
from outrider.scheduler.slots import Hold
from outrider.scheduler.steady import Copies, Signature, SteadyRun
from outrider.scheduler.watching import Watch
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.board import VOID, number_of, run_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import OutriderError
from outrider.shm.progress import RUN, Doing, same_session
from outrider.shm.spin import Spin

LAST_WORDS_SECONDS = 0.2  # for a message that a worker sent before it died
FAILURE_SECONDS = 30.0  # between a void word and the message that explains it
STORIES = 256  # of runs whose callers had left


@dataclass
class Input:
    """A model input in one slot: its last layout, and its place if it was copied (else it was read where it lies)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: np.ndarray[Any, Any] | None
    number: int
    default: np.ndarray[Any, Any] | None = None  # the model's own initializer that it holds


@dataclass(eq=False)
class Slot:
    """A run slot: one run at a time.

    `pending`: a run that has begun and not ended; `feeds`, `targets` and `words` are its (kept, as its caller may leave
    earlier, while workers still read and write there). `watch`: of its present or last caller.
    """

    replica: Replica
    index: int
    bell: Doorbell
    spin: Spin
    inputs: dict[str, Input] = field(default_factory=dict)
    admissions: dict[str, Admission] = field(default_factory=dict)  # by input
    pending: int = 0
    feeds: Mapping[str, Any] | None = None
    targets: Targets | None = None
    watch: Watch | None = None
    words: Sequence[tuple[int, int]] = ()  # (edge of board 0, layout number)
    steady: dict[Signature, SteadyRun] = field(default_factory=dict)
    repeated: SteadyRun | None = None  # by the last run
    counters: Copies = field(default_factory=Copies)

    def forget(self) -> None:
        """The last run was repeated, or interrupted: its inputs may lie where the defaults of others were."""
        if self.repeated is not None or self.pending:
            self.repeated = None
            for held in self.inputs.values():
                held.default = None


class RunAgain(Exception):
    """The run did not end in this generation: it begins again in the next one. `death`: what stopped it, if one did."""

    def __init__(self, death: OutriderError | None) -> None:
        super().__init__()
        self.death = death


@dataclass(frozen=True)
class Outage:
    """Why no run can be served. `until`: a time of `monotonic`; `cause`: the death or refusal behind it."""

    provider: str
    reason: str
    until: float
    cause: OutriderError | None = None

    def error(self) -> ProviderUnavailableError:
        """For one more caller."""
        seconds = self.until - time.monotonic()
        if math.isinf(seconds):
            when, left = f"restart({self.provider!r}) lifts that", None
        else:
            left = max(seconds, 0.0)
            when = f"{left:.1f} s are left"
        return ProviderUnavailableError(
            f"provider {self.provider} may not be used now: {self.reason}; {when}",
            provider=self.provider,
            reason=self.reason,
            seconds=left,
        )


def busy(hold: Hold[Slot]) -> bool:
    """Whether there is a slot whose run goes on without its caller."""
    return hold.item is not None and hold.item.pending != 0


class Replica:
    """Listens to the monitor for one session number.

    `ended`: whoever waits for a run must look at `check`: something has happened that may concern it. `supervise`,
    `respare` and `reconsider`: what the supervisor wants to know of deaths and restarts, set when the session is made.
    """

    def __init__(self, placer: Placer, deployer: Deployer, bells: Sequence[Doorbell], spin_us: int = 0) -> None:
        self.placer = placer
        self.deployer = deployer
        self.slots = [Slot(self, index, bell, Spin(spin_us)) for index, bell in enumerate(bells)]
        self.recovery = recovery.Recovery(placer.options.replay, all(map(placer.replaceable, placer.workers)))
        self.supervise: Callable[[Replica, int, Incarnation], None] = lambda replica, generation, died: None
        self.respare: Callable[[Worker], None] = lambda worker: None
        self.reconsider: Callable[[Worker], None] = lambda worker: None
        self.blueprint: Blueprint
        self.generation: Generation | None = None
        self.closed = False
        self.ended = False
        self.moving = False
        self._to_move = False  # the supervisor waits for all slots
        self.refusing = 0  # claims that are being taken back
        self.outage: Outage | None = None
        self.stalled: set[int] = set()  # boards whose worker is to be replaced
        self.dying: dict[Incarnation, recovery.Running] = {}  # what they were running here
        self._verdicts: dict[int, OutriderError] = {}  # run -> how it ends
        self.attempts: dict[int, list[WorkerDiedError]] = {}  # run -> deaths that it has survived
        self._baselines: dict[int, list[int]] = {}  # board -> its done words when its worker began to serve
        self._well: dict[int, int] = {}  # board -> how many runs had ended well then
        # board -> the runs in flight when its present worker took over, and the death of the one before
        self._heirs: dict[int, tuple[set[int], WorkerDiedError | None]] = {}
        self._stories: dict[int, tuple[int, OutriderError]] = {}  # run -> board of who tells it, and what
        self._lock = threading.Lock()  # in `with`: a signal within Condition.__enter__ would leave it locked for ever
        self._told = threading.Condition(self._lock)

    @property
    def troubled(self) -> bool:
        """Whether a run that begins now has to wait for something to be mended, or cannot be served."""
        return self.ended or bool(self.stalled)

    # Told by the monitor's thread -----------------------------------------------------------------------------------
    def on_failed(self, sender: Incarnation, message: messages.Failed) -> None:
        """A partition failed: keep the first story of each run. Raises WireError for what the sender cannot know."""
        generation = self.generation
        if generation is None or message.generation != generation.number:
            return
        board = sender.worker.index + 1
        if message.partition not in generation.partitions_of.get(board, ()):
            raise WireError(
                f"{sender.worker.name} tells of partition {message.partition}, which is not its own",
                where="Failed.partition",
                reason="not its own",
            )
        last = begun(generation, message.slot) if 0 <= message.slot < len(self.slots) else 0
        if not 0 < message.run <= last:
            raise WireError(
                f"it tells of run {message.run} of slot {message.slot}, where the last one is {last}",
                where="Failed.run",
                reason="not begun",
            )
        with self._lock:
            if message.run not in self._stories:
                self._stories[message.run] = board, error_of(message, generation, sender.worker.name)
                while len(self._stories) > STORIES:
                    self._stories.pop(next(iter(self._stories)))
            self._told.notify_all()

    def on_dying(self, one: Incarnation, doing: Doing) -> tuple[int, list[str]] | None:
        """A worker has died: credit what it has completed. What it was running here: (partition, nodes)."""
        generation, board = self.generation, one.worker.index + 1
        if generation is None or board not in generation.sides or generation.sides[board].serving is not one:
            return None
        self._credit(generation, board, one)
        if doing.kind != RUN or not same_session(doing.session, self.deployer.session) or doing.slot >= len(self.slots):
            return None
        partition, slot = doing.partition, self.slots[doing.slot]
        run = slot.pending
        if partition not in generation.partitions_of[board] or not run:
            return None
        if run_of(generation.done(partition, slot.index)) == run:
            return None
        self.dying[one] = recovery.Running(slot.index, run, partition, partition not in generation.random)
        return partition, generation.partition_nodes[partition]

    def _credit(self, generation: Generation, board: int, one: Incarnation) -> None:
        """What a worker has completed since it began to serve ends its row of deaths."""
        quarantine, name = self.deployer.fleet.quarantine, one.worker.name
        before, now = self._baselines.get(board, []), self._done_words(generation, board)
        partitions = sorted(generation.partitions_of[board])
        well = self._ended_well() > self._well.get(board, 0)  # then its last words may be those of a run that failed
        for position, (then, word) in enumerate(zip(before, now, strict=False)):
            if well or (then != word and number_of(word) != VOID):
                one.worker.restarts.completed()
                partition = partitions[position // len(self.slots)]
                quarantine.completed(self.placer.model, generation.partition_nodes[partition], name)

    def uses(self, one: Incarnation) -> bool:
        """Whether a successor of this process is to serve the present generation."""
        generation = self.generation
        if generation is None or self.closed or self.moving or self.outage is not None:
            return False
        return any(side.serving is one for side in generation.sides.values())

    def on_death(self, one: Incarnation) -> None:
        """A worker died without being asked to; everybody was told by `on_dying`."""
        generation = self.generation
        if generation is None:
            return
        for board, side in generation.sides.items():
            with self._lock:  # whoever has it serve looks too, as it may have died before
                fresh = side.serving is one and board not in self.stalled
                if fresh:
                    self.stalled.add(board)
            if fresh:
                self.supervise(self, generation.number, one)
                self.stir()
                if self.ended:
                    self.wake()  # what waits for it does so in vain

    def on_spare_lost(self, worker: Worker) -> None:
        """The spare of a worker died."""
        self.respare(worker)

    def on_restart(self, worker: Worker) -> None:
        """A worker may be used again that this replica may do without."""
        self.reconsider(worker)

    def on_closed(self) -> None:
        """The fleet or the session was closed: every run ends with SessionClosedError."""
        with self._lock:
            self.closed = self.ended = True
        self.wake()

    def look(self) -> None:
        """Whether a worker says of a run in flight what cannot be; now and then."""
        blame.look(self)

    def working(self) -> list[tuple[int, overdue.Working]]:
        """The runs in flight, and where workers are in them. From any thread."""
        return [(run, one) for slot in self.slots if (run := slot.pending) for one in overdue.working(slot, run)]

    def wake(self) -> None:
        """Have every blocked caller look at what has happened."""
        with self._lock:
            self._told.notify_all()
        for slot in self.slots:
            slot.bell.ring()

    # Called by the supervisor ---------------------------------------------------------------------------------------
    def flights(self) -> list[tuple[int, int]]:
        """(slot, run) of all runs in flight."""
        return [(slot.index, slot.pending) for slot in self.slots if slot.pending]

    def about_to_serve(self, board: int, one: Incarnation) -> None:
        """An incarnation gets the board next: its death is that of the board's worker from now on."""
        generation = self.generation
        assert generation is not None
        self._baselines[board] = self._done_words(generation, board)
        self._well[board] = self._ended_well()
        self.stalled.discard(board)
        self._heirs[board] = {run for _, run in self.flights()}, generation.sides[board].serving.death
        generation.sides[board].serving = one
        if one.death is not None:
            self.on_death(one)

    def serves_again(self) -> None:
        """A board has a worker again."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        """Whether those who wait have to look any more. Called with the lock held, as all that it reads is changed."""
        self.ended = self.closed or self.moving or self.outage is not None or bool(self._verdicts)

    def end(self, slot: int, run: int, error: OutriderError) -> None:
        """Have a run end with this error, and workers skip what is left of it."""
        generation = self.generation
        if generation is None or self.slots[slot].pending != run:
            return
        generation.board.publish(messages.CANCEL, slot, run, 1)
        with self._lock:
            self._verdicts[run] = error
            self.ended = True
        self.slots[slot].bell.ring()

    def refused(self, count: int) -> None:
        """One more claim is being taken back, or (-1) one less."""
        with self._lock:
            self.refusing += count
            self._told.notify_all()

    def begin_to_move(self) -> None:
        """Runs that wait for a dead worker begin again elsewhere; the others go on to their end."""
        with self._lock:
            self.moving = self._to_move = self.ended = True
            self.outage = None
        self.wake()

    def may_move(self) -> None:
        """The supervisor has all slots; the next generation that is installed is the one it moves to."""
        with self._lock:
            self._to_move = False

    def go_down(self, outage: Outage) -> None:
        """No run can be served that needs a dead worker, and none may begin. `wake` tells those who wait."""
        with self._lock:
            self.outage, self.moving, self.ended = outage, False, True

    # Called by who has taken all slots of the replica, or before anybody runs ----------------------------------------
    def release(self) -> None:
        """Let go of the generation and what refers to its memory."""
        for slot in self.slots:
            slot.inputs.clear()
            slot.admissions.clear()
            slot.steady.clear()
            slot.repeated = slot.feeds = slot.targets = None
            slot.pending = 0
        generation = self.generation
        if generation is not None:
            for board, side in generation.sides.items():
                if side.serving.alive:
                    self._credit(generation, board, side.serving)
            generation.close()
        self.generation = None

    def install(self, blueprint: Blueprint, generation: Generation) -> None:
        """Use a new generation."""
        self.release()
        self.blueprint = blueprint
        self._baselines = {board: self._done_words(generation, board) for board in generation.sides}
        with self._lock:
            self._verdicts.clear()
            self.attempts.clear()
            self.dying.clear()
            self.stalled.clear()
            # Somebody else may have placed anew while the supervisor waits to: a run must not keep it from that.
            self.outage, self.moving = None, self._to_move
            self.generation = generation
            self._settle()
        self._well = dict.fromkeys(generation.sides, self._ended_well())
        self._heirs.clear()
        for side in generation.sides.values():  # one that died before the generation was here was told of to nobody
            if side.serving.death is not None:
                self.on_death(side.serving)
        self.wake()

    # Called by those who run -----------------------------------------------------------------------------------------
    def check(self, slot: Slot | None = None, run: int = 0) -> None:
        """Raises what ends a run, or keeps one from beginning (without `run`): an error, or RunAgain."""
        if self.closed:
            raise closed_error("session", "the session was closed")
        if run:
            with self._lock:
                verdict = self._verdicts.pop(run, None)
                self._settle()
            if verdict is not None:
                raise verdict
        generation, outage = self.generation, self.outage
        if not (self.moving or outage is not None) or generation is None:
            return
        told = self.attempts.get(run)  # deaths while it was running
        if run:
            assert slot is not None
            waits = [board for board in self.stalled if generation.owed(board, slot.index, run)]
            if not waits:
                return
            death = told[-1] if told else generation.sides[waits[0]].serving.death
            if generation.random and death is not None:
                raise same_again(death)
        if outage is not None and (math.isinf(outage.until) or time.monotonic() < outage.until):
            if told:  # it was running
                raise same_again(told[-1])
            raise outage.error() from outage.cause
        raise RunAgain(told[-1] if told else None)

    def dismiss(self, run: int) -> None:
        """A run whose caller had left has come to its end."""
        with self._lock:
            self._verdicts.pop(run, None)
            self._stories.pop(run, None)
            self.attempts.pop(run, None)

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until the replica does not move any more, or is about to; False after `timeout` seconds."""

        def is_settled() -> bool:
            outage = self.outage
            return self.closed or not (
                self.moving or self.refusing or (outage is not None and time.monotonic() >= outage.until)
            )

        with self._lock:
            if timeout is None:
                return self._told.wait_for(is_settled)
            if not is_settled():
                self._told.wait(timeout)  # or until `stir`
            return is_settled()

    def stir(self) -> None:
        """Have those who wait for the replica to settle look at their watches."""
        with self._lock:
            self._told.notify_all()

    def story(self, slot: Slot, run: int) -> OutriderError:
        """Why a run is void."""
        with self._lock:
            generation = self.generation
            assert generation is not None

            def told() -> bool:
                return run in self._stories or run in self._verdicts or self.closed

            self._told.wait_for(lambda: told() or self._silenced(slot, run) is not None, FAILURE_SECONDS)
            silenced = self._silenced(slot, run)
            if silenced is not None:
                self._told.wait_for(told, LAST_WORDS_SECONDS)
            if run in self._verdicts:
                return self._verdicts.pop(run)
            teller, found = self._stories.pop(run, (0, None))
        if isinstance(found, BrokenEdgeError):
            return blame.broken_edge(self, slot, run, teller, found)
        if found is not None:
            return found
        if self.closed:
            return closed_error("session", "the session was closed while a run was failing")
        if silenced is not None:
            return same_again(silenced)
        partition, board = first_void(generation, slot.index, run) or (0, generation.dones[0][0])
        reason = f"it is void, and nobody said why for {FAILURE_SECONDS:g} s"
        return blame.broken(self, board, f"partition {partition}", reason)

    def _silenced(self, slot: Slot, run: int) -> OutriderError | None:
        """The death of the worker that made a run void, which may have taken the reason with it."""
        generation = self.generation
        found = None if generation is None else first_void(generation, slot.index, run)
        if found is None or generation is None:
            return None
        runs, death = self._heirs.get(found[1], ((), None))
        return death if run in runs else generation.sides[found[1]].serving.death

    def _ended_well(self) -> int:
        """How many runs of this replica have."""
        return sum(slot.counters.runs for slot in self.slots)

    def _done_words(self, generation: Generation, board: int) -> list[int]:
        slots = range(len(self.slots))
        return [generation.done(one, slot) for one in sorted(generation.partitions_of[board]) for slot in slots]


def same_again(error: OutriderError) -> OutriderError:
    """The same error for one more caller: one that was raised keeps the frames that it passed."""
    return type(error)(error.message, **error.fields())
