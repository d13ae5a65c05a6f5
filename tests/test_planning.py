"""The planner: claims, owners, partitions, edges. Oracles: direct evaluation, the rules done naively, brute force."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.planning import (
    CALLER,
    ClaimError,
    Edge,
    Offer,
    PlanNode,
    ProviderTraits,
    edges,
    interfaces,
    plan,
)
from outrider.scheduler.waves import cyclic_groups, own_before, owner_waves, strong_components, topological_order
from tests.plan_invariants import violations

pytestmark = pytest.mark.fast

MERGES = ProviderTraits("merges", merge=True)
PLAIN = ProviderTraits("plain", merge=False)
GRAPH_INPUTS = ("x", "y")
INITIALIZERS = ("w",)


def node(name, inputs="", constant=False):
    """A node `a` with one output `a`: single letters make the graphs below readable."""
    return PlanNode(name, tuple(inputs.split()), (name,), constant)


def singles(provider, *positions):
    return [Offer(provider, (position,)) for position in positions]


def nodes_of(made):
    return [[position for unit in part.units for position in made.units[unit].nodes] for part in made.partitions]


# ---------------------------------------------------------------------------------------------------- random problems


@st.composite
def problems(draw):
    """(nodes, offers, providers, graph outputs, pins): a random graph and random, overlapping, indivisible claims."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    size = rng.randint(1, 40)
    constants = rng.choice([0.0, 0.2, 0.5])
    fused = rng.choice([0.0, 0.3, 0.8])
    covers = rng.choice([0.3, 0.6, 1.0])
    providers = [ProviderTraits(f"p{i}", rng.random() < 0.5) for i in range(rng.randint(2, 4))]
    nodes, made_of_constants, values = [], ["w"], [*GRAPH_INPUTS, "w"]
    for position in range(size):
        constant = rng.random() < constants
        source = made_of_constants if constant else values[-rng.randint(1, 12) :] + list(GRAPH_INPUTS)
        inputs = tuple(rng.choice(source) for _ in range(rng.randint(0 if constant else 1, 3)))
        outputs = tuple(f"v{position}.{i}" for i in range(rng.randint(1, 2)))
        nodes.append(PlanNode(f"n{position}", inputs, outputs, constant))
        values.extend(outputs)
        if constant:
            made_of_constants.extend(outputs)
    offers = []
    for provider in range(len(providers)):
        mine = [position for position in range(size) if rng.random() < covers]
        if rng.random() < 0.5:
            rng.shuffle(mine)
        while mine:
            count = rng.randint(2, 4) if rng.random() < fused else 1
            offers.append(Offer(provider, tuple(mine[:count])))
            mine = mine[count:]
    rng.shuffle(offers)
    produced = [value for n in nodes for value in n.outputs]
    graph_outputs = [value for value in produced if rng.random() < 0.1] or [produced[-1]]
    pins = {p: rng.randrange(len(providers)) for p in range(size) if rng.random() < 0.1} if rng.random() < 0.5 else {}
    return nodes, offers, providers, graph_outputs, pins


def completed(problem):
    """The same problem with a last provider that claims all nodes one by one, so that nothing is left unclaimed."""
    nodes, offers, providers, graph_outputs, pins = problem
    last = len(providers)
    everything = [Offer(last, (position,)) for position in range(len(nodes))]
    return nodes, [*offers, *everything], [*providers, ProviderTraits("last", last % 2 == 0)], graph_outputs, {}


def evaluate(n, get, interned):
    """Hash-consing: one number per distinct expression, so that equal numbers mean equal computations."""
    key = (n.name, tuple(get(value) for value in n.inputs))
    number = interned.setdefault(key, len(interned))
    return {value: (number, i) for i, value in enumerate(n.outputs)}


