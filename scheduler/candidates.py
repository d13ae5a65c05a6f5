"""Who offered to take each node, at what cost, and who did not and why: for the placement report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.providers.wire.graph import Graph
from outrider.scheduler.costs import Crossing, NodeCost, estimate, measured
from outrider.scheduler.placement import Answers, Placer
from outrider.scheduler.report import NodeClaim, NodeDecline

CLAIMED, MEASURED, ESTIMATED = "claimed", "measured", "estimated"
_NO_CROSSING = Crossing(0.0, 0.0)


def candidates(placer: Placer) -> list[tuple[tuple[NodeClaim, ...], tuple[NodeDecline, ...]]]:
    """Of each node of the graph, in order, the claims that stand and the declines, by the priority of providers.

    The cost of a claim is what was measured of the provider, else what it said itself, else an estimate; what holds for
    several nodes together is shared out in proportion to their estimates.
    """
    graph, answers = placer.graph, placer.answers
    names = [worker.name for worker in placer.workers]
    plain = estimate(graph, _NO_CROSSING, placer.sizes)
    seen = measured(plain, placer.measured).nodes
    told = claimed_costs(answers, graph, plain.nodes)
    found = []
    for position, node in enumerate(graph.nodes):
        claims, declines = [], []
        for provider, name in enumerate(names):
            if not answers.claimed(provider, node.name):
                declines.append(NodeDecline(name, answers.reason(provider, node.name)))
            elif placer.measured_by.get(position) == provider:
                claims.append(NodeClaim(name, seen[position].seconds, MEASURED))
            elif (provider, node.name) in told:
                claims.append(NodeClaim(name, told[provider, node.name], CLAIMED))
            else:
                cost = plain.nodes[position]
                claims.append(NodeClaim(name, cost.seconds, ESTIMATED, cost.exact))
        found.append((tuple(claims), tuple(declines)))
    return found


def claimed_costs(answers: Answers, graph: Graph, estimates: Sequence[NodeCost]) -> Mapping[tuple[int, str], float]:
    """(provider, node) -> its share, in seconds, of what the provider said of the claim that holds it."""
    position = {node.name: number for number, node in enumerate(graph.nodes)}
    shares: dict[tuple[int, str], float] = {}
    for provider, nodes, cost in answers.claims:
        if cost is None:
            continue
        weights = {name: estimates[position[name]].seconds for name in nodes if name in position}
        whole = sum(weights.values())
        for name, weight in weights.items():
            shares[provider, name] = cost * (weight / whole if whole else 1 / len(weights))
    return shares
