"""Two workers of one thread each: balanced stages of one model with many runs in flight, and replicas of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.scheduler import Fleet, ProviderSpec
from outrider.tools.bench.chains import dealt, matmul_chain, runs_of, session
from outrider.tools.bench.measure import Budget, Request, Row, Sample, interleave, row
from outrider.tools.bench.threads import throughput

STAGE, SIDE = 6, 256  # products per stage, and their size: some milliseconds on one core
IN_FLIGHT = 4
WORKERS = ("cpu", "cpu:1")
_BUDGET = Budget(ratio=1.7, floor=True)


def rows(request: Request) -> list[Row]:
    """Runs per second; the ratios are to the same session used by one caller, and to one worker."""
    calls = request.calls(60)
    feed = {"x": np.ones((SIDE, SIDE), np.float32)}
    whole = matmul_chain(2 * STAGE, SIDE)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet([ProviderSpec(name, threads=1) for name in WORKERS]))

        def opened(**options: Any) -> Callable[[], object]:
            return runs_of(stack.enter_context(session(whole, fleet, **options)), feed)

        single = opened(pins={"*": WORKERS[0]}, max_in_flight=2)
        pinned = opened(pins=dealt(2 * STAGE, WORKERS, STAGE), max_in_flight=IN_FLIGHT)
        pipeline = opened(strategy="pipeline", max_in_flight=IN_FLIGHT)
        replicas = opened(strategy="replicate", max_in_flight=len(WORKERS))
        alone = "one worker, one run after the other"
        in_turn = "two stages by pins, one run after the other"
        variants: dict[str, tuple[Sample, int]] = {
            alone: (throughput(single, 1), calls),
            "one worker, 2 in flight": (throughput(single, 2), calls),
            in_turn: (throughput(pinned, 1), calls),
            f"two stages by pins, {IN_FLIGHT} in flight": (throughput(pinned, IN_FLIGHT), calls),
            f"strategy pipeline, {IN_FLIGHT} in flight": (throughput(pipeline, IN_FLIGHT), calls),
            f"strategy replicate, {len(WORKERS)} in flight": (throughput(replicas, len(WORKERS)), calls),
        }
        taken = interleave(variants, request.rounds)
    bases = {name: in_turn if "stages" in name or "pipeline" in name else alone for name in taken}
    return [
        row(name, "runs/s", rounds, taken[bases[name]], bases[name], None if "one " in name else _BUDGET)
        for name, rounds in taken.items()
    ]