@settings(deadline=None, derandomize=True, max_examples=300)
@given(problems())
def test_a_plan_run_step_by_step_gives_what_the_graph_gives(problem):
    nodes, offers, providers, graph_outputs, _ = problem = completed(problem)
    made = plan(*problem)
    assert made.unclaimed == []
    assert violations(made, nodes, offers, providers) == []

    interned = {}
    given_values = {value: value for value in (*GRAPH_INPUTS, *INITIALIZERS)}
    direct = dict(given_values)
    for n in nodes:
        direct.update(evaluate(n, direct.__getitem__, interned))

    crossing = edges(made, nodes, GRAPH_INPUTS, graph_outputs)
    arrived = [{} for _ in made.partitions]
    returned = {}

    def send(producer, values):
        for edge in crossing:
            if edge.producer == producer:
                for consumer in edge.consumers:
                    assert consumer > producer
                    arrived[consumer][edge.value] = values[edge.value]
                if edge.to_caller:
                    returned[edge.value] = values[edge.value]

    send(CALLER, given_values)
    faces = interfaces(made, nodes, GRAPH_INPUTS, graph_outputs)
    for number, partition in enumerate(made.partitions):
        inside = arrived[number]
        for unit_number in partition.units:
            unit, face = made.units[unit_number], faces[unit_number]
            own = {value: inside[value] for value in face.inputs} | {value: value for value in INITIALIZERS}
            for position in (*unit.constant_nodes, *unit.nodes):
                assert not set(own) & set(nodes[position].outputs), "a value is made twice in one unit"
                own.update(evaluate(nodes[position], own.__getitem__, interned))
            inside.update({value: own[value] for value in face.outputs})
        send(number, inside)
    assert returned == {value: direct[value] for value in graph_outputs}


@settings(deadline=None, derandomize=True, max_examples=300)
@given(problems())
def test_invariants_hold_with_unclaimed_nodes_and_pins(problem):
    nodes, offers, providers, _, pins = problem
    made = plan(*problem)
    assert violations(made, nodes, offers, providers) == []
    for position, n in enumerate(nodes):
        if not n.constant:
            owner = made.owner[position]
            assert (owner is None) == (position in made.unclaimed)
            if position in pins:
                assert owner in (pins[position], None)
                assert ((position, pins[position]) in made.pin_declined) == (owner is None)
            elif owner is not None:
                assert any(position in offer.nodes for offer in offers if offer.provider == owner)
    assert all(nodes[position].constant is False for position, _ in made.pin_declined)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(problems())
def test_a_node_with_a_later_owner_was_refused_to_each_earlier_claimant_for_a_reason(problem):
    nodes, offers, providers, graph_outputs, _ = problem
    made = plan(nodes, offers, providers, graph_outputs)
    dropped = [d.offer for d in made.dropped]
    for offer in offers:
        running = [p for p in offer.nodes if not nodes[p].constant]
        counted = running if providers[offer.provider].merge else list(offer.nodes)
        if not running or offer in dropped or all(made.owner[p] == offer.provider for p in running):
            continue
        # Lapsed: some node of it belongs to a provider that stands earlier.
        assert any(made.owner[p] is not None and made.owner[p] < offer.provider for p in counted)
    for offer in dropped:
        assert len(offer.nodes) > 1


@settings(deadline=None, derandomize=True, max_examples=100)
@given(problems())
def test_a_plan_does_not_depend_on_the_order_of_another_providers_offers(problem):
    nodes, offers, providers, graph_outputs, pins = problem
    grouped = sorted(offers, key=lambda offer: offer.provider)
    first, second = plan(*problem), plan(nodes, grouped, providers, graph_outputs, pins)
    assert (first.owner, nodes_of(first)) == (second.owner, nodes_of(second))


# ------------------------------------------------------------------------------------------------ cycles among claims


