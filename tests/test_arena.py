"""Which edges share a buffer: the rule by brute force on random plans, and how few a chain needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.arena import Precedence, share_buffers
from outrider.scheduler.planning import (
    CALLER,
    Edge,
    Offer,
    Plan,
    PlanNode,
    ProviderTraits,
    UnitInterface,
    edges,
    interfaces,
    plan,
)
from tests.test_planning import GRAPH_INPUTS, INITIALIZERS, problems

pytestmark = pytest.mark.fast


def dependences(made: Plan, crossing: list[Edge]) -> list[set[int]]:
    """Partition -> all that it waits for, directly or through others."""
    before: list[set[int]] = [set() for _ in made.partitions]
    for number in range(len(made.partitions)):
        for edge in crossing:
            if number in edge.consumers and edge.producer != CALLER:
                before[number] |= {edge.producer} | before[edge.producer]
    return before


def violations(made: Plan, units: list[UnitInterface], crossing: list[Edge], shared: dict[str, int]) -> list[str]:
    """Pairs of values in one buffer that might be needed at the same time."""
    before = dependences(made, crossing)
    partition_of = {unit: number for number, part in enumerate(made.partitions) for unit in part.units}
    maker = {value: unit for unit, interface in enumerate(units) for value in interface.outputs}
    readers: dict[str, list[int]] = {value: [maker[value]] for value in maker}
    for unit, interface in enumerate(units):
        for value in interface.inputs:
            if value in maker:
                readers[value].append(unit)
    to_caller = {edge.value for edge in crossing if edge.to_caller}
    wrong = []
    for first, later in itertools.permutations(maker, 2):
        same_writer = made.units[maker[first]].provider == made.units[maker[later]].provider
        if not same_writer or shared[first] != shared[later] or maker[first] > maker[later]:
            continue
        if {first, later} & to_caller:
            wrong.append(f"{first} and {later} share, and one goes to the caller")
        home, there = partition_of[maker[first]], partition_of[maker[later]]
        for reader in readers[first]:
            within = partition_of[reader] == home == there and reader < maker[later]
            if not within and partition_of[reader] not in before[there]:
                wrong.append(f"{later} may be written while unit {reader} reads {first}")
    return wrong


@settings(deadline=None, derandomize=True, max_examples=60)
@given(problems(), st.data())
def test_values_share_only_if_the_later_one_waits_for_all_readers_of_the_earlier(problem, data):
    nodes, offers, providers, outputs, pins = problem
    made = plan(nodes, offers, providers, outputs, pins)
    crossing = edges(made, nodes, [*GRAPH_INPUTS, *INITIALIZERS], outputs)
    units = interfaces(made, nodes, [*GRAPH_INPUTS, *INITIALIZERS], outputs)
    sizes = {value: data.draw(st.integers(0, 3)) for unit in units for value in unit.outputs}
    shared = share_buffers(made, units, crossing, sizes)
    assert set(shared) == set(sizes)
    assert violations(made, units, crossing, shared) == []


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.data())
def test_precedence_is_never_made_up(owners, data):
    pairs = [(a, b) for b in range(len(owners)) for a in range(b)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=40)) if pairs else []
    before = [set() for _ in owners]
    for a, b in sorted(chosen, key=lambda pair: pair[1]):
        before[b] |= {a} | before[a]
    precedence = Precedence(owners, chosen)
    for a, b in itertools.product(range(len(owners)), repeat=2):
        assert not precedence.waits(b, a) or a in before[b]
        chains = all(x in before[y] for x, y in itertools.combinations(range(len(owners)), 2) if owners[x] == owners[y])
        assert not chains or precedence.waits(b, a) == (a in before[b])


def relay(length: int, workers: int, merge: bool = True) -> tuple[Plan, list[UnitInterface], list[Edge]]:
    """A chain of nodes, each on the worker after the one before it."""
    nodes = [PlanNode(f"n{i}", (f"v{i - 1}" if i else "x",), (f"v{i}",)) for i in range(length)]
    offers = [Offer(i % workers, (i,)) for i in range(length)]
    providers = [ProviderTraits(f"p{i}", merge) for i in range(workers)]
    outputs = [f"v{length - 1}"]
    made = plan(nodes, offers, providers, outputs)
    return made, interfaces(made, nodes, ["x"], outputs), edges(made, nodes, ["x"], outputs)


@pytest.mark.parametrize(("workers", "merge", "count"), [(1, False, 3), (2, True, 3), (3, True, 4)])
def test_a_chain_of_any_length_takes_a_few_buffers(workers, merge, count):
    for length in (20, 2000):
        made, units, crossing = relay(length, workers, merge)
        shared = share_buffers(made, units, crossing, {})
        used = {(made.units[unit].provider, shared[v]) for unit, one in enumerate(units) for v in one.outputs}
        assert len(used) == count


def test_what_a_running_partition_was_given_stays_until_it_is_done():
    """b reads a and is followed by c in its partition: c may not be written over a, though b has read it by then."""
    nodes = [PlanNode("a", ("x",), ("a",)), PlanNode("o", ("a",), ("o",))]
    nodes += [PlanNode("b", ("a", "o"), ("b",)), PlanNode("c", ("b",), ("c",)), PlanNode("d", ("c",), ("d",))]
    nodes += [PlanNode("p", ("d",), ("p",)), PlanNode("e", ("p",), ("e",)), PlanNode("y", ("e",), ("y",))]
    offers = [Offer(1 if node.name in "op" else 0, (i,)) for i, node in enumerate(nodes)]
    made = plan(nodes, offers, [ProviderTraits("s", False), ProviderTraits("t", True)], ["y"])
    assert [len(part.units) for part in made.partitions] == [1, 1, 3, 1, 2]  # a | o | b c d | p | e y
    shared = share_buffers(made, interfaces(made, nodes, ["x"], ["y"]), edges(made, nodes, ["x"], ["y"]), {})
    assert len({shared[value] for value in "abc"}) == 3
    assert shared["d"] == shared["b"]
    assert shared["e"] in {shared[value] for value in "abc"}


def test_values_of_like_size_are_put_together():
    """Two long relays side by side on two workers, one of small values, one of large ones."""
    nodes, offers, sizes = [], [], {}
    for i in range(30):
        for kind, nbytes in (("s", 10), ("l", 1000)):
            nodes.append(PlanNode(f"{kind}{i}", (f"{kind}{i - 1}" if i else "x",), (f"{kind}{i}",)))
            offers.append(Offer(i % 2, (len(nodes) - 1,)))
            sizes[f"{kind}{i}"] = nbytes
    providers = [ProviderTraits("p", True), ProviderTraits("q", True)]
    made = plan(nodes, offers, providers, ["s29", "l29"])
    units = interfaces(made, nodes, ["x"], ["s29", "l29"])
    shared = share_buffers(made, units, edges(made, nodes, ["x"], ["s29", "l29"]), sizes)
    held: dict[tuple[int, int], set[int]] = {}
    for unit, one in enumerate(units):
        for value in one.outputs:
            held.setdefault((made.units[unit].provider, shared[value]), set()).add(sizes[value])
    assert all(len(kinds) == 1 for kinds in held.values())
    assert len(held) < 12
