"""The recovery of a replica, walked through every order of deaths, hangs, cancels, reloads, retries and closing.

`World` is a small model of what supervisor and workers do. It carries instructions out, in steps that events may
come between, and sees to the promises: each run ends exactly once, a slot serves one run, no instruction goes to a dead
incarnation, what is quarantined stays so, and a close ends everything.
"""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler import recovery
from outrider.scheduler.recovery import (
    CloseAsked,
    Died,
    Down,
    Due,
    Fail,
    Later,
    Load,
    Loaded,
    Lost,
    Move,
    Moved,
    Note,
    Quarantine,
    Recovery,
    Refused,
    Resume,
    Resumed,
    Revive,
    Revived,
    Running,
    Stuck,
)

pytestmark = pytest.mark.fast


def serving(replay: bool = True, fallback: bool = True) -> Recovery:
    return Recovery(replay, fallback)


RUNNING = Running(0, 7, 3)


def mend(machine: Recovery, board: int, incarnation: int) -> None:
    assert machine.handle(Revived(board, incarnation)) == [Load(board, incarnation)]
    assert machine.handle(Loaded(board, incarnation)) == [Resume(board, incarnation)]
    assert machine.handle(Resumed(board, incarnation)) == []
    assert machine.boards == {}


def test_an_idle_worker_is_replaced_and_nobody_is_blamed() -> None:
    machine = serving()
    assert machine.handle(Died(1, 1, None, ((0, 7),), 0.0)) == [Revive(1)]
    mend(machine, 1, 2)
    assert machine.replayed == {}


def test_the_partition_that_was_running_runs_again_once() -> None:
    machine = serving()
    assert machine.handle(Died(1, 1, RUNNING, ((0, 7),), 0.0)) == [Note(0, 7, 3), Revive(1)]
    mend(machine, 1, 2)
    again = machine.handle(Died(1, 2, RUNNING, ((0, 7),), 0.0))
    assert again == [Note(0, 7, 3), Quarantine(3), Move(frozenset({1}))]
    assert machine.handle(Moved(frozenset({1}), 4.0)) == [Later(4.0)]
    assert machine.handle(Due()) == [Move(frozenset())]


def test_without_fallback_the_second_death_ends_the_run_and_no_other_begins() -> None:
    machine = serving(fallback=False)
    machine.handle(Died(1, 1, RUNNING, ((0, 7),), 0.0))
    mend(machine, 1, 2)
    assert machine.handle(Died(1, 2, RUNNING, ((0, 7),), 1.0, quarantined=True)) == [
        Down(frozenset({1}), math.inf),
        Fail(0, 7, 3),
    ]


def test_another_partition_of_the_run_has_a_second_chance_of_its_own() -> None:
    machine = serving()
    machine.handle(Died(1, 1, RUNNING, ((0, 7),), 0.0))
    mend(machine, 1, 2)
    assert machine.handle(Died(1, 2, Running(0, 7, 4), ((0, 7),), 0.0)) == [Note(0, 7, 4), Revive(1)]


@pytest.mark.parametrize("running", [RUNNING, Running(0, 7, 3, fixed=False)])
def test_what_may_not_run_again_fails_and_the_worker_is_replaced(running: Running) -> None:
    machine = serving(replay=not running.fixed)
    assert machine.handle(Died(1, 1, running, ((0, 7),), 0.0)) == [Fail(0, 7, 3), Revive(1)]


def test_a_worker_in_back_off_is_done_without_or_waited_for() -> None:
    assert serving().handle(Died(1, 3, None, (), 2.0)) == [Move(frozenset({1}))]
    machine = serving(fallback=False)
    assert machine.handle(Died(1, 3, None, (), 2.0)) == [Down(frozenset({1}), 2.0)]
    assert machine.handle(Due()) == [Move(frozenset({1}))]
    assert machine.handle(Stuck(math.inf)) == [Down(frozenset({1}), math.inf)]


