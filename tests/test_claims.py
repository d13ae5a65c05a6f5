"""What may be answered to the question what a provider claims: anything else blames the provider, before it is planned
with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.wire.graph import Graph, Node, Value
from outrider.providers.wire.messages import Claims
from outrider.scheduler.claims import checked
from outrider.scheduler.errors import ClaimError
from outrider.scheduler.waves import left_and_entered
from tests import rogue_providers as rogue

pytestmark = pytest.mark.fast
quick = settings(deadline=None, derandomize=True, max_examples=60)


def graph(reads: list[list[int]], first: int = 0) -> Graph:
    """Nodes n0, n1, ... that read the outputs of those listed; their indices begin at `first`."""
    values = [Value(f"v{i}", "float32", None) for i in range(len(reads))]
    nodes = [
        Node(first + i, f"n{i}", "Sum", "", 13, {}, tuple(values[one] for one in read), (values[i],))
        for i, read in enumerate(reads)
    ]
    return Graph("g", tuple(nodes), (), (), {}, {"": 21})


def answer(claims: list[Any], declines: list[Any] | None = None) -> Claims:
    return Claims(1, 1, claims, declines or [], None)


def claim(*nodes: Any, **more: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "reference": False, "cost": None, **more}


CHAIN = graph([[], [0], [1]])


def test_what_is_within_the_contract_is_taken_as_it_is() -> None:
    said = answer([claim(2, cost=0.5), claim(0, reference=True)], [{"node": 1, "reason": "no"}])
    assert checked("p", CHAIN, said) == ([(("n2",), False, 0.5), (("n0",), True, None)], {"n1": "no"})
    assert checked("p", graph([[], []], first=7), answer([claim(8, 7)])) == ([(("n1", "n0"), False, None)], {})


@pytest.mark.parametrize("how", [how for how in rogue.CLAIMS if "error" not in how and "another" not in how])
def test_what_is_not_is_an_error_that_blames_the_provider(how: str) -> None:
    said = answer([claim(0)])
    said = Claims(**{**vars(said), **rogue.CLAIMS[how](said)})
    with pytest.raises(ClaimError, match="provider p made") as caught:
        checked("p", CHAIN, said)
    assert caught.value.provider == "p"


def test_a_claim_that_is_not_convex_names_what_is_between() -> None:
    with pytest.raises(ClaimError, match="'n0' and 1 more that is not convex: 'n1'") as caught:
        checked("p", CHAIN, answer([claim(0, 2)]))
    assert caught.value.node == "n1"


def test_two_claims_that_are_in_each_others_way_are_for_the_planner() -> None:
    crossed = graph([[], [0], [], [2]])
    assert len(checked("p", crossed, answer([claim(0, 3), claim(1, 2)]))[0]) == 2


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 4) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@quick
@given(
    st.lists(st.fixed_dictionaries({}, optional={"nodes": ANYTHING, "reference": ANYTHING, "cost": ANYTHING})),
    st.lists(st.fixed_dictionaries({}, optional={"node": ANYTHING, "reason": ANYTHING})),
)
def test_any_answer_is_an_error_or_disjoint_claims_of_what_was_shown(claims: list[Any], declines: list[Any]) -> None:
    try:
        offered, declined = checked("p", CHAIN, answer(claims, declines))
    except ClaimError:
        return
    named = [name for one in offered for name in one.nodes]
    assert len(set(named)) == len(named)
    assert {*named, *declined} <= {"n0", "n1", "n2"} and not set(named) & set(declined)
    assert all(one.nodes and type(one.reference) is bool for one in offered)


def enters_again(edges: list[tuple[int, int]], inside: set[int], between: int) -> bool:
    """Whether `between`, outside, is on a path from the group to itself; by trying all of them."""
    if between in inside:
        return False
    reach = {(a, b) for a, b in edges}
    for _ in range(8):
        reach |= {(a, d) for (a, b), (c, d) in itertools.product(reach, reach) if b == c}
    return any((a, between) in reach for a in inside) and any((between, b) in reach for b in inside)


@quick
@given(st.data())
def test_a_group_that_a_path_leaves_and_enters_again_is_found(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 7))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    owner = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))  # 0: in no group
    groups = [[i for i in range(count) if owner[i] == one] for one in (1, 2)]
    groups = [group for group in groups if group]
    broken = [any(enters_again(edges, set(group), i) for i in range(count)) for group in groups]
    found = left_and_entered(edges, groups)
    if True not in broken:
        assert found is None
    else:
        assert found is not None and found[0] == broken.index(True)
        assert enters_again(edges, set(groups[found[0]]), found[1])
