"""Edges on real workers: few buffers for a long chain, growth that stalls nobody, nothing allocated in steady runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from outrider.shm.board import LAYOUTS_PER_EDGE
from outrider.shm.segment import PAGE
from tests.builders import chain, model, node, tensor

pytestmark = pytest.mark.fast

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
OWN = [f"{FILE}:InPlace", f"{FILE}:InPlace:1"]
STEPS = 220


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet([*OWN, "cpu", "cpu:1"]) as made:
        yield made


def open_on(fleet: Fleet, proto: onnx.ModelProto, pins: dict[str, str], **options: Any) -> InferenceSession:
    workers = list(dict.fromkeys(pins.values()))
    return InferenceSession(proto, providers=workers, options=SessionOptions(fleet=fleet, pins=pins, **options))


def told(session: InferenceSession, counter: str) -> list[int]:
    return [counters[counter] for counters in session.stats()["providers"].values()]


def test_a_long_chain_takes_a_few_buffers_and_then_allocates_and_binds_nothing(fleet: Fleet) -> None:
    taken = []
    for length in (6, 40):
        pins = {f"n{i}": f"cpu:{i % 2}" if i % 2 else "cpu" for i in range(length)}
        with open_on(fleet, chain(*["Neg"] * length, shape=["N"]), pins) as session:
            assert session.stats()["partitions"] == length
            x = np.arange(4 * PAGE // 4, dtype=np.float32)
            for turn in range(3):
                np.testing.assert_array_equal(session.run(None, {"x": x + turn})[0], x + turn)
            before = session.stats()
            for turn in range(50):
                np.testing.assert_array_equal(session.run(None, {"x": x * turn})[0], x * turn)
            after = session.stats()
        assert after["allocated_bytes"] == before["allocated_bytes"]
        assert [p["bound"] for p in after["providers"].values()] == [p["bound"] for p in before["providers"].values()]
        unshared = [p["edge_bytes_unshared"] for p in after["providers"].values()]
        assert unshared == [length // 2 * x.nbytes] * 2
        taken.append([p["edge_bytes"] for p in after["providers"].values()])
    assert taken[0] == taken[1] == [x.nbytes, 2 * x.nbytes]  # the last one has the result too


def growing() -> tuple[onnx.ModelProto, dict[str, str]]:
    """grows -> sums to one element -> and two more of that: the first shares its buffer with the third."""
    nodes = [node("Neg", "x", "g", "a"), node("ReduceSum", "g", "s", "b"), node("Abs", "s", "t", "c")]
    made = model([*nodes, node("Neg", "t", "y", "d")], [tensor("x", ["N"])], [tensor("y", [1])])
    return made, {"a": OWN[0], "b": OWN[1], "c": OWN[0], "d": OWN[1]}


def test_a_value_that_grows_in_each_run_does_not_make_others_bind_again(fleet: Fleet) -> None:
    with open_on(fleet, *growing()) as session:
        for step in range(1, STEPS + 1):
            x = np.full(10 * step, 0.5, np.float32)
            assert session.run(None, {"x": x})[0] == -5 * step
        assert told(session, "bound") == [STEPS + 1, STEPS + 1]  # the one that grows in each run, the other once
        assert told(session, "edge_bytes")[0] <= 2 * 40 * STEPS + PAGE


def test_shapes_that_come_back_are_bound_once_though_an_edge_has_fewer_numbers(fleet: Fleet) -> None:
    shapes = range(1, LAYOUTS_PER_EDGE + 9)
    with open_on(fleet, *growing()) as session:
        for turn in range(4):
            for count in shapes:
                assert session.run(None, {"x": np.full(count, turn, np.float32)})[0] == -turn * count
        assert told(session, "bound") == [len(shapes) + 1] * 2


def test_slots_grow_while_others_run(fleet: Fleet) -> None:
    """The size of an edge is known only in the run, and several are in flight."""
    nodes = [node("NonZero", "x", "where", "a"), node("Transpose", "where", "rows", "b")]
    nodes += [node("Shape", "rows", "shape", "c"), node("Mul", "rows shape", "y", "d")]
    proto = model(nodes, [tensor("x", ["N"])], [tensor("y", None, TensorProto.INT64)])
    rng = np.random.default_rng(0)
    feeds = [(rng.random(int(rng.integers(1, 40_000))) < rng.random()).astype(np.float32) for _ in range(80)]
    with open_on(fleet, proto, {"a": "cpu", "b": "cpu:1", "c": "cpu", "d": "cpu:1"}, max_in_flight=3) as session:
        futures = [session.run_async(None, {"x": x}) for x in feeds[:40]]
        futures += [session.run_async(None, {"x": x}) for x in feeds[40:]]
        for x, future in zip(feeds, futures, strict=True):
            (rows,) = np.nonzero(x)
            np.testing.assert_array_equal(future.result()[0], rows[:, None] * np.array([len(rows), 1]))


def test_a_sequence_is_what_it_was_though_the_buffer_of_its_items_is_written_again(fleet: Fleet) -> None:
    """All units are of one partition: a | s holds a | b over a | s and b | the first of these, which is a."""
    nodes = [node("Neg", "x", "a"), node("SequenceConstruct", "a", "s"), node("Abs", "x", "b")]
    nodes += [node("SequenceInsert", "s b", "both"), node("SequenceAt", "both i", "y")]
    proto = model(nodes, [tensor("x", ["N"])], [tensor("y", ["N"])], {"i": np.array(0, np.int64)})
    x = np.array([-1, 2, -3], np.float32)
    with InferenceSession(proto, providers=OWN[:1], options=SessionOptions(fleet=fleet)) as session:
        for _ in range(3):
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], -x)
        assert session.stats()["partitions"] == 1
        assert told(session, "edge_bytes") < told(session, "edge_bytes_unshared")