def test_a_successor_that_refuses_or_is_lost() -> None:
    machine = serving()
    machine.handle(Died(1, 1, None, (), 0.0))
    machine.handle(Revived(1, 2))
    assert machine.handle(Refused(1)) == [Move(frozenset({1}))]
    machine = serving(fallback=False)
    machine.handle(Died(1, 1, None, (), 0.0))
    assert machine.handle(Lost(1, math.inf)) == [Down(frozenset({1}), math.inf)]


def test_what_comes_from_an_earlier_incarnation_does_nothing() -> None:
    machine = serving()
    machine.handle(Died(1, 1, None, (), 0.0))
    machine.handle(Revived(1, 3))
    for late in (Loaded(1, 2), Resumed(1, 2), Resumed(1, 3), Loaded(2, 1), Lost(2, 0.0), Died(1, 2, None, (), 0.0)):
        assert machine.handle(late) == []
    assert machine.handle(Loaded(1, 3)) == [Resume(1, 3)]


def test_closing_ends_it() -> None:
    machine = serving()
    machine.handle(Died(1, 1, RUNNING, ((0, 7),), 0.0))
    assert machine.handle(CloseAsked()) == []
    for event in (Revived(1, 2), Died(2, 1, None, (), 0.0), Moved(), Due()):
        assert machine.handle(event) == []


BOARDS = (1, 2)
PARTITIONS = {0: 1, 1: 2, 2: 1}  # partition -> board: every run goes through 0, 1, 2 in order
SLOTS = 2


