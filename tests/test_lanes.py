"""The order in which a worker serves what is ready: lanes after those they follow, the oldest run before others."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import pytest

from outrider.providers.lanes import LaneGroup, serve_ready
from outrider.scheduler import Fleet, InferenceSession, SessionOptions
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
        self.words = memoryview(bytearray(16)).cast("Q")
        self.has: set[tuple[str, int]] = set()
        self.groups = [LaneGroup(self.words, slot) for slot in range(2)]
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
                slots = [runner.slots.take() for _ in range(3)][::-1]
                feeds = [{"x": np.full(1, value, np.float32)} for value in range(3)]
                runs = [runner.begin(slot, feed, {}, None) for slot, feed in zip(slots, feeds, strict=True)]
                os.write(opened, b"...")
                for slot, run, feed in zip(slots, runs, feeds, strict=True):
                    assert runner.finish(slot, run, ["y"], None)["y"] == feed["x"]
                    runner.slots.give(slot)
        assert [slot.index for slot in slots] == [2, 1, 0]
        assert log.read_text().split() == ["0.0", "1.0", "2.0"]
    finally:
        os.close(opened)