def test_two_chains_whose_claims_wait_for_each_other():
    """a -> b and c -> d; claims {a, d} and {b, c}: each is convex, together they are a cycle."""
    nodes = [node("a", "x"), node("b", "a"), node("c", "y"), node("d", "c")]
    offers = [Offer(0, (0, 3)), Offer(1, (1, 2)), *singles(2, 0, 1, 2, 3)]
    made = plan(nodes, offers, [PLAIN, PLAIN, PLAIN], ["b", "d"])
    assert made.owner == [0, 2, 2, 0]
    assert [d.offer for d in made.dropped] == [offers[1]]
    assert "b, c" in made.dropped[0].reason
    assert nodes_of(made) == [[2], [0, 3], [1]]


def test_of_two_such_claims_of_one_provider_the_later_is_dropped():
    nodes = [node("a", "x"), node("b", "a"), node("c", "y"), node("d", "c")]
    offers = [Offer(0, (1, 2)), Offer(0, (0, 3))]
    made = plan(nodes, offers, [PLAIN], ["b", "d"])
    assert made.owner == [None, 0, 0, None]
    assert made.unclaimed == [0, 3]
    assert [d.offer for d in made.dropped] == [offers[1]]


def test_a_claim_that_is_not_convex_is_dropped_and_not_the_bystander():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    made = plan(nodes, [Offer(0, (0, 2)), *singles(1, 0, 1, 2)], [PLAIN, PLAIN], ["c"])
    assert made.owner == [1, 1, 1]
    assert len(made.dropped) == 1


def test_nodes_of_a_dropped_claim_go_to_the_next_claimant_even_if_that_claim_is_cyclic_too():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    offers = [Offer(0, (0, 2)), Offer(1, (0, 2)), *singles(2, 0, 1, 2)]
    made = plan(nodes, offers, [PLAIN, PLAIN, PLAIN], ["c"])
    assert made.owner == [2, 2, 2]
    assert [d.offer for d in made.dropped] == offers[:2]


def test_a_claim_with_a_pinned_node_outlives_a_cycle_with_an_earlier_provider():
    nodes = [node("a", "x"), node("b", "a"), node("c", "y"), node("d", "c")]
    offers = [Offer(0, (0, 3)), Offer(1, (1, 2)), *singles(2, 0, 1, 2, 3)]
    made = plan(nodes, offers, [PLAIN, PLAIN, PLAIN], ["b", "d"], {1: 1})
    assert made.owner == [2, 1, 1, 2]


def give_up_naively(graph, groups):
    """The rule of `cyclic_groups` as it is written."""
    kept = set(range(len(groups)))
    while True:
        at = {member: min(groups[k]) for k in kept for member in groups[k]}
        component = strong_components([(at.get(u, u), at.get(v, v)) for u, v in graph])
        of_group = {k: component.get(at[groups[k][0]], -1 - k) for k in kept}
        count = {}
        for number in component.values():
            count[number] = count.get(number, 0) + 1
        cyclic = {number for number in of_group.values() if count.get(number, 1) > 1}
        if not cyclic:
            return set(range(len(groups))) - kept
        for number in cyclic:
            kept.remove(max(k for k in kept if of_group[k] == number))


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.integers(0, 2**32 - 1))
def test_giving_up_groups_by_halving_is_the_rule(seed):
    rng = random.Random(seed)
    size = rng.randint(2, rng.choice([8, 100]))
    density = rng.uniform(0.2, 3) / size
    graph = [(u, v) for v in range(size) for u in range(v) if rng.random() < density]
    rest = rng.sample(range(size), size)
    groups = []
    while len(rest) > 1:
        count = min(rng.randint(2, 3), len(rest))
        groups.append(rest[:count])
        rest = rest[count:]
    groups = groups[: rng.randint(0, len(groups))]
    assert cyclic_groups(graph, groups) == give_up_naively(graph, groups)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=24))
