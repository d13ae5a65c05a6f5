"""The order in which a worker serves what is ready: lanes after those they follow, the oldest run before others."""

from __future__ import annotations

import itertools
import os
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.providers.binding import VARIANTS
from outrider.providers.lanes import KEPT, Lane, LaneGroup, serve_ready
from outrider.providers.steady import Block, Outcome, Steady
from outrider.providers.targets import Targets
from outrider.providers.wire.messages import BOUND, START, UNBOUND
from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from outrider.scheduler.replica import Slot
from outrider.scheduler.slots import Hold
from outrider.shm.board import LAYOUTS_PER_EDGE, BoardReader, BoardWriter, number_of, run_of
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.segment import Segment, create_segment
from tests.builders import chain

pytestmark = pytest.mark.fast

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")


class Scripted:
    """A lane that is ready as soon as `has` says that its inputs have arrived for the run in `words`."""

    def __init__(self, name: str, slot: int, words: memoryview, has: set[tuple[str, int]]) -> None:
        self.name, self.slot = name, slot
        self.words, self.has = words, has
        self.followers: list[Any] = []
        self.last = 0

    def ready(self) -> int:
        run = self.words[self.slot] >> 16
        return run if run > self.last and (self.name, run) in self.has else 0


class Worker:
    """Two slots with lanes a -> b -> c and one d beside them; `serve` notes what it is called with."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(32)).cast("Q")
        self.has: set[tuple[str, int]] = set()
        self.groups = [LaneGroup(self.words, slot, 2 + slot) for slot in range(2)]
        for slot, group in enumerate(self.groups):
            a, b, c, d = (Scripted(name, slot, self.words, self.has) for name in "abcd")
            for lane, after in ((a, None), (b, a), (c, b), (d, None)):
                group.add(lane, after)  # type: ignore[arg-type]
        self.served: list[tuple[str, int]] = []
        self.during: dict[tuple[str, int], set[tuple[str, int]]] = {}  # what arrives while one is served

    def begin(self, slot: int, run: int, *arrived: str) -> None:
        self.words[slot] = run << 16
        self.has |= {(name, run) for name in arrived}

    def serve(self, lane: Any, run: int) -> None:
        lane.last = run
        self.served.append((lane.name, run))
        self.has |= self.during.get((lane.name, run), set())

    def poll(self) -> list[tuple[str, int]]:
        self.served = []
        serve_ready(self.groups, self.serve)  # type: ignore[arg-type]
        return self.served


def test_the_oldest_run_is_served_first_whatever_its_slot() -> None:
    worker = Worker()
    worker.begin(0, 8, *"abcd")
    worker.begin(1, 7, *"abcd")
    assert worker.poll() == [*((name, 7) for name in "adbc"), *((name, 8) for name in "adbc")]
    assert worker.poll() == []
    worker.begin(1, 9, *"abcd")
    worker.begin(0, 10, *"abcd")
    assert [run for _, run in worker.poll()] == [9] * 4 + [10] * 4


def test_an_older_run_that_becomes_ready_meanwhile_goes_next() -> None:
    worker = Worker()
    worker.begin(1, 1, "a")
    worker.begin(0, 2, *"abcd")
    worker.during = {("d", 2): {("b", 1)}, ("c", 2): {("c", 1), ("d", 1)}}
    assert worker.poll() == [("a", 1), ("a", 2), ("d", 2), ("b", 1), ("b", 2), ("c", 2), ("d", 1), ("c", 1)]


def test_a_lane_waits_for_the_one_it_follows_and_for_its_own_inputs() -> None:
    worker = Worker()
    worker.begin(0, 1, *"bcd")
    assert worker.poll() == [("d", 1)]
    worker.begin(0, 1, "a")
    assert worker.poll() == [("a", 1), ("b", 1), ("c", 1)]
    worker.begin(0, 2, *"abc")
    assert worker.poll() == [("a", 2), ("b", 2), ("c", 2)]
    worker.begin(0, 2, "d")
    assert worker.poll() == [("d", 2)]


def test_a_lane_that_was_passed_over_is_looked_at_again_when_it_waited_for_one_behind_it() -> None:
    """Nobody rings for words of the worker itself."""
    worker = Worker()
    worker.during = {("c", 1): {("d", 1)}}
    worker.begin(0, 1, "a", "b")
    assert worker.poll() == [("a", 1), ("b", 1)]
    assert [lane.name for lane in worker.groups[0].waiting] == ["d", "c"]
    worker.begin(0, 1, "c")
    assert worker.poll() == [("c", 1), ("d", 1)]


class Boards:
    """A caller's board with two inputs, a worker's with one output, and a lane of the worker that reads both inputs."""

    def __init__(self) -> None:
        self.caller, self.inputs = self._board(3)
        self.worker, self.outputs = self._board(2)
        self.reader = BoardReader(self.caller.segment, 3, 1, 1)
        ports = [SimpleNamespace(reader=self.reader, edge=edge) for edge in (1, 2)]
        partition: Any = SimpleNamespace(inputs=ports, targets=Targets(self.reader, {}))
        self.lane = Lane(partition, 0, [])
        self.released = memoryview(bytearray(8 * 8)).cast("Q")
        self.pool = PoolWriter(self._segment(), self.released, 0, 8, memory=1)
        self.doing = memoryview(bytearray(8 * 8)).cast("Q")

    @staticmethod
    def _segment() -> Segment:
        fd = create_segment("board", 1 << 24)
        try:
            return Segment(fd, writable=True)
        finally:
            os.close(fd)

    @classmethod
    def _board(cls, edges: int) -> tuple[Places, BoardWriter]:
        segment = cls._segment()
        board = BoardWriter(segment, edges, 1, 1)
        return Places(segment, board, edges, 1), board

    def arrive(self, run: int, *counts: int) -> None:
        """Both inputs of a run, of that many bytes."""
        for edge, count in enumerate(counts, 1):
            _, number = self.caller.tensor(edge, 0, 2, np.dtype(np.uint8), (count,), "input")
            self.inputs.publish(edge, 0, run, number)

    def learn(self, count: int, block: Block | None = None) -> list[int]:
        """Keep the run that is ready, with an output of that many bytes; what its call will add to when repeated."""
        _, number = self.worker.tensor(0, 0, 2, np.dtype(np.uint8), (count,), "output")
        read = [(self.reader, edge, number_of(self.reader.word(edge, 0))) for edge in (1, 2)]
        at = self.worker.stamp_index(0, 0)
        calls: list[int] = []

        def call(_: Any) -> list[None]:
            calls.append(count)
            return [None]

        unit: Any = None
        stamps = [(at, self.worker.stamps[at])]
        outcome = Outcome([(0, number)], read, [(unit, call, [])], stamps, [] if block is None else [block])
        self.lane.keep(Steady(self.outputs, self.worker, self.pool, 0, outcome, done=1))
        return calls

    def kept(self) -> Steady | None:
        steady = self.lane.steady.get(self.lane.layouts)
        while steady is not None and not steady.fits():
            steady = steady.other
        return steady


def test_what_was_done_for_each_combination_of_layouts_is_repeated() -> None:
    boards = Boards()
    lane, done = boards.lane, {}
    for run, counts in enumerate([(5, 5), (5, 6), (6, 5), (7, 7)], 1):
        boards.arrive(run, *counts)
        assert lane.ready() == run
        assert boards.kept() is None
        done[counts] = boards.learn(sum(counts))
        lane.last = run
    for run, counts in enumerate([(6, 5), (5, 5), (5, 6), (7, 7), (6, 5)], 5):
        boards.arrive(run, *counts)
        assert lane.ready() == run
        steady = boards.kept()
        assert steady is not None
        steady.repeat(run, lambda: False, boards.doing)
        assert done[counts].pop() == sum(counts)
        assert run_of(boards.outputs.words[boards.outputs.index(0, 0)]) == run
        assert run_of(boards.outputs.words[boards.outputs.index(1, 0)]) == run
        lane.last = run
    assert not any(done.values())


def test_nothing_is_repeated_whose_buffer_moved_or_whose_numbers_mean_something_else() -> None:
    boards = Boards()

    def kept_for(run: int, *counts: int) -> bool:
        boards.arrive(run, *counts)
        assert boards.lane.ready() == run
        return boards.kept() is not None

    kept_for(1, 5, 5)
    boards.learn(10)
    assert kept_for(2, 5, 5)
    for count in range(LAYOUTS_PER_EDGE):  # of the output, whose number for 10 bytes is the first to be redefined
        boards.worker.tensor(0, 0, 2, np.dtype(np.uint8), (1, count), "output")
    assert not kept_for(3, 5, 5)
    boards.learn(10)
    assert kept_for(4, 5, 5)
    for count in range(LAYOUTS_PER_EDGE - 1):
        boards.worker.tensor(0, 0, 2, np.dtype(np.uint8), (2, count), "output")
    assert kept_for(5, 5, 5)  # others were redefined
    boards.worker.offset(0, 0, 20 << 20 >> 1, "output")
    assert not kept_for(6, 5, 5)
    boards.learn(10)
    for count in range(LAYOUTS_PER_EDGE + 1):  # of an input
        boards.arrive(7 + count, 5, 10 + count)
    assert not kept_for(30, 5, 5)


def test_results_in_the_output_pool_are_repeated_into_the_blocks_that_are_free() -> None:
    boards = Boards()
    lane, pool = boards.lane, boards.pool
    done, blocks = {}, [(*pool.take(5000), 5000) for _ in range(VARIANTS + 1)]
    pool.published()
    for run, block in enumerate(blocks, 1):
        boards.arrive(run, 5, 5)
        assert lane.ready() == run
        assert boards.kept() is None  # the caller holds all of them
        done[block] = boards.learn(10, block)
        lane.last = run
    for run, held in enumerate([0, 3, 2, 3, 1, 4], len(blocks) + 1):
        boards.released[blocks[held][0]] += 1
        boards.arrive(run, 5, 5)
        assert lane.ready() == run
        steady = boards.kept()
        if held == 0:  # more than are kept
            assert steady is None
            continue
        assert steady is not None
        steady.repeat(run, lambda: False, boards.doing)
        assert done[blocks[held]].pop() == 10
        assert not pool.is_free(*blocks[held])
        assert boards.kept() is None
        lane.last = run


def test_a_lane_keeps_so_many_runs_to_repeat() -> None:
    boards = Boards()
    for run in range(1, 3 * KEPT):
        boards.arrive(run, 1 + run % 10, 1 + run % 13)
        boards.lane.ready()
        boards.learn(1)
        assert boards.kept() is not None
    assert len(boards.lane.steady) == KEPT


def test_a_worker_serves_runs_in_the_order_of_their_beginning(tmp_path: pathlib.Path) -> None:
    """They begin in the last slot first, and all have begun before the worker is let on."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    os.mkfifo(gate)
    opened = os.open(gate, os.O_RDWR)
    own = f"{FILE}:Gated"
    try:
        with Fleet([(own, {"gate": str(gate), "log": str(log)})]) as fleet:
            options = SessionOptions(fleet=fleet, max_in_flight=3)
            with InferenceSession(chain("Identity", shape=["N"]), options=options) as session:
                runner = session._runner
                holds = [Hold[Slot]() for _ in range(3)]
                slots = [runner.slots.take(hold) for hold in holds][::-1]
                feeds = [{"x": np.full(1, value, np.float32)} for value in range(3)]
                runs = [runner.begin(slot, feed, {}, None) for slot, feed in zip(slots, feeds, strict=True)]
                os.write(opened, b"...")
                for slot, run, feed in zip(slots, runs, feeds, strict=True):
                    assert runner.finish(slot, run, ["y"], None)["y"] == feed["x"]
                for hold in holds:
                    runner.slots.give(hold)
        assert [slot.index for slot in slots] == [2, 1, 0]
        assert log.read_text().split() == ["0.0", "1.0", "2.0"]
    finally:
        os.close(opened)


