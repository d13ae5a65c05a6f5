"""`SessionOptions.strategy`: from the plan by priority to the one that was asked for, and what the report says of it.

| strategy | what it changes |
|---|---|
| `priority` | nothing: each node is its first claimant's |
| `cost` | islands that do not earn their hop go to another claimant (`islands.py`) |
| `pipeline` | workers of one kind share the nodes that all of them claim, in balanced stages (`stages.py`) |
| `replicate` | nothing within a replica; `replicas` says which workers make one |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from outrider.providers.wire.failures import first_names
from outrider.providers.wire.graph import Graph
from outrider.scheduler.costs import Costs, Crossing
from outrider.scheduler.islands import Move, plan_by_cost
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.planning import Offer, Plan, PlanNode
from outrider.scheduler.specs import target
from outrider.scheduler.stages import cut_into_stages

MILLI, MICRO, NANO = 1e3, 1e6, 1e9


class Named(Protocol):
    """What is looked at of a worker."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> ProviderSpec: ...


W = TypeVar("W")


@dataclass(frozen=True)
class Decision:
    """A plan, remarks for the report, what was moved by cost, and the crossing costs if they were weighed."""

    plan: Plan
    notes: tuple[str, ...] = ()
    moves: Sequence[Move] = ()
    crossing: Crossing | None = None


@dataclass(frozen=True)
class Question:
    """What is to be planned. `make`: preferred offers -> plan; `pins`: node -> provider."""

    graph: Graph
    nodes: Sequence[PlanNode]
    offers: Sequence[Offer]
    workers: Sequence[Named]
    pins: Mapping[int, int]
    make: Callable[[Collection[int]], Plan]


def decide(strategy: str, question: Question, costs: Callable[[], Costs]) -> Decision:
    """The plan of a strategy. `costs` is called by those that weigh them."""
    if strategy == "cost":
        return _by_cost(question, costs())
    if strategy == "pipeline":
        return _in_stages(question, costs())
    return Decision(question.make(()))


def teams(specs: Sequence[ProviderSpec]) -> list[list[int]]:
    """Positions of providers that are alike in all but name and instance; in order, those without a like included."""
    found: dict[Hashable, list[int]] = {}
    for position, spec in enumerate(specs):
        kind = replace(target(spec.kind), instance=0)
        alike = (kind, repr(sorted(spec.options.items())), tuple(sorted(spec.env.items())), spec.threads, spec.python)
        found.setdefault(alike, []).append(position)
    return list(found.values())


def replicas(workers: Sequence[W], specs: Sequence[ProviderSpec]) -> list[list[W]]:
    """The workers (with these specs) of each replica, in priority order: the i-th has the i-th of each team.

    There are as many as the largest team has members; those of a smaller team serve several replicas, in turn.
    """
    groups = teams(specs)
    count = max((len(group) for group in groups), default=0)
    members = [sorted(group[number % len(group)] for group in groups) for number in range(count)]
    return [[workers[position] for position in group] for group in members]


def _by_cost(question: Question, costs: Costs) -> Decision:
    made, moves = plan_by_cost(question.make, question.nodes, question.offers, question.pins, costs)
    notes = [
        f"by cost: a hop counts {costs.crossing.hop * MICRO:.1f} µs, a crossing byte {costs.crossing.byte * NANO:.3f} "
        "ns, as measured here"
    ]
    between: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        between.setdefault((move.source, move.target), []).append(move)
    for (source, taker), some in sorted(between.items()):
        names = [question.nodes[position].name for move in some for position in move.nodes]
        gain = sum(move.gain(costs) for move in some)
        hops, nbytes = sum(move.hops for move in some), sum(move.nbytes for move in some)
        notes.append(
            f"by cost: {first_names(names)} went from {question.workers[source].name} to "
            f"{question.workers[taker].name}: {hops} hops and {nbytes} crossing bytes less, an estimated "
            f"{gain * MICRO:.1f} µs a run"
        )
    told = {position for offer in question.offers if offer.cost is not None for position in offer.nodes}
    bounds = sum(not cost.exact for position, cost in enumerate(costs.nodes) if position not in told)
    if bounds:
        notes.append(
            f"by cost: {bounds} of {len(costs.nodes)} nodes have a cost with an unknown part and stay where they are; "
            "warmup() with the shapes of your runs measures them"
        )
    return Decision(made, tuple(notes), moves, costs.crossing)


def _in_stages(question: Question, costs: Costs) -> Decision:
    made = question.make(())
    hints = {
        position: stage
        for position, node in enumerate(question.graph.nodes)
        for stage in [next((d["pipeline_stage"] for d in node.devices if d.get("pipeline_stage") is not None), None)]
        if stage is not None
    }
    preferred: set[int] = set()
    notes: list[str] = []
    for team in teams([worker.spec for worker in question.workers]):
        if len(team) < 2:
            continue
        staged = cut_into_stages(made, question.nodes, question.offers, team, question.pins, costs, hints)
        preferred |= staged.preferred
        notes += staged.notes
        if staged.seconds:
            shares = ", ".join(
                f"{question.workers[provider].name} {seconds * MILLI:.3f} ms"
                for provider, seconds in staged.seconds.items()
            )
            notes.append(f"in stages, with estimated times: {shares}")
    if not preferred:
        notes.append("there are no stages: no two providers of one kind, options and environment claim the same nodes")
        return Decision(made, tuple(notes), crossing=costs.crossing)
    return Decision(question.make(preferred), tuple(notes), crossing=costs.crossing)