def test_strong_components_are_mutual_reachability(size, pairs):
    pairs = [(u, v) for u, v in pairs if u < size and v < size]
    reach = [[u == v for v in range(size)] for u in range(size)]
    for u, v in pairs:
        reach[u][v] = True
    for k, i, j in itertools.product(range(size), repeat=3):
        reach[i][j] = reach[i][j] or (reach[i][k] and reach[k][j])
    component = strong_components(pairs)
    named = {vertex for pair in pairs for vertex in pair}
    assert set(component) == named
    for u, v in itertools.product(named, repeat=2):
        assert (component[u] == component[v]) == (reach[u][v] and reach[v][u])


def test_a_long_chain_needs_no_recursion():
    size = 50_000
    chain = [(i, i + 1) for i in range(size - 1)]
    assert len(set(strong_components(chain).values())) == size
    assert set(strong_components([*chain, (size - 1, 0)]).values()) == {0}


# -------------------------------------------------------------------------------------------------------------- waves


def fewest_blocks(owner, graph):
    """By trying every way of grouping vertices of one owner so that the quotient graph has no cycle."""
    size = len(owner)
    best = size

    def extend(block_of, blocks):
        nonlocal best
        if len(blocks) >= best:
            return
        vertex = len(block_of)
        if vertex == size:
            successors = [[] for _ in blocks]
            for u, v in graph:
                if block_of[u] != block_of[v]:
                    successors[block_of[u]].append(block_of[v])
            if len(topological_order(successors)) == len(blocks):
                best = len(blocks)
            return
        for number, whose in enumerate(blocks):
            if whose == owner[vertex]:
                extend([*block_of, number], blocks)
        extend([*block_of, len(blocks)], [*blocks, owner[vertex]])

    best = size + 1
    extend([], [])
    return best


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1), st.floats(0.1, 0.7))
def test_two_owners_get_at_most_one_partition_more_than_the_best_cut(size, seed, density):
    rng = random.Random(seed)
    owner = [rng.randrange(2) for _ in range(size)]
    graph = [(u, v) for v in range(size) for u in range(v) if rng.random() < density]
    nodes = [PlanNode(f"n{v}", tuple(f"v{u}" for u, w in graph if w == v) or ("x",), (f"v{v}",)) for v in range(size)]
    made = plan(nodes, [Offer(o, (v,)) for v, o in enumerate(owner)], [PLAIN, MERGES], [f"v{size - 1}"])
    assert made.owner == owner
    assert fewest_blocks(owner, graph) <= len(made.partitions) <= fewest_blocks(owner, graph) + 1


def blocks_by_scanning(owner, successors, changes):
    """Owner waves with nothing kept along the way."""
    left, blocks = set(range(len(owner))), []
    while left:

        def is_ready(vertex, left=left):
            return vertex in left and not any(vertex in successors[other] for other in left)

        ready = {o: [v for v in left if owner[v] == o and is_ready(v)] for o in sorted({owner[v] for v in left})}
        chosen = max(
            (o for o in ready if ready[o]), key=lambda o: (max(changes[v] for v in ready[o]), len(ready[o]), -o)
        )
        block = set()
        while more := {v for v in left if owner[v] == chosen and is_ready(v)}:
            block |= more
            left -= more
        blocks.append(block)
    return blocks


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_waves_take_the_owner_that_the_rule_names(seed):
    rng = random.Random(seed)
    size, owners, density = rng.randint(1, 20), rng.randint(1, 4), rng.uniform(0.02, 0.4)
    owner = [rng.randrange(owners) for _ in range(size)]
    successors = [[v for v in range(u + 1, size) if rng.random() < density] for u in range(size)]
    changes = [0] * size
    for u in reversed(range(size)):
        changes[u] = max((changes[v] + (owner[v] != owner[u]) for v in successors[u]), default=0)
    blocks = owner_waves(owner, successors, topological_order(successors))
    assert [set(block) for block in blocks] == blocks_by_scanning(owner, successors, changes)


def test_waves_start_with_the_owner_of_the_longest_chain():
    """Starting with owner 0, whose only ready vertex has nothing behind it, would cost a fourth block."""
    successors = [[], [2], [3], []]
    assert owner_waves([0, 1, 0, 1], successors, topological_order(successors)) == [[1], [2, 0], [3]]


