"""Random graphs on real workers: indivisible claims, convex alone and cyclic together, give acyclic partitions and the
answer of plain numpy."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter

import numpy as np
import onnx
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from tests.builders import model, node, tensor
from tests.own_providers import Grouped

pytestmark = pytest.mark.fast

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
OWN = [f"{FILE}:Grouped", f"{FILE}:Grouped:1", f"{FILE}:Grouped:2"]
UNARY, BINARY = ["Relu", "Neg", "Abs"], ["Add", "Sub", "Max"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet([*((spec, {"me": i}) for i, spec in enumerate(OWN)), "cpu"]) as made:
        yield made


def convex(chosen: set[int], reads: list[list[int]]) -> bool:
    """True if no path leaves the set and comes back."""
    outside_after: set[int] = set()
    for i, sources in enumerate(reads):
        if i in chosen:
            if any(source in outside_after for source in sources):
                return False
        elif any(source in chosen or source in outside_after for source in sources):
            outside_after.add(i)
    return True


def random_model(seed: int, providers: int) -> tuple[onnx.ModelProto, int]:
    """A DAG of up to 24 nodes whose names spell the claims; returns it with the number of claims of several nodes."""
    rng = random.Random(seed)
    count = rng.randint(4, 24)
    operators, reads = [], []
    for i in range(count):
        op = rng.choice(UNARY + BINARY)
        operators.append(op)
        reads.append([rng.randint(max(-2, i - 8), i - 1) for _ in range(2 if op in BINARY else 1)])
    names: list[list[str]] = [[] for _ in range(count)]
    several = 0
    for provider in range(providers):
        free = set(range(count))
        for claim in range(count):
            members = set(rng.sample(sorted(free), min(len(free), rng.randint(1, 4))))
            if members and convex(members, reads):
                free -= members
                several += len(members) > 1
                for i in members:
                    names[i].append(f"c{provider}.{claim}")
    value = {-2: "x", -1: "w", **{i: f"v{i}" for i in range(count)}}
    nodes = [
        node(op, " ".join(value[source] for source in sources), value[i], "|".join([*names[i], f"n{i}"]))
        for i, (op, sources) in enumerate(zip(operators, reads, strict=True))
    ]
    outputs = [tensor(value[i], ["N"]) for i in range(count) if i == count - 1 or rng.random() < 0.2]
    return model(nodes, [tensor("x", ["N"])], outputs, {"w": np.array([0.5], np.float32)}), several


def direct(made: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    known = {"x": x, "w": np.array([0.5], np.float32)}
    for one in made.graph.node:
        known[one.output[0]] = Grouped.OPERATORS[one.op_type](*[known[name] for name in one.input])
    return [known[output.name] for output in made.graph.output]


@pytest.mark.parametrize("providers", [2, 3, 4])
def test_random_claims_are_placed_and_right(fleet: Fleet, providers: int) -> None:
    """The last of them is `cpu`, which claims everything; the others claim as the names say."""
    names = [*OWN[: providers - 1], "cpu"]
    feeds = [np.linspace(-3, 2, count, dtype=np.float32) for count in (4, 1, 9, 4, 5)]
    claims, dropped = 0, 0
    for seed in range(40):
        made, several = random_model(seed, providers - 1)
        claims += several
        options = SessionOptions(fleet=fleet, max_in_flight=3)
        with InferenceSession(made, providers=names, options=options) as session:
            futures = [session.run_async(None, {"x": x}) for x in feeds]
            for x, future in zip(feeds, futures, strict=True):
                for result, expected in zip(future.result(), direct(made, x), strict=True):
                    np.testing.assert_array_equal(result, expected)
            report, notes = session.placement().to_dict(), session.placement().notes
        _check_partitions(made, report)
        dropped += sum("was dropped" in note for note in notes)
    assert claims > 40, "the graphs have claims of several nodes"
    assert providers == 2 or dropped > 0, "some claims wait for each other"


def _check_partitions(made: onnx.ModelProto, report: dict) -> None:
    constants = {"w"}  # and what is made of them only: whoever reads those may have computed them for itself
    for one in made.graph.node:
        if set(one.input) <= constants:
            constants.add(one.output[0])
    moving = [one for one in made.graph.node if one.output[0] not in constants]
    placed = Counter(name for partition in report["partitions"] for name in partition["nodes"])
    assert {one.name: placed[one.name] for one in moving} == {one.name: 1 for one in moving}
    partition_of = {name: partition["id"] for partition in report["partitions"] for name in partition["nodes"]}
    producer = {one.output[0]: one.name for one in moving}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for one in moving:
        sources = {partition_of[producer[name]] for name in one.input if name in producer}
        sorter.add(partition_of[one.name], *(sources - {partition_of[one.name]}))
        assert all(source <= partition_of[one.name] for source in sources)
    list(sorter.static_order())  # raises CycleError
    # A claim is never split: its nodes run together, or not under this claim at all.
    for partition in report["partitions"]:
        if partition["provider"] == "cpu":
            continue
        mine = f"c{OWN.index(partition['provider'])}."
        claims = {part for name in partition["nodes"] for part in name.split("|") if part.startswith(mine)}
        for one in moving:
            if claims & set(one.name.split("|")):
                assert one.name in partition["nodes"]
