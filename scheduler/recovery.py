"""What is done about the death of a worker, for one replica, as a pure state machine: events in, instructions out.

    serving --Died--> down --Revive--> reviving --Revived--> loading --Loaded--> resuming --Resumed--> serving
                       │                   └─ Lost ──┐            └─ Lost, Refused ─┤
                       └── Move: plan without it, a new generation ──Moved──► serving
                       └── Down: nothing can be run; until a time, or until somebody asks for a restart

A board is what a worker writes in the present generation; the generation lives on while a worker's successor takes over
its board, so everything that has been computed stays where it is, and the partition that was running runs again. That
happens once for each partition of a run. What cannot go on like that is planned anew: runs that wait for a dead worker
begin again in the new generation. `supervisor.py` carries the instructions out and tells what came of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """The partition that a worker was running when it died. `fixed`: it may run again (none of its nodes is random)."""

    slot: int
    run: int
    partition: int
    fixed: bool = True


@dataclass(frozen=True)
class Died:
    """The worker of a board died without being asked to.

    `running`: what it was doing for this replica; `flights`: (slot, run) of all that are in flight. `wait`: seconds
    until its successor may be started, inf: not before somebody asks. `quarantined`: what it was running is, now.
    """

    board: int
    incarnation: int
    running: Running | None
    flights: tuple[tuple[int, int], ...]
    wait: float
    quarantined: bool = False


@dataclass(frozen=True)
class Revived:
    """A successor has started."""

    board: int
    incarnation: int


@dataclass(frozen=True)
class Loaded:
    """A successor has compiled the worker's partitions."""

    board: int
    incarnation: int


@dataclass(frozen=True)
class Resumed:
    """A successor has taken the board over."""

    board: int
    incarnation: int


@dataclass(frozen=True)
class Lost:
    """There is no successor: it did not start, died before it served, or was ended. `wait`: as for `Died`."""

    board: int
    wait: float


@dataclass(frozen=True)
class Refused:
    """A provider takes a claim back: its successor does not compile a unit, or it cannot be compiled for a new shape.

    What it refused is noted; planning leaves it out.
    """

    board: int


@dataclass(frozen=True)
class Moved:
    """A new generation serves, whoever asked for it.

    `away`: boards that it does without; `wait`: seconds until one of them may come back.
    """

    away: frozenset[int] = frozenset()
    wait: float = math.inf


@dataclass(frozen=True)
class Stuck:
    """No plan can be made or loaded. `wait`: seconds until that may have changed."""

    wait: float


@dataclass(frozen=True)
class Due:
    """The time that `Later` or `Down` named has come."""


@dataclass(frozen=True)
class CloseAsked:
    """The session or fleet is being closed."""


Event = Died | Revived | Loaded | Resumed | Lost | Refused | Moved | Stuck | Due | CloseAsked

# Instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fail:
    """End this run with the death that was told of last, and have workers skip what is left of it."""

    slot: int
    run: int
    partition: int


@dataclass(frozen=True)
class Note:
    """This death counts for a run that goes on: if it dies again, the story has both."""

    slot: int
    run: int
    partition: int


@dataclass(frozen=True)
class Quarantine:
    """A partition has had its second chance: its provider gets these nodes no more."""

    partition: int


@dataclass(frozen=True)
class Revive:
    """Start a successor, or promote the spare. Answered by Revived or Lost."""

    board: int


@dataclass(frozen=True)
class Load:
    """Have it compile the worker's partitions. Answered by Loaded, Refused or Lost."""

    board: int
    incarnation: int


@dataclass(frozen=True)
class Resume:
    """Have it take the board over. Answered by Resumed or Lost."""

    board: int
    incarnation: int


@dataclass(frozen=True)
class Move:
    """Plan anew and load a new generation; runs that wait for one of `gone` begin again there. Moved or Stuck."""

    gone: frozenset[int]


@dataclass(frozen=True)
class Down:
    """No run that needs one of `gone` can be served, for `wait` seconds at least."""

    gone: frozenset[int]
    wait: float


@dataclass(frozen=True)
class Later:
    """Say Due in so many seconds."""

    wait: float


Instruction = Fail | Note | Quarantine | Revive | Load | Resume | Move | Down | Later