def test_siblings_share_a_partition_and_a_diamond_through_another_provider_is_cut():
    nodes = [node("a", "x"), node("b", "a"), node("c", "a"), node("d", "b c")]
    made = plan(nodes, [*singles(0, 1, 2), *singles(1, 0, 3)], [PLAIN, MERGES], ["d"])
    assert nodes_of(made) == [[0], [1, 2], [3]]
    assert [unit.nodes for unit in made.units] == [(0,), (1,), (2,), (3,)]
    assert edges(made, nodes, ["x"], ["d"]) == [
        Edge("x", CALLER, (0,), False),
        Edge("a", 0, (1,), False),
        Edge("b", 1, (2,), False),
        Edge("c", 1, (2,), False),
        Edge("d", 2, (), True),
    ]


def test_neighbouring_claims_are_one_unit_where_the_provider_merges():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    assert [u.nodes for u in plan(nodes, singles(0, 0, 1, 2), [MERGES], ["c"]).units] == [(0, 1, 2)]
    assert [u.claims for u in plan(nodes, singles(0, 0, 1, 2), [MERGES], ["c"]).units] == [(0, 1, 2)]
    assert [u.nodes for u in plan(nodes, singles(0, 0, 1, 2), [PLAIN], ["c"]).units] == [(0,), (1,), (2,)]


def test_values_between_units_of_one_partition_are_no_edges():
    nodes = [node("a", "x"), node("b", "a w")]
    made = plan(nodes, singles(0, 0, 1), [PLAIN], ["b"])
    assert edges(made, nodes, ["x"], ["b"]) == [Edge("x", CALLER, (0,), False), Edge("b", 0, (), True)]
    assert [(face.inputs, face.outputs) for face in interfaces(made, nodes, ["x"], ["b"])] == [
        (("x",), ("a",)),
        (("a",), ("b",)),
    ]


def test_an_input_that_is_an_output_goes_from_the_caller_to_the_caller():
    assert edges(plan([], [], [PLAIN], ["x"]), [], ["x", "unused"], ["x"]) == [Edge("x", CALLER, (), True)]


# ---------------------------------------------------------------------------------------------------------- constants


def test_constants_are_replicated_into_each_unit_that_needs_them():
    nodes = [node("k", "w", True), node("l", "k", True), node("a", "x l"), node("b", "a"), node("c", "b k")]
    made = plan(nodes, [*singles(0, 0, 1, 2, 4), *singles(1, 3)], [MERGES, PLAIN], ["c"])
    assert [(unit.nodes, unit.constant_nodes) for unit in made.units] == [((2,), (0, 1)), ((3,), ()), ((4,), (0,))]
    assert made.owner == [None, None, 0, 1, 0]
    assert [edge.value for edge in edges(made, nodes, ["x"], ["c"])] == ["x", "a", "b", "c"]


def test_a_constant_for_a_provider_that_does_not_merge_is_an_ordinary_node_of_its_first_claimant():
    nodes = [node("k", "", True), node("a", "x k")]
    made = plan(nodes, [*singles(0, 1), *singles(1, 0)], [PLAIN, MERGES], ["a"])
    assert made.owner == [1, 0]
    assert nodes_of(made) == [[0], [1]]
    assert edges(made, nodes, ["x"], ["a"])[1] == Edge("k", 0, (1,), False)


def test_a_constant_that_the_consumers_provider_did_not_claim_is_no_part_of_its_unit():
    nodes = [node("k", "", True), node("l", "k", True), node("a", "x l")]
    made = plan(nodes, [*singles(0, 1, 2), *singles(1, 0)], [MERGES, MERGES], ["a"])
    # `l` is claimed, but it is made of `k`, which is not: so `l` is ordinary, and `k`, which it needs, too.
    assert made.owner == [1, 0, 0]
    assert [(unit.provider, unit.nodes, unit.constant_nodes) for unit in made.units] == [(1, (0,), ()), (0, (1, 2), ())]


