"""The supervisor of a replica: it carries out what `recovery.py` decides, in a thread that starts at the first death.

All that takes time is done here, one thing after the other: starting a worker's successor, loading it, having it take
over, or planning anew and loading a new generation. Callers only wait for their runs; what they are told comes through
their replica.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.wire.failures import first_names
from outrider.scheduler import recovery, story
from outrider.scheduler.blame import misread
from outrider.scheduler.closing import closed_error
from outrider.scheduler.errors import OutriderError, WorkerDiedError
from outrider.scheduler.evidence import set_right, unreadable
from outrider.scheduler.generation import Generation
from outrider.scheduler.numbering import Blueprint
from outrider.scheduler.replica import Outage, Replica, Slot
from outrider.scheduler.slots import Slots
from outrider.scheduler.trace import Tracing
from outrider.scheduler.worker import Incarnation, Worker

log = logging.getLogger("outrider.session")

JOIN_SECONDS = 5.0
MUSTER_SECONDS = 30.0  # that a session waits for others to load


class Supervisor:
    """Of one replica. It knows nothing of the session, so that one that is dropped is closed."""

    def __init__(self, replica: Replica, slots: Slots[Slot], tracing: Tracing) -> None:
        self.replica = replica
        self.placer = replica.placer
        self.deployer = replica.deployer
        self.fleet = replica.deployer.fleet
        self._log = self.fleet.monitor.log_queue.logger(log.name)
        self.options = replica.placer.options
        self._slots = slots
        self._tracing = tracing
        self._died: Incarnation | None = None  # of whose death the machine was told last
        self._mending: Generation | None = None  # in which that was
        self._why: OutriderError | None = None  # nothing can be done at present
        self._asked: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False
        self.planning = threading.RLock()
        """Held by who plans and loads: the supervisor, or a session that is made or learns."""
        replica.supervise = self._on_death
        replica.respare = self._on_spare_lost
        replica.reconsider = self._on_restart

    # From any thread ------------------------------------------------------------------------------------------------
    def call(self, action: Callable[[], None]) -> None:
        """Have it do this, after all that was asked before."""
        with self._lock:
            if self._closed:
                return
            self._asked.append(action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="outrider-supervisor", daemon=True)
                self._thread.start()
            self._told.notify_all()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have it do this after so many seconds."""
        self.call(lambda: heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._ties), action)))

    def tell(self, event: recovery.Event) -> None:
        """Have the machine handle an event, and what it decides carried out."""
        self.call(lambda: self._handle(event))

    def refuse(self, generation: int, nodes: list[str], provider: str, reason: str) -> None:
        """A provider takes its claim on these nodes back, as they cannot be compiled for a new shape.

        `Replica.settled` waits for what comes of that.
        """

        def refused() -> None:
            try:
                present = self.replica.generation
                if present is None or present.number != generation:
                    return  # somebody else has said so
                position = next(i for i, worker in enumerate(self.placer.workers) if worker.name == provider)
                self.placer.take_back(position, nodes, reason)
                self._handle(recovery.Refused(self.placer.workers[position].index + 1))
            finally:
                self.replica.refused(-1)

        self.replica.refused(1)
        self.call(refused)

    def close(self) -> None:
        """End the thread; the replica has been told that it is closed. Idempotent."""
        with self._lock:
            self._closed = True
            self._told.notify_all()
        self.deployer.abandon()
        self.fleet.excuse(self.deployer.session, self.placer.workers)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)  # on a shared fleet a worker may take longer to start
        self._died = self._mending = self._why = None  # they hold a generation

    # On its thread --------------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (self._asked or self._closed):
                    due = self._timers[0][0] - time.monotonic() if self._timers else None
                    if due is not None and due <= 0:
                        self._asked.append(heapq.heappop(self._timers)[2])
                        break
                    self._told.wait(due)
                if self._closed:
                    return
                action = self._asked.popleft()
            try:
                action()
            except Exception as error:  # a fault of ours: nobody may be left waiting
                if self.replica.closed:
                    continue
                log.critical("the supervisor of a session failed", exc_info=True)
                self.replica.go_down(Outage("outrider", f"its supervisor failed: {error!r}", math.inf))
                self.replica.wake()

    def _handle(self, event: recovery.Event) -> None:
        todo = collections.deque(self.replica.recovery.handle(event))
        while todo and not self._closed:
            told = self._carry_out(todo.popleft())
            if told is not None:
                todo += self.replica.recovery.handle(told)
        if self.replica.outage is not None:
            self.replica.wake()
        self._slots.look()

    def _carry_out(self, instruction: recovery.Instruction) -> recovery.Event | None:
        if isinstance(instruction, recovery.Fail):
            self.replica.end(instruction.slot, instruction.run, self._story(instruction))
        elif isinstance(instruction, recovery.Note):
            self.replica.attempts.setdefault(instruction.run, []).append(self._story(instruction))
        elif isinstance(instruction, recovery.Quarantine):
            generation = self.replica.generation
            if generation is not None and self._died is not None:
                self._blame(generation.partition_nodes[instruction.partition], self._died.worker)
        elif isinstance(instruction, recovery.Revive):
            return self._revive(instruction.board)
        elif isinstance(instruction, recovery.Load):
            return self._load(instruction.board, instruction.incarnation)
        elif isinstance(instruction, recovery.Resume):
            return self._resume(instruction.board, instruction.incarnation)
        elif isinstance(instruction, recovery.Move):
            return self._move()
        elif isinstance(instruction, recovery.Down):
            self._go_down(instruction)
        else:
            self._after(instruction.wait)
        return None

    # Deaths ---------------------------------------------------------------------------------------------------------
    def _on_death(self, replica: Replica, generation: int, one: Incarnation) -> None:
        self.call(lambda: self._mourn(generation, one))

    def _mourn(self, generation: int, one: Incarnation) -> None:
        replica, present, worker = self.replica, self.replica.generation, one.worker
        running = replica.dying.pop(one, None)
        board = worker.index + 1
        if present is None or present.number != generation or present.sides[board].serving is not one:
            return
        if running is not None and present.cancelled(running.slot, running.run):
            running = None  # nobody waits for that run any more
        flights = tuple(replica.flights())
        in_flight = {run for _, run in flights}
        replica.attempts = {run: told for run, told in replica.attempts.items() if run in in_flight}
        self._died, self._mending, self._why = one, present, None
        blamed = running if not one.spared else None
        quarantined = blamed is not None and self._blame(present.partition_nodes[blamed.partition], worker)
        self._log.warning("%s", _first_line(one))
        wait = worker.restarts.wait(time.monotonic())
        self._handle(recovery.Died(board, one.number, running, flights, wait, quarantined))

    def _blame(self, nodes: list[str], worker: Worker) -> bool:
        return self.fleet.quarantine.blame(self.placer.model, nodes, worker.name, worker.deaths)

    def _story(self, of: recovery.Fail | recovery.Note) -> WorkerDiedError:
        """The last death, as the one that this run has to tell of."""
        one, generation = self._died, self.replica.generation
        assert one is not None and one.facts is not None and generation is not None
        before = [story.attempt(error) for error in self.replica.attempts.get(of.run, [])]
        nodes = generation.partition_nodes[of.partition]
        return story.died(replace(one.facts, phase="run", partition=of.partition, nodes=nodes, attempts=before))

    # A successor ----------------------------------------------------------------------------------------------------
    def _worker(self, board: int) -> Worker:
        return next(worker for worker in self.placer.workers if worker.index + 1 == board)

    def _revive(self, board: int) -> recovery.Event:
        worker = self._worker(board)
        try:
            one = self.fleet.revive(worker)
        except ProviderUnavailableError as error:
            return self._lost(board, error)
        self._tracing.watch(self.deployer, self.placer.workers)
        return recovery.Revived(board, one.number)

    def _lost(self, board: int, error: OutriderError) -> recovery.Lost:
        worker = self._worker(board)
        self._why = error
        self.fleet.excuse(self.deployer.session, [worker])
        if isinstance(error, WorkerDiedError):
            return recovery.Lost(board, worker.restarts.wait(time.monotonic()))
        seconds = error.seconds if isinstance(error, ProviderUnavailableError) else None
        return recovery.Lost(board, math.inf if seconds is None else seconds)

    def _load(self, board: int, incarnation: int) -> recovery.Event | None:
        with self.planning:
            generation, one = self._mending, self._worker(board).current
            if generation is None or generation is not self.replica.generation:
                return None  # somebody has placed the model anew, and told so
            return self._load_into(generation, board, one, incarnation)

    def _load_into(self, generation: Generation, board: int, one: Incarnation, incarnation: int) -> recovery.Event:
        if one.number != incarnation:
            return recovery.Lost(board, 0.0)  # another session's death has brought one more
        try:
            refused = [] if self.deployer.holds(generation, one) else self.deployer.load_again(generation, board, one)
        except OutriderError as error:
            return self._lost(board, error)
        finally:
            one.muster.arrive(self.deployer.session)
        if refused:
            try:
                self.placer.refuse(generation.blueprint, refused)
            except OutriderError as error:
                self._why = error
            return recovery.Refused(board)
        return recovery.Loaded(board, incarnation)

    def _resume(self, board: int, incarnation: int) -> recovery.Event | None:
        one = self._worker(board).current
        if one.number == incarnation and not one.muster.complete(min(self.deployer.deadline, MUSTER_SECONDS)):
            self._log.warning(
                "another session has not loaded its part into worker %s; this one goes on", one.worker.name
            )
        with self.planning:
            generation, one = self._mending, self._worker(board).current
            if generation is None or generation is not self.replica.generation:
                return None
            if one.number != incarnation:
                return recovery.Lost(board, 0.0)
            if board in generation.spoilt:
                generation.righted[board] = set_right(generation, board)
                generation.spoilt.discard(board)
            for slot, run, value, reason in unreadable(generation, board, self.replica.flights()):
                generation.righted[board] = max(run, generation.righted.get(board, 0))
                self.replica.end(slot, run, misread(one.worker.name, value, reason))
            self.replica.about_to_serve(board, one)
            try:
                self.deployer.resume(generation, board, one, self.replica.flights())
            except OutriderError as error:
                # A death is told of as any, since it serves already; else it has no memory, or hangs.
                if not (isinstance(error, WorkerDiedError) or self.replica.closed):
                    self.fleet.monitor.kill(one, f"it could not take over: {error}")
                return None
        self.replica.serves_again()
        self.keep_spares()
        return recovery.Resumed(board, incarnation)

    # A new generation -----------------------------------------------------------------------------------------------
    def _move(self) -> recovery.Event:
        replica = self.replica
        replica.begin_to_move()
        self._slots.look()
        self.fleet.excuse(self.deployer.session, self.placer.workers)
        self._slots.take_all(replica.slots)
        replica.may_move()
        try:
            if replica.closed:
                return recovery.Stuck(math.inf)
            away = self.place()
        except (OutriderError, OSError, MemoryError) as error:
            self._why = error if isinstance(error, OutriderError) else None
            self._log.warning("a session cannot be placed anew: %s", str(error))
            return recovery.Stuck(self._soonest() if self._time_helps() else math.inf)
        finally:
            self._slots.give_all()
        return self._moved(away)

    def place_anew(self, blueprint: Blueprint | None = None) -> None:
        """`place` by somebody else than the supervisor, who has taken all slots."""
        with self.planning:
            self.place(blueprint, lambda away: self.tell(self._moved(away)))

    def _moved(self, away: list[Worker]) -> recovery.Moved:
        return recovery.Moved(frozenset(worker.index + 1 for worker in away), self._soonest())

    def place(
        self, blueprint: Blueprint | None = None, before: Callable[[list[Worker]], None] = lambda away: None
    ) -> list[Worker]:
        """Plan, load and install, without providers that cannot be used now (returned); `blueprint`: the first plan.

        `before` is called with these before the new generation is installed, so before any death of its workers counts.

        Called by who has taken all slots, or when nobody can run yet. Raises the errors of planning, ClaimBrokenError,
        WorkerDiedError and ProviderUnavailableError where no other claimant may take over.
        """
        with self.planning:
            attempts: dict[Worker, list[WorkerDiedError]] = {}
            late: dict[Worker, str] = {}
            while True:
                if self._closed:
                    raise closed_error("session", "the session was closed")
                away = self._unusable(late)
                needed = next((error for one, error in away.items() if not self.placer.replaceable(one)), None)
                if needed is not None:
                    raise needed
                if blueprint is None or away:
                    try:
                        blueprint = self.placer.replan({worker: str(error.reason) for worker, error in away.items()})
                    except OutriderError as error:
                        if attempts:  # that is why
                            raise next(reversed(attempts.values()))[-1] from error
                        raise
                try:
                    generation = self.deployer.deploy(blueprint)
                except WorkerDiedError as death:
                    self._died_loading(death, blueprint, attempts)
                    blueprint = None
                    continue
                except ProviderUnavailableError as error:  # the load deadline
                    worker = next((one for one in blueprint.workers if one.name == error.provider), None)
                    if worker is None or not self.placer.replaceable(worker) or self.fleet.closed:
                        raise
                    self.placer.notes.append(f"{worker.name} goes without its part: {error.reason}")
                    late[worker] = str(error.reason)
                    continue
                if generation.refused:
                    generation.close()
                    self.placer.refuse(blueprint, generation.refused)
                    blueprint = None
                    continue
                if self._closed:
                    generation.close()
                    raise closed_error("session", "the session was closed")
                before(list(away))
                self.replica.install(blueprint, generation)
                self._tracing.installed(self.replica)
                self.keep_spares()
                return list(away)

    def _unusable(self, late: dict[Worker, str]) -> dict[Worker, ProviderUnavailableError]:
        """Workers that are dead and may not or cannot be started now; the others are alive then."""
        away: dict[Worker, ProviderUnavailableError] = {}
        for worker in self.placer.workers:
            if worker in late:
                away[worker] = ProviderUnavailableError(late[worker], provider=worker.name, reason=late[worker])
                continue
            try:
                one = self.fleet.revive(worker)
            except ProviderUnavailableError as error:
                away[worker] = error
            else:
                one.muster.arrive(self.deployer.session)
        self._tracing.watch(self.deployer, self.placer.workers)
        return away

    def _died_loading(
        self, death: WorkerDiedError, blueprint: Blueprint, attempts: dict[Worker, list[WorkerDiedError]]
    ) -> None:
        """A worker died while it loaded its part: once is forgiven, with `replay`. Raises the death."""
        worker = next(one for one in blueprint.workers if one.name == death.provider)
        before = attempts.setdefault(worker, [])
        facts = worker.current.facts
        if facts is not None and facts.incarnation == death.incarnation:
            nodes: list[str] = []
            if facts.phase == "load" and facts.partition is not None:
                nodes = blueprint.nodes_of(facts.partition)
                self._blame(nodes, worker)
            told = [story.attempt(error) for error in before]
            death = story.died(replace(facts, nodes=nodes, attempts=told))
        before.append(death)
        if len(before) > 1 or not self.options.replay:
            if not self.placer.replaceable(worker):
                raise death
            self.placer.notes.append(f"{worker.name} died when it loaded its part of the model")
        self._log.warning("%s", death.message.splitlines()[0])

    def _time_helps(self) -> bool:
        """Whether the model could be placed if every provider could be started."""
        with self.planning:
            try:
                self.placer.replan()
            except OutriderError:
                return False
            return True

    def _soonest(self) -> float:
        """Seconds until a provider that may not be started now may be; inf if none ever."""
        now = time.monotonic()
        waits = [worker.restarts.wait(now) for worker in self.placer.workers if not worker.alive]
        return min((wait for wait in waits if wait > 0), default=math.inf)

    def _go_down(self, down: recovery.Down) -> None:
        """Say why nothing can be run. `_why` is the reason, or the partition that is quarantined."""
        why, one, now = self._why, self._died, time.monotonic()
        gone = [self._worker(board) for board in sorted(down.gone)]
        provider = (gone or self.placer.workers)[0].name
        if isinstance(why, ProviderUnavailableError) and why.provider:
            provider, reason = str(why.provider), str(why.reason)
        elif self.fleet.quarantine.holds(self.placer.model, provider):
            nodes = first_names(self.fleet.quarantine.holds(self.placer.model, provider)[0])
            reason = f"it died twice in a row when it ran {nodes}, which is quarantined"
        elif away := [worker for worker in gone if worker.restarts.wait(now) > 0]:
            provider, reason = away[0].name, away[0].restarts.reason()
        elif why is not None and not isinstance(why, WorkerDiedError):
            reason = why.message
        else:
            reason = gone[0].restarts.reason() if gone else "nothing can be placed"
        cause = why or (None if one is None else one.death)
        self._why = None
        self.fleet.excuse(self.deployer.session, gone)
        self.replica.go_down(Outage(provider, reason, now + down.wait, cause))
        self._after(down.wait)

    def _after(self, wait: float) -> None:
        if wait < math.inf:
            self.later(wait, lambda: self._handle(recovery.Due()))

    def _on_restart(self, worker: Worker) -> None:
        """Another session had a worker restarted that this one may do without: it need not wait for its time."""
        if self._thread is not None and worker in self.placer.workers:
            self.call(lambda: self._handle(recovery.Due()))

    # Spares ---------------------------------------------------------------------------------------------------------
    def keep_spares(self) -> None:
        """Have a spare of each worker that serves started and loaded, in the background."""
        generation = self.replica.generation
        if not self.options.spares or generation is None:
            return
        for board, side in generation.sides.items():
            self.call(functools.partial(self._prepare, generation, board, side.worker))

    def _on_spare_lost(self, worker: Worker) -> None:
        if self.options.spares and worker in self.placer.workers:
            self.later(min(2.0 ** min(worker.spare_deaths, 6), 60.0), self.keep_spares)

    def _prepare(self, generation: Generation, board: int, worker: Worker) -> None:
        try:
            if self.replica.generation is not generation or not worker.alive:
                return
            spare = self.fleet.spare(worker)
            with self.planning:
                if self.replica.generation is not generation or self.deployer.holds(generation, spare):
                    return
                refused = self.deployer.load_again(generation, board, spare)
                if refused:
                    reason = refused[0].reason
                    self._log.warning("a spare of worker %s refuses what it should load: %s", worker.name, reason)
        except (WorkerDiedError, ProviderUnavailableError) as error:
            self._log.warning("there is no spare of worker %s: %s", worker.name, str(error))


def _first_line(one: Incarnation) -> str:
    return "" if one.death is None else one.death.message.splitlines()[0]
