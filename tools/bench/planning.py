"""How long it takes from claims to partitions, for growing graphs, by each strategy: medians of CPU time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from outrider.scheduler.collector import collector_paused
from outrider.scheduler.costs import Costs, Crossing, NodeCost
from outrider.scheduler.islands import plan_by_cost
from outrider.scheduler.planning import Offer, Plan, PlanNode, ProviderTraits, plan
from outrider.scheduler.stages import cut_into_stages
from outrider.tools.bench.measure import Budget, Request, Round, Row, judged, row

SIZES = (5_000, 20_000, 40_000)


def chain_with_branches(size: int, rng: random.Random) -> list[PlanNode]:
    """`size` nodes of one to three inputs, most of them made shortly before, some far back; a tenth are constants."""
    nodes: list[PlanNode] = []
    constants: list[int] = []
    others: list[int] = []
    for number in range(size):
        if rng.random() < 0.1:
            nodes.append(PlanNode(f"n{number}", (), (f"v{number}",), constant=True))
            constants.append(number)
            continue
        near = others[-20:]
        sources = rng.sample(near, min(len(near), rng.randint(1, 2)))
        if others and rng.random() < 0.1:
            sources.append(rng.choice(others))
        if constants and rng.random() < 0.3:
            sources.append(rng.choice(constants[-20:]))
        nodes.append(PlanNode(f"n{number}", tuple(f"v{source}" for source in sources), (f"v{number}",)))
        others.append(number)
    return nodes


def offers_for(size: int, providers: int, kind: str, rng: random.Random) -> list[Offer]:
    """`random`: half of the nodes each, one by one; `clustered`: stretches of 50; `fused`: random groups of four."""
    offers: list[Offer] = []
    for provider in range(providers):
        last = provider == providers - 1
        if kind == "clustered":
            stretches = [range(start, min(start + 50, size)) for start in range(0, size, 50)]
            mine = [number for stretch in stretches if last or rng.random() < 0.5 for number in stretch]
        else:
            mine = [number for number in range(size) if last or rng.random() < 0.5]
        if kind == "fused" and not last:
            for start in range(0, len(mine), 16):
                block = mine[start : start + 16]
                rng.shuffle(block)
                offers.extend(Offer(provider, tuple(sorted(block[i : i + 4]))) for i in range(0, len(block), 4))
        else:
            offers.extend(Offer(provider, (number,)) for number in mine)
    return offers


def rows(request: Request) -> list[Row]:
    """One row per kind of claims, number of providers, strategy and size; the ratio is per node, to the smallest."""
    made: list[Row] = []
    for kind in ("random", "clustered", "fused"):
        for providers in (2, 4):
            what = f"nodes, {kind} claims of {providers} providers"
            made += _growing(request, what, partial(_by_priority, kind, providers), 200)
    made += _growing(request, "nodes by cost, random claims of 2 providers", _by_cost)
    made += _growing(request, "nodes in 2 stages", _in_stages)
    return made


def _growing(
    request: Request, what: str, problem: Callable[[int], Callable[[], Plan]], budget_ms: float | None = None
) -> list[Row]:
    """One row per size of what `problem(size)` returns."""
    made: list[Row] = []
    first: list[Round] = []
    for size in map(request.calls, SIZES):
        rounds, partitions = _planned(problem(size), request.rounds)
        per_node = [Round(one.p50 / size) for one in rounds]
        first = first or per_node
        ratio = statistics.median(a.p50 / b.p50 for a, b in zip(per_node, first, strict=True))
        budget = Budget(value=budget_ms) if budget_ms and size == 20_000 else None
        line = row(f"{size:,} {what}", "ms of CPU", rounds, note=f"{partitions:,} partitions")
        made.append(judged(replace(line, ratio=ratio, to="smallest, per node"), budget))
    return made


def _by_priority(kind: str, providers: int, size: int) -> Callable[[], Plan]:
    rng = random.Random(size)
    nodes = chain_with_branches(size, rng)
    offers = offers_for(size, providers, kind, rng)
    traits = [ProviderTraits(f"p{number}", merge=number % 2 == 0) for number in range(providers)]
    return lambda: plan(nodes, offers, traits, [nodes[-1].outputs[0]])


def _by_cost(size: int) -> Callable[[], Plan]:
    rng = random.Random(size)
    nodes = chain_with_branches(size, rng)
    offers = offers_for(size, 2, "random", rng)
    return lambda: plan_by_cost(partial(_preferring, nodes, offers), nodes, offers, (), _costs(size))[0]


def _in_stages(size: int) -> Callable[[], Plan]:
    nodes = chain_with_branches(size, random.Random(size))
    offers = [Offer(worker, (number,)) for worker in range(2) for number in range(size)]

    def planned() -> Plan:
        first = _preferring(nodes, offers, ())
        staged = cut_into_stages(first, nodes, offers, (0, 1), (), _costs(size))
        return _preferring(nodes, offers, staged.preferred)

    return planned


def _preferring(nodes: Sequence[PlanNode], offers: Sequence[Offer], preferred: Collection[int]) -> Plan:
    traits = [ProviderTraits("p0", merge=True), ProviderTraits("p1", merge=True)]
    return plan(nodes, offers, traits, [nodes[-1].outputs[0]], None, preferred)


def _costs(size: int) -> Costs:
    """Every node takes 10 µs and makes 4 KB; a hop costs 25 µs."""
    return Costs([NodeCost(1e-5, True)] * size, {f"v{i}": 4096 for i in range(size)}, Crossing(hop=25e-6, byte=1e-10))


def _planned(planned: Callable[[], Plan], rounds: int) -> tuple[list[Round], int]:
    """CPU time of each round, in ms, and the number of partitions."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        with collector_paused():  # as where a session plans
            made = planned()
        taken.append(Round((time.process_time() - start) * 1e3))
    return taken, len(made.partitions)
