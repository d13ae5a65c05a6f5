"""strategy="cost": which islands move. Oracles: hand-made graphs, the planner's invariants, costs counted anew."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.costs import Costs, Crossing, NodeCost
from outrider.scheduler.islands import plan_by_cost
from outrider.scheduler.planning import Offer, PlanNode, ProviderTraits, plan
from tests.plan_invariants import violations

pytestmark = pytest.mark.fast

HOP = 20e-6
CROSSING = Crossing(hop=HOP, byte=1e-9)
TRAITS = [ProviderTraits("special", False), ProviderTraits("general", True), ProviderTraits("last", True)]


def chain(size):
    return [PlanNode(f"n{i}", (f"v{i}",), (f"v{i + 1}",)) for i in range(size)]


def general(size):
    return [Offer(1, (i,)) for i in range(size)]


def total(made, nodes, offers, costs):
    """Seconds of one run, counted from the plan alone."""
    seconds = len(made.partitions) * HOP
    for unit in made.units:
        told = [offers[claim] for claim in unit.claims if offers[claim].cost is not None]
        seconds += sum(offer.cost for offer in told)
        free = set(unit.nodes) - {position for offer in told for position in offer.nodes}
        seconds += sum(costs.nodes[position].seconds for position in free if not nodes[position].constant)
    for position, node in enumerate(nodes):
        for value in node.outputs:
            readers = {made.owner[i] for i, other in enumerate(nodes) if value in other.inputs} - {None}
            if made.owner[position] is not None:
                seconds += costs.nbytes.get(value, 0) * CROSSING.byte * len(readers - {made.owner[position]})
    return seconds


def by_cost(nodes, offers, seconds=1e-5, pins=None, exact=None, nbytes=None, traits=TRAITS):
    pins = pins or {}
    exact = exact or [True] * len(nodes)
    costs = Costs([NodeCost(seconds, one) for one in exact], nbytes or {}, CROSSING)

    def make(preferred):
        return plan(nodes, offers, traits, [nodes[-1].outputs[0]], pins, preferred)

    made, moves = plan_by_cost(make, nodes, offers, pins, costs)
    assert violations(made, nodes, offers, traits) == []
    assert total(made, nodes, offers, costs) <= total(make(()), nodes, offers, costs) + 1e-12
    return made, moves


def test_an_island_between_two_partitions_of_another_claimant_joins_them():
    nodes = chain(3)
    made, moves = by_cost(nodes, [Offer(0, (1,)), *general(3)])
    assert made.owner == [1, 1, 1]
    assert len(made.partitions) == 1
    (move,) = moves
    assert (move.nodes, move.source, move.target, move.hops) == ((1,), 0, 1, 2)


def test_many_islands_in_one_go():
    nodes = chain(101)
    made, moves = by_cost(nodes, [Offer(0, (i,)) for i in range(1, 101, 2)] + general(101))
    assert set(made.owner) == {1}
    assert len(moves) == 50


def test_the_island_of_a_faster_provider_stays_when_it_earns_its_hops():
    nodes = chain(3)
    slow = [Offer(1, (i,), cost=100e-6) for i in range(3)]
    assert by_cost(nodes, [Offer(0, (1,), cost=10e-6), *slow])[0].owner == [1, 0, 1]
    assert by_cost(nodes, [Offer(0, (1,), cost=70e-6), *slow])[0].owner == [1, 1, 1]


def test_bytes_that_cross_count_and_a_slower_first_claimant_gives_way():
    nodes = chain(3)
    slow = [Offer(1, (i,), cost=100e-6) for i in range(3)]
    large = {"v1": 50_000, "v2": 50_000}
    assert by_cost(nodes, [Offer(0, (1,), cost=10e-6), *slow], nbytes=large)[0].owner == [1, 1, 1]
    whole = [Offer(0, (i,), cost=90e-6) for i in range(3)] + [Offer(1, (i,), cost=10e-6) for i in range(3)]
    assert by_cost(nodes, whole)[0].owner == [1, 1, 1]


def test_what_nobody_else_claims_stays():
    nodes = chain(3)
    assert by_cost(nodes, [Offer(0, (1,)), Offer(1, (0,)), Offer(1, (2,))])[0].owner == [1, 0, 1]


def test_a_pinned_node_stays():
    nodes = chain(3)
    made, moves = by_cost(nodes, [Offer(0, (1,)), *general(3)], pins={1: 0})
    assert (made.owner, moves) == ([1, 0, 1], [])


def test_a_lower_bound_is_no_reason_to_move():
    nodes = chain(3)
    made, moves = by_cost(nodes, [Offer(0, (1,)), *general(3)], exact=[True, False, True])
    assert (made.owner, moves) == ([1, 0, 1], [])


def test_a_provider_that_tells_its_cost_needs_no_estimate():
    nodes = chain(3)
    offers = [Offer(0, (1,), cost=1e-6), Offer(1, (0,)), Offer(1, (1,), cost=1e-6), Offer(1, (2,))]
    assert by_cost(nodes, offers, exact=[False] * 3)[0].owner == [1, 1, 1]


def test_indivisible_claims_move_whole_or_not_at_all():
    nodes = chain(4)
    pair = Offer(0, (1, 2))
    assert by_cost(nodes, [pair, *general(4)])[0].owner == [1, 1, 1, 1]
    assert by_cost(nodes, [pair, Offer(1, (0,)), Offer(1, (1, 2)), Offer(1, (3,))])[0].owner == [1, 1, 1, 1]
    # The other's claim reaches beyond the island: it cannot be taken in part.
    assert by_cost(nodes, [pair, Offer(1, (0, 1)), Offer(1, (2, 3)), *[Offer(2, (i,)) for i in (0, 3)]])[0].owner == [
        2, 0, 0, 2,
    ]  # fmt: skip


def test_a_piece_of_a_partition_moves_for_the_bytes_alone():
    # Both branches are one partition of `special`; the one that reads a large value goes where the value is made.
    nodes = [
        PlanNode("a", ("x",), ("large", "small")),
        PlanNode("b", ("large",), ("b",)),
        PlanNode("c", ("small",), ("c",)),
        PlanNode("d", ("b", "c"), ("d",)),
    ]
    offers = [Offer(0, (1,)), Offer(0, (2,)), Offer(1, (0,)), Offer(1, (1,)), Offer(1, (3,))]
    made, moves = by_cost(nodes, offers, nbytes={"large": 10**6, "small": 4, "b": 4, "c": 4})
    assert made.owner == [1, 1, 0, 1]
    assert [(move.nodes, move.hops) for move in moves] == [((1,), 0)]


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(0, 2**32 - 1))
def test_random_graphs_get_valid_plans_that_move_nothing_pinned_or_unknown(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 40)
    nodes = []
    for i in range(size):
        constant = rng.random() < 0.15
        made_before = [n.outputs[0] for n in nodes if n.constant] if constant else [n.outputs[0] for n in nodes[-6:]]
        inputs = [rng.choice([*made_before, *([] if constant else ["x"])] or ["w"]) for _ in range(rng.randint(1, 3))]
        nodes.append(PlanNode(f"n{i}", tuple(inputs), (f"v{i}",), constant))
    offers = []
    for provider in (0, 1):
        mine = [i for i in range(size) if rng.random() < 0.6]
        while mine:
            width = rng.choice([1, 1, 1, 2, 4])
            cost = rng.choice([None, None, rng.random() * 1e-4])
            offers.append(Offer(provider, tuple(mine[:width]), cost))
            mine = mine[width:]
    offers += [Offer(2, (i,)) for i in range(size)]
    pins = {i: rng.randrange(3) for i in range(size) if rng.random() < 0.1}
    exact = [rng.random() < 0.8 for _ in nodes]
    nbytes = {f"v{i}": rng.randint(0, 50_000) for i in range(size) if rng.random() < 0.8}
    outputs = [nodes[-1].outputs[0]]
    made, moves = by_cost(nodes, offers, pins=pins, exact=exact, nbytes=nbytes)
    before = plan(nodes, offers, TRAITS, outputs, pins)
    again, _ = by_cost(nodes, offers, pins=pins, exact=exact, nbytes=nbytes)
    assert made == again
    told = {position for offer in offers if offer.cost is not None for position in offer.nodes}
    for position, node in enumerate(nodes):
        if node.constant or made.owner[position] == before.owner[position]:
            continue
        assert position not in pins
        assert any(position in move.nodes for move in moves)
        assert exact[position] or position in told