def test_what_was_done_for_other_targets_is_not_repeated() -> None:
    """One input, edge 1, and two results that may have targets, edges 2 and 3."""
    fd = create_segment("board", 1 << 24)
    writer = BoardWriter(Segment(fd, writable=True), 4, 1, 1)
    reader = BoardReader(Segment(fd, writable=False), 4, 1, 1)
    os.close(fd)
    partition: Any = SimpleNamespace(
        inputs=[SimpleNamespace(reader=reader, edge=1)], targets=Targets(reader, {"y": 2, "z": 3})
    )
    lane = Lane(partition, 0, [])
    seen: dict[int, tuple[int, ...]] = {}
    for run, numbers in enumerate(itertools.product((1, 2), (UNBOUND, BOUND), (1, 2), (1, 2)), 1):
        given, start, *targets = numbers
        if start == BOUND:
            for edge, number in enumerate(targets, 2):
                writer.publish(edge, 0, run, number)
        writer.publish(START, 0, run, start)
        assert not lane.ready()
        writer.publish(1, 0, run, given)
        assert lane.ready() == run
        matters = numbers if start == BOUND else numbers[:2]
        assert seen.setdefault(lane.layouts, matters) == matters
        assert partition.targets.joined(0, 0) not in seen  # that of a void input
        lane.last = run
    assert len(seen) == 2 + 2 * 4
