"""What a session tells about itself: the placement report, and the counters of `stats()`."""

from __future__ import annotations

import math
from typing import Any

from outrider.providers.wire.dtypes import is_tensor, storage_bytes
from outrider.providers.wire.failures import first_names
from outrider.providers.wire.graph import Graph, TensorRef, Value
from outrider.scheduler.deploy import Blueprint, UnitGraphs
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.placement import Placer
from outrider.scheduler.planning import CALLER
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


def placement_report(placer: Placer, blueprint: Blueprint, fleet: Fleet) -> PlacementReport:
    """The report of a placed model."""
    graph, plan = blueprint.graph, blueprint.plan
    names = [worker.name for worker in placer.workers]
    cutter = UnitGraphs(graph)
    partition_of: dict[int, int] = {}
    partitions: list[PlacedPartition] = []
    held: dict[str, dict[str, int]] = {name: {} for name in names}
    for number, partition in enumerate(plan.partitions):
        weights: dict[str, int] = {}
        nodes: list[str] = []
        for unit in partition.units:
            partition_of.update(dict.fromkeys(plan.units[unit].nodes, number))
            nodes += [graph.nodes[i].name for i in plan.units[unit].nodes]
            weights.update(_weights(cutter.cut(plan.units[unit], blueprint.interfaces[unit])))
        provider = names[partition.provider]
        held[provider].update(weights)
        partitions.append(PlacedPartition(number, provider, tuple(nodes), sum(weights.values())))
    placed = []
    counts = dict.fromkeys(names, 0)
    for i, node in enumerate(graph.nodes):
        owner = plan.owner[i]
        provider_name = None if owner is None else names[owner]
        if provider_name is not None:
            counts[provider_name] += 1
        served = placer.answers.reference(0 if owner is None else owner, node.name)
        placed.append(PlacedNode(node.name, node.op_type, node.domain, provider_name, partition_of.get(i), served))
    values = cutter.values
    transfers = []
    for edge in blueprint.edges:
        source = THE_CALLER if edge.producer == CALLER else names[plan.partitions[edge.producer].provider]
        targets = dict.fromkeys(names[plan.partitions[consumer].provider] for consumer in edge.consumers)
        for target in [*targets, *([THE_CALLER] if edge.to_caller else [])]:
            if target != source:
                transfers.append(Transfer(edge.value, source, target, _bytes_of(values[edge.value])))
    refusals = [
        Refusal(node.name, node.op_type, node.domain, names[provider], placer.answers.reason(provider, node.name))
        for provider in range(len(names))
        for node in graph.nodes
        if not placer.answers.claimed(provider, node.name)
    ]
    providers = [
        PlacedProvider(worker.name, worker.life.state, counts[worker.name], sum(held[worker.name].values()))
        for worker in placer.workers
    ]
    providers += [PlacedProvider(name, "absent", reason=reason) for name, reason in fleet.absent.items()]
    dropped = [
        f"a claim of {names[one.offer.provider]} on {first_names([graph.nodes[i].name for i in one.offer.nodes])} "
        f"was dropped: {one.reason}"
        for one in plan.dropped
    ]
    notes = tuple(dict.fromkeys([*placer.loaded.notes, *placer.notes, *dropped]))
    return PlacementReport(partitions, placed, transfers, group_declines(refusals), providers, notes)


def session_stats(placer: Placer, fleet: Fleet, runner: Runner) -> dict[str, Any]:
    """Counters of coordinator and workers since the session was made (a worker's: since it last started)."""
    counted = runner.counters()
    copies, copied, allocated, partitions = counted.copies, counted.copied_bytes, 0, 0
    for replica in runner.replicas:
        partitions += len(replica.blueprint.plan.partitions)
        if replica.generation is not None:
            allocated += replica.generation.places.allocated_bytes
    numbers = [str(replica.deployer.session) for replica in runner.replicas]
    providers: dict[str, Any] = {}
    for worker in placer.workers:
        told = fleet.stats_of(worker)
        mine: dict[str, int] = {}
        for number in numbers:
            for name, value in told.get("sessions", {}).get(number, {}).items():
                mine[name] = mine.get(name, 0) + value
        copies += mine.get("copies", 0)
        copied += mine.get("copied_bytes", 0)
        allocated += mine.get("allocated_bytes", 0)
        providers[worker.name] = {**told.get("provider", {}), **mine}
    report = placement_report(placer, runner.replicas[0].blueprint, fleet)
    return {
        "runs": counted.runs,
        "copies": copies,
        "copied_bytes": copied,
        "allocated_bytes": allocated,
        "reference_nodes": len(report.reference_nodes),
        "partitions": partitions,
        "providers": providers,
    }


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


def _bytes_of(value: Value) -> int | None:
    """Bytes of a value whose shape is static; None otherwise."""
    if value.shape is None or not is_tensor(value.dtype) or value.dtype == "string":
        return None
    dims = [dim for dim in value.shape if isinstance(dim, int)]
    if len(dims) != len(value.shape):
        return None
    return storage_bytes(value.dtype, math.prod(dims))