class World:
    """Two workers, three partitions in a row, two slots. `draw` decides what happens next."""

    def __init__(self, draw, replay: bool, fallback: bool) -> None:  # type: ignore[no-untyped-def]
        self.draw = draw
        self.machine = Recovery(replay, fallback)
        self.events: deque[tuple[int, recovery.Event]] = deque()  # (generation, event)
        self.todo: deque[recovery.Instruction] = deque()
        self.generation = 1
        self.incarnation = dict.fromkeys(BOARDS, 1)  # the latest of each board
        self.alive = dict.fromkeys(BOARDS, True)
        self.serving = dict.fromkeys(BOARDS, 1)  # the incarnation that serves the present generation
        self.away: frozenset[int] = frozenset()
        self.loaded: set[tuple[int, int, int]] = {(1, board, 1) for board in BOARDS}
        self.in_slot: dict[int, int] = {}  # slot -> run
        self.at: dict[int, int] = {}  # run -> the partition it waits for or is in
        self.ended: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.runs = 0
        self.row = dict.fromkeys(BOARDS, 0)  # deaths in a row
        self.blamed: dict[tuple[int, int], int] = {}  # (partition, board) -> deaths in a row
        self.quarantined: set[tuple[int, int]] = set()
        self.released: set[tuple[int, int]] = set()
        self.down = False
        self.closed = False

    # What users and workers do ---------------------------------------------------------------------------------------
    def begin(self) -> None:
        free = [slot for slot in range(SLOTS) if slot not in self.in_slot]
        if free and not (self.closed or self.down or self.machine.state == "moving"):
            self.runs += 1
            self.in_slot[free[0]] = self.runs
            self.at[self.runs] = 0

    def board_of(self, partition: int) -> int:
        board = PARTITIONS[partition]
        return board if board not in self.away else next(one for one in BOARDS if one not in self.away)

    def can_run(self, board: int) -> bool:
        return self.alive[board] and self.serving[board] == self.incarnation[board] and board not in self.machine.boards

    def work(self) -> None:
        """One partition of one run is served, or skipped where its run is cancelled."""
        ready = [(slot, run) for slot, run in self.in_slot.items() if self.can_run(self.board_of(self.at[run]))]
        if not ready:
            return
        slot, run = self.draw(st.sampled_from(ready))
        partition = self.at[run]
        board = self.board_of(partition)
        if run not in self.cancelled:
            self.row[board] = 0
            if (partition, board) not in self.quarantined:
                self.blamed.pop((partition, board), None)
        if partition < max(PARTITIONS):
            self.at[run] += 1
        else:
            self.leave(slot, run, "done")

    def leave(self, slot: int, run: int, how: str) -> None:
        if run not in self.ended:
            self.ended[run] = how
        elif how != "done":
            raise AssertionError(f"run {run} ends twice: {self.ended[run]}, {how}")
        if how == "done" or self.generation_gone(run):
            del self.in_slot[slot]

    def generation_gone(self, run: int) -> bool:
        return False

    def die(self) -> None:
        living = [board for board in BOARDS if self.alive[board]]
        if not living:
            return
        board = self.draw(st.sampled_from(living))
        candidates = [
            (slot, run)
            for slot, run in self.in_slot.items()
            if self.board_of(self.at[run]) == board and self.can_run(board) and run not in self.cancelled
        ]
        running = None
        if candidates and self.draw(st.booleans()):
            slot, run = self.draw(st.sampled_from(candidates))
            running = Running(slot, run, self.at[run], self.draw(st.booleans()))
        self.alive[board] = False
        self.row[board] += 1
        quarantined = False
        if running is not None:
            key = (running.partition, board)
            self.blamed[key] = self.blamed.get(key, 0) + 1
            quarantined = self.blamed[key] >= 2
            if quarantined:
                self.quarantined.add(key)
        if self.serving[board] == self.incarnation[board]:
            flights = tuple(self.in_slot.items())
            event = Died(board, self.incarnation[board], running, flights, self.wait(board), quarantined)
            self.events.append((self.generation, event))

    def wait(self, board: int) -> float:
        return (0.0, 0.0, 1.0, 2.0, 4.0)[self.row[board]] if self.row[board] < 5 else 60.0

    def cancel(self) -> None:
        """A caller leaves; its slot is taken until the run has drained."""
        running = [(slot, run) for slot, run in self.in_slot.items() if run not in self.ended]
        if running:
            slot, run = self.draw(st.sampled_from(running))
            self.cancelled.add(run)
            self.ended[run] = "cancelled"

    # What the supervisor does ----------------------------------------------------------------------------------------
    def step(self) -> None:
        """Carry out one instruction, or handle one event."""
        if self.todo:
            self.carry_out(self.todo.popleft())
        elif self.events:
            generation, event = self.events.popleft()
            if generation == self.generation:
                self.todo += self.machine.handle(event)

    def tell(self, event: recovery.Event) -> None:
        self.todo += self.machine.handle(event)

    def carry_out(self, instruction: recovery.Instruction) -> None:
        if isinstance(instruction, Fail):
            assert self.in_slot.get(instruction.slot) == instruction.run or instruction.run in self.ended
            if instruction.run not in self.ended:
                self.ended[instruction.run] = "failed"
                self.cancelled.add(instruction.run)
        elif isinstance(instruction, Quarantine):
            for board in BOARDS:
                if self.board_of(instruction.partition) == board:
                    self.quarantined.add((instruction.partition, board))
        elif isinstance(instruction, Revive):
            board = instruction.board
            if self.wait(board) > 0 or self.draw(st.integers(0, 9)) == 0:
                self.tell(Lost(board, self.wait(board) or math.inf))
                return
            if not self.alive[board]:
                self.incarnation[board] += 1
                self.alive[board] = True
            self.tell(Revived(board, self.incarnation[board]))
        elif isinstance(instruction, Load):
            board = instruction.board
            if not self.alive[board]:
                self.tell(Lost(board, self.wait(board)))
            elif self.draw(st.integers(0, 9)) == 0:
                self.tell(Refused(board))
            else:
                assert instruction.incarnation == self.incarnation[board], "an instruction to a dead incarnation"
                self.loaded.add((self.generation, board, instruction.incarnation))
                self.tell(Loaded(board, instruction.incarnation))
        elif isinstance(instruction, Resume):
            board, incarnation = instruction.board, instruction.incarnation
            assert (self.generation, board, incarnation) in self.loaded, "it resumes what it has not loaded"
            if not self.alive[board]:
                self.serving[board] = incarnation
                self.events.append(
                    (self.generation, Died(board, incarnation, None, tuple(self.in_slot.items()), self.wait(board)))
                )
                return
            assert incarnation == self.incarnation[board], "an instruction to a dead incarnation"
            self.serving[board] = incarnation
            self.tell(Resumed(board, incarnation))
        elif isinstance(instruction, Move):
            self.move()
        elif isinstance(instruction, Down):
            self.down = True
            for run in list(self.in_slot.values()):
                if run not in self.ended and any(not self.alive[self.board_of(p)] for p in range(self.at[run], 3)):
                    self.ended[run] = "unavailable"
                    self.cancelled.add(run)

    def restart(self) -> None:
        """Somebody places the model anew, with no run in flight: what was held against providers is forgotten."""
        if self.in_slot or self.todo or self.machine.state == "moving":
            return
        self.row = dict.fromkeys(BOARDS, 0)
        self.blamed.clear()
        self.released |= self.quarantined
        self.quarantined.clear()
        self.move()

    def move(self) -> None:
        """All slots are taken first: what can end does, what waits for the dead begins again."""
        for slot, run in list(self.in_slot.items()):
            if run in self.ended:
                del self.in_slot[slot]
            elif all(self.can_run(self.board_of(p)) for p in range(self.at[run], 3)):
                self.ended[run] = "done"
                del self.in_slot[slot]
            else:
                self.at[run] = 0
        away = set()
        for board in BOARDS:
            if not self.alive[board]:
                if self.wait(board) > 0:
                    away.add(board)
                else:
                    self.incarnation[board] += 1
                    self.alive[board] = True
        usable = [board for board in BOARDS if board not in away]
        if not usable or (away and not self.machine.fallback):
            self.tell(Stuck(max(map(self.wait, away)) if away else math.inf))
            return
        self.generation += 1
        self.away, self.down = frozenset(away), False
        self.serving = dict(self.incarnation)
        self.loaded |= {(self.generation, board, self.incarnation[board]) for board in usable}
        self.tell(Moved(frozenset(away), max(map(self.wait, away)) if away else math.inf))

    def close(self) -> None:
        self.closed = True
        self.tell(CloseAsked())
        for slot, run in list(self.in_slot.items()):
            self.ended.setdefault(run, "closed")
            del self.in_slot[slot]

    def check(self) -> None:
        assert len(set(self.in_slot.values())) == len(self.in_slot)
        assert set(self.in_slot.values()) <= set(self.at)


