"""Balanced stages. Oracle: every cut of small chains tried; the planner's invariants."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.costs import Costs, Crossing, NodeCost
from outrider.scheduler.planning import Offer, PlanNode, ProviderTraits, plan
from outrider.scheduler.stages import balanced, cut_into_stages
from tests.plan_invariants import violations

pytestmark = pytest.mark.fast

WORKERS = [ProviderTraits("w0", True), ProviderTraits("w1", True), ProviderTraits("w2", True)]


def dearest(ends, seconds, crossing):
    return max(sum(seconds[a:b]) + crossing[a] + crossing[b] for a, b in itertools.pairwise([0, *ends]))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(0, 8),
)
def test_the_dearest_stage_is_as_cheap_as_any_cut_makes_it(chain, stages, last):
    seconds, crossing = [one for one, _ in chain], [*(cut for _, cut in chain), last]
    ends = balanced(seconds, crossing, stages)
    count = min(stages, len(seconds))
    assert len(ends) == count
    assert ends == sorted(set(ends))
    assert ends[-1] == len(seconds)
    tried = itertools.combinations(range(1, len(seconds)), count - 1)
    best = min(dearest([*cuts, len(seconds)], seconds, crossing) for cuts in tried)
    assert dearest(ends, seconds, crossing) == pytest.approx(best)


def chain(size, bytes_between=0):
    nodes = [PlanNode(f"n{i}", (f"v{i}",), (f"v{i + 1}",)) for i in range(size)]
    offers = [Offer(worker, (i,)) for worker in range(3) for i in range(size)]
    nbytes = {f"v{i}": bytes_between for i in range(1, size)}
    return nodes, offers, nbytes


def staged(nodes, offers, seconds, team=(0, 1, 2), pins=None, hints=None, nbytes=None, traits=WORKERS):
    costs = Costs([NodeCost(one, True) for one in seconds], nbytes or {}, Crossing(1e-5, 1e-9))
    outputs = [nodes[-1].outputs[0]]
    first = plan(nodes, offers, traits, outputs, pins)
    found = cut_into_stages(first, nodes, offers, team, pins or {}, costs, hints)
    made = plan(nodes, offers, traits, outputs, pins, found.preferred)
    assert violations(made, nodes, offers, traits) == []
    return made, found


def test_a_chain_is_shared_evenly():
    nodes, offers, _ = chain(9)
    made, found = staged(nodes, offers, [1.0] * 9)
    assert made.owner == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.seconds == pytest.approx({0: 3.0, 1: 3.0, 2: 3.0})


def test_a_dear_node_has_a_stage_of_its_own_and_two_workers_suffice():
    nodes, offers, _ = chain(5)
    assert staged(nodes, offers, [1, 1, 9, 1, 1])[0].owner == [0, 0, 1, 2, 2]
    assert staged(nodes, offers, [1, 1, 9, 1, 1], team=(0, 2))[0].owner in ([0, 0, 0, 2, 2], [0, 0, 2, 2, 2])


def test_bytes_that_cross_move_the_cut():
    nodes, offers, nbytes = chain(4)
    nbytes["v2"] = 10**9  # a second of copying where the halves would meet
    made, _ = staged(nodes, offers, [1.0, 0.9, 1.0, 1.0], team=(0, 1), nbytes=nbytes)
    assert made.owner == [0, 0, 0, 1]


def test_pins_and_indivisible_claims_stay_whole():
    nodes, _, _ = chain(6)
    offers = [Offer(worker, pair) for worker in range(3) for pair in ((0, 1), (2, 3), (4, 5))]
    assert staged(nodes, offers, [1] * 6)[0].owner == [0, 0, 1, 1, 2, 2]
    nodes, offers, _ = chain(4)
    made, _ = staged(nodes, offers, [1] * 4, team=(0, 1), pins={3: 0})
    assert made.owner[3] == 0
    assert 1 in made.owner


def test_what_only_one_of_them_claims_stays_with_it():
    nodes, offers, _ = chain(4)
    offers = [offer for offer in offers if not (offer.provider == 1 and offer.nodes == (3,))]
    made, _ = staged(nodes, offers, [1] * 4, team=(0, 1))
    assert made.owner[3] == 0
    assert 1 in made.owner[:3]


def test_other_owners_keep_what_they_have_and_stages_go_around_it():
    nodes, offers, _ = chain(6)
    offers.append(Offer(3, (2,)))
    order = [Offer({3: 0}.get(one.provider, one.provider + 1), one.nodes) for one in offers]
    made, found = staged(nodes, order, [1] * 6, team=(1, 2), traits=[ProviderTraits("first", False), *WORKERS])
    assert made.owner[2] == 0
    assert {made.owner[i] for i in (0, 1)} == {1}
    assert set(found.seconds) == {1, 2}


def test_stages_that_the_model_asks_for():
    nodes, offers, _ = chain(6)
    made, found = staged(nodes, offers, [1] * 6, team=(0, 1), hints=dict(enumerate([0, 3, 3, 3, 3, 3])))
    assert made.owner == [0, 1, 1, 1, 1, 1]
    assert found.notes == ()
    # More stages than workers are balanced, and stay whole.
    made, _ = staged(nodes, offers, [1] * 6, team=(0, 1), hints=dict(enumerate([0, 1, 1, 1, 1, 2])))
    assert made.owner in ([0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("hints", "why"),
    [({0: 0, 1: 1}, "not every node"), (dict(enumerate([1, 1, 0, 1])), "leads back from 1 to 0 at node 'n2'")],
)
def test_stages_that_cannot_be_kept_are_told(hints, why):
    nodes, offers, _ = chain(4)
    made, found = staged(nodes, offers, [1] * 4, team=(0, 1), hints=hints)
    assert made.owner == [0, 0, 1, 1]
    assert why in found.notes[0]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_stages_of_random_graphs_are_valid_plans(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 30)
    nodes = [
        PlanNode(f"n{i}", tuple(f"v{rng.randint(-1, i - 1)}" for _ in range(rng.randint(1, 3))), (f"v{i}",))
        for i in range(size)
    ]
    claims, left = [], list(range(size))
    while left:
        width = rng.choice([1, 1, 2, 3])
        claims.append(tuple(left[:width]))
        left = left[width:]
    traits = [ProviderTraits("other", False), *(ProviderTraits(f"w{i}", True) for i in range(3))]
    offers = [Offer(0, (i,)) for i in range(size) if rng.random() < 0.2]
    offers += [Offer(worker, claim) for worker in (1, 2, 3) for claim in claims]
    offers += [Offer(4, (i,)) for i in range(size)]
    traits.append(ProviderTraits("last", True))
    pins = {rng.randrange(size): 1} if rng.random() < 0.3 else {}
    made, found = staged(nodes, offers, [rng.random() for _ in nodes], (1, 2, 3), pins, traits=traits)
    assert made.unclaimed == []
    again, _ = staged(nodes, offers, [1.0] * size, (1, 2, 3), pins, traits=traits)
    assert set(found.seconds) <= {1, 2, 3}
    for one in (made, again):
        assert {position for position in pins if one.owner[position] not in (1, 4)} == set()
