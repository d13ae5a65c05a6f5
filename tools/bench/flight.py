"""Runs in flight: how many runs a second a session makes when 1, 2, 4 or 8 callers keep it busy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from outrider.scheduler import Fleet, InferenceSession, ProviderSpec
from outrider.tools.bench.chains import dealt, matmul_chain, relu_chain, runs_of, session, zeros
from outrider.tools.bench.measure import Request, Row, Sample, interleave, row
from outrider.tools.bench.stages import SIDE, STAGE
from outrider.tools.bench.threads import throughput

DEPTHS = (1, 2, 4, 8)


def rows(request: Request) -> list[Row]:
    """Runs per second; the ratio is to one caller."""
    null = ("null", "null:1")
    cpu = [ProviderSpec(name, threads=1) for name in ("cpu", "cpu:1")]
    made: list[Row] = []
    with Fleet([*null]) as fleet:
        made += _depths(request, fleet, "null stages", relu_chain(2, [16]), dealt(2, null), {"x": zeros(64)}, 2000)
    with Fleet(cpu) as fleet:
        model, pins = matmul_chain(2 * STAGE, SIDE), dealt(2 * STAGE, ("cpu", "cpu:1"), STAGE)
        made += _depths(request, fleet, "cpu stages", model, pins, {"x": np.ones((SIDE, SIDE), np.float32)}, 60)
    return made


def _depths(
    request: Request, fleet: Fleet, name: str, model: Any, pins: Mapping[str, str], feed: dict[str, Any], calls: int
) -> list[Row]:
    calls = request.calls(calls)
    variants: dict[str, tuple[Sample, int]] = {}
    with contextlib.ExitStack() as stack:
        for depth in DEPTHS:
            made = stack.enter_context(session(model, fleet, pins, max_in_flight=depth))
            variants[f"two {name}, run from {depth} thread{'s' * (depth > 1)}"] = (
                throughput(runs_of(made, feed), depth),
                calls,
            )
            variants[f"two {name}, run_async, {depth} at once"] = (_futures(made, feed, depth), calls)
        taken = interleave(variants, request.rounds)
    first = next(iter(taken.values()))
    return [row(what, "runs/s", rounds, first, "one caller") for what, rounds in taken.items()]


def _futures(made: InferenceSession, feed: dict[str, Any], depth: int) -> Sample:
    """Runs per second when one thread keeps `depth` runs going with `run_async`."""

    def sample(calls: int) -> list[float]:
        window: list[Future[Any]] = []
        start = time.perf_counter()
        for _ in range(calls):
            if len(window) == depth:
                window.pop(0).result()
            window.append(made.run_async(None, feed))
        wait(window)
        return [calls / (time.perf_counter() - start)]

    return sample
