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

from outrider.providers.wire import messages
from outrider.providers.wire.failures import first_names
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.errors import SessionClosedError, WorkerDiedError
from outrider.scheduler.failures import error_of
from outrider.scheduler.generation import Generation
from outrider.scheduler.inplace import Admission, Targets
from outrider.scheduler.numbering import Blueprint
from outrider.scheduler.placement import Placer
from outrider.scheduler.steady import Copies, Signature, SteadyRun
from outrider.scheduler.worker import Incarnation
from outrider.shm.board import run_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import OutriderError
from outrider.shm.spin import Spin

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
        self._stories: dict[int, OutriderError] = {}
        self._lock = threading.Lock()  # in `with`: a signal within Condition.__enter__ would leave it locked for ever
        self._told = threading.Condition(self._lock)

    # Told by the monitor's thread -----------------------------------------------------------------------------------
    def on_failed(self, message: messages.Failed) -> None:
        """A partition failed: keep the first story of each run."""
        generation = self.generation
        if generation is None or message.generation != generation.number:
            return
        with self._lock:
            if message.run not in self._stories:
                self._stories[message.run] = error_of(message, generation)
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

    def story(self, run: int) -> OutriderError:
        """Why a run is void."""
        with self._lock:
            told = self._told.wait_for(lambda: run in self._stories or self.death or self.closed, FAILURE_SECONDS)
            if run in self._stories:
                return self._stories.pop(run)
        if told and self.death is not None:
            return self.death.again()
        return SessionClosedError("the session was closed while a run was failing", what="session")

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
