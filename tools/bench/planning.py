"""How long it takes from claims to partitions, for growing graphs: medians of CPU time."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

from outrider.scheduler.planning import Offer, PlanNode, ProviderTraits, plan
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
    """One row per kind of claims, number of providers and size; the ratio is per node, to the smallest size."""
    made: list[Row] = []
    for kind in ("random", "clustered", "fused"):
        for providers in (2, 4):
            first: list[Round] = []
            for size in map(request.calls, SIZES):
                rounds, partitions = _planned(kind, providers, size, request.rounds)
                per_node = [Round(one.p50 / size) for one in rounds]
                first = first or per_node
                ratio = statistics.median(a.p50 / b.p50 for a, b in zip(per_node, first, strict=True))
                what = f"{size:,} nodes, {kind} claims of {providers} providers"
                budget = Budget(value=200) if size == 20_000 else None
                line = row(what, "ms of CPU", rounds, note=f"{partitions:,} partitions")
                made.append(judged(replace(line, ratio=ratio, to="smallest, per node"), budget))
    return made


def _planned(kind: str, providers: int, size: int, rounds: int) -> tuple[list[Round], int]:
    """CPU time of each round, in ms, and the number of partitions."""
    rng = random.Random(size)
    nodes = chain_with_branches(size, rng)
    offers = offers_for(size, providers, kind, rng)
    traits = [ProviderTraits(f"p{number}", merge=number % 2 == 0) for number in range(providers)]
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        planned = plan(nodes, offers, traits, [nodes[-1].outputs[0]])
        taken.append(Round((time.process_time() - start) * 1e3))
    return taken, len(planned.partitions)