class Recovery:
    """Of one replica. `replay`, `fallback`: as in SessionOptions."""

    def __init__(self, replay: bool, fallback: bool) -> None:
        self.replay = replay
        self.fallback = fallback
        self.state = "serving"
        """'serving', 'moving', 'down' or 'closed'."""
        self.boards: dict[int, tuple[str, int]] = {}
        """Those that are not served: what is being done, and the incarnation that died last or is to serve."""
        self.replayed: dict[tuple[int, int], set[int]] = {}
        """(slot, run) -> the partitions that have had their second chance."""
        self.away: frozenset[int] = frozenset()

    def handle(self, event: Event) -> list[Instruction]:
        """The next state and what to do. What comes too late, of an earlier generation or incarnation, does nothing."""
        if self.state == "closed":
            return []
        if isinstance(event, CloseAsked):
            self.state = "closed"
            self.boards.clear()
            self.replayed.clear()
            return []
        if isinstance(event, (Moved, Stuck)):
            return self._moved(event) if isinstance(event, Moved) or self.state == "moving" else []
        if isinstance(event, Due):
            return self._move() if self.state == "down" or (self.state == "serving" and self.away) else []
        if self.state == "down" and isinstance(event, Died):
            self.boards[event.board] = ("down", event.incarnation)
            return [Down(frozenset(self.boards), event.wait)]
        if self.state != "serving":
            return []  # a new generation will find out for itself
        if isinstance(event, Died):
            return self._died(event)
        if isinstance(event, Refused):
            self.boards.setdefault(event.board, ("refused", 0))
            return self._move() if self.fallback else self._down(math.inf)
        if isinstance(event, Lost):
            return self._gone(event.board, event.wait) if event.board in self.boards else []
        return self._step(event)

    def _died(self, event: Died) -> list[Instruction]:
        state, incarnation = self.boards.get(event.board, ("serving", 0))
        if state != "serving" and event.incarnation < incarnation:
            return []
        self.boards[event.board] = ("down", event.incarnation)
        self.replayed = {key: parts for key, parts in self.replayed.items() if key in event.flights}
        made: list[Instruction] = []
        running, again = event.running, True
        if running is not None:
            slot, run, partition = running.slot, running.run, running.partition
            spent = self.replayed.setdefault((slot, run), set())
            if not self.replay or not running.fixed:
                made.append(Fail(slot, run, partition))
            elif event.quarantined or partition in spent:
                made.append(Note(slot, run, partition) if self.fallback else Fail(slot, run, partition))
                again = False
            else:
                spent.add(partition)
                made.append(Note(slot, run, partition))
            if not again and not event.quarantined:
                made.append(Quarantine(partition))
            again = again and not event.quarantined
        if not again:
            return made + self._move() if self.fallback else self._down(math.inf) + made
        then = self._gone(event.board, event.wait)
        # Who is told that a run has failed finds the replica as it is from now on.
        return then + made if self.state == "down" else made + then

    def _gone(self, board: int, wait: float) -> list[Instruction]:
        """A board without a worker: start one, or do without."""
        if wait <= 0:
            self.boards[board] = ("reviving", self.boards[board][1])
            return [Revive(board)]
        self.boards[board] = ("down", self.boards[board][1])
        return self._move() if self.fallback else self._down(wait)

    def _step(self, event: Revived | Loaded | Resumed) -> list[Instruction]:
        state, incarnation = self.boards.get(event.board, ("serving", 0))
        if isinstance(event, Revived) and state == "reviving":
            self.boards[event.board] = ("loading", event.incarnation)
            return [Load(event.board, event.incarnation)]
        if incarnation != event.incarnation:
            return []
        if isinstance(event, Loaded) and state == "loading":
            self.boards[event.board] = ("resuming", event.incarnation)
            return [Resume(event.board, event.incarnation)]
        if isinstance(event, Resumed) and state == "resuming":
            del self.boards[event.board]
        return []

    def _move(self) -> list[Instruction]:
        self.state = "moving"
        return [Move(frozenset(self.boards))]

    def _down(self, wait: float) -> list[Instruction]:
        self.state = "down"
        return [Down(frozenset(self.boards), wait)]

    def _moved(self, event: Moved | Stuck) -> list[Instruction]:
        if isinstance(event, Stuck):
            return self._down(event.wait)
        self.state = "serving"
        self.boards.clear()
        self.replayed.clear()
        self.away = event.away
        return [Later(event.wait)] if event.away and event.wait < math.inf else []