def test_a_constant_graph_output_is_an_ordinary_node_and_what_is_made_of_it_there_too():
    nodes = [node("k", "", True), node("m", "", True), node("l", "k m", True), node("a", "x l")]
    made = plan(nodes, singles(0, 0, 1, 2, 3), [MERGES], ["k", "a"])
    assert [(unit.nodes, unit.constant_nodes) for unit in made.units] == [((0, 2, 3), (1,))]
    assert [edge.value for edge in edges(made, nodes, ["x"], ["k", "a"]) if edge.to_caller] == ["k", "a"]


def test_of_a_constant_that_is_made_in_two_places_the_first_serves_the_others():
    """`k` and `l` are outputs. `l` runs in the unit of `c` and, since `k` runs in the unit of `a`, there too."""
    nodes = [
        node("k", "", True),
        node("l", "k", True),
        node("a", "x l"),
        node("b", "a"),
        node("c", "b l"),
    ]
    offers = [*singles(0, 0, 1, 2), Offer(1, (1, 4)), *singles(2, 3)]
    made = plan(nodes, offers, [MERGES, PLAIN, PLAIN], ["k", "c"])
    assert [unit.nodes for unit in made.units] == [(0, 1, 2), (3,), (1, 4)]
    assert Edge("l", 0, (), False) not in edges(made, nodes, ["x"], ["k", "c"])
    assert Edge("l", 0, (), True) in edges(made, nodes, ["x"], ["k", "l", "c"])
    assert Edge("k", 0, (2,), True) in edges(made, nodes, ["x"], ["k", "l", "c"])


def test_a_constant_that_nobody_needs_is_dropped_and_one_that_is_needed_and_unclaimed_is_reported():
    nodes = [node("k", "", True), node("l", "", True), node("a", "x l")]
    made = plan(nodes, singles(0, 0, 2), [MERGES], ["a"])
    assert made.owner == [None, None, 0]
    assert made.unclaimed == [1]
    assert nodes_of(made) == [[2]]


def test_a_shared_constant_makes_no_merged_claim_lapse():
    nodes = [node("k", "", True), node("a", "x k"), node("b", "a k")]
    offers = [Offer(0, (0, 1)), Offer(1, (0, 2))]
    made = plan(nodes, offers, [MERGES, MERGES], ["b"])
    assert [unit.nodes for unit in made.units] == [(1,), (2,)]
    assert [unit.constant_nodes for unit in made.units] == [(0,), (0,)]


def test_a_claim_that_is_compiled_as_it_is_keeps_its_constant_and_serves_others_with_it():
    nodes = [node("k", "", True), node("a", "x k"), node("b", "a k")]
    made = plan(nodes, [Offer(0, (0, 1)), Offer(1, (2,))], [PLAIN, PLAIN], ["b"])
    assert [unit.nodes for unit in made.units] == [(0, 1), (2,)]
    assert Edge("k", 0, (1,), False) in edges(made, nodes, ["x"], ["b"])


# ------------------------------------------------------------------------------------------- priorities, pins, errors


def test_an_indivisible_claim_lapses_as_a_whole_and_its_other_nodes_go_on():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    offers = [*singles(0, 1), Offer(1, (0, 1)), *singles(2, 0, 1, 2)]
    made = plan(nodes, offers, [PLAIN, PLAIN, PLAIN], ["c"])
    assert made.owner == [2, 0, 2]
    assert made.dropped == []


def test_a_pin_voids_the_claims_of_others_and_lets_the_pinned_claim_go_first():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    offers = [Offer(0, (0, 1)), *singles(0, 2), Offer(1, (1, 2)), *singles(2, 0)]
    made = plan(nodes, offers, [PLAIN, PLAIN, PLAIN], ["c"], {1: 1})
    assert made.owner == [2, 1, 1]
    assert made.pin_declined == []