ACTIONS = ("begin", "begin", "work", "work", "work", "die", "cancel", "step", "step", "step", "due", "restart")


@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data(), replay=st.booleans(), fallback=st.booleans(), length=st.integers(5, 60), early=st.booleans())
def test_every_run_ends_once_whatever_happens_in_whatever_order(data, replay, fallback, length, early) -> None:  # type: ignore[no-untyped-def]
    world = World(data.draw, replay, fallback)
    for _ in range(length):
        before = set(world.quarantined)
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "due":
            world.tell(Due())
        else:
            getattr(world, action)()
        world.check()
        assert before <= world.quarantined | world.released
        world.released.clear()
    if early:  # in whatever state: no instruction comes after it, and none that is under way brings another
        world.close()
        while world.todo:
            world.carry_out(world.todo.popleft())
        assert not world.todo
        assert all(run in world.ended for run in range(1, world.runs + 1))
        return
    # From here on nothing dies: all that is to be done is done, and every run ends.
    for _ in range(200):
        if world.todo or world.events:
            world.step()
        elif world.machine.state == "down":
            world.row = dict.fromkeys(BOARDS, 0)
            world.tell(Due())
        else:
            world.work()
    assert all(run in world.ended for run in range(1, world.runs + 1)), (world.ended, world.machine.__dict__)
    assert world.machine.state in ("serving", "down")
    world.close()
    assert world.machine.state == "closed"
    world.todo.clear()
    for event in (Due(), Moved(), Died(1, world.incarnation[1], None, (), 0.0)):
        assert world.machine.handle(event) == []
