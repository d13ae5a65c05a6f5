"""What a session tells about itself: the placement report, and the counters of `stats()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.providers.wire.failures import first_names
from outrider.providers.wire.graph import Graph, Node, TensorRef
from outrider.scheduler.candidates import candidates
from outrider.scheduler.costs import value_bytes
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.numbering import Blueprint, UnitGraphs
from outrider.scheduler.options import AT_ONCE
from outrider.scheduler.placement import NOT_CLAIMED, Placer
from outrider.scheduler.planning import CALLER
from outrider.scheduler.replica import Replica
from outrider.scheduler.report import (
    CALLER as THE_CALLER,
)
from outrider.scheduler.report import (
    PlacedNode,
    PlacedPartition,
    PlacedProvider,
    PlacementReport,
    Refusal,
    Transfer,
    group_declines,
)
from outrider.scheduler.runner import Runner
from outrider.scheduler.worker import Worker


def placement_report(replicas: Sequence[Replica], workers: Sequence[Worker], fleet: Fleet) -> PlacementReport:
    """The report of a placed model: partitions and transfers of every replica, each node where the first has it."""
    counts = dict.fromkeys((worker.name for worker in workers), 0)
    held: dict[str, dict[str, int]] = {name: {} for name in counts}
    operators: dict[str, Counter[str]] = {name: Counter() for name in counts}  # of the first replica
    idle: dict[str, str] = {}
    partitions: list[PlacedPartition] = []
    transfers: list[Transfer] = []
    for number, replica in enumerate(replicas):
        placer, plan = replica.placer, replica.blueprint.plan
        names = [worker.name for worker in placer.workers]
        partitions += _partitions(replica, number, len(partitions), names, held)
        transfers += _transfers(replica.blueprint, names)
        for owner in plan.owner:
            if owner is not None:
                counts[names[owner]] += 1
        for i, owner in enumerate(plan.owner):
            if owner is not None and number == 0:
                operators[names[owner]][replica.blueprint.graph.nodes[i].label] += 1
        idle.update((name, _why_idle(placer, i)) for i, name in enumerate(names) if not counts[name])
    health = fleet.health()
    model = replicas[0].placer.model
    providers = [
        PlacedProvider(
            worker.name,
            health[worker.name]["state"],
            counts[worker.name],
            sum(held[worker.name].values()),
            health[worker.name].get("reason", "") or ("" if counts[worker.name] else idle[worker.name]),
            health[worker.name].get("seconds"),
            tuple(fleet.quarantine.holds(model, worker.name)),
            tuple(sorted(operators[worker.name].items())),
        )
        for worker in workers
    ]
    providers += [PlacedProvider(name, "absent", reason=reason) for name, reason in fleet.absent.items()]
    first = replicas[0].placer
    return PlacementReport(
        partitions, _nodes(replicas[0]), transfers, group_declines(_refusals(first)), providers, _notes(replicas)
    )


def _partitions(
    replica: Replica, number: int, before: int, names: Sequence[str], held: Mapping[str, dict[str, int]]
) -> list[PlacedPartition]:
    """The partitions of replica `number`, numbered from `before`; `held` gets the weights of each provider."""
    graph, plan = replica.blueprint.graph, replica.blueprint.plan
    cutter = UnitGraphs(graph)
    partitions = []
    for position, partition in enumerate(plan.partitions, before):
        weights: dict[str, int] = {}
        nodes: list[str] = []
        for unit in partition.units:
            nodes += [graph.nodes[i].name for i in plan.units[unit].nodes]
            weights.update(_weights(cutter.cut(plan.units[unit], replica.blueprint.interfaces[unit])))
        provider = names[partition.provider]
        held[provider].update(weights)
        partitions.append(PlacedPartition(position, provider, tuple(nodes), sum(weights.values()), number))
    return partitions


def _transfers(blueprint: Blueprint, names: Sequence[str]) -> list[Transfer]:
    plan, values = blueprint.plan, UnitGraphs(blueprint.graph).values
    transfers = []
    for edge in blueprint.edges:
        source = THE_CALLER if edge.producer == CALLER else names[plan.partitions[edge.producer].provider]
        targets = dict.fromkeys(names[plan.partitions[consumer].provider] for consumer in edge.consumers)
        for to in [*targets, *([THE_CALLER] if edge.to_caller else [])]:
            if to != source:
                transfers.append(Transfer(edge.value, source, to, value_bytes(values[edge.value])))
    return transfers


def _nodes(replica: Replica) -> list[PlacedNode]:
    placer, plan = replica.placer, replica.blueprint.plan
    partition_of = {
        node: number
        for number, partition in enumerate(plan.partitions)
        for unit in partition.units
        for node in plan.units[unit].nodes
    }
    placed = []
    offered = candidates(placer)
    for i, node in enumerate(replica.blueprint.graph.nodes):
        owner = plan.owner[i]
        name = None if owner is None else placer.workers[owner].name
        served = placer.answers.reference(0 if owner is None else owner, node.name)
        placed.append(PlacedNode(node.name, node.op_type, node.domain, name, partition_of.get(i), served, *offered[i]))
    return placed


def _refusals(placer: Placer) -> Iterator[Refusal]:
    for provider, worker in enumerate(placer.workers):
        for node in placer.graph.nodes:
            if not placer.answers.claimed(provider, node.name):
                reason = placer.answers.reason(provider, node.name)
                yield Refusal(node.name, node.op_type, node.domain, worker.name, reason)


def _notes(replicas: Sequence[Replica]) -> tuple[str, ...]:
    """Remarks of all replicas, without repetitions."""
    placer = replicas[0].placer
    notes: list[str] = []
    if len(replicas) > 1:
        notes.append(f"{len(replicas)} replicas; a node is shown where the first has it")
    elif placer.options.strategy == "replicate":
        notes.append("there is one replica: no two providers are of one kind, with the same options and environment")
    if placer.options.strategy in AT_ONCE:
        workers = dict.fromkeys(worker for replica in replicas for worker in replica.placer.workers)
        notes.append(f"threads: {', '.join(f'{worker.name} {worker.threads}' for worker in workers)}")
    for replica in replicas:
        placer, graph = replica.placer, replica.blueprint.graph
        notes += [*placer.loaded.notes, *placer.notes, *placer.decision.notes]
        for one in replica.blueprint.plan.dropped:
            claimed = first_names([graph.nodes[i].name for i in one.offer.nodes])
            notes.append(f"a claim of {placer.workers[one.offer.provider].name} on {claimed} was dropped: {one.reason}")
    return tuple(dict.fromkeys(notes))


def _why_idle(placer: Placer, provider: int) -> str:
    """Why a provider got nothing."""
    taken = [move.target for move in placer.decision.moves if move.source == provider]
    if taken:
        names = ", ".join(placer.workers[target].name for target in sorted(set(taken)))
        return f"what it would have had does not earn its hops and went to {names}"
    claimed = [i for i, node in enumerate(placer.graph.nodes) if placer.answers.claimed(provider, node.name)]
    if not claimed and provider in placer.answers.away:
        return placer.answers.away[provider]
    if not claimed and any(held == provider for held, _ in placer.answers.withheld):
        return "all that it claims is quarantined"
    if not claimed:
        return _why_nothing_claimed(placer, provider)
    owners = {owner for i in claimed for owner in [placer.plan.owner[i]] if owner is not None}
    if not owners:
        return "it claims constants only, which their readers compute"
    return f"all that it claims went to {', '.join(placer.workers[owner].name for owner in sorted(owners))}"


def _why_nothing_claimed(placer: Placer, provider: int) -> str:
    """With the reason that it gives, or gives most often."""
    refused = [name for one, name in placer.answers.refused if one == provider]
    reasons = Counter(placer.answers.reason(provider, name) for name in refused)
    story = "it could not compile what it claimed"
    if not refused:
        reasons = Counter(placer.answers.reason(provider, node.name) for node in placer.graph.nodes)
        story = "it claims none of the nodes"
    reason, count = min(reasons.items(), key=lambda one: (-one[1], one[0]), default=(NOT_CLAIMED, 0))
    if reason == NOT_CLAIMED:
        return story
    return f"{story}: {reason}" + (f" ({count} of {reasons.total()})" if len(reasons) > 1 else "")


def session_stats(runner: Runner, workers: Sequence[Worker], fleet: Fleet) -> dict[str, Any]:
    """Counters of coordinator and workers since the session was made (a worker's: since it last started)."""
    counted = runner.counters()
    copies, copied, allocated, partitions = counted.copies, counted.copied_bytes, 0, 0
    for replica in runner.replicas:
        partitions += len(replica.blueprint.plan.partitions)
        if replica.generation is not None:
            allocated += replica.generation.places.allocated_bytes
    numbers = [str(replica.deployer.session) for replica in runner.replicas]
    providers: dict[str, Any] = {}
    served: dict[tuple[str, int], list[float]] = {}  # (session number, partition) -> [runs, seconds]
    operators: dict[str, list[float]] = {}
    for worker in workers:
        told = fleet.stats_of(worker)
        mine: dict[str, int] = {}
        for number in numbers:
            counters = dict(told.get("sessions", {}).get(number, {}))
            served.update(((number, partition), totals) for partition, *totals in counters.pop("partitions", []))
            for operator, totals in counters.pop("operators", {}).items():
                before = operators.get(operator, [0, 0])
                operators[operator] = [before[0] + totals[0], before[1] + totals[1]]
            for name, value in counters.items():
                mine[name] = mine.get(name, 0) + value
        copies += mine.get("copies", 0)
        copied += mine.get("copied_bytes", 0)
        allocated += mine.get("allocated_bytes", 0)
        providers[worker.name] = {**told.get("provider", {}), **mine}
        if told and worker.hello is not None:
            providers[worker.name]["versions"] = dict(worker.hello.versions)
    first = runner.replicas[0]
    per_partition = [one for replica in runner.replicas for one in _per_partition(replica, served)]
    stats = {
        "runs": counted.runs,
        "copies": copies,
        "copied_bytes": copied,
        "allocated_bytes": allocated,
        "reference_nodes": sum(one.reference for one in _nodes(first)),
        "partitions": partitions,
        "providers": providers,
        "per_partition": [{**one, "partition": number} for number, one in enumerate(per_partition)],
        "per_operator": _per_operator(first.blueprint.graph, operators),
    }
    crossing = first.placer.decision.crossing
    if crossing is not None:
        stats["crossing"] = {"hop_seconds": crossing.hop, "byte_seconds": crossing.byte}
    return stats


def _per_partition(replica: Replica, served: Mapping[tuple[str, int], Sequence[float]]) -> list[dict[str, Any]]:
    """Of each partition what it is, how many runs its worker has served, and how many seconds they took there."""
    blueprint = replica.blueprint
    made = []
    for number, partition in enumerate(blueprint.plan.partitions):
        runs, seconds = served.get((str(replica.deployer.session), number), (0, 0))
        nodes = sum(len(blueprint.plan.units[unit].nodes) for unit in partition.units)
        provider = blueprint.workers[partition.provider].name
        made.append({"partition": number, "provider": provider, "nodes": nodes, "runs": runs, "seconds": seconds})
    return made


def _per_operator(graph: Graph, operators: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """`operators`: 'domain::op' -> (executions, seconds), of what was traced."""
    nodes = Counter(node.label for node in _every_node(graph))
    return {
        operator: {"nodes": nodes[operator], "runs": runs, "seconds": seconds}
        for operator, (runs, seconds) in sorted(operators.items())
    }


def _every_node(graph: Graph) -> Iterator[Node]:
    """Those of bodies too."""
    for node in graph.nodes:
        yield node
        for _, body in node.bodies():
            yield from _every_node(body)


def _weights(graph: Graph) -> dict[str, int]:
    """Constant -> bytes, of a unit and the bodies of its nodes."""
    found: dict[str, int] = {}
    for name, ref in graph.constants.items():
        if isinstance(ref, TensorRef):
            found[name] = ref.nbytes
    for node in graph.nodes:
        for _, body in node.bodies():
            for name, nbytes in _weights(body).items():
                found[f"{node.name}/{name}"] = nbytes
    return found