def test_a_pin_that_the_provider_does_not_take_is_reported_and_moves_to_nobody_else():
    nodes = [node("a", "x"), node("b", "a")]
    made = plan(nodes, singles(0, 0, 1), [PLAIN, PLAIN], ["b"], {0: 1})
    assert made.owner == [None, 0]
    assert made.pin_declined == [(0, 1)]
    assert made.unclaimed == [0]


def test_a_pin_on_a_constant_has_no_effect():
    nodes = [node("k", "", True), node("a", "x k")]
    offers = singles(0, 0, 1)
    assert plan(nodes, offers, [MERGES, PLAIN], ["a"], {0: 1}) == plan(nodes, offers, [MERGES, PLAIN], ["a"])


@pytest.mark.parametrize(
    ("offers", "culprit", "reason"),
    [
        ([Offer(1, ())], None, "no node"),
        ([Offer(1, (2,))], 2, "none of the 2"),
        ([Offer(1, (-1,))], -1, "none of the 2"),
        ([Offer(1, (0, 0))], "a", "twice"),
        ([Offer(1, (0, 1)), Offer(1, (1,))], "b", "twice"),
    ],
)
def test_malformed_claims_blame_their_provider(offers, culprit, reason):
    nodes = [node("a", "x"), node("b", "a")]
    with pytest.raises(ClaimError, match="merges") as caught:
        plan(nodes, [*singles(0, 0, 1), *offers], [PLAIN, MERGES], ["b"])
    assert (caught.value.provider, caught.value.node) == ("merges", culprit)
    assert reason in caught.value.reason


def test_nodes_out_of_order_are_refused():
    with pytest.raises(ValueError, match="'b' stands before 'a'"):
        plan([node("b", "a"), node("a", "x")], [], [PLAIN], ["b"])


def test_validation_finds_a_broken_plan():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    offers = [*singles(0, 0, 2), *singles(1, 1)]
    made = plan(nodes, offers, [PLAIN, PLAIN], ["c"])
    assert violations(made, nodes, offers, [PLAIN, PLAIN]) == []
    made.units[0], made.units[2] = made.units[2], made.units[0]
    assert any("not made before it" in problem for problem in violations(made, nodes, offers, [PLAIN, PLAIN]))
    made.units[0] = made.units[2]
    assert any("lies in units of" in problem for problem in violations(made, nodes, offers, [PLAIN, PLAIN]))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=14), st.data())
def test_the_last_of_ones_own_before(owners: list[int], data: st.DataObject) -> None:
    pairs = [(i, j) for j in range(len(owners)) for i in range(j)]
    edges = [pair for pair in pairs if data.draw(st.integers(0, 3)) == 0]
    reaches = [set() for _ in owners]  # by definition: all ancestors
    for vertex in range(len(owners)):
        for before, after in edges:
            if after == vertex:
                reaches[vertex] |= {before} | reaches[before]
    expected = [max((a for a in reaches[v] if owners[a] == owner), default=-1) for v, owner in enumerate(owners)]
    assert own_before(owners, edges) == expected


# ------------------------------------------------------------------------------------------------ what a strategy wants


def test_preferred_offers_go_before_earlier_providers_but_not_before_pins():
    nodes = [node("a", "x"), node("b", "a"), node("c", "b")]
    offers = [*singles(0, 0, 1, 2), *singles(1, 0, 1, 2)]
    assert plan(nodes, offers, [MERGES, MERGES], ["c"], preferred=[4]).owner == [0, 1, 0]
    assert plan(nodes, offers, [MERGES, MERGES], ["c"], {1: 0}, preferred=[4, 5]).owner == [0, 0, 1]
    assert plan(nodes, offers, [MERGES, MERGES], ["c"], {0: 1}).owner == [1, 0, 0]
