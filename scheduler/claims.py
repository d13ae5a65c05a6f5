"""What a provider may answer when it is asked what it claims. Pure, and linear in what was shown and answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.providers.wire.graph import Graph, Node
from outrider.providers.wire.messages import Claims
from outrider.scheduler.planning import ClaimError
from outrider.scheduler.waves import left_and_entered


class Offered(NamedTuple):
    """One claim: nodes by name, whether they are served by a stop-gap, seconds or None."""

    nodes: tuple[str, ...]
    reference: bool
    cost: float | None


def checked(provider: str, graph: Graph, answer: Claims) -> tuple[list[Offered], dict[str, str]]:
    """The claims, and the declined nodes with their reasons, of a provider's answer about `graph`.

    Raises ClaimError for nodes that were not shown, that are in two claims, or claimed and declined; for an empty claim
    and for one that cannot run in one step; and for what is no claim or decline in form.
    """
    shown = {node.index: node for node in graph.nodes}
    claimed: set[int] = set()
    offered: list[Offered] = []
    for claim in answer.claims:
        nodes, reference, cost = claim.get("nodes"), claim.get("reference"), claim.get("cost")
        if type(nodes) is not list or not nodes:
            raise _broken(provider, "an empty claim" if nodes == [] else f"a claim of {nodes!r:.60}, no list of nodes")
        for index in nodes:
            node = _node(provider, shown, index, "claim")
            if index in claimed:
                raise _broken(provider, f"two claims on node {node.name!r}; its claims may not overlap", node.name)
            claimed.add(index)
        if type(reference) is not bool:
            raise _broken(provider, f"a claim whose reference is {reference!r:.60}, not True or False")
        if cost is not None and not (type(cost) is float and 0 <= cost < math.inf):
            raise _broken(provider, f"a claim whose cost is {cost!r:.60}, no number of seconds")
        offered.append(Offered(tuple([shown[index].name for index in nodes]), reference, cost))
    declined: dict[str, str] = {}
    for decline in answer.declines:
        node, reason = _node(provider, shown, decline.get("node"), "decline"), decline.get("reason")
        if node.index in claimed:
            raise _broken(provider, f"a claim on node {node.name!r}, which it declines too", node.name)
        if type(reason) is not str:
            raise _broken(provider, f"a decline of node {node.name!r} whose reason is {reason!r:.60}", node.name)
        declined[node.name] = reason
    _check_convex(provider, graph.nodes, [claim["nodes"] for claim in answer.claims if len(claim["nodes"]) > 1])
    return offered, declined


def _node(provider: str, shown: dict[int, Node], index: Any, what: str) -> Node:
    node = shown.get(index) if type(index) is int else None
    if node is None:
        raise _broken(provider, f"a {what} of node number {index!r:.60}, which was not shown")
    return node


def _check_convex(provider: str, nodes: Sequence[Node], claims: Sequence[Sequence[int]]) -> None:
    """Of the graph that was shown: what the provider could not see is for the planner."""
    if not claims:
        return
    position = {node.index: i for i, node in enumerate(nodes)}
    producer = {value.name: i for i, node in enumerate(nodes) for value in node.outputs if not value.constant}
    edges = [
        (producer[value.name], i)
        for i, node in enumerate(nodes)
        for value in (*node.inputs, *node.captures)
        if value.name in producer
    ]
    found = left_and_entered(edges, [[position[index] for index in claim] for claim in claims])
    if found is not None:
        number, between = found
        first = nodes[position[claims[number][0]]].name
        outside = nodes[between].name
        raise _broken(
            provider,
            f"a claim of {first!r} and {len(claims[number]) - 1} more that is not convex: {outside!r}, which is not in "
            "it, needs some of its nodes and feeds others, so they cannot run in one step",
            outside,
        )


def _broken(provider: str, what: str, node: str | None = None) -> ClaimError:
    return ClaimError(
        f"provider {provider} made {what}. Its claim() must be corrected.", provider=provider, node=node, reason=what
    )
