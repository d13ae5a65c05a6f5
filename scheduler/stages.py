"""strategy="pipeline": workers of one kind share the nodes that all of them claim, as a chain of balanced stages.

The shared nodes are put into one topological order and cut into as many stretches as there are workers. A stretch of a
topological order is convex, so a run visits each worker once where nothing else lies between. The cut minimises the
cost of the dearest stage, its nodes and the bytes that it reads and hands on: what bounds the runs per second.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.scheduler.costs import Costs
from outrider.scheduler.planning import Offer, Plan, PlanNode

HALVINGS = 60  # of the interval that holds the cost of the dearest stage


@dataclass(frozen=True)
class Staged:
    """Which offers to prefer so that the stages come about, what each worker's stage costs, and remarks.

    `seconds`: provider -> seconds of its stage, nodes and crossing bytes, one entry per worker that got one.
    """

    preferred: frozenset[int]
    seconds: Mapping[int, float]
    notes: tuple[str, ...] = ()


def cut_into_stages(
    made: Plan,
    nodes: Sequence[PlanNode],
    offers: Sequence[Offer],
    team: Sequence[int],
    pinned: Collection[int],
    costs: Costs,
    hints: Mapping[int, int] | None = None,
) -> Staged:
    """Share the nodes that the first of `team` owns in `made` among all of `team` (providers, in stage order).

    Indivisible claims stay whole; a claim that holds a pinned node, or that another of the team has not made too, stays
    where it is. `hints`: node -> stage that the model asks for; they are used if every shared node has one and they
    never lead backwards, and are balanced if there are more stages than workers.
    """
    alike = _claims_of_all(offers, team)
    chosen = [claim for unit in made.units if unit.provider == team[0] for claim in unit.claims if claim in alike]
    held = set(pinned)
    chosen = [claim for claim in chosen if held.isdisjoint(offers[claim].nodes)]
    order = _in_order(chosen, nodes, offers)
    if not order:
        return Staged(frozenset(), {})
    seconds, crossing = _weights(order, nodes, offers, costs)
    notes: tuple[str, ...] = ()
    ends: list[int] | None = None
    if hints:
        order, ends, notes = _hinted(order, nodes, offers, hints)
        if ends is not None:
            seconds, crossing = _weights(order, nodes, offers, costs)
    if ends is not None and len(ends) <= len(team):
        cuts = ends
    elif ends is not None:
        at = [0, *ends]
        whole = [sum(seconds[start:end]) for start, end in zip(at, ends, strict=False)]
        cuts = [ends[cut - 1] for cut in balanced(whole, [crossing[end] for end in at], len(team))]
    else:
        cuts = balanced(seconds, crossing, len(team))
    preferred: set[int] = set()
    spent: dict[int, float] = {}
    start = 0
    for position, end in enumerate(cuts):
        preferred.update(alike[claim][position] for claim in order[start:end])
        spent[team[position]] = sum(seconds[start:end]) + crossing[start] + crossing[end]
        start = end
    return Staged(frozenset(preferred), spent, notes)


def balanced(seconds: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """Where the stages of a chain end: min(stages, len(seconds)) rising numbers, the last one len(seconds).

    `seconds` of each element; `crossing[i]`, the cost of cutting before element i (0 and len(seconds) included), which
    both sides pay. The largest sum of a stage is the smallest possible. O(n · stages) per halving of its interval.
    """
    count = len(seconds)
    stages = min(stages, count)
    before = np.concatenate([[0.0], np.cumsum(seconds)])
    cut = np.asarray(crossing, dtype=float)
    opened = before - cut  # a stage i..j costs (before[j] + cut[j]) - (before[i] - cut[i])
    closed = before + cut
    low = 0.0
    high = float(before[-1] + 2 * cut.max())
    best = _layers(opened, closed, stages, high)
    assert best is not None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _layers(opened, closed, stages, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    ends = [count]
    for layer in reversed(range(1, stages)):
        # Of the cuts that are within the bound, the one that leaves the least to this stage's own end.
        end = ends[-1]
        reachable = np.flatnonzero(best[layer][:end])
        ends.append(int(reachable[np.argmax(opened[reachable])]))
    return ends[::-1]


def _layers(
    opened: np.ndarray[tuple[int], np.dtype[np.float64]],
    closed: np.ndarray[tuple[int], np.dtype[np.float64]],
    stages: int,
    bound: float,
) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]] | None:
    """For 0…stages, which cuts end that many stages of at most `bound`; None if the last cut does not end them all."""
    reached = np.zeros(len(opened), dtype=np.bool_)
    reached[0] = True
    layers = [reached]
    for _ in range(stages):
        best = np.maximum.accumulate(np.where(reached, opened, -np.inf))
        following = np.zeros(len(opened), dtype=np.bool_)
        following[1:] = closed[1:] - best[:-1] <= bound
        layers.append(following)
        reached = following
    return layers if reached[-1] else None


def _claims_of_all(offers: Sequence[Offer], team: Sequence[int]) -> dict[int, list[int]]:
    """A claim of the first of the team -> the same claim of each of the team, where all have made it."""
    by_nodes: list[dict[tuple[int, ...], int]] = []
    for provider in team:
        mine = {tuple(sorted(o.nodes)): number for number, o in enumerate(offers) if o.provider == provider}
        by_nodes.append(mine)
    first, *others = by_nodes
    return {
        number: [number, *(mine[key] for mine in others)]
        for key, number in first.items()
        if all(key in mine for mine in others)
    }


def _in_order(claims: Sequence[int], nodes: Sequence[PlanNode], offers: Sequence[Offer]) -> list[int]:
    """The claims in a topological order of the whole graph, as close to the model's own as there is.

    What lies between two claims counts too: nodes that are not among them are vertices of their own.
    """
    vertex_of = list(range(len(nodes)))
    for claim in claims:
        running = [position for position in offers[claim].nodes if not nodes[position].constant]
        for position in running:
            vertex_of[position] = min(running)
    producer = {value: position for position, node in enumerate(nodes) for value in node.outputs}
    waiting: dict[int, int] = dict.fromkeys(vertex_of, 0)
    following: dict[int, list[int]] = {vertex: [] for vertex in waiting}
    for position, node in enumerate(nodes):
        for value in dict.fromkeys(node.inputs):
            source = vertex_of[producer[value]] if value in producer else vertex_of[position]
            if source != vertex_of[position]:
                following[source].append(vertex_of[position])
                waiting[vertex_of[position]] += 1
    claim_at = {
        vertex_of[next(p for p in offers[claim].nodes if not nodes[p].constant)]: claim
        for claim in claims
        if any(not nodes[position].constant for position in offers[claim].nodes)
    }
    ready = [vertex for vertex, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        vertex = heapq.heappop(ready)
        if vertex in claim_at:
            order.append(claim_at[vertex])
        for after in following[vertex]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, after)
    return order


def _weights(
    order: Sequence[int], nodes: Sequence[PlanNode], offers: Sequence[Offer], costs: Costs
) -> tuple[list[float], list[float]]:
    """Seconds of each claim of the order; seconds for the bytes that cross each place where it may be cut."""
    at: dict[int, int] = {}
    seconds: list[float] = []
    for place, claim in enumerate(order):
        running = [position for position in offers[claim].nodes if not nodes[position].constant]
        at.update(dict.fromkeys(running, place))
        told = offers[claim].cost
        seconds.append(sum(costs.nodes[position].seconds for position in running) if told is None else told)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position in sorted(at):
        for value in nodes[position].outputs:
            first[value] = last[value] = at[position]
    for position, place in at.items():
        for value in nodes[position].inputs:
            if value in first:
                last[value] = max(last[value], place)
    change = [0] * (len(order) + 2)
    for value, place in first.items():
        change[place + 1] += costs.nbytes.get(value, 0)
        change[last[value] + 1] -= costs.nbytes.get(value, 0)
    crossing, crossed = [], 0
    for place in range(len(order) + 1):
        crossed += change[place]
        crossing.append(crossed * costs.crossing.byte)
    return seconds, crossing


def _hinted(
    order: list[int], nodes: Sequence[PlanNode], offers: Sequence[Offer], hints: Mapping[int, int]
) -> tuple[list[int], list[int] | None, tuple[str, ...]]:
    """The order by hinted stages and where they end; the order as it was, None and why, if hints cannot be used."""
    stage: dict[int, int] = {}
    for claim in order:
        asked = {hints.get(position) for position in offers[claim].nodes if not nodes[position].constant}
        if len(asked) != 1 or None in asked:
            return order, None, ("pipeline_stage of the model is not used: not every node has one of its own",)
        stage[claim] = asked.pop() or 0
    claim_of = {position: claim for claim in order for position in offers[claim].nodes}
    producer = {value: position for position, node in enumerate(nodes) for value in node.outputs}
    for position, claim in claim_of.items():
        for value in nodes[position].inputs:
            source = claim_of.get(producer.get(value, -1))
            if source is not None and stage[source] > stage[claim]:
                why = f"it leads back from {stage[source]} to {stage[claim]} at node {nodes[position].name!r}"
                return order, None, (f"pipeline_stage of the model is not used: {why}",)
    staged = sorted(order, key=lambda claim: stage[claim])
    ends = [place + 1 for place, claim in enumerate(staged[:-1]) if stage[claim] != stage[staged[place + 1]]]
    return staged, [*ends, len(staged)], ()
