"""A replica: one loaded copy of the model, and what the monitor tells of it.

A session has one, or several that share its runs. Each has a session number of its own on the fleet, its own slots, and
a generation that is replaced when a worker of it has died.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.providers.contract import ProviderContractError
from outrider.providers.wire import messages, values
from outrider.providers.wire.declared import value_misfit
from outrider.providers.wire.errors import BrokenEdgeError, WireError
from outrider.providers.wire.failures import first_names
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.errors import SessionClosedError, WorkerDiedError
from outrider.scheduler.evidence import begun, first_impossible, first_void
from outrider.scheduler.failures import error_of
from outrider.scheduler.generation import Generation, WorkerSide
from outrider.scheduler.inplace import Admission, Targets
from outrider.scheduler.numbering import Blueprint
from outrider.scheduler.placement import Placer
from outrider.scheduler.steady import Copies, Signature, SteadyRun
from outrider.scheduler.worker import Incarnation
from outrider.shm.board import ENCODED, VOID, number_of, run_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import LayoutError, OutriderError
from outrider.shm.spin import Spin

FAILURE_SECONDS = 30.0  # between a void word and the message that explains it
END_SECONDS = 5.0  # for a worker that was killed to be gone
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
    earlier, while workers still read and write there).
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


class Replica:
    """Listens to the monitor for one session number.

    `death`: of a worker of the present generation; `ended`: there was one, or the fleet or session was closed.
    """

    def __init__(self, placer: Placer, deployer: Deployer, bells: Sequence[Doorbell], spin_us: int = 0) -> None:
        self.placer = placer
        self.deployer = deployer
        self.slots = [Slot(self, index, bell, Spin(spin_us)) for index, bell in enumerate(bells)]
        self.blueprint: Blueprint
        self.generation: Generation | None = None
        self.death: WorkerDiedError | None = None
        self.closed = False
        self.ended = False
        self._stories: dict[int, tuple[int, OutriderError]] = {}  # run -> board of who tells it, and what
        self._lock = threading.Lock()  # in `with`: a signal within Condition.__enter__ would leave it locked for ever
        self._told = threading.Condition(self._lock)

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

    def on_death(self, died: Incarnation, error: WorkerDiedError) -> None:
        """A worker died: every run of a generation that used it ends with this error."""
        generation = self.generation
        if generation is None or all(side.serving is not died for side in generation.sides.values()):
            return
        self.death = error
        self.ended = True
        self.wake()

    def on_closed(self) -> None:
        """The fleet or the session was closed: every run ends with SessionClosedError."""
        self.closed = self.ended = True
        self.wake()

    def wake(self) -> None:
        """Have every blocked caller look at `death` and `closed`."""
        with self._lock:
            self._told.notify_all()
        for slot in self.slots:
            slot.bell.ring()

    # Called by the session, which has taken all slots of the replica, or has not run yet -----------------------------
    def release(self) -> None:
        """Let go of the generation and what refers to its memory."""
        for slot in self.slots:
            slot.inputs.clear()
            slot.admissions.clear()
            slot.steady.clear()
            slot.repeated = slot.feeds = slot.targets = None
            slot.pending = 0
        if self.generation is not None:
            self.generation.close()
        self.generation = None

    def install(self, blueprint: Blueprint, generation: Generation) -> None:
        """Use a new generation."""
        self.release()
        self.blueprint = blueprint
        self.generation = generation
        self.death = None
        for side in generation.sides.values():  # one that died before the generation was here was told of to nobody
            self.death = side.serving.death or self.death
        self.ended = self.closed or self.death is not None

    # Called by those who run -----------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raises SessionClosedError, or the death."""
        if self.closed:
            raise SessionClosedError("the session was closed", what="session")
        if self.death is not None:
            raise self.death.again()

    def story(self, slot: Slot, run: int) -> OutriderError:
        """Why a run is void."""
        with self._lock:
            told = self._told.wait_for(lambda: run in self._stories or self.death or self.closed, FAILURE_SECONDS)
            teller, found = self._stories.pop(run, (0, None))
        if isinstance(found, BrokenEdgeError):
            return self._broken_edge(slot, run, teller, found)
        if found is not None:
            return found
        if self.death is not None:
            return self.death.again()
        if told:
            return SessionClosedError("the session was closed while a run was failing", what="session")
        generation = self.generation
        assert generation is not None
        partition, board = first_void(generation, slot.index, run) or (0, generation.dones[0][0])
        return self.broken(
            board, f"partition {partition}", f"it is void, and nobody said why for {FAILURE_SECONDS:g} s"
        )

    def broken(self, board: int, value: str, reason: str) -> ProviderContractError:
        """What to raise when a worker's board says of a value what cannot be.

        Who spoils its own board once may have spoilt it for good: the worker is ended, and the next run gets a new one.
        That one shall not meet the end of this one, so it is waited for.
        """
        generation = self.generation
        assert generation is not None
        name = self._end(generation.sides[board], f"it broke the protocol: {value}: {reason}")
        with self._lock:
            self._told.wait_for(lambda: self.death is not None or self.closed, END_SECONDS)
        return ProviderContractError(
            f"provider {name} broke its contract and was ended: what it told of {value!r} cannot be: {reason}",
            provider=name,
            node=value,
            expected="a value as declared, in memory of its own",
            got=reason,
        )

    def end_the_impossible(self, slot: Slot, run: int) -> bool:
        """End the worker that says of the slot's present run what cannot be, so that nobody waits for it; False if
        none does."""
        generation = self.generation
        assert generation is not None
        found = first_impossible(generation, slot.index, run)
        if found is not None:
            board, reason = found
            self._end(generation.sides[board], f"it broke the protocol: {reason}")
        return found is not None

    def _broken_edge(self, slot: Slot, run: int, teller: int, told: BrokenEdgeError) -> OutriderError:
        """A worker could not read what another wrote. That one is blamed if it is so, else who says it."""
        generation = self.generation
        assert generation is not None
        side = generation.sides.get(told.board) if type(told.board) is int else None
        declared = None if side is None else side.declared.edges.get(told.edge)
        if side is None or declared is None:
            return self.broken(teller, str(told.value), "it is said to come from where nothing does")
        published = side.reader.word(told.edge, slot.index)
        if run_of(published) != run or number_of(published) == VOID:
            return self.broken(teller, declared.name, "it was not there to be read")
        try:
            layout = side.reader.layout(told.edge, slot.index, number_of(published))
            if layout.kind == ENCODED:
                value = values.decode(side.reader.memory_of(layout).view[layout.offset :][: layout.nbytes])
                reason = value_misfit(declared, value)
            else:
                reason = ""
        except (LayoutError, WireError) as error:
            reason = str(error)
        if reason:
            return self.broken(told.board, declared.name, reason)
        return self.broken(teller, declared.name, f"it is well-formed, and yet: {told.reason}")

    def _end(self, side: WorkerSide, reason: str) -> str:
        """End the incarnation that writes on a side, and trust its generation no more; the worker's name."""
        generation = self.generation
        assert generation is not None
        generation.spoilt = True
        self.deployer.fleet.monitor.kill(side.serving, reason)
        return side.worker.name

    def died(self, slot: Slot, run: int, death: WorkerDiedError) -> WorkerDiedError:
        """The death, with the first partition that the dead worker owed to this run."""
        generation = self.generation
        assert generation is not None
        for partition, (board, edge) in enumerate(generation.dones):
            side = generation.sides[board]
            if side.worker.name == death.provider and run_of(side.reader.word(edge, slot.index)) != run:
                nodes = generation.partition_nodes[partition]
                first, *output = death.message.splitlines()  # then what it wrote
                how, about, rest = first.partition(" Its last output:")
                owed = f"{how} It owed partition {partition} ({first_names(nodes)}).{about}{rest}"
                story = "\n".join([owed, *output])
                return WorkerDiedError(story, **{**death.fields(), "partition": partition, "nodes": nodes})
        return death.again()
