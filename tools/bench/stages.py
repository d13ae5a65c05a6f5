"""Two workers of one thread each: balanced stages of one model with many runs in flight, and replicas of a model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.scheduler import Fleet, InferenceSession, ProviderSpec
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
        pins = dealt(2 * STAGE, WORKERS, STAGE)
        stages = stack.enter_context(session(whole, fleet, pins, max_in_flight=IN_FLIGHT))
        copies = [stack.enter_context(session(whole, fleet, {"*": name}, max_in_flight=2)) for name in WORKERS]
        variants: dict[str, tuple[Sample, int]] = {
            "one worker, one run after the other": (throughput(runs_of(copies[0], feed), 1), calls),
            "one worker, 2 in flight": (throughput(runs_of(copies[0], feed), 2), calls),
            "two stages, one run after the other": (throughput(runs_of(stages, feed), 1), calls),
            f"two stages, {IN_FLIGHT} in flight": (throughput(runs_of(stages, feed), IN_FLIGHT), calls),
            "two replicas, 2 in flight": (throughput(_in_turn(copies, feed), 2), calls),
        }
        taken = interleave(variants, request.rounds)
    alone, _, single, many, replicas = taken.values()
    names = list(taken)
    return [
        row(names[0], "runs/s", alone),
        row(names[1], "runs/s", taken[names[1]], alone, "one after the other"),
        row(names[2], "runs/s", single),
        row(names[3], "runs/s", many, single, "one after the other", _BUDGET),
        row(names[4], "runs/s", replicas, alone, "one worker", _BUDGET),
    ]


def _in_turn(sessions: list[InferenceSession], feed: dict[str, Any]) -> Callable[[], object]:
    turns = itertools.cycle(sessions)  # `next` on it is atomic
    return lambda: next(turns).run(None, feed)
